"""Protocol of a communicator: all that distseg asks of the ranks of a job.

Three classes implement it. A program gets its own by :func:`distseg.comm.launch.world`:

- :class:`distseg.comm.mpi.MpiCommunicator`, over mpi4py,
- :class:`distseg.comm.gloo.TorchCommunicator`, over torch.distributed with gloo,
- :class:`distseg.comm.alone.Alone`, of one rank.

The names are those of mpi4py. Lower-case methods take any Python object that can be pickled.
Methods that begin with a capital take memory: numpy arrays in collectives, dense tensors of host
memory in messages. Methods that begin with ``I`` or ``i`` return a request at once, and their
memory must stay as it is until the request is complete. All other methods wait.

Collectives of a communicator are called by all its ranks in the same order. Messages between the
same two ranks with the same tag arrive in the order in which they were sent. A message to a rank's
own self is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Request(Protocol):
    """Operation under way."""

    def Test(self) -> bool:
        """Advance the operation without waiting, and return True once it is complete.

        Raises:
            ConnectionError: the other rank has ended.
        """


class PartRequest(Request, Protocol):
    """Message under way whose length the receiver does not know.

    Attributes:
        bytes: number of bytes of the message, once it is complete.
    """

    bytes: int


class ObjectRequest(Protocol):
    """Receive of a Python object under way."""

    def test(self) -> tuple[bool, Any]:
        """Return (True, object) once the object has come, and (False, None) before."""


class Communicator(Protocol):
    """Group of ranks that exchange messages.

    Attributes:
        rank: number of this rank in the group.
        size: number of ranks of the group.
        transport: what carries the messages.
        takes_gpu_memory: messages and sums may be in GPU memory. Otherwise callers copy them to
            host memory first (:mod:`distseg.comm.staging`).
    """

    rank: int
    size: int
    transport: Literal["mpi", "torch", "alone"]
    takes_gpu_memory: bool

    def allgather(self, what: Any) -> list:
        """Return every rank's object, in the order of the ranks."""

    def allreduce(self, what: Any) -> Any:
        """Return the sum of every rank's object, added by ``+`` in the order of the ranks."""

    def gather(self, what: Any, root: int = 0) -> list | None:
        """Return every rank's object on rank ``root``, and None on the others."""

    def bcast(self, what: Any, root: int = 0) -> Any:
        """Return the object of rank ``root``."""

    def Bcast(self, memory: np.ndarray, root: int = 0) -> None:
        """Copy the array of rank ``root`` into that of all others."""

    def Barrier(self) -> None:
        """Wait until all ranks are here."""

    def Ibarrier(self) -> Request:
        """Return a request that is complete once all ranks have made this call."""

    def Iallgather(self, send: np.ndarray, received: np.ndarray) -> Request:
        """Start to gather (*shape) of every rank into ``received`` (ranks, *shape)."""

    def Isum(self, memory: np.ndarray) -> Request:
        """Start to replace a dense array by its sum over the ranks, added in their order."""

    def Imaximum(self, memory: np.ndarray) -> Request:
        """Start to replace an array by the elementwise maximum of all ranks."""

    def Isend(self, memory: Tensor, dest: int, tag: int) -> Request:
        """Start to send a message to a receiver that knows its length."""

    def Irecv(self, memory: Tensor, source: int, tag: int) -> Request:
        """Post a receive of a message of exactly the length of ``memory``."""

    def Isend_part(self, memory: Tensor, dest: int, tag: int) -> PartRequest:
        """Start to send a message to an ``Irecv_part``."""

    def Irecv_part(self, memory: Tensor, source: int, tag: int) -> PartRequest:
        """Post a receive of a message that may be shorter than ``memory``."""

    def isend(self, what: Any, dest: int, tag: int) -> Request:
        """Start to send an object to an ``irecv``."""

    def irecv(self, most: int, source: int, tag: int) -> ObjectRequest:
        """Post a receive of an object.

        Args:
            most: largest number of bytes of the pickled object.
        """

    def Split(self, color: int = 0, key: int = 0) -> Communicator:
        """Return the communicator of all ranks with this rank's ``color``, sorted by ``key``."""

    def split_by_node(self) -> Communicator:
        """Return the communicator of the ranks on this node."""

    def Free(self) -> None:
        """Give back what the communicator holds; it is not used any more."""

    def Abort(self, code: int) -> None:
        """End all ranks of the job at once, with a non-zero exit code."""


def as_communicator(comm) -> Communicator:
    """Return ``comm`` as a communicator of distseg: communicators of mpi4py are wrapped."""
    if type(comm).__module__.partition(".")[0] != "mpi4py":
        return comm
    from distseg.comm.mpi import MpiCommunicator

    return MpiCommunicator(comm)
