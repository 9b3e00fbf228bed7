"""Choose a layout: ``distseg plan CONFIG --ranks N``.

The network is timed on the machine at hand by whole steps of the engine, or a profile describes
another machine (:mod:`distseg.planning.machine`). The layouts are those of
:mod:`distseg.planning.mesh_search`.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distseg.cli.streamed_layout import streamed_seconds
from distseg.comm.alone import Alone
from distseg.comm.collective import add
from distseg.comm.launch import (
    memory_in_use,
    peak_memory,
    raise_jointly,
    release_freed_memory,
    set_up,
)
from distseg.comm.mesh import Mesh
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import (
    Config,
    MeshConfig,
    PipelineConfig,
    SpatialConfig,
    output_weights,
)
from distseg.config.sizes import Size
from distseg.config.units import duration
from distseg.data.sampler import sample_sizes
from distseg.layers.graph import reach_for
from distseg.layers.loss import Loss
from distseg.layers.norm import active_norms, kind_of
from distseg.models.bands import channels_of
from distseg.models.capture.capture import as_network
from distseg.models.network import flat_layers, is_flat, of_image
from distseg.planning.cluster import Cluster
from distseg.planning.cost import modelled
from distseg.planning.layout_pictures import plot_layouts
from distseg.planning.live_tensors import NetworkTensors, tensors_of
from distseg.planning.machine import Machine, as_profile, load_machine
from distseg.planning.mesh_layout import MeshLayout, Prediction, Work
from distseg.planning.mesh_search import Planner
from distseg.planning.rates import PRECISIONS as RATED
from distseg.planning.roofline import CORE, fastest, this_cpu
from distseg.planning.step_simulation import simulate_step
from distseg.planning.timeline import plot_timeline
from distseg.report.tables import table
from distseg.runtime.optimizer import state_copies
from distseg.runtime.precision import choose
from distseg.tiling.tile_batch import TileBatch
from distseg.training.conflicts import check_auto
from distseg.training.engine import Engine
from distseg.training.programs import StepPrograms
from distseg.training.verify import RandomImages, own_pieces, prepare

HERE = "here"
_SECONDS = 2.0  # duration of a timed step
# A step with fewer bytes of activations does not show how much of the memory lies in gaps.
_ENOUGH = 32e6
# Gaps grow a little in later steps, and small tiles have more (benchmarks/layout_memory.py).
_MARGIN, _SLACK = 1.03, 32e6
_SPREAD = 2.0  # bytes that a process takes for a byte of activations, if not measured
_SHOWN = 10
_STREAMED = 0.9  # share of a rank's memory for streaming, if no layout fits without it
_LIMITS = "reading images is not counted, and no message overlaps with computation"


class PlannedLayouts(NamedTuple):
    """Result of :func:`plan_layouts`.

    Attributes:
        facts: the layouts and what they were chosen for, as a dict that JSON can hold.
        settings: the values of the settings of the best layout, by name.
        planner: the planner.
        sizes: the sizes of all images.
    """

    facts: dict
    settings: Mapping[str, Any]
    planner: Planner
    sizes: Collection[tuple[int, ...]]

    def draw(self, output: Path) -> list[Path]:
        """Draw the layouts, and the timeline of a step in the fastest one; return both files.

        Args:
            output: the file of the first picture. The second one is beside it, with ``-timeline``
                in its name.
        """
        planner, facts = self.planner, self.facts
        searches = list(planner.front(facts["ranks"], self.sizes))
        shown = searches or [planner.best(facts["ranks"], self.sizes)]
        layouts = {(one.layout, one.memory): one for found in shown for one in found}
        title = f"Layouts of {facts['ranks']} ranks, {facts['machine']}"
        front = [found[0] for found in searches]
        plot_layouts(list(layouts.values()), front, planner.limit, output, facts["steps"], title)
        timeline = output.with_name(f"{output.stem}-timeline{output.suffix}")
        best = shown[0][0].layout
        plot_timeline(planner.spans(best), timeline, f"A step, {best}")
        return [output, timeline]


def plan_layouts(
    training: PlannedTraining,
    world,
    ranks: int,
    machine: str = HERE,
    memory: float | None = None,
    batch: int | None = None,
    simulate: bool = False,
) -> PlannedLayouts | None:
    """Return the best layouts of a training on a number of ranks.

    All ranks of ``world`` must call it together. Only rank 0 gets the layouts, the others get None.

    Args:
        training: the training whose layout is planned.
        world: the communicator of the ranks that measure. They all time the network at once, and
            then the messages between them. If it has one rank, the speed of messages is guessed.
        ranks: the number of ranks to plan for.
        machine: ``here``, or a profile (:func:`distseg.planning.machine.load_machine`).
        memory: the memory limit of a rank in bytes; by default the memory that the machine has.
        batch: the number of images in a step, over all sample groups; by default that of the
            config.
        simulate: True to simulate the fastest layout too (:func:`simulated`).

    Raises:
        ValueError: the network is not a list of known layers, the batch does not divide into
            micro-batches, or no layout is possible.
    """
    with raise_jointly(world):
        if not is_flat(training.model):
            raise ValueError(
                f"distseg cannot follow the layers of {training.config.model.name}, so it cannot "
                "plan stages and tiles for this network: split samples only (mesh.samples)"
            )
    found = training.measure(world) if machine == HERE else load_machine(machine)
    searches: list[tuple[Planner, list[Prediction]]] = []
    with raise_jointly(world):
        if world.rank == 0:
            for precision in training.precisions(found):
                work = training.work(found, batch, precision)
                planner = Planner(work, found, memory)
                searches.append((planner, _best(planner, ranks, training.sizes)))
    if not searches:
        return None
    planner, best = min(searches, key=_by_time)
    work, precision = planner.work, {}
    if len(searches) > 1:
        precision["train.precision"] = work.precision
        training = replace(training, config=training.config.with_values(precision))
    step = simulated(planner, best[0]) if simulate else None
    chosen = choose_layout(planner, ranks, training.sizes, best)
    streamed = None
    if chosen is not None and chosen.memory is not None:
        streamed = _streamed(training, planner, chosen)
    if chosen is None or streamed is not None and "refused" in streamed:
        chosen = Choice(best[0].layout, "no layout fits, and this one takes the least memory")
    facts = {
        "ranks": ranks,
        "image": str(Size(training.size)),
        "batch": work.batch,
        "machine": found.name,
        "precision": work.precision,
        "notes": [*_about_precision(searches, work.precision), *notes_on(work, found)],
        "limit": planner.limit,
        "fits": best[0].memory <= planner.limit,
        "steps": None if training.samples is None else max(1, training.samples // work.batch),
        "profile": as_profile(found),
        "layouts": [_plain(p) for p in best],
        "streamed": streamed,
        "chosen": chosen.settings() | precision,
        "hangs_on": sensitivity(planner, memory, ranks, best[0], training.sizes),
        "simulated": step,
    }
    return PlannedLayouts(facts, chosen.values() | precision, planner, training.sizes)


def simulated(planner: Planner, found: Prediction) -> dict:
    """Return the simulated step of a predicted layout, in types that JSON can hold.

    The entries are the seconds of the step; by purpose, the seconds of the chain of tasks that
    determines its duration; and the number of simulated ranks, which stand for all ranks.
    """
    cluster = Cluster(planner.machine, found.layout.ranks)
    step = simulate_step(planner.work, found.layout, found.balance, cluster)
    return {"seconds": step.seconds, "parts": step.parts, "ranks": step.simulated}


def with_best_layout(
    config: Config | PatchConfig, world, image: Size | None = None
) -> Config | PatchConfig:
    """Return the settings with the best layout on all ranks of the job, for ``mesh.layout: auto``.

    Settings whose ``mesh.layout`` is ``given``, as always for PatchGD, are returned unchanged. All
    ranks of ``world`` must call it together; they time the network at the same time. Rank 0 prints
    the chosen layout.

    Args:
        config: the settings of the training. The layout keeps the number of images in a step.
        world: the communicator of all ranks.
        image: the size of an image in pixels; by default the size of the store's largest sample.

    Raises:
        ValueError: no layout is possible, or a setting that describes a layout, such as
            ``mesh.tiles``, is given too. It
            is raised on all ranks.
    """
    if config.mesh.layout == "given":
        return config
    with raise_jointly(world):
        check_auto(config.streaming, config.approximate, config.pipeline, config.spatial)
        training = PlannedTraining.of(config, image)
        found = None
        if not is_flat(training.model):
            layout = training.samples_only(world.size)
            found = Choice(layout, "its layers cannot be followed, so only samples are split")
    if found is None:
        _say(world, "timing the network, to choose the layout (mesh.layout auto)")
        machine = training.measure(world)
        with raise_jointly(world):
            if world.rank == 0:
                planner = Planner(training.work(machine), machine)
                best = planner.best(world.size, training.sizes)
                found = choose_layout(planner, world.size, training.sizes, best)
                if found is None:
                    raise ValueError(
                        f"mesh.layout is auto, but no layout on {world.size} ranks can cut all "
                        "images: use fewer ranks, or leave small images out"
                    )
        found = world.bcast(found, root=0)
    flags = " ".join(f"--{name} {value}" for name, value in found.settings().items())
    _say(world, f"layout: {flags} ({found.why})")
    return config.with_values(found.values())


@dataclass(frozen=True)
class PlannedTraining:
    """Training whose layout is planned.

    Attributes:
        config: the settings, completed by those that follow from the images.
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
        """Return the training of a config.

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
        largest, network = Size(max(sizes, key=math.prod)), as_network(prepared.model)
        return cls(prepared.config, network, largest, sizes, samples)

    @property
    def _loss(self) -> Loss:
        config = self.config
        return Loss(config.loss, channels_of(self.model)[1], output_weights(config.model))

    def precisions(self, machine: Machine) -> list[str]:
        """Return the number types to compare: those with measured rates, if ``auto`` is set.

        A profile has rates of bf16 only if the machine computes in bf16 without emulation.
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
        sizes = self._timed_sizes()
        rows = []
        for size in sizes:
            seconds, base, rise = self._timed(size, world, device)
            costs = modelled(self.model, size, config.data.images, throughput, precision)
            rows.append((seconds, sum(costs.forward) + sum(costs.backward), 2 * len(costs.layers)))
        images = config.data.images
        tensors = tensors_of(self.model, sizes[-1], images, precision, last, self._loss)
        spread = self._spread(tensors, rise)
        (small, less, calls), (large, more, _) = rows
        factor = (large - small) / (more - less) if more > less and large > small else large / more
        # Images may be so small that calls take nearly all the time; some is left for the
        # arithmetic.
        call = min(max(1e-7, (small - factor * less) / calls), 0.9 * large / calls)
        factor = (large - calls * call) / more
        latency, link, known = _messages(world)
        source = f"steps on {' and '.join(map(str, sizes))}, {world.size} ranks at the same time"
        memory, ranks = memory_of_a_rank(world, device)
        numbers = ("arithmetic", "traffic", "call", "memory", "base", "spread")
        measured = dict.fromkeys(numbers, "measured")
        guessed = "measured" if known else "guess"
        return Machine(
            "this machine",
            throughput.flops_per_second / factor,
            throughput.bytes_per_second / factor,
            call,
            latency,
            link,
            link,
            memory,
            base + _SLACK,
            ranks,
            spread,
            precision,
            kinds=measured
            | {"latency": guessed, "link": guessed, "network": "guess", "ranks": guessed},
            sources=dict.fromkeys(("arithmetic", "traffic", "call", "base", "spread"), source)
            | dict.fromkeys(
                ("latency", "link"), f"sums over {world.size} ranks" if known else "none"
            )
            | {"network": "as link", "memory": "of the machine", "ranks": "of this run"},
        )

    def _timed(self, size: Size, world, device: torch.device) -> tuple[float, int, int]:
        """Time steps that each rank computes alone.

        Args:
            size: the size of the images.
            world: the communicator of the ranks, which all compute at the same time.
            device: the device of this rank.

        Returns:
            The seconds of a step; the bytes that the process takes besides the step, such as
            libraries; and the bytes that it takes more in the step. Each is the largest of all
            ranks.
        """
        gc.collect()
        release_freed_memory()
        base, earlier = memory_in_use(device), peak_memory(device)
        world.Barrier()
        layout = MeshLayout(1, Size((1,) * len(self.size)), 1, "all", 1, "auto", "never")
        engine, own = replace(self, size=size).step(layout, Alone(), device)
        seconds = fastest(partial(engine.backward, own), 3, device)
        # A process keeps freed memory (keep_freed_memory), so it still takes as much as before.
        peak = peak_memory(device)
        peak = peak if peak > earlier else memory_in_use(device)
        return tuple(map(max, zip(*world.allgather((seconds, base, peak - base)))))

    def _spread(self, network: NetworkTensors, rise: int) -> float:
        """Return the bytes that a process takes for a byte of activations (`Machine.spread`).

        Args:
            network: the tensors of a step.
            rise: the bytes that the process takes more in this step, weights included.
        """
        if network.activations < _ENOUGH:
            return _SPREAD
        weights = sum(layer.parameters for layer in network.layers)
        measured = (rise - 2 * network.weight_bytes * weights) / network.activations
        return max(1.0, _MARGIN * measured)

    def _timed_sizes(self) -> tuple[Size, Size]:
        """Return two image sizes for timed steps, the smaller one first.

        By the model of a CPU core, a step on the larger size takes about ``_SECONDS``, or less if
        images are small. The smaller size is about a half or a quarter of it along each dim.
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


class Choice(NamedTuple):
    """Layout that was chosen.

    Attributes:
        layout: the layout.
        why: the reason in words.
        memory: bytes of a rank within which tiles are streamed; None without streaming.
        balance: number of layers of each stage; None with one stage.
    """

    layout: MeshLayout
    why: str
    memory: int | None = None
    balance: tuple[int, ...] | None = None

    def settings(self) -> dict[str, str]:
        """Return the settings to write into a config for this layout."""
        found = self.layout.settings()
        if self.memory is not None:
            found["streaming.memory"] = f"{self.memory / 1e9:.3g}GB"
        if self.balance is not None:
            found["pipeline.balance"] = f"[{','.join(map(str, self.balance))}]"
        return found

    def values(self) -> dict[str, Any]:
        """Return the values of the settings of this layout, by the name of the setting."""
        found = self.layout.values()
        if self.memory is not None:
            found["streaming.memory"] = self.memory
        if self.balance is not None:
            found["pipeline.balance"] = list(self.balance)
        return found


def choose_layout(
    planner: Planner, ranks: int, sizes: Collection[tuple[int, ...]], best: Sequence[Prediction]
) -> Choice | None:
    """Return the fastest layout that fits the memory limit and can cut images of all ``sizes``.

    If no layout fits, tiles are streamed. Then as many sample groups as possible share the images,
    because they repeat no work; the other ranks split each image. The result is None if no layout
    that fits can cut all images.

    Args:
        planner: the planner.
        ranks: the number of ranks.
        sizes: the sizes of all images.
        best: the result of :meth:`Planner.best`.
    """
    if best and best[0].memory <= planner.limit:
        found = best[0]
        why = f"predicted: {found.seconds:.3g} s a step, {found.memory / 1e9:.3g} GB a rank"
        balance = found.balance if found.layout.stages > 1 else None
        return Choice(found.layout, why, balance=balance)
    streamed = [
        replace(one, schedule="auto")
        for one in planner.candidates(ranks, sizes)
        if (one.stages, one.recompute, one.exchange) == (1, "never", "all")
    ]
    if not streamed:
        return None
    memory = int(_STREAMED * planner.limit)
    why = f"no layout without streaming fits {planner.limit / 1e9:.3g} GB a rank"
    return Choice(max(streamed, key=lambda one: one.samples), why, memory)


def _say(world, line: str) -> None:
    """Print a line on rank 0, to stderr, because a command may print JSON to stdout."""
    if world.rank == 0:
        print(line, file=sys.stderr, flush=True)


def _best(planner: Planner, ranks: int, sizes: Collection[tuple[int, ...]]) -> list[Prediction]:
    """Return the layouts on a number of ranks that can cut images of all sizes, the best first.

    Raises:
        ValueError: there is none.
    """
    work = planner.work
    if best := planner.best(ranks, sizes):
        return best
    raise ValueError(
        f"no layout on {ranks} ranks computes a step of {work.batch} images of {Size(work.image)} "
        f"pixels, with {work.images} images in a micro-batch: give another number of ranks, such "
        f"as a divisor of {work.batch // work.images} (to split samples only), or another number "
        "of images in a step"
    )


def _by_time(search: tuple[Planner, list[Prediction]]) -> tuple[bool, float]:
    """Return a sort key: layouts that fit the memory limit come first, then the fastest."""
    planner, best = search
    return best[0].memory > planner.limit, best[0].seconds


def _about_precision(
    searches: Sequence[tuple[Planner, list[Prediction]]], chosen: str
) -> list[str]:
    """Return a line on the best layouts in other number types; an empty list if there are none."""
    others = [
        f"{duration(best[0].seconds)} in {planner.work.precision}"
        + ", which does not fit" * (best[0].memory > planner.limit)
        for planner, best in searches
        if planner.work.precision != chosen
    ]
    if not others:
        return []
    return [f"number type: {chosen}, as train.precision is auto; a step takes {'; '.join(others)}"]


def _plain(found: Prediction) -> dict:
    """Return a prediction in types that JSON can hold."""
    return {
        "settings": found.layout.settings(),
        "family": found.layout.family,
        "seconds": found.seconds,
        "memory": found.memory,
        "parts": found.parts,
        "largest_loss": found.binds,
        "balance": list(found.balance),
    }


def _streamed(training: PlannedTraining, planner: Planner, chosen: Choice) -> dict:
    """Return the prediction for a layout with streamed tiles, or why it cannot be trained."""
    config = training.config.with_values({**chosen.values(), "train.accumulate": 1})
    try:
        model, image = copy.deepcopy(training.model), planner.work.image
        programs = StepPrograms(config, model, image, int(planner.machine.base))
        seconds = streamed_seconds(programs, planner, chosen.layout)
    except ValueError as e:
        return {"refused": str(e)}
    return {"settings": chosen.settings(), "memory": chosen.memory, "seconds": seconds}


def notes_on(work: Work, machine: Machine) -> list[str]:
    """Return a note on each part of a step for which the machine has no measured rate."""
    found, precision = [], work.precision
    if precision != machine.precision and not machine.rates.has("convolution", precision):
        found.append(
            f"the profile has no FLOP/s of {precision}: those of {machine.precision} are taken; "
            "only bytes of memory and messages are those of the number type"
        )
    if work.costs.outside:
        found.append(
            f"{100 * work.costs.outside:.0f} % of the FLOPs lie outside the measured shapes: the "
            "rates of the nearest shapes are taken"
        )
    return found


def sensitivity(
    planner: Planner,
    memory: float | None,
    ranks: int,
    best: Prediction,
    sizes: Collection[tuple[int, ...]] = (),
) -> list[str]:
    """Return a text for each change of a guessed number that makes another layout the best.

    Each guessed number of the machine is made 30 % smaller and 30 % larger. A text names the
    number, the factor and the layout that is then the best.

    Args:
        planner: the planner.
        memory: the memory limit of a rank in bytes; None for the memory that the machine has.
        ranks: the number of ranks to plan for.
        best: the best layout with the guessed numbers.
        sizes: the sizes of all images, which the grid of tiles must be able to cut.
    """
    found, work = [], planner.work
    for name in planner.machine.guesses:
        if name in ("memory", "ranks", "base", "spread"):
            continue
        for factor in (0.7, 1.3):
            changed, costs = planner.machine.changed(name, factor), work.costs
            if changed.device != planner.machine.device:
                costs = modelled(
                    work.model, work.image, work.images, changed.device, work.precision
                )
            other = planner.on(changed, costs, memory).best(ranks, sizes)[0]
            if other.layout != best.layout:
                found.append(
                    f"{name} times {factor}: {other.layout}, {duration(other.seconds)} a step"
                )
    return found


def _messages(world) -> tuple[float, float, bool]:
    """Return the latency of messages in seconds, their bytes per second, and True if measured.

    With one rank both numbers are guessed, and the third result is False.
    """
    if world.size == 1:
        return 2e-5, 2e9, False
    rounds = math.ceil(math.log2(world.size))
    tiny, many = torch.ones(8), torch.ones(2**20)
    short = fastest(lambda: [add(tiny, world) for _ in range(100)], 3) / 100
    long = fastest(lambda: add(many, world), 3)
    size = 2 * (world.size - 1) / world.size * many.numel() * 8
    return short / (2 * rounds), size / max(1e-9, long - short), True


def text(found: dict, config_path: str) -> str:
    """Return the result of :func:`plan_layouts` as text for the terminal.

    Args:
        found: the facts of the result.
        config_path: the config file, for the command that trains.
    """
    layouts = found["layouts"]
    rows = [_row(number + 1, row) for number, row in enumerate(layouts[:_SHOWN])]
    families: dict[str, dict] = {}
    for row in layouts:
        families.setdefault(row["family"], row)
    best = layouts[0]
    lines = [
        f"{found['ranks']} ranks, a step of {found['batch']} images of {found['image']}, "
        f"{found['precision']}, {found['machine']}, {found['limit'] / 1e9:.3g} GB a rank",
        "",
        table(rows),
        "",
    ]
    if not found["fits"]:
        lines += [
            f"no layout fits {found['limit'] / 1e9:.3g} GB a rank; the layouts above take the "
            "least memory. Use more ranks, or stream tiles within a rank with --memory "
            "(docs/streaming.md)",
            *_about_streaming(found["streamed"], best["seconds"]),
            "",
        ]
    for family, row in families.items():
        if row is not best:
            lines.append(
                f"{family}: its best layout takes {row['seconds'] / best['seconds']:.2f} times as "
                f"long as the first layout; most is lost by {row['largest_loss']}"
            )
    if step := found["simulated"]:
        parts = sorted(step["parts"].items(), key=lambda part: -part[1])
        lines.append(
            f"the first layout simulated, with shared links: {step['seconds']:.3g} s a step ("
            + ", ".join(f"{name} {seconds:.2g} s" for name, seconds in parts)
            + f"); {step['ranks']} simulated ranks stand for all"
        )
    lines += found["notes"]
    lines += [f"the best layout depends on a guess: {s}" for s in found["hangs_on"]]
    if found["steps"]:
        seconds = (found["streamed"] or best).get("seconds", best["seconds"])
        lines.append(f"an epoch of {found['steps']} steps: {duration(found['steps'] * seconds)}")
    flags = " ".join(f"--{name} {value}" for name, value in found["chosen"].items())
    if found["ranks"] > 1:
        start = f"mpirun -n {found['ranks']} "
    else:
        start = ""
    lines += [f"({_LIMITS})", "", f"next: {start}distseg train {config_path} {flags}".rstrip()]
    return "\n".join(lines)


def _about_streaming(streamed: dict | None, seconds: float) -> list[str]:
    """Return a line about streamed tiles, if they were considered.

    Args:
        streamed: the prediction (``streamed`` of :attr:`PlannedLayouts.facts`).
        seconds: the seconds of the first layout, which does not fit.
    """
    if streamed is None:
        return []
    if "refused" in streamed:
        return [f"streaming: not possible either: {streamed['refused']}"]
    return [
        f"streaming: fits {streamed['memory'] / 1e9:.3g} GB a rank; a step takes "
        f"{duration(streamed['seconds'])}, {streamed['seconds'] / seconds:.2f} times as long as "
        "the first layout would take (the time to offload feature maps is not counted)"
    ]


def _row(number: int, row: dict) -> dict:
    """Return the row of the printed table about one layout: values by the name of the column."""
    settings = row["settings"]
    return {
        "": number,
        "samples": settings["mesh.samples"],
        "tiles": settings["mesh.tiles"],
        "stages": settings["mesh.stages"],
        "exchange": settings.get("spatial.exchange_every", ""),
        "micro-batches": settings["train.accumulate"],
        "schedule": settings.get("pipeline.schedule", ""),
        "recompute": settings["pipeline.recompute"],
        "step [s]": row["seconds"],
        "memory [GB]": row["memory"] / 1e9,
        "most is lost by": row["largest_loss"],
    }
