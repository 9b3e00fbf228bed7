"""Tensors from rank to rank, without waiting: sends that run on, receives that are posted ahead.

A message is a tensor's memory as it lies, so both sides agree on its form (shape, type, memory format) once and not per
message. CUDA tensors go straight to an MPI that knows device memory, else through pinned host memory. (The CUDA paths
have not been run on a GPU yet.)
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from shutil import which

import torch
from torch import Tensor

from distseg.comm.collective import When, wait
from distseg.memory_format import channels_last


@dataclass(frozen=True)
class Form:
    """All that a receiver must know to make room for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, x: Tensor) -> "Form":
        return cls(tuple(x.shape), x.dtype, not x.is_contiguous() and x.is_contiguous(memory_format=channels_last(x.dim())))

    def empty(self, device, pinned: bool = False) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format, pin_memory=pinned)

    def fit(self, x: Tensor) -> Tensor:
        """``x`` dense in this memory format; copied only if it is not."""
        return x.contiguous(memory_format=self.memory_format)

    @property
    def memory_format(self) -> torch.memory_format:
        return channels_last(len(self.shape)) if self.channels_last else torch.contiguous_format

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}{' channels_last' if self.channels_last else ''}"


class Receipt:
    """A receive under way."""

    def __init__(self, host: Tensor, device, request):
        self.host, self.device, self.request = host, device, request

    def tensor(self) -> Tensor:
        """The tensor, once it is there."""
        wait(self.request)
        return self.host.to(self.device, non_blocking=True)


class Transport:
    """Point to point over a communicator.

    Args:
        device: where received tensors are wanted.
    """

    def __init__(self, comm, device=torch.device("cpu")):
        self.comm, self.device = comm, torch.device(device)
        self.direct = self.device.type == "cuda" and cuda_aware()
        self._sending: list[tuple[object, Tensor]] = []  # a buffer lives until its request is complete

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Start to send a dense tensor; it must not change before :meth:`flush`."""
        x = x.detach()
        if x.is_cuda:
            if not self.direct:
                x = Form.of(x).empty("cpu", pinned=True).copy_(x, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        self._sending.append((self.comm.Isend(message(x), to, tag), x))

    def receive(self, form: Form, source: int, tag: int) -> Receipt:
        """Post a receive."""
        staged = self.device.type == "cuda" and not self.direct
        buffer = form.empty("cpu", pinned=True) if staged else form.empty(self.device)
        return Receipt(buffer, self.device, self.comm.Irecv(message(buffer), source, tag))

    def tell(self, what, to: int, tag: int) -> None:
        """Start to send a small Python object, such as forms."""
        self._sending.append((self.comm.isend(what, to, tag), what))

    def ask(self, source: int, tag: int):
        """Wait for the object that the other side tells."""
        request = self.comm.irecv(1 << 16, source, tag)
        found: list = []

        def arrived() -> bool:  # mpi4py's irecv hands the object to whoever sees it complete
            done, what = request.test()
            if done:
                found.append(what)
            return done

        wait(When(arrived))
        return found[0]

    def progress(self) -> None:
        """Let MPI move what is under way, and forget what has arrived."""
        self._sending = [(request, x) for request, x in self._sending if not request.Test()]

    def flush(self, most: int = 0) -> None:
        """Wait until everything is sent, or all but the latest ``most`` messages."""
        while len(self._sending) > most:
            wait(self._sending.pop(0)[0])


def message(x: Tensor):
    """The memory of a dense tensor as bytes, in the order in which it lies."""
    flat = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    return flat if flat.is_cuda else flat.numpy()


@lru_cache
def cuda_aware() -> bool:
    """Whether MPI takes pointers to device memory: as MPICH's, MVAPICH's and our own variable say, else as Open MPI was built."""
    for name in ("DISTSEG_CUDA_AWARE", "MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA"):
        if name in os.environ:
            return os.environ[name] == "1"
    if which("ompi_info") is None:
        return False
    lines = subprocess.run(["ompi_info", "--parsable", "--all"], capture_output=True, text=True).stdout
    return "mpi_built_with_cuda_support:value:true" in lines
