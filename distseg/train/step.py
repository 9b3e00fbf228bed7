"""One optimizer step: the exact gradient of the step's loss over all samples, tiles and micro-batches.

The loss is a function of sums over pixels (:mod:`distseg.train.loss`), so the step has three parts: run the windows
forward and collect the rows of sums; add the rows of all ranks and take dL/dS; run backward from the local rows with
that slope. With several micro-batches each runs forward and backward in turn, which needs dL/dS beforehand: labels give
it for cross-entropy and its kin; for Dice a forward pass without gradients goes first.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Callable, ContextManager

import torch
from torch import Tensor

from distseg.comm.collective import add
from distseg.data.loader import Piece
from distseg.spatial.parallelize import TiledModel
from distseg.train.loss import Loss


@dataclass(frozen=True)
class Rows:
    """Where a sample group's images stand in the step's table: group by group, micro-batch by micro-batch."""

    groups: int
    group: int
    micro_batches: int
    images: int

    @property
    def total(self) -> int:
        return self.groups * self.micro_batches * self.images

    def of(self, micro_batch: int, image: int) -> int:
        return (self.group * self.micro_batches + micro_batch) * self.images + image


@dataclass(frozen=True)
class Unit:
    """Pieces that run through the network together."""

    micro_batch: int
    pieces: list[Piece]


class GradientStep:
    """Adds the gradient of a step's loss to the parameters' ``grad``: this rank's part; the replicas' sum is the whole.

    Args:
        replicas: the communicator of all ranks that share the weights.
        autocast: makes the context in which the network runs.
    """

    def __init__(self, model: TiledModel, loss: Loss, rows: Rows, replicas, autocast: Callable[[], ContextManager] = nullcontext):
        self.model, self.loss, self.rows, self.replicas, self.autocast = model, loss, rows, replicas, autocast

    def __call__(self, micro_batches: list[list[Piece]]) -> float:
        """Forward and backward over the step's micro-batches; returns the loss of the whole step on every rank."""
        units = self._units(micro_batches)
        if len(units) == 1:
            return self._at_once(units[0])
        slope = self._slope_beforehand(units)
        table = self._empty()
        for unit in units:
            results = self._forward(unit)
            for at, rows in results:
                table[at] += rows.detach().double().cpu()
            _backward(results, slope)
        return self.loss.value(add(table, self.replicas)).item()

    def _units(self, micro_batches: list[list[Piece]]) -> list[Unit]:
        """Micro-batches as they are while norms are live; otherwise piece by piece, for the memory of one."""
        if self.model.live_norms:
            return [Unit(m, pieces) for m, pieces in enumerate(micro_batches)]
        return [Unit(m, [piece]) for m, pieces in enumerate(micro_batches) for piece in pieces]

    def _at_once(self, unit: Unit) -> float:
        results = self._forward(unit)
        table = self._empty()
        for at, rows in results:
            table[at] += rows.detach().double().cpu()
        value, slope = self.loss.slope(add(table, self.replicas))
        _backward(results, slope)
        return value

    def _forward(self, unit: Unit) -> list[tuple[list[int], Tensor]]:
        """For each piece the rows of the table it adds to, and its sums."""
        with self.autocast():
            outputs = self.model([p.pixels for p in unit.pieces], [p.place for p in unit.pieces])
        results = []
        for piece, output in zip(unit.pieces, outputs):
            tile = output[(slice(None), slice(None), *piece.place.owned.slices)]
            at = [self.rows.of(unit.micro_batch, image) for image in piece.place.images]
            results.append((at, self.loss.rows(tile, piece.labels)))
        return results

    def _slope_beforehand(self, units: list[Unit]) -> Tensor:
        table = self._empty()
        if self.loss.linear:
            for unit in units:
                for piece in unit.pieces:
                    at = [self.rows.of(unit.micro_batch, image) for image in piece.place.images]
                    table[at] += self.loss.counts(piece.labels)
        else:
            context = self.model.context
            context.tracking = False
            with torch.no_grad():
                for unit in units:
                    for at, rows in self._forward(unit):
                        table[at] += rows.double().cpu()
            context.tracking = True
        return self.loss.slope(add(table, self.replicas))[1]

    def _empty(self) -> Tensor:
        return torch.zeros(self.rows.total, self.loss.sums, dtype=torch.float64)


def _backward(results: list[tuple[list[int], Tensor]], slope: Tensor) -> None:
    """From the rows of all pieces at once: pieces that went through a norm together share a graph."""
    torch.autograd.backward([rows for _, rows in results], [slope[at].to(rows) for at, rows in results])
