"""Transparency that marks pixels without data, and a check that it looks like transparency."""

from __future__ import annotations

import numpy as np

# How transparency is read: pixels where it is 0 have no data, or it is an ordinary band.
MASK, BAND = "mask", "band"
# A band is hardly transparency if a larger share of it is neither transparent nor opaque.
_DOUBTFUL = 0.5


class Opacity:
    """Histogram of an alpha band of 8 or 16 bits, filled part by part."""

    def __init__(self):
        self._counts = np.zeros(1, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Add alpha values, an array of any shape; it is ignored if not uint8 or uint16."""
        if values.dtype in (np.uint8, np.uint16):
            found = np.bincount(values.ravel(), minlength=len(self._counts))
            found[: len(self._counts)] += self._counts
            self._counts = found

    @property
    def between(self) -> float:
        """The share of the added alpha values that are neither 0 nor the largest value added."""
        there, counted = np.flatnonzero(self._counts), int(self._counts.sum())
        return sum(int(self._counts[value]) for value in there[:-1] if value) / max(1, counted)

    @property
    def doubtful(self) -> bool:
        """True if most values are neither transparent nor opaque, as in a measured band."""
        return self.between > _DOUBTFUL
