"""Polygons of traced objects with their attributes, in the coordinates of a map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distseg.data.vector.components import Numbers
from distseg.data.vector.outlines import StoredCorners, StoredRings
from distseg.data.vector.polygons import trace
from distseg.data.vector.rings import Rings
from distseg.data.vector.world import World


@dataclass(frozen=True)
class Ring:
    """Closed ring of a polygon.

    Attributes:
        corners: number of corners; the first corner counts twice, because it is also the last one.
        parts: an iterable of arrays (n, 2) float64 of x and y, which together are the corners in
            order. It can be iterated several times.
    """

    corners: int
    parts: Iterable[np.ndarray]


@dataclass(frozen=True)
class Feature:
    """One object of a label map, as a polygon with attributes.

    Attributes:
        number: number of the object, from 1 in the order of the objects' first pixels.
        label: the label of its pixels.
        name: the name of its class.
        pixels: number of its pixels.
        area: its area in square metres; None if that is unknown.
        rings: an iterable of the rings: first the outer ring, counter-clockwise, then the holes,
            clockwise. It can be iterated several times, and may read a scratch file.
        counts: number of rings, and number of corners of all rings.
    """

    number: int
    label: int
    name: str
    pixels: int
    area: float | None
    rings: Iterable[Ring]
    counts: tuple[int, int]


def features(
    strips: Callable[[], Iterable[np.ndarray]],
    size: Sequence[int],
    names: Callable[[int], str],
    world: World,
    skipped: tuple[int, ...] = (),
    least: int = 1,
    folder: Path | None = None,
) -> Iterator[Feature]:
    """Yield the objects of a label map as polygons with attributes.

    An object is a set of connected pixels of one label.

    Args:
        strips: a function that returns the strips of labels (rows, width), from top to bottom. It
            is called twice.
        size: (height, width) of the map.
        names: a function from a label to the name of its class.
        world: the georeference of the map.
        skipped: labels whose pixels belong to no object.
        least: objects of fewer pixels are left out; the other objects keep their numbers.
        folder: the folder of scratch files; None for the system's folder for temporary files.
    """
    height, width = size
    numbers = Numbers(strips(), width, skipped, folder)
    areas = world.row_areas(height)
    traced = trace(numbers.numbered(strips()), width, areas, left=world.mirrored, folder=folder)
    for objects in traced:
        sums = objects.sums
        large = np.flatnonzero(sums.pixels >= least)
        of_object = _in_scratch if isinstance(objects.rings, StoredRings) else _in_memory
        for index, (rings, counts) in zip(large, of_object(objects.rings, large, world)):
            label = int(sums.labels[index])
            yield Feature(
                int(sums.numbers[index]),
                label,
                names(label),
                int(sums.pixels[index]),
                float(sums.areas[index]) if areas is not None else None,
                rings,
                counts,
            )


def _in_memory(
    rings: Rings, chosen: np.ndarray, world: World
) -> Iterator[tuple[list[Ring], tuple[int, int]]]:
    """Yield for each chosen object its rings, their number, and the number of their corners.

    Args:
        rings: the rings of several objects, with corners in columns and rows.
        chosen: (chosen objects,) indices of the objects, as in ``rings.ids``.
        world: the georeference of the map, in whose coordinates the rings are returned.
    """
    points = np.stack(world.xy(rings.x, rings.y), 1)
    begins, ends = (np.searchsorted(rings.ids, chosen, side) for side in ("left", "right"))
    for begin, end in zip(begins, ends):
        found = []
        for first, stop in zip(rings.begins[begin:end], rings.begins[begin + 1 : end + 1]):
            corners = np.concatenate([points[first:stop], points[first : first + 1]])
            found.append(Ring(len(corners), (corners,)))
        yield found, (len(found), sum(ring.corners for ring in found))


def _in_scratch(
    rings: StoredRings, chosen: np.ndarray, world: World
) -> Iterator[tuple[_StoredPolygon, tuple[int, int]]]:
    """Yield the rings of one object, and a pair: the number of rings and of all their corners.

    Args:
        rings: the rings of the object in a scratch file, with corners in columns and rows.
        chosen: the index of the object, as an array (1,). An empty array leaves the object out, so
            nothing is yielded.
        world: the georeference of the map, in whose coordinates the rings are returned.
    """
    if len(chosen):
        yield _StoredPolygon(rings, world), (rings.rings, rings.corners + rings.rings)


@dataclass(frozen=True)
class _StoredPolygon:
    """Iterable of the rings of one object, which are read from a scratch file."""

    rings: StoredRings
    world: World

    def __iter__(self) -> Iterator[Ring]:
        for corners, stored in self.rings:
            yield Ring(corners + 1, _StoredPoints(stored, self.world))


@dataclass(frozen=True)
class _StoredPoints:
    """Iterable of the corners of a ring in a scratch file: arrays (corners, 2) of x and y."""

    corners: StoredCorners
    world: World

    def __iter__(self) -> Iterator[np.ndarray]:
        for columns, rows in self.corners:
            yield np.stack(self.world.xy(columns, rows), 1)
