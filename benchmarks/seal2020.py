"""The planner beside the published times and layouts of Seal et al. 2020. Nothing is measured here, so it takes seconds.

They trained on 100 images of 10000 x 10000 x 4, each cut into 8x8 windows: an epoch of 6400 windows took about 12 s on 1200
V100 of Summit and about 1740 s on the 8 V100 of a DGX-1. The profiles ``summit-v100`` and ``dgx1-v100`` predict both times with
published numbers of the hardware. No number is fitted to these times, except where a row says so.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.harness import parent, report
from benchmarks.rows import Rows
from distseg.cli.planned_training import PlannedTraining
from distseg.config.settings import Config, DataConfig, ModelConfig, OptimConfig
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.zoo import outline_model
from distseg.planning.live_bytes import LiveBytes
from distseg.planning.machine import Machine, load_machine
from distseg.planning.mesh_layout import MeshLayout, Prediction
from distseg.planning.mesh_search import Planner

QUESTION = "What does the planner say about the trainings of Seal et al. 2020?"
SIDE, IMAGES, GRID, HALO = 10000, 100, 8, 92  # pixels, images, tiles a side, halo of the slides
WINDOW = SIDE // GRID + 2 * HALO
GPUS = {"summit-v100": 1200, "dgx1-v100": 8}
PUBLISHED = {"summit-v100": 12.0, "dgx1-v100": 1740.0}  # seconds of an epoch
NETWORKS = ("summit-small", "summit-medium-1", "summit-medium-2", "summit-large")
GUESSES = ("arithmetic", "traffic", "call", "latency", "link", "network")
EXACT_HALO = 190  # of the network of 72,301,856 parameters, which has five poolings


@dataclass(frozen=True)
class Training:
    """A network that is trained on images of one size, on one machine."""

    network: str
    side: int
    machine: Machine
    optimizer: str = "adam"
    images: int = 1

    def planner(self) -> Planner:
        """Return the planner of a step of ``images`` images."""
        config = Config(
            model=ModelConfig(name=self.network, in_channels=4, out_channels=2),
            data=DataConfig(images=1),
            optim=OptimConfig(name=self.optimizer),
        )
        model = as_network(outline_model(config.model))
        size = Size((self.side, self.side))
        work = PlannedTraining(config, model, size).work(self.machine, self.images)
        return Planner(work, self.machine)

    def plain_memory(self) -> float:
        """Return the bytes of a GPU on which a plain PyTorch program trains with AdamW.

        They are the tensors of a step, counted on the meta device, the optimizer's values, and what
        every process takes.
        """
        with torch.device("meta"):
            network = outline_model(ModelConfig(name=self.network, in_channels=4, out_channels=2))
            network = network.to("meta")
            images = torch.empty(self.images, 4, self.side, self.side)
            labels = torch.empty(self.images, self.side, self.side, dtype=torch.int64)
            with LiveBytes("meta") as counted:
                nn.functional.cross_entropy(network(images), labels).backward()
        weights = sum(p.numel() for p in network.parameters())
        return self.machine.base + counted.peak + 3 * 4 * weights + images.nbytes + labels.nbytes

    def alone(self) -> Prediction:
        """Return the prediction for one rank that computes a whole image."""
        one = Size((1, 1))
        return self.planner().predict(MeshLayout(1, one, 1, "all", 1, "1f1b", "never"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    options = parser.parse_args(arguments)
    lines = [
        *memory(options.quick),
        *epochs(),
        *sensitivity(options.quick),
        *layouts(options.quick),
    ]
    report("seal2020", QUESTION, Rows(lines), options, {"window": WINDOW}, notes=NOTES)


NOTES = (
    "Times are predictions of distseg's planner in float32. Seal et al. 2020 do not say their number type or optimizer. Memory "
    "is that of AdamW unless a row says SGD, with 1.2 GB for the context and workspaces. 'published' are figures of Seal et al. 2020."
)


def row(question: str, case: str, predicted: str, published: str = "") -> dict:
    return {"question": question, "case": case, "predicted": predicted, "published": published}


def memory(quick: bool) -> Iterator[dict]:
    """Yield a row for each grid of windows and each network: does it fit the memory of a V100?"""
    machine = load_machine("summit-v100")
    for grid in (8,) if quick else (7, 8, 9):
        for halo in (HALO, EXACT_HALO):
            side = math.ceil(SIDE / grid) + 2 * halo
            training = Training("summit-small", side, machine)
            found, plain = training.alone().memory, training.plain_memory()
            chosen = "8x8 was the best" if (grid, halo) == (GRID, HALO) else ""
            yield row(
                "memory of a window",
                f"{grid}x{grid} windows, halo {halo}: {side} x {side}",
                f"{found / 1e9:.1f} GB, {_fits(found, machine)}; plain PyTorch {plain / 1e9:.1f} GB, {_fits(plain, machine)}",
                chosen,
            )
    for network in NETWORKS[:1] if quick else NETWORKS:
        each = {}
        for optimizer in ("adam", "sgd"):
            each[optimizer] = Training(network, WINDOW, machine, optimizer).alone().memory
        words = ", ".join(f"{k} {v / 1e9:.1f} GB {_fits(v, machine)}" for k, v in each.items())
        yield row("memory of a network", f"{network}, {WINDOW} x {WINDOW}", words)


def _fits(size: float, machine: Machine) -> str:
    return "fits" if size <= machine.memory else "does not fit"


def rounds(gpus: int) -> int:
    """Return the number of windows that the busiest GPU computes in an epoch."""
    return math.ceil(IMAGES * GRID**2 / gpus)


def epoch(machine: Machine, gpus: int, window: float | None = None) -> float:
    """Return the predicted seconds of an epoch.

    Args:
        machine: the machine.
        gpus: number of GPUs, each with one window at a time.
        window: seconds of a window; by default the planner's.
    """
    training = Training("summit-small", WINDOW, machine)
    seconds = training.alone().seconds if window is None else window
    weights = 4.0 * training.planner().work.parameters
    return rounds(gpus) * (seconds + machine.sum(gpus, weights))


def epochs() -> Iterator[dict]:
    """Yield rows on the epoch of both machines: nothing fitted, then one number of the DGX-1."""
    found = {}
    for name, gpus in GPUS.items():
        found[name] = epoch(load_machine(name), gpus)
        published = PUBLISHED[name]
        factor = f"{published / found[name]:.2f} times as long"
        case = f"{gpus} V100, {rounds(gpus)} windows a GPU, nothing fitted"
        yield row("epoch", case, f"{found[name]:.1f} s", f"about {published:g} s, {factor}")
    ratio = found["dgx1-v100"] / found["summit-v100"]
    yield row("epoch", "ratio of the two machines", f"{ratio:.0f}", f"{1740 / 12:.0f}")
    fitted = PUBLISHED["dgx1-v100"] / rounds(GPUS["dgx1-v100"])
    blind = epoch(load_machine("summit-v100"), GPUS["summit-v100"], fitted)
    case = f"1200 V100, {fitted:.3f} s a window fitted to the DGX-1"
    yield row("epoch", case, f"{blind:.1f} s", "about 12 s")
    fewest = next(n for n in range(1, 1201) if rounds(n) == rounds(1200))
    yield row("epoch", "fewest GPUs with as many rounds as 1200", str(fewest))


def sensitivity(quick: bool) -> Iterator[dict]:
    """Yield the epoch on 1200 GPUs if a number of the profile is 30 % smaller or larger."""
    machine = load_machine("summit-v100")
    for name in GUESSES[:1] if quick else GUESSES:
        both = [epoch(machine.changed(name, factor), 1200) for factor in (0.7, 1.3)]
        case = f"{name} times 0.7 and 1.3 ({machine.kinds[name]})"
        yield row("sensitivity of the epoch", case, " and ".join(f"{s:.1f} s" for s in both))


def layouts(quick: bool) -> Iterator[dict]:
    """Yield the fastest exact layout of 18 images on 1152 GPUs, beside windows with the exact halo."""
    machine, images, ranks = load_machine("summit-v100"), 18, 1152
    if quick:
        images, ranks = 1, 64
    planner = Training("summit-small", SIDE, machine, images=images).planner()
    best = planner.best(ranks)[0]
    windows = MeshLayout(images, Size((8, 8)), 1, "all", 1, "1f1b", "never")
    read = planner.predict(windows)
    case = f"{images} images of {SIDE} x {SIDE} on {ranks} V100"
    yield row("fastest exact layout", case, f"{_words(best.layout)}: {best.seconds:.2f} s a step")
    gain = read.seconds / best.seconds
    words = f"{read.seconds:.2f} s, {gain:.2f} times as long, {_fits(read.memory, machine)}"
    yield row("fastest exact layout", "8x8 windows with the exact halo instead", words)


def _words(layout: MeshLayout) -> str:
    return (
        f"samples {layout.samples}, tiles {layout.tiles}, stages {layout.stages}, "
        f"exchange_every {layout.exchange}"
    )


if __name__ == "__main__":
    main()
