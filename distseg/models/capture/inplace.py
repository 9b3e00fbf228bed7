"""Search for the function that does the same as an in-place function in a new tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.models.capture.trace import is_in_place


def _property(name: str, x: Tensor, *_) -> Tensor:
    return getattr(x, name)


def out_of_place(function: Callable) -> Callable:
    """Return the function that does the same as an in-place function but returns a new tensor.

    For example, return ``Tensor.add`` for ``Tensor.add_``. Return any other function unchanged,
    except that the getter of a property becomes a function that reads the property.
    """
    name = getattr(function, "__name__", "")
    if name == "__get__":  # a property's getter cannot be copied
        return partial(_property, function.__self__.__name__)
    if is_in_place(name) and name.startswith("__i"):
        return getattr(Tensor, f"__{name[3:]}")
    if name.endswith("_") and not name.startswith("__"):
        for home in (Tensor, torch, F):
            if getattr(home, name, None) is function:
                return getattr(home, name[:-1])
    return function
