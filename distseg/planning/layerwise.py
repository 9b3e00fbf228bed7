"""A flat model one layer at a time: each on what its predecessor gave, cut off from it, with its skips.

So a layer is timed alone, only its activations are alive, and it can be seen which tensors it keeps and hands on.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distseg.models.bands import channels_of
from distseg.models.layers import skip_store
from distseg.models.network import calls_of
from distseg.tiling.graph import last_readings


class Alone:
    """One layer on its inputs, cut off from the layers before it. The image needs no gradient; ``readers``: of the result."""

    def __init__(self, layer: nn.Module, inputs: Sequence[Tensor], image: int | None, readers: int):
        self.layer, self.readers = layer, readers
        self.inputs = [
            x.detach().requires_grad_(number != image) for number, x in enumerate(inputs)
        ]
        self.output: Tensor | None = None

    def forward(self) -> Tensor:
        with skip_store({}):
            self.output = self.layer(*map(_Alias.apply, self.inputs))
        return self.output

    def backward(self) -> None:
        inputs = [t for t in (*self.inputs, *self.layer.parameters()) if t.requires_grad]
        if inputs and self.output.requires_grad:
            # Any values do as gradients, of which those of several readers are added, and its own are there already.
            times = max(1, self.readers)
            torch.autograd.grad(
                [self.output] * times, inputs, [self.output.detach()] * times, allow_unused=True
            )  # a layer need not use all of its parameters


class _Alias(torch.autograd.Function):
    """The input again: autograd lets a layer overwrite this one, as in-place activations do, but not a leaf."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, g):
        return g


def alone(model: nn.Module, x: Tensor) -> Iterator[tuple[str, Alone]]:
    """Each layer in order, fed with what those before it gave: who takes one runs its forward."""
    calls = calls_of(model)
    frees, readers = (
        last_readings([call.inputs for call in calls], range(len(calls))),
        Counter(source for call in calls for source in call.reads),
    )
    maps = {0: x}
    for number, call in enumerate(calls):
        found = Alone(
            call.layer,
            [maps[source] for source in call.inputs],
            call.inputs.index(0) if 0 in call.inputs else None,
            readers[number + 1],
        )
        yield call.name, found
        maps[number + 1] = found.output.detach()
        for source in frees[number]:
            del maps[source]


class Numbers:
    """Numbers storages in the order of their first appearance, and remembers their bytes."""

    def __init__(self, model: nn.Module):
        self.sizes: list[int] = []
        self._known: dict[int, int] = {}
        self._weights = {
            t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())
        }
        self._alive: list[Tensor] = []  # so that no address is used twice

    def is_weight(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._weights

    def of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._alive.append(tensor.detach())
        return self._known[storage._cdata]


def copied(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """The model in training mode with converted parameters and buffers."""
    parameters = {id(p): _as_parameter(convert(p), p) for p in model.parameters()}
    return copy.deepcopy(model, parameters | {id(b): convert(b) for b in model.buffers()}).train()


def _as_parameter(tensor: Tensor, like: nn.Parameter) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, like.requires_grad)


def random_input(model: nn.Module, size: Sequence[int], batch: int, device) -> Tensor:
    """(batch, C, *size) of the weights' dtype."""
    return torch.randn(
        batch, channels_of(model)[0], *size, dtype=next(model.parameters()).dtype, device=device
    )
