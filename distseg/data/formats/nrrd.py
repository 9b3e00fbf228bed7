"""Read NRRD volumes (NAME.nrrd), box by box, and write class maps as NRRD.

pynrrd reads the headers, :mod:`distseg.data.formats.voxels` reads the voxels. An NRRD file lists
the axes (x, y, z) from the fastest to the slowest. Its space is mostly LPS (left, posterior,
superior), but a georeference of distseg is RAS (right, anterior, superior) as in NIfTI, so the
signs of x and y change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distseg.data.formats.georeference import (
    MILLIMETER,
    Georeference,
    matrix_in_millimeters,
    of_matrix,
)
from distseg.data.formats.voxels import VoxelReader, volume_size, write_packed
from distseg.data.packages import optional

SUFFIXES = (".nrrd", ".nhdr")
_MOST_HEADER = 1 << 20  # bytes of a header that are read
_LPS = (-1.0, -1.0, 1.0)
# Signs of the axes in RAS, by the name of the space. Other spaces are read as LPS, as ITK does.
_SIGNS = {
    "left-posterior-superior": _LPS,
    "lps": _LPS,
    "right-anterior-superior": (1.0, 1.0, 1.0),
    "ras": (1.0, 1.0, 1.0),
    "left-anterior-superior": (-1.0, 1.0, 1.0),
    "las": (-1.0, 1.0, 1.0),
}
_UNITS = {"mm": MILLIMETER, "cm": 1e-2, "m": 1.0, "um": 1e-6, "µm": 1e-6, "nm": 1e-9}
_TYPES = {
    name: code
    for code, names in {
        "i1": ("signed char", "int8", "int8_t"),
        "u1": ("uchar", "unsigned char", "uint8", "uint8_t"),
        "i2": ("short", "short int", "signed short", "signed short int", "int16", "int16_t"),
        "u2": ("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"),
        "i4": ("int", "signed int", "int32", "int32_t"),
        "u4": ("uint", "unsigned int", "uint32", "uint32_t"),
        "i8": (
            *("longlong", "long long", "long long int", "signed long long"),
            *("signed long long int", "int64", "int64_t"),
        ),
        "u8": (
            *("ulonglong", "unsigned long long", "unsigned long long int"),
            *("uint64", "uint64_t"),
        ),
        "f4": ("float",),
        "f8": ("double",),
    }.items()
    for name in names
}
_SPATIAL = ("domain", "space", "???", "none")  # kinds of axes along which voxels lie
_PACKED = ("gzip", "gz")
_KEY = "distseg_identity"


class NrrdReader(VoxelReader):
    """Reader of an NRRD volume, or of an image if it has a single slice or two axes.

    Args:
        path, dims, scratch, labels: see :class:`distseg.data.formats.nifti.NiftiReader`.

    Attributes:
        place: the affine of the file as a georeference, in RAS.

    Raises:
        ValueError: pynrrd is not installed, or the file is not of a kind that distseg reads.
    """

    def __init__(
        self, path: Path, dims: int | None = None, scratch: str | None = None, labels: bool = False
    ):
        super().__init__(path, scratch, labels)
        header, end = _header(path)
        _check(path, header)
        sizes = [int(n) for n in header["sizes"]]
        axes = _spatial_axes(header)
        others = [axis for axis in range(len(sizes)) if axis not in axes]
        if len(axes) not in (2, 3) or len(others) > 1 or set(others) - {0, len(sizes) - 1}:
            raise ValueError(
                f"{path} has {len(axes)} spatial axes and {len(others)} others (sizes "
                f"{'x'.join(map(str, sizes))}), but an image has 2 or 3 spatial axes and at most "
                "one for the bands, the first or the last: write the image with such axes"
            )
        self.size = volume_size(tuple(sizes[axis] for axis in reversed(axes)), dims)
        self.bands = sizes[others[0]] if others else 1
        packed = header["encoding"].lower() in _PACKED
        self._take_voxels(
            _dtype(header),
            0 if packed else end,
            end if packed else None,
            last=others == [0] and self.bands > 1,
        )
        self.place, self.notes = _place(header, axes)


def _header(path: Path) -> tuple[Mapping[str, Any], int]:
    """Return the fields of an NRRD file's header, and the position of the first byte after it.

    Raises:
        ValueError: the header is not complete.
    """
    with open(path, "rb") as file:
        start = file.read(_MOST_HEADER)
    text, blank, _ = min(
        (start.partition(blank) for blank in (b"\n\n", b"\r\n\r\n")), key=lambda part: len(part[0])
    )
    if not start.startswith(b"NRRD") or (not blank and len(start) == _MOST_HEADER):
        raise ValueError("it has no header of NRRD")
    lines = text.decode("utf-8", "replace").splitlines()
    return optional(path, "nrrd").read_header(lines), len(text) + len(blank)


def _check(path: Path, header: Mapping[str, Any]) -> None:
    """Refuse kinds of NRRD files that distseg does not read.

    Raises:
        ValueError: the voxels are in another file, are neither raw nor compressed by gzip, or
            do not follow the header.
    """
    if lacking := [key for key in ("type", "dimension", "sizes", "encoding") if key not in header]:
        raise ValueError(
            f"{path} has a header without {', '.join(lacking)}: export the image again"
        )
    for key in ("data file", "datafile"):
        if key in header:
            raise ValueError(
                f"{path} is a detached header, whose voxels are in {str(header[key]):.100}, but "
                "distseg reads files that hold both: write it as one .nrrd file"
            )
    if header["encoding"].lower() not in ("raw", *_PACKED):
        raise ValueError(
            f"{path} has the encoding {header['encoding']:.50}, but distseg reads raw and gzip: "
            "write it in one of these"
        )
    for key in ("line skip", "lineskip", "byte skip", "byteskip"):
        if header.get(key):
            raise ValueError(
                f"{path} has the field {key} {header[key]}, but distseg reads voxels that begin "
                "behind the header: export the image again"
            )
    if header["dimension"] != len(header["sizes"]):
        raise ValueError(
            f"the header of {path} says {header['dimension']} dims, but gives "
            f"{len(header['sizes'])} sizes: export the image again"
        )


def _dtype(header: Mapping[str, Any]) -> np.dtype:
    """Return the dtype in which an NRRD file stores its voxels.

    Raises:
        ValueError: the type is unknown, or its byte order is not given.
    """
    name = _TYPES.get(header["type"])
    if name is None:
        raise ValueError(f"its voxels are {header['type']:.50}, but must be numbers: convert them")
    found, order = np.dtype(name), header.get("endian")
    if found.itemsize > 1 and order not in ("little", "big"):
        raise ValueError(
            f"its header gives no byte order (endian: {order}): export the image again"
        )
    return found.newbyteorder(">" if order == "big" else "<")


def _spatial_axes(header: Mapping[str, Any]) -> list[int]:
    """Return the indices of the spatial axes of an NRRD file, the fastest axis first."""
    count = int(header["dimension"])
    kinds, directions = header.get("kinds", [None] * count), header.get("space directions")
    found = []
    for axis in range(count):
        known = kinds[axis] is None or kinds[axis].lower() in _SPATIAL
        without = directions is not None and (
            directions[axis] is None or np.isnan(directions[axis]).any()
        )
        if known and not without:
            found.append(axis)
    return found


def _place(
    header: Mapping[str, Any], axes: list[int]
) -> tuple[Georeference | None, tuple[str, ...]]:
    """Return the affine matrix of a volume as a georeference, and notes on the header.

    The georeference is None if the header has no affine. ``axes`` are the indices of the spatial
    axes.

    Raises:
        ValueError: the fields contradict each other.
    """
    directions, spacings = header.get("space directions"), header.get("spacings")
    matrix, notes = np.eye(4), ()
    if directions is not None:
        steps = np.array([directions[axis] for axis in axes], float)
        origin = np.array(header.get("space origin", np.zeros(steps.shape[1])), float)
        dims = steps.shape[1]
        if dims not in (2, 3) or len(origin) != dims or not np.isfinite([*steps, origin]).all():
            raise ValueError(
                "its space directions and its space origin do not fit together: export the image "
                "again"
            )
        matrix[:dims, : len(axes)], matrix[:dims, 3] = steps.T, origin
        if (len(axes), dims) == (2, 3):
            normal = np.cross(*steps)
            matrix[:3, 2] = normal / (np.linalg.norm(normal) or 1.0)
    elif spacings is not None and np.isfinite([spacings[axis] for axis in axes]).all():
        for row, axis in enumerate(axes):
            matrix[row, row] = spacings[axis]
    else:
        return None, ()
    space = str(header.get("space", "left-posterior-superior")).lower()
    if space not in _SIGNS:
        notes = (f"has the space {space:.50}, which is taken for left-posterior-superior",)
    signs = (*_SIGNS.get(space, _LPS), 1.0)
    units = {str(unit).lower() for unit in header.get("space units", ("mm",))}
    unit = _UNITS.get(units.pop()) if len(units) == 1 else None
    if unit is None:
        notes += ("has space units that are unknown or differ, which are not kept",)
    return of_matrix((np.array(signs)[:, None] * matrix + 0.0).tolist(), unit), notes


def write_nrrd(
    path: Path,
    found: np.ndarray,
    place: Georeference | None,
    identity: str,
    advance: Callable[[int], None],
) -> None:
    """Write a class map of a volume as NRRD, compressed by gzip.

    Args:
        path: the file to write.
        found: the class numbers, (z, y, x) uint8.
        place: the affine of the volume; None for voxels of 1 mm at the origin.
        identity: a text to store in the header, which :func:`identity_in_nrrd` reads.
        advance: called after each slice with its number of voxels.
    """
    matrix = np.eye(4) if place is None else np.array(matrix_in_millimeters(place))
    if place is not None:
        matrix = np.array((*_LPS, 1.0))[:, None] * matrix + 0.0  # no negative zeros
    vectors = [f"({','.join(map(repr, matrix[:3, column].tolist()))})" for column in range(4)]
    fields = {
        "type": "uint8",
        "dimension": "3",
        "space": "left-posterior-superior",
        "sizes": " ".join(map(str, found.shape[::-1])),
        "space directions": " ".join(vectors[:3]),
        "kinds": "domain domain domain",
        "encoding": "gzip",
        "space origin": vectors[3],
    }
    if place is None or place.unit:
        fields["space units"] = '"mm" "mm" "mm"'
    lines = ["NRRD0005", *(f"{key}: {value}" for key, value in fields.items())]
    lines += [f"{_KEY}:={identity}", "", ""]
    write_packed(path, "\n".join(lines).encode(), b"", found, advance)


def identity_in_nrrd(path: Path) -> str | None:
    """Return the identity that :func:`write_nrrd` stored in a file; None for other files."""
    return _header(path)[0].get(_KEY)
