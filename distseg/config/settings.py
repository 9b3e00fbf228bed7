"""Every setting of distseg: one frozen dataclass per section of the YAML file.

Field names are the keys of the YAML file and the flags of the command line
(``--section.field``). The string below a field is its documentation, which ``--help`` prints.
Sizes are in pixels and written as ``97x131`` (height x width). A section refuses impossible
values. Settings that would have no effect beside others are refused by
:mod:`distseg.training.conflicts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from numbers import Real
from typing import Any, ClassVar, Literal, TypeVar

from distseg.config.refusal import SettingError
from distseg.config.sizes import Size, parse_bytes


def to_sizes(section, *names: str) -> None:
    """Convert sizes given as text or plain tuples to :class:`Size`; None stays None.

    Args:
        section: a section of the config, changed in place.
        names: the fields of the section that are sizes.
    """
    for name in names:
        value = getattr(section, name)
        object.__setattr__(section, name, None if value is None else Size(value))


_LARGEST = 2**63 - 1  # largest integer that files and other programs can store
_MOST_IMAGES = 10**6  # largest number of images of a step


def _name(section, field: str) -> str:
    """Return the name of a field of a section as a user writes it, such as ``model.depth``."""
    kind = type(section).__name__.removesuffix("Config").removesuffix("Base")
    return f"{kind.lower()}.{field}"


def check_at_least(section, least: int, *names: str) -> None:
    """Refuse numbers below ``least``, NaN, and numbers above the largest 64-bit integer.

    Args:
        section: a section of the config.
        least: the smallest number that is accepted.
        names: the fields of the section to check. A field that is None is accepted.
    """
    for name in names:
        value = getattr(section, name)
        if value is None:
            continue
        if not value >= least:
            raise SettingError(
                "DS105", f"{_name(section, name)} must be at least {least}, got {value}"
            )
        if not value <= _LARGEST:
            raise SettingError(
                "DS106",
                f"{_name(section, name)} is {value}, which is too large for a 64-bit integer: "
                "give a smaller number",
            )


def _between(section, least: float, most: float, *names: str) -> None:
    """Refuse numbers outside ``least`` to ``most`` in the fields ``names`` of a section.

    A field that is None is accepted.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and not least <= value <= most:
            raise SettingError(
                "DS107", f"{_name(section, name)} must be from {least} to {most}, got {value}"
            )


def _range(section, least: float, most: float, name: str) -> None:
    """Refuse the field ``name`` of a section unless it is a range from ``least`` to ``most``.

    A range is a list of two numbers, its smallest and its largest one. Both must lie within the
    limits. A field that is None is accepted.
    """
    value = getattr(section, name)
    if value is None:
        return
    numbers = value if isinstance(value, (list, tuple)) else ()
    real = all(isinstance(n, Real) and not isinstance(n, bool) for n in numbers)
    if len(numbers) != 2 or not real or not least <= numbers[0] <= numbers[1] <= most:
        raise SettingError(
            "DS126",
            f"{_name(section, name)} must be a range [from, to] with {least} <= from <= to <= "
            f"{most}, got {value!r}",
        )


def _path(section, *names: str) -> None:
    """Refuse fields of a section that should be paths, but have text that cannot be a path.

    ``names`` are the fields. A field that is None is accepted.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and (not value.strip() or "\0" in value):
            raise SettingError(
                "DS108",
                f"{_name(section, name)} is {value!r}, which is not a path: name a file or folder, "
                f"or leave it out",
            )


def _each_once(section, name: str) -> None:
    """Refuse the field ``name`` of a section if an entry of its list occurs twice."""
    values = getattr(section, name)
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise SettingError(
            "DS109",
            f"{_name(section, name)} has {twice[0]} more than once ({', '.join(values)}): give "
            "each once",
        )


def check_effect(section, name: str, effective: bool, why: str) -> None:
    """Refuse a setting that differs from its default although it would have no effect.

    Args:
        section: the settings.
        name: the field.
        effective: True if the field has an effect, given the values of the other fields.
        why: for the message, the reason why the field has no effect, and how to fix it.
    """
    value, default = getattr(section, name), type(section).__dataclass_fields__[name].default
    if value != default and not effective:
        raise SettingError("DS201", f"{_name(section, name)} is {value}, but {why}")


@dataclass(frozen=True)
class ModelBase:
    """The network, with the settings that exact training and PatchGD have in common.

    PatchGD takes this section. Exact training takes :class:`ModelConfig`, which has more settings.
    """

    name: str = "unet"
    """``unet``, a name that ``distseg models`` lists, or your own function as
    ``package.module:function``. Your function is called with ``args`` and with those of the
    fields below that are set."""
    args: dict[str, bool | int | float | str | list | None] | None = None
    """Arguments of your own function by name, such as
    ``{encoder_name: resnet34, encoder_weights: null}``. The numbers of bands and classes are passed
    too, as ``in_channels`` and ``out_channels`` or the names that your function uses instead."""
    pad: int | None = None
    """For your own function: images are zero-padded at the end to a multiple of this many pixels,
    and the result is cut to the image's size."""
    depth: int | None = None
    """Number of poolings; the total stride is 2^depth."""
    num_convs: int | None = None
    """Number of convolutions per level, n_c."""
    base_channels: int | None = None
    """Number of channels of the first level."""
    in_channels: int | None = None
    """Number of bands of an image; by default the number of bands in the store."""
    out_channels: int | None = None
    """Number of classes (1: one foreground class, sigmoid); by default as in the store."""
    norm: Literal["instance", "batch", "group", "none"] | None = None
    """Norm after each convolution."""
    dropout: float | None = None
    """Probability that a channel is dropped, in [0, 1)."""
    up: Literal["nearest", "bilinear", "transposed"] | None = None
    """Up-sampling: nearest or bilinear interpolation, or a transposed convolution."""
    groups: int | None = None
    """Number of groups, for ``norm: group`` only."""
    inputs: list[int] | None = None
    """For your own function, if its network takes several tensors: the number of bands of each,
    such as ``[3, 1]``."""
    seed: int = 0
    """Seed of the initial weights."""

    outputs: ClassVar[dict[str, float] | None] = None  # a setting of exact training
    dims: ClassVar[int | None] = None  # a setting of exact training

    def __post_init__(self):
        if self.args is not None and ":" not in self.name:
            raise SettingError(
                "DS203",
                "model.args are arguments of your own function, package.module:function, "
                f"but model.name is {self.name}: use the fields of model, such as model.depth",
            )
        if self.pad is not None and ":" not in self.name:
            raise SettingError(
                "DS235",
                f"model.pad is {self.pad}, but it is for your own network only, and model.name is "
                f"{self.name}: leave it out, because networks of distseg take images of any size",
            )
        if self.pad is not None and not 2 <= self.pad <= 256:
            raise SettingError("DS110", f"model.pad must be from 2 to 256, got {self.pad}")
        for setting in ("inputs", "outputs"):
            if getattr(self, setting) is not None and (
                ":" not in self.name or not getattr(self, setting)
            ):
                raise SettingError(
                    "DS204",
                    f"model.{setting} is {getattr(self, setting)}, but it describes the "
                    f"{setting} of a network of your own, package.module:function, "
                    f"and model.name is {self.name}: leave it out",
                )
        if self.inputs is not None and min(self.inputs) < 1:
            raise SettingError(
                "DS111", f"model.inputs is {self.inputs}, but each input must have at least 1 band"
            )
        if self.dims not in (None, 2, 3):
            raise SettingError(
                "DS112", f"model.dims is {self.dims}, but it must be 2 for images or 3 for volumes"
            )
        _between(
            self,
            -_LARGEST,
            _LARGEST,
            "seed",
            "depth",
            "num_convs",
            "base_channels",
            "in_channels",
            "out_channels",
            "groups",
        )


@dataclass(frozen=True)
class ModelConfig(ModelBase):
    """The network, with the settings that only exact training has."""

    outputs: dict[str, float] | None = None
    """For your own function, if its network returns several tensors: the outputs to train, by name
    or number, with the weights of their losses, such as ``{out: 1, aux: 0.4}``. Evaluation and
    prediction use the first one. Outputs smaller than the image are resized to it, bilinearly."""
    dims: int | None = None
    """Spatial dims of the images: 2, or 3 for volumes; by default those of the data."""

    def __post_init__(self):
        super().__post_init__()
        if self.outputs is not None:
            # YAML reads the name 0 as a number.
            named = {str(name): float(weight) for name, weight in self.outputs.items()}
            object.__setattr__(self, "outputs", named)
        for name, weight in (self.outputs or {}).items():
            if not 0 < weight < math.inf:
                raise SettingError(
                    "DS113",
                    f"model.outputs has {weight:g} for {name}, but the weight of a loss must "
                    "be a number above 0: give such a weight, or leave that output out",
                )


def output_weights(model: ModelBase) -> tuple[float, ...]:
    """Return the loss weight of each trained output, in the order of ``model.outputs``.

    Without ``model.outputs`` the network has a single output, and the result is (1.0,).
    """
    return tuple((model.outputs or {"": 1.0}).values())


@dataclass(frozen=True)
class MeshBase:
    """The mesh of ranks: how many ranks split the samples and the image.

    PatchGD takes this section. Exact training takes :class:`MeshConfig`, which adds the stages.
    """

    samples: int = 1
    """D: number of sample groups (data parallel). Each group trains on its own images."""
    tiles: Size = Size((1, 1))
    """Q = q_y x q_x: grid of ranks that share one image (sample parallel)."""
    reducer: Literal["auto", "horovod", "mpi", "torch", "nccl"] = "auto"
    """Library that sums gradients over ranks. auto: torch.distributed (torch) under torchrun.
    With MPI it is Horovod if that is installed, else MPI. nccl: NCCL, for GPUs under torchrun."""

    stages: ClassVar[int] = 1  # a setting of exact training
    layout: ClassVar[str] = "given"  # a setting of exact training

    def __post_init__(self):
        to_sizes(self, "tiles")
        check_at_least(self, 1, "samples", "stages")


@dataclass(frozen=True)
class MeshConfig(MeshBase):
    """The mesh of ranks: how many ranks split the samples, the image and the network."""

    stages: int = 1
    """S: number of pipeline stages of the model (model parallel)."""
    layout: Literal["given", "auto"] = "given"
    """auto (``--mesh auto``): choose samples, tiles, stages, micro-batches, exchange and recompute
    for the ranks of the job. A step keeps its number of images. The network is timed on the job's
    machine, and the layout with the shortest predicted step is taken, as by ``distseg plan``. If
    none fits the memory of a rank, tiles are streamed."""


@dataclass(frozen=True)
class PipelineConfig:
    """The pipeline: schedule, placement and balance of its stages."""

    schedule: Literal["auto", "gpipe", "1f1b", "zb-h1"] = "auto"
    """gpipe: all forward passes, then all backward passes. 1f1b: forward and backward passes
    alternate, which holds fewer activations. zb-h1: 1f1b, with weight gradients computed while a
    stage would otherwise wait. auto: 1f1b in most cases. auto is gpipe if there are stages and a
    loss such as Dice, for which 1f1b would need an extra forward pass. It is gpipe too for streamed
    tiles with active norms (norms that compute their statistics from the current images), whose
    feature maps are offloaded."""
    balance: list[int] | None = None
    """Number of layers of each stage; by default the split whose slowest stage is fastest
    (``distseg plan`` shows it)."""
    recompute: Literal["never", "except_last", "always"] = "never"
    """always: drop a micro-batch's activations after its forward pass and compute them again
    before its backward pass. except_last: keep the activations if the micro-batch's backward pass
    comes next."""
    placement: Literal["linear", "v-shaped", "devices"] = "linear"
    """linear: one stage per rank. v-shaped: stages go down the ranks and up again, so both ends of
    a skip are on one rank (2 S - 1 stages on S ranks). devices: all stages on each rank, one stage
    per device, run by torchgpipe."""
    devices: list[str] | None = None
    """The device of each stage with ``placement: devices``, such as ``[cuda:0, cuda:1]``. By
    default one GPU per entry of ``balance``, from this rank's share of the node."""

    def __post_init__(self):
        self._check_devices()
        if self.balance is not None and min(self.balance, default=0) < 1:
            raise SettingError(
                "DS114",
                "pipeline.balance must give the number of layers of each stage, at least 1 for "
                f"each, got {self.balance}",
            )

    def _check_devices(self):
        """Refuse devices that do not fit ``placement`` or ``balance``."""
        if self.placement != "devices":
            if self.devices is not None:
                raise SettingError(
                    "DS205",
                    f"pipeline.devices is {self.devices}, but pipeline.placement is "
                    f"{self.placement}: set pipeline.placement to devices, or leave "
                    f"pipeline.devices out",
                )
        elif not self.devices and (self.devices is not None or not self.balance):
            raise SettingError(
                "DS206",
                "pipeline.placement is devices, but no devices are given: give pipeline.devices, "
                "such as [cuda:0, cuda:1], or pipeline.balance, so that each stage takes a GPU",
            )
        elif self.devices and self.balance and len(self.devices) != len(self.balance):
            raise SettingError(
                "DS207",
                f"pipeline.devices has {len(self.devices)} devices, but pipeline.balance has "
                f"{len(self.balance)} numbers: give the same number of both",
            )


@dataclass(frozen=True)
class SpatialConfig:
    """Tiles: how an image is split over ranks, and how a rank computes its tiles."""

    tiles_per_rank: Size = Size((1, 1))
    """Grid of tiles of an image that each rank owns. A rank holds the activations of all its tiles
    at once. With ``streaming`` a rank needs one tile only."""
    exchange_every: int | str = "all"
    """all: tiles are read with their halos, as windows, and nothing is exchanged. 1, 2, ...: tiles
    are read without halos, and ranks exchange halos before every k-th layer that reads beyond its
    tile. level: ranks exchange halos once per resolution."""
    messages: Literal["transport", "nccl"] = "transport"
    """What carries halos and the statistics of norms. transport: MPI or torch.distributed, which
    carry all other messages too. nccl: NCCL, for GPUs under torchrun; the host then waits for no
    message of a layer."""
    fuse_below: int = 0
    """With an exchange: consecutive layers share one exchange if their tiles have fewer cells than
    this along a dim. That saves messages at the deep levels of a network."""
    norm_scope: Literal["group", "step"] = "group"
    """Images over which a batch norm takes its statistics. group: the images that one sample group
    processes together. step: the images of all groups."""
    frozen_norm: bool = False
    """Train with batch norm's running statistics instead of those of the batch."""

    def __post_init__(self):
        to_sizes(self, "tiles_per_rank")
        check_at_least(self, 0, "fuse_below")
        every = str(self.exchange_every)
        if every not in ("level", "all") and not (every.isdecimal() and int(every) > 0):
            raise SettingError(
                "DS115",
                "spatial.exchange_every must be a whole number of layers from 1 on, level or all, "
                f"got {every!r}",
            )
        object.__setattr__(self, "exchange_every", every)
        check_effect(
            self,
            "fuse_below",
            self.exchanges,
            "spatial.exchange_every is all, so that nothing is exchanged: set it to 1, 2, ... "
            "or level, or leave spatial.fuse_below out",
        )

    @property
    def exchanges(self) -> bool:
        """True if ranks exchange halos between layers, False if they read tiles with halos."""
        return self.exchange_every != "all"


@dataclass(frozen=True)
class LossConfig:
    """The loss, a weighted sum of terms.

    A setting applies to the terms that its documentation names. It is refused if the loss has none
    of these terms.
    """

    name: str = "cross_entropy"
    """cross_entropy, binary_cross_entropy, dice, focal, or a weighted sum such as
    ``cross_entropy + 0.5*dice``. If the label is a number for each image: mse or l1."""
    class_weights: list[float] | None = None
    """One weight per class, for the terms cross_entropy and focal; binary_cross_entropy and dice
    use no weights."""
    label_smoothing: float = 0.0
    """Share of a pixel's target that is spread over all classes, for the term cross_entropy."""
    ignore_index: int = 255
    """Label of pixels that count neither in the loss nor in metrics. A value in the store takes
    precedence."""
    dice_over: Literal["image", "batch"] = "image"
    """For the term dice. image: the mean of the Dice losses of all images. batch: one Dice loss of
    the sums over all images of the step."""
    smooth: float = 1.0
    """For the term dice: number of pixels added to its numerator and denominator."""
    gamma: float = 2.0
    """For the term focal: its focusing exponent."""

    def __post_init__(self):
        _between(self, -_LARGEST, _LARGEST, "ignore_index")
        self._check_weights()

    def _check_weights(self):
        """Refuse class weights that are negative, not finite, or all 0."""
        weights = self.class_weights
        if weights is None:
            return
        if not all(0 <= weight < math.inf for weight in weights):
            raise SettingError(
                "DS116", f"loss.class_weights must be numbers of at least 0, got {weights}"
            )
        if not any(weights):
            raise SettingError(
                "DS117",
                f"loss.class_weights are {weights}, so no pixel would count: "
                "give a class a weight above 0, or leave loss.class_weights out",
            )


# The smallest and the largest value that a range may contain.
AUGMENTATION_LIMITS: dict[str, tuple[float, float]] = {
    "augment_scale": (0.25, 4),
    "augment_rotate": (-180, 180),
    "augment_tilt": (-180, 180),
    "augment_elastic": (0, 1000),
    "augment_blur": (0, 32),
    "augment_gamma": (0.1, 10),
    "augment_contrast": (0, 10),
    "augment_brightness": (-10, 10),
    "augment_noise": (0, 10),
}


@dataclass(frozen=True)
class DataBase:
    """The training data: store, crops and augmentation.

    PatchGD takes this section. Exact training takes :class:`DataConfig`, which adds ``prefetch``.
    """

    store: str | None = None
    """Path of the HDF5 store that ``distseg prepare`` wrote."""
    images: int = 1
    """Number of images (or crops) in a micro-batch of one sample group."""
    crop: Size | None = None
    """Size of random crops; whole images by default."""
    shrink: int = 1
    """With labels of whole images: each pixel is the mean of this many pixels of the store along
    each dim, in training, evaluation and prediction."""
    focus_class: str | None = None
    """A rare class near which some crops are placed."""
    focus_weights: Literal["equal"] | dict[str, float] | None = None
    """Instead of ``focus_class``: weights of several classes, such as ``{lake: 2, road: 1}``. The
    class near which a crop is placed is drawn in proportion to them. equal: all classes that have a
    pixel in the training images, with the same weight."""
    focus_share: float = 0.5
    """Share of the crops that have a pixel of the class of ``focus_class`` or ``focus_weights`` in
    their central half, before augmentation; with one of these settings only."""
    augment: list[Literal["flip", "turn", "colour"]] = field(default_factory=list)
    """flip: mirror each dim with probability 1/2. turn: rotate by a random multiple of 90 degrees.
    colour: apply a random gain and offset to each band."""
    augment_scale: list[float] | None = None
    """Zoom: the range of the factor by which objects appear larger, such as ``[0.8, 1.25]``, within
    0.25 to 4. The logarithm of the factor is drawn uniformly."""
    augment_rotate: list[float] | None = None
    """Rotation: the range of the angle in degrees, such as ``[-15, 15]``, within -180 to 180.
    Volumes are rotated in the plane of their last two dims."""
    augment_tilt: list[float] | None = None
    """For volumes: the range of the angles in degrees by which they are also rotated in the planes
    of the first dim and one of the others, such as ``[-10, 10]``, within -180 to 180. For volumes
    with the same spacing along all dims."""
    augment_elastic: list[float] | None = None
    """Elastic deformation: the range of the largest displacement along each dim in pixels, such as
    ``[0, 8]``, within 0 to 1000. It may be at most 0.4 times ``augment_smoothness``, so that no
    image folds."""
    augment_smoothness: float = 32.0
    """With ``augment_elastic``: distance in pixels, at least 1, between the random displacements
    that a cubic B-spline joins."""
    augment_blur: list[float] | None = None
    """Gaussian blur: the range of the standard deviation of the filter in pixels, such as
    ``[0, 1.5]``, within 0 to 32."""
    augment_gamma: list[float] | None = None
    """Gamma: the range of the exponent, such as ``[0.7, 1.5]``, within 0.1 to 10. It is applied to
    the values within 3 standard deviations of the band's mean. The logarithm of the exponent is
    drawn uniformly."""
    augment_contrast: list[float] | None = None
    """Contrast: the range of the factor of the distance from the band's mean, such as
    ``[0.75, 1.25]``, within 0 to 10; one factor for all bands."""
    augment_brightness: list[float] | None = None
    """Brightness: the range of the offset in standard deviations of the band, such as
    ``[-0.3, 0.3]``, within -10 to 10; one offset for all bands."""
    augment_noise: list[float] | None = None
    """Gaussian noise: the range of its standard deviation, in standard deviations of the band, such
    as ``[0, 0.1]``, within 0 to 10."""
    augment_share: float = 1.0
    """With an ``augment_`` range: share of the samples that each of these ranges changes; each
    range is drawn by itself."""
    epoch_samples: int | None = None
    """Number of crops per epoch, with ``crop`` only; by default the number that covers the
    training pixels once. Without ``crop``, an epoch has each image once."""

    context: ClassVar[int | str] = 0  # a setting of exact training

    def __post_init__(self):
        to_sizes(self, "crop")
        _between(self, 0, 1, "focus_share")
        check_at_least(self, 1, "images", "epoch_samples", "shrink")
        _path(self, "store")
        _each_once(self, "augment")
        self._check_focus()
        self._check_augmentation()
        check_effect(
            self,
            "epoch_samples",
            self.crop is not None,
            "whole images are trained on, each once an epoch: set data.crop, or leave "
            "data.epoch_samples out",
        )

    def _check_focus(self):
        """Refuse contradictions between ``focus_class``, ``focus_weights`` and ``focus_share``.

        Also refuse class weights that are not above 0.
        """
        weights = self.focus_weights
        if isinstance(weights, dict) and not (
            weights and all(0 < weight < math.inf for weight in weights.values())
        ):
            raise SettingError(
                "DS128",
                f"data.focus_weights is {weights}, but it must have at least one class, and "
                "weights above 0: give such weights, and leave out classes near which no crop is "
                "to be placed",
            )
        if weights is not None and self.focus_class is not None:
            raise SettingError(
                "DS212",
                f"data.focus_class is {self.focus_class!r}, but data.focus_weights is {weights}: "
                "leave one of the two settings out",
            )
        check_effect(
            self,
            "focus_share",
            self.focus_class is not None or weights is not None,
            "data.focus_class and data.focus_weights are not set: name a class, or leave "
            "data.focus_share out",
        )

    def _check_augmentation(self):
        """Refuse augmentation ranges outside their limits, and settings without effect.

        ``augment_share``, for example, has no effect if no range is set.
        """
        for name, (least, most) in AUGMENTATION_LIMITS.items():
            _range(self, least, most, name)
        _between(self, 0, 1, "augment_share")
        _between(self, 1, _LARGEST, "augment_smoothness")
        elastic = self.augment_elastic
        if elastic is not None and elastic[1] > 0.4 * self.augment_smoothness:
            raise SettingError(
                "DS127",
                f"data.augment_elastic is {elastic}, but with data.augment_smoothness "
                f"{self.augment_smoothness:g} displacements above "
                f"{0.4 * self.augment_smoothness:g} pixels can fold the image: give a smaller "
                f"range, or set data.augment_smoothness to {math.ceil(elastic[1] / 0.4)} or more",
            )
        check_effect(
            self,
            "augment_smoothness",
            elastic is not None,
            "data.augment_elastic is not set: set it, or leave data.augment_smoothness out",
        )
        check_effect(
            self,
            "augment_share",
            any(getattr(self, name) is not None for name in AUGMENTATION_LIMITS),
            "no range of an augmentation is set: set one such as data.augment_scale, or leave "
            "data.augment_share out",
        )


@dataclass(frozen=True)
class DataConfig(DataBase):
    """The training data: store, crops with their context, augmentation and reading ahead."""

    context: int | Literal["auto"] = 0
    """With ``crop``: number of pixels around each crop, where the image has them, that the network
    sees and the loss leaves out. auto: the network's halo, with which a crop sees what prediction
    sees."""
    prefetch: int = 2
    """Number of steps whose images a thread reads ahead; with 0 each step reads its own images."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 0, "prefetch", *["context"] * (self.context != "auto"))
        check_effect(
            self,
            "context",
            self.crop is not None,
            "without data.crop the network sees whole images: set data.crop, or leave data.context "
            "out",
        )


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and the schedule of its learning rate."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    """The optimizer."""
    lr: float = 1e-3
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of sgd. adam and adamw use fixed betas, 0.9 and 0.999."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    schedule: Literal["constant", "cosine", "linear", "one_cycle"] = "cosine"
    """Schedule of the learning rate after the warm-up."""
    warmup: float = 0.05
    """Share of all steps in which the rate rises from 0 (cosine, constant, linear) or lr/25
    (one_cycle)."""
    decay_factor: float = 1.0
    """For ``schedule: linear``: the rate falls linearly and would reach 0 after this factor times
    the number of all steps. The program of the PatchGD authors uses 2, so training ends at about
    half of ``lr``."""
    clip: float | None = None
    """Largest global norm of the gradient; larger gradients are scaled down."""
    rates: dict[str, float] | None = None
    """Factors of the learning rate for parts of the network, such as
    ``{encoder: 0.1, encoder.layer1: 0}``. Names are those of modules or parameters and may contain
    ``*``. If several names match a parameter, the last one applies. A factor of 0 freezes
    the part."""
    thaw: dict[str, int] | None = None
    """Epochs after which parts of the network begin to learn, such as ``{encoder: 2}``; names as
    for ``rates``."""

    def __post_init__(self):
        for part, factor in (self.rates or {}).items():
            if not 0 <= factor < math.inf:
                raise SettingError(
                    "DS118",
                    f"optim.rates has {factor} for {part}, but a factor of the learning rate must "
                    "be at least 0",
                )
        for part, epochs in (self.thaw or {}).items():
            if epochs < 0:
                raise SettingError(
                    "DS119",
                    f"optim.thaw has {epochs} for {part}, but the number of epochs after which "
                    "a part thaws must be at least 0",
                )
        _between(self, 0, 1, "warmup", "momentum")
        check_at_least(self, 0, "lr", "weight_decay")
        check_at_least(self, 1, "decay_factor")
        check_effect(
            self,
            "decay_factor",
            self.schedule == "linear",
            f"optim.schedule is {self.schedule}, which does not use optim.decay_factor: set "
            "optim.schedule to linear, or leave optim.decay_factor out",
        )
        check_effect(
            self,
            "momentum",
            self.name == "sgd",
            f"optim.name is {self.name}, which has no momentum: set optim.name to sgd, or "
            "leave optim.momentum out",
        )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise SettingError(
                "DS120",
                f"optim.clip must be above 0, got {self.clip}: leave it out to clip nothing",
            )


@dataclass(frozen=True)
class TrainBase:
    """Base class of the training run: length, precision, checkpoints and output.

    Exact training takes :class:`TrainConfig`, which adds ``accumulate`` and fp16. PatchGD takes
    :class:`distseg.config.patchgd.TrainConfig`.
    """

    epochs: int = 10
    """Number of epochs: passes over the training images, or over data.epoch_samples crops each."""
    max_minutes: float | None = None
    """Limit of the training time in minutes. Training stops at the end of the epoch in which this
    time is over. The learning rate's schedule still spans all epochs."""
    job_minutes: float | None = None
    """Minutes that the job may run; by default the limit of the Slurm job. Before this time
    is over, training writes a checkpoint and ends with exit code 75."""
    precision: str = "auto"
    """Number type of training. Each subclass lists its values."""
    channels_last: bool | None = None
    """Store activations in the channels-last memory format; by default with bf16 and on CUDA."""
    seed: int = 0
    """Seed of the sample order, crops, augmentation and dropout."""
    check_replicas: int = 200
    """Steps between checks that all replicas hold the same weights; 0: no checks."""
    validate_every: int = 1
    """Epochs between validations; 0: no validation."""
    patience: int = 0
    """Early stopping: training ends if the score that chooses the best checkpoint (mean IoU;
    accuracy or RMSE for labels of whole images) has not improved for this number of epochs. 0:
    never."""
    output: str = "runs/default"
    """Folder of logs and checkpoints."""
    init: str | None = None
    """Weights to begin with: a file ``NAME.safetensors``, or the folder of a run. Weights that
    are missing there keep their initial values, and the log lists them. The first and last layers
    are adapted to other numbers of bands or classes."""
    init_names: dict[str, str] | None = None
    """Prefixes of names in ``init`` and the prefixes in the network that replace them, such as
    ``{"backbone.": "encoder."}``."""
    resume: bool | str = False
    """Continue from a checkpoint in ``output``, exactly with the sample that comes next. true: the
    last checkpoint, or from the beginning if there is none. Or ``best``, or a name such as
    step-00000600."""
    keep: int = 2
    """Number of latest checkpoints that are kept, in addition to the best one."""
    checkpoint_every: int = 1
    """Epochs between checkpoints. A validation with the best score so far writes one, too."""
    checkpoint_minutes: float | None = 10.0
    """Minutes between checkpoints within an epoch, which are written while training goes on.
    null: no such checkpoints."""
    loggers: list[Literal["tensorboard", "csv", "wandb", "mlflow"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Where a run is shown, in addition to ``log.jsonl``: TensorBoard event files (if tensorboard
    is installed), tables ``steps.csv`` and ``validation.csv``, Weights & Biases, MLflow
    (docs/report.md). []: nowhere."""

    accumulate: ClassVar[int] = 1  # a setting of exact training

    def __post_init__(self):
        check_at_least(self, 1, "epochs", "accumulate", "keep", "checkpoint_every")
        if not isinstance(self.resume, bool) and not re.fullmatch(
            r"best|last|step-\d{8,}", str(self.resume)
        ):
            raise SettingError(
                "DS121",
                "train.resume must be true, false, best, last or a name such as step-00000600, "
                f"got {self.resume!r}",
            )
        check_at_least(
            self,
            0,
            "check_replicas",
            "validate_every",
            "patience",
            "max_minutes",
            "job_minutes",
            "checkpoint_minutes",
        )
        _between(self, -_LARGEST, _LARGEST, "seed")
        _path(self, "output", "init")
        _each_once(self, "loggers")
        check_effect(
            self,
            "patience",
            self.validate_every > 0,
            "train.validate_every is 0, so nothing is validated: set train.validate_every to 1, or "
            "leave train.patience out",
        )
        check_effect(
            self,
            "init_names",
            self.init is not None,
            "train.init is not set: name a file, or leave train.init_names out",
        )


@dataclass(frozen=True)
class TrainConfig(TrainBase):
    """The training run: length, batch, precision, checkpoints and output."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """auto: bf16 autocast if the device computes it faster, else fp32. fp16: autocast with a loss
    scale that adapts to the gradients, for GPUs without fast bf16 (V100)."""
    accumulate: int = 1
    """Number of micro-batches of a sample group per optimizer step; with stages, the number of
    micro-batches of the pipeline."""


_FORMATS = {"h5": "hdf5", "tif": "tiff"}  # file endings that predict.formats takes as names


@dataclass(frozen=True)
class PredictBase:
    """Output files of evaluation and prediction (section ``predict`` of the config).

    PatchGD has only these settings. Exact training has further ones (:class:`PredictConfig`).
    """

    probabilities: bool = False
    """Also write the probability of each class (float16), into NAME.h5 or NAME.ome.zarr."""
    formats: list[
        Literal[
            "hdf5",
            "h5",
            "tiff",
            "tif",
            "png",
            "nifti",
            "nrrd",
            "zarr",
            "cog",
            "gpkg",
            "geojson",
            "objects",
        ]
    ] = field(default_factory=lambda: ["hdf5", "png"])
    """File formats of class maps. hdf5: NAME.h5. tiff: tiled NAME.tif with the image's
    georeference, without probabilities. png: NAME.png in the classes' colours, for images up to
    16384x16384. cog: NAME.cog.tif, a cloud-optimised GeoTIFF. nifti: NAME.nii.gz, for
    volumes. nrrd: NAME.nrrd, for volumes. zarr: NAME.ome.zarr, an OME-Zarr folder with a pyramid,
    for images and volumes. gpkg, geojson: polygons of the connected objects of each class. objects:
    NAME.objects.tif, in which each pixel has the number of its object (docs/results.md)."""
    trace: list[str] | None = None
    """Names of the classes whose objects are written as polygons or numbers; by default all."""
    heat: bool = False
    """For networks of whole images: also draw which pixels the answer comes from, NAME.heat.png
    (docs/whole_images.md)."""

    scratch: ClassVar[str | None] = None  # a setting of exact training

    def __post_init__(self):
        if not self.formats:
            raise SettingError(
                "DS122",
                "predict.formats is empty, so no file would be written: choose hdf5, tiff or png",
            )
        object.__setattr__(self, "formats", [_FORMATS.get(form, form) for form in self.formats])
        _each_once(self, "formats")


@dataclass(frozen=True)
class PredictConfig(PredictBase):
    """Evaluation and prediction: tile size and output files."""

    tile: Size = Size((1024, 1024))
    """Tile size of evaluation and prediction, which determines their memory. With
    streaming.memory, tiles are instead as large as that memory allows."""
    scratch: str | None = None
    """Folder for the feature maps before norms that need the whole image (instance, group), or
    ``memory``. By default they stay in memory if they fit into half of the free memory or of
    streaming.memory; else they go to the system's temporary folder."""

    def __post_init__(self):
        super().__post_init__()
        to_sizes(self, "tile")
        _path(self, "scratch")


@dataclass(frozen=True)
class StreamingConfig:
    """Streaming: a rank computes its part of an image tile after tile, in bounded memory.

    Streaming is on if ``memory`` or ``tiles`` is given. Feature maps that an active norm needs as a
    whole are offloaded to ``scratch``. Other activations are usually computed again in the backward
    pass.
    """

    memory: int | str | None = None
    """Memory limit per rank, such as ``4GB`` or a number of bytes (short flag: ``--memory``):
    streamed tiles are as large as this limit allows. It holds for evaluation and prediction too."""
    tiles: Size | None = None
    """Grid of streamed tiles, into which a rank cuts its part of an image; replaces ``memory``."""
    scratch: str | None = None
    """Folder for offloaded feature maps, best on a fast local disk; by default the system's
    temporary folder. ``memory`` keeps them in the host's memory."""

    def __post_init__(self):
        if self.memory is not None:
            object.__setattr__(self, "memory", int(parse_bytes(self.memory)))
        if self.tiles is not None:
            to_sizes(self, "tiles")
        _path(self, "scratch")
        if self.memory is not None and self.tiles is not None:
            raise SettingError(
                "DS208",
                f"streaming.memory is {self.memory / 1e9:g}GB, but streaming.tiles is "
                f"{self.tiles}: the memory decides the tiles, so leave one of the two out",
            )
        check_effect(
            self,
            "scratch",
            self.active,
            "feature maps are stored only with streamed tiles: give streaming.memory or "
            "streaming.tiles, or leave streaming.scratch out (for prediction: predict.scratch)",
        )

    @property
    def active(self) -> bool:
        """True if ranks stream tiles in training."""
        return self.memory is not None or self.tiles is not None

    @property
    def chosen(self) -> str:
        """Text such as ``streaming.memory is 4GB``: the setting that turns streaming on.

        Error messages use the text. Read it only if :attr:`active` is True.
        """
        if self.memory is not None:
            return f"streaming.memory is {float(self.memory) / 1e9:g}GB"
        return f"streaming.tiles is {self.tiles}"


@dataclass(frozen=True)
class RunConfig:
    """The machine: transport, device, threads and time limit."""

    transport: Literal["auto", "mpi", "torch"] = "auto"
    """What carries the messages between ranks: MPI (mpi4py), or torch.distributed (torch). auto:
    torch under torchrun and under an srun without PMI; MPI under other launchers. One process
    needs neither."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that computes. auto: CUDA if it is available, else the CPU."""
    threads: int | None = None
    """CPU threads per rank. By default OMP_NUM_THREADS or MKL_NUM_THREADS; else the node's cores
    (at most the control group's CPU quota) shared evenly among its ranks."""
    timeout: float = 1800.0
    """Seconds after which a hanging job is ended with a report of each rank's position. A job hangs
    if no rank makes progress or one rank is stopped. 0: never."""

    def __post_init__(self):
        check_at_least(self, 0, "timeout")
        _between(self, 1, 1024, "threads")


@dataclass(frozen=True)
class ApproximateBase:
    """Section ``approximate`` of a PatchGD config.

    :class:`ApproximateConfig` is the same section of a config of ``distseg train``, where it has
    more settings.
    """

    gradients: Literal["fp16"] | None = None
    """fp16: gradients are rounded to 11 bits before ranks sum them, which halves the bytes that
    are sent."""

    halo: ClassVar[int | None] = None  # a setting of exact training
    norms: ClassVar[str | None] = None  # a setting of exact training


@dataclass(frozen=True)
class ApproximateConfig(ApproximateBase):
    """Settings that make training approximate. Without them the gradient is exact."""

    halo: int | None = None
    """Halo of a tile in pixels, instead of the model's exact halo. With a smaller halo, pixels
    near the borders of tiles are wrong."""
    norms: Literal["window"] | None = None
    """window: every norm takes its statistics of one tile with its halo, as in Seal et al. 2020."""

    def __post_init__(self):
        check_at_least(self, 0, "halo")

    @property
    def chosen(self) -> str | None:
        """Text such as ``approximate.halo is 8``: the setting that treats windows as whole images.

        The setting is ``halo`` or, if that is not set, ``norms``. The value is None if neither is
        set.
        """
        if self.halo is not None:
            return f"approximate.halo is {self.halo}"
        return None if self.norms is None else f"approximate.norms is {self.norms}"


@dataclass(frozen=True)
class StepSettings:
    """Settings of an optimizer step, without those that say how ranks share its work.

    The serial program needs only these settings, the model and the images.

    Attributes:
        loss: the loss.
        optim: the optimizer.
        outputs: the value of ``model.outputs``, the loss weights of the network's outputs.
        norm_scope: the value of ``spatial.norm_scope``.
        frozen_norm: the value of ``spatial.frozen_norm``.
        seed: the value of ``train.seed``, on which dropout masks depend.
    """

    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    outputs: Mapping[str, float] | None = None
    norm_scope: str = SpatialConfig.norm_scope
    frozen_norm: bool = SpatialConfig.frozen_norm
    seed: int = TrainBase.seed


@dataclass(frozen=True)
class ExchangeSettings:
    """Settings that say how images are cut into tiles and when tiles exchange halos.

    Attributes:
        grid: number of ranks along each dim that share an image.
        per_rank: number of tiles of each rank along each dim.
        every: the value of ``spatial.exchange_every``.
        fuse_below: the value of ``spatial.fuse_below``.
        streamed: True if the rank streams tiles.
        frozen_norm: the value of ``spatial.frozen_norm``.
    """

    grid: Size
    per_rank: Size
    every: int | str
    fuse_below: int
    streamed: bool
    frozen_norm: bool

    @property
    def required(self) -> bool:
        """True if the settings ask for halo exchanges or streamed tiles."""
        return self.every != "all" or self.streamed


_Kind = TypeVar("_Kind", bound="ConfigBase")


class ConfigBase:
    """Base class of the settings of a run: exact training (:class:`Config`) and PatchGD.

    A subclass is a frozen dataclass, and its fields are the sections of the YAML file.
    """

    __dataclass_fields__: ClassVar[dict[str, Field]]  # a subclass is a dataclass

    model: ModelBase
    mesh: MeshBase
    data: DataBase
    train: TrainBase

    def __post_init__(self):
        mesh, train, data = self.mesh, self.train, self.data
        if self.step_images > _MOST_IMAGES:
            raise SettingError(
                "DS202",
                f"mesh.samples {mesh.samples} x train.accumulate {train.accumulate} "
                f"x data.images {data.images} are {self.step_images} images a step, "
                f"more than {_MOST_IMAGES}: lower one of them",
            )

    @property
    def step_images(self) -> int:
        """Number of images of an optimizer step, over all sample groups and micro-batches."""
        return self.mesh.samples * self.train.accumulate * self.data.images

    def value(self, setting: str):
        """Return the value of a setting such as ``mesh.stages``, or a section such as ``mesh``."""
        section, _, name = setting.partition(".")
        found = getattr(self, section)
        return getattr(found, name) if name else found

    def as_plain(self) -> dict[str, dict]:
        """Return the settings as plain values for JSON and YAML; sizes are text such as 97x131."""
        return {
            section: {
                name: str(value) if isinstance(value, tuple) else value
                for name, value in values.items()
            }
            for section, values in asdict(self).items()
        }

    def changes_to(self, other: _Kind) -> dict[str, Any]:
        """Return the values in ``other`` of all settings that differ between the two, by name.

        An example is ``{"optim.lr": 0.01}``. The dict is empty if all settings are equal.
        """
        settings = [
            f"{section.name}.{value.name}"
            for section in fields(self)
            for value in fields(getattr(self, section.name))
        ]
        return {
            setting: other.value(setting)
            for setting in settings
            if self.value(setting) != other.value(setting)
        }

    def with_values(self: _Kind, values: Mapping[str, Any]) -> _Kind:
        """Return a copy of the settings with other values.

        Args:
            values: the new values by the name of the setting, such as ``{"mesh.stages": 2}``.
        """
        sections: dict[str, dict[str, Any]] = {}
        for setting, value in values.items():
            section, _, name = setting.partition(".")
            sections.setdefault(section, {})[name] = value
        return replace(
            self, **{name: replace(getattr(self, name), **new) for name, new in sections.items()}
        )

    def with_dims(self: _Kind, dims: int, image: str) -> _Kind:
        """Return a copy of the settings with defaults that fit images of ``dims`` dims.

        Sizes that the user has not set, such as ``predict.tile``, get ``dims`` numbers. For
        volumes, ``model.dims`` becomes 3 if the network is one of distseg and the user has not set
        it.

        Args:
            dims: number of spatial dims of the images.
            image: the size of an image as text, for the error message.

        Raises:
            ValueError: a size that the user has set has a number of dims other than ``dims``.
        """
        side = int(_TILE_PIXELS ** (1 / dims)) // 32 * 32
        adapted: dict[str, Any] = {}
        for setting, size in {
            "mesh.tiles": (1,) * dims,
            "spatial.tiles_per_rank": (1,) * dims,
            "streaming.tiles": (2,) * dims,
            "predict.tile": (side,) * dims,
        }.items():
            section, _, name = setting.partition(".")
            values = getattr(self, section, None)
            if not hasattr(values, name):
                continue  # a setting that this kind of config does not have
            value, default = getattr(values, name), getattr(type(values)(), name)
            if value is None or len(value) == dims:
                continue
            if value != default and (value.volume > 1 or default is None or default.volume > 1):
                raise SettingError(
                    "DS401",
                    f"{setting} is {value}, of {len(value)} dims, but images have {dims} "
                    f"({image}): write it with as many numbers as the images have dims, such as "
                    f"{Size(size)}",
                )
            adapted[setting] = Size(size)
        model = self.model
        if (
            dims == 3
            and isinstance(model, ModelConfig)
            and model.dims is None
            and ":" not in model.name
        ):
            adapted["model.dims"] = dims
        return self.with_values(adapted) if adapted else self


_TILE_PIXELS = 2**20  # pixels of the default tile of a prediction


@dataclass(frozen=True)
class Config(ConfigBase):
    """All sections of the settings of exact training."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    spatial: SpatialConfig = field(default_factory=SpatialConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    approximate: ApproximateConfig = field(default_factory=ApproximateConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    run: RunConfig = field(default_factory=RunConfig)

    patchgd: ClassVar[None] = None  # a section of PatchGD

    @property
    def norm_images(self) -> int:
        """Number of images from which a batch norm computes its statistics."""
        groups = self.mesh.samples if self.spatial.norm_scope == "step" else 1
        return self.data.images * groups

    @property
    def is_cut(self) -> bool:
        """True if images are cut into tiles, over several ranks or on one rank."""
        tiles = self.mesh.tiles.volume * self.spatial.tiles_per_rank.volume
        return tiles > 1 or self.streaming.active

    @property
    def owned(self) -> Size:
        """Grid of tiles of an image that a rank owns; a single tile if the rank streams tiles."""
        if self.streaming.active:
            return Size((1,) * len(self.mesh.tiles))
        return self.spatial.tiles_per_rank

    @property
    def exchange(self) -> ExchangeSettings | None:
        """Settings of the halo exchange; None if layers compute whole windows without an exchange.

        The value is None if two conditions hold. First, the settings ask neither for halo exchanges
        nor for streamed tiles. Second, the image is one window, or windows count as separate images
        (``approximate``), or the stages are on the devices of one rank.
        """
        found = ExchangeSettings(
            self.mesh.tiles,
            self.owned,
            self.spatial.exchange_every,
            self.spatial.fuse_below,
            self.streaming.active,
            self.spatial.frozen_norm,
        )
        by_devices = self.pipeline.placement == "devices"
        windows = not self.is_cut or self.approximate.chosen is not None or by_devices
        return None if windows and not found.required else found

    @property
    def step(self) -> StepSettings:
        """Settings of an optimizer step that the serial program needs."""
        return StepSettings(
            self.loss,
            self.optim,
            self.model.outputs,
            self.spatial.norm_scope,
            self.spatial.frozen_norm,
            self.train.seed,
        )

    @property
    def prediction_settings(self) -> list:
        """Values of the settings on which the predictions of a given checkpoint depend.

        Predicted files are reused only if these values are the same
        (:func:`distseg.inference.image_source.network_identity`).
        """
        approximate = (self.approximate.halo, self.approximate.norms)
        return [*approximate, self.spatial.exchange_every, self.train.precision]
