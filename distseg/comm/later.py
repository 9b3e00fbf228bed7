"""Work that nobody waits for, put off until this rank would wait for another: the gradients of weights.

Whoever waits does it, oldest first (:func:`distseg.comm.collective.wait`). It holds its tensors in memory, so there is a time by
which it is done: when the next piece is put off, or, where a schedule has an action for it, that action (:func:`until`, :func:`finish`).
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext
from typing import Callable, ContextManager, NamedTuple

import torch


class _Piece(NamedTuple):
    action: str | None
    work: Callable[[], None]


_pieces: deque[_Piece] | None = None  # None: nothing is put off
_action: str | None = None
_span: Callable[[str, str], ContextManager] = lambda kind, name: nullcontext()


@contextmanager
def putting_off():
    """Inside, :func:`later` puts work off; all of it is done in the end."""
    global _pieces
    _pieces = deque()
    try:
        yield
        while do_next():
            pass
    finally:
        _pieces = None


@contextmanager
def until(action: str | None):
    """What is put off inside may wait for :func:`finish` of this action; with None for no longer than until the next piece."""
    global _action
    before, _action = _action, action
    try:
        yield
    finally:
        _action = before


def later(work: Callable[[], None]) -> bool:
    """Have ``work`` done while this rank waits for another; False where nothing is put off."""
    if _pieces is None:
        return False
    _pieces.append(_Piece(_action, work))
    while _action is None and len(_pieces) > 1:
        do_next()
    return True


def do_next() -> bool:
    """Do the oldest work that is put off; False if there is none."""
    if not _pieces:
        return False
    piece = _pieces.popleft()
    with _span("weight", piece.action or "put off"), torch.no_grad():
        piece.work()
    return True


def finish(action: str) -> None:
    """Do what may wait until this action and was not done before."""
    while piece := next((piece for piece in _pieces or () if piece.action == action), None):
        _pieces.remove(piece)
        with torch.no_grad():
            piece.work()


def watch(span: Callable[[str, str], ContextManager]) -> None:
    """From now on, work that fills waits is a span of the kind ``weight``."""
    global _span
    _span = span
