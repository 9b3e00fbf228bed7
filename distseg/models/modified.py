"""Layers that do not compute what their class of PyTorch's says: these can not be replaced by a twin, nor computed in parts by its formula."""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.nn.utils import parametrize

_SETTING_UP = {
    "extra_repr",
    "reset_parameters",
    "reset_running_stats",
}  # what a class of the user's may overwrite: the result stays

_HOW_TO_TRAIN = {"train", "eval"}  # which a captured module may have of its own
_CALLING = {
    "__call__",
    "__iter__",
    "__len__",
    "__getitem__",
    "__getattr__",
    "__getattribute__",
}  # dunders by which it would compute something else


def modification_of(layer: nn.Module) -> str | None:
    """What makes a layer compute something else than the class of PyTorch's that it is or comes from; None where nothing does."""
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
    """Whether calling a layer does more than its forward."""
    return bool(
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def unmodified(layer: nn.Module, kinds: type | tuple[type, ...]) -> bool:
    """Whether a layer is of one of these classes and computes what they say."""
    return isinstance(layer, kinds) and modification_of(layer) is None


def known(kind: type) -> type:
    """The class of PyTorch's (or of ours) that a layer's class is or comes from."""
    return next(k for k in kind.__mro__ if k.__module__.partition(".")[0] in ("torch", "distseg"))


@cache
def _overwritten(kind: type) -> str | None:
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
