"""Find random pixels of a rare class, reading few labels.

The image and the block are drawn from stored counts alone. Then the pixel is drawn from the labels
of that block.

The weight of a block is the square root of its number of pixels of the class. With the number
itself, a few large lakes would crowd out all small ones. With equal weights, crops would hardly
hold more than one or two pixels of the class.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from distseg.data.store.store import Store
from distseg.tiling.tile import Box

_IMAGES_KEPT = 32  # images whose weights stay in memory


class Focus:
    """Random pixels of one class of a split.

    Args:
        store: the store.
        split: the name of the split.
        name: the name of the class.

    Raises:
        ValueError: the store does not have the class, or the split has no pixel of it.
    """

    def __init__(self, store: Store, split: str, name: str):
        if name not in store.classes:
            raise ValueError(
                f"data.focus_class is {name!r}, which is no class of {store.path}: choose "
                f"{', '.join(store.classes)}"
            )
        if store.of_images:
            raise ValueError(
                f"data.focus_class is {name!r}, but {store.path} has a label for each image, so "
                "that its crops have no pixels of a class: leave it out"
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
        """Return the image's name and a pixel's position for three random numbers in [0, 1)."""
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
        """Return the cumulative weights of an image's blocks, and the blocks along each dim."""
        weights = np.sqrt(self._store.block_counts(name)[self._class])
        return weights.cumsum(), weights.shape


def _drawn(cumulated: np.ndarray, u: float) -> int:
    """Return the index drawn by ``u``, a uniform number in [0, 1), in proportion to the weights."""
    return min(int(np.searchsorted(cumulated, u * cumulated[-1], "right")), len(cumulated) - 1)
