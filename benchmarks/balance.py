"""How well the layers of the paper's networks are spread over six stages: our split, the paper's, torchgpipe's and an even one.

A pipeline runs at the pace of its slowest stage. Modelled costs are the arithmetic and the memory traffic of each layer
on the paper's GPU; measured ones are of this machine, where splits are chosen by one measurement and judged by another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import parent, repeats_of, report
from benchmarks.rows import Rows
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.models.zoo import build_model
from distseg.planning.cost import measured
from distseg.planning.held import Policy
from distseg.planning.stage_report import OURS, costs_of, plan, tensors_of_stages, window_of
from distseg.report.style import FAINT, PALETTE, new_figure

QUESTION = "How much faster is the slowest pipeline stage of our split than that of the paper's, torchgpipe's and an even one?"
MODELS = ("summit-small", "summit-medium-2", "summit-large")
STAGES = 6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument(
        "--window",
        type=Size,
        default=Size("1434"),
        help="of the modelled costs (default: %(default)s)",
    )
    parser.add_argument(
        "--model", default="summit-small", help="the one measured (default: %(default)s)"
    )
    parser.add_argument(
        "--measured",
        type=Size,
        default=Size("384"),
        metavar="WINDOW",
        help="of the measured costs (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    models = MODELS[:1] if options.quick else MODELS
    if options.quick:
        options.model, options.measured = "tiny", Size("32")
    policy = Policy(micro_batches=2)
    window = window_of(options.window)
    plans = [
        (
            options.window,
            plan(
                model,
                costs_of(model, window, 1),
                tensors_of_stages(model, window, 1),
                STAGES,
                policy,
            ),
        )
        for model in models
    ]
    plans.append((options.measured, _measured_plan(options, policy)))
    rows = [row for window, found in plans for row in _rows(window, found)]
    parameters = {
        "stages": STAGES, "policy": vars(policy), "window": str(options.window), "measured": str(options.measured), "repeats": repeats_of(options),
        "dtype": "float32", "batch": 1,
    }  # fmt: skip
    notes = (
        "Time of a micro-batch, forward and backward, on the slowest stage; efficiency: mean stage over slowest. Modelled: V100, float32,\n"
        "70% of 15.7 TFLOP/s or 80% of 900 GB/s. Measured: layer by layer, splits chosen by one measurement and judged by a second."
    )
    more = {"stages": [{"window": str(window), **found} for window, found in plans]}
    report(
        "balance",
        QUESTION,
        Rows(rows, more),
        options,
        parameters,
        notes,
        lambda path: _plot(path, rows),
    )


def _measured_plan(options: argparse.Namespace, policy: Policy) -> dict:
    model = build_model(ModelConfig(options.model))
    costs = []
    for turn in ("chosen by", "judged by"):
        costs.append(measured(model, window_of(options.measured), 1, repeats_of(options)))
        print(
            f"{turn}: {sum(costs[-1].forward) + sum(costs[-1].backward):.3g} s a pass",
            file=sys.stderr,
            flush=True,
        )
    tensors = tensors_of_stages(options.model, window_of(options.measured), 1)
    return plan(options.model, costs[0], tensors, STAGES, policy, judged_by=costs[1])


def _rows(window: Size, found: dict) -> list[dict]:
    return [
        {
            "model": found["model"],
            "costs": found["costs"],
            "window": str(window),
            "split": name,
            "layers": " ".join(map(str, split["balance"])),
            "slowest [ms]": split["slowest"] * 1e3,
            "ours / this": split["ratio"],
            "efficiency": split["efficiency"],
            "fullest [GiB]": split["fullest"] / 2**30,
        }
        for name, split in found["splits"].items()
    ]


def _plot(path: Path, rows: list[dict]) -> None:
    """Bars: the slowest stage's time, as a multiple of what all stages would take if they were alike."""
    groups = list(dict.fromkeys((row["model"], row["costs"], row["window"]) for row in rows))
    splits = list(dict.fromkeys(row["split"] for row in rows))
    with new_figure(path, (9.0, 4.2), layout="constrained") as figure:
        axis = figure.subplots()
        for index, split in enumerate(splits):
            mine = [row for row in rows if row["split"] == split]
            at = [
                groups.index((row["model"], row["costs"], row["window"]))
                + (index - (len(splits) - 1) / 2) * 0.2
                for row in mine
            ]
            bars = axis.bar(
                at,
                [1 / row["efficiency"] for row in mine],
                0.18,
                color=PALETTE[index],
                label="ours, exact" if split == OURS else split,
            )
            axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
        axis.axhline(1, color=FAINT, linestyle="--", linewidth=1)
        axis.set_xticks(
            range(len(groups)), [f"{model}\n{costs}, {window}²" for model, costs, window in groups]
        )
        axis.set(title=f"Slowest of {STAGES} stages", ylabel="time / time if all were alike")
        axis.grid(axis="x", visible=False)
        axis.legend(ncols=len(splits), loc="upper center", bbox_to_anchor=(0.5, -0.14))


if __name__ == "__main__":
    main()
