"""Run ``distseg bench KIND``: measure, write the result and its picture, print its table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distseg.cli.bench.environment import describe_environment
from distseg.cli.bench.measurements import Asked, Measured, measure_steps, measure_store
from distseg.cli.bench.pictures import draw_result
from distseg.cli.bench.results import Result, file_name, write_result
from distseg.cli.bench.rows import rows_of
from distseg.comm.communicator import Communicator
from distseg.comm.launch import raise_jointly, set_up
from distseg.report.tables import folded_table


def run_bench(asked: Asked, world: Communicator) -> int:
    """Measure what the user asks for, write the result and its picture, and return the exit status.

    All ranks of ``world`` must call it together.

    Args:
        asked: the kind of measurement, its flags and the settings.
        world: the communicator of all ranks.
    """
    path = Path(asked.flags["output"]) / file_name(asked.kind, asked.axis, world.size)
    with raise_jointly(world):
        if world.rank == 0 and path.exists() and not asked.flags["overwrite"]:
            raise ValueError(f"{path} exists: give another --output, or replace it by --overwrite")
    run = asked.config.run
    device, threads = set_up(world, run.device, run.threads)
    environment = describe_environment(world, device, threads.count)
    measure = measure_store if asked.kind == "io" else measure_steps
    found = measure(asked, world, device)
    with raise_jointly(world):
        if environment is not None:
            _finish(_result(asked, environment, found), path)
    return 0


def _result(asked: Asked, environment: Mapping[str, Any], found: Measured) -> Result:
    return Result(
        asked.kind,
        asked.axis,
        command_text(asked.words, environment["hosts"], environment["launcher"]),
        environment,
        found.config.as_plain(),
        found.network,
        found.precision,
        found.data,
        asked.flags["repeats"],
        asked.flags.get("warmup", 0),
        found.machine.name if found.machine else "",
        found.measurements,
    )


def _finish(result: Result, path: Path) -> None:
    """Write the result, draw it if matplotlib is installed, and print its table."""
    write_result(result, path)
    lines, files = [f"no prediction: {note}" for note in result.notes], [path]
    try:
        draw_result(result, path.with_suffix(".png"))
        files.append(path.with_suffix(".png"))
    except ImportError as e:
        lines.append(f"no picture: {e}")
    print(folded_table(rows_of(result.kind, result.measurements)))
    lines.append(f"result: {', '.join(map(str, files))}")
    lines.append(f"next: distseg bench report {shlex.quote(str(path.parent))}")
    print(*lines, sep="\n", flush=True)


def command_text(words: Sequence[str], hosts: Mapping[str, int], launcher: str) -> str:
    """Return the command that repeats a measurement.

    Args:
        words: the words after ``distseg``.
        hosts: the number of ranks by host.
        launcher: the launcher's name, or ``none``.
    """
    command, ranks = shlex.join(["distseg", *words]), sum(hosts.values())
    if launcher == "none":
        return command
    if launcher == "torchrun":
        nodes = f"--nnodes {len(hosts)} " if len(hosts) > 1 else ""
        return f"torchrun {nodes}--nproc-per-node {max(hosts.values())} -m {command}"
    if launcher == "srun":
        return f"srun -N {len(hosts)} -n {ranks} {command}"
    return f"mpirun -n {ranks} {command}"
