"""Trace the objects of a label map as polygons.

Only one strip of the map and the objects that later rows may continue are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from distseg.data.vector.components import NONE, Labeller
from distseg.data.vector.rings import Edges, Rings, horizontal, linked, vertical

_FEWEST = 1 << 18  # number of edges to collect before a search for complete objects


@dataclass
class Objects:
    """Some complete objects of a label map, sorted by the position of their first pixel.

    Attributes:
        labels: (objects,) label.
        firsts: (objects,) position of the first pixel in reading order, row * width + column.
        pixels: (objects,) number of pixels.
        areas: (objects,) sum of the areas of the pixels, in the unit of ``row_areas`` of
            :func:`trace`.
        rings: the rings of the objects; ``rings.ids`` are indices into the other arrays.
    """

    labels: np.ndarray
    firsts: np.ndarray
    pixels: np.ndarray
    areas: np.ndarray
    rings: Rings

    def __len__(self) -> int:
        return len(self.labels)


def trace(
    strips: Iterable[np.ndarray],
    width: int,
    skipped: tuple[int, ...] = (),
    row_areas: np.ndarray | None = None,
    fewest: int = _FEWEST,
) -> Iterator[Objects]:
    """Yield the objects of a label map in groups, while the map is read from top to bottom.

    An object is yielded after the last row that can contain its pixels. The objects, their rings
    and areas do not depend on the height of the strips.

    Args:
        strips: strips of labels (rows, width), from top to bottom.
        width: number of columns of the map.
        skipped: labels whose pixels belong to no object.
        row_areas: (height,) the area of a pixel of each row; by default 1.
        fewest: number of edges to collect before a search for complete objects.
    """
    labeller = Labeller(width, skipped)
    sums = _Sums()
    waiting: list[Edges] = []
    count, limit, top = 0, fewest, 0
    outside = np.full((1, width), NONE, np.int64)
    above = outside
    for strip in strips:
        ids = labeller.add(strip)
        areas = np.ones(len(strip)) if row_areas is None else row_areas[top : top + len(strip)]
        sums.add(ids, areas, len(labeller.parents))
        above = labeller.joined_ids(above)
        upper = np.concatenate([above, ids[:-1]])
        for found in (horizontal(upper, ids, top), vertical(ids, top)):
            waiting.append(found)
            count += len(found)
        top += len(strip)
        above = ids[-1:]
        if count > limit:
            objects, edges = _complete(labeller, sums, Edges.concatenated(waiting))
            if len(objects):
                yield objects
            waiting, count, limit = [edges], len(edges), max(fewest, 2 * len(edges))
            above = labeller.row_ids[None]
    waiting.append(horizontal(above, outside, top))
    labeller.row_ids[:] = NONE
    objects, _ = _complete(labeller, sums, Edges.concatenated(waiting))
    if len(objects):
        yield objects


class _Sums:
    """Number and area of the pixels of each id."""

    def __init__(self) -> None:
        self.pixels = np.zeros(0, np.int64)
        self.areas = np.zeros(0)

    def add(self, ids: np.ndarray, row_areas: np.ndarray, count: int) -> None:
        """Add the pixels of a strip to the sums of their ids.

        Args:
            ids: the id of each pixel, (rows, width); NONE outside all objects.
            row_areas: the area of a pixel in each row, (rows,).
            count: the number of ids, including those that are new in this strip.
        """
        inside = ids != NONE
        of_pixels = np.broadcast_to(row_areas[:, None], ids.shape)[inside]
        pixels = np.bincount(ids[inside], minlength=count)
        areas = np.bincount(ids[inside], of_pixels, minlength=count).astype(float)
        pixels[: len(self.pixels)] += self.pixels
        areas[: len(self.areas)] += self.areas
        self.pixels, self.areas = pixels, areas


def _complete(labeller: Labeller, sums: _Sums, edges: Edges) -> tuple[Objects, Edges]:
    """Return the complete objects, and the edges of the open objects.

    An object is open if it has pixels in the last row that was read, because the next row may
    continue it. All other objects are complete. They are removed from ``labeller`` and ``sums``.
    The open objects get new ids in ``labeller``, in ``sums`` and in the returned edges.

    Args:
        labeller: the labeller to which all strips read until now were added.
        sums: the sums over the same strips.
        edges: the edges of all objects that an earlier call did not return as complete. The call
            changes ``edges.ids``.
    """
    width, roots = labeller.width, labeller.roots()
    own = roots == np.arange(len(roots))
    open_ids = np.unique(roots[labeller.row_ids[labeller.row_ids != NONE]])
    is_open = np.zeros(len(roots), bool)
    is_open[open_ids] = True
    pixels = np.bincount(roots, sums.pixels, minlength=len(roots)).astype(np.int64)
    areas = np.bincount(roots, sums.areas, minlength=len(roots)).astype(float)
    done = np.flatnonzero(own & ~is_open)
    done = done[np.argsort(labeller.firsts[done], kind="stable")]
    number = np.zeros(len(roots), np.int64)
    number[done] = np.arange(len(done))
    number[open_ids] = np.arange(len(open_ids))
    edges.ids = roots[edges.ids]
    waits = is_open[edges.ids]
    finished, rest = edges.take(~waits), edges.take(waits)
    finished.ids, rest.ids = number[finished.ids], number[rest.ids]
    objects = Objects(
        labeller.labels[done],
        labeller.firsts[done],
        pixels[done],
        areas[done],
        linked(finished, width),
    )
    sums.pixels, sums.areas = pixels[open_ids], areas[open_ids]
    labeller.forget(open_ids)
    return objects, rest
