"""Signals that ask a run for a checkpoint or for its end: counted from a command's first moment, heeded between steps."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import Iterator

from distseg.comm.launch import is_program

_SAVE = (signal.SIGUSR1,)
_END = (signal.SIGTERM, signal.SIGUSR2)  # mpirun hands on USR2; at TERM it kills its ranks at once


class Signals:
    """How many came so far."""

    saves = ends = 0


@contextmanager
def listening() -> Iterator[type[Signals]]:
    """Inside, these signals are counted and do nothing else. Only a main thread can listen; elsewhere nothing is counted.

    In a program they do nothing afterwards either: while Python and MPI take their time to end, its exit code stays.
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
