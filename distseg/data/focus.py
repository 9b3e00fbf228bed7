"""Find random pixels of a rare class, reading few labels.

First an image and one of its blocks are drawn by the stored counts of pixels of the class. Only
then the labels of this block are read, and one of its pixels of the class is drawn.

The weight of a block is the square root of its number of pixels of the class. With this number
itself as the weight, a few large objects would crowd out all small ones. With equal weights, most
crops would hold only a few pixels of the class.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from distseg.config.spelling import did_you_mean
from distseg.data.store.store import Store
from distseg.tiling.tile import Box

_IMAGES_KEPT = 32  # images whose weights stay in memory


class Focus:
    """Source of random pixels of one class, near which crops are placed (``data.focus_class``).

    Each block of an image is drawn in proportion to the square root of its number of pixels of the
    class.

    Args:
        store: the store.
        split: the name of the split.
        name: the name of the class.

    Raises:
        ValueError: the store does not have the class or has labels of whole images, or the split
            has no pixel of the class.
    """

    def __init__(self, store: Store, split: str, name: str):
        if name not in store.classes:
            raise ValueError(
                f"data.focus_class is {name!r}, which is no class of {store.path}: choose "
                f"{', '.join(store.classes)}{did_you_mean(name, store.classes)}"
            )
        if store.of_images:
            raise ValueError(
                f"data.focus_class is {name!r}, but {store.path} has labels of whole images, so "
                "that no pixel belongs to a class: leave data.focus_class out"
            )
        self._blocks = lru_cache(_IMAGES_KEPT)(self._read_weights)
        self._store, self._class = store, store.classes.index(name)
        self._names = [image for image in store.split(split) if store.has_labels(image)]
        self._weights = np.cumsum([self._blocks(image)[0][-1] for image in self._names])
        if not self._names or not self._weights[-1]:
            raise ValueError(
                f"data.focus_class is {name!r}, but the split {split!r} of {store.path} has no "
                f"pixel of it: choose another class"
            )

    def pixel(self, image: float, block: float, pixel: float) -> tuple[str, tuple[int, ...]]:
        """Return the name of an image, and the position of a pixel of the class in it.

        The arguments are random numbers in [0, 1). They draw the image, a block of it, and a pixel
        of the class in this block.
        """
        name = self._names[_drawn(self._weights, image)]
        weights, shape = self._blocks(name)
        cell = np.unravel_index(_drawn(weights, block), shape)
        start = tuple(int(c) * self._store.block for c in cell)
        box = Box(
            start,
            tuple(min(a + self._store.block, n) for a, n in zip(start, self._store.size(name))),
        )
        found = np.argwhere(self._store.labels(name, box) == self._class)
        inside = found[int(pixel * len(found))]
        return name, tuple(int(a + i) for a, i in zip(start, inside))

    def _read_weights(self, name: str) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the cumulative weights of an image's blocks, and the number of blocks per dim.

        The weight of a block is the square root of its number of pixels of the class. The blocks
        are in row-major order.
        """
        weights = np.sqrt(self._store.block_counts(name)[self._class])
        return weights.cumsum(), weights.shape


def _drawn(cumulated: np.ndarray, u: float) -> int:
    """Return a random index, with a probability proportional to its weight.

    Args:
        cumulated: the cumulative sums of the weights of all indices.
        u: the random number in [0, 1) that determines the index.
    """
    return min(int(np.searchsorted(cumulated, u * cumulated[-1], "right")), len(cumulated) - 1)
