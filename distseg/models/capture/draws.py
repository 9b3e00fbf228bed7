"""Detect random numbers drawn from PyTorch, NumPy, Python or the system."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distseg.models.capture.state import GENERATORS, Slot
from distseg.models.passes import is_library, is_users, replaced, run, shown


class Draws(TorchDispatchMode):
    """``TorchDispatchMode`` that calls ``note(name, result)`` for each draw of random numbers.

    ``name`` is the name of the PyTorch operation that draws, such as ``bernoulli``, and ``result``
    is what it returns. The mode intercepts the operations themselves, whichever Python function
    calls them.
    """

    def __init__(self, note: Callable[[str, Any], None]):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        if torch.Tag.nondeterministic_seeded in function.tags and not _is_off(
            function, args, kwargs or {}
        ):
            self._note(function.overloadpacket.__name__.rstrip("_"), made)
        return made


def _is_off(function: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Return True if an operation's settings, such as dropout 0, make it draw no random numbers."""
    names = [argument.name for argument in function._schema.arguments]
    given = (
        {argument.name: argument.default_value for argument in function._schema.arguments}
        | dict(zip(names, args))
        | kwargs
    )
    return any(given.get(name) == 0 for name in ("dropout_p", "dropout", "training", "train"))


_GLOBAL = {
    "torch": torch.default_generator,
    "numpy.random": np.random.get_state.__self__,
    "random": random.getstate.__self__,
}


def global_generators() -> list[Slot]:
    """Return a :class:`Slot` for each global random generator of PyTorch, NumPy and Python.

    A slot names one value in a snapshot of a module's state.
    """
    return [
        Slot(f"the module {name}", {_GENERATOR: generator}, _GENERATOR)
        for name, generator in _GLOBAL.items()
    ]


_GENERATOR = "the global generator"


def is_generator(slot: Slot) -> bool:
    """Return True if the value that a slot of a snapshot holds is a random generator."""
    return isinstance(slot.value(), GENERATORS)


@contextmanager
def system_draws(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note(line)`` when user code in the context draws random numbers from the system.

    For example, a generator that is created without a seed does so. ``line`` is the line of user
    code.
    """
    thread, seed, draw = threading.get_ident(), random.Random.seed, os.urandom

    def watch() -> None:
        if threading.get_ident() == thread and (line := _line_of_draw(sys._getframe(2))):
            note(line)

    def urandom(size: int) -> bytes:
        watch()
        return draw(size)

    def seeded(self, a=None, version=2):
        if a is None:
            watch()
        return seed(self, a, version)

    with ExitStack() as stack:
        stack.enter_context(replaced(os, {"urandom": urandom}))
        stack.enter_context(replaced(random, {"_urandom": urandom}))
        stack.enter_context(replaced(random.Random, {"seed": seeded}))
        yield


def _line_of_draw(frame: FrameType | None) -> str | None:
    """Return the line of user code that takes random numbers, directly or through a library.

    Return None if PyTorch, distseg or an import takes them, or if no forward pass is running.

    Args:
        frame: the frame of the call that takes the numbers.
    """
    caller = None
    while frame is not None and frame.f_code is not run.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None
        if caller is None and not is_library(frame.f_code.co_filename):
            caller = frame
        frame = frame.f_back
    users = frame is not None and caller is not None and is_users(caller.f_code)
    return shown(caller.f_code.co_filename, caller.f_lineno) if users else None
