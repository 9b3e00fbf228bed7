"""Checkpoints of distributed models, for a training loop in Python.

The files are those of a run (:mod:`distseg.training.checkpoint.files`): tensors by the names of the
user's module, and a manifest. A mesh of any other shape loads them. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from distseg.comm.launch import raise_jointly
from distseg.training.checkpoint.files import (
    find,
    load_optimizer,
    load_weights,
    parameters_of,
    read_manifest,
    share,
)
from distseg.training.checkpoint.saving import Checkpoints
from distseg.training.distributed import DistributedModel

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def save(
    folder: str | Path,
    model: DistributedModel,
    optimizers: Optimizers = (),
    step: int = 0,
    extra: dict | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of a distributed model and its optimizers.

    All ranks of the model's mesh must call it together. One rank of each stage writes the stage's
    part. The checkpoint appears as a whole or not at all.

    Args:
        folder: the folder of the run, which all ranks see.
        model: from :func:`distseg.distribute`.
        optimizers: the optimizer, or a list of several.
        step: number of steps done, by which the checkpoint is named.
        extra: further values to keep, such as ``{"scheduler": scheduler.state_dict()}``. These
            values must be numbers, texts, and lists and dicts of these.
        keep: number of newest checkpoints to keep. Older ones are deleted.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: ``extra`` or a setting of an optimizer is not plain data, or an optimizer has
            parameters that are not the model's. It is raised on all ranks before any work.
            It is also raised on all ranks if a file cannot be written.
    """
    mesh, those = model.mesh, _listed(optimizers)
    with raise_jointly(mesh.world):
        _check_parameters(model, those)
        state = {
            "optimizers": [_plain_groups(one) for one in those],
            "extra": _plain(extra or {}, "extra"),
            "counters": [model.epoch, model.images_seen],
        }
    checkpoints = Checkpoints(folder, keep, mesh.pipeline)
    written = checkpoints.folder / f"step-{step:08d}"
    with raise_jointly(mesh.world):
        if mesh.replicas.rank == 0:
            fields = {"step": step, "trains": "loop", "state": state}
            checkpoints.save(model, _Joined(those), fields)
    return written


def restore(
    folder: str | Path, model: DistributedModel, optimizers: Optimizers = (), which: str = "last"
) -> tuple[int, dict]:
    """Load a checkpoint of :func:`save` into a model and its optimizers.

    All ranks of the model's mesh must call it together. The mesh may have another shape than the
    mesh that saved the checkpoint.

    Args:
        folder: the folder of the run, or of a checkpoint.
        model: a distributed model of the same module.
        optimizers: optimizers of the saved classes, in the order in which they were saved.
        which: last, or the name of a checkpoint.

    Returns:
        The number of the step and ``extra``, as they were saved.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint is of another model or of other optimizers, or damaged. It is
            raised on all ranks.
    """
    mesh, those = model.mesh, _listed(optimizers)
    with raise_jointly(mesh.world):
        _check_parameters(model, those)
        checkpoint = find(folder, which)
        manifest = read_manifest(checkpoint)
        state = manifest.get("state")
        if not isinstance(state, dict):
            raise ValueError(
                f"{checkpoint} is a checkpoint of `distseg train`, not of distseg.save: give its "
                "weights to model.load_state_dict"
            )
        _check_kinds(checkpoint, state["optimizers"], those)
        if mesh.replicas.rank == 0:
            load_weights(checkpoint, model, part=mesh.shape.stages > 1)
            load_optimizer(checkpoint, model, _Joined(those))
    share(model, _Joined(those), mesh.replicas)
    for one, (_, groups) in zip(those, state["optimizers"]):
        for group, saved in zip(one.param_groups, groups):
            group.update({key: _like(group.get(key), value) for key, value in saved.items()})
    model.epoch, model.images_seen = state["counters"]
    return manifest["step"], state["extra"]


class _Joined:
    """Several optimizers in one object that has the attributes ``param_groups`` and ``state``.

    Checkpoints are read and written with these two attributes of an optimizer only.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        self.state = _States(optimizers)


class _States:
    """Mapping from each parameter of several optimizers to its state in its own optimizer."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self._home = {p: one.state for one in optimizers for p in parameters_of(one)}

    def __getitem__(self, p: Tensor) -> dict:
        return self._home[p][p]

    def get(self, p: Tensor, default: dict) -> dict:
        return self._home[p].get(p, default)

    def items(self):
        return [(p, state[p]) for p, state in self._home.items() if p in state]


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _check_parameters(model: DistributedModel, optimizers: list[torch.optim.Optimizer]) -> None:
    """Check that each parameter of the optimizers is the model's and is in one optimizer only.

    Check also that the optimizers' state consists of tensors, because checkpoints hold only these.

    Raises:
        ValueError: one of these checks fails.
    """
    own, seen = {id(p) for p in model.parameters()}, set()
    for one in optimizers:
        for p in map(id, parameters_of(one)):
            if p not in own or p in seen:
                what = (
                    "that an optimizer has already: give each parameter to one optimizer, once"
                    if p in seen
                    else "that is not of this model: make the optimizers from model.parameters(), "
                    "after distribute"
                )
                raise ValueError(f"an optimizer ({type(one).__name__}) has a parameter {what}")
            seen.add(p)
        for key, value in ((k, v) for state in one.state.values() for k, v in state.items()):
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(
                    f"the state {key} of {type(one).__name__} is a {type(value).__name__}, but "
                    "checkpoints can hold only tensors: train with an optimizer that keeps tensors"
                )


def _check_kinds(checkpoint: Path, saved: list, optimizers: list[torch.optim.Optimizer]) -> None:
    """Refuse optimizers whose classes or numbers of parameter groups differ from the saved ones.

    Args:
        checkpoint: the folder of the checkpoint, for the message.
        saved: class and settings of each saved optimizer, as from :func:`_plain_groups`.
        optimizers: the optimizers to be filled.

    Raises:
        ValueError: classes or numbers differ.
    """
    kinds = [[type(one).__name__, len(one.param_groups)] for one in optimizers]
    found = [[kind, len(groups)] for kind, groups in saved]
    if kinds != found:

        def named(those: list) -> str:
            return ", ".join(f"{kind} with {count} groups" for kind, count in those) or "none"

        raise ValueError(
            f"{checkpoint} has the optimizers {named(found)}, but {named(kinds)} are given: give "
            "those that were saved, in their order"
        )


def _plain_groups(optimizer: torch.optim.Optimizer) -> list:
    """Return ``[class name, groups]`` of an optimizer, as values that JSON can represent.

    ``groups`` has a dict for each parameter group, with its settings but without its parameters. An
    example is ``["SGD", [{"lr": 0.1, "momentum": 0.9}]]``.

    Raises:
        ValueError: JSON cannot represent a setting.
    """
    kind = type(optimizer).__name__
    groups = [
        {
            key: _plain(value.item() if isinstance(value, Tensor) else value, f"{kind}'s {key}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]
    return [kind, groups]


def _plain(value, name: str):
    """Return the value that results from writing ``value`` to JSON and reading it back.

    Args:
        value: the value.
        name: the name of the value, for the message.

    Raises:
        ValueError: JSON cannot represent the value.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"{name} cannot be saved ({e}): give numbers, texts, lists and dicts of them"
        ) from None


def _like(now, saved):
    """Return a saved setting of an optimizer, converted to the type that the setting has now.

    A checkpoint holds a tensor as a number, and a tuple as a list.

    Args:
        now: the present value of the setting, which determines the type.
        saved: the value in the checkpoint.
    """
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) else saved
