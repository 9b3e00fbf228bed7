"""Run user code on the meta device, even if it makes small tensors on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """Context in which PyTorch functions may take CPU tensors together with meta tensors.

    PyTorch refuses calls that mix devices, so the context moves the CPU tensors to the meta device.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (made := of_sequence(getattr(function, "__name__", ""), args)) is not None:
            return made
        args, kwargs = all_on_meta(args, kwargs or {})
        return function(*args, **kwargs)


def all_on_meta(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Move all tensors among a call's arguments to the meta device if one of them is there already.

    Return the arguments. Tensors without dims are never moved, since PyTorch accepts them on any
    device.

    Args:
        args: the positional arguments, which may hold nested tuples, lists and dicts.
        kwargs: the keyword arguments.
    """
    if {x.is_meta for x in found_in((args, kwargs), Tensor)} != {True, False}:
        return args, kwargs
    return _without_memory(args), _without_memory(kwargs)


def _without_memory(tree: Any) -> Any:
    """Return nested arguments with all tensors that have dims moved to the meta device."""
    if isinstance(tree, Tensor):
        return tree if tree.is_meta or not tree.dim() else tree.to("meta")
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(_without_memory, tree))
    if isinstance(tree, dict):
        return {key: _without_memory(x) for key, x in tree.items()}
    return tree


_RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")


def of_sequence(name: str, args: tuple) -> tuple[Tensor, ...] | None:
    """Return the result of a recurrent function (LSTM, GRU, RNN) for tensors on the meta device.

    The function itself is not called, because PyTorch would run every step of the sequence.

    Args:
        name: the name of any function, such as ``torch.lstm`` or ``relu``.
        args: its arguments.

    Returns:
        The output and the final states, on the meta device. None if the function is not recurrent,
        if ``args`` are not those of a call by one of PyTorch's recurrent modules, or if the input
        is not on the meta device. The function must then be called.
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
    """Return an uninitialised tensor of the dtype and device of ``x``, as a function's result.

    It stands for the result of a function that is not called. If gradients are enabled and the
    dtype is floating-point, it requires a gradient and has a ``grad_fn``.

    Args:
        x: a tensor whose device and dtype the result has.
        shape: the shape of the result, by default that of ``x``.
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
