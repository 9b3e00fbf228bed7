"""Streamed tiles: a rank computes its part of an image tile after tile, in the memory of one, with the whole part's gradient.

Between the layers that need all of a feature map, which are the live norms, lie segments (:mod:`distseg.tiling.segment`).
Their borders are stored, in a scratch folder or in the host's memory. Forward, a segment is run on windows of the map before
it, tile by tile of its result, and the statistics of the next norm are collected on the way. Backward, a segment is run once
more on each window, now with a graph, and what reaches the window is added to the stored gradient of that map. The order is that of
the program (:mod:`distseg.runtime.tile_program`), whose operations are done here::

    forward      read window - norm act conv - write tile, moments           then: statistics over all tiles, all ranks
    backward     read gradient of the tile, read window - the same again - backward - add to gradient of the window
                                                                             then: what the statistics collected

Without live norms there is one segment, the whole network: nothing is stored but the image. In a pipeline each stage walks through
its own segments; maps that others read travel to them (:mod:`distseg.runtime.transfer`). Where its tiles go back while others go forward
(:mod:`distseg.runtime.interleaved`) they keep their graphs, as far as there is room (:mod:`distseg.runtime.kept_graphs`), and are computed once.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache
from typing import Callable, ContextManager, Iterator, Protocol, Sequence

import torch
from torch import Tensor

from distseg.comm.collective import Alone
from distseg.comm.launch import GapTrimmer
from distseg.comm.watch import heartbeat
from distseg.layers.local import cropped, run
from distseg.layers.norm import Pending
from distseg.models.layers import skip_store
from distseg.runtime.kept_graphs import Weighed, keeping, keeping_all
from distseg.runtime.offload import Map, VectorMap, check_room
from distseg.runtime.operations import (
    BackwardTile,
    Correct,
    Drop,
    DropGradient,
    Expect,
    ExpectGradient,
    Fetch,
    ForwardTile,
    GiveBack,
    Loss,
    Measure,
    OfTile,
    Operation,
    OutputTile,
    Send,
    SendGradient,
    Settle,
    Statistic,
)  # fmt: skip
from distseg.runtime.parallelize import TiledModel
from distseg.runtime.stored_halos import Borders
from distseg.runtime.tile_program import StagePlan, peak, whole
from distseg.runtime.transfer import Receiving, Sending, Transfers
from distseg.tiling.access_pattern import Span
from distseg.tiling.graph import Graph, last_readings
from distseg.tiling.layout import Layout, Part, Region
from distseg.tiling.needs import box_of
from distseg.tiling.segment import Chain, Segment, chain, rows_read, segments_of
from distseg.tiling.tile import Box, TilePlacement, boxes_of, strips
from distseg.tiling.tile_batch import LazyTileBatch

_LABELS = 1 << 20  # labels read at once
_PIXELS, _CELLS = (
    1 << 20,
    1 << 17,
)  # pixels, or cells of a map, read at once where no tile is computed
_CPU = torch.device("cpu")


class Sizes(Protocol):
    """What maps and tiles take, in bytes."""

    def bytes_of(self, position: int, box: Box, images: int) -> int:
        """Of a part of a map, as it is stored."""

    def kept(self, way: Chain, images: int) -> float:
        """Of what a tile holds between its forward and its backward pass."""

    def weigh(self, way: Chain, images: int) -> Weighed:
        """That, and more."""


class Tiling(Protocol):
    """How the result of a segment is cut into tiles."""

    def __call__(self, layout: Layout, segment: Segment, result: Box, images: int) -> Sequence[int]:
        """Cells of a tile along each dim; the last may be smaller."""


class StreamingExecutor:
    """The executor of a flat model on one rank, which runs all of it or some stages.

    Args:
        graph: of its layers (:func:`distseg.layers.graph.graph_of`).
        live: the numbers of norms that take statistics.
        layout: of an image on the mesh's tiles.
        folder: for stored maps; None: the host's memory.
        sizes: of maps and tiles.
        autocast: makes the context in which the network runs.
        devices: where the network runs; of each stage, where a rank has several.
        stages: the layers of each; ``placement``: the rank of each, in ``comm``, the pipeline's.
        returns: whether backward passes follow; else maps are let go of once they are read.
        trims: gives memory that is free again back to the system where tiles begin to be of another size, which takes some milliseconds.
        borders: moves the margins of maps, where the layout's tiles exchange any.
        room: bytes for a tile and those whose graphs wait for their backward pass; by default without end.

    Attributes:
        watch: told the share of a program that is done, now and then.
        span: makes the context of what is done, by kind and name, for those who watch (:mod:`distseg.runtime.trace`).
    """

    def __init__(
        self, model: TiledModel, graph: Graph, live: Sequence[int], layout: Callable[[Sequence[int]], Layout], tiling: Tiling, folder: str | None,
        sizes: Sizes, autocast: Callable[[], ContextManager], devices: Sequence[torch.device] = (_CPU,), stages: Sequence[range] = (),
        placement: Sequence[int] = (0,), comm=Alone(), returns: bool = True, trims: bool = True, borders: Borders | None = None,
        room: float | None = None,
    ):  # fmt: skip
        self.model, self.graph, self.live, self.layout, self.tiling, self.folder = (
            model,
            graph,
            set(live),
            layout,
            tiling,
            folder,
        )
        self.sizes, self.autocast, self.devices = (
            sizes,
            autocast,
            [torch.device(d) for d in devices],
        )
        self.returns, self.trims, self.borders, self.room = returns, trims, borders, room
        self.stages, self.placement, self.comm, self.transfers = (
            tuple(stages),
            tuple(placement),
            comm,
            Transfers(comm),
        )
        self.watch: Callable[[float], None] = lambda share: None
        self.span: Callable[[str, str], ContextManager] = lambda kind, name: nullcontext()
        self._works: dict[tuple, StagePlan] = {}
        self._stored: dict[tuple, int] = {}

    def device_of(self, segment: Segment) -> torch.device:
        return self.devices[segment.stage if len(self.devices) > 1 else 0]

    def name_of(self, segment: Segment) -> str:
        begins = next(
            number for number in segment.nodes if segment.sources[-1] in self.graph[number].inputs
        )  # behind what is computed again of other segments
        return f"{self.graph[begins].name} to {self.graph[segment.nodes[-1]].name}"

    def name_of_map(self, position: int) -> str:
        return f"the map behind {self.graph[position - 1].name}"

    def label_tiles(self, block: LazyTileBatch) -> Iterator[Box]:
        """The tile of a block, in strips that are read at once."""
        return strips(block.place.tile, _LABELS)

    def work(
        self,
        places: Sequence[TilePlacement],
        number: int = 0,
        boxes: Sequence[Sequence[Box]] | None = None,
    ) -> StagePlan:
        """What this rank has of micro-batch ``number``, whose blocks lie at these places; made once for each size.

        Args:
            boxes: the tiles of each block to compute of the network's result; by default all, of the executor's size.
        """
        key = number, _sizes(places)
        if boxes is None and key in self._works:
            return self._works[key]
        work = self._work(places, number, boxes, self.comm.rank)
        return self._works.setdefault(key, work) if boxes is None else work

    def works_of_all(self, places: Sequence[TilePlacement], number: int) -> list[StagePlan]:
        """What each rank of the pipeline has of a micro-batch."""
        return [self._work(places, number, None, rank) for rank in range(self.comm.size)]

    def _work(
        self,
        places: Sequence[TilePlacement],
        number: int,
        boxes: Sequence[Sequence[Box]] | None,
        rank: int,
    ) -> StagePlan:
        layouts = [self.layout(place.image) for place in places]
        points = {source for layout in layouts for source in layout.exchanged} - {
            0
        }  # pixels are read, with their margin
        live = {self.graph[number].first for number in self.live}
        segments = segments_of(self.graph, live | points, self.stages)
        rank_of = lambda segment: self.placement[segment.stage]
        mine = [n for n, segment in enumerate(segments) if rank_of(segment) == rank]
        makers = {s.result: rank_of(s) for s in segments}
        readers = {
            p: sorted({rank_of(s) for s in segments if p in s.sources} - {rank}) for p in makers
        }
        ours = {number for n in mine for number in segments[n].nodes}
        live = {self.graph[number].first for number in self.live & ours}
        read = {source for n in mine for source in segments[n].sources}
        cut = Cut(self.graph, segments, layouts, places, self.tiling, boxes)
        return StagePlan(
            segments, mine, live, points & read, makers, readers, cut, self.returns, number
        )

    def keeping(self, program: Sequence[Operation], works: Sequence[StagePlan]) -> list[Operation]:
        """The same program with those tiles kept that there is room for; all, where no room is given."""
        if self.room is None:
            return keeping_all(program)
        cuts = {work.number: work.cut for work in works}

        @cache
        def weigh(op: OfTile) -> Weighed:
            cut = cuts[op.micro_batch]
            return self.sizes.weigh(cut.chain(op), cut.images[op.block])

        return keeping(program, weigh, self.room)

    def stored(self, places: Sequence[TilePlacement]) -> int:
        """Bytes of the maps that a micro-batch will store, at most at once."""
        key = _sizes(places)
        if key not in self._stored:
            work = self.work(places)
            self._stored[key] = peak(
                work,
                lambda block, position: self.sizes.bytes_of(
                    position, work.cut.held(block, position), len(places[block].images)
                ),
            )
        return self._stored[key]

    def describe(self, image: Sequence[int], images: int) -> str:
        """What a step on so many images of this size is made of, for the first of their ranks.

        Raises:
            ValueError: not even small tiles fit into the budget.
        """
        layout = self.layout(image)
        tile = layout.part(0, (0,) * len(layout.grid)).owned
        numbers = tuple(range(images))
        places = [TilePlacement(tuple(image), tile, tile, numbers, numbers)]
        work, stored = self.work(places), self.stored(places)
        visits = sum(isinstance(op, OfTile) for op in whole(work))
        if not stored:
            return f"streamed tiles: {visits} windows a step, one after another"
        where = f"in {self.folder}" if self.folder else "in memory"
        of = f" on the first of {self.comm.size} ranks" if self.comm.size > 1 else ""
        segments = f"{len(work.mine)} segment{'s' * (len(work.mine) > 1)}{of}"
        batch = "an image" if images == 1 else f"a micro-batch of {images} images"
        return f"streamed tiles: {segments}, {visits} tiles {batch} there and back; {stored / 1e9:.3g} GB of feature maps wait {where}"

    def check_room(self, *under_way: Sequence[TilePlacement]) -> None:
        """Refuse a scratch folder without room for the maps of micro-batches that are under way together, each by its places.

        Raises:
            OSError: naming the folder and both numbers.
        """
        if self.folder is not None and (stored := sum(map(self.stored, under_way))):
            check_room(self.folder, stored)

    def run(
        self,
        operations: Sequence[Operation],
        works: Sequence[StagePlan],
        micro_batches: Sequence[Sequence[LazyTileBatch]],
        settle: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[OutputTile, Tensor]]:
        """Do the operations one after another; yields the logits (B, C', *box.size) of each tile of the network's result.

        Where an output goes back, the logits have a graph, and what is asked for next tells that they were gone back through. Collective
        over the ranks that share statistics, and over those of the pipeline.

        Args:
            works: of each micro-batch.
            settle: called where the loss's slope must be known.
        """
        walks = [MicroBatchRun(self, work, blocks) for work, blocks in zip(works, micro_batches)]
        tiles, done = sum(isinstance(op, OfTile) for op in operations), 0
        trimmers: dict[tuple, GapTrimmer] = {}
        for op in operations:
            if (
                isinstance(op, OfTile)
                and self.trims
                and (kind := (type(op), op.segment)) not in trimmers
            ):
                trimmers[kind] = GapTrimmer()
            if isinstance(op, Loss):
                settle()
            elif isinstance(op, OutputTile):
                yield from ((op, y) for y in walks[op.micro_batch].output(op))
            else:
                walks[op.micro_batch].do(op)
            if isinstance(op, OfTile):
                if self.trims:
                    trimmers[kind].after_tile(sum(walk.in_memory for walk in walks))
                done += 1
                self.watch(done / tiles)
        for walk in walks:
            walk.close()


def windows(operations: Sequence[Operation], work: StagePlan) -> Iterator[Box]:
    """What the operations of a micro-batch read of pixels, in order; for those who read ahead."""
    there = (op for op in operations if isinstance(op, OfTile) and 0 in work.sources(op.segment))
    return (work.cut.chain(op).read[0] for op in there)


def computed(operations: Sequence[Operation], work: StagePlan) -> Iterator[tuple[int, Box]]:
    """(layer, cells of its result) of all that the operations of a micro-batch compute, each tile once."""
    for op in (op for op in operations if isinstance(op, OfTile)):
        yield from (
            (number, part.made)
            for number, part in zip(work.segments[op.segment].nodes, work.cut.chain(op).parts)
        )


def _sizes(places: Sequence[TilePlacement]) -> tuple:
    """By which programs are told apart."""
    return tuple((place.image, place.tile, len(place.images)) for place in places)


class Cut:
    """Where the tiles of a micro-batch's blocks lie in each map.

    Args:
        layouts, places: of each block.
        boxes: the tiles of each block of the network's result; by default all.
    """

    def __init__(
        self, graph: Graph, segments: Sequence[Segment], layouts: Sequence[Layout], places: Sequence[TilePlacement], tiling: Tiling,
        boxes: Sequence[Sequence[Box]] | None = None,
    ):  # fmt: skip
        self.segments, self.layouts, self.tiling, self.boxes = (
            segments,
            list(layouts),
            tiling,
            boxes,
        )
        self.images = [len(place.images) for place in places]
        self.cells = [layout.cell_of(place.tile) for layout, place in zip(layouts, places)]
        self.in_rows = cache(self._in_rows)
        inputs = [node.inputs for node in graph]
        self.frees = [last_readings(inputs, segment.nodes) for segment in segments]
        """By segment and node, the maps that are read for the last time."""

    @property
    def blocks(self) -> int:
        return len(self.layouts)

    def made(self, block: int, position: int) -> Box:
        """What is computed of a map."""
        return self.layouts[block].made(position, self.cells[block])

    def held(self, block: int, position: int) -> Box:
        """What is stored: that, and the margin from neighbours."""
        layout, cell, made = self.layouts[block], self.cells[block], self.made(block, position)
        if position not in layout.exchanged:
            return made
        _, wanted = layout.margins(position)
        return made.hull(box_of([spans[c] for spans, c in zip(wanted, cell)]))

    def owned(self, block: int, position: int) -> Box:
        return self.layouts[block].owned(position, self.cells[block])

    def size(self, block: int, position: int) -> tuple[int, ...]:
        return tuple(self.layouts[block].sizes[position])

    def tiles(self, block: int, segment: int) -> Sequence[Box]:
        """Of what is computed of a segment's result."""
        if self.boxes is not None and segment == len(self.segments) - 1:
            return self.boxes[block]
        result = self.made(block, self.segments[segment].result)
        return boxes_of(
            result,
            self.tiling(self.layouts[block], self.segments[segment], result, self.images[block]),
        )

    def _in_rows(self, block: int, position: int) -> bool:
        """Whether all tiles that make or read a map are whole rows of their results, and no neighbours lie beside them."""
        if any(g > 1 for g in self.layouts[block].grid[1:]):
            return False
        near = [
            n
            for n, segment in enumerate(self.segments)
            if segment.result == position or position in segment.sources
        ]
        return all(
            tile.size[1:] == self.made(block, self.segments[n].result).size[1:]
            for n in near
            for tile in self.tiles(block, n)[:1]
        )

    def rows(self, block: int, segment: int, rows: Span) -> dict[int, Span]:
        return rows_read(self.layouts[block], self.segments[segment], rows)

    def chain(self, op: OfTile) -> Chain:
        return chain(self.layouts[op.block], self.segments[op.segment], op.box)


class MicroBatchRun:
    """The blocks of one micro-batch on their way through this rank's part of the network: does its operations."""

    def __init__(
        self, executor: StreamingExecutor, work: StagePlan, blocks: Sequence[LazyTileBatch]
    ):
        self.executor, self.work, self.blocks, self.segments = (
            executor,
            work,
            list(blocks),
            work.segments,
        )
        self.cut, self.span = work.cut, executor.span
        self.layers, self.transfers, self.context = (
            executor.model.layers,
            executor.transfers,
            executor.model.context,
        )
        self.maps: dict[
            tuple[int, int], Map | VectorMap
        ] = {}  # by block and position, as all below
        self.gradients: dict[tuple[int, int], Map | VectorMap] = {}
        self.norms: dict[int, Pending] = {}  # by their number
        self._norms_at: dict[int, list[int]] = {}
        for number in sorted(
            executor.live
            & {number for segment in work.mine for number in work.segments[segment].nodes}
        ):
            self._norms_at.setdefault(executor.graph[number].first, []).append(number)
        self._first_with = {
            number: segment
            for segment in sorted(work.mine, reverse=True)
            for number in work.segments[segment].nodes
        }
        self._moments: dict[int, list] = {}
        self._kept: dict[
            tuple, tuple[Tensor, list, float]
        ] = {}  # results and leaves of tiles whose graphs wait, and about what these take
        self._coming: dict[tuple[int, int], Receiving] = {}
        self._returning: dict[tuple[int, int], list[Receiving]] = {}
        self._sending: dict[tuple[int, int], list[Sending]] = {}
        self._handing_back: dict[tuple[int, int], Sending] = {}

    def do(self, op: Operation) -> None:
        """Any operation but an output, or the loss."""
        _DOES[type(op)](self, op)

    def output(self, op: OutputTile) -> Iterator[Tensor]:
        """The logits of a tile; the gradients of what was read for them are taken in when the next is asked for."""
        with torch.set_grad_enabled(op.back), self.span("forward", self._name(op)):
            y, leaves = self._run(op)
        yield y
        self._take_in(op.block, leaves)

    def close(self) -> None:
        """Let go of what is left, once others have what they read of it."""
        for block, position in [*self._sending]:
            self._wait_sent(block, position)
        for stored in self.maps.values():
            stored.close()
        self.maps.clear()
        self._kept.clear()

    @property
    def in_memory(self) -> float:
        """Bytes of its maps that are in this process's memory, and of the tiles that are kept."""
        coming = (
            r.stored for those in self._returning.values() for r in those if r.stored is not None
        )
        kept = sum(size for *_, size in self._kept.values())
        return kept + sum(
            stored.in_memory for stored in (*self.maps.values(), *self.gradients.values(), *coming)
        )

    def _bytes_of_graph(self, op: OfTile) -> float:
        """Asked for by those who trim alone."""
        return (
            self.executor.sizes.kept(self.cut.chain(op), self.cut.images[op.block])
            if self.executor.trims
            else 0.0
        )

    def _name(self, op: OfTile) -> str:
        return self.executor.name_of(self.segments[op.segment])

    def _blocks(self) -> range:
        return range(len(self.blocks))

    # tiles

    @torch.no_grad()
    def forward(self, op: ForwardTile) -> None:
        stop = self.segments[op.segment].result
        with torch.set_grad_enabled(op.kept), self.span("forward", self._name(op)):
            found, leaves = self._run(op)
        y = found.detach()
        with self.span("scratch", "write"):
            self._map(self.maps, op.block, stop, y).write(op.box, y)
        self._take_moments(stop, op.block, op.box, y)
        if op.kept:
            self._kept[op.tile] = found, leaves, self._bytes_of_graph(op)

    @torch.enable_grad()
    def backward(self, op: BackwardTile) -> None:
        stop = self.segments[op.segment].result
        g = self._gradient(op.block, stop, op.box)
        if op.kept:
            y, leaves, _ = self._kept.pop(op.tile)
        else:
            with self.span("recompute", self._name(op)):
                y, leaves = self._run(op)
        with self.span("backward", self._name(op)):
            if stop in self.work.live:
                g = self._corrected(stop, op.block, op.box, g, y.detach())
            if y.requires_grad:
                torch.autograd.backward([y], [g])
        self._take_in(op.block, leaves)

    def _gradient(self, i: int, position: int, box: Box) -> Tensor:
        """The sum over all readers, always in the same order."""
        parts = []
        if (i, position) in self.gradients:
            with self.span("scratch", "read gradient"):
                parts.append(self.gradients[i, position].read(box))
        for returning in self._returning.get((i, position), ()):
            self.transfers.wait_for(
                returning, box.stop[0], f"the gradient of {self.executor.name_of_map(position)}"
            )
            with self.span("scratch", "read gradient"):
                parts.append(returning.stored.read(box))
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def _run(self, op: OfTile) -> tuple[Tensor, list]:
        """The segment's result on the tile; with gradients on also what was read, as (position, window, leaf)."""
        segment, i = self.segments[op.segment], op.block
        way, device = self.cut.chain(op), self.executor.device_of(segment)
        self.context.places = [self.blocks[i].place]
        leaves = []
        heartbeat(f"tile {op.box} of {self._name(op)}")
        there: dict[int, tuple[Tensor, Box]] = {}
        try:
            with self.executor.autocast():
                for number, part in zip(segment.nodes, way.parts):
                    for source in self.executor.graph[number].inputs:
                        if source in way.read and source not in there:
                            there[source] = (
                                self._source(source, i, way.read[source], leaves, device),
                                way.read[source],
                            )
                    there[number + 1] = self._layer(number, part, there, op), part.made
                    for source in self.cut.frees[op.segment][number]:
                        del there[source]
        finally:
            self.context.regions = None
        return there[segment.result][0], leaves

    def _read(self, position: int, i: int, window: Box) -> Tensor:
        if position == 0:
            with self.span("read", "pixels"):
                return self.blocks[i].pixels(window)
        self._wait_for(i, position, window.stop[0])
        stored = self.maps[i, position]
        with self.span("scratch", "read"):
            # A norm leaves what it is given as it is, and without a backward pass nobody keeps it.
            untouched = not self.executor.returns and len(self._norms_of(position)) == len(
                self.executor.graph.readers[position]
            )
            return stored.view(window) if untouched else stored.read(window)

    def _source(
        self, position: int, i: int, window: Box, leaves: list, device: torch.device
    ) -> Tensor:
        x = self._read(position, i, window).to(device)
        if torch.is_grad_enabled() and (position > 0 or 0 in self.work.live):
            leaves.append((position, window, x.requires_grad_()))
        return x

    def _layer(
        self, number: int, part: Part, there: dict[int, tuple[Tensor, Box]], op: OfTile
    ) -> Tensor:
        self.transfers.progress()
        layer, ((x, have), *others) = (
            self.layers[number],
            [there[source] for source in self.executor.graph[number].inputs],
        )
        self.context.regions, self.context.current = [part], 0
        if number in self.norms:
            x = cropped(x, have, part.taken)
            return self.norms[number](x, 0, layer.masks([x])[0], self._share(number, op))
        with skip_store({}):
            return run(layer, x, have, part, others)

    def _share(self, number: int, op: OfTile) -> float:
        """Return the share of its image that a tile stands for, at a norm of vectors or lines, of which each tile has all.

        Windows reach beyond their tiles, and results beyond what this rank owns; where several segments compute a norm, the first one counts.
        """
        if self._first_with[number] != op.segment:
            return 0.0
        result = self.segments[op.segment].result
        return op.box.intersection(self.cut.owned(op.block, result)).pixels / math.prod(
            self.cut.size(op.block, result)
        )

    def _take_in(self, i: int, leaves: list) -> None:
        """Add the gradients of what was read to the stored ones."""
        for position, window, x in leaves:
            if position == 0:
                continue
            g = torch.zeros_like(x) if x.grad is None else x.grad
            with self.span("scratch", "add gradient"):
                self._map(self.gradients, i, position, x.detach()).add(window, g)
        leaves.clear()

    # norms

    @torch.no_grad()
    def measure(self, op: Measure) -> None:
        for i in self._blocks():
            for box in strips(self.cut.made(i, op.position), _CELLS if op.position else _PIXELS):
                self._take_moments(op.position, i, box, self._read(op.position, i, box))

    def _norms_of(self, position: int) -> list[int]:
        """Those of this rank that take statistics of a map."""
        return self._norms_at.get(position, [])

    def _take_moments(self, position: int, i: int, box: Box, x: Tensor) -> None:
        for number in self._norms_of(position):
            if self._at(position, i, box).pixels:
                norm = self.layers[number]
                self._moments.setdefault(number, []).extend(norm.moments(x, 0, norm.masks([x])[0]))

    @torch.no_grad()
    def statistic(self, op: Statistic) -> None:
        for number in self._norms_of(op.position):
            norm = self.layers[number]
            self.norms[number] = norm.pending(norm.statistics(self._moments.pop(number)))

    def settle(self, op: Settle) -> None:
        for number in self._norms_of(op.position):
            self.norms[number].settle()

    @torch.no_grad()
    def correct(self, op: Correct) -> None:
        for i in self._blocks():
            self._wait_for(i, op.position)
            gradient, stored = self.gradients[i, op.position], self.maps[i, op.position]
            for box in strips(gradient.box, _CELLS):
                gradient.write(
                    box, self._corrected(op.position, i, box, gradient.read(box), stored.read(box))
                )

    def _corrected(self, position: int, i: int, box: Box, g: Tensor, y: Tensor) -> Tensor:
        own = self._at(position, i, box)
        for number in self._norms_of(position):
            g = self.norms[number].corrected(g, y, own, 0, self.layers[number].masks([y])[0])
        return g

    def _at(self, position: int, i: int, box: Box) -> Box:
        """Make block ``i`` the one at hand; what it owns of ``box``, in cells of ``box``."""
        owned = box.intersection(self.cut.owned(i, position))
        self.context.places = [self.blocks[i].place]
        self.context.regions = [Region(self.cut.size(i, position), owned, box)]
        return owned.relative_to(box)

    # between ranks

    def fetch(self, op: Fetch) -> None:
        for i in self._blocks():
            self._wait_for(i, op.position)
        self.executor.borders.fetch(
            op.position,
            self.cut.layouts,
            self.cut.cells,
            [self.maps[i, op.position] for i in self._blocks()],
        )

    def give_back(self, op: GiveBack) -> None:
        self.executor.borders.give_back(
            op.position,
            self.cut.layouts,
            self.cut.cells,
            [self.gradients[i, op.position] for i in self._blocks()],
        )

    def expect(self, op: Expect) -> None:
        for i in self._blocks():
            coming = Receiving(
                self.cut.made(i, op.position),
                lambda like, i=i: self._map(self.maps, i, op.position, self._here(like)),
            )
            self._coming[i, op.position] = self.transfers.begin(
                coming, self.work.makers[op.position], 2 * op.position
            )

    def expect_gradient(self, op: ExpectGradient) -> None:
        for i in self._blocks():
            box = self.cut.made(i, op.position)
            coming = Receiving(
                box,
                lambda like, i=i, box=box: self._made(
                    box, i, op.position, self._here(like), gradient=True
                ),
            )  # all of it comes
            self._returning.setdefault((i, op.position), []).append(
                self.transfers.begin(coming, op.source, 2 * op.position + 1)
            )

    def send(self, op: Send) -> None:
        key = op.block, op.position
        if key not in self._sending:
            readers = self.work.readers[op.position]
            made = self.cut.made(*key)
            self._sending[key] = [
                self.transfers.begin(Sending(self.maps[key], made), reader, 2 * op.position)
                for reader in readers
            ]
        for sending in self._sending[key]:
            sending.final = op.final
        self.transfers.progress()

    def send_gradient(self, op: SendGradient) -> None:
        for i in range(
            op.block + 1
        ):  # images go one after another; a small one may be final all at once, after rows of the next are
            if (i, op.position) not in self._handing_back:
                gradient = self.gradients[i, op.position]
                sending = Sending(gradient, self.cut.made(i, op.position), gradient.close)
                self._handing_back[i, op.position] = self.transfers.begin(
                    sending, self.work.makers[op.position], 2 * op.position + 1
                )
        key = op.block, op.position
        self._handing_back[key].final = op.final
        if op.final == self.cut.made(*key).stop[0]:
            del self.gradients[key]  # goes when it is sent
        self.transfers.progress()

    def _wait_for(self, i: int, position: int, row: int | None = None) -> None:
        """Until a map that comes from another rank is there, up to a row, by default all of it; no wait for others."""
        if (coming := self._coming.get((i, position))) is not None:
            self.transfers.wait_for(
                coming,
                coming.box.stop[0] if row is None else row,
                self.executor.name_of_map(position),
            )

    def _wait_sent(self, i: int, position: int) -> None:
        for sending in self._sending.pop((i, position), ()):
            self.transfers.wait_sent(sending, self.executor.name_of_map(position))

    # stored maps

    def drop(self, op: Drop) -> None:
        for i in self._blocks():
            self._wait_for(i, op.position)  # also what no window reads
            self._wait_sent(i, op.position)
            self._close(self.maps, i, op.position)

    def drop_gradient(self, op: DropGradient) -> None:
        for i in self._blocks():
            self._close(self.gradients, i, op.position)
            for returning in self._returning.pop((i, op.position), ()):
                returning.stored.close()

    def _close(self, maps: dict, i: int, position: int) -> None:
        if (i, position) in maps:
            maps.pop((i, position)).close()

    def _map(self, maps: dict, i: int, position: int, like: Tensor) -> Map:
        if (i, position) not in maps:
            maps[i, position] = self._made(
                self.cut.held(i, position), i, position, like, gradient=maps is self.gradients
            )
        return maps[i, position]

    def _made(
        self, box: Box, i: int, position: int, like: Tensor, gradient: bool
    ) -> Map | VectorMap:
        """What keeps a map, or its gradient, to which parts are added."""
        if position in self.executor.model.vectors:
            return VectorMap(box, like, gradient)
        zero = (
            gradient or self.executor.trims
        )  # who trims looks at the size of the process, less that of its maps
        return Map(box, like, self.executor.folder, zero=zero, rows=self.cut.in_rows(i, position))

    def _here(self, like: Tensor) -> Tensor:
        return like.to(self.executor.devices[0])


_DOES: dict[type[Operation], Callable[[MicroBatchRun, Operation], None]] = {
    Expect: MicroBatchRun.expect, ExpectGradient: MicroBatchRun.expect_gradient, Measure: MicroBatchRun.measure, ForwardTile: MicroBatchRun.forward, Statistic: MicroBatchRun.statistic,
    Send: MicroBatchRun.send, BackwardTile: MicroBatchRun.backward, Settle: MicroBatchRun.settle, Correct: MicroBatchRun.correct, SendGradient: MicroBatchRun.send_gradient,
    Fetch: MicroBatchRun.fetch, GiveBack: MicroBatchRun.give_back, Drop: MicroBatchRun.drop, DropGradient: MicroBatchRun.drop_gradient,
}  # fmt: skip
