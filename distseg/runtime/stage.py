"""One stage of a pipeline: forward and backward of one micro-batch, from tensors that arrive to tensors that leave.

What arrives is cut off from the graph of the stage that sent it. So each micro-batch has a graph of its own in each
stage, from its inputs (leaves) to its outputs, and the backward pass goes from gradients of the outputs, which arrive
from the stages behind, to gradients of the inputs, which go back to where those came from.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Callable, ContextManager, Protocol, Sequence

import torch
from torch import Tensor

from distseg.runtime.parallelize import TiledModel
from distseg.runtime.partition import Edge
from distseg.tiling.tile_batch import MicroBatch

Tensors = dict[int, list[Tensor]]  # by feature map, a tensor for each piece of the unit
LOSS = -1  # what the last stage puts out: rows of the loss's table


class Head(Protocol):
    """What follows the last stage."""

    def rows(self, unit: MicroBatch, outputs: list[Tensor]) -> list[Tensor]:
        """What the loss is a function of, for each piece, differentiable."""

    def note(self, unit: MicroBatch, rows: list[Tensor]) -> None:
        """Called once a unit, not again when it is recomputed."""

    def slopes(self, unit: MicroBatch, rows: list[Tensor]) -> list[Tensor]:
        """The loss's gradient with respect to the rows."""


@dataclass
class Stage:
    """Layers ``layers`` of ``model``, stage ``number`` of a partition.

    Args:
        incoming, outgoing: the edges to and from other stages.
        head: behind the last stage, else None.
        autocast: makes the context in which the network runs.
        after_layer: called between layers, so that messages under way move on.
    """

    number: int
    model: TiledModel
    layers: range | None
    incoming: list[Edge]
    outgoing: list[Edge]
    head: Head | None = None
    autocast: Callable[[], ContextManager] = nullcontext
    after_layer: Callable[[], None] | None = None
    _kept: dict[int, tuple[MicroBatch, Tensors, Tensors | None]] = field(default_factory=dict)

    def forward(self, m: int, unit: MicroBatch, inputs: Tensors, keep: bool) -> Tensors:
        """The tensors that leave, without a graph. ``keep``: activations wait for the backward pass; else the inputs do."""
        with torch.set_grad_enabled(keep and torch.is_grad_enabled()):
            outputs = self.run(unit, inputs)
        if self.head:
            self.head.note(unit, outputs[LOSS])
        if torch.is_grad_enabled():
            self._kept[m] = unit, inputs, outputs if keep else None
        return {source: [x.detach() for x in xs] for source, xs in outputs.items()}

    def backward(self, m: int, gradients: Sequence[tuple[int, list[Tensor]]]) -> Tensors:
        """Adds to the parameters' gradients; returns those of the inputs that want one. ``gradients``: (map, for each piece) of the outgoing edges."""
        unit, inputs, outputs = self._kept.pop(m)
        if self.head:
            gradients = [(LOSS, self.head.slopes(unit, outputs[LOSS]))]
        pairs = [
            (x, g)
            for source, gs in gradients
            for x, g in zip(outputs[source], gs)
            if x.requires_grad
        ]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))
        return {
            edge.map: [_gradient(x) for x in inputs[edge.map]]
            for edge in self.incoming
            if edge.gradient
        }

    def dropped(self, m: int) -> bool:
        """Whether the activations of a micro-batch were not kept."""
        return self._kept[m][2] is None

    def recompute(self, m: int) -> None:
        """The forward pass once more, with the same dropout masks (they are keyed) and statistics that are not counted again."""
        unit, inputs, _ = self._kept[m]
        with self.model.context.repeating():
            self._kept[m] = unit, inputs, self.run(unit, inputs)

    def run(self, unit: MicroBatch, inputs: Tensors) -> Tensors:
        """From the incoming edges' maps (for the first stage: pixels) to the outgoing edges', or to the rows of the loss."""
        places = [p.place for p in unit.pieces]
        with self.autocast():
            if self.layers is None:
                xs = self.model(inputs[0], places)
            else:
                maps = [
                    {source: xs[i] for source, xs in inputs.items()} for i in range(len(places))
                ]
                self.model.run(
                    maps,
                    places,
                    self.layers,
                    [edge.map for edge in self.outgoing],
                    self.after_layer,
                )
                xs = [had[self.layers.stop] for had in maps]
        if self.head:
            return {LOSS: self.head.rows(unit, xs)}
        return {edge.map: [had[edge.map] for had in maps] for edge in self.outgoing}

    def clear(self) -> None:
        """Forget micro-batches whose backward pass never came, after an error."""
        self._kept.clear()


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
