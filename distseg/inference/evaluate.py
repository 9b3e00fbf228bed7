"""Evaluation on whole images: one confusion matrix over all images, tiles and ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from distseg.data.store.store import Store
from distseg.inference.image_source import store_image
from distseg.inference.metrics import confusion, most_likely, scores
from distseg.inference.predictor import Predictor
from distseg.inference.rounds import in_rounds


def evaluate(
    predictor: Predictor, store: Store, split: str, world, stop: Callable[[], bool] = lambda: False
) -> np.ndarray | None:
    """Return the confusion matrix (classes, classes) int64 over the pixels of a split's images.

    Rows are true classes, columns predicted ones. All ranks of ``world`` must call this function
    together. All get the same matrix.

    Args:
        predictor: the network, which is applied to whole images.
        store: the store of the images and their labels.
        split: name of the split, such as ``val``.
        world: the communicator of all ranks.
        stop: function that is called after each round, in which each rank computes at most one
            image or its share of one. It returns the same value on all ranks. If this is True, the
            evaluation ends and None is returned.
    """
    classes = len(store.classes)
    total = np.zeros((classes, classes))
    names = store.split(split)

    def work(image: int, results) -> None:
        nonlocal total
        for tile, logits in results:
            total += confusion(
                store.labels(names[image], tile), most_likely(logits), classes, store.ignore
            )

    sources = [partial(store_image, store, name) for name in names]
    if not in_rounds(
        predictor,
        sources,
        [store.size(name) for name in names],
        world,
        f"evaluate {split}",
        work,
        stop,
    ):
        return None
    return sum(world.allgather(total)).astype(np.int64)


def score_rows(matrices: dict[str, np.ndarray], classes: list[str]) -> list[dict]:
    """Return the rows of the table that compares a network with the per-pixel baseline.

    A row is a dict from the name of a column to the value. There is a row for
    each class, and a column for each method and score, such as ``network iou``. The last row has
    the mean IoU and Dice of all classes, and the accuracy over all pixels.

    Args:
        matrices: the confusion matrix of each method, by its name, such as ``network``.
        classes: names of the classes.
    """
    found = {method: scores(matrix, classes) for method, matrix in matrices.items()}
    rows = []
    for c in classes:
        row = {"class": c, "pixels": next(iter(found.values()))["classes"][c]["pixels"]}
        for method, score in found.items():
            row.update(
                {
                    f"{method} {kind}": score["classes"][c][kind]
                    for kind in ("iou", "dice", "accuracy")
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
            }
        )
    return [*rows, mean]
