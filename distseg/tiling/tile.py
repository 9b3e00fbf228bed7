"""Tiles and windows: how an image is split, and which pixels each tile is computed from.

A *tile* is the part of an image that one rank owns. A *window* is a tile with its halo. Tile
borders lie on multiples of the network's total stride, so a tile owns a whole number of cells of
every feature map. Windows start on multiples of the stride too, so a pooling layer groups the
same pixels in a window as in the image. Tiles and windows are clipped at the border of the image::

    0        64       128  131          stride 32, width 131, two tiles, halo 20
    |--tile--|---tile-----|             tiles    [0, 64)   [64, 131)
    |--window-----|                     window   [0, 96)
        |------window-----|             window   [32, 131)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import overload

import numpy as np

from distseg.config.sizes import Size


@dataclass(frozen=True)
class Box:
    """A half-open box of pixels or cells: ``start <= p < stop``, with one int per dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, size) -> Box:
        """Return the box that covers a whole image or feature map of this size."""
        return cls((0,) * len(size), tuple(size))

    @property
    def size(self) -> tuple[int, ...]:
        """Number of pixels or cells of the box along each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def pixels(self) -> int:
        """Number of pixels or cells in the box."""
        return math.prod(self.size)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The box as a slice for each spatial dim, with which a tensor can be indexed."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop))

    def relative_to(self, origin: Box) -> Box:
        """Return this box, counted from the first pixel of the box ``origin``."""
        return self.shifted(tuple(-o for o in origin.start))

    def shifted(self, offset) -> Box:
        """Return the box, moved by ``offset`` cells along each dim."""
        return Box(
            tuple(a + o for a, o in zip(self.start, offset)),
            tuple(b + o for b, o in zip(self.stop, offset)),
        )

    def intersection(self, other: Box) -> Box:
        """Return the box that both boxes share.

        If they do not overlap, the result is an empty box that still lies inside this one.
        """
        start = tuple(min(max(a, c), b) for a, b, c in zip(self.start, self.stop, other.start))
        return Box(start, tuple(max(a, min(b, d)) for a, b, d in zip(start, self.stop, other.stop)))

    def hull(self, other: Box) -> Box:
        """Return the smallest box that contains both boxes."""
        return Box(tuple(map(min, self.start, other.start)), tuple(map(max, self.stop, other.stop)))

    def contains(self, other: Box) -> bool:
        """Return True if all cells of the box ``other`` lie in this box."""
        return all(
            a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop)
        )

    def coarsened(self, stride) -> Box:
        """Return the box of the cells of a feature map that cover this box of image pixels.

        The last cell along a dim may stand for fewer pixels than the stride.

        Args:
            stride: the number of image pixels per cell of the feature map, along each dim.
        """
        return Box(
            tuple(a // s for a, s in zip(self.start, stride)),
            tuple(-(-b // s) for b, s in zip(self.stop, stride)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop)) + "]"


class BoxGrid(Sequence[Box]):
    """Boxes of a grid, in row-major order.

    A box is made when it is asked for, so that a grid of many boxes takes little memory.

    Args:
        spans: the spans (start, stop) of the boxes along each dim.
    """

    def __init__(self, spans: Sequence[Sequence[tuple[int, int]]]):
        self.spans = [list(along) for along in spans]

    def __len__(self) -> int:
        return math.prod(map(len, self.spans))

    @overload
    def __getitem__(self, at: int) -> Box: ...

    @overload
    def __getitem__(self, at: slice) -> list[Box]: ...

    def __getitem__(self, at):
        which = range(len(self))[at]
        if isinstance(at, slice):
            return [self[n] for n in which]
        cell = []
        for along in reversed(self.spans):
            which, place = divmod(which, len(along))
            cell.append(along[place])
        return box_of(reversed(cell))

    def __iter__(self) -> Iterator[Box]:
        return map(box_of, product(*self.spans))

    def number_of(self, box: Box) -> int:
        """Return the index of a box of the grid.

        Raises:
            ValueError: the grid has no such box.
        """
        found = 0
        for along, span in zip(self.spans, zip(box.start, box.stop)):
            found = found * len(along) + along.index(span)
        return found


class ChosenBoxes(Sequence[Box]):
    """Some boxes of a sequence, which are made when they are asked for.

    Args:
        boxes: the sequence, such as a :class:`BoxGrid`.
        numbers: the indices of the chosen boxes, in the order of the result.
    """

    def __init__(self, boxes: Sequence[Box], numbers: Sequence[int]):
        self.boxes, self.numbers = boxes, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> Box: ...

    @overload
    def __getitem__(self, at: slice) -> ChosenBoxes: ...

    def __getitem__(self, at):
        if isinstance(at, slice):
            return ChosenBoxes(self.boxes, self.numbers[at])
        return self.boxes[self.numbers[at]]


def box_of(spans: Iterable[tuple[int, int]]) -> Box:
    """Return the box that has one span (start, stop) for each dim."""
    return Box(*zip(*spans))


@dataclass(frozen=True)
class ReceptiveField:
    """The halo that a network needs around a tile, and its total stride, in pixels per dim."""

    halo: tuple[int, ...]
    stride: tuple[int, ...]

    def window(self, tile: Box, image) -> Box:
        """Return the window of a tile: the pixels from which the network computes it exactly.

        The window is the tile with its halo, extended to multiples of the stride and clipped to the
        image.

        Args:
            tile: the tile, a box of pixels.
            image: the size of the image.
        """
        start = tuple(
            max(0, (a - h) // s * s) for a, h, s in zip(tile.start, self.halo, self.stride)
        )
        stop = tuple(
            min(n, -(-(b + h) // s) * s)
            for b, h, s, n in zip(tile.stop, self.halo, self.stride, image)
        )
        return Box(start, stop)


def split(length: int, parts: int, stride: int) -> list[tuple[int, int]]:
    """Split ``length`` pixels into ``parts`` consecutive ranges ``(start, stop)``.

    Borders between ranges lie on multiples of ``stride``. Apart from that, the ranges are as even
    as possible.
    """
    cells = -(-length // stride)
    assert 1 <= parts <= cells, (length, parts, stride)
    inner = [
        min(max(round(k * length / (parts * stride)), k), cells - parts + k)
        for k in range(1, parts)
    ]
    borders = [0, *inner, cells]
    return [(a * stride, min(b * stride, length)) for a, b in zip(borders, borders[1:])]


def strips(box: Box, cells: float, rows: int = 1) -> Iterator[Box]:
    """Cut a box into strips of whole rows, and yield them from top to bottom.

    The height of a strip is the largest multiple of ``rows`` with which the strip has at most
    ``cells`` cells, but at least ``rows``. The last strip may have fewer rows.
    """
    rows *= max(1, int(cells * box.size[0] / (max(1, box.pixels) * rows)))
    for a in range(box.start[0], box.stop[0], rows):
        yield Box((a, *box.start[1:]), (min(a + rows, box.stop[0]), *box.stop[1:]))


def boxes_of(box: Box, size) -> BoxGrid:
    """Return boxes of the given size that cover ``box``, in row-major order.

    The last box along a dim may be smaller.
    """
    return BoxGrid(
        [
            [(a, min(a + n, stop)) for a in range(start, stop, n)]
            for start, stop, n in zip(box.start, box.stop, size)
        ]
    )


def along(values: np.ndarray, dim: int, dims: int) -> np.ndarray:
    """Reshape a vector to ``dims`` dims: its values along ``dim``, length 1 along the others."""
    return values.reshape([-1 if d == dim else 1 for d in range(dims)])


def numbers(box: Box, size) -> np.ndarray:
    """Return, for each pixel of a box, its index in the row-major order of the image's pixels.

    Args:
        box: a box of pixels of an image.
        size: the size of the image that contains it.
    """
    found = np.zeros((1,) * len(size), np.int64)
    for dim, (a, b, n) in enumerate(zip(box.start, box.stop, size)):
        found = found * n + along(np.arange(a, b), dim, len(size))
    return found


def check_dims(image, dims: int) -> None:
    """Refuse images whose number of dims is not the number that the network takes.

    Args:
        image: the size of the images.
        dims: the number of spatial dims that the network takes.

    Raises:
        ValueError: the numbers differ. The message names both.
    """
    if len(image) != dims:
        raise ValueError(
            f"images have {len(image)} dims ({Size(image)}), but the network takes images of "
            f"{dims} dims: give images of {dims} dims, or choose another network (model.name)"
        )


def check_grid(image, grid, stride) -> None:
    """Refuse a grid in which some tile would own no cell of the coarsest feature map.

    Args:
        image: the size of the image.
        grid: the number of tiles along each dim.
        stride: the total stride of the network along each dim.

    Raises:
        ValueError: the grid is too fine, or image, grid and network differ in their number of
            dims. The message names the grid, the image, the stride and the largest grid that fits.
    """
    check_dims(image, len(stride))
    if len(grid) != len(image):
        raise ValueError(
            f"an image of {len(image)} spatial dims ({Size(image)}), a grid of {len(grid)} dims "
            f"({Size(grid)}) and a network of {len(stride)} dims do not fit together: "
            f"give mesh.tiles and all sizes with {len(stride)} numbers each"
        )
    largest = Size(-(-n // s) for n, s in zip(image, stride))
    if any(g > most for g, most in zip(grid, largest)):
        raise ValueError(
            f"a grid of {Size(grid)} tiles is too fine for an image of {Size(image)} pixels: "
            "tile borders lie on multiples of the network's stride "
            f"{Size(stride)}, so the largest grid that fits is {largest}"
        )


def tiles(image, grid, stride) -> BoxGrid:
    """Return the tiles of an image in row-major order of the grid.

    The tiles cover the image, and no two of them overlap.

    Args:
        image: the size of the image.
        grid: the number of tiles along each dim.
        stride: the total stride of the network along each dim.

    Raises:
        ValueError: the grid does not fit the image (:func:`check_grid`).
    """
    check_grid(image, grid, stride)
    return BoxGrid([split(n, g, s) for n, g, s in zip(image, grid, stride)])


def most_even_grid(image, stride, parts: int) -> Size:
    """Return the grid of at most ``parts`` tiles that fits the image and has the most tiles.

    Among several such grids, the one whose tiles are closest to squares is chosen.

    Args:
        image: the size of the image.
        stride: the total stride of the network along each dim.
        parts: the largest allowed number of tiles.
    """
    cells = [-(-n // s) for n, s in zip(image, stride)]
    for count in range(parts, 0, -1):
        fitting = [
            grid
            for grid in factorings(count, len(cells))
            if all(g <= c for g, c in zip(grid, cells))
        ]
        if fitting:
            return Size(min(fitting, key=lambda grid: sum(g / n for g, n in zip(grid, image))))
    raise AssertionError("one tile fits any image")


def factorings(count: int, dims: int) -> list[tuple[int, ...]]:
    """Return all grids of ``count`` tiles, each as the number of tiles along each dim."""
    if dims == 1:
        return [(count,)]
    return [
        (first, *rest)
        for first in range(1, count + 1)
        if count % first == 0
        for rest in factorings(count // first, dims - 1)
    ]


def window(tile: Box, image, reach: ReceptiveField) -> Box:
    """Return the window of a tile: the box of image pixels from which the tile is computed.

    Args:
        tile: the tile, a box of pixels.
        image: the size of the image.
        reach: halo and stride of the network.
    """
    return reach.window(tile, image)


@dataclass(frozen=True)
class TilePlacement:
    """The position of a window and of its tile in an image, for the distributed layers.

    A tensor of shape (B, C, *window.size) holds the same window of B images of one size.

    Attributes:
        image: size of the images, in pixels per dim.
        tile: the pixels that the rank owns.
        window: the pixels that the tensor holds: the tile with its halo.
        images: positions of the B images in the micro-batch, from 0.
        samples: for each of these images the index of its sample in the epoch, on which its dropout
            masks depend.
    """

    image: tuple[int, ...]
    tile: Box
    window: Box
    images: tuple[int, ...]
    samples: tuple[int, ...]

    @property
    def owned(self) -> Box:
        """The box of the tile, counted from the first pixel of the window."""
        return self.tile.relative_to(self.window)


def owned_tiles(image, grid, per_rank, coordinates, reach: ReceptiveField) -> list[tuple[Box, Box]]:
    """Return (tile, window) for each tile of an image that one rank owns.

    Args:
        image: size of the image in pixels.
        grid: the number of ranks along each dim.
        per_rank: the number of tiles along each dim that each rank owns. The tiles of a rank form
            one block.
        coordinates: the position of the rank in the grid.
        reach: halo and stride of the network.
    """
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
