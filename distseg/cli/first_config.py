"""Choose the settings of a first training from the data and the machine, for ``distseg init``.

The choice is a pure function. Time and memory of a step are predicted by the model of ``distseg
plan``, with constants for the speed of a device. Nothing is timed or drawn at random, so the same
data on the same machine always give the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import yaml

from distseg.cli.planned_training import PlannedTraining
from distseg.config.settings import Config, DataConfig
from distseg.config.sizes import Size
from distseg.config.units import duration, many, si
from distseg.data.sampler import crop_size, number_of_crops
from distseg.layers.graph import reach_for
from distseg.models.capture.capture import as_network
from distseg.models.network import check_size, is_flat
from distseg.models.zoo import plain_model
from distseg.planning.machine import Machine
from distseg.planning.mesh_layout import MeshLayout, Prediction
from distseg.planning.mesh_search import Planner
from distseg.training.conflicts import check_norms

_LEAST_CELLS = 6  # cells per dim of a U-Net's smallest feature map
_MEMORY_SHARE = 0.5  # share of a rank's memory for a step; the rest is for reading and evaluation
_EPOCHS, _LEAST_EPOCHS = 100, 5
_LEAST_CROPS = 64  # crops in an epoch
_VALIDATIONS = 10
_RARE = 0.02  # share of pixels below which crops are placed near a class
_UNEVEN = 3  # ratio of the counts of two classes from which classes get weights
_LEAST_CROP = 32
_LARGEST_CROP = {(2, False): 256, (2, True): 512, (3, False): 64, (3, True): 128}  # (dims, GPU)
_CHANNELS = {(2, False): 16, (2, True): 32, (3, False): 8, (3, True): 16}  # (dims, GPU)
_MOST_IMAGES = {(2, False): 8, (2, True): 16, (3, False): 4, (3, True): 4}  # (dims, GPU)


@dataclass(frozen=True)
class TrainingData:
    """Facts about a store, from which ``distseg init`` chooses settings.

    Attributes:
        path: the path of the store.
        sizes: the size of each training image.
        bands: number of bands.
        classes: names of the classes.
        counts: for each class, the number of training pixels; with ``of_images`` the number of
            training images.
        of_images: True for one label per image, False for labels of pixels.
        splits: names of the splits.
    """

    path: str
    sizes: tuple[tuple[int, ...], ...]
    bands: int
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    of_images: bool = False
    splits: tuple[str, ...] = ("train", "val", "test")

    @property
    def dims(self) -> int:
        """Number of spatial dims of the images."""
        return len(self.sizes[0])

    @property
    def largest(self) -> Size:
        """Largest size along each dim, over all training images."""
        return Size(max(lengths) for lengths in zip(*self.sizes))

    @property
    def shares(self) -> list[float]:
        """Fraction of the training labels that each class has."""
        return [count / max(1, sum(self.counts)) for count in self.counts]

    @property
    def numbers(self) -> bool:
        """True if the label of an image is a number and not a class."""
        return self.of_images and len(self.classes) == 1

    def samples(self, crop: Size | None) -> int:
        """Return the number of samples of an epoch, as the sampler counts them."""
        return len(self.sizes) if crop is None else number_of_crops(self.sizes, crop)


@dataclass(frozen=True)
class Computer:
    """Machine on which the training will run.

    Attributes:
        name: the device in words, such as ``2 CPU cores``.
        ranks: the largest useful number of ranks: the number of cores, or of GPUs.
        memory: bytes of memory of a GPU, or of the host, which all ranks share.
        device: speed of one core or GPU.
        gpu: True for GPUs.
    """

    name: str
    ranks: int
    memory: float
    device: Machine
    gpu: bool = False

    @property
    def useful_ranks(self) -> int:
        """Largest number of ranks for which the memory is sufficient; on GPUs the number of GPUs.

        Half of a rank's memory must be at least twice the memory that PyTorch itself takes.
        """
        if self.gpu:
            return self.ranks
        return max(1, min(self.ranks, int(_MEMORY_SHARE * self.memory / (2 * self.device.base))))

    def memory_of(self, ranks: int) -> float:
        """Return the bytes of memory that each of ``ranks`` ranks has."""
        return self.memory if self.gpu else self.memory / ranks


class Choice(NamedTuple):
    """Setting that ``distseg init`` has chosen.

    Attributes:
        setting: the name of the setting, such as ``optim.lr``.
        value: its value.
        why: the reason for the value in a short line, for a comment in the config.
    """

    setting: str
    value: Any
    why: str


class FirstConfig(NamedTuple):
    """Chosen settings of a first training.

    Attributes:
        choices: the settings in the order of the file.
        config: the same settings as a config.
        estimate: the predicted time and memory of a step; None if distseg cannot follow the layers
            of the network.
    """

    choices: tuple[Choice, ...]
    config: Config
    estimate: Prediction | None


def first_config(
    data: TrainingData,
    computer: Computer,
    network: str | None = None,
    minutes: float = 3.0,
    output: str = "runs/first",
    count_near: Callable[[Size, str], Sequence[int]] | None = None,
) -> FirstConfig:
    """Return the settings of a first training.

    Args:
        data: facts about the store.
        computer: the machine.
        network: the value of ``model.name``; None to choose one.
        minutes: the time that training should take; the number of epochs is chosen for it.
        output: the folder of the run.
        count_near: a function of a crop size and the name of a class, which returns the number of
            pixels of each class in crops that are placed near this class. None if crops have the
            classes as often as whole images.

    Raises:
        ValueError: the network is unknown or does not fit the data, or no step fits the memory.
    """
    _check_dims(data)
    key = (data.dims, computer.gpu)
    limit = Size((_LARGEST_CROP[key],) * data.dims)
    crop = None
    if not data.of_images and any(n > most for n, most in zip(data.largest, limit)):
        crop = Size(min(n, most) for n, most in zip(data.largest, limit))
    model = _model(data, computer, network, crop)
    batch = _batch(_samples_of_epoch(data, crop), _MOST_IMAGES[key])
    ranks = _power_of_two(min(computer.useful_ranks, batch))
    room = _MEMORY_SHARE * computer.memory_of(ranks)
    steps = _Steps([*model, *_loss(data, data.counts)], data, computer, ranks)
    streaming: list[Choice] = []
    tried = _smaller(batch // ranks, crop, data, steps.stride)
    for images, crop in tried:
        found = steps.predicted(images, crop)
        if found is None or found.memory <= room:
            break
    else:
        if not data.of_images:
            raise ValueError(
                f"a step of {model[0].value} takes {si(found.memory, 'B')} of memory a rank even "
                f"with one small image, but {si(room, 'B')} may be used (half of the memory of "
                f"each of {ranks} ranks): choose a smaller network by --network"
            )
        why = f"an image at once would take {si(found.memory, 'B')}: it is streamed in tiles"
        streaming = [Choice("streaming.memory", f"{room / 1e6:.0f}MB", why)]
        found = replace(found, memory=room)
    counts: Sequence[float] = data.counts
    if count_near is not None and (focus := _focus_class(data, crop)) is not None:
        counts = _counts_in_crops(data, count_near(crop, focus))
    choices = [
        *model,
        *_mesh(ranks, computer),
        *streaming,
        *_loss(data, counts),
        *_samples(data, images, crop, ranks, found),
        *_optim(),
        *_length(data, images * ranks, crop, found, minutes, computer),
        Choice("train.output", output, "folder of the log and the checkpoints"),
    ]
    choices.sort(key=lambda choice: _SECTIONS.index(choice.setting.partition(".")[0]))
    return FirstConfig(tuple(choices), _config(choices), found)


def _check_dims(data: TrainingData) -> None:
    if data.dims not in (2, 3):
        raise ValueError(
            f"{data.path} has data of {data.dims} dims ({Size(data.sizes[0])}), but init writes "
            "configs for images and volumes: prepare a store of 2 or 3 dims"
        )


_SECTIONS = [section.name for section in fields(Config)]


def _config(choices: Sequence[Choice]) -> Config:
    return Config().with_values({setting: value for setting, value, _ in choices})


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above ``number``, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _samples_of_epoch(data: TrainingData, crop: Size | None) -> int:
    """Return the number of samples of an epoch; with crops it is at least ``_LEAST_CROPS``.

    Crops lie at random places. So a few large images give more different crops than would fit side
    by side.
    """
    return data.samples(crop) if crop is None else max(_LEAST_CROPS, data.samples(crop))


def _batch(samples: int, most: int) -> int:
    """Return the number of images in a step: at most ``most``, and at most half an epoch.

    Half an epoch is rounded down to a power of two.
    """
    return min(most, _power_of_two(samples // 2))


def _model(
    data: TrainingData, computer: Computer, network: str | None, crop: Size | None
) -> list[Choice]:
    """Return the settings of the network: the user's choice, or a U-Net that fits the images.

    For images with one label each, the default is a residual network.
    """
    if data.of_images and network is None:
        return _classifier(data)
    name = network or "unet"
    words = "one class for each image" if data.of_images else "a class for each pixel"
    if name != "unet":
        return [Choice("model.name", name, f"as given by --network; {words} is expected")]
    side = sorted(min(crop_size(size, crop)) for size in data.sizes)[len(data.sizes) // 2]
    depth = max(1, min(4 if data.dims == 2 else 3, int(math.log2(max(1, side / _LEAST_CELLS)))))
    channels = _CHANNELS[data.dims, computer.gpu]
    return [
        Choice("model.name", name, f"a U-Net: {words}"),
        Choice(
            "model.depth",
            depth,
            f"{depth} poolings: {side} pixels are {-(-side // 2**depth)} cells at the bottom",
        ),
        Choice("model.num_convs", 2, "two convolutions per level, as in the usual U-Net"),
        Choice(
            "model.base_channels",
            channels,
            f"small enough for a {'GPU' if computer.gpu else 'CPU'}; more may score higher",
        ),
        Choice("model.norm", "batch", "batch norm learns fast, and predicts in little memory"),
        Choice("model.dropout", 0.0, "no dropout: augmentation comes first"),
    ]


def _classifier(data: TrainingData) -> list[Choice]:
    """Return the settings of a residual network for images with one label each."""
    if data.dims != 2:
        raise ValueError(
            f"{data.path} has one label for each volume, for which distseg has no network: name "
            "your own by --network package.module:function"
        )
    side = sorted(min(size) for size in data.sizes)[len(data.sizes) // 2]
    depth = max(1, min(4, int(math.log2(max(1, side / 8)))))
    words = "a number" if data.numbers else "a class"
    return [
        Choice(
            "model.name",
            "distseg.models.classifier:residual",
            f"a residual network: {words} for each image",
        ),
        Choice("model.depth", depth, f"blocks that halve the image, here of {side} pixels"),
        Choice("model.base_channels", 16, "channels of the first block; more may score higher"),
        Choice("model.norm", "batch", "batch norm learns fast"),
    ]


def _mesh(ranks: int, computer: Computer) -> list[Choice]:
    """Return the settings of the section ``mesh`` by which ranks share the images of a step."""
    found = [
        Choice("mesh.samples", ranks, f"ranks that share the images of a step: {computer.name}")
    ]
    if ranks > 1:
        found.append(
            Choice("spatial.norm_scope", "step", "batch norm sees the images of all ranks")
        )
    return found


def _loss(data: TrainingData, counts: Sequence[float]) -> list[Choice]:
    """Choose the loss by the kind of the labels and the counts of the classes in the samples.

    Args:
        data: the training data.
        counts: for each class, the number of its pixels or images in the samples of training.
    """
    if data.numbers:
        return [Choice("loss.name", "mse", "labels are numbers")]
    if data.of_images:
        return [
            Choice("loss.name", "cross_entropy", "classes exclude each other"),
            *_weights(counts, "images"),
        ]
    rarest = min((share for share in data.shares if share), default=1.0)
    why = f"dice lets rare classes count; the rarest has {rarest:.1%} of the pixels"
    return [
        Choice("loss.name", "cross_entropy + dice", why),
        Choice("loss.dice_over", "batch", "one Dice loss a step: stable if a class is absent"),
        *_weights(counts, "pixels" if counts is data.counts else "pixels in crops"),
    ]


def _counts_in_crops(data: TrainingData, near: Sequence[int]) -> list[float]:
    """Return the mean number of pixels of each class in crops, up to one common factor.

    A part of the crops, ``data.focus_share``, is placed near a class. The others have the classes
    as often as whole images.

    Args:
        data: the training data.
        near: for each class, the number of its pixels in the crops that are placed near a class.
    """
    share = DataConfig().focus_share
    return [share * n / sum(near) + (1 - share) * overall for n, overall in zip(near, data.shares)]


def _weights(counts: Sequence[float], what: str) -> list[Choice]:
    """Return the setting of class weights if the classes are uneven, else an empty list.

    A weight is the inverse square root of the class's count. This is a compromise between equal
    weights of all pixels and equal weights of all classes.

    Args:
        counts: number of pixels or images of each class, or numbers in proportion to these.
        what: words for the smallest count, such as ``pixels of the rarest``, for a comment in the
            config.
    """
    present = [count for count in counts if count]
    if not present or max(present) <= _UNEVEN * min(present):
        return []
    mean = sum(present) / len(present)
    weights = [round(math.sqrt(mean / n), 2) if n else 1.0 for n in counts]
    ratio = max(present) / min(present)
    why = f"the commonest class has {ratio:.3g} times the {what} of the rarest"
    return [Choice("loss.class_weights", weights, why)]


def _samples(
    data: TrainingData, images: int, crop: Size | None, ranks: int, found: Prediction | None
) -> list[Choice]:
    """Return the settings of the samples: store, images in a step, crops and augmentation."""
    memory = "" if found is None else f"; a step takes up to {si(found.memory, 'B')} a rank"
    choices = [
        Choice("data.store", data.path, "the training data"),
        Choice("data.images", images, f"{many(images * ranks, 'image')} a step in all{memory}"),
    ]
    if crop is not None:
        why = f"random parts of images of up to {data.largest}"
        choices.append(Choice("data.crop", crop, why))
        focus = _focus_class(data, crop)
        if focus is not None:
            why = f"half of the crops have {focus}, {data.shares[data.classes.index(focus)]:.2%}"
            choices.append(Choice("data.focus_class", focus, f"{why} of the pixels"))
    if data.of_images:
        why = "add flip, turn if a mirrored image keeps its label"
        choices.append(Choice("data.augment", [], why))
    else:
        why = "mirrored and turned images; empty it if direction matters"
        choices.append(Choice("data.augment", ["flip", "turn"], why))
    return choices


def _focus_class(data: TrainingData, crop: Size | None) -> str | None:
    """Return the rarest class of the training pixels, near which crops are placed, or None.

    Return None if no class is rare or images are not cropped.
    """
    if crop is None:
        return None
    share, name = min((s, n) for s, n in zip(data.shares, data.classes) if s)
    return name if share < _RARE and not _means_nothing(name) else None


def _means_nothing(name: str) -> bool:
    """Return True if YAML reads a name as None, such as ``null``, so that a flag cannot give it."""
    try:
        return yaml.safe_load(name) is None
    except yaml.YAMLError:
        return False  # it is read as text


def _optim() -> list[Choice]:
    return [
        Choice("optim.lr", 3e-3, "peak rate of AdamW; halve it if the loss jumps"),
        Choice("optim.schedule", "one_cycle", "the rate rises, then falls: good for short runs"),
        Choice("optim.clip", 1.0, "large gradients are scaled down"),
    ]


def _length(
    data: TrainingData,
    batch: int,
    crop: Size | None,
    found: Prediction | None,
    minutes: float,
    computer: Computer,
) -> list[Choice]:
    """Return the settings that determine how long the training takes."""
    an_epoch = -(-_samples_of_epoch(data, crop) // batch)
    if found is None:
        epochs, choices = 10, []
        why = "a first guess: distseg cannot follow the layers of this network to predict its time"
    else:
        steps = max(_LEAST_EPOCHS, int(60 * minutes / found.seconds))
        choices = []
        room = data.samples(crop)
        if steps < _LEAST_EPOCHS * an_epoch:
            an_epoch = steps // _LEAST_EPOCHS
            if crop is None:
                # Only an epoch of crops can be shortened. A crop as large as the images is whole.
                choices.append(Choice("data.crop", data.largest, "whole images, drawn at random"))
            why = f"{an_epoch} steps an epoch; leave it out to see all pixels in an epoch"
            choices.append(Choice("data.epoch_samples", an_epoch * batch, why))
        elif an_epoch * batch > room and crop is not None:
            why = f"crops of an epoch, at random places; {room} side by side fill the images"
            choices.append(Choice("data.epoch_samples", an_epoch * batch, why))
        epochs = max(1, min(_EPOCHS, steps // an_epoch))
        total = epochs * an_epoch
        why = (
            f"{total} steps of {found.seconds:.2g} s, about {duration(total * found.seconds)}: "
            f"predicted for {computer.device.name}"
        )
    choices.append(Choice("train.epochs", epochs, why))
    every = max(1, epochs // _VALIDATIONS)
    if "val" in data.splits and every > 1:
        choices.append(Choice("train.validate_every", every, "epochs between validations"))
        choices.append(Choice("train.checkpoint_every", every, "epochs between checkpoints"))
    return choices


def _smaller(
    images: int, crop: Size | None, data: TrainingData, stride: Sequence[int]
) -> Iterator[tuple[int, Size | None]]:
    """Yield (number of images, crop size) for steps that need less and less memory.

    Args:
        images: the number of images to begin with.
        crop: the crop size to begin with; None for whole images.
        data: the training data. Images with a label of the whole image are not cropped.
        stride: the total stride of the network, which decides how small crops may be.
    """
    while images > 1:
        yield images, crop
        images //= 2
    yield 1, crop
    least = [max(_LEAST_CROP, _LEAST_CELLS * s) for s in stride]
    crop = crop or data.largest
    while not data.of_images and any(n > few for n, few in zip(crop, least)):
        crop = Size(min(n, max(few, n // 2)) for n, few in zip(crop, least))
        yield 1, crop


class _Steps:
    """Predictor of time and memory of a network's steps with different numbers and sizes of images.

    Args:
        choices: the settings of the network and of the loss.
        data: the training data.
        computer: the machine.
        ranks: number of ranks, each of which is a sample group.

    Raises:
        ValueError: the network is unknown, or does not fit the bands and classes of the data.
    """

    def __init__(
        self, choices: Sequence[Choice], data: TrainingData, computer: Computer, ranks: int
    ):
        config = _config(choices)
        mesh = replace(config.mesh, samples=ranks, tiles=Size((1,) * data.dims))
        config = replace(config, mesh=mesh)
        self.config = config.with_dims(data.dims, str(data.largest))
        plain = plain_model(self.config.model, data.bands, len(data.classes))
        self.model, self.data = as_network(plain), data
        self.machine = replace(
            computer.device, memory=computer.memory_of(ranks), ranks=max(ranks, 1)
        )
        self.flat = is_flat(self.model)

    @property
    def stride(self) -> Sequence[int]:
        """Total stride of the network along each dim; 1 if the network cannot be captured."""
        return reach_for(self.model, True).stride if self.flat else (1,) * self.data.dims

    def predicted(self, images: int, crop: Size | None) -> Prediction | None:
        """Return the predicted time and memory of a step; None if the network cannot be captured.

        Args:
            images: number of images of a rank.
            crop: the crop size; None for whole images.

        Raises:
            ValueError: the network cannot compute samples of this size.
        """
        config = replace(self.config, data=replace(self.config.data, images=images))
        sizes = {crop_size(size, crop) for size in self.data.sizes}
        for size in sizes:
            check_size(self.model, size)
            check_norms(
                self.model, {"train": size}, config.spatial, config.approximate, config.norm_images
            )
        if not self.flat:
            return None
        size = Size(max(sizes, key=lambda size: (math.prod(size), size)))
        layout = MeshLayout(config.mesh.samples, config.mesh.tiles, 1, "all", 1, "1f1b", "never")
        work = PlannedTraining(config, self.model, Size(size)).work(self.machine)
        return Planner(work, self.machine).predict(layout)
