"""Targets of several outputs of a network, packed into one tensor that is cut and sent as one.

The packed tensor is int64. Floating-point values are stored as the bits of float64, so that every
value, also NaN, is the same after unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TargetForm(NamedTuple):
    """Dtype and channels of the target of one output.

    Attributes:
        dtype: int64 or a floating-point dtype.
        channels: number of channels; None for targets (B, *size) without a channel dim.
    """

    dtype: torch.dtype
    channels: int | None


def pack(targets: Sequence[Tensor], forms: Sequence[TargetForm]) -> Tensor:
    """Return the targets of all outputs on the same pixels as one tensor, (B, K, *size) int64.

    Args:
        targets: the target of each output, (B, *size) or (B, C', *size).
        forms: the dtype and the channels that each target must have.

    Raises:
        ValueError: the dtype or the channels of a target differ from its form.
    """
    parts = []
    for number, (target, form) in enumerate(zip(targets, forms, strict=True)):
        part = target.unsqueeze(1) if form.channels is None else target
        found = TargetForm(target.dtype, None if form.channels is None else part.shape[1])
        if found != form:
            raise ValueError(
                f"target {number} has {_text(found)} in some images, but {_text(form)} in the "
                "first image: give the targets of all images one dtype and one number of channels"
            )
        parts.append(part.double().view(torch.int64) if form.dtype.is_floating_point else part)
    return torch.cat(parts, 1)


def unpack(packed: Tensor, forms: Sequence[TargetForm]) -> list[Tensor]:
    """Return the target of each output, of which :func:`pack` made one tensor.

    Args:
        packed: a part of the tensor that :func:`pack` has returned, (B, K, *size).
        forms: the dtype and the channels of each target.
    """
    parts = packed.split([form.channels or 1 for form in forms], 1)
    return [
        _values(part.squeeze(1) if form.channels is None else part, form.dtype)
        for part, form in zip(parts, forms)
    ]


def _values(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.view(torch.float64).to(dtype) if dtype.is_floating_point else part


def _text(form: TargetForm) -> str:
    channels = "no channel dim" if form.channels is None else f"{form.channels} channels"
    return f"{str(form.dtype).removeprefix('torch.')} with {channels}"
