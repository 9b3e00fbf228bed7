"""Where a run goes on, and what has changed since: compared with the checkpoint, and told before work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from distseg.comm.consistency import settings
from distseg.config.settings import OptimConfig
from distseg.runtime.optimizer import learning_rate
from distseg.training.checkpoint.files import find, names_of

_FREE = (
    "train.resume",
    "train.output",
    "train.keep",
    "train.job_minutes",
    "train.max_minutes",
    "train.checkpoint_minutes",
    "train.tensorboard",
    "run.",
    "mesh.",
)


@dataclass(frozen=True)
class Position:
    """How far a run is: optimizer steps, whole epochs with their validation, and samples of the epoch under way."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    validation: dict | None = None


def chosen(output: str, resume: bool | str) -> Path | None:
    """The checkpoint to go on from; None: from the beginning, as a job's first run does that always says resume.

    Raises:
        FileNotFoundError: one is named that is not there.
    """
    if resume is False or resume is True and not names_of(output):
        return None
    return find(output, "last" if resume is True else resume)


def position_of(manifest: dict) -> Position:
    return Position(
        manifest["step"], manifest["epoch"], manifest.get("samples", 0), manifest.get("validation")
    )


def first_step(samples: int, batch: int, steps: int) -> tuple[int, str | None]:
    """The step of an epoch at which to go on after so many samples of it, and a word if it is not the very next sample."""
    step = min(samples // batch, steps)
    twice = samples - step * batch
    return (
        step,
        f"{twice} of the epoch's samples are seen twice: the checkpoint was written after {samples}, and a step now takes {batch}"
        if twice
        else None,
    )


def changes(before: Mapping, now: Mapping) -> list[str]:
    """A sentence for each setting that a run now has otherwise, but for those that may be anything."""
    old, new = settings(before), settings(now)
    names = [
        name for name in new if not name.startswith(_FREE) and old.get(name, new[name]) != new[name]
    ]
    return [f"{name} was {old[name]}, is {new[name]}" for name in names]


def mesh_change(before: Mapping, now: Mapping, batch_norm: bool) -> list[str]:
    """A sentence if the mesh is another, with what becomes of the gradient.

    Args:
        batch_norm: whether the network has some that takes statistics of the images in hand.
    """
    shape = lambda mesh: (
        f"{mesh['samples']} samples x ({mesh['tiles']}) tiles x {mesh['stages']} stages"
    )  # noqa: E731
    if "mesh" not in before or shape(before["mesh"]) == shape(now["mesh"]):
        return []
    images = [_images(config) for config in (before, now)]
    if images[0] != images[1]:
        what = f"a step was of {images[0]} images, is of {images[1]}, so the loss curve is another; train.accumulate and data.images make it the same"
    elif now["spatial"]["norm_scope"] == "window" or now["spatial"]["halo"] is not None:
        what = "what is approximate (spatial.norm_scope window, spatial.halo) depends on it"
    elif batch_norm and _together(before) != _together(now):
        what = "batch norm sees other images of a step together, so the loss curve is another"
    else:
        what = "the gradient is the same"
    return [f"the mesh was {shape(before['mesh'])}, is {shape(now['mesh'])}: {what}"]


def _images(config: Mapping) -> int:
    """That a step takes."""
    return config["mesh"]["samples"] * config["train"]["accumulate"] * config["data"]["images"]


def _together(config: Mapping) -> int:
    """How many images of a step, one after another, a batch norm sees together."""
    return config["data"]["images"] * (
        1 if config["spatial"]["norm_scope"] == "group" else config["mesh"]["samples"]
    )


def schedule_change(
    before: OptimConfig, now: OptimConfig, at: tuple[int, int], at_before: tuple[int, int]
) -> list[str]:
    """What becomes of the learning rate.

    Args:
        at: the position of the next step in all steps of the run, and their number; ``at_before``: by the settings before.
    """
    rate = learning_rate(now, *at)
    would = learning_rate(before, *at_before) if at_before[0] < at_before[1] else None
    if (at, now) == (at_before, before) or rate == would:
        return []
    was = "it had come to its end" if would is None else f"it would have been {would:.3g}"
    return [
        f"the schedule ({now.schedule}) goes on at step {at[0]} of {at[1]} with a rate of {rate:.3g}; with the settings before {was}"
    ]
