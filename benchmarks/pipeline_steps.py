"""Optimizer steps through a pipeline as cases; as a program, on the ranks of a job, their seconds beside one rank's.

    mpirun -n 2 python -m benchmarks.pipeline_steps --setting '{"size": [192, 192]}' --micro_batches 1 4     # usually through run_ranks

Data lie in memory, images are of noise. A rank that has nothing to do sleeps, so that the one that works has the machine to itself.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from benchmarks.steps import Setting, fastest_step, timed
from distseg.comm.launch import keep_freed_memory, world
from distseg.comm.mesh import Mesh
from distseg.comm.waits import waits_of
from distseg.config.settings import Config, MeshConfig, PipelineConfig
from distseg.models.network import calls_of
from distseg.models.zoo import build_model
from distseg.planning.balance import fastest_split
from distseg.planning.cost import Costs, measured
from distseg.planning.fold import v_split
from distseg.planning.held import Policy
from distseg.planning.stages import stage_seconds
from distseg.runtime.partition import edges_between, stage_ranges
from distseg.runtime.schedule import orders, v_placement
from distseg.runtime.simulator import simulate
from distseg.runtime.spans import Span, Trace
from distseg.training.engine import Engine
from distseg.training.verify import RandomImages, own_pieces

ONE, TWICE = (
    "one rank",
    "each rank alone",
)  # what the machine gives to one rank, and to each of several that exchange nothing
SCHEDULES, PLACEMENTS = ("gpipe", "1f1b", "zb-h1"), ("linear", "v-shaped")


@dataclass
class Step:
    """An optimizer step of an engine on images that it holds; calling it runs one."""

    engine: Engine
    pieces: list
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def of(cls, config: Config, setting: Setting, comm) -> Step:
        mesh = Mesh(comm, 1, (1, 1), config.mesh.stages)
        engine = Engine(
            config,
            mesh,
            build_model(config.model),
            setting.size,
            precision=setting.precision,
            channels_last=setting.channels_last,
        )
        images = RandomImages(
            setting.size, config.model.in_channels, config.model.out_channels, config.loss
        )
        return cls(
            engine, [[engine.to_device(p) for p in pieces] for pieces in own_pieces(engine, images)]
        )

    def __call__(self) -> float:
        trace = self.engine.pipeline.trace = Trace()
        self.engine.mesh.waits.span = trace.span
        loss = self.engine.backward(self.pieces)
        self.engine.update(1e-3)
        self.spans += trace.spans
        return loss


def config_of(setting: Setting, micro_batches: int, stages: int = 1, **pipeline) -> Config:
    """``pipeline``: fields of :class:`PipelineConfig`."""
    config = setting.config("mpi")
    sections = {
        "mesh": MeshConfig(stages=stages, reducer="mpi"),
        "pipeline": PipelineConfig(**pipeline),
    }
    return replace(config, **sections, train=replace(config.train, accumulate=micro_batches))


def balances(costs: Costs, ranks: int) -> dict[str, list[int]]:
    """The layers of each stage by placement, so that the slowest rank is as fast as can be."""
    seconds = [f + b for f, b in zip(costs.forward, costs.backward)]
    return {
        "linear": fastest_split(stage_seconds(costs, Policy(), ranks), ranks),
        "v-shaped": v_split(seconds, costs.skips, ranks),
    }


def placement_of(name: str, ranks: int) -> tuple[int, ...]:
    return v_placement(ranks) if name == "v-shaped" else tuple(range(ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--setting", type=json.loads, default={}, help="fields of benchmarks.steps.Setting"
    )
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[4])
    parser.add_argument("--repeats", type=int, default=3, help="turns of all cases")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds to wait for a quiet machine, a case and turn",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    comm, setting = world(), Setting(**options.setting)
    split = _sleeping(
        comm,
        lambda: balances(measured(build_model(setting.config().model), setting.size), comm.size),
        [0],
    )
    found = [_measured_steps(comm, setting, m, split, options) for m in options.micro_batches]
    if comm.rank == 0:
        print(json.dumps({"balances": split, "micro-batches": found}))


def _measured_steps(
    comm, setting: Setting, m: int, split: dict[str, list[int]], options: argparse.Namespace
) -> dict:
    """The samples of all cases with ``m`` micro-batches, turn by turn, and of each pipeline what its stages took."""
    lone = Step.of(config_of(setting, m), setting, comm.Split(comm.rank))
    pipelines = {}
    for placement, schedule in product(PLACEMENTS, SCHEDULES):
        config = config_of(
            setting, m, comm.size, schedule=schedule, placement=placement, balance=split[placement]
        )
        pipelines[f"{schedule}, {placement}"] = Step.of(config, setting, comm)
    cases: dict[str, Callable] = {
        ONE: lambda: _sleeping(comm, lone, [0]),
        TWICE: lambda: _sleeping(comm, lone, range(comm.size)),
        **pipelines,
    }
    samples = defaultdict(list)
    for turn in range(1 + options.repeats):
        for name, case in cases.items():
            if turn == 0:
                case()  # warms up; what it does for the first time is seen by nobody
                continue
            times = timed(case, comm, 1, options.patience)
            samples[name].append(fastest_step(times))
            samples[f"{name}, disturbed"].append(not times["undisturbed"])
        for step in pipelines.values():
            step.spans = step.spans if turn else []
    stages = {
        name: _merged(comm.allgather(dict(_stage_seconds(step.spans))))
        for name, step in pipelines.items()
    }
    return {"m": m, "samples": dict(samples), "stages": stages}


def _sleeping(comm, work: Callable, ranks):
    """What ``work`` returns on the first rank, after these ranks have done it."""
    found = work() if comm.rank in ranks else None
    waits_of(comm).wait(comm.Ibarrier())
    return comm.bcast(found)


def _stage_seconds(spans: list[Span]) -> Iterator[tuple[str, float]]:
    """Median seconds of a micro-batch, by ``forward 0`` and the like: kind and stage; of weights, which waits take piece by piece, the mean."""
    times = defaultdict(list)
    for span in spans:
        if span.kind in ("forward", "backward", "weight"):
            times[span.kind, span.name.split(",")[1]].append(span.seconds)
    for (kind, stage), seconds in times.items():
        yield (
            f"{kind} {stage}",
            sum(seconds) / len(times["backward", stage])
            if kind == "weight"
            else sorted(seconds)[len(seconds) // 2],
        )


def _merged(parts: list[dict]) -> dict:
    return {name: value for part in parts for name, value in part.items()}


def simulated(
    setting: Setting,
    balance: list[int],
    placement: tuple[int, ...],
    schedule: str,
    m: int,
    seconds: dict[str, float],
) -> float:
    """Seconds that a schedule takes if each micro-batch takes what was measured and messages take no time."""
    inputs = [call.inputs for call in calls_of(build_model(setting.config().model))]
    edges = edges_between(stage_ranges(balance, len(inputs)), inputs)
    costs = {
        kind: [seconds.get(f"{kind} {stage}", 0.0) for stage in range(len(placement))]
        for kind in ("forward", "backward", "weight")
    }
    return simulate(orders(schedule, placement, m), edges, **costs, placement=placement).makespan


if __name__ == "__main__":
    main()
