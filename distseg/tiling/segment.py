"""Segments: the layer calls between stored feature maps, and the boxes that a tile depends on.

Streaming computes one tile at a time. So a feature map is stored wherever a later layer needs all
of it, such as before each active norm (a norm that computes its statistics from the current
images). A segment is the nodes (layer calls) that compute a stored
map from earlier stored maps. A tile of the segment's result is computed from a window of each of
those earlier maps. In this example the last segment pops a skip that begins after ``norm act`` of
the segment before it. So it computes ``norm act`` again, on a window of the stored map B::

    stored           A           B                        C
    layers           | conv      | norm act pool conv     | norm act up pop ...

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
from distseg.tiling.layout import LayerView, Layout
from distseg.tiling.needs import SegmentSpans
from distseg.tiling.tile import Box, box_of


@dataclass(frozen=True)
class Segment:
    """The nodes (layer calls) that compute one stored feature map from other stored feature maps.

    Attributes:
        nodes: indices of the nodes in the graph of the network, in order.
        sources: indices of the stored maps that these nodes read.
        stage: the pipeline stage that runs these nodes.
    """

    nodes: tuple[int, ...]
    sources: tuple[int, ...]
    stage: int = 0

    @property
    def result(self) -> int:
        """The index of the map that the segment computes."""
        return self.nodes[-1] + 1


def segments_of(graph: Graph, cuts: Iterable[int], stages: Sequence[range] = ()) -> list[Segment]:
    """Return the segments of a network, ordered by the map that they compute.

    Stored maps are ``cuts``, the maps that cross between stages, the network's result, and maps
    that would be too expensive to compute in several segments.

    Args:
        graph: the network.
        cuts: indices of maps that must be stored.
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
    """Return the maps to store so that several segments need not each compute them.

    Maps that pointwise layers compute from one stored map are left out, because computing them
    again is cheap. If the same segments need several consecutive maps, only the last of these maps
    is returned.

    Args:
        graph: the network.
        runs: for each segment, the indices of the nodes that it would run.
        stored: the indices of the maps that are stored already.
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
class TilePlan:
    """Boxes that the layers of a segment read and compute for one tile of the segment's result.

    The boxes are computed only when :attr:`read` or :attr:`views` is used. For most tiles only the
    numbers of cells are needed.

    Attributes:
        graph: the network.
        segment: the layer calls that compute the feature map of the tile.
        sizes: the size of each feature map of the whole image.
        along: for each dim, the spans of the boxes of all layers of the segment.
    """

    graph: Graph
    segment: Segment
    sizes: Sequence[tuple[int, ...]]
    along: Sequence[SegmentSpans]

    @property
    def input_cells(self) -> list[int]:
        """Number of input cells of each layer of the segment, for this tile."""
        return list(map(math.prod, zip(*(along.input_cells for along in self.along))))

    @property
    def output_cells(self) -> list[int]:
        """Number of output cells of each layer of the segment, for this tile."""
        return list(map(math.prod, zip(*(along.output_cells for along in self.along))))

    @cached_property
    def read(self) -> dict[int, Box]:
        """The window to read from each stored feature map, by the index of the map."""
        return {
            source: box_of([along.read[source] for along in self.along])
            for source in self.segment.sources
        }

    @cached_property
    def views(self) -> list[LayerView]:
        """The input box and output box of each layer of the segment, in order."""
        return [
            self._view(place, self.sizes[self.graph[number].first], self.sizes[number + 1])
            for place, number in enumerate(self.segment.nodes)
        ]

    def _view(self, place: int, size: tuple[int, ...], result: tuple[int, ...]) -> LayerView:
        inputs, padded, output = (
            box_of([spans[place] for spans in each])
            for each in zip(*((a.input, a.padded_input, a.output) for a in self.along))
        )
        return LayerView(size, inputs, inputs, inputs, padded, output, result)


def tile_plan(layout: Layout, segment: Segment, result: Box) -> TilePlan:
    """Return the boxes of all layers that are needed to compute one tile of a segment's result.

    Args:
        layout: the layout of the image's tiles.
        segment: the layer calls that compute the feature map.
        result: the tile, a box of the feature map that the segment computes.
    """
    spans = zip(result.start, result.stop)
    return TilePlan(
        layout.graph,
        segment,
        layout.sizes,
        [layout.along(segment.nodes, dim, span) for dim, span in enumerate(spans)],
    )


def rows_read(layout: Layout, segment: Segment, rows: Span) -> dict[int, Span]:
    """Return the rows that a segment reads to compute some rows of its result.

    The result has the span of these rows for each stored map that the segment reads.

    Args:
        layout: the layout of the image's tiles.
        segment: the layer calls that compute the feature map.
        rows: the span of the rows to compute.
    """
    return layout.along(segment.nodes, 0, rows).read
