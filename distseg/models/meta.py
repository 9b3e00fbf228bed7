"""Calls on tensors without memory (on the meta device), among which a module's code may have small tensors that it makes of numbers, on the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """Inside, functions that are given tensors without memory are given all so, which PyTorch otherwise refuses."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
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


def found_in(tree: Any, *kinds: type) -> list:
    """Return what a function is called with, or returns, of these kinds."""
    if isinstance(tree, (tuple, list)):
        return [x for part in tree for x in found_in(part, *kinds)]
    if isinstance(tree, dict):
        return [x for part in tree.values() for x in found_in(part, *kinds)]
    return [tree] if isinstance(tree, kinds) else []
