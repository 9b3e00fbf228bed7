"""Where a skip meets its level again: concatenation whose backward pass gives dense gradients.

PyTorch's hands on views of the concatenated gradient. With channels last these have gaps between pixels, which the backward
pass of up-sampling answers by copying to another memory format: 17 times its own time (docs/performance.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from distseg.memory_format import like_format
from distseg.models.layers import Pop


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, skip: Tensor, x: Tensor) -> Tensor:
        ctx.channels = skip.shape[1]
        return torch.cat((skip, x), 1)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g[:, : ctx.channels], like_format(g[:, ctx.channels :], g)


class DensePop(Pop):
    """The twin of a pop."""

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return _Join.apply(skip, x)
