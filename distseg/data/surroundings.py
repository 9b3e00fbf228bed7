"""Choose the box of an image that the network sees around a crop (``data.context``).

The network sees the crop and its context, and the loss counts the pixels of the crop only. At a
border of the image the context ends there, as in prediction. Elsewhere the box has at least the
context of pixels at each side::

    0   4        13    19           32          44     context 5, stride 4
    |   |ccccccccc|crop|ccccccccccccc|           |      crop [13, 19), box [4, 32)

The box begins at a multiple of the network's stride, so a pooling layer groups the same pixels as
in the whole image. Its size is a multiple of the stride too, and the same for all crops of one
size. At the border of the image the box is not cut but moved inwards. Only where the size of the
image is no multiple of the stride, the last box along a dim is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from distseg.tiling.tile import Box, ReceptiveField


def box_around(crop: Box, image: Sequence[int], context: ReceptiveField) -> Box:
    """Return the box of the image that the network sees for a crop: the crop and its context.

    Args:
        crop: the box of the crop in the image.
        image: the size of the image.
        context: the smallest context along each dim (``halo``), and the network's stride.
    """
    found = [
        _along(*each) for each in zip(crop.start, crop.size, image, context.halo, context.stride)
    ]
    return Box(tuple(a for a, _ in found), tuple(b for _, b in found))


def sizes_around(
    crop: Sequence[int], image: Sequence[int], context: ReceptiveField
) -> list[tuple[int, ...]]:
    """Return all sizes that :func:`box_around` can give for crops of one size in an image.

    Args:
        crop: the size of the crop.
        image: the size of the image.
        context: the smallest context along each dim (``halo``), and the network's stride.
    """
    lengths = []
    for size, n, halo, stride in zip(crop, image, context.halo, context.stride):
        length = _length(size, halo, stride)
        one = n - length < stride  # the box that starts at 0 ends at the end of the image
        lengths.append([n] if one else sorted({length, length + n % stride}))
    return list(product(*lengths))


def _length(size: int, halo: int, stride: int) -> int:
    """Return the length, along one dim, of the box that the network sees for a crop.

    It is a multiple of the stride, and long enough for a crop of ``size`` pixels at any position,
    with ``halo`` pixels of context at both sides.
    """
    return (-(-(size + stride - 1) // stride) + 2 * -(-halo // stride)) * stride


def _along(start: int, size: int, n: int, halo: int, stride: int) -> tuple[int, int]:
    """Return where the box that the network sees for a crop starts and stops along one dim.

    Args:
        start: the first pixel of the crop.
        size: the number of pixels of the crop.
        n: the number of pixels of the image.
        halo: the smallest context, in pixels.
        stride: the network's stride.
    """
    length = _length(size, halo, stride)
    last = (n - length) // stride * stride  # the start of the last box
    if last < 0:
        return 0, n
    first = max(0, (start // stride - -(-halo // stride)) * stride)
    return (first, first + length) if first < last else (last, n)
