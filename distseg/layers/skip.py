"""Where a skip meets its level again: concatenation whose backward pass gives dense gradients.

PyTorch's hands on views of the concatenated gradient. With channels last these have gaps between pixels, which the backward
pass of up-sampling answers by copying to another memory format: 17 times its own time (docs/performance.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from distseg.comm.memory_format import like_format
from distseg.models.layers import Cat, Pop


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *maps: Tensor) -> Tensor:
        ctx.channels = [x.shape[1] for x in maps]
        return torch.cat(maps, 1)

    @staticmethod
    def backward(ctx, g: Tensor):
        first, *others = g.split(ctx.channels, 1)
        return first, *(like_format(part, g) for part in others)


class DensePop(Pop):
    """The twin of a pop."""

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return _Join.apply(skip, x)


class DenseCat(Cat):
    """The twin of a concatenation."""

    @staticmethod
    def joined(*maps: Tensor) -> Tensor:
        return _Join.apply(*maps)
