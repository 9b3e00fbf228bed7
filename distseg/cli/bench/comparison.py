"""Compare two results of ``distseg bench``: ratios of the seconds, and what else differs.

The functions are pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distseg.cli.bench.ratios import Range, ratio
from distseg.cli.bench.results import Measurement, Result
from distseg.cli.bench.rows import MB, Row
from distseg.report.tables import folded_table, table

_RUNS = {"date"}  # of the environment, which differs between any two runs


@dataclass(frozen=True)
class Comparison:
    """Comparison of two results of ``distseg bench``.

    Attributes:
        rows: a row for each case that both results have.
        environment: a row for each part of hardware and software that differs.
        settings: a row for each setting that differs, the network and the images among them.
        missing: sentences on the cases that only one result has.
    """

    rows: Sequence[Row]
    environment: Sequence[Row]
    settings: Sequence[Row]
    missing: Sequence[str]

    def text(self) -> str:
        """Return the comparison as text for a terminal."""
        parts = [folded_table(self.rows)]
        parts += ["\n".join(self.missing)] if self.missing else []
        for name, rows in (("environment", self.environment), ("settings", self.settings)):
            parts.append(f"{name} differs:\n{table(rows)}" if rows else f"{name}: equal")
        return "\n\n".join(parts)


def compare(a: Result, b: Result) -> Comparison:
    """Return the comparison of two results of the same kind.

    Raises:
        ValueError: the results are of different kinds, or have no case in common.
    """
    if a.title != b.title:
        raise ValueError(
            f"A measures {a.title}, but B measures {b.title}: compare results of the same kind and "
            "axis"
        )
    first, second = ({one.name: one for one in result.measurements} for result in (a, b))
    common = [name for name in first if name in second]
    if not common:
        raise ValueError(
            f"A has the cases {', '.join(first)}, but B has {', '.join(second)}: compare results "
            "with a case in common"
        )
    missing = [f"only in A: {name}" for name in first if name not in second]
    missing += [f"only in B: {name}" for name in second if name not in first]
    environments = [_without(result.environment, _RUNS) for result in (a, b)]
    return Comparison(
        [_row(first[name], second[name]) for name in common],
        differences(*environments),
        differences(_settings(a), _settings(b)),
        missing,
    )


def _row(a: Measurement, b: Measurement) -> Row:
    """Return the row that compares a case in two results; its ratio is ``b``'s time / ``a``'s."""
    found = ratio(1.0, b, a)
    known = bool(a.memory and b.memory)
    return {
        "case": a.name,
        "A [s]": a.median,
        "B [s]": b.median,
        "B / A": found.middle,
        "from": found.low,
        "to": found.high,
        "B is": verdict(found),
        "A [MB]": max(a.memory) / MB if known else None,
        "B [MB]": max(b.memory) / MB if known else None,
    }


def verdict(found: Range) -> str:
    """Return ``slower``, ``faster`` or ``no different``, given the range of a ratio of seconds.

    The result is ``no different`` if the range contains 1.
    """
    if found.low > 1:
        return "slower"
    return "faster" if found.high < 1 else "no different"


def _settings(result: Result) -> dict[str, Any]:
    """Return the settings, network and images of a result, on which its figures depend."""
    names = ("network", "precision", "data", "repeats", "warmup", "machine")
    given = {name: getattr(result, name) for name in names}
    images = {one.name: one.image for one in result.measurements}
    return {**given, **result.config, "image": images}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """Return a row for each entry that differs between two dicts, with both values.

    The entries of nested dicts are compared one by one, under names such as ``versions.torch``. A
    value that one dict does not have is None.
    """
    first, second = _flat(a), _flat(b)
    return [
        {"what": name, "A": _text(first.get(name)), "B": _text(second.get(name))}
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _flat(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value if isinstance(value, str) else json.dumps(value)


def _without(given: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}
