"""Write the objects of label maps as polygons, or as an image of object numbers.

Label maps are class maps of distseg or label images of other programs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distseg.data import class_files
from distseg.data.formats.georeference import Georeference
from distseg.data.formats.nifti import SUFFIXES as NIFTI
from distseg.data.formats.readers import open_mask, stem_of, suffix_of
from distseg.data.store import hdf5
from distseg.data.store.layout import FORMAT
from distseg.data.vector.files import LabelMap
from distseg.report.disk import atomic_write
from distseg.tiling.tile import Box


@dataclass(frozen=True)
class _Source:
    """Label map that is read from a file, and the names of its classes.

    Attributes:
        labels: the label map.
        names: the names of its classes; None if they are not known.
    """

    labels: LabelMap
    names: list[str] | None


def trace_maps(
    maps: Sequence[str],
    output: str,
    formats: Sequence[str],
    classes: Sequence[str] | None = None,
    least: int = 1,
) -> Iterator[str]:
    """Write the objects of label maps, and yield a line of text for each file written.

    An object is a connected region of pixels with the same label.

    Args:
        maps: files of class maps (HDF5) or label maps (TIFF, PNG, npy).
        output: the folder for the files, which are named after the maps.
        formats: some of ``gpkg`` and ``geojson`` (files of polygons), and ``objects`` (a TIFF file
            in which each pixel has the number of its object).
        classes: names or numbers of the classes whose objects are written; by default all.
        least: objects with fewer pixels than this get no polygon. The format ``objects`` includes
            these objects too.

    Raises:
        FileExistsError: a result would replace one of the maps, or a file of another program.
        ValueError: a map cannot be read, does not have 2 dims or does not fit a format; two maps
            have one name, or a class is unknown.
    """
    stems = [stem_of(path) for path in maps]
    for stem in stems:
        if stems.count(stem) > 1:
            raise ValueError(
                f"results are named after maps, but several maps are named {stem}: trace them into "
                "different --output folders"
            )
    targets = {
        path: [Path(output) / f"{stem_of(path)}{class_files.FORMS[form]}" for form in formats]
        for path in maps
    }
    for path, files in targets.items():
        with _opened(path) as source:
            _chosen(source, classes, path)
            class_files.check_written(files, source.labels.place, path)
    class_files.check_not_read(
        [file for files in targets.values() for file in files], map(Path, maps)
    )
    Path(output).mkdir(parents=True, exist_ok=True)
    for path, files in targets.items():
        with _opened(path) as source:
            labels = _chosen(source, classes, path, least)
            settings = [Path(path).name, formats, classes, least]
            identity = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
            for file in files:
                with atomic_write(file) as growing, _shown(labels, file) as read:
                    count = class_files.write_objects(
                        growing, class_files.form_of(file), read, source.names or [], identity
                    )
                yield f"{file}: {count:,} objects"


@contextmanager
def _shown(labels: LabelMap, file: Path) -> Iterator[LabelMap]:
    """Yield a label map that shows, whenever it is read, the progress of writing ``file``."""
    with class_files.progress_of(file, math.prod(labels.size)) as shown:

        def read(rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
            found = labels.read(rows)
            shown(found[0].size)
            return found

        yield replace(labels, read=read)


@contextmanager
def _opened(path: str) -> Iterator[_Source]:
    """Yield a class map of distseg (HDF5) or a label map (image file), open inside the context.

    Raises:
        ValueError: the file is not a class map or label map, or the map does not have 2 dims.
    """
    if Path(path).is_dir():
        raise ValueError(
            f"{path} is a folder, but objects are traced in files: name the class maps in it, such "
            f"as {path.rstrip('/')}/*.h5"
        )
    if suffix_of(path) in NIFTI:
        raise ValueError(
            f"{path} is a NIfTI file, a volume, but objects are traced only in maps of 2 dims: "
            "write its slices as TIFF, PNG or npy"
        )
    if suffix_of(path) == ".h5":
        with hdf5.opened(path, "class map", "distseg predict writes class maps") as file:
            yield _of_hdf5(file, path)
    else:
        yield _of_mask(path)


def _of_hdf5(file, path: str) -> _Source:
    """Return the label map in ``file``, an open HDF5 file with a class map of distseg."""
    kind = file.attrs.get("format", b"")
    if "classes" not in file and kind in (FORMAT, FORMAT.encode()):
        raise ValueError(
            f"{path} is a store of images, not a class map: trace the class maps that 'distseg "
            f"predict RUN --data.store {path}' writes, or the masks that it was prepared from"
        )
    found = hdf5.dataset(file, "classes").open()
    if found.ndim != 2:
        raise ValueError(
            f"{path} has {found.ndim} dims, but objects are traced only in maps of 2 dims: give a "
            "map of 2 dims"
        )
    attributes = file.attrs
    tags = attributes.get("geotiff_tags")
    names = [str(name) for name in attributes.get("class_names", [])]
    try:
        place = Georeference.from_json(json.loads(tags)) if isinstance(tags, str) else None
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"{path} is damaged: its georeference cannot be read ({e}): predict it again"
        ) from None
    nodata = int(attributes.get("nodata", 255))
    labels = LabelMap(
        found.shape,
        lambda rows: (found[rows], None),
        str,
        (nodata,),
        place,
        block_rows=1 if found.chunks is None else found.chunks[0],
    )
    return _Source(labels, names or None)


def _of_mask(path: str) -> _Source:
    """Return the label map of an image file, which is read a few rows at a time."""
    reader = open_mask(path)
    height, width = reader.size

    def read(rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        pixels, valid = reader.read_valid(Box((rows.start, 0), (rows.stop, width)))
        if pixels.dtype != np.uint64:
            return pixels[0], valid
        if pixels.max(initial=0) > np.iinfo(np.int64).max:
            raise ValueError(
                f"{path} holds the label {pixels.max()}, but labels must be at most "
                f"{np.iinfo(np.int64).max}: give the objects smaller numbers"
            )
        return pixels[0].astype(np.int64), valid

    marks = (reader.nodata, class_files.nodata_in(Path(path)))
    skipped = tuple({int(mark) for mark in marks if mark is not None})
    labels = LabelMap(
        (height, width), read, str, skipped, reader.place, block_rows=reader.block_rows
    )
    return _Source(labels, class_files.names_in(Path(path)))


def _chosen(source: _Source, classes: Sequence[str] | None, path: str, least: int = 1) -> LabelMap:
    """Return the label map of ``source`` with only the chosen classes.

    Args:
        source: the label map and the names of its classes.
        classes: names or numbers of the chosen classes; None for all classes.
        path: the map's file, for messages.
        least: objects with fewer pixels than this get no polygon.

    Raises:
        ValueError: a class is unknown.
    """
    labels, names = source.labels, source.names

    def name_of(label: int) -> str:
        return names[label] if names is not None and 0 <= label < len(names) else str(label)

    chosen = None if classes is None else [_number(name, names, path) for name in classes]
    return replace(labels, name_of=name_of, least=least, chosen=chosen)


def _number(name: str, names: list[str] | None, path: str) -> int:
    """Return the number of a class that the user gave by name or number.

    Args:
        name: the name, or the number as text.
        names: the names of the classes; None if they are not known.
        path: the map's file, for messages.
    """
    if names is not None and name in names:
        return names.index(name)
    if name.isdecimal() and (names is None or int(name) < len(names)):
        return int(name)
    known = ", ".join(names) if names else "known by number only"
    raise ValueError(
        f"--classes names {name!r}, but the classes of {path} are {known}: choose among them"
    )
