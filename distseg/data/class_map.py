"""A class map on its way to disk, tile by tile: what is there survives an interruption, and half of it never looks like the whole.

While it grows it is a folder ``NAME.partial`` of plain arrays and a record of the tiles that are done. A tile is recorded once its
pixels are on the disk, so whoever takes the folder up again need not doubt what the record says. When all tiles are there the
result is packed, under another name, and takes its own in one step.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Callable, Iterator

import h5py
import numpy as np

from distseg.geometry.tile import Box, strips

_FLUSH = 2.0  # seconds after which what was written goes to the disk and into the record
_EDGE = 256  # of chunks and TIFF tiles


class PartialMap:
    """The arrays of one image: ``classes`` (*size) uint8 and, with ``likely`` channels, ``probabilities`` (likely, *size) float16.

    Args:
        folder: made, or taken up where one of the same ``identity`` is there; one of another identity is begun anew.
        identity: all that the result depends on, as JSON.
        tiles: of the image, in order.

    Raises:
        OSError: the disk has no room for the arrays, before anything is computed.
    """

    def __init__(self, folder: Path, identity: dict, size: tuple[int, ...], tiles: list[Box], likely: int = 0):
        self.folder, self.size, self.tiles, self.likely = folder, size, tiles, likely
        self.identity = json.dumps({**identity, "size": size, "tiles": len(tiles), "likely": likely}, sort_keys=True)
        self.taken_up = self._is_same()
        if not self.taken_up:
            self._begin()
        self._record = np.memmap(folder / "done", np.uint8, "r+", shape=(len(tiles),))
        self._arrays = {"classes": np.memmap(folder / "classes", np.uint8, "r+", shape=size)}
        if likely:
            self._arrays["probabilities"] = np.memmap(folder / "probabilities", np.float16, "r+", shape=(likely, *size))
        self._waiting: list[int] = []
        self._flushed = time.monotonic()

    @property
    def missing(self) -> list[int]:
        """The numbers of the tiles that are not done."""
        return [int(i) for i in np.flatnonzero(self._record == 0)]

    def write(self, number: int, classes: np.ndarray, probabilities: np.ndarray | None = None) -> None:
        """Tile ``number``: (*tile.size) uint8, (likely, *tile.size) float16."""
        at = self.tiles[number].slices
        self._arrays["classes"][at] = classes
        if self.likely:
            self._arrays["probabilities"][(slice(None), *at)] = probabilities
        self._waiting.append(number)
        if time.monotonic() - self._flushed > _FLUSH:
            self.flush()

    def flush(self) -> None:
        """First the pixels to the disk, then their tiles into the record."""
        for array in self._arrays.values():
            array.flush()
            array._mmap.madvise(mmap.MADV_DONTNEED)  # what is on the disk need not stay in this process's memory
        self._record[self._waiting] = 1
        self._record.flush()
        self._waiting.clear()
        self._flushed = time.monotonic()

    def pack(self, formats: tuple[str, ...], class_names: list[str], advance: Callable[[int], None] = lambda pixels: None) -> list[Path]:
        """Write ``NAME.h5`` or ``NAME.tif`` beside the folder and remove it; the files' paths."""
        self.flush()
        assert not self.missing
        final = [self.folder.with_suffix(f".{_ENDINGS[form]}") for form in formats]
        for form, path in zip(formats, final):
            growing = path.with_name(path.name + ".writing")
            try:
                _PACK[form](growing, self._arrays, class_names, advance)
                os.replace(growing, path)
            finally:
                growing.unlink(missing_ok=True)
        self._arrays.clear()
        shutil.rmtree(self.folder)
        return final

    def _is_same(self) -> bool:
        try:
            return (self.folder / "identity.json").read_text() == self.identity
        except OSError:
            return False

    def _begin(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        pixels = int(np.prod(self.size))
        try:
            for name, count in (("classes", pixels), ("probabilities", 2 * self.likely * pixels), ("done", len(self.tiles))):
                with open(self.folder / name, "wb") as file:
                    if count:
                        os.posix_fallocate(file.fileno(), 0, count)
        except OSError as e:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise OSError(
                f"the class map of {pixels} pixels does not fit {self.folder.parent} ({e.strerror}; it takes {(1 + 2 * self.likely) * pixels / 1e9:.2f} GB while it "
                "grows): make room, or name another --output"
            ) from None
        (self.folder / "identity.json").write_text(self.identity)  # last: without it the folder counts for nothing


def _chunk_rows(size: tuple[int, ...]) -> Iterator[slice]:
    return (strip.slices[0] for strip in strips(Box.whole(size), 0, _EDGE))


def _pack_hdf5(path: Path, arrays: dict[str, np.ndarray], class_names: list[str], advance) -> None:
    with h5py.File(path, "w") as f:
        classes = arrays["classes"]
        chunks = tuple(min(_EDGE, n) for n in classes.shape)
        f.attrs["class_names"] = class_names
        f.create_dataset("classes", classes.shape, "u1", chunks=chunks, compression="gzip", compression_opts=1)
        if "probabilities" in arrays:
            f.create_dataset("probabilities", arrays["probabilities"].shape, "f2", chunks=(1, *chunks), compression="lzf")
        for rows in _chunk_rows(classes.shape):
            f["classes"][rows] = classes[rows]
            if "probabilities" in arrays:
                f["probabilities"][:, rows] = arrays["probabilities"][:, rows]
            advance(classes[rows].size)


def _pack_tiff(path: Path, arrays: dict[str, np.ndarray], class_names: list[str], advance) -> None:
    try:
        import tifffile
    except ImportError:
        raise ValueError("class maps as TIFF need the package tifffile: pip install tifffile, or take predict.formats hdf5") from None
    classes = arrays["classes"]
    if classes.ndim != 2:
        raise ValueError(f"class maps of {classes.ndim} dims are written as hdf5 only: take tiff out of predict.formats")

    def tiles() -> Iterator[np.ndarray]:
        for rows in _chunk_rows(classes.shape):
            for left in range(0, classes.shape[1], _EDGE):
                tile = np.zeros((_EDGE, _EDGE), np.uint8)
                part = classes[rows, left : left + _EDGE]
                tile[: part.shape[0], : part.shape[1]] = part
                yield tile
            advance(classes[rows].size)

    names = json.dumps({"class_names": class_names})
    tifffile.imwrite(path, tiles(), shape=classes.shape, dtype=np.uint8, tile=(_EDGE, _EDGE), compression="deflate", bigtiff=classes.size > 2**31, description=names)


_PACK = {"hdf5": _pack_hdf5, "tiff": _pack_tiff}
_ENDINGS = {"hdf5": "h5", "tiff": "tif"}
