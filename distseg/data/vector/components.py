"""Connected components of a label map that is read in strips of rows.

An object is a set of pixels of one label that are connected through their sides (4-connected). The
map is read once, from top to bottom, and only one strip is in memory. A run is a sequence of
neighbouring pixels in one row that have the same label. Runs are joined within a strip, and objects
that continue are joined across the border between two strips by union-find. The result does not
depend on the height of the strips.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distseg.data.vector.scratch import ScratchNumbers

NONE = -1  # id of pixels that belong to no object
_MOST_IDS = 1 << 16  # ids that a labeller holds before it drops those of complete objects


def joined(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return which elements are connected by pairs (union-find).

    The elements are 0 to count - 1. The elements ``a[i]`` and ``b[i]`` are connected for each i.

    Args:
        count: number of elements.
        a: first element of each pair, (pairs,) of integers.
        b: second element of each pair, (pairs,) of integers.

    Returns:
        For each element, the smallest element that is connected with it, (count,).
    """
    roots = np.arange(count)
    while len(a):
        low, high = np.minimum(roots[a], roots[b]), np.maximum(roots[a], roots[b])
        differ = low != high
        a, b, low, high = a[differ], b[differ], low[differ], high[differ]
        np.minimum.at(roots, high, low)
        roots = compressed(roots)
    return roots


def compressed(parents: np.ndarray) -> np.ndarray:
    """Return the root of each element of a union-find forest, (elements,).

    Args:
        parents: (elements,) the parent of each element, which is a smaller element. A root is its
            own parent.
    """
    while True:
        further = parents[parents]
        if np.array_equal(further, parents):
            return parents
        parents = further


class Labeller:
    """Connected components of a label map that is read in strips of rows, from top to bottom.

    An object (connected component) gets an id in the first strip that shows it. A later strip may
    show that two objects are one; then the larger id gets the smaller one as its parent.

    Args:
        width: number of columns of the map.
        skipped: labels whose pixels belong to no object.

    Attributes:
        parents: (ids,) the parent of each id, or the id itself if it has not been joined.
        labels: (ids,) the label of each id's pixels.
        serials: (ids,) how many ids of the whole map were created before each id. Serials rise
            with the ids and in the order of the ids' first pixels.
        created: number of ids created so far, in the whole map.
        row: the labels of the last row that was added; None at first.
        row_ids: (width,) the ids of the pixels of that row, each the smallest id of its object.
    """

    def __init__(self, width: int, skipped: tuple[int, ...] = ()):
        self.width, self.skipped = width, np.array(skipped, np.int64)
        self.parents = np.zeros(0, np.int64)
        self.labels = np.zeros(0, np.int64)
        self.serials = np.zeros(0, np.int64)
        self.created = 0
        self.row: np.ndarray | None = None
        self.row_ids = np.full(width, NONE, np.int64)
        self._most = _MOST_IDS

    def add(self, strip: np.ndarray) -> np.ndarray:
        """Add the next strip of labels (rows, width); return the ids (rows, width) of its pixels.

        If the strip connects objects of earlier strips, their ids get a new parent in ``parents``.
        """
        above = 0 if self.row is None else 1
        labels = strip if self.row is None else np.concatenate([self.row[None], strip])
        runs = _Runs(labels)
        a, b = runs.touching()
        if above:
            # Runs of the row above that belong to one object are joined from the start.
            known = self.row_ids[runs.starts[: runs.in_first_row]]
            order = np.argsort(known, kind="stable")
            same = np.flatnonzero((np.diff(known[order]) == 0) & (known[order][1:] != NONE))
            a = np.concatenate([a, order[same]])
            b = np.concatenate([b, order[same + 1]])
        roots = joined(len(runs.starts), a, b)
        ids = self._ids_of(roots, runs, above)
        of_pixels = np.repeat(ids, runs.lengths).reshape(labels.shape)
        self.row, self.row_ids = strip[-1].copy(), of_pixels[-1].copy()
        return of_pixels[above:]

    def _ids_of(self, roots: np.ndarray, runs: _Runs, above: int) -> np.ndarray:
        """Return the object id of each run of pixels, (runs,); NONE for runs outside all objects.

        A run that continues an object of earlier strips gets its id. Other objects get new ids.

        Args:
            roots: (runs,) for each run, the smallest index of a run that is connected with it.
            runs: runs of pixels: first the runs of the row above the strip, if ``above`` is 1, then
                the runs of the strip.
            above: 1 if there is a row above the strip, else 0.
        """
        ids = np.full(len(roots), NONE, np.int64)
        if above:
            known = self.row_ids[runs.starts[: runs.in_first_row]]
            held = known != NONE
            sets, known = roots[: runs.in_first_row][held], known[held]
            smallest = np.full(len(roots), np.iinfo(np.int64).max)
            np.minimum.at(smallest, sets, known)
            self.parents[known] = smallest[sets]
            ids[sets] = smallest[sets]
        new = (roots == np.arange(len(roots))) & (ids == NONE)
        if len(self.skipped):
            new &= ~np.isin(runs.labels, self.skipped)
        new = np.flatnonzero(new)
        ids[new] = len(self.parents) + np.arange(len(new))
        serials = self.created + np.arange(len(new))
        self.created += len(new)
        self.parents = np.concatenate([self.parents, ids[new]])
        self.labels = np.concatenate([self.labels, runs.labels[new].astype(np.int64)])
        self.serials = np.concatenate([self.serials, serials])
        return ids[roots]

    def roots(self) -> np.ndarray:
        """Return, for each id, the smallest id of the same object, (ids,).

        The result also replaces ``parents``.
        """
        self.parents = compressed(self.parents)
        return self.parents

    @property
    def full(self) -> bool:
        """True if so many ids are held that :meth:`forget` should be called."""
        return len(self.parents) > self._most

    def forget(self) -> np.ndarray:
        """Drop all ids except those of the objects in the last row; return the kept ids.

        An object in the last row keeps its smallest id. The kept ids become 0, 1, ... in the same
        order.
        """
        roots, inside = self.roots(), self.row_ids != NONE
        kept, self.row_ids[inside] = np.unique(roots[self.row_ids[inside]], return_inverse=True)
        self.parents = np.arange(len(kept))
        self.labels, self.serials = self.labels[kept], self.serials[kept]
        self._most = max(_MOST_IDS, 2 * len(kept))
        return kept


class _Runs:
    """Runs of a strip (rows, width) of a label map, row by row and from left to right.

    A run is a sequence of neighbouring pixels in one row that have the same label.

    Attributes:
        starts: (runs,) position of each run's first pixel in the strip, row * width + column.
        lengths: (runs,) number of pixels of each run.
        labels: (runs,) the label of each run.
        in_first_row: number of runs in the first row of the strip.
    """

    def __init__(self, strip: np.ndarray):
        rows, self.width = strip.shape
        begins = np.ones(strip.shape, bool)
        np.not_equal(strip[:, 1:], strip[:, :-1], out=begins[:, 1:])
        self.starts = np.flatnonzero(begins)
        self.lengths = np.diff(self.starts, append=strip.size)
        self.labels = strip.ravel()[self.starts]
        self.in_first_row = int(np.searchsorted(self.starts, self.width))
        self._begins = begins

    def touching(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of runs with one label that touch each other in adjacent rows.

        The result is two arrays (pairs,): the index of the upper run of each pair, and of the
        lower run.
        """
        begins, width = self._begins, self.width
        number = np.cumsum(begins.ravel()) - 1
        places = np.flatnonzero(begins[:-1] | begins[1:])  # where the upper or the lower run begins
        upper, lower = number[places], number[places + width]
        same = self.labels[upper] == self.labels[lower]
        return upper[same], lower[same]


@dataclass(frozen=True)
class NumberedStrip:
    """Strip of rows of a label map, with the final number of the object at each pixel.

    Attributes:
        ids: the id of each pixel, (rows, width); NONE outside all objects. An id is an index into
            the other arrays; several ids may stand for one object.
        numbers: (ids,) the final number of the object that each id stands for.
        labels: (ids,) the label of each id's pixels.
    """

    ids: np.ndarray
    numbers: np.ndarray
    labels: np.ndarray

    def drawn(self, outside: int) -> np.ndarray:
        """Return the object number at each pixel, (rows, width); ``outside`` where no object is."""
        return np.append(self.numbers, outside)[self.ids]  # NONE is the index of the last entry


class Numbers:
    """Numbering of the objects of a label map: 1, 2 and so on, in the order of their first pixels.

    An object is a set of connected pixels of one label. A later strip may show that two objects
    are one. So the map is read twice. The first time, a scratch file collects which provisional
    ids belong together. The second time (:meth:`numbered`), each pixel immediately gets the number
    of its object. Memory holds the ids of one strip and of the objects in its last row.

    Args:
        strips: strips of labels (rows, width), from top to bottom.
        width: number of columns of the map.
        skipped: labels whose pixels belong to no object.
        folder: the folder of the scratch file; None for the system's folder for temporary files.

    Attributes:
        count: number of objects.
    """

    def __init__(
        self,
        strips: Iterable[np.ndarray],
        width: int,
        skipped: tuple[int, ...] = (),
        folder: Path | None = None,
    ):
        self.count = 0
        self._labeller = (width, skipped)
        # At the position of an id's serial: the serial of a smaller id of the same object, or its
        # own serial if the id is the smallest one of its object.
        self._parents = ScratchNumbers(folder)
        labeller = Labeller(width, skipped)
        for strip in strips:
            labeller.add(strip)
            if labeller.full:
                self._collect(labeller)
        self._collect(labeller)

    def _collect(self, labeller: Labeller) -> None:
        """Write to the scratch file which ids are the same object; drop complete objects."""
        parents = labeller.serials[labeller.roots()]
        joined = parents != labeller.serials
        old = int(np.searchsorted(labeller.serials, self._parents.count))  # collected before
        self._parents.append(parents[old:])
        later = np.flatnonzero(joined[:old])
        self._parents.change(labeller.serials[later], parents[later])
        self.count += int((~joined[old:]).sum()) - len(later)
        labeller.forget()

    def numbered(self, strips: Iterable[np.ndarray]) -> Iterator[NumberedStrip]:
        """Yield each strip of the map with the final numbers of its objects.

        Args:
            strips: the strips that were given to :class:`Numbers`, again with the same heights.
        """
        labeller, numbers, count = Labeller(*self._labeller), np.zeros(0, np.int64), 0
        for strip in strips:
            known, before = len(numbers), labeller.created
            ids = labeller.add(strip)
            parents = self._parents.read(before, labeller.created - before)
            own = parents == labeller.serials[known:]
            # An id's parent is a smaller id of this strip, or of an object that reaches this strip.
            at = np.concatenate([np.arange(known), np.searchsorted(labeller.serials, parents)])
            numbers = np.concatenate([numbers, count + np.cumsum(own)])[compressed(at)]
            count += int(own.sum())
            yield NumberedStrip(ids, numbers, labeller.labels)
            if labeller.full:
                numbers = numbers[labeller.forget()]

    def drawn(self, strips: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield arrays (rows, width) of the object number at each pixel; 0 outside all objects.

        Each array belongs to one strip.

        Args:
            strips: the strips that were given to :class:`Numbers`, again with the same heights.
        """
        for strip in self.numbered(strips):
            yield strip.drawn(0).astype(np.uint32)
