"""Handling of Ctrl-C that never loses an interrupt.

Python raises KeyboardInterrupt in whatever code is running. In the callback of a weak reference,
Python prints the exception and ignores it. h5py has thousands of these callbacks, so programs that
write HDF5 often ignored Ctrl-C. If an interrupt comes inside a callback, it is therefore repeated a
moment later.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from contextlib import contextmanager

_SOON = 0.02  # seconds until an interrupt is repeated


@contextmanager
def interruptible():
    """Let Ctrl-C end the code inside the context, also during the callback of a weak reference.

    The context does nothing outside the main thread, or if SIGINT has a handler that is not
    Python's default.
    """
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
