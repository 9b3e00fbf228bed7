"""The planner's memory of a rank beside the measured one: ``python -m benchmarks.layout_memory``.

Each layout is a job of its own. It measures the machine as ``distseg plan`` does, which gives the base and the spread of the
prediction. Then the engine of the layout is made, and the largest resident set of three steps is read.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import parent, report
from benchmarks.layouts import CASES, Job, config_of
from benchmarks.memory_steps import resident_peak
from benchmarks.ranks import run_ranks
from benchmarks.rows import Rows
from distseg.cli.plan_layouts import PlannedTraining
from distseg.comm.launch import release_freed_memory, resident_memory, set_up, world
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.planning.machine import load_machine
from distseg.planning.mesh_search import MeshLayout, Planner
from distseg.training.verify import prepare

QUESTION = "How near is the planner's memory of a rank to the measured one?"
MB = 1e6


def planned(case: str, precision: str, quick: bool) -> PlannedTraining:
    """Return the training of a case, with two images a step."""
    config, size = config_of(Job(case, 0, 1, quick))
    config = replace(config, train=replace(config.train, precision=precision))
    prepared = prepare(config, size)
    return PlannedTraining(prepared.config, as_network(prepared.model), prepared.size)


def drawn(training: PlannedTraining, ranks: int, number: int, seed: int) -> list[MeshLayout]:
    """Return layouts of a number of ranks, of different families as far as possible."""
    machine = replace(load_machine("summit-v100"), memory=1e12)
    plan, by_family, found = Planner(training.work(machine, 2), machine), {}, []
    for layout in plan.candidates(ranks):
        try:
            plan.predict(layout)
        except ValueError:
            continue
        by_family.setdefault(layout.family, []).append(layout)
    draw = random.Random(seed)
    for layouts in by_family.values():
        draw.shuffle(layouts)
    while len(found) < number and any(by_family.values()):
        found += [layouts.pop() for layouts in by_family.values() if layouts]
    return found[:number]


def work(case: str, precision: str, layout: MeshLayout, quick: bool) -> None:
    """Measure on this rank; rank 0 prints the numbers."""
    comm = world()
    device = set_up(comm, "cpu", 1).device
    training = planned(case, precision, quick)
    machine = replace(training.measure(comm), memory=1e12)
    gc.collect()
    release_freed_memory()
    base, kept = resident_memory(), []

    def steps() -> None:
        engine, own = training.step(layout, comm, device)
        kept.append((engine, own))
        for _ in range(3):
            engine.backward(own)
            engine.update(1e-3)

    rises = comm.allgather(resident_peak(steps))
    found = Planner(training.work(machine, 2), machine).predict(layout)
    if comm.rank == 0:
        row = {"spread": machine.spread, "base": base, "rise": max(rises)}
        print(json.dumps(row | {"planned base": machine.base, "predicted": found.memory}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument(
        "--drawn", type=int, default=4, help="layouts of a network and a number of ranks"
    )
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", type=json.loads, default=None, help="a layout: internal")
    options = parser.parse_args(arguments)
    if options.job:
        values = {**options.job, "tiles": Size(options.job["tiles"])}
        work(options.cases[0], options.precision, MeshLayout(**values), options.quick)
        return
    rows = []
    for case in options.cases[: 1 if options.quick else None]:
        training = planned(case, options.precision, options.quick)
        for ranks in options.ranks[: 2 if options.quick else None]:
            for layout in drawn(
                training, ranks, 1 if options.quick else options.drawn, options.seed
            ):
                rows.append(_row(case, options, layout))
                print(rows[-1], file=sys.stderr, flush=True)
    ratios = sorted(row["measured / predicted"] for row in rows)
    notes = (
        "MB of the rank that takes the most; three steps of two images, one thread a rank; without base: the same ratio of what the layout takes "
        "besides the process; "
        f"measured / predicted: {ratios[0]:.2f} to {ratios[-1]:.2f} in {len(rows)} layouts"
    )
    report(
        "layout_memory", QUESTION, Rows(rows, {}), options, {"precision": options.precision}, notes
    )


def _row(case: str, options, layout: MeshLayout) -> dict:
    fields = {**vars(layout), "tiles": str(layout.tiles)}
    words = ["-m", "benchmarks.layout_memory", "--job", json.dumps(fields), "--cases", case]
    words += ["--precision", options.precision, *(["--quick"] if options.quick else [])]
    found = run_ranks(layout.ranks, words)
    measured, predicted = found["base"] + found["rise"], found["predicted"]
    return {
        "network": case,
        "ranks": layout.ranks,
        "layout": " ".join(f"{k.partition('.')[2]}={v}" for k, v in layout.settings().items()),
        "spread": found["spread"],
        "base [MB]": found["base"] / MB,
        "measured [MB]": measured / MB,
        "predicted [MB]": predicted / MB,
        "measured / predicted": measured / predicted,
        "without base": found["rise"] / (predicted - found["planned base"]),
    }


if __name__ == "__main__":
    main()
