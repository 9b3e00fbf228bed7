"""Write polygons as a GeoPackage: an SQLite file with tables that the OGC defines (version 1.3.1).

https://www.geopackage.org/spec131/
"""

from __future__ import annotations

import errno
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from distseg.data.vector.features import Feature, Ring
from distseg.data.vector.world import World

_APPLICATION, _VERSION = 0x47504B47, 10301  # ids of SQLite files: "GPKG", and version 1.3.1
_OWN_CRS = 100_000  # srs_id of a CRS without an EPSG code
_CHANGED = "1970-01-01T00:00:00.000Z"  # a fixed time, so that equal results are equal files
_BATCH = 1 << 20  # bytes of rows that are inserted at a time, and of a geometry's part in memory
_ROW = 100  # bytes of a row beside its geometry, roughly
_LARGEST = 1_000_000_000  # bytes of a value that SQLite can hold
_IDENTITY = "distseg_identity "

_TABLES = """
CREATE TABLE gpkg_spatial_ref_sys (srs_name TEXT NOT NULL, srs_id INTEGER NOT NULL PRIMARY KEY,
    organization TEXT NOT NULL, organization_coordsys_id INTEGER NOT NULL,
    definition TEXT NOT NULL, description TEXT);
CREATE TABLE gpkg_contents (table_name TEXT NOT NULL PRIMARY KEY, data_type TEXT NOT NULL,
    identifier TEXT UNIQUE, description TEXT DEFAULT '', last_change DATETIME NOT NULL,
    min_x DOUBLE, min_y DOUBLE, max_x DOUBLE, max_y DOUBLE, srs_id INTEGER,
    CONSTRAINT fk_gc_r_srs_id FOREIGN KEY (srs_id) REFERENCES gpkg_spatial_ref_sys(srs_id));
CREATE TABLE gpkg_geometry_columns (table_name TEXT NOT NULL, column_name TEXT NOT NULL,
    geometry_type_name TEXT NOT NULL, srs_id INTEGER NOT NULL, z TINYINT NOT NULL,
    m TINYINT NOT NULL, CONSTRAINT pk_geom_cols PRIMARY KEY (table_name, column_name),
    CONSTRAINT uk_gc_table_name UNIQUE (table_name),
    CONSTRAINT fk_gc_tn FOREIGN KEY (table_name) REFERENCES gpkg_contents(table_name),
    CONSTRAINT fk_gc_srs FOREIGN KEY (srs_id) REFERENCES gpkg_spatial_ref_sys (srs_id));
CREATE TABLE objects (fid INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL,
    object INTEGER, class INTEGER, name TEXT, pixels INTEGER, area_m2 REAL, geom POLYGON);
"""
_WGS84 = (
    'GEOGCS["WGS 84",DATUM["WGS_1984",SPHEROID["WGS 84",6378137,298.257223563,'
    'AUTHORITY["EPSG","7030"]],AUTHORITY["EPSG","6326"]],PRIMEM["Greenwich",0,'
    'AUTHORITY["EPSG","8901"]],UNIT["degree",0.0174532925199433,AUTHORITY["EPSG","9122"]],'
    'AUTHORITY["EPSG","4326"]]'
)
# The geometry is the last column, so that SQLite can reserve its bytes without holding them.
_INSERT = "INSERT INTO objects (object,class,name,pixels,area_m2,geom) VALUES (?,?,?,?,?,{})"
_REQUIRED_CRS = [
    ("Undefined cartesian SRS", -1, "NONE", -1, "undefined", None),
    ("Undefined geographic SRS", 0, "NONE", 0, "undefined", None),
    ("WGS 84 geodetic", 4326, "EPSG", 4326, _WGS84, None),
]


def write_geopackage(path: Path, features: Iterable[Feature], world: World, identity: str) -> int:
    """Write objects into the layer ``objects`` of a new GeoPackage; return the number of objects.

    Args:
        path: an empty file.
        features: the objects.
        world: the georeference of the class map; the layer gets its CRS.
        identity: a text to store in the file, which :func:`identity_in_geopackage` reads.
    """
    with _disk_errors(), closing(sqlite3.connect(path, isolation_level=None)) as file:
        # The file is written under a temporary name, so it needs no journal.
        file.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
        file.executescript(
            f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version={_VERSION}"
        )
        file.execute("BEGIN")
        for statement in _TABLES.split(";"):
            file.execute(statement)
        file.executemany("INSERT INTO gpkg_spatial_ref_sys VALUES (?,?,?,?,?,?)", _REQUIRED_CRS)
        crs = _crs_of(file, world)
        file.execute(
            "INSERT INTO gpkg_contents VALUES ('objects','features','objects',?,?,0,0,0,0,?)",
            (_IDENTITY + identity, _CHANGED, crs),
        )
        file.execute(
            "INSERT INTO gpkg_geometry_columns VALUES ('objects','geom','POLYGON',?,0,0)", (crs,)
        )
        count, bounds = _insert(file, features, crs)
        file.execute("UPDATE gpkg_contents SET min_x=?, min_y=?, max_x=?, max_y=?", bounds)
        file.execute("COMMIT")
    return count


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Convert SQLite's errors of a full disk, in a ``with`` block, to an OSError with ENOSPC."""
    try:
        yield
    except sqlite3.OperationalError as e:
        code = getattr(e, "sqlite_errorcode", 0) & 0xFF
        if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise
        raise OSError(
            errno.ENOSPC, f"the disk is full, or files may not grow so large ({e})"
        ) from e


def identity_in_geopackage(path: Path) -> str | None:
    """Return the identity text in a GeoPackage that distseg wrote; None for other files."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as file:
        rows = file.execute("SELECT description FROM gpkg_contents").fetchall()
    found = [row[0] for row in rows if isinstance(row[0], str) and row[0].startswith(_IDENTITY)]
    return found[0].removeprefix(_IDENTITY) if len(rows) == len(found) == 1 else None


def _crs_of(file: sqlite3.Connection, world: World) -> int:
    """Return the srs_id of the layer's CRS, and add this CRS to the file if it is not WGS 84.

    Without a CRS, return -1, GeoPackage's srs_id of undefined cartesian coordinates.
    """
    if world.crs is None:
        return -1
    number = world.epsg or _OWN_CRS
    if number != 4326:
        organization = "EPSG" if world.epsg else "NONE"
        text = world.crs.to_wkt()
        name = text.split('"')[1] if '"' in text else "CRS"
        file.execute(
            "INSERT INTO gpkg_spatial_ref_sys VALUES (?,?,?,?,?,?)",
            (name, number, organization, number, text, None),
        )
    return number


def _insert(
    file: sqlite3.Connection, features: Iterable[Feature], crs: int
) -> tuple[int, tuple[float | None, ...]]:
    """Insert objects into a GeoPackage; return their number and their extent.

    The extent is (smallest x, smallest y, largest x, largest y), or four times None if there are
    no objects.

    Args:
        file: the GeoPackage.
        features: the objects.
        crs: the srs_id of the layer.
    """
    count, low, high = 0, np.full(2, np.inf), np.full(2, -np.inf)
    rows = _Rows(file)
    for found in features:
        at, to = _bounds(next(iter(found.rings)))
        low, high = np.minimum(low, at), np.maximum(high, to)
        rows.add(found, _header(crs, at, to))
        count += 1
    rows.flush()
    return count, (*low, *high) if count else (None,) * 4


class _Rows:
    """Writer of the rows of a GeoPackage's layer, one row per object, inserted in batches.

    Args:
        file: the GeoPackage.
    """

    def __init__(self, file: sqlite3.Connection):
        self._file = file
        self._rows: list[tuple] = []
        self._bytes = 0  # bytes of the geometries of the rows

    def add(self, found: Feature, header: bytes) -> None:
        """Add the row of an object, whose geometry begins with ``header``.

        A large geometry is written in parts, so that it need not fit into memory. Python 3.10
        cannot do this and holds it as a whole.

        Raises:
            ValueError: the geometry has more bytes than SQLite can hold.
        """
        size = len(header) + _polygon_size(found)
        if size > _LARGEST:
            raise ValueError(
                f"object {found.number} ({found.name}, {found.pixels:,} pixels) has an outline of "
                f"{found.counts[1]:,} corners, {size:,} bytes, but a GeoPackage holds at "
                f"most {_LARGEST:,} bytes an object: write geojson, or leave out its class "
                "(predict.trace of 'distseg predict', --classes of 'distseg trace')"
            )
        about = (found.number, found.label, found.name, found.pixels, found.area)
        if size > _BATCH and hasattr(self._file, "blobopen"):
            self.flush()
            row = self._file.execute(_INSERT.format("zeroblob(?)"), (*about, size)).lastrowid
            with self._file.blobopen("objects", "geom", row) as geometry:
                for part in chain([header], _polygon_parts(found)):
                    geometry.write(part)
            return
        self._rows.append((*about, header + b"".join(_polygon_parts(found))))
        self._bytes += size + _ROW
        if self._bytes > _BATCH:
            self.flush()

    def flush(self) -> None:
        """Insert all rows that were added but not yet inserted."""
        self._file.executemany(_INSERT.format("?"), self._rows)
        self._rows.clear()
        self._bytes = 0


def _bounds(ring: Ring) -> tuple[np.ndarray, np.ndarray]:
    """Return (smallest x, smallest y) and (largest x, largest y) of a ring."""
    ends = [(part.min(0), part.max(0)) for part in ring.parts]
    return np.min([low for low, _ in ends], 0), np.max([high for _, high in ends], 0)


def _header(crs: int, low: np.ndarray, high: np.ndarray) -> bytes:
    """Return the header of a geometry in a GeoPackage: little-endian, with its extent.

    Args:
        crs: the srs_id of the layer.
        low: (smallest x, smallest y) of the geometry.
        high: (largest x, largest y) of the geometry.
    """
    return struct.pack("<2sBBi4d", b"GP", 0, 0b11, crs, low[0], high[0], low[1], high[1])


def _polygon_size(found: Feature) -> int:
    """Return the number of bytes of an object's polygon as well-known binary."""
    rings, corners = found.counts
    return 9 + 4 * rings + 16 * corners


def _polygon_parts(found: Feature) -> Iterator[bytes]:
    """Yield an object's polygon as little-endian well-known binary, in parts."""
    yield struct.pack("<BII", 1, 3, found.counts[0])
    for ring in found.rings:
        yield struct.pack("<I", ring.corners)
        for part in ring.parts:
            yield np.ascontiguousarray(part, "<f8").tobytes()
