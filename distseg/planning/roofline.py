"""Estimate the seconds of PyTorch code by the roofline model (Williams et al. 2009).

A device is two numbers, arithmetic throughput and memory bandwidth. A kernel takes the longer of
its arithmetic and its memory traffic. A device may also have a table of rates
(:mod:`distseg.planning.rates`), by kind and shape of a kernel. Work is counted for each kernel that
PyTorch runs on the meta device, where a tensor has a shape but no memory. So counting takes about a
second, even for a network of a billion weights and a window of any size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from distseg.planning.rates import ARITHMETIC, Rates, Shape


@dataclass(frozen=True)
class Device:
    """Sustained throughput of a device.

    Attributes:
        name: the device's name.
        flops_per_second: FLOP/s of convolutions.
        bytes_per_second: bytes/s of copies, bytes read and bytes written together.
        rates: rates by kind, number type and shape of a kernel; empty if not measured.
        forward: factor on the seconds of forward passes.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    rates: Rates = Rates()
    forward: float = 1.0

    def seconds(self, work: Work, precision: str = "fp32") -> float:
        """Return the seconds that some work takes on this device.

        The result is the time of the arithmetic or of the memory traffic, whichever is longer. If
        the device has a table of rates, it is the sum of the times of all kernels instead.

        Args:
            work: the work.
            precision: the number type; without a table of rates it makes no difference.
        """
        if not self.rates:
            return max(work.flops / self.flops_per_second, work.bytes / self.bytes_per_second)
        return sum(shape.work / self._rate(shape, precision)[0] for shape in work.shapes)

    def outside(self, work: Work, precision: str = "fp32") -> int:
        """Return the FLOPs of kernels whose shapes lie outside the range of measured shapes.

        The result is 0 if the device has no table of rates.

        Args:
            work: the work.
            precision: the number type.
        """
        if not self.rates:
            return 0
        return sum(
            shape.work
            for shape in work.shapes
            if shape.kind in ARITHMETIC and not self._rate(shape, precision)[1]
        )

    def _rate(self, shape: Shape, precision: str) -> tuple[float, bool]:
        """Return a kernel's rate, and True if its shape is in the range of measured shapes."""
        if found := self.rates.rate(shape, precision):
            return found
        single = self.flops_per_second if shape.kind in ARITHMETIC else self.bytes_per_second
        return single, False


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic of some kernels.

    Attributes:
        flops: number of floating-point operations; a multiply-add is two.
        bytes: number of bytes moved.
        shapes: kind and shape of each kernel.
    """

    flops: int
    bytes: int
    shapes: tuple[Shape, ...] = ()


# The data sheet gives 15.7 TFLOP/s (float32) and 900 GB/s; 70 % and 80 % of them are sustained.
V100 = Device("v100", 0.7 * 15.7e12, 0.8 * 900e9)

# One core in float32, roughly (benchmarks/performance.md).
CORE = Device("a CPU core", 90e9, 10e9)


def modelled_device(kind: str) -> Device:
    """Return the device for which costs are modelled to balance stages; ``kind`` is cpu or cuda.

    The rates of this device are constants and not measured, so that ranks on different machines
    find the same stages.
    """
    return CORE if kind == "cpu" else V100


def this_cpu() -> Device:
    """Return the measured throughput of this machine's CPU, which takes half a second.

    A convolution and a copy run with PyTorch's current number of threads.
    """
    x, w = torch.randn(1, 64, 128, 128), torch.randn(64, 64, 3, 3)
    a, b = torch.ones(2**24), torch.empty(2**24)
    convolution = fastest(lambda: F.conv2d(x, w, padding=1), 3)
    copy = fastest(lambda: b.copy_(a), 3)
    return Device("cpu", 2 * w.numel() * 128 * 128 / convolution, 2 * a.nbytes / copy)


DEVICES: dict[str, Callable[[], Device]] = {"v100": lambda: V100, "cpu": this_cpu}


def fastest(call: Callable[[], object], repeats: int, device=torch.device("cpu")) -> float:
    """Return the seconds of the fastest of ``repeats`` calls, after one call that warms up.

    The seconds include the work that a call queues on ``device``.
    """
    return min([seconds_of(call, device) for _ in range(repeats + 1)][1:])


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including the work that it queues on ``device``."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


_Result = TypeVar("_Result")


def counted(call: Callable[[], _Result]) -> tuple[_Result, Work]:
    """Return the result of ``call`` and the work of the kernels that it runs."""
    with _Kernels() as kernels:
        result = call()
    shapes = tuple(shape for shape, _ in kernels.found)
    return result, Work(kernels.flops, kernels.bytes, shapes)


def kernel_seconds(
    call: Callable[[], object], repeats: int, device: torch.device
) -> list[tuple[Shape, float]]:
    """Return the kind and shape of each kernel that ``call`` runs, and its seconds.

    Args:
        call: the function, which has run before and always runs the same kernels.
        repeats: how often it runs; the fastest run of each kernel counts.
        device: the device that computes.
    """
    runs = []
    for _ in range(repeats):
        with _Kernels(device) as kernels:
            call()
        runs.append(kernels.found)
    return [(same[0][0], min(seconds for _, seconds in same)) for same in zip(*runs)]


class _Kernels(TorchDispatchMode):
    """Dispatch mode that lists the kernels that run, and adds up their FLOPs and bytes.

    Views and empty tensors count 0 bytes. A norm reads its input twice, the first time for the
    statistics.

    Args:
        device: the device that computes. On a GPU, the mode waits for each kernel to time it.

    Attributes:
        flops: the FLOPs of all kernels so far.
        bytes: the bytes of all tensors that kernels have read and written so far.
        found: kind and shape of each kernel so far, with its seconds.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        super().__init__()
        self.flops = self.bytes = 0
        self.found: list[tuple[Shape, float]] = []
        self._device = device

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        results, kwargs = [], kwargs or {}
        seconds = seconds_of(lambda: results.append(kernel(*args, **kwargs)), self._device)
        result, flops = results[0], 0
        if formula := flop_registry.get(kernel.overloadpacket):
            flops = formula(*args, **kwargs, out_val=result)
            self.flops += flops
        if not kernel.is_view and "empty" not in kernel.__name__:
            read = _bytes((args, kwargs))
            moved = (2 if "norm" in kernel.__name__ else 1) * read + _bytes(result)
            self.bytes += moved
            shapes = _shapes(kernel.__name__, args, result, flops, moved)
            self.found += [(shape, seconds) for shape in shapes]
        return result


def _shapes(name: str, args: tuple, result, flops: int, moved: int) -> Iterator[Shape]:
    """Yield the kind of a kernel and the sizes on which its time depends.

    Nothing is yielded for a kernel that neither moves bytes nor computes, such as a view.

    Args:
        name: the name of the kernel.
        args: its arguments without names.
        result: its result.
        flops: its FLOPs; 0 if it is not known to compute any.
        moved: the bytes that it reads and writes.
    """
    if "convolution" in name:
        backward = "backward" in name
        out = args[0] if backward else result
        transposed = args[7] if backward else args[6]
        kind = "transposed" if transposed else "convolution"
        yield Shape(kind, out.shape[1], out.numel() // max(1, out.shape[1]), flops)
        return
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if moved and tensors:
        out = max(tensors, key=torch.Tensor.numel)
        channels = out.shape[1] if out.dim() > 1 else 1
        yield Shape(_kind(name), channels, out.numel() // max(1, channels), moved)


def _kind(name: str) -> str:
    """Return the kind of the kernel ``name``, which is no convolution."""
    if "pool" in name or "upsample" in name:
        return "pooling" if "max_pool" in name and "backward" not in name else "resampling"
    if "norm" in name:
        return "norm"
    return "copy" if any(word in name for word in ("copy", "cat", "clone")) else "elementwise"


def _bytes(nested) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor))
