"""Evaluation on whole images: confusion matrix, scores of each image, and the validation loss.

The loss is that of the serial program in evaluation mode on all images of the split as one step.
The same logits give the confusion matrix and the partial sums of the loss, so one forward pass
suffices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from distseg.comm.watch import heartbeat
from distseg.data.store.store import Store
from distseg.inference.boundary import KINDS as BOUNDARY
from distseg.inference.boundary import ROWS, BoundaryCounter
from distseg.inference.image_source import store_image
from distseg.inference.metrics import confusion, most_likely
from distseg.inference.predictor import Predictor
from distseg.inference.rounds import in_rounds
from distseg.layers.criterion import Criterion
from distseg.tiling.tile import Box

_SLAB = 1 << 18  # logits that are converted to float64 at once; they fit a CPU's cache


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation, the same on all ranks.

    Attributes:
        matrix: the confusion matrix over the pixels of all images, (classes, classes) int64. Rows
            are true classes, columns predicted ones.
        counts: for each image and class the number of correctly predicted pixels, of true pixels
            and of predicted pixels, (images, 3, classes) int64. The order of images is that of the
            split.
        loss: the loss over all images; None if no loss was asked for.
        boundaries: for each image the counts of :func:`distseg.inference.boundary.boundary_counts`,
            (images, ROWS, classes) int64; None if no tolerance was given.
    """

    matrix: np.ndarray
    counts: np.ndarray
    loss: float | None = None
    boundaries: np.ndarray | None = None


def evaluate(
    predictor: Predictor,
    store: Store,
    split: str,
    world,
    stop: Callable[[], bool] = lambda: False,
    loss: Criterion | None = None,
    watch: Callable[[int, Box, np.ndarray], None] = lambda image, tile, classes: None,
    tolerance: int = 0,
) -> Evaluation | None:
    """Apply a network to all images of a split; return the confusion matrix and other results.

    All ranks of ``world`` must call this function together. All get the same result.

    Args:
        predictor: the network, which is applied to whole images.
        store: the store of the images and their labels.
        split: name of the split, such as ``val``.
        world: the communicator of all ranks.
        stop: function that is called after each round, in which each rank computes at most one
            image or its share of one. It must return the same value on all ranks. True ends the
            evaluation, and None is returned.
        loss: the loss to compute, in addition to the confusion matrix; None for no loss.
        watch: function that is called for each tile that this rank computes: with the index of the
            image in the split, the tile and its predicted classes.
        tolerance: the tolerance in pixels of the boundaries to count; 0 to count none.
    """
    classes, names = len(store.classes), store.split(split)
    matrix = np.zeros((classes, classes), np.int64)
    counts = np.zeros((len(names), 3, classes), np.int64)
    rows: list[tuple[int, np.ndarray]] = []  # the image and the partial sums of each tile
    counters = _Counters(store, names, tolerance)

    def work(image: int, results) -> None:
        for tile, logits in results:
            labels = store.labels(names[image], tile)
            prediction = most_likely(logits)
            watch(image, tile, prediction)
            found = confusion(labels, prediction, classes, store.ignore)
            counts[image] += (np.diag(found), found.sum(1), found.sum(0))
            matrix[...] += found
            if loss is not None:
                rows.append((image, _partial_sums(loss, logits, labels)))
            if tolerance:
                counters.add(image, tile, labels, prediction)

    sources = [partial(store_image, store, name) for name in names]
    sizes = [store.size(name) for name in names]
    if not in_rounds(predictor, sources, sizes, world, f"evaluate {split}", work, stop):
        return None
    matrix, counts = (sum(world.allgather(part)) for part in (matrix, counts))
    boundaries = counters.counts(world) if tolerance else None
    if loss is None:
        return Evaluation(matrix, counts, None, boundaries)
    every = [row for part in world.allgather(rows) for row in part]
    value = loss.value(_table(every, len(names), loss.sums)).item()
    return Evaluation(matrix, counts, value, boundaries)


class _Counters:
    """Counters of the pixels near class boundaries in all images of a split, on one rank.

    Args:
        store: the store of the images.
        names: the names of the images.
        tolerance: the tolerance in pixels of the boundaries.
    """

    def __init__(self, store: Store, names: Sequence[str], tolerance: int):
        self._store, self._names, self._tolerance = store, names, tolerance
        self._counts = np.zeros((len(names), ROWS, len(store.classes)), np.int64)
        self._growing: dict[int, BoundaryCounter] = {}  # images without all of their tiles

    def add(self, image: int, tile: Box, truth: np.ndarray, prediction: np.ndarray) -> None:
        """Add a tile of an image, with its true labels and its predicted classes (*tile.size)."""
        store, name = self._store, self._names[image]
        if image not in self._growing:
            labels = partial(store.labels, name)
            classes, ignore = len(store.classes), store.ignore
            self._growing[image] = BoundaryCounter(
                store.size(name), labels, classes, ignore, self._tolerance
            )
        counter = self._growing[image]
        counter.add(tile, truth, prediction)
        if counter.complete:
            self._counts[image] += counter.finish(counter.pieces)
            del self._growing[image]

    def counts(self, world) -> np.ndarray:
        """Return the counts of each image, over all ranks, (images, ROWS, classes) int64.

        All ranks of ``world`` must call it together, after the last tile. Images whose tiles are
        on several ranks are finished one after the other. For this, ranks exchange the predicted
        classes near the borders of their tiles.
        """
        shared = sorted({image for part in world.allgather(list(self._growing)) for image in part})
        for image in shared:
            heartbeat(f"boundaries of image {self._names[image]}")
            counter = self._growing.pop(image, None)
            every = world.allgather(counter.pieces if counter else [])
            if counter:
                self._counts[image] += counter.finish([piece for part in every for piece in part])
        return sum(world.allgather(self._counts))


@torch.no_grad()
def _partial_sums(loss: Criterion, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the partial sums (K,) float64 of a loss over a tile.

    The sums are computed slab by slab, so that logits in float64 take little memory. In float64
    the sums do not depend on the number of threads, except for rounding of about 1e-16.

    Args:
        loss: the loss.
        logits: the network's output on the tile, (C, *tile).
        labels: the labels of the tile, (*tile).
    """
    thickness = max(1, _SLAB * len(labels) // logits.size)
    rows = []
    for start in range(0, len(labels), thickness):
        slab = slice(start, start + thickness)
        z = torch.from_numpy(logits[:, slab]).double()
        rows.append(loss.rows(z[None], torch.from_numpy(labels[slab])[None])[0].numpy())
    return _sum(rows)


def _table(rows: list[tuple[int, np.ndarray]], images: int, sums: int) -> torch.Tensor:
    """Return the partial sums of a loss for each image, (images, sums) float64.

    Args:
        rows: for each tile, in any order, the index of its image and its partial sums, (sums,).
        images: the number of images.
        sums: the number of partial sums of an image.
    """
    parts: list[list[np.ndarray]] = [[np.zeros(sums)] for _ in range(images)]
    for image, row in rows:
        parts[image].append(row)
    return torch.from_numpy(np.stack([_sum(part) for part in parts]))


def _sum(rows: list[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays of the same shape (n,), float64, rounded only once.

    So the sum does not depend on the order of the arrays, which differs between meshes.
    """
    return np.array([math.fsum(values) for values in zip(*rows)])


def score_rows(found: Mapping[str, dict], classes: list[str]) -> list[dict]:
    """Return the rows of the table that compares a network with the per-pixel baseline.

    A row is a dict from the name of a column to the value. There is a row for
    each class, and a column for each method and score, such as ``network iou``. The last row has
    the mean IoU and Dice of all classes, and the accuracy over all pixels.

    Args:
        found: the scores of each method (:func:`distseg.inference.metrics.scores`), by the method's
            name, such as ``network``.
        classes: names of the classes.
    """
    rows = []
    for c in classes:
        row = {"class": c, "pixels": next(iter(found.values()))["classes"][c]["pixels"]}
        for method, score in found.items():
            row.update(
                {
                    f"{method} {kind.replace('_', ' ')}": score["classes"][c][kind]
                    for kind in ("iou", "dice", "accuracy", *BOUNDARY)
                    if kind in score["classes"][c]
                }
            )
        rows.append(row)
    mean = {"class": "mean", "pixels": sum(row["pixels"] for row in rows)}
    for method, score in found.items():
        mean.update(
            {
                f"{method} iou": score["mean_iou"],
                f"{method} dice": score["mean_dice"],
                f"{method} accuracy": score["accuracy"],
                **{
                    f"{method} {kind.replace('_', ' ')}": score[f"mean_{kind}"]
                    for kind in BOUNDARY
                    if f"mean_{kind}" in score
                },
            }
        )
    return [*rows, mean]
