"""The step of one image on one rank and on two, as the image grows: with halos that are read, and with borders that are exchanged.

With an exchange both ranks have half of the work; what is lost is waiting, and the copies into which borders are put. Both shrink
against convolutions as tiles grow.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Results, measure, parent, repeats_of, report
from benchmarks.rows import Rows
from benchmarks.scaling import Case, seconds_of
from benchmarks.steps import Setting
from distseg.config.sizes import Size

QUESTION = "How much faster is the step of one image on two ranks than on one?"
NETWORK = Setting(depth=3, num_convs=2, base_channels=64)
SIZES = [Size((256, 256)), Size((1024, 512))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(4)])
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="undisturbed steps of a job; the fastest counts (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds a job waits for a quiet machine (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    network, sizes = NETWORK, SIZES
    if options.quick:
        network, sizes, options.steps, options.patience = (
            Setting(depth=1, num_convs=1, base_channels=4),
            [Size((32, 32))],
            1,
            0.0,
        )
    found = {size: measured(replace(network, size=size), options) for size in sizes}
    rows = [
        _row(size, case, results) for size, results in found.items() for case in results.samples
    ]
    samples = {str(size): results.as_dict() for size, results in found.items()}
    notes = (
        "one thread a rank, tiles 2x1; of each job the fastest of a few steps while nobody else used the machine; gradients by Horovod where it is installed\n"
        "speed-up: against one rank in the same turn, median and range"
    )
    report(
        "strong",
        QUESTION,
        Rows(rows, {"samples": samples}),
        options,
        network.as_dict(),
        notes,
        lambda path: _plot(path, rows),
    )


def measured(setting: Setting, options: argparse.Namespace) -> Results:
    two = replace(setting, tiles=Size((2, 1)))
    cases = [
        Case("1 rank", setting, 1, 1),
        Case("2 ranks, borders exchanged", replace(two, exchange_every="1"), 2, 1),
        Case("2 ranks, halos read", two, 2, 1),
    ][: 2 if options.quick else None]
    return measure(
        {case.name: lambda case=case: seconds_of(case, options, {}) for case in cases},
        repeats_of(options),
        warmup=0,
    )


def _row(size: Size, case: str, results: Results) -> dict:
    spread, faster = results.spread(case), results.speedup(case)
    return {
        "image": str(size), "case": case, "min [s]": spread.min, "median [s]": spread.median,
        "speed-up": faster.median, "from": faster.min, "to": faster.max,
    }  # fmt: skip


def _plot(path: Path, rows: list[dict]) -> None:
    from distseg.report.plots import plot_scaling

    points = []
    for row in rows:
        if row["case"] != "1 rank":
            series = f"{row['image']}, {row['case'].removeprefix('2 ranks, ')}"
            points += [{"series": series, "processes": 1, "speedup": 1.0}]
            points += [
                {
                    "series": series,
                    "processes": 2,
                    "speedup": row["speed-up"],
                    "low": row["from"],
                    "high": row["to"],
                }
            ]
    plot_scaling(points, path, "One image on one rank and on two")


if __name__ == "__main__":
    main()
