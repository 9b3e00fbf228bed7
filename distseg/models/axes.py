"""Axes: the meaning of each dim of a tensor of the user's code that has the numbers of a map.

A layer makes maps (N, C, *size). The user's code may have the same numbers as (N, heads, C / heads, H, W), (N, H, W, C), (N, C, H * W), (N, H * W, C) and
so on. Each dim of such a tensor is an :class:`Axis`: images of the batch, channels, places of the image, or a product of these. A *vector of the image* has
no places: it is alike wherever the image is looked at. A *line* is a vector that has places of some dims of the image in its channels, all of them, as means
of rows have: how long it is follows the size of the image (:data:`Extent`).
"""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import NamedTuple, Sequence

from torch import Tensor

Extent = tuple[tuple[int, tuple[int, ...]], ...]
"""A sum of so many times the product of the image's sizes along some dims: ((1, (0,)), (1, (1,))) is the sum of height and width. Empty it is 1."""


class Axis(NamedTuple):
    """One dim of a tensor of the user's code, in this order: images of the batch (or none), ``cell`` channels, and the dims ``places`` of the image.

    Attributes:
        whole: of a line, how many times ``cell`` numbers lie along the dim.
    """

    batch: bool = False
    cell: int = 1
    places: tuple[int, ...] = ()
    whole: Extent = ()

    @property
    def of_channels(self) -> bool:
        """Tell that nothing but channels is along this dim."""
        return not (self.batch or self.places)

    @property
    def mixed(self) -> bool:
        """Tell that channels and something else are along this dim."""
        return self.cell != 1 and not self.of_channels

    @property
    def lone(self) -> bool:
        """Tell that one channel alone is along this dim."""
        return self.cell == 1 and not self.whole


Axes = tuple[Axis, ...]


def plain_axes(channels: int, dims: int) -> Axes:
    """Return the axes of (N, C, *size)."""
    return Axis(True), Axis(cell=channels), *(Axis(places=(d,)) for d in range(dims))


def channels_of(axes: Axes) -> int:
    return math.prod(axis.cell for axis in axes)


def places_of(axes: Axes) -> tuple[int, ...]:
    return tuple(d for axis in axes for d in axis.places)


def of_images(axes: Axes) -> bool:
    """Tell that there is a tensor of each image, and not one for all."""
    return any(axis.batch for axis in axes)


def is_line(axes: Axes) -> bool:
    """Tell that its length follows the size of the image, and yet it is no map."""
    return any(axis.whole for axis in axes)


def along(d: int) -> Extent:
    """Return the extent of one dim of the image."""
    return ((1, (d,)),)


def length_of(extent: Extent, size: Sequence[int]) -> int:
    """Return what an extent is of a map of this size."""
    return sum(times * math.prod(size[d] for d in dims) for times, dims in extent) if extent else 1


def of_size(axes: Axes, size: Sequence[int]) -> Axes:
    """Return the axes of a line of a map of this size, as those of a vector of so many channels."""
    return tuple(
        axis._replace(cell=axis.cell * length_of(axis.whole, size), whole=()) for axis in axes
    )


def lines_of(axes: Axes) -> tuple[int, ...] | None:
    """Return the dims of the image that a line has places of, each along a dim of its own; None of one that has others beside."""
    found = [axis for axis in axes if axis.whole]
    plain = all(
        len(axis.whole) == 1
        and axis.whole[0][0] == 1
        and len(axis.whole[0][1]) == 1
        and axis.cell == 1
        for axis in found
    )
    return tuple(axis.whole[0][1][0] for axis in found) if plain else None


def without_places(axes: Axes) -> Axes:
    """Return the axes of what a reduction over all places leaves, with its dims kept."""
    return tuple(axis._replace(places=()) for axis in axes)


def axes_of(
    shapes: Sequence[Sequence[int]], batches: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Axes | None:
    """Return what each dim of a tensor is, told from its shapes in traces of several batches and sizes; None where a dim follows neither.

    Args:
        shapes: of the tensor in each trace.
        batches: the images of each trace.
        sizes: of the map, in each trace.
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    found = [_axis(lengths, batches, sizes) for lengths in zip(*shapes)]
    return None if None in found else tuple(found)


def _axis(
    lengths: Sequence[int], batches: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Axis | None:
    dims = range(len(sizes[0]))
    for count in range(len(dims) + 2):
        for chosen in combinations(("batch", *dims), count):
            units = [
                math.prod(n if what == "batch" else size[what] for what in chosen)
                for n, size in zip(batches, sizes)
            ]
            if (
                all(length % unit == 0 for length, unit in zip(lengths, units))
                and len({length // unit for length, unit in zip(lengths, units)}) == 1
            ):
                return Axis(
                    "batch" in chosen,
                    lengths[0] // units[0],
                    tuple(what for what in chosen if what != "batch"),
                )
    return None


def line_of(
    shapes: Sequence[Sequence[int]], batches: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Axes | None:
    """Return the axes of a vector or a line, told as by :func:`axes_of`."""
    if len({len(shape) for shape in shapes}) > 1:
        return None
    found = [_line_axis(lengths, batches, sizes) for lengths in zip(*shapes)]
    return None if None in found else tuple(found)


def _line_axis(
    lengths: Sequence[int], batches: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Axis | None:
    if (axis := _axis(lengths, batches, sizes)) is not None:
        return axis._replace(places=(), whole=((1, axis.places),) if axis.places else ())
    extent = extent_of(lengths, sizes)
    return None if extent is None else Axis(whole=extent)


def extent_of(numbers: Sequence[int], sizes: Sequence[Sequence[int]]) -> Extent | None:
    """Return the sum of sizes, and of a number, that numbers are in all traces; None if there is none."""
    dims = range(len(sizes[0]))
    for times in sorted(product(range(_MOST_TIMES + 1), repeat=len(dims)), key=sum):
        rest = {
            n - sum(k * size[d] for k, d in zip(times, dims)) for n, size in zip(numbers, sizes)
        }
        if len(rest) == 1:
            more = rest.pop()
            return (
                *((k, (d,)) for k, d in zip(times, dims) if k),
                *(((more, ()),) if more else ()),
            )
    found = _axis(numbers, (1,) * len(numbers), sizes)
    return None if found is None or found.batch else ((found.cell, found.places),)


_MOST_TIMES = 4  # that a size is counted in a length


def order_of(axes: Axes) -> tuple:
    """Return images, channels and places in the order in which they lie in memory: what a reshape leaves as it is."""
    found, cells = [], 1
    for axis in axes:
        if axis.batch:
            found += [cells, "batch"]
            cells = 1
        cells *= axis.cell
        for d in axis.places:
            found += [cells, d]
            cells = 1
    return (*found, cells)


def opened(x: Tensor, axes: Axes) -> Tensor:
    """Return a map (N, C, *size), or a vector (N, C, 1, ...), as the user's code has it."""
    if not of_images(axes):  # alike for all images
        return opened(x[:1], (Axis(True), *axes))[0]
    size = x.shape[2:] if any(axis.places for axis in axes) else ()
    if len(axes) == x.dim() and axes == plain_axes(x.shape[1], x.dim() - 2):
        return x
    x = x.reshape(len(x), *(axis.cell for axis in axes), *size)
    order = [_atoms(axis, number, len(axes)) for number, axis in enumerate(axes)]
    x = x.permute([d for atoms in order for d in atoms])
    lengths, shape = iter(x.shape), []
    for atoms in order:
        shape.append(math.prod(next(lengths) for _ in atoms))
    return x.reshape(shape)


def closed(y: Tensor, axes: Axes, size: Sequence[int]) -> Tensor:
    """Return what the user's code has as a map (N, C, *size), or a vector (N, C, 1, ...); of what is alike for all images one."""
    if not of_images(axes):
        return closed(y.unsqueeze(0), (Axis(True), *axes), size)
    there = tuple(size) if any(axis.places for axis in axes) else ()
    if there and axes == plain_axes(axes[1].cell if len(axes) > 1 else 0, len(there)):
        return y
    images = next(
        n // (axis.cell * math.prod(size[d] for d in axis.places))
        for n, axis in zip(y.shape, axes)
        if axis.batch
    )
    lengths, order = [], []
    for number, axis in enumerate(axes):
        lengths += [images] * axis.batch + [axis.cell, *(size[d] for d in axis.places)]
        order += _atoms(axis, number, len(axes))
    y = y.reshape(lengths).permute([order.index(d) for d in range(len(order))])
    return y.reshape(images, channels_of(axes), *(there or (1,) * len(size)))


def _atoms(axis: Axis, number: int, axes: int) -> list[int]:
    """Return which dims of (N, channels of each axis, *size) lie along an axis, the ``number``-th of so many."""
    return [0] * axis.batch + [1 + number] + [1 + axes + d for d in axis.places]
