"""Numbers in a scratch file, for results of tracing that would not fit into memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

_SIZE = 8  # bytes of a number


class ScratchNumbers:
    """Growing array of int64 numbers in a scratch file.

    The scratch file has no name and vanishes with this object or the process.

    Args:
        folder: the folder of the scratch file; None for the system's folder for temporary files.

    Attributes:
        count: number of numbers in the array.
    """

    def __init__(self, folder: Path | None = None):
        self._file = tempfile.TemporaryFile(prefix="distseg-", dir=folder, buffering=0)
        self.count = 0

    def append(self, values: np.ndarray) -> int:
        """Append numbers, (numbers,) int64, and return the position of the first one.

        Raises:
            OSError: the disk is full.
        """
        position = self.count
        self._put(position, memoryview(np.ascontiguousarray(values, np.int64)).cast("B"))
        self.count += len(values)
        return position

    def change(self, positions: np.ndarray, values: np.ndarray) -> None:
        """Replace the numbers at some positions.

        Args:
            positions: (numbers,) positions below ``count``.
            values: (numbers,) the new numbers.
        """
        for position, value in zip(positions.tolist(), np.asarray(values, np.int64)):
            self._put(position, value.tobytes())

    def read(self, begin: int, count: int) -> np.ndarray:
        """Return ``count`` numbers from position ``begin`` on; fewer if the array ends before."""
        count = min(count, self.count - begin)
        found = np.empty(count, np.int64)
        rest, at = memoryview(found).cast("B"), _SIZE * begin
        while rest:
            done = os.preadv(self._file.fileno(), [rest], at)
            if not done:
                raise OSError(f"the scratch file ends at byte {at}: its disk has an error")
            rest, at = rest[done:], at + done
        return found

    def _put(self, position: int, data: bytes | memoryview) -> None:
        at = _SIZE * position
        while data:
            done = os.pwrite(self._file.fileno(), data, at)
            data, at = data[done:], at + done
