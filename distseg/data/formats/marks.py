"""Properties of an image that its file declares: orientation, colours and lossy compression.

Viewers and annotation tools turn an image by its EXIF orientation, but distseg reads pixels as they
are stored. So a turned image would not match its mask. A lossy compression changes pixel values, so
the labels of a mask would be wrong.
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
_ALPHA = (1, 2)  # values of the tag ExtraSamples for transparency
_GDAL_METADATA = 42112  # TIFF tag of GDAL's metadata
_INTERPRETED = re.compile(
    r'<Item name="COLORINTERP" sample="(\d+)" role="colorinterp">(\w+)</Item>'
)
_NODATA_COLOUR = re.compile(r'<Item name="NODATA_VALUES">([^<]*)</Item>')
_SCALES = re.compile(
    r'<Item[^>]* role="(scale|offset)"[^>]*>\s*'
    r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*</Item>"
)
_WEBP_PIXELS = (b"VP8 ", b"VP8L", b"ALPH", b"ANMF")  # chunks with pixels
_BITS, _GREY, _UPSIDE = "black and white", "grey", ", 0 is white"
_MODES = {"1": _BITS, "L": _GREY, "I": _GREY, "I;16": _GREY, "I;16B": _GREY, "F": _GREY}


def check_upright(path: Path, orientation: int) -> None:
    """Refuse an image that viewers would rotate or mirror.

    Args:
        path: the file, for the message.
        orientation: the EXIF orientation of the image.

    Raises:
        ValueError: ``orientation`` is not 1 (upright).
    """
    if orientation != 1:
        raise ValueError(
            f"{path} has the EXIF orientation {orientation}, not 1: viewers turn or mirror it, but "
            f"distseg reads pixels as they are stored. Store them upright, for example with "
            f"ImageMagick's 'mogrify "
            "-auto-orient'"
        )


def orientation(path: Path, image) -> int:
    """Return the EXIF orientation of Pillow's ``image``; 1 (upright) if it has no valid one."""
    from PIL import Image

    try:
        # Call the base class's method: the method of PNG images would decode all pixels first.
        found = Image.Image.getexif(image).get(ORIENTATION)
        if found is None and image.format == "PNG" and (late := _late_exif(path)):
            exif = Image.Exif()
            exif.load(late)
            found = exif.get(ORIENTATION)
    except Exception:  # invalid EXIF data, which viewers ignore too
        return 1
    return turned(found)


def turned(tag) -> int:
    """Return the value of an EXIF orientation tag as int, or 1 (upright) if it is not valid."""
    return int(tag) if tag in range(2, 9) else 1


def lossy(path: Path, image) -> str | None:
    """Return the name of the lossy compression of Pillow's ``image``; None if it is lossless."""
    if image.format in ("JPEG", "MPO"):
        return "JPEG"
    return "lossy WebP" if image.format == "WEBP" and not _is_lossless_webp(path) else None


def lossy_tiff(compression: int) -> str | None:
    """Return the name of a TIFF file's lossy compression; None if it is lossless.

    Args:
        compression: the number in the tag Compression.
    """
    return _LOSSY_TIFF.get(compression)


def colours(mode: str) -> str:
    """Return a word for the meaning of the bands in Pillow's ``mode``, such as ``grey`` for L.

    All images of a store must have bands of the same meaning. :func:`tiff_colours` uses the same
    names.
    """
    return _MODES.get(mode, mode)


def tiff_alpha(page) -> int | None:
    """Return the index of the band that tifffile's ``page`` marks as transparency, or None.

    GDAL's metadata take precedence over the tag ExtraSamples, which describes the last bands only.
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
    """Return the palette of tifffile's ``page``, (entries, 3) uint8; None without one."""
    found = page.colormap
    if found is None or found.ndim != 2 or len(found) != 3:
        return None
    # The standard demands 16 bits, but some programs write 8.
    return (found >> 8 if found.max() > 255 else found).T.astype(np.uint8)


def unread_nodata(page) -> tuple[str, ...]:
    """Return a note if GDAL's metadata say that a colour means "no data".

    distseg does not read such a colour. The result is a tuple with the note, or an empty tuple.

    Args:
        page: tifffile's page, which has the tags.
    """
    named = _NODATA_COLOUR.search(str(page.tags.valueof(_GDAL_METADATA) or ""))
    if not named:
        return ()
    return (f"names a colour for no data (NODATA_VALUES {named[1]}), which is not read",)


def unread_scale(page) -> tuple[str, ...]:
    """Return a note if GDAL's metadata give a scale or an offset for pixels.

    distseg does not apply such a scale or offset. The result is a tuple with the note. It is empty
    if there is no scale or offset, or if they would change no pixel.

    Args:
        page: tifffile's page, which has the tags.
    """
    given = _SCALES.findall(str(page.tags.valueof(_GDAL_METADATA) or ""))
    found = {f"the {role} {value}" for role, value in given if float(value) != (role == "scale")}
    if not found:
        return ()
    said = " and ".join(sorted(found))
    return (
        f"declares {said}, not applied: pixels stay as stored, so all images must have the same",
    )


def tiff_colours(page, bands: int) -> str | None:
    """Return a word for the meaning of a TIFF's decoded bands, such as ``RGB``.

    The result is None if the tags do not tell it.

    Args:
        page: tifffile's page, which has the tags.
        bands: number of decoded bands.
    """
    kind = getattr(page.photometric, "name", None)
    alpha = any(extra in _ALPHA for extra in page.extrasamples)
    if kind in ("MINISBLACK", "MINISWHITE"):
        grey = _BITS if page.bitspersample == 1 else _GREY
        return {1: grey + _UPSIDE * (kind == "MINISWHITE"), 2: "LA" if alpha else None}.get(bands)
    if kind == "RGB":
        return {3: "RGB", 4: "RGBA" if alpha else None}.get(bands)
    if kind == "SEPARATED":
        return "CMYK" if bands == 4 else None
    if kind == "YCBCR":
        return "RGB" if page.compression in _JPEGS else "YCbCr"  # JPEG decoders return RGB
    return kind


def _late_exif(path: Path) -> bytes:
    """Return the EXIF data of a PNG file; empty if it has none.

    EXIF data may follow the pixels in the file. Pillow would decode the pixels to find the data;
    this function skips the pixels.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(8)
        while len(head := file.read(8)) == 8 and head[4:] != b"eXIf" and head[4:].isalpha():
            file.seek(struct.unpack(">I", head[:4])[0] + 4, os.SEEK_CUR)
        if head[4:] != b"eXIf":
            return b""
        return file.read(min(struct.unpack(">I", head[:4])[0], 1 << 20))


def _is_lossless_webp(path: Path) -> bool:
    """Return True if the pixels of a WebP file are compressed without loss.

    The type of the first chunk with pixels tells it. Other chunks, such as colour profiles, may
    come before this one.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(12)
        while len(head := file.read(8)) == 8 and head[:4] not in _WEBP_PIXELS:
            size = struct.unpack("<I", head[4:])[0]
            file.seek(size + size % 2, os.SEEK_CUR)
    return head[:4] == b"VP8L"
