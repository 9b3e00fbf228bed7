"""Who owns which pixels: images split into tiles on the stride grid, and the windows that tiles are computed from.

A *tile* is what a rank owns, a *window* is a tile with its halo. Tile borders lie on multiples of the network's total
stride, so that a tile's part of every feature map is a whole number of cells; windows start on such multiples too,
so that pooling cells of a window are those of the image. Both are clipped at the border of the image::

    0        64       128  131          stride 32, width 131, two tiles, halo 20
    |--tile--|---tile-----|             tiles    [0, 64)   [64, 131)
    |--window-----|                     window   [0, 96)
        |------window-----|             window   [32, 131)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Iterator

from distseg.config.sizes import Size


@dataclass(frozen=True)
class Box:
    """The pixels ``start <= p < stop``, one int per dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, size) -> "Box":
        return cls((0,) * len(size), tuple(size))

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def pixels(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop))

    def relative_to(self, origin: "Box") -> "Box":
        """This box in the coordinates of ``origin``'s first pixel."""
        return self.shifted(tuple(-o for o in origin.start))

    def shifted(self, offset) -> "Box":
        return Box(
            tuple(a + o for a, o in zip(self.start, offset)),
            tuple(b + o for b, o in zip(self.stop, offset)),
        )

    def intersection(self, other: "Box") -> "Box":
        """What both have, a box in this one; of no pixels where they do not touch."""
        start = tuple(min(max(a, c), b) for a, b, c in zip(self.start, self.stop, other.start))
        return Box(start, tuple(max(a, min(b, d)) for a, b, d in zip(start, self.stop, other.stop)))

    def hull(self, other: "Box") -> "Box":
        """The smallest box with both in it."""
        return Box(tuple(map(min, self.start, other.start)), tuple(map(max, self.stop, other.stop)))

    def contains(self, other: "Box") -> bool:
        return all(
            a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop)
        )

    def coarsened(self, stride) -> "Box":
        """The cells of a feature map with this cumulative stride: the last one may stand for fewer pixels."""
        return Box(
            tuple(a // s for a, s in zip(self.start, stride)),
            tuple(-(-b // s) for b, s in zip(self.stop, stride)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop)) + "]"


@dataclass(frozen=True)
class ReceptiveField:
    """What a network needs around a tile: its halo and its total stride, in pixels per dim."""

    halo: tuple[int, ...]
    stride: tuple[int, ...]

    def window(self, tile: Box, image) -> Box:
        """Return the pixels to compute so that the tile comes out exact: the halo around it, on the stride grid, inside the image."""
        start = tuple(
            max(0, (a - h) // s * s) for a, h, s in zip(tile.start, self.halo, self.stride)
        )
        stop = tuple(
            min(n, -(-(b + h) // s) * s)
            for b, h, s, n in zip(tile.stop, self.halo, self.stride, image)
        )
        return Box(start, stop)


def split(length: int, parts: int, stride: int) -> list[tuple[int, int]]:
    """``length`` pixels as ``parts`` consecutive ranges, as even as borders on multiples of ``stride`` allow."""
    cells = -(-length // stride)
    assert 1 <= parts <= cells, (length, parts, stride)
    inner = [
        min(max(round(k * length / (parts * stride)), k), cells - parts + k)
        for k in range(1, parts)
    ]
    borders = [0, *inner, cells]
    return [(a * stride, min(b * stride, length)) for a, b in zip(borders, borders[1:])]


def strips(box: Box, cells: float, rows: int = 1) -> Iterator[Box]:
    """The box from top to bottom, as many times ``rows`` rows at once as have no more than ``cells`` cells, but at least once."""
    rows *= max(1, int(cells * box.size[0] / (max(1, box.pixels) * rows)))
    for a in range(box.start[0], box.stop[0], rows):
        yield Box((a, *box.start[1:]), (min(a + rows, box.stop[0]), *box.stop[1:]))


def boxes_of(box: Box, size) -> list[Box]:
    """The box row by row in boxes of one size; the last along a dim may be smaller."""
    spans = [
        [(a, min(a + n, stop)) for a in range(start, stop, n)]
        for start, stop, n in zip(box.start, box.stop, size)
    ]
    return [Box(*map(tuple, zip(*each))) for each in product(*spans)]


def check_grid(image, grid, stride) -> None:
    """Refuse a grid that would leave a tile without a cell of its own.

    Raises:
        ValueError: naming the grid, the image, the stride and the largest grid that fits.
    """
    if len(image) != len(stride):
        raise ValueError(
            f"images have {len(image)} dims ({Size(image)}), but the network takes images of {len(stride)}: "
            "give images of as many dims, or take another network (model.name)"
        )
    if len(grid) != len(image):
        raise ValueError(
            f"an image of {len(image)} spatial dims ({Size(image)}) does not fit a grid of {len(grid)} ({Size(grid)}) "
            f"and a network of {len(stride)}: give mesh.tiles and sizes {len(stride)} numbers each"
        )
    largest = Size(-(-n // s) for n, s in zip(image, stride))
    if any(g > most for g, most in zip(grid, largest)):
        raise ValueError(
            f"a grid of {Size(grid)} tiles is too fine for an image of {Size(image)} pixels: tile borders lie on multiples "
            f"of the network's stride {Size(stride)}, so the largest grid that fits is {largest}"
        )


def tiles(image, grid, stride) -> list[Box]:
    """The tiles of an image in row-major order of the grid. They cover it, and no two overlap."""
    check_grid(image, grid, stride)
    ranges = [split(n, g, s) for n, g, s in zip(image, grid, stride)]
    return [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in product(*ranges)]


def most_even_grid(image, stride, parts: int) -> Size:
    """The grid of at most ``parts`` tiles, and as many of them as fit, whose tiles are nearest to squares."""
    cells = [-(-n // s) for n, s in zip(image, stride)]
    for count in range(parts, 0, -1):
        fitting = [
            grid
            for grid in _factorings(count, len(cells))
            if all(g <= c for g, c in zip(grid, cells))
        ]
        if fitting:
            return Size(min(fitting, key=lambda grid: sum(g / n for g, n in zip(grid, image))))
    raise AssertionError("one tile fits any image")


def _factorings(count: int, dims: int) -> list[tuple[int, ...]]:
    """All grids of ``count`` tiles."""
    if dims == 1:
        return [(count,)]
    return [
        (first, *rest)
        for first in range(1, count + 1)
        if count % first == 0
        for rest in _factorings(count // first, dims - 1)
    ]


def window(tile: Box, image, reach: ReceptiveField) -> Box:
    """Return the pixels to read for a tile of an image."""
    return reach.window(tile, image)


@dataclass(frozen=True)
class TilePlacement:
    """Where the tensor of a window lies: all that a distributed layer has to know of geometry.

    A tensor of shape (B, C, *window.size) holds the same window of B images of one size. ``images`` are their positions
    in the micro-batch, ``samples`` the keys of their dropout masks (the sample's number in the epoch).
    """

    image: tuple[int, ...]
    tile: Box
    window: Box
    images: tuple[int, ...]
    samples: tuple[int, ...]

    @property
    def owned(self) -> Box:
        """The tile inside the window."""
        return self.tile.relative_to(self.window)


def owned_tiles(image, grid, per_rank, coordinates, reach: ReceptiveField) -> list[tuple[Box, Box]]:
    """The (tile, window) pairs of the rank at ``coordinates`` of a ``grid`` of ranks, each owning a block of ``per_rank`` tiles."""
    fine = Size(g * p for g, p in zip(grid, per_rank))
    every = tiles(image, fine, reach.stride)
    cells = product(*(range(c * p, (c + 1) * p) for c, p in zip(coordinates, per_rank)))
    mine = []
    for cell in cells:
        index = 0
        for c, f in zip(cell, fine):
            index = index * f + c
        mine.append((every[index], window(every[index], image, reach)))
    return mine
