"""Every setting of distseg: one frozen dataclass a section, read from YAML with ``--section.field`` overrides.

Field names are the command line's flags and the YAML's keys. The string below a field is its documentation; sizes are
in pixels and written as ``97x131`` (height x width). A section refuses values that can not be; settings that would be
without effect beside others are refused by :mod:`distseg.training.conflicts`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Dict, List, Literal, Optional, Union

from distseg.config.sizes import Size, parse_bytes


def _extents(section, *names: str) -> None:
    """Sizes given as text or plain tuples become Size."""
    for name in names:
        value = getattr(section, name)
        object.__setattr__(section, name, None if value is None else Size(value))


_LARGEST = 2**63 - 1  # what files and other programs hold
_MOST_IMAGES = 10**6  # a step


def _name(section, field: str) -> str:
    """``model.depth``: the setting as a user writes it."""
    return f"{type(section).__name__.removesuffix('Config').lower()}.{field}"


def _at_least(section, least: int, *names: str) -> None:
    """Refuse smaller numbers, and what is no number."""
    for name in names:
        value = getattr(section, name)
        if value is None:
            continue
        if not value >= least:
            raise ValueError(f"{_name(section, name)} is at least {least}, got {value}")
        if not value <= _LARGEST:
            raise ValueError(
                f"{_name(section, name)} is {value}, which no file and no program holds: give a smaller number"
            )


def _between(section, least: float, most: float, *names: str) -> None:
    """Refuse numbers outside."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{_name(section, name)} is from {least} to {most}, got {value}")


def _path(section, *names: str) -> None:
    """Refuse what can not name a file."""
    for name in names:
        value = getattr(section, name)
        if value is not None and (not value.strip() or "\0" in value):
            raise ValueError(
                f"{_name(section, name)} is {value!r}, which is no path: name one, or leave it out"
            )


def _each_once(section, name: str) -> None:
    """Refuse an entry that is given twice."""
    values = getattr(section, name)
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise ValueError(
            f"{_name(section, name)} has {twice[0]} more than once ({', '.join(values)}): give each once"
        )


@dataclass(frozen=True)
class ModelConfig:
    name: str = "unet"
    """``unet``, a name of ``distseg models``, or your own function as ``package.module:function`` (called with ``args`` and the fields below that are set)."""
    args: Optional[Dict[str, Union[bool, int, float, str, list, None]]] = None
    """Arguments of your own function by name, such as ``{encoder_name: resnet34, encoder_weights: null}``. Bands and classes are given it besides, as ``in_channels`` and ``out_channels`` or what else it calls them."""
    pad: Optional[int] = None
    """Of your own function: images are given zeros behind, up to a multiple of so many pixels, and the result is cut to them."""
    depth: Optional[int] = None
    """Number of poolings; the total stride is 2^depth."""
    num_convs: Optional[int] = None
    """Convolutions a level, n_c."""
    base_channels: Optional[int] = None
    """Channels of the first level."""
    in_channels: Optional[int] = None
    """Bands of an image; the store's by default."""
    out_channels: Optional[int] = None
    """Classes (1: one foreground class, sigmoid); the store's by default."""
    norm: Optional[Literal["instance", "batch", "group", "none"]] = None
    dropout: Optional[float] = None
    """Probability that a channel is dropped, in [0, 1)."""
    up: Optional[Literal["nearest", "bilinear", "transposed"]] = None
    groups: Optional[int] = None
    """Groups of group norm; for ``norm: group`` only."""
    inputs: Optional[List[int]] = None
    """Of your own function whose network is called with several tensors: the bands of each, such as ``[3, 1]``."""
    outputs: Optional[Dict[str, float]] = None
    """Of your own function whose network returns several tensors: those that are trained on, by name or number, with the weights of their losses, such as ``{out: 1, aux: 0.4}``. The first is what evaluation and prediction take; maps smaller than the image are resized to it, bilinearly."""
    seed: int = 0
    """Of the initial weights."""

    def __post_init__(self):
        if self.args is not None and ":" not in self.name:
            raise ValueError(
                f"model.args are those of your own function, package.module:function, but model.name is {self.name}: use the fields of model, such as model.depth"
            )
        if self.pad is not None and (":" not in self.name or not 2 <= self.pad <= 256):
            raise ValueError(
                f"model.pad is {self.pad}, but it is the multiple of pixels, from 2 to 256, that a network of your own wants; distseg's take images of any size"
            )
        for field in ("inputs", "outputs"):
            if getattr(self, field) is not None and (
                ":" not in self.name or not getattr(self, field)
            ):
                raise ValueError(
                    f"model.{field} is {getattr(self, field)}, but it tells the {field} of a network of your own, package.module:function, and model.name is {self.name}: leave it out"
                )
        if self.outputs is not None:  # YAML reads 0 as a number
            object.__setattr__(
                self, "outputs", {str(name): float(weight) for name, weight in self.outputs.items()}
            )
        if wrong := {
            name: weight
            for name, weight in (self.outputs or {}).items()
            if not 0 < weight < math.inf
        }:
            name, weight = next(iter(wrong.items()))
            raise ValueError(
                f"model.outputs has {weight:g} for {name}, but the weight of a loss is a number above 0: leave that output out, or give it one"
            )
        if self.inputs is not None and min(self.inputs) < 1:
            raise ValueError(f"model.inputs is {self.inputs}, but each input has at least one band")
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


def output_weights(model: ModelConfig) -> tuple[float, ...]:
    """Return the weights of the losses of a network's outputs."""
    return tuple((model.outputs or {"": 1.0}).values())


@dataclass(frozen=True)
class MeshConfig:
    samples: int = 1
    """D: sample groups (data parallel); each trains on its own images."""
    tiles: Size = Size((1, 1))
    """Q = q_y x q_x: ranks that share one image (sample parallel)."""
    stages: int = 1
    """S: pipeline stages of the model (model parallel)."""
    reducer: Literal["auto", "horovod", "mpi"] = "auto"
    """Who sums gradients; ``auto`` is Horovod where it is installed."""
    compression: Literal["none", "fp16"] = "none"
    """fp16 halves the bytes of the gradients' all-reduce and gives up exactness."""

    def __post_init__(self):
        _extents(self, "tiles")
        _at_least(self, 1, "samples", "stages")


@dataclass(frozen=True)
class PipelineConfig:
    schedule: Literal["auto", "gpipe", "1f1b", "zb-h1"] = "auto"
    """gpipe: all forward passes, then all backward passes; 1f1b: in turn, which holds fewer activations; zb-h1: the same with gradients of weights computed while a stage would wait. auto: 1f1b, but gpipe with stages and a loss such as Dice, which 1f1b has to compute beforehand, and for streamed tiles with live norms, whose maps wait on a disk."""
    balance: Optional[List[int]] = None
    """Layers of each stage; by default the split whose slowest stage is fastest (``distseg plan`` shows it)."""
    recompute: Literal["never", "except_last", "always"] = "never"
    """Drop a micro-batch's activations after its forward pass and compute them again before its backward pass; except_last: unless that comes next."""
    placement: Literal["line", "v", "devices"] = "line"
    """line: a stage a rank. v: down the ranks and up again, so that a skip's two ends are on one rank (2 S - 1 stages on S ranks). devices: all stages on each rank, one a device, by torchgpipe."""
    devices: Optional[List[str]] = None
    """With placement devices, that of each stage, such as ``[cuda:0, cuda:1]``; by default the GPUs of this rank's share of the node, one a number of balance."""

    def __post_init__(self):
        self._check_devices()
        if self.balance is not None and min(self.balance, default=0) < 1:
            raise ValueError(
                f"pipeline.balance gives the layers of each stage, at least one each, got {self.balance}"
            )

    def _check_devices(self):
        if self.placement != "devices":
            if self.devices is not None:
                raise ValueError(
                    f"pipeline.devices is {self.devices}, but pipeline.placement is {self.placement}: set it to devices, or leave pipeline.devices out"
                )
        elif not self.devices and (self.devices is not None or not self.balance):
            raise ValueError(
                "pipeline.placement is devices, but which is not said: give pipeline.devices, such as [cuda:0, cuda:1], or pipeline.balance for their number"
            )
        elif self.devices and self.balance and len(self.devices) != len(self.balance):
            raise ValueError(
                f"pipeline.devices has {len(self.devices)} devices, but pipeline.balance has {len(self.balance)} numbers: give as many of both"
            )


@dataclass(frozen=True)
class SpatialConfig:
    tiles_per_rank: Size = Size((1, 1))
    """The grid of tiles that each rank owns of an image."""
    streaming: Literal["auto", "in_memory", "recompute", "offload"] = "auto"
    """How a rank computes several tiles. in_memory: all at once. recompute: one after another; activations are dropped and computed again in the backward pass (no active norms). offload: the network goes in segments, from norm to norm, each over all tiles; the feature maps between segments wait in ``scratch``. auto: with run.memory recompute, or offload where a norm is active; without it one tile after another where no norm is active, else in_memory."""
    scratch: Optional[str] = None
    """Folder for the feature maps that wait (streamed tiles), best on a fast local disk; by default the system's temporary folder. ``memory``: the host's memory."""
    halo: Optional[int] = None
    """Halo in pixels; by default the exact one, probed from the model. A smaller one is an approximation."""
    exchange_every: Union[int, str] = "all"
    """all: tiles are read with their halos, as windows, and nothing is exchanged; layers compute what later layers need of them. 1, 2, ...: tiles are read alone, and ranks swap borders before every k-th layer that looks beyond its tile. level: as often as the resolution changes."""
    fuse_below: int = 0
    """With an exchange: consecutive layers on tiles of fewer cells than this along a dim share one exchange, as deep levels may when messages are slow."""
    norm_scope: Literal["group", "step", "window"] = "group"
    """Batch norm sees the images that one sample group processes together (group), all groups' (step), or, as the paper ran it, every norm sees its window only (window, an approximation)."""
    frozen_norm: bool = False
    """Train with batch norm's running statistics instead of the batch's."""

    def __post_init__(self):
        _extents(self, "tiles_per_rank")
        _at_least(self, 0, "halo", "fuse_below")
        _path(self, "scratch")
        every = str(self.exchange_every)
        if every not in ("level", "all") and not (every.isdecimal() and int(every) > 0):
            raise ValueError(
                f"spatial.exchange_every is a whole number of layers from 1 on, level or all, got {every!r}"
            )
        object.__setattr__(self, "exchange_every", every)

    @property
    def exchanges(self) -> bool:
        """Whether tiles exchange borders, instead of being read with halos."""
        return self.exchange_every != "all"


@dataclass(frozen=True)
class LossConfig:
    """Each setting belongs to the terms of the sum that its documentation names; one that no term takes is refused."""

    name: str = "cross_entropy"
    """cross_entropy, binary_cross_entropy, dice, focal, or a weighted sum such as ``cross_entropy + 0.5*dice``; of a number for each image mse or l1."""
    class_weights: Optional[List[float]] = None
    """One weight a class, for the terms cross_entropy and focal; binary_cross_entropy and dice know none."""
    label_smoothing: float = 0.0
    """Share of a pixel's target that is spread over all classes, for the term cross_entropy."""
    ignore_index: int = 255
    """Label of pixels that count nowhere; a store's own holds."""
    dice_over: Literal["image", "batch"] = "image"
    """For the term dice: that of each image, averaged; or of the sums over all images of the step."""
    smooth: float = 1.0
    """For the term dice: added to its numerator and denominator, in pixels."""
    gamma: float = 2.0
    """For the term focal: its focusing exponent."""

    def __post_init__(self):
        _between(self, -_LARGEST, _LARGEST, "ignore_index")
        self._check_weights()

    def _check_weights(self):
        weights = self.class_weights
        if weights is None:
            return
        if not all(0 <= weight < math.inf for weight in weights):
            raise ValueError(f"loss.class_weights are numbers of at least 0, got {weights}")
        if not any(weights):
            raise ValueError(
                f"loss.class_weights are {weights}, so nothing would count: give a class a weight above 0, or leave them out"
            )


@dataclass(frozen=True)
class DataConfig:
    store: Optional[str] = None
    """Path of the HDF5 store that ``distseg prepare`` wrote."""
    images: int = 1
    """Images (or crops) of a micro-batch of one sample group."""
    crop: Optional[Size] = None
    """Size of random crops; whole images by default."""
    shrink: int = 1
    """With labels of whole images: a pixel is the mean of so many of the store's along each dim. Evaluation and prediction do likewise."""
    focus_class: Optional[str] = None
    """A rare class near which some crops are placed."""
    focus_share: float = 0.5
    """Share of the crops with a pixel of ``focus_class`` in their central half; with ``focus_class`` only."""
    augment: List[Literal["flip", "turn", "colour"]] = field(default_factory=list)
    """flip: mirror each dim with probability 1/2; turn: rotate by a random multiple of 90 degrees; colour: a random gain and offset of each band."""
    epoch_samples: Optional[int] = None
    """Crops an epoch; by default as many as cover the training pixels once. With ``crop`` only: an epoch of whole images has each once."""
    prefetch: int = 2
    """Steps read ahead by a thread; 0 reads in the step itself."""

    def __post_init__(self):
        _extents(self, "crop")
        _between(self, 0, 1, "focus_share")
        _at_least(self, 1, "images", "epoch_samples", "shrink")
        _at_least(self, 0, "prefetch")
        _path(self, "store")
        _each_once(self, "augment")


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = 1e-3
    """Peak learning rate."""
    momentum: float = 0.9
    """Of sgd; adam and adamw have betas of their own, 0.9 and 0.999."""
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "linear", "one_cycle"] = "cosine"
    warmup: float = 0.05
    """Share of all steps in which the rate rises from 0 (cosine, constant, linear) or lr/25 (one_cycle)."""
    decay_factor: float = 1.0
    """Of linear: the rate falls along a line that reaches 0 after this many times all steps. The PatchGD authors' program has 2, so training ends at about half of ``lr``."""
    clip: Optional[float] = None
    """Largest global norm of the gradient."""
    rates: Optional[Dict[str, float]] = None
    """Factors of the learning rate by parts of the network, such as ``{encoder: 0.1, encoder.layer1: 0}``: names of modules or parameters, also with ``*``. Of several that fit the last one holds; what has 0 is frozen."""
    thaw: Optional[Dict[str, int]] = None
    """Epochs after which parts of the network begin to learn, such as ``{encoder: 2}``; names as for ``rates``."""

    def __post_init__(self):
        if wrong := {
            part: factor
            for part, factor in (self.rates or {}).items()
            if not 0 <= factor < math.inf
        }:
            part, factor = wrong.popitem()
            raise ValueError(
                f"optim.rates has {factor} for {part}, but a factor of the learning rate is a number of at least 0"
            )
        if wrong := {part: epochs for part, epochs in (self.thaw or {}).items() if epochs < 0}:
            part, epochs = wrong.popitem()
            raise ValueError(
                f"optim.thaw has {epochs} for {part}, but a part thaws after a number of epochs of at least 0"
            )
        _between(self, 0, 1, "warmup", "momentum")
        _at_least(self, 0, "lr", "weight_decay")
        _at_least(self, 1, "decay_factor")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(
                f"optim.clip is a norm of gradients above 0, got {self.clip}: leave it out for none"
            )


@dataclass(frozen=True)
class TrainConfig:
    method: Literal["exact", "patchgd"] = "exact"
    """exact: the gradient of whole images, or of their crops. patchgd: patch gradient descent, which approximates it, for labels of whole images (section ``patchgd``)."""
    epochs: int = 10
    """Passes over the training images, or over as many crops as cover them."""
    max_minutes: Optional[float] = None
    """The schedule still spans all epochs; training stops after this many minutes at an epoch's end."""
    job_minutes: Optional[float] = None
    """Minutes that the job may run: a checkpoint is written, and training ends with exit code 75, in time before. By default Slurm's own limit."""
    accumulate: int = 1
    """Micro-batches of a group per optimizer step; with stages, those of the pipeline."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto: bf16 autocast where the device computes it faster, else fp32."""
    channels_last: Optional[bool] = None
    """Memory format of activations; by default on with bf16 and on CUDA."""
    seed: int = 0
    """Of the sample order, crops, augmentation and dropout."""
    check_replicas: int = 200
    """Steps between checks that all replicas hold the same weights; 0 never."""
    validate_every: int = 1
    """Epochs between validations; 0 never."""
    output: str = "runs/default"
    """Folder of logs and checkpoints."""
    init: Optional[str] = None
    """Weights to begin with: a file ``NAME.safetensors``, or the folder of a run. What it has not keeps its initial weights, which is said; other numbers of bands or classes are adapted to."""
    init_names: Optional[Dict[str, str]] = None
    """How names in ``init`` begin and how the network's do instead, such as ``{"backbone.": "encoder."}``."""
    resume: Union[bool, str] = False
    """Continue at the very sample from a checkpoint in ``output``: true (the last one, or from the beginning where there is none), best, or a name such as step-00000600."""
    keep: int = 2
    """Last checkpoints kept, beside the best."""
    checkpoint_every: int = 1
    """Epochs between checkpoints."""
    checkpoint_minutes: Optional[float] = 10.0
    """Minutes between checkpoints inside epochs; they are written while training goes on. null: none."""
    tensorboard: bool = True
    """Also write TensorBoard's event files, where tensorboard is installed."""

    def __post_init__(self):
        _at_least(self, 1, "epochs", "accumulate", "keep", "checkpoint_every")
        if not isinstance(self.resume, bool) and not re.fullmatch(
            r"best|last|step-\d{8,}", str(self.resume)
        ):
            raise ValueError(
                f"train.resume is true, false, best, last or a name such as step-00000600, got {self.resume!r}"
            )
        _at_least(
            self,
            0,
            "check_replicas",
            "validate_every",
            "max_minutes",
            "job_minutes",
            "checkpoint_minutes",
        )
        _between(self, -_LARGEST, _LARGEST, "seed")
        _path(self, "output", "init")


_HEADS = ("cnn", "cnn-max", "transformer", "conv3", "conv4", "attention")


@dataclass(frozen=True)
class PatchgdConfig:
    """Of ``train.method: patchgd``, in the symbols of Gupta et al., 2023; ``model`` is the backbone theta_1."""

    patch: Size = Size((128, 128))
    """Pixels of a patch."""
    step: Optional[Size] = None
    """Pixels from one patch to the next; by default the patch's size, so that none overlap."""
    features: int = 256
    """s: numbers that the backbone makes of a patch."""
    sampled: float = 0.125
    """k: share of an image's patches, rounded up, that an inner iteration computes with gradients; above 1 their number, so that memory does not grow with the image."""
    inner: Optional[int] = None
    """zeta: inner iterations on a batch of images; by default as many as draw each patch once, so that it follows the grid."""
    accumulate: Optional[int] = None
    """epsilon: inner iterations whose mean gradient makes an update; by default all of them."""
    head: str = "cnn"
    """theta_2. cnn, cnn-max: two convolutions with batch norm over the grid of patches and a mean, or a maximum. transformer: an encoder of two layers and a mean. conv3, conv4, attention: those of Gupta et al., 2023. Or your own as ``package.module:function``."""
    head_channels: Optional[int] = None
    """Width of the head; by default 64, of conv3 and conv4 256, of attention 192."""
    grid: Optional[Size] = None
    """Patches along each dim, of heads that are made for one grid (conv3, conv4, your own); by default those of the training images."""
    statistics: Literal["update", "pass"] = "update"
    """Running statistics of batch norms move once an update, by the biased variance of its inner iterations together; or, as in the authors' program, with each forward pass, also those that fill Z, by the unbiased one."""
    y_filling: bool = False
    """Of a U-Net: the loss of an inner iteration is that of all pixels of the images; patches that are not drawn give their last answer, without gradients. By default it is that of the pixels of the patches that are drawn."""
    at_once: int = 16
    """Patches that the backbone is given at once in evaluation and prediction."""

    def __post_init__(self):
        _extents(self, "patch", "step", "grid")
        if ":" not in self.head and self.head not in _HEADS:
            raise ValueError(
                f"patchgd.head is {self.head!r}: choose {', '.join(_HEADS)}, or your own function as package.module:function"
            )
        _at_least(self, 1, "features", "inner", "accumulate", "head_channels", "at_once")
        _at_least(self, 0, "sampled")
        if self.sampled > 1 and self.sampled != int(self.sampled):
            raise ValueError(
                f"patchgd.sampled is a share up to 1, or a whole number of patches, got {self.sampled}"
            )
        if None not in (self.accumulate, self.inner) and self.accumulate > self.inner:
            raise ValueError(
                f"patchgd.accumulate is {self.accumulate}, but a batch has {self.inner} inner iterations (patchgd.inner): give at most as many"
            )
        if self.step is not None and (
            len(self.step) != len(self.patch) or any(s > p for s, p in zip(self.step, self.patch))
        ):
            raise ValueError(
                f"patchgd.step is {self.step}, but patches of {self.patch} then leave pixels out: give at most as much along each dim"
            )


_FORMATS = {"h5": "hdf5", "tif": "tiff"}  # names of predict.formats after files' endings


@dataclass(frozen=True)
class PredictConfig:
    tile: Size = Size((1024, 1024))
    """Tile of evaluation and prediction; memory follows from it. With run.memory tiles are as large as fit instead."""
    probabilities: bool = False
    """Also write the probability of each class (float16), into NAME.h5."""
    formats: List[Literal["hdf5", "h5", "tiff", "tif", "png"]] = field(
        default_factory=lambda: ["hdf5", "png"]
    )
    """Of class maps: NAME.h5 (hdf5), tiled NAME.tif (tiff; keeps where on earth the image lies; without probabilities), NAME.png in the classes' colours (of images up to 16384x16384)."""
    heat: bool = False
    """Of networks for whole images: also draw where the answer comes from, NAME.heat.png (docs/whole_images.md)."""
    scratch: Optional[str] = None
    """Folder for the feature maps before norms that need the whole image (instance, group), or ``memory``; by default memory where they fit into half of what is free or of run.memory, else the system's temporary folder."""

    def __post_init__(self):
        _extents(self, "tile")
        if not self.formats:
            raise ValueError(
                "predict.formats is empty, so nothing would be written: choose hdf5, tiff or png"
            )
        object.__setattr__(self, "formats", [_FORMATS.get(form, form) for form in self.formats])
        _each_once(self, "formats")
        _path(self, "scratch")


@dataclass(frozen=True)
class RunConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Optional[int] = None
    """CPU threads a rank; by default OMP_NUM_THREADS or MKL_NUM_THREADS, else the node's cores (at most the control group's CPU quota) shared fairly among its ranks."""
    timeout: float = 1800.0
    """Seconds in which no rank of a job moves, or one is stopped, after which it is ended, with where each rank stood; 0: never."""
    memory: Optional[Union[int, str]] = None
    """What a rank may take, such as ``4GB`` or a number of bytes: in training and prediction streamed tiles are cut so small that it suffices."""

    def __post_init__(self):
        _at_least(self, 0, "timeout")
        _between(self, 1, 1024, "threads")
        if self.memory is not None:
            object.__setattr__(self, "memory", int(parse_bytes(self.memory)))


@dataclass(frozen=True)
class Config:
    """All sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    spatial: SpatialConfig = field(default_factory=SpatialConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    patchgd: PatchgdConfig = field(default_factory=PatchgdConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self):
        images = self.mesh.samples * self.train.accumulate * self.data.images
        if images > _MOST_IMAGES:
            raise ValueError(
                f"mesh.samples {self.mesh.samples} x train.accumulate {self.train.accumulate} x data.images {self.data.images} are {images} images a step, "
                f"more than {_MOST_IMAGES}: lower one of them"
            )


def with_dims(config: Config, dims: int, image: str) -> Config:
    """Return the config with all default sizes in as many dims as the images have.

    Args:
        image: the size of an image, for the error.

    Raises:
        ValueError: a size that is no default has another number of dims.
    """
    side = int(_TILE_PIXELS ** (1 / dims)) // 32 * 32
    for setting, size in {
        "mesh.tiles": (1,) * dims,
        "spatial.tiles_per_rank": (1,) * dims,
        "predict.tile": (side,) * dims,
    }.items():
        section, _, field_ = setting.partition(".")
        values = getattr(config, section)
        value, default = getattr(values, field_), getattr(type(values)(), field_)
        if len(value) == dims:
            continue
        if value != default and (value.volume > 1 or default.volume > 1):
            raise ValueError(
                f"{setting} is {value}, of {len(value)} dims, but images have {dims} ({image}): "
                f"give it {dims} numbers, such as {Size(size)}"
            )
        config = replace(config, **{section: replace(values, **{field_: Size(size)})})
    return config


_TILE_PIXELS = 2**20  # of the default tile of a prediction
