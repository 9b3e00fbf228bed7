"""Find constant tensors, which user code computes from numbers only.

Examples: ``torch.tensor([0.3, 0.6])``, ``torch.ones(1, c, 1, 1)``, ``torch.arange(c)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distseg.models.capture.trace import Called, Kept, Made, found_in
from distseg.models.capture.wide import widened

FILLS = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"}
"""Functions that fill a tensor with one number; with a map's size, they make a constant map."""
FACTORIES = FILLS | set(
    (
        "tensor as_tensor scalar_tensor new_tensor arange linspace logspace eye triu_indices "
        "tril_indices hann_window hamming_window bartlett_window blackman_window"
    ).split()
)
CASTS = {"to", "type_as", "type", "float", "double", "half", "bfloat16", "long", "int", "bool"}
"""Functions that change nothing but a tensor's type."""


def constant_of(calls: Sequence[Called], made: Made) -> Tensor | None:
    """Compute the constant tensor that a recorded call makes, such as ``torch.ones(1, c, 1, 1)``.

    The tensor is on the CPU. Return None if it depends on the image's values, on a parameter or on
    random numbers. A tensor that depends on the image's size is returned as it is for this trace's
    size.

    Args:
        calls: the calls of a trace.
        made: reference to the tensor: the index of the call that makes it.
    """
    if made.call < 0 or made.part:
        return None
    call = calls[made.call]
    if call.name in FACTORIES:
        return _called(call, call.args)
    inner = found_in((call.args, call.kwargs), Made, Kept)
    if call.name in CASTS and call.args and isinstance(call.args[0], Made):
        found = constant_of(calls, call.args[0])
        return None if found is None else found.to(call.dtypes[0])
    if not inner or call.name.startswith(("rand", "bernoulli", "normal", "uniform")):
        return None
    values = {x: constant_of(calls, x) if isinstance(x, Made) else None for x in inner}
    return (
        None
        if any(x is None for x in values.values())
        else _called(call, _filled(call.args, values), _filled(call.kwargs, values))
    )


def _called(call: Called, args: tuple, kwargs: dict | None = None) -> Tensor | None:
    """Run a recorded call on constant arguments; return None if an argument is not constant."""
    kwargs = {
        name: x
        for name, x in (call.kwargs if kwargs is None else kwargs).items()
        if name not in ("device", "pin_memory", "requires_grad")
    }
    # The call is a method of a tensor. Its result depends only on the type of this tensor.
    if call.name.startswith("new_"):
        args = (torch.zeros((), dtype=call.dtypes[0]), *args[1:])
    if found_in((args, kwargs), Made, Kept):
        return None
    found = widened(call.function(*args, **kwargs), args, kwargs)
    return found if isinstance(found, Tensor) and not found.is_meta else None


def _filled(tree: Any, values: dict) -> Any:
    """Return the arguments of a call in which ``values[r]`` replaces each tensor reference r."""
    if isinstance(tree, Made):
        return values[tree]
    if isinstance(tree, tuple):
        return tuple(_filled(x, values) for x in tree)
    if isinstance(tree, dict):
        return {key: _filled(x, values) for key, x in tree.items()}
    return tree
