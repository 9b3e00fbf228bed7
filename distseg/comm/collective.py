"""Collectives on small CPU or CUDA tensors over any mpi4py communicator.

Everything here is packed by its callers: a layer, or a step, sends one message. Numbers travel in float64, so that
what ranks combine is combined in more than training's precision; CUDA tensors are staged through host memory, which
for messages of a few kilobytes costs the same as a device's own path.

MPI itself waits by asking again and again, which takes the core from the very rank it waits for where ranks outnumber
cores. Here a rank does work that was put off for such moments (:mod:`distseg.comm.later`), else it asks for a moment, then
sleeps between questions.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from typing import Callable, ContextManager

import numpy as np
import torch
from torch import Tensor

from distseg.comm import later
from distseg.comm.staging import upload
from distseg.watch import waits, watched


def gather(x: Tensor, comm, home: torch.device | None = None) -> Tensor:
    """Every rank's ``x`` in rank order: (*shape) -> (ranks, *shape), float64 on the device of ``x``, or on ``home``.

    The order makes what is computed from it the same on every rank, bit by bit.
    """
    if comm.size == 1:
        return x.detach().to(home or x.device, torch.float64).unsqueeze(0)
    send = _host(x)
    received = np.empty((comm.size, *send.shape))
    wait(comm.Iallgather(send, received), f"numbers of all {comm.size} ranks that share them")
    return upload(torch.from_numpy(received), home or x.device)


def add(x: Tensor, comm) -> Tensor:
    """The sum of every rank's ``x``, float64 on the device of ``x``."""
    if comm.size == 1:
        return x.detach().to(torch.float64)
    send = _host(x)
    total = np.empty_like(send)
    wait(comm.Iallreduce(send, total), f"a sum over {comm.size} ranks")
    return upload(torch.from_numpy(total), x.device)


_timeout = 0.0  # seconds; 0: none
_span: Callable[[str, str], ContextManager] = lambda kind, name: nullcontext()


def set_timeout(seconds: float) -> None:
    """How long :func:`wait` waits in this process where no guardian watches it (:mod:`distseg.watch`)."""
    global _timeout
    _timeout = seconds


def timeout() -> float:
    """Seconds that a rank waits for another; 0: for ever."""
    return _timeout


def watch_waits(span: Callable[[str, str], ContextManager]) -> None:
    """From now on, waits with a kind, and the work that fills waits, are spans (:class:`distseg.program.trace.Trace`)."""
    global _span
    _span = span
    later.watch(span)


def wait(request, what: str = "a message", kind: str | None = None) -> None:
    """Complete an MPI request without holding the core for longer than a message takes on its way.

    Args:
        what: is awaited, for errors.
        kind: of the span, where somebody watches.

    Raises:
        TimeoutError: naming what did not come, after the time of :func:`set_timeout`, where no guardian would end the job.
    """
    with _span(kind, what) if kind else nullcontext():
        _wait(request, what)


def _wait(request, what: str) -> None:
    start = time.perf_counter()
    patience, pause, told = start + 1e-4, 5e-5, False
    while not request.Test():
        _meanwhile()
        if later.do_next():
            continue
        now = time.perf_counter()
        if _timeout and now > start + _timeout and not watched():
            raise TimeoutError(
                f"{what} did not come within {_timeout:g} s: another rank hangs or is very late; if it only was busy, set run.timeout higher"
            )
        if now > patience:
            if not told:
                told = True
                waits(what)
            time.sleep(pause)
            pause = min(2 * pause, 2e-4)
    if told:
        waits("")


class When:
    """A condition that can be waited for like a request."""

    def __init__(self, condition: Callable[[], bool]):
        self.Test = condition


_meanwhile: Callable[[], None] = lambda: None


@contextmanager
def meanwhile(move: Callable[[], None]):
    """Inside, every wait calls ``move`` again and again, which moves messages on that others wait for."""
    global _meanwhile
    before, _meanwhile = _meanwhile, move
    try:
        yield
    finally:
        _meanwhile = before


def _host(x: Tensor) -> np.ndarray:
    return x.detach().to("cpu", torch.float64).contiguous().numpy()


class Alone:
    """A communicator of one rank that needs no MPI: for serial use and tests."""

    rank = 0
    size = 1

    def allgather(self, x):
        return [x]

    def bcast(self, x, root=0):
        return x

    def Barrier(self):
        pass
