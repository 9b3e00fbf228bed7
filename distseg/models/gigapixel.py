"""A small U-Net with large kernels and strides and additive skips, for images of a gigapixel.

It reconstructs a network that was trained on 16000 x 64000 pixels on one workstation. That network
has 7 convolutions and 4,492 parameters; its table of layers is not public. The candidates are
symmetric: three convolutions down, one in the middle, and three up with the same kernels. They
have biases, odd kernel sizes of 3 to 11 that do not grow towards the middle, and 2 to 16 channels
that do not decrease towards the middle. Four of them have 4,492 parameters. This is the only one of
the four with more than 2 channels at the first level::

    image ------------------------------------------------------------------------------- add
      9x9 / 4,  4 channels ------------------------------------------- add      9x9 x 4,  1 channel
        9x9 / 4,  4 channels --------------------------- add     9x9 x 4,  4 channels
          5x5 / 2,  5 channels ------------- add    5x5 x 2,  4 channels
            3x3,  5 channels

    4 (81 + 1) + 4 (4 81 + 1) + 5 (4 25 + 1) + 5 (5 9 + 1)
        + 4 (5 25 + 1) + 4 (4 81 + 1) + (4 81 + 1) = 4492

ReLU follows every convolution except the last. The convolutions on the way up are transposed. Their
results are cut to the size of the skip, so images of any size work.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from distseg.models.layers import Add, Stash

_TABLE = ((4, 9, 4), (4, 9, 4), (5, 5, 2))  # channels, kernel, stride on the way down


def gigapixel(in_channels: int = 1, out_channels: int = 1) -> nn.Sequential:
    """Return the gigapixel network, a small U-Net: (N, C, H, W) -> logits (N, C, H, W).

    With one channel it has 4,492 parameters.

    Args:
        in_channels: number of bands C.
        out_channels: number of outputs, also C.

    Raises:
        ValueError: in_channels and out_channels differ.
    """
    if in_channels != out_channels:
        raise ValueError(
            "gigapixel-4492 adds the image to its result, so it must have equal numbers of bands "
            f"and outputs, got {in_channels} bands and {out_channels} outputs: "
            "set model.out_channels to 1 for a grey image of two classes"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = [in_channels, *(c for c, _, _ in _TABLE)]
    for level, (width, kernel, stride) in enumerate(_TABLE):
        layers[f"stash{level}"] = Stash(f"skip{level}")
        layers[f"down{level}"] = nn.Conv2d(
            channels[level], width, kernel, stride, padding=kernel // 2
        )
        layers[f"down{level}_act"] = nn.ReLU()
    depth = len(_TABLE)
    layers[f"stash{depth}"] = Stash(f"skip{depth}")
    layers["middle"] = nn.Conv2d(channels[-1], channels[-1], 3, padding=1)
    layers["middle_act"] = nn.ReLU()
    layers["middle_add"] = Add(f"skip{depth}")
    for level in reversed(range(depth)):
        _, kernel, stride = _TABLE[level]
        layers[f"up{level}"] = nn.ConvTranspose2d(
            channels[level + 1],
            channels[level],
            kernel,
            stride,
            padding=kernel // 2,
            output_padding=stride - 1,
        )
        if level:
            layers[f"up{level}_act"] = nn.ReLU()
        layers[f"up{level}_add"] = Add(f"skip{level}")
    return nn.Sequential(layers)
