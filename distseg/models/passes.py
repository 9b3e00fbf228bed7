"""One forward pass of a user's module, as those run it who watch it: where in the user's code it is, and nothing that outlives it."""

from __future__ import annotations

import os
import random
import sys
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, Iterator, Mapping

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import distseg


def _folders(*files: str) -> tuple[str, ...]:
    """Return the folders of some files, as they are named and as they are where a name is a link."""
    return tuple(
        dict.fromkeys(
            f"{path.parent}{os.sep}"
            for file in files
            for path in (Path(file), Path(file).resolve())
        )
    )


_TORCH_OR_OURS, _STANDARD, _NUMPY = (
    _folders(torch.__file__, distseg.__file__),
    _folders(os.__file__),
    _folders(np.__file__),
)


def run(model: nn.Module, image: Tensor):
    """Return what a module makes of an image; the frame of this function is where the user's code begins."""
    return model(image)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame inside :func:`run` whose code is neither PyTorch's nor ours; None if there is none."""
    while frame is not None and frame.f_code is not run.__code__:
        if is_users(frame.f_code):
            return frame
        frame = frame.f_back
    return None


def user_line() -> str:
    """Return the line of the user's code that is being run inside :func:`run`, as ``nets.py, line 12``."""
    frame = user_frame(sys._getframe(1))
    return (
        "PyTorch's own code" if frame is None else shown(frame.f_code.co_filename, frame.f_lineno)
    )


def shown(path: str, line: int) -> str:
    """Return a place in a file as messages have it."""
    return f"{path.rpartition('/')[2]}, line {line}"


def is_users(code: CodeType) -> bool:
    """Return True if code is neither PyTorch's, nor ours, nor made while the program runs."""
    return _is_users(code.co_filename)


@cache
def _is_users(path: str) -> bool:
    return not path.startswith(("<", *_TORCH_OR_OURS))


@cache
def is_library(path: str) -> bool:
    """Return True for a file of Python's own library or of NumPy."""
    standard = path.startswith(_STANDARD) and not any(
        part in path for part in ("site-packages", "dist-packages")
    )
    return path.startswith(("<", *_NUMPY)) or standard


def last_line_of(passed: Callable[[], Any]) -> str | None:
    """Return the last line of the user's code that a forward pass comes to, that of its outermost ``return``; None if it has none."""
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
            passed()
    finally:
        sys.settrace(before)
    return shown(*last[0]) if last else None


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give the global random generators of PyTorch (CPU), NumPy and Python back the state that they had before."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have PyTorch (CPU), NumPy and Python draw the random numbers of a seed inside, and go on behind as they would have."""
    with generators_kept():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


@contextmanager
def replaced(holder: object, names: Mapping[str, object]) -> Iterator[None]:
    """Let attributes of a module or class be others inside; names that it does not have are left out."""
    before = {name: getattr(holder, name) for name in names if hasattr(holder, name)}
    try:
        for name in before:
            setattr(holder, name, names[name])
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


class _NoCheckpoint:
    """Stand-in for PyTorch's reentrant activation checkpoint: call the function, keep its graph."""

    @staticmethod
    def apply(function, preserve, *args):
        return function(*args)


def _unchecked(*args, **kwargs) -> Iterator[None]:
    """Stand-in for PyTorch's other activation checkpoint, which is a generator around the function's call."""
    yield


@contextmanager
def checkpoints_ignored() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` inside call its function and keep the graph, instead of computing it again in the backward pass.

    A second computation would happen where masks of dropouts, formulas of norms and the place of an image are no longer at hand.
    """
    stands = {
        "CheckpointFunction": _NoCheckpoint,
        "_checkpoint_without_reentrant_generator": _unchecked,
    }
    with replaced(torch.utils.checkpoint, stands):
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Let what ``torch.compile`` made inside be run by Python as its code says, so that its calls are seen."""
    if (
        "torch._dynamo" not in sys.modules
    ):  # nothing has been compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def scripted(model: nn.Module) -> str | None:
    """Return the name of a part of a model that is TorchScript, whose calls nobody sees and which can't be copied as modules are; None if there is none."""
    return next(
        (
            name or "the model"
            for name, module in model.named_modules()
            if isinstance(module, torch.jit.ScriptModule)
        ),
        None,
    )
