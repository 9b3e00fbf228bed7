"""Non-blocking messages of tensors: sends that run on, receives that are posted ahead.

A message is the raw memory of a tensor. The tensor's form (shape, dtype, memory format) is not part
of the message, so both sides agree on the form once. CUDA tensors go directly to a transport that
takes GPU memory, such as a CUDA-aware MPI, and otherwise through pinned host memory, by the rules
of :mod:`distseg.comm.staging`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from distseg.comm.communicator import PartRequest, Request, as_communicator
from distseg.comm.memory_format import as_bytes, channels_last
from distseg.comm.staging import Buffers, wait_for_device
from distseg.comm.waits import Waits, When, stream_of, waits_of

if TYPE_CHECKING:
    from distseg.comm.nccl import StreamGroup


@dataclass(frozen=True)
class Form:
    """Shape, dtype and memory format of a tensor, which a receiver needs to allocate it.

    Attributes:
        shape: the shape.
        dtype: the dtype.
        channels_last: True if the channels are last in memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def from_tensor(cls, x: Tensor) -> Form:
        """Return the form (shape, dtype and memory format) of a dense tensor."""
        return cls(
            tuple(x.shape),
            x.dtype,
            not x.is_contiguous() and x.is_contiguous(memory_format=channels_last(x.dim())),
        )

    def empty(self, device) -> Tensor:
        """Return an uninitialised tensor of this shape, dtype and memory format on ``device``."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format
        )

    @property
    def bytes(self) -> int:
        """Size in bytes of a tensor of this form."""
        return math.prod(self.shape) * self.dtype.itemsize

    def within(self, buffer: Tensor) -> Tensor:
        """Return a view of ``buffer`` with this form (shape, dtype and memory format).

        Args:
            buffer: a flat uint8 tensor with as many bytes as a tensor of this form.
        """
        return buffer.view(self.dtype).as_strided(self.shape, self.empty("meta").stride())

    def fit(self, x: Tensor) -> Tensor:
        """Return ``x`` as a dense tensor in this form's memory format; copy it only if needed."""
        return x.contiguous(memory_format=self.memory_format)

    @property
    def memory_format(self) -> torch.memory_format:
        """PyTorch's memory format of a tensor of this form."""
        return channels_last(len(self.shape)) if self.channels_last else torch.contiguous_format

    def __str__(self) -> str:
        size, dtype = "x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        return f"{size} {dtype}{' channels_last' if self.channels_last else ''}"


class Receipt:
    """Receive of a tensor, which may not have arrived yet.

    Args:
        waits: the wait policy: how this rank waits, and what it does during waits.
        request: the request of the receive.
        buffer: the memory that the message is received into.
        make: function that returns the received tensor, given the buffer.
    """

    def __init__(self, waits: Waits, request, buffer: Tensor, make: Callable[[Tensor], Tensor]):
        self._waits, self.request, self._buffer, self._make = waits, request, buffer, make

    def tensor(self, what: str = "a message", kind: str | None = None) -> Tensor:
        """Wait for the message and return its tensor.

        Args:
            what: description of the message, for errors.
            kind: kind of the wait in a trace, such as ``halo``; None to leave it out of the trace.
        """
        self._waits.wait(self.request, what, kind)
        return self._make(self._buffer)


class Arriving(Protocol):
    """Tensor that is being received, such as a :class:`Receipt`."""

    def tensor(self, what: str = "a message", kind: str | None = None) -> Tensor:
        """Wait for the message and return its tensor (see :meth:`Receipt.tensor`)."""


class Message(NamedTuple):
    """Message that is being sent from host memory or received into it.

    Attributes:
        request: the request of the send or receive.
        values: the tensor to send, which must not change before the message is complete, or the
            buffer to receive into, which must not be touched before.
    """

    request: PartRequest
    values: Tensor

    @property
    def came(self) -> int | None:
        """Number of bytes of the message, or None as long as it is not complete.

        A received message may be shorter than its buffer.
        """
        return self.request.bytes if self.request.Test() else None


class _Sent(NamedTuple):
    """Running send, and the memory that must stay until the send is complete.

    ``buffer`` is the buffer of the pool that holds the memory; None for memory outside the pool.
    """

    request: Request
    memory: object
    buffer: Tensor | None


# Messages of deleted Mail objects. The transport may still read their memory.
_abandoned: list[_Sent] = []


class Mail:
    """Non-blocking messages of tensors over a communicator.

    Args:
        comm: the communicator.
        device: the device of the tensors that are sent, and of the tensors that are received.
    """

    def __init__(self, comm, device=torch.device("cpu")):
        self.comm, self.device = as_communicator(comm), torch.device(device)
        self.waits = waits_of(comm)
        self.staged = self.device.type == "cuda" and not self.comm.takes_gpu_memory
        self.buffers = Buffers(self.device, self.staged)
        self._sending: list[_Sent] = []

    def __del__(self):
        _abandoned.extend(getattr(self, "_sending", ()))

    def buffer(self, size: int) -> Tensor:
        """Return a flat uint8 tensor of ``size`` bytes, to pack a message into.

        Send the packed tensor by :meth:`send` or :meth:`send_all` with ``packed`` True.
        """
        return (
            torch.empty(size, dtype=torch.uint8, device=self.device)
            if self.staged
            else self.buffers.take(size)
        )

    def send(self, x: Tensor, to: int, tag: int, packed: bool = False) -> Request:
        """Start to send a dense tensor, and return the request of the send.

        The tensor must not change before the request is complete.

        Args:
            x: the tensor.
            to: the receiving rank.
            tag: the tag of the message.
            packed: True if ``x`` is a buffer from :meth:`buffer`.
        """
        (request,) = self.send_all({to: x}, tag, packed)
        return request

    def send_all(self, to: Mapping[int, Tensor], tag: int, packed: bool = False) -> list[Request]:
        """Start to send several tensors, with a single synchronisation of the device.

        Return the requests of the sends.

        Args:
            to: the tensor for each receiving rank. No tensor may change before :meth:`flush`.
            tag: the tag of all messages.
            packed: True if the tensors are buffers from :meth:`buffer`.
        """
        leaving = []
        for rank, x in to.items():
            x, buffer = x.detach(), x if packed else None
            if self.staged:
                form = Form.from_tensor(x)
                buffer = self.buffers.take(form.bytes)
                x = form.within(buffer).copy_(x, non_blocking=True)
            leaving.append((rank, x, buffer))
        wait_for_device(self.device)
        started = [
            _Sent(self.comm.Isend(message(x), rank, tag), x, buffer) for rank, x, buffer in leaving
        ]
        self._sending += started
        self.progress()
        return [sent.request for sent in started]

    def receive(self, form: Form, source: int, tag: int) -> Receipt:
        """Post a receive of a tensor with the given shape, dtype and memory format.

        The received tensor has its own memory, which is not a buffer of the pool.

        Args:
            form: shape, dtype and memory format of the tensor.
            source: the sending rank.
            tag: the tag of the message.
        """
        if self.device.type == "cpu":
            x = form.empty(self.device)
            return Receipt(self.waits, self.comm.Irecv(message(x), source, tag), x, lambda x: x)

        def make(buffer: Tensor) -> Tensor:
            x = form.empty(self.device).copy_(form.within(buffer), non_blocking=True)
            self.done(buffer)
            return x

        return self.receive_bytes(form.bytes, source, tag, make)

    def exchange(
        self, sizes: Mapping[int, int], pack: Callable[[], Mapping[int, Tensor]], tag: int
    ) -> dict[int, Arriving]:
        """Start to exchange packed messages with other ranks, and return the receives by rank.

        Args:
            sizes: for each rank that sends a message to this rank, its length in bytes.
            pack: function that returns, for each receiving rank, a packed buffer of :meth:`buffer`.
                It is called after the receives are posted.
            tag: the tag of all messages.
        """
        arriving = {rank: self.receive_bytes(size, rank, tag) for rank, size in sizes.items()}
        self.send_all(pack(), tag, packed=True)
        return arriving

    def receive_bytes(
        self,
        size: int,
        source: int,
        tag: int,
        make: Callable[[Tensor], Tensor] = lambda buffer: buffer,
    ) -> Receipt:
        """Post a receive into a buffer from the pool; the caller must give it to :meth:`done`.

        Args:
            size: length of the message in bytes.
            source: the sending rank.
            tag: the tag of the message.
            make: function that returns the received tensor, given the buffer. By default the
                received tensor is the buffer.
        """
        buffer = self.buffers.take(size)
        return Receipt(self.waits, self.comm.Irecv(message(buffer), source, tag), buffer, make)

    def done(self, buffer: Tensor) -> None:
        """Return a receive buffer to the pool.

        Call it as soon as all work that reads the buffer is queued on the device's stream.
        """
        self.buffers.give(buffer, read_by_stream=True)

    def begin_send(self, values: Tensor, to: int, tag: int) -> Message:
        """Start to send a dense tensor of host memory.

        The caller must test the returned message until it is complete; :meth:`flush` does not.
        """
        return Message(self.comm.Isend_part(as_bytes(values), to, tag), values)

    def begin_receive(self, buffer: Tensor, source: int, tag: int) -> Message:
        """Post a receive into a dense tensor of host memory.

        The message, sent by :meth:`begin_send`, may be shorter than the tensor.
        """
        return Message(self.comm.Irecv_part(as_bytes(buffer), source, tag), buffer)

    def send_object(self, what, to: int, tag: int) -> None:
        """Start to send a small Python object, such as a list of shapes, to rank ``to``."""
        self._sending.append(_Sent(self.comm.isend(what, to, tag), what, None))

    def recv_object(self, source: int, tag: int):
        """Wait for an object that ``source`` sends by :meth:`send_object`, and return it."""
        request = self.comm.irecv(1 << 16, source, tag)
        found: list = []

        # Only the test that completes the request returns the object.
        def arrived() -> bool:
            done, what = request.test()
            if done:
                found.append(what)
            return done

        self.waits.wait(When(arrived))
        return found[0]

    def progress(self) -> None:
        """Advance the sends without waiting, and release the buffers of complete sends."""
        waiting = []
        for sent in self._sending:
            if sent.request.Test():
                self._forget(sent)
            else:
                waiting.append(sent)
        self._sending = waiting

    def flush(self) -> None:
        """Wait until all tensors and objects are sent, except messages of :meth:`begin_send`."""
        while self._sending:
            sent = self._sending.pop(0)
            self.waits.wait(sent.request)
            self._forget(sent)

    def _forget(self, sent: _Sent) -> None:
        """Return the buffer of a completely sent message to the pool."""
        if sent.buffer is not None:
            self.buffers.give(sent.buffer)


class HaloMail:
    """Exchange of packed messages between the GPUs of several ranks, without waits of the host.

    It has those methods of :class:`Mail` that a halo exchange calls. The stream waits for a message
    where a host would: kernels that are queued later read the received tensor.

    Args:
        group: the ranks, and what carries their messages.
        waits: the wait policy, whose deferred work the GPU does while messages travel.
    """

    def __init__(self, group: StreamGroup, waits: Waits):
        self.group, self.device, self.waits = group, group.device, waits

    def buffer(self, size: int) -> Tensor:
        """Return a flat uint8 tensor of ``size`` bytes, to pack a message into."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def exchange(
        self, sizes: Mapping[int, int], pack: Callable[[], Mapping[int, Tensor]], tag: int
    ) -> dict[int, Arriving]:
        """Start to exchange packed messages with other ranks, and return the receives by rank.

        The arguments are those of :meth:`Mail.exchange`. NCCL has no tags: the order of the
        exchanges tells messages apart.
        """
        sends = pack()
        receives = {rank: self.buffer(size) for rank, size in sizes.items()}
        if not sends and not receives:
            return {}
        batch = _Batch(self.group.exchange(sends, receives), (sends, receives), self.waits)
        if not receives:
            batch.wait()
        return {rank: _OnStream(batch, buffer) for rank, buffer in receives.items()}

    def done(self, buffer: Tensor) -> None:
        """Do nothing: the allocator takes the memory back once nobody refers to it."""


class _Batch:
    """Group of messages that was started on a GPU, with the memory that it reads and writes.

    Args:
        work: the running operation of torch.distributed.
        memory: objects that hold the tensors of the messages.
        waits: the wait policy.
    """

    def __init__(self, work, memory, waits: Waits):
        self._work, self._memory, self._waits = work, memory, waits

    def wait(self) -> None:
        """Make the stream wait for the messages, after one piece of deferred work."""
        if self._work is not None:
            self._waits.do_next()
            self._work.wait()
            self._work = self._memory = None


class _OnStream(NamedTuple):
    """Receive of a message in a group of messages (see :class:`Arriving`)."""

    batch: _Batch
    buffer: Tensor

    def tensor(self, what: str = "a message", kind: str | None = None) -> Tensor:
        """Make the stream wait for the message, and return its buffer."""
        self.batch.wait()
        return self.buffer


def halo_mail(comm, device) -> Mail | HaloMail:
    """Return what exchanges the halos of tensors on ``device`` between the ranks of ``comm``."""
    stream = stream_of(comm)
    return HaloMail(stream, waits_of(comm)) if stream else Mail(comm, device)


def message(x: Tensor) -> Tensor:
    """Return the memory of a dense tensor as a flat view of bytes, in memory order."""
    return as_bytes(x)
