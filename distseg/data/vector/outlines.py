"""Collect the outlines of objects of a label map in a scratch file, while the map is read.

An outline consists of chains of edges until it is closed to rings. The corners of chains and rings
are in the scratch file, in pieces that point to each other. Memory holds only where each open chain
starts and stops, on the lower border of the rows that were read. So memory does not grow with the
length of the outlines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from distseg.data.vector.rings import Edges, before, chained
from distseg.data.vector.scratch import ScratchNumbers

_END = -1  # position after the last piece of a chain, or after the last ring of an object
_FEW = 64  # corners of a piece that are read together with its head
_MANY = 1 << 14  # corners of a ring that are returned at a time


@dataclass
class _Chains:
    """Chains of edges: parts of the outlines of objects, in parallel arrays.

    The corners of a chain are in a scratch file, in pieces.

    Attributes:
        start: (chains,) corner where the first edge begins, y * (width + 1) + x.
        stop: (chains,) corner where the last edge ends.
        first_way: (chains,) direction of the first edge.
        last_way: (chains,) direction of the last edge.
        ids: (chains,) the object of each chain.
        head: (chains,) position of the chain's first piece in the scratch file; _END if the chain
            does not turn.
        tail: (chains,) position of the chain's last piece.
        corners: (chains,) number of corners in the pieces, without start and stop.
    """

    start: np.ndarray
    stop: np.ndarray
    first_way: np.ndarray
    last_way: np.ndarray
    ids: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    corners: np.ndarray

    @classmethod
    def of(cls, edges: Edges) -> _Chains:
        """Return chains of one edge each, one for each of ``edges``."""
        none = np.full(len(edges), _END, np.int64)
        no_corners = np.zeros(len(edges), np.int64)
        return cls(edges.start, edges.stop, edges.way, edges.way, edges.ids, none, none, no_corners)

    def and_also(self, other: _Chains) -> _Chains:
        """Return the chains of ``self``, followed by the chains of ``other``."""
        return _Chains(
            *(
                np.concatenate([getattr(part, f.name) for part in (self, other)])
                for f in fields(self)
            )
        )

    def take(self, chosen: np.ndarray) -> _Chains:
        """Return the chosen chains; ``chosen`` is a mask or an array of indices."""
        return _Chains(*(getattr(self, field.name)[chosen] for field in fields(self)))


class StoredRings:
    """Closed rings of one object in a scratch file, the outer ring first.

    Iterating yields, for each ring, its number of different corners, and its corners as an iterable
    (:class:`StoredCorners`). Rings and corners have the order that
    :func:`distseg.data.vector.rings.linked` gives them.

    Args:
        file: the scratch file.
        last: position in the file of the outer ring, which was closed last.
        width: number of columns of the map.
        rings: number of rings.
        corners: number of corners of all rings.
    """

    def __init__(self, file: ScratchNumbers, last: int, width: int, rings: int, corners: int):
        self._file, self._last, self._width = file, last, width
        self.rings, self.corners = rings, corners

    def __iter__(self) -> Iterator[tuple[int, StoredCorners]]:
        at = self._last
        while at != _END:
            at, head, corners = self._file.read(at, 3).tolist()
            yield corners, StoredCorners(self._file, head, self._width)


class StoredCorners:
    """Corners of a closed ring in a scratch file.

    Iterating yields the columns x and the rows y of some corners at a time, each (corners,) int64.
    The first corner of the ring is repeated at the end.

    Args:
        file: the scratch file.
        head: position in the file of the ring's first piece.
        width: number of columns of the map.
    """

    def __init__(self, file: ScratchNumbers, head: int, width: int):
        self._file, self._head, self._width = file, head, width

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        at, waiting, count = self._head, [], 0
        first = self._file.read(at + 2, 1)
        while at != _END:
            found = self._file.read(at, 2 + _FEW)
            corners = int(found[1])
            waiting.append(found[2 : 2 + corners])
            if corners > _FEW:
                waiting.append(self._file.read(at + 2 + _FEW, corners - _FEW))
            at, count = int(found[0]), count + corners
            if at == _END:
                waiting.append(first)
            if at == _END or count >= _MANY:
                y, x = np.divmod(np.concatenate(waiting), self._width + 1)
                yield x, y
                waiting, count = [], 0


class Outlines:
    """Outlines of the objects of a label map that are not complete, because more rows follow.

    The corners of the outlines are in a scratch file, which holds two kinds of records. A record of
    a piece has the position of the next piece of its chain, the number of its corners, and the
    corners. A record of a ring has the position of the object's ring that was closed before it, the
    position of its first piece, and the number of its corners.

    Args:
        width: number of columns of the map.
        left: True if edges have their objects on the left-hand side.
        folder: the folder of the scratch file; None for the system's folder for temporary files.
    """

    def __init__(self, width: int, left: bool = False, folder: Path | None = None):
        self._width, self._left = width, left
        self._file = ScratchNumbers(folder)
        self._open = _Chains.of(Edges.concatenated([]))
        # The objects, sorted, with the position of the last ring, the number of rings and corners.
        self._ids, self._last = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._rings, self._corners = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def add(self, edges: Edges, rows: int) -> None:
        """Add edges to the outlines of their objects; begin an outline for each new object.

        Args:
            edges: edges of these objects. Together with earlier calls, these must be all edges
                in the first ``rows`` rows.
            rows: number of rows of the map that were read.
        """
        chains = self._open.and_also(_Chains.of(edges))
        line = rows * (self._width + 1)
        order, begins = chained(
            (chains.start, chains.first_way),
            (chains.stop, chains.last_way),
            chains.ids,
            self._left,
            line,
        )
        longer = self._stored(chains.take(order), begins, line)
        closed = longer.start < line
        self._open = longer.take(~closed)
        self._add_rings(longer.take(closed))

    def rings_of(self, number: int) -> StoredRings:
        """Return the rings of a complete object: one that has no pixel in the last row read."""
        at = np.searchsorted(self._ids, number)
        return StoredRings(
            self._file,
            int(self._last[at]),
            self._width,
            int(self._rings[at]),
            int(self._corners[at]),
        )

    def keep(self, numbers: np.ndarray) -> None:
        """Drop the rings of all objects except those with these ``numbers``."""
        kept = np.isin(self._ids, numbers)
        self._ids, self._last = self._ids[kept], self._last[kept]
        self._rings, self._corners = self._rings[kept], self._corners[kept]

    def _stored(self, chains: _Chains, begins: np.ndarray, line: int) -> _Chains:
        """Join chains to longer chains, and return the longer chains.

        The corners that then lie inside a longer chain are written to the file.

        Args:
            chains: the chains, in the order in which they follow each other.
            begins: (longer chains,) index of the first chain of each longer chain.
            line: number of the first corner on the lower border of the rows that were read.
        """
        file, count = self._file, len(begins)
        base = file.count
        turns = chains.last_way[before(begins, len(chains.start))] != chains.first_way
        turns[begins[chains.start[begins] >= line]] = False  # nothing comes before an open chain
        owner = np.zeros(len(turns), np.int64)  # longer chain of each chain
        owner[begins] = 1
        owner = np.cumsum(owner) - 1
        old = chains.head != _END
        # Corners without a piece between them become a new piece.
        at = np.flatnonzero(turns)
        group = (np.cumsum(old) - old + owner)[at]
        firsts = np.flatnonzero(np.diff(group, prepend=-1))
        heads = firsts + 2 * np.arange(len(firsts))
        lengths = np.diff(firsts, append=len(at))
        records = np.full(len(at) + 2 * len(firsts), _END, np.int64)
        records[heads + 1] = lengths
        records[np.arange(len(at)) + 2 * np.repeat(np.arange(1, len(firsts) + 1), lengths)] = (
            chains.start[at]
        )
        # All pieces in order: the corner where a chain starts comes before the chain's own pieces.
        places = np.concatenate([2 * at[firsts], 2 * np.flatnonzero(old) + 1])
        by_place = np.argsort(places)
        first = np.concatenate([base + heads, chains.head[old]])[by_place]
        last = np.concatenate([base + heads, chains.tail[old]])[by_place]
        owners = owner[places[by_place] // 2]
        same = owners[1:] == owners[:-1]
        ends, goes_on = last[:-1][same], first[1:][same]
        new = ends >= base
        records[ends[new] - base] = goes_on[new]
        file.append(records)
        file.change(ends[~new], goes_on[~new])
        head, tail = np.full((2, count), _END, np.int64)
        tail[owners] = last  # the last one of each longer chain stays
        head[owners[::-1]] = first[::-1]
        stops = np.append(begins[1:], len(turns)) - 1 if count else begins
        return _Chains(
            chains.start[begins],
            chains.stop[stops],
            chains.first_way[begins],
            chains.last_way[stops],
            chains.ids[begins],
            head,
            tail,
            np.add.reduceat(turns + chains.corners, begins) if count else begins,
        )

    def _add_rings(self, rings: _Chains) -> None:
        """Write closed rings to the scratch file.

        Args:
            rings: the rings, as chains sorted by object. The rings of one object are sorted by
                their last corner in reading order, in descending order.
        """
        ids = np.union1d(self._ids, np.concatenate([rings.ids, self._open.ids]))
        known = np.searchsorted(ids, self._ids)
        table = np.zeros((3, len(ids)), np.int64)
        table[0] = _END
        table[:, known] = self._last, self._rings, self._corners
        rings = rings.take(np.arange(len(rings.ids))[::-1])
        of = np.searchsorted(ids, rings.ids)
        at = self._file.count + 3 * np.arange(len(of))
        first = np.diff(of, prepend=-1) != 0  # True for an object's first ring among these
        previous = np.where(first, table[0][of], at - 3)
        self._file.append(np.stack([previous, rings.head, rings.corners], 1).ravel())
        table[0][of] = at  # the last one of each object stays
        np.add.at(table[1], of, 1)
        np.add.at(table[2], of, rings.corners)
        self._ids, (self._last, self._rings, self._corners) = ids, table
