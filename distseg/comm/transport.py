"""Tensors from rank to rank, without waiting: sends that run on, receives that are posted ahead.

A message is a tensor's memory as it lies, so both sides agree on its form (shape, type, memory format) once and not per
message. CUDA tensors go straight to an MPI that knows device memory, else through pinned host memory, by the rules of
:mod:`distseg.comm.staging`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from distseg.comm.collective import When, wait
from distseg.comm.cuda_aware import cuda_aware
from distseg.comm.staging import Buffers, settled
from distseg.memory_format import channels_last


@dataclass(frozen=True)
class Form:
    """All that a receiver must know to make room for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> "Form":
        return cls(tuple(x.shape), x.dtype, not x.is_contiguous() and x.is_contiguous(memory_format=channels_last(x.dim())))

    def empty(self, device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def within(self, buffer: Tensor) -> Tensor:
        """A tensor of this form in the memory of a flat buffer of bytes."""
        return buffer.view(self.dtype).as_strided(self.shape, self.empty("meta").stride())

    def fit(self, x: Tensor) -> Tensor:
        """``x`` dense in this memory format; copied only if it is not."""
        return x.contiguous(memory_format=self.memory_format)

    @property
    def memory_format(self) -> torch.memory_format:
        return channels_last(len(self.shape)) if self.channels_last else torch.contiguous_format

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}{' channels_last' if self.channels_last else ''}"


class Receipt:
    """A receive under way; ``make`` makes the tensor of it, once it is there."""

    def __init__(self, request, make: Callable[[], Tensor]):
        self.request, self._make = request, make

    def tensor(self) -> Tensor:
        """The tensor, once it is there."""
        wait(self.request)
        return self._make()


class Transport:
    """Point to point over a communicator.

    Args:
        device: where received tensors are wanted.
    """

    def __init__(self, comm, device=torch.device("cpu")):
        self.comm, self.device = comm, torch.device(device)
        self.staged = self.device.type == "cuda" and not cuda_aware()
        self.buffers = Buffers(self.device, self.staged)
        # What is sent lives until its request is complete; behind it the buffer that it is in, if it is in one.
        self._sending: list[tuple[object, object, Tensor | None]] = []

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Start to send a dense tensor; it must not change before :meth:`flush`."""
        x, buffer = x.detach(), None
        if self.staged:
            form = Form.of(x)
            buffer = self.buffers.take(form.bytes)
            x = form.within(buffer).copy_(x, non_blocking=True)
        settled(self.device)
        self._sending.append((self.comm.Isend(message(x), to, tag), x, buffer))

    def receive(self, form: Form, source: int, tag: int) -> Receipt:
        """Post a receive."""
        if self.device.type == "cpu":
            x = form.empty(self.device)
            return Receipt(self.comm.Irecv(message(x), source, tag), lambda: x)
        buffer = self.buffers.take(form.bytes)

        def make() -> Tensor:
            x = form.empty(self.device).copy_(form.within(buffer), non_blocking=True)
            self.buffers.give(buffer, read_by_stream=True)
            return x

        return Receipt(self.comm.Irecv(message(buffer), source, tag), make)

    def tell(self, what, to: int, tag: int) -> None:
        """Start to send a small Python object, such as forms."""
        self._sending.append((self.comm.isend(what, to, tag), what, None))

    def ask(self, source: int, tag: int):
        """Wait for the object that the other side tells."""
        request = self.comm.irecv(1 << 16, source, tag)
        found: list = []

        def arrived() -> bool:  # mpi4py's irecv hands the object to whoever sees it complete
            done, what = request.test()
            if done:
                found.append(what)
            return done

        wait(When(arrived))
        return found[0]

    def progress(self) -> None:
        """Let MPI move what is under way, and forget what has arrived."""
        waiting = []
        for entry in self._sending:
            if entry[0].Test():
                self._forget(entry)
            else:
                waiting.append(entry)
        self._sending = waiting

    def flush(self, most: int = 0) -> None:
        """Wait until everything is sent, or all but the latest ``most`` messages."""
        while len(self._sending) > most:
            entry = self._sending.pop(0)
            wait(entry[0])
            self._forget(entry)

    def _forget(self, entry: tuple[object, object, Tensor | None]) -> None:
        """Give back the buffer of a message that is through."""
        if entry[2] is not None:
            self.buffers.give(entry[2])


def message(x: Tensor):
    """The memory of a dense tensor as bytes, in the order in which it lies."""
    flat = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    return flat if flat.is_cuda else flat.numpy()
