"""Decide which layers each pipeline stage gets.

A config gives the balance itself (``pipeline.balance``), or the planner finds the split whose
slowest stage is fastest at the windows that ranks compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from distseg.config.settings import Config
from distseg.config.sizes import Size
from distseg.layers.graph import graph_of
from distseg.layers.norm import active_norms
from distseg.models.network import calls_of
from distseg.planning.balance import fastest_split
from distseg.planning.cost import Costs, modelled
from distseg.planning.fold import v_split
from distseg.planning.memory import Policy, ranges_of, stage_seconds
from distseg.planning.roofline import V100, Device
from distseg.planning.streaming import GridTiling, computed_again, is_streamed
from distseg.runtime.devices import stages_of
from distseg.runtime.partition import Partition, stage_ranges
from distseg.runtime.schedule import v_placement
from distseg.tiling.layout import Layout
from distseg.tiling.segment import segments_of
from distseg.tiling.tile import ReceptiveField, tiles, window

# One core in float32, roughly (benchmarks/performance.md). These are constants and not measured,
# so that ranks on different machines find the same stages.
CORE = Device("a CPU core", 90e9, 10e9)


def partition_of(
    config: Config,
    model: nn.Module,
    image: Sequence[int],
    reach: ReceptiveField,
    device: str = "cpu",
) -> Partition | None:
    """Return the partition of a model's layers into stages, or None if it stays whole.

    Stages belong to ``mesh.stages`` ranks, or to the devices of one rank
    (``pipeline.placement: devices``). All ranks find the same partition.

    Args:
        model: the whole model, on any device, the meta device included.
        image: the size of a step's images in pixels.
        reach: the receptive field of the whole model, which sets the size of windows.
        device: the kind of device whose costs are modelled, cpu or cuda.

    Raises:
        ValueError: the model cannot be cut, or the balance does not fit it.
    """
    pipeline, stages = config.pipeline, config.mesh.stages
    if stages == 1 and pipeline.balance is None and pipeline.placement != "devices":
        return None
    calls = calls_of(model)
    placement = _placement(config)
    balance = pipeline.balance
    if balance is not None and len(balance) != len(placement):
        raise ValueError(
            f"pipeline.balance has {len(balance)} numbers, but mesh.stages {stages} with "
            f"pipeline.placement {pipeline.placement} makes {len(placement)} stages: give the "
            "layers of each"
        )
    return Partition.from_balance(
        calls, balance or _balance(config, model, image, reach, device), placement
    )


def _placement(config: Config) -> tuple[int, ...]:
    """Return the rank of each stage by ``pipeline.placement``."""
    if config.pipeline.placement == "devices":
        return (0,) * stages_of(config.pipeline)
    return (
        v_placement(config.mesh.stages)
        if config.pipeline.placement == "v-shaped"
        else tuple(range(config.mesh.stages))
    )


def _balance(
    config: Config, model: nn.Module, image: Sequence[int], reach: ReceptiveField, device: str
) -> list[int]:
    if is_streamed(config) and config.streaming.memory is None:
        return _balance_streaming(config, model, image, reach, device)
    fine = Size(g * p for g, p in zip(config.mesh.tiles, config.spatial.tiles_per_rank))
    largest = max(
        (window(tile, image, reach) for tile in tiles(image, fine, reach.stride)),
        key=lambda box: box.pixels,
    )
    return _split(
        config,
        model,
        modelled(model, largest.size, config.data.images, CORE if device == "cpu" else V100),
    )


def _split(config: Config, model: nn.Module, costs: Costs) -> list[int]:
    """Return the layers of each stage that make the slowest rank fastest."""
    placement = _placement(config)
    policy = _policy(config, model)
    if config.pipeline.placement == "v-shaped":
        seconds = [
            policy.forward_passes(0, len(placement)) * f + b
            for f, b in zip(costs.forward, costs.backward)
        ]
        return v_split(seconds, costs.skips, config.mesh.stages)
    return fastest_split(
        stage_seconds(costs, ranges_of(costs), policy, len(placement)), len(placement)
    )


def _balance_streaming(
    config: Config, model: nn.Module, image: Sequence[int], reach: ReceptiveField, device: str
) -> list[int]:
    """Return the split for streamed tiles, whose overlap depends on where stages are cut.

    Overlapping windows compute cells more than once, and a layer's cost grows in proportion. The
    overlap of one split gives the costs for the next split, for a few rounds. The split with the
    fastest slowest rank by its own costs is taken.
    """
    graph, calls = graph_of(model), calls_of(model)
    part = max(tiles(image, config.mesh.tiles, reach.stride), key=lambda box: box.pixels)
    layout = Layout(graph, part.size, [(0, n) for n in part.size], "all")
    active = [
        calls[number].inputs[0]
        for number in active_norms((call.layer for call in calls), config.spatial.frozen_norm)
    ]
    tiling = GridTiling(config.streaming.tiles)
    # Modelled on the image's size, which the network takes; it may not take a tile's size.
    costs = modelled(model, image, config.data.images, CORE if device == "cpu" else V100)
    split, tried = _split(config, model, costs), {}
    while split not in [list(found) for found in tried] and len(tried) < _ROUNDS:
        times = computed_again(
            layout, segments_of(graph, active, stage_ranges(split, len(calls))), tiling
        )
        layers = tuple(
            replace(layer, forward=t * layer.forward, backward=t * layer.backward)
            for layer, t in zip(costs.layers, times)
        )
        scaled = replace(costs, layers=layers)
        tried[tuple(split)] = _slowest(config, model, scaled, split)
        split = _split(config, model, scaled)
    return list(min(tried, key=tried.get))


_ROUNDS = 6


def _slowest(config: Config, model: nn.Module, costs: Costs, split: Sequence[int]) -> float:
    """Return the seconds of the slowest rank for one micro-batch."""
    placement, ranges, busy = _placement(config), stage_ranges(split, len(costs.layers)), Counter()
    seconds = stage_seconds(costs, ranges_of(costs), _policy(config, model), len(placement))
    for stage, (layers, rank) in enumerate(zip(ranges, placement)):
        busy[rank] += seconds[stage, layers.start, layers.stop]
    return max(busy.values())


def _policy(config: Config, model: nn.Module) -> Policy:
    if not is_streamed(config):
        return Policy(config.train.accumulate, schedule_of(config), config.pipeline.recompute)
    active = active_norms(model.modules(), config.spatial.frozen_norm)
    in_turn = (
        config.pipeline.placement == "linear"
        and config.pipeline.schedule in ("auto", "1f1b")
        and not config.spatial.exchanges
    )
    if active:
        return Policy(_MANY, "1f1b", "always")
    # Without active norms the last stage computes its tiles forward only once, except for Dice.
    return Policy(_MANY, "1f1b", "never" if in_turn else "except_last")


_MANY = 100  # assumed number of tiles; tiles follow each other as micro-batches do


def schedule_of(config: Config, linear: bool = True) -> str:
    """Return the schedule to run: gpipe, 1f1b or zb-h1.

    ``auto`` becomes gpipe for several stages with a loss that is not linear
    (:class:`distseg.layers.loss.Loss`), else 1f1b. torchgpipe runs gpipe only.
    """
    if config.pipeline.placement == "devices":
        return "gpipe"
    if config.pipeline.schedule != "auto":
        return config.pipeline.schedule
    return "gpipe" if config.mesh.stages > 1 and not linear else "1f1b"
