"""TIFF files as images: which pages are read (:mod:`distseg.data.tiff_segments` reads them), and what their tags say of the numbers."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
from tifffile import TiffFile

from distseg.data import marks
from distseg.data.nodata import NODATA_TAG, declared
from distseg.data.readers import Reader
from distseg.data.tiff_chain import page_kinds
from distseg.data.tiff_pages import Pages, choose
from distseg.data.tiff_segments import Segments
from distseg.geometry.tile import Box

_PALETTE = 3  # photometric interpretation


def open_tiff(path: Path, dims: int | None = None, scratch: str | None = None) -> Reader:
    """Open the first image of a file; with ``dims`` 3, unnamed pages are slices of a volume instead of bands.

    Raises:
        ValueError: a form that is not read, or a damaged file.
    """
    kinds = page_kinds(path)  # first: it refuses circles
    file = TiffFile(path, _multifile=False)
    reader = TiffReader(path, file, choose(path, file, kinds), dims, scratch)
    reader.try_first()
    return reader


class TiffReader(Reader):
    """The image of a file, which lies on its ``pages``."""

    def __init__(self, path: Path, file: TiffFile, pages: Pages, dims: int | None = None, scratch: str | None = None):
        super().__init__(path)
        weakref.finalize(self, file.close)
        page = pages.image.keyframe
        self._pixels = Segments(path, file, pages.image, dims, marks.tiff_alpha(page), scratch)
        self.notes = pages.notes + self._pixels.notes
        self.size, self.bands, self.dtype = self._pixels.size, self._pixels.bands, self._pixels.dtype
        self.decoding = self._pixels.decoding
        self.coded, self.colours = page.photometric == _PALETTE, marks.tiff_colours(page, self.bands)
        self.orientation = marks.turned(page.tags.valueof(marks.ORIENTATION))
        self.lossy = "LERC with an error" if self._pixels.lossy_lerc else marks.lossy_tiff(page.compression)
        told = page.tags.valueof(NODATA_TAG)
        self.nodata = None if told is None else declared(path, str(told), self.dtype)

    def try_first(self) -> None:
        """Decode a strip or tile, to see whether that can be done. ValueError says what it takes."""
        marks.check_upright(self.path, self.orientation)
        self._pixels.try_first()

    def _read(self, box: Box) -> np.ndarray:
        return self._pixels.read(box)
