"""Compute a U-Net of patches without gradients, to fill Z and to predict class maps.

Z are the coarse features of all patches of an image. Class maps of whole images are predicted patch
by patch. The network is :class:`distseg.training.patchgd.unet.PatchUNet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from distseg.comm.collective import Alone
from distseg.comm.staging import upload
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.layers.context import Context
from distseg.layers.dropout import DROPOUTS, KeyedDropout, begin_pass
from distseg.models.layers import skip_store
from distseg.tiling.tile import Box, BoxGrid
from distseg.training.patchgd.filling import Filler, SingleImage, place_of
from distseg.training.patchgd.network import check_patches
from distseg.training.patchgd.unet import PatchUNet


class MapFiller(Filler):
    """U-Net that is applied to patches, on a device; it computes features and logits of patches.

    Args:
        network: the U-Net of patches. It is changed in place: its dropouts are replaced by dropouts
            whose masks follow from random keys.
        context, device, precision, channels_last, at_once: see :class:`Filler`.
    """

    def __init__(
        self,
        network: PatchUNet,
        context: Context,
        device: torch.device,
        precision: str,
        channels_last: bool,
        at_once: int,
    ):
        self.context = context
        context.whole = True
        for part in (network.encoder, network.decoder):
            for name, layer in part.named_children():
                if isinstance(layer, DROPOUTS):
                    setattr(
                        part, name, KeyedDropout(layer, context, (1,) * len(network.patch), name)
                    )
        self._place(network, device, precision, channels_last, at_once)

    @cached_property
    def drops(self) -> bool:
        """True if the U-Net has dropout, so that patches need random keys for the masks."""
        return any(isinstance(layer, KeyedDropout) for layer in self.network.modules())

    def encode(self, x: Tensor, samples: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the encoder on patches, and return its result and the feature maps of all skips.

        Args:
            x: the patches, (n, C, *patch).
            samples: for each patch, the random key of its dropout masks, in the encoder and in the
                following :meth:`decode`.

        Returns:
            The coarse features (n, s, *cells), where ``cells`` is the size of the coarsest feature
            map of a patch, and the feature map of each skip by the skip's name.
        """
        self.context.places, self.context.current = (
            [place_of(x.shape[2:], range(len(x)), samples)],
            0,
        )
        begin_pass(self.network.modules())
        with self.autocast(), skip_store({}) as skips:
            z = self.network.encoder(upload(x, self.device, self.dtype, self.channels_last))
        return z, skips

    def decode(self, z: Tensor, correction: Tensor, skips: dict[str, Tensor]) -> Tensor:
        """Run the decoder, and return the logits of the patches, (n, K, *patch).

        The patches must be those of the last call of :meth:`encode`.

        Args:
            z: the coarse features that :meth:`encode` returned.
            correction: the head's output for these patches, (n, s, *cells). It is added to ``z``.
            skips: the skips that :meth:`encode` returned.
        """
        with self.autocast(), skip_store(dict(skips)):
            return self.network.decoder(z + correction.to(z.dtype))

    def features(self, x: Tensor, samples: Sequence[int]) -> Tensor:
        return self.encode(x, samples)[0].flatten(1)

    def correction(self, features: Tensor, size: Sequence[int]) -> Tensor:
        """Apply the head to an image's features; return its output per patch, (patches, s, *cells).

        The output is to be added to the coarse features of the patch, of size ``cells``.

        Args:
            features: the coarse features of all patches, (patches, s * cells).
            size: the size of the image in pixels.
        """
        return self.network.correction(features[None].to(self.dtype), size)[0]

    def commit_statistics(self, unbiased: bool = False) -> None:
        """Do nothing, because a U-Net of patches has no running statistics."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        training = self.network.training
        self.network.eval()
        try:
            yield
        finally:
            self.network.train(training)


class MapPredictor(Predictor):
    """Prediction of label maps of whole images by a U-Net that is applied patch by patch.

    For each image of which a rank predicts at least one tile, the rank first computes Z: the coarse
    features of all patches of the image (Gupta et al. 2023).

    Args:
        filler: the U-Net on a device; it also computes Z.
        replicas: the communicator of the ranks among which the tiles are divided.
    """

    def __init__(self, filler: MapFiller, replicas):
        super().__init__(
            filler.network,
            replicas,
            [filler.device],
            filler.autocast,
            filler.network.patch,
            outputs=filler.network.outputs,
        )
        self.filler = filler

    _dealt_singly = True

    def check(self, size) -> None:
        check_patches(size, self.filler.network.patch)

    def tiles_of(self, size) -> BoxGrid:
        return self.filler.network.own(size)

    def __call__(
        self, source: ImageSource, numbers: Sequence[int] | None = None
    ) -> Iterator[tuple[Box, np.ndarray]]:
        mine = self.deal(source.size, numbers)[self.replicas.rank]
        with self.filler.evaluating():
            correction = self._told(source) if mine else None
            for number in mine:
                yield self._tile(source, number, correction[number])

    @torch.no_grad()
    def _told(self, source: ImageSource) -> Tensor:
        return self.filler.correction(self.filler(SingleImage(source), Alone())[0], source.size)

    @torch.no_grad()
    def _tile(self, source: ImageSource, number: int, correction: Tensor) -> tuple[Box, np.ndarray]:
        network = self.filler.network
        box, own = network.patches(source.size)[number], network.own(source.size)[number]
        z, skips = self.filler.encode(torch.from_numpy(source.read(box))[None], [0])
        y = self.filler.decode(z, correction[None], skips)[0]
        return own, y[(..., *own.relative_to(box).slices)].to(
            torch.promote_types(y.dtype, torch.float32)
        ).cpu().numpy()
