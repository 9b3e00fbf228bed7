"""Draw polygons of a vector file as the label map of an image, window by window.

A pixel belongs to a polygon if its centre lies inside, as in ``rasterio.features.rasterize``. Where
polygons overlap, the later one in the file has the pixel. Windows are blocks of a fixed grid, so a
pixel does not depend on the box that is read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distseg.data.formats.base import Reader
from distseg.data.vector.annotated import is_annotated, read_annotated
from distseg.data.vector.corners import Polygons
from distseg.data.vector.layer import ValueRule, imported_packages, read_layer
from distseg.data.vector.placed import ImageGrid, inside, on_pixels
from distseg.tiling.tile import Box, boxes_of

_BLOCK = (256, 4096)  # rows and columns of the blocks in which polygons are drawn
# Positions of a corner relative to a window.
_INSIDE, _ABOVE, _BELOW, _LEFT, _RIGHT = range(5)


class BurnedReader(Reader):
    """Reader of the labels that polygons give to the pixels of an image.

    Args:
        path: the vector file.
        grid: the size and the georeference of the image.
        rule: the rule that gives each polygon its label.

    Attributes:
        polygons: number of polygons whose bounding box overlaps the image.

    Raises:
        ValueError: the file or the image cannot be used; the message names the repair.
    """

    bands = 1

    def __init__(self, path: Path, grid: ImageGrid, rule: ValueRule):
        super().__init__(path)
        imported_packages(path)
        if len(grid.size) != 2:
            raise ValueError(
                f"{path} holds polygons, but {grid.path} is a volume of {len(grid.size)} dims: "
                "give a mask of voxels for each volume"
            )
        self.size, self.place, self._overlapping = grid.size, grid.place, 0
        if is_annotated(path):
            layer = read_annotated(path, rule, grid)
            self._drawn, self._turned = inside(layer.polygons, grid.size), np.array([1, 1])
        else:
            layer = read_layer(path, rule)
            self._drawn, self._turned = on_pixels(layer, grid), _directions(grid)
        self.polygons, self.notes = len(self._drawn), layer.notes
        values = layer.polygons.values
        small = not len(values) or (values.min() >= 0 and values.max() <= 255)
        self.dtype = np.dtype(np.uint8 if small else np.int32)

    @property
    def overlapping(self) -> int:
        """Number of pixels read so far that are covered by polygons of different values."""
        return self._overlapping

    def _read(self, box: Box) -> np.ndarray:
        """Return the labels of a box, (1, *box.size), drawn block by block."""
        found = np.zeros(box.size, self.dtype)
        low = tuple(start // edge * edge for start, edge in zip(box.start, _BLOCK))
        for block in boxes_of(Box(low, box.stop), _BLOCK):
            whole = Box(
                block.start, tuple(min(a + n, m) for a, n, m in zip(block.start, _BLOCK, self.size))
            )
            shared = whole.intersection(box)
            drawn, twice = self._block(whole)
            inner = shared.relative_to(whole).slices
            found[shared.relative_to(box).slices] = drawn[inner]
            self._overlapping += 0 if twice is None else int(twice[inner].sum())
        return found[None]

    def _block(self, block: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the labels of a block, and a mask of the pixels where different labels overlap.

        Both are (rows, columns). The mask is None if all polygons in the block have the same label.
        """
        low, high = self._drawn.bounds[:, :2], self._drawn.bounds[:, 2:]
        corner, end = np.array(block.start[::-1]), np.array(block.stop[::-1])
        there = np.flatnonzero((low <= end).all(1) & (high >= corner).all(1))
        values = self._drawn.values[there].tolist()
        shapes = [_rings_near(self._drawn, at, block) for at in there.tolist()]
        drawn = self._burn(shapes, values, block)
        if len(set(values)) < 2:
            return drawn, None
        # A pixel that is drawn differently in the opposite order has several values.
        return drawn, self._burn(shapes[::-1], values[::-1], block) != drawn

    def _burn(self, shapes: list[list[np.ndarray]], values: list[int], block: Box) -> np.ndarray:
        """Draw polygons, and return the labels of the pixels of a block, (rows, columns).

        Args:
            shapes: the rings of each polygon, in columns and rows of the image.
            values: the label of each polygon.
            block: the box of the block.
        """
        import rasterio.features

        turned = self._turned
        geometries = [
            (
                {"type": "Polygon", "coordinates": [(ring * turned).tolist() for ring in rings]},
                value,
            )
            for rings, value in zip(shapes, values)
            if rings
        ]
        if not geometries:
            return np.zeros(block.size, self.dtype)
        top, left = block.start
        moved = rasterio.Affine(turned[0], 0, turned[0] * left, 0, turned[1], turned[1] * top)
        return rasterio.features.rasterize(
            geometries, block.size, transform=moved, dtype=self.dtype.name
        )


def _directions(grid: ImageGrid) -> np.ndarray:
    """Return the signs, 1 or -1, by which columns and rows are multiplied before GDAL draws them.

    GDAL gives all rings the same direction, clockwise or not, in the coordinates that it gets. On
    which pixels a horizontal edge falls depends on this direction. The signs make it the same as if
    GDAL had drawn the polygons in the coordinates of the map.
    """
    a, b, _, d, e, _ = grid.world.transform
    return np.sign([a, e] if b == d == 0 else [1, a * e - b * d]).astype(int)


def _rings_near(polygons: Polygons, at: int, block: Box) -> list[np.ndarray]:
    """Return the rings of a polygon, without corners that change no pixel of a block.

    A path of corners on one side of the block (above, below, left or right) is replaced by the
    straight edge from its first to its last corner. So a coast of a million corners is drawn fast.
    The pixels of the block stay the same:

    - above and below the block, edges cross no row of the block;
    - on the left or right, a pixel is inside if its row crosses an odd number of edges. A row that
      crosses a path an odd number of times also crosses the straight edge.

    A ring with a horizontal edge on pixel centres keeps all corners, because the pixels on this
    edge depend on the direction of the whole ring.

    Args:
        polygons: the polygons, in columns and rows of the image.
        at: the index of the polygon.
        block: the box of the block.
    """
    rings = []
    for ring in range(polygons.parts[at], polygons.parts[at + 1]):
        corners = polygons.corners[polygons.rings[ring] : polygons.rings[ring + 1]]
        if _on_centres(corners):
            rings.append(corners)
            continue
        sides = _sides(corners, block)
        if (sides == sides[0]).all() and sides[0] != _INSIDE:
            continue
        inner = (sides[1:-1] != _INSIDE) & (sides[1:-1] == sides[:-2]) & (sides[1:-1] == sides[2:])
        kept = corners[np.concatenate([[True], ~inner, [True]])]
        # rasterio wants at least four corners
        rings.append(kept if len(kept) > 3 else np.concatenate([kept, kept[-1:], kept[-1:]]))
    return rings


def _on_centres(corners: np.ndarray) -> bool:
    """Return True if a ring has a horizontal edge that runs through centres of pixels."""
    rows = corners[:, 1]
    return bool(((rows[1:] == rows[:-1]) & (rows[1:] % 1 == 0.5)).any())


def _sides(corners: np.ndarray, block: Box) -> np.ndarray:
    """Return the side of a block on which each corner lies, such as ``_ABOVE``, (corners,) int.

    Corners at most a pixel outside the block count as ``_INSIDE``.
    """
    x, y = corners.T
    (top, left), (bottom, right) = block.start, block.stop
    return np.select(
        [y < top - 1, y > bottom + 1, x < left - 1, x > right + 1],
        [_ABOVE, _BELOW, _LEFT, _RIGHT],
        _INSIDE,
    )
