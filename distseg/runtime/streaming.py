"""Streams tiles: a rank computes its part of an image tile by tile, in the memory of one tile.

The gradient is exactly the gradient of the whole part. Segments (:mod:`distseg.tiling.segment`) lie
between the layers that need all of a feature map. These are the active norms, which compute their
statistics from the current images. The feature maps between segments are stored in a scratch folder
or in the host's memory.

In the forward pass a segment runs on windows of the preceding feature map and computes one tile of
its result at a time. Each tile adds to the statistics of the next norm. In the backward pass the
segment runs again on each window, now with a graph. The window's gradient is added to the stored
gradient of the preceding feature map. This module runs the operations that
:mod:`distseg.runtime.tile_program` lists::

    forward      read window - norm act conv - write tile, moments
                 then: statistics over all tiles, all ranks
    backward     read gradient of the tile, read window - repeat the forward pass - backward
                 - add to the stored gradient of the window
                 then: the statistics' gradient

Without active norms the whole network is one segment, and only the image is stored. In a pipeline
each stage runs its own segments, and feature maps that other stages read travel to them
(:mod:`distseg.runtime.transfer`). If forward and backward passes of tiles alternate
(:mod:`distseg.runtime.interleaved`), as many tiles keep their graphs as the budget allows
(:mod:`distseg.runtime.kept_graphs`); these tiles are computed only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from distseg.comm.collective import Alone
from distseg.comm.launch import GapTrimmer
from distseg.comm.progress import heartbeat
from distseg.layers.layer_table import cropped, run
from distseg.layers.norm import Pending
from distseg.models.layers import skip_store
from distseg.runtime.kept_graphs import Weighed, keeping, keeping_all
from distseg.runtime.last_additions import LastPass, last_additions
from distseg.runtime.offload import Map, VectorMap, require_scratch_space
from distseg.runtime.operations import (
    ApplyStatisticsGrad,
    BackwardTile,
    Drop,
    DropGradient,
    FetchHalo,
    FinalizeStatistics,
    ForwardTile,
    Loss,
    Measure,
    Operation,
    OutputTile,
    RecvGradRows,
    RecvRows,
    SendGradRows,
    SendHaloGrad,
    SendRows,
    Statistic,
    TileOperation,
)  # fmt: skip
from distseg.runtime.stored_halos import StoredHalos
from distseg.runtime.swap_layers import TiledModel
from distseg.runtime.tile_program import StagePlan, all_operations, peak
from distseg.runtime.transfer import Receiving, Sending, Transfers
from distseg.tiling.access_pattern import Span
from distseg.tiling.graph import Graph, last_readings
from distseg.tiling.layout import LayerView, Layout, MapView
from distseg.tiling.segment import Segment, TilePlan, rows_read, segments_of, tile_plan
from distseg.tiling.tile import Box, TilePlacement, box_of, boxes_of, strips
from distseg.tiling.tile_batch import LazyTileBatch

_LABELS = 1 << 20  # Number of labels read at once.
# Number of pixels, or cells of a feature map, read at once when no tile is computed.
_PIXELS, _CELLS = 1 << 20, 1 << 17
_CPU = torch.device("cpu")


class Sizes(Protocol):
    """Interface of a memory model: computes the bytes of feature maps and of tiles' passes."""

    def bytes_of(self, tensor_id: int, box: Box, images: int) -> int:
        """Return the size in bytes of the part ``box`` of a feature map of ``images`` images."""

    def kept(self, boxes: TilePlan, images: int) -> float:
        """Return the bytes of memory that a tile holds between its forward and backward pass.

        Args:
            boxes: the boxes of the tile in each layer.
            images: the number of images in the tile batch.
        """

    def weigh(self, boxes: TilePlan, images: int) -> Weighed:
        """Return the memory of a tile: the bytes that :meth:`kept` returns, and its peak bytes.

        The peak bytes are the most that its forward or backward pass needs.

        Args:
            boxes: the boxes of the tile in each layer.
            images: the number of images in the tile batch.
        """


class Tiling(Protocol):
    """Interface of a rule that chooses the size of the tiles of a segment's result."""

    def __call__(self, layout: Layout, segment: Segment, result: Box, images: int) -> Sequence[int]:
        """Return the size of a tile in cells along each dim; the last tile may be smaller.

        Args:
            layout: the layout of the image.
            segment: the segment.
            result: the box of the segment's result that is cut into tiles.
            images: the number of images in the tile batch.
        """


class StreamingExecutor:
    """Executor that streams tiles through the layers that one rank holds.

    The model must be a list of layer calls. The rank holds all of it or some of its stages.

    Args:
        model: the model with its distributed counterparts.
        graph: the graph of its layers (:func:`distseg.layers.graph.graph_of`).
        active: the layer numbers of the active norms.
        layout: returns the layout of an image of a given size on the mesh's tiles.
        tiling: returns the tile size of a segment's result (:class:`Tiling`).
        folder: the folder of stored feature maps; None stores them in the host's memory.
        sizes: returns the bytes that feature maps and tiles take (:class:`Sizes`).
        autocast: makes the context in which the network runs.
        devices: the device of the network, or of each stage if the rank has several devices.
        stages: the layers of each stage.
        placement: the rank of each stage, in ``comm``.
        comm: the ranks of the pipeline.
        returns: True if backward passes follow the forward passes. Otherwise a feature map is
            dropped once all its readers have read it.
        trims: True to return free memory to the system, which takes some milliseconds. This happens
            before the first forward and backward tile of each segment, and when memory has grown.
        halos: the object that exchanges the halos of stored feature maps with other ranks; None if
            ranks exchange no halos.
        budget: budget in bytes for one tile and all tiles whose graphs wait for their backward
            pass; unlimited by default.

    Attributes:
        watch: called after each tile with the fraction of the tiles that are done.
        span: makes the tracing context of an operation from its kind and name
            (:mod:`distseg.runtime.spans`).
        last_pass: makes the context manager in which an operation runs. It is given the parameters
            to whose gradients the operation is the last one of the step to add. After it, the sums
            of these gradients over replicas can start.
    """

    def __init__(
        self,
        model: TiledModel,
        graph: Graph,
        active: Sequence[int],
        layout: Callable[[Sequence[int]], Layout],
        tiling: Tiling,
        folder: str | None,
        sizes: Sizes,
        autocast: Callable[[], AbstractContextManager],
        devices: Sequence[torch.device] = (_CPU,),
        stages: Sequence[range] = (),
        placement: Sequence[int] = (0,),
        comm=Alone(),
        returns: bool = True,
        trims: bool = True,
        halos: StoredHalos | None = None,
        budget: float | None = None,
    ):
        self.model, self.graph, self.active = model, graph, set(active)
        self.layout, self.tiling, self.folder = layout, tiling, folder
        self.sizes, self.autocast = sizes, autocast
        self.devices = [torch.device(d) for d in devices]
        self.returns, self.trims, self.halos, self.budget = returns, trims, halos, budget
        self.stages, self.placement = tuple(stages), tuple(placement)
        self.comm, self.transfers = comm, Transfers(comm)
        self.watch: Callable[[float], None] = lambda share: None
        self.span: Callable[[str, str], AbstractContextManager] = lambda kind, name: nullcontext()
        self.last_pass: LastPass = lambda parameters: nullcontext()
        self._plans: dict[tuple, StagePlan] = {}
        self._stored: dict[tuple, int] = {}

    def device_of(self, segment: Segment) -> torch.device:
        """Return the device that a segment runs on."""
        return self.devices[segment.stage if len(self.devices) > 1 else 0]

    def name_of(self, segment: Segment) -> str:
        """Return the names of a segment's first and last layer, for messages."""
        # Layers before this one belong to other segments and are computed again here.
        begins = next(
            number for number in segment.nodes if segment.sources[-1] in self.graph[number].inputs
        )
        return f"{self.graph[begins].name} to {self.graph[segment.nodes[-1]].name}"

    def name_of_feature_map(self, tensor_id: int) -> str:
        """Return the name of a feature map, for messages."""
        return f"the feature map after {self.graph[tensor_id - 1].name}"

    def label_tiles(self, block: LazyTileBatch) -> Iterator[Box]:
        """Return the boxes in which the labels of a tile batch are read, one after another.

        The boxes cut the owned tile into groups of rows, because the labels of a whole tile may be
        too large for memory.
        """
        return strips(block.place.tile, _LABELS)

    def plan(
        self,
        places: Sequence[TilePlacement],
        number: int = 0,
        boxes: Sequence[Sequence[Box]] | None = None,
    ) -> StagePlan:
        """Return this rank's plan (its segments, feature maps and tiles) for one micro-batch.

        Plans are cached. Placements with equal sizes share a plan.

        Args:
            places: the placement of each tile batch.
            number: the index of the micro-batch.
            boxes: the tiles of the network's result to compute, for each tile batch. By default all
                tiles are computed, in the executor's tile size. A plan with ``boxes`` is not
                cached.
        """
        key = number, _sizes(places)
        if boxes is None and key in self._plans:
            return self._plans[key]
        plan = self._make_plan(places, number, boxes, self.comm.rank)
        return self._plans.setdefault(key, plan) if boxes is None else plan

    def plans_of_all_ranks(self, places: Sequence[TilePlacement], number: int) -> list[StagePlan]:
        """Return the plan of each rank of the pipeline for one micro-batch.

        Args:
            places: the placement of each tile batch.
            number: the index of the micro-batch.
        """
        return [self._make_plan(places, number, None, rank) for rank in range(self.comm.size)]

    def _make_plan(
        self,
        places: Sequence[TilePlacement],
        number: int,
        boxes: Sequence[Sequence[Box]] | None,
        rank: int,
    ) -> StagePlan:
        """Return the plan of rank ``rank`` of the pipeline; other arguments as in :meth:`plan`."""
        layouts = [self.layout(place.image) for place in places]
        # Pixels need no exchange, because they are read together with their halo.
        points = {source for layout in layouts for source in layout.exchanged} - {0}
        active = {self.graph[number].first for number in self.active}
        segments = segments_of(self.graph, active | points, self.stages)

        def rank_of(segment):
            return self.placement[segment.stage]

        mine = [n for n, segment in enumerate(segments) if rank_of(segment) == rank]
        makers = {s.result: rank_of(s) for s in segments}
        readers = {
            p: sorted({rank_of(s) for s in segments if p in s.sources} - {rank}) for p in makers
        }
        ours = {number for n in mine for number in segments[n].nodes}
        active = {self.graph[number].first for number in self.active & ours}
        read = {source for n in mine for source in segments[n].sources}
        grid = LayoutTiles(self.graph, segments, layouts, places, self.tiling, boxes)
        return StagePlan(
            segments, mine, active, points & read, makers, readers, grid, self.returns, number
        )

    def keeping(self, program: Sequence[Operation], plans: Sequence[StagePlan]) -> list[Operation]:
        """Return ``program``, changed so that as many tiles keep their graphs as the budget allows.

        A tile whose autograd graph is kept is computed once, any other tile twice. All tiles keep
        their graphs if the executor has no budget.

        Args:
            program: the operations of a step.
            plans: the plans of the step's micro-batches.
        """
        if self.budget is None:
            return keeping_all(program)
        grids = {plan.number: plan.grid for plan in plans}

        @cache
        def weigh(op: TileOperation) -> Weighed:
            grid = grids[op.micro_batch]
            return self.sizes.weigh(grid.tile_plan(op), grid.images[op.block])

        return keeping(program, weigh, self.budget)

    def stored(self, places: Sequence[TilePlacement]) -> int:
        """Return the largest number of bytes of feature maps that a micro-batch stores at once.

        Args:
            places: the placement of each tile batch of the micro-batch.
        """
        key = _sizes(places)
        if key not in self._stored:
            plan = self.plan(places)
            self._stored[key] = peak(
                plan,
                lambda block, tensor_id: self.sizes.bytes_of(
                    tensor_id, plan.grid.stored_box(block, tensor_id), len(places[block].images)
                ),
            )
        return self._stored[key]

    def describe(self, image: Sequence[int], images: int) -> str:
        """Return a log line with the number of tile passes and the bytes of stored feature maps.

        Both are those of one step on the rank that owns the first tile.

        Args:
            image: the size of the images in pixels.
            images: the number of images in a micro-batch.

        Raises:
            ValueError: if even the smallest tiles do not fit into the budget.
        """
        layout = self.layout(image)
        tile = layout.part(0, (0,) * len(layout.grid)).owned
        numbers = tuple(range(images))
        places = [TilePlacement(tuple(image), tile, tile, numbers, numbers)]
        plan, stored = self.plan(places), self.stored(places)
        visits = sum(isinstance(op, TileOperation) for op in all_operations(plan))
        if not stored:
            return f"streamed tiles: {visits} windows per step, one after another"
        where = f"in {self.folder}" if self.folder else "in memory"
        of = f" on the first of {self.comm.size} ranks" if self.comm.size > 1 else ""
        segments = f"{len(plan.mine)} segment{'s' * (len(plan.mine) > 1)}{of}"
        batch = "an image" if images == 1 else f"a micro-batch of {images} images"
        return (
            f"streamed tiles: {segments}, {visits} tile passes (forward and backward) for {batch}; "
            f"{stored / 1e9:.3g} GB of feature maps stored {where}"
        )

    def require_scratch_space(self, *under_way: Sequence[TilePlacement]) -> None:
        """Refuse a scratch folder that is too small for the feature maps that are stored at once.

        Args:
            under_way: for each micro-batch whose feature maps are stored at the same time, the
                placements of its tile batches.

        Raises:
            OSError: if the folder is too small. The message names the folder and both sizes.
        """
        if self.folder is not None and (stored := sum(map(self.stored, under_way))):
            require_scratch_space(self.folder, stored)

    def run(
        self,
        operations: Iterable[Operation],
        plans: Sequence[StagePlan],
        micro_batches: Sequence[Sequence[LazyTileBatch]],
        find_loss_grad: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[OutputTile, Tensor]]:
        """Run the operations in order and yield the logits (B, C', *box.size) of each output tile.

        The logits have an autograd graph if ``OutputTile.back`` is True. The caller must then run
        their backward pass before it asks for the next tile. All ranks that share statistics and
        all ranks of the pipeline must call this method together.

        Args:
            operations: the operations of this rank. They may come from an iterator if no backward
                passes follow; then ``watch`` is not called, because their number is not known.
            plans: the plan of each micro-batch.
            micro_batches: the tile batches of each micro-batch.
            find_loss_grad: called when the loss gradient must be computed, because the following
                backward passes need it.
        """
        runs = [MicroBatchRun(self, plan, blocks) for plan, blocks in zip(plans, micro_batches)]
        known = operations if isinstance(operations, Sequence) else ()
        tiles, done = sum(isinstance(op, TileOperation) for op in known), 0
        trimmers: dict[tuple, GapTrimmer] = {}
        last = self._last_additions(known, plans)
        for place, op in enumerate(operations):
            if (
                isinstance(op, TileOperation)
                and self.trims
                and (kind := (type(op), op.segment)) not in trimmers
            ):
                trimmers[kind] = GapTrimmer()
            with self.last_pass(last.get(place, ())):
                if isinstance(op, Loss):
                    find_loss_grad()
                elif isinstance(op, OutputTile):
                    yield from ((op, y) for y in runs[op.micro_batch].output(op))
                else:
                    runs[op.micro_batch].do(op)
            if isinstance(op, TileOperation):
                if self.trims:
                    trimmers[kind].after_tile(sum(started.in_memory for started in runs))
                done += 1
                if tiles:
                    self.watch(done / tiles)
        for started in runs:
            started.close()

    def _last_additions(
        self, operations: Sequence[Operation], plans: Sequence[StagePlan]
    ) -> dict[int, list[nn.Parameter]]:
        """Return, for each operation, the parameters to whose gradients it is the last to add.

        The keys of the result are indices of ``operations``.
        """

        def parameters_of(segment: tuple[int, int]) -> Iterator[nn.Parameter]:
            micro_batch, number = segment
            for layer in plans[micro_batch].segments[number].nodes:
                yield from self.model.layers[layer].parameters()

        return last_additions(
            [
                (op.micro_batch, op.segment)
                if isinstance(op, BackwardTile) or isinstance(op, OutputTile) and op.back
                else None
                for op in operations
            ],
            parameters_of,
        )


def windows(operations: Iterable[Operation], plan: StagePlan) -> Iterator[Box]:
    """Yield the boxes of pixels that a micro-batch reads from its images, in order of the reads.

    The data loader can read these pixels ahead.

    Args:
        operations: the operations of the micro-batch.
        plan: the plan of the micro-batch.
    """
    there = (
        op for op in operations if isinstance(op, TileOperation) and 0 in plan.sources(op.segment)
    )
    return (plan.grid.tile_plan(op).read[0] for op in there)


def computed(operations: Iterable[Operation], plan: StagePlan) -> Iterator[tuple[int, Box]]:
    """Yield (layer number, box of the layer's output) for each layer that runs on each tile.

    Args:
        operations: the operations of the micro-batch.
        plan: the plan of the micro-batch.
    """
    for op in (op for op in operations if isinstance(op, TileOperation)):
        yield from (
            (number, part.output)
            for number, part in zip(plan.segments[op.segment].nodes, plan.grid.tile_plan(op).views)
        )


def _sizes(places: Sequence[TilePlacement]) -> tuple:
    """Return a cache key that is equal for micro-batches with equal images, tiles and numbers.

    The key has, for each tile batch, the size of its images, its tile and the number of images.
    """
    return tuple((place.image, place.tile, len(place.images)) for place in places)


class LayoutTiles:
    """Boxes of a rank's tiles in each feature map, computed from the layouts of the images.

    A micro-batch has one or more tile batches: images of equal size, of which the rank has the same
    tile. The methods take the index of a tile batch (``block``), the index of a segment, and the
    number of a feature map (``tensor_id``). This class implements
    :class:`distseg.runtime.tile_program.TileGrid`.

    Args:
        graph: the graph of the network's layers.
        segments: all segments of the network.
        layouts: for each tile batch, the layout of its images.
        places: for each tile batch, its placement.
        tiling: returns the size of the streamed tiles into which a segment's result is cut.
        boxes: for each tile batch, the tiles of the network's result to compute; by default all.
    """

    def __init__(
        self,
        graph: Graph,
        segments: Sequence[Segment],
        layouts: Sequence[Layout],
        places: Sequence[TilePlacement],
        tiling: Tiling,
        boxes: Sequence[Sequence[Box]] | None = None,
    ):
        self.segments, self.layouts = segments, list(layouts)
        self.tiling, self.boxes = tiling, boxes
        self.images = [len(place.images) for place in places]
        self.cells = [layout.cell_of(place.tile) for layout, place in zip(layouts, places)]
        self.in_rows = cache(self._in_rows)
        inputs = [node.inputs for node in graph]
        self.frees = [last_readings(inputs, segment.nodes) for segment in segments]
        """For each segment and layer, the feature maps that no later layer of the segment reads."""

    @property
    def blocks(self) -> int:
        """Number of tile batches."""
        return len(self.layouts)

    def computed(self, block: int, tensor_id: int) -> Box:
        """Return the box of a feature map that this rank computes for a tile batch.

        Cells that other ranks send in a halo exchange are not part of the box.
        """
        return self.layouts[block].computed(tensor_id, self.cells[block])

    def stored_box(self, block: int, tensor_id: int) -> Box:
        """Return the box of a feature map that is stored: the computed box and its halo.

        The halo has the cells that other ranks send. If the feature map is not exchanged, the
        result is the computed box.
        """
        layout, cell, made = self.layouts[block], self.cells[block], self.computed(block, tensor_id)
        if tensor_id not in layout.exchanged:
            return made
        _, wanted = layout.margins(tensor_id)
        return made.hull(box_of([spans[c] for spans, c in zip(wanted, cell)]))

    def owned(self, block: int, tensor_id: int) -> Box:
        """Return the box of a feature map that the tile batch owns."""
        return self.layouts[block].owned(tensor_id, self.cells[block])

    def size(self, block: int, tensor_id: int) -> tuple[int, ...]:
        """Return the size in cells of a whole feature map, for the images of a tile batch."""
        return tuple(self.layouts[block].sizes[tensor_id])

    def tiles(self, block: int, segment: int) -> Sequence[Box]:
        """Return the tiles of a segment's result that this rank computes."""
        if self.boxes is not None and segment == len(self.segments) - 1:
            return self.boxes[block]
        result = self.computed(block, self.segments[segment].result)
        return boxes_of(
            result,
            self.tiling(self.layouts[block], self.segments[segment], result, self.images[block]),
        )

    def _in_rows(self, block: int, tensor_id: int) -> bool:
        """Return True if all streamed tiles that compute or read a feature map have whole rows.

        A tile has whole rows if it is as wide as the feature map. Always return False if the mesh
        divides the rows of the image between ranks.
        """
        if any(g > 1 for g in self.layouts[block].grid[1:]):
            return False
        near = [
            n
            for n, segment in enumerate(self.segments)
            if segment.result == tensor_id or tensor_id in segment.sources
        ]
        return all(
            tile.size[1:] == self.computed(block, self.segments[n].result).size[1:]
            for n in near
            for tile in self.tiles(block, n)[:1]
        )

    def rows(self, block: int, segment: int, rows: Span) -> dict[int, Span]:
        """Return the rows of its input feature maps from which a segment computes given rows.

        The keys of the result are numbers of feature maps.

        Args:
            block: the index of the tile batch.
            segment: the index of the segment.
            rows: the rows (start, stop) of the segment's result to compute.
        """
        return rows_read(self.layouts[block], self.segments[segment], rows)

    def tile_plan(self, op: TileOperation) -> TilePlan:
        """Return, for one tile, the boxes that each layer of its segment reads and computes."""
        return tile_plan(self.layouts[op.block], self.segments[op.segment], op.box)


class MicroBatchRun:
    """Run of one micro-batch's tile batches through this rank's part of the network.

    Args:
        executor: the executor, which has the layers and settings.
        plan: the plan of the micro-batch.
        blocks: the tile batches of the micro-batch.
    """

    def __init__(
        self, executor: StreamingExecutor, plan: StagePlan, blocks: Sequence[LazyTileBatch]
    ):
        self.executor, self.plan = executor, plan
        self.blocks, self.segments = list(blocks), plan.segments
        self.grid, self.span = plan.grid, executor.span
        self.layers, self.context = executor.model.layers, executor.model.context
        self.transfers = executor.transfers
        # Keys (int, int) here and below are (tile batch, feature map).
        self.maps: dict[tuple[int, int], Map | VectorMap] = {}
        self.gradients: dict[tuple[int, int], Map | VectorMap] = {}
        self.norms: dict[int, Pending] = {}
        self._norms_at: dict[int, list[int]] = {}
        for number in sorted(
            executor.active
            & {number for segment in plan.mine for number in plan.segments[segment].nodes}
        ):
            self._norms_at.setdefault(executor.graph[number].first, []).append(number)
        self._first_with = {
            number: segment
            for segment in sorted(plan.mine, reverse=True)
            for number in plan.segments[segment].nodes
        }
        self._moments: dict[int, list] = {}
        # Result, leaves and approximate bytes of each tile whose graph is kept.
        self._kept: dict[tuple, tuple[Tensor, list, float]] = {}
        self._receiving: dict[tuple[int, int], Receiving] = {}
        self._recv_grads: dict[tuple[int, int], list[Receiving]] = {}
        self._sending: dict[tuple[int, int], list[Sending]] = {}
        self._sending_grads: dict[tuple[int, int], Sending] = {}

    def do(self, op: Operation) -> None:
        """Run one operation of any class except :class:`OutputTile` and :class:`Loss`."""
        _RUNS[type(op)](self, op)

    def output(self, op: OutputTile) -> Iterator[Tensor]:
        """Yield the logits of a tile of the network's result.

        If ``op.back`` is True, the caller runs the backward pass of the logits before it goes on.
        Then the gradients of the windows that the tile read are added to the stored gradients.
        """
        with torch.set_grad_enabled(op.back), self.span("forward", self._name(op)):
            y, leaves = self._run(op)
        yield y
        self._add_gradients(op.block, leaves)

    def close(self) -> None:
        """Release all stored feature maps, once other ranks have received the rows they read."""
        for block, tensor_id in [*self._sending]:
            self._wait_sent(block, tensor_id)
        for stored in self.maps.values():
            stored.close()
        self.maps.clear()
        self._kept.clear()

    @property
    def in_memory(self) -> float:
        """Bytes of this process's memory that kept graphs, stored maps and gradients occupy."""
        coming = (
            r.stored for those in self._recv_grads.values() for r in those if r.stored is not None
        )
        kept = sum(size for *_, size in self._kept.values())
        return kept + sum(
            stored.in_memory for stored in (*self.maps.values(), *self.gradients.values(), *coming)
        )

    def _bytes_of_graph(self, op: TileOperation) -> float:
        """Return the bytes of a tile's kept graph.

        Only the trimming of memory uses this number, so it is 0 if memory is not trimmed.
        """
        return (
            self.executor.sizes.kept(self.grid.tile_plan(op), self.grid.images[op.block])
            if self.executor.trims
            else 0.0
        )

    def _name(self, op: TileOperation) -> str:
        return self.executor.name_of(self.segments[op.segment])

    def _blocks(self) -> range:
        return range(len(self.blocks))

    # Tiles

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
        """Run a tile's backward pass; repeat its forward pass first if its graph was not kept.

        The tile read windows of stored feature maps. Their gradients are added to the stored
        gradients of these maps.
        """
        stop = self.segments[op.segment].result
        g = self._gradient(op.block, stop, op.box)
        if op.kept:
            y, leaves, _ = self._kept.pop(op.tile)
        else:
            with self.span("recompute", self._name(op)):
                y, leaves = self._run(op)
        with self.span("backward", self._name(op)):
            if stop in self.plan.active:
                g = self._with_statistics_grad(stop, op.block, op.box, g, y.detach())
            if y.requires_grad:
                torch.autograd.backward([y], [g])
        self._add_gradients(op.block, leaves)

    def _gradient(self, i: int, tensor_id: int, box: Box) -> Tensor:
        """Return the gradient of the part ``box`` of a feature map.

        It is the sum of the gradients from this rank's segments and from all other ranks that read
        the feature map. The order of the summands is fixed, so that rounding is reproducible.

        Args:
            i: the index of the tile batch.
            tensor_id: the index of the feature map.
            box: the part.
        """
        parts = []
        if (i, tensor_id) in self.gradients:
            with self.span("scratch", "read gradient"):
                parts.append(self.gradients[i, tensor_id].read(box))
        for incoming in self._recv_grads.get((i, tensor_id), ()):
            self.transfers.wait_for(
                incoming,
                box.stop[0],
                f"the gradient of {self.executor.name_of_feature_map(tensor_id)}",
            )
            with self.span("scratch", "read gradient"):
                parts.append(incoming.stored.read(box))
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def _run(self, op: TileOperation) -> tuple[Tensor, list]:
        """Return the segment's result on the tile, and the leaves of its graph.

        A leaf is (index of the feature map, window, tensor). Leaves are collected only while
        gradients are on.
        """
        segment, i = self.segments[op.segment], op.block
        boxes, device = self.grid.tile_plan(op), self.executor.device_of(segment)
        self.context.places = [self.blocks[i].place]
        leaves = []
        heartbeat(f"tile {op.box} of {self._name(op)}")
        there: dict[int, tuple[Tensor, Box]] = {}
        try:
            with self.executor.autocast():
                for number, part in zip(segment.nodes, boxes.views):
                    for source in self.executor.graph[number].inputs:
                        if source in boxes.read and source not in there:
                            there[source] = (
                                self._source(source, i, boxes.read[source], leaves, device),
                                boxes.read[source],
                            )
                    there[number + 1] = self._layer(number, part, there, op), part.output
                    for source in self.grid.frees[op.segment][number]:
                        del there[source]
        finally:
            self.context.regions = None
        return there[segment.result][0], leaves

    def _read(self, tensor_id: int, i: int, window: Box) -> Tensor:
        """Return the part ``window`` of a feature map or of the image.

        Args:
            tensor_id: the index of the map; 0 is the image.
            i: the index of the tile batch.
            window: the box to read.
        """
        if tensor_id == 0:
            with self.span("read", "pixels"):
                return self.blocks[i].pixels(window)
        self._wait_for_rows(i, tensor_id, window.stop[0])
        stored = self.maps[i, tensor_id]
        with self.span("scratch", "read"):
            # Norms do not change their input. So if only norms read the map and no graph keeps it,
            # no copy is needed.
            untouched = not self.executor.returns and len(self._norms_of(tensor_id)) == len(
                self.executor.graph.readers[tensor_id]
            )
            return stored.view(window) if untouched else stored.read(window)

    def _source(
        self, tensor_id: int, i: int, window: Box, leaves: list, device: torch.device
    ) -> Tensor:
        x = self._read(tensor_id, i, window).to(device)
        if torch.is_grad_enabled() and (tensor_id > 0 or 0 in self.plan.active):
            leaves.append((tensor_id, window, x.requires_grad_()))
        return x

    def _layer(
        self, number: int, part: LayerView, there: dict[int, tuple[Tensor, Box]], op: TileOperation
    ) -> Tensor:
        """Return the part of a layer's result that a tile needs.

        Args:
            number: the index of the layer in the graph.
            part: the boxes that the layer reads and computes.
            there: for the number of each feature map that is in memory, the cells that the tile
                reads of it, and their box.
            op: the operation on the tile.
        """
        self.transfers.progress()
        layer, ((x, have), *others) = (
            self.layers[number],
            [there[source] for source in self.executor.graph[number].inputs],
        )
        self.context.regions, self.context.current = [part], 0
        if number in self.norms:
            x = cropped(x, have, part.input)
            return self.norms[number](x, 0, layer.masks([x])[0], self._share(number, op))
        with skip_store({}):
            return run(layer, x, have, part, others)

    def _share(self, number: int, op: TileOperation) -> float:
        """Return the weight, from 0 to 1, of a tile in the statistics of norm ``number``.

        The weight is 1 for a norm of feature maps. But a norm may read a vector of the image, such
        as the means of its channels. Every tile has this whole vector, which must be counted only
        once. The weight is then the fraction of the image's cells that the tile owns. If several
        segments compute the norm, tiles of all segments but the first have weight 0.
        """
        if self.norms[number].norm.parts is None:  # A norm of feature maps.
            return 1.0
        if self._first_with[number] != op.segment:
            return 0.0
        result = self.segments[op.segment].result
        return op.box.intersection(self.grid.owned(op.block, result)).pixels / math.prod(
            self.grid.size(op.block, result)
        )

    def _add_gradients(self, i: int, leaves: list) -> None:
        """Add the gradients of a tile's inputs to the stored gradients, and empty ``leaves``.

        The inputs are the windows of feature maps that the tile read.

        Args:
            i: the index of the tile batch.
            leaves: the leaves of the tile's graph after its backward pass (:meth:`_run`).
        """
        for tensor_id, window, x in leaves:
            if tensor_id == 0:
                continue
            g = torch.zeros_like(x) if x.grad is None else x.grad
            with self.span("scratch", "add gradient"):
                self._map(self.gradients, i, tensor_id, x.detach()).add(window, g)
        leaves.clear()

    # Norms

    @torch.no_grad()
    def measure(self, op: Measure) -> None:
        """Compute the moments of a feature map for the norms that read it (:class:`Measure`).

        Moments are count, mean and sum of squared deviations.
        """
        for i in self._blocks():
            for box in strips(
                self.grid.computed(i, op.tensor_id), _CELLS if op.tensor_id else _PIXELS
            ):
                self._take_moments(op.tensor_id, i, box, self._read(op.tensor_id, i, box))

    def _norms_of(self, tensor_id: int) -> list[int]:
        """Return the layer numbers of this rank's active norms that read a feature map."""
        return self._norms_at.get(tensor_id, [])

    def _take_moments(self, tensor_id: int, i: int, box: Box, x: Tensor) -> None:
        for number in self._norms_of(tensor_id):
            if self._at(tensor_id, i, box).pixels:
                norm = self.layers[number]
                self._moments.setdefault(number, []).extend(norm.moments(x, 0, norm.masks([x])[0]))

    @torch.no_grad()
    def statistic(self, op: Statistic) -> None:
        """Compute the statistics of the norms that read a feature map (:class:`Statistic`)."""
        for number in self._norms_of(op.tensor_id):
            norm = self.layers[number]
            self.norms[number] = norm.pending(norm.statistics(self._moments.pop(number)))

    def finalize_statistics(self, op: FinalizeStatistics) -> None:
        """Sum the gradients of norms' statistics over all tiles (:class:`FinalizeStatistics`)."""
        for number in self._norms_of(op.tensor_id):
            self.norms[number].finalize()

    @torch.no_grad()
    def apply_statistics_grad(self, op: ApplyStatisticsGrad) -> None:
        """Add the gradient through norms' statistics to a feature map's stored gradient.

        See :class:`ApplyStatisticsGrad`.
        """
        for i in self._blocks():
            self._wait_for_rows(i, op.tensor_id)
            gradient, stored = self.gradients[i, op.tensor_id], self.maps[i, op.tensor_id]
            for box in strips(gradient.box, _CELLS):
                gradient.write(
                    box,
                    self._with_statistics_grad(
                        op.tensor_id, i, box, gradient.read(box), stored.read(box)
                    ),
                )

    def _with_statistics_grad(
        self, tensor_id: int, i: int, box: Box, g: Tensor, y: Tensor
    ) -> Tensor:
        """Return the gradient ``g`` of a map's cells plus the gradient through norms' statistics.

        The statistics of the norms that read the map depend on all of its cells.

        Args:
            tensor_id: the index of the map that the norms read.
            i: the index of the tile batch.
            box: the box of the cells.
            g: the gradient of the cells so far.
            y: the values of the cells.
        """
        own = self._at(tensor_id, i, box)
        for number in self._norms_of(tensor_id):
            g = self.norms[number].with_statistics_grad(
                g, y, own, 0, self.layers[number].masks([y])[0]
            )
        return g

    def _at(self, tensor_id: int, i: int, box: Box) -> Box:
        """Return the part of ``box`` that tile batch ``i`` owns, counted from the start of ``box``.

        Also set ``self.context`` to this tile batch and box, for the layers that run next.

        Args:
            tensor_id: the index of the feature map.
            i: the index of the tile batch.
            box: a box of the feature map.
        """
        owned = box.intersection(self.grid.owned(i, tensor_id))
        self.context.places = [self.blocks[i].place]
        self.context.regions = [MapView(self.grid.size(i, tensor_id), owned, box)]
        return owned.relative_to(box)

    # Communication between ranks

    def fetch_halo(self, op: FetchHalo) -> None:
        """Fill the halo of a stored feature map with cells of other ranks (:class:`FetchHalo`)."""
        for i in self._blocks():
            self._wait_for_rows(i, op.tensor_id)
        self.executor.halos.fetch(
            op.tensor_id,
            self.grid.layouts,
            self.grid.cells,
            [self.maps[i, op.tensor_id] for i in self._blocks()],
        )

    def send_halo_grad(self, op: SendHaloGrad) -> None:
        """Send the gradient of a halo to the ranks that own its cells (:class:`SendHaloGrad`)."""
        self.executor.halos.send_grad(
            op.tensor_id,
            self.grid.layouts,
            self.grid.cells,
            [self.gradients[i, op.tensor_id] for i in self._blocks()],
        )

    def recv_rows(self, op: RecvRows) -> None:
        """Start to receive a feature map that another rank computes (:class:`RecvRows`)."""
        for i in self._blocks():
            coming = Receiving(
                self.grid.computed(i, op.tensor_id),
                lambda like, i=i: self._map(self.maps, i, op.tensor_id, self._here(like)),
            )
            self._receiving[i, op.tensor_id] = self.transfers.begin(
                coming, self.plan.makers[op.tensor_id], 2 * op.tensor_id
            )

    def recv_grad_rows(self, op: RecvGradRows) -> None:
        """Start to receive the gradient of a feature map from a rank that reads the map.

        See :class:`RecvGradRows`.
        """
        for i in self._blocks():
            box = self.grid.computed(i, op.tensor_id)
            coming = Receiving(
                box,
                lambda like, i=i, box=box: self._made(
                    box, i, op.tensor_id, self._here(like), gradient=True
                ),
            )
            self._recv_grads.setdefault((i, op.tensor_id), []).append(
                self.transfers.begin(coming, op.source, 2 * op.tensor_id + 1)
            )

    def send_rows(self, op: SendRows) -> None:
        """Send final rows of a feature map to the ranks that read it.

        A row is final if no later pass changes it (:class:`SendRows`).
        """
        key = op.block, op.tensor_id
        if key not in self._sending:
            readers = self.plan.readers[op.tensor_id]
            made = self.grid.computed(*key)
            self._sending[key] = [
                self.transfers.begin(Sending(self.maps[key], made), reader, 2 * op.tensor_id)
                for reader in readers
            ]
        for sending in self._sending[key]:
            sending.final = op.final
        self.transfers.progress()

    def send_grad_rows(self, op: SendGradRows) -> None:
        """Send final rows of a feature map's gradient to the rank that computed the map.

        A row is final if nothing more is added to it (:class:`SendGradRows`).
        """
        # Tile batches are sent in order. Rows of a small batch may become final only after rows of
        # the next batch.
        for i in range(op.block + 1):
            if (i, op.tensor_id) not in self._sending_grads:
                gradient = self.gradients[i, op.tensor_id]
                sending = Sending(gradient, self.grid.computed(i, op.tensor_id), gradient.close)
                self._sending_grads[i, op.tensor_id] = self.transfers.begin(
                    sending, self.plan.makers[op.tensor_id], 2 * op.tensor_id + 1
                )
        key = op.block, op.tensor_id
        self._sending_grads[key].final = op.final
        if op.final == self.grid.computed(*key).stop[0]:
            del self.gradients[key]  # ``Sending`` closes it once it is sent.
        self.transfers.progress()

    def _wait_for_rows(self, i: int, tensor_id: int, row: int | None = None) -> None:
        """Wait until rows of a feature map have arrived from another rank.

        Return at once if this rank computes the feature map.

        Args:
            i: the index of the tile batch.
            tensor_id: the index of the feature map.
            row: the row before which all rows must have arrived; None for all rows of the map.
        """
        if (coming := self._receiving.get((i, tensor_id))) is not None:
            self.transfers.wait_for(
                coming,
                coming.box.stop[0] if row is None else row,
                self.executor.name_of_feature_map(tensor_id),
            )

    def _wait_sent(self, i: int, tensor_id: int) -> None:
        for sending in self._sending.pop((i, tensor_id), ()):
            self.transfers.wait_sent(sending, self.executor.name_of_feature_map(tensor_id))

    # Stored feature maps

    def drop(self, op: Drop) -> None:
        """Release a stored feature map (:class:`Drop`).

        Wait first until the messages that receive or send rows of the map are complete.
        """
        for i in self._blocks():
            self._wait_for_rows(i, op.tensor_id)  # Rows that no window reads arrive too.
            self._wait_sent(i, op.tensor_id)
            self._close(self.maps, i, op.tensor_id)

    def drop_gradient(self, op: DropGradient) -> None:
        """Release the stored gradients of a feature map (:class:`DropGradient`)."""
        for i in self._blocks():
            self._close(self.gradients, i, op.tensor_id)
            for incoming in self._recv_grads.pop((i, op.tensor_id), ()):
                incoming.stored.close()

    def _close(self, maps: dict, i: int, tensor_id: int) -> None:
        if (i, tensor_id) in maps:
            maps.pop((i, tensor_id)).close()

    def _map(self, maps: dict, i: int, tensor_id: int, like: Tensor) -> Map:
        """Return the object that stores a feature map or its gradient; make it at the first call.

        Args:
            maps: ``self.maps`` or ``self.gradients``, the objects that exist so far.
            i: the index of the tile batch.
            tensor_id: the index of the map.
            like: a tensor with the channels, dtype and device of the map.
        """
        if (i, tensor_id) not in maps:
            maps[i, tensor_id] = self._made(
                self.grid.stored_box(i, tensor_id),
                i,
                tensor_id,
                like,
                gradient=maps is self.gradients,
            )
        return maps[i, tensor_id]

    def _made(
        self, box: Box, i: int, tensor_id: int, like: Tensor, gradient: bool
    ) -> Map | VectorMap:
        """Return a new stored map for the part ``box`` of a feature map or of its gradient.

        Args:
            box: the part.
            i: the index of the tile batch.
            tensor_id: the index of the feature map.
            like: a tensor of any part of the map, from which the number of channels, dtype, device
                and memory format are taken.
            gradient: True for the gradient.
        """
        if tensor_id in self.executor.model.vectors:
            return VectorMap(box, like, gradient)
        # Trimming subtracts the maps' bytes from the process's size, so all pages must exist.
        zero = gradient or self.executor.trims
        return Map(box, like, self.executor.folder, zero=zero, rows=self.grid.in_rows(i, tensor_id))

    def _here(self, like: Tensor) -> Tensor:
        return like.to(self.executor.devices[0])


_RUNS: dict[type[Operation], Callable[[MicroBatchRun, Operation], None]] = {
    RecvRows: MicroBatchRun.recv_rows,
    RecvGradRows: MicroBatchRun.recv_grad_rows,
    Measure: MicroBatchRun.measure,
    ForwardTile: MicroBatchRun.forward,
    Statistic: MicroBatchRun.statistic,
    SendRows: MicroBatchRun.send_rows,
    BackwardTile: MicroBatchRun.backward,
    FinalizeStatistics: MicroBatchRun.finalize_statistics,
    ApplyStatisticsGrad: MicroBatchRun.apply_statistics_grad,
    SendGradRows: MicroBatchRun.send_grad_rows,
    FetchHalo: MicroBatchRun.fetch_halo,
    SendHaloGrad: MicroBatchRun.send_halo_grad,
    Drop: MicroBatchRun.drop,
    DropGradient: MicroBatchRun.drop_gradient,
}
