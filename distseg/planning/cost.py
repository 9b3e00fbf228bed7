"""Find the cost of each layer of a network: seconds, parameters, and the bytes of its result.

The network must be a list of layer calls. Each layer runs on the meta device, where its operations
and their memory traffic are counted. So this file has no list of layer types, and works for a
user's own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distseg.models.network import calls_of
from distseg.planning.layerwise import alone, copied, random_input
from distseg.planning.roofline import V100, Device, counted, seconds_of
from distseg.tiling.graph import Skip, skips_of

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer for one micro-batch.

    Attributes:
        name: the layer's name.
        forward, backward: seconds of a pass.
        parameters: number of parameters.
        output: bytes of the output.
        put_off: the share of the backward pass that computes gradients of convolution weights,
            which a schedule may compute later than the gradients of the layer's inputs.
    """

    name: str
    forward: float
    backward: float
    parameters: int
    output: int
    put_off: float = 0.0


class Seconds(NamedTuple):
    """Seconds of each layer's forward pass, and of each layer's backward pass."""

    forward: Sequence[float]
    backward: Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Costs of all layers of a model, in order.

    Attributes:
        layers: the cost of each layer.
        image: bytes of the images of a micro-batch.
        inputs: for each layer, the indices of the feature maps that it reads; map 0 is the image.
        source: a description of where the seconds come from, such as "modelled for v100".
        weight_bytes: bytes of a weight, a gradient, or a value of the optimizer.
        outside: share of the FLOPs that belong to shapes outside the range of measured shapes.
    """

    layers: tuple[LayerCost, ...]
    image: int
    inputs: tuple[tuple[int, ...], ...]
    source: str
    weight_bytes: int = 4
    outside: float = 0.0

    @cached_property
    def skips(self) -> list[Skip]:
        """Skips of the model: feature maps that a layer other than the next one reads."""
        return skips_of(self.inputs)

    @property
    def calls(self) -> tuple[int, int]:
        """Number of layers that compute anything in their forward pass, and in their backward."""
        return sum(map(bool, self.forward)), sum(map(bool, self.backward))

    @property
    def forward(self) -> list[float]:
        """Seconds of the forward pass of each layer."""
        return [layer.forward for layer in self.layers]

    @property
    def backward(self) -> list[float]:
        """Seconds of the backward pass of each layer."""
        return [layer.backward for layer in self.layers]


def modelled(
    model: nn.Module,
    size: Sequence[int],
    batch: int = 1,
    device: Device = V100,
    precision: str | None = None,
) -> Costs:
    """Return the costs of a model, estimated from its arithmetic and memory traffic on ``device``.

    Args:
        model: a list of layer calls (an nn.Sequential or a distseg.Network) on any device, the meta
            device included. The model is not changed, and no tensor is allocated.
        size: the size of a window in pixels.
        batch: images of a micro-batch.
        device: the throughput of the device to model.
        precision: the number type in which the network computes: fp64, fp32, bf16 or fp16; by
            default that of its weights. With bf16 and fp16, the weights are still fp32, and only
            the tensors that layers exchange are of this type.

    Raises:
        ValueError: the model is not a list of layer calls, or the start or the end of a skip is
            missing.
    """
    dtype = DTYPES[precision] if precision else None

    def outline(t: Tensor) -> Tensor:
        wanted = dtype if t.is_floating_point() else None
        return torch.empty_like(t, device="meta", dtype=wanted)

    model = copied(model, outline)
    kind, flops, outside = precision or "fp32", 0, 0
    x = random_input(model, size, batch, "meta")
    found: list[LayerCost] = []
    for name, call in alone(model, x):
        output, forward = counted(call.forward)
        _, backward = counted(call.backward)
        parameters = sum(p.numel() for p in call.layer.parameters())
        flops += forward.flops + backward.flops
        outside += device.outside(forward, kind) + device.outside(backward, kind)
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in call.layer.modules())
        found.append(
            LayerCost(
                name,
                device.forward * device.seconds(forward, kind),
                device.seconds(backward, kind),
                parameters,
                output.nbytes,
                (0.5 if call.image is None else 1.0) if convolves else 0.0,
            )
        )
    inputs = tuple(call.reads for call in calls_of(model))
    return Costs(
        tuple(found),
        x.nbytes,
        inputs,
        f"modelled for {device.name}",
        8 if x.dtype == torch.float64 else 4,
        outside / flops if flops else 0.0,
    )


def measured(model: nn.Module, size: Sequence[int], batch: int = 1, repeats: int = 3) -> Costs:
    """Return the costs of a model with seconds measured on this machine.

    Each layer runs forward and backward by itself in training mode. Only the activations of one
    layer and the skips are in memory at a time. The model's weights and running statistics do not
    change.

    Args:
        model: a list of layer calls (an nn.Sequential or a distseg.Network), on the device to
            measure.
        size: the size of a window in pixels.
        batch: images of a micro-batch.
        repeats: how often each layer runs; the fastest run counts.
    """
    structure = modelled(model, size, batch)
    device = next(model.parameters()).device
    model = copied(model, lambda t: t if isinstance(t, nn.Parameter) else t.clone())
    times = []
    for _, call in alone(model, random_input(model, size, batch, device)):
        pairs = [
            (seconds_of(call.forward, device), seconds_of(call.backward, device))
            for _ in range(repeats + 1)
        ]
        times.append([min(column) for column in zip(*pairs[1:])])
    layers = tuple(
        replace(layer, forward=f, backward=b) for layer, (f, b) in zip(structure.layers, times)
    )
    return replace(structure, layers=layers, source=f"measured on {device.type}")
