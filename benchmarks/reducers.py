"""Time of a step of several sample groups by the library that sums the gradients."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import Setting, arguments_of, fastest_step
from distseg.config.sizes import Size
from distseg.models.unet import unet

QUESTION = "How does the time of a step depend on what sums the gradients: MPI, Horovod or gloo?"
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
        help="steps of a job; the fastest counts (default: %(default)s)",
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
        given = [*arguments_of(replace(setting, samples=options.ranks)), "--steps"]
        given.append(str(options.steps))
        cases = {
            name: lambda name=name, given=given: _seconds(options.ranks, given, name)
            for name in reducers
        }
        found[f"{millions:.2g} M, {setting.size}"] = measure(cases, repeats_of(options), warmup=0)
    rows = [
        {"parameters, image": name, **results.row(case, ("median",))}
        for name, results in found.items()
        for case in results.samples
    ]
    notes = (
        f"{options.ranks} ranks, an image and a thread each; the fastest step of a job, in fp32; "
        "mpi and horovod under mpirun, torch (gloo) under torchrun; nothing overlaps with the "
        "backward pass"
    )
    report(
        "reducers",
        QUESTION,
        Rows(rows, {name: results.as_dict() for name, results in found.items()}),
        options,
        {"ranks": options.ranks, "steps": options.steps},
        notes,
    )


def _seconds(ranks: int, given: list[str], reducer: str) -> Reading:
    transport = "torch" if reducer == "torch" else "mpi"
    environment = {"HOROVOD_CYCLE_TIME": "20"}  # distseg's own choice on a CPU
    arguments = [*given, "--reducer", reducer]
    result = run_ranks(ranks, arguments, environment=environment, transport=transport)
    return Reading(fastest_step(result))


if __name__ == "__main__":
    main()
