"""Functions that cut feature maps to a box, and pad them where the box reaches beyond the map."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from distseg.models.layers import is_vector
from distseg.tiling.layout import LayerView
from distseg.tiling.tile import Box


def cropped(x: Tensor, have: Box, wanted: Box) -> Tensor:
    """Return a view of the part of ``x`` inside ``wanted``. ``have`` is the box of ``x``.

    If ``x`` is a vector, it is returned whole.
    """
    if have == wanted or is_vector(x, have.size):
        return x
    return x[(..., *wanted.relative_to(have).slices)]


def fitted(x: Tensor, have: Box, wanted: Box) -> tuple[Tensor, list[tuple[int, int]]]:
    """Cut ``x`` to ``wanted``, and count the missing cells before and after it along each dim.

    ``have`` is the box of ``x``. If ``x`` has no cell of ``wanted``, all cells count as missing.
    """
    common = have.intersection(wanted)
    pads = [
        (a - w, v - b) if a < b else (v - w, 0)
        for a, b, w, v in zip(common.start, common.stop, wanted.start, wanted.stop)
    ]
    return cropped(x, have, common), pads


def mirrored(x: Tensor, have: Box, part: LayerView, mode: str) -> tuple[Tensor, Box]:
    """Return the part of a feature map that a layer reads, and the box of that part.

    ``mode`` is the padding mode of ``F.pad`` by which cells beyond the map's border are added.
    """
    pads = [
        (max(0, -a), max(0, b - n))
        for a, b, n in zip(part.padded_input.start, part.padded_input.stop, part.size)
    ]
    x = padded(cropped(x, have, part.input), pads, mode=mode)
    return x, Box(
        tuple(a - p for a, (p, _) in zip(part.input.start, pads)),
        tuple(b + q for b, (_, q) in zip(part.input.stop, pads)),
    )


def padded(
    x: Tensor, pads: Sequence[tuple[int, int]], value: float = 0.0, mode: str = "constant"
) -> Tensor:
    """Pad a tensor by (before, after) cells along each spatial dim."""
    if not any(map(any, pads)):
        return x
    flat = [n for pad in reversed(pads) for n in pad]
    return F.pad(x, flat, mode, value) if mode == "constant" else F.pad(x, flat, mode)


def taken_from(y: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return the part of ``y`` that begins at ``start`` and has this size."""
    if tuple(y.shape[2:]) == tuple(size):
        return y
    return y[(..., *(slice(a, a + n) for a, n in zip(start, size)))]
