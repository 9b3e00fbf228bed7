"""What tiles pay for their borders, from an exchange before every layer to windows that are read with their halos and exchange nothing.

Rare exchanges save messages, but margins eaten by several layers are computed by several ranks: what is best depends on the tile and
on the machine. Counts are arithmetic on the layouts that a step runs by; a model of two machines and steps on this one turn them into time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from torch import nn

from benchmarks.harness import Reading, Results, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import Setting, arguments_of, fastest_step
from distseg.comm.halo import copies_to
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.layers.graph import graph_of, receptive_field
from distseg.models.zoo import outline_model
from distseg.planning.layerwise import alone, random_input
from distseg.report.style import PALETTE, new_figure
from distseg.runtime.exchange import Exchange
from distseg.tiling.layout import Layout
from distseg.tiling.tile import Box, window

QUESTION = "What does each number of layers between exchanges cost, in work, bytes, messages, time and memory, and where is the best?"
EVERY = ("1", "2", "4", "8", "level", "all")
GRID, MIDDLE = Size((3, 3)), (1, 1)
MODEL, SIZES = (
    "summit-small",
    (64, 128, 256, 512, 1024, 1440),
)  # the paper's 1434 on the stride grid
MEASURED, MEASURED_SIZES = (
    Setting(depth=3, num_convs=2, base_channels=16, norm="instance"),
    [64, 128, 256, 384],
)
GRIDS = [Size((1, 2)), Size((2, 2))]  # of a rank a tile
MB, FLOAT = 1e6, 4
_COLORS = dict(zip(EVERY, (*PALETTE[:5], PALETTE[7])))


@dataclass(frozen=True)
class Machine:
    """What a rank sustains: FLOP/s of convolutions, seconds that a message takes whatever its size, and bytes/s each way."""

    name: str
    flops: float
    latency: float
    bandwidth: float


# A core of this machine, messages through shared memory; the paper's GPU on a link of 100 Gbit/s: 5 us a message, 20 us for kernels that pack and unpack.
MACHINES = (Machine("CPU core", 90e9, 1e-5, 4e9), Machine("V100", 12e12, 2.5e-5, 10e9))


@dataclass(frozen=True)
class Cost:
    """Of one tile and a step; arithmetic of its forward pass."""

    own: int  # multiply-adds on the cells that the tile owns
    made: int  # on those that it computes
    exchanges: int = 0  # of a forward pass
    messages: int = 0  # that arrive, forward and backward
    bytes: int = 0  # of them
    whole: int = 0  # of windows: multiply-adds if every layer computed all of them
    read: int = 0  # of windows: bytes of the pixels beyond the tile

    def seconds(self, machine: Machine) -> float:
        """The backward pass is taken to be two forward passes; nothing overlaps."""
        return (
            3 * 2 * self.made / machine.flops
            + self.messages * machine.latency
            + self.bytes / machine.bandwidth
        )


class Network:
    """A flat model as arithmetic sees it: ``channels`` of each layer's input, ``multiply_adds`` of each convolution for a cell of its result."""

    def __init__(self, config: ModelConfig):
        model = outline_model(config)
        self.graph, self.reach = graph_of(model), receptive_field(model)
        self.channels: list[int] = []
        self.multiply_adds: list[int] = []
        for _, call in alone(model, random_input(model, (256, 256), 1, "meta")):
            self.channels.append(call.inputs[0].shape[1])
            self.multiply_adds.append(
                call.layer.weight.numel() if isinstance(call.layer, nn.Conv2d) else 0
            )
            call.forward()

    def layout(self, every: str, image: Sequence[int], grid: Sequence[int]) -> Layout:
        return Exchange(self.graph, self.reach.stride, grid=grid, every=every).layout(image)

    def choices(self, wanted: Sequence[str], image: Size, grid: Size) -> dict[str, str]:
        """Settings by what they are called here: those that exchange before the same layers are one."""
        found: dict[frozenset[int], list[str]] = {}
        for every in wanted:
            found.setdefault(self.layout(every, image, grid).points, []).append(every)
        return {" = ".join(names): names[0] for names in found.values()}

    def cost(self, every: str, image: Size, grid: Size, cell: tuple[int, ...]) -> Cost:
        layout = self.layout(every, image, grid)
        own = self._work(layout.owned(layer + 1, cell) for layer in range(len(self.graph)))
        made = self._work(layout.part(layer, cell).output for layer in range(len(self.graph)))
        if every == "all":
            tile = layout.part(0, cell).owned
            read = window(tile, image, self.reach)
            whole = self.cost("1", Size(read.size), Size((1, 1)), (0, 0)).own
            return Cost(
                own, made, whole=whole, read=(read.pixels - tile.pixels) * self.channels[0] * FLOAT
            )
        # Pixels need no gradient, so nothing returns of what the first layer got.
        arriving = [
            (layer, copy)
            for layer in layout.points
            for copy in copies_to(cell, *layout.spans(layer)) * (2 if layer else 1)
        ]
        return Cost(
            own,
            made,
            len(layout.points),
            len(arriving),
            sum(copy.box.pixels * self.channels[layer] * FLOAT for layer, copy in arriving),
        )

    def _work(self, boxes: Iterable[Box]) -> int:
        return sum(each * box.pixels for each, box in zip(self.multiply_adds, boxes))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=MEASURED_SIZES,
        metavar="T",
        help="of measured tiles, or none (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="undisturbed steps of a job; the fastest counts (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds a job waits for a quiet machine (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    sizes, setting, grids, wanted = SIZES, MEASURED, GRIDS, EVERY
    if options.quick:
        sizes, setting, grids, wanted = (
            SIZES[:2],
            Setting(depth=1, num_convs=1, base_channels=4),
            GRIDS[:1],
            ("1", "all"),
        )
        options.sizes, options.repeats, options.steps, options.patience = [32], 1, 1, 0.0
    network = Network(ModelConfig(MODEL))
    modelled = [row for size in sizes for row in modelled_rows(network, size, wanted)]
    measured, samples = [], {}
    for grid, size in product(grids, options.sizes):
        rows, results = measured_rows(setting, grid, size, wanted, options)
        measured, samples[f"{grid} tiles of {size}"] = measured + rows, results.as_dict()
        print(f"{grid} tiles of {size}: measured", file=sys.stderr, flush=True)
    parameters = {
        "model": MODEL, "grid": str(GRID), "machines": [vars(machine) for machine in MACHINES], "measured": setting.as_dict(),
        "measured grids": list(map(str, grids)), "steps": options.steps, "dtype": "float32",
    }  # fmt: skip
    notes, plot = _notes(modelled, setting), lambda path: _plot(path, modelled, measured)
    report(
        "halo",
        QUESTION,
        Rows(modelled + measured, {"samples": samples}),
        options,
        parameters,
        notes,
        plot,
    )


def modelled_rows(network: Network, size: int, wanted: Sequence[str]) -> list[dict]:
    """Of the tile in the middle of a grid, on the modelled machines."""
    image = Size(n * size for n in GRID)
    costs = {
        name: network.cost(every, image, GRID, MIDDLE)
        for name, every in network.choices(wanted, image, GRID).items()
    }
    best = {machine: min(cost.seconds(machine) for cost in costs.values()) for machine in MACHINES}
    times = {
        name: {
            f"{machine.name} / best": cost.seconds(machine) / best[machine] for machine in MACHINES
        }
        for name, cost in costs.items()
    }
    return [_row(f"{GRID} tiles", size, name, cost) | times[name] for name, cost in costs.items()]


def measured_rows(
    setting: Setting, grid: Size, size: int, wanted: Sequence[str], options: argparse.Namespace
) -> tuple[list[dict], Results]:
    """Of a tile a rank, all of which lie in a corner of the image or at one of its sides."""
    setting = replace(setting, size=Size(n * size for n in grid), tiles=grid)
    network = Network(setting.config().model)
    chosen = {
        name: replace(setting, exchange_every=every)
        for name, every in network.choices(wanted, setting.size, grid).items()
    }
    peaks: dict[str, int] = {}  # bytes
    cases = {
        name: lambda name=name: _seconds(name, chosen[name], options, peaks) for name in chosen
    }
    results, rows = measure(cases, repeats_of(options), warmup=0, baseline="all"), []
    for name in chosen:
        spread, ratio = results.spread(name), results.ratio(name)
        row = _row(
            f"{grid.volume} ranks",
            size,
            name,
            network.cost(chosen[name].exchange_every, setting.size, grid, (0, 0)),
        )
        row |= {
            "min [s]": spread.min,
            "median [s]": spread.median,
            "/ all": ratio.median,
            "from": ratio.min,
            "to": ratio.max,
        }
        rows.append(
            row
            | {"memory / all": peaks[name] / peaks["all"] if size == max(options.sizes) else None}
        )
    return rows, results


def _seconds(
    name: str, setting: Setting, options: argparse.Namespace, peaks: dict[str, int]
) -> Reading:
    """Of a job; its peak of memory goes to ``peaks``."""
    given = [
        *arguments_of(setting),
        "--steps",
        str(options.steps),
        "--patience",
        str(options.patience),
        *["--reducer", "mpi"] * options.quick,
    ]
    # The harness's own HOROVOD_CYCLE_TIME would burn a core's time; distseg's default for CPUs counts.
    found = run_ranks(setting.tiles.volume, given, environment={"HOROVOD_CYCLE_TIME": "20"})
    if not found["undisturbed"]:
        print(
            f"{setting.tiles} tiles, {name}: no step of {len(found['every'])} was undisturbed; is the machine in use?",
            file=sys.stderr,
            flush=True,
        )
    peaks[name] = found["memory"]
    return Reading(fastest_step(found))


def _row(case: str, size: int, name: str, cost: Cost) -> dict:
    return {
        "case": case, "tile": size, "every": name, "exchanges": cost.exchanges, "messages": cost.messages, "MB": cost.bytes / MB,
        "work": cost.made / cost.own, "whole": cost.whole / cost.own or None, "more read [MB]": cost.read / MB or None,
    }  # fmt: skip


def _notes(modelled: list[dict], setting: Setting) -> str:
    machines = "; ".join(
        f"{m.name} {m.flops:.3g} FLOP/s, {m.latency:.3g} s a message, {m.bandwidth:.3g} B/s"
        for m in MACHINES
    )
    best = "; ".join(
        f"{m.name} "
        + ", ".join(
            f"{row['tile']}: {row['every']}" for row in modelled if row[f"{m.name} / best"] == 1
        )
        for m in MACHINES
    )
    return f"""\
every: layers that look beyond their tile, from one exchange to the next (spatial.exchange_every); a = b: the same layers; all: windows
messages, MB: float32, arriving at a tile in a step, forward and backward (as much leaves), but for norms and the sum of gradients, alike for all
work: multiply-adds of all convolutions over those on own cells; whole: of windows, if layers computed more than later layers look at, as they need not
more read: the window without the tile; for T up to 128 the window of {MODEL} ends at the border of the image, in a larger one it would not
{GRID} tiles: the middle one, {MODEL}; seconds = 6 x multiply-adds / FLOP/s + messages x latency + bytes / bandwidth, nothing overlapped;
{machines}
best there: {best}
ranks: measured, U-Net of depth {setting.depth}, {setting.num_convs} convs a level, base {setting.base_channels}, a tile and a thread a rank; of each job the
fastest of a few steps while nobody else used the machine; / all: within a turn, median and range; the 4 ranks share 2 cores, so one computes
while another waits; memory: the largest rank's peak resident set above the one before the first step; glibc keeps freed blocks, which count"""


def _plot(path: Path, modelled: list[dict], measured: list[dict]) -> None:
    per_pixel = lambda row, key: (row[key] or 0) * MB / row["tile"] ** 2 or None  # noqa: E731
    with new_figure(path, (12.0, 8.5), layout="constrained") as figure:
        (work, moved), (times, model) = figure.subplots(2, 2)
        _lines(work, modelled, lambda row: row["work"])
        _lines(work, modelled, lambda row: row["whole"], ":", " (whole windows)")
        work.set(
            title=f"Work, {MODEL}, middle of {GRID} tiles",
            ylabel="multiply-adds / those on own cells",
            yscale="log",
        )
        _lines(moved, modelled, lambda row: per_pixel(row, "MB"))
        _lines(
            moved,
            modelled,
            lambda row: per_pixel(row, "more read [MB]"),
            ":",
            " (read, not exchanged)",
        )
        moved.set(title="Bytes that arrive in a step", ylabel="bytes / own pixel", yscale="log")
        pair = [row for row in measured if row["case"] == "2 ranks"]
        _lines(times, pair, lambda row: row["/ all"], ranges=True)
        times.set(
            title="Measured time of a step, 2 ranks, a smaller U-Net",
            ylabel="seconds / seconds of windows (all)",
        )
        for machine, style in zip(MACHINES, ("-", "--")):
            _lines(
                model,
                modelled,
                lambda row: row[f"{machine.name} / best"],
                style,
                f", {machine.name}",
            )
        model.set(
            title=f"Modelled time of a step, {MODEL}",
            ylabel="seconds / seconds of the best",
            yscale="log",
        )
        for axis, rows in ((work, modelled), (moved, modelled), (times, pair), (model, modelled)):
            _finish(axis, sorted({row["tile"] for row in rows}))


def _lines(
    axis,
    rows: list[dict],
    value: Callable[[dict], float | None],
    style: str = "-",
    more: str = "",
    ranges: bool = False,
) -> None:
    """One for each setting, over the tile's size; rows without a value are left out."""
    for name in dict.fromkeys(row["every"] for row in rows if value(row) is not None):
        mine, color = [row for row in rows if row["every"] == name], _COLORS[name.split(" = ")[0]]
        axis.plot(
            [row["tile"] for row in mine],
            list(map(value, mine)),
            style,
            color=color,
            marker="o",
            markersize=4,
            label=name + more,
        )
        if ranges:
            axis.vlines(
                [row["tile"] for row in mine],
                [row["from"] for row in mine],
                [row["to"] for row in mine],
                color=color,
            )


def _finish(axis, sizes: list[int]) -> None:
    from matplotlib.ticker import LogLocator

    if not sizes:
        return axis.set_axis_off()
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, list(map(str, sizes)))
    if axis.get_yscale() == "log":
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.minorticks_off()
    axis.set_xlabel("tile's side T [pixels]")
    axis.legend(title="exchange before every", fontsize=8, title_fontsize=8, handlelength=3)


if __name__ == "__main__":
    main()
