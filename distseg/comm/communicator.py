"""Protocol of a communicator: the operations by which the ranks of a job exchange data.

Three classes implement it. A program gets one of them from :func:`distseg.comm.launch.world`:

- :class:`distseg.comm.mpi.MpiCommunicator`, over mpi4py,
- :class:`distseg.comm.gloo.TorchCommunicator`, over torch.distributed with gloo,
- :class:`distseg.comm.alone.Alone`, of one rank.

The names are those of mpi4py. Lower-case methods take any Python object that can be pickled.
Methods that begin with a capital take memory: numpy arrays in collectives, dense tensors of host
memory in messages. Methods that begin with ``I`` or ``i`` return a request at once. The caller must
leave the memory of a request alone until the request is complete. All other methods wait.

All ranks of a communicator must call its collectives in the same order. Messages between the same
two ranks with the same tag arrive in the order in which they were sent. A rank must not send a
message to itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor


class Request(Protocol):
    """Send, receive or collective that was started and may not be complete yet."""

    def Test(self) -> bool:
        """Advance the operation without waiting, and return True once it is complete.

        Raises:
            ConnectionError: the other rank has ended.
        """


class PartRequest(Request, Protocol):
    """Send or receive of a message whose length the receiver does not know in advance.

    Attributes:
        bytes: length of the message in bytes. It is valid once the message is complete.
    """

    bytes: int


class ObjectRequest(Protocol):
    """Receive of a Python object, which may not have arrived yet."""

    def test(self) -> tuple[bool, Any]:
        """Return (True, object) once the object has arrived, and (False, None) before."""


class Communicator(Protocol):
    """Group of ranks that exchange messages.

    Attributes:
        rank: number of this rank in the group.
        size: number of ranks of the group.
        transport: what carries the messages: ``mpi``, ``torch`` (torch.distributed), or ``alone``
            for a single rank, which sends none.
        takes_gpu_memory: True if messages may be in GPU memory. Otherwise callers copy messages to
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
        """Return every rank's object on rank ``root``, and None on all other ranks."""

    def bcast(self, what: Any, root: int = 0) -> Any:
        """Return the object of rank ``root`` on all ranks; other ranks' ``what`` is ignored."""

    def Bcast(self, memory: np.ndarray, root: int = 0) -> None:
        """Copy the array of rank ``root`` into the arrays of all other ranks."""

    def Barrier(self) -> None:
        """Wait until all ranks have made this call."""

    def Ibarrier(self) -> Request:
        """Return a request that is complete once all ranks have made this call."""

    def Iallgather(self, send: np.ndarray, received: np.ndarray) -> Request:
        """Start to gather each rank's array ``send`` (*shape) in ``received`` (ranks, *shape)."""

    def Isum(self, memory: np.ndarray) -> Request:
        """Start to replace a dense array by its sum over the ranks, added in rank order."""

    def Imaximum(self, memory: np.ndarray) -> Request:
        """Start to replace an array by the elementwise maximum of all ranks' arrays."""

    def Isend(self, memory: Tensor, dest: int, tag: int) -> Request:
        """Start to send a message to a receiver that knows the message's length."""

    def Irecv(self, memory: Tensor, source: int, tag: int) -> Request:
        """Post a receive of a message that is exactly as long as ``memory``."""

    def Isend_part(self, memory: Tensor, dest: int, tag: int) -> PartRequest:
        """Start to send a message whose length the receiver does not know (see ``Irecv_part``)."""

    def Irecv_part(self, memory: Tensor, source: int, tag: int) -> PartRequest:
        """Post a receive of a message that may be shorter than ``memory``."""

    def isend(self, what: Any, dest: int, tag: int) -> Request:
        """Start to send an object that rank ``dest`` receives by ``irecv``."""

    def irecv(self, most: int, source: int, tag: int) -> ObjectRequest:
        """Post a receive of an object that rank ``source`` sends by ``isend``.

        Args:
            most: largest size of the pickled object in bytes.
        """

    def group(self, members: Sequence[int]) -> Communicator:
        """Return the communicator of some ranks, in this order. Only these ranks call it.

        Unlike :meth:`Split` it needs no message from any other rank.

        Args:
            members: the numbers of the ranks in this communicator; this rank is one of them.
        """

    def Split(self, color: int = 0, key: int = 0) -> Communicator:
        """Return the communicator of all ranks that pass this ``color``, sorted by ``key``."""

    def split_by_node(self) -> Communicator:
        """Return the communicator of the ranks on this node."""

    def Free(self) -> None:
        """Release the connections of the communicator, which must not be used afterwards."""

    def Abort(self, code: int) -> None:
        """End all ranks of the job at once, with a non-zero exit code."""


def as_communicator(comm) -> Communicator:
    """Return ``comm`` as a communicator of distseg. A communicator of mpi4py is wrapped."""
    if type(comm).__module__.partition(".")[0] != "mpi4py":
        return comm
    from distseg.comm.mpi import MpiCommunicator

    return MpiCommunicator(comm)
