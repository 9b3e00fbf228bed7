"""One optimizer step: the exact gradient of the step's loss over all samples, tiles, stages and micro-batches.

The loss is a function of sums over pixels (:mod:`distseg.layers.loss`). So behind the last stage stands a table of such
sums, a row an image; the rows of all ranks are added, and dL/dS of the table is where every backward pass begins. It
must be known by then: from the labels alone (cross-entropy and its kin), because all forward passes are done (GPipe, or a
single micro-batch), or, for Dice under 1F1B and ZB-H1, from a forward pass without gradients that goes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from distseg.comm.collective import add
from distseg.comm.staging import upload
from distseg.data.sampler import Rows
from distseg.layers.context import Context
from distseg.layers.loss import Loss
from distseg.runtime.actions import Action, Backward, Forward
from distseg.runtime.devices import DevicePipeline
from distseg.runtime.interleaved import can_interleave, interleaved
from distseg.runtime.operations import Operation
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.schedule import orders
from distseg.runtime.streaming import StreamingExecutor
from distseg.runtime.tile_program import StagePlan, beforehand, step
from distseg.tiling.tile import Box, TilePlacement
from distseg.tiling.tile_batch import LazyTileBatch, MicroBatch, TileBatch, on_tile


class LossHead:
    """What follows the last stage: the table of sums, the loss and its slope.

    Args:
        replicas: the communicator of all ranks that hold the last stage.
    """

    def __init__(self, loss: Loss, rows: Rows, replicas):
        self.loss, self.at, self.replicas = loss, rows, replicas
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.table = torch.zeros(self.at.total, self.loss.sums, dtype=torch.float64)
        self._noted: list[
            tuple[list[int], Tensor]
        ] = []  # rows of the table that are on a GPU still
        self.slope: Tensor | None = None
        self.value: float | None = None

    def rows(self, unit: MicroBatch, outputs: list[Tensor]) -> list[Tensor]:
        return [
            self.loss.rows(
                y if p.labels.shape[1:] == y.shape[2:] else on_tile(y, p.place), p.labels
            )
            for p, y in zip(unit.pieces, outputs)
        ]

    def note(self, unit: MicroBatch, rows: list[Tensor]) -> None:
        for piece, found in zip(unit.pieces, rows):
            if found.is_cuda:
                self._noted.append((self._at(unit, piece), found.detach().double()))
            else:
                self.table[self._at(unit, piece)] += found.detach().double()

    def note_counts(self, units: Iterable[MicroBatch]) -> None:
        """The part of the table that labels determine."""
        for unit in units:
            self.note(unit, [self.loss.counts(p.labels) for p in unit.pieces])

    def slopes(self, unit: MicroBatch, rows: list[Tensor]) -> list[Tensor]:
        if self.slope is None:
            self._settle()
        return [
            upload(self.slope[self._at(unit, p)], found.device, found.dtype)
            for p, found in zip(unit.pieces, rows)
        ]

    def settle_beforehand(self) -> None:
        """Take the slope from the table as it is, and begin the table anew."""
        self._settle()
        self.table.zero_()
        self.value = None

    def step_loss(self) -> float:
        """The loss of the step, once all its rows are noted. Collective over the replicas, as whatever comes here first."""
        if self.value is None:
            self._settle()
        return self.value

    def _settle(self) -> None:
        self._fetch()
        self.value, self.slope = self.loss.slope(add(self.table, self.replicas))

    def _fetch(self) -> None:
        """Bring all rows into the table that were noted on a GPU, which is waited for once."""
        if self._noted:
            places, rows = zip(*self._noted)
            self._noted.clear()
            for at, found in zip(
                places,
                torch.cat([r.to(rows[0].device) for r in rows]).cpu().split([len(r) for r in rows]),
            ):
                self.table[at] += found

    def _at(self, unit: MicroBatch, piece: TileBatch) -> list[int]:
        return [self.at.of(unit.micro_batch, image) for image in piece.place.images]


class GradientStep:
    """Adds the gradient of a step's loss to the parameters' ``grad``: this rank's part; the replicas' sum is the whole.

    Args:
        way: how this rank computes its part.
        head: on the rank with the last stage, else None.
    """

    def __init__(
        self,
        way: "OnStages | OnDevices | InTiles",
        head: LossHead | None,
        loss: Loss,
        context: Context,
    ):
        self.way, self.head, self.loss, self.context = way, head, loss, context

    def __call__(self, micro_batches: list[list[TileBatch]] | list[list[LazyTileBatch]]) -> float:
        """Forward and backward over the step's micro-batches; returns the loss of the whole step, 0 on ranks without the last stage."""
        given = self.way.given(micro_batches)
        if self.head:
            self.head.clear()
        if self.way.goes_back_early(given):
            self._settle_beforehand(given)
        self.way.run(given)
        return self.head.step_loss() if self.head else 0.0

    def _settle_beforehand(self, given) -> None:
        if not self.loss.linear:
            with torch.no_grad(), self.context.repeating():
                self.way.run_forward(given)
        elif self.head:
            self.head.note_counts(self.way.labelled(given))
        if self.head:
            self.head.settle_beforehand()


class OnStages:
    """Through stages that keep their graphs, this rank's of a pipeline or a lone one.

    Args:
        schedule: gpipe, 1f1b or zb-h1.
        together: whether the pieces of a micro-batch run together, as live norms want it; else one by one, for the memory of one.
    """

    def __init__(self, pipeline: Pipeline, schedule: str, together: bool):
        self.pipeline, self.schedule, self.together = pipeline, schedule, together
        # Of each rank, by the number of units: the same in every step, as a rule; for the V it takes a simulation.
        self.orders_of = lru_cache(
            lambda micro_batches: orders(schedule, pipeline.partition.placement, micro_batches)
        )

    def given(self, micro_batches: list[list[TileBatch]]) -> list[MicroBatch]:
        return units_of(micro_batches, self.together)

    def goes_back_early(self, units: list[MicroBatch]) -> bool:
        """Whether backward passes begin before all forward passes are through, so that the loss's slope must be known by then."""
        return not _forwards_first(
            self.orders_of(len(units))[self.pipeline.partition.placement[-1]]
        )

    def labelled(self, units: list[MicroBatch]) -> list[MicroBatch]:
        """All labels, for what is known from them alone."""
        return units

    def run_forward(self, units: list[MicroBatch]) -> None:
        self.pipeline.run(
            [action for action in self._actions(units) if isinstance(action, Forward)], units
        )

    def run(self, units: list[MicroBatch]) -> None:
        self.pipeline.run(self._actions(units), units)

    def _actions(self, units: list[MicroBatch]) -> Sequence[Action]:
        return self.orders_of(len(units))[self.pipeline.comm.rank]


class OnDevices:
    """Through all stages on several devices of this rank: all forward passes, then all backward passes."""

    schedule = "gpipe"

    def __init__(self, pipeline: DevicePipeline):
        self.pipeline, self.run = pipeline, pipeline.run

    def given(self, micro_batches: list[list[TileBatch]]) -> list[MicroBatch]:
        return units_of(micro_batches, together=False)

    def goes_back_early(self, units: list[MicroBatch]) -> bool:
        return False


@dataclass(frozen=True)
class Tiled:
    """A step in blocks, by micro-batch, and what this rank has of it."""

    blocks: list[list[LazyTileBatch]]
    places: list[list[TilePlacement]]
    works: list[StagePlan]


class InTiles:
    """Tile after tile, in the memory of one.

    A lone stage ends a micro-batch before it begins the next, unless the loss is known only after all of them. The maps of micro-batches
    that stages of a pipeline have under way wait where maps are stored: of all of them by gpipe, of as many as there are stages by 1f1b; by 1f1b
    and without live norms tiles go back in turn, whatever micro-batch they are of (:mod:`distseg.runtime.interleaved`).
    """

    def __init__(
        self, executor: StreamingExecutor, head: LossHead | None, loss: Loss, order: str = "gpipe"
    ):
        self.executor, self.head, self.loss = executor, head, loss
        self.order = (
            order if executor.comm.size > 1 else "gpipe"
        )  # a lone stage has nobody to take turns with
        self.schedule = f"{self.order}, streamed tiles"
        self.all_at_once = executor.comm.size > 1 or not loss.linear
        self.goes_before = self.order == "1f1b" and not loss.linear
        self._programs: dict[tuple, list[Operation]] = {}

    def given(self, micro_batches: list[list[LazyTileBatch]]) -> Tiled:
        places = [[block.place for block in blocks] for blocks in micro_batches]
        return Tiled(
            micro_batches, places, [self.executor.work(those, m) for m, those in enumerate(places)]
        )

    def goes_back_early(self, given: Tiled) -> bool:
        return self.loss.linear or self.goes_before

    def labelled(self, given: Tiled) -> Iterator[MicroBatch]:
        return (
            _unit(m, block, box)
            for m, blocks in enumerate(given.blocks)
            for block in blocks
            for box in self.executor.label_tiles(block)
        )

    def run_forward(self, given: Tiled) -> None:
        self._run(self.before(given.works), given)

    def run(self, given: Tiled) -> None:
        self._run(self.program(given.works, given.places), given)

    def before(self, works: list[StagePlan]) -> list[Operation]:
        """The forward passes that go before all else; none where the loss is known otherwise."""
        return beforehand(works, self._actions(len(works))) if self.goes_before else []

    def program(self, works: list[StagePlan], places: list[list[TilePlacement]]) -> list[Operation]:
        """Of all micro-batches, by their works and where their blocks lie; made once for each sizes of images."""
        every = range(len(works))
        together = [every] if self.all_at_once else [[m] for m in every]
        for those in together:
            self.executor.check_room(*(places[m] for m in those))
        key = tuple(map(id, works))  # which the executor keeps
        if key not in self._programs:
            self._programs[key] = [
                op
                for those in together
                for op in self._operations([works[m] for m in those], [places[m] for m in those])
            ]
        return self._programs[key]

    def _operations(
        self, works: list[StagePlan], places: list[list[TilePlacement]]
    ) -> list[Operation]:
        everyone = (
            [self.executor.works_of_all(those, work.number) for work, those in zip(works, places)]
            if self.order == "1f1b"
            else []
        )
        if everyone and all(map(can_interleave, everyone)):
            return self.executor.keeping(
                interleaved([*zip(*everyone)])[self.executor.comm.rank], works
            )
        return step(works, self._actions(len(works)), self.loss.linear or self.goes_before)

    def _actions(self, micro_batches: int) -> Sequence[Action]:
        actions = orders(self.order, self.executor.placement, micro_batches)[
            self.executor.comm.rank
        ]
        if (
            self.order == "gpipe"
        ):  # the first micro-batch first in the backward passes too: its maps are there before the others are
            actions = [
                replace(a, micro_batch=micro_batches - 1 - a.micro_batch)
                if isinstance(a, Backward)
                else a
                for a in actions
            ]
        return actions

    def _run(self, program: Sequence[Operation], given: Tiled) -> None:
        settle = self.head.settle_beforehand if self.head else None
        with self.executor.transfers.moving():
            for op, output in self.executor.run(program, given.works, given.blocks, settle):
                unit = _unit(op.micro_batch, given.blocks[op.micro_batch][op.block], op.box)
                self._end(
                    unit,
                    output,
                    self.executor.name_of(given.works[op.micro_batch].segments[op.segment]),
                )
        self.executor.transfers.flush()

    def _end(self, unit: MicroBatch, output: Tensor, name: str) -> None:
        """The loss of a tile, and its backward pass if its slope is known."""
        rows = self.head.rows(unit, [output])
        self.head.note(unit, rows)
        if output.requires_grad:
            with self.executor.span("backward", name):
                torch.autograd.backward(rows, self.head.slopes(unit, rows))


def _unit(m: int, block: LazyTileBatch, box: Box) -> MicroBatch:
    """A tile of a block."""
    return MicroBatch(m, [TileBatch(None, block.labels(box), replace(block.place, tile=box))])


def units_of(micro_batches: list[list[TileBatch]], together: bool) -> list[MicroBatch]:
    """The pieces of a micro-batch in a unit, or one by one."""
    if together:
        return [MicroBatch(m, pieces) for m, pieces in enumerate(micro_batches)]
    return [MicroBatch(m, [piece]) for m, pieces in enumerate(micro_batches) for piece in pieces]


def _forwards_first(actions: Sequence[Action]) -> bool:
    """Whether every forward pass comes before the first backward pass."""
    kinds = [isinstance(a, Forward) for a in actions]
    return kinds == sorted(kinds, reverse=True)
