"""Compute a network of patches without gradients, to fill Z and to predict whole images.

Z are the features of all patches of an image. They are computed a few patches at a time. The
network is :class:`distseg.training.patchgd.network.PatchNetwork`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from distseg.comm.collective import Alone, add
from distseg.comm.staging import upload
from distseg.data.prefetch import prefetch
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Share
from distseg.layers.context import Context
from distseg.layers.dropout import DROPOUTS
from distseg.layers.graph import reach_for
from distseg.layers.norm import STATISTICAL, commit
from distseg.models.capture.checks import check_exact, check_seen
from distseg.models.network import is_followed
from distseg.runtime.own_part import autocast, place_model
from distseg.runtime.swap_layers import TiledModel, on_whole_maps, parallelize
from distseg.tiling.tile import Box, ReceptiveField, TilePlacement
from distseg.training.patchgd.network import PatchNetwork, check_patches


class Images(Protocol):
    """Interface to images that are read patch by patch.

    Attributes:
        sizes: the size of each image in pixels.
    """

    sizes: list[tuple[int, ...]]

    def read(self, image: int, boxes: list[Box]) -> Tensor:
        """Return the pixels of patches of one image, (boxes, C, *size).

        Args:
            image: the index of the image in ``sizes``.
            boxes: the boxes of the patches, all of the same size.
        """


def by_image(pairs: list[tuple[int, int]]) -> dict[int, list[int]]:
    """Group pairs (index of an image, index of a patch) by image.

    The result is a dict from the index of an image to the list of its patch indices.
    """
    found: dict[int, list[int]] = {}
    for i, p in pairs:
        found.setdefault(i, []).append(p)
    return found


def read_boxes(images: Images, boxes: Mapping[int, list[Box]]) -> Tensor:
    """Return the pixels of patches of several images, (patches, C, *patch).

    Args:
        images: the images.
        boxes: the boxes of the patches to read, for each index of an image. The result has their
            order.
    """
    return torch.cat([images.read(i, those) for i, those in boxes.items()])


class Filler:
    """Network that sees an image as patches, on a device; it computes Z and the output.

    Z are the features of all patches. Ranks share the work.

    Args:
        network: the network. It is changed in place.
        context: holds the communicator of the ranks that share statistics of the backbone's norms.
        head_context: holds the communicator of the ranks that share statistics of the head's norms.
        device: the device to compute on.
        precision: fp32, bf16 (autocast) or fp64.
        channels_last: True for the channels_last memory format.
        at_once: the number of patches in one forward pass in evaluation mode.

    Raises:
        ValueError: a layer cannot be computed exactly.
    """

    def __init__(
        self,
        network: PatchNetwork,
        context: Context,
        head_context: Context,
        device: torch.device,
        precision: str,
        channels_last: bool,
        at_once: int,
    ):
        check_exact(network.backbone, network.patch)
        check_seen(network.head)
        nowhere = ReceptiveField((0,) * len(network.patch), (1,) * len(network.patch))
        self.backbone: TiledModel = parallelize(
            network.backbone, reach_for(network.backbone, False), context, whole=True
        )
        self.head = _tiled_head(network.head, nowhere, head_context)
        self._place(network, device, precision, channels_last, at_once)

    def _place(
        self,
        network: nn.Module,
        device: torch.device,
        precision: str,
        channels_last: bool,
        at_once: int,
    ) -> None:
        """Move the network to its device in its dtype, and store the settings of a forward pass."""
        self.network, self.device, self.channels_last, self.at_once = (
            network,
            device,
            channels_last,
            at_once,
        )
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self.autocast: Callable[[], AbstractContextManager] = autocast(precision, device)
        place_model(network, device, precision, channels_last)

    @cached_property
    def drops(self) -> bool:
        """True if the backbone has dropout, so that patches need random keys for the masks."""
        return bool(self.backbone.dropouts)

    def features(self, x: Tensor, samples: Sequence[int]) -> Tensor:
        """Apply the backbone to n patches, and return the s features of each, (n, s).

        Args:
            x: the patches, (n, C, *patch).
            samples: for each patch, the random key of its dropout masks.
        """
        place = place_of(x.shape[2:], range(len(x)), samples)
        with self.autocast():
            return self.backbone([upload(x, self.device, self.dtype, self.channels_last)], [place])[
                0
            ].flatten(1)

    def logits(
        self,
        features: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        samples: Sequence[int] | None = None,
    ) -> Tensor:
        """Apply the head to B images, and return the K outputs for each, (B, K).

        Args:
            features: for each image the features of all its patches, (patches, s).
            sizes: the size of each image in pixels.
            samples: for each image, the random key of its dropout masks in the head; None for 0.
        """
        samples = samples or [0] * len(sizes)
        alike: dict[tuple[int, ...], list[int]] = {}  # image numbers by size
        for i, size in enumerate(sizes):
            alike.setdefault(tuple(size), []).append(i)
        blocks = [
            self.network.block(torch.stack([features[i] for i in those]).to(self.dtype), size)
            for size, those in alike.items()
        ]
        if self.head is None:
            found = [self.network.head(z) for z in blocks]
        else:
            found = self.head(
                blocks,
                [
                    place_of(z.shape[2:], those, [samples[i] for i in those])
                    for z, those in zip(blocks, alike.values())
                ],
            )
        order = [i for those in alike.values() for i in those]
        return torch.cat([y.flatten(1) for y in found])[[order.index(i) for i in range(len(order))]]

    def commit_statistics(self, unbiased: bool = False) -> None:
        """Update the norms' running statistics from all forward passes since the last update.

        All sample groups must call the method together. They exchange the statistics in one
        message.

        Args:
            unbiased: True for the variance of n values with the factor 1 / (n - 1), as in PyTorch's
                layers, False for the factor 1 / n.
        """
        parts = [part for part in (self.backbone, self.head) if part is not None]
        norms = [norm for part in parts for norm in part.norms]
        commit(norms, self.backbone.context.groups_comm, unbiased)

    @torch.no_grad()
    def __call__(self, images: Images, comm) -> list[Tensor]:
        """Return for each image the features of all its patches, (patches, s).

        The backbone is in evaluation mode. Each rank of ``comm`` computes its share of the patches,
        and all ranks get all features. All ranks of ``comm`` must call it together.
        """
        boxes = [self.network.patches(size) for size in images.sizes]
        pairs = [(i, p) for i, those in enumerate(boxes) for p in range(len(those))]
        mine = pairs[comm.rank :: comm.size]
        chunks = [mine[a : a + self.at_once] for a in range(0, len(mine), self.at_once)]
        read = (
            read_boxes(images, {i: [boxes[i][p] for p in those] for i, those in chunk.items()})
            for chunk in map(by_image, chunks)
        )
        with self.evaluating():
            found = [self.features(x, (0,) * len(x)) for x in prefetch(read, 1)]
        return list(
            shared(torch.cat(found) if found else None, len(pairs), comm, self.device).split(
                [len(those) for those in boxes]
            )
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch the backbone to evaluation mode during a ``with`` block.

        Its norms then do not communicate with other ranks.
        """
        context, training = self.backbone.context, self.backbone.training
        before, context.batch_comm = context.batch_comm, Alone()
        self.backbone.eval()
        try:
            yield
        finally:
            self.backbone.train(training)
            context.batch_comm = before


def _tiled_head(head: nn.Module, nowhere: ReceptiveField, context: Context) -> TiledModel | None:
    """Return the head with distributed counterparts of its norms, means and dropouts.

    The result is None if the head has no such layers.

    Args:
        head: the head, a module of plain PyTorch.
        nowhere: a receptive field without halo, because a rank computes the head on all patches.
        context: holds the communicator of the ranks that share the statistics of norms.
    """
    if not any(isinstance(layer, (*STATISTICAL, *DROPOUTS)) for layer in head.modules()):
        return None
    return (
        parallelize(head, nowhere, context, whole=True)
        if is_followed(head)
        else on_whole_maps(head, context, nowhere)
    )


def place_of(size: Sequence[int], images: Sequence[int], samples: Sequence[int]) -> TilePlacement:
    """Return the tile placement of whole images, for which tile and window are the image.

    Args:
        size: the size of the images in pixels.
        images: the indices of the images in the micro-batch.
        samples: for each image, the key of its dropout masks.
    """
    return TilePlacement(
        tuple(size), Box.whole(size), Box.whole(size), tuple(images), tuple(samples)
    )


def shared(mine: Tensor | None, count: int, comm, device) -> Tensor:
    """Gather the rows of a table, such as features of patches, on every rank of ``comm``.

    The result is (count, s). All ranks of ``comm`` must call this function together.

    Args:
        mine: this rank's rows, (n, s), which are rows ``comm.rank``, ``comm.rank + comm.size``, ...
            of the result. None if this rank has no row.
        count: the number of rows of all ranks together.
        comm: the communicator of the ranks that share the rows.
        device: the device of the result.
    """
    if comm.size == 1:
        return mine.detach().to(torch.promote_types(mine.dtype, torch.float32))
    forms = comm.allgather(
        None if mine is None else (mine.shape[1], torch.promote_types(mine.dtype, torch.float32))
    )
    features, dtype = next(filter(None, forms))
    table = torch.zeros(count, features, dtype=dtype)
    if mine is not None:
        table[comm.rank :: comm.size] = mine.detach().to(table)
    return add(table, comm).to(device, dtype)


class PatchPredictor:
    """Predictor of whole images by a network that sees an image as patches.

    One rank computes each image. The class has the interface of
    :class:`distseg.inference.predictor.Predictor`.

    Args:
        filler: the network, which computes Z and the output of an image on its device.
        replicas: the communicator of the ranks among which the images are divided.
    """

    def __init__(self, filler: Filler, replicas):
        self.filler, self.model, self.replicas = filler, filler.backbone, replicas

    @property
    def writes(self) -> bool:
        """True on the rank that writes results, rank 0 of ``replicas``."""
        return self.replicas.rank == 0

    def check(self, size: Sequence[int]) -> None:
        """Refuse an image that the network cannot take.

        Args:
            size: the size of the image in pixels.

        Raises:
            ValueError: the image is smaller than a patch, or the head does not take its grid of
                patches.
        """
        check_patches(size, self.filler.network.patch)
        self.filler.network.check_grid(size)

    def deal_images(self, sizes: Sequence[Sequence[int]]) -> tuple[int, list[list[Share]]]:
        """Divide images among the ranks, each image to one rank.

        Args:
            sizes: the size of each image in pixels.

        Returns:
            1, which is the number of ranks that compute an image; and for each rank the list of the
            images that it computes.
        """
        return 1, [
            [Share(image, None) for image in range(rank, len(sizes), self.replicas.size)]
            for rank in range(self.replicas.size)
        ]

    def among(self, ranks: int) -> PatchPredictor:
        """Return a copy of this predictor that computes every image on this rank alone.

        ``ranks`` is not used, because an image is never divided among ranks.
        """
        part = copy.copy(self)
        part.replicas = Alone()
        return part

    def features(self, source: ImageSource) -> Tensor:
        """Return the features of all patches of an image, (patches, s)."""
        return self.filler(SingleImage(source), Alone())[0]

    @torch.no_grad()
    def __call__(self, source: ImageSource, tiles: None = None) -> Iterator[tuple[Box, np.ndarray]]:
        """Apply the network to an image; yield one pair: the image's box, its logits (K, 1, ...).

        ``tiles`` is not used.
        """
        head = self.filler.network.head
        training = head.training
        head.eval()
        logits = self.filler.logits([self.features(source)], [source.size])
        head.train(training)
        yield Box.whole(source.size), logits[0].cpu().numpy().reshape(-1, *(1 for _ in source.size))


@dataclass(frozen=True)
class SingleImage:
    """One image with the interface of :class:`Images`, so that its patches can be read."""

    source: ImageSource

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        return [tuple(self.source.size)]

    def read(self, image: int, boxes: list[Box]) -> Tensor:
        return torch.stack([torch.from_numpy(self.source.read(box)) for box in boxes])
