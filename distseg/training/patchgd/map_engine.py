"""Patch gradient descent for labels of pixels: train a U-Net of patches.

The network is :class:`distseg.training.patchgd.unet.PatchUNet`. The head's output for a patch
depends on all patches, so the backward pass of an inner iteration has four parts::

    skips, z = encoder(patch), Z[patch] <- z         each rank its patches, all of Z on all ranks
    correction = head(Z)                                   the same on all ranks
    loss(decoder(skips, z + correction[patch]))            each rank its patches
    backward pass of the decoder, to skips, z and correction
    dL/dcorrection summed over the tile group
    backward pass of the head, to Z
    backward pass of the encoder

With ``patchgd.y_filling`` the loss is computed from y, the output for all pixels of the images. As
with Z, y is first filled without gradients. The drawn patches then replace their part of y. A loss
is a function of sums over pixels (:mod:`distseg.layers.loss`), so only the sums of each patch of y
are stored. Each pixel is counted only in the patch that owns it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distseg.comm.collective import add
from distseg.layers.context import Context
from distseg.training.patchgd.engine import PatchEngine, Patches, put
from distseg.training.patchgd.filling import shared
from distseg.training.patchgd.filling_maps import MapFiller, MapPredictor


class MapEngine(PatchEngine):
    """Trainer of a U-Net that is applied to patches, by PatchGD (Gupta et al. 2023).

    The images have labels of pixels. The arguments are those of :class:`PatchEngine`.
    """

    _answers: list[Tensor] | None = None

    def _filler(self, context: Context) -> MapFiller:
        return MapFiller(
            self.network,
            context,
            self.device,
            self.precision,
            self.channels_last,
            self.config.patchgd.at_once,
        )

    def fill(self, images: Patches) -> list[Tensor]:
        """Compute and return Z, the coarse features of all patches, like :meth:`PatchEngine.fill`.

        With ``patchgd.y_filling``, the network's output for all pixels of the images is computed
        too, and the partial sums of the loss of each patch are stored.
        """
        features = super().fill(images)
        self._answers = self._filled(images, features) if self.config.patchgd.y_filling else None
        return features

    @torch.no_grad()
    def _filled(self, images: Patches, features: list[Tensor]) -> list[Tensor]:
        """Apply the U-Net to all patches; return the loss's partial sums of each, (patches, sums).

        The result has one tensor for each image.

        All ranks of a tile group must call it together, and get the same result.

        Args:
            images: the images of this sample group.
            features: Z, the coarse features of all patches, for each image (patches, s * cells).
        """
        found = [torch.zeros(len(rows), self.loss.sums, dtype=torch.float64) for rows in features]
        correction = [
            self.filler.correction(rows, size) for rows, size in zip(features, images.sizes)
        ]
        for j in range(max(map(self._rounds, images.sizes))):
            pairs = self._draw(images, "fill", j)
            with self._masks("answers", j):
                z, skips = self.filler.encode(self._read(images, pairs), self._keys(images, pairs))
                logits = self.filler.decode(
                    z, torch.stack([correction[i][p] for i, p in self._mine(pairs)]), skips
                )
            rows = self._sums(self.loss.rows(logits, self._labels(images, pairs)), pairs)
            first = self._first(images, pairs, j)
            put(found, [pairs[n] for n in first], rows[first])
        return found

    def _sums(self, found: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        """Return the partial sums of the loss for patches on every rank, (pairs, sums).

        Args:
            found: the partial sums of the patches that this rank computed.
            pairs: the patches that all ranks of the tile group computed together, as (index of the
                image, index of the patch).
        """
        return shared(
            found.detach().double().cpu(), len(pairs), self.mesh.tiles, torch.device("cpu")
        )

    def _labels(self, images: Patches, pairs: list[tuple[int, int]]) -> Tensor:
        """Return the labels of the n patches that this rank computes, (n, *patch).

        With ``patchgd.y_filling``, pixels that another patch owns get ``loss.ignore_index``, so
        that each pixel counts once.

        Args:
            images: the images of this sample group.
            pairs: the patches that all ranks of the tile group compute together, as (index of the
                image, index of the patch). This rank computes its share of them.
        """
        found = []
        for i, p in self._mine(pairs):
            box = self.network.patches(images.sizes[i])[p]
            labels = images.read_labels(i, box)
            if self.config.patchgd.y_filling:
                own, whole = self.network.own(images.sizes[i])[p].relative_to(box).slices, labels
                labels = torch.full_like(whole, self.config.loss.ignore_index)
                labels[own] = whole[own]
            found.append(labels)
        return torch.stack(found).to(self.device)

    def _sums_of_undrawn(self, pairs: list[tuple[int, int]]) -> Tensor | None:
        """Return for each image the loss's partial sums over the patches that are not drawn.

        Args:
            pairs: the patches that are drawn, as (index of the image, index of the patch).

        Returns:
            (images, sums) on the first rank of the tile group; None on the other ranks, so that
            the sums are counted once. None on all ranks without ``patchgd.y_filling``.
        """
        if self._answers is None or self.mesh.tiles.rank:
            return None
        return torch.stack(
            [
                rows.sum(0) - rows[[p for at, p in pairs if at == i]].sum(0)
                for i, rows in enumerate(self._answers)
            ]
        )

    def backward(self, images: Patches, features: list[Tensor], j: int) -> float:
        """Add this rank's part of the gradient of inner iteration ``j`` to each weight's ``grad``.

        An inner iteration draws a few patches of each image and computes their features anew, with
        gradients. All ranks must call the method together.

        Args:
            images: the images of this sample group.
            features: Z, the coarse features of all patches: for each image a tensor
                (patches, s * cells), with s channels at each of ``cells`` positions of a patch. The
                new features of the drawn patches are written into it.
            j: the index of the inner iteration, from 0.

        Returns:
            The loss of the iteration, over all sample groups.
        """
        pairs = self._draw(images, "patches", j)
        mine = self._mine(pairs)
        with self._masks("patches", j):
            z, skips = self.filler.encode(self._read(images, pairs), self._keys(images, pairs))
            put(features, pairs, self._shared(z.flatten(1), pairs))
            ahead = [z, *skips.values()]
            leaves = [x.detach().requires_grad_() for x in ahead]
            block = [rows.detach().requires_grad_() for rows in features]
            correction = [
                self.filler.correction(rows, size) for rows, size in zip(block, images.sizes)
            ]
            given = [x.detach().requires_grad_() for x in correction]
            logits = self.filler.decode(
                leaves[0], torch.stack([given[i][p] for i, p in mine]), dict(zip(skips, leaves[1:]))
            )
        rows = self.loss.rows(logits, self._labels(images, pairs))
        loss = self._loss_and_backward(
            images, [i for i, _ in mine], rows, constant_sums=self._sums_of_undrawn(pairs)
        )
        if self._answers is not None:
            put(self._answers, pairs, self._sums(rows, pairs))
        of_correction = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
        total = add(torch.cat([g.flatten() for g in of_correction]), self.mesh.tiles).split(
            [g.numel() for g in of_correction]
        )
        torch.autograd.backward(correction, [g.view_as(x) for g, x in zip(total, correction)])
        back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        back[0] = back[0] + torch.stack([block[i].grad[p] for i, p in mine]).view_as(z).to(z.dtype)
        torch.autograd.backward(ahead, back)
        return loss

    def predictor(self) -> MapPredictor:
        return MapPredictor(self.filler, self.mesh.replicas)
