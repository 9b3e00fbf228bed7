"""Write class maps as OME-Zarr folders: OME-NGFF 0.5 in zarr v3, with a pyramid.

One process writes whole shards one after another, so no two writers ever share a file. Chunks are
stored even if all their pixels are 0, so that a missing file shows that a copy is not complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from distseg.data.formats.georeference import Georeference, matrix_of
from distseg.data.formats.ngff import UNITS, VERSIONS
from distseg.data.formats.ome_zarr import KEPT
from distseg.data.formats.zarr_arrays import imported_zarr, metadata_in
from distseg.report.shrink import most_frequent

_CHUNK = {2: 512, 3: 64}  # side of a chunk, by the number of dims
_SHARD = {2: 8, 3: 4}  # chunks along each side of a shard
_CHANNEL = {"name": "c", "type": "channel"}
PROBABILITIES = "probabilities"


@dataclass(frozen=True)
class Meaning:
    """Metadata of a class map: names and colours of the classes, georeference and identity.

    Attributes:
        names: names in the order of the class numbers.
        palette: the colour of each number, (256, 3) uint8.
        nodata: the number that stands for "no data" in the class map.
        place: the georeference of the image; None without one.
        identity: a digest of everything that the class map was made from.
    """

    names: Sequence[str]
    palette: np.ndarray
    nodata: int
    place: Georeference | None
    identity: str


@dataclass(frozen=True)
class _Level:
    """Level of the pyramid: its zarr array, and the scale and translation of its pixels."""

    array: Any
    scale: tuple[float, ...]
    translation: tuple[float, ...]


def write_ome_zarr(
    folder: Path,
    classes: np.ndarray,
    probabilities: np.ndarray | None,
    meaning: Meaning,
    advance: Callable[[int], None],
) -> None:
    """Write a class map, and on request the probabilities of the classes, into an empty folder.

    A pixel of a coarser level has the most frequent class of the pixels that it covers, never a
    mean.

    Args:
        folder: the folder.
        classes: (*size) uint8, of 2 or 3 dims.
        probabilities: (C, *size) float16, written into a group of this name; None if there is none.
        meaning: the names and colours of the classes, the georeference and the identity.
        advance: called after each write with the number of pixels that were written.
    """
    zarr = imported_zarr("class maps as OME-Zarr")
    group = zarr.create_group(zarr.storage.LocalStore(folder), zarr_format=3)
    axes, scale, translation = _placed(meaning.place, classes.ndim)
    full = _Level(_array(group, "0", classes.shape, axes), scale, translation)
    for part in _shards(full.array):
        full.array[part] = classes[part]
        advance(classes[part].size)
    levels = [full]
    while max(blocks := _blocks(levels[-1].array.shape)) > 1:
        shape = [-(-n // side) for n, side in zip(levels[-1].array.shape, blocks)]
        array = _array(group, str(len(levels)), shape, axes)
        levels.append(_lower_level(array, levels[-1], blocks, meaning.nodata))
    about = _image(axes, levels)
    about["image-label"] = _labels(meaning)
    kept = {
        "identity": meaning.identity,
        "class_names": list(meaning.names),
        "nodata": meaning.nodata,
    }
    if meaning.place is not None:
        kept["geotiff_tags"] = meaning.place.to_json()
    if probabilities is not None:
        likely = group.create_group(PROBABILITIES)
        array = _array(likely, "0", probabilities.shape, [_CHANNEL, *axes])
        for part in _shards(array):
            array[part] = probabilities[part]
            advance(0)
        level = _Level(array, (1.0, *scale), (0.0, *translation))
        likely.attrs["ome"] = _image([_CHANNEL, *axes], [level])
    group.attrs.update({"ome": about, KEPT: kept})


def identity_in_ome_zarr(path: Path) -> str | None:
    """Return the identity that :func:`write_ome_zarr` stored in a folder; None in other folders."""
    _, _, attributes = metadata_in(path, path)
    return attributes[KEPT]["identity"]


def _blocks(shape: Sequence[int]) -> list[int]:
    """Return how many pixels become one pixel in the next level, 1 or 2 along each dim.

    It is 2 for dims that are longer than a chunk. ``shape`` is the shape of the level.
    """
    return [2 if n > _CHUNK[len(shape)] else 1 for n in shape]


def _lower_level(array: Any, above: _Level, blocks: Sequence[int], nodata: int) -> _Level:
    """Fill ``array`` with the next coarser level of the pyramid, and return this level.

    A pixel of it covers a block of pixels of the level ``above``, and lies at the block's centre.

    Args:
        array: the zarr array to fill.
        above: the finer level.
        blocks: the size of a block, 1 or 2 along each dim.
        nodata: the number that stands for "no data" in the class map.
    """
    for part in _shards(array):
        shard = np.empty([at.stop - at.start for at in part], array.dtype)
        for piece in _parts(shard.shape, array.chunks):
            source = tuple(
                slice((at.start + a.start) * side, min((at.start + a.stop) * side, n))
                for a, at, side, n in zip(piece, part, blocks, above.array.shape)
            )
            shard[piece] = most_frequent(above.array[source], blocks, nodata)
        array[part] = shard
    moved = zip(above.translation, above.scale, blocks)
    return _Level(
        array,
        tuple(s * side for s, side in zip(above.scale, blocks)),
        tuple(t + s * (side - 1) / 2 for t, s, side in moved),
    )


def _array(group: Any, name: str, shape: Sequence[int], axes: Sequence[dict[str, str]]) -> Any:
    """Create a zarr array in shards, for class numbers or for probabilities, and return it.

    An array of probabilities has a first axis ``c``, for the channels. Each chunk and each shard
    holds one channel.
    """
    names = [axis["name"] for axis in axes]
    dims = sum(name != "c" for name in names)
    chunk = [1 if name == "c" else min(n, _CHUNK[dims]) for name, n in zip(names, shape)]
    shard = [
        side if name == "c" else side * min(-(-n // side), _SHARD[dims])
        for name, n, side in zip(names, shape, chunk)
    ]
    zarr = imported_zarr("class maps as OME-Zarr")
    return group.create_array(
        name,
        shape=tuple(shape),
        dtype="float16" if "c" in names else "uint8",
        chunks=tuple(chunk),
        shards=tuple(shard),
        compressors=zarr.codecs.ZstdCodec(level=3, checksum=True),
        dimension_names=names,
        config={"write_empty_chunks": True},
    )


def _shards(array: Any) -> Iterator[tuple[slice, ...]]:
    """Yield for each shard of a zarr array the part of the array that it holds, as slices."""
    return _parts(array.shape, array.shards)


def _parts(shape: Sequence[int], sides: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield the parts, as slices, into which an array of this shape is cut.

    A part has the lengths ``sides`` along the axes; at the end of an axis it may be smaller.
    """
    for start in product(*(range(0, n, side) for n, side in zip(shape, sides))):
        yield tuple(slice(a, min(a + side, n)) for a, side, n in zip(start, sides, shape))


def keeps_place(place: Georeference) -> bool:
    """Return True if OME-NGFF 0.5 can hold a georeference without loss.

    It can hold a scale and a translation, but no CRS, and no affine that turns or mirrors axes.
    """
    if not place.of_voxels:
        return False
    steps = np.array(matrix_of(place))[:3, :3]
    return np.array_equal(steps, np.diag(np.abs(np.diag(steps))))


def _placed(
    place: Georeference | None, dims: int
) -> tuple[list[dict[str, str]], tuple[float, ...], tuple[float, ...]]:
    """Return the axes, the scale and the translation of an image.

    The affine of a volume may turn or mirror the axes, which OME-NGFF 0.5 cannot hold. Then the
    scale is the distance of the voxels, and the translation is 0. Images with the georeference of
    a map have the scale 1, in pixels.
    """
    axes = [{"name": name, "type": "space"} for name in "zyx"[-dims:]]
    scale, translation = np.ones(dims), np.zeros(dims)
    if place is not None and place.of_voxels:
        matrix = np.array(matrix_of(place))[:3, ::-1]  # columns: first voxel, z, y, x
        scale = np.sqrt((matrix[:, 1:] ** 2).sum(0))[-dims:]
        if keeps_place(place):
            scale = np.diag(matrix[::-1, 1:])[-dims:]
            translation = matrix[::-1, 0][-dims:]
        names = [name for name, size in UNITS.items() if size == place.unit]
        axes = [{**axis, "unit": names[0]} for axis in axes] if names else axes
    return axes, tuple(map(float, scale)), tuple(map(float, translation))


def _image(axes: Sequence[dict[str, str]], levels: Sequence[_Level]) -> dict[str, Any]:
    """Return the OME-NGFF metadata of an image: its axes and the levels of its pyramid."""
    datasets = []
    for number, level in enumerate(levels):
        steps: list[dict[str, Any]] = [{"type": "scale", "scale": list(level.scale)}]
        if any(level.translation):
            steps.append({"type": "translation", "translation": list(level.translation)})
        datasets.append({"path": str(number), "coordinateTransformations": steps})
    image = {"axes": list(axes), "datasets": datasets}
    if len(levels) > 1:
        image["type"] = "mode"
    return {"version": VERSIONS[-1], "multiscales": [image]}


def _labels(meaning: Meaning) -> dict[str, Any]:
    """Return the OME-NGFF metadata of a label image: colours and names of the classes.

    Pixels without data are transparent.
    """
    names = {**dict(enumerate(meaning.names)), meaning.nodata: "no data"}
    return {
        "version": VERSIONS[-1],
        "colors": [
            {
                "label-value": number,
                "rgba": [*map(int, meaning.palette[number]), 255 * (number != meaning.nodata)],
            }
            for number in names
        ],
        "properties": [{"label-value": number, "class": name} for number, name in names.items()],
    }
