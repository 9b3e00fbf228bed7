"""Footprints whose cells hang on the sizes of both maps, along one dim: resizing by any ratio, padding and cropping to the size of another map.

A result cell of a resize lies at a true place of the input, which is no whole number of cells there::

    inputs    |   0   |   1   |   2   |        n = 3
    outputs   | 0  | 1  | 2  | 3  | 4  |       m = 5; linear output 1 lies between inputs 0 and 1, nearest output 1 is input 0

So how far an output looks is no constant, and is worked out for each pair of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Callable, ClassVar

import numpy as np

from distseg.tiling.access_pattern import AccessPattern, Span

_SIZES = 64  # pairs of sizes whose places are kept
_NEAR = 2.0**-20  # by which a nearest place may be off, times itself: PyTorch rounds it to float32


@dataclass(frozen=True)
class Follow:
    """Rule by which a size follows another, n: (``times`` n + ``plus``) // ``over`` times ``unit``, or n times a ``factor``, rounded down."""

    times: int = 1
    plus: int = 0
    over: int = 1
    factor: float | None = None
    unit: int = 1

    def size(self, n: int) -> int:
        return (
            int(n * self.factor)
            if self.factor is not None
            else (self.times * n + self.plus) // self.over * self.unit
        )

    def pixels(self, before: Fraction) -> Fraction:
        """Return the pixels of a cell where one of the other map has ``before``; 1 where the size is fixed."""
        if self.factor is not None:
            return before / Fraction(self.factor).limit_denominator(_FINEST)
        return before * self.over / (self.times * self.unit) if self.times else Fraction(1)


_FINEST = 64  # denominator of a factor that the stride of a network takes notice of


@dataclass(frozen=True)
class Resize(AccessPattern):
    """Output j of m looks at the inputs around its true place among n, as ``F.interpolate`` does.

    Attributes:
        kernel: nearest, nearest-exact, linear, cubic, linear-aa and cubic-aa (``antialias``), or area, as adaptive pooling.
        corners: the outermost cells of both lie on each other (``align_corners``).
        follow: how the result's size follows that of the input, or of another map.
        factor: outputs an input where places follow a factor of the user's; None: m / n.
    """

    kernel: str
    corners: bool = False
    follow: Follow = Follow()
    factor: float | None = None
    sized: ClassVar[bool] = True

    def size(self, n: int) -> int:
        return self.follow.size(n)

    def pixels(self, before: Fraction) -> Fraction:
        return self.follow.pixels(before)

    def at(self, n: int, m: int) -> "Taps":
        return taps(self.kernel, self.corners, self.factor, n, m)


@dataclass(frozen=True)
class Fit(AccessPattern):
    """Output j of m is input j - before, in a frame of padding or less its borders: before is a part of m - n.

    Attributes:
        side: of what is added, or cut off, the part in front: ``half`` rounded down, ``larger half`` rounded up, ``all`` or ``none`` of it; or so many cells.
        mirrored: padding is made of cells of the map.
        follow: how the result's size follows that of another map.
    """

    side: str | int = "half"
    mirrored: bool = False
    follow: Follow = Follow()
    sized: ClassVar[bool] = True
    beyond: ClassVar[bool] = True

    def size(self, n: int) -> int:
        return self.follow.size(n)

    def pixels(self, before: Fraction) -> Fraction:
        return self.follow.pixels(before)

    def before(self, n: int, m: int) -> int:
        """Return the cells in front, below zero where they are cut off."""
        return in_front(self.side, m - n)

    def at(self, n: int, m: int) -> "Shifted":
        return Shifted(self.before(n, m), self.mirrored)


SIDES = ("half", "larger half", "all", "none")


def in_front(side: str | int, more: int) -> int:
    """Return how many of ``more`` cells lie in front."""
    return (
        side
        if isinstance(side, int)
        else {"half": more // 2, "larger half": -(-more // 2), "all": more, "none": 0}[side]
    )


@dataclass(frozen=True)
class Shifted(AccessPattern):
    """Output j is input j - ``before``."""

    before: int
    mirrored: bool = False
    beyond: ClassVar[bool] = True

    def cut(self, c: int) -> int:
        return c + self.before

    def needs(self, a: int, b: int) -> Span:
        return a - self.before, b - self.before


@dataclass(frozen=True)
class Share(AccessPattern):
    """Outputs a..b-1 stand for the same share of the image as the inputs that they look at, as of a vector that is alike at all places.

    It matters to nobody which cells these are, so it is not ``sized``.
    """

    follow: Follow = Follow()
    alike: ClassVar[bool] = True

    def size(self, n: int) -> int:
        return self.follow.size(n)

    def pixels(self, before: Fraction) -> Fraction:
        return self.follow.pixels(before)

    def at(self, n: int, m: int) -> "Proportional":
        return Proportional(n, m)


@dataclass(frozen=True)
class Proportional(AccessPattern):
    """A :class:`Share` between n and m cells."""

    n: int
    m: int

    def cut(self, c: int) -> int:
        return _rounded(c * self.m, self.n)

    def needs(self, a: int, b: int) -> Span:
        return a * self.n // self.m, -(-b * self.n // self.m)


def _rounded(x: int, y: int) -> int:
    return (2 * x + y) // (2 * y)


class Taps(AccessPattern):
    """The places of a :class:`Resize` between n and m cells.

    Attributes:
        first, last: of each output the outermost inputs that it looks at; beyond the map lie copies of its outermost cells.
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
        inside = lambda place: min(max(int(place), 0), self.n - 1)
        if a >= b:
            return (inside(self.first[min(a, self.m - 1)]),) * 2
        return inside(self.first[a]), inside(self.last[b - 1]) + 1

    def shares(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs of outputs a..b-1 and what each has in them, both (inputs of an output, b - a). None of nearest places."""
        wanted = slice(a, b)
        if a >= b:
            return np.zeros((1, 0), np.int64), np.zeros((1, 0))
        width = int((self.last[wanted] - self.first[wanted]).max()) + 1
        places = np.minimum(
            np.arange(width)[:, None] + self.first[wanted], self.last[wanted]
        )  # those beyond have no share
        return np.clip(places, 0, self.n - 1), self._weigh(wanted, width)


@lru_cache(_SIZES)
def taps(kernel: str, corners: bool, factor: float | None, n: int, m: int) -> Taps:
    """Return the places of a resize from n to m cells, as PyTorch's kernels compute them."""
    outputs = np.arange(m)
    if kernel == "area":
        return _averages(n, m, outputs)
    step = (
        (n - 1) / max(1, m - 1) if corners else 1 / factor if factor else n / m
    )  # inputs an output
    if kernel.startswith("nearest"):
        return _nearest(n, m, (outputs + 0.5 * (kernel == "nearest-exact")) * step)
    if kernel.endswith("-aa"):
        return _smooth(n, m, (outputs + 0.5) * step, step, kernel == "cubic-aa")
    places = outputs * step if corners else (outputs + 0.5) * step - 0.5
    if kernel == "cubic":
        return _cubic(n, m, places)
    return _linear(
        n, m, outputs if n == m else np.maximum(places, 0.0)
    )  # of as many cells PyTorch makes a copy, whatever the factor


def _nearest(n: int, m: int, places: np.ndarray) -> Taps:
    """Return bounds of the nearest inputs, which PyTorch finds in float32 or float64 by kernel; of as many cells some make a copy."""
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
    """Return the places of cubic convolution (Keys, 1981) with a = -0.75."""
    first = np.floor(places).astype(np.int64)

    def weigh(wanted: slice, width: int) -> np.ndarray:
        share = places[wanted] - first[wanted]
        return np.stack([_cubic_at(np.abs(share - k), -0.75) for k in range(-1, 3)])

    return Taps(n, m, first - 1, first + 2, weigh)


def _cubic_at(x: np.ndarray, a: float) -> np.ndarray:
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _averages(n: int, m: int, outputs: np.ndarray) -> Taps:
    first, last = outputs * n // m, -(-(outputs + 1) * n // m) - 1

    def weigh(wanted: slice, width: int) -> np.ndarray:
        cells = last[wanted] - first[wanted] + 1
        return np.where(np.arange(width)[:, None] < cells, 1 / cells, 0.0)

    return Taps(n, m, first, last, weigh)


def _smooth(n: int, m: int, centres: np.ndarray, step: float, cubic: bool) -> Taps:
    """Return the places of ``antialias=True``: where an output stands for several inputs its kernel is as wide."""
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
