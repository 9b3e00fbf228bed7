"""Initial weights, layer by layer: each from a key of its own, so that a rank can make its layers' and no others."""

from __future__ import annotations

import torch
from torch import nn

from distseg.models.network import flat_layers, is_flat
from distseg.tiling import rng


def materialise(model: nn.Module, seed: int, positions: set[int] | None = None) -> None:
    """Give a model that is only outlined (on the meta device) memory and PyTorch's default weights (float32, CPU), in place.

    Args:
        seed: a layer's weights depend on it and on the layer's name alone. Layers that have memory stay as they are.
        positions: the layers of a flat model to do this for; all by default.
    """
    layers = flat_layers(model) if is_flat(model) else [("", model)]
    with torch.random.fork_rng(devices=[]):
        for position, (name, layer) in enumerate(layers):
            if positions is None or position in positions:
                _materialise(layer, rng.key(seed, name, "weights"))


def _materialise(layer: nn.Module, key: int) -> None:
    if not any(t.is_meta for t in [*layer.parameters(), *layer.buffers()]):
        return
    layer.to_empty(device="cpu")
    torch.default_generator.manual_seed(
        key
    )  # torch.manual_seed notes a traceback for each kind of GPU, and keeps it
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
