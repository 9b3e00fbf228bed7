"""Place the polygons of a vector file on the pixels of an image.

Corners are reprojected to the CRS of the image. GDAL's formula then converts them to columns and
rows. So the pixels are the same as if GDAL drew the polygons on the whole image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distseg.data.formats.georeference import Georeference
from distseg.data.packages import optional
from distseg.data.vector.corners import Polygons
from distseg.data.vector.layer import Layer
from distseg.data.vector.world import World, world_of

_ROUND = 360.0  # degrees of a full circle
_EDGE_POINTS = 21  # points on each edge of an image that are reprojected to find its extent
_MARGIN = 0.05  # share by which this extent is enlarged, as edges are curves between the points


@dataclass(frozen=True)
class ImageGrid:
    """Size and georeference of an image, by which polygons are placed on its pixels.

    Attributes:
        path: the image file, for messages.
        size: (height, width).
        place: the georeference; None if the image has none.
    """

    path: Path
    size: tuple[int, ...]
    place: Georeference | None

    @cached_property
    def world(self) -> World:
        """Georeference of the image as an affine transform and a CRS.

        Raises:
            ValueError: the image has no georeference or no affine transform.
        """
        if self.place is None:
            raise ValueError(
                f"{self.path} has no georeference, so polygons cannot be placed on it: write CRS "
                "and transform into the image file (gdal_translate -a_srs EPSG:... -a_ullr ...)"
            )
        return world_of(self.place, str(self.path))

    @property
    def bounds(self) -> tuple[float, ...]:
        """The smallest x, smallest y, largest x and largest y of the image in its own CRS."""
        height, width = self.size
        x, y = self.world.xy(np.array([0, width, 0, width]), np.array([0, 0, height, height]))
        return float(x.min()), float(y.min()), float(x.max()), float(y.max())


def on_pixels(layer: Layer, grid: ImageGrid) -> Polygons:
    """Return the polygons of a file that may overlap an image, in columns and rows of the image.

    Args:
        layer: the polygons of the file.
        grid: the size and the georeference of the image.

    Raises:
        ValueError: only one of the file and the image has a CRS, or a polygon near the image cannot
            be reprojected.
    """
    world, polygons = grid.world, layer.polygons
    if (world.crs is None) != (layer.crs is None):
        without, other = (grid.path, layer.path) if world.crs is None else (layer.path, grid.path)
        raise ValueError(
            f"{without} names no CRS, but {other} does, so the polygons cannot be placed: name the "
            f"CRS in {without} (images: gdal_edit.py -a_srs EPSG:...; vectors: ogr2ogr -a_srs "
            "EPSG:... new.gpkg FILE)"
        )
    if (extent := _extent(grid, layer.crs)) is not None:
        around = layer.crs is not None and layer.crs.is_geographic
        polygons = polygons.chosen(_overlapping(polygons.bounds, extent, around))
    if world.crs != layer.crs:
        polygons = polygons.moved(_reprojected(layer.path, polygons, layer.crs, world.crs))
    return inside(polygons.moved(_columns_and_rows(polygons.corners, world.transform)), grid.size)


def inside(polygons: Polygons, size: tuple[int, ...]) -> Polygons:
    """Return the polygons whose bounding box overlaps an image.

    Args:
        polygons: the polygons, in columns and rows of the image.
        size: (height, width) of the image.
    """
    height, width = size
    low, high = polygons.bounds[:, :2], polygons.bounds[:, 2:]
    return polygons.chosen((high > 0).all(1) & (low < (width, height)).all(1))


def extents(layer: Layer, grid: ImageGrid) -> str:
    """Return a text with the extent of all polygons and of an image, each with its CRS."""
    if not len(layer.polygons):
        return f"{layer.path} has no polygon at all"
    ours, theirs = grid.world.crs, layer.crs
    lie = f"its polygons span {_span(layer.bounds)} ({_crs_name(theirs)})"
    if theirs is not None and theirs.is_geographic and _beyond_degrees(layer.bounds):
        lie += ", which are no degrees, so that this CRS is wrong"
    there = f"{grid.path} spans {_span(grid.bounds)} ({_crs_name(ours)})"
    if ours != theirs and (extent := _extent(grid, theirs)) is not None:
        there += f", which is about {_span(extent)} in the CRS of the polygons"
    return f"{lie}, but {there}"


def _extent(grid: ImageGrid, crs: Any) -> tuple[float, ...] | None:
    """Return the extent of an image in another CRS: smallest x and y, largest x and y.

    The extent is enlarged by a small margin, because only some points of the edges are reprojected.
    If the image crosses the antimeridian and ``crs`` is in degrees, the first x is the larger one.
    The result is None if the image is too large for the CRS.
    """
    found = grid.bounds
    if grid.world.crs != crs:
        rasterio = optional(grid.path, "rasterio", "errors", "warp")
        try:
            found = rasterio.warp.transform_bounds(
                grid.world.crs, crs, *found, densify_pts=_EDGE_POINTS
            )
        except _errors(rasterio):
            return None
    if not np.isfinite(found).all():
        return None
    left, bottom, right, top = found
    wide = _MARGIN * (right - left + (_ROUND if right < left else 0.0))
    high = _MARGIN * (top - bottom)
    return left - wide, bottom - high, right + wide, top + high


def _overlapping(bounds: np.ndarray, extent: tuple[float, ...], around: bool) -> np.ndarray:
    """Return which polygons may overlap an extent, (polygons,) bool.

    Args:
        bounds: (polygons, 4) smallest x and y, largest x and y of each polygon.
        extent: smallest x and y, largest x and y.
        around: True if x is a longitude in degrees, so that 190 is the same as -170.
    """
    left, bottom, right, top = extent
    if around and right < left:
        right += _ROUND
    high = (bounds[:, 1] <= top) & (bounds[:, 3] >= bottom)
    turns = (-_ROUND, 0.0, _ROUND) if around else (0.0,)
    wide = [(bounds[:, 0] + turn <= right) & (bounds[:, 2] + turn >= left) for turn in turns]
    return high & np.any(wide, 0)


def _reprojected(path: Path, polygons: Polygons, source: Any, target: Any) -> np.ndarray:
    """Return the corners of polygons in another CRS, (corners, 2) float64.

    Raises:
        ValueError: the other CRS cannot represent a polygon; the message names its feature.
    """
    found = _transformed(polygons.corners, source, target)
    if found is not None:
        return found
    for at, feature in enumerate(polygons.features):
        corners = polygons.corners[slice(*polygons.rings[polygons.parts[at : at + 2]])]
        if _transformed(corners, source, target) is None:
            raise ValueError(
                f"feature {feature} of {path} reaches places that {_crs_name(target)}, the CRS of "
                "the image, cannot hold: clip the polygons to the surroundings of the images "
                "(ogr2ogr -clipsrc XMIN YMIN XMAX YMAX clipped.gpkg FILE)"
            )
    raise ValueError(f"{path} cannot be reprojected to {_crs_name(target)}: reproject it first")


def _transformed(corners: np.ndarray, source: Any, target: Any) -> np.ndarray | None:
    """Return corners in another CRS, (corners, 2); None if it cannot represent all of them."""
    rasterio = optional("reprojecting polygons", "rasterio", "errors", "warp")
    try:
        found = rasterio.warp.transform(source, target, corners[:, 0], corners[:, 1])
    except _errors(rasterio):
        return None
    moved = np.stack([np.asarray(axis, float) for axis in found], 1)
    return moved if np.isfinite(moved).all() else None


def _errors(rasterio: Any) -> tuple[type[Exception], ...]:
    """Return the classes of the errors that a reprojection by rasterio may raise.

    Rasterio converts only some of GDAL's errors, so their class, the second one, is needed too.
    """
    return rasterio.errors.RasterioError, rasterio._err.CPLE_BaseError


def _columns_and_rows(corners: np.ndarray, transform: tuple[float, ...]) -> np.ndarray:
    """Return corners in columns and rows, (corners, 2), as GDALInvGeoTransform computes them.

    The same formula as in GDAL makes the same rounding errors, which decide about a pixel whose
    centre lies on an edge.

    Args:
        corners: (corners, 2) x and y.
        transform: the affine transform (a, b, c, d, e, f) of the image.
    """
    a, b, c, d, e, f = transform
    x, y = corners.T
    if b == d == 0:
        return np.stack([-c / a + x * (1 / a), -f / e + y * (1 / e)], 1)
    inverse = 1 / (a * e - b * d)
    column = (b * f - c * e) * inverse + x * (e * inverse) + y * (-b * inverse)
    row = (-a * f + c * d) * inverse + x * (-d * inverse) + y * (a * inverse)
    return np.stack([column, row], 1)


def _crs_name(crs: Any) -> str:
    """Return the EPSG code of a CRS as a text, such as ``EPSG:4326``, or the name of the CRS."""
    if crs is None:
        return "no CRS"
    code = crs.to_epsg()
    return f"EPSG:{code}" if code else f"the CRS {crs.to_wkt().split(chr(34))[1]}"


def _span(bounds: tuple[float, ...]) -> str:
    left, bottom, right, top = bounds
    return f"x {left:.9g} to {right:.9g} and y {bottom:.9g} to {top:.9g}"


def _beyond_degrees(bounds: tuple[float, ...]) -> bool:
    return max(abs(bounds[0]), abs(bounds[2])) > _ROUND or max(abs(bounds[1]), abs(bounds[3])) > 90
