"""Time the training step of cases on the first ranks of a job; the other ranks wait."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from distseg.cli.bench.cases import Case
from distseg.cli.bench.results import Measurement
from distseg.cli.bench.running_step import RunningStep
from distseg.comm.communicator import Communicator
from distseg.comm.counted import CountedComm
from distseg.comm.launch import (
    JointFailure,
    gathered,
    peak_memory,
    raise_jointly,
    release_freed_memory,
    reset_peak_memory,
)
from distseg.comm.mesh import Mesh
from distseg.comm.progress import phase
from distseg.config.settings import Config
from distseg.models.capture.capture import as_network
from distseg.models.network import check_size
from distseg.runtime.precision import choose
from distseg.training.engine import Engine
from distseg.training.verify import Prepared, own_pieces, prepare

Found = TypeVar("Found")


@dataclass(frozen=True)
class Steps:
    """Settings by which the steps of all cases are measured.

    Attributes:
        config: the settings of the steps. A case replaces the settings that describe the layout.
        random: True for random images of a case's size, False for the images of the store.
        repeats: number of measured steps.
        warmup: number of steps that run before the measured steps.
        device: the device of this rank.
    """

    config: Config
    random: bool
    repeats: int
    warmup: int
    device: torch.device

    def measured(self, case: Case, comm: Communicator) -> Measurement:
        """Measure a case and return its figures, without a prediction.

        All ranks of ``comm`` must call the method together. Their number must be the number of
        ranks of the case's layout.

        Raises:
            JointFailure: the step cannot be computed in this layout, or its loss is not finite.
        """
        phase(f"measuring {case.name}")
        gc.collect()
        release_freed_memory()
        fresh = all(comm.allgather(reset_peak_memory(self.device)))
        step = self._step(case, comm)
        for _ in range(self.warmup):
            step.seconds()
        before = step.comm.traffic.copy()
        seconds = [step.seconds() for _ in range(self.repeats)]
        sent = step.comm.traffic - before
        peaks = comm.allgather(peak_memory(self.device))
        images = case.layout.samples * case.layout.micro_batches * step.engine.config.data.images
        return Measurement(
            case.name,
            case.layout.ranks,
            seconds,
            layout={**asdict(case.layout), "tiles": str(case.layout.tiles)},
            image=str(case.image),
            pixels=images * case.image.volume,
            images=images,
            traffic=step.total_traffic(sent, self.repeats),
            memory=peaks if fresh else (),
            redundancy=step.redundancy(),
            **step.traced(),
        )

    def prepared(self, case: Case) -> Prepared:
        """Return the settings, the plain model and the images of a case."""
        config = self.config
        changes = case.changes(config.mesh, config.pipeline, config.spatial)
        return prepare(config.with_values(changes), case.image if self.random else None)

    def _step(self, case: Case, comm: Communicator) -> RunningStep:
        """Return the training step of a case, with engine and data, ready to run on this rank."""
        with raise_jointly(comm):
            prepared = self.prepared(case)
            model, images = as_network(prepared.model), prepared.images()
            check_size(model, images.size)
        layout, counted = case.layout, CountedComm(comm)
        mesh = Mesh(counted, layout.samples, layout.tiles, layout.stages)
        precision, last = choose(prepared.config.train, self.device, comm)
        engine = Engine(prepared.config, mesh, model, images.size, self.device, precision, last)
        with raise_jointly(comm):
            return RunningStep(engine, own_pieces(engine, images), counted, self.device)


def on_first_ranks(world: Communicator, count: int, work: Callable[[Communicator], Found]) -> Found:
    """Run ``work`` on the first ranks of a job, and return its result on all ranks.

    All ranks of ``world`` must call it together. The ranks that do not work wait without keeping a
    core busy.

    Args:
        world: the communicator of all ranks.
        count: the number of ranks that work.
        work: a function that gets the communicator of the first ranks. All these ranks call it.

    Raises:
        JointFailure: ``work`` has raised a JointFailure on all of the first ranks.
    """
    found, failure = None, None
    if world.rank < count:
        comm = world.group(range(count))
        try:
            found = work(comm)
        except JointFailure as e:
            failure = e
        comm.Free()
    gathered(world)
    with raise_jointly(world):
        if failure is not None:
            raise failure
    return world.bcast(found)


def measure_cases(
    steps: Steps, cases: Sequence[Case], world: Communicator, say: Callable[[str], None]
) -> list[Measurement]:
    """Measure all cases, one after another, and return their figures.

    All ranks of ``world`` must call it together.

    Args:
        steps: how steps are measured.
        cases: the cases.
        world: the communicator of all ranks.
        say: a function that prints a line of progress.
    """
    found = []
    for number, case in enumerate(cases):
        one = on_first_ranks(
            world, case.layout.ranks, lambda comm, case=case: steps.measured(case, comm)
        )
        found.append(one)
        say(f"{number + 1}/{len(cases)} {case.name}, images of {case.image}: {spread_text(one)}")
    return found


def spread_text(one: Measurement) -> str:
    """Return the median and the range of the measured seconds as text."""
    if len(one.seconds) == 1:
        return f"{one.median:.4g} s"
    return f"{one.median:.4g} s ({min(one.seconds):.4g} to {max(one.seconds):.4g})"
