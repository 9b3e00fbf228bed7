"""Small networks that map an image of any size to a vector.

They are used for labels of whole images, and as backbones of PatchGD.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block: two 3x3 convolutions with norms, and a shortcut (He et al. 2016).

    Args:
        inner, outer: numbers of input and output channels.
        stride: stride of the first convolution.
        norm: the kind of the norms: batch, instance, group or none.
    """

    def __init__(self, inner: int, outer: int, stride: int, norm: str):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
        )
        self.norm_a, self.norm_b = _norm(norm, outer), _norm(norm, outer)
        self.around = (
            nn.Identity() if stride == 1 and inner == outer else nn.Conv2d(inner, outer, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.around(x) + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


class Residual(nn.Module):
    """A residual classifier: (N, in_channels, H, W) -> (N, out_channels).

    It consists of a 3x3 convolution, ``depth`` residual blocks, a mean or maximum over the image
    (``pool``), and a linear layer. The convolution and each block halve the size. From the second
    block on, each block doubles the number of channels.

    Args:
        base_channels: number of channels of the first block.
        norm: the kind of the norms: batch, instance, group or none.
        pool: how the image is reduced to a vector: mean or max.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        base_channels: int = 16,
        depth: int = 4,
        norm: str = "batch",
        pool: str = "mean",
    ):
        super().__init__()
        if pool not in ("mean", "max"):
            raise ValueError(f"pool must be mean or max, got {pool!r}")
        self.pool = pool
        widths = [base_channels * 2**k for k in range(depth)]
        self.stem = nn.Conv2d(in_channels, base_channels, 3, 2, 1)
        self.blocks = nn.Sequential(
            *(Block(widths[max(k - 1, 0)], widths[k], 2, norm) for k in range(depth))
        )
        self.last = nn.Linear(widths[-1], out_channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu(self.stem(x)))
        return self.last(y.mean((2, 3)) if self.pool == "mean" else y.amax((2, 3)))


def residual(
    in_channels: int,
    out_channels: int,
    base_channels: int = 16,
    depth: int = 4,
    norm: str = "batch",
    pool: str = "mean",
) -> Residual:
    """Return a :class:`Residual` classifier, whose docstring explains the arguments.

    A config can name this function: ``model: {name: "distseg.models.classifier:residual", depth: 4,
    norm: batch, args: {pool: max}}``.
    """
    return Residual(in_channels, out_channels, base_channels, depth, norm, pool)


def _norm(kind: str, channels: int) -> nn.Module:
    return {
        "batch": nn.BatchNorm2d,
        "instance": nn.InstanceNorm2d,
        "none": lambda _: nn.Identity(),
        "group": lambda n: nn.GroupNorm(min(8, n), n),
    }[kind](channels)
