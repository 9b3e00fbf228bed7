"""Process groups of NCCL, which sum tensors of GPUs without copies to host memory.

On AMD GPUs, PyTorch offers RCCL under the same names. A mesh has one NCCL communicator a rank,
so that no two of them wait for each other on a GPU. All other messages stay on gloo.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distseg.comm.gloo import NO_LIMIT, CollectiveRequest
from distseg.comm.mesh import Mesh

_GROUPS: dict[tuple[str, ...], dist.Backend] = {}  # of this process, by the GPUs of their ranks


def lacks(device: str) -> str | None:
    """Return the reason why NCCL cannot sum tensors on cpu or cuda, or None if it can."""
    if device != "cuda":
        return f"the ranks compute on {device}, and NCCL sums on GPUs only"
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


def new_group(store: dist.Store, rank: int, size: int) -> dist.Backend:
    """Return a new process group of NCCL, without a time limit: the guardian ends jobs that hang.

    Args:
        store: a key-value store that the ranks of the group reach, with no keys of other groups.
        rank, size: this rank's number in the group, and the number of ranks.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NO_LIMIT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def replicas_group(mesh: Mesh, gpus: Sequence[str], device: str) -> dist.Backend:
    """Return the process group of this rank's replicas; connect the ranks at the first call.

    A communicator takes hundreds of megabytes of a GPU, so later meshes of the same replicas get
    the same group. All replicas must call the function together.

    Args:
        mesh: the mesh, whose ranks are connected by torch.distributed.
        gpus: the identifier of each rank's GPU, by the number of the rank in the mesh.
        device: the type of the ranks' devices.
    """
    members = tuple(gpus[rank] for rank in mesh.shape.members(mesh.rank).replicas)
    if members not in _GROUPS:
        ranks = mesh.replicas
        store = dist.PrefixStore("nccl", ranks.store)
        group = _GROUPS[members] = new_group(store, ranks.rank, ranks.size)
        # NCCL connects at the first operation, in which all ranks must take part.
        one = torch.ones(1, device=device)
        mesh.waits.wait(CollectiveRequest(group.allreduce([one])), "the connection of NCCL")
        if (found := one.item()) != ranks.size:
            raise RuntimeError(
                f"NCCL gave {found:g} in a test, the sum of the number 1 over {ranks.size} ranks: "
                "set mesh.reducer to torch, and check the installation of NCCL"
            )
    return _GROUPS[members]


@atexit.register
def abort_groups() -> None:
    """Abort all process groups, because closing them in order would wait for ranks that failed."""
    while _GROUPS:
        _GROUPS.popitem()[1].abort()
