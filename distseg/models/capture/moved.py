"""Helpers for the rules of slices, crops and paddings of the image.

The settings of these calls may depend on the image's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from distseg.models.capture.lining import of_trace
from distseg.models.capture.reader import Reader
from distseg.models.capture.values import Value
from distseg.models.moving import Slices
from distseg.models.resize import FitTo
from distseg.tiling.resize import in_front

Sides = tuple[tuple[int, int], ...]
"""For each spatial dim, the numbers of cells added at its start and end; negative ones remove."""


def dim_of_place(reader: Reader, x: Value, dim: int, what: str) -> int | None:
    """Return the spatial dim that a dim of the user's tensor holds; None for a dim of channels.

    For example, dim 1 of a tensor (N, H, W, C) holds spatial dim 0.

    Args:
        x: the user's tensor.
        dim: the dim of the tensor, counted from 0.
        what: verb phrase for what the call does, such as "pads", for the error message.

    Raises:
        CanNotCapture: the dim holds images or several spatial dims, or positions and channels.
    """
    axis = x.axes[dim]
    if axis.of_channels:
        return None
    if axis.batch or axis.cell != 1 or len(axis.places) != 1:
        images = (
            "images of the batch"
            if axis.batch and not axis.places
            else "several dims of the image, or positions and channels together"
        )
        raise reader.refusal(
            f"{what} {images}; it can be distributed if it "
            "concerns only channels, or only one dim of the image"
        )
    return axis.places[0]


def cut(reader: Reader, x: Value, wanted: dict[int, Sequence[slice]]) -> Value:
    """Add the layers that take a part of the map ``x`` by slices, and return their output.

    Args:
        wanted: for each spatial dim that is sliced, the slice for each traced image size.

    Raises:
        CanNotCapture: a slice is empty, has the same length in all traces, or has a step and a
            start that depends on the image's size.
    """
    each = {
        d: [range(size[d])[part] for part, size in zip(parts, x.sizes)]
        for d, parts in wanted.items()
    }
    each = {
        d: ranges
        for d, ranges in each.items()
        if any(len(r) < size[d] for r, size in zip(ranges, x.sizes))
    }
    for _d, ranges in each.items():
        if len({len(r) for r in ranges}) == 1:
            raise reader.refusal(
                f"takes a slice of length {len(ranges[0])} of the image, whatever the image's "
                "size; supported: a slice that grows with the image, such as x[:, :, 2:-2]"
            )
        if not all(ranges):
            raise reader.refusal("takes an empty slice of the image: keep at least one cell")
    fixed = {
        d: found
        for d, ranges in each.items()
        if (found := _fixed(ranges, wanted[d], x, d)) is not None
    }
    if fixed:
        settings = [[fixed.get(d, (0, 0, 1))[k] for d in range(reader.dims)] for k in range(3)]
        sizes = tuple(
            tuple(len(each[d][n]) if d in fixed else k for d, k in enumerate(size))
            for n, size in enumerate(x.sizes)
        )
        x = reader.emit(
            lambda _: Slices(*settings),
            [x],
            axes=x.axes,
            sizes=sizes,
            what="part" if len(fixed) < len(each) else "",
        )
        reader.size_rules[x.name] = tuple(map(tuple, settings))
    rest = {d: ranges for d, ranges in each.items() if d not in fixed}
    if any(r.step != 1 for ranges in rest.values() for r in ranges):
        raise reader.refusal(
            "takes every n-th position of the image, from a start that depends on the image's "
            "size; supported: a fixed start"
        )
    sides = []
    for n, size in enumerate(x.sizes):
        taken = {d: ranges[n] for d, ranges in rest.items()}
        sides.append(
            tuple(
                (-taken[d].start, taken[d].stop - size[d]) if d in taken else (0, 0)
                for d in range(reader.dims)
            )
        )
    return fitted(reader, x, sides) if rest else x


def _fixed(
    ranges: Sequence[range], parts: Sequence[slice], x: Value, d: int
) -> tuple[int, int, int] | None:
    """Return (start, number of cells left out at the end, step) of the slices of one spatial dim.

    Return None if these numbers are not equal in all traces.

    Args:
        ranges: the selected positions for each traced image size.
        parts: the slice for each traced image size.
        x: the map that is sliced.
        d: the spatial dim that is sliced, counted from 0.
    """
    behind = [size[d] - part.indices(size[d])[1] for part, size in zip(parts, x.sizes)]
    found = {(r.start, b, r.step) for r, b in zip(ranges, behind)}
    return found.pop() if len(found) == 1 else None


def fitted(
    reader: Reader, x: Value, sides: Sequence[Sides], mode: str = "constant", value: float = 0.0
) -> Value:
    """Add the layer that pads or crops the map ``x``, and return its output.

    Args:
        sides: for each trace and spatial dim, the numbers of cells to add at the start and at the
            end; negative numbers remove cells.
        mode: padding mode of ``F.pad``; ``value`` is the number for constant padding.
    """
    if not any(n for pairs in sides for pair in pairs for n in pair):
        return x
    if mode == "circular":
        raise reader.refusal(
            "is circular padding, which joins opposite borders of the image: use zeros, "
            "reflect or replicate"
        )
    sizes = tuple(
        tuple(n + a + b for n, (a, b) in zip(size, pairs)) for size, pairs in zip(x.sizes, sides)
    )
    if len(set(map(tuple, sides))) == 1:
        flat = [n for pair in reversed(sides[0]) for n in pair]
        kind = {"constant": "Constant", "reflect": "Reflection", "replicate": "Replication"}[mode]
        layer = getattr(nn, f"{kind}Pad{reader.dims}d")
        return reader.emit(
            lambda _: layer(flat, *((value,) if mode == "constant" else ())),
            [x],
            axes=x.axes,
            sizes=sizes,
        )
    fronts = [_front(reader, [pairs[d] for pairs in sides]) for d in range(reader.dims)]
    like, rules = reader.followed(x, sizes)
    return reader.following(
        lambda: FitTo(rules, fronts, mode, value),
        x,
        like,
        rules,
        tuple(fronts),
        axes=x.axes,
        sizes=sizes,
    )


def _front(reader: Reader, pairs: Sequence[tuple[int, int]]) -> str | int:
    """Return the rule that says how many of the cells added to a dim lie at its start.

    The rule is the argument ``side`` of :func:`distseg.tiling.resize.in_front`: a word such as
    "half", or a fixed number of cells.

    Args:
        pairs: for each trace, the numbers of cells added at the start and at the end of the dim.
            Negative numbers remove cells.

    Raises:
        CanNotCapture: no rule holds for all traces.
    """
    for side in ("half", "larger half", pairs[0][0], "all"):
        if all(in_front(side, a + b) == a for a, b in pairs):
            return side
    shown = ", ".join(f"{a} and {b}" for a, b in dict.fromkeys(pairs))
    raise reader.refusal(
        f"pads or crops the start and the end of a dim by ({shown}) cells, which follows no "
        "supported rule; supported: half of the difference on each side, a fixed number on one "
        "side, or all on one side"
    )


def padded(reader: Reader, x: Value, pad: tuple, mode: str, value: float) -> Value:
    """Add layers for ``F.pad`` of a map whose dims may be in any order; return the result.

    Args:
        pad, mode, value: as in ``F.pad``. Numbers in ``pad`` may depend on the image's size.
    """
    each = [of_trace(pad, n) for n in range(len(x.sizes))]
    if any(len(pads) % 2 or len(pads) > 2 * x.rank for pads in each):
        raise reader.refusal(
            f"has a padding {pad}, which does not fit {x!r}: give two numbers for each dim that is "
            f"padded"
        )
    dims = [x.rank - 1 - k for k in range(len(pad) // 2)]
    pairs = {dim: [(pads[2 * k], pads[2 * k + 1]) for pads in each] for k, dim in enumerate(dims)}
    pairs = {dim: found for dim, found in pairs.items() if any(map(any, found))}
    placed = {dim: dim_of_place(reader, x, dim, "pads") for dim in pairs}
    of_image = {d: pairs[dim] for dim, d in placed.items() if d is not None}
    sides = [
        tuple(of_image[d][n] if d in of_image else (0, 0) for d in range(reader.dims))
        for n in range(len(x.sizes))
    ]
    of_channels = [
        n
        for dim in dims
        for n in (
            (0, 0)
            if placed.get(dim) is not None
            else (pad[2 * (x.rank - 1 - dim)], pad[2 * (x.rank - 1 - dim) + 1])
        )
    ]
    if of_image and any(of_channels):
        raise reader.refusal("pads channels and spatial dims in one call: use two calls")
    if any(of_channels):
        return reader.formula((x, reader.fixed(pad, "padding"), mode, value), {})
    return fitted(reader, x, sides, mode, value or 0.0)


def places_taken(reader: Reader, x: Value, index: tuple) -> tuple[Value, tuple]:
    """Add layers for those slices of ``x[index]`` that belong to spatial dims.

    Return (sliced map, rest of the index). The rest has ``:`` in place of the applied slices. For
    example, the rest of ``x[:, 0, 2:]`` is (:, 0, :).
    """
    rest, wanted, dim = list(index), {}, 0
    for at, entry in enumerate(index):
        if entry is None:
            continue
        if entry is Ellipsis:
            dim = x.rank - sum(i is not None for i in index[at + 1 :])
            continue
        each = [of_trace(entry, n) for n in range(len(x.sizes))]
        if (
            dim < x.rank
            and x.axes[dim].places
            and all(isinstance(part, slice) for part in each)
            and any(part != slice(None) for part in each)
        ):
            wanted[_place(reader, x, dim)] = each
            rest[at] = slice(None)
        dim += 1
    return (cut(reader, x, wanted) if wanted else x), tuple(rest)


def _place(reader: Reader, x: Value, dim: int) -> int:
    found = dim_of_place(reader, x, dim, "takes a part of")
    assert found is not None
    return found


def differences(reader: Reader, x: Value, n: Any, dim: Any) -> Value:
    """Add layers for ``torch.diff(x, n, dim)`` along a spatial dim; return the result.

    Each of the ``n`` differences takes two slices and a subtraction.
    """
    (dim,) = reader.dims_of(dim, x)
    place = _place(reader, x, dim)
    for _ in range(n):
        behind = cut(reader, x, {place: [slice(1, None)] * len(x.sizes)})
        before = cut(reader, x, {place: [slice(None, -1)] * len(x.sizes)})
        x = reader.applied(_difference, [behind, before], "difference")
    return x


def _difference(a, b):
    return a - b
