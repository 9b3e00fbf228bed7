"""Open a run: its store, model, engine, loader and checkpoints, checked before the first step."""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from torch import nn

from distseg.comm.consistency import assert_consistent, versions
from distseg.comm.launch import first_on_node, raise_jointly, set_up, transport_line
from distseg.comm.mesh import Mesh, MeshShape
from distseg.comm.progress import phase
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config, DataBase, ModelBase, OptimConfig, output_weights
from distseg.config.sizes import Size
from distseg.config.units import many
from distseg.data.loader import StepLoader
from distseg.data.sampler import sample_sizes
from distseg.data.store.store import Store
from distseg.inference.predictor import check_images as check_validated
from distseg.layers.loss import Loss
from distseg.models.bands import channels_of, dims_of
from distseg.models.network import check_calls, check_size
from distseg.planning.tile_size import memory_warnings
from distseg.report.disk import locked
from distseg.report.loggers.opening import check_loggers
from distseg.runtime.loss_scale import LossScale
from distseg.runtime.optimizer import state_copies
from distseg.runtime.precision import choose, emulation, gpu_lines
from distseg.tiling.tile import check_dims, owned_tiles
from distseg.training.checkpoint.files import load_optimizer, load_weights, read_run_manifest, share
from distseg.training.checkpoint.own_runs import remember_run
from distseg.training.checkpoint.pretrained import pretrained
from distseg.training.checkpoint.saving import (
    Checkpoints,
    SilentCheckpoints,
    require_space,
    set_aside,
    state_bytes,
)
from distseg.training.conflicts import (
    Facts,
    check_groups,
    check_labels,
    check_norms,
    check_patience,
    check_settings,
    has_batch_norm,
    norms_of,
    patch_notes,
    with_store,
)
from distseg.training.engine import Engine
from distseg.training.patchgd.engine import PatchEngine, PatchLoader, check_images
from distseg.training.patchgd.map_engine import MapEngine
from distseg.training.patchgd.network import PatchNetwork
from distseg.training.patchgd.unet import PatchUNet
from distseg.training.patchgd.zoo import check_grids, with_grid
from distseg.training.resume import (
    Position,
    changes,
    chosen,
    first_step,
    mesh_change,
    position_of,
    schedule_change,
)
from distseg.training.run_config import check_method, is_code, network_of
from distseg.training.surroundings import context_notes, context_of


class Run:
    """All objects that a training run needs, such as network and loader, and its position.

    All ranks must create this object together.

    Args:
        config: the settings of exact training or of PatchGD.
        world: the communicator of all ranks.

    Attributes:
        position: the finished steps and epochs, after which the run goes on.
        lines: the lines that rank 0 prints before the first step.
        validation_loss: the loss of the network's first output, the one that is predicted.

    Raises:
        ValueError, OSError: the config, data, checkpoint or mesh is wrong. It is raised on all
            ranks before any work.
    """

    def __init__(self, config: Config | PatchConfig, world):
        self.world, self.first = world, world.rank == 0
        phase("opening the store and the run's folder")
        self.device, self.threads = set_up(world, config.run.device, config.run.threads)
        checks = first_on_node(world)
        with raise_jointly(world):
            # Within a memory limit, no more decoded images are kept than a micro-batch has.
            limited = config.streaming.memory is not None and self.device.type != "cuda"
            self.store = _open_store(config.data, config.data.images if limited else None)
            if checks:
                self.store.check_files()
            first = self.store.size(self.store.split("train")[0])
            config = replace(config, loss=with_store(config.loss, self.store))
            config = config.with_dims(len(first), str(Size(first)))
            sizes = sample_sizes(self.store, config.data)
            self.image = max(sizes.values(), key=math.prod)  # stages are balanced for it
            if isinstance(config, PatchConfig):
                config = replace(config, patchgd=with_grid(config.patchgd, self.image))
            self.config = config
            MeshShape(config.mesh.samples, config.mesh.tiles, config.mesh.stages).check(world.size)
            if isinstance(config, PatchConfig):
                check_groups(config.model)
                check_images(self.store, config.data, config.patchgd, config.mesh.tiles)
            else:
                check_settings(config)
            self.model = network_of(
                config.model, config.patchgd, self.store.bands, _outputs(config.model, self.store)
            )
            if isinstance(self.model, PatchNetwork):
                check_grids(
                    self.model,
                    config.patchgd,
                    list(sizes.values()),
                    config.data.images,
                    config.mesh.samples,
                )
            check_labels(self.store, self.model, config.data, config.loss)
            if (context := context_of(self.model, config.data)) is not None:
                sizes = sample_sizes(self.store, config.data, context)
                self.image = max(sizes.values(), key=math.prod)
            check_patience(self.store, config.train)
            if self.first:
                check_loggers(config.train.loggers)
            self.parameters = sum(p.numel() for p in self.model.parameters())
            self.channels = channels_of(self.model)
            check_dims(first, dims_of(self.model))
            for name, size in sizes.items():
                check_size(self.model, size, f"a sample of {name}")
            batches = batches_of(set(sizes.values()), config.data.images)
            for size, images in batches[world.rank :: world.size]:
                check_calls(self.model, size, images)
            if isinstance(config, PatchConfig):
                self._notes = patch_notes(
                    config.patchgd, config.model, config.mesh, config.approximate, self.model
                )
            else:
                # The norms of PatchGD see patches, not these images.
                check_norms(
                    self.model, sizes, config.spatial, config.approximate, config.norm_images
                )
                self._notes = Facts(config, norms_of(self.model)).notes()
            self._batch_norm = has_batch_norm(self.model) and (
                isinstance(config, PatchConfig) or not config.spatial.frozen_norm
            )
            self.checkpoint = chosen(config.train.output, config.train.resume)
            self.resumed = read_run_manifest(self.checkpoint) if self.checkpoint else {}
            if self.resumed:
                check_method(self.resumed, type(config), self.checkpoint)
            init = config.train.init if not self.checkpoint else None
            self.init = (
                None if init is None else pretrained(init, self._begun, config.train.init_names)
            )
        assert_consistent(
            world,
            self._facts(),
            "Let all ranks see the same files: the store and train.output belong on a file "
            "system that all nodes share",
        )
        phase("building the network")
        precision, channels_last = choose(config.train, self.device, world)
        self.mesh = Mesh(world, config.mesh.samples, config.mesh.tiles, config.mesh.stages)
        by_patches = isinstance(config, PatchConfig)
        if by_patches:
            kind = MapEngine if isinstance(self.model, PatchUNet) else PatchEngine
            self.engine = engine = kind(
                config, self.mesh, self.model, self.device, precision, channels_last
            )
        else:
            self.engine = engine = Engine(
                config,
                self.mesh,
                self.model,
                self.image,
                self.device,
                precision,
                channels_last,
                decoded=self.store.decoded_bytes if limited else 0,
            )
        with raise_jointly(world):
            self.loader = (
                PatchLoader(self.store, config.data, config.train.seed, self.mesh)
                if by_patches
                else step_loader(self.store, engine)
            )
        self.position = position_of(self.resumed) if self.resumed else Position()
        if engine.loss_scale and self.position.loss_scale:
            engine.loss_scale = LossScale(self.position.loss_scale, self.position.scale_steps)
        self.first_step, repeats = first_step(
            self.position.samples, self._batch, self.loader.steps_per_epoch
        )
        self.total = config.train.epochs * self.loader.steps_per_epoch
        self.lines = [*self._introduction(), *self._changes(), *filter(None, [repeats])]
        if self.finished:
            return
        if self.checkpoint or self.init:
            self._load()
        self.predictor = engine.predictor()
        # In evaluation a network with several outputs computes the first one only.
        self.validation_loss = Loss(config.loss, self.channels[1], output_weights(config.model)[:1])
        with raise_jointly(world):
            validated = self.store.splits.get("val", []) if config.train.validate_every else []
            check_validated(self.predictor, {self.store.size(name): name for name in validated})
        self.checkpoints = self._checkpoints()

    def base_memory(self) -> list[int] | None:
        """Return, for each rank, the bytes that it needs besides activations; None for PatchGD.

        All ranks must call it together, before the first step.
        """
        if not isinstance(self.engine, Engine):
            return None
        return self.world.allgather(self.engine.base_memory())

    @property
    def _begun(self) -> nn.Module:
        """Module into which ``train.init`` loads weights: the network, or PatchGD's backbone."""
        return self.model.begun if isinstance(self.model, PatchNetwork) else self.model

    @property
    def finished(self) -> bool:
        """True if the checkpoint has all epochs of ``train.epochs``, or the run stopped early."""
        return self.position.epoch >= self.config.train.epochs or self.stops_early(self.position)

    def stops_early(self, position: Position) -> bool:
        """Return True if the score has not improved for ``train.patience`` epochs.

        All ranks return the same, because the position has the number of epochs and is equal on
        all ranks.
        """
        patience = self.config.train.patience
        return patience > 0 and position.samples == 0 and position.waited >= patience

    @property
    def _batch(self) -> int:
        return self.mesh.shape.samples * self.config.train.accumulate * self.config.data.images

    def manifest(self, position: Position) -> dict:
        """Return the manifest of a checkpoint: all of its content except for tensors.

        Args:
            position: the position of the run when the checkpoint is written.
        """
        store = self.store
        data = {
            "classes": store.classes,
            "ignore": store.ignore,
            "mean": list(map(float, store.mean)),
            "std": list(map(float, store.std)),
            "store": getattr(store, "digest", None),
            "steps_per_epoch": self.loader.steps_per_epoch,
            "types": sorted({str(store.dtype(name)) for name in store.split("train")}),
            "size": list(self.image),
            "colours": None if getattr(store, "colours", None) is None else store.colours.tolist(),
        }
        run = {
            "channels": list(self.channels),
            "config": self.config.as_plain(),
            "data": data,
            "versions": versions(),
            "host": platform.node(),
            "time": round(time.time()),
        }
        return {**asdict(position), **run}

    def samples_after(self, steps: int) -> int:
        """Return the number of samples that the first ``steps`` steps of an epoch take."""
        return steps * self._batch

    def _facts(self) -> dict:
        """Return values that must be equal on all ranks, such as the digest of the store.

        The result is a dict from the name of a value in error messages to the value.
        """
        model = [
            (name, tuple(t.shape), str(t.dtype)) for name, t in self.model.state_dict().items()
        ]
        checkpoint = "none"
        if self.checkpoint:
            digest = _short_digest(self.resumed.get("digest", self.resumed))
            checkpoint = f"{self.checkpoint.name} ({digest})"
        return {
            "the store's content": getattr(self.store, "digest", None),
            "the checkpoint to go on from": checkpoint,
            "the number of the model's tensors": len(model),
            "their names and shapes": _short_digest(model),
        }

    def _load(self) -> None:
        """Load weights and optimizer state on the first replica, and send them to the others."""
        phase(f"loading {self.checkpoint.name if self.checkpoint else self.config.train.init}")
        with raise_jointly(self.world):
            if self.mesh.replicas.rank == 0 and self.init:
                self.init.load(self._begun)
            elif self.mesh.replicas.rank == 0:
                load_weights(self.checkpoint, self.model, part=self.engine.partition is not None)
                load_optimizer(self.checkpoint, self.model, self.engine.optimizer)
        share(self.model, self.engine.optimizer, self.mesh.replicas)

    def _checkpoints(self) -> SilentCheckpoints:
        """Lock the run's folder and return the writer of its checkpoints.

        All ranks must call it together. The first rank locks the folder, checks the free disk space
        and moves checkpoints of an earlier run into another folder. Ranks that write nothing get a
        :class:`SilentCheckpoints`.
        """
        config, output = self.config, Path(self.config.train.output)
        needed = self.mesh.pipeline.allreduce(state_bytes(self.model, state_copies(config.optim)))
        with raise_jointly(self.world):
            if self.first:
                require_space(output, needed)
                self._lock = lock_run(output)
                aside = set_aside(output, self.position.step if self.resumed else -1)
                if aside:
                    what = (
                        "its later checkpoints are"
                        if self.resumed
                        else "an earlier run was there: its checkpoints are"
                    )
                    self.lines.append(f"{output}: {what} moved to {aside.name}")
                if is_code(config.model.name):
                    remember_run(output, config.model.name)
                if isinstance(config, PatchConfig) and is_code(config.patchgd.head):
                    remember_run(output, config.patchgd.head, "head")
        writes = self.mesh.replicas.rank == 0
        return (
            Checkpoints(
                output, config.train.keep, self.mesh.pipeline, aside=config.streaming.memory is None
            )
            if writes
            else SilentCheckpoints()
        )

    def _changes(self) -> list[str]:
        """Return log lines about the checkpoint and each setting that has changed since then.

        The list is empty if the run does not go on from a checkpoint.
        """
        if not self.resumed:
            return []
        before, now = self.resumed["config"], self.config.as_plain()
        steps = self.loader.steps_per_epoch
        steps_before = self.resumed["data"].get("steps_per_epoch", steps)
        lines = [
            f"goes on from {self.checkpoint.name}: {self.position.step} steps, "
            f"{self.position.epoch} epochs"
            + (f" and {self.position.samples} samples" if self.position.samples else "")
        ]
        lines += mesh_change(before, now, self._batch_norm) + changes(before, now)
        store = self.resumed["data"].get("store")
        if store is not None and store != getattr(self.store, "digest", store):
            lines.append("the store's content has changed since the checkpoint was written")
        at_before = (
            self.position.epoch * steps_before + self.position.samples // self._batch,
            before["train"]["epochs"] * steps_before,
        )
        optim = OptimConfig(
            **{
                name: value
                for name, value in before["optim"].items()
                if name in OptimConfig.__dataclass_fields__
            }
        )
        at = self.position.epoch * steps + self.first_step
        return lines + (
            schedule_change(optim, self.config.optim, (at, self.total), at_before)
            if at < self.total
            else []
        )

    def _introduction(self) -> list[str]:
        """Return log lines that describe the run: model, mesh, steps, threads, layout, notes."""
        config, engine, mesh = self.config, self.engine, self.mesh
        by_patches = isinstance(config, PatchConfig)
        sees = (
            ""
            if by_patches
            else f", halo {max(engine.exact.halo)}, stride {max(engine.exact.stride)}"
        )
        lines = [
            f"model {config.model.name}: {self.parameters:,} parameters{sees}",
            f"mesh {mesh.shape}; gradients summed by {engine.reducer.name}; {engine.device.type}, "
            f"{engine.precision}" + (", channels_last" if engine.channels_last else ""),
            f"{many(config.train.epochs, 'epoch')} of "
            f"{many(self.loader.steps_per_epoch, 'step')}, {many(self._batch, 'image')} a step",
            *filter(None, [emulation(engine.precision, engine.device), transport_line()]),
            str(self.threads),
            *gpu_lines(engine.device, engine.precision, mesh.world),
        ]
        if by_patches:
            return lines + engine.lines(self.image) + self._init_and_notes
        if config.spatial.exchanges:
            points = len(engine.exchange.layout(self.image).points)
            lines.append(
                f"ranks exchange halos before {points} layers of the forward pass "
                f"(spatial.exchange_every {config.spatial.exchange_every}) and read no halo from "
                "the images"
            )
        if engine.streaming:
            with raise_jointly(self.world):
                lines.append(engine.streaming.executor.describe(self.image, config.data.images))
            lines += memory_warnings(config.streaming.memory, engine.base_memory())
        elif not config.spatial.exchanges:
            lines += self._overlap()
        if engine.partition:
            balance = " ".join(str(len(layers)) for layers in engine.partition.ranges)
            recompute = "" if engine.streaming else f", recompute {config.pipeline.recompute}"
            lines.append(
                f"stages of {balance} layers, {engine.gradient_step.runner.schedule}{recompute}"
            )
        lines += context_notes(config.data, engine.crop_context, engine.exact.halo, self.image)
        lines += [f"approximation: {text}" for text in engine.approximations]
        return lines + self._init_and_notes

    @property
    def _init_and_notes(self) -> list[str]:
        return [*(self.init.lines if self.init else ()), *(f"note: {text}" for text in self._notes)]

    def _overlap(self) -> list[str]:
        """Return a list with a note if windows have many more pixels than their tiles.

        Otherwise return an empty list.
        """
        tile, window = owned_tiles(
            self.image,
            self.config.mesh.tiles,
            self.config.owned,
            self.mesh.tile,
            self.engine.reading,
        )[0]
        if window.pixels <= _MUCH * tile.pixels:
            return []
        return [
            f"note: for tiles of {Size(tile.size)} windows of {Size(window.size)} are read and "
            f"computed, with {window.pixels / tile.pixels:.1f} times as many pixels as the tiles: "
            "with spatial.exchange_every 1, or level, ranks exchange halos instead"
        ]


_MUCH = 1.5  # a note is given if a window has more than this many times the pixels of its tile


def _short_digest(content) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def lock_run(output: Path) -> IO:
    """Lock a run's folder against other jobs, and return the open lock file.

    The lock is held as long as this file is open. If a job is killed, its lock is released.

    Raises:
        BlockingIOError: another job trains into the folder. The message names that job's host and
            start.
    """
    path = output / "lock"
    try:
        lock = locked(path, output)
    except BlockingIOError:
        raise BlockingIOError(
            f"another job trains into {output} ({path.read_text().strip()}): wait for it, or "
            "choose another train.output"
        ) from None
    lock.truncate(0)
    lock.write(
        f"process on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode()
    )
    lock.flush()
    return lock


def _open_store(data: DataBase, most_decoded: int | None) -> Store:
    if not data.store:
        raise ValueError("data.store is not set: name the HDF5 store that 'distseg prepare' wrote")
    return Store(data.store, shrink=data.shrink, most_decoded=most_decoded)


def _outputs(model: ModelBase, store: Store) -> int | None:
    """Return the number of outputs that the network needs for the labels of a store.

    It is the number of classes, or 1 if labels are numbers instead of classes. Two classes share
    one output (sigmoid) if the setting ``model.out_channels`` is 1.
    """
    return 1 if model.out_channels == 1 and len(store.classes) == 2 else len(store.classes)


def batches_of(sizes: Iterable[Sequence[int]], images: int) -> list[tuple[Sequence[int], int]]:
    """Return pairs (size, number of images): batches on which a network is tried before training.

    Images of a micro-batch that have the same size go through the network together. If all samples
    have one size, the only pair is (size, ``images``). If sizes differ, a micro-batch can have any
    number of images of one size, from 1 to ``images``. Then the smallest size is returned with each
    of these numbers, and the other sizes with 1 and ``images`` only.

    Args:
        sizes: the distinct sizes of the samples.
        images: number of images in a micro-batch.
    """
    first, *others = sorted(sizes, key=lambda size: (math.prod(size), size))
    if not others:
        return [(first, images)]
    return [(first, count) for count in range(1, images + 1)] + [
        (size, count) for size in others for count in sorted({1, images})
    ]


def step_loader(store: Store, engine: Engine) -> StepLoader:
    """Return the loader of this rank's tiles of the training split, for the steps of an engine."""
    config, mesh = engine.config, engine.mesh
    return StepLoader(
        store,
        "train",
        config.data,
        seed=config.train.seed,
        groups=mesh.shape.samples,
        group=mesh.sample,
        accumulate=config.train.accumulate,
        grid=mesh.shape.tiles,
        per_rank=config.owned,
        coordinates=mesh.tile,
        reach=engine.reading,
        pixels=engine.pipeline.first,
        labels=engine.pipeline.last,
        streaming=config.streaming.active,
        context=engine.crop_context,
    )
