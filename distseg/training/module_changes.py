"""Finds changes of the user's module that were made after it was distributed.

A distributed model has layers of its own, which share only parameters and buffers with the user's
module. So a later change of the module, such as another momentum of a norm, would have no effect.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import nn

_MODAL = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str, tuple, type(None))


class _Tensor(NamedTuple):
    """Record of the ``id`` of a parameter or buffer, to notice if another tensor replaces it."""

    identity: int


class ModuleChanges:
    """Record of the settings of a module's layers, with which later settings are compared.

    The settings are the plain attributes of PyTorch's layers, the identity of parameters and
    buffers, and the number of hooks. The module is not kept alive.

    Args:
        module: the user's module, once it is distributed.
    """

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)
        self._before = _settings(module)
        self._training = module.training

    def __deepcopy__(self, memo) -> ModuleChanges:
        """Return an object that compares nothing, because a copied model has no user's module."""
        copied = ModuleChanges.__new__(ModuleChanges)
        copied._module = _nothing
        return copied

    def check(self) -> None:
        """Refuse a module whose settings have changed since this object was made.

        The modes (training or evaluation) of norms and dropouts are compared only if the whole
        module has the same mode as before. So the user may evaluate the module in between.

        Raises:
            ValueError: a setting has changed. The message names the setting and both values.
        """
        if (module := self._module()) is None:
            return
        now = _settings(module)
        for name, before in self._before.items():
            found = now.get(name)
            mode = name.rpartition(".")[2] == "training"
            if found == before or mode and module.training != self._training:
                continue
            change = f"is {found!r}, but was {before!r}"
            if isinstance(before, _Tensor):
                change = "is another tensor than"
            repair = "make the change before distseg.distribute, or distribute a new module"
            if mode:
                repair = "set the mode of a layer in the train() of your module"
            raise ValueError(
                f"{name} of your module {change} when it was distributed, which has no effect on "
                f"the distributed model: {repair}"
            )


def _nothing() -> None:
    """Return None, like a weak reference whose object no longer exists."""


def _settings(module: nn.Module) -> dict[str, object]:
    """Return the settings of a module's layers, by names such as ``encoder.norm.momentum``."""
    found: dict[str, object] = {}
    for path, layer in module.named_modules():
        own: dict[str, object] = {name: _Tensor(id(p)) for name, p in layer._parameters.items()}
        own["number of hooks"] = sum(len(getattr(layer, field)) for field in _HOOKS)
        if type(layer).__module__.startswith("torch.nn."):
            own |= {name: _Tensor(id(b)) for name, b in layer._buffers.items()}
            own |= {
                name: value
                for name, value in vars(layer).items()
                if isinstance(value, _PLAIN) and name[0] != "_" and name != "training"
            }
            if isinstance(layer, _MODAL):
                own["training"] = layer.training
        found |= {f"{path}.{name}".removeprefix("."): value for name, value in own.items()}
    return found
