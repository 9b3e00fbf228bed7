"""distseg beside the tools that people use for images larger than memory: the same network on the same image, one job each.

*Gradient*: a stack of 3x3 convolutions at full resolution (what lightstream's StreamingCNN can run: no up-sampling, no live norm), one
step, binary cross-entropy; lightstream, plain PyTorch and distseg's recompute. *Inference*: a U-Net with batch norm in evaluation mode;
MONAI's sliding window, plain PyTorch and distseg's Predictor. The error at seams is against the whole image at once.

lightstream and MONAI are needed here only: pip install --no-deps lightstream==1.0.7 monai==1.6.1
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
import types
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import Spread, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from benchmarks.steps import peak
from distseg.comm.collective import Alone
from distseg.comm.launch import keep_freed_memory, world
from distseg.comm.mesh import Mesh
from distseg.config.settings import Config, LossConfig, MeshConfig, OptimConfig, StreamingConfig
from distseg.config.sizes import Size
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.layers.context import Context
from distseg.layers.graph import receptive_field
from distseg.models.unet import unet
from distseg.runtime.own_part import autocast, place_model
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import Box, TilePlacement
from distseg.tiling.tile_batch import LazyTileBatch
from distseg.training.engine import Engine

QUESTION = "How do distseg's streamed step and prediction compare with lightstream's, MONAI's and plain PyTorch's?"
NEEDS = {"lightstream": "lightstream", "MONAI": "monai"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument(
        "--side",
        type=int,
        default=3072,
        help="of the square image of the gradient (default: %(default)s)",
    )
    parser.add_argument(
        "--inference_side", type=int, default=4096, help="of the inference's (default: %(default)s)"
    )
    parser.add_argument(
        "--tile",
        type=int,
        default=768,
        help="side of all tools' tiles in the step; 1024 in inference (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--job", help="internal: what one process does")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.job:
        print(json.dumps(JOBS[options.job](options)))
        return
    if options.quick:
        options.side, options.inference_side, options.tile = 128, 128, 64
    rows, samples = [], {}
    for what, names in (
        ("gradient", ("distseg, recompute", "lightstream", "plain PyTorch")),
        ("inference", ("distseg, Predictor", "MONAI", "plain PyTorch, whole")),
    ):
        there = [name for name in names if importlib.util.find_spec(NEEDS.get(name, "torch"))]
        found: dict[str, list[dict]] = {name: [] for name in there}
        for _ in range(repeats_of(options)):
            for name in there:
                found[name].append(_run(name, options))
                print(what, name, found[name][-1], file=sys.stderr, flush=True)
        samples[what] = found
        rows += [_row(what, name, found, there[0]) for name in there]
    notes = (
        f"gradient: 5 convolutions of 32 channels, fp32, {options.side}x{options.side}, tiles of {options.tile}; inference: U-Net of depth 4, base 16, batch norm, "
        f"bf16 channels_last, {options.inference_side}x{options.inference_side}; / distseg: seconds of neighbours in time, median and range; "
        "peak: of the whole process; error: of the gradient at 512x512 against the whole image in float64, of inference at 1024x1024 in fp32 against the whole image, relative to the largest logit"
    )
    parameters = {
        "side": options.side,
        "inference_side": options.inference_side,
        "tile": options.tile,
        "threads": options.threads,
    }
    report("peers", QUESTION, Rows(rows, {"samples": samples}), options, parameters, notes)


def _run(name: str, options: argparse.Namespace) -> dict:
    flags = [
        "--side",
        str(options.side),
        "--inference_side",
        str(options.inference_side),
        "--tile",
        str(options.tile),
        "--threads",
        str(options.threads),
    ]
    return run_ranks(
        1, ["-m", "benchmarks.peers", "--job", name, *flags], threads=options.threads, timeout=3000
    )


def _row(what: str, name: str, found: dict[str, list[dict]], baseline: str) -> dict:
    seconds = [sample["seconds"] for sample in found[name]]
    ratio = Spread.of([a / b["seconds"] for a, b in zip(seconds, found[baseline])])
    last = found[name][-1]
    return {
        "what": what, "tool": name, "median [s]": Spread.of(seconds).median, "Mpx/s": last["pixels"] / Spread.of(seconds).median / 1e6,
        "/ distseg": ratio.median, "from": ratio.min, "to": ratio.max, "peak [GB]": last["peak"] / 1e9, "error": last["error"],
    }  # fmt: skip


# the step


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k in range(5):
        layers += [nn.Conv2d(3 if k == 0 else 32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 1, 1))


def picture(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 3, side, side, generator=generator), (
        torch.rand(1, side, side, generator=generator) < 0.5
    ).to(torch.uint8)


def _fastest(step: Callable[[], None], repeats: int = 2) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def recompute(options: argparse.Namespace, side: int | None = None, dtype: str = "fp32") -> dict:
    keep_freed_memory()
    side = side or options.side
    x, labels = picture(side)
    grid = Size((-(-side // min(options.tile, side // 2)),) * 2)
    config = Config(
        loss=LossConfig("binary_cross_entropy"),
        optim=OptimConfig("sgd"),
        streaming=StreamingConfig(tiles=grid),
        mesh=MeshConfig(reducer="mpi"),
    )
    model = stack()
    engine = Engine(
        config,
        Mesh(world(), 1, Size((1, 1)), 1),
        model,
        (side, side),
        precision=dtype,
        channels_last=True,
    )
    whole = Box.whole((side, side))
    block = LazyTileBatch(
        TilePlacement((side, side), whole, whole, (0,), (0,)),
        lambda box: x[(..., *box.slices)],
        lambda box: labels[(..., *box.slices)],
    )
    seconds = _fastest(lambda: engine.backward([[block]]))
    error = None if side > 512 else _gradient_error([p.grad for p in engine.parameters], side)
    return {
        "seconds": seconds,
        "pixels": side * side,
        "peak": peak(),
        "error": error if error is not None else recompute(options, 512)["error"],
    }


def _gradient_error(found: list[torch.Tensor], side: int) -> float:
    """Largest over the parameters, against the whole image in float64: in float32 the plain program is off by 5e-4 itself, where a ReLU's input is nearly 0."""
    model = stack().double()
    x, labels = picture(side)
    F.binary_cross_entropy_with_logits(model(x.double()), labels[:, None].double()).backward()
    return max(
        ((g - p.grad).norm() / p.grad.norm()).item() for g, p in zip(found, model.parameters())
    )


def lightstream(options: argparse.Namespace, side: int | None = None) -> dict:
    StreamingCNN = _streaming_cnn()
    side = side or options.side
    x, labels = picture(side)
    model = stack()
    streaming = StreamingCNN(model, (1, 3, *(min(options.tile, side // 2),) * 2), copy_to_gpu=False)

    def step() -> None:
        model.zero_grad()
        with torch.no_grad():
            logits = streaming.forward(x)
        logits.requires_grad_()
        F.binary_cross_entropy_with_logits(logits, labels[:, None].float()).backward()
        streaming.backward(x, logits.grad)

    seconds = _fastest(step)
    error = None if side > 512 else _gradient_error([p.grad for p in model.parameters()], side)
    return {
        "seconds": seconds,
        "pixels": side * side,
        "peak": peak(),
        "error": error if error is not None else lightstream(options, 512)["error"],
    }


def _streaming_cnn():
    """lightstream's class, without the package's own start, which asks for lightning: its trainer needs that, this class does not."""
    if "lightstream" not in sys.modules:
        package = types.ModuleType("lightstream")
        package.__path__ = list(importlib.util.find_spec("lightstream").submodule_search_locations)
        sys.modules["lightstream"] = package
    return importlib.import_module("lightstream.core.scnn.scnn").StreamingCNN


def plain(options: argparse.Namespace, side: int | None = None) -> dict:
    side = side or options.side
    x, labels = picture(side)
    model = stack().to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        model.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), labels[:, None].float()).backward()

    seconds = _fastest(step)
    error = None if side > 512 else _gradient_error([p.grad for p in model.parameters()], side)
    return {
        "seconds": seconds,
        "pixels": side * side,
        "peak": peak(),
        "error": error if error is not None else plain(options, 512)["error"],
    }


# inference


def network(precision: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = unet(
        depth=4,
        num_convs=2,
        base_channels=16,
        in_channels=3,
        out_channels=3,
        norm="batch",
        dropout=0.0,
    ).eval()
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
    place_model(model, torch.device("cpu"), precision, precision == "bf16")
    return model


def _inference(
    options: argparse.Namespace,
    inference: Callable[[str, int], Callable[[torch.Tensor], torch.Tensor]],
) -> dict:
    """``inference(precision, side)`` makes a function from images of this side to logits, before the clock runs."""
    side = options.inference_side
    x, _ = picture(side)
    infer = inference("bf16", side)
    seconds = _fastest(lambda: infer(x))
    found = peak()
    x, _ = picture(min(side, 1024))
    with torch.no_grad():
        whole = network("fp32")(x)
    error = ((inference("fp32", x.shape[2])(x) - whole).abs().max() / whole.abs().max()).item()
    return {"seconds": seconds, "pixels": side * side, "peak": found, "error": error}


def _tile(side: int) -> int:
    return min(1024, side // 2)


def predictor(options: argparse.Namespace) -> dict:
    keep_freed_memory()

    def inference(precision: str, side: int) -> Callable[[torch.Tensor], torch.Tensor]:
        model = network(precision)
        tiled = parallelize(model, receptive_field(model), Context())
        found = Predictor(
            tiled,
            Alone(),
            [torch.device("cpu")],
            autocast(precision, torch.device("cpu")),
            Size((_tile(side),) * 2),
            channels_last=precision == "bf16",
        )

        def infer(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(1, 3, side, side)
            for box, logits in found(
                ImageSource("x", (side, side), lambda box: x[0][(slice(None), *box.slices)].numpy())
            ):
                out[(0, slice(None), *box.slices)] = torch.from_numpy(logits)
            return out

        return infer

    return _inference(options, inference)


def monai(options: argparse.Namespace) -> dict:
    from monai.inferers import sliding_window_inference

    def inference(precision: str, side: int) -> Callable[[torch.Tensor], torch.Tensor]:
        model, tile = network(precision), (_tile(side),) * 2
        return _plainly(
            precision, lambda x: sliding_window_inference(x, tile, 1, model, overlap=0.25)
        )

    return _inference(options, inference)


def plain_inference(options: argparse.Namespace) -> dict:
    return _inference(options, lambda precision, side: _plainly(precision, network(precision)))


def _plainly(
    precision: str, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def infer(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last) if precision == "bf16" else x
        with torch.no_grad(), autocast(precision, torch.device("cpu"))():
            return forward(x).float()

    return infer


JOBS = {
    "distseg, recompute": recompute, "lightstream": lightstream, "plain PyTorch": plain,
    "distseg, Predictor": predictor, "MONAI": monai, "plain PyTorch, whole": plain_inference,
}  # fmt: skip

if __name__ == "__main__":
    main()
