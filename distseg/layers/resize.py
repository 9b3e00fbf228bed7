"""Layers whose cells depend on input and output size: resizing, padding and cropping to a size.

A resize works dim by dim. An output cell is a weighted sum of a few input cells
(:mod:`distseg.tiling.resize`). The gradient of an input cell is a weighted sum of the gradients of
output cells, which are added in a fixed order. So each run and each device gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.comm.memory_format import lies_last
from distseg.comm.staging import upload
from distseg.layers.context import Context
from distseg.models.capture.positions import Positions
from distseg.models.resize import Follows
from distseg.tiling.layout import LayerView
from distseg.tiling.resize import Resize, Taps
from distseg.tiling.tile import Box

_KEPT = 256  # size of the caches of weights


class Placed(nn.Module):
    """Distributed counterpart of :class:`distseg.models.resize.Follows`.

    A ``Follows`` layer, such as a resize, gives its result a size that follows from another feature
    map. This layer computes that size from the size of the image, and does not need the other map.
    Its forward pass takes whole feature maps; :func:`distseg.layers.layer_table.run` computes parts
    of the result.

    Args:
        inner: the ``Follows`` layer.
        context: the state of the model's forward pass, which has the size of the image.
        sizes: function that maps the size of an image to the size of the layer's result.
    """

    def __init__(
        self, inner: Follows, context: Context, sizes: Callable[[Sequence[int]], Sequence[int]]
    ):
        super().__init__()
        # `nn.Module.__setattr__` would make `inner`, which has no weights, a submodule.
        self.__dict__.update(inner=inner, context=context, sizes=sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.made(x, self.sizes(self.context.place.image))

    def extra_repr(self) -> str:
        return repr(self.inner)


class PlacedPositions(Positions):
    """Distributed counterpart of :class:`distseg.models.capture.positions.Positions`.

    The layer computes values for the positions of a feature map, such as their coordinates in the
    image. The values depend on the size of the whole image, which the context knows.

    Args:
        inner: the ``Positions`` layer. Both layers share their parameters and buffers.
        context: the state of the model's forward pass.
    """

    def __init__(self, inner: Positions, context: Context):
        nn.Module.__init__(self)
        self.__dict__.update(vars(inner) | {"context": context})

    def forward(self, x: Tensor) -> Tensor:
        place = self.context.place
        if place.window.size != place.image:
            raise ValueError(
                "approximate.halo and approximate.norms make each tile with its halo a separate "
                "image, but this network's code uses the position in the whole image: leave these "
                "settings out"
            )
        return self.on_box(x, x.shape[2:], Box.whole(x.shape[2:]))

    def on_box(self, x: Tensor, size: Sequence[int], box: Box) -> Tensor:
        """Return the part of the layer's output inside ``box``, (B, C, *box.size).

        The layer computes its output from positions, not from the values of its input. If the
        output has no dim of positions, such as the mean of all row numbers, it is a vector
        (B, C, 1, ...), and the same for each box.

        Args:
            x: the input. Only its dtype, device and number of images are used.
            size: the size of the whole output.
            box: the box, in cells of the whole output.
        """
        return self.part(
            x, self.context.place.image, size, [range(a, b) for a, b in zip(box.start, box.stop)]
        )


class Spans(NamedTuple):
    """The input cells that a tile has and the output cells that it computes, along a resized dim.

    Attributes:
        n, m: the number of cells of the whole input and of the whole output.
        first, have: the first available input cell, and the number of available input cells.
        start, stop: the first wanted output cell, and the one after the last.
    """

    n: int
    first: int
    have: int
    m: int
    start: int
    stop: int


def resized(
    x: Tensor, access_patterns: Sequence[Resize], part: LayerView, ratio: bool = False
) -> Tensor:
    """Return a part of the result of ``F.interpolate`` for a whole feature map.

    Args:
        x: the cells of the map inside ``part.input``, (B, C, *part.input.size).
        access_patterns: for each dim, the access pattern of the resize.
        part: the input box and the output box, and the sizes of the whole maps.
        ratio: the scale factor of nearest modes. True: m / n, the size of the whole output divided
            by that of the whole input (:class:`distseg.models.resize.ResizeTo`). False: the factor
            of the access pattern, or m / n if it has none.

    Returns:
        The result inside ``part.output``, (B, C, *part.output.size).
    """
    spans = [
        Spans(*each)
        for each in zip(
            part.size,
            part.input.start,
            part.input.size,
            part.output_size,
            part.output.start,
            part.output.stop,
        )
    ]
    if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        x = x.float()  # Autocast runs F.interpolate in float32.
    shares = [_shares_of(x, access_patterns, spans, dim, ratio) for dim in range(len(spans))]
    # Gathering cells is several times faster if the channels of each cell are adjacent.
    last, x = (lies_last(x), x.movedim(1, -1))
    # First the dim that shrinks most, so that later dims work on fewer cells.
    for dim in sorted(
        range(len(spans)), key=lambda d: (spans[d].stop - spans[d].start) / max(1, spans[d].have)
    ):
        x = _Weighted.apply(x, dim + 1, *shares[dim])
    return x.movedim(-1, 1) if last else x.movedim(-1, 1).contiguous()


class _Share(NamedTuple):
    """Weighted sums of input cells along a dim, one sum for each output cell.

    Output cell j is the sum over k of parts[k, j] * input[places[k, j]]. Both arrays have shape
    (cells in a sum, output cells).

    Attributes:
        places: the positions of the cells in the available input.
        parts: the weights of these cells; None if all weights are 1.
    """

    places: np.ndarray
    parts: np.ndarray | None


def _shares_of(
    x: Tensor, access_patterns: Sequence[Resize], spans: Sequence[Spans], dim: int, ratio: bool
) -> tuple[_Share, _Share]:
    """Return two tables of weighted sums, for resizing one dim and for the backward pass.

    The first gives the output cells as sums of input cells. The second gives the gradients of the
    input cells as sums of the gradients of output cells.
    """
    pattern, span = access_patterns[dim], spans[dim]
    if not pattern.kernel.startswith("nearest"):
        return _weighted(pattern, span)
    last = len(spans) == 2 and lies_last(x) and not x.is_contiguous()
    factor = span.m / span.n if ratio else pattern.factor
    return _nearest(
        pattern.kernel, factor, span, len(spans), dim, str(x.dtype), x.device.type, last
    )


@lru_cache(_KEPT)
def _weighted(pattern: Resize, span: Spans) -> tuple[_Share, _Share]:
    """Return the weighted sums of a linear, cubic or area resize along one dim.

    The first result computes the output cells, the second one the gradients of the input cells.
    """
    taps: Taps = pattern.for_sizes(span.n, span.m)
    places, parts = taps.shares(span.start, span.stop)
    forth = _Share(places - span.first, parts)
    return forth, _back(forth, span.have)


@lru_cache(_KEPT)
def _nearest(
    kernel: str,
    factor: float | None,
    span: Spans,
    dims: int,
    dim: int,
    dtype: str,
    device: str,
    last: bool,
) -> tuple[_Share, _Share]:
    """Return the weighted sums of a nearest or nearest-exact resize along one dim.

    The first result computes the output cells, each a copy of one input cell, and the second one
    the gradients of the input cells. ``span`` holds the cells of the resized dim; the other
    arguments are those of :func:`nearest_places`.
    """
    places = nearest_places(kernel, factor, span.n, span.m, dims, dim, dtype, device, last)[
        span.start : span.stop
    ]
    forth = _Share(places[None] - span.first, None)
    return forth, _back(forth, span.have)


@lru_cache(_KEPT)
def nearest_places(
    kernel: str,
    factor: float | None,
    n: int,
    m: int,
    dims: int,
    dim: int,
    dtype: str,
    device: str,
    last: bool,
) -> np.ndarray:
    """Return the index of the input cell that a nearest mode copies to each output cell, (m,).

    PyTorch's kernels differ in how they round positions. So this function runs the kernel for
    tensors of the given dtype, device and memory format, to see which cells it chooses.

    Args:
        kernel: ``nearest`` or ``nearest-exact``.
        factor: the scale factor that the user's call gives; None if it gives the size.
        n, m: the number of input and of output cells along the resized dim.
        dims: number of spatial dims of the feature map.
        dim: the index of the resized dim among the spatial dims.
        dtype, device: the dtype and the device type of the tensor, as text.
        last: True if channels come last in memory.
    """
    # The kernel resizes a map that holds each cell's own number. The number is written as digits in
    # base 128, because bfloat16 cannot hold large numbers exactly.
    digits = (
        torch.arange(n, device=device).view(n, 1)
        // torch.tensor([1, _BASE, _BASE**2, _BASE**3], device=device)
        % _BASE
    )
    shape = [1, 4, *(n if d == dim else 1 for d in range(dims))]
    x = digits.t().reshape(shape).to(getattr(torch, dtype.removeprefix("torch.")))
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    wanted = [m if d == dim else 1 for d in range(dims)]
    by = (
        dict(size=wanted)
        if factor is None
        else dict(scale_factor=[factor if d == dim else 1.0 for d in range(dims)])
    )
    with torch.no_grad(), torch.autocast(device, enabled=False):
        found = F.interpolate(x, **by, mode=kernel).reshape(4, m).long().cpu()
    return sum(found[k] * _BASE**k for k in range(4)).numpy()


_BASE = 128


def _back(forth: _Share, have: int) -> _Share:
    """Return the adjoint of a resize: the weighted sums that give the gradients of input cells.

    The gradient of an input cell is a sum over the output cells that read it. Each output cell's
    gradient is multiplied by the weight that the input cell has in ``forth``.

    Args:
        forth: the sums that give the output cells.
        have: the number of available input cells, which is the number of sums in the result.
    """
    width, count = forth.places.shape
    inputs, sums = forth.places.ravel(), np.tile(np.arange(count), width)
    parts = np.ones(len(inputs)) if forth.parts is None else forth.parts.ravel()
    order = np.lexsort((sums, inputs))
    inputs, sums, parts = inputs[order], sums[order], parts[order]
    begins = np.searchsorted(inputs, np.arange(have))
    rank = np.arange(len(inputs)) - begins[inputs]
    most = int(rank.max()) + 1 if len(rank) else 1
    places, weights = np.zeros((most, have), np.int64), np.zeros((most, have))
    places[rank, inputs], weights[rank, inputs] = sums, parts
    return _Share(places, weights)


class _Weighted(torch.autograd.Function):
    """Autograd function that resizes a tensor along one dim, as weighted sums of its cells.

    Its arguments are the tensor, the index of the dim, the sums ``forth`` that give the output
    cells, and the sums ``back`` that give the gradients of the input cells (:func:`_back`).
    """

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, forth: _Share, back: _Share) -> Tensor:
        ctx.dim, ctx.back = dim, back
        return _summed(x, dim, forth)

    @staticmethod
    def backward(ctx, g: Tensor):
        return _summed(g, ctx.dim, ctx.back), None, None, None


def _summed(x: Tensor, dim: int, share: _Share) -> Tensor:
    """Compute the weighted sums that ``share`` describes, of the cells of ``x`` along ``dim``."""
    x, total = x.contiguous(), None
    for k, places in enumerate(share.places):
        part = x.index_select(dim, upload(torch.from_numpy(places), x.device))
        if share.parts is not None:
            part *= upload(torch.from_numpy(share.parts[k]), x.device, x.dtype).view(
                -1, *(1,) * (x.dim() - 1 - dim)
            )
        total = part if total is None else total.add_(part)
    return total
