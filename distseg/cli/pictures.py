"""Draw evaluated images for the report of a run: image, truth, prediction and errors.

If each image has one label, the picture is the image with its true and its predicted label.

An image is read and shrunk strip by strip, so that memory does not grow with its size. The
prediction comes from a file of ``distseg predict``, or the network computes it again. A file is
shown only if its scores are those of the evaluation, so a file of another run is never shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distseg.data.nodata import missing
from distseg.data.picture import rgb
from distseg.data.store import hdf5
from distseg.data.store.store import Store
from distseg.inference.image_source import store_image
from distseg.inference.metrics import confusion, most_likely, scores
from distseg.inference.predictor import Predictor
from distseg.report.cuts import middle_of_interest, three_cuts
from distseg.report.page import Panel, Pictures, data_uri
from distseg.report.shrink import block_sums, shrink_labels
from distseg.report.style import ERROR, UNLABELLED, class_colors
from distseg.tiling.tile import Box, strips

_SIDE = 560  # longest side of a picture in pixels, at most
_SMALL_SIDE = 280  # longest side of a picture with one label, at most
_LABELLED = 6  # pictures with one label for each picture with a class map
_STRIP = 1 << 20  # pixels that are read at once
_COMPUTED = 1 << 24  # pixels of the largest image that is predicted again for its picture
_GREYS = 24  # levels of grey below the errors
_ROUNDING = 0.01  # share of pixels whose class may differ between two devices

Reader = Callable[[Box], np.ndarray]


@dataclass(frozen=True)
class Gallery:
    """Maker of the pictures for a run's report: images, labels and predictions.

    Attributes:
        store: the store of the evaluated images.
        colours: the colours of the classes, (classes, 3) uint8.
        folder: the folder with files of ``distseg predict``.
        predictor: returns the run's network; it is called only if a file is missing.
    """

    store: Store
    colours: np.ndarray
    folder: Path
    predictor: Callable[[], Predictor]

    def pictures(self, rows: Sequence[Mapping], count: int) -> Iterator[Pictures | str]:
        """Yield the pictures of the ``count`` worst and best images, or a note on a missing one.

        Args:
            rows: the table of images, the worst image first.
            count: number of worst images, and of best images.
        """
        scored = [row for row in rows if row["mean_iou"] is not None]
        worst, best = scored[:count], scored[count:][-count:]
        for word, row in [("worst", row) for row in worst] + [("best", row) for row in best]:
            yield self._picture(row, word)

    def labelled(self, rows: Sequence[Mapping], count: int) -> list[Pictures]:
        """Return the worst and the best images of a network that predicts one label per image.

        The title of each picture is the true and the predicted label, or number.

        Args:
            rows: the table of images (:func:`distseg.inference.image_scores.rows_of_images`), the
                worst image first.
            count: number of worst images, and of best images, for a network that predicts class
                maps. This method returns 6 times this number, because its pictures are small.
        """
        most = _LABELLED * count
        worst, best = rows[:most], rows[most:][-most:]
        of_numbers = bool(rows) and "error" in rows[0]
        caption = "largest error first" if of_numbers else "least probable true class first"
        return [
            Pictures(name, caption, [self._labelled(row) for row in chosen])
            for name, chosen in (("Worst images", worst), ("Best images", best))
            if chosen
        ]

    def _labelled(self, row: Mapping) -> Panel:
        """Return the picture of an image with one label; for a volume, of its middle slice."""
        name, image = row["image"], _ShrunkPixels()
        *outer, height, width = self.store.size(name)
        middle = tuple(n // 2 for n in outer)
        block = max(1, -(-max(height, width) // _SMALL_SIDE))
        for strip in strips(Box.whole((height, width)), _STRIP, block):
            box = Box((*middle, *strip.start), (*(m + 1 for m in middle), *strip.stop))
            pixels = self.store.read(name, box)[:3]
            absent = missing_in(self.store, name, box, pixels)
            there = None if absent is None else absent.reshape(strip.size)
            image.add(pixels.reshape(-1, *strip.size), there, block)
        true, found = (
            f"{row[key]:.4g}" if isinstance(row[key], float) else row[key]
            for key in ("label", "predicted")
        )
        title = f"{name}: true {true}, predicted {found}"
        return Panel(title, data_uri(rgb(*image.pixels())), f"Image {title}")

    def _picture(self, row: Mapping, word: str) -> Pictures | str:
        """Return the picture of an image and its prediction, or a note if there is no prediction.

        Args:
            row: the row of the image in the table of images.
            word: the word for the group of the image in the caption, such as ``worst``.
        """
        name = row["image"]
        for classes, tolerance in ((self._written, 0.0), (self._computed, _ROUNDING)):
            if (found := classes(name)) is not None:
                panels = self._panels(name, _Shrunk(row, self.store, tolerance), found)
                if panels:
                    caption = f"one of the {word}: mean IoU {row['mean_iou']:.3f}, accuracy "
                    return Pictures(name, caption + f"{row['accuracy']:.3f}", panels)
        return (
            f"{name} has no picture, because {self.folder} has no prediction of it by this "
            "network: run distseg predict, then distseg report with --predictions FOLDER"
        )

    def _written(self, name: str) -> Reader | None:
        """Return a function that reads boxes of an image's class map from a file of predictions.

        Return None if there is no such file.
        """
        path = self.folder / f"{name}.h5"
        if not path.is_file():
            return None

        def read(box: Box) -> np.ndarray:
            with hdf5.opened(str(path), "class map", "'distseg predict' writes them") as f:
                return hdf5.dataset(f, "classes").open()[box.slices]

        with hdf5.opened(str(path), "class map", "'distseg predict' writes them") as f:
            there = "classes" in f and hdf5.dataset(f, "classes").open().shape
        return read if there == tuple(self.store.size(name)) else None

    def _computed(self, name: str) -> Reader | None:
        """Compute the class map of an image, and return a function that reads boxes of it.

        Return None if the image is too large.
        """
        size = self.store.size(name)
        if math.prod(size) > _COMPUTED:
            return None
        found = np.zeros(size, np.uint8)
        for box, logits in self.predictor()(store_image(self.store, name)):
            found[box.slices] = most_likely(logits)
        return lambda box: found[box.slices]

    def _panels(self, name: str, shrunk: _Shrunk, classes: Reader) -> list[Panel]:
        """Return the panels of an image: image, truth, prediction and errors.

        The list is empty if the prediction does not give the scores of the evaluation.

        Args:
            name: the image.
            shrunk: the object that shrinks the image.
            classes: a function that reads the predicted classes of a box.
        """
        size, store = self.store.size(name), self.store
        if len(size) > 2:
            return self._panels_of_volume(name, shrunk, classes)
        shrunk.block = max(1, -(-max(size) // _SIDE))
        height = max(1, _STRIP // (shrunk.block * size[1])) * shrunk.block
        for top in range(0, size[0], height):
            box = Box((top, 0), (min(top + height, size[0]), size[1]))
            truth, found, pixels = store.labels(name, box), classes(box), store.read(name, box)[:3]
            shrunk.count(truth, found)
            shrunk.add(pixels, missing_in(store, name, box, pixels), truth, found)
        return self._drawn(name, shrunk) if shrunk.same_scores else []

    def _panels_of_volume(self, name: str, shrunk: _Shrunk, classes: Reader) -> list[Panel]:
        """Return the panels of three cuts through a volume.

        The list is empty if the prediction has other scores than the evaluation, or if the volume
        is too large to be read into memory as a whole.

        Args:
            name: the volume.
            shrunk: the object that counts and shrinks the labels.
            classes: a function that reads the predicted classes of a box.
        """
        store, whole = self.store, Box.whole(self.store.size(name))
        if whole.pixels > _COMPUTED:
            return []
        truth, found = store.labels(name, whole), classes(whole)
        shrunk.count(truth, found)
        if not shrunk.same_scores:
            return []
        at = middle_of_interest(truth)
        cut = [three_cuts(labels, at, store.ignore) for labels in (truth, found)]
        pixels = store.read(name, whole)[:3]
        absent = missing_in(store, name, whole, pixels)
        absent = np.zeros(whole.size, bool) if absent is None else absent
        pixels = three_cuts(pixels, at, 0)
        shrunk.block = max(1, -(-max(pixels.shape[1:]) // _SIDE))
        shrunk.add(pixels, three_cuts(absent, at, True), *cut)
        return self._drawn(name, shrunk)

    def _drawn(self, name: str, shrunk: _Shrunk) -> list[Panel]:
        """Return four panels of a shrunk image: image, truth, prediction and errors."""
        picture = rgb(*shrunk.image.pixels())
        table = np.vstack([self.colours, class_colors([""], [UNLABELLED])])
        truth, found, wrong = (
            np.concatenate(parts).astype(np.uint8)
            for parts in (shrunk.truth, shrunk.found, shrunk.wrong)
        )
        greys = np.linspace(150, 250, _GREYS).astype(np.uint8)[:, None].repeat(3, 1)
        level = (picture.mean(-1) * _GREYS / 256).astype(np.uint8)
        errors = np.where(wrong == 1, _GREYS, level).astype(np.uint8)
        with_error = np.vstack([greys, class_colors([""], [ERROR])])
        shown = [("image", data_uri(picture), "Image")]
        shown += [("truth", data_uri(truth, table), "True classes")]
        shown += [("prediction", data_uri(found, table), "Predicted classes")]
        shown += [("errors", data_uri(errors, with_error), "Wrong pixels in magenta")]
        return [Panel(title, source, f"{words} of {name}") for title, source, words in shown]


def missing_in(store: Store, name: str, box: Box, pixels: np.ndarray) -> np.ndarray | None:
    """Return a mask of the pixels without data in at least one band, or None if there are none.

    Args:
        store: the store of the image.
        name: the name of the image.
        box: the box of the pixels.
        pixels: some bands of the box, (bands, *box.size).

    Returns:
        (*box.size) bool.
    """
    found = missing(pixels, store.nodata(name), store.valid(name, box))
    return None if found is None else found.any(0)


class _ShrunkPixels:
    """Image that is read in strips of rows and shrunk: each block of pixels becomes its mean."""

    def __init__(self) -> None:
        self._sums: list[np.ndarray] = []
        self._known: list[np.ndarray] = []
        self._dtype = np.dtype(np.uint8)

    def add(self, pixels: np.ndarray, absent: np.ndarray | None, block: int) -> None:
        """Add the next strip of rows; its height is a multiple of ``block``, except at the end.

        Args:
            pixels: (bands, H, W).
            absent: True for pixels without data, (H, W); None if there are none.
            block: the side of a block in pixels.
        """
        there = np.ones(pixels.shape[1:], bool) if absent is None else ~absent
        self._dtype = pixels.dtype
        self._known.append(block_sums(there, block))
        bands = [np.where(there, band, 0).astype(np.float64) for band in pixels]
        self._sums.append(np.stack([block_sums(band, block, np.float64) for band in bands]))

    def pixels(self) -> tuple[np.ndarray, None, np.ndarray | None]:
        """Return (means, None, mask), the arguments of :func:`distseg.data.picture.rgb`.

        ``means`` is the mean of each block, (bands, h, w). ``mask`` is True for blocks with data,
        (h, w); it is None if no block lacks data. The None in the middle means that no number marks
        pixels without data.
        """
        sums, known = np.concatenate(self._sums, 1), np.concatenate(self._known)
        means = sums / np.maximum(known, 1)
        if self._dtype == np.uint8:
            means = means.round().astype(np.uint8)
        return means, None, None if known.all() else known > 0


class _Shrunk:
    """Image, labels and errors, read in strips of rows; each block of pixels becomes one pixel.

    Args:
        row: the row of the image in the table of images.
        store: the store of the image.
        tolerance: largest allowed difference between the accuracy of the predicted classes and the
            accuracy in ``row``.

    Attributes:
        block: the side of a block in pixels.
        image: the shrunk image.
    """

    def __init__(self, row: Mapping, store: Store, tolerance: float):
        self.row, self.classes, self.ignore = row, store.classes, store.ignore
        self.tolerance, self.block = tolerance, 1
        counts = [row["classes"][name]["pixels"] for name in self.classes]
        self._counts = np.array([*counts, max(1, sum(counts) // 10)])
        errors = round(row["pixels"] * (1 - (row["accuracy"] or 0)))
        self._errors = np.array([row["pixels"] - errors, errors])
        self._matrix = np.zeros((len(counts), len(counts)), np.int64)
        self.image = _ShrunkPixels()
        self.truth: list[np.ndarray] = []
        self.found: list[np.ndarray] = []
        self.wrong: list[np.ndarray] = []

    def count(self, truth: np.ndarray, found: np.ndarray) -> None:
        """Count the pixels of each pair of a true and a predicted class.

        :attr:`same_scores` computes the scores from these counts.

        Args:
            truth: the labels, (*size).
            found: the predicted classes, (*size).
        """
        number = len(self.classes)
        known = np.where(found < number, found, 0)  # pixels without data have no class
        self._matrix += confusion(truth, known, number, self.ignore)

    @property
    def same_scores(self) -> bool:
        """True if the counted pixels give the scores in the image's row of the table.

        If ``tolerance`` is above 0, the accuracy may differ by it, but the number of pixels of each
        true class must be equal.
        """
        found, row = scores(self._matrix, self.classes), self.row
        if not self.tolerance:
            # The row may also have scores of boundaries, which the matrix does not give.
            pairs = [(found, row)]
            pairs += [(found["classes"][name], row["classes"][name]) for name in self.classes]
            return all(
                a[key] == b[key] for a, b in pairs for key in a if not isinstance(a[key], dict)
            )
        pixels = [
            [table[name]["pixels"] for name in self.classes]
            for table in (found["classes"], row["classes"])
        ]
        near = abs((found["accuracy"] or 0) - (row["accuracy"] or 0)) <= self.tolerance
        return pixels[0] == pixels[1] and near

    def add(
        self, pixels: np.ndarray, absent: np.ndarray | None, truth: np.ndarray, found: np.ndarray
    ) -> None:
        """Add the next strip of rows; its height is a multiple of the block, except at the end.

        Args:
            pixels: (bands, H, W).
            absent: True for pixels without data, (H, W); None if there are none.
            truth: the labels, (H, W).
            found: the predicted classes, (H, W).
        """
        self.image.add(pixels, absent, self.block)
        number = len(self.classes)
        for labels, parts in ((truth, self.truth), (found, self.found)):
            with_ignored = np.where(labels == self.ignore, number, labels)
            parts.append(shrink_labels(with_ignored, self._counts, self.block))
        wrong = (truth != self.ignore) & (truth != found)
        self.wrong.append(shrink_labels(wrong, self._errors, self.block))
