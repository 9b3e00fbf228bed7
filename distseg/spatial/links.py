"""A network as geometry sees it: the footprint of each layer of a flat one, and how far any one sees."""

from __future__ import annotations

from torch import nn

from distseg.geometry.layout import reach_of
from distseg.geometry.needs import Link
from distseg.geometry.receptive import probed_reach
from distseg.geometry.tile import Reach
from distseg.models.layers import channels_of_maps, first_convolution, flat_layers, skips_of
from distseg.spatial.local import link_of


def receptive_field(model: nn.Module) -> Reach:
    """Halo and stride in pixels of each spatial dim of ``model``: (N, C, *size) -> (N, C', *size).

    Of a flat ``nn.Sequential`` of layers whose footprints are known they are worked out; of any other network they are measured.

    Args:
        model: on any device, the meta device included; it is not changed.

    Raises:
        ValueError: the model has no convolution, changes the spatial size, or a pixel's reach has no bound.
    """
    try:
        links = links_of(model)
    except ValueError:
        return probed_reach(model)
    return reach_of(links, first_convolution(model).weight.dim() - 2)


def links_of(model: nn.Module) -> list[Link]:
    """The layers of a flat model, perhaps only outlined, as geometry sees them.

    Raises:
        ValueError: a model that is not flat, or a layer that can't be computed in tiles that exchange borders, by name.
    """
    try:
        layers = flat_layers(model)
    except ValueError:
        raise ValueError(
            f"only a flat nn.Sequential can be computed in tiles that exchange borders, but this model is a {type(model).__name__}: "
            "flatten it, or set spatial.exchange_every to all"
        ) from None
    skips_of([layer for _, layer in layers])
    dims = first_convolution(model).weight.dim() - 2
    return [link_of(name, layer, dims, lambda position=position: channels_of_maps(model, position)[-1]) for position, (name, layer) in enumerate(layers)]
