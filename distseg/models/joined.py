"""Adapt a module of several inputs or outputs to a network of one image and one result.

The bands of the image are split among the inputs. In training, the outputs are resized to the image
if they are smaller, and concatenated along the channels of one result. Their losses are added with
weights (:class:`distseg.layers.loss.Loss`). In evaluation the result is the first output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.models.layers import is_vector

_LINEAR = ("linear", "bilinear", "trilinear")


class WrongEnds(ValueError):
    """Error for a ``model.inputs`` or ``model.outputs`` that does not fit the module or images."""


def joined(
    model: nn.Module, inputs: Sequence[int] | None = None, outputs: Sequence[str] | None = None
) -> nn.Module:
    """Make a module of several inputs or outputs take one image and return one result.

    Shapes are (N, C, *size) -> (N, outputs * C', *size) in training, (N, C', *size) in evaluation.
    ``model`` is changed and returned: its class is replaced by a subclass. Weights and their names
    do not change. A module that is adapted already stays as it is.

    Args:
        model: the module.
        inputs: for each argument of the module's forward pass, the number of bands that it gets, in
            the order of the image's bands; None if the module takes one image.
        outputs: names or numbers of the outputs to train; the first one is used in evaluation. None
            if the module returns one tensor.
    """
    if inputs is None and outputs is None or hasattr(model, "distseg_outputs"):
        return model
    base = type(model)

    def reduce(self, protocol):
        # pickle cannot find a class that was made in a function.
        plain = base.__new__(base)
        plain.__dict__.update(self.__dict__)
        return joined, (plain, inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        made = base.forward(self, *_dealt(x, inputs))
        return made if outputs is None else _one(made, outputs, x, self.training)

    own = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "distseg_outputs": len(outputs) if outputs else 1,
    }
    model.__class__ = type(base.__name__, (base,), own)
    return model


def outputs_of(model: nn.Module) -> int:
    """Return the number of outputs that are concatenated in a module's result in training.

    It is 1 for a module that :func:`joined` has not changed.
    """
    return getattr(model, "distseg_outputs", 1)


def _dealt(x: Tensor, inputs: Sequence[int] | None) -> Sequence[Tensor]:
    if inputs is None:
        return (x,)
    if sum(inputs) != x.shape[1]:
        raise WrongEnds(
            f"model.inputs is {list(inputs)}, together {sum(inputs)} bands, but the image has "
            f"{x.shape[1]}: let the numbers of model.inputs add up to {x.shape[1]}"
        )
    return x.split(list(inputs), 1)


def _one(made: Any, names: Sequence[str], x: Tensor, training: bool) -> Tensor:
    """Join a module's outputs along the channels in training; in evaluation return the first one.

    Args:
        made: the result of the user's module.
        names: names or numbers of the outputs.
        x: the image (N, bands, *size), to whose size the outputs are resized.
        training: True to return all outputs, (N, outputs * C', *size).
    """
    if not training:
        alone = isinstance(made, Tensor) and made.dim() <= x.dim()
        return _resized(made if alone else _picked(made, names[0], x), x)
    if isinstance(made, Tensor) and made.dim() <= x.dim():
        raise WrongEnds(
            f"model.outputs names {', '.join(names)}, but the network returns one tensor in "
            "training: leave model.outputs out"
        )
    parts = [_resized(_picked(made, name, x), x) for name in names]
    for name, part in zip(names, parts):
        if part.shape != parts[0].shape:
            raise WrongEnds(
                f"output {name} of the network has shape {_shape(part)}, but {names[0]} has "
                f"{_shape(parts[0])}: name only outputs with the same classes in model.outputs"
            )
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _picked(made: Any, name: str, x: Tensor) -> Tensor:
    """Return one output of a module by its name or number.

    Args:
        made: the module's result: a dict, a tuple, a list, or a tensor whose dim 1 stacks several
            maps.
        name: the key, the field of a named tuple, or the number, such as ``0``.

    Raises:
        WrongEnds: the result has no tensor of this name or number.
    """
    if isinstance(made, Tensor):
        made = made.unbind(1)
    found, there = None, []
    if isinstance(made, Mapping):
        there = list(made)
    elif isinstance(made, (tuple, list)):
        there = [str(n) for n in range(len(made))]
    if isinstance(made, Mapping):
        found = made.get(name)
    elif name in there:
        found = made[int(name)]
    elif isinstance(made, tuple):
        found = getattr(made, name, None)  # a field of a named tuple
    if not isinstance(found, Tensor):
        has = f"a {type(found).__name__}" if found is not None else "no tensor"
        raise WrongEnds(
            f"model.outputs names {name}, but the network returns a {type(made).__name__} of "
            f"{', '.join(map(str, there)) or 'nothing'}, in which {name} is {has}: name only "
            "outputs that the network returns as tensors"
        )
    return found


def _resized(y: Tensor, x: Tensor) -> Tensor:
    """Resize a map to the image's size by linear interpolation (``align_corners=False``).

    A vector, which has no spatial size, is returned unchanged.
    """
    size = x.shape[2:]
    if y.dim() < x.dim() or is_vector(y, size) or y.shape[2:] == size:
        return y
    return F.interpolate(y, size=size, mode=_LINEAR[len(size) - 1], align_corners=False)


def _shape(y: Tensor) -> str:
    return "x".join(map(str, y.shape[1:]))
