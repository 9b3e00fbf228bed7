"""From a plain model to one that computes windows: plain layers are swapped for their distributed twins, in place.

The twins keep the parameters, buffers and names of the layers they replace, so optimizers, checkpoints and the state
dict of the model do not notice. What is left as it is (convolutions, poolings, activations) is local: its result on a
tile is right as long as the window around it is.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from functools import cached_property, partial
from typing import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distseg.comm.launch import check_launcher
from distseg.layers.context import Context
from distseg.layers.dropout import DROPOUTS, KeyedDropout
from distseg.layers.graph import graph_of
from distseg.layers.lines import twin_of
from distseg.layers.local import check_plain
from distseg.layers.mean import DistributedMean
from distseg.layers.norm import NORMS, STATISTICAL, DistributedNorm, commit
from distseg.layers.resize import Placed, PlacedPositions
from distseg.layers.skip import DenseCat, DensePop
from distseg.models.bands import bands_of
from distseg.models.capture.hidden import check_module
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
    """A model on windows. ``forward`` takes all windows that this rank computes together and gives their outputs.

    A flat network runs layer by layer over the windows, so that a norm sees them all; any other module runs one window at a time, and only one
    where norms are live. Where it can be computed in parts there is a ``graph``, its layers as geometry sees them, with the ``kinds`` of the plain
    model's layers and the ``channels`` of its maps. With an ``exchange`` layers compute what is needed of a window, which may be no more than the
    tile, and borders are exchanged between them.

    Args:
        inputs: of a flat network, the maps that each layer is called with; None of any other.
        of_image: the result is a vector of each image.
    """

    def __init__(
        self, model: nn.Module, context: Context, reach: ReceptiveField, inputs: Sequence[tuple[int, ...]] | None = None, exchange: Exchange | None = None,
        graph: Graph | None = None, kinds: Sequence[type] = (), channels: Sequence[int] = (), of_image: bool = False,
    ):  # fmt: skip
        super().__init__()
        (
            self.model,
            self.context,
            self.reach,
            self.inputs,
            self.exchange,
            self.graph,
            self.kinds,
            self.channels,
        ) = model, context, reach, inputs, exchange, graph, kinds, channels
        self.vectors = {number for number, count in enumerate(channels) if not count}
        """The maps that are vectors of the image."""
        self.flat = inputs is not None
        self.layers = [layer for _, layer in flat_layers(model)] if self.flat else None
        # Of the whole model, also where only some of its layers are kept:
        self.live_always = [
            p
            for p, layer in enumerate(self.layers or [])
            if isinstance(layer, DistributedNorm) and not layer.tracks
        ]
        """Positions of the norms that take statistics in evaluation too."""
        self.of_image = of_image
        self.always_live = any(not n.tracks for n in self.norms)
        self.live_in_training = bool(self.norms)
        self._frees: dict[tuple, dict[int, list[int]]] = {}

    @cached_property
    def norms(self) -> list[DistributedNorm]:
        return [m for m in self.model.modules() if isinstance(m, DistributedNorm)]

    @cached_property
    def dropouts(self) -> list[KeyedDropout]:
        return [m for m in self.model.modules() if isinstance(m, KeyedDropout)]

    @property
    def live_norms(self) -> bool:
        """Whether the windows of an image must be computed together."""
        return any(n.live for n in self.norms)

    def device_of(self, part: range) -> torch.device | None:
        """Where the weights of some layers are; None where they have none."""
        tensors = (
            t
            for layer in self.layers[part.start : part.stop]
            for t in (*layer.parameters(), *layer.buffers())
        )
        return next((t.device for t in tensors), None)

    def keep(self, positions: set[int]) -> None:
        """Let go of all layers but these, by position in the flat model: the others are another rank's."""
        assert self.flat
        for position, (name, layer) in enumerate(flat_layers(self.model)):
            if position not in positions:
                _put(self.model, name, Elsewhere(layer))
        self.layers = [layer for _, layer in flat_layers(self.model)]
        self.__dict__.pop("norms", None)
        self.__dict__.pop("dropouts", None)

    def begin_at(self, ranges: Sequence[range]) -> None:
        """Stages are these layers: what they are handed is another's, so nothing is done to it in place."""
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
        """Windows (B, C, *window.size) -> outputs (B, C', *window.size), exact on the tiles; with an exchange (B, C', *tile.size)."""
        if self.flat:
            maps = [{0: x} for x in windows]
            self.run(maps, places, range(len(self.layers)))
            return [had[len(self.layers)] for had in maps]
        self.context.places = places
        if len(windows) > 1 and self.live_norms:
            raise ValueError(
                f"a rank holds {len(windows)} windows of one micro-batch, but with live norms "
                "only a flat nn.Sequential computes several "
                "together: set spatial.tiles_per_rank to 1x1 and images of one size, or flatten "
                "the model"
            )
        for norm in self.norms:
            norm.turn = 0
        with checkpoints_ignored():
            return [self._user_module(x, index=i) for i, x in enumerate(windows)]

    def _user_module(self, window: Tensor, index: int) -> Tensor:
        """Call a module that calls its layers itself."""
        for dropout in self.dropouts:
            dropout.turn = 0
        return self._one(self.model, window, index=index, store={})

    def run(
        self,
        maps: list[dict[int, Tensor]],
        places: list[TilePlacement],
        part: range,
        leaving: Iterable[int] = (),
        after_layer: Callable[[], None] | None = None,
    ) -> None:
        """Some layers of a flat network on all windows.

        Args:
            maps: for each window the feature maps that the layers are called with, by number; in the end the last one's result and those that are ``leaving``.
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
        """What computes a layer on all windows, halos and all."""
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
        """By layer, the maps that nothing behind it reads."""
        if (part, leaving) not in self._frees:
            self._frees[part, leaving] = last_readings(self.inputs, part, leaving)
        return self._frees[part, leaving]

    def _one(self, layer: nn.Module, *inputs, index: int, store: dict) -> Tensor:
        self.context.current = index
        with self.context.around(store):
            y = layer(*inputs)
        return (
            y if y.dim() == inputs[0].dim() else as_vector(y, inputs[0].dim() - 2)
        )  # what a user's module makes of a whole image

    def freeze_norms(self) -> None:
        """Let batch norms use and keep their running statistics in training."""
        norms = [n for n in self.norms if not isinstance(n, DistributedMean)]
        for n in norms:
            if not n.tracks:
                raise ValueError(
                    f"{n.name} ({n.kind} norm) has no running statistics to freeze: "
                    "spatial.frozen_norm needs batch norm"
                )
            n.frozen = True
        self.live_in_training = len(norms) < len(self.norms)

    def commit_statistics(self, unbiased: bool = False) -> None:
        """Update the running statistics of batch norms, once an optimizer step; collective over the sample groups."""
        commit(self.norms, self.context.groups_comm, unbiased)

    def train(self, mode: bool = True) -> "TiledModel":
        """Warn where evaluation would not see the statistics of the passes before it."""
        if not mode and self.training and any(norm.seen for norm in self.norms):
            warnings.warn(
                "batch norms have seen images whose statistics were not taken over: call "
                "commit_statistics() once after each optimizer step, or they keep their running "
                "statistics",
                stacklevel=2,
            )
        return super().train(mode)


class _Instead(nn.Module):
    """Stands where a layer was."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.kind = type(layer).__name__

    def extra_repr(self) -> str:
        return self.kind


class Elsewhere(_Instead):
    """In the place of a layer that another rank holds."""


def parallelize(
    model: nn.Module,
    reach: ReceptiveField,
    context: Context | None = None,
    exchange: Exchange | None = None,
    whole: bool = False,
) -> TiledModel:
    """Swap the layers of ``model`` that look beyond a window for their distributed twins.

    Args:
        model: (N, C, *size) -> (N, C', *size), any module; changed in place.
        reach: its halo and stride, from :func:`distseg.receptive_field`.
        context: who shares statistics; by default one rank.
        exchange: for tiles that exchange borders instead of having halos; made from the plain model (:func:`distseg.layers.graph.graph_of`).
        whole: all windows are whole images, at which layers may look as they like.

    Raises:
        ValueError: a layer that can not be computed from windows, by name.
    """
    check_launcher()
    for name, layer in model.named_modules():
        if isinstance(layer, _GLOBAL) and not whole:
            raise ValueError(
                f"layer {name or 'model'} ({type(layer).__name__}) looks at the whole image and "
                "has no distributed twin: "
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
        dict.fromkeys(_told(model), reach.stride)
        if context.whole
        else cumulative_strides(model, reach)
    )
    for name, stride in strides.items():
        layer = model.get_submodule(name)
        _put(model, name, _twin(layer, context, stride, name))
    _share_statistics([m for m in model.modules() if isinstance(m, DistributedNorm) and m.tracks])
    inputs = (
        None if vector and graph is None else _inputs(model)
    )  # nobody knows where its vector begins
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


def _twin(layer: nn.Module, context: Context, stride: tuple[int, ...], name: str) -> nn.Module:
    """Return the twin of a layer, which stays in evaluation where the layer's own ``train`` has it stay."""
    kind = KeyedDropout if isinstance(layer, DROPOUTS) else twin_of(layer)
    twin = kind(layer, context, stride, name)
    if "train" in vars(layer):
        layer.train()
        if not layer.training:
            twin.eval()
            twin.train = partial(_as_it_is, twin)
    return twin


def _as_it_is(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


def on_whole_maps(model: nn.Module, context: Context, reach: ReceptiveField) -> TiledModel:
    """Swap norms and dropouts of a module that is always called with whole maps, by its own forward.

    Raises:
        ValueError: a layer that cannot be swapped, by name.
    """
    _check_own_layers(model)
    context.whole = True
    for name, layer in list(model.named_modules()):
        if isinstance(layer, (*STATISTICAL, *DROPOUTS)):
            _put(model, name, _twin(layer, context, reach.stride, name))
    return TiledModel(model, context, reach)


def _graph(model: nn.Module) -> Graph | None:
    try:
        return graph_of(model)
    except ValueError:
        return None


def _inputs(model: nn.Module) -> list[tuple[int, ...]] | None:
    """What each layer of a flat model reads; None where it is not flat, or a norm hides in another kind of module."""
    try:
        calls = calls_of(model)
    except ValueError:
        return None
    hides = lambda layer: (
        not isinstance(layer, DistributedNorm)
        and any(isinstance(m, DistributedNorm) for m in layer.modules())
    )
    return None if any(hides(call.layer) for call in calls) else [call.reads for call in calls]


def _place(model: nn.Module, graph: Graph | None, context: Context) -> None:
    """Tell layers whose size follows another map's what size that is, as that map may be elsewhere."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Positions):
            _put(model, name, PlacedPositions(layer, context))
        if isinstance(layer, Follows):
            if graph is None:
                raise ValueError(
                    f"layer {name} ({type(layer).__name__}) has the size of another map, but not "
                    "all layers of this network are known, so its size can't be worked out"
                )
            _put(model, name, Placed(layer, context, partial(_size_of, graph, name)))


def _size_of(graph: Graph, name: str, image: Sequence[int]) -> tuple[int, ...]:
    """Return the size of what a layer makes of an image."""
    number = next(number for number, node in enumerate(graph) if node.name == name)
    return graph.sizes(image)[number + 1]


def _flat_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The flat networks inside a model, itself perhaps."""
    if is_flat(model):
        yield model
    else:
        for child in model.children():
            yield from _flat_parts(child)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """In the place of that name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


class Folded(_Instead):
    """In the place of a layer with nothing left to do: the norm beside it computes it too, or executors know what it puts aside."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _calls(part: nn.Module) -> tuple[list[Call], Counter]:
    """Of a flat network, or of a Sequential whose skips begin or end elsewhere; and how many read each map."""
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
    """Have norms compute the dropout of channels before them and the activation behind."""
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
    """Have activations overwrite what they are given, where that is a layer's fresh result which its backward pass does not look at, and nobody else reads."""
    calls, readers = _calls(part)
    fresh: set[int] = set()
    for number, call in enumerate(calls):
        layer, alone = call.layer, call.inputs[0] in fresh and readers[call.inputs[0]] == 1
        if alone and type(layer) in (nn.ReLU, nn.LeakyReLU) and not layer.inplace:
            layer = copy.copy(layer)  # the same object may stand elsewhere, behind another layer
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


_HANDS_ON = (nn.Identity, KeyedDropout, Folded)  # layers whose result may be their input


def _share_statistics(norms: Sequence[DistributedNorm]) -> None:
    """Have norms that are one layer of the user's at several places keep their running statistics together."""
    keepers: dict[int, DistributedNorm] = {}
    for norm in norms:
        first = keepers.setdefault(id(norm.running_mean), norm)
        if first is not norm:
            norm.keeper = [first]


def _check_own_layers(model: nn.Module) -> None:
    """Refuse norm and dropout layers that do more than their class says, or stand at several places of the model: statistics and masks belong to a place."""
    places: dict[nn.Module, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, (*NORMS, *DROPOUTS)):
            continue
        if places.setdefault(layer, name) != name:
            raise ValueError(
                f"layers {places[layer]} and {name} are one and the same {type(layer).__name__}: "
                "give each place a layer of its own"
            )
        check_plain(name, layer)


def _image_of(model: nn.Module, size: Sequence[int], device: str | None = None) -> Tensor:
    like = next(model.parameters())
    return torch.zeros(1, bands_of(model), *size, device=device or like.device, dtype=like.dtype)


def _told(model: nn.Module) -> list[str]:
    """The layers that must know where what they are given lies."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (*STATISTICAL, *DROPOUTS, Spread, OfLines))
    ]


def cumulative_strides(model: nn.Module, reach: ReceptiveField) -> dict[str, tuple[int, ...]]:
    """Name of each layer that must know where it is -> pixels per cell of its feature map, per dim. Computed on the meta device."""
    layers = _told(model)
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
                    f"layer {name} is called on feature maps of different strides: give each "
                    "place a layer of its own"
                )

        return hook

    for name in layers:
        shadow.get_submodule(name).register_forward_pre_hook(note(name))
    with torch.no_grad(), skip_store({}):
        shadow(_image_of(model, size, "meta"))
    return {name: found[name] for name in layers if name in found}
