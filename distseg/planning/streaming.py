"""How a rank's part of an image is cut into streamed tiles so that a step stays within a budget of memory.

What a segment takes on a tile, at its worst moment, is counted layer by layer: the results that autograd keeps, the
gradients under way, what a convolution's kernel wants besides. The grid then is the one of those that fit whose
windows overlap least. benchmarks/streaming.py holds the count against measured peaks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Callable, Sequence

from torch import nn

from distseg.comm.launch import LARGE_BLOCK, raise_jointly
from distseg.config.settings import Config
from distseg.config.sizes import Size
from distseg.layers.norm import NORMS
from distseg.models.layers import Join, Pop, Stash
from distseg.runtime.kept_graphs import Weighed
from distseg.tiling.graph import Graph, last_readings
from distseg.tiling.layout import Layout
from distseg.tiling.needs import needs_along
from distseg.tiling.segment import Chain, Segment, chain
from distseg.tiling.tile import Box

_CONVS = nn.modules.conv._ConvNd
_FREE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, Stash)
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def is_streamed(config: Config) -> bool:
    """Whether ranks compute tile after tile by :mod:`distseg.runtime.streaming`."""
    return config.spatial.streaming in ("recompute", "offload") or (
        config.spatial.streaming == "auto" and config.run.memory is not None
    )


def budget_of(memory: int, base: int, what: str) -> float:
    """The bytes that activations may take of ``memory`` where a process takes ``base`` besides.

    Args:
        what: the process holds, for the error.

    Raises:
        ValueError: nothing is left.
    """
    if memory <= base:
        raise ValueError(
            f"run.memory is {memory / 1e6:.0f} MB, but a process with {what} takes {base / 1e6:.0f} MB already: give {(base + _BESIDES) / 1e6:.0f} MB or more"
        )
    return max(_SURE * (memory - base - _KEPT), (memory - base) / _RISES)


def room_of(memory: int, base: int, what: str, comm) -> float:
    """The same where least is left on any rank of ``comm``. Collective.

    Raises:
        JointFailure: nothing is left on some rank.
    """
    most = max(comm.allgather(base))
    with raise_jointly(comm):
        room = budget_of(memory, most, what)
    return room


def short_of_room(memory: int | None, base: float) -> list[str]:
    """What to tell before work whose peak may be above ``memory``, where a process takes ``base`` before any tile is computed."""
    if memory is None or memory - base >= _BESIDES:
        return []
    return [
        f"note: run.memory is {memory / 1e6:.0f} MB, and this process takes {base / 1e6:.0f} MB before any tile; kernels and the allocator's gaps take up to {_BESIDES / 1e6:.0f} MB besides: give {(base + _BESIDES) / 1e6:.0f} MB to stay within it"
    ]


def short_of_decoding(memory: int | None, base: float, image: str, decoding: int) -> list[str]:
    """The same where an ``image`` can only be decoded whole, which takes ``decoding`` bytes before anything is computed."""
    if memory is None or not decoding or base + decoding + _DECODER <= memory:
        return []
    return [f"note: run.memory is {memory / 1e6:.0f} MB, but {image} can only be decoded whole, which takes {decoding / 1e6:.0f} MB for a while beside the {base / 1e6:.0f} MB of this process: "
            f"give {(base + decoding + _DECODER + _VARIES) / 1e6:.0f} MB, or convert it to tiled TIFF or npy, which are read in parts"]  # fmt: skip


_VARIES = 15e6  # bytes by which the next process may be larger
_DECODER = 25e6  # bytes of the decoder's code and of a strip that is taken over from it
_BESIDES = 150e6  # bytes, measured where tiles are as small as they get
_KEPT = 300e6  # bytes that the allocator keeps in blocks that nothing fits into, and kernels take besides (benchmarks/streaming.py)
_SURE = 0.8  # of the rest
_RISES = 4  # bytes of run.memory for a byte of the budget, at most


@dataclass(frozen=True)
class Activations:
    """What tiles of a model's segments take.

    Args:
        kinds: of the plain model's layers, by which it is told which results are kept.
        channels: of the maps (:func:`distseg.models.network.channels_of_maps`).
        itemsize: bytes of a value in the network; ``pixel``: of one as it is read.
        last: whether channels come last; else convolutions reorder what they are given.
    """

    graph: Graph
    kinds: Sequence[type]
    channels: Sequence[int]
    itemsize: int
    pixel: int
    last: bool
    graph_kept: bool = True
    """Whether autograd keeps results for a backward pass."""

    def of(self, way: Chain, images: int) -> float:
        """Bytes at the worst moment of a segment's backward pass on a tile of ``images`` images; without a graph, of its forward pass."""
        segment = way.segment
        values = lambda source, cells: images * self.channels[source] * cells * self.itemsize
        if not self.graph_kept:
            return self._forward(way, values)
        result, under_way = way.makes[-1], 0.0
        for number, takes, makes in zip(segment.nodes, way.takes, way.makes):
            made = values(number + 1, makes)
            reordered = 0 if self.last or not issubclass(self.kinds[number], _CONVS) else 1
            under_way = max(
                under_way, (1 + reordered) * (made + values(self.graph[number].first, takes))
            )
        if segment.result == self.graph.result:
            under_way += (
                (6 * self.channels[-1] * max(4, self.itemsize) + 16) * images * result
            )  # the loss, with labels
        gradients = sum(
            values(source, box.pixels) for source, box in way.read.items() if source != 0
        )
        return self.kept(way, images) + gradients + under_way + values(segment.result, result)

    def kept(self, way: Chain, images: int) -> float:
        """Bytes that a tile holds between its forward and its backward pass."""
        values = lambda source, cells: images * self.channels[source] * cells * self.itemsize
        total = sum(
            images * self.channels[0] * box.pixels * self.pixel
            if source == 0
            else values(source, box.pixels)
            for source, box in way.read.items()
        )
        for number, makes in zip(way.segment.nodes, way.makes):
            made = values(number + 1, makes)
            total += 0 if self._kept_otherwise(number) else made
            if issubclass(self.kinds[number], _POOLS):
                total += made * 8 / self.itemsize  # indices
        return total

    def weigh(self, way: Chain, images: int) -> Weighed:
        return Weighed(self.kept(way, images), self.of(way, images))

    def _forward(self, way: Chain, values: Callable[[int, int], float]) -> float:
        numbers = way.segment.nodes
        frees = last_readings([node.inputs for node in self.graph], numbers)
        there: dict[int, float] = {}
        most = 0.0
        for number, takes, makes in zip(numbers, way.takes, way.makes):
            node, reordered = (
                self.graph[number],
                0 if self.last or not issubclass(self.kinds[number], _CONVS) else 1,
            )
            there.update(
                {
                    source: values(source, way.read[source].pixels)
                    for source in node.inputs
                    if source in way.read
                }
            )
            made = 0.0 if issubclass(self.kinds[number], Stash) else values(number + 1, makes)
            most = max(
                most, sum(there.values()) + made + reordered * (values(node.first, takes) + made)
            )
            there[number + 1] = made
            for source in frees[number]:
                del there[source]
        return most

    def bytes_of(self, position: int, box: Box, images: int) -> int:
        """Of a part of a map, as it is stored."""
        return images * self.channels[position] * box.pixels * self.itemsize

    def _kept_otherwise(self, number: int) -> bool:
        """Whether a layer's result is its input's memory, or computed together with the norm before it (distseg.runtime.parallelize)."""
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
    """The same grid of tiles for every segment."""

    grid: Sequence[int]

    def __call__(self, layout: Layout, segment: Segment, result: Box, images: int) -> list[int]:
        return [-(-n // min(g, n)) for g, n in zip(self.grid, result.size)]


def computed_again(layout: Layout, segments: Sequence[Segment], tiling: GridTiling) -> list[float]:
    """Of each layer: the cells that all tiles of an image compute, over those of its result."""
    graph, cells = layout.graph, [0] * len(layout.graph)
    for segment in segments:
        result = layout.sizes[segment.result]
        made = [1] * len(segment.nodes)
        for dim, (n, step) in enumerate(zip(result, tiling(layout, segment, Box.whole(result), 1))):
            spans = [(a, min(a + step, n)) for a in range(0, n, step)]
            needs, _ = needs_along(
                graph, segment.nodes, dim, [size[dim] for size in layout.sizes], spans
            )
            made = [m * sum(b - a for a, b in need.made) for m, need in zip(made, needs)]
        for number, m in zip(segment.nodes, made):
            cells[number] += m
    return [m / math.prod(layout.sizes[number + 1]) for number, m in enumerate(cells)]


@dataclass(frozen=True)
class SizeTiling:
    """Tiles of about the same part of the image for every segment, as many pixels as ``tile`` has; whole rows where these are not too thin,
    as what a tile reads and writes of a map then lies side by side."""

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


_THIN = 32  # rows below which a strip's windows would overlap too much


class BudgetTiling:
    """For every segment the tiles that stay within ``budget`` bytes and whose windows overlap least.

    Their size is a multiple of what a cell of the segment's coarsest map covers, where that fits: windows then are of one
    size, for which memory that is free again, and kernels that were made, serve once more.

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
        @cache
        def judged(size: tuple[int, ...]) -> tuple[float, float]:
            return self._judge(layout, segment, result, size, images)

        least = tuple(min(n, _LEAST) for n in result.size)
        if judged(least)[0] == math.inf:
            taken = self.activations.of(chain(layout, segment, _middle(result, least)), images)
            raise ValueError(
                f"of run.memory {self.budget / 1e6:.1f} MB are left beside the weights and the process itself, but layers {segment.nodes[0]} to "
                f"{segment.nodes[-1]} take {taken / 1e6:.1f} MB on a tile of {Size(least)} cells: give {math.ceil(_RISES * (taken - self.budget) / 1e6)} MB more"
            )
        coarsest = [
            min(layout.sizes[layout.graph[number].first][dim] for number in segment.nodes)
            for dim in range(len(result.size))
        ]
        steps = [max(1, round(n / c)) for n, c in zip(layout.sizes[segment.result], coarsest)]
        conditions = [
            lambda size, most=most: judged(size)[0] <= most for most in (_PAGED, _FAR, 1.0)
        ]
        largest = lambda steps: [
            _with_rows(rows, result.size, least, steps, fits)
            for fits in conditions
            for rows in _counts(result.size[0])
        ]
        found = [*filter(None, largest(steps))] or filter(None, largest([1] * len(steps)))
        return min(found, key=lambda size: judged(size)[1])

    def _judge(
        self, layout: Layout, segment: Segment, result: Box, size: Sequence[int], images: int
    ) -> tuple[float, float]:
        """Of tiles of a size: how many times longer a value takes for the tensors' size, without end where they do not fit; and about the time of all tiles."""
        activations, way = self.activations, chain(layout, segment, _middle(result, size))
        total, firsts = (
            activations.of(way, images),
            [layout.graph[number].first for number in segment.nodes],
        )
        cells = [
            *zip(firsts, way.takes),
            *((number + 1, makes) for number, makes in zip(segment.nodes, way.makes)),
        ]
        largest = max(
            images * activations.channels[source] * count * activations.itemsize
            for source, count in cells
        )
        costs = _THERE_AND_BACK if activations.graph_kept else _THERE
        near = max(costs.near, costs.share * self.budget)
        slow = (
            math.inf
            if total > self.budget
            else 1.0
            if total <= near
            else _FAR
            if largest <= _REUSED and total <= _CACHED
            else _PAGED
        )
        traffic = sum(
            activations.channels[source] * takes for source, takes in zip(firsts, way.takes)
        )
        whole_rows = (
            size[1:] == result.size[1:]
        )  # these lie side by side on the disk, and their windows are of one size
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
    """The tile in the middle, with neighbours on all sides where there are some."""
    starts = [
        a + (-(-(b - a) // s) - 1) // 2 * s for a, b, s in zip(result.start, result.stop, size)
    ]
    return Box(tuple(starts), tuple(min(a + s, b) for a, b, s in zip(starts, result.stop, size)))


@dataclass(frozen=True)
class _Costs:
    """What tells tilings from each other.

    Attributes:
        near: bytes of a tile's tensors up to which it is as fast as any; larger ones leave larger gaps in the memory, which count where it is short.
        share: of the budget, up to which it is the same where that is more.
        cut: how much longer tiles take that are not whole rows.
        run: values whose traffic takes as long as a row of such a tile on its way from or to the disk.
        each: the same for what comes with every tile.
    """

    near: float
    share: float
    cut: float
    run: float
    each: float


_THERE_AND_BACK = _Costs(near=48e6, share=1 / 8, cut=1.3, run=0, each=1e6)
_THERE = _Costs(
    near=16e6, share=0, cut=1.0, run=4e3, each=2e5
)  # tiles so small that the process hardly grows by them, whatever the image's size
_CACHED = 256e6  # bytes up to which they stay near the processor
_REUSED = (
    LARGE_BLOCK - 2**16
)  # bytes of a tensor up to which the allocator keeps its memory (launch.keep_freed_memory)
_FAR = 1.2  # how many times as much traffic is taken rather than larger tensors
_PAGED = 1.5  # how much longer yet larger ones take: they are new pages in every layer, which cheap layers feel most
_LEAST = 8  # cells a side that no tile goes below


def _counts(most: int) -> list[int]:
    """1, 2, 3, ... up to ``most``, in steps that grow."""
    found, n = [], 1
    while n < most:
        found.append(n)
        n = max(n + 1, n * 5 // 4)
    return [*found, most]


def _with_rows(
    rows: int, whole: Sequence[int], least: Sequence[int], steps: Sequence[int], fits
) -> tuple[int, ...] | None:
    """The largest tiles in so many rows that fit, other dims cut alike; None where none does."""
    round_up = lambda n, dim: min(max(-(-n // steps[dim]) * steps[dim], least[dim]), whole[dim])
    size = lambda cuts: tuple(
        round_up(-(-n // (cuts if dim else rows)), dim) for dim, n in enumerate(whole)
    )
    low, high = 0, max(whole[1:], default=1)
    if not fits(size(high)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(size(middle)) else (middle, high)
    return size(high)
