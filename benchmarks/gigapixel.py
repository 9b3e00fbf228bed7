"""One training step of ``gigapixel-4492`` on 16000 x 64000 pixels, its exactness where that can be checked, and what it learns.

The step is forward, backward and Adam of the whole image as one sample, in a process of its own that reads the image from its store
as it goes. Exactness: the same mode against the serial program in float64 (distseg.training.verify). Learning: the Earth at 2000 x 4000 pixels in eight
sectors of longitude, every fourth for testing, until the loss stands still; Dice of land.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Spread, parent, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import peak
from distseg.comm.launch import set_up, world
from distseg.comm.mesh import Mesh
from distseg.config.settings import (
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.examples.gigapixel import CLASSES, Earth, prepare_gigapixel
from distseg.data.loader import StepLoader
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.inference.evaluate import evaluate
from distseg.inference.metrics import scores
from distseg.inference.predictor import Predictor
from distseg.models.zoo import outline_model
from distseg.report.style import PALETTE, new_figure
from distseg.tiling.tile import Box
from distseg.training.engine import Engine
from distseg.training.run import step_loader
from distseg.training.verify import verify

QUESTION = (
    "How long does a step on a gigapixel take, in how much memory, and does the network learn?"
)
SEED = {"seconds": 81.0, "GB": 103.61, "Dice": 0.989}  # 16000 x 64000 on an M1 Ultra, as published


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument(
        "--store",
        type=Path,
        default=Path("demo-data/gigapixel.h5"),
        help="made if it is not there (1 GB; default: %(default)s)",
    )
    parser.add_argument("--size", type=Size, default=Size((16000, 64000)))
    parser.add_argument("--memory", nargs="*", default=["1GB", "4GB"])
    parser.add_argument(
        "--epochs", type=int, default=300, help="of the training (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--job", choices=("step", "learn"), help="internal: what one process does")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.job:
        print(json.dumps({"step": _step, "learn": _learn}[options.job](options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            options.store, options.size, options.memory, options.repeats, options.epochs = (
                Path(folder) / "g.h5",
                Size((160, 320)),
                ["2GB"],
                1,
                1,
            )
        if not options.store.exists():
            with redirect_stdout(sys.stderr):
                prepare_gigapixel(options.store, options.size)
        rows, samples = (
            [
                {
                    "run": "seed, M1 Ultra",
                    "step [s]": SEED["seconds"],
                    "peak [GB]": SEED["GB"],
                    "Mpx/s": 1024 / SEED["seconds"],
                }
            ],
            {},
        )
        for memory in options.memory:
            samples[memory] = [
                _run(options, "step", memory, folder) for _ in range(options.repeats)
            ]
            seconds = Spread.of([s["seconds"] for s in samples[memory]])
            pixels = samples[memory][0]["pixels"]
            rows.append({
                "run": f"distseg, --memory {memory}", "step [s]": seconds.median, "from": seconds.min, "to": seconds.max,
                "peak [GB]": max(s["peak"] for s in samples[memory]) / 1e9, "Mpx/s": pixels / seconds.median / 1e6,
            })  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
        error = _exactness(options)
        learned = _run(options, "learn", "4GB", folder)
    notes = (
        f"{options.size}, fp32, batch 1, forward, backward and Adam, reading included, {options.threads} threads; peak: of the whole process\n"
        f"gradient against the serial program, float64, 301x331 in 3x3 streamed tiles: largest relative error {error:.1e}\n"
        f"land after {options.epochs} epochs on six sectors of 2000x4000: Dice {learned['train']:.4f} (train), {learned['test']:.4f} (two other sectors); published: {SEED['Dice']}, on other data"
    )
    report(
        "gigapixel",
        QUESTION,
        Rows(rows, {"samples": samples, "error": error, "learned": learned}),
        options,
        {"size": str(options.size)},
        notes,
        lambda path: draw(learned, path),
    )


def _run(options: argparse.Namespace, job: str, memory: str, folder: str) -> dict:
    flags = [
        "--job",
        job,
        "--store",
        str(Path(options.store).resolve()),
        "--memory",
        memory,
        "--epochs",
        str(options.epochs),
        "--threads",
        str(options.threads),
    ]
    return run_ranks(
        1,
        ["-m", "benchmarks.gigapixel", *flags, *["--quick"] * options.quick, "--output", folder],
        threads=options.threads,
        timeout=3000,
    )


def _config(store: str, **sections) -> Config:
    model = ModelConfig(name="gigapixel-4492", out_channels=1)
    return Config(
        model=model,
        mesh=MeshConfig(),
        loss=LossConfig("binary_cross_entropy"),
        data=DataConfig(store=store),
        optim=OptimConfig("adam", lr=1e-3),
        **sections,
    )


def _engine(config: Config, store: Store) -> tuple[Engine, StepLoader]:
    comm = world()
    device = set_up(comm, "cpu", torch.get_num_threads()).device
    one = Size((1, 1))
    size = store.size(store.split("train")[0])
    engine = Engine(config, Mesh(comm, 1, one, 1), outline_model(config.model, 1), size, device)
    return engine, step_loader(store, engine)


def _step(options: argparse.Namespace) -> dict:
    store = Store(options.store)
    engine, loader = _engine(
        _config(str(options.store), streaming=StreamingConfig(memory=options.memory[0])), store
    )
    start = time.perf_counter()
    for step in loader.epoch(0):
        loss = engine.backward(step)
        engine.update(1e-3)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "peak": peak(),
        "loss": loss,
        "pixels": int(np.prod(store.size("earth"))),
    }


def _exactness(options: argparse.Namespace) -> float:
    streaming = StreamingConfig(tiles=Size((3, 3)))
    report_ = verify(_config(None, streaming=streaming), world(), Size((301, 331)))
    return report_["max_error"]


def _learn(options: argparse.Namespace) -> dict:
    size, sectors = ((2000, 4000), 8) if not options.quick else ((64, 256), 4)
    path = Path(options.output) / "sectors.h5"
    grey, land = Earth(size).rows(0, size[0])
    width = size[1] // sectors
    with StoreWriter(path, CLASSES, ("luminance",), overwrite=True) as writer:
        for k in range(sectors):
            columns = slice(k * width, (k + 1) * width)
            target = writer.add_image(
                f"sector{k}",
                (size[0], width),
                np.uint8,
                "test" if k % 4 == 2 else "train",
                labels=True,
            )
            target.write(Box.whole((size[0], width)), grey[None, :, columns], land[:, columns])
    store = Store(path)
    config = _config(str(path), train=TrainConfig(precision="fp32"))
    engine, loader = _engine(config, store)
    losses = []
    for epoch in range(options.epochs):
        found = []
        for step in loader.epoch(epoch):
            found.append(engine.backward(step))
            engine.update(1e-3 if epoch < 0.8 * options.epochs else 1e-4)
        losses.append(sum(found) / len(found))
    predictor = Predictor(
        engine.model, engine.mesh.replicas, engine.devices, engine.autocast, Size((1024, 1024))
    )
    dice = {
        split: scores(evaluate(predictor, store, split, world()).matrix, store.classes)["classes"][
            "land"
        ]["dice"]
        for split in ("train", "test")
    }
    return {**dice, "losses": losses}


def draw(learned: dict, path: Path) -> None:
    with new_figure(path, (7.5, 4)) as figure:
        axes = figure.add_subplot()
        axes.plot(range(1, len(learned["losses"]) + 1), learned["losses"], color=PALETTE[0])
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.set_ylabel("loss")
        axes.set_title(
            f"Land on six sectors: Dice {learned['train']:.3f}; on two others {learned['test']:.3f}"
        )
        figure.tight_layout()


if __name__ == "__main__":
    main()
