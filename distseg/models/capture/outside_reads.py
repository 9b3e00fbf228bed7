"""Detect forward passes that read clocks, the operating system, files or object ids."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distseg.models.capture import draws
from distseg.models.passes import is_library, is_users, run, shown

# Modules whose built-in functions read the machine's state. For each, the functions that are
# allowed, because results do not depend on them.
_ASK = {
    "time": {"sleep", "strftime", "strptime", "mktime", "asctime", "tzset", "get_clock_info"},
    "posix": {"fspath", "get_terminal_size", "waitstatus_to_exitcode"},
    "nt": {"fspath", "get_terminal_size", "waitstatus_to_exitcode"},
    "_socket": set(),
    "_uuid": set(),
}
_NAMED = {
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
    ("io", "open"),
    ("_io", "open"),
    ("builtins", "id"),
    ("builtins", "hash"),
}
# These count only if user code calls them directly. Libraries call them for tables whose order does
# not depend on the ids.
_OF_OBJECTS = {("builtins", "id"), ("builtins", "hash")}
_ENVIRONMENT = {os._Environ.__getitem__.__code__: "os.environ"}
_BESIDES = {
    "logging",
    "warnings",
    "traceback",
    "linecache",
    "threading",
    "importlib",
    "tqdm",
    "copy",
    "inspect",
    "_weakrefset",
}
"""Libraries that read clocks or ids for messages or for their own tables."""

ASKS = (
    "reads the machine's state: a pass must depend on its image and the network alone, not on "
    "clocks, files, the process or addresses of objects, which differ between ranks; do this in "
    "__init__ or in the training loop, not in forward"
)


@contextmanager
def asked(note: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``note(name, line)`` when user code in the context reads a clock, a file or the like.

    These are calls that read the clock, the environment, files, the process or the ids of objects.
    In the current thread, only calls inside :func:`distseg.models.passes.run` are watched; in
    threads that are started in the context, all calls are watched.

    Args:
        note: function that takes the name of the called function, such as ``time.time``, and the
            file and line of user code.
    """
    thread = threading.get_ident()

    def look(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            owner = function.__module__ or getattr(function.__self__, "__name__", None)
            name = function.__name__
            if (owner, name) not in _NAMED and (owner not in _ASK or name in _ASK[owner]):
                return
            direct = (owner, name) in _OF_OBJECTS
        elif event == "call" and frame.f_code in _ENVIRONMENT:
            owner, name, direct = "os", "environ", False
        else:
            return
        line = _line_that_asks(frame, direct, threading.get_ident() == thread)
        if line is not None:
            note(
                name
                if owner in ("builtins", "io", "_io")
                else f"{'os' if owner == 'posix' else owner}.{name}",
                line,
            )

    before, collects = (sys.getprofile(), threading.getprofile()), gc.isenabled()
    # A garbage collection may start anywhere, and its callbacks may read clocks.
    gc.disable()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
        if collects:
            gc.enable()


def _line_that_asks(frame: FrameType | None, direct: bool, runs: bool) -> str | None:
    """Return the file and line of user code that makes a watched call, directly or by a library.

    A watched call reads the machine's state. Return None if the call does not count: PyTorch or
    distseg makes it, or a library makes it for messages or tables of its own.

    Args:
        frame: the frame that makes the call.
        direct: True if only direct calls by user code count.
        runs: True if the call is made in the thread that runs the pass. Then only calls inside the
            pass count.
    """
    caller = None
    while frame is not None and frame.f_code is not run.__code__:
        path = frame.f_code.co_filename
        if caller is None and path != draws.__file__:
            if (
                path.startswith("<frozen importlib")
                or frame.f_globals.get("__name__", "").partition(".")[0] in _BESIDES
            ):
                return None
            if not is_library(path):
                caller = frame
            elif direct:
                return None
        frame = frame.f_back
    if caller is None or not is_users(caller.f_code) or runs and frame is None:
        return None
    return shown(caller.f_code.co_filename, caller.f_lineno)
