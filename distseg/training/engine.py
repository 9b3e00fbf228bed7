"""Build what a rank needs for optimizer steps from a config, a mesh and a plain model.

The plain model is the whole network before distseg replaces its layers by distributed ones.
:class:`Engine` checks the settings and the model, keeps this rank's layers, and computes steps. The
other functions of this file derive the receptive field, the halo exchange and the streaming
executor from a config.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from distseg.comm.alone import Alone
from distseg.comm.collective import add
from distseg.comm.consistency import assert_consistent
from distseg.comm.gradient_sums import GradientSums
from distseg.comm.launch import (
    import_for_backward,
    keep_freed_memory,
    memory_in_use,
    raise_jointly,
    ranks_on_node,
)
from distseg.comm.mesh import Mesh
from distseg.comm.nccl import with_stream_groups
from distseg.comm.progress import heartbeat
from distseg.comm.staging import upload
from distseg.config.settings import (
    ApproximateConfig,
    Config,
    ExchangeSettings,
    SpatialConfig,
    StreamingConfig,
    output_weights,
)
from distseg.data.sampler import Rows
from distseg.inference.predictor import Predictor
from distseg.layers.context import Context
from distseg.layers.conv import weights_apart
from distseg.layers.criterion import Criterion
from distseg.layers.graph import graph_of, reach_for
from distseg.layers.loss import Loss
from distseg.layers.norm import active_norms
from distseg.models.bands import channels_of
from distseg.models.capture.capture import hook_on_gradients
from distseg.models.capture.checks import check_apart, check_exact
from distseg.models.dense_weights import own_memory
from distseg.models.layers import Fill, skip_store
from distseg.models.network import (
    channels_of_maps,
    fingerprint_of,
    flat_layers,
    refusals,
    unbounded,
    user_names,
)
from distseg.planning.cost import DTYPES
from distseg.planning.tile_size import Activations, BudgetTiling, GridTiling, smallest_budget
from distseg.runtime.devices import DevicePipeline, check_there, devices_of
from distseg.runtime.exchange import Exchange, HeldReach, TrueReach
from distseg.runtime.loss_scale import LossScale
from distseg.runtime.optimizer import freeze, state_copies
from distseg.runtime.own_part import AUTOCAST, autocast, own_part, place_stages, used_reach
from distseg.runtime.parameter_update import ParameterUpdate
from distseg.runtime.partition import Partition
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.schedule import splits
from distseg.runtime.stage import Stage
from distseg.runtime.stored_halos import StoredHalos
from distseg.runtime.streaming import StreamingExecutor
from distseg.runtime.swap_layers import TiledModel
from distseg.tiling.tile import ReceptiveField
from distseg.tiling.tile_batch import LazyTileBatch, TileBatch, block_of
from distseg.training.conflicts import check_settings
from distseg.training.stages import StageCut, schedule_of
from distseg.training.step import DeviceRunner, GradientStep, LossHead, StageRunner, StreamingRunner
from distseg.training.surroundings import context_of


class Engine(ParameterUpdate):
    """A model that is ready to train on this rank's tiles.

    All ranks must create this object together.

    Args:
        config: the settings of the run.
        mesh: the mesh, which knows this rank's coordinates.
        model: the whole plain model, perhaps on the meta device. It is changed in place: only the
            layers of this rank's stages stay, on ``device``.
        image: the size of a step's images in pixels, by which stages are balanced.
        device: the device of this rank. With ``pipeline.placement: devices`` only its type is used,
            and its index only if ``pipeline.devices`` does not name the devices.
        precision: fp32, bf16 or fp16 (autocast), or fp64.
        channels_last: True for the channels_last memory format.
        loss: the loss of the steps; by default the loss that the config names.
        decoded: bytes of memory of ``device`` that decoded images take, in addition to the memory
            of a step.

    Raises:
        ValueError: the model cannot be trained, or settings contradict each other. It is raised on
            all ranks before any work.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: nn.Module,
        image,
        device=torch.device("cpu"),
        precision: str = "fp32",
        channels_last: bool = False,
        loss: Criterion | None = None,
        decoded: int = 0,
    ):
        self.config, self._decoded = config, decoded
        self.precision, self.channels_last = precision, channels_last
        mesh.waits.timeout = config.run.timeout
        with raise_jointly(mesh.world):
            check_there(config.pipeline)
            check_settings(config, model)
            self.devices = devices_of(config.pipeline, device)
            self.device = self.devices[0]
            # With pipeline.placement devices this is not the device that the launcher chose.
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
        if config.spatial.messages == "nccl":
            mesh = with_stream_groups(mesh, self.device)
        self.mesh = mesh
        with raise_jointly(mesh.world):
            self.autocast = autocast(precision, device)
            freeze(model, config.optim)
            check_trainable(model)
            check_exact(model, image)
            if config.spatial.norm_scope == "step" and config.mesh.samples > 1:
                check_apart(model, image)
            fingerprint, weights = fingerprint_of(model), _weights_of(model)
            own_memory(model)
            if config.is_cut:
                check_parts(model, config.approximate)
            self.exact = reach_for(model, config.approximate.halo is not None or config.is_cut)
            self.reach = used_reach(self.exact, config.approximate.halo)
            self.crop_context = context_of(model, config.data)
            self.exchange = make_exchange(
                config.exchange, model, self.reach, mesh.tiles, self.device, channels_last
            )
            self.loss = loss or Loss(
                config.loss, channels_of(model)[1], output_weights(config.model)
            )
            activations = (
                activations_of(model, self.exchange, precision, channels_last)
                if config.streaming.active
                else None
            )
            schedule = schedule_of(config.pipeline, config.mesh.stages)
            self.context = _context(
                mesh, config.approximate, config.spatial, config.train.seed, splits(schedule)
            )
        assert_consistent(
            mesh.world,
            weights,
            "Make the same network on all ranks, with the same parameters frozen",
        )
        assert_consistent(
            mesh.world,
            {"what the network calls": fingerprint},
            "Change the network's forward pass, so that its calls do not depend on the order of a "
            "set, on the process or on the rank",
        )
        import_for_backward()
        cut = StageCut(config, model, image, self.reading, device.type)
        self.partition = cut.joint_partition(mesh.world)
        with raise_jointly(mesh.world):
            self.model = own_part(
                model,
                self.partition,
                mesh.stage,
                self.reach,
                self.context,
                config.model.seed,
                config.spatial.frozen_norm,
                self.exchange,
                not config.is_cut,
            )
            place_stages(self.model, self.partition, self.devices, precision, channels_last)
        if precision == "fp16":
            self.loss_scale = LossScale()
        halved = config.approximate.gradients == "fp16"
        super().__init__(mesh, config.optim, config.mesh.reducer, halved, model, self.device)
        self.sums = GradientSums(self.gradients, self.reducer, mesh)
        budget = (
            self._budget(config.streaming.memory)
            if activations and config.streaming.memory is not None
            else None
        )
        with raise_jointly(mesh.world):
            self._executor = self._streaming(activations, budget) if activations else None
            self.use_loss(self.loss, config.data.images)

    def use_loss(self, loss: Criterion, images: int) -> None:
        """Set the loss and the size of micro-batches for the next steps.

        Args:
            loss: the loss.
            images: number of images that each sample group has in a micro-batch.
        """
        self.loss = loss
        config, mesh = self.config, self.mesh
        partition = self.partition or Partition.whole()
        rows = Rows(mesh.shape.samples, mesh.sample, config.train.accumulate, images)
        head = (
            LossHead(loss, rows, mesh.replicas) if mesh.stage == partition.placement[-1] else None
        )
        stages = [
            Stage(
                s,
                self.model,
                self.partition and partition.ranges[s],
                partition.incoming(s),
                partition.outgoing(s),
                head if s + 1 == partition.stages else None,
                self.autocast,
            )
            for s in partition.stages_of(mesh.stage)
        ]
        self.pipeline = Pipeline(
            partition, stages, mesh.pipeline, self.device, config.pipeline.recompute
        )
        self.pipeline.last_pass = self.sums.last_pass
        if config.pipeline.placement == "devices":
            runner = DeviceRunner(
                DevicePipeline(partition, stages, self.devices, config.pipeline.recompute)
            )
        elif self._executor:
            self._executor.last_pass = self.sums.last_pass
            runner = StreamingRunner(
                self._executor,
                head,
                loss,
                streaming_order(config.pipeline.schedule, loss.linear, bool(self.exchange.stored)),
            )
        else:
            runner = StageRunner(
                self.pipeline,
                schedule_of(config.pipeline, config.mesh.stages, loss.linear),
                together=self.model.active_in_training or config.spatial.exchanges,
            )
        self.gradient_step = GradientStep(runner, head, loss, self.context)

    def _budget(self, memory: int) -> float:
        """Return the number of bytes that the activations of a streamed tile may take.

        All ranks must call it together. All ranks get the same number, because each rank computes
        the tile sizes of all stages.

        Args:
            memory: the memory limit of a rank in bytes (setting ``streaming.memory``).
        """
        keep_freed_memory(large=False)
        return smallest_budget(
            memory,
            self.base_memory(),
            "weights, gradients and the optimizer's state",
            self.mesh.world,
        )

    def _streaming(self, activations: Activations, budget: float | None) -> StreamingExecutor:
        """Return the object that computes this rank's layers on streamed tiles.

        Args:
            activations: the object that estimates the memory of activations.
            budget: bytes for the activations of a streamed tile, as for
                :func:`make_streaming_executor`.
        """
        return make_streaming_executor(
            self.config.streaming,
            self.exchange,
            activations,
            budget,
            self.partition,
            self.mesh.pipeline,
            self.model,
            self.autocast,
            self.devices,
        )

    @property
    def streaming(self) -> StreamingRunner | None:
        """The runner that computes steps on streamed tiles; None if tiles are not streamed."""
        return (
            self.gradient_step.runner
            if isinstance(self.gradient_step.runner, StreamingRunner)
            else None
        )

    def base_memory(self) -> int:
        """Return the number of bytes that this rank needs in addition to the activations.

        On a GPU these are bytes of GPU memory, else bytes of the process. Gradients, the
        optimizer's state and decoded images are included even if they are not allocated yet.
        """
        weights = sum(p.numel() * p.element_size() for p in self.parameters)
        # 16-bit copies, and their gradients
        cast = weights if self.precision in AUTOCAST else 0
        # Memory of a GPU is in use once it is allocated, memory of a CPU once it is written.
        gradients = 0 if self.device.type == "cuda" and self.gradients.buckets else weights
        return (
            memory_in_use(self.device)
            + gradients
            + weights * state_copies(self.config.optim)
            + cast
            + self._decoded
        )

    def predictor(self) -> Predictor:
        """Return a predictor of whole images that uses the network which this engine trains.

        All ranks must call it together.
        """
        config, world = self.config, self.mesh.world
        memory = config.streaming.memory
        budget = (
            None
            if memory is None
            else smallest_budget(
                memory, self.base_memory(), "weights, gradients and the optimizer's state", world
            )
        )
        return Predictor(
            self.model,
            self.mesh.replicas,
            self.devices,
            self.autocast,
            config.predict.tile,
            config.predict.scratch,
            self.channels_last,
            self.pipeline if self.partition else None,
            exact=config.approximate.halo is None,
            neighbours=ranks_on_node(world),
            budget=budget,
        )

    @property
    def reading(self) -> ReceptiveField:
        """Receptive field that says how much this rank reads from an image for a tile.

        Its halo is the number of pixels that are read around the tile. The halo is 0 if ranks
        exchange halos between layers instead. Tile borders lie on multiples of its stride.
        """
        return read_around(self.reach, self.exchange, self.config.streaming.active)

    @property
    def approximations(self) -> list[str]:
        """Sentences for the user, one for each setting that makes the gradient inexact.

        The exact gradient is that of the serial program.
        """
        approximate, mesh = self.config.approximate, self.config.mesh
        found = []
        tiled = mesh.tiles.volume * self.config.spatial.tiles_per_rank.volume > 1
        if tiled and any(a < b for a, b in zip(self.reach.halo, self.exact.halo)):
            found.append(
                f"approximate.halo {self.reach.halo[0]} is smaller than this model's exact halo "
                f"{max(self.exact.halo)}: pixels near tile borders are approximate"
            )
        if tiled and approximate.norms == "window":
            found.append(
                "approximate.norms is window: each norm sees the pixels of one window, halo "
                "included, not those of the image"
            )
        if approximate.gradients == "fp16":
            found.append(
                "approximate.gradients is fp16: gradients are rounded to 11 bits before they are "
                "summed"
            )
        return found

    def to_device(self, piece: TileBatch) -> TileBatch:
        """Return a copy of a tile batch with pixels on the rank's first device, labels on its last.

        A rank has several devices only with ``pipeline.placement: devices``. Pixels become float64
        with precision fp64, else float32, and get the model's memory format.
        """
        dtype = torch.float64 if self.precision == "fp64" else torch.float32
        pixels, labels = piece.pixels, piece.labels
        if pixels is not None:
            pixels = upload(pixels, self.device, dtype, self.channels_last)
        if labels is not None:
            labels = upload(labels, self.devices[-1])
        return TileBatch(pixels, labels, piece.place)

    def to_blocks(self, piece: TileBatch | LazyTileBatch) -> LazyTileBatch:
        """Return a lazy tile batch whose pixels and labels are moved to this rank's devices.

        Args:
            piece: a tile batch, in memory or lazy.
        """
        block = (
            piece
            if isinstance(piece, LazyTileBatch)
            else block_of(piece, self.config.loss.ignore_index)
        )

        def pixels(box):
            return self.to_device(TileBatch(block.pixels(box), None, block.place)).pixels

        def labels(box):
            return self.to_device(TileBatch(None, block.labels(box), block.place)).labels

        return LazyTileBatch(block.place, pixels, labels)

    def backward(self, micro_batches: list[list[TileBatch | LazyTileBatch]]) -> float:
        """Compute the gradient of the step's loss, and return the loss.

        All ranks must call it together. The gradient, summed over all replicas, is then in the
        parameters' ``grad``. Ranks of every stage get the loss.

        Args:
            micro_batches: for each micro-batch, this rank's tile batches.
        """
        scale = self.loss_scale.value if self.loss_scale else 1.0
        self.gradients.zero()
        self.sums.begin()
        loss = self.accumulate(micro_batches, scale)
        self.gradients.finish()
        self.sum_gradients()
        if scale != 1:
            self.gradients.multiply(1 / scale)
        return self.over_stages(loss)

    def accumulate(
        self, micro_batches: list[list[TileBatch | LazyTileBatch]], scale: float = 1.0
    ) -> float:
        """Add this rank's part of the gradient to the parameters' ``grad``, and return the loss.

        If ``self.sums.begin`` was called before, the sums of the gradients over the replicas start
        during the passes. The returned loss is 0 on ranks without the last stage.

        Args:
            micro_batches: for each micro-batch, this rank's tile batches.
            scale: factor of the gradient. Backward passes begin with it, so that small gradients
                are not rounded to 0 in fp16. The returned loss is not scaled.
        """
        if self.gradient_step.head:
            self.gradient_step.head.scale = scale
        prepared = self.to_blocks if self.streaming else self.to_device
        waits = self.mesh.waits
        with waits.moving(self.sums.advance), waits.putting_off():
            return self.gradient_step([[prepared(p) for p in pieces] for pieces in micro_batches])

    def sum_gradients(self) -> None:
        """Wait until the sums of the gradients over all replicas are complete.

        All ranks must call it together, after ``self.sums.begin``.
        """
        heartbeat("sum of the gradients")
        self.sums.finish()

    def watch_step(self, watch: Callable[[float], None]) -> None:
        """Let ``watch`` be called after each streamed tile with the finished fraction of the step.

        The fraction is from 0 to 1. If tiles are not streamed, ``watch`` is never called.
        """
        if self.streaming:
            self.streaming.executor.watch = watch

    def step(
        self, micro_batches: list[list[TileBatch | LazyTileBatch]], rate: float
    ) -> tuple[float, float]:
        """Run an optimizer step; return the loss and the gradient's norm before clipping.

        All ranks must call it together.

        Args:
            micro_batches: for each micro-batch, this rank's tile batches.
            rate: the learning rate.
        """
        loss = self.backward(micro_batches)
        return loss, self.update(rate)

    def pixels(self, micro_batches: list[list[TileBatch | LazyTileBatch]]) -> int:
        """Return the approximate number of pixels in a step of the whole job.

        It is the number of this rank's owned pixels times the number of replicas, and exact if all
        tiles have the same size.
        """
        return self.mesh.replicas.size * sum(
            len(p.place.images) * p.place.tile.pixels for pieces in micro_batches for p in pieces
        )

    def update(self, rate: float) -> float:
        """Clip gradients, step the optimizer, and update the running statistics of norms.

        Return the norm of the gradient before clipping. With precision fp16, the optimizer takes no
        step if this norm is not finite (see :class:`LossScale`). All ranks must call the method
        together.

        Args:
            rate: the learning rate.
        """
        norm = self.over_stages(self.gradients.norm().item() ** 2) ** 0.5
        if self.loss_scale is None or self.loss_scale.follow(norm):
            self.descend(rate, norm, self.context.epoch)
        self.model.commit_statistics()
        return norm

    def over_stages(self, part: float) -> float:
        """Return the sum of a number over the pipeline's ranks, which must call it together.

        Args:
            part: this rank's summand.
        """
        return (
            part
            if self.mesh.pipeline.size == 1
            else add(torch.tensor(part, dtype=torch.float64), self.mesh.pipeline).item()
        )


def check_trainable(model: nn.Module) -> None:
    """Refuse a model without trainable parameters, or with a hook that changes gradients.

    A rank or a tile has only a part of each gradient, so a hook would not get the whole gradient.

    Raises:
        ValueError: all parameters are frozen, there are none, or a parameter has a hook.
    """
    if (hooked := hook_on_gradients(model)) is not None:
        raise ValueError(
            f"{hooked} has a hook that changes gradients, but each rank and tile has only a part "
            f"of a gradient: remove the hook"
        )
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        what = (
            f"all {len(parameters)} parameters of this model are frozen (requires_grad is off, or "
            "their rate in optim.rates is 0)"
            if parameters
            else "this model has no parameters"
        )
        raise ValueError(
            f"{what}, so there is nothing to train: set requires_grad on some parameters, or a "
            "rate above 0"
        )


def check_parts(model: nn.Module, approximate: ApproximateConfig) -> None:
    """Refuse to cut images into tiles for a model that is not captured as a graph of known layers.

    The halo of such a model can only be measured: change one pixel of an image, and see which
    outputs change. This could miss pixels, and results would then be silently wrong.

    Args:
        model: the plain model.
        approximate: the ``approximate`` settings.

    Raises:
        ValueError: the model is not captured as a graph, and ``approximate.halo`` is not set (the
            message names the call that prevents the capture). Or one of the model's layers does not
            allow the settings ``approximate``.
    """
    halo = approximate.halo
    if halo is not None and any(isinstance(layer, Fill) for layer in model.modules()):
        raise ValueError(
            f"approximate.halo is {halo}, but this network pads images to a multiple of some "
            "number of pixels, which windows with a fixed halo cannot follow: leave "
            "approximate.halo out"
        )
    try:
        graph = graph_of(model)
    except ValueError as e:
        if halo is not None:
            return
        other = "" if model in unbounded else ", or set approximate.halo"
        raise ValueError(
            f"this network cannot be computed on parts of an image: {refusals.get(model) or e}; or "
            f"split samples only (mesh.samples){other}"
        ) from None
    if (setting := approximate.chosen) and (
        sized := next((node.name for node in graph if node.sized), None)
    ):
        raise ValueError(
            f"{setting}, so that windows go through the network as separate images, but the result "
            f"of layer {sized} depends on the size of the whole image: leave {setting.split()[0]} "
            "out"
        )


def _weights_of(model: nn.Module) -> dict[str, str]:
    """Return, for each parameter, a text with its shape and whether it is trained or frozen.

    An example is ``{"conv.weight": "64x3x3x3, trained"}``, with names of the user's module. Ranks
    compare these texts, because all ranks must build the same network.
    """
    return {
        name: f"{'x'.join(map(str, p.shape))}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in user_names(model.named_parameters(), model).items()
    }


def _context(
    mesh: Mesh, approximate: ApproximateConfig, spatial: SpatialConfig, seed: int, splits: bool
) -> Context:
    """Return the state that all distributed layers of a rank share: communicators and seed.

    Args:
        mesh: the mesh.
        approximate: the settings that say if norms take statistics of windows or of whole images.
        spatial: the settings that say over which images a batch norm takes its statistics.
        seed: the seed of dropout masks.
        splits: True if the schedule computes the gradients of weights in actions of their own.
    """
    per_window, of_step = approximate.norms == "window", spatial.norm_scope == "step"
    # Statistics of all groups must not be summed over the groups once more.
    groups = Alone() if of_step else mesh.groups
    return Context(
        norm_comm=mesh.tiles,
        batch_comm=mesh.replicas if of_step else mesh.tiles,
        groups_comm=mesh.replicas if per_window else groups,
        per_window=per_window,
        around=weights_apart(mesh.waits) if splits else skip_store,
        seed=seed,
    )


def make_exchange(
    settings: ExchangeSettings | None,
    model: nn.Module,
    reach: ReceptiveField,
    comm,
    device,
    channels_last: bool,
) -> Exchange | None:
    """Return the halo exchange of a plain model on the mesh's grid of tiles, or None.

    None means that each layer computes a whole window (a tile with its halo), so ranks need not
    exchange halos.

    Args:
        settings: the settings of the exchange; None for no exchange.
        model: the plain model, which may be on the meta device.
        reach: the receptive field of the model. Tile borders lie on multiples of its stride.
        comm: the communicator of the ranks that share an image.
        device: the device of the exchanged tensors.
        channels_last: True if these tensors have the channels_last memory format.

    Raises:
        ValueError: the settings ask for exchanges or streamed tiles, but the model is not captured
            as a graph, so it cannot be computed in parts.
    """
    if settings is None:
        return None
    try:
        graph = graph_of(model)
    except ValueError:
        if settings.required:
            raise
        return None
    layers = (layer for _, layer in flat_layers(model))
    return Exchange(
        graph,
        reach.stride,
        comm,
        settings.grid,
        settings.per_rank,
        settings.every,
        settings.fuse_below,
        device,
        channels_last,
        active_norms(layers, settings.frozen_norm) if settings.streamed else (),
    )


def activations_of(
    model: nn.Module, exchange: Exchange, precision: str, channels_last: bool
) -> Activations:
    """Return an object that estimates the bytes that the activations of a tile take.

    Args:
        model: the plain model, which may be on the meta device.
        exchange: the halo exchange of the model.
        precision: fp32, bf16, fp16 or fp64.
        channels_last: True for the channels_last memory format.
    """
    itemsize = DTYPES[precision].itemsize
    kinds = [type(layer) for _, layer in flat_layers(model)]
    return Activations(
        exchange.graph, kinds, channels_of_maps(model), itemsize, max(4, itemsize), channels_last
    )


def make_streaming_executor(
    streaming: StreamingConfig,
    exchange: Exchange,
    activations: Activations,
    budget: float | None,
    partition: Partition | None,
    comm,
    model: TiledModel | None = None,
    cast: Callable[[], AbstractContextManager] = nullcontext,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
) -> StreamingExecutor:
    """Return the streaming executor that the settings ask for.

    Args:
        streaming: the settings.
        exchange: the halo exchange of the plain model.
        activations: the estimate of the memory of a tile's activations (:func:`activations_of`).
        budget: bytes for the activations of a streamed tile, which decide how large it is; None to
            cut a rank's part of an image into ``streaming.tiles`` streamed tiles.
        partition: the stages; None for one stage.
        comm: the communicator of the pipeline's ranks.
        model: this rank's layers; None for an executor that only plans.
        cast: a function that returns a context manager, in which layers run with autocast.
        devices: the devices of this rank.
    """
    tiling = GridTiling(streaming.tiles) if budget is None else BudgetTiling(activations, budget)
    folder = None if streaming.scratch == "memory" else streaming.scratch or tempfile.gettempdir()
    stages, placement = (partition.ranges, partition.placement) if partition else ((), (0,))
    # Several stages without a budget keep the graphs of their tiles, so there is nothing to trim.
    trims = budget is not None or comm.size == 1
    return StreamingExecutor(
        model,
        exchange.graph,
        exchange.stored,
        exchange.layout,
        tiling,
        folder,
        activations,
        cast,
        devices,
        stages,
        placement,
        comm,
        trims=trims,
        halos=StoredHalos(exchange),
        budget=budget,
    )


def streaming_order(schedule: str, linear: bool, active: bool) -> str:
    """Return the pipeline schedule that is used with streamed tiles: gpipe or 1f1b.

    Args:
        schedule: the value of ``pipeline.schedule``.
        linear: True if the labels alone determine the loss gradient of the partial sums
            (:class:`distseg.layers.criterion.Criterion`). If False, auto avoids 1F1B, which would
            compute all forward passes twice.
        active: True if there are active norms: norms that compute their statistics from the current
            images, so that they wait for all tiles of an image. Then auto chooses gpipe: feature
            maps are stored on the disk, so the forward passes of all micro-batches can come first.
    """
    if schedule != "auto":
        return schedule
    return "1f1b" if linear and not active else "gpipe"


def read_around(reach: ReceptiveField, exchange: Exchange | None, streamed: bool) -> ReceptiveField:
    """Return the receptive field that says how much a rank reads from an image for a tile.

    Its halo is 0 if ranks exchange halos between layers, and otherwise that of ``reach``.

    Args:
        reach: the receptive field of the model.
        exchange: the halo exchange between layers, or None.
        streamed: True if the rank streams tiles. A streamed tile is always read with its halo.
    """
    if exchange and exchange.exchanges and not streamed:
        nothing = (0,) * len(reach.halo)
        return (
            HeldReach(nothing, reach.stride, exchange)
            if exchange.graph.sized
            else ReceptiveField(nothing, reach.stride)
        )
    if exchange and exchange.graph.sized:
        return TrueReach(reach.halo, reach.stride, exchange)
    return reach
