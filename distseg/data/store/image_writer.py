"""Write one image of a store: check its blocks, write them as chunks, and count its classes."""

from __future__ import annotations

from collections.abc import Callable

import h5py
import numpy as np

from distseg.config.sizes import Size
from distseg.data.formats.georeference import Georeference
from distseg.data.nodata import missing as missing_of
from distseg.data.store import layout
from distseg.data.store.band_statistics import ClassCounts, Moments
from distseg.data.store.chunks import ChunkSums, ChunkWriter
from distseg.data.store.header import Entry
from distseg.data.store.source import Source
from distseg.tiling.tile import Box

# Larger values usually stand for no data, and would ruin mean and standard deviation.
_LARGEST = 1e30


class ImageWriter:
    """Writer of one image of a store: blocks of its pixels and labels go into an HDF5 group.

    Args:
        group: the group of the image.
        name: the name of the image.
        split: the split of the image.
        size: the size of the image.
        dtype: dtype of the pixels.
        labels: True if the image's pixels have labels.
        bands: names of the bands.
        classes: names of the classes.
        ignore: label of pixels to ignore.
        nodata: the pixel value that means "no data"; None if no value does.
        moments: statistics to which the pixels are added; None if the image is not in the split
            train.
        check: function that raises the system error that occurred in writing, if any. It is called
            after each block.
        label: the label of the whole image: its class, or a number if the store has a single
            class; None without one.
        masked: True if the image has a validity mask.
        place: the georeference of the image; None without one.
        source: the image file to which the store refers for the pixels. They are then checked, and
            their checksums are computed, but they are not written. None writes the pixels.
    """

    def __init__(
        self,
        group: h5py.Group,
        name: str,
        split: str,
        size: tuple[int, ...],
        dtype: np.dtype,
        labels: bool,
        bands: list[str],
        classes: list[str],
        ignore: int,
        nodata: int | float | None,
        moments: Moments | None,
        check: Callable[[], None],
        label: int | float | None = None,
        masked: bool = False,
        place: Georeference | None = None,
        source: Source | None = None,
    ):
        self._check_disk = check
        self.name, self.split, self.size, self.dtype = name, split, size, dtype
        self.bands, self.classes, self.ignore = bands, classes, ignore
        self.group, self.nodata, self.moments, self.label = group, nodata, moments, label
        self.missing = Box.whole(size).pixels  # pixels that were not written yet
        self.counts = ClassCounts(len(classes), size) if labels else None
        self.without_data = 0  # number of pixels without data in all bands
        self.source = source
        self._chunks = {"pixels": self._pixel_chunks((len(bands), *size))}
        packed = dict(chunks=layout.label_chunk(size), compression="gzip", compression_opts=1)
        for what, there in (("labels", labels), ("valid", masked)):
            if there:
                self._chunks[what] = ChunkWriter(group.create_dataset(what, size, "u1", **packed))
        self.masked, self.place = masked, place
        self._sums: dict[str, np.ndarray] = {}
        self._digests: dict[str, str] = {}

    def write(
        self,
        box: Box,
        pixels: np.ndarray,
        labels: np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> None:
        """Write a block of pixels, with its labels and its validity mask.

        A pixel that has no data in any band gets the label to ignore.

        Args:
            box: the part of the image that the block covers.
            pixels: (bands, *box.size), of the image's dtype or of a dtype that fits into it.
            labels: (*box.size) of any integer dtype; None if the image has no labels.
            valid: (*box.size) bool, True where there is data; None if all pixels have data.

        Raises:
            ValueError: a shape, a dtype or a value is wrong; the message names the position.
            OSError: the disk is full, or another system error occurred in writing.
        """
        self._check_shapes(box, pixels, labels, valid)
        missing = missing_of(pixels, self.nodata, valid)
        self._check_pixels(box, pixels, missing)
        nothing = None if missing is None else missing.all(0)
        self._chunks["pixels"].write(Box((0, *box.start), (len(self.bands), *box.stop)), pixels)
        if self.masked:
            self._chunks["valid"].write(
                box, np.ones(box.size, np.uint8) if valid is None else valid.astype(np.uint8)
            )
        if labels is not None:
            self._check_labels(box, labels)
            labels = labels.astype(np.uint8)
            if nothing is not None:
                labels[nothing] = self.ignore
            self._chunks["labels"].write(box, labels)
            self.counts.add(box, labels)
        if self.moments:
            self.moments.add(pixels, missing)
        self.without_data += 0 if nothing is None else int(nothing.sum())
        self.missing -= box.pixels
        if not self.missing:
            self._finish()
        self._check_disk()

    def entry(self, first: int) -> tuple[Entry, np.ndarray]:
        """Return the image's index entry, and the checksums of its chunks (chunks,) uint64.

        Args:
            first: index of the image's first checksum among the checksums of the store.

        Raises:
            ValueError: some pixels were not written.
        """
        if self.missing:
            raise ValueError(
                f"image {self.name!r}: {self.missing} of its {Size(self.size)} pixels were never "
                "written: write blocks that cover the whole image"
            )
        labels, totals = self.counts is not None, self.counts.totals if self.counts else None
        known = self.name, self.split, self.size, self.dtype, labels, totals
        starts = first + np.cumsum([0, *(sums.size for sums in self._sums.values())])
        places = {what: int(start) for what, start in zip(self._sums, starts)}
        entry = Entry(
            *known,
            self.nodata,
            self.without_data,
            places,
            self._digests,
            self.label,
            self.masked,
            self.place,
            self.source,
        )
        return entry, np.concatenate([sums.ravel() for sums in self._sums.values()])

    def _pixel_chunks(self, shape: tuple[int, ...]) -> ChunkSums:
        """Return the object that receives the pixels and computes the checksums of their chunks.

        It also writes the chunks, unless the store refers to an image file for the pixels.

        Args:
            shape: (bands, *size).
        """
        if self.source is not None:
            return ChunkSums(shape, layout.file_chunk(shape), self.dtype)
        chunk = layout.pixel_chunk(shape[0], shape[1:], self.dtype.itemsize)
        return ChunkWriter(self.group.create_dataset("pixels", shape, self.dtype, chunks=chunk))

    def _finish(self) -> None:
        for what, chunks in self._chunks.items():
            self._sums[what], self._digests[what] = chunks.sums, layout.digest(chunks.sums)
        self._chunks.clear()
        if self.counts:
            table = self.counts.table.astype("<u4")
            self.group.create_dataset("counts", data=table, compression="gzip", compression_opts=1)
            self._digests["counts"] = layout.digest(table)
            self.counts.forget()

    def _check_shapes(
        self, box: Box, pixels: np.ndarray, labels: np.ndarray | None, valid: np.ndarray | None
    ) -> None:
        """Refuse a block that lies outside the image, was written before, or has a wrong shape.

        The arguments are those of :meth:`write`.
        """
        if (
            len(box.start) != len(self.size)
            or not Box.whole(self.size).contains(box)
            or min(box.size) < 1
        ):
            raise ValueError(
                f"image {self.name!r}: the block {box} is empty or outside an image of "
                f"{Size(self.size)}: give a block inside the image"
            )
        if box.pixels > self.missing:
            raise ValueError(
                f"image {self.name!r}: some pixels of the block {box} are written already: write "
                "each pixel once"
            )
        if pixels.shape != (len(self.bands), *box.size):
            raise ValueError(
                f"image {self.name!r}: pixels of the block {box} must have the shape "
                f"{(len(self.bands), *box.size)}, got {pixels.shape}"
            )
        if (labels is None) != (self.counts is None):
            raise ValueError(
                f"image {self.name!r} was added {'without' if self.counts is None else 'with'} "
                "labels: write its blocks the same way"
            )
        if labels is not None and labels.shape != box.size:
            raise ValueError(
                f"image {self.name!r}: labels of the block {box} must have the shape {box.size}, "
                f"got {labels.shape}"
            )
        if valid is not None and (not self.masked or valid.shape != box.size):
            what = (
                f"must have the shape {box.size}, got {valid.shape}"
                if self.masked
                else "were given, but the image was added without a mask: add it with masked=True"
            )
            raise ValueError(f"image {self.name!r}: valid pixels of the block {box} {what}")

    def _check_pixels(self, box: Box, pixels: np.ndarray, missing: np.ndarray | None) -> None:
        if not np.can_cast(pixels.dtype, self.dtype, "safe"):
            raise ValueError(
                f"image {self.name!r}: {pixels.dtype} pixels do not fit into {self.dtype}, the "
                "type with which it was added: convert them, or add it with another dtype"
            )
        if (bad := first_bad(pixels, missing)) is not None:
            band, *inside = bad
            raise ValueError(
                f"image {self.name!r}: band {self.bands[band]} is {pixels[bad]} at "
                f"{position(box, inside)}: "
                "replace it by a number, and label the pixel as ignored, or say that it "
                f"stands for no data: --nodata={pixels[bad]}"
            )

    def _check_labels(self, box: Box, labels: np.ndarray) -> None:
        if labels.dtype.kind not in "iu":
            raise ValueError(f"image {self.name!r}: labels must be integers, got {labels.dtype}")
        bad = ((labels < 0) | (labels >= len(self.classes))) & (labels != self.ignore)
        if bad.any():
            inside = np.argwhere(bad)[0]
            names = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes))
            value = labels[tuple(inside)]
            raise ValueError(
                f"image {self.name!r}: label {value} at {position(box, inside)} is no class: "
                f"there are {names}, and "
                f"{self.ignore} is ignored; map other values to these "
                f"(--values={value}={self.ignore}), or set --instances foreground if masks hold a "
                "number for each object"
            )


def first_bad(pixels: np.ndarray, missing: np.ndarray | None = None) -> tuple[int, ...] | None:
    """Return the index of the first invalid pixel value, (band, *position); None if all are valid.

    A value is invalid if it is not finite, or if its absolute value is 1e30 or more.

    Args:
        pixels: (bands, *size).
        missing: bool of the same shape, True for values without data, which are not checked; None
            if all have data.
    """
    if pixels.dtype.kind != "f":
        return None
    fine = np.isfinite(pixels)
    if pixels.dtype.itemsize > 2:
        with np.errstate(invalid="ignore"):
            fine &= np.abs(pixels) < _LARGEST
    if missing is not None:
        fine |= missing
    return None if fine.all() else tuple(int(i) for i in np.argwhere(~fine)[0])


def position(box: Box, inside) -> tuple[int, ...]:
    """Return a pixel's position in the image from its position ``inside`` the box ``box``."""
    return tuple(int(a + p) for a, p in zip(box.start, inside))
