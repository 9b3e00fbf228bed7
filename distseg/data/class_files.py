"""Files of finished class maps: HDF5, tiled TIFF and PNG.

Each file holds the class numbers, the classes' colours, the number for pixels without data and, if
its format can, the georeference. It also holds an identity: a digest of everything that the result
depends on. The identity shows that a result already exists. A file without an identity was not
written by distseg and is never overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from distseg.data.formats.georeference import Georeference
from distseg.data.formats.readers import pillow
from distseg.data.nodata import NODATA_TAG
from distseg.data.store import hdf5
from distseg.data.store.layout import check_name
from distseg.report.disk import atomic_write
from distseg.tiling.tile import Box, strips

_EDGE = 256  # pixels along each side of an HDF5 chunk and of a TIFF tile
_LARGEST_PNG = 1 << 28  # pixels; Pillow needs all of them in memory
_KEY = "distseg_identity"
_NO_DATA = (154, 154, 154)  # a grey


@dataclass(frozen=True)
class Classes:
    """Meaning of the numbers of a class map.

    Attributes:
        names: names in the order of the class numbers.
        colours: (K, 3) uint8, one per class.
        nodata: the number of pixels without data.
        place: the georeference of the image, if it has one.
    """

    names: list[str]
    colours: np.ndarray
    nodata: int = 255
    place: Georeference | None = None

    @property
    def palette(self) -> np.ndarray:
        """The colour of each number, (256, 3) uint8; black for unused numbers."""
        found = np.zeros((256, 3), np.uint8)
        found[self.nodata] = _NO_DATA
        found[: len(self.colours)] = self.colours
        return found


def paths_of(
    folder: Path, name: str, formats: Sequence[str], size: Sequence[int], probabilities: bool
) -> list[Path]:
    """Return the paths of an image's class maps, one per format.

    A PNG of a volume or of a very large image is left out.

    Args:
        folder: the folder for results.
        name: the name of the image.
        formats: ``predict.formats``: some of hdf5, tiff and png.
        size: the size of the image.
        probabilities: True if probabilities are written too.

    Raises:
        ValueError: a format cannot hold the result, or the name would lead out of the folder.
    """
    check_name(name, "a class map is named after its image")
    if probabilities and "hdf5" not in formats:
        raise ValueError(
            f"predict.probabilities go into HDF5, but predict.formats is {', '.join(formats)}: "
            "add hdf5, or leave probabilities out"
        )
    if "tiff" in formats and len(size) != 2:
        raise ValueError(
            f"class maps of {len(size)} dims are written as hdf5 only: take tiff out of "
            "predict.formats"
        )
    drawn = len(size) == 2 and int(np.prod(size)) <= _LARGEST_PNG
    if not drawn and set(formats) == {"png"}:
        raise ValueError(
            f"a class map of {'x'.join(map(str, size))} pixels is too large, or of too many dims, "
            "for a PNG: add hdf5 to predict.formats"
        )
    return [folder / f"{name}{_SUFFIXES[form]}" for form in formats if form != "png" or drawn]


def write(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    classes: Classes,
    identity: str,
    advance: Callable[[int], None],
) -> None:
    """Write a class map atomically, in the format of the path's ending.

    Args:
        path: the file to write.
        arrays: ``classes`` (*size) uint8 and optionally ``probabilities`` (C, *size) float16.
        classes: the meaning of the class numbers.
        identity: the identity of the result.
        advance: called with the number of pixels after each write.
    """
    with atomic_write(path) as growing:
        _WRITE[path.suffix](growing, arrays, classes, identity, advance)


def are_there(paths: Sequence[Path], identity: str) -> bool:
    """Return True if each of these files exists and has this identity.

    Raises:
        FileExistsError: one of the paths exists and is not a class map of distseg.
    """
    found = [_identity_in(path) for path in paths if os.path.lexists(path)]
    return len(found) == len(paths) and all(other == identity for other in found)


def _identity_in(path: Path) -> str:
    try:
        found = _READ[path.suffix](path) if path.is_file() else None
    except Exception:  # a decoder may raise anything: then the file is not ours
        found = None
    if not isinstance(found, str):
        raise FileExistsError(
            f"{path} is there and is not a class map that distseg wrote: move it, or name another "
            "--output"
        )
    return found


def _chunk_rows(size: tuple[int, ...]) -> Iterator[slice]:
    return (strip.slices[0] for strip in strips(Box.whole(size), 0, _EDGE))


def _write_hdf5(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    with open(path, "r+b") as file, hdf5.Growing(path, file.fileno()) as growing:
        f, found = growing.file, arrays["classes"]
        chunks = tuple(min(_EDGE, n) for n in found.shape)
        f.attrs["class_names"] = classes.names
        f.attrs["class_colours"] = classes.colours
        f.attrs["nodata"] = np.uint8(classes.nodata)  # in classes; probabilities have nan
        if classes.place is not None:
            f.attrs["geotiff_tags"] = json.dumps(classes.place.to_json())
            if (transform := classes.place.transform) is not None:
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
    found = arrays["classes"]

    def tiles() -> Iterator[np.ndarray]:
        for rows in _chunk_rows(found.shape):
            for left in range(0, found.shape[1], _EDGE):
                tile = np.zeros((_EDGE, _EDGE), np.uint8)
                part = found[rows, left : left + _EDGE]
                tile[: part.shape[0], : part.shape[1]] = part
                yield tile
            advance(found[rows].size)

    about = json.dumps({"class_names": classes.names, _KEY: identity})
    tags = [
        (NODATA_TAG, 2, 0, str(classes.nodata), True),
        *(classes.place.extra_tags if classes.place else ()),
    ]
    form = dict(
        shape=found.shape,
        dtype=np.uint8,
        tile=(_EDGE, _EDGE),
        compression="deflate",
        bigtiff=found.size > 2**31,
    )
    _tifffile().imwrite(
        path,
        tiles(),
        **form,
        photometric="palette",
        colormap=classes.palette.T.astype(np.uint16) * 257,
        description=about,
        metadata=None,
        extratags=tags,
    )


def _read_tiff(path: Path) -> str | None:
    with _tifffile().TiffFile(path) as file:
        return json.loads(file.pages[0].description).get(_KEY)


def _tifffile() -> ModuleType:
    """Import tifffile only when it is needed, since that takes a quarter of a second."""
    import tifffile

    return tifffile


def _write_png(
    path: Path, arrays: Mapping[str, np.ndarray], classes: Classes, identity: str, advance
) -> None:
    """Write a palette PNG of the classes' colours, one pixel per image pixel."""
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


_SUFFIXES = {"hdf5": ".h5", "tiff": ".tif", "png": ".png"}
_WRITE = {".h5": _write_hdf5, ".tif": _write_tiff, ".png": _write_png}
_READ = {".h5": _read_hdf5, ".tif": _read_tiff, ".png": _read_png}
