"""A flat model one layer at a time: each on what its predecessor gave, cut off from it, with its skips.

So a layer is timed alone, only its activations are alive, and it can be seen which tensors it keeps and hands on.
"""

from __future__ import annotations

import copy
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distseg.models.layers import Pop, channels_of, flat_layers, skip_store


class Call:
    """One layer on its inputs, cut off from the layers before it. The first layer's input needs no gradient."""

    def __init__(self, layer: nn.Module, x: Tensor, skip: Tensor | None, first: bool):
        self.layer = layer
        self.x = x.detach().requires_grad_(not first)
        self.skip = None if skip is None else skip.detach().requires_grad_()
        self.outputs: list[Tensor] = []
        self.stashed: dict[str, Tensor] = {}

    def forward(self) -> list[Tensor]:
        """The output, and the skip that the layer stashes."""
        with skip_store({} if self.skip is None else {self.layer.name: self.skip}) as self.stashed:
            y = self.layer(_Alias.apply(self.x))
        self.outputs = [y, *self.stashed.values()]
        self._gradients = [y.detach()] * len(self.outputs)  # any values do, and these are there already
        return self.outputs

    def backward(self) -> None:
        inputs = [t for t in (self.x, self.skip, *self.layer.parameters()) if t is not None and t.requires_grad]
        pairs = [(y, gradient) for y, gradient in zip(self.outputs, self._gradients) if y.requires_grad]
        if inputs and pairs:
            outputs, gradients = zip(*pairs)
            torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)  # a layer need not use all of its parameters


class _Alias(torch.autograd.Function):
    """The input again: autograd lets a layer overwrite this one, as in-place activations do, but not a leaf."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, g):
        return g


def calls(model: nn.Module, x: Tensor) -> Iterator[tuple[str, Call]]:
    """A call for each layer in order, fed with what its predecessor gave: who takes a call runs its forward."""
    skips: dict[str, Tensor] = {}
    for position, (name, layer) in enumerate(flat_layers(model)):
        call = Call(layer, x, skips.pop(layer.name) if isinstance(layer, Pop) else None, first=position == 0)
        yield name, call
        skips.update({name: t.detach() for name, t in call.stashed.items()})
        x = call.outputs[0].detach()


class Numbers:
    """Numbers storages in the order of their first appearance, and remembers their bytes."""

    def __init__(self, model: nn.Module):
        self.sizes: list[int] = []
        self._known: dict[int, int] = {}
        self._weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
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
    return torch.randn(batch, channels_of(model)[0], *size, dtype=next(model.parameters()).dtype, device=device)
