"""A class map on its way to disk, tile by tile: what is there survives an interruption, and half of it never looks like the whole.

While it grows it is a folder ``NAME.partial`` of plain arrays and a record of the tiles that are done, with a checksum of
each. A tile is recorded once its pixels are on the disk; whoever takes the folder up again computes those anew that are not
what the record says. When all tiles are there the result is packed into files (:mod:`distseg.data.class_files`), each of
which takes its name in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Callable, Sequence

import numpy as np

from distseg.data import class_files
from distseg.data.formats.mapped import let_go
from distseg.report.disk import NoRoom, locked, opened_plain, require_disk_space, room_told
from distseg.tiling.tile import Box

_FLUSH = 2.0  # seconds after which what was written goes to the disk and into the record
_DONE = 1 << 32  # in the record, beside a tile's checksum


def identity_of(about: dict, size: Sequence[int], tiles: Sequence[Box], likely: int) -> str:
    """A digest of all that a result depends on: what it is ``about``, as JSON, and how the image is cut."""
    cut = [(tile.start, tile.stop) for tile in tiles]
    return hashlib.sha256(
        json.dumps([about, size, cut, likely], sort_keys=True, default=int).encode()
    ).hexdigest()


class PartialMap:
    """The arrays of one image: ``classes`` (*size) uint8 and, with ``likely`` channels, ``probabilities`` (likely, *size) float16.

    Args:
        folder: made, or taken up where one of the same ``identity`` is there; one of another identity is begun anew.
        identity: of the result, by :func:`identity_of`.
        tiles: of the image, in order.

    Raises:
        BlockingIOError: another process is at work on it.
        FileExistsError: a link, or another thing than our own, has the name of the folder or of a file in it.
        NoRoom: the disk has no room for the arrays, before anything is computed.
    """

    def __init__(
        self, folder: Path, identity: str, size: tuple[int, ...], tiles: list[Box], likely: int = 0
    ):
        self.folder, self.identity, self.size, self.tiles, self.likely = (
            folder,
            identity,
            size,
            tiles,
            likely,
        )
        pixels = int(np.prod(size))
        self._bytes = {
            "classes": pixels,
            "probabilities": 2 * likely * pixels,
            "done": 8 * len(tiles),
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink() or folder.exists() and not folder.is_dir():
            raise FileExistsError(
                f"{folder} is a link or no folder, where distseg keeps a result on its way: "
                "remove it, or name another --output"
            )
        folder.mkdir(exist_ok=True)
        self._lock = locked(folder / "lock", folder)
        self.taken_up = self._is_same()
        if not self.taken_up:
            self._begin()
        self._record = self._map("done", np.uint64, (len(tiles),))
        self._arrays = {"classes": self._map("classes", np.uint8, size)}
        if likely:
            self._arrays["probabilities"] = self._map("probabilities", np.float16, (likely, *size))
        self._waiting: dict[int, int] = {}  # tiles that are written, and their checksums
        self._flushed = time.monotonic()
        if self.taken_up:
            self._forget_damaged()

    @property
    def missing(self) -> list[int]:
        """The numbers of the tiles that are not done."""
        return [int(i) for i in np.flatnonzero(self._record == 0)]

    def write(
        self, number: int, classes: np.ndarray, probabilities: np.ndarray | None = None
    ) -> None:
        """Tile ``number``: (*tile.size) uint8, (likely, *tile.size) float16."""
        at = self.tiles[number].slices
        self._arrays["classes"][at] = classes
        if self.likely:
            self._arrays["probabilities"][(slice(None), *at)] = probabilities
        self._waiting[number] = self._sum(number)
        if time.monotonic() - self._flushed > _FLUSH:
            self.flush()

    def flush(self) -> None:
        """First the pixels to the disk, then their tiles into the record."""
        for array in self._arrays.values():
            array.flush()
        self._leave_memory()
        self._record[list(self._waiting)] = list(self._waiting.values())
        self._record.flush()
        self._waiting.clear()
        self._flushed = time.monotonic()

    def pack(
        self,
        paths: Sequence[Path],
        classes: class_files.Classes,
        advance: Callable[[int], None] = lambda pixels: None,
    ) -> None:
        """Write the result to files, by the format of each one's ending, and remove the folder."""
        self.flush()
        assert not self.missing

        def packed(pixels: int) -> None:
            self._leave_memory()
            advance(pixels)

        for path in paths:
            class_files.write(path, self._arrays, classes, self.identity, packed)
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

    def _map(self, name: str, dtype, shape: tuple[int, ...]) -> np.memmap:
        with os.fdopen(opened_plain(self.folder / name), "r+b") as file:
            return np.memmap(file, dtype, "r+", shape=shape)

    def _sum(self, number: int) -> int:
        """Of a tile as it is in the arrays; never 0, which says that it is not done."""
        at, found = self.tiles[number].slices, zlib.crc32(str(number).encode())
        for array in self._arrays.values():
            found = zlib.crc32(np.ascontiguousarray(array[(..., *at)]), found)
        return _DONE | found

    def _forget_damaged(self) -> None:
        """Tiles that are not what the record says count as missing: they are computed anew."""
        for number in np.flatnonzero(self._record):
            if int(self._record[number]) != self._sum(int(number)):
                self._record[number] = 0
        self._leave_memory()

    def _leave_memory(self) -> None:
        """What is on the disk need not stay in this process's memory."""
        for array in self._arrays.values():
            let_go(array)

    def _is_same(self) -> bool:
        try:
            with os.fdopen(opened_plain(self.folder / "identity", os.O_RDONLY), "rb") as file:
                same = file.read(2 * len(self.identity)) == self.identity.encode()
            sizes = (
                (self.folder / name).stat().st_size == count
                for name, count in self._bytes.items()
                if count
            )
            return same and all(sizes)
        except FileExistsError:
            raise
        except OSError:
            return False

    def _begin(self) -> None:
        self._clear()
        needed = sum(self._bytes.values())
        try:
            require_disk_space(
                self.folder, needed, f"the class map of {self._bytes['classes']} pixels on its way"
            )
            with room_told(self.folder, needed=needed):
                for name, count in self._bytes.items():
                    self._make(name, count)
                self._make(
                    "identity", 0, self.identity.encode()
                )  # last: without it the folder counts for nothing
        except NoRoom:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _make(self, name: str, count: int, content: bytes = b"") -> None:
        """A file of ``count`` bytes that the disk has room for, or with a content."""
        with os.fdopen(
            opened_plain(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "wb"
        ) as file:
            if count:
                os.posix_fallocate(file.fileno(), 0, count)
            file.write(content)
