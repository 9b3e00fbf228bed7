"""Nodes between feature maps that are stored whole, and what a tile of their result is made from.

A rank that holds one tile at a time stores a feature map wherever a later layer needs all of it: before each live norm.
The nodes that make it from the stored maps before it are a segment. A tile of its result is computed from a window of each of these::

    stored           A           B           C
    layers           | conv      | norm act pool conv     | norm act up pop ...
    a skip of B's segment is popped in C's: norm and act are computed again, on a window of B

A map that several segments would compute is stored too, where that would mean more than layers that look at single cells of one map. In a
pipeline what crosses between stages is stored, so that nobody needs another's weights.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, Sequence

from distseg.tiling.access_pattern import Span
from distseg.tiling.graph import Graph, crossing
from distseg.tiling.layout import Layout, Part
from distseg.tiling.needs import Along, box_of
from distseg.tiling.tile import Box


@dataclass(frozen=True)
class Segment:
    """The ``nodes`` that make a stored map from the stored maps ``sources``; ``stage``: of the pipeline that runs it."""

    nodes: tuple[int, ...]
    sources: tuple[int, ...]
    stage: int = 0

    @property
    def result(self) -> int:
        """The map that it makes."""
        return self.nodes[-1] + 1


def segments_of(graph: Graph, cuts: Iterable[int], stages: Sequence[range] = ()) -> list[Segment]:
    """The segments of a network whose maps ``cuts`` are stored, those between ``stages``, and what else had better not be computed twice."""
    stored = {
        *cuts,
        *(source for source, _, _ in crossing([node.inputs for node in graph], stages)),
        graph.result,
    } - {0}
    while True:
        runs = {result: graph.needed_for(result, stored) for result in sorted(stored)}
        costly = _costly(graph, runs.values(), stored)
        if not costly:
            break
        stored |= costly
    stage_of = {number: stage for stage, numbers in enumerate(stages) for number in numbers}
    sources = lambda nodes: sorted(
        {source for n in nodes for source in graph[n].inputs} - {n + 1 for n in nodes}
    )
    return [
        Segment(tuple(nodes), tuple(sources(nodes)), stage_of.get(nodes[-1], 0))
        for nodes in runs.values()
    ]


def _costly(graph: Graph, runs: Iterable[list[int]], stored: set[int]) -> set[int]:
    """The maps at which the ways of several runs part, and which take more than layers that look at single cells."""
    times = Counter(number for nodes in runs for number in nodes)
    found = set()
    for number, count in times.items():
        source = number + 1
        part = (
            count > 1
            and source not in stored
            and any(times[reader] < count for reader in graph.readers[source])
        )
        if part and not all(graph[n].simple for n in graph.needed_for(source, stored)):
            found.add(source)
    return found


@dataclass(frozen=True)
class Chain:
    """How a tile of a segment's result is computed. What is asked for is made then: many tiles are only counted."""

    graph: Graph
    segment: Segment
    sizes: Sequence[tuple[int, ...]]
    along: Sequence[Along]
    """By dim."""

    @property
    def takes(self) -> list[int]:
        """The cells that each layer is computed from."""
        return list(map(math.prod, zip(*(along.takes for along in self.along))))

    @property
    def makes(self) -> list[int]:
        """The cells of each layer's result."""
        return list(map(math.prod, zip(*(along.makes for along in self.along))))

    @cached_property
    def read(self) -> dict[int, Box]:
        """The window of each stored map."""
        return {
            source: box_of([along.read[source] for along in self.along])
            for source in self.segment.sources
        }

    @cached_property
    def parts(self) -> list[Part]:
        """Of each layer."""
        return [
            self._part(place, self.sizes[self.graph[number].first], self.sizes[number + 1])
            for place, number in enumerate(self.segment.nodes)
        ]

    def _part(self, place: int, size: tuple[int, ...], result: tuple[int, ...]) -> Part:
        taken, raw, made = (
            box_of([spans[place] for spans in each])
            for each in zip(*((a.taken, a.raw, a.made) for a in self.along))
        )
        return Part(size, taken, taken, taken, raw, made, result)


def chain(layout: Layout, segment: Segment, result: Box) -> Chain:
    """What is needed for ``result``, found from the last layer backwards."""
    spans = zip(result.start, result.stop)
    return Chain(
        layout.graph,
        segment,
        layout.sizes,
        [layout.along(segment.nodes, dim, span) for dim, span in enumerate(spans)],
    )


def rows_read(layout: Layout, segment: Segment, rows: Span) -> dict[int, Span]:
    """The rows of each map that some rows of a segment's result are made from."""
    return layout.along(segment.nodes, 0, rows).read
