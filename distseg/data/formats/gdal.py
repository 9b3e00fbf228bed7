"""Read rasters that only GDAL reads, through rasterio: VRT, JPEG 2000, Erdas Imagine, ENVI, ...

Windows are read from the file, and GDAL caches at most a few blocks of it. Only drivers that read
local files are allowed. Other drivers open network addresses, and a file of unknown origin must not
make GDAL connect to an address that it names.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from distseg.data.formats.alpha import MASK
from distseg.data.formats.base import Reader, note_of_alpha, plain
from distseg.data.formats.georeference import Georeference, place_in
from distseg.data.nodata import fitting
from distseg.data.packages import optional
from distseg.tiling.tile import Box

# Endings of files that are taken for images in a folder.
RASTER_SUFFIXES = (".vrt", ".jp2", ".j2k", ".img", ".bil", ".bip", ".bsq", ".asc", ".hgt", ".ntf")
_DRIVERS = [
    *("AAIGrid", "BT", "DTED", "EHdr", "ENVI", "ERS", "HFA", "ISIS3", "JP2OpenJPEG", "JP2KAK"),
    *("JP2ECW", "JP2MrSID", "JPEG2000", "KEA", "KRO", "NITF", "PCIDSK", "PCRaster", "PDS4"),
    *("RMF", "RRASTER", "RST", "SAGA", "SRTMHGT", "USGSDEM", "VRT"),
]
_SOURCE_DRIVERS = ["GTiff", "PNG", "JPEG", "BMP", "WEBP", "GIF", "PNM"]  # only for sources of a VRT
_CACHE = 64 << 20  # bytes of blocks that GDAL keeps in memory, instead of 5 % of the memory
_LOSSY = ("JPEG", "YCBCR JPEG", "WEBP", "LERC", "JPEG2000", "ECW", "MRSID")
_COLOURS = {("gray",): "grey", ("red", "green", "blue"): "RGB"}


class GdalReader(Reader):
    """Reader of a raster that rasterio opens.

    Args:
        path: the file.
        dims: number of spatial dims, which must be 2 or None.
        alpha: how transparency is read (:func:`distseg.data.formats.readers.open_image`).

    Raises:
        ValueError: rasterio is not installed, or the raster cannot be read as an image.
    """

    def __init__(self, path: Path, dims: int | None, alpha: str):
        super().__init__(path)
        self._rasterio = optional(path, "rasterio", "errors", "io", "windows")
        if dims not in (None, 2):
            raise ValueError(
                f"{path} is a raster of 2 dims, but an image of {dims} dims is needed: write "
                "volumes as NIfTI, TIFF or npy"
            )
        self._files: list[Any] = []  # this process's last; closing a parent's is not safe
        self._process = 0
        with self._limits():
            lossy_source = _checked_sources(path, self._rasterio)
        with self._opened() as file:
            self._take_header(file, alpha)
            self.lossy = lossy_source or _lossy(file)
        self._read(Box((0, 0), (1, 1)))  # a file that cannot be decoded is refused at once

    def _take_header(self, file: Any, alpha: str) -> None:
        """Set the attributes of the reader from rasterio's open ``file``.

        Raises:
            ValueError: the file has no bands, or bands of different types.
        """
        if not file.count:
            inside = ", ".join(file.subdatasets[:3])
            raise ValueError(
                f"{self.path} has no bands itself"
                + (f", but holds other rasters ({inside})" if inside else "")
                + ": write the wanted raster into a GeoTIFF (gdal_translate)"
            )
        types = sorted(set(file.dtypes))
        if len(types) > 1:
            raise ValueError(
                f"{self.path} has bands of the types {', '.join(types)}: write it with one type "
                "(gdal_translate -ot)"
            )
        self.size, self.dtype = file.shape, plain(types[0])
        meanings = [meaning.name.lower() for meaning in file.colorinterp]
        if alpha == MASK and "alpha" in meanings and file.count > 1:
            self.alpha = meanings.index("alpha")
            self.notes += (note_of_alpha(self.alpha),)
        self.bands = file.count - (self.alpha is not None)
        self.colours = _COLOURS.get(tuple(m for m in meanings if m != "alpha" or alpha != MASK))
        self.coded = meanings == ["palette"]
        self.palette = _palette(file.colormap(1)) if self.coded else None
        self.place = _place(file, self._rasterio)
        names = [Path(name) for name in file.files]
        self.sources += [name for name in names if name.resolve() != self.path.resolve()]
        self._take_nodata(file)
        scaled = [pair for pair in zip(file.scales, file.offsets) if pair != (1, 0)]
        if scaled:
            self.notes += (
                f"declares the scale {scaled[0][0]:g} and the offset {scaled[0][1]:g}, not "
                "applied: pixels stay as stored, so all images must have the same",
            )
        flags = {flag.name for flag in file.mask_flag_enums[0]}
        has_mask = "per_dataset" in flags and "alpha" not in flags
        if has_mask and not Path(f"{self.path}.msk").is_file():  # distseg reads this file itself
            self.add_mask(
                self._valid, "has a validity mask: pixels where the mask is 0 have no data"
            )

    def _take_nodata(self, file: Any) -> None:
        """Set ``nodata``, the pixel value that means "no data", from rasterio's open ``file``.

        If the bands declare different values, a note is added instead.
        """
        numbers = {repr(number): number for number in file.nodatavals if number is not None}
        if len(numbers) == 1:
            self.nodata = fitting(next(iter(numbers.values())), self.dtype)
        elif numbers:
            self.notes += (
                "has different numbers for no data in its bands, which are not read: "
                f"{', '.join(numbers)}",
            )

    def _read(self, box: Box) -> np.ndarray:
        with self._opened() as file:
            return file.read(window=self._window(box))

    def _valid(self, box: Box) -> np.ndarray:
        with self._opened() as file:
            return file.read_masks(1, window=self._window(box)) != 0

    def _window(self, box: Box) -> Any:
        (top, left), (height, width) = box.start, box.size
        return self._rasterio.windows.Window(left, top, width, height)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Yield rasterio's open file, for a ``with`` block.

        GDAL's handles do not survive a fork, so each process opens the file for itself.
        """
        with self._limits():
            if self._process != os.getpid():
                self._files.append(_open(self.path, self._rasterio, _DRIVERS))
                self._process = os.getpid()
            yield self._files[-1]

    def _limits(self) -> Any:
        """Return a context manager in which GDAL caches little and runs no code from files."""
        return self._rasterio.Env(GDAL_CACHEMAX=_CACHE, GDAL_VRT_ENABLE_PYTHON="NO")


def _open(path: Path, rasterio: Any, drivers: list[str]) -> Any:
    """Open a raster with rasterio, and return the open file. Only these ``drivers`` are tried."""
    with warnings.catch_warnings():  # a file without a georeference is an image like others
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        return rasterio.io.DatasetReader(str(path.resolve()), driver=drivers)


def _checked_sources(path: Path, rasterio: Any, above: tuple[Path, ...] = ()) -> str | None:
    """Check the files from which a VRT takes its pixels; if these are VRTs, their sources too.

    Args:
        path: a file. It is a VRT if its name ends in ``.vrt``; other files have no sources.
        rasterio: the module.
        above: the VRT files that take pixels from this one.

    Returns:
        The name of the lossy compression of a source; None if all are lossless.

    Raises:
        ValueError: a source is no local file, such as an address on a network, or cannot be opened
            by a driver that reads local files; or the VRT is no XML, or takes pixels from itself.
    """
    lossy = None
    for text, source in _sources(path) if path.suffix.lower() == ".vrt" else ():
        if not source.is_file():
            raise ValueError(
                f"{path} takes pixels from {text}, which is no local file: correct the path, or "
                "copy this raster to a GeoTIFF (gdal_translate) and make the VRT anew"
            )
        if source.resolve() in above:
            raise ValueError(
                f"{path} takes pixels from {text}, which takes pixels from {path}: make one of the "
                "two files anew, from other rasters"
            )
        lossy = _checked_sources(source, rasterio, (*above, path.resolve())) or lossy
        with _open(source, rasterio, [*_DRIVERS, *_SOURCE_DRIVERS]) as file:
            lossy = _lossy(file) or lossy
    return lossy


def _sources(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield for each source of a VRT file the text in the VRT that names it, and its path."""
    for _, element in ElementTree.iterparse(path):
        if element.tag in ("SourceFilename", "SourceDataset"):
            text = element.text or ""
            yield text, path.parent / text if element.get("relativeToVRT") == "1" else Path(text)


def _palette(colours: dict[int, tuple[int, ...]]) -> np.ndarray:
    """Return rasterio's palette as (entries, 3) uint8; colours that it leaves out are black."""
    found = np.zeros((max(colours, default=-1) + 1, 3), np.uint8)
    for number, colour in colours.items():
        found[number] = colour[:3]
    return found


def _lossy(file: Any) -> str | None:
    """Return the name of the lossy compression of rasterio's open file; None if it is lossless.

    A JPEG 2000 file is lossless only if GDAL says so.
    """
    about = file.tags(ns="IMAGE_STRUCTURE")
    if file.driver.startswith(("JP2", "JPEG2000")):
        exact = about.get("COMPRESSION_REVERSIBILITY", "").startswith("LOSSLESS")
        return None if exact else "JPEG 2000"
    if file.driver in _LOSSY:
        return file.driver
    return about["COMPRESSION"] if about.get("COMPRESSION", "").upper() in _LOSSY else None


def _place(file: Any, rasterio: Any) -> Georeference | None:
    """Return the georeference of rasterio's open file; None if it has none.

    GDAL converts it to the tags of a TIFF file of one pixel.
    """
    import io

    import tifffile

    points, crs = file.gcps
    if file.transform.is_identity and file.crs is None and not points and file.rpcs is None:
        return None
    about: dict = {"driver": "GTiff", "height": 1, "width": 1, "count": 1, "dtype": "uint8"}
    if points:
        about |= {"gcps": points, "crs": crs}
    else:
        about |= {"crs": file.crs}
        if not file.transform.is_identity:
            about["transform"] = file.transform
    with rasterio.MemoryFile() as memory:
        with memory.open(**about) as tiny:
            if file.rpcs is not None:
                tiny.rpcs = file.rpcs
        with tifffile.TiffFile(io.BytesIO(memory.getbuffer())) as tiff:
            return place_in(tiff.pages[0])
