"""How a store lies in an HDF5 file, shared by the one who writes it and the one who reads it.

::

    attributes            format, version, complete, layout (in words), bands, classes, ignore, block, mean, std
    index                 JSON: a list of images, each with name, split, size, dtype, labels, counts (pixels of each class)
    provenance            JSON: where the data come from
    images/NAME/pixels    (C, *size), any integer or float type, in chunks for reading windows, not compressed:
                          measured on the Blue Marble, lzf halves the file and makes reading a window five times slower
    images/NAME/labels    (*size) uint8, gzip 1: a fortieth of the size, as quick as raw
    images/NAME/counts    (classes, *blocks) uint32, pixels of each class in blocks of ``block`` pixels a side
"""

from __future__ import annotations

FORMAT = "distseg store"
VERSION = 1
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
