"""Weak scaling of summit-small, the network of 72 million parameters of Seal et al. 2020, simulated: one image of 10000 x 10000 for each 72 GPUs.

Nothing is measured here. The simulation (distseg.planning.step_simulation) has the profile ``summit-v100``, shared links, and one effect at
a time that a machine of this size may have. Numbers that nobody published for Summit are given as ranges.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import parent, report
from benchmarks.rows import Rows
from benchmarks.seal2020 import SIDE, Training
from distseg.config.sizes import Size
from distseg.planning.cluster import Cluster
from distseg.planning.machine import load_machine
from distseg.planning.mesh_layout import MeshLayout
from distseg.planning.mesh_search import Planner
from distseg.planning.step_simulation import Noise, SimulatedStep, simulate_step
from distseg.report.style import PALETTE, new_figure

QUESTION = "How does a step of summit-small on images of 10000 x 10000 scale to 27,648 GPUs of Summit and beyond, and what breaks first?"
GRID, RANKS = Size((8, 9)), (72, 1152, 6912, 27648, 100008)  # an image fills 12 nodes of 6 GPUs
NODES_OF_A_SWITCH = 18


@dataclass(frozen=True)
class Effect:
    """Features of a machine that its profile does not have.

    Attributes:
        name: words for the table.
        cluster: numbers of :class:`Cluster`.
        noise: random delays.
        bucket: bytes of gradients that are summed during the backward pass.
    """

    name: str
    cluster: dict = field(default_factory=dict)
    noise: Noise | None = None
    bucket: float | None = None


BASE = Effect("nothing else")
EFFECTS = (
    BASE,
    Effect("sums at 20 GB/s a node", dict(sum_network=20e9)),
    Effect("sums at 10 GB/s a node", dict(sum_network=10e9)),
    Effect("sums over one ring", dict(sums="ring")),
    Effect("cables between switches 4 times as slow as the cards", dict(contention=4.0)),
    Effect("file system of 2.5 TB/s, uint8 images", dict(storage=2.5e12)),
    Effect("file system of 0.25 TB/s, uint8 images", dict(storage=0.25e12)),
    Effect("each computation varies by 5 %", noise=Noise(spread=0.05, steps=5)),
    Effect("1 rank in 1000 is 20 % slower", noise=Noise(stragglers=0.001, slower=1.2, steps=5)),
    Effect("gradients summed during the backward pass, 25 MB each", bucket=25e6),
)


def simulated(planner: Planner, layout: MeshLayout, effect: Effect) -> SimulatedStep:
    """Return the simulated step of a layout with one effect."""
    numbers = dict(switch=NODES_OF_A_SWITCH) | effect.cluster
    cluster = Cluster(planner.machine, layout.ranks, **numbers)
    balance = (len(planner.work.costs.layers),)
    step = planner.work, planner.grids, layout, balance
    return simulate_step(*step, cluster, effect.noise, effect.bucket)


def rows_of(
    network: str, side: int, grid: Size, ranks: Sequence[int], exchange: str
) -> Iterator[dict]:
    """Yield a row for each effect and number of ranks.

    The efficiency is the time of the fewest ranks without any effect over the time of the row.
    """
    machine, first = load_machine("summit-v100"), None
    planner = Training(network, side, machine).planner()  # a rank has as much work in every job
    for effect in EFFECTS:
        for number in ranks:
            layout = MeshLayout(number // grid.volume, grid, 1, exchange, 1, "1f1b", "never")
            before = time.perf_counter()
            found = simulated(planner, layout, effect)
            first = first or found.median
            lost = {kind: s for kind, s in found.parts.items() if kind != "computing"}
            worst = max(lost, key=lost.__getitem__)
            yield {
                "effect": effect.name,
                "ranks": number,
                "step [s]": found.median,
                "efficiency [%]": 100 * first / found.median,
                "besides computing": f"{worst} {lost[worst]:.3f} s",
                "ranks simulated": found.simulated,
                "simulated in [s]": time.perf_counter() - before,
            }


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)]).parse_args(
        arguments
    )
    network, side, grid, ranks, exchange = "summit-small", SIDE, GRID, RANKS, "level"
    if options.quick:
        side, grid, ranks = 512, Size((1, 2)), (2, 12)
    rows = list(rows_of(network, side, grid, ranks, exchange))
    parameters = {
        "network": network,
        "image": f"{side}x{side}",
        "tiles": str(grid),
        "exchange": exchange,
    }
    report(
        "weak_scaling",
        QUESTION,
        Rows(rows),
        options,
        parameters,
        NOTES,
        lambda path: plot(path, rows),
    )


NOTES = (
    "Simulated in float32 with the profile summit-v100, not measured. One effect at a time; the efficiency compares with the fewest ranks "
    "without any effect. Guesses: latency, 5 %, stragglers, and the cables' factor. 'besides computing': the largest other part of the "
    "chain of tasks that determines the step without random delays. An all-reduce of Summit was published by nobody we know of, so its "
    "bytes/s are a range of 10 to 20 GB/s a node."
)


def plot(path: Path, rows: list[dict]) -> None:
    with new_figure(path, (9.0, 4.4), layout="constrained") as figure:
        axis = figure.subplots()
        for number, effect in enumerate(dict.fromkeys(row["effect"] for row in rows)):
            mine = [row for row in rows if row["effect"] == effect]
            axis.plot(
                [row["ranks"] for row in mine],
                [row["efficiency [%]"] for row in mine],
                ":" if number >= len(PALETTE) else "-",
                color=PALETTE[number % len(PALETTE)],
                marker="o",
                label=effect,
            )
        axis.set_xscale("log")
        axis.set_ylim(0, 108)
        axis.set_xlabel("GPUs")
        axis.set_ylabel("efficiency [%]")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


if __name__ == "__main__":
    main()
