"""The Python interface: a mesh of ranks, and a module of the user that is distributed over it.

::

    mesh = distseg.init_mesh(samples=2, tiles=(1, 2))
    model = distseg.distribute(MyUNet(), mesh)
    criterion = distseg.PixelLoss(my_loss)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for image, target in loader:
        loss = model.backward(image, target, criterion)
        optimizer.step()
        optimizer.zero_grad()
    logits = model.predict(image)

The gradient is that of the serial program: the user's module on whole images in one process.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from numbers import Integral
from typing import Literal, get_args, get_type_hints

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distseg.comm import launch
from distseg.comm.communicator import as_communicator
from distseg.comm.mesh import Mesh
from distseg.comm.watch import attend, connecting
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    RunConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.layers.criterion import Criterion, Outputs
from distseg.layers.own_loss import PixelLoss, SumLoss
from distseg.models.bands import channels_of, dims_of, record_images
from distseg.models.capture.capture import as_network
from distseg.models.capture.checks import joins_images
from distseg.models.joined import MeasuredOutputs, measured_outputs
from distseg.models.layers import padded
from distseg.models.own import built
from distseg.runtime.precision import emulation
from distseg.training.distributed import DistributedModel, Shard
from distseg.training.engine import Engine
from distseg.training.module_changes import ModuleChanges

__all__ = [
    "Criterion",
    "DistributedModel",
    "PixelLoss",
    "Shard",
    "SumLoss",
    "distribute",
    "init_mesh",
]

_SIDE = 256  # pixels of the images for which stages are balanced, if the user gives no size


def init_mesh(
    samples: int | None = None,
    tiles: Sequence[int] = (1, 1),
    stages: int = 1,
    comm=None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    timeout: float = 1800.0,
) -> Mesh:
    """Return the mesh of all ranks of this job, and choose this rank's device.

    All ranks of the job must call it together. It works under mpirun, srun and jsrun, and in a
    process that was started alone, such as a notebook. After the call, an uncaught exception on one
    rank ends all ranks. If a rank leaves the job otherwise, as by ``sys.exit()``, and all other
    ranks wait for it, the job is ended too.

    Args:
        samples: number of sample groups, each of which trains on its own images. The default is the
            largest number for which there are enough ranks, or 1 if ``tiles`` or ``stages`` has -1.
        tiles: grid of ranks that share an image, with one number per spatial dim.
        stages: number of pipeline stages of the network. One number of ``samples``, ``tiles`` and
            ``stages`` may be -1, which stands for the largest number that the ranks allow.
        comm: a communicator of mpi4py, whose ranks make up the mesh, or a DeviceMesh of
            torch.distributed, from which the mesh takes its ranks and its sizes. The dims of a
            DeviceMesh must be named samples, tiles (or tiles_0, tiles_1, ...) and stages, in this
            order; a dim that is not needed is left out. By default the mesh has all ranks of the
            job.
        device: cpu, cuda, or auto, which is a GPU if there is one, else the CPU.
        threads: CPU threads of a rank; by default the node's cores shared among its ranks. A
            process that was started alone keeps PyTorch's number.
        timeout: seconds that a rank waits until all ranks have made this call; 0 to wait for ever.
            Later calls wait as long, until :func:`distribute` gives another number.

    Raises:
        ValueError: the mesh does not fit the number of ranks; the message names both numbers.
    """
    if isinstance(tiles, int):
        raise ValueError(
            f"tiles must be a grid with a number for each dim, such as (1, 2), got {tiles}"
        )
    if timeout < 0:
        raise ValueError(
            f"timeout is {timeout}: give seconds of at least 0, where 0 means to wait for ever"
        )
    with _guardian(comm, timeout):
        if isinstance(comm, DeviceMesh):
            if samples is not None or stages != 1 or math.prod(tiles) != 1:
                raise ValueError(
                    "a DeviceMesh has its own sizes: leave samples, tiles and stages out"
                )
            comm, (samples, tiles, stages) = _ranks_of(comm), _axes_of(comm)
        world = launch.world() if comm is None else comm
        if samples is None:
            samples = 1 if -1 in (*tiles, stages) else -1
        samples, *tiles, stages = _filled([samples, *tiles, stages], world.size)
        own_threads = torch.get_num_threads()
        chosen, _ = launch.set_up(world, device, threads)
        if world.size == 1 and threads is None:
            torch.set_num_threads(own_threads)
        if world.size > 1 and not isinstance(sys.excepthook, _EndAllRanks):
            sys.excepthook = _EndAllRanks(world)
        if comm is None or world.size == launch.identify().size:
            attend(as_communicator(world))
        mesh = Mesh(world, samples, tiles, stages, timeout)
    mesh.device = chosen
    return mesh


def _guardian(comm, timeout: float) -> AbstractContextManager:
    """Return a context in which a guardian process checks that all ranks call ``init_mesh``.

    The guardian ends the job if a rank does not call it in time. The context does nothing if
    ``comm`` has only some ranks of the job, or if the job has only one process.

    Args:
        comm, timeout: the arguments of :func:`init_mesh`.
    """
    process = launch.identify()
    all_ranks = comm is None or isinstance(comm, DeviceMesh) or comm.size == process.size
    if process.size is None or process.size == 1 or not all_ranks:
        return nullcontext()
    return connecting(process.rank, timeout)


def distribute(
    module: nn.Module,
    mesh: Mesh | None = None,
    *,
    image_size: Sequence[int] | None = None,
    micro_batches: int = 1,
    exchange: Literal["all", "level"] | int = "all",
    tiles_per_rank: Sequence[int] | None = None,
    streaming: str | int | None = None,
    schedule: Literal["auto", "gpipe", "1f1b", "zb-h1"] = "auto",
    balance: Sequence[int] | None = None,
    recompute: Literal["never", "except_last", "always"] = "never",
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None,
    channels_last: bool = False,
    norm_scope: Literal["group", "step"] = "group",
    messages: Literal["transport", "nccl"] = "transport",
    inputs: Sequence[int] | None = None,
    outputs: Sequence[str | int] | None = None,
    pad: int | None = None,
    in_channels: int | None = None,
    seed: int = 0,
    reducer: Literal["auto", "horovod", "mpi", "torch", "nccl"] = "auto",
    timeout: float = 1800.0,
) -> DistributedModel:
    """Distribute a module over the ranks of a mesh.

    All ranks of the mesh must call it together, with the same module. The distributed model takes
    over the module's layers and trains the module's own parameters. Every rank gets the weights of
    the first rank. Make the optimizer from ``model.parameters()`` after this call.

    Args:
        module: a module that maps (B, C, *size) to (B, C', *size), or to (B, C') if it has one
            output vector per image. Layers on the meta device get PyTorch's default weights, each
            rank for its own stages only.
        mesh: from :func:`init_mesh`; by default a mesh of this process's job with all ranks as
            sample groups.
        image_size: size of an image in pixels, by which stages are balanced; the default is 256
            along each dim. Images of other sizes work too.
        micro_batches: number of parts of a batch that run through the pipeline one after another.
            Batch norm sees the images of one micro-batch.
        exchange: how a rank gets the pixels around its tile. ``all``: it reads the whole halo of
            the tile from the image. 1, 2, ...: ranks exchange halos before every k-th layer that
            needs one. ``level``: ranks exchange halos once per resolution.
        tiles_per_rank: grid of tiles of an image that one rank owns.
        streaming: memory limit of a rank, such as ``"4GB"``, or a number of bytes. The rank then
            computes its part tile after tile, with tiles so small that they fit. By default there
            is no limit and no streaming.
        schedule: order of the passes in a pipeline: auto, gpipe, 1f1b or zb-h1.
        balance: number of layers of each stage; by default stages take about the same time.
        recompute: the micro-batches whose activations a stage drops and computes again before the
            backward pass: never (none), always (all), or except_last (all but those whose backward
            pass comes directly after their forward pass).
        precision: fp32, bf16 or fp16 (autocast, with parameters in float32), or fp64. fp16 needs
            a GradScaler (see ``scale`` of :meth:`DistributedModel.backward`). The default is fp64
            for a module with parameters in float64, else fp32.
        channels_last: True to store activations in the channels-last memory format.
        norm_scope: ``group`` if batch norm sees the images of one sample group, ``step`` if it sees
            the images of all groups.
        messages: what carries halos and the statistics of norms: ``transport`` (MPI or
            torch.distributed), or ``nccl`` on GPUs under torchrun.
        inputs: number of bands of each input, if the module takes several.
        outputs: names or numbers of the outputs to train, if the module returns several. They may
            differ in their number of channels. Maps that are smaller than the image are resized to
            it, linearly with ``align_corners=False``. Prediction returns the first of these, or
            those that you name.
        pad: zero-pad images at the end to a multiple of this many pixels.
        in_channels: number of bands of an image, if the module does not determine it.
        seed: seed of the masks of dropout.
        reducer: the library that sums gradients over ranks: auto, horovod, mpi, torch
            (torch.distributed) or nccl.
        timeout: seconds that a rank waits for another rank; 0 to wait for ever. If a rank waits
            longer while no rank makes progress, the job is ended by a message that says where each
            rank is.

    Raises:
        ValueError: the module cannot be distributed exactly in this way. The message names the
            layer and the line of the module's code. It is raised on all ranks before any work.
    """
    mesh = init_mesh(timeout=timeout) if mesh is None else mesh
    mesh.waits.timeout = timeout
    with mesh.joint_call(), launch.raise_jointly(mesh.world):
        _check_choice("schedule", schedule, PipelineConfig)
        _check_choice("recompute", recompute, PipelineConfig)
        _check_choice("norm_scope", norm_scope, SpatialConfig)
        _check_choice("messages", messages, SpatialConfig)
        _check_choice("reducer", reducer, MeshConfig)
        if precision is not None:
            _check_choice("precision", precision, TrainConfig, but="auto")
        if not isinstance(channels_last, bool):
            raise ValueError(f"channels_last is {channels_last!r}: give True or False")
        _check_counts(micro_batches=micro_batches, pad=pad, in_channels=in_channels)
        _check_module(module)
        order = list(module.state_dict())
        names = _names_of_outputs(outputs)
        network, measured = _network(module, inputs, names, pad, in_channels)
        precision = precision or _precision_of(module)
        bands, channels = channels_of(network)
        dims = dims_of(network)
        size = Size(image_size or (_SIDE,) * dims)
        if len(size) != dims:
            raise ValueError(
                f"image_size is {size}, but images of this network have {dims} dims: give one "
                "number of pixels for each dim"
            )
        config = Config(
            model=ModelConfig(),
            mesh=MeshConfig(
                samples=mesh.shape.samples,
                tiles=mesh.shape.tiles,
                stages=mesh.shape.stages,
                reducer=reducer,
            ),
            pipeline=PipelineConfig(
                schedule=schedule,
                balance=None if balance is None else list(balance),
                recompute=recompute,
            ),
            spatial=SpatialConfig(
                exchange_every=exchange, norm_scope=norm_scope, messages=messages
            ),
            data=DataConfig(images=2),
            train=TrainConfig(accumulate=micro_batches, seed=seed),
            streaming=StreamingConfig(memory=streaming),
            run=RunConfig(timeout=timeout),
        )
        if tiles_per_rank is not None:
            config = replace(
                config, spatial=replace(config.spatial, tiles_per_rank=Size(tiles_per_rank))
            )
        config = config.with_dims(dims, str(size))
        joined = joins_images(network, size, training=False)  # before its norms are replaced
    engine = Engine(
        config,
        mesh,
        network,
        size,
        mesh.device,
        precision,
        channels_last,
        loss=PixelLoss(torch.sub),
    )
    if mesh.world.rank == 0 and (text := emulation(precision, mesh.device)):
        warnings.warn(text, stacklevel=2)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    returned = Outputs(channels, dims, engine.model.of_image, dtype)
    channels_by_name = None
    if names:
        each = measured.channels if measured else [channels] * len(names)
        assert outputs is not None
        channels_by_name = dict(zip(outputs, each, strict=True))
    return DistributedModel(
        network,
        engine,
        bands,
        returned,
        channels_by_name,
        inputs,
        order,
        joined,
        measured is not None and measured.in_evaluation,
        ModuleChanges(module),
    )


def _names_of_outputs(outputs: Sequence[str | int] | None) -> list[str] | None:
    """Return the names of the outputs to train; None if the module returns one.

    Raises:
        ValueError: ``outputs`` is one text or empty, or has a name twice.
    """
    if outputs is None:
        return None
    names = [str(name) for name in outputs] if isinstance(outputs, (list, tuple)) else []
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"outputs is {outputs!r}: give a list that has the name or number of each output once, "
            "or leave outputs out if the module returns one tensor"
        )
    return names


def _axes_of(mesh: DeviceMesh) -> tuple[int, tuple[int, ...], int]:
    """Return (number of sample groups, grid of tiles, number of stages) of a DeviceMesh.

    Args:
        mesh: a DeviceMesh of torch.distributed with dims named as in :func:`init_mesh`.

    Raises:
        ValueError: the dims of the mesh have other names or another order.
    """
    names = list(mesh.mesh_dim_names or ())
    kinds = [name.partition("_")[0] for name in names]
    order = {"samples": 0, "tiles": 1, "stages": 2}
    places = [order.get(kind, -1) for kind in kinds]
    others = [kind for kind in kinds if kind != "tiles"]
    once = len(set(names)) == len(names) and len(set(others)) == len(others)
    if not names or -1 in places or places != sorted(places) or not once:
        raise ValueError(
            f"the dims of the DeviceMesh are named {names}: name them samples, tiles (or tiles_0, "
            "tiles_1, ...) and stages, in this order, each only if needed"
        )
    sizes: dict[str, list[int]] = {"samples": [1], "tiles": [], "stages": [1]}
    for kind, size in zip(kinds, mesh.mesh.shape):
        sizes[kind] = [*sizes[kind], size] if kind == "tiles" else [size]
    tiles = sizes["tiles"] or [1, 1]
    return sizes["samples"][0], tuple([1] * (2 - len(tiles)) + tiles), sizes["stages"][0]


def _ranks_of(mesh: DeviceMesh):
    """Return a communicator with the ranks of a DeviceMesh, in the order of the DeviceMesh.

    All ranks of the job must call it together.

    Raises:
        ValueError: this process has another rank in torch.distributed than its launcher gave it, or
            is not in the mesh.
    """
    world, rank = launch.world(), torch.distributed.get_rank()
    with launch.raise_jointly(world):
        order = mesh.mesh.flatten().tolist()
        if rank != world.rank:
            raise ValueError(
                f"this process is rank {rank} of torch.distributed, but its launcher gave it rank "
                f"{world.rank}: make the process group with the launcher's ranks"
            )
        if rank not in order:
            raise ValueError(
                f"rank {rank} is not in the DeviceMesh {order}: call init_mesh with a DeviceMesh "
                "of all ranks of the job"
            )
    return world.Split(0, order.index(rank))


def _check_choice(name: str, value: object, section: type, but: str | None = None) -> None:
    """Refuse a value of an option of :func:`distribute` that is not among the allowed values.

    The option takes the same values as a setting of the config.

    Args:
        name: the name of the option and of the setting.
        value: the value of the option.
        section: the class of the config's section that has the setting.
        but: a value of the setting that is not allowed for the option.

    Raises:
        ValueError: the message names the option, its value and the allowed values.
    """
    allowed = [choice for choice in get_args(get_type_hints(section)[name]) if choice != but]
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: give one of {', '.join(allowed)}")


def _check_counts(**options: object) -> None:
    """Refuse options that are not whole numbers of at least 1; None is accepted.

    Raises:
        ValueError: the message names the option and its value.
    """
    for name, value in options.items():
        if value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")


def _check_module(module: nn.Module) -> None:
    """Refuse an object that is no module, and batch norms and dropouts that the user froze.

    A frozen layer is in evaluation mode, although the module is in training mode. Training calls
    ``module.train()``, which would set the layer back to training mode. A layer is accepted if it
    stays in evaluation mode because the module's own ``train()`` keeps it there. The check itself
    calls ``module.train()``. If the module is in evaluation mode, its layers are not checked.

    Raises:
        ValueError: ``module`` is not a module, or the message names the layer and says how to keep
            it in evaluation mode.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"distribute takes a torch.nn.Module, got {type(module).__name__}: give an instance "
            "of your module's class"
        )
    if isinstance(module, DistributedModel):
        raise ValueError(
            "the module is distributed already: give your own module, a new one for a second model"
        )
    if not module.training:
        return
    still = {name for name, layer in module.named_modules() if not layer.training}
    module.train()
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, layer in module.named_modules():
        if name in still and layer.training and isinstance(layer, kinds):
            raise ValueError(
                f"{name} ({type(layer).__name__}) was set to evaluation mode, but the training of "
                "the distributed model sets all layers to training mode: set the evaluation mode "
                "in the module's own train(), def train(self, mode=True): super().train(mode); "
                f"self.{name}.eval(); return self"
            )


def _filled(axes: list[int], ranks: int) -> list[int]:
    """Return the sizes of a mesh's axes, with -1 replaced by the largest size that the ranks allow.

    Args:
        axes: number of sample groups, number of tiles along each dim, number of stages.
        ranks: number of ranks of the job.

    Raises:
        ValueError: a size is neither -1 nor a positive whole number, or several sizes are -1.
    """
    if any(not isinstance(axis, int) or axis < 1 and axis != -1 for axis in axes):
        raise ValueError(
            "samples, tiles and stages must be whole numbers of at least 1, except that one of "
            f"them may be -1 (as many as possible), got {axes}"
        )
    if axes.count(-1) > 1:
        raise ValueError(
            f"only one of samples, tiles and stages may be -1, got {axes.count(-1)} of them in "
            f"{axes}: give the other numbers"
        )
    rest = max(1, ranks // math.prod(axis for axis in axes if axis != -1))
    return [rest if axis == -1 else axis for axis in axes]


def _network(
    module: nn.Module,
    inputs: Sequence[int] | None,
    outputs: Sequence[str] | None,
    pad: int | None,
    in_channels: int | None,
) -> tuple[nn.Module, MeasuredOutputs | None]:
    """Return a network of layers that distseg can distribute, with the module's own parameters.

    The arguments are those of :func:`distribute`. A module of several inputs or outputs is wrapped,
    so that it takes one image and returns one map, and the channels of its outputs are returned. If
    the module cannot be captured as a network of layers, it is returned unchanged.

    Raises:
        ValueError: the arguments do not fit the module.
    """
    names = outputs and tuple(outputs)
    made = built(type(module).__name__, lambda: module, {}, None, inputs, names, any_channels=True)
    if in_channels is not None:
        record_images(made, in_channels)
    measured = measured_outputs(made)
    return as_network(made if pad is None else padded(made, pad)), measured


def _precision_of(module: nn.Module) -> Literal["fp32", "fp64"]:
    """Return fp64 for a module with parameters in float64, else fp32."""
    wide = any(p.dtype == torch.float64 for p in module.parameters())
    return "fp64" if wide else "fp32"


class _EndAllRanks:
    """Hook for uncaught exceptions: one on this rank ends all ranks, which would wait for it.

    Args:
        world: the communicator of all ranks.
    """

    def __init__(self, world):
        self.world, self.before = world, sys.excepthook

    def __call__(self, kind, error, trace) -> None:
        self.before(kind, error, trace)
        joint = isinstance(error, launch.JointFailure)
        if not joint:
            print(
                f"distseg: error: rank {self.world.rank} has failed with this {kind.__name__}, so "
                f"all {self.world.size} ranks are ended",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        if not joint:
            self.world.Abort(2)
