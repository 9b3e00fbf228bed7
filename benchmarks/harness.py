"""The one harness of all benchmarks: a question in, a table, a JSON file and (if wanted) a picture out.

The speed of a machine drifts (other users, clock rates, page cache). So cases take turns, A B A B, and are compared
pair by pair: the ratio of neighbours in time, then the median of the ratios. A case looks like this::

    QUESTION = "Is the halo exchange faster than recomputing the halo?"

    def main() -> None:
        options = argparse.ArgumentParser(description=QUESTION, parents=[parent()]).parse_args()
        results = measure({"windows": ..., "exchange": ...}, repeats_of(options), baseline="windows")
        report("halo", QUESTION, results, options, parameters={"image": "1024x1024"})
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import command_line, environment, summary
from benchmarks.ranks import last_json, run_ranks
from distseg.report.tables import table

__all__ = [
    "Reading",
    "Results",
    "Spread",
    "environment",
    "last_json",
    "measure",
    "parent",
    "repeats_of",
    "report",
    "run_ranks",
]

RESULTS = Path(__file__).with_name("results")


class Reading(float):
    """What a case returns that measures itself: the seconds of a job without its start-up, a peak of memory."""


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of some numbers."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(min(values), median(values), max(values))


@dataclass(frozen=True)
class Results:
    """Samples of each case; sample i of all cases was taken in the same turn."""

    samples: dict[str, list[float]]
    baseline: str
    unit: str = "s"

    def spread(self, case: str) -> Spread:
        return Spread.of(self.samples[case])

    def ratio(self, case: str) -> Spread:
        """case / baseline, turn by turn: 0.5 takes half the baseline's seconds."""
        return Spread.of([a / b for a, b in zip(self.samples[case], self.samples[self.baseline])])

    def speedup(self, case: str) -> Spread:
        """baseline / case, turn by turn: 2 is twice as fast as the baseline."""
        return Spread.of([b / a for a, b in zip(self.samples[case], self.samples[self.baseline])])

    def rows(self) -> list[dict]:
        """For :func:`distseg.report.tables.table`."""
        return [self.row(case) for case in self.samples]

    def row(self, case: str, figures: Sequence[str] = ("min", "median", "max")) -> dict:
        """A case's row: figures of its spread, and its ratio to the baseline."""
        spread, ratio = self.spread(case), self.ratio(case)
        times = {f"{name} [{self.unit}]": getattr(spread, name) for name in figures}
        return {
            "case": case,
            **times,
            f"/ {self.baseline}": ratio.median,
            "from": ratio.min,
            "to": ratio.max,
        }

    def as_dict(self) -> dict:
        """For JSON."""
        cases = {
            case: {"samples": values, **vars(self.spread(case)), "ratio": vars(self.ratio(case))}
            for case, values in self.samples.items()
        }
        return {"unit": self.unit, "baseline": self.baseline, "cases": cases}


def measure(
    cases: dict[str, Callable[[], Any]],
    repeats: int = 5,
    warmup: int = 1,
    baseline: str | None = None,
    unit: str = "s",
    clock: Callable[[], float] = time.perf_counter,
) -> Results:
    """Run all cases in turn, ``warmup`` turns unmeasured and ``repeats`` turns measured.

    Args:
        cases: name -> function without arguments. It is timed by the wall clock (on a GPU it must synchronise itself),
            unless it returns a :class:`Reading`, which counts instead.
        baseline: the case that ratios refer to; the first by default.
        unit: of the samples; seconds if the harness takes them.

    Raises:
        ValueError: no case, an unknown baseline, or no repeat.
    """
    baseline = next(iter(cases), None) if baseline is None else baseline
    if baseline not in cases or repeats < 1:
        raise ValueError(
            f"baseline {baseline!r}, cases {list(cases)}, repeats {repeats}: give a case, a baseline among them and at least one repeat"
        )
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warmup + repeats):
        for name, case in cases.items():
            value = _sample(case, clock)
            if turn >= warmup:
                samples[name].append(value)
    return Results(samples, baseline, unit)


def _sample(case: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    returned = case()
    seconds = clock() - start
    return float(returned) if isinstance(returned, Reading) else seconds


def parent(repeats: int = 5) -> argparse.ArgumentParser:
    """The options that every benchmark has, for ``argparse.ArgumentParser(parents=[parent()])``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help="measured turns of all cases (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="where NAME.json goes (default: benchmarks/results)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, at most 2 turns: does it run? Its result goes to results/quick",
    )
    return parser


def repeats_of(options: argparse.Namespace) -> int:
    return min(2, options.repeats) if options.quick else options.repeats


def report(
    name: str,
    question: str,
    results: Results,
    options: argparse.Namespace,
    parameters: dict[str, Any] | None = None,
    notes: str = "",
    plot: Callable[[Path], None] | None = None,
) -> Path:
    """Print question, table and machine; write ``NAME.json`` and, with ``plot(path)``, ``NAME.png``. Returns the JSON file's path.

    Args:
        parameters: sizes and settings of the cases, kept in the JSON file (values that JSON knows).
        notes: what the reader should know of the figures; printed and kept.
    """
    machine = environment()
    print(
        "\n".join(
            filter(
                None,
                [
                    question,
                    "",
                    table(results.rows()),
                    "",
                    notes,
                    summary(machine),
                    f"reproduce: {command_line()}",
                ],
            )
        )
    )
    folder = options.output or (RESULTS / "quick" if options.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    entry = {
        "name": name,
        "question": question,
        "notes": notes,
        "quick": options.quick,
        "parameters": parameters or {},
    }
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({**entry, "results": results.as_dict(), "environment": machine}, indent=2) + "\n"
    )
    if plot:
        plot(path.with_suffix(".png"))
    return path
