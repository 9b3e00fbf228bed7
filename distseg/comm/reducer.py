"""Gradients of all replicas summed once per optimizer step, by Horovod or by MPI alone.

Where there are several replicas gradients live in a few flat buckets, of which each parameter's ``grad`` is a view: what the network reduces is
contiguous, nothing is copied, and the global norm is one reduction. Every rank computes the gradient of *its* part of
the loss, which is divided by global counts already, so the reduction is a plain sum and the result the serial gradient.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections import deque
from itertools import groupby
from typing import Callable

import torch
from torch import Tensor, nn

from distseg.comm.memory_format import like_layout
from distseg.comm.staging import Buffers, settled
from distseg.comm.waits import waits_of

_SETS: dict[tuple[int, ...], object] = {}  # Horovod's process sets of this process, by their ranks
_STALL = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
# Milliseconds between the rounds in which Horovod's thread asks all ranks for work. There is work
# once a step, and on
# a CPU every round takes the cores from the computation: at 0.1 ms a step of the demo takes twice
# as long (docs/performance.md).
_CYCLE = {"cpu": "20", "cuda": "1"}
_BUCKET = 1 << 26  # bytes; Horovod's own fusion buffer has 128 MiB


class Gradients:
    """The gradients of a list of parameters.

    Args:
        flat: whether others add to them, and so they lie in buckets; else autograd's own tensors are left as they are.

    Attributes:
        buckets: one or more flat tensors per dtype and device, in the parameters' order; none where they are not ``flat``.
    """

    def __init__(self, parameters: list[nn.Parameter], flat: bool = True):
        self.parameters = parameters
        self.buckets: list[Tensor] = []
        group: list[nn.Parameter] = []
        for p in parameters if flat else ():
            if group and not _same_bucket(group, p):
                self._close(group)
                group = []
            group.append(p)
        if group:
            self._close(group)

    def _close(self, group: list[nn.Parameter]) -> None:
        first = group[0]
        bucket = torch.zeros(sum(p.numel() for p in group), dtype=first.dtype, device=first.device)
        offset = 0
        for p in group:
            # With the parameter's own strides: autograd then adds without a change of layout
            # (channels_last weights).
            p.grad = bucket.as_strided(p.size(), p.stride(), offset)
            offset += p.numel()
        self.buckets.append(bucket)

    def zero(self) -> None:
        """Begin a step."""
        for bucket in self.buckets:
            bucket.zero_()
        for p in self.parameters if not self.buckets else ():
            p.grad = None

    def settle(self) -> None:
        """Complete the gradients after the backward passes, for whoever reads them next.

        A parameter that no loss depends on gets a gradient of zeros. A gradient in another memory
        layout than its parameter's is copied into that: fused optimizers look at no strides.
        """
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else like_layout(p.grad, p)

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that hold all of them."""
        return self.buckets or [p.grad for p in self.parameters]

    def norm(self) -> Tensor:
        """The 2-norm of all of them."""
        parts = [torch.linalg.vector_norm(part) for part in self.parts]
        if not parts:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]))

    def clip(self, largest: float, norm: float) -> None:
        """Scale as ``torch.nn.utils.clip_grad_norm_`` does, so that the global norm, ``norm`` now, is at most ``largest``."""
        factor = largest / (norm + 1e-6)
        if factor < 1:
            for part in self.parts:
                part.mul_(factor)


def _same_bucket(group: list[nn.Parameter], p: nn.Parameter) -> bool:
    first = group[0]
    size = sum(q.numel() for q in group) * first.element_size()
    return (p.dtype, p.device) == (
        first.dtype,
        first.device,
    ) and size + p.numel() * p.element_size() <= _BUCKET


class LoneReducer:
    """One replica: its gradient is the sum."""

    name = "none"

    def sum(self, buckets: list[Tensor]) -> None:
        pass


class MpiReducer:
    """Flat buckets over mpi4py: works wherever MPI does. Those of a GPU go through the host's memory, two at a time."""

    name = "mpi"

    def __init__(self, comm, fp16: bool = False):
        self.comm, self.fp16 = comm, fp16
        self._buffers: dict[torch.device, Buffers] = {}

    def sum(self, buckets: list[Tensor]) -> None:
        under_way: deque[Callable[[], None]] = deque()
        for bucket in buckets:
            under_way.append(self._start(bucket))
            # Of one device's buckets one is copied while another travels.
            if not bucket.is_cuda or len(under_way) > 1:
                under_way.popleft()()
        while under_way:
            under_way.popleft()()

    def _start(self, bucket: Tensor) -> Callable[[], None]:
        """Begin to sum a bucket; what is returned ends it."""
        from mpi4py import MPI

        # MPI knows no 16-bit floats: they are summed in float32, which also keeps what fp16
        # compression saved of accuracy.
        wire = bucket.to(torch.float16).float() if self.fp16 else _wire(bucket)
        host, give = self._on_the_host(wire) if wire.is_cuda else (wire, None)
        request = self.comm.Iallreduce(MPI.IN_PLACE, host.numpy())

        def end() -> None:
            waits_of(self.comm).wait(request)
            if host is not bucket:
                bucket.copy_(host.to(bucket.device, non_blocking=True))
            if give:
                give()

        return end

    def _on_the_host(self, wire: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A copy for MPI, and what gives its memory back (:mod:`distseg.comm.staging`)."""
        buffers = self._buffers.setdefault(wire.device, Buffers(wire.device, staged=True))
        buffer = buffers.take(wire.numel() * wire.element_size())
        host = buffer.view(wire.dtype).copy_(wire, non_blocking=True)
        settled(wire.device)
        return host, lambda: buffers.give(buffer, read_by_stream=True)


class HorovodReducer:
    """Horovod's grouped all-reduce over the process set of a stage's replicas."""

    name = "horovod"

    def __init__(self, process_set, fp16: bool = False):
        self.process_set, self.fp16 = process_set, fp16

    def sum(self, buckets: list[Tensor]) -> None:
        import horovod.torch as hvd

        # none: a pipeline stage may have no weights.
        wires = [b.to(torch.float16) if self.fp16 else _wire(b) for b in buckets]
        # One operation is of one device.
        for number, (_, group) in enumerate(groupby(wires, key=lambda wire: wire.device)):
            hvd.grouped_allreduce_(
                list(group), op=hvd.Sum, name=f"gradients{number}", process_set=self.process_set
            )
        for bucket, wire in zip(buckets, wires):
            if wire is not bucket:
                bucket.copy_(wire)


def _wire(bucket: Tensor) -> Tensor:
    """What travels: bfloat16 is widened, as neither Horovod nor MPI adds it."""
    return bucket.float() if bucket.dtype in (torch.bfloat16, torch.float16) else bucket


def horovod_works() -> bool:
    """Whether Horovod is installed with its PyTorch extension."""
    try:
        return importlib.util.find_spec("horovod.torch") is not None
    except ImportError:
        return False


def make_reducer(kind: str, mesh, fp16: bool = False, device: str = "cpu"):
    """The reducer of ``mesh.reducer`` for this rank's replicas (collective).

    Raises:
        ValueError: Horovod asked for by name, but on some rank it is not installed, or not built for ``device``.
    """
    lacks = (
        None
        if kind == "mpi" or (kind == "auto" and mesh.replicas.size == 1)
        else _first(mesh.world.allgather(horovod_lacks(device)))
    )
    if kind == "horovod" and lacks:
        raise ValueError(
            f"mesh.reducer is horovod, but {lacks}: set it to mpi or auto, or install Horovod "
            "(docs/install.md)"
        )
    if mesh.replicas.size == 1:
        return LoneReducer()
    if kind == "mpi" or lacks:
        if kind == "auto" and mesh.world.rank == 0:
            print(f"distseg: {lacks}, gradients are summed by MPI (mesh.reducer: mpi)", flush=True)
        return MpiReducer(mesh.replicas, fp16)
    return HorovodReducer(_process_set(mesh, device), fp16)


def horovod_lacks(device: str) -> str | None:
    """What keeps Horovod from summing gradients on such a device, if anything."""
    if not horovod_works():
        return "Horovod with PyTorch is not installed"
    if device != "cuda":
        return None
    import horovod.torch as hvd
    from mpi4py import MPI  # noqa: F401  before Horovod (see _process_set)

    # Without CUDA it has no events to wait for: it would send a GPU's gradients before the kernels
    # that compute them are done.
    if hvd.nccl_built() or hvd.cuda_built():
        return None
    return "Horovod is built without NCCL and CUDA and can not sum gradients on GPUs"


def _first(texts: list[str | None]) -> str | None:
    return next(filter(None, texts), None)


def _threads() -> set[int]:
    """The threads of this process (Linux; elsewhere none)."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def _give_way(threads: set[int]) -> None:
    """Let threads run only where nobody else wants the core: between steps Horovod's waits for the other ranks' all the time."""
    for thread in threads:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
        except OSError:
            pass  # it has ended, or the system does not allow it


def _process_set(mesh, device: str):
    """Start Horovod over the mesh, with a process set a stage; returns this rank's."""
    import horovod.torch as hvd
    from mpi4py import MPI  # noqa: F401  before Horovod, which otherwise finalizes MPI itself and aborts

    # A rank that is missing is named, and ends the job as in our own waits, instead of holding it
    # until its time limit.
    limit = math.ceil(mesh.waits.timeout)
    # It ends no job sooner than it checks.
    stall = dict(zip(_STALL, (str(min(60, limit or 60)), str(limit))))
    for name, value in {
        **stall,
        "HOROVOD_CYCLE_TIME": _CYCLE[device],
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    }.items():
        os.environ.setdefault(name, value)
    if not hvd.is_initialized():
        before = _threads()
        hvd.init()
        if device == "cpu":
            _give_way(_threads() - before)
    if mesh.shape.stages == 1:
        return hvd.global_process_set
    for ranks in map(tuple, mesh.shape.stage_ranks()):
        if ranks not in _SETS:
            _SETS[ranks] = hvd.add_process_set(ranks)
    return _SETS[tuple(mesh.shape.stage_ranks()[mesh.stage])]
