"""Rules for functions that reduce channels or all positions.

They cover means, variances, norms, softmax, attention and matrix products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distseg.models.axes import Axis
from distseg.models.capture.arranging import over_channels
from distseg.models.capture.attending import multi_head, scaled_dot_product
from distseg.models.capture.products import added, distances, einsum, matmul
from distseg.models.capture.reader import Reader
from distseg.models.capture.reducing import (
    beside,
    formed,
    largest_of,
    norm,
    reduced,
    root,
    softmax,
    variance,
)
from distseg.models.capture.values import Value
from distseg.models.image_statistics import LogSumExp
from distseg.models.layers import Max, Mean, Sum


class Statistics:
    """Rules for calls of reductions, rankings, attention and matrix products.

    Each method is the rule for the PyTorch function of the same name. Its argument ``self`` is not
    an object of this class but the :class:`Reader` that captures the network. The method adds
    layers for the reader's current call, and returns their output, a :class:`Value`.
    """

    def mean(self: Reader, input, dim=None, keepdim=False):
        return reduced(self, input, dim, (input, dim, keepdim), Mean, torch.mean, "a mean")

    def sum(self: Reader, input, dim=None, keepdim=False):
        x = self.value(input)
        stacked = (
            self.stacks.get(x.name) if dim == 0 and not keepdim and x.axes[0].of_channels else None
        )
        if stacked and len({(y.shapes, y.axes) for y in stacked}) == 1:
            return self.emit(lambda _: Sum(), stacked, axes=stacked[0].axes)
        return reduced(
            self, x, dim, (x, dim, keepdim), partial(Mean, total=True), torch.sum, "a sum"
        )

    def norm(self: Reader, input, p="fro", dim=None, keepdim=False):
        x = self.value(input)
        if self.of_channels(dim, x):
            return self.formula((x, p, dim, keepdim), {})
        return formed(self, norm(self, x, p, dim))

    def vector_norm(self: Reader, x, ord=2, dim=None, keepdim=False):
        return vars(Statistics)["norm"](self, x, ord, dim, keepdim)

    def normalize(self: Reader, input, p=2.0, dim=1, eps=1e-12):
        x = self.value(input)
        if self.of_channels(dim, x):
            return self.formula((x, p, dim, eps), {})
        return self.applied(
            partial(_divided, eps=eps), beside(self, x, norm(self, x, p, dim)), "quotient"
        )

    def amax(self: Reader, input, dim=(), keepdim=False):
        return reduced(
            self, input, dim, (input, dim, keepdim), partial(Max, first=False), None, "a maximum"
        )

    def amin(self: Reader, input, dim=(), keepdim=False):
        """Add layers for the minimum over ``dim``; over positions, it is computed as -max(-x)."""
        x = self.value(input)
        if self.of_channels(dim, x):
            return self.formula((x, dim, keepdim), {})
        return _least(self, x, dim, Max(first=False))

    def max(self: Reader, input, dim=None, keepdim=False):
        if _is_tensor(dim):
            return self.pointwise((input, dim), {})
        x = self.value(input)
        if isinstance(dim, int) and not self.of_channels(dim, x):
            return reduced(self, x, dim, (), partial(Max, first=True), _first, "a maximum")
        if dim is None:
            return reduced(self, x, None, (), partial(Max, first=False), None, "a maximum")
        return tuple(self.formula((x, dim, keepdim), {}, part) for part in (0, 1))

    def min(self: Reader, input, dim=None, keepdim=False):
        if _is_tensor(dim):
            return self.pointwise((input, dim), {})
        x = self.value(input)
        if isinstance(dim, int) and self.of_channels(dim, x):
            return tuple(self.formula((x, dim, keepdim), {}, part) for part in (0, 1))
        return _least(self, x, dim, Max(first=isinstance(dim, int)))

    def aminmax(self: Reader, input, *, dim=None, keepdim=False):
        x = self.value(input)
        if dim is None or self.of_channels(dim, x):
            raise self.refusal(
                "takes minima and maxima over channels, or over all dims: write it as torch.amin "
                "and torch.amax, with dim="
            )
        return _least(self, x, dim, Max(first=False)), reduced(
            self, x, dim, (), partial(Max, first=False), None, "a maximum", 1
        )

    def any(self: Reader, input, dim=None, keepdim=False):
        return _of_truth(self, input, dim, keepdim, False)

    def all(self: Reader, input, dim=None, keepdim=False):
        return _of_truth(self, input, dim, keepdim, True)

    def count_nonzero(self: Reader, input, dim=None):
        x = self.value(input)
        if self.of_channels(dim, x):
            return self.formula((x, dim), {})
        return reduced(
            self,
            self.applied(_truth, [x], "truth"),
            dim,
            (),
            partial(Mean, total=True),
            torch.sum,
            "a count",
        )

    def var(self: Reader, input, dim=None, unbiased=None, keepdim=False, *, correction=None):
        return _deviation(self, (input, dim, unbiased, keepdim), correction, False)

    def std(self: Reader, input, dim=None, unbiased=None, keepdim=False, *, correction=None):
        return _deviation(self, (input, dim, unbiased, keepdim), correction, True)

    def var_mean(self: Reader, input, dim=None, unbiased=None, keepdim=False, *, correction=None):
        return _with_mean(self, (input, dim, unbiased, keepdim), correction, False)

    def std_mean(self: Reader, input, dim=None, unbiased=None, keepdim=False, *, correction=None):
        return _with_mean(self, (input, dim, unbiased, keepdim), correction, True)

    def logsumexp(self: Reader, input, dim, keepdim=False):
        return reduced(
            self,
            input,
            dim,
            (input, dim, keepdim),
            LogSumExp,
            torch.logsumexp,
            "a logarithm of a sum of exponentials",
        )

    def softmax(self: Reader, input, dim=None, _stacklevel=3):
        return _softmax(self, input, dim, False)

    def log_softmax(self: Reader, input, dim=None, _stacklevel=3):
        return _softmax(self, input, dim, True)

    def softmin(self: Reader, input, dim=None, _stacklevel=3):
        return over_channels(self, input, (input, dim), dim)

    def cosine_similarity(self: Reader, x1, x2, dim=1, eps=1e-8):
        x = x1 if isinstance(x1, Value) else x2
        if not self.of_channels(dim, self.value(x)):
            raise self.refusal(
                "compares positions of the image, but only a comparison over channels is "
                "supported: set dim to the dim of channels, which is 1 for an input (N, C, H, W)"
            )
        return self.pointwise((x1, x2, dim, eps), {})

    def pairwise_distance(self: Reader, x1, x2, p=2.0, eps=1e-6, keepdim=False):
        return over_channels(
            self, x1 if isinstance(x1, Value) else x2, (x1, x2, p, eps, keepdim), -1
        )

    def bilinear(self: Reader, input1, input2, weight, bias=None):
        maps = [self.value(x) for x in (input1, input2)]
        if not all(self.of_channels(-1, x) for x in maps):
            raise self.refusal(
                f"multiplies the last dims of {' and '.join(map(repr, maps))}, which are not both "
                "channels, so each position has its own weight, which is not supported: permute "
                "the inputs so that channels are the last dim, as in (N, H, W, C)"
            )
        return self.formula((*maps, weight, bias), {})

    def tensordot(self: Reader, a, b, dims=2, out=None):
        first = isinstance(a, Value)
        x = self.value(a if first else b)
        if isinstance(a, Value) and isinstance(b, Value):
            raise self.refusal(
                "multiplies two tensors that are both computed from the image, which is not "
                "supported here: write it as torch.einsum"
            )
        along = (
            dims[0 if first else 1]
            if isinstance(dims, tuple)
            else tuple(range(-dims, 0) if first else range(dims))
        )
        return over_channels(self, x, (a, b, dims), along)

    def matmul(self: Reader, input, other):
        return matmul(self, input, other)

    __matmul__ = bmm = mm = matmul

    def __rmatmul__(self: Reader, input, other):
        return matmul(self, other, input)

    def baddbmm(self: Reader, input, batch1, batch2, *, beta=1, alpha=1):
        return added(self, input, batch1, batch2, beta, alpha)

    addmm = baddbmm

    def einsum(self: Reader, equation, *operands):
        return einsum(self, equation, operands[0] if isinstance(operands[0], tuple) else operands)

    def scaled_dot_product_attention(self: Reader, query, key, value, *args, **kwargs):
        return scaled_dot_product(self, query, key, value, *args, **kwargs)

    def multi_head_attention_forward(self: Reader, *args, **kwargs):
        return multi_head(self, *args, **kwargs)

    def topk(self: Reader, input, k, dim=-1, largest=True, sorted=True):
        x = self.value(input)
        if self.of_channels(dim, x):
            return _ranked(self, x, (x, k, dim, largest, sorted), dim)
        return largest_of(self, x, self.fixed(k, "number of positions"), dim, not largest), None

    def kthvalue(self: Reader, input, k, dim=-1, keepdim=False):
        x = self.value(input)
        if self.of_channels(dim, x):
            return _ranked(self, x, (x, k, dim, keepdim), dim)
        k = self.fixed(k, "number of positions")
        found, at = largest_of(self, x, k, dim, True), dim % x.rank
        axes = *found.axes[:at], Axis(), *found.axes[at + 1 :]
        return formed(
            self,
            self.applied(
                partial(torch.narrow, dim=at, start=k - 1, length=1), [found], "last", axes
            ),
        ), None

    def median(self: Reader, input, dim=-1, keepdim=False):
        return _ranked(self, input, (input, dim, keepdim), dim)

    mode = nanmedian = median

    def quantile(self: Reader, input, q, dim=-1, keepdim=False, *, interpolation="linear"):
        if not self.of_channels(dim, self.value(input)):
            raise self.refusal(_RANKED)
        return self.formula((input, q, dim, keepdim), dict(interpolation=interpolation))

    nanquantile = quantile

    def sort(self: Reader, input, dim=-1, descending=False, *, stable=False):
        return _ranked(self, input, (input, dim, descending), dim)

    def argmax(self: Reader, input, dim=None, keepdim=False):
        return over_channels(self, input, (input, dim, keepdim), dim)

    argmin = argmax

    def argsort(self: Reader, input, dim=-1, descending=False, stable=False):
        if not self.of_channels(dim, self.value(input)):
            raise self.refusal(_RANKED)
        return self.formula((input, dim, descending), {})

    def cdist(self: Reader, x1, x2, p=2.0, compute_mode="use_mm_for_euclid_dist_if_necessary"):
        return distances(self, x1, x2, p, compute_mode)


_RANKED = (
    "sorts all positions of the image; supported: sort over channels, or take over positions the k "
    "largest or smallest (torch.topk, with the same k for all images), a mean, a maximum, or a "
    "softmax"
)


def _is_tensor(x: Any) -> bool:
    return not isinstance(x, (int, tuple)) and x is not None


def _first(x: torch.Tensor, dim: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """Return the maximum of ``x`` along one dim; the first of equal maxima gets the whole gradient.

    Args:
        dim: a tuple with this dim as its only entry.
    """
    return x.max(*dim, keepdim=keepdim)[0]


def _truth(x: torch.Tensor) -> torch.Tensor:
    return (x != 0).to(torch.float64)


def _of_truth(reader: Reader, x: Any, dim: Any, keepdim: bool, every: bool) -> Value:
    """Add layers for ``torch.any`` or ``torch.all`` along ``dim``, and return the result.

    The result is 1 for True and 0 for False.

    Args:
        every: True for ``torch.all``, False for ``torch.any``.
    """
    x = reader.value(x)
    if reader.of_channels(dim, x):
        return reader.formula((x, dim, keepdim), {})
    truth = reader.applied(_truth, [x], "truth")
    return (
        _least(reader, truth, dim, Max(first=False))
        if every
        else reduced(reader, truth, dim, (), partial(Max, first=False), torch.amax, "a maximum")
    )


def _divided(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return x / norm.clamp_min(eps)


def _least(reader: Reader, x: Value, dim: Any, largest: Max) -> Value:
    """Add layers for the minimum over ``dim``, computed as -max(-x), and return the result.

    Args:
        largest: a layer for a maximum. Only its setting ``first`` is read: True if the gradient
            goes to the first of equal minima.
    """
    over_both = _first if largest.first else None
    made = reduced(
        reader,
        reader.applied(torch.neg, [x], "turned"),
        dim,
        (),
        partial(Max, first=largest.first),
        over_both,
        "a minimum",
    )
    return reader.applied(torch.neg, [made], "back")


def _correction(reader: Reader, given: tuple, correction: Any) -> tuple[Value, Any, float, bool]:
    """Return (input, dim, correction, keepdim) of a call of a variance or standard deviation.

    PyTorch has two signatures: ``x.var(dim, correction=1)``, and an older one with a bool
    ``unbiased`` instead of ``correction``. In the older one, ``unbiased`` may come first, as in
    ``x.var(True)``.

    Args:
        given: the call's arguments (input, dim, unbiased, keepdim).
        correction: the call's argument of this name. If it is None, return 1, or 0 for
            ``unbiased=False``.
    """
    x, dim, unbiased, keepdim = given
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    return reader.value(x), dim, correction, keepdim


def _deviation(reader: Reader, given: tuple, correction: Any, rooted: bool, part: int = 0) -> Value:
    """Add layers for a variance, or a standard deviation if ``rooted`` is True; return the result.

    Args:
        given: the call's arguments (input, dim, unbiased, keepdim).
        part: index of this result, if the call returns several; ``correction`` is the call's
            argument of this name, or None.
    """
    x, dim, correction, keepdim = _correction(reader, given, correction)
    if reader.of_channels(dim, x):
        return reader.applied(
            partial(
                torch.std if rooted else torch.var,
                dim=reader.dims_of(dim, x),
                correction=correction,
                keepdim=keepdim,
            ),
            [x],
            "channels",
            reader.made(x, part),
        )
    made = variance(reader, x, dim, correction, "a deviation" if rooted else "a variance")
    return formed(reader, reader.applied(root, [made], "root") if rooted else made, part)


def _with_mean(reader: Reader, given: tuple, correction: Any, rooted: bool) -> tuple[Value, Value]:
    """Add layers for a variance and a mean, and return the results (variance, mean).

    If ``rooted`` is True, return (standard deviation, mean).

    Args:
        given: the call's arguments (input, dim, unbiased, keepdim). ``correction`` is the call's
            argument of this name, or None.
    """
    x, dim, _, keepdim = _correction(reader, given, correction)
    deviation = _deviation(reader, given, correction, rooted)
    if reader.of_channels(dim, x):
        return deviation, reader.applied(
            partial(torch.mean, dim=reader.dims_of(dim, x), keepdim=keepdim),
            [x],
            "mean",
            reader.made(x, 1),
        )
    return deviation, reduced(reader, x, dim, (), Mean, torch.mean, "a mean")


def _softmax(reader: Reader, x: Any, dim: Any, log: bool) -> Value:
    x = reader.value(x)
    if dim is None:
        raise reader.refusal("has no dim: write one, such as dim=1")
    return (
        reader.formula((x,), dict(dim=dim))
        if reader.of_channels(dim, x)
        else softmax(reader, x, dim, log)
    )


def _ranked(reader: Reader, x: Any, args: tuple, dim: int) -> tuple[Value, Value]:
    if not reader.of_channels(dim, reader.value(x)):
        raise reader.refusal(_RANKED)
    return tuple(reader.formula(args, {}, part) for part in (0, 1))
