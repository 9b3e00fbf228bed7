"""Compare an optimizer step on the mesh with the same step of the serial program, in float64.

``mpirun -n 6 distseg verify --mesh.tiles 2x3 ...`` runs the step of any config on its mesh, and the
same step with the serial program (:mod:`distseg.training.serial`) on rank 0. Images are those of
the config's store, or random ones. The command prints the relative errors of the loss, of every
parameter's gradient, of the updated weights and of the norms' running statistics.

Adam divides a gradient by its own size. A gradient may consist of nothing but rounding errors, such
as the gradient of a bias before a norm that subtracts the bias again. Adam turns these errors into
a full step, which differs between programs that add in different orders. So with Adam, the weights
are compared both with the weights of the serial step and with the weights that the optimizer
computes from the distributed gradients, and the smaller error is taken. The gradients themselves
are compared in any case. Only the serial program decides which gradients are rounding errors.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from distseg.comm.launch import raise_jointly
from distseg.comm.mesh import Mesh, MeshShape
from distseg.config.settings import (
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    StepSettings,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.loader import pieces
from distseg.data.sampler import Rows, check_tilt, crop_size, epoch_samples, sample_sizes
from distseg.data.store.store import Store
from distseg.layers.loss import of_numbers, parse
from distseg.models.bands import channels_of
from distseg.models.capture.capture import as_network
from distseg.models.capture.views import check_copy
from distseg.models.network import check_calls, check_size, of_image
from distseg.models.weights import materialise
from distseg.models.zoo import plain_model
from distseg.runtime.optimizer import freeze
from distseg.tiling import rng
from distseg.tiling.tile import ReceptiveField, TilePlacement, owned_tiles
from distseg.tiling.tile_batch import TileBatch, labels_of_images
from distseg.training.checkpoint.tensors import DTYPES, write_tensors
from distseg.training.conflicts import Facts, check_labels, norms_of, with_store
from distseg.training.engine import Engine
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
from distseg.training.surroundings import context_notes, context_of


class RandomImages:
    """Images of one training step with random pixels and random labels, equal on every rank.

    By default each pixel has a label, and about one label in twenty is the ignored one. With
    ``of_image`` each image has one label.

    Args:
        size: the size of every image.
        channels: number of bands.
        classes: number of classes. If it is 1, labels still have two values, 0 and 1.
        loss: the settings of the loss, which give the ignored label and the kind of labels.
        seed: the seed of pixels and labels.
        of_image: True for one label for each image.

    Attributes:
        epoch: the number of the epoch, which is a part of the key of dropout masks.
        first: the index of the step's first image in the epoch.
    """

    epoch = first = 0

    def __init__(
        self,
        size: Size,
        channels: int,
        classes: int,
        loss: LossConfig,
        seed: int = 0,
        of_image: bool = False,
    ):
        self.size, self.channels = tuple(size), channels
        self.classes, self.of_image = max(2, classes), of_image
        self.seed, self.ignore = seed, loss.ignore_index
        self.numbers = of_numbers(loss.name)

    def step(self, number: int, batch: int) -> RandomImages:
        """Return the images of step ``number`` (from 0), if every step takes ``batch`` images."""
        other = copy.copy(self)
        other.first = number * batch
        return other

    def whole(self, row: int) -> tuple[Tensor, Tensor]:
        """Return pixels and labels of image ``row`` of the step.

        Pixels are (C, *size) float64 of mean 0 and variance 1. Labels are (*size), or (1, ...) for
        one label per image.

        Args:
            row: the index of the image in the step.
        """
        count, number = int(np.prod(self.size)), self.first + row
        noise = rng.uniform(rng.key(self.seed, number, "pixels"), self.channels * count)
        pixels = torch.from_numpy((noise - 0.5) * 12**0.5).view(self.channels, *self.size)
        labels = torch.from_numpy(
            (rng.uniform(rng.key(self.seed, number, "labels"), count) * self.classes).astype(
                np.int64
            )
        )
        if self.of_image:
            label = torch.from_numpy(noise[:1]) if self.numbers else labels[:1]
            return pixels, label.view(1, *(1 for _ in self.size[1:]))
        labels[
            torch.from_numpy(rng.uniform(rng.key(self.seed, number, "ignored"), count) < 0.05)
        ] = self.ignore
        return pixels, labels.view(self.size)

    def mine(self, rows: list[int], grid, per_rank, coordinates, reach) -> list[TileBatch]:
        """Return the tile batches of one rank, for the images ``rows`` of the step.

        Args:
            rows: the indices of the images in the step.
            grid: number of ranks along each dim that share an image.
            per_rank: number of tiles of each rank along each dim.
            coordinates: index of the rank in the grid, for each dim.
            reach: the receptive field of the network, by whose halo tiles become windows.
        """
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
    """Images of one training step, read from a store.

    Args:
        store: the store.
        data: the settings of the data, which give crops and augmentation.
        seed: the seed of the order of images, crops and augmentation.
        batch: number of images that every step takes.
        step: the number of the step, counted from the beginning of the training.
        context: the smallest number of pixels around a crop that the network also sees, and the
            network's stride (:func:`distseg.data.surroundings.box_around`); None for no context.

    Attributes:
        epoch: the number of the epoch that the step belongs to.
        first: the index of the step's first image in the epoch.
    """

    def __init__(
        self,
        store: Store,
        data: DataConfig,
        seed: int,
        batch: int,
        step: int = 0,
        context: ReceptiveField | None = None,
    ):
        self.store, self.data, self.seed, self.context = store, data, seed, context
        steps = len(epoch_samples(store, "train", data, seed, 0, batch))
        self.epoch, step = divmod(step, steps)
        self.samples = epoch_samples(store, "train", data, seed, self.epoch, batch, context)[step]
        self.size, self.first = self.samples[0].size, self.samples[0].number

    def step(self, number: int, batch: int) -> StoreImages:
        """Return the images of step ``number`` (from 0), if every step takes ``batch`` images."""
        return StoreImages(self.store, self.data, self.seed, batch, number, self.context)

    def whole(self, row: int) -> tuple[Tensor, Tensor]:
        """Return pixels and labels of image ``row`` of the step.

        Pixels are (C, *size) float64, normalised. Labels are (*size) int64, or (1, ...) for one
        label per image.

        Args:
            row: the index of the image in the step.
        """
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
        labels = piece.labels[0]
        return piece.pixels[0].double(), labels if labels.is_floating_point() else labels.long()

    def mine(self, rows: list[int], grid, per_rank, coordinates, reach) -> list[TileBatch]:
        """Return the tile batches of one rank, for the images ``rows`` of the step.

        Args:
            rows: the indices of the images in the step.
            grid: number of ranks along each dim that share an image.
            per_rank: number of tiles of each rank along each dim.
            coordinates: index of the rank in the grid, for each dim.
            reach: the receptive field of the network, by whose halo tiles become windows.
        """
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
    """Run optimizer steps on the mesh and with the serial program, and compare the results.

    All ranks must call it together. The serial program runs on the CPU of rank 0. Rank 0 gets a
    report with all errors, which :func:`summary` turns into text. The other ranks get None.

    Args:
        config: the settings.
        world: the communicator of all ranks.
        image: the size of random images; by default the images of ``data.store`` are used.
        dump: a safetensors file to write, with the initial weights, input, labels and distributed
            gradients of the first step.
        device: the device of this rank's part of the distributed steps.
        steps: the number of steps, each with the images that training would use in this step.
            Errors in the optimizer's state show only in the second and later steps.
    """
    with raise_jointly(world):
        prepared = prepare(config, image)
        config, plain, images = prepared.config, prepared.model, prepared.images()
        MeshShape(config.mesh.samples, config.mesh.tiles, config.mesh.stages).check(world.size)
        freeze(plain, config.optim)
        initial = copy.deepcopy(plain) if world.rank == 0 else None
        if initial is not None:
            check_copy(plain, initial)
        model = as_network(plain)
        check_size(model, images.size)
        check_calls(model, images.size, config.data.images)
        if dump:
            check_dump(plain)
        noted = Facts(config, norms_of(model)).notes()
        names, dropouts = getattr(model, "names", {}), getattr(model, "dropouts", None)
    mesh = Mesh(world, config.mesh.samples, config.mesh.tiles, config.mesh.stages)
    with raise_jointly(world):
        if initial is not None:
            materialise(initial, config.model.seed)
            initial.double()
    engine = Engine(config, mesh, model, images.size, device, precision="fp64")
    noted += context_notes(config.data, prepared.context, engine.exact.halo, prepared.size)
    comparison = report = None
    if initial is not None:
        comparison = Comparison(engine, initial, dropouts)
    for number in range(steps):
        now = images.step(number, config.step_images) if number else images
        outcome = _step(engine, model, now, names)
        with raise_jointly(world):
            if comparison is not None:
                found = comparison.step(now, outcome, None if number else dump)
                report = with_step(report, found) if report else found | {"notes": noted}
    return report


def _step(engine: Engine, model: nn.Module, images, names: Mapping[str, str]) -> Outcome | None:
    """Run an optimizer step on the mesh, and return its loss, gradients, weights and buffers.

    All ranks must call it together. The first rank of each pipeline gets the results of all stages.
    The other ranks get None.

    Args:
        engine: the engine that runs the step.
        model: the network, with the layers of this rank.
        images: the source of the step's images, such as :class:`RandomImages`.
        names: a dict from a tensor's name in the network to its name in the user's module.
    """
    with raise_jointly(engine.mesh.world):
        own = own_pieces(engine, images)
    engine.context.epoch = images.epoch
    loss = engine.backward(own)
    gradients = {name: _copy(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    engine.update(engine.config.optim.lr)
    buffers = {name: _copy(b) for name, b in model.named_buffers() if b.is_floating_point()}
    return _of_all_stages(
        engine.mesh,
        Outcome(loss, gradients, {n: _copy(p) for n, p in model.named_parameters()}, buffers),
        names,
    )


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU, on which the serial program runs."""
    return tensor.detach().to("cpu", copy=True)


def _of_all_stages(mesh: Mesh, own: Outcome, names: Mapping[str, str]) -> Outcome | None:
    """Return the results of all stages on the first rank of each pipeline, and None on the others.

    The results are the loss, gradients, weights and buffers of a step. All ranks of a pipeline must
    call this function together.

    Args:
        mesh: the mesh.
        own: the results of this rank's stages.
        names: a dict from a tensor's name in the network to its name in the user's module.
    """
    parts = mesh.pipeline.gather(own) if mesh.pipeline.size > 1 else [own]
    if parts is None:
        return None
    merged = {
        field: {names.get(k, k): v for part in parts for k, v in getattr(part, field).items()}
        for field in ("gradients", "weights", "buffers")
    }
    return Outcome(own.loss, **merged)


class Prepared(NamedTuple):
    """Settings, plain model and images with which ``distseg verify`` runs its steps.

    Attributes:
        config: the settings, in which the number of dims is that of the images.
        model: the plain model.
        size: the size of a sample in pixels; the largest one if samples differ in size.
        store: the store of the images; None for random images.
        context: the pixels around each crop that the network sees at least
            (:class:`StoreImages`); None if crops have no context.
    """

    config: Config
    model: nn.Module
    size: Size
    store: Store | None
    context: ReceptiveField | None = None

    def images(self) -> RandomImages | StoreImages:
        """Return the source of the images of the first step.

        Raises:
            ValueError: random images do not fit into the machine's memory, or the store refers to
                image files that have changed.
        """
        config = self.config
        if self.store is not None:
            self.store.check_files()
            return StoreImages(
                self.store, config.data, config.train.seed, config.step_images, context=self.context
            )
        vectors, (bands, classes) = of_image(self.model, self.size), channels_of(self.model)
        _check_fits(self.size, bands, config.step_images)
        return RandomImages(self.size, bands, classes, config.loss, config.train.seed, vectors)


def prepare(config: Config, image: Size | None) -> Prepared:
    """Return the completed settings, the model that they describe, and its images.

    The number of dims is taken from the images. With a store, so is the ignored label.

    Args:
        config: the settings.
        image: the size of random images; None to use the images of ``data.store``.

    Raises:
        ValueError: there is neither a size nor a store, or a setting does not fit the images.
    """
    if config.data.store and image is None:
        store = Store(config.data.store, shrink=config.data.shrink)
        size = store.size(store.split("train")[0])
        config = replace(config, loss=with_store(config.loss, store))
        config = config.with_dims(len(size), str(Size(size)))
        classes = None if config.model.out_channels == 1 else len(store.classes)
        model = plain_model(config.model, store.bands, classes)
        check_labels(store, model, config.data, config.loss)
        context, size = None, crop_size(size, config.data.crop)
        if config.data.context != 0:
            context = context_of(as_network(copy.deepcopy(model)), config.data)
            size = max(sample_sizes(store, config.data, context).values(), key=math.prod)
        return Prepared(config, model, Size(size), store, context)
    if image is None:
        raise ValueError(
            "there are no images: give --image 97x131 for random ones, or --data.store PATH"
        )
    config = config.with_dims(len(image), str(Size(image)))
    check_tilt(config.data, image, "random images of --image have")
    losses = {name for _, name in parse(config.loss.name)}
    takes_one = losses <= {"binary_cross_entropy", "dice", "focal", "mse", "l1"}
    many = None if takes_one else 3
    return Prepared(config, plain_model(config.model, guess=many), image, None)


def _check_fits(image: Size, channels: int, count: int) -> None:
    """Refuse images that do not fit into the machine's memory, before they are allocated.

    Args:
        image: the size of an image.
        channels: number of bands.
        count: number of images in a step.
    """
    wanted = 8.0 * Size(image).volume * (channels + 1) * count
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise ValueError(
            f"a step of {count} images of {Size(image)} with {channels} bands takes "
            f"{wanted / 1e9:.3g} GB for the pixels in float64 and the labels, but this machine has "
            f"{there / 1e9:.3g} GB of memory: give a smaller --image, or fewer images in a step"
        )


def own_pieces(engine: Engine, images: RandomImages | StoreImages) -> list[list[TileBatch]]:
    """Return this rank's tile batches of a step's images, a list for each micro-batch.

    Args:
        engine: the engine that runs the step.
        images: the source of the step's images.
    """
    config, mesh = engine.config, engine.mesh
    rows = _rows(config.mesh, config.train, config.data, mesh.sample)
    return [
        images.mine(
            rows.of_micro_batch(m), config.mesh.tiles, config.owned, mesh.tile, engine.reading
        )
        for m in range(rows.micro_batches)
    ]


def _rows(mesh: MeshConfig, train: TrainConfig, data: DataConfig, group: int) -> Rows:
    """Return which images of a step belong to one sample group, as indices in the step.

    The order of the images in the step is that of the data loader.

    Args:
        mesh, train, data: the settings of these sections.
        group: the index of the sample group.
    """
    return Rows(mesh.samples, group, train.accumulate, data.images)


class Comparison:
    """Comparison of a mesh's optimizer steps with the serial program, on rank 0.

    Args:
        engine: the engine that runs the steps on the mesh. The report names its device, halo and
            transport.
        initial: the plain module before the first step, in float64.
        dropouts: a dict from the index of a dropout call in the forward pass to the layer whose
            masks the call uses, as for :func:`serial_step`.
    """

    def __init__(self, engine: Engine, initial: nn.Module, dropouts: Dropouts):
        self.engine, self.dropouts, self.settings = engine, dropouts, engine.config.step
        self.before = initial  # the module before the current step
        self.serial = SerialProgram(initial, self.settings, dropouts)
        optim = self.settings.optim
        self.update = WeightUpdate.on_copies(initial, optim) if optim.name != "sgd" else None
        self.done = 0

    def step(self, images, outcome: Outcome, dump: str | None) -> dict:
        """Run a step serially, compare it with the mesh's step, and return the report.

        The serial program then takes over the weights and buffers of the mesh for the next step.

        Args:
            images: the source of the step's images, such as :class:`RandomImages`.
            outcome: the results of the step on the mesh.
            dump: the file for the tensors of the step (:func:`write_dump`), or None.
        """
        config, wholes = self.engine.config, []
        for d in range(config.mesh.samples):
            rows = _rows(config.mesh, config.train, config.data, d)
            for m in range(rows.micro_batches):
                for n in rows.of_micro_batch(m):
                    number = images.first + n
                    wholes.append(Image(*images.whole(n), number=number, group=d, micro_batch=m))
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
        """Return the report of a step: the errors of loss, gradients, weights and buffers.

        Args:
            wholes: all images of the step.
            outcome: the results of the step on the mesh.
            serial: the results of the serial step.
            epoch: the number of the epoch that the step belongs to.
        """
        engine, config = self.engine, self.engine.config
        step = dict(settings=self.settings, epoch=epoch, dropouts=self.dropouts)
        zero = zero_gradients(self.before, wholes, serial, outcome, **step)
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
        # Measure how much random rounding errors change the results of the serial program itself.
        if _ROUNDED < most < _ROUNDING:
            moved = rounding_of_step(self.before, wholes, **step)
            # Weights of later steps are left out, because the optimizer of this measurement does
            # not have the state of the steps before.
            parts = [part for part in wanted if not (self.done and part == "weights")]
            moves = {
                part: relative_errors(getattr(moved, part), wanted[part], terms.get(part, {}))
                for part in parts
            }
            rounding = max(abs(moved.loss / serial.loss - 1), _largest(moves))
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
            "streaming": config.streaming.active,
            "stride": list(engine.reach.stride),
            "transport": engine.mesh.world.transport,
            "reducer": engine.reducer.name,
            "approximations": engine.approximations,
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
    """Return the largest of all errors; NaN counts as the largest.

    Args:
        errors: for ``gradients``, ``weights`` and ``buffers``, the error of each tensor by name.
    """
    return max((e for part in errors.values() for e in part.values()), key=_badness, default=0.0)


_OF_A_STEP = ("images", "loss", "gradients", "weights", "buffers", "rounding", "max_error")


def with_step(report: dict, later: dict) -> dict:
    """Return the report of the steps so far, extended by the report of the next step.

    Args:
        report: the report of the steps so far.
        later: the report of the next step. It is added to the list ``later_steps``, and
            ``max_error`` becomes the maximum over all steps.
    """
    first = report.get("first_step", {name: report[name] for name in ("rounding", "max_error")})
    steps = [*report.get("later_steps", ()), {name: later[name] for name in _OF_A_STEP}]
    return report | {
        "first_step": first,
        "later_steps": steps,
        "max_error": max(report["max_error"], later["max_error"], key=_badness),
    }


def zero_gradients(
    initial: nn.Module,
    wholes: list[Image],
    serial: Outcome,
    found: Outcome,
    settings: StepSettings,
    epoch: int = 0,
    dropouts: Dropouts = None,
) -> dict[str, dict[str, float]]:
    """Return the gradients that are zero except for rounding errors, by the parameter's name.

    For each of these gradients the result has ``norm``, the 2-norm of the serial gradient, and
    ``rounding``, the 2-norm of its rounding error. Measuring the rounding error takes a second
    serial step, so it is measured only if a gradient is tiny compared with the largest gradient.

    Args:
        initial: the plain module before the step.
        wholes: all images of the step.
        serial: the results of the serial step.
        found: the results of the distributed step.
        settings: the settings of the optimizer step.
        epoch: the number of the epoch that the step belongs to.
        dropouts: a dict from the index of a dropout call in the forward pass to the layer whose
            masks the call uses, as for :func:`serial_step`.
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
    rounding = rounding_of_gradients(initial, wholes, settings, serial.gradients, epoch, dropouts)
    return {
        name: {"norm": norms[name], "rounding": rounding[name]}
        for name in tiny
        if norms[name] <= _SMALL * rounding[name]
    }


_TINY = 1e-9  # share of the largest gradient's norm
# A gradient counts as zero if its norm is at most this many times its rounding error. The ratio is
# about 1e13 for a real gradient. It is not smaller here, because the measured rounding error of a
# single number may be small by chance.
_SMALL = 1e6

_EPSILON = 2.0**-52  # a sum with a rounding error r has terms of a size of about r / _EPSILON


def relative_errors(
    found: dict[str, Tensor], wanted: dict[str, Tensor], terms: Mapping[str, float] = {}
) -> dict[str, float]:
    """Return |found - wanted| / |wanted| in the 2-norm for each tensor, by name.

    The denominator is at least 1e-3 of the largest |wanted| of all tensors, and at least the
    tensor's value in ``terms``. The reason: a tensor may be a sum whose terms nearly cancel, such
    as the gradient of a norm's weight if a later norm removes the effect of this weight. The sum
    then has the rounding errors of its terms, in the serial program as well. Real errors are far
    larger than the tolerance and are still found.

    Args:
        found: the distributed tensors.
        wanted: the serial tensors.
        terms: for tensors that are sums, the size of their terms, by name.
    """
    least = 1e-3 * max((w.norm().item() for w in wanted.values()), default=0.0)
    return {
        name: (found[name] - w).norm().item()
        / max(w.norm().item(), least, terms.get(name, 0.0), 1e-300)
        for name, w in wanted.items()
    }


def _badness(error: float) -> float:
    """Return a key by which errors are sorted; NaN counts as the largest error."""
    return math.inf if math.isnan(error) else error


def check_dump(model: nn.Module) -> None:
    """Refuse to dump a model with a dtype that safetensors files cannot hold.

    Raises:
        ValueError: a parameter or buffer has another dtype. The message names both.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"--dump cannot write {name}, because safetensors files cannot hold its dtype "
                f"{tensor.dtype}: change the dtype in the model, complex numbers for instance to "
                f"real ones (torch.view_as_real), or leave --dump out"
            )


def write_dump(
    path: str, model: nn.Module, images: list[Image], gradients: dict[str, Tensor]
) -> None:
    """Write the tensors of a step to a file, in layer order, for a check by another program.

    The file has the tensors ``weights/NAME``, ``buffers/NAME``, ``input`` (N, C, *size), ``labels``
    (N, *size), and ``gradients/NAME`` for trained parameters. If the images differ in size, each
    image has its own tensors instead: ``input/0`` and ``labels/0``, ``input/1`` and so on.

    Args:
        path: the safetensors file to write.
        model: the module before the step.
        images: all images of the step.
        gradients: the gradients of the step on the mesh, by the parameter's name.
    """
    tensors = {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
    tensors.update({f"buffers/{name}": b for name, b in model.named_buffers()})
    if len({i.pixels.shape for i in images}) == 1:
        tensors["input"] = torch.stack([i.pixels for i in images])
        tensors["labels"] = torch.stack([i.labels for i in images])
    else:
        for n, i in enumerate(images):
            tensors[f"input/{n}"], tensors[f"labels/{n}"] = i.pixels, i.labels
    # `gradients` lists parameters stage by stage, which need not be layer order.
    for name, _ in model.named_parameters():
        if name in gradients:
            tensors[f"gradients/{name}"] = gradients[name]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_tensors(Path(path), tensors, {"order": "layers"})


def _borders(report: dict) -> str:
    every = report["exchange_every"]
    return (
        "halo " + "x".join(map(str, report["halo"]))
        if every == "all"
        else f"halos exchanged every {every}"
    )


def _apart(report: dict) -> list[str]:
    """Return a sentence for each special kind of parameters that the compared network has.

    The kinds are frozen parameters, parameters on which the loss does not depend, and parameters
    with a gradient that is zero except for rounding errors.
    """
    found = []
    if frozen := report["frozen"]:
        found.append(
            f"{_count(frozen)} frozen (requires_grad is off), such as {frozen[0]}: only their "
            "weights are compared, which must not change"
        )
    if unused := report["unused"]:
        found.append(
            f"{_count(unused)} unused, such as {unused[0]}: the loss does not depend on them, so "
            "their gradients are 0"
        )
    if zero := report["zero_gradients"]:
        worst = max(zero, key=lambda name: zero[name]["norm"])
        found.append(
            f"{_count(zero)} with a gradient that is zero except for rounding, such as {worst} "
            f"(norm {zero[worst]['norm']:.0e}, rounding error {zero[worst]['rounding']:.0e}); a "
            "bias before a norm that subtracts it again has such a gradient"
            + (
                f": {report['optimizer']} divides rounding errors by rounding errors, so these "
                "weights are compared with the optimizer's step on the distributed gradients"
                if report["optimizer"] != "sgd"
                else ""
            )
        )
    return found


def _count(names) -> str:
    return f"{len(names)} parameter{'s' if len(names) > 1 else ''}"


def passed(report: dict, tolerance: float) -> bool:
    """Return True if every error in a report of :func:`verify` is within the tolerance.

    If rounding errors alone change the results of the serial program by more than the tolerance,
    errors of up to a few times that change are accepted. NaN is not accepted.
    """
    steps = [*filter(None, [report.get("first_step")]), *report.get("later_steps", ())]
    rounding = max(step.get("rounding", 0.0) for step in (report, *steps))
    return all(_within(step, tolerance) for step in (*steps, report | {"rounding": rounding}))


def _within(step: dict, tolerance: float) -> bool:
    if tolerance >= _ROUNDED:
        tolerance = max(tolerance, _TIMES * step["rounding"])
    return step["max_error"] <= tolerance  # False for NaN


def _parts(step: dict) -> dict[str, dict[str, float]]:
    """Return the relative errors of a step by tensor, for gradients, weights and buffers.

    An example is ``{"gradients": {"conv.weight": 1e-15}, "weights": {...}, "buffers": {...}}``.

    Args:
        step: the report of the step.
    """
    return {part: step[part] for part in ("gradients", "weights", "buffers")}


_ROUNDED, _ROUNDING, _TIMES = 1e-12, 1e-9, 4.0
"""Constants of the rounding test.

If the largest error is between ``_ROUNDED`` and ``_ROUNDING``, the rounding errors of the serial
program itself are measured. The largest error may be ``_TIMES`` times as large as these.
"""


def summary(report: dict, tolerance: float) -> str:
    """Return a report of :func:`verify` as text.

    The text has one line with the largest error of the gradients, one for the weights and one for
    the buffers. It ends with the verdict ``exact`` or ``NOT EXACT``.

    Args:
        report: the report of :func:`verify`.
        tolerance: the largest relative error that counts as exact.
    """
    mesh = report["mesh"]
    lines = [
        f"mesh {mesh['samples']} samples x ({mesh['tiles']}) tiles x {mesh['stages']} stages, "
        f"images {', '.join(report['images'])}, "
        f"{_borders(report)}{', streamed tiles' if report['streaming'] else ''}, stride "
        f"{Size(report['stride'])}, gradients summed by {report['reducer']}"
    ]
    if report["device"] != "cpu":
        lines.append(f"computed on {report['device']}, compared with the serial program on the CPU")
    lines += [f"approximation: {text}" for text in report["approximations"]]
    lines += [f"note: {text}" for text in [*report["notes"], *_apart(report)]]
    lines.append(
        f"{'loss':<12}{report['loss']['error']:.1e}   {report['loss']['distributed']:.15g} "
        f"against {report['loss']['serial']:.15g}"
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
            "note: the largest error is above the tolerance, but accepted: random errors in the "
            "last bits change the results of the serial program itself by "
            f"{report['rounding']:.1e}"
        )
    verdict = "exact" if passed(report, tolerance) else "NOT EXACT"
    lines.append(
        f"{verdict}: largest relative error {report['max_error']:.1e}, tolerance {tolerance:.0e}"
    )
    return "\n".join(lines)


def _line_of_step(number: int, step: dict) -> str:
    """Return the line of the summary about the second or a later step, with its largest error.

    Args:
        number: the number of the step; the first step is number 1.
        step: the report of the step.
    """
    errors = {"the loss": step["loss"]["error"]} | {
        f"{name} ({part})": error
        for part, found in _parts(step).items()
        for name, error in found.items()
    }
    worst = max(errors, key=lambda name: _badness(errors[name]))
    return (
        f"{f'step {number}':<12}{errors[worst]:.1e}   "
        f"largest of its loss, gradients, weights and buffers, at {worst}"
    )
