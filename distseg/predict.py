"""Whole images through a trained network in bounded memory, spread over all ranks, equal to the whole-image result.

An image is split into tiles on the stride grid, tile i is computed by rank i modulo the number of ranks from its
window, and only tiles are kept: there are no seams because nothing is blended.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np
import torch

from distseg.comm.collective import Alone, set_timeout
from distseg.check import check_effects
from distseg.comm.replicas import broadcast
from distseg.comm.staging import upload
from distseg.config import Config
from distseg.data.class_files import Classes, are_there
from distseg.data.class_map import PartialMap, identity_of
from distseg.data.prefetch import prefetch
from distseg.extents import Extents
from distseg.geometry.receptive import receptive_field
from distseg.geometry.tile import Box, Place, most_even_grid, tiles, window
from distseg.launch import set_up, together
from distseg.memory_format import channels_last as last_format
from distseg.mesh import Mesh
from distseg.models.zoo import outline_model
from distseg.pipeline.build import own_part
from distseg.pipeline.devices import check_config, devices_of
from distseg.pipeline.execute import Pipeline
from distseg.pipeline.infer import stream_stages
from distseg.plan.stages import partition_of
from distseg.report.progress import progress
from distseg.scene import Scene
from distseg.spatial.context import Context
from distseg.spatial.exchange import Exchange
from distseg.spatial.parallelize import TiledModel
from distseg.spatial.stream import stream
from distseg.train.checkpoint import find, load_weights, read_run_manifest
from distseg.train.engine import autocast, make_exchange, place_stages, read_around, used_reach
from distseg.train.metrics import most_likely
from distseg.train.precision import choose
from distseg.trained import check_model
from distseg.watch import beat, phase


class Predictor:
    """A model in evaluation mode over whole images; every rank calls it alike.

    Args:
        model: already parallelized and on its device; its context's communicators are set here.
        replicas: the ranks that hold the same layers; the tiles of an image are dealt to them.
        autocast: makes the context in which the network runs.
        pipeline: this rank's links to the other stages, where the model is cut into stages.
        outputs: channels of the result; for probabilities.
        exact: the model's halo is its own; with another, whole windows go through every layer.
    """

    def __init__(
        self, model: TiledModel, replicas, device, autocast, tile: Extents, scratch: str | None = None, channels_last: bool = False, pipeline=None,
        outputs: int | None = None, exact: bool = True,
    ):  # fmt: skip
        self.model, self.replicas, self.device, self.autocast = model, replicas, device, autocast
        self.tile, self.scratch, self.channels_last, self.pipeline = tile, scratch, channels_last, pipeline
        self.outputs, self.exact = outputs, exact
        self._workers = {replicas.size: replicas}
        self._exchanges: dict[Extents, Exchange] = {}

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage, which has the results."""
        return self.pipeline is None or self.pipeline.last

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes results: the first that has them."""
        return self.last and self.replicas.rank == 0

    @property
    def independent(self) -> bool:
        """Whether a tile's result depends on its own window only."""
        live = self.model.always_live or self.model.context.per_window and self.model.live_in_training
        return not live and not (self.model.exchange and self.model.exchange.exchanges)

    def grid_of(self, size) -> Extents:
        """The tiles of an image, of at most the configured size, or a stride cell more; one a rank where borders are exchanged."""
        stride = self.model.reach.stride
        if self.model.exchange and self.model.exchange.exchanges:
            return most_even_grid(size, stride, self.replicas.size)
        steps = (max(1, t // s) * s for t, s in zip(self.tile, stride))
        return Extents(-(-n // step) for n, step in zip(size, steps))

    def check(self, size) -> None:
        """Refuse an image that can't be predicted, before anything is computed.

        Raises:
            ValueError: naming the setting.
        """
        if len(self.tile) != len(size):
            raise ValueError(f"predict.tile is {self.tile}, of {len(self.tile)} dims, but images have {len(size)}: give it as many numbers")
        if self.scratch is not None and not Path(self.scratch).is_dir():
            raise ValueError(f"predict.scratch is {self.scratch}, which is no folder: make it, or name another")
        if not self.independent and not self.model.flat and len(self.tiles_of(size)) > 1:
            raise ValueError(
                f"an image of {Extents(size)} pixels has several tiles of predict.tile {self.tile}, but a model with live norms that is not a flat nn.Sequential "
                "is predicted in one: raise predict.tile, flatten the model, or use batch norm"
            )

    def tiles_of(self, size) -> list[Box]:
        return tiles(size, self.grid_of(size), self.model.reach.stride)

    def __call__(self, scene: Scene, numbers: list[int] | None = None) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (tile, logits (C', *tile.size) float32) for the tiles of this rank; nothing on ranks without the last stage.

        Args:
            numbers: of the tiles to compute, the same on all ranks; only where tiles are :attr:`independent`. All by default.
        """
        every = self.tiles_of(scene.size)
        every = every if numbers is None else [every[i] for i in numbers]
        workers = self._first(min(self.replicas.size, len(every)))
        if self.replicas.rank >= workers.size:
            return
        mine = every[self.replicas.rank :: workers.size]
        exchange = self._exchange(scene.size, workers)
        reach = read_around(self.model.reach, exchange)
        places = [Place(tuple(scene.size), t, window(t, scene.size, reach), (0,), (0,)) for t in mine]

        reads = self.pipeline is None or self.pipeline.first
        with closing(prefetch((scene.read(place.window) for place in places if reads), 1)) as ahead:

            def load(i: int) -> torch.Tensor:
                x = upload(torch.from_numpy(next(ahead)).unsqueeze(0), self.device, self._dtype)  # windows are asked for in order, each once
                return x.contiguous(memory_format=last_format(x.dim())) if self.channels_last else x

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
        """The model on tiles of these ranks that exchange borders, or on windows of which layers compute what later ones need."""
        exchanging = bool(self.model.exchange and self.model.exchange.exchanges)
        in_parts = self.model.links is not None and self.exact and self.pipeline is None and self.independent
        if not (exchanging or in_parts):
            return None
        grid = most_even_grid(size, self.model.reach.stride, workers.size) if exchanging else self.grid_of(size)
        if grid not in self._exchanges:
            if exchanging:
                self._exchanges[grid] = self.model.exchange.over(workers, grid)
            else:
                self._exchanges[grid] = Exchange(self.model.links, self.model.reach.stride, Alone(), (1,) * len(grid), grid, "all", 0, self.device, self.channels_last)
        return self._exchanges[grid]

    def agree(self, numbers: list[int] | None) -> list[int] | None:
        """What the first rank with the last stage says, on all ranks (collective)."""
        numbers = self.replicas.bcast(numbers, root=0) if self.last else numbers
        return numbers if self.pipeline is None else self.pipeline.comm.bcast(numbers, root=self.pipeline.partition.placement[-1])

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
    if stages < config.mesh.stages:
        config = replace(config, pipeline=replace(config.pipeline, balance=None))
    one = Extents((1,) * len(config.predict.tile))
    spatial = replace(config.spatial, tiles_per_rank=one, in_time="together")
    config = replace(config, mesh=replace(config.mesh, stages=stages, tiles=one), spatial=spatial, run=replace(config.run, memory=None))
    with together(world):
        check_config(config)
        check_effects(config)
        devices = devices_of(config, device)
        checkpoint = find(run)
        manifest = read_run_manifest(checkpoint)
        check_model(manifest["config"], config.model, run)
        model = outline_model(config.model, *manifest["channels"])
        reach = used_reach(receptive_field(model), config.spatial)
        partition = partition_of(config, model, config.predict.tile, reach, device.type)
    mesh = Mesh(world, world.size // stages, config.mesh.tiles, stages)
    # Weights come last, into the numbers that the network computes with.
    with together(world):
        context = Context(per_window=config.spatial.norm_scope == "window")
        exchange = make_exchange(config, model, reach, mesh.tiles, devices[0], channels_last)
        tiled = own_part(model, partition, mesh.stage, reach, context, config.model.seed, exchange=exchange)
    place_stages(tiled, partition, devices, precision, channels_last)
    phase(f"loading {checkpoint}")
    with together(world):
        if mesh.replicas.rank == 0:
            load_weights(checkpoint, model, part=partition is not None)
    broadcast(model, mesh.replicas)
    pipeline = Pipeline(partition, [], mesh.pipeline, devices[0]) if partition else None
    run_in = autocast(precision, device)
    outputs, exact = manifest["channels"][1], config.spatial.halo is None
    return Predictor(tiled, mesh.replicas, devices[0], run_in, config.predict.tile, config.predict.scratch, channels_last, pipeline, outputs, exact), manifest


def predict(predictor: Predictor, scene: Scene, paths: Sequence[Path], classes: Classes, probabilities: bool = False, network: str = "") -> bool:
    """Write the class map of an image, and on request the probability of each class, to files (:mod:`distseg.data.class_files`).

    The first rank with the last stage writes, a tile of each rank at a time, into ``NAME.partial``; the files appear when they are whole.
    Taken up after an interruption, tiles that are there are not computed again if a tile depends on its own window only. Collective.

    Args:
        network: tells the network and its settings from others (:func:`distseg.scene.network_identity`).

    Returns:
        on the rank that writes, whether there was anything to do: files of the same network and image are left as they are.
    """
    ranks = predictor.replicas
    first = predictor.writes
    predictor.check(scene.size)
    every = predictor.tiles_of(scene.size)
    likely = predictor.outputs if probabilities else 0
    identity = identity_of({"network": network, "source": scene.source, "classes": classes.names}, scene.size, every, likely)
    partial = None
    if first and not are_there(paths, identity):
        partial = PartialMap(paths[0].with_suffix(".partial"), identity, tuple(scene.size), every, likely)
    numbers = predictor.agree((partial.missing if predictor.independent else list(range(len(every)))) if partial else None)
    if numbers is None:
        return False
    if first and partial.taken_up and len(numbers) < len(every):
        print(f"{scene.name}: {len(every) - len(numbers)} of {len(every)} tiles are there already", flush=True)
    number_of = {tile: number for number, tile in enumerate(every)}
    mine = predictor(scene, numbers if len(numbers) < len(every) else None) if numbers else iter(())
    if not predictor.last:
        next(mine, None)  # which hands everything on and yields nothing
        return False
    rounds = -(-len(numbers) // min(ranks.size, len(numbers))) if numbers else 0
    try:
        with progress(rounds, "round", scene.name, enabled=first) as bar:
            for number in range(rounds):
                beat(f"round {number + 1} of {rounds}")
                done = next(mine, None)
                parts = ranks.gather(None if done is None else (done[0], most_likely(done[1]), _likelihood(done[1]) if probabilities else None))
                for tile, found, likelihood in filter(None, parts or []):
                    partial.write(number_of[tile], found, likelihood)
                bar.advance(pixels=sum(part[0].pixels for part in filter(None, parts or [])))
            next(mine, None)  # lets the generator leave evaluation mode
        if first:
            partial.pack(paths, classes)
    finally:
        if first:
            partial.close()
    return first


def _likelihood(logits: np.ndarray) -> np.ndarray:
    z = torch.from_numpy(logits)
    return (z.sigmoid() if len(z) == 1 else z.softmax(0)).to(torch.float16).numpy()
