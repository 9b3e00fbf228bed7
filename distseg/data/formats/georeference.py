"""Georeference of an image, taken from its file and written into its class map.

A georeference consists of TIFF tags (GeoTIFF, and GDAL's rational polynomials), which are copied
without interpretation. Only a world file is converted, into GeoTIFF's matrix from pixels to the
world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tags: scale, tie points, matrix; GeoKeys, the GeoKeys' numbers and texts; GDAL's polynomials.
_SCALE, _TIE, _MATRIX, _KEYS, _NUMBERS = 33550, 33922, 34264, 34735, 34736
_POLYNOMIALS = 50844
_TYPES = {_SCALE: 12, _TIE: 12, _MATRIX: 12, _KEYS: 3, _NUMBERS: 12, 34737: 2, _POLYNOMIALS: 12}
_LINE, _SAMPLE = 2, 3  # indices of the offsets of row and column among GDAL's polynomials
_RASTER_TYPE, _POINT = 1025, 2  # GTRasterTypeGeoKey, and its value RasterPixelIsPoint
_MODEL_TYPE = 1024  # GTModelTypeGeoKey, which each file with a CRS has
_CRS_KEYS = 3072, 2048  # ProjectedCSTypeGeoKey, GeographicTypeGeoKey: EPSG codes
_UNNAMED = 32767  # a CRS, or a unit of length, without a code
_UNIT, _UNIT_SIZE = 3076, 3077  # ProjLinearUnitsGeoKey, ProjLinearUnitSizeGeoKey
MILLIMETER = 1e-3  # metres
_TEXT = 2  # type of a tag that holds text
_MOST = 1 << 16  # most numbers or letters that a tag may hold
_MOST_WORLD = 1 << 12  # bytes of a world file that are read


@dataclass(frozen=True)
class Georeference:
    """Georeference of an image as TIFF tags.

    ``tags`` holds pairs (code, value); a value is a text or a tuple of numbers.
    """

    tags: tuple[tuple[int, str | tuple[float, ...]], ...]

    def to_json(self) -> list:
        """Return the tags in types that JSON can hold."""
        return [
            [code, value if isinstance(value, str) else list(value)] for code, value in self.tags
        ]

    @classmethod
    def from_json(cls, tags: Any) -> Georeference | None:
        """Return a georeference from its JSON form, as :meth:`to_json` makes it; None for None.

        Raises:
            TypeError, ValueError: ``tags`` is not a georeference.
        """
        return (
            None if tags is None else cls(tuple(_checked(int(code), value) for code, value in tags))
        )

    @property
    def extra_tags(self) -> list[tuple[int, int, int, Any, bool]]:
        """The tags in the form of tifffile's argument ``extratags``."""
        return [
            (code, _TYPES[code], 0 if isinstance(value, str) else len(value), value, True)
            for code, value in self.tags
        ]

    @property
    def transform(self) -> tuple[float, ...] | None:
        """The affine transform (a, b, c, d, e, f); None if the tags define none.

        x = a column + b row + c and y = d column + e row + f, where (column, row) is the upper left
        corner of a pixel.
        """
        known = dict(self.tags)
        scale, tie, m = (known.get(code, ()) for code in (_SCALE, _TIE, _MATRIX))
        if len(m) == 16:
            a, b, c, d, e, f = m[0], m[1], m[3], m[4], m[5], m[7]
        elif len(scale) > 1 and len(tie) == 6:
            a, b, c, d, e, f = (
                scale[0],
                0.0,
                tie[3] - tie[0] * scale[0],
                0.0,
                -scale[1],
                tie[4] + tie[1] * scale[1],
            )
        else:
            return None
        half = 0.5 if self._points else 0.0
        return a, b, c - half * (a + b), d, e, f - half * (d + e)

    def of_part(self, start: Sequence[int]) -> Georeference:
        """Return the georeference of a part of the image that this georeference belongs to.

        Args:
            start: the position of the part's first pixel in the image, the slowest dim first.
        """
        first = [float(n) for n in (*reversed(start), 0, 0)][:3]  # column, row, slice
        return Georeference(tuple((code, _of_part(code, tag, first)) for code, tag in self.tags))

    @property
    def of_voxels(self) -> bool:
        """True if the georeference is that of a volume or a microscope's image, not of a map.

        :func:`of_matrix` makes such georeferences.
        """
        return self._has_affine and self._key(_MODEL_TYPE) is None

    @property
    def _has_affine(self) -> bool:
        """True if the tags hold a matrix (4, 4) that maps the centres of pixels."""
        return len(dict(self.tags).get(_MATRIX, ())) == 16 and self._points

    @property
    def unit(self) -> float | None:
        """Length, in metres, of one unit of a volume's world coordinates; None if unknown."""
        key = self._key(_UNIT)
        if key is None:
            return MILLIMETER
        sizes = dict(self.tags).get(_NUMBERS, ())
        return float(sizes[0]) if key == _UNNAMED and len(sizes) == 1 else None

    @property
    def _matrix(self) -> list[list[float]] | None:
        """The affine matrix (4, 4) from pixels to the world; None if the tags define none.

        A matrix in the tags maps the centres of pixels; otherwise the result maps their upper left
        corners.
        """
        if self._has_affine:
            return matrix_in_millimeters(self) if self.of_voxels else matrix_of(self)
        if (flat := self.transform) is None:
            return None
        a, b, c, d, e, f = flat
        return [[a, b, 0.0, c], [d, e, 0.0, f], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]

    def _key(self, key: int) -> int | None:
        """Return the value of the GeoKey ``key``; None if the list of GeoKeys does not hold it."""
        keys = dict(self.tags).get(_KEYS, ())
        for at in range(4, len(keys) - 3, 4):
            if keys[at] == key and keys[at + 1] == 0:
                return int(keys[at + 3])
        return None

    @property
    def _points(self) -> bool:
        """True if the tags map pixel centres (GTRasterTypeGeoKey is RasterPixelIsPoint)."""
        keys = dict(self.tags).get(_KEYS, ())
        return any(keys[at : at + 4 : 3] == (_RASTER_TYPE, _POINT) for at in range(0, len(keys), 4))


def _of_part(
    code: int, value: str | tuple[float, ...], first: Sequence[float]
) -> str | tuple[float, ...]:
    """Return the value of a georeference tag for a part of an image.

    Args:
        code: the tag's number.
        value: the tag's value for the whole image.
        first: column, row and slice of the part's first pixel in the image.
    """
    if isinstance(value, str):
        return value
    if code == _TIE:  # sextuples: column, row, slice and the point where they lie
        return tuple(n - first[k % 6] if k % 6 < 3 else n for k, n in enumerate(value))
    if code == _MATRIX and len(value) == 16:
        found = list(value)
        for row in range(0, 12, 4):
            found[row + 3] += sum(found[row + k] * first[k] for k in range(3))
        return tuple(found)
    if code == _POLYNOMIALS and len(value) > _SAMPLE:
        found = list(value)
        found[_LINE] -= first[1]
        found[_SAMPLE] -= first[0]
        return tuple(found)
    return value


def of_matrix(matrix: Sequence[Sequence[float]], unit: float | None = MILLIMETER) -> Georeference:
    """Return the georeference of a volume, or of a microscope's image, from its affine matrix.

    Args:
        matrix: (4, 4), maps the indices (x, y, z) of a voxel to world coordinates of its centre,
            as in a NIfTI file.
        unit: the length, in metres, of one unit of the world coordinates; None if it is unknown.
    """
    numbers = tuple(float(n) for row in matrix for n in row)
    points, tags = (_RASTER_TYPE, 0, 1, _POINT), [(_MATRIX, numbers)]
    if unit == MILLIMETER:
        return Georeference((*tags, (_KEYS, (1, 1, 0, 1, *points))))
    if unit is None:
        return Georeference((*tags, (_KEYS, (1, 1, 0, 2, *points, _UNIT, 0, 1, 0))))
    sizes = (_UNIT, 0, 1, _UNNAMED, _UNIT_SIZE, _NUMBERS, 1, 0)
    return Georeference((*tags, (_KEYS, (1, 1, 0, 3, *points, *sizes)), (_NUMBERS, (float(unit),))))


def matrix_of(place: Georeference) -> list[list[float]]:
    """Return the affine matrix (4, 4) from the voxels of a volume to the world.

    The world coordinates are in the unit :attr:`Georeference.unit`.

    Raises:
        ValueError: the georeference has no affine matrix of a volume.
    """
    if not place._has_affine:
        raise ValueError(
            "the georeference has no 3D affine matrix, which NIfTI and NRRD files need: "
            "take nifti and nrrd out of predict.formats"
        )
    found = dict(place.tags)[_MATRIX]
    return [list(found[row : row + 4]) for row in range(0, 16, 4)]


def matrix_in_millimeters(place: Georeference) -> list[list[float]]:
    """Return the affine matrix (4, 4) from the voxels of a volume to the world, in millimetres.

    If the unit of the world coordinates is not known, the matrix is returned as it is.

    Raises:
        ValueError: the georeference has no affine matrix of a volume.
    """
    matrix = matrix_of(place)
    if place.unit in (None, MILLIMETER):
        return matrix
    factor = place.unit / MILLIMETER
    return [[factor * n for n in row] for row in matrix[:3]] + matrix[3:]


def difference(a: Georeference | None, b: Georeference | None, size: Sequence[int]) -> str | None:
    """Return a phrase that says how the georeferences of two images differ; None if they agree.

    The EPSG codes of their CRS are compared, and the positions of the first and the last pixel,
    which may differ by up to half a pixel. A value that only one of them holds is not compared.

    Args:
        a, b: the georeferences of the two images; None for an image without one.
        size: the size of both images.
    """
    if a is None or b is None:
        return None
    for key in _CRS_KEYS:
        one, other = a._key(key), b._key(key)
        if None not in (one, other) and one != other and _UNNAMED not in (one, other):
            return f"their CRS are EPSG:{one} and EPSG:{other}"
    ours, theirs = a._matrix, b._matrix
    if ours is None or theirs is None:
        return None
    if a.of_voxels and b.of_voxels and (a.unit is None) != (b.unit is None):
        return None
    for corner in ((0,) * len(size), tuple(n - 1 for n in size)):
        here, there = (_at(matrix, corner) for matrix in (ours, theirs))
        pixel = min(_length(ours[row][axis] for row in range(3)) for axis in range(len(size)))
        if math.dist(here, there) > pixel / 2:
            which = "last" if any(corner) else "first"
            return (
                f"their {which} pixels lie at {_numbers_in_words(here[: len(size)])} and "
                f"{_numbers_in_words(there[: len(size)])}"
            )
    return None


def _at(matrix: Sequence[Sequence[float]], pixel: Sequence[int]) -> list[float]:
    """Return the world coordinates (x, y, z) of a pixel.

    Args:
        matrix: the affine matrix (4, 4) from pixels to the world.
        pixel: the indices of the pixel, the slowest dim first.
    """
    place = [*pixel[::-1], *(0,) * (3 - len(pixel)), 1]
    return [sum(m * n for m, n in zip(row, place)) for row in matrix[:3]]


def _length(numbers: Iterable[float]) -> float:
    return math.sqrt(sum(n * n for n in numbers))


def _numbers_in_words(numbers: Sequence[float]) -> str:
    return f"({', '.join(f'{n:.10g}' for n in numbers)})"


def place_in(page) -> Georeference | None:
    """Return the georeference in the tags of tifffile's ``page``; None without a valid one."""
    found = []
    for code in _TYPES:
        value = page.tags.valueof(code)
        if (
            value is not None
            and (isinstance(value, str) or hasattr(value, "__len__"))
            and len(value) <= _MOST
        ):
            found.append((code, value if isinstance(value, str) else tuple(value)))
    try:
        return Georeference.from_json(found) if found else None
    except (TypeError, ValueError):
        return None


def with_world_file(place: Georeference | None, path: Path) -> Georeference | None:
    """Return the georeference ``place``, completed by a world file beside the image.

    The world file is used only if ``place`` has no tie points and no matrix of its own. Without a
    world file, ``place`` is returned as it is.

    Args:
        place: the georeference in the image file; None without one.
        path: the image file.
    """
    if place is not None and {code for code, _ in place.tags} & {_TIE, _MATRIX}:
        return place
    world = _world(path)
    if world is None:
        return place
    a, d, b, e, x, y = world  # x and y of the centre of the first pixel
    matrix = (a, b, 0.0, x - (a + b) / 2, d, e, 0.0, y - (d + e) / 2, *(0.0,) * 4, *(0.0,) * 3, 1.0)
    return Georeference((*(place.tags if place else ()), (_MATRIX, matrix)))


def _world(path: Path) -> Sequence[float] | None:
    """Return the six numbers of the first valid world file beside an image; None without one.

    The numbers are in the order of the file. The world file of NAME.tif is NAME.tfw, NAME.tifw or
    NAME.wld.
    """
    ending = path.suffix[1:].lower()
    for name in (f"{ending[:1]}{ending[-1:]}w", f"{ending}w", "wld"):
        for there in (path.with_suffix(f".{name}"), path.with_suffix(f".{name.upper()}")):
            if there.is_file():
                with open(there, "rb") as file:
                    found = _numbers(file.read(_MOST_WORLD))
                if found is not None:
                    return found
    return None


def _numbers(text: bytes) -> list[float] | None:
    try:
        found = [float(word) for word in text.split()]
    except ValueError:
        return None
    return found if len(found) == 6 and all(map(math.isfinite, found)) else None


def _checked(code: int, value: Any) -> tuple[int, str | tuple[float, ...]]:
    """Return (code, value) if the value has the type of the tag.

    Raises:
        ValueError: the tag is unknown, or its value is too long or of another type.
    """
    if (
        code not in _TYPES
        or len(value) > _MOST
        or isinstance(value, str) != (_TYPES[code] == _TEXT)
    ):
        raise ValueError(
            f"tag {code} of the georeference is unknown, or its value has a wrong type or length"
        )
    if isinstance(value, str):
        return code, value
    kind = int if _TYPES[code] == 3 else float
    if (
        any(type(n) not in (int, float) for n in value)
        or kind is int
        and not all(0 <= n < 1 << 16 for n in value)
    ):
        raise ValueError(f"tag {code} of the georeference holds values that are not of its type")
    return code, tuple(kind(n) for n in value)
