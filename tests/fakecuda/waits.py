"""Notes what makes the host wait for a GPU, by the line of distseg that asks for it, and who comes too early.

A step is quick on a GPU while the host runs ahead of it. It stops for: a number read from the device, a copy that is not
``non_blocking`` in either direction (PyTorch then waits for the stream), a size that depends on values (nonzero, indexing
by a mask), and waits by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distseg

from .order import Order, Race

ROOT = Path(distseg.__file__).parent
aten = torch.ops.aten
_NUMBERS = {
    torch.bool: False,
    torch.float64: 1.0,
    torch.float32: 1.0,
}  # what a fake tensor is said to hold
_FRESH = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class Waits(TorchDispatchMode):
    """Counts the waits of everything inside, and holds it to the order of the stream.

    It stands in for operations whose result's size depends on values, and for what CUDA's kernels assert.

    Attributes:
        found: "file:line kind" -> how often.
        order: of the stream.
    """

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()
        self.order = Order()
        self._watching = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if function is aten._local_scalar_dense.default:
            return self._number(args[0])
        if function is aten._pin_memory.default:
            self.order.host([args[0]], [])
            return self._pinned(args[0].clone())
        if function is aten.native_batch_norm_backward.default and args[0].is_cuda:
            assert args[5] is not None and args[6] is not None, (
                "save_mean and save_invstd should always be defined (Normalization.cu)"
            )
        if function is aten.batch_norm_update_stats.default and args[0].is_cuda:
            return tuple(
                args[0].new_zeros(
                    args[0].shape[1], dtype=torch.promote_types(args[0].dtype, torch.float32)
                )
                for _ in range(2)
            )
        if function is aten._fused_sgd_.default:  # which knows no fake tensors
            return None
        if function is aten.index.Tensor and any(_is_mask(i) for i in args[1]):
            result = self._indexed(*args)
        elif function is aten.nonzero.default:
            self.note("nonzero", args[0])
            result = args[0].new_zeros(args[0].numel(), args[0].dim(), dtype=torch.int64)
        else:
            result = function(*args, **kwargs)
        if kwargs.get("pin_memory"):
            return self._pinned(result)
        if function in (aten._to_copy.default, aten.copy_.default):
            self._copied(function, args, kwargs, result)
        elif (
            not function.is_view and function.namespace != "prim"
        ):  # which asks for a tensor's device
            self._ran(function, inputs, result)
        return result

    def _number(self, x: Tensor):
        self.note("number read", x)
        if not x.is_cuda:
            self.order.host([x], [])
        return _NUMBERS.get(x.dtype, 2)

    def _pinned(self, x: Tensor) -> Tensor:
        self.order.of(x).pinned = True
        return x

    def _indexed(self, x: Tensor, indices):
        """As if a mask were true everywhere."""
        self.note("indexed by a mask", x, *(i for i in indices if i is not None))
        (mask,) = indices
        return x.flatten(0, mask.dim() - 1).clone()

    def _copied(self, function, args, kwargs, result: Tensor) -> None:
        source = args[0] if function is aten._to_copy.default else args[1]
        if source.device.type == result.device.type:
            return self._ran(function, [source], result)
        host = result if source.is_cuda else source
        if kwargs.get("non_blocking", len(args) > 2 and args[2]):
            if source.is_cuda and not self.order.of(host).pinned:
                raise Race(
                    "a copy to the host that does not wait goes to memory that is not pinned"
                )
            return self.order.queue([source], [result])
        if not source.is_cuda:
            self.order.host([source], [])
        self.order.queue([source], [result])
        self.note(f"copied to the {'host' if source.is_cuda else 'device'}", source, result)

    def _ran(self, function, inputs: list[Tensor], result) -> None:
        outputs = _tensors(result)
        if not any(x.is_cuda for x in [*inputs, *outputs]):
            return self.order.host(inputs, outputs)
        if function in _FRESH:
            return self.order.fresh(outputs[0])

        def here(xs):
            return [
                x for x in xs if x.is_cuda
            ]  # a number on the host goes with the kernel's arguments

        self.order.queue(here(inputs), here(outputs))

    def note(self, what: str, *of: Tensor) -> None:
        """The host waits for the stream; nothing, if ``of`` are tensors of the host."""
        if of and not any(x.is_cuda for x in of):
            return
        self.order.settle()
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


def _tensors(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


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
    """In the place of torch.cuda.Stream."""

    def __init__(self, waits: Waits):
        self.waits = waits

    def synchronize(self) -> None:
        self.waits.note("stream")


class Event:
    """In the place of torch.cuda.Event."""

    def __init__(self, waits: Waits):
        self.waits, self.at = waits, 0

    def record(self, stream=None) -> None:
        self.at = self.waits.order.clock

    def query(self) -> bool:
        return self.at <= self.waits.order.done

    def synchronize(self) -> None:
        if not self.query():
            if self.waits._watching:
                self.waits.found[f"{_line()} event"] += 1
            self.waits.order.settle(self.at)
