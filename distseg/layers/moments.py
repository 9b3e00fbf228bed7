"""Count, mean and sum of squared deviations of each channel: computed in chunks, combined without cancellation.

E[x^2] - E[x]^2 loses every digit once the mean is large against the deviation. Moments of parts combine safely
(Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979):
with N = sum n_i, mean = sum n_i mean_i / N, M2 = sum M2_i + sum n_i (mean_i - mean)^2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distseg.comm.memory_format import channels_last
from distseg.comm.staging import upload
from distseg.layers.kernels import norm as compiled

_CHUNK = {
    torch.float64: 1 << 9
}  # pixels that are added one after another: float64 is for comparing digits
_USUAL_CHUNK = 1 << 14


class Moments(NamedTuple):
    """Of n values each: ``count`` (...,), ``mean`` (..., C), ``m2`` (..., C), float64."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    @property
    def var(self) -> Tensor:
        """The biased variance m2 / n."""
        return self.m2 / self.count.unsqueeze(-1)

    def packed(self) -> Tensor:
        """One flat float64 message."""
        return torch.cat((self.count.flatten(), self.mean.flatten(), self.m2.flatten()))

    def unpacked(self, messages: Tensor) -> "Moments":
        """Messages (R, numbers) from moments of this shape -> moments with a leading R."""
        count, mean, m2 = messages.split(
            (self.count.numel(), self.mean.numel(), self.m2.numel()), 1
        )
        return Moments(
            count.view(-1, *self.count.shape),
            mean.view(-1, *self.mean.shape),
            m2.view(-1, *self.m2.shape),
        )

    def on(self, device: torch.device) -> "Moments":
        """The same on another device, in one copy."""
        if self.mean.device == device:
            return self
        (count,), (mean,), (m2,) = self.unpacked(upload(self.packed(), device).unsqueeze(0))
        return Moments(count, mean, m2)


def combine(parts: Moments) -> Moments:
    """The moments of all values from those of parts stacked along dim 0."""
    count = parts.count.sum(0)
    weights = (parts.count / count.where(count > 0, 1)).unsqueeze(
        -1
    )  # counts of vectors are shares of one
    mean = (parts.mean * weights).sum(0)
    m2 = (parts.m2 + parts.count.unsqueeze(-1) * (parts.mean - mean) ** 2).sum(0)
    return Moments(count, mean, m2)


def stack(parts: list[Moments]) -> Moments:
    return Moments(*(torch.stack(tensors) for tensors in zip(*parts)))


def of_channels(x: Tensor) -> Moments:
    """Moments of each channel of one image or a part of it, (1, C, *size) -> count (), mean (C,), m2 (C,)."""
    if compiled.available(x):
        count = torch.tensor(x.numel() / x.shape[1], dtype=torch.float64)
        return Moments(count, *compiled.moments(x))
    if x.is_cuda:
        return _moments(x, *_on_gpu(x))
    # Running statistics in float32 make the kernel answer in float32; of a bfloat16 input alone it would answer in bfloat16.
    dtype = torch.promote_types(x.dtype, torch.float32)
    like = x.new_zeros(x.shape[1], dtype=dtype), x.new_ones(x.shape[1], dtype=dtype)
    parts = []
    for chunk in x.split(_rows_of_chunk(x), 2):
        # The kernel is fast on dense memory only; a chunk is small enough to be copied within the cache.
        if not (
            chunk.is_contiguous() or chunk.is_contiguous(memory_format=channels_last(chunk.dim()))
        ):
            chunk = chunk.contiguous(
                memory_format=channels_last(chunk.dim())
                if x.stride(1) == 1
                else torch.contiguous_format
            )
        pivot = None
        if x.dtype == torch.float32 and not chunk.is_contiguous():
            # In channels_last the kernel adds pixel after pixel, so a large mean takes float32's digits: it goes first.
            pivot = chunk[(slice(None), slice(None), *(slice(1) for _ in x.shape[2:]))]
            chunk = chunk - pivot
        mean, var = torch.ops.aten.batch_norm_update_stats(chunk, *like, 0.0)
        parts.append(
            _moments(chunk, mean if pivot is None else mean.double() + pivot.flatten(), var)
        )
    return parts[0] if len(parts) == 1 else combine(stack(parts))


def _on_gpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance in float32 or wider, by Welford's sums in a tree; a 16-bit image is widened as it is read, where it lies densely."""
    if x.is_contiguous() or x.is_contiguous(memory_format=channels_last(x.dim())):
        return torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    var, mean = torch.var_mean(
        x.to(torch.promote_types(x.dtype, torch.float32)), [0, *range(2, x.dim())], correction=0
    )
    return mean, var


def _rows_of_chunk(x: Tensor) -> int:
    """Rows (of dim 2) whose pixels a kernel may add one after another without losing digits that count."""
    return max(1, _CHUNK.get(x.dtype, _USUAL_CHUNK) // max(1, x[0, 0, 0].numel()))


def _moments(x: Tensor, mean: Tensor, var: Tensor) -> Moments:
    count = torch.full(
        (), x.numel() / x.shape[1], dtype=torch.float64, device=x.device
    )  # which a GPU need not wait for, as for a copied number
    return Moments(count, mean.double(), var.double() * count)


def by_group(m: Moments, groups: int) -> Moments:
    """Moments of groups of channels that have equal counts: (..., C) -> (..., groups)."""
    mean = m.mean.unflatten(-1, (groups, -1))
    m2 = m.m2.unflatten(-1, (groups, -1))
    of_group = mean.mean(-1, keepdim=True)
    deviation = m.count[..., None, None] * (mean - of_group) ** 2
    return Moments(m.count * mean.shape[-1], of_group.squeeze(-1), (m2 + deviation).sum(-1))
