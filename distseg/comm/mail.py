"""Tensors from rank to rank, without waiting: sends that run on, receives that are posted ahead.

A message is a tensor's memory as it lies, so both sides agree on its form (shape, type, memory format) once and not per
message. CUDA tensors go straight to an MPI that knows device memory, else through pinned host memory, by the rules of
:mod:`distseg.comm.staging`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Mapping, NamedTuple

import torch
from torch import Tensor

from distseg.comm.cuda_aware import cuda_aware
from distseg.comm.memory_format import as_bytes, channels_last
from distseg.comm.staging import Buffers, settled
from distseg.comm.waits import Waits, When, waits_of


@dataclass(frozen=True)
class Form:
    """All that a receiver must know to make room for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> "Form":
        return cls(
            tuple(x.shape),
            x.dtype,
            not x.is_contiguous() and x.is_contiguous(memory_format=channels_last(x.dim())),
        )

    def empty(self, device) -> Tensor:
        return torch.empty(
            self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format
        )

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
    """A receive under way."""

    def __init__(self, waits: Waits, request, buffer: Tensor, make: Callable[[Tensor], Tensor]):
        self._waits, self.request, self._buffer, self._make = waits, request, buffer, make

    def tensor(self, what: str = "a message", kind: str | None = None) -> Tensor:
        """What came, once it is there; ``what`` and ``kind``: as of :meth:`distseg.comm.waits.Waits.wait`."""
        self._waits.wait(self.request, what, kind)
        return self._make(self._buffer)


class Message(NamedTuple):
    """Values in the host's memory on their way out of or into it, where they stay until it is through."""

    request: object
    values: Tensor

    @property
    def came(self) -> int | None:
        """The bytes of a message that is through, of a received one perhaps fewer than there was room for; None, while it is under way."""
        from mpi4py import MPI  # which runs, where there are requests

        status = MPI.Status()
        return status.Get_count(MPI.BYTE) if self.request.Test(status) else None


class _Sent(NamedTuple):
    """A message on its way, what it is read from, and the buffer that this is in, if it is in one."""

    request: object
    memory: object
    buffer: Tensor | None


_abandoned: list[_Sent] = []  # of mail that is gone: MPI may still read them


class Mail:
    """Tensors from rank to rank over a communicator.

    Args:
        device: where tensors are.
    """

    def __init__(self, comm, device=torch.device("cpu")):
        self.comm, self.device, self.waits = comm, torch.device(device), waits_of(comm)
        self.staged = self.device.type == "cuda" and not cuda_aware()
        self.buffers = Buffers(self.device, self.staged)
        self.bytes_sent = self.messages_sent = 0
        self._sending: list[_Sent] = []

    def __del__(self):
        _abandoned.extend(getattr(self, "_sending", ()))

    def room(self, size: int) -> Tensor:
        """Flat bytes to pack a message into, for :meth:`send`, which takes them back."""
        return (
            torch.empty(size, dtype=torch.uint8, device=self.device)
            if self.staged
            else self.buffers.take(size)
        )

    def send(self, x: Tensor, to: int, tag: int, packed: bool = False) -> None:
        """Start to send a dense tensor, which must not change before :meth:`flush`; ``packed``: it is :meth:`room`."""
        self.send_all({to: x}, tag, packed)

    def send_all(self, to: Mapping[int, Tensor], tag: int, packed: bool = False) -> None:
        """The same of a tensor for each rank, which waits for the device once."""
        leaving = []
        for rank, x in to.items():
            x, buffer = x.detach(), x if packed else None
            if self.staged:
                form = Form.of(x)
                buffer = self.buffers.take(form.bytes)
                x = form.within(buffer).copy_(x, non_blocking=True)
            leaving.append((rank, x, buffer))
        settled(self.device)
        for rank, x, buffer in leaving:
            self._sending.append(_Sent(self.comm.Isend(message(x), rank, tag), x, buffer))
            self.bytes_sent, self.messages_sent = (
                self.bytes_sent + x.numel() * x.element_size(),
                self.messages_sent + 1,
            )
        self.progress()

    def receive(self, form: Form, source: int, tag: int) -> Receipt:
        """Post a receive of a tensor, whose memory is its own."""
        if self.device.type == "cpu":
            x = form.empty(self.device)
            return Receipt(self.waits, self.comm.Irecv(message(x), source, tag), x, lambda x: x)

        def make(buffer: Tensor) -> Tensor:
            x = form.empty(self.device).copy_(form.within(buffer), non_blocking=True)
            self.done(buffer)
            return x

        return self.receive_bytes(form.bytes, source, tag, make)

    def receive_bytes(
        self,
        size: int,
        source: int,
        tag: int,
        make: Callable[[Tensor], Tensor] = lambda buffer: buffer,
    ) -> Receipt:
        """Post a receive into a buffer, to be given back by :meth:`done`."""
        buffer = self.buffers.take(size)
        return Receipt(self.waits, self.comm.Irecv(message(buffer), source, tag), buffer, make)

    def done(self, buffer: Tensor) -> None:
        """Take back the bytes of a receive, whose readers are queued."""
        self.buffers.give(buffer, read_by_stream=True)

    def begin_send(self, values: Tensor, to: int, tag: int) -> Message:
        """Start to send a dense tensor of the host's memory, of which its owner sees to it himself."""
        self.bytes_sent, self.messages_sent = (
            self.bytes_sent + values.numel() * values.element_size(),
            self.messages_sent + 1,
        )
        return Message(self.comm.Isend(message(values), to, tag), values)

    def begin_receive(self, room: Tensor, source: int, tag: int) -> Message:
        """Post a receive of as much as a dense tensor of the host's memory has room for, or less."""
        return Message(self.comm.Irecv(message(room), source, tag), room)

    def tell(self, what, to: int, tag: int) -> None:
        """Start to send a small Python object, such as forms."""
        self._sending.append(_Sent(self.comm.isend(what, to, tag), what, None))

    def ask(self, source: int, tag: int):
        """Wait for the object that the other side tells."""
        request = self.comm.irecv(1 << 16, source, tag)
        found: list = []

        def arrived() -> bool:  # mpi4py's irecv hands the object to whoever sees it complete
            done, what = request.test()
            if done:
                found.append(what)
            return done

        self.waits.wait(When(arrived))
        return found[0]

    def progress(self) -> None:
        """Let MPI move what is under way, and forget what has arrived."""
        waiting = []
        for sent in self._sending:
            if sent.request.Test():
                self._forget(sent)
            else:
                waiting.append(sent)
        self._sending = waiting

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            sent = self._sending.pop(0)
            self.waits.wait(sent.request)
            self._forget(sent)

    def _forget(self, sent: _Sent) -> None:
        """Give back the buffer of a message that is through."""
        if sent.buffer is not None:
            self.buffers.give(sent.buffer)


def message(x: Tensor):
    """The memory of a dense tensor as bytes, in the order in which it lies."""
    flat = as_bytes(x)
    return flat if flat.is_cuda else flat.numpy()
