"""Convolutions whose weights are computed from the image, as in hyper-networks and StyleGAN2.

User code holds the images of a batch side by side in the channels, (1, N * C, H, W), with a group
of channels for each image. The captured network turns the windows of each image into channels and
multiplies them with the weights of that image.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distseg.models.axes import Axis, plain_axes
from distseg.models.capture.reader import Reader
from distseg.models.capture.values import Sizes, Value
from distseg.models.moving import Windows

_FORM = (
    "has a weight that is computed from the image; supported: one weight per image, "
    "F.conv2d(x.reshape(1, n * c, h, w), weight.reshape(n * o, c, k, k), groups=n)"
)


def convolved(
    reader: Reader,
    x: Value,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
) -> Value:
    """Add layers that convolve each image with its own weight, and return the result.

    The arguments are those of the user's ``F.conv2d`` (or 1d, 3d). User code holds the N images of
    the batch side by side in the channels. In the shapes, G is the number of groups into which the
    C channels of one image are divided; C' is the number of channels of its result. The result has
    the shape (1, N * C', *size).

    Args:
        x: (1, N * C, *size).
        weight: (N * C', C / G, *kernel), computed from the image.
        bias: (N * C',) or None.
        groups: N * G.

    Raises:
        CanNotCapture: the arguments have other shapes, or the bias is a parameter.
    """
    folded = (
        isinstance(weight, Value)
        and not x.vector
        and x.axes == (Axis(), Axis(True, x.channels), *plain_axes(1, reader.dims)[2:])
    )
    if (
        not folded
        or not weight.vector
        or weight.rank != 2 + reader.dims
        or not weight.axes[0].batch
        or not all(axis.of_channels and not axis.whole for axis in weight.axes[1:])
    ):
        raise reader.refusal(_FORM)
    made, each, *kernel = (axis.cell for axis in weight.axes)
    parts = x.channels // each
    given = groups.each if isinstance(groups, Sizes) else (groups,) * len(reader.traces)
    if (
        any(n != t.batch * parts for n, t in zip(given, reader.traces))
        or bias is not None
        and not isinstance(bias, Value)
    ):
        raise reader.refusal(_FORM)
    kernel = tuple(kernel)
    stride, dilation = (reader.each(reader.fixed(n, "setting")) for n in (stride, dilation))
    padding = _padding(reader, padding, kernel, dilation)
    sizes = tuple(c.shapes[0][2:] for c in reader.current)
    windows = x.as_plain
    if set(kernel) | set(stride) != {1} or any(padding):
        axes = plain_axes(x.channels * math.prod(kernel), reader.dims)
        windows = reader.emit(
            lambda _: Windows(kernel, stride, dilation, padding),
            [windows],
            axes=axes,
            sizes=sizes,
            what="windows",
        )
    reads = reader.meeting([windows, weight, *([] if bias is None else [bias])])
    return reader.applied(
        _Weighted(parts), reads, "weighted", (Axis(), Axis(True, made), *windows.axes[2:])
    )


def _padding(
    reader: Reader, padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """Return a convolution's padding along each dim as a number of cells, equal on both sides."""
    if padding == "valid":
        return (0,) * reader.dims
    if padding == "same":
        both = [d * (k - 1) for k, d in zip(kernel, dilation)]
        if any(n % 2 for n in both):
            raise reader.refusal(
                "has padding='same', which pads one side more than the other for this kernel size, "
                "and a weight that is computed from the image: call F.pad before, and set padding=0"
            )
        return tuple(n // 2 for n in both)
    return reader.each(reader.fixed(padding, "padding"))


class _Weighted:
    """Callable ``(windows, weight, bias)`` that convolves each image with its own weight.

    The windows (N, C * K, *size) hold, at each output position, the K cells of the image below the
    kernel. The weight is (N * C', C / groups, *kernel), the bias (N * C',) or None, the result
    (1, N * C', *size).

    Args:
        groups: the number of groups into which the channels of one image are divided.
    """

    __name__ = "conv"

    def __init__(self, groups: int):
        self.groups = groups

    def __call__(self, windows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        images, size = len(windows), windows.shape[2:]
        each = weight.reshape(images, self.groups, -1, weight[0].numel())
        y = torch.matmul(each, windows.reshape(images, self.groups, each.shape[3], -1)).reshape(
            1, -1, *size
        )
        return y if bias is None else y + bias.reshape(1, -1, *(1 for _ in size))
