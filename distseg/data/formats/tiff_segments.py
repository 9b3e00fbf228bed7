"""Read the pixels of a series of TIFF pages box by box.

An uncompressed series is memory-mapped. Otherwise only the strips or tiles (segments) that a box
touches are decoded. Tiles are decoded again for each box. Strips, which adjacent boxes share, are
kept decoded in a scratch file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
from tifffile import TIFF, TiffFile, TiffPageSeries

from distseg.comm.launch import release_freed_memory
from distseg.config.sizes import Size
from distseg.data.formats import lerc, packed
from distseg.data.formats.base import plain, readable
from distseg.data.formats.mapped import copied, let_go, mapped_array
from distseg.data.formats.plausible import check_memory
from distseg.tiling.tile import Box

BANDS = "SCQI"  # tifffile's axes of bands: samples, channels, and two kinds of unnamed pages
UNNAMED = "QI"
_NEVER_PREDICTED = (1, 32773)  # compressions without a predictor in libtiff: none, PackBits
_CHEAP = 1 << 22  # bytes up to which a tile is decoded again for each box
# Above this size in bytes, all strips and tiles are decoded with the first read, before other work
# takes memory.
_AT_ONCE = 1 << 24


class Segments:
    """Reader of boxes of pixels in a series of TIFF pages.

    The letters of the axes, such as YXS, CYX or ZYX, tell which dims are spatial (Z, Y, X) and
    which are bands.

    Args:
        path: the file.
        file: the open file.
        series: the pages.
        dims: 3 to read pages whose axis has no name as slices of a volume; otherwise they are
            bands.
        alpha: index of the band that is transparency; None without one. LERC compression may
            store this band as its mask.
        scratch: folder for decoded strips (:func:`distseg.data.formats.mapped.mapped_array`).

    Raises:
        ValueError: the file has too few bytes for the size in its header, or distseg does not
            read its axes or its compression.
    """

    def __init__(
        self,
        path: Path,
        file: TiffFile,
        series: TiffPageSeries,
        dims: int | None,
        alpha: int | None,
        scratch: str | None,
    ):
        self.path, self._file, self._series = path, file, series
        self._alpha, self._scratch = alpha, scratch
        self._axes, shape = named_axes(path, series, dims)
        # True if the series has several pages, and no tag says whether they are bands or slices.
        self.stack = any(axis in UNNAMED and n > 1 for axis, n in zip(series.axes, series.shape))
        self.size = tuple(n for a, n in zip(self._axes, shape) if a in "ZYX")
        self.bands = math.prod(n for a, n in zip(self._axes, shape) if a in BANDS)
        self.dtype = plain(series.dtype)
        unnamed = len(series.pages) > 1 and any(a in UNNAMED for a in self._axes)
        self.notes = (
            (f"has {self.bands} pages that do not say what they are, so they are read as bands",)
            if unnamed
            else ()
        )
        self.decoding = 0  # bytes of temporary memory for the first read
        self._map = self._mapped(shape) if series.dataoffset is not None else None
        if self._map is None:
            self._check_pages()
            self._check_form()
            self._check_segments()

    def read(self, box: Box) -> np.ndarray:
        """Return the pixels of a box, (bands, *box.size)."""
        if self._map is None:
            return self._decoded(box).reshape(self.bands, *box.size)
        where = dict(zip((a for a in self._axes if a in "ZYX"), box.slices))
        part = self._map[tuple(where.get(a, slice(None)) for a in self._axes)]
        # Move the axis of bands to the front; sorted() keeps the order of the other axes.
        order = sorted(range(part.ndim), key=lambda axis: self._axes[axis] in "ZYX")
        return copied(part.transpose(order)).reshape(self.bands, *box.size)

    def try_first(self) -> None:
        """Decode one strip or tile, so that an unreadable file is refused at once.

        Raises:
            ValueError: the strip or tile cannot be decoded; the message names the cause.
        """
        if self._map is None:
            with readable(self.path):
                self._keep(0, [0]) if self._kept is not None else self._part(0, (slice(0, 1),) * 3)

    @property
    def lossy_lerc(self) -> bool:
        """True if the header of the first strip or tile says that LERC may have changed pixels."""
        if self._layout.compression != packed.LERC:
            return False
        data = self._raw(self._series.pages[0], 0)
        return data is not None and lerc.is_lossy(self._checked(data), self.dtype)

    @property
    def _layout(self):
        return self._series.keyframe

    def _mapped(self, shape: list[int]) -> np.ndarray:
        """Return the memory-mapped array of an uncompressed series.

        ``shape`` gives the length of each axis of ``self._axes``, in order.

        Raises:
            ValueError: the file is too short.
        """
        stored = np.dtype(self._series.dtype).newbyteorder(self._file.byteorder)
        there = os.path.getsize(self.path) - self._series.dataoffset
        needed = math.prod(int(n) for n in shape) * stored.itemsize
        if needed > there:
            words = f"it holds {Size(shape)} numbers of {stored}, {needed} bytes"
            raise ValueError(
                f"its header says that {words}, but only {max(0, there)} of these are "
                "in the file, so it is damaged or cut off"
            )
        return np.memmap(self.path, stored, "r", self._series.dataoffset, tuple(shape))

    def _check_pages(self) -> None:
        """Refuse a series (one image) with pages in other files, or with both slices and bands.

        Raises:
            ValueError: the series is refused; the message names the repair.
        """
        if any(page is None for page in self._series.pages):
            raise ValueError(
                f"{self.path} has pages in other files, which are not opened: write all pages into "
                "one file"
            )
        if len(self._pages_axes) > 1:
            raise ValueError(
                f"{self.path} is compressed and has pages along {' and '.join(self._pages_axes)}, "
                "but compressed pages are read along one axis only: store it uncompressed, or as "
                "npy"
            )

    def _check_form(self) -> None:
        """Refuse an encoding that programs decode differently, or whose size cannot be checked.

        For example, programs differ in how they read a predictor without a compression that uses
        one. The size is checked by :mod:`distseg.data.formats.packed`, which must be able to read
        it from the header of a compressed image.

        Raises:
            ValueError: the encoding is refused; the message names the repair.
        """
        layout = self._layout
        convert = "convert it, such as with 'gdal_translate -co COMPRESS=DEFLATE'"
        kind = getattr(layout.compression, "name", layout.compression)
        if layout.predictor != 1 and layout.compression in _NEVER_PREDICTED:
            raise ValueError(
                f"{self.path} has a predictor, but no compression that uses one, so programs read "
                f"it in different ways: {convert}"
            )
        if (
            layout.compression == packed.LERC
            and self.dtype.kind == "f"
            and self._file.byteorder == ">"
        ):
            raise ValueError(
                f"{self.path} has real numbers in LERC and is big-endian, which libtiff writes "
                "wrongly: write it little-endian"
            )
        if layout.compression in TIFF.IMAGE_COMPRESSIONS and not packed.says_size(
            layout.compression
        ):
            raise ValueError(f"{self.path} is compressed by {kind}, which is not read: {convert}")

    def _check_segments(self) -> None:
        """Refuse pages without all of their strips or tiles, or with strips or tiles of a bad size.

        A size is bad if the bytes in the file cannot hold the pixels, or if decoding needs more
        than the free memory.

        Raises:
            ValueError: a page is refused.
        """
        layout = self._layout
        needed = math.prod(int(n) for n in layout.chunked)
        for page in self._series.pages:
            if len(page.dataoffsets) != needed or len(page.databytecounts) != needed:
                words = f"{Size(self.size)} pixels are in {needed} strips or tiles"
                raise ValueError(
                    f"its header says that {words}, but it lists {len(page.dataoffsets)} strips "
                    "or tiles, so the file is damaged: write or copy it again"
                )
        self._segment_bytes = math.prod(int(n) for n in layout.chunks) * layout.dtype.itemsize
        size, taken = Size(self._edges[layout.tiledepth <= 1 :]), 3 * self._segment_bytes
        check_memory(self.path, f"a strip or tile of {size} pixels is", taken)
        for page in self._series.pages:
            for index, count in enumerate(page.databytecounts):
                self._check_packed(layout.compression, index, count)
        # The part of the scratch file that holds the strip or tile is in memory too.
        self.decoding = taken + self._segment_bytes if self._at_once else 0

    @property
    def _at_once(self) -> bool:
        """True if strips or tiles are so large that the first read of a page decodes all of it."""
        return self._segment_bytes > _AT_ONCE

    @property
    def _pages_axes(self) -> str:
        """Letters of the axes along which pages follow each other; the others lie in a page."""
        spread = len(self._series.pages) > 1
        inside = sum(n > 1 or a in "YX" for a, n in zip(self._layout.axes, self._layout.shape))
        return self._axes[: len(self._axes) - inside] if spread else ""

    def _decoded(self, box: Box) -> np.ndarray:
        """Return the pixels of a box from all pages it touches, (bands, depth, height, width)."""
        depth, plane = slice(0, 1), box.slices[-2:]
        if len(box.start) == 3:
            depth = box.slices[0]
        if self._pages_axes != "Z":
            return np.concatenate(
                [self._page(number, (depth, *plane)) for number in range(len(self._series.pages))]
            )
        return np.concatenate(
            [self._page(z, (slice(0, 1), *plane)) for z in range(depth.start, depth.stop)], axis=1
        )

    def _page(self, number: int, wanted: tuple[slice, ...]) -> np.ndarray:
        """Return the pixels of a part of a page, (bands, depth, height, width).

        Args:
            number: index of the page.
            wanted: slices of the page along depth, height and width.
        """
        found = self._part(number, wanted)
        return np.moveaxis(found, -1, 1).reshape(-1, *found.shape[1:4])

    def _part(self, number: int, wanted: tuple[slice, ...]) -> np.ndarray:
        """Return the pixels of a part of a page, from the scratch file or decoded anew.

        The shape is (separate bands, depth, height, width, interleaved bands). A file stores all
        bands separately or all interleaved, so the first or the last number is 1.

        Args:
            number: index of the page.
            wanted: slices of the page along depth, height and width.
        """
        layout, kept = self._layout, self._kept
        if kept is None:
            found = np.empty(
                (layout.shaped[0], *(s.stop - s.start for s in wanted), layout.shaped[-1]),
                self.dtype,
            )
            for index in self._touched(wanted):
                self._decode(number, index, wanted, found)
            return found
        self._keep(number, self._touched(self._whole if self._at_once else wanted))
        return copied(kept[(number, slice(None), *wanted)])

    def _keep(self, number: int, segments: Iterable[int]) -> None:
        """Decode strips or tiles of a page into the scratch file, unless they are in it already.

        Args:
            number: index of the page.
            segments: indices of the strips or tiles in the page.
        """
        for index in segments:
            if not self._done[number, index]:
                self._decode(number, index, self._whole, self._kept[number])
                let_go(self._kept)
                self._done[number, index] = True
                if self._at_once:
                    release_freed_memory()

    @property
    def kept(self) -> int:
        """Number of bytes of decoded pixels that are kept; 0 if each box is decoded anew."""
        layout = self._layout
        if self._map is not None or (layout.is_tiled and self._segment_bytes <= _CHEAP):
            return 0
        return len(self._series.pages) * math.prod(layout.shaped) * self.dtype.itemsize

    @property
    def block_rows(self) -> int:
        """Number of rows of a tile, if each call of ``read`` decodes tiles anew; otherwise 1."""
        return 1 if self._map is not None or self.kept else self._edges[1]

    @cached_property
    def _kept(self) -> np.ndarray | None:
        """Array for the decoded pixels of all pages, in a scratch file unless it is small.

        It is None if decoded pixels are not kept. This is so if the file has small tiles, which
        are decoded again for each box, or if the disk has no room for the scratch file.
        """
        layout, pages = self._layout, self._series.pages
        if not self.kept:
            return None
        self._done = np.zeros((len(pages), len(pages[0].dataoffsets)), bool)
        return mapped_array((len(pages), *layout.shaped), self.dtype, self._scratch)

    @property
    def _whole(self) -> tuple[slice, ...]:
        return tuple(slice(0, n) for n in self._layout.shaped[1:4])

    def _touched(self, wanted: tuple[slice, ...]) -> Iterator[int]:
        """Yield the indices of a page's strips or tiles that overlap the wanted part, in order.

        Args:
            wanted: slices of the page along depth, height and width.
        """
        shaped, edges = self._layout.shaped, self._edges
        grid = (shaped[0], *(-(-n // edge) for n, edge in zip(shaped[1:4], edges)))
        along = (range(s.start // edge, -(-s.stop // edge)) for s, edge in zip(wanted, edges))
        for places in product(range(shaped[0]), *along):
            yield int(np.ravel_multi_index(places, grid))

    @property
    def _edges(self) -> tuple[int, int, int]:
        """Depth, height and width of a strip or tile, in pixels."""
        layout = self._layout
        if layout.is_tiled:
            return int(layout.tiledepth), int(layout.tilelength), int(layout.tilewidth)
        return 1, int(layout.rowsperstrip), int(layout.shaped[3])

    def _decode(self, number: int, index: int, wanted: tuple[slice, ...], out: np.ndarray) -> None:
        """Decode a strip or tile, and write its pixels in the wanted part of the page into ``out``.

        Args:
            number: index of the page.
            index: index of the strip or tile in the page.
            wanted: slices of the page along depth, height and width.
            out: array for the wanted part, in the shape that :meth:`_part` returns.
        """
        segment, at, shape = self._segment(self._series.pages[number], index)
        target, source = zip(
            *(
                _overlap(a, n, s)
                for a, n, s in zip(at[1:4], shape if segment is None else segment.shape, wanted)
            )
        )
        # A sparse file leaves out strips and tiles that have no data.
        out[(at[0], *target)] = self._layout.nodata if segment is None else segment[source]

    def _segment(
        self, page, index: int
    ) -> tuple[np.ndarray | None, tuple[int, ...], tuple[int, ...]]:
        """Return the pixels of a strip or tile of a page, its position and its shape.

        The pixels have the shape (depth, height, width, bands); None stands for the pixels of a
        strip or tile that a sparse file leaves out. The position is that of the first pixel:
        (separate band, depth, row, column, 0).

        Args:
            page: tifffile's page.
            index: index of the strip or tile in the page.
        """
        layout, data = self._layout, self._raw(page, index)
        if data is None:
            return layout.decode(None, index)
        if layout.compression == packed.LERC:
            _, at, shape = layout.decode(None, index)
            alpha = self._alpha is not None and self._alpha == shape[-1] - 1
            found = lerc.decoded(self._checked(data), shape[-1], self.dtype, alpha)[None]
            # In a big-endian file libtiff swaps the bytes before LERC packs them.
            swapped = found.byteswap() if self._file.byteorder == ">" else found
            return swapped, at, found.shape
        self._checked(data, page.jpegtables)
        try:
            return layout.decode(
                data, index, jpegtables=page.jpegtables, jpegheader=layout.jpegheader
            )
        except Exception as e:
            if layout.compression in packed.DEFLATES and packed.unpacks_to_more(
                data, self._segment_bytes
            ):
                raise ValueError(
                    f"strip or tile {index} should unpack to {self._segment_bytes} bytes, but "
                    "unpacks to more, so it is damaged"
                ) from e
            raise

    def _raw(self, page, index: int) -> bytes | None:
        count = page.databytecounts[index]
        return self._bytes(page.dataoffsets[index], count) if count else None

    def _checked(self, data: bytes, tables: bytes | None = None) -> bytes:
        """Return the bytes of a strip or tile after a check of the image size in their header.

        If bytes of LERC are compressed again by zlib or zstd, they are unpacked first.

        Args:
            data: the bytes of the strip or tile in the file.
            tables: JPEG tables of the page, which may hold the image size too.

        Raises:
            ValueError: the header has no size, or one that is larger than the strip or tile.
        """
        layout = self._layout
        if not packed.says_size(layout.compression) or layout.jpegheader is not None:
            return data
        if layout.compression == packed.LERC and (tag := layout.tags.valueof(lerc.ADDED)):
            data = lerc.unpacked(data, int(tag[1]), self._segment_bytes)
        sizes = [packed.size_of(layout.compression, part) for part in (data, tables) if part]
        found = [size for size in sizes if size]
        most = self._edges[1:]
        if not found or any(a > n for size in found for a, n in zip(size, most)):
            size_text = f"of {Size(found[0])} pixels" if found else "of no known size"
            raise ValueError(
                f"a strip or tile of {Size(most)} pixels holds an image {size_text}, "
                "so it is damaged or was written wrongly"
            )
        return data

    def _check_packed(self, compression: int, index: int, count: int) -> None:
        """Refuse a strip or tile whose bytes cannot hold its pixels.

        Strips and tiles that a sparse file leaves out are accepted. At the border of the image,
        bytes that hold only the pixels inside the image are accepted.

        Args:
            compression: the number in the tag Compression.
            index: index of the strip or tile in its page.
            count: number of bytes of the strip or tile in the file; 0 if the file leaves it out.

        Raises:
            ValueError: the bytes are too few or too many.
        """
        layout = self._layout
        if not count or packed.fits(compression, self._packed(self._segment_bytes), count):
            return
        _, at, shape = layout.decode(None, index)
        inside = (
            math.prod(min(a + n, m) - a for a, n, m in zip(at[1:4], shape, layout.shaped[1:4]))
            * layout.shaped[-1]
            * layout.dtype.itemsize
        )
        if not packed.fits(compression, self._packed(inside), count):
            raise ValueError(
                f"strip or tile {index} has {count} bytes in the file, but its compression cannot "
                f"pack its {inside} bytes of pixels into this number, so it is damaged"
            )

    def _packed(self, pixels: int) -> int:
        """Return how many bytes of an uncompressed file decode to ``pixels`` bytes of memory.

        The result is smaller than ``pixels`` if a pixel has fewer bits in the file than in memory.
        """
        layout = self._layout
        return pixels * layout.bitspersample // (8 * layout.dtype.itemsize)

    def _bytes(self, offset: int, count: int) -> bytes:
        self._file.filehandle.seek(offset)
        return self._file.filehandle.read(count)


def named_axes(path: Path, series: TiffPageSeries, dims: int | None) -> tuple[str, list[int]]:
    """Return the letters of the axes of a series of TIFF pages, and the axes' lengths.

    Axes of length 1 are left out, except Y and X.

    Args:
        path: the file, for messages.
        series: the pages.
        dims: 3 to read pages whose axis has no name as slices of a volume (axis Z). Otherwise
            they are bands.

    Raises:
        ValueError: an axis is neither spatial nor bands, or there are two axes of bands.
    """
    kept = [(a, n) for a, n in zip(series.axes, series.shape) if n > 1 or a in "YX"]
    if dims == 3 and not any(a == "Z" for a, _ in kept):
        kept = [("Z" if a in UNNAMED else a, n) for a, n in kept]
    axes = "".join(a for a, _ in kept)
    if set(axes) - set(BANDS + "ZYX") or sum(a in BANDS for a in axes) > 1:
        repair = "write one file for each entry of the other axes"
        if any(a in UNNAMED for a in axes):
            repair += ", or set --pages images or --pages volume, if that is what its pages are"
        raise ValueError(
            f"{path} has the axes {series.axes} of {tuple(series.shape)}, but an image has only "
            f"spatial axes and one axis of bands: {repair}"
        )
    return axes, [n for _, n in kept]


def _overlap(at: int, length: int, wanted: slice) -> tuple[slice, slice]:
    """Return where a strip or tile overlaps the wanted part of its page, along one dim.

    Args:
        at: position of the strip's or tile's first pixel in the page.
        length: number of pixels of the strip or tile.
        wanted: the wanted part as a slice of the page.

    Returns:
        The overlap as a slice of the wanted part, and as a slice of the strip or tile.
    """
    a, b = max(at, wanted.start), min(at + length, wanted.stop)
    return slice(a - wanted.start, b - wanted.start), slice(a - at, b - at)
