"""Read images and volumes of OME-Zarr folders (NAME.ome.zarr, NAME.zarr), box by box."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distseg.data.formats.base import Reader, plain
from distseg.data.formats.georeference import Georeference, of_matrix
from distseg.data.formats.ngff import Multiscale, multiscale_in
from distseg.data.formats.zarr_arrays import ChunkedArray, count_chunks, metadata_in, stored_in
from distseg.tiling.tile import Box

SUFFIXES = (".ome.zarr", ".zarr")
_MARKS = ("zarr.json", ".zgroup", ".zarray")
KEPT = "distseg"  # the attribute in which class maps keep what OME-NGFF has no place for


def is_zarr_folder(path: Path) -> bool:
    """Return True if a folder is a zarr group or array, or has the name of one."""
    return path.is_dir() and (
        path.name.lower().endswith(SUFFIXES) or any((path / name).is_file() for name in _MARKS)
    )


class OmeZarrReader(Reader):
    """Reader of one resolution of an OME-Zarr image or volume.

    Args:
        path: the folder of the image.
        dims: number of spatial dims; None for 3, or for 2 if there is no axis z or a single slice.
        level: the resolution; 0 is the highest.

    Attributes:
        place: the scale and translation of the image as a georeference.

    Raises:
        ValueError: zarr is not installed, or the folder is no image that distseg reads.
    """

    def __init__(self, path: Path, dims: int | None = None, level: int = 0):
        super().__init__(path)
        if not path.is_dir():
            raise ValueError("it is a file, but an OME-Zarr image is a folder")
        version, array, attributes = metadata_in(path, path)
        if array is not None:
            raise ValueError(
                f"{path} is a zarr array without OME-NGFF metadata, so the meaning of its axes is "
                "unknown: write it as OME-Zarr, or as npy"
            )
        image = multiscale_in(attributes, version, path, level)
        folder = path / image.level
        if not folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"{path} has a level {image.level} that is a link to another place: copy the level "
                "into the image"
            )
        inner, array, _ = metadata_in(folder, path)
        if array is None:
            raise ValueError(f"{path}: its level {image.level} is no array: write the image again")
        stored = stored_in(folder, inner, array, path)
        self._take_axes(image, stored.shape, dims)
        self.dtype, self.notes = plain(stored.dtype), image.notes
        missing = stored.chunks - count_chunks(stored)
        if missing > 0:
            self.notes += (
                f"has no file for {missing} of {stored.chunks} chunks, whose pixels are read as "
                f"{stored.fill or 0}, as zarr defines it: copy the image again if this is "
                "unexpected",
            )
        self.place = _place(image, attributes)
        self._array = ChunkedArray(stored, path)
        self.block_rows = stored.decoded[self._axes.index("y")]

    def _take_axes(self, image: Multiscale, shape: tuple[int, ...], dims: int | None) -> None:
        """Set ``size`` and ``bands`` of the reader from the axes and the shape of the array.

        Raises:
            ValueError: the shape does not fit the axes, or the image is not of ``dims`` dims.
        """
        if len(shape) != len(image.axes):
            raise ValueError(
                f"{self.path} has the axes {', '.join(image.axes)}, but its array has the shape "
                f"{'x'.join(map(str, shape))}: write the image again"
            )
        lengths = dict(zip(image.axes, shape))
        for name, length in lengths.items():
            if name not in ("c", *image.spatial) and length != 1:
                raise ValueError(
                    f"{self.path} has {length} entries along its axis {name}, but an image has no "
                    f"axis {name}: write each entry into its own image"
                )
        spatial = image.spatial
        if dims == 2 or (dims is None and lengths.get("z") == 1):
            if lengths.get("z", 1) != 1:
                raise ValueError(
                    f"{self.path} has {lengths['z']} slices of {lengths['y']}x{lengths['x']}, but "
                    "an image of 2 dims is needed: write each slice into its own image, or prepare "
                    "volumes"
                )
            spatial = spatial[-2:]
        if dims == 3 and "z" not in lengths:
            raise ValueError(
                f"{self.path} has the axes {', '.join(image.axes)}, but a volume with the axis z "
                "is needed: write it with this axis"
            )
        self.size, self.bands = tuple(lengths[name] for name in spatial), lengths.get("c", 1)
        self._axes, self._spatial = image.axes, spatial

    def _read(self, box: Box) -> np.ndarray:
        inside = dict(zip(self._spatial, box.slices))
        inside["c"] = slice(0, self.bands)
        found = self._array.read([inside.get(name, slice(0, 1)) for name in self._axes])
        order = [name for name in self._axes if name not in ("c", *self._spatial)]
        order += [name for name in ("c", *self._spatial) if name in self._axes]
        turned = found.transpose([self._axes.index(name) for name in order])
        return turned.reshape(self.bands, *box.size)


def _place(image: Multiscale, attributes: dict) -> Georeference | None:
    """Return the georeference of an OME-Zarr image; None if it has none.

    A class map of distseg keeps it as an attribute. For other images, it is made from the scale and
    translation in ``image``.
    """
    try:
        kept = Georeference.from_json(attributes[KEPT]["geotiff_tags"])
    except (KeyError, TypeError, ValueError):
        kept = None
    if kept is not None or not image.placed:
        return kept
    return of_matrix(image.matrix, image.unit)
