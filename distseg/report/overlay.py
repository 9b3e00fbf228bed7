"""Picture of one segmented image: the image, its labels, the prediction and the errors.

Each panel draws an image pixel as a block of k x k figure pixels, so nothing is blurred. Large
images are shrunk first, in a way that keeps rare classes visible (:mod:`distseg.report.shrink`).
The scores in the titles are computed from the full images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distseg.report.shrink import block_size, shrink_image, shrink_labels
from distseg.report.style import ERROR, FAINT, UNLABELLED, class_colors, new_figure

DPI = 100


def plot_overlay(
    image: np.ndarray,
    truth: np.ndarray | None,
    prediction: np.ndarray,
    classes: Sequence[str],
    colors: Sequence | None,
    output: str | Path,
    ignore: int = 255,
    title: str = "",
    scores: str | None = None,
) -> None:
    """Draw the image, the labels, the prediction and the errors to a file.

    Without labels, only the image and the prediction are drawn.

    Args:
        image: (H, W, 3) uint8.
        truth: the labels: (H, W) class numbers, ``ignore`` for pixels without a label; None if
            there are no labels.
        prediction: (H, W) class numbers, ``ignore`` for pixels without data.
        classes: the names of the classes in the order of the class numbers.
        colors: one colour per class (``#rrggbb`` or three ints in 0..255). None chooses natural
            colours for names such as ocean, land and lake.
        output: the file to write, such as ``overlay.png``.
        ignore: the number for pixels without a label or without data.
        title: a text before the scores; it may be empty.
        scores: the scores as text; by default the IoU of ``prediction``.

    Raises:
        ValueError: the sizes differ, or a label is not the number of a class.
    """
    _check(image, truth, prediction, classes, ignore)
    number, block = len(classes), block_size(image.shape)
    table = np.vstack([class_colors(classes, colors), _rgb(UNLABELLED)])
    counts = np.bincount(
        _labels(prediction if truth is None else truth, ignore, number).ravel(),
        minlength=number + 1,
    )
    small = shrink_image(image)
    predicted = ("prediction", table[shrink_labels(_labels(prediction, ignore, number), counts)])
    legend = list(zip(classes, table))
    if truth is None:
        panels = [("image", small), predicted]
    else:
        panels = [
            ("image", small),
            ("truth", table[shrink_labels(_labels(truth, ignore, number), counts)]),
            predicted,
        ]
        panels.append(_error_panel(small, truth, prediction, ignore))
        legend += [
            ("error", _rgb(ERROR)),
            *([("no label", _rgb(UNLABELLED))] if counts[number] else []),
        ]
        scores = scores or iou_text(truth, prediction, classes, ignore)
        title = "     ".join(filter(None, [title, scores]))
    _draw(
        panels,
        legend,
        title,
        f"drawn at 1:{block}, rare classes favoured" if block > 1 else "",
        output,
    )


def iou_per_class(
    truth: np.ndarray, prediction: np.ndarray, number: int, ignore: int = 255
) -> list[float]:
    """Return the intersection over union (IoU) of each class, computed over the labelled pixels.

    The value is NaN for a class that neither ``truth`` nor ``prediction`` contains.

    Args:
        truth: (*size) class numbers, ``ignore`` for pixels without a label.
        prediction: (*size) class numbers, ``ignore`` for pixels without data.
        number: the number of classes.
        ignore: the class number of pixels that do not count.
    """
    valid = (truth != ignore) & (prediction != ignore)
    pairs = truth[valid].astype(np.int64) * number + prediction[valid]
    confusion = np.bincount(pairs, minlength=number * number).reshape(number, number)
    hits, union = np.diag(confusion), confusion.sum(0) + confusion.sum(1) - np.diag(confusion)
    return [h / u if u else math.nan for h, u in zip(hits, union)]


def iou_text(
    truth: np.ndarray, prediction: np.ndarray, classes: Sequence[str], ignore: int = 255
) -> str:
    """Return the IoU of each class as text: ``IoU:  ocean 0.996 · land 0.981 · mean 0.988``.

    ``classes`` are the names of the classes. The other arguments are those of
    :func:`iou_per_class`. A class that neither labels nor prediction contain is shown as absent,
    and the mean leaves it out.
    """
    values = iou_per_class(truth, prediction, len(classes), ignore)
    present = [v for v in values if not math.isnan(v)]
    parts = [
        f"{name} {'absent' if math.isnan(v) else f'{v:.3f}'}" for name, v in zip(classes, values)
    ]
    mean = [f"mean {sum(present) / len(present):.3f}"] if len(present) > 1 else []
    return "IoU:  " + " · ".join([*parts, *mean])


def _error_panel(
    small: np.ndarray, truth: np.ndarray, prediction: np.ndarray, ignore: int
) -> tuple[str, np.ndarray]:
    """Return the title and the pixels of the error panel: errors over a pale grey image.

    Args:
        small: the shrunken image, (h, w, 3).
        truth: class numbers at full size, (H, W).
        prediction: class numbers at full size, (H, W).
        ignore: the number of pixels without a label or without data, which are never errors.

    Returns:
        The title, with the percentage of wrong pixels; and the panel, (h, w, 3) uint8.
    """
    valid = (truth != ignore) & (prediction != ignore)
    wrong = valid & (truth != prediction)
    drawn = shrink_labels(wrong, np.array([wrong.size - wrong.sum(), wrong.sum()])) == 1
    share = wrong.sum() / max(1, valid.sum())
    return f"errors: {share:.2%}", errors_over_grey(small, drawn)


def errors_over_grey(image: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Return an image in pale grey, (H, W, 3) uint8, with wrong pixels in the colour of errors.

    Args:
        image: (H, W, 3) uint8.
        wrong: (H, W) bool, True for the pixels with a wrong predicted class.
    """
    grey = (175 + 0.3 * image.mean(-1, keepdims=True)).repeat(3, -1)
    return np.where(wrong[..., None], _rgb(ERROR), grey).astype(np.uint8)


def _columns(panels: int, aspect: float) -> int:
    """Return the number of panel columns that brings the picture's aspect ratio nearest to 1.6.

    Args:
        panels: the number of panels.
        aspect: width / height of one panel.
    """
    return min(
        (c for c in (1, 2, 4) if c <= panels),
        key=lambda c: abs(math.log(c * aspect / -(-panels // c) / 1.6)),
    )


def _draw(
    panels: list[tuple[str, np.ndarray]],
    legend: list[tuple[str, np.ndarray]],
    title: str,
    note: str,
    output: str | Path,
) -> None:
    """Draw the panels on a grid, with a title above and a legend below.

    Args:
        panels: the title and the pixels, (h, w, 3) uint8, of each panel. All have one size.
        legend: the name and the colour of each entry.
        title: the title of the picture.
        note: a text beside the legend; it may be empty.
        output: the file to write.
    """
    height, width = (n * max(1, 640 // max(panels[0][1].shape)) for n in panels[0][1].shape[:2])
    columns, gap = _columns(len(panels), width / height), 24
    rows, total_width = -(-len(panels) // columns), columns * (width + gap) + gap
    text = max(13.0, total_width / 80)  # height of the letters
    label, head, foot = 2 * text, (3.2 * text if title else gap / 2), 3 * text
    total_height = head + rows * (height + label) + foot
    points, left, right = text * 72 / DPI, gap / total_width, 1 - gap / total_width
    with new_figure(output, (total_width / DPI, total_height / DPI), DPI) as figure:
        for index, (name, pixels) in enumerate(panels):
            x, y = (
                gap + index % columns * (width + gap),
                total_height - head - (index // columns + 1) * (height + label),
            )
            axes = figure.add_axes(
                [x / total_width, y / total_height, width / total_width, height / total_height]
            )
            axes.imshow(pixels, interpolation="nearest", aspect="auto")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=True, color="#BBBBBB", linewidth=0.6)
            axes.set_title(name, fontsize=points, fontweight="normal", pad=points * 0.35)
        figure.text(
            left,
            1 - 0.55 * head / total_height,
            title,
            fontsize=1.25 * points,
            fontweight="bold",
            va="center",
            wrap=True,
        )
        figure.text(
            right,
            foot / 2 / total_height,
            note,
            fontsize=0.8 * points,
            color=FAINT,
            ha="right",
            va="center",
        )
        _legend(figure, legend, points, (left, foot / 2 / total_height))


def _legend(
    figure, entries: list[tuple[str, np.ndarray]], points: float, anchor: tuple[float, float]
) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=color / 255, edgecolor="#555555", linewidth=0.6, label=name)
        for name, color in entries
    ]
    figure.legend(
        handles=patches, loc="center left", bbox_to_anchor=anchor, ncols=len(patches),
        fontsize=points, borderaxespad=0, borderpad=0, handlelength=1.2, handleheight=1.0,
        columnspacing=1.6,
    )  # fmt: skip


def _rgb(color: str) -> np.ndarray:
    return class_colors([""], [color])[0]


def _labels(labels: np.ndarray, ignore: int, number: int) -> np.ndarray:
    """Return ``labels`` with the label ``ignore`` replaced by ``number``, an additional class."""
    return np.where(labels == ignore, number, labels)


def _check(
    image: np.ndarray,
    truth: np.ndarray | None,
    prediction: np.ndarray,
    classes: Sequence[str],
    ignore: int,
) -> None:
    """Refuse an image or labels whose dtype, size or values :func:`plot_overlay` cannot draw."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(
            f"the image is {image.dtype} of shape {image.shape}, but must be uint8 (H, W, 3): "
            "choose three bands and scale them to 0..255"
        )
    for name, labels in (("truth", truth), ("prediction", prediction)):
        if labels is None:
            continue
        if labels.shape != image.shape[:2]:
            raise ValueError(
                f"the {name} has shape {labels.shape}, but the image has {image.shape[:2]} "
                "pixels: give the same part of both"
            )
        values = labels[labels != ignore]
        if values.size and not 0 <= values.min() <= values.max() < len(classes):
            raise ValueError(
                f"the {name} has labels {values.min()} to {values.max()}, but the {len(classes)} "
                f"classes are 0 to {len(classes) - 1}: "
                "give the name of every class in classes, or set ignore to the number that marks "
                "pixels without a label"
            )
