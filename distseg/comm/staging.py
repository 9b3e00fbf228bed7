"""Memory that both MPI and a GPU's stream touch, and the rules for who may touch it when.

A rank queues kernels and copies on one stream of its device, which runs them later, one after
another. MPI knows no stream: it reads or writes the memory of a message at any time between the
post of its request and its completion. So every message of distseg follows these rules, whether it
goes directly from GPU memory or through host memory. No other module waits for a stream.

1. MPI reads what the stream has written: call :func:`wait_for_device` before posting a send or a
   reduction.
2. MPI writes only to memory that no queued work reads or writes. Fresh memory of PyTorch's
   allocator on a GPU may belong to a freed tensor whose kernels are still queued. So MPI receives
   into :class:`Buffers` only.
3. Work that is queued after a request is complete may read what MPI wrote.
4. A buffer is given back when its last reader is queued, even if it has not run.
   :meth:`Buffers.give` records an event on the stream. :meth:`Buffers.take` returns a buffer whose
   event has passed, or makes another one instead of waiting. The number of buffers stays small, as
   sends do wait.
5. Non-blocking copies to the host go to pinned memory only. Nobody reads them before
   :func:`wait_for_device`.
6. Non-blocking copies to the device come from pinned memory (:func:`upload`), or from memory that
   stays unchanged until the step is over. PyTorch's allocator reuses pinned memory only after the
   copy, so the pinned tensor itself may be deleted.

On a CPU there is no stream: nothing waits and nothing is copied.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from distseg.comm.memory_format import channels_last


def wait_for_device(device: torch.device) -> None:
    """Wait until all work that is queued on the device's current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def upload(
    x: Tensor, device: torch.device, dtype: torch.dtype | None = None, last: bool = False
) -> Tensor:
    """Return a copy of a tensor of host memory on a device, without waiting for the stream.

    ``x`` may be deleted immediately. On a CPU the result may be ``x`` itself.

    Args:
        dtype: the dtype of the copy; None for the dtype of ``x``.
        last: True if the copy shall have its channels last in memory.
    """
    x = x if dtype is None else x.to(dtype)
    if torch.device(device).type != "cuda" or x.is_cuda:
        x = x.to(device)
    else:
        x = x.pin_memory().to(device, non_blocking=True)
    return x.contiguous(memory_format=channels_last(x.dim())) if last else x


class Buffers:
    """Pool of flat buffers for messages.

    Args:
        device: the device of the tensors that are sent.
        staged: True if messages go through pinned host memory, not directly from GPU memory.
    """

    def __init__(self, device: torch.device, staged: bool = False):
        self.device, self.staged = torch.device(device), staged
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """Return a buffer (size,) uint8 that no queued work touches, so that MPI may write it."""
        # Sizes are powers of two, so that messages of many sizes share buffers.
        size_class = 1 << max(0, size - 1).bit_length()
        free = self._free[size_class]
        done = next(
            (i for i in reversed(range(len(free))) if free[i][1] is None or free[i][1].query()),
            None,
        )
        buffer = self._made(size_class) if done is None else free.pop(done)[0]
        return buffer[:size]

    def give(self, buffer: Tensor, read_by_stream: bool = False) -> None:
        """Put a buffer from :meth:`take` back into the pool, for later messages.

        MPI must no longer use it, and all work that reads it must be queued on the stream.

        Args:
            read_by_stream: True if work that is queued on the stream reads the buffer.
        """
        mark = None
        if read_by_stream and self.device.type == "cuda":
            mark = torch.cuda.Event()
            mark.record(torch.cuda.current_stream(self.device))
        size_class = buffer.untyped_storage().nbytes()
        self._free[size_class].append((buffer.as_strided((size_class,), (1,), 0), mark))

    def _made(self, size_class: int) -> Tensor:
        if self.staged:
            return torch.empty(size_class, dtype=torch.uint8, pin_memory=True)
        buffer = torch.empty(size_class, dtype=torch.uint8, device=self.device)
        wait_for_device(self.device)
        return buffer
