"""Patch gradient descent for labels of pixels: a U-Net of patches (:mod:`distseg.models.patch_unet`).

An inner iteration, of the loss of the pixels of the patches that are drawn, goes back in four parts, as what a patch is told comes from all of them::

    skips, z = encoder(patch), Z[those] <- z         each rank its patches, all of Z on all ranks
    told = head(Z)                                   on all ranks alike
    loss(decoder(skips, z + told[patch]))            each rank its patches
    back through the decoder, to skips, z and told; dL/dtold summed over the tile group; back through the head, to Z; back through the encoder
"""

from __future__ import annotations

import torch
from torch import Tensor

from distseg.comm.collective import add
from distseg.infer.patch_maps import MapFiller, MapPredictor
from distseg.spatial.context import Context
from distseg.train.patchgd import PatchEngine, Patches, put


class MapEngine(PatchEngine):
    """A U-Net of patches ready to train by PatchGD."""

    def _filler(self, context: Context) -> MapFiller:
        return MapFiller(self.network, context, self.device, self.precision, self.channels_last, self.config.patchgd.at_once)

    def backward(self, images: Patches, features: list[Tensor], j: int) -> float:
        pairs = self._draw(images, "patches", j)
        mine, boxes = self._mine(pairs), [self.network.patches(size) for size in images.sizes]
        with self._masks("patches", j):
            z, skips = self.filler.encode(self._read(images, pairs), self._keys(images, pairs))
            put(features, pairs, self._shared(z.flatten(1), pairs))
            ahead = [z, *skips.values()]
            leaves = [x.detach().requires_grad_() for x in ahead]
            block = [rows.detach().requires_grad_() for rows in features]
            told = [self.filler.told(rows, size) for rows, size in zip(block, images.sizes)]
            given = [x.detach().requires_grad_() for x in told]
            logits = self.filler.decode(leaves[0], torch.stack([given[i][p] for i, p in mine]), dict(zip(skips, leaves[1:])))
        labels = torch.stack([images.read_labels(i, boxes[i][p]) for i, p in mine]).to(self.device)
        loss = self._settled(images, [i for i, _ in mine], self.loss.rows(logits, labels))
        of_told = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
        total = add(torch.cat([g.flatten() for g in of_told]), self.mesh.tiles).split([g.numel() for g in of_told])
        torch.autograd.backward(told, [g.view_as(x) for g, x in zip(total, told)])
        back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        back[0] = back[0] + torch.stack([block[i].grad[p] for i, p in mine]).view_as(z).to(z.dtype)
        torch.autograd.backward(ahead, back)
        return loss

    def predictor(self) -> MapPredictor:
        return MapPredictor(self.filler, self.mesh.replicas)
