"""How fast, in what memory and with how much work whole images are predicted, beside plain PyTorch and MONAI's sliding window.

A U-Net with instance norm needs the statistics of all of a map before a pixel of the next: distseg keeps the maps between norms
in memory, or in files, and computes no pixel of them twice but those around tiles. Plain PyTorch takes the whole image; MONAI's
windows have statistics of their own, so its result is another.

MONAI is needed here only: pip install --no-deps monai==1.6.1
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from benchmarks.harness import Spread, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import peak
from distseg.comm.collective import Alone
from distseg.comm.launch import keep_freed_memory, memory_in_use, world
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.layers.context import Context
from distseg.layers.graph import receptive_field
from distseg.models.unet import unet
from distseg.models.zoo import outline_model
from distseg.planning.tile_size import smallest_budget
from distseg.runtime.offload import Map
from distseg.runtime.own_part import autocast, place_model
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import Box, strips

QUESTION = (
    "How fast and in what memory are whole images predicted with norms that need all of them?"
)
CPU = torch.device("cpu")
BANDS, CLASSES = 3, 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument(
        "--side", type=int, default=4096, help="of the square image (default: %(default)s)"
    )
    parser.add_argument(
        "--volume", type=int, default=160, help="side of the volume (default: %(default)s)"
    )
    parser.add_argument(
        "--sides",
        type=int,
        nargs="*",
        default=[1024, 2048, 4096, 8192],
        help="of the images whose peaks are compared, with --memory and files",
    )
    parser.add_argument(
        "--volumes", type=int, nargs="*", default=[64, 128, 256], help="sides of volumes, the same"
    )
    parser.add_argument(
        "--cases",
        default="",
        help="of these, the ones whose name this regular expression finds; 'instance, in memory' always, as what others are compared with",
    )
    parser.add_argument(
        "--memory",
        type=float,
        default=0.9e9,
        help="bytes, streaming.memory of these (default: %(default)s)",
    )
    parser.add_argument("--tile", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--job", help="internal: what one process does")
    options = parser.parse_args(arguments)
    if options.job:
        torch.set_num_threads(options.threads)
        print(json.dumps(job(json.loads(options.job), options)))
        return
    if options.quick:
        (
            options.side,
            options.volume,
            options.sides,
            options.volumes,
            options.tile,
            options.precision,
            options.threads,
        ) = 64, 16, [64], [], 32, "fp32", 1

    def wanted(name):
        return (
            name in _QUICK
            if options.quick
            else name == _REFERENCE or re.search(options.cases, name)
        )

    cases = [case for case in _cases(options) if wanted(case[0])]
    found: dict[str, list[dict]] = {name: [] for name, _, _ in cases}
    for _ in range(repeats_of(options)):
        for name, ranks, case in cases:
            flags = [
                "--threads",
                str(max(1, options.threads // ranks)),
                "--precision",
                options.precision,
                "--tile",
                str(options.tile),
            ]
            found[name].append(
                run_ranks(
                    ranks,
                    ["-m", "benchmarks.prediction", "--job", json.dumps(case), *flags],
                    threads=max(1, options.threads // ranks),
                    timeout=3000,
                )
            )
            print(name, found[name][-1], file=sys.stderr, flush=True)
    rows = [_row(name, samples, found[_REFERENCE]) for name, samples in found.items()]
    rows += (
        [
            _work(
                "summit-small, 4096x4096",
                ModelConfig("summit-small", out_channels=1),
                (4096, 4096),
                options.tile,
            )
        ]
        if not options.quick
        else []
    )
    notes = (
        f"U-Net of depth 4, base 16, {options.precision}, channels_last; image {options.side}x{options.side}, tile {options.tile}, volume {options.volume}^3 of tiles of {options.tile}^(2/3), depth 3; "
        f"{options.threads} threads in all; / in memory: seconds of neighbours in time over those of 'instance, in memory'; work: of the convolutions over the whole image's own; peak: of the process (the largest rank), "
        f"which in MB given reads the image from a file, else holds it"
    )
    parameters = {
        name: getattr(options, name)
        for name in ("side", "volume", "sides", "volumes", "memory", "tile", "threads", "precision")
    }
    report("prediction", QUESTION, Rows(rows, {"samples": found}), options, parameters, notes)


_REFERENCE = "instance, in memory"
_QUICK = (
    _REFERENCE,
    "instance, plain PyTorch, whole",
    "instance, 2 ranks",
    "instance, volume, in memory",
    "instance, 64x64, in 900 MB",
)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, int, dict]]:
    """(name, ranks, what a process does)"""
    image = {"size": [options.side] * 2}
    for norm in ("instance", "group"):
        yield f"{norm}, in memory", 1, {**image, "norm": norm, "scratch": "memory"}
        yield f"{norm}, in files", 1, {**image, "norm": norm, "scratch": tempfile.gettempdir()}
    yield "batch", 1, {**image, "norm": "batch"}
    yield "instance, plain PyTorch, whole", 1, {**image, "norm": "instance", "tool": "plain"}
    if importlib.util.find_spec("monai"):
        yield "instance, MONAI (another result)", 1, {**image, "norm": "instance", "tool": "monai"}
    for ranks in (2, 4):
        yield f"instance, {ranks} ranks", ranks, {**image, "norm": "instance", "scratch": "memory"}
    volume = {"size": [options.volume] * 3, "norm": "instance"}
    yield "instance, volume, in memory", 1, {**volume, "scratch": "memory"}
    yield "instance, volume, plain PyTorch", 1, {**volume, "tool": "plain"}
    given = {"scratch": tempfile.gettempdir(), "memory": options.memory}
    for norm in ("instance", "group"):
        for side in options.sides:
            yield (
                f"{norm}, {side}x{side}, in {options.memory / 1e6:.0f} MB",
                1,
                {"size": [side] * 2, "norm": norm, **given},
            )
    for side in options.volumes:
        yield (
            f"instance, {side}^3, in {options.memory / 1e6:.0f} MB",
            1,
            {"size": [side] * 3, "norm": "instance", **given},
        )


_MANY = 2**24  # pixels


def job(case: dict, options: argparse.Namespace) -> dict:
    """One process: the same image twice, the faster one; where the memory is given a small one as often as makes a large one, for gaps come with tiles."""
    keep_freed_memory(large="memory" not in case)
    size = case["size"]
    x = _image(size, case["scratch"] if "memory" in case else None)
    model = _network(case["norm"], len(size), options.precision)
    work = None
    if case.get("tool"):
        infer = _plain(model, options) if case["tool"] == "plain" else _monai(model, options)

        def run() -> None:
            return infer(x.view(x.box))
    else:
        predictor = _predictor(model, case, options)
        source = ImageSource("x", tuple(size), lambda box: x.view(box)[0].numpy())
        work = share_of_work(predictor, size)

        def run() -> None:
            for _ in predictor(source):
                pass

    seconds = []
    for _ in range(2 if "memory" not in case else min(16, max(1, _MANY // x.box.pixels))):
        world().Barrier()
        start = time.perf_counter()
        run()
        world().Barrier()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": min(seconds),
        "pixels": x.box.pixels,
        "peak": max(world().allgather(peak())),
        "work": work,
    }


def _image(size: Sequence[int], folder: str | None) -> Map:
    """Random numbers, in memory or in a file."""
    box, generator = Box.whole(size), torch.Generator().manual_seed(1)
    image = Map(box, torch.empty(1, BANDS, *(2 for _ in size)), folder)
    for strip in strips(box, 1 << 18):
        image.write(strip, torch.randn(1, BANDS, *strip.size, generator=generator))
    return image


def _network(norm: str, dims: int, precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = unet(
        depth=4 if dims == 2 else 3,
        base_channels=16,
        in_channels=BANDS,
        out_channels=CLASSES,
        norm=norm,
        dims=dims,
    ).eval()
    place_model(model, CPU, precision, channels_last=True)
    return model


def _predictor(model: nn.Module, case: dict, options: argparse.Namespace) -> Predictor:
    dims = len(case["size"])
    tile = Size((options.tile if dims == 2 else round(options.tile ** (2 / 3)),) * dims)
    tiled = parallelize(model, receptive_field(model), Context())
    budget = (
        smallest_budget(int(case["memory"]), memory_in_use(CPU), "weights", world())
        if "memory" in case
        else None
    )
    return Predictor(
        tiled,
        world(),
        [CPU],
        autocast(options.precision, CPU),
        tile,
        case.get("scratch"),
        channels_last=True,
        budget=budget,
    )


def share_of_work(predictor: Predictor, size: Sequence[int]) -> float:
    """Of all ranks' convolutions, over what the whole image takes in one piece."""
    cost = [
        getattr(layer, "weight", torch.empty(0)).numel() if "Conv" in kind.__name__ else 0
        for layer, kind in zip(predictor.model.layers, predictor.model.kinds)
    ]
    done = sum(cost[position] * box.pixels for position, box in predictor.computed(size))
    layout = predictor.layout(size)
    own = sum(c * Box.whole(after).pixels for c, after in zip(cost, layout.sizes[1:]))
    return sum(world().allgather(done)) / own


def _plain(model: nn.Module, options: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    def infer(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(
            memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        )
        with torch.no_grad(), autocast(options.precision, CPU)():
            return model(x).float()

    return infer


def _monai(model: nn.Module, options: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    from monai.inferers import sliding_window_inference

    forward = _plain(model, options)
    return lambda x: sliding_window_inference(x, (options.tile,) * 2, 1, forward, overlap=0.25)


def _row(name: str, samples: list[dict], first: list[dict]) -> dict:
    seconds = Spread.of([s["seconds"] for s in samples])
    ratio = Spread.of(
        [s["seconds"] * f["pixels"] / f["seconds"] / s["pixels"] for s, f in zip(samples, first)]
    )
    last = samples[-1]
    return {
        "case": name, "Mpx/s": last["pixels"] / seconds.median / 1e6, "least": last["pixels"] / seconds.max / 1e6, "most": last["pixels"] / seconds.min / 1e6,
        "/ in memory": ratio.median, "from": ratio.min, "to": ratio.max, "peak [GB]": max(s["peak"] for s in samples) / 1e9, "work": last["work"],
    }  # fmt: skip


def _work(name: str, config: ModelConfig, size: Sequence[int], tile: int) -> dict:
    """Counted, not run."""
    model = outline_model(config)
    predictor = Predictor(
        parallelize(model, receptive_field(model), Context()),
        Alone(),
        [CPU],
        autocast("fp32", CPU),
        Size((tile,) * 2),
        "memory",
    )
    return {"case": name, "work": share_of_work(predictor, size)}


if __name__ == "__main__":
    main()
