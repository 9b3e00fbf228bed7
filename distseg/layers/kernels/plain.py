"""The functions of :mod:`distseg.layers.kernels.norm`, computed by PyTorch's kernels.

distseg uses this module on CUDA, and on CPUs without a compiler. On a CPU it is slower than the
compiled kernels, as each function passes over memory several times. It uses only operations that
CPU and CUDA share. Forward pass and sums use batch norm with fixed statistics, which is one kernel
each on a GPU. The gradient uses products and sums, because batch norm's own kernels for tilt and
shift need divisors that may be 0.

CUDA's backward kernel also needs the fixed statistics as its saved statistics, and asserts that
these are not None (aten/src/ATen/native/cuda/Normalization.cu). The CPU's kernel ignores them. All
results are computed in float32 or wider and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.comm.memory_format import dense
from distseg.layers.kernels.norm import Affine
from distseg.tiling.tile import Box

# Number of pixels that a CPU adds one after another in float64, where results are compared to the
# last digits. A GPU adds in a tree.
_CHUNK = 1 << 9

_CACHED = 1 << 17  # number of values that fit into a CPU's cache


def forward(x: Tensor, affine: Affine, out: Tensor) -> Tensor:
    """Apply an affine map and an activation to ``x``, write the result to ``out`` and return it.

    The arguments are those of :func:`distseg.layers.kernels.norm.forward`.
    """
    y = out.copy_(_normalised(x, affine)) if out is x else _normalised(x, affine, out)
    return y if affine.slope == 1 else F.leaky_relu_(y, affine.slope)


def sums(g: Tensor, x: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """Return the sums of g' and of g' * (x - pivot) over all pixels, (C,) float64 each.

    g' is the gradient before the activation. pivot is the vector (C,) that the affine map subtracts
    from x, such as the mean (:class:`distseg.layers.kernels.norm.Affine`). The arguments are those
    of :func:`distseg.layers.kernels.norm.sums`.
    """
    scale, _, pivot, one = _parameters(x, affine)
    fixed = scale, pivot, one, pivot, one, False, 0.0, [False, True, True]
    g = _before_activation(g, x, affine)
    if x.device.type == "cpu" and x.dtype.itemsize == 2:
        # On parts of 16-bit images the CPU's kernel would round the sums to 16 bits.
        g, x = dense(g), dense(x)
    rows = _rows_of_chunk(x)
    parts = [
        torch.ops.aten.native_batch_norm_backward(*gx, *fixed)[1:]
        for gx in zip(g.split(rows, 2), x.split(rows, 2))
    ]
    weighted, total = (torch.stack(found).double().sum(0) for found in zip(*parts))
    return total, weighted


def gradient(
    g: Tensor, x: Tensor, affine: Affine, tilt: Tensor, shift: Tensor, own: Box, out: Tensor
) -> Tensor:
    """Write to ``out`` the gradient of a norm's input, which includes that through the statistics.

    It is scale * g' on all pixels, plus tilt * (x - pivot) + shift inside ``own``, where g' is the
    gradient before the activation. The arguments are those of
    :func:`distseg.layers.kernels.norm.gradient`.
    """
    scale, _, pivot, _ = (_shaped(v, x) for v in _parameters(x, affine))
    g = _before_activation(g, x, affine)
    tilt, shift = (_shaped(v.to(pivot), x) for v in (tilt, shift))
    if own != Box.whole(x.shape[2:]):
        for g_part, dx in _parts(g, out):
            _rounded_once(torch.mul, g_part, scale, out=dx)
    inside = (..., *own.slices)
    for x_part, g_part, dx in _parts(x[inside], g[inside], out[inside]) if own.pixels else ():
        _rounded_once(_with_tilt, g_part, x_part, scale, pivot, tilt, shift, out=dx)
    return out


def _with_tilt(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    pivot: Tensor,
    tilt: Tensor,
    shift: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Return scale * g + tilt * (x - pivot) + shift; if ``out`` is given, write the result to it.

    Args:
        g: the gradient before the activation, (1, C, *size).
        x: the input, (1, C, *size).
        scale, pivot, tilt, shift: vectors, (1, C, 1, ...).
    """
    return torch.addcmul(torch.addcmul(shift, x - pivot, tilt), g, scale, out=out)


def _rounded_once(function: Callable[..., Tensor], *operands: Tensor, out: Tensor) -> None:
    """Write ``function(*operands)`` to ``out``, computed in float32 or wider and rounded once.

    On a CPU the operands are cast to float32 first, because its kernels are slow with mixed dtypes.
    A GPU's kernels convert values as they read and write them.

    Args:
        function: takes the operands, and on a GPU also ``out=``.
        operands: images, and vectors that may have a wider dtype than the images.
        out: the tensor for the result.
    """
    if out.device.type == "cpu":
        out.copy_(function(*(x.to(torch.promote_types(x.dtype, torch.float32)) for x in operands)))
    else:
        function(*operands, out=out)


def _normalised(x: Tensor, affine: Affine, out: Tensor | None = None) -> Tensor:
    """Return scale * (x - pivot) + bias; if ``out`` is given, write the result to it."""
    scale, bias, pivot, one = _parameters(x, affine)
    into = {} if out is None else {"out": (out, torch.empty_like(pivot), torch.empty_like(pivot))}
    return torch.native_batch_norm(x, scale, bias, pivot, one, False, 0.0, 0.0, **into)[0]


def _before_activation(g: Tensor, x: Tensor, affine: Affine) -> Tensor:
    """Return the gradient before the activation: g where the affine map is above 0, else slope * g.

    Args:
        g: the gradient after the activation, (1, C, *size).
        x: the input of the affine map, (1, C, *size).
    """
    if affine.slope == 1:
        return g
    return torch.ops.aten.leaky_relu_backward(g, _normalised(x, affine), affine.slope, False)


def _parameters(x: Tensor, affine: Affine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (weight, bias, mean, variance) with which ``F.batch_norm`` computes an affine map.

    Weight, bias and mean are the map's scale, bias and pivot; the variance is 1. All are vectors
    (C,), in float64 if ``x`` is float64, else in float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale, bias, pivot = (v.to(x.device, dtype) for v in (affine.scale, affine.bias, affine.pivot))
    return scale, bias, pivot, torch.ones_like(pivot)


def _shaped(v: Tensor, x: Tensor) -> Tensor:
    """Return a vector (C,) as (1, C, 1, ...), to broadcast with an image."""
    return v.view(1, -1, *(1 for _ in x.shape[2:]))


def _parts(*images: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut images along dim 2 at the same rows; yield a tuple with one part of each image at a time.

    On a CPU, a part is so small that it stays in the cache. On a GPU, each image is one part.

    Args:
        images: tensors with equal sizes along dim 2.
    """
    rows = images[0].shape[2]
    if images[0].device.type == "cpu":
        rows = max(1, _CACHED // max(1, images[0][:, :, :1].numel()))
    return zip(*(image.split(rows, 2) for image in images))


def _rows_of_chunk(x: Tensor) -> int:
    """Return how many rows (positions along dim 2) of ``x`` one call of a kernel may sum.

    The number is that of all rows, except in float64 on a CPU: there, long sums would lose digits.
    """
    by_parts = x.dtype == torch.float64 and x.device.type == "cpu"
    return max(1, _CHUNK // x[0, 0, 0].numel()) if by_parts else x.shape[2]
