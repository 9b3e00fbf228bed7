"""Patch gradient descent (PatchGD): train on large images with a few patches of each at a time.

The method is that of Gupta et al. (2023); :mod:`distseg.training.patchgd.network` has its network.
A step on B images, in the symbols of that publication::

    Z <- theta_1 of all patches, k of each image at a time         filling, without gradients
    for j = 1 .. zeta:                                             patchgd.inner
        draw k patches of each image                               patchgd.sampled
        Z[drawn patches] <- theta_1 of these patches               with gradients
        L = loss of theta_2(Z); add dL/dtheta to the sum
        every epsilon-th j: theta <- theta - alpha (sum / epsilon) patchgd.accumulate

Patches are drawn without replacement until every patch of an image was drawn once, as in the
authors' program. Batch norms take the statistics of the patches that are computed together, also
while Z is filled.

The ranks of a *tile group* (the ranks that share images) divide the patches of these images among
themselves. Each rank holds all of Z and computes the head. Only one rank's gradient of the head's
weights is used. All ranks then have dL/dZ. The rank that computed a patch runs the backward pass of
the backbone with the patch's part of dL/dZ.

Words of this module: a *pair* is (index of an image in the sample group, index of a patch in the
image). A *draw* is the choice of k patches of each image, for an inner iteration or for a *round*
of filling. The *rounds* of an image are the draws after which each of its patches was drawn.

The draws are keyed by seed, epoch, image and j, so they do not depend on the number of ranks.
PatchGD approximates the gradient; streamed tiles give the exact one.
benchmarks/performance.md compares both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from distseg.comm.collective import Alone, add
from distseg.comm.launch import raise_jointly
from distseg.comm.mesh import Mesh
from distseg.config.patchgd import PatchConfig, PatchgdConfig
from distseg.config.settings import DataBase
from distseg.config.sizes import Size
from distseg.data.prefetch import prefetch
from distseg.data.sample_reader import label_bytes, pixel_bytes, read_labels, read_patches
from distseg.data.sampler import Rows, Sample, crop_size, epoch_samples
from distseg.data.store.store import Store
from distseg.layers.context import Context
from distseg.layers.loss import Loss
from distseg.models.dense_weights import own_memory
from distseg.runtime.optimizer import freeze
from distseg.runtime.parameter_update import ParameterUpdate
from distseg.tiling import rng
from distseg.tiling.tile import Box
from distseg.training.patchgd.filling import Filler, PatchPredictor, by_image, read_boxes, shared
from distseg.training.patchgd.network import PatchNetwork, check_patches, patches_of

# Images stay in memory for a step if they have at most 8 times the pixels of the patches that
# are computed together: the feature maps of these patches need more memory than that.
_HELD = 8


@dataclass(frozen=True)
class Patches:
    """Images of one batch of PatchGD and one sample group, which are read patch by patch.

    Args:
        store: the store that holds the images.
        samples: the images of this sample group, or crops of images.
        note: function that is called at each read with the number of bytes that are read.
        step: the samples of this batch in all sample groups.
    """

    store: Store
    samples: Sequence[Sample]
    note: Callable[[int], None]
    step: Sequence[Sample]

    @cached_property
    def numbers(self) -> list[int]:
        """Index of each image among the samples of the epoch, as a list."""
        return [sample.number for sample in self.samples]

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """Size of each image in pixels, as a list."""
        return [tuple(sample.size) for sample in self.samples]

    @cached_property
    def labels(self) -> Tensor:
        """Class number of each image, (images,); only for labels of whole images."""
        return torch.tensor([self.store.label(sample.image) for sample in self.samples])

    @cached_property
    def _held(self) -> list[Tensor]:
        return []

    def hold(self) -> None:
        """Read whole images into memory, unless they are there already.

        Patches are then cut out of the images in memory.
        """
        if not self._held:
            self._held.extend(
                [self.read(i, [Box.whole(size)])[0] for i, size in enumerate(self.sizes)]
            )

    def read(self, image: int, boxes: list[Box]) -> Tensor:
        """Return the pixels of patches of one image, (boxes, C, *size).

        Args:
            image: the index of the image in ``samples``.
            boxes: the boxes of the patches, all of the same size.
        """
        if self._held:
            return torch.stack([self._held[image][(..., *box.slices)] for box in boxes])
        sample = self.samples[image]
        self.note(sum(pixel_bytes(self.store, sample, box) for box in boxes))
        return torch.from_numpy(read_patches(self.store, sample, boxes))

    @cached_property
    def _orders(self) -> dict[int, tuple[int, np.ndarray]]:
        return {}

    def order(self, image: int, key: int, count: int) -> np.ndarray:
        """Return a random permutation of the indices of an image's patches, (count,).

        The last permutation of each image is cached, because several iterations use parts of it.

        Args:
            image: the index of the image in ``samples``.
            key: the random key that determines the permutation.
            count: the number of patches of the image.
        """
        known, order = self._orders.get(image, (None, None))
        if known != key:
            order = rng.permutation(key, count)
            self._orders[image] = key, order
        return order

    def read_labels(self, image: int, box: Box) -> Tensor:
        """Return the labels of a box of an image, (*box.size) uint8.

        Args:
            image: the index of the image in ``samples``.
            box: the box, in the coordinates of the sample.
        """
        self.note(label_bytes(self.store, self.samples[image], box))
        return read_labels(self.store, [self.samples[image]], box)[0]


class PatchLoader:
    """Loader of the batches of images that PatchGD trains on, for one sample group.

    It has the interface of :class:`distseg.data.loader.StepLoader`, but yields images whose pixels
    are not read yet. The rank that computes a patch reads the patch.

    Args:
        store: the store.
        data: the settings of the data, such as images per step, crops and augmentation.
        seed: the seed of the order of images, crops and augmentation.
        mesh: the mesh of ranks.
    """

    def __init__(self, store: Store, data: DataBase, seed: int, mesh: Mesh):
        self.store, self.data, self.seed, self.mesh = store, data, seed, mesh
        self.bytes_read = self.steps_read = 0
        self.steps_per_epoch = len(self._samples(0))

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Patches]:
        """Yield the batches of images of epoch ``number``, beginning with index ``first_step``."""
        steps, images = self._samples(number), self.data.images
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
        batch = self.mesh.shape.samples * self.data.images
        return epoch_samples(self.store, "train", self.data, self.seed, epoch, batch)


class PatchEngine(ParameterUpdate):
    """Trainer of a network that sees an image as patches (PatchGD, Gupta et al. 2023).

    Args:
        config: the settings of the run.
        mesh: the mesh of ranks.
        network: the network of patches. It is changed in place.
        device: the device to compute on.
        precision: fp32, bf16 (autocast) or fp64.
        channels_last: True for the channels_last memory format.
    """

    partition = None

    def __init__(
        self,
        config: PatchConfig,
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
            step = config.patchgd.norm_scope == "step"
            # Norms over all sample groups must not be summed over the groups once more.
            groups = Alone() if step else mesh.groups
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
        halved = config.approximate.gradients == "fp16"
        super().__init__(mesh, config.optim, config.mesh.reducer, halved, network, device)

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
        """Return log lines that describe training on images of this size."""
        settings, patches, inner = (
            self.config.patchgd,
            len(self.network.patches(size)),
            self.config.patchgd.inner or self._rounds(size),
        )
        return [
            f"PatchGD: {patches} patches of {settings.patch} pixels per image of "
            f"{'x'.join(map(str, size))}, {inner} inner iterations of "
            f"{drawn(settings.sampled, patches)} patches, an update after "
            f"{min(settings.accumulate or inner, inner)} iterations; gradients are approximate"
        ]

    def step(self, images: Patches, rate: float) -> tuple[float, float]:
        """Train on a batch of images: fill Z, then run the inner iterations and their updates.

        Z are the features of all patches. The weights are updated after every
        ``patchgd.accumulate`` inner iterations. All ranks must call it together.

        Args:
            images: the images of this sample group.
            rate: the learning rate.

        Returns:
            The mean loss of the inner iterations, and the mean norm of the updates' gradients
            before clipping.
        """
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
        """Compute Z: for each image the features of all its patches, (patches, s).

        All ranks must call it together. All ranks of a tile group, which share images, get the same
        result. The patches are computed in rounds, a few of each image at a time. An image that
        needs fewer rounds than other images is computed again in the remaining rounds, because
        norms share statistics between images. Its part of Z keeps the first values.
        """
        counts = [len(self.network.patches(size)) for size in images.sizes]
        # With the scope "step", norms communicate with all sample groups, so all sample groups must
        # run the same number of rounds.
        step = self.config.patchgd.norm_scope == "step"
        rounds = range(
            self._most_rounds(images)
            if step or self._at_once
            else max(map(self._rounds, images.sizes))
        )
        drawn, features = [self._draw(images, "fill", j) for j in rounds], None
        read = (self._read(images, pairs) for pairs in drawn)
        # If the images are in memory, cutting patches out of them takes less time than a transfer
        # from a prefetching thread.
        ahead = 0 if self._hold(images, drawn[0]) else 1
        # Unless statistics are updated in each pass, only the inner iterations update them.
        with self.context.repeating(not self._at_once):
            for j, pairs, x in zip(rounds, drawn, prefetch(read, ahead)):
                with self._masks("fill", j):
                    made = self.filler.features(x, self._keys(images, pairs))
                    self._update_statistics()
                    rows = self._shared(made, pairs)
                features = features or [rows.new_zeros(count, rows.shape[1]) for count in counts]
                first = self._first(images, pairs, j)
                put(features, [pairs[n] for n in first], rows[first])
        return features

    def _first(self, images: Patches, pairs: list[tuple[int, int]], j: int) -> list[int]:
        """Return the indices of the pairs whose features round ``j`` of :meth:`fill` puts into Z.

        Z are the features of all patches. If an image needs at most ``j`` rounds, earlier rounds
        computed all its patches, and its pairs are left out.

        Args:
            images: the images of this sample group.
            pairs: the patches of the round, as (index of the image, index of the patch).
            j: the index of the round, from 0.
        """
        turns = [self._rounds(size) for size in images.sizes]
        return [n for n, (i, _) in enumerate(pairs) if j < turns[i]]

    def backward(self, images: Patches, features: list[Tensor], j: int) -> float:
        """Add this rank's part of the gradient of inner iteration ``j`` to each weight's ``grad``.

        An inner iteration computes a few patches of each image anew, with gradients. All ranks must
        call it together.

        Args:
            images: the images of this sample group.
            features: Z, the features of all patches, for each image (patches, s). The new features
                of the drawn patches are written into it.
            j: the index of the inner iteration, from 0.

        Returns:
            The loss of the iteration, over all sample groups.
        """
        pairs = self._draw(images, "patches", j)
        with self._masks("patches", j):
            made = self.filler.features(self._read(images, pairs), self._keys(images, pairs))
        put(features, pairs, self._shared(made, pairs))
        block = [z.detach().requires_grad_() for z in features]
        with self._masks("head", j):
            loss = self._head(images, block)
        own = torch.cat([block[i].grad[those] for i, those in by_image(self._mine(pairs)).items()])
        made.backward(own.to(made.dtype))
        return loss

    @property
    def _at_once(self) -> bool:
        """True if forward passes update running statistics, False if updates of weights do."""
        return self.config.patchgd.statistics == "pass"

    def _update_statistics(self) -> None:
        """Update the norms' running statistics after a forward pass, if the settings ask for it.

        This is so with ``patchgd.statistics: pass``; otherwise the update of the weights does it.
        All sample groups must call it together.
        """
        if self._at_once:
            self.filler.commit_statistics(unbiased=True)

    def _drawn_of(self, patches: int) -> int:
        return drawn(self.config.patchgd.sampled, patches)

    def _rounds(self, size: Sequence[int]) -> int:
        """Return the number of draws after which every patch of an image has been drawn.

        A draw takes a few patches of the image. ``size`` is the size of the image in pixels.
        """
        count = len(self.network.patches(size))
        return math.ceil(count / self._drawn_of(count))

    def _most_rounds(self, images: Patches) -> int:
        """Return the largest number of rounds that an image of the batch needs.

        A round computes a few patches of each image (:meth:`fill`). The images of all sample groups
        count.
        """
        return max(self._rounds(sample.size) for sample in images.step)

    def _draw(self, images: Patches, what: str, j: int) -> list[tuple[int, int]]:
        """Return the patches of all images that draw ``j`` takes.

        A patch is a pair (index of the image, index of the patch in the image). The ranks that
        share the images compute these patches together. Each image has a random order of its
        patches. Each draw takes the next k patches of this order (:func:`drawn`). If fewer than k
        are left, the draw also repeats some patches. Then a new order begins.

        Args:
            images: the images of this sample group.
            what: part of the key of the order, ``fill`` or ``patches``, so that filling and inner
                iterations use different orders.
            j: the index of the draw: the index of the inner iteration, or of the round of filling.
        """
        found = []
        for i, (number, size) in enumerate(zip(images.numbers, images.sizes)):
            count = len(self.network.patches(size))
            share = self._drawn_of(count)
            turn, at = divmod(j, math.ceil(count / share))
            order = images.order(
                i, rng.key(self.config.train.seed, self.context.epoch, number, what, turn), count
            )
            start = min(at * share, count - share)  # the last draw may repeat some patches
            found += [(i, p) for p in sorted(order[start : start + share].tolist())]
        return found

    def _mine(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return pairs[self.mesh.tiles.rank :: self.mesh.tiles.size]

    def _read(self, images: Patches, pairs: list[tuple[int, int]]) -> Tensor:
        """Read and return the pixels of the patches that this rank computes, (patches, C, *patch).

        Args:
            images: the images of this sample group.
            pairs: the patches that all ranks of the tile group compute together, as (index of the
                image, index of the patch). This rank computes its share of them.
        """
        self._hold(images, pairs)
        mine = by_image(self._mine(pairs))
        boxes = {i: [self.network.patches(images.sizes[i])[p] for p in mine[i]] for i in mine}
        return read_boxes(images, boxes)

    def _hold(self, images: Patches, pairs: list[tuple[int, int]]) -> bool:
        """Read whole images if they have at most 8 times the pixels of this rank's patches.

        Otherwise each patch is read from the store by itself.

        Args:
            images: the images of this sample group.
            pairs: the patches that all ranks of the tile group compute together, as (index of the
                image, index of the patch). This rank computes its share of them.

        Returns:
            True if the images are in memory.
        """
        patch = self.network.patches(images.sizes[0])[0]
        computed = len(self._mine(pairs)) * patch.pixels
        if few := sum(map(math.prod, images.sizes)) <= _HELD * computed:
            images.hold()
        return few

    def _keys(self, images: Patches, pairs: list[tuple[int, int]]) -> list[int]:
        """Return for each patch that this rank computes the random key of its dropout masks.

        The keys are 0 if the network has no dropout. ``pairs`` are the patches that all ranks of
        the tile group compute together, as (index of the image, index of the patch).
        """
        if not self.filler.drops:
            return [0] * len(self._mine(pairs))
        return [rng.key(images.numbers[i], p) for i, p in self._mine(pairs)]

    @contextmanager
    def _masks(self, what: str, j: int) -> Iterator[None]:
        """Key dropout masks by the epoch, ``what`` and ``j`` during a ``with`` block.

        Args:
            what: a name of the forward pass, such as ``fill`` or ``head``.
            j: the index of the iteration or of the round.
        """
        epoch = self.context.epoch
        self.context.epoch = self.head_context.epoch = rng.key(epoch, what, j)
        try:
            yield
        finally:
            self.context.epoch = epoch

    def _shared(self, made: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        """Return the features of patches on every rank of the tile group, (pairs, s).

        Args:
            made: the features of the patches that this rank computed.
            pairs: the patches that all ranks computed together, as (index of the image, index of
                the patch).
        """
        return shared(made, len(pairs), self.mesh.tiles, self.device)

    def _head(self, images: Patches, block: list[Tensor]) -> float:
        """Run the head forward and backward, and return the loss over all sample groups.

        The gradient with respect to Z is added to the ``grad`` of the tensors in ``block``. Each
        image is counted on only one rank of the tile group.

        Args:
            images: the images of this sample group.
            block: Z, the features of all patches, for each image (patches, s).
        """
        logits = self.filler.logits(block, images.sizes, images.numbers)
        self._update_statistics()
        labels = images.labels.to(self.device)
        found = self.loss.rows(logits[..., None], labels[:, None])
        return self._loss_and_backward(
            images, list(range(len(block))), found, counts=self.mesh.tiles.rank == 0
        )

    def _loss_and_backward(
        self,
        images: Patches,
        image_of_row: list[int],
        partial_sums: Tensor,
        counts: bool = True,
        constant_sums: Tensor | None = None,
    ) -> float:
        """Compute the loss from partial sums of all ranks, run its backward pass, return the loss.

        All ranks must call this method together. The loss is a function of a table with the sums of
        each image; rows of the same image are added up.

        Args:
            images: the images of this sample group.
            image_of_row: for each row of ``partial_sums``, the index of its image.
            partial_sums: this rank's part of the sums, (n, sums), with an autograd graph. The
                backward pass begins here.
            counts: False if another rank has the same rows and adds them to the table. The backward
                pass runs all the same.
            constant_sums: for each image, sums that are added to the table but have no gradient,
                (images, sums); None to add nothing.
        """
        rows = Rows(self.mesh.shape.samples, self.mesh.sample, 1, len(images.numbers))
        at = torch.tensor([rows.row(0, i) for i in image_of_row])
        table = torch.zeros(rows.total, self.loss.sums, dtype=torch.float64)
        if counts:
            table.index_add_(0, at, partial_sums.detach().double().cpu())
        if constant_sums is not None:
            table.index_add_(
                0, torch.tensor([rows.row(0, i) for i in range(len(constant_sums))]), constant_sums
            )
        value, loss_grad = self.loss.loss_grad(add(table, self.mesh.replicas))
        partial_sums.backward(loss_grad[at].to(partial_sums))
        return value

    def _update(self, rate: float, iterations: int) -> float:
        """Update the weights by the mean gradient of the last ``iterations`` inner iterations.

        Returns:
            The norm of the gradient before clipping.
        """
        self.gradients.finish()
        if self.mesh.tiles.rank:  # only the first rank's gradient of the head is used
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
        """Return the pixels of this group's images, times the number of sample groups.

        This estimates the pixels of the images of all sample groups.
        """
        return self.mesh.shape.samples * sum(math.prod(size) for size in images.sizes)

    def watch_step(self, watch: Callable[[float], None]) -> None:
        """Do nothing, because PatchGD does not report the progress within a step."""

    def predictor(self) -> PatchPredictor:
        """Return a predictor that uses this engine's network."""
        return PatchPredictor(self.filler, self.mesh.replicas)


def check_images(store: Store, data: DataBase, settings: PatchgdConfig, tiles: Size) -> None:
    """Refuse a store with images on which PatchGD cannot train.

    Args:
        store: the store.
        data: the settings of the data.
        settings: the settings of PatchGD.
        tiles: the grid of ranks that share an image, ``mesh.tiles``.

    Raises:
        ValueError: an image has no labels, an image is smaller than a patch, or fewer patches are
            drawn than there are ranks to share them.
    """
    ranks = tiles.volume
    for name in store.split("train"):
        if not (store.has_labels(name) or store.of_images):
            raise ValueError(
                f"image {name!r} of the split 'train' of {store.path} has no labels: "
                "prepare the store with masks"
            )
        size = crop_size(store.size(name), data.crop)
        check_patches(size, settings.patch, f"image {name!r}")
        count = data.images * drawn(
            settings.sampled,
            len(
                patches_of(
                    tuple(size), tuple(settings.patch), tuple(settings.step or settings.patch)
                )
            ),
        )
        if count < ranks:
            raise ValueError(
                f"patchgd.sampled {settings.sampled} draws {count} patches of "
                f"{data.images} images such as {name!r}, but {ranks} ranks share them "
                f"(mesh.tiles {tiles}), and each needs at least one patch: raise "
                "patchgd.sampled, or use fewer ranks"
            )


def put(features: list[Tensor], pairs: list[tuple[int, int]], rows: Tensor) -> None:
    """Write rows of some patches, such as their features, into the tables of all patches.

    Args:
        features: for each image the table with one row per patch, (patches, s), which is changed.
        pairs: the patches to write, as (index of the image, index of the patch), sorted by image.
        rows: the new rows of these patches, (pairs, s).
    """
    those = by_image(pairs)
    for (i, patches), own in zip(those.items(), rows.split([*map(len, those.values())])):
        features[i][patches] = own


def drawn(share: float, patches: int) -> int:
    """Return how many patches of an image are drawn at a time.

    Args:
        share: the setting ``patchgd.sampled``. Up to 1 it is a fraction of ``patches``; the product
            is rounded up. A larger value is the number of patches itself.
        patches: the number of patches of the image, which is also the largest result.
    """
    # A product such as 0.07 * 100 is a little above 7 and must not be rounded up to 8.
    wanted = math.ceil(share * patches - 1e-9) if share <= 1 else int(share)
    return max(1, min(patches, wanted))
