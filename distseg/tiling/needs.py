"""What is needed of each feature map for a part of a later one: one recurrence over the graph, from behind.

It is that of tiles that exchange borders, of windows, and of streamed tiles (:mod:`distseg.tiling.layout`, :mod:`distseg.tiling.segment`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Container, Mapping, Sequence

from distseg.tiling.access_pattern import Span, inside
from distseg.tiling.graph import Node
from distseg.tiling.tile import Box


@dataclass(frozen=True)
class Need:
    """One node along one dim: the spans of several tiles, in cells. ``held``, ``taken``, ``raw``, ``made``: as :class:`distseg.tiling.layout.Part`'s."""

    held: list[Span]
    taken: list[Span]
    raw: list[Span]
    made: list[Span]


@dataclass(frozen=True)
class Along:
    """One tile along one dim, at each of some nodes: the spans of :class:`Need`, and how many cells ``taken`` and ``made`` have.

    Attributes:
        read: what is needed of each map that none of the nodes makes.
    """

    taken: list[Span]
    raw: list[Span]
    made: list[Span]
    takes: list[int]
    makes: list[int]
    read: dict[int, Span]

    @classmethod
    def of(cls, needs: Sequence[Need], read: Mapping[int, list[Span]]) -> "Along":
        taken, raw, made = (
            [getattr(need, field)[0] for need in needs] for field in ("taken", "raw", "made")
        )
        cells = lambda spans: [b - a for a, b in spans]
        return cls(
            taken,
            raw,
            made,
            cells(taken),
            cells(made),
            {source: spans[0] for source, spans in read.items()},
        )


def needs_along(
    graph: Sequence[Node], numbers: Sequence[int], dim: int, sizes: Sequence[int], wanted: list[Span], owned: Sequence[list[Span]] | None = None,
    points: Container[int] = (),
) -> tuple[list[Need], dict[int, list[Span]]]:  # fmt: skip
    """What each of several tiles of a dim holds, takes and makes at each of some nodes; and what it must have of each map.

    Args:
        numbers: of the nodes, in order.
        sizes: of each map.
        wanted: what each tile is to have of the last one's result.
        owned: what each tile has of each map at least.
        points: the nodes before which a tile needs no more than it owns of the first input, until it is given what it takes.
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
            taken, raw = map(
                list,
                zip(
                    *(
                        taken_of(node, dim, span, sizes[node.first], sizes[number + 1])
                        for span in made
                    )
                ),
            )
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
    """What each tile must have of each map."""
    held = {numbers[-1] + 1: wanted}

    def hold(source: int, spans: list[Span]) -> None:
        before = held.get(source, owned and owned[source])
        held[source] = list(map(hull, before, spans)) if before else spans

    for number in reversed(numbers):
        if number + 1 not in held:  # of which others look at the size alone
            m, n = sizes[number + 1], sizes[numbers[-1] + 1]
            hold(
                number + 1,
                owned[number + 1] if owned else [(a * m // n, -(-b * m // n)) for a, b in wanted],
            )
        node, made = graph[number], held[number + 1]
        for source in node.inputs[1:]:
            hold(source, [inside(span, sizes[source]) for span in made])
        taken = [
            taken_of(node, dim, span, sizes[node.first], sizes[number + 1])[0] for span in made
        ]
        has = number in points or node.footprints and node.along(dim).alike
        hold(node.first, owned[node.first] if owned and has else taken)
    return held


def taken_of(node: Node, dim: int, made: Span, n: int, m: int) -> tuple[Span, Span]:
    """Return (taken, raw) along a dim: the cells of the first input that a result is made from, in the map and with what lies beyond it.

    Args:
        n, m: cells of the input and of the whole result.
    """
    footprint = node.along(dim)
    if footprint is None:
        return inside(made, n), inside(made, n)
    raw = footprint.at(n, m).needs(*made)
    return inside(raw, n, footprint.mirrored), raw if footprint.beyond else inside(raw, n)


def hull(one: Span, other: Span) -> Span:
    return min(one[0], other[0]), max(one[1], other[1])


def box_of(spans: Sequence[Span]) -> Box:
    return Box(*zip(*spans))
