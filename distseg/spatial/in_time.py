"""Tiles in time: a rank computes its part of an image tile after tile, in the memory of one, with the whole part's gradient.

Between the layers that need all of a feature map, which are the live norms, lie segments (:mod:`distseg.geometry.segment`).
Their borders are stored, in a scratch folder or in the host's memory. Forward, a segment is run on windows of the map before
it, tile by tile of its result, and the statistics of the next norm are collected on the way. Backward, a segment is run once
more on each window, now with a graph, and what reaches the window is added to the stored gradient of that map::

    forward      read window - norm act conv - write tile, moments           then: statistics over all tiles, all ranks
    backward     read gradient of the tile, read window - the same again - backward - add to gradient of the window
                                                                             then: what the statistics collected

Without live norms there is one segment, the whole network: nothing is stored but the image. In a pipeline each stage walks through
its own segments; maps that others read travel to them (:mod:`distseg.spatial.transfer`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Callable, ContextManager, Iterator, Protocol, Sequence

import torch
from torch import Tensor

from distseg.comm.collective import Alone
from distseg.geometry.layout import Layout, Part, Region
from distseg.geometry.needs import Link
from distseg.geometry.segment import Chain, Segment, chain, segments_of
from distseg.geometry.tile import Box, Place, boxes_of, strips
from distseg.launch import GapTrimmer
from distseg.models.layers import Pop, Stash, skip_store
from distseg.spatial.local import cropped, run
from distseg.spatial.norm import Pending
from distseg.spatial.parallelize import TiledModel
from distseg.spatial.piece import Piece
from distseg.spatial.scratch import Map, check_room
from distseg.spatial.transfer import Receiving, Sending, Transfers
from distseg.watch import beat


_LABELS = 1 << 20  # labels read at once
_PIXELS, _CELLS = 1 << 20, 1 << 17  # pixels, or cells of a map, read at once where no tile is computed
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
    """How the result of a segment is cut into tiles."""

    def __call__(self, layout: Layout, segment: Segment, result: Box, images: int) -> Sequence[int]:
        """Cells of a tile along each dim; the last may be smaller."""


class Stored(Protocol):
    """Tells the bytes that maps take, at most at once."""

    def __call__(self, held: Callable[[int], Box], segments: Sequence[Segment], images: int, returning: Sequence[int] = (), back: bool = True) -> int: ...


class InTime:
    """The executor of a flat model on one rank, which runs all of it or some stages.

    Args:
        links: of its layers (:func:`distseg.spatial.links.links_of`).
        live: the positions of norms that take statistics.
        layout: of an image on the mesh's tiles, read as windows.
        folder: for stored maps; None: the host's memory.
        stored: :meth:`distseg.plan.in_time.Activations.stored`, the bytes that maps take.
        autocast: makes the context in which the network runs.
        devices: where the network runs; of each stage, where a rank has several.
        stages: the layers of each; ``placement``: the rank of each, in ``comm``, the pipeline's.
        returns: whether backward passes follow; else maps are let go of once they are read.
        trims: gives memory that is free again back to the system where tiles begin to be of another size, which takes some milliseconds.

    Attributes:
        watch: told the share of a step that is done, now and then.
        span: makes the context of what is done, by kind and name, for those who watch (:mod:`distseg.pipeline.trace`).
    """

    def __init__(
        self, model: TiledModel, links: Sequence[Link], live: Sequence[int], layout: Callable[[Sequence[int]], Layout], tiling: Tiling, folder: str | None,
        stored: Stored, autocast: Callable[[], ContextManager], devices: Sequence[torch.device] = (_CPU,), stages: Sequence[range] = (),
        placement: Sequence[int] = (0,), comm=Alone(), returns: bool = True, trims: bool = True,
    ):  # fmt: skip
        self.model, self.links, self.live, self.layout, self.tiling, self.folder = model, list(links), set(live), layout, tiling, folder
        self.stored, self.autocast, self.devices = stored, autocast, [torch.device(d) for d in devices]
        self.returns, self.trims = returns, trims
        self.placement, self.comm, self.transfers = tuple(placement), comm, Transfers(comm)
        self.watch: Callable[[float], None] = lambda share: None
        self.span: Callable[[str, str], ContextManager] = lambda kind, name: nullcontext()
        every = segments_of(self.links, live, stages)
        rank_of = lambda segment: self.placement[segment.stage]
        self.segments = [s for s in every if rank_of(s) == comm.rank]
        self.makers = {s.layers.stop: rank_of(s) for s in every}  # of the map before a layer
        self.readers = {p: sorted({rank_of(s) for s in every if p in s.sources} - {comm.rank}) for p in self.makers}  # other ranks
        self.popped = {skip.stash for segment in every for skip in segment.skips.values()}  # in other segments

    def comes_from_elsewhere(self, position: int) -> bool:
        """Whether another rank makes the map before a layer; pixels come from the store."""
        return self.makers.get(position, self.comm.rank) != self.comm.rank

    def device_of(self, segment: Segment) -> torch.device:
        return self.devices[segment.stage if len(self.devices) > 1 else 0]

    def label_tiles(self, block: Block) -> Iterator[Box]:
        """The tile of a block, in strips that are read at once."""
        return strips(block.place.tile, _LABELS)

    def describe(self, image: Sequence[int]) -> str:
        """What a step on an image of this size is made of, for the first of its ranks."""
        layout = self.layout(image)
        tile = layout.part(0, (0,) * len(layout.grid)).owned
        walk = Walk(self, [Block(Place(tuple(image), tile, tile, (0,), (0,)), lambda box: None)])
        if not walk.stored:
            return f"tiles in time: {walk.visits} windows a step, one after another"
        where = f"in {self.folder}" if self.folder else "in memory"
        of = f" on the first of {self.comm.size} ranks" if self.comm.size > 1 else ""
        segments = f"{len(self.segments)} segment{'s' * (len(self.segments) > 1)}{of}"
        return f"tiles in time: {segments}, {walk.visits} tiles an image there and back; {walk.stored / 1e9:.3g} GB of feature maps wait {where}"

    def walks(self, micro_batches: Sequence[Sequence[Block]]) -> "list[Walk]":
        """Through the network with the blocks of each micro-batch, which may be under way together.

        Raises:
            OSError: the scratch folder has no room for what will be stored.
        """
        walks = [Walk(self, blocks) for blocks in micro_batches]
        if self.folder is not None and (stored := sum(walk.stored for walk in walks)):
            check_room(self.folder, stored)
        for walk in walks:
            walk.expect_maps()
        return walks


class Walk:
    """The blocks of one micro-batch on their way through this rank's part of the network, there and back."""

    def __init__(self, executor: InTime, blocks: Sequence[Block]):
        self.executor, self.blocks = executor, list(blocks)
        self.segments, self.layers, self.transfers = executor.segments, executor.model.layers, executor.transfers
        self.context = executor.model.context
        self.layouts = [executor.layout(block.place.image) for block in blocks]
        self.cells = [layout.cell_of(block.place.tile) for layout, block in zip(self.layouts, blocks)]
        self.maps: dict[tuple[int, int], Map] = {}
        self.gradients: dict[tuple[int, int], Map] = {}
        self.norms: dict[int, Pending] = {}
        self.watch: Callable[[float], None] = lambda share: None
        self._ends = [segment for segment in self.segments if segment.layers.stop == len(self.layers)]
        self._done, self.visits = 0, sum(self._count(s) * (2 if executor.returns and s not in self._ends else 1) for s in self.segments)
        self._first_reader = {p: segment for segment in reversed(self.segments) for p in segment.sources}
        self._last_reader = {p: segment for segment in self.segments for p in segment.sources}
        self._coming: dict[tuple[int, int], Receiving] = {}
        self._returning: dict[tuple[int, int], list[Receiving]] = {}
        self._sending: dict[tuple[int, int], list[Sending]] = {}  # maps to their readers, gradients to the map's maker
        elsewhere = filter(executor.comes_from_elsewhere, self._first_reader)
        self._final_by_rows = {p for p in elsewhere if p not in executor.live and not self._mirrors(self._first_reader[p])}

    @property
    def stored(self) -> int:
        """Bytes of the maps that it will store, at most at once."""
        back = self.executor.returns
        returning = [s.layers.stop for s in self.segments for _ in self.executor.readers[s.layers.stop]] if back else []
        sizes = (self.executor.stored(partial(self._held, i=i), self.segments, len(block.place.images), returning, back) for i, block in enumerate(self.blocks))
        return sum(sizes)

    @torch.no_grad()
    def forward(self, stage: int = 0) -> None:
        """All segments of a stage but the network's last. Collective over the ranks that share statistics."""
        for segment in self._of(stage):
            start, stop = segment.layers.start, segment.layers.stop
            if start in self.executor.live and start not in self.norms:  # nobody here made the map
                whole = ((i, box) for i in range(len(self.blocks)) for box in strips(self._held(start, i), _CELLS if start else _PIXELS))
                self._meet_norm(start, [part for i, box in whole for part in self._moments(start, i, box, self._read(start, i, box))])
            if segment in self._ends:
                continue
            parts, here = [], any(s.layers.start == stop for s in self.segments)
            for i, box in self._tiles(segment):
                with self.span("forward", self._name(segment)):
                    y, _ = self._run(segment, i, box)
                with self.span("scratch", "write"):
                    self._map(self.maps, i, stop, y).write(box, y)
                self._hand_on(i, stop, box)
                if here:
                    parts += self._moments(stop, i, box, y)
                del y  # before the next one is made
            if here and stop in self.executor.live:
                self._meet_norm(stop, parts)
            if not self.executor.returns:
                self._let_go(segment)

    def outputs(self, boxes: Sequence[Sequence[Box]] | None = None) -> Iterator[tuple[int, Box, Tensor]]:
        """(block, tile, logits (B, C', *tile.size)) of the network's last segment, tile by tile, with a graph if gradients are on.

        What is asked for next tells that a tile's backward pass, if there is one, is done.

        Args:
            boxes: the tiles of each block to compute; by default all, of the executor's size.
        """
        (segment,) = self._ends
        for i, box in self._tiles(segment, boxes):
            with self.span("forward", self._name(segment)):
                y, leaves = self._run(segment, i, box)
            yield i, box, y
            self._take_in(segment, i, leaves)
        if not self.executor.returns:
            self._let_go(segment)

    def close(self) -> None:
        """Let go of all maps, once others have what they read of them."""
        for (i, position), sendings in self._sending.items():
            for sending in sendings:
                self.transfers.wait_sent(sending, self._map_before(position))
        for stored in self.maps.values():
            stored.close()
        self.maps.clear()

    def pixel_windows(self, boxes: Sequence[Sequence[Box]] | None = None) -> list[Box]:
        """What the first segment reads of the blocks' pixels, in order; for those who read ahead."""
        segment = next((s for s in self.segments if s.layers.start == 0), None)
        if segment is None:
            return []
        given = boxes if segment in self._ends else None
        return [self._chain(segment, i, box).given for i in range(len(self.blocks)) for box in (given[i] if given else self._cut(segment, i)[1])]

    def computed(self, boxes: Sequence[Sequence[Box]] | None = None) -> Iterator[tuple[int, Box]]:
        """(layer, cells of its result) of all that is computed on the way there."""
        for segment in self.segments:
            for i in range(len(self.blocks)):
                for box in boxes[i] if boxes is not None and segment in self._ends else self._cut(segment, i)[1]:
                    way = self._chain(segment, i, box)
                    yield from ((position, way.skips[pop]) for pop, skip in segment.skips.items() for position in skip.layers)
                    yield from ((position, part.made) for position, part in zip(segment.layers, way.parts))

    def _let_go(self, segment: Segment) -> None:
        """Close the maps that no later segment of this rank reads, nor any other rank."""
        for position in segment.sources:
            if self._last_reader[position] is not segment or position == 0:
                continue
            for i in range(len(self.blocks)):
                if (i, position) in self._coming:  # also what no window reads
                    self.transfers.wait_for(self._coming[i, position], self._held(position, i).stop[0], self._map_before(position))
                for sending in self._sending.pop((i, position), ()):
                    self.transfers.wait_sent(sending, self._map_before(position))
            self._close(self.maps, position)

    def backward(self, stage: int = 0) -> None:
        """All segments of a stage from behind; the network's last one, which :meth:`outputs` went through, is closed. Collective, as :meth:`forward`."""
        for segment in reversed(self._of(stage)):
            if segment not in self._ends:
                self._back_through(segment)
            self._read_last_by(segment)

    def _back_through(self, segment: Segment) -> None:
        stop = segment.layers.stop
        if stop in self.norms:
            self.norms[stop].settle()
        for i in range(len(self.blocks)):
            for sending in self._sending.pop((i, stop), ()):
                self.transfers.wait_sent(sending, self._map_before(stop))
        self._close(self.maps, stop)
        for i, box in self._tiles(segment):
            g = self._gradient(i, stop, box)
            with self.span("recompute", self._name(segment)):
                y, leaves = self._run(segment, i, box)
            with self.span("backward", self._name(segment)):
                if stop in self.norms:
                    g = self._corrected(stop, i, box, g, y.detach())
                if y.requires_grad:
                    torch.autograd.backward([y], [g])
            self._take_in(segment, i, leaves)
        self._close(self.gradients, stop)
        for i in range(len(self.blocks)):
            for returning in self._returning.pop((i, stop), ()):
                returning.stored.close()

    def _gradient(self, i: int, position: int, box: Box) -> Tensor:
        """The sum over all readers, always in the same order."""
        parts = []
        if (i, position) in self.gradients:
            with self.span("scratch", "read gradient"):
                parts.append(self.gradients[i, position].read(box))
        for returning in self._returning.get((i, position), ()):
            self.transfers.wait_for(returning, box.stop[0], f"the gradient of {self._map_before(position)}")
            with self.span("scratch", "read gradient"):
                parts.append(returning.stored.read(box))
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    @property
    def span(self) -> Callable[[str, str], ContextManager]:
        return self.executor.span

    def _of(self, stage: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.stage == stage]

    def _name(self, segment: Segment) -> str:
        return f"{self.executor.links[segment.layers.start].name} to {self.executor.links[segment.layers.stop - 1].name}"

    def _map_before(self, position: int) -> str:
        return f"the map before {self.executor.links[position].name}"

    # between ranks

    def expect_maps(self) -> None:
        """From other ranks, of one micro-batch after another."""
        for position in filter(self.executor.comes_from_elsewhere, self._first_reader):
            for i in range(len(self.blocks)):
                coming = Receiving(self._held(position, i), lambda like, i=i, position=position: self._map(self.maps, i, position, self._here(like)))
                self._coming[i, position] = self.transfers.begin(coming, self.executor.makers[position], 2 * position)

    def expect_gradients(self, stage: int) -> None:
        """From other ranks, of what they read of a stage's maps; of one micro-batch after another, as the backward passes will come."""
        for position in (segment.layers.stop for segment in self._of(stage) if segment not in self._ends):
            for reader in self.executor.readers[position]:
                for i in range(len(self.blocks)):
                    box = self._held(position, i)
                    coming = Receiving(box, lambda like, box=box: Map(box, self._here(like), self.executor.folder))  # all of it comes
                    self._returning.setdefault((i, position), []).append(self.transfers.begin(coming, reader, 2 * position + 1))

    def _hand_on(self, i: int, position: int, made: Box) -> None:
        """Send what other ranks read of a map, up to a tile that was made of it."""
        if (i, position) not in self._sending:
            readers = self.executor.readers[position]
            self._sending[i, position] = [self.transfers.begin(Sending(self.maps[i, position]), reader, 2 * position) for reader in readers]
        ends_rows = made.stop[1:] == self._held(position, i).stop[1:]
        for sending in self._sending[i, position]:
            sending.final = made.stop[0] if ends_rows else made.start[0]
        self.transfers.progress()

    def _hand_back(self, i: int, position: int, final: int) -> None:
        """Send the gradient of a map that was made elsewhere, whose rows before ``final`` are, and let go of it."""
        if (i, position) not in self._sending:
            sending = Sending(self.gradients[i, position], self.gradients[i, position].close)
            self._sending[i, position] = [self.transfers.begin(sending, self.executor.makers[position], 2 * position + 1)]
        self._sending[i, position][0].final = final
        self.transfers.progress()

    def _read_last_by(self, segment: Segment) -> None:
        """In the backward pass no later segment reads these: settle norms whose map was made elsewhere, hand gradients back."""
        for position in segment.sources:
            elsewhere = self.executor.comes_from_elsewhere(position)
            if self._first_reader[position] is not segment or not (elsewhere or position == 0):
                continue
            if position in self.norms:
                self.norms[position].settle()
            if not elsewhere:
                continue
            for i in range(len(self.blocks)):
                self.transfers.wait_for(self._coming[i, position], self._held(position, i).stop[0], self._map_before(position))  # also what no window reads
                if position in self.norms:
                    gradient = self.gradients[i, position]
                    for box in strips(gradient.box, _CELLS):
                        gradient.write(box, self._corrected(position, i, box, gradient.read(box), self.maps[i, position].read(box)))
                self._hand_back(i, position, self._held(position, i).stop[0])
                del self.gradients[i, position]
            self._close(self.maps, position)

    # one tile

    def _run(self, segment: Segment, i: int, box: Box) -> tuple[Tensor, list]:
        """The segment's result on ``box`` of block ``i``; with gradients on also what was read, as (position, window, leaf)."""
        way, device = self._chain(segment, i, box), self.executor.device_of(segment)
        self.context.places = [self.blocks[i].place]
        leaves, skips = [], {}
        beat(f"tile {box} of {self._name(segment)}")
        try:
            with self.executor.autocast():
                for pop, skip in segment.skips.items():
                    window = way.skips[pop]
                    x = self._source(skip.source, i, window, leaves, device)
                    for position in skip.layers:
                        x = self._layer(position, x, window, self._whole(i, position, window), {})
                    skips[skip.name] = x
                x, have = self._source(segment.layers.start, i, way.given, leaves, device), way.given
                for position, part in zip(segment.layers, way.parts):
                    x, have = self._layer(position, x, have, part, skips), part.made
        finally:
            self.context.regions = None
        return x, leaves

    def _read(self, position: int, i: int, window: Box) -> Tensor:
        if position == 0:
            with self.span("read", "pixels"):
                return self.blocks[i].pixels(window)
        if (i, position) in self._coming:
            self.transfers.wait_for(self._coming[i, position], window.stop[0], self._map_before(position))
        stored = self.maps[i, position]
        with self.span("scratch", "read"):
            # A norm leaves what it is given as it is, and without a backward pass nobody keeps it.
            return stored.view(window) if position in self.norms and not self.executor.returns else stored.read(window)

    def _chain(self, segment: Segment, i: int, box: Box) -> Chain:
        return chain(self.layouts[i], segment, box)

    def _source(self, position: int, i: int, window: Box, leaves: list, device: torch.device) -> Tensor:
        x = self._read(position, i, window).to(device)
        if torch.is_grad_enabled() and (position > 0 or 0 in self.norms):
            leaves.append((position, window, x.requires_grad_()))
        return x

    def _layer(self, position: int, x: Tensor, have: Box, part: Part, skips: dict[str, Tensor]) -> Tensor:
        self.transfers.progress()
        layer = self.layers[position]
        self.context.regions, self.context.current = [Region(part.size, part.taken, part.taken)], 0
        if position in self.norms:
            x = cropped(x, have, part.taken)
            return self.norms[position](x, 0, layer.masks([x])[0])
        if isinstance(layer, Stash) and position in self.executor.popped:
            return cropped(x, have, part.taken)  # whoever pops it computes it again
        if isinstance(layer, Pop):
            skips[layer.name] = cropped(skips[layer.name], part.skip, part.made)
        with skip_store(skips):
            return run(layer, x, have, part)

    def _whole(self, i: int, position: int, window: Box) -> Part:
        """Of a layer that looks at single pixels."""
        return Part(tuple(self.layouts[i].sizes[position]), *(window,) * 5)

    # norms

    def _at(self, position: int, i: int, box: Box) -> Box:
        """Make block ``i`` the one at hand; what it owns of ``box``, in cells of ``box``."""
        owned = box.intersection(self._owned(position, i))
        self.context.places = [self.blocks[i].place]
        self.context.regions = [Region(tuple(self.layouts[i].sizes[position]), owned, box)]
        return owned.relative_to(box)

    def _moments(self, position: int, i: int, box: Box, x: Tensor) -> list:
        if position not in self.executor.live or not self._at(position, i, box).pixels:
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

    def _tiles(self, segment: Segment, boxes: Sequence[Sequence[Box]] | None = None) -> Iterator[tuple[int, Box]]:
        trim = GapTrimmer().after_tile if self.executor.trims else lambda: None
        for i in range(len(self.blocks)):
            for box in boxes[i] if boxes is not None else self._cut(segment, i)[1]:
                yield i, box
                trim()
                self._done += 1
                self.watch(min(1.0, self._done / self.visits))

    def _cut(self, segment: Segment, i: int) -> tuple[Box, list[Box]]:
        """What is computed of a segment's result for block ``i``, and its tiles."""
        result = self._held(segment.layers.stop, i)
        return result, boxes_of(result, self.executor.tiling(self.layouts[i], segment, result, len(self.blocks[i].place.images)))

    def _count(self, segment: Segment) -> int:
        return sum(len(self._cut(segment, i)[1]) for i in range(len(self.blocks)))

    def _here(self, like: Tensor) -> Tensor:
        return like.to(self.executor.devices[0])

    def _map(self, maps: dict, i: int, position: int, like: Tensor) -> Map:
        if (i, position) not in maps:
            maps[i, position] = Map(self._held(position, i), like, self.executor.folder, zero=maps is self.gradients)
        return maps[i, position]

    def _take_in(self, segment: Segment, i: int, leaves: list) -> None:
        """Add the gradients of what was read to the stored ones."""
        for position, window, x in leaves:
            if position == 0:
                continue
            g = torch.zeros_like(x) if x.grad is None else x.grad
            with self.span("scratch", "add gradient"):
                self._map(self.gradients, i, position, x.detach()).add(window, g)
            if position in self._final_by_rows and self._first_reader[position] is segment:
                self._hand_back(i, position, window.start[0])  # windows to come begin there or below
        leaves.clear()

    def _mirrors(self, segment: Segment) -> bool:
        """Whether windows at the end of the map may reach back above earlier ones."""
        return any(footprint.mirrored for position in segment.layers for footprint in self.executor.links[position].footprints)

    def _close(self, maps: dict, position: int) -> None:
        for i in range(len(self.blocks)):
            if (i, position) in maps:
                maps.pop((i, position)).close()
