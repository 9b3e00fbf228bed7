"""Results that are no times of cases: rows as a benchmark makes them, for the harness's ``report``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rows:
    """What :func:`benchmarks.harness.report` asks of results.

    Attributes:
        lines: the rows of the table, a dict each.
        more: what else goes into the JSON file.
    """

    lines: list[dict]
    more: dict = field(default_factory=dict)

    def rows(self) -> list[dict]:
        return self.lines

    def as_dict(self) -> dict:
        return {"rows": self.lines, **self.more}
