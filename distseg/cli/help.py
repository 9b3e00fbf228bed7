"""First part of a command's help: examples, and the settings that most runs set.

The list of all flags comes after this part. It has about 90 flags, among which the important ones
would be hard to find.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import fields

from distseg.config.file import sections
from distseg.config.settings import Config

EXAMPLES = {
    "train": ("mpirun -n 4 distseg train CONFIG.yaml --data.store s.h5 --train.output runs/mine",),
    "patchgd": (
        "mpirun -n 4 distseg patchgd CONFIG.yaml --train.output runs/mine --mesh.tiles 1x4",
    ),
    "evaluate": (
        "distseg evaluate runs/mine",
        "distseg evaluate runs/mine --data.store s.h5 --split val",
    ),
    "predict": (
        "distseg predict runs/mine --images a.tif b.tif",
        "mpirun -n 4 distseg predict runs/mine",
    ),
    "report": (
        "distseg report runs/mine",
        "distseg report runs/mine --output mine.html --pictures 3",
    ),
    "export": ("distseg export runs/mine --formats safetensors torch onnx",),
    "verify": ("mpirun -n 4 distseg verify --image 97x131 --mesh.tiles 2x2",),
    "profile": ("mpirun -n 4 distseg profile CONFIG.yaml --image 512x512 --mesh.stages 4",),
    "bench": ("mpirun -n 4 distseg bench strong CONFIG.yaml --size 512x512",),
    "submit": ("distseg submit CONFIG.yaml --system slurm --nodes 2 --time 2:00:00",),
}

_MESH = ("mesh.samples", "mesh.tiles", "mesh.stages")
_PARTS = ("spatial.exchange_every", "streaming.memory")
FIRST = {
    "train": (
        *("data.store", "train.output", "model.name", "model.depth", "model.base_channels"),
        *(*_MESH, *_PARTS, "data.crop", "data.images", "loss.name", "optim.lr", "train.epochs"),
        "train.resume",
    ),
    "patchgd": (
        *("data.store", "train.output", "model.name", "mesh.samples", "mesh.tiles"),
        *("patchgd.patch", "patchgd.sampled", "patchgd.head", "data.images", "optim.lr"),
        *("train.epochs", "train.resume"),
    ),
    "evaluate": ("data.store", "streaming.memory", "predict.tile"),
    "predict": ("predict.formats", "predict.probabilities", "streaming.memory", "predict.tile"),
    "verify": ("model.name", "model.depth", "loss.name", *_MESH, *_PARTS),
    "profile": ("data.store", "model.name", *_MESH, *_PARTS),
    "bench": ("data.store", "model.name", *_MESH, *_PARTS, "train.accumulate"),
}


def head(command: str, own: Mapping[str, str], kind: type = Config) -> str:
    """Return the first part of the help of ``distseg COMMAND``.

    Args:
        command: the name of the command, such as "train".
        own: the flags that only this command has, with the help text of each.
        kind: the class of the command's config.
    """
    lines = [*EXAMPLES.get(command, ()), ""]
    documents = field_documents(kind)
    first = {f"--{name}": documents[name] for name in FIRST.get(command, ())}
    for flag, text in (own | first).items():
        lines += _entry(flag, text)
    lines += [
        "",
        "Each setting can also be a field of the config file (section: {field: value}). All flags:",
        "",
    ]
    return "\n".join(lines)


def _entry(flag: str, text: str) -> list[str]:
    body = textwrap.wrap(text, 70) or [""]
    rest = body if len(flag) > 24 else body[1:]
    first = f"  {flag}" if len(flag) > 24 else f"  {flag:26}{body[0]}"
    return [first, *(" " * 28 + line for line in rest)]


def field_documents(kind: type = Config) -> dict[str, str]:
    """Return the first sentence of each setting's documentation, by its name ``section.field``."""
    from docstring_parser import parse_from_object

    found = {}
    for section in fields(kind):
        for part in section.default_factory.__mro__[:-1]:
            for parameter in parse_from_object(part).params:
                text = " ".join((parameter.description or "").split())
                found[f"{section.name}.{parameter.arg_name}"] = text.split(". ")[0].replace(
                    "``", ""
                )
    names = [f"{s}.{f}" for s, own in sections(kind).items() for f in own]
    return {name: found.get(name, "") for name in names}
