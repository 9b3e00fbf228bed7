"""Communicators without ranks: whatever is asked of the others is answered at once, with what this rank sent, or with ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from distseg.extents import Extents
from distseg.mesh import MeshShape


class _Done:
    """A request that is complete."""

    def __init__(self, what=None):
        self.what = what

    def Test(self) -> bool:
        return True

    def test(self):
        return True, self.what


class Comm:
    """Rank ``rank`` of ``size``.

    Args:
        told: objects on their way, by source, target and tag; shared by the ranks that a test plays one after another.
    """

    def __init__(self, size: int = 1, rank: int = 0, told: dict | None = None):
        self.size, self.rank, self.told = size, rank, {} if told is None else told

    def allgather(self, x):
        return [x] * self.size

    def bcast(self, x, root=0):
        return x

    def Barrier(self):
        pass

    def Iallgather(self, send, received):
        received[...] = send
        return _Done()

    def Iallreduce(self, send, total):
        if isinstance(send, np.ndarray):
            total[...] = send
        return _Done()

    def Isend(self, message, to, tag):
        return _Done()

    def Irecv(self, message, source, tag):
        return _Done()

    def isend(self, what, to, tag):
        self.told[self.rank, to, tag] = what
        return _Done()

    def irecv(self, size, source, tag):
        return _Done(self.told[source, self.rank, tag])


class FakeMesh(SimpleNamespace):
    """One rank's place in a mesh, as :class:`distseg.mesh.Mesh`."""


def mesh_at(samples: int, tiles, stages: int, tile, stage: int, told: dict) -> FakeMesh:
    shape = MeshShape(samples, Extents(tiles), stages)
    number = 0
    for n, t in zip(shape.tiles, tile):
        number = number * n + t
    return FakeMesh(
        shape=shape, sample=0, tile=tuple(tile), stage=stage, world=Comm(shape.size, number * stages + stage), pipeline=Comm(stages, stage, told),
        tiles=Comm(shape.tiles.volume, number), groups=Comm(samples, 0), replicas=Comm(samples * shape.tiles.volume, number),
    )  # fmt: skip
