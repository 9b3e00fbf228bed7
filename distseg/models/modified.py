"""Find modified layers, which compute something other than their PyTorch class does.

A modified layer cannot be replaced by a distributed counterpart or computed in parts.
"""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.nn.utils import parametrize

# Methods that a user's class may override without changing what the layer computes.
_SETTING_UP = {"extra_repr", "reset_parameters", "reset_running_stats"}
# Methods that an instance may replace, as the instance of a captured module does.
_HOW_TO_TRAIN = {"train", "eval"}
# Special methods that change what a layer computes if a user's class overrides them.
_CALLING = {"__call__", "__iter__", "__len__", "__getitem__", "__getattr__", "__getattribute__"}


def modification_of(layer: nn.Module) -> str | None:
    """Return the reason why a layer computes something other than its PyTorch class does.

    Return None if it computes the same. The reason completes a sentence about the layer, such as
    "has hooks". A subclass is compared with the PyTorch class from which it is derived.
    """
    if parametrize.is_parametrized(layer):
        return f"has a parametrization of its {', '.join(layer.parametrizations)}"
    if hooked(layer):
        return "has hooks"
    shadowed = next(
        (
            name
            for name in vars(layer)
            if callable(getattr(type(layer), name, None)) and name not in _HOW_TO_TRAIN
        ),
        None,
    )
    return f"has a {shadowed} of its own" if shadowed else _overwritten(type(layer))


def hooked(layer: nn.Module) -> bool:
    """Return True if a layer has hooks, so that a call does more than its forward method."""
    return bool(
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def unmodified(layer: nn.Module, kinds: type | tuple[type, ...]) -> bool:
    """Return True if a layer is an instance of one of these classes and is not modified."""
    return isinstance(layer, kinds) and modification_of(layer) is None


def known(kind: type) -> type:
    """Return the first class of PyTorch or distseg in the class hierarchy of ``kind``."""
    return next(k for k in kind.__mro__ if k.__module__.partition(".")[0] in ("torch", "distseg"))


@cache
def _overwritten(kind: type) -> str | None:
    """Return, as a phrase, what a class overrides of its PyTorch class; None for nothing."""
    base = known(kind)
    names = {name for k in base.__mro__ for name in (*vars(k), *vars(k).get("__annotations__", ()))}
    own = {
        name
        for k in kind.__mro__[: kind.__mro__.index(base)]
        for name in vars(k)
        if not name.startswith("__") or name in _CALLING
    }
    found = own & names - _SETTING_UP
    return f"has a {min(found)} of its own" if found else None
