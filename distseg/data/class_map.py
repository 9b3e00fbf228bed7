"""A class map on its way to disk, tile by tile: what is there survives an interruption, and half of it never looks like the whole.

While it grows it is a folder ``NAME.partial`` of plain arrays and a record of the tiles that are done. A tile is recorded once its
pixels are on the disk, so whoever takes the folder up again need not doubt what the record says. When all tiles are there the
result is packed into files (:mod:`distseg.data.class_files`), each of which takes its name in one step.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Callable, Sequence

import numpy as np

from distseg.data import class_files
from distseg.disk import locked
from distseg.geometry.tile import Box

_FLUSH = 2.0  # seconds after which what was written goes to the disk and into the record


def identity_of(about: dict, size: Sequence[int], tiles: Sequence[Box], likely: int) -> str:
    """A digest of all that a result depends on: what it is ``about``, as JSON, and how the image is cut."""
    cut = [(tile.start, tile.stop) for tile in tiles]
    return hashlib.sha256(json.dumps([about, size, cut, likely], sort_keys=True, default=int).encode()).hexdigest()


class PartialMap:
    """The arrays of one image: ``classes`` (*size) uint8 and, with ``likely`` channels, ``probabilities`` (likely, *size) float16.

    Args:
        folder: made, or taken up where one of the same ``identity`` is there; one of another identity is begun anew.
        identity: of the result, by :func:`identity_of`.
        tiles: of the image, in order.

    Raises:
        BlockingIOError: another process is at work on it.
        OSError: the disk has no room for the arrays, before anything is computed.
    """

    def __init__(self, folder: Path, identity: str, size: tuple[int, ...], tiles: list[Box], likely: int = 0):
        self.folder, self.identity, self.size, self.tiles, self.likely = folder, identity, size, tiles, likely
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = locked(folder / "lock", folder)
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

    def pack(self, paths: Sequence[Path], classes: class_files.Classes, advance: Callable[[int], None] = lambda pixels: None) -> None:
        """Write the result to files, by the format of each one's ending, and remove the folder."""
        self.flush()
        assert not self.missing
        for path in paths:
            class_files.write(path, self._arrays, classes, self.identity, advance)
        self._clear()
        self._unmap()  # network file systems keep files that are open
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # unless another process has begun

    def close(self) -> None:
        """Leave what there is to whoever takes it up."""
        if self._arrays:
            self.flush()
        self._unmap()
        self._lock.close()

    def _clear(self) -> None:
        """First the identity: what is left counts for nothing without it."""
        for name in ("identity", "done", "classes", "probabilities"):
            (self.folder / name).unlink(missing_ok=True)

    def _unmap(self) -> None:
        self._arrays.clear()
        self._record = None

    def _is_same(self) -> bool:
        try:
            return (self.folder / "identity").read_text() == self.identity
        except OSError:
            return False

    def _begin(self) -> None:
        self._clear()
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
        (self.folder / "identity").write_text(self.identity)  # last: without it the folder counts for nothing
