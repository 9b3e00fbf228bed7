"""Refuse settings that cannot be combined; ``RULES`` is the table of them.

Two settings may contradict each other, or one of them may have no effect if the other is set.
:func:`check_settings` refuses both cases before any work. A setting may also
have no effect only because of the mesh or the model, for example when a config for many ranks is
tried on one rank. Such a setting is not refused, but mentioned in a note (:meth:`Facts.notes`).
Settings of the loss are checked by :class:`distseg.layers.loss.Loss`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from distseg.config.patchgd import PatchgdConfig
from distseg.config.refusal import SettingError
from distseg.config.settings import (
    ApproximateBase,
    ApproximateConfig,
    Config,
    DataBase,
    LossConfig,
    MeshBase,
    MeshConfig,
    ModelBase,
    PipelineConfig,
    SpatialConfig,
    StreamingConfig,
    TrainBase,
)
from distseg.config.sizes import Size
from distseg.data.sampler import crop_size
from distseg.data.store.store import Store
from distseg.layers.graph import graph_of
from distseg.layers.loss import of_numbers
from distseg.layers.norm import NORMS, STATISTICAL, kind_of, tracks
from distseg.models.layers import VectorNorm
from distseg.models.network import calls_of, of_image
from distseg.runtime.devices import stages_of
from distseg.tiling.layout import Layout

_DEFAULTS = Config()


@dataclass(frozen=True)
class Facts:
    """Config and norms of a model, from which this module finds conflicts between settings.

    Attributes:
        config: the settings.
        norms: name and module of each norm of the plain model; empty if there is no model.
    """

    config: Config
    norms: Sequence[tuple[str, nn.Module]] = ()

    @property
    def streaming(self) -> bool:
        """True if ranks stream tiles in training."""
        return self.config.streaming.active

    @property
    def stages(self) -> int:
        """Number of stages on each rank; only for ``pipeline.placement: devices``."""
        return stages_of(self.config.pipeline)

    @property
    def on_devices(self) -> bool:
        """True if the stages lie on the devices of one rank (``pipeline.placement: devices``)."""
        return self.config.pipeline.placement == "devices"

    @property
    def windows(self) -> bool:
        """True if norms treat each window as a separate image (``approximate.norms: window``)."""
        return self.config.approximate.norms == "window"

    @property
    def active(self) -> str | None:
        """Name and kind of the first active norm, such as ``bn1 (batch norm)``, or None.

        An active norm computes its statistics from the current images.
        """
        return self._first(self._is_active)

    @property
    def untracked(self) -> str | None:
        """Name and kind of the first norm that has no running statistics, or None."""
        return self._first(lambda norm: isinstance(norm, NORMS) and not tracks(norm))

    @property
    def shared(self) -> str | None:
        """Text about the first norm whose statistics several ranks would compute together.

        An example is ``bn1 (batch norm) would take its statistics over 4 ranks``. None if there is
        no such norm.
        """
        return self._first(
            lambda norm: not self.windows and self._is_active(norm) and self._ranks(norm) > 1,
            lambda norm: f" would take its statistics over {self._ranks(norm)} ranks",
        )

    def _ranks(self, norm: nn.Module) -> int:
        mesh = self.config.mesh
        return mesh.tiles.volume * (
            mesh.samples
            if self.config.spatial.norm_scope == "step" and kind_of(norm) == "batch"
            else 1
        )

    def _is_active(self, norm: nn.Module) -> bool:
        return not (self.config.spatial.frozen_norm and tracks(norm))

    def _first(
        self, which: Callable[[nn.Module], bool], more: Callable[[nn.Module], str] = lambda norm: ""
    ) -> str | None:
        """Return the name and kind of the first norm for which ``which`` returns True, or None.

        Args:
            which: a function that returns True for the wanted norm.
            more: a function that returns a text about this norm, which is appended to the result.
        """
        for name, norm in self.norms:
            if which(norm):
                what = "norm" if isinstance(norm, NORMS) else "over the image"
                return f"{name} ({kind_of(norm)} {what}){more(norm)}"
        return None

    def notes(self) -> list[str]:
        """Return notes for the user, one sentence each, such as about settings without effect.

        Most notes say that a setting has no effect with this model or mesh.
        """
        config, mesh, spatial = self.config, self.config.mesh, self.config.spatial
        norms = [m for _, m in self.norms if isinstance(m, NORMS)]
        found = []
        if spatial.norm_scope == "step" and not any(kind_of(m) == "batch" for m in norms):
            found.append("spatial.norm_scope step is without effect: the model has no batch norm")
        if self.windows and not norms:
            found.append("approximate.norms window is without effect: the model has no norm")
        if spatial.frozen_norm and not norms:
            found.append("spatial.frozen_norm is without effect: the model has no norm")
        found += _fewer_groups(config.model, self.norms)
        if outputs := config.model.outputs:
            weights = ", ".join(f"{name} ({weight:g})" for name, weight in outputs.items())
            found.append(
                f"the loss is a weighted sum over outputs, with the weights {weights}; evaluation "
                f"and prediction use the output {next(iter(outputs))}"
            )
        if config.pipeline.placement == "v-shaped" and mesh.stages == 1:
            found.append("pipeline.placement v-shaped is without effect: mesh.stages is 1")
        return found + _nothing_summed(mesh, config.approximate)


@dataclass(frozen=True)
class Rule:
    """Two settings that cannot be combined.

    Attributes:
        code: the code of the refusal, such as ``DS221`` (:mod:`distseg.config.refusal`).
        setting: a setting or a section, such as ``approximate.norms`` or ``streaming``. The rule
            applies only if its value is not the default.
        other: the setting or section that cannot be combined with ``setting``.
        refused: a function that takes a config with its norms (:class:`Facts`), and returns True
            if the two settings are combined in a way that is refused.
        why: the reason and how to fix it, as a format string. In it, ``c`` is the config and ``f``
            the :class:`Facts`.
    """

    code: str
    setting: str
    other: str
    refused: Callable[[Facts], bool]
    why: str


RULES = (
    # Contradictions.
    Rule(
        "DS221",
        "approximate",
        "spatial.exchange_every",
        lambda f: f.config.approximate.chosen and f.config.spatial.exchanges,
        "with spatial.exchange_every {c.spatial.exchange_every} tiles exchange halos and are not "
        "computed as separate windows: leave one of the two settings out",
    ),
    Rule(
        "DS222",
        "approximate.norms",
        "spatial.norm_scope",
        lambda f: f.config.spatial.norm_scope == "step",
        "spatial.norm_scope is step, so that batch norm sees the images of all groups: leave one "
        "of the two settings out",
    ),
    Rule(
        "DS223",
        "spatial.frozen_norm",
        "model.norm",
        lambda f: f.untracked is not None,
        "{f.untracked} has no running statistics to freeze: set model.norm to batch, or leave "
        "spatial.frozen_norm out",
    ),
    Rule(
        "DS224",
        "streaming",
        "pipeline.placement",
        lambda f: f.streaming and f.on_devices,
        "torchgpipe cannot stream tiles: set pipeline.placement to linear or v-shaped, or leave "
        "pipeline.placement out",
    ),
    Rule(
        "DS225",
        "streaming",
        "approximate",
        lambda f: f.streaming and f.config.approximate.chosen,
        "{c.approximate.chosen}, and streamed tiles are always exact: leave one of the two "
        "settings out",
    ),
    Rule(
        "DS226",
        "streaming",
        "spatial.tiles_per_rank",
        lambda f: f.streaming and f.config.spatial.tiles_per_rank.volume > 1,
        "spatial.tiles_per_rank is {c.spatial.tiles_per_rank}, and streaming itself cuts a rank's "
        "part into tiles: leave one of them out",
    ),
    Rule(
        "DS227",
        "pipeline.schedule",
        "streaming",
        lambda f: f.streaming and f.config.pipeline.schedule == "zb-h1",
        "streamed tiles (streaming.memory or streaming.tiles) free all that a tile holds in its "
        "backward pass, so zb-h1 has nothing to postpone: set pipeline.schedule to 1f1b, gpipe or "
        "auto",
    ),
    Rule(
        "DS228",
        "pipeline.placement",
        "spatial.exchange_every",
        lambda f: f.on_devices and f.config.spatial.exchanges,
        "spatial.exchange_every is {c.spatial.exchange_every}, and several threads of a rank "
        "compute at once, although exchanges need a fixed order: set spatial.exchange_every to "
        "all, or put the stages on ranks (mesh.stages)",
    ),
    Rule(
        "DS229",
        "pipeline.placement",
        "mesh.stages",
        lambda f: f.on_devices and f.config.mesh.stages != 1,
        "mesh.stages is {c.mesh.stages}, although each rank then has all {f.stages} stages: set "
        "mesh.stages to 1, or pipeline.placement to linear for one stage on each rank",
    ),
    Rule(
        "DS230",
        "pipeline.placement",
        "pipeline.schedule",
        lambda f: f.on_devices and f.config.pipeline.schedule in ("1f1b", "zb-h1"),
        "pipeline.schedule is {c.pipeline.schedule}, and torchgpipe has only gpipe: set "
        "pipeline.schedule to gpipe or auto",
    ),
    Rule(
        "DS231",
        "pipeline.placement",
        "spatial.tiles_per_rank",
        lambda f: f.on_devices and f.config.spatial.tiles_per_rank.volume > 1,
        "spatial.tiles_per_rank is {c.spatial.tiles_per_rank}, and torchgpipe takes one tile in "
        "each micro-batch, all of one size: set spatial.tiles_per_rank to 1x1, or "
        "pipeline.placement to linear",
    ),
    Rule(
        "DS232",
        "pipeline.placement",
        "mesh.tiles",
        lambda f: f.on_devices and f.shared is not None,
        "each stage then runs in a thread, in which {f.shared}, which is not "
        "supported: set mesh.tiles to 1x1 and spatial.norm_scope to group, train with model.norm "
        "none or spatial.frozen_norm, or set pipeline.placement to linear",
    ),
    Rule(
        "DS236",
        "spatial.messages",
        "streaming",
        lambda f: f.streaming,
        "streamed tiles (streaming.memory or streaming.tiles) leave feature maps in host memory, "
        "from which NCCL cannot send: set spatial.messages to transport",
    ),
    Rule(
        "DS237",
        "spatial.messages",
        "pipeline.placement",
        lambda f: f.on_devices,
        "pipeline.placement is devices, and NCCL needs ranks with one GPU each: set "
        "spatial.messages to transport, or put the stages on ranks (mesh.stages)",
    ),
    # Settings without effect.
    Rule(
        "DS233",
        "pipeline.recompute",
        "streaming",
        lambda f: f.streaming,
        "streamed tiles (streaming.memory or streaming.tiles) decide by themselves what is "
        "recomputed: leave pipeline.recompute out",
    ),
)


def check_settings(config: Config, model: nn.Module | None = None) -> None:
    """Refuse settings that contradict each other, or that would have no effect.

    Args:
        config: the settings.
        model: the plain model. If it is None, rules about norms are not checked.

    Raises:
        ValueError: two settings cannot be combined, or a setting does not fit the model. The
            message names the setting, its value, the other setting, the reason and how to fix it.
    """
    check_groups(config.model)
    facts = Facts(config, () if model is None else norms_of(model))
    for rule in RULES:
        value = config.value(rule.setting)
        if _is_set(value, _DEFAULTS.value(rule.setting)) and rule.refused(facts):
            shown = getattr(value, "chosen", f"{rule.setting} is {value}")
            raise SettingError(rule.code, f"{shown}, but {rule.why.format(c=config, f=facts)}")
    vectors = [name for name, m in facts.norms if isinstance(m, VectorNorm) and m.parts == 1]
    if vectors and config.norm_images < 2 and not config.spatial.frozen_norm:
        raise SettingError(
            "DS402",
            f"data.images is {config.data.images}, but the batch norm {vectors[0]} takes "
            f"statistics of one vector per image, so it needs at least 2 images in a batch: set "
            "data.images to 2 or more, or spatial.norm_scope to step with several sample groups, "
            "or replace this norm by one of another kind",
        )
    scratch = config.streaming.scratch
    if scratch not in (None, "memory") and not os.path.isdir(scratch):
        raise SettingError(
            "DS125",
            f"streaming.scratch is {scratch}, which is not a folder: make it, or name another "
            "folder",
        )


def norms_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the name and module of each layer of a model that takes statistics of an image."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, STATISTICAL)]


def check_auto(
    mesh: MeshConfig,
    streaming: StreamingConfig,
    approximate: ApproximateConfig,
    pipeline: PipelineConfig,
    spatial: SpatialConfig,
) -> None:
    """Refuse settings that ``mesh.layout: auto`` would ignore when it chooses a layout.

    Args:
        mesh, streaming, approximate, pipeline, spatial: the sections that may have such settings.
            ``mesh.samples`` is not one of them: it says how many images a step has.

    Raises:
        SettingError: there is such a setting. The message names it.
    """
    given = ["streaming is on"] if streaming.active else []
    given += not_planned(approximate, pipeline)
    if mesh.tiles.volume > 1:
        given.append(f"mesh.tiles is {mesh.tiles}")
    if mesh.stages > 1:
        given.append(f"mesh.stages is {mesh.stages}")
    if spatial.tiles_per_rank.volume > 1:
        given.append(f"spatial.tiles_per_rank is {spatial.tiles_per_rank}")
    if given:
        raise SettingError(
            "DS234",
            f"mesh.layout is auto, but {given[0]}, a setting that auto cannot take into account: "
            "leave one of the two out",
        )


def not_planned(approximate: ApproximateConfig, pipeline: PipelineConfig) -> list[str]:
    """Return phrases for the settings that no planned layout takes into account.

    An example is ``pipeline.balance is [3, 4]``.
    """
    given = [approximate.chosen] if approximate.chosen else []
    if pipeline.placement != "linear":
        given.append(f"pipeline.placement is {pipeline.placement}")
    if pipeline.balance is not None:
        given.append(f"pipeline.balance is {pipeline.balance}")
    return given


def check_groups(model: ModelBase) -> None:
    """Refuse ``model.groups`` for a network without group norms.

    A network made by a user's own function is accepted, because its norms are not known.

    Raises:
        ValueError: ``model.groups`` is set, but the network has no norm, or norms of
            another kind.
    """
    norm = norm_of(model)
    if model.groups is not None and norm not in ("group", None):
        raise SettingError(
            "DS211",
            f"model.groups is {model.groups}, but model.norm is {norm}: set model.norm to group, "
            "or leave model.groups out",
        )


def _is_set(value, default) -> bool:
    """Return True if a setting differs from its default.

    If the default is a grid of one tile, every grid of one tile counts as the default: 1x1 and
    1x1x1.
    """
    one = isinstance(default, Size) and default.volume == 1
    return value.volume != 1 if one and value is not None else value != default


def check_norms(
    model: nn.Module,
    sizes: Mapping[str, Sequence[int]],
    spatial: SpatialConfig,
    approximate: ApproximateConfig,
    images: int,
) -> None:
    """Refuse images whose feature maps have too few cells for the statistics of a norm.

    Args:
        model: the model, plain or captured.
        sizes: the size of each sample by the name of its image.
        spatial, approximate: the settings of norms, ``spatial.frozen_norm`` and
            ``approximate.norms``.
        images: number of images over which a batch norm takes its statistics.

    Raises:
        ValueError: an image is too small. The message names the image, its size, the norm and how
            to fix it.
    """
    if approximate.norms == "window":
        return
    for name, size in smallest(sizes).items():
        for norm, count in _values_of_norms(model, size, images, spatial.frozen_norm):
            if count < 2:
                raise SettingError(
                    "DS403",
                    f"image {name!r} of {Size(size)} pixels is too small: the norm {norm} takes "
                    f"statistics of {count} value per channel, but needs at least 2: leave the "
                    "image out, or use larger images or crops, or a smaller model.depth",
                )


def smallest(sizes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return a dict with the smallest image sizes, by the names of the images.

    A size is left out if another size is at most as large in every dim. Of several images of one
    size, the result has one. The caller checks only the images in the result, because larger images
    have larger feature maps.

    Args:
        sizes: the size of each image by its name.
    """
    found: dict[str, Sequence[int]] = {}
    for name, size in sorted(sizes.items(), key=_volume):
        if not any(all(m <= n for m, n in zip(other, size)) for other in found.values()):
            found[name] = size
    return found


def _volume(item: tuple[str, Sequence[int]]) -> int:
    return math.prod(item[1])


def _values_of_norms(
    model: nn.Module, size: Sequence[int], images: int, frozen: bool
) -> Iterator[tuple[str, int]]:
    """Yield, for each active norm, its name and the number of values behind each statistic.

    An active norm computes its statistics from the current images. Each statistic, such as a mean,
    is taken over this number of values. Yield nothing if the model is not captured as a graph.

    Args:
        model: the model, plain or captured.
        size: the size of an image.
        images: number of images over which a batch norm takes its statistics.
        frozen: the value of ``spatial.frozen_norm``.
    """
    try:
        graph = graph_of(model)
        cells = Layout(graph, size, [(0, n) for n in size]).sizes
    except ValueError:
        # Without a graph PyTorch computes whole images; a wrong size is refused elsewhere.
        return
    for call, node in zip(calls_of(model), graph):
        norm = call.layer
        if not isinstance(norm, NORMS) or isinstance(norm, VectorNorm) or frozen and tracks(norm):
            continue
        times = {"batch": images, "group": 1, "instance": 1}[kind_of(norm)]
        if isinstance(norm, nn.GroupNorm):
            times = norm.num_channels // norm.num_groups
        yield call.name, math.prod(cells[node.first]) * times


def check_labels(store: Store, model: nn.Module, data: DataBase, loss: LossConfig) -> None:
    """Refuse a network or a loss that does not fit the kind of labels in the store.

    Labels are a class for each pixel, or a class or a number for each image.

    Args:
        store: the training data.
        model: the network, plain or captured.
        data: the settings of the section ``data``.
        loss: the settings of the loss.

    Raises:
        ValueError: the network, the loss or ``data.context`` does not fit. The message names the
            network's result or the setting, the kind of labels, and how to fix it.
    """
    numbers = len(store.classes) == 1
    size = crop_size(store.size(store.split("train")[0]), data.crop)
    if of_image(model, size) != store.of_images:
        made, has = (
            ("a vector of each image", "labels of pixels")
            if of_image(model)
            else ("a map of each image", "a label for each image")
        )
        raise SettingError(
            "DS404",
            f"the network makes {made}, but {store.path} has {has}: choose another network "
            "(model.name), or prepare the store with the intended labels",
        )
    if of_numbers(loss.name) != numbers:
        has = (
            f"a number for each image ({store.classes[0]})"
            if numbers
            else f"{len(store.classes)} classes"
        )
        raise SettingError(
            "DS405",
            f"loss.name is {loss.name}, but {store.path} has {has}: set loss.name to "
            f"{'mse or l1' if numbers else 'cross_entropy'}",
        )
    if data.context != 0 and store.of_images:
        raise SettingError(
            "DS409",
            f"data.context is {data.context}, whose pixels the loss leaves out, but {store.path} "
            "has one label for all pixels of an image: leave data.context out",
        )


def check_patience(store: Store, train: TrainBase) -> None:
    """Refuse early stopping on a store without images for validation.

    Raises:
        ValueError: ``train.patience`` is set, but the store has no split ``val``.
    """
    if train.patience and not store.splits.get("val"):
        raise SettingError(
            "DS407",
            f"train.patience is {train.patience}, but {store.path} has no images in the split "
            "'val' whose score could improve: prepare the store with such a split, or leave "
            "train.patience out",
        )


def patch_notes(
    patchgd: PatchgdConfig,
    settings: ModelBase,
    mesh: MeshBase,
    approximate: ApproximateBase,
    model: nn.Module,
) -> list[str]:
    """Return notes on settings of a PatchGD run, one sentence each.

    A note says that a setting has no effect with this network or mesh. One note says that a group
    norm has fewer groups than ``model.groups``.

    Args:
        patchgd, mesh, approximate: the settings of these sections.
        settings: the settings of the section ``model``.
        model: the network.
    """
    found = [
        f"{setting} is without effect: the model has no batch norm"
        for setting, is_set in (
            ("patchgd.norm_scope step", patchgd.norm_scope == "step"),
            ("patchgd.statistics pass", patchgd.statistics == "pass"),
        )
        if is_set and not has_batch_norm(model)
    ]
    found += _fewer_groups(settings, norms_of(model))
    return found + _nothing_summed(mesh, approximate)


def has_batch_norm(model: nn.Module) -> bool:
    """Return True if a network has a batch norm."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def _nothing_summed(mesh: MeshBase, approximate: ApproximateBase) -> list[str]:
    """Return a list with a note if ``approximate.gradients`` is set, but ranks sum no gradients.

    Otherwise return an empty list.
    """
    if approximate.gradients is None or mesh.samples * mesh.tiles.volume > 1:
        return []
    return [
        f"approximate.gradients {approximate.gradients} is without effect: mesh.samples and "
        "mesh.tiles are 1, so ranks sum no gradients"
    ]


def _fewer_groups(settings: ModelBase, norms: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Return a list with a note on the first group norm with fewer groups than ``model.groups``.

    Return an empty list if no group norm has fewer groups.

    Args:
        settings: the settings of the section ``model``.
        norms: name and module of each norm of the network.
    """
    groups = settings.groups
    if not groups or norm_of(settings) != "group":
        return []
    every = (
        (name, layer.num_groups)
        for name, layer in norms
        if isinstance(layer, nn.GroupNorm) and layer.num_channels % groups
    )
    fewer = next((found for found in every if found[1] != groups), None)
    if fewer is None:
        return []
    return [
        f"model.groups {groups} does not divide the channels of {fewer[0]}, so the number of "
        f"groups of this norm is {fewer[1]}"
    ]


def norm_of(model: ModelBase) -> str | None:
    """Return the kind of norm that a network has with these settings, such as batch or group.

    Return None for a user's own function, whose norms do not follow from ``model.norm``.
    """
    from distseg.models.zoo import ZOO

    name = model.name
    if ":" in name:
        return None
    entry = ZOO.get(name)
    return model.norm or (entry.arguments.get("norm") if entry else None) or "instance"


def with_store(loss: LossConfig, store: Store) -> LossConfig:
    """Return the settings of the loss with the store's ignore value as ``ignore_index``.

    Raises:
        ValueError: the settings have an ``ignore_index`` other than the store's ignore value.
    """
    own, ignore = loss.ignore_index, store.ignore
    if own not in (ignore, LossConfig.ignore_index):
        raise SettingError(
            "DS406",
            f"loss.ignore_index is {own}, but the labels of {store.path} mark ignored pixels "
            f"with {ignore}: leave loss.ignore_index out, or prepare the store with "
            f"--ignore {own}",
        )
    return replace(loss, ignore_index=ignore)
