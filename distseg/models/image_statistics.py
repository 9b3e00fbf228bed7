"""Statistics of an image other than means and maxima, each a vector of the image.

These are variances, log-sum-exp, largest values, and sums of products. They are subclasses of
:class:`distseg.models.layers.Mean`, since they read all cells of one map. The distributed
counterparts are in :mod:`distseg.layers.image_statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distseg.models.layers import Mean, as_vector


class Variance(Mean):
    """Variance of each channel or group of channels: (N, C, *size) -> (N, groups, 1, ...).

    Args:
        groups: the number of groups of adjacent channels; None if each channel is its own group.
        correction: the sum of squared deviations is divided by the number of values minus this.
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
    """Log-sum-exp of each channel over an image: (N, C, *size) -> (N, C, 1, ...)."""

    def forward(self, x: Tensor) -> Tensor:
        return as_vector(x.flatten(2).logsumexp(2), x.dim() - 2)


class Largest(Mean):
    """The k largest values of each channel over an image, in descending order.

    Shapes are (N, C, *size) -> (N, C * k, 1, ...). The values of a channel are adjacent. Among
    equal values the first ones, counted row by row, are chosen and get the gradient; ``torch.topk``
    leaves the choice open.
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
    """Return the indices (..., k) of the k largest values along the last dim of ``x`` (..., n).

    They are sorted from the largest value to the smallest, and equal values by their index.
    """
    x = x.detach()
    least = x.topk(k, -1)[0][..., -1:]
    more, equal = x > least, x == least
    chosen = more | equal & (equal.cumsum(-1) <= k - more.sum(-1, keepdim=True))
    behind = torch.arange(x.shape[-1], 0, -1, device=x.device)
    there = (chosen * behind).topk(k, -1)[1]
    return there.gather(-1, x.gather(-1, there).sort(dim=-1, descending=True, stable=True)[1])


class Measure(Mean):
    """A layer that computes one number from the size of a map: (N, C, *size) -> (N, 1, 1, ...).

    Args:
        rule: the function that takes the spatial size and returns the number, such as H * W.
    """

    def __init__(self, rule: Callable[[Sequence[int]], float]):
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((len(x), 1, *(1 for _ in x.shape[2:])), self.rule(x.shape[2:]))

    def extra_repr(self) -> str:
        return str(self.rule)


class Products(Mean):
    """Sums over the image of products of channels, for each head: sum_p a[h, i, p] b[h, j, p].

    h is a head (a group of channels), p a position, i and j are channels of the head in the maps
    ``a`` and ``b``. This is ``a @ b.transpose(-1, -2)`` for (N, heads, channels, positions), as in
    linear attention. Shapes are (N, heads * (I + J), *size) -> (N, heads * I * J, 1, ...): the
    input holds the channels of ``a``, then those of ``b``. If ``a`` and ``b`` are the same map, the
    input is (N, heads * I, *size).

    Args:
        heads: the number of heads; only channels of the same head are multiplied.
        first: the number of channels of ``a``, heads * I; None if ``a`` and ``b`` are the same.
    """

    def __init__(self, heads: int = 1, first: int | None = None):
        super().__init__()
        self.heads, self.first = heads, first

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.factors(x)
        return as_vector(torch.matmul(a, b.transpose(2, 3)), x.dim() - 2)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split the input ``x`` into the maps ``a`` and ``b`` whose channels are multiplied.

        Return ``a`` (N, heads, I, positions) and ``b`` (N, heads, J, positions).
        """
        a, b = (x, x) if self.first is None else (x[:, : self.first], x[:, self.first :])
        return tuple(
            part.reshape(len(x), self.heads, part.shape[1] // self.heads, -1) for part in (a, b)
        )

    def extra_repr(self) -> str:
        return f"heads={self.heads}, first={self.first}"
