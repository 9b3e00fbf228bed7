"""Makes optimizers by name and computes the learning rate of each step and part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from inspect import unwrap
from typing import TypeVar

import torch
from torch import nn

from distseg.config.settings import OptimConfig
from distseg.models.network import user_names

T = TypeVar("T")


def of_part(settings: Mapping[str, T] | None, name: str, default: T) -> T:
    """Return the value that ``optim.rates`` or ``optim.thaw`` sets for a parameter.

    If the parameter belongs to several parts, the last one counts.
    """
    fitting = [value for part, value in (settings or {}).items() if _belongs(name, part)]
    return fitting[-1] if fitting else default


def _belongs(name: str, part: str) -> bool:
    return fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")


def freeze(model: nn.Module, config: OptimConfig) -> None:
    """Freeze the parameters whose rate is 0.

    Raises:
        ValueError: if the network has no part of a given name.
    """
    parameters = user_names(model.named_parameters(remove_duplicate=False), model)
    for setting, parts in (("rates", config.rates), ("thaw", config.thaw)):
        if unknown := [
            part for part in parts or () if not any(_belongs(name, part) for name in parameters)
        ]:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise ValueError(
                f"optim.{setting} names {unknown[0]!r}, but this network has no such part: its "
                f"parameters begin with {', '.join(tops[:8])}{', ...' * (len(tops) > 8)}"
            )
    for name, parameter in parameters.items():
        if of_part(config.rates, name, 1.0) == 0:
            parameter.requires_grad_(False)


def make_optimizer(
    config: OptimConfig, parameters: Mapping[str, nn.Parameter], fused: bool = True
) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer of named parameters.

    Call :func:`set_learning_rate` before each step.

    Args:
        fused: update with PyTorch's fused kernels. Gradients and momenta must then lie in memory as
            their parameters do.
    """
    groups: dict[tuple[float, int], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(
            (of_part(config.rates, name, 1.0), of_part(config.thaw, name, 0)), []
        ).append(parameter)
    # A pipeline stage may have no weights, but PyTorch refuses an optimizer without parameters.
    groups = groups or {(1.0, 0): [nn.Parameter(torch.zeros(0))]}
    of_group = [
        dict(params=those, factor=factor, thaw=epochs) for (factor, epochs), those in groups.items()
    ]
    optimizer = _optimizer(config, of_group, fused)
    set_learning_rate(optimizer, config.lr, 0)
    return optimizer


def _optimizer(config: OptimConfig, parameters: list[dict], fused: bool) -> torch.optim.Optimizer:
    common = dict(lr=config.lr, weight_decay=config.weight_decay, fused=fused, foreach=False)
    if config.name == "sgd":
        return _light(torch.optim.SGD)(parameters, momentum=config.momentum, **common)
    return _light(torch.optim.Adam if config.name == "adam" else torch.optim.AdamW)(
        parameters, **common
    )


def _light(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the optimizer class without the wrappers that PyTorch adds for torch.compile.

    The wrappers import torch._dynamo, which takes each process a second or two.
    """
    methods = {
        name: unwrap(getattr(kind, name))
        for name in ("add_param_group", "state_dict", "load_state_dict")
    }
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(unwrap(kind.step))})


def state_copies(config: OptimConfig) -> int:
    """Return the number of optimizer-state values per parameter."""
    return int(config.momentum > 0) if config.name == "sgd" else 2


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """Return the learning rate of a step from 0 to total - 1.

    constant, cosine, linear: a linear rise from lr / w over the first w = warmup * total steps.
    Then constant: lr. cosine: lr * (1 + cos(pi t)) / 2 with t from 0 to 1. linear: a line that
    reaches 0 at step decay_factor * total.

    one_cycle: a cosine from lr / 25 to lr, then a cosine to lr / 10^4 (Smith and Topin 2018).
    """
    rise = round(config.warmup * total)
    if step < rise:
        t = (step + 1) / rise
        if config.schedule == "one_cycle":
            return _cosine(config.lr / 25, config.lr, t)
        return config.lr * t
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "linear":
        return (
            config.lr * (config.decay_factor * total - step) / (config.decay_factor * total - rise)
        )
    t = (step - rise) / max(1, total - rise)
    return _cosine(config.lr, config.lr / 1e4 if config.schedule == "one_cycle" else 0.0, t)


def _cosine(start: float, stop: float, t: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * t)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, epoch: int) -> None:
    """Set the rate of each parameter group; a group that has not thawed gets 0."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"] if epoch >= group["thaw"] else 0.0
