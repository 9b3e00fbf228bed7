"""Communicators without ranks: whatever is asked of the others is answered at once, with what this rank sent, or with ones."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from distseg.comm.mesh import MeshShape
from distseg.comm.waits import Ranks, Waits
from distseg.config.sizes import Size

from .order import Order


class _Request:
    """Complete as soon as somebody asks."""

    def __init__(self, what=None):
        self.what, self.complete = what, False

    def Test(self) -> bool:
        self.complete = True
        return True

    def test(self):
        return self.Test(), self.what


class Untold(Exception):
    """A rank asks for what another is to tell first."""


class Comm:
    """Rank ``rank`` of ``size``.

    Args:
        order: of the stream of this rank's device, which is told of messages.
        told: objects on their way, by source, target and tag; shared by the ranks that a test plays one after another.
    """

    transport = "mpi"

    def __init__(self, size: int, rank: int, order: Order, told: dict):
        self.size, self.rank, self.order, self.told = size, rank, order, told

    def allgather(self, x):
        return [x] * self.size

    def bcast(self, x, root=0):
        return x

    def Barrier(self):
        pass

    def Ibarrier(self):
        return _Request()

    def Iallgather(self, send, received):
        received[...] = send
        return _Request()

    def Isum(self, memory):
        return _Request()

    def Imaximum(self, memory):
        return _Request()

    def Isend(self, message: Tensor, to, tag):
        self.order.send(message, request := _Request())
        return request

    def Irecv(self, message: Tensor, source, tag):
        self.order.receive(message, request := _Request())
        return request

    def isend(self, what, to, tag):
        self.told[self.rank, to, tag] = what
        return _Request()

    def irecv(self, size, source, tag):
        if (source, self.rank, tag) not in self.told:
            raise Untold(f"rank {self.rank} asks rank {source}, which has not played yet")
        return _Request(self.told[source, self.rank, tag])


class Nccl:
    """A process group of NCCL: what it does is queued on the stream, and nobody waits.

    Args:
        size: the number of its ranks.
        order: of the stream.
    """

    def __init__(self, size: int, order: Order):
        self.size, self.order, self.batch = lambda: size, order, None

    def _allgather_base(self, found: Tensor, x: Tensor):
        self.order.queue([x], [found])
        return self

    def allreduce(self, tensors):
        self.order.queue(tensors, tensors)
        return self

    def _start_coalescing(self):
        self.batch = [], []

    def send(self, tensors, rank, tag):
        self.batch[0].extend(tensors)

    def recv(self, tensors, rank, tag):
        self.batch[1].extend(tensors)

    def _end_coalescing(self):
        self.order.queue(*self.batch)
        return self

    def wait(self):
        pass


def group_of(ranks: Ranks, gpus, device: str) -> Nccl:
    """Return a group in place of that of :func:`distseg.comm.nccl.group_of`."""
    return Nccl(ranks.size, ranks.comm.order)


class FakeMesh(SimpleNamespace):
    """One rank's place in a mesh, as :class:`distseg.comm.mesh.Mesh`."""


def mesh_at(
    samples: int, tiles, stages: int, tile, stage: int, order: Order, told: dict
) -> FakeMesh:
    """The place of one rank, of the first sample group."""
    shape = MeshShape(samples, Size(tiles), stages)
    number = 0
    for n, t in zip(shape.tiles, tile):
        number = number * n + t
    waits = Waits()

    def comm(size, rank):
        return Ranks(Comm(size, rank, order, told), waits)

    return FakeMesh(
        shape=shape, waits=waits, sample=0, tile=tuple(tile), stage=stage, rank=number * stages + stage, world=comm(shape.size, number * stages + stage), pipeline=comm(stages, stage),
        tiles=comm(shape.tiles.volume, number), groups=comm(samples, 0), replicas=comm(samples * shape.tiles.volume, number),
    )  # fmt: skip
