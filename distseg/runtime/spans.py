"""Records spans of time of a rank, for pictures of the schedule (distseg.planning.timeline).

A rank that is not traced has a :class:`NoTrace`, which costs almost no time. GPU kernels run
asynchronously, so on a GPU a span ends when its work is queued, unless the caller synchronises
inside the span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """Span of time in which a rank does one thing, such as a pass or a message.

    Attributes:
        rank: the rank.
        kind: forward, backward, weight, recompute, read, scratch, wait, send, halo, norm-exchange,
            reduce or update.
        name: the name of an action, such as ``F3,0`` (forward pass of micro-batch 3 in stage 0), or
            any other text.
        start: seconds since the start of the trace.
        end: seconds since the start of the trace.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


class Trace:
    """Recorder of one rank's spans, which the list ``spans`` holds in the order of their ends.

    Example::

        with trace.span(action.kind, action.name):
            ...

    Args:
        rank: the number of the rank, which is the row of its spans in pictures.
        clock: returns seconds. Times are counted from the construction of the trace, so construct
            the traces of all ranks right after a barrier.
        ranges: an object with the functions ``range_start(text)``, which returns a number, and
            ``range_end(number)``, such as the module ``torch.cuda.nvtx``. Each span is then also a
            range of NVIDIA's profilers. None for no ranges.
    """

    def __init__(
        self, rank: int = 0, clock: Callable[[], float] = time.perf_counter, ranges: Any = None
    ):
        self.rank, self.spans, self._clock, self._ranges = rank, [], clock, ranges
        self._start = clock()

    def now(self) -> float:
        """Return the seconds since the start of the trace."""
        return self._clock() - self._start

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Record the time inside this context as one span, even if the code in it raises an error.

        ``kind`` and ``name`` become the attributes of the :class:`Span`.
        """
        number = self._ranges and self._ranges.range_start(f"{kind} {name}")
        start = self.now()
        try:
            yield
        finally:
            self.spans.append(Span(self.rank, kind, name, start, self.now()))
            if self._ranges:
                self._ranges.range_end(number)


class NoTrace:
    """Trace with the methods of :class:`Trace` that records nothing."""

    spans: tuple[Span, ...] = ()
    _nothing: AbstractContextManager[None] = nullcontext()

    def span(self, kind: str, name: str) -> AbstractContextManager[None]:
        return self._nothing


class TracedComm:
    """Communicator that records its non-blocking collectives as spans of time.

    A span lasts from the call until the request's ``Test`` returns True. Use this class only while
    a run is traced.

    Args:
        comm: the communicator.
        trace: the trace of this rank.
        kind: the kind of the spans.
    """

    def __init__(self, comm, trace: Trace, kind: str):
        self._comm, self._trace, self._kind = comm, trace, kind

    def __getattr__(self, name: str):
        return getattr(self._comm, name)

    def Iallgather(self, *buffers):
        return self._watched("allgather", lambda: self._comm.Iallgather(*buffers))

    def Isum(self, memory):
        return self._watched("sum", lambda: self._comm.Isum(memory))

    def _watched(self, name: str, call: Callable) -> _Request:
        span = self._trace.span(self._kind, name)
        span.__enter__()
        return _Request(call(), span)


class _Request:
    """MPI request that ends its span when it is complete."""

    def __init__(self, request, span: AbstractContextManager[None]):
        self._request, self._span = request, span

    def Test(self) -> bool:
        done = self._request.Test()
        if done:
            self._span.__exit__(None, None, None)
        return done
