"""The memory of a rank's stage in an optimizer step, counted in two ways; as a program, of all stages on the ranks of a job.

    mpirun -n 2 python -m benchmarks.memory_steps --setting '{"size": [192, 192]}' --micro_batches 4     # usually through run_ranks

*Tensors*: every kernel's results are counted from their making to their end; kernels' inner scratch is not seen. *Resident*: the kernel's
own record of the process's largest resident set, from which what was there before the step is taken; it holds scratch and messages on
their way too. glibc must then return freed blocks at once (MALLOC_MMAP_THRESHOLD_), else they are counted on.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.pipeline_steps import SCHEDULES, Step, config_of
from benchmarks.steps import Setting
from distseg.comm.launch import peak_memory, reset_peak_memory, resident_memory, world
from distseg.layers.loss import Loss
from distseg.models.zoo import build_model
from distseg.planning.held import Policy
from distseg.planning.live_bytes import LiveBytes
from distseg.planning.live_tensors import TileSizes, tensors_of
from distseg.planning.stage_memory import TileMemory
from distseg.training.engine import Engine

_CPU = torch.device("cpu")
RECOMPUTE = ("never", "except_last", "always")
RETURN_FREED = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}  # environment of the ranks


def resident_peak(work: Callable[[], object]) -> int | None:
    """By how many bytes the resident set grows at most while ``work`` runs; None where the system keeps no such record."""
    gc.collect()
    fresh, before = reset_peak_memory(_CPU), resident_memory()
    work()
    return peak_memory(_CPU) - before if fresh else None


def lasting(engine: Engine) -> dict[str, list[Tensor]]:
    """What is there between steps: weights, gradients, the optimizer's numbers."""
    states = [
        t
        for state in engine.optimizer.state.values()
        for t in state.values()
        if isinstance(t, Tensor)
    ]
    return {
        "weights": engine.parameters,
        "gradients": engine.gradients.buckets,
        "optimizer": states,
    }


def measured(step: Step) -> dict[str, int | None]:
    """Bytes of this rank by what they are for; ``tensors`` and ``resident``: the peak of a step over what lasts."""
    step()  # the optimizer's numbers come with the first step
    there = lasting(step.engine)
    pixels = [t for pieces in step.pieces for p in pieces for t in (p.pixels, p.labels)]
    gc.collect()
    with LiveBytes(
        "cpu", [*sum(there.values(), []), *step.engine.model.buffers(), *pixels]
    ) as alive:
        step()
    return {"tensors": alive.peak, "resident": resident_peak(step)} | {
        name: sum(t.nbytes for t in tensors) for name, tensors in there.items()
    }


def predicted(step: Step, setting: Setting, stage: int) -> dict[str, float]:
    """Bytes of a stage as ``distseg plan`` tells them."""
    config, ranges = step.engine.config, step.engine.partition.ranges
    policy = Policy(config.train.accumulate, config.pipeline.schedule, config.pipeline.recompute)
    loss = Loss(config.loss, config.model.out_channels)
    tensors = tensors_of(build_model(config.model), setting.size, 1, "fp32", False, loss)
    memory = TileMemory(tensors, TileSizes.whole(len(tensors.layers)), policy.micro_batches)
    return memory.of_stage(ranges[stage], stage, len(ranges), policy)._asdict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--setting", type=json.loads, default={}, help="fields of benchmarks.steps.Setting"
    )
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm, setting, found = world(), Setting(**options.setting), []
    for schedule in options.schedules:
        for recompute in RECOMPUTE:
            step = Step.of(
                config_of(
                    setting,
                    options.micro_batches,
                    comm.size,
                    schedule=schedule,
                    recompute=recompute,
                ),
                setting,
                comm,
            )
            mine = {"measured": measured(step), "predicted": predicted(step, setting, comm.rank)}
            mine["layers"] = len(step.engine.partition.ranges[comm.rank])
            found.append(
                {"schedule": schedule, "recompute": recompute, "stages": comm.allgather(mine)}
            )
            del step
    if comm.rank == 0:
        print(json.dumps({"cases": found}))


if __name__ == "__main__":
    main()
