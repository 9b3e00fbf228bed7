"""Opens an image file of any common format as something that hands out boxes: ``open_image(path).read(box)``.

TIFF and npy files are read box by box. PNG and JPEG can only be decoded whole: that happens at the first read, and the
decoded image waits in a scratch file until the reader is dropped. What a header says is believed as far as the file's own
bytes can carry it.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Callable, Iterator

import numpy as np

from distseg.data import marks, pam
from distseg.data.alpha import BAND, MASK, Opacity
from distseg.data.georeference import Place, with_world_file
from distseg.data.mapped import copied, let_go, room_for
from distseg.data.nodata import declared
from distseg.data.plausible import MOST_PACKED, check_bytes, check_memory
from distseg.extents import Extents
from distseg.geometry.tile import Box
from distseg.launch import release_freed_memory

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".npy")
_MOST_TRAILING_BANDS = 4
_LARGE = 1 << 24  # bytes that are worth the 20 ms of giving them back
_STRIP = 1 << 22  # bytes of pixels that are taken over from Pillow at a time
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")  # that Pillow may open: others start programs (EPS), or are read in another way (TIFF)
_MASK_SUFFIX = ".msk"  # of GDAL's masks beside files
_WITHOUT_ALPHA = {"RGBA": "RGB", "LA": "L", "RGBa": "RGB", "La": "L", "PA": "P"}  # Pillow's modes
_KEYED = ("1", "L", "I", "I;16", "RGB")  # that may have a transparent colour
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Reader:
    """An image: ``size`` (slowest dim first), ``bands``, ``dtype``, and ``read``."""

    size: tuple[int, ...]
    bands: int
    dtype: np.dtype
    coded = False  # its numbers stand for colours
    nodata: int | float | None = None  # the number that stands for no data, where the file says so
    colours: str | None = None  # what the bands are, such as RGB, where the file says so
    orientation = 1  # EXIF's: upright
    lossy: str | None = None  # the compression that changed the numbers
    notes: tuple[str, ...] = ()  # what of the file is not read, or taken for something, in words that follow its name
    decoding = 0  # bytes of memory that the first read takes for a while, where the file can not be read in parts
    place: Place | None = None  # where on earth it lies
    palette: np.ndarray | None = None  # (entries, 3) uint8: the colours of a label map's numbers
    alpha: int | None = None  # the number of the decoded band that is transparency, and none of ``bands``

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = Lock()  # a file is read ahead in another thread
        self.opacity = Opacity()  # of what was read
        self.sources: list[Path] = []  # other files that tell where there is data
        self._masks: list[Callable[[Box], np.ndarray]] = []

    @property
    def masked(self) -> bool:
        """True if the file, or one beside it, says pixel by pixel where there is data."""
        return self.alpha is not None or bool(self._masks)

    def add_mask(self, valid: Callable[[Box], np.ndarray], note: str, source: Path | None = None) -> None:
        """Let :meth:`read_valid` ask ``valid`` where there is data: box -> (*box.size) bool.

        Args:
            note: on the mask, in words that follow the file's name.
            source: the file it is from, if that is another one.
        """
        self._masks.append(valid)
        self.notes += (note,)
        self.sources += [] if source is None else [source]

    def read(self, box: Box) -> np.ndarray:
        """(bands, *box.size), a copy. ValueError where the file turns out to be damaged."""
        with self._lock, readable(self.path):
            return self._split(self._read(box))[0]

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the pixels (bands, *box.size), a copy, and where there is data, (*box.size) bool; None where no mask says so.

        Raises:
            ValueError: the file turns out to be damaged.
        """
        with self._lock, readable(self.path):
            pixels, valid = self._split(self._read(box))
            for mask in self._masks:
                valid = mask(box) if valid is None else valid & mask(box)
            return pixels, valid

    def _split(self, decoded: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the bands of the image, and where it is not transparent."""
        if self.alpha is None:
            return np.ascontiguousarray(decoded, self.dtype), None
        self.opacity.add(decoded[self.alpha])
        kept = [band for band in range(len(decoded)) if band != self.alpha]
        return np.ascontiguousarray(decoded[kept], self.dtype), decoded[self.alpha] > 0

    def _read(self, box: Box) -> np.ndarray:
        raise NotImplementedError


def open_image(path: str | Path, dims: int | None = None, scratch: str | None = None, alpha: str = MASK) -> Reader:
    """Open an image or a volume.

    Args:
        alpha: ``mask``: transparency is no band, and where it is 0 there is no data; ``band``: it is a band like others.
        dims: spatial dims, for npy and TIFF; by default an array of three axes, or a stack of unnamed pages, is an image with bands.
        scratch: folder for pixels that can only be decoded whole; ``memory``; by default the system's for temporary files.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: not an image, a damaged one, one that viewers turn, or one whose values the reader would have to change.
    """
    reader = _opened(Path(path), dims, scratch, alpha)
    if reader.coded:
        raise ValueError(f"{path} has a palette, its numbers stand for colours: convert it to RGB")
    if reader.dtype.kind not in "iuf":
        raise ValueError(f"{path} holds {reader.dtype}, but pixels are whole or real numbers: convert it")
    if not reader.bands or min(reader.size, default=0) < 1:
        raise ValueError(f"{path} has no pixels: {reader.bands} bands of {'x'.join(map(str, reader.size))}")
    return reader


def _opened(path: Path, dims: int | None, scratch: str | None = None, alpha: str = BAND, palette: bool = False) -> Reader:
    if not path.is_file():
        raise FileNotFoundError(f"there is no image file {path}")
    reader = _reader(path, dims, scratch, alpha, palette)
    marks.check_upright(path, reader.orientation)
    beside = Path(f"{path}{_MASK_SUFFIX}")
    if beside.is_file():
        with readable(beside):
            reader.add_mask(_tiff().open_mask_file(beside, reader.size, scratch), "has a validity mask beside it (.msk): where that is 0 there is no data", beside)
    if reader.nodata is None:
        _take_nodata_beside(reader)
    reader.place = with_world_file(reader.place, path)
    if reader.place is None and pam.has_place(path):
        reader.notes += ("lies at a place that only the file beside it says (.aux.xml), which class maps do not get: write it into the file, such as with 'gdal_translate'",)
    return reader


def _take_nodata_beside(reader: Reader) -> None:
    """Take the number that stands for no data from GDAL's file beside an image."""
    values = pam.nodata_values(reader.path)
    if len(values) == 1:
        reader.nodata = declared(reader.path, values[0], reader.dtype)
        reader.notes += (f"has no data where it is {values[0]}, as the file beside it says (.aux.xml)",)
        reader.sources.append(pam.beside(reader.path))
    elif values:
        reader.notes += (f"has another number for no data in each band, as the file beside it says (.aux.xml): they are not read: {', '.join(values)}",)


def _reader(path: Path, dims: int | None, scratch: str | None, alpha: str, palette: bool) -> Reader:
    suffix = path.suffix.lower()
    with readable(path):
        if suffix == ".npy":
            return NpyReader(path, dims)
        if suffix in (".tif", ".tiff"):
            return _tiff().open_tiff(path, dims, scratch, alpha)
        return PillowReader(path, palette, scratch, alpha)


def _tiff() -> ModuleType:
    """Import what reads TIFF, a quarter of a second's work, once it is needed."""
    try:
        import imagecodecs  # noqa: F401
        import tifffile  # noqa: F401
    except ImportError as e:
        raise ValueError(f"TIFF files are read by tifffile and imagecodecs ({e}): pip install tifffile imagecodecs") from e
    from distseg.data import tiff

    return tiff


def open_mask(path: str | Path, dims: int = 2) -> Reader:
    """Open a label map: one band of whole numbers. Of a palette image these are the entries' numbers."""
    path = Path(path)
    reader = _opened(path, dims, palette=True)
    if reader.lossy:
        raise ValueError(
            f"{path} is a mask in {reader.lossy}, which changes numbers, so that labels are not those that were drawn: "
            "write the masks anew, as PNG, or as TIFF without it"
        )
    if reader.bands != 1 or reader.dtype.kind not in "iu":
        raise ValueError(
            f"{path} has {reader.bands} bands of {reader.dtype}, but a mask is one band of whole numbers, the labels: "
            "convert colours to the numbers of the classes"
        )
    return reader


def plain(dtype) -> np.dtype:
    """The type of the numbers handed out: this machine's byte order, bits as bytes 0 and 1."""
    return np.dtype(np.uint8) if dtype == bool else np.dtype(dtype).newbyteorder("=")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever a decoder throws becomes a ValueError that names the file."""
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as e:
        if isinstance(e, ValueError) and str(path) in str(e):
            raise
        raise ValueError(f"{path} can not be read as an image ({str(e) or type(e).__name__}): is it damaged, or of another format than its name says?") from e


class NpyReader(Reader):
    """A memory-mapped array: (bands, *size), or (*size) of one band.

    An image (height, width, bands) is taken as such if its last axis has at most 4 entries and its first has more.
    """

    def __init__(self, path: Path, dims: int | None = None):
        super().__init__(path)
        array = _mapped(path)
        dims = dims or max(2, array.ndim - 1)
        if array.ndim == dims:
            array = array[None]
        if array.ndim != dims + 1:
            raise ValueError(f"{path} holds an array of {array.ndim} axes, but an image of {dims} dims has {dims} or, with bands first, {dims + 1}")
        if array.shape[-1] <= _MOST_TRAILING_BANDS < array.shape[0]:
            array = np.moveaxis(array, -1, 0)
        self._array = array
        self.bands, self.size, self.dtype = array.shape[0], array.shape[1:], plain(array.dtype)

    def _read(self, box: Box) -> np.ndarray:
        return copied(self._array, self._array[(slice(None), *box.slices)])


def _mapped(path: Path) -> np.ndarray:
    """The array of a npy file, of which the header is believed if the file is long enough for it."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{path} is of version {version[0]}.{version[1]} of npy, for named fields: store plain numbers")
        shape, by_columns, dtype = _HEADERS[version](file)
        if dtype.hasobject or dtype.kind not in "biuf":
            raise ValueError(f"{path} holds {dtype}, but pixels are whole or real numbers: convert it")
        offset = file.tell()
    needed, there = math.prod(int(n) for n in shape) * dtype.itemsize, os.path.getsize(path) - offset
    if needed > there or min(shape, default=0) < 1:
        words = f"it holds {'x'.join(map(str, shape))} numbers of {dtype}, {needed} bytes"
        raise ValueError(f"its header says that {words}, but it has {there}")
    return np.memmap(path, dtype, "r", offset, shape, "F" if by_columns else "C")


class PillowReader(Reader):
    """What Pillow decodes, pixels as they are stored: no colour management.

    Args:
        palette: palette images are the entries' numbers, and nothing is transparent, as in label maps.
        alpha: what becomes of transparency (:func:`open_image`); a transparent colour always is no data.
    """

    def __init__(self, path: Path, palette: bool = False, scratch: str | None = None, alpha: str = BAND):
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
                self.notes += ("has a transparent colour: where that is there is no data",) if keyed else (note_of_alpha(self.alpha),)
            self.bands, self.dtype = len(sample) - (self.alpha is not None), plain(sample.dtype)
            if mode == "P":
                self.palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
            self.colours = marks.colours(mode if self.alpha is None else _WITHOUT_ALPHA.get(mode, mode))
            self.orientation, self.lossy = marks.orientation(path, image), marks.lossy(path, image)
            self.decoding = math.prod(self.size) * _decoding(image)
        check_memory(path, f"its {Extents(self.size)} pixels are", self.decoding)

    def _read(self, box: Box) -> np.ndarray:
        if self._array is None:
            self._array = self._unpacked()
            if self.decoding > _LARGE:
                release_freed_memory()  # Pillow's
        return copied(self._array, self._array[(slice(None), *box.slices)])

    def _unpacked(self) -> np.ndarray:
        """All of the image, (bands, height, width), transparency with them."""
        height, width = self.size
        shape = (height, width, self.bands + (self.alpha is not None))
        strip = max(1, _STRIP // (width * shape[-1] * self.dtype.itemsize))
        room = room_for(shape, self.dtype, self._scratch)
        if room is None:
            check_memory(self.path, f"its {Extents(self.size)} pixels, for which the scratch folder has no room, are", self.decoding + math.prod(shape) * self.dtype.itemsize)
            room = np.empty(shape, self.dtype)
        room = np.moveaxis(room, -1, 0)
        with pillow(self.path) as image:
            for row in range(0, height, strip):
                stop = min(row + strip, height)
                room[:, row:stop] = self._decoded(image.crop((0, row, width, stop)))
                let_go(room)
        return room

    def _decoded(self, image) -> np.ndarray:
        """(bands, height, width); palette images as their colours or, as masks, as the entries' numbers; a transparent colour makes a band of alpha."""
        mode = self._mode(image)
        array = np.asarray(image if image.mode == mode else image.convert(mode))
        array = array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
        key = self._key(image)
        if key is None:
            return array
        seen = (array != np.array(key, array.dtype).reshape(-1, 1, 1)).any(0, keepdims=True)
        return np.concatenate([array, seen.astype(array.dtype)])

    def _key(self, image) -> int | tuple[int, ...] | None:
        """Return the colour that is transparent, where one is."""
        key = image.info.get("transparency")
        return key if isinstance(key, (int, tuple)) and not self._palette and image.mode in _KEYED else None

    def _mode(self, image) -> str:
        if image.mode != "P" or self._palette:
            return image.mode
        return "RGBA" if "transparency" in image.info else "RGB"


def note_of_alpha(band: int) -> str:
    """Return the note on an image whose ``band`` is transparency."""
    return f"has transparency in band {band + 1}, which is no band of the image: where it is 0 there is no data (prepare --alpha band keeps it as a band)"


def _tiny(image):
    """An image of the same kind with one pixel, to learn what decoding gives."""
    from PIL import Image

    tiny = Image.new(image.mode, (1, 1))
    tiny.info = image.info
    return tiny


@contextmanager
def pillow(path: Path):
    """Open with Pillow. Its limit on pixels is lifted: huge images are what distseg is for."""
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(path, formats=_FORMATS) as image:
            yield image
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _stored_bits(mode: str) -> int:
    """That a pixel of Pillow's ``mode`` takes in a file at least."""
    return 1 if mode in ("1", "P") else {"I;16": 16, "I;16B": 16, "I": 16}.get(mode, 8)


def _decoding(image) -> int:
    """Bytes that Pillow takes for a pixel while it decodes an image."""
    own = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}.get(image.mode, 4)
    if image.format == "WEBP":
        return 4 * own  # the decoder's, its copies
    return own + 2 * len(image.getbands()) if image.info.get("progressive") else own  # all coefficients of a JPEG


def _refuse_lost_bits(path: Path, image) -> None:
    form = str(image.tile[0][3]) if image.tile else ""
    if image.mode in ("RGB", "RGBA", "LA") and ";16" in form:
        raise ValueError(f"{path} has 16 bits a colour band, of which Pillow would keep 8: convert it to TIFF or npy")
    if form in ("L;2", "L;4"):
        raise ValueError(f"{path} has {form[2:]} bits a pixel, which Pillow would stretch to 0 to 255: convert it to 8 bits")
