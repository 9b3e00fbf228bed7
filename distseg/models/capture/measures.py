"""Find how user code computes a number from the image's size, as in ``x.sum((2, 3)) / (h * w)``.

Python computes these numbers outside PyTorch, so a trace shows only their values. A number is
supported if one rule gives its value in all traces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

from distseg.models.axes import Axis
from distseg.models.capture.constants import constant_of
from distseg.models.capture.trace import Made
from distseg.models.capture.values import Sizes, Value
from distseg.models.image_statistics import Measure

if TYPE_CHECKING:
    from distseg.models.capture.reader import Reader

_POWERS = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25, -0.25)
_CLOSE = 1e-13
# Largest denominator for which a factor counts as exact, not as a rounded number.
_LARGEST = 64


@dataclass(frozen=True)
class SizeFormula:
    """Formula that computes a number from the size of a map, such as 1 / (h * w).

    The number is y = (factor * base ** inner + plus) ** power, or log(y) if ``log`` is True. The
    base is the product of the map's sizes along the spatial dims ``dims``. For example, 1 / (h * w)
    is ``SizeFormula(dims=(0, 1), factor=1.0, power=-1.0)``.
    """

    dims: tuple[int, ...]
    factor: float
    plus: float = 0.0
    power: float = 1.0
    inner: float = 1.0
    log: bool = False

    def __call__(self, size: Sequence[int]) -> float:
        found = (
            self.factor * math.prod(size[d] for d in self.dims) ** self.inner + self.plus
        ) ** self.power
        return math.log(found) if self.log else found


def formula_of(numbers: Sequence[float], sizes: Sequence[Sequence[int]]) -> SizeFormula | None:
    """Return the simplest formula that computes a number from a map's size; None if none fits.

    Args:
        numbers: the number for each traced image size.
        sizes: the size of a map for each traced image size, from which the rule computes the
            number.
    """
    whole = range(len(sizes[0]))
    every = list(chain.from_iterable(combinations(whole, n) for n in (len(whole), *whole[1:])))
    kinds = [(p, 1.0, False) for p in _POWERS] + [(1.0, 1.0, True)]
    more = kinds + [(1.0, p, False) for p in _POWERS[1:]]
    for dims, plain in ((dims, plain) for plain in (True, False) for dims in every):
        for power, inner, log in kinds if plain else more:
            rule = _fitted(numbers, sizes, SizeFormula(dims, 1.0, 0.0, power, inner, log), plain)
            if rule and all(_near(_at(rule, size), n) for size, n in zip(sizes, numbers)):
                return rule
    return None


def _fitted(
    numbers: Sequence[float], sizes: Sequence[Sequence[int]], like: SizeFormula, plain: bool
) -> SizeFormula | None:
    """Return a copy of a formula with ``factor`` and ``plus`` fitted to the numbers of two traces.

    The caller checks whether the result gives the numbers of all traces. Return None if there are
    too few different sizes to fit it, or if no ``factor`` and ``plus`` give the numbers.

    Args:
        numbers: the number for each traced image size.
        sizes: the size of the map for each traced image size.
        like: the formula, whose ``factor`` and ``plus`` are replaced.
        plain: True to fit ``factor`` alone and leave ``plus`` as it is.
    """
    bases = [math.prod(size[d] for d in like.dims) ** like.inner for size in sizes]
    try:
        linear = [(math.exp(n) if like.log else n) ** (1 / like.power) for n in numbers]
    except (OverflowError, ZeroDivisionError):
        return None
    if any(isinstance(n, complex) for n in linear) or len(set(bases)) < (2 if plain else 3):
        return None
    if plain:
        return replace(like, factor=_rounded(linear[0] / bases[0]))
    other = next(n for n, base in enumerate(bases) if base != bases[0])
    factor = _rounded((linear[other] - linear[0]) / (bases[other] - bases[0]))
    return (
        replace(like, factor=factor, plus=_rounded(linear[0] - factor * bases[0]))
        if factor
        else None
    )


def _at(rule: SizeFormula, size: Sequence[int]) -> float:
    """Evaluate a formula for a map's size; return NaN where it fails, as for a division by 0."""
    try:
        found = rule(size)
    except (ArithmeticError, ValueError):
        return math.nan
    return math.nan if isinstance(found, complex) else found


def _rounded(n: float) -> float:
    """Return the nearest fraction with a small denominator, if ``n`` differs from it by rounding.

    Return ``n`` otherwise.
    """
    near = float(Fraction(n).limit_denominator(_LARGEST)) if math.isfinite(n) else n
    return near if abs(n - near) < 1e-9 * min(1, abs(n)) else n


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * max(abs(a), abs(b))


def measured(reader: Reader, args: tuple) -> tuple:
    """Replace the numbers in a pointwise call that depend on the image's size by layer outputs.

    For example, h * w in ``x / (h * w)`` differs between traces. A layer is added that computes
    this number from the size of a map; its output is a vector. A number for which no formula fits
    is kept. Return the new arguments.

    Args:
        args: the arguments of the call, such as (x, number).
    """
    each = [_numbers(reader, x) for x in args]
    if not any(each):
        return args
    like = max((x for x in args if isinstance(x, Value)), key=lambda x: x.rank, default=None)
    return tuple(
        x if n is None or like is None else _vector(reader, n, like) or x
        for x, n in zip(args, each)
    )


def _numbers(reader: Reader, x: Any) -> Sizes | None:
    """Return the number ``x`` for each traced image size, if it differs between these sizes.

    A tensor without dims, computed from numbers only, counts as a number. Return None for anything
    else, and for a number that is the same for all sizes.
    """
    if isinstance(x, Sizes):
        return x if all(isinstance(n, (int, float)) for n in x.each) else None
    if (
        not isinstance(x, Made)
        or x in reader.values
        or any(t.calls[x.call].shapes[x.part] for t in reader.traces)
    ):
        return None
    found = [constant_of(t.calls, x) for t in reader.traces]
    if any(n is None for n in found) or len({n.item() for n in found}) == 1:
        return None
    return Sizes(tuple(n.item() for n in found))


def _vector(reader: Reader, numbers: Sizes, like: Value) -> Value | None:
    """Add a layer that computes a number from the size of a map, and return its output.

    The output is a vector with as many dims as ``like``. Return None if no formula gives the
    number.

    Args:
        numbers: the number for each traced image size.
        like: the map or vector with which the call combines the number.
    """
    batch = next((d for d, axis in enumerate(like.axes) if axis.batch), 0)
    axes = tuple(Axis(d == batch) for d in range(like.rank))
    if like.axes[batch].mixed:
        raise reader.refusal(
            f"combines {like!r}, in which images and channels share a dim, with the number "
            f"{numbers}: reshape the tensor before, so that images and channels have their own dims"
        )
    maps = [v for v in reversed(reader.values.values()) if not v.vector]
    for sizes in dict.fromkeys(
        [
            *([] if like.vector else [like.sizes]),
            *(v.sizes for v in reversed(maps)),
            *(v.sizes for v in maps),
        ]
    ):
        if (rule := formula_of(numbers.each, sizes)) is not None:
            source = next(v for v in reversed(maps) if v.sizes == sizes)
            made = reader.emit(lambda _: Measure(rule), [source.as_plain], axes=axes, what="size")
            reader.size_rules[made.name] = rule
            return made
    return None
