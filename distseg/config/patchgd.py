"""Settings of PatchGD (``distseg patchgd``): its own section and those of exact training.

The sections have only the settings that PatchGD knows. Settings that only exact training has, such
as stages or streaming, are missing here, so the parser refuses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from distseg.config.refusal import SettingError
from distseg.config.settings import (
    ApproximateBase,
    ConfigBase,
    DataBase,
    LossConfig,
    MeshBase,
    ModelBase,
    OptimConfig,
    PredictBase,
    RunConfig,
    StreamingConfig,
    TrainBase,
    check_at_least,
    to_sizes,
)
from distseg.config.sizes import Size
from distseg.config.spelling import did_you_mean

_HEADS = ("cnn", "cnn-max", "transformer", "conv3", "conv4", "attention")


@dataclass(frozen=True)
class PatchgdConfig:
    """Patch gradient descent. The symbols below are those of Gupta et al. 2023.

    The section ``model`` describes the backbone theta_1, which computes the features of a patch.
    """

    patch: Size = Size((128, 128))
    """Size of a patch in pixels."""
    step: Size | None = None
    """Pixels from one patch to the next; by default the patch's size, so patches do not overlap."""
    features: int = 256
    """s: number of features that the backbone computes for each patch."""
    sampled: float = 0.125
    """k: share of an image's patches that an inner iteration computes with gradients. Their number
    is rounded up. A value above 1 is their number itself: memory then does not grow with the
    image."""
    inner: int | None = None
    """zeta: number of inner iterations per batch of images; by default each patch is drawn once."""
    accumulate: int | None = None
    """epsilon: number of inner iterations whose mean gradient makes an update; by default all."""
    head: str = "cnn"
    """theta_2. cnn, cnn-max: two convolutions with batch norm over the grid of patches, then a mean
    or a maximum. transformer: an encoder of two layers, then a mean. conv3, conv4, attention: the
    heads of Gupta et al. 2023. Or your own function as ``package.module:function``."""
    head_channels: int | None = None
    """Width of the head; by default 256 for conv3 and conv4, 192 for attention, else 64."""
    grid: Size | None = None
    """Number of patches along each dim, for heads that are made for one grid (conv3, conv4, your
    own); by default the grid of the training images."""
    statistics: Literal["update", "pass"] = "update"
    """When the running statistics of batch norms move. update: once per update, by the biased
    variance of all its inner iterations. pass: with each forward pass, by the unbiased variance, as
    in the program of Gupta et al. 2023. This includes the passes that fill Z, the features of all
    patches of an image."""
    norm_scope: Literal["group", "step"] = "group"
    """Images whose patches share the statistics of a batch norm. group: the images that
    one sample group processes together. step: the images of all groups."""
    y_filling: bool = False
    """For a U-Net. true: the loss of an inner iteration covers all pixels of the images; patches
    that are not drawn contribute their last output, without gradients. false: the loss covers the
    pixels of the drawn patches."""
    at_once: int = 16
    """Number of patches that the backbone computes at once in evaluation and prediction."""

    def __post_init__(self):
        to_sizes(self, "patch", "step", "grid")
        if ":" not in self.head and self.head not in _HEADS:
            raise SettingError(
                "DS123",
                f"patchgd.head is {self.head!r}: choose {', '.join(_HEADS)}, or your own function "
                f"as package.module:function{did_you_mean(self.head, _HEADS)}",
            )
        check_at_least(self, 1, "features", "inner", "accumulate", "head_channels", "at_once")
        check_at_least(self, 0, "sampled")
        if self.sampled > 1 and self.sampled != int(self.sampled):
            raise SettingError(
                "DS124",
                "patchgd.sampled must be a share of the patches from 0 to 1, or a whole number of "
                f"patches, got {self.sampled}",
            )
        if None not in (self.accumulate, self.inner) and self.accumulate > self.inner:
            raise SettingError(
                "DS209",
                f"patchgd.accumulate is {self.accumulate}, but a batch has {self.inner} inner "
                f"iterations (patchgd.inner): set patchgd.accumulate to {self.inner} at most",
            )
        if self.step is not None and (
            len(self.step) != len(self.patch) or any(s > p for s, p in zip(self.step, self.patch))
        ):
            raise SettingError(
                "DS210",
                f"patchgd.step is {self.step}, but patches of {self.patch} then leave pixels out: "
                "give a step of at most the size of a patch along each dim",
            )


@dataclass(frozen=True)
class TrainConfig(TrainBase):
    """The training run: length, precision, checkpoints and output."""

    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto: bf16 autocast if the device computes it faster, else fp32."""


@dataclass(frozen=True)
class PatchConfig(ConfigBase):
    """All sections of the settings of PatchGD."""

    model: ModelBase = field(default_factory=ModelBase)
    mesh: MeshBase = field(default_factory=MeshBase)
    approximate: ApproximateBase = field(default_factory=ApproximateBase)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataBase = field(default_factory=DataBase)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    patchgd: PatchgdConfig = field(default_factory=PatchgdConfig)
    predict: PredictBase = field(default_factory=PredictBase)
    run: RunConfig = field(default_factory=RunConfig)

    streaming: ClassVar[StreamingConfig] = StreamingConfig()  # a section of exact training

    @property
    def prediction_settings(self) -> list:
        """Values of the settings on which the predictions of a given checkpoint depend.

        Predicted files are reused only if these values are the same
        (:func:`distseg.inference.image_source.network_identity`).
        """
        return [self.train.precision]
