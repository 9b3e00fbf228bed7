"""Tiles in time: a rank computes its part of an image tile after tile, in the memory of one, with the whole part's gradient.

Between the layers that need all of a feature map, which are the live norms, lie segments (:mod:`distseg.geometry.segment`).
Their borders are stored, in a scratch folder or in the host's memory. Forward, a segment is run on windows of the map before
it, tile by tile of its result, and the statistics of the next norm are collected on the way. Backward, a segment is run once
more on each window, now with a graph, and what reaches the window is added to the stored gradient of that map::

    forward      read window - norm act conv - write tile, moments           then: statistics over all tiles, all ranks
    backward     read gradient of the tile, read window - the same again - backward - add to gradient of the window
                                                                             then: what the statistics collected

Without live norms there is one segment, the whole network: nothing is stored but the image.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Callable, ContextManager, Iterator, Protocol, Sequence

import torch
from torch import Tensor

from distseg.geometry.layout import Layout, Link, Part, Region
from distseg.geometry.segment import Segment, chain, segments_of
from distseg.geometry.tile import Box, Place, split
from distseg.launch import memory_in_use, release_freed_memory
from distseg.models.layers import Pop, Stash, skip_store
from distseg.spatial.local import cropped, run
from distseg.spatial.norm import DistributedNorm, Pending
from distseg.spatial.parallelize import TiledModel
from distseg.spatial.piece import Piece
from distseg.spatial.scratch import Map, check_room


_STRIP = 1 << 24  # labels read at once
_GROWN = 1.2  # by how much the process may outgrow its first tile before free memory goes back; each time costs the next tile new pages
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Block:
    """What a rank owns of B images of one size, read part by part.

    ``pixels(box)`` (B, C, *box.size) as the network takes them, ``labels(box)`` (B, *box.size).
    """

    place: Place
    pixels: Callable[[Box], Tensor]
    labels: Callable[[Box], Tensor] | None = None


def block_of(piece: Piece) -> Block:
    """A piece that is in memory, read part by part."""
    place = piece.place
    within = lambda x, box, have: x[(..., *box.relative_to(have).slices)]
    return Block(place, lambda box: within(piece.pixels, box, place.window), lambda box: within(piece.labels, box, place.tile))


class Tiling(Protocol):
    """How the result of a segment is cut."""

    def __call__(self, layout: Layout, segment: Segment, result: Box, images: int) -> Sequence[int]:
        """The grid of tiles."""


class InTime:
    """The executor of a flat model on one rank.

    Args:
        links: of its layers (:func:`distseg.spatial.exchange.links_of`).
        layout: of an image on the mesh's tiles, read as windows.
        folder: for stored maps; None: the host's memory.
        stored: (what is held of the map before a layer, segments, images) -> bytes that the maps take.
        autocast: makes the context in which the network runs.

    Attributes:
        watch: told the share of a step that is done, now and then.
        span: makes the context of what is done, by kind and name, for those who watch (:mod:`distseg.pipeline.trace`).
    """

    def __init__(
        self, model: TiledModel, links: Sequence[Link], layout: Callable[[Sequence[int]], Layout], tiling: Tiling, folder: str | None,
        stored: Callable[[Callable[[int], Box], Sequence[Segment], int], int], autocast: Callable[[], ContextManager],
    ):  # fmt: skip
        self.model, self.links, self.layout, self.tiling, self.folder = model, list(links), layout, tiling, folder
        self.stored, self.autocast = stored, autocast
        self.watch: Callable[[float], None] = lambda share: None
        self.span: Callable[[str, str], ContextManager] = lambda kind, name: nullcontext()
        self._segments: dict[tuple[int, ...], list[Segment]] = {}

    def segments(self) -> list[Segment]:
        """Cut before each norm that is live now."""
        live = tuple(p for p, layer in enumerate(self.model.layers) if isinstance(layer, DistributedNorm) and layer.live)
        if live not in self._segments:
            self._segments[live] = segments_of(self.links, live)
        return self._segments[live]

    def label_tiles(self, block: Block) -> Iterator[Box]:
        """The tile of a block, in strips of rows that are read at once."""
        tile = block.place.tile
        rows = max(1, _STRIP // max(1, tile.pixels // tile.size[0]))
        for a in range(tile.start[0], tile.stop[0], rows):
            yield Box((a, *tile.start[1:]), (min(a + rows, tile.stop[0]), *tile.stop[1:]))

    def describe(self, image: Sequence[int]) -> str:
        """What a step on an image of this size is made of, for the first of its ranks."""
        layout = self.layout(image)
        tile = layout.part(0, (0,) * len(layout.grid)).owned
        walk = Walk(self, [Block(Place(tuple(image), tile, tile, (0,), (0,)), lambda box: None)])
        if len(walk.segments) == 1:
            return f"tiles in time: {walk.visits} windows a step, one after another"
        where = f"in {self.folder}" if self.folder else "in memory"
        return f"tiles in time: {len(walk.segments)} segments, {walk.visits} tiles a step there and back; {walk.stored / 1e9:.3g} GB of feature maps wait {where}"

    def walk(self, blocks: Sequence[Block]) -> "Walk":
        """Through the network with the blocks of a micro-batch.

        Raises:
            OSError: the scratch folder has no room for what will be stored.
        """
        walk = Walk(self, blocks)
        if self.folder is not None and len(walk.segments) > 1:
            check_room(self.folder, walk.stored)
        return walk


class Walk:
    """The blocks of one micro-batch on their way through the network, there and back."""

    def __init__(self, executor: InTime, blocks: Sequence[Block]):
        self.executor, self.blocks = executor, list(blocks)
        self.segments, self.layers = executor.segments(), executor.model.layers
        self.context = executor.model.context
        self.layouts = [executor.layout(block.place.image) for block in blocks]
        self.cells = [layout.cell_of(block.place.tile) for layout, block in zip(self.layouts, blocks)]
        self.maps: dict[tuple[int, int], Map] = {}
        self.gradients: dict[tuple[int, int], Map] = {}
        self.norms: dict[int, Pending] = {}
        self.watch: Callable[[float], None] = lambda share: None
        self._done, self.visits = 0, sum(self._count(s) for s in self.segments[:-1]) * 2 + self._count(self.segments[-1])
        self.outside = {skip.stash for segment in self.segments for skip in segment.skips.values()}

    @property
    def stored(self) -> int:
        """Bytes of the maps that it will store, at most at once."""
        sizes = (self.executor.stored(partial(self._held, i=i), self.segments, len(block.place.images)) for i, block in enumerate(self.blocks))
        return sum(sizes)

    @torch.no_grad()
    def forward(self) -> None:
        """All segments but the last. Collective over the ranks that share statistics."""
        if self._live(0):
            self._meet_norm(0, [part for i, box in self._tiles(self.segments[0]) for part in self._moments(0, i, box, self.blocks[i].pixels(box))])
        for segment in self.segments[:-1]:
            parts = []
            for i, box in self._tiles(segment):
                with self.span("forward", self._name(segment)):
                    y, _ = self._run(segment, i, box)
                with self.span("scratch", "write"):
                    self._map(self.maps, i, segment.layers.stop, y).write(box, y)
                parts += self._moments(segment.layers.stop, i, box, y)
            if self._live(segment.layers.stop):
                self._meet_norm(segment.layers.stop, parts)

    def outputs(self) -> Iterator[tuple[int, Box, Tensor]]:
        """(block, tile, logits (B, C', *tile.size)) of the last segment, tile by tile, with a graph if gradients are on.

        With a graph, :meth:`take_in` follows each, once its backward pass is done.
        """
        for i, box in self._tiles(self.segments[-1]):
            with self.span("forward", self._name(self.segments[-1])):
                y, self._leaves = self._run(self.segments[-1], i, box)
            yield i, box, y
            if self._leaves:
                self._take_in(i, self._leaves)

    def backward(self) -> None:
        """All segments but the last, which :meth:`outputs` went through, from behind. Collective, as :meth:`forward`."""
        for segment in reversed(self.segments[:-1]):
            stop = segment.layers.stop
            if stop in self.norms:
                self.norms[stop].settle()
            self._close(self.maps, stop)
            for i, box in self._tiles(segment):
                with self.span("scratch", "read gradient"):
                    g = self.gradients[i, stop].read(box)
                with self.span("recompute", self._name(segment)):
                    y, leaves = self._run(segment, i, box)
                with self.span("backward", self._name(segment)):
                    if stop in self.norms:
                        g = self._corrected(stop, i, box, g, y.detach())
                    if y.requires_grad:
                        torch.autograd.backward([y], [g])
                self._take_in(i, leaves)
            self._close(self.gradients, stop)
        if 0 in self.norms:
            self.norms[0].settle()

    def close(self) -> None:
        """Let go of what is stored."""
        for maps in (self.maps, self.gradients):
            for stored in maps.values():
                stored.close()
            maps.clear()

    @property
    def span(self) -> Callable[[str, str], ContextManager]:
        return self.executor.span

    def _name(self, segment: Segment) -> str:
        return f"{self.executor.links[segment.layers.start].name} to {self.executor.links[segment.layers.stop - 1].name}"

    # one tile

    def _run(self, segment: Segment, i: int, box: Box) -> tuple[Tensor, list]:
        """The segment's result on ``box`` of block ``i``; with gradients on also what was read, as (position, window, leaf)."""
        way = chain(self.executor.links, self.layouts[i].sizes, segment, box)
        self.context.places = [self.blocks[i].place]
        leaves, skips = [], {}
        try:
            with self.executor.autocast():
                for pop, skip in segment.skips.items():
                    window = way.skips[pop]
                    x = self._source(skip.source, i, window, leaves)
                    for position in skip.layers:
                        x = self._layer(position, x, window, self._whole(i, position, window), {})
                    skips[skip.name] = x
                x, have = self._source(segment.layers.start, i, way.given, leaves), way.given
                for position, part in zip(segment.layers, way.parts):
                    x, have = self._layer(position, x, have, part, skips), part.made
        finally:
            self.context.regions = None
        return x, leaves

    def _source(self, position: int, i: int, window: Box, leaves: list) -> Tensor:
        if position == 0:
            with self.span("read", "pixels"):
                x = self.blocks[i].pixels(window)
        else:
            with self.span("scratch", "read"):
                x = self.maps[i, position].read(window)
        if torch.is_grad_enabled() and (position > 0 or 0 in self.norms):
            leaves.append((position, window, x.requires_grad_()))
        return x

    def _layer(self, position: int, x: Tensor, have: Box, part: Part, skips: dict[str, Tensor]) -> Tensor:
        layer = self.layers[position]
        self.context.regions, self.context.current = [Region(part.size, part.taken, part.taken)], 0
        if position in self.norms:
            x = cropped(x, have, part.taken)
            return self.norms[position](x, 0, layer.masks([x])[0])
        if isinstance(layer, Stash) and position in self.outside:
            return cropped(x, have, part.taken)  # whoever pops it computes it again
        if isinstance(layer, Pop):
            skips[layer.name] = cropped(skips[layer.name], part.skip, part.made)
        with skip_store(skips):
            return run(layer, x, have, part)

    def _whole(self, i: int, position: int, window: Box) -> Part:
        """Of a layer that looks at single pixels."""
        return Part(tuple(self.layouts[i].sizes[position]), *(window,) * 5)

    # norms

    def _live(self, position: int) -> bool:
        layer = self.layers[position]
        return isinstance(layer, DistributedNorm) and layer.live

    def _at(self, position: int, i: int, box: Box) -> Box:
        """Make block ``i`` the one at hand; what it owns of ``box``, in cells of ``box``."""
        owned = self._owned(position, i).intersection(box)
        self.context.places = [self.blocks[i].place]
        self.context.regions = [Region(tuple(self.layouts[i].sizes[position]), owned, box)]
        return owned.relative_to(box)

    def _moments(self, position: int, i: int, box: Box, x: Tensor) -> list:
        if not self._live(position) or not self._at(position, i, box).pixels:
            return []
        norm = self.layers[position]
        return norm.moments(x, 0, norm.masks([x])[0])

    def _meet_norm(self, position: int, parts: list) -> None:
        self.norms[position] = Pending(self.layers[position], self.layers[position].statistics(parts))

    def _corrected(self, position: int, i: int, box: Box, g: Tensor, y: Tensor) -> Tensor:
        own = self._at(position, i, box)
        return self.norms[position].corrected(g, y, own, 0, self.layers[position].masks([y])[0])

    # stored maps

    def _held(self, position: int, i: int) -> Box:
        """What of the map before a layer is computed for block ``i``."""
        layout, cell = self.layouts[i], self.cells[i]
        return layout.result_of(cell) if position == len(self.layers) else layout.part(position, cell).given

    def _owned(self, position: int, i: int) -> Box:
        return self.layouts[i].part(position, self.cells[i]).owned

    def _tiles(self, segment: Segment) -> Iterator[tuple[int, Box]]:
        release_freed_memory()
        usual = None
        for i in range(len(self.blocks)):
            result, grid = self._grid(segment, i)
            for spans in product(*(split(n, g, 1) for n, g in zip(result.size, grid))):
                yield i, Box(tuple(a for a, _ in spans), tuple(b for _, b in spans)).shifted(result.start)
                usual = usual or memory_in_use(_CPU)
                if memory_in_use(_CPU) > _GROWN * usual:  # tile by tile the allocator leaves more gaps
                    release_freed_memory()
                self._done += 1
                self.watch(min(1.0, self._done / self.visits))

    def _grid(self, segment: Segment, i: int) -> tuple[Box, Sequence[int]]:
        """What is computed of a segment's result for block ``i``, and how it is cut."""
        result = self._held(segment.layers.stop, i)
        return result, self.executor.tiling(self.layouts[i], segment, result, len(self.blocks[i].place.images))

    def _count(self, segment: Segment) -> int:
        return sum(math.prod(self._grid(segment, i)[1]) for i in range(len(self.blocks)))

    def _map(self, maps: dict, i: int, position: int, like: Tensor) -> Map:
        if (i, position) not in maps:
            maps[i, position] = Map(self._held(position, i), like, self.executor.folder)
        return maps[i, position]

    def _take_in(self, i: int, leaves: list) -> None:
        """Add the gradients of what was read to the stored ones."""
        for position, window, x in leaves:
            if position > 0:
                g = torch.zeros_like(x) if x.grad is None else x.grad
                with self.span("scratch", "add gradient"):
                    self._map(self.gradients, i, position, x.detach()).add(window, g)
        leaves.clear()

    def _close(self, maps: dict, position: int) -> None:
        for i in range(len(self.blocks)):
            maps.pop((i, position)).close()
