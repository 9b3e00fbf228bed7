"""Arrays that lie in files, of which the process's memory has only what is being read or written."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Sequence

import numpy as np

from distseg.report.disk import free_bytes

_SMALL = 1 << 24  # bytes that may as well lie in memory
_SHARE = 2  # a file may take one in so many of the bytes that its disk has free


def room_for(shape: Sequence[int], dtype: np.dtype, folder: str | None = None) -> np.ndarray | None:
    """An array to fill: of few bytes in memory, else in a file that no name leads to, gone with the array or the process.

    Args:
        folder: of the file, by default the system's for such files; ``memory``: none.

    Returns:
        None where the disk has no room for it. The room is taken at once, so that it suffices later.
    """
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    if needed <= _SMALL or folder == "memory":
        return np.empty(shape, dtype)
    folder = folder or tempfile.gettempdir()
    try:
        if _SHARE * needed > free_bytes(Path(folder)):
            return None
        with tempfile.TemporaryFile(prefix="distseg-", dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, needed)
            return np.memmap(file, dtype, "r+", shape=tuple(shape))
    except OSError:
        return None


def copied(array: np.ndarray, part: np.ndarray) -> np.ndarray:
    """A copy of a part of an array; if that is mapped from a file, :func:`let_go`."""
    found = np.array(part)
    let_go(array)
    return found


def let_go(array: np.ndarray) -> None:
    """Pages that an array maps from a file no longer count as this process's memory."""
    if isinstance(array, np.memmap):
        array._mmap.madvise(mmap.MADV_DONTNEED)
