"""Dropout with masks that depend only on seed, epoch, sample, layer and position.

So every layout of ranks and tiles draws the same masks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distseg.comm.staging import upload
from distseg.layers.context import Context
from distseg.models.layers import DropImage, VectorDropout
from distseg.tiling import rng
from distseg.tiling.tile import Box, TilePlacement

CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS = (nn.Dropout, *CHANNEL_DROPOUTS, DropImage)


def channel_mask(p: float, k: int, channels: int) -> Tensor:
    """Return a mask (C,) float64: 0 for a dropped channel, 1 / (1 - p) for a kept one.

    The compiled norm (``kernels/norm.cpp``) draws the same masks in code of its own.

    Args:
        p: the probability that a channel is dropped.
        k: the key of the mask (:func:`dropout_key`).
        channels: C.
    """
    return torch.from_numpy((rng.uniform(k, channels) >= p) / _share_kept(p))


def image_mask(p: float, k: int) -> Tensor:
    """Return the mask of a whole image, a tensor () float64: 0 to drop the image, 1 to keep it.

    Args:
        p: the probability that the image is dropped.
        k: the key of the mask (:func:`dropout_key`).
    """
    return torch.tensor(float(rng.uniform(k, 1)[0] >= p), dtype=torch.float64)


def element_mask(
    p: float,
    k: int,
    channels: int,
    size: tuple[int, ...],
    box: Box,
    device,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the part of a feature map's dropout mask that lies inside ``box``, (C, *box.size).

    It is 0 for a dropped value and 1 / (1 - p) for a kept one.

    Args:
        p: the probability that a value is dropped.
        k: the key of the mask (:func:`dropout_key`).
        channels: the number of channels of the feature map.
        size: the size of the whole feature map.
        box: the box of the wanted part, in cells of the whole feature map.
    """
    position = torch.arange(channels, device=device)
    for n, a, b in zip(size, box.start, box.stop):
        position = position.unsqueeze(-1) * n + torch.arange(a, b, device=device)
    return (rng.uniform_at(k, position) >= p).to(dtype) / _share_kept(p)


def _share_kept(p: float) -> float:
    """Return 1 - p, the fraction of values that dropout keeps. The kept values are divided by it.

    For p = 1, where no value is kept, return 1, to avoid a division by 0.
    """
    return 1 - p if p < 1 else 1.0


def dropout_key(seed: int, epoch: int, sample: int, layer: str, turn: int = 0) -> int:
    """Return the key of the dropout mask of one image in one layer.

    The key is the seed of the mask's random numbers. So ranks that hold tiles of an image draw
    parts of one mask.

    Args:
        seed: the seed of the run.
        epoch: the number of the epoch.
        sample: the index of the image's sample in the epoch.
        layer: the name of the dropout layer.
        turn: the number of earlier calls of the layer in the same forward pass.
    """
    return rng.key(seed, epoch, sample, layer, "dropout", *((turn,) if turn else ()))


def begin_pass(layers: Iterable[nn.Module]) -> None:
    """Set the call counters of all dropouts among ``layers`` to 0, before a forward pass.

    If user code calls a dropout several times in a pass, each call has its own mask. The counter
    tells these calls apart (argument ``turn`` of :func:`dropout_key`).
    """
    for layer in layers:
        if isinstance(layer, KeyedDropout):
            layer.turn = 0


class KeyedDropout(nn.Module):
    """Distributed counterpart of PyTorch's dropout layers for a window of an image.

    Args:
        dropout: the user's layer.
        context: the state of the model's forward pass, which holds the windows' placements.
        stride: the number of image pixels per cell of the layer's feature map, along each dim.
        name: the name of the layer, which is a part of the key of each mask.
    """

    def __init__(self, dropout: nn.Module, context: Context, stride: tuple[int, ...], name: str):
        super().__init__()
        self.p, self.context, self.stride, self.name = dropout.p, context, stride, name
        self.by_channel = isinstance(dropout, CHANNEL_DROPOUTS)
        self.image = dropout if isinstance(dropout, DropImage) else None
        self.of_vector = isinstance(dropout, VectorDropout)
        # Number of calls in this forward pass, for a user module that calls its layers itself.
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.image and not self.training:
            return self.image.forward(x)
        if not self.training or self.p == 0:
            return x
        mask = self.mask(x)
        self.turn += self.context.whole
        return x * upload(mask, x.device, x.dtype)

    def mask(self, x: Tensor) -> Tensor:
        """Return the factors by which the layer multiplies its input ``x`` (B, C, *size).

        The shape of the factors is (B, C, 1, ...) if the layer drops whole channels, (B, C, *size)
        if it drops single values, and (B, 1, 1, ...) if it drops whole images.
        """
        place, context = self.context.place, self.context
        if self.image:
            return (
                torch.stack([image_mask(self.p, k) for k in self.keys(place)]).view(
                    -1, 1, *(1 for _ in self.stride)
                )
                * self.image.kept
            )
        if self.by_channel:
            return self.channels_of(place, x.shape[1]).view(*x.shape[:2], *(1 for _ in x.shape[2:]))
        size, held = tuple(x.shape[2:]), Box.whole(x.shape[2:])
        if not (context.whole or self.of_vector):
            region = context.region(context.current, self.stride, size)
            size, held = region.size, region.available
        return torch.stack(
            [
                element_mask(self.p, k, x.shape[1], size, held, x.device, x.dtype)
                for k in self.keys(place)
            ]
        )

    def channels_of(self, place: TilePlacement, channels: int) -> Tensor:
        """Return the mask of whole channels for each image of a window, (B, C) float64.

        Args:
            place: the placement of the window.
            channels: C.
        """
        return torch.stack([channel_mask(self.p, k, channels) for k in self.keys(place)])

    def keys(self, place: TilePlacement) -> list[int]:
        """Return the key of the dropout mask of each image of a window (:func:`dropout_key`)."""
        return [
            dropout_key(self.context.seed, self.context.epoch, sample, self.name, self.turn)
            for sample in place.samples
        ]
