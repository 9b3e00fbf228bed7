"""A network as geometry sees it: the footprint of each layer of a flat one, and how far any one sees."""

from __future__ import annotations

from torch import nn

from distseg.layers.local import node_of
from distseg.models.bands import bands_of, dims_of
from distseg.models.network import Call, calls_of, is_flat, not_flat
from distseg.models.receptive_field import probed_reach
from distseg.tiling.graph import Graph, Node
from distseg.tiling.layout import reach_of
from distseg.tiling.tile import ReceptiveField


def receptive_field(model: nn.Module) -> ReceptiveField:
    """Halo and stride in pixels of each spatial dim of ``model``: (N, C, *size) -> (N, C', *size).

    Of a flat ``nn.Sequential`` of layers whose footprints are known they are worked out; of any other network they are measured.

    Args:
        model: on any device, the meta device included; it is not changed.

    Raises:
        ValueError: the model has no convolution, changes the spatial size, or a pixel's reach has no bound.
    """
    return reach_for(model, True)


def reach_for(model: nn.Module, cut: bool) -> ReceptiveField:
    """The receptive field of a model whose images are ``cut``; of one whose layers are not all known and which sees whole images nothing is known, nor has to be."""
    try:
        graph = graph_of(model)
    except ValueError:
        dims = dims_of(model)
        return (
            probed_reach(model, dims, bands_of(model))
            if cut
            else ReceptiveField((0,) * dims, (1,) * dims)
        )
    return reach_of(graph, dims_of(model))


def graph_of(model: nn.Module) -> Graph:
    """The layers of a flat network, perhaps only outlined, as geometry sees them.

    Raises:
        ValueError: a model that is not flat, or a layer that can't be computed in tiles that exchange borders, by name.
    """
    if not is_flat(model):
        raise ValueError(
            f"this model can't be computed in parts, as {not_flat(model)}; or set "
            "spatial.exchange_every to all"
        )
    dims, lines = dims_of(model), getattr(model, "lines", {})

    def node(call: Call) -> Node:
        try:
            return node_of(call, dims)
        except ValueError as e:
            raise ValueError(
                f"{e} (it is called in {lines[call.name]})" if call.name in lines else str(e)
            ) from None

    return Graph(map(node, calls_of(model)), getattr(model, "of_image", False))
