"""Count, mean and sum of squared deviations of each channel, combined without cancellation.

The formula E[x^2] - E[x]^2 loses every digit if the mean is large against the deviation. Moments of
parts can be combined safely (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances, 1979). For parts with n_i values, mean_i and M2_i:

    N = sum n_i,    mean = sum n_i mean_i / N,    M2 = sum M2_i + sum n_i (mean_i - mean)^2
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distseg.comm.memory_format import channels_last, dense
from distseg.comm.staging import upload
from distseg.layers.kernels import norm as compiled
from distseg.layers.kernels.choice import triton_kernels

# Number of pixels that are added one after another. In float64 results are compared to the last
# digits, so chunks are small.
_CHUNK = {torch.float64: 1 << 9}
_USUAL_CHUNK = 1 << 14


class Moments(NamedTuple):
    """Count, mean and squared deviations of the values of each of C channels, in float64.

    Leading dims (...) hold several sets of moments, for instance one for each image.

    Attributes:
        count: the number n of values of a channel, (...,).
        mean: the mean of each channel, (..., C).
        m2: the sum of squared deviations from the mean of each channel, (..., C).
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    @property
    def var(self) -> Tensor:
        """Biased variance m2 / n of each channel, (..., C)."""
        return self.m2 / self.count.unsqueeze(-1)

    def packed(self) -> Tensor:
        """Return the moments as one float64 vector, to be sent as one message."""
        return torch.cat((self.count.flatten(), self.mean.flatten(), self.m2.flatten()))

    def unpacked(self, messages: Tensor) -> Moments:
        """Turn R messages, each made by :meth:`packed` on one rank, into stacked moments.

        Args:
            messages: (R, length). The moments in each message have the shapes of this object.

        Returns:
            Moments with ``count`` (R, *this count's shape), and ``mean`` and ``m2`` likewise.
        """
        count, mean, m2 = messages.split(
            (self.count.numel(), self.mean.numel(), self.m2.numel()), 1
        )
        return Moments(
            count.view(-1, *self.count.shape),
            mean.view(-1, *self.mean.shape),
            m2.view(-1, *self.m2.shape),
        )

    def on(self, device: torch.device) -> Moments:
        """Return the moments on ``device``, copied in one transfer if they lie elsewhere."""
        if self.mean.device == device:
            return self
        (count,), (mean,), (m2,) = self.unpacked(upload(self.packed(), device).unsqueeze(0))
        return Moments(count, mean, m2)


def combine(parts: Moments) -> Moments:
    """Combine the moments of R parts to the moments of all their values.

    ``Moments::join`` in ``kernels/norm.cpp`` computes the same in compiled code.

    Args:
        parts: the moments of the parts, stacked along dim 0: ``count`` (R, ...), ``mean`` and
            ``m2`` (R, ..., C). The result has no dim R.
    """
    count = parts.count.sum(0)
    # A count may lie between 0 and 1 (a vector's share of an image), so only 0 is replaced.
    weights = (parts.count / count.where(count > 0, 1)).unsqueeze(-1)
    mean = (parts.mean * weights).sum(0)
    m2 = (parts.m2 + parts.count.unsqueeze(-1) * (parts.mean - mean) ** 2).sum(0)
    return Moments(count, mean, m2)


def stack(parts: list[Moments]) -> Moments:
    """Stack R moments of equal shapes along a new dim 0: ``mean`` (..., C) -> (R, ..., C)."""
    return Moments(*(torch.stack(tensors) for tensors in zip(*parts)))


def joined(parts: list[Moments]) -> Moments:
    """Combine a list of moments, one for each part of the values, to those of all values."""
    return parts[0] if len(parts) == 1 else combine(stack(parts))


def of_channels(x: Tensor) -> Moments:
    """Return the moments of each channel of one image or of a part of it.

    Shapes: (1, C, *size) -> count (), mean (C,), m2 (C,).
    """
    if compiled.available(x):
        count = torch.tensor(x.numel() / x.shape[1], dtype=torch.float64)
        return Moments(count, *compiled.moments(x))
    if (kernels := triton_kernels(x)) is not None:
        return Moments(_count(x), *kernels.moments(x))
    if x.is_cuda:
        return _moments(x, *_on_gpu(x))
    # The kernel returns the dtype of the running statistics. Without them a bfloat16 input would
    # give bfloat16 moments.
    dtype = torch.promote_types(x.dtype, torch.float32)
    like = x.new_zeros(x.shape[1], dtype=dtype), x.new_ones(x.shape[1], dtype=dtype)
    parts = []
    for chunk in x.split(_rows_of_chunk(x), 2):
        # The kernel is fast only on dense memory. The copy of a chunk stays in the cache.
        chunk = dense(chunk)
        pivot = None
        if x.dtype == torch.float32 and not chunk.is_contiguous():
            # In channels_last the kernel adds pixel after pixel in float32. A large mean would cost
            # digits, so the first pixel is subtracted before.
            pivot = chunk[(slice(None), slice(None), *(slice(1) for _ in x.shape[2:]))]
            chunk = chunk - pivot
        mean, var = torch.ops.aten.batch_norm_update_stats(chunk, *like, 0.0)
        parts.append(
            _moments(chunk, mean if pivot is None else mean.double() + pivot.flatten(), var)
        )
    return joined(parts)


def _on_gpu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel, (C,) each, in float32 or wider.

    PyTorch's GPU kernels add values pairwise, which loses few digits. They convert a dense 16-bit
    image to float32 while they read it; any other 16-bit image is copied to float32 before.

    Args:
        x: one image or a part of it, (1, C, *size), on a GPU.
    """
    if x.is_contiguous() or x.is_contiguous(memory_format=channels_last(x.dim())):
        return torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    var, mean = torch.var_mean(
        x.to(torch.promote_types(x.dtype, torch.float32)), [0, *range(2, x.dim())], correction=0
    )
    return mean, var


def _rows_of_chunk(x: Tensor) -> int:
    """Return how many rows (positions along dim 2) of ``x`` one call of a kernel may sum.

    PyTorch's CPU kernel adds pixel after pixel, so a sum of many rows would lose digits.
    """
    return max(1, _CHUNK.get(x.dtype, _USUAL_CHUNK) // max(1, x[0, 0, 0].numel()))


def _moments(x: Tensor, mean: Tensor, var: Tensor) -> Moments:
    count = _count(x)
    return Moments(count, mean.double(), var.double() * count)


def _count(x: Tensor) -> Tensor:
    """Return the number of pixels of an image (1, C, *size), float64 on its device."""
    # `torch.full` runs on the device. A copied number would synchronise with a GPU.
    return torch.full((), x.numel() / x.shape[1], dtype=torch.float64, device=x.device)


def by_group(m: Moments, groups: int) -> Moments:
    """Combine the moments of channels to the moments of groups: (..., C) -> (..., groups).

    Args:
        m: the moments of C channels.
        groups: the number of groups. Each group has C / groups adjacent channels.
    """
    mean = m.mean.unflatten(-1, (groups, -1))
    m2 = m.m2.unflatten(-1, (groups, -1))
    of_group = mean.mean(-1, keepdim=True)
    deviation = m.count[..., None, None] * (mean - of_group) ** 2
    return Moments(m.count * mean.shape[-1], of_group.squeeze(-1), (m2 + deviation).sum(-1))
