"""What every reader of an image file has: ``size``, ``bands``, ``dtype``, and ``read(box)``."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Callable, Iterator

import numpy as np

from distseg.data.formats.alpha import Opacity
from distseg.data.formats.georeference import Georeference
from distseg.tiling.tile import Box


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
    notes: tuple[
        str, ...
    ] = ()  # what of the file is not read, or taken for something, in words that follow its name
    decoding = 0  # bytes of memory that the first read takes for a while, where the file can not be read in parts
    place: Georeference | None = None  # where on earth it lies
    palette: np.ndarray | None = None  # (entries, 3) uint8: the colours of a label map's numbers
    alpha: int | None = (
        None  # the number of the decoded band that is transparency, and none of ``bands``
    )

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

    def add_mask(
        self, valid: Callable[[Box], np.ndarray], note: str, source: Path | None = None
    ) -> None:
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
        raise ValueError(
            f"{path} can not be read as an image ({str(e) or type(e).__name__}): is it damaged, "
            "or of another format than its name says?"
        ) from e


def note_of_alpha(band: int) -> str:
    """Return the note on an image whose ``band`` is transparency."""
    return f"has transparency in band {band + 1}, which is no band of the image: where it is 0 there is no data (prepare --alpha band keeps it as a band)"
