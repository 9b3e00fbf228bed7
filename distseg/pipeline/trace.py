"""What a rank did when: spans of time, collected while it works, for pictures of the schedule (distseg.report.timeline).

A rank that nobody watches has a :class:`NoTrace`, which costs next to nothing. Kernels of a GPU run behind the program's
back: there a span ends when the work is queued, unless the caller synchronises inside it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Callable, ContextManager, Iterator


@dataclass(frozen=True)
class Span:
    """A piece of a rank's time.

    Attributes:
        kind: forward, backward, recompute, wait, send or norm-exchange.
        name: of an action its ``name``, such as ``F3,0`` (micro-batch 3, stage 0); else free text.
        start, end: seconds since the start of the trace.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace:
    """Spans of one rank in ``spans``, in order of their end::

        with trace.span(action.kind, action.name):
            ...

    Args:
        rank: of the pipeline.
        clock: in seconds; time is counted from here on, so make the traces of all ranks right after a barrier.
    """

    def __init__(self, rank: int = 0, clock: Callable[[], float] = time.perf_counter):
        self.rank, self.spans, self._clock = rank, [], clock
        self._start = clock()

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """What happens inside is one span, also when it fails."""
        start = self._clock() - self._start
        try:
            yield
        finally:
            self.spans.append(Span(self.rank, kind, name, start, self._clock() - self._start))


class NoTrace:
    """Watches nothing."""

    spans: tuple[Span, ...] = ()
    _nothing: ContextManager[None] = nullcontext()

    def span(self, kind: str, name: str) -> ContextManager[None]:
        return self._nothing
