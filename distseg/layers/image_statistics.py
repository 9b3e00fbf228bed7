"""Distributed counterparts of the layers of :mod:`distseg.models.image_statistics`.

Each class computes a vector of the whole image from the windows of all ranks, as
:class:`distseg.layers.mean.DistributedMean` does. A window's contribution is stored as
:class:`Moments`, whose fields may hold other numbers than count, mean and squared deviations; each
class says which. In the formulas ``f`` is a statistic and ``g`` its gradient, summed over all
windows of all ranks::

    variance      f = sum (x - mean)^2 / (N - correction)
                  dx = g * 2 (x - mean) / (N - correction)
    log sum exp   f = log sum exp x,          dx = g * exp(x - f)
    largest       f_k = the k-th largest,     dx = g_k at its position
    products      f_ij = sum a_i b_j,         da_i = sum_j g_ij b_j,   db_j = sum_i g_ij a_i
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from distseg.comm.collective import add, gather
from distseg.layers import mean
from distseg.layers.mean import DistributedMax, DistributedMean, numbers_of
from distseg.layers.moments import Moments, by_group, stack
from distseg.layers.norm import Contribution
from distseg.models.image_statistics import (
    Largest,
    LogSumExp,
    Measure,
    Products,
    Variance,
    first_largest,
)
from distseg.models.layers import as_vector
from distseg.tiling.tile import Box


class _OfImage(DistributedMean):
    """Base class of distributed layers that compute one vector from all cells of an image.

    Args:
        layer: the layer of :mod:`distseg.models.image_statistics` that computes the same vector
            from whole images.
    """

    def __init__(self, layer: nn.Module, *args):
        super().__init__(layer, *args)
        # `nn.Module.__setattr__` would make the layer, which has no state, a submodule.
        self.__dict__["of_whole"] = layer

    def plain(self, x: Tensor) -> Tensor:
        return self.of_whole(x)

    def shares(self, total: Tensor, statistics: Moments) -> tuple[Tensor, Moments]:
        return add(total, self.comm), statistics

    def collect(self, total: Tensor, g: Tensor, rows: list[int]) -> None:
        for i, of_image in zip(rows, g.double()):
            total[i] += of_image.flatten()

    def spread(
        self, shares: tuple[Tensor, Moments], x: Tensor, rows: list[int], where: list[Box]
    ) -> Tensor:
        dx, (own,) = torch.zeros_like(x), where
        for image, of_image, i in zip(x[(..., *own.slices)], dx[(..., *own.slices)], rows):
            if own.pixels:
                of_image += (
                    self.gradient(image, shares[0][i], shares[1], i).view_as(image).to(x.dtype)
                )
        return dx

    def gradient(self, x: Tensor, g: Tensor, statistics: Moments, row: int) -> Tensor:
        """Return the gradient of the loss by the cells of one image that a window owns.

        The result has as many values as ``x``, in any shape.

        Args:
            x: the owned cells, (C, *size).
            g: the gradient by the image's vector, summed over the windows of all ranks, (length of
                the vector,) float64.
            statistics: the moments of all images, combined over all ranks.
            row: the row of this image in ``statistics``.
        """
        raise NotImplementedError


class DistributedVariance(_OfImage):
    """Distributed counterpart of :class:`distseg.models.image_statistics.Variance`.

    It maps each window to the variances of its whole image, (B, groups, 1, ...). Without groups,
    each channel has its own variance, (B, C, 1, ...).
    """

    def statistics(self, parts: list[Contribution]) -> Moments:
        of_channels = super().statistics(parts)
        return (
            of_channels
            if self.of_whole.groups is None
            else by_group(of_channels, self.of_whole.groups)
        )

    def result(self, x: Tensor, rows: list[int], statistics: Moments, where: list[Box]) -> Tensor:
        return as_vector((statistics.m2 / self._divisor(statistics))[rows], x.dim() - 2).to(x.dtype)

    def _divisor(self, statistics: Moments) -> Tensor:
        return (statistics.count - self.of_whole.correction).unsqueeze(-1)

    def gradient(self, x: Tensor, g: Tensor, statistics: Moments, row: int) -> Tensor:
        times = x.shape[0] // len(g)
        share = (2 * g / self._divisor(statistics)[row]).repeat_interleave(times).view(-1, 1)
        return (
            x.flatten(1).double() - statistics.mean[row].repeat_interleave(times).view(-1, 1)
        ) * share


class DistributedLogSumExp(_OfImage):
    """Distributed counterpart of :class:`distseg.models.image_statistics.LogSumExp`.

    Its statistics are :class:`Moments` with another content: ``mean`` holds the maximum of each
    channel and ``m2`` its sum of exp(x - maximum).
    """

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        (own,), found = self.where(x, index), []
        count = torch.tensor(float(own.pixels), dtype=torch.float64, device=x.device)
        for image, row in zip(x[(..., *own.slices)], self.rows(index)):
            values = image.flatten(1).double()
            largest = values.amax(1) if own.pixels else values.new_full(values.shape[:1], -math.inf)
            found.append(
                Contribution(
                    row,
                    Moments(count, largest, (values - largest.unsqueeze(1)).exp().sum(1)),
                    own.pixels,
                )
            )
        return found

    def statistics(self, parts: list[Contribution]) -> Moments:
        rows = sorted({part.row for part in parts})
        mine = stack(
            [
                exponentials(stack([part.moments for part in parts if part.row == row]))
                for row in rows
            ]
        )
        home = torch.device("cpu") if self.comm.size > 1 else None
        return exponentials(mine.unpacked(gather(mine.packed(), self.comm, home))).on(
            mine.mean.device
        )

    def result(self, x: Tensor, rows: list[int], statistics: Moments, where: list[Box]) -> Tensor:
        return as_vector(self._total(statistics)[rows], x.dim() - 2).to(x.dtype)

    def _total(self, statistics: Moments) -> Tensor:
        return statistics.mean + statistics.m2.log()

    def gradient(self, x: Tensor, g: Tensor, statistics: Moments, row: int) -> Tensor:
        return (x.flatten(1).double() - self._total(statistics)[row].view(-1, 1)).exp() * g.view(
            -1, 1
        )


def exponentials(parts: Moments) -> Moments:
    """Combine the maximum and the sum of exp(x - maximum) of parts of an image.

    Log-sum-exp is computed from these two numbers.

    Args:
        parts: moments stacked along dim 0. ``mean`` holds the maximum of each part and ``m2`` its
            sum of exp(x - maximum). The result has the same content, without dim 0.
    """
    largest = parts.mean.amax(0)
    # A part without cells has maximum -inf and contributes 0. If all parts are empty, -inf - -inf
    # would be NaN.
    less = torch.where(parts.mean == -math.inf, parts.mean, parts.mean - largest)
    return Moments(parts.count.sum(0), largest, (parts.m2 * less.exp()).sum(0))


class DistributedProducts(_OfImage):
    """Distributed counterpart of :class:`distseg.models.image_statistics.Products`.

    Its statistics are :class:`Moments` with another content: ``mean`` holds the sums of products,
    (images, heads * I * J), and ``m2`` is empty. In each of ``heads`` groups, each of I channels is
    multiplied by each of J channels.
    """

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        (own,) = self.where(x, index)
        count = torch.tensor(float(own.pixels), dtype=torch.float64, device=x.device)
        sums = self.of_whole(x[(..., *own.slices)]).flatten(1).double()
        return [
            Contribution(row, Moments(count, of_image, of_image[:0]), own.pixels)
            for row, of_image in zip(self.rows(index), sums)
        ]

    def statistics(self, parts: list[Contribution]) -> Moments:
        rows = sorted({part.row for part in parts})
        mine = [stack([part.moments for part in parts if part.row == row]) for row in rows]
        sums = add(torch.stack([part.mean.sum(0) for part in mine]), self.comm)
        return Moments(torch.stack([part.count.sum(0) for part in mine]), sums, sums[:, :0])

    def result(self, x: Tensor, rows: list[int], statistics: Moments, where: list[Box]) -> Tensor:
        return as_vector(statistics.mean[rows], x.dim() - 2).to(x.dtype)

    def gradient(self, x: Tensor, g: Tensor, statistics: Moments, row: int) -> Tensor:
        a, b = (part[0] for part in self.of_whole.factors(x.unsqueeze(0)))
        g = g.view(len(a), a.shape[1], b.shape[1]).to(x.dtype)
        da, db = torch.matmul(g, b), torch.matmul(g.transpose(1, 2), a)
        return (
            da + db
            if self.of_whole.first is None
            else torch.cat((da.flatten(0, 1), db.flatten(0, 1)))
        ).double()


class DistributedLargest(_OfImage):
    """Distributed counterpart of :class:`distseg.models.image_statistics.Largest`.

    Its statistics are :class:`Moments` with another content: ``mean`` holds the k largest values of
    each channel, (images, C * k), and ``m2`` their indices in the flattened feature map.
    """

    where = DistributedMax.where

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        own, *place = self.where(x, index)
        count = torch.tensor(float(own.pixels), dtype=torch.float64, device=x.device)
        numbers, found = numbers_of(*place).to(x.device).double(), []
        for image, row in zip(x[(..., *own.slices)], self.rows(index)):
            values = image.flatten(1)
            there = (
                first_largest(values, min(self.of_whole.k, own.pixels))
                if own.pixels
                else values.long()
            )
            chosen = (
                self._filled(values.gather(1, there).double(), -math.inf),
                self._filled(numbers[there], math.inf),
            )
            found.append(
                Contribution(row, Moments(count, *(part.flatten() for part in chosen)), own.pixels)
            )
        return found

    def _filled(self, x: Tensor, value: float) -> Tensor:
        """Append ``value`` to each channel until it has k values: (C, at most k) -> (C, k).

        A window that owns fewer than k cells has fewer values.
        """
        return torch.cat((x, x.new_full((len(x), self.of_whole.k - x.shape[1]), value)), 1)

    def statistics(self, parts: list[Contribution]) -> Moments:
        rows = sorted({part.row for part in parts})
        mine = stack(
            [
                self._largest(stack([part.moments for part in parts if part.row == row]))
                for row in rows
            ]
        )
        home = torch.device("cpu") if self.comm.size > 1 else None
        found = self._largest(mine.unpacked(gather(mine.packed(), self.comm, home))).on(
            mine.mean.device
        )
        if found.count.min() < self.of_whole.k:
            raise ValueError(
                f"layer {self.name} takes the {self.of_whole.k} largest values of a feature map "
                f"that has only {found.count.min():.0f} cells: take larger images"
            )
        return found

    def _largest(self, parts: Moments) -> Moments:
        """Return the k largest values of each channel of an image, chosen from those of its parts.

        Args:
            parts: for each part its k largest values (in ``mean``) and their indices in the whole
                flattened feature map (in ``m2``), both (parts, ..., C * k).

        Returns:
            Moments with the chosen values and their indices, (..., C * k), in descending order.
        """
        k = self.of_whole.k

        def joined(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, k)).movedim(0, -2).flatten(-2)

        values, places = joined(parts.mean), joined(parts.m2)
        order = places.sort(-1)[1]
        values, places = values.gather(-1, order), places.gather(-1, order)
        order = values.sort(dim=-1, descending=True, stable=True)[1][..., :k]
        return Moments(
            parts.count.sum(0),
            values.gather(-1, order).flatten(-2),
            places.gather(-1, order).flatten(-2),
        )

    def result(self, x: Tensor, rows: list[int], statistics: Moments, where: list[Box]) -> Tensor:
        return as_vector(statistics.mean[rows], x.dim() - 2).to(x.dtype)

    def spread(
        self, shares: tuple[Tensor, Moments], x: Tensor, rows: list[int], where: tuple
    ) -> Tensor:
        (total, statistics), (own, *place), dx = shares, where, torch.zeros_like(x)
        if not own.pixels:
            return dx
        numbers = numbers_of(*place).to(x.device).double()
        for of_image, i in zip(dx[(..., *own.slices)], rows):
            places = statistics.m2[i].view(len(of_image), -1)
            there = torch.searchsorted(numbers, places).clamp(max=len(numbers) - 1)
            share = total[i].view_as(places) * (numbers[there] == places)
            of_image += (
                torch.zeros(len(of_image), len(numbers), dtype=torch.float64, device=x.device)
                .scatter_add(1, there, share)
                .view(of_image.shape)
                .to(x.dtype)
            )
        return dx


class DistributedMeasure(_OfImage):
    """Distributed counterpart of :class:`distseg.models.image_statistics.Measure`.

    The layer returns a number that follows from the size of the whole feature map alone, such as
    its number of pixels. So the gradient is 0. Its statistics are :class:`Moments` whose ``mean``
    holds this number, and whose ``m2`` is empty.
    """

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        size = (
            x.shape[2:]
            if self.context.per_window
            else self.context.region(index, self.stride, x.shape[2:]).size
        )
        number = torch.full((1,), self.of_whole.rule(size), dtype=torch.float64, device=x.device)
        return [
            Contribution(row, Moments(number.new_ones(()), number, number[:0]), 1)
            for row in self.rows(index)
        ]

    def statistics(self, parts: list[Contribution]) -> Moments:
        of_row = {part.row: part.moments for part in parts}
        return stack([of_row[row] for row in sorted(of_row)])

    def result(self, x: Tensor, rows: list[int], statistics: Moments, where: list[Box]) -> Tensor:
        return as_vector(statistics.mean[rows], x.dim() - 2).to(x.dtype)

    def shares(self, total: Tensor, statistics: Moments) -> tuple[Tensor, Moments]:
        return total, statistics

    def gradient(self, x: Tensor, g: Tensor, statistics: Moments, row: int) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)


def distributed_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of the distributed counterpart of a layer.

    Args:
        layer: a layer that computes a vector of the image, a ``Spread``, or a norm.
    """
    return next(
        (counterpart for kind, counterpart in _COUNTERPARTS if isinstance(layer, kind)), None
    ) or mean.distributed_class(layer)


_COUNTERPARTS = (
    (Variance, DistributedVariance),
    (LogSumExp, DistributedLogSumExp),
    (Products, DistributedProducts),
    (Measure, DistributedMeasure),
    (Largest, DistributedLargest),
)
