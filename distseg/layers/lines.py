"""Distributed counterparts of :class:`distseg.models.lines.AlongLines` and ``OfLines``.

These layers take statistics over some dims of an image and keep the others. The result is a *line*:
a value of each channel for each *position*, which is an index along the kept dims. L is the number
of positions. The means of the rows of an image are a line whose positions are the rows; the cells
of a position are the cells of its row.

Each window contributes to the positions of the cells that it owns, and the contributions of all
ranks are combined as :class:`Moments`. Each image has moments of shape (L, C). If images differ in
size, L is the length of the longest line. In the formulas ``f`` is a statistic and ``g`` its
gradient at the position of a cell, summed over all windows of all ranks::

    mean          dx = g / N
    sum           dx = g
    variance      dx = g * 2 (x - mean) / (N - correction)
    log sum exp   dx = g * exp(x - f)
    maximum       dx = g at the first maximum, or g / times at each of `times` equal maxima
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distseg.comm.collective import add, gather
from distseg.layers.context import Context
from distseg.layers.image_statistics import distributed_class as distributed_class_of_statistic
from distseg.layers.image_statistics import exponentials
from distseg.layers.mean import DistributedMean, largest_of, numbers_of
from distseg.layers.moments import Moments, combine, stack
from distseg.layers.norm import Contribution
from distseg.models.image_statistics import LogSumExp, Variance
from distseg.models.layers import Max, Mean, as_vector
from distseg.models.lines import AlongLines, OfLines, folded, places_along
from distseg.tiling.tile import Box


class Where(NamedTuple):
    """The box of the cells that a window owns, counted in the window and in the whole feature map.

    Attributes:
        own: the box, counted from the first cell of the window.
        place: the box, in cells of the whole feature map.
        size: size of the whole feature map.
    """

    own: Box
    place: Box
    size: tuple[int, ...]


class Part(NamedTuple):
    """Contribution of one image of a window to a line, such as the means of the image's rows.

    A line has a value of each channel for each position. In this example a position is a row.

    Attributes:
        moments: the moments at each position of which the window owns cells, with ``mean``
            (positions, C). None if the window owns no cells.
        at: the indices of these positions in the line, (positions,).
        length: the number of positions of the whole line.
        channels: number of channels of the feature map.
    """

    moments: Moments | None
    at: Tensor
    length: int
    channels: int


class DistributedLines(DistributedMean):
    """Distributed counterpart of :class:`distseg.models.lines.AlongLines`.

    It maps each window to the line of the whole image, (B, C * L, 1, ...), such as the means of all
    L rows, each taken over the cells of all tiles.
    """

    def __init__(self, layer: AlongLines, *args):
        super().__init__(layer, *args)
        # `nn.Module.__setattr__` would make the layer, which has no state, a submodule.
        self.__dict__["of_whole"] = layer
        self.kept, self.statistic = layer.kept, _STATISTICS[type(layer.statistic)](layer.statistic)

    def plain(self, x: Tensor) -> Tensor:
        return self.of_whole(x)

    def where(self, x: Tensor, index: int) -> Where:
        own = self.own(x, index)
        if self.context.per_window or self.context.whole:
            return Where(own, own, tuple(x.shape[2:]))
        region = self.context.region(index, self.stride, x.shape[2:])
        return Where(own, region.owned.intersection(region.available), tuple(region.size))

    def moments(self, x: Tensor, index: int, mask: Tensor | None = None) -> list[Contribution]:
        own, place, size = self.where(x, index)
        length, at = places_along(self.kept, size), self._numbers(place, size).to(x.device)
        found = []
        for image, row in zip(x[(..., *own.slices)], self.rows(index)):
            part = (
                self.statistic.moments(*self._by_position(image, place, size))
                if own.pixels
                else None
            )
            found.append(Contribution(row, Part(part, at, length, x.shape[1]), own.pixels))
        return found

    def _by_position(self, image: Tensor, place: Box, size: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Group the cells that a window owns by their position in the line, such as their row.

        Args:
            image: the owned cells, (C, *place.size).
            place: the box of these cells in the feature map.
            size: the size of the feature map.

        Returns:
            The cells, (positions, C, cells of a position); and the index of each cell of a
                position, counted over the whole image, (cells of a position,). For the means of
                rows, this index is the cell's column.
        """
        others = [d for d in range(len(size)) if d not in self.kept]
        numbers = numbers_of(_picked(place, others), [size[d] for d in others]).to(image.device)
        cells = folded(image.unsqueeze(0), self.kept).flatten(2)
        return cells.to(torch.promote_types(cells.dtype, torch.float32)), numbers

    def _numbers(self, place: Box, size: Sequence[int]) -> Tensor:
        """Return the indices of a line's positions that a box covers, (positions,).

        For the means of rows, these are the indices of the box's rows.

        Args:
            place: the box, in cells of the whole feature map.
            size: the size of the whole feature map.
        """
        return numbers_of(_picked(place, self.kept), [size[d] for d in self.kept])

    def statistics(self, parts: list[Contribution]) -> Moments:
        rows, longest = (
            sorted({part.row for part in parts}),
            max(part.moments.length for part in parts),
        )
        mine = stack(
            [
                self._line([part.moments for part in parts if part.row == row], longest)
                for row in rows
            ]
        )
        home = torch.device("cpu") if self.comm.size > 1 else None
        return self.statistic.joined(mine.unpacked(gather(mine.packed(), self.comm, home))).on(
            mine.mean.device
        )

    def _line(self, parts: list[Part], length: int) -> Moments:
        """Combine the contributions of this rank's windows to an image; return its moments.

        The field ``mean`` has the shape (length, C). Positions of which this rank owns no cells get
        the moments of zero cells.

        Args:
            parts: the contributions of this rank's windows to the image.
            length: the number of positions of the result, at least the length of the image's line.
        """
        nothing = self.statistic.nothing(
            torch.zeros(length, parts[0].channels, dtype=torch.float64, device=parts[0].at.device)
        )
        line = Moments(*(t.clone() for t in nothing))
        for part in parts:
            if part.moments is not None:
                there = self.statistic.joined(
                    stack([Moments(*(t[part.at] for t in line)), part.moments])
                )
                for whole, some in zip(line, there):
                    whole[part.at] = some
        return line

    def result(self, x: Tensor, rows: list[int], statistics: Moments, where: Where) -> Tensor:
        length = places_along(self.kept, where.size)
        values = self.statistic.value(statistics)
        return as_vector(torch.stack([values[i, :length].t() for i in rows]), x.dim() - 2).to(
            x.dtype
        )

    def collect(self, total: Tensor, g: Tensor, rows: list[int]) -> None:
        for i, of_image in zip(rows, g.double()):
            of_image = of_image.view(total.shape[-1], -1).t()
            total[i, : len(of_image)] += of_image

    def shares(self, total: Tensor, statistics: Moments) -> tuple[Tensor, Moments]:
        return add(total, self.comm), statistics

    def spread(
        self, shares: tuple[Tensor, Moments], x: Tensor, rows: list[int], where: Where
    ) -> Tensor:
        (total, statistics), dx = shares, torch.zeros_like(x)
        own, place, size = where
        if not own.pixels:
            return dx
        at = self._numbers(place, size).to(x.device)
        for image, of_image, i in zip(x[(..., *own.slices)], dx[(..., *own.slices)], rows):
            cells, numbers = self._by_position(image, place, size)
            there = Moments(*(t[i, at] for t in statistics))
            of_image += self._as_image(
                self.statistic.gradient(cells, numbers, total[i, at], there), of_image
            ).to(x.dtype)
        return dx

    def _as_image(self, cells: Tensor, like: Tensor) -> Tensor:
        """Undo :meth:`_by_position`: return grouped cells in the shape of the image, (C, *size).

        Args:
            cells: the cells, or their gradients, (positions, C, cells of a position).
            like: a tensor (C, *size), of which only the shape is used.
        """
        size = like.shape[1:]
        others = [d for d in range(len(size)) if d not in self.kept]
        cells = cells.reshape(*(size[d] for d in self.kept), len(like), *(size[d] for d in others))
        # The dims of the image in the order of `cells`; -1 stands for the channels.
        order = [*self.kept, -1, *others]
        return cells.permute([order.index(d) for d in (-1, *range(len(size)))])


class _Mean:
    """Mean or sum at each position of a line, such as each row; base class of other statistics.

    Its methods take the results of :meth:`DistributedLines._by_position`: ``cells``, (L, C, cells
    of a position), and ``numbers``, the index of each cell of a position, (cells of a position,).
    Here L is the number of positions in ``cells``. In the moments, ``count`` is (..., L), ``mean``
    and ``m2`` are (..., L, C).

    Args:
        layer: the layer that defines the statistic. ``layer.total`` is True for sums.
    """

    def __init__(self, layer: Mean):
        self.layer = layer

    def nothing(self, zeros: Tensor) -> Moments:
        """Return the moments of L positions before any cell is counted.

        Args:
            zeros: a tensor of zeros (L, C), which gives shape, dtype and device.
        """
        return Moments(zeros.new_zeros(len(zeros)), zeros, zeros)

    def moments(self, cells: Tensor, numbers: Tensor) -> Moments:
        var, mean = torch.var_mean(cells, -1, correction=0)
        return Moments(self._count(cells), mean.double(), var.double() * cells.shape[-1])

    def _count(self, cells: Tensor) -> Tensor:
        return torch.full(
            (len(cells),), float(cells.shape[-1]), dtype=torch.float64, device=cells.device
        )

    def joined(self, parts: Moments) -> Moments:
        """Combine the moments of parts of an image to the moments of all their cells.

        Args:
            parts: the moments of the parts, stacked along dim 0. The result lacks this dim.
        """
        return combine(parts)

    def value(self, statistics: Moments) -> Tensor:
        """Return the mean, sum or other statistic at each position, (..., L, C).

        Args:
            statistics: the moments of all cells at each position.
        """
        return (
            statistics.mean * statistics.count.unsqueeze(-1)
            if self.layer.total
            else statistics.mean
        )

    def gradient(self, cells: Tensor, numbers: Tensor, g: Tensor, there: Moments) -> Tensor:
        """Return the gradient of the cells, in the shape of ``cells``.

        Args:
            cells: cells of one image, (L, C, cells of a position).
            numbers: the index of each cell of a position, which only the maximum uses.
            g: gradient of the loss by the statistic at each position, (L, C).
            there: the moments at the same L positions, combined over all ranks.
        """
        g = g if self.layer.total else g / there.count.unsqueeze(-1)
        return g.to(cells.dtype).unsqueeze(-1).expand_as(cells)


class _Variance(_Mean):
    """Variance of the cells at each position of a line, such as the cells of each row.

    The sum of squared deviations is divided by the number of cells minus ``layer.correction``.
    """

    def value(self, statistics: Moments) -> Tensor:
        return statistics.m2 / self._divisor(statistics)

    def _divisor(self, statistics: Moments) -> Tensor:
        return (statistics.count - self.layer.correction).unsqueeze(-1)

    def gradient(self, cells: Tensor, numbers: Tensor, g: Tensor, there: Moments) -> Tensor:
        return (cells - _beside(there.mean, cells)) * _beside(2 * g / self._divisor(there), cells)


class _LogSumExp(_Mean):
    """Log-sum-exp of the cells at each position of a line, such as the cells of each row.

    It is computed from two numbers, which are stored in the fields of :class:`Moments`: ``mean``
    holds the maximum and ``m2`` the sum of exp(x - maximum).
    """

    def nothing(self, zeros: Tensor) -> Moments:
        return Moments(zeros.new_zeros(len(zeros)), torch.full_like(zeros, -math.inf), zeros)

    def moments(self, cells: Tensor, numbers: Tensor) -> Moments:
        largest = cells.amax(-1)
        return Moments(
            self._count(cells),
            largest.double(),
            (cells - largest.unsqueeze(-1)).double().exp().sum(-1),
        )

    def joined(self, parts: Moments) -> Moments:
        return exponentials(parts)

    def value(self, statistics: Moments) -> Tensor:
        return statistics.mean + statistics.m2.log()

    def gradient(self, cells: Tensor, numbers: Tensor, g: Tensor, there: Moments) -> Tensor:
        return (cells - _beside(self.value(there), cells)).exp() * _beside(g, cells)


class _Max(_Mean):
    """Maximum of the cells at each position of a line, such as the cells of each row.

    Two numbers are stored in the fields of :class:`Moments`. ``mean`` holds the maximum. ``m2``
    holds the index (``numbers``) of the first cell with the maximum if ``layer.first`` is True,
    otherwise the number of cells that have it.
    """

    def nothing(self, zeros: Tensor) -> Moments:
        nowhere = torch.full_like(zeros, math.inf) if self.layer.first else zeros
        return Moments(zeros.new_zeros(len(zeros)), torch.full_like(zeros, -math.inf), nowhere)

    def moments(self, cells: Tensor, numbers: Tensor) -> Moments:
        largest = cells.amax(-1)
        there = cells == largest.unsqueeze(-1)
        second = numbers[there.byte().argmax(-1)] if self.layer.first else there.sum(-1)
        return Moments(self._count(cells), largest.double(), second.double())

    def joined(self, parts: Moments) -> Moments:
        return largest_of(parts, self.layer.first)

    def value(self, statistics: Moments) -> Tensor:
        return statistics.mean

    def gradient(self, cells: Tensor, numbers: Tensor, g: Tensor, there: Moments) -> Tensor:
        if self.layer.first:
            return (numbers == there.m2.unsqueeze(-1)) * _beside(g, cells)
        return (cells == _beside(there.mean, cells)) * _beside(g / there.m2, cells)


def _beside(line: Tensor, cells: Tensor) -> Tensor:
    """Reshape the values of a line from (L, C) to (L, C, 1), in the dtype of ``cells``."""
    return line.to(cells.dtype).unsqueeze(-1)


_STATISTICS = {Mean: _Mean, Max: _Max, Variance: _Variance, LogSumExp: _LogSumExp}


class DistributedOfLines(OfLines):
    """Distributed counterpart of :class:`distseg.models.lines.OfLines` for a window of an image.

    ``OfLines`` takes the length of the lines from the size of its first input. This input is only a
    window here, so the layer takes the length from the size of the whole feature map.
    """

    def __init__(self, layer: OfLines, context: Context, stride: tuple[int, ...], name: str):
        tensors = {**layer._parameters, **layer._buffers}
        super().__init__(layer.steps, layer.reads, tensors, layer.part, layer.made)
        self.context, self.stride = context, stride

    def forward(self, like: Tensor, *lines: Tensor) -> Tensor:
        if self.context.per_window or self.context.whole:
            return super().forward(like, *lines)
        return self.mapped_to(
            self.context.region(self.context.current, self.stride, like.shape[2:]).size, lines
        )


def distributed_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of the distributed counterpart of a layer.

    Args:
        layer: a layer of :mod:`distseg.models.lines`, a layer that computes a vector of the image,
            a ``Spread``, or a norm.
    """
    kinds = ((AlongLines, DistributedLines), (OfLines, DistributedOfLines))
    return next(
        (counterpart for kind, counterpart in kinds if isinstance(layer, kind)), None
    ) or distributed_class_of_statistic(layer)


def _picked(box: Box, dims: Sequence[int]) -> Box:
    """Return a box that has only the dims ``dims`` of ``box``."""
    return Box(tuple(box.start[d] for d in dims), tuple(box.stop[d] for d in dims))
