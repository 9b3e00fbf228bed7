"""Read NIfTI volumes (NAME.nii, NAME.nii.gz), box by box, and write class maps as NIfTI.

nibabel reads and writes the headers, :mod:`distseg.data.formats.voxels` reads the voxels. A NIfTI
array has the axes (x, y, z, time), but a volume of distseg is (bands, z, y, x), so each time
becomes a band.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from distseg.data.formats.georeference import Georeference, matrix_in_millimeters, of_matrix
from distseg.data.formats.voxels import VoxelReader, volume_size, write_packed
from distseg.data.packages import optional

SUFFIXES = (".nii", ".nii.gz")
_KEY = "distseg "


class NiftiReader(VoxelReader):
    """Reader of a NIfTI volume, or of an image if it has a single slice.

    Args:
        path: the file.
        dims: number of spatial dims; None for 3, or for 2 if the volume has a single slice.
        scratch: folder for the unpacked voxels of a file compressed by gzip.
        labels: True for a label map: voxels are returned as integers, even if they are stored as
            floats.

    Attributes:
        place: the affine of the file as a georeference. It maps the indices (x, y, z) of a voxel to
            the position of its centre in millimetres.
    """

    def __init__(
        self, path: Path, dims: int | None = None, scratch: str | None = None, labels: bool = False
    ):
        super().__init__(path, scratch, labels)
        image = optional(path, "nibabel").load(path)
        stores = image.dataobj  # the header's own offset and scale are cleared after loading
        self.size = volume_size(stores.shape[:3][::-1], dims)
        self.bands = int(math.prod(stores.shape[3:]))
        scale = float(stores.slope), float(stores.inter)
        self._take_voxels(
            stores.dtype,
            int(stores.offset),
            0 if path.name.lower().endswith(".gz") else None,
            None if scale == (1.0, 0.0) else scale,
        )
        self.place = of_matrix(image.affine)


def write_nifti(
    path: Path,
    found: np.ndarray,
    place: Georeference | None,
    identity: str,
    advance: Callable[[int], None],
) -> None:
    """Write a class map of a volume as NIfTI compressed by gzip, slice by slice.

    Args:
        path: the file to write.
        found: the class numbers, (z, y, x) uint8.
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
    block = header.binaryblock
    write_packed(path, b"", block + bytes(352 - len(block)), found, advance)


def identity_in_nifti(path: Path) -> str | None:
    """Return the identity that :func:`write_nifti` stored in a file; None for other files."""
    text = (
        bytes(optional(path, "nibabel").load(path).header["descrip"])
        .rstrip(b"\0")
        .decode("latin-1")
    )
    return text.removeprefix(_KEY) if text.startswith(_KEY) else None
