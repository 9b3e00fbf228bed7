"""Functions that cut feature maps to a box, and pad them where the box reaches beyond the map."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from distseg.models.layers import is_vector
from distseg.tiling.layout import LayerView
from distseg.tiling.tile import Box


def cropped(x: Tensor, have: Box, wanted: Box) -> Tensor:
    """Return a view of the part of ``x`` inside the box ``wanted``.

    If ``x`` is a vector of the image, it is returned whole.

    Args:
        x: (B, C, *have.size).
        have: the box of ``x`` in its feature map. It contains ``wanted``.
    """
    if have == wanted or is_vector(x, have.size):
        return x
    return x[(..., *wanted.relative_to(have).slices)]


def fitted(x: Tensor, have: Box, wanted: Box) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the part of ``x`` inside ``wanted``, and the padding that extends it to ``wanted``.

    Args:
        x: (B, C, *have.size).
        have: the box of ``x`` in its feature map.
        wanted: a box that may extend beyond ``have``.

    Returns:
        The part of ``x``. For each dim, the number of cells to add (before, after) the part, as
        :func:`padded` takes them; if ``x`` has no cell of ``wanted`` along the dim, all of them
        count as before.
    """
    common = have.intersection(wanted)
    pads = [
        (a - w, v - b) if a < b else (v - w, 0)
        for a, b, w, v in zip(common.start, common.stop, wanted.start, wanted.stop)
    ]
    return cropped(x, have, common), pads


def mirrored(x: Tensor, have: Box, part: LayerView, mode: str) -> tuple[Tensor, Box]:
    """Pad a layer's input by reflection or replication; return the padded tensor and its box.

    The padding repeats values of the feature map.

    Args:
        x: (B, C, *have.size), with the cells of ``part.input``.
        have: the box of ``x`` in its feature map.
        part: the boxes that the layer reads and computes.
        mode: the mode of ``F.pad``, such as ``reflect``.
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
    """Pad a tensor (B, C, *size) along its spatial dims.

    Args:
        pads: for each spatial dim, first dim first, the number of cells to add (before, after).
        value, mode: the arguments of ``F.pad``.
    """
    if not any(map(any, pads)):
        return x
    flat = [n for pad in reversed(pads) for n in pad]
    return F.pad(x, flat, mode, value) if mode == "constant" else F.pad(x, flat, mode)


def taken_from(y: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return the part of ``y`` (B, C, ...) that begins at ``start`` and has the given size.

    Args:
        start, size: the first cell and the number of cells, along each spatial dim.
    """
    if tuple(y.shape[2:]) == tuple(size):
        return y
    return y[(..., *(slice(a, a + n) for a, n in zip(start, size)))]
