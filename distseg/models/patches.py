"""A network for whole images that sees them as a grid of patches: that of PatchGD.

"Patch Gradient Descent: Training Neural Networks on Very Large Images" (Gupta et al., 2023). In the paper's symbols::

    X        an image, cut into m x n patches, even or overlapping          patches_of
    theta_1  the backbone: a patch -> s features                            PatchNetwork.backbone
    Z        the features of all patches, an s x m x n block                PatchNetwork.block
    theta_2  the head: Z -> what is said of the image                       PatchNetwork.head
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.extents import Extents
from distseg.geometry.tile import Box
from distseg.models.bands import tell_like
from distseg.models.capture import as_network


def starts_of(size: Sequence[int], patch: Sequence[int], step: Sequence[int]) -> list[list[int]]:
    """Where patches begin along each dim: every ``step`` pixels; the last one ends where the image does."""
    return [[min(a, n - p) for a in range(0, max(n - p, 0) + s, s)] if n > p else [0] for n, p, s in zip(size, patch, step)]


@lru_cache(16)
def patches_of(size: tuple[int, ...], patch: tuple[int, ...], step: tuple[int, ...]) -> tuple[Box, ...]:
    """The patches of an image, row by row, all of one size: the ``patch``, as far as the image goes. Together they cover it."""
    return tuple(Box(start, tuple(min(a + p, n) for a, p, n in zip(start, patch, size))) for start in product(*starts_of(size, patch, step)))


class PatchNetwork(nn.Module):
    """(N, C, *size) -> (N, K): the head's answer to the features of all patches.

    Args:
        backbone: (N, C, *patch) -> (N, s), or (N, s, 1, ...).
        head: (N, s, *grid) -> (N, K), for grids of any size.
        patch: its size; ``step``: from one to the next, by default as much.
        outputs: K, for those who ask.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, patch: Sequence[int], step: Sequence[int] | None = None, outputs: int | None = None):
        super().__init__()
        self.outputs = outputs
        self.backbone, self.head, self.patch, self.step = as_network(backbone), as_network(head), tuple(patch), tuple(step or patch)
        tell_like(self, self.backbone)
        parts = {"backbone": self.backbone, "head": self.head}
        self.names = {f"{part}.{own}": f"{part}.{user}" for part, network in parts.items() for own, user in getattr(network, "names", {}).items()}

    @property
    def begun(self) -> nn.Module:
        """What ``train.init`` gives weights to."""
        return self.backbone

    def patches(self, size: Sequence[int]) -> tuple[Box, ...]:
        return patches_of(tuple(size), self.patch, self.step)

    def block(self, features: Tensor, size: Sequence[int]) -> Tensor:
        """Z: features (N, patches, s) of images of this size -> (N, s, *grid)."""
        return features.movedim(1, -1).unflatten(-1, [len(starts) for starts in starts_of(size, self.patch, self.step)])

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        features = [self.backbone(x[(..., *box.slices)]).flatten(1) for box in self.patches(size)]
        return self.head(self.block(torch.stack(features, 1), size)).flatten(1)


class ConvHead(nn.Module):
    """(N, s, *grid) -> (N, K): two 3-wide convolutions with batch norm, a mean or maximum over all places, a linear layer."""

    def __init__(self, features: int, channels: int, outputs: int, dims: int = 2, largest: bool = False):
        super().__init__()
        self.largest = largest
        conv, norm = ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[dims - 1]
        self.first, self.second = conv(features, channels, 3, padding=1, bias=False), conv(channels, channels, 3, padding=1, bias=False)
        self.norm_first, self.norm_second = norm(channels), norm(channels)  # without them nothing was learnt of 7,000 images
        self.last = nn.Linear(channels, outputs)

    def forward(self, z: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm_first(self.first(z)), 0.1)
        y = F.leaky_relu(self.norm_second(self.second(y)), 0.1)
        return self.last(y.flatten(2).amax(2) if self.largest else y.flatten(2).mean(2))


class TransformerHead(nn.Module):
    """(N, s, *grid) -> (N, K): the patches as tokens, with sines of their places, through an encoder; the mean of what it makes, a linear layer."""

    def __init__(self, features: int, channels: int, outputs: int, layers: int = 2, heads: int = 4):
        super().__init__()
        if channels % (2 * heads):
            raise ValueError(f"patchgd.head_channels is {channels}, but a transformer of {heads} heads wants a multiple of {2 * heads}")
        self.embed, self.last = nn.Linear(features, channels), nn.Linear(channels, outputs)
        layer = nn.TransformerEncoderLayer(channels, heads, 2 * channels, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, z: Tensor) -> Tensor:
        tokens = self.embed(z.flatten(2).transpose(1, 2))
        return self.last(self.encoder(tokens + _places(z.shape[2:], tokens)).mean(1))


def _places(grid: Sequence[int], like: Tensor) -> Tensor:
    """(places, channels): sines and cosines of the place along each dim, of wavelengths from 2 pi to 10,000 x 2 pi (Vaswani et al., 2017)."""
    channels = like.shape[-1]
    each = channels // (2 * len(grid))
    rates = torch.exp(-math.log(10000.0) * torch.arange(each, device=like.device) / max(each, 1))
    at = torch.stack(torch.meshgrid(*(torch.arange(n, device=like.device) for n in grid), indexing="ij"), -1).flatten(0, -2)
    angles = (at.unsqueeze(-1) * rates).flatten(1)
    found = torch.cat((angles.sin(), angles.cos()), 1)
    return F.pad(found, (0, channels - found.shape[1])).to(like.dtype)


def check_patches(size: Sequence[int], patch: Sequence[int], what: str = "an image") -> None:
    """Refuse images that are smaller than a patch.

    Raises:
        ValueError: naming both.
    """
    if len(size) != len(patch):
        raise ValueError(f"{what} has {Extents(size)} pixels, of {len(size)} dims, but patchgd.patch is {Extents(patch)}: give it as many numbers")
    if any(n < p for n, p in zip(size, patch)):
        raise ValueError(f"{what} has {Extents(size)} pixels, but patchgd.patch is {Extents(patch)}: take a smaller patch")
