"""Lists the operations of all ranks in a step, without running them.

``distseg plan`` prints the lists, and :mod:`distseg.training.step_messages` proves from them that
ranks cannot wait for each other for ever. The *plain model* is the whole network before distseg
replaces its layers by distributed ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import nn

from distseg.comm.launch import import_for_backward, memory_in_use
from distseg.config.settings import Config, output_weights
from distseg.layers.graph import reach_for
from distseg.layers.loss import Loss
from distseg.layers.norm import active_norms
from distseg.models.bands import channels_of
from distseg.models.network import flat_layers, is_flat
from distseg.planning.tile_size import budget_of
from distseg.runtime.actions import Action, Forward
from distseg.runtime.exchange import Exchange
from distseg.runtime.operations import Operation
from distseg.runtime.optimizer import freeze, state_copies
from distseg.runtime.own_part import AUTOCAST, used_reach
from distseg.runtime.partition import Partition
from distseg.runtime.schedule import orders
from distseg.runtime.stage_program import operations
from distseg.runtime.streaming import StreamingExecutor
from distseg.runtime.tile_program import StagePlan
from distseg.tiling.tile import TilePlacement, owned_tiles
from distseg.training.conflicts import check_settings
from distseg.training.engine import (
    activations_of,
    make_exchange,
    make_streaming_executor,
    read_around,
    streaming_order,
)
from distseg.training.stages import StageCut, schedule_of
from distseg.training.step import StreamingRunner, forwards_first


@dataclass(frozen=True)
class _Rank:
    """Stand-in for a communicator, with a rank and a size, which cannot send messages.

    It suffices in this module, because operations are listed but not run.
    """

    rank: int
    size: int


class StreamedProgram(NamedTuple):
    """Operations of a rank that streams tiles, and the objects from which they are made.

    Attributes:
        executor: the executor, which only plans.
        plans: the plan of each micro-batch.
        extra_forward: the operations of an extra forward pass before the step; may be empty.
        step: the operations of the step.
    """

    executor: StreamingExecutor
    plans: list[StagePlan]
    extra_forward: list[Operation]
    step: list[Operation]


class StepPrograms:
    """Operations of all ranks of a mesh in one step.

    A rank's operations depend on its tile and on its rank in the pipeline, which are arguments of
    the methods. Tiles are numbered in row-major order. All sample groups have the same operations.
    With streamed tiles, :meth:`streamed` returns the operations. Without streaming, :meth:`kept`
    returns the operations, and :attr:`orders`, :attr:`together` and :attr:`needs_loss_grad_first`
    describe their order.

    Args:
        config: the settings of the training.
        model: the plain model, which may be on the meta device. Its parameters are frozen as
            ``optim.rates`` says.
        image: the size in pixels of all images of the step.
        base: bytes that a process takes besides its tensors, on which the size of streamed tiles
            depends; by default the bytes that this process takes now.

    Raises:
        ValueError: the model cannot be trained with these settings.
    """

    def __init__(
        self, config: Config, model: nn.Module, image: Sequence[int], base: int | None = None
    ):
        check_settings(config, model)
        freeze(model, config.optim)
        if config.pipeline.placement == "devices":
            raise ValueError(
                "pipeline.placement is devices, which distseg plan cannot show because torchgpipe "
                "schedules the stages: set pipeline.placement to linear or v-shaped to see a plan"
            )
        self.config, self.model, self.image = config, model, tuple(image)
        self._base = base
        self.flat = is_flat(model)
        self.reach = used_reach(
            reach_for(model, config.approximate.halo is not None or config.is_cut),
            config.approximate.halo,
        )
        self.exchange = cache(self._exchange)
        self.places = cache(self._places)
        self.streamed = cache(self._streamed)
        self._reading = read_around(self.reach, self.exchange(0), config.streaming.active)
        self.partition = StageCut(config, model, image, self._reading).partition()
        self.loss = Loss(config.loss, channels_of(model)[1], output_weights(config.model))

    @property
    def stages(self) -> Partition:
        """Partition of the layers into stages; a single stage if the model is not cut."""
        return self.partition or Partition.whole()

    @cached_property
    def active(self) -> list[int]:
        """Layer numbers of the active norms; empty if the model is not captured as layer calls.

        An active norm computes its statistics from the current images.
        """
        if not self.flat:
            return []
        layers = (layer for _, layer in flat_layers(self.model))
        return active_norms(layers, self.config.spatial.frozen_norm)

    @property
    def together(self) -> bool:
        """True if all tile batches of a micro-batch run together; False if one after another."""
        return self.config.spatial.exchanges or bool(self.active)

    @cached_property
    def orders(self) -> list[list[Action]]:
        """For each rank of a pipeline, the order of its forward and backward passes."""
        config = self.config
        units = config.train.accumulate * (1 if self.together else len(self.places(0)))
        schedule = schedule_of(config.pipeline, config.mesh.stages, self.loss.linear)
        return orders(schedule, self.stages.placement, units)

    @property
    def needs_loss_grad_first(self) -> bool:
        """True if the loss gradient must be known before the first pass of the step begins."""
        return not forwards_first(self.orders[self.stages.placement[-1]])

    def kept(self, rank: int, only_forward: bool = False) -> list[Operation]:
        """Return the operations of a rank that does not stream tiles.

        The rank's stages keep autograd graphs in memory from the forward to the backward pass.

        Args:
            rank: the number of the rank in its pipeline.
            only_forward: True for an extra forward pass.
        """
        actions = [a for a in self.orders[rank] if isinstance(a, Forward) or not only_forward]
        return operations(actions, self.stages.edges, self.config.pipeline.recompute)

    def _exchange(self, tile: int) -> Exchange | None:
        ranks = _Rank(tile, self.config.mesh.tiles.volume)
        settings, device = self.config.exchange, torch.device("cpu")
        return make_exchange(settings, self.model, self.reach, ranks, device, False)

    def _places(self, tile: int) -> list[TilePlacement]:
        """Return, for each tile that a rank owns, its placement: the boxes of tile and window.

        Args:
            tile: the index of the rank's part among the parts of an image.
        """
        config = self.config
        coordinates: list[int] = []
        for count in reversed(config.mesh.tiles):
            tile, at = divmod(tile, count)
            coordinates.insert(0, at)
        owned = owned_tiles(self.image, config.mesh.tiles, config.owned, coordinates, self._reading)
        images = tuple(range(config.data.images))
        return [TilePlacement(self.image, own, window, images, ()) for own, window in owned]

    def layers_of(self, rank: int) -> Collection[int]:
        """Return the numbers of the layers that a rank of a pipeline has.

        They are all layers if the model is not cut, and none if it is not captured as layer calls.
        """
        if self.partition is not None:
            return self.partition.layers_of(rank)
        return range(len(flat_layers(self.model)) if self.flat else 0)

    def _weights_of(self, rank: int) -> int:
        """Return the number of weights of a rank's layers; shared weights count once."""
        layers, mine = flat_layers(self.model), self.layers_of(rank)
        return sum(p.numel() for p in {p for n in mine for p in layers[n][1].parameters()})

    @cached_property
    def _budget(self) -> float | None:
        config = self.config
        if config.streaming.memory is None:
            return None
        # All ranks take the budget of the rank whose stages have the most weights.
        weights = max(map(self._weights_of, set(self.stages.placement))) * 4
        import_for_backward()
        base = memory_in_use(torch.device("cpu")) if self._base is None else self._base
        base += weights * (2 + state_copies(config.optim))
        return budget_of(config.streaming.memory, base, "weights and what the optimizer keeps")

    def _streamed(self, tile: int, rank: int) -> StreamedProgram:
        """Return the operations of a rank that streams tiles.

        Args:
            tile: the index of the rank's part among the parts of an image.
            rank: the number of the rank in its pipeline.
        """
        config, exchange = self.config, self.exchange(tile)
        assert exchange is not None  # Streamed tiles always have one.
        activations = activations_of(
            self.model,
            exchange,
            config.train.precision if config.train.precision in AUTOCAST else "fp32",
            bool(config.train.channels_last),
        )
        executor = make_streaming_executor(
            config.streaming,
            exchange,
            activations,
            self._budget,
            self.partition,
            _Rank(rank, config.mesh.stages),
        )
        executor.folder = None  # so that the free disk space is not checked
        every = [self.places(tile)] * config.train.accumulate
        plans = [executor.plan(each, m) for m, each in enumerate(every)]
        order = streaming_order(config.pipeline.schedule, self.loss.linear, bool(exchange.stored))
        runner = StreamingRunner(executor, None, self.loss, order)
        return StreamedProgram(
            executor, plans, runner.extra_forward(plans), runner.program(plans, every)
        )
