"""A network of patches (:mod:`distseg.patchgd.network`) without gradients: Z filled a few patches at a time, whole images predicted."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Callable, ContextManager, Iterator, Protocol, Sequence

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
from distseg.layers.norm import STATISTICAL
from distseg.models.capture.hidden import check_exact, check_seen
from distseg.models.network import is_followed
from distseg.patchgd.network import PatchNetwork, check_patches
from distseg.runtime.build import autocast, place_model
from distseg.runtime.parallelize import TiledModel, on_whole_maps, parallelize
from distseg.tiling.tile import Box, ReceptiveField, TilePlacement


class Images(Protocol):
    """Images that are read patch by patch."""

    sizes: list[tuple[int, ...]]

    def read(self, image: int, boxes: list[Box]) -> Tensor:
        """Return patches of one size, (boxes, C, *size)."""


def read_pairs(images: Images, pairs: Sequence[tuple[int, Box]]) -> Tensor:
    """Return patches of several images, (pairs, C, *patch); those of an image stand side by side."""
    return torch.cat(
        [images.read(i, [box for _, box in those]) for i, those in groupby(pairs, itemgetter(0))]
    )


class Filler:
    """A network of patches on a device.

    Args:
        network: is changed in place.
        context, head_context: who shares statistics of the backbone's norms, and of the head's.
        at_once: patches that the backbone is given at once in evaluation mode.
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
        self.network, self.device, self.channels_last, self.at_once = (
            network,
            device,
            channels_last,
            at_once,
        )
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self.autocast: Callable[[], ContextManager] = autocast(precision, device)
        place_model(network, device, precision, channels_last)

    def features(self, x: Tensor, samples: Sequence[int]) -> Tensor:
        """Patches (n, C, *patch) -> (n, s); ``samples``: the keys of their dropout masks."""
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
        """Of all patches of each image (patches, s) -> (B, K); ``samples``: the keys of the images' dropout masks in the head."""
        samples = samples or [0] * len(sizes)
        alike: dict[tuple[int, ...], list[int]] = {}  # those of a size together
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
        """Update the running statistics from all passes since the last time; collective over the sample groups."""
        for part in filter(None, (self.backbone, self.head)):
            part.commit_statistics(unbiased)

    @torch.no_grad()
    def __call__(self, images: Images, comm) -> list[Tensor]:
        """The features of all patches of some images, (patches, s) of each, on all ranks of ``comm``, of which each computes its share. In evaluation mode."""
        boxes = [self.network.patches(size) for size in images.sizes]
        pairs = [(i, p) for i, those in enumerate(boxes) for p in range(len(those))]
        mine = pairs[comm.rank :: comm.size]
        chunks = [mine[a : a + self.at_once] for a in range(0, len(mine), self.at_once)]
        read = (read_pairs(images, [(i, boxes[i][p]) for i, p in chunk]) for chunk in chunks)
        with self.evaluating():
            found = [self.features(x, (0,) * len(x)) for x in prefetch(read, 1)]
        return list(
            shared(torch.cat(found) if found else None, len(pairs), comm, self.device).split(
                [len(those) for those in boxes]
            )
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, on each rank by itself."""
        context, training = self.backbone.context, self.backbone.training
        before, context.batch_comm = context.batch_comm, Alone()
        self.backbone.eval()
        try:
            yield
        finally:
            self.backbone.train(training)
            context.batch_comm = before


def _tiled_head(head: nn.Module, nowhere: ReceptiveField, context: Context) -> TiledModel | None:
    """Return the head with norms and dropouts that ranks share; None where it has none."""
    if not any(isinstance(layer, (*STATISTICAL, *DROPOUTS)) for layer in head.modules()):
        return None
    return (
        parallelize(head, nowhere, context, whole=True)
        if is_followed(head)
        else on_whole_maps(head, context, nowhere)
    )


def place_of(size: Sequence[int], images: Sequence[int], samples: Sequence[int]) -> TilePlacement:
    """Of whole images of this size."""
    return TilePlacement(
        tuple(size), Box.whole(size), Box.whole(size), tuple(images), tuple(samples)
    )


def shared(mine: Tensor | None, count: int, comm, device) -> Tensor:
    """Rows that ranks have made in turn, (count, s), on all of them; None where a rank has none."""
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
    """The network of patches on whole images, an image a rank; in the place of :class:`distseg.inference.predictor.Predictor`."""

    def __init__(self, filler: Filler, replicas):
        self.filler, self.model, self.replicas = filler, filler.backbone, replicas

    @property
    def writes(self) -> bool:
        return self.replicas.rank == 0

    def check(self, size: Sequence[int]) -> None:
        check_patches(size, self.filler.network.patch)
        self.filler.network.check_grid(size)

    def deal_images(self, sizes: Sequence[Sequence[int]]) -> tuple[int, list[list[Share]]]:
        return 1, [
            [Share(image, None) for image in range(rank, len(sizes), self.replicas.size)]
            for rank in range(self.replicas.size)
        ]

    def among(self, ranks: int) -> "PatchPredictor":
        part = copy.copy(self)
        part.replicas = Alone()
        return part

    def features(self, scene: ImageSource) -> Tensor:
        """(patches, s)"""
        return self.filler(OneScene(scene), Alone())[0]

    @torch.no_grad()
    def __call__(self, scene: ImageSource, tiles: None = None) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (the image, its logits (K, 1, ...))."""
        head = self.filler.network.head
        training = head.training
        head.eval()
        logits = self.filler.logits([self.features(scene)], [scene.size])
        head.train(training)
        yield Box.whole(scene.size), logits[0].cpu().numpy().reshape(-1, *(1 for _ in scene.size))


@dataclass(frozen=True)
class OneScene:
    """An image alone, as :class:`Images`."""

    scene: ImageSource

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        return [tuple(self.scene.size)]

    def read(self, image: int, boxes: list[Box]) -> Tensor:
        return torch.stack([torch.from_numpy(self.scene.read(box)) for box in boxes])
