"""Layout of a store in an HDF5 file, shared by its writer and its reader.

::

    attributes            format, version, complete, layout (in words), bands, classes, ignore,
                          block, mean, std, digest; colours (classes, 3) uint8 if label maps had
                          a palette
    index                 JSON: a list of images, each with
                            name, split, size, dtype
                            labels    true if its pixels have labels
                            label     of the whole image: its class, or a number if the store
                                      has a single class; or null
                            counts    pixels of each class, or null
                            nodata    the number for no data, or null
                            missing   number of pixels that have no data in any band
                            valid     true if it has a validity mask
                            place     its georeference as TIFF tags, or null
                            source    the files from which its pixels are read, with fingerprints,
                                      if the store refers to them; its ``pixels`` are then missing
                            sums      indices in ``sums`` of its first checksums, by content
                            digests   digests of its checksums and counts
    provenance            JSON: where the data come from
    images/NAME/pixels    (C, *size), any integer or float dtype, in chunks for reading windows,
                          not compressed: compression would make reading windows slower
    images/NAME/labels    (*size) uint8, gzip 1
    images/NAME/valid     (*size) uint8, gzip 1, of images with a validity mask: 1 where there
                          is data, else 0
    images/NAME/counts    (classes, *blocks) uint32: pixels of each class in blocks of ``block``
                          pixels a side
    sums                  (all chunks) uint64: XXH3 of each chunk as it is stored, image by
                          image: first its pixels, then its labels, then its mask. Pixels in
                          files have sums too, as if they were stored in chunks of all bands

Everything has a checksum. ``sums`` holds one per chunk, so that a chunk in the wrong place is found
too. The index entry of an image (``digests``) covers its part of ``sums`` and its counts. The
attribute ``digest`` covers index, provenance and attributes, so it differs between stores of
different content. Digests are 128-bit XXH3: they detect damage, but not a forgery. HDF5's own
structures have checksums too.

Version 1 has no checksums, no ``nodata`` and no ``missing``. Version 3 is written if an image has a
validity mask, which older programs would ignore. Version 4 is written if pixels are read from
files. All other stores have version 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

FORMAT = "distseg store"
# Versions that are written: plain ones, with validity masks, and with pixels in files.
VERSION, MASKED, REFERRING = 2, 3, 4
BLOCK = 64
LAYOUT = (
    "channels first: images/NAME/pixels (bands, *size), images/NAME/labels (*size), "
    "size slowest first (depth, height, width)"
)
_CHUNK_PIXELS = 256 * 256
_CHUNK_BYTES = 4 << 20


def chunk_edge(dims: int) -> int:
    """Return the number of pixels along each side of a chunk: 256 in 2 dims, 40 in 3 dims."""
    return round(_CHUNK_PIXELS ** (1 / dims))


def label_chunk(size) -> tuple[int, ...]:
    """Return the size of HDF5's chunks for the labels or validity mask of an image.

    Args:
        size: the size of the image.
    """
    return tuple(min(n, chunk_edge(len(size))) for n in size)


def pixel_chunk(bands: int, size, itemsize: int) -> tuple[int, ...]:
    """Return the size of HDF5's chunks for the pixels of an image, (bands, *size).

    A chunk holds all bands, or, if that would be more than 4 MiB, as many bands as fit.

    Args:
        bands: number of bands.
        size: the size of the image.
        itemsize: bytes of a value.
    """
    return (max(1, min(bands, _CHUNK_BYTES // (_CHUNK_PIXELS * itemsize))), *label_chunk(size))


def file_chunk(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the size of the chunks into which an image file's pixels are divided for checksums.

    If a store refers to an image file, it has a checksum of each chunk of the pixels. A chunk has
    all bands of a box of pixels.

    Args:
        shape: (bands, *size).
    """
    return (shape[0], *label_chunk(shape[1:]))


def blocks(size) -> tuple[int, ...]:
    """Return the number of blocks, of ``BLOCK`` pixels a side, along each dim of an image."""
    return tuple(-(-n // BLOCK) for n in size)


def chunk_sum(data) -> int:
    """Return the checksum (64-bit XXH3) of the bytes of a chunk as the file holds them.

    If the chunk is stored compressed, ``data`` are the compressed bytes.
    """
    return xxhash.xxh3_64_intdigest(data)


def digest(data: bytes | np.ndarray) -> str:
    """Return the 128-bit XXH3 of bytes, as hexadecimal text.

    An array is first converted to bytes in C order and little endian.
    """
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data, data.dtype.newbyteorder("<")).tobytes()
    return xxhash.xxh3_128_hexdigest(data)


def check_name(name: str, where: str) -> None:
    """Refuse a name of an image that cannot be a file name, or that leads out of a folder.

    Class maps are files named after their image, so its name must be a valid file name.

    Args:
        name: the name of the image.
        where: the origin of the name, for the message.

    Raises:
        ValueError: the name is not allowed.
    """
    # Control characters, and the surrogates by which Python shows bytes that are no UTF-8.
    unfit = any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in name)
    if name in ("", ".", "..") or "/" in name or unfit:
        raise ValueError(
            f"{where}: the name of an image must be UTF-8, not empty, not '.' or '..', and without "
            "'/' or control characters, "
            f"got {name!r}: rename it"
        )
