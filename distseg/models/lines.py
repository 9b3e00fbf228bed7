"""Lines of an image: vectors that have places of some of its dims in their channels, all of them, as means of rows have.

A line of a map of H x W cells, with C numbers for each row, is kept as (N, C * H, 1, 1). So ranks have all of it, as they have vectors, and any function may be
computed of it. How long it is follows the size of the map, which layers that open lines look at. Their twins for parts of an image: :mod:`distseg.layers.lines`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

from torch import Tensor

from distseg.models.axes import Extent, length_of, of_size
from distseg.models.layers import Formula, Mean, Step, as_vector


class AlongLines(Mean):
    """A statistic over some dims of an image, for each place along the others: (N, C, *size) -> (N, C * places, 1, ...), where a channel's lie side by side.

    Args:
        of: what makes a vector of maps that have the other dims alone.
        kept: the dims of the image that stay.
    """

    def __init__(self, of: Mean, kept: Sequence[int]):
        super().__init__(total=of.total)
        self.kept = tuple(kept)
        self.__dict__["of"] = of  # no child: it holds nothing

    def forward(self, x: Tensor) -> Tensor:
        made = self.of(folded(x, self.kept)).flatten(1)
        return as_vector(made.unflatten(0, (len(x), -1)).transpose(1, 2), x.dim() - 2)

    def extra_repr(self) -> str:
        return f"{self.of}, kept={self.kept}"


def folded(x: Tensor, kept: Sequence[int]) -> Tensor:
    """Return a map (N, C, *size) with the places along some of its dims as images, (N * places, C, *others)."""
    order = [2 + d for d in range(x.dim() - 2) if d not in kept]
    return x.permute(0, *(2 + d for d in kept), 1, *order).flatten(0, len(kept))


class Along(NamedTuple):
    """In the arguments of a :class:`distseg.models.layers.Step`: a number that follows the size of the map."""

    extent: Extent


class OfLines(Formula):
    """Functions of lines and vectors of the image: (N, ?, *size), (N, C, 1, ...), ... -> (N, C', 1, ...). Of the first map they look at the size alone."""

    def forward(self, like: Tensor, *lines: Tensor) -> Tensor:
        return self.at(like.shape[2:], lines)

    def at(self, size: Sequence[int], lines: Sequence[Tensor]) -> Tensor:
        """Return the result for a map of this size."""
        reads = [read._replace(axes=of_size(read.axes, size)) for read in self.reads]
        steps = [
            Step(step.function, _told(step.args, size), _told(step.kwargs, size))
            for step in self.steps
        ]
        return self.computed(lines, steps, reads, of_size(self.made, size))


def _told(tree: Any, size: Sequence[int]) -> Any:
    """Return arguments with the numbers that follow a size in their places."""
    match tree:
        case Along():
            return length_of(tree.extent, size)
        case slice():
            return slice(*(_told(x, size) for x in (tree.start, tree.stop, tree.step)))
        case tuple() if type(tree) is tuple:
            return tuple(_told(x, size) for x in tree)
        case dict():
            return {key: _told(x, size) for key, x in tree.items()}
    return tree


def places_along(kept: Sequence[int], size: Sequence[int]) -> int:
    """Return the places of a map along some of its dims."""
    return math.prod(size[d] for d in kept)
