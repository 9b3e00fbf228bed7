"""How a rank waits for others, and what it does meanwhile.

MPI itself waits by asking again and again, which takes the core from the very rank it waits for where ranks outnumber
cores. Here a rank moves other messages on, does work that was put off for such moments, else asks for a moment, then sleeps
between questions.

What is put off is work that nobody waits for: the gradients of weights. It holds its tensors in memory, so there is a time by which it is
done: when the next piece is put off, or, where a schedule has an action for it, that action.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import Callable, ContextManager, NamedTuple

import torch

from distseg.comm.watch import waits as tell
from distseg.comm.watch import watched


class _Piece(NamedTuple):
    action: str | None
    work: Callable[[], None]


class Waits:
    """All waits of one mesh's communicators, which share what is done meanwhile.

    Attributes:
        timeout: seconds that a rank waits for another, where no guardian watches it (:mod:`distseg.comm.watch`); 0: for ever.
        span: makes the context of waits with a kind, and of the work that fills them, for those who watch (:mod:`distseg.runtime.trace`).
    """

    def __init__(self, timeout: float = 0.0):
        self.timeout = timeout
        self.span: Callable[[str, str], ContextManager] = lambda kind, name: nullcontext()
        self._move: Callable[[], None] = lambda: None
        self._pieces: deque[_Piece] | None = None  # None: nothing is put off
        self._action: str | None = None

    def wait(self, request, what: str = "a message", kind: str | None = None) -> None:
        """Complete an MPI request without holding the core for longer than a message takes on its way.

        Args:
            what: is awaited, for errors.
            kind: of the span, where somebody watches.

        Raises:
            TimeoutError: naming what did not come in time, where no guardian would end the job.
        """
        with self.span(kind, what) if kind else nullcontext():
            self._wait(request, what)

    def _wait(self, request, what: str) -> None:
        start = time.perf_counter()
        patience, pause, told = start + 1e-4, 5e-5, False
        while not request.Test():
            self._move()
            if self.do_next():
                continue
            now = time.perf_counter()
            if self.timeout and now > start + self.timeout and not watched():
                raise TimeoutError(
                    f"{what} did not come within {self.timeout:g} s: another rank hangs or is very "
                    "late; if it only was busy, set run.timeout higher"
                )
            if now > patience:
                if not told:
                    told = True
                    tell(what)
                time.sleep(pause)
                pause = min(2 * pause, 2e-4)
        if told:
            tell("")

    @contextmanager
    def moving(self, move: Callable[[], None]):
        """Inside, every wait calls ``move`` again and again, which moves messages on that others wait for."""
        before, self._move = self._move, move
        try:
            yield
        finally:
            self._move = before

    @contextmanager
    def putting_off(self):
        """Inside, :meth:`later` puts work off; all of it is done in the end."""
        self._pieces = deque()
        try:
            yield
            while self.do_next():
                pass
        finally:
            self._pieces = None

    @contextmanager
    def until(self, action: str | None):
        """What is put off inside may wait for :meth:`finish` of this action; with None for no longer than until the next piece."""
        before, self._action = self._action, action
        try:
            yield
        finally:
            self._action = before

    def later(self, work: Callable[[], None]) -> bool:
        """Have ``work`` done while this rank waits for another; False where nothing is put off."""
        if self._pieces is None:
            return False
        self._pieces.append(_Piece(self._action, work))
        while self._action is None and len(self._pieces) > 1:
            self.do_next()
        return True

    def do_next(self) -> bool:
        """Do the oldest work that is put off; False if there is none."""
        if not self._pieces:
            return False
        piece = self._pieces.popleft()
        with self.span("weight", piece.action or "put off"), torch.no_grad():
            piece.work()
        return True

    def check_done(self) -> None:
        """Raise an error if work is still put off, as gradients would then lack a part.

        Raises:
            RuntimeError: with the number of pieces and the action that the first one waits for.
        """
        if self._pieces:
            first = self._pieces[0].action or "the next piece"
            raise RuntimeError(
                f"{len(self._pieces)} gradients of weights are still put off (the first until "
                f"{first}): "
                "update the weights only after the backward pass has ended"
            )

    def finish(self, action: str) -> None:
        """Do what may wait until this action and was not done before."""
        while piece := next(
            (piece for piece in self._pieces or () if piece.action == action), None
        ):
            self._pieces.remove(piece)
            with torch.no_grad():
                piece.work()


class When:
    """A condition that can be waited for like a request."""

    def __init__(self, condition: Callable[[], bool]):
        self.Test = condition


class Ranks:
    """A communicator, mpi4py's or one like it, whose waits are its mesh's."""

    def __init__(self, comm, waits: Waits):
        self.comm, self.waits = comm, waits
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str):
        if name == "comm":  # of one that is being made
            raise AttributeError(name)
        return getattr(self.comm, name)

    def Split(self, color: int = 0, key: int = 0) -> "Ranks":
        return Ranks(self.comm.Split(color, key), self.waits)


def waits_of(comm) -> Waits:
    """A communicator's; those of their own where it comes from elsewhere than a mesh."""
    return getattr(comm, "waits", None) or Waits()
