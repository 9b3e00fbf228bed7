"""Make layers for maps (N, C, D, H, W) of 2D images, with a dim D of fixed length after C.

D is no dim of the image: it holds for example the bands of a spectrum or the dates of a series. A
convolution over D becomes a convolution of maps (N, C * D, H, W). The weight of the new convolution
holds the user's kernel once for each output position of D, and zeros elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distseg.models.axes import Axis
from distseg.models.capture.arranging import turned
from distseg.models.capture.folding import Deep, Folding
from distseg.models.capture.values import Value
from distseg.models.layers import Map, Step

if TYPE_CHECKING:
    from distseg.models.capture.reader import Reader


@dataclass(frozen=True)
class Depth:
    """A convolution's settings along the dim D of maps (N, C, D, *size), and the length of D.

    D has a fixed length and is no dim of the image. A layer of the captured network computes such a
    map as (N, C * D, *size).

    Attributes:
        before: length of D in the input.
        after: length of D in the result.
        stride, padding, dilation: settings of the convolution along D.
    """

    before: int
    after: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    times = 1

    @property
    def each(self) -> int:
        """Number of channels in the layer's output for one channel of the user's result.

        It is the length of D in the result, because C channels and D become C * D channels.
        """
        return self.after

    def of_layer(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments of a layer for maps (N, C * D, *size), from the user's convolution.

        The user's convolution takes maps (N, C, D, *size), where D is a dim of fixed length.

        Args:
            args: (input channels, output channels, kernel size, ...) of the user's convolution. The
                kernel size has a first entry for D; other settings have none.
            kwargs: further settings, without an entry for D.

        Returns:
            (args, kwargs) of the layer's class, such as ``nn.Conv2d``. The input channels are
                multiplied by :attr:`before`, the output channels by :attr:`after`, and the kernel
                size has no entry for D.
        """
        first, second, kernel, *rest = args
        return (first * self.before, second * self.after, tuple(kernel)[1:], *rest), kwargs

    def of_weight(self, steps: tuple[Step, ...], kernel: bool) -> tuple[Step, ...]:
        """Return the steps that turn the user's weight or bias into that of the layer.

        The user's convolution takes maps (N, C, D, *size), the layer takes maps (N, C * D, *size).

        Args:
            steps: function calls, of which the last one returns the user's weight
                (O, I, length, *kernel) or bias (O,). ``length`` is the kernel's length along D.
            kernel: True for a weight, False for a bias.

        Returns:
            ``steps`` and one more, which returns the layer's weight
                (O * after, I * before, *kernel) or bias (O * after,). All positions along D share
                the user's numbers.
        """
        last = Map(len(steps) - 1)
        return (
            *steps,
            Step(_of_all_places, (last, self), {})
            if kernel
            else Step(torch.repeat_interleave, (last, self.after), {}),
        )


def _of_all_places(weight: Tensor, depth: Depth) -> Tensor:
    """Return the weight (O * after, I * before, *kernel) of the layer that replaces a convolution.

    The user's convolution takes maps (N, C, D, *size), the layer takes maps (N, C * D, *size). The
    weight holds the user's kernel once for each output position along D, and zeros elsewhere.

    Args:
        weight: the user's weight (O, I, length, *kernel), where ``length`` is the kernel's length
            along D.
        depth: the lengths of D before and after the convolution, and the kernel's settings along D.
    """
    made = weight.new_zeros(
        weight.shape[0], depth.after, weight.shape[1], depth.before, *weight.shape[3:]
    )
    for place in range(depth.after):
        for k in range(weight.shape[2]):
            source = place * depth.stride - depth.padding + k * depth.dilation
            if 0 <= source < depth.before:
                made[:, place, :, source] += weight[:, :, k]
    return made.flatten(0, 1).flatten(1, 2)


def through(
    reader: Reader, rule: Callable[..., Any], raised: Deep, args: tuple, kwargs: dict
) -> Value:
    """Add layers for a call that takes a map (N, C, D, *size), and return its result.

    The map is rearranged to (N, C * D, *size), and the rule of the call is applied to it.

    Args:
        rule: the function that turns the current call into layers.
        raised: the exception that the rule raised because of the map, which it holds.
        args, kwargs: the arguments of the user's call.
    """
    x, calls = raised.value, reader.current
    name, before = calls[0].name, x.axes[2].cell
    if name == "batch_norm":
        return over_depth(reader, rule, x, args, kwargs)
    given = dict(inspect.signature(rule).bind(reader, *args, **kwargs).arguments)
    setting = {
        name: _three(given[name], reader.dims + 1)
        for name in ("kernel_size", "stride", "padding", "dilation")
        if given.get(name) not in (None, ()) and name in given
    }
    first = {
        name: value[0] if isinstance(value, tuple) else value for name, value in setting.items()
    }
    if any(isinstance(value, str) for value in first.values()):
        raise reader.refusal(
            "has a word, such as 'same', as padding, but dim 2 of its input is not a dim of the "
            "image: give the padding as numbers"
        )
    if "kernel_size" in first and (
        first["kernel_size"],
        first.get("stride", 1),
        first.get("padding", 0),
    ) != (1, 1, 0):
        raise reader.refusal(
            f"pools {x!r} along dim 2, which is not a dim of the image; supported: kernel_size 1, "
            "stride 1 and padding 0 along this dim"
        )
    after = calls[0].shapes[0][2]
    depth = Depth(
        before,
        after,
        *(
            first.get(name, other)
            for name, other in (("stride", 1), ("padding", 0), ("dilation", 1))
        ),
    )
    given |= {name: value[1:] for name, value in setting.items()}
    given = {name: x.as_plain if value is x else value for name, value in given.items()}

    def flat(shape):
        return (shape[0], shape[1] * shape[2], *shape[3:])

    reader.current = [replace(call, shapes=tuple(map(flat, call.shapes))) for call in calls]
    reader.folding = depth
    try:
        made = rule(**given)
    finally:
        reader.folding, reader.current = None, calls
    channels, *places = made.axes[1:]
    return replace(
        made, axes=(Axis(True), Axis(cell=channels.cell // after), Axis(cell=after), *places)
    )


def _three(setting: Any, dims: int) -> Any:
    """Return a setting as a tuple of ``dims`` entries; a number is repeated, a string is kept."""
    if isinstance(setting, str):
        return setting
    given = setting if isinstance(setting, tuple) else (setting,)
    return given * dims if len(given) == 1 else given


def over_depth(
    reader: Reader, rule: Callable[..., Any], x: Value, args: tuple, kwargs: dict
) -> Value:
    """Add layers for a batch norm that treats each position of ``x`` along D as an image.

    Args:
        rule: the function that adds a layer for a batch norm of maps (N, C, *size).
        x: the map (N, C, D, *size).
        args, kwargs: the arguments of the user's call.
    """
    order = [0, 2, 1, *range(3, x.rank)]
    y = turned(reader, x, order)
    given = {
        name: y.as_plain if value is x else value
        for name, value in inspect.signature(rule).bind(reader, *args, **kwargs).arguments.items()
    }
    reader.folding = Folding(x.axes[2].cell, (), reader.dims)
    try:
        made = rule(**given)
    finally:
        reader.folding = None
    return turned(reader, replace(made, axes=y.axes), order)
