"""Communicator of one rank, for serial use, for tests and for processes without other ranks.

See :class:`distseg.comm.communicator.Communicator`.
"""

from __future__ import annotations

import os


class Complete:
    """Request that is complete from the beginning."""

    def Test(self) -> bool:
        """Return True, because the request is complete."""
        return True


class Alone:
    """Communicator of one rank. It needs no library and sends no messages."""

    rank = 0
    size = 1
    transport = "alone"
    takes_gpu_memory = False

    def allgather(self, what):
        return [what]

    def allreduce(self, what):
        return what

    def gather(self, what, root=0):
        return [what]

    def bcast(self, what, root=0):
        return what

    def Bcast(self, memory, root=0):
        pass

    def Barrier(self):
        pass

    def Ibarrier(self):
        return Complete()

    def Iallgather(self, send, received):
        received[0] = send
        return Complete()

    def Isum(self, memory):
        return Complete()

    def Imaximum(self, memory):
        return Complete()

    def group(self, members):
        return self

    def Split(self, color=0, key=0):
        return self

    def split_by_node(self):
        return self

    def Free(self):
        pass

    def Abort(self, code):
        os._exit(code)
