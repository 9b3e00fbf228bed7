"""Which cells of its input a layer looks at, along one dim: the arithmetic of convolutions, poolings and up-samplings.

Four kinds cover what a U-Net uses. ``a, b`` stand for the cells a <= c < b of a feature map; what is looked at may lie
beyond the map, in the padding. These four look alike in maps of any size; those whose cells hang on the sizes of both
maps, such as resizing to the size of a skip, are in :mod:`distseg.tiling.resize`.

* gather: output j looks at inputs j s - p, j s - p + d, ..., as convolutions, poolings and padding do;
* scatter: input i spreads to outputs i s - p, i s - p + d, ..., as transposed convolutions and nearest up-sampling do;
* interpolate: output j looks at the inputs around (j + 1/2) / f - 1/2, as linear and cubic up-sampling do;
* align: output j of m looks at the inputs around j (n - 1) / (m - 1), as linear up-sampling with aligned corners does.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

Span = tuple[int, int]


class AccessPattern:
    """Interface of all footprints.

    Attributes:
        sized: the cells hang on the sizes of both maps.
        beyond: they may lie in the padding.
        alike: all cells are one and the same, so that a tile has what it needs.
    """

    sized = False
    alike = False
    beyond = False
    mirrored = False

    def at(self, n: int, m: int) -> "AccessPattern":
        """Return the footprint between an input of n cells and a result of m."""
        return self

    def size(self, n: int) -> int:
        """Return the cells of the result for ``n`` of the input, or of the map whose size the result follows."""
        raise NotImplementedError

    def cut(self, c: int) -> int:
        """Return where the owner of outputs changes if that of inputs changes at ``c``."""
        raise NotImplementedError

    def needs(self, a: int, b: int) -> Span:
        """Return the inputs that outputs a..b-1 look at."""
        raise NotImplementedError

    def pixels(self, before: Fraction) -> Fraction:
        """Return the pixels that an output stands for where an input, or a cell of the map that is followed, stands for ``before``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gather(AccessPattern):
    """kernel k, stride s, dilation d, ``before`` and ``after`` cells of padding; ``ceil``: an overhanging last window counts."""

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil: bool = False
    mirrored: bool = False
    """Padding is made of cells of the map (reflection): what lies beyond its border needs those inside."""
    beyond = True

    @property
    def span(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        """Cells of the output for ``n`` of the input."""
        room = n + self.before + self.after - self.span
        if not self.ceil:
            return room // self.stride + 1
        m = -(-room // self.stride) + 1
        return (
            m - 1 if (m - 1) * self.stride >= n + self.before else m
        )  # a window wholly in the padding behind

    def cut(self, c: int) -> int:
        """Where the owner of outputs changes if that of inputs changes at ``c``: who owns the middle of what an output looks at."""
        return -(-(c + self.before - (self.span - 1) // 2) // self.stride)

    def needs(self, a: int, b: int) -> Span:
        """The inputs that outputs a..b-1 look at."""
        return a * self.stride - self.before, (b - 1) * self.stride - self.before + self.span

    def pixels(self, before: Fraction) -> Fraction:
        return before * self.stride


@dataclass(frozen=True)
class Shift(Gather):
    """Padding, and where ``before`` or ``after`` is below zero a crop: in a window that goes through a network alone a crop would take other cells."""

    @property
    def sized(self) -> bool:
        return min(self.before, self.after) < 0


@dataclass(frozen=True)
class Fill(Gather):
    """As many cells behind as make a ``multiple``."""

    multiple: int = 1

    def size(self, n: int) -> int:
        return -(-n // self.multiple) * self.multiple


@dataclass(frozen=True)
class Scatter(AccessPattern):
    """kernel k, stride s, dilation d; ``before`` cells are cut off the result's beginning, the rest off its end, but for ``extra``."""

    kernel: int
    stride: int
    dilation: int = 1
    before: int = 0
    extra: int = 0

    @property
    def span(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        return (n - 1) * self.stride - 2 * self.before + self.span + self.extra

    def cut(self, c: int) -> int:
        return c * self.stride - self.before + (self.span - self.stride + 1) // 2

    def needs(self, a: int, b: int) -> Span:
        """Also the input at whose place the first output lies: it may touch none of them, where k < s, but says where they are."""
        reach = max(self.span, self.stride)
        return -((reach - 1 - a - self.before) // self.stride), (
            b - 1 + self.before
        ) // self.stride + 1

    def pixels(self, before: Fraction) -> Fraction:
        return before / self.stride


@dataclass(frozen=True)
class Interpolate(AccessPattern):
    """``factor`` outputs an input; ``further`` cells on either side beyond the two that linear interpolation takes."""

    factor: int
    further: int = 0

    @property
    def stride(self) -> int:
        return self.factor

    def size(self, n: int) -> int:
        return n * self.factor

    def cut(self, c: int) -> int:
        return c * self.factor

    def needs(self, a: int, b: int) -> Span:
        first = (2 * a + 1 - self.factor) // (2 * self.factor)
        last = -(
            (self.factor - 1 - 2 * (b - 1)) // (2 * self.factor)
        )  # rounded up: a result right on a cell looks at no other
        return first - self.further, last + 1 + self.further

    def pixels(self, before: Fraction) -> Fraction:
        return before / self.factor


@dataclass(frozen=True)
class Align(Interpolate):
    """Linear, ``factor`` outputs an input, the outermost cells of both on each other: output j of m looks at the inputs around j (n - 1) / (m - 1).

    That is at most (f - 1) / f of a cell before j / f, whatever n is; both neighbours of any such place are taken.
    """

    def needs(self, a: int, b: int) -> Span:
        return a // self.factor - 1, (b - 1) // self.factor + 2


def inside(span: Span, n: int, mirrored: bool = False) -> Span:
    """The cells of a map of ``n`` that a span beyond its borders is made from: those inside, and the mirror images if ``mirrored``."""
    a, b = span
    first, last = max(0, min(a, n)), max(0, min(b, n))
    if mirrored:
        first = max(0, min(first, n - 1, *([2 * n - 1 - b] if b > n else [])))
        last = min(n, max(last, 1, *([1 - a] if a < 0 else [])))
    return first, max(first, last)
