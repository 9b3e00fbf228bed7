"""TIFF files read box by box: a memory map where nothing is compressed, else only the strips or tiles that a box touches. Tiles are
decoded anew for each box; strips, which boxes side by side share, wait decoded in a scratch file.

tifffile reads any number of bands and all number types. Without it, or without the decoder of a compression, Pillow has
to do, which knows the files of everyday cameras and scanners.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
import zlib
from functools import cached_property
from pathlib import Path
from typing import Iterable, Iterator

import numpy as np

from distseg.data import marks
from distseg.data.mapped import copied, let_go, room_for
from distseg.data.plausible import check_memory
from distseg.data.readers import _NODATA_TAG, PillowReader, Reader, declared, plain, readable
from distseg.extents import Extents
from distseg.geometry.tile import Box
from distseg.launch import release_freed_memory

_BANDS = "SCQI"  # samples, channels, and pages that say nothing about what they are
_UNNAMED = "QI"
_PALETTE = 3  # photometric interpretation
_DEFLATE = (8, 32946)
# Bytes of pixels that a byte of a segment can stand for, by compression: none, LZW, PackBits, deflate.
_MOST_PACKED = {1: 1, 5: 2731, 32773: 64, **dict.fromkeys(_DEFLATE, 1032)}
_MORE = 1 << 16  # bytes that a segment may have beyond its pixels
_LARGE = 1 << 18  # bytes; less unpacks to 270 MB at most
_CHEAP = 1 << 22  # bytes of a tile that may be decoded anew for each box
_AT_ONCE = 1 << 24  # bytes of a strip or tile from which on all of them are decoded at the first read, before other work takes memory


def open_tiff(path: Path, dims: int | None = None, scratch: str | None = None) -> Reader:
    """A reader of the first image in a file; with ``dims`` 3, unnamed pages are slices of a volume instead of bands.

    Raises:
        ValueError: neither tifffile nor Pillow can decode it; says what to install.
    """
    try:
        import tifffile
    except ImportError:
        return _with_pillow(path, "pip install tifffile, which reads more kinds of TIFF", scratch)
    check_chain(path)
    reader = TiffReader(path, tifffile.TiffFile(path), dims, scratch)
    marks.check_upright(path, reader.orientation)  # before Pillow turns it
    try:
        reader.try_first()
    except ValueError as e:
        if "imagecodecs" not in str(e):
            raise
        return _with_pillow(path, "pip install imagecodecs, which decodes this compression", scratch, reader)
    return reader


def _with_pillow(path: Path, hint: str, scratch: str | None, told: Reader | None = None) -> Reader:
    """``told``: what tifffile says is in the file, of which Pillow may see a part only."""
    try:
        reader = PillowReader(path, palette=told is not None and told.coded, tiff=True, scratch=scratch)
        reader.read(Box((0, 0), (1, 1)))
    except Exception as e:
        raise ValueError(f"{path} is beyond Pillow ({e}): {hint}") from e
    kind = lambda r: (r.bands, r.size, r.dtype)
    if told is not None and kind(reader) != kind(told):
        raise ValueError(f"{path} has {told.bands} bands of {told.dtype}, of which Pillow reads {reader.bands} of {reader.dtype}: {hint}")
    reader.coded = told is not None and told.coded
    return reader


class TiffReader(Reader):
    """The first series of a file. Its axes, such as YXS, CYX or ZYX, say which are space and which are bands."""

    def __init__(self, path: Path, file, dims: int | None = None, scratch: str | None = None):
        super().__init__(path)
        self._scratch = scratch
        self._file, self._series = file, file.series[0]
        weakref.finalize(self, file.close)
        self._axes, shape = _named(path, self._series, dims)
        self.size = tuple(n for a, n in zip(self._axes, shape) if a in "ZYX")
        self.bands = int(np.prod([n for a, n in zip(self._axes, shape) if a in _BANDS]))
        self.dtype = plain(self._series.dtype)
        page = self._series.keyframe
        self.coded, self.colours = page.photometric == _PALETTE, marks.tiff_colours(page, self.bands)
        self.orientation, self.lossy = marks.turned(page.tags.valueof(marks.ORIENTATION)), marks.lossy_tiff(page.compression)
        told = page.tags.valueof(_NODATA_TAG)
        self.nodata = None if told is None else declared(path, str(told), self.dtype)
        self._map = None
        if self._series.dataoffset is not None:
            self._map = self._mapped(shape)
        else:
            self._check_segments()
        if self._map is None and len(self._pages_axes) > 1:
            raise ValueError(f"{path} is compressed and has pages along {' and '.join(self._pages_axes)}: store it uncompressed, or as npy")

    def _mapped(self, shape: list[int]) -> np.ndarray:
        stored = np.dtype(self._series.dtype).newbyteorder(self._file.byteorder)
        there = os.path.getsize(self.path) - self._series.dataoffset
        needed = math.prod(int(n) for n in shape) * stored.itemsize
        if needed > there:
            words = f"it holds {Extents(shape)} numbers of {stored}, {needed} bytes"
            raise ValueError(f"its header says that {words}, but it has {there}")
        return np.memmap(self.path, stored, "r", self._series.dataoffset, tuple(shape))

    def _check_segments(self) -> None:
        """Each page has all its strips or tiles, and one of them, which is decoded whole, fits into memory."""
        layout = self._series.keyframe
        needed = math.prod(int(n) for n in layout.chunked)
        for page in self._series.pages:
            if len(page.dataoffsets) != needed or len(page.databytecounts) != needed:
                words = f"{Extents(self.size)} pixels are in {needed} strips or tiles"
                raise ValueError(f"its header says that {words}, but lists {len(page.dataoffsets)}")
        self._segment_bytes = math.prod(int(n) for n in layout.chunks) * layout.dtype.itemsize
        size, taken = Extents(layout.chunks[: 3 if layout.tiledepth > 1 else 2]), 3 * self._segment_bytes
        check_memory(self.path, f"a strip or tile of {size} pixels is", taken)
        for page in self._series.pages:
            for index, count in enumerate(page.databytecounts):
                self._check_packed(layout.compression, index, count)
        self.decoding = taken + self._segment_bytes if self._at_once else 0  # with its pages of the scratch file

    @property
    def _at_once(self) -> bool:
        return self._segment_bytes > _AT_ONCE

    def try_first(self) -> None:
        """Decode a strip or tile, to see whether that can be done. ValueError says what it takes."""
        if self._map is None:
            with readable(self.path):
                self._keep(0, [0]) if self._kept is not None else self._part(0, (slice(0, 1),) * 3)

    @property
    def _pages_axes(self) -> str:
        """The axes that run over pages; the others lie within each."""
        spread = len(self._series.pages) > 1
        inside = sum(n > 1 or a in "YX" for a, n in zip(self._series.keyframe.axes, self._series.keyframe.shape))
        return self._axes[: len(self._axes) - inside] if spread else ""

    def _read(self, box: Box) -> np.ndarray:
        """(bands, *box.size)"""
        if self._map is None:
            return self._decoded(box).reshape(self.bands, *box.size)
        where = dict(zip((a for a in self._axes if a in "ZYX"), box.slices))
        part = self._map[tuple(where.get(a, slice(None)) for a in self._axes)]
        order = sorted(range(part.ndim), key=lambda axis: self._axes[axis] in "ZYX")  # bands first, else as it was
        return copied(self._map, part.transpose(order)).reshape(self.bands, *box.size)

    def _decoded(self, box: Box) -> np.ndarray:
        """(bands, depth, height, width) of a box, from the pages it lies on."""
        depth, plane = slice(0, 1), box.slices[-2:]
        if len(box.start) == 3:
            depth = box.slices[0]
        if self._pages_axes != "Z":
            return np.concatenate([self._page(number, (depth, *plane)) for number in range(len(self._series.pages))])
        return np.concatenate([self._page(z, (slice(0, 1), *plane)) for z in range(depth.start, depth.stop)], axis=1)

    def _page(self, number: int, wanted: tuple[slice, ...]) -> np.ndarray:
        """(bands, depth, height, width) of a part of a page."""
        found = self._part(number, wanted)
        return np.moveaxis(found, -1, 1).reshape(-1, *found.shape[1:4])

    def _part(self, number: int, wanted: tuple[slice, ...]) -> np.ndarray:
        """(separate bands, depth, height, width, interleaved bands) of a part of a page, from where its strips are kept, or decoded."""
        layout, kept = self._series.keyframe, self._kept
        if kept is None:
            found = np.empty((layout.shaped[0], *(s.stop - s.start for s in wanted), layout.shaped[-1]), self.dtype)
            for index in self._touched(wanted):
                self._decode(number, index, wanted, found)
            return found
        self._keep(number, self._touched(self._whole if self._at_once else wanted))
        return copied(kept, kept[(number, slice(None), *wanted)])

    def _keep(self, number: int, segments: Iterable[int]) -> None:
        """Decode strips or tiles of a page that were not decoded before."""
        for index in segments:
            if not self._done[number, index]:
                self._decode(number, index, self._whole, self._kept[number])
                let_go(self._kept)
                self._done[number, index] = True
                if self._at_once:
                    release_freed_memory()

    @cached_property
    def _kept(self) -> np.ndarray | None:
        """Room for all pages, where boxes share strips, or tiles that are dear to decode."""
        layout, pages = self._series.keyframe, self._series.pages
        if layout.is_tiled and self._segment_bytes <= _CHEAP:
            return None
        self._done = np.zeros((len(pages), len(pages[0].dataoffsets)), bool)
        return room_for((len(pages), *layout.shaped), self.dtype, self._scratch)

    @property
    def _whole(self) -> tuple[slice, ...]:
        return tuple(slice(0, n) for n in self._series.keyframe.shaped[1:4])

    def _touched(self, wanted: tuple[slice, ...]) -> Iterator[int]:
        """The strips or tiles of a page that overlap with the wanted slices."""
        layout = self._series.keyframe
        for index in range(math.prod(int(n) for n in layout.chunked)):
            _, at, shape = layout.decode(None, index)
            if all(a < s.stop and s.start < a + n for a, n, s in zip(at[1:4], shape, wanted)):
                yield index

    def _decode(self, number: int, index: int, wanted: tuple[slice, ...], out: np.ndarray) -> None:
        """A strip or tile of a page, as far as it overlaps with the wanted slices, into ``out``, which has these."""
        page, layout = self._series.pages[number], self._series.keyframe
        count = page.databytecounts[index]
        data = self._bytes(page.dataoffsets[index], count) if count else None
        if data is not None:
            self._check_unpacked(layout.compression, data)
        segment, at, shape = layout.decode(data, index, jpegtables=page.jpegtables, jpegheader=layout.jpegheader)
        target, source = zip(*(_overlap(a, n, s) for a, n, s in zip(at[1:4], shape if segment is None else segment.shape, wanted)))
        out[(at[0], *target)] = layout.nodata if segment is None else segment[source]  # what a sparse file leaves out

    def _check_packed(self, compression: int, index: int, count: int) -> None:
        """Whether a segment of so many bytes, if it is there at all, can be what it should be; the last one may hold less than the others."""
        most = _MOST_PACKED.get(compression)
        if most is None or not count or self._packed(self._segment_bytes) // most <= count <= 2 * self._segment_bytes + _MORE:
            return
        layout = self._series.keyframe
        _, at, shape = layout.decode(None, index)
        inside = math.prod(min(a + n, m) - a for a, n, m in zip(at[1:4], shape, layout.shaped[1:4])) * layout.shaped[-1] * layout.dtype.itemsize
        if not self._packed(inside) // most <= count <= 2 * self._segment_bytes + _MORE:
            raise ValueError(f"a strip or tile of {inside} bytes can't be packed into {count}")

    def _packed(self, pixels: int) -> int:
        """Bytes in a file of so many bytes of pixels: less, of bits."""
        layout = self._series.keyframe
        return pixels * layout.bitspersample // (8 * layout.dtype.itemsize)

    def _check_unpacked(self, compression: int, data: bytes) -> None:
        """Large deflated segments are looked at first: tifffile would unpack whatever comes."""
        if compression in _DEFLATE and len(data) > _LARGE:
            stream, left = zlib.decompressobj(), self._segment_bytes + _MORE
            for start in range(0, len(data), _LARGE):
                piece = memoryview(data)[start : start + _LARGE]
                while piece and not stream.eof:
                    left -= len(stream.decompress(piece, _LARGE))
                    piece = stream.unconsumed_tail
                    if left <= 0:
                        raise ValueError(f"a strip or tile of {self._segment_bytes} bytes unpacks to more")

    def _bytes(self, offset: int, count: int) -> bytes:
        self._file.filehandle.seek(offset)
        return self._file.filehandle.read(count)


def check_chain(path: Path) -> None:
    """Refuse a file whose list of pages runs in a circle: a decoder may follow it for ever.

    Raises:
        ValueError: says where.
    """
    seen: set[int] = set()
    with open(path, "rb") as file:
        order = {b"II": "<", b"MM": ">"}.get(file.read(2))
        big = order is not None and struct.unpack(order + "H", file.read(2).ljust(2))[0] == 43
        if order is None:
            return  # no TIFF, as the decoder will say
        number, entry, link, first = ("Q", 20, "Q", 8) if big else ("H", 12, "I", 4)
        file.seek(first)
        while at := _unpacked(file, order + link):
            if at in seen:
                raise ValueError(f"its list of pages runs in a circle, back to byte {at}")
            seen.add(at)
            file.seek(at)
            file.seek(entry * _unpacked(file, order + number), os.SEEK_CUR)


def _unpacked(file, form: str) -> int:
    """A number, 0 at the end of the file."""
    data = file.read(struct.calcsize(form))
    return struct.unpack(form, data)[0] if len(data) == struct.calcsize(form) else 0


def _named(path: Path, series, dims: int | None) -> tuple[str, list[int]]:
    """The axes that matter and their lengths; ValueError for axes that are neither space nor bands."""
    kept = [(a, n) for a, n in zip(series.axes, series.shape) if n > 1 or a in "YX"]
    if dims == 3 and not any(a == "Z" for a, _ in kept):
        kept = [("Z" if a in _UNNAMED else a, n) for a, n in kept]
    axes = "".join(a for a, _ in kept)
    if set(axes) - set(_BANDS + "ZYX") or sum(a in _BANDS for a in axes) > 1:
        raise ValueError(
            f"{path} has the axes {series.axes} of {tuple(series.shape)}, but an image has space and one axis of bands: "
            "write one file for each entry of the others"
        )
    return axes, [n for _, n in kept]


def _overlap(at: int, length: int, wanted: slice) -> tuple[slice, slice]:
    """Where a segment's pixels [at, at + length) go in the wanted slice, and which of its own those are."""
    a, b = max(at, wanted.start), min(at + length, wanted.stop)
    return slice(a - wanted.start, b - wanted.start), slice(a - at, b - at)
