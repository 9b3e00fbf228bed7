"""Take settings over from a run's manifest, for evaluation and prediction.

The manifest may come from somebody else. The settings of the network, and those on which its
results depend, are taken over as checked values. A network that is a user's function
(``package.module:function``) is not imported just because the manifest names it, since importing
runs the code: the user must name the function again. This is not necessary for runs that this user
trained in the same folder with the same code (:mod:`distseg.training.checkpoint.own_runs`).
Settings of the machine that trained, such as scratch folders and threads, are not taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from distseg.config.file import sections
from distseg.config.patchgd import PatchConfig, PatchgdConfig
from distseg.config.settings import Config, ModelBase, ModelConfig
from distseg.models.bands import record_images
from distseg.models.capture.capture import as_network
from distseg.models.joined import joined
from distseg.models.layers import padded
from distseg.models.zoo import build_model, outline_model, plain_model
from distseg.training.checkpoint.files import MANIFEST, find, load_weights, read_run_manifest
from distseg.training.checkpoint.own_runs import distrusted
from distseg.training.patchgd.zoo import patch_network

TAKEN = {
    "model": tuple(field.name for field in fields(ModelConfig)),
    "mesh": ("stages",),
    "pipeline": ("schedule", "balance", "placement"),
    "spatial": ("exchange_every", "fuse_below", "norm_scope"),
    "approximate": ("halo", "norms"),
    "data": ("store", "shrink"),
    "train": ("precision", "channels_last"),
    "patchgd": tuple(field.name for field in fields(PatchgdConfig)),
    "predict": ("tile", "probabilities", "formats", "trace"),
    "run": ("device",),
}
# Settings of the machine that trained. They are not taken over, but listed for the user if set.
_LEFT = ("pipeline.devices", "predict.scratch", "run.threads", "run.timeout")


def network_of(
    model: ModelBase, patchgd: PatchgdConfig | None, bands: int | None, outputs: int | None
) -> nn.Module:
    """Return the network that a run trains.

    Args:
        model: the settings of the network, or of PatchGD's backbone.
        patchgd: the settings of PatchGD; None for exact training.
        bands: number of bands of an image; None if ``model`` determines it.
        outputs: number of outputs of the network; None if ``model`` determines it.

    Raises:
        ValueError: the network cannot be built (see :func:`distseg.models.zoo.plain_model`), or
            PatchGD cannot train it.
    """
    if patchgd is None:
        return outline_model(model, bands, outputs)
    return patch_network(
        patchgd, model, lambda count: plain_model(_open(model), bands, count), outputs
    )


def taken_over(config: dict, run: str) -> dict:
    """Return the sections and fields of a manifest's ``config`` that evaluation and prediction use.

    Names of code that is not trusted are left out.

    Args:
        config: the manifest's ``config``.
        run: the folder of the run or of a checkpoint.

    Raises:
        ValueError: the manifest names no network, or it has a setting of the network that this
            version does not know.
    """
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        raise ValueError(
            f"{run}: manifest.json names no network (config, model, name), so distseg does not "
            f"know what to build: use another checkpoint"
        )
    if unknown := sorted(set(model) - set(TAKEN["model"])):
        raise ValueError(
            f"{run}: the network in manifest.json has the setting {unknown[0]}, which this version "
            "of distseg does not know: update distseg, or use another checkpoint"
        )
    found, known = {}, sections(kind_of(config))
    for section, names in TAKEN.items():
        content = config.get(section)
        if isinstance(content, dict) and section in known:
            those = [name for name in names if name in content and name in known[section]]
            found[section] = {name: content[name] for name in those}
    if is_code(model["name"]) and distrusted(_folder(run), model["name"]):
        del found["model"]["name"]  # the user must name it
    if is_code(head := _head_of(config)) and distrusted(_folder(run), head, "head"):
        del found["patchgd"]["head"]
    if _on_devices(config):
        for name in ("balance", "placement"):
            found.get("pipeline", {}).pop(name, None)
    return found


def _folder(run: str | Path) -> Path:
    """Return the folder of a run; ``run`` is that folder or the folder of a checkpoint."""
    path = Path(run).absolute()
    return path.parents[1] if (path / MANIFEST).exists() else path


def left_behind(config: dict, defaults: dict) -> list[str]:
    """Return texts, such as ``run.threads 4``, on settings that are used in training only.

    Evaluation and prediction do not take them over, because they concern the machine that trained.
    A setting with its default value is left out.

    Args:
        config: the manifest's config.
        defaults: the default config, as a dict of its sections.
    """
    found = []
    for setting in _LEFT:
        section, _, field = setting.partition(".")
        content = config.get(section)
        value = content.get(field) if isinstance(content, dict) else None
        if value is not None and value != defaults.get(section, {}).get(field, value):
            found.append(f"{setting} {value}")
    return found


def check_model(config: dict, own: ModelBase, run: str) -> None:
    """Refuse to import code that the user did not name, or to build a network other than the run's.

    A run's manifest may name a function that builds the network. Calling it runs the code of
    whoever wrote the manifest.

    Args:
        config: the manifest's config.
        own: the model settings of the run, overridden by the user's flags.
        run: the run's folder.

    Raises:
        ValueError: the code is not trusted, or a setting differs from the run's. The message names
            the flag to add or to leave out.
    """
    model = config["model"]
    check_named(config, own.name, run)
    for field in TAKEN["model"]:
        value = getattr(own, field)
        if field in model and model[field] != value:
            raise ValueError(
                f"model.{field} is {value}, but {run} was trained with {model[field]}: leave "
                f"--model.{field} out"
            )


def check_head(config: dict, given: str, run: str) -> None:
    """Refuse to import the code of a PatchGD head that the user did not name.

    Args:
        config: the manifest's config.
        given: the value of ``patchgd.head`` in the user's flags.
        run: the run's folder.

    Raises:
        ValueError: the code is not trusted. The message names the flag to add.
    """
    name = _head_of(config)
    if is_code(name) and given != name and (why := distrusted(_folder(run), name, "head")):
        raise ValueError(
            f"{run} was trained with the head {name}: its manifest may come from anywhere, and "
            f"importing the name runs code ({why}). If you trust it, add --patchgd.head {name}"
        )


def _head_of(config: dict) -> str:
    """Return the setting ``patchgd.head`` of a run, or "" if the run is not PatchGD."""
    return str(config["patchgd"].get("head", "")) if kind_of(config) is PatchConfig else ""


def kind_of(config: dict) -> type:
    """Return the class of a run's settings: Config for exact training, PatchConfig for PatchGD."""
    train, section = config.get("train"), config.get("patchgd")
    # In runs of earlier versions, the section is always present and train.method names the method.
    method = train.get("method", "patchgd") if isinstance(train, dict) else "patchgd"
    return PatchConfig if isinstance(section, dict) and method == "patchgd" else Config


def check_method(manifest: dict, own: type, checkpoint: Path) -> None:
    """Refuse to continue a run from a checkpoint of the other method, exact training or PatchGD.

    Args:
        manifest: the manifest of the checkpoint.
        own: the class of this run's config, Config or PatchConfig.
        checkpoint: the folder of the checkpoint.

    Raises:
        ValueError: the checkpoint was written by the other method. The message names the checkpoint
            and the command that goes on from it.
    """
    kind = kind_of(manifest["config"])
    if own is not kind:
        words = ("PatchGD", "patchgd") if kind is PatchConfig else ("exact training", "train")
        raise ValueError(
            f"{checkpoint} was written by {words[0]}: go on from it with distseg {words[1]}, or "
            "choose another train.output"
        )


def check_named(config: dict, given: str, run: str) -> None:
    """Refuse a run if loading it would import code that the user did not name.

    Runs that this user trained in the same folder, with unchanged code, are accepted.

    Args:
        config: the manifest's config.
        given: the value of ``model.name`` in the user's flags.
        run: the run's folder.

    Raises:
        ValueError: the code is not trusted. The message names the flag to add.
    """
    name = config["model"]["name"]
    if is_code(name) and given != name and (why := distrusted(_folder(run), name)):
        but = "" if given == ModelConfig.name else f", not {given}"
        raise ValueError(
            f"{run} was trained with the network {name}{but}: its manifest may come from anywhere, "
            f"and importing the name runs code ({why}). If you trust it, add "
            f"--model.name {name}"
        )


def load(
    run: str | Path,
    model: nn.Module | None = None,
    which: str = "best",
    normalise: bool = True,
    head: nn.Module | None = None,
) -> nn.Module:
    """Return the trained network of a run, for whole images, in evaluation mode on the CPU.

    The module takes raw pixel values, float (N, bands, *size), and normalises them with the
    constants of the run (:class:`Normalised`). The module's attribute ``network`` is the network
    without this normalisation.

    Args:
        run: the folder of a run, or of a checkpoint.
        model: your own module, built as for training. Its weights are overwritten. It may be None
            if the run's network is one of distseg's, or if you trained the run yourself, in the
            same folder and with the same code.
        which: best, last, or the name of a checkpoint.
        normalise: True to normalise the input. If False, the network itself is returned, which
            takes normalised images: (pixels - mean) / std for each band, with the constants of
            ``export.json`` or of the store.
        head: your own head of a PatchGD run, built as for training. It may be None in the same
            cases as ``model``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: ``model`` or ``head`` is needed but not given, or differs from the module that
            was trained.
    """
    checkpoint = find(run, which)
    manifest = read_run_manifest(checkpoint)
    network = _network(run, checkpoint, manifest, model, head)
    return normalised(network, manifest) if normalise else network


class Normalised(nn.Module):
    """A network that takes raw pixel values as in image files, (N, bands, *size).

    Args:
        network: a network that takes normalised images.
        mean: the mean of each band.
        std: the standard deviation of each band.
    """

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.network = network
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32))

    def forward(self, image: Tensor) -> Tensor:
        """Return the network's logits for raw pixels (N, bands, *size)."""
        bands = (1, -1, *(1,) * (image.dim() - 2))
        mean, std = self.mean.view(bands), self.std.view(bands)
        return self.network((image - mean) / std)


def normalised(network: nn.Module, manifest: dict) -> Normalised:
    """Return ``network`` with a normalisation of its input in front, in evaluation mode.

    Args:
        network: a network that takes normalised images.
        manifest: the run's manifest, with the mean and the standard deviation of each band.
    """
    data = manifest["data"]
    return Normalised(network, data["mean"], data["std"]).eval()


def _network(
    run: str | Path,
    checkpoint: Path,
    manifest: dict,
    model: nn.Module | None,
    head: nn.Module | None = None,
) -> nn.Module:
    """Return the trained network, which takes normalised images.

    Args:
        run: the folder of the run or of the checkpoint.
        checkpoint: the folder of the checkpoint whose weights are loaded.
        manifest: the checkpoint's manifest.
        model: the user's module, or None to build the network that the manifest names.
        head: the user's head of a PatchGD network, or None to build the one of the manifest.

    Raises:
        ValueError: the manifest names code that is not trusted, and the module is None.
    """
    if model is not None:
        return _with_weights(checkpoint, manifest, lambda count: _as_trained(model, manifest), head)
    found = taken_over(manifest["config"], str(run))["model"]
    if "name" not in found:
        raise ValueError(
            f"{run} was trained with the network {manifest['config']['model']['name']}, which is "
            f"code that distseg does not import by itself: build the network and pass it as model"
        )
    return _with_weights(
        checkpoint,
        manifest,
        lambda count: build_model(_open(ModelConfig(**found)), manifest["channels"][0], count),
        head,
    )


def load_named(checkpoint: Path, own: ModelBase) -> nn.Module:
    """Return the network of a checkpoint, which takes normalised images.

    Args:
        checkpoint: the folder of the checkpoint.
        own: the model settings of the run. If they name a user's function, :func:`check_model` must
            have accepted them.
    """
    manifest = read_run_manifest(checkpoint)
    if ":" not in own.name:
        return _network(checkpoint, checkpoint, manifest, None)
    return _with_weights(
        checkpoint,
        manifest,
        lambda count: _as_trained(
            plain_model(_open(own), manifest["channels"][0], count), manifest
        ),
    )


def _open(model: ModelBase) -> ModelBase:
    """Return model settings without ``out_channels``, so that any number of outputs can be built.

    ``out_channels`` in a run's manifest is the number of outputs of the whole network. PatchGD's
    backbone has a different number.
    """
    return replace(model, out_channels=None)


def _as_trained(model: nn.Module, manifest: dict) -> nn.Module:
    trained = manifest["config"]["model"]
    multiple, outputs = trained.get("pad"), trained.get("outputs")
    joined(model, trained.get("inputs"), outputs and tuple(outputs))
    return model if multiple is None else padded(model, multiple)


def _with_weights(
    checkpoint: Path,
    manifest: dict,
    made: Callable[[int], nn.Module],
    head: nn.Module | None = None,
) -> nn.Module:
    """Return a run's network with its trained weights, in evaluation mode.

    Args:
        checkpoint: the folder of the checkpoint.
        manifest: its manifest.
        made: a function that builds the network, or PatchGD's backbone, with the given number of
            outputs.
        head: the head of a PatchGD network; by default the one that the manifest names.
    """
    outputs = manifest["channels"][1]
    if of_patches(manifest):
        taken = taken_over(manifest["config"], str(checkpoint))
        if head is None and "head" not in taken["patchgd"]:
            raise ValueError(
                f"{checkpoint} was trained with the head {_head_of(manifest['config'])}, which is "
                f"code that distseg does not import by itself: build the head and pass it to "
                f"distseg.load as head"
            )
        model = ModelBase(seed=taken["model"].get("seed", 0))
        network = patch_network(PatchgdConfig(**taken["patchgd"]), model, made, outputs, head)
        load_weights(checkpoint, network)
    else:
        network = made(outputs)
        record_images(network, manifest["channels"][0])
        load_weights(checkpoint, as_network(network))
    return network.eval()


def of_patches(manifest: dict) -> bool:
    """Return True if a run was trained by PatchGD (:mod:`distseg.training.patchgd.network`)."""
    return kind_of(manifest["config"]) is PatchConfig


def is_code(name: str) -> bool:
    """Return True if ``model.name`` is a user's function, not the name of a distseg network."""
    return ":" in name and not name.startswith("distseg.models.")


def _on_devices(config: dict) -> bool:
    content = config.get("pipeline")
    return isinstance(content, dict) and content.get("placement") == "devices"
