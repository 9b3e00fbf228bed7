"""Makes optimizers by name and computes the learning rate of each step and network part."""

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

    Both settings give a value to some parts of the network. If several parts contain the parameter,
    the part that comes last in the setting counts. If no part contains it, return ``default``.

    Args:
        settings: the value of each part of the network; a part is a name or a pattern such as
            ``encoder.*``.
        name: the name of the parameter.
        default: the value of parameters that no part contains.
    """
    fitting = [value for part, value in (settings or {}).items() if _belongs(name, part)]
    return fitting[-1] if fitting else default


def _belongs(name: str, part: str) -> bool:
    return fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")


def freeze(model: nn.Module, config: OptimConfig) -> None:
    """Freeze the parameters whose rate in ``optim.rates`` is 0.

    Raises:
        ValueError: if ``optim.rates`` or ``optim.thaw`` names a part that the network lacks.
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
    """Return the PyTorch optimizer that ``config`` names, which updates ``parameters``.

    Call :func:`set_learning_rate` before each step.

    Args:
        config: the settings of the optimizer.
        parameters: the trained parameters by name.
        fused: True to update with PyTorch's fused kernels. Gradients and momenta must then have the
            memory format of their parameters.
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

    The wrappers import torch._dynamo, which costs each process a second or two.
    """
    methods = {
        name: unwrap(getattr(kind, name))
        for name in ("add_param_group", "state_dict", "load_state_dict")
    }
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(unwrap(kind.step))})


def state_copies(config: OptimConfig) -> int:
    """Return how many values the optimizer keeps for each value of a parameter, such as 2 in Adam.

    The count decides how much memory the optimizer needs.
    """
    return int(config.momentum > 0) if config.name == "sgd" else 2


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """Return the learning rate of an optimizer step.

    The first w = warmup * total steps are the warm-up. In the warm-up, the rate of the schedules
    ``constant``, ``cosine`` and ``linear`` rises linearly from lr / w to lr. After the warm-up,
    ``constant`` stays at lr, and ``cosine`` is lr * (1 + cos(pi t)) / 2, where t goes from 0 at the
    end of the warm-up to 1 at the end of training. ``linear`` falls along a line that reaches 0 at
    step decay_factor * total.

    The schedule ``one_cycle`` rises along a cosine from lr / 25 to lr in the warm-up, and then
    falls along a cosine to lr / 10^4 (Smith and Topin 2018).

    Args:
        config: the settings, with lr, schedule, warmup and decay_factor.
        step: the number of the step, from 0 to total - 1.
        total: the number of steps of the training.
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
    """Set the learning rate of each parameter group of an optimizer.

    A group's learning rate is ``rate`` times the group's factor (setting ``optim.rates``). It is 0
    before the epoch in which the group starts to be trained (setting ``optim.thaw``).

    Args:
        optimizer: an optimizer from :func:`make_optimizer`.
        rate: the learning rate of the step (:func:`learning_rate`).
        epoch: the number of the epoch.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"] if epoch >= group["thaw"] else 0.0
