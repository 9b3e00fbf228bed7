"""A test without ranks that hangs fails too, after the same limit."""

import contextlib
import faulthandler
import os
import signal
import threading

import pytest

from .effort import EVERY, POLL, Effort
from .marks import limit

LAST = 30.0  # seconds after the limit at which a test that no signal can reach ends the whole run


class Limit:
    def __init__(self, config: pytest.Config):
        capture = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            self.stderr = os.dup(2)  # the real one, while tests have theirs captured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        with self.limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        with self.limited(item):
            return (yield)

    @contextlib.contextmanager
    def limited(self, item):
        seconds, over = limit(item), threading.Event()
        before = signal.signal(
            signal.SIGALRM, lambda *_: pytest.fail(f"timed out after {seconds:g} s")
        )
        faulthandler.dump_traceback_later(seconds + LAST, exit=True, file=self.stderr)
        watch = threading.Thread(
            target=self._strike, args=(seconds, over), daemon=True, name="mpirunner-limit"
        )
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, before)

    def _strike(self, seconds: float, over: threading.Event) -> None:
        """Interrupt the test at its limit, unless it is over before. Most are, before the first look."""
        left = seconds - EVERY
        if over.wait(min(EVERY, seconds)):
            return
        clock = Effort(os.getpid())
        while left > 0:
            faulthandler.dump_traceback_later(left + LAST, exit=True, file=self.stderr)
            if over.wait(min(EVERY, max(left, POLL))):
                return
            left = seconds - EVERY - clock.look()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
