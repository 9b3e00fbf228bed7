"""List the operations of a rank that streams its part of an image tile by tile.

The lists follow from three facts: the segments of the network, the tiles of each segment's result,
and the feature maps that each segment reads.

Tiles of all segments run in the order in which their rows become final, and always as far along the
network as possible. A later stage therefore begins with its first tiles long before this one ends.
In the picture ``|`` is the statistic of an active norm, which waits for all tiles::

    segments 0, 1, 2, no active norms, three rows of tiles      0  0 1  0 1 2  1 2  2
    an active norm before segment 1                             0  0  0 | 1  1 2  1 2  2

The backward passes run in the mirrored order. A tile of a segment goes back once every segment that
reads its rows went back.
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
    BackwardTile,
    Correct,
    Drop,
    DropGradient,
    Expect,
    ExpectGradient,
    Fetch,
    ForwardTile,
    GiveBack,
    Loss,
    Measure,
    Operation,
    OutputTile,
    Send,
    SendGradient,
    Settle,
    Statistic,
)  # fmt: skip
from distseg.tiling.access_pattern import Span
from distseg.tiling.segment import Segment
from distseg.tiling.tile import Box


class Cut(Protocol):
    """Tiles of a micro-batch, by numbers of tile batches, segments and feature maps."""

    blocks: int

    def tiles(self, block: int, segment: int) -> Sequence[Box]:
        """Return the boxes of the segment's result to compute, row by row."""

    def rows(self, block: int, segment: int, rows: Span) -> dict[int, Span]:
        """Return, for each feature map, the rows that ``rows`` of the result depend on."""

    def made(self, block: int, position: int) -> Box:
        """Return the box of a feature map that this rank computes."""


@dataclass(frozen=True)
class StagePlan:
    """Segments and feature maps that one rank handles for one micro-batch.

    Args:
        segments: all segments of the network.
        mine: the numbers of the segments that this rank runs.
        live: the feature maps whose statistics this rank's active norms compute.
        points: the feature maps that this rank reads and whose margin comes from the ranks that
            share the image.
        makers: the rank that computes each feature map.
        readers: the other ranks that read each feature map.
        cut: the tiles of the micro-batch.
        back: True if backward passes follow. Otherwise a feature map is dropped once it was read.
        number: the number of the micro-batch.
    """

    segments: Sequence[Segment]
    mine: Sequence[int]
    live: Container[int]
    points: Container[int]
    makers: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]
    cut: Cut
    back: bool = True
    number: int = 0

    @property
    def blocks(self) -> int:
        return self.cut.blocks

    def whole(self, position: int) -> bool:
        """Return True if all of a feature map must be complete before any of it is read."""
        return position in self.live or position in self.points

    def of_stage(self, stage: int) -> list[int]:
        """Return the segments of this rank that belong to a stage."""
        return [s for s in self.mine if self.segments[s].stage == stage]

    @property
    def stages(self) -> list[int]:
        return sorted({self.segments[s].stage for s in self.mine})

    @cached_property
    def made(self) -> dict[int, int]:
        """Segment of this rank that computes each feature map."""
        return {self.segments[s].result: s for s in self.mine}

    @cached_property
    def elsewhere(self) -> list[int]:
        """Feature maps that this rank reads and other ranks compute."""
        return sorted({p for s in self.mine for p in self.sources(s)} - set(self.made) - {0})

    def sources(self, segment: int) -> Sequence[int]:
        """Return the feature maps that a segment reads."""
        return self.segments[segment].sources

    def stop(self, segment: int) -> int:
        """Return the feature map that a segment computes."""
        return self.segments[segment].result

    def is_last(self, segment: int) -> bool:
        """Return True if the segment's result is the result of the network."""
        return segment == len(self.segments) - 1

    def reading(self, position: int) -> list[int]:
        """Return the segments of this rank that read a feature map."""
        return [s for s in self.mine if position in self.sources(s)]

    def stages_reading(self, position: int) -> list[int]:
        """Return the stages of this rank that read a feature map."""
        return sorted({self.segments[s].stage for s in self.reading(position)})


def expected(work: StagePlan) -> list[Operation]:
    """Return the receives of all feature maps that other ranks compute and this rank reads."""
    return [Expect(work.number, position) for position in work.elsewhere]


def expected_back(work: StagePlan, stage: int) -> list[Operation]:
    """Return the receives of gradients that other ranks send back for a stage's maps."""
    made = [work.stop(s) for s in work.of_stage(stage) if not work.is_last(s)]
    return [
        ExpectGradient(work.number, position, reader)
        for position in made
        for reader in work.readers[position]
    ]


def forward(work: StagePlan, stage: int) -> Iterator[Operation]:
    """Yield the forward operations of a stage's segments, except the network's last segment."""
    fronts = _Fronts(work, [s for s in work.of_stage(stage) if not work.is_last(s)])
    for position in dict.fromkeys(p for s in work.of_stage(stage) for p in work.sources(s)):
        # Another rank computed this map, and this stage is the first here to read it.
        if position not in work.made and work.stages_reading(position)[0] == stage:
            yield from [Measure(work.number, position)] if position in work.live else ()
            yield from _collectives_on(work, position)
    for segment, band in fronts.in_order(reversed(fronts.segments), fronts.can_go_forward):
        stop = work.stop(segment)
        yield from (ForwardTile(work.number, segment, band.block, box) for box in band.boxes)
        if work.readers[stop]:
            yield Send(work.number, stop, band.block, band.rows[1])
        if fronts.is_done(segment):
            yield from _collectives_on(work, stop)
            yield from _drops(
                work,
                segment,
                lambda s: (
                    work.segments[s].stage < stage or s in fronts.segments and fronts.is_done(s)
                ),
            )


def outputs(work: StagePlan, back: bool | None = None) -> Iterator[Operation]:
    """Yield the operations of the network's last segment, on the rank that runs it.

    Args:
        back: True to run backward passes too; by default as ``work.back`` says.
    """
    back = work.back if back is None else back
    for segment in filter(work.is_last, work.mine):
        fronts = _Fronts(work, [segment])
        for _, band in fronts.in_order([segment], lambda *_: True):
            yield from (
                OutputTile(work.number, segment, band.block, box, back) for box in band.boxes
            )
            if back:
                yield from _returned(work, fronts, segment, band.block)
        yield from _drops(work, segment, lambda _: True)


def backward(work: StagePlan, stage: int) -> Iterator[Operation]:
    """Yield the backward operations of a stage's segments, last segment first.

    The network's last segment is left out, because :func:`outputs` went back through it already.
    """
    fronts = _Fronts(work, [s for s in work.of_stage(stage) if not work.is_last(s)])
    maps = {p for s in work.of_stage(stage) for p in work.sources(s)} | {
        work.stop(s) for s in fronts.segments
    }
    for position in sorted(maps, reverse=True):
        if not fronts.readers(position):
            yield from _read_back(work, stage, position)
    for segment, band in fronts.in_order(fronts.segments, fronts.can_go_back):
        yield from (BackwardTile(work.number, segment, band.block, box) for box in band.boxes)
        yield from _returned(work, fronts, segment, band.block)
        if fronts.is_done(segment):
            yield DropGradient(work.number, work.stop(segment))
            for position in reversed(work.sources(segment)):
                if all(map(fronts.is_done, fronts.readers(position))):
                    yield from _read_back(work, stage, position)


def step(works: Sequence[StagePlan], actions: Sequence[Action], linear: bool) -> list[Operation]:
    """Return all operations of the micro-batches of a step.

    Args:
        works: the plans of the micro-batches.
        actions: the actions of this rank's stages. A micro-batch's number is its index in
            ``works``.
        linear: True if the loss gradient of a tile does not depend on other tiles. Otherwise it is
            known once all tiles of all micro-batches went forward.
    """

    def of(action):
        return works[action.micro_batch]

    backwards = [action for action in actions if isinstance(action, Backward)]
    found = [op for work in works for op in expected(work)] + [
        op for action in backwards for op in expected_back(of(action), action.stage)
    ]
    known = linear
    for action in actions:
        ends = any(work.is_last(s) for work in works[:1] for s in work.of_stage(action.stage))
        if isinstance(action, Forward):
            found += forward(of(action), action.stage)
            found += outputs(of(action), back=False) if ends and not linear else ()
            continue
        if ends:
            found += [] if known else [Loss(of(action).number)]
            found += outputs(of(action))
            known = True
        found += backward(of(action), action.stage)
    return found


def beforehand(works: Sequence[StagePlan], actions: Sequence[Action]) -> list[Operation]:
    """Return only the forward passes, for a loss whose gradient depends on all results.

    The feature maps of a micro-batch are dropped when the next micro-batch has gone forward.

    Args:
        works: the plans of the micro-batches.
        actions: the actions as for :func:`step`, of which only the forward passes are used.
    """
    alone = [replace(work, back=False) for work in works]
    found = [op for work in alone for op in expected(work)]
    left: list[Operation] = []
    for action in (action for action in actions if isinstance(action, Forward)):
        work = alone[action.micro_batch]
        found += forward(work, action.stage)
        found += outputs(work) if any(map(work.is_last, work.of_stage(action.stage))) else ()
        found += left
        left = [
            Drop(work.number, work.stop(s))
            for s in work.of_stage(action.stage)
            if not (work.is_last(s) or work.reading(work.stop(s)))
        ]
    return found + left


def whole(work: StagePlan) -> list[Operation]:
    """Return all operations of a micro-batch that goes through the network alone."""
    there = [
        *expected(work),
        *(op for stage in work.stages for op in forward(work, stage)),
        *outputs(work),
    ]
    back = [
        op
        for stage in reversed(work.stages)
        for op in (*expected_back(work, stage), *backward(work, stage))
    ]
    return there + back if work.back else there


def peak(work: StagePlan, sizes: Callable[[int, int], int]) -> int:
    """Return the largest number of bytes that feature maps and gradients occupy at once.

    Data from other ranks may arrive at any time, so it is counted from the start.

    Args:
        sizes: maps (tile batch, feature map) to bytes.
    """
    blocks = range(work.blocks)
    present = {("map", b, p): sizes(b, p) for p in work.elsewhere for b in blocks}
    most = total = sum(present.values())
    for op in whole(work):
        if isinstance(op, (Drop, DropGradient)):
            kind = "map" if isinstance(op, Drop) else "gradient"
            total -= sum(present.pop((kind, b, op.position), 0) for b in blocks)
        for key in _written(work, op):
            if key not in present:
                present[key] = sizes(*key[1:])
                total += present[key]
        most = max(most, total)
    returning = [p for p in work.made for _ in work.readers[p]] if work.back else []
    return most + sum(sizes(b, p) for p in returning for b in blocks)


def _written(work: StagePlan, op: Operation) -> list[tuple[str, int, int]]:
    """Return what an operation stores, as (``map`` or ``gradient``, tile batch, feature map)."""
    if isinstance(op, ForwardTile):
        return [("map", op.block, work.stop(op.segment))]
    if isinstance(op, BackwardTile) or isinstance(op, OutputTile) and op.back:
        return [("gradient", op.block, p) for p in work.sources(op.segment) if p != 0]
    return []


def _collectives_on(work: StagePlan, position: int) -> Iterator[Operation]:
    """Yield the collectives that a complete feature map needs: margin exchange, norm statistics."""
    if position in work.points:
        yield Fetch(work.number, position)
    if position in work.live:
        yield Statistic(work.number, position)


def _drops(work: StagePlan, segment: int, done: Callable[[int], bool]) -> Iterator[Operation]:
    """Yield drops of feature maps that are needed no more, if no backward passes follow.

    A map is dropped when it is complete and all segments of this rank have read it. Segments may
    finish in another order than their numbers, because the last rows of a map may serve other ranks
    alone.
    """
    for position in (*work.sources(segment), work.stop(segment)):
        reading, making = (
            work.reading(position),
            [work.made[position]] if position in work.made else [],
        )
        if position != 0 and not work.back and reading and all(map(done, (*reading, *making))):
            yield Drop(work.number, position)


def _returned(work: StagePlan, fronts: _Fronts, segment: int, block: int) -> Iterator[Operation]:
    """Yield sends of the gradient rows that are final now, for feature maps of other ranks.

    A map before an active norm or a margin exchange is skipped: its rows become final all at once.
    """
    for position in work.sources(segment):
        if position not in work.elsewhere or work.whole(position):
            continue
        stage = work.segments[segment].stage
        pending = [
            s
            for s in work.reading(position)
            if work.segments[s].stage == stage and not (work.is_last(s) or s in fronts.segments)
        ]
        if work.stages_reading(position)[0] == stage and not pending:
            rows = fronts.grown(position, block)
            if rows is not None:
                yield SendGradient(work.number, position, block, rows)


def _read_back(work: StagePlan, stage: int, position: int) -> Iterator[Operation]:
    """Yield the operations due once all readers of a feature map in a stage went back.

    Yields nothing if an earlier stage of this rank reads the map too.
    """
    if work.stages_reading(position)[:1] not in ([], [stage]):
        return
    if position in work.live:
        yield Settle(work.number, position)
    if position in work.points:
        yield GiveBack(work.number, position)
    if position in work.elsewhere:
        if position in work.live:
            yield Correct(work.number, position)
        for block in range(work.blocks):
            yield SendGradient(work.number, position, block, work.cut.made(block, position).stop[0])
    if position != 0:
        yield Drop(work.number, position)


class _Band(NamedTuple):
    """Tiles of a segment's result side by side, and the rows of each feature map that they read."""

    block: int
    rows: Span
    boxes: list[Box]
    reads: dict[int, Span]


class _Fronts:
    """Progress of some segments, band by band."""

    def __init__(self, work: StagePlan, segments: Sequence[int]):
        self.work, self.segments = work, list(segments)
        self.bands = {s: _bands(work, s) for s in segments}
        self._at = dict.fromkeys(segments, 0)
        self._readers = {
            p: [s for s in segments if p in work.sources(s)]
            for segment in segments
            for p in work.sources(segment)
        }
        self._lowest = {s: _lowest(bands) for s, bands in self.bands.items()}
        self._sent: dict[tuple[int, int], float] = {}

    def in_order(
        self, preferred: Iterable[int], ready: Callable[[int, _Band], bool]
    ) -> Iterator[tuple[int, _Band]]:
        """Yield all bands, each from the first preferred segment whose next band is ready."""
        left = [s for s in preferred if self.bands[s]]
        while left:
            segment = next(s for s in left if ready(s, self.bands[s][self._at[s]]))
            band = self.bands[segment][self._at[segment]]
            self._at[segment] += 1
            if self.is_done(segment):
                left.remove(segment)
            yield segment, band

    def is_done(self, segment: int) -> bool:
        """Return True if all bands of a segment were yielded."""
        return self._at[segment] == len(self.bands[segment])

    def readers(self, position: int) -> list[int]:
        """Return the segments among these that read a feature map."""
        return self._readers.get(position, [])

    def can_go_forward(self, segment: int, band: _Band) -> bool:
        """Return True if all rows that a band reads are complete, if segments here compute them."""
        return all(
            self._is_made(position, band.block, rows) for position, rows in band.reads.items()
        )

    def _is_made(self, position: int, block: int, rows: Span) -> bool:
        maker = self.work.made.get(position)
        if maker not in self.bands or self.is_done(maker):
            return True
        following = self.bands[maker][self._at[maker]]
        return not self.work.whole(position) and (following.block, following.rows[0]) >= (
            block,
            rows[1],
        )

    def can_go_back(self, segment: int, band: _Band) -> bool:
        """Return True if the gradient of a band is final, as far as segments here add to it."""
        stop = self.work.stop(segment)
        if self.work.whole(stop):
            return all(map(self.is_done, self.readers(stop)))
        return self._final(stop, band.block) >= band.rows[1]

    def _final(self, position: int, block: int) -> float:
        """Return the first row that a later band still reads; rows before it are final."""
        return min(
            (self._reads_from(s, position, block) for s in self.readers(position)), default=math.inf
        )

    def _reads_from(self, segment: int, position: int, block: int) -> float:
        bands, at = self.bands[segment], self._at[segment]
        while at < len(bands) and bands[at].block < block:
            at += 1
        return (
            self._lowest[segment][at][position]
            if at < len(bands) and bands[at].block == block
            else math.inf
        )

    def grown(self, position: int, block: int) -> int | None:
        """Return the row before which a gradient is final.

        Return None if no row has become final since the last call, or if all rows are final.
        """
        final = self._final(position, block)
        if final == math.inf or final <= self._sent.get(
            (position, block), self.work.cut.made(block, position).start[0]
        ):
            return None
        self._sent[position, block] = final
        return int(final)


def _bands(work: StagePlan, segment: int) -> list[_Band]:
    found = []
    for block in range(work.blocks):
        for rows, boxes in groupby(
            work.cut.tiles(block, segment), key=lambda box: (box.start[0], box.stop[0])
        ):
            found.append(_Band(block, rows, list(boxes), work.cut.rows(block, segment, rows)))
    return found


def _lowest(bands: Sequence[_Band]) -> list[dict[int, int]]:
    """Return, for each band, the first row of each map that it or a later band needs.

    Only bands of the same tile batch count. A later band may read earlier rows, because windows at
    a mirrored border reach back.
    """
    found: list[dict[int, int]] = []
    following: _Band | None = None
    for band in reversed(bands):
        behind = found[-1] if following is not None and following.block == band.block else {}
        found.append({p: min(rows[0], behind.get(p, rows[0])) for p, rows in band.reads.items()})
        following = band
    return found[::-1]
