"""Exchanges halos of stored feature maps between the ranks that share an image.

Streaming stores feature maps as a whole. A rank computes the cells of a feature map that it owns,
and stores them together with a halo, whose cells other ranks own and send. The halo's gradient is
sent back to these ranks, which add it to their gradient. Each neighbour gets one message per
feature map. If maps are stored in files, only the messages under way are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from distseg.comm.halo import copies_from, copies_to
from distseg.comm.mail import Mail
from distseg.comm.memory_format import as_bytes
from distseg.runtime.exchange import Cell, Exchange
from distseg.runtime.offload import Map
from distseg.tiling.layout import Layout
from distseg.tiling.tile import Box

_M = TypeVar("_M")
_Strips = dict[int, list[tuple[_M, Box]]]  # By rank; both sides use one order.


class StoredHalos:
    """Halo exchange of stored feature maps between neighbouring ranks, with one tile per rank.

    Args:
        exchange: the halo exchange, which gives the communicator and the grid of its ranks.
    """

    def __init__(self, exchange: Exchange):
        self._exchange, self._mail = exchange, Mail(exchange.comm)

    def fetch(
        self, tensor_id: int, layouts: Sequence[Layout], cells: Sequence[Cell], maps: Sequence[Map]
    ) -> None:
        """Fill the halo of a stored feature map with cells from the ranks that own them.

        All ranks that share the images must call this method together.

        Args:
            tensor_id: the index of the feature map.
            layouts: the layout of each image.
            cells: for each image, the position of this rank's tile in the grid of tiles.
            maps: for each image, the stored feature map.
        """
        sending, receiving = self.strips(tensor_id, layouts, cells, maps)
        self._move(sending, receiving, Map.put, 2 * tensor_id, f"the borders of map {tensor_id}")

    def send_grad(
        self,
        tensor_id: int,
        layouts: Sequence[Layout],
        cells: Sequence[Cell],
        gradients: Sequence[Map],
    ) -> None:
        """Send the gradient of a feature map's halo to the ranks that own the halo's cells.

        These ranks add it to their own gradients. This is the adjoint of :meth:`fetch`. The halo's
        gradient is 0 on this rank afterwards. All ranks that share the images must call this method
        together.

        Args:
            tensor_id, layouts, cells: as in :meth:`fetch`.
            gradients: for each image, the stored gradient of the feature map.
        """
        receiving, sending = self.strips(tensor_id, layouts, cells, gradients)
        self._move(
            sending,
            receiving,
            _add,
            2 * tensor_id + 1,
            f"the gradient of the borders of map {tensor_id}",
        )
        for stored, box in (strip for strips in sending.values() for strip in strips):
            # A rank may have computed cells of its halo itself. Their gradient was sent to the
            # owner, so it must not be used here as well.
            stored.put(box, stored.buffer_for(box).zero_())

    def strips(
        self, tensor_id: int, layouts: Sequence[Layout], cells: Sequence[Cell], maps: Sequence[_M]
    ) -> tuple[_Strips[_M], _Strips[_M]]:
        """Return the strips to send to each rank, and the strips to receive from each rank.

        A strip is a part of a tile's halo: (stored feature map, box of it). Each result is a dict
        from a rank to the list of its strips. The arguments are those of :meth:`fetch`, but
        ``maps`` may have any objects, which the strips then contain.
        """
        sending: _Strips[_M] = {}
        receiving: _Strips[_M] = {}
        for layout, cell, stored in zip(layouts, cells, maps):
            if tensor_id not in layout.exchanged:
                continue
            cuts, wanted = layout.margins(tensor_id)
            for copy in copies_from(cell, cuts, wanted):
                sending.setdefault(self._exchange.rank_of(copy.target), []).append(
                    (stored, copy.box)
                )
            for copy in copies_to(cell, cuts, wanted):
                receiving.setdefault(self._exchange.rank_of(copy.source), []).append(
                    (stored, copy.box)
                )
        return sending, receiving

    def _move(
        self,
        sending: _Strips[Map],
        receiving: _Strips[Map],
        put: Callable[[Map, Box, Tensor], None],
        tag: int,
        what: str,
    ) -> None:
        """Exchange parts of stored feature maps with other ranks.

        Args:
            sending, receiving: for each other rank, the strips to send and the strips to receive.
            put: stores the values of a received strip: (stored map, box, values).
            tag: the tag of the messages.
            what: the name of the message, for errors.
        """
        arriving = {
            rank: self._mail.receive_bytes(
                sum(stored.bytes_of(box) for stored, box in strips), rank, tag
            )
            for rank, strips in receiving.items()
        }
        self._mail.send_all(
            {
                rank: torch.cat(
                    [
                        as_bytes(_cells(stored, stored.take(box)).contiguous())
                        for stored, box in strips
                    ]
                )
                for rank, strips in sending.items()
            },
            tag,
        )
        for rank, receipt in arriving.items():
            buffer = receipt.tensor(f"{what} from rank {rank} of the image's tiles", "halo")
            parts = buffer.split([stored.bytes_of(box) for stored, box in receiving[rank]])
            for (stored, box), part in zip(receiving[rank], parts):
                values = stored.buffer_for(box)
                _cells(stored, values).copy_(
                    part.view(values.dtype).view(_cells(stored, values).shape)
                )
                put(stored, box, values)
            self._mail.done(buffer)


def _cells(stored: Map, values: Tensor) -> Tensor:
    """Return ``values`` as a view (B, *size, C), the order of dims that all messages have.

    All messages have the same order of dims, because two ranks may store a feature map in different
    memory formats. Each rank takes the format from its tile, and the format of a tile of one cell
    is ambiguous in PyTorch.

    Args:
        stored: the stored feature map, which says whether ``values`` are channels-last already.
        values: a part of the map, with dims in the map's storage order.
    """
    return values if stored.last else values.movedim(1, -1)


def _add(stored: Map, box: Box, values: Tensor) -> None:
    stored.put(box, stored.take(box).add_(values))
