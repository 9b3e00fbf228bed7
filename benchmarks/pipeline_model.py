"""Pipelines by arithmetic: the Summit paper's measurements beside our simulation, and the V placement beside contiguous stages.

Layer costs are modelled for a V100, schedules are simulated with links that carry activations, skips and their gradients.
A micro-batch is one window; a batch is split into micro-batches along its first dim, so m micro-batches are m windows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import parent, report
from benchmarks.rows import Rows
from distseg.config.settings import ModelConfig
from distseg.models.zoo import ZOO, outline_model
from distseg.planning.balance import fastest_split
from distseg.planning.cost import Costs, modelled
from distseg.planning.fold import v_split
from distseg.planning.held import Policy
from distseg.planning.live_tensors import NetworkTensors, TileSizes, TileTensors, stage_tensors
from distseg.planning.stage_memory import maps_of_stage
from distseg.planning.stage_report import tensors_of_stages
from distseg.planning.stages import stage_seconds
from distseg.report.style import FAINT, INK, PALETTE, new_figure
from distseg.report.tables import table
from distseg.runtime.partition import Edge, edges_between, stage_ranges
from distseg.runtime.schedule import orders, v_placement
from distseg.runtime.simulator import check, peak_memory, simulate
from distseg.runtime.stage_program import recomputed

QUESTION = "How far from the paper's speed-up by model parallelism is a simulation, and where does the V placement beat contiguous stages?"
GB = 1e9
LINKS = {"NVLink": 50 * GB, "100 Gbit/s": 12.5 * GB}
PAPER_BALANCE = {
    name: ZOO[name].balance for name in ("summit-small", "summit-medium-2")
}  # 6 stages
PAPER = {  # speed-up of 6 stages over 1; taken for summit-small's where our source names only the window
    ("summit-small", 1434): 1.97, ("summit-medium-2", 1434): 2.01,
    ("summit-small", 192): 2.8, ("summit-small", 512): 2.5, ("summit-small", 1024): 2.0,
}  # fmt: skip


class Network(NamedTuple):
    """Costs and tensors of a model for one window."""

    costs: Costs
    tensors: NetworkTensors

    def held(self, layers: range) -> float:
        """Return the bytes that a stage holds of a micro-batch between its two passes."""
        tensors = self.tensors
        whole = TileTensors(tensors, TileSizes.whole(len(tensors.layers)))
        maps = maps_of_stage(tensors.reads, layers)
        return stage_tensors(whole, layers, *maps, False).full

    def travels(self) -> np.ndarray:
        """Return the bytes that layers a..b-1 receive and send, there and back, in entry [a, b]."""
        layers = self.costs.layers
        found = np.zeros((len(layers) + 1, len(layers) + 1))
        for a in range(len(layers)):
            for b in range(a + 1, len(layers) + 1):
                maps = maps_of_stage(self.costs.inputs, range(a, b))
                found[a, b] = 2 * sum(layers[m - 1].output for each in maps for m in each if m)
        return found


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages that are held by ranks."""

    network: Network
    balance: tuple[int, ...]
    placement: tuple[int, ...]
    link: float = LINKS["NVLink"]  # bytes/s, from one rank to another

    @property
    def costs(self) -> Costs:
        return self.network.costs

    @property
    def ranges(self) -> list[range]:
        return stage_ranges(self.balance, len(self.costs.layers))

    @property
    def edges(self) -> list[Edge]:
        return edges_between(self.ranges, self.costs.inputs)

    def total(self, field: str) -> list[float]:
        """Of each stage."""
        return [sum(getattr(self.costs.layers[i], field) for i in layers) for layers in self.ranges]

    def bytes(self, edge: Edge) -> int:
        return self.costs.layers[edge.map - 1].output

    @property
    def travelling(self) -> int:
        """Bytes between ranks of one micro-batch, forward and backward."""
        return 2 * sum(
            self.bytes(e)
            for e in self.edges
            if self.placement[e.source] != self.placement[e.target]
        )

    @property
    def slowest(self) -> float:
        """The busiest rank's share of the work; 1 / share bounds the speed-up."""
        work = [f + b for f, b in zip(self.total("forward"), self.total("backward"))]
        return max(
            sum(w for w, r in zip(work, self.placement) if r == rank) for rank in self.placement
        ) / sum(work)

    def run(self, schedule: str, micro_batches: int, recompute: str = "never") -> dict:
        """Makespan [s], mean bubble, activations of the fullest rank and what a micro-batch moves [bytes]."""
        forward = self.total("forward")
        actions = orders(schedule, self.placement, micro_batches)
        check(actions, self.edges, self.placement, micro_batches)
        repeated = set().union(*(recomputed(order, recompute) for order in actions))
        again = lambda stage, m: forward[stage] * ((stage, m) in repeated)  # noqa: E731
        found = simulate(
            actions,
            self.edges,
            forward,
            self.total("backward"),
            self.placement,
            lambda e: self.bytes(e) / self.link,
            again,
        )
        held = max(peak_memory(actions, list(map(self.network.held, self.ranges))))
        return {
            "makespan": found.makespan,
            "bubble": sum(found.idle) / found.ranks,
            "held": held,
            "moved": self.travelling,
        }


@lru_cache
def network_of(model: str, window: int) -> Network:
    costs = modelled(outline_model(ModelConfig(model)), (window, window))
    return Network(costs, tensors_of_stages(model, (window, window), 1))


@lru_cache
def travels_of(network: Network) -> np.ndarray:
    return network.travels()


def contiguous(network: Network, ranks: int, link: float = LINKS["NVLink"]) -> list[Pipeline]:
    """With the splits whose slowest rank is fastest, messages not counted and counted."""
    seconds = stage_seconds(network.costs, Policy(), ranks)
    return [
        Pipeline(network, tuple(fastest_split(table, ranks)), tuple(range(ranks)), link)
        for table in (seconds, seconds + travels_of(network) / link)
    ]


def folded(network: Network, ranks: int, link: float = LINKS["NVLink"]) -> list[Pipeline]:
    """The same for the V."""
    costs = network.costs
    seconds = [f + b for f, b in zip(costs.forward, costs.backward)]
    travels = [None, [2 * layer.output / link for layer in costs.layers]]
    return [
        Pipeline(
            network, tuple(v_split(seconds, costs.skips, ranks, travel)), v_placement(ranks), link
        )
        for travel in travels
    ]


def best(
    pipelines: Sequence[Pipeline], schedule: str, micro_batches: int, recompute: str = "never"
) -> dict:
    return min(
        (pipeline.run(schedule, micro_batches, recompute) for pipeline in pipelines),
        key=lambda found: found["makespan"],
    )


def paper_rows(models: Sequence[str], windows: Sequence[int], most: int) -> list[dict]:
    """GPipe as torchgpipe runs it, recomputing all micro-batches but the last; speed-up of a window's seconds over one stage's."""
    rows = []
    for model in models:
        for window in windows:
            network = network_of(model, window)
            for stages in range(2, most + 1) if window == windows[0] else (most,):
                rows.append(_paper_row(model, window, "ours", contiguous(network, stages)))
            if model in PAPER_BALANCE:
                paper = [Pipeline(network, PAPER_BALANCE[model], tuple(range(6)))]
                rows.append(
                    _paper_row(model, window, "paper's", paper)
                    | {"paper": PAPER.get((model, window))}
                )
    return rows


def _paper_row(model: str, window: int, split: str, pipelines: Sequence[Pipeline]) -> dict:
    stages, one = len(pipelines[0].balance), contiguous(pipelines[0].network, 1)
    row = {
        "model": model,
        "window": window,
        "stages": stages,
        "split": split,
        "slowest": f"{min(p.slowest for p in pipelines):.1%}",
    }
    for text, m in (("m = 2", 2), ("m = 3", 3), ("m = 2 S", 2 * stages)):
        seconds = [
            best(p, "gpipe", count, "except_last")["makespan"] / count
            for p, count in ((one, 2), (pipelines, m))
        ]
        row[text] = round(seconds[0] / seconds[1], 2)
    return row | {"paper": None}


def v_rows(models: Sequence[str], window: int, ranks: Sequence[int], most: int) -> list[dict]:
    """Both placements with the same links, schedule and micro-batches, without recomputation."""
    rows = []
    for model in models:
        for count in ranks:
            for name, link in LINKS.items():
                pipelines = {
                    "S": contiguous(network_of(model, window), count, link),
                    "V": folded(network_of(model, window), count, link),
                }
                for schedule in ("gpipe", "1f1b"):
                    for m in range(1, most + 1):
                        rows.append(
                            {
                                "model": model,
                                "ranks": count,
                                "link": name,
                                "schedule": schedule,
                                "m": m,
                            }
                            | _compared(pipelines, schedule, m)
                        )
    return rows


def _compared(pipelines: dict[str, list[Pipeline]], schedule: str, m: int) -> dict:
    costs = pipelines["V"][0].costs
    one = m * sum(costs.forward + costs.backward)
    found = {name: best(candidates, schedule, m) for name, candidates in pipelines.items()}
    columns = {
        "speed-up": {name: round(one / run["makespan"], 2) for name, run in found.items()},
        "bubble": {name: f"{run['bubble']:.0%}" for name, run in found.items()},
        "moved": {name: f"{run['moved'] / GB:.2f} GB" for name, run in found.items()},
        "held": {name: f"{run['held'] / GB:.1f} GB" for name, run in found.items()},
    }
    row = {
        f"{name} {column}": value
        for column, values in columns.items()
        for name, value in values.items()
    }
    return row | {"V / S": round(found["V"]["makespan"] / found["S"]["makespan"], 3)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    options = parser.parse_args(arguments)
    models, windows, window, ranks, most = (
        list(PAPER_BALANCE),
        [1434, 192, 512, 1024],
        1434,
        (2, 3, 4, 6),
        16,
    )
    if options.quick:
        models, windows, window, ranks, most = ["demo"], [64], 64, (2, 3), 3
    first, second = paper_rows(models, windows, max(ranks)), v_rows(models, window, ranks, most)
    shown = [row for row in second if row["m"] in (min(4, most), 8, 16)]
    splits = {
        f"{model}, {count} ranks, {name}": [p.balance for p in make(network_of(model, window), count)]
        for model in models for count in ranks for name, make in (("S", contiguous), ("V", folded))
    }  # fmt: skip
    parameters = {
        "models": models, "windows": windows, "window of the V": window, "ranks": ranks, "costs": network_of(models[0], window).costs.source,
        "links [bytes/s]": LINKS, "splits": splits, "paper's splits": PAPER_BALANCE, "dtype": "float32",
    }  # fmt: skip
    notes = f"{table(shown)}\n\n{NOTES}"
    results = Rows(first, {"v": second})
    report(
        "pipeline_model",
        QUESTION,
        results,
        options,
        parameters,
        notes,
        lambda path: _plot(path, first, second),
    )


NOTES = """\
First table: gpipe, recompute except_last, NVLink; seconds a window, one stage with 2 micro-batches (one recomputed) over S stages with m; "2 S"
is "2 micro-batches a partition" read as 2 S in all; "paper" was measured. Second table: no recomputation; speed-up over one rank; S: contiguous
stages; bubble: idle share, mean of the ranks; moved: between ranks, a micro-batch, both ways; held: activations of the fullest rank, without
received skips that wait; V / S: makespans, below 1 the V is faster. Assumed: a kernel takes the longer of its arithmetic (11 TFLOP/s) and its
traffic (720 GB/s), no launch overhead; messages overlap computation, one at a time from rank to rank; no other limit of links. Splits: the
slowest rank as fast as can be, by computation or by computation and messages; the better one counts."""


def _plot(path: Path, first: list[dict], second: list[dict]) -> None:
    with new_figure(path, (15.0, 4.4), layout="constrained") as figure:
        axes = figure.subplots(1, 3)
        _plot_paper(axes[0], [row for row in first if row["window"] == first[0]["window"]])
        for axis, link in zip(axes[1:], LINKS):
            _plot_v(
                axis,
                [row for row in second if row["link"] == link and row["schedule"] == "1f1b"],
                link,
            )
        axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _plot_paper(axis, rows: list[dict]) -> None:
    for color, model in zip(PALETTE, dict.fromkeys(row["model"] for row in rows)):
        ours, theirs = (
            [r for r in rows if r["model"] == model and r["split"] == split]
            for split in ("ours", "paper's")
        )
        for text, line in (("m = 2", ":"), ("m = 2 S", "-")):
            axis.plot(
                [r["stages"] for r in ours],
                [r[text] for r in ours],
                line,
                color=color,
                marker="o",
                label=f"{model}, {text}",
            )
            axis.plot(
                [r["stages"] for r in theirs],
                [r[text] for r in theirs],
                "s",
                color=color,
                markerfacecolor="white",
            )
        axis.plot(
            [r["stages"] for r in theirs],
            [r["paper"] for r in theirs],
            "*",
            color=color,
            markersize=13,
            markeredgecolor=INK,
        )
    axis.plot([], [], "s", color=INK, markerfacecolor="white", label="the paper's split, simulated")
    axis.plot([], [], "*", color=INK, label="the paper, measured")
    axis.set(
        title=f"GPipe, window {rows[0]['window']}",
        xlabel="stages",
        ylabel="speed-up over one stage",
        ylim=(0, None),
    )
    axis.legend(loc="upper left", fontsize=8)


def _plot_v(axis, rows: list[dict], link: str) -> None:
    axis.axhline(1.0, color=FAINT, linewidth=1)
    for line, model in zip(("-", "--"), dict.fromkeys(row["model"] for row in rows)):
        for color, ranks in zip(PALETTE, dict.fromkeys(row["ranks"] for row in rows)):
            mine = [row for row in rows if (row["model"], row["ranks"]) == (model, ranks)]
            axis.plot(
                [r["m"] for r in mine],
                [r["V / S"] for r in mine],
                line,
                color=color,
                label=f"{model}, {ranks} ranks",
            )
    axis.set(
        title=f"V against contiguous, 1F1B, {link}",
        xlabel="micro-batches",
        ylabel="makespan, V / contiguous",
        ylim=(0.7, 1.2),
    )


if __name__ == "__main__":
    main()
