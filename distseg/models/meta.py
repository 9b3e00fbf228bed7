"""Calls on tensors without memory (on the meta device), among which a module's code may have small tensors that it makes of numbers, on the CPU."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """Inside, functions that are given tensors without memory are given all so, which PyTorch otherwise refuses."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (made := of_sequence(getattr(function, "__name__", ""), args)) is not None:
            return made
        args, kwargs = all_on_meta(args, kwargs or {})
        return function(*args, **kwargs)


def all_on_meta(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a function, all without memory if any of them is."""
    if {x.is_meta for x in found_in((args, kwargs), Tensor)} != {True, False}:
        return args, kwargs
    return _without_memory(args), _without_memory(kwargs)


def _without_memory(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree if tree.is_meta or not tree.dim() else tree.to("meta")
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(_without_memory, tree))
    if isinstance(tree, dict):
        return {key: _without_memory(x) for key, x in tree.items()}
    return tree


_RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")


def of_sequence(name: str, args: tuple) -> tuple[Tensor, ...] | None:
    """Return what a recurrent function makes of tensors without memory, for which PyTorch takes a step for each of a sequence; None of other functions."""
    if (
        name.rpartition(".")[2] not in _RECURRENT
        or len(args) != 9
        or not isinstance(args[2], (list, tuple))
        or not args[0].is_meta
    ):
        return None
    x, state, (_, weight, *_), *_, both_ways, _ = args
    states = state if isinstance(state, (list, tuple)) else (state,)
    return as_computed(x, (*x.shape[:2], weight.shape[1] * (1 + both_ways))), *(
        as_computed(x, like.shape) for like in states
    )


def as_computed(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a tensor like another, through which gradients go where they do."""
    made = x.new_empty(x.shape if shape is None else shape)
    return (
        made.requires_grad_().clone()
        if torch.is_grad_enabled() and made.is_floating_point()
        else made
    )


def found_in(tree: Any, *kinds: type) -> list:
    """Return what a function is called with, or returns, of these kinds."""
    if isinstance(tree, (tuple, list)):
        return [x for part in tree for x in found_in(part, *kinds)]
    if isinstance(tree, dict):
        return [x for part in tree.values() for x in found_in(part, *kinds)]
    return [tree] if isinstance(tree, kinds) else []
