"""Transparency as a sign of no data, and whether a band that is marked as transparency looks like it."""

from __future__ import annotations

import numpy as np

MASK, BAND = (
    "mask",
    "band",
)  # what becomes of transparency: pixels of alpha 0 have no data; or a band like others
_DOUBTFUL = 0.5  # share of pixels that are neither transparent nor opaque, beyond which a band hardly is transparency


class Opacity:
    """Counts the values of an alpha band of bytes or 16 bits, part by part."""

    def __init__(self):
        self._counts = np.zeros(1, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count ``values``, of any shape; those of other types are not looked at."""
        if values.dtype in (np.uint8, np.uint16):
            found = np.bincount(values.ravel(), minlength=len(self._counts))
            found[: len(self._counts)] += self._counts
            self._counts = found

    @property
    def between(self) -> float:
        """Share of the values that are neither 0 nor the largest there is."""
        there, counted = np.flatnonzero(self._counts), int(self._counts.sum())
        return sum(int(self._counts[value]) for value in there[:-1] if value) / max(1, counted)

    @property
    def doubtful(self) -> bool:
        """True if most values are such as measured bands have."""
        return self.between > _DOUBTFUL
