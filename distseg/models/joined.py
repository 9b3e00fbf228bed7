"""A module of several inputs or outputs as a network of one image and one result.

The bands of an image are dealt to the inputs. The outputs that are trained on lie side by side in the channels of one result, resized to the image where they are smaller; their
losses are added up by weights (:class:`distseg.layers.loss.Loss`). In evaluation the first of them alone is the result.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.models.layers import is_vector

_LINEAR = ("linear", "bilinear", "trilinear")


class WrongEnds(ValueError):
    """Inputs or outputs that a module does not have."""


def joined(
    model: nn.Module, inputs: Sequence[int] | None = None, outputs: Sequence[str] | None = None
) -> nn.Module:
    """Make a module take one image, and return one result: (N, C, *size) -> in training (N, outputs * C', *size), in evaluation (N, C', *size).

    Weights and their names stay. ``model`` is changed: its class becomes one of its own. A module that was joined before stays as it is.

    Args:
        inputs: the number of bands that each argument of its forward pass has.
        outputs: names or numbers of the outputs that are trained on, the one that is predicted first.
    """
    if inputs is None and outputs is None or hasattr(model, "distseg_outputs"):
        return model
    base = type(model)

    def __reduce_ex__(self, protocol):  # pickle finds no class that was made in a function
        plain = base.__new__(base)
        plain.__dict__.update(self.__dict__)
        return joined, (plain, inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        made = base.forward(self, *_dealt(x, inputs))
        return made if outputs is None else _one(made, outputs, x, self.training)

    own = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "distseg_outputs": len(outputs) if outputs else 1,
    }
    model.__class__ = type(base.__name__, (base,), own)
    return model


def outputs_of(model: nn.Module) -> int:
    """Return the number of outputs that lie side by side in the result of a module in training."""
    return getattr(model, "distseg_outputs", 1)


def _dealt(x: Tensor, inputs: Sequence[int] | None) -> Sequence[Tensor]:
    if inputs is None:
        return (x,)
    if sum(inputs) != x.shape[1]:
        raise WrongEnds(
            f"model.inputs is {list(inputs)}, together {sum(inputs)} bands, but the image has {x.shape[1]}: deal out all of them"
        )
    return x.split(list(inputs), 1)


def _one(made: Any, names: Sequence[str], x: Tensor, training: bool) -> Tensor:
    """Return the first of a module's outputs, in training all that are named, side by side."""
    if not training:
        alone = isinstance(made, Tensor) and made.dim() <= x.dim()
        return _resized(made if alone else _picked(made, names[0], x), x)
    if isinstance(made, Tensor) and made.dim() <= x.dim():
        raise WrongEnds(
            f"model.outputs names {', '.join(names)}, but the network returns one tensor in training: leave model.outputs out"
        )
    parts = [_resized(_picked(made, name, x), x) for name in names]
    for name, part in zip(names, parts):
        if part.shape != parts[0].shape:
            raise WrongEnds(
                f"output {name} of the network is {_shape(part)}, and {names[0]} is {_shape(parts[0])}: model.outputs takes outputs of the same classes"
            )
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _picked(made: Any, name: str, x: Tensor) -> Tensor:
    """Return one output by its name or number: of a dict, a tuple or list, or maps stacked in a dim behind that of images."""
    if isinstance(made, Tensor):
        made = made.unbind(1)
    found, there = (
        None,
        list(made)
        if isinstance(made, Mapping)
        else [str(n) for n in range(len(made))]
        if isinstance(made, (tuple, list))
        else [],
    )
    if isinstance(made, Mapping):
        found = made.get(name)
    elif name in there:
        found = made[int(name)]
    elif isinstance(made, tuple):
        found = getattr(made, name, None)  # of a named tuple
    if not isinstance(found, Tensor):
        has = f"a {type(found).__name__}" if found is not None else "no tensor"
        raise WrongEnds(
            f"model.outputs names {name}, but that is {has} of what the network returns, a {type(made).__name__} of {', '.join(map(str, there)) or 'nothing'}: name outputs that are tensors"
        )
    return found


def _resized(y: Tensor, x: Tensor) -> Tensor:
    """Resize a smaller map to the image's size, linearly, with the borders of cells aligned; a vector of the image stays."""
    size = x.shape[2:]
    if y.dim() < x.dim() or is_vector(y, size) or y.shape[2:] == size:
        return y
    return F.interpolate(y, size=size, mode=_LINEAR[len(size) - 1], align_corners=False)


def _shape(y: Tensor) -> str:
    return "x".join(map(str, y.shape[1:]))
