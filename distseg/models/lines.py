"""Lines: vectors whose channels hold all positions along some dims, such as the means of rows.

A line with C numbers for each row of a map of H x W cells is kept as (N, C * H, 1, 1). So every
rank has the whole line and can compute any function of it. The length of the line depends on the
size of the map, so layers that separate the positions of a line also read that size. The
distributed counterparts are in :mod:`distseg.layers.lines`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from distseg.models.axes import Extent, length_of, of_size
from distseg.models.layers import Formula, Mean, Step, as_vector


class AlongLines(Mean):
    """A layer that takes a statistic over some dims of an image, such as the mean of each row.

    ``AlongLines(Mean(), kept=(0,))`` computes the mean of each row. Shapes are (N, C, *size) ->
    (N, C * positions, 1, ...), where ``positions`` is the number of rows in this example. The
    values of a channel are adjacent.

    Args:
        statistic: the layer that computes the statistic as a vector, such as ``Mean()``. It is
            applied to maps that have only the dims over which the statistic is taken.
        kept: the dims of the image along which the result has positions.
    """

    def __init__(self, statistic: Mean, kept: Sequence[int]):
        super().__init__(total=statistic.total)
        self.kept = tuple(kept)
        self.__dict__["statistic"] = statistic  # not a child module, since it holds no weights

    def forward(self, x: Tensor) -> Tensor:
        made = self.statistic(folded(x, self.kept)).flatten(1)
        return as_vector(made.unflatten(0, (len(x), -1)).transpose(1, 2), x.dim() - 2)

    def extra_repr(self) -> str:
        return f"{self.statistic}, kept={self.kept}"


def folded(x: Tensor, kept: Sequence[int]) -> Tensor:
    """Move the positions of a map (N, C, *size) along the dims ``kept`` to the batch dim.

    The result has shape (N * positions, C, *rest), where ``rest`` is the size of the other dims.
    """
    order = [2 + d for d in range(x.dim() - 2) if d not in kept]
    return x.permute(0, *(2 + d for d in kept), 1, *order).flatten(0, len(kept))


class Along(NamedTuple):
    """A length in a :class:`distseg.models.layers.Step` that is computed from a map's size.

    In ``line.reshape(n, channels, rows)``, for example, it stands for ``rows``. It becomes a number
    when the layer runs and the size of the map is known. ``extent`` is the formula.
    """

    extent: Extent


class OfLines(Formula):
    """A layer that applies functions to lines, such as the means of rows, and to vectors.

    The first input is the map (N, ?, *size) that the lines were computed from. Only its size is
    read, since it gives the length of each line. The other inputs are the lines and vectors, each
    (N, C, 1, ...). The result is a line or a vector (N, C', 1, ...).
    """

    def forward(self, like: Tensor, *lines: Tensor) -> Tensor:
        return self.mapped_to(like.shape[2:], lines)

    def mapped_to(self, size: Sequence[int], lines: Sequence[Tensor]) -> Tensor:
        """Apply the layer's functions to lines and vectors, and return a line or vector.

        Args:
            size: the spatial size of the whole map from which the lines were computed. It gives
                the length of each line.
            lines: the lines and vectors, each (N, C, 1, ...). A line holds its positions among its
                C channels.

        Returns:
            A tensor (N, C', 1, ...).
        """
        reads = [read._replace(axes=of_size(read.axes, size)) for read in self.reads]
        steps = [
            Step(step.function, _with_sizes(step.args, size), _with_sizes(step.kwargs, size))
            for step in self.steps
        ]
        return self.computed(lines, steps, reads, of_size(self.made, size))


def _with_sizes(tree: Any, size: Sequence[int]) -> Any:
    """Return the arguments of a call with an int in place of each length (:class:`Along`).

    Args:
        tree: the arguments: a value, or a nested tuple, dict or slice of values.
        size: the spatial size of the map, from which the lengths are computed.
    """
    match tree:
        case Along():
            return length_of(tree.extent, size)
        case slice():
            return slice(*(_with_sizes(x, size) for x in (tree.start, tree.stop, tree.step)))
        case tuple() if type(tree) is tuple:
            return tuple(_with_sizes(x, size) for x in tree)
        case dict():
            return {key: _with_sizes(x, size) for key, x in tree.items()}
    return tree


def places_along(kept: Sequence[int], size: Sequence[int]) -> int:
    """Return the product of a map's sizes along the dims ``kept``: the length of a line."""
    return math.prod(size[d] for d in kept)
