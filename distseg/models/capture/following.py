"""Search for rules by which a size follows another size, by comparing several traces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from distseg.tiling.resize import SizeRule


class Sized(Protocol):
    """Interface of objects with ``sizes``, the size of a map for each traced image size."""

    sizes: tuple[tuple[int, ...], ...]


T = TypeVar("T", bound=Sized)


def followed(
    sizes: Sequence[tuple[int, ...]], first: T, maps: Iterable[T]
) -> tuple[T, list[SizeRule]] | None:
    """Find a map and formulas that compute ``sizes`` from its size, one for each spatial dim.

    Along each dim, the size may be constant, equal to the map's size, a fraction of it, or the
    map's size rounded to a multiple. Return (map, formulas), or None if no formula fits.

    Args:
        sizes: the size to compute, for each traced image size.
        first: the map to return if several maps have equally simple formulas, or if ``sizes`` is
            the same in all traces. A map that has exactly these sizes comes before it.
        maps: all maps, in the order in which the network makes them. The first is the image.
    """
    if len(set(sizes)) == 1:
        return first, [SizeRule(0, n) for n in sizes[0]]
    maps = list(dict.fromkeys(maps))
    same = next((x for x in maps if x.sizes == tuple(sizes)), None)
    if same is not None:
        return same, [SizeRule()] * len(sizes[0])
    found = [
        (x, [_fraction(before, after) for before, after in zip(zip(*x.sizes), zip(*sizes))])
        for x in dict.fromkeys((first, *maps))
    ]
    return min(((x, rules) for x, rules in found if None not in rules), key=_effort, default=None)


def _effort(found: tuple[Sized, list[SizeRule]]) -> int:
    """Return a number by which formulas are compared; it is larger for more complicated ones.

    :func:`followed` takes the simplest formulas, because complicated ones may fit by chance.

    Args:
        found: a map, and a formula for each spatial dim.
    """
    return sum(
        rule.times + (rule.over if rule.unit == 1 else 2) + (rule.times and rule.plus != 0)
        for rule in found[1]
    )


def _fraction(before: Sequence[int], after: Sequence[int]) -> SizeRule | None:
    """Return the simplest formula that computes ``after`` from ``before``; None if none fits.

    Args:
        before, after: the sizes of two maps along one dim, for each traced image size.
    """
    if len(set(after)) == 1:
        return SizeRule(0, after[0])
    if (found := _multiple(before, after)) is not None:
        return found
    for times, over in _FRACTIONS:
        least = max(m * over - times * n for n, m in zip(before, after))
        most = min((m + 1) * over - times * n for n, m in zip(before, after)) - 1
        if least <= most:
            return SizeRule(times, min(max(0, least), most), over)
    return None


def _multiple(before: Sequence[int], after: Sequence[int]) -> SizeRule | None:
    """Return a formula that rounds ``before`` to a multiple of a number and so gives ``after``.

    Return None if no formula fits, or if both sizes differ by the same number in all traces.

    Args:
        before, after: the sizes of two maps along one dim, for each traced image size.
    """
    if len({m - n for n, m in zip(before, after)}) == 1:
        return None
    for unit in range(2, _LARGEST_MULTIPLE + 1):
        if any(m % unit for m in after):
            continue
        least = max(m - n for n, m in zip(before, after))
        most = min(m + unit - n for n, m in zip(before, after)) - 1
        if least <= most:
            plus = next((n for n in (unit - 1, 0) if least <= n <= most), least)
            return SizeRule(plus=plus, over=unit, unit=unit)
    return None


_LARGEST_MULTIPLE = 256
_FRACTIONS = sorted(
    ((p, q) for p in range(1, 9) for q in range(1, 65) if math.gcd(p, q) == 1), key=sum
)
