"""Whole images through a trained network in bounded memory, spread over all ranks, equal to the whole-image result.

An image is split into tiles on the stride grid, tile i is computed by rank i modulo the number of ranks from its
window, and only tiles are kept: there are no seams because nothing is blended.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator

import h5py
import numpy as np
import torch

from distseg.comm.collective import set_timeout
from distseg.config import Config, ModelConfig
from distseg.data.readers import open_image
from distseg.data.store import Store
from distseg.extents import Extents
from distseg.geometry.tile import Box, Place, most_even_grid, tiles, window
from distseg.launch import set_up, together
from distseg.mesh import Mesh
from distseg.models.zoo import outline_model
from distseg.pipeline.build import own_part
from distseg.pipeline.devices import check_config, devices_of
from distseg.pipeline.execute import Pipeline
from distseg.pipeline.infer import stream_stages
from distseg.plan.stages import partition_of
from distseg.report.progress import progress
from distseg.spatial.context import Context
from distseg.spatial.exchange import Exchange
from distseg.spatial.parallelize import TiledModel
from distseg.spatial.stream import stream
from distseg.train.checkpoint import find, load_weights, read_manifest
from distseg.train.engine import autocast, make_exchange, place_stages, read_around, used_reach
from distseg.train.metrics import most_likely
from distseg.train.precision import choose


_LARGEST_PNG = 1 << 28  # pixels; a larger class map stays in HDF5 only


@dataclass(frozen=True)
class Scene:
    """An image to predict: its size, and normalised pixels (C, *box.size) float32 of any box."""

    name: str
    size: tuple[int, ...]
    read: Callable[[Box], np.ndarray]


class Predictor:
    """A model in evaluation mode over whole images; every rank calls it alike.

    Args:
        model: already parallelized and on its device; its context's communicators are set here.
        replicas: the ranks that hold the same layers; the tiles of an image are dealt to them.
        autocast: makes the context in which the network runs.
        pipeline: this rank's links to the other stages, where the model is cut into stages.
    """

    def __init__(
        self, model: TiledModel, replicas, device, autocast, tile: Extents, scratch: str | None = None, channels_last: bool = False, pipeline=None
    ):
        self.model, self.replicas, self.device, self.autocast = model, replicas, device, autocast
        self.tile, self.scratch, self.channels_last, self.pipeline = tile, scratch, channels_last, pipeline
        self._workers = {replicas.size: replicas}
        self._exchanges: dict[Extents, Exchange] = {}

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage, which has the results."""
        return self.pipeline is None or self.pipeline.last

    def tiles_of(self, size) -> list[Box]:
        """The tiles of an image, of at most the configured size, or a stride cell more; one a rank where borders are exchanged."""
        stride = self.model.reach.stride
        if self.model.exchange and self.model.exchange.exchanges:
            return tiles(size, most_even_grid(size, stride, self.replicas.size), stride)
        steps = (max(1, t // s) * s for t, s in zip(self.tile, stride))
        return tiles(size, Extents(-(-n // step) for n, step in zip(size, steps)), stride)

    def __call__(self, scene: Scene) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (tile, logits (C', *tile.size) float32) for the tiles of this rank; nothing on ranks without the last stage."""
        every = self.tiles_of(scene.size)
        workers = self._first(min(self.replicas.size, len(every)))
        if self.replicas.rank >= workers.size:
            return
        mine = every[self.replicas.rank :: workers.size]
        exchange = self._exchange(scene.size, workers)
        reach = read_around(self.model.reach, exchange)
        places = [Place(tuple(scene.size), t, window(t, scene.size, reach), (0,), (0,)) for t in mine]

        def load(i: int) -> torch.Tensor:
            x = torch.from_numpy(scene.read(places[i].window)).unsqueeze(0).to(self.device, self._dtype)
            return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

        with self._evaluating(workers, exchange), self.autocast():
            if self.pipeline is None:
                outputs = stream(self.model, places, load, self.scratch)
            else:
                outputs = stream_stages(self.pipeline, self.model, places, load, self.scratch)
            for i, output in outputs:
                yield mine[i], output[0].float().cpu().numpy()

    @property
    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.model.parameters()), torch.float32)

    def _first(self, count: int):
        """The communicator of the first ``count`` ranks, for images with fewer tiles than ranks (collective)."""
        if count not in self._workers:
            self._workers[count] = self.replicas.Split(int(self.replicas.rank >= count), self.replicas.rank)
        return self._workers[count] if self.replicas.rank < count else _NoWork(count)

    def _exchange(self, size, workers) -> Exchange | None:
        """The model on tiles of these ranks that exchange borders, if it exchanges them at all."""
        if self.model.exchange is None or not self.model.exchange.exchanges:
            return None  # windows are streamed
        grid = most_even_grid(size, self.model.reach.stride, workers.size)
        if grid not in self._exchanges:
            self._exchanges[grid] = self.model.exchange.over(workers, grid)
        return self._exchanges[grid]

    @contextmanager
    def _evaluating(self, workers, exchange: Exchange | None):
        """Evaluation mode, with instance and group statistics shared, and borders exchanged, by the ranks at work on the image."""
        context, training = self.model.context, self.model.training
        before = context.norm_comm, context.batch_comm, self.model.exchange
        context.norm_comm = context.batch_comm = workers
        self.model.exchange = exchange
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)
            context.norm_comm, context.batch_comm, self.model.exchange = before


@dataclass(frozen=True)
class _NoWork:
    """Stands for the communicator of the others on a rank without a tile."""

    size: int


def load_predictor(run: str, config: Config, world) -> tuple[Predictor, dict]:
    """The network of a run or checkpoint on all ranks of ``world``, ready to predict, and its manifest. Collective.

    It is cut into ``mesh.stages`` where these divide the ranks, else every rank holds all of it.
    """
    device = set_up(world, config.run.device, config.run.threads)
    precision, channels_last = choose(config.train, device, world)
    set_timeout(config.run.timeout)
    stages = config.mesh.stages if world.size % config.mesh.stages == 0 else 1
    config = replace(config, mesh=replace(config.mesh, stages=stages, tiles=Extents((1,) * len(config.predict.tile))))
    with together(world):
        check_config(config)
        devices = devices_of(config, device)
        checkpoint = find(run)
        manifest = read_manifest(checkpoint)
        model = outline_model(ModelConfig(**manifest["config"]["model"]), *manifest["channels"])
        reach = used_reach(model, config.spatial)
        partition = partition_of(config, model, config.predict.tile, reach, device.type)
    mesh = Mesh(world, world.size // stages, config.mesh.tiles, stages)
    with together(world):
        context = Context(per_window=config.spatial.norm_scope == "window")
        exchange = make_exchange(config, model, reach, mesh.tiles, devices[0], channels_last)
        tiled = own_part(model, partition, mesh.stage, reach, context, config.model.seed, exchange=exchange)
        load_weights(checkpoint, model, part=partition is not None)
    place_stages(tiled, partition, devices, precision, channels_last)
    pipeline = Pipeline(partition, [], mesh.pipeline, devices[0]) if partition else None
    run_in = autocast(precision, device)
    return Predictor(tiled, mesh.replicas, devices[0], run_in, config.predict.tile, config.predict.scratch, channels_last, pipeline), manifest


def store_scene(store: Store, name: str) -> Scene:
    return Scene(name, tuple(store.size(name)), lambda box: store.read_normalised(name, box))


def file_scene(path: str, manifest: dict) -> Scene:
    """An image file, normalised with the constants of the store that the network was trained on."""
    reader = open_image(path)
    data = manifest["data"]
    if reader.bands != len(data["mean"]):
        raise ValueError(f"{path} has {reader.bands} bands, but the network was trained on {len(data['mean'])}: predict images like those it knows")
    shape = (-1, *(1 for _ in reader.size))
    mean, std = (np.asarray(data[k], dtype=np.float32).reshape(shape) for k in ("mean", "std"))
    return Scene(Path(path).stem, tuple(reader.size), lambda box: (reader.read(box).astype(np.float32) - mean) / std)


def predict(predictor: Predictor, scene: Scene, output: str, classes: list[str], probabilities: bool = False) -> Path | None:
    """Write ``output/NAME.h5`` with ``classes`` (*size) uint8 and, on request, ``probabilities`` (C, *size) float16.

    The first rank with the last stage writes, a tile of each rank at a time; the file appears when it is whole. Returns its path there.
    """
    ranks, mine = predictor.replicas, predictor(scene)
    if not predictor.last:
        return next(mine, None)  # which hands everything on and yields nothing
    first = ranks.rank == 0
    rounds = -(-len(predictor.tiles_of(scene.size)) // min(ranks.size, len(predictor.tiles_of(scene.size))))
    with _writer(ranks.rank, output, scene, classes, probabilities) as write, progress(rounds, "round", scene.name, enabled=first) as bar:
        for _ in range(rounds):
            done = next(mine, None)
            parts = ranks.gather(None if done is None else (done[0], most_likely(done[1]), _likelihood(done[1]) if probabilities else None))
            for part in filter(None, parts or []):
                write(*part)
            bar.advance(pixels=sum(part[0].pixels for part in filter(None, parts or [])))
        next(mine, None)  # lets the generator leave evaluation mode
    return _drawn(Path(output) / f"{scene.name}.h5", classes) if first else None


def _drawn(path: Path, classes: list[str]) -> Path:
    """Draw the class map of ``path`` as a PNG beside it, a pixel a pixel, in the classes' colours; volumes and giants stay undrawn."""
    from PIL import Image

    from distseg.report.style import class_colors

    with h5py.File(path) as f:
        if f["classes"].ndim == 2 and f["classes"].size <= _LARGEST_PNG:
            found = f["classes"][:]
            picture = Image.frombytes("P", found.shape[::-1], found.tobytes())
            picture.putpalette(np.asarray(class_colors(classes), dtype=np.uint8).ravel().tolist())
            picture.save(path.with_suffix(".png"))
    return path


def _likelihood(logits: np.ndarray) -> np.ndarray:
    z = torch.from_numpy(logits)
    return (z.sigmoid() if len(z) == 1 else z.softmax(0)).to(torch.float16).numpy()


@contextmanager
def _writer(rank: int, output: str, scene: Scene, classes: list[str], probabilities: bool):
    """``write(box, class map, probabilities)`` into a file that is renamed when it is whole; nothing on other ranks."""
    if rank:
        yield lambda *_: None
        return
    Path(output).mkdir(parents=True, exist_ok=True)
    final = Path(output) / f"{scene.name}.h5"
    partial = final.with_suffix(".h5.partial")
    try:
        with h5py.File(partial, "w") as f:
            chunks = tuple(min(256, n) for n in scene.size)
            f.attrs["class_names"] = classes
            f.create_dataset("classes", scene.size, "u1", chunks=chunks, compression="gzip", compression_opts=1)
            if probabilities:
                count = max(1, len(classes)) if len(classes) > 2 else len(classes)
                f.create_dataset("probabilities", (count, *scene.size), "f2", chunks=(1, *chunks), compression="lzf")

            def write(box: Box, found: np.ndarray, likely: np.ndarray | None) -> None:
                f["classes"][box.slices] = found
                if likely is not None:
                    f["probabilities"][(slice(None), *box.slices)] = likely

            yield write
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)
