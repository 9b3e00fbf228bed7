"""Rings around sets of pixels: link the edges between pixels into closed rings of corners.

Columns run to the right and rows run down. A corner (x, y) is the upper left corner of the pixel in
column x and row y. An edge runs along the sides of pixels, with its object on its right-hand side:
it runs right along upper sides, down along right sides, left along lower sides and up along left
sides. So the outer ring of an object runs clockwise on the screen, and the rings of its holes
run the other way.

Where four pixels meet and only two that face each other diagonally belong to an object, two of its
edges arrive and two leave::

    # .       down the right side of the upper #, then right along the upper side of the lower #:
    . #       the ring follows the pixel outside the object.

Following the outside keeps every ring simple: an outer ring and a hole, or two holes, may touch in
a corner, but no ring touches itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RIGHT, DOWN, LEFT, UP = range(4)
_OUTSIDE = -1  # id outside the map
# Order of the edges that arrive at (or leave) a corner where pixels of an object meet diagonally.
_ARRIVES = np.array([0, 0, 1, 1])  # right before left; down before up
_LEAVES = np.array([0, 1, 1, 0])  # up before down; right before left


@dataclass
class Edges:
    """Edges between pixels, in parallel arrays.

    Attributes:
        start: (edges,) corner where an edge begins, y * (width + 1) + x.
        stop: (edges,) corner where the edge ends.
        way: (edges,) direction of the edge: RIGHT, DOWN, LEFT or UP.
        ids: (edges,) the object on the right-hand side of the edge.
    """

    start: np.ndarray
    stop: np.ndarray
    way: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, chosen: np.ndarray) -> Edges:
        """Return the chosen edges; ``chosen`` is a mask or an array of indices."""
        return Edges(self.start[chosen], self.stop[chosen], self.way[chosen], self.ids[chosen])

    @classmethod
    def concatenated(cls, parts: list[Edges]) -> Edges:
        """Return the edges of all ``parts``, in their order."""
        if not parts:
            none = np.zeros(0, np.int64)
            return cls(none, none, none.astype(np.int8), none)
        names = ("start", "stop", "way", "ids")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def horizontal(above: np.ndarray, below: np.ndarray, top: int) -> Edges:
    """Return the edges between each row of pixels and the row under it, where the ids differ.

    Args:
        above: ids (rows, width) of the upper pixels; negative outside all objects.
        below: ids (rows, width) of the pixels under these.
        top: row of the map in which the first row of ``below`` lies.
    """
    rows, width = above.shape
    # One edge goes along a sequence of columns in which neither id changes.
    begins = np.ones((rows, width), bool)
    begins[:, 1:] = (above[:, 1:] != above[:, :-1]) | (below[:, 1:] != below[:, :-1])
    first = np.flatnonzero(begins)
    length = np.diff(first, append=above.size)
    upper, lower = above.ravel()[first], below.ravel()[first]
    differ = upper != lower
    first, length, upper, lower = first[differ], length[differ], upper[differ], lower[differ]
    row, column = np.divmod(first, width)
    left = (row + top) * (width + 1) + column
    right = left + length
    return _both(left, right, lower, RIGHT, upper, LEFT)


def vertical(ids: np.ndarray, top: int) -> Edges:
    """Return the edges between columns of pixels, where the ids on both sides differ.

    The left and right border of the map are included; outside the map there is no object.

    Args:
        ids: ids (rows, width) of the pixels; negative outside all objects.
        top: row of the map in which the first row of ``ids`` lies.
    """
    rows, width = ids.shape
    padded = np.full((width + 2, rows), _OUTSIDE, ids.dtype)
    padded[1:-1] = ids.T
    west, east = padded[:-1], padded[1:]
    begins = np.ones((width + 1, rows), bool)
    begins[:, 1:] = (west[:, 1:] != west[:, :-1]) | (east[:, 1:] != east[:, :-1])
    first = np.flatnonzero(begins)
    length = np.diff(first, append=west.size)
    left, right = west.ravel()[first], east.ravel()[first]
    differ = left != right
    first, length, left, right = first[differ], length[differ], left[differ], right[differ]
    column, row = np.divmod(first, rows)
    upper = (row + top) * (width + 1) + column
    lower = upper + length * (width + 1)
    return _both(upper, lower, left, DOWN, right, UP)


def _both(low, high, along: np.ndarray, way: int, against: np.ndarray, back: int) -> Edges:
    """Return the edges of the objects on the two sides of some borders.

    A border is a straight line between pixels, with one id along each side. An edge keeps its
    object on the right-hand side. So a border between two objects gives two edges in opposite
    directions, and a border beside one object gives one edge.

    Args:
        low, high: (borders,) the corners at the two ends of each border, y * (width + 1) + x.
        along: (borders,) the object whose edge runs from ``low`` to ``high``; negative if there is
            no object on this side.
        way: direction from ``low`` to ``high``: RIGHT or DOWN.
        against: (borders,) the object whose edge runs from ``high`` to ``low``; negative if there
            is no object on this side.
        back: direction from ``high`` to ``low``: LEFT or UP.
    """
    forth, and_back = along >= 0, against >= 0
    return Edges(
        np.concatenate([low[forth], high[and_back]]),
        np.concatenate([high[forth], low[and_back]]),
        np.concatenate(
            [np.full(forth.sum(), way, np.int8), np.full(and_back.sum(), back, np.int8)]
        ),
        np.concatenate([along[forth], against[and_back]]),
    )


@dataclass
class Rings:
    """Closed rings of corners, sorted by object; the first ring of an object is the outer one.

    Attributes:
        x: (corners,) column of each corner, ring after ring; the first corner is not repeated.
        y: (corners,) row of each corner.
        begins: (rings + 1,) index of the first corner of each ring; the last entry is the number of
            all corners.
        ids: (rings,) the object of each ring.
    """

    x: np.ndarray
    y: np.ndarray
    begins: np.ndarray
    ids: np.ndarray


def linked(edges: Edges, width: int) -> Rings:
    """Link all edges of some objects into rings. Only corners where a ring turns are kept.

    A ring begins with its uppermost corner; of several uppermost corners, with the leftmost one.

    Args:
        edges: all edges of the objects.
        width: number of columns of the map.
    """
    leaving = np.lexsort((edges.start * 2 + _LEAVES[edges.way], edges.ids))
    edges = edges.take(leaving)
    arriving = np.lexsort((edges.stop * 2 + _ARRIVES[edges.way], edges.ids))
    # The i-th edge that arrives at a corner goes on as the i-th edge that leaves it.
    after = np.empty(len(edges), np.int64)
    after[arriving] = np.arange(len(edges))
    first = _smallest_on_cycle(after)
    order = np.lexsort((-_steps_to_end(after, first), first))
    edges, first = edges.take(order), first[order]
    begins = np.flatnonzero(np.diff(first, prepend=-1))
    lengths = np.diff(begins, append=len(first))
    before = np.arange(len(first)) - 1
    before[begins] += lengths
    turns = edges.way != edges.way[before]
    y, x = np.divmod(edges.start[turns], width + 1)
    counts = np.add.reduceat(turns, begins, dtype=np.int64) if len(begins) else begins
    return Rings(x, y, np.concatenate([[0], np.cumsum(counts)]), edges.ids[begins])


def _smallest_on_cycle(after: np.ndarray) -> np.ndarray:
    """Return, for each element of a permutation, the smallest element of its cycle, (elements,).

    Args:
        after: (elements,) the element that follows each element in its cycle.
    """
    smallest, ahead = np.minimum(np.arange(len(after)), after), after
    while True:
        ahead = ahead[ahead]
        found = np.minimum(smallest, smallest[ahead])
        if np.array_equal(found, smallest) and np.array_equal(found, found[after]):
            return found
        smallest = found


def _steps_to_end(after: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return, for each element of a permutation, the steps to the last element of its cycle.

    The last element is the one that the first element follows. It has 0 steps.

    Args:
        after: (elements,) the element that follows each element in its cycle.
        first: (elements,) the element with which each element's cycle begins.
    """
    last = after == first
    ahead = np.where(last, np.arange(len(after)), after)
    steps = (~last).astype(np.int64)
    while True:
        further = steps[ahead]
        if not further.any():
            return steps
        steps, ahead = steps + further, ahead[ahead]
