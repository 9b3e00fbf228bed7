"""Build a network of patches with the head that ``patchgd.head`` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from distseg.config.patchgd import PatchgdConfig
from distseg.config.settings import ModelBase
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.network import check_size, of_image, refusals
from distseg.models.passes import seeded
from distseg.models.weights import materialise
from distseg.tiling import rng
from distseg.training.patchgd.heads import check_head, make_head, of_one_grid
from distseg.training.patchgd.network import PatchNetwork, starts_of
from distseg.training.patchgd.unet import PatchUNet


def patch_network(
    settings: PatchgdConfig,
    model: ModelBase,
    made: Callable[[int], nn.Module],
    outputs: int,
    head: nn.Module | None = None,
) -> PatchNetwork:
    """Return a network that sees an image as patches: a backbone, and the head ``patchgd.head``.

    For labels of pixels it is a U-Net of patches. The initial weights of the head are drawn with
    ``model.seed``.

    Args:
        settings: the settings of PatchGD.
        model: the settings of the backbone.
        made: a function of the number of outputs that returns a backbone. The number is
            ``patchgd.features``; for labels of pixels it is ``outputs``.
        outputs: the number of outputs of the whole network.
        head: a head that is used instead of the one that ``patchgd.head`` names; None for that one.

    Raises:
        ValueError: PatchGD cannot train the network or the head.
    """
    backbone = as_network(made(settings.features))
    by_pixels = not of_image(backbone, settings.patch)
    if by_pixels:
        _check_unread(settings)
        backbone = made(outputs)
        materialise(backbone, model.seed)
    elif settings.y_filling:
        raise ValueError(
            "patchgd.y_filling is true, but the network turns a patch into a vector, "
            "whereas y is a map of labels: leave patchgd.y_filling out"
        )
    elif model.out_channels not in (None, settings.features):
        raise ValueError(
            f"model.out_channels is {model.out_channels}, but the backbone's number of "
            f"outputs is patchgd.features, {settings.features}: leave model.out_channels out"
        )
    with seeded(rng.key(model.seed, "head") & (2**63 - 1)):
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


def with_grid(settings: PatchgdConfig, size: Sequence[int]) -> PatchgdConfig:
    """Return the settings with ``grid`` set to the number of patches along each dim of an image.

    The settings are returned unchanged in three cases: the head takes any grid, they have a grid
    already, or ``size`` and ``patch`` have different numbers of dims.

    Args:
        settings: the settings of PatchGD.
        size: the size of the training images in pixels.

    Raises:
        ValueError: the settings have a grid, although the head takes any grid.
    """
    if not of_one_grid(settings.head):
        if settings.grid is not None:
            raise ValueError(
                f"patchgd.grid is {settings.grid}, but patchgd.head {settings.head} takes any "
                "grid: set patchgd.head to conv3 or conv4, or leave patchgd.grid out"
            )
        return settings
    if settings.grid is not None or len(size) != len(settings.patch):
        return settings
    grid = tuple(map(len, starts_of(size, settings.patch, settings.step or settings.patch)))
    return replace(settings, grid=grid)


def check_grids(
    network: PatchNetwork,
    settings: PatchgdConfig,
    sizes: Sequence[Sequence[int]],
    images: int,
    samples: int,
) -> None:
    """Refuse a network whose head cannot take the grids of patches that images of these sizes have.

    Args:
        network: the network, which sees an image as patches.
        settings: the settings of PatchGD.
        sizes: the sizes of images in pixels.
        images: number of images that a sample group has in a step.
        samples: number of sample groups.

    Raises:
        ValueError: the head is refused. The message names the head, the grid and how to fix it.
    """
    grids = {network.grid(size): size for size in sizes}
    together = images * (samples if settings.norm_scope == "step" else 1)
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
        and images > 1
        and network.head in refusals
        and any(isinstance(m, _NORMS) for m in network.head.modules())
    ):
        raise ValueError(
            f"patchgd.head {settings.head} has norms and a forward that distseg cannot follow "
            f"({refusals[network.head]}), so all images of a step must have one grid of patches, "
            f"but the grids are {' and '.join(str(Size(grid)) for grid in sorted(grids))}: "
            "set data.images to 1, or choose a head such as cnn"
        )


def _check_unread(settings: PatchgdConfig) -> None:
    """Refuse settings of PatchGD that have no effect if the network is a U-Net of patches."""
    unread = {
        "features": "Z is the coarse features of the U-Net",
        "head": "the head of a U-Net is two convolutions",
        "statistics": "a U-Net of patches has no batch norm",
    }
    for field, what in unread.items():
        if getattr(settings, field) != getattr(PatchgdConfig(), field):
            raise ValueError(
                f"patchgd.{field} is {getattr(settings, field)}, but {what}, so that the setting "
                f"has no effect: leave patchgd.{field} out"
            )
