"""Communicator over torch.distributed with gloo (:class:`distseg.comm.communicator.Communicator`).

Gloo marks a message as complete only while a thread waits for it. Without a waiting thread
``is_completed()`` stays False, and a wait with a time limit breaks the connection. So a thread
waits for each message under way, asleep and without Python's lock, and the message's request can be
tested. Collectives run in gloo's own threads and need no such thread.

Each communicator has its own process group, which only its own ranks create. This is not the
default group of ``torch.distributed``, so other libraries may use the default group. Gloo's time
limits are switched off: :mod:`distseg.comm.watch` ends a job that hangs.
"""

from __future__ import annotations

import atexit
import operator
import os
import pickle
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distseg.comm.alone import Alone, Complete
from distseg.comm.communicator import Request
from distseg.comm.ordered_sum import start_sum

NO_LIMIT = timedelta(days=365)
_GATHER = (1 << 31) - 1  # tag of gathered objects; gloo's tags have 32 bits
_HEAD = struct.Struct("q")  # header with the length of a message that the receiver does not know


class TorchCommunicator:
    """Communicator of a process group of gloo.

    Args:
        store: a key-value store of torch.distributed that all ranks reach, through which they find
            each other. Other process groups must not use its keys.
        rank, size: this rank's number, and the number of ranks.

    Attributes:
        store: the store. Further process groups of the same ranks may use it with a prefix.
    """

    transport = "torch"
    takes_gpu_memory = False

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.rank, self.size, self.store = rank, size, store
        self._group = dist.ProcessGroupGloo(store, rank, size, NO_LIMIT)
        self._splits = 0
        self._groups: Counter[tuple[int, ...]] = Counter()  # made so far, by their members
        # Process groups of freed parts (see Split). Another rank may still read messages of such a
        # group until the next collective of this communicator is over.
        self._retired: list = []
        self._parent: TorchCommunicator | None = None

    def __deepcopy__(self, memo) -> TorchCommunicator:
        """Return the same object, so that a copy of its owner uses the same connections."""
        return self

    # objects

    def allgather(self, what) -> list:
        mine = _pickled(what)
        lengths = self._all_equal(torch.tensor([mine.numel()]))
        most = int(max(lengths))
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        return [_unpickled(part[:n]) for part, n in zip(self._all_equal(padded), lengths)]

    def allreduce(self, what):
        return reduce(operator.add, self.allgather(what))

    def gather(self, what, root: int = 0) -> list | None:
        mine = _pickled(what)
        lengths = self._all_equal(torch.tensor([mine.numel()]))
        if self.rank != root:
            _wait(self.Isend(mine, root, _GATHER))
            return None
        parts = [
            mine if rank == root else torch.empty(int(n), dtype=torch.uint8)
            for rank, n in enumerate(lengths)
        ]
        requests = [
            self.Irecv(part, rank, _GATHER) for rank, part in enumerate(parts) if rank != root
        ]
        for request in requests:
            _wait(request)
        return [_unpickled(part) for part in parts]

    def bcast(self, what, root: int = 0):
        mine = _pickled(what) if self.rank == root else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([mine.numel()])
        self._broadcast(length, root)
        if self.rank != root:
            mine = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(mine, root)
        return what if self.rank == root else _unpickled(mine)

    # memory

    def Bcast(self, memory: np.ndarray, root: int = 0) -> None:
        if memory.size:
            self._broadcast(torch.from_numpy(memory), root)

    def Barrier(self) -> None:
        _wait(self.Ibarrier())

    def Ibarrier(self) -> CollectiveRequest:
        return CollectiveRequest(self._group.barrier())

    def Iallgather(self, send: np.ndarray, received: np.ndarray) -> CollectiveRequest | Complete:
        if not send.size:
            return Complete()
        return self._gathering(torch.from_numpy(send), list(torch.from_numpy(received)))

    def Isum(self, memory: np.ndarray) -> Request:
        return start_sum(memory, self)

    def Imaximum(self, memory: np.ndarray) -> CollectiveRequest | Complete:
        if not memory.size:
            return Complete()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return CollectiveRequest(self._group.allreduce([torch.from_numpy(memory)], options))

    # messages

    def Isend(self, memory: Tensor, dest: int, tag: int) -> _Message:
        return _Message(self._group, self._group.send([memory], dest, tag), memory, dest)

    def Irecv(self, memory: Tensor, source: int, tag: int) -> _Message:
        return _Message(self._group, self._group.recv([memory], source, tag), memory, source)

    def Isend_part(self, memory: Tensor, dest: int, tag: int) -> _Message:
        size = memory.numel() * memory.element_size()
        whole = torch.empty(_HEAD.size + size, dtype=torch.uint8)
        _HEAD.pack_into(whole.numpy(), 0, size)
        whole[_HEAD.size :] = memory
        return self.Isend(whole, dest, tag)

    def Irecv_part(self, memory: Tensor, source: int, tag: int) -> _PartMessage:
        whole = torch.empty(_HEAD.size + memory.numel(), dtype=torch.uint8)
        return _PartMessage(self.Irecv(whole, source, tag), whole, memory)

    def isend(self, what, dest: int, tag: int) -> _Message:
        return self.Isend(_pickled(what), dest, tag)

    def irecv(self, most: int, source: int, tag: int) -> _ObjectMessage:
        # Gloo takes messages that are shorter than the memory, and a pickle knows its own end.
        memory = torch.empty(most, dtype=torch.uint8)
        return _ObjectMessage(self.Irecv(memory, source, tag), memory)

    # groups

    def group(self, members: Sequence[int]) -> TorchCommunicator | Alone:
        key = tuple(members)
        self._groups[key] += 1
        name = "-".join(map(str, (len(key), zlib.crc32(repr(key).encode()), self._groups[key])))
        return self._part(f"group-{key[0]}-{name}", key)

    def Split(self, color: int = 0, key: int = 0) -> TorchCommunicator | Alone:
        every = self.allgather((color, key, self.rank))
        self._retired.clear()
        self._splits += 1
        members = [rank for c, _, rank in sorted(every) if c == color]
        return self._part(f"{self._splits}.{color}", members)

    def _part(self, name: str, members: Sequence[int]) -> TorchCommunicator | Alone:
        """Return the communicator of some ranks, which connect to each other.

        Args:
            name: a name by which these ranks find each other; no other ranks use it.
            members: the numbers of the ranks, in the order of the new communicator.
        """
        if len(members) == 1:
            return Alone()
        store = dist.PrefixStore(name, self.store)
        part = TorchCommunicator(store, members.index(self.rank), len(members))
        part._parent = self
        return part

    def split_by_node(self) -> TorchCommunicator | Alone:
        names = self.allgather(_node())
        return self.Split(names.index(names[self.rank]), self.rank)

    def Free(self) -> None:
        if self._parent is not None and self._group is not None:
            self._parent._retired.append(self._group)
        self._group = None

    def __del__(self):
        if getattr(self, "_parent", None) is not None:
            self.Free()

    def Abort(self, code: int) -> None:
        # The launcher ends the other ranks, and so do their broken connections to this one.
        os._exit(code)

    def _all_equal(self, send: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of the ranks.

        All ranks must call it together, with tensors of one shape.
        """
        received = [torch.empty_like(send) for _ in range(self.size)]
        _wait(self._gathering(send, received))
        return received

    def _gathering(self, send: Tensor, received: list[Tensor]) -> CollectiveRequest:
        return CollectiveRequest(self._group.allgather([received], [send.contiguous()]))

    def _broadcast(self, memory: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        _wait(CollectiveRequest(self._group.broadcast([memory], options)))


class CollectiveRequest:
    """Collective operation that a process group of torch.distributed runs in the background.

    Args:
        work: the operation, a ``torch.distributed.Work``.
    """

    def __init__(self, work: dist.Work):
        self._work = work

    def Test(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()  # raises the error of a collective that failed
        except RuntimeError as e:
            raise ConnectionError(_lost("another rank", e)) from None
        return True


class _Message:
    """Message that is being sent or received, for which a thread waits.

    This object keeps the process group and the memory, which gloo needs until the message is
    complete.
    """

    def __init__(self, group, work, memory: Tensor, peer: int):
        self._group, self._work, self._memory, self._peer = group, work, memory, peer
        self._error: Exception | None = None
        self.complete = False
        self.bytes = memory.numel() * memory.element_size()
        _threads.wait_for(self)

    def wait(self) -> None:
        """Wait for the message, and keep an error of gloo for :meth:`Test` to raise.

        The thread that waits for the message calls this method, and afterwards sets ``complete``.
        """
        try:
            self._work.wait()
        except Exception as e:
            self._error = e
        self._work = self._group = None

    def Test(self) -> bool:
        if self._error is not None:
            raise ConnectionError(_lost(f"rank {self._peer} of its group", self._error))
        return self.complete


class _PartMessage:
    """Receive of a message that begins with its own length; the rest is copied to ``memory``.

    Args:
        message: the receive into ``whole``, which has been started.
        whole: memory for the length and the content.
        memory: the caller's memory, which is as long as the longest possible content.
    """

    def __init__(self, message: _Message, whole: Tensor, memory: Tensor):
        self._message, self._whole, self._memory = message, whole, memory
        self.bytes = 0

    def Test(self) -> bool:
        if self._whole is None:
            return True
        if not self._message.Test():
            return False
        (self.bytes,) = _HEAD.unpack_from(self._whole.numpy())
        self._memory[: self.bytes] = self._whole[_HEAD.size : _HEAD.size + self.bytes]
        self._whole = None
        return True


class _ObjectMessage:
    """Receive of a pickled Python object.

    Args:
        message: the receive into ``memory``, which has been started.
        memory: memory that the pickle is received into. The pickle may be shorter than the memory.
    """

    def __init__(self, message: _Message, memory: Tensor):
        self._message, self._memory = message, memory

    def test(self):
        if not self._message.Test():
            return False, None
        return True, _unpickled(self._memory)


class _WaitingThreads:
    """Pool of threads, each of which waits for one message; it grows if no thread is idle."""

    def __init__(self):
        self._idle: list[SimpleQueue] = []
        self.under_way: set[_Message] = set()

    def wait_for(self, message: _Message) -> None:
        """Let an idle thread, or a new one, call ``message.wait()``."""
        try:
            queue = self._idle.pop()
        except IndexError:
            queue = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(queue,), name="distseg message", daemon=True
            ).start()
        self.under_way.add(message)
        queue.put(message)

    def _serve(self, queue: SimpleQueue) -> None:
        while True:
            self._complete(queue.get())
            self._idle.append(queue)

    def _complete(self, message: _Message) -> None:
        message.wait()
        self.under_way.discard(message)
        message.complete = True


_threads = _WaitingThreads()


@atexit.register
def end_with_messages(code: int = 1) -> None:
    """Exit this process at once if messages are still being sent or received, as after an error.

    Otherwise do nothing. Threads of this process wait for these messages inside gloo. A normal exit
    of Python would end the threads there, and gloo would then abort the process.

    Args:
        code: the exit code.
    """
    if _threads.under_way:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(request) -> None:
    """Wait until a request is complete, and let Python handle signals during the wait.

    Signals are not handled during gloo's own wait.
    """
    pause = 5e-5  # seconds
    while not request.Test():
        time.sleep(pause)
        pause = min(1.5 * pause, 1e-3)


def _pickled(what) -> Tensor:
    return torch.frombuffer(
        bytearray(pickle.dumps(what, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8
    )


def _unpickled(memory: Tensor):
    return pickle.loads(memory.numpy())


def _node() -> str:
    """Return a name of this node that no other node of the job has."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _lost(who: str, error: Exception) -> str:
    found = str(error).rpartition("] ")[2].partition(". This is typically")[0]
    return (
        f"the connection to {who} is lost ({found}): either the process of that rank has ended, "
        "and its own error message says why, or the network between the nodes failed"
    )


def connect(host: str, port: int, rank: int, size: int, hosted: bool) -> TorchCommunicator:
    """Connect to the other ranks, and return the communicator of all ranks of a job.

    All ranks of the job must call it together.

    Args:
        host, port: address of the key-value store through which the ranks find each other
            (:class:`torch.distributed.TCPStore`).
        hosted: True if the launcher runs the store. Otherwise rank 0 runs it.
    """
    store = dist.TCPStore(
        host,
        port,
        is_master=rank == 0 and not hosted,
        timeout=NO_LIMIT,
        wait_for_workers=False,
        multi_tenant=True,
    )
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return TorchCommunicator(dist.PrefixStore(f"distseg/{again}", store), rank, size)
