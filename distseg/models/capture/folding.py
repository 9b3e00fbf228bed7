"""Make layers for maps that hold frames, dates, bands or slices in the batch dim.

The user's layer treats each frame as an image. The captured network holds the T frames of an image
as T groups of channels instead. So a call on (N * T, C, *size) becomes a layer of maps
(N, T * C, *size), whose weights are repeated T times. If positions are in the batch dim, as in
(N * D, C, H, W), the layer's kernel has length 1 along D. A :class:`Folding` describes such a batch
dim.

Batches that user code joins, ``torch.cat((x, y))``, are handled like groups, but must not be mixed
until user code splits them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distseg.models.axes import Axis, plain_axes
from distseg.models.capture.trace import found_in
from distseg.models.capture.values import Sizes, Value
from distseg.models.layers import Cat, Map, Step

if TYPE_CHECKING:
    from distseg.models.capture.reader import Reader


class Folded(Exception):
    """Exception that a rule raises if a map's batch dim holds more than images: (N * T, C, *size).

    :func:`unfolded` catches it, rearranges the map ``value`` to (N, T * C, *size) and applies the
    rule to it. ``folding`` describes the batch dim.
    """

    def __init__(self, value: Value, folding: Folding):
        super().__init__()
        self.value, self.folding = value, folding


class Deep(Exception):
    """Exception that a rule raises for a map (N, C, D, *size) instead of (N, C, *size).

    :func:`distseg.models.capture.depth.through` catches it, rearranges the map ``value`` to
    (N, C * D, *size) and applies the rule to it.
    """

    def __init__(self, value: Value):
        super().__init__()
        self.value = value


def is_deep(x: Value, name: str) -> bool:
    """Return True if ``x`` is a map (N, C, D, *size), and the function ``name`` supports such maps.

    D is a dim of fixed length that is no dim of the image, such as the bands of a spectrum.
    """
    there = (
        x.rank == x.dims + 3
        and x.axes[0] == Axis(True)
        and x.axes[1].of_channels
        and x.axes[2].of_channels
    )
    return there and x.axes[3:] == tuple(Axis(places=(d,)) for d in range(x.dims)) and name in _DEEP


def is_alone(x: Value, name: str) -> bool:
    """Return True if a call on ``x`` (N * H * W, C, T) computes each pixel separately.

    This is so if user code has made each pixel an image of its own in the batch dim, and the
    function ``name`` does not mix images. The call is then pointwise for the map (N, C, T, H, W),
    where T has a fixed length.
    """
    return (
        x.axes[0] == Axis(True, 1, tuple(range(x.dims)))
        and x.rank > 2
        and all(axis.of_channels for axis in x.axes[1:])
        and name in _OF_ONE_IMAGE
    )


_OF_ONE_IMAGE = {
    f"{kind}{dims}d"
    for kind in (
        "conv",
        "conv_transpose",
        "max_pool",
        "avg_pool",
        "adaptive_avg_pool",
        "adaptive_max_pool",
        "lp_pool",
    )
    for dims in (1, 2)
} | {*("group_norm instance_norm interpolate pad local_response_norm").split()}


@dataclass(frozen=True)
class Folding:
    """Description of a batch dim that holds frames or positions besides images.

    For example, the batch dim of (N * T, C, H, W) holds T frames of each image (H, W): ``times`` is
    T, ``outer`` is (). The batch dim of (N * D, C, H, W) holds the positions along D of images
    (D, H, W): ``times`` is 1, ``outer`` is (0,).

    Attributes:
        times: the number T of frames, which become T groups of channels in the network.
        outer: the spatial dims whose positions are in the batch dim, counted from 0.
        dims: number of spatial dims of the image.
    """

    times: int
    outer: tuple[int, ...]
    dims: int
    each = 1

    @classmethod
    def from_value(cls, x: Value) -> Folding | None:
        """Return the description of the batch dim of the map ``x``.

        Return None if the batch dim holds only images, or if the tensor is not a supported map:
        (batch, C, *size) with at least one spatial dim, each a dim of its own and in their order.
        """
        if (
            x.rank < 3
            or not x.axes[0].batch
            or not x.axes[1].of_channels
            or x.axes[0] == Axis(True)
        ):
            return None
        found = cls(x.axes[0].cell, x.axes[0].places, x.dims)
        there = tuple(Axis(places=(d,)) for d in range(x.dims) if d not in found.outer)
        return found if x.axes[2:] == there and there else None

    @property
    def inner(self) -> tuple[int, ...]:
        """Spatial dims of the image that are not in the batch dim of the user's tensor."""
        return tuple(d for d in range(self.dims) if d not in self.outer)

    def plain(self, shape: Sequence[int], batch: int, size: Sequence[int]) -> tuple[int, ...]:
        """Return the shape (N, T * C, *size) that the result of a call has in the captured network.

        T is :attr:`times`, the number of frames in the batch dim.

        Args:
            shape: the shape of the result in user code, such as (N * T, C, *size).
            batch: the number N of images.
            size: the size of the map that the call gets, with all spatial dims. Along the dims
                ``outer``, which are in the batch dim, the result has the same length.
        """
        along = dict(zip(self.inner, shape[2:])) | {d: size[d] for d in self.outer}
        return (batch, self.times * shape[1], *(along[d] for d in range(self.dims)))

    def folded(self, x: Value) -> Value:
        """Return a layer's output with the axes that it has in user code, (N * T, C, *size).

        Only its axes are replaced, so no layer is added. T is :attr:`times`, the number of frames
        in the batch dim. This is the reverse of :meth:`plain`.

        Args:
            x: the layer's output: a map (N, T * C, *size) or a vector (N, T * C, ...).

        Raises:
            ValueError: ``x`` has another form.
        """
        channels, *places = x.axes[1:]
        if (
            x.axes[0] != Axis(True)
            or channels.cell % self.times
            or not x.vector
            and tuple(places) != plain_axes(1, self.dims)[2:]
        ):
            raise ValueError
        kept = [place for d, place in enumerate(places) if d not in self.outer]
        return replace(
            x,
            axes=(
                Axis(True, self.times, self.outer),
                Axis(cell=channels.cell // self.times),
                *kept,
            ),
        )

    def spread(self, setting: Any, alone: Any) -> Any:
        """Return a kernel setting, such as a stride, with an entry for each dim of the image.

        For example, a stride of 2 for (N * D, C, H, W) becomes (1, 2, 2) for (N, C, D, H, W).
        Return the setting unchanged if no spatial dim is in the batch dim, or if it is None or a
        string.

        Args:
            setting: a number or a tuple, as in user code. It has no entry for dims in the batch
                dim.
            alone: the entry for a spatial dim in the batch dim. Along this dim the layer must not
                combine positions, so it is 1 for a kernel size and 0 for a padding.
        """
        if not self.outer or setting is None or isinstance(setting, str):
            return setting
        given = setting if isinstance(setting, tuple) else (setting,)
        along = dict(zip(self.inner, given * len(self.inner) if len(given) == 1 else given))
        return tuple(along.get(d, alone) for d in range(self.dims))

    def of_layer(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments of the convolution layer that computes all T frames in one call.

        Args:
            args, kwargs: arguments of the layer's class, such as ``nn.Conv2d``, for one frame: the
                numbers of input and output channels, the kernel size, and settings, among them
                ``groups``.

        Returns:
            (args, kwargs) with T times the channels and groups. Where user code moved a spatial dim
                into the batch dim, the kernel has length 1 along it.
        """
        first, second, kernel, *rest = args
        return (
            first * self.times,
            second * self.times,
            self.spread(tuple(kernel), 1),
            *rest,
        ), kwargs | {"groups": kwargs["groups"] * self.times}

    def of_weight(self, steps: tuple[Step, ...], kernel: bool) -> tuple[Step, ...]:
        """Return the steps that compute the weight or bias of the layer for all T frames.

        The frames of an image are T groups of channels of the layer. All groups have the same
        weight and bias.

        Args:
            steps: function calls, of which the last one returns the weight or bias of the user's
                convolution, which computes one frame.
            kernel: True for a weight, which has spatial dims; False for a bias.

        Returns:
            ``steps`` and one more, which repeats the weight or bias T times along dim 0.
        """
        return (
            *steps,
            Step(_for_all, (Map(len(steps) - 1), self.times, self.outer if kernel else ()), {}),
        )


def _for_all(weight: Tensor, times: int, outer: Sequence[int]) -> Tensor:
    """Repeat a convolution's weight (O, ...) or bias (O,) ``times`` times along dim 0.

    Args:
        weight: the weight or bias.
        times: the number of groups of channels that the layer has.
        outer: the spatial dims, counted from 0, along which a weight gets a dim of length 1; empty
            for a bias.
    """
    for d in outer:
        weight = weight.unsqueeze(2 + d)
    return weight.repeat(times, *(1 for _ in weight.shape[1:]))


_ALONE = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
"""Kernel settings, with their values along a spatial dim that is in the batch dim."""
_KERNELS = {
    f"{kind}{dims}d"
    for kind in ("conv", "conv_transpose", "max_pool", "avg_pool")
    for dims in (1, 2, 3)
} | {"batch_norm"}
_DEEP = {f"{kind}{dims}d" for kind in ("conv", "max_pool", "avg_pool") for dims in (2, 3)} | {
    "batch_norm",
    "group_norm",
    "instance_norm",
}
_WITHOUT_PLACES = {
    f"{kind}{dims}d"
    for kind in ("adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    for dims in (1, 2, 3)
} | {
    *(
        "interpolate upsample pad pixel_shuffle pixel_unshuffle group_norm instance_norm "
        "__getitem__"
    ).split()
}


def knows(name: str, folding: Folding) -> bool:
    """Return True if :func:`unfolded` supports a function on a map whose batch dim is ``folding``.

    Args:
        name: name of a PyTorch function, such as ``conv2d``.
        folding: description of the frames or positions that the map's batch dim holds.
    """
    return name in _KERNELS or name in _WITHOUT_PLACES and not folding.outer


def unfolded(
    reader: Reader, rule: Callable[..., Any], raised: Folded, args: tuple, kwargs: dict
) -> Value:
    """Add layers for a call on a map whose batch dim holds frames or positions; return its result.

    The map is rearranged so that its batch dim holds images only, and the rule of the call is
    applied to it. An example is (N * T, C, *size), which becomes (N, T * C, *size).

    Args:
        rule: the function that turns the current call into layers.
        raised: the exception that the rule raised. It holds the map, ``raised.value``, and the
            description of its batch dim, ``raised.folding``.
        args, kwargs: the arguments of the user's call.
    """
    x, folding, calls = raised.value, raised.folding, reader.current
    given = inspect.signature(rule).bind(reader, *args, **kwargs).arguments
    given = {
        name: x.as_plain
        if value is x
        else folding.spread(value, _ALONE[name])
        if name in _ALONE
        else value
        for name, value in given.items()
    }

    def shapes(n, call):
        return tuple(folding.plain(shape, x.shapes[n][0], x.sizes[n]) for shape in call.shapes)

    reader.current = [replace(call, shapes=shapes(n, call)) for n, call in enumerate(calls)]
    reader.folding = folding
    try:
        made = rule(**given)
    finally:
        reader.folding, reader.current = None, calls
    try:
        return folding.folded(made)
    except (ValueError, AttributeError):
        raise reader.refusal(
            f"takes {x!r}, whose batch dim holds channels or positions besides images: call it on "
            "a feature map whose batch dim holds images only"
        ) from None


def joined_batches(reader: Reader, maps: Sequence[Value]) -> Value | None:
    """Add a layer for ``torch.cat(maps)`` along dim 0, which joins batches; return its output.

    The layer concatenates the maps along channels instead, so that each batch becomes a group of
    channels. Return None if the shapes of the maps differ, or if they are not (N, C, *size).
    """
    first = maps[0]
    if not first.plain or any((x.plain, x.shapes) != (True, first.shapes) for x in maps):
        return None
    axes = (first.axes[0], Axis(cell=len(maps) * first.channels), *first.axes[2:])
    made = reader.emit(lambda _: Cat(), maps, axes=axes)
    return replace(made, axes=(Axis(True, len(maps)), first.axes[1], *first.axes[2:]), joined=True)


def of_joined(reader: Reader, rule: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Add layers for a call on batches that user code joined by ``torch.cat`` along dim 0.

    If the call splits the batches again, return one batch or a tuple of batches. Otherwise return
    joined batches.

    Args:
        rule: the function that turns the current call into layers.
        args, kwargs: the arguments of the user's call.

    Raises:
        CanNotCapture: the call mixes the batches.
    """
    maps = found_in((args, kwargs), Value)
    first = maps[0].axes[0]
    if not all(x.joined and x.axes[0] == first for x in maps):
        raise reader.refusal(_MIXED)
    if (found := _taken_apart(reader, rule, maps[0], args, kwargs)) is not None:
        return found
    made = rule(reader, args, kwargs)
    each = made if isinstance(made, tuple) else (made,)
    if any(x is not None and (not x.rank or x.axes[0] != first) for x in each):
        raise reader.refusal(_MIXED)
    found = tuple(x and replace(x, joined=True) for x in each)
    return found if isinstance(made, tuple) else found[0]


_MIXED = (
    "mixes batches that were concatenated along dim 0; supported: functions of each image, and "
    "x.chunk(2) or x[:n] to split them again"
)


def _taken_apart(
    reader: Reader, rule: Callable[..., Any], x: Value, args: tuple, kwargs: dict
) -> Value | tuple[Value, ...] | None:
    """Return the batches that a call such as ``x.chunk(2)`` takes from the joined batches ``x``.

    An index such as ``x[:n]`` gives one batch, a split gives a tuple of batches. Return None for a
    call that does not split the batches.
    """
    name, count, batches = reader.call.name, x.axes[0].cell, [shape[0] for shape in x.shapes]
    if name in ("chunk", "split", "split_with_sizes", "tensor_split") and (
        args[2:] or (kwargs.get("dim", 0),)
    )[0] in (0, -x.rank):
        if any(
            [shape[0] for shape in call.shapes] != [n] * count
            for call, n in zip(reader.current, batches)
        ):
            raise reader.refusal(_MIXED)
        return tuple(_group(reader, x, n) for n in range(count))
    if name in ("view", "reshape", "unflatten"):
        stacked = (Axis(cell=count), Axis(True), *x.axes[1:])
        alike = (
            all(call.shapes[0][:2] == (count, n) for call, n in zip(reader.current, batches))
            and reader.made(x) == stacked
        )
        return replace(x, axes=stacked, joined=False) if alike else None
    if name != "__getitem__":
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    first = [
        index[0].each[trace] if isinstance(index[0], Sizes) else index[0]
        for trace in range(len(batches))
    ]
    if not all(isinstance(i, slice) for i in first) or index[0] == slice(None):
        return None
    taken = [range(count * n)[i] for i, n in zip(first, batches)]
    number = next(
        (k for k in range(count) if taken == [range(k * n, (k + 1) * n) for n in batches]), None
    )
    if number is None:
        raise reader.refusal(_MIXED)
    group = _group(reader, x, number)
    return (
        rule(reader, (group, (slice(None), *index[1:])), {})
        if any(i != slice(None) for i in index[1:])
        else group
    )


def _group(reader: Reader, x: Value, number: int) -> Value:
    """Add a layer that takes batch ``number`` from the joined batches ``x``; return its output."""
    take = _Group(number, x.axes[0].cell)
    return reader.applied(take, [x], f"batch_{number}", (Axis(True), *x.axes[1:]))


class _Group:
    """Callable that returns batch number ``first`` of ``step`` joined batches, ``x[first::step]``.

    In dim 0 of the layer's input ``x``, the images 0 of all batches come first, then the images 1,
    and so on. It is a class, not a lambda, so that layers with it can be copied and pickled.
    """

    __name__ = "batch"

    def __init__(self, first: int, step: int):
        self.first, self.step = first, step

    def __call__(self, x: Tensor) -> Tensor:
        return x[self.first :: self.step]
