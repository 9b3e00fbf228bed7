"""The peak memory of each pipeline stage, measured in a step and as ``distseg plan`` predicts it.

Weights, gradients and the optimizer's numbers are the same before, during and after a step; what is compared is the rise above
them: activations, gradients of activations, room for messages. ``distseg plan`` counts what a device's allocator would hold, which
is what tensors take. The resident set is less where a buffer that waits for a message was never written to, more by kernels' scratch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import parent, report, run_ranks
from benchmarks.memory_steps import RETURN_FREED, SCHEDULES
from benchmarks.rows import Rows
from benchmarks.steps import Setting
from distseg.config.sizes import Size
from distseg.report.style import PALETTE, new_figure

QUESTION = "How close is the predicted peak memory of a pipeline stage to the measured one?"
MB = 1e6
_BARS = (
    ("tensors [MB]", PALETTE[5], "alive in tensors"),
    ("resident [MB]", PALETTE[4], "resident"),
    ("predicted [MB]", PALETTE[7], "predicted"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument(
        "--size",
        type=Size,
        default=Size((256, 256)),
        help="of an image, a micro-batch each (default: %(default)s)",
    )
    parser.add_argument("--depth", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--base", type=int, default=32, help="channels of the first level (default: %(default)s)"
    )
    parser.add_argument(
        "--micro_batches", type=int, default=4, metavar="M", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--stages", type=int, nargs="+", default=[2, 3], metavar="S", help="(default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    setting, schedules, rows = Setting(options.size, options.depth, 2, options.base), SCHEDULES, []
    if options.quick:
        setting, schedules, options.micro_batches, options.stages = (
            Setting(Size((32, 32)), 1, 1, 4),
            SCHEDULES[:1],
            2,
            [2],
        )
    given = [
        "-m",
        "benchmarks.memory_steps",
        "--setting",
        json.dumps(asdict(setting)),
        "--micro_batches",
        str(options.micro_batches),
    ]
    given += ["--schedules", *schedules]
    for stages in options.stages:
        cases = run_ranks(stages, given, timeout=1800.0, environment=RETURN_FREED)["cases"]
        rows += [
            _row(stages, case, stage, found)
            for case in cases
            for stage, found in enumerate(case["stages"])
        ]
    parameters = {
        "setting": setting.as_dict(),
        "micro-batches": options.micro_batches,
        "stages": options.stages,
        "optimizer": "adamw",
    }
    worst = max(rows, key=lambda row: abs(row["/ tensors"] - 1))
    notes = (
        f"U-Net of depth {setting.depth}, {setting.num_convs} convs a level, base {setting.base_channels}, fp32, {options.micro_batches} "
        f"micro-batches of one image of {setting.size}\nlasting: weights, gradients, optimizer, predicted as measured to {_lasting_error(rows):.1%}; "
        "predicted, tensors, resident: the rise above\nthem in a step; tensors: bytes alive in tensors, without kernels' scratch; resident: of the "
        "process's largest resident set, which\nhas no buffers that were never written to; / tensors, / resident: predicted over measured\n"
        f"furthest from the tensors: {worst['/ tensors']:.3f}, {_name(worst)}"
    )
    report(
        "stage_memory",
        QUESTION,
        Rows(rows),
        options,
        parameters,
        notes,
        lambda path: _plot(path, rows),
    )


def _row(stages: int, case: dict, stage: int, found: dict) -> dict:
    measured, predicted = found["measured"], found["predicted"]
    rise = predicted["activations"]
    resident = measured["resident"]
    return {
        "S": stages,
        "schedule": case["schedule"],
        "recompute": case["recompute"],
        "stage": stage,
        "layers": found["layers"],
        "lasting [MB]": sum(measured[name] for name in ("weights", "gradients", "optimizer")) / MB,
        "predicted lasting [MB]": sum(
            predicted[name] for name in ("weights", "gradients", "optimizer")
        )
        / MB,
        "tensors [MB]": measured["tensors"] / MB,
        "resident [MB]": resident and resident / MB,
        "predicted [MB]": rise / MB,
        "/ tensors": rise / measured["tensors"],
        "/ resident": rise / resident if resident else None,
    }


def _lasting_error(rows: list[dict]) -> float:
    return max(abs(row["predicted lasting [MB]"] / row["lasting [MB]"] - 1) for row in rows)


def _name(row: dict) -> str:
    return f"stage {row['stage']} of {row['S']}, {row['schedule']}, recompute {row['recompute']}"


def _plot(path: Path, rows: list[dict]) -> None:
    stages, schedules = ([*dict.fromkeys(row[key] for row in rows)] for key in ("S", "schedule"))
    panels = [(s, schedule) for s in stages for schedule in schedules]
    with new_figure(
        path, (5.2 * len(schedules), 3.4 * len(stages)), layout="constrained"
    ) as figure:
        axes = figure.subplots(len(stages), len(schedules), sharey="row", squeeze=False).flat
        for axis, (stages, schedule) in zip(axes, panels):
            _bars(axis, [row for row in rows if (row["S"], row["schedule"]) == (stages, schedule)])
            axis.set(title=f"{stages} stages, {schedule}", ylabel="MB above weights and optimizer")
        axes[0].legend(fontsize=8)


def _bars(axis, rows: list[dict]) -> None:
    for index, (key, color, label) in enumerate(_BARS):
        axis.bar(
            [at + 0.27 * (index - 1) for at in range(len(rows))],
            [row[key] or 0 for row in rows],
            0.25,
            color=color,
            label=label,
        )
    ticks = [
        f"{row['stage']}\n{row['recompute'].replace('_', ' ') if row['stage'] == (row['S'] - 1) // 2 else ''}"
        for row in rows
    ]
    axis.set_xticks(range(len(rows)), ticks, fontsize=8)
    axis.set_xlabel("stage, by what is recomputed")
    axis.grid(axis="x", visible=False)


if __name__ == "__main__":
    main()
