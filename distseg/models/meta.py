"""Runs user code on the meta device, although it makes small tensors on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """A context in which a function that takes a meta tensor gets all its tensors on that device.

    PyTorch refuses calls that mix devices.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (made := of_sequence(getattr(function, "__name__", ""), args)) is not None:
            return made
        args, kwargs = all_on_meta(args, kwargs or {})
        return function(*args, **kwargs)


def all_on_meta(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return arguments with all tensors on the meta device, if any of them is on that device.

    Tensors without dims are not moved.
    """
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
    """Return the meta tensors that a recurrent function (LSTM, GRU, RNN) returns.

    PyTorch would compute every step of the sequence, also on the meta device. Return None for
    other functions and for arguments that are not on the meta device.
    """
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
    """Return an empty tensor like ``x`` that looks like the result of a computation.

    The tensor requires a gradient if gradients are enabled and its dtype is floating-point.
    """
    made = x.new_empty(x.shape if shape is None else shape)
    if torch.is_grad_enabled() and made.is_floating_point():
        return made.requires_grad_().clone()
    return made


def found_in(tree: Any, *kinds: type) -> list:
    """Return all values of these classes in nested tuples, lists and dicts."""
    if isinstance(tree, (tuple, list)):
        return [x for part in tree for x in found_in(part, *kinds)]
    if isinstance(tree, dict):
        return [x for part in tree.values() for x in found_in(part, *kinds)]
    return [tree] if isinstance(tree, kinds) else []
