"""What runs through a network: pieces of images, and those that run together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from distseg.tiling.tile import Box, TilePlacement


def on_tile(output: Tensor, place: TilePlacement) -> Tensor:
    """The part that the tile owns of an output on its window, or on the tile already."""
    if tuple(output.shape[2:]) == place.tile.size:
        return output
    return output[(..., *place.owned.slices)]


def labels_of_images(values: Tensor, box: Box, ignore: int) -> Tensor:
    """(B,) -> (B, 1, ...): the labels of whole images, for the part of each that begins at the origin; for all others what is ignored, of numbers NaN.

    What a network makes of whole images every part of them has, and one is to count.
    """
    found = (
        values
        if not any(box.start)
        else torch.full_like(values, math.nan if values.is_floating_point() else ignore)
    )
    return found.view(-1, *(1 for _ in box.start))


@dataclass
class TileBatch:
    """The same window of B images of one size.

    pixels (B, C, *window) float32, normalised; labels (B, *tile) uint8 or int64, of the owned tile only, or (B, 1, ...) those of whole images
    (:func:`labels_of_images`). In a pipeline the first stage has the pixels, the last one the labels, and the others None.
    """

    pixels: Tensor | None
    labels: Tensor | None
    place: TilePlacement


@dataclass(frozen=True)
class MicroBatch:
    """Pieces of a micro-batch of the step that run through the network together: a micro-batch of the pipeline."""

    micro_batch: int
    pieces: list[TileBatch]

    @property
    def signature(self) -> tuple:
        """Units that agree in it have tensors of the same shapes in every layer."""
        return tuple(
            (len(p.place.images), p.place.image, p.place.tile, p.place.window) for p in self.pieces
        )


@dataclass(frozen=True)
class LazyTileBatch:
    """What a rank owns of B images of one size, read part by part.

    ``pixels(box)`` (B, C, *box.size) as the network takes them, ``labels(box)`` (B, *box.size).
    """

    place: TilePlacement
    pixels: Callable[[Box], Tensor]
    labels: Callable[[Box], Tensor] | None = None


def block_of(piece: TileBatch, ignore: int) -> LazyTileBatch:
    """A piece that is in memory, read part by part; ``ignore``: the label of what counts nowhere."""
    place = piece.place
    within = lambda x, box, have: x[(..., *box.relative_to(have).slices)]
    if piece.labels is not None and piece.labels.shape[1:].numel() < place.tile.pixels:
        labels = lambda box: labels_of_images(piece.labels.flatten(), box, ignore)
    else:
        labels = lambda box: within(piece.labels, box, place.tile)
    return LazyTileBatch(place, lambda box: within(piece.pixels, box, place.window), labels)
