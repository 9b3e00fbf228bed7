"""TIFF files read box by box: a memory map where nothing is compressed, else only the strips or tiles that a box touches.

tifffile reads any number of bands and all number types. Without it, or without the decoder of a compression, Pillow has
to do, which knows the files of everyday cameras and scanners.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
import zlib
from pathlib import Path

import numpy as np

from distseg.data import marks
from distseg.data.plausible import check_memory
from distseg.data.readers import _NODATA_TAG, PillowReader, Reader, copied, declared, plain
from distseg.extents import Extents
from distseg.geometry.tile import Box

_BANDS = "SCQI"  # samples, channels, and pages that say nothing about what they are
_UNNAMED = "QI"
_PALETTE = 3  # photometric interpretation
_DEFLATE = (8, 32946)
# Bytes of pixels that a byte of a segment can stand for, by compression: none, LZW, PackBits, deflate.
_MOST_PACKED = {1: 1, 5: 2731, 32773: 64, **dict.fromkeys(_DEFLATE, 1032)}
_MORE = 1 << 16  # bytes that a segment may have beyond its pixels
_LARGE = 1 << 18  # bytes; less unpacks to 270 MB at most


def open_tiff(path: Path, dims: int | None = None) -> Reader:
    """A reader of the first image in a file; with ``dims`` 3, unnamed pages are slices of a volume instead of bands.

    Raises:
        ValueError: neither tifffile nor Pillow can decode it; says what to install.
    """
    try:
        import tifffile
    except ImportError:
        return _with_pillow(path, "pip install tifffile, which reads more kinds of TIFF")
    check_chain(path)
    reader = TiffReader(path, tifffile.TiffFile(path), dims)
    marks.check_upright(path, reader.orientation)  # before Pillow turns it
    try:
        reader.read(Box((0,) * len(reader.size), (1,) * len(reader.size)))
    except ValueError as e:
        if "imagecodecs" not in str(e):
            raise
        return _with_pillow(path, "pip install imagecodecs, which decodes this compression", reader)
    return reader


def _with_pillow(path: Path, hint: str, told: Reader | None = None) -> Reader:
    """``told``: what tifffile says is in the file, of which Pillow may see a part only."""
    try:
        reader = PillowReader(path, palette=told is not None and told.coded, tiff=True)
        reader.read(Box.whole(reader.size))
    except Exception as e:
        raise ValueError(f"{path} is beyond Pillow ({e}): {hint}") from e
    kind = lambda r: (r.bands, r.size, r.dtype)
    if told is not None and kind(reader) != kind(told):
        raise ValueError(f"{path} has {told.bands} bands of {told.dtype}, of which Pillow reads {reader.bands} of {reader.dtype}: {hint}")
    reader.coded = told is not None and told.coded
    return reader


class TiffReader(Reader):
    """The first series of a file. Its axes, such as YXS, CYX or ZYX, say which are space and which are bands."""

    def __init__(self, path: Path, file, dims: int | None = None):
        super().__init__(path)
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
        size = Extents(layout.chunks[: 3 if layout.tiledepth > 1 else 2])
        check_memory(self.path, f"a strip or tile of {size} pixels is", 3 * self._segment_bytes)

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
        pages, depth, plane = self._series.pages, slice(0, 1), box.slices[-2:]
        if len(box.start) == 3:
            depth = box.slices[0]
        if self._pages_axes != "Z":
            return np.concatenate([self._page(page, (depth, *plane)) for page in pages])
        return np.concatenate([self._page(pages[z], (slice(0, 1), *plane)) for z in range(depth.start, depth.stop)], axis=1)

    def _page(self, page, wanted: tuple[slice, ...]) -> np.ndarray:
        """(bands, depth, height, width) of a page: the overlap of each strip or tile with the wanted slices."""
        layout = self._series.keyframe
        planes, *_, samples = layout.shaped  # (separate bands, depth, height, width, interleaved bands)
        out = np.full((planes, *(s.stop - s.start for s in wanted), samples), layout.nodata, self.dtype)  # what a sparse file leaves out
        for index, (offset, count) in enumerate(zip(page.dataoffsets, page.databytecounts)):
            _, at, shape = layout.decode(None, index)
            if count:
                self._check_packed(layout.compression, count)
            if count and all(a < s.stop and s.start < a + n for a, n, s in zip(at[1:4], shape, wanted)):
                data = self._bytes(offset, count)
                self._check_unpacked(layout.compression, data)
                segment, at, _ = layout.decode(data, index, jpegtables=page.jpegtables, jpegheader=layout.jpegheader)
                target, source = zip(*(_overlap(a, n, s) for a, n, s in zip(at[1:4], segment.shape, wanted)))
                out[(at[0], *target)] = segment[source]
        return np.moveaxis(out, -1, 1).reshape(-1, *out.shape[1:4])

    def _check_packed(self, compression: int, count: int) -> None:
        """Whether a segment of so many bytes can be what it should be."""
        most, layout = _MOST_PACKED.get(compression), self._series.keyframe
        packed = self._segment_bytes * layout.bitspersample // (8 * layout.dtype.itemsize)  # less, of bits
        if most is not None and not packed // most <= count <= 2 * self._segment_bytes + _MORE:
            raise ValueError(f"a strip or tile of {self._segment_bytes} bytes can't be packed into {count}")

    def _check_unpacked(self, compression: int, data: bytes) -> None:
        """Large deflated segments are looked at first: tifffile would unpack whatever comes."""
        if compression in _DEFLATE and len(data) > _LARGE:
            stream, left = zlib.decompressobj(), self._segment_bytes + _MORE
            while data and left > 0:
                found = len(stream.decompress(data, _LARGE))
                left, data = left - found, stream.unconsumed_tail
                if not found:
                    break
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
