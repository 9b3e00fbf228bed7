"""Predict the memory of each rank of a finished training, for the page of ``distseg report``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distseg.cli.planned_training import SLACK, SPREAD, PlannedTraining
from distseg.config.settings import Config
from distseg.config.sizes import Size
from distseg.models.network import is_flat
from distseg.models.zoo import outline_model
from distseg.planning.held import Policy
from distseg.planning.machine import load_machine
from distseg.planning.stage_memory import TileMemory
from distseg.planning.tile_grids import TileGrids
from distseg.training.programs import StepPrograms
from distseg.training.stages import schedule_of

# Settings that decide about the memory of a step and that prediction does not take over.
_NUMBERS = (
    "mesh.samples",
    "mesh.stages",
    "spatial.frozen_norm",
    "data.images",
    "train.accumulate",
    "pipeline.recompute",
    "loss.name",
    "streaming.memory",
)
_SIZES = ("mesh.tiles", "spatial.tiles_per_rank", "streaming.tiles")


def planned_memory(config: Config, manifest: Mapping, start: Mapping) -> list[float] | None:
    """Return the bytes that each rank of a training was expected to take in a step.

    The number of bytes is a sum: the memory that the rank had before the first step, including
    weights, gradients and optimizer state, and the tensors of a step by the memory model of
    ``distseg plan``. On a CPU the sum includes what ``distseg plan`` assumes for gaps between
    tensors and for kernels. With ``streaming.memory``, the result is this limit instead.

    Args:
        config: the settings that prediction takes over from the training.
        manifest: the manifest of a checkpoint of the training.
        start: the first line of the training's log.

    Returns:
        The bytes by rank; None if the training has no prediction: it streams tiles without a
        limit, its layers are not known, or an earlier version of distseg wrote its files.

    Raises:
        ValueError: this version of distseg refuses the settings of the training.
    """
    base, size = start.get("base_memory"), manifest["data"].get("size")
    if not base or not size:
        return None
    config = config.with_values(_trained_values(manifest["config"]))
    if config.streaming.memory is not None:
        return [float(config.streaming.memory)] * len(base)
    if config.streaming.active or config.pipeline.placement == "devices":
        return None
    model = outline_model(config.model, *manifest["channels"])
    config = config.with_dims(len(size), str(Size(size)))
    if not is_flat(model):
        return None
    tensors = step_tensors(StepPrograms(config, model, size), start["precision"])
    slack, spread = (SLACK, SPREAD) if start["device"] == "cpu" else (0.0, 1.0)
    # The stage is the fastest axis of the mesh.
    return [
        bytes_ + slack + spread * tensors[rank % len(tensors)] for rank, bytes_ in enumerate(base)
    ]


def step_tensors(programs: StepPrograms, precision: str) -> list[float]:
    """Return the bytes that a step takes beside weights and optimizer, for each rank of a pipeline.

    The bytes of images, activations, gradients of activations and messages are added up, for the
    slowest tile.

    Args:
        programs: the operations of the step, of a network of known layers, without streaming.
        precision: the number type: fp64, fp32, bf16 or fp16.
    """
    config, size = programs.config, Size(programs.image)
    every, owned = config.spatial.exchange_every, config.owned.volume
    grid = Size(a * b for a, b in zip(config.mesh.tiles, config.owned))
    if programs.exchange(0) is None:
        # Windows are computed like images of their own.
        places = (place for n in range(config.mesh.tiles.volume) for place in programs.places(n))
        size = max((place.window for place in places), key=lambda box: box.pixels).size
        grid = Size((1,) * len(grid))
    # Tiles that run together count as images of a larger micro-batch, the others as micro-batches.
    images, units = (owned, 1) if programs.together else (1, owned)
    images *= config.data.images
    counted = replace(config, data=replace(config.data, images=images))
    # The planner is asked for no seconds, so any machine serves.
    machine = load_machine("a100")
    step = images * units * config.train.accumulate * config.mesh.samples
    work = PlannedTraining(counted, programs.model, size).work(machine, step, precision)
    grids = TileGrids(work)
    memory = TileMemory(grids.tensors, grids.tile_work(grid, every).sizes, work.batch)
    policy = Policy(
        config.train.accumulate * units,
        schedule_of(config.pipeline, config.mesh.stages, work.loss.linear),
        config.pipeline.recompute,
    )
    stages, found = programs.stages, [0.0] * config.mesh.stages
    for stage, rank in enumerate(stages.placement):
        layers = stages.ranges[stage] or range(len(grids.tensors.layers))
        found[rank] += memory.of_stage(layers, stage, stages.stages, policy).changing
    return found


def _trained_values(trained: Mapping) -> dict[str, Any]:
    """Return the values of the settings of a training that decide the memory of a step.

    Args:
        trained: the plain settings in the manifest of a checkpoint.

    Returns:
        The values by the name of the setting, such as ``{"mesh.stages": 2}``.
    """

    def value(setting: str) -> Any:
        section, _, name = setting.partition(".")
        return trained[section][name]

    sizes = {
        setting: None if value(setting) is None else Size(value(setting)) for setting in _SIZES
    }
    return {setting: value(setting) for setting in _NUMBERS} | sizes
