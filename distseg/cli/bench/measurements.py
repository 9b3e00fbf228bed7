"""Measure what a user asks ``distseg bench`` for: the cases of a kind, with their predictions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from distseg.cli.bench import cases, layouts
from distseg.cli.bench.cases import Case
from distseg.cli.bench.flags import distinct_words, positive_numbers, schedules
from distseg.cli.bench.measuring import Steps, measure_cases
from distseg.cli.bench.prediction import StepPrediction, left_out
from distseg.cli.bench.reading import crops_of, measure_reading
from distseg.cli.bench.results import Measurement
from distseg.cli.plan_layouts import HERE
from distseg.cli.planned_training import PlannedTraining
from distseg.comm.communicator import Communicator
from distseg.comm.launch import raise_jointly
from distseg.config.settings import Config
from distseg.config.sizes import Size
from distseg.layers.loss import is_linear
from distseg.models.capture.capture import as_network
from distseg.models.network import is_flat
from distseg.planning.machine import Machine, load_machine
from distseg.runtime.precision import choose
from distseg.training.verify import prepare


@dataclass(frozen=True)
class Asked:
    """Request of a user to ``distseg bench``.

    Attributes:
        kind: one of ``MEASURED``.
        flags: the command's own flags by name (:mod:`distseg.cli.bench.flags`).
        config: the settings.
        words: the words of the command after ``distseg``.
    """

    kind: str
    flags: Mapping[str, Any]
    config: Config
    words: Sequence[str]

    @property
    def axis(self) -> str:
        """The axis of the mesh that grows; empty if no axis grows."""
        return self.flags.get("axis", "")

    def say(self, world: Communicator) -> Callable[[str], None]:
        """Return a function that prints a line of progress to stderr, on rank 0 only."""

        def say(line: str) -> None:
            if world.rank == 0:
                print(f"bench {self.kind}: {line}", file=sys.stderr, flush=True)

        return say


@dataclass(frozen=True)
class Measured:
    """Measurements, with the settings, the network and the data that were used.

    Attributes:
        config: the settings, in which the number of dims is that of the images.
        network: ``name`` and ``parameters`` (their number).
        precision: the number type of the steps.
        data: ``random images``, or the store.
        machine: the machine profile from which times of steps were predicted; None if none were.
        measurements: the figures.
    """

    config: Config
    network: Mapping[str, Any]
    precision: str
    data: str
    machine: Machine | None
    measurements: Sequence[Measurement]


def measure_steps(asked: Asked, world: Communicator, device: torch.device) -> Measured:
    """Measure the training steps that the user asks for, and return the figures.

    All ranks of ``world`` must call it together.

    Args:
        asked: the kind of measurement, its flags and the settings.
        world: the communicator of all ranks.
        device: the device of this rank.
    """
    image, repeats, warmup = (asked.flags[name] for name in ("image", "repeats", "warmup"))
    with raise_jointly(world):
        prepared = prepare(asked.config, image)
        config, model = prepared.config, as_network(prepared.model)
        asked = replace(asked, config=config)
        chosen = _cases_of(asked, model, Size(prepared.size), world.size)
        fewest = min(case.layout.ranks for case in chosen)
        reducer = reducer_for(config.mesh.reducer, fewest, world.size, world.transport)
        config = config.with_values({"mesh.reducer": reducer})
    machine = None
    if not left_out(config.streaming, config.pipeline, config.spatial) and is_flat(model):
        machine = _machine(asked, PlannedTraining(config, model, prepared.size), world)
    steps = Steps(config, image is not None, repeats, warmup, device)
    found = measure_cases(steps, chosen, world, asked.say(world))
    with raise_jointly(world):
        if world.rank == 0 and asked.flags["machine"] != "none":
            planned = StepPrediction(steps, machine)
            found = [planned.beside(case, one) for case, one in zip(chosen, found)]
    precision, _ = choose(config.train, device, world)
    data = str(config.data.store) if prepared.store else "random images"
    parameters = sum(p.numel() for p in model.parameters())
    network = {"name": config.model.name, "parameters": parameters}
    return Measured(config, network, precision, data, machine, found)


def measure_store(asked: Asked, world: Communicator, device: torch.device) -> Measured:
    """Measure how fast ranks read a store; the arguments are those of :func:`measure_steps`."""
    with raise_jointly(world):
        config = prepare(asked.config, None).config
        counts = layouts.rank_counts(asked.flags["ranks"], world.size, 1)
        crops = crops_of(config.data, config.train.seed, asked.flags["crops"])
    repeats = asked.flags["repeats"]
    found = measure_reading(config.data, crops, counts, repeats, world, asked.say(world))
    precision, _ = choose(config.train, device, world)
    network = {"name": config.model.name, "parameters": 0}
    return Measured(config, network, precision, str(config.data.store), None, found)


def _cases_of(asked: Asked, model: nn.Module, image: Size, ranks: int) -> list[Case]:
    """Return the cases of a kind of measurement.

    Args:
        asked: the kind, its flags and the settings.
        model: the plain network.
        image: the size of an image.
        ranks: the number of ranks of the job.

    Raises:
        ValueError: the ranks do not fit the mesh.
    """
    flags, config = asked.flags, asked.config
    exchange, micro_batches = config.spatial.exchange_every, config.train.accumulate
    linear = is_linear(config.loss.name)
    base = layouts.base_layout(config.mesh, config.pipeline, exchange, micro_batches, linear)
    if asked.kind in ("strong", "weak"):
        rest = layouts.fixed_ranks(base, asked.axis)
        counts = layouts.rank_counts(flags["ranks"], ranks, rest)
        scaled = cases.strong_cases if asked.kind == "strong" else cases.weak_cases
        return scaled(base, counts, asked.axis, image, exchange)
    if asked.kind == "pipeline":
        numbers = positive_numbers("--micro-batches", flags["micro_batches"])
        return cases.pipeline_cases(base, ranks, numbers, schedules(flags["schedules"]), image)
    if asked.kind == "halo":
        return cases.halo_cases(base, ranks, distinct_words("--every", flags["every"]), image)
    axes = layouts.AXES if is_flat(model) else ("samples",)
    return cases.memory_cases(base, ranks, axes, exchange, image)


def reducer_for(reducer: str, fewest: int, ranks: int, transport: str) -> str:
    """Return the reducer that sums the gradients of all cases of a measurement.

    Horovod connects all ranks of a job. If a case has fewer ranks, all cases sum gradients by MPI,
    so that they can be compared.

    Args:
        reducer: the setting ``mesh.reducer``.
        fewest: the smallest number of ranks of a case.
        ranks: the number of ranks of the job.
        transport: the carrier of the job's messages: mpi, torch or alone.

    Raises:
        ValueError: ``reducer`` is Horovod, but a case has fewer ranks than the job.
    """
    if transport != "mpi" or fewest == ranks:
        return reducer
    if reducer == "horovod":
        raise ValueError(
            "mesh.reducer is horovod, which connects all ranks of a job, but some cases have fewer "
            f"ranks than the {ranks} of this job: set mesh.reducer to mpi, or start a job for each "
            "number of ranks (--ranks job)"
        )
    return "mpi"


def _machine(asked: Asked, training: PlannedTraining, world: Communicator) -> Machine | None:
    """Return the machine for which the planner predicts the cases; None without predictions.

    All ranks of ``world`` must call it together.
    """
    name = asked.flags["machine"]
    if name == "none":
        return None
    if name != HERE:
        with raise_jointly(world):
            return load_machine(name)
    say = asked.say(world)
    say("timing the network, for the predictions (--machine none leaves them out)")
    return training.measure(world)
