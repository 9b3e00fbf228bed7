"""Watch a forward pass of a user's module, and undo its side effects.

The functions find the line of user code that runs, restore random generators, and switch off
activation checkpoints and ``torch.compile`` during a pass.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import distseg


def _folders(*files: str) -> tuple[str, ...]:
    """Return the folder of each file, with a final slash, both as named and with links resolved."""
    return tuple(
        dict.fromkeys(
            f"{path.parent}{os.sep}"
            for file in files
            for path in (Path(file), Path(file).resolve())
        )
    )


_TORCH_OR_OURS = _folders(torch.__file__, distseg.__file__)
_STANDARD = _folders(os.__file__)
_NUMPY = _folders(np.__file__)


def run(model: nn.Module, image: Tensor):
    """Return a module's result for an image.

    The frame of this function marks where user code begins (:func:`user_frame`).
    """
    return model(image)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code inside :func:`run`; None if no user code runs.

    Args:
        frame: the frame from which the search goes outwards.
    """
    while frame is not None and frame.f_code is not run.__code__:
        if is_users(frame.f_code):
            return frame
        frame = frame.f_back
    return None


def user_line() -> str:
    """Return the line of user code that runs inside :func:`run`, such as ``nets.py, line 12``.

    If no user code runs, return ``PyTorch's own code``.
    """
    frame = user_frame(sys._getframe(1))
    return (
        "PyTorch's own code" if frame is None else shown(frame.f_code.co_filename, frame.f_lineno)
    )


def shown(path: str, line: int) -> str:
    """Return the text by which messages name a line of a file, such as ``nets.py, line 12``."""
    return f"{path.rpartition('/')[2]}, line {line}"


def is_users(code: CodeType) -> bool:
    """Return True if code is from a file outside PyTorch and distseg, and not made by ``exec``."""
    return _is_users(code.co_filename)


@cache
def _is_users(path: str) -> bool:
    return not path.startswith(("<", *_TORCH_OR_OURS))


@cache
def is_library(path: str) -> bool:
    """Return True for a file of Python's standard library or of NumPy.

    Code without a file, whose path begins with ``<``, counts as such a file.
    """
    standard = path.startswith(_STANDARD) and not any(
        part in path for part in ("site-packages", "dist-packages")
    )
    return path.startswith(("<", *_NUMPY)) or standard


def last_line_of(run_pass: Callable[[], Any]) -> str | None:
    """Run a forward pass, and return the line of user code that ran last.

    This is usually the ``return`` of the module's ``forward``, such as ``nets.py, line 12``. Return
    None if the pass runs no user code. Errors of the pass are ignored.

    Args:
        run_pass: the function that runs the pass.
    """
    last: list[tuple[str, int]] = []

    def look(frame: FrameType, event: str, _: Any):
        if not is_users(frame.f_code) or is_library(frame.f_code.co_filename):
            return None
        if event == "return":
            last[:] = [(frame.f_code.co_filename, frame.f_lineno)]
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        with suppress(Exception):
            run_pass()
    finally:
        sys.settrace(before)
    return shown(*last[0]) if last else None


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global random generators of PyTorch (CPU), NumPy and Python on exit."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch (CPU), NumPy and Python inside the context; restore their state on exit."""
    with generators_kept():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


@contextmanager
def replaced(holder: object, names: Mapping[str, object]) -> Iterator[None]:
    """Replace attributes of an object inside the context, and restore them on exit.

    Args:
        holder: a Python module or a class.
        names: the new value of each attribute, by name. Names that ``holder`` does not have are
            ignored.
    """
    before = {name: getattr(holder, name) for name in names if hasattr(holder, name)}
    try:
        for name in before:
            setattr(holder, name, names[name])
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


class _NoCheckpoint:
    """Replacement for PyTorch's reentrant activation checkpoint that does not recompute.

    It calls the checkpointed function once and keeps the function's autograd graph.
    """

    @staticmethod
    def apply(function, preserve, *args):
        return function(*args)


def _unchecked(*args, **kwargs) -> Iterator[None]:
    """Replace the generator by which PyTorch's non-reentrant activation checkpoint recomputes.

    PyTorch runs its generator around the call of the checkpointed function. This one does nothing,
    so the backward pass recomputes nothing.
    """
    yield


@contextmanager
def checkpoints_ignored() -> Iterator[None]:
    """Make ``torch.utils.checkpoint`` keep the autograd graph, so that it recomputes nothing.

    A recomputation would run in the backward pass. By then distseg has removed what it sets up for
    the forward pass, such as its dropout masks, its own norms, and the position of the tile.
    """
    stands = {
        "CheckpointFunction": _NoCheckpoint,
        "_checkpoint_without_reentrant_generator": _unchecked,
    }
    with replaced(torch.utils.checkpoint, stands):
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules (``torch.compile``) as plain Python inside the context."""
    if "torch._dynamo" not in sys.modules:
        # Nothing has been compiled, and the import would take seconds.
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def scripted(model: nn.Module) -> str | None:
    """Return the name of the first TorchScript module in a model; None if it has none.

    Calls inside a TorchScript module cannot be seen, and the module cannot be copied.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return name or "the model"
    return None
