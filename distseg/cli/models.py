"""Describe networks by parameters, layers, stride and halo."""

from __future__ import annotations

import math

from distseg.config.settings import ModelConfig
from distseg.layers.graph import receptive_field
from distseg.models.network import flat_layers, is_flat
from distseg.models.zoo import ZOO, outline_model


def describe_model(name: str) -> dict:
    """Return the row of the table of ``distseg models`` about one network.

    Memory for the weights is allocated only for a user's own network.

    Args:
        name: the name of a network, or a user's own function as ``package.module:function``.

    Returns:
        ``name``, ``parameters`` (their number), ``layers`` (their number; None if the network is
            not a list of layers), ``halo`` in pixels (the largest over the dims), ``stride`` in
            pixels (a common multiple for all dims), and ``paper_halo``, the halo by the formula of
            Seal et al. 2020; None for networks without it.
    """
    model = outline_model(ModelConfig(name))
    reach = receptive_field(model)
    return {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": len(flat_layers(model)) if is_flat(model) else None,
        "stride": math.lcm(*reach.stride),
        "halo": max(reach.halo),
        "paper_halo": ZOO[name].paper_halo if name in ZOO else None,
    }
