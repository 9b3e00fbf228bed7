"""Who owns and who holds which cells of each feature map, where tiles exchange borders instead of reading halos.

Along each dim the graph's nodes turn cuts between tiles into cuts of every feature map. From the last layer backwards
each tile then needs what its result looks at, until an exchange: before it a tile has its own cells only, behind it
those with a margin that the layers up to the next exchange eat. Two 3-wide convolutions, exchanged before the first::

    owned            |. . . .|. . . .|
    held             |. . . .|                left tile, before the exchange
    taken            |. . . .|. .|            a margin of 2 from its neighbour
    after one conv   |. . . .|.|
    after two        |. . . .|

All is done per dim: a tile's boxes are products of spans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Callable, Container, Iterable, Sequence

from distseg.config.sizes import Size
from distseg.tiling.access_pattern import Span
from distseg.tiling.graph import Graph, Node
from distseg.tiling.needs import Along, Need, box_of, hull, needs_along, taken_of
from distseg.tiling.tile import Box, ReceptiveField


@dataclass(frozen=True)
class Region:
    """The part of a feature map of ``size`` that a tile holds, and the part of it that it owns."""

    size: tuple[int, ...]
    owned: Box
    held: Box

    @property
    def own(self) -> Box:
        """What is owned inside what is held."""
        return self.owned.relative_to(self.held)


@dataclass(frozen=True)
class Part(Region):
    """What one tile does at one node, in cells: a region of the feature map that the node reads, the first of several, and what comes of it.

    Attributes:
        taken: what the result is computed from, inside the map; of further maps that are ``made``'s cells.
        raw: the same with what lies beyond the map, in the padding.
        made: the result, in cells of its feature map.
        result: the size of that.
    """

    taken: Box
    raw: Box
    made: Box
    result: tuple[int, ...]


class Layout:
    """All tiles of one image at all nodes of a graph.

    Args:
        image: size in pixels.
        borders: the positions 0 .. n between tiles along each dim.
        exchange_every: a number of layers that look beyond a tile, ``level`` or ``all``.
        fuse_below: layers on tiles with fewer cells than this along a dim share one exchange.
        stored: the nodes whose first input is stored in any case: there tiles exchange, rather than behind layers that look at single cells.

    Attributes:
        sizes: of the maps.
        points: the nodes before which tiles exchange; ``exchanged``: the maps that these read.

    Raises:
        ValueError: a feature map with fewer cells than tiles, or a result that is not of the image's size.
    """

    def __init__(
        self, graph: Graph, image: Sequence[int], borders: Sequence[Sequence[int]], exchange_every: str = "1", fuse_below: int = 0, stored: Container[int] = (),
    ):  # fmt: skip
        self.graph, self.image = graph, tuple(image)
        self.grid = tuple(len(b) - 1 for b in borders)
        maps = [_maps(graph, dim, n, tuple(b)) for dim, (n, b) in enumerate(zip(image, borders))]
        points = _exchange_points(graph, maps, exchange_every, fuse_below)
        self.points = frozenset(_earlier(graph, point, stored) for point in points)
        self.exchanged = frozenset(graph[point].first for point in self.points)
        self._maps, self._needs = (
            maps,
            [_needs(graph, dim, m, self.points) for dim, m in enumerate(maps)],
        )
        self.sizes = [tuple(m[source][0] for m in maps) for source in range(graph.result + 1)]
        self.result = self.sizes[-1]
        self.result_cuts = tuple(m[-1][1] for m in maps)
        self._starts = [{start: k for k, start in enumerate(b)} for b in borders]
        self._parts: dict[tuple, Part] = {}
        self.along = lru_cache(_SPANS)(self._along)

    def check_result(self, borders: Sequence[Sequence[int]]) -> "Layout":
        """Refuse a model whose result is not of the image's size.

        Raises:
            ValueError: naming both sizes.
        """
        if not self.graph.of_image and self.result_cuts != tuple(map(tuple, borders)):
            raise ValueError(
                f"the model makes {Size(self.result)} pixels of an image of {Size(self.image)}, but a segmentation network keeps the size"
            )
        return self

    def cell_of(self, tile: Box) -> tuple[int, ...]:
        """Where a tile stands in the grid."""
        return tuple(starts[a] for starts, a in zip(self._starts, tile.start))

    def part(self, number: int, cell: tuple[int, ...]) -> Part:
        """At a node, of the tile at ``cell`` of the grid."""
        if (number, cell) not in self._parts:
            self._parts[number, cell] = self._part(number, cell)
        return self._parts[number, cell]

    def _part(self, number: int, cell: tuple[int, ...]) -> Part:
        needs, source = [need[number] for need in self._needs], self.graph[number].first

        def box(field: str) -> Box:
            return box_of([getattr(need, field)[c] for need, c in zip(needs, cell)])

        return Part(
            self.sizes[source],
            self.owned(source, cell),
            box("held"),
            box("taken"),
            box("raw"),
            box("made"),
            self.sizes[number + 1],
        )

    def owned(self, source: int, cell: Sequence[int]) -> Box:
        """What a tile owns of a map."""
        return box_of([m[source][1][c : c + 2] for m, c in zip(self._maps, cell)])

    def made(self, source: int, cell: tuple[int, ...]) -> Box:
        """What a tile has of a map, before its margin is fetched."""
        return (
            self.part(self.graph.readers[source][0], cell).held
            if source == 0
            else self.part(source - 1, cell).made
        )

    def result_of(self, cell: Sequence[int]) -> Box:
        """What the tile owns of the result."""
        return self.owned(self.graph.result, cell)

    def _along(self, numbers: tuple[int, ...], dim: int, span: Span) -> Along:
        """What nodes need along a dim for a span of the last one's result. The tiles of a grid have few spans, which are found once."""
        needs, held = needs_along(
            self.graph, numbers, dim, [size[dim] for size in self.sizes], [span]
        )
        inside = {number + 1 for number in numbers}
        return Along.of(
            needs, {source: spans for source, spans in held.items() if source not in inside}
        )

    def spans(self, number: int) -> tuple[list[tuple[int, ...]], list[tuple[Span, ...]]]:
        """Of the first map that a node reads, along each dim: the cuts between owners, and what each tile takes."""
        source = self.graph[number].first
        return [m[source][1] for m in self._maps], [need[number].taken for need in self._needs]

    def margins(self, source: int) -> tuple[list[tuple[int, ...]], list[tuple[Span, ...]]]:
        """The same of a map, of all nodes before which it is exchanged."""
        spans = [
            self.spans(number)[1]
            for number in self.graph.readers[source]
            if number in self.points and self.graph[number].first == source
        ]
        return [m[source][1] for m in self._maps], [
            [reduce(hull, each) for each in zip(*along)] for along in zip(*spans)
        ]


_SPANS = 512  # whose needs a layout keeps

_Map = tuple[int, tuple[int, ...]]  # size and cuts of a feature map along one dim


def _maps(graph: Graph, dim: int, n: int, borders: tuple[int, ...]) -> list[_Map]:
    """All feature maps, the image first.

    Who owns the middle of what a cell looks at owns the cell. Where that ends beside the borders, as behind a padding on one side only, who
    owns the cell's pixels does.
    """
    sizes = graph.sizes_along(dim, n)
    at = lambda number: graph[number].along(dim).at(sizes[graph[number].first], sizes[number + 1])
    maps = _cut(graph, dim, sizes, borders, lambda number, cuts: map(at(number).cut, cuts[1:-1]))
    if maps[-1][0] == n and maps[-1][1] != borders:
        if graph.sized:
            maps = _cut(
                graph,
                dim,
                sizes,
                borders,
                lambda number, cuts: (-(-b * sizes[number + 1] // n) for b in borders[1:-1]),
            )
        else:
            scales = scales_of(graph, dim)
            maps = _cut(
                graph,
                dim,
                sizes,
                borders,
                lambda number, cuts: (math.ceil(b / scales[number + 1]) for b in borders[1:-1]),
            )
    return maps


def _cut(
    graph: Graph,
    dim: int,
    sizes: Sequence[int],
    borders: tuple[int, ...],
    inner: Callable[[int, tuple[int, ...]], Iterable[int]],
) -> list[_Map]:
    """Return maps cut where ``inner`` says, from the number of a node that has a footprint and the cuts of its first input."""
    maps = [(sizes[0], borders)]
    for number, node in enumerate(graph):
        n = sizes[node.inputs[-1]]  # to whose size others are cut
        short = min(sizes[source] for source in node.inputs)
        if short < n:
            raise ValueError(
                f"layer {node.name} joins maps of {short} and {n} cells along dim {dim}, but only what comes from further down may be the longer one, and is cut"
            )
        footprint, (_, cuts), (followed, like) = (
            node.along(dim),
            maps[node.first],
            maps[node.follows],
        )
        if footprint is None or node.like is not None and sizes[number + 1] == followed:
            maps.append((followed, like))  # who owns a cell of one owns that of the other
        else:
            maps.append(
                _mapped(
                    node, sizes[node.first], sizes[number + 1], len(cuts) - 1, inner(number, cuts)
                )
            )
    return maps


def _mapped(node: Node, n: int, m: int, tiles: int, inner: Iterable[int]) -> _Map:
    if m < tiles:
        raise ValueError(
            f"layer {node.name} makes {max(m, 0)} cells of {n} along a dim with {tiles} tiles, and each tile needs one: take larger images or fewer tiles"
        )
    return m, (0, *(min(max(c, k), m - tiles + k) for k, c in enumerate(inner, 1)), m)


def _eats(node: Node, dim: int, before: _Map, after: _Map) -> bool:
    """Whether some tile's result looks at cells that the tile does not own."""
    if node.footprints and node.along(dim).alike:
        return False
    spans = [taken_of(node, dim, own, before[0], after[0])[0] for own in pairwise(after[1])]
    return any(a < b and (a < c or d < b) for (a, b), (c, d) in zip(spans, pairwise(before[1])))


def _needs(graph: Graph, dim: int, maps: list[_Map], points: frozenset[int]) -> list[Need]:
    """Of all tiles of the dim; each has its own cells at least."""
    owned = [list(pairwise(cuts)) for _, cuts in maps]
    return needs_along(
        graph, range(len(graph)), dim, [n for n, _ in maps], owned[-1], owned, points
    )[0]


@dataclass(frozen=True)
class _Since:
    """What lies on the way to a map since tiles last exchanged.

    Attributes:
        eaten: layers that looked beyond their tile since the last exchange or, by ``level``, since the last change of size.
        fused: the last of them looked at a small map.
        behind: there has been an exchange at all.
        bare: it is made from a map that had no margin, and must be exchanged before it is looked at.
    """

    eaten: int = 0
    fused: bool = False
    behind: bool = False
    bare: bool = False


def _exchange_points(
    graph: Graph, maps: Sequence[list[_Map]], every: str, fuse_below: int
) -> list[int]:
    """The nodes before which tiles exchange: of those that look beyond their tile every k-th, or the first of each level."""
    points: list[int] = []
    ways = [_Since()]
    for number, node in enumerate(graph):
        met = [ways[source] for source in node.inputs]
        behind = any(way.behind for way in met)
        bare = any(way.bare for way in met) or behind and not all(way.behind for way in met)
        eaten, fused = met[0].eaten, met[0].fused
        if any(_eats(node, dim, m[node.first], m[number + 1]) for dim, m in enumerate(maps)):
            small = min(b - a for m in maps for a, b in pairwise(m[node.first][1])) < fuse_below
            due = (
                eaten == 0
                if every == "level"
                else eaten % int(every) == 0
                if every != "all"
                else False
            )
            if due and not (small and fused) or bare:
                points.append(number)
                eaten = 0 if bare else eaten  # counted anew
                behind, bare = True, False
            eaten, fused = eaten + 1, small
        if every == "level" and any(f.pixels(Fraction(1)) != 1 for f in node.footprints):
            eaten = 0
        ways.append(_Since(eaten, fused, behind, bare))
    return points


def _earlier(graph: Graph, point: int, stored: Container[int]) -> int:
    """Where a map is stored before layers that look at single cells and lead to ``point``; else that."""
    number = point
    while number not in stored:
        number = graph[number].first - 1
        if number < 0 or not graph[number].simple:
            return point
    return number


def reach_of(graph: Graph, dims: int) -> ReceptiveField:
    """Halo and stride of a network, by arithmetic.

    Args:
        dims: number of spatial dims.

    Raises:
        ValueError: a result that is not of the image's size.
    """
    pairs = [_reach_along(graph, dim) for dim in range(dims)]
    return ReceptiveField(halo=tuple(h for h, _ in pairs), stride=tuple(s for _, s in pairs))


def _reach_along(graph: Graph, dim: int) -> tuple[int, int]:
    scales = scales_of(graph, dim)
    aligned = [
        scale for scale in scales if scale.denominator == 1 or not graph.sized
    ]  # no border of 10/7 pixels lies between cells
    stride = math.lcm(
        *(scale.numerator for scale in aligned),
        *(getattr(node.along(dim), "multiple", 1) for node in graph),
    )
    if graph.sized:
        return _sized_reach(graph, dim, stride), stride
    sizes = lambda n: graph.sizes_along(dim, n)
    a = (
        _FAR * stride
    )  # a tile in the midst of an image none of whose ends it sees; all else moves with it
    _, held = needs_along(
        graph,
        range(len(graph)),
        dim,
        sizes(2 * a),
        [(int(a / scales[-1]), int((a + stride) / scales[-1]))],
    )
    first, last = held[0][0]
    halo = max(a - first, last - a - stride)
    n = stride * (8 + -(-4 * halo // stride))  # so long that no layer sees both of its ends
    if (made := sizes(n)[-1]) != n and not graph.of_image:
        raise ValueError(
            f"an image of {n} pixels along dim {dim} comes out as {made}, but a segmentation network keeps the size"
        )
    return halo, stride


def _sized_reach(graph: Graph, dim: int, stride: int) -> int:
    """Return the largest halo of some tiles of some images. Where cells hang on the sizes of maps no two images have the same."""
    found = 0
    for n in (
        _LONG * stride,
        _LONG * stride + 1,
        _LONG * stride + stride // 2 + 1,
        2 * _LONG * stride - 1,
    ):
        sizes = graph.sizes_along(dim, n)
        if sizes[-1] != n and not graph.of_image and n % stride:
            continue  # it takes images of some sizes only
        if sizes[-1] != n and not graph.of_image:
            raise ValueError(
                f"an image of {n} pixels along dim {dim} comes out as {sizes[-1]}, but a segmentation network keeps the size"
            )
        tiles = [
            (a, a + stride)
            for a in (0, n // (2 * stride) * stride, (n - 1) // stride * stride - stride)
        ]
        wanted = [(a * sizes[-1] // n, -(-b * sizes[-1] // n)) for a, b in tiles]
        _, held = needs_along(graph, range(len(graph)), dim, sizes, wanted)
        found = max(
            found, *(max(a - first, last - b) for (a, b), (first, last) in zip(tiles, held[0]))
        )
    return found


_FAR = 1 << 20  # cells of the stride
_LONG = 64  # the same, of the images that halos are looked at in where they hang on the size


def scales_of(graph: Graph, dim: int) -> list[Fraction]:
    """The pixels that a cell stands for, of each map."""
    found = [Fraction(1)]
    for node in graph:
        footprint, before = node.along(dim), found[node.follows]
        found.append(before if footprint is None else footprint.pixels(before))
    return found
