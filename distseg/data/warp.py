"""Resample an image along a smooth map, box by box: zoom, rotation and elastic deformation.

The position of an output pixel in the image depends only on the pixel's own position in the sample.
So a rank can compute any box of the warped sample from a box of the image. Every pixel is computed
by the same operations in the same order, whatever the box is. So it has the same bits in a box as
in the whole warped sample.

Pixels are interpolated linearly between the 2^d neighbours (bilinear, trilinear), labels are those
of the nearest pixel. Neighbours without data, or outside the image, get the weight 0, and the other
weights are scaled up. If the nearest pixel has no data, the result has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from distseg.tiling import rng
from distseg.tiling.tile import Box, along, numbers, strips

_AT_ONCE = 1 << 15  # output pixels whose neighbours and weights stay in the processor's cache


@dataclass(frozen=True)
class Elastic:
    """Elastic deformation: a smooth random displacement of every pixel of a sample.

    Random vectors lie on a coarse grid. Their coordinates are uniform between -amplitude and
    amplitude. A pixel's displacement is the cubic B-spline of these vectors at the pixel. The
    weights of a B-spline are positive with the sum 1, so no displacement along a dim exceeds the
    amplitude.

    Attributes:
        key: the key of the random numbers.
        amplitude: the largest displacement along each dim, in pixels.
        spacing: the distance between neighbouring vectors of the grid, in pixels.
        least: for each dim, the first position at which a displacement may be asked for.
        stop: for each dim, the position after the last one.
    """

    key: int
    amplitude: float
    spacing: float
    least: tuple[int, ...]
    stop: tuple[int, ...]

    def displacements(self, box: Box) -> np.ndarray:
        """Return the displacement of each pixel along each dim, (dims, *box.size) float32."""
        cells, weights = zip(*(_taps(self.spacing, *ends) for ends in zip(box.start, box.stop)))
        found = self._vectors([(int(k[0]), int(k[-1]) + 4) for k in cells])
        for dim, (first, weight) in enumerate(zip(cells, weights), start=1):
            found = _spline(found, first - first[0], weight, dim)
        return found

    def _vectors(self, ranges: list[tuple[int, int]]) -> np.ndarray:
        """Return random vectors of the grid as an array (dims, *grid size) float32.

        ``ranges`` has for each dim the first grid index and the index after the last.
        """
        first = [math.floor(a / self.spacing) - 1 for a in self.least]
        shape = [math.floor((b - 1) / self.spacing) + 3 - f for b, f in zip(self.stop, first)]
        cells = Box(*(tuple(k - f for k, f in zip(ends, first)) for ends in zip(*ranges)))
        index = numbers(cells, shape)
        uniform = [rng.uniform_of(rng.key(self.key, dim), index) for dim in range(len(shape))]
        return ((2 * np.stack(uniform) - 1) * self.amplitude).astype(np.float32)


@dataclass(frozen=True)
class Warp:
    """Zoom, rotation and elastic deformation of a sample, as a function of coordinates.

    The pixel p of the sample takes its value from the position
    ``c + R (p - c + elastic(p)) / scale`` of the image. Here c is the centre of the sample, R the
    rotation, and positions count from the start of the sample's box in the image.

    Attributes:
        size: the size of the sample in pixels.
        scale: factor by which objects appear larger.
        degrees: angle of the rotation in the plane of the last two dims, in the direction of
            ``np.rot90``.
        tilts: for volumes, the angles in degrees of two more rotations, in the plane of dims 0
            and 1, and of dims 0 and 2. R applies them first, in this order.
        elastic: the elastic deformation; None if there is none.
    """

    size: tuple[int, ...]
    scale: float = 1.0
    degrees: float = 0.0
    elastic: Elastic | None = None
    tilts: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def _matrix(self) -> list[list[float]]:
        """The rotation matrix R of the warp, divided by the zoom ``scale``, as a list of rows."""
        dims = len(self.size)
        rows = [[float(i == j) / self.scale for j in range(dims)] for i in range(dims)]
        planes = [(0, 1), (0, 2)] if any(self.tilts) else []
        angles = [*self.tilts[: len(planes)], self.degrees]
        for (i, j), angle in zip([*planes, (dims - 2, dims - 1)], angles):
            cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            rows[i], rows[j] = (
                [cosine * x + sine * y for x, y in zip(rows[i], rows[j])],
                [cosine * y - sine * x for x, y in zip(rows[i], rows[j])],
            )
        return rows

    def source(self, box: Box) -> Box:
        """Return a box that contains all pixels from which ``box`` of the sample is interpolated.

        The coordinates of both boxes count from the start of the sample's box in the image.
        """
        margin = self.elastic.amplitude if self.elastic else 0.0
        start, stop = [], []
        for dim, row in enumerate(self._matrix):
            least = most = self._offset(dim)
            for a, b, factor in zip(box.start, box.stop, row):
                ends = factor * (a - margin), factor * (b - 1 + margin)
                least, most = least + min(ends), most + max(ends)
            # The slack is far above the rounding errors of positions and displacements.
            start.append(math.floor(least - 0.01))
            stop.append(math.floor(most + 0.01) + 2)
        return Box(tuple(start), tuple(stop))

    def positions(self, box: Box) -> list[np.ndarray]:
        """Return the position in the image from which each pixel of a box takes its value.

        Positions count from the start of the sample's box in the image. The result is one float64
        array for each dim, which broadcasts to ``box.size``.
        """
        dims, found = len(self.size), []
        moved = None if self.elastic is None else self.elastic.displacements(box)
        for dim, row in enumerate(self._matrix):
            position = np.full((1,) * dims, self._offset(dim))
            for other, factor in enumerate(row):
                if factor:
                    pixels = np.arange(box.start[other], box.stop[other])
                    position = position + along(factor * pixels, other, dims)
            for other, factor in enumerate(row):
                if factor and moved is not None:
                    position = position + np.float32(factor) * moved[other]
            found.append(position)
        return found

    def _offset(self, dim: int) -> float:
        """Return the position along ``dim`` from which the sample's first pixel takes its value.

        The elastic deformation is left out. Positions count from the start of the sample's box.
        """
        centre = [(n - 1) / 2 for n in self.size]
        return centre[dim] - sum(m * c for m, c in zip(self._matrix[dim], centre))


@dataclass(frozen=True)
class Reading:
    """Interpolation of one box of a warped sample from pixels of the image.

    Args:
        warp: the warp of the sample.
        box: the box of the warped sample.
        origin: the position in the image of the sample's first pixel.
        image: the size of the image.
    """

    warp: Warp
    box: Box
    origin: tuple[int, ...]
    image: tuple[int, ...]

    @cached_property
    def source(self) -> Box:
        """The box of the image that must be read; it may extend beyond the image by two pixels.

        Positions outside the image are clipped, along each dim, to -1 or to the image's size.
        """
        box = self.warp.source(self.box).shifted(self.origin)
        return Box(
            tuple(min(max(a, -1), n) for a, n in zip(box.start, self.image)),
            tuple(max(min(b, n + 2), 1) for b, n in zip(box.stop, self.image)),
        )

    def pixels(
        self, pixels: np.ndarray, absent: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the interpolated pixels of ``self.box``, and a mask of the pixels without data.

        Args:
            pixels: the pixels of ``source``, (C, *source.size) float32, 0 where they have no data.
            absent: True where pixels have no data, (C or 1, *source.size); None if all have data.

        Returns:
            (C, *box.size) float32, and (C or 1, *box.size) bool or None.
        """
        flat = pixels.reshape(len(pixels), -1)
        found = np.empty((len(flat), *self.box.size), np.float32)
        lost = None if absent is None else absent.reshape(len(absent), -1)
        gone = None if lost is None else np.empty((len(lost), *self.box.size), bool)
        weights = None if lost is None else lost.astype(np.float32)
        for rows, part in self._parts():
            for band, values in enumerate(flat):
                found[band, rows] = part.linear(values)
            if lost is None or gone is None or weights is None:
                continue
            for band in range(len(lost)):
                gone[band, rows] = nowhere = part.nearest(lost[band])
                share = np.where(nowhere, np.float32(1), 1 - part.linear(weights[band]))
                own = slice(None) if len(lost) == 1 else slice(band, band + 1)
                found[own, rows] /= share
        if gone is None or not gone.any():
            return found, None
        np.copyto(found, np.float32(0), where=gone)
        return found, gone

    def labels(self, labels: np.ndarray) -> np.ndarray:
        """Return for each pixel of ``self.box`` the label of the nearest pixel of the image.

        Args:
            labels: the labels of ``source``, (*source.size).
        """
        flat, found = labels.reshape(-1), np.empty(self.box.size, labels.dtype)
        for rows, part in self._parts():
            found[rows] = part.nearest(flat)
        return found

    def _parts(self) -> Iterator[tuple[slice, _Neighbours]]:
        """Yield slices of rows that together make up ``self.box``, and their pixels' neighbours.

        The box is handled in strips of rows to limit the memory in use.
        """
        for strip in strips(self.box, _AT_ONCE):
            rows = slice(strip.start[0] - self.box.start[0], strip.stop[0] - self.box.start[0])
            yield rows, self._neighbours(strip)

    def _neighbours(self, box: Box) -> _Neighbours:
        """Return, for each pixel of a box, the pixels of ``source`` around its source position."""
        lower = np.zeros((1,) * len(box.size), np.intp)
        shares, steps, step = [], [], math.prod(self.source.size)
        for dim, position in enumerate(self.warp.positions(box)):
            origin, first = self.origin[dim], self.source.start[dim]
            step //= self.source.size[dim]
            if first < 0 or self.source.stop[dim] > self.image[dim]:
                np.clip(position, -1 - origin, self.image[dim] - origin, out=position)
            whole = np.floor(position)
            shares.append(np.subtract(position, whole, out=position).astype(np.float32))
            whole += origin - first
            whole *= step
            lower = lower + whole.astype(np.intp)
            steps.append(step)
        return _Neighbours(np.broadcast_to(lower, box.size), shares, steps)


@dataclass(frozen=True)
class _Neighbours:
    """Neighbours of positions between pixels: the 2^dims pixels around each, and their weights.

    The pixels are given as indices into the flattened array of all pixels that were read.

    Attributes:
        lower: for each position, the index of the neighbour with the lowest coordinates.
        shares: for each dim, the distances of the positions from this neighbour, from 0 to 1.
        steps: for each dim, the difference between the indices of two adjacent pixels.
    """

    lower: np.ndarray
    shares: list[np.ndarray]
    steps: list[int]

    def linear(self, values: np.ndarray) -> np.ndarray:
        """Return the value at each position, interpolated linearly between its neighbours.

        ``values`` is the flattened array of all pixels; the result has the shape of ``lower``.
        """
        corners = [values.take(index) for index in self._corners]
        for share in reversed(self.shares):
            corners = [_between(a, b, share) for a, b in zip(corners[::2], corners[1::2])]
        return corners[0]

    @cached_property
    def _corners(self) -> list[np.ndarray]:
        """For each of the 2^dims neighbours, its index at every position.

        In the list of neighbours, the last dim varies fastest.
        """
        return [
            self.lower + sum(step for step, upper in zip(self.steps, corner) if upper)
            for corner in product((False, True), repeat=len(self.steps))
        ]

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """Return the value of the nearest neighbour of each position.

        ``values`` is the flattened array of all pixels; the result has the shape of ``lower``.
        """
        index = self.lower
        for share, step in zip(self.shares, self.steps):
            index = index + (share >= 0.5) * step
        return values.take(index)


def _between(a: np.ndarray, b: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return ``a + (b - a) * share``, computed in the memory of ``b``."""
    np.subtract(b, a, out=b)
    np.multiply(b, share, out=b)
    return np.add(b, a, out=b)


@lru_cache(64)  # all strips of a box have the same columns
def _taps(spacing: float, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the B-spline's four grid vectors and their weights for pixels along one dim.

    A cubic B-spline (:class:`Elastic`) at a pixel is the weighted sum of the four nearest random
    vectors of the grid along each dim.

    Args:
        spacing: the distance between neighbouring vectors of the grid, in pixels.
        start, stop: the first pixel's position along the dim, and the position after the last.

    Returns:
        For each of the n pixels, the grid index of the first of its four vectors, (n,) int64, and
        the weights of the four, (4, n) float32.
    """
    exact = np.arange(start, stop) / spacing
    first = np.floor(exact)
    t = exact - first
    weights = (1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, 3 * (t + t**2 - t**3) + 1, t**3
    return first.astype(np.int64) - 1, (np.stack(weights) / 6).astype(np.float32)


def _spline(values: np.ndarray, first: np.ndarray, weights: np.ndarray, dim: int) -> np.ndarray:
    """Return weighted sums of four neighbouring values along one dim.

    Args:
        values: the values, with any number of dims.
        first: (n,) the index along ``dim`` of the first value of each sum.
        weights: (4, n) the weights of the four values.
        dim: the dim along which values are summed; in the result it has n entries.
    """
    total: np.ndarray | None = None
    for tap, weight in enumerate(weights):
        term = values.take(first + tap, axis=dim) * along(weight, dim, values.ndim)
        total = term if total is None else np.add(total, term, out=total)
    assert total is not None
    return total
