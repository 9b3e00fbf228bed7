"""Text of the operations that each rank of a pipeline runs in a step; no operation is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from distseg.comm.launch import memory_in_use
from distseg.config.settings import Config, output_weights
from distseg.layers.graph import reach_for
from distseg.layers.loss import Loss
from distseg.layers.norm import active_norms
from distseg.models.bands import channels_of
from distseg.models.network import flat_layers, is_flat
from distseg.planning.tile_size import budget_of
from distseg.runtime.exchange import Exchange
from distseg.runtime.operations import text
from distseg.runtime.optimizer import state_copies
from distseg.runtime.own_part import used_reach
from distseg.runtime.partition import Partition
from distseg.runtime.schedule import orders
from distseg.runtime.stage_program import operations
from distseg.tiling.tile import ReceptiveField, TilePlacement, owned_tiles
from distseg.training.conflicts import check_settings
from distseg.training.engine import (
    activations_of,
    make_exchange,
    make_streaming_executor,
    read_around,
    streaming_order,
)
from distseg.training.stages import StageCut, schedule_of
from distseg.training.step import StreamingRunner


@dataclass(frozen=True)
class _Rank:
    """Object with the rank and size of a communicator. It cannot send messages.

    It takes the place of a communicator where a program is planned but not run.
    """

    rank: int
    size: int


@dataclass(frozen=True)
class PipelineProgram:
    """Operations that each rank of one pipeline runs in a step.

    If the mesh has several pipelines, it is the one that computes the first tile of the first
    image.

    Attributes:
        config: the settings of the training.
        model: the plain model, which may be on the meta device.
        image: the size in pixels of all images of the step.
    """

    config: Config
    model: nn.Module
    image: Sequence[int]

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield two texts for each rank of the pipeline: a legend, and the rank's operations.

        The legend says which layers the rank's stages or segments hold.

        Raises:
            ValueError: the model cannot be trained with these settings.
        """
        check_settings(self.config, self.model)
        if self.config.pipeline.placement == "devices":
            raise ValueError(
                "pipeline.placement is devices, which distseg plan cannot show because torchgpipe "
                "schedules the stages: set pipeline.placement to linear or v-shaped to see a plan"
            )
        for rank in range(self.config.mesh.stages):
            yield self._streaming(rank) if self.config.streaming.active else self._stages(rank)

    @cached_property
    def _reach(self) -> ReceptiveField:
        """The receptive field of the model, with the halo that the settings ask for."""
        halo = self.config.approximate.halo
        return used_reach(reach_for(self.model, halo is not None or self.config.is_cut), halo)

    @cached_property
    def _exchange(self) -> Exchange | None:
        """The halo exchange of the model; None if layers compute whole windows."""
        tiles = _Rank(0, self.config.mesh.tiles.volume)
        return make_exchange(
            self.config, self.model, self._reach, tiles, torch.device("cpu"), False
        )

    @cached_property
    def _reading(self) -> ReceptiveField:
        """The receptive field by which windows are read from an image."""
        return read_around(self._reach, self._exchange, self.config.streaming.active)

    @cached_property
    def _partition(self) -> Partition | None:
        """The stages; None for one stage."""
        return StageCut(self.config, self.model, self.image, self._reading).partition()

    @cached_property
    def _places(self) -> list[TilePlacement]:
        """The placements of the tiles that the first rank of a tile group owns."""
        config, image = self.config, tuple(self.image)
        first = (0,) * len(image)
        owned = owned_tiles(image, config.mesh.tiles, config.owned, first, self._reading)
        numbers = tuple(range(config.data.images))
        return [TilePlacement(image, tile, window, numbers, ()) for tile, window in owned]

    @cached_property
    def _loss(self) -> Loss:
        config = self.config
        return Loss(config.loss, channels_of(self.model)[1], output_weights(config.model))

    @cached_property
    def _active_norms(self) -> list[int]:
        """The indices of the layers that are active norms."""
        layers = (layer for _, layer in flat_layers(self.model))
        return active_norms(layers, self.config.spatial.frozen_norm)

    def _streaming(self, rank: int) -> tuple[str, str]:
        """Return the legend and the operations of a rank that streams tiles."""
        partition, places, loss = self._partition, self._places, self._loss
        train, streaming, stages = self.config.train, self.config.streaming, self.config.mesh.stages
        precision = "bf16" if train.precision == "bf16" else "fp32"
        activations = activations_of(
            self.model, self._exchange, precision, bool(train.channels_last)
        )
        budget = None
        if streaming.memory is not None:
            kept = "weights and what the optimizer keeps"
            budget = budget_of(streaming.memory, self._base_memory(), kept)
        executor = make_streaming_executor(
            streaming, self._exchange, activations, budget, partition, _Rank(rank, stages)
        )
        executor.folder = None  # so that the free disk space is not checked
        every = [places] * train.accumulate
        plans = [executor.plan(places, m) for m in range(len(every))]
        order = streaming_order(
            self.config.pipeline.schedule, loss.linear, bool(self._exchange.stored)
        )
        step = StreamingRunner(executor, None, loss, order)
        mine = [f"segment {n}: {executor.name_of(plans[0].segments[n])}" for n in plans[0].mine]
        return "\n".join(mine), text([*step.extra_forward(plans), *step.program(plans, every)])

    def _base_memory(self) -> float:
        """Return an estimate of the bytes that a process takes besides activations.

        These are the bytes now in use, and those of weights, gradients and the optimizer's values.
        """
        weights = sum(p.numel() for p in self.model.parameters()) * 4
        return memory_in_use(torch.device("cpu")) + weights * (2 + state_copies(self.config.optim))

    def _stages(self, rank: int) -> tuple[str, str]:
        """Return the legend and the operations of a rank that does not stream tiles."""
        config, partition = self.config, self._partition or Partition.whole()
        places, loss = self._places, self._loss
        flat = is_flat(self.model)
        together = config.spatial.exchanges or flat and bool(self._active_norms)
        units = config.train.accumulate * (1 if together else len(places))
        schedule = schedule_of(config.pipeline, config.mesh.stages, loss.linear)
        order = orders(schedule, partition.placement, units)[rank]
        legend = self._legend(partition, rank) if flat else ["stage 0: the whole network"]
        return "\n".join(legend), text(
            operations(order, partition.edges, config.pipeline.recompute)
        )

    def _legend(self, partition: Partition, rank: int) -> Iterator[str]:
        """Yield lines of text about each stage of a rank.

        They name the stage's first and last layer, the layers before which ranks exchange halos,
        and the norms for which ranks exchange statistics.

        Args:
            partition: the stages.
            rank: the rank in its pipeline.
        """
        names = [name for name, _ in flat_layers(self.model)]
        layout = self._exchange.layout(self._places[0].image) if self._exchange else None
        points = sorted(layout.points) if layout else []
        for stage in partition.stages_of(rank):
            layers = partition.ranges[stage] or range(len(names))
            exchanged = ", ".join(names[p] for p in points if p in layers)
            norms = ", ".join(names[p] for p in self._active_norms if p in layers)
            yield f"stage {stage}: {names[layers.start]} to {names[layers.stop - 1]}"
            if exchanged:
                yield f"         halos exchanged before {exchanged}"
            if norms:
                yield f"         statistics at {norms}"
