"""How a step's time changes from one rank to two: more ranks for the same image, and more image for more ranks.

A bound is measured as well: two ranks that exchange nothing. What they lose, they lose to the machine (memory, cache, clock).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import Setting, arguments_of, fastest_step
from distseg.config.sizes import Size

QUESTION = (
    "How does the time of a step change from one rank to two, with tiles and with sample groups?"
)
NETWORKS = {
    "depth 3, n_c 1, base 32": Setting(Size((384, 768)), 3, 1, 32),
    "depth 5, n_c 2, base 16": Setting(Size((384, 768)), 5, 2, 16),
    "depth 3, n_c 2, base 64": Setting(Size((512, 512)), 3, 2, 64),
}
_BOUND = "bound: 2 jobs of their own"


@dataclass(frozen=True)
class Case:
    """``work``: how much more than the one rank's; ideal is a speed-up of the number of ranks in pixels a second."""

    name: str
    setting: Setting
    ranks: int
    work: int
    flags: tuple[str, ...] = ()


def cases_of(setting: Setting) -> list[Case]:
    down = Size((2, 1))
    double = Size((2 * setting.size[0], setting.size[1]))
    return [
        Case("1 rank", setting, 1, 1),
        Case(
            "strong: 2 tiles that exchange borders",
            replace(setting, tiles=down, exchange_every="1"),
            2,
            1,
        ),
        Case("strong: 2 tiles with halos", replace(setting, tiles=down), 2, 1),
        Case(
            "weak: a double image, tiles that exchange borders",
            replace(setting, tiles=down, size=double, exchange_every="1"),
            2,
            2,
        ),
        Case("weak: 2 sample groups", replace(setting, samples=2), 2, 2),
        Case(_BOUND, setting, 2, 2, ("--alone",)),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="undisturbed steps of a job; the fastest counts (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        help="seconds a job waits for a quiet machine (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    networks = NETWORKS
    if options.quick:
        networks, options.repeats, options.steps, options.patience = (
            {"depth 1, n_c 1, base 4": Setting(Size((32, 32)), 1, 1, 4)},
            1,
            1,
            0.0,
        )
    rows, samples, parameters = [], {}, {}
    for network, setting in networks.items():
        cases = cases_of(setting)[: 2 if options.quick else None]
        details: dict[str, dict] = {}
        results = measure(
            {case.name: lambda case=case: seconds_of(case, options, details) for case in cases},
            repeats_of(options),
            warmup=0,
        )
        rows += [_row(network, case, results, details[case.name]) for case in cases]
        samples[network], parameters[network] = (
            results.as_dict(),
            {case.name: case.setting.as_dict() for case in cases},
        )
        print(f"{network} is measured", file=sys.stderr, flush=True)
    notes = (
        "one thread a rank; of each job the fastest of a few steps while nobody else used the machine; gradients by Horovod where it is installed\n"
        "speed-up: pixels of the images a second against one rank, in the same turn, median and range; E: computed pixels / pixels of the images;\n"
        "of bound: the speed-up over that of two jobs that exchange nothing"
    )
    report(
        "scaling",
        QUESTION,
        Rows(rows, {"samples": samples}),
        options,
        parameters,
        notes,
        lambda path: _plot(path, rows),
    )


def seconds_of(case: Case, options: argparse.Namespace, details: dict[str, dict]) -> Reading:
    """Of a step in a job of its own; what the job tells goes to ``details``."""
    given = [
        *arguments_of(case.setting),
        "--steps",
        str(options.steps),
        "--patience",
        str(options.patience),
        *["--reducer", "mpi"] * options.quick,
        *case.flags,
    ]
    # The harness's own HOROVOD_CYCLE_TIME would burn a core's time; distseg's default for CPUs counts.
    found = run_ranks(
        case.ranks,
        given,
        environment={"HOROVOD_CYCLE_TIME": os.environ.get("HOROVOD_CYCLE_TIME", "20")},
    )
    if not found["undisturbed"]:
        print(
            f"{case.name}: no step of {len(found['every'])} was undisturbed; is the machine in use?",
            file=sys.stderr,
            flush=True,
        )
    details[case.name] = found
    return Reading(fastest_step(found))


def _row(network: str, case: Case, results, found: dict) -> dict:
    spread, faster = results.spread(case.name), results.speedup(case.name)
    bound = 2 * results.speedup(_BOUND).median if _BOUND in results.samples else case.ranks
    return {
        "network": network,
        "case": case.name,
        "min [s]": spread.min,
        "median [s]": spread.median,
        "speed-up": case.work * faster.median,
        "from": case.work * faster.min,
        "to": case.work * faster.max,
        "E": round(found["redundancy"], 3),
        "of bound": case.work * faster.median / bound if case.ranks > 1 else None,
        "ranks": case.ranks,
    }


def _plot(path: Path, rows: list[dict]) -> None:
    from distseg.report.plots import plot_scaling

    points = []
    for row in rows:
        if (
            row["ranks"] > 1
            and row["network"] == rows[0]["network"]
            or row["case"].startswith("strong")
        ):
            series = f"{row['case']}, {row['network']}"
            points += [{"series": series, "processes": 1, "speedup": 1.0}]
            points += [
                {
                    "series": series,
                    "processes": row["ranks"],
                    "speedup": row["speed-up"],
                    "low": row["from"],
                    "high": row["to"],
                }
            ]
    plot_scaling(points, path, "Pixels a second, one rank against two")


if __name__ == "__main__":
    main()
