"""Collectives on small CPU or CUDA tensors, over the communicators of a mesh.

The callers pack their data, so that a layer or a step sends one message. Values are sent as
float64, so that combining them does not lose the precision of training. CUDA tensors are staged
through host memory, unless the ranks exchange tensors on their GPUs by NCCL
(:class:`distseg.comm.nccl.StreamGroup`): then the host does not wait.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from distseg.comm.alone import Alone as Alone
from distseg.comm.communicator import as_communicator
from distseg.comm.staging import upload
from distseg.comm.waits import stream_of, waits_of


def gather(x: Tensor, comm, home: torch.device | None = None) -> Tensor:
    """Return the tensors ``x`` of all ranks in rank order: (*shape) -> (ranks, *shape), float64.

    All ranks of ``comm`` must call it together, with tensors of one shape. The result is equal on
    all ranks, and so is everything that the ranks compute from it.

    Args:
        home: the device of the result; by default the device of ``x``. A result that does not come
            through host memory stays on the device of ``x``.
    """
    if comm.size == 1:
        return x.detach().to(home or x.device, torch.float64).unsqueeze(0)
    if (stream := stream_of(comm)) and stream.takes(x):
        return stream.gather(x.detach().to(torch.float64))
    send = _host(x)
    received = np.empty((comm.size, *send.shape))
    waits_of(comm).wait(
        comm.Iallgather(send, received), f"values from all {comm.size} ranks of a group"
    )
    return upload(torch.from_numpy(received), home or x.device)


def add(x: Tensor, comm) -> Tensor:
    """Return the elementwise sum of every rank's ``x``, float64, on the device of ``x``.

    All ranks of ``comm`` must call it together, with tensors of one shape.
    """
    if comm.size == 1:
        return x.detach().to(torch.float64)
    if (stream := stream_of(comm)) and stream.takes(x):
        return stream.add(x.detach().to(torch.float64))
    total = _host(x).copy()
    waits_of(comm).wait(as_communicator(comm).Isum(total), f"a sum over {comm.size} ranks")
    return upload(torch.from_numpy(total), x.device)


def _host(x: Tensor) -> np.ndarray:
    return x.detach().to("cpu", torch.float64).contiguous().numpy()
