"""Memory formats of tensors: channels last or first, by the number of dims."""

from __future__ import annotations

import torch


def channels_last(dims: int) -> torch.memory_format:
    """Return PyTorch's channels_last memory format for tensors with ``dims`` dims.

    The format exists for (N, C, H, W) and (N, C, D, H, W). For other numbers of dims, return the
    contiguous format.
    """
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(dims, torch.contiguous_format)


def lies_last(x: torch.Tensor) -> bool:
    """Return True if a tensor has its channels last in memory.

    A tensor with a single channel counts as channels first.
    """
    spread = x.shape[-1] > 1 and x.stride(-1) == 0  # expanded: all cells share one value in memory
    return x.stride(1) == 1 and x.shape[1] > 1 and x.dim() in (4, 5) and not spread


def lies_alike(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one shape have equal strides, except in dims of length 1."""
    if x.stride() == other.stride():
        return True
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), other.stride()))


def like_layout(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with the strides of the dense tensor ``other``; copy it if they differ."""
    if lies_alike(x, other):
        return x
    return torch.empty_like(other, dtype=x.dtype, device=x.device).copy_(x)


def like_format(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with channels last in memory if ``other`` has them last, else unchanged.

    ``x`` is copied only if its memory format changes.
    """
    return x.contiguous(memory_format=channels_last(x.dim())) if lies_last(other) else x


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` without gaps in memory, in its memory format; copy it only if it has gaps."""
    form = channels_last(x.dim()) if lies_last(x) else torch.contiguous_format
    return x.contiguous(memory_format=form)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as a flat uint8 view.

    ``x.view(-1).view(torch.uint8)`` fails for a single number whose stride is not 1.
    """
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
