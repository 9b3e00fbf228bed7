"""A network as a list of layer calls, in an order in which they can run, each with the maps that it reads.

Two kinds of module are such a list: a flat ``nn.Sequential``, whose layers read what the one before makes, and skips by ``Stash`` and
``Pop``; and a :class:`Network`, whose layers may read anything made before. Maps are numbered: 0 is the image, call n makes map n + 1.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Callable, Iterable, Iterator, Mapping, Sequence, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from distseg.models.bands import answer_of, bands_of, dims_of
from distseg.models.layers import Pop, Stash, is_vector, outline, register, skip_store
from distseg.models.modified import hooked
from distseg.models.resize import LooksAtSize

IMAGE = "image"
UNUSED = "unused"
"""Name of the module that holds what no layer has."""
T = TypeVar("T")


class Network(nn.Module):
    """Layers that read any maps made before: (N, C, *size) -> (N, C', *size), or for whole images (N, C', 1, ...), the result of the last.

    Args:
        layers: by name, in an order in which they can run. A name with dots is a path, so that ``state_dict`` has it like that of nested modules.
        reads: of layers that read something else than what the one before makes: the names of what they are called with, ``image`` for the input.

    Attributes:
        multiple: of so many pixels are the sizes of its images.
        of_image: the result is a vector of each image.
        names: where it was captured (:mod:`distseg.models.capture.capture`): of its parameters and buffers, by name, in the user's module; those that differ.
        lines: where it was captured, the line of the user's code that each layer comes from.
        check: raises an error where the user's module would do something else with so many images of a size.
        fingerprint: where it was captured, a digest of the calls of the user's forward pass.
        dropouts: of its layers that are dropouts, by the number of the call of such a function in the user's forward pass.

    Raises:
        ValueError: a layer that reads what is not made before it, or several maps where it takes one.

    ::

        Network({"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, padding=1), "sum": Sum()}, reads={"sum": ("a", "b")})
    """

    def __init__(self, layers: Mapping[str, nn.Module], reads: Mapping[str, Sequence[str]] = {}):
        super().__init__()
        self.reads: dict[str, tuple[str, ...]] = {}
        self.multiple, self.of_image = 1, False
        self.names: dict[str, str] = {}
        self.dropouts: dict[int, Dropped] = {}
        self.lines: dict[str, str] = {}
        self.check: Callable[[Sequence[int], int], None] | None = None
        self.fingerprint = ""
        before = IMAGE
        for name, layer in layers.items():
            sources = tuple(reads.get(name, (before,)))
            missing = [source for source in sources if source != IMAGE and source not in self.reads]
            if missing or not sources:
                raise ValueError(
                    f"layer {name} reads {missing[0] if missing else 'nothing'}, but a layer reads what those before it make, or {IMAGE!r}"
                )
            if is_flat(layer) and len(sources) > 1:
                raise ValueError(
                    f"layer {name} is a {type(layer).__name__}, which takes one map, but reads {', '.join(sources)}: join them before it"
                )
            self._put(name, layer)
            self.reads[name] = sources
            before = name
        if unknown := [name for name in reads if name not in layers]:
            raise ValueError(f"reads names {unknown[0]!r}, which is none of the layers")

    def _put(self, name: str, layer: nn.Module) -> None:
        """At its path; what lies between are modules that only hold others."""
        *path, last = name.split(".")
        if taken := next(
            (part for part in (*path, last) if part in reserved() or name == IMAGE), None
        ):
            raise ValueError(
                f"layer {name} has the name of something that networks have themselves ({taken}): give it another name"
            )
        holder = self
        for depth, part in enumerate(path):
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder._modules[part]
            if ".".join(path[: depth + 1]) in self.reads:
                raise ValueError(
                    f"layer {name} lies inside layer {'.'.join(path[: depth + 1])}: give it another name"
                )
        if last in holder._modules:
            raise ValueError(
                f"layer {name} has the name of a group of others: give it another name"
            )
        holder.add_module(last, layer)

    def cells_read(self, name: str) -> tuple[str, ...]:
        """Return what a layer reads, without the map of which it looks at the size alone."""
        return (
            self.reads[name][:-1]
            if isinstance(self.get_submodule(name), LooksAtSize)
            else self.reads[name]
        )

    def hold_unused(self, tensors: Mapping[str, Tensor]) -> None:
        """Parameters and buffers that no layer has: an optimizer may let them decay."""
        if tensors:
            self.add_module(UNUSED, nn.Module())
            register(self.get_submodule(UNUSED), tensors)

    def _apply(self, fn: Callable, *args, **kwargs) -> "Network":
        """Move or cast all tensors, as PyTorch does, and keep buffers shared that several layers share."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((module, name))
        made = super()._apply(fn, *args, **kwargs)
        for (first, own), *others in places.values():
            for module, name in others:
                module._buffers[name] = first._buffers[own]
        return made

    def forward(self, x: Tensor) -> Tensor:
        maps = {IMAGE: x}
        for name, reads in self.reads.items():
            x = maps[name] = self.get_submodule(name)(*(maps[source] for source in reads))
        return x


@cache
def reserved() -> frozenset[str]:
    """Return the names that a part of a layer's name can't have, as a network, or the module that holds some of its layers, has them itself."""
    return frozenset((*dir(Network({})), UNUSED))


@dataclass(frozen=True)
class Dropped:
    """The layer that a call of a dropout function is; ``last``: where it is called the channels come last."""

    layer: str
    last: bool


@dataclass(frozen=True)
class Call:
    """A layer and the maps that it is called with."""

    name: str
    layer: nn.Module
    inputs: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The maps of which it looks at cells: not the one that only tells a size."""
        return self.inputs if self.like is None else self.inputs[:-1]

    @property
    def like(self) -> int | None:
        """The map whose size alone it looks at, the last of those that it is called with."""
        return self.inputs[-1] if isinstance(self.layer, LooksAtSize) else None


def is_sequential(model: nn.Module) -> bool:
    """Whether its forward pass is that of nn.Sequential: one child after the other, and nothing else."""
    kind = type(model)
    plain = all(
        getattr(kind, name, None) is getattr(nn.Sequential, name)
        for name in ("forward", "__call__", "__iter__")
    )
    return plain and "forward" not in vars(model) and not hooked(model)


def is_flat(model: nn.Module) -> bool:
    """Whether a network is a list of layer calls."""
    return is_sequential(model) or type(model) is Network and not hooked(model)


def children_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and layer of what a flat network calls, in order."""
    if isinstance(model, Network):
        return [(name, model.get_submodule(name)) for name in model.reads]
    return list(model._modules.items())  # named_children would leave out a layer's second place


refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Why modules were not captured (:func:`distseg.models.capture.capture.as_network`)."""
unbounded: WeakSet[nn.Module] = WeakSet()
"""Modules among these that compute each place of all of the image, which no halo is enough for."""
inexact: WeakSet[nn.Module] = WeakSet()
"""Modules that no way of computing them gives exactly: they draw random numbers, or passes leave something behind."""


def fingerprint_of(model: nn.Module) -> str:
    """Return a digest of what a network computes, which is equal on ranks that compute the same."""
    return getattr(model, "fingerprint", "") or hashlib.sha256(str(model).encode()).hexdigest()[:12]


def is_followed(model: nn.Module) -> bool:
    """Return True if the layers of a network are known."""
    return is_flat(model) and model not in refusals


def not_flat(model: nn.Module) -> str:
    """Why a model is no list of layer calls, and what to do."""
    if reason := refusals.get(model):
        return f"what it computes can't be followed: {reason}"
    return f"it is a {type(model).__name__}{' with hooks' * hooked(model)}, which is no list of layers: write it as a flat nn.Sequential or a distseg.Network"


def calls_of(model: nn.Module) -> list[Call]:
    """Of a flat network, and of flat ones inside it, in order of execution.

    Raises:
        ValueError: the model is not flat, so it can't be cut; or a skip that is popped before it is stashed, twice, or never, or overwritten
            in place while it waits.
    """
    layers = flat_layers(model)
    found: list[Call] = []
    stashed: dict[str, int] = {}
    _collect(model, 0, iter(layers), found, stashed)
    if stashed:
        raise ValueError(
            f"stash({next(iter(stashed))!r}) is never popped: remove it from the model"
        )
    _check_in_place(found)
    return found


def _collect(
    model: nn.Module,
    at: int,
    layers: Iterator[tuple[str, nn.Module]],
    found: list[Call],
    stashed: dict[str, int],
) -> int:
    """Add the calls of the next ``layers``, which are those of a flat network that is called with map ``at``; returns the map that it makes."""
    maps = {IMAGE: at}
    for child, inner in children_of(model):
        sources = model.reads[child] if isinstance(model, Network) else ()
        inputs = tuple(maps[source] for source in sources) or (at,)
        if is_flat(inner):
            at = _collect(inner, inputs[0], layers, found, stashed)
        else:
            name, layer = next(layers)
            found.append(
                Call(name, layer, inputs + _skipped(layer, len(found), inputs[0], stashed))
            )
            at = len(found)
        maps[child] = at
    return at


def _skipped(
    layer: nn.Module, position: int, source: int, stashed: dict[str, int]
) -> tuple[int, ...]:
    """What a layer reads that was put aside; ``source``: the map at hand."""
    if isinstance(layer, Stash):
        if layer.name in stashed:
            raise ValueError(
                f"stash({layer.name!r}) at layer {position} comes before the pop of the one at layer {stashed[layer.name]}: give it a name of its own"
            )
        stashed[layer.name] = source
    elif isinstance(layer, Pop):
        if layer.name not in stashed:
            raise ValueError(
                f"pop({layer.name!r}) at layer {position} comes before any stash({layer.name!r}) in this model"
            )
        return (stashed.pop(layer.name),)
    return ()


def _check_in_place(calls: Sequence[Call]) -> None:
    """Refuse layers that overwrite a map which others read too: what these see would depend on what runs first."""
    same = list(range(len(calls) + 1))  # the map whose memory each map is
    readers: dict[int, int] = {}
    for number, call in enumerate(calls):
        if isinstance(call.layer, (nn.Identity, Stash, nn.modules.dropout._DropoutNd)):
            same[number + 1] = same[call.inputs[0]]
        else:
            for source in call.reads:
                readers[same[source]] = readers.get(same[source], 0) + 1
    for number, call in enumerate(calls):
        if getattr(call.layer, "inplace", False) and readers.get(same[call.inputs[0]], 0) > 1:
            raise ValueError(
                f"layer {number} ({type(call.layer).__name__}) overwrites in place what {_name_of(calls, same[call.inputs[0]])} has put aside, so the skip depends on what runs in "
                "between: put the stash behind it, which gives PyTorch's result, or set inplace=False"
            )


def _name_of(calls: Sequence[Call], source: int) -> str:
    stash = next(
        (
            call.layer
            for call in calls
            if isinstance(call.layer, Stash) and call.inputs == (source,)
        ),
        None,
    )
    return (
        f"stash({stash.name!r})"
        if stash
        else f"layer {calls[source - 1].name}"
        if source
        else "the image"
    )


def user_names(named: Iterable[tuple[str, T]], model: nn.Module) -> dict[str, T]:
    """Of a network that was captured the names in the user's module."""
    names = getattr(model, "names", {})
    return {names.get(name, name): x for name, x in named}


def check_calls(model: nn.Module, size: Sequence[int], images: int = 1) -> None:
    """Refuse images with which a captured network does something else than it was seen to do, alone or so many in a batch.

    Raises:
        ValueError: naming what differs.
    """
    if (check := getattr(model, "check", None)) is not None:
        try:
            check(tuple(size), images)
        except ValueError as e:
            raise ValueError(
                f"with {images} image{'s' * (images > 1)} of {'x'.join(map(str, size))} pixels this network does something else than with others, so it can't be followed: {e}"
            ) from None


def check_size(model: nn.Module, size: Sequence[int], what: str = "an image") -> None:
    """Refuse images of a size that a captured network does not take.

    Raises:
        ValueError: naming both.
    """
    multiple = getattr(model, "multiple", 1)
    if any(n % multiple for n in size):
        raise ValueError(
            f"this network takes images whose sizes are multiples of {multiple} pixels, and {what} has {'x'.join(map(str, size))}: set model.pad to {multiple} "
            "(from Python distseg.padded), cut the images, or set data.crop to such a size"
        )


def flat_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and layer of a flat network's calls in order, whatever they read.

    Raises:
        ValueError: the model is not flat.
    """
    if not is_flat(model):
        raise ValueError(
            f"this model can't be cut into pipeline stages, as {not_flat(model)}; or set mesh.stages to 1"
        )
    found: list[tuple[str, nn.Module]] = []
    for name, layer in children_of(model):
        found += (
            [(f"{name}.{inner}", l) for inner, l in flat_layers(layer)]
            if is_flat(layer)
            else [(name, layer)]
        )
    return found


def of_image(model: nn.Module, size: Sequence[int] | None = None) -> bool:
    """Whether what a network, plain or captured, makes of an image is a vector, as for classification, as far as that can be worked out; ``size``: :func:`answer_of`."""
    if isinstance(model, Network):
        return model.of_image
    made = answer_of(model, size)
    return made is not None and math.prod(made[2:]) == 1


@torch.no_grad()
def channels_of_maps(model: nn.Module) -> list[int]:
    """The channels of the maps of a flat network; 0 of a vector of the image, which takes no memory to speak of."""
    dtype = next(model.parameters()).dtype
    maps = [torch.empty(1, bands_of(model), *(1024,) * dims_of(model), device="meta", dtype=dtype)]
    with skip_store({}):
        for call in calls_of(outline(model)):
            maps.append(call.layer(*(maps[source] for source in call.inputs)))
    return [0 if is_vector(x, maps[0].shape[2:]) else x.shape[1] for x in maps]
