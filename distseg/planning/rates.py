"""Look up measured rates: of operations by kind, number type and shape, of messages by size.

A table of operations has a rate for each measured shape. Between shapes, rates are interpolated
along the logarithms of cells and of channels. Beyond the measured shapes, the rate of the nearest
one is taken, and the lookup says so.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

# Kinds of operations: those with arithmetic have rates in FLOP/s, the others in bytes/s.
ARITHMETIC = ("convolution", "transposed")
TRAFFIC = ("norm", "elementwise", "copy", "pooling", "resampling")
# Kinds of operations whose rate depends more on the shape than on the speed of the memory.
SHAPED = (*ARITHMETIC, "pooling", "resampling")
PRECISIONS = ("fp64", "fp32", "bf16")


class Shape(NamedTuple):
    """Kind and size of an operation, on which its rate depends.

    Attributes:
        kind: the kind of operation, a name in ``ARITHMETIC`` or ``TRAFFIC``.
        channels: channels of the operation's result.
        cells: cells of one channel, over all images.
        work: FLOPs of an operation with arithmetic, else bytes.
    """

    kind: str
    channels: int
    cells: int
    work: int


@dataclass(frozen=True)
class Rate:
    """Measured rate of one operation.

    Attributes:
        kind: the kind of operation.
        precision: the number type, fp32 or bf16.
        channels, cells: the shape (:class:`Shape`).
        rate: FLOP/s, or bytes/s for kinds of ``TRAFFIC``.
    """

    kind: str
    precision: str
    channels: int
    cells: int
    rate: float


@dataclass(frozen=True)
class Rates:
    """Table of the measured rates of operations.

    Attributes:
        rows: the measured rates.
    """

    rows: tuple[Rate, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    def divided(self, factor: float) -> Rates:
        """Return the table with all rates divided by ``factor``."""
        return Rates(tuple(replace(row, rate=row.rate / factor) for row in self.rows))

    def has(self, kind: str, precision: str) -> bool:
        """Return True if some shape of this kind was measured in this number type."""
        return (kind, precision) in self._curves

    def rate(self, shape: Shape, precision: str) -> tuple[float, bool] | None:
        """Return the rate of an operation, and True if its shape is in the range of measured ones.

        For a kind of operation that was not measured in this number type, the rate in fp32 and
        False are returned. The result is None if the kind was not measured at all.

        Args:
            shape: the operation.
            precision: the number type.
        """
        own = self.has(shape.kind, precision)
        curves = self._curves.get((shape.kind, precision if own else "fp32"))
        if curves is None:
            return None
        cells, channels = math.log(max(1, shape.cells)), math.log(max(1, shape.channels))
        each = [np.interp(cells, xs, ys) for _, xs, ys in curves]
        widths = [width for width, _, _ in curves]
        # The curves of the next smaller and the next larger number of channels.
        above = min(bisect_left(widths, channels), len(widths) - 1)
        below = min(max(0, bisect_right(widths, channels) - 1), len(widths) - 1)
        inside = widths[0] <= channels <= widths[-1] and all(
            curves[k][1][0] <= cells <= curves[k][1][-1] for k in (below, above)
        )
        return math.exp(np.interp(channels, widths, each)), own and inside

    @cached_property
    def _curves(self) -> dict[tuple[str, str], list[tuple[float, list, list]]]:
        """Logarithms of the measured rates, for each (kind, number type).

        Each entry of a list is (log of channels, logs of cells, logs of rates).
        """
        points: dict = {}
        for row in self.rows:
            of_kind = points.setdefault((row.kind, row.precision), {})
            of_kind.setdefault(row.channels, []).append((math.log(row.cells), math.log(row.rate)))
        return {
            key: [
                (math.log(channels), *map(list, zip(*sorted(found))))
                for channels, found in sorted(of_kind.items())
            ]
            for key, of_kind in points.items()
        }


def rates_of(kernels: Iterable[tuple[Shape, float]], precision: str) -> Rates:
    """Return the rates of the kernels of a step whose speed is not that of the memory.

    These are convolutions, poolings and other kernels that change the size of a feature map.

    Args:
        kernels: the shape and the seconds of each kernel. Those of the same kind, channels and
            cells make one rate, their work over their seconds.
        precision: the number type of the step.
    """
    found: dict[tuple[str, int, int], tuple[float, float]] = {}
    for shape, seconds in kernels:
        if shape.kind in SHAPED and shape.work:
            work, before = found.get(shape[:3], (0.0, 0.0))
            found[shape[:3]] = work + shape.work, before + seconds
    return Rates(
        tuple(
            Rate(kind, precision, channels, cells, work / seconds)
            for (kind, channels, cells), (work, seconds) in found.items()
            if seconds
        )
    )


class Curve:
    """Measured seconds of a message or of a sum over ranks, by size.

    Between sizes, seconds are interpolated along logarithms. A size below the smallest one takes as
    long as that one. Above the largest one, seconds grow with the size.

    Args:
        points: measured (bytes, seconds). If a larger size was measured to take less time than a
            smaller one, it is assumed to take as long as the smaller one.
    """

    def __init__(self, points: Iterable[tuple[float, float]]):
        sizes, seconds = zip(*sorted(points))
        self._sizes = np.log(sizes)
        self._seconds = np.log(np.maximum.accumulate(seconds))

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of ``size`` bytes."""
        where = math.log(max(1.0, size))
        beyond = max(0.0, where - self._sizes[-1])
        return math.exp(np.interp(where, self._sizes, self._seconds) + beyond)


@dataclass(frozen=True)
class Timing:
    """Measured duration of messages that all ranks exchange at the same time.

    Attributes:
        kind: ``message`` from each rank to the next one, or ``sum`` over all ranks.
        ranks: number of ranks.
        bytes: bytes of a message, or of the numbers that are summed.
        seconds: the duration.
    """

    kind: str
    ranks: int
    bytes: float
    seconds: float


TIMINGS = ("message", "sum")
