"""How a store lies in an HDF5 file, shared by the one who writes it and the one who reads it.

::

    attributes            format, version, complete, layout (in words), bands, classes, ignore, block, mean, std, digest, and
                          colours (classes, 3) uint8 where label maps had a palette
    index                 JSON: a list of images, each with name, split, size, dtype, labels, label (of the whole image: its
                          class, or in a store of one class the number that this names; or null), counts (pixels of each class),
                          nodata (the number that stands for no data, or null), missing (pixels without data), valid
                          (whether it has a validity mask), place (TIFF's tags of where on earth it lies, or null), sums
                          (where in ``sums`` those of its pixels and labels begin), digests
    provenance            JSON: where the data come from
    images/NAME/pixels    (C, *size), any integer or float type, in chunks for reading windows, not compressed:
                          measured on the Blue Marble, lzf halves the file and makes reading a window five times slower
    images/NAME/labels    (*size) uint8, gzip 1: a fortieth of the size, as quick as raw
    images/NAME/valid     (*size) uint8, gzip 1, of images with a validity mask (``valid`` in the index): 1 where there is data, else 0
    images/NAME/counts    (classes, *blocks) uint32, pixels of each class in blocks of ``block`` pixels a side
    sums                  (all chunks) uint64, XXH3 of each chunk as it is stored: image by image, first its pixels, then its labels, then its mask

Everything is under a checksum: a chunk under its own in ``sums``, so that a chunk in another's place is found too; the sums,
and the counts, under those in the image's entry of the index (``digests``); index, provenance and attributes under
``digest``, which so tells stores of different content apart. Digests are XXH3 of 128 bits: they find damage, they are no
signature. HDF5's own structures have checksums too.

Version 1 had no checksums, and neither ``nodata`` nor ``missing``. A store is of version 3 if one of its images has a validity
mask, which older programs would not see, else of version 2.
"""

from __future__ import annotations

import numpy as np
import xxhash

FORMAT = "distseg store"
VERSION, MASKED = 2, 3  # as stores are written: without validity masks, and with them
BLOCK = 64
LAYOUT = "channels first: images/NAME/pixels (bands, *size), images/NAME/labels (*size), size slowest first (depth, height, width)"
_CHUNK_PIXELS = 256 * 256
_CHUNK_BYTES = 4 << 20


def chunk_edge(dims: int) -> int:
    """Pixels along each side of a chunk: 256 in images, 40 in volumes."""
    return round(_CHUNK_PIXELS ** (1 / dims))


def label_chunk(size) -> tuple[int, ...]:
    """The chunk of a label map (*size)."""
    return tuple(min(n, chunk_edge(len(size))) for n in size)


def pixel_chunk(bands: int, size, itemsize: int) -> tuple[int, ...]:
    """The chunk of an image (bands, *size): all bands together, unless that makes more than 4 MiB."""
    return (max(1, min(bands, _CHUNK_BYTES // (_CHUNK_PIXELS * itemsize))), *label_chunk(size))


def blocks(size) -> tuple[int, ...]:
    """The number of blocks along each dim."""
    return tuple(-(-n // BLOCK) for n in size)


def chunk_sum(data) -> int:
    """The checksum of a chunk as it is stored."""
    return xxhash.xxh3_64_intdigest(data)


def digest(data: bytes | np.ndarray) -> str:
    """Of a table, in C order and little endian, or of a text."""
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data, data.dtype.newbyteorder("<")).tobytes()
    return xxhash.xxh3_128_hexdigest(data)


def check_name(name: str, where: str) -> None:
    """Refuse the name of an image that could lead files named after it elsewhere, or that no file could have.

    Raises:
        ValueError: naming ``where`` it is from.
    """
    unfit = any(
        ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in name
    )  # the last: bytes that are no UTF-8
    if name in ("", ".", "..") or "/" in name or unfit:
        raise ValueError(
            f"{where}: the name of an image is UTF-8, not empty, no '.' or '..', and has no '/' "
            "or control characters, "
            f"got {name!r}: rename it"
        )
