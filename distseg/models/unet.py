"""The U-Net of Seal et al. 2020 as an ``nn.Sequential`` of single layers.

::

    level 0   conv block - stash ------------------------------ pop - conv block - 1x1 conv
    level 1      pool - conv block - stash ---------- pop - conv block - up
    bottleneck              pool - conv block - up

A conv block repeats four layers: a 3x3 convolution without bias, dropout of channels, a norm and
LeakyReLU(0.01). With base width b, encoder level i has b*2^i channels. The bottleneck of a network
of depth D has b*2^D channels, but b*2^(D-1) after its last convolution. Decoder level i has
b*2^(i-1) channels, so level 0 has b/2. The table of parameters in Seal et al. 2020 determines these
widths.
Poolings round sizes up, so any image size works: the last cell of an odd row stands for fewer
pixels.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from distseg.models.layers import Pop, Stash

_CONV = {2: nn.Conv2d, 3: nn.Conv3d}
_CONV_TRANSPOSE = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_DROPOUT = {2: nn.Dropout2d, 3: nn.Dropout3d}
_INSTANCE = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_BATCH = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_BILINEAR = {2: "bilinear", 3: "trilinear"}


def unet(
    depth: int = 5,
    num_convs: int = 2,
    base_channels: int = 64,
    in_channels: int = 4,
    out_channels: int = 1,
    norm: str = "instance",
    dropout: float = 0.1,
    up: str = "nearest",
    groups: int = 8,
    dims: int = 2,
) -> nn.Sequential:
    """Return a U-Net that maps (N, in_channels, H, W) to logits (N, out_channels, H, W).

    The network takes any H and W.

    Args:
        depth: number of poolings D; the total stride is 2^D.
        num_convs: number of convolutions per level, n_c.
        base_channels: number of channels b of the first level.
        in_channels: number of bands.
        out_channels: number of classes.
        norm: ``instance`` (without weights, as in Seal et al. 2020), ``batch`` or ``group`` (both
            with weights), or ``none``.
        dropout: probability in [0, 1) that a channel is dropped; with 0 the layer is the identity.
        up: ``nearest`` (as in Seal et al. 2020), ``bilinear`` or ``transposed`` (2x2, stride 2, no
            bias).
        groups: number of groups of group norm. A layer uses the greatest common divisor of this
            number and the layer's number of channels.
        dims: 2 for images, 3 for volumes.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(
        depth, num_convs, base_channels, in_channels, out_channels, norm, dropout, up, groups, dims
    )
    layers: OrderedDict[str, nn.Module] = OrderedDict()

    def block(name: str, channels: int, widths: list[int]) -> int:
        for k, width in enumerate(widths):
            layers[f"{name}_conv{k}"] = _CONV[dims](channels, width, 3, padding=1, bias=False)
            layers[f"{name}_drop{k}"] = _DROPOUT[dims](dropout)
            layers[f"{name}_norm{k}"] = _norm(norm, width, groups, dims)
            layers[f"{name}_act{k}"] = nn.LeakyReLU(0.01)
            channels = width
        return channels

    channels = in_channels
    for level in range(depth):
        channels = block(f"enc{level}", channels, [base_channels * 2**level] * num_convs)
        layers[f"enc{level}_stash"] = Stash(f"skip{level}")
        layers[f"enc{level}_pool"] = _POOL[dims](2, ceil_mode=True)
    wide = base_channels * 2**depth
    channels = block("mid", channels, [wide] * (num_convs - 1) + [wide // 2])
    for level in reversed(range(depth)):
        layers[f"dec{level}_up"] = _up(up, channels, dims)
        layers[f"dec{level}_pop"] = Pop(f"skip{level}")
        channels = block(
            f"dec{level}",
            channels + base_channels * 2**level,
            [base_channels * 2**level // 2] * num_convs,
        )
    layers["head"] = _CONV[dims](channels, out_channels, 1, bias=False)
    return nn.Sequential(layers)


def _norm(kind: str, channels: int, groups: int, dims: int) -> nn.Module:
    if kind == "instance":
        return _INSTANCE[dims](channels)
    if kind == "batch":
        return _BATCH[dims](channels)
    if kind == "group":
        return nn.GroupNorm(math.gcd(groups, channels), channels)
    return nn.Identity()


def _up(kind: str, channels: int, dims: int) -> nn.Module:
    if kind == "transposed":
        return _CONV_TRANSPOSE[dims](channels, channels, 2, stride=2, bias=False)
    if kind == "bilinear":
        return nn.Upsample(scale_factor=2, mode=_BILINEAR[dims], align_corners=False)
    return nn.Upsample(scale_factor=2, mode="nearest")


def _check(
    depth, num_convs, base_channels, in_channels, out_channels, norm, dropout, up, groups, dims
) -> None:
    """Refuse arguments of :func:`unet` that are out of range."""
    if dims not in _CONV:
        raise ValueError(
            f"unet supports 2 and 3 spatial dims, got dims={dims}: set model.dims to 2 or 3"
        )
    counts = dict(
        depth=depth,
        num_convs=num_convs,
        base_channels=base_channels,
        in_channels=in_channels,
        out_channels=out_channels,
        groups=groups,
    )
    for field, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"model.{field} must be a whole number of at least 1, got {value!r}")
        if value > _MOST[field]:
            raise ValueError(f"model.{field} must be at most {_MOST[field]}, got {value}")
    if base_channels * 2**depth > _WIDEST:
        raise ValueError(
            f"model.base_channels {base_channels} with model.depth {depth} makes "
            f"{base_channels * 2**depth} channels at the bottom, more than {_WIDEST}: "
            "lower one of them"
        )
    if base_channels < 2 or base_channels % 2:
        raise ValueError(
            "model.base_channels must be even (the decoder's first level has half of it), "
            f"got {base_channels}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout must be a probability in [0, 1), got {dropout}")
    for field, value, choices in (("norm", norm, NORMS), ("up", up, UPS)):
        if value not in choices:
            raise ValueError(f"model.{field} must be one of {', '.join(choices)}, got {value!r}")


# Limits beyond any network that could be trained: a mistyped digit gives an error message instead
# of exhausting the memory.
_WIDEST = 2**20
_MOST = dict(
    depth=20,
    num_convs=100,
    base_channels=_WIDEST,
    in_channels=_WIDEST,
    out_channels=_WIDEST,
    groups=_WIDEST,
)
NORMS = ("instance", "batch", "group", "none")
UPS = ("nearest", "bilinear", "transposed")
