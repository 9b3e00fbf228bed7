"""A network as a list of layer calls, each with the feature maps that it reads.

Two kinds of module are such lists, and are called *flat*. In an ``nn.Sequential`` each layer reads
the result of the layer before it, and skips are written with ``Stash`` and ``Pop``. In a
:class:`Network` a layer may read the result of any earlier layer. Feature maps are numbered: map 0
is the image, and call n makes map n + 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from distseg.models.bands import answer_of, bands_of, dims_of
from distseg.models.layers import Pop, Stash, is_vector, outline, register, skip_store
from distseg.models.modified import hooked
from distseg.models.resize import LooksAtSize

IMAGE = "image"
UNUSED = "unused"
"""Name of the module that holds parameters and buffers which no layer uses."""
T = TypeVar("T")


class Network(nn.Module):
    """A network whose layers may read the results of any earlier layers.

    Shapes are (N, C, *size) -> (N, C', *size), or (N, C', 1, ...) for a network of whole images.
    The result is that of the last layer.

    Args:
        layers: the layers by name, in an order in which they can run. A name with dots is a path,
            so ``state_dict`` names its weights like those of nested modules.
        reads: for each layer that does not read just the result of the layer before it, the names
            of the layers whose results it reads; ``image`` stands for the network's input.

    Attributes:
        multiple: sizes of images must be multiples of this number of pixels.
        of_image: True if the result is a vector of each image.

    Attributes of a captured network (:mod:`distseg.models.capture.capture`):
        names: the names that parameters and buffers have in the user's module, if they differ.
        lines: the line of user code that each layer comes from.
        check: a function ``(size, images)`` that raises an error if the user's module would compute
            something else with this many images of this size.
        fingerprint: a digest of the calls of the user's forward pass.
        dropouts: the dropout layers. The key is the index of the dropout call in the user's
            forward pass.

    Raises:
        ValueError: a layer reads a result that no earlier layer makes, or reads several maps
            although it takes one.

    Example::

        Network(
            {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(8, 8, 1), "sum": Sum()},
            reads={"sum": ("a", "b")},
        )
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
                    f"layer {name} reads {missing[0] if missing else 'nothing'}, but a layer can "
                    f"read only the results of earlier layers, or {IMAGE!r} (the network's input): "
                    f"correct reads[{name!r}], or change the order of the layers"
                )
            if is_flat(layer) and len(sources) > 1:
                raise ValueError(
                    f"layer {name} is a {type(layer).__name__}, which takes one feature map, but "
                    f"it reads {', '.join(sources)}: join them before it, with a layer Cat or Sum"
                )
            self._put(name, layer)
            self.reads[name] = sources
            before = name
        if unknown := [name for name in reads if name not in layers]:
            raise ValueError(
                f"the argument reads has the key {unknown[0]!r}, which is not among the layers: "
                "correct this name, or add a layer of this name"
            )

    def _put(self, name: str, layer: nn.Module) -> None:
        """Add a layer as a submodule. With the name ``a.b``, it becomes the child ``b`` of ``a``.

        Raises:
            ValueError: a part of the name is one of :func:`reserved`, the name is ``image``, or one
                of two layers would be part of the other, as with the names ``a`` and ``a.b``.
        """
        *path, last = name.split(".")
        if taken := next(
            (part for part in (*path, last) if part in reserved() or name == IMAGE), None
        ):
            raise ValueError(
                f"the name of layer {name} contains {taken}, which networks use themselves (an "
                "attribute of distseg.Network, or the name of its input): give the layer another "
                "name"
            )
        holder = self
        for depth, part in enumerate(path):
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder._modules[part]
            if ".".join(path[: depth + 1]) in self.reads:
                raise ValueError(
                    f"the name of layer {name} begins with the name of layer "
                    f"{'.'.join(path[: depth + 1])}, as if it were part of that layer: rename one "
                    f"of them"
                )
        if last in holder._modules:
            raise ValueError(
                f"the names of other layers begin with {name}., as if they were parts of layer "
                f"{name}: give layer {name} another name"
            )
        holder.add_module(last, layer)

    def cells_read(self, name: str) -> tuple[str, ...]:
        """Return the names of the layers whose results the layer ``name`` reads.

        ``image`` stands for the network's input. If the layer reads only the size of a result, as a
        resize to the size of another map does, that result is left out.
        """
        reads = self.reads[name]
        return reads[:-1] if isinstance(self.get_submodule(name), LooksAtSize) else reads

    def hold_unused(self, tensors: Mapping[str, Tensor]) -> None:
        """Register in the network the user's parameters and buffers that no layer uses.

        These parameters must not get lost, because an optimizer may apply weight decay to them.
        """
        if tensors:
            self.add_module(UNUSED, nn.Module())
            register(self.get_submodule(UNUSED), tensors)

    def _apply(self, fn: Callable, *args, **kwargs) -> Network:
        """Move or cast all tensors as PyTorch does; layers that share a buffer still share it."""
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
    """Return the names that no part of a layer's name may be, such as ``a`` in ``a.b``.

    These are the names of the attributes and methods of :class:`Network`.
    """
    return frozenset((*dir(Network({})), UNUSED))


@dataclass(frozen=True)
class Dropped:
    """Dropout layer of a captured network that stands for a dropout call in the user's code.

    Attributes:
        layer: the name of the layer.
        last: True if channels are the last dim of the tensor that the call takes.
    """

    layer: str
    last: bool


@dataclass(frozen=True)
class Call:
    """A layer, its name, and the indices of the feature maps with which it is called (``inputs``).

    Map 0 is the image, and call n of a network makes map n + 1.
    """

    name: str
    layer: nn.Module
    inputs: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of the input maps whose values the layer reads: all but the map ``like``."""
        return self.inputs if self.like is None else self.inputs[:-1]

    @property
    def like(self) -> int | None:
        """Index of the last input map if the layer reads only that map's size; else None."""
        return self.inputs[-1] if isinstance(self.layer, LooksAtSize) else None


def is_sequential(model: nn.Module) -> bool:
    """Return True if the forward pass of a module is that of an unmodified nn.Sequential."""
    kind = type(model)
    plain = all(
        getattr(kind, name, None) is getattr(nn.Sequential, name)
        for name in ("forward", "__call__", "__iter__")
    )
    return plain and "forward" not in vars(model) and not hooked(model)


def is_flat(model: nn.Module) -> bool:
    """Return True if a network is an unmodified ``nn.Sequential`` or :class:`Network`.

    Such a network is called flat: distseg knows which layers it calls and what each of them reads.
    """
    return is_sequential(model) or type(model) is Network and not hooked(model)


def children_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, layer) for each layer of an ``nn.Sequential`` or :class:`Network`, in order.

    A layer that is itself an ``nn.Sequential`` or a :class:`Network` gives one entry, whereas
    :func:`flat_layers` replaces it by its layers.
    """
    if isinstance(model, Network):
        return [(name, model.get_submodule(name)) for name in model.reads]
    return list(model._modules.items())  # named_children skips repeated layers


refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Reasons why modules were not captured (:func:`distseg.models.capture.capture.as_network`)."""
unbounded: WeakSet[nn.Module] = WeakSet()
"""Modules in ``refusals`` whose every output pixel depends on the whole image.

No halo suffices for them.
"""
inexact: WeakSet[nn.Module] = WeakSet()
"""Modules that cannot be computed exactly in any way.

They draw random numbers, or a pass changes the state that the next pass uses.
"""


def fingerprint_of(model: nn.Module) -> str:
    """Return a short hash of a network's layer calls, by which ranks check that theirs are equal.

    It does not depend on the values of the weights.
    """
    return getattr(model, "fingerprint", "") or hashlib.sha256(str(model).encode()).hexdigest()[:12]


def is_followed(model: nn.Module) -> bool:
    """Return True if distseg knows a network's layer calls, so that it can be split.

    Return False if the network is no list of layer calls, or if :data:`refusals` has a reason why
    distseg cannot split it.
    """
    return is_flat(model) and model not in refusals


def not_flat(model: nn.Module) -> str:
    """Return the reason why distseg does not know a model's layer calls, and how to fix it."""
    if reason := refusals.get(model):
        return f"what it computes cannot be followed: {reason}"
    return (
        f"it is a {type(model).__name__}{' with hooks' * hooked(model)}, whose layer calls distseg "
        f"does not know: write it as an nn.Sequential of layers or a distseg.Network"
    )


def calls_of(model: nn.Module) -> list[Call]:
    """Return the layer calls of an ``nn.Sequential`` or :class:`Network`, in order of execution.

    A layer that is itself an ``nn.Sequential`` or a :class:`Network` is replaced by its calls.

    Raises:
        ValueError: the model is not a list of layer calls, so it cannot be cut. Or a skip is popped
            twice, never, or before it is stashed, or is overwritten in place before it is popped.
    """
    layers = flat_layers(model)
    found: list[Call] = []
    stashed: dict[str, int] = {}
    _collect(model, 0, iter(layers), found, stashed)
    if stashed:
        raise ValueError(
            f"stash({next(iter(stashed))!r}) is never popped: remove this Stash layer from the "
            "model, or add a Pop or Add layer of the same name"
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
    """Append the layer calls of ``model`` to ``found``.

    Return the index of the map that the last call of ``model`` makes.

    Args:
        model: a list of layer calls. It is the whole network or a part of it.
        at: the index of the map with which ``model`` is called.
        layers: the name and the layer of each remaining call of the whole network. The iterator
            moves on by the calls of ``model``.
        found: the calls so far. This list is updated.
        stashed: the indices of the maps that are stashed, by stash name. This dict is updated.
    """
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
    """Handle the two layers of a skip: record the map of a stash, or return the map of a pop.

    Args:
        layer: a stash, a pop, or any other layer.
        position: the index of the layer, for error messages.
        source: the index of the map with which the layer is called.
        stashed: the indices of the maps that are stashed, by stash name. This dict is updated.

    Returns:
        A tuple: the index of the skip's map for a pop, empty for all other layers.

    Raises:
        ValueError: two stashes have the same name, or a pop comes before its stash.
    """
    if isinstance(layer, Stash):
        if layer.name in stashed:
            raise ValueError(
                f"stash({layer.name!r}) at layer {position} has the same name as the stash at "
                f"layer {stashed[layer.name]}, which is not popped yet: give it another name"
            )
        stashed[layer.name] = source
    elif isinstance(layer, Pop):
        if layer.name not in stashed:
            raise ValueError(
                f"pop({layer.name!r}) at layer {position} comes before any stash({layer.name!r}) "
                f"in this model: put a Stash({layer.name!r}) before it"
            )
        return (stashed.pop(layer.name),)
    return ()


def _check_in_place(calls: Sequence[Call]) -> None:
    """Refuse layers that overwrite in place a map which other layers read too.

    The numbers that the other layers read would depend on the order of execution.

    Raises:
        ValueError: a layer overwrites such a map. The message names it and how to fix it.
    """
    same = list(range(len(calls) + 1))  # for each map the map whose memory it shares
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
                f"layer {number} ({type(call.layer).__name__}) overwrites in place the feature "
                f"map of {_name_of(calls, same[call.inputs[0]])}, which other layers read too, so "
                "their results depend on the order of execution: set inplace=False, or let the "
                "other layers read the result of this layer (put the Stash after it), which gives "
                "PyTorch's result"
            )


def _name_of(calls: Sequence[Call], source: int) -> str:
    for call in calls:
        if isinstance(call.layer, Stash) and call.inputs == (source,):
            return f"stash({call.layer.name!r})"
    return f"layer {calls[source - 1].name}" if source else "the image"


def user_names(named: Iterable[tuple[str, T]], model: nn.Module) -> dict[str, T]:
    """Return tensors by the names that they have in the user's module (:func:`user_name`).

    Args:
        named: pairs (name in the network, tensor), such as ``model.named_parameters()``.
        model: the network.
    """
    return {user_name(name, model): x for name, x in named}


def user_name(name: str, model: nn.Module) -> str:
    """Return the name that a parameter or buffer of a network has in the user's module.

    The names differ, for example, if the module calls a layer several times: the network then has a
    layer for each call.

    Args:
        name: the name in the network ``model``, as in its ``state_dict``.
        model: the network; if it is no :class:`Network`, the name is returned unchanged.
    """
    return getattr(model, "names", {}).get(name, name)


def check_calls(model: nn.Module, size: Sequence[int], images: int = 1) -> None:
    """Refuse images for which the user's module makes other layer calls than were captured.

    A module that was not captured is not checked.

    Args:
        model: the network.
        size: the size of the images in pixels.
        images: the number of images in the batch with which the module is called.

    Raises:
        ValueError: the calls differ. The message names the difference.
    """
    if (check := getattr(model, "check", None)) is not None:
        try:
            check(tuple(size), images)
        except ValueError as e:
            raise ValueError(
                f"with {images} image{'s' * (images > 1)} of {'x'.join(map(str, size))} pixels "
                "this network does something else than with other images, so distseg cannot "
                f"compute it in parts: {e}"
            ) from None


def check_size(model: nn.Module, size: Sequence[int], what: str = "an image") -> None:
    """Refuse a size of images that a captured network does not take.

    ``what`` names the images in the error message.

    Raises:
        ValueError: the size along some dim is no multiple of ``model.multiple``. The message names
            both numbers.
    """
    multiple = getattr(model, "multiple", 1)
    if any(n % multiple for n in size):
        raise ValueError(
            f"this network takes images whose sizes are multiples of {multiple} pixels, but "
            f"{what} has {'x'.join(map(str, size))}: set model.pad to {multiple} (from Python "
            "distseg.padded), cut the images, or set data.crop to such a size"
        )


def flat_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, layer) for each layer call of an ``nn.Sequential`` or :class:`Network`.

    A layer that is itself an ``nn.Sequential`` or a :class:`Network` is replaced by its layers.

    Raises:
        ValueError: the model is not a list of layer calls.
    """
    if not is_flat(model):
        raise ValueError(
            f"this model cannot be cut into pipeline stages, as {not_flat(model)}; "
            "otherwise set mesh.stages to 1"
        )
    found: list[tuple[str, nn.Module]] = []
    for name, layer in children_of(model):
        found += (
            [(f"{name}.{inner}", part) for inner, part in flat_layers(layer)]
            if is_flat(layer)
            else [(name, layer)]
        )
    return found


def of_image(model: nn.Module, size: Sequence[int] | None = None) -> bool:
    """Return True if a network returns a vector for each image, as for classification.

    Return False if the shape of the result cannot be computed. ``size`` is the size of the images.
    It is needed for networks that take a single size only (:func:`answer_of`).
    """
    if isinstance(model, Network):
        return model.of_image
    made = answer_of(model, size)
    return made is not None and math.prod(made[2:]) == 1


@torch.no_grad()
def channels_of_maps(model: nn.Module) -> list[int]:
    """Return the number of channels of each feature map of a network, the image first.

    The network is an ``nn.Sequential`` or a :class:`Network`. The number is 0 for a vector of the
    image, since a vector takes almost no memory.

    Raises:
        ValueError: a layer does not take the result of the layers before it.
    """
    image = 1, bands_of(model), *(1024,) * dims_of(model)
    maps = [torch.empty(image, device="meta", dtype=torch.float64)]
    with skip_store({}):
        for call in calls_of(outline(model).double()):  # layers may have weights of several types
            given = [maps[source] for source in call.inputs]
            try:
                maps.append(call.layer(*given))
            except RuntimeError as e:
                channels = " and ".join(str(x.shape[1]) for x in given)
                raise ValueError(
                    f"layer {call.name}, {call.layer}, does not take its input of {channels} "
                    f"channels ({' '.join(str(e).split())[:200]}): correct the layer, or those "
                    "before it"
                ) from None
    return [0 if is_vector(x, maps[0].shape[2:]) else x.shape[1] for x in maps]
