"""Compute the shapes of the results of convolutions and pools from the layers' settings.

PyTorch's kernels for the meta device compute these shapes too, but they import sympy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distseg.tiling.access_pattern import Gather, Scatter

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


def convolved(layer, x: Tensor) -> Tensor:
    """Return a meta tensor of the shape of a convolution's result.

    Args:
        layer: the convolution, of a class in ``CONVOLUTIONS``.
        x: the input (B, C, *size), on the meta device.

    Raises:
        RuntimeError: the input has a wrong number of dims or channels, or is too small.
    """
    dims, channels = len(layer.kernel_size), layer.in_channels
    if x.dim() != dims + 2 or x.shape[1] != channels:
        shape = "x".join(map(str, x.shape))
        raise RuntimeError(
            f"it takes {channels} channels of {dims} dims, but its input has the shape {shape}"
        )
    along = zip(layer.kernel_size, layer.stride, layer.dilation)
    if layer.padding == "same":
        return _made(x, layer.out_channels, x.shape[2:])
    padding = (0,) * dims if layer.padding == "valid" else layer.padding
    patterns: list[Gather | Scatter]
    if isinstance(layer, _TRANSPOSED):
        more = layer.output_padding
        patterns = [Scatter(k, s, d, p, e) for (k, s, d), p, e in zip(along, padding, more)]
    else:
        patterns = [Gather(k, s, d, p, p) for (k, s, d), p in zip(along, padding)]
    return _made(x, layer.out_channels, [at.size(n) for at, n in zip(patterns, x.shape[2:])])


def pooled(layer, x: Tensor) -> Tensor:
    """Return a meta tensor of the shape of a pool's result.

    Args:
        layer: the pool, of a class in ``POOLS``.
        x: the input (B, C, *size), on the meta device.

    Raises:
        RuntimeError: the input is too small.
    """
    settings = (layer.kernel_size, layer.stride, getattr(layer, "dilation", 1), layer.padding)
    each = (n if isinstance(n, tuple) else (n,) * (x.dim() - 2) for n in settings)
    patterns = [Gather(k, s, d, p, p, layer.ceil_mode) for k, s, d, p in zip(*each)]
    return _made(x, x.shape[1], [at.size(n) for at, n in zip(patterns, x.shape[2:])])


def _made(x: Tensor, channels: int, size: Sequence[int]) -> Tensor:
    """Return a meta tensor (B, channels, *size) of the dtype of ``x``.

    Raises:
        RuntimeError: the size is not positive.
    """
    if min(size) < 1:
        raise RuntimeError(f"its input of {'x'.join(map(str, x.shape[2:]))} is too small")
    return torch.empty(x.shape[0], channels, *size, dtype=x.dtype, device="meta")
