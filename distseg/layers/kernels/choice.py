"""Choice of the kernels that compute a norm on a feature map: compiled, Triton's or PyTorch's."""

from __future__ import annotations

import os
import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from distseg.layers.kernels import norm as compiled
from distseg.layers.kernels import plain

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def kernels(x: Tensor) -> ModuleType:
    """Return the module whose functions ``forward``, ``sums`` and ``gradient`` take ``x``.

    Args:
        x: images, (B, C, *size).
    """
    if compiled.available(x):
        return compiled
    return triton_kernels(x) or plain


def triton_kernels(x: Tensor) -> ModuleType | None:
    """Return the module of Triton kernels if these kernels compute norms on ``x``, else None.

    With DISTSEG_TRITON_NORMS=1 they compute norms of images in a GPU's memory. If Triton's
    interpreter is on (TRITON_INTERPRET=1), they also take images in the host's memory.

    Args:
        x: images, (B, C, *size).
    """
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return _triton_norm() if x.dtype in _TYPES and 3 <= x.dim() <= 5 else None


@cache
def _triton_norm() -> ModuleType | None:
    """Return the module of Triton kernels if DISTSEG_TRITON_NORMS is 1, else None.

    Return None with a warning if Triton cannot be imported.
    """
    if os.environ.get("DISTSEG_TRITON_NORMS") != "1":
        return None
    try:
        from distseg.layers.kernels import triton_norm
    except ImportError as e:
        warnings.warn(
            f"DISTSEG_TRITON_NORMS is 1, but the package triton cannot be imported ({e}), so "
            "PyTorch's kernels compute the norms: pip install triton",
            stacklevel=2,
        )
        return None
    return triton_norm
