"""Rules for calls that move cells of a map: crops, windows and blocks of cells.

Calls that would join opposite borders of the image are refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.models.axes import Axis
from distseg.models.capture.arranging import over_channels
from distseg.models.capture.lining import of_trace
from distseg.models.capture.moved import cut, differences, dim_of_place, fitted
from distseg.models.capture.reader import Reader
from distseg.models.capture.values import Value
from distseg.models.moving import Blocks, Overlaid, Windows

_PART = "takes a part of the image or of the batch; supported: a part of the channels"
_INDICES = (
    "takes indices that are not the unchanged indices of a max pooling with return_indices=True "
    "and windows that do not overlap (stride = kernel_size, no padding)"
)


class Moving:
    """Rules for calls of functions that slice, shift, flip, or use windows and blocks of cells.

    Each method is the rule for the PyTorch function of the same name. Its argument ``self`` is not
    an object of this class but the :class:`Reader` that captures the network. The method adds
    layers for the reader's current call, and returns their output, a :class:`Value`.
    """

    # parts

    def narrow(self: Reader, input, dim, start, length):
        x = self.value(input)
        (at,) = self.dims_of(dim, x)
        if x.vector or (place := dim_of_place(self, x, at, "takes a part of")) is None:
            return over_channels(self, x, (x, dim, start, length), dim, _PART)
        each = [(of_trace(start, n), of_trace(length, n)) for n in range(len(x.sizes))]
        firsts = [a if a >= 0 else size[place] + a for (a, _), size in zip(each, x.sizes)]
        return cut(self, x, {place: [slice(a, a + n) for a, (_, n) in zip(firsts, each)]})

    def diff(self: Reader, input, n=1, dim=-1, prepend=None, append=None):
        x = self.value(input)
        if prepend is not None or append is not None or self.of_channels(dim, x):
            return over_channels(self, x, (x, n, dim, prepend, append), dim)
        return differences(self, x, n, dim)

    def repeat_interleave(self: Reader, input, repeats, dim=None, output_size=None):
        x = self.value(input)
        (at,) = self.dims_of(dim, x) if dim is not None else (None,)
        if x.vector or at is None or x.axes[at].of_channels:
            return over_channels(self, x, (x, repeats, dim), dim)
        place = dim_of_place(self, x, at, "repeats")
        if not isinstance(repeats, int):
            raise self.refusal(
                "repeats positions of the image different numbers of times, or a number of times "
                "that depends on the image's size: repeat all positions a fixed number of times"
            )
        factors = tuple(float(repeats) if d == place else 1.0 for d in range(self.dims))
        sizes = tuple(tuple(int(n * f) for n, f in zip(size, factors)) for size in x.sizes)
        return self.emit(lambda _: nn.Upsample(scale_factor=factors), [x], axes=x.axes, sizes=sizes)

    # windows and blocks

    def pixel_shuffle(self: Reader, input, upscale_factor):
        return self.layer(nn.PixelShuffle, self.map(input), upscale_factor)

    def pixel_unshuffle(self: Reader, input, downscale_factor):
        x, factors = self.map(input), (downscale_factor,) * self.dims
        return self.emit(lambda _: Windows(factors, factors), [x])

    def unfold(self: Reader, input, *args, **kwargs):
        x = self.value(input)
        return (_unfolded_dim if self.call.function is Tensor.unfold else _unfolded)(
            self, x, *args, **kwargs
        )

    def fold(self: Reader, input, output_size, kernel_size, dilation=1, padding=0, stride=1):
        x = self.value(input)
        kernel, dilation, padding, stride = (
            self.each(self.fixed(n, "setting")) for n in (kernel_size, dilation, padding, stride)
        )
        if (
            x.rank != 3
            or not x.axes[0].batch
            or not x.axes[1].of_channels
            or x.axes[2].cell != 1
            or x.axes[2].places != tuple(range(self.dims))
        ):
            raise self.refusal(
                f"takes {x!r}, but needs windows such as those of F.unfold: reshape it to "
                f"(N, channels * kernel cells, positions)"
            )
        each = [(n, call.shapes[0][2:]) for n, call in zip(x.sizes, self.current)]
        extras = {
            tuple(
                m - ((n - 1) * s - 2 * p + (k - 1) * d + 1)
                for n, m, k, d, p, s in zip(*pair, kernel, dilation, padding, stride)
            )
            for pair in each
        }
        if len(extras) > 1:
            raise self.refusal(
                "leaves out positions after the last window, and their number depends on the "
                "image's size: pad the image to a multiple of the stride"
            )
        settings = kernel, stride, dilation, padding, extras.pop()
        return self.emit(lambda _: Overlaid(*settings), [x])

    # positions of maxima

    def max_pool2d_with_indices(
        self: Reader,
        input,
        kernel_size,
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=True,
    ):
        x, kernel = self.map(input), self.each(self.fixed(kernel_size, "kernel_size"))
        known = (
            self.each(stride or kernel_size) == kernel
            and set(self.each(padding)) == {0}
            and set(self.each(dilation)) == {1}
            and not ceil_mode
        )
        if not known:
            raise self.refusal(
                f"returns the positions of the maxima with kernel_size={kernel_size}, "
                f"stride={stride}, padding={padding}, dilation={dilation} and "
                f"ceil_mode={ceil_mode}; supported: a stride equal to kernel_size, and no padding, "
                "dilation or ceil_mode"
            )
        pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[self.dims - 1]
        largest = self.layer(pool, x, kernel_size=kernel)
        first, images = largest.axes[1], largest.axes[0]
        windows = self.emit(
            lambda _: Windows(kernel, kernel),
            [x],
            axes=(images, first, Axis(cell=math.prod(kernel)), *largest.axes[2:]),
            sizes=largest.sizes,
            what="windows",
        )
        where = self.applied(_first_largest, [windows], "places", largest.axes)
        self.maxima[where.name] = kernel
        return largest, where

    max_pool1d_with_indices = max_pool3d_with_indices = max_pool2d_with_indices

    def max_unpool2d(
        self: Reader, input, indices, kernel_size, stride=None, padding=0, output_size=None
    ):
        x, kernel = self.map(input), self.each(kernel_size)
        known = (
            isinstance(indices, Value)
            and self.maxima.get(indices.name) == kernel == self.each(stride or kernel_size)
            and set(self.each(padding)) == {0}
        )
        if not known or indices.shapes != x.shapes:
            raise self.refusal(_INDICES)
        axes = (x.axes[0], x.axes[1], *(Axis(cell=k) for k in kernel), *x.axes[2:])
        spread = self.applied(_OverWindow(kernel), [x, indices], "windows", axes)
        cells, along = (x.channels, *kernel), (None, *range(self.dims))
        sizes = tuple(tuple(n * k for n, k in zip(size, kernel)) for size in x.sizes)
        made = self.emit(
            lambda _: Blocks(cells, along), [spread], axes=x.axes, sizes=sizes, what="blocks"
        )
        sides = [
            tuple((0, m - n) for n, m in zip(size, call.shapes[0][2:]))
            for size, call in zip(sizes, self.current)
        ]
        return fitted(self, made, sides)

    max_unpool1d = max_unpool3d = max_unpool2d

    # opposite borders, and positions that depend on the image's content

    def flip(self: Reader, input, *sizes, dims=()):
        given = sizes[0] if sizes and isinstance(sizes[0], tuple) else sizes or dims
        why = (
            "flips the image, so that each part would need the part on the other side; supported: "
            "flip channels; to augment, flip images and labels together"
        )
        return over_channels(self, input, (input, given), given, why)

    def roll(self: Reader, input, shifts, dims=None):
        why = (
            "shifts the image cyclically, so that opposite borders would meet; supported: shift "
            "channels, or shift the image and fill in zeros by F.pad with a negative and a "
            "positive side"
        )
        return over_channels(self, input, (input, shifts, dims), dims, why)

    def grid_sample(self: Reader, input, grid, *settings, **more):
        raise self.refusal(
            "samples the image at positions from a grid, which may lie anywhere in the image; "
            "supported: F.interpolate, slices and F.pad"
        )

    grid_sampler = affine_grid = grid_sample

    def deform_conv2d(self: Reader, input, *settings, **more):
        raise self.refusal(
            "samples the image at learned offsets, which may point anywhere in the image: use a "
            "convolution with dilation, or F.unfold and weights for each position"
        )


def _unfolded(
    reader: Reader, x: Value, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Value:
    """Add a layer for ``F.unfold``, and return its output.

    The shape is (N, C * cells of the kernel, positions). The arguments are those of the call.
    """
    x = reader.map(x)
    kernel, dilation, padding, stride = (
        reader.each(reader.fixed(n, "setting")) for n in (kernel_size, dilation, padding, stride)
    )
    each = list(zip(kernel, dilation, padding, stride))
    sizes = tuple(
        tuple((n + 2 * p - (k - 1) * d - 1) // s + 1 for n, (k, d, p, s) in zip(size, each))
        for size in x.sizes
    )
    axes = (
        Axis(True),
        Axis(cell=x.channels * math.prod(kernel)),
        Axis(places=tuple(range(reader.dims))),
    )
    return reader.emit(
        lambda _: Windows(kernel, stride, dilation, padding), [x], axes=axes, sizes=sizes
    )


def _unfolded_dim(reader: Reader, x: Value, dimension: int, size: int, step: int) -> Value:
    """Add a layer for ``Tensor.unfold``, which takes windows along one dim; return its output.

    The last dim of the result has the cells of a window. The arguments are those of the call.
    """
    (at,) = reader.dims_of(dimension, x)
    if x.vector or (place := dim_of_place(reader, x, at, "takes windows of")) is None:
        return over_channels(reader, x, (x, dimension, size, step), dimension)
    size, step = reader.fixed(size, "size"), reader.fixed(step, "step")
    kernel, stride = ([n if d == place else 1 for d in range(reader.dims)] for n in (size, step))
    sizes = tuple(
        tuple((n - k) // s + 1 for n, k, s in zip(lengths, kernel, stride)) for lengths in x.sizes
    )
    return reader.emit(
        lambda _: Windows(kernel, stride), [x], axes=(*x.axes, Axis(cell=size)), sizes=sizes
    )


def _first_largest(x: Tensor) -> Tensor:
    """Return, for each window of a max pooling, the index of the first maximum in the window.

    Shapes: (N, C, window, *size) -> (N, C, *size).
    """
    return x.argmax(2)


class _OverWindow:
    """Callable that puts a value at one position of a window, and zeros at the other positions.

    It computes a part of ``F.max_unpool2d``. Its inputs are a map of values and a map of indices of
    window cells (:func:`_first_largest`), both (N, C, *size). Its output is (N, C, *kernel, *size).

    Args:
        kernel: the size of a window.
    """

    __name__ = "unpool"

    def __init__(self, kernel: tuple[int, ...]):
        self.kernel = tuple(kernel)

    def __call__(self, x: Tensor, where: Tensor) -> Tensor:
        there = F.one_hot(where.long(), math.prod(self.kernel)).movedim(-1, 2)
        return torch.where(there == 1, x.unsqueeze(2), 0.0).unflatten(2, self.kernel)
