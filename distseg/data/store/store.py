"""The store: one HDF5 file with all images, their labels, and what training must know of them beforehand.

A rank opens the file itself and reads the windows it needs. The file is finished (``writer.py`` sees to that), so it is
read without locks, as parallel file systems like it. What is in it: ``layout.py``. What is read is what was written, or an
error names the image and the place.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Sequence

import numpy as np

from distseg.config.sizes import Size
from distseg.data.formats.georeference import Georeference
from distseg.data.nodata import missing
from distseg.data.store import hdf5, header, layout
from distseg.data.store.chunks import AGAIN, ChunkReader, Damage, Sums
from distseg.data.store.writer import StoreWriter  # noqa: F401  (the other half of the store's interface)
from distseg.tiling.tile import Box

_READERS_KEPT, _CHUNKS_KEPT = (
    1 << 14,
    1 << 20,
)  # of which each knows where its chunks lie: 20 MB and 30 MB
_MADE_BY = "'distseg prepare' writes a store from images"
_told: set[str] = set()  # stores without checksums, of which this process has said so


class Store:
    """Windows of images and labels, channels first. Safe for several threads; a forked process opens its own handle.

    ``digest`` tells stores of different content apart; of version 1, which has no checksums, stores of different headers.

    Args:
        constants: mean and standard deviation of each band by which pixels are normalised, such as those that a network was trained with;
            by default the store's own.
        shrink: a pixel is the mean of so many of the file's along each dim; rows and columns that are left over fall away. Of labels of whole images.

    Raises:
        FileNotFoundError: nothing at ``path``.
        ValueError: no store, a damaged or unfinished one, one of a newer version, or one of other bands than ``constants``.
            Methods that read raise it for what is damaged, naming the image and the place.
    """

    def __init__(
        self,
        path: str | Path,
        constants: tuple[Sequence[float], Sequence[float]] | None = None,
        shrink: int = 1,
    ):
        self.path, self._constants, self.shrink = str(path), constants, shrink
        self._open()
        found = header.read(self.path, self._handle)
        self.version, self.digest = found.version, found.digest
        self.classes, self.band_names = found.classes, found.bands
        self.ignore, self.block = found.ignore, found.block
        self.mean, self.std = (
            found.mean,
            found.std,
        )  # (bands,) float64, over all pixels of the split 'train' that have data
        if constants is not None:
            if len(constants[0]) != self.bands:
                raise ValueError(
                    f"{self.path} has {self.bands} bands, but the network was trained on "
                    f"{len(constants[0])}: choose a store like the one it was trained on"
                )
            self.mean, self.std = (np.asarray(values, np.float64) for values in constants)
        self.provenance, self._images, self._sums_at = found.provenance, found.images, found.sums_at
        self.colours = (
            found.colours
        )  # (classes, 3) uint8, where label maps had a palette, else None
        self._check_size()
        self._check_shrink()
        self.splits: dict[
            str, list[str]
        ] = {}  # the names of the images of each, in the order they were written
        for name, entry in self._images.items():
            self.splits.setdefault(entry.split, []).append(name)
        self._say_version()

    def __reduce__(self):
        return Store, (self.path, self._constants, self.shrink)

    @property
    def bands(self) -> int:
        return len(self.band_names)

    def split(self, name: str) -> list[str]:
        if name not in self.splits:
            raise ValueError(f"{self.path} has no split {name!r}: choose {', '.join(self.splits)}")
        return self.splits[name]

    def size(self, name: str) -> tuple[int, ...]:
        return tuple(n // self.shrink for n in self._entry(name).size)

    def dtype(self, name: str) -> np.dtype:
        """Of the stored pixels."""
        return self._entry(name).dtype

    def has_labels(self, name: str) -> bool:
        return self._entry(name).labels

    @property
    def of_images(self) -> bool:
        """Whether labels are of whole images."""
        return any(entry.label is not None for entry in self._images.values())

    def label(self, name: str) -> int | float:
        """Of the whole image: its class, or in a store of one class the number that this names."""
        found = self._entry(name).label
        if found is None:
            raise ValueError(
                f"image {name!r} of {self.path} has no label of the whole image: prepare the "
                "store with labels of images"
            )
        return found

    def nodata(self, name: str) -> int | float | None:
        """The number that stands for no data in the image's pixels."""
        return self._entry(name).nodata

    def place(self, name: str) -> Georeference | None:
        """Return where on earth the image's file says that it lies."""
        return self._entry(name).place

    def masked(self, name: str) -> bool:
        """Return True if the image has a validity mask."""
        return self._entry(name).valid

    def missing(self, name: str) -> int:
        """Pixels of the image that have no data in any band."""
        return self._entry(name).missing

    def read(self, name: str, box: Box) -> np.ndarray:
        """Pixels (bands, *box.size) as they are stored; means of them float32."""
        return self.read_boxes(name, [box])[:, 0]

    def read_boxes(self, name: str, boxes: Sequence[Box]) -> np.ndarray:
        """Return the same of boxes of one size side by side, (bands, boxes, *size)."""
        for box in boxes:
            self._check(name, box)
        k = self.shrink
        stored = [
            Box((0, *(k * a for a in box.start)), (self.bands, *(k * b for b in box.stop)))
            for box in boxes
        ]
        found = self.reader(name, "pixels").read_boxes(stored)
        return (found if k == 1 else np.stack([shrunken(pixels, k) for pixels in found])).swapaxes(
            0, 1
        )

    def read_normalised(self, name: str, box: Box) -> np.ndarray:
        """(pixels - mean) / std in float32, (bands, *box.size); 0, the mean, where there is no data."""
        return normalised(
            self.read(name, box), self.mean, self.std, self.nodata(name), self.valid(name, box)
        )

    def read_normalised_boxes(self, name: str, boxes: Sequence[Box]) -> np.ndarray:
        """Return the same of boxes of one size side by side, (bands, boxes, *size)."""
        valid = [self.valid(name, box) for box in boxes]
        valid = None if valid[0] is None else np.stack(valid)
        return normalised(
            self.read_boxes(name, boxes), self.mean, self.std, self.nodata(name), valid
        )

    def valid(self, name: str, box: Box) -> np.ndarray | None:
        """Return where the image's validity mask says that there is data, (*box.size) bool; None where it has no mask, or data everywhere."""
        if not (self.masked(name) and self.missing(name)):
            return None
        self._check(name, box)
        return self.reader(name, "valid").read(box) != 0

    def without_data(self, name: str, box: Box) -> np.ndarray | None:
        """Return which pixels have no data in any band, (*box.size) bool; None where all have."""
        if not self.missing(name):
            return None
        found = missing(self.read(name, box), self.nodata(name), self.valid(name, box))
        return None if found is None else found.all(0)

    def labels(self, name: str, box: Box) -> np.ndarray:
        """Class numbers or ``ignore``, (*box.size) uint8."""
        self._check_labelled(name)
        self._check(name, box)
        return self.reader(name, "labels").read(box)

    def block_counts(self, name: str) -> np.ndarray:
        """Pixels of each class in each block, (classes, *blocks): where a class is, without reading the labels."""
        self._check_labelled(name)
        found = self.reader(name, "counts")
        table = found.read(Box.whole(found.shape))
        if self.version > 1 and layout.digest(table) != self._entry(name).digests["counts"]:
            raise Damage(
                f"{self.path} is damaged: the counts of image {name!r} are not those that were "
                f"written: {AGAIN}"
            )
        return table.astype(np.int64)

    def class_counts(self, name: str) -> list[int]:
        """Pixels of each class in the image."""
        self._check_labelled(name)
        return self._entry(name).counts

    def reader(self, name: str, what: str) -> ChunkReader:
        """The chunks of an image's ``pixels``, ``labels`` or ``counts``.

        Raises:
            ValueError: they are missing, not kept in the file itself, or not what the index says.
        """
        if self._process != os.getpid():
            self._open()
        found = self._readers.get((name, what))
        if found is None:
            found = self._new_reader(name, what)
            self._keep((name, what), found)
        return found

    def _keep(self, key: tuple[str, str], reader: ChunkReader) -> None:
        """For the next time, in the place of those that were opened first."""
        with self._lock:
            if key in self._readers:  # another thread was quicker
                return
            self._readers[key] = reader
            self._chunks_kept += reader.chunks
            while self._readers and (
                self._chunks_kept > _CHUNKS_KEPT or len(self._readers) > _READERS_KEPT
            ):
                self._chunks_kept -= self._readers.pop(next(iter(self._readers))).chunks

    def _open(self) -> None:
        self._handle, self._process = hdf5.opened(self.path, "store", _MADE_BY), os.getpid()
        self._descriptor = os.dup(self._handle.id.get_vfd_handle())
        self._readers: dict[tuple[str, str], ChunkReader] = {}
        self._lock, self._chunks_kept = threading.Lock(), 0
        weakref.finalize(self, os.close, self._descriptor)

    def _new_reader(self, name: str, what: str) -> ChunkReader:
        entry, words = self._entry(name), f"{what} of image {name!r}"
        try:
            found = hdf5.dataset(self._handle, f"images/{name}/{what}")
            shape, dtype = self._expected(entry, what)
            if (found.shape, found.dtype) != (shape, dtype):
                told = f"the {words} are {found.shape} of {found.dtype}, the index says {shape} of {dtype}"
                raise Damage(f"{self.path} is damaged: {told}: {AGAIN}")
            sums = (
                Sums(self._sums_at + 8 * entry.sums[what], entry.digests[what])
                if what in entry.sums
                else None
            )
            return ChunkReader(
                self._descriptor, found, self.path, words, sums, leading=int(what == "pixels")
            )
        except (OSError, RuntimeError, KeyError) as e:  # HDF5's words
            raise Damage(
                f"{self.path} is damaged: the {words} cannot be found ({e}): {AGAIN}"
            ) from e

    def _expected(self, entry: header.Entry, what: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and type."""
        if what == "pixels":
            return (self.bands, *entry.size), entry.dtype
        if what in ("labels", "valid"):
            return entry.size, np.dtype(np.uint8)
        return (len(self.classes), *(-(-n // self.block) for n in entry.size)), np.dtype("<u4")

    def _check_shrink(self) -> None:
        if self.shrink == 1:
            return
        for name, entry in self._images.items():
            if entry.labels or entry.nodata is not None or (entry.valid and entry.missing):
                what = "labels of pixels" if entry.labels else "pixels without data"
                raise ValueError(
                    f"data.shrink is {self.shrink}, but image {name!r} of {self.path} has {what}, "
                    "which have no mean: leave data.shrink out"
                )
            if min(entry.size) < self.shrink:
                raise ValueError(
                    f"data.shrink is {self.shrink}, but image {name!r} of {self.path} has "
                    f"{Size(entry.size)} pixels: nothing of it is left"
                )

    def _check_size(self) -> None:
        """Of the pixels, which are not packed, the file must have all."""
        needed = sum(
            entry.dtype.itemsize * self.bands * Size(entry.size).volume
            for entry in self._images.values()
        )
        if needed > (size := os.fstat(self._descriptor).st_size):
            words = f"its images take {needed} bytes, the file has {size}"
            raise ValueError(f"{self.path} is damaged or cut off: {words}: {AGAIN}")

    def _say_version(self) -> None:
        if self.version < 2 and self.path not in _told:
            _told.add(self.path)
            words = (
                "which has no checksums: damage in it may go unseen; prepare it anew to have them"
            )
            print(
                f"distseg: {self.path} is a store of version {self.version}, {words}",
                file=sys.stderr,
            )

    def _entry(self, name: str) -> header.Entry:
        if name not in self._images:
            some = ", ".join(list(self._images)[:5])
            raise ValueError(
                f"{self.path} has no image {name!r}: it holds {len(self._images)}, such as {some}"
            )
        return self._images[name]

    def _check(self, name: str, box: Box) -> None:
        size = self.size(name)
        if len(box.start) != len(size) or not Box.whole(size).contains(box):
            raise ValueError(
                f"image {name!r} of {self.path} has {Size(size)} pixels, the box {box} reaches "
                "beyond them"
            )

    def _check_labelled(self, name: str) -> None:
        if not self.has_labels(name):
            raise ValueError(
                f"image {name!r} of {self.path} has no labels: prepare the store with masks to "
                "train or evaluate on it"
            )


def shrunken(pixels: np.ndarray, by: int) -> np.ndarray:
    """Means over ``by`` pixels along each dim, float32: (bands, *size) -> (bands, *(size // by))."""
    cut = pixels[(slice(None), *(slice(n // by * by) for n in pixels.shape[1:]))]
    split = cut.reshape(len(cut), *(n for size in cut.shape[1:] for n in (size // by, by)))
    return split.mean(tuple(range(2, split.ndim, 2)), dtype=np.float32)


def normalised(
    pixels: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    nodata: int | float | None = None,
    valid: np.ndarray | None = None,
) -> np.ndarray:
    """(pixels - mean) / std in float32, computed in float64 where pixels have more digits than float32; pixels (bands, *size).

    Where they are ``nodata``, or not ``valid`` (*size), the result is 0, as if the pixel were the mean.
    """
    absent = missing(pixels, nodata, valid)
    pixels = pixels.astype(np.result_type(pixels.dtype, np.float32))
    if absent is not None:
        pixels[absent] = 0  # the number itself may be too large to count with
    shape = (-1, *(1 for _ in pixels.shape[1:]))
    pixels -= mean.astype(pixels.dtype).reshape(shape)
    pixels /= std.astype(pixels.dtype).reshape(shape)
    pixels = pixels.astype(np.float32, copy=False)
    if absent is not None:
        pixels[absent] = 0
    return pixels
