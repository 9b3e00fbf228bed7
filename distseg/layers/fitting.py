"""Functions that cut feature maps to a box, and pad them where the box reaches beyond the map."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.comm.halo import fill_around
from distseg.comm.memory_format import channels_last, lies_last
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


def cropped_input(x: Tensor, have: Box, wanted: Box) -> Tensor:
    """Return the part of ``x`` inside the box ``wanted``, which must not be modified in place.

    The result is that of :func:`cropped`. Its gradient is faster to compute (:class:`_Part`).
    """
    if have == wanted or is_vector(x, have.size):
        return x
    return _part(x, wanted.relative_to(have), own=False)


def fitted(
    x: Tensor, have: Box, wanted: Box, crop: Callable[[Tensor, Box, Box], Tensor] = cropped
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the part of ``x`` inside ``wanted``, and the padding that extends it to ``wanted``.

    Args:
        x: (B, C, *have.size).
        have: the box of ``x`` in its feature map.
        wanted: a box that may extend beyond ``have``.
        crop: :func:`cropped`, or :func:`cropped_input` if the part is only read.

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
    return crop(x, have, common), pads


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
    return y[(..., *_box(start, size).slices)]


def taken_from_result(y: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return a part of a convolution's result, as :func:`taken_from` does.

    The part may be modified in place, and its gradient is faster to compute (:class:`_Part`).

    Args:
        y: the result of a convolution, whose backward pass does not need it. Nothing else may use
            it, because autograd does not notice if the part is modified.
        start, size: the arguments of :func:`taken_from`.
    """
    if tuple(y.shape[2:]) == tuple(size):
        return y
    return _part(y, _box(start, size), own=True)


def _box(start: Sequence[int], size: Sequence[int]) -> Box:
    return Box(tuple(start), tuple(a + n for a, n in zip(start, size)))


def _part(x: Tensor, box: Box, own: bool) -> Tensor:
    """Return the part of ``x`` (B, C, ...) in a box of its spatial dims (see :class:`_Part`).

    Args:
        own: True if the part is to be a tensor of its own, which may be modified in place.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Part.apply(x, box, own)
    return x[(..., *box.slices)]


class _Part(torch.autograd.Function):
    """Part of a tensor, whose gradient has the memory format of the tensor.

    The gradient that PyTorch computes for a slice is contiguous. If the feature maps have their
    channels last in memory, all later operations of the backward pass then read two formats. If a
    slice is modified in place, PyTorch also copies the gradient of the whole tensor several times.
    """

    @staticmethod
    def forward(ctx, x: Tensor, box: Box, own: bool):
        ctx.shape, ctx.box, ctx.last = x.shape, box, lies_last(x)
        part = x[(..., *box.slices)]
        return part.data if own else part

    @staticmethod
    def backward(ctx, g: Tensor):
        form = channels_last(len(ctx.shape)) if ctx.last else torch.contiguous_format
        dx = torch.empty(ctx.shape, dtype=g.dtype, device=g.device, memory_format=form)
        fill_around(dx, ctx.box, 0.0)
        dx[(..., *ctx.box.slices)] = g
        return dx, None, None
