"""Write polygons as GeoJSON: in longitude and latitude of WGS 84, as RFC 7946 demands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from distseg.data.packages import optional
from distseg.data.vector.features import Feature
from distseg.data.vector.world import World

_DIGITS = 8  # decimals of degrees; the last one is about a millimetre
_BATCH = 4096  # objects whose corners are transformed at a time
_HALF_CIRCLE = 180.0  # degrees; a longer edge crosses the antimeridian
_EPSILON = 1e-9  # degrees
_IDENTITY = re.compile(rb'"distseg_identity": "([0-9a-f]*)"')
_HEAD = 4096  # bytes that are searched for the identity


def check_geojson(world: World, name: str) -> None:
    """Raise an error if a map's objects cannot be written in longitude and latitude.

    Args:
        world: the coordinates of the map's pixels.
        name: the map's name, for the message.

    Raises:
        ValueError: the map has a transform, but no CRS.
    """
    if world.placed and world.crs is None:
        raise ValueError(
            f"{name} has a transform but names no CRS, so its longitudes and latitudes, which "
            "GeoJSON holds, are unknown: write gpkg, or name the CRS in the image (gdal_edit.py "
            "-a_srs EPSG:...)"
        )


def write_geojson(path: Path, features: Iterable[Feature], world: World, identity: str) -> int:
    """Write objects as a feature collection, one object per line; return the number of objects.

    Without a CRS, the coordinates of a corner are its column and row instead of degrees.

    Args:
        path: the file.
        features: the objects.
        world: the coordinates of the map's pixels.
        identity: a text to store in the file, which :func:`identity_in_geojson` reads.
    """
    head = {"type": "FeatureCollection", "name": "objects", "distseg_identity": identity}
    if world.crs is None:
        head["coordinates"] = "pixels: column, row"
    count = 0
    with open(path, "w", encoding="ascii") as file:
        file.write(json.dumps(head)[:-1] + ', "features": [')
        for found, geometry in _in_degrees(features, world):
            about = {
                "object": found.number,
                "class": found.label,
                "name": found.name,
                "pixels": found.pixels,
                "area_m2": found.area,
            }
            feature = {
                "type": "Feature",
                "id": found.number,
                "properties": about,
                "geometry": geometry,
            }
            file.write(("," if count else "") + "\n" + json.dumps(feature))
            count += 1
        file.write("\n]}\n")
    return count


def identity_in_geojson(path: Path) -> str | None:
    """Return the identity text in a GeoJSON file that distseg wrote; None for other files."""
    with open(path, "rb") as file:
        found = _IDENTITY.search(file.read(_HEAD))
    return found[1].decode() if found else None


def _in_degrees(features: Iterable[Feature], world: World) -> Iterator[tuple[Feature, dict]]:
    """Yield each object and its GeoJSON geometry, in degrees, or in pixels without a CRS."""
    if world.crs is None:
        for found in features:
            yield found, _polygon([_numbers(ring) for ring in found.rings])
        return
    warp = optional("GeoJSON in WGS 84", "rasterio", "warp").warp
    rest = iter(features)
    while batch := list(islice(rest, _BATCH)):
        rings = [ring for found in batch for ring in found.rings]
        corners = np.concatenate(rings)
        degrees = np.stack(warp.transform(world.crs, "EPSG:4326", corners[:, 0], corners[:, 1]), 1)
        parts = iter(np.split(degrees, np.cumsum([len(ring) for ring in rings])[:-1]))
        for found in batch:
            turned = [_eastward(next(parts), found) for _ in found.rings]
            if np.abs(np.diff(turned[0][:, 0])).max() > _HALF_CIRCLE:
                plain = _polygon([ring.tolist() for ring in found.rings])
                cut = warp.transform_geom(
                    world.crs, "EPSG:4326", plain, antimeridian_cutting=True, precision=_DIGITS
                )
                yield found, _turned(cut, found)
            else:
                yield found, _polygon([ring.round(_DIGITS).tolist() for ring in turned])


def _eastward(ring: np.ndarray, found: Feature) -> np.ndarray:
    """Return a ring with longitudes up to 180: if its longitudes are above, subtract 360.

    Args:
        ring: (corners, 2) longitude and latitude in degrees.
        found: the object, for the message.

    Raises:
        ValueError: GeoJSON cannot hold the ring, because it goes around a pole, or because some of
            its longitudes are below 180 and some above.
    """
    steps = np.diff(ring[:, 0])
    around = abs((steps - 360 * np.rint(steps / 360)).sum()) > _HALF_CIRCLE
    east, west = ring[:, 0].max(), ring[:, 0].min()
    if around or (east > _HALF_CIRCLE + _EPSILON and west < _HALF_CIRCLE - _EPSILON):
        what = "goes around a pole" if around else f"has longitudes from {west:g} to {east:g}"
        raise ValueError(
            f"object {found.number} {what}, which GeoJSON cannot hold, because longitudes in "
            "GeoJSON end at 180 degrees: write gpkg, which uses the CRS of the image"
        )
    return ring - [360.0, 0.0] if east > _HALF_CIRCLE + _EPSILON else ring


def _turned(geometry: dict, found: Feature) -> dict:
    """Return a (multi-)polygon with outer rings counter-clockwise and holes clockwise.

    Args:
        geometry: the GeoJSON geometry, which GDAL should have cut at the antimeridian.
        found: the object, for the message.

    Raises:
        ValueError: GDAL has not cut the polygon. This happens if its edges across the antimeridian
            are long, as near a pole.
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
    """Return a ring without repeated corners, in the direction that ``sign`` says.

    ``sign`` is 1 for counter-clockwise and -1 for clockwise. The ring is closed.
    """
    corners = [tuple(a) for a, b in zip(ring, ring[1:]) if tuple(a) != tuple(b)]
    corners.append(corners[0])
    area = sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(corners, corners[1:]))
    return [list(c) for c in (corners if area * sign >= 0 else corners[::-1])]


def _numbers(ring: np.ndarray) -> list:
    whole = ring.astype(np.int64)
    return (whole if (whole == ring).all() else ring).tolist()


def _polygon(rings: list) -> dict:
    return {"type": "Polygon", "coordinates": rings}
