"""Borders of stored maps, between the ranks that share an image: what streamed tiles exchange instead of computing it twice.

A rank makes the cells of a map that it owns, and stores them with a margin; the margin comes from the ranks that own it. Its gradient goes
back to them and is added. All goes at once, a message a neighbour, from map to map; what is under way is in memory.
"""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from distseg.comm.halo import copies_from, copies_to
from distseg.comm.mail import Mail
from distseg.comm.memory_format import as_bytes
from distseg.runtime.exchange import Cell, Exchange
from distseg.runtime.offload import Map
from distseg.tiling.layout import Layout
from distseg.tiling.tile import Box

_Strips = dict[int, list[tuple[Map, Box]]]  # by rank, in an order that both sides agree on


class Borders:
    """Of feature maps, on an exchange's grid of ranks with a tile each."""

    def __init__(self, exchange: Exchange):
        self._exchange, self._mail = exchange, Mail(exchange.comm)

    def fetch(
        self, position: int, layouts: Sequence[Layout], cells: Sequence[Cell], maps: Sequence[Map]
    ) -> None:
        """Fill the margins of an image's map each. Collective over the ranks that share the images."""
        going, coming = self._strips(position, layouts, cells, maps)
        self._move(going, coming, Map.put, 2 * position, f"the borders of map {position}")

    def give_back(
        self,
        position: int,
        layouts: Sequence[Layout],
        cells: Sequence[Cell],
        gradients: Sequence[Map],
    ) -> None:
        """The adjoint: add the gradients of margins to those of the cells that they came from, and leave none where they were."""
        coming, going = self._strips(position, layouts, cells, gradients)
        self._move(
            going, coming, _add, 2 * position + 1, f"the gradient of the borders of map {position}"
        )
        for stored, box in (strip for strips in going.values() for strip in strips):
            stored.put(
                box, stored.room(box).zero_()
            )  # a rank may have made cells that it was given all the same

    def _strips(
        self, position: int, layouts: Sequence[Layout], cells: Sequence[Cell], maps: Sequence[Map]
    ) -> tuple[_Strips, _Strips]:
        """What goes to each rank, and what comes."""
        going: _Strips = {}
        coming: _Strips = {}
        for layout, cell, stored in zip(layouts, cells, maps):
            if position not in layout.exchanged:
                continue
            cuts, wanted = layout.margins(position)
            for copy in copies_from(cell, cuts, wanted):
                going.setdefault(self._exchange.rank_of(copy.target), []).append((stored, copy.box))
            for copy in copies_to(cell, cuts, wanted):
                coming.setdefault(self._exchange.rank_of(copy.source), []).append(
                    (stored, copy.box)
                )
        return going, coming

    def _move(
        self,
        going: _Strips,
        coming: _Strips,
        put: Callable[[Map, Box, Tensor], None],
        tag: int,
        what: str,
    ) -> None:
        arriving = {
            rank: self._mail.receive_bytes(
                sum(stored.bytes_of(box) for stored, box in strips), rank, tag
            )
            for rank, strips in coming.items()
        }
        self._mail.send_all(
            {
                rank: torch.cat(
                    [
                        as_bytes(_cells(stored, stored.take(box)).contiguous())
                        for stored, box in strips
                    ]
                )
                for rank, strips in going.items()
            },
            tag,
        )
        for rank, receipt in arriving.items():
            buffer = receipt.tensor(f"{what} from rank {rank} of the image's tiles", "halo")
            parts = buffer.split([stored.bytes_of(box) for stored, box in coming[rank]])
            for (stored, box), part in zip(coming[rank], parts):
                values = stored.room(box)
                _cells(stored, values).copy_(
                    part.view(values.dtype).view(_cells(stored, values).shape)
                )
                put(stored, box, values)
            self._mail.done(buffer)


def _cells(stored: Map, values: Tensor) -> Tensor:
    """As they lie in a map, seen with the channels of a cell side by side, as messages have them: ranks may have made the map from other tiles, of which
    one of a single cell does not tell how its channels lie."""
    return values if stored.last else values.movedim(1, -1)


def _add(stored: Map, box: Box, values: Tensor) -> None:
    stored.put(box, stored.take(box).add_(values))
