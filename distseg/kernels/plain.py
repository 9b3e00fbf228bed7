"""The functions of :mod:`distseg.kernels.norm` from PyTorch's own: for CUDA, and where there is no compiler.

Slower on a CPU, as each passes over memory several times. (Not run on a GPU yet.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.geometry.tile import Box
from distseg.kernels.norm import Affine

_CHUNK = 1 << 9  # pixels that are added one after another in float64, which is for comparing digits


def forward(x: Tensor, affine: Affine, out: Tensor) -> Tensor:
    y = out.copy_(torch.native_batch_norm(x, *_parameters(x, affine), False, 0.0, 0.0)[0])
    return y if affine.slope == 1 else F.leaky_relu_(y, affine.slope)


def sums(g: Tensor, x: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    scale, _, pivot, one = _parameters(x, affine)
    g = _before_activation(g, x, affine)
    rows = max(1, _CHUNK // x[0, 0, 0].numel()) if x.dtype == torch.float64 else x.shape[2]
    kernel = torch.ops.aten.native_batch_norm_backward
    parts = [kernel(*gx, scale, pivot, one, None, None, False, 0.0, [False, True, True])[1:] for gx in zip(g.split(rows, 2), x.split(rows, 2))]
    weighted, total = (torch.stack(found).double().sum(0) for found in zip(*parts))
    return total, weighted


def gradient(g: Tensor, x: Tensor, affine: Affine, tilt: Tensor, shift: Tensor, own: Box, out: Tensor) -> Tensor:
    shaped = lambda v: v.to(x.dtype).view(1, -1, *(1 for _ in own.size))
    scale, _, pivot, one = _parameters(x, affine)
    arguments = scale, pivot, one, None, None, False, 0.0, [True, False, False]
    dx = out.copy_(torch.ops.aten.native_batch_norm_backward(_before_activation(g, x, affine), x, *arguments)[0])
    inside = (..., *own.slices)
    dx[inside].addcmul_(x[inside], shaped(tilt)).add_(shaped(shift - tilt * affine.pivot))
    return dx


def _before_activation(g: Tensor, x: Tensor, affine: Affine) -> Tensor:
    if affine.slope == 1:
        return g
    z = torch.native_batch_norm(x, *_parameters(x, affine), False, 0.0, 0.0)[0]
    return torch.where(z > 0, g, g * affine.slope)


def _parameters(x: Tensor, affine: Affine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of a batch norm with fixed statistics."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale, bias, pivot = (v.to(x.device, dtype) for v in (affine.scale, affine.bias, affine.pivot))
    return scale, bias, pivot, torch.ones_like(pivot)
