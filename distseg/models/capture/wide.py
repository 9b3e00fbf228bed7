"""Run user code in float64 even where it asks for float32.

Precision is a setting of the run: ``x.float()``, ``torch.ones(3)`` and NumPy constants are float32
in a run in float32. Where results are compared in float64, these tensors become float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distseg.models.meta import found_in


def unnarrowed(function: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
    """Return a user's call, as (function, args, kwargs), with float64 in place of float32.

    For example, ``x.float()`` becomes ``x.to(torch.float64)``. Tensors are left as they are.
    """
    name = getattr(function, "__name__", "")
    if name == "float" and function is Tensor.float:
        return Tensor.to, (args[0], torch.float64), {}
    if name in ("to", "type"):
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
    if kwargs.get("dtype") is torch.float32:
        kwargs = {**kwargs, "dtype": torch.float64}
    return function, args, kwargs


def widened(result: Any, *given: Any) -> Any:
    """Cast a function's float32 result to float64 if no argument of the function is a tensor.

    An example is ``torch.ones(3)``: it has the precision of the run, which is float64 here. Any
    other result is returned unchanged.

    Args:
        result: what a function returned.
        given: the arguments of that function.
    """
    narrow = isinstance(result, Tensor) and result.dtype == torch.float32
    return result.double() if narrow and not found_in(given, Tensor) else result


def call_wide(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Repeat a call of user code in a run in float64, and return its result.

    If the arguments mix float32 and float64 tensors, the float32 tensors, such as NumPy constants,
    are cast to float64 first. A float32 result of a call without tensor arguments is cast too.
    """
    if (
        len({x.dtype for x in found_in((args, kwargs), Tensor)} & {torch.float32, torch.float64})
        > 1
    ):
        args, kwargs = _all_wide(args), _all_wide(kwargs)
    return widened(function(*args, **kwargs), args, kwargs)


def _all_wide(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.double() if tree.dtype == torch.float32 else tree
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(_all_wide, tree))
    if isinstance(tree, dict):
        return {key: _all_wide(x) for key, x in tree.items()}
    return tree
