"""What an image file says of its numbers: which way they are turned, which colours they are, whether they are those that were drawn.

Viewers and tools for annotation turn an image as its EXIF says, and compressions made for the eye change values: pixels taken
as they are stored would not lie under their masks, and labels would be others.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import numpy as np

ORIENTATION = 274  # tag of EXIF and of TIFF
_JPEGS = (6, 7, 99, 33007, 34892)
_LOSSY_TIFF = {**dict.fromkeys(_JPEGS, "JPEG"), **dict.fromkeys((33003, 33004, 33005), "JPEG 2000")}
_ALPHA = (1, 2)  # of TIFF's extra samples
_GDAL_METADATA = 42112  # tag
_INTERPRETED = re.compile(
    r'<Item name="COLORINTERP" sample="(\d+)" role="colorinterp">(\w+)</Item>'
)
_NODATA_COLOUR = re.compile(r'<Item name="NODATA_VALUES">([^<]*)</Item>')
_BITS, _GREY, _UPSIDE = "black and white", "grey", ", 0 is white"
_MODES = {"1": _BITS, "L": _GREY, "I": _GREY, "I;16": _GREY, "I;16B": _GREY, "F": _GREY}


def check_upright(path: Path, orientation: int) -> None:
    """Refuse an image that viewers turn.

    Raises:
        ValueError: naming the tag.
    """
    if orientation != 1:
        raise ValueError(
            f"{path} is to be turned or mirrored, its orientation (EXIF) is {orientation}, not 1: "
            "viewers do so, distseg takes pixels "
            "as they are stored. Write them upright, such as with ImageMagick's 'mogrify "
            "-auto-orient'"
        )


def orientation(path: Path, image) -> int:
    """The tag of an image that Pillow has opened; 1, upright, where there is none that counts."""
    from PIL import Image

    try:
        found = Image.Image.getexif(image).get(
            ORIENTATION
        )  # not PNG's own, which decodes the pixels first
        if found is None and image.format == "PNG" and (late := _late_exif(path)):
            exif = Image.Exif()
            exif.load(late)
            found = exif.get(ORIENTATION)
    except Exception:  # no viewer makes sense of it either
        return 1
    return turned(found)


def turned(tag) -> int:
    return int(tag) if tag in range(2, 9) else 1


def lossy(path: Path, image) -> str | None:
    """The compression that changed the numbers of an image that Pillow has opened."""
    if image.format in ("JPEG", "MPO"):
        return "JPEG"
    return "lossy WebP" if image.format == "WEBP" and not _is_lossless_webp(path) else None


def lossy_tiff(compression: int) -> str | None:
    return _LOSSY_TIFF.get(compression)


def colours(mode: str) -> str:
    """What Pillow's ``mode`` holds, in a word that is the same for TIFF."""
    return _MODES.get(mode, mode)


def tiff_alpha(page) -> int | None:
    """Return the number of the band that the tags of tifffile's ``page`` call transparency (alpha); None for none.

    GDAL's names of bands count before the tag ExtraSamples, which can only speak of the last bands.
    """
    first = page.samplesperpixel - len(page.extrasamples)
    named = {
        int(band): role == "Alpha"
        for band, role in _INTERPRETED.findall(str(page.tags.valueof(_GDAL_METADATA) or ""))
    }
    named = {first + k: extra in _ALPHA for k, extra in enumerate(page.extrasamples)} | named
    return next(
        (band for band, alpha in sorted(named.items()) if alpha and band < page.samplesperpixel),
        None,
    )


def tiff_palette(page) -> np.ndarray | None:
    """Return the colours (entries, 3) uint8 of the palette of tifffile's ``page``."""
    found = page.colormap
    if found is None or found.ndim != 2 or len(found) != 3:
        return None
    return (found >> 8 if found.max() > 255 else found).T.astype(
        np.uint8
    )  # some write bytes where 16 bits belong


def unread_nodata(page) -> tuple[str, ...]:
    """Return a note where GDAL's metadata name a colour that stands for no data, which is not read."""
    named = _NODATA_COLOUR.search(str(page.tags.valueof(_GDAL_METADATA) or ""))
    return (
        (f"names a colour for no data (NODATA_VALUES {named[1]}), which is not read",)
        if named
        else ()
    )


def tiff_colours(page, bands: int) -> str | None:
    """What the tags of tifffile's ``page`` say that ``bands`` are, once decoded; None where they leave it open."""
    kind, alpha = (
        getattr(page.photometric, "name", None),
        any(extra in _ALPHA for extra in page.extrasamples),
    )
    if kind in ("MINISBLACK", "MINISWHITE"):
        grey = _BITS if page.bitspersample == 1 else _GREY
        return {1: grey + _UPSIDE * (kind == "MINISWHITE"), 2: "LA" if alpha else None}.get(bands)
    if kind == "RGB":
        return {3: "RGB", 4: "RGBA" if alpha else None}.get(bands)
    if kind == "SEPARATED":
        return "CMYK" if bands == 4 else None
    if kind == "YCBCR":
        return "RGB" if page.compression in _JPEGS else "YCbCr"  # as decoders hand it out
    return kind


def _late_exif(path: Path) -> bytes:
    """The EXIF of a PNG, which may come after the pixels."""
    with open(path, "rb", buffering=0) as file:
        file.seek(8)
        while len(head := file.read(8)) == 8 and head[4:] != b"eXIf" and head[4:].isalpha():
            file.seek(struct.unpack(">I", head[:4])[0] + 4, os.SEEK_CUR)
        return (
            file.read(min(struct.unpack(">I", head[:4])[0], 1 << 20))
            if head[4:] == b"eXIf"
            else b""
        )


def _is_lossless_webp(path: Path) -> bool:
    """Whether the first chunk of pixels is; profiles and the like may come before it."""
    with open(path, "rb", buffering=0) as file:
        file.seek(12)
        while len(head := file.read(8)) == 8 and head[:4] not in (
            b"VP8 ",
            b"VP8L",
            b"ALPH",
            b"ANMF",
        ):
            size = struct.unpack("<I", head[4:])[0]
            file.seek(size + size % 2, os.SEEK_CUR)
    return head[:4] == b"VP8L"
