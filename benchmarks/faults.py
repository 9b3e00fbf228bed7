"""Does a run survive anything that can happen to one of its ranks?

Each trial starts a small training on some mesh, lets one rank be killed, stopped or signalled at some place or moment, and asks: did
the whole job end in time, is the rank named, is nothing left running, does the run go on with --train.resume true, and is the loss
curve in its log that of a run without a fault, bit for bit? Then runs are stopped on one mesh and go on on another: to 1e-12.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.harness import parent, report
from benchmarks.ranks import command, job_environment
from benchmarks.rows import Rows
from distseg.data.store.store import StoreWriter
from distseg.tiling.tile import Box

QUESTION = "Does a run whose rank is killed, stopped or signalled anywhere end in time, name it, and go on as if nothing had happened?"
GRACE = 5.0  # s that the end of a job may take after that
MESHES = {  # name: (ranks, flags)
    "1": (1, []),
    "2 samples": (2, ["--mesh.samples", "2", "--data.images", "1"]),
    "1x2 tiles": (2, ["--mesh.tiles", "1x2"]),
    "2 stages": (
        2,
        [
            "--mesh.stages",
            "2",
            "--train.accumulate",
            "2",
            "--data.images",
            "1",
            "--spatial.norm_scope",
            "group",
            "--model.norm",
            "instance",
        ],
    ),
    "2x2 tiles": (4, ["--mesh.tiles", "2x2"]),
    "3x1 tiles, exchange": (3, ["--mesh.tiles", "3x1", "--spatial.exchange_every", "1"]),
    "2 samples x 1x2 tiles, MPI": (
        4,
        [
            "--mesh.samples",
            "2",
            "--mesh.tiles",
            "1x2",
            "--data.images",
            "1",
            "--mesh.reducer",
            "mpi",
        ],
    ),
    "1x2 tiles x 2 stages": (4, ["--mesh.tiles", "1x2", "--mesh.stages", "2"]),
    "1x2 tiles, in time": (2, ["--mesh.tiles", "1x2", "--streaming.tiles", "2x1"]),
    "2 samples x 1x2 tiles x 2 stages": (
        8,
        ["--mesh.samples", "2", "--mesh.tiles", "1x2", "--mesh.stages", "2", "--data.images", "1"],
    ),
}
PLACES = {  # what a rank says of itself: how often it is said, about
    "reading its settings": 1, "connecting the ranks": 1, "import of torch.nn": 30, "opening the store": 1, "building the network": 1, "start of what sums gradients": 1,
    "weights to all replicas": 1, "epoch 1, step": 6, "epoch 2, step": 6, "forward of stage": 12, "backward of stage": 12, "sum of the gradients": 12,
    "comparison of the replicas": 6, "a sum over": 6, "checkpoint": 2, "validation after": 2, "evaluation of image": 3, "waiting for all ranks to end": 1,
}  # fmt: skip
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1", "SIGUSR2")
CONFIG = """\
model: {depth: 2, num_convs: 1, base_channels: 4, norm: batch, dropout: 0.1}
spatial: {norm_scope: step}
data: {store: store.h5, crop: 32x32, epoch_samples: 12, images: 2, augment: [flip]}
optim: {lr: 0.01}
train: {epochs: 2, checkpoint_minutes: 0.01, check_replicas: 2, loggers: [], precision: fp64}
run: {threads: 1}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument("--trials", type=int, default=110, help="faults (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=30, help="changes of mesh (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=8.0, help="run.timeout, in seconds (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--transport", default="mpi", choices=("mpi", "torch"), help="mpirun, or torchrun with gloo"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.trials, options.pairs, options.limit = 1, 0, 60.0
    with tempfile.TemporaryDirectory(prefix="distseg-faults-") as folder:
        bench = Bench(Path(folder), random.Random(options.seed), options.limit, options.transport)
        trials = [
            bench.trial(fault)
            for fault in bench.faults(
                options.trials, ["1x2 tiles"] if options.quick else list(MESHES)
            )
        ]
        pairs = [bench.change(*pair) for pair in bench.pairs(options.pairs)]
    rows = [*summary(trials), _pairs_row(pairs)]
    notes = f"Limit {options.limit:g} s; a stopped or hanging job has to end within {GRACE:g} s after it. Each resumed run's log is compared with that of a run without a fault."
    report(
        "faults" if options.transport == "mpi" else "faults_torch",
        QUESTION,
        Rows(rows, {"trials": trials, "pairs": pairs}),
        options,
        {
            "trials": options.trials,
            "pairs": options.pairs,
            "seed": options.seed,
            "transport": options.transport,
        },
        notes,
    )
    if any(trial["wrong"] for trial in trials) or any(pair["error"] > 1e-12 for pair in pairs):
        sys.exit(1)


class Bench:
    """A folder with a store, whole runs to compare with, and the trials."""

    def __init__(self, folder: Path, chance: random.Random, limit: float, transport: str):
        self.folder, self.chance, self.limit, self.transport = folder, chance, limit, transport
        self._whole, self._numbers = {}, count()
        (folder / "config.yaml").write_text(CONFIG)
        _write_store(folder / "store.h5")

    def faults(self, trials: int, meshes: list[str]) -> list[dict]:
        """Every place with a kill and a stop first, then moments at random; meshes in turn."""
        places = [(place, how) for place in PLACES for how in ("SIGKILL", "SIGSTOP")]
        found = []
        for number in range(trials):
            mesh = meshes[number % len(meshes)]
            ranks = MESHES[mesh][0]
            if number % 5 < 3 and places:
                place, how = places.pop(self.chance.randrange(len(places)))
                found.append(
                    {
                        "mesh": mesh,
                        "rank": self.chance.randrange(ranks),
                        "place": place,
                        "count": self.chance.randint(1, PLACES[place]),
                        "signal": how,
                    }
                )
            else:
                how = self.chance.choice(SIGNALS)
                found.append(
                    {
                        "mesh": mesh,
                        "rank": self.chance.randrange(ranks),
                        "place": "epoch 1, step",
                        "count": 1,
                        "after": self.chance.uniform(0.01, 2.0),
                        "signal": how,
                    }
                )
        return found

    def pairs(self, number: int) -> list[tuple[str, str]]:
        """Meshes of one batch norm's scope, and so of one gradient."""
        alike = [name for name in MESHES if name != "2 stages"]
        every = [(a, b) for a in alike for b in alike if a != b]
        self.chance.shuffle(every)
        return every[:number]

    def trial(self, fault: dict) -> dict:
        """One fault, and what became of it."""
        whole = self.whole(fault["mesh"])
        run = self.folder / f"trial-{next(self._numbers)}"
        run.mkdir()
        began = time.time()
        code, said = self._train(fault["mesh"], run, fault)
        ended = time.time()
        struck = float((run / "fault").read_text() or 0) if (run / "fault").exists() else None
        wrong = _judge(fault, code, said, struck, ended, self.limit, self.transport)
        tries = 0
        while code != 0 and tries < 3:
            code, said = self._train(fault["mesh"], run)
            tries += 1
        if code != 0:
            wrong.append(f"it did not go on (status {code}): {said[-300:]}")
        elif self.curve(run) != whole:
            wrong.append("the loss curve is another")
        if left := _left(run):
            wrong.append(f"processes are left: {left}")
        result = {
            **fault,
            "seconds": None if struck is None else round(ended - struck, 2),
            "whole": round(ended - began, 1),
            "struck": struck is not None,
            "wrong": wrong,
        }
        print(json.dumps(result), file=sys.stderr, flush=True)
        return result

    def change(self, first: str, second: str) -> dict:
        """A run that ends on one mesh and goes on on another."""
        whole, run = self.whole(first), self.folder / f"pair-{next(self._numbers)}"
        run.mkdir()
        fault = {
            "rank": 0,
            "place": "epoch 1, step",
            "count": self.chance.randint(2, 5),
            "signal": "SIGUSR2",
        }
        code, said = self._train(first, run, fault)
        if code in (_continued(self.transport), 0):
            code, said = self._train(second, run)
        found = self.curve(run)
        same = code == 0 and [row[:2] for row in found] == [row[:2] for row in whole]
        error = (
            max(
                (abs(a[2] - b[2]) / abs(b[2]) for a, b in zip(found, whole) if a[2] is not None),
                default=1.0,
            )
            if same
            else 1.0
        )
        result = {
            "from": first,
            "to": second,
            "error": error,
            **({} if same else {"said": said[-300:]}),
        }
        print(json.dumps(result), file=sys.stderr, flush=True)
        return result

    def whole(self, mesh: str) -> list:
        """The curve of a run without a fault."""
        if mesh not in self._whole:
            run = self.folder / f"whole-{len(self._whole)}"
            run.mkdir()
            code, said = self._train(mesh, run)
            if code:
                raise ValueError(f"a run without a fault on {mesh} ended with {code}:\n{said}")
            self._whole[mesh] = self.curve(run)
        return self._whole[mesh]

    def curve(self, run: Path) -> list:
        lines = [json.loads(line) for line in (run / "run/log.jsonl").read_text().splitlines()]
        return [
            (e["kind"], e["step"], e.get("loss"), e.get("gradient_norm"), e.get("iou"))
            for e in lines
            if e["kind"] in ("step", "validation")
        ]

    def _train(self, mesh: str, run: Path, fault: dict | None = None) -> tuple[int, str]:
        ranks, flags = MESHES[mesh]
        if self.transport == "torch":
            flags = [flag if flag != "mpi" else "torch" for flag in flags]
        never = {"rank": -1, "place": "", "count": 0, "signal": "SIGKILL"}
        program = [
            "-m",
            "benchmarks.faulty",
            str(run),
            json.dumps(fault or never),
            "train",
            str(self.folder / "config.yaml"),
        ]
        more = [
            "--data.store",
            str(self.folder / "store.h5"),
            "--train.output",
            str(run / "run"),
            "--train.resume",
            "true",
            "--run.timeout",
            str(self.limit),
        ]
        done = subprocess.run(
            command(ranks, [*program, *flags, *more], self.transport),
            env=job_environment(1) | {"HOROVOD_CYCLE_TIME": "5"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout + done.stderr


def _continued(transport: str) -> int:
    """Return the exit status of a job that ends early and can be resumed.

    distseg's status is 75. torchrun turns the status of its ranks into 1.
    """
    return 75 if transport == "mpi" else 1


def _judge(
    fault: dict,
    code: int,
    said: str,
    struck: float | None,
    ended: float,
    limit: float,
    transport: str,
) -> list[str]:
    """Return what is wrong with the end of a job that met with a fault."""
    if transport == "torch":  # torchrun's own report of a rank that failed
        said = said.partition('Traceback (most recent call last):\n  File "<frozen runpy>')[0]
    how, wrong = fault["signal"], []
    if struck is None:
        return (
            []
            if code == 0
            else [f"the fault never came, and yet the status is {code}: {said[-300:]}"]
        )
    seconds = ended - struck
    if how == "SIGSTOP":
        if (
            code == 0
            or "run.timeout" not in said
            or f"rank {fault['rank']}" not in said
            and "ranks " not in said
        ):
            wrong.append(f"status {code}, and nobody is named: {said[-300:]}")
        if seconds > limit + GRACE:
            wrong.append(f"it took {seconds:.1f} s to end")
    elif how == "SIGKILL":
        if code == 0 or seconds > limit + GRACE:
            wrong.append(f"status {code} after {seconds:.1f} s")
    elif how == "SIGUSR1":
        if code != 0:
            wrong.append(f"status {code} instead of 0: {said[-300:]}")
    elif code not in (_continued(transport), 0):
        wrong.append(f"status {code} instead of {_continued(transport)}: {said[-300:]}")
    if "Traceback" in said:
        wrong.append(f"a traceback: {said[said.index('Traceback') :][:600]}")
    return wrong


def _left(run: Path) -> list[int]:
    """Processes that still have this trial's folder in their command line."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(run) in Path(f"/proc/{process}/cmdline").read_text():
                found.append(int(process))
        except OSError:
            pass
    return found


def summary(trials: list[dict]) -> list[dict]:
    """A row a kind of fault."""
    kinds = dict.fromkeys(
        (t["signal"], "anywhere" if "after" in t else "at a place") for t in trials
    )
    rows = []
    for how, where in kinds:
        those = [
            t for t in trials if t["signal"] == how and ("after" in t) == (where == "anywhere")
        ]
        times = [
            t["seconds"] for t in those if t["seconds"] is not None and how != "SIGUSR1"
        ]  # after that one the run goes on
        rows.append({
            "fault": f"{how} {where}", "trials": len(those), "struck": sum(t["struck"] for t in those), "meshes": len({t["mesh"] for t in those}),
            "slowest end [s]": max(times, default=None), "gone on, same curve": sum(not t["wrong"] for t in those),
        })  # fmt: skip
    return rows


def _pairs_row(pairs: list[dict]) -> dict:
    return {
        "fault": "goes on on another mesh", "trials": len(pairs), "struck": len(pairs), "meshes": len({p["from"] for p in pairs} | {p["to"] for p in pairs}),
        "slowest end [s]": None, "gone on, same curve": sum(p["error"] <= 1e-12 for p in pairs),
    }  # fmt: skip


def _write_store(path: Path) -> None:
    chance = np.random.default_rng(0)
    with StoreWriter(path, ["a", "b", "c"], 2) as writer:
        for name, split, size in (
            ("one", "train", (64, 80)),
            ("two", "train", (48, 97)),
            ("three", "val", (60, 52)),
            ("four", "val", (44, 64)),
        ):
            image = writer.add_image(name, size, np.uint8, split, True)
            image.write(
                Box.whole(size),
                chance.integers(0, 256, (2, *size)).astype(np.uint8),
                chance.integers(0, 3, size).astype(np.uint8),
            )


if __name__ == "__main__":
    main()
