"""Export a trained network for use without distseg: weights, and programs for other software.

Programs take raw pixel values as in image files, float32 (N, bands, *size), and normalise them.
They return logits (N, classes, *size). They take any number of images, of any size that is a
multiple of the numbers ``multiple`` in ``export.json``.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

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
_ASIDE = 32  # sizes are multiples of this number of pixels if the network's stride is not known


def export(
    run: str, own: ModelConfig, output: str, formats: Sequence[str] | None = None
) -> list[Path]:
    """Write the network of a run's best checkpoint, or of a given checkpoint; return the files.

    Args:
        run: the folder of a run or of a checkpoint.
        own: the model settings of the run, which the caller has compared with the manifest by
            :func:`distseg.training.run_config.check_model`.
        output: the folder for the files.
        formats: some of ``FORMATS``. The default is safetensors and torch. For a network of PatchGD
            it is safetensors alone, since that network cannot be written as a program.

    Raises:
        ValueError: a package is missing, PyTorch cannot export the network, or the exported program
            does not return the network's logits.
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
            f"format onnx needs the package {missing[0]}: pip install onnx onnxscript, or leave "
            "onnx out of --formats"
        )
    if patches and (others := [name for name in formats if name != "safetensors"]):
        raise ValueError(
            f"{run} is a network of patches (PatchGD), and the number of patches depends on the "
            f"image's size, so it cannot be written as {others[0]}: export it to safetensors, or "
            "use it in Python with distseg.load"
        )
    model = load_named(checkpoint, own)
    data, folder = manifest["data"], Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    unit = (1,) if patches else _unit(model, padded=own.pad is not None)
    least = 1 if own.pad is None else own.pad + 1
    program, files = None, [folder / "export.json"]
    for name in ("model.safetensors", "model.pt2", "model.onnx"):
        (folder / name).unlink(missing_ok=True)  # left by an earlier export, perhaps of another run
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
    """Return, for each dim, the number of which image sizes must be multiples, in pixels.

    It is the total stride of the network, so that no layer has to cut or pad a feature map.

    Args:
        model: the network.
        padded: True if the network pads images of any size itself; then the result is 1 for each
            dim.
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
    """Return a network as a program of torch.export, which returns logits.

    The program is checked: on an image of another size it must return the network's logits.

    Args:
        model: the network.
        bands: the number of channels of an input image.
        unit: for each dim, the number of pixels that image sizes are multiples of.
        least: the smallest size along a dim, as a number of units.

    Raises:
        ValueError: PyTorch cannot export the network, or the program does not return its logits.
    """

    def size(*counts: int) -> tuple[int, ...]:
        return tuple(n * count for n, count in zip(unit, counts))

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
    except Exception as e:  # torch.export can raise anything
        raise ValueError(
            f"torch.export cannot follow this network ({type(e).__name__}: "
            f"{' '.join(str(e).split())[:300]}): export only its weights with --formats safetensors"
        ) from e
    if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
        raise ValueError(
            "the program that torch.export makes returns wrong logits for another image size: "
            "export only the weights with --formats safetensors"
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
    """Silence PyTorch's log messages and warnings inside the context."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
