"""Reshapes between positions and channels: space to depth and back.

A dim may hold several things at once: (N, C * H, W) has channels and rows in dim 1. Each of these
factors is a *piece*: the images of the batch, channels, or positions along a spatial dim. A reshape
keeps the order of the pieces in memory, but may split and join them. If it splits a spatial dim
into blocks of length k, the k positions in a block become channels. If it joins a spatial dim with
the channels after it, these become positions::

    (N, C, H, W) -> (N, C, H / 2, 2, W / 2, 2)      blocks of 2 x 2 positions as channels (2, 2)
    (N, C, H, 2, W, 2) -> (N, C, H * 2, W * 2)      the reverse
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distseg.models.axes import Axis, order_of, places_of
from distseg.models.capture.arranging import not_reshaped, turned
from distseg.models.capture.reader import Reader
from distseg.models.capture.trace import CanNotCapture
from distseg.models.capture.values import Value
from distseg.models.moving import Blocks, Windows

Lengths = tuple[int, ...]
"""Length of a dim in each trace."""


@dataclass
class _Piece:
    """One factor of a tensor's dim: the images, channels, or positions along a spatial dim.

    For example, a dim of length C * H has two pieces.

    Attributes:
        lengths: the length of the factor for each traced image size.
        batch: True for images of the batch.
        place: the spatial dim; None for images and channels.
        inner: True for the positions within a block, which become channels.
    """

    lengths: Lengths
    batch: bool = False
    place: int | None = None
    inner: bool = False


def reshaped(reader: Reader, x: Value) -> Value:
    """Return the result of the current call, a reshape of ``x``; add layers if needed.

    Layers are needed if the captured network must hold the numbers in another order than before, as
    after a split of positions into blocks.

    Raises:
        CanNotCapture: the reshape is not supported (:func:`not_reshaped`).
    """
    try:
        axes = reader.made(x)
    except CanNotCapture:
        axes = None
    if axes is not None and (
        order_of(axes) == order_of(x.axes) if not x.line else _in_order(axes) == _in_order(x.axes)
    ):
        return replace(x, axes=axes)  # memory order is unchanged
    if (
        x.rank > 2
        and x.axes[0].cell > 1
        and x.axes[0].of_channels
        and x.axes[1] == Axis(True)
        and axes == (Axis(True, x.axes[0].cell), *x.axes[2:])
    ):
        return replace(x, axes=axes, joined=True)  # stacked batches become joined ones
    made = None if x.vector else regrouped(reader, x)
    if made is None:
        raise not_reshaped(reader, x)
    return replace(made, dtype=x.dtype)


def _in_order(axes: Sequence[Axis]) -> tuple[Axis, ...] | None:
    """Return the axes of the dims before the batch dim of a line, without dims of length 1.

    A line is a vector whose length depends on the size of the image, such as row means. A reshape
    that keeps these dims keeps the order in memory: the dims after the batch dim can only be split
    or joined in their order.
    """
    dims = [axis for axis in axes if axis != Axis()]
    return tuple(dims[: next((n for n, axis in enumerate(dims) if axis.batch), len(dims))])


def regrouped(reader: Reader, x: Value) -> Value | None:
    """Add layers that reshape the map ``x`` as the current call does, and return their output.

    A spatial dim may be split into blocks, whose inner positions become channels. It may also be
    joined with channels, which become positions. Return None if neither gives the shape of the
    call's result.
    """
    wanted = list(zip(*(call.shapes[0] for call in reader.current)))
    groups = _grouped(_pieces(reader, x), wanted)
    if groups is None:
        return None
    made = _joined(reader, _cut(reader, x, groups), groups)
    return None if made is None or list(places_of(made.axes)) != list(range(reader.dims)) else made


def _pieces(reader: Reader, x: Value) -> list[_Piece]:
    """Split the dims of ``x`` into factors: images, channels and positions, in memory order."""
    found = []
    for axis in x.axes:
        if axis.batch:
            found.append(_Piece(tuple(t.batch for t in reader.traces), batch=True))
        if axis.cell != 1:
            found.append(_Piece((axis.cell,) * len(x.sizes)))
        found += [_Piece(tuple(size[d] for size in x.sizes), place=d) for d in axis.places]
    return found


def _grouped(pieces: Sequence[_Piece], wanted: Sequence[Lengths]) -> list[list[_Piece]] | None:
    """Distribute the pieces of a reshaped map over the dims of the reshape's result.

    A piece is one factor of a dim: images, channels, or positions along a spatial dim. It is split
    if only a part of it fits into a dim. Return the list of pieces of each dim. Return None if the
    pieces cannot give the lengths ``wanted``, or if a block of a spatial dim would not have the
    same length in all traces.

    Args:
        pieces: the pieces of the reshaped map, in memory order.
        wanted: for each dim of the result, its length for each traced image size.
    """
    left, groups = list(reversed(pieces)), []
    for lengths in wanted:
        group: list[_Piece] = []
        while set(lengths) != {1}:
            if not left:
                return None
            piece = left.pop()
            if more := _quotient(lengths, piece.lengths):
                group.append(piece)
                lengths = more
            elif inner := _quotient(piece.lengths, lengths):
                if (
                    piece.batch
                    or piece.place is not None
                    and not piece.inner
                    and len(set(inner)) > 1
                ):
                    return None
                group.append(_Piece(lengths, place=piece.place, inner=piece.inner))
                left.append(_Piece(inner, place=piece.place, inner=piece.place is not None))
                lengths = (1,) * len(lengths)
            else:
                return None
        groups.append(group)
    return None if left else groups


def _quotient(large: Lengths, small: Lengths) -> Lengths | None:
    return (
        tuple(n // m for n, m in zip(large, small))
        if all(n % m == 0 for n, m in zip(large, small))
        else None
    )


def _cut(reader: Reader, x: Value, groups: Sequence[Sequence[_Piece]]) -> Value:
    """Split the dims of the map ``x`` into their factors (pieces), one dim for each; return it.

    Where a spatial dim is split into blocks of length k, the k positions inside a block become
    channels, for example (N, C, H, W) -> (N, C, H / 2, 2, W / 2, 2).

    Args:
        groups: for each dim of the reshape's result, the pieces that it consists of
            (:func:`_grouped`).
    """
    pieces = [piece for group in groups for piece in group]
    inner = [
        math.prod(p.lengths[0] for p in pieces if p.inner and p.place == d)
        for d in range(reader.dims)
    ]
    if math.prod(inner) > 1:
        sizes = tuple(tuple(n // k for n, k in zip(size, inner)) for size in x.sizes)
        of_channels = [p for p in pieces if p.place is None and not p.batch]
        # The layer Windows returns channels in this order: the map's channels, then the positions
        # inside blocks, by spatial dim.
        of_blocks = sorted((p for p in pieces if p.inner), key=lambda p: p.place)
        order = [
            *(p for p in pieces if p.batch),
            *of_channels,
            *of_blocks,
            *(p for p in pieces if p.place is not None and not p.inner),
        ]
        x = reader.emit(
            lambda _: Windows(inner, inner),
            [x],
            axes=tuple(map(_axis, order)),
            sizes=sizes,
            what="blocks",
        )
        at = {id(p): n for n, p in enumerate(order)}
        return turned(reader, x, [at[id(p)] for p in pieces])
    return Value(x.name, x.shapes, tuple(map(_axis, pieces)), x.dtype)


def _axis(piece: _Piece) -> Axis:
    if piece.batch:
        return Axis(True)
    return (
        Axis(cell=piece.lengths[0])
        if piece.place is None or piece.inner
        else Axis(places=(piece.place,))
    )


def _joined(reader: Reader, x: Value, groups: Sequence[Sequence[_Piece]]) -> Value | None:
    """Join the dims of ``x``, one for each piece, to those of a reshape's result; return it.

    A piece is one factor of a dim. Channels that follow a spatial dim within a dim of the result
    become positions, for example (N, C, H, 2, W, 2) -> (N, C, H * 2, W * 2). Return None if images
    are not the first piece of their dim.

    Args:
        x: a map with one dim for each piece (:func:`_cut`).
        groups: for each dim of the result, the pieces that it consists of.
    """
    cells, along, made = [], [], []
    for group in groups:
        last, axis = None, Axis()
        for piece in map(_axis, group):
            if piece.batch:
                if axis != Axis():
                    return None
                axis = piece
            elif piece.places:
                last = piece.places[0]
                axis = axis._replace(places=(*axis.places, last))
            else:
                cells.append(piece.cell)
                along.append(last)
                if last is None:
                    axis = axis._replace(cell=axis.cell * piece.cell)
        made.append(axis)
    if all(d is None for d in along):
        return Value(x.name, x.shapes, tuple(made), x.dtype)
    layer = Blocks(cells, along)
    sizes = tuple(
        tuple(n * f for n, f in zip(size, layer.factors(reader.dims))) for size in x.sizes
    )
    return reader.emit(
        lambda _: Blocks(cells, along), [x], axes=tuple(made), sizes=sizes, what="places"
    )
