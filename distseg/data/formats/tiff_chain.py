"""Read the list of pages in a TIFF file without a decoder: position and kind of each page."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

REDUCED, MASK = 1, 4  # bits of the tag NewSubfileType: a reduced image, a validity mask
_KIND, _OLD_KIND = 254, 255  # tags NewSubfileType and SubfileType
_OLD = {2: REDUCED}
_MOST_TAGS = 1 << 12  # tags of a page that are read


def page_kinds(path: Path) -> dict[int, int]:
    """Return the kind (NewSubfileType) of each page of a TIFF file.

    The keys of the result are the positions in the file, in bytes, at which the tags of the pages
    begin. The values combine the bits ``REDUCED`` and ``MASK``; 0 is a full image. The result is
    empty if the file is no TIFF.

    Raises:
        ValueError: the list of pages is circular, so a decoder might never return.
    """
    found: dict[int, int] = {}
    with open(path, "rb") as file:
        order = {b"II": "<", b"MM": ">"}.get(file.read(2))
        if order is None:
            return found  # the decoder reports the error
        big = struct.unpack(order + "H", file.read(2).ljust(2))[0] == 43
        number, entry, link = (
            (order + "Q", 20, order + "Q") if big else (order + "H", 12, order + "I")
        )
        file.seek(8 if big else 4)
        while at := _unpacked(file, link):
            if at in found:
                raise ValueError(
                    f"its list of pages runs in a circle, back to byte {at}, so it is damaged"
                )
            file.seek(at)
            count, first = _unpacked(file, number), file.tell()
            found[at] = _kind(file.read(min(count, _MOST_TAGS) * entry), entry, order)
            file.seek(first + entry * count)
    return found


def _kind(tags: bytes, entry: int, order: str) -> int:
    """Return the kind (NewSubfileType) of a page; 0, a full image, if no tag tells it.

    Args:
        tags: the bytes of all tags of the page.
        entry: number of bytes of a tag: 12, or 20 in BigTIFF.
        order: byte order for ``struct``.
    """
    found = 0
    for at in range(0, len(tags) - entry + 1, entry):
        tag, number = struct.unpack_from(order + "HH", tags, at)
        if tag in (_KIND, _OLD_KIND):
            (value,) = struct.unpack_from(
                order + ("H" if number == 3 else "I"), tags, at + entry - (8 if entry == 20 else 4)
            )
            found = found or (value if tag == _KIND else _OLD.get(value, 0))
    return found


def _unpacked(file: BinaryIO, form: str) -> int:
    """Read one number by its ``struct`` format; return 0 at the end of the file."""
    data = file.read(struct.calcsize(form))
    return struct.unpack(form, data)[0] if len(data) == struct.calcsize(form) else 0
