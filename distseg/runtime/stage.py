"""Runs one stage of a pipeline: forward and backward pass of one micro-batch.

Received tensors are detached from the graph of the stage that sent them. Each micro-batch therefore
has a graph of its own in each stage, from the stage's inputs (leaves) to its outputs. The backward
pass starts with the gradients of the outputs, which later stages send. It computes the gradients of
the inputs, which are sent back to the stages that the inputs came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from distseg.runtime.partition import Edge
from distseg.runtime.swap_layers import TiledModel
from distseg.tiling.tile_batch import MicroBatch

Tensors = dict[int, list[Tensor]]  # For each feature map, a tensor for each tile batch.
LOSS = -1  # Key of the last stage's output: the partial sums of the loss.


class Head(Protocol):
    """Interface of the object that gets the network's results in the last stage.

    In training, this object computes the partial sums of the loss and their gradient. Partial sums
    are sums over a tile's pixels of which the loss is a function.
    """

    def rows(self, unit: MicroBatch, outputs: list[Tensor]) -> list[Tensor]:
        """Return the partial sums of the loss: for each tile batch a tensor with autograd graph.

        Args:
            unit: the micro-batch, with its labels.
            outputs: the network's results, one for each tile batch.
        """

    def note(self, unit: MicroBatch, rows: list[Tensor]) -> None:
        """Record the partial sums of a micro-batch.

        This method is called in the first forward pass only, not when the pass is repeated.

        Args:
            unit: the micro-batch.
            rows: the partial sums that :meth:`rows` returned.
        """

    def loss_grads(self, unit: MicroBatch, rows: list[Tensor]) -> list[Tensor]:
        """Return the gradient of the loss with respect to each tile batch's partial sums.

        Args:
            unit: the micro-batch.
            rows: the partial sums that :meth:`rows` returned.
        """


@dataclass
class Stage:
    """Layers of a model that form one stage of a partition.

    Args:
        number: the index of the stage in the partition.
        model: the model.
        layers: the layers of the stage; None for a model that is not cut into stages.
        incoming: the edges from other stages.
        outgoing: the edges to other stages.
        head: the object that computes the loss in the last stage (:class:`Head`); None for any
            other stage.
        autocast: returns the context manager in which the network runs.
        after_layer: called after each layer, to advance messages that are under way.
    """

    number: int
    model: TiledModel
    layers: range | None
    incoming: list[Edge]
    outgoing: list[Edge]
    head: Head | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    after_layer: Callable[[], None] | None = None
    _kept: dict[int, tuple[MicroBatch, Tensors, Tensors | None]] = field(default_factory=dict)

    def forward(self, m: int, unit: MicroBatch, inputs: Tensors, keep: bool) -> Tensors:
        """Run the forward pass and return the outgoing feature maps, detached from the graph.

        The result is a dict: for each number of a feature map, a tensor for each tile batch. A
        stage with a head returns only the partial sums of the loss, under the key ``LOSS``.

        Args:
            m: the index of the micro-batch.
            unit: the micro-batch.
            inputs: for each incoming feature map, a tensor for each tile batch. The first stage
                gets the pixels as feature map 0.
            keep: True to keep the activations until the backward pass. Otherwise only the inputs
                are kept.
        """
        with torch.set_grad_enabled(keep and torch.is_grad_enabled()):
            outputs = self.run(unit, inputs)
        if self.head:
            self.head.note(unit, outputs[LOSS])
        if torch.is_grad_enabled():
            self._kept[m] = unit, inputs, outputs if keep else None
        return {source: [x.detach() for x in xs] for source, xs in outputs.items()}

    def backward(self, m: int, gradients: Sequence[tuple[int, list[Tensor]]]) -> Tensors:
        """Run the backward pass, and return the gradients of the stage's inputs.

        The gradients of the parameters are added to their ``grad``. The result has, for each
        incoming feature map whose edge needs a gradient, a gradient for each tile batch.

        Args:
            m: the index of the micro-batch.
            gradients: for each outgoing edge, the number of its feature map and the gradients of
                all tile batches. The last stage ignores this argument, because its head computes
                the gradient.
        """
        unit, inputs, outputs = self._kept.pop(m)
        if self.head:
            gradients = [(LOSS, self.head.loss_grads(unit, outputs[LOSS]))]
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
        """Return True if this stage has not kept the activations of micro-batch ``m``."""
        return self._kept[m][2] is None

    def recompute(self, m: int) -> None:
        """Repeat the forward pass of micro-batch ``m``, and keep its activations.

        Dropout masks are the same as in the first pass, because each mask is computed from a key of
        the image and the layer. Norms do not count their statistics again.
        """
        unit, inputs, _ = self._kept[m]
        with self.model.context.repeating():
            self._kept[m] = unit, inputs, self.run(unit, inputs)

    def run(self, unit: MicroBatch, inputs: Tensors) -> Tensors:
        """Run the stage's layers and return the outgoing feature maps with their autograd graph.

        A stage with a head returns the partial sums of the loss instead.

        Args:
            unit: the micro-batch.
            inputs: the incoming feature maps, as for :meth:`forward`.
        """
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

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stage; one that several layers share comes several times."""
        if self.layers is None:
            yield from self.model.parameters()
        for number in self.layers or ():
            yield from self.model.layers[number].parameters()

    def clear(self) -> None:
        """Release the activations of micro-batches whose backward pass an error has prevented."""
        self._kept.clear()


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
