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
from functools import partial
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
from distseg.models.zoo import build_model, outline_model
from distseg.report.style import PALETTE, new_figure
from distseg.tiling.tile import Box
from distseg.training.engine import Engine
from distseg.training.run import step_loader
from distseg.training.verify import verify

QUESTION = (
    "How long does a step on a gigapixel take, in how much memory, and does the network learn?"
)
PARTS = ("step", "plain", "learn")
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
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--plain",
        type=int,
        nargs="*",
        default=[2048, 4096, 6144],
        help="sides of square images for a step of plain PyTorch (default: %(default)s)",
    )
    parser.add_argument("--name", default="gigapixel", help="of the result files")
    parser.add_argument("--job", choices=_JOBS, help="internal: what one process does")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.job:
        print(json.dumps(_JOBS[options.job](options)))
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
            options.plain = [128, 256]
        if "step" in options.parts and not options.store.exists():
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
        for memory in options.memory if "step" in options.parts else []:
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
        about = {"samples": samples}
        notes = f"{options.size}, fp32, batch 1, forward, backward and Adam, reading included, {options.threads} threads; peak: of the whole process"
        if "step" in options.parts:
            about["error"] = _exactness(options)
            notes += f"\ngradient against the serial program, float64, 301x331 in 3x3 streamed tiles: largest relative error {about['error']:.1e}"
        if "plain" in options.parts:
            plain = _plain_rows(options, folder)
            rows += plain
            about["line"] = line = _line(plain)
            whole = line["GB"] + line["bytes per pixel"] * options.size.volume / 1e9
            notes += f"\nplain PyTorch: a line through its peaks is {line['GB']:.2f} GB + {line['bytes per pixel']:.1f} bytes per pixel, {whole:.0f} GB at {options.size}"
        if "learn" in options.parts:
            about["learned"] = learned = _run(options, "learn", "4GB", folder)
            notes += f"\nland after {options.epochs} epochs on six sectors of 2000x4000: Dice {learned['train']:.4f} (train), {learned['test']:.4f} (two other sectors); published: {SEED['Dice']}, on other data"
    report(
        options.name,
        QUESTION,
        Rows(rows, about),
        options,
        {"size": str(options.size), "plain": options.plain},
        notes,
        partial(draw, about["learned"]) if "learn" in options.parts else None,
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


def _plain_rows(options: argparse.Namespace, folder: str) -> list[dict]:
    """Run a step of plain PyTorch on square images; return a row for each."""
    rows = []
    for side in options.plain:
        given = argparse.Namespace(**{**vars(options), "store": Path(folder) / f"plain{side}.h5"})
        with redirect_stdout(sys.stderr):
            prepare_gigapixel(given.store, Size((side, side)))
        found = _run(given, "plain", options.memory[0], folder)
        given.store.unlink()
        seconds = found["seconds"]
        rows.append({
            "run": f"plain PyTorch, {side}x{side}", "step [s]": seconds, "from": seconds, "to": seconds,
            "peak [GB]": found["peak"] / 1e9, "Mpx/s": found["pixels"] / seconds / 1e6, "pixels": found["pixels"],
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _line(rows: list[dict]) -> dict[str, float]:
    """Return the straight line through the peaks of plain PyTorch."""
    slope, start = np.polyfit(
        [row["pixels"] for row in rows], [row["peak [GB]"] for row in rows], 1
    )
    return {"GB": float(start), "bytes per pixel": float(slope) * 1e9}


def _plain(options: argparse.Namespace) -> dict:
    """Train one step as plain PyTorch does, with the whole image as one tensor."""
    store = Store(options.store)
    box = Box.whole(store.size("earth"))
    model = build_model(_config(str(options.store)).model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = time.perf_counter()
    image = torch.from_numpy(store.read_normalised("earth", box))[None]
    labels = torch.from_numpy(store.labels("earth", box))[None, None].float()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(image), labels)
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - start
    pixels = int(np.prod(box.size))
    return {"seconds": seconds, "peak": peak(), "loss": loss.item(), "pixels": pixels}


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


_JOBS = {"step": _step, "plain": _plain, "learn": _learn}

if __name__ == "__main__":
    main()
