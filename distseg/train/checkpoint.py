"""Checkpoints: weights, buffers and optimizer state as safetensors, all else as a JSON manifest; nothing is unpickled.

A checkpoint is a folder that appears whole or not at all: it is written under another name, flushed to disk, renamed.
Each stage of a pipeline writes its own layers. Tensors are keyed by the layer's name, so any mesh, of any number of
stages, can load what any other wrote::

    runs/demo/checkpoints/step-00000600/manifest.json
                                        weights-1-of-2.safetensors      enc0_conv0.weight, ...
                                        weights-2-of-2.safetensors      dec0_conv0.weight, ...
                                        optimizer-1-of-2.safetensors    enc0_conv0.weight/exp_avg, ...
    runs/demo/checkpoints/last.json     which one is the last, which one the best
"""

from __future__ import annotations

import json
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Callable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from distseg.comm.collective import Alone
from distseg.disk import to_disk, whole
from distseg.memory_format import unshared

VERSION = 1
_INDEX = "last.json"


class Checkpoints:
    """The checkpoints of a run; written by the ranks of one pipeline (all others have :class:`SilentCheckpoints`).

    Args:
        afresh: a new run in an old folder; the old checkpoints are set aside as ``checkpoints.1`` and so on.
        stages: the communicator of the pipeline, whose ranks all see the folder. The first one writes what is not a stage's own.
    """

    def __init__(self, run: str | Path, keep: int = 2, afresh: bool = False, stages=Alone()):
        self.folder, self.keep, self.stages = Path(run) / "checkpoints", keep, stages
        if afresh and stages.rank == 0 and self.folder.exists():
            number = next(n for n in count(1) if not self.folder.with_name(f"checkpoints.{n}").exists())
            os.replace(self.folder, self.folder.with_name(f"checkpoints.{number}"))

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, manifest: dict, score: float | None) -> Path:
        """Write the state after ``manifest['step']`` steps; keep the last ``keep`` and the one with the best score."""
        name = f"step-{manifest['step']:08d}"
        partial, final = self.folder / f".{name}.partial", self.folder / name
        first, stages = self.stages.rank == 0, self.stages.size
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.stages.Barrier()
        part = f"-{self.stages.rank + 1}-of-{stages}"
        _save_tensors(partial / f"weights{part}.safetensors", dict(model.state_dict()))
        _save_tensors(partial / f"optimizer{part}.safetensors", optimizer_state(model, optimizer))
        self.stages.Barrier()
        if first:
            _write_json(partial / "manifest.json", {"format": "distseg checkpoint", "version": VERSION, "score": score, "parts": stages, **manifest})
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            to_disk(self.folder)
            self._note(name, score)
        return final

    def _note(self, name: str, score: float | None) -> None:
        index = read_index(self.folder) or {"best": None, "best_score": None}
        index["last"] = name
        # Without any score so far, the last one is as good as any.
        if index["best_score"] is None or (score is not None and score >= index["best_score"]):
            index.update(best=name, best_score=score)
        _write_json(self.folder / _INDEX, index)
        kept = {name, index["best"], *sorted(p.name for p in self.folder.glob("step-*"))[-max(1, self.keep) :]}
        for old in self.folder.glob("step-*"):
            if old.name not in kept:
                shutil.rmtree(old)


class SilentCheckpoints:
    """Of the ranks that do not write."""

    def save(self, *_, **__) -> None:
        pass


def find(path: str | Path, which: str = "best") -> Path:
    """The folder of a checkpoint: ``path`` itself, or the best or last one of the run ``path``.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        return path
    index = read_index(path / "checkpoints")
    if index is None:
        raise FileNotFoundError(f"no checkpoint in {path}: train first, or name the folder of a run or of one of its checkpoints")
    return path / "checkpoints" / index[which]


def read_index(folder: Path) -> dict | None:
    try:
        return json.loads((folder / _INDEX).read_text())
    except FileNotFoundError:
        return None


def read_manifest(checkpoint: Path) -> dict:
    """The manifest of a checkpoint.

    Raises:
        ValueError: not a checkpoint of ours, or of a newer version.
    """
    file = checkpoint / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{file} is damaged ({e}): use another checkpoint of the run") from None
    if not isinstance(manifest, dict) or manifest.get("format") != "distseg checkpoint":
        raise ValueError(f"{file} is not the manifest of a distseg checkpoint")
    if manifest["version"] > VERSION:
        raise ValueError(f"{file} has version {manifest['version']}, this distseg reads up to {VERSION}: update distseg")
    return manifest


@torch.no_grad()
def load_weights(checkpoint: Path, model: nn.Module, part: bool = False) -> None:
    """Copy a checkpoint's weights and buffers into ``model``.

    Args:
        part: ``model`` holds some of the layers only; the checkpoint has more.

    Raises:
        ValueError: names or shapes differ; says which, both shapes, and that the model is another.
    """
    own = model.state_dict()
    tensors, names = _load_tensors(checkpoint, "weights", lambda name: not part or name in own)
    for name in own if part else [*own, *names]:
        if name not in tensors or name not in own or tensors[name].shape != own[name].shape:
            raise ValueError(
                f"checkpoint {checkpoint} is of another model: {name} is {_shape(tensors, name)} in the checkpoint and {_shape(own, name)} in the "
                "model: use the model section of the checkpoint's manifest.json"
            )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state, bit by bit."""
    names = {p: name for name, p in model.named_parameters()}
    own = set(names.values())
    saved, every = _load_tensors(checkpoint, "optimizer", lambda key: key.rpartition("/")[0] in own)
    known = {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else {"step", "exp_avg", "exp_avg_sq"}
    others = {key.rpartition("/")[2] for key in every} - known
    if others:
        raise ValueError(
            f"checkpoint {checkpoint} holds the state of another optimizer ({', '.join(sorted(others))}) than {type(optimizer).__name__}: "
            "resume with the optim section of its manifest.json"
        )
    for p in optimizer.param_groups[0]["params"]:
        state = {key.rpartition("/")[2]: value for key, value in saved.items() if key.rpartition("/")[0] == names[p]}
        for key, value in state.items():
            # Momenta live as the parameter does (its strides, its device); step counts stay on the CPU but for fused CUDA.
            like = torch.empty_like(p) if value.shape == p.shape else torch.empty_like(value, device=p.device)
            optimizer.state[p][key] = like.copy_(value)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors keyed as ``parameter/field``."""
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items() if isinstance(value, Tensor)}


def _shape(tensors: dict[str, Tensor], name: str) -> str:
    return "x".join(map(str, tensors[name].shape)) or "a number" if name in tensors else "missing"


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(unshared({name: t.detach() for name, t in tensors.items()}), path)
    to_disk(path)


def _load_tensors(checkpoint: Path, kind: str, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], list[str]]:
    """The wanted tensors of all parts, and the names of all."""
    tensors, names = {}, []
    parts = read_manifest(checkpoint)["parts"]
    for part in range(1, parts + 1):
        path = checkpoint / f"{kind}-{part}-of-{parts}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                names += file.keys()
                tensors.update({name: file.get_tensor(name) for name in file.keys() if wanted(name)})
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing: the checkpoint is not whole; use another one of the run") from None
        except SafetensorError as e:
            raise ValueError(f"{path} is damaged or cut off ({e}): use another checkpoint of the run") from None
    return tensors, names


def _write_json(path: Path, content: dict) -> None:
    with whole(path) as growing:
        growing.write_text(json.dumps(content, indent=1, default=str))
