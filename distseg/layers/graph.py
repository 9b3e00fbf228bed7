"""The graph of a network with the access pattern of each layer, and the receptive field."""

from __future__ import annotations

from torch import nn

from distseg.layers.layer_table import node_of
from distseg.models.bands import bands_of, dims_of
from distseg.models.network import Call, calls_of, is_flat, not_flat
from distseg.models.probing import probed_reach
from distseg.tiling.graph import Graph, Node
from distseg.tiling.layout import reach_of
from distseg.tiling.tile import ReceptiveField


def receptive_field(model: nn.Module) -> ReceptiveField:
    """Return the halo and total stride of a model, in pixels along each spatial dim.

    The model must map (N, C, *size) to (N, C', *size). If it is a list of layer calls with known
    access patterns, such as an ``nn.Sequential``, halo and stride are computed from these.
    Otherwise they are measured by runs of the model.

    Args:
        model: the model, on any device, which may be the meta device. It is not changed.

    Raises:
        ValueError: the model has no convolution, changes the spatial size, or its receptive field
            has no bound.
    """
    return reach_for(model, True)


def reach_for(model: nn.Module, cut: bool) -> ReceptiveField:
    """Return the receptive field of a model, and measure it only if ``cut`` is True.

    If the model is a list of layer calls with known access patterns, the receptive field is
    computed from these. Only other models need the measurement, which runs the model.

    Args:
        model: the model, as for :func:`receptive_field`.
        cut: True if images are cut into tiles. If False, a model that would need the measurement
            gets halo 0 and stride 1.
    """
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
    """Return the graph of a network that is a list of layer calls, with a node for each call.

    A node holds the call's inputs and its access pattern.

    Args:
        model: the network, on any device, which may be the meta device.

    Raises:
        ValueError: the model is not a list of layer calls, or a layer cannot be computed in tiles
            with halo exchange. The message names the layer.
    """
    if not is_flat(model):
        raise ValueError(
            f"this model cannot be computed in tiles with halo exchange, as {not_flat(model)}; "
            "otherwise set spatial.exchange_every to all, which needs no exchange"
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
