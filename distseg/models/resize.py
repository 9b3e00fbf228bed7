"""Layers whose result has the size of another map, by true places: resizing by any ratio, padding and cropping.

They are called with that other map too, of which they look at nothing but the size. So it need not be there where they run:
executors leave it out, and tell them the size (:class:`distseg.layers.resize.Placed`).
"""

from __future__ import annotations

from typing import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from distseg.tiling.access_pattern import AccessPattern
from distseg.tiling.resize import Fit, Follow, Resize, Share, in_front

RATIO = "ratio"


class LooksAtSize(nn.Module):
    """A layer that looks at the size alone of the last map that it is called with."""


class Follows(LooksAtSize):
    """A layer whose result's size follows another map's: (N, C, *size), (N, ?, *other) -> (N, C, *made).

    Args:
        rules: along each dim, how.
    """

    def __init__(self, rules: Sequence[Follow]):
        super().__init__()
        self.rules = tuple(rules)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return self.made(x, [rule.size(n) for rule, n in zip(self.rules, like.shape[2:])])

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Return the result, which is to have this size."""
        raise NotImplementedError

    def footprints(self) -> tuple[AccessPattern, ...]:
        """Return the cells that are looked at, along each dim."""
        raise NotImplementedError


class ResizeTo(Follows):
    """``F.interpolate`` to a size.

    Args:
        mode, align_corners, antialias: as of ``F.interpolate``.
        factors: the scale factors, by which places go then: numbers, or ``RATIO``, which is m / n and may round nearest places otherwise than no factors do.
    """

    def __init__(
        self, rules: Sequence[Follow], mode: str = "nearest", align_corners: bool | None = None, antialias: bool = False,
        factors: Sequence[float] | str | None = None,
    ):  # fmt: skip
        super().__init__(rules)
        self.mode, self.align_corners, self.antialias, self.factors = (
            mode,
            align_corners,
            antialias,
            factors,
        )

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        if self.mode == "area":
            return (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[
                len(size) - 1
            ](x, tuple(size))
        factors = (
            tuple(m / n for n, m in zip(x.shape[2:], size))
            if self.factors == RATIO
            else self.factors
        )
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
        return f"{self.mode}{', align_corners' * bool(self.align_corners)}{', antialias' * self.antialias}"


def kernel_of(mode: str, antialias: bool = False) -> str:
    """Return the kernel of a mode of ``F.interpolate`` along each dim."""
    kernel = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return f"{kernel}-aa" if antialias else kernel


class FitTo(Follows):
    """``F.pad`` to a size, or a crop to it where that is smaller.

    Args:
        sides: along each dim, what of the difference lies in front (:class:`distseg.tiling.resize.Fit`).
        mode, value: as of ``F.pad``.
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
        return (
            F.pad(x, pads, self.mode, self.value)
            if self.mode == "constant"
            else F.pad(x, pads, self.mode)
        )

    def footprints(self) -> tuple[Fit, ...]:
        return tuple(
            Fit(side, self.mode != "constant", rule) for side, rule in zip(self.sides, self.rules)
        )

    def extra_repr(self) -> str:
        return f"{self.mode}, in front {', '.join(map(str, self.sides))}"


class VectorAt(Follows):
    """A vector of the image, where maps have the size of another: what it is called with."""

    def forward(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        return x

    def made(self, x: Tensor, size: Sequence[int]) -> Tensor:
        return x

    def footprints(self) -> tuple[Share, ...]:
        return tuple(Share(rule) for rule in self.rules)
