"""Signals that ask a run for a checkpoint or for its end.

The signals are counted from the start of a command. A run reads the counts between steps.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distseg.comm.launch import is_program

_SAVE = (signal.SIGUSR1,)
# mpirun forwards SIGUSR2 to its ranks. At SIGTERM it kills them at once.
_END = (signal.SIGTERM, signal.SIGUSR2)


class Signals:
    """Counts of the signals that came since :func:`listening` began.

    Attributes:
        saves: number of signals that ask for a checkpoint.
        ends: number of signals that ask for the end of the run.
    """

    saves = ends = 0


@contextmanager
def listening() -> Iterator[type[Signals]]:
    """Count signals inside the context, and suppress their usual effect.

    SIGUSR1 asks for a checkpoint, SIGTERM and SIGUSR2 ask for the end. Only the main thread can
    listen; in other threads nothing is counted. In a program
    (:func:`distseg.comm.launch.is_program`) these signals are ignored after the context. So a
    signal that comes while Python and MPI shut down does not change the exit code.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(_SAVE[0]) is _on_save
    ):
        yield Signals
        return
    before = {
        number: signal.signal(number, handler)
        for numbers, handler in ((_SAVE, _on_save), (_END, _on_end))
        for number in numbers
    }
    Signals.saves = Signals.ends = 0
    try:
        yield Signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_program() else handler)


def _on_save(*_) -> None:
    Signals.saves += 1


def _on_end(*_) -> None:
    Signals.ends += 1
