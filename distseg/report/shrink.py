"""Large images and label maps made small enough to draw, by blocks of pixels.

The most frequent class of a block would rub out lakes and rivers. So a block shows the class that stands out in it:
largest (pixels in the block) / sqrt(pixels in the image). In a map that is 0.5% lake and 30% land, an eighth of a block
is enough for a lake.
"""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np

PANEL = 960  # longest side of a drawn map, in pixels


def block_size(shape: Sequence[int]) -> int:
    """Image pixels per side of a drawn pixel."""
    return -(-max(shape[:2]) // PANEL)


def _block_sums(values: np.ndarray, block: int) -> np.ndarray:
    """(H, W, ...) -> sums over blocks; the last ones may be smaller."""
    for dim in (0, 1):
        values = np.add.reduceat(
            values, np.arange(0, values.shape[dim], block), axis=dim, dtype=np.int64
        )
    return values


def shrink_image(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 -> the mean of each block, uint8."""
    block = block_size(image.shape)
    pixels = _block_sums(np.ones(image.shape[:2], np.uint8), block)
    return (_block_sums(image, block) / pixels[..., None]).round().astype(np.uint8)


def shrink_labels(labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(H, W) -> the class that stands out in each block. ``counts``: pixels of each class in the image, (K,)."""
    best, winner = None, None
    for number, count in enumerate(counts):
        score = _block_sums(labels == number, block_size(labels.shape)) / math.sqrt(max(count, 1))
        better = np.ones(score.shape, bool) if best is None else score > best
        best, winner = (
            np.where(better, score, 0 if best is None else best),
            np.where(better, number, 0 if winner is None else winner),
        )
    return winner
