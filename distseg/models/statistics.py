"""Statistics of an image beside means and maxima: variances, sums of exponentials, and sums of products; each a vector of the image.

They are kinds of :class:`distseg.models.layers.Mean`: they read all places of one map. Their twins for parts of an image: :mod:`distseg.layers.statistics`.
"""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from distseg.models.layers import Mean, as_vector


class Variance(Mean):
    """Variance of each channel, or of each group of channels, over an image: (N, C, *size) -> (N, groups, 1, ...).

    Args:
        groups: groups of neighbouring channels; None: each channel is one.
        correction: what the sum of squared deviations is divided by is the number of values less this.
    """

    def __init__(self, groups: int | None = None, correction: float = 1):
        super().__init__()
        self.groups, self.correction = groups, correction

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2) if self.groups is None else x.reshape(len(x), self.groups, -1)
        return as_vector(flat.var(2, correction=self.correction), x.dim() - 2)

    def extra_repr(self) -> str:
        return f"groups={self.groups}, correction={self.correction}"


class LogSumExp(Mean):
    """Logarithm of the sum of exponentials of each channel over an image: (N, C, *size) -> (N, C, 1, ...)."""

    def forward(self, x: Tensor) -> Tensor:
        return as_vector(x.flatten(2).logsumexp(2), x.dim() - 2)


class Largest(Mean):
    """The largest values of each channel of an image, in falling order: (N, C, *size) -> (N, C * k, 1, ...), where a channel's lie side by side.

    Of equal ones those count that come first, counted row by row; PyTorch leaves open which.
    """

    def __init__(self, k: int):
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        return as_vector(flat.gather(2, first_largest(flat, self.k)), x.dim() - 2)

    def extra_repr(self) -> str:
        return str(self.k)


def first_largest(x: Tensor, k: int) -> Tensor:
    """Return where the k largest values along the last dim are, in falling order, and of equal ones in rising order of where they are."""
    x = x.detach()
    least = x.topk(k, -1)[0][..., -1:]
    more, equal = x > least, x == least
    chosen = more | equal & (equal.cumsum(-1) <= k - more.sum(-1, keepdim=True))
    behind = torch.arange(x.shape[-1], 0, -1, device=x.device)
    there = (chosen * behind).topk(k, -1)[1]
    return there.gather(-1, x.gather(-1, there).sort(dim=-1, descending=True, stable=True)[1])


class Measure(Mean):
    """A number that the size of a map makes, for each image: (N, C, *size) -> (N, 1, 1, ...).

    Args:
        rule: gives it of the size.
    """

    def __init__(self, rule: Callable[[Sequence[int]], float]):
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((len(x), 1, *(1 for _ in x.shape[2:])), self.rule(x.shape[2:]))

    def extra_repr(self) -> str:
        return str(self.rule)


class Products(Mean):
    """Sums over the places of an image of products of channels: sum_p a[h, i, p] b[h, j, p], as ``a @ b.transpose(-1, -2)`` of maps whose places are one dim.

    (N, heads * (I + J), *size) -> (N, heads * I * J, 1, ...), where the channels of ``a`` come first, or (N, heads * I, *size), where both are the same.

    Args:
        heads: groups of channels, each of which is multiplied with its own alone.
        first: channels of ``a``, heads * I; None: ``a`` and ``b`` are the same.
    """

    def __init__(self, heads: int = 1, first: int | None = None):
        super().__init__()
        self.heads, self.first = heads, first

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.factors(x)
        return as_vector(torch.matmul(a, b.transpose(2, 3)), x.dim() - 2)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``a`` (N, heads, I, places) and ``b`` (N, heads, J, places)."""
        a, b = (x, x) if self.first is None else (x[:, : self.first], x[:, self.first :])
        return tuple(
            part.reshape(len(x), self.heads, part.shape[1] // self.heads, -1) for part in (a, b)
        )

    def extra_repr(self) -> str:
        return f"heads={self.heads}, first={self.first}"
