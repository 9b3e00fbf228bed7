"""Text of the operations that each rank of a pipeline runs in a step; no operation is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from distseg.tiling.tile import TilePlacement, owned_tiles
from distseg.training.conflicts import check_settings
from distseg.training.engine import (
    activations_of,
    make_exchange,
    make_streaming_executor,
    read_around,
    streaming_order,
)
from distseg.training.stages import partition_of, schedule_of
from distseg.training.step import StreamingRunner


@dataclass(frozen=True)
class _Rank:
    """Object with the rank and size of a communicator. It cannot send messages.

    It takes the place of a communicator where a program is planned but not run.
    """

    rank: int
    size: int


def programs(config: Config, model: nn.Module, image: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield two texts for each rank of one pipeline: a legend, and the rank's operations.

    The legend says which layers the rank's stages or segments hold. If the mesh has
    several pipelines, the texts are of the one that computes the first tile of the first image.

    Args:
        config: the settings of the training.
        model: the plain model, which may be on the meta device.
        image: the size in pixels of all images of the step.

    Raises:
        ValueError: the model cannot be trained with these settings.
    """
    check_settings(config, model)
    if config.pipeline.placement == "devices":
        raise ValueError(
            "pipeline.placement is devices, which distseg plan cannot show because torchgpipe "
            "schedules the stages: set pipeline.placement to linear or v-shaped to see a plan"
        )
    reach = used_reach(
        reach_for(model, config.approximate.halo is not None or config.is_cut),
        config.approximate.halo,
    )
    exchange = make_exchange(
        config, model, reach, _Rank(0, config.mesh.tiles.volume), torch.device("cpu"), False
    )
    reading = read_around(reach, exchange, config.streaming.active)
    partition = partition_of(config, model, image, reading)
    owned = owned_tiles(image, config.mesh.tiles, config.owned, (0,) * len(image), reading)
    places = [
        TilePlacement(tuple(image), tile, window, tuple(range(config.data.images)), ())
        for tile, window in owned
    ]
    loss = Loss(config.loss, channels_of(model)[1], output_weights(config.model))
    for rank in range(config.mesh.stages):
        if config.streaming.active:
            yield _streaming(config, model, exchange, partition, places, loss, rank)
        else:
            yield _stages(
                config, model, exchange, partition or Partition.whole(), places, loss, rank
            )


def _streaming(
    config: Config,
    model: nn.Module,
    exchange: Exchange,
    partition: Partition | None,
    places: list[TilePlacement],
    loss: Loss,
    rank: int,
) -> tuple[str, str]:
    activations = activations_of(
        model,
        exchange,
        "bf16" if config.train.precision == "bf16" else "fp32",
        bool(config.train.channels_last),
    )
    budget = (
        None
        if config.streaming.memory is None
        else budget_of(
            config.streaming.memory, _base(config, model), "weights and what the optimizer keeps"
        )
    )
    executor = make_streaming_executor(
        config.streaming, exchange, activations, budget, partition, _Rank(rank, config.mesh.stages)
    )
    executor.folder = None  # so that the free disk space is not checked
    every = [places] * config.train.accumulate
    plans = [executor.plan(places, m) for m in range(len(every))]
    order = streaming_order(config.pipeline.schedule, loss.linear, bool(exchange.stored))
    step = StreamingRunner(executor, None, loss, order)
    mine = [f"segment {n}: {executor.name_of(plans[0].segments[n])}" for n in plans[0].mine]
    return "\n".join(mine), text([*step.extra_forward(plans), *step.program(plans, every)])


def _active_norms(config: Config, model: nn.Module) -> list[int]:
    return active_norms((layer for _, layer in flat_layers(model)), config.spatial.frozen_norm)


def _base(config: Config, model: nn.Module) -> float:
    """Return an estimate of the bytes that a process takes besides activations.

    These are the bytes now in use, and those of weights, gradients and the optimizer's values.
    """
    weights = sum(p.numel() for p in model.parameters()) * 4
    return memory_in_use(torch.device("cpu")) + weights * (2 + state_copies(config.optim))


def _stages(
    config: Config,
    model: nn.Module,
    exchange: Exchange | None,
    partition: Partition,
    places: list[TilePlacement],
    loss: Loss,
    rank: int,
) -> tuple[str, str]:
    flat = is_flat(model)
    together = config.spatial.exchanges or flat and bool(_active_norms(config, model))
    units = config.train.accumulate * (1 if together else len(places))
    schedule = schedule_of(config.pipeline, config.mesh.stages, loss.linear)
    order = orders(schedule, partition.placement, units)[rank]
    legend = (
        _legend(config, model, exchange, partition, places, rank)
        if flat
        else ["stage 0: the whole network"]
    )
    return "\n".join(legend), text(operations(order, partition.edges, config.pipeline.recompute))


def _legend(
    config: Config,
    model: nn.Module,
    exchange: Exchange | None,
    partition: Partition,
    places: list[TilePlacement],
    rank: int,
) -> Iterator[str]:
    """Yield lines of text about each stage of a rank.

    They name the stage's first and last layer, the layers before which ranks exchange halos, and
    the norms for which ranks exchange statistics.

    Args:
        config: the settings of the training.
        model: the plain model.
        exchange: the halo exchange of the model; None if ranks exchange no halos.
        partition: the stages.
        places: placements of tiles; the first one gives the size of the image.
        rank: the rank in its pipeline.
    """
    names = [name for name, _ in flat_layers(model)]
    layout = exchange.layout(places[0].image) if exchange else None
    points = sorted(layout.points) if layout else []
    active = _active_norms(config, model)
    for stage in partition.stages_of(rank):
        layers = partition.ranges[stage] or range(len(names))
        exchanged = ", ".join(names[p] for p in points if p in layers)
        norms = ", ".join(names[p] for p in active if p in layers)
        yield f"stage {stage}: {names[layers.start]} to {names[layers.stop - 1]}"
        if exchanged:
            yield f"         halos exchanged before {exchanged}"
        if norms:
            yield f"         statistics at {norms}"
