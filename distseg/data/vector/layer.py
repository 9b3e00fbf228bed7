"""Read polygons with their classes from a vector file: GeoJSON, GeoPackage, shapefile, FlatGeobuf.

The polygons of a file are in memory as arrays of corners. Files are opened only if their first
bytes are those of one of these formats. GDAL also knows formats that refer to other files and
addresses, and a file from elsewhere must not make it read these.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from distseg.data.packages import optional
from distseg.data.vector.corners import Polygons, polygons_of

# Endings of vector files that a folder of masks may hold.
VECTOR_SUFFIXES = (".geojson", ".gpkg", ".shp", ".fgb")
_FARTHEST = 1e9  # largest coordinate; farther corners would be drawn wrong
_DRIVERS = ("GeoJSON", "GPKG", "ESRI Shapefile", "FlatGeobuf")
_MAGIC = {".gpkg": b"SQLite format 3\0", ".shp": b"\0\0\x27\x0a", ".fgb": b"fgb"}
_HEAD = 1024  # bytes of a GeoJSON file that may come before its first brace
_POLYGON, _MULTIPOLYGON, _NOTHING = 3, 6, -1  # numbers of shapely's geometry types
_MOST = np.iinfo(np.int32).max  # largest value that a polygon can give to its pixels


@dataclass(frozen=True)
class ValueRule:
    """Rule for the value, usually a class number, that a polygon writes into its pixels.

    Pixels outside of all polygons have the value 0.

    Attributes:
        attribute: the name of the attribute that holds a feature's class. It holds a name of
            ``labels``, which stands for a value, or a number, which is the value itself. None
            gives every polygon the value 1.
        labels: pairs (name, value). A name may have the digits of a number, such as ``12``.
        numbered: True to give the polygons of each feature their own number: 1, 2 and so on.
    """

    attribute: str | None = None
    labels: tuple[tuple[str, int], ...] = ()
    numbered: bool = False


@dataclass(frozen=True)
class Layer:
    """Polygons of a vector file.

    Attributes:
        path: the file.
        polygons: the polygons, in the coordinates of ``crs``.
        crs: rasterio's CRS of the corners; None if the file names none.
        notes: warnings about the file; each is the rest of a sentence that begins with its name.
    """

    path: Path
    polygons: Polygons
    crs: Any
    notes: tuple[str, ...]

    @property
    def bounds(self) -> tuple[float, ...]:
        """The smallest x, smallest y, largest x and largest y of all polygons, in this order."""
        low, high = self.polygons.bounds[:, :2].min(0), self.polygons.bounds[:, 2:].max(0)
        return tuple(float(n) for n in (*low, *high))


def read_layer(path: Path, rule: ValueRule) -> Layer:
    """Return the polygons of a vector file. The polygons of the last file read are cached.

    Args:
        path: the file.
        rule: the rule that gives each polygon its value, such as a class number.

    Raises:
        ValueError: a package is missing, the file cannot be read, it holds other geometries than
            polygons, or a feature has no class.
    """
    found = os.stat(path)
    return _read(path, rule, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, rule: ValueRule, size: int, changed: int) -> Layer:
    """Return the polygons of a vector file for :func:`read_layer`, from the cache if possible.

    ``size`` in bytes and ``changed``, the time of change, are part of the cache's key. So a file
    that replaces another under the same name is read again.
    """
    pyogrio, shapely = imported_packages(path)
    _check_format(path)
    try:
        name = _layer_name(path, pyogrio)
        about = pyogrio.read_info(path.resolve(), layer=name)
        if about["driver"] not in _DRIVERS:
            raise ValueError(
                f"{path} is a file of GDAL's format {about['driver']}, which is not read: write it "
                "again as GeoJSON or GeoPackage (ogr2ogr labels.gpkg FILE)"
            )
        check_attribute(path, rule, [str(field) for field in about["fields"]])
        meta, numbers, geometries, columns = pyogrio.raw.read(
            path.resolve(),
            layer=name,
            columns=[] if rule.attribute is None else [rule.attribute],
            force_2d=True,
            return_fids=True,
        )
        shapes = shapely.from_wkb(geometries)
    except (pyogrio.errors.DataSourceError, pyogrio.errors.DataLayerError) as e:
        raise ValueError(f"{path} cannot be read as vectors ({e}): write it again") from e
    except shapely.errors.ShapelyError as e:
        raise ValueError(
            f"{path} has a geometry that cannot be read ({e}): write it again, with straight edges"
        ) from e
    rasterio = optional(path, "rasterio", "crs")
    crs = None if meta["crs"] is None else rasterio.crs.CRS.from_user_input(meta["crs"])
    return layer_of(path, rule, shapes, numbers, columns[0] if columns else None, crs)


def layer_of(
    path: Path,
    rule: ValueRule,
    shapes: np.ndarray,
    numbers: np.ndarray,
    column: np.ndarray | None,
    crs: Any,
) -> Layer:
    """Return the features of a vector file as polygons with values.

    Args:
        path: the file.
        rule: the rule that gives each polygon its value, such as a class number.
        shapes: shapely's geometries, (features,).
        numbers: the number of each feature in the file, (features,).
        column: the value of the rule's attribute for each feature, (features,); None if the rule
            has no attribute.
        crs: rasterio's CRS of the corners; None without one.

    Raises:
        ValueError: a geometry is no polygon, or a feature has no class.
    """
    _, shapely = imported_packages(path)
    kinds = shapely.get_type_id(shapes)
    there = (kinds != _NOTHING) & ~shapely.is_empty(shapes)
    _check_kinds(path, shapes[there], kinds[there], numbers[there])
    notes = _notes(shapes[there], numbers[there], int((~there).sum()), shapely)
    column = None if column is None else column[there]
    values = _values(path, rule, column, numbers[there])
    polygons = polygons_of(shapes[there], values, numbers[there], shapely)
    _check_finite(path, polygons)
    return Layer(path, polygons, crs, notes)


def imported_packages(path: Path) -> tuple[Any, Any]:
    """Return the modules pyogrio and shapely, and check that rasterio is installed too.

    All three are optional packages.

    Args:
        path: the vector file that is to be read, for the message.

    Raises:
        ValueError: one of the three is not installed; the message names the line that installs it.
    """
    optional(path, "rasterio", "features")
    return optional(path, "pyogrio", "errors"), optional(path, "shapely", "errors")


def is_vector(path: Path) -> bool:
    """Return True if the file has the ending of a vector file, such as ``.shp`` or ``.json``."""
    return path.suffix.lower() in (*VECTOR_SUFFIXES, ".json")


def _check_format(path: Path) -> None:
    """Refuse a file whose first bytes are not those of the format that its ending names.

    Raises:
        ValueError: the file has another format.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    suffix = path.suffix.lower()
    if suffix in _MAGIC:
        fits = head.startswith(_MAGIC[suffix])
    else:
        fits = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
    if not fits:
        raise ValueError(
            f"{path} does not begin as a file with the ending {suffix} does: it is damaged or has "
            "another format; write it again as GeoJSON or GeoPackage (ogr2ogr labels.gpkg FILE)"
        )


def _layer_name(path: Path, pyogrio: Any) -> str:
    """Return the name of the only layer with geometries in a vector file.

    Raises:
        ValueError: the file has several such layers, or none.
    """
    names = [str(name) for name, kind in pyogrio.list_layers(path.resolve()) if kind is not None]
    if len(names) != 1:
        has = f"the layers {', '.join(names)}" if names else "no layer with geometries"
        raise ValueError(
            f"{path} has {has}, but labels must be one layer: write this layer into a file of its "
            f"own, such as with 'ogr2ogr labels.gpkg {path.name} LAYER'"
        )
    return names[0]


def check_attribute(path: Path, rule: ValueRule, fields: Sequence[str]) -> None:
    """Refuse a rule for values that does not fit the attributes of a vector file.

    Args:
        path: the file, for the message.
        rule: the rule.
        fields: the names of the attributes in the file.

    Raises:
        ValueError: the rule's attribute does not exist, or there are several classes of polygons
            and no attribute to distinguish them.
    """
    known = f"its features have the attributes {', '.join(fields)}" if fields else "it has none"
    if rule.attribute is not None and rule.attribute not in fields:
        raise ValueError(
            f"--attribute is {rule.attribute}, but {path} has no such attribute ({known}): name "
            "one of its attributes, or leave --attribute out if there is one class of polygons"
        )
    if rule.attribute is None and not rule.numbered and len(rule.labels) > 2:
        raise ValueError(
            f"--classes names {len(rule.labels)} classes, but without --attribute all polygons of "
            f"{path} are one class, {rule.labels[1][0]}: set --attribute to the attribute that "
            f"holds the class ({known}), or give two classes"
        )


def _check_kinds(path: Path, shapes: np.ndarray, kinds: np.ndarray, numbers: np.ndarray) -> None:
    """Refuse geometries that are no polygons.

    Args:
        path: the file, for the message.
        shapes: shapely's geometries, (features,).
        kinds: shapely's type number of each geometry, (features,).
        numbers: the number of each feature in the file, (features,).

    Raises:
        ValueError: a geometry is no polygon; the message names the first such feature.
    """
    others = ~np.isin(kinds, (_POLYGON, _MULTIPOLYGON))
    if others.any():
        first = int(np.flatnonzero(others)[0])
        raise ValueError(
            f"feature {numbers[first]} of {path} is a {shapes[first].geom_type} ({others.sum()} of "
            f"{len(shapes)} features are no polygons), which covers no pixels: make polygons of "
            "points and lines (buffer them by their width, such as with QGIS or geopandas' "
            "'buffer'), or remove these features"
        )


def _notes(shapes: np.ndarray, numbers: np.ndarray, skipped: int, shapely: Any) -> tuple[str, ...]:
    """Return warnings about features without geometry and about invalid or overlapping polygons.

    Each is the rest of a sentence that begins with the file's name.

    Args:
        shapes: shapely's geometries, (features,).
        numbers: the number of each feature in the file, (features,).
        skipped: number of features without geometry.
        shapely: the module.
    """
    notes = []
    if skipped:
        notes.append(f"has {skipped} features without geometry, which cover no pixel")
    polygons, of_feature = shapely.get_parts(shapes, return_index=True)
    crossed = np.zeros(len(shapes), bool)
    crossed[of_feature[~shapely.is_valid(polygons)]] = True
    if crossed.any():
        notes.append(
            f"has polygons that are not valid, in {_listed(shapes, numbers, crossed, shapely)}: "
            "pixels inside an even number of rings of a polygon are outside of it"
        )
    joined = ~shapely.is_valid(shapes) & ~crossed
    if joined.any():
        notes.append(
            "has polygons that overlap others of the same feature, in "
            f"{_listed(shapes, numbers, joined, shapely)}: they are joined, and one inside another "
            "is no hole"
        )
    return tuple(notes)


def _listed(shapes: np.ndarray, numbers: np.ndarray, wrong: np.ndarray, shapely: Any) -> str:
    """Return a text that names the first invalid features with their faults, and counts the rest.

    Args:
        shapes: shapely's geometries, (features,).
        numbers: the number of each feature in the file, (features,).
        wrong: (features,) bool, True for the invalid features.
        shapely: the module.
    """
    named = [
        f"{number} ({shapely.is_valid_reason(shape)})"
        for number, shape in zip(numbers[wrong][:3], shapes[wrong][:3])
    ]
    more = f" and {wrong.sum() - 3} more" if wrong.sum() > 3 else ""
    return f"feature{'s' * (len(named) > 1)} {', '.join(named)}{more}"


def _values(
    path: Path, rule: ValueRule, column: np.ndarray | None, numbers: np.ndarray
) -> np.ndarray:
    """Return the value that each feature's polygons get, (features,) int64.

    Args:
        path: the file, for the message.
        rule: the rule for the values.
        column: the value of the rule's attribute for each feature, (features,); None if the rule
            has no attribute.
        numbers: the number of each feature in the file, (features,).

    Raises:
        ValueError: a feature has no class.
    """
    if rule.numbered:
        return np.arange(1, len(numbers) + 1)
    if column is None:
        return np.ones(len(numbers), np.int64)
    labels = dict(rule.labels)
    found = [_value(text, labels) for text in column.tolist()]
    wrong = [at for at, value in enumerate(found) if value is None]
    if wrong:
        strange = list(dict.fromkeys(repr(column.tolist()[at]) for at in wrong))
        names = ", ".join(strange[:8]) + f" and {len(strange) - 8} more" * (len(strange) > 8)
        raise ValueError(
            f"feature {numbers[wrong[0]]} of {path} has the attribute {rule.attribute} "
            f"{strange[0]}, which is no class of --classes ({', '.join(labels)}); {len(wrong)} "
            f"features have such values: {names}. Name these classes in --classes, say which label "
            f"they stand for (--values=NAME=0), or remove these features (ogr2ogr -where)"
        )
    return np.array(found, np.int64)


def _value(given: Any, labels: dict[str, int]) -> int | None:
    """Return the class number that an attribute of a feature stands for; None if it is invalid.

    Args:
        given: the attribute as the file holds it: a text, a number or None. A whole number that is
            no name in ``labels`` is itself the result.
        labels: the class number of each name.
    """
    if isinstance(given, str) and given in labels:
        return labels[given]
    try:
        number = float(given)
    except (TypeError, ValueError):
        return None
    if not number.is_integer() or abs(number) > _MOST:
        return None
    return labels.get(str(int(number)), int(number))


def _check_finite(path: Path, polygons: Polygons) -> None:
    """Refuse polygons with coordinates that are not finite, or too large to be drawn.

    Raises:
        ValueError: a coordinate is refused; the message names the first feature with one.
    """
    endless = ~(np.abs(polygons.corners) <= _FARTHEST).all(1)
    if endless.any():
        ring = np.searchsorted(polygons.rings, np.flatnonzero(endless)[0], "right") - 1
        part = np.searchsorted(polygons.parts, ring, "right") - 1
        raise ValueError(
            f"feature {polygons.features[part]} of {path} has a corner that is not a "
            f"finite number up to {_FARTHEST:g}: correct or remove this feature"
        )
