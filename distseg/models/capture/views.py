"""Check that a copy of a module computes with its own weights only.

A capture and the serial program copy the module. An array made by ``weight.detach().numpy()``
follows the weight in training, but a copy of the array keeps the old numbers. A function that is
stored in a module is not copied, so the copy would call layers of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor, nn

from distseg.models.capture.state import WHOLE, Printer, slots_of
from distseg.models.capture.trace import CanNotCapture, Hidden

_DEPTH = 12  # deepest nesting of containers that is followed


def check_views(model: nn.Module) -> None:
    """Raise an error if an object outside a module's weights shares the memory of a weight.

    An example is an attribute ``self.array = weight.detach().numpy()``.

    Raises:
        Hidden: the message names the attribute or variable, the parameter or buffer, and how to fix
            it.
    """
    weights = {
        (start := x.untyped_storage().data_ptr()): (start + x.untyped_storage().nbytes(), name)
        for name, x in [*model.named_parameters(), *model.named_buffers()]
        if x.device.type == "cpu" and x.numel()
    }
    known = frozenset(map(id, model.modules()))
    for slot in slots_of(model) if weights else ():
        search = _Search(known)
        search(slot.value(), _DEPTH)
        for low, high in search.spans:
            for start, (stop, name) in weights.items():
                if low < stop and start < high:
                    raise Hidden(
                        f"{slot} shares the memory of {name}, for example as a NumPy view of it, "
                        "and distseg cannot see that training changes this memory: let the "
                        f"forward pass read {name} itself"
                    )


def check_copy(model: nn.Module, copied: nn.Module) -> None:
    """Raise an error if the copy of a module still calls layers of the original.

    An example is an attribute that holds ``lambda x: self.conv(x)``: a copy keeps the same lambda.

    Args:
        model: the original.
        copied: its copy.

    Raises:
        CanNotCapture: the message names the function, the layer, and how to fix it.
    """
    names = {id(module): name or WHOLE for name, module in model.named_modules()}
    names |= {id(x): name for name, x in [*model.named_parameters(), *model.named_buffers()]}
    for slot in slots_of(copied):
        if slot.field != "__dict__" or slot.name in ("train", "eval"):
            continue  # A forward pass does not switch the mode.
        search = _Origins(names)
        search(slot.value(), _DEPTH)
        if search.found:
            raise CanNotCapture(
                f"{slot} is a function that holds {search.found[0]}, so a copy of the network "
                "would call the layers of the original: make it a method of a class of your own, "
                "which reads the layers from self"
            )


class _Origins(Printer):
    """Search in an attribute of a copied model for parts of the original model.

    Such a part is a layer, parameter or buffer that was not copied. Call this object with the
    attribute's value. It adds the names of the parts to the list ``found``.

    Args:
        names: for each layer, parameter and buffer of the original, its name by its ``id``.
    """

    def __init__(self, names: Mapping[int, str]):
        super().__init__(False, frozenset())
        self.names, self.found = names, []

    def _tensor(self, x: Tensor) -> None:
        self._note(x)

    def _object(self, x: Any, again: Callable[[Any], Hashable]) -> Hashable:
        self._note(x)
        return None if isinstance(x, nn.Module) else super()._object(x, again)

    def _note(self, x: Any) -> None:
        if id(x) in self.names:
            self.found.append(self.names[id(x)])


class _Search(Printer):
    """Search in a Python object for NumPy arrays and other objects that ``memoryview`` can read.

    Call this object with the Python object. For each array, it adds to ``spans`` the addresses of
    the first byte and of the byte after the last.

    Args:
        known: ids of modules whose contents are not searched.
    """

    def __init__(self, known: frozenset[int]):
        super().__init__(False, known)
        self.spans: list[tuple[int, int]] = []

    def _tensor(self, x: Tensor) -> None:
        return None

    def _inside(self, x: Any, again: Callable[[Any], Hashable]) -> Hashable:
        if isinstance(x, np.ndarray):
            self.spans.append(_byte_bounds(x))
            return None
        return super()._inside(x, again)

    def _object(self, x: Any, again: Callable[[Any], Hashable]) -> Hashable:
        # Most objects are no buffers.
        with suppress(Exception):
            self.spans.append(_byte_bounds(np.asarray(memoryview(x))))
        return super()._object(x, again)


def _byte_bounds(x: np.ndarray) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the byte after its last one."""
    reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides)] if x.size else []
    start = x.__array_interface__["data"][0]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return start + low, start + high + (x.itemsize if x.size else 0)
