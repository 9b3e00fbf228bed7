"""Augmentation that commutes with cutting windows: turns, flips and per-pixel colour changes.

A rank that computes one window of an augmented image reads only that window. All ranks together get
exactly the pixels that one rank would get by augmenting the whole image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distseg.tiling.tile import Box


@dataclass(frozen=True)
class Turn:
    """Turn of an image: rotation of the last two dims by ``quarters`` x 90 degrees, then flips.

    The rotation is that of ``np.rot90``. ``flips`` has one bool per dim, True to flip it.
    """

    flips: tuple[bool, ...]
    quarters: int = 0

    @classmethod
    def none(cls, dims: int) -> Turn:
        """Return the turn that changes nothing."""
        return cls((False,) * dims)

    def size(self, size) -> tuple[int, ...]:
        """Return the size of a crop after the turn, from its ``size`` before.

        A turn by 90 or 270 degrees swaps the last two dims. So the method can also be called with
        the size after the turn; it then returns the size before the turn.
        """
        size = tuple(size)
        return (*size[:-2], size[-1], size[-2]) if self.quarters % 2 else size

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return ``array``, (*size) or (C, *size), turned in its spatial dims and contiguous."""
        if self.quarters:
            array = np.rot90(array, self.quarters, axes=(-2, -1))
        dims = len(self.flips)
        return np.ascontiguousarray(
            np.flip(array, [d - dims for d, flip in enumerate(self.flips) if flip])
        )

    def source(self, box: Box, size) -> Box:
        """Return the box of the crop before the turn whose pixels the turn moves to ``box``.

        Args:
            box: a box of the turned crop.
            size: the size of the crop before the turn.
        """
        box = _mirrored(box, self.size(size), self.flips)
        for quarters_left in reversed(range(self.quarters)):
            box = _turned_back(box, Turn(self.flips, quarters_left).size(size))
        return box

    def target(self, box: Box, size) -> Box:
        """Return the box of the turned crop to which the turn moves the pixels of ``box``.

        Args:
            box: a box of the crop before the turn.
            size: the size of the crop before the turn.
        """
        for quarters in range(self.quarters):
            box = _turned(box, Turn(self.flips, quarters).size(size))
        return _mirrored(box, self.size(size), self.flips)


@dataclass(frozen=True)
class Colour:
    """Change of colours of a normalised image: a gain and an offset for each band.

    It imitates other light or another sensor.

    Attributes:
        gains: the factor of each band, (bands,).
        offsets: the number added to each band, in standard deviations of the band, (bands,).
    """

    gains: tuple[float, ...]
    offsets: tuple[float, ...]

    @classmethod
    def from_uniform(cls, uniform: np.ndarray, strength: float = 0.25) -> Colour:
        """Return the change of colours that the given random numbers determine.

        Args:
            uniform: (2 * bands,) random numbers in [0, 1).
            strength: gains lie in exp(-strength) .. exp(strength), and offsets in
                -strength .. strength.
        """
        gains, offsets = (2 * uniform - 1).reshape(2, -1) * strength
        return cls(tuple(np.exp(gains)), tuple(offsets))

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Return pixels after the change: ``pixels`` times gain plus offset, (C, *size) float32."""
        gains, offsets = (
            np.asarray(v, dtype=np.float32).reshape(-1, *(1,) * (pixels.ndim - 1))
            for v in (self.gains, self.offsets)
        )
        return pixels * gains + offsets


def _mirrored(box: Box, size, flips) -> Box:
    """Return the box to which a flip of an image moves the pixels of ``box``.

    Args:
        box: a box of the image before the flip.
        size: the size of the image.
        flips: for each dim, True if the image is flipped along it.
    """
    ranges = [
        (n - b, n - a) if flip else (a, b)
        for a, b, n, flip in zip(box.start, box.stop, size, flips)
    ]
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def _turned(box: Box, size) -> Box:
    """Return the box of the turned image to which a turn by 90 degrees moves ``box``.

    Pixel (i, j) of the image moves to (width - 1 - j, i).

    Args:
        box: a box of the image before the turn.
        size: the size of the image before the turn.
    """
    *outer, (i0, i1), (j0, j1) = zip(box.start, box.stop)
    ranges = [*outer, (size[-1] - j1, size[-1] - j0), (i0, i1)]
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def _turned_back(box: Box, size) -> Box:
    """Return the box of an image that a turn by 90 degrees moves to ``box``.

    Pixel (i, j) of the turned image is pixel (j, width - 1 - i) of the image before the turn.

    Args:
        box: a box of the turned image.
        size: the size of the image before the turn.
    """
    *outer, (i0, i1), (j0, j1) = zip(box.start, box.stop)
    ranges = [*outer, (j0, j1), (size[-1] - i1, size[-1] - i0)]
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
