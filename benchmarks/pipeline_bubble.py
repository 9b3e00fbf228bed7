"""How close two pipeline stages come to the bubble's formula, and what is lost to the bubble, to uneven stages and to the machine.

An efficiency is a product: (what a rank computes alone / with the other rank at work beside it) x (mean rank / busiest rank) x (busiest rank /
step). The first is the machine's, the second the balance's, the third the bubble's and the messages'. A simulation of the schedule with the
measured seconds of the stages holds the last two together without messages. What ZB-H1 gains by putting gradients of weights off is measured
on two ranks beside 1F1B, and simulated on more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.harness import Spread, parent, repeats_of, report, run_ranks
from benchmarks.pipeline_steps import ONE, PLACEMENTS, SCHEDULES, TWICE, placement_of, simulated
from benchmarks.rows import Rows
from benchmarks.steps import Setting
from distseg.config.sizes import Size
from distseg.report.style import FAINT, PALETTE, new_figure
from distseg.report.tables import table
from distseg.runtime.partition import OUTPUT, Edge
from distseg.runtime.schedule import orders, splits
from distseg.runtime.simulator import simulate

QUESTION = "What share of two ranks' time does a pipeline of two stages use, against the formula m / (m + S - 1) of its bubble?"
RANKS = 2
SIMULATED = (2, 3, 4)  # ranks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument(
        "--size",
        type=Size,
        default=Size((192, 192)),
        help="of an image, a micro-batch each (default: %(default)s)",
    )
    parser.add_argument("--depth", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--base", type=int, default=24, help="channels of the first level (default: %(default)s)"
    )
    parser.add_argument(
        "--micro_batches",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        metavar="M",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        help="seconds a case waits for a quiet machine (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    setting = Setting(options.size, options.depth, 2, options.base)
    if options.quick:
        setting, options.micro_batches, options.patience = (
            Setting(Size((32, 32)), 1, 1, 4),
            [1, 2],
            0.0,
        )
    repeats = 1 if options.quick else repeats_of(options)
    found = run_ranks(
        RANKS, ["-m", "benchmarks.pipeline_steps", "--setting", json.dumps(asdict(setting)), "--micro_batches", *map(str, options.micro_batches),
                "--repeats", str(repeats), "--patience", str(options.patience)], timeout=3600.0,
    )  # fmt: skip
    rows = [
        _row(setting, found["balances"][placement], schedule, placement, run)
        for run in found["micro-batches"] for schedule in SCHEDULES for placement in PLACEMENTS
    ]  # fmt: skip
    parameters = {
        "setting": setting.as_dict(),
        "ranks": RANKS,
        "threads": 1,
        "repeats": repeats,
        "balances": found["balances"],
    }
    notes = (
        f"U-Net of depth {setting.depth}, {setting.num_convs} convs a level, base {setting.base_channels}, instance norm, fp32; a micro-batch is "
        f"one image of {setting.size}; layers of the stages: {', '.join(f'{name} {split}' for name, split in found['balances'].items())}\n"
        "efficiency: t(1 rank) / (2 t(2 ranks)), median and range of the turns; / formula: over m / (m + S - 1), S = 2; machine: t(1 rank) alone\n"
        "over t(1 rank) with the other rank at the same work beside it; / 1f1b: seconds over those of 1F1B in the same turn; idle: share of the ranks'\n"
        "time that is not in forward and backward passes or gradients of weights, as measured; balance: mean rank over busiest, by measured stages; simulated: share of\n"
        "the ranks' time in which they work, by the measured stages without messages (bubble and balance together); rest: efficiency / (machine x\n"
        "simulated), 1 if messages and all else cost nothing; disturbed: samples during which others used the machine"
    )
    bubbles = [
        _bubble(ranks, placement, m)
        for ranks in SIMULATED
        for placement in PLACEMENTS
        for m in options.micro_batches
    ]
    notes += f"\n\nsimulated, equal ranks, no messages, F = B = W: share of time in which ranks idle\n{table(bubbles)}"
    report(
        "pipeline_bubble",
        QUESTION,
        Rows(rows, {"runs": found["micro-batches"], "simulated": bubbles}),
        options,
        parameters,
        notes,
        lambda path: _plot(path, rows),
    )


def _row(setting: Setting, balance: list[int], schedule: str, placement: str, run: dict) -> dict:
    m, name = run["m"], f"{schedule}, {placement}"
    samples, stages, where = run["samples"], run["stages"][name], placement_of(placement, RANKS)
    spread = Spread.of([one / (RANKS * two) for one, two in zip(samples[ONE], samples[name])])
    busy = [
        m
        * sum(seconds for stage, seconds in stages.items() if where[int(stage.split()[1])] == rank)
        for rank in range(RANKS)
    ]
    working = sum(busy) / (RANKS * simulated(setting, balance, where, schedule, m, stages))
    ratio = Spread.of(
        [seconds / one for seconds, one in zip(samples[name], samples[f"1f1b, {placement}"])]
    )
    machine, formula = (
        median(one / both for one, both in zip(samples[ONE], samples[TWICE])),
        m / (m + RANKS - 1),
    )
    return {
        "m": m,
        "schedule": schedule,
        "placement": placement,
        "1 rank [s]": median(samples[ONE]),
        "2 ranks [s]": median(samples[name]),
        "min [s]": min(samples[name]),
        "/ 1f1b": ratio.median,
        "1f1b from": ratio.min,
        "1f1b to": ratio.max,
        "idle": 1 - sum(busy) / (RANKS * median(samples[name])),
        "efficiency": spread.median,
        "from": spread.min,
        "to": spread.max,
        "formula": formula,
        "/ formula": spread.median / formula,
        "machine": machine,
        "balance": sum(busy) / (RANKS * max(busy)),
        "simulated": working,
        "rest": spread.median / (machine * working),
        "disturbed": sum(samples[f"{name}, disturbed"]) + sum(samples[f"{ONE}, disturbed"]),
    }


def _bubble(ranks: int, placement: str, m: int) -> dict:
    """The share of time in which ranks idle, in a simulation of equal ranks whose F, B and W take as long as each other."""
    where = placement_of(placement, ranks)
    edges = [Edge(OUTPUT, stage, stage + 1) for stage in range(len(where) - 1)]
    unit = [1 / where.count(rank) for rank in where]
    idle = {}
    for name in ("1f1b", "zb-h1"):
        backward = unit if splits(name) else [2 * seconds for seconds in unit]
        idle[name] = (
            sum(simulate(orders(name, where, m), edges, unit, backward, where, weight=unit).idle)
            / ranks
        )
    return {
        "ranks": ranks,
        "placement": placement,
        "m": m,
        **{f"idle, {name}": share for name, share in idle.items()},
    }


def _plot(path: Path, rows: list[dict]) -> None:
    counts = sorted({row["m"] for row in rows})
    with new_figure(path, (10.0, 4.2), layout="constrained") as figure:
        axes = figure.subplots(1, len(PLACEMENTS), sharey=True)
        for axis, placement in zip(axes, PLACEMENTS):
            formula = [m / (m + RANKS - 1) for m in counts]
            axis.plot(counts, formula, "--", color=FAINT, label="m / (m + S - 1)")
            axis.fill_between(
                counts,
                [0.9 * f for f in formula],
                formula,
                color=FAINT,
                alpha=0.15,
                linewidth=0,
                label="0.9 of it and more",
            )
            for color, schedule in zip(PALETTE, SCHEDULES):
                _draw(
                    axis,
                    [
                        row
                        for row in rows
                        if (row["schedule"], row["placement"]) == (schedule, placement)
                    ],
                    schedule,
                    color,
                )
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(m) for m in counts])
            axis.set(
                title=f"{RANKS} ranks, placement {placement}",
                xlabel="micro-batches m",
                ylim=(0, 1.05),
            )
        axes[0].set_ylabel("efficiency, t(1 rank) / (2 t(2 ranks))")
        axes[0].legend(loc="lower right", fontsize=8)


def _draw(axis, rows: list[dict], schedule: str, color: str) -> None:
    m, efficiency = [row["m"] for row in rows], [row["efficiency"] for row in rows]
    ranges = [
        [row["efficiency"] - row["from"] for row in rows],
        [row["to"] - row["efficiency"] for row in rows],
    ]
    axis.errorbar(
        m, efficiency, yerr=ranges, color=color, marker="o", markersize=5, capsize=3, label=schedule
    )
    axis.plot(
        m,
        [row["simulated"] for row in rows],
        ":",
        color=color,
        label=f"{schedule}, simulated with the measured stages",
    )


if __name__ == "__main__":
    main()
