"""The planner's seconds of a step beside measured ones: ``python -m benchmarks.layouts``.

A job times the network as ``distseg plan`` does, on all ranks at the same time. Then it runs steps
in layouts that are drawn from those that the planner compares, one step of each in turns. Nothing is
fitted to these steps. ``--cpu-time`` measures what ranks compute, without waiting: it tests the model
of the work on a machine that other processes share. Layouts with stages are left out then.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.harness import parent, repeats_of, report
from benchmarks.ranks import run_ranks
from benchmarks.rows import Rows
from distseg.cli import profile
from distseg.cli.bench.running_step import RunningStep
from distseg.cli.planned_training import PlannedTraining
from distseg.comm.counted import CountedComm
from distseg.comm.launch import set_up, world
from distseg.config.settings import Config, DataConfig, ModelConfig, TrainConfig
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.planning import roofline
from distseg.planning.mesh_layout import MeshLayout, Prediction
from distseg.planning.mesh_search import Planner
from distseg.training.verify import prepare

QUESTION = "How near are the planner's seconds of a step to measured ones?"
CASES = {  # name: (network, size of an image)
    "U-Net, instance norm": (dict(name="unet", depth=3, num_convs=2, base_channels=16), "512x512"),
    "U-Net, batch norm": (
        dict(name="unet", depth=4, num_convs=1, base_channels=16, norm="batch"),
        "384x640",
    ),
    "U-Net, no norm": (
        dict(name="unet", depth=2, num_convs=2, base_channels=32, norm="none"),
        "320x320",
    ),
    "residual, captured": (dict(name="benchmarks.layouts:residual"), "256x384"),
    "U-Net, captured": (dict(name="benchmarks.layouts:Plain"), "384x256"),
}


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.n = nn.GroupNorm(4, channels)
        self.b = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.b(self.n(self.a(x)).relu())


def residual(in_channels: int = 3, out_channels: int = 3) -> nn.Module:
    """Return a residual network that distseg follows."""
    blocks = [Block(24) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(in_channels, 24, 3, padding=1), *blocks, nn.Conv2d(24, out_channels, 1)
    )


class Plain(nn.Module):
    """A U-Net as users write it: batch norm, max-pooling, transposed convolutions, concatenation."""

    def __init__(self, in_channels: int = 3, out_channels: int = 3):
        super().__init__()
        self.down = nn.ModuleList(
            [_double(a, b) for a, b in ((in_channels, 16), (16, 32), (32, 64))]
        )
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in (32, 16)])
        self.join = nn.ModuleList([_double(2 * n, n) for n in (32, 16)])
        self.head = nn.Conv2d(16, out_channels, 1)

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        for up, join, skip in zip(self.up, self.join, (second, first)):
            x = join(torch.cat((skip, up(x)), 1))
        return self.head(x)


def _double(a: int, b: int) -> nn.Sequential:
    conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(
        conv(a, b), nn.BatchNorm2d(b), nn.ReLU(), conv(b, b), nn.BatchNorm2d(b), nn.ReLU()
    )


@dataclass(frozen=True)
class Job:
    """Job that measures layouts of one network."""

    case: str
    drawn: int
    repeats: int
    quick: bool
    cpu_time: bool = False
    precision: str = "fp32"


def config_of(job: Job) -> tuple[Config, Size]:
    network, size = CASES[job.case]
    if job.quick:
        size = "64x64"
    made = (
        ModelConfig(**{"in_channels": 3, "out_channels": 3, "dropout": 0.0, **network})
        if (network["name"] == "unet")
        else ModelConfig(network["name"], in_channels=3, out_channels=3)
    )
    train = TrainConfig(accumulate=2, precision=job.precision)
    plan = Config(model=made, data=DataConfig(images=1), train=train)
    return plan, Size(size)


def work(job: Job) -> None:
    """Measure on this rank; rank 0 prints the rows."""
    comm = world()
    config, size = config_of(job)
    prepared = prepare(config, size)
    training = PlannedTraining(prepared.config, as_network(prepared.model), prepared.size)
    clock = time.thread_time if job.cpu_time else time.perf_counter
    timing = SimpleNamespace(perf_counter=clock)
    with patch.object(roofline, "time", timing), patch.object(profile, "time", timing):
        machine = training.measure(comm)
    planner = Planner(training.work(machine, 2), machine)
    every = sorted(planner.candidates(comm.size), key=str)
    if job.cpu_time:
        every = [layout for layout in every if layout.stages == 1]
    chosen = comm.bcast(random.Random(0).sample(every, min(job.drawn, len(every))))
    predicted = [found for layout in chosen if (found := _predicted(planner, layout))]
    measured = _measured(training, predicted, comm, job)
    rows = []
    for found, seconds in zip(predicted, measured):
        layout = found.layout
        rows.append(
            {
                "network": job.case, "ranks": comm.size, "family": layout.family,
                "layout": " ".join(f"{k.partition('.')[2]}={v}" for k, v in layout.settings().items()),
                "predicted": found.seconds, "measured": seconds,
                "ratio": found.seconds / seconds,
            }
        )  # fmt: skip
    if comm.rank == 0:
        print(json.dumps({"rows": rows}))


def _predicted(planner: Planner, layout: MeshLayout) -> Prediction | None:
    """Return the prediction for a layout, or None if the network has too few layers for it."""
    try:
        return planner.predict(layout)
    except ValueError:
        return None


def _measured(
    training: PlannedTraining, predicted: Sequence[Prediction], comm, job: Job
) -> list[float]:
    """Return the seconds of the fastest step in each layout, with the stages of its prediction.

    The layouts take turns.
    """
    seconds = _cpu_time if job.cpu_time else RunningStep.seconds
    device = set_up(comm, "cpu", 1).device
    steps = [
        RunningStep(
            *training.step(found.layout, comm, device, _balance(found)), CountedComm(comm), device
        )
        for found in predicted
    ]
    rounds = [[seconds(step) for step in steps] for _ in range(job.repeats + 1)]
    return [min(found) for found in zip(*rounds[1:])]


def _balance(found: Prediction) -> tuple[int, ...] | None:
    return found.balance if found.layout.stages > 1 else None


def _cpu_time(step: RunningStep) -> float:
    """Run the step, and return the seconds of CPU time of the rank that computed longest."""
    began = time.thread_time()
    step.seconds()
    return max(step.comm.allgather(time.thread_time() - began))


def ranking(rows: Sequence[dict]) -> str:
    """Return how good the planner's first choice and its order of the measured layouts are.

    Each network on each number of ranks is a case, of the layouts that were drawn for it.

    Args:
        rows: the rows of the table.
    """
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        cases.setdefault((row["network"], row["ranks"]), []).append(row)
    over, orders = [], []
    for found in cases.values():
        measured = [row["measured"] for row in found]
        over.append(min(found, key=lambda row: row["predicted"])["measured"] / min(measured) - 1)
        if len(found) > 2:
            orders.append(rank_correlation([row["predicted"] for row in found], measured))
    text = (
        f"; the layout that is predicted to be fastest takes at most 5 % longer than the fastest in "
        f"{sum(each <= 0.05 for each in over)} of {len(over)} cases, {max(over):.1%} at most"
    )
    if orders:
        text += f"; rank correlation {mean(orders):.2f} ({min(orders):.2f} to {max(orders):.2f})"
    return text


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two lists of different numbers of equal length."""
    places = [{x: n for n, x in enumerate(sorted(each))} for each in (a, b)]
    squares = sum((places[0][x] - places[1][y]) ** 2 for x, y in zip(a, b))
    return 1 - 6 * squares / (len(a) * (len(a) ** 2 - 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--drawn", type=int, default=10, help="layouts of a network and a number of ranks"
    )
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, not time")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--job", type=str, default=None, help="a network: internal")
    options = parser.parse_args(arguments)
    if options.job:
        numbers = options.drawn, options.repeats, options.quick
        work(Job(options.job, *numbers, options.cpu_time, options.precision))
        return
    rows = []
    for case in list(CASES)[: 1 if options.quick else None]:
        for ranks in options.ranks:
            words = [
                "-m",
                "benchmarks.layouts",
                "--job",
                case,
                "--drawn",
                str(2 if options.quick else options.drawn),
            ]
            words += [
                "--repeats",
                str(repeats_of(options)),
                "--precision",
                options.precision,
                *(["--quick"] if options.quick else []),
                *(["--cpu-time"] if options.cpu_time else []),
            ]
            rows += run_ranks(ranks, words)["rows"]
    off = sorted(abs(row["ratio"] - 1) for row in rows)
    notes = (
        f"{'CPU ' * options.cpu_time}seconds of a step of two images, one thread a rank; predicted / measured - 1: median {median(off):.1%}, "
        f"95th percentile {off[int(0.95 * (len(off) - 1))]:.1%}, largest {off[-1]:.1%} of {len(rows)} layouts{ranking(rows)}"
    )
    name = "layouts_cpu_time" if options.cpu_time else "layouts"
    name += "_bf16" if options.precision == "bf16" else ""
    report(name, QUESTION, Rows(rows, {}), options, {}, notes)


if __name__ == "__main__":
    main()
