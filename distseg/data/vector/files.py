"""Files of the objects of a label map: polygons (GeoPackage, GeoJSON) and numbers (TIFF)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distseg.data.formats.georeference import Georeference
from distseg.data.vector.components import Numbers
from distseg.data.vector.features import features
from distseg.data.vector.geojson import check_geojson, write_geojson
from distseg.data.vector.geopackage import write_geopackage
from distseg.data.vector.world import World, world_of

_STRIP = 1 << 16  # pixels that are traced at a time
_READ = 1 << 21  # pixels that are read at a time, if this suffices for the tiles of a file
_MOST_READ = 1 << 25  # most pixels that are read at a time
# The label of pixels that belong to no object. No mask can have this label.
_NO_OBJECT = int(np.iinfo(np.int64).min)
_MOST_OBJECTS = (1 << 32) - 1  # most objects that a raster of uint32 can number
EDGE = 256  # pixels along each side of a TIFF tile


@dataclass(frozen=True)
class LabelMap:
    """Label map (height, width) that is read in rows, and what is needed to write its objects.

    An object is a set of connected pixels of one label.

    Attributes:
        size: (height, width).
        read: a function that takes a slice of rows. It returns the stored labels of these rows,
            (rows, width), and a mask (rows, width) bool, False for pixels that belong to no object.
            The mask is None if all pixels may belong to an object.
        name_of: a function from a label to the name of its class.
        skipped: labels whose pixels belong to no object, such as the label for no data.
        place: georeference of the map; None without one.
        least: objects of fewer pixels get no polygon.
        block_rows: number of rows of a tile or chunk of the file, which is decoded as a whole.
        chosen: labels whose pixels belong to objects; None for all labels.
    """

    size: Sequence[int]
    read: Callable[[slice], tuple[np.ndarray, np.ndarray | None]]
    name_of: Callable[[int], str]
    skipped: tuple[int, ...] = ()
    place: Georeference | None = None
    least: int = 1
    block_rows: int = 1
    chosen: Sequence[int] | None = None

    @property
    def outside(self) -> tuple[int, ...]:
        """Labels that occur in :meth:`strips` and whose pixels belong to no object."""
        return (*self.skipped, _NO_OBJECT)

    def strips(self) -> Iterator[np.ndarray]:
        """Yield the labels in strips of a few rows, (rows, width), from top to bottom.

        Each call yields strips of the same heights. The file is read in bands of whole tiles, so
        that each tile is decoded once. Only if a row of tiles has more than 32 million pixels, a
        tile is decoded several times.
        """
        height, width = self.size
        rows, band = max(1, _STRIP // width), self._band_rows()
        for top in range(0, height, band):
            labels, inside = self.read(slice(top, min(top + band, height)))
            for row in range(0, len(labels), rows):
                part = slice(row, row + rows)
                yield self._strip(labels[part], None if inside is None else inside[part])

    def _band_rows(self) -> int:
        """Return how many rows to read at a time: whole tiles, unless these are too large."""
        width, block = self.size[1], self.block_rows
        least = max(1, _READ // width)
        if block * width > _MOST_READ:
            return least
        return -(-least // block) * block

    def _strip(self, labels: np.ndarray, inside: np.ndarray | None) -> np.ndarray:
        """Return the labels of a strip, with ``_NO_OBJECT`` where pixels belong to no object.

        Args:
            labels: the stored labels, (rows, width).
            inside: (rows, width) bool, False for pixels that belong to no object; None if all
                pixels may belong to one.
        """
        if self.chosen is not None:
            wanted = np.isin(labels, np.asarray(self.chosen))
            inside = wanted if inside is None else inside & wanted
        return labels if inside is None else np.where(inside, labels.astype(np.int64), _NO_OBJECT)


def check_polygons(place: Georeference | None, form: str, name: str) -> None:
    """Raise an error if polygons of a class map cannot be written in the format ``form``.

    Args:
        place: the georeference of the class map; None without one.
        form: ``gpkg`` or ``geojson``.
        name: the name of the class map, for messages.

    Raises:
        ValueError: the georeference has no affine transform, its CRS cannot be read, it has no CRS
            and the format is geojson, or rasterio is needed and not installed.
    """
    world = _world(place, form, name)
    if form == "geojson":
        check_geojson(world, name)


def _world(place: Georeference | None, form: str, name: str) -> World:
    """Return the georeference in whose coordinates the polygons of a class map are written.

    In a GeoJSON file of a microscope image, coordinates are columns and rows of pixels, as QuPath
    and similar programs expect. In all other files, they are those of the georeference ``place``.
    """
    pixels = form == "geojson" and place is not None and place.of_voxels
    return world_of(None if pixels else place, name)


def write_polygons(path: Path, labels: LabelMap, form: str, identity: str) -> int:
    """Write the objects of a label map as polygons; return the number of objects written.

    Args:
        path: an empty file, which is overwritten.
        labels: the label map.
        form: ``gpkg`` or ``geojson``.
        identity: a text to store in the file, which tells later runs what the file was made from.
    """
    world = _world(labels.place, form, path.name)
    found = features(
        labels.strips, labels.size, labels.name_of, world, labels.outside, labels.least, path.parent
    )
    write = write_geojson if form == "geojson" else write_geopackage
    return write(path, found, world, identity)


def write_numbers(path: Path, labels: LabelMap, about: str) -> int:
    """Write a TIFF in which each pixel has the number of its object; return how many there are.

    The TIFF is tiled, uint32, and 0 outside all objects. Files of polygons (GeoPackage, GeoJSON)
    have the same numbers in the attribute ``object``.

    Args:
        path: an empty file, which is overwritten.
        labels: the label map.
        about: the text of the file's description.

    Raises:
        ValueError: uint32 cannot hold the number of the last object.
    """
    import tifffile

    height, width = labels.size
    numbers = Numbers(labels.strips(), width, labels.outside, path.parent)
    if numbers.count > _MOST_OBJECTS:
        raise ValueError(
            f"{path} can hold numbers for at most {_MOST_OBJECTS} objects, but there are more: "
            "write polygons (gpkg) instead"
        )
    tifffile.imwrite(
        path,
        tiles(numbers.drawn(labels.strips()), width, np.uint32),
        shape=(height, width),
        dtype=np.uint32,
        tile=(EDGE, EDGE),
        compression="deflate",
        predictor=2,
        bigtiff=4 * height * width > 2**31,
        photometric="minisblack",
        description=about,
        metadata=None,
        extratags=[
            (42113, 2, 0, "0", True),  # GDAL's number for no data
            *(labels.place.extra_tags if labels.place else ()),
        ],
    )
    return numbers.count


def tiles(strips: Iterator[np.ndarray], width: int, dtype) -> Iterator[np.ndarray]:
    """Yield the TIFF tiles (EDGE, EDGE) of a map, row by row; pixels beyond the map are 0.

    Args:
        strips: strips (rows, width) of the map, of any heights.
        width: number of columns.
        dtype: dtype of the tiles.
    """
    band = np.zeros((EDGE, -(-width // EDGE) * EDGE), dtype)
    filled = 0

    def cut() -> Iterator[np.ndarray]:
        for left in range(0, band.shape[1], EDGE):
            yield np.ascontiguousarray(band[:, left : left + EDGE])

    for strip in strips:
        begin = 0
        while begin < len(strip):
            count = min(EDGE - filled, len(strip) - begin)
            band[filled : filled + count, :width] = strip[begin : begin + count]
            begin, filled = begin + count, filled + count
            if filled == EDGE:
                yield from cut()
                band[:] = 0
                filled = 0
    if filled:
        yield from cut()
