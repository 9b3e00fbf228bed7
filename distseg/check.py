"""Settings that would be without effect beside others, in one table: who sets one believes that it acts.

A value that the user set away from the default, and that nothing would read, is refused before any work
(:func:`check_effects`). Where only the mesh or the model of the day makes it so, as when a config of many ranks is tried on
one, it is told instead (:func:`notes`). The loss refuses its own (:class:`distseg.train.loss.Loss`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

from torch import nn

from distseg.config import Config
from distseg.plan.in_time import tiles_in_time
from distseg.spatial.norm import NORMS

_DEFAULTS = Config()


@dataclass(frozen=True)
class Rule:
    """``setting`` acts where ``acts``; else ``why`` not, and the repair, with the config as ``c``."""

    setting: str
    acts: Callable[[Config], bool]
    why: str


def _exchanges(c: Config) -> bool:
    return c.spatial.exchanges


RULES = (
    Rule("model.groups", lambda c: norm_of(c) in ("group", None), "model.norm is {norm}: set it to group, or leave model.groups out"),
    Rule("pipeline.recompute", lambda c: not tiles_in_time(c), "tiles in time (run.memory or spatial.in_time) compute again by themselves what they need: leave it out"),
    Rule("spatial.fuse_below", _exchanges, "spatial.exchange_every is all, so that nothing is exchanged: set that to 1, 2, ... or level, or leave spatial.fuse_below out"),
    Rule("spatial.scratch", tiles_in_time, "no maps wait without tiles in time: give run.memory or spatial.in_time, or leave it out (predict.scratch is prediction's)"),
    Rule("spatial.tiles_per_rank", lambda c: c.run.memory is None or not tiles_in_time(c), "run.memory is given and decides the tiles: leave one of them out"),
    Rule("data.focus_share", lambda c: c.data.focus_class is not None, "data.focus_class is not set: name a class, or leave data.focus_share out"),
    Rule("data.epoch_samples", lambda c: c.data.crop is not None, "whole images are trained on, each once an epoch: set data.crop, or leave data.epoch_samples out"),
    Rule("optim.momentum", lambda c: c.optim.name == "sgd", "optim.name is {c.optim.name}, which has none: set that to sgd, or leave optim.momentum out"),
)


def check_effects(config: Config) -> None:
    """Refuse settings that would be without effect.

    Raises:
        ValueError: naming the setting, its value, why it does nothing, and the repair.
    """
    for rule in RULES:
        value = of(config, rule.setting)
        if value != of(_DEFAULTS, rule.setting) and not rule.acts(config):
            raise ValueError(f"{rule.setting} is {value}, but {rule.why.format(c=config, norm=norm_of(config))}")


def notes(config: Config, model: nn.Module) -> list[str]:
    """What this model or mesh leaves without effect, each in a sentence.

    Args:
        model: plain.
    """
    norms = [m for m in model.modules() if isinstance(m, NORMS)]
    spatial, mesh = config.spatial, config.mesh
    found = []
    if spatial.norm_scope == "step" and not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in norms):
        found.append("spatial.norm_scope step is without effect: the model has no batch norm")
    if spatial.norm_scope == "window" and not norms:
        found.append("spatial.norm_scope window is without effect: the model has no norm")
    if spatial.frozen_norm and not norms:
        found.append("spatial.frozen_norm is without effect: the model has no norm")
    if (fewer := _fewer_groups(config, model)) is not None:
        found.append(f"model.groups {config.model.groups} does not divide the channels of {fewer[0]}, so it takes {fewer[1]}")
    if config.pipeline.placement == "v" and mesh.stages == 1:
        found.append("pipeline.placement v is without effect: mesh.stages is 1")
    if mesh.compression != "none" and mesh.samples * mesh.tiles.volume == 1:
        found.append(f"mesh.compression {mesh.compression} is without effect: one rank holds all of the gradient")
    return found


def _fewer_groups(config: Config, model: nn.Module) -> tuple[str, int] | None:
    """A group norm that has fewer groups than the config says, and how many."""
    groups = config.model.groups
    if not groups or norm_of(config) != "group":
        return None
    every = ((name, layer.num_groups) for name, layer in model.named_modules() if isinstance(layer, nn.GroupNorm))
    return next((found for found in every if found[1] != groups), None)


def of(config: Config, setting: str):
    """The value of ``section.field``."""
    section, _, field = setting.partition(".")
    return getattr(getattr(config, section), field)


def norm_of(config: Config) -> str | None:
    """The norm of a network by name; None of a user's own function, which may do what it likes with its arguments."""
    from distseg.models.zoo import ZOO

    name = config.model.name
    if ":" in name:
        return None
    entry = ZOO.get(name)
    return config.model.norm or (entry.arguments.get("norm") if entry else None) or "instance"


def with_store(config: Config, ignore: int) -> Config:
    """The config with the store's ignore value, which holds for its labels.

    Raises:
        ValueError: the config sets another one.
    """
    own = config.loss.ignore_index
    if own not in (ignore, _DEFAULTS.loss.ignore_index):
        raise ValueError(
            f"loss.ignore_index is {own}, but the labels of {config.data.store} have {ignore} where nothing counts: leave loss.ignore_index out, "
            f"or prepare the store with --ignore {own}"
        )
    return replace(config, loss=replace(config.loss, ignore_index=ignore))
