"""Choose the pages of a TIFF file that are the image, and those that are its validity mask.

Thumbnails and pyramid levels are left out if their tags mark them as reduced images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tifffile import TiffFile, TiffPageSeries

from distseg.config.sizes import Size
from distseg.data.formats.tiff_chain import MASK, REDUCED

_PER_CALL = "shaped"  # series that a call of tifffile's writer makes
_BY_LIKENESS = ("generic", "uniform")  # series of pages that only share their shape and dtype


@dataclass(frozen=True)
class Pages:
    """Pages of a TIFF file: those of the image, those of its validity mask, and notes on others."""

    image: TiffPageSeries
    mask: TiffPageSeries | None
    notes: tuple[str, ...]


def choose(path: Path, file: TiffFile, kinds: Mapping[int, int]) -> Pages:
    """Return the pages of the first image of full size, of its validity mask, and notes.

    An image has full size if its tags do not mark it as reduced, such as a thumbnail. The notes
    are about the other pages of the file.

    Args:
        path: the file, for messages.
        file: the open file.
        kinds: the kind of each page (:func:`distseg.data.formats.tiff_chain.page_kinds`).

    Raises:
        ValueError: another image of the file is larger than the first, there are several masks of
            full size, or the file declares pages of different kinds as one image.
    """
    parts = [part for series in file.series for part in _by_kind(path, series, kinds)]
    full = [series for kind, series in parts if not kind & (REDUCED | MASK)] or [file.series[0]]
    image, *others = _joined(full)
    for other in others:
        if _pixels(other) > _pixels(image):
            raise ValueError(
                f"{path} holds {_in_words(image)} first, and a larger image, {_in_words(other)}: "
                "write the intended image into a separate file"
            )
    masks = [series for kind, series in parts if kind & MASK and not kind & REDUCED]
    if (count := sum(len(series.pages) for series in masks)) > 1:
        raise ValueError(
            f"{path} has {count} masks of full size, but only one can be read: write the image and "
            f"one mask into a separate file"
        )
    more = f"{len(others)} more images" if len(others) > 1 else "one more image"
    are = "are" if len(others) > 1 else "is"
    note = f"has {more}, which {are} not read: {', '.join(map(_in_words, others))}"
    return Pages(image, masks[0] if masks else None, (note,) if others else ())


def _by_kind(
    path: Path, series: TiffPageSeries, kinds: Mapping[int, int]
) -> Iterator[tuple[int, TiffPageSeries]]:
    """Split a series by the kinds of its pages: yield (kind, series of the pages of this kind).

    This is needed because tifffile puts an image and a mask of the same shape and dtype into one
    series.

    Args:
        path: the file, for the message.
        series: the pages that tifffile takes for one image.
        kinds: the kind of each page (:func:`distseg.data.formats.tiff_chain.page_kinds`).

    Raises:
        ValueError: the file itself declares pages of different kinds as one image.
    """
    there: dict[int, list] = {}
    for page in series.pages:
        if page is not None:
            kind = kinds.get(page.offset, getattr(page, "subfiletype", 0))
            there.setdefault(kind & (REDUCED | MASK), []).append(page)
    if len(there) < 2:
        yield next(iter(there), 0), series
        return
    if series.kind not in _BY_LIKENESS:
        raise ValueError(
            f"{path} declares pages of different kinds (full images, reduced images, masks) as "
            "one image: write each kind into a file of its own"
        )
    for kind, pages in there.items():
        yield kind, _series_of(pages, series)


def _joined(images: list[TiffPageSeries]) -> list[TiffPageSeries]:
    """Return images in which pages that were written by separate calls are joined to one image.

    tifffile's writer adds metadata to the pages of each call. So tifffile reads a page that was
    written by a call of its own as an image of its own. Only the first pages are joined, up to a
    page of another shape or dtype.

    Args:
        images: the images of full size in the file, as tifffile reads them.
    """
    first = images[0]
    same = 0
    for series in images:
        if series.kind != _PER_CALL or len(series.pages) != 1:
            break
        if series.keyframe.hash != first.keyframe.hash:
            break
        same += 1
    if same < 2:
        return images
    return [_series_of([series.keyframe for series in images[:same]], first), *images[same:]]


def _series_of(pages: list, like: TiffPageSeries) -> TiffPageSeries:
    """Return tifffile's series, an image of several pages, for pages of the same shape and dtype.

    Its kind, such as OME or ImageJ, is that of the series ``like``.
    """
    form = pages[0].keyframe
    spread = len(pages) > 1
    return TiffPageSeries(
        pages,
        (len(pages), *form.shape) if spread else form.shape,
        form.dtype,
        "I" * spread + form.axes,
        parent=like.parent,
        kind=like.kind,
    )


def _pixels(series: TiffPageSeries) -> int:
    page = series.keyframe
    return page.imagedepth * page.imagelength * page.imagewidth


def _in_words(series: TiffPageSeries) -> str:
    """Return a phrase with the size, bands, dtype and number of pages of an image."""
    page, pages = series.keyframe, len(series.pages)
    size = Size([page.imagedepth, page.imagelength, page.imagewidth][page.imagedepth == 1 :])
    on = f" on {pages} pages" if pages > 1 else ""
    return f"{size} pixels of {page.samplesperpixel} x {page.dtype}{on}"
