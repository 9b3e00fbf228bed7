"""Scores of each class (IoU, Dice, accuracy) from one confusion matrix of pixel counts.

Confusion matrices of tiles and ranks are added up before the scores are computed.
"""

from __future__ import annotations

import math

import numpy as np


def confusion(truth: np.ndarray, prediction: np.ndarray, classes: int, ignore: int) -> np.ndarray:
    """Return the confusion matrix (classes, classes) int64 of pixel counts.

    Rows are true classes, columns are predicted classes.

    Args:
        truth: the true class numbers.
        prediction: the predicted class numbers, an array of the same shape.
        classes: the number of classes.
        ignore: the label of pixels that are not counted.
    """
    valid = truth != ignore
    index = truth[valid].astype(np.int64) * classes + prediction[valid]
    return np.bincount(index, minlength=classes * classes).reshape(classes, classes)


def scores(matrix: np.ndarray, names: list[str]) -> dict:
    """Return the scores of a confusion matrix: IoU, Dice and accuracy of each class, and means.

    Args:
        matrix: the pixel counts (classes, classes) of :func:`confusion`.
        names: the names of the classes.

    Returns:
        The dict that :func:`scores_of_counts` returns.
    """
    return scores_of_counts(np.stack((np.diag(matrix), matrix.sum(1), matrix.sum(0))), names)


def scores_of_counts(counts: np.ndarray, names: list[str]) -> dict:
    """Return scores from pixel counts: IoU, Dice and accuracy of each class, and means.

    For each class IoU = tp / (tp + fp + fn), Dice = 2 tp / (2 tp + fp + fn), accuracy = tp / (tp +
    fn). A score whose divisor is 0 is None.

    Args:
        counts: (3, classes), for each class the number of correctly predicted pixels (tp), of true
            pixels (tp + fn) and of predicted pixels (tp + fp).
        names: the names of the classes.

    Returns:
        A dict with these keys. ``classes``: for each class name a dict with ``iou``, ``dice``,
            ``accuracy`` and ``pixels``, the number of true pixels. ``mean_iou`` and ``mean_dice``:
            the means over the classes that have this score. ``accuracy``: the share of all pixels
            that are predicted correctly.
    """
    hit, truth, predicted = counts.astype(float)
    union = truth + predicted - hit
    table = {
        name: {
            "iou": ratio(hit[c], union[c]),
            "dice": ratio(2 * hit[c], truth[c] + predicted[c]),
            "accuracy": ratio(hit[c], truth[c]),
            "pixels": int(truth[c]),
        }
        for c, name in enumerate(names)
    }
    return {
        "classes": table,
        "mean_iou": mean(row["iou"] for row in table.values()),
        "mean_dice": mean(row["dice"] for row in table.values()),
        "accuracy": ratio(hit.sum(), truth.sum()),
    }


def quadratic_kappa(matrix: np.ndarray) -> float | None:
    """Return Cohen's kappa with quadratic weights: 1 for no error, 0 for guessing.

    kappa = 1 - sum w_ij O_ij / sum w_ij E_ij, with w_ij = (i - j)^2, O the confusion matrix, and
    E_ij = (images of class i) (predictions of class j) / images (Cohen, 1968). An error is weighted
    by the square of the difference of the two class numbers, so the classes must have an order.

    Args:
        matrix: O, (classes, classes); rows are true classes.

    Returns:
        The kappa. None if its divisor is 0: all images belong to one class and are predicted to
            belong to it, or there are no images.
    """
    observed, classes = matrix.astype(float), np.arange(len(matrix))
    weights = (classes[:, None] - classes[None]) ** 2.0
    expected = observed.sum(1)[:, None] * observed.sum(0)[None] / max(observed.sum(), 1.0)
    found = ratio((weights * observed).sum(), (weights * expected).sum())
    return None if found is None else 1.0 - found


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None if ``whole`` is 0."""
    return float(part / whole) if whole else None


def mean(values) -> float | None:
    """Return the mean of the values that are not None; None if all are None."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def most_likely(logits: np.ndarray) -> np.ndarray:
    """Return the class map, (*size) uint8, from logits, (C, *size).

    A pixel gets the class with the largest logit. With one channel, the class is 1 where the logit
    is positive, else 0.
    """
    return (
        (logits[0] > 0).astype(np.uint8) if len(logits) == 1 else logits.argmax(0).astype(np.uint8)
    )


def score_of(validation: dict) -> float | None:
    """Return the score by which checkpoints are compared; higher is better.

    It is the mean IoU of a segmentation, the accuracy of a classification of whole images, or the
    negative rmse of a regression. It is None if that score is None or not finite, for instance
    because no pixel was evaluated or because a predicted number overflowed.

    Args:
        validation: the scores, as returned by :func:`scores` or
            :func:`distseg.inference.images.scores_of_images`.
    """
    if "rmse" in validation:
        return -validation["rmse"] if math.isfinite(validation["rmse"]) else None
    return validation["mean_iou"] if "mean_iou" in validation else validation["accuracy"]
