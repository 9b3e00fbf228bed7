"""Layouts: the cells of each feature map that each tile owns, and the cells that it exchanges.

A layout is needed where tiles exchange halos between layers instead of reading them from the image.
First, the borders between tiles are followed through the graph to every feature map. Then the cells
that each tile needs are found, from the last layer backwards to an exchange. Before an exchange a
tile has only the cells that it owns. After the exchange the tile also has a halo, which the
layers before the next exchange use up. Two 3-wide convolutions with one exchange before the first::

    owned            |. . . .|. . . .|
    available        |. . . .|                left tile, before the exchange
    input            |. . . .|. .|            a halo of 2 cells from its neighbour
    after one conv   |. . . .|.|
    after two        |. . . .|

Every dim is handled by itself: the boxes of a tile are products of spans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from typing import NamedTuple

from distseg.config.sizes import Size
from distseg.tiling.access_pattern import Span
from distseg.tiling.graph import Graph, Node
from distseg.tiling.needs import LayerSpans, SegmentSpans, hull, input_of, needs_along
from distseg.tiling.tile import Box, ReceptiveField, box_of


@dataclass(frozen=True)
class MapView:
    """The box of a feature map that a tile owns, and the box that is available on the tile.

    Attributes:
        size: size of the whole feature map.
        owned: the cells that the tile owns.
        available: the cells that the tile holds, which include the cells that it owns.
    """

    size: tuple[int, ...]
    owned: Box
    available: Box

    @property
    def own(self) -> Box:
        """The owned box, counted from the first cell of the available box."""
        return self.owned.relative_to(self.available)


@dataclass(frozen=True)
class LayerView(MapView):
    """Boxes of one tile at one node (a layer call): the cells that it reads and those it computes.

    ``size``, ``owned`` and ``available`` are those of the node's first input.

    Attributes:
        input: the box of the first input that the node reads, without padding. Of each other input
            the node reads the box ``output``.
        padded_input: the box ``input`` together with the padding that the node reads.
        output: the output box, in cells of the result's feature map.
        output_size: size of the result's whole feature map.
    """

    input: Box
    padded_input: Box
    output: Box
    output_size: tuple[int, ...]


class Layout:
    """Boxes that each tile of an image owns, reads and computes, at each layer call of a network.

    Args:
        graph: the network.
        image: size of the image in pixels.
        borders: along each dim, the positions of tile borders from 0 to the size of the image.
        exchange_every: how often tiles exchange: before every k-th layer that reads beyond its
            tile (k as text, such as ``2``), before the first such layer at each resolution
            (``level``), or not at all (``all``).
        fuse_below: consecutive layers that read beyond their tile share one exchange if their tiles
            have fewer cells than this along some dim.
        stored: the nodes whose first input is stored as a whole in any case, as streaming does. If
            only pointwise layers lie between such a node and an exchange, the exchange moves back
            to this node.

    Attributes:
        sizes: size of each map.
        points: the nodes before which tiles exchange.
        exchanged: the maps that tiles exchange, which are the first inputs of these nodes.

    Raises:
        ValueError: a feature map has fewer cells than there are tiles along a dim, or a layer
            joins maps of sizes that do not fit.
    """

    def __init__(
        self,
        graph: Graph,
        image: Sequence[int],
        borders: Sequence[Sequence[int]],
        exchange_every: str = "1",
        fuse_below: int = 0,
        stored: Container[int] = (),
    ):
        along = [
            TileBorders.of_image(graph, dim, n, borders)
            for dim, (n, borders) in enumerate(zip(image, borders))
        ]
        beyond = frozenset().union(*(borders.reads_beyond for borders in along))
        small = {
            number
            for number in beyond
            if any(borders.shortest(graph[number].first) < fuse_below for borders in along)
        }
        found = exchange_points(graph, beyond, exchange_every, small)
        points = frozenset(_earlier(graph, point, stored) for point in found)
        maps = [borders.maps for borders in along]
        self.graph, self.image = graph, tuple(m[0][0] for m in maps)
        self.grid = tuple(len(m[0][1]) - 1 for m in maps)
        self.points = points
        self.exchanged = frozenset(graph[point].first for point in points)
        self._maps = maps
        self._needs = [borders.needs(points) for borders in along]
        self.sizes = [tuple(m[source][0] for m in maps) for source in range(graph.result + 1)]
        self.result = self.sizes[-1]
        self.result_cuts = tuple(m[-1][1] for m in maps)
        self._starts = [{start: k for k, start in enumerate(m[0][1])} for m in maps]
        self._parts: dict[tuple, LayerView] = {}
        self.along = lru_cache(_SPANS)(self._along)

    def check_result(self, borders: Sequence[Sequence[int]]) -> Layout:
        """Check that the result of the model has the size of the image; return this layout.

        Raises:
            ValueError: the sizes differ. The message names both.
        """
        if not self.graph.of_image and self.result_cuts != tuple(map(tuple, borders)):
            raise ValueError(
                f"the model's result has {Size(self.result)} pixels for an image of "
                f"{Size(self.image)} pixels, but a segmentation network keeps the size: pad its "
                f"convolutions, or resize the result"
            )
        return self

    def cell_of(self, tile: Box) -> tuple[int, ...]:
        """Return the position of a tile of the image in the grid of tiles."""
        return tuple(starts[a] for starts, a in zip(self._starts, tile.start))

    def part(self, number: int, cell: tuple[int, ...]) -> LayerView:
        """Return the boxes that one tile reads and computes at one node (layer call).

        Args:
            number: the index of the node.
            cell: the position of the tile in the grid.
        """
        if (number, cell) not in self._parts:
            self._parts[number, cell] = self._part(number, cell)
        return self._parts[number, cell]

    def _part(self, number: int, cell: tuple[int, ...]) -> LayerView:
        """Compute the boxes that :meth:`part` returns and caches."""
        needs, source = [need[number] for need in self._needs], self.graph[number].first

        def box(field: str) -> Box:
            return box_of([getattr(need, field)[c] for need, c in zip(needs, cell)])

        return LayerView(
            self.sizes[source],
            self.owned(source, cell),
            box("available"),
            box("input"),
            box("padded_input"),
            box("output"),
            self.sizes[number + 1],
        )

    def owned(self, source: int, cell: Sequence[int]) -> Box:
        """Return the box of map ``source`` that the tile at position ``cell`` of the grid owns."""
        return box_of([m[source][1][c : c + 2] for m, c in zip(self._maps, cell)])

    def computed(self, source: int, cell: tuple[int, ...]) -> Box:
        """Return the box of a map that a tile has before it receives a halo from other tiles.

        The tile has computed this box, or has read it if the map is the image.

        Args:
            source: the index of the map.
            cell: the position of the tile in the grid.
        """
        if source == 0:
            return self.part(self.graph.readers[source][0], cell).available
        return self.part(source - 1, cell).output

    def _along(self, numbers: tuple[int, ...], dim: int, span: Span) -> SegmentSpans:
        """Return the spans of cells that one tile reads and computes at several nodes, along a dim.

        The results are cached, as ``along``, because the many tiles of a grid have few different
        spans.

        Args:
            numbers: the indices of consecutive nodes (layer calls).
            dim: the spatial dim, counted from 0.
            span: the wanted span of the last node's result.
        """
        needs, needed = needs_along(
            self.graph, numbers, dim, [size[dim] for size in self.sizes], [span]
        )
        inside = {number + 1 for number in numbers}
        return SegmentSpans.from_layers(
            needs, {source: spans for source, spans in needed.items() if source not in inside}
        )

    def spans(self, number: int) -> tuple[list[tuple[int, ...]], list[tuple[Span, ...]]]:
        """Return, for a node's first input, the tile borders and the span that each tile reads.

        Returns:
            Two lists with one entry per dim: the tile borders, as positions from 0 to the size of
            the map; and for each tile along the dim, the span (start, stop) of input cells that the
            node reads to compute the tile's result.
        """
        source = self.graph[number].first
        return [m[source][1] for m in self._maps], [need[number].input for need in self._needs]

    def margins(self, source: int) -> tuple[list[tuple[int, ...]], list[tuple[Span, ...]]]:
        """Return the tile borders of an exchanged map, and the span of cells that each tile needs.

        A tile needs the cells that it reads at all nodes before which the map is exchanged.

        Args:
            source: the index of the map.

        Returns:
            Two lists with one entry per dim: the tile borders, as positions from 0 to the size of
            the map; and the span (start, stop) of each tile along the dim.
        """
        spans = [
            self.spans(number)[1]
            for number in self.graph.readers[source]
            if number in self.points and self.graph[number].first == source
        ]
        return [m[source][1] for m in self._maps], [
            [reduce(hull, each) for each in zip(*along)] for along in zip(*spans)
        ]


_SPANS = 512  # results that the cache of Layout.along keeps

_Map = tuple[int, tuple[int, ...]]  # size and cuts of a feature map along one dim


class TileCells(NamedTuple):
    """Numbers of cells that one tile reads and computes at one node (layer call), along one dim.

    Attributes:
        input: cells of the node's first input from which the tile computes its part of the result.
        had: cells of ``input`` that the tile has before it receives a halo from other tiles.
        output: cells of the result that the tile computes.
        held: cells of the first input that the tile holds before it receives a halo.
        before, after: cells of padding that the node reads on each side of its input.
    """

    input: int
    had: int
    output: int
    held: int
    before: int
    after: int


class TileBorders:
    """Tile borders of every feature map along one dim, and the cells that each tile needs.

    Args:
        graph: the network.
        dim: the spatial dim, counted from 0.
        maps: the size and the tile borders of each feature map along the dim, the image first.
    """

    def __init__(self, graph: Graph, dim: int, maps: list[_Map]):
        self.graph, self.dim, self.maps = graph, dim, maps
        self.only = lru_cache(None)(self._only)
        self.cells = lru_cache(None)(self._cells)

    @classmethod
    def of_image(cls, graph: Graph, dim: int, n: int, borders: Sequence[int]) -> TileBorders:
        """Return the tile borders of all feature maps, computed from those of the image.

        Args:
            graph: the network.
            dim: the spatial dim, counted from 0.
            n: the size of the image along the dim.
            borders: the tile borders of the image: positions from 0 to ``n``.
        """
        return cls(graph, dim, _maps(graph, dim, n, tuple(borders)))

    def _only(self, tile: int) -> TileBorders:
        """Return a copy with the two borders of the tile ``tile`` only."""
        maps = [(n, cuts[tile : tile + 2]) for n, cuts in self.maps]
        return TileBorders(self.graph, self.dim, maps)

    def shortest(self, source: int) -> int:
        """Return the number of cells of map ``source`` that the shortest tile owns."""
        return min(b - a for a, b in pairwise(self.maps[source][1]))

    @cached_property
    def reads_beyond(self) -> frozenset[int]:
        """The nodes (layer calls) at which some tile reads cells that another tile owns."""
        return frozenset(n for n in range(len(self.graph)) if self._reads_beyond(n))

    def _reads_beyond(self, number: int) -> bool:
        """Return True if at node ``number`` some tile reads cells that another tile owns."""
        node, dim = self.graph[number], self.dim
        pattern = node.along(dim)
        if pattern is not None and pattern.alike:
            return False
        (n, before), (m, after) = self.maps[node.first], self.maps[number + 1]
        for own, (c, d) in zip(pairwise(after), pairwise(before)):
            a, b = input_of(node, dim, own, n, m)[0]
            if a < b and (a < c or d < b):
                return True
        return False

    def needs(self, points: frozenset[int]) -> list[LayerSpans]:
        """Return, for each node, the spans of cells that tiles hold, read and compute.

        Each tile holds at least the cells that it owns.

        Args:
            points: the nodes before which tiles exchange.
        """
        owned = [list(pairwise(cuts)) for _, cuts in self.maps]
        sizes = [n for n, _ in self.maps]
        numbers = range(len(self.graph))
        return needs_along(self.graph, numbers, self.dim, sizes, owned[-1], owned, points)[0]

    def _cells(self, points: frozenset[int]) -> list[TileCells]:
        """Return, for each node, the numbers of cells that the first tile reads and computes.

        Args:
            points: the nodes before which tiles exchange.
        """
        needs, found = self.needs(points), []
        for number, need in enumerate(needs):
            source = self.graph[number].first
            if source:
                a, b = needs[source - 1].output[0]
            else:
                a, b = needs[self.graph.readers[0][0]].available[0]
            (first, last), (start, stop) = need.input[0], need.output[0]
            had = max(0, min(b, last) - max(a, first))
            low, high = need.padded_input[0]
            found.append(
                TileCells(last - first, had, stop - start, b - a, first - low, high - last)
            )
        return found


def _maps(graph: Graph, dim: int, n: int, borders: tuple[int, ...]) -> list[_Map]:
    """Return the size and the tile borders of all feature maps along a dim, the image first.

    A cell belongs to the tile that owns the middle of the inputs that the cell reads. With
    one-sided padding, this rule may give the last map other borders than the image. Then a cell
    belongs to the tile that owns the pixels at the position of the cell.

    Args:
        graph: the network.
        dim: the spatial dim, counted from 0.
        n: the size of the image along the dim.
        borders: the tile borders of the image along the dim.
    """
    sizes = graph.sizes_along(dim, n)

    def at(number):
        return graph[number].along(dim).for_sizes(sizes[graph[number].first], sizes[number + 1])

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
    """Return the size and the tile borders of all feature maps along a dim.

    A pointwise node keeps the borders of its input.

    Args:
        graph: the network.
        dim: the spatial dim, counted from 0.
        sizes: the size of each feature map along the dim.
        borders: the tile borders of the image.
        inner: a function that is called for each node that is not pointwise, with the index of the
            node and the borders of its first input. It returns the borders between the tiles of the
            node's result, without 0 and the size.
    """
    maps = [(sizes[0], borders)]
    for number, node in enumerate(graph):
        n = sizes[node.inputs[-1]]  # longer inputs are cut to the size of the last one
        short = min(sizes[source] for source in node.inputs)
        if short < n:
            raise ValueError(
                f"layer {node.name} joins feature maps of {short} and {n} cells along dim {dim}, "
                f"but no input may be shorter than the last one, which has {n} cells (longer "
                f"inputs are cut): pad or resize the feature map of {short} cells"
            )
        pattern, cuts = node.along(dim), maps[node.first][1]
        followed, like = maps[node.follows]
        if pattern is None or node.like is not None and sizes[number + 1] == followed:
            maps.append((followed, like))
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
            f"layer {node.name} computes {max(m, 0)} cells from {n} along a dim with {tiles} "
            "tiles, but each tile needs at least one cell: use larger images or fewer tiles"
        )
    return m, (0, *(min(max(c, k), m - tiles + k) for k, c in enumerate(inner, 1)), m)


@dataclass(frozen=True)
class _Since:
    """Record of the layers between the last exchange and a map, for :func:`exchange_points`.

    A layer reads beyond its tile if a tile of its result needs cells of neighbouring tiles.

    Attributes:
        eaten: number of layers before the map that read beyond their tile. The count begins anew at
            an exchange that cannot be avoided, and with ``exchange_every="level"`` also at a change
            of resolution.
        fused: True if the last of these layers reads a map with a small tile. A tile is small if it
            has fewer than ``fuse_below`` cells along some dim (:class:`Layout`).
        behind: True if the map comes after an exchange.
        bare: True if the map is computed from a map without a halo, so that an exchange must come
            before the next layer that reads beyond its tile.
    """

    eaten: int = 0
    fused: bool = False
    behind: bool = False
    bare: bool = False


def exchange_points(
    graph: Graph, beyond: Container[int], every: str, small: Container[int] = ()
) -> list[int]:
    """Return the indices of the nodes (layer calls) before which tiles exchange halos.

    These are the nodes that ``every`` asks for, without the nodes that share an earlier exchange
    because their tiles are small. Nodes before which an exchange cannot be avoided are added. A
    node is of this kind if it depends on a map after an exchange and on a map without one.

    Args:
        graph: the network.
        beyond: the nodes for whose result a tile needs cells of other tiles.
        every: the value of ``exchange_every`` (:class:`Layout`).
        small: the nodes in ``beyond`` whose first input has a tile of fewer cells than
            ``fuse_below`` along some dim (:class:`Layout`).
    """
    points: list[int] = []
    since = [_Since()]
    for number, node in enumerate(graph):
        sources = [since[source] for source in node.inputs]
        behind = any(source.behind for source in sources)
        bare = any(source.bare for source in sources)
        bare = bare or behind and not all(source.behind for source in sources)
        eaten, fused = sources[0].eaten, sources[0].fused
        if number in beyond:
            if every == "level":
                due = eaten == 0
            else:
                due = every != "all" and eaten % int(every) == 0
            if due and not (number in small and fused) or bare:
                points.append(number)
                eaten = 0 if bare else eaten  # an unavoidable exchange restarts the count
                behind, bare = True, False
            eaten, fused = eaten + 1, number in small
        if every == "level" and any(f.pixels(Fraction(1)) != 1 for f in node.access_patterns):
            eaten = 0
        since.append(_Since(eaten, fused, behind, bare))
    return points


def _earlier(graph: Graph, point: int, stored: Container[int]) -> int:
    """Return the node to which the halo exchange before node ``point`` is moved back.

    The exchange moves back over pointwise layers, which need no halo, to a node whose input is
    stored in any case. If there is none, the exchange stays before ``point``.

    Args:
        graph: the network.
        point: the index of the node before which an exchange is needed.
        stored: the indices of the nodes whose first input is stored.
    """
    number = point
    while number not in stored:
        number = graph[number].first - 1
        if number < 0 or not graph[number].simple:
            return point
    return number


def reach_of(graph: Graph, dims: int) -> ReceptiveField:
    """Return halo and total stride of a network, computed from its layers' access patterns.

    Args:
        graph: the network.
        dims: number of spatial dims.

    Raises:
        ValueError: the result does not have the image's size.
    """
    pairs = [_reach_along(graph, dim) for dim in range(dims)]
    return ReceptiveField(halo=tuple(h for h, _ in pairs), stride=tuple(s for _, s in pairs))


def _reach_along(graph: Graph, dim: int) -> tuple[int, int]:
    """Return (halo, stride) of a network in pixels along one dim (:func:`reach_of`)."""
    scales = scales_of(graph, dim)
    # A cell of 10/7 pixels, as a resize may make, cannot end on a tile border.
    aligned = [scale for scale in scales if scale.denominator == 1 or not graph.sized]
    stride = math.lcm(
        *(scale.numerator for scale in aligned),
        *(getattr(node.along(dim), "multiple", 1) for node in graph),
    )
    if graph.sized:
        return _sized_reach(graph, dim, stride), stride
    # The tile is so far from both ends of the image that it depends on neither. Other tiles inside
    # the image need the same halo, as every access pattern moves with the tile.
    a = _FAR * stride
    tile = int(a / scales[-1]), int((a + stride) / scales[-1])
    _, needed = needs_along(graph, range(len(graph)), dim, graph.sizes_along(dim, 2 * a), [tile])
    first, last = needed[0][0]
    halo = max(a - first, last - a - stride)
    n = stride * (8 + -(-4 * halo // stride))  # so long that no cell depends on both ends
    if (made := graph.sizes_along(dim, n)[-1]) != n and not graph.of_image:
        raise _not_kept(dim, n, made)
    return halo, stride


def _sized_reach(graph: Graph, dim: int, stride: int) -> int:
    """Return the largest halo that some tile needs along a dim, among a sample of image sizes.

    :func:`reach_of` uses this function if the halo depends on the size of the image, as with a
    resize to the size of another map. ``stride`` is the total stride along the dim.
    """
    found = 0
    long = _LONG * stride
    for n in (long, long + 1, long + stride // 2 + 1, 2 * long - 1):
        sizes = graph.sizes_along(dim, n)
        if sizes[-1] != n and not graph.of_image:
            if n % stride:
                continue  # the network keeps the size of images of some sizes only
            raise _not_kept(dim, n, sizes[-1])
        tiles = [
            (a, a + stride)
            for a in (0, n // (2 * stride) * stride, (n - 1) // stride * stride - stride)
        ]
        wanted = [(a * sizes[-1] // n, -(-b * sizes[-1] // n)) for a, b in tiles]
        _, needed = needs_along(graph, range(len(graph)), dim, sizes, wanted)
        found = max(
            found, *(max(a - first, last - b) for (a, b), (first, last) in zip(tiles, needed[0]))
        )
    return found


def _not_kept(dim: int, n: int, made: int) -> ValueError:
    return ValueError(
        f"an image of {n} pixels along dim {dim} comes out as {made}, "
        "but a segmentation network keeps the size: pad its convolutions, or resize the result"
    )


_FAR = 1 << 20  # distance of the sample tile from either end of its image, in strides
_LONG = 64  # length of sample images if the halo depends on the image's size, in strides


def scales_of(graph: Graph, dim: int) -> list[Fraction]:
    """Return, for each map, the number of image pixels per cell along a dim."""
    found = [Fraction(1)]
    for node in graph:
        pattern, before = node.along(dim), found[node.follows]
        found.append(before if pattern is None else pattern.pixels(before))
    return found
