"""Find random pixels of chosen classes, reading few labels.

First a class is drawn by the weights of the settings. Then an image and one of its blocks are drawn
by the stored counts of pixels of the class. Then the labels of this block are read, and one of its
pixels of the class is drawn. No other labels are read.

The weight of a block is the square root of its number of pixels of the class. With this number
itself as the weight, a few large objects would crowd out all small ones. With equal weights, most
crops would hold only a few pixels of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from distseg.config.settings import DataBase
from distseg.config.spelling import did_you_mean
from distseg.data.store.store import Store
from distseg.tiling.tile import Box

_IMAGES_KEPT = 32  # images whose weights stay in memory


def focus_of(store: Store, split: str, data: DataBase) -> Focus | None:
    """Return a source of random pixels of chosen classes, near which crops are placed.

    The result is None if the settings choose no classes: neither ``data.focus_class`` nor
    ``data.focus_weights`` is set.

    Args:
        store: the store.
        split: the name of the split.
        data: the settings of the section ``data``.

    Raises:
        ValueError: the settings do not fit the store (:class:`Focus`).
    """
    if data.focus_class is not None:
        return Focus(store, split, {data.focus_class: 1.0}, "focus_class")
    if data.focus_weights is None:
        return None
    weights = None if data.focus_weights == "equal" else data.focus_weights
    return Focus(store, split, weights, "focus_weights")


class Focus:
    """Source of random pixels of chosen classes, near which crops are placed.

    A class is drawn in proportion to its weight. Then a block of an image is drawn in proportion to
    the square root of its number of pixels of this class, and then one of these pixels.

    Args:
        store: the store.
        split: the name of the split.
        weights: the weight of each class by its name, above 0; None for equal weights of all
            classes that have a pixel in the split.
        setting: the setting that names the classes, ``focus_class`` or ``focus_weights``, for
            messages.

    Raises:
        ValueError: the store does not have a class or has labels of whole images, or the split has
            no pixel of a class.
    """

    def __init__(self, store: Store, split: str, weights: Mapping[str, float] | None, setting: str):
        _check(store, weights, setting)
        self._blocks = lru_cache(_IMAGES_KEPT)(self._read_weights)
        self._store = store
        names = list(store.classes) if weights is None else list(weights)
        self._classes = [store.classes.index(name) for name in names]
        self._names = [image for image in store.split(split) if store.has_labels(image)]
        found = [self._blocks(image)[0][:, -1] for image in self._names]
        # (classes, images) cumulative over the images
        self._weights = np.reshape(found, (-1, len(names))).cumsum(0).T
        there = [bool(self._names) and own[-1] > 0 for own in self._weights]
        for name, is_there in zip(names, there):
            if not is_there and weights is not None:
                raise ValueError(
                    f"{_named(setting, name)}, but the split {split!r} of {store.path} has no "
                    "pixel of it: choose another class"
                )
        if not any(there):
            raise ValueError(
                f"data.{setting} is 'equal', but the split {split!r} of {store.path} has no pixel "
                f"of any class: prepare the store with masks, or leave data.{setting} out"
            )
        self._kinds = np.cumsum(there if weights is None else list(weights.values()))

    def pixel(
        self, kind: float, image: float, block: float, pixel: float
    ) -> tuple[str, tuple[int, ...]]:
        """Return a random pixel of a chosen class: the name of its image, and its position there.

        The arguments are random numbers in [0, 1). They choose the class, the image, a block of it,
        and a pixel of the class in this block.
        """
        row = _drawn(self._kinds, kind)
        name = self._names[_drawn(self._weights[row], image)]
        weights, shape = self._blocks(name)
        cell = np.unravel_index(_drawn(weights[row], block), shape)
        start = tuple(int(c) * self._store.block for c in cell)
        box = Box(
            start,
            tuple(min(a + self._store.block, n) for a, n in zip(start, self._store.size(name))),
        )
        found = np.argwhere(self._store.labels(name, box) == self._classes[row])
        inside = found[int(pixel * len(found))]
        return name, tuple(int(a + i) for a, i in zip(start, inside))

    def _read_weights(self, name: str) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the cumulative weights of an image's blocks, and the number of blocks per dim.

        The weights are (classes, blocks), the blocks in row-major order. The weight of a block is
        the square root of its number of pixels of the class.
        """
        weights = np.sqrt(self._store.block_counts(name)[self._classes])
        return weights.reshape(len(weights), -1).cumsum(1), weights.shape[1:]


def _check(store: Store, weights: Mapping[str, float] | None, setting: str) -> None:
    """Refuse names in ``weights`` that are no class of a store, and a store of image labels."""
    for name in weights or {}:
        if name not in store.classes:
            raise ValueError(
                f"{_named(setting, name)}, which is no class of {store.path}: choose "
                f"{', '.join(store.classes)}{did_you_mean(name, store.classes)}"
            )
    if store.of_images:
        given = f"data.{setting} is equal" if weights is None else _named(setting, *weights)
        raise ValueError(
            f"{given}, but {store.path} has labels of whole images, so that no pixel belongs to a "
            f"class: leave data.{setting} out"
        )


def _named(setting: str, *names: str) -> str:
    """Return the beginning of an error message: a setting and the classes that it names."""
    verb = "is" if setting == "focus_class" else "has"
    return f"data.{setting} {verb} {', '.join(map(repr, names))}"


def _drawn(cumulated: np.ndarray, u: float) -> int:
    """Return a random index, with a probability proportional to its weight.

    Args:
        cumulated: the cumulative sums of the weights of all indices.
        u: the random number in [0, 1) that determines the index.
    """
    return min(int(np.searchsorted(cumulated, u * cumulated[-1], "right")), len(cumulated) - 1)
