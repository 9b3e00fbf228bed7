"""Predict whole images exactly, tile by tile, with the memory that one tile needs.

It runs the executor of streamed tiles (:mod:`distseg.runtime.streaming`), forward only. If every
norm is frozen, a tile depends on its own window alone, so each tile may go to any rank.

An active norm (instance, group) computes its statistics from the current image, so it needs all of
a feature map first. Each rank then computes a block of the image, and feature maps wait in memory
or in a scratch folder between one norm and the next.
A network that cannot be computed in parts is computed window by window
(:mod:`distseg.inference.windows`).
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from pathlib import Path

import numpy as np
import torch

from distseg.comm.collective import Alone
from distseg.comm.staging import upload
from distseg.config.sizes import Size
from distseg.data.formats.plausible import free_memory
from distseg.data.prefetch import prefetch
from distseg.inference.image_source import ImageSource
from distseg.inference.windows import Windows
from distseg.layers.norm import DistributedNorm
from distseg.models.network import check_calls, check_size
from distseg.planning.tile_size import Activations, BudgetTiling, SizeTiling
from distseg.runtime.partition import Partition
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.streaming import StreamingExecutor, computed, windows
from distseg.runtime.swap_layers import TiledModel
from distseg.runtime.tile_program import all_operations
from distseg.tiling.layout import Layout
from distseg.tiling.segment import segments_of
from distseg.tiling.tile import (
    Box,
    BoxGrid,
    ChosenBoxes,
    TilePlacement,
    most_even_grid,
    split,
    tiles,
    window,
)
from distseg.tiling.tile_batch import LazyTileBatch

_SHARE = 0.5  # the share of free memory that waiting feature maps may take
_PLANNED = 512  # windows of tiles whose boxes are made at once


def check_images(predictor, sizes: Mapping[Sequence[int], str]) -> None:
    """Refuse images that cannot be predicted, before anything is computed.

    Args:
        predictor: an object with a method ``check(size)`` that raises ValueError.
        sizes: a dict from each size that images have to the name of one image of that size.

    Raises:
        ValueError: an image cannot be predicted. The message names the image and the setting.
    """
    for size, name in sorted(sizes.items()):
        try:
            predictor.check(size)
        except ValueError as e:
            raise ValueError(f"image {name!r} of {Size(size)} pixels: {e}") from None


class Predictor:
    """Prediction of whole images by a model in evaluation mode, tile by tile, on all ranks.

    All ranks must make the same calls.

    Args:
        model: the parallelized model, on its devices. The predictor sets the communicators of the
            model's context.
        replicas: the communicator of the ranks that hold the same layers. The tiles of an image are
            divided among these ranks.
        devices: the devices of this rank, one for each of its stages or one for all.
        autocast: function without arguments that returns the context manager in which the network
            runs, such as one of ``torch.autocast``.
        tile: the size of a tile in pixels; used if no ``budget`` is given.
        scratch: the folder where feature maps wait between active norms, or ``memory``. By default
            they wait in memory if they fit into half of the free bytes, else in the system's folder
            for temporary files.
        channels_last: True if tensors have the memory format ``channels_last``.
        pipeline: this rank's part of the pipeline; None if the model is not cut into stages.
        outputs: the number of channels of the network's output. The predictor does not use it; a
            caller that writes probabilities does.
        exact: True if the halo is computed from the model. False if the config sets the halo; then
            every layer computes whole windows.
        neighbours: the number of ranks on this rank's node, which share its memory; this rank is
            one of them.
        budget: the budget for activations in bytes, the same on all ranks. Tiles are as large as
            the budget allows, and feature maps wait in memory if they fit too. None for tiles of
            the size ``tile``.
    """

    def __init__(
        self,
        model: TiledModel,
        replicas,
        devices: Sequence[torch.device],
        autocast: Callable[[], AbstractContextManager],
        tile: Size,
        scratch: str | None = None,
        channels_last: bool = False,
        pipeline: Pipeline | None = None,
        outputs: int | None = None,
        exact: bool = True,
        neighbours: int = 1,
        budget: float | None = None,
    ):
        self.model, self.replicas, self.devices, self.autocast = (
            model,
            replicas,
            list(devices),
            autocast,
        )
        self.tile, self.scratch, self.channels_last, self.pipeline = (
            tile,
            scratch,
            channels_last,
            pipeline,
        )
        self.outputs, self.exact, self.neighbours = outputs, exact, neighbours
        # Rounded down, so that small changes of the free memory do not change the tiles.
        self.budget = None if budget is None else 2 ** (int(4 * math.log2(budget)) / 4)
        self._workers = {replicas.size: replicas}
        self._sizes: dict[tuple[int, ...], Size] = {}
        self._layouts: dict[tuple, Layout] = {}
        self._tilings: dict[float, BudgetTiling] = {}

    @property
    def last(self) -> bool:
        """True if this rank holds the last stage of the pipeline, which has the results."""
        return self.pipeline is None or self.pipeline.last

    @property
    def writes(self) -> bool:
        """True on the rank that writes results: the first rank that holds the last stage."""
        return self.last and self.replicas.rank == 0

    @property
    def windowed(self) -> bool:
        """True if every layer computes whole windows, not only the cells that the tile needs.

        A window is a tile with its halo. This holds for models that are not a graph of layers, and
        if a setting treats each window as a whole image.
        """
        approximate = not self.exact or (
            self.model.context.per_window and self.model.active_in_training
        )
        return self.model.graph is None or approximate

    @property
    def independent(self) -> bool:
        """True if the result of a tile depends only on its window: the tile with its halo."""
        return not self.model.always_active or self.model.context.per_window

    def grid_of(self, size) -> Size:
        """Return the number of tiles of an image along each dim.

        A tile is at most as large as the setting ``predict.tile`` or, with a budget, as the budget
        allows. If tiles are smaller than the image, their size is rounded down to a multiple of the
        model's total stride, but is at least one stride.
        """
        steps = (
            n if t >= n else max(1, t // s) * s
            for t, s, n in zip(self._tile_of(size), self.model.reach.stride, size)
        )
        return Size(-(-n // step) for n, step in zip(size, steps))

    def layout(self, size, borders: Sequence[Sequence[int]] | None = None) -> Layout:
        """Return the boxes of all feature maps of an image that is cut into blocks.

        Each block is computed by one rank.

        Args:
            size: the size of the image in pixels.
            borders: the borders of the blocks into which the image is cut, along each dim, from 0
                to the size of the image. By default the image is one block.
        """
        borders = borders or [(0, n) for n in size]
        key = tuple(map(tuple, borders))
        if key not in self._layouts:
            # Only the last layout is kept, since images often have one size.
            layout = Layout(self.model.graph, size, borders, "all").check_result(borders)
            self._layouts = {key: layout}
        return self._layouts[key]

    def _tiling(self, budget: float) -> BudgetTiling:
        """Return the object that chooses tile sizes whose activations fit into ``budget`` bytes.

        A second call with the same budget returns the same object, which remembers its tiles.
        """
        return self._tilings.setdefault(budget, BudgetTiling(self._activations, budget))

    def _tile_of(self, size) -> Size:
        """Return the size of the tiles of an image, before it is rounded to the total stride."""
        if self.exact and self.model.graph is None:  # its receptive field is not known
            return Size(size)
        if self.budget is None or self.windowed:
            return self.tile
        size = tuple(size)
        if size not in self._sizes:
            last = segments_of(
                self.model.graph,
                self.model.active_in_evaluation,
                self._cut.ranges if self._cut else (),
            )[-1]
            self._sizes[size] = Size(
                self._tiling(self.budget)(self.layout(size), last, Box.whole(size), 1)
            )
        return self._sizes[size]

    def check(self, size) -> None:
        """Refuse an image that cannot be predicted, before anything is computed.

        Args:
            size: the size of the image in pixels.

        Raises:
            ValueError: the image cannot be predicted. The message names the setting.
        """
        if len(self.tile) != len(size):
            raise ValueError(
                f"predict.tile is {self.tile}, of {len(self.tile)} dims, "
                f"but images have {len(size)}: give predict.tile one number for each dim"
            )
        check_size(self.model.model, size)
        check_calls(self.model.model, size)
        if self.scratch not in (None, "memory") and not Path(self.scratch).is_dir():
            raise ValueError(
                f"predict.scratch is {self.scratch}, which is not a folder: make it, or name "
                "another"
            )
        if not (self.windowed or self.independent):
            self._check_norms(self.layout(size).sizes)
        if self.windowed and not self.independent and len(self.tiles_of(size)) > 1:
            raise ValueError(
                f"predict.tile {self.tile} cuts an image of {Size(size)} pixels into several "
                "tiles, but a model with active norms that is predicted window by window needs "
                "the image in one tile: raise predict.tile to the size of the image, leave "
                "approximate.halo out, use batch norm, or write the model as an nn.Sequential of "
                "single layers"
            )

    def _check_norms(self, sizes: Sequence[tuple[int, ...]]) -> None:
        """Refuse images for which an active norm of this rank's stages gets one value per channel.

        The variance of a single value is not defined.

        Args:
            sizes: the size of each feature map of the image, by its tensor id in ``model.graph``.

        Raises:
            ValueError: a feature map is too small. The message names the norm.
        """
        for number in self.model.active_in_evaluation:
            norm, source = self.model.layers[number], self.model.graph[number].first
            if isinstance(norm, DistributedNorm):
                norm.check_map(math.prod(sizes[source]), self.model.channels[source])

    def tiles_of(self, size) -> BoxGrid:
        """Return the tiles of an image, row by row; they do not depend on the number of ranks."""
        return tiles(size, self.grid_of(size), self.model.reach.stride)

    def deal(self, size, numbers: Sequence[int] | None = None) -> list[list[int]]:
        """Divide the tiles of an image among the ranks.

        The result has for each rank the indices of its tiles, in the order in which it computes
        them.

        Args:
            size: the size of the image in pixels.
            numbers: the indices of the tiles to compute; by default all.
        """
        wanted = range(len(self.tiles_of(size))) if numbers is None else numbers
        if self._dealt_singly:
            return [list(wanted[rank :: self.replicas.size]) for rank in range(self.replicas.size)]
        grid = self.grid_of(size)
        owners = _blocks(grid, self._ranks_of(grid))
        return [[n for n in wanted if owners[n] == rank] for rank in range(self.replicas.size)]

    def deal_images(self, sizes: Sequence[Sequence[int]]) -> tuple[int, list[list[Share]]]:
        """Divide the work on several images so that all ranks have about the same amount of work.

        If any rank may compute any tile, the tiles of all images are divided among all ranks.
        Otherwise the ranks form groups, and the images are divided among the groups. The ranks of
        a group compute an image together, each at least one tile. There are at most as many groups
        as images, and a group has at least as many ranks as can share the image with the fewest
        tiles.

        Args:
            sizes: the size of each image in pixels.

        Returns:
            The number of ranks in a group, which is 1 if any rank may compute any tile; and for
                each rank the list of the images, or parts of images, that it computes.
        """
        if self._dealt_singly:
            every = [
                (image, n)
                for image, size in enumerate(sizes)
                for n in range(len(self.tiles_of(size)))
            ]
            parts = (
                every[
                    len(every) * r // self.replicas.size : len(every)
                    * (r + 1)
                    // self.replicas.size
                ]
                for r in range(self.replicas.size)
            )
            return 1, [
                [
                    Share(image, [n for _, n in those])
                    for image, those in groupby(part, key=lambda item: item[0])
                ]
                for part in parts
            ]
        together = min((self._ranks_of(self.grid_of(size)).volume for size in sizes), default=1)
        groups = max(1, min(self.replicas.size // together, len(sizes)))
        together = self.replicas.size // groups
        dealt = [
            [Share(image, None) for image in range(group, len(sizes), groups)]
            for group in range(groups)
        ]
        return together, [
            dealt[r // together] if r // together < groups else []
            for r in range(self.replicas.size)
        ]

    def among(self, ranks: int) -> Predictor:
        """Return a copy of this predictor that divides an image only among a group of ranks.

        It is the group that this rank belongs to. All ranks must call it together.

        Args:
            ranks: the number of ranks of a group, which are consecutive. If a group has all ranks,
                the predictor itself is returned.
        """
        if ranks == self.replicas.size:
            return self
        part = copy.copy(self)
        part.replicas = (
            Alone()
            if ranks == 1
            else self.replicas.Split(self.replicas.rank // ranks, self.replicas.rank)
        )
        part._workers = {part.replicas.size: part.replicas}
        return part

    def __call__(
        self, source: ImageSource, numbers: Sequence[int] | None = None
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Apply the network to an image; yield (tile, logits) for the tiles of this rank.

        :meth:`deal` says which tiles these are.

        Logits are (C', *tile.size) float32, or float64 if the network computes in float64. If the
        network has one output vector for each image, this vector (C', 1, ...) is yielded, perhaps
        several times with different boxes. Ranks without the last stage yield nothing.

        Args:
            source: the image.
            numbers: the indices of the tiles to compute, the same on all ranks; by default all.
        """
        every = self.tiles_of(source.size)
        mine = ChosenBoxes(every, self.deal(source.size, numbers)[self.replicas.rank])
        # If one tile is the whole image, no feature maps have to wait.
        whole_image = len(every) == 1 and self._cut is None and self.budget is None
        if self.windowed or whole_image:
            yield from self._by_windows(source, mine)
        elif not self._dealt_singly:
            yield from self._in_blocks(source, mine)
        elif mine:
            yield from self._streaming(source, Alone(), Box.whole(source.size), None, mine)

    def computed(self, size, numbers: Sequence[int] | None = None) -> Iterator[tuple[int, Box]]:
        """Yield (layer number, output box) for each layer and tile that this rank would compute.

        Nothing is computed. Benchmarks use it to count the work of a prediction.
        Models that are computed window by window are not supported.

        Args:
            size: the size of the image in pixels.
            numbers: the indices of the tiles to compute; by default all.
        """
        every = self.tiles_of(size)
        mine = ChosenBoxes(every, self.deal(size, numbers)[self.replicas.rank])
        block, borders = (Box.whole(size), None) if self._dealt_singly else self._block(size)
        executor, place = self._executor(size, block, borders)
        plan = executor.plan([place], boxes=[mine])
        return computed(all_operations(plan), plan)

    @property
    def _dealt_singly(self) -> bool:
        """True if any rank may compute any tile.

        This holds if a tile depends on its own window only, and each rank has all layers.
        """
        return self.independent and (self.pipeline is None or self.pipeline.comm.size == 1)

    def _ranks_of(self, grid: Size) -> Size:
        """Return how many ranks share an image, along each dim.

        Each of these ranks computes a block of at least one tile. If there are fewer tiles than
        ranks, some ranks are not used.

        Args:
            grid: the number of tiles of the image along each dim.
        """
        return most_even_grid(grid, (1,) * len(grid), self.replicas.size)

    def _in_blocks(
        self, source: ImageSource, mine: Sequence[Box]
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Compute this rank's block of an image; yield (tile, logits) for the tiles ``mine`` in it.

        The ranks of all blocks work together: they exchange halos and statistics of active norms.
        """
        count = self._ranks_of(self.grid_of(source.size)).volume
        workers = self._first(count)
        if self.replicas.rank < count:
            yield from self._streaming(source, workers, *self._block(source.size), mine)

    def _block(self, size) -> tuple[Box, list[list[int]]]:
        """Return the box of the image that this rank computes, and the borders of all such blocks.

        The borders are given along each dim, from 0 to the size of the image. Each border between
        blocks is also a border between tiles.
        """
        grid, stride = self.grid_of(size), self.model.reach.stride
        ranks = self._ranks_of(grid)
        starts = [[a for a, _ in split(n, g, s)] for n, g, s in zip(size, grid, stride)]
        borders = [
            [*(begun[a] for a, _ in split(g, r, 1)), n]
            for begun, g, r, n in zip(starts, grid, ranks, size)
        ]
        cell = np.unravel_index(self.replicas.rank, ranks)
        return Box(
            tuple(b[c] for b, c in zip(borders, cell)),
            tuple(b[c + 1] for b, c in zip(borders, cell)),
        ), borders

    def _streaming(
        self,
        source: ImageSource,
        workers,
        block: Box,
        borders: Sequence[Sequence[int]] | None,
        mine: Sequence[Box],
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (tile, logits) for this rank's tiles, computed by the streaming executor.

        Args:
            source: the image.
            workers: the communicator of the ranks that compute the image.
            block: the part of the image that this rank computes.
            borders: the borders of all blocks, as in :meth:`layout`.
            mine: the tiles to compute.
        """
        reader = _Reader(source.read)
        executor, place = self._executor(source.size, block, borders)
        with self._evaluating(workers), executor.transfers.moving():
            blocks = [LazyTileBatch(place, lambda box: self._uploaded(reader(box)))]
            # The label of a whole image depends on all of its tiles.
            plan = executor.plan([place], boxes=None if self.model.of_image else [mine])
            # Tiles are planned one at a time, once to be read ahead and once to be computed.
            with reader.ahead(windows(all_operations(plan), plan)):
                outputs = executor.run(all_operations(plan), [plan], [blocks])
                results = ((op.box, y) for op, y in outputs)
                while (found := self._next(results)) is not None:
                    yield found
            executor.transfers.flush()

    @torch.no_grad()
    def _next(self, results: Iterator[tuple[Box, torch.Tensor]]) -> tuple[Box, np.ndarray] | None:
        """Return the next (tile, logits) of ``results`` as a NumPy array, or None at their end.

        Gradients are disabled only during this call, so the code that iterates over the results
        keeps its own setting of gradients.
        """
        for box, output in results:
            return box, output[0].to(torch.promote_types(output.dtype, torch.float32)).cpu().numpy()
        return None

    @property
    def _cut(self) -> Partition | None:
        """The model's partition into stages; None if all stages are on one device of one rank."""
        return (
            self.pipeline.partition
            if self.pipeline and (self.pipeline.comm.size > 1 or len(self.devices) > 1)
            else None
        )

    def _executor(
        self, size, block: Box, borders: Sequence[Sequence[int]] | None
    ) -> tuple[StreamingExecutor, TilePlacement]:
        """Return an executor for a block of an image, and the block's tile placement.

        Feature maps wait in memory if they fit, else in files.

        Args:
            size: the size of the image in pixels.
            block: the block of the image that this rank computes.
            borders: for each dim, the borders of the blocks into which the image is cut, from 0 to
                the size of the image; None if the image is one block.
        """
        place = TilePlacement(tuple(size), block, window(block, size, self.model.reach), (0,), (0,))
        layout = self.layout(size, borders)
        executor = self._in_memory(layout)
        stored = executor.stored([place])
        if not self._fits(stored):
            executor.folder, stored = self.scratch or tempfile.gettempdir(), 0
            executor.require_scratch_space([place])
        if self.budget is not None:
            executor.tiling = self._tiling(self.budget - stored)
        return executor, place

    def _in_memory(self, layout: Layout) -> StreamingExecutor:
        """Return an executor that keeps feature maps in memory.

        ``layout`` says which boxes of the feature maps each rank computes.
        """
        model, cut = self.model, self._cut
        stages, placement, comm = (
            (cut.ranges, cut.placement, self.pipeline.comm) if cut else ((), (0,), Alone())
        )
        return StreamingExecutor(
            model,
            model.graph,
            model.active_in_evaluation,
            lambda image: layout,
            SizeTiling(self._tile_of(layout.image)),
            None,
            self._activations,
            self.autocast,
            self.devices,
            stages,
            placement,
            comm,
            returns=False,
            trims=self.budget is not None,
        )

    def _fits(self, stored: int) -> bool:
        """Return True if feature maps of ``stored`` bytes can be kept in memory."""
        if self.scratch is not None:
            return self.scratch == "memory"
        return stored <= _SHARE * (
            self.budget if self.budget is not None else free_memory() / self.neighbours
        )

    def _by_windows(
        self, source: ImageSource, mine: Sequence[Box]
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (tile, logits), each tile computed from its window: the tile with its halo.

        All layers compute the whole window, so no halos are exchanged.

        Args:
            source: the image.
            mine: the tiles of this rank.
        """
        size, reach = tuple(source.size), self.model.reach
        workers = self._first(min(self.replicas.size, len(self.tiles_of(size))))
        with self._evaluating(workers):
            for at in range(0, len(mine), _PLANNED):
                places = [
                    TilePlacement(size, tile, window(tile, size, reach), (0,), (0,))
                    for tile in mine[at : at + _PLANNED]
                ]
                yield from self._windows_of(source, places)

    def _windows_of(
        self, source: ImageSource, places: list[TilePlacement]
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (tile, logits) of the tiles of some windows, as :meth:`_by_windows` does."""
        reads = self.pipeline is None or self.pipeline.first
        with closing(
            prefetch((source.read(place.window) for place in places if reads), 1)
        ) as ahead:
            # Windows are requested in order, each once, so the index is not needed.
            results = self._windows(places, lambda i: self._uploaded(next(ahead)))
            while (
                found := self._next((places[i].tile, output) for i, output in results)
            ) is not None:
                yield found

    @cached_property
    def _windows(self) -> Windows:
        partition, comm = (
            (self.pipeline.partition, self.pipeline.comm) if self.pipeline else (None, Alone())
        )
        return Windows(self.model, partition, comm, self.devices[0], self.autocast)

    @cached_property
    def _activations(self) -> Activations:
        """Return the object that computes how much memory feature maps take in the prediction."""
        with self.autocast():
            kind = self.devices[0].type
            dtype = (
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
            )
        model = self.model
        return Activations(
            model.graph,
            model.kinds,
            model.channels,
            dtype.itemsize,
            self.dtype.itemsize,
            self.channels_last,
            graph_kept=False,
        )

    def _uploaded(self, pixels: np.ndarray) -> torch.Tensor:
        """Return pixels (C, *size) as a tensor (1, C, *size) that the network can take.

        The tensor has the network's dtype and memory format and lies on this rank's first device.
        """
        return upload(
            torch.from_numpy(pixels).unsqueeze(0), self.devices[0], self.dtype, self.channels_last
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return next((p.dtype for p in self.model.parameters()), torch.float32)

    def _first(self, count: int):
        """Return a communicator of the first ``count`` ranks or, on other ranks, of the others.

        All ranks must call it together. The first ranks compute images that have fewer tiles than
        there are ranks.
        """
        if count not in self._workers:
            self._workers[count] = self.replicas.Split(
                int(self.replicas.rank >= count), self.replicas.rank
            )
        return self._workers[count]

    def agree(self, numbers: list[int] | None) -> list[int] | None:
        """Send ``numbers`` from the rank that writes results to all ranks, and return them.

        All ranks must call it together. ``numbers`` of the other ranks are ignored.

        Args:
            numbers: the indices of the tiles to compute, or None to compute nothing.
        """
        numbers = self.replicas.bcast(numbers, root=0) if self.last else numbers
        return (
            numbers
            if self.pipeline is None
            else self.pipeline.comm.bcast(numbers, root=self.pipeline.partition.placement[-1])
        )

    @contextmanager
    def _evaluating(self, workers):
        """Set the model to evaluation mode during a ``with`` block; restore its mode at the end.

        Args:
            workers: the communicator of the ranks that compute the image. Active norms add their
                statistics over these ranks.
        """
        context, training = self.model.context, self.model.training
        before = context.norm_comm, context.batch_comm, self.model.exchange
        context.norm_comm = context.batch_comm = workers
        self.model.exchange = None
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)
            context.norm_comm, context.batch_comm, self.model.exchange = before


@dataclass(frozen=True)
class Share:
    """Part of the work of a rank: the index of an image, and the indices of tiles to compute.

    ``tiles`` is None if all tiles are to be computed, by the ranks that share the image.
    """

    image: int
    tiles: list[int] | None


class _Reader:
    """Reader of windows of an image that reads the next window while the current one is computed.

    Args:
        read: a function of a box that returns its pixels, (C, *box.size).
    """

    def __init__(self, read: Callable[[Box], np.ndarray]):
        self.read = read
        self._ahead: Iterator[tuple[Box, np.ndarray]] = iter(())
        self._next: tuple[Box, np.ndarray] | None = None  # the window that was read ahead

    @contextmanager
    def ahead(self, windows: Iterable[Box]) -> Iterator[None]:
        """Let a thread read ``windows`` during a ``with`` block, one window ahead of the caller.

        Args:
            windows: the boxes in the order in which the caller will ask for them. Another box is
                also allowed; it is read only when the caller asks for it.
        """
        pixels = ((box, self.read(box)) for box in windows)
        with closing(prefetch(pixels, 1)) as self._ahead:
            self._next = None
            yield

    def __call__(self, box: Box) -> np.ndarray:
        self._next = self._next or next(self._ahead, None)
        if self._next is None or self._next[0] != box:
            return self.read(box)
        (_, found), self._next = self._next, None
        return found


def _blocks(grid: Size, ranks: Size) -> list[int]:
    """Return the rank that computes each tile, in the order of the tiles, row by row.

    Args:
        grid: the number of tiles along each dim.
        ranks: the number of ranks along each dim, at most ``grid``.
    """
    owner = [
        [r for r, (a, b) in enumerate(split(g, n, 1)) for _ in range(a, b)]
        for g, n in zip(grid, ranks)
    ]
    return [int(np.ravel_multi_index(cell, ranks)) for cell in product(*owner)]
