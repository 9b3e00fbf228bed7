"""Errors inside a user's own code, told in a line with the file and line of the user's."""

from __future__ import annotations

import os
import traceback
from contextlib import contextmanager
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep  # Python's own modules
_LONGEST = 600  # characters of a message; PyTorch's may have a page


@contextmanager
def user_errors(what: str):
    """An error inside becomes a ValueError that says ``what`` failed, why, and at which line of the user's."""
    try:
        yield
    except (Exception, SystemExit) as e:
        raise ValueError(f"{what}: {user_error(e)}") from e


def user_error(error: BaseException) -> str:
    """``TypeError: ... (file.py, line 3)``: of the last line of a traceback that is neither ours nor a library's, else of the last one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not frame.filename.startswith(_OURS)
    ]
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not frame.filename.startswith(_STANDARD)
    ]
    where = (own or frames)[-1:]
    place = f" ({where[0].filename}, line {where[0].lineno})" if where else ""
    return (
        f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST] or 'no message'}{place}"
    )
