"""The stages that a config asks for: its own balance, or the split whose slowest stage is fastest at the windows in hand."""

from __future__ import annotations

from typing import Sequence

from torch import nn

from distseg.config import Config
from distseg.extents import Extents
from distseg.geometry.tile import Reach, tiles, window
from distseg.models.layers import flat_layers
from distseg.pipeline.balance import fastest_split
from distseg.pipeline.fold import v_split
from distseg.pipeline.partition import Partition
from distseg.pipeline.schedule import v_placement
from distseg.plan.cost import modelled
from distseg.plan.memory import Policy, ranges_of, stage_seconds
from distseg.plan.roofline import V100, Device


# One core in float32, roughly (docs/performance.md): constants, so that all ranks of any machines find the same stages.
CORE = Device("a CPU core", 90e9, 10e9)


def partition_of(config: Config, model: nn.Module, image: Sequence[int], reach: Reach, device: str = "cpu") -> Partition | None:
    """The stages of ``mesh.stages`` ranks; None for one stage of a model that is no flat Sequential.

    Args:
        model: whole, on any device, the meta device included.
        image: the size of the images that a step has, in pixels.
        device: whose costs are modelled, cpu or cuda. All ranks find the same.

    Raises:
        ValueError: the model can't be cut, or the balance does not fit it.
    """
    stages = config.mesh.stages
    if stages == 1 and config.pipeline.balance is None:
        return None
    layers = [layer for _, layer in flat_layers(model)]
    placement = v_placement(stages) if config.pipeline.placement == "v" else tuple(range(stages))
    balance = config.pipeline.balance
    if balance is not None and len(balance) != len(placement):
        raise ValueError(
            f"pipeline.balance has {len(balance)} numbers, but mesh.stages {stages} with pipeline.placement {config.pipeline.placement} makes "
            f"{len(placement)} stages: give the layers of each"
        )
    return Partition.of(layers, balance or _balance(config, model, image, reach, device), placement)


def _balance(config: Config, model: nn.Module, image: Sequence[int], reach: Reach, device: str) -> list[int]:
    fine = Extents(g * p for g, p in zip(config.mesh.tiles, config.spatial.tiles_per_rank))
    largest = max((window(tile, image, reach) for tile in tiles(image, fine, reach.stride)), key=lambda box: box.pixels)
    costs = modelled(model, largest.size, config.data.images, CORE if device == "cpu" else V100)
    policy = Policy(config.train.accumulate, recompute=config.pipeline.recompute)
    if config.pipeline.placement == "v":
        return v_split([policy.forward_passes * f + b for f, b in zip(costs.forward, costs.backward)], costs.skips, config.mesh.stages)
    return fastest_split(stage_seconds(costs, ranges_of(costs), policy), config.mesh.stages)
