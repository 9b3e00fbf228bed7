"""What stands for a tensor, or a number, of the user's code while its calls are read; each prints as the user would say it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

import torch

from distseg.models.axes import Axes, Axis, is_line, length_of, places_of, plain_axes


@dataclass(frozen=True)
class Sizes:
    """A number, or another setting, that follows the size of the image or of the batch: what it was in ``each`` trace."""

    each: tuple

    def __repr__(self) -> str:
        return f"({' or '.join(dict.fromkeys(map(str, self.each)))}, as the image's size says)"


@dataclass(frozen=True)
class Value:
    """A map, or a vector of the image: what the layer ``name`` makes.

    Attributes:
        shapes: (N, C, *size) in each trace; of a vector the size is that of a map it can be joined with.
        axes: in which the user's code has it at this point.
        dtype: of the user's tensor, where it is no floating point number.
        joined: several batches lie one behind the other in the dim of the batch, by ``torch.cat``: its groups of channels come before its images.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    axes: Axes
    dtype: torch.dtype | None = None
    joined: bool = False

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape[2:] for shape in self.shapes)

    @property
    def dims(self) -> int:
        """Dims of the image."""
        return len(self.shapes[0]) - 2

    @property
    def channels(self) -> int:
        return self.shapes[0][1]

    @property
    def rank(self) -> int:
        """Dims of the user's tensor."""
        return len(self.axes)

    @property
    def vector(self) -> bool:
        """Tell that it is alike wherever the image is looked at."""
        return not places_of(self.axes)

    @property
    def line(self) -> bool:
        """Tell that it is a vector whose length follows the size of the map."""
        return is_line(self.axes)

    @property
    def plain(self) -> bool:
        """Tell that the user's code has it as (N, C, *size)."""
        return self.axes == plain_axes(self.channels, self.dims)

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The cells of a grid of the image, (N, C, *grid); None of what is none."""
        there = (
            self.vector
            and not self.line
            and self.rank == 2 + self.dims
            and self.axes[0] == Axis(True)
        )
        return tuple(axis.cell for axis in self.axes[2:]) if there else None

    @property
    def as_plain(self) -> "Value":
        """The map as layers have it."""
        return replace(self, axes=plain_axes(self.channels, self.dims), dtype=None, joined=False)

    def __repr__(self) -> str:
        return f"{kind_of(self)} of {shown(self)}"


def kind_of(x: Value) -> str:
    """Say what a value is."""
    if x.line:
        return "a line of the image"
    if x.vector:
        return "a vector of the image"
    if places_of(x.axes) and max(len(axis.places) for axis in x.axes) > 1:
        return "a map whose places are one dim"
    return "a map whose channels come last" if x.axes[-1].of_channels and x.dims else "a map"


def shown(x: Value) -> tuple[int, ...]:
    """Return the shape that the user's code has a value in."""
    batch, *_ = x.shapes[0]
    size = x.sizes[0]
    return tuple(_length(axis, batch, size) for axis in x.axes)


def _length(axis: Axis, batch: int, size: Sequence[int]) -> int:
    length = axis.cell * (batch if axis.batch else 1)
    for d in axis.places:
        length *= size[d]
    return length * length_of(axis.whole, size)
