"""What checkpoints cost the training that writes them, and how long ranks take to their first step.

The same training runs without checkpoints inside its epoch and with many; the difference, for each of them, is what one costs. A job
of eight ranks and a single step has hardly more than its start; ``--against`` times that of another checkout beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import Reading, Results, measure, parent, repeats_of, report
from benchmarks.ranks import command, job_environment
from benchmarks.rows import Rows
from distseg.config.settings import TrainConfig

QUESTION = "What does a checkpoint cost the steps, and what does the start of a job take?"
ROOT = Path(__file__).resolve().parents[1]
WRITE_STORE = """
import sys
import numpy as np
from distseg.data.store.store import StoreWriter
from distseg.tiling.tile import Box
chance, size = np.random.default_rng(0), (512, 512)
with StoreWriter(sys.argv[1], ["a", "b", "c"], 3) as writer:
    image = writer.add_image("one", size, np.uint8, "train", True)
    image.write(Box.whole(size), chance.integers(0, 256, (3, *size)).astype(np.uint8), chance.integers(0, 3, size).astype(np.uint8))
"""
NETWORK = [
    "--model.depth",
    "4",
    "--model.num_convs",
    "2",
    "--model.base_channels",
    "32",
    "--model.norm",
    "batch",
]  # 4.5 million weights
COMMON = [
    "--optim.lr",
    "0.001",
    "--train.loggers",
    "[]",
    "--train.keep",
    "1000",
    "--run.threads",
    "1",
    "--mesh.reducer",
    "mpi",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--every",
        type=float,
        default=4.0,
        metavar="SECONDS",
        help="between checkpoints where there are many (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=8,
        help="of the job that is started only (default: %(default)s)",
    )
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="another checkout, whose start is timed too"
    )
    options = parser.parse_args(arguments)
    network, crop = NETWORK, "256x256"
    if options.quick:
        options.steps, options.every, options.ranks, network, crop = (
            4,
            0.1,
            2,
            ["--model.depth", "1", "--model.base_channels", "4"],
            "32x32",
        )
    with tempfile.TemporaryDirectory(prefix="distseg-checkpoints-") as folder:
        jobs = Jobs(Path(folder), [*network, "--data.crop", crop])
        written: list[int] = []
        often = [*_shape(options.steps), "--mesh.tiles", "1x2", "--train.checkpoint_minutes"]
        cost = measure({
            "none": lambda: Reading(jobs.steps(2, [*often, "1000"])[0]),
            "many": lambda: Reading(_counted(jobs.steps(2, [*often, str(options.every / 60)]), written)),
        }, repeats_of(options), warmup=0)  # fmt: skip
        checkouts = {"this": ROOT} | (
            {"before": options.against.resolve()} if options.against else {}
        )
        small = [
            "--model.depth",
            "1",
            "--model.base_channels",
            "4",
            "--data.crop",
            "32x32",
            "--mesh.samples",
            str(options.ranks),
            *_shape(options.ranks),
        ]
        starts = measure(
            {
                name: lambda root=root: jobs.run(options.ranks, small, root)
                for name, root in checkouts.items()
            },
            repeats_of(options),
            warmup=0 if options.quick else 1,
        )
        size = jobs.bytes
    rows = [
        _cost_row(cost, written, size),
        *(_start_row(name, options.ranks, starts) for name in checkouts),
    ]
    notes = (
        f"{options.steps} steps of two ranks on images of {crop}; many: one each {options.every:g} s, written beside the steps; share: of the steps between two checkpoints of the default, "
        f"train.checkpoint_minutes {TrainConfig().checkpoint_minutes:g}\nstart: from the command to its end, with a single step"
    )
    parameters = {
        "steps": options.steps,
        "every [s]": options.every,
        "network": network,
        "ranks": options.ranks,
    }
    report(
        "checkpoints",
        QUESTION,
        Rows(rows, {"cost": cost.as_dict(), "written": written, "start": starts.as_dict()}),
        options,
        parameters,
        notes,
    )


class Jobs:
    """Trainings on a store of random pixels, which each checkout writes itself: it may know another version."""

    def __init__(self, folder: Path, flags: list[str]):
        self.folder, self.flags, self.bytes = folder, flags, 0
        self._stores: dict[Path, Path] = {}

    def store(self, root: Path) -> Path:
        if root not in self._stores:
            self._stores[root] = self.folder / f"store-{len(self._stores)}.h5"
            subprocess.run(
                [sys.executable, "-c", WRITE_STORE, str(self._stores[root])],
                cwd=root,
                env=job_environment(1) | {"PYTHONPATH": str(root)},
                check=True,
            )
        return self._stores[root]

    def steps(self, ranks: int, flags: list[str]) -> tuple[float, int]:
        """Seconds from the first step's end to the last one's, and how many checkpoints were written meanwhile."""
        run = self.run(ranks, [*self.flags, *flags])
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        times = [entry["seconds"] for entry in log if entry["kind"] == "step"]
        written = list((run / "checkpoints").glob("step-*"))  # the last of them after the last step
        self.bytes = sum(path.stat().st_size for path in written[0].iterdir())
        return times[-1] - times[0], len(written) - 1

    def run(self, ranks: int, flags: list[str], root: Path = ROOT) -> Path:
        store, run = self.store(root), self.folder / f"run-{time.time_ns()}"
        argv = [
            "-m",
            "distseg",
            "train",
            "--data.store",
            str(store),
            "--train.output",
            str(run),
            "--train.epochs",
            "1",
            *COMMON,
            *flags,
        ]
        done = subprocess.run(
            command(ranks, argv),
            cwd=root,
            env=job_environment(1) | {"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(argv)} ended with status {done.returncode}:\n{done.stderr[-2000:]}"
            )
        return run


def _shape(samples: int) -> list[str]:
    return ["--data.epoch_samples", str(samples)]


def _counted(found: tuple[float, int], written: list[int]) -> float:
    written.append(found[1])
    return found[0]


def _cost_row(cost: Results, written: list[int], size: int) -> dict:
    each = [
        (many - none) / max(1, count)
        for none, many, count in zip(cost.samples["none"], cost.samples["many"], written)
    ]
    interval = 60 * TrainConfig().checkpoint_minutes
    return {
        "case": f"a checkpoint of {size / 1e6:.0f} MB", "ranks": 2, "checkpoints": median(written), "min [s]": min(each), "median [s]": median(each), "max [s]": max(each),
        "share of the steps [%]": 100 * median(each) / interval, "at most [%]": 100 * max(each) / interval,
    }  # fmt: skip


def _start_row(name: str, ranks: int, starts: Results) -> dict:
    spread, ratio = starts.spread(name), starts.ratio(name)
    return {
        "case": f"start and one step, {name}", "ranks": ranks, "min [s]": spread.min, "median [s]": spread.median, "max [s]": spread.max,
        "/ this": ratio.median, "from": ratio.min, "to": ratio.max,
    }  # fmt: skip


if __name__ == "__main__":
    main()
