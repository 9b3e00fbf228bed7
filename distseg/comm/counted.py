"""Communicator that counts the messages of a rank and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from distseg.comm.communicator import as_communicator


@dataclass
class Traffic:
    """Counts of the messages that one rank sent, and of the arrays that it gave to collectives.

    Attributes:
        messages: number of messages to single ranks.
        message_bytes: bytes of these messages.
        collectives: number of sums, maxima, gathers and broadcasts of arrays.
        collective_bytes: bytes of the arrays that this rank gave to the collectives. The transport
            may send these bytes several times.
    """

    messages: int = 0
    message_bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def copy(self) -> Traffic:
        return self - Traffic()

    def count_message(self, size: int) -> None:
        self.messages += 1
        self.message_bytes += size

    def count_collective(self, size: int) -> None:
        self.collectives += 1
        self.collective_bytes += size


class CountedComm:
    """Wrapper of a communicator that counts the tensors and arrays which this rank sends.

    Every call is passed on to the wrapped communicator. Python objects are not counted, because
    they are few and small. Communicators that are split off from this one add to the same counts.

    Args:
        comm: the communicator to wrap, of distseg or of mpi4py.
        traffic: the object with the counts; by default a new one.
    """

    def __init__(self, comm, traffic: Traffic | None = None):
        self.comm = as_communicator(comm)
        self.traffic = Traffic() if traffic is None else traffic
        # A communicator of one rank sends nothing.
        self._counts = self.traffic if self.comm.size > 1 else Traffic()

    def __getattr__(self, name: str):
        # Copying makes an object without `comm`, where this method would call itself for ever.
        if name == "comm":
            raise AttributeError(name)
        return getattr(self.comm, name)

    def group(self, members: Sequence[int]) -> CountedComm:
        return CountedComm(self.comm.group(members), self.traffic)

    def Split(self, color: int = 0, key: int = 0) -> CountedComm:
        return CountedComm(self.comm.Split(color, key), self.traffic)

    def split_by_node(self) -> CountedComm:
        return CountedComm(self.comm.split_by_node(), self.traffic)

    def Isend(self, memory, dest: int, tag: int):
        self._counts.count_message(memory.nbytes)
        return self.comm.Isend(memory, dest, tag)

    def Isend_part(self, memory, dest: int, tag: int):
        self._counts.count_message(memory.nbytes)
        return self.comm.Isend_part(memory, dest, tag)

    def Bcast(self, memory, root: int = 0) -> None:
        if self.comm.rank == root:
            self._counts.count_collective(memory.nbytes)
        self.comm.Bcast(memory, root)

    def Iallgather(self, send, received):
        self._counts.count_collective(send.nbytes)
        return self.comm.Iallgather(send, received)

    def Isum(self, memory):
        self._counts.count_collective(memory.nbytes)
        return self.comm.Isum(memory)

    def Imaximum(self, memory):
        self._counts.count_collective(memory.nbytes)
        return self.comm.Imaximum(memory)
