"""Communicators of a test's ranks over MPI and over gloo, whatever started them."""

import pytest
import torch.distributed as dist
from mpirunner import transport

from distseg.comm.alone import Alone
from distseg.comm.communicator import as_communicator
from distseg.comm.gloo import TorchCommunicator


def over(kind: str, comm):
    """The communicator of a test's ranks over MPI or gloo; of one rank, that of a process alone."""
    if kind == "mpi":
        if transport.TORCH:
            pytest.skip("the ranks are connected by torch.distributed")
        return as_communicator(comm)
    if comm.size == 1:
        return Alone()
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = comm.bcast(store.port if comm.rank == 0 else None)
    if comm.rank:
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    return TorchCommunicator(store, comm.rank, comm.size)
