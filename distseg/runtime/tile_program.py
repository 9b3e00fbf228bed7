"""The operations of a rank that computes its part of images tile after tile: made from segments, tiles and who reads which map.

Tiles of all segments run in the order in which their rows become final, as far along the network as can be, so that a
stage behind begins with its first tiles long before this one ends; ``|`` is the statistic of a live norm, which waits for all tiles::

    segments 0, 1, 2, no live norms, three rows of tiles        0  0 1  0 1 2  1 2  2
    a live norm before segment 1                                0  0  0 | 1  1 2  1 2  2

Backward the same from behind: a segment's tile can go back once all that read its rows did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Callable, Container, Iterable, Iterator, Mapping, NamedTuple, Protocol, Sequence

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
    """Where the tiles of some blocks lie, by the numbers of blocks and segments and the positions of maps."""

    blocks: int

    def tiles(self, block: int, segment: int) -> Sequence[Box]:
        """The boxes to compute of the segment's result, row by row."""

    def rows(self, block: int, segment: int, rows: Span) -> dict[int, Span]:
        """The rows of each map that some rows of the segment's result are made from."""

    def made(self, block: int, position: int) -> Box:
        """The part of a map that is computed."""


@dataclass(frozen=True)
class StagePlan:
    """What one rank has of a micro-batch.

    Args:
        segments: all of the network; ``mine``: the numbers of those that this rank runs.
        live: the maps that this rank's norms take statistics of.
        points: those that it reads whose margin is fetched from the ranks that share the image.
        makers: the rank that makes each map; ``readers``: the other ranks that read it.
        back: whether backward passes follow; else a map goes once it was read.
        number: of the micro-batch.
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
        """Whether nothing is read of a map before all of it is made."""
        return position in self.live or position in self.points

    def of_stage(self, stage: int) -> list[int]:
        return [s for s in self.mine if self.segments[s].stage == stage]

    @property
    def stages(self) -> list[int]:
        return sorted({self.segments[s].stage for s in self.mine})

    @cached_property
    def made(self) -> dict[int, int]:
        """The segment that makes each map, of this rank's."""
        return {self.segments[s].result: s for s in self.mine}

    @cached_property
    def elsewhere(self) -> list[int]:
        """The maps that this rank reads and others make."""
        return sorted({p for s in self.mine for p in self.sources(s)} - set(self.made) - {0})

    def sources(self, segment: int) -> Sequence[int]:
        """The maps that a segment reads."""
        return self.segments[segment].sources

    def stop(self, segment: int) -> int:
        """The map that a segment makes."""
        return self.segments[segment].result

    def is_last(self, segment: int) -> bool:
        """Whether a segment's result is the network's."""
        return segment == len(self.segments) - 1

    def reading(self, position: int) -> list[int]:
        """The segments of this rank that read a map."""
        return [s for s in self.mine if position in self.sources(s)]

    def stages_reading(self, position: int) -> list[int]:
        return sorted({self.segments[s].stage for s in self.reading(position)})


def expected(work: StagePlan) -> list[Operation]:
    """What other ranks make and this one reads."""
    return [Expect(work.number, position) for position in work.elsewhere]


def expected_back(work: StagePlan, stage: int) -> list[Operation]:
    """The gradients that other ranks return of a stage's maps."""
    made = [work.stop(s) for s in work.of_stage(stage) if not work.is_last(s)]
    return [
        ExpectGradient(work.number, position, reader)
        for position in made
        for reader in work.readers[position]
    ]


def forward(work: StagePlan, stage: int) -> Iterator[Operation]:
    """All segments of a stage but the network's last."""
    fronts = _Fronts(work, [s for s in work.of_stage(stage) if not work.is_last(s)])
    for position in dict.fromkeys(p for s in work.of_stage(stage) for p in work.sources(s)):
        if (
            position not in work.made and work.stages_reading(position)[0] == stage
        ):  # nobody here made it
            yield from [Measure(work.number, position)] if position in work.live else ()
            yield from _met(work, position)
    for segment, band in fronts.in_order(reversed(fronts.segments), fronts.can_go_forward):
        stop = work.stop(segment)
        yield from (ForwardTile(work.number, segment, band.block, box) for box in band.boxes)
        if work.readers[stop]:
            yield Send(work.number, stop, band.block, band.rows[1])
        if fronts.is_done(segment):
            yield from _met(work, stop)
            yield from _passed(
                work,
                segment,
                lambda s: (
                    work.segments[s].stage < stage or s in fronts.segments and fronts.is_done(s)
                ),
            )


def outputs(work: StagePlan, back: bool | None = None) -> Iterator[Operation]:
    """The network's last segment, of the rank that has it; ``back``: with backward passes, by default as the work has them."""
    back = work.back if back is None else back
    for segment in filter(work.is_last, work.mine):
        fronts = _Fronts(work, [segment])
        for _, band in fronts.in_order([segment], lambda *_: True):
            yield from (
                OutputTile(work.number, segment, band.block, box, back) for box in band.boxes
            )
            if back:
                yield from _returned(work, fronts, segment, band.block)
        yield from _passed(work, segment, lambda _: True)


def backward(work: StagePlan, stage: int) -> Iterator[Operation]:
    """All segments of a stage from behind, but the network's last, which :func:`outputs` went through."""
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
    """All operations of micro-batches that are under way together.

    Args:
        actions: of this rank's stages; micro-batches count from 0 there, by their place in ``works``.
        linear: the loss's slope is known beforehand; else it is once all tiles of all micro-batches went forward.
    """
    of = lambda action: works[action.micro_batch]
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
    """The forward passes alone, for a loss whose slope follows from all results; of each micro-batch the maps go when the next one is through.

    Args:
        actions: as :func:`step`'s, of which the forward passes are taken.
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
    """All operations of a micro-batch that goes through the network alone."""
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
    """Bytes of the maps and their gradients that are stored, at most at once.

    Args:
        sizes: (block, position) -> of a map. What other ranks send may come at any time.
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
    """What an operation stores: (map or gradient, block, position)."""
    if isinstance(op, ForwardTile):
        return [("map", op.block, work.stop(op.segment))]
    if isinstance(op, BackwardTile) or isinstance(op, OutputTile) and op.back:
        return [("gradient", op.block, p) for p in work.sources(op.segment) if p != 0]
    return []


def _met(work: StagePlan, position: int) -> Iterator[Operation]:
    """What ranks tell each other of a map, once it is made."""
    if position in work.points:
        yield Fetch(work.number, position)
    if position in work.live:
        yield Statistic(work.number, position)


def _passed(work: StagePlan, segment: int, done: Callable[[int], bool]) -> Iterator[Operation]:
    """Without backward passes: maps go that are made, all of them, and that all segments have read, which may be done in another order than they are
    numbered; the last rows of a map may be for other ranks alone."""
    for position in (*work.sources(segment), work.stop(segment)):
        reading, making = (
            work.reading(position),
            [work.made[position]] if position in work.made else [],
        )
        if position != 0 and not work.back and reading and all(map(done, (*reading, *making))):
            yield Drop(work.number, position)


def _returned(work: StagePlan, fronts: "_Fronts", segment: int, block: int) -> Iterator[Operation]:
    """Rows of gradients that are final by now, of maps that other ranks made; where a norm takes statistics none are before all are."""
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
    """What comes once a stage's readers of a map went back, if no earlier stage of this rank reads it."""
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
    """Tiles of a segment's result side by side, and the rows that they read of each map."""

    block: int
    rows: Span
    boxes: list[Box]
    reads: dict[int, Span]


class _Fronts:
    """How far some segments are, band by band."""

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
        """All bands, always one of the first segment whose next band is ready."""
        left = [s for s in preferred if self.bands[s]]
        while left:
            segment = next(s for s in left if ready(s, self.bands[s][self._at[s]]))
            band = self.bands[segment][self._at[segment]]
            self._at[segment] += 1
            if self.is_done(segment):
                left.remove(segment)
            yield segment, band

    def is_done(self, segment: int) -> bool:
        return self._at[segment] == len(self.bands[segment])

    def readers(self, position: int) -> list[int]:
        return self._readers.get(position, [])

    def can_go_forward(self, segment: int, band: _Band) -> bool:
        """Whether all that a band reads is made, as far as a segment here makes it."""
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
        """Whether the gradient of a band is final, as far as segments here read it."""
        stop = self.work.stop(segment)
        if self.work.whole(stop):
            return all(map(self.is_done, self.readers(stop)))
        return self._final(stop, band.block) >= band.rows[1]

    def _final(self, position: int, block: int) -> float:
        """Rows before this one no band to come reads."""
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
        """The row before which a gradient is final, where some but not all of it has newly become so."""
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
    """From each band on the first row that is read of each map, by bands of its block: windows at a mirrored end may reach back."""
    found: list[dict[int, int]] = []
    following: _Band | None = None
    for band in reversed(bands):
        behind = found[-1] if following is not None and following.block == band.block else {}
        found.append({p: min(rows[0], behind.get(p, rows[0])) for p, rows in band.reads.items()})
        following = band
    return found[::-1]
