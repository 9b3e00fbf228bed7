"""Choose the size of streamed tiles so that a step stays within a memory budget.

The peak memory of a segment on one tile is counted layer by layer: the results that autograd
keeps, the gradients in flight, and the copies that a convolution's kernel makes. Among the tile
sizes that fit the budget, the planner takes the one with the lowest estimated time, so windows
overlap little. benchmarks/streaming.py compares the count with measured peaks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import nn

from distseg.comm.launch import LARGE_BLOCK, raise_jointly
from distseg.config.sizes import Size
from distseg.layers.norm import NORMS
from distseg.models.layers import Join, Pop, Stash
from distseg.runtime.kept_graphs import Weighed
from distseg.tiling.graph import Graph, last_readings
from distseg.tiling.layout import Layout
from distseg.tiling.needs import needs_along
from distseg.tiling.segment import Segment, TilePlan, tile_plan
from distseg.tiling.tile import Box

_CONVS = nn.modules.conv._ConvNd
_FREE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, Stash)
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def budget_of(memory: int, base: int, what: str) -> float:
    """Return the bytes of ``memory`` that activations may take in a process of ``base`` bytes.

    Args:
        memory: the value of ``streaming.memory`` in bytes.
        base: bytes that the process takes before any tile is computed.
        what: a description of what ``base`` consists of, for the error message.

    Raises:
        ValueError: ``base`` is at least ``memory``.
    """
    if memory <= base:
        raise ValueError(
            f"streaming.memory is {memory / 1e6:.0f} MB, but a process with {what} takes "
            f"{base / 1e6:.0f} MB already: give {(base + _BESIDES) / 1e6:.0f} MB or more"
        )
    return max(_SURE * (memory - base - _KEPT), (memory - base) / _RISES)


def smallest_budget(memory: int, base: int, what: str, comm) -> float:
    """Return the number of bytes that activations may take, the same on every rank of ``comm``.

    Each rank computes how many bytes its activations may take (:func:`budget_of`). The smallest of
    these numbers is returned on all ranks. All ranks of ``comm`` must call this function together.

    Args:
        memory: the value of ``streaming.memory`` in bytes.
        base: bytes that this rank's process takes before any tile is computed.
        what: a description of what ``base`` consists of, for the error message.
        comm: the communicator of the ranks.

    Raises:
        JointFailure: the process of some rank takes ``memory`` bytes or more before any tile.
    """
    most = max(comm.allgather(base))
    with raise_jointly(comm):
        budget = budget_of(memory, most, what)
    return budget


def memory_warnings(memory: int | None, base: float) -> list[str]:
    """Return a note for the user if a process of ``base`` bytes may exceed its memory limit.

    Kernels and gaps of the allocator take up to ``_BESIDES`` bytes besides ``base``. If ``memory``
    has room for these bytes, the list is empty.

    Args:
        memory: the value of ``streaming.memory`` in bytes; None without a limit.
        base: bytes that the process takes before any tile is computed.
    """
    if memory is None or memory - base >= _BESIDES:
        return []
    return [
        f"note: streaming.memory is {memory / 1e6:.0f} MB, and this process takes "
        f"{base / 1e6:.0f} MB before any tile; kernels and the allocator's gaps take up to "
        f"{_BESIDES / 1e6:.0f} MB more: give {math.ceil((base + _BESIDES) / 1e6)} MB to stay "
        "within the limit"
    ]


def short_of_decoding(memory: int | None, base: float, image: str, decoding: int) -> list[str]:
    """Return a note if decoding ``image`` may take more than ``memory``, else an empty list.

    This concerns image formats that can only be decoded as a whole.

    Args:
        memory: the value of ``streaming.memory`` in bytes.
        base: bytes that the process takes before decoding.
        image: the name of the image.
        decoding: bytes that decoding takes; 0 if the image can be read in parts.
    """
    if memory is None or not decoding or base + decoding + _DECODER <= memory:
        return []
    enough = base + decoding + _DECODER + _VARIES
    return [
        f"note: streaming.memory is {memory / 1e6:.0f} MB, but {image} can only be decoded whole, "
        f"which takes {decoding / 1e6:.0f} MB for a while beside the {base / 1e6:.0f} MB of this "
        f"process: give {enough / 1e6:.0f} MB, or convert it to tiled TIFF or npy, which are read "
        "in parts"
    ]


_VARIES = 15e6  # bytes by which the base memory differs from process to process
_DECODER = 25e6  # bytes of the decoder's code and of a strip that is copied from its buffer
_BESIDES = 150e6  # bytes that kernels and allocator gaps take even with the smallest tiles
# Bytes of allocator blocks too fragmented to be used, and of kernel workspaces
# (benchmarks/streaming.py).
_KEPT = 300e6
_SURE = 0.8  # share of the remaining bytes that activations may take
_RISES = 4  # at most this many bytes of streaming.memory are needed for one byte of the budget


@dataclass(frozen=True)
class Activations:
    """Memory model of a network's segments (layers between two stored maps) on streamed tiles.

    Args:
        graph: the network's graph of layers.
        kinds: the class of each layer of the plain model. It decides which results autograd keeps.
        channels: the channels of each feature map, by tensor id
            (:func:`distseg.models.network.channels_of_maps`).
        itemsize: bytes of a value in the network.
        pixel: bytes of a value of the image as it is read from a file.
        last: True if the memory format is channels_last. Otherwise convolutions copy their input
            and their output into another memory format.
    """

    graph: Graph
    kinds: Sequence[type]
    channels: Sequence[int]
    itemsize: int
    pixel: int
    last: bool
    graph_kept: bool = True
    """True if autograd keeps results for a backward pass."""

    def peak_bytes(self, boxes: TilePlan, images: int) -> float:
        """Return the bytes of all tensors of a segment at the peak of a pass on one tile.

        The pass is the backward pass, or the forward pass if autograd keeps no graph.

        Args:
            boxes: the boxes that the segment's layers read and compute for this tile.
            images: the number of images of the tile.
        """
        segment = boxes.segment
        if not self.graph_kept:
            return self._forward(boxes, images)
        result, under_way = boxes.output_cells[-1], 0.0
        for number, input_cells, output_cells in zip(
            segment.nodes, boxes.input_cells, boxes.output_cells
        ):
            made = self._bytes(number + 1, output_cells, images)
            reordered = not self.last and issubclass(self.kinds[number], _CONVS)
            read = self._bytes(self.graph[number].first, input_cells, images)
            under_way = max(under_way, (1 + reordered) * (made + read))
        if segment.result == self.graph.result:
            # The loss with its labels.
            under_way += (6 * self.channels[-1] * max(4, self.itemsize) + 16) * images * result
        gradients = sum(
            self._bytes(source, box.pixels, images)
            for source, box in boxes.read.items()
            if source != 0
        )
        output = self._bytes(segment.result, result, images)
        return self.kept(boxes, images) + gradients + under_way + output

    def kept(self, boxes: TilePlan, images: int) -> float:
        """Return the bytes that a segment holds between its two passes on one tile.

        Args:
            boxes: the boxes that the segment's layers read and compute for this tile.
            images: the number of images of the tile.
        """
        total: float = sum(
            images * self.channels[0] * box.pixels * self.pixel
            if source == 0
            else self._bytes(source, box.pixels, images)
            for source, box in boxes.read.items()
        )
        for number, output_cells in zip(boxes.segment.nodes, boxes.output_cells):
            made = self._bytes(number + 1, output_cells, images)
            total += 0 if self._kept_otherwise(number) else made
            if issubclass(self.kinds[number], _POOLS):
                total += made * 8 / self.itemsize  # indices of the maxima
        return total

    def weigh(self, boxes: TilePlan, images: int) -> Weighed:
        """Return how many bytes a segment takes for one tile, between its passes and at the peak.

        The two numbers are computed by :meth:`kept` and :meth:`peak_bytes`.

        Args:
            boxes: the boxes that the segment's layers read and compute for this tile.
            images: the number of images of the tile.
        """
        return Weighed(self.kept(boxes, images), self.peak_bytes(boxes, images))

    def _forward(self, boxes: TilePlan, images: int) -> float:
        """Return the bytes at the peak of a forward pass on one tile, without a backward pass."""
        numbers = boxes.segment.nodes
        frees = last_readings([node.inputs for node in self.graph], numbers)
        there: dict[int, float] = {}
        most = 0.0
        for number, input_cells, output_cells in zip(
            numbers, boxes.input_cells, boxes.output_cells
        ):
            node = self.graph[number]
            reordered = not self.last and issubclass(self.kinds[number], _CONVS)
            for source in node.inputs:
                if source in boxes.read:
                    there[source] = self._bytes(source, boxes.read[source].pixels, images)
            stashes = issubclass(self.kinds[number], Stash)
            made = 0.0 if stashes else self._bytes(number + 1, output_cells, images)
            read = self._bytes(node.first, input_cells, images)
            most = max(most, sum(there.values()) + made + reordered * (read + made))
            there[number + 1] = made
            for source in frees[number]:
                del there[source]
        return most

    def _bytes(self, source: int, cells: int, images: int) -> int:
        return images * self.channels[source] * cells * self.itemsize

    def bytes_of(self, tensor_id: int, box: Box, images: int) -> int:
        """Return the bytes of the part ``box`` of a stored feature map, for ``images`` images."""
        return self._bytes(tensor_id, box.pixels, images)

    def _kept_otherwise(self, number: int) -> bool:
        """Return True if the result of layer ``number`` takes no memory of its own.

        Either the result lies in the memory of the layer's input, or one fused call computes the
        layer together with the norm before the layer (distseg.runtime.swap_layers).
        """
        if issubclass(self.kinds[number], _FREE):
            return True
        before = self.graph[number].first - 1
        while before >= 0 and issubclass(self.kinds[before], _FREE):
            before = self.graph[before].first - 1
        return (
            before >= 0
            and issubclass(self.kinds[number], _ACTIVATIONS)
            and issubclass(self.kinds[before], (*NORMS, _CONVS, Pop, Join))
        )


@dataclass(frozen=True)
class GridTiling:
    """Tile sizes that follow from a fixed number of tiles along each dim, equal for all segments.

    A call returns the size of a tile in cells of the segment's result.

    Attributes:
        grid: the number of tiles along each dim.
    """

    grid: Sequence[int]

    def __call__(self, layout: Layout, segment: Segment, result: Box, images: int) -> list[int]:
        return [-(-n // min(g, n)) for g, n in zip(self.grid, result.size)]


def computed_again(layout: Layout, segments: Sequence[Segment], tiling: GridTiling) -> list[float]:
    """Return for each layer how often a cell of its result is computed, on average over the cells.

    Overlapping windows compute some cells more than once, so this number may be above 1.

    Args:
        layout: the layers on a rank's part of the image.
        segments: the segments of the network.
        tiling: the grid of streamed tiles.
    """
    graph, cells = layout.graph, [0] * len(layout.graph)
    for segment in segments:
        result = layout.sizes[segment.result]
        made = [1] * len(segment.nodes)
        for dim, (n, step) in enumerate(zip(result, tiling(layout, segment, Box.whole(result), 1))):
            spans = [(a, min(a + step, n)) for a in range(0, n, step)]
            needs, _ = needs_along(
                graph, segment.nodes, dim, [size[dim] for size in layout.sizes], spans
            )
            made = [m * sum(b - a for a, b in need.output) for m, need in zip(made, needs)]
        for number, m in zip(segment.nodes, made):
            cells[number] += m
    return [m / math.prod(layout.sizes[number + 1]) for number, m in enumerate(cells)]


@dataclass(frozen=True)
class SizeTiling:
    """Tile sizes that cover about ``tile`` pixels of the image in every segment.

    A call returns the size of a tile in cells of the segment's result. Tiles consist of whole rows,
    unless these would be fewer than ``_THIN`` rows. A tile of whole rows reads and writes parts of
    feature maps that are contiguous in memory.

    Attributes:
        tile: the size of a tile in pixels of the image, along each dim.
    """

    tile: Sequence[int]

    def __call__(self, layout: Layout, segment: Segment, result: Box, images: int) -> list[int]:
        size = [
            min(max(1, round(t * m / n)), r)
            for t, m, n, r in zip(
                self.tile, layout.sizes[segment.result], layout.image, result.size
            )
        ]
        rows = math.prod(size) // math.prod(result.size[1:])
        return [rows, *result.size[1:]] if rows >= min(_THIN, size[0]) else size


_THIN = 32  # number of rows below which the windows of such tiles would overlap too much


class BudgetTiling:
    """Tile sizes that stay within ``budget`` bytes and take the least estimated time.

    A call returns the size of a tile in cells of the segment's result. If the budget allows, each
    side is a multiple of the cells that one cell of the segment's coarsest feature map covers. Then
    all windows have one size. So PyTorch reuses freed memory, and the kernels that it has chosen
    for this size.

    Args:
        activations: the memory model of the network.
        budget: the largest peak bytes of a tile.

    Raises:
        ValueError: when called, if not even a tile of a few cells fits.
    """

    def __init__(self, activations: Activations, budget: float):
        self.activations, self.budget = activations, budget
        self._found: dict[tuple, tuple[int, ...]] = {}

    def __call__(
        self, layout: Layout, segment: Segment, result: Box, images: int
    ) -> tuple[int, ...]:
        key = tuple(layout.image), segment.nodes, result, images
        if key not in self._found:
            self._found[key] = self._size(layout, segment, result, images)
        return self._found[key]

    def _size(self, layout: Layout, segment: Segment, result: Box, images: int) -> tuple[int, ...]:
        """Return the tile size that fits the budget and takes the least estimated time."""

        @cache
        def judged(size: tuple[int, ...]) -> tuple[float, float]:
            return self._judge(layout, segment, result, size, images)

        least = tuple(min(n, _LEAST) for n in result.size)
        if judged(least)[0] == math.inf:
            taken = self.activations.peak_bytes(
                tile_plan(layout, segment, _middle(result, least)), images
            )
            more = math.ceil(_RISES * (taken - self.budget) / 1e6)
            raise ValueError(
                f"{self.budget / 1e6:.1f} MB of streaming.memory are left beside the weights and "
                f"the process itself, but layers {segment.nodes[0]} to {segment.nodes[-1]} need "
                f"{taken / 1e6:.1f} MB on a tile of {Size(least)} cells: raise streaming.memory by "
                f"{more} MB"
            )
        coarsest = [
            min(layout.sizes[layout.graph[number].first][dim] for number in segment.nodes)
            for dim in range(len(result.size))
        ]
        steps = [max(1, round(n / c)) for n, c in zip(layout.sizes[segment.result], coarsest)]
        conditions = [
            lambda size, most=most: judged(size)[0] <= most for most in (_PAGED, _FAR, 1.0)
        ]

        def largest(steps: Sequence[int]) -> list[tuple[int, ...]]:
            sizes = [
                _with_rows(rows, result.size, least, steps, fits)
                for fits in conditions
                for rows in _counts(result.size[0])
            ]
            return [size for size in sizes if size]

        found = largest(steps) or largest([1] * len(steps))
        return min(found, key=lambda size: judged(size)[1])

    def _judge(
        self, layout: Layout, segment: Segment, result: Box, size: Sequence[int], images: int
    ) -> tuple[float, float]:
        """Return (slowdown, time) of a segment if tiles of its result have ``size`` cells.

        The slowdown is the factor by which large tensors slow the memory traffic: 1.0, ``_FAR``,
        ``_PAGED``, or infinity if the tile does not fit the budget. The time is an estimate for
        all tiles of the image. Its unit is the time that reading or writing one value takes.

        Args:
            layout: the layout of the image.
            segment: the segment.
            result: the box of the segment's result that is cut into tiles.
            size: the number of cells of a tile along each dim.
            images: the number of images of a tile.
        """
        activations, boxes = self.activations, tile_plan(layout, segment, _middle(result, size))
        total = activations.peak_bytes(boxes, images)
        firsts = [layout.graph[number].first for number in segment.nodes]
        cells = [
            *zip(firsts, boxes.input_cells),
            *(
                (number + 1, output_cells)
                for number, output_cells in zip(segment.nodes, boxes.output_cells)
            ),
        ]
        largest = max(
            images * activations.channels[source] * count * activations.itemsize
            for source, count in cells
        )
        costs = _THERE_AND_BACK if activations.graph_kept else _THERE
        near = max(costs.near, costs.share * self.budget)
        if total > self.budget:
            slow = math.inf
        elif total <= near:
            slow = 1.0
        else:
            slow = _FAR if largest <= _REUSED and total <= _CACHED else _PAGED
        traffic = sum(
            activations.channels[source] * input_cells
            for source, input_cells in zip(firsts, boxes.input_cells)
        )
        # Whole rows are contiguous on the disk, and their windows have one size.
        whole_rows = size[1:] == result.size[1:]
        count = math.prod(-(-n // s) for n, s in zip(result.size, size))
        runs = (
            0
            if whole_rows
            else math.prod(size[:-1])
            * (1 if activations.last else activations.channels[segment.result])
        )
        return slow, count * (
            traffic * slow * (1.0 if whole_rows else costs.cut) + costs.each + runs * costs.run
        )


def _middle(result: Box, size: Sequence[int]) -> Box:
    """Return the tile in the middle of ``result``, which has the most neighbours.

    Args:
        result: the box that is cut into tiles.
        size: the number of cells of a tile along each dim.
    """
    starts = [
        a + (-(-(b - a) // s) - 1) // 2 * s for a, b, s in zip(result.start, result.stop, size)
    ]
    return Box(tuple(starts), tuple(min(a + s, b) for a, b, s in zip(starts, result.stop, size)))


@dataclass(frozen=True)
class _Costs:
    """Constants of the time estimate by which tile sizes are compared.

    Attributes:
        near: bytes of a tile's tensors up to which its time is in proportion to its size. Above,
            the tile is slower, because the allocator's memory has larger gaps.
        share: fraction of the budget that replaces ``near`` if this fraction is more bytes.
        cut: factor on the time of tiles that are not whole rows.
        run: cost of reading or writing one run of contiguous values on the disk. The unit is the
            time that reading or writing one value in memory takes.
        each: fixed cost of one tile, in the same unit as ``run``.
    """

    near: float
    share: float
    cut: float
    run: float
    each: float


_THERE_AND_BACK = _Costs(near=48e6, share=1 / 8, cut=1.3, run=0, each=1e6)
# Small tiles, so that the memory of the process hardly depends on the image's size.
_THERE = _Costs(near=16e6, share=0, cut=1.0, run=4e3, each=2e5)
_CACHED = 256e6  # bytes of a tile's tensors up to which the slowdown is _FAR and not _PAGED
# Bytes of a tensor up to which the allocator reuses its memory (launch.keep_freed_memory).
_REUSED = LARGE_BLOCK - 2**16
_FAR = 1.2  # slowdown of tiles above `near` whose tensors get memory that the allocator reuses
# Slowdown of even larger tiles, whose tensors get new memory pages in every layer.
_PAGED = 1.5
_LEAST = 8  # smallest side of a tile in cells


def _counts(most: int) -> list[int]:
    """Return rising numbers from 1 to ``most``, each at most a quarter or 1 above the last."""
    found, n = [], 1
    while n < most:
        found.append(n)
        n = max(n + 1, n * 5 // 4)
    return [*found, most]


def _with_rows(
    rows: int, whole: Sequence[int], least: Sequence[int], steps: Sequence[int], fits
) -> tuple[int, ...] | None:
    """Return the largest tile size that fits if the first dim is cut into ``rows`` parts.

    All other dims are cut into one common number of parts, the smallest that fits. Return None if
    no size fits.

    Args:
        whole: the size to cut.
        least: the smallest side of a tile along each dim.
        steps: for each dim, the number of which the side of a tile must be a multiple.
        fits: function that returns True if tiles of a size can be used.
    """

    def size(cuts: int) -> tuple[int, ...]:
        parts = (rows, *(cuts for _ in whole[1:]))
        sides = []
        for n, count, step, smallest in zip(whole, parts, steps, least):
            side = -(-n // count)
            sides.append(min(max(-(-side // step) * step, smallest), n))
        return tuple(sides)

    low, high = 0, max(whole[1:], default=1)
    if not fits(size(high)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(size(middle)) else (middle, high)
    return size(high)
