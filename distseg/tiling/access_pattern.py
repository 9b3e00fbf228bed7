"""Access patterns: the input cells that each output cell of a layer reads, along one dim.

"Input" and "output" are short for a cell of the layer's input and of its output; "map" is short for
feature map. A span ``a, b`` stands for the cells a <= c < b of a map. An input span may extend
beyond the map, into the padding. Four kinds of access pattern cover the layers of a U-Net:

* gather: output j reads inputs j s - p, j s - p + d, ... (convolutions, poolings, padding);
* scatter: input i contributes to outputs i s - p, i s - p + d, ... (transposed convolutions,
  nearest up-sampling);
* interpolate: output j reads the inputs around (j + 1/2) / f - 1/2 (linear, cubic up-sampling);
* align: output j of m reads the inputs around j (n - 1) / (m - 1) (linear up-sampling with
  aligned corners).

Here s is the stride, p the padding, d the dilation, f the up-sampling factor, and n and m are the
sizes of input and output. These patterns are the same in maps of any size. Patterns that depend
on the sizes of both maps, such as a resize to the size of a skip, are in
:mod:`distseg.tiling.resize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

Span = tuple[int, int]


class AccessPattern:
    """Interface of access patterns: which input cells each output cell of a layer reads.

    Attributes:
        sized: True if the cells that an output reads depend on the sizes of the two maps.
        alike: True if all input cells have the same value, as in an expanded vector of the image. A
            tile then needs no cells of other tiles.
        beyond: True if an output may read cells outside the map, in the padding.
        mirrored: True if the padding repeats cells of the map (reflection). An output that reads
            the padding then needs the repeated cells.
    """

    sized: ClassVar[bool] = False
    alike = False
    beyond = False
    mirrored = False

    def for_sizes(self, n: int, m: int) -> AccessPattern:
        """Return this access pattern for an input of ``n`` cells and an output of ``m`` cells."""
        return self

    def size(self, n: int) -> int:
        """Return the number of output cells for ``n`` input cells.

        If another map determines the size of the output, ``n`` is the size of that map.
        """
        raise NotImplementedError

    def cut(self, c: int) -> int:
        """Return the position of a tile border in the output that has position ``c`` in the input.

        The position of a border is the number of cells before it.
        """
        raise NotImplementedError

    def needs(self, a: int, b: int) -> Span:
        """Return the span (start, stop) of the input cells that output cells a..b-1 read."""
        raise NotImplementedError

    def pixels(self, before: Fraction) -> Fraction:
        """Return the number of image pixels per output cell.

        Args:
            before: number of image pixels per input cell; if another map determines the size of the
                output, per cell of that map.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Gather(AccessPattern):
    """The access pattern of a convolution, pooling or padding.

    Attributes:
        kernel, stride, dilation: the settings of the layer along this dim.
        before, after: number of cells of padding before and after the map.
        ceil: True if a last kernel window that extends beyond the map makes an output too
            (``ceil_mode``).
        mirrored: True if the padding repeats cells of the map.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil: bool = False
    mirrored: bool = False
    beyond = True

    @property
    def span(self) -> int:
        """The number of input cells from the first to the last one that an output cell reads."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        """Return the number of output cells for ``n`` input cells."""
        steps = n + self.before + self.after - self.span
        if not self.ceil:
            return steps // self.stride + 1
        m = -(-steps // self.stride) + 1
        # PyTorch drops a last window that lies wholly in the padding after the map.
        return m - 1 if (m - 1) * self.stride >= n + self.before else m

    def cut(self, c: int) -> int:
        """Return the position of a tile border in the output that has position ``c`` in the input.

        An output belongs to the tile that owns the middle of the inputs that the output reads.
        """
        return -(-(c + self.before - (self.span - 1) // 2) // self.stride)

    def needs(self, a: int, b: int) -> Span:
        """Return the span (start, stop) of the input cells that output cells a..b-1 read."""
        return a * self.stride - self.before, (b - 1) * self.stride - self.before + self.span

    def pixels(self, before: Fraction) -> Fraction:
        return before * self.stride


@dataclass(frozen=True)
class Shift(Gather):
    """The access pattern of padding by ``before`` and ``after`` cells; negative for a crop."""

    @property
    def sized(self) -> bool:
        """True for a crop: applied to a window, it would remove cells at the window's border."""
        return min(self.before, self.after) < 0


@dataclass(frozen=True)
class Fill(Gather):
    """The access pattern of padding at the end of the map, to the next multiple of ``multiple``."""

    multiple: int = 1

    def size(self, n: int) -> int:
        return -(-n // self.multiple) * self.multiple


@dataclass(frozen=True)
class Scatter(AccessPattern):
    """The access pattern of a transposed convolution or of nearest up-sampling.

    Attributes:
        kernel, stride, dilation: the settings of the layer along this dim.
        before: number of cells that are cut off at each end of the output (``padding``).
        extra: number of cells by which the output is longer at its end (``output_padding``).
    """

    kernel: int
    stride: int
    dilation: int = 1
    before: int = 0
    extra: int = 0

    @property
    def span(self) -> int:
        """The number of output cells from the first to the last one that one input cell adds to."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        return (n - 1) * self.stride - 2 * self.before + self.span + self.extra

    def cut(self, c: int) -> int:
        return c * self.stride - self.before + (self.span - self.stride + 1) // 2

    def needs(self, a: int, b: int) -> Span:
        """Return the span (start, stop) of the input cells that output cells a..b-1 read.

        If the kernel is smaller than the stride, some outputs read no input. Their span still has
        one input: the last one whose kernel starts at or before output a. The distributed layer
        computes the position of its result from this input.
        """
        reach = max(self.span, self.stride)
        first = -((reach - 1 - a - self.before) // self.stride)
        return first, (b - 1 + self.before) // self.stride + 1

    def pixels(self, before: Fraction) -> Fraction:
        return before / self.stride


@dataclass(frozen=True)
class Interpolate(AccessPattern):
    """The access pattern of linear or cubic up-sampling by an integer factor.

    Attributes:
        factor: the number of outputs per input.
        further: the number of inputs that an output reads on each side of the two inputs that
            linear interpolation reads.
    """

    factor: int
    further: int = 0

    @property
    def stride(self) -> int:
        """The number of outputs per input; the same as ``factor``."""
        return self.factor

    def size(self, n: int) -> int:
        return n * self.factor

    def cut(self, c: int) -> int:
        return c * self.factor

    def needs(self, a: int, b: int) -> Span:
        first = (2 * a + 1 - self.factor) // (2 * self.factor)
        # Rounded up, since an output exactly on an input reads no other input.
        last = -((self.factor - 1 - 2 * (b - 1)) // (2 * self.factor))
        return first - self.further, last + 1 + self.further

    def pixels(self, before: Fraction) -> Fraction:
        return before / self.factor


@dataclass(frozen=True)
class Align(Interpolate):
    """The access pattern of linear up-sampling by an integer factor with ``align_corners``.

    Output j of m reads the two inputs around position j (n - 1) / (m - 1), where n is the number of
    inputs and m = n * ``factor``. With f = ``factor``, this position lies between
    (j - f + 1) / f and j / f. The spans of :meth:`needs` cover both inputs for every n.
    """

    def needs(self, a: int, b: int) -> Span:
        return a // self.factor - 1, (b - 1) // self.factor + 2


def inside(span: Span, n: int, mirrored: bool = False) -> Span:
    """Return the span of the cells of a map that are needed to read a span of the padded map.

    A span (start, stop) is a range of cells along one dim. The span that is read may extend beyond
    the map, into the padding. The result is its part inside the map.

    Args:
        span: the span that is read.
        n: the number of cells of the map.
        mirrored: True if the padding repeats cells of the map. The result then includes the
            repeated cells.
    """
    a, b = span
    first, last = max(0, min(a, n)), max(0, min(b, n))
    if mirrored:
        first = max(0, min(first, n - 1, *([2 * n - 1 - b] if b > n else [])))
        last = min(n, max(last, 1, *([1 - a] if a < 0 else [])))
    return first, max(first, last)
