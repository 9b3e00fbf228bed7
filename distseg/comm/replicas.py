"""Replicas of the weights: the broadcast at the start, and the check that they stay equal."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from distseg.comm.memory_format import as_bytes
from distseg.comm.progress import heartbeat


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def broadcast(model: nn.Module, comm) -> None:
    """Copy the weights and buffers of the first rank of ``comm`` to its other ranks.

    All ranks of ``comm`` must call it together.
    """
    if comm.size == 1:
        return
    heartbeat("weights to all replicas")
    for _, tensor in _tensors(model):
        broadcast_tensor(tensor, comm)


def broadcast_tensor(tensor: Tensor, comm) -> None:
    """Copy the values of ``tensor`` on the first rank into ``tensor`` on all other ranks.

    All ranks of ``comm`` must call it together.
    """
    host = _bytes(tensor)
    comm.Bcast(host.numpy(), root=0)
    if host.data_ptr() != tensor.data_ptr():
        tensor.copy_(host.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def check_same(model: nn.Module, comm) -> None:
    """Check that weights and buffers of all replicas are bitwise equal, by checksums.

    All ranks of ``comm``, which are the replicas, must call it together.

    Raises:
        ValueError: a tensor differs. The message names the first such tensor, and the ranks on
            which it differs from rank 0.
    """
    if comm.size == 1:
        return
    tensors = _tensors(model)
    heartbeat("comparison of the replicas' weights")
    sums = comm.allgather([zlib.crc32(_bytes(t).numpy()) for _, t in tensors])
    for position, (name, _) in enumerate(tensors):
        others = [rank for rank in range(comm.size) if sums[rank][position] != sums[0][position]]
        if others:
            raise ValueError(
                f"replicas no longer hold the same weights: {name} on ranks {others} of the "
                "replicas differs from rank 0's; "
                "the run cannot be trusted from here on: resume from the last checkpoint "
                "(--train.resume true)"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return as_bytes(tensor.detach().contiguous().cpu())
