"""Write polygons as GeoJSON: in longitude and latitude of WGS 84, as RFC 7946 wants."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from distseg.data.vector.features import Feature
from distseg.data.vector.world import World, imported_rasterio

_DIGITS = 8  # of degrees, about a millimetre
_BATCH = 4096  # objects whose corners are transformed at a time
_HALF_CIRCLE = 180.0  # degrees; a longer edge crosses the antimeridian
_IDENTITY = re.compile(rb'"distseg_identity": "([0-9a-f]*)"')
_HEAD = 4096  # bytes that are searched for the identity


def check_geojson(world: World, name: str) -> None:
    """Raise an error if a map's objects cannot be written in longitude and latitude.

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
    """Write objects as a feature collection, a line each, and return their number.

    Without a georeference x is the column and y the row of a corner.

    Args:
        path: the file.
        features: the objects.
        world: where the pixels lie.
        identity: a text that :func:`identity_in_geojson` finds again.
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
    """Return the identity in a GeoJSON file that distseg wrote; None for others."""
    with open(path, "rb") as file:
        found = _IDENTITY.search(file.read(_HEAD))
    return found[1].decode() if found else None


def _in_degrees(features: Iterable[Feature], world: World) -> Iterator[tuple[Feature, dict]]:
    """Yield each object and its geometry."""
    if world.crs is None:
        for found in features:
            yield found, _polygon([_numbers(ring) for ring in found.rings])
        return
    warp = imported_rasterio("GeoJSON in WGS 84").warp
    rest = iter(features)
    while batch := list(islice(rest, _BATCH)):
        rings = [ring for found in batch for ring in found.rings]
        corners = np.concatenate(rings)
        degrees = np.stack(warp.transform(world.crs, "EPSG:4326", corners[:, 0], corners[:, 1]), 1)
        parts = iter(np.split(degrees, np.cumsum([len(ring) for ring in rings])[:-1]))
        for found in batch:
            turned = [next(parts) for _ in found.rings]
            if np.abs(np.diff(turned[0][:, 0])).max() > _HALF_CIRCLE:
                plain = _polygon([ring.tolist() for ring in found.rings])
                yield (
                    found,
                    warp.transform_geom(
                        world.crs, "EPSG:4326", plain, antimeridian_cutting=True, precision=_DIGITS
                    ),
                )
            else:
                yield found, _polygon([ring.round(_DIGITS).tolist() for ring in turned])


def _numbers(ring: np.ndarray) -> list:
    whole = ring.astype(np.int64)
    return (whole if (whole == ring).all() else ring).tolist()


def _polygon(rings: list) -> dict:
    return {"type": "Polygon", "coordinates": rings}
