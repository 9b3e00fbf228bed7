"""Patch gradient descent: training on large images by a few of their patches at a time (Gupta et al., 2023; :mod:`distseg.models.patches`).

In a step on B images, in the paper's symbols::

    Z <- theta_1 of all patches, without gradients                        filling; in evaluation mode, so that it does not depend on who does it
    for j = 1 .. zeta:                                                    patchgd.inner
        k patches of each image are drawn, and Z[those] <- theta_1        patchgd.sampled; with gradients
        L = loss of theta_2 of Z, dL/dtheta added up
        every epsilon-th j: theta <- theta - alpha (sum / epsilon)        patchgd.accumulate

The patches of a sample group's images are dealt to the ranks of its tile group. Each rank has all of Z and computes the head, whose gradient counts once; dL/dZ, which
all have then, goes back through the backbone on the rank that has the patch. Numbers are drawn by (seed, epoch, image, j), so they do not depend on the ranks.
It approximates the gradient: the exact one is what tiles in time give (docs/whole_images.md compares both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor

from distseg import rng
from distseg.comm.collective import Alone, add
from distseg.config import Config
from distseg.data.loader import bytes_of, read_pixels
from distseg.data.sampler import Sample, crop_size, epoch_samples
from distseg.data.store import Store
from distseg.geometry.tile import Box
from distseg.infer.patches import Filler, PatchPredictor, shared
from distseg.launch import together
from distseg.loss import Loss
from distseg.mesh import Mesh
from distseg.models.patches import PatchNetwork, check_patches
from distseg.spatial.context import Context
from distseg.train.descent import Descent
from distseg.train.optim import freeze
from distseg.train.step import Rows


@dataclass(frozen=True)
class Patches:
    """Images of a step of one sample group, read patch by patch.

    Args:
        note: told how many bytes are read, whenever some are.

    Attributes:
        numbers: of the images in the epoch; ``sizes``, ``labels``: of each.
    """

    store: Store
    samples: Sequence[Sample]
    note: Callable[[int], None]

    @property
    def numbers(self) -> list[int]:
        return [sample.number for sample in self.samples]

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        return [tuple(sample.size) for sample in self.samples]

    @property
    def labels(self) -> Tensor:
        return torch.tensor([self.store.label(sample.image) for sample in self.samples])

    def read(self, image: int, box: Box) -> Tensor:
        """(C, *box.size)"""
        self.note(bytes_of(self.store, [self.samples[image]], box.pixels, 0))
        return torch.from_numpy(read_pixels(self.store, [self.samples[image]], box)[0])


class PatchLoader:
    """The steps of an epoch for one sample group: as :class:`distseg.data.loader.StepLoader`, but read by whoever computes."""

    def __init__(self, store: Store, config: Config, mesh: Mesh):
        self.store, self.config, self.mesh = store, config, mesh
        self.bytes_read = self.steps_read = 0
        self.steps_per_epoch = len(self._samples(0))
        for name in store.split("train"):
            check_patches(crop_size(store.size(name), config.data.crop), config.patchgd.patch)

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Patches]:
        steps, images = self._samples(number), self.config.data.images
        for k in range(first_step, len(steps)):
            self.steps_read += 1
            yield Patches(self.store, steps[k][self.mesh.sample * images : (self.mesh.sample + 1) * images], self._note_bytes)

    def _note_bytes(self, count: int) -> None:
        self.bytes_read += count

    def _samples(self, epoch: int) -> Sequence[list[Sample]]:
        config = self.config
        return epoch_samples(self.store, "train", config.data, config.train.seed, epoch, self.mesh.shape.samples * config.data.images)


class PatchEngine(Descent):
    """A network of patches ready to train by PatchGD.

    Args:
        network: is changed in place.
        device, precision, channels_last: as :class:`distseg.train.engine.Engine`'s.
    """

    partition = None

    def __init__(self, config: Config, mesh: Mesh, network: PatchNetwork, device=torch.device("cpu"), precision: str = "fp32", channels_last: bool = False):
        self.config, self.mesh, self.network, self.device, self.precision, self.channels_last = config, mesh, network, device, precision, channels_last
        mesh.waits.timeout = config.run.timeout
        with together(mesh.world):
            freeze(network, config.optim)
            self.loss = Loss(config.loss, network.head.last.out_features)
            step = config.spatial.norm_scope == "step"
            self.context = Context(norm_comm=Alone(), batch_comm=mesh.replicas if step else mesh.tiles, groups_comm=mesh.groups, seed=config.train.seed)
            self.fill = Filler(network, self.context, device, precision, channels_last, config.patchgd.at_once)
            network.train()
        super().__init__(config, mesh, network, device)

    def lines(self, size: Sequence[int]) -> list[str]:
        """What training is made of, for images of this size."""
        settings, patches = self.config.patchgd, len(self.network.patches(size))
        return [
            f"PatchGD: {patches} patches of {settings.patch} an image of {'x'.join(map(str, size))}, {settings.inner} inner iterations of {drawn(settings.sampled, patches)} of them, "
            f"an update after {settings.accumulate}; gradients are approximate"
        ]

    def step(self, images: Patches, rate: float) -> tuple[float, float]:
        """The inner iterations on a batch of images; returns the mean of their losses, and of the gradients' norms before clipping. Collective."""
        settings, losses, norms = self.config.patchgd, [], []
        features = self.fill(images, self.mesh.tiles)
        for j in range(settings.inner):
            if j % settings.accumulate == 0:
                self.gradients.zero()
            losses.append(self.backward(images, features, j))
            if (j + 1) % settings.accumulate == 0 or j + 1 == settings.inner:
                norms.append(self._update(rate, 1 + j % settings.accumulate))
        return math.fsum(losses) / len(losses), math.fsum(norms) / len(norms)

    def backward(self, images: Patches, features: list[Tensor], j: int) -> float:
        """The gradient of inner iteration ``j``, added to the parameters' ``grad``: this rank's part; and the loss. New features take their place in ``features``."""
        network, tiles = self.network, self.mesh.tiles
        pairs = self._drawn(images, j)
        mine = pairs[tiles.rank :: tiles.size]
        boxes = [network.patches(size) for size in images.sizes]
        made = self._features(images, [(i, p, boxes[i][p]) for i, p in mine], j)
        for (i, p), value in zip(pairs, shared(made, len(pairs), tiles, self.device)):
            features[i][p] = value
        block = [z.detach().requires_grad_() for z in features]
        loss = self._head(images, block)
        own = torch.stack([block[i].grad[p] for i, p in mine])
        made.backward(own.to(made.dtype))
        return loss

    def _drawn(self, images: Patches, j: int) -> list[tuple[int, int]]:
        """(image, patch) of all that are computed with gradients."""
        found = []
        for i, (number, size) in enumerate(zip(images.numbers, images.sizes)):
            count = len(self.network.patches(size))
            order = rng.permutation(rng.key(self.config.train.seed, self.context.epoch, number, "patches", j), count)
            found += [(i, int(p)) for p in sorted(order[: drawn(self.config.patchgd.sampled, count)])]
        if len(found) < self.mesh.tiles.size:
            raise ValueError(
                f"patchgd.sampled {self.config.patchgd.sampled} draws {len(found)} patches of {len(images.numbers)} images, but {self.mesh.tiles.size} ranks share them (mesh.tiles): draw more, or take fewer ranks"
            )
        return found

    def _features(self, images: Patches, those: Sequence[tuple[int, int, Box]], j: int) -> Tensor:
        """(patches, s) of this rank's patches, with their graph."""
        x = torch.stack([images.read(i, box) for i, _, box in those])
        epoch, self.context.epoch = self.context.epoch, rng.key(self.context.epoch, j)  # masks of dropout are others in each iteration
        try:
            return self.fill.features(x, [rng.key(images.numbers[i], p) for i, p, _ in those])
        finally:
            self.context.epoch = epoch

    def _head(self, images: Patches, block: list[Tensor]) -> float:
        """The loss of the head's answers over all sample groups, gone back through to Z; each image counts on one rank."""
        rows = Rows(self.mesh.shape.samples, self.mesh.sample, 1, len(block))
        at = [rows.of(0, i) for i in range(len(block))]
        logits = torch.cat([self.fill.logits(z, size) for z, size in zip(block, images.sizes)])
        labels = images.labels.to(self.device)
        found = self.loss.rows(logits[..., None], labels[:, None])
        table = torch.zeros(rows.total, self.loss.sums, dtype=torch.float64)
        if self.mesh.tiles.rank == 0:
            table[at] = found.detach().double().cpu()
        value, slope = self.loss.slope(add(table, self.mesh.replicas))
        found.backward(slope[at].to(found))
        return value

    def _update(self, rate: float, iterations: int) -> float:
        """An optimizer step on the mean gradient of some inner iterations; returns its norm before clipping."""
        self.gradients.settle()
        if self.mesh.tiles.rank:  # the first rank's counts
            for p in self.network.head.parameters():
                if p.grad is not None:
                    p.grad.zero_()
        for part in self.gradients.parts if iterations > 1 else ():
            part.div_(iterations)
        self.reducer.sum(self.gradients.buckets)
        norm = self.gradients.norm().item()
        self.descend(rate, norm, self.context.epoch)
        self.fill.backbone.commit_statistics()
        return norm

    def pixels(self, images: Patches) -> int:
        """Of a step, of all sample groups."""
        return self.mesh.shape.samples * sum(math.prod(size) for size in images.sizes)

    def watch_step(self, watch: Callable[[float], None]) -> None:
        """Steps are not told of part by part."""

    def predictor(self) -> "PatchPredictor":
        return PatchPredictor(self.fill, self.mesh.replicas)


def drawn(share: float, patches: int) -> int:
    """k: how many patches of an image an inner iteration draws, by a share of them or their number."""
    return max(1, min(patches, round(share * patches if share <= 1 else share)))
