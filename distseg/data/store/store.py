"""Read a store: one HDF5 file with all images, their labels, and statistics for training.

A store may refer to image files instead of holding their pixels (``source.py``).

Each rank opens the file itself and reads the windows it needs. The file is finished
(``writer.py``), so it is read without locks, which parallel file systems handle poorly.
``layout.py`` describes its content. Damaged data raise an error that names the image and the
position.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distseg.config.sizes import Size
from distseg.config.spelling import did_you_mean
from distseg.data.formats.georeference import Georeference
from distseg.data.formats.mapped import MOST_IN_MEMORY
from distseg.data.nodata import missing
from distseg.data.store import hdf5, header, layout
from distseg.data.store.chunks import AGAIN, Chunked, ChunkReader, Damage, Sums
from distseg.data.store.file_pixels import FilePixels
from distseg.data.store.open_files import MOST_KEPT, OpenFiles
from distseg.data.store.source import Source, changes, check_unchanged, folder_of
from distseg.data.store.writer import StoreWriter  # noqa: F401  (part of this interface)
from distseg.tiling.tile import Box

# Largest number of cached readers, and of chunks whose positions these readers keep in memory.
_READERS_KEPT, _CHUNKS_KEPT = 1 << 14, 1 << 20
_MADE_BY = "'distseg prepare' writes a store from images"
_warned: set[str] = set()  # stores without checksums about which this process has warned


class Store:
    """Reader of a store: windows of images and labels, channels first.

    Several threads may use one reader. A forked process opens its own handle. The attribute
    ``digest`` is a hash of the store's content. Stores of version 1 have no checksums of pixels;
    there it is a hash of the header only.

    Args:
        path: the store.
        constants: mean and standard deviation of each band for normalising, such as the values
            with which a network was trained. None takes the values that the store holds.
        shrink: average blocks of ``shrink`` pixels a side into one pixel. Rows and columns that
            fill no whole block are dropped. A store whose images have labels of pixels, or pixels
            without data, is refused.
        most_decoded: for a store that refers to image files: the largest number of files whose
            decoded pixels a process keeps, if a file can only be decoded as a whole. None keeps
            as many as fit into 256 MiB.

    Raises:
        FileNotFoundError: the store does not exist.
        ValueError: the file is no store, is damaged, unfinished or of a newer version, has another
            number of bands than ``constants``, or cannot be shrunk. Methods that read raise it for
            damaged data; the message names the image and the position.
    """

    def __init__(
        self,
        path: str | Path,
        constants: tuple[Sequence[float], Sequence[float]] | None = None,
        shrink: int = 1,
        most_decoded: int | None = None,
    ):
        self.path, self._constants, self.shrink = str(path), constants, shrink
        self._most_decoded = most_decoded
        self._files: list[OpenFiles] = []  # the last one is this process's, the others its parents'
        self._open()
        found = header.read(self.path, self._handle)
        self.version, self.digest = found.version, found.digest
        self.classes, self.band_names = found.classes, found.bands
        self.ignore, self.block = found.ignore, found.block
        # (bands,) float64, over all pixels of the split 'train' that have data
        self.mean, self.std = found.mean, found.std
        if constants is not None:
            if len(constants[0]) != self.bands:
                raise ValueError(
                    f"{self.path} has {self.bands} bands, but the network was trained on "
                    f"{len(constants[0])}: choose a store like the one it was trained on"
                )
            self.mean, self.std = (np.asarray(values, np.float64) for values in constants)
        self.provenance, self._images, self._sums_at = found.provenance, found.images, found.sums_at
        self.colours = found.colours  # (classes, 3) uint8 if label maps had a palette, else None
        self._check_size()
        self._check_shrink()
        self.splits: dict[str, list[str]] = {}  # names of images, in the order they were written
        for name, entry in self._images.items():
            self.splits.setdefault(entry.split, []).append(name)
        self._say_version()

    def __reduce__(self):
        return Store, (self.path, self._constants, self.shrink, self._most_decoded)

    @property
    def decoded_bytes(self) -> int:
        """Upper limit, in bytes, of the memory for decoded pixels of image files.

        It is 0 if the store refers to no image files. A decoded image of more than 16 MiB is in a
        scratch file and does not count.
        """
        if not any(entry.source is not None for entry in self._images.values()):
            return 0
        if self._most_decoded is None:
            return MOST_KEPT
        return min(MOST_KEPT, self._most_decoded * MOST_IN_MEMORY)

    @property
    def bands(self) -> int:
        """The number of bands of the images in the store."""
        return len(self.band_names)

    def split(self, name: str) -> list[str]:
        """Return the names of the images in a split, in the order in which they were written.

        Raises:
            ValueError: the store has no such split.
        """
        if name not in self.splits:
            raise ValueError(
                f"{self.path} has no split {name!r}: choose {', '.join(self.splits)}"
                f"{did_you_mean(name, self.splits)}"
            )
        return self.splits[name]

    def size(self, name: str) -> tuple[int, ...]:
        """Return the size of an image in pixels, after shrinking by ``shrink``."""
        return tuple(n // self.shrink for n in self._entry(name).size)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype in which the store holds the pixels of an image."""
        return self._entry(name).dtype

    def has_labels(self, name: str) -> bool:
        """Return True if the image's pixels have labels."""
        return self._entry(name).labels

    @property
    def of_images(self) -> bool:
        """True if the store has labels of whole images instead of labels of pixels."""
        return any(entry.label is not None for entry in self._images.values())

    def label(self, name: str) -> int | float:
        """Return the label of a whole image.

        It is the number of its class, or, if the store has only one class, a number to predict.

        Raises:
            ValueError: the image has no label of the whole image.
        """
        found = self._entry(name).label
        if found is None:
            raise ValueError(
                f"image {name!r} of {self.path} has no label of the whole image: prepare the "
                "store with labels of images (distseg prepare --labels)"
            )
        return found

    def nodata(self, name: str) -> int | float | None:
        """Return the pixel value that means "no data" in an image; None if no value does."""
        return self._entry(name).nodata

    def place(self, name: str) -> Georeference | None:
        """Return the georeference of the image; None if there is none."""
        return self._entry(name).place

    def masked(self, name: str) -> bool:
        """Return True if the image has a validity mask."""
        return self._entry(name).valid

    def missing(self, name: str) -> int:
        """Return how many pixels of the image have no data in any band."""
        return self._entry(name).missing

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return the pixels of a box, (bands, *box.size).

        The pixels have the stored dtype, or float32 if the store is shrunk.
        """
        return self.read_boxes(name, [box])[:, 0]

    def read_boxes(self, name: str, boxes: Sequence[Box]) -> np.ndarray:
        """Return the pixels of boxes of the same size, (bands, boxes, *size).

        The pixels have the stored dtype, or float32 if the store is shrunk.
        """
        for box in boxes:
            self._check(name, box)
        k = self.shrink
        stored = [
            Box((0, *(k * a for a in box.start)), (self.bands, *(k * b for b in box.stop)))
            for box in boxes
        ]
        found = self.reader(name, "pixels").read_boxes(stored)
        if k > 1:
            found = np.stack([shrunken(pixels, k) for pixels in found])
        return found.swapaxes(0, 1)

    def read_normalised(self, name: str, box: Box) -> np.ndarray:
        """Return (pixels - mean) / std of a box, (bands, *box.size) float32.

        Values without data are 0.
        """
        return self.read_masked(name, box)[0]

    def read_masked(self, name: str, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return normalised pixels of a box, and a mask that is True at values without data.

        Both are (bands, *box.size), the pixels float32, the mask bool. Values without data are 0.
        The mask is None if all values have data.
        """
        pixels = self.read(name, box)
        absent = missing(pixels, self.nodata(name), self.valid(name, box))
        return _standardised(pixels, self.mean, self.std, absent), absent

    def read_masked_boxes(
        self, name: str, boxes: Sequence[Box]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return normalised pixels of boxes, and a mask that is True at values without data.

        Both are (bands, boxes, *size); all boxes have the same size. Values without data are 0.
        The mask is None if all values have data.
        """
        pixels = self.read_boxes(name, boxes)
        valid = [self.valid(name, box) for box in boxes]
        absent = missing(pixels, self.nodata(name), None if valid[0] is None else np.stack(valid))
        return _standardised(pixels, self.mean, self.std, absent), absent

    def valid(self, name: str, box: Box) -> np.ndarray | None:
        """Return the validity mask of a box, (*box.size) bool, True where there is data.

        The result is None if the image has no validity mask, or if all its pixels have data.
        """
        if not (self.masked(name) and self.missing(name)):
            return None
        self._check(name, box)
        return self.reader(name, "valid").read(box) != 0

    def without_data(self, name: str, box: Box) -> np.ndarray | None:
        """Return a mask (*box.size) bool, True at pixels of a box that have no data in any band.

        The result is None if the image has no pixel without data, or if all values in the box
        have data.
        """
        if not self.missing(name):
            return None
        found = missing(self.read(name, box), self.nodata(name), self.valid(name, box))
        return None if found is None else found.all(0)

    def labels(self, name: str, box: Box) -> np.ndarray:
        """Return the labels of a box, (*box.size) uint8: class numbers, or ``self.ignore``."""
        self._check_labelled(name)
        self._check(name, box)
        return self.reader(name, "labels").read(box)

    def block_counts(self, name: str) -> np.ndarray:
        """Return the number of pixels of each class in each block, (classes, *blocks) int64.

        A block has ``self.block`` pixels a side. The numbers tell where an image has pixels of a
        class, without reading the labels.
        """
        self._check_labelled(name)
        found = self.reader(name, "counts")
        table = found.read(Box.whole(found.shape))
        if self.version > 1 and layout.digest(table) != self._entry(name).digests["counts"]:
            raise Damage(
                f"{self.path} is damaged: the counts of image {name!r} differ from what was "
                f"written: {AGAIN}"
            )
        return table.astype(np.int64)

    def check_files(self) -> None:
        """Refuse image files that have changed or are gone, if the store refers to files.

        Raises:
            ValueError: a file has changed or is gone; the message names the first such files.
        """
        sources = [entry.source for entry in self._images.values() if entry.source is not None]
        check_unchanged(sources, self.path)

    @property
    def files(self) -> list[Path]:
        """The image files, masks and other files to which the store refers."""
        folder = folder_of(self.path)
        sources = [entry.source for entry in self._images.values() if entry.source is not None]
        return [file.at(folder) for source in sources for file in source.files]

    def changed_files(self, name: str) -> list[str]:
        """Return what changed in the files to which an image refers, one phrase per file."""
        source = self._entry(name).source
        return [] if source is None else changes([source], folder_of(self.path))

    def class_counts(self, name: str) -> list[int]:
        """Return the number of pixels of each class in the image."""
        self._check_labelled(name)
        return self._entry(name).counts

    def reader(self, name: str, what: str) -> Chunked:
        """Return the reader of a dataset of an image, from the cache if it is there.

        ``what`` names the dataset: ``pixels``, ``labels``, ``valid`` or ``counts``.

        Raises:
            ValueError: the data are missing, stored in another file, or differ from the index.
        """
        if self._process != os.getpid():
            self._open()
        found = self._readers.get((name, what))
        if found is None:
            found = self._new_reader(name, what)
            self._keep((name, what), found)
        return found

    def _keep(self, key: tuple[str, str], reader: Chunked) -> None:
        """Cache a reader under ``key`` (image, dataset); drop the oldest if the cache is full."""
        with self._lock:
            if key in self._readers:  # another thread has made the same reader
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
        self._readers: dict[tuple[str, str], Chunked] = {}
        self._files.append(OpenFiles(self.path, self._most_decoded))
        self._lock, self._chunks_kept = threading.Lock(), 0
        weakref.finalize(self, os.close, self._descriptor)

    def _new_reader(self, name: str, what: str) -> Chunked:
        """Return a new reader of a dataset of an image, for the cache of :meth:`reader`."""
        entry, words = self._entry(name), f"{what} of image {name!r}"
        if what == "pixels" and entry.source is not None:
            return self._file_pixels(entry, entry.source, words)
        try:
            found = hdf5.dataset(self._handle, f"images/{name}/{what}")
            shape, dtype = self._expected(entry, what)
            if (found.shape, found.dtype) != (shape, dtype):
                raise Damage(
                    f"{self.path} is damaged: the {words} are {found.shape} of {found.dtype}, "
                    f"but the index says {shape} of {dtype}: {AGAIN}"
                )
            sums = self._sums(entry, what) if what in entry.sums else None
            return ChunkReader(
                self._descriptor, found, self.path, words, sums, leading=int(what == "pixels")
            )
        except (OSError, RuntimeError, KeyError) as e:  # errors of HDF5
            raise Damage(
                f"{self.path} is damaged: the {words} cannot be found ({e}): {AGAIN}"
            ) from e

    def _file_pixels(self, entry: header.Entry, source: Source, words: str) -> FilePixels:
        """Return the reader of pixels in an image file; ``words`` names them in messages."""
        shape, dtype = self._expected(entry, "pixels")
        sums = self._sums(entry, "pixels")
        return FilePixels(
            shape, dtype, self.path, words, source, self._files[-1], self._descriptor, sums
        )

    def _sums(self, entry: header.Entry, what: str) -> Sums:
        """Return the position in the file of the checksums of a dataset of an image."""
        return Sums(self._sums_at + 8 * entry.sums[what], entry.digests[what])

    def _expected(self, entry: header.Entry, what: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and dtype that a dataset of an image must have.

        Args:
            entry: the index entry of the image.
            what: the dataset: ``pixels``, ``labels``, ``valid`` or ``counts``.
        """
        if what == "pixels":
            return (self.bands, *entry.size), entry.dtype
        if what in ("labels", "valid"):
            return entry.size, np.dtype(np.uint8)
        return (len(self.classes), *(-(-n // self.block) for n in entry.size)), np.dtype("<u4")

    def _check_shrink(self) -> None:
        """Refuse to shrink images whose pixels or labels cannot be averaged.

        Raises:
            ValueError: an image has labels of pixels, pixels without data, or a pixel value that
                means "no data", or it is smaller than a block of ``shrink`` pixels a side.
        """
        if self.shrink == 1:
            return
        for name, entry in self._images.items():
            if entry.labels or entry.nodata is not None or (entry.valid and entry.missing):
                what = "labels of pixels" if entry.labels else "pixels without data"
                raise ValueError(
                    f"data.shrink is {self.shrink}, but image {name!r} of {self.path} has {what}, "
                    "which cannot be averaged: leave data.shrink out"
                )
            if min(entry.size) < self.shrink:
                raise ValueError(
                    f"data.shrink is {self.shrink}, but image {name!r} of {self.path} has "
                    f"{Size(entry.size)} pixels, so nothing is left: set a smaller data.shrink"
                )

    def _check_size(self) -> None:
        """Refuse a file with fewer bytes than the pixels of its images take uncompressed.

        Raises:
            ValueError: the file is too small.
        """
        needed = sum(
            entry.dtype.itemsize * self.bands * Size(entry.size).volume
            for entry in self._images.values()
            if entry.source is None
        )
        if needed > (size := os.fstat(self._descriptor).st_size):
            words = f"its images take {needed} bytes, but the file has {size}"
            raise ValueError(f"{self.path} is damaged or cut off: {words}: {AGAIN}")

    def _say_version(self) -> None:
        """Warn once per process about a store without checksums."""
        if self.version < 2 and self.path not in _warned:
            _warned.add(self.path)
            words = (
                "which has no checksums: damage in it may go unseen; prepare it anew to add them"
            )
            print(
                f"distseg: {self.path} is a store of version {self.version}, {words}",
                file=sys.stderr,
            )

    def _entry(self, name: str) -> header.Entry:
        if name not in self._images:
            some = ", ".join(list(self._images)[:5])
            raise ValueError(
                f"{self.path} has no image {name!r}: it holds {len(self._images)} images, such as "
                f"{some}"
            )
        return self._images[name]

    def _check(self, name: str, box: Box) -> None:
        size = self.size(name)
        if len(box.start) != len(size):
            raise ValueError(
                f"image {name!r} of {self.path} has {len(size)} dims ({Size(size)}), but the box "
                f"{box} has {len(box.start)}: choose a box of {len(size)} dims"
            )
        if not Box.whole(size).contains(box):
            raise ValueError(
                f"image {name!r} of {self.path} has {Size(size)} pixels, but the box {box} reaches "
                "beyond them: choose a box inside the image"
            )

    def _check_labelled(self, name: str) -> None:
        if not self.has_labels(name):
            raise ValueError(
                f"image {name!r} of {self.path} has no labels: prepare the store with masks to "
                "train or evaluate on it"
            )


def shrunken(pixels: np.ndarray, by: int) -> np.ndarray:
    """Return the mean of each block of pixels of an image, (bands, *(size // by)) float32.

    A block has ``by`` pixels a side. Rows and columns that fill no whole block are dropped.
    ``pixels`` is (bands, *size).
    """
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
    """Return (pixels - mean) / std as float32, with 0 for values without data.

    The computation is in float64 if float32 cannot hold all values of the pixels' dtype.

    Args:
        pixels: (bands, *size).
        mean: (bands,).
        std: (bands,).
        nodata: the pixel value that means "no data"; None if no value does.
        valid: the validity mask, (*size) bool, True where there is data; None if all pixels have
            data.
    """
    return _standardised(pixels, mean, std, missing(pixels, nodata, valid))


def _standardised(
    pixels: np.ndarray, mean: np.ndarray, std: np.ndarray, absent: np.ndarray | None
) -> np.ndarray:
    """Return (pixels - mean) / std as float32, with 0 where ``absent`` is True.

    ``pixels`` and ``absent`` are (bands, *size), ``mean`` and ``std`` (bands,).
    """
    pixels = pixels.astype(np.result_type(pixels.dtype, np.float32))
    if absent is not None:
        pixels[absent] = 0  # the number for no data could overflow below
    shape = (-1, *(1 for _ in pixels.shape[1:]))
    pixels -= mean.astype(pixels.dtype).reshape(shape)
    pixels /= std.astype(pixels.dtype).reshape(shape)
    pixels = pixels.astype(np.float32, copy=False)
    if absent is not None:
        pixels[absent] = 0
    return pixels
