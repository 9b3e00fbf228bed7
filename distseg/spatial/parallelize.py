"""From a plain model to one that computes windows: plain layers are swapped for their distributed twins, in place.

The twins keep the parameters, buffers and names of the layers they replace, so optimizers, checkpoints and the state
dict of the model do not notice. What is left as it is (convolutions, poolings, activations) is local: its result on a
tile is right as long as the window around it is.
"""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from typing import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from distseg.altered import genuine
from distseg.geometry.needs import Link
from distseg.geometry.tile import Place, Reach
from distseg.models.layers import Pop, channels_of_maps, first_convolution, flat_layers, is_sequential, outline, skip_store
from distseg.spatial.context import Context
from distseg.spatial.dropout import DROPOUTS, KeyedDropout
from distseg.spatial.exchange import Exchange
from distseg.spatial.links import links_of
from distseg.spatial.local import check_plain
from distseg.spatial.norm import NORMS, DistributedNorm, commit
from distseg.spatial.skip import DensePop

_GLOBAL = (nn.LayerNorm, nn.LocalResponseNorm, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.MultiheadAttention, nn.AlphaDropout, nn.FeatureAlphaDropout)


class TiledModel(nn.Module):
    """A model on windows. ``forward`` takes all windows that this rank computes together and gives their outputs.

    A flat ``nn.Sequential`` runs layer by layer over the windows, so that a norm sees them all; any other module runs
    one window at a time, and only one where norms are live. Where it can be computed in parts there are ``links``, its layers as geometry sees
    them, with the ``kinds`` of the plain model's layers and the ``channels`` of its maps. With an ``exchange`` layers compute what is needed of a window,
    which may be no more than the tile, and borders are exchanged between them.
    """

    def __init__(
        self, model: nn.Module, context: Context, reach: Reach, exchange: Exchange | None = None, links: list[Link] | None = None,
        kinds: Sequence[type] = (), channels: Sequence[int] = (),
    ):  # fmt: skip
        super().__init__()
        self.model, self.context, self.reach, self.exchange, self.links, self.kinds, self.channels = model, context, reach, exchange, links, kinds, channels
        self.layers = _flattened(model)
        self.flat = self.layers is not None
        # Of the whole model, also where only some of its layers are kept:
        self.live_always = [p for p, layer in enumerate(self.layers or []) if isinstance(layer, DistributedNorm) and not layer.tracks]
        """Positions of the norms that take statistics in evaluation too."""
        self.always_live = any(not n.tracks for n in self.norms)
        self.live_in_training = bool(self.norms)

    @property
    def norms(self) -> list[DistributedNorm]:
        return [m for m in self.model.modules() if isinstance(m, DistributedNorm)]

    @property
    def live_norms(self) -> bool:
        """Whether the windows of an image must be computed together."""
        return any(n.live for n in self.norms)

    def device_of(self, part: range) -> torch.device | None:
        """Where the weights of some layers are; None where they have none."""
        tensors = (t for layer in self.layers[part.start : part.stop] for t in (*layer.parameters(), *layer.buffers()))
        return next((t.device for t in tensors), None)

    def keep(self, positions: set[int]) -> None:
        """Let go of all layers but these, by position in the flat model: the others are another rank's."""
        assert self.flat
        for position, (name, layer) in enumerate(flat_layers(self.model)):
            if position not in positions:
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(parent), child, Elsewhere(layer))
        self.layers = _flattened(self.model)

    def begin_at(self, positions: Iterable[int]) -> None:
        """Stages begin at these layers: what they are handed is another's, so nothing is done to it in place."""
        for start in positions:
            for layer in self.layers[start:]:
                if getattr(layer, "inplace", False):
                    layer.inplace = False
                if not isinstance(layer, _HANDS_ON):
                    break

    def forward(
        self,
        windows: list[Tensor],
        places: list[Place],
        part: range | None = None,
        skips: list[dict[str, Tensor]] | None = None,
        after_layer: Callable[[], None] | None = None,
    ) -> list[Tensor]:
        """Windows (B, C, *window.size) -> outputs (B, C', *window.size), exact on the tiles; with an exchange (B, C', *tile.size).

        Args:
            part: the layers of a flat model to run; ``windows`` then are the feature maps before them. All by default.
            skips: for each window the skips that were stashed before; afterwards, those that wait for a later pop.
            after_layer: called after each layer of a flat model.
        """
        self.context.places = places
        if self.exchange is not None:
            part = range(len(self.layers)) if part is None else part
            return self.exchange.run(self.layers[part.start : part.stop], part.start, windows, skips or [{} for _ in windows], self.context, after_layer)
        if self.flat:
            layers = self.layers if part is None else self.layers[part.start : part.stop]
            return self._layer_by_layer(layers, list(windows), skips or [{} for _ in windows], after_layer)
        assert part is None
        if len(windows) > 1 and self.live_norms:
            raise ValueError(
                f"a rank holds {len(windows)} windows of one micro-batch, but with live norms only a flat nn.Sequential computes several "
                "together: set spatial.tiles_per_rank to 1x1 and images of one size, or flatten the model"
            )
        return [self._one(self.model, x, i, {}) for i, x in enumerate(windows)]

    def _layer_by_layer(self, layers: list[nn.Module], xs: list[Tensor], skips: list[dict], after_layer) -> list[Tensor]:
        for layer in layers:
            if isinstance(layer, DistributedNorm):
                xs = layer.joint(xs)
            else:
                xs = [self._one(layer, x, i, skips[i]) for i, x in enumerate(xs)]
            if after_layer is not None:
                after_layer()
        return xs

    def _one(self, layer: nn.Module, x: Tensor, index: int, skips: dict) -> Tensor:
        self.context.current = index
        with self.context.around(skips):
            return layer(x)

    def freeze_norms(self) -> None:
        """Let batch norms use and keep their running statistics in training."""
        for n in self.norms:
            if not n.tracks:
                raise ValueError(f"{n.name} ({n.kind} norm) has no running statistics to freeze: spatial.frozen_norm needs batch norm")
            n.frozen = True
        self.live_in_training = False

    def commit_statistics(self) -> None:
        """Update the running statistics of batch norms, once an optimizer step; collective over the sample groups."""
        commit(self.norms, self.context.groups_comm)


class _Instead(nn.Module):
    """Stands where a layer was."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.kind = type(layer).__name__

    def extra_repr(self) -> str:
        return self.kind


class Elsewhere(_Instead):
    """In the place of a layer that another rank holds."""


def _flattened(model: nn.Module) -> list[nn.Module] | None:
    """The layers of a Sequential, and of Sequentials inside it, in order; None where a norm hides in another kind of module."""
    if not is_sequential(model):
        return None
    layers: list[nn.Module] = []
    for layer in model:
        inner = _flattened(layer)
        if inner is None and not isinstance(layer, DistributedNorm) and any(isinstance(m, DistributedNorm) for m in layer.modules()):
            return None
        layers += [layer] if inner is None else inner
    return layers


def parallelize(model: nn.Module, reach: Reach, context: Context | None = None, exchange: Exchange | None = None) -> TiledModel:
    """Swap the layers of ``model`` that look beyond a window for their distributed twins.

    Args:
        model: (N, C, *size) -> (N, C', *size), any module; changed in place.
        reach: its halo and stride, from :func:`distseg.receptive_field`.
        context: who shares statistics; by default one rank.
        exchange: for tiles that exchange borders instead of having halos; made from the plain model (:func:`distseg.spatial.links.links_of`).

    Raises:
        ValueError: a layer that can not be computed from windows, by name.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _GLOBAL):
            raise ValueError(
                f"layer {name or 'model'} ({type(layer).__name__}) looks at the whole image and has no distributed twin: "
                "replace it (instance, group and batch norm, dropout of channels and elements are supported)"
            )
    _check_own_layers(model)
    _check_state(model, reach)
    links = exchange.links if exchange else _links(model)
    kinds, channels = ([type(layer) for _, layer in flat_layers(model)], channels_of_maps(model)) if links else ((), ())
    context = context or Context()
    strides = cumulative_strides(model, reach)
    for name, stride in strides.items():
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        twin = KeyedDropout if isinstance(layer, DROPOUTS) else DistributedNorm
        setattr(model.get_submodule(parent), child, twin(layer, context, stride, name))
    for sequential in filter(is_sequential, model.modules()):
        _fold(sequential)
        _act_in_place(sequential)
        for name, layer in sequential._modules.items():
            if type(layer) is Pop:
                sequential._modules[name] = DensePop(layer.name)
    return TiledModel(model, context, reach, exchange, links, kinds, channels)


def _links(model: nn.Module) -> list[Link] | None:
    try:
        return links_of(model)
    except ValueError:
        return None


class Folded(_Instead):
    """In the place of a layer that the norm beside it computes too."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _fold(sequential: nn.Sequential) -> None:
    """Have norms compute the dropout of channels before them and the activation behind."""
    names = list(sequential._modules)
    for before, name, behind in zip([None, *names], names, [*names[1:], None]):
        norm = sequential._modules[name]
        if not isinstance(norm, DistributedNorm):
            continue
        dropout, activation = (sequential._modules.get(neighbour) for neighbour in (before, behind))
        if isinstance(dropout, KeyedDropout) and dropout.by_channel:
            norm.dropout = [dropout] if dropout.p > 0 else []
            sequential._modules[before] = Folded(dropout)
        if activation is not None and genuine(activation, (nn.ReLU, nn.LeakyReLU)):
            norm.slope = getattr(activation, "negative_slope", 0.0)
            sequential._modules[behind] = Folded(activation)


def _act_in_place(sequential: nn.Sequential) -> None:
    """Have activations overwrite what they are given, where that is a layer's fresh result which its backward pass does not look at."""
    fresh = False
    for name, layer in list(sequential._modules.items()):
        if fresh and type(layer) in (nn.ReLU, nn.LeakyReLU) and not layer.inplace:
            sequential._modules[name] = layer = copy.copy(layer)  # the same object may stand elsewhere, behind another layer
            layer.inplace = True
        fresh = genuine(layer, nn.modules.conv._ConvNd) or isinstance(layer, Pop) or fresh and isinstance(layer, _HANDS_ON)


_HANDS_ON = (nn.Identity, KeyedDropout, Folded)  # layers whose result may be their input


def _check_own_layers(model: nn.Module) -> None:
    """Refuse norm and dropout layers that do more than their class says, or stand at several places of the model: statistics and masks belong to a place."""
    places: dict[nn.Module, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, (*NORMS, *DROPOUTS)):
            continue
        if places.setdefault(layer, name) != name:
            raise ValueError(f"layers {places[layer]} and {name} are one and the same {type(layer).__name__}: give each place a layer of its own")
        check_plain(name, layer)


def _check_state(model: nn.Module, reach: Reach) -> None:
    """Refuse layers that change what they keep with each forward pass, as spectral norm does: windows and tiles are passes of their own."""
    norms = tuple(f"{name}." for name, layer in model.named_modules() if isinstance(layer, NORMS))
    kept = {name: b.clone() for name, b in model.named_buffers() if not name.startswith(norms) and not b.is_meta}
    if not kept:
        return
    probe = copy.deepcopy(model).train()
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad(), skip_store({}):  # what fails here fails in the first step, and is told there
        probe(_image_of(model, [8 * s for s in reach.stride]))
    for name, b in probe.named_buffers():
        if name in kept and not torch.equal(b, kept[name]):
            layer, _, buffer = name.rpartition(".")
            owner = re.sub(r"\.parametrizations\..*", "", layer)
            raise ValueError(
                f"layer {owner} ({type(model.get_submodule(owner)).__name__}) changes its {buffer} with each forward pass, as spectral norm does, and windows and tiles are "
                "passes of their own: the result would depend on how many there are; leave that out, or use weight_norm"
            )


def _image_of(model: nn.Module, size: Sequence[int], device: str | None = None) -> Tensor:
    first = first_convolution(model)
    like = next(model.parameters())
    return torch.zeros(1, first.in_channels, *size, device=device or like.device, dtype=like.dtype)


def cumulative_strides(model: nn.Module, reach: Reach) -> dict[str, tuple[int, ...]]:
    """Name of each norm and dropout layer -> pixels per cell of its feature map, per dim. Computed on the meta device."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, (*NORMS, *DROPOUTS))]
    if not layers:
        return {}
    shadow = outline(model)
    size = tuple(s * 8 for s in reach.stride)
    found: dict[str, tuple[int, ...]] = {}

    def note(name):
        def hook(_, inputs):
            stride = tuple(n // m for n, m in zip(size, inputs[0].shape[2:]))
            if found.setdefault(name, stride) != stride:
                raise ValueError(f"layer {name} is called on feature maps of different strides: give each place a layer of its own")

        return hook

    for name in layers:
        shadow.get_submodule(name).register_forward_pre_hook(note(name))
    with torch.no_grad(), skip_store({}):
        shadow(_image_of(model, size, "meta"))
    return {name: found[name] for name in layers if name in found}
