"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the program stands. In the callback of a weak reference, of which h5py has thousands, it is
printed and forgotten: one interrupt in three of a program that writes HDF5. There it is put off for a moment.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from contextlib import contextmanager

_SOON = 0.02  # seconds


@contextmanager
def interruptible():
    """Inside, an interrupt ends what is done, whatever that is. Only a main thread with Python's own handler can have that."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number, frame) -> None:
    if frame is not None and frame.f_code.co_filename == weakref.__file__:
        again = threading.Timer(_SOON, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    raise KeyboardInterrupt
