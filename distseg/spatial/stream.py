"""Windows one after another, without gradients, in the memory of one: how whole images are evaluated and predicted.

Where every norm has fixed statistics a window's result depends on nothing else. A live norm (instance, group) needs
the statistics of the whole image first: the network then runs in segments from norm to norm, over all windows each,
and between segments a window's activations and skips wait in a scratch folder. Both give the whole-image result.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Callable, Iterator

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distseg.geometry.tile import Place
from distseg.memory_format import channels_last, lies_last, unshared
from distseg.models.layers import skip_store
from distseg.spatial.norm import DistributedNorm
from distseg.spatial.parallelize import TiledModel
from distseg.spatial.piece import on_tile
from distseg.watch import beat


Skips = dict[str, Tensor]


def stream(model: TiledModel, places: list[Place], load: Callable[[int], Tensor], scratch: str | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, output on the tile (1, C', *tile.size)) for each place of one image.

    Args:
        places: this rank's windows; with live norms every rank of the context's communicator has at least one.
        load: index -> the window's pixels (1, C, *window.size).
        scratch: folder for activations between norms; by default the system's temporary folder.
    """
    for i, x, _ in stream_layers(model, places, lambda i: (load(i), {}), scratch):
        yield i, on_tile(x, places[i])


@torch.no_grad()
def stream_layers(
    model: TiledModel, places: list[Place], load: Callable[[int], tuple[Tensor, Skips]], scratch: str | None = None, part: range | None = None
) -> Iterator[tuple[int, Tensor, Skips]]:
    """The same for some layers of a flat model: (index, feature map of the window, skips that wait for a later pop).

    Args:
        load: index -> the feature map before these layers, and the skips that were stashed before.
    """
    layers = model.layers if part is None or not model.flat else model.layers[part.start : part.stop]
    live = model.live_norms if layers is None else any(isinstance(layer, DistributedNorm) and layer.live for layer in layers)
    if model.exchange is not None or not live or (len(places) == 1 and model.context.norm_comm.size == 1):
        assert not (model.exchange and model.exchange.exchanges) or len(places) == 1  # tiles that exchange borders run together
        for i, place in enumerate(places):
            beat(f"tile {i + 1} of {len(places)}")
            x, skips = load(i)
            yield i, model([x], [place], part, [skips])[0], skips
        return
    if not model.flat:
        raise ValueError("a model with live norms that is not a flat nn.Sequential can not be streamed over windows: flatten it, or use batch norm")
    with tempfile.TemporaryDirectory(prefix="distseg-", dir=scratch) as folder:
        yield from _by_segments(model, layers, places, load, Path(folder))


def _by_segments(model: TiledModel, layers: list, places: list[Place], load: Callable, folder: Path) -> Iterator[tuple[int, Tensor, Skips]]:
    *segments, last = _segments(layers)
    waiting = Waiting(folder, load)
    norm = statistics = None
    for segment in segments:
        parts = []
        model.context.places = places
        for i in range(len(places)):
            x, skips = _run(model, segment[:-1], *waiting.take(i), i, norm, statistics)
            parts += segment[-1].moments(x, i)
            waiting.put(i, x, skips)
        norm, statistics = segment[-1], segment[-1].statistics(parts)
    for i in range(len(places)):
        model.context.places = places  # the consumer may have run other layers meanwhile
        x, skips = _run(model, last, *waiting.take(i), i, norm, statistics)
        yield i, x, skips


def _segments(layers: list) -> list[list]:
    """The layers cut behind each live norm."""
    segments: list[list] = [[]]
    for layer in layers:
        segments[-1].append(layer)
        if isinstance(layer, DistributedNorm) and layer.live:
            segments.append([])
    return segments


def _run(model: TiledModel, layers: list, x: Tensor, skips: dict, index: int, norm: DistributedNorm | None, statistics):
    """The norm that ended the last segment, then the layers of this one."""
    model.context.current = index
    beat(f"window {index}")
    if norm is not None:
        x = norm.normalise(x, index, statistics)
    with skip_store(skips):
        for layer in layers:
            x = layer(x)
    return x, skips


class Waiting:
    """Feature maps and skips of windows in a folder, a file a window, until they are needed again."""

    def __init__(self, folder: Path, load: Callable[[int], tuple[Tensor, Skips]] | None = None):
        self.folder, self.load = folder, load
        self.layout: dict[int, tuple[torch.device, bool]] = {}

    def take(self, i: int) -> tuple[Tensor, Skips]:
        if i not in self.layout:
            return self.load(i)
        device, last = self.layout[i]
        tensors = {name: _restored(t.to(device), last) for name, t in load_file(self._file(i)).items()}
        return tensors.pop("x"), {name.partition("/")[2]: t for name, t in tensors.items()}

    def put(self, i: int, x: Tensor, skips: Skips) -> None:
        self.layout[i] = x.device, lies_last(x)
        tensors = {"x": x, **{f"skip/{name}": skip for name, skip in skips.items()}}
        try:
            save_file(unshared(tensors), self._file(i))
        except Exception as e:
            free = os.statvfs(self.folder)
            raise OSError(
                f"activations could not be written to the scratch folder {self.folder} ({e}; {free.f_bavail * free.f_frsize / 2**30:.1f} GiB free there): "
                "name a folder with more room as predict.scratch"
            ) from e

    def _file(self, i: int) -> Path:
        return self.folder / f"{i}.safetensors"


def _restored(t: Tensor, last: bool) -> Tensor:
    if not last:
        return t
    return t.contiguous(memory_format=channels_last(t.dim()))
