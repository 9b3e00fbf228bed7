"""Make the table of an evaluation: one row for each image, the worst image first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distseg.inference.boundary import KINDS, with_boundaries
from distseg.inference.images import probabilities
from distseg.inference.metrics import scores_of_counts


def rows_of_maps(
    names: Sequence[str],
    counts: np.ndarray,
    classes: list[str],
    boundaries: np.ndarray | None = None,
) -> list[dict]:
    """Return a table with one row for each image, for a network that predicts class maps.

    The image with the lowest mean IoU comes first; images without a score come last.

    Args:
        names: the names of the images.
        counts: (images, 3, classes): correctly predicted, true and predicted pixels of each class
            (:class:`distseg.inference.evaluate.Evaluation`).
        classes: the names of the classes.
        boundaries: (images, ROWS, classes), the counts of
            :func:`distseg.inference.boundary.boundary_counts`; None without boundary scores.

    Returns:
        Dicts with ``image``, ``pixels`` (those with a label), ``mean_iou``, ``mean_dice``,
            ``accuracy`` and ``classes`` (:func:`distseg.inference.metrics.scores_of_counts`); with
            ``boundaries`` also the scores of :func:`distseg.inference.boundary.boundary_scores`.
    """
    rows = []
    for number, (name, count) in enumerate(zip(names, counts)):
        found = scores_of_counts(count, classes)
        if boundaries is not None:
            found = with_boundaries(found, boundaries[number], classes)
        means = {kind: value for kind, value in found.items() if kind != "classes"}
        rows.append(
            {"image": name, "pixels": int(count[1].sum()), **means, "classes": found["classes"]}
        )
    return sorted(rows, key=lambda row: 2.0 if row["mean_iou"] is None else row["mean_iou"])


def rows_of_images(
    names: Sequence[str], vectors: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> list[dict]:
    """Return a table with one row for each image, for a network with one result per image.

    The network predicts a class or a number. The worst image comes first.

    Args:
        names: the names of the images.
        vectors: the network's outputs, (images, outputs).
        labels: the true class numbers, or the true numbers, (images,).
        classes: the names of the classes; a single name if the labels are numbers.

    Returns:
        Dicts with ``image``, ``label``, ``predicted``, and ``probability``, the predicted
            probability of the true class. For numbers, ``error`` replaces ``probability``. The row
            with the lowest probability, or the largest error, comes first.
    """
    if len(classes) == 1:
        rows = [
            {"image": name, "label": float(y), "predicted": float(z), "error": float(z - y)}
            for name, y, (z,) in zip(names, labels, vectors.astype(float))
        ]
        return sorted(rows, key=lambda row: -abs(row["error"]))
    rows = [
        {
            "image": name,
            "label": classes[y],
            "predicted": classes[p.argmax()],
            "probability": float(p[y]),
        }
        for name, y, p in zip(names, labels, probabilities(vectors))
    ]
    return sorted(rows, key=lambda row: row["probability"])


def flat(row: dict) -> dict:
    """Return a row of the table as a dict without nested dicts.

    For example, the IoU of the class lake gets the key ``iou lake``.
    """
    plain = {key: value for key, value in row.items() if key != "classes"}
    for name, score in row.get("classes", {}).items():
        shown = (kind for kind in ("iou", "dice", *KINDS, "pixels") if kind in score)
        plain.update({f"{kind.replace('_', ' ')} {name}": score[kind] for kind in shown})
    return plain
