"""Base class of all readers of image files: ``size``, ``bands``, ``dtype`` and ``read(box)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np

from distseg.data.formats.alpha import Opacity
from distseg.data.formats.georeference import Georeference
from distseg.tiling.tile import Box


class Reader:
    """Base class of readers: boxes of pixels of an image file, and the facts from its header.

    A subclass for a format sets attributes such as ``size`` and ``bands``. It defines ``_read``,
    which returns all decoded bands of a box. ``size`` has the slowest dim first.
    """

    size: tuple[int, ...]
    bands: int
    dtype: np.dtype
    coded = False  # True if the numbers are indices into a palette
    nodata: int | float | None = None  # the number for no data that the file declares
    colours: str | None = None  # meaning of the bands, such as RGB, if the file declares it
    orientation = 1  # EXIF orientation; 1 is upright
    lossy: str | None = None  # the lossy compression of the file, if any
    notes: tuple[str, ...] = ()  # phrases after the file's name in messages: what is not read, ...
    decoding = 0  # bytes of memory that the first read takes, if it decodes the whole file
    kept = 0  # bytes of decoded pixels that the reader keeps; 0 if it decodes each box anew
    block_rows = 1  # rows of a tile or chunk that is decoded as a whole for every box; 1 without
    place: Georeference | None = None
    palette: np.ndarray | None = None  # (entries, 3) uint8: the colours of a label map's numbers
    stack = False  # True if its many bands might be slices of a volume, or images
    polygons: int | None = None  # polygons that overlap the image; None if it is no vector file
    alpha: int | None = None  # index of the decoded band that is transparency; not in ``bands``

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = Lock()  # another thread may read ahead
        self.opacity = Opacity()  # histogram of the transparency that was read
        self.sources: list[Path] = []  # other files that mark pixels without data
        self._masks: list[Callable[[Box], np.ndarray]] = []

    @property
    def masked(self) -> bool:
        """True if the file, or a file beside it, marks single pixels without data."""
        return self.alpha is not None or bool(self._masks)

    @property
    def overlapping(self) -> int:
        """Number of pixels read so far that are covered by polygons of different values."""
        return 0

    def add_mask(
        self, valid: Callable[[Box], np.ndarray], note: str, source: Path | None = None
    ) -> None:
        """Add a validity mask, which :meth:`read_valid` combines with other masks of the image.

        Args:
            valid: a function from a box to (*box.size) bool, True where there is data.
            note: what messages say about the mask, the rest of a sentence that begins with the
                file's name.
            source: the file of the mask; None if it is the image file.
        """
        self._masks.append(valid)
        self.notes += (note,)
        self.sources += [] if source is None else [source]

    def read(self, box: Box) -> np.ndarray:
        """Return the pixels of a box, (bands, *box.size), as a copy.

        Raises:
            ValueError: the file is damaged.
        """
        with self._lock, readable(self.path):
            return self._split(self._read(box))[0]

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the pixels of a box as a copy, and its validity mask.

        Returns:
            Pixels (bands, *box.size), and a mask (*box.size) bool, True where there is data. The
            mask is None if the image has none.

        Raises:
            ValueError: the file is damaged.
        """
        with self._lock, readable(self.path):
            pixels, valid = self._split(self._read(box))
            for mask in self._masks:
                valid = mask(box) if valid is None else valid & mask(box)
            return pixels, valid

    def _split(self, decoded: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the bands of the image without transparency, and its validity mask.

        The mask is False at transparent pixels; it is None if the image has no transparency.

        Args:
            decoded: all decoded bands of a box, (decoded bands, *box.size).
        """
        if self.alpha is None:
            return np.ascontiguousarray(decoded, self.dtype), None
        self.opacity.add(decoded[self.alpha])
        kept = [band for band in range(len(decoded)) if band != self.alpha]
        return np.ascontiguousarray(decoded[kept], self.dtype), decoded[self.alpha] > 0

    def _read(self, box: Box) -> np.ndarray:
        raise NotImplementedError


_OF_THE_WHOLE = "bands dtype coded nodata colours notes palette lossy kept sources".split()


class _Excerpt(Reader):
    """Base class of readers that present a slice or a part of an image as an image of its own.

    Facts of the header, such as bands and dtype, are taken from the reader of the whole image.

    Args:
        whole: the reader of the image or volume.
    """

    def __init__(self, whole: Reader):
        super().__init__(whole.path)
        for name in _OF_THE_WHOLE:
            setattr(self, name, getattr(whole, name))
        self._whole = whole

    @property
    def masked(self) -> bool:
        """True if the file, or a file beside it, marks single pixels without data."""
        return self._whole.masked


class PageReader(_Excerpt):
    """Reader that presents one slice of a volume as an image.

    Args:
        volume: the reader of the volume.
        page: the index of the slice along the first dim.
    """

    def __init__(self, volume: Reader, page: int):
        super().__init__(volume)
        self.size, self._page = volume.size[1:], page

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the pixels of a box of the slice, and its validity mask.

        The results are those of :meth:`Reader.read_valid`.
        """
        slab = Box((self._page, *box.start), (self._page + 1, *box.stop))
        pixels, valid = self._whole.read_valid(slab)
        return pixels[:, 0], None if valid is None else valid[0]

    def read(self, box: Box) -> np.ndarray:
        """Return the pixels of a box of the slice, (bands, *box.size), as a copy."""
        return self.read_valid(box)[0]


class PartReader(_Excerpt):
    """Reader that presents a box of an image as an image of its own.

    Args:
        whole: the reader of the whole image.
        part: the box of the part in the image.
    """

    def __init__(self, whole: Reader, part: Box):
        super().__init__(whole)
        self.opacity, self.alpha = whole.opacity, whole.alpha
        self.size, self._start = part.size, part.start
        self.place = None if whole.place is None else whole.place.of_part(part.start)

    @property
    def overlapping(self) -> int:
        """Number of pixels read so far that are covered by polygons of different values."""
        return self._whole.overlapping

    def read_valid(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the pixels of a box of the part, and its validity mask.

        The results are those of :meth:`Reader.read_valid`.
        """
        return self._whole.read_valid(box.shifted(self._start))

    def read(self, box: Box) -> np.ndarray:
        """Return the pixels of a box of the part, (bands, *box.size), as a copy."""
        return self._whole.read(box.shifted(self._start))


def plain(dtype) -> np.dtype:
    """Return the dtype in which readers return pixels that a file stores as ``dtype``.

    It has the native byte order, and is uint8 for bool.
    """
    return np.dtype(np.uint8) if np.dtype(dtype) == np.bool_ else np.dtype(dtype).newbyteorder("=")


def whole_numbers(path: Path, numbers: np.ndarray) -> np.ndarray:
    """Return ``numbers`` after a check that all are whole numbers, as labels must be.

    Args:
        path: the mask's file, for the message.
        numbers: labels that the mask stores as floats, of any shape.

    Raises:
        ValueError: one of the numbers is not whole.
    """
    found = np.rint(numbers)
    wrong = (found != numbers) | ~np.isfinite(numbers)
    if wrong.any():
        raise ValueError(
            f"{path} is a mask, but it holds {numbers[wrong][0]}, which is not a whole number: "
            "write the numbers of the classes, and 255 where there is no label"
        )
    return found


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert errors raised in a ``with`` block to a ValueError that names the image file.

    FileNotFoundError and MemoryError are left as they are.
    """
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as e:
        if isinstance(e, ValueError) and str(path) in str(e):
            raise
        raise ValueError(
            f"{path} cannot be read as an image ({str(e) or type(e).__name__}): if it is damaged, "
            "copy it again; if it has another format than its name says, rename it"
        ) from e


def note_of_alpha(band: int) -> str:
    """Return the note that an image has transparency, and that it is read as "no data".

    The note is the rest of a sentence that begins with the file's name.

    Args:
        band: the index of the band that is transparency.
    """
    return (
        f"has transparency in band {band + 1}, which is not read as a band: pixels where it is 0 "
        "have no data (prepare --alpha band reads it as a band)"
    )
