"""Augmentation that commutes with cutting windows: turns as index maps, and colours pixel by pixel.

So a rank that computes one window of an augmented image reads that window only, and all ranks together see exactly what
one rank would see that turns the whole image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distseg.tiling.tile import Box


@dataclass(frozen=True)
class Turn:
    """``quarters`` turns by 90 degrees, as ``np.rot90`` does, of the last two dims; then mirrored along the dims of ``flips``."""

    flips: tuple[bool, ...]
    quarters: int = 0

    @classmethod
    def none(cls, dims: int) -> "Turn":
        return cls((False,) * dims)

    def size(self, size) -> tuple[int, ...]:
        """The size of a turned crop; its own inverse."""
        size = tuple(size)
        return (*size[:-2], size[-1], size[-2]) if self.quarters % 2 else size

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Turn the last dims of an array: (*size) or (C, *size) -> contiguous."""
        if self.quarters:
            array = np.rot90(array, self.quarters, axes=(-2, -1))
        dims = len(self.flips)
        return np.ascontiguousarray(
            np.flip(array, [d - dims for d, flip in enumerate(self.flips) if flip])
        )

    def source(self, box: Box, size) -> Box:
        """The box of a crop of ``size`` whose turned content is ``box`` of the turned crop."""
        box = _mirrored(box, self.size(size), self.flips)
        for quarters_left in reversed(range(self.quarters)):
            box = _turned_back(box, Turn(self.flips, quarters_left).size(size))
        return box


@dataclass(frozen=True)
class Colour:
    """Other light, another sensor: each band of a normalised image times a gain, plus an offset in standard deviations."""

    gains: tuple[float, ...]
    offsets: tuple[float, ...]

    @classmethod
    def of(cls, uniform: np.ndarray, strength: float = 0.25) -> "Colour":
        """From 2 x bands numbers in [0, 1): gains in exp(+- strength), offsets in +- strength."""
        gains, offsets = (2 * uniform - 1).reshape(2, -1) * strength
        return cls(tuple(np.exp(gains)), tuple(offsets))

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """(C, *size) float32."""
        gains, offsets = (
            np.asarray(v, dtype=np.float32).reshape(-1, *(1,) * (pixels.ndim - 1))
            for v in (self.gains, self.offsets)
        )
        return pixels * gains + offsets


def _mirrored(box: Box, size, flips) -> Box:
    ranges = [
        (n - b, n - a) if flip else (a, b)
        for a, b, n, flip in zip(box.start, box.stop, size, flips)
    ]
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def _turned_back(box: Box, size) -> Box:
    """Undo one quarter turn: pixel (i, j) of the turned image is pixel (j, width - 1 - i) of one of ``size``."""
    *outer, (i0, i1), (j0, j1) = zip(box.start, box.stop)
    ranges = [*outer, (j0, j1), (size[-1] - i1, size[-1] - i0)]
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
