"""A test without ranks that hangs fails too, after the same limit."""

import contextlib
import faulthandler
import os
import signal

import pytest

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
        seconds = limit(item)

        def strike(*_):
            pytest.fail(f"timed out after {seconds:g} s")

        before = signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + LAST, exit=True, file=self.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
