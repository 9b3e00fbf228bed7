"""Draw polygons of a vector file as the label map of an image, window by window.

A pixel belongs to a polygon if its centre lies inside, as in ``rasterio.features.rasterize``. Where
polygons overlap, the later one in the file has the pixel.

Corners are reprojected and then converted to columns and rows of the image by GDAL's formula. The
pixels are therefore those of a drawing of the whole image at once. Windows are blocks of a fixed
grid, so a pixel does not depend on the box that is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distseg.data.formats.base import Reader
from distseg.data.formats.georeference import Georeference
from distseg.data.vector.layer import Layer, Polygons, ValueRule, imported_packages, read_layer
from distseg.data.vector.world import World, imported_rasterio, world_of
from distseg.tiling.tile import Box, boxes_of

_BLOCK = (256, 4096)  # rows and columns of the blocks in which polygons are drawn
_ROUND = 360.0  # degrees of a full circle
_EDGE_POINTS = 21  # points on each edge of an image that are reprojected to find its extent
_MARGIN = 0.05  # share by which this extent is enlarged, as edges are curves between the points
# Positions of a corner relative to a window.
_INSIDE, _ABOVE, _BELOW, _LEFT, _RIGHT = range(5)


@dataclass(frozen=True)
class ImageGrid:
    """Pixels of an image, and where these lie on earth.

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
        """Coordinates of the pixels.

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
        """The smallest x and y and the largest x and y of the image in its own CRS."""
        height, width = self.size
        x, y = self.world.xy(np.array([0, width, 0, width]), np.array([0, 0, height, height]))
        return float(x.min()), float(y.min()), float(x.max()), float(y.max())


class BurnedReader(Reader):
    """Reader of the labels that polygons give to the pixels of an image.

    Args:
        path: the vector file.
        grid: the pixels of the image.
        rule: the rule for the value of each polygon.

    Attributes:
        polygons: number of polygons whose bounding box overlaps the image.

    Raises:
        ValueError: the file or the image cannot be used; the message names the repair.
    """

    bands = 1

    def __init__(self, path: Path, grid: ImageGrid, rule: ValueRule):
        super().__init__(path)
        imported_packages(path)
        if len(grid.size) != 2:
            raise ValueError(
                f"{path} holds polygons, but {grid.path} is a volume of {len(grid.size)} dims: "
                "give a mask of voxels for each volume"
            )
        self.size, self.place, self._overlapping = grid.size, grid.place, 0
        self._grid, self._layer = grid, read_layer(path, rule)
        self._drawn = _on_pixels(self._layer, grid)
        self.polygons, self.notes = len(self._drawn), self._layer.notes
        values = self._layer.polygons.values
        small = not len(values) or (values.min() >= 0 and values.max() <= 255)
        self.dtype = np.dtype(np.uint8 if small else np.int32)

    @property
    def overlapping(self) -> int:
        """Number of pixels that were read and that polygons of different values cover."""
        return self._overlapping

    def _read(self, box: Box) -> np.ndarray:
        found = np.zeros(box.size, self.dtype)
        low = tuple(start // edge * edge for start, edge in zip(box.start, _BLOCK))
        for block in boxes_of(Box(low, box.stop), _BLOCK):
            whole = Box(
                block.start, tuple(min(a + n, m) for a, n, m in zip(block.start, _BLOCK, self.size))
            )
            shared = whole.intersection(box)
            drawn, twice = self._block(whole)
            inner = shared.relative_to(whole).slices
            found[shared.relative_to(box).slices] = drawn[inner]
            self._overlapping += 0 if twice is None else int(twice[inner].sum())
        return found[None]

    def _block(self, block: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the values of a block, and where polygons of different values overlap.

        The second array is None if they overlap nowhere.
        """
        low, high = self._drawn.bounds[:, :2], self._drawn.bounds[:, 2:]
        corner, end = np.array(block.start[::-1]), np.array(block.stop[::-1])
        there = np.flatnonzero((low <= end).all(1) & (high >= corner).all(1))
        values = self._drawn.values[there].tolist()
        shapes = [_rings_near(self._drawn, at, block) for at in there.tolist()]
        drawn = self._burn(shapes, values, block)
        if len(set(values)) < 2:
            return drawn, None
        # A pixel that is drawn differently in the opposite order has several values.
        return drawn, self._burn(shapes[::-1], values[::-1], block) != drawn

    def _burn(self, shapes: list[list[np.ndarray]], values: list[int], block: Box) -> np.ndarray:
        """Return the values of the pixels of a block, (rows, columns).

        Args:
            shapes: the rings of each polygon, in columns and rows of the image.
            values: the value of each polygon.
            block: the box of the block.
        """
        import rasterio.features

        # GDAL gives all rings one direction on the map, and the pixels on a horizontal edge depend
        # on it. So x and y must grow here in the directions in which they grow on the map.
        a, b, _, d, e, _ = self._grid.world.transform
        turned = np.sign([a, e] if b == d == 0 else [1, a * e - b * d]).astype(int)
        geometries = [
            (
                {"type": "Polygon", "coordinates": [(ring * turned).tolist() for ring in rings]},
                value,
            )
            for rings, value in zip(shapes, values)
            if rings
        ]
        if not geometries:
            return np.zeros(block.size, self.dtype)
        top, left = block.start
        moved = rasterio.Affine(turned[0], 0, turned[0] * left, 0, turned[1], turned[1] * top)
        return rasterio.features.rasterize(
            geometries, block.size, transform=moved, dtype=self.dtype.name
        )


def extents(layer: Layer, grid: ImageGrid) -> str:
    """Return the extents of the polygons and of an image in words, each with its CRS."""
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


def _rings_near(polygons: Polygons, at: int, block: Box) -> list[np.ndarray]:
    """Return the rings of a polygon, without corners that do not matter in a block.

    Consecutive corners above the block are replaced by the first and the last of them, and those
    below, left and right alike. An edge between two corners above crosses no row of the block. A
    path left of the block crosses each row as often as the edge between its ends, up to an even
    number. So the pixels of the block stay the same, and a coast of a million corners is fast.
    A ring with a horizontal edge on pixel centres keeps all corners, because the pixels on this
    edge depend on the direction of the whole ring.

    Args:
        polygons: the polygons, in columns and rows of the image.
        at: the index of the polygon.
        block: the box of the block.
    """
    rings = []
    for ring in range(polygons.parts[at], polygons.parts[at + 1]):
        corners = polygons.corners[polygons.rings[ring] : polygons.rings[ring + 1]]
        if _on_centres(corners):
            rings.append(corners)
            continue
        sides = _sides(corners, block)
        if (sides == sides[0]).all() and sides[0] != _INSIDE:
            continue
        inner = (sides[1:-1] != _INSIDE) & (sides[1:-1] == sides[:-2]) & (sides[1:-1] == sides[2:])
        kept = corners[np.concatenate([[True], ~inner, [True]])]
        # rasterio wants at least four corners
        rings.append(kept if len(kept) > 3 else np.concatenate([kept, kept[-1:], kept[-1:]]))
    return rings


def _on_centres(corners: np.ndarray) -> bool:
    """Return True if a ring has a horizontal edge that runs through centres of pixels."""
    rows = corners[:, 1]
    return bool(((rows[1:] == rows[:-1]) & (rows[1:] % 1 == 0.5)).any())


def _sides(corners: np.ndarray, block: Box) -> np.ndarray:
    """Return on which side of a block each corner lies, by more than a pixel; (corners,) int."""
    x, y = corners.T
    (top, left), (bottom, right) = block.start, block.stop
    return np.select(
        [y < top - 1, y > bottom + 1, x < left - 1, x > right + 1],
        [_ABOVE, _BELOW, _LEFT, _RIGHT],
        _INSIDE,
    )


def _on_pixels(layer: Layer, grid: ImageGrid) -> Polygons:
    """Return the polygons that may overlap an image, in columns and rows of the image.

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
    polygons = polygons.moved(_columns_and_rows(polygons.corners, world.transform))
    height, width = grid.size
    low, high = polygons.bounds[:, :2], polygons.bounds[:, 2:]
    return polygons.chosen((high > 0).all(1) & (low < (width, height)).all(1))


def _extent(grid: ImageGrid, crs: Any) -> tuple[float, ...] | None:
    """Return the smallest x and y and largest x and y of an image in another CRS, a bit enlarged.

    In degrees, the smallest x is above the largest if the image crosses the antimeridian. The
    result is None if the image is too large for the CRS.
    """
    found = grid.bounds
    if grid.world.crs != crs:
        rasterio = imported_rasterio(str(grid.path))
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
        ValueError: a polygon has no place in the other CRS; the message names its feature.
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
    """Return corners in another CRS, (corners, 2); None if one of them has no place in it."""
    rasterio = imported_rasterio("reprojecting polygons")
    try:
        found = rasterio.warp.transform(source, target, corners[:, 0], corners[:, 1])
    except _errors(rasterio):
        return None
    moved = np.stack([np.asarray(axis, float) for axis in found], 1)
    return moved if np.isfinite(moved).all() else None


def _errors(rasterio: Any) -> tuple[type[Exception], ...]:
    """Return the errors of reprojections; rasterio passes some of GDAL's errors on as they are."""
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
    """Return the EPSG code of a CRS in words, or its name if it has no code."""
    if crs is None:
        return "no CRS"
    code = crs.to_epsg()
    return f"EPSG:{code}" if code else f"the CRS {crs.to_wkt().split(chr(34))[1]}"


def _span(bounds: tuple[float, ...]) -> str:
    left, bottom, right, top = bounds
    return f"x {left:.9g} to {right:.9g} and y {bottom:.9g} to {top:.9g}"


def _beyond_degrees(bounds: tuple[float, ...]) -> bool:
    return max(abs(bounds[0]), abs(bounds[2])) > _ROUND or max(abs(bounds[1]), abs(bounds[3])) > 90
