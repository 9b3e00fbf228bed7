"""Interleaves the tiles of a pipeline's stages by 1F1B.

The backward pass of a tile starts as soon as the later stages have returned its gradient, while
other tiles are in their forward pass. 1F1B does the same with micro-batches. But a tile's gradient
is final only after the backward passes of the tiles below it, because their windows overlap it.
``3`` is a tile's forward pass, ``3'`` its backward pass::

    stage 0    0 1 2 3    0' 4 1' 5 2' 6 3' ...
    stage 1        0,0' 1,1' 2,2' 3,3' ...        forward and backward at once

A stage therefore holds the graphs of a few tiles, and computes no tile twice. The order follows
from the rows that tiles read. All ranks know these rows, so every rank computes the turns of all
ranks. No active norm (a norm that computes its statistics from the current images) and no exchange
may lie between the stages' layers, because all tiles would wait for each other there.

Words of this module:

- *plan*: the segments, feature maps and tiles of one rank for one micro-batch
  (:class:`distseg.runtime.tile_program.StagePlan`).
- *row*: the cells of a feature map with one index along its first spatial dim. Maps travel between
  ranks row by row.
- *group*: the pass of one tile and the operations that follow it (:class:`_Group`).
- *turn*: a unit of simulated time, in which each rank runs at most one group.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from distseg.runtime.operations import (
    BackwardTile,
    Drop,
    ForwardTile,
    Operation,
    SendGradRows,
    SendRows,
    TileOperation,
)
from distseg.runtime.tile_program import (
    StagePlan,
    backward,
    forward,
    gradient_receives,
    output_passes,
    receives,
)

# Rows that must have arrived from another rank: key of the feature map or gradient, its first row,
# and the row before which all rows must have arrived.
_Awaited = tuple[tuple, int, int]


@dataclass(frozen=True)
class _Group:
    """Pass of one tile, with the sends and the releases of feature maps that follow it.

    Attributes:
        operations: the pass, then the sends and releases.
        awaited: the rows that must have arrived from other ranks before the group can run.
        kept: the tiles of which the group runs the backward pass. Their forward passes must have
            run before.
    """

    operations: Sequence[Operation]
    awaited: Sequence[_Awaited]
    kept: Sequence[tuple]


def can_interleave(plans: Sequence[StagePlan]) -> bool:
    """Return True if forward and backward passes of tiles can alternate on each rank.

    This needs several ranks with one stage each. No segment may come after an active norm or a halo
    exchange, because all tiles would wait for each other there.

    Args:
        plans: the plan of each rank for one micro-batch.
    """
    apart = all(len(plan.stages) == 1 for plan in plans)
    return (
        len(plans) > 1
        and apart
        and not any(
            plan.is_barrier(p) for plan in plans for s in plan.mine for p in plan.sources(s)
        )
    )


def interleaved(plans: Sequence[Sequence[StagePlan]]) -> list[list[Operation]]:
    """Return the operations of each rank of a pipeline, with tiles in the order of 1F1B.

    Args:
        plans: the plan of each rank for each micro-batch, ``plans[rank][micro_batch]``. The number
            of a rank is the number of its stage.
    """
    streams = [*map(_streams, plans)]
    least = _Turns(plans, streams, [1] * len(plans))
    list(least.taken())
    ahead = [
        limit + 2 * (len(plans) - 1 - rank) * _tiles_per_band(forwards)
        for rank, (limit, (forwards, _)) in enumerate(zip(least.limits, streams))
    ]
    turns = _Turns(plans, streams, ahead)
    found = [
        [op for plan in those for op in receives(plan)]
        + [op for plan in those for op in gradient_receives(plan, plan.stages[0])]
        for those in plans
    ]
    for rank, group in turns.taken():
        found[rank] += group.operations
    return found


class _Turns:
    """Simulation of all ranks that decides the order of each rank's tile passes.

    In each turn of the simulation, every rank that can go on runs one group: the pass of one tile
    and the operations that follow it.

    Args:
        plans: the plan of each rank for each micro-batch, ``plans[rank][micro_batch]``.
        streams: for each rank, its forward groups and its backward groups (:func:`_streams`).
        limits: for each rank, how many of its tiles may wait for their backward pass at once. If
            no rank could go on otherwise, the simulation raises a limit.
    """

    def __init__(
        self,
        plans: Sequence[Sequence[StagePlan]],
        streams: Sequence[tuple[list[_Group], list[_Group]]],
        limits: Sequence[int],
    ):
        self.plans, self.limits = plans, list(limits)
        self.forwards, self.backwards = ([*map(deque, each)] for each in zip(*streams))
        self._under_way: list[set] = [set() for _ in plans]
        self._sent: dict[tuple, int] = {}

    def taken(self) -> Iterator[tuple[int, _Group]]:
        """Yield (rank, group) in the order in which the groups of all ranks run, turn by turn."""
        ranks = range(len(self.plans))
        while any(self.forwards) or any(self.backwards):
            able = [rank for rank in ranks if self._can_go(rank, self._stream(rank))]
            for rank in able:
                yield rank, self._take(rank, self._stream(rank))
            if not able:
                yield from self._forced(ranks)

    def _stream(self, rank: int) -> deque[_Group]:
        forwards, backwards = self.forwards[rank], self.backwards[rank]
        if forwards and (not backwards or self._has_room(rank, self.limits[rank])):
            return forwards
        return backwards

    def _has_room(self, rank: int, limit: float) -> bool:
        """Return True if the rank may run the forward pass of one more tile.

        It may if fewer than ``limit`` of its tiles wait for their backward pass, and if 1F1B would
        have started the micro-batch of the next tile by now.
        """
        under_way = self._under_way[rank]
        first = min((tile[0] for tile in under_way), default=math.inf)
        return (
            len(under_way) < limit
            and self.forwards[rank][0].operations[0].micro_batch < first + len(self.plans) - rank
        )

    def _forced(self, ranks: range) -> Iterator[tuple[int, _Group]]:
        """Resolve a turn of the simulation in which no rank can go on.

        Yield (rank, group) of a backward pass that is ready. If no backward pass is ready, yield
        nothing, and let one more tile of one rank wait for its backward pass.
        """
        for rank in reversed(ranks):
            if self._can_go(rank, self.backwards[rank]):
                yield rank, self._take(rank, self.backwards[rank])
                return
        able = [rank for rank in ranks if self._can_go(rank, self.forwards[rank])]
        self.limits[[rank for rank in able if self._has_room(rank, math.inf)][-1]] += 1

    def _can_go(self, rank: int, stream: deque[_Group]) -> bool:
        if not stream:
            return False
        group = stream[0]
        return self._under_way[rank].issuperset(group.kept) and all(
            self._sent.get(key, start) >= rows for key, start, rows in group.awaited
        )

    def _take(self, rank: int, stream: deque[_Group]) -> _Group:
        group = stream.popleft()
        self._under_way[rank].difference_update(group.kept)
        for op in group.operations:
            if isinstance(op, ForwardTile):
                self._under_way[rank].add(op.tile)
            if isinstance(op, SendRows):  # True for SendGradient too.
                self._sent[_key(op, rank, op.block, op.tensor_id)] = op.final
        return group


def _streams(plans: Sequence[StagePlan]) -> tuple[list[_Group], list[_Group]]:
    """Return the forward groups and the backward groups of a rank, in order.

    A group is the pass of one tile and the operations that follow it. The last rank runs the
    backward pass of an output tile right after its forward pass. So the last rank gets one list
    with all groups, and an empty second list.

    Args:
        plans: the rank's plan for each micro-batch.
    """
    stage = plans[0].stages[0]

    def groups(*ways):
        return [
            group for plan in plans for group in _groups(chain(*(way(plan) for way in ways)), plan)
        ]

    passes = (lambda plan: forward(plan, stage)), (lambda plan: backward(plan, stage))
    if any(map(plans[0].is_last, plans[0].mine)):
        return groups(passes[0], output_passes, passes[1]), []
    return groups(passes[0]), groups(passes[1])


def _groups(operations: Iterable[Operation], plan: StagePlan) -> list[_Group]:
    """Return the operations of one micro-batch, grouped by tile.

    A group begins with the pass of a tile. Operations before the first tile are moved behind the
    last tile: they drop feature maps that only other ranks read, and a map can be dropped only once
    all of its rows are sent.

    Args:
        operations: the operations, in order.
        plan: the rank's plan of the micro-batch.
    """
    before: list[Operation] = []
    found: list[list[Operation]] = []
    for op in operations:
        if isinstance(op, TileOperation):
            found.append([op])
        else:
            (found[-1] if found else before).append(op)
    if found:
        found[-1] += before
    return [_group(those, plan) for those in found or ([before] if before else [])]


def _group(operations: Sequence[Operation], plan: StagePlan) -> _Group:
    awaited = [one for op in operations for one in _awaited(op, plan)]
    return _Group(
        operations, awaited, [op.tile for op in operations if isinstance(op, BackwardTile)]
    )


def _tiles_per_band(forwards: Sequence[_Group]) -> int:
    """Return how many tiles a rank computes in its forward passes per row of tiles, rounded up.

    The number of tiles in all segments is divided by a number of rows of tiles: that of the segment
    with the most rows. :func:`interleaved` adds multiples of the result to the number of tiles that
    may wait for their backward pass on a rank, so that no stage waits for the gradients of the next
    stage.

    Args:
        forwards: the forward groups of a rank.
    """
    tiles = [op for group in forwards for op in group.operations if isinstance(op, ForwardTile)]
    bands = Counter(
        segment
        for segment, *_ in {(op.segment, op.micro_batch, op.block, op.box.start[0]) for op in tiles}
    )
    return -(-len(tiles) // max(bands.values(), default=1))


def _awaited(op: Operation, plan: StagePlan) -> Iterator[_Awaited]:
    """Yield (key, start, stop) for the rows that an operation waits for from other ranks.

    The key names a feature map or gradient, of which rows ``start`` to ``stop - 1`` must arrive.
    """

    def rows_of(block, tensor_id):
        return plan.grid.computed(block, tensor_id)

    if isinstance(op, Drop) and op.tensor_id in plan.elsewhere:
        for block in range(plan.blocks):
            box = rows_of(block, op.tensor_id)
            yield ("map", op.micro_batch, block, op.tensor_id), box.start[0], box.stop[0]
    if isinstance(op, TileOperation):
        for tensor_id, (_, stop) in plan.grid.rows(
            op.block, op.segment, (op.box.start[0], op.box.stop[0])
        ).items():
            if tensor_id in plan.elsewhere:
                yield (
                    ("map", op.micro_batch, op.block, tensor_id),
                    rows_of(op.block, tensor_id).start[0],
                    stop,
                )
    if isinstance(op, BackwardTile):
        tensor_id = plan.stop(op.segment)
        for reader in plan.readers[tensor_id]:
            yield (
                ("gradient", reader, op.micro_batch, op.block, tensor_id),
                rows_of(op.block, tensor_id).start[0],
                op.box.stop[0],
            )


def _key(op: SendRows, rank: int, block: int, tensor_id: int) -> tuple:
    if isinstance(op, SendGradRows):
        return "gradient", rank, op.micro_batch, block, tensor_id
    return "map", op.micro_batch, block, tensor_id
