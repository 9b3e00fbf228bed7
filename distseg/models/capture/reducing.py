"""Functions for rules of calls that compute statistics over the image.

A statistic over all positions is a layer whose output is a vector of the image
(:class:`distseg.models.layers.Mean` and others). A statistic over positions and channels is
computed in two steps: over all positions, then over the channels of that vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distseg.models.axes import Axes, Axis, without_places
from distseg.models.capture.arranging import turned
from distseg.models.capture.lining import lines_spread, of_lines, takes_lines
from distseg.models.capture.reader import Reader
from distseg.models.capture.values import Value
from distseg.models.image_statistics import Largest, LogSumExp, Products, Variance
from distseg.models.layers import Cat, Max, Mean


def reduced(
    reader: Reader,
    x: Any,
    dim: Any,
    args: tuple,
    make: Callable[[], nn.Module],
    of_channels: Callable[..., Tensor] | None,
    what: str,
    part: int = 0,
) -> Value:
    """Add layers for a statistic over channels, over positions, or over both; return the result.

    Args:
        x: the map or vector that the call reduces.
        dim: the dims over which the call reduces, as user code gives them.
        args: arguments with which the user's function is called if it reduces channels only.
        make: function that makes the layer for the statistic over positions.
        of_channels: function that reduces the dims ``dim`` of a vector; None if a statistic over
            positions and channels is not supported.
        what: name of the statistic, for errors.
        part: index of the statistic among the call's results.
    """
    x = reader.value(x)
    if reader.of_channels(dim, x):
        return reader.formula(args, {})
    over = reader.dims_of(dim, x)
    rest = tuple(d for d in over if x.axes[d].cell != 1)
    if rest and of_channels is None:
        raise reader.refusal(
            f"takes {what} over channels and positions together, which is not supported: take it "
            "first over one of them, then over the other"
        )
    vector = over_places(reader, x, over, make)
    if rest:
        vector = reader.applied(
            partial(of_channels, dim=rest, keepdim=True),
            [vector],
            "channels",
            _alone(vector.axes, rest),
        )
    return formed(reader, vector, part)


def over_places(
    reader: Reader, x: Value, over: Sequence[int], make: Callable[[], nn.Module], what: str = ""
) -> Value:
    """Add a layer for a statistic of each channel over spatial dims, which get length 1.

    Return its output. If ``over`` leaves out some spatial dims, the output has a value for each
    position along these (a line, such as row means). Otherwise it is a vector without positions.

    Args:
        over: dims of the map ``x`` in user code over which the call reduces. Dims that hold
            channels keep their length here.
        make: function that makes the layer of the statistic.
        what: suffix of the layer's name.
    """
    return (
        of_lines(reader, x, over, make, what)
        if takes_lines(x, over)
        else of_image(reader, x, make, what)
    )


def all_places(reader: Reader, x: Value, dim: Any, what: str) -> tuple[int, ...]:
    """Return the dims that ``dim`` selects, as a tuple; refuse them if a spatial dim is missing.

    Args:
        x: the map that the call reduces.
        dim: the call's argument: an integer, a tuple, or None for all dims.
        what: name of the statistic, for the error.
    """
    over = reader.dims_of(dim, x)
    if sorted(d for o in over for d in x.axes[o].places) != list(range(reader.dims)):
        raise reader.refusal(
            f"takes {what} over rows or columns of the image only (dim {dim} of {x!r}); "
            f"supported: over all positions, over channels, or over both"
        )
    return over


def of_image(reader: Reader, x: Value, make: Callable[[], nn.Module], what: str = "") -> Value:
    """Add a layer for a statistic of each channel over all positions, and return its output.

    The output is a vector of the image; spatial dims have length 1 in it.

    Args:
        make: function that makes the layer of the statistic.
        what: suffix of the layer's name.
    """
    return reader.emit(lambda _: make(), [x], axes=without_places(x.axes), what=what)


def _alone(axes: Axes, dims: Sequence[int]) -> Axes:
    """Return the axes of a tensor after a reduction of its channel dims ``dims`` to length 1."""
    return tuple(axis._replace(cell=1) if d in dims else axis for d, axis in enumerate(axes))


def formed(reader: Reader, vector: Value, part: int = 0) -> Value:
    """Give a vector the dims that the current call's result has in user code, and return it.

    The two may differ in dims of length 1, such as those that ``keepdim=True`` keeps. Refuse a
    result that differs from ``vector`` in another way.

    Args:
        vector: a vector or line with length 1 along the reduced dims.
        part: index of the result if the call returns several.
    """
    axes = reader.made(vector, part)
    made = replace(vector, axes=axes)
    if not made.vector or _lengths(axes) != _lengths(vector.axes):
        raise reader.refusal(
            f"makes a tensor of {reader.call.shapes[part]} from {vector!r}, which is not "
            "supported: keep the shape of the vector; only dims of length 1 may be added or "
            "removed"
        )
    return made


def _lengths(axes: Axes) -> list[tuple]:
    """Return (number of channels, extent along the image) for each dim of a vector or line.

    The extent (:data:`distseg.models.axes.Extent`) says how a dim of a line depends on the image's
    size. Dims of length 1 are left out.
    """
    return [(axis.cell, axis.whole) for axis in axes if not axis.without_channels]


def variance(
    reader: Reader, x: Any, dim: Any, correction: float, what: str = "a variance"
) -> Value:
    """Add layers for a variance over spatial dims, and return the result.

    The variance may also be over channels, if it is over all spatial dims. The reduced dims are
    kept with length 1.

    Args:
        x: the map that the call reduces.
        dim: the call's argument: an integer, a tuple, or None for all dims.
        correction: as in ``torch.var``.
        what: name of the statistic, for errors.
    """
    x = reader.value(x)
    over = reader.dims_of(dim, x)
    rest = [d for d in over if x.axes[d].cell != 1]
    if not rest:
        return over_places(reader, x, over, partial(Variance, None, correction), "variance")
    all_places(reader, x, dim, what)
    kept = [d for d in range(x.rank) if d not in over]
    made = _alone(without_places(x.axes), rest)
    if any(axis.batch and axis.mixed for axis in x.axes) or max(
        [d for d in kept if x.axes[d].cell != 1], default=-1
    ) > min(rest):
        # Channels that are reduced together must be adjacent.
        x = turned(reader, x, [*kept, *over])
    groups = 1
    for d in kept:
        groups *= made[d].cell
    return reader.emit(
        lambda _: Variance(groups, correction), [x.as_plain], axes=made, what="variance"
    )


def root(x: Tensor) -> Tensor:
    """Return the square root of ``x`` >= 0, with the gradient 0 instead of infinity at 0."""
    some = x > 0
    return x.where(some, 1).sqrt() * some


def softmax(reader: Reader, x: Value, dim: int, log: bool) -> Value:
    """Add layers for a softmax along ``dim``, which holds positions, and return the result.

    The softmax is computed as exp(x - logsumexp(x)). If the dim holds channels too, as after
    ``x.flatten(1)``, it runs over both.

    Args:
        log: True for the logarithm of the softmax.
    """
    over = reader.dims_of(dim, x)
    total = over_places(reader, x, over, LogSumExp, "total")
    rest = tuple(d for d in over if x.axes[d].cell != 1)
    if rest:
        total = reader.applied(
            partial(torch.logsumexp, dim=rest, keepdim=True),
            [total],
            "total",
            _alone(total.axes, rest),
        )
    return reader.applied(_less if log else _share, beside(reader, x, total), "share")


def beside(reader: Reader, *values: Value) -> tuple:
    """Repeat the lines among some values to the size of the maps, so that all can be combined.

    A line is a vector whose length depends on the size of the image, such as row means.
    """
    return lines_spread(reader, values, {})[0]


def _less(x: Tensor, total: Tensor) -> Tensor:
    return x - total


def _share(x: Tensor, total: Tensor) -> Tensor:
    return (x - total).exp()


def norm(reader: Reader, x: Value, p: Any, dim: Any) -> Value:
    """Add layers for a norm over positions, or over positions and channels; return the result.

    The reduced dims are kept with length 1.

    Args:
        x: the map that the call reduces.
        p: the order of the norm: a number other than 0, infinity, "fro", or None for 2.
        dim: the dims over which the norm is taken, as user code gives them.
    """
    over = reader.dims_of(dim, x)
    rest = tuple(d for d in over if x.axes[d].cell != 1)
    if p in (float("inf"), float("-inf")):
        each = reader.applied(torch.abs if p > 0 else _less_than_nothing, [x], "size")
        found = _then(
            reader,
            over_places(reader, each, over, partial(Max, first=False), "largest"),
            torch.amax if not rest else None,
            rest,
        )
        return found if p > 0 else reader.applied(torch.neg, [found], "least")
    if p == 0 or not isinstance(p, (int, float)) and p not in ("fro", None):
        raise reader.refusal(
            f"takes a norm of order {p}; supported: numbers other than 0, and 'fro'"
        )
    squares = p in (2, "fro", None)
    if squares:
        each = reader.applied(torch.square, [x], "squares")
    elif p == 1:
        each = reader.applied(torch.abs, [x], "size")
    else:
        each = reader.applied(_Power(p), [x], "powers")
    total = _then(
        reader, over_places(reader, each, over, partial(Mean, total=True), "total"), torch.sum, rest
    )
    return total if p == 1 else reader.applied(root if squares else _Root(p), [total], "root")


def _less_than_nothing(x: Tensor) -> Tensor:
    return -x.abs()


class _Power:
    """Callable that computes ``abs(x) ** p`` of a tensor x."""

    __name__ = "power"

    def __init__(self, p: float):
        self.p = p

    def __call__(self, x: Tensor) -> Tensor:
        return x.abs() ** self.p


class _Root(_Power):
    """Callable that computes ``x ** (1 / p)`` for x >= 0, with the gradient 0 at x = 0."""

    __name__ = "root"

    def __call__(self, x: Tensor) -> Tensor:
        some = x > 0
        return x.where(some, 1) ** (1 / self.p) * some


def _then(
    reader: Reader, vector: Value, function: Callable[..., Tensor] | None, rest: tuple[int, ...]
) -> Value:
    """Reduce a norm over positions further, over dims of channels, and return the result.

    Args:
        vector: the norm over positions, with a number for each channel.
        function: reduction with arguments ``dim`` and ``keepdim``, such as ``torch.sum``.
        rest: dims of channels to reduce; () to return ``vector`` unchanged.

    Raises:
        CanNotCapture: ``rest`` is not empty, and ``function`` is None.
    """
    if not rest:
        return vector
    if function is None:
        raise reader.refusal(
            "takes a norm of order inf over channels and positions together, which is not "
            "supported: take it first over the positions, then over the channels"
        )
    return reader.applied(
        partial(function, dim=rest, keepdim=True), [vector], "channels", _alone(vector.axes, rest)
    )


def product(reader: Reader, a: Value, b: Value, heads: int, axes: Axes) -> Value:
    """Add layers for the products of two maps' channels, each summed over all positions.

    Return their output, a vector with heads * I * J numbers for each image.

    Args:
        a: map whose channels are heads * I.
        b: map whose channels are heads * J.
        heads: number of groups of channels; only channels of the same group are multiplied.
        axes: the meaning of each dim of the result in user code, such as (N, heads, I, J).
    """
    if a.sizes != b.sizes:
        raise reader.refusal(
            f"multiplies {a!r} with {b!r}, which have different spatial sizes: resize one of them"
        )
    if a.name == b.name and a.channels == b.channels:
        return reader.emit(lambda _: Products(heads), [a.as_plain], axes=axes)
    both = reader.emit(
        lambda _: Cat(),
        [a.as_plain, b.as_plain],
        axes=(a.as_plain.axes[0], Axis(cell=a.channels + b.channels), *a.as_plain.axes[2:]),
        what="factors",
    )
    return reader.emit(lambda _: Products(heads, a.channels), [both], axes=axes)


def largest_of(reader: Reader, x: Value, k: int, dim: int, least: bool = False) -> Value:
    """Add layers for the ``k`` largest numbers along a dim that holds all positions.

    Return these numbers as a vector, the largest first, with the length ``k`` along this dim.

    Args:
        x: a map such as (N, C, H * W).
        dim: the dim of the user's tensor along which the numbers are compared.
        least: True for the ``k`` smallest numbers, the smallest first.
    """
    (at,) = reader.dims_of(dim, x)
    if x.axes[at].places != tuple(range(reader.dims)) or x.axes[at].mixed:
        raise reader.refusal(
            "sorts within rows or columns of the image; supported: over channels, or over all "
            "positions in one dim (x.flatten(2))"
        )
    order = [d for d in range(x.rank) if d != at]
    axes = *(x.axes[d] for d in order), Axis(cell=k)
    x = reader.applied(torch.neg, [x], "turned") if least else x
    made = reader.emit(lambda _: Largest(k), [x.as_plain], axes=axes, what="largest")
    made = turned(reader, made, [*range(at), x.rank - 1, *range(at, x.rank - 1)])
    return reader.applied(torch.neg, [made], "back") if least else made
