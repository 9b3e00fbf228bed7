"""Find the cells of each feature map that a part of a later feature map depends on.

One recurrence over the graph, from the last node backwards, finds these cells. It serves both tiles
that exchange halos or windows (:mod:`distseg.tiling.layout`) and streamed tiles
(:mod:`distseg.tiling.segment`). A *node* is a layer call, a *map* is a feature map
(:mod:`distseg.tiling.graph`), and a *span* (start, stop) is a range of cells along one dim.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from distseg.tiling.access_pattern import Span, inside
from distseg.tiling.graph import Node


@dataclass(frozen=True)
class LayerSpans:
    """The cells that each of several tiles reads and computes at one layer call, along one dim.

    Each list has one span (start, stop) for each tile.

    Attributes:
        available: the cells of the first input that the tile holds.
        input: the cells of the first input, inside the map, from which the result is computed.
        padded_input: the span of the first input that the node reads, which may extend beyond the
            map into the padding.
        output: the cells of the result.
    """

    available: list[Span]
    input: list[Span]
    padded_input: list[Span]
    output: list[Span]


@dataclass(frozen=True)
class SegmentSpans:
    """The cells that one tile reads and computes at each layer call of a segment, along one dim.

    Attributes:
        input, padded_input, output: a span (start, stop) for each node, as in :class:`LayerSpans`.
        input_cells, output_cells: lengths of the spans ``input`` and ``output``.
        read: for each map that the segment reads and does not compute, the span to read.
    """

    input: list[Span]
    padded_input: list[Span]
    output: list[Span]
    input_cells: list[int]
    output_cells: list[int]
    read: dict[int, Span]

    @classmethod
    def from_layers(
        cls, needs: Sequence[LayerSpans], read: Mapping[int, list[Span]]
    ) -> SegmentSpans:
        """Return the spans of the first of the tiles in ``needs`` and ``read``, often the only one.

        Args:
            needs: for each node of the segment, the spans of one or several tiles.
            read: for each map that the segment reads, the span of each of these tiles.
        """
        inputs = [need.input[0] for need in needs]
        padded = [need.padded_input[0] for need in needs]
        output = [need.output[0] for need in needs]
        first = {source: spans[0] for source, spans in read.items()}
        return cls(inputs, padded, output, _lengths(inputs), _lengths(output), first)


def _lengths(spans: Sequence[Span]) -> list[int]:
    return [b - a for a, b in spans]


def needs_along(
    graph: Sequence[Node],
    numbers: Sequence[int],
    dim: int,
    sizes: Sequence[int],
    wanted: list[Span],
    owned: Sequence[list[Span]] | None = None,
    points: Container[int] = (),
) -> tuple[list[LayerSpans], dict[int, list[Span]]]:
    """Return which cells of each feature map tiles need, along one dim, to compute a result.

    Args:
        graph: all nodes of the network.
        numbers: the indices of the nodes that tiles compute, in order.
        dim: the spatial dim along which spans (start, stop) are computed.
        sizes: size of each map along the dim.
        wanted: for each tile, the span of the result of the last node in ``numbers`` to compute.
        owned: for each map, a span that each tile gets even if it needs less; None for no such
            spans.
        points: the nodes before which tiles exchange. Of the first input of such a node, a tile
            needs only the cells that it owns, because the exchange brings all others.

    Returns:
        A list with the spans of all tiles for each node in ``numbers``, and a dict. Its keys are
        the indices of the maps that these nodes read or compute; its values are the spans that each
        tile must have.
    """
    needed = _needed(graph, numbers, dim, sizes, wanted, owned, points)
    has = {source: needed[source] for source in needed.keys() - {number + 1 for number in numbers}}
    found: list[LayerSpans] = []
    for number in numbers:
        node, there = graph[number], has[graph[number].first]
        if node.simple and number not in points:
            output = inputs = padded = there
        else:
            output = needed[number + 1]
            n, m = sizes[node.first], sizes[number + 1]
            pairs = [input_of(node, dim, span, n, m) for span in output]
            inputs, padded = map(list, zip(*pairs))
        found.append(LayerSpans(there, inputs, padded, output))
        has[number + 1] = output
    return found, needed


def _needed(
    graph: Sequence[Node],
    numbers: Sequence[int],
    dim: int,
    sizes: Sequence[int],
    wanted: list[Span],
    owned,
    points,
) -> dict[int, list[Span]]:
    """Return, for each map, the span of cells that each tile needs (:func:`needs_along`).

    The arguments are those of :func:`needs_along`; ``owned`` may be None.
    """
    needed = {numbers[-1] + 1: wanted}

    def extend(source: int, spans: list[Span]) -> None:
        """Extend the needed spans of map ``source`` to cover ``spans`` too, for each tile."""
        before = needed.get(source, owned and owned[source])
        needed[source] = list(map(hull, before, spans)) if before else spans

    for number in reversed(numbers):
        if number + 1 not in needed:
            # Other nodes read only the size of this map, so any span of it will do.
            m, n = sizes[number + 1], sizes[numbers[-1] + 1]
            spans = [(a * m // n, -(-b * m // n)) for a, b in wanted]
            extend(number + 1, owned[number + 1] if owned else spans)
        node, output = graph[number], needed[number + 1]
        for source in node.inputs[1:]:
            extend(source, [inside(span, sizes[source]) for span in output])
        inputs = [
            input_of(node, dim, span, sizes[node.first], sizes[number + 1])[0] for span in output
        ]
        pattern = node.along(dim)
        has = number in points or (pattern is not None and pattern.alike)
        extend(node.first, owned[node.first] if owned and has else inputs)
    return needed


def input_of(node: Node, dim: int, output: Span, n: int, m: int) -> tuple[Span, Span]:
    """Return the cells of a node's first input from which a span of the node's result is computed.

    Args:
        node: the layer call.
        dim: the spatial dim, counted from 0.
        output: the span (start, stop) of the result.
        n, m: sizes of the whole input and of the whole result.

    Returns:
        Two spans. The first has the cells of the map that are needed, including those that the
        padding repeats. The second is what the node reads, in which padding counts as cells before
        0 and from ``n`` on.
    """
    pattern = node.along(dim)
    if pattern is None:
        return inside(output, n), inside(output, n)
    padded = pattern.for_sizes(n, m).needs(*output)
    return inside(padded, n, pattern.mirrored), padded if pattern.beyond else inside(padded, n)


def hull(one: Span, other: Span) -> Span:
    """Return the shortest span that contains both spans."""
    return min(one[0], other[0]), max(one[1], other[1])
