"""Sum of an array over ranks, with the arrays added in the order of the ranks.

MPI and gloo add in an order of their own, which depends on the library, the length and the number
of ranks. Here the order is fixed, so a sum has the same bits over every transport and on every
rank::

    memory of rank 0    a0 b0 c0     a = a0 + a1 + a2     each rank adds one part
    memory of rank 1    a1 b1 c1     b = b0 + b1 + b2     and sends the result
    memory of rank 2    a2 b2 c2     c = c0 + c1 + c2     to all others

Each of n ranks sends and receives 2 (n - 1) / n times the length of the memory, as in a ring
all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from distseg.comm.communicator import Communicator, Request

TAGS = (1 << 30) + 1, (1 << 30) + 2  # of the messages with parts, and with the sums of parts
_GATHERED = 1 << 16  # up to so many bytes of all ranks together, one gather replaces both rounds


def start_sum(memory: np.ndarray, comm: Communicator) -> Request:
    """Start to replace a dense array by its elementwise sum over the ranks.

    All ranks of ``comm`` must call it together, with arrays of one length.
    """
    flat = torch.from_numpy(memory).view(-1)
    if flat.numel() * flat.element_size() * comm.size <= _GATHERED:
        return _GatheredSum(flat, comm)
    return SumOfParts(flat, comm, TAGS)


class _GatheredSum:
    """Request of a sum of a small array over ranks; each rank gathers and adds all arrays."""

    def __init__(self, memory: Tensor, comm: Communicator):
        self._memory: Tensor | None = memory
        self._all = memory.new_empty(comm.size, memory.numel())
        self._request = comm.Iallgather(memory.numpy(), self._all.numpy())

    def Test(self) -> bool:
        if self._memory is not None:
            if not self._request.Test():
                return False
            self._memory.copy_(_added(list(self._all)))
            self._memory = None
        return True


class SumOfParts:
    """Request of a sum of a large array over n ranks; each rank adds up one n-th of the array.

    Then each rank sends its part of the sum to all other ranks.

    Sums with the same tags must be started in the same order on all ranks, and tested one after
    another: the second one only when the first one is complete.

    Args:
        memory: the array, a flat tensor in host memory. It is replaced by the sum.
        comm: the communicator. All its ranks make this object, with arrays of one length.
        tags: the tags of both rounds of messages.
    """

    def __init__(self, memory: Tensor, comm: Communicator, tags: tuple[int, int]):
        self._comm, self._tags, size = comm, tags, comm.size
        ends = [memory.numel() * rank // size for rank in range(size + 1)]
        self._parts = [memory[a:b] for a, b in zip(ends, ends[1:])]
        self._own = self._parts[comm.rank]
        self._given = [
            part if rank == comm.rank else torch.empty_like(self._own)
            for rank, part in enumerate([self._own] * size)
        ]
        self._added = False
        self._requests = self._exchange(self._given, self._parts, tags[0])

    def Test(self) -> bool:
        # A test advances all messages of this process, so the later requests need no test yet.
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        if self._requests:
            return False
        if not self._added:
            self._added = True
            self._own.copy_(_added(self._given))
            self._given = []
            self._requests = self._exchange(
                self._parts, [self._own] * self._comm.size, self._tags[1]
            )
        return not self._requests

    def _exchange(self, received: list[Tensor], sent: list[Tensor], tag: int) -> list[Request]:
        """Start to receive a part from every other rank, and to send a part to each of them.

        Args:
            received: for each rank, the memory for the part that comes from it.
            sent: for each rank, the part that goes to it.
        """
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        receives = [self._comm.Irecv(received[r], r, tag) for r in others if received[r].numel()]
        return receives + [self._comm.Isend(sent[r], r, tag) for r in others if sent[r].numel()]


def _added(parts: list[Tensor]) -> Tensor:
    """Return the sum of tensors, added from the first to the last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
