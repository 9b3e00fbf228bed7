"""Per-pixel baseline: the best result of a classifier that sees one pixel at a time.

Comparing a network with the baseline shows if the network uses more than colour. Colours are
quantised. The joint counts of (colour, class) over the training split give p(colour | class) and
the share of each class. A pixel gets the class that maximises p(colour | class) * share^a. The
exponent a is the one with the best mean IoU on the training split: 1 is Bayes' rule, 0 treats rare
classes like frequent ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distseg.comm.progress import heartbeat
from distseg.data.store.store import Store
from distseg.inference.metrics import scores
from distseg.tiling.tile import Box

_BINS = 1 << 16
_BANDS = 16  # further bands are ignored; with 16 bands, each has two levels
_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_BLOCK = 512


def baseline(store: Store, split: str, world) -> np.ndarray:
    """Fit a classifier that sees one pixel at a time; return its confusion matrix on ``split``.

    The classifier is fitted to the training split. It predicts a class from the colour of a pixel
    alone. The matrix is (classes, classes) int64. All ranks of ``world`` must call it together. All
    get the same matrix.
    """
    classes, levels = len(store.classes), int(_BINS ** (1 / min(store.bands, _BANDS)))
    known = _counts(store, "train", levels, world)
    lookup = max(
        (_classifier(known, a) for a in _EXPONENTS),
        key=lambda table: _mean_iou(_confusion(known, table), classes),
    )
    return _confusion(_counts(store, split, levels, world), lookup)


def _counts(store: Store, split: str, levels: int, world) -> np.ndarray:
    """Return the number of pixels of each colour and class in a split, (levels^bands, classes).

    Bands after the 16th are ignored, and ``bands`` is then 16. Pixels without a label are not
    counted.

    Each rank counts a part of the images' blocks, and the counts of all ranks are added. All ranks
    of ``world`` must call it together.

    Args:
        store: the store of the images.
        split: the name of the split.
        levels: the number of steps into which the values of a band are quantised.
        world: the communicator of all ranks.
    """
    classes = len(store.classes)
    total = np.zeros(levels ** min(store.bands, _BANDS) * classes)
    for position, (name, box) in enumerate(_blocks(store, split)):
        if position % world.size == world.rank:
            heartbeat(f"colours of image {name}")
            labels = store.labels(name, box)
            valid = labels != store.ignore
            colour = _quantised(store.read_normalised(name, box)[:_BANDS], levels)[valid]
            total += np.bincount(colour * classes + labels[valid], minlength=total.size)
    everyone = world.allgather(total) if world.size > 1 else [total]
    return sum(everyone).reshape(-1, classes).astype(np.int64)


def _blocks(store: Store, split: str) -> Iterator[tuple[str, Box]]:
    for name in store.split(split):
        size = store.size(name)
        for corner in np.ndindex(*(-(-n // _BLOCK) for n in size)):
            start = tuple(c * _BLOCK for c in corner)
            yield name, Box(start, tuple(min(a + _BLOCK, n) for a, n in zip(start, size)))


def _quantised(pixels: np.ndarray, levels: int) -> np.ndarray:
    """Convert normalised pixels (C, *size) to one colour number for each pixel, (*size).

    Between -2.5 and 2.5 standard deviations, each band is divided into ``levels`` equal steps;
    values beyond belong to the first or last step. The steps of all bands are the digits of the
    colour number in base ``levels``.
    """
    steps = np.clip((pixels + 2.5) * (levels / 5), 0, levels - 1).astype(np.int64)
    colour = np.zeros(pixels.shape[1:], dtype=np.int64)
    for band in steps:
        colour = colour * levels + band
    return colour


def _classifier(counts: np.ndarray, exponent: float) -> np.ndarray:
    """Return the class number that the baseline predicts for each colour, (colours,).

    A colour gets the class with the largest p(colour | class) * share^exponent, where the share of
    a class is its part of all pixels. Colours without pixels get the most frequent class.

    Args:
        counts: the number of training pixels of each colour and class, (colours, classes).
        exponent: 1 for Bayes' rule; 0 treats rare classes like frequent ones.
    """
    share = counts.sum(0) / max(1, counts.sum())
    # A count is share * p(colour | class) * N, so one power of the share is in it already.
    weight = np.where(share > 0, share ** (exponent - 1), 0)
    found = (counts * weight).argmax(1)
    found[counts.sum(1) == 0] = share.argmax()
    return found


def _confusion(counts: np.ndarray, lookup: np.ndarray) -> np.ndarray:
    classes = counts.shape[1]
    matrix = np.zeros((classes, classes), dtype=np.int64)
    for predicted in range(classes):
        matrix[:, predicted] = counts[lookup == predicted].sum(0)
    return matrix


def _mean_iou(matrix: np.ndarray, classes: int) -> float:
    return scores(matrix, [str(c) for c in range(classes)])["mean_iou"] or 0.0
