"""Describe a training for the planner of layouts, and time its steps on this machine."""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from distseg.cli.profile import own_seconds, watch
from distseg.comm.alone import Alone
from distseg.comm.launch import memory_in_use, peak_memory, release_freed_memory, set_up
from distseg.comm.mesh import Mesh
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    SpatialConfig,
    TrainConfig,
    output_weights,
)
from distseg.config.sizes import Size
from distseg.data.sampler import sample_sizes
from distseg.layers.graph import reach_for
from distseg.layers.loss import Loss
from distseg.layers.norm import active_norms, kind_of
from distseg.models.bands import channels_of, dims_of
from distseg.models.capture.capture import as_network
from distseg.models.network import flat_layers, of_image
from distseg.planning.calibration import latency_and_link, message_timings
from distseg.planning.cost import modelled
from distseg.planning.live_tensors import NetworkTensors, tensors_of
from distseg.planning.machine import Machine
from distseg.planning.mesh_layout import MeshLayout, Work
from distseg.planning.rates import PRECISIONS as RATED
from distseg.planning.rates import Shape, rates_of
from distseg.planning.roofline import CORE, kernel_seconds, seconds_of, this_cpu
from distseg.planning.shared_images import MOMENTS, exchange_bytes, norm_bytes
from distseg.planning.stage_memory import memory_of_image
from distseg.runtime.optimizer import state_copies
from distseg.runtime.precision import choose
from distseg.tiling.tile import check_dims
from distseg.tiling.tile_batch import TileBatch
from distseg.training.engine import Engine
from distseg.training.verify import RandomImages, own_pieces, prepare

_SECONDS = 2.0  # duration of a timed step
_STEPS = 3  # steps that are timed, of which the fastest counts
# A step with fewer bytes of activations does not show how much of the memory lies in gaps.
_ENOUGH = 32e6
# Gaps grow a little in later steps, and small tiles have more (benchmarks/layout_memory.py).
_MARGIN, SLACK = 1.03, 32e6
# The network of `with_sharing` has this many convolutions with a norm, and this many channels. Its
# steps on tiles with these sides are repeated.
_PAIRS, _CHANNELS, _SIDES, _REPEATS = 6, 16, (96, 192), 6
# Numbers of Machine that a single rank does not measure.
EXCHANGE, LATENCY, LINK = 3e-4, 2e-5, 2e9
SPREAD = 2.0  # bytes that a process takes for a byte of activations, if not measured


class _TimedStep(NamedTuple):
    """Step that each rank computes alone, as :meth:`PlannedTraining.measure` times it.

    The numbers are the largest ones of all ranks.

    Attributes:
        seconds: the seconds of the step.
        forward: the share of the seconds in the forward pass.
        base: the bytes that the process takes besides the step, such as libraries.
        rise: the bytes that it takes more in the step.
        kernels: kind, shape and seconds of each kernel of the step.
    """

    seconds: float
    forward: float
    base: int
    rise: int
    kernels: list[tuple[Shape, float]]


@dataclass(frozen=True)
class PlannedTraining:
    """Training whose layout is planned.

    Attributes:
        config: the settings, in which the number of dims is that of the images.
        model: the plain network, which is not changed. All methods except :meth:`samples_only` need
            a list of layers that distseg knows.
        size: the size of an image in pixels; no larger image is timed.
        sizes: the sizes of all images, which the grid of tiles must be able to cut.
        samples: number of samples of an epoch; None for random images.
    """

    config: Config
    model: nn.Module
    size: Size
    sizes: Collection[tuple[int, ...]] = ()
    samples: int | None = None

    @classmethod
    def of(cls, config: Config, image: Size | None) -> PlannedTraining:
        """Return the training that a config describes, with its network and image sizes.

        Args:
            config: the settings.
            image: the size of an image in pixels; None for the largest sample of the store.

        Raises:
            ValueError: there is neither a size nor a store.
        """
        prepared, samples = prepare(config, image), None
        sizes: list[tuple[int, ...]] = [prepared.size]
        if prepared.store is not None:
            samples = config.data.epoch_samples or len(prepared.store.split("train"))
            sizes = list(sample_sizes(prepared.store, config.data, prepared.context).values())
        check_dims(prepared.size, dims_of(prepared.model))
        largest, network = Size(max(sizes, key=math.prod)), as_network(prepared.model)
        return cls(prepared.config, network, largest, sizes, samples)

    @property
    def _loss(self) -> Loss:
        config = self.config
        return Loss(config.loss, channels_of(self.model)[1], output_weights(config.model))

    def precisions(self, machine: Machine) -> list[str]:
        """Return the number types, such as fp32 and bf16, with which layouts are planned.

        If ``train.precision`` is auto, these are the types with measured rates, otherwise only the
        type that is set. A profile has rates of bf16 only if the machine computes in bf16 without
        emulation.
        """
        if self.config.train.precision != "auto":
            return [self.config.train.precision]
        rated = [one for one in RATED if machine.rates.has("convolution", one)]
        return list(dict.fromkeys([machine.precision, *rated]))

    def work(
        self, machine: Machine, batch: int | None = None, precision: str | None = None
    ) -> Work:
        """Return the description of a step from which the planner predicts times and memory.

        Args:
            machine: the machine; the costs of layers are modelled for its device.
            batch: the number of images in a step, over all sample groups; None for that of the
                config.
            precision: the number type; by default that of the config, or of the machine for
                ``auto``.

        Raises:
            ValueError: the batch does not divide into micro-batches.
        """
        config, images = self.config, self.config.data.images
        batch = batch or config.step_images
        if batch % images:
            raise ValueError(
                f"a step of {batch} images does not divide into micro-batches of {images} "
                "(data.images): give another --batch"
            )
        precision = precision or config.train.precision
        if precision == "auto":
            precision = machine.precision
        layers = [layer for _, layer in flat_layers(self.model)]
        norms = active_norms(layers, config.spatial.frozen_norm)
        whole_step = config.spatial.norm_scope == "step"
        joins = whole_step and any(kind_of(layers[n]) == "batch" for n in norms)
        return Work(
            self.model,
            modelled(self.model, self.size, images, machine.device, precision),
            tuple(self.size),
            images,
            batch,
            reach_for(self.model, True),
            tuple(norms),
            state_copies(config.optim),
            self._loss,
            whole_step,
            config.mesh.samples if joins else None,
            precision,
            precision == "bf16" if (last := config.train.channels_last) is None else last,
        )

    def samples_only(self, ranks: int) -> MeshLayout:
        """Return the layout in which all ranks are sample groups.

        Raises:
            ValueError: the micro-batches of a step do not divide among the ranks.
        """
        config = self.config
        micro = config.mesh.samples * config.train.accumulate
        if micro % ranks:
            raise ValueError(
                f"mesh.layout is auto, and the layers of {config.model.name} cannot be followed, "
                f"so only samples can be split, but {micro} micro-batches a step do not divide "
                f"among {ranks} ranks: set train.accumulate to a multiple of {ranks}"
            )
        one = Size((1,) * len(self.size))
        return MeshLayout(ranks, one, 1, "all", micro // ranks, "auto", config.pipeline.recompute)

    def measure(self, world) -> Machine:
        """Return the speed and memory of this machine, by timing steps of this network.

        All ranks of ``world`` must call it together. At the same time each rank computes steps
        alone, on images of two sizes. Then the messages between the ranks are timed.

        Args:
            world: the communicator of the ranks that measure.
        """
        config = self.config
        device = set_up(world, config.run.device, config.run.threads).device
        throughput = this_cpu() if device.type == "cpu" else CORE
        precision, last = choose(config.train, device, world)
        images, sizes = config.data.images, self._timed_sizes()
        smaller, larger = (self._timed(size, world, device) for size in sizes)
        if precision in RATED:
            rates = rates_of((*smaller.kernels, *larger.kernels), precision)
            throughput = replace(throughput, rates=rates)
        fewer, costs = (modelled(self.model, size, images, throughput, precision) for size in sizes)
        less, more = (sum(each.forward) + sum(each.backward) for each in (fewer, costs))
        calls, small, large = sum(costs.calls), smaller.seconds, larger.seconds
        tensors = tensors_of(self.model, sizes[-1], images, precision, last, self._loss)
        spread = self._spread(tensors, larger.rise)
        factor = (large - small) / (more - less) if more > less and large > small else large / more
        # Images may be so small that calls take nearly all the time; some is left for the
        # arithmetic.
        call = min(max(1e-7, (small - factor * less) / calls), 0.9 * large / calls)
        forward, backward = (
            max(0.1 * seconds, seconds - count * call) / sum(layers)
            for seconds, layers, count in zip(
                (larger.forward * large, (1 - larger.forward) * large),
                (costs.forward, costs.backward),
                costs.calls,
            )
        )
        timings = message_timings(world)
        latency, link = latency_and_link(timings) if timings else (LATENCY, LINK)
        source = f"steps on {' and '.join(map(str, sizes))}, {world.size} ranks at the same time"
        memory, ranks = memory_of_a_rank(world, device)
        numbers = ("arithmetic", "traffic", "call", "memory", "base", "spread", "forward")
        measured = dict.fromkeys(numbers, "measured")
        guessed = "measured" if timings else "guess"
        machine = Machine(
            "this machine",
            throughput.flops_per_second / backward,
            throughput.bytes_per_second / backward,
            call,
            latency,
            link,
            link,
            memory,
            larger.base + SLACK,
            ranks,
            spread,
            EXCHANGE,
            forward=forward / backward,
            precision=precision,
            rates=throughput.rates.divided(backward),
            timings=timings,
            kinds=measured
            | dict.fromkeys(("latency", "link", "ranks", "exchange", "sharing"), guessed)
            | {"network": "guess"},
            sources=dict.fromkeys((n for n in numbers if n != "memory"), source)
            | dict.fromkeys(
                ("latency", "link"), f"messages between {world.size} ranks" if timings else "none"
            )
            | {"network": "as link", "memory": "of the machine", "ranks": "of this run"}
            | dict.fromkeys(
                ("exchange", "sharing"), f"tiles on {world.size} ranks" if timings else "none"
            ),
        )
        return with_sharing(machine, world, device) if timings else machine

    def _timed(self, size: Size, world, device: torch.device) -> _TimedStep:
        """Time steps that each rank computes alone.

        Args:
            size: the size of the images.
            world: the communicator of the ranks, which all compute at the same time.
            device: the device of this rank.
        """
        gc.collect()
        release_freed_memory()
        base, earlier = memory_in_use(device), peak_memory(device)
        world.Barrier()
        layout = MeshLayout(1, Size((1,) * len(self.size)), 1, "all", 1, "auto", "never")
        engine, own = replace(self, size=size).step(layout, Alone(), device)
        engine.backward(own)  # warms up
        trace, runs = watch(engine, Alone()), []
        for _ in range(_STEPS):
            trace.spans.clear()
            seconds = seconds_of(partial(engine.backward, own), device)
            spent = own_seconds(trace.spans)
            runs.append((seconds, spent["forward"], spent["backward"]))
        seconds, forward, backward = map(min, zip(*runs))
        # A process keeps freed memory (keep_freed_memory), so it still takes as much as before.
        peak = peak_memory(device)
        peak = peak if peak > earlier else memory_in_use(device)
        share = forward / (forward + backward)
        largest = map(max, zip(*world.allgather((seconds, share, base, peak - base))))
        kernels = world.allgather(kernel_seconds(partial(engine.backward, own), 2, device))
        slowest = [(same[0][0], max(took for _, took in same)) for same in zip(*kernels)]
        return _TimedStep(*largest, slowest)

    def _spread(self, network: NetworkTensors, rise: int) -> float:
        """Return the number of bytes that a process takes for each byte of activations.

        This is ``Machine.spread``.

        Args:
            network: the tensors of a step.
            rise: the bytes, weights included, by which the process grows in this step.
        """
        memory = memory_of_image(network)
        if memory.changing < _ENOUGH:
            return SPREAD
        return max(1.0, _MARGIN * (rise - memory.weights - memory.gradients) / memory.changing)

    def _timed_sizes(self) -> tuple[Size, Size]:
        """Return two image sizes for timed steps, the smaller one first.

        By the model of a CPU core, a step on the larger size takes about ``_SECONDS``, or less if
        images are small. The smaller size is about a half or a quarter of the larger size along
        each dim.
        """
        stride = reach_for(self.model, True).stride
        costs = modelled(self.model, self.size, self.config.data.images, CORE)
        whole = sum(costs.forward) + sum(costs.backward)
        shrink = min(1.0, (_SECONDS / whole) ** (1 / len(self.size)))

        def at(factor: float) -> Size:
            return Size(
                min(n, max(2, round(factor * n / s)) * s) // s * s or s
                for n, s in zip(self.size, stride)
            )

        large = at(shrink)
        small = at(shrink / 2)
        return (small, large) if small != large else (at(shrink / 4), large)

    def step(
        self, layout: MeshLayout, comm, device: torch.device, balance: Sequence[int] | None = None
    ) -> tuple[Engine, list[list[TileBatch]]]:
        """Return an engine for timing one step of a layout, and random data for that step.

        All ranks of ``comm`` must call it together.

        Args:
            layout: the mesh, and how its ranks share the work. It replaces some settings, such as
                mesh, schedule and number of micro-batches.
            comm: a communicator with as many ranks as the mesh.
            device: the device of this rank.
            balance: the number of layers of each stage; by default the engine's own choice.

        Returns:
            The engine, with a copy of the network; and this rank's tile batches of random images, a
                list for each micro-batch.
        """
        config = replace(
            self.config,
            mesh=MeshConfig(reducer="mpi"),
            pipeline=PipelineConfig(),
            spatial=SpatialConfig(frozen_norm=self.config.spatial.frozen_norm),
        ).with_values({**layout.values(), "pipeline.balance": balance})
        bands, classes = channels_of(self.model)
        vectors = of_image(self.model, self.size)
        images = RandomImages(self.size, bands, classes, config.loss, config.train.seed, vectors)
        mesh = Mesh(comm, layout.samples, layout.tiles, layout.stages)
        precision, last = choose(config.train, device, comm)
        engine = Engine(config, mesh, copy.deepcopy(self.model), self.size, device, precision, last)
        return engine, own_pieces(engine, images)


def with_sharing(machine: Machine, world, device: torch.device) -> Machine:
    """Return a machine with what a rank computes for a halo exchange or norm if others have tiles.

    A small network with as many exchanges as norms computes a step on tiles that exchange halos,
    and one on images of the size of such a tile. The second step has the same convolutions, and the
    same sum of gradients. The difference is divided among the exchanges and norms of both passes.
    Two sizes of tiles separate the time of any exchange or norm from that of its bytes. Both sizes
    are too large for the caches, as in training: small tiles would take about half the time.

    Args:
        machine: the machine without ``exchange`` and ``sharing``, which are measured.
        world: the communicator of the ranks, at least two, which all must call it together.
        device: the device of this rank.
    """
    neighbours, found = min(2, world.size - 1), []
    for side in _SIDES:
        line = 4 * _CHANNELS * side
        size, halo = side * line, neighbours * line
        moved = sum(exchange_bytes(size, halo)) + sum(norm_bytes(size))
        messages = machine.message(world.size, halo, neighbours) + machine.sum(
            world.size, MOMENTS * _CHANNELS
        )
        found.append((moved / 2, _seconds_of_sharing(world, device, side) - messages))
    (fewer, short), (more, long) = found
    # A copy reads what is in no cache, too.
    sharing = min(machine.traffic, (more - fewer) / max(1e-9, long - short))
    return replace(machine, exchange=max(1e-7, (short - fewer / sharing) / 2), sharing=sharing)


def _seconds_of_sharing(world, device: torch.device, side: int) -> float:
    """Return the seconds that an exchange and a norm on tiles take more than on images, one way.

    The seconds include those of the messages.

    Args:
        world: the communicator of the ranks, which all must call it together.
        device: the device of this rank.
        side: height and width of a tile, in pixels.
    """
    layers = [
        layer
        for _ in range(_PAIRS)
        for layer in (nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.InstanceNorm2d(_CHANNELS))
    ]
    config = Config(
        model=ModelConfig(in_channels=_CHANNELS, out_channels=_CHANNELS),
        data=DataConfig(images=1),
        train=TrainConfig(precision="fp32"),
    )
    network, one = as_network(nn.Sequential(*layers)), Size((1, 1))

    def step(samples: int, tiles: Size) -> Callable[[], object]:
        training = PlannedTraining(config, network, Size((side * tiles[0], side)))
        layout = MeshLayout(samples, tiles, 1, "1", 1, "auto", "never")
        engine, own = training.step(layout, world, device)
        return partial(engine.backward, own)

    steps = step(1, Size((world.size, 1))), step(world.size, one)
    # The steps take turns, so that both are as fast or as slow as the machine is at the moment.
    turns = [[seconds_of(each, device) for each in steps] for _ in range(_REPEATS + 1)]
    tiles, images = (max(world.allgather(min(each))) for each in zip(*turns[1:]))
    return (tiles - images) / _PAIRS / 2


def memory_of_a_rank(world, device: torch.device) -> tuple[float, int]:
    """Return the bytes of memory that a rank has, and the number of ranks of a node.

    If ``world`` has a single rank, the node is assumed to have as many ranks as its cores allow.

    Args:
        world: the communicator of the ranks, all of them on this node.
        device: the device of this rank.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = world.size if world.size > 1 else max(1, (cores or 1) // torch.get_num_threads())
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory), ranks
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks, ranks
