"""Access patterns that depend on the sizes of input and output, along one dim.

These are the patterns of resizing by any ratio, and of padding or cropping to the size of another
feature map. An output cell of a resize lies at a position of the input that may be fractional::

    inputs    |   0   |   1   |   2   |      n = 3
    outputs   | 0  | 1  | 2  | 3  | 4  |     m = 5
                     linear output 1 lies between inputs 0 and 1; nearest output 1 is input 0

So the inputs that an output reads are not at a constant offset from the output. They are computed
for each pair of sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import numpy as np

from distseg.tiling.access_pattern import AccessPattern, Span

_SIZES = 64  # number of results that the cache of taps() keeps
_NEAR = 2.0**-20  # relative error of a nearest position, which PyTorch may round to float32


@dataclass(frozen=True)
class SizeRule:
    """A rule that computes the size of one map from the size n of another, along one dim.

    The size is ``(times * n + plus) // over * unit`` or, with a factor, ``int(n * factor)``.
    """

    times: int = 1
    plus: int = 0
    over: int = 1
    factor: float | None = None
    unit: int = 1

    def size(self, n: int) -> int:
        """Return the size that this rule computes for one map from the size ``n`` of the other."""
        if self.factor is not None:
            return int(n * self.factor)
        return (self.times * n + self.plus) // self.over * self.unit

    def pixels(self, before: Fraction) -> Fraction:
        """Return the number of image pixels per cell of the map whose size this rule computes.

        Args:
            before: number of image pixels per cell of the other map, whose size n the rule takes.

        Returns:
            The number of pixels; 1 if the rule gives a fixed size.
        """
        if self.factor is not None:
            return before / Fraction(self.factor).limit_denominator(_FINEST)
        return before * self.over / (self.times * self.unit) if self.times else Fraction(1)


_FINEST = 64  # largest denominator to which a user's factor is rounded for the network's stride


@dataclass(frozen=True)
class Resize(AccessPattern):
    """The access pattern of ``F.interpolate`` and adaptive average pooling.

    Output j of m reads the inputs around its position among the n inputs.

    Attributes:
        kernel: nearest, nearest-exact, linear, cubic, linear-aa or cubic-aa (``antialias``), or
            area (adaptive average pooling).
        corners: True if the outermost cells of input and output coincide (``align_corners``).
        follow: the rule that computes the output's size from the size of the input or of another
            map.
        factor: the number of outputs per input, if the user's call gives a factor. None for m / n.
    """

    kernel: str
    corners: bool = False
    follow: SizeRule = SizeRule()
    factor: float | None = None
    sized: ClassVar[bool] = True

    def size(self, n: int) -> int:
        return self.follow.size(n)

    def pixels(self, before: Fraction) -> Fraction:
        return self.follow.pixels(before)

    def for_sizes(self, n: int, m: int) -> Taps:
        return taps(self.kernel, self.corners, self.factor, n, m)


@dataclass(frozen=True)
class Fit(AccessPattern):
    """The access pattern of padding or cropping a map to the size of another map.

    The input has n cells and the output has m. Output j is input ``j - before``, where ``before``
    is the number of cells that are added in front of the map.

    Attributes:
        side: how many of the m - n added cells lie in front of the map: ``half`` (rounded down),
            ``larger half`` (rounded up), ``all``, ``none``, or a number of cells.
        mirrored: True if the padding repeats cells of the map.
        follow: the rule that computes the output's size from the size of the other map.
    """

    side: str | int = "half"
    mirrored: bool = False
    follow: SizeRule = SizeRule()
    sized: ClassVar[bool] = True
    beyond: ClassVar[bool] = True

    def size(self, n: int) -> int:
        return self.follow.size(n)

    def pixels(self, before: Fraction) -> Fraction:
        return self.follow.pixels(before)

    def before(self, n: int, m: int) -> int:
        """Return the number of cells that are added in front of a map, along one dim.

        The number is negative if cells are cropped.

        Args:
            n: the number of cells of the map.
            m: the number of cells of the result.
        """
        return in_front(self.side, m - n)

    def for_sizes(self, n: int, m: int) -> Shifted:
        return Shifted(self.before(n, m), self.mirrored)


SIDES = ("half", "larger half", "all", "none")


def in_front(side: str | int, more: int) -> int:
    """Return how many of ``more`` cells of padding are added in front of the map.

    Args:
        side: the attribute of :class:`Fit`: one of ``SIDES``, or a number of cells, which is
            returned as it is.
        more: the number of cells that are added; negative for a crop.
    """
    if isinstance(side, int):
        return side
    return {"half": more // 2, "larger half": -(-more // 2), "all": more, "none": 0}[side]


@dataclass(frozen=True)
class Shifted(AccessPattern):
    """The access pattern of padding by ``before`` cells: output j is input j - ``before``.

    ``mirrored`` is True if positions outside the map read a cell inside of it, as with the padding
    modes ``reflect``, ``replicate`` and ``circular``.
    """

    before: int
    mirrored: bool = False
    beyond: ClassVar[bool] = True

    def cut(self, c: int) -> int:
        return c + self.before

    def needs(self, a: int, b: int) -> Span:
        return a - self.before, b - self.before


@dataclass(frozen=True)
class Share(AccessPattern):
    """The access pattern of resizing a map in which all cells of a channel have the same value.

    A vector of the image is such a map. An output reads the inputs that cover the same part of the
    image. Because all cells are equal, a window gives the same values as the whole image. So
    ``sized`` is False.
    """

    follow: SizeRule = SizeRule()
    alike: ClassVar[bool] = True

    def size(self, n: int) -> int:
        return self.follow.size(n)

    def pixels(self, before: Fraction) -> Fraction:
        return self.follow.pixels(before)

    def for_sizes(self, n: int, m: int) -> Proportional:
        return Proportional(n, m)


@dataclass(frozen=True)
class Proportional(AccessPattern):
    """The access pattern of :class:`Share` when the input has n cells and the output m cells.

    Output j reads the inputs that cover the same part of the map: from j n / m to (j + 1) n / m.
    """

    n: int
    m: int

    def cut(self, c: int) -> int:
        return _rounded(c * self.m, self.n)

    def needs(self, a: int, b: int) -> Span:
        return a * self.n // self.m, -(-b * self.n // self.m)


def _rounded(x: int, y: int) -> int:
    """Return x / y, rounded to the nearest whole number."""
    return (2 * x + y) // (2 * y)


class Taps(AccessPattern):
    """The input cells that each output cell of a :class:`Resize` reads, and their weights.

    The input has n cells, the output m cells. A *tap* is one input cell that an output reads.

    Args:
        weigh: a function that returns the weights (taps per output, outputs) for a slice of the
            outputs and a number of taps per output.

    Attributes:
        first, last: for each output the first and the last input that the output reads. Positions
            beyond the map stand for the map's outermost cells.
    """

    def __init__(
        self,
        n: int,
        m: int,
        first: np.ndarray,
        last: np.ndarray,
        weigh: Callable[[slice, int], np.ndarray] | None = None,
    ):
        self.n, self.m, self.first, self.last, self._weigh = n, m, first, last, weigh

    def cut(self, c: int) -> int:
        return _rounded(c * self.m, self.n)

    def needs(self, a: int, b: int) -> Span:
        if a >= b:
            return (self._inside(self.first[min(a, self.m - 1)]),) * 2
        return self._inside(self.first[a]), self._inside(self.last[b - 1]) + 1

    def _inside(self, place: np.integer) -> int:
        """Return the index of the cell at ``place``; beyond the map, of the outermost cell."""
        return min(max(int(place), 0), self.n - 1)

    def shares(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (input indices, weights) of outputs a..b-1, each (taps per output, b - a).

        An output is the sum of its inputs times their weights. The kernels ``nearest`` and
        ``nearest-exact`` have no weights, so this method cannot be called for them.
        """
        wanted = slice(a, b)
        if a >= b:
            return np.zeros((1, 0), np.int64), np.zeros((1, 0))
        width = int((self.last[wanted] - self.first[wanted]).max()) + 1
        # Taps after an output's last input repeat that input and have weight 0.
        places = np.minimum(np.arange(width)[:, None] + self.first[wanted], self.last[wanted])
        return np.clip(places, 0, self.n - 1), self._weigh(wanted, width)


@lru_cache(_SIZES)
def taps(kernel: str, corners: bool, factor: float | None, n: int, m: int) -> Taps:
    """Return the input cells that each output cell of a resize reads, and their weights.

    Args:
        kernel, corners, factor: the attributes of :class:`Resize`.
        n, m: the numbers of input and of output cells. Cells and weights are those of PyTorch's
            kernels.
    """
    outputs = np.arange(m)
    if kernel == "area":
        return _averages(n, m, outputs)
    if corners:
        step = (n - 1) / max(1, m - 1)  # inputs per output
    else:
        step = 1 / factor if factor else n / m
    if kernel.startswith("nearest"):
        return _nearest(n, m, (outputs + 0.5 * (kernel == "nearest-exact")) * step)
    if kernel.endswith("-aa"):
        return _smooth(n, m, (outputs + 0.5) * step, step, kernel == "cubic-aa")
    places = outputs * step if corners else (outputs + 0.5) * step - 0.5
    if kernel == "cubic":
        return _cubic(n, m, places)
    # Between equal sizes PyTorch copies the map, whatever the factor.
    return _linear(n, m, outputs if n == m else np.maximum(places, 0.0))


def _nearest(n: int, m: int, places: np.ndarray) -> Taps:
    """Return the input cells that each output cell of a nearest resize may read.

    PyTorch's kernels compute a position in float32 or float64, which may round to different inputs.
    Both are included. If n and m are equal, some kernels copy the map, so output i may also read
    input i.

    Args:
        n, m: the numbers of inputs and outputs.
        places: the position of each output in units of input cells, (m,). Output i reads input
            floor(places[i]).
    """
    first, last = (np.floor(places * (1 + by)).astype(np.int64) for by in (-_NEAR, _NEAR))
    if n == m:
        first, last = np.minimum(first, np.arange(m)), np.maximum(last, np.arange(m))
    return Taps(n, m, first, last)


def _linear(n: int, m: int, places: np.ndarray) -> Taps:
    first = places.astype(np.int64)

    def weigh(wanted: slice, width: int) -> np.ndarray:
        share = places[wanted] - first[wanted]
        return np.stack((1 - share, share))

    return Taps(n, m, first, first + 1, weigh)


def _cubic(n: int, m: int, places: np.ndarray) -> Taps:
    """Return the input cells and weights of cubic resizing (Keys, 1981, with a = -0.75).

    Args:
        n, m: the numbers of inputs and outputs.
        places: the position of each output in units of input cells, (m,).
    """
    first = np.floor(places).astype(np.int64)

    def weigh(wanted: slice, width: int) -> np.ndarray:
        share = places[wanted] - first[wanted]
        return np.stack([_cubic_at(np.abs(share - k), -0.75) for k in range(-1, 3)])

    return Taps(n, m, first - 1, first + 2, weigh)


def _cubic_at(x: np.ndarray, a: float) -> np.ndarray:
    """Return the weights of the cubic kernel (Keys, 1981) with parameter a at distances x >= 0."""
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _averages(n: int, m: int, outputs: np.ndarray) -> Taps:
    """Return the input cells and weights of adaptive average pooling from n to m cells.

    ``outputs`` holds the output indices 0 .. m - 1.
    """
    first, last = outputs * n // m, -(-(outputs + 1) * n // m) - 1

    def weigh(wanted: slice, width: int) -> np.ndarray:
        cells = last[wanted] - first[wanted] + 1
        return np.where(np.arange(width)[:, None] < cells, 1 / cells, 0.0)

    return Taps(n, m, first, last, weigh)


def _smooth(n: int, m: int, centres: np.ndarray, step: float, cubic: bool) -> Taps:
    """Return the input cells and weights of resizing with ``antialias=True``.

    Args:
        n, m: the numbers of inputs and outputs.
        centres: the centre of each output, where input i covers the positions from i to i + 1.
        step: the number of inputs per output. If it is more than 1, the kernel is wider by this
            factor.
        cubic: True for the cubic kernel, False for the linear one.
    """
    scale = max(step, 1.0)
    reach = (2.0 if cubic else 1.0) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + reach + 0.5).astype(np.int64), n) - 1

    def weigh(wanted: slice, width: int) -> np.ndarray:
        each = np.arange(width)[:, None]
        x = np.abs(each + first[wanted] - centres[wanted] + 0.5) / scale
        found = _cubic_at(x, -0.5) if cubic else np.maximum(1 - x, 0.0)
        found = np.where(each + first[wanted] <= last[wanted], found, 0.0)
        return found / found.sum(0)

    return Taps(n, m, first, last, weigh)
