"""U-Net for labels of pixels that PatchGD trains on patches.

A head reads the coarse features of all patches and adds global context to each patch. In the
symbols of :mod:`distseg.training.patchgd.network`::

    theta_1  the U-Net: its encoder computes s coarse features from a
             patch, its decoder computes the logits                        .encoder, .decoder
    Z        the coarse features of all patches, side by side,
             an s x (m * cells) x (n * cells) block                        .block
    theta_2  the head: Z -> the features that are added to the coarse
             features of each patch                                        .head
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distseg.models.bands import bands_of, record_like
from distseg.models.layers import Pop, Stash, outline, skip_store
from distseg.models.network import flat_layers, is_flat
from distseg.tiling.tile import BoxGrid
from distseg.training.patchgd.network import PatchNetwork, starts_of

_UP = (nn.Upsample, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class PatchUNet(PatchNetwork):
    """Network (N, C, *size) -> (N, K, *size) that applies a U-Net to the patches of an image.

    Between encoder and decoder, a head reads the coarse features of all patches, and adds its
    output to the features of each patch.

    Args:
        unet: a U-Net (N, C, *patch) -> (N, K, *patch), whose forward is a list of layer calls. All
            its skips must start in the encoder and end in the decoder (:func:`halves`).
        patch: the size of a patch in pixels.
        step: the number of pixels from the start of one patch to the start of the next, along each
            dim; None for ``patch``.
        outputs: K, the number of outputs for each pixel; only stored as an attribute.
        channels: the width of the head.

    Raises:
        ValueError: ``unet`` does not have this form, or it has batch norm.
    """

    of_image = False

    def __init__(
        self,
        unet: nn.Module,
        patch: Sequence[int],
        step: Sequence[int] | None = None,
        outputs: int | None = None,
        channels: int = 64,
    ):
        nn.Module.__init__(self)
        self.patch, self.step, self.outputs = tuple(patch), tuple(step or patch), outputs
        parts = dict(zip(("encoder", "decoder"), halves(unet)))
        self.encoder, self.decoder = (
            nn.Sequential(OrderedDict((_flat(name), layer) for name, layer in part))
            for part in parts.values()
        )
        self.names = {
            f"{part}.{_flat(name)}.{own}": f"{name}.{own}"
            for part, layers in parts.items()
            for name, layer in layers
            for own in layer.state_dict()
        }
        record_like(self, unet)
        with torch.no_grad(), skip_store({}):
            image = torch.empty(
                1, bands_of(unet), *patch, device="meta", dtype=next(unet.parameters()).dtype
            )
            _, features, *cells = outline(self.encoder)(image).shape
        self.features, self.cells = features, tuple(cells)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(self.patch) - 1]
        self.head = nn.Sequential(
            conv(features, channels, 3, padding=1, bias=False),
            nn.GroupNorm(1, channels),
            nn.LeakyReLU(0.1),
            conv(channels, features, 3, padding=1),
        )

    @property
    def begun(self) -> nn.Module:
        return self

    def own(self, size: Sequence[int]) -> BoxGrid:
        """Return for each patch the box of the image whose output is taken from this patch.

        Patches may overlap, but these boxes do not, and together they cover the image. Along each
        dim, the box reaches from the start of the patch to the start of the next patch. The box of
        the last patch reaches to the end of the image.
        """
        spans = []
        for starts, n in zip(starts_of(size, self.patch, self.step), size):
            spans.append(list(zip(starts, [*starts[1:], n])))
        return BoxGrid(spans)

    def block(self, features: Tensor, size: Sequence[int]) -> Tensor:
        """Arrange the coarse features of all patches side by side: (N, s, *(grid * cells)).

        ``grid`` is the number of patches along each dim, and ``cells`` is the size of a patch's
        coarse feature map.

        Args:
            features: the coarse features of all patches, (N, patches, s * cells).
            size: the size of the images in pixels.
        """
        grid, dims = self.grid(size), len(self.cells)
        z = features.view(len(features), *grid, self.features, *self.cells)
        order = [0, dims + 1, *(n for d in range(dims) for n in (1 + d, dims + 2 + d))]
        return z.permute(order).reshape(
            len(features), self.features, *(g * c for g, c in zip(grid, self.cells))
        )

    def correction(self, features: Tensor, size: Sequence[int]) -> Tensor:
        """Apply the head to all patches; return its output for each, (N, patches, s, *cells).

        It is to be added to the coarse features of the patch. ``cells`` is the size of a patch's
        coarse feature map, and s its number of channels.

        Args:
            features: the coarse features of all patches, (N, patches, s * cells).
            size: the size of the images in pixels.
        """
        grid, dims = self.grid(size), len(self.cells)
        y = self.head(self.block(features, size)).view(
            len(features), self.features, *(n for pair in zip(grid, self.cells) for n in pair)
        )
        order = [0, *(2 + 2 * d for d in range(dims)), 1, *(3 + 2 * d for d in range(dims))]
        return y.permute(order).reshape(len(features), math.prod(grid), self.features, *self.cells)

    def forward(self, x: Tensor) -> Tensor:
        size, features, stores = tuple(x.shape[2:]), [], []
        for box in self.patches(size):
            with skip_store({}) as store:
                features.append(self.encoder(x[(..., *box.slices)]))
            stores.append(store)
        correction = self.correction(torch.stack([z.flatten(1) for z in features], 1), size)
        made: Tensor | None = None
        for p, (box, own) in enumerate(zip(self.patches(size), self.own(size))):
            with skip_store(dict(stores[p])):
                y = self.decoder(features[p] + correction[:, p])
            made = y.new_zeros(len(x), y.shape[1], *size) if made is None else made
            made[(..., *own.slices)] = y[(..., *own.relative_to(box).slices)]
        return made


def _flat(name: str) -> str:
    return name.replace(".", "_")


def halves(unet: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """Split a U-Net; return (name, layer) of all encoder layers, and of all decoder layers.

    The decoder begins with the first upsampling after the start of the last skip. The last layer of
    the encoder thus has the coarsest features.

    Raises:
        ValueError: the network is not a list of layer calls, has no such upsampling, has a skip
            that ends in the encoder, or has batch norm.
    """
    layers = flat_layers(unet) if is_flat(unet) else []
    kinds = [type(layer) for _, layer in layers]
    last = max((n for n, kind in enumerate(kinds) if kind is Stash), default=None)
    cut = next(
        (
            n
            for n, kind in enumerate(kinds)
            if last is not None and n > last and issubclass(kind, _UP)
        ),
        None,
    )
    if cut is None or any(kind is Pop for kind in kinds[:cut]):
        raise ValueError(
            "PatchGD cannot train this network: set model.name to a network that turns a patch "
            "into a vector, such as distseg.models.classifier:residual, or, for labels of pixels, "
            "to a U-Net that is a list of layer calls, such as unet"
        )
    if any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds):
        raise ValueError(
            "this U-Net has batch norm, but PatchGD for labels of pixels computes each patch "
            "separately: set model.norm to instance, group or none"
        )
    return layers[:cut], layers[cut:]
