"""Refuses functions of PyTorch that need the gradients of all stages, on a rank of one stage.

With several stages a rank holds the parameters of its own stages only. PyTorch's
``clip_grad_norm_`` would clip each stage by a norm of its own, and ``LBFGS`` would take another
step on each stage. Both would train a different network than the serial program, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, wraps

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

# The parameters of all models with several stages.
_partial: WeakIdKeyDictionary = WeakIdKeyDictionary()
# PyTorch's optimizers whose step of one parameter depends on the gradients of the others.
_JOINT = (torch.optim.LBFGS,)


def refuse_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Make PyTorch refuse norms of these parameters' gradients, and joint updates of them.

    After the call, PyTorch's functions that clip by the norm of gradients raise a ValueError for
    these parameters, and so do optimizers such as LBFGS. The first call replaces PyTorch's function
    that computes the norm of gradients by one that checks its arguments first.

    Args:
        parameters: the parameters of a model with several stages that this rank holds.
    """
    _install()
    for parameter in parameters:
        _partial[parameter] = None


@lru_cache(1)
def _install() -> None:
    """Make PyTorch's norm of gradients and its optimizers check the parameters that they get."""
    register_optimizer_step_pre_hook(_check_optimizer)
    plain = getattr(clip_grad, "_get_total_norm", None)
    if plain is None:  # a version of PyTorch that computes the norm elsewhere
        return

    @wraps(plain)
    def checked(tensors, *args, **kwargs):
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = {id(p.grad) for p in _partial if p.grad is not None}
        if any(id(tensor) in gradients for tensor in given):
            raise ValueError(
                "torch.nn.utils.clip_grad_norm_ sees only the gradients of this rank's stages, so "
                "each stage would be clipped by another norm: call clip_grad_norm_ of the "
                "distributed model, which takes the norm over all stages"
            )
        return plain(given, *args, **kwargs)

    clip_grad._get_total_norm = checked
    nn.utils.get_total_norm = checked


def _check_optimizer(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Refuse a step of an optimizer, such as LBFGS, that would need the gradients of all stages."""
    if isinstance(optimizer, _JOINT) and any(
        parameter in _partial for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise ValueError(
            f"{type(optimizer).__name__} updates each parameter by the gradients of all of them, "
            "but with several stages a rank has only those of its own stages: use an optimizer "
            "that treats each parameter by itself, such as SGD or AdamW, or one stage"
        )
