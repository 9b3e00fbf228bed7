"""Tiles of a pipeline's stages by 1F1B: a tile goes back as soon as the stages behind have returned its gradient, while others go forward.

As micro-batches do in 1F1B, but that a tile's gradient is final only when those below it, whose windows reach into it, went back as well;
``3`` stands for a tile's forward, ``3'`` for its backward pass::

    stage 0    0 1 2 3    0' 4 1' 5 2' 6 3' ...
    stage 1        0,0' 1,1' 2,2' 3,3' ...        there and back at once

So a stage holds a few tiles' graphs, and computes none twice. The order follows from the rows that tiles read, which all ranks know of each other: every
rank works out the turns of all. No live norm may stand in the way, nor an exchange, before which all tiles wait for each other.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from itertools import chain
from typing import Iterable, Iterator, Sequence

from distseg.runtime.operations import (
    BackwardTile,
    Drop,
    ForwardTile,
    OfTile,
    Operation,
    Send,
    SendGradient,
)
from distseg.runtime.tile_program import (
    StagePlan,
    backward,
    expected,
    expected_back,
    forward,
    outputs,
)

_Awaited = tuple[
    tuple, int, int
]  # rows that must have come from other ranks: of what, its first row, the row before which it must be there


@dataclass(frozen=True)
class _Group:
    """A tile, and what is sent or dropped after it."""

    operations: Sequence[Operation]
    awaited: Sequence[_Awaited]
    kept: Sequence[tuple]
    """Tiles that must have gone forward."""


def can_interleave(works: Sequence[StagePlan]) -> bool:
    """Of a micro-batch, by rank: whether there are several, each with a stage of its own, and no map of which all must be made before any is read."""
    apart = all(len(work.stages) == 1 for work in works)
    return (
        len(works) > 1
        and apart
        and not any(work.whole(p) for work in works for s in work.mine for p in work.sources(s))
    )


def interleaved(works: Sequence[Sequence[StagePlan]]) -> list[list[Operation]]:
    """The operations of each rank of a pipeline.

    Args:
        works: by rank, which is its stage's number, and micro-batch.
    """
    streams = [*map(_streams, works)]
    least = _Turns(works, streams, [1] * len(works))
    list(least.taken())
    ahead = [
        limit + 2 * (len(works) - 1 - rank) * _abreast(there)
        for rank, (limit, (there, _)) in enumerate(zip(least.limits, streams))
    ]
    turns = _Turns(works, streams, ahead)
    found = [
        [op for work in those for op in expected(work)]
        + [op for work in those for op in expected_back(work, work.stages[0])]
        for those in works
    ]
    for rank, group in turns.taken():
        found[rank] += group.operations
    return found


class _Turns:
    """Ranks that take turns, a tile each.

    Args:
        streams: of each rank, there and back.
        limits: tiles that may be under way on each rank; more, where otherwise none could go on.
    """

    def __init__(
        self,
        works: Sequence[Sequence[StagePlan]],
        streams: Sequence[tuple[list[_Group], list[_Group]]],
        limits: Sequence[int],
    ):
        self.works, self.limits = works, list(limits)
        self.there, self.back = ([*map(deque, each)] for each in zip(*streams))
        self._under_way: list[set] = [set() for _ in works]
        self._sent: dict[tuple, int] = {}

    def taken(self) -> Iterator[tuple[int, _Group]]:
        """(rank, what it does), turn by turn."""
        ranks = range(len(self.works))
        while any(self.there) or any(self.back):
            able = [rank for rank in ranks if self._can_go(rank, self._stream(rank))]
            for rank in able:
                yield rank, self._take(rank, self._stream(rank))
            if not able:
                yield from self._forced(ranks)

    def _stream(self, rank: int) -> deque[_Group]:
        there, back = self.there[rank], self.back[rank]
        return there if there and (not back or self._has_room(rank, self.limits[rank])) else back

    def _has_room(self, rank: int, limit: float) -> bool:
        """For one more tile, which is of no later micro-batch than 1F1B would have under way."""
        under_way = self._under_way[rank]
        first = min((tile[0] for tile in under_way), default=math.inf)
        return (
            len(under_way) < limit
            and self.there[rank][0].operations[0].micro_batch < first + len(self.works) - rank
        )

    def _forced(self, ranks: range) -> Iterator[tuple[int, _Group]]:
        """Where none can go on in its turn: a tile that can go back, or else one more that goes forward."""
        for rank in reversed(ranks):
            if self._can_go(rank, self.back[rank]):
                yield rank, self._take(rank, self.back[rank])
                return
        able = [rank for rank in ranks if self._can_go(rank, self.there[rank])]
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
            if isinstance(op, Send):  # a gradient too
                self._sent[_key(op, rank, op.block, op.position)] = op.final
        return group


def _streams(works: Sequence[StagePlan]) -> tuple[list[_Group], list[_Group]]:
    """What a rank does on the way there and on the way back; all in one, of the rank whose tiles turn around."""
    stage = works[0].stages[0]
    groups = lambda *ways: [
        group for work in works for group in _groups(chain(*(way(work) for way in ways)), work)
    ]
    there, back = (lambda work: forward(work, stage)), (lambda work: backward(work, stage))
    if any(map(works[0].is_last, works[0].mine)):
        return groups(there, outputs, back), []
    return groups(there), groups(back)


def _groups(operations: Iterable[Operation], work: StagePlan) -> list[_Group]:
    """What comes before the first tile comes behind the last: maps that only others read, which go when all is sent."""
    before: list[Operation] = []
    found: list[list[Operation]] = []
    for op in operations:
        if isinstance(op, OfTile):
            found.append([op])
        else:
            (found[-1] if found else before).append(op)
    if found:
        found[-1] += before
    return [_group(those, work) for those in found or ([before] if before else [])]


def _group(operations: Sequence[Operation], work: StagePlan) -> _Group:
    awaited = [one for op in operations for one in _awaited(op, work)]
    return _Group(
        operations, awaited, [op.tile for op in operations if isinstance(op, BackwardTile)]
    )


def _abreast(there: Sequence[_Group]) -> int:
    """The tiles of all segments of a stage for some rows of the image: as many more under way, and no stage waits for the next one's answer."""
    tiles = [op for group in there for op in group.operations if isinstance(op, ForwardTile)]
    bands = Counter(
        segment
        for segment, *_ in {(op.segment, op.micro_batch, op.block, op.box.start[0]) for op in tiles}
    )
    return -(-len(tiles) // max(bands.values(), default=1))


def _awaited(op: Operation, work: StagePlan) -> Iterator[_Awaited]:
    rows_of = lambda block, position: work.cut.made(block, position)
    if isinstance(op, Drop) and op.position in work.elsewhere:
        for block in range(work.blocks):
            box = rows_of(block, op.position)
            yield ("map", op.micro_batch, block, op.position), box.start[0], box.stop[0]
    if isinstance(op, OfTile):
        for position, (_, stop) in work.cut.rows(
            op.block, op.segment, (op.box.start[0], op.box.stop[0])
        ).items():
            if position in work.elsewhere:
                yield (
                    ("map", op.micro_batch, op.block, position),
                    rows_of(op.block, position).start[0],
                    stop,
                )
    if isinstance(op, BackwardTile):
        position = work.stop(op.segment)
        for reader in work.readers[position]:
            yield (
                ("gradient", reader, op.micro_batch, op.block, position),
                rows_of(op.block, position).start[0],
                op.box.stop[0],
            )


def _key(op: Send, rank: int, block: int, position: int) -> tuple:
    if isinstance(op, SendGradient):
        return "gradient", rank, op.micro_batch, block, position
    return "map", op.micro_batch, block, position
