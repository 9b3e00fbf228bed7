"""Polygons as arrays of corners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Polygons:
    """Polygons as arrays of corners, in the order of the file.

    Attributes:
        corners: (corners, 2) float64, x and y.
        rings: (rings + 1,) the index of the first corner of each ring. Rings are closed.
        parts: (polygons + 1,) the index of the first ring of each polygon. Its first ring is the
            outer ring, and the others are its holes.
        bounds: (polygons, 4) smallest x and y, largest x and y of each polygon.
        values: (polygons,) the value that each polygon gives to its pixels.
        features: (polygons,) the number of each polygon's feature in the file.
    """

    corners: np.ndarray
    rings: np.ndarray
    parts: np.ndarray
    bounds: np.ndarray
    values: np.ndarray
    features: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def chosen(self, which: np.ndarray) -> Polygons:
        """Return the polygons that a mask chooses.

        Args:
            which: (polygons,) bool, True for the polygons to return.
        """
        of_ring = np.repeat(which, np.diff(self.parts))
        of_corner = np.repeat(of_ring, np.diff(self.rings))
        return Polygons(
            self.corners[of_corner],
            _starts(np.diff(self.rings)[of_ring]),
            _starts(np.diff(self.parts)[which]),
            self.bounds[which],
            self.values[which],
            self.features[which],
        )

    def moved(self, corners: np.ndarray) -> Polygons:
        """Return the same polygons with new coordinates of their ``corners``, (corners, 2)."""
        first = self.rings[self.parts[:-1]]  # every polygon has rings, and every ring has corners
        bounds = self.bounds
        if len(self):
            low, high = (op.reduceat(corners, first) for op in (np.minimum, np.maximum))
            bounds = np.concatenate([low, high], 1)
        return replace(self, corners=corners, bounds=bounds)


def polygons_of(
    shapes: np.ndarray, values: np.ndarray, numbers: np.ndarray, shapely: Any
) -> Polygons:
    """Convert shapely's geometries to arrays of corners.

    Each polygon of a multipolygon becomes a polygon of its own.

    Args:
        shapes: shapely's polygons and multipolygons.
        values: (features,) the value that each feature gives to its pixels.
        numbers: (features,) the number of each feature in the file.
        shapely: the module.
    """
    polygons, of_feature = shapely.get_parts(shapes, return_index=True)
    there = ~shapely.is_empty(polygons)
    polygons, of_feature = polygons[there], of_feature[there]
    if not len(polygons):
        nothing = np.zeros((0, 2)), np.zeros(1, np.int64), np.zeros(1, np.int64)
        return Polygons(*nothing, np.zeros((0, 4)), values[:0], numbers[:0])
    _, corners, (rings, parts) = shapely.to_ragged_array(polygons)
    return Polygons(
        corners,
        np.asarray(rings, np.int64),
        np.asarray(parts, np.int64),
        shapely.bounds(polygons),
        values[of_feature],
        numbers[of_feature],
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the index at which each of several consecutive groups of items begins.

    Args:
        lengths: (groups,) the number of items of each group.

    Returns:
        (groups + 1,) int64; the last entry is the number of all items.
    """
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
