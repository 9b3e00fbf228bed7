"""What PyTorch and distseg ask of a CUDA build or of real tensors, answered for a device that computes nothing."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from distseg.comm import mail, nccl
from distseg.runtime import parameter_update, swap_layers
from distseg.tiling.tile import ReceptiveField
from distseg.training import engine

from .ranks import Comm, group_of
from .waits import Event, Stream, Waits

_PLANS = (
    (engine, "reach_for"),
    (engine.StageCut, "partition"),
    (swap_layers, "cumulative_strides"),
    (swap_layers, "graph_of"),
)
_NUMPY = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.uint8: np.uint8,
    torch.int64: np.int64,
}


def _numpy_of(waits: Waits):
    def numpy(tensor: FakeTensor) -> np.ndarray:
        """Ones, of the tensor's shape; it is the host's, or MPI's, to read and write."""
        assert tensor.device.type == "cpu", f"numpy of a tensor on {tensor.device}"
        waits.order.host([tensor], [tensor])
        return np.ones(tuple(tensor.shape), _NUMPY[tensor.dtype])

    return numpy


def _converted(module: nn.Module, function, recurse: bool = True) -> nn.Module:
    """nn.Module._apply, which swaps tensors in place as fake ones do not allow."""
    for child in module.children():
        child._apply(function)
    for name, p in module._parameters.items():
        if p is not None:
            module._parameters[name] = nn.Parameter(function(p.detach()), p.requires_grad)
    for name, b in module._buffers.items():
        if b is not None:
            module._buffers[name] = function(b)
    return module


def _with_numbers(plan):
    """A function that looks at numbers, of real tensors."""

    @wraps(plan)
    def real(*args, **kwargs):
        with _disable_current_modes():
            return plan(*args, **kwargs)

    return real


@contextmanager
def stand_in(waits: Waits, direct: bool = False, reach: ReceptiveField | None = None):
    """Inside, a step runs on fake tensors. ``direct``: as if MPI took pointers to a GPU's memory; ``reach``: the model's, which takes
    seconds to find for a deep one."""
    patches = [
        patch.object(nn.Module, "_apply", _converted),
        patch.object(FakeTensor, "numpy", _numpy_of(waits)),
        patch(
            "torch.cuda.amp.common.amp_definitely_not_available", lambda: False
        ),  # or autocast is off without a word
        patch("torch.cuda.is_bf16_supported", lambda *_: True),
        patch("torch.cuda.current_stream", lambda device=None: Stream(waits)),
        patch("torch.cuda.Event", lambda **_: Event(waits)),
        patch("torch.cuda.memory_allocated", lambda device=None: 0),
        patch("torch.cuda.device_count", lambda: 1),
        patch("torch.cuda.set_device", lambda device: None),
        patch.object(Comm, "takes_gpu_memory", direct, create=True),
        patch.object(nccl, "own_gpus", lambda mesh, *_: [f"{n}" for n in range(mesh.shape.size)]),
        patch.object(nccl, "group_of", group_of),
        patch.object(
            mail, "message", lambda x: x
        ),  # to ranks that look where it lies, not what it is
        patch.object(parameter_update, "broadcast", lambda model, comm: None),
        *(
            patch.object(module, name, _with_numbers(getattr(module, name)))
            for module, name in _PLANS
        ),
    ]
    if reach is not None:
        patches.append(patch.object(engine, "reach_for", lambda model, cut: reach))
    with ExitStack() as stack:
        for p in patches:
            stack.enter_context(p)
        yield
