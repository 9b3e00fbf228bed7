"""Runs of layers between feature maps that are stored whole, and what a tile of a run's result is made from.

A rank that holds one tile at a time stores a feature map wherever a later layer needs all of it: before each live norm.
The layers in between are a segment. A tile of its result is computed from a window of the map before it, and where the
segment takes up a skip, from a window of the map that the skip comes from::

    stored           A           B           C
    layers           | conv      | norm act stash pool conv     | norm act up pop ...
    a skip of B's segment is popped in C's: norm and act are computed again, on a window of B

Segments are cut where that would mean more than layers that look at single pixels. In a pipeline they are cut between stages
too, and before a stash whose skip another stage takes up, so that nobody needs another's weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Sequence

from distseg.geometry.footprint import Span
from distseg.geometry.layout import Layout, Part
from distseg.geometry.needs import Along, Link, box_of, hull
from distseg.geometry.tile import Box


@dataclass(frozen=True)
class Skip:
    """One that comes from an earlier segment: the stored map before layer ``source``, through the layers up to ``stash``."""

    name: str
    source: int
    stash: int

    @property
    def layers(self) -> range:
        return range(self.source, self.stash)


@dataclass(frozen=True)
class Segment:
    """Layers from one stored map to the next; ``skips``: by the position of their pop; ``stage``: of the pipeline that runs it."""

    layers: range
    skips: dict[int, Skip]
    stage: int = 0

    @property
    def sources(self) -> list[int]:
        """The stored maps that it reads."""
        return sorted({self.layers.start, *(skip.source for skip in self.skips.values())})


def segments_of(links: Sequence[Link], cuts: Sequence[int], stages: Sequence[range] = ()) -> list[Segment]:
    """The segments of a flat model that is cut before the layers ``cuts``, between ``stages``, and wherever else skips ask for it."""
    stashes, pops = {}, {}  # a name may be used again once it was popped
    for position, link in enumerate(links):
        if link.stash is not None:
            stashes[link.stash] = position
        if link.pop is not None:
            pops[position] = stashes[link.pop]
    stage_of = {position: number for number, layers in enumerate(stages) for position in layers}
    between = {stash for pop, stash in pops.items() if stage_of.get(pop) != stage_of.get(stash)}
    starts = {0, *cuts, *(layers.start for layers in stages), *between}
    while True:
        start_of = lambda position: max(start for start in starts if start <= position)
        outside = {pop: stash for pop, stash in pops.items() if start_of(pop) != start_of(stash)}
        far = {stash for stash in outside.values() if any(link.footprints or link.pop for link in links[start_of(stash) : stash])}
        if not far:
            break
        starts |= far
    ends = [*sorted(starts)[1:], len(links)]
    found = []
    for start, end in zip(sorted(starts), ends):
        skips = {pop: Skip(links[pop].pop, start_of(stash), stash) for pop, stash in outside.items() if start <= pop < end}
        found.append(Segment(range(start, end), skips, stage_of.get(start, 0)))
    return found


@dataclass(frozen=True)
class Chain:
    """How a tile of a segment's result is computed. What is asked for is made then: many tiles are only counted."""

    segment: Segment
    sizes: Sequence[tuple[int, ...]]
    along: Sequence[Along]
    """By dim."""

    @property
    def given(self) -> Box:
        """The window of the map before the segment."""
        return box_of([along.taken[0] for along in self.along])

    @property
    def takes(self) -> list[int]:
        """The cells that each layer is computed from."""
        return list(map(math.prod, zip(*(along.takes for along in self.along))))

    @property
    def makes(self) -> list[int]:
        """The cells of each layer's result."""
        return list(map(math.prod, zip(*(along.makes for along in self.along))))

    @cached_property
    def skips(self) -> dict[int, Box]:
        """The window of each skip from outside, by its pop."""
        return {pop: box_of([along.made[pop - self.segment.layers.start] for along in self.along]) for pop in self.segment.skips}

    @cached_property
    def parts(self) -> list[Part]:
        """Of each layer."""
        return [self._part(number, position) for number, position in enumerate(self.segment.layers)]

    def _part(self, number: int, position: int) -> Part:
        taken, raw, made = (box_of([spans[number] for spans in each]) for each in zip(*((a.taken, a.raw, a.made) for a in self.along)))
        inside = None if self.along[0].skip[number] is None else box_of([along.skip[number] for along in self.along])
        return Part(self.sizes[position], taken, taken, taken, raw, made, made if position in self.segment.skips else inside)


def chain(layout: Layout, segment: Segment, result: Box) -> Chain:
    """What is needed for ``result``, found from the last layer backwards."""
    spans = zip(result.start, result.stop)
    return Chain(segment, layout.sizes, [layout.along(segment.layers, dim, span) for dim, span in enumerate(spans)])


def rows_read(layout: Layout, segment: Segment, rows: Span) -> dict[int, Span]:
    """The rows of each map that some rows of a segment's result are made from."""
    along = layout.along(segment.layers, 0, rows)
    found = {segment.layers.start: along.taken[0]}
    for pop, skip in segment.skips.items():
        window = along.made[pop - segment.layers.start]
        found[skip.source] = hull(found.get(skip.source, window), window)
    return found
