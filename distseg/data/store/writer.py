"""Write a store block by block, so that no image has to fit into memory.

The store is written to the file NAME.partial. This file is renamed to NAME when the store is
complete and on the disk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from distseg.config.sizes import Size
from distseg.data.formats.georeference import Georeference
from distseg.data.nodata import fitting
from distseg.data.store import hdf5, header, layout
from distseg.data.store.band_statistics import Moments
from distseg.data.store.image_writer import ImageWriter
from distseg.data.store.source import Source
from distseg.report.disk import check_replaceable, disk_full_errors, locked, to_disk


def bytes_of(size: Sequence[int], bands: int, dtype: np.dtype, planes: int) -> int:
    """Return an upper bound of the bytes that an image takes in a store.

    Args:
        size: the size of the image.
        bands: number of bands that are stored.
        dtype: dtype of the pixels.
        planes: number of arrays with one byte per pixel that the image has besides its pixels:
            labels and validity mask.
    """
    return Size(size).volume * (bands * dtype.itemsize + planes)


class StoreWriter:
    """Writer of a store: one HDF5 file with images, their labels and statistics for training.

    ::

        with StoreWriter(path, classes, bands) as writer:
            image = writer.add_image(name, size, dtype, split, labels=True)
            image.write(box, pixels, labels)

    Args:
        path: the store to write.
        classes: names in the order of their labels, 2 to 255.
        bands: names of the bands, or their number.
        ignore: label of pixels to ignore; it is no class.
        provenance: the origin of the data, such as folders and settings, in types that JSON holds.
        overwrite: True if an existing store may be replaced.
        expected: number of bytes that the store will take, for the message of a full disk. If the
            images added so far can take more, the message names their number of bytes instead.
        numbers: True if each image has a number as its label. ``classes`` is then one name, which
            says what the numbers measure.
        colours: (classes, 3) uint8, the colours of class maps; None if there are none.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is not set, or ``path`` is not a file.
        ValueError: classes, bands or data are not valid; the message names the image and the
            position.
        DiskFull: the disk is full. No partial store is left behind.
    """

    def __init__(
        self,
        path: str | Path,
        classes: Sequence[str],
        bands: Sequence[str] | int,
        ignore: int = 255,
        provenance: dict | None = None,
        overwrite: bool = False,
        expected: int = 0,
        numbers: bool = False,
        colours: np.ndarray | None = None,
    ):
        self.expected, self._added, self.numbers, self.colours = expected, 0, numbers, colours
        self.path, self.partial = Path(path), Path(f"{path}.partial")
        self.classes, self.ignore, self.provenance = list(classes), ignore, provenance or {}
        self.bands = [f"band{b}" for b in range(bands)] if isinstance(bands, int) else list(bands)
        self._images: dict[str, ImageWriter] = {}
        self.moments = Moments(len(self.bands))
        self._check()
        if self.path.is_dir():
            raise FileExistsError(f"{self.path} is a folder: choose another name for the store")
        check_replaceable(self.path)
        if self.path.exists() and not overwrite:
            raise FileExistsError(
                f"{self.path} already exists: choose another name, or overwrite it (--overwrite)"
            )

    def _check(self) -> None:
        """Refuse names of classes, names of bands or a label to ignore that no store can have."""
        if len(self.classes) > 255:
            raise ValueError(
                f"--classes names {len(self.classes)} classes, but labels are stored as bytes, so "
                "a store has at most 255: give several mask values one label "
                "(--values=VALUE=LABEL,...), and name fewer classes"
            )
        if (
            self.numbers != (len(self.classes) == 1)
            or len(set(self.classes)) < len(self.classes)
            or not all(self.classes)
        ):
            raise ValueError(
                "a store must have 2 to 255 classes with different names (or one name, if labels "
                f"are measured values instead of classes), got {self.classes}: give each class a "
                "name of its own, the background too"
            )
        if not len(self.classes) <= self.ignore <= 255:
            raise ValueError(
                f"--ignore is {self.ignore}, but the label of ignored pixels must be no class and "
                f"fit into a byte: give a number from {len(self.classes)} to 255. If the masks "
                f"mark ignored pixels with {self.ignore}, add --ignore 255 "
                f"--values={self.ignore}=255"
            )
        if not self.bands:
            raise ValueError(
                "a store needs at least one band, got none: give the bands' names or number"
            )

    def __enter__(self) -> StoreWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._finished = False
        with disk_full_errors(self.path):
            self._lock = locked(self.partial, self.path)  # taken before HDF5 empties the file
        self._growing = hdf5.Growing(self.path, self._lock.fileno())
        self.file = self._growing.file
        header.begin(self.file)
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self.file.close()
            if not self._finished:
                self.partial.unlink(missing_ok=True)
            self._lock.close()

    def add_image(
        self,
        name: str,
        size: Sequence[int],
        dtype,
        split: str,
        labels: bool,
        nodata: int | float | None = None,
        label: int | float | None = None,
        masked: bool = False,
        place: Georeference | None = None,
        source: Source | None = None,
    ) -> ImageWriter:
        """Add an image and return its writer, which must be given blocks that cover the image.

        Args:
            name: the name of the image.
            size: the size of the image.
            dtype: dtype of the pixels.
            split: the split of the image.
            labels: True if the image's pixels have labels.
            nodata: the pixel value that means "no data"; ignored if ``dtype`` cannot hold it. None
                if no value does.
            label: the label of the whole image: its class, or a number if the store has a single
                class; None without one.
            masked: True if a validity mask is written with the pixels.
            place: the georeference of the image, which its class maps get too; None without one.
            source: the file that holds the pixels, to which the store refers; None to store them.

        Raises:
            ValueError: the name, size, dtype or label is not valid, or the name is already used.
        """
        self._check_disk()
        if name in self._images:
            raise ValueError(f"two images have the name {name!r}: rename one")
        layout.check_name(name, str(self.path))
        if np.dtype(dtype).kind not in "iuf":
            raise ValueError(
                f"image {name!r}: pixels must be integers or floats, got {np.dtype(dtype)}: "
                "convert them"
            )
        if min(size, default=0) < 1:
            raise ValueError(
                f"image {name!r} has no pixels, because its size is {tuple(size)}: leave it out"
            )
        self._check_label(name, labels, label)
        group = self.file.create_group(f"images/{name}")
        size, dtype = tuple(int(n) for n in size), np.dtype(dtype)
        moments = self.moments if split == "train" else None
        value = fitting(nodata, dtype)
        stored = len(self.bands) if source is None else 0
        self._added += bytes_of(size, stored, dtype, labels + masked)
        image = ImageWriter(
            group,
            name,
            split,
            size,
            dtype,
            labels,
            self.bands,
            self.classes,
            self.ignore,
            value,
            moments,
            self._check_disk,
            label,
            masked,
            place,
            source,
        )
        self._images[name] = image
        return image

    def _check_label(self, name: str, labels: bool, label: int | float | None) -> None:
        """Refuse an invalid label, and a mix of labels of pixels and labels of whole images.

        Args:
            name: the name of the new image.
            labels: True if the image's pixels have labels.
            label: the label of the whole image; None without one.

        Raises:
            ValueError: the label is refused.
        """
        others, one = self._images.values(), self.numbers
        of_pixels = labels or any(image.counts for image in others)
        of_images = label is not None or any(image.label is not None for image in others)
        if of_pixels and (of_images or one):
            raise ValueError(
                f"image {name!r}: a store must have either labels of pixels, with at least 2 "
                "classes, or labels of whole images: make one store for each"
            )
        if label is not None and not (
            math.isfinite(label) if one else label in range(len(self.classes))
        ):
            known = (
                "a number"
                if one
                else f"0 to {len(self.classes) - 1} for {len(self.classes)} classes"
            )
            raise ValueError(
                f"image {name!r} has the label {label}, but it must be {known}: correct the label"
            )

    def _finish(self) -> None:
        """Write the header, flush the file to the disk, and give it its final name.

        Raises:
            ValueError: the split train has no image, or no data in a band.
        """
        index, sums = self._entries()
        if not any(image.split == "train" for image in index):
            raise ValueError(
                "no image is in the split 'train', from which the store takes the mean and "
                "standard deviation of each band: put at least one image into this split"
            )
        for band, pixels in zip(self.bands, self.moments.pixels):
            if not pixels:
                raise ValueError(
                    f"band {band} has no data in any pixel of the split 'train': leave the band "
                    "out, "
                    "or say which number stands for no data (--nodata)"
                )
        known = (
            self.classes,
            self.bands,
            self.ignore,
            self.moments.mean,
            self.moments.std,
            self.provenance,
        )
        header.write(self.file, *known, index, sums, self.colours)
        with self._disk_full_errors():
            self._growing.close()
            to_disk(self.partial)
            os.replace(self.partial, self.path)
            self._finished = True
            to_disk(self.path.parent)

    def _entries(self) -> tuple[list[header.Entry], np.ndarray]:
        """Return the index entries of all images, and the checksums of their chunks (chunks,)."""
        index, sums, first = [], [np.zeros(0, np.uint64)], 0
        for image in self._images.values():
            entry, found = image.entry(first)
            index.append(entry), sums.append(found)
            first += found.size
        return index, np.concatenate(sums)

    def _check_disk(self) -> None:
        with self._disk_full_errors():
            self._growing.check()

    def _disk_full_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that converts errors of a full disk into :class:`DiskFull`."""
        return disk_full_errors(self.path, self.partial, max(self.expected, self._added))
