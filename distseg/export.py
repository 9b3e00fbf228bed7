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
from torch import Tensor, nn

from distseg.checkpoint.files import find, read_run_manifest, write_json
from distseg.config import ModelConfig
from distseg.disk import whole
from distseg.models.capture import as_network
from distseg.models.bands import dims_of
from distseg.spatial.graph import reach_for
from distseg.tensors import write_tensors
from distseg.trained import load_named, of_patches

FORMATS = ("safetensors", "torch", "onnx")
_ASIDE = 32  # pixels, of which sizes are multiples where nothing is known of a network


class Normalised(nn.Module):
    """A network of images as they are in files."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.model = model
        dims = dims_of(model)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, *(1,) * dims))

    def forward(self, image: Tensor) -> Tensor:
        return self.model((image - self.mean) / self.std)


def export(run: str, own: ModelConfig, output: str, formats: Sequence[str]) -> list[Path]:
    """Write a run's best network, or a checkpoint's; returns the files.

    Args:
        own: that of the run, with the function of the user's named again (:mod:`distseg.trained`).
        formats: of ``FORMATS``.

    Raises:
        ValueError: a package is missing, or PyTorch can't follow the network, or what it made gives other logits.
    """
    if "onnx" in formats and (missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]):
        raise ValueError(f"format onnx needs the package {missing[0]}: pip install onnx onnxscript, or leave onnx out of --formats")
    checkpoint = find(run)
    manifest = read_run_manifest(checkpoint)
    patches = of_patches(manifest)
    if patches and (others := [name for name in formats if name != "safetensors"]):
        raise ValueError(f"{run} is a network of patches, of which every size of images has another number, so it can't be written as {others[0]}: export it to safetensors, or take distseg.load")
    model = load_named(checkpoint, own)
    data, folder = manifest["data"], Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    unit, program, files = (1,) if patches else _unit(model), None, [folder / "export.json"]
    facts = {key: data[key] for key in ("classes", "mean", "std")} | {"bands": manifest["channels"][0], "outputs": manifest["channels"][1]}
    write_json(files[0], facts | {"multiple": list(unit), "network": own.name, "arguments": own.args, "checkpoint": str(checkpoint), "step": manifest["step"]})
    if "safetensors" in formats:
        with whole(path := folder / "model.safetensors") as growing:
            write_tensors(growing, model.state_dict(), {"format": "pt"})
        files.append(path)
    for kind, name in (("torch", "model.pt2"), ("onnx", "model.onnx")):
        if kind in formats:
            program = program or _program(Normalised(model, data["mean"], data["std"]), manifest["channels"][0], unit)
            with whole(path := folder / name) as growing, _quiet():
                torch.export.save(program, growing) if kind == "torch" else _write_onnx(program, growing)
            files.append(path)
    return files


def _unit(model: nn.Module) -> tuple[int, ...]:
    """Of so many pixels sizes are multiples along each dim: cells of the deepest map, in which nothing has to be cut or filled up."""
    network = as_network(model)
    dims = dims_of(model)
    try:
        stride = reach_for(network, True).stride
    except ValueError:
        stride = (_ASIDE,) * dims
    return tuple(math.lcm(n, network.multiple if hasattr(network, "multiple") else 1) for n in stride)


@torch.no_grad()
def _program(model: nn.Module, bands: int, unit: Sequence[int]) -> torch.export.ExportedProgram:
    """By torch.export, and held against the module on images of another number and size."""
    size = lambda *counts: tuple(n * count for n, count in zip(unit, counts))
    cells = tuple(-(-64 // n) for n in unit)
    image = torch.rand(2, bands, *size(*(n + 1 for n in cells)))
    shape = {0: torch.export.Dim("images", min=1)}
    for d, (n, name) in enumerate(zip(unit, ("height", "width", "depth") if len(unit) < 3 else ("depth", "height", "width"))):
        count = torch.export.Dim(f"{name}_cells", min=1)
        shape[d + 2] = n * count if n > 1 else count
    try:
        with _quiet():
            program = torch.export.export(model, (image,), dynamic_shapes=(shape,), strict=False)
            other = torch.rand(1, bands, *size(*(n + 2 + d for d, n in enumerate(cells))))
            found, wanted = program.module()(other), model(other)
    except Exception as e:  # by whatever a network does that PyTorch can't follow
        raise ValueError(f"torch.export can't follow this network ({type(e).__name__}: {' '.join(str(e).split())[:300]}): export its weights alone, --formats safetensors") from e
    if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
        raise ValueError("what torch.export makes of this network gives other logits on another size of image: export its weights alone, --formats safetensors")
    return program


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    torch.onnx.export(program, f=str(path), input_names=["image"], output_names=["logits"], external_data=False, verbose=False)


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
