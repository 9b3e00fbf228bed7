"""Detection of forward passes that ask the machine: for the time, the operating system, files, or the place of an object in memory."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import contextmanager
from types import FrameType
from typing import Any, Callable, Iterator

from distseg.models.capture import draws
from distseg.models.passes import is_library, is_users, run, shown

# by the module or class that a built-in function is of; those without an effect on anything
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
_OF_OBJECTS = {
    ("builtins", "id"),
    ("builtins", "hash"),
}  # which libraries call for tables that have one order
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
"""Modules that ask for what they print, or for their own order."""

ASKS = (
    "asks the machine: what a pass computes must depend on its image and the network alone, "
    "not on clocks, files, the process or where objects lie, which differ from rank to rank: "
    "do this in __init__ or in the training loop, and leave it out of forward"
)


@contextmanager
def asked(note: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``note(name, line)`` for each function inside :func:`distseg.models.passes.run` by which the user's code asks the machine."""
    thread = threading.get_ident()

    def look(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            owner, name = (
                function.__module__ or getattr(function.__self__, "__name__", None),
                function.__name__,
            )
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
    # a collection runs wherever it comes, and calls whoever wants to know how long it took
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
    """Return the line of the user's code that a call comes from; None if it is PyTorch's or ours, or of a library that asks for itself.

    Args:
        direct: the user's code is to call without a library between.
        runs: the call is of the thread that runs the pass.
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
