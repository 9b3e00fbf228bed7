"""Find the position from which a run goes on, and list what changed since its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from distseg.comm.consistency import settings
from distseg.config.settings import OptimConfig
from distseg.runtime.loss_scale import LossScale
from distseg.runtime.optimizer import learning_rate
from distseg.training.checkpoint.files import find, names_of

_FREE = (
    "train.resume",
    "train.output",
    "train.keep",
    "train.job_minutes",
    "train.max_minutes",
    "train.checkpoint_minutes",
    "train.loggers",
    "run.",
    "streaming.",
    "mesh.",
)


@dataclass(frozen=True)
class Position:
    """Position of a run: how many steps, epochs and samples are finished.

    Attributes:
        step: number of finished optimizer steps, over all epochs.
        epoch: number of finished epochs; an epoch ends with its validation.
        samples: number of samples of the current epoch that finished steps have used.
        validation: the scores of the last validation; None if there was none.
        validated: number of epochs that were finished at the last validation; 0 if there was none.
        best_epoch: number of epochs that were finished at the validation with the best score so
            far.
        best_score: the best score of a validation; higher is better. None if there is none.
        loss_scale: with precision fp16 the loss scale (:class:`LossScale`), else None.
        scale_steps: number of steps since the loss scale last changed.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    validation: dict | None = None
    validated: int = 0
    best_epoch: int = 0
    best_score: float | None = None
    loss_scale: float | None = None
    scale_steps: int = 0

    @property
    def waited(self) -> int:
        """Number of epochs from the best score to the last validation."""
        return self.validated - self.best_epoch

    def after_step(self, samples: int, scale: LossScale | None) -> Position:
        """Return the position after one more optimizer step.

        Args:
            samples: number of samples of the epoch that have been used after the step.
            scale: the loss scale of the next step; None unless the precision is fp16.
        """
        scaled = {"loss_scale": scale.value, "scale_steps": scale.steps} if scale else {}
        return replace(self, step=self.step + 1, samples=samples, **scaled)

    def with_validation(self, epoch: int, validation: dict, score: float | None) -> Position:
        """Return a position that differs from this one by the result of a validation.

        The best epoch and score change only if the score is higher than the best one so far.

        Args:
            epoch: number of finished epochs at the validation.
            validation: the scores of the validation.
            score: the score by which epochs are compared, higher is better; None if unknown.
        """
        better = score is not None and (self.best_score is None or score > self.best_score)
        best = {"best_epoch": epoch, "best_score": score} if better else {}
        return replace(self, validation=validation, validated=epoch, **best)


def chosen(output: str, resume: bool | str) -> Path | None:
    """Return the checkpoint from which a run goes on, or None if it begins anew.

    Args:
        output: the run's folder.
        resume: False to begin anew, the name of a checkpoint, or True for the last checkpoint. With
            True a run without a checkpoint begins anew, so that a job script can always set True.

    Raises:
        FileNotFoundError: the named checkpoint does not exist.
    """
    if resume is False or resume is True and not names_of(output):
        return None
    return find(output, "last" if resume is True else resume)


def position_of(manifest: dict) -> Position:
    """Return the position of the run when a checkpoint was written.

    A checkpoint of an older version does not say which validation was the best. Epochs without an
    improvement are then counted from the checkpoint on.

    Args:
        manifest: the manifest of the checkpoint.
    """
    known = {f.name: manifest[f.name] for f in fields(Position) if f.name in manifest}
    begun = {"validated": manifest["epoch"], "best_epoch": manifest["epoch"]}
    return Position(**{**begun, **known})


def first_step(samples: int, batch: int, steps: int) -> tuple[int, str | None]:
    """Return the step of an epoch at which a run goes on, and a note if samples are used twice.

    The run that wrote the checkpoint may have used another number of samples in each step. So the
    checkpoint may lie in the middle of a step of this run. The run then goes on at the beginning of
    this step and uses some samples twice. Otherwise the note is None.

    Args:
        samples: number of samples of the epoch that were used before the checkpoint.
        batch: number of samples in a step of this run.
        steps: number of steps in an epoch of this run.
    """
    step = min(samples // batch, steps)
    twice = samples - step * batch
    if not twice or step == steps:  # after the last step nothing is left to use
        return step, None
    return (
        step,
        f"{twice} of the epoch's samples are seen twice: the checkpoint was written after "
        f"{samples} samples, and a step of this run takes {batch}",
    )


def changes(before: Mapping, now: Mapping) -> list[str]:
    """Return a text for each changed setting, such as ``optim.lr was 0.1, is 0.01``.

    Settings that cannot change results are left out, and settings that the checkpoint's config does
    not have. The mesh is left out as well, because :func:`mesh_change` compares it.

    Args:
        before: the config of the checkpoint.
        now: the config of this run.
    """
    old, new = settings(before), settings(now)
    names = [
        name for name in new if not name.startswith(_FREE) and old.get(name, new[name]) != new[name]
    ]
    return [f"{name} was {old[name]}, is {new[name]}" for name in names]


def mesh_change(before: Mapping, now: Mapping, batch_norm: bool) -> list[str]:
    """Return a list with a sentence on a changed mesh and its effect on the loss or gradient.

    The list is empty if the mesh has not changed.

    Args:
        before: the config of the checkpoint.
        now: the config of this run.
        batch_norm: True if the network has batch norm with statistics of the current images.
    """
    if "mesh" not in before or _shape(before["mesh"]) == _shape(now["mesh"]):
        return []
    images = [_images(config) for config in (before, now)]
    if images[0] != images[1]:
        what = (
            f"a step had {images[0]} images and now has {images[1]}, so the loss curve changes; "
            "set train.accumulate and data.images to get the same number of images"
        )
    elif _of_windows(now.get("approximate", {})):
        what = "the approximation (approximate.halo, approximate.norms) depends on the mesh"
    elif batch_norm and _together(before) != _together(now):
        what = (
            f"batch norm took its statistics over {_together(before)} images and now takes them "
            f"over {_together(now)}, so the loss curve changes"
        )
    else:
        what = "the gradient is the same"
    return [f"the mesh was {_shape(before['mesh'])}, is {_shape(now['mesh'])}: {what}"]


def _shape(mesh: Mapping) -> str:
    stages = mesh.get("stages", 1)  # PatchGD has no stages
    return f"{mesh['samples']} samples x ({mesh['tiles']}) tiles x {stages} stages"


def _of_windows(approximate: Mapping) -> bool:
    """Return True if the gradient depends on how images are cut into windows.

    It does if ``approximate.halo`` or ``approximate.norms`` is set.
    """
    return any(approximate.get(name) is not None for name in ("halo", "norms"))


def _images(config: Mapping) -> int:
    """Return the number of images of an optimizer step, over all groups and micro-batches."""
    accumulate = config["train"].get("accumulate", 1)  # PatchGD has one micro-batch a step
    return config["mesh"]["samples"] * accumulate * config["data"]["images"]


def _together(config: Mapping) -> int:
    """Return the number of images from which a batch norm computes its statistics."""
    scope = config["spatial" if "spatial" in config else "patchgd"].get("norm_scope", "group")
    return config["data"]["images"] * (1 if scope == "group" else config["mesh"]["samples"])


def schedule_change(
    before: OptimConfig, now: OptimConfig, at: tuple[int, int], at_before: tuple[int, int]
) -> list[str]:
    """Return a list with a sentence if changed settings change the next step's learning rate.

    The rate is compared with the one that the settings of the checkpoint would give. The list also
    has a sentence if the checkpoint's schedule has already ended. Otherwise it is empty.

    Args:
        before: the optimizer settings of the checkpoint.
        now: the optimizer settings of this run.
        at: the number of the next step, and the total number of steps.
        at_before: the same two numbers, counted with the settings of the checkpoint.
    """
    rate = learning_rate(now, *at)
    would = learning_rate(before, *at_before) if at_before[0] < at_before[1] else None
    if (at, now) == (at_before, before) or rate == would:
        return []
    if would is None:
        was = "the schedule had come to its end"
    else:
        was = f"the rate would have been {would:.3g}"
    return [
        f"the schedule ({now.schedule}) goes on at step {at[0]} of {at[1]} with a learning rate of "
        f"{rate:.3g}; with the checkpoint's settings {was}"
    ]
