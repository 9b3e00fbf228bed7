"""Who owns and who holds which cells of each feature map, where tiles exchange borders instead of reading halos.

Along each dim a chain of layers turns cuts between tiles into cuts of every feature map. From the last layer backwards
each tile then needs what its result looks at, until an exchange: before it a tile has its own cells only, behind it
those with a margin that the layers up to the next exchange eat. Two 3-wide convolutions, exchanged before the first::

    owned            |. . . .|. . . .|
    given            |. . . .|                left tile, before the exchange
    taken            |. . . .|. .|            a margin of 2 from its neighbour
    after one conv   |. . . .|.|
    after two        |. . . .|

All is done per dim: a tile's boxes are products of spans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Callable, Container, Iterable, Sequence

from distseg.extents import Extents
from distseg.geometry.footprint import Footprint, Gather, Span
from distseg.geometry.needs import Along, Link, Need, box_of, needs_along, taken_of
from distseg.geometry.tile import Box, Reach


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
class Part:
    """What one tile does at one layer, in cells.

    Attributes:
        size: of the whole feature map before the layer.
        owned: this tile's part of it.
        given: what the tile holds of it, once its predecessor is done.
        taken: what the layer is computed from, inside the map.
        raw: the same with what lies beyond the map, in the padding.
        made: its result, in cells of the feature map after the layer.
        skip: for a pop, what the tile holds of the skip.
    """

    size: tuple[int, ...]
    owned: Box
    given: Box
    taken: Box
    raw: Box
    made: Box
    skip: Box | None = None


class Layout:
    """All tiles of one image at all layers of a flat model.

    Args:
        links: the model's layers in order.
        image: size in pixels.
        borders: the positions 0 .. n between tiles along each dim.
        exchange_every: a number of layers that look beyond a tile, ``level`` or ``all``.
        fuse_below: layers on tiles with fewer cells than this along a dim share one exchange.
        stored: the layers before which maps are stored in any case: there tiles exchange, rather than behind layers that look at single cells.

    Raises:
        ValueError: a feature map with fewer cells than tiles, or a result that is not of the image's size.
    """

    def __init__(
        self, links: Sequence[Link], image: Sequence[int], borders: Sequence[Sequence[int]], exchange_every: str = "1", fuse_below: int = 0,
        stored: Container[int] = (),
    ):  # fmt: skip
        self.links, self.image = list(links), tuple(image)
        self.grid = tuple(len(b) - 1 for b in borders)
        maps = [_maps(self.links, dim, n, tuple(b)) for dim, (n, b) in enumerate(zip(image, borders))]
        points = _exchange_points(self.links, maps, exchange_every, fuse_below)
        self.points = frozenset(_earlier(self.links, point, stored) for point in points)
        self._maps, self._needs = maps, [_needs(self.links, dim, m, self.points) for dim, m in enumerate(maps)]
        self.sizes = [tuple(m[layer][0] for m in maps) for layer in range(len(self.links) + 1)]
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
        if self.result_cuts != tuple(map(tuple, borders)):
            raise ValueError(f"the model makes {Extents(self.result)} pixels of an image of {Extents(self.image)}, but a segmentation network keeps the size")
        return self

    def cell_of(self, tile: Box) -> tuple[int, ...]:
        """Where a tile stands in the grid."""
        return tuple(starts[a] for starts, a in zip(self._starts, tile.start))

    def part(self, layer: int, cell: tuple[int, ...]) -> Part:
        """Of the tile at ``cell`` of the grid."""
        if (layer, cell) not in self._parts:
            self._parts[layer, cell] = self._part(layer, cell)
        return self._parts[layer, cell]

    def _part(self, layer: int, cell: tuple[int, ...]) -> Part:
        needs = [need[layer] for need in self._needs]

        def box(field: str) -> Box:
            return box_of([getattr(need, field)[c] for need, c in zip(needs, cell)])

        owned = box_of([m[layer][1][c : c + 2] for m, c in zip(self._maps, cell)])
        skip = box("skip") if needs[0].skip is not None else None
        return Part(self.sizes[layer], owned, box("given"), box("taken"), box("raw"), box("made"), skip)

    def result_of(self, cell: Sequence[int]) -> Box:
        """What the tile owns of the result."""
        return box_of([cuts[c : c + 2] for cuts, c in zip(self.result_cuts, cell)])

    def _along(self, layers: range, dim: int, span: Span) -> Along:
        """What ``layers`` need along a dim for a span of their result. The tiles of a grid have few spans, which are found once."""
        sizes = [self.sizes[layer][dim] for layer in layers]
        return Along.of(needs_along(self.links[layers.start : layers.stop], dim, sizes, [span]))

    def spans(self, layer: int) -> tuple[list[tuple[int, ...]], list[tuple[Span, ...]]]:
        """Of the map before a layer, along each dim: the cuts between owners, and what each tile takes."""
        return [m[layer][1] for m in self._maps], [need[layer].taken for need in self._needs]


_SPANS = 512  # whose needs a layout keeps

_Map = tuple[int, tuple[int, ...]]  # size and cuts of a feature map along one dim


def _maps(links: Sequence[Link], dim: int, n: int, borders: tuple[int, ...]) -> list[_Map]:
    """The feature maps before each layer and after the last one.

    Who owns the middle of what a cell looks at owns the cell. Where that ends beside the borders, as behind a padding on one side only, who
    owns the cell's pixels does.
    """
    maps = _cut(links, dim, n, borders, lambda layer, cuts: map(links[layer].along(dim).cut, cuts[1:-1]))
    if maps[-1][0] == n and maps[-1][1] != borders:
        scales = _scales(links, dim)
        maps = _cut(links, dim, n, borders, lambda layer, cuts: (math.ceil(b / scales[layer + 1]) for b in borders[1:-1]))
    return maps


def _cut(links: Sequence[Link], dim: int, n: int, borders: tuple[int, ...], inner: Callable[[int, tuple[int, ...]], Iterable[int]]) -> list[_Map]:
    """Maps cut where ``inner`` says, from the number of a layer that has a footprint and the cuts before it."""
    maps, skips = [(n, borders)], {}
    for layer, link in enumerate(links):
        n, cuts = maps[-1]
        if link.stash is not None:
            skips[link.stash] = n, cuts
        footprint = link.along(dim)
        if link.pop is not None:
            n, cuts = skips.pop(link.pop)  # the input is cut to the skip's size
        elif footprint is not None:
            n, cuts = _mapped(link, footprint, n, len(cuts) - 1, inner(layer, cuts))
        maps.append((n, cuts))
    return maps


def _mapped(link: Link, footprint: Footprint, n: int, tiles: int, inner: Iterable[int]) -> _Map:
    m = footprint.size(n)
    if m < tiles:
        raise ValueError(
            f"layer {link.name} makes {max(m, 0)} cells of {n} along a dim with {tiles} tiles, and each tile needs one: take larger images or fewer tiles"
        )
    return m, (0, *(min(max(c, k), m - tiles + k) for k, c in enumerate(inner, 1)), m)


def _eats(link: Link, dim: int, before: _Map, after: _Map) -> bool:
    """Whether some tile's result looks at cells that the tile does not own."""
    spans = [taken_of(link, dim, own, before[0])[0] for own in pairwise(after[1])]
    return any(a < b and (a < c or d < b) for (a, b), (c, d) in zip(spans, pairwise(before[1])))


def _needs(links: Sequence[Link], dim: int, maps: list[_Map], points: frozenset[int]) -> list[Need]:
    """Of all tiles of the dim; each has its own cells at least."""
    *owned, wanted = [list(pairwise(cuts)) for _, cuts in maps]
    return needs_along(links, dim, [n for n, _ in maps], wanted, owned, points)


def _exchange_points(links: Sequence[Link], maps: Sequence[list[_Map]], every: str, fuse_below: int) -> list[int]:
    """The layers before which tiles exchange: of those that look beyond their tile every k-th, or the first of each level."""
    points: list[int] = []
    eaten = 0  # layers that looked beyond since the last exchange
    fused = bare = False
    stashes: dict[str, int] = {}
    for layer, link in enumerate(links):
        if link.stash is not None:
            stashes[link.stash] = layer
        if link.pop is not None and points:
            bare |= stashes[link.pop] < points[0]  # that skip was put aside before any exchange, so it has no margin
        if any(_eats(link, dim, m[layer], m[layer + 1]) for dim, m in enumerate(maps)):
            small = min(b - a for m in maps for a, b in pairwise(m[layer][1])) < fuse_below
            due = eaten == 0 if every == "level" else eaten % int(every) == 0 if every != "all" else False
            if due and not (small and fused) or bare:
                points.append(layer)
                bare = False
            eaten, fused = eaten + 1, small
        if every == "level" and any(f.stride != 1 for f in link.footprints):
            eaten = 0
    return points


def _earlier(links: Sequence[Link], point: int, stored: Container[int]) -> int:
    """Where a map is stored before layers that look at single cells and lead to ``point``; else that."""
    layer = point
    while layer not in stored:
        if layer == 0 or links[layer - 1].footprints or links[layer - 1].pop is not None:
            return point
        layer -= 1
    return layer


def reach_of(links: Sequence[Link], dims: int) -> Reach:
    """Halo and stride of a flat model, by arithmetic.

    Args:
        links: the model's layers in order.
        dims: number of spatial dims.

    Raises:
        ValueError: a result that is not of the image's size.
    """
    pairs = [_reach_along(links, dim) for dim in range(dims)]
    return Reach(halo=tuple(h for h, _ in pairs), stride=tuple(s for _, s in pairs))


def _reach_along(links: Sequence[Link], dim: int) -> tuple[int, int]:
    stride = math.lcm(*(scale.numerator for scale in _scales(links, dim)))
    sizes = lambda n: [size for size, _ in _maps(links, dim, n, (0, n))]
    a = _FAR * stride  # a tile in the midst of an image none of whose ends it sees; all else moves with it
    first, last = needs_along(links, dim, sizes(2 * a), [(a, a + stride)])[0].given[0]
    halo = max(a - first, last - a - stride)
    n = stride * (8 + -(-4 * halo // stride))  # so long that no layer sees both of its ends
    if (made := sizes(n)[-1]) != n:
        raise ValueError(f"an image of {n} pixels along dim {dim} comes out as {made}, but a segmentation network keeps the size")
    return halo, stride


_FAR = 1 << 20  # cells of the stride


def _scales(links: Sequence[Link], dim: int) -> list[Fraction]:
    """The pixels that a cell stands for, of each map."""
    found, skips = [Fraction(1)], {}
    for link in links:
        if link.stash is not None:
            skips[link.stash] = found[-1]
        found.append(skips.pop(link.pop) if link.pop is not None else _scaled(found[-1], link.along(dim)))
    return found


def _scaled(scale: Fraction, footprint: Footprint | None) -> Fraction:
    if footprint is None:
        return scale
    return scale * footprint.stride if isinstance(footprint, Gather) else scale / footprint.stride
