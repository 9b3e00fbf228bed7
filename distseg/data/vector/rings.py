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

All edges may also be turned around, so that the object is on their left-hand side and outer rings
run counter-clockwise on the screen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RIGHT, DOWN, LEFT, UP = range(4)
_OUTSIDE = -1  # id of cells outside the map
# Order of the edges that arrive at (or leave) a corner where pixels of an object meet diagonally.
_ARRIVES = np.array([0, 0, 1, 1])  # right before left; down before up
_LEAVES = np.array([0, 1, 1, 0])  # up before down; right before left
_BACK = np.array([LEFT, UP, RIGHT, DOWN], np.int8)  # the opposite of each direction


@dataclass
class Edges:
    """Edges of objects: straight lines along sides of pixels, in parallel arrays.

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

    def turned(self) -> Edges:
        """Return the edges in the opposite direction, with their objects on the left-hand side."""
        return Edges(self.stop, self.start, _BACK[self.way], self.ids)


def horizontal(above: np.ndarray, below: np.ndarray, top: int) -> Edges:
    """Return the edges between each row of pixels and the row under it, where object ids differ.

    Args:
        above: object ids (rows, width) of the upper pixels; negative outside all objects.
        below: object ids (rows, width) of the pixels under these.
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
    """Return the edges between columns of pixels, where the object ids on both sides differ.

    The left and right border of the map are included; outside the map there is no object.

    Args:
        ids: object ids (rows, width) of the pixels; negative outside all objects.
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
    """Closed rings of corners around objects, sorted by object.

    The first ring of an object is its outer border, the others are the borders of its holes.

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


def linked(edges: Edges, width: int, left: bool = False) -> Rings:
    """Link edges into closed rings around objects. Only corners where a ring turns are kept.

    A ring begins with its last corner in reading order. The rings of an object are sorted by this
    corner, the last one first, so the outer ring is the first one.

    Args:
        edges: all edges of the objects, in any order.
        width: number of columns of the map.
        left: True if the edges have their objects on the left-hand side.
    """
    order, begins = chained((edges.start, edges.way), (edges.stop, edges.way), edges.ids, left)
    edges = edges.take(order)
    turns = edges.way != edges.way[before(begins, len(edges))]
    y, x = np.divmod(edges.start[turns], width + 1)
    counts = np.add.reduceat(turns, begins, dtype=np.int64) if len(begins) else begins
    return Rings(x, y, np.concatenate([[0], np.cumsum(counts)]), edges.ids[begins])


def chained(
    starts: tuple[np.ndarray, np.ndarray],
    stops: tuple[np.ndarray, np.ndarray],
    ids: np.ndarray,
    left: bool = False,
    line: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Link chains of edges to rings: return an order in which each chain is followed by the next.

    The next chain starts where the chain stops. A chain is one edge, or several edges that were
    linked before. Linked chains make a longer chain.

    Args:
        starts: (chains,) corner where each chain starts, y * (width + 1) + x, and the direction of
            its first edge.
        stops: (chains,) corner where each chain stops, and the direction of its last edge.
        ids: (chains,) the object of each chain.
        left: True if the chains have their objects on the left-hand side.
        line: index of the first corner on the lower border of the rows of pixels that were read.
            Chains are not linked at this border, because edges below it are not known yet. None if
            all edges are known.

    Returns:
        Two arrays. The first has the order, as indices of the chains, (chains,). The second has the
        positions in this order where a longer chain begins, (longer chains,). A longer chain that
        starts above ``line`` is a closed ring. A ring begins with the corner that has the largest
        index of all its corners. Rings are sorted by object. The rings of one object are sorted by
        the index of their first corner, the largest index first.
    """
    leaves = _LEAVES[starts[1]] ^ int(left)
    leaving = np.lexsort((-(starts[0] * 2 + leaves), ids))
    arriving = np.lexsort((-(stops[0] * 2 + _ARRIVES[stops[1]]), ids))
    number = np.empty(len(ids), np.int64)
    number[leaving] = np.arange(len(ids))
    # The i-th chain that arrives at a corner goes on as the i-th chain that leaves it.
    goes_on, follows = arriving, leaving
    heads = np.zeros(len(ids), bool)
    if line is not None:
        inside, open_ = stops[0][arriving] < line, starts[0][leaving] >= line
        heads = open_
        # Chains that stop at the border go on, for now, as any of those that start there. A cycle
        # that contains such a link is cut below at the chains that start at the border.
        goes_on = np.concatenate([arriving[inside], arriving[~inside]])
        follows = np.concatenate([leaving[~open_], leaving[open_]])
    after = np.empty(len(ids), np.int64)
    after[number[goes_on]] = number[follows]
    # The smallest number of a cycle belongs to a chain that starts at the border, if it has one.
    first = _smallest_on_cycle(after)
    order = np.lexsort((-_steps_to_end(after, first), first))
    first = first[order]
    begins = np.flatnonzero((np.diff(first, prepend=-1) != 0) | heads[order])
    return leaving[order], begins


def before(begins: np.ndarray, count: int) -> np.ndarray:
    """Return for each element of several rings the index of the element before it, (count,).

    The elements of all rings are in one array, ring after ring. The element before a ring's first
    element is its last one.

    Args:
        begins: (rings,) index of the first element of each ring.
        count: number of elements of all rings together.
    """
    found = np.arange(count) - 1
    found[begins] += np.diff(begins, append=count)
    return found


def _smallest_on_cycle(after: np.ndarray) -> np.ndarray:
    """Return for each element of a permutation the smallest element of its cycle, (elements,).

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
    """Return for each element of a permutation how many steps it is to the end of its cycle.

    The end is the element that is followed by the cycle's first element; it has 0 steps. The
    result is (elements,).

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
