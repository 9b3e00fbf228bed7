"""Trace the objects of a label map as polygons, while the map is read from top to bottom.

Memory holds one strip of the map, the edges of some rows, and the points where outlines cross the
last row that was read. The outlines of objects that are not complete are in a scratch file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distseg.data.vector.components import NONE, NumberedStrip
from distseg.data.vector.outlines import Outlines, StoredRings
from distseg.data.vector.rings import Edges, Rings, horizontal, linked, vertical

_FEWEST = 1 << 16  # number of edges to collect before a search for complete objects
_MOST_STRIPS = 256  # strips after which complete objects are searched, however few edges they have


@dataclass
class Sums:
    """Table of objects of a label map: label, number of pixels and area of each object.

    Attributes:
        numbers: (objects,) the number that identifies each object.
        labels: (objects,) the label of each object.
        pixels: (objects,) the number of pixels of each object.
        areas: (objects,) the sum of the areas of each object's pixels, in the unit of ``row_areas``
            of :func:`trace`.
    """

    numbers: np.ndarray
    labels: np.ndarray
    pixels: np.ndarray
    areas: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, chosen: np.ndarray) -> Sums:
        """Return the chosen objects; ``chosen`` is a mask or an array of indices."""
        return Sums(
            self.numbers[chosen], self.labels[chosen], self.pixels[chosen], self.areas[chosen]
        )

    @classmethod
    def of_strip(cls, strip: NumberedStrip, row_areas: np.ndarray) -> Sums:
        """Return the table of the objects in a strip; an object may have several rows.

        Args:
            strip: the strip of the label map, with the numbers of its objects.
            row_areas: the area of a pixel in each row, (rows,).
        """
        inside = strip.ids != NONE
        ids = strip.ids[inside]
        of_pixels = np.broadcast_to(row_areas[:, None], strip.ids.shape)[inside]
        pixels = np.bincount(ids, minlength=len(strip.numbers))
        areas = np.bincount(ids, of_pixels, minlength=len(strip.numbers)).astype(float)
        there = np.flatnonzero(pixels)
        return cls(strip.numbers[there], strip.labels[there], pixels[there], areas[there])

    @classmethod
    def added(cls, parts: list[Sums]) -> Sums:
        """Return one table in which each object has the sum of its rows in all ``parts``."""
        numbers = np.concatenate([part.numbers for part in parts])
        numbers, first, of = np.unique(numbers, return_index=True, return_inverse=True)
        labels = np.concatenate([part.labels for part in parts])[first]
        pixels, areas = np.zeros(len(numbers), np.int64), np.zeros(len(numbers))
        np.add.at(pixels, of, np.concatenate([part.pixels for part in parts]))
        np.add.at(areas, of, np.concatenate([part.areas for part in parts]))
        return cls(numbers, labels, pixels, areas)


@dataclass
class Objects:
    """Objects of a label map that are complete, with their sums and their outlines.

    Attributes:
        sums: the objects' labels, numbers of pixels and areas.
        rings: the rings around the objects. If they are in memory, ``rings.ids`` are indices into
            the arrays of ``sums``. If they are in a scratch file, there is only one object.
    """

    sums: Sums
    rings: Rings | StoredRings


def trace(
    strips: Iterable[NumberedStrip],
    width: int,
    row_areas: np.ndarray | None = None,
    left: bool = False,
    fewest: int = _FEWEST,
    folder: Path | None = None,
) -> Iterator[Objects]:
    """Yield the objects of a label map in groups, while the map is read from top to bottom.

    An object is yielded after the last row that can contain its pixels. The objects and their rings
    do not depend on the height of the strips.

    Args:
        strips: strips of the map, from top to bottom.
        width: number of columns of the map.
        row_areas: (height,) the area of a pixel in each row; None for 1.
        left: True for rings that have their object on the left-hand side, False for the right-hand
            side (:mod:`distseg.data.vector.rings`).
        fewest: number of edges to collect before a search for complete objects.
        folder: the folder of the scratch file; None for the system's folder for temporary files.
    """
    tracer = _Tracer(width, left, folder)
    outside = np.full((1, width), NONE, np.int64)
    above, top = outside, 0
    for strip in strips:
        numbers, rows = strip.drawn(NONE), len(strip.ids)
        areas = np.ones(rows) if row_areas is None else row_areas[top : top + rows]
        tracer.add_sums(Sums.of_strip(strip, areas))
        upper = np.concatenate([above, numbers[:-1]])
        tracer.add_edges(horizontal(upper, numbers, top))
        tracer.add_edges(vertical(numbers, top))
        top, above = top + rows, numbers[-1:]
        if tracer.edges > fewest or tracer.strips > _MOST_STRIPS:
            yield from tracer.complete(top, above)
    tracer.add_edges(horizontal(above, outside, top))
    yield from tracer.complete(top + 1, outside)


class _Tracer:
    """Collector of the pixel counts and the edges of objects, until the objects are complete.

    Args:
        width: number of columns of the map.
        left: True if edges are turned, so that they have their objects on the left-hand side.
        folder: the folder of the scratch file.

    Attributes:
        strips: number of strips whose sums were added after the last call of :meth:`complete`.
        edges: number of edges that were added after that call.
    """

    def __init__(self, width: int, left: bool, folder: Path | None):
        self._width, self._left = width, left
        self._outlines = Outlines(width, left, folder)
        self._open = np.zeros(0, np.int64)  # numbers of the objects that have outlines
        none = np.zeros(0, np.int64)
        # The sums of open objects, then the sums of strips.
        self._sums = [Sums(none, none, none, np.zeros(0))]
        self._waiting: list[Edges] = []
        self.strips = self.edges = 0

    def add_sums(self, sums: Sums) -> None:
        """Add the table of the objects in a strip of the map."""
        self._sums.append(sums)
        self.strips += 1

    def add_edges(self, edges: Edges) -> None:
        """Add edges between pixels; ``edges.ids`` are the numbers of their objects."""
        self._waiting.append(edges.turned() if self._left else edges)
        self.edges += len(edges)

    def complete(self, rows: int, last: np.ndarray) -> Iterator[Objects]:
        """Yield the complete objects, and drop them from this collector.

        An object is open if it has pixels in the last row that was read, because the next row may
        continue it. All other objects are complete.

        Args:
            rows: number of rows that were read.
            last: the object number at each pixel of the last row; NONE outside all objects.
        """
        sums, edges = Sums.added(self._sums), Edges.concatenated(self._waiting)
        self._waiting, self.strips, self.edges = [], 0, 0
        is_open = np.isin(sums.numbers, last)
        stored = np.isin(sums.numbers, self._open)
        of = np.searchsorted(sums.numbers, edges.ids)
        new = ~is_open & ~stored  # objects that began and ended in the rows since the last call
        short = edges.take(new[of])
        self._outlines.add(edges.take(~new[of]), rows)
        self._sums = [sums.take(is_open)]
        self._open = sums.numbers[is_open]
        if new.any():
            short.ids = (np.cumsum(new) - 1)[of[new[of]]]
            yield Objects(sums.take(new), linked(short, self._width, self._left))
        for at in np.flatnonzero(stored & ~is_open):
            number = int(sums.numbers[at])
            yield Objects(sums.take([at]), self._outlines.rings_of(number))
        self._outlines.keep(self._open)
