"""Helpers for the rules of calls that reshape a tensor or select some of its channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from distseg.models.axes import Axis, axes_of, places_of, without_places
from distseg.models.capture.lining import Turned, expanded_line, of_trace, turned_line
from distseg.models.capture.reader import Reader, has_sizes
from distseg.models.capture.trace import CanNotCapture, Kept, Made
from distseg.models.capture.values import Sizes, Value
from distseg.models.layers import CutTo, Spread


def turned(reader: Reader, x: Value, order: Sequence[int]) -> Value:
    """Return ``x`` with its dims permuted to ``order``, as ``torch.permute`` does.

    Raises:
        CanNotCapture: the spatial dims would change their order.
    """
    order = reader.dims_of(tuple(order), x)
    axes = tuple(x.axes[d] for d in order)
    places = places_of(axes)
    if list(places) != sorted(places):
        raise reader.refusal(
            "changes the order of the spatial dims; supported: reorder dims of channels, or move "
            "them before or after the spatial dims"
        )
    if x.line:
        return turned_line(reader, x, order)
    cells = [d for d in order if x.axes[d].cell != 1]
    if cells == sorted(cells):
        return replace(x, axes=axes)
    return reader.applied(Turned(order), [x], "turned", axes)


def not_reshaped(reader: Reader, x: Value) -> CanNotCapture:
    """Return the error to raise for the current call, an unsupported reshape of ``x``."""
    return reader.refusal(
        f"turns {x!r} into a tensor of shape {reader.call.shapes[0]}, which mixes images, channels "
        f"and positions, or cuts the image into windows; supported: reshape channels only, or "
        f"flatten all positions into one dim"
    )


def spread(reader: Reader, x: Value, **settings) -> Value:
    """Add layers for the current call, which repeats a vector or a line over a map; return the map.

    Examples of such calls are ``mean.expand_as(x)`` and ``F.interpolate(pooled, size)``. A line is
    a vector whose length depends on the image's size, such as row means.

    Args:
        x: the vector or line.
        settings: keyword arguments of ``F.interpolate``, or nothing for other calls. In a call of
            ``F.interpolate``, ``x`` is a grid of fixed size, such as the output of an adaptive
            pooling, which the call resizes.
    """
    if x.line:
        axes = axes_of(
            [c.shapes[0] for c in reader.current], [t.batch for t in reader.traces], x.sizes
        )
        return expanded_line(reader, x, axes or ())
    if settings:
        grid, sizes = x.grid, tuple(c.shapes[0][2:] for c in reader.current)
        if settings["mode"] == "area" or set(sizes) == {grid}:
            raise reader.refusal(
                "resizes a grid of fixed size, such as the output of an adaptive pooling, by "
                "mode='area' or to its own size; supported: resize it to the size of a feature "
                "map by mode nearest, bilinear or bicubic"
            )
        return _over(reader, x, sizes, None, grid, settings)
    lengths = list(zip(*(c.shapes[0] for c in reader.current)))
    there = [
        d
        for d, axis in enumerate(x.axes)
        if axis == Axis() and d < len(lengths) and len(set(lengths[d])) > 1
    ]
    if len(lengths) != x.rank or not _is_size(len(there), reader.dims):
        raise reader.refusal(
            f"repeats {x!r} to the shape {reader.call.shapes[0]}; supported: repeat it over all "
            "positions of a feature map, as expand_as does"
        )
    sizes = tuple(zip(*(lengths[d] for d in there)))
    return _over(reader, x, sizes, there, (), {})


def _is_size(count: int, dims: int) -> bool:
    return count == dims


def _over(
    reader: Reader,
    x: Value,
    sizes: tuple,
    there: Sequence[int] | None,
    grid: Sequence[int],
    settings: dict,
) -> Value:
    """Add a layer that repeats a vector of the image at all positions of a map; return its output.

    Args:
        x: the vector that is repeated.
        sizes: the size of the map for each traced image size.
        there: the dims of the result that run along the map; None for a call of ``F.interpolate``.
        grid, settings: the arguments of :class:`Spread`.
    """
    like = reader.like(sizes)
    vector, axes = reader.resized(x, sizes), reader.made(like)
    kept = without_places(axes) if there is not None else x.axes
    if there is not None and kept != x.axes:  # channels are repeated too
        vector = reader.applied(
            _Expanded([axis.cell for axis in kept if not axis.batch]), [vector], "channels", kept
        )
    return reader.emit(lambda _: Spread(grid, **settings), [like, vector], axes=axes)


class _Expanded:
    """Callable that expands a tensor (N, ...) to (N, *lengths), as ``Tensor.expand`` does.

    It is a class, not a lambda, so that layers with it can be pickled.
    """

    __name__ = "expand"

    def __init__(self, lengths: Sequence[int]):
        self.lengths = tuple(lengths)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(len(x), *self.lengths)


def expanded(reader: Reader, x: Value) -> Value:
    """Add layers for the current call, which expands dims of ``x``; return the result.

    An example is ``x.expand(-1, 8)``. A dim of length 1 may be expanded to a number of channels, or
    to the positions of a map.
    """
    axes = reader.made(reader.value(x)) if not x.vector or not _follows(reader) else None
    if axes == x.axes:
        return x
    if axes is None:
        return spread(reader, x)
    if x.rank > len(axes) or any(axis.batch and axis.mixed and axis not in x.axes for axis in axes):
        raise not_reshaped(reader, x)
    lengths = [axis.cell if axis.of_channels else -1 for axis in axes]
    return reader.applied(_Lengthened(lengths), [x], "channels", axes)


class _Lengthened:
    """Callable that expands a tensor to the shape ``lengths``; an entry -1 keeps a dim's length."""

    __name__ = "expand"

    def __init__(self, lengths: Sequence[int]):
        self.lengths = tuple(lengths)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.lengths)


def _follows(reader: Reader) -> bool:
    """Return True if the shape of the current call's result differs between traces.

    Dim 0, the batch, does not count.
    """
    return any(
        len(set(lengths)) > 1 for lengths in list(zip(*(c.shapes[0] for c in reader.current)))[1:]
    )


def parts(reader: Reader, x: Any, args: tuple, dim: int) -> tuple[Value, ...]:
    """Add layers for the current call, which splits the channels of ``x``; return the parts.

    Args:
        args: all arguments of the call.
        dim: the dim that is split. It is refused if it does not hold channels only.
    """
    if not reader.of_channels(dim, reader.value(x)):
        raise reader.refusal(
            "cuts the image into parts; supported: split a dim that holds only channels"
        )
    return tuple(reader.formula(args, {}, part) for part in range(len(reader.call.shapes)))


def over_channels(
    reader: Reader,
    x: Any,
    args: tuple,
    dim: Any,
    why: str = "runs over positions of the image; supported: over channels",
) -> Value:
    """Add a layer for the current call, such as ``cumsum``, along channels; return its output.

    Args:
        args: all arguments of the call.
        dim: the call's argument: an integer or a tuple of them; None means all dims.
        why: text of the error for a dim of positions.

    Raises:
        CanNotCapture: ``dim`` includes images or positions.
    """
    if not reader.of_channels(dim, reader.value(x)):
        raise reader.refusal(why)
    return reader.formula(args, {})


def indexed(reader: Reader, x: Value, index: tuple, *values: Any) -> Value:
    """Add a layer for ``x[index]``, where the index selects channels, and return its output.

    Args:
        index: one entry for each indexed dim of the user's tensor, as in user code.
        values: empty, or the one value of the assignment ``x[index] = value``. Then the result is
            ``x`` after the assignment.

    Raises:
        CanNotCapture: the index selects images or positions, or has an unsupported entry.
    """
    entries = _entries(reader, x, index)
    if entries is None:
        raise reader.refusal(
            f"indexes {x!r} with an unsupported index; supported for channels: slices, integers, "
            f"lists of integers, and buffers of integers"
        )
    for axis, entry in zip(x.axes, (e for e in entries if e is not None)):
        if axis.batch and entry != slice(None):
            raise reader.refusal(
                "selects some images of the batch; supported: the same selection for every image, "
                "x[:, ...]"
            )
        if axis.places and entry != slice(None):
            raise reader.refusal(
                "takes a part of the image by an index that is not a slice; supported: slices of "
                "the image, such as x[:, :, 2:-2], and parts of the channels, such as x[:, 5]"
            )
    return reader.formula((x, index, *values), {})


def _entries(reader: Reader, x: Value, index: tuple) -> list | None:
    """Return the index as a list with one entry for each dim of ``x``, and None for each new dim.

    An ellipsis, and dims that the index leaves out, become full slices. Return None instead of a
    list if an entry is neither a slice, an integer, a tuple of integers nor a tensor.
    """

    def single(i):
        return (
            i is None
            or i is Ellipsis
            or isinstance(i, (slice, int, Kept, Made))
            or isinstance(i, tuple)
            and all(isinstance(n, int) for n in i)
            or x.line
            and isinstance(i, Sizes)
        )

    if (
        sum(i is Ellipsis for i in index) > 1
        or not all(map(single, index))
        or any(isinstance(i, bool) for i in index)
    ):
        return None
    at = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    there = x.rank - sum(i is not None and i is not Ellipsis for i in index)
    return [*index[:at], *[slice(None)] * there, *index[at + 1 :]]


def cut_to(reader: Reader, x: Value, index: Sequence) -> Value | None:
    """Add a layer for ``x[index]``, a crop of ``x`` to another map's size; return its output.

    The index must remove cells at the end of spatial dims, as in ``x[:, :, :h, :w]``. Return None
    if it does anything else, or if no map has the size of the result.
    """
    each = [_whole_index(of_trace(tuple(index), n), x.rank) for n in range(len(x.sizes))]

    def first(i):
        return (
            isinstance(i, slice)
            and i.start in (None, 0)
            and i.step in (None, 1)
            and (i.stop is None or i.stop >= 0)
        )

    if any(
        i is None or not all(map(first, i)) or any(s.stop is not None for s in i[: -reader.dims])
        for i in each
    ):
        return None
    if not x.plain:
        reader.unfold(x)
        return None
    sizes = tuple(c.shapes[0][-reader.dims :] for c in reader.current)
    if sizes == x.sizes:
        return x
    like = reader.same_places(sizes)
    return None if like is None else reader.emit(lambda _: CutTo(), [x, like])


def _whole_index(index: tuple, rank: int) -> list | None:
    """Return the index as a list of ``rank`` entries, one for each dim of the indexed tensor.

    An ellipsis, and dims that the index leaves out, become full slices. Return None if the index
    has other entries than slices, integers and one ellipsis.
    """
    if sum(i is Ellipsis for i in index) > 1 or not all(
        i is Ellipsis or isinstance(i, (slice, int)) for i in index
    ):
        return None
    at = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    return [*index[:at], *[slice(None)] * (rank - len(index) + (at < len(index))), *index[at + 1 :]]


def filled_up(reader: Reader, x: Value, pad: tuple) -> int | None:
    """Return m if ``pad`` pads each spatial dim at its end to a multiple of m.

    For example, m is 32 if user code pads images so that 32 divides their height and width. Return
    None if the padding is the same for all image sizes, or follows another rule.

    Args:
        pad: the argument of ``F.pad``.
    """
    if not has_sizes(pad):
        return None
    each = [(*of_trace(pad, n), *(0,) * (2 * reader.dims - len(pad))) for n in range(len(x.sizes))]
    pairs = [
        (n, behind)
        for size, sides in zip(x.sizes, each)
        for n, behind in zip(reversed(size), sides[1::2])
    ]
    if any(any(sides[::2]) or len(sides) > 2 * reader.dims for sides in each):
        return None
    return next(
        (
            m
            for m in range(2, _LARGEST_MULTIPLE + 1)
            if all(-n % m == behind for n, behind in pairs)
        ),
        None,
    )


# Largest multiple m that filled_up tries.
_LARGEST_MULTIPLE = 256


def whole(reader: Reader, kernel: Any, x: Value) -> bool:
    """Return True if a pooling kernel covers the whole map ``x``, for each traced image size.

    Args:
        kernel: the kernel size, a number or a tuple.
    """
    return all(reader.each(of_trace(kernel, n)) == size for n, size in enumerate(x.sizes))
