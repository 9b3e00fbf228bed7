"""Find grids of tiles that fit images, and the work of the slowest tile of a grid.

None of it depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from distseg.config.sizes import Size
from distseg.planning.live_tensors import NetworkTensors, TileSizes, tensors_of
from distseg.planning.mesh_layout import Work
from distseg.tiling.layout import TileBorders, TileCells, exchange_points
from distseg.tiling.tile import Box, ReceptiveField, factorings, split, window

# How many grids with the same number of tiles are tried. The first ones have the smallest windows.
_GRIDS = 2
# Buffers that a rank keeps for each halo message of a layer: to send and to receive, while those of
# the layer before are still under way.
_POOLED = 4


@dataclass(frozen=True, eq=False)
class TileWork:
    """Work of the slowest tile of a grid for a micro-batch.

    Grids such as 2x4 and 4x2 of a square image share one object.

    Attributes:
        shares: for each layer, the number of cells that the tile computes, as a fraction of the
            cells of the whole feature map.
        halos: for each layer, the bytes and the number of the halo messages that the tile receives
            before the layer's forward pass.
        owned: for each layer before which halos are exchanged, the bytes of its input that the tile
            has before the exchange; 0 for any other layer.
        copies: for each layer, the bytes that its forward and its backward pass read and write to
            copy parts of tensors (:class:`_Parts`).
        sizes: the sizes of the tile's tensors.
    """

    shares: tuple[float, ...]
    halos: tuple[tuple[float, int], ...]
    owned: tuple[float, ...]
    copies: tuple[tuple[float, float], ...]
    sizes: TileSizes


class TileGrids:
    """Grids of tiles into which the images of a step can be cut, and the work of their tiles.

    Args:
        work: the training step.
    """

    def __init__(self, work: Work):
        self.work = work
        self._tile_work = lru_cache(None)(self._find_tile_work)
        self._longest_window = lru_cache(None)(self._find_longest_window)
        self._borders = lru_cache(None)(self._find_borders)
        self._exchange_points = lru_cache(None)(self._find_exchange_points)
        self._least_part = lru_cache(None)(self._find_least_part)

    @cached_property
    def tensors(self) -> NetworkTensors:
        """Tensors of the network for a micro-batch of whole images."""
        work = self.work
        return tensors_of(
            work.model, work.image, work.images, work.precision, work.channels_last, work.loss
        )

    @cached_property
    def whole_image(self) -> TileSizes:
        """Sizes of a tile that is the whole image."""
        return TileSizes.whole(len(self.work.costs.layers))

    def fitting(self, count: int, sizes: Collection[tuple[int, ...]]) -> list[Size]:
        """Return the best grids of ``count`` tiles that can cut all images, at most ``_GRIDS``.

        The grid whose largest window has the fewest pixels is the best one and comes first.

        Args:
            count: the number of tiles.
            sizes: sizes of images besides that of the step.
        """
        images = (self.work.image, *sizes)
        most = [
            min(-(-n // s) for n in along) for *along, s in zip(*images, self.work.reach.stride)
        ]
        found = [
            Size(grid)
            for grid in factorings(count, len(most))
            if all(g <= cells for g, cells in zip(grid, most))
        ]
        found.sort(key=self.largest_window)
        return found[:_GRIDS]

    def largest_window(self, grid: Size) -> int:
        """Return the number of pixels of the largest window (tile with its halo) of a grid."""
        return math.prod(self._longest_window(dim, parts) for dim, parts in enumerate(grid))

    def _find_longest_window(self, dim: int, parts: int) -> int:
        """Return the length of the longest window along a dim that is cut into ``parts`` tiles."""
        n, reach = self.work.image[dim], self.work.reach
        along = ReceptiveField((reach.halo[dim],), (reach.stride[dim],))
        return max(
            window(Box((a,), (b,)), (n,), along).pixels for a, b in split(n, parts, *along.stride)
        )

    def tile_work(self, grid: Size, exchange: str) -> TileWork:
        """Return the work of the slowest tile of a grid.

        Args:
            grid: the number of tiles along each dim.
            exchange: how often tiles exchange halos, ``spatial.exchange_every``.
        """
        along: dict[int, list[int]] = {}
        for dim, parts in sorted(zip(self._dims_alike, grid)):
            along.setdefault(dim, []).append(parts)
        return self._tile_work(Size(along[dim].pop(0) for dim in self._dims_alike), exchange)

    def _find_tile_work(self, grid: Size, exchange: str) -> TileWork:
        work, layers = self.work, len(self.work.costs.layers)
        none = ((0.0, 0),) * layers
        if grid.volume == 1:
            nothing = ((0.0, 0.0),) * layers
            return TileWork((1.0,) * layers, none, (0.0,) * layers, nothing, self.whole_image)
        tiles = [self._borders(dim, parts) for dim, parts in enumerate(grid)]
        beyond = frozenset().union(*(tile.reads_beyond for tile in tiles))
        points = self._exchange_points(beyond, exchange)
        shares, halos, stored, frames = [], list(none), [0.0], [0.0] * layers
        read, cut, between = [0.0] * layers, [False] * layers, []
        owned, copies, parts = [0.0] * layers, [], _Parts(self.tensors)
        maps = list(zip(*(tile.maps for tile in tiles)))  # for each map, its cells along each dim
        whole = [max(1, math.prod(cells for cells, _ in along)) for along in maps]
        available: list[list[int]] = [[]]  # for each map, the cells that the tile holds
        pool: dict[int, int] = {}  # the number of halo messages by the size of their buffers
        for number, along in enumerate(zip(*(tile.cells(points) for tile in tiles))):
            source, exchanged = work.graph[number].first, number in points
            before, after = whole[source], whole[number + 1]
            inputs, outputs = [dim.input for dim in along], [dim.output for dim in along]
            computed, held = math.prod(outputs), [dim.held for dim in along]
            shares.append(computed / after)
            if source == 0:
                stored[0] = max(stored[0], math.prod(held) / before)
                available[0] = max(available[0], held)
            available.append(outputs)
            fuses = self.tensors.layers[number].fuses
            made = math.prod(
                _stored(dim, n, m, exchanged)
                for dim, (n, _), (m, _) in zip(along, maps[source], maps[number + 1])
            )
            stored.append(made / after)
            cut[number] = made > computed
            needed = math.prod(inputs)
            if not exchanged and needed < math.prod(held):
                read[number] = needed / before
            first, last = work.bytes_of(source) / before, work.bytes_of(number + 1) / after
            copies.append(
                parts.copied(
                    number,
                    None if exchanged else (first * needed, first * math.prod(held)),
                    (last * computed, last * made),
                )
            )
            between.append(
                tuple(
                    0.0
                    if exchanged and not place
                    else _between(outputs if place else inputs, available[other]) / whole[other]
                    for place, other in enumerate(work.graph[number].inputs)
                )
            )
            if exchanged:
                frames[number] = math.prod(_framed(dim, fuses) for dim in along) / before
                had = math.prod(dim.had for dim in along)
                owned[number], size = first * had, first * (needed - had)
                messages = math.prod(min(3, g) for g in grid) - 1
                halos[number] = (size, messages)
                sides = (messages + 1) // 2  # The other messages are those of corners.
                buffer = 1 << max(0, math.ceil(size / sides) - 1).bit_length()
                pool[buffer] = max(pool.get(buffer, 0), sides)
        buffers = _POOLED * sum(size * count for size, count in pool.items())
        lengths = (
            max(b - a for a, b in split(n, parts, stride))
            for n, parts, stride in zip(work.image, grid, work.reach.stride)
        )
        share = math.prod(lengths) / math.prod(work.image)
        sizes = TileSizes(
            tuple(stored), tuple(frames), tuple(read), tuple(cut), tuple(between), share, buffers
        )
        return TileWork(tuple(shares), tuple(halos), tuple(owned), tuple(copies), sizes)

    def _find_exchange_points(self, beyond: frozenset[int], exchange: str) -> frozenset[int]:
        return frozenset(exchange_points(self.work.graph, beyond, exchange))

    def _find_borders(self, dim: int, parts: int) -> TileBorders:
        """Return the borders of the slowest of ``parts`` tiles along a dim, on all feature maps."""
        if (alike := self._dims_alike[dim]) != dim:
            return self._borders(alike, parts)
        n, stride = self.work.image[dim], self.work.reach.stride[dim]
        ends = [b for _, b in split(n, parts, stride)]
        every = TileBorders.of_image(self.work.graph, dim, n, [0, *ends])
        return every.only(_largest(every.maps[0][1]))

    @cached_property
    def _dims_alike(self) -> list[int]:
        """For each dim, the index of the first dim with the same image size, stride and layers."""
        dims, graph = range(len(self.work.image)), self.work.graph
        facts = [
            (self.work.image[dim], self.work.reach.stride[dim], [node.along(dim) for node in graph])
            for dim in dims
        ]
        return [facts.index(fact) for fact in facts]

    def slowest_tile(self, grid: Size) -> int:
        """Return the index of the slowest tile of a grid, in row-major order."""
        number, image = 0, self.work.image
        for n, parts, stride in zip(image, grid, self.work.reach.stride):
            ends = [b for _, b in split(n, parts, stride)]
            number = number * parts + _largest([0, *ends])
        return number

    def least_share(self, grid: Size) -> float:
        """Return a lower bound of the share that a grid's slowest tile has of any feature map.

        The share is the number of the tile's cells as a fraction of all cells of the map.
        """
        return math.prod(self._least_part(dim, parts) for dim, parts in enumerate(grid))

    def _find_least_part(self, dim: int, parts: int) -> float:
        """Return a lower bound of the fraction of a dim that the slowest tile of a grid has.

        The bound holds for all feature maps. The dim is cut into ``parts`` tiles.
        """
        if parts == 1:
            return 1.0
        n, stride = self.work.image[dim], self.work.reach.stride[dim]
        ranges = split(n, parts, stride)
        a, b = ranges[_largest([0, *(b for _, b in ranges)])]
        return (b - a) // stride * stride / (n + stride)


class _Parts:
    """Tensors of a tile that are parts of larger tensors, and the copies that follow from them.

    A layer may read a part of a tensor, or its result may be a part of what its kernel computes. A
    convolution first copies such an input, forward and backward. In the backward pass, the gradient
    of a part is extended with zeros to the whole tensor.

    Args:
        tensors: the tensors of the network.
    """

    def __init__(self, tensors: NetworkTensors):
        self._layers = tensors.layers
        self._parts: set[int] = set()  # tensors that are a part of a larger one

    def copied(
        self, number: int, read: tuple[float, float] | None, made: tuple[float, float]
    ) -> tuple[float, float]:
        """Return the bytes that a layer's forward and backward pass read and write in copies.

        It must be called for all layers in their order.

        Args:
            number: the index of the layer.
            read: bytes of the layer's input, and of the tensor that it is a part of; None if the
                layer gets a new tensor from a halo exchange.
            made: bytes of the layer's result, and of all that its kernel computes.
        """
        layer, forward, backward = self._layers[number], 0.0, 0.0
        if read is not None:
            part, whole = read
            if layer.convolves and (part < whole or layer.inputs[0] in self._parts):
                forward, backward = 2 * part, 2 * part
            if part < whole and layer.inputs[0]:
                backward += whole + 2 * part
        result, computed = made
        if result < computed:
            self._parts.add(layer.result)
            backward += computed + 2 * result
        return forward, backward


def _stored(cells: TileCells, n: int, m: int, exchanged: bool) -> int:
    """Return the length along a dim of the tensor that a layer's kernel computes, in cells.

    The layer's result may be a part of this tensor. A convolution whose input needs padding only on
    one side pads both sides, and an up-sampling repeats whole cells.

    Args:
        cells: the cells that the tile reads and computes along the dim.
        n, m: the cells of the whole input and of the whole result.
        exchanged: True if a halo exchange before the layer also adds the layer's padding.
    """
    most = max(cells.output, -(-cells.input * m // n)) if m > n else cells.output
    return most + (0 if exchanged or m > n else abs(cells.before - cells.after))


def _between(part: Sequence[int], available: Sequence[int]) -> float:
    """Return the cells of a temporary gradient, if a layer reads only a part of a feature map.

    PyTorch extends the part's gradient to the map dim by dim, the first dim last. The result is the
    size of the gradient before this last extension. It is 0 if the part is smaller than the map
    along one dim only, or not at all.

    Args:
        part: the cells that the layer reads along each dim.
        available: the cells of the map that the tile holds along each dim.
    """
    smaller = [dim for dim, (a, b) in enumerate(zip(part, available)) if a < b]
    if len(smaller) < 2:
        return 0.0
    first = smaller[0]
    return math.prod(available) * part[first] / available[first]


def _framed(cells: TileCells, fuses: bool) -> int:
    """Return the length along a dim of a layer's input after the halo exchange, in cells.

    The exchange also adds the padding, unless a convolution's kernel pads both sides equally.

    Args:
        cells: the cells that the tile reads and computes along the dim.
        fuses: True if the layer is a convolution that is computed together with the exchange.
    """
    if fuses and cells.before == cells.after:
        return cells.input
    return cells.input + cells.before + cells.after


def _largest(borders: Sequence[int]) -> int:
    """Return the index of the longest tile along a dim.

    If the dim has more than two tiles, only the inner tiles are considered, because they have a
    halo on both sides.

    Args:
        borders: the positions of tile borders, from 0 to the size of the image.
    """
    lengths = [b - a for a, b in zip(borders, borders[1:])]
    inner = range(1, len(lengths) - 1) if len(lengths) > 2 else range(len(lengths))
    return max(inner, key=lambda i: lengths[i])
