"""Polygons of traced objects with their attributes, in the coordinates of a map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distseg.data.vector.components import Numbers
from distseg.data.vector.polygons import Objects, trace
from distseg.data.vector.world import World


@dataclass(frozen=True)
class Feature:
    """One object of a label map.

    Attributes:
        number: number of the object, from 1 in the order of the objects' first pixels.
        label: the label of its pixels.
        name: the name of its class.
        pixels: number of its pixels.
        area: its area in square metres; None if that is unknown.
        rings: closed rings, arrays (corners, 2) float64 of x and y: first the outer ring,
            counter-clockwise, then the holes, clockwise.
    """

    number: int
    label: int
    name: str
    pixels: int
    area: float | None
    rings: list[np.ndarray]


def features(
    strips: Callable[[], Iterable[np.ndarray]],
    size: Sequence[int],
    names: Callable[[int], str],
    world: World,
    skipped: tuple[int, ...] = (),
    least: int = 1,
) -> Iterator[Feature]:
    """Yield the objects of a label map as polygons.

    Args:
        strips: a function that returns the strips of labels (rows, width), from top to bottom. It
            is called twice.
        size: (height, width) of the map.
        names: a function from a label to the name of its class.
        world: the coordinates on earth of the map's pixels.
        skipped: labels whose pixels belong to no object.
        least: objects of fewer pixels are left out; the other objects keep their numbers.
    """
    height, width = size
    numbers = Numbers(strips(), width, skipped)
    areas = world.row_areas(height)
    for objects in trace(strips(), width, skipped, areas):
        yield from _features(objects, numbers, names, world, areas is not None, least)


def _features(
    objects: Objects,
    numbers: Numbers,
    names: Callable[[int], str],
    world: World,
    measured: bool,
    least: int,
) -> Iterator[Feature]:
    rings = objects.rings
    points = np.stack(world.xy(rings.x, rings.y), 1)
    first = np.searchsorted(rings.ids, np.arange(len(objects) + 1))  # ring of each object
    number_of = numbers.of_firsts(objects.firsts)
    for index in np.flatnonzero(objects.pixels >= least):
        outlines = []
        for ring in range(first[index], first[index + 1]):
            begin, end = rings.begins[ring], rings.begins[ring + 1]
            corners = np.concatenate([points[begin:end], points[begin : begin + 1]])
            outlines.append(corners[::-1] if world.mirrored else corners)
        label = int(objects.labels[index])
        yield Feature(
            int(number_of[index]),
            label,
            names(label),
            int(objects.pixels[index]),
            float(objects.areas[index]) if measured else None,
            outlines,
        )
