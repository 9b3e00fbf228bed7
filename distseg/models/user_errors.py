"""Report errors inside user code in one line, with the user's file and line."""

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
    """Turn an error of user code inside the context into a ValueError with a one-line message.

    Args:
        what: the beginning of the ValueError's message, such as ``model 'a:b' cannot be built``.
            A colon and the text of :func:`user_error` follow.
    """
    try:
        yield
    except (Exception, SystemExit) as e:
        raise ValueError(f"{what}: {user_error(e)}") from e


def user_error(error: BaseException) -> str:
    """Return an error as one line of text, such as ``TypeError: ... (file.py, line 3)``.

    The file and the line are those of the innermost call in the traceback that belongs neither to
    distseg nor to a library. Without such a call, they are those of the innermost call outside
    distseg. A syntax error has the line that cannot be parsed.
    """
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
