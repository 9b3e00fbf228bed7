"""Draw initial weights by a random key for each layer, so a rank can initialise only its layers."""

from __future__ import annotations

import torch
from torch import nn

from distseg.models.network import flat_layers, is_flat, user_name
from distseg.tiling import rng


def materialise(model: nn.Module, seed: int, positions: set[int] | None = None) -> None:
    """Give a model on the meta device memory and PyTorch's default weights, in place.

    The weights are float32 on the CPU. Layers that are not on the meta device stay as they are.

    Args:
        model: the model to initialise.
        seed: the seed. The weights of a layer depend only on the seed and on the layer's name.
        positions: the indices of the layers to initialise, by default all. Only a model that is a
            list of layer calls has several layers; another model is layer 0.

    Raises:
        ValueError: a parameter or buffer belongs to a module without ``reset_parameters``.
    """
    layers = flat_layers(model) if is_flat(model) else [("", model)]
    with torch.random.fork_rng(devices=[]):
        for position, (name, layer) in enumerate(layers):
            if positions is None or position in positions:
                _check_initial_values(layer, name, model)
                _materialise(layer, rng.key(seed, name, "weights"))


def _check_initial_values(layer: nn.Module, name: str, model: nn.Module) -> None:
    """Refuse a layer on the meta device whose values nothing initialises.

    Args:
        layer: the layer to check.
        name: its name in ``model``, or an empty string if it is the whole model.
        model: the model, which knows the names in the user's module.
    """
    for part, module in layer.named_modules(prefix=name):
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_meta or hasattr(module, "reset_parameters"):
                continue
            named = user_name(f"{part}.{own}".removeprefix("."), model)
            raise ValueError(
                f"{named} is on the meta device, and no reset_parameters of its module would "
                "initialise it: make the module on the CPU"
            )


def _materialise(layer: nn.Module, key: int) -> None:
    """Allocate a layer that is on the meta device, and draw its weights with the seed ``key``."""
    if not any(t.is_meta for t in [*layer.parameters(), *layer.buffers()]):
        return
    # Module.to_empty would call empty_like on the meta device, which imports sympy (40 MB).
    layer._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))
    # torch.manual_seed would also store a traceback for each kind of GPU.
    torch.default_generator.manual_seed(key)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
