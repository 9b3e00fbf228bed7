"""Runs a logger in a thread, so that a service that fails or hangs cannot stop the training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

import numpy as np

from distseg.report.loggers.interface import Logger

_PATIENCE = 120.0  # seconds that one call may take, such as the sign-in at a slow service
_LAST = 60.0  # seconds that all calls may take that are left at the end of a run


class BackgroundLogger:
    """Logger that passes all calls to another logger, in the order in which they came.

    Its methods return at once, except for :meth:`end`, which waits for a limited time. If the other
    logger raises an error, or a call takes too long, one warning is printed. The other logger is
    then not called again.

    Args:
        name: the name of the other logger, for the warning.
        logger: the other logger.
        alive: function that is called several times a second while :meth:`end` waits.
        patience: the longest time of one call, in seconds.
        last: the longest time that :meth:`end` waits, in seconds.
    """

    def __init__(
        self,
        name: str,
        logger: Logger,
        alive: Callable[[], None] = lambda: None,
        patience: float = _PATIENCE,
        last: float = _LAST,
    ):
        self._name, self._logger, self._alive = name, logger, alive
        self._patience, self._last = patience, last
        self._calls: SimpleQueue = SimpleQueue()
        self._began: float | None = None  # when the call began that is running
        self._lost, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)

    def start(self, settings: Mapping[str, Any]) -> None:
        self._thread.start()
        self._call(self._logger.start, settings)

    def scalars(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._call(self._logger.scalars, kind, step, epoch, values)

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._call(self._logger.picture, step, name, pixels)

    def end(self, complete: bool) -> None:
        self._call(self._logger.end, complete)
        self._calls.put(None)
        deadline = time.monotonic() + self._last
        while self._thread.is_alive() and not self._lost:
            self._alive()
            self._thread.join(0.2)
            if time.monotonic() > deadline:
                self._give_up(f"it did not take the last numbers within {self._last:.0f} s")

    def _call(self, method: Callable, *arguments) -> None:
        """Let the thread call a method of the other logger, unless that logger has failed before.

        If its last call has taken too long, give the logger up.
        """
        began = self._began
        if began is not None and time.monotonic() - began > self._patience:
            self._give_up(f"it has not answered for {self._patience:.0f} s")
        if not self._lost:
            self._calls.put((method, arguments))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._lost:
            method, arguments = call
            self._began = time.monotonic()
            try:
                method(*arguments)
            except BaseException as e:  # packages also raise SystemExit and KeyboardInterrupt
                self._give_up(f"{type(e).__name__}: {e}")
            self._began = None

    def _give_up(self, why: str) -> None:
        """Stop calling the other logger, and print one warning with the reason ``why``."""
        with self._lock:
            if self._lost:
                return
            self._lost = True
        while not self._calls.empty():
            self._calls.get()
        self._calls.put(None)
        print(
            f"distseg: the logger {self._name} failed and gets no more numbers of this run "
            f"({' '.join(why.split())}): training goes on, and log.jsonl has all numbers",
            file=sys.stderr,
            flush=True,
        )
