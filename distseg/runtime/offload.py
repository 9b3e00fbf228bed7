"""Feature maps larger than memory, in files that no name leads to: they are gone when the process is, however it ends.

Windows are read and written row by row, not mapped: a full disk then is an error with a name instead of a signal, and what the
operating system caches is not this process's memory. A file has the channels of a cell side by side, so that a row of a window is
one run of bytes; to turn a window around in memory takes less time than to call for its rows channel by channel. Where windows are
whole rows, it has one channel behind another instead, if that is how they lie in memory: a window is a run a channel then, and goes
between file and tensor as it is. Or maps lie in the host's memory.
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
    """(B, C, *box.size) of a feature map.

    Args:
        like: a part of it, for batch, channels, type, device and layout in memory.
        folder: of the file; None: in memory.
        rows: nearly all parts that are read or written are whole rows.
        zero: it is 0 before it is written, so that parts can be added to it, and all of its memory is the process's at once.

    Raises:
        OSError: the file does not fit its disk, before anything is written.
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
        self.outer = (
            (len(like),) if self.last else tuple(like.shape[:2])
        )  # dims before those of the box
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
        """(B, C, *box.size)."""
        return self._outward(self.take(box))

    def view(self, box: Box) -> Tensor:
        """The same, for those who do not change it: where it lies, if it lies in memory."""
        if self._values is None or self.device.type != "cpu":
            return self.read(box)
        return self._outward(self._part(box))

    def write(self, box: Box, x: Tensor) -> None:
        self.put(box, self._inward(x))

    def add(self, box: Box, x: Tensor) -> None:
        """Add to what is there."""
        if self._values is not None:
            self._part(box).add_(self._inward(x))
        else:
            wide = self._widened(box)
            values = self._fetched(wide)
            self._as_it_lies(values, box.relative_to(wide)).add_(self._inward(x))
            self._run(os.pwritev, values, wide, "written to")

    def room(self, box: Box) -> Tensor:
        """A tensor for a part of the map as it lies there, in the host's memory; pinned, where a GPU reads it next."""
        return torch.empty(
            self._shape(box), dtype=self.dtype, pin_memory=self.device.type == "cuda"
        )

    def within(self, room: Tensor, box: Box) -> Tensor:
        """What begins :meth:`room` of a larger part, as room for a smaller one."""
        shape = self._shape(box)
        return room.flatten()[: math.prod(shape)].view(shape)

    def take(self, box: Box) -> Tensor:
        """:meth:`read`, as it lies."""
        found = self.room(box)
        if self._values is not None:
            return found.copy_(self._part(box))
        wide = self._widened(box)
        if wide == box and self._as_in_memory:
            self._run(os.preadv, found, box, "read from")
            return found
        return found.copy_(self._as_it_lies(self._fetched(wide), box.relative_to(wide)))

    def put(self, box: Box, values: Tensor) -> None:
        """:meth:`write`, as it lies."""
        if self._values is not None:
            self._part(box).copy_(values)
            return
        lying = values if self._as_in_memory else values.movedim(1, -1)
        self._run(os.pwritev, lying.contiguous(), box, "written to")

    def bytes_of(self, box: Box) -> int:
        """Of a part of the map."""
        return self.images * box.pixels * self.cell

    @property
    def in_memory(self) -> int:
        """Bytes that it takes of the process's memory."""
        return 0 if self._values is None else self.bytes

    def close(self) -> None:
        """Let go of its memory or its disk space."""
        self._values = None
        if self._file is not None:
            self._file.close()

    @property
    def _as_in_memory(self) -> bool:
        """Whether the file has the dims in the order of a tensor in memory."""
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
        """With the rest of its rows, where it has nearly all of them: one run instead of a run a row."""
        held = self.box
        if (
            box.size[1:] == held.size[1:]
            or not box.pixels
            or any(_NEARLY * a < b for a, b in zip(box.size[1:], held.size[1:]))
        ):
            return box
        return Box((box.start[0], *held.start[1:]), (box.stop[0], *held.stop[1:]))

    def _fetched(self, box: Box) -> Tensor:
        """A part of the map as it lies in the file: (B, C, *box.size), or (B, *box.size, C)."""
        values = torch.empty(
            (self.images, self.channels, *box.size)
            if self.rows
            else (self.images, *box.size, self.channels),
            dtype=self.dtype,
        )
        self._run(os.preadv, values, box, "read from")
        return values

    def _as_it_lies(self, values: Tensor, inside: Box) -> Tensor:
        """A part of what was fetched, with the dims of :meth:`room`."""
        if self.last:
            return values[(slice(None), *inside.slices)]
        return (values if self.rows else values.movedim(-1, 1))[(..., *inside.slices)]

    def _run(self, how, values: Tensor, box: Box, what: str) -> None:
        """Between ``values``, as they lie in the file, and the part ``box`` of the map there, by runs of bytes."""
        arrays, cell = (
            (self.images * self.channels, self.cell // self.channels)
            if self.rows
            else (self.images, self.cell)
        )
        flat, offset = memoryview(as_bytes(values).numpy()), 0
        for place, length in _runs(arrays, box.relative_to(self.box), self.box.size, cell):
            _all(how, self._file.fileno(), flat[offset : offset + length], place, what)
            offset += length


_NEARLY = (
    1.125  # as many cells a row of a map may have as a part of it, of which whole rows are read
)


class VectorMap:
    """In the place of a :class:`Map`, what is kept of a vector of the image, which is the same wherever it is read.

    Args:
        gradient: gradients are added, and read once: each place where the vector was used has its part of the sum.
    """

    in_memory = bytes = 0  # next to nothing

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

    def room(self, box: Box) -> Tensor:
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
    """(place, length) in bytes of the runs that make up a box of each of ``arrays`` arrays of ``size`` cells, one after another."""
    split, part = len(size), box.size  # dims from ``split`` on are whole
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
    done = 0
    while done < len(buffer):
        moved = how(file, [buffer[done:]], place + done)
        if not moved:
            raise OSError(
                errno.EIO,
                f"the scratch file ended while a feature map was {what} it: did something else cut it?",
            )
        done += moved


def _reserved(size: int, folder: str | Path):
    """A file without a name, with its room on the disk reserved."""
    try:
        file = tempfile.TemporaryFile(prefix="distseg-", dir=folder, buffering=0)
    except OSError as e:
        raise OSError(
            f"no scratch file can be made in {folder} ({e.strerror or e}): name a folder to write to as spatial.scratch"
        ) from None
    try:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as e:
        file.close()
        raise OSError(
            f"a feature map of {size / 1e9:.2f} GB does not fit the scratch folder {folder} ({e.strerror}; {free_bytes(folder) / 1e9:.2f} GB are free): "
            "name a folder with more room as spatial.scratch"
        ) from None
    return file


def check_room(folder: str | Path, needed: int) -> None:
    """Refuse a folder without ``needed`` bytes of room.

    Raises:
        OSError: naming the folder, both numbers and what to do.
    """
    free = free_bytes(folder)
    if needed > free:
        raise OSError(
            f"feature maps of {needed / 1e9:.2f} GB must wait in the scratch folder {folder}, where {free / 1e9:.2f} GB are free: name a folder with more "
            "room as spatial.scratch (for prediction predict.scratch), or take smaller images or crops"
        )


def free_bytes(folder: str | Path) -> int:
    try:
        disk = os.statvfs(folder)
    except OSError as e:
        raise OSError(
            f"the scratch folder {folder} can not be used ({e.strerror}): name another as spatial.scratch"
        ) from None
    return disk.f_bavail * disk.f_frsize
