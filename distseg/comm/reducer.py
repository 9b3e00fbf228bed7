"""Sum of the gradients of all replicas, once per optimizer step.

*Replicas* are the ranks that hold the same weights. Horovod adds their gradients, or the transport
that carries all other messages (MPI or torch.distributed).

With several replicas the gradients live in a few flat buckets, and each parameter's ``grad`` is a
view of a bucket. So messages are contiguous, nothing is copied, and the global norm is one
reduction.

Every rank computes the gradient of its part of the loss, which is already divided by global counts.
So the reduction is a plain sum, and the result is the gradient of the serial program.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections import deque
from collections.abc import Callable
from itertools import groupby, repeat

import torch
from torch import Tensor, nn

from distseg.comm.communicator import as_communicator
from distseg.comm.memory_format import like_layout
from distseg.comm.staging import Buffers, wait_for_device
from distseg.comm.waits import Waits, waits_of

_SETS: dict[tuple[int, ...], object] = {}  # Horovod's process sets of this process, by their ranks
_STALL = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
# Milliseconds between the rounds in which Horovod's thread asks all ranks for work. There is work
# once a step. On a CPU every round takes cores from the computation (benchmarks/performance.md).
_CYCLE = {"cpu": "20", "cuda": "1"}
_BUCKET = 1 << 26  # bytes; Horovod's own fusion buffer has 128 MiB


class Gradients:
    """Gradients of a list of parameters.

    Args:
        flat: True to put the gradients into buckets, for a sum over replicas. Otherwise autograd's
            own tensors are kept.

    Attributes:
        buckets: one or more flat tensors per dtype and device, in the order of the parameters;
            empty if ``flat`` is False.
    """

    def __init__(self, parameters: list[nn.Parameter], flat: bool = True):
        self.parameters = parameters
        self.buckets: list[Tensor] = []
        self._views: list[Tensor] = []  # the part of a bucket that belongs to each parameter
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
            # With the parameter's strides autograd adds without a change of layout (channels_last).
            p.grad = bucket.as_strided(p.size(), p.stride(), offset)
            self._views.append(p.grad)
            offset += p.numel()
        self.buckets.append(bucket)

    def zero(self) -> None:
        """Reset all gradients before a step: to 0 with buckets, else to None."""
        for bucket in self.buckets:
            bucket.zero_()
        for p, view in zip(self.parameters, self._views or repeat(None)):
            p.grad = view

    def detach(self) -> None:
        """Set every ``grad`` to None. Afterwards only parameters with a new gradient have one."""
        for p in self.parameters:
            p.grad = None

    def take_in(self) -> None:
        """Move gradients that autograd computed after :meth:`detach` into the buckets."""
        for p, view in zip(self.parameters, self._views):
            if p.grad is not None:
                view.copy_(p.grad)
            else:
                view.zero_()
            p.grad = view

    def finish(self) -> None:
        """Complete the gradients after the backward passes.

        A parameter that no loss depends on gets a gradient of zeros. A gradient in another memory
        layout than its parameter is copied into that layout, because fused optimizers ignore
        strides.
        """
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else like_layout(p.grad, p)

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that together hold all gradients."""
        return self.buckets or [p.grad for p in self.parameters]

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients of this rank together, a tensor of shape ()."""
        parts = [torch.linalg.vector_norm(part) for part in self.parts]
        if not parts:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]))

    def clip(self, largest: float, norm: float) -> None:
        """Scale all gradients so that their global norm is at most ``largest``.

        Equivalent to ``torch.nn.utils.clip_grad_norm_`` on the serial program.

        Args:
            largest: the largest norm that is allowed.
            norm: the norm of the gradients of all stages before scaling.
        """
        factor = largest / (norm + 1e-6)
        if factor < 1:
            self.multiply(factor)

    def multiply(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
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
    """Reducer of a single replica, which has nothing to sum."""

    name = "none"

    def sum(self, buckets: list[Tensor]) -> None:
        """Do nothing: the gradients of a single replica are their own sum."""


class TransportReducer:
    """Reducer that sums flat buckets over a communicator, by MPI or torch.distributed.

    Buckets of a GPU go through host memory, two at a time.

    Args:
        comm: the communicator of the replicas.
        fp16: True to compress gradients to fp16 before the sum.

    Attributes:
        name: the transport, "mpi" or "torch".
    """

    def __init__(self, comm, fp16: bool = False):
        self.comm, self.fp16 = as_communicator(comm), fp16
        self.name = self.comm.transport
        self._buffers: dict[torch.device, Buffers] = {}

    def sum(self, buckets: list[Tensor]) -> None:
        """Replace each flat bucket by its sum over the replicas, in place.

        All replicas must call it together. It returns when the sums have arrived.
        """
        under_way: deque[Callable[[], None]] = deque()
        for bucket in buckets:
            under_way.append(self._start(bucket))
            # On a GPU one bucket is copied while another one travels.
            if not bucket.is_cuda or len(under_way) > 1:
                under_way.popleft()()
        while under_way:
            under_way.popleft()()

    def _start(self, bucket: Tensor) -> Callable[[], None]:
        """Start to sum a bucket, and return the function that completes it."""
        # MPI has no 16-bit floats, so they are summed in float32. After fp16 compression this adds
        # no further rounding in 16 bits.
        wire = bucket.to(torch.float16).float() if self.fp16 else _wire(bucket)
        host, give = self._on_the_host(wire) if wire.is_cuda else (wire, None)
        request = self.comm.Isum(host.numpy())

        def end() -> None:
            waits_of(self.comm).wait(request)
            if host is not bucket:
                bucket.copy_(host.to(bucket.device, non_blocking=True))
            if give:
                give()

        return end

    def _on_the_host(self, wire: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return a copy of a GPU tensor in host memory, and a function that releases the copy."""
        buffers = self._buffers.setdefault(wire.device, Buffers(wire.device, staged=True))
        buffer = buffers.take(wire.numel() * wire.element_size())
        host = buffer.view(wire.dtype).copy_(wire, non_blocking=True)
        wait_for_device(wire.device)
        return host, lambda: buffers.give(buffer, read_by_stream=True)


class HorovodReducer:
    """Reducer that sums flat buckets by Horovod's grouped all-reduce.

    Args:
        process_set: Horovod's process set of the replicas.
        waits: the wait policy of the mesh.
        fp16: True to compress gradients to fp16 for the sum.
    """

    name = "horovod"

    def __init__(self, process_set, waits: Waits, fp16: bool = False):
        self.process_set, self.waits, self.fp16 = process_set, waits, fp16

    def sum(self, buckets: list[Tensor]) -> None:
        """Replace each flat bucket by its sum over the replicas, in place.

        All replicas must call it together. It returns when the sums have arrived.
        """
        import horovod.torch as hvd

        # The list is empty for a pipeline stage without weights.
        wires = [b.to(torch.float16) if self.fp16 else _wire(b) for b in buckets]
        # Horovod reduces the tensors of one device in one operation.
        with self.waits.reported("the sum of the gradients over the replicas"):
            for number, (_, group) in enumerate(groupby(wires, key=lambda wire: wire.device)):
                hvd.grouped_allreduce_(
                    list(group), op=hvd.Sum, name=f"gradients{number}", process_set=self.process_set
                )
        for bucket, wire in zip(buckets, wires):
            if wire is not bucket:
                bucket.copy_(wire)


def _wire(bucket: Tensor) -> Tensor:
    """Return a bucket in a dtype that Horovod and MPI can add: 16-bit floats become float32."""
    return bucket.float() if bucket.dtype in (torch.bfloat16, torch.float16) else bucket


def horovod_works() -> bool:
    """Return True if Horovod is installed with its PyTorch extension."""
    try:
        return importlib.util.find_spec("horovod.torch") is not None
    except ImportError:
        return False


def make_reducer(kind: str, mesh, fp16: bool = False, device: str = "cpu"):
    """Return the reducer for this rank's replicas. All ranks of ``mesh`` must call it together.

    Args:
        kind: the value of ``mesh.reducer``: auto, horovod, mpi or torch.
        fp16: True to compress gradients to fp16 for the sum.
        device: the type of the ranks' devices, cpu or cuda.

    Raises:
        ValueError: the reducer cannot use the transport. Or ``kind`` is horovod, but on some rank
            Horovod is not installed or not built for ``device``.
    """
    transport = mesh.world.transport
    _check_transport(kind, transport)
    asked = kind == "horovod" or kind == "auto" and mesh.replicas.size > 1 and transport == "mpi"
    lacks = _first(mesh.world.allgather(horovod_lacks(device))) if asked else None
    if kind == "horovod" and lacks:
        raise ValueError(
            f"mesh.reducer is horovod, but {lacks}: set it to mpi or auto, or install Horovod "
            "(docs/install.md)"
        )
    if mesh.replicas.size == 1:
        return LoneReducer()
    if asked and not lacks:
        return HorovodReducer(_process_set(mesh, device), mesh.waits, fp16)
    if lacks and mesh.world.rank == 0:
        print(f"distseg: {lacks}, gradients are summed by MPI (mesh.reducer: mpi)", flush=True)
    return TransportReducer(mesh.replicas, fp16)


def _check_transport(kind: str, transport: str) -> None:
    """Refuse a reducer that does not work over this transport.

    Args:
        kind: the value of ``mesh.reducer``.
        transport: what connects the ranks, mpi, torch or alone.
    """
    if transport == "torch" and kind in ("mpi", "horovod"):
        needs = "" if kind == "mpi" else ", as distseg starts Horovod with MPI"
        raise ValueError(
            f"mesh.reducer is {kind}, but the ranks are connected by torch.distributed, not by "
            f"MPI{needs}: set mesh.reducer to torch or auto, or start with mpirun and "
            "run.transport mpi"
        )
    if transport == "mpi" and kind == "torch":
        raise ValueError(
            "mesh.reducer is torch, but the ranks are connected by MPI, not by "
            "torch.distributed: set mesh.reducer to mpi, horovod or auto, or start with torchrun"
        )


def horovod_lacks(device: str) -> str | None:
    """Return why Horovod cannot sum gradients on a device (cpu or cuda), or None if it can."""
    if not horovod_works():
        return "Horovod with PyTorch is not installed"
    if device != "cuda":
        return None
    import horovod.torch as hvd
    from mpi4py import MPI  # noqa: F401  before Horovod (see _process_set)

    # Built without CUDA, Horovod would send gradients before the kernels that compute them end.
    if hvd.nccl_built() or hvd.cuda_built():
        return None
    return "Horovod is built without NCCL and CUDA and cannot sum gradients on GPUs"


def _first(texts: list[str | None]) -> str | None:
    return next(filter(None, texts), None)


def _threads() -> set[int]:
    """Return the ids of this process's threads; empty on systems other than Linux."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def _give_way(threads: set[int]) -> None:
    """Give threads the lowest priority, so that other threads on the same core run first.

    Between steps Horovod's threads wait for other ranks in a busy loop.

    Args:
        threads: the system's ids of the threads (:func:`_threads`).
    """
    for thread in threads:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
        except OSError:
            pass  # The thread has ended, or the system does not allow it.


def _process_set(mesh, device: str):
    """Start Horovod with one process set per stage, and return the set of this rank's stage.

    All ranks of ``mesh`` must call it together.

    Args:
        mesh: the mesh.
        device: the type of the ranks' devices, cpu or cuda.
    """
    import horovod.torch as hvd
    from mpi4py import MPI  # noqa: F401  before Horovod, which otherwise finalizes MPI itself and aborts

    # So Horovod names a missing rank and ends the job after run.timeout.
    limit = math.ceil(mesh.waits.timeout)
    # Horovod ends a stalled job only when it checks, so it must check within the limit.
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
