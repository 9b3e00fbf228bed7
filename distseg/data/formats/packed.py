"""Check the size of a compressed TIFF strip or tile before it is decoded.

Decoders trust the size that a strip or tile declares, and would reserve that much memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

JPEGS = (6, 7, 33007, 34892)
DEFLATES = (8, 32946)
LERC = 34887
# Most bytes of pixels per byte of a strip or tile, by compression: none, LZW, PackBits, deflate.
MOST_PACKED = {1: 1, 5: 2731, 32773: 64, **dict.fromkeys(DEFLATES, 1032)}
_MORE = 1 << 16  # bytes that a valid strip or tile may have beyond its pixels
_PIECE = 1 << 18  # bytes that are unpacked at a time
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers of frames, which hold the size
_ALONE = {0x01, *range(0xD0, 0xDA)}  # JPEG markers without a length
_RATIOS = ((1, 1), (6, 5), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # width to height in JPEG XL


def fits(compression: int, pixels: int, packed: int) -> bool:
    """Return True if ``packed`` bytes of a strip or tile can decode to ``pixels`` bytes.

    The result is False if the packed bytes are too few for the pixels, or far too many.

    Args:
        compression: the number in the tag Compression. If distseg knows no limits for this
            compression, the result is True.
        pixels: number of bytes of the decoded pixels.
        packed: number of bytes of the strip or tile in the file.
    """
    most = MOST_PACKED.get(compression)
    return most is None or pixels // most <= packed <= 2 * pixels + _MORE


def unpacks_to_more(data: bytes, pixels: int) -> bool:
    """Return True if a strip or tile in deflate unpacks to at least 64 KiB more than ``pixels``.

    The bytes are unpacked piece by piece, so the check needs little memory.

    Args:
        data: the bytes of the strip or tile in the file.
        pixels: number of bytes that the decoded pixels should have.
    """
    stream, left = zlib.decompressobj(), pixels + _MORE
    for start in range(0, len(data), _PIECE):
        piece = memoryview(data)[start : start + _PIECE]
        while piece and not stream.eof:
            left -= len(stream.decompress(piece, _PIECE))
            piece = stream.unconsumed_tail
            if left <= 0:
                return True
    return False


def says_size(compression: int) -> bool:
    """Return True if :func:`size_of` can read the image size from data of this compression.

    Args:
        compression: the number in the tag Compression.
    """
    return compression in _SIZES


def size_of(compression: int, data: bytes) -> tuple[int, int] | None:
    """Return the (height, width) that the packed bytes of a strip or tile declare in their header.

    The result is None if the header has no size or is damaged.

    Args:
        compression: the number in the tag Compression, for which :func:`says_size` is True.
        data: the packed bytes of the strip or tile.
    """
    try:
        return _SIZES[compression](data)
    except (struct.error, IndexError, ValueError):
        return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Return (height, width) from the first frame header of a JPEG image; None without one."""
    at = 0
    while at + 9 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0x00, 0xFF):
            at += 1
        elif marker in _FRAMES:
            return struct.unpack_from(">HH", data, at + 5)
        else:
            at += 2 if marker in _ALONE else 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    """Return (height, width) from the header of a WebP image; None for an unknown kind of WebP."""
    kind = data[12:16]
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return height, width
    width, height = struct.unpack_from("<HH", data, 26)
    return (height & 0x3FFF, width & 0x3FFF) if kind == b"VP8 " else None


def _png(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", data, 16)
    return height, width


def _jpeg_2000(data: bytes) -> tuple[int, int]:
    right, bottom, left, top = struct.unpack_from(
        ">IIII", data, data.index(b"\xff\x4f\xff\x51") + 8
    )
    return bottom - top, right - left


def _jpeg_xl(data: bytes) -> tuple[int, int]:
    """Return (height, width) from the header of a JPEG XL image.

    The image is a bare codestream, or a codestream in a container of boxes.

    Source: ISO/IEC 18181-1, SizeHeader.
    """
    at = 0 if data[:2] == b"\xff\x0a" else data.index(b"\xff\x0a", data.index(b"jxl", 12))
    bits = int.from_bytes(data[at + 2 : at + 18], "little")

    def take(count: int) -> int:
        nonlocal bits
        found, bits = bits & (1 << count) - 1, bits >> count
        return found

    small = take(1)

    def length() -> int:
        return 8 * (take(5) + 1) if small else take((9, 13, 18, 30)[take(2)]) + 1

    height, ratio = length(), take(3)
    if not ratio:
        return height, length()
    over, under = _RATIOS[ratio - 1]
    return height, height * over // under


def _lerc(data: bytes) -> tuple[int, int] | None:
    if data[:6] != b"Lerc2 ":
        return None
    version = struct.unpack_from("<i", data, 6)[0]
    return struct.unpack_from("<ii", data, 14 if version > 2 else 10)


_SIZES: dict[int, Callable[[bytes], tuple[int, int] | None]] = {
    **dict.fromkeys(JPEGS, _jpeg),
    **dict.fromkeys((33003, 33004, 33005, 34712), _jpeg_2000),
    LERC: _lerc,
    34933: _png,
    50001: _webp,
    **dict.fromkeys((50002, 52546), _jpeg_xl),
}
