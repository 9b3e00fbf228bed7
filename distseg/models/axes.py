"""Axes: the meaning of each dim of a tensor in user code.

Layers compute feature maps (N, C, *size). User code may hold the same numbers as (N, heads,
C / heads, H, W), (N, H, W, C), (N, C, H * W), (N, H * W, C) and so on. Each dim of such a tensor is
an :class:`Axis`: the images of the batch, channels, positions along dims of the image, or a product
of these.

A *vector* of the image has no positions: every tile has the same value of it. A *line* is a vector
whose channels hold all positions along some dims of the image, such as the means of all rows. Its
length depends on the size of the image (:data:`Extent`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

from torch import Tensor

Extent = tuple[tuple[int, tuple[int, ...]], ...]
"""A length that follows the image's size, as a sum of terms (factor, dims).

A term is the factor times the product of the image's sizes along these dims. So
((1, (0,)), (1, (1,))) is height plus width. An empty extent is 1.
"""


class Axis(NamedTuple):
    """The meaning of one dim of a tensor in user code.

    The dim is a product of up to three parts in this order: images, channels, positions. For
    example, a dim of length C * H * W is ``Axis(cell=C, places=(0, 1))``.

    Attributes:
        batch: True if the images of the batch are part of the dim.
        cell: the number of channels along the dim; 1 if channels are no part of it.
        places: the dims of the image whose positions are part of the dim.
        whole: used only if the tensor is a line: the extent by which the dim depends on the image's
            size, such as the height for the means of all rows. The length of the dim is ``cell``
            times this extent. Empty if the length does not depend on the size.
    """

    batch: bool = False
    cell: int = 1
    places: tuple[int, ...] = ()
    whole: Extent = ()

    @property
    def of_channels(self) -> bool:
        """True if the dim has channels only."""
        return not (self.batch or self.places)

    @property
    def mixed(self) -> bool:
        """True if the dim holds several channels and, besides them, images or positions."""
        return self.cell != 1 and not self.of_channels

    @property
    def without_channels(self) -> bool:
        """True if the dim has length 1, or holds only images or positions of a feature map.

        The positions of a line count as channels here.
        """
        return self.cell == 1 and not self.whole


Axes = tuple[Axis, ...]


def plain_axes(channels: int, dims: int) -> Axes:
    """Return the axes of a tensor (N, C, *size) with C = ``channels`` and ``dims`` spatial dims."""
    return Axis(True), Axis(cell=channels), *(Axis(places=(d,)) for d in range(dims))


def channels_of(axes: Axes) -> int:
    """Return the number of channels of a tensor with these axes.

    For a line, it is the number of channels at each position.
    """
    return math.prod(axis.cell for axis in axes)


def places_of(axes: Axes) -> tuple[int, ...]:
    """Return the spatial dims of the image that a tensor's dims hold, in the tensor's order."""
    return tuple(d for axis in axes for d in axis.places)


def of_images(axes: Axes) -> bool:
    """Return True if a tensor has a dim for the images of the batch; else all images share it."""
    return any(axis.batch for axis in axes)


def is_line(axes: Axes) -> bool:
    """Return True if a tensor is a line: a vector whose length depends on the size of the image."""
    return any(axis.whole for axis in axes)


def along(d: int) -> Extent:
    """Return the :data:`Extent` "size of the image along dim ``d``", the formula of a length."""
    return ((1, (d,)),)


def length_of(extent: Extent, size: Sequence[int]) -> int:
    """Return the length that the formula ``extent`` gives for a map of this spatial size."""
    return sum(times * math.prod(size[d] for d in dims) for times, dims in extent) if extent else 1


def of_size(axes: Axes, size: Sequence[int]) -> Axes:
    """Return the axes of a line for one known image size, so that its lengths are plain numbers.

    For example, the axis of a line with one value for each row becomes an axis of H channels.

    Args:
        axes: the axes of the line.
        size: the spatial size of the map from which the line was computed.
    """
    return tuple(
        axis._replace(cell=axis.cell * length_of(axis.whole, size), whole=()) for axis in axes
    )


def lines_of(axes: Axes) -> tuple[int, ...] | None:
    """Return the spatial dims of the image along which a line has a value for each position.

    The result is (0,) for the means of rows, and (1,) for the means of columns.

    Return None if a dim of the line is not exactly one dim of the image, but for example the height
    plus the width, or positions and channels together.
    """
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
    """Return the axes of a tensor after a reduction over all its positions (``keepdim=True``).

    A dim that holds only positions becomes a dim of length 1.
    """
    return tuple(axis._replace(places=()) for axis in axes)


def axes_of(
    shapes: Sequence[Sequence[int]], batches: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Axes | None:
    """Infer the axes of a tensor, the meaning of each dim, from its shapes in several traces.

    A trace is a recorded forward pass. The traces have images of different sizes.

    Args:
        shapes: the shape of the tensor for each traced image size.
        batches: the number of images for each traced image size.
        sizes: the size of the map whose positions the tensor may have, for each traced image size.

    Returns:
        The axes. None if the number of dims differs between the traces, or if the length of some
        dim is no product of channels, images and sizes.
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    found = [_axis(lengths, batches, sizes) for lengths in zip(*shapes)]
    return None if None in found else tuple(found)


def _axis(
    lengths: Sequence[int], batches: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Axis | None:
    """Return what a dim of a tensor holds, as an :class:`Axis` that fits its length in every trace.

    If several fit, return the simplest one, which has the fewest parts (images and spatial dims).
    Return None if none fits.

    Args:
        lengths: the length of the dim for each traced image size.
        batches: the number of images for each traced image size.
        sizes: the size of the map for each traced image size.
    """
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
    """Infer the axes of a vector or a line from its shapes in several traces.

    If the length of a dim depends on the size of the map, the tensor is a line, and ``whole`` of
    the dim's :class:`Axis` is the formula of that length. (For the shape of a feature map, call
    :func:`axes_of` instead: it takes such a dim for positions.)

    Args:
        shapes: the shape of the vector or line for each traced image size.
        batches: the number of images for each traced image size.
        sizes: the size of the map for each traced image size.

    Returns:
        The axes. None if the number of dims differs between the traces, or if the length of some
        dim does not follow from the sizes.
    """
    if len({len(shape) for shape in shapes}) > 1:
        return None
    found = [_line_axis(lengths, batches, sizes) for lengths in zip(*shapes)]
    return None if None in found else tuple(found)


def _line_axis(
    lengths: Sequence[int], batches: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Axis | None:
    """Return the meaning of one dim of a line from its length in each trace; None if none fits."""
    if (axis := _axis(lengths, batches, sizes)) is not None:
        return axis._replace(places=(), whole=((1, axis.places),) if axis.places else ())
    extent = extent_of(lengths, sizes)
    return None if extent is None else Axis(whole=extent)


def extent_of(numbers: Sequence[int], sizes: Sequence[Sequence[int]]) -> Extent | None:
    """Find a formula that computes a number from the size of a map, given both in several traces.

    A trace is a recorded forward pass. The traces have images of different sizes.

    Args:
        numbers: the number for each traced image size.
        sizes: the size of the map for each traced image size.

    Returns:
        An extent: a sum of sizes and a constant, such as height + width + 1, or a multiple of a
        product of sizes, such as 4 * height * width. None if no extent gives all the numbers.
    """
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


_MOST_TIMES = 4  # largest factor of a size in a sum of sizes


def order_of(axes: Axes) -> tuple:
    """Return the order of images, channels and spatial dims in a tensor's memory, as a tuple.

    A reshape keeps this order, so two tensors can be reshapes of each other only if their orders
    are equal. The tuple alternates between a number of channels (1 for none) and what follows them:
    ``"batch"`` for the images, d for the positions along spatial dim d. For example, a tensor
    (N, C, H, W) gives (1, "batch", C, 0, 1, 1, 1): no channels before the images, C channels
    between the images and spatial dim 0, none after spatial dims 0 and 1.
    """
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
    """Return a feature map or a vector in the form that it has in user code, such as (N, H * W, C).

    Args:
        x: the map (N, C, *size) or the vector (N, C, 1, ...).
        axes: the axes of the result. If none of them has images, all images have the same values,
            and the result holds those of image 0, without a dim of images.
    """
    if not of_images(axes):  # the same for all images
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
    """Return a tensor of user code in the form of layers: (N, C, *size), or (N, C, 1, ...).

    This is the reverse of :func:`opened`. A tensor with positions becomes a map (N, C, *size),
    another one becomes a vector of the image (N, C, 1, ...).

    Args:
        y: the tensor, such as (N, H * W, C).
        axes: the axes of ``y``. If none of them has images, N is 1 in the result.
        size: the spatial size of the map. If ``y`` is a vector, only the number of spatial dims is
            used, for the number of 1s in (N, C, 1, ...).
    """
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
    """Return the dims of a split tensor that must be joined, in this order, to form one axis.

    The split tensor has a dim of images, then a dim of channels for each axis, then the spatial
    dims: (N, cell of axis 0, cell of axis 1, ..., *size). For example, if axis 0 holds images and
    channels, its dims are [0, 1].

    Args:
        axis: the meaning of the dim that is formed.
        number: the index of the axis among all axes of the tensor.
        axes: the number of axes of the tensor.
    """
    return [0] * axis.batch + [1 + number] + [1 + axes + d for d in axis.places]
