"""Memory that MPI and a GPU's stream both touch, and who may touch it when.

A rank queues kernels and copies on one stream of its device, which does them later, one after another. MPI knows no stream:
it reads or writes the memory of a message at any time between its post and the completion of its request. Hence the rules
that every message of distseg keeps, directly from a GPU's memory or staged through the host's; no other module waits for a
stream:

1. MPI reads what the stream has written: :func:`settled` before a send is posted, or a reduction.
2. MPI writes only where nothing that is queued reads or writes. Memory fresh from PyTorch's allocator on a GPU is no such
   place: it may be that of a freed tensor whose kernels are still queued. So MPI receives into :class:`Buffers` only.
3. What MPI writes may be read by whatever is queued after the request is complete.
4. A buffer is given back when its last reader is queued, which is not done: :meth:`Buffers.give` marks the stream there, and
   :meth:`Buffers.take` looks for one whose mark has passed, and makes another one rather than wait: soon there are as many
   as are under way between two sends, which do wait.
5. Copies to the host that do not wait go to pinned memory alone, and nobody looks there before :func:`settled`.
6. Copies to the device that do not wait come from pinned memory (:func:`upload`), or from memory that lives, unchanged,
   until the step is over. PyTorch's allocator does not hand pinned memory out again before such a copy is done, so the
   tensor itself may go.

Where tensors are on the CPU there is no stream, nothing waits and nothing is copied. (Not run on a GPU yet: docs/gpu.md.)
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from distseg.comm.memory_format import channels_last


def settled(device: torch.device) -> None:
    """Wait until all that was queued on the device's current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def upload(
    x: Tensor, device: torch.device, dtype: torch.dtype | None = None, last: bool = False
) -> Tensor:
    """A tensor of the host's memory on a device, there with its channels ``last``, without waiting for the stream; ``x`` may go at once."""
    x = x if dtype is None else x.to(dtype)
    if torch.device(device).type != "cuda" or x.is_cuda:
        x = x.to(device)
    else:
        x = x.pin_memory().to(device, non_blocking=True)
    return x.contiguous(memory_format=channels_last(x.dim())) if last else x


class Buffers:
    """Flat buffers for messages, used again once a message is through.

    Args:
        device: of the tensors that travel.
        staged: whether messages go through the host's memory, pinned, instead of straight from a GPU's.
    """

    def __init__(self, device: torch.device, staged: bool = False):
        self.device, self.staged = torch.device(device), staged
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """(size,) bytes that nothing queued touches, so that MPI may write them."""
        room = 1 << max(0, size - 1).bit_length()  # as images come in many sizes
        free = self._free[room]
        done = next(
            (i for i in reversed(range(len(free))) if free[i][1] is None or free[i][1].query()),
            None,
        )
        buffer = self._made(room) if done is None else free.pop(done)[0]
        return buffer[:size]

    def give(self, buffer: Tensor, read_by_stream: bool = False) -> None:
        """Take a buffer back: MPI is done with it, and its readers on the stream, if there are any, are queued."""
        mark = None
        if read_by_stream and self.device.type == "cuda":
            mark = torch.cuda.Event()
            mark.record(torch.cuda.current_stream(self.device))
        room = buffer.untyped_storage().nbytes()
        self._free[room].append((buffer.as_strided((room,), (1,), 0), mark))

    def _made(self, room: int) -> Tensor:
        if self.staged:
            return torch.empty(room, dtype=torch.uint8, pin_memory=True)
        buffer = torch.empty(room, dtype=torch.uint8, device=self.device)
        settled(self.device)
        return buffer
