"""Turns a plain model into one that computes windows, by swapping layers in place.

A layer that reads beyond a window is replaced by its distributed counterpart. The counterpart keeps
the parameters, buffers and name of the layer, so optimizers, checkpoints and the state dict do not
change. Other layers (convolutions, poolings, activations) are local. Their result on a tile is
right as long as the window around it is.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from distseg.comm.launch import check_launcher
from distseg.layers.context import Context
from distseg.layers.dropout import DROPOUTS, KeyedDropout, begin_pass
from distseg.layers.graph import graph_of
from distseg.layers.layer_table import check_plain
from distseg.layers.lines import distributed_class
from distseg.layers.mean import DistributedMean
from distseg.layers.norm import NORMS, STATISTICAL, DistributedNorm, commit
from distseg.layers.resize import Placed, PlacedPositions
from distseg.layers.skip import DenseCat, DensePop
from distseg.models.bands import bands_of
from distseg.models.capture.checks import check_module
from distseg.models.capture.positions import Positions
from distseg.models.layers import Cat, Join, Pop, Spread, Stash, as_vector, outline, skip_store
from distseg.models.lines import OfLines
from distseg.models.modified import unmodified
from distseg.models.network import (
    Call,
    calls_of,
    channels_of_maps,
    flat_layers,
    is_flat,
    is_followed,
    of_image,
)
from distseg.models.passes import checkpoints_ignored
from distseg.models.resize import Follows
from distseg.runtime.exchange import Exchange
from distseg.tiling.graph import Graph, last_readings
from distseg.tiling.tile import ReceptiveField, TilePlacement

_GLOBAL = (
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.MultiheadAttention,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


class TiledModel(nn.Module):
    """Model whose ``forward`` maps all windows of this rank to their outputs.

    In a flat network (a list of layer calls), each layer is computed on all windows before the next
    layer, so that a norm gets all windows at once. Any other module computes one window after
    another. It accepts only one window if it has active norms, which compute their statistics from
    the current images.

    With an ``exchange``, halos are exchanged between layers, and a layer computes only the cells
    that later layers read, which may be the tile without any halo.

    Args:
        model: the model with its distributed counterparts.
        context: the state that the counterparts share.
        reach: the receptive field of the model.
        inputs: for each layer, the numbers of the feature maps that it reads; None if the model is
            not flat.
        exchange: the halo exchange; None if each tile is read together with its halo.
        graph: the graph of the layers; None if the layers are not all known.
        kinds: the types of the plain model's layers.
        channels: the number of channels of each feature map; 0 for a vector of the image.
        of_image: True if the result is a vector of each image.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        reach: ReceptiveField,
        inputs: Sequence[tuple[int, ...]] | None = None,
        exchange: Exchange | None = None,
        graph: Graph | None = None,
        kinds: Sequence[type] = (),
        channels: Sequence[int] = (),
        of_image: bool = False,
    ):
        super().__init__()
        self.model, self.context, self.reach, self.inputs = model, context, reach, inputs
        self.exchange, self.graph, self.kinds, self.channels = exchange, graph, kinds, channels
        self.vectors = {number for number, count in enumerate(channels) if not count}
        """Feature maps that are vectors of the image."""
        self.flat = inputs is not None
        self.layers = [layer for _, layer in flat_layers(model)] if self.flat else None
        # Taken before ``keep`` drops layers, so that it covers the whole model.
        self.active_in_evaluation = [
            p
            for p, layer in enumerate(self.layers or [])
            if isinstance(layer, DistributedNorm) and not layer.tracks
        ]
        """Numbers of the norms that are active in evaluation too."""
        self.of_image = of_image
        self.always_active = any(not n.tracks for n in self.norms)
        self.active_in_training = bool(self.norms)
        self._frees: dict[tuple, dict[int, list[int]]] = {}

    @cached_property
    def norms(self) -> list[DistributedNorm]:
        """Distributed norms of the model."""
        return [m for m in self.model.modules() if isinstance(m, DistributedNorm)]

    @cached_property
    def dropouts(self) -> list[KeyedDropout]:
        """Distributed dropouts of the model."""
        return [m for m in self.model.modules() if isinstance(m, KeyedDropout)]

    @property
    def has_active_norms(self) -> bool:
        """True if a norm is active. An active norm needs all windows of an image at once."""
        return any(n.active for n in self.norms)

    def device_of(self, part: range) -> torch.device | None:
        """Return the device of the weights and buffers of some layers, or None if they have none.

        ``part`` is the range of the indices of the layers.
        """
        tensors = (
            t
            for layer in self.layers[part.start : part.stop]
            for t in (*layer.parameters(), *layer.buffers())
        )
        return next((t.device for t in tensors), None)

    def keep(self, positions: set[int]) -> None:
        """Replace the layers that this rank does not hold by placeholders without weights.

        Args:
            positions: the indices of the layers that this rank holds.
        """
        assert self.flat
        for position, (name, layer) in enumerate(flat_layers(self.model)):
            if position not in positions:
                _put(self.model, name, Elsewhere(layer))
        self.layers = [layer for _, layer in flat_layers(self.model)]
        self.__dict__.pop("norms", None)
        self.__dict__.pop("dropouts", None)

    def begin_at(self, ranges: Sequence[range]) -> None:
        """Set ``inplace`` to False in the layers that would overwrite an input of their stage.

        The memory of the input may belong to another stage.

        Args:
            ranges: the layers of each stage.
        """
        for layers in ranges:
            handed = {
                source
                for number in layers
                for source in self.inputs[number]
                if source <= layers.start
            }
            for number in layers:
                layer = self.layers[number]
                if self.inputs[number][0] in handed:
                    if getattr(layer, "inplace", False):
                        layer.inplace = False
                    if isinstance(layer, _HANDS_ON):
                        handed.add(number + 1)

    def forward(self, windows: list[Tensor], places: list[TilePlacement]) -> list[Tensor]:
        """Return the outputs (B, C', *window.size) of windows (B, C, *window.size).

        An output is exact only on the tile inside the window. With an exchange, an output covers
        only the tile, (B, C', *tile.size).

        Args:
            windows: the windows.
            places: the placement of each window.

        Raises:
            ValueError: if there are several windows, but the model is not a list of layer calls and
                has active norms.
        """
        if self.flat:
            maps = [{0: x} for x in windows]
            self.run(maps, places, range(len(self.layers)))
            return [had[len(self.layers)] for had in maps]
        self.context.places = places
        if len(windows) > 1 and self.has_active_norms:
            raise ValueError(
                f"a rank holds {len(windows)} windows of one micro-batch, but this model has norms "
                "that use the statistics of the current images, and distseg does not know its "
                "layer calls, so a rank can compute only one window: set spatial.tiles_per_rank to "
                "1x1 and use images of one size, or write the model as an nn.Sequential of layers "
                "or a distseg.Network"
            )
        for norm in self.norms:
            norm.turn = 0
        with checkpoints_ignored():
            return [self._user_module(x, index=i) for i, x in enumerate(windows)]

    def _user_module(self, window: Tensor, index: int) -> Tensor:
        """Return the output of one window, for a model that is not a list of layer calls.

        ``index`` is the index of the window among the windows of this rank.
        """
        begin_pass(self.dropouts)
        return self._one(self.model, window, index=index, store={})

    def run(
        self,
        maps: list[dict[int, Tensor]],
        places: list[TilePlacement],
        part: range,
        leaving: Iterable[int] = (),
        after_layer: Callable[[], None] | None = None,
    ) -> None:
        """Run some layers of a network that is a list of layer calls, on all windows.

        Args:
            maps: for each window, the feature maps that the layers read, by number. Afterwards each
                dict holds the last layer's result and the feature maps in ``leaving``.
            places: the placement of each window.
            part: the numbers of the layers.
            leaving: the numbers of the feature maps that other stages read, which are kept.
            after_layer: called after each layer.
        """
        self.context.places = places
        frees = self._frees_of(part, frozenset(leaving))
        compute = (
            self._windowed(maps)
            if self.exchange is None
            else self.exchange.layers(maps, self.context, part.start)
        )
        try:
            for number in part:
                made = compute(number, self.layers[number])
                for had, y in zip(maps, made):
                    had[number + 1] = y
                    for source in frees[number]:
                        del had[source]
                del made, y
                if after_layer is not None:
                    after_layer()
        finally:
            self.context.regions = None

    def _windowed(self, maps: list[dict[int, Tensor]]) -> Callable[[int, nn.Module], list[Tensor]]:
        """Return a function that computes a layer on all windows, including their halos.

        The function takes the index of the layer and the layer, and returns the layer's result on
        each window.

        Args:
            maps: for each window, the feature maps by number, as in :meth:`run`.
        """
        stores = [{} for _ in maps]

        def compute(number: int, layer: nn.Module) -> list[Tensor]:
            inputs = self.inputs[number]
            if isinstance(layer, DistributedNorm):
                return layer.joint([had[inputs[0]] for had in maps])
            if isinstance(layer, Folded):
                return [had[inputs[0]] for had in maps]
            return [
                self._one(layer, *(had[source] for source in inputs), index=i, store=stores[i])
                for i, had in enumerate(maps)
            ]

        return compute

    def _frees_of(self, part: range, leaving: frozenset[int]) -> dict[int, list[int]]:
        """Return, for each layer in ``part``, the feature maps to release once the layer has run.

        These are the maps that no later layer in ``part`` reads and that are not in ``leaving``.
        """
        if (part, leaving) not in self._frees:
            self._frees[part, leaving] = last_readings(self.inputs, part, leaving)
        return self._frees[part, leaving]

    def _one(self, layer: nn.Module, *inputs, index: int, store: dict) -> Tensor:
        self.context.current = index
        with self.context.around(store):
            y = layer(*inputs)
        # A user's module may turn a whole image into a vector.
        return y if y.dim() == inputs[0].dim() else as_vector(y, inputs[0].dim() - 2)

    def freeze_norms(self) -> None:
        """Freeze batch norms: training uses their running statistics and does not change them.

        Raises:
            ValueError: if a norm has no running statistics.
        """
        norms = [n for n in self.norms if not isinstance(n, DistributedMean)]
        for n in norms:
            if not n.tracks:
                raise ValueError(
                    f"{n.name} ({n.kind} norm) has no running statistics to freeze: "
                    "spatial.frozen_norm needs batch norm"
                )
            n.frozen = True
        self.active_in_training = len(norms) < len(self.norms)

    def commit_statistics(self, unbiased: bool = False) -> None:
        """Update the running statistics of batch norms, once per optimizer step.

        The ranks of all sample groups must call this method together.

        Args:
            unbiased: True to update the running variance with the variance m2 / (n - 1), as
                PyTorch's layers do, instead of m2 / n. Here m2 is the sum of the squared
                deviations of n values from their mean.
        """
        commit(self.norms, self.context.groups_comm, unbiased)

    def train(self, mode: bool = True) -> TiledModel:
        """Set training mode, or evaluation mode if ``mode`` is False.

        Warn if evaluation begins although :meth:`commit_statistics` was not called after the last
        forward passes. The running statistics then lack the statistics of these passes.
        """
        if not mode and self.training and any(norm.seen for norm in self.norms):
            warnings.warn(
                "batch norms have collected statistics of images that were not committed: call "
                "commit_statistics() once after each optimizer step; otherwise the running "
                "statistics do not change",
                stacklevel=2,
            )
        return super().train(mode)


class _Instead(nn.Module):
    """Base class of placeholders for layers that this rank does not compute."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.kind = type(layer).__name__

    def extra_repr(self) -> str:
        return self.kind


class Elsewhere(_Instead):
    """Placeholder of a layer that another rank holds."""


def parallelize(
    model: nn.Module,
    reach: ReceptiveField,
    context: Context | None = None,
    exchange: Exchange | None = None,
    whole: bool = False,
) -> TiledModel:
    """Swap the layers that read beyond a window for their distributed counterparts.

    Args:
        model: any module (N, C, *size) -> (N, C', *size); changed in place.
        reach: the halo and stride of the model, from :func:`distseg.receptive_field`.
        context: gives the ranks that share statistics; by default one rank.
        exchange: the halo exchange; None if each tile is read together with its halo. Its graph
            must be that of the plain model (:func:`distseg.layers.graph.graph_of`).
        whole: True if all windows are whole images. Layers may then read the whole image.

    Raises:
        ValueError: if a layer cannot be computed from windows. The message names the layer.
    """
    check_launcher()
    for name, layer in model.named_modules():
        if isinstance(layer, _GLOBAL) and not whole:
            raise ValueError(
                f"layer {name or 'model'} ({type(layer).__name__}) looks at the whole image and "
                "has no distributed counterpart: "
                "replace it (instance, group and batch norm, dropout of channels and elements are "
                "supported)"
            )
    _check_own_layers(model)
    if not is_followed(model):
        check_module(model, [8 * s for s in reach.stride])
    graph = exchange.graph if exchange else _graph(model)
    vector = graph.of_image if graph else of_image(model)
    kinds, channels = (
        ([type(layer) for _, layer in flat_layers(model)], channels_of_maps(model))
        if graph
        else ((), ())
    )
    context = context or Context()
    context.whole = whole and not is_followed(model)
    strides = (
        dict.fromkeys(_positional_layers(model), reach.stride)
        if context.whole
        else cumulative_strides(model, reach)
    )
    for name, stride in strides.items():
        layer = model.get_submodule(name)
        _put(model, name, _distributed(layer, context, stride, name))
    _share_statistics([m for m in model.modules() if isinstance(m, DistributedNorm) and m.tracks])
    # Without a graph it is unknown which layer turns the feature map into a vector.
    inputs = None if vector and graph is None else _inputs(model)
    _place(model, graph, context)
    for part in _flat_parts(model):
        _fold(part)
        _act_in_place(part)
        for name, layer in flat_layers(part):
            if type(layer) in (Pop, Cat):
                _put(part, name, DensePop(layer.name) if type(layer) is Pop else DenseCat())
            if isinstance(layer, Stash) and inputs is not None:
                _put(part, name, Folded(layer))
    return TiledModel(model, context, reach, inputs, exchange, graph, kinds, channels, vector)


def _distributed(
    layer: nn.Module, context: Context, stride: tuple[int, ...], name: str
) -> nn.Module:
    """Return the distributed counterpart of a layer.

    If the user replaced the layer's ``train`` method so that the layer stays in evaluation mode,
    the counterpart stays in evaluation mode too.

    Args:
        layer: a norm, dropout or other layer that has a counterpart.
        context: the state that the model's counterparts share.
        stride: the number of image pixels per cell of the layer's input, along each dim.
        name: the name of the layer.
    """
    kind = KeyedDropout if isinstance(layer, DROPOUTS) else distributed_class(layer)
    counterpart = kind(layer, context, stride, name)
    if "train" in vars(layer):
        layer.train()
        if not layer.training:
            counterpart.eval()
            counterpart.train = partial(_as_it_is, counterpart)
    return counterpart


def _as_it_is(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


def on_whole_maps(model: nn.Module, context: Context, reach: ReceptiveField) -> TiledModel:
    """Swap the norms and dropouts of a module for their distributed counterparts.

    Use this function for a module that always reads whole feature maps. The module may call its
    layers in a ``forward`` that distseg cannot follow.

    Args:
        model: the module, changed in place.
        context: the state that the counterparts share.
        reach: the halo and stride of the module.

    Raises:
        ValueError: if a layer cannot be swapped. The message names the layer.
    """
    _check_own_layers(model)
    context.whole = True
    for name, layer in list(model.named_modules()):
        if isinstance(layer, (*STATISTICAL, *DROPOUTS)):
            _put(model, name, _distributed(layer, context, reach.stride, name))
    return TiledModel(model, context, reach)


def _graph(model: nn.Module) -> Graph | None:
    try:
        return graph_of(model)
    except ValueError:
        return None


def _inputs(model: nn.Module) -> list[tuple[int, ...]] | None:
    """Return, for each layer of a model, the numbers of the feature maps that it reads.

    Feature map 0 is the image, n + 1 the result of layer n. Return None if the model is not a list
    of layer calls, or if a norm is hidden inside one of its layers.
    """
    try:
        calls = calls_of(model)
    except ValueError:
        return None

    def hides(layer):
        return not isinstance(layer, DistributedNorm) and any(
            isinstance(m, DistributedNorm) for m in layer.modules()
        )

    return None if any(hides(call.layer) for call in calls) else [call.reads for call in calls]


def _place(model: nn.Module, graph: Graph | None, context: Context) -> None:
    """Replace two kinds of layers by counterparts that know where a tile lies in the image.

    The first kind depends on the position of each cell in the image. The second kind gives its
    output the size of another feature map, which may be on another rank. The counterpart computes
    this size from the size of the image.

    Args:
        model: the model, changed in place.
        graph: the graph of the model's layers; None if it is not known.
        context: the state that the counterparts share.

    Raises:
        ValueError: if the model has a layer of the second kind, but ``graph`` is None.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Positions):
            _put(model, name, PlacedPositions(layer, context))
        if isinstance(layer, Follows):
            if graph is None:
                raise ValueError(
                    f"layer {name} ({type(layer).__name__}) takes the size of another feature map, "
                    f"but distseg does not know which layers of this network compute that map: "
                    f"write the network as an nn.Sequential of layers or a distseg.Network"
                )
            _put(model, name, Placed(layer, context, partial(_size_of, graph, name)))


def _size_of(graph: Graph, name: str, image: Sequence[int]) -> tuple[int, ...]:
    """Return the size in cells of the result of layer ``name``, for images of size ``image``."""
    number = next(number for number, node in enumerate(graph) if node.name == name)
    return graph.sizes(image)[number + 1]


def _flat_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the flat networks (lists of layer calls) among a model and its submodules."""
    if is_flat(model):
        yield model
    else:
        for child in model.children():
            yield from _flat_parts(child)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace the submodule ``name`` of ``model`` by ``layer``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


class Folded(_Instead):
    """Placeholder that returns its input, for a layer whose work another object does.

    It replaces a dropout or activation that the neighbouring norm computes. It also replaces a
    layer that stores a skip, because the executor keeps the skip.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


def _calls(part: nn.Module) -> tuple[list[Call], Counter]:
    """Return the layer calls of a network, and the number of layers that read each feature map.

    Feature map 0 is the input, n + 1 the result of call n. The network may also be a Sequential
    whose skips begin or end in another part of the model.
    """
    try:
        calls = calls_of(part)
    except ValueError:
        calls = [
            Call(name, layer, (number,)) for number, (name, layer) in enumerate(flat_layers(part))
        ]
    return calls, Counter(
        source for call in calls for source in call.reads * (1 + isinstance(call.layer, Stash))
    )


def _fold(part: nn.Module) -> None:
    """Let norms compute the channel dropout before them and the ReLU or LeakyReLU after them.

    In the model, :class:`Folded` takes the places of the dropout and the activation. A layer is
    fused only if no other layer reads the feature map between it and the norm.

    Args:
        part: a list of layer calls, changed in place.
    """
    calls, readers = _calls(part)
    reading = {call.inputs[0]: call for call in calls}
    for number, call in enumerate(calls):
        norm = call.layer
        if not isinstance(norm, DistributedNorm) or isinstance(norm, DistributedMean):
            continue
        before = (
            calls[call.inputs[0] - 1] if call.inputs[0] and readers[call.inputs[0]] == 1 else None
        )
        behind = reading[number + 1] if readers[number + 1] == 1 and number + 1 in reading else None
        if (
            before
            and isinstance(before.layer, KeyedDropout)
            and before.layer.by_channel
            and norm.frames == 1
        ):
            norm.dropout = [before.layer] if before.layer.p > 0 else []
            _put(part, before.name, Folded(before.layer))
        if behind and unmodified(behind.layer, (nn.ReLU, nn.LeakyReLU)):
            norm.slope = getattr(behind.layer, "negative_slope", 0.0)
            _put(part, behind.name, Folded(behind.layer))


def _act_in_place(part: nn.Module) -> None:
    """Make ReLU and LeakyReLU layers overwrite their input where that does not change a result.

    It changes no result if no other layer reads the input, and if the layer that computed the
    input does not need it in its backward pass.
    """
    calls, readers = _calls(part)
    fresh: set[int] = set()
    for number, call in enumerate(calls):
        layer, alone = call.layer, call.inputs[0] in fresh and readers[call.inputs[0]] == 1
        if alone and type(layer) in (nn.ReLU, nn.LeakyReLU) and not layer.inplace:
            layer = copy.copy(layer)  # The same object may follow another layer elsewhere.
            layer.inplace = True
            _put(part, call.name, layer)
        if (
            unmodified(layer, nn.modules.conv._ConvNd)
            or len(call.inputs) > 1
            and isinstance(layer, (Pop, Join))
            or alone
            and isinstance(layer, _HANDS_ON)
        ):
            fresh.add(number + 1)


# Layers that may return their input itself.
_HANDS_ON = (nn.Identity, KeyedDropout, Folded)


def _share_statistics(norms: Sequence[DistributedNorm]) -> None:
    """Let distributed norms share running statistics if they replace the same layer of the user.

    A model that calls one norm several times has a distributed norm for each call.
    """
    keepers: dict[int, DistributedNorm] = {}
    for norm in norms:
        first = keepers.setdefault(id(norm.running_mean), norm)
        if first is not norm:
            norm.keeper = [first]


def _check_own_layers(model: nn.Module) -> None:
    """Refuse a norm or dropout that is modified, or that the model has under several names.

    The computation of a modified layer is not that of its PyTorch class. Statistics and dropout
    masks belong to one name in the model.

    Raises:
        ValueError: the model has such a layer. The message names it.
    """
    places: dict[nn.Module, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, (*NORMS, *DROPOUTS)):
            continue
        if places.setdefault(layer, name) != name:
            raise ValueError(
                f"layers {places[layer]} and {name} are one {type(layer).__name__} object: make a "
                "separate layer for each"
            )
        check_plain(name, layer)


def _image_of(model: nn.Module, size: Sequence[int], device: str | None = None) -> Tensor:
    like = next(model.parameters())
    return torch.zeros(1, bands_of(model), *size, device=device or like.device, dtype=like.dtype)


def _positional_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that must know the position of their input in the image.

    These layers are norms and others with statistics, dropouts, and layers that read lines or
    vectors of the image.
    """
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (*STATISTICAL, *DROPOUTS, Spread, OfLines))
    ]


def cumulative_strides(model: nn.Module, reach: ReceptiveField) -> dict[str, tuple[int, ...]]:
    """Return, for some layers, the number of image pixels per cell of their input, along each dim.

    These are the layers that must know the position of their input in the image, such as norms and
    dropouts. The keys of the result are their names. The strides are computed on the meta device.

    Raises:
        ValueError: if one of these layers is called on feature maps of different strides.
    """
    layers = _positional_layers(model)
    if not layers:
        return {}
    shadow = outline(model)
    size = tuple(s * 8 for s in reach.stride)
    found: dict[str, tuple[int, ...]] = {}

    def note(name):
        def hook(_, inputs):
            stride = tuple(n // m for n, m in zip(size, inputs[0].shape[2:]))
            if found.setdefault(name, stride) != stride:
                raise ValueError(
                    f"layer {name} is called on feature maps of different strides: use a separate "
                    f"layer for each call"
                )

        return hook

    for name in layers:
        shadow.get_submodule(name).register_forward_pre_hook(note(name))
    with torch.no_grad(), skip_store({}):
        shadow(_image_of(model, size, "meta"))
    return {name: found[name] for name in layers if name in found}
