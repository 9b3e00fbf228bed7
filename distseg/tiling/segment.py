"""Segments: the nodes between stored feature maps, and the boxes from which a tile is computed.

Streaming computes one tile at a time. So a feature map is stored wherever a later layer needs all
of it, such as before each active norm. A segment is the nodes that compute a stored map from
earlier stored maps. A tile of its result is computed from a window of each of those maps::

    stored           A           B           C
    layers           | conv      | norm act pool conv     | norm act up pop ...
    a skip of B's segment is popped in C's: norm and act are computed again, on a window of B

A map that several segments would otherwise compute is stored too, unless pointwise layers compute
it from one stored map. In a pipeline, the maps that one stage computes and another reads are
stored, so that no stage needs the weights of another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from distseg.tiling.access_pattern import Span
from distseg.tiling.graph import Graph, crossing
from distseg.tiling.layout import Layout, Part
from distseg.tiling.needs import Along, box_of
from distseg.tiling.tile import Box


@dataclass(frozen=True)
class Segment:
    """The nodes that compute one stored map from other stored maps.

    Attributes:
        nodes: numbers of the nodes, in order.
        sources: numbers of the stored maps that they read.
        stage: the pipeline stage that runs them.
    """

    nodes: tuple[int, ...]
    sources: tuple[int, ...]
    stage: int = 0

    @property
    def result(self) -> int:
        """The number of the map that the segment computes."""
        return self.nodes[-1] + 1


def segments_of(graph: Graph, cuts: Iterable[int], stages: Sequence[range] = ()) -> list[Segment]:
    """Return the segments of a network, ordered by the map that they compute.

    Stored maps are ``cuts``, the maps that cross between stages, the network's result, and maps
    that would be too expensive to compute in several segments.

    Args:
        graph: the network.
        cuts: numbers of maps that must be stored.
        stages: the range of nodes of each pipeline stage.
    """
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

    def segment(nodes: list[int]) -> Segment:
        read = {source for n in nodes for source in graph[n].inputs}
        sources = sorted(read - {n + 1 for n in nodes})
        return Segment(tuple(nodes), tuple(sources), stage_of.get(nodes[-1], 0))

    return [segment(nodes) for nodes in runs.values()]


def _costly(graph: Graph, runs: Iterable[list[int]], stored: set[int]) -> set[int]:
    """Return maps that several segments need and that are too expensive to recompute.

    A map is too expensive if its computation from stored maps takes a layer that is not pointwise.
    Of consecutive maps in the same segments, only the last one is returned.

    Args:
        graph: the network.
        runs: for each segment the nodes that it would compute.
        stored: the maps that are stored already.
    """
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
    """The boxes of every layer from which a tile of a segment's result is computed.

    Boxes are made when a property is read, since of most tiles only the cells are counted.

    Attributes:
        sizes: size of each map of the image.
        along: the spans of all layers, for each dim.
    """

    graph: Graph
    segment: Segment
    sizes: Sequence[tuple[int, ...]]
    along: Sequence[Along]

    @property
    def takes(self) -> list[int]:
        """The number of input cells of each layer."""
        return list(map(math.prod, zip(*(along.takes for along in self.along))))

    @property
    def makes(self) -> list[int]:
        """The number of output cells of each layer."""
        return list(map(math.prod, zip(*(along.makes for along in self.along))))

    @cached_property
    def read(self) -> dict[int, Box]:
        """The window that is read of each stored map."""
        return {
            source: box_of([along.read[source] for along in self.along])
            for source in self.segment.sources
        }

    @cached_property
    def parts(self) -> list[Part]:
        """The boxes of each layer."""
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
    """Return the boxes of every layer from which the box ``result`` of a segment is computed."""
    spans = zip(result.start, result.stop)
    return Chain(
        layout.graph,
        segment,
        layout.sizes,
        [layout.along(segment.nodes, dim, span) for dim, span in enumerate(spans)],
    )


def rows_read(layout: Layout, segment: Segment, rows: Span) -> dict[int, Span]:
    """Return the rows of each stored map from which some rows of a segment's result are computed.

    Args:
        layout: the tiles of the image.
        segment: the segment.
        rows: the span of rows of its result.
    """
    return layout.along(segment.nodes, 0, rows).read
