"""What Horovod's background thread costs: it asks all ranks for work every HOROVOD_CYCLE_TIME milliseconds, on the cores that compute."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.steps import Setting, arguments_of, fastest_step
from distseg.config.sizes import Size

QUESTION = "How does the time of Horovod's cycle change a step, against sums by MPI alone?"
CYCLES = ("0.1", "1", "5", "20")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--ranks", type=int, default=2, help="sample groups of a rank each (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="steps of a job; the fastest counts (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds a job waits for a quiet machine (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    setting, cycles = Setting(Size((384, 384)), 3, 1, 32, samples=options.ranks), CYCLES
    if options.quick:
        setting, cycles, options.repeats, options.steps, options.patience = (
            Setting(Size((32, 32)), 1, 1, 4),
            (),
            1,
            1,
            0.0,
        )
    given = [
        *arguments_of(setting),
        "--steps",
        str(options.steps),
        "--patience",
        str(options.patience),
    ]
    ranks = setting.samples
    cases = {"mpi": lambda: _seconds(ranks, [*given, "--reducer", "mpi"], "20")}
    cases |= {
        f"horovod, {cycle} ms": lambda cycle=cycle: _seconds(
            ranks, [*given, "--reducer", "horovod"], cycle
        )
        for cycle in cycles
    }
    results = measure(cases, repeats_of(options), warmup=0)
    notes = (
        f"{ranks} ranks, an image of {setting.size} and a thread each; U-Net of depth {setting.depth}, {setting.num_convs} conv a level, "
        f"base {setting.base_channels}; the fastest step of a job"
    )
    report(
        "horovod_cycle",
        QUESTION,
        results,
        options,
        {"setting": setting.as_dict(), "ranks": ranks},
        notes,
    )


def _seconds(ranks: int, given: list[str], cycle: str) -> Reading:
    found = run_ranks(ranks, given, environment={"HOROVOD_CYCLE_TIME": cycle})
    return Reading(fastest_step(found))


if __name__ == "__main__":
    main()
