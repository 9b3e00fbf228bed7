"""Compute the exact gradient of a step's loss over all samples, tiles, stages and micro-batches.

The loss L is a function of sums over pixels (:mod:`distseg.layers.loss`). Each rank with the last
stage keeps a table S of these partial sums, with one row per image. The tables of all ranks are
added, and every backward pass begins with dL/dS, the loss gradient. So the loss gradient must be
known before the first backward pass. There are three ways to know it:

- the labels alone determine it (cross-entropy and other linear losses);
- all forward passes are done before (GPipe, or a single micro-batch);
- an extra forward pass without gradients computes it (Dice under 1F1B and ZB-H1).

The update of the weights is ``Engine.update`` (:mod:`distseg.training.engine`).

Words of this module: a *tile batch* is one window of several images of one size, in memory or, with
streamed tiles, read when it is needed (*lazy tile batch*). Its *placement* says where the tile lies
in the images. With streamed tiles, a *stage plan* lists the segments of the network and the feature
maps that a rank handles for one micro-batch (:class:`distseg.runtime.tile_program.StagePlan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from distseg.comm.collective import add
from distseg.comm.staging import upload
from distseg.data.sampler import Rows
from distseg.layers.context import Context
from distseg.layers.criterion import Criterion
from distseg.runtime.actions import Action, Backward, Forward
from distseg.runtime.devices import DevicePipeline
from distseg.runtime.interleaved import can_interleave, interleaved
from distseg.runtime.operations import Operation
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.schedule import orders
from distseg.runtime.streaming import StreamingExecutor
from distseg.runtime.tile_program import StagePlan, extra_forward, step
from distseg.tiling.tile import Box, TilePlacement
from distseg.tiling.tile_batch import LazyTileBatch, MicroBatch, TileBatch, on_tile

Given = TypeVar("Given")


class LossHead:
    """Loss computation after the last stage: the partial sums, the loss and the loss gradient.

    A loss is a function of sums over pixels. Each tile adds its part, the partial sums, to a table
    with one row for each image of the step and one column for each sum.

    Args:
        loss: the loss.
        rows: the rows of the table that belong to this sample group's images.
        replicas: the communicator of the ranks that hold the last stage, over which the tables are
            added.

    Attributes:
        scale: factor of the gradients of this head's backward passes. The loss is not scaled.
    """

    def __init__(self, loss: Criterion, rows: Rows, replicas):
        self.loss, self.at, self.replicas = loss, rows, replicas
        self.scale = 1.0
        self.clear()

    def clear(self) -> None:
        """Begin a step: set all partial sums of the table to 0, and forget the loss gradient."""
        self.table = torch.zeros(self.at.total, self.loss.sums, dtype=torch.float64)
        # Rows of the table that are still on a GPU, with their indices.
        self._noted: list[tuple[list[int], Tensor]] = []
        self.loss_grad: Tensor | None = None
        self.value: float | None = None

    def rows(self, unit: MicroBatch, outputs: list[Tensor]) -> list[Tensor]:
        """Return, for each tile batch, the partial sums of the loss with their autograd graph.

        Partial sums are sums over the pixels of the tile, of which the loss is a function. Each
        tensor in the result is (images, sums).

        Args:
            unit: the micro-batch.
            outputs: the network's output for each tile batch, on its tile or on its window.
        """
        return [
            self.loss.rows(
                y if p.labels.shape[2 - y.dim() :] == y.shape[2:] else on_tile(y, p.place), p.labels
            )
            for p, y in zip(unit.pieces, outputs)
        ]

    def note(self, unit: MicroBatch, rows: list[Tensor]) -> None:
        """Add the partial sums of a micro-batch to the table of the partial sums of the step.

        Each image has its own row in the table.

        Args:
            unit: the micro-batch.
            rows: the partial sums of each tile batch, as :meth:`rows` returns them.
        """
        for piece, found in zip(unit.pieces, rows):
            if found.is_cuda:
                self._noted.append((self._at(unit, piece), found.detach().double()))
            else:
                self.table[self._at(unit, piece)] += found.detach().double()

    def note_counts(self, units: Iterable[MicroBatch]) -> None:
        """Add the partial sums that depend only on labels, such as the number of valid pixels.

        The table of the partial sums of the step gets these sums. The loss gradient of a linear
        loss, such as cross-entropy, depends on no other sums.

        Args:
            units: micro-batches with labels; pixels are not needed.
        """
        for unit in units:
            self.note(unit, [self.loss.counts(p.labels) for p in unit.pieces])

    def loss_grads(self, unit: MicroBatch, rows: list[Tensor]) -> list[Tensor]:
        """Return the gradient of the loss by each tile batch's partial sums, times the scale.

        If the loss gradient of the step is not known yet, compute it from the table of partial
        sums. All replicas must then call the method together.

        Args:
            unit: the micro-batch.
            rows: the partial sums of each tile batch, which give device and dtype of the result.

        Returns:
            For each tile batch a tensor (images, sums).
        """
        if self.loss_grad is None:
            self._find_loss_grad()
        return [
            upload(self.scale * self.loss_grad[self._at(unit, p)], found.device, found.dtype)
            for p, found in zip(unit.pieces, rows)
        ]

    def find_loss_grad_early(self) -> None:
        """Compute the loss gradient before the first backward pass, and empty the table of sums.

        The table of partial sums must have all sums on which the loss gradient depends. The
        following passes fill the table again, so that :meth:`step_loss` can use it. All replicas
        must call the method together.
        """
        self._find_loss_grad()
        self.table.zero_()
        self.value = None

    def step_loss(self) -> float:
        """Return the loss of the step, after all passes of the step.

        If the loss is not known yet, it is computed from the tables of partial sums of all
        replicas. All replicas must then call the method together.
        """
        if self.value is None:
            self._find_loss_grad()
        return self.value

    def _find_loss_grad(self) -> None:
        self._fetch()
        self.value, self.loss_grad = self.loss.loss_grad(add(self.table, self.replicas))

    def _fetch(self) -> None:
        """Copy the partial sums that are still on a GPU to the CPU, and add them to the table.

        All sums are copied together, so the CPU waits for the GPU only once.
        """
        if self._noted:
            places, rows = zip(*self._noted)
            self._noted.clear()
            on_cpu = torch.cat([r.to(rows[0].device) for r in rows]).cpu()
            for at, found in zip(places, on_cpu.split([len(r) for r in rows])):
                self.table[at] += found

    def _at(self, unit: MicroBatch, piece: TileBatch) -> list[int]:
        return [self.at.row(unit.micro_batch, image) for image in piece.place.images]


class PassRunner(Protocol[Given]):
    """Interface of objects that run the forward and backward passes of a step on this rank.

    ``Given`` is the form in which a runner takes the samples of a step: micro-batches, or a
    :class:`StreamedStep`.

    Attributes:
        schedule: the name of the order of passes, for the log.
    """

    schedule: str

    def prepare(self, micro_batches: list[list[TileBatch]] | list[list[LazyTileBatch]]) -> Given:
        """Return the samples of a step in the form that the other methods take as ``given``.

        Args:
            micro_batches: for each micro-batch, this rank's tile batches.
        """

    def needs_loss_grad_first(self, given: Given) -> bool:
        """Return True if the loss gradient must be known before :meth:`run` starts.

        It must be known if a backward pass begins before all forward passes are done, as with 1f1b.
        Otherwise the forward passes in :meth:`run` give the loss gradient in time.
        """

    def with_labels(self, given: Given) -> Iterable[MicroBatch]:
        """Return micro-batches that have the labels of a step, with or without pixels.

        The labels alone determine the loss gradient of a linear loss, such as cross-entropy.
        """

    def run_forward(self, given: Given) -> None:
        """Run an extra forward pass of all micro-batches, without a backward pass.

        The loss gradient of a loss such as Dice depends on the partial sums of the whole step. The
        :class:`LossHead` records them in this pass. Gradients must be off (``torch.no_grad``).
        """

    def run(self, given: Given) -> None:
        """Run all passes of a step, and add this rank's part to the parameters' gradients."""


class GradientStep:
    """Computation of this rank's part of the gradient of a step's loss.

    A call adds the part to the parameters' ``grad``. The sum over replicas is the whole gradient.

    Args:
        runner: runs the forward and backward passes of this rank.
        head: the loss computation on a rank with the last stage, else None.
        loss: the loss.
        context: the context of the distributed layers.
    """

    def __init__(
        self, runner: PassRunner, head: LossHead | None, loss: Criterion, context: Context
    ):
        self.runner, self.head, self.loss, self.context = runner, head, loss, context

    def __call__(self, micro_batches: list[list[TileBatch]] | list[list[LazyTileBatch]]) -> float:
        """Run forward and backward passes of all micro-batches; return the loss of the step.

        On ranks without the last stage the returned loss is 0.
        """
        given = self.runner.prepare(micro_batches)
        if self.head:
            self.head.clear()
        if self.runner.needs_loss_grad_first(given):
            self._find_loss_grad_early(given)
        self.runner.run(given)
        return self.head.step_loss() if self.head else 0.0

    def _find_loss_grad_early(self, given) -> None:
        if not self.loss.linear:
            with torch.no_grad(), self.context.repeating():
                self.runner.run_forward(given)
        elif self.head:
            self.head.note_counts(self.runner.with_labels(given))
        if self.head:
            self.head.find_loss_grad_early()


class StageRunner:
    """Runner of the forward and backward passes of this rank's stages, without streaming.

    A pass computes a whole window (a tile with its halo) at once.

    Args:
        pipeline: this rank's stages.
        schedule: gpipe, 1f1b or zb-h1.
        together: True if the tile batches of a micro-batch run together. Active norms (norms that
            compute their statistics from the current images) need this. If False, the tile batches
            run one after another, and activations of only one tile batch are in memory at a time.
    """

    def __init__(self, pipeline: Pipeline, schedule: str, together: bool):
        self.pipeline, self.schedule, self.together = pipeline, schedule, together
        # Cached, because the v-shaped order is found by a simulation, and most steps have the same
        # number of micro-batches.
        self.orders_of = lru_cache(
            lambda micro_batches: orders(schedule, pipeline.partition.placement, micro_batches)
        )

    def prepare(self, micro_batches: list[list[TileBatch]]) -> list[MicroBatch]:
        """Return the micro-batches that the pipeline runs in a step.

        Args:
            micro_batches: for each micro-batch of the config, its tile batches.
        """
        return micro_batches_of(micro_batches, self.together)

    def needs_loss_grad_first(self, units: list[MicroBatch]) -> bool:
        """Return True if the loss gradient must be known before :meth:`run` starts.

        It must be known if the rank with the last stage begins a backward pass before all its
        forward passes are done.

        Args:
            units: the micro-batches of the step.
        """
        return not forwards_first(self.orders_of(len(units))[self.pipeline.partition.placement[-1]])

    def with_labels(self, units: list[MicroBatch]) -> list[MicroBatch]:
        """Return all micro-batches unchanged: their labels are in memory already."""
        return units

    def run_forward(self, units: list[MicroBatch]) -> None:
        """Run the forward passes of all micro-batches, without backward passes."""
        self.pipeline.run(
            [action for action in self._actions(units) if isinstance(action, Forward)], units
        )

    def run(self, units: list[MicroBatch]) -> None:
        """Run the forward and backward passes of all micro-batches."""
        self.pipeline.run(self._actions(units), units)

    def _actions(self, units: list[MicroBatch]) -> Sequence[Action]:
        return self.orders_of(len(units))[self.pipeline.comm.rank]


class DeviceRunner:
    """Runner of the passes of all stages, each of which lies on one of this rank's devices.

    All forward passes come before all backward passes.
    """

    schedule = "gpipe"

    def __init__(self, pipeline: DevicePipeline):
        self.pipeline, self.run = pipeline, pipeline.run

    def prepare(self, micro_batches: list[list[TileBatch]]) -> list[MicroBatch]:
        """Return the pipeline's micro-batches of a step: each tile batch becomes a micro-batch.

        Args:
            micro_batches: for each micro-batch of the config, its tile batches.
        """
        return micro_batches_of(micro_batches, together=False)

    def needs_loss_grad_first(self, units: list[MicroBatch]) -> bool:
        """Return False: the loss gradient need not be known before :meth:`run` starts.

        All forward passes come before the first backward pass, and give the partial sums of all
        micro-batches, from which the loss gradient is computed.
        """
        return False

    def with_labels(self, units: list[MicroBatch]) -> list[MicroBatch]:
        """Return all micro-batches unchanged: their labels are in memory already."""
        return units

    def run_forward(self, units: list[MicroBatch]) -> None:
        """Refuse an extra forward pass, which this order of passes never needs."""
        raise NotImplementedError(
            "run_forward was called, but with pipeline.placement devices all forward passes come "
            "first and no extra one is needed: this is an error in distseg, please report it"
        )


@dataclass(frozen=True)
class StreamedStep:
    """Samples and plans of one optimizer step with streamed tiles.

    Attributes:
        blocks: for each micro-batch, its lazy tile batches.
        places: for each micro-batch, the placements of its lazy tile batches.
        plans: for each micro-batch, this rank's stage plan.
    """

    blocks: list[list[LazyTileBatch]]
    places: list[list[TilePlacement]]
    plans: list[StagePlan]


class StreamingRunner:
    """Runner of the forward and backward passes of streamed tiles, one tile in memory at a time.

    A single stage ends a micro-batch before it begins the next, unless the loss gradient is known
    only after all forward passes. In a pipeline, feature maps of several micro-batches are stored
    at the same time: of all micro-batches with gpipe, and of as many micro-batches as there are
    stages with 1f1b. With 1f1b and without active norms, forward and backward passes of tiles
    alternate (:mod:`distseg.runtime.interleaved`).

    Args:
        executor: the streaming executor.
        head: the loss computation on a rank with the last stage, else None.
        loss: the loss.
        order: gpipe or 1f1b.
    """

    def __init__(
        self,
        executor: StreamingExecutor,
        head: LossHead | None,
        loss: Criterion,
        order: str = "gpipe",
    ):
        self.executor, self.head, self.loss = executor, head, loss
        # A single stage has no other stage to take turns with.
        self.order = order if executor.comm.size > 1 else "gpipe"
        self.schedule = f"{self.order}, streamed tiles"
        self.all_at_once = executor.comm.size > 1 or not loss.linear
        self.runs_forward_twice = self.order == "1f1b" and not loss.linear
        self._programs: dict[tuple, list[Operation]] = {}

    def prepare(self, micro_batches: list[list[LazyTileBatch]]) -> StreamedStep:
        """Return the micro-batches of a step, together with this rank's plan for each."""
        places = [[block.place for block in blocks] for blocks in micro_batches]
        plans = [self.executor.plan(each, m) for m, each in enumerate(places)]
        return StreamedStep(micro_batches, places, plans)

    def needs_loss_grad_first(self, given: StreamedStep) -> bool:
        """Return True if the loss gradient is computed before the passes of :meth:`run`.

        It is computed first for a linear loss, such as cross-entropy, whose loss gradient depends
        on labels only. With 1f1b it is computed first for other losses too, by an extra forward
        pass.
        """
        return self.loss.linear or self.runs_forward_twice

    def with_labels(self, given: StreamedStep) -> Iterator[MicroBatch]:
        """Yield a micro-batch for each streamed tile, with the tile's labels but without pixels.

        The labels alone determine the loss gradient of a linear loss, such as cross-entropy.
        """
        for m, blocks in enumerate(given.blocks):
            for block in blocks:
                for box in self.executor.label_tiles(block):
                    yield _unit(m, block, box)

    def run_forward(self, given: StreamedStep) -> None:
        """Run an extra forward pass of all micro-batches, without a backward pass.

        Its partial sums give the loss gradient of a loss that is not linear, such as Dice.
        """
        self._run(self.extra_forward(given.plans), given)

    def run(self, given: StreamedStep) -> None:
        """Run the forward and backward passes of all tiles of the step."""
        self._run(self.program(given.plans, given.places), given)

    def extra_forward(self, plans: list[StagePlan]) -> list[Operation]:
        """Return the operations of an extra forward pass, or an empty list if none is needed.

        With 1f1b, backward passes begin before all forward passes have ended. A loss such as Dice
        then needs the extra pass, because its loss gradient depends on all outputs of the step.

        Args:
            plans: for each micro-batch, this rank's stage plan.
        """
        return extra_forward(plans, self._actions(len(plans))) if self.runs_forward_twice else []

    def program(self, plans: list[StagePlan], places: list[list[TilePlacement]]) -> list[Operation]:
        """Return the operations of a step, cached for each list of stage plans.

        Args:
            plans: for each micro-batch, this rank's stage plan.
            places: for each micro-batch, the placements of its tile batches.
        """
        every = range(len(plans))
        groups = [every] if self.all_at_once else [[m] for m in every]
        for group in groups:
            self.executor.require_scratch_space(*(places[m] for m in group))
        key = tuple(map(id, plans))  # unique, as the executor keeps all stage plans
        if key not in self._programs:
            self._programs[key] = [
                op
                for group in groups
                for op in self._operations([plans[m] for m in group], [places[m] for m in group])
            ]
        return self._programs[key]

    def _operations(
        self, plans: list[StagePlan], places: list[list[TilePlacement]]
    ) -> list[Operation]:
        """Return the operations of this rank in a step; :meth:`program` caches them.

        With 1F1B, forward and backward passes of tiles alternate if no norm or halo exchange
        between the stages prevents it.

        Args:
            plans: the plan of this rank for each micro-batch.
            places: for each micro-batch, the placement of each tile batch.
        """
        everyone = []
        if self.order == "1f1b":
            everyone = [
                self.executor.plans_of_all_ranks(each, plan.number)
                for plan, each in zip(plans, places)
            ]
        if everyone and all(map(can_interleave, everyone)):
            return self.executor.keeping(
                interleaved([*zip(*everyone)])[self.executor.comm.rank], plans
            )
        return step(plans, self._actions(len(plans)), self.loss.linear or self.runs_forward_twice)

    def _actions(self, micro_batches: int) -> Sequence[Action]:
        """Return the forward and backward passes of this rank, in the order of the schedule."""
        actions = orders(self.order, self.executor.placement, micro_batches)[
            self.executor.comm.rank
        ]
        # With GPipe, the backward passes of a streamed step begin with the first micro-batch,
        # because its feature maps are available first.
        if self.order == "gpipe":
            actions = [
                replace(a, micro_batch=micro_batches - 1 - a.micro_batch)
                if isinstance(a, Backward)
                else a
                for a in actions
            ]
        return actions

    def _run(self, program: Sequence[Operation], given: StreamedStep) -> None:
        """Run operations, and compute the loss of each tile of the network's output.

        Args:
            program: the operations.
            given: the plans and the tile batches of the step.
        """
        find_loss_grad = self.head.find_loss_grad_early if self.head else None
        with self.executor.transfers.moving():
            for op, output in self.executor.run(program, given.plans, given.blocks, find_loss_grad):
                unit = _unit(op.micro_batch, given.blocks[op.micro_batch][op.block], op.box)
                self._end(
                    unit,
                    output,
                    self.executor.name_of(given.plans[op.micro_batch].segments[op.segment]),
                )
        self.executor.transfers.flush()

    def _end(self, unit: MicroBatch, output: Tensor, name: str) -> None:
        """Add a tile's partial sums to the step's table, and run the tile's backward pass.

        Args:
            unit: a micro-batch with the labels of this tile only.
            output: the network's output for this tile. If it has no autograd graph, no backward
                pass is run.
            name: the name of the network's last segment, for the profile of the step.
        """
        rows = self.head.rows(unit, [output])
        self.head.note(unit, rows)
        if output.requires_grad:
            with self.executor.span("backward", name):
                torch.autograd.backward(rows, self.head.loss_grads(unit, rows))


def _unit(m: int, block: LazyTileBatch, box: Box) -> MicroBatch:
    """Return a micro-batch that holds only the labels of one tile.

    Args:
        m: the index of the micro-batch.
        block: the lazy tile batch that the tile is part of.
        box: the box of the tile.
    """
    return MicroBatch(m, [TileBatch(None, block.labels(box), replace(block.place, tile=box))])


def micro_batches_of(micro_batches: list[list[TileBatch]], together: bool) -> list[MicroBatch]:
    """Return the micro-batches that a pipeline runs, made from those of the config.

    Args:
        micro_batches: for each micro-batch of the config, its tile batches.
        together: True to run all tile batches of a micro-batch together. If False, each tile batch
            becomes a micro-batch of its own.
    """
    if together:
        return [MicroBatch(m, pieces) for m, pieces in enumerate(micro_batches)]
    return [MicroBatch(m, [piece]) for m, pieces in enumerate(micro_batches) for piece in pieces]


def forwards_first(actions: Sequence[Action]) -> bool:
    """Return True if every forward pass comes before the first backward pass."""
    kinds = [isinstance(a, Forward) for a in actions]
    return kinds == sorted(kinds, reverse=True)
