"""Arrays in memory-mapped files, of which only the parts in use are in memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distseg.report.disk import free_bytes

MOST_IN_MEMORY = 1 << 24  # bytes up to which an array is kept in memory
_SHARE = 2  # a scratch file may take one half of the free bytes of its disk


def mapped_array(
    shape: Sequence[int], dtype: np.dtype, folder: str | None = None
) -> np.ndarray | None:
    """Return an uninitialised array: in memory up to 16 MiB, else in a scratch file.

    The scratch file has no name and vanishes with the array or the process. All its bytes are
    reserved immediately, so that the disk cannot run full later.

    Args:
        shape: the shape of the array.
        dtype: the dtype of the array.
        folder: the folder of the scratch file; None for the system's folder for temporary files;
            ``memory`` for an array in memory.

    Returns:
        The array; None if the scratch file would take more than half of the free bytes of its
        disk, or cannot be created.
    """
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    if needed <= MOST_IN_MEMORY or folder == "memory":
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
    """Return a copy of ``part``, and release the memory of the mapped ``array``.

    The pages of a mapped array that were read stay in memory until they are released.

    Args:
        array: a mapped array.
        part: a view of ``array``.
    """
    found = np.array(part)
    let_go(array)
    return found


def let_go(array: np.ndarray) -> None:
    """Release the pages of a mapped array from this process's memory; the file keeps them."""
    if isinstance(array, np.memmap):
        array._mmap.madvise(mmap.MADV_DONTNEED)
