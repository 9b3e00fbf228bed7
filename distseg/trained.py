"""What evaluation and prediction take over from the manifest of a run, which may come from somebody else.

The network, and what its results depend on, are the run's: they are taken over, as checked values. Code is not: a network that
is a function of the user's (``package.module:function``) has to be named again, as importing it runs it. What belongs to
the machine of the training, its folders, devices and threads, stays there.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Callable

from torch import nn

from distseg.checkpoint.files import find, load_weights, read_run_manifest
from distseg.config import Config, ModelConfig, PatchgdConfig, TrainConfig
from distseg.models.bands import tell
from distseg.models.capture import as_network
from distseg.models.layers import padded
from distseg.models.patch_zoo import patch_network
from distseg.models.zoo import build_model, plain_model

TAKEN = {
    "model": tuple(field.name for field in fields(ModelConfig)),
    "mesh": ("stages",),
    "pipeline": ("schedule", "balance", "placement"),
    "spatial": ("halo", "exchange_every", "fuse_below", "norm_scope"),
    "data": ("store", "shrink"),
    "train": ("method", "precision", "channels_last"),
    "patchgd": tuple(field.name for field in fields(PatchgdConfig)),
    "predict": ("tile", "probabilities", "formats"),
    "run": ("device",),
}
_LEFT = ("pipeline.devices", "predict.scratch", "run.threads", "run.timeout")  # of the machine; told where they are set


def taken_over(config: dict, run: str) -> dict:
    """The sections and fields of a manifest's ``config`` that hold for evaluation and prediction too.

    Raises:
        ValueError: there is no network in it, or one that this version can not make.
    """
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        raise ValueError(f"{run}: manifest.json names no network (config, model, name), so what was trained is not known: use another checkpoint")
    if unknown := sorted(set(model) - set(TAKEN["model"])):
        raise ValueError(f"{run}: the network in manifest.json has {unknown[0]}, which this distseg does not know: update distseg, or use another checkpoint")
    found = {}
    for section, names in TAKEN.items():
        content = config.get(section)
        if isinstance(content, dict):
            found[section] = {name: content[name] for name in names if name in content}
    if _is_code(model["name"]):
        del found["model"]["name"]  # the user names it, or nobody
    if _on_devices(config):
        for name in ("balance", "placement"):
            found["pipeline"].pop(name, None)
    return found


def left_behind(config: dict, defaults: dict) -> list[str]:
    """Settings of the training that are not taken over though they differ from the defaults, as they were written: ``run.threads 4``."""
    found = []
    for setting in _LEFT:
        section, _, field = setting.partition(".")
        content = config.get(section)
        value = content.get(field) if isinstance(content, dict) else None
        if value is not None and value != defaults[section][field]:
            found.append(f"{setting} {value}")
    return found


def check_model(config: dict, own: ModelConfig, run: str) -> None:
    """Refuse code that the user did not name, and a network other than the run's.

    Args:
        config: the manifest's.
        own: of the flags, over what was taken over.

    Raises:
        ValueError: with the flag to add, or the one to leave out.
    """
    model = config["model"]
    check_named(config, own.name, run)
    for field in TAKEN["model"]:
        value = getattr(own, field)
        if field in model and model[field] != value:
            raise ValueError(f"model.{field} is {value}, but {run} was trained with {model[field]}: leave --model.{field} out")


def check_named(config: dict, given: str, run: str) -> None:
    """Refuse code that is not the network which the user has ``given``."""
    name = config["model"]["name"]
    if _is_code(name) and given != name:
        but = "" if given == ModelConfig.name else f", not {given}"
        raise ValueError(
            f"{run} was trained with the network {name}{but}: its manifest may come from anywhere, and to import that runs its code. "
            f"If you trust it, add --model.name {name}"
        )


def load(run: str | Path, model: nn.Module | None = None, which: str = "best") -> nn.Module:
    """The trained network of a run, a plain module of PyTorch's for whole images, in evaluation mode on the CPU.

    Args:
        run: its folder, or a checkpoint's.
        model: a module of your own that was trained, made as for training; its weights are overwritten. None where the run's network is one by name.
        which: best, last, or a checkpoint's name.

    Raises:
        ValueError: the run's network is a function of somebody's own and ``model`` is not given, or is another one.
    """
    checkpoint = find(run, which)
    manifest = read_run_manifest(checkpoint)
    if model is not None:
        return _with_weights(checkpoint, manifest, lambda count: _as_trained(model, manifest))
    found = taken_over(manifest["config"], str(run))["model"]
    if "name" not in found:
        raise ValueError(f"{run} was trained with the network {manifest['config']['model']['name']}: make it, and give it as model")
    return _with_weights(checkpoint, manifest, lambda count: build_model(_open(ModelConfig(**found)), manifest["channels"][0], count))


def load_named(checkpoint: Path, own: ModelConfig) -> nn.Module:
    """The same of a checkpoint, where a function of somebody's own was named again (:func:`check_model`)."""
    if ":" not in own.name:
        return load(checkpoint)
    manifest = read_run_manifest(checkpoint)
    return _with_weights(checkpoint, manifest, lambda count: _as_trained(plain_model(_open(own), manifest["channels"][0], count), manifest))


def _open(model: ModelConfig) -> ModelConfig:
    """The manifest says how many outputs there are; a backbone's are others."""
    return replace(model, out_channels=None)


def _as_trained(model: nn.Module, manifest: dict) -> nn.Module:
    multiple = manifest["config"]["model"].get("pad")
    return model if multiple is None else padded(model, multiple)


def _with_weights(checkpoint: Path, manifest: dict, made: Callable[[int], nn.Module]) -> nn.Module:
    """``made``: makes the network of a run, or the backbone of one of patches, with so many outputs."""
    outputs = manifest["channels"][1]
    if of_patches(manifest):
        taken = taken_over(manifest["config"], str(checkpoint))
        config = Config(model=ModelConfig(seed=taken["model"].get("seed", 0)), train=TrainConfig(method="patchgd"), patchgd=PatchgdConfig(**taken["patchgd"]))
        network = patch_network(config, made, outputs)
        load_weights(checkpoint, network)
    else:
        network = made(outputs)
        tell(network, manifest["channels"][0])
        load_weights(checkpoint, as_network(network))
    return network.eval()


def of_patches(manifest: dict) -> bool:
    """Whether a run's network is one of patches (:mod:`distseg.models.patches`)."""
    return manifest["config"].get("train", {}).get("method") == "patchgd"


def _is_code(name: str) -> bool:
    """Whether a network is a function of somebody's, other than distseg's own."""
    return ":" in name and not name.startswith("distseg.models.")


def _on_devices(config: dict) -> bool:
    content = config.get("pipeline")
    return isinstance(content, dict) and content.get("placement") == "devices"
