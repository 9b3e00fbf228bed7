"""What each layer of a flat model costs: seconds forward and backward, and the tensors that autograd keeps in between.

PyTorch is asked, layer by layer on the meta device, so no kind of layer is known here and a user's own layers count
too. A convolution, a norm and an activation keep their input, max-pooling its indices as well, channel dropout its
small mask, a concatenation nothing. What two layers keep is one tensor in memory; hence tensors have numbers::

    number    0  enc0_conv0  1  enc0_drop0  3  enc0_norm0  4
    kept         {0}            {2: mask}      {3}
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distseg.models.network import calls_of
from distseg.planning.layerwise import Numbers, alone, copied, random_input
from distseg.planning.roofline import V100, Device, counted
from distseg.tiling.graph import Skip, skips_of


@dataclass(frozen=True)
class LayerCost:
    """Of one layer and one micro-batch.

    Attributes:
        forward, backward: seconds.
        parameters: count.
        activation: bytes that autograd keeps for this layer and for none before it; their sum is the model's.
        output: bytes.
        kept: the numbers of the tensors that autograd keeps for this layer, parameters aside.
        result: the number of its output; that of its input if it hands it on.
        puts_off: whether it has convolutions, whose weights' gradients may wait.
    """

    name: str
    forward: float
    backward: float
    parameters: int
    activation: int
    output: int
    kept: frozenset[int]
    result: int
    puts_off: bool = False


@dataclass(frozen=True)
class Costs:
    """Of all layers in order, and the maps that each is called with. ``sizes`` are the bytes of the tensors by number; number 0 is the model's input."""

    layers: tuple[LayerCost, ...]
    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    source: str

    @cached_property
    def skips(self) -> list[Skip]:
        """Return the maps that a later layer than the next reads; worked out once, as planning asks for every run of layers."""
        return skips_of(self.inputs)

    @property
    def forward(self) -> list[float]:
        return [layer.forward for layer in self.layers]

    @property
    def backward(self) -> list[float]:
        return [layer.backward for layer in self.layers]


def modelled(model: nn.Module, size: Sequence[int], batch: int = 1, device: Device = V100) -> Costs:
    """Costs by arithmetic and traffic on ``device``; nothing is allocated.

    Args:
        model: flat, on any device, the meta device included; it is not changed.
        size: of a window in pixels.
        batch: images of a micro-batch.

    Raises:
        ValueError: the model is not flat, or its skips do not match.
    """
    model = copied(model, lambda t: torch.empty_like(t, device="meta"))
    numbers = Numbers(model)
    x = random_input(model, size, batch, "meta")
    numbers.of(x)
    found: list[LayerCost] = []
    for name, call in alone(model, x):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output, forward = counted(call.forward)
        _, backward = counted(call.backward)
        keeps = frozenset(numbers.of(t) for t in kept if not numbers.is_weight(t))
        parameters = sum(p.numel() for p in call.layer.parameters())
        result, convolves = (
            numbers.of(output),
            any(isinstance(m, nn.modules.conv._ConvNd) for m in call.layer.modules()),
        )
        found.append(
            LayerCost(
                name,
                device.seconds(forward),
                device.seconds(backward),
                parameters,
                0,
                output.nbytes,
                keeps,
                result,
                convolves,
            )
        )
    inputs = tuple(call.reads for call in calls_of(model))
    return Costs(
        tuple(_counted_once(found, numbers.sizes)),
        tuple(numbers.sizes),
        inputs,
        f"modelled for {device.name}",
    )


def measured(model: nn.Module, size: Sequence[int], batch: int = 1, repeats: int = 3) -> Costs:
    """Costs with the seconds of this machine: each layer forward and backward, in training mode, the fastest of ``repeats``.

    One layer's activations and the skips are alive at a time. The model's weights and running statistics stay as they are.

    Args:
        model: flat, on the device to measure.
        size, batch: as of :func:`modelled`.
    """
    structure = modelled(model, size, batch)
    device = next(model.parameters()).device
    model = copied(model, lambda t: t if isinstance(t, nn.Parameter) else t.clone())
    times = []
    for _, call in alone(model, random_input(model, size, batch, device)):
        pairs = [
            (_seconds(call.forward, device), _seconds(call.backward, device))
            for _ in range(repeats + 1)
        ]
        times.append([min(column) for column in zip(*pairs[1:])])
    layers = tuple(
        replace(layer, forward=f, backward=b) for layer, (f, b) in zip(structure.layers, times)
    )
    return replace(structure, layers=layers, source=f"measured on {device.type}")


def _counted_once(layers: list[LayerCost], sizes: list[int]) -> Iterator[LayerCost]:
    seen: set[int] = set()
    for layer in layers:
        yield replace(layer, activation=sum(sizes[t] for t in layer.kept - seen))
        seen |= layer.kept


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
