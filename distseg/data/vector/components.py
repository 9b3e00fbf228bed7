"""Connected components of a label map that is read in strips of rows.

An object is a set of pixels of one label that are connected through their sides (4-connected). The
map is read once, from top to bottom, and only one strip is in memory. A run is a sequence of
neighbouring pixels in one row that have the same label. Runs are joined within a strip, and objects
that continue are joined across the border between two strips by union-find. The result does not
depend on the height of the strips.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

NONE = -1  # id of pixels that belong to no object


def joined(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Join the sets of ``a[i]`` and ``b[i]`` for each i; return each set's smallest member.

    Args:
        count: number of elements, each a set of its own at first.
        a: first element of each pair, (pairs,) of integers.
        b: second element of each pair, (pairs,) of integers.

    Returns:
        For each element, the smallest member of its set, (count,).
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
    """Return the root of each element of a union-find forest.

    Args:
        parents: the parent of each element; it has a smaller number. A root is its own parent.
    """
    while True:
        further = parents[parents]
        if np.array_equal(further, parents):
            return parents
        parents = further


class Labeller:
    """Number the objects of a label map, strip by strip.

    An object gets a number, its id, in the first strip that shows it. When two objects turn out to
    be one, the larger id gets the smaller one as its parent.

    Args:
        width: number of columns of the map.
        skipped: labels whose pixels belong to no object.

    Attributes:
        parents: (ids,) the parent of each id, or the id itself if it has not been joined.
        labels: (ids,) the label of each id.
        firsts: (ids,) the position of each id's first pixel, row * width + column.
        row: the labels of the last row that was added; None at first.
        row_ids: the ids of the pixels of that row, each the smallest id of its object.
    """

    def __init__(self, width: int, skipped: tuple[int, ...] = ()):
        self.width, self.skipped = width, np.array(skipped, np.int64)
        self.parents = np.zeros(0, np.int64)
        self.labels = np.zeros(0, np.int64)
        self.firsts = np.zeros(0, np.int64)
        self.row: np.ndarray | None = None
        self.row_ids = np.full(width, NONE, np.int64)
        self._rows = 0

    def add(self, strip: np.ndarray) -> np.ndarray:
        """Add the next strip of labels (rows, width); return the ids (rows, width) of its pixels.

        The strip may join ids of earlier strips, which then get a new parent in ``parents``.
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
        self._rows += len(strip)
        return of_pixels[above:]

    def _ids_of(self, roots: np.ndarray, runs: _Runs, above: int) -> np.ndarray:
        """Return the id of the object of each run, (runs,); NONE for runs outside all objects.

        A run that continues an object of earlier strips gets its id. Other objects get new ids.

        Args:
            roots: (runs,) for each run, the smallest index of a run that is connected with it.
            runs: runs of pixels: first those of the row above the strip, if ``above`` is 1, then
                those of the strip.
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
        first = runs.starts[new] + (self._rows - above) * self.width
        self.parents = np.concatenate([self.parents, ids[new]])
        self.labels = np.concatenate([self.labels, runs.labels[new].astype(np.int64)])
        self.firsts = np.concatenate([self.firsts, first])
        return ids[roots]

    def roots(self) -> np.ndarray:
        """Return, for each id, the smallest id of the same object; store it in ``parents``."""
        self.parents = compressed(self.parents)
        return self.parents

    def joined_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return ``ids`` with each id replaced by the one to which the last strip joined it.

        Args:
            ids: ids that were not joined to a smaller id before the last strip was added. ``NONE``
                stays as it is.
        """
        found = ids.copy()
        inside = ids != NONE
        found[inside] = self.parents[ids[inside]]
        return found

    def forget(self, kept: np.ndarray) -> None:
        """Drop all ids except ``kept``, and give these the new ids 0, 1, ... in the same order.

        Args:
            kept: ids in rising order, none of them joined to a smaller id. All ids in ``row_ids``
                must be among them.
        """
        inside = self.row_ids != NONE
        self.row_ids[inside] = np.searchsorted(kept, self.row_ids[inside])
        self.parents = np.arange(len(kept))
        self.labels, self.firsts = self.labels[kept], self.firsts[kept]


class _Runs:
    """Runs of pixels with equal labels in the rows of a strip (rows, width), in reading order.

    Attributes:
        starts: (runs,) position of the first pixel in the strip, row * width + column.
        lengths: (runs,) number of pixels.
        labels: (runs,) the label.
        in_first_row: number of runs in the first row.
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
        """Return the pairs of runs of one label whose pixels touch, from one row to the next.

        The result is two arrays: the index of the upper run of each pair, and of the lower one.
        """
        begins, width = self._begins, self.width
        number = np.cumsum(begins.ravel()) - 1
        places = np.flatnonzero(begins[:-1] | begins[1:])  # where the upper or the lower run begins
        upper, lower = number[places], number[places + width]
        same = self.labels[upper] == self.labels[lower]
        return upper[same], lower[same]


class Numbers:
    """Numbers of all objects of a map, counted from 1 in the order of their first pixels.

    Args:
        strips: strips of labels (rows, width), from top to bottom.
        width: number of columns of the map.
        skipped: labels whose pixels belong to no object.

    Attributes:
        count: number of objects.
    """

    def __init__(self, strips: Iterable[np.ndarray], width: int, skipped: tuple[int, ...] = ()):
        self._labeller = (width, skipped)
        labeller = Labeller(width, skipped)
        for strip in strips:
            labeller.add(strip)
        roots = labeller.roots()
        own = np.flatnonzero(roots == np.arange(len(roots)))
        self._firsts = labeller.firsts[own]  # rising, as ids and their first pixels do
        self.count = len(own)
        self._of_ids = np.searchsorted(own, roots) + 1

    def of_firsts(self, firsts: np.ndarray) -> np.ndarray:
        """Return the numbers of the objects with these first pixels (row * width + column)."""
        return np.searchsorted(self._firsts, firsts) + 1

    def drawn(self, strips: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the number of each pixel's object in strips (rows, width), 0 outside all objects.

        Args:
            strips: the strips that were given to :class:`Numbers`, again with the same heights.
        """
        labeller = Labeller(*self._labeller)
        table = np.append(self._of_ids, 0).astype(np.uint32)  # the last entry is for NONE, -1
        for strip in strips:
            yield table[labeller.add(strip)]
