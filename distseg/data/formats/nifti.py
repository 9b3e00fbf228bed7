"""Read NIfTI volumes (NAME.nii, NAME.nii.gz), box by box, and write class maps as NIfTI.

nibabel reads and writes the headers. Voxels are read from the file itself, which is mapped into
memory; a packed file is unpacked into a scratch file first. A NIfTI array has the axes (x, y, z,
time), but a volume of distseg is (bands, z, y, x), so each time becomes a band.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from distseg.config.sizes import Size
from distseg.config.units import si
from distseg.data.formats.base import Reader, plain, whole_numbers
from distseg.data.formats.georeference import Georeference, matrix_in_millimeters, of_matrix
from distseg.data.formats.mapped import copied, let_go, mapped_array
from distseg.data.formats.plausible import MOST_PACKED, check_bytes, check_memory
from distseg.data.packages import optional
from distseg.tiling.tile import Box

SUFFIXES = (".nii", ".nii.gz")
_PIECE = 1 << 22  # bytes that are unpacked at a time
_KEY = "distseg "


class NiftiReader(Reader):
    """Reader of a volume, or of an image if it has a single slice.

    Args:
        path: the file.
        dims: number of spatial dims; by default 3, or 2 for a single slice.
        scratch: folder for the unpacked voxels of a packed file.
        labels: True for a label map: voxels are returned as integers, even if they are stored as
            floats.

    Attributes:
        place: the affine of the file as a georeference. It maps (x, y, z) of a voxel's middle to
            millimetres.
    """

    def __init__(
        self, path: Path, dims: int | None = None, scratch: str | None = None, labels: bool = False
    ):
        super().__init__(path)
        image = optional(path, "nibabel").load(path)
        stores = image.dataobj  # the header's own offset and scale are cleared after loading
        shape, stored = stores.shape, stores.dtype
        if stored.kind not in "iuf":
            raise ValueError(
                f"its voxels are {stored}, but must be whole or real numbers: convert them"
            )
        *spatial, bands = *shape[:3], *(1,) * (3 - len(shape[:3])), math.prod(shape[3:])
        if dims == 2 or (dims is None and spatial[2] == 1):
            if spatial[2] != 1:
                raise ValueError(
                    f"it has {spatial[2]} slices of {spatial[1]}x{spatial[0]}, but an image of "
                    "2 dims is needed: write each slice into its own file, or prepare volumes"
                )
            spatial = spatial[:2]
        self.size, self.bands = tuple(spatial[::-1]), int(bands)
        self._scratch, self._array = scratch, None
        self._stored, self._offset = stored, int(stores.offset)
        scale = float(stores.slope), float(stores.inter)
        self._scale = None if scale == (1.0, 0.0) else scale
        self._labels = labels and (self._scale is not None or stored.kind == "f")
        if self._labels:
            self.dtype = np.dtype(np.int64)
        else:
            self.dtype = plain(stored) if self._scale is None else np.dtype(np.float32)
        self._check_length()
        self.kept = self._bytes if self._packed else 0
        self.place = of_matrix(image.affine)

    @property
    def _packed(self) -> bool:
        return self.path.name.lower().endswith(".gz")

    @property
    def _bytes(self) -> int:
        return Size(self.size).volume * self.bands * self._stored.itemsize

    def _check_length(self) -> None:
        """Refuse a header that claims more voxels than the file can hold.

        Raises:
            ValueError: the file is too small.
        """
        if self._packed:
            bits = 8 * self.bands * self._stored.itemsize
            check_bytes(self.path, self.size, bits, MOST_PACKED["PNG"])
        elif (there := self.path.stat().st_size - self._offset) < self._bytes:
            raise ValueError(
                f"its header says {Size(self.size)} voxels of {self._stored}, {self._bytes} bytes, "
                f"but the file has {max(0, there)}, so it is damaged or cut off"
            )

    def _read(self, box: Box) -> np.ndarray:
        if self._array is None:
            self._array = self._unpacked() if self._packed else self._mapped()
        array = self._array.reshape(self.bands, *self.size)
        found = copied(self._array, array[(slice(None), *box.slices)])
        if self._scale is not None:
            found = found * self._scale[0] + self._scale[1]
        if self._labels:
            found = whole_numbers(self.path, found)
        return found.astype(self.dtype)

    def _mapped(self) -> np.ndarray:
        count = self._bytes // self._stored.itemsize
        return np.memmap(self.path, self._stored, "r", self._offset, (count,))

    def _unpacked(self) -> np.ndarray:
        """Return all stored voxels of a packed file, unpacked into a scratch file."""
        array = mapped_array((self._bytes,), np.dtype(np.uint8), self._scratch)
        if array is None:
            check_memory(
                self.path,
                f"its {Size(self.size)} voxels, for which the scratch folder has no room, are",
                self._bytes,
            )
            array = np.empty(self._bytes, np.uint8)
        try:
            with gzip.open(self.path) as file:
                file.seek(self._offset)
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
        except (EOFError, OSError, zlib.error) as e:
            raise ValueError(f"{self.path} is damaged or cut off ({e}): copy it again") from e
        return array.view(self._stored)


def write_nifti(
    path: Path,
    found: np.ndarray,
    place: Georeference | None,
    identity: str,
    advance: Callable[[int], None],
) -> None:
    """Write a class map of a volume as packed NIfTI, slice by slice.

    Args:
        path: the file to write.
        found: classes (z, y, x) uint8.
        place: the affine of the volume; None for voxels of 1 mm at the origin.
        identity: a text to store in the header, which :func:`identity_in_nifti` reads.
        advance: called after each slice with its number of voxels.
    """
    header = optional(path, "nibabel").Nifti1Header()
    header.set_data_dtype(np.uint8)
    header.set_data_shape(found.shape[::-1])
    affine = np.eye(4) if place is None else matrix_in_millimeters(place)
    header.set_sform(affine, "scanner")
    header.set_qform(affine, "scanner", strip_shears=True)
    header.set_xyzt_units("mm" if place is None or place.unit else "unknown")
    header.set_data_offset(352)
    header["descrip"] = (_KEY + identity).encode()
    # No name and no time in the packed file, so that equal results are equal files.
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        file.write(header.binaryblock + bytes(352 - len(header.binaryblock)))
        for part in found:
            file.write(np.ascontiguousarray(part).tobytes())
            advance(part.size)


def identity_in_nifti(path: Path) -> str | None:
    """Return the identity that :func:`write_nifti` stored in a file; None for other files."""
    text = (
        bytes(optional(path, "nibabel").load(path).header["descrip"])
        .rstrip(b"\0")
        .decode("latin-1")
    )
    return text.removeprefix(_KEY) if text.startswith(_KEY) else None
