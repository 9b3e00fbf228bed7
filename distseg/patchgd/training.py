"""Patch gradient descent: training on large images by a few of their patches at a time (Gupta et al., 2023; :mod:`distseg.patchgd.network`).

In a step on B images, in the paper's symbols::

    Z <- theta_1 of all patches, k of each image at a time                filling; without gradients
    for j = 1 .. zeta:                                                    patchgd.inner
        k patches of each image are drawn, and Z[those] <- theta_1        patchgd.sampled; with gradients
        L = loss of theta_2 of Z, dL/dtheta added up
        every epsilon-th j: theta <- theta - alpha (sum / epsilon)        patchgd.accumulate

As in the authors' program, patches are drawn without replacement until all of an image were drawn, and batch norms take the statistics of the patches that are
computed together, also where Z is filled. The patches of a sample group's images are dealt to the ranks of its tile group. Each rank has all of Z and computes the head,
whose gradient counts once; dL/dZ, which all have then, goes back through the backbone on the rank that has the patch. What is drawn is keyed by seed, epoch, image and
j, so it does not depend on the ranks. It approximates the gradient: the exact one is what streamed tiles give (docs/whole_images.md compares both).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from distseg.comm.collective import Alone, add
from distseg.comm.launch import raise_jointly
from distseg.comm.mesh import Mesh
from distseg.config.settings import Config
from distseg.data.loader import bytes_of, read_labels, read_patches
from distseg.data.prefetch import prefetch
from distseg.data.sampler import Rows, Sample, crop_size, epoch_samples
from distseg.data.store.store import Store
from distseg.layers.context import Context
from distseg.layers.loss import Loss
from distseg.models.memory import own_memory
from distseg.patchgd.filling import Filler, PatchPredictor, read_pairs, shared
from distseg.patchgd.network import PatchNetwork, check_patches, patches_of
from distseg.runtime.optimizer import freeze
from distseg.runtime.parameter_update import ParameterUpdate
from distseg.tiling import rng
from distseg.tiling.tile import Box

_HELD = 8  # times the pixels that are computed together, images are kept in memory for a step: the maps made of those take more


@dataclass(frozen=True)
class Patches:
    """Images of a step of one sample group, read patch by patch.

    Args:
        note: told how many bytes are read, whenever some are.
        step: the samples of all groups.

    Attributes:
        numbers: of the images in the epoch; ``sizes``, ``labels``: of each.
    """

    store: Store
    samples: Sequence[Sample]
    note: Callable[[int], None]
    step: Sequence[Sample]

    @cached_property
    def numbers(self) -> list[int]:
        return [sample.number for sample in self.samples]

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        return [tuple(sample.size) for sample in self.samples]

    @property
    def labels(self) -> Tensor:
        return torch.tensor([self.store.label(sample.image) for sample in self.samples])

    @cached_property
    def _held(self) -> list[Tensor]:
        return []

    def hold(self) -> None:
        """Read the images whole, if they have not been: patches are then cut out of them."""
        if not self._held:
            self._held.extend(
                [self.read(i, [Box.whole(size)])[0] for i, size in enumerate(self.sizes)]
            )

    def read(self, image: int, boxes: list[Box]) -> Tensor:
        """Return patches of one size, (boxes, C, *size)."""
        if self._held:
            return torch.stack([self._held[image][(..., *box.slices)] for box in boxes])
        self.note(len(boxes) * bytes_of(self.store, [self.samples[image]], boxes[0].pixels, 0))
        return torch.from_numpy(read_patches(self.store, self.samples[image], boxes))

    @cached_property
    def _orders(self) -> dict[int, tuple[int, np.ndarray]]:
        return {}

    def order(self, image: int, key: int, count: int) -> np.ndarray:
        """Return the random order of an image's patches that belongs to a key; the last one is kept, as several iterations take a part of it."""
        known, order = self._orders.get(image, (None, None))
        if known != key:
            order = rng.permutation(key, count)
            self._orders[image] = key, order
        return order

    def read_labels(self, image: int, box: Box) -> Tensor:
        """Of pixels, (*box.size)."""
        self.note(bytes_of(self.store, [self.samples[image]], 0, box.pixels))
        return read_labels(self.store, [self.samples[image]], box)[0]


class PatchLoader:
    """The steps of an epoch for one sample group: as :class:`distseg.data.loader.StepLoader`, but read by whoever computes."""

    def __init__(self, store: Store, config: Config, mesh: Mesh):
        self.store, self.config, self.mesh = store, config, mesh
        self.bytes_read = self.steps_read = 0
        self.steps_per_epoch = len(self._samples(0))

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Patches]:
        steps, images = self._samples(number), self.config.data.images
        for k in range(first_step, len(steps)):
            self.steps_read += 1
            yield Patches(
                self.store,
                steps[k][self.mesh.sample * images : (self.mesh.sample + 1) * images],
                self._note_bytes,
                steps[k],
            )

    def _note_bytes(self, count: int) -> None:
        self.bytes_read += count

    def _samples(self, epoch: int) -> Sequence[list[Sample]]:
        config = self.config
        return epoch_samples(
            self.store,
            "train",
            config.data,
            config.train.seed,
            epoch,
            self.mesh.shape.samples * config.data.images,
        )


class PatchEngine(ParameterUpdate):
    """A network of patches ready to train by PatchGD.

    Args:
        network: is changed in place.
        device, precision, channels_last: as :class:`distseg.training.engine.Engine`'s.
    """

    partition = None

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        network: PatchNetwork,
        device=torch.device("cpu"),
        precision: str = "fp32",
        channels_last: bool = False,
    ):
        self.config, self.mesh, self.network, self.device, self.precision, self.channels_last = (
            config,
            mesh,
            network,
            device,
            precision,
            channels_last,
        )
        mesh.waits.timeout = config.run.timeout
        with raise_jointly(mesh.world):
            freeze(network, config.optim)
            own_memory(network)
            self.loss = Loss(config.loss, network.outputs)
            step = config.spatial.norm_scope == "step"
            groups = (
                Alone() if step else mesh.groups
            )  # norms that met all groups are not counted once for each again
            self.context = Context(
                norm_comm=Alone(),
                batch_comm=mesh.replicas if step else mesh.tiles,
                groups_comm=groups,
                seed=config.train.seed,
            )
            self.head_context = Context(
                norm_comm=Alone(),
                batch_comm=mesh.groups if step else Alone(),
                groups_comm=groups,
                seed=config.train.seed,
            )
            self.filler = self._filler(self.context)
            network.train()
        super().__init__(config, mesh, network, device)

    def _filler(self, context: Context) -> Filler:
        return Filler(
            self.network,
            context,
            self.head_context,
            self.device,
            self.precision,
            self.channels_last,
            self.config.patchgd.at_once,
        )

    def lines(self, size: Sequence[int]) -> list[str]:
        """What training is made of, for images of this size."""
        settings, patches, inner = (
            self.config.patchgd,
            len(self.network.patches(size)),
            self.config.patchgd.inner or self._rounds(size),
        )
        return [
            f"PatchGD: {patches} patches of {settings.patch} an image of {'x'.join(map(str, size))}, {inner} inner iterations of {drawn(settings.sampled, patches)} of them, "
            f"an update after {min(settings.accumulate or inner, inner)}; gradients are approximate"
        ]

    def step(self, images: Patches, rate: float) -> tuple[float, float]:
        """The inner iterations on a batch of images; returns the mean of their losses, and of the gradients' norms before clipping. Collective."""
        losses, norms, inner = [], [], self.config.patchgd.inner or self._most_rounds(images)
        features, every = self.fill(images), self.config.patchgd.accumulate or inner
        for j in range(inner):
            if j % every == 0:
                self.gradients.zero()
            losses.append(self.backward(images, features, j))
            if (j + 1) % every == 0 or j + 1 == inner:
                norms.append(self._update(rate, 1 + j % every))
        return math.fsum(losses) / len(losses), math.fsum(norms) / len(norms)

    @torch.no_grad()
    def fill(self, images: Patches) -> list[Tensor]:
        """Z: of each image the features of all its patches, (patches, s), on all ranks of the tile group. Collective.

        An image whose patches are through goes on being computed beside those that have more, for the statistics of norms, but its part of Z stays.
        """
        counts = [len(self.network.patches(size)) for size in images.sizes]
        turns = [self._rounds(size) for size in images.sizes]
        step = (
            self.config.spatial.norm_scope == "step"
        )  # norms then meet those of all sample groups
        rounds = range(self._most_rounds(images) if step or self._at_once else max(turns))
        drawn, features = [self._draw(images, "fill", j) for j in rounds], None
        read = (self._read(images, pairs) for pairs in drawn)
        with self.context.repeating(
            not self._at_once
        ):  # otherwise running statistics move by the inner iterations alone
            for j, pairs, x in zip(rounds, drawn, prefetch(read, 1)):
                with self._masks("fill", j):
                    rows = self._shared(self._features(x, self._keys(images, pairs)), pairs)
                features = features or [rows.new_zeros(count, rows.shape[1]) for count in counts]
                first = self._first(images, pairs, j)
                put(features, [pairs[n] for n in first], rows[first])
        return features

    def _first(self, images: Patches, pairs: list[tuple[int, int]], j: int) -> list[int]:
        """Return which of the pairs of round ``j`` of a filling are of images whose patches were not all through before."""
        return [n for n, (i, _) in enumerate(pairs) if j < self._rounds(images.sizes[i])]

    def backward(self, images: Patches, features: list[Tensor], j: int) -> float:
        """The gradient of inner iteration ``j``, added to the parameters' ``grad``: this rank's part; and the loss. New features take their place in ``features``."""
        pairs = self._draw(images, "patches", j)
        with self._masks("patches", j):
            made = self._features(self._read(images, pairs), self._keys(images, pairs))
        put(features, pairs, self._shared(made, pairs))
        block = [z.detach().requires_grad_() for z in features]
        with self._masks("head", j):
            loss = self._head(images, block)
        own = torch.stack([block[i].grad[p] for i, p in self._mine(pairs)])
        made.backward(own.to(made.dtype))
        return loss

    @property
    def _at_once(self) -> bool:
        """Return True if running statistics move with each forward pass."""
        return self.config.patchgd.statistics == "pass"

    def _features(self, x: Tensor, keys: Sequence[int]) -> Tensor:
        """Return the features of patches, (n, s)."""
        made = self.filler.features(x, keys)
        self._passed()
        return made

    def _passed(self) -> None:
        """Move the running statistics after a forward pass, where they move with each. Collective over the sample groups."""
        if self._at_once:
            self.filler.commit_statistics(unbiased=True)

    def _drawn_of(self, patches: int) -> int:
        return drawn(self.config.patchgd.sampled, patches)

    def _rounds(self, size: Sequence[int]) -> int:
        """Return how many draws have each patch of an image of this size once."""
        count = len(self.network.patches(size))
        return math.ceil(count / self._drawn_of(count))

    def _most_rounds(self, images: Patches) -> int:
        """Return the most rounds of any image of the step, of all sample groups."""
        return max(self._rounds(sample.size) for sample in images.step)

    def _draw(self, images: Patches, what: str, j: int) -> list[tuple[int, int]]:
        """(image, patch) of all that are computed together: of each image the next ones of an order in which each comes once; then of another."""
        found = []
        for i, (number, size) in enumerate(zip(images.numbers, images.sizes)):
            count = len(self.network.patches(size))
            share = self._drawn_of(count)
            turn, at = divmod(j, math.ceil(count / share))
            order = images.order(
                i, rng.key(self.config.train.seed, self.context.epoch, number, what, turn), count
            )
            start = min(at * share, count - share)  # the last ones of an order may have come before
            found += [(i, p) for p in sorted(order[start : start + share].tolist())]
        return found

    def _mine(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return pairs[self.mesh.tiles.rank :: self.mesh.tiles.size]

    def _read(self, images: Patches, pairs: list[tuple[int, int]]) -> Tensor:
        """This rank's patches of the pairs, (patches, C, *patch)."""
        boxes = [(i, self.network.patches(images.sizes[i])[p]) for i, p in self._mine(pairs)]
        if sum(map(math.prod, images.sizes)) <= _HELD * sum(box.pixels for _, box in boxes):
            images.hold()
        return read_pairs(images, boxes)

    def _keys(self, images: Patches, pairs: list[tuple[int, int]]) -> list[int]:
        """Of the dropout masks of this rank's patches."""
        return [rng.key(images.numbers[i], p) for i, p in self._mine(pairs)]

    @contextmanager
    def _masks(self, what: str, j: int) -> Iterator[None]:
        """Masks of dropout are others each time."""
        epoch = self.context.epoch
        self.context.epoch = self.head_context.epoch = rng.key(epoch, what, j)
        try:
            yield
        finally:
            self.context.epoch = epoch

    def _shared(self, made: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        """Features of all pairs, of this rank's."""
        return shared(made, len(pairs), self.mesh.tiles, self.device)

    def _head(self, images: Patches, block: list[Tensor]) -> float:
        """The loss of the head's answers over all sample groups, gone back through to Z; each image counts on one rank."""
        logits = self.filler.logits(block, images.sizes, images.numbers)
        self._passed()
        labels = images.labels.to(self.device)
        found = self.loss.rows(logits[..., None], labels[:, None])
        return self._settled(
            images, list(range(len(block))), found, counts=self.mesh.tiles.rank == 0
        )

    def _settled(
        self,
        images: Patches,
        those: list[int],
        found: Tensor,
        counts: bool = True,
        besides: Tensor | None = None,
    ) -> float:
        """The loss, of rows (n, sums) of the step's table which belong to ``those`` images, gone back through to what they were made of; ``counts``: they do, and are no other rank's too; ``besides`` (images, sums): of the same images, without gradients."""
        rows = Rows(self.mesh.shape.samples, self.mesh.sample, 1, len(images.numbers))
        at = torch.tensor([rows.of(0, i) for i in those])
        table = torch.zeros(rows.total, self.loss.sums, dtype=torch.float64)
        if counts:
            table.index_add_(0, at, found.detach().double().cpu())
        if besides is not None:
            table.index_add_(0, torch.tensor([rows.of(0, i) for i in range(len(besides))]), besides)
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
        self.filler.commit_statistics()
        return norm

    def pixels(self, images: Patches) -> int:
        """Of a step, of all sample groups."""
        return self.mesh.shape.samples * sum(math.prod(size) for size in images.sizes)

    def watch_step(self, watch: Callable[[float], None]) -> None:
        """Steps are not told of part by part."""

    def predictor(self) -> "PatchPredictor":
        return PatchPredictor(self.filler, self.mesh.replicas)


def check_images(store: Store, config: Config) -> None:
    """Refuse a store whose images can't be trained on.

    Raises:
        ValueError: an image without labels, smaller than a patch, or of which fewer patches are drawn than ranks share.
    """
    settings, ranks = config.patchgd, config.mesh.tiles.volume
    for name in store.split("train"):
        if not (store.has_labels(name) or store.of_images):
            raise ValueError(
                f"image {name!r} of the split 'train' of {store.path} has no labels: prepare the store with masks"
            )
        size = crop_size(store.size(name), config.data.crop)
        check_patches(size, settings.patch, f"image {name!r}")
        count = config.data.images * drawn(
            settings.sampled,
            len(
                patches_of(
                    tuple(size), tuple(settings.patch), tuple(settings.step or settings.patch)
                )
            ),
        )
        if count < ranks:
            raise ValueError(
                f"patchgd.sampled {settings.sampled} draws {count} patches of {config.data.images} images such as {name!r}, but {ranks} ranks share them (mesh.tiles {config.mesh.tiles}): draw more, or take fewer ranks"
            )


def put(features: list[Tensor], pairs: list[tuple[int, int]], rows: Tensor) -> None:
    """Features of pairs of (image, patch), image by image, in their places."""
    those: dict[int, list[int]] = {}
    for i, p in pairs:
        those.setdefault(i, []).append(p)
    for (i, patches), own in zip(
        those.items(), rows.split([len(patches) for patches in those.values()])
    ):
        features[i][patches] = own


def drawn(share: float, patches: int) -> int:
    """Return k, how many patches of an image an inner iteration draws: a share of them, rounded up, or their number."""
    wanted = (
        math.ceil(share * patches - 1e-9) if share <= 1 else int(share)
    )  # a product such as 0.07 * 100 is a little above 7
    return max(1, min(patches, wanted))
