"""Check how many bytes a chunk of a zarr array unpacks to, before zarr decodes it.

Decoders trust the size that a chunk declares, or unpack until the end of the chunk, so a small file
could fill the memory. Headers tell the size of chunks in blosc, lz4 and zstd. Chunks in other
codecs are unpacked piece by piece.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MORE = 1 << 18  # bytes that a valid chunk may unpack to beyond its numbers; see _zstd
_HARMLESS = 1 << 26  # bytes that any chunk may unpack to
_PIECE = 1 << 18  # bytes that are unpacked at a time
_DEFLATED = 1032  # most bytes that a byte of deflate can unpack to
_BLOCK = 1 << 17  # most bytes that a block of zstd unpacks to
_LZMA_MEMORY = 1 << 28  # bytes; four times what the strongest preset needs
_NO_CHUNK = 2**64 - 1  # offset of a chunk that a shard leaves out
_SUMS = {"crc32": "start", "adler32": "start", "crc32c": "end", "fletcher32": "end"}
_UNCHANGED = ("transpose", "bytes")  # codecs of zarr v3 that turn numbers into bytes


@dataclass(frozen=True)
class Packing:
    """Codec that compresses ("packs") the bytes of a chunk.

    Attributes:
        codec: the name of the codec; None if the bytes are not packed.
        start: number of bytes of checksums that come before the packed bytes.
        form: the container format for the codec LZMA, a constant of :mod:`lzma`.
    """

    codec: str | None = None
    start: int = 0
    form: int = lzma.FORMAT_XZ


@dataclass(frozen=True)
class Shard:
    """Layout of a file that holds several chunks and an index of them.

    Attributes:
        count: number of chunks.
        first: True if the index is at the beginning of the file, not at its end.
        order: byte order of the index, ``<`` or ``>``.
        summed: number of bytes of the index's checksum.
        inner: how the bytes of each chunk are packed.
    """

    count: int
    first: bool
    order: str
    summed: int
    inner: Packing | Shard


def packing_of(codecs: Sequence[tuple[str, Mapping[str, Any]]], path: Path) -> Packing:
    """Return how the bytes of a zarr chunk are packed (compressed), from its codecs.

    Args:
        codecs: name and options of each codec, in the order of encoding.
        path: the image's folder, for messages.

    Raises:
        ValueError: the bytes are packed twice, are changed after they were packed, or are packed by
            LZMA without a header, so that the size of a chunk cannot be checked.
    """
    start, after = 0, None
    for at in reversed(range(len(codecs))):
        name, options = codecs[at]
        if name in _SUMS and after is None:
            start += 4 * (options.get("location", _SUMS[name]) == "start")
        elif name not in _CHECKS:
            after = name if name not in _UNCHANGED else after
        else:
            again = [other for other, _ in codecs[:at] if other in _CHECKS]
            form = options.get("format", lzma.FORMAT_XZ)
            if after or again or (name == "lzma" and form == lzma.FORMAT_RAW):
                raise ValueError(
                    f"{path} has chunks in the codecs {', '.join(name for name, _ in codecs)}, in "
                    "which the size of a chunk cannot be checked before it is decoded: write the "
                    "image with one compressor as the last codec, such as zstd"
                )
            return Packing(name, start, form)
    return Packing(None, start)


def unpacks_to_more(data: memoryview, packing: Packing | Shard, numbers: int) -> bool:
    """Return True if a chunk unpacks to far more bytes than its numbers can take.

    The result is also True if the file itself has far more bytes. It is False for a damaged chunk,
    which the decoder refuses.

    Args:
        data: the bytes of the chunk's or shard's file.
        packing: how these bytes are packed.
        numbers: how many numbers a chunk has; for a shard, each of its chunks.
    """
    if isinstance(packing, Shard):
        parts = _parts(data, packing)
        return any(unpacks_to_more(part, packing.inner, numbers) for part in parts)
    most = 8 * numbers + _MORE  # a filter may store a number in up to 8 bytes
    if len(data) > 2 * most:
        return True
    if packing.codec is None:
        return False
    total = 0
    try:
        for count in _CHECKS[packing.codec](data[packing.start :], packing.form, most):
            total += count
            if total > most:
                return True
    except lzma.LZMAError as e:
        return "Memory usage limit" in str(e)
    except (IndexError, OSError, EOFError, struct.error, zlib.error):
        pass  # damaged
    return False


def _parts(data: memoryview, shard: Shard) -> Iterator[memoryview]:
    """Yield the packed bytes of each chunk in a shard; nothing if the index is damaged."""
    length = 16 * shard.count + shard.summed
    if len(data) < length:
        return
    index = data[:length] if shard.first else data[len(data) - length :]
    for offset, count in struct.iter_unpack(f"{shard.order}QQ", index[: 16 * shard.count]):
        if offset != _NO_CHUNK and offset + count <= len(data):
            yield data[offset : offset + count]


def _blosc(data: memoryview, form: int, most: int) -> Iterator[int]:
    """Yield the number of bytes that a blosc chunk unpacks to, as its header declares it."""
    yield struct.unpack_from("<I", data, 4)[0]


def _lz4(data: memoryview, form: int, most: int) -> Iterator[int]:
    """Yield the number of bytes that an lz4 chunk unpacks to, as its header declares it."""
    yield struct.unpack_from("<I", data)[0]


def _zstd(data: memoryview, form: int, most: int) -> Iterator[int]:
    """Yield for each block of a zstd chunk an upper bound of the bytes that it unpacks to.

    The sum is too large by less than a block for each frame. If a frame declares more than ``most``
    bytes, this number is yielded at once.

    Source: RFC 8878, section 3.1.
    """
    at = 0
    while at < len(data):
        magic = struct.unpack_from("<I", data, at)[0]
        if magic & 0xFFFFFFF0 == 0x184D2A50:  # a frame to skip
            at += 8 + struct.unpack_from("<I", data, at + 4)[0]
            continue
        if magic != 0xFD2FB528:
            return
        about = data[at + 4]
        single = about >> 5 & 1
        at += 5 + (not single) + (0, 1, 2, 4)[about & 3]
        width = (single, 2, 4, 8)[about >> 6]
        declared = int.from_bytes(data[at : at + width], "little")
        if declared > most:
            yield declared
        at += width
        last = 0
        while not last:
            header = int.from_bytes(data[at : at + 3], "little") if at + 3 <= len(data) else None
            if header is None:
                return
            last, kind, size = header & 1, header >> 1 & 3, header >> 3
            yield size if kind < 2 else _BLOCK  # raw bytes, or a byte repeated
            at += 3 + (1 if kind == 1 else size)
        at += 4 * (about >> 2 & 1)


def _deflate(data: memoryview, wbits: int, most: int) -> Iterator[int]:
    """Yield how many bytes each piece of a zlib or gzip chunk unpacks to.

    Nothing is yielded for chunks that are too small to fill the memory.
    """
    if len(data) * _DEFLATED <= max(most, _HARMLESS):
        return
    stream = zlib.decompressobj(wbits)
    for start in range(0, len(data), _PIECE):
        piece = bytes(data[start : start + _PIECE])
        while piece:
            if stream.eof:  # gzip allows zeros between streams
                if not (piece := piece.lstrip(b"\0")):
                    break
                stream = zlib.decompressobj(wbits)
            yield len(stream.decompress(piece, _PIECE))
            piece = stream.unused_data if stream.eof else stream.unconsumed_tail


def _streams(data: memoryview, make: Callable[[], Any]) -> Iterator[int]:
    """Yield how many bytes each piece of a bz2 or LZMA chunk unpacks to.

    Args:
        data: the packed bytes.
        make: a function that returns a new decompressor.
    """
    stream = make()
    for start in range(0, len(data), _PIECE):
        piece = bytes(data[start : start + _PIECE])
        while piece or not (stream.eof or stream.needs_input):
            stream = make() if stream.eof else stream
            yield len(stream.decompress(piece, _PIECE))
            piece = stream.unused_data if stream.eof else b""


_CHECKS: dict[str, Callable[[memoryview, int, int], Iterator[int]]] = {
    "blosc": _blosc,
    "lz4": _lz4,
    "zstd": _zstd,
    "zlib": lambda data, form, most: _deflate(data, zlib.MAX_WBITS, most),
    "gzip": lambda data, form, most: _deflate(data, 16 + zlib.MAX_WBITS, most),
    "bz2": lambda data, form, most: _streams(data, bz2.BZ2Decompressor),
    "lzma": lambda data, form, most: _streams(
        data, lambda: lzma.LZMADecompressor(form, _LZMA_MEMORY)
    ),
}
