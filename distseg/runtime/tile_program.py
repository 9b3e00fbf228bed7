"""Lists the operations of a rank that streams its part of an image tile by tile.

The lists follow from three facts: the segments of the network, the tiles of each segment's result,
and the feature maps that each segment reads.

A tile can run once the rows that it reads are final. If tiles of several segments can run, a tile
of the last of these segments runs first. A later stage therefore begins with its first tiles long
before this stage ends. An active norm computes its statistics from the current images, so it waits
for all tiles. In the picture ``|`` is this wait::

    segments 0, 1, 2, no active norms, three rows of tiles      0  0 1  0 1 2  1 2  2
    an active norm before segment 1                             0  0  0 | 1  1 2  1 2  2

The backward passes run in the reverse order. The backward pass of a tile runs once all segments
that read its rows have run their backward passes on these rows.

Words of this module:

- *segment*: a run of layers between two feature maps that exist as a whole.
- *block*: the index of a tile batch, which is a tile of one or more images of equal size.
- *row*: the cells of a feature map with one index along its first spatial dim. A *row of tiles* is
  the tiles that begin and end at the same rows of cells.
- *final*: rows of cells, or their gradients, are final once no later pass changes them.
- *barrier*: a feature map of which all cells must be computed before any cell is read, because an
  active norm or a halo exchange follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

from distseg.runtime.actions import Action, Backward, Forward
from distseg.runtime.operations import (
    ApplyStatisticsGrad,
    BackwardTile,
    Drop,
    DropGradient,
    FetchHalo,
    FinalizeStatistics,
    ForwardTile,
    Loss,
    Measure,
    Operation,
    OutputTile,
    RecvGradRows,
    RecvRows,
    SendGradRows,
    SendHaloGrad,
    SendRows,
    Statistic,
    TileOperation,
)  # fmt: skip
from distseg.tiling.access_pattern import Span
from distseg.tiling.segment import Segment, TilePlan
from distseg.tiling.tile import Box


class TileGrid(Protocol):
    """Interface of an object that has the boxes of one rank's tiles, for one micro-batch.

    The methods take the index of a tile batch (``block``), the index of a segment, and the number
    of a feature map (``tensor_id``).

    Attributes:
        blocks: the number of tile batches.
    """

    blocks: int

    def tiles(self, block: int, segment: int) -> Sequence[Box]:
        """Return the boxes of the tiles of a segment's result, one row of tiles after another."""

    def rows(self, block: int, segment: int, rows: Span) -> dict[int, Span]:
        """Return which rows of its input feature maps a segment reads to compute some rows.

        Args:
            block: the index of the tile batch.
            segment: the index of the segment.
            rows: the rows (start, stop) of the segment's result to compute.

        Returns:
            For the number of each feature map that the segment reads, its rows (start, stop).
        """

    def computed(self, block: int, tensor_id: int) -> Box:
        """Return the box of a feature map that this rank computes."""

    def tile_plan(self, op: TileOperation) -> TilePlan:
        """Return, for one tile, the boxes that each layer of its segment reads and computes."""


@dataclass(frozen=True)
class StagePlan:
    """Segments and feature maps that one rank handles for one micro-batch.

    Args:
        segments: all segments of the network.
        mine: the numbers of the segments that this rank runs.
        active: the numbers of the feature maps that this rank's active norms read.
        points: the numbers of the feature maps before a halo exchange: this rank reads their halo
            from other ranks that share the image.
        makers: for each feature map, the rank of the pipeline that computes it.
        readers: for each feature map, the other ranks of the pipeline that read it.
        grid: the tiles of the micro-batch.
        back: True if backward passes follow. Otherwise a feature map is dropped once this rank has
            read it.
        number: the index of the micro-batch.
    """

    segments: Sequence[Segment]
    mine: Sequence[int]
    active: Container[int]
    points: Container[int]
    makers: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]
    grid: TileGrid
    back: bool = True
    number: int = 0

    @property
    def blocks(self) -> int:
        """Number of tile batches of the micro-batch."""
        return self.grid.blocks

    def is_barrier(self, tensor_id: int) -> bool:
        """Return True if an active norm or a halo exchange follows a feature map.

        All of its cells must then be computed before any cell is read.
        """
        return tensor_id in self.active or tensor_id in self.points

    def of_stage(self, stage: int) -> list[int]:
        """Return the segments of this rank that belong to a stage."""
        return [s for s in self.mine if self.segments[s].stage == stage]

    @property
    def stages(self) -> list[int]:
        """Numbers of the stages whose segments this rank runs, in increasing order."""
        return sorted({self.segments[s].stage for s in self.mine})

    @cached_property
    def made(self) -> dict[int, int]:
        """Dict from the index of a feature map to the index of the segment that computes it.

        It has only the feature maps that this rank computes.
        """
        return {self.segments[s].result: s for s in self.mine}

    @cached_property
    def elsewhere(self) -> list[int]:
        """Numbers of the feature maps that this rank reads and other ranks compute."""
        return sorted({p for s in self.mine for p in self.sources(s)} - set(self.made) - {0})

    def sources(self, segment: int) -> Sequence[int]:
        """Return the numbers of the feature maps that a segment reads."""
        return self.segments[segment].sources

    def stop(self, segment: int) -> int:
        """Return the index of the feature map that is the result of a segment."""
        return self.segments[segment].result

    def is_last(self, segment: int) -> bool:
        """Return True if the segment's result is the result of the network."""
        return segment == len(self.segments) - 1

    def reading(self, tensor_id: int) -> list[int]:
        """Return the segments of this rank that read a feature map."""
        return [s for s in self.mine if tensor_id in self.sources(s)]

    def stages_reading(self, tensor_id: int) -> list[int]:
        """Return the stages of this rank that read a feature map."""
        return sorted({self.segments[s].stage for s in self.reading(tensor_id)})


def receives(plan: StagePlan) -> list[Operation]:
    """Return the operations that receive the feature maps of other ranks which this rank reads."""
    return [RecvRows(plan.number, tensor_id) for tensor_id in plan.elsewhere]


def gradient_receives(plan: StagePlan, stage: int) -> list[Operation]:
    """Return the operations that receive the gradients of the feature maps that a stage sent."""
    made = [plan.stop(s) for s in plan.of_stage(stage) if not plan.is_last(s)]
    return [
        RecvGradRows(plan.number, tensor_id, reader)
        for tensor_id in made
        for reader in plan.readers[tensor_id]
    ]


def forward(plan: StagePlan, stage: int) -> Iterator[Operation]:
    """Yield the operations of the forward passes of a stage's segments on this rank.

    The network's last segment is left out, because :func:`output_passes` has its operations.
    """
    fronts = _Fronts(plan, [s for s in plan.of_stage(stage) if not plan.is_last(s)])
    for tensor_id in dict.fromkeys(p for s in plan.of_stage(stage) for p in plan.sources(s)):
        # Another rank computes this map, and this stage is the first one of this rank to read it.
        if tensor_id not in plan.made and plan.stages_reading(tensor_id)[0] == stage:
            yield from [Measure(plan.number, tensor_id)] if tensor_id in plan.active else ()
            yield from _collectives_on(plan, tensor_id)
    every = reversed(fronts.segments)
    for segment, band in fronts.in_order(every, lambda _, band: fronts.can_go_forward(band)):
        stop = plan.stop(segment)
        yield from (ForwardTile(plan.number, segment, band.block, box) for box in band.boxes)
        if plan.readers[stop]:
            yield SendRows(plan.number, stop, band.block, band.rows[1])
        if fronts.is_done(segment):
            yield from _collectives_on(plan, stop)
            yield from _drop_read_maps(
                plan,
                segment,
                lambda s: (
                    plan.segments[s].stage < stage or s in fronts.segments and fronts.is_done(s)
                ),
            )


def output_passes(plan: StagePlan, back: bool | None = None) -> Iterator[Operation]:
    """Yield the operations of the network's last segment, which computes the output tiles.

    Args:
        back: True to run backward passes too; by default the value of ``plan.back``.
    """
    back = plan.back if back is None else back
    for segment in filter(plan.is_last, plan.mine):
        fronts = _Fronts(plan, [segment])
        for _, band in fronts.in_order([segment], lambda *_: True):
            yield from (
                OutputTile(plan.number, segment, band.block, box, back) for box in band.boxes
            )
            if back:
                yield from _final_gradient_rows(plan, fronts, segment, band.block)
        yield from _drop_read_maps(plan, segment, lambda _: True)


def backward(plan: StagePlan, stage: int) -> Iterator[Operation]:
    """Yield the operations of the backward passes of a stage's segments, last segment first.

    The network's last segment is left out, because :func:`output_passes` has its backward passes.
    """
    fronts = _Fronts(plan, [s for s in plan.of_stage(stage) if not plan.is_last(s)])
    maps = {p for s in plan.of_stage(stage) for p in plan.sources(s)} | {
        plan.stop(s) for s in fronts.segments
    }
    for tensor_id in sorted(maps, reverse=True):
        if not fronts.readers(tensor_id):
            yield from _after_all_readers(plan, stage, tensor_id)
    for segment, band in fronts.in_order(fronts.segments, fronts.can_go_back):
        yield from (BackwardTile(plan.number, segment, band.block, box) for box in band.boxes)
        yield from _final_gradient_rows(plan, fronts, segment, band.block)
        if fronts.is_done(segment):
            yield DropGradient(plan.number, plan.stop(segment))
            for tensor_id in reversed(plan.sources(segment)):
                if all(map(fronts.is_done, fronts.readers(tensor_id))):
                    yield from _after_all_readers(plan, stage, tensor_id)


def step(plans: Sequence[StagePlan], actions: Sequence[Action], linear: bool) -> list[Operation]:
    """Return all operations of the micro-batches of a step.

    Args:
        plans: the plans of the micro-batches.
        actions: the actions of this rank's stages, in order. The number of a micro-batch is its
            index in ``plans``.
        linear: True if the loss gradient of a tile does not depend on other tiles. Otherwise the
            loss gradient is known only after the forward passes of all tiles of all micro-batches.
    """

    def plan_of(action):
        return plans[action.micro_batch]

    backwards = [action for action in actions if isinstance(action, Backward)]
    found = [op for plan in plans for op in receives(plan)] + [
        op for action in backwards for op in gradient_receives(plan_of(action), action.stage)
    ]
    known = linear
    for action in actions:
        ends = any(plan.is_last(s) for plan in plans[:1] for s in plan.of_stage(action.stage))
        if isinstance(action, Forward):
            found += forward(plan_of(action), action.stage)
            found += output_passes(plan_of(action), back=False) if ends and not linear else ()
            continue
        if ends:
            found += [] if known else [Loss(plan_of(action).number)]
            found += output_passes(plan_of(action))
            known = True
        found += backward(plan_of(action), action.stage)
    return found


def extra_forward(plans: Sequence[StagePlan], actions: Sequence[Action]) -> list[Operation]:
    """Return the operations of a forward pass without a backward pass.

    This forward pass runs before the operations that :func:`step` returns if the loss gradient
    depends on all results of the step. Feature maps that a stage computes only for other ranks are
    dropped after this rank's next forward pass, so that they can be sent in the meantime.

    Args:
        plans: the plans of the micro-batches.
        actions: the actions, as for :func:`step`; only the forward passes are used.
    """
    alone = [replace(plan, back=False) for plan in plans]
    found = [op for plan in alone for op in receives(plan)]
    left: list[Operation] = []
    for action in (action for action in actions if isinstance(action, Forward)):
        plan = alone[action.micro_batch]
        found += forward(plan, action.stage)
        found += output_passes(plan) if any(map(plan.is_last, plan.of_stage(action.stage))) else ()
        found += left
        left = [
            Drop(plan.number, plan.stop(s))
            for s in plan.of_stage(action.stage)
            if not (plan.is_last(s) or plan.reading(plan.stop(s)))
        ]
    return found + left


def all_operations(plan: StagePlan) -> Iterator[Operation]:
    """Yield all operations of a step that has only one micro-batch.

    An operation is made when it is asked for, so that those of a large image need not be in memory.
    """
    yield from receives(plan)
    for stage in plan.stages:
        yield from forward(plan, stage)
    yield from output_passes(plan)
    for stage in reversed(plan.stages) if plan.back else ():
        yield from gradient_receives(plan, stage)
        yield from backward(plan, stage)


def peak(plan: StagePlan, sizes: Callable[[int, int], int]) -> int:
    """Return the largest number of bytes that stored feature maps and gradients take at once.

    Feature maps from other ranks are counted from the start, because they may arrive at any time.
    Gradients that other ranks send are always counted.

    Args:
        plan: the plan of a micro-batch, which runs alone.
        sizes: returns the number of bytes of a feature map, given (tile batch, feature map).
    """
    if len(plan.segments) == 1:  # it reads pixels and computes the result: nothing is stored
        return 0
    blocks = range(plan.blocks)
    present = {("map", b, p): sizes(b, p) for p in plan.elsewhere for b in blocks}
    most = total = sum(present.values())
    for op in all_operations(plan):
        if isinstance(op, (Drop, DropGradient)):
            kind = "map" if isinstance(op, Drop) else "gradient"
            total -= sum(present.pop((kind, b, op.tensor_id), 0) for b in blocks)
        for key in _written(plan, op):
            if key not in present:
                present[key] = sizes(*key[1:])
                total += present[key]
        most = max(most, total)
    returning = [p for p in plan.made for _ in plan.readers[p]] if plan.back else []
    return most + sum(sizes(b, p) for p in returning for b in blocks)


def _written(plan: StagePlan, op: Operation) -> list[tuple[str, int, int]]:
    """Return a key for each stored feature map and gradient that an operation writes.

    A key is (``map`` or ``gradient``, index of the tile batch, index of the feature map).
    """
    if isinstance(op, ForwardTile):
        return [("map", op.block, plan.stop(op.segment))]
    if isinstance(op, BackwardTile) or isinstance(op, OutputTile) and op.back:
        return [("gradient", op.block, p) for p in plan.sources(op.segment) if p != 0]
    return []


def _collectives_on(plan: StagePlan, tensor_id: int) -> Iterator[Operation]:
    """Yield the collectives on a complete feature map: halo exchange and statistics of norms.

    Yield only those that the layers after the feature map need.
    """
    if tensor_id in plan.points:
        yield FetchHalo(plan.number, tensor_id)
    if tensor_id in plan.active:
        yield Statistic(plan.number, tensor_id)


def _drop_read_maps(
    plan: StagePlan, segment: int, done: Callable[[int], bool]
) -> Iterator[Operation]:
    """Yield the operations that drop a segment's inputs and its result, once they can be dropped.

    Yield nothing if backward passes follow. A feature map is dropped when it is complete and all
    segments of this rank have read it. The segment that completes a map may finish after the
    segments that read it, because other ranks may read the last rows. The result is therefore
    checked too.

    Args:
        plan: the plan of the micro-batch.
        segment: the segment.
        done: returns True if a segment of this rank has run on all its tiles, given its number.
    """
    for tensor_id in (*plan.sources(segment), plan.stop(segment)):
        reading, making = (
            plan.reading(tensor_id),
            [plan.made[tensor_id]] if tensor_id in plan.made else [],
        )
        if tensor_id != 0 and not plan.back and reading and all(map(done, (*reading, *making))):
            yield Drop(plan.number, tensor_id)


def _final_gradient_rows(
    plan: StagePlan, fronts: _Fronts, segment: int, block: int
) -> Iterator[Operation]:
    """Yield the operations that send final gradient rows to the ranks that computed the maps.

    The gradient of a row is final if no later backward pass adds to it. A map before an active norm
    or a halo exchange is left out, because all its rows become final at the same time (see
    :func:`_after_all_readers`).

    Args:
        plan: the plan of the micro-batch.
        fronts: the progress of the backward passes.
        segment: the segment whose backward passes have just run on a row of tiles.
        block: the index of the tile batch.
    """
    for tensor_id in plan.sources(segment):
        if tensor_id not in plan.elsewhere or plan.is_barrier(tensor_id):
            continue
        stage = plan.segments[segment].stage
        pending = [
            s
            for s in plan.reading(tensor_id)
            if plan.segments[s].stage == stage and not (plan.is_last(s) or s in fronts.segments)
        ]
        if plan.stages_reading(tensor_id)[0] == stage and not pending:
            rows = fronts.grown(tensor_id, block)
            if rows is not None:
                yield SendGradRows(plan.number, tensor_id, block, rows)


def _after_all_readers(plan: StagePlan, stage: int, tensor_id: int) -> Iterator[Operation]:
    """Yield the operations on a map that follow the backward passes of all segments that read it.

    These operations complete the map's gradient (statistics of norms and halo), send it if another
    rank computed the map, and drop the map. Yield nothing if an earlier stage of this rank reads
    the map too, because the backward passes of that stage still add to the gradient.

    Args:
        plan: the plan of the micro-batch.
        stage: the stage whose backward passes have run on all tiles that read the map.
        tensor_id: the index of the feature map.
    """
    if plan.stages_reading(tensor_id)[:1] not in ([], [stage]):
        return
    if tensor_id in plan.active:
        yield FinalizeStatistics(plan.number, tensor_id)
    if tensor_id in plan.points:
        yield SendHaloGrad(plan.number, tensor_id)
    if tensor_id in plan.elsewhere:
        if tensor_id in plan.active:
            yield ApplyStatisticsGrad(plan.number, tensor_id)
        for block in range(plan.blocks):
            yield SendGradRows(
                plan.number, tensor_id, block, plan.grid.computed(block, tensor_id).stop[0]
            )
    if tensor_id != 0:
        yield Drop(plan.number, tensor_id)


class _Band(NamedTuple):
    """One row of tiles of a segment's result.

    Attributes:
        block: the index of the tile batch.
        rows: the rows (start, stop) of the result.
        tiles: all tiles of the result that this rank computes.
        numbers: the indices of this row's tiles in ``tiles``.
        reads: for each feature map that the tiles read, the rows (start, stop) that they read.
    """

    block: int
    rows: Span
    tiles: Sequence[Box]
    numbers: range
    reads: dict[int, Span]

    @property
    def boxes(self) -> Iterator[Box]:
        """The tiles of this row, which are made when they are asked for."""
        return (self.tiles[number] for number in self.numbers)


class _Fronts:
    """Record of how many rows of tiles (:class:`_Band`) each segment in ``segments`` has computed.

    Args:
        plan: the plan of the micro-batch.
        segments: the numbers of the segments, all of this rank.
    """

    def __init__(self, plan: StagePlan, segments: Sequence[int]):
        self.plan, self.segments = plan, list(segments)
        self.bands = {s: _bands(plan, s) for s in segments}
        self._at = dict.fromkeys(segments, 0)
        self._readers = {
            p: [s for s in segments if p in plan.sources(s)]
            for segment in segments
            for p in plan.sources(segment)
        }
        self._sent: dict[tuple[int, int], float] = {}

    @cached_property
    def _lowest(self) -> dict[int, list[dict[int, int]]]:
        """The result of :func:`_lowest` for each segment, which only backward passes need."""
        return {s: _lowest(bands) for s, bands in self.bands.items()}

    def in_order(
        self, preferred: Iterable[int], ready: Callable[[int, _Band], bool]
    ) -> Iterator[tuple[int, _Band]]:
        """Yield (segment, row of tiles) for all rows of tiles of the segments in ``preferred``.

        Each is yielded when it is ready. If the next rows of tiles of several segments are ready,
        the segment that comes first in ``preferred`` goes on.

        Args:
            preferred: the numbers of the segments, most preferred first.
            ready: returns True if a row of tiles of a segment can run.
        """
        left = [s for s in preferred if self.bands[s]]
        while left:
            segment = next(s for s in left if ready(s, self.bands[s][self._at[s]]))
            band = self.bands[segment][self._at[segment]]
            self._at[segment] += 1
            if self.is_done(segment):
                left.remove(segment)
            yield segment, band

    def is_done(self, segment: int) -> bool:
        """Return True if :meth:`in_order` has yielded all rows of tiles of a segment."""
        return self._at[segment] == len(self.bands[segment])

    def readers(self, tensor_id: int) -> list[int]:
        """Return the numbers of the segments in ``self.segments`` that read a feature map."""
        return self._readers.get(tensor_id, [])

    def can_go_forward(self, band: _Band) -> bool:
        """Return True if all rows of cells that a row of tiles reads are computed.

        Rows that segments outside this object (``self.segments``) compute count as computed.

        Args:
            band: the row of tiles.
        """
        return all(
            self._is_made(tensor_id, band.block, rows) for tensor_id, rows in band.reads.items()
        )

    def _is_made(self, tensor_id: int, block: int, rows: Span) -> bool:
        """Return True if rows of a feature map are computed already.

        Also return True if no segment in ``self.segments`` computes the map.

        Args:
            tensor_id: the index of the feature map.
            block: the index of the tile batch.
            rows: the rows (start, stop).
        """
        maker = self.plan.made.get(tensor_id)
        if maker not in self.bands or self.is_done(maker):
            return True
        following = self.bands[maker][self._at[maker]]
        return not self.plan.is_barrier(tensor_id) and (following.block, following.rows[0]) >= (
            block,
            rows[1],
        )

    def can_go_back(self, segment: int, band: _Band) -> bool:
        """Return True if the gradient of a row of tiles is final.

        The backward passes of these tiles can then run. The gradient is final once all segments in
        ``self.segments`` have run the backward passes of the tiles that read this row of tiles.

        Args:
            segment: the segment whose result the tiles are part of.
            band: the row of tiles.
        """
        stop = self.plan.stop(segment)
        if self.plan.is_barrier(stop):
            return all(map(self.is_done, self.readers(stop)))
        return self._final(stop, band.block) >= band.rows[1]

    def _final(self, tensor_id: int, block: int) -> float:
        """Return the first row of a feature map whose gradient is not final yet.

        A row is not final if :meth:`in_order` has not yet yielded the backward pass of a tile that
        reads the row. The result is infinity if all rows are final.
        """
        return min(
            (self._reads_from(s, tensor_id, block) for s in self.readers(tensor_id)),
            default=math.inf,
        )

    def _reads_from(self, segment: int, tensor_id: int, block: int) -> float:
        """Return the first row of a feature map that tiles of a segment will still read.

        Return infinity if they will read no more rows.

        Args:
            segment: the index of the segment.
            tensor_id: the index of the map.
            block: the index of the tile batch.
        """
        bands, at = self.bands[segment], self._at[segment]
        while at < len(bands) and bands[at].block < block:
            at += 1
        return (
            self._lowest[segment][at][tensor_id]
            if at < len(bands) and bands[at].block == block
            else math.inf
        )

    def grown(self, tensor_id: int, block: int) -> int | None:
        """Return the first row whose gradient is not final, if more rows are final than before.

        The gradients of all rows of the feature map before this row are final and can be sent.

        Args:
            tensor_id: the index of the feature map.
            block: the index of the tile batch.

        Returns:
            The row, or None in two cases: no further row has become final since the last call with
            these arguments, or all rows are final. In the second case :func:`_after_all_readers`
            yields the operation that sends the last rows.
        """
        final = self._final(tensor_id, block)
        if final == math.inf or final <= self._sent.get(
            (tensor_id, block), self.plan.grid.computed(block, tensor_id).start[0]
        ):
            return None
        self._sent[tensor_id, block] = final
        return int(final)


def _bands(plan: StagePlan, segment: int) -> list[_Band]:
    """Return all rows of tiles of a segment, in the order in which they are computed."""
    found = []
    for block in range(plan.blocks):
        tiles, begin = plan.grid.tiles(block, segment), 0
        for rows, boxes in groupby(tiles, key=lambda box: (box.start[0], box.stop[0])):
            numbers = range(begin, begin + sum(1 for _ in boxes))
            begin = numbers.stop
            reads = plan.grid.rows(block, segment, rows)
            found.append(_Band(block, rows, tiles, numbers, reads))
    return found


def _lowest(bands: Sequence[_Band]) -> list[dict[int, int]]:
    """Return, for each row of tiles, the first row of cells that it or a later row of tiles reads.

    Gradients of rows with smaller indices are final, because backward passes follow the order of
    ``bands``. A later row of tiles may read smaller indices than the one before it, because
    reflection padding repeats cells near the border. Later rows of other tile batches do not count.

    Args:
        bands: all rows of tiles of a segment, in order.

    Returns:
        For each row of tiles a dict from the number of a feature map to this smallest index.
    """
    found: list[dict[int, int]] = []
    following: _Band | None = None
    for band in reversed(bands):
        behind = found[-1] if following is not None and following.block == band.block else {}
        found.append({p: min(rows[0], behind.get(p, rows[0])) for p, rows in band.reads.items()})
        following = band
    return found[::-1]
