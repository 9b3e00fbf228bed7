"""Open image files of all common formats: ``open_image(path).read(box)``.

TIFF, npy and OME-Zarr images are read box by box. PNG, JPEG and other files can only be decoded as
a whole. The first read decodes them, and the decoded image stays in a scratch file until the reader
is dropped. A size in a header is accepted only if the file has enough bytes for it.
"""

from __future__ import annotations

import math
import os
import unicodedata
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np

from distseg.comm.launch import release_freed_memory
from distseg.config.sizes import Size
from distseg.data.formats import marks, nifti, nrrd, ome_zarr, pam, slides
from distseg.data.formats.alpha import BAND, MASK
from distseg.data.formats.base import Reader, note_of_alpha, plain, readable, whole_numbers
from distseg.data.formats.gdal import RASTER_SUFFIXES, GdalReader
from distseg.data.formats.georeference import with_world_file
from distseg.data.formats.mapped import copied, let_go, mapped_array
from distseg.data.formats.plausible import MOST_PACKED, check_bytes, check_memory
from distseg.data.nodata import declared
from distseg.tiling.tile import Box

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".npy"),
    *nifti.SUFFIXES,
    *nrrd.SUFFIXES,
    *ome_zarr.SUFFIXES,
    *slides.SUFFIXES,
    *RASTER_SUFFIXES,
)
_DOUBLE = (".nii.gz", ".ome.zarr")
_MOST_TRAILING_BANDS = 4
_LARGE = 1 << 24  # bytes from which on freed memory is returned to the system, which takes 20 ms
_STRIP = 1 << 22  # bytes of pixels that are copied from Pillow at a time
# Pillow may open no other formats: some start programs (EPS), and TIFF has its own reader.
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_MASK_SUFFIX = ".msk"  # ending of GDAL's mask files
_WITHOUT_ALPHA = {"RGBA": "RGB", "LA": "L", "RGBa": "RGB", "La": "L", "PA": "P"}  # Pillow's modes
_KEYED = ("1", "L", "I", "I;16", "RGB")  # Pillow's modes that may have a transparent colour
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def suffix_of(path: str | Path) -> str:
    """Return the ending of a file's name in small letters, such as ``.tif`` or ``.nii.gz``."""
    name = os.path.basename(path).lower()
    double = next((suffix for suffix in _DOUBLE if name.endswith(suffix)), None)
    return double or os.path.splitext(name)[1]


def stem_of(path: str | Path) -> str:
    """Return the name of a file without its ending, which becomes the name of the image.

    It is in Unicode's form NFC, because some systems write the same letter as two characters.
    """
    name = os.path.basename(path)
    return unicodedata.normalize("NFC", name[: len(name) - len(suffix_of(name))])


def open_image(
    path: str | Path,
    dims: int | None = None,
    scratch: str | None = None,
    alpha: str = MASK,
    level: int = 0,
) -> Reader:
    """Return the reader of an image or a volume.

    Args:
        path: the file, or the folder of an OME-Zarr image.
        dims: number of spatial dims. If None, an npy array of three axes, or a stack of unnamed
            TIFF pages, is an image with bands.
        scratch: folder for images that are decoded as a whole; None for the system's folder for
            temporary files; ``memory`` to keep the decoded images in memory.
        alpha: how transparency is read. ``mask``: fully transparent pixels have no data, and the
            transparency is not a band of the image. ``band``: it is read as an ordinary band.
        level: the resolution of an OME-Zarr image; 0 is the highest. Other files have only level 0.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or not an image, it has no such level, its orientation tag
            makes viewers turn or mirror it, or decoding would change its values.
    """
    path = Path(path)
    if level and not _has_levels(path):
        raise ValueError(
            f"--level is {level}, but {path} is no OME-Zarr image, and other files have level 0 "
            "only: leave --level out"
        )
    reader = _opened(path, dims, scratch, alpha, level=level)
    if reader.coded:
        raise ValueError(
            f"{path} has a palette, so its numbers stand for colours: convert it to RGB"
        )
    if reader.dtype.kind not in "iuf":
        raise ValueError(
            f"{path} holds {reader.dtype}, but pixels are whole or real numbers: convert it"
        )
    if not reader.bands or min(reader.size, default=0) < 1:
        raise ValueError(
            f"{path} has no pixels ({reader.bands} bands of {'x'.join(map(str, reader.size))}): "
            "write it again, or remove it"
        )
    return reader


def _has_levels(path: Path) -> bool:
    """Return True if a path is an OME-Zarr image, which may have several resolutions."""
    return path.is_dir() or suffix_of(path) in ome_zarr.SUFFIXES


def _opened(
    path: Path,
    dims: int | None,
    scratch: str | None = None,
    alpha: str = BAND,
    labels: bool = False,
    level: int = 0,
) -> Reader:
    """Return the reader of an image file, completed by files that lie beside it.

    Such files may hold a validity mask, a pixel value that means "no data", or a georeference.
    The arguments are those of :func:`open_image`; ``labels`` is True to read a label map.
    """
    if not path.is_file() and not ome_zarr.is_zarr_folder(path):
        raise FileNotFoundError(f"there is no image file {path}: correct the path")
    if _has_levels(path):
        with readable(path):
            reader: Reader = ome_zarr.OmeZarrReader(path, dims, level)
    else:
        reader = _reader(path, dims, scratch, alpha, labels)
    marks.check_upright(path, reader.orientation)
    beside = Path(f"{path}{_MASK_SUFFIX}")
    if beside.is_file():
        with readable(beside):
            reader.add_mask(
                _tiff().open_mask_file(beside, reader.size, scratch),
                "has a validity mask beside it (.msk): pixels where the mask is 0 have no data",
                beside,
            )
    if reader.nodata is None:
        _take_nodata_beside(reader)
    reader.place = with_world_file(reader.place, path)
    if reader.place is None and pam.has_place(path):
        reader.notes += (
            "has a georeference only in the file beside it (.aux.xml), which is not copied into "
            "class maps: write it into the image file, such as with 'gdal_translate'",
        )
    return reader


def _take_nodata_beside(reader: Reader) -> None:
    """Set ``reader.nodata`` from GDAL's metadata file (.aux.xml) beside the image, if any.

    ``nodata`` is the pixel value that means "no data". If the file declares different values for
    the bands, a note is added to the reader instead.
    """
    values = pam.nodata_values(reader.path)
    if len(values) == 1:
        reader.nodata = declared(reader.path, values[0], reader.dtype)
        reader.notes += (
            f"has no data where it is {values[0]}, as the file beside it says (.aux.xml)",
        )
        reader.sources.append(pam.beside(reader.path))
    elif values:
        reader.notes += (
            "has different numbers for no data in its bands, as the file beside it says "
            f"(.aux.xml), which are not read: {', '.join(values)}",
        )


def _reader(path: Path, dims: int | None, scratch: str | None, alpha: str, labels: bool) -> Reader:
    """Return the reader for a file, chosen by its ending.

    A file with an unknown ending is read by Pillow if Pillow knows its content, otherwise by GDAL.
    """
    suffix = suffix_of(path)
    with readable(path):
        if suffix == ".npy":
            return NpyReader(path, dims)
        if suffix in (".tif", ".tiff", *slides.SUFFIXES):
            return _tiff().open_tiff(path, dims, scratch, alpha)
        if suffix in nifti.SUFFIXES:
            return nifti.NiftiReader(path, dims, scratch, labels)
        if suffix in nrrd.SUFFIXES:
            return nrrd.NrrdReader(path, dims, scratch, labels)
        if suffix in RASTER_SUFFIXES or suffix not in SUFFIXES and not _is_of_pillow(path):
            return GdalReader(path, dims, alpha)
        return PillowReader(path, labels, scratch, alpha)


def _is_of_pillow(path: Path) -> bool:
    """Return True if Pillow recognises the content of a file whose ending is not known."""
    from PIL import UnidentifiedImageError

    try:
        with pillow(path):
            return True
    except UnidentifiedImageError:
        return False


def _tiff() -> ModuleType:
    """Return the module that opens TIFF files.

    It is imported only when needed, because the import takes a quarter of a second.

    Raises:
        ValueError: tifffile or imagecodecs is not installed.
    """
    try:
        import imagecodecs  # noqa: F401
        import tifffile  # noqa: F401
    except ImportError as e:
        raise ValueError(
            f"TIFF files are read by tifffile and imagecodecs ({e}): pip install tifffile "
            "imagecodecs"
        ) from e
    from distseg.data.formats import tiff

    return tiff


def open_mask(path: str | Path, dims: int = 2, level: int = 0) -> Reader:
    """Return the reader of a label map: one band of integers, or of floats with whole values.

    From a palette image it returns the indices into the palette.

    Args:
        path: the file.
        dims: number of spatial dims.
        level: the resolution of an OME-Zarr image; other files are read as they are.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not a label map, or its compression is lossy.
    """
    path = Path(path)
    reader = _opened(path, dims, labels=True, level=level)
    if reader.lossy:
        raise ValueError(
            f"{path} is a mask in {reader.lossy}, which changes labels: write the masks as PNG, or "
            f"as TIFF without this compression"
        )
    if reader.bands != 1:
        raise ValueError(
            f"{path} has {reader.bands} bands of {reader.dtype}, but a mask must be one band of "
            "whole numbers, the labels: if its bands are colours that stand for classes, name them "
            "(--classes background=#000000,road=#ff0000); if there is a band for each class "
            "(one-hot), write the number of the class instead (numpy: mask.argmax(0))"
        )
    return reader if reader.dtype.kind in "iu" else _Whole(reader)


def open_coloured(path: str | Path, dims: int = 2, level: int = 0) -> Reader:
    """Return the reader of a mask whose colours stand for classes.

    The reader returns the colours as three bands, red, green and blue, in uint8.

    Args:
        path: the file.
        dims: number of spatial dims.
        level: the resolution of an OME-Zarr image; other files are read as they are.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file does not hold 8-bit colours or greys, or its compression is lossy.
    """
    path = Path(path)
    reader = _opened(path, dims, alpha=MASK, level=level)
    if reader.lossy:
        raise ValueError(
            f"{path} is a mask in {reader.lossy}, which changes colours: write the masks as PNG, "
            "or as TIFF without this compression"
        )
    if reader.coded and reader.palette is not None and reader.bands == 1:
        return _Unpacked(reader)
    if reader.bands == 1 and reader.dtype == np.uint8:
        return _Unpacked(reader, np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, 1))
    if reader.bands != 3 or reader.dtype != np.uint8:
        raise ValueError(
            f"{path} has {reader.bands} bands of {reader.dtype}, but a mask whose colours stand "
            "for classes must have three bytes per pixel, red, green and blue: convert it, or "
            "leave the colours out of --classes if masks hold numbers"
        )
    return reader


class _Whole(Reader):
    """Reader of a mask that stores its labels as floats; it returns them as int64.

    Args:
        floats: the reader of the mask.
    """

    bands, dtype = 1, np.dtype(np.int64)

    def __init__(self, floats: Reader):
        super().__init__(floats.path)
        self._floats = floats
        self.size, self.notes, self.place = floats.size, floats.notes, floats.place
        self.nodata, self.block_rows = floats.nodata, floats.block_rows

    @property
    def masked(self) -> bool:
        """True if the file, or a file beside it, marks single pixels without data."""
        return self._floats.masked

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the labels of a box, (1, *box.size) int64, and its validity mask.

        The mask is (*box.size) bool, True where there is data; None if the image has none.

        Raises:
            ValueError: a value is not a whole number.
        """
        numbers, valid = self._floats.read_valid(box)
        if valid is not None:
            numbers[:, ~valid] = 0
        return whole_numbers(self.path, numbers).astype(self.dtype), valid

    def read(self, box: Box) -> np.ndarray:
        """Return the labels of a box, (1, *box.size) int64."""
        return self.read_valid(box)[0]


class _Unpacked(Reader):
    """Reader that converts a palette image or a grey image to three bands: red, green, blue.

    Args:
        indices: the reader of the palette's indices, or of the greys.
        palette: (entries, 3) uint8, the colour of each index; by default the image's own palette.
    """

    bands, dtype = 3, np.dtype(np.uint8)

    def __init__(self, indices: Reader, palette: np.ndarray | None = None):
        super().__init__(indices.path)
        self._indices = indices
        self._palette = indices.palette if palette is None else palette
        self.size, self.notes, self.place = indices.size, indices.notes, indices.place

    @property
    def masked(self) -> bool:
        """True if the file, or a file beside it, marks single pixels without data."""
        return self._indices.masked

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the colours of a box, (3, *box.size), and its validity mask.

        The mask is (*box.size) bool, True where there is data; None if the image has none.
        """
        numbers, valid = self._indices.read_valid(box)
        return np.moveaxis(self._palette[numbers[0]], -1, 0), valid

    def read(self, box: Box) -> np.ndarray:
        """Return the colours of a box, (3, *box.size)."""
        return self.read_valid(box)[0]


class NpyReader(Reader):
    """Reader of a memory-mapped npy file.

    The array has the shape (bands, *size), or (*size) for one band.

    An array (height, width, bands) is accepted if its last axis has at most 4 entries and its first
    axis has more.

    Args:
        path: the file.
        dims: number of spatial dims. If None, an array of two axes is an image of one band, and an
            array of more axes has bands.
    """

    def __init__(self, path: Path, dims: int | None = None):
        super().__init__(path)
        array = _mapped(path)
        self.stack = dims is None and array.ndim == 3
        dims = dims or max(2, array.ndim - 1)
        if array.ndim == dims:
            array = array[None]
        if array.ndim != dims + 1:
            raise ValueError(
                f"{path} holds an array of {array.ndim} axes, but an image of {dims} dims has "
                f"{dims} or, with bands first, {dims + 1}: reshape it"
            )
        if array.shape[-1] <= _MOST_TRAILING_BANDS < array.shape[0]:
            array = np.moveaxis(array, -1, 0)
        self._array = array
        self.bands, self.size, self.dtype = array.shape[0], array.shape[1:], plain(array.dtype)

    def _read(self, box: Box) -> np.ndarray:
        return copied(self._array[(slice(None), *box.slices)])


def _mapped(path: Path) -> np.ndarray:
    """Return the memory-mapped array of an npy file, after a check that the file is complete."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(
                f"{path} is in version {version[0]}.{version[1]} of npy, which is for named "
                "fields: store plain numbers"
            )
        shape, by_columns, dtype = _HEADERS[version](file)
        if dtype.hasobject or dtype.kind not in "biuf":
            raise ValueError(
                f"{path} holds {dtype}, but pixels are whole or real numbers: convert it"
            )
        offset = file.tell()
    needed = math.prod(int(n) for n in shape) * dtype.itemsize
    there = os.path.getsize(path) - offset
    if needed > there or min(shape, default=0) < 1:
        words = f"it holds {'x'.join(map(str, shape))} numbers of {dtype}, {needed} bytes"
        raise ValueError(
            f"its header says that {words}, but the file has {there}, so it is empty, "
            "damaged or cut off"
        )
    return np.memmap(path, dtype, "r", offset, shape, "F" if by_columns else "C")


class PillowReader(Reader):
    """Reader of the formats that Pillow decodes. Pixels are not colour-managed.

    Args:
        path: the file.
        palette: True to read palette images as indices into the palette, without transparency,
            as label maps need.
        scratch: folder for the decoded image (:func:`open_image`).
        alpha: how transparency is read (:func:`open_image`). Pixels of a colour that the file
            declares transparent have no data in either case.
    """

    def __init__(
        self, path: Path, palette: bool = False, scratch: str | None = None, alpha: str = BAND
    ):
        super().__init__(path)
        self._palette, self._scratch, self._array = palette, scratch, None
        with pillow(path) as image:
            _refuse_lost_bits(path, image)
            self.size = image.size[::-1]
            if image.format in MOST_PACKED:
                check_bytes(path, self.size, _stored_bits(image.mode), MOST_PACKED[image.format])
            mode, sample = self._mode(image), self._decoded(_tiny(image))
            keyed = self._key(image) is not None
            if keyed or (alpha == MASK and mode in _WITHOUT_ALPHA):
                self.alpha = len(sample) - 1
                note = "has a transparent colour: pixels of this colour have no data"
                self.notes += (note if keyed else note_of_alpha(self.alpha),)
            self.bands, self.dtype = len(sample) - (self.alpha is not None), plain(sample.dtype)
            if mode == "P":
                self.palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
            self.colours = marks.colours(
                mode if self.alpha is None else _WITHOUT_ALPHA.get(mode, mode)
            )
            self.orientation, self.lossy = marks.orientation(path, image), marks.lossy(path, image)
            self.decoding = math.prod(self.size) * _decoding(image)
            self.kept = math.prod(self.size) * len(sample) * self.dtype.itemsize
        check_memory(path, f"its {Size(self.size)} pixels are", self.decoding)

    def _read(self, box: Box) -> np.ndarray:
        if self._array is None:
            self._array = self._unpacked()
            if self.decoding > _LARGE:
                release_freed_memory()  # return the memory that Pillow freed
        return copied(self._array[(slice(None), *box.slices)])

    def _unpacked(self) -> np.ndarray:
        """Return the decoded image, (bands, height, width), in memory or in a scratch file.

        If the image has transparency, it is the last band.
        """
        height, width = self.size
        shape = (height, width, self.bands + (self.alpha is not None))
        strip = max(1, _STRIP // (width * shape[-1] * self.dtype.itemsize))
        array = mapped_array(shape, self.dtype, self._scratch)
        if array is None:
            check_memory(
                self.path,
                f"its {Size(self.size)} pixels, for which the scratch folder has no room, are",
                self.decoding + math.prod(shape) * self.dtype.itemsize,
            )
            array = np.empty(shape, self.dtype)
        array = np.moveaxis(array, -1, 0)
        with pillow(self.path) as image:
            for row in range(0, height, strip):
                stop = min(row + strip, height)
                array[:, row:stop] = self._decoded(image.crop((0, row, width, stop)))
                let_go(array)
        return array

    def _decoded(self, image) -> np.ndarray:
        """Return the pixels of Pillow's ``image``, (bands, height, width).

        A palette image is returned as its colours or, for masks, as indices into its palette. A
        transparent colour adds a last band, which is 0 at pixels of this colour and 1 elsewhere.
        """
        mode = self._mode(image)
        array = np.asarray(image if image.mode == mode else image.convert(mode))
        array = array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
        key = self._key(image)
        if key is None:
            return array
        seen = (array != np.array(key, array.dtype).reshape(-1, 1, 1)).any(0, keepdims=True)
        return np.concatenate([array, seen.astype(array.dtype)])

    def _key(self, image) -> int | tuple[int, ...] | None:
        """Return the colour that the file declares transparent; None if there is none.

        It is an int for a grey level, and a tuple for (red, green, blue). For masks it is None.
        """
        key = image.info.get("transparency")
        if self._palette or image.mode not in _KEYED or not isinstance(key, (int, tuple)):
            return None
        return key

    def _mode(self, image) -> str:
        if image.mode != "P" or self._palette:
            return image.mode
        return "RGBA" if "transparency" in image.info else "RGB"


def _tiny(image):
    """Return an image of one pixel with the mode and the metadata of Pillow's ``image``.

    Its decoded bands and dtype are those of ``image``, which need not be decoded to know them.
    """
    from PIL import Image

    tiny = Image.new(image.mode, (1, 1))
    tiny.info = image.info
    return tiny


@contextmanager
def pillow(path: Path):
    """Open a file with Pillow, without Pillow's limit on the number of pixels."""
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(path, formats=_FORMATS) as image:
            yield image
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _stored_bits(mode: str) -> int:
    """Return the smallest number of bits that a pixel of Pillow's ``mode`` takes in a file."""
    return 1 if mode in ("1", "P") else {"I;16": 16, "I;16B": 16, "I": 16}.get(mode, 8)


def _decoding(image) -> int:
    """Return how many bytes of memory per pixel Pillow needs to decode ``image``."""
    own = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}.get(image.mode, 4)
    if image.format == "WEBP":
        return 4 * own  # the decoder makes copies
    if image.info.get("progressive"):
        return own + 2 * len(image.getbands())  # a JPEG decoder keeps all coefficients
    return own


def _refuse_lost_bits(path: Path, image) -> None:
    """Refuse an image whose values Pillow would change while decoding.

    Args:
        path: the file, for the message.
        image: the file as Pillow opened it.

    Raises:
        ValueError: Pillow would drop bits or stretch values; the message names the repair.
    """
    form = str(image.tile[0][3]) if image.tile else ""
    if image.mode in ("RGB", "RGBA", "LA") and ";16" in form:
        raise ValueError(
            f"{path} has 16 bits per colour band, but Pillow would keep only 8: convert it to TIFF "
            "or npy"
        )
    if form in ("L;2", "L;4"):
        raise ValueError(
            f"{path} has {form[2:]} bits a pixel, which Pillow would stretch to 0 to 255: convert "
            "it to 8 bits"
        )
