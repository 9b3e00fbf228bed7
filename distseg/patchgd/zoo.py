"""The network that a config trains: in layers that can be cut, or for PatchGD one of patches."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

from torch import nn

from distseg.config.settings import Config, PatchgdConfig
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.network import check_size, of_image, refusals
from distseg.models.passes import seeded
from distseg.models.weights import materialise
from distseg.models.zoo import outline_model, plain_model
from distseg.patchgd.heads import check_head, make_head, of_one_grid
from distseg.patchgd.network import PatchNetwork, starts_of
from distseg.patchgd.unet import PatchUNet
from distseg.tiling import rng


def network_of(config: Config, bands: int | None, outputs: int | None) -> nn.Module:
    """The network that a config trains.

    Raises:
        ValueError: what :func:`distseg.models.zoo.plain_model` says; or a network that PatchGD can't train.
    """
    if config.train.method != "patchgd":
        return outline_model(config.model, bands, outputs)
    return patch_network(
        config,
        lambda count: plain_model(replace(config.model, out_channels=None), bands, count),
        outputs,
    )


def patch_network(
    config: Config, made: Callable[[int], nn.Module], outputs: int, head: nn.Module | None = None
) -> PatchNetwork:
    """A network of patches, and the head that ``patchgd`` says, whose weights follow from ``model.seed``.

    Args:
        made: makes the backbone with so many outputs: features of a patch, or classes of its pixels.
        head: takes the place of the one that ``patchgd.head`` names.

    Raises:
        ValueError: a network, or a head, that PatchGD can't train.
    """
    settings, backbone = config.patchgd, as_network(made(config.patchgd.features))
    by_pixels = not of_image(backbone, settings.patch)
    if by_pixels:
        _check_unread(settings)
        backbone = made(outputs)
        materialise(backbone, config.model.seed)
    elif settings.y_filling:
        raise ValueError(
            "patchgd.y_filling is true, but the network makes a vector of a patch, and y is a map of labels: leave patchgd.y_filling out"
        )
    elif config.model.out_channels not in (None, settings.features):
        raise ValueError(
            f"model.out_channels is {config.model.out_channels}, but the backbone makes patchgd.features, {settings.features}, of a patch: leave model.out_channels out"
        )
    with seeded(rng.key(config.model.seed, "head") & (2**63 - 1)):
        if by_pixels:
            return PatchUNet(
                backbone,
                settings.patch,
                settings.step,
                outputs,
                settings.head_channels or _UNET_WIDTH,
            )
        made_for = settings.grid if head is None and of_one_grid(settings.head) else None
        head = head or make_head(
            settings.head,
            settings.features,
            settings.head_channels,
            outputs,
            settings.grid or (1,) * len(settings.patch),
        )
    network = PatchNetwork(backbone, head, settings.patch, settings.step, outputs, made_for)
    check_size(network.backbone, settings.patch, "a patch (patchgd.patch)")
    return network


_UNET_WIDTH = 64
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)


def with_grid(config: Config, size: Sequence[int]) -> Config:
    """Return the config with the grid of patches of a training image of this size, where the head is made for one grid and none is given."""
    settings = config.patchgd
    if (
        config.train.method != "patchgd"
        or not of_one_grid(settings.head)
        or settings.grid is not None
        or len(size) != len(settings.patch)
    ):
        return config
    grid = tuple(map(len, starts_of(size, settings.patch, settings.step or settings.patch)))
    return replace(config, patchgd=replace(settings, grid=grid))


def check_grids(network: PatchNetwork, config: Config, sizes: Sequence[Sequence[int]]) -> None:
    """Refuse a head that does not take the grid of patches of an image of one of these sizes.

    Raises:
        ValueError: naming the head, the grid and the repair.
    """
    settings = config.patchgd
    grids = {network.grid(size): size for size in sizes}
    together = config.data.images * (
        config.mesh.samples if config.spatial.norm_scope == "step" else 1
    )
    for grid, size in grids.items():
        network.check_grid(size)
        if not isinstance(network, PatchUNet):
            check_head(
                network.head,
                settings.head,
                (min(together, 2), settings.features, *grid),
                network.outputs,
            )
    if (
        len(grids) > 1
        and config.data.images > 1
        and network.head in refusals
        and any(isinstance(m, _NORMS) for m in network.head.modules())
    ):
        raise ValueError(
            f"patchgd.head {settings.head} has norms and cannot be followed ({refusals[network.head]}), so it takes images of one grid of patches together, but they have "
            f"{' and '.join(str(Size(grid)) for grid in sorted(grids))}: set data.images to 1, or take a head such as cnn"
        )


def _check_unread(settings: PatchgdConfig) -> None:
    unread = {
        "features": "Z is the coarse features of the U-Net", "head": "the head of a U-Net is two convolutions", "statistics": "a U-Net of patches has no batch norm",
    }  # fmt: skip
    for field, what in unread.items():
        if getattr(settings, field) != getattr(PatchgdConfig(), field):
            raise ValueError(
                f"patchgd.{field} is {getattr(settings, field)}, but {what}: leave patchgd.{field} out"
            )
