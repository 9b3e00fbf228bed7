"""Write quantities as text, such as ``12.3 Mpx/s`` and ``1:02:03``."""

from __future__ import annotations

_PREFIXES = ("", "k", "M", "G", "T", "P")


def si(value: float, unit: str) -> str:
    """Return a value as text with three significant digits and a decimal prefix.

    ``si(12.34e6, 'px/s')`` is ``12.3 Mpx/s``.
    """
    scaled, power = float(value), 0
    while abs(scaled) >= 999.5 and power < len(_PREFIXES) - 1:
        scaled, power = scaled / 1000, power + 1
    return f"{scaled:.3g} {_PREFIXES[power]}{unit}"


def duration(seconds: float) -> str:
    """Return a duration in seconds as text: ``12:34`` (minutes, seconds) or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def many(count: int, what: str) -> str:
    """Return a count and a noun as text, such as ``1 rank`` or ``1,024 micro-batches``.

    ``what`` is the noun in the singular.
    """
    ending = "" if count == 1 else "es" if what.endswith("tch") else "s"
    return f"{count:,} {what}{ending}"
