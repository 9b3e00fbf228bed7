"""Read checkpoints: tensors from safetensors files, and all other data from a manifest.

Weights, buffers and optimizer state are tensors. Each stage of a pipeline has files with its own
layers. Tensors are keyed by the layer's name, so any mesh with any number of stages can load a
checkpoint of any other mesh. Nothing is unpickled. The manifest, in JSON, holds a checksum of every
tensor and of itself, so that damage is detected::

    runs/demo/checkpoints/step-00000600/manifest.json
                                        weights-1-of-2.safetensors     enc0_conv0.weight, ...
                                        weights-2-of-2.safetensors     dec0_conv0.weight, ...
                                        optimizer-1-of-2.safetensors   enc0_conv0.weight/exp_avg,
                                                                       ...
    runs/demo/checkpoints/last.json     names the last checkpoint and the best one

:mod:`distseg.training.checkpoint.saving` writes them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from distseg.comm.replicas import broadcast, broadcast_tensor
from distseg.report.disk import atomic_write
from distseg.training.checkpoint.tensors import names_in, read_tensors

VERSION = 2  # 1 had no checksums
FORMAT = "distseg checkpoint"
MANIFEST, INDEX, FOLDER = "manifest.json", "last.json", "checkpoints"
KINDS = ("weights", "optimizer")
# Names of the tensors of an optimizer's state, for the optimizers of `optim.name`.
_KNOWN_STATE = {"SGD": {"momentum_buffer"}} | dict.fromkeys(
    ("Adam", "AdamW"), {"step", "exp_avg", "exp_avg_sq"}
)
_KEYS = {"version": int, "parts": int, "step": int}  # fields of every manifest
_RUN_KEYS = {"epoch": int, "channels": list, "config": dict, "data": dict}  # more for runs


def find(path: str | Path, which: str = "best") -> Path:
    """Return the folder of a checkpoint.

    Args:
        path: the folder of a checkpoint, or of a run.
        which: the checkpoint of a run: best, last, or a name such as step-00000600.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        return path
    there = names_of(path)
    if not there:
        raise FileNotFoundError(
            f"no checkpoint in {path}: train first, or name the folder of a run or of one of its "
            "checkpoints"
        )
    if which not in ("best", "last"):
        if which not in there:
            raise FileNotFoundError(f"{path} has no checkpoint {which}: it has {', '.join(there)}")
        return path / FOLDER / which
    name = (read_index(path / FOLDER) or {}).get(which) or there[-1]
    if name not in there:
        print(
            f"distseg: the {which} checkpoint of {path}, {name}, is gone, or has no {MANIFEST}: "
            f"{there[-1]} is used instead",
            file=sys.stderr,
        )
        name = there[-1]
    return path / FOLDER / name


def names_of(run: str | Path) -> list[str]:
    """Return the names of a run's checkpoints, oldest first."""
    return sorted(p.parent.name for p in (Path(run) / FOLDER).glob(f"step-*/{MANIFEST}"))


def read_index(folder: Path) -> dict | None:
    """Return the index of a run's checkpoints, or None if there is none or it is damaged.

    The index has the name of the last checkpoint (``last``), that of the best one (``best``) and
    the score of the best one (``best_score``). A damaged index is reported by a warning.

    Args:
        folder: the folder ``checkpoints`` of the run.
    """
    try:
        return _index_in(folder)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as e:
        print(
            f"distseg: {folder / INDEX} is damaged ({e}), so the newest checkpoint counts as the "
            "last and the best",
            file=sys.stderr,
        )
        return None


def _index_in(folder: Path) -> dict:
    """Return the index of a run's checkpoints (:func:`read_index`).

    Raises:
        ValueError, OSError: there is no index, or it is damaged.
    """
    index = json.loads((folder / INDEX).read_text())
    if not (
        isinstance(index, dict)
        and isinstance(index.get("last"), str)
        and isinstance(index.get("best_score"), (float, int, type(None)))
    ):
        raise ValueError("its field last must be a text, and its field best_score a number")
    if index.pop("digest", None) not in (None, digest_of(index)):
        raise ValueError("its checksum does not match its content")
    return index


def read_manifest(checkpoint: Path) -> dict:
    """Return the manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: the manifest is damaged, was not written by distseg, or has a newer version than
            this distseg can read.
    """
    file = checkpoint / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no {file}, so the checkpoint is incomplete{_other(checkpoint)}"
        ) from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is damaged ({e}){_other(checkpoint)}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(
            f"{file} is not the manifest of a distseg checkpoint: name a run or a checkpoint that "
            "distseg wrote"
        )
    _check_keys(file, manifest, _KEYS)
    if manifest["version"] > VERSION:
        raise ValueError(
            f"{file} has version {manifest['version']}, but this distseg reads versions up to "
            f"{VERSION}: update distseg"
        )
    if manifest["version"] > 1 and manifest.get("digest") != digest_of(manifest):
        raise ValueError(
            f"{file} is damaged (its checksum does not match its content){_other(checkpoint)}"
        )
    return manifest


def read_run_manifest(checkpoint: Path) -> dict:
    """Return the manifest of a training checkpoint.

    It is checked to have all fields that evaluation, prediction and resuming need.

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: the manifest is damaged, or lacks a field.
    """
    manifest = read_manifest(checkpoint)
    _check_keys(checkpoint / MANIFEST, manifest, _RUN_KEYS)
    _check_keys(
        checkpoint / MANIFEST, manifest["data"], {"classes": list, "mean": list, "std": list}
    )
    return manifest


def _check_keys(file: Path, found: dict, wanted: dict[str, type]) -> None:
    for key, kind in wanted.items():
        if type(found.get(key)) is not kind:
            raise ValueError(
                f"{key!r} in {file} must be of type {kind.__name__}, got {found.get(key)!r}: the "
                "file is damaged or was changed by hand; use another checkpoint"
            )


def digest_of(manifest: dict) -> str:
    """Return the SHA-256 of a checkpoint's manifest.

    The manifest includes the checksums of all tensors, so the SHA-256 identifies the whole
    checkpoint.
    """
    return hashlib.sha256(
        json.dumps({k: v for k, v in manifest.items() if k != "digest"}, sort_keys=True).encode()
    ).hexdigest()


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write a checkpoint's manifest, with a SHA-256 of its content.

    Readers see the whole manifest or none.
    """
    manifest = json.loads(json.dumps(manifest, default=str))
    write_json(folder / MANIFEST, {**manifest, "digest": digest_of(manifest)})


def write_index(folder: Path, index: dict) -> None:
    """Write the index of a run's checkpoints, with a SHA-256 of its content.

    The index says which checkpoint is the last and which is the best. Readers see the old index or
    the whole new one.
    """
    write_json(folder / INDEX, {**index, "digest": digest_of(index)})


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, so that readers see the old file or the whole new one."""
    with atomic_write(path) as growing:
        growing.write_text(json.dumps(content, indent=1, default=str))


# tensors


def file_of(kind: str, part: int, parts: int) -> str:
    """Return the name of the file of one stage, such as weights-1-of-2.safetensors.

    Args:
        kind: weights or optimizer.
        part: the index of the stage's rank in the pipeline, counted from 1.
        parts: the number of ranks in the pipeline.
    """
    return f"{kind}-{part}-of-{parts}.safetensors"


@torch.no_grad()
def load_weights(checkpoint: Path, model: nn.Module, part: bool = False) -> None:
    """Copy a checkpoint's weights and buffers into ``model``.

    Args:
        checkpoint: the folder of the checkpoint.
        model: the model to fill.
        part: True if ``model`` has only some of the checkpoint's layers.

    Raises:
        ValueError: names or shapes differ, or a tensor is damaged. The message names the tensor and
            both shapes. It is also raised if a tensor of ``model`` is on the meta device.
    """
    own = model.state_dict()
    for name, tensor in own.items():
        if tensor.is_meta:
            raise ValueError(
                f"{name} of the model is on the meta device, which holds no values: call "
                f'model.to_empty(device="cpu") before the weights of {checkpoint} are loaded'
            )
    tensors, names = _load_tensors(checkpoint, "weights", lambda name: not part or name in own)
    for name in own if part else [*own, *names]:
        if name not in tensors or name not in own or tensors[name].shape != own[name].shape:
            raise ValueError(
                f"checkpoint {checkpoint} is of another model: {name} is {_shape(tensors, name)} "
                f"in the checkpoint and {_shape(own, name)} in the model: use the model section "
                "of the checkpoint's manifest.json"
            )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's optimizer state into ``optimizer``, bit for bit.

    Args:
        checkpoint: the folder of the checkpoint.
        model: the model that ``optimizer`` trains. Its parameter names are the keys of the state.
            It may have only some of the checkpoint's layers.
        optimizer: the optimizer to fill.

    Raises:
        ValueError: the checkpoint has the state of another class of optimizer, or is damaged.
    """
    names = {p: name for name, p in model.named_parameters()}
    own = set(names.values())
    saved, every = _load_tensors(checkpoint, "optimizer", lambda key: key.rpartition("/")[0] in own)
    known = _KNOWN_STATE.get(type(optimizer).__name__)
    others = {key.rpartition("/")[2] for key in every} - (known or set())
    if known and others:
        raise ValueError(
            f"checkpoint {checkpoint} holds the state of another optimizer "
            f"({', '.join(sorted(others))}) than {type(optimizer).__name__}: "
            "resume with the optim section of its manifest.json"
        )
    for p in parameters_of(optimizer):
        state = {
            key.rpartition("/")[2]: value
            for key, value in saved.items()
            if key.rpartition("/")[0] == names.get(p)
        }
        for key, value in state.items():
            optimizer.state[p][key] = _state_like(p, value.shape, value.dtype).copy_(value)


def _state_like(p: Tensor, shape, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for one entry of the optimizer's state of parameter ``p``.

    The tensor lies on the parameter's device. If it has the parameter's shape, it also gets the
    parameter's strides.
    """
    if tuple(shape) == tuple(p.shape):
        return torch.empty_like(p, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=p.device)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state, keyed as ``parameter/field``.

    An example of a key is ``enc0_conv0.weight/exp_avg``.
    """
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def share(model: nn.Module, optimizer: torch.optim.Optimizer, comm) -> None:
    """Broadcast weights, buffers and optimizer state from rank 0 of ``comm``.

    All ranks of ``comm`` must call it together, with the same layers.
    """
    if comm.size == 1:
        return
    broadcast(model, comm)
    parameters = parameters_of(optimizer)
    forms = [
        (i, key, tuple(v.shape), v.dtype)
        for i, p in enumerate(parameters)
        for key, v in optimizer.state.get(p, {}).items()
        if isinstance(v, Tensor)
    ]
    for i, key, shape, dtype in comm.bcast(forms, root=0):
        state = optimizer.state[parameters[i]]
        if comm.rank != 0:
            state[key] = _state_like(parameters[i], shape, dtype)
        broadcast_tensor(state[key], comm)


def _shape(tensors: dict[str, Tensor], name: str) -> str:
    return "x".join(map(str, tensors[name].shape)) or "a number" if name in tensors else "missing"


def _load_tensors(
    checkpoint: Path, kind: str, wanted: Callable[[str], bool]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the wanted tensors of all stages' files, and the names of all tensors in the files.

    Args:
        checkpoint: the folder of the checkpoint.
        kind: weights or optimizer.
        wanted: a function that takes the name of a tensor and returns True to read it.
    """
    tensors, names = {}, []
    manifest = read_manifest(checkpoint)
    for path, sums in _files(checkpoint, manifest, kind):
        try:
            names += sorted(sums) if sums is not None else names_in(path)
            for name, tensor, found in read_tensors(path, wanted):
                if sums is not None and found != sums.get(name):
                    raise ValueError(
                        f"{path} is damaged: the tensor {name} has the checksum {found}, but the "
                        f"checkpoint's manifest says {sums.get(name)}"
                    )
                tensors[name] = tensor
            if lost := [name for name in sums or () if wanted(name) and name not in tensors]:
                raise ValueError(
                    f"{path} is damaged: it does not hold the tensor {lost[0]}, which is listed in "
                    "the checkpoint's manifest"
                )
        except FileNotFoundError as e:
            raise FileNotFoundError(
                f"{e}, so the checkpoint is incomplete{_other(checkpoint)}"
            ) from None
        except ValueError as e:
            raise ValueError(f"{e}{_other(checkpoint)}") from None
    return tensors, names


def _files(
    checkpoint: Path, manifest: dict, kind: str
) -> Iterator[tuple[Path, dict[str, str] | None]]:
    """Yield (file, checksums of its tensors by name) for each stage of the checkpoint.

    Checkpoints of version 1 have no checksums. For them the pair is (file, None).

    Args:
        checkpoint: the folder of the checkpoint.
        manifest: its manifest.
        kind: weights or optimizer.
    """
    for part in range(1, manifest["parts"] + 1):
        name = file_of(kind, part, manifest["parts"])
        yield checkpoint / name, None if manifest["version"] == 1 else manifest["tensors"][name]


def _other(checkpoint: Path) -> str:
    """Return the end of an error message, which names other checkpoints of the run to use."""
    others = [name for name in names_of(checkpoint.parent.parent) if name != checkpoint.name]
    if not others:
        return ": use another checkpoint of the run"
    return (
        f": use another checkpoint of the run ({', '.join(others[-3:])}; to train, by "
        f"--train.resume NAME, else by its folder, {checkpoint.parent / others[-1]})"
    )


def check_run(run: str | Path, note: Callable[[str], None] = lambda text: None) -> list[str]:
    """Read every tensor of a run's checkpoints and return a sentence for each damage that is found.

    Args:
        run: the folder of a run, or of a single checkpoint.
        note: a function that is called with the name of each checkpoint before it is read.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    run = Path(run)
    checkpoints = [run] if (run / MANIFEST).exists() else sorted((run / FOLDER).glob("step-*"))
    if not checkpoints:
        raise FileNotFoundError(
            f"no checkpoint in {run}: name the folder of a run or of one of its checkpoints"
        )
    findings = [] if run in checkpoints else _check_index(run)
    for checkpoint in checkpoints:
        note(str(checkpoint))
        findings += _check_checkpoint(checkpoint)
    return findings


def _check_index(run: Path) -> list[str]:
    """Return a text for each error in the index of a run's checkpoints."""
    try:
        index = _index_in(run / FOLDER)
    except (ValueError, OSError) as e:
        return [f"{run / FOLDER / INDEX} is damaged ({e})"]
    there = names_of(run)
    lost = [which for which in ("best", "last") if index.get(which) not in (None, *there)]
    return [
        f"{run / FOLDER / INDEX} names {index[which]} as the {which}, which is gone, or has no "
        f"{MANIFEST}"
        for which in lost
    ]


def _check_checkpoint(checkpoint: Path) -> list[str]:
    """Return a text for each damaged file of a checkpoint."""
    findings = []
    for kind in KINDS:
        try:
            if kind == KINDS[0] and read_manifest(checkpoint)["version"] == 1:
                findings.append(
                    f"{checkpoint} is of version 1, which has no checksums: files that are cut off "
                    "are found, changed values are not"
                )
            _load_tensors(checkpoint, kind, lambda name: True)
        except (ValueError, OSError) as e:
            findings.append(str(e))
    return list(dict.fromkeys(findings))
