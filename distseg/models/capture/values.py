"""Stand-ins for the tensors and numbers of user code while traces are read.

A trace is the record of one forward pass over images of one size. Several traces of different sizes
are read together: a number that differs between them depends on the image's size.

The ``repr`` of the stand-ins is used in error messages, so it is written in the user's terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from distseg.models.axes import Axes, Axis, is_line, length_of, places_of, plain_axes


@dataclass(frozen=True)
class Sizes:
    """An argument of a call that depends on the image's size or the number of images.

    An example is the number ``n // 2`` in user code, where ``n`` is the height of a map.

    Attributes:
        each: the argument for each traced image size.
    """

    each: tuple

    def __repr__(self) -> str:
        return f"({' or '.join(dict.fromkeys(map(str, self.each)))}, depending on the image's size)"


@dataclass(frozen=True)
class Value:
    """The output of the layer ``name``: a feature map, or a vector for each image.

    A value stands for a tensor that user code computes from the image.

    Attributes:
        shapes: (N, C, *size) for each traced image size. For a vector, ``size`` is the size of the
            maps with which it can be combined.
        axes: the meaning of each dim that the tensor has in user code. There the dims may be in
            another order or split, for example (N, H, W, C).
        dtype: the type of the user's tensor if it is not a floating point type, else None.
        joined: True if ``torch.cat`` along dim 0 has joined several batches. The batch dim then
            holds one batch after the other.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    axes: Axes
    dtype: torch.dtype | None = None
    joined: bool = False

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Spatial size for each traced image size; for a vector, of maps to combine it with."""
        return tuple(shape[2:] for shape in self.shapes)

    @property
    def dims(self) -> int:
        """Number of spatial dims of the image."""
        return len(self.shapes[0]) - 2

    @property
    def channels(self) -> int:
        """Number of channels C in the form (N, C, *size) that layers take."""
        return self.shapes[0][1]

    @property
    def rank(self) -> int:
        """Number of dims that the tensor has in user code."""
        return len(self.axes)

    @property
    def vector(self) -> bool:
        """True if the value is a vector of the image, which has no positions."""
        return not places_of(self.axes)

    @property
    def line(self) -> bool:
        """True for a vector whose length depends on the map's size, such as the means of rows."""
        return is_line(self.axes)

    @property
    def plain(self) -> bool:
        """True if the value has the shape (N, C, *size) in user code."""
        return self.axes == plain_axes(self.channels, self.dims)

    @property
    def grid(self) -> tuple[int, ...] | None:
        """Grid size if the value is an adaptive pooling's output (N, C, *grid); None otherwise."""
        there = (
            self.vector
            and not self.line
            and self.rank == 2 + self.dims
            and self.axes[0] == Axis(True)
        )
        return tuple(axis.cell for axis in self.axes[2:]) if there else None

    @property
    def as_plain(self) -> Value:
        """Layer output with the axes (N, C, *size) in place of its own; layers take this form."""
        return replace(self, axes=plain_axes(self.channels, self.dims), dtype=None, joined=False)

    def __repr__(self) -> str:
        return f"{kind_of(self)} of shape {shown(self)}"


def kind_of(x: Value) -> str:
    """Return the kind of a value in words, such as "a vector of the image", for messages."""
    if x.line:
        return "a vector along rows or columns of the image"
    if x.vector:
        return "a vector of the image"
    if places_of(x.axes) and max(len(axis.places) for axis in x.axes) > 1:
        return "a feature map whose spatial dims are flattened"
    return (
        "a feature map whose channels come last"
        if x.axes[-1].of_channels and x.dims
        else "a feature map"
    )


def shown(x: Value) -> tuple[int, ...]:
    """Return the shape that the tensor has in user code in the first trace."""
    batch, *_ = x.shapes[0]
    size = x.sizes[0]
    return tuple(_length(axis, batch, size) for axis in x.axes)


def _length(axis: Axis, batch: int, size: Sequence[int]) -> int:
    length = axis.cell * (batch if axis.batch else 1)
    for d in axis.places:
        length *= size[d]
    return length * length_of(axis.whole, size)
