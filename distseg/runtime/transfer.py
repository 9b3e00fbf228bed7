"""Sends stored feature maps between the stages of a pipeline, strip by strip.

A rank sends the rows of a feature map as soon as they are final. The receiver stores them, and
waits only for the rows that its next window reads. Stages therefore work on one image at the same
time, each a few tiles later than the stage before it::

    stage 0    tile 0   tile 1   tile 2   tile 3
    stage 1             tile 0   tile 1   tile 2   tile 3

Gradients come back in the same way. A feature map has at most two messages under way, which are the
only copies of its rows that a transfer holds in memory. A message has the rows that are final when
it starts, up to a limit in bytes. The receiver computes the number of rows from the length of the
message. Messages advance between layers and during waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from distseg.comm.mail import Mail, Message
from distseg.comm.memory_format import channels_last
from distseg.comm.waits import When
from distseg.runtime.offload import Map, VectorMap
from distseg.tiling.tile import Box

_STRIP = 1e6  # Largest message in bytes, unless one row is larger.
_UNDER_WAY = 2  # Messages of a map under way at once.
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Sending:
    """Transfer of a feature map to another rank, in messages of some rows each.

    Args:
        stored: the stored feature map.
        box: the part to send; by default the whole map.
        then: a function that is called once all rows are sent.

    Attributes:
        final: the first row that may still change, in the coordinates of the feature map. The owner
            of this object raises it; the rows before it are sent.
        done: True once all rows are sent.
    """

    def __init__(
        self,
        stored: Map | VectorMap,
        box: Box | None = None,
        then: Callable[[], None] = lambda: None,
    ):
        self.box = box or stored.box
        self.stored, self.final, self.done, self._then = stored, self.box.start[0], False, then
        self._most, self._next = _rows(stored, self.box), self.box.start[0]
        self._head: Tensor | None = _head(stored)
        self._under_way: deque[Message] = deque()

    def progress(self, start: Callable[[Tensor], Message]) -> bool:
        """Start to send the rows that are final, and return True once all rows are sent.

        Rows are final if no later pass changes them.

        Args:
            start: begins to send a tensor and returns the message.
        """
        while self._under_way and self._under_way[0].came is not None:
            self._under_way.popleft()
        while len(self._under_way) < _UNDER_WAY and (what := self._ready()) is not None:
            self._under_way.append(start(what))
        self.done = self._next == self.box.stop[0] and not self._under_way
        if self.done:
            self._then()
        return self.done

    def _ready(self) -> Tensor | None:
        """Return the next message, or None if no rows are final.

        The first message is the header, which describes the tensor. Each later message has all rows
        that are final, up to the limit in bytes. A vector of the image is sent in one message.
        """
        if self._head is not None:
            head, self._head = self._head, None
            # An empty box has no rows to send.
            self._next = self._next if self.box.pixels else self.box.stop[0]
            return head
        rows = min(self.final, self._next + self._most, self.box.stop[0]) - self._next
        if rows <= 0 or isinstance(self.stored, VectorMap) and self.final < self.box.stop[0]:
            return None
        self._next += rows
        return self.stored.take(_strip(self.box, self._next - rows, self._next))


class Receiving:
    """Transfer of a feature map from another rank, in messages of some rows each.

    Args:
        box: the part to receive.
        make: creates the map that stores the received part. It is called once, with an empty tensor
            that has the number of images, the number of channels, the dtype and the memory format
            of the sender's map. The created map may be larger than the part.

    Attributes:
        stored: the created map; None until the first message has arrived.
        next_row: the first row that has not arrived yet, in the coordinates of the feature map.
    """

    def __init__(self, box: Box, make: Callable[[Tensor], Map | VectorMap]):
        self.box, self.next_row, self._make = box, box.start[0], make
        self.stored: Map | VectorMap | None = None
        self._most = 0
        self._under_way: deque[Message] = deque()

    def progress(self, start: Callable[[Tensor], Message]) -> bool:
        """Store the rows that have arrived, and return True once all rows have arrived.

        Args:
            start: begins to receive into a tensor and returns the message, which may be shorter
                than the tensor.
        """
        while True:
            while len(self._under_way) < _UNDER_WAY and (buffer := self._wanted()) is not None:
                self._under_way.append(start(buffer))
            if not self._under_way:
                return True
            if (size := self._under_way[0].came) is None:
                return False
            values = self._under_way.popleft().values
            if self.stored is None:
                self._begin(values)
            else:
                self._put(values, size)

    def _wanted(self) -> Tensor | None:
        """Return a buffer for the next message, or None if no further receive may start now.

        No further receive starts if the receives under way may already bring all remaining rows.
        The first message is the header, with the four numbers of :func:`_head`.
        """
        if self.stored is None:
            return None if self._under_way else torch.empty(4, dtype=torch.int64)
        if self.next_row + self._most * len(self._under_way) >= self.box.stop[0]:
            return None
        return self.stored.buffer_for(
            _strip(self.box, self.next_row, min(self.next_row + self._most, self.box.stop[0]))
        )

    def _begin(self, head: Tensor) -> None:
        self.stored = self._make(_like(head, len(self.box.size)))
        self._most = _rows(self.stored, self.box)
        if not self.box.pixels:
            self.next_row = self.box.stop[0]

    def _put(self, buffer: Tensor, size: int) -> None:
        """Store the rows of one message.

        Args:
            buffer: the buffer that received the message.
            size: the length of the message in bytes, at most the size of the buffer.
        """
        whole = isinstance(self.stored, VectorMap)
        rows = (
            self.box.size[0]
            if whole
            else size // self.stored.bytes_of(_strip(self.box, self.next_row, self.next_row + 1))
        )
        strip = _strip(self.box, self.next_row, self.next_row + rows)
        self.stored.put(strip, buffer if whole else self.stored.within(buffer, strip))
        self.next_row = strip.stop[0]


_T = TypeVar("_T", Sending, Receiving)


class Transfers:
    """All transfers of feature maps to and from this rank.

    Args:
        comm: the ranks of the pipeline. Feature maps with the same sender, receiver and tag travel
            one after another. Both ranks must therefore begin these transfers in the same order.
    """

    def __init__(self, comm):
        self._mail = Mail(comm)
        self._queues: dict[tuple, deque[Sending | Receiving]] = {}

    def begin(self, transfer: _T, peer: int, tag: int) -> _T:
        """Register ``transfer``, so that :meth:`progress` advances it, and return it.

        Args:
            transfer: the transfer.
            peer: the rank to which a feature map is sent, or from which it is received.
            tag: the tag of the messages.
        """
        self._queues.setdefault((type(transfer), peer, tag), deque()).append(transfer)
        return transfer

    def progress(self) -> None:
        """Advance all transfers without waiting."""
        for (kind, peer, tag), queue in list(self._queues.items()):
            start = self._mail.begin_send if kind is Sending else self._mail.begin_receive
            while queue and queue[0].progress(lambda values: start(values, peer, tag)):
                queue.popleft()
            if not queue:
                del self._queues[kind, peer, tag]

    def wait_for(self, receiving: Receiving, row: int, what: str) -> None:
        """Wait until all rows of a feature map before ``row`` have arrived.

        Args:
            receiving: the transfer of the feature map.
            row: the first row that need not have arrived.
            what: the name of the feature map, for the error message of a timeout.
        """
        row = min(row, receiving.box.stop[0])
        while receiving.next_row < row:
            before = receiving.next_row  # Each arrival restarts the timeout.
            self._until(lambda: receiving.next_row > before, what, "wait")

    def wait_sent(self, sending: Sending, what: str) -> None:
        """Wait until all rows of a feature map are sent.

        Args:
            sending: the transfer of the feature map.
            what: the name of the feature map, for the error message of a timeout.
        """
        if not sending.done:
            self._until(lambda: sending.done, what, "send")

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Return a context in which each wait of this rank also advances all transfers."""
        with self._mail.waits.moving(self.progress):
            yield

    def flush(self) -> None:
        """Wait until all transfers are complete."""
        self._until(lambda: not self._queues, "the last of the feature maps that were sent", "send")

    def _until(self, condition: Callable[[], bool], what: str, kind: str) -> None:
        self._mail.waits.wait(When(lambda: self.progress() or condition()), what, kind)


def _rows(stored: Map | VectorMap, box: Box) -> int:
    """Return the largest number of rows in a message, for the part ``box`` of a stored map.

    The rows of a message have at most ``_STRIP`` bytes together, but a message has at least one
    row. A vector of the image is sent whole in one message.
    """
    if isinstance(stored, VectorMap):
        return max(1, box.size[0])
    return max(1, int(_STRIP * box.size[0] / max(1, stored.bytes_of(box))))


def _strip(box: Box, first: int, stop: int) -> Box:
    return Box((first, *box.start[1:]), (stop, *box.stop[1:]))


def _head(stored: Map | VectorMap) -> Tensor:
    """Return the header of a transfer: numbers from which the receiver makes a map like this one.

    These numbers are the number of images, the number of channels, a number for the dtype, and one
    for the memory format (2 for a vector of the image).
    """
    return torch.tensor(
        [
            stored.images,
            stored.channels,
            _TYPES.index(stored.dtype),
            2 * isinstance(stored, VectorMap) + stored.last,
        ]
    )


def _like(head: Tensor, dims: int) -> Tensor:
    images, channels, kind, lies = head.tolist()
    x = torch.empty(images, channels, *(1 if lies == 2 else 2,) * dims, dtype=_TYPES[kind])
    return x.contiguous(memory_format=channels_last(x.dim())) if lies == 1 else x
