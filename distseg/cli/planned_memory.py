"""Predict the memory of each rank of a finished training, for the page of ``distseg report``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distseg.config.settings import Config
from distseg.config.sizes import Size
from distseg.models.zoo import outline_model
from distseg.training.programs import StepPrograms

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

    They are the memory that the rank had before the first step, with weights, gradients and the
    optimizer's state, and the activations by the memory model of ``distseg plan``. With
    ``streaming.memory`` they are this limit.

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
    config = _as_trained(config, manifest["config"])
    if config.streaming.memory is not None:
        return [float(config.streaming.memory)] * len(base)
    if config.streaming.active or config.pipeline.placement == "devices":
        return None
    model = outline_model(config.model, *manifest["channels"])
    programs = StepPrograms(config.with_dims(len(size), str(Size(size))), model, size)
    activations = programs.activations(start["precision"], start["device"])
    if activations is None:
        return None
    # The stage is the fastest axis of the mesh.
    return [bytes_ + activations[rank % len(activations)] for rank, bytes_ in enumerate(base)]


def _as_trained(config: Config, trained: Mapping) -> Config:
    """Return the settings with the training's values where they decide the memory of a step.

    Args:
        config: the settings that prediction takes over.
        trained: the plain settings in the manifest of a checkpoint.
    """

    def value(setting: str):
        section, _, name = setting.partition(".")
        return trained[section][name]

    sizes: dict[str, Sequence[int] | None] = {
        setting: None if value(setting) is None else Size(value(setting)) for setting in _SIZES
    }
    return config.with_values({setting: value(setting) for setting in _NUMBERS} | sizes)
