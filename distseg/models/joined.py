"""Adapt a module of several inputs or outputs to a network of one image and one result.

The bands of the image are split among the inputs. In training, the outputs are resized to the image
if they are smaller, and concatenated along the channels of one result. Their losses are added with
weights (:class:`distseg.layers.loss.Loss`). In evaluation the result is the first output. After
:func:`measure_outputs` outputs may differ in their number of channels, and evaluation has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.models.layers import is_vector

_LINEAR = ("linear", "bilinear", "trilinear")


class WrongEnds(ValueError):
    """Error for a ``model.inputs`` or ``model.outputs`` that does not fit the module or images."""


class MeasuredOutputs(NamedTuple):
    """Outputs of a module, which may differ in their number of channels.

    Attributes:
        channels: the number of channels of each output.
        in_evaluation: True if the module returns all these outputs in evaluation too.
    """

    channels: tuple[int, ...]
    in_evaluation: bool


def joined(
    model: nn.Module, inputs: Sequence[int] | None = None, outputs: Sequence[str] | None = None
) -> nn.Module:
    """Make a module of several inputs or outputs take one image and return one result.

    Shapes are (N, C, *size) -> (N, outputs * C', *size) in training, (N, C', *size) in evaluation.
    ``model`` is changed and returned: its class is replaced by a subclass. Weights and their names
    do not change. A module that is adapted to the same inputs and outputs already stays as it is.

    Args:
        model: the module.
        inputs: for each argument of the module's forward pass, the number of bands that it gets, in
            the order of the image's bands; None if the module takes one image.
        outputs: names or numbers of the outputs to train; the first one is used in evaluation. None
            if the module returns one tensor.

    Raises:
        WrongEnds: the module is adapted to other inputs or outputs already.
    """
    ends = inputs and tuple(inputs), outputs and tuple(outputs)
    if (before := getattr(model, "distseg_ends", None)) is not None and before != ends:
        raise WrongEnds(
            f"this module was adapted to inputs {before[0]} and outputs {before[1]} before, but "
            f"now inputs are {ends[0]} and outputs {ends[1]}: give the same ones, or a new module"
        )
    if before is not None or (inputs is None and outputs is None):
        return model
    base = type(model)

    def reduce(self, protocol):
        # pickle cannot find a class that was made in a function.
        plain = base.__new__(base)
        plain.__dict__.update(self.__dict__)
        return joined, (plain, inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        made = base.forward(self, *_dealt(x, inputs))
        if outputs is None:
            return made
        measured = measured_outputs(self)
        if self.training or (measured and measured.in_evaluation):
            return _all(made, outputs, x, measured)
        return _first(made, outputs, x, measured)

    def parts(self, x: Tensor) -> list[Tensor]:
        return _parts(base.forward(self, *_dealt(x, inputs)), outputs, x)

    own = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "distseg_ends": ends,
        "distseg_parts": parts,
    }
    model.__class__ = type(base.__name__, (base,), own)
    return model


def main_part(model: nn.Module) -> tuple[int, int]:
    """Return (a, b) if the first a/b of the channels in training are the result of evaluation.

    The result is (1, 1) for a module that :func:`joined` has not changed, and for a module whose
    outputs are all returned in evaluation.
    """
    measured = measured_outputs(model)
    if measured is None:
        _, outputs = getattr(model, "distseg_ends", (None, None))
        return 1, len(outputs or ("",))
    return (1, 1) if measured.in_evaluation else (measured.channels[0], sum(measured.channels))


def measured_outputs(model: nn.Module) -> MeasuredOutputs | None:
    """Return what :func:`measure_outputs` has found about a module; None if it found nothing."""
    return getattr(model, "distseg_measured", None)


def measure_outputs(model: nn.Module, outline: Callable[[nn.Module], nn.Module], x: Tensor) -> None:
    """Find the number of channels of each output of a module, and let these numbers differ.

    If the module cannot compute ``x``, or if only some outputs have spatial dims, nothing is found
    and all outputs must have the same shape.

    Args:
        model: the module, changed by :func:`joined`.
        outline: function that returns a copy of a module on the meta device.
        x: an image on the meta device, (N, bands, *size).
    """

    def channels(training: bool) -> tuple[int, ...] | None:
        with suppress(Exception):  # user code may raise anything; later calls report it
            parts = outline(model).train(training).distseg_parts(x)
            if len({part.dim() for part in parts}) == 1:
                return tuple(part.shape[1] for part in parts)
        return None

    if (found := channels(training=True)) is not None:
        model.distseg_measured = MeasuredOutputs(found, channels(training=False) == found)


def _dealt(x: Tensor, inputs: Sequence[int] | None) -> Sequence[Tensor]:
    if inputs is None:
        return (x,)
    if sum(inputs) != x.shape[1]:
        raise WrongEnds(
            f"model.inputs is {list(inputs)}, together {sum(inputs)} bands, but the image has "
            f"{x.shape[1]}: let the numbers of model.inputs add up to {x.shape[1]}"
        )
    return x.split(list(inputs), 1)


def _first(made: Any, names: Sequence[str], x: Tensor, measured: MeasuredOutputs | None) -> Tensor:
    """Return the first output of a module in evaluation, resized to the image.

    Args:
        made: the result of the user's module, which may be this output alone.
        names: names or numbers of the outputs.
        x: the image (N, bands, *size).
        measured: the number of channels of each output; None if all have the same number.

    Raises:
        WrongEnds: the result has another number of channels than the first output in training.
    """
    alone = isinstance(made, Tensor) and made.dim() <= x.dim()
    found = made if alone else _picked(made, names[0], x)
    if measured is not None and found.shape[1] != measured.channels[0]:
        raise WrongEnds(
            f"in evaluation the network returns a tensor with {found.shape[1]} channels, but its "
            f"output {names[0]}, the first in model.outputs, has {measured.channels[0]} in "
            "training: name the output that it returns in evaluation first"
        )
    return _resized(found, x)


def _all(made: Any, names: Sequence[str], x: Tensor, measured: MeasuredOutputs | None) -> Tensor:
    """Return all outputs of a module, resized to the image and joined along the channels.

    Args:
        made: the result of the user's module.
        names: names or numbers of the outputs.
        x: the image (N, bands, *size).
        measured: the number of channels of each output; None if all must have the same number.
    """
    parts = _parts(made, names, x)
    for number, (name, part) in enumerate(zip(names, parts)):
        wanted = [*parts[0].shape]
        if measured is not None:
            wanted[1] = measured.channels[number]
        if [*part.shape] != wanted:
            only = "outputs with the same classes"
            if part.dim() != parts[0].dim():
                only = "maps, or only vectors of an image,"
            raise WrongEnds(
                f"output {name} of the network has shape {_shape(part)}, but {names[0]} has "
                f"{_shape(parts[0])}: name only {only} in model.outputs"
            )
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _parts(made: Any, names: Sequence[str], x: Tensor) -> list[Tensor]:
    """Return each named output of a module, resized to the image.

    Args:
        made: the result of the user's module.
        names: names or numbers of the outputs.
        x: the image (N, bands, *size).

    Raises:
        WrongEnds: the result is one tensor, or has no output of a name.
    """
    if isinstance(made, Tensor) and made.dim() <= x.dim():
        raise WrongEnds(
            f"model.outputs names {', '.join(names)}, but the network returns one tensor in "
            "training: leave model.outputs out"
        )
    return [_resized(_picked(made, name, x), x) for name in names]


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
        made = {str(key): one for key, one in made.items()}
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
