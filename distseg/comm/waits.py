"""Wait policy: how a rank waits for others, and what it does meanwhile.

MPI waits in a busy loop. If ranks outnumber cores, this loop may take the core from the rank that
it waits for. Here a rank tests the request, and between tests it advances other messages and does
deferred work. Without such work it tests for a short while and then sleeps between tests.

Deferred work is work that no other rank waits for: the gradients of weights. Such work keeps its
tensors in memory, so it has a deadline: an action of the schedule, or else the next deferral or
the start of the next pass, whichever comes first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from distseg.comm.communicator import as_communicator
from distseg.comm.progress import SAME_CALL, watched
from distseg.comm.progress import waits as report_wait

if TYPE_CHECKING:
    from distseg.comm.nccl import StreamGroup

# Calls of a communicator that return only after other ranks have made the same call.
_BLOCKING = frozenset(
    ("allgather", "allreduce", "gather", "bcast", "Bcast", "Barrier", "split_by_node")
)


class _Piece(NamedTuple):
    """Deferred work, such as the gradient of a layer's weight, and its deadline.

    The deadline is the name of an action of the schedule. None means that the work must be done
    when the next work is deferred or the next pass begins. The work adds to the gradients of
    ``parameters``.
    """

    action: str | None
    work: Callable[[], None]
    parameters: Sequence[nn.Parameter | None]


class Waits:
    """Wait policy of all communicators of one mesh: how a rank waits for other ranks.

    While a rank waits, it advances other messages and does deferred work.

    Attributes:
        timeout: seconds that a rank waits for another if no guardian watches it
            (:mod:`distseg.comm.watch`); 0 stands for no limit.
        span: function (kind, name) that returns a context manager, for tracing
            (:mod:`distseg.runtime.spans`). It is entered around each wait whose caller gives a
            kind, such as ``halo``, and around the deferred work that :meth:`do_next` does.
    """

    def __init__(self, timeout: float = 0.0):
        self.timeout = timeout
        self.span: Callable[[str, str], AbstractContextManager] = lambda kind, name: nullcontext()
        self._move: Callable[[], None] = lambda: None
        self._pieces: deque[_Piece] | None = None  # None: work is not deferred
        self._action: str | None = None

    def wait(self, request, what: str = "a message", kind: str | None = None) -> None:
        """Wait until a request is complete, without keeping a core busy for long.

        Args:
            request: the request, an object with ``Test``.
            what: description of what is awaited, for errors.
            kind: kind of the wait in a trace, such as ``halo``; None to leave it out of the trace.

        Raises:
            TimeoutError: the request did not complete within ``timeout``, and no guardian watches.
        """
        with self.span(kind, what) if kind else nullcontext():
            self._wait(request, what)

    def _wait(self, request, what: str) -> None:
        """Test a request until it is complete; do deferred work between tests, and later sleep."""
        start = time.perf_counter()
        patience, pause, reported = start + 1e-4, 5e-5, False
        try:
            while not request.Test():
                self._move()
                if self.do_next():
                    continue
                now = time.perf_counter()
                if self.timeout and now > start + self.timeout and not watched():
                    raise TimeoutError(
                        f"{what} did not come within {self.timeout:g} s: another rank hangs or is "
                        "very late; if that rank was only busy, set run.timeout higher (in Python: "
                        "timeout of distseg.distribute)"
                    )
                if now > patience:
                    if not reported:
                        reported = True
                        report_wait(what, self.timeout)
                    time.sleep(pause)
                    pause = min(2 * pause, 2e-4)
        finally:
            if reported:
                report_wait("")

    @contextmanager
    def reported(self, what: str):
        """Tell the guardian that this rank waits for other ranks inside the context.

        Use it around calls that block, such as a collective of MPI, so that the guardian can end a
        job in which they never return.

        Args:
            what: description of what is awaited.
        """
        report_wait(what, self.timeout)
        try:
            yield
        finally:
            report_wait("")

    @contextmanager
    def moving(self, move: Callable[[], None]):
        """Call ``move`` again and again during every wait inside the context.

        ``move`` advances messages that other ranks wait for. It is also called after each piece of
        deferred work. In a context inside of another one, the functions of both are called.
        """
        before = self._move

        def both() -> None:
            before()
            move()

        self._move = both
        try:
            yield
        finally:
            self._move = before

    @contextmanager
    def putting_off(self):
        """Allow :meth:`later` to defer work inside the context.

        At the end of the context, the work that is still deferred is done.
        """
        self._pieces = deque()
        try:
            yield
            while self.do_next():
                pass
        finally:
            self._pieces = None

    @contextmanager
    def until(self, action: str | None):
        """Set the deadline of work that is deferred inside the context.

        Args:
            action: the name of the action of the schedule at which the work must be done, such as
                ``W3,0`` (weight gradients of micro-batch 3 in stage 0). The action calls
                :meth:`finish`. With None, the work must be done when the next work is deferred or
                the next pass begins.
        """
        before, self._action = self._action, action
        try:
            yield
        finally:
            self._action = before

    def later(
        self, work: Callable[[], None], parameters: Sequence[nn.Parameter | None] = ()
    ) -> bool:
        """Defer ``work`` until this rank waits or the deadline comes, and return True.

        Outside of the context :meth:`putting_off`, return False. The caller must then do the work
        itself.

        Args:
            work: the function to call later.
            parameters: the parameters to whose gradients the work adds.
        """
        if self._pieces is None:
            return False
        self._pieces.append(_Piece(self._action, work, parameters))
        while self._action is None and len(self._pieces) > 1:
            self.do_next()
        return True

    def do_next(self) -> bool:
        """Do the oldest deferred work and return True; return False if there is none."""
        if not self._pieces:
            return False
        piece = self._pieces.popleft()
        with self.span("weight", piece.action or "put off"), torch.no_grad():
            piece.work()
        self._move()
        return True

    def adds_to(self, parameter: nn.Parameter) -> bool:
        """Return True if deferred work will add to the gradient of a parameter."""
        return any(p is parameter for piece in self._pieces or () for p in piece.parameters)

    def check_done(self) -> None:
        """Raise an error if deferred work is left, because some gradients are then incomplete.

        Raises:
            RuntimeError: work is left. The message names the number of deferred functions and the
                deadline of the first one.
        """
        if self._pieces:
            action = self._pieces[0].action
            until = f"the action {action}" if action else "the next pass begins"
            raise RuntimeError(
                f"gradients of weights are not computed yet ({len(self._pieces)} are left, and the "
                f"oldest waits until {until}): update the weights only after the backward pass has "
                "ended"
            )

    def finish(self, action: str | None) -> None:
        """Do all deferred work that has a certain deadline.

        Args:
            action: the name of the action that is the deadline; None for work that must be done
                when the next pass begins.
        """
        while piece := next(
            (piece for piece in self._pieces or () if piece.action == action), None
        ):
            self._pieces.remove(piece)
            # A named action has a span of its own in the trace.
            span = self.span("weight", "put off") if action is None else nullcontext()
            with span, torch.no_grad():
                piece.work()
            self._move()


class When:
    """Request-like object for a condition, so that :meth:`Waits.wait` can wait for the condition.

    Args:
        condition: function that returns True once the condition holds.
    """

    def __init__(self, condition: Callable[[], bool]):
        self.Test = condition


class Ranks:
    """Communicator together with the wait policy of its mesh (:class:`Waits`).

    Args:
        comm: the communicator, of distseg or of mpi4py.
        waits: the wait policy.
        stream: what exchanges tensors of the same ranks on their GPUs, without the host
            (:class:`distseg.comm.nccl.StreamGroup`); None if nothing does.
    """

    def __init__(self, comm, waits: Waits, stream: StreamGroup | None = None):
        self.comm, self.waits, self.stream = as_communicator(comm), waits, stream
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str):
        # Copying makes an object without `comm`, where this method would call itself for ever.
        if name == "comm":
            raise AttributeError(name)
        found = getattr(self.comm, name)
        return self._reported(found) if name in _BLOCKING else found

    def _reported(self, call: Callable) -> Callable:
        """Return a function that calls ``call`` and tells the guardian that this rank waits."""

        @wraps(call)
        def reported(*args, **kwargs):
            with self.waits.reported(SAME_CALL):
                return call(*args, **kwargs)

        return reported

    def __deepcopy__(self, memo) -> Ranks:
        """Return the same object, so that a copy of its owner uses the same connections."""
        return self

    def group(self, members: Sequence[int]) -> Ranks:
        return Ranks(self._reported(self.comm.group)(members), self.waits)

    def Split(self, color: int = 0, key: int = 0) -> Ranks:
        return Ranks(self._reported(self.comm.Split)(color, key), self.waits)


def waits_of(comm) -> Waits:
    """Return the wait policy of ``comm``; create one if ``comm`` was not made by a mesh."""
    return getattr(comm, "waits", None) or Waits()


def stream_of(comm) -> StreamGroup | None:
    """Return what exchanges tensors of the ranks of ``comm`` on their GPUs, or None."""
    return getattr(comm, "stream", None)
