"""Streamed tiles: the memory and time of a step on images far larger than memory, against plain PyTorch's.

Every case is a job of its own, whose peak is that of its whole process (the resident set, scratch files apart). A small image is
trained as long as a large one takes for a step, since the gaps that the allocator leaves grow with the tiles that were computed. Images are the
Blue Marble resampled to the size, red, green, blue and luminance, with land against water. Volumes have one band: random balls in noise.

With ``--keep FOLDER`` the stores stay in this folder, and each has a config, so that the same step can be run by hand::

    python -m benchmarks.streaming --network volume-8 --sizes 512 --plain 128 192 256 --memory 2GB --steps 1 --keep volumes
    distseg train volumes/offload-512.yaml
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.harness import parent, report, run_ranks
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
from distseg.data.prepare import chunk_strips
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.models.zoo import build_model, outline_model
from distseg.report.style import INK, PALETTE, new_figure
from distseg.runtime.optimizer import make_optimizer
from distseg.runtime.own_part import autocast, place_model
from distseg.tiling.tile import Box
from distseg.training.engine import Engine
from distseg.training.run import step_loader

QUESTION = "What memory and time does a step take on images far larger than memory?"
NETWORKS = {
    "unet-16": dict(name="unet", depth=4, num_convs=2, base_channels=16),
    "unet-4": dict(name="unet", depth=4, num_convs=2, base_channels=4),
    "summit-small": dict(name="summit-small"),
    "volume-8": dict(name="unet", dims=3, depth=3, num_convs=2, base_channels=8),
    "volume-16": dict(name="unet", dims=3, depth=3, num_convs=2, base_channels=16),
}


LAST_OF = {2: torch.channels_last, 3: torch.channels_last_3d}  # memory format, by spatial dims


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument(
        "--network",
        default="unet-16",
        help=f"{', '.join(NETWORKS)}, or another as package.module:function, with its own norms (default: %(default)s)",
    )
    parser.add_argument(
        "--args",
        type=json.loads,
        default={},
        help="""of such a function, as '{"encoder_name": "resnet18"}'""",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=1,
        help="in a batch; a batch norm of vectors wants two (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[1024, 2048, 4096, 8192],
        help="sides of square images or cubes (default: %(default)s)",
    )
    parser.add_argument(
        "--plain",
        type=int,
        nargs="*",
        default=[512, 768, 1024, 1536],
        help="sides for plain PyTorch (default: %(default)s)",
    )
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--modes", nargs="*", default=["offload", "recompute"])
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument(
        "--scratch",
        default=None,
        help="folder for stored maps and the images (default: the system's)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="that a streamed case trains at least (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=2, help="of a streamed case at least (default: %(default)s)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="keep the stores there, with a config beside each, and use those that are there",
    )
    parser.add_argument("--name", default="streaming", help="of the result files")
    parser.add_argument("--job", help="one step of a mode on a store, or of plain: internal")
    parser.add_argument("--store")
    options = parser.parse_args(arguments)
    if options.job:
        return _job(options)
    if options.quick:
        options.sizes, options.plain, options.memory, options.precision, options.seconds = (
            [64],
            [64],
            "2GB",
            "fp32",
            0,
        )
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        for mode, sides in [
            *((mode, options.sizes) for mode in options.modes),
            ("plain", options.plain),
        ]:
            for side in sides:
                store = _store(kept / f"{side}.h5", side, options)
                if options.keep and mode != "plain":
                    _write_config(kept / f"{mode}-{side}.yaml", options, mode, store)
                rows.append(_row(mode, _shape(options, side), _run(options, mode, store, folder)))
                print(rows[-1], file=sys.stderr, flush=True)
    extrapolated = _extrapolated(rows, _shape(options, max(options.sizes)))
    ours, own = (
        "offload: instance norm in training mode; recompute: no norm; plain: PyTorch's layers, instance norm",
        "offload: its norms in training mode; plain: the module itself",
    )
    notes = f"{options.network}{options.args or ''}, batch {options.images}, {options.precision}, --memory {options.memory}; {own if ':' in options.network else ours}, glibc as it is; a line through its peaks gives {extrapolated:.0f} GB at {_shape(options, max(options.sizes))}"
    parameters = {
        "network": NETWORKS.get(options.network, options.network),
        "args": options.args,
        "images": options.images,
        "memory": options.memory,
        "precision": options.precision,
        "extrapolated [GB]": extrapolated,
    }
    report(
        options.name,
        QUESTION,
        Rows(rows),
        options,
        parameters,
        notes,
        lambda path: draw(rows, options, path),
    )


def _shape(options: argparse.Namespace, side: int) -> Size:
    """The size of an image or volume with this side."""
    return Size((side,) * NETWORKS.get(options.network, {}).get("dims", 2))


def _store(path: Path, side: int, options: argparse.Namespace) -> str:
    """The path of a store with the images or volumes of a side, which is made if it is not there."""
    size = _shape(options, side)
    strips, bands = (
        (_balls(size), ("density",))
        if len(size) == 3
        else (_earth(size), ("red", "green", "blue", "luminance"))
    )
    if path.exists():
        return str(path)
    with StoreWriter(path, ("background", "object"), bands) as writer:
        targets = [
            writer.add_image(f"image{number}", size, np.uint8, "train", labels=True)
            for number in range(options.images)
        ]
        for strip, pixels, labels in strips:
            for number, target in enumerate(targets):  # each is rolled along its last dim
                by = number * side // options.images
                target.write(strip, np.roll(pixels, by, -1), np.roll(labels, by, -1))
    return str(path)


def _earth(size: Size) -> Iterator[tuple[Box, np.ndarray, np.ndarray]]:
    """Strips of the Blue Marble, resampled, with land as the object."""
    from PIL import Image

    from distseg.data.examples.blue_marble import source_folder
    from distseg.data.examples.gigapixel import Earth

    earth = Earth(size)
    with Image.open(source_folder() / "bmng.jpg") as image:
        rows = image.height / size[0]
        for strip in chunk_strips(size, 4):
            start, stop = strip.start[0], strip.stop[0]
            part = image.resize(
                strip.size[::-1], Image.BILINEAR, (0, start * rows, image.width, stop * rows)
            )
            bands = [*np.asarray(part).transpose(2, 0, 1), np.asarray(part.convert("L"))]
            yield strip, np.stack(bands), earth.rows(start, stop)[1]


def _balls(size: Size, seed: int = 0) -> Iterator[tuple[Box, np.ndarray, np.ndarray]]:
    """Strips of a volume of noise, in which 60 random balls are denser."""
    random = np.random.default_rng(seed)
    centres = random.uniform(0, size[0], (60, len(size)))
    radii = random.uniform(0.03, 0.1, len(centres)) * size[0]
    for strip in chunk_strips(size, 1):
        labels = np.zeros(strip.size, np.uint8)
        places = np.ogrid[strip.slices]
        for centre, radius in zip(centres, radii):
            if strip.start[0] < centre[0] + radius and centre[0] - radius < strip.stop[0]:
                away = sum((place - c) ** 2 for place, c in zip(places, centre))
                labels[away < radius**2] = 1
        noise = random.normal(100, 20, strip.size) + 40 * labels
        yield strip, noise.clip(0, 255).astype(np.uint8)[None], labels


def _write_config(path: Path, options: argparse.Namespace, mode: str, store: str) -> None:
    """Write a config with which ``distseg train`` runs one step of a case."""
    import yaml

    given = argparse.Namespace(**{**vars(options), "store": store})
    train = TrainConfig(
        output=str(path.with_suffix("")), epochs=1, precision=options.precision, validate_every=0
    )
    plain = replace(_config(given, mode, Store(store)), train=train).as_plain()
    path.write_text(yaml.safe_dump(plain, sort_keys=False))


def _run(options: argparse.Namespace, mode: str, store: str, folder: str) -> dict:
    flags = [
        "--job",
        mode,
        "--store",
        store,
        "--network",
        options.network,
        "--args",
        json.dumps(options.args),
        "--images",
        str(options.images),
        "--memory",
        options.memory,
        "--precision",
        options.precision,
    ]
    return run_ranks(
        1,
        [
            "-m",
            "benchmarks.streaming",
            *flags,
            "--scratch",
            folder,
            "--seconds",
            str(options.seconds),
            "--steps",
            str(options.steps),
        ],
        threads=torch.get_num_threads(),
        timeout=8 * 3600,
    )


def _config(options: argparse.Namespace, mode: str, store: Store) -> Config:
    norm = "none" if mode == "recompute" else "instance"
    known = (
        dict(NETWORKS[options.network], norm=norm)
        if options.network in NETWORKS
        else dict(name=options.network, args=options.args or None)
    )
    model = ModelConfig(**known, in_channels=store.bands, out_channels=1)
    streaming = (
        StreamingConfig()
        if mode == "plain"
        else StreamingConfig(memory=options.memory, scratch=options.scratch)
    )
    config = Config(
        model=model,
        mesh=MeshConfig(),
        streaming=streaming,
        loss=LossConfig("binary_cross_entropy"),
        data=DataConfig(store=options.store, images=options.images),
        optim=OptimConfig("adam"),
    )
    size = store.size("image0")
    return config.with_dims(len(size), str(Size(size)))


def _job(options: argparse.Namespace) -> None:
    store = Store(options.store)
    config = _config(options, options.job, store)
    last = options.precision == "bf16"
    if options.job == "plain":
        return _plain(config, store, options)
    comm = world()
    device = set_up(comm, "cpu", torch.get_num_threads()).device
    model = outline_model(config.model)
    mesh, size = Mesh(comm, 1, config.mesh.tiles, 1), store.size("image0")
    engine = Engine(config, mesh, model, size, device, options.precision, last)
    loader = step_loader(store, engine)
    seconds, stored = [], 0
    while (
        len(seconds) < options.steps or sum(seconds) < options.seconds
    ):  # the first one makes the optimizer's state
        for blocks in loader.epoch(len(seconds)):
            stored = engine.streaming.executor.stored([block.place for block in blocks[0]])
            start = time.perf_counter()
            loss = engine.backward(blocks)
            engine.update(1e-3)
            seconds.append(time.perf_counter() - start)
    print(
        json.dumps(
            {
                "steps": len(seconds),
                "seconds": median(seconds),
                "peak": peak(),
                "scratch": stored,
                "loss": loss,
            }
        )
    )


def _plain(config: Config, store: Store, options: argparse.Namespace) -> None:
    model = build_model(config.model).train()
    place_model(model, torch.device("cpu"), options.precision, options.precision == "bf16")
    optimizer, cast = (
        make_optimizer(config.optim, dict(model.named_parameters())),
        autocast(options.precision, torch.device("cpu")),
    )
    box, names = (
        Box.whole(store.size("image0")),
        [f"image{number}" for number in range(options.images)],
    )
    x, labels = (
        torch.from_numpy(np.stack([read(name, box) for name in names]))
        for read in (store.read_normalised, store.labels)
    )
    labels = labels.unsqueeze(1).float()
    if options.precision == "bf16":
        x = x.contiguous(memory_format=LAST_OF[len(box.size)])
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        optimizer.zero_grad()
        with cast():
            logits = model(x)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    print(
        json.dumps(
            {
                "steps": len(seconds),
                "seconds": min(seconds),
                "peak": peak(),
                "scratch": 0,
                "loss": loss.item(),
            }
        )
    )


def _row(mode: str, size: Size, found: dict) -> dict:
    rate = size.volume / found["seconds"] / 1e6
    return {
        "mode": mode,
        "size": str(size),
        "steps": found["steps"],
        "step [s]": found["seconds"],
        "Mpx/s": rate,
        "peak [GB]": found["peak"] / 1e9,
        "scratch [GB]": found["scratch"] / 1e9,
        "loss": found["loss"],
    }


def _extrapolated(rows: list[dict], size: Size) -> float:
    """GB that plain PyTorch would need, by a line through its peaks."""
    plain = [(Size(row["size"]).volume, row["peak [GB]"]) for row in rows if row["mode"] == "plain"]
    if len(plain) < 2:
        return float("nan")
    slope, start = np.polyfit(*zip(*plain), 1)
    return float(start + slope * size.volume)


def draw(rows: list[dict], options: argparse.Namespace, path: Path) -> None:
    with new_figure(path, (7.5, 4.5)) as figure:
        axes = figure.add_subplot()

        def side(row):
            return int(row["size"].split("x")[0])

        for mode, colour in zip([*options.modes, "plain"], PALETTE):
            mine = [row for row in rows if row["mode"] == mode]
            axes.plot(
                [side(r) for r in mine],
                [r["peak [GB]"] for r in mine],
                "o-",
                color=colour,
                label=f"{mode}: peak of the process",
            )
            if mode == "offload":
                axes.plot(
                    [side(r) for r in mine],
                    [r["scratch [GB]"] for r in mine],
                    "s--",
                    color=colour,
                    alpha=0.5,
                    label="offload: scratch files, apart",
                )
        if any(row["mode"] == "plain" for row in rows) and max(options.sizes) > max(options.plain):
            ends = [max(options.plain), max(options.sizes)]
            axes.plot(
                ends,
                [_extrapolated(rows, _shape(options, n)) for n in ends],
                ":",
                color=INK,
                label="plain, by a line in pixels",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(
            sorted({*options.sizes, *options.plain}), sorted({*options.sizes, *options.plain})
        )
        axes.set_xlabel("pixels or voxels a side")
        axes.set_ylabel("GB")
        axes.legend()
        figure.tight_layout()


if __name__ == "__main__":
    main()
