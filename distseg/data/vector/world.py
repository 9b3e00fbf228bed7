"""Coordinates of the pixels of a map on earth: CRS, affine transform, area of each pixel."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distseg.data.formats.georeference import Georeference
from distseg.data.packages import optional

_ELLIPSOID = re.compile(r'(?:SPHEROID|ELLIPSOID)\["[^"]*",\s*([\d.]+),\s*([\d.]+)')
_PIXELS = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class World:
    """Georeference of a class map: affine transform from pixels to coordinates, and CRS.

    Attributes:
        transform: the affine transform (a, b, c, d, e, f): x = a column + b row + c and
            y = d column + e row + f. Without a georeference x is the column and y the row.
        placed: True if ``transform`` comes from a georeference.
        crs: rasterio's CRS of x and y; None if the file names none.
    """

    transform: tuple[float, ...] = _PIXELS
    placed: bool = False
    crs: Any = None

    @property
    def mirrored(self) -> bool:
        """True if the transform's determinant is negative, as in a map with north at the top.

        In such a map rows grow downwards, but y grows upwards. So a ring that runs clockwise in the
        image also runs clockwise in a plane with x to the right and y upwards.
        """
        a, b, _, d, e, _ = self.transform
        return a * e - b * d < 0

    def xy(self, columns: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of pixel corners, which are given by their columns and rows.

        All four arrays have the same shape. Column 0 and row 0 are the map's upper left corner.
        """
        a, b, c, d, e, f = self.transform
        return a * columns + b * rows + c, d * columns + e * rows + f

    @cached_property
    def epsg(self) -> int | None:
        """The EPSG code of the CRS; None if there is no CRS, or if the CRS has no code."""
        return None if self.crs is None else self.crs.to_epsg()

    @property
    def measured(self) -> bool:
        """True if the areas of pixels in square metres are known (:meth:`row_areas`)."""
        return self.row_areas(1) is not None

    def row_areas(self, height: int) -> np.ndarray | None:
        """Return the area of one pixel in square metres for each row, (height,) float64.

        In a projected CRS it is the area on the map. In a CRS in degrees it is the area on the
        ellipsoid (Snyder 1987, Map Projections, equation 3-12). The result is None without a CRS,
        and in a CRS of another kind. It is also None in degrees if the transform is rotated or the
        ellipsoid is unknown.
        """
        if self.crs is None or not (self.crs.is_geographic or self.crs.is_projected):
            return None
        a, b, _, d, e, f = self.transform
        if not self.crs.is_geographic:
            metres = self.crs.linear_units_factor[1]
            return np.full(height, abs(a * e - b * d) * metres**2)
        shape = _ELLIPSOID.search(self.crs.to_wkt())
        if b or d or shape is None:
            return None
        radius, inverse = float(shape[1]), float(shape[2])
        flattening = 1 / inverse if inverse else 0.0
        borders = np.clip(np.radians(f + e * np.arange(height + 1)), -math.pi / 2, math.pi / 2)
        zones = np.abs(np.diff(_authalic(borders, math.sqrt(flattening * (2 - flattening)))))
        return radius**2 / 2 * math.radians(abs(a)) * zones


def _authalic(latitude: np.ndarray, eccentricity: float) -> np.ndarray:
    """Return q of Snyder 1987 for a latitude in radians, on an ellipsoid of this eccentricity.

    The area between the equator and the latitude is q radius^2 / 2 for each radian of longitude.
    """
    sine, e = np.sin(latitude), eccentricity
    if e < 1e-9:  # a sphere
        return 2 * sine
    return (1 - e**2) * (
        sine / (1 - (e * sine) ** 2) - np.log((1 - e * sine) / (1 + e * sine)) / (2 * e)
    )


def world_of(place: Georeference | None, name: str) -> World:
    """Return the affine transform and the CRS of a class map.

    Args:
        place: the georeference of the map. If it is None, x is the column and y the row.
        name: the map's name, for messages.

    Raises:
        ValueError: the georeference has no affine transform, its CRS cannot be read, or rasterio,
            which reads it, is not installed.
    """
    if place is None:
        return World()
    if place.transform is None:
        raise ValueError(
            f"{name} has a georeference without an affine transform (ground control points or "
            "rational polynomials), so its pixels have no coordinates on a map: warp the image "
            "first (gdalwarp), or write class maps as tiff and warp these"
        )
    return World(place.transform, True, None if place.of_voxels else _crs(place, name))


def _crs(place: Georeference, name: str) -> Any:
    """Return rasterio's CRS of a georeference; None if the georeference names no CRS.

    GDAL reads the CRS from a file of one pixel with the tags of the georeference.

    Raises:
        ValueError: the CRS cannot be read, or rasterio is not installed. The message contains
            ``name``, the map's name.
    """
    import io

    import tifffile

    rasterio = optional(f"the coordinates of {name}", "rasterio", "errors", "io")
    file = io.BytesIO()
    tifffile.imwrite(file, np.zeros((1, 1), np.uint8), extratags=place.extra_tags, metadata=None)
    try:
        with rasterio.MemoryFile(file.getvalue()) as memory, memory.open() as dataset:
            return dataset.crs
    except rasterio.errors.RasterioError as e:
        raise ValueError(
            f"the CRS of {name} cannot be read ({e}): write the right CRS into the image "
            "(gdal_edit.py -a_srs EPSG:... IMAGE)"
        ) from e
