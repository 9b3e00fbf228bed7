"""Estimate the seconds of PyTorch code by the roofline model (Williams et al. 2009).

A device is two numbers, arithmetic throughput and memory bandwidth. A kernel takes the longer of
its arithmetic and its memory traffic. Work is counted for each kernel that PyTorch runs on the meta
device, where a tensor has a shape but no memory. So counting takes about a second, even
for a network of a billion weights and a window of any size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Device:
    """Sustained throughput of a device.

    Attributes:
        name: the device's name.
        flops_per_second: FLOP/s of convolutions.
        bytes_per_second: bytes/s of copies, bytes read and bytes written together.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, work: Work) -> float:
        """Return the seconds that some work takes on this device.

        They are the seconds of its arithmetic or of its memory traffic, whichever take longer.
        """
        return max(work.flops / self.flops_per_second, work.bytes / self.bytes_per_second)


@dataclass(frozen=True)
class Work:
    """Number of floating-point operations (a multiply-add is two) and of bytes moved."""

    flops: int
    bytes: int


# The data sheet gives 15.7 TFLOP/s (float32) and 900 GB/s; 70 % and 80 % of them are sustained.
V100 = Device("v100", 0.7 * 15.7e12, 0.8 * 900e9)

# One core in float32, roughly (benchmarks/performance.md).
CORE = Device("a CPU core", 90e9, 10e9)


def modelled_device(kind: str) -> Device:
    """Return the device by whose costs stages are balanced; ``kind`` is cpu or cuda.

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


def counted(call: Callable) -> tuple[object, Work]:
    """Return the result of ``call`` and the work of the kernels that it runs."""
    with _Traffic() as traffic, FlopCounterMode(display=False) as arithmetic:
        result = call()
    return result, Work(arithmetic.get_total_flops(), traffic.bytes)


class _Traffic(TorchDispatchMode):
    """Dispatch mode that adds up the bytes of all tensors that kernels read and write.

    Views and empty tensors count 0 bytes. A norm reads its input twice, the first time for the
    statistics.

    Attributes:
        bytes: the sum so far.
    """

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        result = kernel(*args, **(kwargs or {}))
        if not kernel.is_view and "empty" not in kernel.__name__:
            read = _bytes((args, kwargs))
            self.bytes += (2 if "norm" in kernel.__name__ else 1) * read + _bytes(result)
        return result


def _bytes(nested) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor))
