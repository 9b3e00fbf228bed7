"""Helpers for the rules of calls that reduce maps to lines, or that repeat lines over maps.

A line is a vector whose length depends on the size of the map, such as a mean over columns. A
function of only lines and vectors is computed on whole lines
(:class:`distseg.models.lines.OfLines`). If a line is combined with a map, or with a line along
another dim, the line is repeated along the missing dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distseg.models.axes import Axes, Axis, along, extent_of, lines_of, places_of
from distseg.models.capture.trace import found_in
from distseg.models.capture.values import Sizes, Value
from distseg.models.layers import Mean, Spread
from distseg.models.lines import Along, AlongLines

if TYPE_CHECKING:
    from distseg.models.capture.reader import Reader


def places_along_dims(x: Value, over: Sequence[int]) -> tuple[int, ...]:
    """Return the spatial dims of the image (0 for the first) that dims of the user's tensor hold.

    For example, dims 2 and 3 of a tensor (N, C, H, W) hold the spatial dims (0, 1).

    Args:
        over: the dims of the user's tensor.
    """
    return tuple(sorted(d for o in over for d in x.axes[o].places))


def takes_lines(x: Value, over: Sequence[int]) -> bool:
    """Return True if a statistic of ``x`` is taken over some spatial dims, but not over all.

    Its result is a line, such as row means: a vector whose length depends on the image's size.

    Args:
        over: dims of the user's tensor over which the statistic is taken.
    """
    return not x.vector and 0 < len(places_along_dims(x, over)) < x.dims


def of_lines(
    reader: Reader, x: Value, over: Sequence[int], make: Callable[[], Mean], what: str = ""
) -> Value:
    """Add a layer for a statistic of a map over some spatial dims, such as a mean of each column.

    Return the layer's output. It is a line: its length is 1 along the spatial dims over which the
    statistic is taken, as with keepdim=True, and the map's length along the others.

    Args:
        over: dims of the user's tensor over which the statistic is taken.
        make: class of the statistic, such as ``Mean``, or another function without arguments that
            returns such a layer.
        what: suffix of the new layer's name.
    """
    if any((axis.batch or axis.cell != 1) and axis.places for axis in x.axes):
        raise reader.refusal(
            f"combines rows or columns of {x!r}, in which rows or columns share a dim with images "
            f"or channels: reshape the tensor before, so that rows and columns have their own dims"
        )
    gone = places_along_dims(x, over)
    kept = [d for d in range(x.dims) if d not in gone]

    def stays(o):
        return bool(x.axes[o].places) and not set(x.axes[o].places) & set(gone)

    order = [*(o for o in range(x.rank) if not stays(o)), *(o for o in range(x.rank) if stays(o))]
    axes = tuple(
        _line_axis(x.axes[o]) if stays(o) else x.axes[o]._replace(places=()) for o in order
    )
    made = reader.emit(lambda _: AlongLines(make(), kept), [x], axes=axes, what=what)
    return turned_line(reader, made, [order.index(o) for o in range(x.rank)])


def _line_axis(axis: Axis) -> Axis:
    return Axis(whole=((1, axis.places),))


def turned_line(reader: Reader, x: Value, order: Sequence[int]) -> Value:
    """Permute the dims of a line or vector to ``order``, and return it."""
    axes = tuple(x.axes[d] for d in order)
    moved = [d for d in order if not x.axes[d].without_channels and not x.axes[d].batch]
    if moved == sorted(moved) and not any(
        axis.batch and not axis.without_channels for axis in axes
    ):
        return replace(x, axes=axes)
    return reader.applied(Turned(order), [x], "turned", axes)


class Turned:
    """Callable that permutes the dims of a tensor to ``order``.

    It is a class, not a lambda, so that layers with it can be copied and pickled.
    """

    __name__ = "permute"

    def __init__(self, order: Sequence[int]):
        self.order = tuple(order)

    def __call__(self, x):
        return x.permute(self.order)


def lines_spread(reader: Reader, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a pointwise function, with lines repeated to the size of a map.

    A line is a vector whose length depends on the size of the image, such as row means. If a map is
    among the arguments, the lines are repeated to its size. Without a map, lines that together have
    all spatial dims, such as row means and column means, are repeated to the map that they span.
    """
    values = list(dict.fromkeys(found_in((args, kwargs), Value)))
    if not any(x.line for x in values):
        return args, kwargs
    like = next((x for x in values if not x.vector), None)
    target = _across(values) if like is None else like.axes
    if target is None:
        return args, kwargs
    like = like or reader.map_of_lines([x for x in values if x.line])
    there = {x: line_at(reader, x, like, target) for x in values if x.line}
    return reader.replaced(args, there), reader.replaced(kwargs, there)


def _across(values: Sequence[Value]) -> Axes | None:
    """Return the axes of the map to which several lines are broadcast together.

    A line is a vector whose length depends on the size of the image. For example, row means
    (N, C, H, 1) and column means (N, C, 1, W) are broadcast to a map (N, C, H, W). Return None if a
    spatial dim of the image has no line.

    Args:
        values: the operands of a pointwise call: lines, and possibly other vectors.
    """
    rank, found = max(x.rank for x in values), []
    for back in range(rank, 0, -1):
        there = {x.axes[-back] for x in values if x.rank >= back} - {Axis()}
        line = next((axis for axis in there if axis.whole), None)
        found.append(line if line is not None else next(iter(there), Axis()))
    dims = lines_of(tuple(found))
    if dims is None or list(dims) != list(range(values[0].dims)):
        return None
    return tuple(Axis(places=axis.whole[0][1]) if axis.whole else axis for axis in found)


def line_at(reader: Reader, x: Value, like: Value, target: Axes) -> Value:
    """Add a layer that repeats the line ``x`` over all positions of a map, and return its output.

    A line is a vector whose length depends on the size of the image, such as row means.

    Args:
        like: a map of the size to which the line is repeated. Its numbers are not used.
        target: the axes of the tensor with which user code combines the line. The result has the
            same spatial dims.

    Raises:
        CanNotCapture: ``x`` belongs to a map of another size, or its dims do not match ``target``.
    """
    if x.sizes != like.sizes:
        raise reader.refusal(
            f"combines {like!r} with {x!r}, but this vector was computed from a feature map of "
            "another size: compute it from a feature map of the same size"
        )
    axes = (*(Axis(),) * (len(target) - x.rank), *x.axes)
    if len(axes) > len(target) or not all(
        _fits(axis, beside) for axis, beside in zip(axes, target)
    ):
        raise reader.refusal(
            f"combines {like!r} with {x!r}, but their dims do not match: bring them into the same "
            "order (permute or reshape), with length 1 in each dim that one of them lacks, such as "
            "(N, C, H, 1) beside (N, C, H, W)"
        )
    order = sorted(range(len(axes)), key=lambda d: bool(axes[d].whole))
    first = turned_line(reader, replace(x, axes=axes), order)
    kept = lines_of(axes) or ()
    made = tuple(beside if beside.places else axis for axis, beside in zip(axes, target))
    return replace(
        reader.emit(lambda _: Spread(kept=kept), [like, first], axes=made, what="places"),
        dtype=x.dtype,
    )


def _fits(axis: Axis, beside: Axis) -> bool:
    """Return True if a dim of a line can be broadcast to the same dim of a map.

    If the map's dim has positions, the line's dim must have length 1, or run along the same single
    spatial dim. Otherwise the length of the line's dim must not depend on the image's size.

    Args:
        axis: the meaning of the line's dim.
        beside: the meaning of the map's dim.
    """
    if not beside.places:
        return not axis.whole
    return (
        axis == Axis()
        or len(beside.places) == 1
        and beside.cell == 1
        and not beside.batch
        and axis == Axis(whole=along(beside.places[0]))
    )


def expanded_line(reader: Reader, x: Value, target: Axes) -> Value:
    """Add a layer for the current call, which expands the line ``x`` to a map; return the map.

    Args:
        target: the axes of this map.
    """
    if places_of(target) != tuple(range(reader.dims)):
        raise reader.refusal(
            f"repeats {x!r} to the shape {reader.call.shapes[0]}; supported: repeat it over all "
            "positions of a feature map"
        )
    return line_at(reader, x, reader.map_of_lines([x]), target)


def rows_pooled(reader: Reader, x: Value) -> tuple[int, ...]:
    """Return the dims that the current call, a pooling, reduces to length 1; it keeps the others.

    The dims are those of the user's tensor (N, C, *size), so the first spatial dim is 2. Return an
    empty tuple if the pooling changes the length of another dim, or reduces all or none.
    """
    made = [c.shapes[0][2:] for c in reader.current]
    gone = [d for d in range(x.dims) if all(size[d] == 1 for size in made)]
    kept = [d for d in range(x.dims) if d not in gone]
    stays = all(size[d] == before[d] for size, before in zip(made, x.sizes) for d in kept)
    return tuple(2 + d for d in gone) if stays and 0 < len(gone) < x.dims else ()


def rows_taken(
    reader: Reader, x: Value, kernel: Any, padding: Any, dilation: Any = 1
) -> tuple[int, ...]:
    """Return the dims of ``x`` that a pooling with this kernel reduces to length 1.

    The kernel must be as long as the map along these dims, and of length 1 along the other spatial
    dims. Return an empty tuple for any other pooling. The dims are those of the user's tensor
    (N, C, *size), so the first spatial dim is 2.

    Args:
        x: the map that is pooled.
        kernel, padding, dilation: arguments of the pooling, numbers or tuples.
    """
    over = rows_pooled(reader, x)
    for n, size in enumerate(x.sizes):
        each = [reader.each(of_trace(setting, n)) for setting in (kernel, padding, dilation)]
        if any(
            k != (m if 2 + d in over else 1) or p or s != 1
            for d, (k, p, s, m) in enumerate(zip(*each, size))
        ):
            return ()
    return over


def number_by_size(each: Sequence[Any], sizes: Sequence[Sequence[int]]) -> Any:
    """Return an integer or a slice as an expression of the map's size, such as height - 1.

    The result is an :class:`distseg.models.lines.Along`, or a slice whose ends may be such objects.
    Return None if no :data:`distseg.models.axes.Extent` gives the number in all traces.

    Args:
        each: the integer or slice for each traced image size.
        sizes: the size of the map for each traced image size.
    """
    if all(isinstance(x, slice) for x in each):
        ends = [[getattr(x, end) for x in each] for end in ("start", "stop", "step")]
        found = [end[0] if len(set(end)) == 1 else number_by_size(end, sizes) for end in ends]
        return (
            None
            if any(x is None and end[0] is not None for x, end in zip(found, ends))
            else slice(*found)
        )
    if not all(type(x) is int for x in each):
        return None
    extent = extent_of(each, sizes)
    return None if extent is None else Along(extent)


def of_trace(tree: Any, number: int) -> Any:
    """Return a setting as it is in one trace: a plain number replaces each ``Sizes`` in it.

    Args:
        tree: a setting or nested tuples of settings, such as a kernel size or an index.
        number: the index of the trace.
    """
    if isinstance(tree, tuple):
        return tuple(of_trace(x, number) for x in tree)
    return tree.each[number] if isinstance(tree, Sizes) else tree
