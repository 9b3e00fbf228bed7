"""The planner's memory of a rank beside the measured one: ``python -m benchmarks.layout_memory``.

Measured are the bytes of tensors that live at once on a rank: from the creation of the engine, over two optimizer steps. A dispatch
mode counts every tensor from its making to its end, so the figure is the same in every run and on every machine with the same kernels.
The prediction is that of ``distseg plan`` for a machine whose processes take nothing besides their tensors (``base`` 0, ``spread`` 1).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.harness import parent, report
from benchmarks.layouts import CASES, Job, config_of
from benchmarks.ranks import run_ranks
from benchmarks.rows import Rows
from distseg.cli.planned_training import PlannedTraining
from distseg.comm.launch import set_up, world
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.planning.live_bytes import LiveBytes
from distseg.planning.machine import load_machine
from distseg.planning.mesh_layout import MeshLayout, Prediction
from distseg.planning.mesh_search import Planner
from distseg.runtime.precision import fast_bf16
from distseg.tiling.tile_batch import TileBatch
from distseg.training.verify import prepare

QUESTION = "How near is the planner's memory of a rank to the measured one?"
MB = 1e6
PRECISIONS = ("fp32", "bf16")


def planner_of(case: str, precision: str, quick: bool) -> tuple[PlannedTraining, Planner]:
    """Return the training of a case with four images a step, and its planner."""
    config, size = config_of(Job(case, 0, 1, quick))
    config = replace(config, train=replace(config.train, precision=precision, accumulate=4))
    if not quick:
        size = Size(n // 4 for n in size)
    prepared = prepare(config, size)
    training = PlannedTraining(prepared.config, as_network(prepared.model), prepared.size)
    machine = replace(load_machine("summit-v100"), memory=1e12, base=0.0, spread=1.0)
    return training, Planner(training.work(machine), machine)


def kind_of(layout: MeshLayout) -> str:
    """Return the family of a layout; tiles that exchange halos are one of their own."""
    return layout.family.replace("tiles", "tiles" if layout.exchange == "all" else "exchange")


def drawn(plan: Planner, ranks: int, number: int, seed: str) -> list[MeshLayout]:
    """Return layouts of a number of ranks, of different families as far as possible."""
    by_family: dict[str, list[MeshLayout]] = {}
    for layout in plan.candidates(ranks):
        by_family.setdefault(kind_of(layout), []).append(layout)
    draw = random.Random(seed)
    for layouts in by_family.values():
        draw.shuffle(layouts)
    families, found = list(by_family.values()), []
    draw.shuffle(families)
    while len(found) < number and any(families):
        found += [layouts.pop() for layouts in families if layouts]
    return found[:number]


def work(options) -> None:
    """Measure drawn layouts on this rank; rank 0 prints the rows."""
    comm, rows = world(), []
    device = set_up(comm, "cpu", 1).device
    for case in options.cases:
        for precision in options.precisions:
            training, plan = planner_of(case, precision, options.quick)
            for layout in drawn(
                plan, comm.size, options.drawn, f"{options.seed} {case} {precision}"
            ):
                try:
                    predicted = plan.predict(layout)
                except ValueError:
                    continue  # the network has no split into these stages
                found = comm.allgather(measured(training, predicted, comm, device))
                settings = {k.partition(".")[2]: v for k, v in layout.settings().items()}
                row = {
                    "network": case,
                    "precision": precision,
                    "ranks": comm.size,
                    "family": kind_of(layout),
                    "layout": " ".join(f"{k}={v}" for k, v in settings.items()),
                    "measured [MB]": max(found) / MB,
                    "predicted [MB]": predicted.memory / MB,
                    "measured / predicted": max(found) / predicted.memory,
                }
                rows.append(row)
                if comm.rank == 0:
                    print(row, file=sys.stderr, flush=True)
    if comm.rank == 0:
        print(json.dumps({"rows": rows}))


def measured(training: PlannedTraining, predicted: Prediction, comm, device: torch.device) -> int:
    """Return the bytes of this rank's tensors at the peak of two steps, weights included."""
    layout = predicted.layout
    with LiveBytes("cpu", training.model.parameters()) as alive:
        stages = predicted.balance if layout.stages > 1 else None
        engine, own = training.step(layout, comm, device, stages)
        first, last = engine.mesh.stage == 0, engine.mesh.stage + 1 == layout.stages
        # As the loader does: only the first stage has pixels, only the last one has labels.
        own = [
            [TileBatch(p.pixels.float() if first else None, p.labels if last else None, p.place) for p in pieces]
            for pieces in own
        ]  # fmt: skip
        gc.collect()
        alive.peak = alive.bytes  # the making of the engine is no part of a step
        for _ in range(2):
            engine.backward(own)
            engine.update(1e-3)
    return alive.peak


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 6, 8])
    parser.add_argument(
        "--drawn", type=int, default=3, help="layouts of a network, number type and ranks"
    )
    parser.add_argument(
        "--precisions",
        nargs="*",
        choices=PRECISIONS,
        help="default: both; only fp32 if this machine emulates bf16",
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", action="store_true", help="measure on this rank: internal")
    options = parser.parse_args(arguments)
    if options.job:
        work(options)
        return
    if options.quick:
        options.ranks, options.cases, options.precisions, options.drawn = (
            [2],
            list(CASES)[:1],
            ["fp32"],
            1,
        )
    elif not options.precisions:
        options.precisions = PRECISIONS if fast_bf16(torch.device("cpu")) else PRECISIONS[:1]
    rows = []
    for ranks in options.ranks:
        words = [
            "-m",
            "benchmarks.layout_memory",
            "--job",
            "--drawn",
            str(options.drawn),
            "--seed",
            str(options.seed),
        ]
        words += [
            "--cases",
            *options.cases,
            "--precisions",
            *options.precisions,
            *(["--quick"] if options.quick else []),
        ]
        rows += run_ranks(ranks, words, timeout=3600.0)["rows"]
    ratios = sorted(row["measured / predicted"] for row in rows)
    notes = (
        "MB of the rank that takes the most, weights, gradients and optimizer included; two steps of four images; "
        f"measured / predicted: {ratios[0]:.3f} to {ratios[-1]:.3f} in {len(rows)} layouts"
    )
    more = {
        "families": {
            family: _range(rows, family) for family in sorted({row["family"] for row in rows})
        }
    }
    report("layout_memory", QUESTION, Rows(rows, more), options, {"networks": options.cases}, notes)


def _range(rows: list[dict], family: str) -> dict:
    ratios = sorted(row["measured / predicted"] for row in rows if row["family"] == family)
    return {"layouts": len(ratios), "least": ratios[0], "most": ratios[-1]}


if __name__ == "__main__":
    main()
