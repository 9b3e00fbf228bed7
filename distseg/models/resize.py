"""Layers whose result has the size of another map: resizing by any ratio, padding and cropping.

These layers are called with that other map too, but read only its size. So executors need not keep
the map. They pass the size instead (:class:`distseg.layers.resize.Placed`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from distseg.tiling.access_pattern import AccessPattern
from distseg.tiling.resize import Fit, Resize, Share, SizeRule, in_front

RATIO = "ratio"


class LooksAtSize(nn.Module):
    """Base class of layers that read only the size of their last input, not its values."""


class Follows(LooksAtSize):
    """Base class of layers whose result's size is computed from the size of another map.

    Shapes are (N, C, *size), (N, ?, *other) -> (N, C, *made). The second input is the other map, of
    which only the size is read.

    Args:
        rules: for each spatial dim, the rule that computes the size ``made`` of the result from the
            size ``other``, such as half of it.
    """

    def __init__(self, rules: Sequence[SizeRule]):
        super().__init__()
        self.rules = tuple(rules)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return self.made(x, [rule.size(n) for rule, n in zip(self.rules, like.shape[2:])])

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Return the layer's result of the spatial size ``size`` for the first input ``x``."""
        raise NotImplementedError

    def access_patterns(self) -> tuple[AccessPattern, ...]:
        """Return, for each dim, which cells of the first input an output cell reads."""
        raise NotImplementedError


class ResizeTo(Follows):
    """Resize of a map by ``F.interpolate``, to a size computed from the size of another map.

    Args:
        rules: for each spatial dim, the rule that computes the new size from the other map's size.
        mode, align_corners, antialias: as in ``F.interpolate``.
        factors: the argument ``scale_factor`` of ``F.interpolate``, one number for each spatial
            dim. ``RATIO`` means new size / old size. None means that ``F.interpolate`` gets
            ``size`` instead, which may choose other nearest positions than scale factors.
    """

    def __init__(
        self,
        rules: Sequence[SizeRule],
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

    def access_patterns(self) -> tuple[Resize, ...]:
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
    """Padding of a map by ``F.pad``, or a crop, to a size computed from another map's size.

    Args:
        rules: for each spatial dim, the rule that computes the new size from the other map's size.
        sides: for each dim, how many of the added cells lie in front of the map: a name such as
            ``half``, or a number (:class:`distseg.tiling.resize.Fit`).
        mode, value: as in ``F.pad``.
    """

    def __init__(
        self,
        rules: Sequence[SizeRule],
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

    def access_patterns(self) -> tuple[Fit, ...]:
        return tuple(
            Fit(side, self.mode != "constant", rule) for side, rule in zip(self.sides, self.rules)
        )

    def extra_repr(self) -> str:
        return f"{self.mode}, in front {', '.join(map(str, self.sides))}"


class VectorAt(Follows):
    """Layer that returns its first input, a vector of the image, unchanged.

    distseg records for each vector the size of the maps with which it can be combined. This layer
    makes the vector fit to maps of another size. As in :class:`Follows`, ``rules`` compute the new
    size from the size of the second input.
    """

    def forward(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        return x

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        return x

    def access_patterns(self) -> tuple[Share, ...]:
        return tuple(Share(rule) for rule in self.rules)
