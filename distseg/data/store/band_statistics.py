"""Compute the statistics in a store: mean and standard deviation of each band, and class counts.

They are computed once, when the store is written, so that training need not read all data first.
"""

from __future__ import annotations

import numpy as np

from distseg.data.store.layout import BLOCK, blocks
from distseg.tiling.tile import Box


class Moments:
    """Mean and standard deviation of each band of images, computed block by block in float64.

    Blocks are merged by the formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise
    algorithm for computing sample variances", 1979). It avoids the cancellation in mean(x^2) -
    mean(x)^2 when the mean is large.

    Args:
        bands: number of bands.

    Attributes:
        pixels: for each band, the number of pixels with data that were added.
        mean: (bands,) the mean of these pixels.
    """

    def __init__(self, bands: int):
        self.pixels = [0] * bands
        self.mean = np.zeros(bands)
        self._squares = np.zeros(bands)  # sums of squared distances from the mean

    def add(self, pixels: np.ndarray, missing: np.ndarray | None = None) -> None:
        """Add a block of pixels to the statistics.

        Args:
            pixels: (bands, *size), not empty.
            missing: bool of the same shape, True for values without data; None if all have data.
        """
        for band, values in enumerate(pixels):
            self._add(band, values if missing is None else values[~missing[band]])

    def _add(self, band: int, values: np.ndarray) -> None:
        before, count = self.pixels[band], values.size
        if not count:
            return
        total = before + count
        values = values.astype(np.float64)
        mean = values.mean()
        values -= mean
        shift = mean - self.mean[band]
        self._squares[band] += np.vdot(values, values) + shift**2 * before * count / total
        self.mean[band] += shift * count / total
        self.pixels[band] = total

    @property
    def std(self) -> np.ndarray:
        """The population standard deviation of each band, (bands,).

        It is 1 for a constant band, so that pixels can be divided by it.
        """
        std = np.sqrt(self._squares / np.maximum(1, self.pixels))
        return np.where(std > 0, std, 1.0)


class ClassCounts:
    """Number of pixels of each class, in every block of an image and in the whole image.

    Args:
        classes: number of classes.
        size: the size of the image.

    Attributes:
        table: (classes, *blocks) int64, the number of pixels in each block of ``BLOCK`` pixels a
            side.
        totals: for each class, the number of pixels in the whole image.
    """

    def __init__(self, classes: int, size):
        self.totals = [0] * classes
        self.table = np.zeros((classes, *blocks(size)), dtype=np.int64)

    def add(self, box: Box, labels: np.ndarray) -> None:
        """Count the labels (*box.size) of a part of the image; skip labels that are no class."""
        touched = box.coarsened((BLOCK,) * len(box.start))
        cell = np.zeros((1,) * labels.ndim, dtype=np.int64)
        for dim, (a, b, first, count) in enumerate(
            zip(box.start, box.stop, touched.start, touched.size)
        ):
            along = (np.arange(a, b) // BLOCK - first).reshape(
                [-1 if d == dim else 1 for d in range(labels.ndim)]
            )
            cell = cell * count + along
        classes = len(self.totals)
        valid = labels < classes
        found = np.bincount(
            (cell * classes + labels.astype(np.int64))[valid], minlength=touched.pixels * classes
        )
        found = np.moveaxis(found.reshape(*touched.size, classes), -1, 0)
        self.table[(slice(None), *touched.slices)] += found
        self.totals = [int(t + n) for t, n in zip(self.totals, found.reshape(classes, -1).sum(1))]

    def forget(self) -> None:
        """Drop ``table``, the counts per block, to save memory in a store of many images.

        The counts of the whole image, ``totals``, are kept.
        """
        del self.table
