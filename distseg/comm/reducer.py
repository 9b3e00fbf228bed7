"""Buckets of gradients, and reducers, which sum a bucket over all replicas.

*Replicas* are the ranks that hold the same weights. Their gradients are added by Horovod, by NCCL,
or by the transport that carries all other messages (MPI or torch.distributed).

With several replicas the gradients live in a few flat buckets, and each parameter's ``grad`` is a
view of a bucket. So messages are contiguous, and nothing is copied. The first bucket has the
gradients of the last layers, which the backward pass completes first. So its sum can start while
the backward pass goes on (:mod:`distseg.comm.gradient_sums`).

Every rank computes the gradient of its part of the loss, which is already divided by global counts.
So the reduction is a plain sum, and the result is the gradient of the serial program.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distseg.comm import nccl
from distseg.comm.communicator import as_communicator
from distseg.comm.memory_format import like_layout
from distseg.comm.ordered_sum import TAGS, SumOfParts
from distseg.comm.staging import Buffers, wait_for_device
from distseg.comm.waits import Waits, When, waits_of

_SETS: dict[tuple[int, ...], object] = {}  # Horovod's process sets of this process, by their ranks
_STALL = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
# Milliseconds between the rounds in which Horovod's thread asks all ranks for work. On a CPU there
# is work once a step, and every round takes cores from the computation (benchmarks/performance.md).
# On a GPU there is work for every bucket.
_CYCLE = {"cpu": "20", "cuda": "1"}
_BUCKET = 1 << 24  # bytes of a bucket
_UNDER_WAY = 1 << 26  # bytes of the buckets whose sums may be under way at the same time
TAGS_OF_SUMS = TAGS[0] + 2, TAGS[1] + 2  # no other messages have these tags
_SUM = "the sum of the gradients over the replicas"  # what a rank waits for


class Gradients:
    """Gradients of a list of parameters, for sums over replicas, norm and clipping.

    Args:
        parameters: the parameters, from the first layer to the last.
        flat: True to put the gradients into buckets (flat tensors), for a sum over replicas.
            Otherwise each ``grad`` stays the tensor that autograd makes.

    Attributes:
        buckets: one or more flat tensors per dtype and device, from the last parameter to the
            first; empty if ``flat`` is False.
        members: for each tensor of :attr:`parts`, the parameters whose gradients it holds.
    """

    def __init__(self, parameters: list[nn.Parameter], flat: bool = True):
        self.parameters = parameters
        self.buckets: list[Tensor] = []
        self.members: list[list[nn.Parameter]] = [] if flat else [[p] for p in parameters]
        # The part of a bucket that belongs to each parameter.
        self._views: dict[nn.Parameter, Tensor] = {}
        for p in reversed(parameters) if flat else ():
            if not self.members or not _same_bucket(self.members[-1], p):
                self.members.append([])
            self.members[-1].append(p)
        if flat:
            for group in self.members:
                self._make_bucket(group)

    def _make_bucket(self, group: list[nn.Parameter]) -> None:
        """Make a bucket (a flat tensor) for some parameters; each ``grad`` becomes a view of it."""
        first = group[0]
        bucket = torch.zeros(sum(p.numel() for p in group), dtype=first.dtype, device=first.device)
        offset = 0
        for p in group:
            # With the parameter's strides autograd adds without a change of layout (channels_last).
            p.grad = bucket.as_strided(p.size(), p.stride(), offset)
            self._views[p] = p.grad
            offset += p.numel()
        self.buckets.append(bucket)

    def zero(self) -> None:
        """Reset all gradients before a step: to 0 with buckets, else to None."""
        for bucket in self.buckets:
            bucket.zero_()
        for p in self.parameters:
            p.grad = self._views.get(p)

    def detach(self) -> None:
        """Set every ``grad`` to None, so that a later backward pass shows which parameters it uses.

        A parameter that the pass does not use keeps None.
        """
        for p in self.parameters:
            p.grad = None

    def take_in(self) -> None:
        """Move the gradients that autograd computed after :meth:`detach` into the buckets.

        The gradient of a parameter without ``grad`` becomes 0.
        """
        for p, view in self._views.items():
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
        """Tensors that together hold all gradients: the buckets, or else every ``grad``."""
        return self.buckets or [p.grad for p in self.parameters]

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients of this rank together, a tensor of shape ()."""
        parts = [torch.linalg.vector_norm(part) for part in self.parts]
        if not parts:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]))

    def clip(self, largest: float, norm: float) -> None:
        """Scale all gradients so that their global norm is at most ``largest``.

        The result is that of ``torch.nn.utils.clip_grad_norm_`` in the serial program.

        Args:
            largest: the largest norm that is allowed.
            norm: the norm of the gradients of all stages before scaling.
        """
        if (factor := clip_factor(largest, norm)) < 1:
            self.multiply(factor)

    def multiply(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        for part in self.parts:
            part.mul_(factor)


def clip_factor(largest: float, norm: float) -> float:
    """Return the factor that scales gradients of norm ``norm`` to the norm ``largest``.

    If the factor is 1 or more, the caller leaves the gradients unchanged. The small number in the
    denominator is that of ``torch.nn.utils.clip_grad_norm_``.
    """
    return largest / (norm + 1e-6)


def _same_bucket(group: list[nn.Parameter], p: nn.Parameter) -> bool:
    first = group[0]
    size = sum(q.numel() for q in group) * first.element_size()
    return (p.dtype, p.device) == (
        first.dtype,
        first.device,
    ) and size + p.numel() * p.element_size() <= _BUCKET


class Reducer:
    """Base class of reducers, which sum buckets (flat tensors of gradients) over the replicas.

    All replicas must start the sums of the same buckets in the same order. A sum is written to
    ``bucket.data``, which does not change the tensor's version. So a change of the version shows
    that gradients were added (:class:`distseg.comm.gradient_sums.GradientSums`).

    Attributes:
        name: the name of the reducer, for the log.
        early: True if sums may start while the backward pass still runs.
    """

    name: str
    early = False

    def start(self, bucket: Tensor) -> None:
        """Start to replace a bucket of gradients by its sum over the replicas.

        Nothing else may read or write the bucket until :meth:`finish` has returned.

        Args:
            bucket: a flat tensor.
        """
        raise NotImplementedError

    def advance(self) -> None:
        """Advance the sums that were started, without waiting."""

    def finish(self) -> None:
        """Wait until all sums that were started are complete."""
        raise NotImplementedError

    def sum(self, buckets: list[Tensor]) -> None:
        """Replace each bucket by its sum over the replicas, and wait for all sums."""
        for bucket in buckets:
            self.start(bucket)
        self.finish()


class LoneReducer(Reducer):
    """Reducer for a single replica, whose gradients need no sum."""

    name = "none"

    def start(self, bucket: Tensor) -> None:
        """Do nothing: the gradients of a single replica are their own sum."""

    def finish(self) -> None:
        """Return at once, because there are no sums to wait for."""


class TransportReducer(Reducer):
    """Reducer that sums flat buckets over a communicator of MPI or torch.distributed.

    A sum takes as much memory as its bucket, so only a few sums run at the same time.
    Buckets in GPU memory are copied to host memory for the sum.

    Args:
        comm: the communicator of the replicas. No other messages on it may have the tags
            ``TAGS_OF_SUMS``.
        fp16: True to round gradients to fp16 before the sum.
        early: True if sums may start while the backward pass still runs.

    Attributes:
        name: the transport, "mpi" or "torch".
    """

    def __init__(self, comm, fp16: bool = False, early: bool = True):
        self.comm, self.fp16, self.early = as_communicator(comm), fp16, early
        self.name = self.comm.transport
        self._buffers: dict[torch.device, Buffers] = {}
        self._waiting: deque[Tensor] = deque()
        self._under_way: deque[_BucketSum] = deque()

    def start(self, bucket: Tensor) -> None:
        self._waiting.append(bucket)
        self.advance()

    def advance(self) -> None:
        # Sums with the same tags are tested one after another (SumOfParts).
        while self._under_way and self._under_way[0].Test():
            self._under_way.popleft()
        while self._waiting and self._has_room(self._waiting[0]):
            self._under_way.append(self._send(self._waiting.popleft()))

    def finish(self) -> None:
        waits_of(self.comm).wait(When(self._all_done), _SUM)

    def _all_done(self) -> bool:
        self.advance()
        return not self._under_way

    def _has_room(self, bucket: Tensor) -> bool:
        under_way = sum(_bytes(each.bucket) for each in self._under_way)
        return not under_way or under_way + _bytes(bucket) <= _UNDER_WAY

    def _send(self, bucket: Tensor) -> _BucketSum:
        """Start the messages that sum a bucket over the replicas, and return the running sum."""
        # MPI has no 16-bit floats, so they are summed in float32. After fp16 compression this adds
        # no further rounding in 16 bits.
        wire = bucket.to(torch.float16).float() if self.fp16 else _wire(bucket)
        host, give = self._on_the_host(wire) if wire.is_cuda else (wire, None)
        return _BucketSum(bucket, host, give, SumOfParts(host.data, self.comm, TAGS_OF_SUMS))

    def _on_the_host(self, wire: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return a copy of a GPU tensor in host memory, and a function that releases the copy."""
        buffers = self._buffers.setdefault(wire.device, Buffers(wire.device, staged=True))
        buffer = buffers.take(wire.numel() * wire.element_size())
        host = buffer.view(wire.dtype).copy_(wire, non_blocking=True)
        wait_for_device(wire.device)
        return host, lambda: buffers.give(buffer, read_by_stream=True)


class _BucketSum(NamedTuple):
    """Running sum of one bucket over the replicas.

    Attributes:
        bucket: the bucket.
        host: tensor in host memory with this rank's summand, later with the sum. It may be the
            bucket itself.
        give: function that releases the host memory; None if it needs no release.
        request: the request that is complete when the sum is.
    """

    bucket: Tensor
    host: Tensor
    give: Callable[[], None] | None
    request: SumOfParts

    def Test(self) -> bool:
        if not self.request.Test():
            return False
        if self.host is not self.bucket:
            self.bucket.data.copy_(self.host.to(self.bucket.device, non_blocking=True))
        if self.give:
            self.give()
        return True


class HorovodReducer(Reducer):
    """Reducer that sums flat buckets by Horovod, whose own thread sends the messages.

    Args:
        process_set: Horovod's process set of the replicas.
        waits: the wait policy of the mesh.
        fp16: True to compress gradients to fp16 for the sum.
        early: True if sums may start while the backward pass still runs.
    """

    name = "horovod"

    def __init__(self, process_set, waits: Waits, fp16: bool = False, early: bool = True):
        self.process_set, self.waits, self.fp16, self.early = process_set, waits, fp16, early
        self._under_way: list[tuple[Tensor, Tensor, int]] = []  # bucket, summands, Horovod's number

    def start(self, bucket: Tensor) -> None:
        import horovod.torch as hvd

        wire = bucket.to(torch.float16) if self.fp16 else _wire(bucket)
        name = f"gradients{len(self._under_way)}"
        handle = hvd.allreduce_async_(wire, name=name, op=hvd.Sum, process_set=self.process_set)
        self._under_way.append((bucket, wire, handle))

    def finish(self) -> None:
        import horovod.torch as hvd

        with self.waits.reported(_SUM):
            for bucket, wire, handle in self._under_way:
                hvd.synchronize(handle)
                if wire is not bucket:
                    bucket.data.copy_(wire)
        self._under_way.clear()


class NcclReducer(Reducer):
    """Reducer that sums flat buckets by NCCL, in GPU memory.

    The host does not wait for the sums: work that is queued on the GPU after :meth:`finish` does.

    If ranks exchange other messages in a backward pass, sums must not start in it. A sum that waits
    for another rank occupies the GPU, and a host that allocates or frees memory may wait for the
    sum. If the other rank waited for a halo that this host has not sent yet, both would wait for
    ever.

    Args:
        group: the process group of the replicas (:func:`distseg.comm.nccl.group_of`).
        fp16: True to compress gradients to fp16 for the sum.
        early: True if sums may start while the backward pass still runs.
    """

    name = "nccl"

    def __init__(self, group: dist.Backend, fp16: bool = False, early: bool = False):
        self.group, self.fp16, self.early = group, fp16, early
        self._under_way: list[tuple[Tensor, Tensor, dist.Work]] = []

    def start(self, bucket: Tensor) -> None:
        wire = bucket.to(torch.float16) if self.fp16 else _wire(bucket)
        self._under_way.append((bucket, wire, self.group.allreduce([wire.data])))

    def finish(self) -> None:
        """Make the GPU's stream wait for all sums that were started; the host goes on."""
        for bucket, wire, work in self._under_way:
            work.wait()
            if wire is not bucket:
                bucket.data.copy_(wire)
        self._under_way.clear()


def _bytes(bucket: Tensor) -> int:
    return bucket.numel() * bucket.element_size()


def _wire(bucket: Tensor) -> Tensor:
    """Return a bucket in the dtype in which it is summed: 16-bit floats become float32."""
    return bucket.float() if bucket.dtype in (torch.bfloat16, torch.float16) else bucket


def horovod_works() -> bool:
    """Return True if Horovod is installed with its PyTorch extension."""
    try:
        return importlib.util.find_spec("horovod.torch") is not None
    except ImportError:
        return False


def make_reducer(kind: str, mesh, fp16: bool = False, device: str = "cpu") -> Reducer:
    """Return the reducer that sums gradients over this rank's replicas.

    All ranks of ``mesh`` must call it together.

    Args:
        kind: the value of ``mesh.reducer``: auto, horovod, mpi, torch or nccl.
        fp16: True to compress gradients to fp16 for the sum.
        device: the type of the ranks' devices, cpu or cuda.

    Raises:
        ValueError: the reducer cannot use the transport. Or ``kind`` is horovod, but on some rank
            Horovod is not installed or not built for ``device``. Or ``kind`` is nccl, but a rank
            lacks NCCL or a GPU of its own.
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
    gpus = nccl.own_gpus(mesh, device, "mesh.reducer", "torch or auto") if kind == "nccl" else []
    if mesh.replicas.size == 1:
        return LoneReducer()
    if kind == "nccl":
        of_replicas = [gpus[rank] for rank in mesh.shape.members(mesh.rank).replicas]
        group = nccl.group_of(mesh.replicas, of_replicas, device)
        return NcclReducer(group, fp16, early=mesh.shape.samples == mesh.shape.size)
    if asked and not lacks:
        # On a CPU Horovod's thread would wait in a busy loop on the cores of the backward pass.
        process_set = _process_set(mesh, device)
        return HorovodReducer(process_set, mesh.waits, fp16, early=device == "cuda")
    if lacks and mesh.world.rank == 0:
        print(f"distseg: {lacks}, gradients are summed by MPI (mesh.reducer: mpi)", flush=True)
    # On a GPU a sum begins with a copy that waits for all kernels, so it would delay later kernels.
    return TransportReducer(mesh.replicas, fp16, early=device == "cpu")


def _check_transport(kind: str, transport: str) -> None:
    """Refuse a value of ``mesh.reducer`` that does not work over the transport of the job.

    Args:
        kind: the value of ``mesh.reducer``.
        transport: mpi, torch or alone.
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
            f"mesh.reducer is {kind}, but the ranks are connected by MPI, not by "
            "torch.distributed: set mesh.reducer to mpi, horovod or auto, or start with torchrun"
        )


def horovod_lacks(device: str) -> str | None:
    """Return the reason why Horovod cannot sum gradients on cpu or cuda, or None if it can."""
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

    It is used for Horovod's threads, which wait for other ranks in a busy loop between steps.

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
        # Each bucket is a sum of its own. So it has the same bits whichever buckets are summed in
        # the same round, and is not copied into a buffer of Horovod.
        "HOROVOD_FUSION_THRESHOLD": "0",
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
