"""The network that a config trains: in layers that can be cut, or for PatchGD one of patches."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable

import torch
from torch import nn

from distseg import rng
from distseg.config import Config, PatchgdConfig
from distseg.models.capture import as_network
from distseg.models.network import check_size, of_image
from distseg.models.patch_unet import PatchUNet
from distseg.models.patches import ConvHead, PatchNetwork, TransformerHead
from distseg.models.weights import materialise
from distseg.models.zoo import outline_model, plain_model


def network_of(config: Config, bands: int | None, outputs: int | None) -> nn.Module:
    """The network that a config trains.

    Raises:
        ValueError: what :func:`distseg.models.zoo.plain_model` says; or a network that PatchGD can't train.
    """
    if config.train.method != "patchgd":
        return outline_model(config.model, bands, outputs)
    return patch_network(config, lambda count: plain_model(replace(config.model, out_channels=None), bands, count), outputs)


def patch_network(config: Config, made: Callable[[int], nn.Module], outputs: int) -> PatchNetwork:
    """A network of patches, and the head that ``patchgd`` says, whose weights follow from ``model.seed``.

    Args:
        made: makes the backbone with so many outputs: features of a patch, or classes of its pixels.
    """
    settings, backbone = config.patchgd, as_network(made(config.patchgd.features))
    by_pixels = not of_image(backbone, settings.patch)
    if by_pixels:
        _check_unread(settings)
        backbone = made(outputs)
        materialise(backbone, config.model.seed)
    elif config.model.out_channels not in (None, settings.features):
        raise ValueError(f"model.out_channels is {config.model.out_channels}, but the backbone makes patchgd.features, {settings.features}, of a patch: leave model.out_channels out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(config.model.seed, "head") & (2**63 - 1))
        if by_pixels:
            return PatchUNet(backbone, settings.patch, settings.step, outputs, settings.head_channels)
        if settings.head == "transformer":
            head = TransformerHead(settings.features, settings.head_channels, outputs)
        else:
            head = ConvHead(settings.features, settings.head_channels, outputs, len(settings.patch), settings.head == "cnn-max")
    network = PatchNetwork(backbone, head, settings.patch, settings.step, outputs)
    check_size(network.backbone, settings.patch, "a patch (patchgd.patch)")
    return network


def _check_unread(settings: PatchgdConfig) -> None:
    for field, what in {"features": "Z is the coarse features of the U-Net", "head": "the head of a U-Net is two convolutions"}.items():
        if getattr(settings, field) != getattr(PatchgdConfig(), field):
            raise ValueError(f"patchgd.{field} is {getattr(settings, field)}, but {what}: leave patchgd.{field} out")
