"""Faults that a step on the device must show: each undoes one rule."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from distseg.comm import mail, reducer
from distseg.comm.staging import Buffers
from distseg.layers.kernels import plain
from distseg.layers.loss import Loss
from distseg.training.engine import Engine


def _on_the_host(self: Loss, logits: Tensor, labels: Tensor, rows=Loss.rows) -> Tensor:
    return rows(self, logits + torch.ones(logits.shape), labels)


def _in_doubt(self: Engine, rate: float, update=Engine.update) -> float:
    if self.gradients.parts[0].isnan().any():
        raise ValueError("not a number")
    return update(self, rate)


def _the_last(self: Buffers, size: int) -> Tensor:
    free = self._free[1 << max(0, size - 1).bit_length()]
    return free.pop()[0][:size] if free else self._made(1 << max(0, size - 1).bit_length())[:size]


def _of_the_cpu(g: Tensor, x: Tensor, affine) -> tuple[Tensor, Tensor]:
    scale, _, pivot, one = plain._parameters(x, affine)
    return torch.ops.aten.native_batch_norm_backward(
        g, x, scale, pivot, one, None, None, False, 0.0, [False, True, True]
    )[1:]


_FAULTS = {
    "a tensor of the host in the loss": [(Loss, "rows", _on_the_host)],
    "one more number read": [(Engine, "update", _in_doubt)],
    "what the CPU's kernel alone takes": [(plain, "sums", _of_the_cpu)],
    "sent before it is computed": [
        (module, "wait_for_device", lambda device: None) for module in (mail, reducer)
    ],
    "received where it is still read": [(Buffers, "take", _the_last)],
    "received into fresh memory": [
        (
            Buffers,
            "_made",
            lambda self, size: torch.empty(size, dtype=torch.uint8, device=self.device),
        )
    ],
    "looked at before it is copied": [(reducer, "wait_for_device", lambda device: None)],
}


@contextmanager
def planted(name: str | None):
    """Inside, a fault by name; None: none."""
    patches = [patch.object(*fault) for fault in _FAULTS[name]] if name else []
    for p in patches:
        p.start()
    try:
        yield
    finally:
        for p in patches:
            p.stop()
