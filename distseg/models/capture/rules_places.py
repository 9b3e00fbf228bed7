"""Rules for calls that resize, pad or crop a map to the size of another map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from distseg.models.capture.arranging import spread
from distseg.models.capture.lining import of_trace
from distseg.models.capture.reader import Reader, has_sizes
from distseg.models.capture.values import Value
from distseg.models.resize import RATIO, ResizeTo
from distseg.tiling.resize import SizeRule


class Places:
    """Rules for calls of ``F.interpolate`` and ``F.upsample``, which resize maps.

    Each method is the rule for the PyTorch function of the same name. Its argument ``self`` is not
    an object of this class but the :class:`Reader` that captures the network. The method adds
    layers for the reader's current call, and returns their output, a :class:`Value`.
    """

    def interpolate(
        self: Reader,
        input,
        size=None,
        scale_factor=None,
        mode="nearest",
        align_corners=None,
        recompute_scale_factor=None,
        antialias=False,
    ):
        x = self.value(input)
        if x.line:
            return spread(self, x)
        if x.vector:
            if x.grid is None:
                raise self.refusal(
                    f"resizes {x!r}; supported: a feature map (N, C, ...), or the output of an "
                    "adaptive pooling"
                )
            return (
                spread(self, x)
                if set(x.grid) == {1}
                else spread(self, x, mode=mode, align_corners=align_corners)
            )
        x = self.map(x)
        if antialias and align_corners:
            raise self.refusal(
                "has antialias=True together with align_corners=True, which is not supported: set "
                "one of them to False"
            )
        sizes = _made(self)
        whole = _whole_factors(x.sizes, sizes)
        if sizes == x.sizes and (
            mode != "bicubic" or scale_factor is None or recompute_scale_factor
        ):
            return x
        if whole and mode != "area" and not antialias and not (mode == "bicubic" and align_corners):
            return self.layer(
                nn.Upsample,
                x,
                scale_factor=tuple(map(float, whole)),
                mode=mode,
                align_corners=align_corners,
            )
        factors = (
            None if scale_factor is None or recompute_scale_factor else self.each(scale_factor)
        )
        like, rules = (
            _by_factor(x, sizes, self.each(scale_factor))
            if scale_factor is not None and not has_sizes(scale_factor)
            else self.followed(x, sizes)
        )
        if has_sizes(factors):
            factors = _ratio(self, x, sizes, factors)
        return self.following(
            lambda: ResizeTo(rules, mode, align_corners, antialias, factors), x, like, rules
        )

    upsample = interpolate


def _made(reader: Reader) -> tuple[tuple[int, ...], ...]:
    """Return the size of the current call's result for each traced image size."""
    return tuple(call.shapes[0][2:] for call in reader.current)


def _whole_factors(
    before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return, for each spatial dim, the integer by which a call multiplies the size of a map.

    Return None if a factor is no integer, or is not the same in all traces.

    Args:
        before, after: the size of the map for each traced image size, before and after the call.
    """
    factors = {
        tuple(m // n if m % n == 0 else 0 for n, m in zip(*pair)) for pair in zip(before, after)
    }
    return factors.pop() if len(factors) == 1 and all(next(iter(factors))) else None


def _by_factor(
    x: Value, sizes: Sequence[tuple[int, ...]], factors: tuple[float, ...]
) -> tuple[Value, list[SizeRule]]:
    return x, [SizeRule(factor=float(factor)) for factor in factors]


def _ratio(reader: Reader, x: Value, sizes: Sequence[tuple[int, ...]], factors: Any) -> str:
    """Check that the user's scale factors are new size / old size, and return ``RATIO``.

    :data:`RATIO` tells the layer to compute the factors in this way, for any size.

    Args:
        x: the map that is resized; it has the old size.
        sizes: the new size for each traced image size.
        factors: the user's scale factors, which depend on the image's size.

    Raises:
        CanNotCapture: the factors follow another rule.
    """
    each = [of_trace(factors, n) for n in range(len(sizes))]
    ratios = [tuple(m / n for n, m in zip(*pair)) for pair in zip(x.sizes, sizes)]
    if any(tuple(found) != wanted for found, wanted in zip(each, ratios)):
        raise reader.refusal(
            "has a scale factor that depends on the image's size by an unsupported rule: set "
            "size= to the size of a feature map instead"
        )
    return RATIO
