"""Tile batches and micro-batches: the pixels and labels that run through a network.

A tile batch is one window of several images. The window is in memory (:class:`TileBatch`), or it is
read when it is needed (:class:`LazyTileBatch`). A :class:`MicroBatch` is a list of tile batches
that run together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distseg.tiling.tile import Box, TilePlacement


def on_tile(output: Tensor, place: TilePlacement) -> Tensor:
    """Return the part of a network's output that the tile owns.

    Args:
        output: (B, C, ...). It covers either the window or the tile. If it covers the tile, it is
            returned as it is.
        place: the position of the window and the tile.
    """
    if tuple(output.shape[2:]) == place.tile.size:
        return output
    return output[(..., *place.owned.slices)]


def labels_of_images(values: Tensor, box: Box, ignore: int | None) -> Tensor:
    """Return the labels that a tile gets from labels of whole images, (B,) -> (B, 1, ...).

    Every tile has the same output for the whole image. So that each image counts once, only the
    tile at the origin gets the labels. All other tiles get the label ``ignore``, or NaN if the
    labels are floating-point numbers.

    Args:
        values: the label of each image.
        box: the tile.
        ignore: the label that losses and metrics leave out; None if all labels count.

    Raises:
        ValueError: ``ignore`` is None, and the labels are whole numbers.
    """
    if any(box.start):
        ignored = math.nan if values.is_floating_point() else ignore
        if ignored is None:
            raise ValueError(
                "the loss has ignore_index=None, but only one tile counts the label of an image: "
                "give the loss an ignore_index that no label has, such as -100"
            )
        values = torch.full_like(values, ignored)
    return values.view(-1, *(1 for _ in box.start))


@dataclass
class TileBatch:
    """One window (a tile with its halo) of B images of one size, held in memory.

    In a pipeline only the first stage has pixels and only the last stage has labels.

    Attributes:
        pixels: normalised pixels (B, C, *window) float32; None on later stages of a pipeline.
        labels: labels of the owned tile (B, *tile) uint8 or int64, or labels of whole images
            (B, 1, ...) (:func:`labels_of_images`); None if they are unknown or not needed here.
        place: the position of the window in the images.
    """

    pixels: Tensor | None
    labels: Tensor | None
    place: TilePlacement


@dataclass(frozen=True)
class MicroBatch:
    """Tile batches that run through the network together, as one micro-batch of the pipeline.

    Attributes:
        micro_batch: the index of the micro-batch in the step.
        pieces: the tile batches of the micro-batch.
    """

    micro_batch: int
    pieces: list[TileBatch]

    @property
    def signature(self) -> tuple:
        """Key of sizes and boxes: micro-batches with equal keys have equal shapes in all layers."""
        return tuple(
            (len(p.place.images), p.place.image, p.place.tile, p.place.window) for p in self.pieces
        )


@dataclass(frozen=True)
class LazyTileBatch:
    """One tile of B images of one size, whose pixels and labels are read box by box when needed.

    Attributes:
        place: the position of the window in the images.
        pixels: a function that returns the normalised pixels (B, C, *box.size) of a box.
        labels: a function that returns the labels (B, *box.size) of a box, or None.
    """

    place: TilePlacement
    pixels: Callable[[Box], Tensor]
    labels: Callable[[Box], Tensor] | None = None


def block_of(piece: TileBatch, ignore: int) -> LazyTileBatch:
    """Wrap a tile batch in memory as a lazy one, which returns its pixels and labels box by box.

    Args:
        piece: the tile batch in memory.
        ignore: the label of pixels that neither the loss nor the metrics use.
    """
    place = piece.place
    pixels, given = piece.pixels, piece.labels
    of_images = given is not None and given.shape[1:].numel() < place.tile.pixels

    def crop(x: Tensor | None, box: Box, origin: Box) -> Tensor:
        assert x is not None, "a rank reads pixels and labels only where it has them"
        return x[(..., *box.relative_to(origin).slices)]

    def labels(box: Box) -> Tensor:
        if given is not None and of_images:
            return labels_of_images(given.flatten(), box, ignore)
        return crop(given, box, place.tile)

    return LazyTileBatch(place, lambda box: crop(pixels, box, place.window), labels)
