"""Write polygons as GeoJSON: in longitude and latitude of WGS 84, as RFC 7946 demands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from distseg.data.packages import optional
from distseg.data.vector.features import Feature, Ring
from distseg.data.vector.world import World

_DIGITS = 8  # decimals of degrees; the last one is about a millimetre
_BATCH = 1 << 16  # corners that are transformed at a time, and most corners of a batch's object
_HALF_CIRCLE = 180.0  # degrees; a longer edge crosses the antimeridian
_EPSILON = 1e-9  # tolerance of a longitude in degrees
_IDENTITY = re.compile(rb'"distseg_identity": "([0-9a-f]*)"')
_HEAD = 4096  # bytes that are searched for the identity


def check_geojson(world: World, name: str) -> None:
    """Raise an error if the objects of a class map cannot be written in longitude and latitude.

    Args:
        world: the georeference of the class map.
        name: the name of the class map, for the message.

    Raises:
        ValueError: the class map has an affine transform, but no CRS.
    """
    if world.placed and world.crs is None:
        raise ValueError(
            f"{name} has a transform but names no CRS, so its longitudes and latitudes, which "
            "GeoJSON holds, are unknown: write gpkg, or name the CRS in the image (gdal_edit.py "
            "-a_srs EPSG:...)"
        )


def write_geojson(path: Path, features: Iterable[Feature], world: World, identity: str) -> int:
    """Write objects as a GeoJSON feature collection, and return the number of objects.

    Each object is one line of the file. Corners are in degrees or, if ``world`` has no CRS, in
    columns and rows.

    Args:
        path: the file.
        features: the objects of a class map.
        world: the georeference of the class map.
        identity: a text to store in the file, which :func:`identity_in_geojson` reads.
    """
    head = {"type": "FeatureCollection", "name": "objects", "distseg_identity": identity}
    if world.crs is None:
        head["coordinates"] = "pixels: column, row"
    count = 0
    with open(path, "w", encoding="ascii") as file:
        file.write(json.dumps(head)[:-1] + ', "features": [')
        for found, geometry in _geometries(features, world):
            about = {
                "object": found.number,
                "class": found.label,
                "name": found.name,
                "pixels": found.pixels,
                "area_m2": found.area,
            }
            feature = {"type": "Feature", "id": found.number, "properties": about}
            file.write(("," if count else "") + "\n" + json.dumps(feature)[:-1] + ', "geometry": ')
            file.writelines(geometry)
            file.write("}")
            count += 1
        file.write("\n]}\n")
    return count


def identity_in_geojson(path: Path) -> str | None:
    """Return the identity text in a GeoJSON file that distseg wrote; None for other files."""
    with open(path, "rb") as file:
        found = _IDENTITY.search(file.read(_HEAD))
    return found[1].decode() if found else None


def _geometries(
    features: Iterable[Feature], world: World
) -> Iterator[tuple[Feature, Iterable[str]]]:
    """Yield each object, and the text of its geometry in GeoJSON as an iterable of parts.

    Corners are in degrees or, if ``world`` has no CRS, in columns and rows.
    """
    if world.crs is None:
        for found in features:
            yield found, _polygon_text((ring.parts for ring in found.rings), _whole)
        return
    warp = optional("GeoJSON in WGS 84", "rasterio", "warp").warp
    for batch in _batches(features):
        if batch[0].counts[1] > _BATCH:
            yield from _large_in_degrees(batch[0], world, warp)
        else:
            yield from _in_degrees(batch, world, warp)


def _batches(features: Iterable[Feature]) -> Iterator[list[Feature]]:
    """Yield objects in batches of a limited number of corners.

    An object with more corners than ``_BATCH`` is a batch of its own.
    """
    batch: list[Feature] = []
    corners = 0
    for found in features:
        if batch and corners + found.counts[1] > _BATCH:
            yield batch
            batch, corners = [], 0
        batch.append(found)
        corners += found.counts[1]
    if batch:
        yield batch


def _in_degrees(
    batch: list[Feature], world: World, warp: ModuleType
) -> Iterator[tuple[Feature, Iterable[str]]]:
    """Yield each object of a batch, and the text of its geometry in degrees, in parts."""
    rings = [[np.concatenate([*ring.parts]) for ring in found.rings] for found in batch]
    every = [ring for own in rings for ring in own]
    degrees = _degrees(np.concatenate(every), world, warp)
    parts = iter(np.split(degrees, np.cumsum([len(ring) for ring in every])[:-1]))
    for found, own in zip(batch, rings):
        turned = [next(parts) for _ in own]
        spans = [_Span([ring]) for ring in turned]
        shifts = [span.shift(found) for span in spans]
        if spans[0].crosses:
            plain = {"type": "Polygon", "coordinates": [ring.tolist() for ring in own]}
            cut = warp.transform_geom(
                world.crs, "EPSG:4326", plain, antimeridian_cutting=True, precision=_DIGITS
            )
            yield found, [json.dumps(_turned(cut, found))]
        else:
            eastward = [ring + shift for ring, shift in zip(turned, shifts)]
            yield found, _polygon_text([[ring] for ring in eastward], _rounded)


def _large_in_degrees(
    found: Feature, world: World, warp: ModuleType
) -> Iterator[tuple[Feature, Iterable[str]]]:
    """Yield one large object, and the text of its geometry in degrees, in parts.

    Only some corners are in memory at a time, but all of them if the object crosses the
    antimeridian.
    """

    def degrees(ring: Ring) -> Iterator[np.ndarray]:
        return (_degrees(part, world, warp) for part in ring.parts)

    def eastward(ring: Ring) -> Iterator[np.ndarray]:
        shift = _Span(degrees(ring)).shift(found)
        return (part + shift for part in degrees(ring))

    if _Span(degrees(next(iter(found.rings)))).crosses:
        yield from _in_degrees([found], world, warp)
    else:
        yield found, _polygon_text(map(eastward, found.rings), _rounded)


def _degrees(corners: np.ndarray, world: World, warp: ModuleType) -> np.ndarray:
    """Return the longitude and latitude of corners in degrees, (corners, 2).

    ``corners`` (corners, 2) holds columns and rows.
    """
    x, y = corners.T
    return np.stack(warp.transform(world.crs, "EPSG:4326", x, y), 1)


class _Span:
    """Range of the longitudes of a polygon's ring, and whether it crosses the antimeridian.

    Args:
        parts: the corners of the ring in parts, each (corners, 2) longitude and latitude in
            degrees.

    Attributes:
        crosses: True if an edge is longer than 180 degrees, because it crosses the antimeridian.
    """

    def __init__(self, parts: Iterable[np.ndarray]):
        self._turn, self._west, self._east = 0.0, np.inf, -np.inf
        longest, last = 0.0, np.zeros(0)
        for part in parts:
            longitudes = np.append(last, part[:, 0])
            steps = np.diff(longitudes)
            self._turn += (steps - 360 * np.rint(steps / 360)).sum()
            self._west = min(self._west, longitudes.min())
            self._east = max(self._east, longitudes.max())
            longest = max(longest, np.abs(steps).max(initial=0.0))
            last = longitudes[-1:]
        self.crosses = longest > _HALF_CIRCLE

    def shift(self, found: Feature) -> np.ndarray:
        """Return what to add to the ring's corners so that no longitude exceeds 180 degrees, (2,).

        The result holds a longitude and a latitude.

        Args:
            found: the ring's object, for the message.

        Raises:
            ValueError: GeoJSON cannot hold the ring, because it goes around a pole, or because some
                of its longitudes are below 180 and some above.
        """
        around, east, west = abs(self._turn) > _HALF_CIRCLE, self._east, self._west
        if around or (east > _HALF_CIRCLE + _EPSILON and west < _HALF_CIRCLE - _EPSILON):
            what = "goes around a pole" if around else f"has longitudes from {west:g} to {east:g}"
            raise ValueError(
                f"object {found.number} {what}, which GeoJSON cannot hold, because longitudes in "
                "GeoJSON end at 180 degrees: write gpkg, which uses the CRS of the image"
            )
        return np.array([-360.0 if east > _HALF_CIRCLE + _EPSILON else 0.0, 0.0])


def _turned(geometry: dict, found: Feature) -> dict:
    """Return a polygon or multi-polygon with outer rings counter-clockwise and holes clockwise.

    Args:
        geometry: the GeoJSON geometry, which GDAL should have cut at the antimeridian.
        found: the object, for the message.

    Raises:
        ValueError: GDAL has not cut the polygon. This happens if edges that cross the antimeridian
            are long, for example near a pole.
    """
    many = geometry["type"] == "MultiPolygon"
    polygons = geometry["coordinates"] if many else [geometry["coordinates"]]
    if any(np.ptp([x for x, _ in rings[0]]) > _HALF_CIRCLE for rings in polygons):
        raise ValueError(
            f"object {found.number} crosses the antimeridian near a pole, where GDAL does not cut "
            "it: write gpkg, which uses the CRS of the image"
        )
    turned = [
        [_wound(ring, 1 if number == 0 else -1) for number, ring in enumerate(rings)]
        for rings in polygons
    ]
    return {"type": geometry["type"], "coordinates": turned if many else turned[0]}


def _wound(ring: list, sign: int) -> list:
    """Return a closed ring in the given direction, without corners that repeat the one before.

    ``sign`` is 1 for counter-clockwise and -1 for clockwise.
    """
    corners = [tuple(a) for a, b in zip(ring, ring[1:]) if tuple(a) != tuple(b)]
    corners.append(corners[0])
    area = sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(corners, corners[1:]))
    return [list(c) for c in (corners if area * sign >= 0 else corners[::-1])]


def _polygon_text(
    rings: Iterable[Iterable[np.ndarray]], numbers: Callable[[np.ndarray], list]
) -> Iterator[str]:
    """Yield the text of a polygon in GeoJSON, in parts.

    Args:
        rings: the closed rings; each is an iterable of arrays (corners, 2).
        numbers: a function from such an array to the coordinates that are written.
    """
    yield '{"type": "Polygon", "coordinates": '
    begin = "[["
    for ring in rings:
        for part in ring:
            yield begin + json.dumps(numbers(part))[1:-1]
            begin = ", "
        begin = "], ["
    yield "]]}"


def _whole(corners: np.ndarray) -> list:
    """Return corners as whole numbers, or unchanged if they are no whole numbers."""
    whole = corners.astype(np.int64)
    return (whole if (whole == corners).all() else corners).tolist()


def _rounded(corners: np.ndarray) -> list:
    return corners.round(_DIGITS).tolist()
