"""Labels of whole images at a patch's memory: PatchGD, the exact gradient that it approximates, and the plain baselines.

``--parts compare``: the same small backbone on UltraMNIST for the same time of a processor by each method, and how many test images it then gets right; with ``--pretrain``
its convolutions were trained before on digits alone, as the backbones of the paper's program were on ImageNet.
``--parts memory``: the peak of a process after a step, against the image's size. ``--parts time``: an exact step against plain PyTorch's, and filling Z against the
backbone alone. ``--parts step``: a step of PatchGD against a plain program of the same arithmetic (:mod:`benchmarks.patch_step`). Every case of the first two is a job of
its own, on one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from benchmarks import patch_step
from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import peak
from distseg.comm.collective import Alone
from distseg.comm.launch import set_up, world
from distseg.comm.mesh import Mesh
from distseg.config.patchgd import PatchConfig, PatchgdConfig
from distseg.config.settings import (
    Config,
    DataBase,
    DataConfig,
    ModelBase,
    ModelConfig,
    OptimConfig,
    PredictConfig,
    StreamingConfig,
    TrainBase,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.examples.ultramnist import mnist, prepare_ultramnist
from distseg.data.store.store import Store, normalised
from distseg.inference.images import evaluate_images
from distseg.inference.predictor import Predictor
from distseg.models.zoo import plain_model
from distseg.report.style import PALETTE, new_figure
from distseg.tiling.tile import Box
from distseg.training.checkpoint.pretrained import pretrained
from distseg.training.conflicts import with_store
from distseg.training.engine import Engine
from distseg.training.patchgd.engine import PatchEngine, PatchLoader
from distseg.training.run import step_loader
from distseg.training.run_config import network_of

QUESTION = "What do PatchGD, the exact gradient and plain baselines reach on large images, in which time and memory?"
METHODS = ("downscale", "crops", "patchgd", "exact", "exact by 2", "exact in time")
_BACKBONE = "distseg.models.classifier:residual"
_TIMES = 6  # that a case is evaluated while it trains


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument("--parts", nargs="*", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--size",
        type=int,
        default=256,
        help="side of the images compared on (default: %(default)s)",
    )
    parser.add_argument(
        "--digits",
        type=int,
        nargs=2,
        default=[1, 1],
        help="of an image, at least and at most (default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        type=int,
        nargs=3,
        default=[4000, 0, 500],
        help="of train, val and test (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=150,
        help="of its one processor that each case trains, evaluations apart (default: %(default)s)",
    )
    parser.add_argument(
        "--pretrain",
        type=float,
        default=0,
        help="seconds that the backbone is trained on digits alone before (default: not at all)",
    )
    parser.add_argument("--seeds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=5e-3, help="of Adam, which stays (default: %(default)s)"
    )
    parser.add_argument(
        "--base",
        type=int,
        default=8,
        help="channels of the backbone's first level (default: %(default)s)",
    )
    parser.add_argument(
        "--memory", default="700MB", help="budget of streamed tiles (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[512, 1024, 2048, 4096],
        help="sides for the memory (default: %(default)s)",
    )
    parser.add_argument(
        "--plain",
        type=int,
        nargs="*",
        default=[512, 1024, 2048, 4096],
        help="sides for plain PyTorch's memory; of the last one times are taken (default: %(default)s)",
    )
    parser.add_argument("--name", default="whole_images", help="of the result files")
    parser.add_argument("--job", help="a method: internal")
    parser.add_argument("--store")
    parser.add_argument("--init", help="weights of the backbone: internal")
    parser.add_argument(
        "--patches",
        type=int,
        default=4,
        help="that PatchGD computes at once, for the memory (default: %(default)s)",
    )
    parser.add_argument(
        "--filled",
        type=int,
        default=128,
        help="that it computes at once where filling Z is timed; the paper's 1/8 of 4096x4096 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.job == "pretrain":
        return _pretrain(options)
    if options.job:
        return _step_of_job(options) if options.seconds == 0 else _job(options)
    if options.quick:
        (
            options.size,
            options.images,
            options.seconds,
            options.seeds,
            options.base,
            options.sizes,
            options.plain,
            options.methods,
        ) = 64, [8, 0, 4], 0.5, 1, 4, [64], [64], ["patchgd", "exact"]
        options.memory = "8GB"  # the process may be others' too
    parts: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            parts[part] = _PARTS[part](options, Path(folder))
    rows = [{"part": part, **row} for part, those in parts.items() for row in those]
    shown = [{key: value for key, value in row.items() if key != "curve"} for row in rows]
    notes = (
        f"backbone {_BACKBONE}{f', its convolutions trained on digits alone for {options.pretrain:g} s before' if options.pretrain else ''}, base {options.base}, maximum over the image; {'-'.join(map(str, options.digits))} digits an image, so {10 if options.digits[1] == 1 else 28} classes; batches of 8, Adam {options.rate:g};\n"
        "exact by 2: micro-batches of 2 images, in which batch norm takes its statistics; downscale: by 4; crops: half the side, the label of the whole image; patchgd: patches of a quarter of the side, a quarter of them in each of 4 inner iterations;\n"
        f"memory and time: one image a step, patchgd by patches of 128x128, {options.patches} of them in each of 4 inner iterations, Z filled by {options.filled} at once where that is timed;\n"
        "step: patches of 64x64 of images of 512x512, an eighth of them in each of 8 inner iterations, cnn head, Adam, float32, processor seconds of one thread; the plain program has the images in memory"
    )
    report(
        options.name,
        QUESTION,
        Rows(shown, {"rows": rows}),
        options,
        {k: v for k, v in vars(options).items() if k not in ("output", "job", "store", "init")},
        notes,
        (lambda path: draw(parts, path)) if {"compare", "memory"} & set(parts) else None,
    )


def config_of(
    options: argparse.Namespace, method: str, store: str, size: int
) -> Config | PatchConfig:
    """The config by which a method trains."""
    norm = "batch"
    compared = options.seconds > 0
    patch = Size((max(16, size // 4 if compared else min(size // 2, 128)),) * 2)
    budget = method == "exact in time"
    images = {"exact by 2": 2}.get(method, 8) if compared else 1
    model = ModelConfig(
        _BACKBONE,
        args={"pool": "max"},
        base_channels=options.base,
        depth=3,
        norm=norm,
        seed=options.seed,
    )
    optim = OptimConfig("adam", lr=1e-3, schedule="constant", warmup=0.0)
    if method == "patchgd":
        return PatchConfig(
            model=ModelBase(**{f.name: getattr(model, f.name) for f in fields(ModelBase)}),
            data=DataBase(store=store, images=images),
            optim=optim,
            train=TrainBase(seed=options.seed, precision="fp32"),
            patchgd=PatchgdConfig(
                patch=patch,
                features=32,
                sampled=0.25 if compared else options.patches,
                inner=4,
                head="cnn-max",
                head_channels=32,
            ),
        )
    return Config(
        model=model,
        streaming=StreamingConfig(memory=options.memory) if budget else StreamingConfig(),
        data=DataConfig(
            store=store,
            images=images,
            crop=Size((size // 2,) * 2) if method == "crops" else None,
            shrink=4 if method == "downscale" else 1,
        ),
        optim=optim,
        train=TrainConfig(
            seed=options.seed, precision="fp32", accumulate=8 // images if compared else 1
        ),
        predict=PredictConfig(tile=Size((size, size))),
    )


def _opened(options: argparse.Namespace, method: str):
    """(engine, loader, predictor, store) of a method on one rank."""
    comm = world()
    device = set_up(comm, "cpu", 1).device
    whole = Store(options.store)
    config = config_of(options, method, options.store, min(whole.size(whole.split("train")[0])))
    store = Store(options.store, shrink=config.data.shrink)
    config = replace(config, loss=with_store(config.loss, store))
    network, mesh = (
        network_of(config.model, config.patchgd, store.bands, len(store.classes)),
        Mesh(comm),
    )
    renamed = (
        {part: f"backbone.{part}" for part in ("stem", "blocks")} if method == "patchgd" else {}
    )
    found = pretrained(options.init, network, renamed) if options.init else None
    if method == "patchgd":
        engine = PatchEngine(config, mesh, network, device)
        loader, predictor = (
            PatchLoader(store, config.data, config.train.seed, mesh),
            engine.predictor(),
        )
    else:
        engine = Engine(config, mesh, network, store.size(store.split("train")[0]), device)
        loader, predictor = (
            step_loader(store, engine),
            Predictor(
                engine.model, mesh.replicas, engine.devices, engine.autocast, config.predict.tile
            ),
        )
    if found:
        found.load(network if method == "patchgd" else engine.model)
    return engine, loader, predictor, store


def _pretrain(options: argparse.Namespace) -> None:
    """Train the backbone on MNIST's digits, one on each canvas of 64x64, of 12 to 56 pixels at any place; keep its convolutions and norms."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    store, (pictures, values) = Store(options.store), mnist()["train"]
    model = plain_model(config_of(options, "exact", options.store, 64).model, store.bands, 10)
    optimizer, draws, right, count = (
        torch.optim.Adam(model.parameters(), 3e-3, fused=True),
        np.random.default_rng(options.seed),
        0.0,
        0,
    )
    while time.process_time() < options.seconds:
        those = draws.integers(len(pictures), size=64)
        canvas = (draws.random((64, 1, 64, 64), np.float32) * 16).round()
        for at, number in zip(canvas, those):
            side = int(draws.integers(12, 57))
            y, x = draws.integers(0, 65 - side, size=2)
            at[0, y : y + side, x : x + side] = np.maximum(
                at[0, y : y + side, x : x + side],
                Image.fromarray(pictures[number]).resize((side, side), Image.BILINEAR),
            )
        logits = model(torch.from_numpy(normalised(canvas, store.mean, store.std)))
        labels = torch.from_numpy(values[those])
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        right, count = (
            0.98 * right + 0.02 * (logits.argmax(1) == labels).float().mean().item(),
            count + 1,
        )
    save_file(
        {
            name: tensor
            for name, tensor in model.state_dict().items()
            if not name.startswith("last.")
        },
        options.init,
    )
    print(json.dumps({"right": right, "steps": count}))


def _job(options: argparse.Namespace) -> None:
    """Train for some seconds; print what came of it."""
    engine, loader, predictor, store = _opened(options, options.job)
    spent, images, curve = 0.0, 0, []
    for epoch in count():
        engine.context.epoch = epoch
        start = time.process_time()
        for batch in loader.epoch(epoch):
            engine.step(batch, options.rate)
            images += 8
            spent += time.process_time() - start
            if spent >= options.seconds * (len(curve) + 1) / _TIMES:
                found = evaluate_images(predictor, store, "test", Alone())
                curve.append(
                    {
                        "seconds": spent,
                        "images": images,
                        "accuracy": found["accuracy"],
                        "auc": found["auc"],
                    }
                )
            if len(curve) == _TIMES:
                print(json.dumps({"curve": curve, "peak": peak(), "seconds": spent}))
                return
            start = time.process_time()


def _step_of_job(options: argparse.Namespace) -> None:
    """Two steps on one image; print the peak, and the processor's seconds of the second."""
    if options.job == "plain":
        torch.set_num_threads(1)
        step = _plain(options)
    else:
        engine, loader, _, _ = _opened(options, options.job)

        def step():
            return engine.step(next(iter(loader.epoch(0))), 1e-3)

    step()
    start = time.process_time()
    step()
    print(json.dumps({"peak": peak(), "seconds": time.process_time() - start}))


def _run(
    options: argparse.Namespace, method: str, store: Path, seed: int = 0, seconds: float = 0.0
) -> dict:
    flags = [
        "--job",
        method,
        "--store",
        str(store),
        "--seed",
        str(seed),
        "--seconds",
        str(seconds),
        "--base",
        str(options.base),
        "--memory",
        options.memory,
        "--rate",
        str(options.rate),
        "--patches",
        str(options.patches),
    ]
    flags += ["--init", options.init] if options.init else []
    return run_ranks(1, ["-m", "benchmarks.whole_images", *flags], threads=1, timeout=3600)


def _prepare(
    store: str | Path, side: int, images: Sequence[int], digits: tuple[int, int] = (3, 5)
) -> None:
    with redirect_stdout(sys.stderr):  # its table
        prepare_ultramnist(store, Size((side, side)), images, digits)


def _compare(options: argparse.Namespace, folder: Path) -> list[dict]:
    store, rows = folder / "compare.h5", []
    _prepare(store, options.size, options.images, tuple(options.digits))
    if options.pretrain:
        options.init = str(folder / "pretrained.safetensors")
        print(
            _run(options, "pretrain", store, seconds=options.pretrain), file=sys.stderr, flush=True
        )
    for method in options.methods:
        found = [
            _run(options, method, store, seed, options.seconds) for seed in range(options.seeds)
        ]
        last = [one["curve"][-1] for one in found]
        accuracies = [one["accuracy"] for one in last]
        rows.append({
            "method": method, "size": f"{options.size}x{options.size}", "accuracy": mean(accuracies), "from": min(accuracies), "to": max(accuracies), "auc": mean(one["auc"] for one in last),
            "images seen": round(mean(one["images"] for one in last)), "seconds": mean(one["seconds"] for one in last), "peak [MB]": max(one["peak"] for one in found) / 1e6,
            "curve": [one["curve"] for one in found],
        })  # fmt: skip
        print({k: v for k, v in rows[-1].items() if k != "curve"}, file=sys.stderr, flush=True)
    fewest = min(curve[-1]["images"] for row in rows for curve in row["curve"])
    for row in rows:
        row[f"after {fewest}"] = mean(_after(fewest, curve) for curve in row["curve"])
    return rows


def _after(images: int, curve: Sequence[dict]) -> float:
    """The accuracy after so many images, on a line between those that were taken."""
    return float(
        np.interp(images, [at["images"] for at in curve], [at["accuracy"] for at in curve])
    )


def _memory(options: argparse.Namespace, folder: Path) -> list[dict]:
    rows = []
    for method, sides in (
        ("patchgd", options.sizes),
        ("exact in time", options.sizes),
        ("plain", options.plain),
    ):
        for side in sides:
            store = folder / f"{side}.h5"
            if not store.exists():
                _prepare(store, side, (2, 0, 0))
            rows.append(
                {
                    "method": method,
                    "size": f"{side}x{side}",
                    "peak [MB]": _run(options, method, store)["peak"] / 1e6,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _time(options: argparse.Namespace, folder: Path) -> list[dict]:
    """In turns: steps by jobs of their own, as streamed tiles fill what is left of their memory; filling Z in this process."""
    side = options.plain[-1]
    options.store, options.seconds = str(folder / f"{side}.h5"), 0.0
    if not Path(options.store).exists():
        _prepare(options.store, side, (2, 0, 0))
    torch.set_num_threads(1)
    peaks: dict[str, float] = {}

    def job(method: str) -> Reading:
        found = _run(options, method, Path(options.store))
        peaks[method] = max(peaks.get(method, 0.0), found["peak"])
        return Reading(found["seconds"])

    rows, methods = [], ("plain", "exact", "exact in time")
    for kind, cases, warmup in (
        ("a step", {method: partial(job, method) for method in methods}, 0),
        ("filling Z", _fills(options), 1),
    ):
        results = measure(cases, repeats_of(options), warmup, clock=time.process_time)
        for case in cases:
            ratio = results.ratio(case)
            rows.append(
                {
                    "method": f"{kind}: {case}",
                    "size": f"{side}x{side}",
                    "ratio": ratio.median,
                    "from": ratio.min,
                    "to": ratio.max,
                    "seconds": results.spread(case).median,
                }
            )
            if case in peaks:
                rows[-1]["peak [MB]"] = peaks[case] / 1e6
    return rows


def _plain(options: argparse.Namespace) -> Callable[[], None]:
    """A step on an image in plain PyTorch."""
    store = Store(options.store)
    name = store.split("train")[0]
    model = plain_model(
        config_of(options, "exact", options.store, 64).model, store.bands, len(store.classes)
    )
    optimizer, whole, label = (
        torch.optim.Adam(model.parameters(), fused=True),
        Box.whole(store.size(name)),
        torch.tensor([store.label(name)]),
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(
            model(torch.from_numpy(store.read_normalised(name, whole))[None]), label
        ).backward()
        optimizer.step()

    return step


def _fills(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    engine, loader, _, store = _opened(
        argparse.Namespace(**{**vars(options), "patches": options.filled}), "patchgd"
    )
    batch = next(iter(loader.epoch(0)))
    backbone = plain_model(engine.config.model, store.bands, 32)
    boxes, together = engine.network.patches(batch.sizes[0]), int(engine.config.patchgd.sampled)

    @torch.no_grad()
    def alone() -> None:
        for a in range(0, len(boxes), together):
            backbone(batch.read(0, boxes[a : a + together]))

    return {"the backbone alone": alone, "fill": lambda: engine.fill(batch)}


def _step(options: argparse.Namespace, folder: Path) -> list[dict]:
    """A step of PatchGD, in turns with the plain program's."""

    def store(case: patch_step.Case) -> str:
        path = folder / f"{case.side}.step.h5"
        if not path.exists():
            _prepare(path, case.side, (max(case.images for case in cases), 0, 0), (1, 1))
        return str(path)

    cases = patch_step.QUICK if options.quick else patch_step.CASES
    return patch_step.compare(cases, repeats_of(options), store)


_PARTS = {"compare": _compare, "memory": _memory, "time": _time, "step": _step}


def draw(parts: dict[str, list[dict]], path: Path) -> None:
    """Of the parts that there are: accuracy over time, memory over size."""
    drawn = {
        part: how
        for part, how in {"compare": _draw_accuracies, "memory": _draw_peaks}.items()
        if parts.get(part)
    }
    with new_figure(path, (4.5 * len(drawn), 4)) as figure:
        for axes, (part, how) in zip(
            figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items()
        ):
            how(axes, parts[part])
            axes.legend()
        figure.tight_layout()


def _draw_accuracies(axes, rows: list[dict]) -> None:
    for row, colour in zip(rows, PALETTE):
        for number, curve in enumerate(row["curve"]):
            axes.plot(
                [0, *(at["seconds"] for at in curve)],
                [0.1, *(at["accuracy"] for at in curve)],
                "o-",
                color=colour,
                markersize=3,
                label=None if number else row["method"],
            )
    axes.set(xlabel="seconds of training", ylabel="accuracy on the test images")


def _draw_peaks(axes, rows: list[dict]) -> None:
    for method, colour in zip(dict.fromkeys(row["method"] for row in rows), PALETTE[2:]):
        mine = [row for row in rows if row["method"] == method]
        axes.plot(
            [int(row["size"].split("x")[0]) for row in mine],
            [row["peak [MB]"] for row in mine],
            "o-",
            color=colour,
            label=method,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="pixels a side", ylabel="peak of the process [MB]")


if __name__ == "__main__":
    main()
