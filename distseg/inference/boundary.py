"""Scores of class boundaries on whole images: Boundary IoU and boundary F1.

Let X be a class map (the truth or the prediction), c a class and d the tolerance in pixels. The
distance of two pixels is the larger one of the distances along the dims. A pixel is known if it
lies in the image and its true label is not the ignored one. Then

- the contour of c in X has the known pixels of class c with a known pixel of another class at a
  distance of 1;
- the boundary region of c in X has the known pixels of class c with a known pixel of another class
  at a distance of at most d;
- Boundary IoU is the IoU of the two boundary regions of c (Cheng et al. 2021, Boundary IoU, with
  their d as a number of pixels). Their program also counts the border of the image as a contour;
- precision is the share of the predicted contour of c that has a pixel of the true contour of c at
  a distance of at most d. Recall is the share of the true contour that has a pixel of the predicted
  one at this distance. F1 = 2 precision recall / (precision + recall).

Ignored pixels are neither counted nor do they make a contour, since their class is not known.

All scores follow from counts of pixels. A pixel's contribution depends on the pixels at a distance
of at most d + 1, so tiles are counted with that margin. The margins come from other tiles, which
may belong to other ranks. The counts equal those of the whole image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distseg.inference.metrics import mean, ratio
from distseg.tiling.tile import Box, strips

# Rows of the counts of a class.
_BOTH, _TRUE, _FOUND, _TRUE_LINE, _TRUE_NEAR, _FOUND_LINE, _FOUND_NEAR = range(7)
ROWS = 7
KINDS = ("boundary_iou", "boundary_f1")  # names of the scores
_STRIP = 1 << 18  # pixels that are counted at once
_BELOW, _ABOVE = -1, 1 << 14  # numbers below and above every class number


def boundary_counts(
    truth: np.ndarray,
    prediction: np.ndarray,
    classes: int,
    ignore: int,
    tolerance: int,
    counted: tuple[slice, ...] = (...,),
) -> np.ndarray:
    """Count pixels near the class boundaries of a true and a predicted class map.

    The result is (ROWS, classes) int64. Its rows are the numbers of pixels: in both boundary
    regions; in the true one; in the predicted one; on the true contour; of these, those near the
    predicted contour; on the predicted contour; of these, those near the true contour. A boundary
    region has the pixels at most ``tolerance`` from another class, and "near" is the same distance.
    A contour has the pixels next to another class.

    Args:
        truth: the true class numbers of a window of the image.
        prediction: the predicted class numbers, an array of the same shape.
        classes: the number of classes.
        ignore: the true label of ignored pixels.
        tolerance: the distance in pixels, at least 1.
        counted: the part of the window whose pixels are counted. Around it, the window must have a
            margin of ``tolerance`` + 1 pixels, except where the image ends.
    """
    known = truth != ignore
    true, found = truth.astype(np.int16), prediction.astype(np.int16)
    true[~known] = found[~known] = _BELOW
    regions = [_at_another(x, known, tolerance)[counted] for x in (true, found)]
    lines = [_at_another(x, known, 1) for x in (true, found)]

    def of_classes(labels: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.bincount(labels[mask], minlength=classes)

    counts = np.zeros((ROWS, classes), np.int64)
    inner = true[counted], found[counted]
    counts[_BOTH] = of_classes(inner[0], regions[0] & regions[1] & (inner[0] == inner[1]))
    counts[_TRUE], counts[_FOUND] = map(of_classes, inner, regions)
    inner_lines = [line[counted] for line in lines]
    counts[_TRUE_LINE], counts[_FOUND_LINE] = map(of_classes, inner, inner_lines)
    for c in np.flatnonzero(counts[_TRUE_LINE] + counts[_FOUND_LINE]):
        own = [line & (x == c) for line, x in zip(lines, (true, found))]
        near = [_extreme(x, tolerance, np.logical_or, False)[counted] for x in own]
        counts[_TRUE_NEAR, c] = (own[0][counted] & near[1]).sum()
        counts[_FOUND_NEAR, c] = (own[1][counted] & near[0]).sum()
    return counts


def _at_another(labels: np.ndarray, known: np.ndarray, radius: int) -> np.ndarray:
    """Return a mask of the pixels that have a pixel of another class within ``radius``.

    The mask is False at unknown pixels, and an unknown pixel is no pixel of another class.

    Args:
        labels: the class number of each pixel; ``_BELOW`` at unknown pixels.
        known: the mask of known pixels.
        radius: the largest distance of the other pixel along each dim.
    """
    largest = _extreme(labels, radius, np.maximum, _BELOW)
    smallest = _extreme(np.where(known, labels, _ABOVE), radius, np.minimum, _ABOVE)
    return known & ((largest != labels) | (smallest != labels))


def _extreme(values: np.ndarray, radius: int, larger: Callable, outside) -> np.ndarray:
    """Return for each element of an array the largest (or smallest) value around it.

    Args:
        values: the array; the result has the same shape.
        radius: the largest distance, along each dim, of the elements that are compared.
        larger: ``np.maximum`` for the largest value, ``np.minimum`` for the smallest.
        outside: the value outside of the array.
    """
    wanted = 2 * radius + 1
    for axis in range(values.ndim):
        margin = [(radius, radius) if a == axis else (0, 0) for a in range(values.ndim)]
        rows = np.moveaxis(np.pad(values, margin, constant_values=outside), axis, 0)
        covered = 1
        while covered < wanted:
            step = min(covered, wanted - covered)
            rows = larger(rows[:-step], rows[step:])
            covered += step
        values = np.moveaxis(rows, 0, axis)
    return values


def boundary_scores(counts: np.ndarray, names: Sequence[str]) -> dict:
    """Return Boundary IoU and boundary F1 of each class, and their means.

    A score is None if neither the true nor the predicted class map has a boundary of the class. F1
    is 0 if only one of them has.

    Args:
        counts: the counts (ROWS, classes) of :func:`boundary_counts`, summed over windows.
        names: the names of the classes.

    Returns:
        A dict with ``classes``, for each class name a dict with ``boundary_iou`` and
            ``boundary_f1``; and ``mean_boundary_iou`` and ``mean_boundary_f1``, the means over the
            classes that have this score.
    """
    table = {
        name: {
            "boundary_iou": ratio(n[_BOTH], n[_TRUE] + n[_FOUND] - n[_BOTH]),
            "boundary_f1": _f1(n),
        }
        for name, n in zip(names, counts.T)
    }
    means = {f"mean_{kind}": mean(row[kind] for row in table.values()) for kind in KINDS}
    return {"classes": table, **means}


def _f1(counts: np.ndarray) -> float | None:
    """Return the boundary F1 of one class from its ``counts``, (ROWS,).

    The result is None if neither the true nor the predicted class map has a contour of the class.
    """
    if not counts[_TRUE_LINE] + counts[_FOUND_LINE]:
        return None
    recall = ratio(counts[_TRUE_NEAR], counts[_TRUE_LINE]) or 0.0
    precision = ratio(counts[_FOUND_NEAR], counts[_FOUND_LINE]) or 0.0
    return ratio(2 * precision * recall, precision + recall) or 0.0


def with_boundaries(scores: dict, counts: np.ndarray, names: Sequence[str]) -> dict:
    """Return a dict of scores with the boundary scores added, for each class and as means.

    Args:
        scores: the scores from :func:`distseg.inference.metrics.scores_of_counts`.
        counts: the counts (ROWS, classes) of :func:`boundary_counts`, summed over windows.
        names: the names of the classes.
    """
    found = boundary_scores(counts, names)
    classes = {name: {**row, **found["classes"][name]} for name, row in scores["classes"].items()}
    return {**scores, **found, "classes": classes}


@dataclass
class BoundaryCounter:
    """Counter of the boundary pixels of one image, whose predicted tiles come in any order.

    The inner part of a tile is counted immediately. The pixels near its border are counted at the
    end, because they depend on the pixels of the tiles beside it.

    Args:
        size: the size of the image in pixels.
        labels: function that returns the true labels of a box.
        classes: the number of classes.
        ignore: the true label of ignored pixels.
        tolerance: the tolerance in pixels of the boundaries, at least 1.

    Attributes:
        counts: (ROWS, classes) int64, the result of :func:`boundary_counts` for the pixels that
            were counted so far.
        pieces: boxes along the borders of the tiles, with their predicted classes.
        tiles: the boxes of the tiles that were added.
    """

    size: Sequence[int]
    labels: Callable[[Box], np.ndarray]
    classes: int
    ignore: int
    tolerance: int
    counts: np.ndarray = field(init=False)
    pieces: list[tuple[Box, np.ndarray]] = field(default_factory=list)
    tiles: list[Box] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = np.zeros((ROWS, self.classes), np.int64)
        self._added = 0  # pixels of the tiles that were added

    @property
    def complete(self) -> bool:
        """True if the tiles that were added cover the image."""
        return self._added == Box.whole(self.size).pixels

    def add(self, tile: Box, truth: np.ndarray, prediction: np.ndarray) -> None:
        """Add a tile of the image, and count its inner pixels.

        Args:
            tile: the tile's box.
            truth: the true labels of the tile, (*tile.size).
            prediction: the predicted classes of the tile, (*tile.size).
        """
        self.tiles.append(tile)
        self._added += tile.pixels
        inner = self._inner(tile, self.tolerance + 1)
        for strip in () if inner is None else strips(inner, _STRIP):
            window = self._with_margin(strip).intersection(tile)
            part = window.relative_to(tile).slices
            self._count(strip, window, truth[part], prediction[part])
        # The frame reaches as far as margins of the tile's own outer pixels do.
        for box in _around(tile, self._inner(tile, 2 * self.tolerance + 2)):
            self.pieces.append((box, prediction[box.relative_to(tile).slices].copy()))

    def finish(self, pieces: Sequence[tuple[Box, np.ndarray]]) -> np.ndarray:
        """Count the pixels near the borders of the tiles that were added; return all counts.

        The result is (ROWS, classes) int64, for all pixels of these tiles.

        Args:
            pieces: the attribute ``pieces`` for all tiles of the image, also for tiles that other
                ranks computed.
        """
        starts = np.array([box.start for box, _ in pieces])
        stops = np.array([box.stop for box, _ in pieces])
        for tile in self.tiles:
            for box in _around(tile, self._inner(tile, self.tolerance + 1)):
                window = self._with_margin(box)
                prediction = np.empty(window.size, np.uint8)
                covered = 0
                beside = (starts < window.stop) & (stops > window.start)
                for number in np.flatnonzero(beside.all(1)):
                    there, found = pieces[number]
                    both = there.intersection(window)
                    into, part = (both.relative_to(of).slices for of in (window, there))
                    prediction[into] = found[part]
                    covered += both.pixels
                assert covered == window.pixels
                self._count(box, window, self.labels(window), prediction)
        return self.counts

    def _count(self, box: Box, window: Box, truth: np.ndarray, prediction: np.ndarray) -> None:
        counted = box.relative_to(window).slices
        self.counts += boundary_counts(
            truth, prediction, self.classes, self.ignore, self.tolerance, counted
        )

    def _with_margin(self, box: Box) -> Box:
        margin = self.tolerance + 1
        return Box(
            tuple(max(0, a - margin) for a in box.start),
            tuple(min(n, b + margin) for b, n in zip(box.stop, self.size)),
        )

    def _inner(self, tile: Box, margin: int) -> Box | None:
        """Return the part of a tile whose pixels lie at least ``margin`` pixels from other tiles.

        The result is None if no pixel does.
        """
        start = tuple(a + margin * (a > 0) for a in tile.start)
        stop = tuple(b - margin * (b < n) for b, n in zip(tile.stop, self.size))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop)) else None


def _around(outer: Box, inner: Box | None) -> Iterator[Box]:
    """Yield disjoint boxes that cover ``outer`` except ``inner``, a box inside of it."""
    if inner is None:
        yield outer
        return
    start, stop = list(outer.start), list(outer.stop)
    for axis, (a, b) in enumerate(zip(inner.start, inner.stop)):
        for low, high in ((start[axis], a), (b, stop[axis])):
            if low < high:
                yield Box(
                    (*start[:axis], low, *start[axis + 1 :]),
                    (*stop[:axis], high, *stop[axis + 1 :]),
                )
        start[axis], stop[axis] = a, b
