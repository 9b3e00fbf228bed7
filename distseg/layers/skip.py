"""Concatenation with dense gradients, for skip connections.

PyTorch returns views of the concatenated gradient. In channels_last these views have gaps between
pixels. The backward pass of up-sampling would then copy them to another memory format, which takes
far longer than the pass itself (benchmarks/performance.md). Only the gradient of the first map, in
a U-Net the skip, stays a view.
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
    """Distributed counterpart of :class:`distseg.models.layers.Pop`, with a dense gradient.

    The layer concatenates a skip and its input ``x``. PyTorch would return the gradient of ``x`` as
    a view of the result's gradient, which in channels_last has gaps between pixels. Here it is
    copied to dense memory. The gradient of the skip stays a view.
    """

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return _Join.apply(skip, x)


class DenseCat(Cat):
    """Distributed counterpart of :class:`distseg.models.layers.Cat`, with dense gradients.

    PyTorch would return the gradient of each map as a view of the result's gradient, which in
    channels_last has gaps between pixels. Here it is copied to dense memory, except for the first
    map.
    """

    @staticmethod
    def joined(*maps: Tensor) -> Tensor:
        return _Join.apply(*maps)
