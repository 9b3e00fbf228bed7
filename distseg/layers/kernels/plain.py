"""The functions of :mod:`distseg.layers.kernels.norm` from PyTorch's own: for CUDA, and where there is no compiler.

Slower on a CPU, as each passes over memory several times. What CUDA and the CPU do alike is used, and no more: batch norm
with fixed statistics for the forward pass and the sums, which on a GPU is one kernel each; products and sums for the
gradient, as its kernels for tilt and shift need divisors that may be 0. CUDA's backward pass wants the fixed statistics in
place of saved ones too, and refuses None there by an assertion (aten/src/ATen/native/cuda/Normalization.cu), where the CPU
does not look. All is computed in float32 or wider and rounded once. (Not run on a GPU yet: docs/gpu.md.)
"""

from __future__ import annotations

from typing import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.layers.kernels.norm import Affine
from distseg.tiling.tile import Box

# Pixels that a CPU adds one after another in float64, which is for comparing digits; a GPU adds
# in a tree.
_CHUNK = 1 << 9

_CACHED = 1 << 17  # values


def forward(x: Tensor, affine: Affine, out: Tensor) -> Tensor:
    """y into ``out``, which may be ``x`` itself, or else ``torch.empty_like`` it."""
    y = out.copy_(_normalised(x, affine)) if out is x else _normalised(x, affine, out)
    return y if affine.slope == 1 else F.leaky_relu_(y, affine.slope)


def sums(g: Tensor, x: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """Sums of g' and of g' * (x - pivot) over all pixels, (C,) float64."""
    scale, _, pivot, one = _parameters(x, affine)
    fixed = scale, pivot, one, pivot, one, False, 0.0, [False, True, True]
    g = _before_activation(g, x, affine)
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
    """dx = scale * g', and inside ``own`` + tilt * (x - pivot) + shift; into ``out``, made by ``torch.empty_like`` of ``x``."""
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
    """scale * g' + tilt * (x - pivot) + shift."""
    return torch.addcmul(torch.addcmul(shift, x - pivot, tilt), g, scale, out=out)


def _rounded_once(function: Callable[..., Tensor], *operands: Tensor, out: Tensor) -> None:
    """A function of images and wider vectors into ``out``: a CPU is slow to mix types, a GPU's kernels convert what they read and write."""
    if out.device.type == "cpu":
        out.copy_(function(*(x.to(torch.promote_types(x.dtype, torch.float32)) for x in operands)))
    else:
        function(*operands, out=out)


def _normalised(x: Tensor, affine: Affine, out: Tensor | None = None) -> Tensor:
    """z of all pixels."""
    scale, bias, pivot, one = _parameters(x, affine)
    into = {} if out is None else {"out": (out, torch.empty_like(pivot), torch.empty_like(pivot))}
    return torch.native_batch_norm(x, scale, bias, pivot, one, False, 0.0, 0.0, **into)[0]


def _before_activation(g: Tensor, x: Tensor, affine: Affine) -> Tensor:
    """g' of all pixels."""
    if affine.slope == 1:
        return g
    return torch.ops.aten.leaky_relu_backward(g, _normalised(x, affine), affine.slope, False)


def _parameters(x: Tensor, affine: Affine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of a batch norm with fixed statistics: scale, bias, pivot for the mean, and ones for the variance."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale, bias, pivot = (v.to(x.device, dtype) for v in (affine.scale, affine.bias, affine.pivot))
    return scale, bias, pivot, torch.ones_like(pivot)


def _shaped(v: Tensor, x: Tensor) -> Tensor:
    """(C,) beside an image."""
    return v.view(1, -1, *(1 for _ in x.shape[2:]))


def _parts(*images: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of images of one size that are computed at once: on a CPU so few that they stay in its cache."""
    rows = images[0].shape[2]
    if images[0].device.type == "cpu":
        rows = max(1, _CACHED // max(1, images[0][:, :, :1].numel()))
    return zip(*(image.split(rows, 2) for image in images))


def _rows_of_chunk(x: Tensor) -> int:
    """Rows (of dim 2) that are added in one call."""
    by_parts = x.dtype == torch.float64 and x.device.type == "cpu"
    return max(1, _CHUNK // x[0, 0, 0].numel()) if by_parts else x.shape[2]
