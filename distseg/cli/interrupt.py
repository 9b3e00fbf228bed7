"""Handling of Ctrl-C that never loses an interrupt.

Python raises KeyboardInterrupt wherever the program stands. In the callback of a weak reference the
exception is printed and ignored. h5py has thousands of these callbacks, so programs that write HDF5
often ignored Ctrl-C. Inside a callback the interrupt is therefore repeated a moment later.
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
    """Let Ctrl-C end the code inside the context, wherever it stands.

    It does nothing outside the main thread, or if SIGINT has another handler than Python's own.
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
