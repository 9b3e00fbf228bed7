"""Compute and score the outputs of networks that return one vector for each whole image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from distseg.data.store.store import Store
from distseg.inference.image_source import ImageSource, store_image
from distseg.inference.metrics import confusion, mean, quadratic_kappa, ratio
from distseg.inference.predictor import Predictor
from distseg.inference.rounds import in_rounds
from distseg.layers.criterion import Criterion


def vectors_of(
    predictor: Predictor,
    sources: Sequence[Callable[[], ImageSource]],
    sizes: Sequence[Sequence[int]],
    world,
    what: str,
    stop: Callable[[], bool] = lambda: False,
) -> np.ndarray | None:
    """Return the network's output vectors for all images, (images, C').

    All ranks of ``world`` must call it together. All get the same vectors.

    Args:
        predictor: the network.
        sources: for each image, a function that opens it.
        sizes: the size of each image in pixels.
        world: the communicator of all ranks.
        what: the text beside the progress bar.
        stop: function that is called after each round, in which each rank computes its tiles of at
            most one image. It must return the same value on all ranks. If it returns True, the
            work ends and the result is None.
    """
    found: dict[int, np.ndarray] = {}

    def work(image: int, results) -> None:
        for _, vector in results:  # each tile yields the same vector
            found[image] = vector.reshape(-1)

    if not in_rounds(predictor, sources, sizes, world, what, work, stop):
        return None
    every = {image: vector for those in world.allgather(found) for image, vector in those.items()}
    return np.stack([every[image] for image in range(len(sources))])


def evaluate_images(
    predictor: Predictor,
    store: Store,
    split: str,
    world,
    stop: Callable[[], bool] = lambda: False,
    loss: Criterion | None = None,
) -> dict | None:
    """Apply a network that returns one vector per image to a split; return the scores.

    :func:`scores_of_images` lists the scores. With ``loss``, the dict also has the key ``loss``:
    the loss of the serial program in evaluation mode on all images of the split as one step. All
    ranks of ``world`` must call this function together. All get the same scores.

    Args:
        predictor, store, split, world, stop: see :func:`outputs_of_split`. The result is None if
            ``stop`` ended the work.
        loss: the loss to compute, in addition to the scores; None for no loss.
    """
    outputs = outputs_of_split(predictor, store, split, world, stop)
    if outputs is None:
        return None
    found = scores_of_images(*outputs, store.classes)
    return found if loss is None else {"loss": _loss_of(loss, *outputs), **found}


def outputs_of_split(
    predictor: Predictor, store: Store, split: str, world, stop: Callable[[], bool] = lambda: False
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the network's outputs (images, C') and the labels (images,) of a split.

    All ranks of ``world`` must call it together. All get the same result.

    Args:
        predictor: the network.
        store: the store with the images and their labels.
        split: the name of a split of the store.
        world: the communicator of all ranks.
        stop: function that is called after each round, in which each rank computes its tiles of at
            most one image. It must return the same value on all ranks. If it returns True, the
            work ends and the result is None.
    """
    names = store.split(split)
    vectors = vectors_of(
        predictor,
        [lambda name=name: store_image(store, name) for name in names],
        [store.size(name) for name in names],
        world,
        f"evaluate {split}",
        stop,
    )
    return None if vectors is None else (vectors, np.array([store.label(name) for name in names]))


@torch.no_grad()
def _loss_of(loss: Criterion, vectors: np.ndarray, labels: np.ndarray) -> float:
    """Return the loss of output vectors (images, C) and labels (images,), computed in float64."""
    z, y = torch.from_numpy(vectors).double(), torch.from_numpy(labels)
    return loss.value(loss.rows(z[..., None], y[:, None])).item()


def scores_of_images(vectors: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> dict:
    """Return the scores of a network that gives one vector for each image, as a dict.

    With several classes the scores are:

    - accuracy: the share of images whose largest logit is that of the true class;
    - for each class accuracy = tp / (tp + fn), precision = tp / (tp + fp), and auc, the area under
    the curve of true over false positive rate (:func:`area_under_curve`); a score whose divisor is
    0 is None;
    - mean_accuracy and auc: the means of the accuracies and areas of all classes that have images;
    - kappa: with quadratic weights, for classes that have an order (:func:`quadratic_kappa`);
    - confusion: the confusion matrix, as nested lists.

    With one class the task is a regression: the labels are the numbers to predict. The scores are
    then mae, rmse, and r2 = 1 - sum error^2 / sum (label - mean label)^2. If all labels are equal,
    r2 is None.

    Args:
        vectors: logits (images, classes); for two classes also one logit (images, 1); for one class
            the predicted numbers (images, 1).
        labels: class numbers, or the true numbers, (images,).
        classes: the names of the classes.
    """
    if len(classes) == 1:
        return _of_numbers(vectors[:, 0].astype(float), labels.astype(float))
    likely = probabilities(vectors)
    matrix = confusion(labels, likely.argmax(1), len(classes), ignore=-1)
    hit, truth, predicted = np.diag(matrix).astype(float), matrix.sum(1), matrix.sum(0)
    table = {
        name: {
            "accuracy": ratio(hit[c], truth[c]),
            "precision": ratio(hit[c], predicted[c]),
            "auc": area_under_curve(likely[:, c], labels == c),
            "images": int(truth[c]),
        }
        for c, name in enumerate(classes)
    }

    def over(kind: str) -> float | None:
        return mean(row[kind] for row in table.values() if row["images"])

    means = {
        "accuracy": ratio(hit.sum(), matrix.sum()),
        "mean_accuracy": over("accuracy"),
        "auc": over("auc"),
        "kappa": quadratic_kappa(matrix),
    }
    return {"classes": table, **means, "confusion": matrix.tolist()}


def most_frequent(store: Store, split: str) -> float | None:
    """Return the accuracy on ``split`` if every image is predicted as the most frequent class.

    This class is the most frequent one among the training images. The result is None if the split
    has no images.
    """
    labels = [store.label(name) for name in store.split("train")]
    most = max(set(labels), key=labels.count)
    names = store.split(split)
    return ratio(sum(store.label(name) == most for name in names), len(names))


def area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the area under the ROC curve of a class.

    It is the probability that a positive image scores higher than a negative one, where equal
    scores count half. The result is None if there are no positive or no negative images.

    Args:
        scores: the score of each image, (images,).
        positive: True for the images that belong to the class, (images,) bool.
    """
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return None
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[
        place
    ]  # ranks from 1 on; equal scores share their mean rank
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def probabilities(vectors: np.ndarray) -> np.ndarray:
    """Return class probabilities (images, classes), given logits of the same shape.

    A single logit (images, 1) gives the probabilities of two classes (images, 2).
    """
    logits = vectors.astype(float)
    if logits.shape[1] == 1:
        logits = np.concatenate((np.zeros_like(logits), logits), 1)
    likely = np.exp(logits - logits.max(1, keepdims=True))
    return likely / likely.sum(1, keepdims=True)


def _of_numbers(found: np.ndarray, wanted: np.ndarray) -> dict:
    error = found - wanted
    deviation = ((wanted - wanted.mean()) ** 2).sum()
    return {
        "mae": float(np.abs(error).mean()),
        "rmse": float((error**2).mean() ** 0.5),
        "r2": ratio(deviation - (error**2).sum(), deviation),
        "images": len(wanted),
    }
