"""The cells of each feature map that a part of a later feature map depends on.

They are found by one recurrence over the graph, from the last node backwards. It serves tiles that
exchange halos and windows (:mod:`distseg.tiling.layout`) and streamed tiles
(:mod:`distseg.tiling.segment`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from distseg.tiling.access_pattern import Span, inside
from distseg.tiling.graph import Node
from distseg.tiling.tile import Box


@dataclass(frozen=True)
class Need:
    """The spans of several tiles at one node along one dim, in cells.

    Attributes:
        held: the cells of the first input that are available on the tile.
        taken: the input span inside the map, from which the result is computed.
        raw: the input span including cells beyond the map, in the padding.
        made: the output span.
    """

    held: list[Span]
    taken: list[Span]
    raw: list[Span]
    made: list[Span]


@dataclass(frozen=True)
class Along:
    """The spans of one tile along one dim at each of several nodes.

    Attributes:
        taken, raw, made: a span for each node, as in :class:`Need`.
        takes, makes: lengths of the spans ``taken`` and ``made``.
        read: the span that is needed of each map that none of the nodes computes.
    """

    taken: list[Span]
    raw: list[Span]
    made: list[Span]
    takes: list[int]
    makes: list[int]
    read: dict[int, Span]

    @classmethod
    def from_needs(cls, needs: Sequence[Need], read: Mapping[int, list[Span]]) -> Along:
        """Return the spans of the first tile of ``needs`` and ``read``."""
        taken = [need.taken[0] for need in needs]
        raw = [need.raw[0] for need in needs]
        made = [need.made[0] for need in needs]
        first = {source: spans[0] for source, spans in read.items()}
        return cls(taken, raw, made, _lengths(taken), _lengths(made), first)


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
) -> tuple[list[Need], dict[int, list[Span]]]:
    """Return the spans of several tiles along a dim, at each of some nodes and of each map.

    Args:
        graph: all nodes of the network.
        numbers: the nodes to look at, in order.
        dim: the dim.
        sizes: size of each map along the dim.
        wanted: for each tile the wanted span of the last node's result.
        owned: for each map the span that each tile has at least.
        points: the nodes before which tiles exchange. A tile needs only the owned cells of such a
            node's first input; the exchange brings the others.

    Returns:
        For each node its spans, and for each map the span that each tile must have.
    """
    held = _held(graph, numbers, dim, sizes, wanted, owned, points)
    has = {source: held[source] for source in held.keys() - {number + 1 for number in numbers}}
    found: list[Need] = []
    for number in numbers:
        node, there = graph[number], has[graph[number].first]
        if node.simple and number not in points:
            made = taken = raw = there
        else:
            made = held[number + 1]
            n, m = sizes[node.first], sizes[number + 1]
            pairs = [taken_of(node, dim, span, n, m) for span in made]
            taken, raw = map(list, zip(*pairs))
        found.append(Need(there, taken, raw, made))
        has[number + 1] = made
    return found, held


def _held(
    graph: Sequence[Node],
    numbers: Sequence[int],
    dim: int,
    sizes: Sequence[int],
    wanted: list[Span],
    owned,
    points,
) -> dict[int, list[Span]]:
    """Return for each map the span that each tile must have."""
    held = {numbers[-1] + 1: wanted}

    def hold(source: int, spans: list[Span]) -> None:
        """Extend the spans of a map such that they cover ``spans`` too."""
        before = held.get(source, owned and owned[source])
        held[source] = list(map(hull, before, spans)) if before else spans

    for number in reversed(numbers):
        if number + 1 not in held:
            # Other nodes read only the size of this map, so any span of it will do.
            m, n = sizes[number + 1], sizes[numbers[-1] + 1]
            spans = [(a * m // n, -(-b * m // n)) for a, b in wanted]
            hold(number + 1, owned[number + 1] if owned else spans)
        node, made = graph[number], held[number + 1]
        for source in node.inputs[1:]:
            hold(source, [inside(span, sizes[source]) for span in made])
        taken = [
            taken_of(node, dim, span, sizes[node.first], sizes[number + 1])[0] for span in made
        ]
        pattern = node.along(dim)
        has = number in points or (pattern is not None and pattern.alike)
        hold(node.first, owned[node.first] if owned and has else taken)
    return held


def taken_of(node: Node, dim: int, made: Span, n: int, m: int) -> tuple[Span, Span]:
    """Return the input spans (taken, raw) of a span of a node's result, along a dim.

    Args:
        node: the node; the spans are those of its first input.
        dim: the dim.
        made: the span of the result.
        n, m: sizes of the whole input and of the whole result.

    Returns:
        The span inside the map, and the span including cells beyond the map, in the padding.
    """
    footprint = node.along(dim)
    if footprint is None:
        return inside(made, n), inside(made, n)
    raw = footprint.for_sizes(n, m).needs(*made)
    return inside(raw, n, footprint.mirrored), raw if footprint.beyond else inside(raw, n)


def hull(one: Span, other: Span) -> Span:
    """Return the shortest span that contains both spans."""
    return min(one[0], other[0]), max(one[1], other[1])


def box_of(spans: Sequence[Span]) -> Box:
    """Return the box with these spans, one per dim."""
    return Box(*zip(*spans))
