"""Optimizers by name, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from inspect import unwrap

import torch
from torch import nn

from distseg.config import OptimConfig


def make_optimizer(config: OptimConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's own optimizer; its learning rate is set before each step from :func:`learning_rate`."""
    parameters = parameters or [nn.Parameter(torch.zeros(0))]  # a pipeline stage may have no weights
    common = dict(lr=config.lr, weight_decay=config.weight_decay, fused=True)
    if config.name == "sgd":
        return _light(torch.optim.SGD)(parameters, momentum=config.momentum, **common)
    return _light(torch.optim.Adam if config.name == "adam" else torch.optim.AdamW)(parameters, **common)


def _light(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The optimizer without what PyTorch wraps its methods in for torch.compile, which imports torch._dynamo: 300 modules, a second or two of each process."""
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "state_dict", "load_state_dict")}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(unwrap(kind.step))})


def state_copies(config: OptimConfig) -> int:
    """Numbers that the optimizer keeps a weight."""
    return int(config.momentum > 0) if config.name == "sgd" else 2


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """The rate of step 0 .. total-1.

    constant, cosine: a linear rise from lr/w over the first w = warmup * total steps, then constant, or
    lr * (1 + cos(pi t)) / 2 with t from 0 to 1 over the rest. one_cycle: from lr/25 along a cosine to lr, then along a
    cosine to lr/10^4 (Smith and Topin, 2018).
    """
    rise = round(config.warmup * total)
    if step < rise:
        t = (step + 1) / rise
        if config.schedule == "one_cycle":
            return _cosine(config.lr / 25, config.lr, t)
        return config.lr * t
    t = (step - rise) / max(1, total - rise)
    if config.schedule == "constant":
        return config.lr
    return _cosine(config.lr, config.lr / 1e4 if config.schedule == "one_cycle" else 0.0, t)


def _cosine(start: float, stop: float, t: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * t)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
