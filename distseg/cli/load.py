"""Load the network of a run or a checkpoint, and find the store that fits it."""

from __future__ import annotations

from dataclasses import replace

import torch

from distseg.comm.launch import keep_freed_memory, memory_in_use, raise_jointly, ranks_on_node
from distseg.comm.mesh import Mesh
from distseg.comm.progress import phase
from distseg.comm.replicas import broadcast
from distseg.config.patchgd import PatchConfig, PatchgdConfig
from distseg.config.settings import (
    Config,
    DataBase,
    MeshConfig,
    ModelBase,
    StreamingConfig,
    TrainBase,
)
from distseg.config.sizes import Size
from distseg.data.store.store import Store
from distseg.inference.image_source import check_type
from distseg.inference.predictor import Predictor
from distseg.layers.context import Context
from distseg.layers.graph import reach_for
from distseg.models.bands import answer_of
from distseg.models.capture.checks import check_module
from distseg.models.network import refusals
from distseg.models.zoo import outline_model
from distseg.planning.tile_size import memory_warnings, smallest_budget
from distseg.runtime.devices import check_there, devices_of
from distseg.runtime.own_part import autocast, own_part, place_stages, used_reach
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.precision import choose
from distseg.training.checkpoint.files import find, load_weights, read_run_manifest
from distseg.training.conflicts import check_settings
from distseg.training.patchgd.filling import Filler, PatchPredictor
from distseg.training.patchgd.filling_maps import MapFiller, MapPredictor
from distseg.training.patchgd.unet import PatchUNet
from distseg.training.run_config import check_model, network_of
from distseg.training.stages import StageCut


def load_predictor(
    run: str, config: Config | PatchConfig, world, device: torch.device
) -> tuple[Predictor, dict]:
    """Load the network of a run or checkpoint on all ranks; return a predictor and the manifest.

    All ranks of ``world`` must call it together. The network is cut into ``mesh.stages`` stages, by
    default as many as in the training. If that default does not divide the number of ranks, every
    rank holds the whole network.

    Args:
        run: the folder of a run or of a checkpoint.
        config: the settings.
        world: the communicator of all ranks.
        device: the device of this rank.
    """
    if isinstance(config, PatchConfig):
        return _load_patches(run, config.model, config.patchgd, config.train, world, device)
    precision, channels_last = choose(config.train, device, world)
    with raise_jointly(world):
        checkpoint = find(run)
        manifest = read_run_manifest(checkpoint)
        if size := manifest["data"].get("size"):
            config = config.with_dims(len(size), str(Size(size)))
        notes = _of_mesh(config.mesh, manifest["config"], world.size)
    if world.rank == 0:
        print(*notes, sep="\n", end="\n" if notes else "")
    stages = config.mesh.stages if world.size % config.mesh.stages == 0 else 1
    if stages < config.mesh.stages:
        config = replace(config, pipeline=replace(config.pipeline, balance=None))
    one = Size((1,) * len(config.predict.tile))
    spatial = replace(
        config.spatial, tiles_per_rank=one, exchange_every="all", fuse_below=0, messages="transport"
    )
    memory, halo = config.streaming.memory, config.approximate.halo
    config = replace(
        config,
        mesh=replace(config.mesh, stages=stages, tiles=one),
        spatial=spatial,
        streaming=StreamingConfig(),
    )
    with raise_jointly(world):
        check_there(config.pipeline)
        check_settings(config)
        devices = devices_of(config.pipeline, device)
        check_model(manifest["config"], config.model, run)
        model = outline_model(config.model, *manifest["channels"])
        if model in refusals:
            size = manifest["data"].get("size")
            answer_of(model, size)  # refuses networks that do not take this size
            check_module(model, size or [0] * len(config.predict.tile), modes=(False,))
        reach = used_reach(reach_for(model, cut=halo is not None), halo)
    cut = StageCut(config, model, config.predict.tile, reach, device.type)
    partition = cut.joint_partition(world)
    mesh = Mesh(world, world.size // stages, config.mesh.tiles, stages)
    mesh.waits.timeout = config.run.timeout
    # Weights are loaded last, when the parameters have their final dtype and device.
    with raise_jointly(world):
        context = Context(per_window=config.approximate.norms == "window")
        tiled = own_part(
            model, partition, mesh.stage, reach, context, config.model.seed, whole=halo is None
        )
    place_stages(tiled, partition, devices, precision, channels_last)
    phase(f"loading {checkpoint}")
    with raise_jointly(world):
        if mesh.replicas.rank == 0:
            load_weights(checkpoint, model, part=partition is not None)
    broadcast(model, mesh.replicas)
    pipeline = Pipeline(partition, [], mesh.pipeline, devices[0]) if partition else None
    run_in = autocast(precision, device)
    outputs, exact = manifest["channels"][1], halo is None
    budget = None
    if memory is not None:
        keep_freed_memory(large=False)
        base = memory_in_use(devices[0])
        budget = smallest_budget(memory, base, "weights", world)
        for line in memory_warnings(memory, base) if world.rank == 0 else ():
            print(line)
    predictor = Predictor(
        tiled,
        mesh.replicas,
        devices,
        run_in,
        config.predict.tile,
        config.predict.scratch,
        channels_last,
        pipeline,
        outputs,
        exact,
        ranks_on_node(world),
        budget,
    )
    return predictor, manifest


def store_for(data: DataBase, manifest: dict, memory: int | None = None) -> Store:
    """Return the store of ``data.store``, normalised by mean and deviation of a run's training.

    Args:
        data: the settings of the section ``data``.
        manifest: the manifest of a checkpoint of the run.
        memory: the memory limit of a rank in bytes; None for no limit. With a limit, the decoded
            pixels of only one file are kept, if files can only be decoded as a whole.
    """
    constants = manifest["data"]["mean"], manifest["data"]["std"]
    return Store(data.store, constants, data.shrink, None if memory is None else 1)


def check_types(store: Store, split: str, manifest: dict) -> None:
    """Refuse images of another dtype than the training images.

    Args:
        store: the store.
        split: the split whose images are to be predicted.
        manifest: the manifest of a checkpoint of the run.
    """
    for name in store.split(split):
        check_type(f"image {name!r} of {store.path}", store.dtype(name), manifest["data"])


def _of_mesh(mesh: MeshConfig, trained: dict, ranks: int) -> list[str]:
    """Return a note on each mesh setting whose effect in prediction differs from that in training.

    Args:
        mesh: the mesh settings.
        trained: the config of the training.
        ranks: the number of ranks.

    Raises:
        ValueError: the user gave a number of stages that does not divide the number of ranks.
    """
    found = []
    if ranks % mesh.stages:
        if mesh.stages != trained.get("mesh", {}).get("stages"):
            raise ValueError(
                f"mesh.stages is {mesh.stages}, which does not divide {ranks} "
                f"process{'es' * (ranks > 1)}: start a multiple of {mesh.stages} processes, or "
                "leave mesh.stages out"
            )
        found.append(
            f"note: the {mesh.stages} stages of the training do not divide {ranks} "
            f"process{'es' * (ranks > 1)}, so each process holds the whole network"
        )
    if mesh.tiles.volume > 1 or mesh.samples > 1:
        what = " and ".join(
            f"mesh.{name} {value}"
            for name, value, more in (
                ("samples", mesh.samples, mesh.samples > 1),
                ("tiles", mesh.tiles, mesh.tiles.volume > 1),
            )
            if more
        )
        found.append(
            f"note: {what}: without effect here, because tiles (predict.tile) are distributed to "
            "all ranks"
        )
    return found


def _load_patches(
    run: str,
    model: ModelBase,
    patchgd: PatchgdConfig,
    train: TrainBase,
    world,
    device: torch.device,
) -> tuple[PatchPredictor | MapPredictor, dict]:
    """Load a network of patches on all ranks; return a predictor and the manifest.

    All ranks must call it together. The predictor is a :class:`MapPredictor` if the network labels
    pixels, and a :class:`PatchPredictor` if it has one output for each image.

    Args:
        run: the folder of a run or of a checkpoint.
        model, patchgd, train: the settings of these sections.
        world: the communicator of all ranks.
        device: the device of this rank.
    """
    precision, channels_last = choose(train, device, world)
    with raise_jointly(world):
        checkpoint = find(run)
        manifest = read_run_manifest(checkpoint)
        check_model(manifest["config"], model, run)
        network = network_of(model, patchgd, *manifest["channels"])
        settings = (device, precision, channels_last, patchgd.at_once)
        by_pixels = isinstance(network, PatchUNet)
        filler = (
            MapFiller(network, Context(), *settings)
            if by_pixels
            else Filler(network, Context(), Context(), *settings)
        )
        if world.rank == 0:
            load_weights(checkpoint, network)
    broadcast(network, world)
    return (MapPredictor if by_pixels else PatchPredictor)(filler, world), manifest
