"""Process groups of NCCL, by which GPUs exchange tensors without copies to host memory.

On AMD GPUs, PyTorch offers RCCL under the same names. NCCL sums gradients (``mesh.reducer: nccl``)
and carries halos and statistics of norms (``spatial.messages: nccl``). All other messages stay on
gloo.

NCCL's rules, and how distseg keeps them:

- All ranks of a communicator start its operations in the same order, and a message is complete only
  when both of its ranks have started it. :mod:`distseg.runtime.message_order` proves this order.
- Two communicators must not wait for each other on a GPU. A rank has at most two, for its tiles and
  for its replicas. Gradients are summed after the last halo, so only one of them is busy.
- Messages start in groups of at most 256, and the sends and receives of a halo exchange are one
  group. Otherwise PyTorch would open a communicator for each pair of ranks.
- Every communicator is opened at the start of a run, by all of its ranks.
- Memory of a message stays allocated until the stream waits for the message.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distseg.comm.gloo import NO_LIMIT, CollectiveRequest
from distseg.comm.mesh import Mesh
from distseg.comm.waits import Ranks

MOST_MESSAGES = 256  # that one group may start together

_GROUPS: dict[tuple[str, ...], dist.Backend] = {}  # of this process, by the GPUs of their ranks


class StreamGroup:
    """Ranks whose GPUs exchange tensors by NCCL, in the order of each GPU's stream.

    No method makes the host wait. An operation starts on the GPU after the kernels that are queued
    when the method is called. All ranks must call the methods in the same order.

    Args:
        group: the process group of NCCL.
        device: the device of this rank's tensors.
    """

    def __init__(self, group: dist.Backend, device: torch.device):
        self.group, self.device = group, torch.device(device)

    def takes(self, x: Tensor) -> bool:
        """Return True if ``x`` is on the GPU, so that this group can send it."""
        return x.device.type == self.device.type

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors ``x`` of all ranks in rank order: (*shape) -> (ranks, *shape)."""
        x = x.contiguous()
        found = x.new_empty(self.group.size() * x.numel())
        self.group._allgather_base(found, x.flatten()).wait()
        return found.view(-1, *x.shape)

    def add(self, x: Tensor) -> Tensor:
        """Return the elementwise sum of every rank's ``x``; all ranks get equal bits."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.group.allreduce([total]).wait()
        return total

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> dist.Work:
        """Start to send and receive dense tensors, and return the running operation.

        Kernels that are queued after ``wait()`` of the result may read the received tensors. No
        tensor may change before, or be freed.

        Args:
            sends, receives: for each other rank, the tensor to send, and the tensor to receive
                into. At least one of them has an entry.

        Raises:
            ValueError: there are more messages than NCCL takes in one group.
        """
        if (count := len(sends) + len(receives)) > MOST_MESSAGES:
            raise ValueError(
                f"a halo exchange of this rank has {count} messages, but NCCL takes at most "
                f"{MOST_MESSAGES} at a time: use fewer tiles for each image, or set "
                "spatial.messages to transport"
            )
        self.group._start_coalescing()
        for rank in sorted(sends):
            self.group.send([sends[rank]], rank, 0)
        for rank in sorted(receives):
            self.group.recv([receives[rank]], rank, 0)
        return self.group._end_coalescing()


def lacks(device: str) -> str | None:
    """Return the reason why NCCL cannot sum tensors on cpu or cuda, or None if it can."""
    if device != "cuda":
        return f"the ranks compute on {device}, and NCCL takes tensors of GPUs only"
    return None if dist.is_nccl_available() else "PyTorch is built without NCCL"


def gpu() -> str:
    """Return the unique identifier of this rank's GPU."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def shared_gpu(gpus: Sequence[str]) -> str | None:
    """Return a text that names two ranks with the same GPU, or None if there are none.

    Args:
        gpus: the identifier of each rank's GPU.
    """
    owners: dict[str, int] = {}
    for rank, name in enumerate(gpus):
        if (first := owners.setdefault(name, rank)) != rank:
            return f"ranks {first} and {rank} share the GPU {name}, and NCCL needs one GPU a rank"
    return None


def own_gpus(mesh: Mesh, device: str, setting: str, instead: str) -> list[str]:
    """Return, for each rank, the identifier of its GPU, and check that NCCL can use the GPUs.

    All ranks of ``mesh`` must call it together.

    Args:
        mesh: the mesh.
        device: the type of the ranks' devices, cpu or cuda.
        setting: the setting that asks for NCCL.
        instead: the values of the setting that work without NCCL, for the error.

    Raises:
        ValueError: the ranks are not connected by torch.distributed, NCCL cannot take tensors of
            some rank, or two ranks share a GPU.
    """
    if mesh.world.transport == "mpi":
        raise ValueError(
            f"{setting} is nccl, but the ranks are connected by MPI, not by torch.distributed: set "
            f"it to {instead}, or start with torchrun"
        )
    why = next(filter(None, mesh.world.allgather(lacks(device))), None)
    gpus = [] if why else mesh.world.allgather(gpu())
    why = why or shared_gpu(gpus)
    if why:
        raise ValueError(
            f"{setting} is nccl, but {why}: set it to {instead}, or give each rank a GPU of its "
            "own (run.device: cuda) and a PyTorch with NCCL"
        )
    return gpus


def new_group(store: dist.Store, rank: int, size: int) -> dist.Backend:
    """Return a new process group of NCCL, without a time limit: the guardian ends jobs that hang.

    Args:
        store: a key-value store that the ranks of the group reach, with no keys of other groups.
        rank, size: this rank's number in the group, and the number of ranks.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NO_LIMIT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def group_of(ranks: Ranks, gpus: Sequence[str], device: str) -> dist.Backend:
    """Return the process group of some ranks; connect the ranks at the first call.

    A communicator takes hundreds of megabytes of a GPU, so later calls for the same ranks return
    the same group. All of these ranks must call the function together.

    Args:
        ranks: the ranks, which are connected by torch.distributed.
        gpus: the identifier of the GPU of each of these ranks.
        device: the type of the ranks' devices.
    """
    members = tuple(gpus)
    if members not in _GROUPS:
        store = dist.PrefixStore("nccl", ranks.store)
        group = _GROUPS[members] = new_group(store, ranks.rank, ranks.size)
        # NCCL connects at the first operation, in which all ranks must take part.
        one = torch.ones(1, device=device)
        ranks.waits.wait(CollectiveRequest(group.allreduce([one])), "the connection of NCCL")
        if (found := one.item()) != ranks.size:
            raise RuntimeError(
                f"NCCL gave {found:g} in a test, the sum of the number 1 over {ranks.size} ranks: "
                "set mesh.reducer to torch and spatial.messages to transport, and check the "
                "installation of NCCL"
            )
    return _GROUPS[members]


def with_stream_groups(mesh: Mesh, device: torch.device) -> Mesh:
    """Return a copy of a mesh whose tiles and replicas exchange tensors on GPUs by NCCL.

    All ranks of ``mesh`` must call it together.

    Args:
        mesh: the mesh.
        device: the device of this rank.

    Raises:
        ValueError: NCCL cannot connect the ranks (:func:`own_gpus`).
    """
    gpus = own_gpus(mesh, device.type, "spatial.messages", "transport")
    copied, members = copy.copy(mesh), mesh.shape.members(mesh.rank)
    for name in ("tiles", "replicas"):
        ranks: Ranks = getattr(mesh, name)
        if ranks.size > 1:
            of = [gpus[rank] for rank in getattr(members, name)]
            group = StreamGroup(group_of(ranks, of, device.type), device)
            setattr(copied, name, Ranks(ranks.comm, ranks.waits, group))
    return copied


@atexit.register
def abort_groups() -> None:
    """Abort all process groups, because closing them in order would wait for ranks that failed."""
    while _GROUPS:
        _GROUPS.popitem()[1].abort()
