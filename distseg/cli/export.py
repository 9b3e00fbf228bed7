"""A trained network for use without distseg: its weights, and programs that other software runs.

Programs take images as they are in files, as float32 (N, bands, *size), normalise them, and give logits (N, classes, *size), of any
number of images and any size that is a multiple of what ``export.json`` says.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Sequence

import torch
from torch import nn

from distseg.config.settings import ModelConfig
from distseg.layers.graph import reach_for
from distseg.models.bands import dims_of
from distseg.models.capture.capture import as_network
from distseg.report.disk import atomic_write
from distseg.training.checkpoint.files import find, read_run_manifest, write_json
from distseg.training.checkpoint.tensors import write_tensors
from distseg.training.run_config import load_named, normalised, of_patches

FORMATS = ("safetensors", "torch", "onnx")
_ASIDE = 32  # pixels, of which sizes are multiples where nothing is known of a network


def export(
    run: str, own: ModelConfig, output: str, formats: Sequence[str] | None = None
) -> list[Path]:
    """Write the network of a run's best checkpoint, or of a given one; return the files.

    Args:
        run: the folder of a run or of a checkpoint.
        own: the model of the run (:func:`distseg.training.run_config.check_model`).
        formats: some of ``FORMATS``; by default safetensors and torch, and of a network of patches,
            which cannot be a program, safetensors alone.

    Raises:
        ValueError: a package is missing, or PyTorch can't follow the network, or what it made gives other logits.
    """
    checkpoint = find(run)
    manifest = read_run_manifest(checkpoint)
    patches = of_patches(manifest)
    formats = formats or (["safetensors"] if patches else ["safetensors", "torch"])
    if "onnx" in formats and (
        missing := [
            name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None
        ]
    ):
        raise ValueError(
            f"format onnx needs the package {missing[0]}: pip install onnx onnxscript, or leave onnx out of --formats"
        )
    if patches and (others := [name for name in formats if name != "safetensors"]):
        raise ValueError(
            f"{run} is a network of patches, of which every size of images has another number, so it can't be written as {others[0]}: export it to safetensors, or take distseg.load"
        )
    model = load_named(checkpoint, own)
    data, folder = manifest["data"], Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    unit = (1,) if patches else _unit(model, padded=own.pad is not None)
    least = 1 if own.pad is None else own.pad + 1
    program, files = None, [folder / "export.json"]
    facts = {key: data[key] for key in ("classes", "mean", "std")} | {
        "bands": manifest["channels"][0],
        "outputs": manifest["channels"][1],
    }
    write_json(
        files[0],
        facts
        | {
            "multiple": list(unit),
            "smallest": least,
            "network": own.name,
            "arguments": own.args,
            "checkpoint": str(checkpoint),
            "step": manifest["step"],
        },
    )
    if "safetensors" in formats:
        with atomic_write(path := folder / "model.safetensors") as growing:
            write_tensors(growing, model.state_dict(), {"format": "pt"})
        files.append(path)
    for kind, name in (("torch", "model.pt2"), ("onnx", "model.onnx")):
        if kind in formats:
            program = program or _program(
                normalised(model, manifest), manifest["channels"][0], unit, least
            )
            with atomic_write(path := folder / name) as growing, _quiet():
                torch.export.save(program, growing) if kind == "torch" else _write_onnx(
                    program, growing
                )
            files.append(path)
    return files


def _unit(model: nn.Module, padded: bool) -> tuple[int, ...]:
    """Return the multiple of pixels that sizes are along each dim: cells of the deepest map, in which nothing has to be cut or filled up.

    Args:
        padded: whether the network fills up images of any size by itself.
    """
    dims = dims_of(model)
    if padded:
        return (1,) * dims
    network = as_network(model)
    try:
        stride = reach_for(network, True).stride
    except ValueError:
        stride = (_ASIDE,) * dims
    return tuple(
        math.lcm(n, network.multiple if hasattr(network, "multiple") else 1) for n in stride
    )


@torch.no_grad()
def _program(
    model: nn.Module, bands: int, unit: Sequence[int], least: int = 1
) -> torch.export.ExportedProgram:
    """Make a program by torch.export, and hold it against the module on images of another number and size.

    Args:
        unit: sizes are multiples of it.
        least: the smallest size along a dim, in units.
    """
    size = lambda *counts: tuple(n * count for n, count in zip(unit, counts))
    cells = tuple(-(-64 // n) for n in unit)
    image = torch.rand(2, bands, *size(*(n + 1 for n in cells)))
    shape = {0: torch.export.Dim("images", min=1)}
    for d, (n, name) in enumerate(
        zip(unit, ("height", "width", "depth") if len(unit) < 3 else ("depth", "height", "width"))
    ):
        count = torch.export.Dim(f"{name}_cells", min=least)
        shape[d + 2] = n * count if n > 1 else count
    try:
        with _quiet():
            program = torch.export.export(model, (image,), dynamic_shapes=(shape,), strict=False)
            other = torch.rand(1, bands, *size(*(n + 2 + d for d, n in enumerate(cells))))
            found, wanted = program.module()(other), model(other)
    except Exception as e:  # by whatever a network does that PyTorch can't follow
        raise ValueError(
            f"torch.export can't follow this network ({type(e).__name__}: {' '.join(str(e).split())[:300]}): export its weights alone, --formats safetensors"
        ) from e
    if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
        raise ValueError(
            "what torch.export makes of this network gives other logits on another size of image: export its weights alone, --formats safetensors"
        )
    return program


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    torch.onnx.export(
        program,
        f=str(path),
        input_names=["image"],
        output_names=["logits"],
        external_data=False,
        verbose=False,
    )


@contextmanager
def _quiet():
    """Without what PyTorch tells of its own inside."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
