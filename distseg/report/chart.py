"""Line charts as SVG for an HTML page.

A chart has no colours of its own: the page's style sheet defines the classes ``s0``, ``s1``, ... of
lines, so that light and dark pages use the same chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 38  # margins around the axes
_BINS = 300  # a line of more points is drawn as the mean of so many bins
_SYMBOLS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: the name of the line, for the texts that appear at its points.
        x: the positions, (n,), increasing.
        y: the values, (n,). NaN is a gap.
        style: the number of its colour and symbol.
        points: True to mark each value by a symbol.
        low: lower end of a band around the line, (n,); None for no band.
        high: upper end of the band, (n,).
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    style: int = 0
    points: bool = False
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def condensed(name: str, x: np.ndarray, y: np.ndarray, style: int = 0) -> Line:
    """Return a line of at most 300 points, each of which is the mean of consecutive values.

    A band around the line shows the smallest and the largest of these values. If there are only a
    few values, each becomes a point, and there is no band. Values that are not finite are left out.
    """
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(y) <= _BINS:
        return Line(name, x, y, style)
    starts = np.arange(_BINS) * len(y) // _BINS
    counts = np.diff([*starts, len(y)])
    means = [np.add.reduceat(values, starts) / counts for values in (x, y)]
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    return Line(name, *means, style, low=low, high=high)


def line_chart(
    lines: Sequence[Line], description: str, x_label: str, logarithmic: bool = False
) -> str:
    """Return a chart as an ``svg`` element.

    Args:
        lines: the lines; at least one has a finite value.
        description: the text for readers who cannot see the chart.
        x_label: the label of the x axis.
        logarithmic: True for a logarithmic y axis; all values must then be positive.
    """
    scale = _Scale(lines, logarithmic)
    parts = [*_axes(scale, x_label)]
    for line in lines:
        parts += _drawn(line, scale)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(description)}">'
        + "".join(parts)
        + "</svg>"
    )


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from ``low`` to ``high``, multiples of 1, 2 or 5 * 10^n."""
    if not high > low:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.7 * raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


class _Scale:
    """Conversion of the values of lines to pixel positions in a chart.

    Args:
        lines: the lines that must fit into the chart.
        logarithmic: True for a logarithmic y axis.
    """

    def __init__(self, lines: Sequence[Line], logarithmic: bool):
        values = np.concatenate(
            [v for line in lines for v in (line.y, line.low, line.high) if v is not None]
        )
        values = values[np.isfinite(values)]
        places = np.concatenate([line.x for line in lines])
        self.logarithmic = logarithmic
        self.left, self.right = min(0.0, float(places.min())), float(places.max())
        self.low, self.high = float(values.min()), float(values.max())
        if not logarithmic:
            self.low = min(self.low, 0.0)
            self.high += 0.04 * (self.high - self.low)
        if self.high <= self.low:  # all values are equal
            self.high = self.low + (abs(self.low) or 1.0)
        if self.right <= self.left:
            self.left, self.right = self.left - 0.5, self.right + 0.5

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    @property
    def y_ticks(self) -> list[float]:
        if not self.logarithmic:
            return ticks(self.low, self.high)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1, 2, 5) if last - first <= 3 else (1,)
        found = [m * 10.0**n for n in range(first, last + 1) for m in factors]
        return [v for v in found if self.low <= v <= self.high]


def _axes(scale: _Scale, x_label: str) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in scale.y_ticks:
        y = scale.y(value)
        yield f'<path class="grid" d="M{_LEFT} {y}H{right}"/>'
        yield f'<text x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{value:.4g}</text>'
    for value in ticks(scale.left, scale.right):
        if value == int(value):  # steps are whole numbers
            x = scale.x(value)
            yield f'<path class="axis" d="M{x} {bottom}v4"/>'
            yield f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{int(value)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>'
    yield f'<text x="{right}" y="{_HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>'


def _drawn(line: Line, scale: _Scale) -> Iterator[str]:
    """Yield the SVG elements of a line: its band, its path and its symbols."""
    style = f"s{line.style % 8}"
    if line.low is not None and line.high is not None:
        upper = [f"{scale.x(x)} {scale.y(y)}" for x, y in zip(line.x, line.high)]
        lower = [f"{scale.x(x)} {scale.y(y)}" for x, y in zip(line.x[::-1], line.low[::-1])]
        yield f'<path class="band {style}" d="M{"L".join(upper + lower)}Z"/>'
    path, gap = "", True
    for x, y in zip(line.x, line.y):
        if math.isfinite(y):
            path += f"{'M' if gap else 'L'}{scale.x(x)} {scale.y(y)}"
        gap = not math.isfinite(y)
    yield f'<path class="line {style}" d="{path}"/>'
    for x, y in zip(line.x, line.y) if line.points else ():
        if math.isfinite(y):
            yield (
                f'<g class="mark {style}"><title>{escape(line.name)}: {y:.4g} at {int(x)}</title>'
                f"{symbol(line.style, scale.x(x), scale.y(y))}</g>"
            )


def symbol(style: int, x: float, y: float) -> str:
    """Return a symbol that marks a point of a line, centred at (x, y), as an SVG element.

    ``style`` is the number of the symbol.
    """
    kind = _SYMBOLS[style % len(_SYMBOLS)]
    if kind == "circle":
        return f'<circle cx="{x}" cy="{y}" r="3"/>'
    shape = {
        "square": "-3 -3h6v6h-6z",
        "diamond": "0 -4l4 4l-4 4l-4 -4z",
        "triangle": "0 -4l4 7h-8z",
    }
    return f'<path d="m{shape[kind]}" transform="translate({x} {y})"/>'
