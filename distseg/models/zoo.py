"""Models by name: the four networks of Seal et al. 2020, small networks, and a user's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from distseg.config.settings import ModelConfig
from distseg.config.spelling import did_you_mean
from distseg.models.bands import record_images
from distseg.models.capture.capture import as_network
from distseg.models.gigapixel import gigapixel
from distseg.models.layers import padded
from distseg.models.own import built, check_channels, own_builder
from distseg.models.passes import seeded
from distseg.models.unet import unet
from distseg.models.weights import materialise

_FIELDS = (
    "depth",
    "num_convs",
    "base_channels",
    "in_channels",
    "out_channels",
    "norm",
    "dropout",
    "up",
    "groups",
    "dims",
)


@dataclass(frozen=True)
class Entry:
    """A network that a config can name, such as ``summit-small``.

    Attributes:
        arguments: the keyword arguments with which ``builder`` is called.
        levels: the number of levels L in the slides of Seal et al. 2020; None for other networks.
        balance: the number of layers on each of the six pipeline stages in those slides; None if
            they give no such numbers.
        builder: the function that makes the network.
    """

    arguments: dict
    levels: int | None = None
    balance: tuple[int, ...] | None = None
    builder: Callable[..., nn.Module] = unet

    @property
    def paper_halo(self) -> int | None:
        """The halo in pixels, computed by the formula in the slides of Seal et al. 2020.

        The formula is eps = (3 * 2^(L-2) - 1) * d * n_c with d = 2, where L counts the bottleneck
        as a level (docs/halo.md). None for networks that are not in these slides.
        """
        if self.levels is None:
            return None
        return (3 * 2 ** (self.levels - 2) - 1) * 2 * self.arguments["num_convs"]


def _summit(depth: int, num_convs: int, balance: tuple[int, ...] | None = None) -> Entry:
    return Entry(
        dict(depth=depth, num_convs=num_convs, base_channels=64, in_channels=4, out_channels=1),
        levels=depth,
        balance=balance,
    )


ZOO: dict[str, Entry] = {
    "summit-small": _summit(5, 2, (14, 24, 30, 22, 12, 7)),
    "summit-medium-1": _summit(5, 5),
    "summit-medium-2": _summit(6, 2, (16, 26, 38, 26, 12, 11)),
    "summit-large": _summit(7, 2, (18, 30, 44, 30, 14, 13)),
    "demo": Entry(
        dict(
            depth=5,
            num_convs=1,
            base_channels=32,
            in_channels=3,
            out_channels=3,
            norm="batch",
            dropout=0.0,
        )
    ),
    "gigapixel-4492": Entry({}, builder=gigapixel),
    "tiny": Entry(dict(depth=2, num_convs=1, base_channels=4, in_channels=3, out_channels=2)),
}


def build_model(
    config: ModelConfig, in_channels: int | None = None, out_channels: int | None = None
) -> nn.Module:
    """Return the model of a config, with weights drawn from ``model.seed`` (float32, CPU).

    ``in_channels`` and ``out_channels`` are the numbers of bands and classes of the data.
    Arguments and errors are those of :func:`plain_model`.
    """
    model = plain_model(config, in_channels, out_channels)
    materialise(model, config.seed)
    return model


def outline_model(
    config: ModelConfig, in_channels: int | None = None, out_channels: int | None = None
) -> nn.Module:
    """Return the network of a config as a list of layer calls, which distseg can split.

    If the config names a user's function, the layer calls are recorded from its module. If that
    fails, the module is returned unchanged. ``in_channels`` and ``out_channels`` are the numbers of
    bands and classes of the data. Arguments and errors are those of :func:`plain_model`.
    """
    return as_network(plain_model(config, in_channels, out_channels))


def plain_model(
    config: ModelConfig,
    in_channels: int | None = None,
    out_channels: int | None = None,
    guess: int | None = None,
) -> nn.Module:
    """Return the network of a config, on the meta device unless a user's function builds it.

    On the meta device the network has no weights; :func:`materialise` makes the weights. The module
    of a user's function has weights already, drawn with ``model.seed``.

    Args:
        config: the section ``model``.
        in_channels, out_channels: the numbers of bands and classes of the data. Each number is used
            if the config does not set it.
        guess: the number of classes with which the module is built if neither the config nor the
            data has it. A user's function may return another number.

    Raises:
        ValueError: the name is unknown, an argument is out of range, the channels differ from
            those of the data, or the user's function fails.
    """
    arguments = {f: getattr(config, f) for f in _FIELDS if getattr(config, f) is not None}
    for field, wanted in (("in_channels", in_channels), ("out_channels", out_channels)):
        if wanted is not None and arguments.setdefault(field, wanted) != wanted:
            raise ValueError(
                f"model.{field} is {arguments[field]}, but the data has {wanted}: "
                f"leave model.{field} out, and the data's number is used"
            )
    needed = arguments.get("in_channels"), arguments.get("out_channels")
    if guess is not None:
        arguments.setdefault("out_channels", guess)
    if ":" in config.name:
        with seeded(config.seed):
            bands = arguments.get("in_channels")
            if config.inputs is not None and bands not in (None, sum(config.inputs)):
                raise ValueError(
                    f"model.inputs is {config.inputs}, together {sum(config.inputs)} bands, but "
                    f"images have {bands}: let the numbers of model.inputs add up to {bands}"
                )
            outputs = None if config.outputs is None else tuple(config.outputs)
            model = built(
                config.name,
                own_builder(config.name),
                arguments,
                config.args or {},
                config.inputs,
                outputs,
            )
            check_channels(config.name, model, *needed)
            return model if config.pad is None else padded(model, config.pad)
    builder = _builder(config.name)
    try:
        with torch.device("meta"):
            model = builder(**arguments)
        record_images(model, arguments.get("in_channels"))
        return model
    except TypeError as e:
        raise ValueError(
            f"model {config.name} cannot take every setting of the section model ({e}): "
            "remove the setting that the error in brackets names"
        ) from None


def _builder(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds the network of this name."""
    if name == "unet":
        return unet
    if name in ZOO:
        return lambda **given: ZOO[name].builder(**{**ZOO[name].arguments, **given})
    raise ValueError(
        f"unknown model {name!r}: choose unet, {', '.join(ZOO)}, "
        "or your own function as package.module:function" + did_you_mean(name, ["unet", *ZOO])
    )
