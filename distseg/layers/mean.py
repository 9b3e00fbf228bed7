"""Distributed counterparts of :class:`distseg.models.layers.Mean`, ``Max`` and ``Spread``.

These layers work as norms without the normalisation (:mod:`distseg.layers.norm`): statistics are
taken of each window and combined over the ranks that share the image. The result is a vector of the
image, equal on all ranks. The layers after the vector are computed for each window, so the vector's
gradient is summed over all windows. A *row* is one entry of the statistics: each part of each image
has a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from distseg.comm.collective import add, gather
from distseg.layers.context import Context
from distseg.layers.moments import Moments, of_channels, stack
from distseg.layers.norm import Contribution, DistributedNorm, Pending
from distseg.models.layers import Max, Mean, Spread, as_vector
from distseg.tiling.tile import Box


class DistributedMean(DistributedNorm):
    """Distributed counterpart of :class:`distseg.models.layers.Mean`.

    It maps each window to the means over the whole image, (B, C * parts, 1, ...). With a grid, as
    in ``F.adaptive_avg_pool2d``, each cell of the grid is a part of the image with its own mean;
    without a grid there is one part. In the backward pass, all pixels of a part get the gradient of
    the part's mean, divided by their number.
    """

    def __init__(self, mean: Mean, *args):
        super().__init__(mean, *args)
        self.grid, self.total = mean.grid, mean.total
        self.number = math.prod(self.grid)

    def joint(self, xs: list[Tensor]) -> list[Tensor]:
        if len(xs) == 1 and self.comm.size == 1 and self.has_all(xs[0]):
            return [self.plain(xs[0])]
        return list(_JointMean.apply(self, *xs))

    def plain(self, x: Tensor) -> Tensor:
        """Return the vectors (B, C * parts, 1, ...) of images that this rank holds whole.

        Args:
            x: the feature map of whole images, (B, C, *size).
        """
        # Calling the method on `self` avoids a new layer, whose creation takes longer than the
        # mean of a small map.
        return Mean.forward(self, x)

    def _check_count(self, count) -> None:
        pass  # A mean may be taken of a single value.

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        found = []
        for n, box in enumerate(self.where(x, index)):
            of_box = x[(..., *box.slices)]
            for b, row in enumerate(self.rows(index)):
                found.append(
                    Contribution(
                        row * self.number + n,
                        of_channels(of_box[b : b + 1]) if box.pixels else _nothing(x),
                        box.pixels,
                    )
                )
        return found

    def where(self, x: Tensor, index: int) -> list[Box]:
        """Return, for each part of the image, the box of the cells that the window owns in it.

        A part is the area of one cell of the grid, as in ``F.adaptive_avg_pool2d``; adjacent parts
        may share cells. Without a grid the image is one part. A box counts from the first cell of
        ``x``, and is empty if the window owns no cell of the part.

        Args:
            x: the feature map of the window, (B, C, *size).
            index: the index of the window.
        """
        own = self.own(x, index)
        if not self.grid:
            return [own]
        region = (
            None
            if self.context.per_window
            else self.context.region(index, self.stride, x.shape[2:])
        )
        size, held = (
            (x.shape[2:], Box.whole(x.shape[2:]))
            if region is None
            else (region.size, region.available)
        )
        return [part.relative_to(held).intersection(own) for part in parts_of(self.grid, size)]

    def result(self, x: Tensor, rows: list[int], statistics: Moments, where: Any) -> Tensor:
        """Return the vectors of a window's images, (B, C * P, 1, ...), from their statistics.

        P is the number of parts of an image: the cells of the grid, or 1 without a grid.

        Args:
            x: the feature map of the window, which gives the number of dims and the dtype.
            rows: for each image of the window, its position i in the micro-batch. In the
                statistics, rows i * P to (i + 1) * P - 1 belong to this image.
            statistics: the moments of all images, with ``mean`` (images * P, C).
            where: the owned cells, as :meth:`where` returns them.
        """
        means = statistics.mean * statistics.count.unsqueeze(-1) if self.total else statistics.mean
        return as_vector(
            torch.stack([means[i * self.number : (i + 1) * self.number].t() for i in rows]),
            x.dim() - 2,
        ).to(x.dtype)

    def collect(self, total: Tensor, g: Tensor, rows: list[int]) -> None:
        """Add the gradients of a window's result (vectors of its images) to sums over windows.

        Args:
            total: the sums (rows, C), changed in place, with a row for each part of each image.
            g: the gradients of the vectors, (B, C * parts, 1, ...).
            rows: for each image of the window, its position in the micro-batch.
        """
        for i, of_image in zip(rows, g.double()):
            total[i * self.number : (i + 1) * self.number] += of_image.view(-1, self.number).t()

    def shares(self, total: Tensor, statistics: Moments) -> Tensor:
        """Return the gradient that each cell gets, for each part of each image, (rows, C).

        It is the gradient of the part's mean divided by the number of cells; for a sum it is not
        divided. All ranks that share statistics must call this method together.

        Args:
            total: this rank's sums of the vectors' gradients (:meth:`collect`), (rows, C).
            statistics: the moments of all images. Only ``count`` is used.
        """
        total = add(total, self.comm)
        return total if self.total else total / statistics.count.unsqueeze(-1)

    def spread(self, shares: Tensor, x: Tensor, rows: list[int], where: list[Box]) -> Tensor:
        """Return the gradient of a window's input, which is zero outside the owned cells.

        Args:
            shares: the gradient that each cell of a part gets, as :meth:`shares` returns it.
            x: the feature map of the window. The result has its shape.
            rows: for each image of the window, its position in the micro-batch.
            where: the owned cells, as :meth:`where` returns them.
        """

        def of_part(n: int) -> Tensor:
            share = shares[[i * self.number + n for i in rows]]
            return as_vector(share.to(x.dtype), x.dim() - 2)

        if [box.size for box in where] == [x.shape[2:]]:
            return of_part(0).expand_as(x)
        dx = torch.zeros_like(x)
        for n, box in enumerate(where):
            dx[(..., *box.slices)] += of_part(n)
        return dx

    def pending(self, statistics: Moments) -> PendingMean:
        return PendingMean(self, statistics)


def largest_of(parts: Moments, first: bool) -> Moments:
    """Combine the maxima of parts of an image to the maxima of the image.

    Maxima are stored as :class:`Moments` whose ``mean`` holds the maximum of each channel.

    Args:
        parts: the maxima of the parts, stacked along dim 0. The result lacks this dim.
        first: True if ``m2`` holds the index of the first maximum in the flattened feature map,
            False if it holds the number of cells that have the maximum.
    """
    largest = parts.mean.amax(0)
    second = parts.m2.where(
        parts.mean == largest, torch.full_like(parts.m2, math.inf if first else 0)
    )
    return Moments(parts.count.sum(0), largest, second.amin(0) if first else second.sum(0))


class DistributedMax(DistributedMean):
    """Distributed counterpart of :class:`distseg.models.layers.Max`.

    Its statistics are :class:`Moments` with another content: ``mean`` holds the maximum of each
    channel. If ``first`` is True, ``m2`` holds the index of the first maximum in the flattened
    feature map, otherwise the number of cells that have the maximum.
    """

    def __init__(self, largest: Max, *args):
        super().__init__(largest, *args)
        self.first = largest.first

    def plain(self, x: Tensor) -> Tensor:
        return Max(self.first, self.grid)(x)

    def where(self, x: Tensor, index: int) -> tuple[Box, Box, tuple[int, ...]]:
        """Return the box of the cells that window ``index`` owns, in the window and in the map.

        Args:
            x: the window's part of a feature map, (B, C, *size).
            index: the index of the window.

        Returns:
            The box of these cells, counted from the first cell of ``x``; their box in the whole
                feature map; and the size of the whole feature map.
        """
        own = self.own(x, index)
        if self.context.per_window:
            return own, own, x.shape[2:]
        region = self.context.region(index, self.stride, x.shape[2:])
        return own, region.owned.intersection(region.available), region.size

    def _parts(self, own: Box, place: Box, size: Sequence[int]) -> list[tuple[Box, Box]]:
        """Return the box of the cells that the window owns in each part of the image.

        A part is the area of one cell of the grid, or the image without a grid. Each box is given
        twice: counted from the first cell of the window, and in cells of the whole feature map.

        Args:
            own, place, size: the three results of :meth:`where`.
        """
        if not self.grid:
            return [(own, place)]
        move = [a - b for a, b in zip(own.start, place.start)]
        there = [place.intersection(part) for part in parts_of(self.grid, size)]
        return [(box.shifted(move), box) for box in there]

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        own, place, size = self.where(x, index)
        rows = self.rows(index)
        return [
            self._contribution(image, row * self.number + n, there, size)
            for n, (part, there) in enumerate(self._parts(own, place, size))
            for image, row in zip(x[(..., *part.slices)], rows)
        ]

    def _contribution(
        self, image: Tensor, row: int, place: Box, size: Sequence[int]
    ) -> Contribution:
        """Return the maximum of an image's cells as a contribution to a row of the statistics.

        Args:
            image: the cells (C, *place.size) of one image.
            row: the index of the row.
            place: the box of the cells in the whole feature map.
            size: the size of the whole map.
        """
        count, values = (
            torch.tensor(float(place.pixels), dtype=torch.float64, device=image.device),
            image.flatten(1),
        )
        if not place.pixels:
            largest = values.new_full(values.shape[:1], -math.inf)
            second = torch.full_like(largest, math.inf if self.first else 0, dtype=torch.float64)
        else:
            largest = values.amax(1)
            there = values == largest.unsqueeze(1)
            second = (
                numbers_of(place, size).to(image.device)[there.byte().argmax(1)]
                if self.first
                else there.sum(1)
            )
        return Contribution(row, Moments(count, largest.double(), second.double()), place.pixels)

    def statistics(self, parts: list[Contribution]) -> Moments:
        rows = sorted({part.row for part in parts})
        mine = stack(
            [
                largest_of(stack([part.moments for part in parts if part.row == row]), self.first)
                for row in rows
            ]
        )
        home = torch.device("cpu") if self.comm.size > 1 else None
        return largest_of(mine.unpacked(gather(mine.packed(), self.comm, home)), self.first).on(
            mine.mean.device
        )

    def shares(self, total: Tensor, statistics: Moments) -> tuple[Tensor, Moments]:
        return add(total, self.comm), statistics

    def spread(
        self,
        shares: tuple[Tensor, Moments],
        x: Tensor,
        rows: list[int],
        where: tuple[Box, Box, tuple[int, ...]],
    ) -> Tensor:
        (total, statistics), (own, place, size), dx = shares, where, torch.zeros_like(x)
        for n, (part, there) in enumerate(self._parts(own, place, size)):
            for image, of_image, i in zip(x[(..., *part.slices)], dx[(..., *part.slices)], rows):
                row = i * self.number + n
                if self.first:
                    here, share = (
                        numbers_of(there, size).to(x.device) == statistics.m2[row].unsqueeze(1),
                        total[row],
                    )
                else:
                    here, share = (
                        image.flatten(1) == statistics.mean[row].unsqueeze(1),
                        total[row] / statistics.m2[row],
                    )
                of_image += (here * share.unsqueeze(1)).view(image.shape).to(x.dtype)
        return dx


class DistributedSpread(Spread):
    """Distributed counterpart of :class:`distseg.models.layers.Spread` for a window of an image.

    ``Spread`` expands a vector of the image to all positions of a feature map. This layer returns
    the cells of that map that the window holds.
    """

    def __init__(self, spread: Spread, context: Context, stride: tuple[int, ...], name: str):
        super().__init__(spread.grid, spread.kept, **spread.settings)
        self.context, self.stride = context, stride

    def forward(self, like: Tensor, x: Tensor) -> Tensor:
        if self.context.per_window:
            return super().forward(like, x)
        region = self.context.region(self.context.current, self.stride, like.shape[2:])
        return self.part(
            x,
            region.size,
            [range(a, a + n) for a, n in zip(region.available.start, like.shape[2:])],
        )


def parts_of(grid: Sequence[int], size: Sequence[int]) -> list[Box]:
    """Return the boxes, which may overlap, over which ``F.adaptive_avg_pool2d`` takes its means.

    Args:
        grid: the number of boxes along each dim.
        size: the size of the map.
    """
    spans = [[(i * n // k, -(-(i + 1) * n // k)) for i in range(k)] for k, n in zip(grid, size)]
    return [Box(*zip(*part)) for part in product(*spans)]


def _nothing(x: Tensor) -> Moments:
    """Return the moments of zero cells: count, mean and squared deviations are all 0.

    These moments are the contribution of a window that owns no cell of a part of the image.

    Args:
        x: the feature map, which gives the number of channels.
    """
    zeros = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
    return Moments(zeros.new_zeros(()), *zeros)


def numbers_of(box: Box, size: Sequence[int]) -> Tensor:
    """Return, for each cell of a box, its index in the flattened feature map, (cells,).

    Args:
        box: the box, in cells of the map.
        size: the size of the map.
    """
    along = [torch.arange(a, b) for a, b in zip(box.start, box.stop)]
    strides = [math.prod(size[d + 1 :]) for d in range(len(size))]
    return sum(torch.meshgrid(*(n * s for n, s in zip(along, strides)), indexing="ij")).flatten()


def distributed_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of the distributed counterpart of a layer.

    Args:
        layer: a ``Mean``, ``Max`` or ``Spread`` of :mod:`distseg.models.layers`, or a norm.
    """
    return next(
        counterpart
        for kinds, counterpart in (
            (Max, DistributedMax),
            (Mean, DistributedMean),
            (Spread, DistributedSpread),
            (nn.Module, DistributedNorm),
        )
        if isinstance(layer, kinds)
    )


class _JointMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean: DistributedMean, *xs):
        ctx.mean, ctx.statistics = (
            mean,
            mean.statistics([part for j, x in enumerate(xs) for part in mean.moments(x, j)]),
        )
        ctx.rows, ctx.where = (
            [mean.rows(j) for j in range(len(xs))],
            [mean.where(x, j) for j, x in enumerate(xs)],
        )
        ctx.save_for_backward(*xs)
        return tuple(
            mean.result(x, rows, ctx.statistics, where)
            for x, rows, where in zip(xs, ctx.rows, ctx.where)
        )

    @staticmethod
    def backward(ctx, *gs):
        total = torch.zeros_like(ctx.statistics.mean)
        for g, rows in zip(gs, ctx.rows):
            ctx.mean.collect(total, g, rows)
        shares = ctx.mean.shares(total, ctx.statistics)
        return None, *(
            ctx.mean.spread(shares, *window)
            for window in zip(ctx.saved_tensors, ctx.rows, ctx.where)
        )


class PendingMean(Pending):
    """Mean, maximum or other statistic of whole images, for windows computed one after another.

    The statistic is taken over all windows before the object is created. So a call with any window
    of an image returns the vector of the whole image. The gradient is computed in several steps, by
    the same methods as that of a norm (:class:`distseg.layers.norm.Pending`).
    """

    def __init__(self, norm: DistributedMean, statistics: Moments):
        super().__init__(norm, statistics)
        self.total = torch.zeros_like(statistics.mean)

    def __call__(self, x: Tensor, index: int, mask: Tensor | None, share: float) -> Tensor:
        return _PendingMean.apply(self, self.norm.rows(index), self.norm.where(x, index), x)

    def finalize(self) -> None:
        self.shares = self.norm.shares(self.total, self.statistics)

    def with_statistics_grad(
        self, g: Tensor, x: Tensor, own: Box, index: int, mask: Tensor | None
    ) -> Tensor:
        return g + self.norm.spread(
            self.shares, x, self.norm.rows(index), self.norm.where(x, index)
        )


class _PendingMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pending: PendingMean, rows: list[int], where: Any, x: Tensor):
        ctx.pending, ctx.rows = pending, rows
        return pending.norm.result(x, rows, pending.statistics, where)

    @staticmethod
    def backward(ctx, g):
        ctx.pending.norm.collect(ctx.pending.total, g, ctx.rows)
        return None, None, None, None
