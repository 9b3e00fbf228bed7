"""Profile of an optimizer step: how each rank spends its time, and how long passes should take.

The results are a table, a picture of the schedule and a trace for Perfetto. Steps run as in
training. For the last step only, a trace is attached to the pipeline, the reducer and the
communicators of norms and losses. So training itself does not become slower by profiling.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from distseg.comm.launch import raise_jointly, set_up
from distseg.comm.mesh import Mesh, MeshShape
from distseg.comm.reducer import Reducer
from distseg.models.capture.capture import as_network
from distseg.planning.pass_times import Modelled, Passes, StagePasses, costs_of, of_tiles
from distseg.planning.timeline import ACTION, plot_timeline, write_trace
from distseg.report.tables import table
from distseg.runtime.precision import choose
from distseg.runtime.simulator import Simulation
from distseg.runtime.spans import Span, Trace, TracedComm
from distseg.tiling.tile_batch import TileBatch
from distseg.training.engine import Engine
from distseg.training.verify import Prepared, own_pieces

COMPUTING = ("forward", "backward", "weight", "recompute")
_COMPARED = (
    "passes of all ranks, measured and modelled; stages are balanced by the modelled times, "
    "which are multiplied here by"
)
KINDS = (*COMPUTING, "read", "scratch", "wait", "send", "halo", "norm-exchange", "reduce", "update")


@dataclass(frozen=True)
class Profile:
    """Timing of one step on all ranks.

    Attributes:
        title: the mesh and the schedule.
        details: facts about the run, for the text.
        names: the name of each rank.
        spans: the spans of all ranks, in seconds since the step's start.
        seconds: the time until the slowest rank finished the step.
        expected: the modelled seconds of the passes of all ranks
            (:mod:`distseg.planning.pass_times`); None if they cannot be modelled.
        simulated: a function that simulates the step of a pipeline, given the factor by which
            passes take longer than modelled; None if there is no pipeline.
    """

    title: str
    details: str
    names: tuple[str, ...]
    spans: tuple[Span, ...]
    seconds: float
    expected: Passes | None = None
    simulated: Callable[[float], Simulation] | None = None

    @property
    def factor(self) -> float:
        """Measured seconds of all modelled passes, divided by their modelled seconds."""
        modelled = sum(self.expected.values())
        return (
            sum(seconds for key, (_, seconds) in self.passes().items() if key in self.expected)
            / modelled
            if modelled
            else 1.0
        )

    def passes(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Return the number and the seconds of each kind of pass, summed over all ranks.

        A key is the kind of the passes and what they compute, such as ``("forward", "stage 1")``. A
        value is (number of passes, seconds).
        """
        found: dict[tuple[str, str], tuple[int, float]] = {}
        for rank in range(len(self.names)):
            mine = [span for span in self.spans if span.rank == rank]
            counts = Counter(map(_pass, mine))
            for key, seconds in own_seconds(mine, _pass).items():
                count, before = found.get(key, (0, 0.0))
                found[key] = count + counts[key], before + seconds
        return found

    def compared(self) -> list[dict[str, float | str]]:
        """Return a row for each kind of pass and stage, which compares measured and modelled times.

        A row has the number of passes, the measured and the modelled milliseconds of a pass, and
        their ratio. Modelled times are multiplied by :attr:`factor`, so that they have the sum of
        the measured times.
        """
        measured, factor, rows = self.passes(), self.factor, []
        for (kind, what), modelled in self.expected.items():
            count, seconds = measured.get((kind, what), (0, 0.0))
            if count:
                rows.append(
                    {
                        "pass": kind,
                        "of": what,
                        "times": count,
                        "measured [ms]": 1e3 * seconds / count,
                        "modelled [ms]": 1e3 * factor * modelled / count,
                        "ratio": seconds / (factor * modelled),
                    }
                )
        return rows

    def rows(self) -> list[dict[str, float | str]]:
        """Return a row for each rank, with the seconds that the rank spent on each kind of span.

        A row has the keys ``rank`` (its name), the kinds of spans, such as ``forward``, and
        ``other``: the time that no span covers, so that a row adds up to the time of the step.
        """
        found = []
        for rank, name in enumerate(self.names):
            own = own_seconds([s for s in self.spans if s.rank == rank])
            times = {kind: own[kind] for kind in KINDS}
            found.append({"rank": name, **times, "other": self.seconds - sum(times.values())})
        return found

    def text(self) -> str:
        """Return the profile as text for a terminal, in milliseconds and in shares of the step."""
        rows = self.rows()
        kinds = [*(kind for kind in KINDS if any(row[kind] > 0 for row in rows)), "other"]
        lines = [
            {
                "rank": row["rank"],
                **{f"{kind} [ms]": 1e3 * row[kind] for kind in kinds},
                **self._shares(row),
            }
            for row in rows
        ]
        means = {kind: sum(row[kind] for row in rows) / len(rows) for kind in (*KINDS, "other")}
        lines.append(
            {
                "rank": "mean share",
                **{f"{kind} [ms]": self._share(means[kind]) for kind in kinds},
                **self._shares(means),
            }
        )
        head = f"{self.title}, {self.details}\nstep {1e3 * self.seconds:.4g} ms; "
        head += "bubble: share of the step in which a rank waits for other stages"
        return "\n\n".join([head, table(lines), *self._comparison()])

    def _comparison(self) -> Iterator[str]:
        if not self.expected:
            return
        yield f"{_COMPARED} {self.factor:.3g}\n{table(self.compared())}"
        if self.simulated:
            simulation = self.simulated(self.factor)
            idle = ", ".join(f"{share:.1%}" for share in simulation.idle)
            yield (
                f"step simulated with the modelled times: {1e3 * simulation.makespan:.4g} ms, "
                f"without the sum of the gradients and the update; bubble {idle} by rank"
            )

    def _shares(self, times: dict) -> dict[str, str]:
        return {
            "computing": self._share(sum(times[kind] for kind in COMPUTING)),
            "bubble": self._share(times["wait"]),
        }

    def _share(self, seconds: float) -> str:
        return f"{seconds / self.seconds:.1%}"


def _pass(span: Span) -> tuple[str, str]:
    """Return (kind, text) of a span of time, such as ``("forward", "stage 1")`` for a pass."""
    action = ACTION.match(span.name)
    return span.kind, f"stage {action[2]}" if action else span.name


def own_seconds(
    spans: Sequence[Span], by: Callable[[Span], Hashable] = lambda span: span.kind
) -> Counter:
    """Return the seconds of one rank's spans, added up for each value of ``by(span)``.

    By default seconds are added up by the kind of the span. The time of a span inside another span
    counts only for the inner span.
    """
    found: Counter = Counter()
    around: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while around and around[-1].end <= span.start:
            around.pop()
        found[by(span)] += span.seconds
        if around:
            found[by(around[-1])] -= span.seconds
        around.append(span)
    return found


def row_names(shape: MeshShape) -> list[str]:
    """Return a name for each rank, its coordinates in the mesh, such as ``sample 0 tile 1``.

    The name leaves out axes of size 1. Tiles are numbered row by row.
    """
    sizes = {"sample": shape.samples, "tile": shape.tiles.volume, "stage": shape.stages}
    places = zip(*np.unravel_index(range(shape.size), tuple(sizes.values())))
    split = [axis for axis, size in sizes.items() if size > 1]
    return [
        " ".join(f"{axis} {at}" for axis, at in zip(sizes, place) if axis in split) or "rank 0"
        for place in places
    ]


def profile(prepared: Prepared, world, steps: int = 3, output: str = "profile") -> Profile | None:
    """Run ``steps`` optimizer steps and profile the last one.

    All ranks must call it together. Rank 0 writes ``timeline.png`` and ``trace.json``.

    Args:
        prepared: the settings, the model and the images of the training; the images are those of
            the first step.
        world: the communicator of all ranks.
        steps: the number of steps. The steps before the last one warm up.
        output: the folder for both files.

    Returns:
        The profile on rank 0, None on the others.
    """
    config = prepared.config
    device = set_up(world, config.run.device, config.run.threads).device
    with raise_jointly(world):
        if steps < 1:
            raise ValueError(f"--steps must be at least 1, got {steps}")
        if config.pipeline.placement == "devices":
            raise ValueError(
                "pipeline.placement is devices, but torchgpipe's threads cannot be watched: set "
                "pipeline.placement to linear or v-shaped, where each stage is held by a rank"
            )
        images, model = prepared.images(), as_network(prepared.model)
        MeshShape(config.mesh.samples, config.mesh.tiles, config.mesh.stages).check(world.size)
    precision, channels_last = choose(config.train, device, world)
    mesh = Mesh(world, config.mesh.samples, config.mesh.tiles, config.mesh.stages)
    with raise_jointly(world):
        costs = costs_of(model, images.size, config.data.images, device.type)
    engine = Engine(config, mesh, model, images.size, device, precision, channels_last)
    with raise_jointly(world):
        own = own_pieces(engine, images)
        expected, simulated = (
            (None, None) if costs is None else _expected(engine, costs, images.size, own)
        )
    for _ in range(steps - 1):
        engine.backward(own)
        engine.update(config.optim.lr)
    watched = watch(engine, world)
    engine.backward(own)
    with watched.span("update", config.optim.name):
        engine.update(config.optim.lr)
    parts = world.gather((watched.spans, watched.now(), expected))
    found = None
    with raise_jointly(world):
        if parts is not None:
            spans, seconds, modelled = zip(*parts)
            every = None if None in modelled else sum(map(Counter, modelled), Counter())
            found = Profile(
                *_title(engine),
                tuple(row_names(mesh.shape)),
                tuple(s for part in spans for s in part),
                max(seconds),
                every,
                simulated,
            )
            spans, names = _laid_over(found)
            plot_timeline(spans, Path(output) / "timeline.png", found.title, names)
            write_trace(found.spans, Path(output) / "trace.json", rows=found.names)
    return found


def _expected(
    engine: Engine, costs: Modelled, image: Sequence[int], own: list[list[TileBatch]]
) -> tuple[Passes, Callable[[float], Simulation] | None]:
    """Return the modelled seconds of this rank's passes, and a function that simulates the step.

    The function takes a factor: every pass then takes this factor times its modelled seconds. For
    streamed tiles, or without a pipeline, None is returned instead of the function.

    Args:
        engine: the engine of the step.
        costs: the modelled costs of the layers.
        image: the size of an image in pixels.
        own: this rank's tile batches, a list for each micro-batch.
    """
    if engine.streaming:
        runner, given = engine.streaming, engine.streaming.prepare(own)
        return of_tiles(
            costs,
            runner.executor,
            image,
            [*runner.extra_forward(given.plans), *runner.program(given.plans, given.places)],
            given.plans,
        ), None
    runner = engine.gradient_step.runner
    units = runner.prepare(own)
    pixels = sum(piece.place.window.pixels for unit in units for piece in unit.pieces) / len(units)
    partition = engine.pipeline.partition
    passes = StagePasses(
        costs, partition, runner.orders_of(len(units)), engine.pipeline.recompute, pixels
    )
    return passes.of_rank(engine.mesh.stage), passes.simulated if partition.stages > 1 else None


def _laid_over(found: Profile) -> tuple[Sequence[Span], list[str]]:
    """Return the spans to draw for a profile, and the names of the picture's rows.

    There is one row for each measured rank. If the profile has a simulation, one row for each rank
    of the simulated pipeline follows.
    """
    if not found.simulated:
        return found.spans, [*found.names]
    below = found.simulated(found.factor)
    spans = [replace(span, rank=len(found.names) + span.rank) for span in below.spans]
    return [*found.spans, *spans], [
        *found.names,
        *(f"simulated, stage {rank}" for rank in range(below.ranks)),
    ]


def watch(engine: Engine, world) -> Trace:
    """Start to record how this rank spends its time in an engine's steps; return the trace.

    The trace gets a span of time for each pass, message and wait. All ranks of ``world`` must call
    this function together, so that their traces begin at the same moment.
    """
    world.Barrier()
    ranges = torch.cuda.nvtx if engine.device.type == "cuda" else None
    trace = Trace(world.rank, _clock(engine.device), ranges)
    engine.pipeline.trace = trace
    engine.mesh.waits.span = trace.span
    engine.sums.reducer = _TracedReducer(engine.reducer, trace)
    # The loss and the gradient's norm are sums over all stages.
    engine.mesh.pipeline = TracedComm(engine.mesh.pipeline, trace, "wait")
    for name in ("norm_comm", "batch_comm", "groups_comm"):
        setattr(
            engine.context, name, TracedComm(getattr(engine.context, name), trace, "norm-exchange")
        )
    if engine.streaming:
        engine.streaming.executor.span = trace.span
    if head := engine.gradient_step.head:
        head.replicas = TracedComm(head.replicas, trace, "reduce")  # sums the loss
    return trace


class _TracedReducer(Reducer):
    """Reducer that lets another reducer sum gradients, and records the waits as spans of time."""

    def __init__(self, reducer: Reducer, trace: Trace):
        self.name, self.early = reducer.name, reducer.early
        self.start, self.advance = reducer.start, reducer.advance
        self._reducer, self._trace = reducer, trace

    def finish(self) -> None:
        with self._trace.span("reduce", f"gradients, {self.name}"):
            self._reducer.finish()


def _clock(device: torch.device) -> Callable[[], float]:
    """Return a function that returns the time in seconds.

    On a GPU it first waits for the queued kernels, so that spans include their time.
    """
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _title(engine: Engine) -> tuple[str, str]:
    """Return the title (mesh and schedule) and the details of a profile."""
    config = engine.config
    schedule = (
        f", {engine.gradient_step.runner.schedule}, {config.pipeline.placement}"
        if engine.partition
        else ""
    )
    recompute = (
        f", recompute {config.pipeline.recompute}"
        if engine.partition and not engine.streaming
        else ""
    )
    return (
        f"{engine.mesh.shape}{schedule}",
        f"{config.train.accumulate} micro-batches{recompute}, {engine.device.type}, "
        f"{engine.precision}",
    )
