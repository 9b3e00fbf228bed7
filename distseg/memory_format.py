"""PyTorch's memory format with channels last, by the number of dims."""

from __future__ import annotations

import torch


def channels_last(dims: int) -> torch.memory_format:
    """Of a tensor (N, C, H, W) or (N, C, D, H, W); others have none of their own."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(dims, torch.contiguous_format)
