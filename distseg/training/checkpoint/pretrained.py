"""Begin a run with weights from a safetensors file or another run (``train.init``).

Names and shapes alone decide which tensor goes where, before any work. Then each rank reads the
tensors of its own layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from distseg.models.bands import channels_of
from distseg.models.layers import Derived
from distseg.models.network import calls_of, channels_of_maps, user_name
from distseg.training.checkpoint.files import file_of, find, read_manifest
from distseg.training.checkpoint.tensors import read_tensors, shapes_in

_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Pretrained:
    """Assignment of tensors in files to the tensors of a network.

    Attributes:
        files: the files with the tensors.
        sources: a dict with the tensors that are loaded, from the tensor's name in the network to
            its name in the files.
        lines: lines to print about what is loaded and what is not.
    """

    files: tuple[Path, ...]
    sources: Mapping[str, str]
    lines: tuple[str, ...]

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Copy the tensors into ``model``, which may have only some of the network's layers.

        Raises:
            ValueError: a file is damaged, or has values that are not finite.
        """
        own = {
            self.sources[name]: tensor
            for name, tensor in model.state_dict().items()
            if name in self.sources
        }
        for file in self.files:
            for name, found, _ in read_tensors(file, own.__contains__):
                if found.is_floating_point() and not found.isfinite().all():
                    raise ValueError(
                        f"train.init {file} has values in {name} that are NaN or infinite: choose "
                        "another file"
                    )
                own[name].copy_(
                    found if found.shape == own[name].shape else of_bands(found, own[name].shape[1])
                )


def pretrained(path: str, model: nn.Module, renamed: Mapping[str, str] | None = None) -> Pretrained:
    """Assign the tensors in ``path`` to the tensors of a network.

    A tensor whose shape differs from the network's raises an error, with two exceptions. A layer
    that reads the image is adapted to another number of bands. The last layer keeps the network's
    new values if the number of classes differs.

    Args:
        path: a safetensors file with the names of the user's module, or the folder of a run, with
            the names of its network.
        model: the network, perhaps on the meta device.
        renamed: a dict from prefixes of names in the file to the prefixes that replace them.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: the file is not a safetensors file, or belongs to another network.
    """
    folder = Path(path).is_dir()
    files = _of_run(path) if folder else [_checked(path)]
    try:
        shapes = {
            _renamed(name, renamed or {}): (name, shape)
            for file in files
            for name, shape in shapes_in(file).items()
        }
    except ValueError as e:
        raise ValueError(f"train.init: {e}: copy the file again, or choose another file") from None
    own = model.state_dict()
    names = {name: name if folder and name in shapes else user_name(name, model) for name in own}
    classes, readers = channels_of(model)[1], _readers(model)
    sources, anew, adapted = {}, [], []
    for name, tensor in own.items():
        there, shape = shapes.get(names[name], (None, ()))
        if there is None or shape == tuple(tensor.shape):
            sources |= {name: there} if there is not None else {}
            anew += [names[name]] if there is None and tensor.is_floating_point() else []
        elif (
            name in readers
            and len(shape) > 2
            and (shape[0], *shape[2:]) == (tensor.shape[0], *tensor.shape[2:])
        ):
            sources[name] = there
            adapted.append(
                f"{names[name]} from {shape[1]} bands to {tensor.shape[1]}{readers[name]}"
            )
        elif shape[1:] == tuple(tensor.shape[1:]) and tensor.shape[0] == classes:
            anew.append(names[name])
        else:
            raise ValueError(
                f"train.init {path} belongs to another network: {there} is {_size(shape)} in the "
                f"file, "
                f"and {names[name]} is {_size(tensor.shape)} here: use the same settings of "
                "model, or take this tensor out of the file"
            )
    if not any(own[name].is_floating_point() for name in sources):
        raise ValueError(
            f"train.init {path} has no weights of this network: its names are like "
            f"{_some(shapes)}, the network's like {_some(list(names.values()))}: "
            "set train.init_names from a prefix in the file to a prefix in the network, such as "
            '{"backbone.": "encoder."}'
        )
    unused = sorted({there for there, _ in shapes.values()} - set(sources.values()))
    taken, total = (len({names[name] for name in some}) for some in (sources, own))
    lines = [f"begins with {taken} of its {total} tensors from {path}"]
    anew = list(dict.fromkeys(anew))
    lines += [f"no tensor in the file fits (initial values stay): {_some(anew)}"] if anew else []
    lines += [f"adapted: {'; '.join(adapted)}"] if adapted else []
    lines += [f"not used from the file: {_some(unused)}"] if unused else []
    return Pretrained(tuple(files), sources, tuple(lines))


def _readers(model: nn.Module) -> dict[str, str]:
    """Return the names of the weights of convolutions that read the image or some of its bands.

    The result is a dict from the name of a weight to a note, which may be empty. The note is
    printed if the weight is adapted to another number of bands (:func:`of_bands`).
    """
    bands = channels_of(model)[0]
    try:
        calls, channels = calls_of(model), channels_of_maps(model)
    except ValueError:
        # Not captured as a graph: take the weights with the image's number of bands.
        return {
            name: ""
            for name, p in model.state_dict().items()
            if p.dim() > 2 and p.shape[1] == bands
        }
    of_image, found = {0}, {}
    for made, (call, count) in enumerate(zip(calls, channels[1:]), 1):
        if len(call.inputs) > 1 or call.inputs[0] not in of_image:
            continue
        weights = {name: p for name, p in call.layer.state_dict().items() if p.dim() > 1}
        conv = call.layer.inner if isinstance(call.layer, Derived) else call.layer
        if isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and conv.groups == 1:
            note = (
                " (its weight is computed, so images whose bands are equal may give another result)"
                if conv is not call.layer
                else ""
            )
            found |= {f"{call.name}.{name}": note for name, p in weights.items() if p.dim() > 2}
        elif not weights and count <= bands:
            of_image.add(made)
    return found


def of_bands(weight: Tensor, bands: int) -> Tensor:
    """Adapt the weight of a layer that reads images to another number of bands.

    The weight is repeated along the bands and scaled. So an image whose bands are all equal gives
    the same result as before. If the new number of bands is 1, the result is the sum of the weight
    over its bands. This is what timm's ``adapt_input_conv`` does.

    Args:
        weight: (O, I, *kernel), for I bands.
        bands: the new number of bands.
    """
    if bands == 1:
        return weight.sum(1, keepdim=True)
    times = -(-bands // weight.shape[1])
    return weight.repeat(1, times, *(1 for _ in weight.shape[2:]))[:, :bands] * (
        weight.shape[1] / bands
    )


def _checked(path: str) -> Path:
    """Return the path of the safetensors file that the setting ``train.init`` names.

    Raises:
        FileNotFoundError, ValueError: it does not exist, or is not a safetensors file.
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(
            f"train.init is {path}, which does not exist: name a file NAME.safetensors, or the "
            "folder of a run"
        )
    if file.suffix != ".safetensors":
        raise ValueError(
            f"train.init is {path}, but weights are read from NAME.safetensors or the folder of a "
            "run: reading a pickle (.pt, .pth) may run code of whoever wrote it. If you trust the "
            "file, convert it: "
            f"safetensors.torch.save_file(torch.load({file.name!r}, weights_only=True), "
            f"{file.stem + '.safetensors'!r})"
        )
    return file


def _of_run(path: str) -> list[Path]:
    checkpoint = find(path)
    parts = read_manifest(checkpoint)["parts"]
    return [checkpoint / file_of("weights", part, parts) for part in range(1, parts + 1)]


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    start = max((start for start in renamed if name.startswith(start)), key=len, default=None)
    return name if start is None else renamed[start] + name[len(start) :]


def _size(shape) -> str:
    return "x".join(map(str, shape)) or "a number"


def _some(names) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
