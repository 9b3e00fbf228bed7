"""The layers that PyTorch lacks for a flat U-Net: skips as a pair of layers, ``Stash(name)`` and ``Pop(name)`` or ``Add(name)``.

A flat ``nn.Sequential`` can be cut between any two layers, which is what pipelines and the joint execution of tiles
need. A skip then is a tensor put aside under a name by one layer and taken up by a later one. In a plain forward pass
they meet in a store of the current thread; an executor that runs several tiles or stages gives each its own with
:func:`skip_store`.
"""

from __future__ import annotations

import copy
import math
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from distseg.altered import genuine, hooked
from distseg.geometry.receptive import POINTWISE

_local = threading.local()


def _store() -> dict[str, Tensor]:
    if not hasattr(_local, "store"):
        _local.store = {}
    return _local.store


@contextmanager
def skip_store(store: dict[str, Tensor]):
    """Layers inside stash to and pop from ``store``."""
    outer = _store()
    _local.store = store
    try:
        yield store
    finally:
        _local.store = outer


class Stash(nn.Module):
    """Put the input aside under ``name`` and pass it on."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        _store()[self.name] = x
        return x

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """Concatenate the skip ``name`` with the input: (N, C1, ...), (N, C2, ...) -> (N, C1 + C2, ...).

    After ceil-mode pooling and x2 up-sampling the input may be one pixel longer than the skip (odd sizes): it is cut.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        try:
            skip = _store().pop(self.name)
        except KeyError:
            raise ValueError(f"pop({self.name!r}) comes before any stash({self.name!r}) in this model") from None
        return self.joined(skip, cut_to(x, skip))

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return torch.cat((skip, x), 1)

    def extra_repr(self) -> str:
        return repr(self.name)


class Add(Pop):
    """Add the skip ``name`` to the input: (N, C, ...), (N, C, ...) -> (N, C, ...). As after a :class:`Pop`, a longer input is cut."""

    @staticmethod
    def joined(skip: Tensor, x: Tensor) -> Tensor:
        return skip + x


@dataclass(frozen=True)
class Skip:
    """The layers, by position, between which the skip ``name`` waits."""

    name: str
    stash: int
    pop: int


def skips_of(layers: Sequence[nn.Module]) -> list[Skip]:
    """The skips of a flat model in order of their stash.

    Raises:
        ValueError: a skip that is popped before it is stashed, twice, or never, or overwritten in place while it waits.
    """
    open_: dict[str, int] = {}
    found, same = [], None  # the skip that is the very tensor at hand
    for position, layer in enumerate(layers):
        if same is not None and getattr(layer, "inplace", False):
            raise ValueError(
                f"layer {position} ({type(layer).__name__}) overwrites in place what stash({same!r}) has put aside, so the skip depends on what runs in between: put the "
                "stash behind it, which gives PyTorch's result, or set inplace=False"
            )
        same = layer.name if isinstance(layer, Stash) else same if isinstance(layer, (nn.Identity, nn.modules.dropout._DropoutNd)) else None
        if isinstance(layer, Stash):
            if layer.name in open_:
                raise ValueError(f"stash({layer.name!r}) at layer {position} comes before the pop of the one at layer {open_[layer.name]}: give it a name of its own")
            open_[layer.name] = position
        elif isinstance(layer, Pop):
            if layer.name not in open_:
                raise ValueError(f"pop({layer.name!r}) at layer {position} comes before any stash({layer.name!r}) in this model")
            found.append(Skip(layer.name, open_.pop(layer.name), position))
    if open_:
        raise ValueError(f"stash({next(iter(open_))!r}) is never popped: remove it from the model")
    return sorted(found, key=lambda skip: skip.stash)


def is_sequential(model: nn.Module) -> bool:
    """Whether its forward pass is that of nn.Sequential: one child after the other, and nothing else."""
    return type(model).forward is nn.Sequential.forward and not hooked(model)


def flat_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and layer of a Sequential, and of Sequentials inside it, in order of execution.

    Raises:
        ValueError: the model is not a Sequential, so it can't be cut.
    """
    if not is_sequential(model):
        what = f"a {type(model).__name__}{' with hooks' * hooked(model)}"
        raise ValueError(f"only a flat nn.Sequential can be cut into pipeline stages, but this model is {what}: flatten it, or set mesh.stages to 1")
    found: list[tuple[str, nn.Module]] = []
    for name, layer in model._modules.items():  # named_children would leave out a layer's second place
        if is_sequential(layer):
            found += [(f"{name}.{inner}", l) for inner, l in flat_layers(layer)]
        else:
            found.append((name, layer))
    return found


def outline(model: nn.Module) -> nn.Module:
    """A copy on the meta device, without weights, which works out the sizes of maps and nothing else.

    Norms and activations keep them, and skips and resized maps are worked out by arithmetic: PyTorch's own kernels of these for that device are
    Python, and import torch._dynamo, 300 modules, a second or two of each process.
    """
    parameters = {id(p): nn.Parameter(_weightless(p), p.requires_grad) for p in model.parameters()}
    copied = _copied(model, parameters | {id(b): _weightless(b) for b in model.buffers()}).eval()
    for layer in copied.modules():
        if isinstance(layer, Pop):
            layer.joined = partial(_joined, layer.joined)
        elif type(layer) is nn.Upsample:
            layer.forward = partial(_resized, layer)
        elif genuine(layer, POINTWISE):
            layer.forward = lambda input: input
    return copied


def _copied(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A deep copy, in which ``memo`` has the tensors; of PyTorch's own layers and ours, which hold no other modules than their children, several times as fast as copy's."""
    if id(module) in memo:
        return memo[id(module)]
    if not type(module).__module__.startswith(("torch.", "distseg.models.")) or parametrize.is_parametrized(module) or hooked(module):
        return copy.deepcopy(module, memo)
    memo[id(module)] = twin = type(module).__new__(type(module))
    twin.__dict__.update({name: value.copy() if isinstance(value, (dict, set)) else value for name, value in vars(module).items()})
    for field in ("_parameters", "_buffers"):
        twin.__dict__[field].update({name: memo[id(x)] for name, x in getattr(module, field).items() if x is not None})
    twin.__dict__["_modules"].update({name: _copied(child, memo) for name, child in module._modules.items() if child is not None})
    return twin


def _weightless(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _joined(join: Callable, skip: Tensor, x: Tensor) -> Tensor:
    """What a Pop or an Add makes of two maps."""
    channels = x.shape[1] + (skip.shape[1] if join is Pop.joined else 0)
    return torch.empty(x.shape[0], channels, *x.shape[2:], dtype=x.dtype, device="meta")


def _resized(layer: nn.Upsample, x: Tensor) -> Tensor:
    wanted, dims = layer.size if layer.size is not None else layer.scale_factor, x.dim() - 2
    each = wanted if isinstance(wanted, tuple) else (wanted,) * dims
    size = each if layer.size is not None else (math.floor(n * by) for n, by in zip(x.shape[2:], each))
    return torch.empty(*x.shape[:2], *size, dtype=x.dtype, device="meta")


def channels_of(model: nn.Module) -> tuple[int, int]:
    """(in, out) channels of a network: those of its first convolution, and those of its result, as far as that can be worked out."""
    convs = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    if not convs:
        raise ValueError("this model has no convolution layer: its channels can not be told")
    x = torch.empty(1, convs[0].in_channels, *(256,) * (convs[0].weight.dim() - 2), device="meta", dtype=convs[0].weight.dtype)
    with suppress(Exception), torch.no_grad(), skip_store({}):  # a module of the user's may want another size, or numbers
        return x.shape[1], outline(model)(x).shape[1]
    return x.shape[1], convs[-1].out_channels


def first_convolution(model: nn.Module) -> nn.Module:
    """The one that tells a network's dims and channels.

    Raises:
        ValueError: there is none.
    """
    found = next((m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)), None)
    if found is None:
        raise ValueError("this model has no convolution layer to read its dims from")
    return found


def channels_of_maps(model: nn.Module, until: int | None = None) -> list[int]:
    """The channels of the feature map before each layer of a flat model, up to layer ``until``, by default the result."""
    layers = [layer for _, layer in flat_layers(outline(model))]
    first = first_convolution(model)
    x = torch.empty(1, first.in_channels, *(1024,) * (first.weight.dim() - 2), device="meta", dtype=first.weight.dtype)
    found = [x.shape[1]]
    with torch.no_grad(), skip_store({}):
        for layer in layers[:until]:
            x = layer(x)
            found.append(x.shape[1])
    return found


def cut_to(x: Tensor, like: Tensor) -> Tensor:
    """The part of ``x`` that has the spatial size of ``like``."""
    if x.shape[2:] == like.shape[2:]:
        return x
    return x[(slice(None), slice(None), *(slice(n) for n in like.shape[2:]))]
