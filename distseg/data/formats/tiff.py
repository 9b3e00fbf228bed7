"""Open TIFF files as images: choose the pages, and read from tags what their numbers mean.

:mod:`distseg.data.formats.tiff_segments` reads the pixels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tifffile import TiffFile

from distseg.config.sizes import Size
from distseg.data.formats import marks
from distseg.data.formats.alpha import MASK
from distseg.data.formats.base import Reader, note_of_alpha
from distseg.data.formats.georeference import place_in
from distseg.data.formats.slides import place_of_slide
from distseg.data.formats.tiff_chain import page_kinds
from distseg.data.formats.tiff_pages import Pages, choose
from distseg.data.formats.tiff_segments import Segments
from distseg.data.nodata import NODATA_TAG, declared
from distseg.tiling.tile import Box

_PALETTE = 3  # PhotometricInterpretation of palette images


def open_tiff(path: Path, dims: int | None, scratch: str | None, alpha: str) -> Reader:
    """Return the reader of the first image of a TIFF file that is no thumbnail or pyramid level.

    Args:
        path: the file.
        dims: 3 to read pages whose axis has no name as slices of a volume; otherwise they are
            bands.
        scratch: folder for decoded strips (:func:`distseg.data.formats.mapped.mapped_array`).
        alpha: how transparency is read (:func:`distseg.data.formats.readers.open_image`).

    Raises:
        ValueError: the file is damaged, or distseg does not read TIFF files of its kind.
    """
    file, pages = _opened(path)
    reader = TiffReader(path, file, pages, dims, scratch, alpha)
    reader.try_first()
    return reader


def open_mask_file(
    path: Path, size: tuple[int, ...], scratch: str | None
) -> Callable[[Box], np.ndarray]:
    """Open a file that holds the validity mask of an image.

    Args:
        path: the file.
        size: the size of the image.
        scratch: folder for decoded strips (:func:`distseg.data.formats.mapped.mapped_array`).

    Returns:
        A function from a box to (*box.size) bool, True where there is data.

    Raises:
        ValueError: the mask has another size than the image, or several bands.
    """
    file, pages = _opened(path)
    return Mask(path, file, Segments(path, file, pages.image, None, None, scratch), size)


def _opened(path: Path) -> tuple[TiffFile, Pages]:
    kinds = page_kinds(path)  # first, since tifffile may follow a circular list for ever
    file = TiffFile(path, _multifile=False)  # pages in other files are not opened
    return file, choose(path, file, kinds)


class Mask:
    """Validity mask of an image, read from a TIFF file; an object of the class is a function.

    Called with a box, it returns (*box.size) bool: True where the single band of the mask is not 0,
    which means that the image has data there.

    Args:
        path: the file, for messages.
        file: the open file, which is closed together with the mask.
        segments: the reader of the mask's pixels.
        size: the size of the image.

    Raises:
        ValueError: the mask has another size than the image, has several bands, or cannot be
            decoded.
    """

    def __init__(self, path: Path, file: TiffFile, segments: Segments, size: tuple[int, ...]):
        weakref.finalize(self, file.close)
        if segments.size != size or segments.bands != 1:
            size_text = (
                f"{Size(segments.size)} pixels of {segments.bands} band{'s' * (segments.bands > 1)}"
            )
            raise ValueError(
                f"{path} has a validity mask of {size_text}, but the image has {Size(size)} "
                "pixels, and a mask must have one band of this size: write it anew, or remove it"
            )
        segments.try_first()
        self._segments = segments

    def __call__(self, box: Box) -> np.ndarray:
        return self._segments.read(box)[0] != 0


class TiffReader(Reader):
    """Reader of the image on the chosen pages of a TIFF file.

    Args:
        path: the file.
        file: the open file, which is closed together with the reader.
        pages: the pages of the image and of its validity mask.
        dims, scratch, alpha: see :func:`open_tiff`.
    """

    def __init__(
        self,
        path: Path,
        file: TiffFile,
        pages: Pages,
        dims: int | None,
        scratch: str | None,
        alpha: str,
    ):
        super().__init__(path)
        weakref.finalize(self, file.close)
        page = pages.image.keyframe
        band = marks.tiff_alpha(page)
        self._pixels = Segments(path, file, pages.image, dims, band, scratch)
        self.notes = pages.notes + self._pixels.notes
        if alpha == MASK and band is not None and self._pixels.bands == page.samplesperpixel > 1:
            self.alpha = band
            self.notes += (note_of_alpha(band),)
        self.size, self.dtype = self._pixels.size, self._pixels.dtype
        self.bands = self._pixels.bands - (self.alpha is not None)
        self.decoding, self.kept = self._pixels.decoding, self._pixels.kept
        self.block_rows = self._pixels.block_rows
        self.stack = dims is None and self._pixels.stack
        if pages.mask is not None:
            mask = Segments(path, file, pages.mask, None, None, scratch)
            self.decoding = max(self.decoding, mask.decoding)
            self.kept += mask.kept
            self.add_mask(
                Mask(path, file, mask, self.size),
                "has a validity mask: pixels where the mask is 0 have no data",
            )
        self.coded = page.photometric == _PALETTE
        self.colours = marks.tiff_colours(page, self.bands)
        self.orientation = marks.turned(page.tags.valueof(marks.ORIENTATION))
        self.lossy = (
            "LERC with an error" if self._pixels.lossy_lerc else marks.lossy_tiff(page.compression)
        )
        self.place = place_in(page) or place_of_slide(page.description)
        self.palette = marks.tiff_palette(page) if self.coded else None
        nodata = page.tags.valueof(NODATA_TAG)
        self.nodata = None if nodata is None else declared(path, str(nodata), self.dtype)
        self.notes += marks.unread_nodata(page) + marks.unread_scale(page)

    def try_first(self) -> None:
        """Decode one strip or tile, so that an unreadable file is refused at once.

        Raises:
            ValueError: the strip or tile cannot be decoded; the message names the cause.
        """
        marks.check_upright(self.path, self.orientation)
        self._pixels.try_first()

    def _read(self, box: Box) -> np.ndarray:
        return self._pixels.read(box)
