"""Read files that hold the voxels of a volume one after another: NIfTI and NRRD.

The file is memory-mapped. Compressed voxels are unpacked into a scratch file first.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from distseg.config.sizes import Size
from distseg.config.units import si
from distseg.data.formats.base import Reader, plain, whole_numbers
from distseg.data.formats.mapped import copied, let_go, mapped_array
from distseg.data.formats.plausible import MOST_PACKED, check_bytes, check_memory
from distseg.tiling.tile import Box

_PIECE = 1 << 22  # bytes that are unpacked at a time


class VoxelReader(Reader):
    """Base class of readers of a volume (NIfTI, NRRD), or of an image if it has one slice.

    A subclass sets ``size`` and ``bands`` from the file's header and then calls
    :meth:`_take_voxels`.

    Args:
        path: the file.
        scratch: folder for the unpacked voxels of a file compressed by gzip.
        labels: True for a label map: voxels are returned as integers, even if they are stored as
            floats.
    """

    def __init__(self, path: Path, scratch: str | None, labels: bool):
        super().__init__(path)
        self._scratch, self._labels, self._array = scratch, labels, None

    def _take_voxels(
        self,
        stored: np.dtype,
        offset: int,
        packed: int | None,
        scale: tuple[float, float] | None = None,
        last: bool = False,
    ) -> None:
        """Tell the reader where the voxels lie in the file, and how they are encoded.

        Args:
            stored: the dtype of the stored numbers.
            offset: the position of the first voxel, in the file or in the unpacked bytes.
            packed: the position of the compressed bytes (gzip) in the file; None if the voxels
                are not compressed.
            scale: (slope, intercept), which are applied to the stored numbers; None
                if the file has none.
            last: True if the file stores the bands of each voxel together; False if it stores one
                volume per band.

        Raises:
            ValueError: ``stored`` is neither an integer nor a float dtype, or the file is too
                small.
        """
        if stored.kind not in "iuf":
            raise ValueError(
                f"its voxels are {stored}, but must be whole or real numbers: convert them"
            )
        self._stored, self._offset, self._packed = stored, offset, packed
        self._scale, self._last = scale, last
        self._labels = self._labels and (scale is not None or stored.kind == "f")
        if self._labels:
            self.dtype = np.dtype(np.int64)
        else:
            self.dtype = plain(stored) if scale is None else _scaled(stored)
        self._check_length()
        self.kept = 0 if packed is None else self._bytes

    @property
    def _bytes(self) -> int:
        return Size(self.size).volume * self.bands * self._stored.itemsize

    def _check_length(self) -> None:
        """Refuse a header that claims more voxels than the file can hold.

        Raises:
            ValueError: the file is too small.
        """
        if self._packed is not None:
            bits = 8 * self.bands * self._stored.itemsize
            check_bytes(self.path, self.size, bits, MOST_PACKED["PNG"])
        elif (there := self.path.stat().st_size - self._offset) < self._bytes:
            raise ValueError(
                f"its header says {Size(self.size)} voxels of {self._stored}, {self._bytes} bytes, "
                f"but the file has {max(0, there)}, so it is damaged or cut off"
            )

    def _read(self, box: Box) -> np.ndarray:
        if self._array is None:
            self._array = self._mapped() if self._packed is None else self._unpacked()
        if self._last:
            array = np.moveaxis(self._array.reshape(*self.size, self.bands), -1, 0)
        else:
            array = self._array.reshape(self.bands, *self.size)
        found = copied(array[(slice(None), *box.slices)])
        if self._scale is not None:
            found = found * self._scale[0] + self._scale[1]
        if self._labels:
            found = whole_numbers(self.path, found)
        return found.astype(self.dtype)

    def _mapped(self) -> np.ndarray:
        count = self._bytes // self._stored.itemsize
        return np.memmap(self.path, self._stored, "r", self._offset, (count,))

    def _unpacked(self) -> np.ndarray:
        """Return all stored voxels of a compressed file, as an array in a scratch file."""
        array = mapped_array((self._bytes,), np.dtype(np.uint8), self._scratch)
        if array is None:
            check_memory(
                self.path,
                f"its {Size(self.size)} voxels, for which the scratch folder has no room, are",
                self._bytes,
            )
            array = np.empty(self._bytes, np.uint8)
        try:
            with open(self.path, "rb") as raw:
                raw.seek(self._packed)
                with gzip.GzipFile(fileobj=raw) as file:
                    file.seek(self._offset)
                    self._fill(array, file)
        except (EOFError, OSError, zlib.error) as e:
            raise ValueError(f"{self.path} is damaged or cut off ({e}): copy it again") from e
        return array.view(self._stored)

    def _fill(self, array: np.ndarray, file: gzip.GzipFile) -> None:
        """Fill ``array`` with unpacked bytes of a compressed file.

        Raises:
            EOFError: the file has too few bytes.
        """
        at = 0
        while at < self._bytes:
            piece = file.read(min(_PIECE, self._bytes - at))
            if not piece:
                raise EOFError(f"it ends after {si(at, 'B')} of {si(self._bytes, 'B')}")
            array[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
            let_go(array)
        while file.read(_PIECE):  # gzip compares its checksum at the end
            pass


def volume_size(spatial: tuple[int, ...], dims: int | None) -> tuple[int, ...]:
    """Return the size of an image, (z, y, x) or (y, x), from the spatial size in its file.

    Args:
        spatial: the spatial size in the file, (z, y, x) or (y, x).
        dims: number of spatial dims; None for 3, or for 2 if the volume has a single slice.

    Raises:
        ValueError: ``dims`` is 2, but there are several slices; or there are no voxels.
    """
    spatial = (1,) * (3 - len(spatial)) + tuple(int(n) for n in spatial)
    if min(spatial) < 1:
        raise ValueError(f"its header says {'x'.join(map(str, spatial))} voxels, which are none")
    if dims == 2 or (dims is None and spatial[0] == 1):
        if spatial[0] != 1:
            raise ValueError(
                f"it has {spatial[0]} slices of {spatial[1]}x{spatial[2]}, but an image of "
                "2 dims is needed: write each slice into its own file, or prepare volumes"
            )
        return spatial[1:]
    return spatial


def write_packed(
    path: Path, header: bytes, inside: bytes, found: np.ndarray, advance: Callable[[int], None]
) -> None:
    """Write a class map of a volume, compressed by gzip, slice by slice.

    Args:
        path: the file to write.
        header: bytes that are written first, uncompressed.
        inside: bytes that are compressed before the voxels.
        found: the class numbers, (z, y, x) uint8.
        advance: called after each slice with its number of voxels.
    """
    # No name and no time in the gzip header, so that equal results are equal files.
    with open(path, "wb") as raw:
        raw.write(header)
        with gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            file.write(inside)
            for part in found:
                file.write(np.ascontiguousarray(part).tobytes())
                advance(part.size)


def _scaled(stored: np.dtype) -> np.dtype:
    """Return the dtype of voxels after scaling: float32 if it holds all numbers of ``stored``.

    Otherwise the result is float64. ``stored`` is the dtype in the file.
    """
    return np.dtype(np.float32 if np.can_cast(stored, np.float32) else np.float64)
