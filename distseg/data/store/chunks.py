"""Write the chunks of a dataset, each with a checksum, and read them without HDF5.

HDF5 tells where each chunk lies in the file. The chunks are then read by system calls, which let
other threads run. This is also faster than reading by HDF5, although each checksum is verified
(benchmarks/performance.md).
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import h5py
import numpy as np

from distseg.data.store.hdf5 import Data
from distseg.data.store.layout import chunk_sum, digest
from distseg.tiling.tile import Box

_DEFLATE_RATIO = 1032  # largest compression ratio of deflate
_PACKED_MORE = 1 << 16  # bytes that compression may add to incompressible data
_SKIPPED = 1  # bit of a chunk's filter mask: HDF5 left the chunk uncompressed
AGAIN = "copy the store again, or prepare it anew"
_buffers = threading.local()


class Damage(ValueError):
    """Error for a part of a store that differs from what was written.

    The message names the image and the position.
    """


@dataclass(frozen=True)
class Sums:
    """Position of the checksums of a dataset's chunks in a store, and their digest.

    Attributes:
        at: the byte of the file at which the first checksum begins.
        digest: the digest of all these checksums.
    """

    at: int
    digest: str


class ChunkSums:
    """Collector of the checksums of an array's chunks; the array is written box by box.

    A chunk is complete when :meth:`write` has received all its pixels. The attribute ``sums``,
    an array uint64 with one entry per chunk, holds the checksums of the complete chunks.

    Args:
        shape: the shape of the array.
        chunk: the size of a chunk.
        dtype: dtype of the array.
    """

    def __init__(self, shape: Sequence[int], chunk: Sequence[int], dtype: np.dtype):
        self._shape, self._chunk, self._dtype = tuple(shape), tuple(chunk), dtype
        self.sums = np.zeros(_grid(shape, chunk), np.uint64)
        # Incomplete chunks, and the number of their missing pixels.
        self._pending: dict[tuple[int, ...], tuple[np.ndarray, int]] = {}

    def write(self, box: Box, array: np.ndarray) -> None:
        """Add the pixels of a box, ``array`` (*box.size).

        All calls together must give every pixel exactly once.

        The box has one range for each dim of the array, the bands included.
        """
        for index, outside, inside in _touched(box, self._chunk):
            part = array[outside]
            chunk, missing = self._pending.pop(index, None) or self._begun(index)
            chunk[inside] = part
            if missing > part.size:
                self._pending[index] = chunk, missing - part.size
            else:
                self._finish(index, chunk)

    def _begun(self, index: tuple[int, ...]) -> tuple[np.ndarray, int]:
        pixels = _extent(index, self._chunk, self._shape).pixels
        return np.zeros(self._chunk, self._dtype), pixels

    def _finish(self, index: tuple[int, ...], chunk: np.ndarray) -> None:
        self.sums[index] = chunk_sum(chunk)


class ChunkWriter(ChunkSums):
    """Writer of boxes of pixels into a chunked dataset of an open HDF5 file.

    A chunk is written to the file when all its pixels are known. The attribute ``sums`` holds the
    checksums of the chunks' bytes in the file.
    """

    def __init__(self, dataset: h5py.Dataset):
        super().__init__(dataset.shape, dataset.chunks, dataset.dtype)
        self._dataset, self._packed = dataset, dataset.compression == "gzip"

    def _finish(self, index: tuple[int, ...], chunk: np.ndarray) -> None:
        data = zlib.compress(chunk, 1) if self._packed else chunk.tobytes()
        self.sums[index] = chunk_sum(data)
        self._dataset.id.write_direct_chunk(tuple(i * c for i, c in zip(index, self._chunk)), data)


class Chunked:
    """Base class of readers of an array in chunks that have checksums.

    A box has one range for each dim of the array, the bands included. The index of a chunk is a
    tuple: its number along each dim.

    Args:
        shape: the shape of the array.
        chunk: the size of a chunk.
        dtype: dtype of the array.
        path: the store, for messages.
        what: the content in words, for messages, such as ``pixels of image 'a'``.
        leading: number of dims before the spatial ones, for messages: 1 if there are bands, else 0.
    """

    def __init__(
        self,
        shape: Sequence[int],
        chunk: Sequence[int],
        dtype: np.dtype,
        path: str,
        what: str,
        leading: int,
    ):
        self.shape, self.chunk, self.dtype = tuple(shape), tuple(chunk), dtype
        self._path, self._what, self._leading = path, what, leading
        self.grid = _grid(shape, chunk)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return math.prod(self.grid)

    def read(self, box: Box) -> np.ndarray:
        """Return the pixels of a box, (*box.size).

        Raises:
            Damage: a chunk that the box touches is damaged.
            OSError: the disk cannot be read.
        """
        return self.read_boxes([box])[0]

    def read_boxes(self, boxes: Sequence[Box]) -> np.ndarray:
        """Return the pixels of boxes of the same size, (boxes, *box.size).

        Each chunk is loaded once, even if several boxes touch it.

        Raises:
            Damage: a chunk that a box touches is damaged.
            OSError: the disk cannot be read.
        """
        out = np.empty((len(boxes), *boxes[0].size), self.dtype)
        wanted: dict[tuple[int, ...], list[tuple]] = {}
        for number, box in enumerate(boxes):
            for index, outside, inside in _touched(box, self.chunk):
                wanted.setdefault(index, []).append(((number, *outside), inside))
        for index, chunk in self.loaded(wanted):
            for outside, inside in wanted[index]:
                out[outside] = chunk[inside]
        return out

    def loaded(
        self, indices: Iterable[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield the index of each of these chunks and its pixels, as :meth:`load` returns them."""
        for index in indices:
            yield index, self.load(index)

    def load(self, index: tuple[int, ...]) -> np.ndarray:
        """Return the pixels of the chunk with this index, (*self.chunk).

        A chunk at the border has its full size, and so exceeds the array. The next load of any
        reader in this thread may overwrite the result.

        Raises:
            Damage: the chunk is damaged.
            OSError: the disk cannot be read.
        """
        raise NotImplementedError

    def place(self, index: tuple[int, ...]) -> Box:
        """Return the box of the pixels of the chunk with this index, clipped to the array."""
        return _extent(index, self.chunk, self.shape)

    def damage(self, index: tuple[int, ...], how: str) -> Damage:
        """Return an error that names a damaged chunk.

        ``index`` is its number along each dim. ``how`` says what is wrong with its pixels, such as
        ``are cut off``.
        """
        return Damage(f"{self._path} is damaged: {self._words(index)} {how}: {AGAIN}")

    def _words(self, index: tuple[int, ...]) -> str:
        """Return a phrase with the content and the position of a chunk, for messages."""
        box = self.place(index)
        bands = (
            f", bands {box.start[0]} to {box.stop[0] - 1}"
            if self._leading and self.grid[0] > 1
            else ""
        )
        space = Box(box.start[self._leading :], box.stop[self._leading :])
        return f"the {self._what} at {space}{bands}"

    def _read_sums(self, handle: int, sums: Sums) -> np.ndarray:
        """Return the checksums of the chunks, (chunks along each dim) uint64.

        Args:
            handle: file descriptor of the open store.
            sums: the position of the checksums in the store.

        Raises:
            Damage: the checksums are damaged.
        """
        data = os.pread(handle, 8 * self.chunks, sums.at)
        if digest(data) != sums.digest:
            raise Damage(
                f"{self._path} is damaged: the checksums of the {self._what} differ from what was "
                f"written: {AGAIN}"
            )
        return np.frombuffer(data, "<u8").reshape(self.grid)


class ChunkReader(Chunked):
    """Reader of boxes of a chunked HDF5 dataset; it reads chunks by system calls, not by HDF5.

    Args:
        handle: file descriptor of the open file.
        dataset: the dataset to read.
        path: the file, for messages.
        what: the content in words, for messages, such as ``pixels of image 'a'``.
        sums: the checksums of the chunks; None if the store has none.
        leading: number of dims before the spatial ones, for messages: 1 if there are bands, else 0.

    Raises:
        Damage: a chunk is missing, lies outside the file, or has an impossible size.
    """

    def __init__(
        self,
        handle: int,
        dataset: Data,
        path: str,
        what: str,
        sums: Sums | None = None,
        leading: int = 0,
    ):
        if dataset.chunk is None or "fletcher32" in dataset.filters:
            raise Damage(
                f"{path} is damaged: the {what} are not stored as distseg stores them: {AGAIN}"
            )
        super().__init__(dataset.shape, dataset.chunk, dataset.dtype, path, what, leading)
        self._handle, self._packed = handle, dataset.filters == ("gzip",)
        self._bytes = math.prod(self.chunk) * self.dtype.itemsize  # bytes of an uncompressed chunk
        self._check_size(os.fstat(handle).st_size)
        self._at, self._sizes, self._masks = self._places(dataset)
        self._sums = None if sums is None else self._read_sums(handle, sums)

    def load(self, index: tuple[int, ...]) -> np.ndarray:
        """Return the pixels of the chunk with this index, (*self.chunk).

        A chunk at the border has its full size, and so exceeds the dataset. If the chunk is stored
        uncompressed, the next load of any reader in this thread overwrites the result.

        Raises:
            Damage: the chunk is damaged.
            OSError: the disk cannot be read.
        """
        data = self._stored(index)
        if self._sums is not None and chunk_sum(data) != self._sums[index]:
            raise self.damage(index, "differ from what was written (wrong checksum)")
        if self._packed and not self._masks[index] & _SKIPPED:
            data = self._unpacked(index, data)
        return np.frombuffer(data, self.dtype).reshape(self.chunk)

    def _stored(self, index: tuple[int, ...]) -> memoryview:
        """Return the bytes of a chunk as they lie in the file, usually compressed.

        The next call in the same thread overwrites the returned bytes.

        Args:
            index: the chunk's number along each dim.
        """
        size, at, done = int(self._sizes[index]), int(self._at[index]), 0
        buffer = _buffer(size)
        try:
            while done < size and (count := os.preadv(self._handle, [buffer[done:]], at + done)):
                done += count
        except OSError as e:
            raise OSError(
                f"{self._path}: {self._words(index)} cannot be read from the disk ({e.strerror}): "
                "check the disk, or read a copy of the store"
            ) from e
        if done < size:
            raise self.damage(index, "are cut off")
        return buffer

    def _unpacked(self, index: tuple[int, ...], data: memoryview) -> bytes:
        """Return the bytes of a chunk, ``data``, after decompression (deflate).

        ``index`` is the chunk's number along each dim, for messages.
        """
        stream = zlib.decompressobj()
        try:
            found = stream.decompress(data, self._bytes + 1)
        except zlib.error as e:
            raise self.damage(index, f"cannot be unpacked ({e})") from None
        if len(found) != self._bytes or not stream.eof:
            raise self.damage(index, "cannot be unpacked (unpacking gives a wrong number of bytes)")
        return found

    def _check_size(self, file_size: int) -> None:
        """Refuse a dataset whose chunks take more bytes than the whole file has.

        Otherwise a damaged shape could make the reader reserve huge arrays.

        Args:
            file_size: number of bytes of the file.

        Raises:
            Damage: the dataset is refused.
        """
        least = self.chunks * (-(-self._bytes // _DEFLATE_RATIO) if self._packed else self._bytes)
        if least > file_size:
            shape = "x".join(map(str, self.shape))
            raise Damage(
                f"{self._path} is damaged: the {self._what}, {shape} of {self.dtype}, take "
                f"at least {least} bytes, "
                f"but the file has {file_size}: {AGAIN}"
            )

    def _places(self, dataset: Data) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays with one entry per chunk: position, number of bytes, filter mask.

        The position is the byte of the file at which the chunk begins. HDF5's filter mask says
        which filters, such as compression, were skipped when the chunk was written.

        Raises:
            Damage: a chunk is missing, lies outside the file, or has an impossible size.
        """
        at, sizes = np.full(self.grid, -1, np.int64), np.zeros(self.grid, np.int64)
        masks = np.zeros(self.grid, np.uint32)
        for found in _chunk_list(dataset):
            index = tuple(a // c for a, c in zip(found.chunk_offset, self.chunk))
            if all(i < n for i, n in zip(index, self.grid)):
                at[index], sizes[index] = found.byte_offset, found.size
                masks[index] = found.filter_mask
        end = os.fstat(self._handle).st_size
        plain = (masks & _SKIPPED > 0) if self._packed else np.ones(self.grid, bool)
        wrong = (
            (at < 0)
            | (sizes < 1)
            | (sizes > 2 * self._bytes + _PACKED_MORE)
            | (at > end - sizes)
            | plain & (sizes != self._bytes)
        )
        if wrong.any():
            raise self.damage(
                tuple(int(i) for i in np.argwhere(wrong)[0]), "are missing or cut off"
            )
        return at, sizes, masks


def _chunk_list(dataset: Data) -> list:
    found: list = []
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(found.append)
        return found
    return [dataset.id.get_chunk_info(k) for k in range(dataset.id.get_num_chunks())]


def _grid(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // c) for n, c in zip(shape, chunk))


def _extent(index: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the box of the pixels of a chunk, clipped to ``shape``.

    Args:
        index: the chunk's number along each dim.
        chunk: the size of a chunk.
        shape: the shape of the dataset.
    """
    return Box(
        tuple(i * c for i, c in zip(index, chunk)),
        tuple(min((i + 1) * c, n) for i, c, n in zip(index, chunk, shape)),
    )


def _touched(
    box: Box, chunk: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the index of each chunk that a box touches, and the overlap of chunk and box.

    The index is the chunk's number along each dim. The overlap is given twice: as slices of the
    box, and as slices of the chunk. ``chunk`` is the size of a chunk.
    """
    axes = []
    for a, b, c in zip(box.start, box.stop, chunk):
        parts = []
        for i in range(a // c, -(-b // c)):
            first, last = max(a, i * c), min(b, (i + 1) * c)
            parts.append((i, slice(first - a, last - a), slice(first - i * c, last - i * c)))
        axes.append(parts)
    for parts in product(*axes):
        index, outside, inside = zip(*parts)
        yield index, outside, inside


def _buffer(size: int) -> memoryview:
    """Return memory for the ``size`` bytes of a chunk.

    All calls in one thread return the same memory, because allocating it anew would take longer
    than reading the chunk.
    """
    if len(getattr(_buffers, "block", b"")) < size:
        _buffers.block = bytearray(size)
    return memoryview(_buffers.block)[:size]
