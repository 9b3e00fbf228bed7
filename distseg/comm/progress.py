"""Progress of this process, on a page of memory that it shares with its guardian.

The program reports its progress by :func:`phase`, :func:`heartbeat` and :func:`waits`, which cost
about a microsecond. Without a guardian (:mod:`distseg.comm.watch`) they do nothing.
"""

from __future__ import annotations

import mmap
import struct

from distseg.comm.guardian import DOING, ENDING, LIMIT, MOVES, PATIENCE, PHASE, TEXT, WAITING

SAME_CALL = "all ranks to make the same call"  # what a rank waits for in a collective
_page: mmap.mmap | None = None  # shared with the guardian; None without a guardian
_moves = 0


def share(page: mmap.mmap | None) -> None:
    """Write all further reports of progress to a page of memory, which the guardian reads.

    Args:
        page: the page; None to stop the reports.
    """
    global _page
    _page = page


def phase(text: str) -> None:
    """Report to the guardian that a phase of the work starts, such as ``epoch 2, step 14``."""
    if _page is not None:
        _write(PHASE, text)
        _write(DOING, "")
        _move()


def heartbeat(text: str) -> None:
    """Report to the guardian the next operation of the current phase (:func:`phase`).

    Args:
        text: the operation, such as ``forward of stage 1, micro-batch 0``.
    """
    if _page is not None:
        _write(DOING, text)
        _move()


def waits(text: str, patience: float = 0.0) -> None:
    """Report to the guardian what this rank waits for; an empty text says that the wait is over.

    Args:
        text: what other ranks have to do or send, in words.
        patience: seconds after which the guardian ends the job if no rank makes progress; 0 for no
            limit. The guardian uses this value only if :func:`limit` has set no limit.
    """
    if _page is not None:
        _page[PATIENCE : PATIENCE + 8] = struct.pack("d", patience)
        _write(WAITING, text)
        _move()


def shared() -> bool:
    """Return True if this process has a guardian."""
    return _page is not None


def limit(seconds: float) -> None:
    """Set the longest time in seconds that a rank may make no progress; 0 stands for no limit."""
    if _page is not None:
        _page[LIMIT : LIMIT + 8] = struct.pack("d", seconds)


def limit_now() -> float:
    """Return the longest time in seconds that a rank may make no progress, set by :func:`limit`.

    The result is 0 if there is no such limit, or if this process has no guardian.
    """
    return 0.0 if _page is None else struct.unpack("d", _page[LIMIT : LIMIT + 8])[0]


def watched() -> bool:
    """Return True if a guardian ends this process when it makes no progress within a time limit."""
    return limit_now() > 0


def ending(how: int) -> None:
    """Tell the guardian that this process ends, or that it shall no longer be watched.

    Otherwise the guardian would report that the rank ended without a message.

    Args:
        how: one of the values that :mod:`distseg.comm.guardian` defines for the field ENDING.
    """
    if _page is not None:
        _page[ENDING] = how


def _move() -> None:
    global _moves
    _moves += 1
    _page[MOVES : MOVES + 8] = _moves.to_bytes(8, "little")


def _write(at: int, text: str) -> None:
    found = text.encode(errors="replace")[: TEXT - 1] + b"\0"
    _page[at : at + len(found)] = found
