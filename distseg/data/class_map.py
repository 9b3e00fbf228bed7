"""A class map that grows on the disk tile by tile and survives an interruption.

While it grows it is a folder ``NAME.partial``. The folder holds plain arrays, and a record with a
checksum of each finished tile. A tile is recorded only after its pixels are on the disk. A later
process that takes the folder over computes missing tiles, and tiles whose pixels do not match their
checksum. When all tiles are finished, the result is packed into files
(:mod:`distseg.data.class_files`), each by an atomic write. So a partial result never looks like a
complete one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from distseg.comm.launch import release_freed_memory
from distseg.comm.progress import heartbeat
from distseg.data import class_files
from distseg.data.formats.mapped import let_go, pieces
from distseg.report.disk import DiskFull, disk_full_errors, locked, opened_plain, require_disk_space
from distseg.tiling.tile import Box

_FLUSH = 2.0  # seconds between flushes
_DONE = 1 << 32  # bit in the record that marks a tile as finished, above its 32-bit checksum


def identity_of(about: dict, size: Sequence[int], tiles: Sequence[Box], likely: int) -> str:
    """Return a digest of everything that a class map depends on.

    A later run keeps or continues a class map only if it has the same digest.

    Args:
        about: settings and inputs, in types that JSON can hold.
        size: the size of the image.
        tiles: the tiles of the image.
        likely: number of channels of probabilities; 0 if no probabilities are written.
    """

    def text(value) -> str:
        return json.dumps(value, sort_keys=True, default=int)

    # The text of the list [about, size, tiles, likely], without the whole text in memory.
    digest = hashlib.sha256(f"[{text(about)}, {text(size)}, [".encode())
    for number, tile in enumerate(tiles):
        digest.update(f"{', ' * (number > 0)}{text([tile.start, tile.stop])}".encode())
    digest.update(f"], {text(likely)}]".encode())
    return digest.hexdigest()


def _locked_folder(folder: Path) -> IO:
    """Create a folder if it is missing, lock it for this process, and return its open lock file.

    Other processes are refused the lock until the file is closed (:func:`locked`).
    """
    while True:
        folder.mkdir(exist_ok=True)
        # Another process that finished its map may remove the folder between these two lines.
        with suppress(FileNotFoundError):
            return locked(folder / "lock", folder)


class PartialMap:
    """Class map of one image that is written to a folder tile by tile, and can be continued.

    The folder holds the array ``classes``, (*size) uint8, and optionally the array
    ``probabilities``, (likely, *size) float16.

    Args:
        folder: created if missing. If it holds an unfinished map with the same ``identity``, this
            map is continued. A map with another identity is deleted.
        identity: a digest of everything that the result depends on, from :func:`identity_of`.
        size: the size of the image.
        tiles: the tiles of the image, in order.
        likely: number of channels of probabilities; 0 if no probabilities are written.

    Attributes:
        taken_up: True if the folder held an unfinished map with the same identity, which is
            continued.

    Raises:
        BlockingIOError: another process is writing this map.
        FileExistsError: the folder is a link or not a folder, or a file in it is a link or not a
            plain file.
        DiskFull: the disk has too few free bytes for the arrays. This is found before anything is
            computed.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        size: tuple[int, ...],
        tiles: Sequence[Box],
        likely: int = 0,
    ):
        self.folder, self.identity = folder, identity
        self.size, self.tiles, self.likely = size, tiles, likely
        pixels = int(np.prod(size))
        self._bytes = {
            "classes": pixels,
            "probabilities": 2 * likely * pixels,
            "done": 8 * len(tiles),
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink() or folder.exists() and not folder.is_dir():
            raise FileExistsError(
                f"{folder} is a link or not a folder, but distseg needs a folder of this name for "
                f"the unfinished result: "
                "remove it, or set another --output"
            )
        self._lock = _locked_folder(folder)
        self.taken_up = self._is_same()
        if not self.taken_up:
            self._begin()
        self._record = self._map("done", np.uint64, (len(tiles),))
        self._arrays = {"classes": self._map("classes", np.uint8, size)}
        if likely:
            self._arrays["probabilities"] = self._map("probabilities", np.float16, (likely, *size))
        self._waiting: dict[int, int] = {}  # checksums of tiles that are written but not recorded
        self._flushed = time.monotonic()
        if self.taken_up:
            self._forget_damaged()

    @property
    def missing(self) -> list[int]:
        """The indices of the tiles that are not finished."""
        return [int(i) for i in np.flatnonzero(self._record == 0)]

    def write(
        self, number: int, classes: np.ndarray, probabilities: np.ndarray | None = None
    ) -> None:
        """Write the pixels of a tile. The next :meth:`flush` records the tile as finished.

        Args:
            number: index of the tile in ``tiles``.
            classes: (*tile.size) uint8.
            probabilities: (likely, *tile.size) float16; None if ``likely`` is 0.
        """
        for part, values in zip(self._parts(number), (classes, probabilities)):
            for piece in pieces(part):
                part[piece] = values[piece]
        self._waiting[number] = self._sum(number)
        if time.monotonic() - self._flushed > _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Flush all written pixels to the disk, and then record their tiles as finished."""
        for array in self._arrays.values():
            array.flush()
        self._record[list(self._waiting)] = list(self._waiting.values())
        self._record.flush()
        self._waiting.clear()
        self._flushed = time.monotonic()

    def pack(
        self, paths: Sequence[Path], classes: class_files.Classes, identity: str | None = None
    ) -> None:
        """Write the finished result to files and remove the folder.

        Files that an interrupted call of this function has finished are kept.

        Args:
            paths: files to write; each ending chooses the format.
            classes: the names and colours of the classes.
            identity: a digest of everything that the files depend on, to store in them; by default
                the identity of the map.
        """
        self.flush()
        assert not self.missing
        identity = identity or self.identity
        for path in paths:
            if not class_files.are_there([path], identity):
                self._write_file(path, classes, identity)
        self._clear()
        self._unmap()  # on network file systems, open files would stay in the folder
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
        # Such a file system removes the lock file only now. If another process has begun a new map
        # in the folder, it is not empty and stays.
        with suppress(OSError):
            self.folder.rmdir()

    def _write_file(self, path: Path, classes: class_files.Classes, identity: str) -> None:
        """Write the finished result to a file, and show the progress."""
        release_freed_memory()  # that feature maps or the previous file took
        with class_files.progress_of(path, self._bytes["classes"]) as shown:

            def advance(pixels: int) -> None:
                self._leave_memory()
                shown(pixels)

            class_files.write(path, self._arrays, classes, identity, advance, self.folder)

    def close(self) -> None:
        """Flush and close the arrays; the folder stays for a later process."""
        if self._arrays:
            self.flush()
        self._unmap()
        self._lock.close()

    def _clear(self) -> None:
        """Remove the files of the folder.

        The identity is removed first: without it the remaining files are ignored.
        """
        for name in ("identity", "done", "classes", "probabilities"):
            (self.folder / name).unlink(missing_ok=True)

    def _unmap(self) -> None:
        self._arrays.clear()
        self._record = None

    def _map(self, name: str, dtype, shape: tuple[int, ...]) -> np.memmap:
        with os.fdopen(opened_plain(self.folder / name), "r+b") as file:
            return np.memmap(file, dtype, "r+", shape=shape)

    def _sum(self, number: int) -> int:
        """Return the checksum of the pixels of tile ``number``.

        The file ``done`` records it for each finished tile; a 0 there marks an unfinished tile, so
        the result is never 0.
        """
        found = zlib.crc32(str(number).encode())
        for part in self._parts(number):
            for piece in pieces(part):
                found = zlib.crc32(np.ascontiguousarray(part[piece]), found)
        return _DONE | found

    def _parts(self, number: int) -> list[np.ndarray]:
        """Return the part of each array that belongs to tile ``number``: classes, probabilities."""
        at = self.tiles[number].slices
        return [array[(..., *at)] for array in self._arrays.values()]

    def _forget_damaged(self) -> None:
        """Mark the tiles as missing whose pixels do not match their recorded checksum."""
        for number in np.flatnonzero(self._record):
            heartbeat(f"checksum of tile {number}")
            if int(self._record[number]) != self._sum(int(number)):
                self._record[number] = 0

    def _leave_memory(self) -> None:
        """Release the pages of the mapped arrays from this process's memory."""
        for array in self._arrays.values():
            let_go(array)

    def _is_same(self) -> bool:
        """Return True if the folder holds a map of this identity, with files of the right sizes."""
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
        """Create the files of a map with no finished tile, after a check of the free disk space."""
        self._clear()
        needed = sum(self._bytes.values())
        try:
            require_disk_space(
                self.folder, needed, f"the unfinished class map of {self._bytes['classes']} pixels"
            )
            with disk_full_errors(self.folder, needed=needed):
                for name, count in self._bytes.items():
                    self._make(name, count)
                # The identity comes last: without it the folder is ignored.
                self._make("identity", 0, self.identity.encode())
        except DiskFull:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _make(self, name: str, count: int, content: bytes = b"") -> None:
        """Create a file in the folder, with ``count`` zero bytes or with ``content``.

        The zero bytes are reserved on the disk, so that the disk cannot run full later. ``count``
        is 0 if ``content`` is given.
        """
        with os.fdopen(
            opened_plain(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "wb"
        ) as file:
            if count:
                os.posix_fallocate(file.fileno(), 0, count)
            file.write(content)
