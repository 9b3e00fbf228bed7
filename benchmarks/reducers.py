"""Time of a step of several sample groups by the library that sums the gradients, with sums that start during the backward pass and after it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import quantiles

from benchmarks.harness import Reading, Results, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import Setting, arguments_of, fastest_step
from distseg.config.sizes import Size
from distseg.models.unet import unet

QUESTION = (
    "How does the time of a step depend on what sums the gradients, MPI, Horovod or gloo, and on when the sums start: "
    "during the backward pass or after it?"
)
# Networks of 2 and 72 million parameters. The second has as many as the network "small" of Seal et
# al. 2020, and its images are so small that the sum is a large part of the step.
SETTINGS = (
    Setting(Size((256, 256)), depth=3, num_convs=2, base_channels=42),
    Setting(Size((64, 64)), depth=4, num_convs=2, base_channels=128),
)
REDUCERS = ("mpi", "horovod", "torch")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--ranks", type=int, default=2, help="sample groups of a rank each (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="pairs of steps of a job, with early and late sums in turns (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    settings, reducers = SETTINGS, REDUCERS
    if options.quick:
        settings, reducers = (Setting(Size((32, 32)), 1, 1, 4),), REDUCERS[::2]
        options.repeats, options.steps = 1, 1
    found = {}
    for setting in settings:
        model = unet(setting.depth, setting.num_convs, setting.base_channels)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        given = [
            *arguments_of(replace(setting, samples=options.ranks)),
            "--sums_in_turns",
            "--steps",
        ]
        given.append(str(2 * options.steps))
        steps = {name: Results({"late": [], "early": []}, "late") for name in reducers}
        cases = {
            name: lambda name=name, given=given, steps=steps: _seconds(
                options.ranks, given, name, steps[name]
            )
            for name in reducers
        }
        results = measure(cases, repeats_of(options), warmup=0)
        found[f"{millions:.2g} M, {setting.size}"] = results, steps
    rows = [
        {"parameters, image": name, **results.row(case, ("median",))} | _row(steps[case])
        for name, (results, steps) in found.items()
        for case in results.samples
    ]
    notes = (
        f"{options.ranks} ranks, an image and a thread each, in fp32; the fastest step of a job, over that by mpi; "
        "early / late: a step whose sums start during the backward pass over the step before, whose sums start after it, "
        "median and quartiles; mpi and horovod under mpirun, torch (gloo) under torchrun"
    )
    samples = {
        name: results.as_dict() | {"steps": {case: of.as_dict() for case, of in steps.items()}}
        for name, (results, steps) in found.items()
    }
    report(
        "reducers",
        QUESTION,
        Rows(rows, samples),
        options,
        {"ranks": options.ranks, "steps": options.steps},
        notes,
    )


def _row(steps: Results) -> dict:
    """Return the ratio of steps with early and late sums, as columns of the table."""
    ratios = [early / late for early, late in zip(steps.samples["early"], steps.samples["late"])]
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"early / late": middle, "quartiles": f"{low:.2f} to {high:.2f}"}


def _seconds(ranks: int, given: list[str], reducer: str, steps: Results) -> Reading:
    """Run a job, add its steps to ``steps``, and return the seconds of its fastest step."""
    transport = "torch" if reducer == "torch" else "mpi"
    environment = {"HOROVOD_CYCLE_TIME": "20"}  # distseg's own choice on a CPU
    arguments = [*given, "--reducer", reducer]
    result = run_ranks(ranks, arguments, environment=environment, transport=transport)
    late, early = result["every"][::2], result["every"][1::2]
    steps.samples["late"] += late
    steps.samples["early"] += early
    return Reading(fastest_step(result))


if __name__ == "__main__":
    main()
