"""Replacements for the dropouts and norms of a module while its passes are checked.

Dropouts return their input, and norms restore their running statistics, because distributed layers
replace both in training. If a pass still draws random numbers, or updates the statistics, other
code of the module does it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from distseg.models.capture.trace import EVALUATED_BEHIND, Hidden, itself
from distseg.models.layers import RANKS_OF_DROPOUTS, DropImage
from distseg.models.passes import user_line

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def guarded(
    model: nn.Module, images: int, moves: Collection[str] = (), apart: bool = False
) -> nn.Module:
    """Replace ``forward`` of all dropouts and norms in a module, in place; return the module.

    The module can then be checked for other random numbers and changes of state. Dropouts return
    their input. Norms restore their running statistics after the call. Layers for stochastic depth
    (:class:`distseg.models.layers.DropImage`) keep every image.

    Args:
        images: number of images in a pass. A dropout refuses an input with another length of dim 0;
            0 accepts any length.
        moves: names of the norms that update their running statistics nevertheless.
        apart: True to make batch norms return their input, so that images do not influence each
            other.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, DropImage):
            layer.p = 0.0
        elif isinstance(layer, _DROPOUTS):
            layer.forward = partial(_handed_on, layer, name, images)
        elif apart and isinstance(layer, _NORMS[0]):
            layer.forward = itself
        elif (
            isinstance(layer, _NORMS)
            and layer.track_running_stats
            and layer.running_mean is not None
            and name not in moves
        ):
            layer.forward = partial(_unmoved, layer, name, layer.forward)
    return model


def moving_norms(model: nn.Module) -> Iterator[str]:
    """Yield the names of the norms that would update their running statistics in a pass.

    These are the norms in training mode whose forward :func:`guarded` replaced.
    """
    return (
        name
        for name, layer in model.named_modules()
        if isinstance(layer, _NORMS) and "forward" in vars(layer) and layer.training
    )


class Readings(TorchFunctionMode):
    """``TorchFunctionMode`` that stores in ``first`` the first call that reads running statistics.

    ``first`` is a description of the call, such as its name and line; None if there was no such
    call. Calls of ``F.batch_norm`` are ignored.

    Args:
        model: the module that has the norms.
        norms: names of the norms whose running statistics are watched.
    """

    def __init__(self, model: nn.Module, norms: Collection[str]):
        super().__init__()
        self.first: str | None = None
        self._running = {
            id(buffer): f"{name}.{own}"
            for name in norms
            for own, buffer in model.get_submodule(name).named_buffers(recurse=False)
        }

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if self.first is None and function is not F.batch_norm:
            read = next(
                (
                    self._running[id(x)]
                    for x in tree_leaves((args, kwargs))
                    if id(x) in self._running and not x.dtype == torch.long
                ),
                None,
            )
            self.first = (
                read
                and f"{getattr(function, '__name__', 'a function')} ({user_line()}) reads {read}"
            )
        return function(*args, **kwargs or {})


def _handed_on(layer: nn.Module, name: str, images: int, x: Tensor) -> Tensor:
    """Return the input of a dropout layer unchanged; refuse it if it is no batch of the images.

    This function replaces ``forward`` of dropout layers while a module is checked.

    Args:
        layer: the dropout layer.
        name: its name in the network.
        images: the number of images in the batch; 0 if it is not known.
        x: the input of the layer.

    Raises:
        Hidden: dims of the input are not those of a batch of images.
    """
    if not (layer.training and layer.p):
        return x
    called = f"{name} ({user_line()})"
    if x.dim() not in RANKS_OF_DROPOUTS.get(type(layer).__name__.lower(), (x.dim(),)):
        raise Hidden(
            f"{called} is an nn.{type(layer).__name__}, and is given a tensor of {x.dim()} "
            f"dims, which PyTorch takes for one image without a batch dim: use the dropout layer "
            f"for inputs of this number of dims, such as nn.Dropout2d for (N, C, H, W)"
        )
    if x.dim() < 2 or images and len(x) != images:
        raise Hidden(
            f"{called} applies dropout to a tensor of {'x'.join(map(str, x.shape))}, but masks "
            f"belong to images, so the first dim must be the batch of {images} images: apply "
            f"dropout before images are cut into parts or after they are joined, or set its p to 0"
        )
    return x


def begin_pass(model: nn.Module) -> None:
    """Forget which norms were called in training mode; call this before each forward pass.

    These norms are remembered because a pass that calls a norm in training mode, and then in
    evaluation mode, is refused.
    """
    for layer in model.modules():
        _called.discard(layer)


# Norms that were called in training mode. They are not attributes of the module, because its
# attributes are being compared.
_called: WeakSet[nn.Module] = WeakSet()


def _unmoved(layer: nn.Module, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a norm layer, and undo its update of running statistics if it is in training mode.

    Raises:
        Hidden: the norm is called in evaluation mode after a call in training mode.
    """
    if not layer.training:
        if layer in _called:
            raise Hidden(f"{name} ({user_line()}) {EVALUATED_BEHIND}")
        return forward(x)
    _called.add(layer)
    before = {own: buffer.clone() for own, buffer in layer.named_buffers(recurse=False)}
    made = forward(x)
    with torch.no_grad():
        for own, buffer in before.items():
            getattr(layer, own).copy_(buffer)
    return made
