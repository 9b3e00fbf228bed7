"""Sizes in pixels and grids of tiles: a tuple of ints that a user writes as ``97x131``."""

from __future__ import annotations

import math


class Extents(tuple):
    """One int per spatial dim, slowest first (depth, height, width). ``str`` gives ``97x131``."""

    def __new__(cls, values) -> "Extents":
        if isinstance(values, int):
            values = (values,)
        if isinstance(values, str):
            values = cls._split(values)
        given = tuple(values)
        values = tuple(int(v) for v in given)
        if any(isinstance(v, float) and v != n for v, n in zip(given, values)):
            raise ValueError(f"sizes and grids are whole numbers, got {'x'.join(map(str, given))}")
        if not values or min(values) < 1:
            raise ValueError(f"sizes and grids are positive, got {'x'.join(map(str, values)) or 'nothing'}")
        return super().__new__(cls, values)

    @staticmethod
    def _split(text: str) -> list[str]:
        parts = text.lower().replace("×", "x").split("x")
        if not all(p.strip().isdigit() for p in parts):
            raise ValueError(f"expected whole numbers joined by 'x', such as 97x131, got {text!r}")
        return parts

    def __str__(self) -> str:
        return "x".join(map(str, self))

    __repr__ = __str__

    @property
    def volume(self) -> int:
        """The product: pixels of a size, tiles of a grid."""
        return math.prod(self)
