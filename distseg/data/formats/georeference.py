"""Georeference of an image, taken from its file and written into its class map.

It consists of TIFF tags (GeoTIFF, and GDAL's rational polynomials), copied without interpretation.
Only a world file is converted, into GeoTIFF's matrix from pixels to the world.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tags: scale, tie points, matrix; GeoKeys, their numbers and texts; GDAL's rational polynomials.
_SCALE, _TIE, _MATRIX, _KEYS = 33550, 33922, 34264, 34735
_TYPES = {_SCALE: 12, _TIE: 12, _MATRIX: 12, _KEYS: 3, 34736: 12, 34737: 2, 50844: 12}
_RASTER_TYPE, _POINT = 1025, 2  # GTRasterTypeGeoKey, and its value RasterPixelIsPoint
_TEXT = 2  # type of a tag that holds text
_MOST = 1 << 16  # largest number of numbers or letters in a tag
_MOST_WORLD = 1 << 12  # bytes of a world file that are read


@dataclass(frozen=True)
class Georeference:
    """TIFF tags as pairs (code, value); a value is a text or a tuple of numbers."""

    tags: tuple[tuple[int, str | tuple[float, ...]], ...]

    def to_json(self) -> list:
        """Return the tags in types that JSON can hold."""
        return [
            [code, value if isinstance(value, str) else list(value)] for code, value in self.tags
        ]

    @classmethod
    def from_json(cls, tags: Any) -> Georeference | None:
        """Return the georeference that :meth:`to_json` converted; None for None.

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
        """The affine transform (a, b, c, d, e, f); None if the tags define another map.

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

    @property
    def _points(self) -> bool:
        """True if the tags map pixel centres (GTRasterTypeGeoKey is RasterPixelIsPoint)."""
        keys = dict(self.tags).get(_KEYS, ())
        return any(keys[at : at + 4 : 3] == (_RASTER_TYPE, _POINT) for at in range(0, len(keys), 4))


def place_in(page) -> Georeference | None:
    """Return the georeference in the tags of tifffile's ``page``; None if there is none."""
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
    """Return ``place``, completed by the matrix of a world file beside the image.

    The world file is used only if ``place`` does not map pixels itself.
    """
    if place is not None and {code for code, _ in place.tags} & {_TIE, _MATRIX}:
        return place
    world = _world(path)
    if world is None:
        return place
    a, d, b, e, x, y = world  # x and y of the middle of the first pixel
    matrix = (a, b, 0.0, x - (a + b) / 2, d, e, 0.0, y - (d + e) / 2, *(0.0,) * 4, *(0.0,) * 3, 1.0)
    return Georeference((*(place.tags if place else ()), (_MATRIX, matrix)))


def _world(path: Path) -> Sequence[float] | None:
    """Return the six numbers of the first world file beside an image; None without one.

    Its name is NAME.tfw, NAME.tifw or NAME.wld for NAME.tif.
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
        raise ValueError(f"{code} is not a georeference tag")
    if isinstance(value, str):
        return code, value
    kind = int if _TYPES[code] == 3 else float
    if (
        any(type(n) not in (int, float) for n in value)
        or kind is int
        and not all(0 <= n < 1 << 16 for n in value)
    ):
        raise ValueError(f"the tag {code} holds no numbers of its type")
    return code, tuple(kind(n) for n in value)
