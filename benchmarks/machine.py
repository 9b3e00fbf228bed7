"""What a benchmark ran on and how it was called, without paths or host names: results are published."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.ranks import mpi_version
from distseg.cli.bench.environment import cpu_model, git_commit, package_version, usable_cores

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "mpi4py", "horovod", "torchgpipe", "numpy", "h5py")


def environment() -> dict:
    """CPU, cores, memory, accelerators, versions, threads, git commit, command line and time."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "mpi": mpi_version(),
        "packages": {name: found for name in _PACKAGES if (found := package_version(name))},
        "threads": torch.get_num_threads(),
        "commit": git_commit(ROOT),
        "command": command_line(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def summary(machine: dict) -> str:
    """One line of :func:`environment` for people."""
    devices = "".join(f", {name}" for name in machine["accelerators"])
    return (
        f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{devices}; torch {machine['packages'].get('torch')}, "
        f"python {machine['python']}, {machine['mpi'] or 'no MPI'}, {machine['threads']} threads; commit {machine['commit'] or 'unknown'}"
    )


def command_line() -> str:
    """The command that reproduces this run from the repository's root."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [portable(sys.argv[0])]
    return shlex.join(["python", *program, *map(portable, sys.argv[1:])])


def portable(argument: str) -> str:
    """An argument without this machine's paths: relative to the repository, or the last part of a path elsewhere."""
    flag, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    return flag + equals + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)
