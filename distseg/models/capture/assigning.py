"""Make layers of assignments to positions of the image.

Examples are ``up[:, :, ::2, 1::2] = x``, ``x[:, :, :1] = 0`` and ``y[:, :8, 1:] = x[:, :8, :-1]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distseg.models.axes import Axis
from distseg.models.capture.lining import of_trace
from distseg.models.capture.moved import dim_of_place, fitted
from distseg.models.capture.placing import emitted
from distseg.models.capture.positions import Marked, Plan
from distseg.models.capture.reader import Reader
from distseg.models.capture.values import Value

_WHAT = "assigns to a part of"


def assigns_to_places(x: Value, index: tuple, traces: int) -> bool:
    """Return True if ``x[index] = ...`` assigns to some positions of the image, not to all.

    Return False for an index that adds dims.

    Args:
        traces: the number of traces. An entry of the index may differ between them.
    """
    entries = _entries(x, index)
    return entries is not None and any(
        x.axes[dim].places and any(of_trace(entry, n) != slice(None) for n in range(traces))
        for dim, entry in entries
    )


def _entries(x: Value, index: tuple) -> list[tuple[int, Any]] | None:
    """Return a pair (dim of ``x``, entry) for each entry of the index except an ellipsis.

    For example, the index ``[..., 2:, 0]`` of a map (N, C, H, W) gives [(2, 2:), (3, 0)]. Return
    None if the index adds dims.
    """
    if any(i is None for i in index):
        return None
    at = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    behind = x.rank - len(index)
    return [(n if n < at else n + behind, i) for n, i in enumerate(index) if i is not Ellipsis]


def assigned(reader: Reader, x: Value, index: tuple, value: Any) -> Value:
    """Add layers for the assignment ``x[index] = value``, and return the changed ``x``.

    Args:
        value: a number, a vector of the image, or a map of the size of the selected part.
    """
    entries, traces = _entries(x, index), range(len(x.sizes))
    wanted: dict[int, list[slice]] = {}
    marks: dict[int, int] = {}
    channels: list[Any] = [slice(None)] * x.rank
    for dim, entry in entries or ():
        if x.axes[dim].places and any(of_trace(entry, n) != slice(None) for n in traces):
            place = dim_of_place(reader, x, dim, _WHAT)
            wanted[place], marks[place] = (
                [_as_slice(reader, of_trace(entry, n)) for n in traces],
                index.index(entry),
            )
            if isinstance(entry, int) and isinstance(value, Value):
                raise reader.refusal(
                    "assigns a feature map to one row or column of the image; supported: assign a "
                    "number to it, or a feature map to a slice"
                )
        elif x.axes[dim].of_channels:
            channels[dim] = reader.fixed(entry, "index")
            if not isinstance(entry, slice):
                raise reader.refusal(
                    "assigns to channels by an index that is not a slice, and to a part of the "
                    "image; supported: slices, such as x[:, 3:4, ::2] instead of x[:, 3, ::2]"
                )
    part = x if all(i == slice(None) for i in channels) else _part(reader, x, tuple(channels))
    mask_axes = tuple(axis if axis.places or axis.batch else Axis() for axis in x.axes)
    if any(axis.mixed or len(axis.places) > 1 for axis in mask_axes):
        raise reader.refusal(
            f"{_WHAT} {x!r}, in which dims are joined or flattened: assign earlier, to a feature "
            "map such as (N, C, H, W)"
        )
    plan = Plan(Marked(reader.number, tuple(marks.items())), (), {}, frozenset())
    mask = replace(emitted(reader, plan, x, mask_axes), dtype=torch.bool)
    if isinstance(value, (int, float)):
        made = reader.applied(_Filled(value), [mask, part], "assigned", part.axes)
    else:
        made = reader.applied(
            _chosen,
            [mask, _put(reader, x, part, wanted, reader.value(value)), part],
            "assigned",
            part.axes,
        )
    return (
        made if part is x else reader.applied(_Put(tuple(channels)), [x, made], "channels", x.axes)
    )


def _as_slice(reader: Reader, entry: Any) -> slice:
    """Return an entry of an index as a slice; an integer becomes a slice of length 1."""
    if isinstance(entry, int) and not isinstance(entry, bool):
        return slice(entry, entry + 1 or None)
    if not isinstance(entry, slice):
        raise reader.refusal(
            "assigns to positions of the image by an index that is neither a slice nor a number: "
            "use slices, or torch.where with a mask"
        )
    return entry


def _part(reader: Reader, x: Value, index: tuple) -> Value:
    """Add a layer that takes the channels of ``x`` that an index selects; return its output.

    Args:
        index: for each dim of the user's tensor a slice, which is ``:`` for images and positions.
    """
    cells = [
        axis if not axis.of_channels else axis._replace(cell=len(range(axis.cell)[i]))
        for axis, i in zip(x.axes, index)
    ]
    return reader.applied(_Taken(index), [x], "part", tuple(cells))


def _put(
    reader: Reader, x: Value, part: Value, wanted: dict[int, Sequence[slice]], value: Value
) -> Value:
    """Add layers that move the cells of ``value`` to the assigned positions in a map like ``x``.

    Return this map. Its numbers at other positions are not defined, and the caller does not use
    them. If ``value`` is a vector, return a vector, because it is the same at all positions.

    Args:
        x: the map to which user code assigns.
        part: the channels of ``x`` to which user code assigns.
        wanted: for each indexed spatial dim (0 for the first one), the slice for each traced image
            size.
        value: the vector or map that user code assigns. A map has the size of the slices.
    """
    if value.vector:
        return reader.meeting([value, x])[0]
    ranges = {
        d: [range(size[d])[i] for i, size in zip(slices, x.sizes)] for d, slices in wanted.items()
    }
    sizes = tuple(
        tuple(len(ranges[d][n]) if d in ranges else k for d, k in enumerate(size))
        for n, size in enumerate(x.sizes)
    )
    if value.axes != part.axes or value.sizes != sizes:
        raise reader.refusal(
            f"assigns {value!r} to a part of {x!r}, but this part has another shape, with "
            f"{'x'.join(map(str, sizes[0]))} positions: assign a feature map of exactly the shape "
            "of the part"
        )
    steps = {d: {r.step for r in each} for d, each in ranges.items()}
    if any(len(found) > 1 for found in steps.values()):
        raise reader.refusal(
            "assigns to every n-th position of the image, where n depends on the image's size: use "
            "a fixed n"
        )
    factors = tuple(float(min(steps[d])) if d in steps else 1.0 for d in range(reader.dims))
    if set(factors) != {1.0}:
        larger = tuple(tuple(int(n * f) for n, f in zip(size, factors)) for size in sizes)
        value = reader.emit(
            lambda _: nn.Upsample(scale_factor=factors),
            [value],
            axes=value.axes,
            sizes=larger,
            what="spread",
        )

    def first(d, n):
        return ranges[d][n].start if d in ranges else 0

    sides = [
        tuple((first(d, n), k - m - first(d, n)) for d, (k, m) in enumerate(zip(size, there)))
        for n, (size, there) in enumerate(zip(x.sizes, value.sizes))
    ]  # fmt: skip
    return fitted(reader, value, sides)


class _Filled:
    """Callable ``(mask, x)`` that returns ``x`` with ``number`` where the bool tensor is True."""

    __name__ = "where"

    def __init__(self, number: float):
        self.number = number

    def __call__(self, mask: Tensor, x: Tensor) -> Tensor:
        return x.masked_fill(mask, self.number)


def _chosen(mask: Tensor, value: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, value, x)


class _Taken:
    """Callable ``(x)`` that returns ``x[index]``, a part of the channels of the tensor ``x``.

    Args:
        index: a slice for each dim of the tensor.
    """

    __name__ = "part"

    def __init__(self, index: tuple):
        self.index = index

    def __call__(self, x: Tensor) -> Tensor:
        return x[self.index]


class _Put(_Taken):
    """Callable ``(x, value)`` that returns a copy of ``x`` after ``x[index] = value``."""

    def __call__(self, x: Tensor, value: Tensor) -> Tensor:
        y = x.clone()
        y[self.index] = value
        return y
