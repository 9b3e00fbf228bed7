"""One image on its way into a store: takes its blocks, refuses what training could not use, counts its classes."""

from __future__ import annotations

import h5py
import numpy as np

from distseg.data import layout
from distseg.data.statistics import ClassCounts, Moments
from distseg.extents import Extents
from distseg.geometry.tile import Box


_LARGEST = 1e30  # beyond lie the numbers that stand for no data, which would drown all others in means and deviations


class ImageWriter:
    """Writes blocks of an image and its labels into its group of the file.

    Args:
        bands, classes: names.
        moments: takes the pixels of a training image, None for others.
    """

    def __init__(
        self,
        group: h5py.Group,
        name: str,
        size: tuple[int, ...],
        dtype: np.dtype,
        labels: bool,
        bands: list[str],
        classes: list[str],
        ignore: int,
        moments: Moments | None,
    ):
        self.name, self.size, self.dtype, self.bands, self.classes, self.ignore = name, size, dtype, bands, classes, ignore
        self.group, self.moments, self.missing = group, moments, Box.whole(size).pixels
        self.counts = ClassCounts(len(classes), size) if labels else None
        shape = (len(bands), *size)
        group.create_dataset("pixels", shape, dtype, chunks=layout.pixel_chunk(shape[0], size, dtype.itemsize))
        if labels:
            group.create_dataset("labels", size, "u1", chunks=layout.label_chunk(size), compression="gzip", compression_opts=1)

    def write(self, box: Box, pixels: np.ndarray, labels: np.ndarray | None = None) -> None:
        """Pixels (bands, *box.size) of the image's type or one that fits into it, labels (*box.size) of any integer type."""
        self._check_shapes(box, pixels, labels)
        self._check_pixels(box, pixels)
        self.group["pixels"][(slice(None), *box.slices)] = pixels
        if labels is not None:
            self._check_labels(box, labels)
            self.group["labels"][box.slices] = labels
            self.counts.add(box, labels)
        if self.moments:
            self.moments.add(pixels)
        self.missing -= box.pixels
        if not self.missing and self.counts:
            self._write_counts()

    def entry(self) -> dict:
        """The image's line in the index, but for its split; ValueError unless all of it is written."""
        if self.missing:
            raise ValueError(f"image {self.name!r}: {self.missing} of its {Extents(self.size)} pixels were never written")
        totals = self.counts.totals if self.counts else None
        return dict(name=self.name, size=self.size, dtype=self.dtype.str, labels=self.counts is not None, counts=totals)

    def _write_counts(self) -> None:
        self.group.create_dataset("counts", data=self.counts.table, dtype="u4", compression="gzip", compression_opts=1)
        self.counts.forget()

    def _check_shapes(self, box: Box, pixels: np.ndarray, labels: np.ndarray | None) -> None:
        if len(box.start) != len(self.size) or not Box.whole(self.size).contains(box) or min(box.size) < 1:
            raise ValueError(f"image {self.name!r}: the block {box} is empty or outside an image of {Extents(self.size)}")
        if box.pixels > self.missing:
            raise ValueError(f"image {self.name!r}: some of the block {box} is written already: write each pixel once")
        if pixels.shape != (len(self.bands), *box.size):
            raise ValueError(f"image {self.name!r}: pixels of the block {box} have the shape {(len(self.bands), *box.size)}, got {pixels.shape}")
        if (labels is None) != (self.counts is None):
            raise ValueError(f"image {self.name!r} was added {'without' if self.counts is None else 'with'} labels: write it so")
        if labels is not None and labels.shape != box.size:
            raise ValueError(f"image {self.name!r}: labels of the block {box} have the shape {box.size}, got {labels.shape}")

    def _check_pixels(self, box: Box, pixels: np.ndarray) -> None:
        if not np.can_cast(pixels.dtype, self.dtype, "safe"):
            raise ValueError(f"image {self.name!r}: {pixels.dtype} pixels do not fit into the {self.dtype} it was added with")
        if (bad := first_bad(pixels)) is not None:
            band, *inside = bad
            raise ValueError(
                f"image {self.name!r}: band {self.bands[band]} is {pixels[bad]} at {position(box, inside)}: "
                "replace it by a number, and label the pixel as ignored"
            )

    def _check_labels(self, box: Box, labels: np.ndarray) -> None:
        if labels.dtype.kind not in "iu":
            raise ValueError(f"image {self.name!r}: labels are whole numbers, got {labels.dtype}")
        bad = ((labels < 0) | (labels >= len(self.classes))) & (labels != self.ignore)
        if bad.any():
            inside = np.argwhere(bad)[0]
            names = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes))
            value = labels[tuple(inside)]
            raise ValueError(
                f"image {self.name!r}: label {value} at {position(box, inside)} is no class: there are {names}, and "
                f"{self.ignore} is ignored; map other values to these (--values={value}={self.ignore})"
            )


def first_bad(pixels: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first number that is none, or stands for no data; None where all are fine."""
    if pixels.dtype.kind != "f":
        return None
    fine = np.isfinite(pixels)
    if pixels.dtype.itemsize > 2:
        fine &= np.abs(pixels) < _LARGEST
    return None if fine.all() else tuple(int(i) for i in np.argwhere(~fine)[0])


def position(box: Box, inside) -> tuple[int, ...]:
    return tuple(int(a + p) for a, p in zip(box.start, inside))
