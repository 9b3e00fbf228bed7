"""Notes what makes the host wait for a GPU, by the line of distseg that asks for it.

A step is quick on a GPU while the host runs ahead of it. It stops for: a number read from the device, a copy that is not
``non_blocking`` in either direction (PyTorch then waits for the stream), a size that depends on values (nonzero, indexing
by a mask), and waits by name (:func:`note`).
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import distseg

ROOT = Path(distseg.__file__).parent
aten = torch.ops.aten
_NUMBERS = {torch.bool: False, torch.float64: 1.0, torch.float32: 1.0}  # what a fake tensor is said to hold


class Waits(TorchDispatchMode):
    """Counts the waits of everything inside; stands in for operations whose result's size depends on values.

    Attributes:
        found: "file:line kind" -> how often.
    """

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()
        self._watching = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default:
            if args[0].is_cuda:
                self.note("number read")
            return _NUMBERS.get(args[0].dtype, 2)
        if function is aten.index.Tensor and any(_is_mask(i) for i in args[1]):
            return self._indexed(*args)
        if function is aten.nonzero.default:
            self.note("nonzero")
            return args[0].new_zeros(args[0].numel(), args[0].dim(), dtype=torch.int64)
        result = function(*args, **kwargs)
        if function in (aten._to_copy.default, aten.copy_.default):
            source = args[0] if function is aten._to_copy.default else args[1]
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if source.device.type != result.device.type and not non_blocking:
                self.note(f"copied to the {'host' if source.is_cuda else 'device'}")
        return result

    def _indexed(self, x: Tensor, indices):
        """As if a mask were true everywhere."""
        if x.is_cuda or any(i is not None and i.is_cuda for i in indices):
            self.note("indexed by a mask")
        (mask,) = indices
        return x.flatten(0, mask.dim() - 1).clone()

    def note(self, what: str) -> None:
        if self._watching:
            self.found[f"{_line()} {what}"] += 1

    @contextmanager
    def ignored(self):
        """Inside, operations are none of the step's."""
        self._watching = False
        try:
            yield
        finally:
            self._watching = True


def _is_mask(index) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _line() -> str:
    """The line of distseg that is being executed."""
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents:
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Stream:
    """In the place of torch.cuda.Stream and Event: notes who waits for it."""

    def __init__(self, waits: Waits):
        self.waits = waits

    def synchronize(self) -> None:
        self.waits.note("stream")

    def record(self, *_) -> None:
        pass

    def query(self) -> bool:
        return True
