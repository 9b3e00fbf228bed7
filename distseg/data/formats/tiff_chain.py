"""The list of pages in a TIFF file, read without a decoder: where each page's tags begin, and which kind of page it is."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

REDUCED, MASK = 1, 4  # bits of a page's kind, NewSubfileType
_KIND, _OLD_KIND = 254, 255
_OLD = {2: REDUCED}
_MOST_TAGS = 1 << 12  # of a page that are looked at


def page_kinds(path: Path) -> dict[int, int]:
    """Return the kind of each page (NewSubfileType) by the byte at which its tags begin; empty for what is no TIFF.

    Raises:
        ValueError: the list runs in a circle, which a decoder may follow for ever.
    """
    found: dict[int, int] = {}
    with open(path, "rb") as file:
        order = {b"II": "<", b"MM": ">"}.get(file.read(2))
        if order is None:
            return found  # as the decoder will say
        big = struct.unpack(order + "H", file.read(2).ljust(2))[0] == 43
        number, entry, link = (
            (order + "Q", 20, order + "Q") if big else (order + "H", 12, order + "I")
        )
        file.seek(8 if big else 4)
        while at := _unpacked(file, link):
            if at in found:
                raise ValueError(f"its list of pages runs in a circle, back to byte {at}")
            file.seek(at)
            count, first = _unpacked(file, number), file.tell()
            found[at] = _kind(file.read(min(count, _MOST_TAGS) * entry), entry, order)
            file.seek(first + entry * count)
    return found


def _kind(tags: bytes, entry: int, order: str) -> int:
    """Return the kind that the ``tags`` of a page, of ``entry`` bytes each, say; 0, a full image, by default."""
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
    """Return a number, 0 at the end of the file."""
    data = file.read(struct.calcsize(form))
    return struct.unpack(form, data)[0] if len(data) == struct.calcsize(form) else 0
