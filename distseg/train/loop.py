"""Training from a config: the story of a run from top to bottom.

Every rank runs the same lines. Where only one should speak or write, it holds the real log, bar or checkpoint folder
and the others hold silent ones.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path

from distseg.comm.replicas import check_same
from distseg.config import Config
from distseg.data.loader import StepLoader
from distseg.data.sampler import crop_size
from distseg.data.store import Store
from distseg.evaluate import evaluate
from distseg.launch import JointFailure, set_up, together
from distseg.mesh import Mesh, MeshShape
from distseg.models.unet import channels_of
from distseg.models.zoo import outline_model
from distseg.plan.in_time import tiles_in_time
from distseg.predict import Predictor
from distseg.report.log import open_log
from distseg.report.progress import progress
from distseg.report.units import si
from distseg.train.checkpoint import Checkpoints, SilentCheckpoints, find, load_optimizer, load_weights, read_index, read_manifest
from distseg.train.engine import Engine, approximations, owned_per_rank
from distseg.train.metrics import scores
from distseg.train.optim import learning_rate
from distseg.train.step import InTimeStep
from distseg.train.precision import choose, gpu_lines


def train(config: Config, world) -> dict | None:
    """Train on all ranks of ``world``; returns the last validation's scores on rank 0.

    Raises:
        ValueError: on all ranks, before work starts, for whatever in config, data or mesh can not be.
    """
    first = world.rank == 0
    device = set_up(world, config.run.device, config.run.threads)
    with together(world):
        store = _open_store(config)
        config = replace(config, loss=replace(config.loss, ignore_index=store.ignore))
        MeshShape(config.mesh.samples, config.mesh.tiles, config.mesh.stages).check(world.size)
        model = outline_model(config.model, store.bands, _outputs(config, store))
        parameters, channels = sum(p.numel() for p in model.parameters()), channels_of(model)
    precision, channels_last = choose(config.train, device, world)
    mesh = Mesh(world, config.mesh.samples, config.mesh.tiles, config.mesh.stages)
    engine = Engine(config, mesh, model, _largest(store, config), device, precision, channels_last)
    with together(world):
        loader = step_loader(config, store, mesh, engine)
        resumed = _resume(config, engine, model)
    if (done := resumed.get("epoch", 0)) >= config.train.epochs:
        if first:
            print(f"{config.train.output} has its {done} epochs already, and train.epochs is {config.train.epochs}: raise it to go on", flush=True)
        return resumed["validation"] if first else None
    predictor = Predictor(
        engine.model, mesh.replicas, device, engine.autocast, config.predict.tile, config.predict.scratch, channels_last,
        engine.pipeline if engine.partition else None, exact=config.spatial.halo is None,
    )  # fmt: skip
    total = config.train.epochs * loader.steps_per_epoch
    with together(world):
        for name in store.splits.get("val", []) if config.train.validate_every else []:
            predictor.check(store.size(name))
    writes = mesh.replicas.rank == 0
    checkpoints = Checkpoints(config.train.output, config.train.keep, not resumed, mesh.pipeline) if writes else SilentCheckpoints()
    step, start = resumed.get("step", 0), time.monotonic()
    result = resumed.get("validation")

    with open_log(config.train.output, config.train.tensorboard, first, resumed.get("step")) as log:
        for line in _introduction(config, engine, _largest(store, config), parameters, loader) if first else []:
            print(line, flush=True)
        log.write("start", step, resumed.get("epoch", 0), config=_plain(config), parameters=parameters)
        for epoch in range(resumed.get("epoch", 0), config.train.epochs):
            engine.context.epoch = epoch
            with progress(loader.steps_per_epoch, "step", f"epoch {epoch + 1}/{config.train.epochs}", enabled=first) as bar:
                engine.watch_step(bar.partly)
                for position, micro_batches in enumerate(loader.epoch(epoch), epoch * loader.steps_per_epoch):  # not step: a resumed run may take other steps
                    rate = learning_rate(config.optim, position, total)
                    loss = engine.backward(micro_batches)
                    norm = engine.update(rate)
                    step += 1
                    _check_finite(loss, norm, step, config)
                    if config.train.check_replicas and step % config.train.check_replicas == 0:
                        check_same(model, mesh.replicas)
                    log.write("step", step, epoch, loss=loss, lr=rate, gradient_norm=norm, seconds=time.monotonic() - start)
                    bar.advance(pixels=_pixels(micro_batches, mesh), loss=loss)
            score = None  # of this epoch's weights
            done = epoch + 1 == config.train.epochs or _out_of_time(config, start, world)
            if config.train.validate_every and (done or (epoch + 1) % config.train.validate_every == 0) and "val" in store.splits:
                result = scores(evaluate(predictor, store, "val", world), store.classes)
                iou = {name: row["iou"] for name, row in result["classes"].items()}
                log.write("validation", step, epoch, iou=iou, mean_iou=result["mean_iou"], accuracy=result["accuracy"])
                if first:
                    print(f"epoch {epoch + 1}: validation IoU " + ", ".join(f"{n} {v:.3f}" if v is not None else f"{n} -" for n, v in iou.items()), flush=True)
                score = result["mean_iou"]
            if done or (epoch + 1) % config.train.checkpoint_every == 0:
                checkpoints.save(model, engine.optimizer, _manifest(config, store, channels, step, epoch + 1, result), score)
            if done:
                break
        log.write("end", step, epoch, seconds=time.monotonic() - start, bytes_read=loader.bytes_read)
        if first and loader.steps_read:
            print(f"rank 0 read {si(loader.bytes_read / loader.steps_read, 'B')} a step", flush=True)
    world.Barrier()
    return result if first else None


def _open_store(config: Config) -> Store:
    if not config.data.store:
        raise ValueError("data.store is not set: name the HDF5 store that 'distseg prepare' wrote")
    return Store(config.data.store)


def _largest(store: Store, config: Config) -> tuple[int, ...]:
    """The size of the largest sample, by which stages are balanced."""
    return max((crop_size(store.size(name), config.data.crop) for name in store.split("train")), key=math.prod)


def _outputs(config: Config, store: Store) -> int | None:
    """One output a class; two classes may also share one (sigmoid) if the config says so."""
    return 1 if config.model.out_channels == 1 and len(store.classes) == 2 else len(store.classes)


def step_loader(config: Config, store: Store, mesh: Mesh, engine: Engine) -> StepLoader:
    """What this rank reads of the training split."""
    return StepLoader(
        store,
        "train",
        config.data,
        seed=config.train.seed,
        groups=mesh.shape.samples,
        group=mesh.sample,
        accumulate=config.train.accumulate,
        grid=mesh.shape.tiles,
        per_rank=owned_per_rank(config),
        coordinates=mesh.tile,
        reach=engine.reading,
        pixels=engine.pipeline.first,
        labels=engine.pipeline.last,
        in_time=tiles_in_time(config),
    )


def _resume(config: Config, engine: Engine, model) -> dict:
    """Load the last checkpoint if asked to; its manifest, or an empty one."""
    if not config.train.resume:
        return {}
    if read_index(Path(config.train.output) / "checkpoints") is None:
        return {}  # a job's script may always say resume, its first run too
    checkpoint = find(config.train.output, "last")
    manifest = read_manifest(checkpoint)
    load_weights(checkpoint, model, part=engine.partition is not None)
    load_optimizer(checkpoint, model, engine.optimizer)
    return manifest


def _manifest(config: Config, store: Store, channels: tuple[int, int], step: int, epoch: int, validation: dict | None) -> dict:
    data = {"classes": store.classes, "ignore": store.ignore, "mean": list(map(float, store.mean)), "std": list(map(float, store.std))}
    return {"step": step, "epoch": epoch, "channels": list(channels), "config": _plain(config), "data": data, "validation": validation}


def _plain(config: Config) -> dict:
    """The config as JSON and YAML hold it: sizes as 97x131."""
    return {s: {k: str(v) if isinstance(v, tuple) else v for k, v in fields.items()} for s, fields in asdict(config).items()}


def _introduction(config: Config, engine: Engine, image, parameters: int, loader: StepLoader) -> list[str]:
    mesh = engine.mesh
    lines = [
        f"model {config.model.name}: {parameters:,} parameters, halo {max(engine.exact.halo)}, stride {max(engine.exact.stride)}",
        f"mesh {mesh.shape}; gradients summed by {engine.reducer.name}; {engine.device.type}, {engine.precision}"
        + (", channels_last" if engine.channels_last else ""),
        f"{config.train.epochs} epochs of {loader.steps_per_epoch} steps, {mesh.shape.samples * config.train.accumulate * config.data.images} images a step",
        *gpu_lines(engine.device, engine.precision, mesh.shape.size),
    ]
    if config.spatial.exchanges:
        points = len(engine.exchange.layout(image).points)
        lines.append(f"tiles exchange borders before {points} layers of the forward pass (spatial.exchange_every {config.spatial.exchange_every}) and read no halo")
    if isinstance(engine.gradient_step, InTimeStep):
        lines.append(engine.gradient_step.executor.describe(image))
    if engine.partition:
        balance = " ".join(str(len(layers)) for layers in engine.partition.ranges)
        recompute = "" if isinstance(engine.gradient_step, InTimeStep) else f", recompute {config.pipeline.recompute}"
        lines.append(f"stages of {balance} layers, {engine.gradient_step.schedule}{recompute}")
    return lines + [f"approximation: {text}" for text in approximations(config, engine.reach, engine.exact)]


def _check_finite(loss: float, norm: float, step: int, config: Config) -> None:
    """Both are the same on every rank, so all of them end here together."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise JointFailure(
            f"step {step}: the loss is {loss} and the gradient's norm {norm}: lower optim.lr, set optim.clip, or train with train.precision fp32; "
            f"checkpoints up to here are in {config.train.output}"
        )


def _out_of_time(config: Config, start: float, world) -> bool:
    limit = config.train.max_minutes
    return limit is not None and world.bcast(time.monotonic() - start > 60 * limit, root=0)


def _pixels(micro_batches, mesh: Mesh) -> int:
    """Owned pixels of this rank's step times the replicas: the job's, but for uneven tiles."""
    return mesh.replicas.size * sum(len(p.place.images) * p.place.tile.pixels for pieces in micro_batches for p in pieces)
