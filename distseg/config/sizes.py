"""Read and write sizes: images and grids of tiles as ``97x131``, memory as ``16GB``."""

from __future__ import annotations

import math
import re

from distseg.config.refusal import SettingError


class Size(tuple):
    """Tuple with one int per spatial dim, in the order depth, height, width.

    It is the size of an image or of a grid. As text it is ``97x131``.
    """

    def __new__(cls, values) -> Size:
        if isinstance(values, int):
            values = (values,)
        if isinstance(values, str):
            values = cls._split(values)
        given = tuple(values)
        values = tuple(int(v) for v in given)
        if any(isinstance(v, float) and v != n for v, n in zip(given, values)):
            raise SettingError(
                "DS101",
                "the numbers of a size or a grid must be whole, such as 97x131, got "
                f"{'x'.join(map(str, given))!r}",
            )
        if not values or min(values) < 1:
            raise SettingError(
                "DS102",
                "the numbers of a size or a grid must be at least 1, such as 97x131, got "
                f"{'x'.join(map(str, values))!r}",
            )
        return super().__new__(cls, values)

    @staticmethod
    def _split(text: str) -> list[str]:
        parts = text.lower().replace("×", "x").split("x")
        if not all(p.strip().isdecimal() for p in parts):
            raise SettingError(
                "DS103",
                "a size or a grid must be written as whole numbers joined by 'x', such "
                f"as 97x131, got {text!r}",
            )
        return parts

    def __str__(self) -> str:
        return "x".join(map(str, self))

    __repr__ = __str__

    @property
    def volume(self) -> int:
        """Product of all dims: the number of pixels of an image, or of tiles of a grid."""
        return math.prod(self)


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int | None) -> float | None:
    """Return the number of bytes that text such as ``16GB`` or ``15.5 GiB`` stands for.

    A number without a unit is in bytes; None stays None.

    Raises:
        ValueError: the text is not a positive size below 2**63 bytes.
    """
    if text is None:
        return None
    found = re.fullmatch(r"([\d.]+)\s*([a-zA-Z]*)", str(text).strip())
    try:
        value = float(found[1]) * _UNITS[found[2].upper()]
    except (TypeError, KeyError, ValueError):
        value = 0.0
    if not 0 < value < 2**63:
        raise SettingError("DS104", f"memory must be written as 16GB or 15.5GiB, got {text!r}")
    return value
