"""Shrinks large images and label maps by blocks of pixels, so that they can be drawn.

If a block showed its most frequent class, small lakes and rivers would disappear. Instead a block
shows the class with the largest value of (pixels of the class in the block) / sqrt(pixels of the
class in the image). If 0.5% of a map is lake and 30% is land, a block shows lake as soon as an
eighth of its pixels is lake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PANEL = 960  # longest side of a drawn map, in pixels


def block_size(shape: Sequence[int]) -> int:
    """Return the side of a block: the number of image pixels per drawn pixel along each dim.

    ``shape`` is the shape of the image, (H, W) or (H, W, 3).
    """
    return -(-max(shape[:2]) // PANEL)


def block_sums(
    values: np.ndarray, block: int | Sequence[int], dtype: type[np.number] = np.int64
) -> np.ndarray:
    """Return the sums of ``values`` over blocks; the last blocks may be smaller.

    Args:
        values: the values, (H, W, ...).
        block: the side of a block along H and W; or its size along each of the first dims.
        dtype: the number type of the sums.
    """
    for dim, side in enumerate((block, block) if isinstance(block, int) else block):
        starts = np.arange(0, values.shape[dim], side)
        values = np.add.reduceat(values, starts, axis=dim, dtype=dtype)
    return values


def most_frequent(labels: np.ndarray, block: Sequence[int], nodata: int) -> np.ndarray:
    """Return the most frequent label of each block of a label map.

    Of equally frequent labels, the smallest is taken. A block has the label ``nodata`` only if all
    its pixels have this label.

    Args:
        labels: the map, unsigned whole numbers.
        block: the size of a block along each dim, in all at most 65535 pixels; the last blocks may
            be smaller.
        nodata: the label of pixels without data.
    """
    most, found = None, None
    for label in np.unique(labels):
        if label == nodata:
            continue
        count = block_sums(labels == label, block, np.uint16)
        better = count > (0 if most is None else most)
        most = np.where(better, count, 0 if most is None else most)
        found = np.where(better, label, labels.dtype.type(nodata) if found is None else found)
    if found is None:
        return np.full(
            [-(-n // side) for n, side in zip(labels.shape, block)], nodata, labels.dtype
        )
    return found


def shrink_image(image: np.ndarray) -> np.ndarray:
    """Return the mean of each block of ``image`` (H, W, 3) uint8, as uint8."""
    block = block_size(image.shape)
    pixels = block_sums(np.ones(image.shape[:2], np.uint8), block)
    return (block_sums(image, block) / pixels[..., None]).round().astype(np.uint8)


def shrink_labels(labels: np.ndarray, counts: np.ndarray, block: int | None = None) -> np.ndarray:
    """Return one class number for each block of ``labels``, so that rare classes stay visible.

    It is the class with the largest n / sqrt(N), where n is the number of pixels of the class in
    the block and N is the number of its pixels in the whole image.

    Args:
        labels: (H, W) class numbers.
        counts: N, (K,), the number of pixels of each of the K classes in the whole image.
        block: the side of a block; by default the result of :func:`block_size`.
    """
    block = block or block_size(labels.shape)
    best, winner = None, None
    for number, count in enumerate(counts):
        score = block_sums(labels == number, block) / math.sqrt(max(count, 1))
        better = np.ones(score.shape, bool) if best is None else score > best
        best, winner = (
            np.where(better, score, 0 if best is None else best),
            np.where(better, number, 0 if winner is None else winner),
        )
    return winner
