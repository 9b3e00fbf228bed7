"""The promise made checkable: one optimizer step on the mesh and the same step serially, in float64, compared.

``mpirun -n 6 distseg verify --mesh.tiles 2x3 ...`` runs any config's step on its mesh and the serial program
(:mod:`distseg.training.serial`) on rank 0, on the config's own images or on random ones, and prints the relative errors of the
loss, of every parameter's gradient, of the updated weights and of the norms' running statistics.

Adam divides a gradient by its own size. Where that is nothing but rounding, as of a bias whose norm takes it out again, it makes
of rounding a step, another one in each program that adds in another order. So under such an optimizer weights are held against the serial
step's, or against the optimizer's step on the gradients that were found, which are compared themselves. Which gradients are
nothing but rounding is measured on the serial program alone.
"""

from __future__ import annotations

import copy
import json
import math
import os
import struct
from pathlib import Path
from typing import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from distseg.comm.launch import raise_jointly
from distseg.comm.mesh import Mesh, MeshShape
from distseg.config.settings import Config, with_dims
from distseg.config.sizes import Size
from distseg.data.loader import pieces
from distseg.data.sampler import Rows, epoch_samples
from distseg.data.store.store import Store
from distseg.layers.loss import of_numbers, parse
from distseg.models.bands import channels_of
from distseg.models.capture.capture import as_network
from distseg.models.network import check_calls, check_size, of_image
from distseg.models.weights import materialise
from distseg.models.zoo import plain_model
from distseg.planning.streaming import is_streamed
from distseg.runtime.optimizer import freeze
from distseg.tiling import rng
from distseg.tiling.tile import ReceptiveField, TilePlacement, owned_tiles
from distseg.tiling.tile_batch import TileBatch, labels_of_images
from distseg.training.conflicts import check_labels, notes, with_store
from distseg.training.engine import Engine, approximations, owned_per_rank
from distseg.training.serial import (
    Dropouts,
    Image,
    Outcome,
    SerialProgram,
    WeightUpdate,
    rounding_of_gradients,
    rounding_of_step,
    take_over,
)


class RandomImages:
    """Images of noise with random labels, of pixels, a twentieth of them ignored, or ``of_image``, of each a single one; the same on every rank.

    Attributes:
        epoch: the one that its step is of; ``first``: the number in the epoch of the step's first image.
    """

    epoch = first = 0

    def __init__(
        self, size: Size, channels: int, classes: int, config: Config, of_image: bool = False
    ):
        self.size, self.channels, self.classes, self.of_image = (
            tuple(size),
            channels,
            max(2, classes),
            of_image,
        )
        self.seed, self.ignore, self.numbers = (
            config.train.seed,
            config.loss.ignore_index,
            of_numbers(config.loss.name),
        )

    def step(self, number: int, batch: int) -> "RandomImages":
        """Return the images of another step; each has ``batch`` of them."""
        other = copy.copy(self)
        other.first = number * batch
        return other

    def whole(self, row: int) -> tuple[Tensor, Tensor]:
        """Return an image of the step: (C, *size) float64 of mean 0 and variance 1, and (*size) labels, or (1, ...)."""
        count, number = int(np.prod(self.size)), self.first + row
        noise = rng.uniform(rng.key(self.seed, number, "pixels"), self.channels * count)
        pixels = torch.from_numpy((noise - 0.5) * 12**0.5).view(self.channels, *self.size)
        labels = torch.from_numpy(
            (rng.uniform(rng.key(self.seed, number, "labels"), count) * self.classes).astype(
                np.int64
            )
        )
        if self.of_image:
            of = torch.from_numpy(noise[:1]) if self.numbers else labels[:1]
            return pixels, of.view(1, *(1 for _ in self.size[1:]))
        labels[
            torch.from_numpy(rng.uniform(rng.key(self.seed, number, "ignored"), count) < 0.05)
        ] = self.ignore
        return pixels, labels.view(self.size)

    def mine(self, rows: list[int], grid, per_rank, coordinates, reach) -> list[TileBatch]:
        wholes, numbers = [self.whole(n) for n in rows], [self.first + n for n in rows]
        found = []
        for tile, window in owned_tiles(self.size, grid, per_rank, coordinates, reach):
            place = TilePlacement(
                self.size, tile, window, tuple(range(len(numbers))), tuple(numbers)
            )
            pixels = torch.stack([x[(slice(None), *window.slices)] for x, _ in wholes])
            if self.of_image:
                labels = labels_of_images(
                    torch.cat([y.flatten() for _, y in wholes]), tile, self.ignore
                )
            else:
                labels = torch.stack([y[tile.slices] for _, y in wholes])
            found.append(TileBatch(pixels, labels, place))
        return found


class StoreImages:
    """The images of a step of a store, by default the first, as training would read them; attributes as of :class:`RandomImages`."""

    def __init__(self, store: Store, config: Config, batch: int, step: int = 0):
        self.store, self.config = store, config
        steps = len(epoch_samples(store, "train", config.data, config.train.seed, 0, batch))
        self.epoch, step = divmod(step, steps)
        self.samples = epoch_samples(
            store, "train", config.data, config.train.seed, self.epoch, batch
        )[step]
        self.size, self.first = self.samples[0].size, self.samples[0].number

    def step(self, number: int, batch: int) -> "StoreImages":
        """Return the images of another step; each has ``batch`` of them."""
        return StoreImages(self.store, self.config, batch, number)

    def whole(self, row: int) -> tuple[Tensor, Tensor]:
        dims = len(self.samples[row].size)
        one = Size((1,) * dims)
        (piece,) = pieces(
            self.store,
            [self.samples[row]],
            one,
            one,
            (0,) * dims,
            ReceptiveField((0,) * dims, (1,) * dims),
        )
        return piece.pixels[0].double(), piece.labels[0].long()

    def mine(self, rows: list[int], grid, per_rank, coordinates, reach) -> list[TileBatch]:
        return pieces(
            self.store, [self.samples[n] for n in rows], grid, per_rank, coordinates, reach
        )


def verify(
    config: Config,
    world,
    image: Size | None = None,
    dump: str | None = None,
    device=torch.device("cpu"),
    steps: int = 1,
) -> dict:
    """Run optimizer steps both ways, serially on the CPU; the report on rank 0, None elsewhere. Collective.

    Args:
        image: size of random images; by default those of ``data.store``.
        dump: a safetensors file for the initial weights, the input, the labels and the distributed gradients, of the first step.
        device: of this rank's part of the distributed steps.
        steps: how many, each with the images that training would have; what a step leaves behind shows in the next.
    """
    with raise_jointly(world):
        config, plain, images = prepare(config, image)
        MeshShape(config.mesh.samples, config.mesh.tiles, config.mesh.stages).check(world.size)
        freeze(plain, config.optim)
        initial, model = copy.deepcopy(plain) if world.rank == 0 else None, as_network(plain)
        check_size(model, images.size)
        check_calls(model, images.size, config.data.images)
        if dump:
            check_dump(plain)
        told, names, dropouts = (
            notes(config, model),
            getattr(model, "names", {}),
            getattr(model, "dropouts", None),
        )
    mesh = Mesh(world, config.mesh.samples, config.mesh.tiles, config.mesh.stages)
    with raise_jointly(world):
        if initial is not None:
            materialise(initial, config.model.seed)
            initial.double()
    engine = Engine(config, mesh, model, images.size, device, precision="fp64")
    comparison, report = (
        Comparison(config, engine, initial, dropouts) if initial is not None else None,
        None,
    )
    for number in range(steps):
        now = images.step(number, _batch(config)) if number else images
        outcome = _step(engine, model, now, names)
        with raise_jointly(world):
            if comparison is not None:
                found = comparison.step(now, outcome, None if number else dump)
                report = with_step(report, found) if report else found | {"notes": told}
    return report


def _batch(config: Config) -> int:
    """Return the images of a step."""
    return config.mesh.samples * config.train.accumulate * config.data.images


def _step(engine: Engine, model: nn.Module, images, names: Mapping[str, str]) -> Outcome | None:
    """Return what a step on the mesh yields, on the first rank of each pipeline. Collective."""
    config, mesh = engine.config, engine.mesh
    with raise_jointly(mesh.world):
        own = own_pieces(config, mesh, images, engine.reading)
    engine.context.epoch = images.epoch
    loss = engine.backward(own)
    gradients = {name: _copy(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    engine.update(config.optim.lr)
    buffers = {name: _copy(b) for name, b in model.named_buffers() if b.is_floating_point()}
    return _of_all_stages(
        mesh,
        Outcome(loss, gradients, {n: _copy(p) for n, p in model.named_parameters()}, buffers),
        names,
    )


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, where the serial program's are."""
    return tensor.detach().to("cpu", copy=True)


def _of_all_stages(mesh: Mesh, own: Outcome, names: Mapping[str, str]) -> Outcome | None:
    """The stages' parts put together, by the user's ``names``, on the first rank of each pipeline."""
    parts = mesh.pipeline.gather(own) if mesh.pipeline.size > 1 else [own]
    if parts is None:
        return None
    merged = {
        field: {names.get(k, k): v for part in parts for k, v in getattr(part, field).items()}
        for field in ("gradients", "weights", "buffers")
    }
    return Outcome(own.loss, **merged)


def prepare(config: Config, image: Size | None):
    """The config with what the data settles, the plain model and the source of images: random ones of size ``image``, or the store's.

    Raises:
        ValueError: neither a size nor a store; or PatchGD, of which there is no exact step.
    """
    if config.train.method == "patchgd":
        raise ValueError(
            "train.method is patchgd, which approximates the gradient, and here are exact steps alone: set train.method to exact"
        )
    if config.data.store and image is None:
        store = Store(config.data.store, shrink=config.data.shrink)
        size = store.size(store.split("train")[0])
        config = with_dims(with_store(config, store.ignore), len(size), str(Size(size)))
        classes = None if config.model.out_channels == 1 else len(store.classes)
        model = plain_model(config.model, store.bands, classes)
        check_labels(store, model, config)
        return (
            config,
            model,
            StoreImages(
                store, config, config.mesh.samples * config.train.accumulate * config.data.images
            ),
        )
    if image is None:
        raise ValueError(
            "there are no images: give --image 97x131 for random ones, or --data.store PATH"
        )
    config = with_dims(config, len(image), str(Size(image)))
    many = (
        None
        if config.model.out_channels
        or all(
            name in ("binary_cross_entropy", "dice", "focal", "mse", "l1")
            for _, name in parse(config.loss.name)
        )
        else 3
    )
    model = plain_model(config.model, out_channels=many)
    vectors = of_image(model, image)
    _check_fits(
        image,
        channels_of(model)[0],
        config.mesh.samples * config.train.accumulate * config.data.images,
    )
    return config, model, RandomImages(image, *channels_of(model), config, vectors)


def _check_fits(image: Size, channels: int, count: int) -> None:
    """Refuse images that the machine could not even hold, before it dies of them."""
    wanted = 8.0 * Size(image).volume * (channels + 1) * count
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise ValueError(
            f"a step of {count} images of {Size(image)} with {channels} bands takes {wanted / 1e9:.3g} GB in float64 for the pixels alone, and this machine has {there / 1e9:.3g} GB: "
            "give a smaller --image, or fewer of them"
        )


def own_pieces(config: Config, mesh: Mesh, images, reach: ReceptiveField) -> list[list[TileBatch]]:
    """What this rank reads of a step's images, a list for each micro-batch."""
    return [
        images.mine(
            _numbers(config, mesh.sample, m),
            config.mesh.tiles,
            owned_per_rank(config),
            mesh.tile,
            reach,
        )
        for m in range(config.train.accumulate)
    ]


def _numbers(config: Config, group: int, micro_batch: int) -> list[int]:
    """The sample numbers of a group's micro-batch, as the loader deals them."""
    return Rows(
        config.mesh.samples, group, config.train.accumulate, config.data.images
    ).of_micro_batch(micro_batch)


class Comparison:
    """The serial program beside a mesh's steps.

    Args:
        initial: the module with its first weights, in float64.
    """

    def __init__(self, config: Config, engine: Engine, initial: nn.Module, dropouts: Dropouts):
        self.config, self.engine, self.dropouts = config, engine, dropouts
        self.before = initial  # as the module is before the step at hand
        self.serial = SerialProgram(initial, config, dropouts)
        self.update = WeightUpdate.of(initial, config) if config.optim.name != "sgd" else None
        self.done = 0

    def step(self, images, outcome: Outcome, dump: str | None) -> dict:
        """Return the report of a step of which the mesh made ``outcome``."""
        config = self.config
        wholes = [
            Image(*images.whole(n), number=images.first + n, group=d, micro_batch=m)
            for d in range(config.mesh.samples)
            for m in range(config.train.accumulate)
            for n in _numbers(config, d, m)
        ]
        if dump:
            write_dump(dump, self.before, wholes, outcome.gradients)
        if self.done:
            self.before = copy.deepcopy(self.serial.model)
        report = self._compared(
            wholes, outcome, self.serial.step(wholes, images.epoch), images.epoch
        )
        self.serial.take_over(outcome)
        if self.update:
            take_over(self.update.parameters, outcome.weights)
        self.done += 1
        return report

    def _compared(self, wholes: list[Image], outcome: Outcome, serial: Outcome, epoch: int) -> dict:
        config, engine, settings = (
            self.config,
            self.engine,
            dict(epoch=epoch, dropouts=self.dropouts),
        )
        zero = zero_gradients(config, self.before, wholes, serial, outcome, **settings)
        wanted = {
            "gradients": serial.gradients,
            "weights": serial.weights,
            "buffers": serial.buffers,
        }
        terms = {"gradients": {name: z["rounding"] / _EPSILON for name, z in zero.items()}}
        errors = {
            part: relative_errors(getattr(outcome, part), tensors, terms.get(part, {}))
            for part, tensors in wanted.items()
        }
        if self.update:
            own = relative_errors(outcome.weights, self.update(epoch, outcome.gradients))
            errors["weights"] = {
                name: min(error, own[name], key=_badness)
                for name, error in errors["weights"].items()
            }
        loss_error = abs(outcome.loss - serial.loss) / max(abs(serial.loss), 1e-300)
        most, rounding = max(loss_error, _largest(errors), key=_badness), 0.0
        if _ROUNDED < most < _ROUNDING:  # does the serial program itself know better?
            moved = rounding_of_step(self.before, wholes, config, **settings)
            parts = [
                part for part in wanted if not (self.done and part == "weights")
            ]  # by an optimizer that knows nothing of the steps before
            rounding = max(
                abs(moved.loss / serial.loss - 1),
                _largest(
                    {
                        part: relative_errors(
                            getattr(moved, part), wanted[part], terms.get(part, {})
                        )
                        for part in parts
                    }
                ),
            )
        return {
            "device": engine.device.type,
            "mesh": {
                "samples": config.mesh.samples,
                "tiles": str(config.mesh.tiles),
                "stages": config.mesh.stages,
            },
            "images": [str(Size(w.pixels.shape[1:])) for w in wholes],
            "halo": list(engine.reading.halo),
            "exchange_every": config.spatial.exchange_every,
            "streaming": is_streamed(config),
            "stride": list(engine.reach.stride),
            "reducer": engine.reducer.name,
            "approximations": approximations(config, engine.reach, engine.exact),
            "loss": {"distributed": outcome.loss, "serial": serial.loss, "error": loss_error},
            **errors,
            "rounding": rounding,
            "zero_gradients": zero,
            "frozen": [name for name, p in self.before.named_parameters() if not p.requires_grad],
            "unused": list(serial.unused),
            "optimizer": config.optim.name,
            "max_error": most,
        }


def _largest(errors: Mapping[str, Mapping[str, float]]) -> float:
    """Return the worst error of all parts."""
    return max((e for part in errors.values() for e in part.values()), key=_badness, default=0.0)


_OF_A_STEP = ("images", "loss", "gradients", "weights", "buffers", "rounding", "max_error")


def with_step(report: dict, later: dict) -> dict:
    """Return the report of the first steps with that of the next under ``later_steps``; its ``max_error`` is that of all steps."""
    first = report.get("first_step", {name: report[name] for name in ("rounding", "max_error")})
    steps = [*report.get("later_steps", ()), {name: later[name] for name in _OF_A_STEP}]
    return report | {
        "first_step": first,
        "later_steps": steps,
        "max_error": max(report["max_error"], later["max_error"], key=_badness),
    }


def zero_gradients(
    config: Config,
    initial: nn.Module,
    wholes: list[Image],
    serial: Outcome,
    found: Outcome,
    epoch: int = 0,
    dropouts: Dropouts = None,
) -> dict[str, dict[str, float]]:
    """Gradients that are zero but for rounding, by name: the serial one's norm, and how far rounding moves it.

    To know how a gradient rounds takes the serial program once more, so only those are asked about that are tiny beside the largest.
    """
    norms = {name: gradient.norm().item() for name, gradient in serial.gradients.items()}
    tiny = [
        n
        for n, norm in norms.items()
        if norm <= _TINY * max(norms.values())
        and n not in serial.unused
        and (norm or found.gradients[n].any())
    ]
    if not tiny:
        return {}
    rounding = rounding_of_gradients(initial, wholes, config, serial.gradients, epoch, dropouts)
    return {
        name: {"norm": norms[name], "rounding": rounding[name]}
        for name in tiny
        if norms[name] <= _SMALL * rounding[name]
    }


_TINY = 1e-9  # of the largest gradient
_SMALL = 1e6  # times its rounding. Of what is no rounding it is 1e13; of one number its rounding may be small by chance


_EPSILON = 2.0**-52  # what rounds by r is a sum of terms of about r / epsilon


def relative_errors(
    found: dict[str, Tensor], wanted: dict[str, Tensor], terms: Mapping[str, float] = {}
) -> dict[str, float]:
    """|a - b| / |b| in the 2-norm, tensor by tensor, but at least 1e-3 of the largest |b| below the line, and at least the tensor's ``terms``.

    A tensor that nearly cancels, such as the weight of a norm which a later norm undoes, carries the rounding of the terms it is the
    sum of, in the serial program as well. What is wrong by more than that still shows: 1e-9 of it is a thousand times the tolerance.
    """
    least = 1e-3 * max((w.norm().item() for w in wanted.values()), default=0.0)
    return {
        name: (found[name] - w).norm().item()
        / max(w.norm().item(), least, terms.get(name, 0.0), 1e-300)
        for name, w in wanted.items()
    }


def _badness(error: float) -> float:
    """An order in which NaN is the worst."""
    return math.inf if math.isnan(error) else error


_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


def check_dump(model: nn.Module) -> None:
    """Refuse to dump what a file of safetensors cannot hold.

    Raises:
        ValueError: naming the parameter or buffer.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype not in _KINDS:
            raise ValueError(
                f"--dump can't write {name}, whose type is {tensor.dtype}: hold it as real numbers (torch.view_as_real), or leave --dump out"
            )


def write_dump(
    path: str, model: nn.Module, images: list[Image], gradients: dict[str, Tensor]
) -> None:
    """Write what an outside program needs to check the step, in layer order.

    Tensors ``weights/NAME``, ``buffers/NAME``, ``input`` (N, C, *size), ``labels`` (N, *size) and ``gradients/NAME`` of what is trained;
    images of different sizes are ``input/0``, ``input/1`` and so on.
    """
    tensors = {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
    tensors.update({f"buffers/{name}": b for name, b in model.named_buffers()})
    if len({i.pixels.shape for i in images}) == 1:
        tensors["input"] = torch.stack([i.pixels for i in images])
        tensors["labels"] = torch.stack([i.labels for i in images])
    else:
        for n, i in enumerate(images):
            tensors[f"input/{n}"], tensors[f"labels/{n}"] = i.pixels, i.labels
    tensors.update(
        {
            f"gradients/{name}": gradients[name]
            for name, _ in model.named_parameters()
            if name in gradients
        }
    )  # stages may come in another order
    _write_safetensors(path, tensors)


def _write_safetensors(path: str, tensors: dict[str, Tensor]) -> None:
    """The format by hand (a JSON header, then the data), because the library's writer sorts by name and layer order is wanted."""
    arrays = {
        name: (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).contiguous().cpu().numpy()
        for name, t in tensors.items()
    }
    header, offset = {"__metadata__": {"order": "layers"}}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _KINDS[tensors[name].dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(Path(path), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            f.write(array.tobytes())


def _borders(report: dict) -> str:
    every = report["exchange_every"]
    return (
        "halo " + "x".join(map(str, report["halo"]))
        if every == "all"
        else f"borders exchanged every {every}"
    )


def _apart(report: dict) -> list[str]:
    """Parameters that are not compared as all others are, each kind in a sentence."""
    found = []
    if frozen := report["frozen"]:
        found.append(
            f"{_count(frozen)} frozen (requires_grad is off), such as {frozen[0]}: compared as weights that stay"
        )
    if unused := report["unused"]:
        found.append(
            f"{_count(unused)} unused, such as {unused[0]}: the loss does not depend on it, so its gradient is 0"
        )
    if zero := report["zero_gradients"]:
        worst = max(zero, key=lambda name: zero[name]["norm"])
        found.append(
            f"{_count(zero)} with a gradient that is zero but for rounding, such as {worst} ({zero[worst]['norm']:.0e}, of terms that round by "
            f"{zero[worst]['rounding']:.0e}), as of a bias before a norm that takes it out again"
            + (
                f": {report['optimizer']} divides rounding by rounding, so these weights are compared with its step on the gradients found"
                if report["optimizer"] != "sgd"
                else ""
            )
        )
    return found


def _count(names) -> str:
    return f"{len(names)} parameter{'s' if len(names) > 1 else ''}"


def passed(report: dict, tolerance: float) -> bool:
    """Return True if every error is a number and at most the tolerance, or what rounding does to the serial program itself."""
    steps = [*filter(None, [report.get("first_step")]), *report.get("later_steps", ())]
    rounding = max(step.get("rounding", 0.0) for step in (report, *steps))
    return all(_within(step, tolerance) for step in (*steps, report | {"rounding": rounding}))


def _within(step: dict, tolerance: float) -> bool:
    return step["max_error"] <= (
        max(tolerance, _TIMES * step["rounding"]) if tolerance >= _ROUNDED else tolerance
    )  # false for NaN


def _parts(step: dict) -> dict[str, dict[str, float]]:
    """Return the errors of a step by the tensors' names, part by part."""
    return {part: step[part] for part in ("gradients", "weights", "buffers")}


_ROUNDED, _ROUNDING, _TIMES = 1e-12, 1e-9, 4.0
"""Errors from which on and up to which it is asked how the serial program rounds, and how many times as large as that they may be."""


def summary(report: dict, tolerance: float) -> str:
    """The report as text: a line a part, with its worst tensor."""
    mesh = report["mesh"]
    lines = [
        f"mesh {mesh['samples']} samples x ({mesh['tiles']}) tiles x {mesh['stages']} stages, images {', '.join(report['images'])}, "
        f"{_borders(report)}{', streamed tiles' if report['streaming'] else ''}, stride {Size(report['stride'])}, gradients summed by {report['reducer']}"
    ]
    if report["device"] != "cpu":
        lines.append(f"computed on {report['device']}, compared with the serial program on the CPU")
    lines += [f"approximation: {text}" for text in report["approximations"]]
    lines += [f"note: {text}" for text in [*report["notes"], *_apart(report)]]
    lines.append(
        f"{'loss':<12}{report['loss']['error']:.1e}   {report['loss']['distributed']:.15g} against {report['loss']['serial']:.15g}"
    )
    for part in ("gradients", "weights", "buffers"):
        if report[part]:
            worst = max(report[part], key=lambda name: _badness(report[part][name]))
            lines.append(
                f"{part:<12}{report[part][worst]:.1e}   largest of {len(report[part])}, at {worst}"
            )
    lines += [
        _line_of_step(number, step) for number, step in enumerate(report.get("later_steps", ()), 2)
    ]
    if report["max_error"] > tolerance and passed(report, tolerance):
        lines.append(
            f"note: the serial program itself moves by as much as {report['rounding']:.1e} when the last bits of its numbers do, so it says no more than that of what differs by more than the tolerance"
        )
    verdict = "exact" if passed(report, tolerance) else "NOT EXACT"
    lines.append(
        f"{verdict}: largest relative error {report['max_error']:.1e}, tolerance {tolerance:.0e}"
    )
    return "\n".join(lines)


def _line_of_step(number: int, step: dict) -> str:
    """Return the line of the summary about a step behind the first."""
    errors = {"the loss": step["loss"]["error"]} | {
        f"{name} ({part})": error
        for part, found in _parts(step).items()
        for name, error in found.items()
    }
    worst = max(errors, key=lambda name: _badness(errors[name]))
    return f"{f'step {number}':<12}{errors[worst]:.1e}   largest of its loss, gradients, weights and buffers, at {worst}"
