"""Feature maps that are too large for memory, stored in files without a name.

A window is read when a tile needs it; nothing is read ahead. No name leads to such a file, so it
disappears with the process, however the process ends.

Windows are read and written row by row instead of through mmap. A full disk then raises an error
with a message; with mmap it would send a signal. The operating system's cache of the file does not
count as memory of this process.

A file usually stores the channels of a cell side by side (channels-last), so a row of a window is
one run of bytes. Transposing a window in memory takes less time than one system call per row and
channel. But if windows are whole rows and memory is channels-first, the file is channels-first too.
A window is then one run per channel and needs no transposition. If no folder is given, feature maps
stay in the host's memory.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from distseg.comm.memory_format import as_bytes, lies_last
from distseg.tiling.tile import Box


class Map:
    """Stored feature map, (B, C, *box.size).

    Args:
        box: the part of the feature map to store.
        like: a tensor of any part of the map. It sets batch size, number of channels, dtype, device
            and memory format.
        folder: the folder of the file; None stores the map in memory.
        zero: True to fill a map in memory with zeros, so that parts can be added to it. This makes
            the process occupy all of the map's memory immediately. A file always begins with zeros.
        rows: True if nearly all parts that are read or written are whole rows. The file of a
            channels-first map is then channels-first too.

    Raises:
        OSError: if the file does not fit on its disk. It is raised before anything is written.
    """

    def __init__(
        self,
        box: Box,
        like: Tensor,
        folder: str | Path | None = None,
        zero: bool = False,
        rows: bool = False,
    ):
        self.box, self.dtype, self.device, self.last = box, like.dtype, like.device, lies_last(like)
        self.rows = rows and not self.last
        # Dims before the dims of the box:
        self.outer = (len(like),) if self.last else tuple(like.shape[:2])
        self.images, self.channels = like.shape[:2]
        self.cell = self.channels * like.element_size()  # bytes
        self.bytes = self.bytes_of(box)
        self._file = self._values = None
        if folder is None:
            self._values = torch.empty(self._shape(box), dtype=self.dtype)
            if zero:
                self._values.zero_()
        else:
            self._file = _reserved(self.bytes, folder)

    def read(self, box: Box) -> Tensor:
        """Return a copy of the part ``box``, (B, C, *box.size), on the map's device."""
        return self._outward(self.take(box))

    def view(self, box: Box) -> Tensor:
        """Return the part ``box``, (B, C, *box.size), which the caller must not change.

        It is a view if the map lies in memory and its device is the CPU, otherwise a copy.
        """
        if self._values is None or self.device.type != "cpu":
            return self.read(box)
        return self._outward(self._part(box))

    def write(self, box: Box, x: Tensor) -> None:
        """Store ``x``, (B, C, *box.size), as the part ``box``."""
        self.put(box, self._inward(x))

    def add(self, box: Box, x: Tensor) -> None:
        """Add ``x``, (B, C, *box.size), to the part ``box``."""
        if self._values is not None:
            self._part(box).add_(self._inward(x))
        else:
            wide = self._widened(box)
            values = self._fetched(wide)
            self._as_it_lies(values, box.relative_to(wide)).add_(self._inward(x))
            self._run(os.pwritev, values, wide, "written to")

    def buffer_for(self, box: Box) -> Tensor:
        """Return an empty host tensor for the part ``box``, with dims in the map's storage order.

        The shape is (B, *box.size, C) if the map is channels-last, otherwise (B, C, *box.size). The
        tensor is pinned if the map's device is a GPU.
        """
        return torch.empty(
            self._shape(box), dtype=self.dtype, pin_memory=self.device.type == "cuda"
        )

    def within(self, buffer: Tensor, box: Box) -> Tensor:
        """Return the beginning of a buffer as a view that has the shape for the part ``box``.

        It is used for messages, which may have fewer rows than the buffer that receives them.

        Args:
            buffer: a tensor from :meth:`buffer_for`.
            box: a part with at most as many cells as the buffer.
        """
        shape = self._shape(box)
        return buffer.flatten()[: math.prod(shape)].view(shape)

    def take(self, box: Box) -> Tensor:
        """Return a copy of the part ``box`` on the host, with the shape of :meth:`buffer_for`."""
        found = self.buffer_for(box)
        if self._values is not None:
            return found.copy_(self._part(box))
        wide = self._widened(box)
        if wide == box and self._as_in_memory:
            self._run(os.preadv, found, box, "read from")
            return found
        return found.copy_(self._as_it_lies(self._fetched(wide), box.relative_to(wide)))

    def put(self, box: Box, values: Tensor) -> None:
        """Store ``values``, which have the shape of :meth:`buffer_for`, as the part ``box``."""
        if self._values is not None:
            self._part(box).copy_(values)
            return
        lying = values if self._as_in_memory else values.movedim(1, -1)
        self._run(os.pwritev, lying.contiguous(), box, "written to")

    def bytes_of(self, box: Box) -> int:
        """Return the size in bytes of the part ``box`` of the map."""
        return self.images * box.pixels * self.cell

    @property
    def in_memory(self) -> int:
        """Bytes of this process's memory that the map occupies; 0 if it is in a file."""
        return 0 if self._values is None else self.bytes

    def close(self) -> None:
        """Release the map's memory or disk space."""
        self._values = None
        if self._file is not None:
            self._file.close()

    @property
    def _as_in_memory(self) -> bool:
        """True if file and memory have the same order of dims, so that nothing is transposed."""
        return self.last or self.rows

    def _shape(self, box: Box) -> tuple[int, ...]:
        return (*self.outer, *box.size, self.channels) if self.last else (*self.outer, *box.size)

    def _part(self, box: Box) -> Tensor:
        return self._values[
            (..., *box.relative_to(self.box).slices, *((slice(None),) if self.last else ()))
        ]

    def _inward(self, x: Tensor) -> Tensor:
        return (x.movedim(1, -1) if self.last else x).to("cpu").contiguous()

    def _outward(self, x: Tensor) -> Tensor:
        return (x.movedim(-1, 1) if self.last else x).to(self.device, non_blocking=True)

    def _widened(self, box: Box) -> Box:
        """Return the box to read from the file in order to get the part ``box``.

        If ``box`` has nearly all cells of its rows, the result has these rows as a whole, because
        whole rows are contiguous in the file. Otherwise the result is ``box``.
        """
        held = self.box
        if (
            box.size[1:] == held.size[1:]
            or not box.pixels
            or any(_NEARLY * a < b for a, b in zip(box.size[1:], held.size[1:]))
        ):
            return box
        return Box((box.start[0], *held.start[1:]), (box.stop[0], *held.stop[1:]))

    def _fetched(self, box: Box) -> Tensor:
        """Read the part ``box`` and return it with the dims in the file's order.

        The shape is (B, C, *box.size) if the file is channels-first, otherwise (B, *box.size, C).
        """
        values = torch.empty(
            (self.images, self.channels, *box.size)
            if self.rows
            else (self.images, *box.size, self.channels),
            dtype=self.dtype,
        )
        self._run(os.preadv, values, box, "read from")
        return values

    def _as_it_lies(self, values: Tensor, inside: Box) -> Tensor:
        """Return a part of ``values`` as a view, with the dims in the order of :meth:`buffer_for`.

        Args:
            values: a box of the map with the dims in the file's order (:meth:`_fetched`).
            inside: the part, in coordinates relative to that box.
        """
        if self.last:
            return values[(slice(None), *inside.slices)]
        return (values if self.rows else values.movedim(-1, 1))[(..., *inside.slices)]

    def _run(self, how, values: Tensor, box: Box, what: str) -> None:
        """Read the part ``box`` of the file into ``values``, or write ``values`` to the file.

        Args:
            how: os.preadv to read, os.pwritev to write.
            values: a tensor with the dims in the file's order (:meth:`_fetched`).
            box: the part.
            what: ``read from`` or ``written to``, for an error message.
        """
        arrays, cell = (
            (self.images * self.channels, self.cell // self.channels)
            if self.rows
            else (self.images, self.cell)
        )
        flat, offset = memoryview(as_bytes(values).numpy()), 0
        for place, length in _runs(arrays, box.relative_to(self.box), self.box.size, cell):
            _all(how, self._file.fileno(), flat[offset : offset + length], place, what)
            offset += length


# Whole rows are read if they have at most this factor times the cells of the part.
_NEARLY = 1.125


class VectorMap:
    """Stored vector of the image, such as its channel means, used in place of a :class:`Map`.

    The methods are those of :class:`Map`. Every tile reads the same vector, so the methods ignore
    ``box``.

    Args:
        box: the box that a :class:`Map` would store.
        like: a tensor that sets shape, dtype and device.
        gradient: True for a gradient. Written values are then added up. A read returns the sum and
            resets it to 0, so that the sum is used once although every tile reads it.
    """

    in_memory = bytes = 0  # A vector is too small to count.

    def __init__(self, box: Box, like: Tensor, gradient: bool = False):
        self.box, self.dtype, self.device, self.last, self._gradient = (
            box,
            like.dtype,
            like.device,
            False,
            gradient,
        )
        self.images, self.channels = like.shape[:2]
        self._values = torch.zeros(like.shape, dtype=like.dtype)

    def read(self, box: Box) -> Tensor:
        return self.take(box).to(self.device)

    view = read

    def write(self, box: Box, x: Tensor) -> None:
        self.put(box, x.to("cpu"))

    def add(self, box: Box, x: Tensor) -> None:
        self._values += x.to("cpu")

    def buffer_for(self, box: Box) -> Tensor:
        return torch.empty_like(self._values)

    def take(self, box: Box) -> Tensor:
        found = self._values.clone()
        if self._gradient:
            self._values.zero_()
        return found

    def put(self, box: Box, values: Tensor) -> None:
        self._values = self._values + values if self._gradient else values.clone()

    def close(self) -> None:
        pass


def _runs(arrays: int, box: Box, size: tuple[int, ...], cell: int):
    """Yield (offset, length), in bytes, of each contiguous part of the file that belongs to a box.

    Args:
        arrays: the number of arrays in the file, one after another, such as one for each image. The
            box is taken from every array.
        box: the box, in coordinates of an array.
        size: the size of each array in cells.
        cell: the number of bytes of a cell.
    """
    split, part = len(size), box.size  # The box has all cells of the dims from ``split`` on.
    while split > 1 and part[split - 1] == size[split - 1]:
        split -= 1
    strides = [cell * math.prod(size[d + 1 :]) for d in range(len(size))]
    first, length = (
        sum(a * s for a, s in zip(box.start, strides)),
        part[split - 1] * strides[split - 1],
    )
    if not length:
        return
    for array in range(arrays):
        for index in product(*(range(n) for n in part[: split - 1])):
            yield (
                array * cell * math.prod(size) + first + sum(i * s for i, s in zip(index, strides)),
                length,
            )


def _all(how, file: int, buffer: memoryview, place: int, what: str) -> None:
    """Read or write all of ``buffer`` at offset ``place`` of the file.

    Args:
        how: os.preadv or os.pwritev. It may move fewer bytes than asked, so it is called
            repeatedly.
        file: the file descriptor.
        buffer: the memory to read into or to write.
        place: the offset in bytes.
        what: ``read from`` or ``written to``, for an error message.
    """
    done = 0
    while done < len(buffer):
        moved = how(file, [buffer[done:]], place + done)
        if not moved:
            raise OSError(
                errno.EIO,
                f"the scratch file ended while a feature map was {what} it: let no other program "
                "change files in the scratch folder, and start again",
            )
        done += moved


def _reserved(size: int, folder: str | Path):
    """Return an open file without a name that has ``size`` bytes of disk space in ``folder``."""
    try:
        file = tempfile.TemporaryFile(prefix="distseg-", dir=folder, buffering=0)
    except OSError as e:
        raise OSError(
            f"no scratch file can be made in {folder} ({e.strerror or e}): set streaming.scratch "
            "to a folder in which you may write"
        ) from None
    try:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as e:
        file.close()
        raise OSError(
            f"a feature map of {size / 1e9:.2f} GB does not fit the scratch folder {folder} "
            f"({e.strerror}; {free_bytes(folder) / 1e9:.2f} GB are free): name a folder with more "
            f"space as streaming.scratch"
        ) from None
    return file


def require_scratch_space(folder: str | Path, needed: int) -> None:
    """Refuse a folder with fewer than ``needed`` free bytes.

    Raises:
        OSError: if the folder is too small. The message names the folder, both sizes and how to fix
            it.
    """
    free = free_bytes(folder)
    if needed > free:
        raise OSError(
            f"feature maps of {needed / 1e9:.2f} GB must be stored in the scratch folder {folder}, "
            f"where {free / 1e9:.2f} GB are free: name a folder with more space as "
            "streaming.scratch (for prediction predict.scratch), or take smaller images or crops"
        )


def free_bytes(folder: str | Path) -> int:
    """Return the number of bytes that this user may still write to the disk of a folder."""
    try:
        disk = os.statvfs(folder)
    except OSError as e:
        raise OSError(
            f"the scratch folder {folder} cannot be used ({e.strerror}): set streaming.scratch to "
            "another folder"
        ) from None
    return disk.f_bavail * disk.f_frsize
