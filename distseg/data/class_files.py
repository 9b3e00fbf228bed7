"""Write class maps (HDF5, TIFF, COG, NIfTI, NRRD, OME-Zarr, PNG) and the objects in them.

Objects are written as polygons (GeoPackage, GeoJSON) or as a TIFF of object numbers.

Each file of a map holds the class numbers, the classes' colours, the number for pixels without data
and, if its format can, the georeference. It also holds an identity: a digest of everything that the
result depends on. The identity shows that a result already exists. A file without an identity was
not written by distseg and is never overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from distseg.comm.launch import release_freed_memory
from distseg.data.file_progress import FileProgress
from distseg.data.formats.cog_writer import copy_as_cog
from distseg.data.formats.georeference import Georeference
from distseg.data.formats.nifti import identity_in_nifti, write_nifti
from distseg.data.formats.nrrd import identity_in_nrrd, write_nrrd
from distseg.data.formats.ome_zarr_writer import Meaning, identity_in_ome_zarr, write_ome_zarr
from distseg.data.formats.readers import pillow
from distseg.data.formats.zarr_arrays import imported_zarr
from distseg.data.nodata import NODATA_TAG
from distseg.data.packages import optional
from distseg.data.store import hdf5
from distseg.data.store.layout import check_name
from distseg.data.vector.files import (
    EDGE,
    LabelMap,
    check_polygons,
    tiles,
    write_numbers,
    write_polygons,
)
from distseg.data.vector.geojson import identity_in_geojson
from distseg.data.vector.geopackage import identity_in_geopackage
from distseg.report.disk import atomic_folder, atomic_write, require_disk_space
from distseg.tiling.tile import Box, strips

_LARGEST_PNG = 1 << 28  # pixels; Pillow needs all of them in memory
_KEY = "distseg_identity"
_NO_DATA = (154, 154, 154)  # colour of pixels without data
# The phases of writing a file in these formats; each goes over all pixels (FileProgress).
_PHASES = {
    "cog": ("classes", "overviews", "copy"),
    "gpkg": ("objects", "polygons"),
    "geojson": ("objects", "polygons"),
    "objects": ("objects", "numbers"),
}


@dataclass(frozen=True)
class Classes:
    """Names and colours of the classes in a class map, and its georeference.

    Attributes:
        names: names in the order of the class numbers.
        colours: (K, 3) uint8, one per class.
        nodata: the number that stands for "no data" in the class map.
        place: the georeference of the image; None if it has none.
        traced: the numbers of the classes whose objects are written, as polygons or as a TIFF of
            object numbers; None for all classes.
    """

    names: list[str]
    colours: np.ndarray
    nodata: int = 255
    place: Georeference | None = None
    traced: tuple[int, ...] | None = None

    @property
    def skipped(self) -> tuple[int, ...]:
        """The numbers from 0 to 255 whose objects are not written: all except ``traced``."""
        traced = range(len(self.names)) if self.traced is None else self.traced
        return tuple(number for number in range(256) if number not in traced)

    @property
    def palette(self) -> np.ndarray:
        """The colour of each number, (256, 3) uint8; black for unused numbers."""
        found = np.zeros((256, 3), np.uint8)
        found[self.nodata] = _NO_DATA
        found[: len(self.colours)] = self.colours
        return found


def numbers_of(
    names: Sequence[str], chosen: Sequence[str] | None, setting: str
) -> tuple[int, ...] | None:
    """Return the class numbers of the chosen names in rising order; None if ``chosen`` is None.

    Args:
        names: names in the order of the class numbers.
        chosen: the names that the setting holds; None if it is not set.
        setting: name of the setting that chooses the classes, for messages.

    Raises:
        ValueError: a class is unknown.
    """
    if chosen is None:
        return None
    for name in chosen:
        if name not in names:
            raise ValueError(
                f"{setting} names the class {name!r}, but the classes are {', '.join(names)}: "
                "name some of these"
            )
    return tuple(sorted({names.index(name) for name in chosen}))


def paths_of(
    folder: Path, name: str, formats: Sequence[str], size: Sequence[int], probabilities: bool
) -> list[Path]:
    """Return the paths of an image's class maps, one per format.

    A PNG of a volume or of a very large image is left out.

    Args:
        folder: the folder for results.
        name: the name of the image.
        formats: the setting ``predict.formats``, such as ``hdf5`` or ``tiff``.
        size: the size of the image.
        probabilities: True if probabilities are written too.

    Raises:
        ValueError: a format cannot hold the result, or the name would lead out of the folder.
    """
    check_name(name, "a class map is named after its image")
    if probabilities and not {"hdf5", "zarr"} & set(formats):
        raise ValueError(
            f"predict.probabilities are written to HDF5 and OME-Zarr only, but predict.formats is "
            f"{', '.join(formats)}: add hdf5 or zarr to predict.formats, or leave "
            "predict.probabilities out"
        )
    fit = {2: {*FORMS} - {"nifti", "nrrd"}, 3: {"hdf5", "png", "nifti", "nrrd", "zarr"}}
    unfit = [form for form in formats if form not in fit.get(len(size), {"hdf5", "png"})]
    if unfit:
        raise ValueError(
            f"class maps of {len(size)} dims are not written as {' or '.join(unfit)}: take "
            f"{'it' if len(unfit) == 1 else 'them'} out of predict.formats (hdf5 holds class maps "
            "of any number of dims)"
        )
    drawn = len(size) == 2 and int(np.prod(size)) <= _LARGEST_PNG
    if not drawn and set(formats) == {"png"}:
        raise ValueError(
            f"a class map of {'x'.join(map(str, size))} pixels is too large, or of too many dims, "
            "for a PNG: add hdf5 to predict.formats"
        )
    for ending in (".cog", ".objects"):
        if name.endswith(ending) and "tiff" in formats:
            raise ValueError(
                f"the class map of {name!r} as tiff would be named {name}.tif, which is the name "
                f"of the {ending[1:]} of an image {name.removesuffix(ending)!r}: rename the image, "
                "or take tiff out of predict.formats"
            )
    return [folder / f"{name}{FORMS[form]}" for form in formats if form != "png" or drawn]


def check_written(paths: Sequence[Path], place: Georeference | None, name: str) -> None:
    """Check, before a class map is computed, that its result files can be written.

    Args:
        paths: the files.
        place: the georeference of the image; None without one.
        name: the name of the image, for messages.

    Raises:
        FileExistsError: one of the paths exists and is not a class map of distseg.
        ValueError: rasterio, nibabel, pynrrd or zarr is needed and not installed, or polygons are
            to be written, but their coordinates would be unknown.
    """
    are_there(paths, "")
    for path in paths:
        form = form_of(path)
        if form in ("gpkg", "geojson"):
            check_polygons(place, form, name)
        elif form == "cog":
            optional("class maps as COG", "rasterio")
        elif form == "nifti":
            optional("class maps as NIfTI", "nibabel")
        elif form == "nrrd":
            optional("class maps as NRRD", "nrrd")
        elif form == "zarr":
            imported_zarr("class maps as OME-Zarr")


def check_not_read(paths: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Check that no result replaces a file from which results are computed.

    Args:
        paths: the files of the results.
        inputs: the files that are read.

    Raises:
        FileExistsError: a result would replace an input, or a link to an input.
    """
    read = {}
    for path in inputs:
        for found in (os.lstat(path), os.stat(path)):
            read[found.st_dev, found.st_ino] = path
    for path in filter(os.path.lexists, paths):
        found = os.lstat(path)
        if given := read.get((found.st_dev, found.st_ino)):
            raise FileExistsError(
                f"the result {path} would replace {given}, which this command reads: set another "
                "--output"
            )


def form_of(path: Path) -> str:
    """Return the format that the ending of a path stands for, such as ``tiff`` for ``.tif``.

    If several endings fit, such as ``.tif`` and ``.cog.tif``, the longest counts.
    """
    fits = [form for form, ending in FORMS.items() if path.name.endswith(ending)]
    return max(fits, key=lambda form: len(FORMS[form]))


def progress_of(path: Path, pixels: int) -> FileProgress:
    """Return the progress display of writing a class map of ``pixels`` pixels to ``path``."""
    return FileProgress(path.name, _PHASES.get(form_of(path), ("classes",)), pixels)


def write(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    classes: Classes,
    identity: str,
    advance: Callable[[int], None],
    scratch: Path,
) -> None:
    """Write a class map, or its objects, atomically, in the format of the path's ending.

    Args:
        path: the file to write.
        arrays: ``classes`` (*size) uint8 and optionally ``probabilities`` (C, *size) float16.
        classes: the names and colours of the classes.
        identity: a digest of everything that the result depends on, to store in the file.
        advance: called with each number of pixels that a phase of the work has finished
            (:func:`progress_of`).
        scratch: a folder for temporary files, on the disk of ``path``.
    """
    form = form_of(path)
    with atomic_folder(path) if form == "zarr" else atomic_write(path) as growing:
        if form in _WRITE:
            _WRITE[form](growing, arrays, classes, identity, advance)
        elif form == "cog":
            _write_cog(growing, arrays, classes, identity, advance, scratch)
        else:
            labels = _labels_of(arrays["classes"], classes, advance)
            write_objects(growing, form, labels, classes.names, identity)


def are_there(paths: Sequence[Path], identity: str) -> bool:
    """Return True if all files of a class map exist and hold this identity, False otherwise.

    Args:
        paths: the files of the class map, one per format.
        identity: a digest of everything that the result depends on
            (:func:`distseg.data.class_map.identity_of`).

    Raises:
        FileExistsError: one of the paths exists and is not a class map of distseg.
    """
    found = [_identity_in(path) for path in paths if os.path.lexists(path)]
    return len(found) == len(paths) and all(other == identity for other in found)


def _identity_in(path: Path) -> str:
    """Return the identity that a class map's file holds: a digest of what it was computed from.

    Raises:
        FileExistsError: the file is not a class map that distseg wrote.
    """
    try:
        form = form_of(path)
        whole = path.is_dir() and not path.is_symlink() if form == "zarr" else path.is_file()
        found = _READ[form](path) if whole else None
    except Exception:  # a decoder may raise anything: then the file is not ours
        found = None
    if not isinstance(found, str):
        raise FileExistsError(
            f"{path} exists and is not a class map that distseg wrote: move it, or set another "
            "--output"
        )
    return found


def _chunk_rows(size: tuple[int, ...]) -> Iterator[slice]:
    return (strip.slices[0] for strip in strips(Box.whole(size), 0, EDGE))


def _write_hdf5(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    """Write a class map and its probabilities as HDF5; the arguments are those of :func:`write`."""
    with open(path, "r+b") as file, hdf5.Growing(path, file.fileno()) as growing:
        f, found = growing.file, arrays["classes"]
        chunks = tuple(min(EDGE, n) for n in found.shape)
        f.attrs["class_names"] = classes.names
        f.attrs["class_colours"] = classes.colours
        f.attrs["nodata"] = np.uint8(classes.nodata)  # in classes; probabilities have nan
        if classes.place is not None:
            f.attrs["geotiff_tags"] = json.dumps(classes.place.to_json())
            if found.ndim == 2 and (transform := classes.place.transform) is not None:
                # x = a column + b row + c, y = d column + e row + f
                f.attrs["transform"] = transform
        f.attrs[_KEY] = identity
        f.create_dataset(
            "classes",
            found.shape,
            "u1",
            chunks=chunks,
            compression="gzip",
            compression_opts=1,
            fletcher32=True,
        )
        if "probabilities" in arrays:
            f.create_dataset(
                "probabilities",
                arrays["probabilities"].shape,
                "f2",
                chunks=(1, *chunks),
                compression="lzf",
                fletcher32=True,
            )
        for rows in _chunk_rows(found.shape):
            f["classes"][rows] = found[rows]
            if "probabilities" in arrays:
                f["probabilities"][:, rows] = arrays["probabilities"][:, rows]
            growing.check()
            advance(found[rows].size)


def _read_hdf5(path: Path) -> str | None:
    with hdf5.opened(path, "class map", "") as f:
        found = f.attrs.get(_KEY)
        return found if isinstance(found, str) else None


def _write_tiff(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    """Write a class map as a tiled TIFF with a palette, and with the georeference if it has one.

    The arguments are those of :func:`write`.
    """
    found = arrays["classes"]

    def by_rows() -> Iterator[np.ndarray]:
        for rows in _chunk_rows(found.shape):
            yield found[rows]
            advance(found[rows].size)

    about = _about(classes.names, identity)
    tags = [
        (NODATA_TAG, 2, 0, str(classes.nodata), True),
        *(classes.place.extra_tags if classes.place else ()),
    ]
    form = dict(
        shape=found.shape,
        dtype=np.uint8,
        tile=(EDGE, EDGE),
        compression="deflate",
        bigtiff=found.size > 2**31,
    )
    _tifffile().imwrite(
        path,
        tiles(by_rows(), found.shape[1], np.uint8),
        **form,
        photometric="palette",
        colormap=classes.palette.T.astype(np.uint16) * 257,
        description=about,
        metadata=None,
        extratags=tags,
    )


def _about(names: Sequence[str], identity: str) -> str:
    """Return the text for a TIFF's description: JSON with the class names and the identity."""
    return json.dumps({"class_names": list(names), _KEY: identity})


def names_in(path: Path) -> list[str] | None:
    """Return the class names in a TIFF class map that distseg wrote; None for any other file."""
    if path.suffix.lower() not in (".tif", ".tiff"):
        return None
    try:
        with _tifffile().TiffFile(path) as file:
            found = json.loads(file.pages[0].description)["class_names"]
    except (ValueError, KeyError, TypeError):
        return None
    return [str(name) for name in found] if isinstance(found, list) else None


def nodata_in(path: Path) -> int | None:
    """Return the label that means "no data" in a PNG class map that distseg wrote.

    The result is None for all other files. Their formats declare this label in a way that their
    readers know.
    """
    if path.suffix.lower() != ".png":
        return None
    with pillow(path) as picture:
        about = picture.info
    return int(about["nodata"]) if _KEY in about and about.get("nodata", "").isdecimal() else None


def _write_cog(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    classes: Classes,
    identity: str,
    advance: Callable[[int], None],
    scratch: Path,
) -> None:
    """Write a cloud-optimised GeoTIFF: GDAL copies a plain GeoTIFF and adds overviews.

    The arguments are those of :func:`write`.
    """
    plain, pixels, shown = scratch / "plain.tif", arrays["classes"].size, 0

    def copied(times: float) -> None:
        nonlocal shown
        before, shown = shown, int(times * pixels)
        advance(shown - before)

    _write_tiff(plain, arrays, classes, identity, advance)
    # GDAL first writes the overviews to a temporary file, at most a third of the plain file.
    require_disk_space(path, 2 * plain.stat().st_size, "a class map as COG")
    release_freed_memory()  # GDAL's thread cannot use what this thread has freed
    copy_as_cog(plain, path, scratch, copied)
    plain.unlink()


def _write_nifti(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    write_nifti(path, arrays["classes"], classes.place, identity, advance)


def _write_nrrd(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    write_nrrd(path, arrays["classes"], classes.place, identity, advance)


def _write_zarr(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    meaning = Meaning(classes.names, classes.palette, classes.nodata, classes.place, identity)
    write_ome_zarr(path, arrays["classes"], arrays.get("probabilities"), meaning, advance)


def _labels_of(found: np.ndarray, classes: Classes, advance: Callable[[int], None]) -> LabelMap:
    def read(rows: slice) -> tuple[np.ndarray, None]:
        labels = np.array(found[rows])
        advance(labels.size)
        return labels, None

    return LabelMap(found.shape, read, classes.names.__getitem__, classes.skipped, classes.place)


def write_objects(
    path: Path, form: str, labels: LabelMap, names: Sequence[str], identity: str
) -> int:
    """Write the objects of a label map to a file, and return how many were written.

    An object is a set of connected pixels of one class.

    Args:
        path: an empty file, which is overwritten.
        form: ``gpkg`` or ``geojson`` for polygons; ``objects`` for a TIFF of object numbers.
        labels: the label map.
        names: the names of the classes, for the description of a TIFF file.
        identity: a digest of everything that the result depends on, to store in the file.
    """
    if form == "objects":
        return write_numbers(path, labels, _about(names, identity))
    return write_polygons(path, labels, form, identity)


def _read_tiff(path: Path) -> str | None:
    with _tifffile().TiffFile(path) as file:
        return json.loads(file.pages[0].description).get(_KEY)


def _tifffile() -> ModuleType:
    """Return the module tifffile, imported only when needed because the import is slow."""
    import tifffile

    return tifffile


def _write_png(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    """Write a PNG of the class numbers, of the image's size and with a palette of class colours.

    The arguments are those of :func:`write`.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    found = np.ascontiguousarray(arrays["classes"])
    picture, about = Image.frombuffer("P", found.shape[::-1], found, "raw", "P", 0, 1), PngInfo()
    picture.putpalette(classes.palette.ravel().tolist())
    about.add_text(_KEY, identity)
    about.add_text("nodata", str(classes.nodata))
    picture.save(path, format="png", pnginfo=about, transparency=classes.nodata)
    advance(found.size)


def _read_png(path: Path) -> str | None:
    with pillow(path) as picture:
        return picture.info.get(_KEY)


FORMS = {
    "hdf5": ".h5",
    "tiff": ".tif",
    "png": ".png",
    "nifti": ".nii.gz",
    "nrrd": ".nrrd",
    "zarr": ".ome.zarr",
    "cog": ".cog.tif",
    "gpkg": ".gpkg",
    "geojson": ".geojson",
    "objects": ".objects.tif",
}
_WRITE = {
    "hdf5": _write_hdf5,
    "tiff": _write_tiff,
    "png": _write_png,
    "nifti": _write_nifti,
    "nrrd": _write_nrrd,
    "zarr": _write_zarr,
}
_READ = {
    "hdf5": _read_hdf5,
    "tiff": _read_tiff,
    "png": _read_png,
    "nifti": identity_in_nifti,
    "nrrd": identity_in_nrrd,
    "zarr": identity_in_ome_zarr,
    "cog": _read_tiff,
    "gpkg": identity_in_geopackage,
    "geojson": identity_in_geojson,
    "objects": _read_tiff,
}
