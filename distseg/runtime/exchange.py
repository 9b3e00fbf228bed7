"""Runs a model, which is a list of layer calls, on tiles that exchange halos between layers.

No pixel is read or computed a second time for a neighbouring tile. The layout
(:mod:`distseg.tiling.layout`) decides which layers need an exchange, and how wide the halo is.
This module exchanges the halos of tensors accordingly. All tiles of an image go through a layer
together, on all ranks. With ``every="all"`` nothing is exchanged: a tile is read with its whole
halo, and each layer computes only the part that later layers read.

Words of this module:

- *strip*: the part of a tile's feature map that another tile needs as halo.
- *position*, *number*: the index of a layer in the list of layer calls.
- *cell*: as an argument, the position of a tile in the grid of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distseg.comm.collective import Alone
from distseg.comm.halo import ExchangeView, HaloExchange, copies_from, copies_to, exchanged
from distseg.comm.mail import halo_mail
from distseg.config.sizes import Size
from distseg.layers.context import Context
from distseg.layers.conv import exchanged_convolution
from distseg.layers.layer_table import cropped, exchange_box, fill_of, fuses, run
from distseg.layers.norm import DistributedNorm
from distseg.models.resize import VectorAt
from distseg.tiling.graph import Graph
from distseg.tiling.layout import LayerView, Layout
from distseg.tiling.tile import Box, ReceptiveField, check_grid, split

Cell = tuple[int, ...]


@dataclass(frozen=True)
class TrueReach(ReceptiveField):
    """Receptive field of a network in which the width of the halo depends on the size of the image.

    The attribute ``halo`` may therefore be too small for some images. Use :meth:`window` instead,
    which computes the exact window (tile and halo) for an image of any size.

    Attributes:
        exchange: the halo exchange, whose layouts give the windows.
    """

    exchange: Exchange

    def window(self, tile: Box, image: Sequence[int]) -> Box:
        """Return the box of the pixels that a tile depends on, in an image of size ``image``."""
        return self.exchange.window(tile, image)


@dataclass(frozen=True)
class HeldReach(TrueReach):
    """Receptive field of tiles whose layers exchange halos with other tiles.

    A tile reads from the image the pixels that it owns, and the pixels around them that the layers
    before the first exchange need.
    """

    def window(self, tile: Box, image: Sequence[int]) -> Box:
        """Return the box of the pixels that a tile reads from an image of size ``image``."""
        return self.exchange.computed_box(tile, image)


class ExchangeStrips(NamedTuple):
    """Strips that one rank sends, receives and copies in the halo exchange before a layer.

    A strip is the part of a tile's feature map that another tile needs as halo. A rank has one
    tensor for each of its tiles. Boxes are in cells of the whole feature map.

    Attributes:
        sends, receives: for each other rank, the strips of the message in order, each as (index of
            this rank's tensor, box).
        here: the strips that are copied between two tensors of this rank, as (index of the source,
            index of the target, box).
    """

    sends: dict[int, list[tuple[int, Box]]]
    receives: dict[int, list[tuple[int, Box]]]
    here: list[tuple[int, int, Box]]


class Exchange:
    """Halo exchange between the tiles of this rank and of the other ranks that share an image.

    Args:
        graph: the graph of the whole model, even if this rank holds only some of its layers.
        stride: the stride of the model; tile borders lie on its multiples.
        comm: the ranks that share an image, in row-major order of ``grid``.
        grid: the grid of ranks.
        per_rank: the grid of tiles that each rank owns.
        every: ``1``, ``2``, ...: exchange before every k-th layer that reads beyond its tile.
            ``level``: exchange before the first such layer at each resolution. ``all``: never
            exchange, because each tile is read together with its halo.
        fuse_below: consecutive layers that read beyond their tile share one exchange if their tiles
            have fewer cells than this along a dim.
        device: the device of the tensors.
        channels_last: True if tensors and messages have the memory format channels_last.
        stored: the layers before which feature maps are stored
            (:class:`distseg.tiling.layout.Layout`).
    """

    def __init__(
        self,
        graph: Graph,
        stride: Sequence[int],
        comm=Alone(),
        grid=(1, 1),
        per_rank=(1, 1),
        every: str = "1",
        fuse_below: int = 0,
        device=torch.device("cpu"),
        channels_last: bool = False,
        stored: Sequence[int] = (),
    ):
        self.graph, self.stride, self.comm = graph, tuple(stride), comm
        self.every, self.fuse_below = every, fuse_below
        self.grid, self.per_rank = Size(grid), Size(per_rank)
        self.channels_last, self.stored = channels_last, tuple(stored)
        self.mail = halo_mail(comm, device)
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._exchanges: dict[tuple, HaloExchange] = {}

    @property
    def exchanges(self) -> bool:
        """True if tiles exchange halos. Otherwise each tile is read together with its halo."""
        return self.every != "all"

    def layout(self, image: Sequence[int]) -> Layout:
        """Return the layout (the boxes of all tiles in all feature maps) for an image's size."""
        image = tuple(image)
        if image not in self._layouts:
            fine = Size(g * p for g, p in zip(self.grid, self.per_rank))
            check_grid(image, fine, self.stride)
            borders = [
                (0, *(b for _, b in split(n, g, s))) for n, g, s in zip(image, fine, self.stride)
            ]
            self._layouts[image] = Layout(
                self.graph, image, borders, self.every, self.fuse_below, self.stored
            ).check_result(borders)
        return self._layouts[image]

    def window(self, tile: Box, image: Sequence[int]) -> Box:
        """Return the box of the pixels that a tile reads from the image or gets from other tiles.

        Pixels come from other tiles only if there is a halo exchange before a layer that reads the
        image. ``image`` is the size of the image.
        """
        layout = self.layout(image)
        cell = layout.cell_of(tile)
        first = [number for number in self.graph.readers[0] if self.graph[number].first == 0]
        taken = [layout.part(number, cell).input for number in first if number in layout.points]
        return reduce(Box.hull, taken, layout.computed(0, cell))

    def computed_box(self, tile: Box, image: Sequence[int]) -> Box:
        """Return the box of the pixels that a rank reads from the image for a tile.

        The box has the pixels of the tile, and the pixels around it that the layers before the
        first halo exchange need. It has no pixels that other tiles send.

        Args:
            tile: the pixels that the tile owns.
            image: the size of the image.
        """
        layout = self.layout(image)
        return layout.computed(0, layout.cell_of(tile)).hull(tile)

    def layers(
        self, maps: list[dict[int, Tensor]], context: Context, first: int
    ) -> Callable[[int, nn.Module], list[Tensor]]:
        """Return a function that computes one layer on all tiles of this rank.

        The function takes the index of the layer and the layer, and returns its output for each
        tile. All ranks that share the image must call the returned function together.

        Args:
            maps: for each tile, a dict from the number of a feature map to its part
                (B, C, *size) in the box that the layout gives the tile. Map 0 is the image, which
                must cover the tile's window.
            context: the context of the layers, which has the placement of each tile.
            first: the index of the layer that is computed first. If it is 0, the image of each
                tile is cropped to the box that the layers read.
        """
        places = context.places
        layouts = [self.layout(place.image) for place in places]
        cells = [layout.cell_of(place.tile) for layout, place in zip(layouts, places)]
        for had, place, layout, cell in zip(maps, places, layouts, cells):
            if first == 0:
                assert place.window.contains(layout.computed(0, cell))
                had[0] = cropped(had[0], place.window, layout.computed(0, cell))
        stores = [{} for _ in maps]

        def compute(number: int, layer: nn.Module) -> list[Tensor]:
            parts = [layout.part(number, cell) for layout, cell in zip(layouts, cells)]
            context.regions = parts
            if isinstance(layer, DistributedNorm):
                return layer.joint([had[self.graph[number].first] for had in maps])
            return self._layer(number, layer, maps, parts, layouts, cells, context, stores)

        return compute

    def _layer(
        self,
        number: int,
        layer: nn.Module,
        maps: list[dict[int, Tensor]],
        parts: list[LayerView],
        layouts,
        cells,
        context: Context,
        stores,
    ) -> list[Tensor]:
        """Return one layer's output on each tile, after an exchange if the layer needs one.

        Args:
            number: the index of the layer.
            layer: the layer.
            maps: for each tile, a dict from the number of a feature map to a tensor.
            parts: for each tile, the boxes that the layer reads and computes.
            layouts: for each tile, the layout of its image.
            cells: for each tile, its position in the grid of tiles.
            context: the context of the layers.
            stores: for each tile, a dict from the name of a skip to its feature map.
        """
        node = self.graph[number]
        xs, haves = [had[node.first] for had in maps], [part.available for part in parts]
        # A vector needs no exchange, because every tile has all of it.
        concerned = [
            i
            for i, layout in enumerate(layouts)
            if number in layout.points and not isinstance(getattr(layer, "inner", None), VectorAt)
        ]
        if concerned:
            frames = [exchange_box(layer, parts[i]) for i in concerned]
            mine = [_autocast(layer, xs[i]) for i in concerned]
            exchange = self._exchange(
                number, layer, concerned, frames, mine, parts, layouts, cells, context.places
            )
            if not exchange.idle:
                if len(concerned) == len(xs) and fuses(layer):
                    return exchanged_convolution(layer, exchange, frames, parts, mine)
                for i, y, frame in zip(concerned, exchanged(exchange, mine), frames):
                    xs[i], haves[i] = y, frame
        made = []
        for i, (x, have, part) in enumerate(zip(xs, haves, parts)):
            context.current = i
            others = [
                (maps[i][source], layouts[i].computed(source, cells[i]))
                for source in node.inputs[1:]
            ]
            with context.around(stores[i]):
                made.append(run(layer, x, have, part, others))
        return made

    def _exchange(
        self, position, layer, concerned, frames, xs, parts, layouts, cells, places
    ) -> HaloExchange:
        """Return the halo exchange before a layer, planned at the first call and then cached.

        The arguments are those of :meth:`_plan`, and ``places``, the placement of each tile.
        """
        # Only these properties of a layer's inputs can vary from step to step.
        key = (
            position,
            xs[0].shape[1],
            xs[0].dtype,
            tuple((places[i].image, cells[i], len(places[i].images)) for i in concerned),
        )
        if key not in self._exchanges:
            self._exchanges[key] = self._plan(
                position, layer, concerned, frames, xs, parts, layouts, cells
            )
        return self._exchanges[key]

    def _plan(self, position, layer, concerned, frames, xs, parts, layouts, cells) -> HaloExchange:
        """Return the halo exchange before a layer, with the strips to send and to receive.

        A strip is the part of a tile that another tile needs as halo. Sender and receiver both
        order the strips of a message by image size, receiving tile and sending tile.

        Args:
            position: the index of the layer.
            layer: the layer.
            concerned: the indices of this rank's tiles that take part.
            frames: for each tile that takes part, the box of the layer's input after the exchange.
            xs: for each tile that takes part, the layer's input before the exchange.
            parts, layouts, cells: for each tile of this rank, as in :meth:`_layer`.
        """
        around = [
            ExchangeView(parts[i].size, parts[i].owned, parts[i].available, frame)
            for i, frame in zip(concerned, frames)
        ]
        strips = self.strips(
            position, [layouts[i] for i in concerned], [cells[i] for i in concerned]
        )
        return HaloExchange(
            self.mail,
            around,
            strips.sends,
            strips.receives,
            strips.here,
            like=xs[0],
            batches=[len(x) for x in xs],
            fill=fill_of(layer) or 0.0,
            tag=2 * position,
            name=self.graph[position].name,
            last=self.channels_last,
        )

    def strips(
        self, position: int, layouts: Sequence[Layout], cells: Sequence[Cell]
    ) -> ExchangeStrips:
        """Return the parts of tiles that this rank sends, receives and copies before a layer.

        Args:
            position: the index of the layer.
            layouts: for each tile of this rank that takes part, the layout of its image.
            cells: for each tile that takes part, its position in the grid of tiles.
        """
        group = _numbered(layouts)
        number = {(group[k], cell): k for k, cell in enumerate(cells)}
        sends, receives, here = [], [], []
        for k, (layout, cell) in enumerate(zip(layouts, cells)):
            cuts, wanted = layout.spans(position)
            for c in copies_from(cell, cuts, wanted):
                if self.rank_of(c.target) == self.comm.rank:
                    here.append((k, number[group[k], c.target], c.box))
                else:
                    sends.append((group[k], c.target, c.source, k, c.box))
            for c in copies_to(cell, cuts, wanted):
                if self.rank_of(c.source) != self.comm.rank:
                    receives.append((group[k], c.target, c.source, k, c.box))

        def by_peer(strips, end):
            return _by(sorted(strips, key=lambda s: s[:3]), lambda s: self.rank_of(s[end]))

        return ExchangeStrips(by_peer(sends, 1), by_peer(receives, 2), here)

    def rank_of(self, cell: Cell) -> int:
        """Return the rank that owns the tile at index ``cell`` of the grid of all tiles."""
        rank = 0
        for c, p, g in zip(cell, self.per_rank, self.grid):
            rank = rank * g + c // p
        return rank


def _autocast(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a convolution's input ``x`` in the dtype in which autocast computes the convolution.

    Messages are then no larger than needed. Without autocast, or for another layer, return ``x``
    itself.
    """
    if isinstance(layer, nn.modules.conv._ConvNd) and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _numbered(layouts: list[Layout]) -> list[int]:
    """Return a number for each tile; tiles of images of equal size get the same number.

    The sizes are numbered 0, 1, ... in order of appearance, so all ranks get the same numbers.

    Args:
        layouts: for each tile, the layout of its image. There is one layout object per image size.
    """
    seen: dict[int, int] = {}
    return [seen.setdefault(id(layout), len(seen)) for layout in layouts]


def _by(strips, rank_of) -> dict[int, list[tuple[int, Box]]]:
    found: dict[int, list[tuple[int, Box]]] = {}
    for strip in strips:
        found.setdefault(rank_of(strip), []).append(strip[3:])
    return found
