"""Communicator over mpi4py (:class:`distseg.comm.communicator.Communicator`).

Modules of distseg import mpi4py inside of functions, because the import starts MPI.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

import numpy as np
from torch import Tensor

from distseg.comm.cuda_aware import cuda_aware
from distseg.comm.ordered_sum import start_sum


class MpiCommunicator:
    """Communicator of mpi4py with distseg's names.

    Args:
        comm: a communicator of mpi4py. Methods that this class does not define are taken from it.
    """

    transport = "mpi"

    def __init__(self, comm):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str):
        # Copying makes an object without `comm`, where this method would call itself for ever.
        if name == "comm":
            raise AttributeError(name)
        return getattr(self.comm, name)

    def __deepcopy__(self, memo) -> MpiCommunicator:
        """Return the same object, so that a copy of its owner uses the same connections."""
        return self

    @property
    def takes_gpu_memory(self) -> bool:
        """True if MPI is CUDA-aware, so that it accepts pointers to GPU memory."""
        return cuda_aware()

    def allreduce(self, what):
        # mpi4py adds in the order of a tree.
        return reduce(operator.add, self.comm.allgather(what))

    def Isum(self, memory: np.ndarray):
        return start_sum(memory, self)

    def Imaximum(self, memory: np.ndarray):
        from mpi4py import MPI

        return self.comm.Iallreduce(MPI.IN_PLACE, memory, op=MPI.MAX)

    def Isend(self, memory: Tensor, dest: int, tag: int):
        return self.comm.Isend(_buffer(memory), dest, tag)

    def Irecv(self, memory: Tensor, source: int, tag: int):
        return self.comm.Irecv(_buffer(memory), source, tag)

    def Isend_part(self, memory: Tensor, dest: int, tag: int) -> _PartRequest:
        return _PartRequest(self.Isend(memory, dest, tag))

    def Irecv_part(self, memory: Tensor, source: int, tag: int) -> _PartRequest:
        return _PartRequest(self.Irecv(memory, source, tag))

    def group(self, members: Sequence[int]) -> MpiCommunicator:
        return MpiCommunicator(self.comm.Create_group(self.comm.Get_group().Incl(members)))

    def Split(self, color: int = 0, key: int = 0) -> MpiCommunicator:
        return MpiCommunicator(self.comm.Split(color, key))

    def split_by_node(self) -> MpiCommunicator:
        from mpi4py import MPI

        return MpiCommunicator(self.comm.Split_type(MPI.COMM_TYPE_SHARED))

    def Abort(self, code: int) -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)


class _PartRequest:
    """Request of a message that may be shorter than its receiver's memory.

    Attributes:
        bytes: length of the message in bytes, once it is complete.
    """

    def __init__(self, request):
        from mpi4py import MPI

        self._request, self._status = request, MPI.Status()
        self.bytes = 0

    def Test(self) -> bool:
        from mpi4py import MPI

        done = self._request.Test(self._status)
        if done:
            self.bytes = self._status.Get_count(MPI.BYTE)
        return done


def _buffer(memory: Tensor):
    """Return the memory of a dense tensor as mpi4py takes it: an array, or a tensor on a GPU."""
    return memory if memory.is_cuda else memory.numpy()
