"""Arrays in memory-mapped files, of which only the parts in use are in memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from distseg.report.disk import free_bytes

_FOLIO = 1 << 21  # bytes of the largest block that the system maps at once around a used byte
_NEAR = 1 << 22  # bytes of a file within which the numbers lie that are copied at once
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


def copied(part: np.ndarray) -> np.ndarray:
    """Return a copy of a view of a mapped array, and release its pages."""
    found = np.empty_like(part, subok=False)
    for piece in pieces(part):
        found[piece] = part[piece]
    return found


def pieces(part: np.ndarray) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of pieces of a view of a mapped array, and release the pages of each piece.

    The bytes of a piece lie within some megabytes of the file. The rows of a view may be far apart
    in the file, and the system maps much more around each row than the row itself. The pieces of a
    view in row-major order are in this order.
    """
    waiting = [tuple(slice(0, n) for n in part.shape)]
    while waiting:
        at = waiting.pop()
        piece = part[at]
        if sum(map(abs, _reaches(piece))) <= _NEAR:
            yield at
            let_go(piece)
            continue
        steps = [abs(step) * (n > 1) for n, step in zip(piece.shape, piece.strides)]
        axis = steps.index(max(steps))
        start, stop = at[axis].start, at[axis].stop
        middle = (start + stop) // 2
        for half in (slice(middle, stop), slice(start, middle)):
            waiting.append((*at[:axis], half, *at[axis + 1 :]))


def let_go(array: np.ndarray) -> None:
    """Release the pages of a mapped array, so that they do not count as this process's memory.

    Args:
        array: a mapped array or a view of one. Other arrays have no pages to release.
    """
    if not isinstance(array, np.memmap) or not array.size:
        return
    pages = np.frombuffer(array._mmap, np.uint8)
    first = array.ctypes.data - pages.ctypes.data
    start = first + sum(reach for reach in _reaches(array) if reach < 0)
    stop = first + sum(reach for reach in _reaches(array) if reach > 0) + array.itemsize
    start = start // _FOLIO * _FOLIO
    stop = min(-(-stop // _FOLIO) * _FOLIO, len(pages))
    array._mmap.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _reaches(array: np.ndarray) -> list[int]:
    """Return, for each axis, the bytes from the first to the last number of an array along it."""
    return [(n - 1) * step for n, step in zip(array.shape, array.strides)]
