"""Layers whose result has the size of another map: resizing by any ratio, padding and cropping.

These layers are called with that other map too, but read only its size. So executors need not keep
the map. They pass the size instead (:class:`distseg.layers.resize.Placed`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from distseg.tiling.access_pattern import AccessPattern
from distseg.tiling.resize import Fit, Follow, Resize, Share, in_front

RATIO = "ratio"


class LooksAtSize(nn.Module):
    """Base class of layers that read the size of their last input, but not its cells."""


class Follows(LooksAtSize):
    """A layer whose result follows the size of another map.

    Shapes are (N, C, *size), (N, ?, *other) -> (N, C, *made).

    Args:
        rules: for each dim, the rule that computes the size ``made`` of the result from the size
            ``other`` of the second input.
    """

    def __init__(self, rules: Sequence[Follow]):
        super().__init__()
        self.rules = tuple(rules)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return self.made(x, [rule.size(n) for rule, n in zip(self.rules, like.shape[2:])])

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Return the layer's result (N, C, *size) for the first input ``x`` (N, C, *old)."""
        raise NotImplementedError

    def footprints(self) -> tuple[AccessPattern, ...]:
        """Return, for each dim, which cells of the first input an output cell depends on."""
        raise NotImplementedError


class ResizeTo(Follows):
    """``F.interpolate`` to the size of another map.

    Args:
        rules: for each dim, the rule that computes the size from the size of the other map.
        mode, align_corners, antialias: as in ``F.interpolate``.
        factors: a scale factor for each dim, given to ``F.interpolate`` as ``scale_factor``; None
            to give it ``size`` instead. ``RATIO`` stands for the factors new size / old size. They
            may round the nearest positions differently than ``size`` does.
    """

    def __init__(
        self,
        rules: Sequence[Follow],
        mode: str = "nearest",
        align_corners: bool | None = None,
        antialias: bool = False,
        factors: Sequence[float] | str | None = None,
    ):
        super().__init__(rules)
        self.mode, self.align_corners = mode, align_corners
        self.antialias, self.factors = antialias, factors

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        if self.mode == "area":
            pools = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
            return pools[len(size) - 1](x, tuple(size))
        factors = self.factors
        if factors == RATIO:
            factors = tuple(m / n for n, m in zip(x.shape[2:], size))
        wanted = dict(size=tuple(size)) if factors is None else dict(scale_factor=factors)
        return F.interpolate(
            x, **wanted, mode=self.mode, align_corners=self.align_corners, antialias=self.antialias
        )

    def footprints(self) -> tuple[Resize, ...]:
        kernel = kernel_of(self.mode, self.antialias)
        factors = [None] * len(self.rules) if self.factors in (None, RATIO) else self.factors
        return tuple(
            Resize(kernel, bool(self.align_corners), rule, factor)
            for rule, factor in zip(self.rules, factors)
        )

    def extra_repr(self) -> str:
        corners = ", align_corners" * bool(self.align_corners)
        return f"{self.mode}{corners}{', antialias' * self.antialias}"


def kernel_of(mode: str, antialias: bool = False) -> str:
    """Return the name of the kernel that a mode of ``F.interpolate`` applies along each dim.

    ``bilinear`` and ``trilinear`` give ``linear``, ``bicubic`` gives ``cubic``, and other modes are
    their own names. With ``antialias``, ``-aa`` is appended.
    """
    kernel = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return f"{kernel}-aa" if antialias else kernel


class FitTo(Follows):
    """``F.pad`` to the size of another map, or a crop if the other map is smaller.

    Args:
        rules: for each dim, the rule that computes the size from the size of the other map.
        sides: for each dim, how many of the added cells lie in front of the map: a name such as
            ``half``, or a number (:class:`distseg.tiling.resize.Fit`).
        mode, value: as in ``F.pad``.
    """

    def __init__(
        self,
        rules: Sequence[Follow],
        sides: Sequence[str | int],
        mode: str = "constant",
        value: float = 0.0,
    ):
        super().__init__(rules)
        self.sides, self.mode, self.value = tuple(sides), mode, value

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        more = [(in_front(side, m - n), m - n) for side, n, m in zip(self.sides, x.shape[2:], size)]
        pads = [n for front, both in reversed(more) for n in (front, both - front)]
        if self.mode == "constant":
            return F.pad(x, pads, self.mode, self.value)
        return F.pad(x, pads, self.mode)

    def footprints(self) -> tuple[Fit, ...]:
        return tuple(
            Fit(side, self.mode != "constant", rule) for side, rule in zip(self.sides, self.rules)
        )

    def extra_repr(self) -> str:
        return f"{self.mode}, in front {', '.join(map(str, self.sides))}"


class VectorAt(Follows):
    """A layer that returns its first input, a vector of the image, unchanged.

    It marks the place where a vector of a map of one size is combined with maps of another size.
    As in :class:`Follows`, the ``rules`` compute this other size from the size of the second input.
    """

    def forward(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        return x

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        return x

    def footprints(self) -> tuple[Share, ...]:
        return tuple(Share(rule) for rule in self.rules)
