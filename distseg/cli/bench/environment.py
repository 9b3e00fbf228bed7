"""Description of the hardware and the software that a result of ``distseg bench`` depends on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from distseg.comm.communicator import Communicator
from distseg.comm.launchers import found as found_launcher

_PACKAGES = ("torch", "numpy", "mpi4py", "horovod", "h5py")
# Variables that decide how fast computation and messages are.
_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|OMPI_MCA|PRTE_MCA|MPICH|MPIR_CVAR|MV2|I_MPI|FI|UCX|NCCL|HOROVOD|CUDA|NVIDIA"
    r"|PYTORCH|TORCH|DISTSEG)_[A-Za-z0-9_]+"
)
# Variables that a launcher sets for its own ranks: they describe the job, not the machine.
_OF_LAUNCHERS = re.compile(r"_(PREFIXES|orte|prte|ess|plm|pmix|hnp|initial|ras|rmaps)(_|$)|uri$")
_PRIVATE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.I)


def describe_environment(
    world: Communicator, device: torch.device, threads: int
) -> dict[str, Any] | None:
    """Return hardware and software of a job as a dict for JSON on rank 0, and None on other ranks.

    All ranks of ``world`` must call it together.

    Args:
        world: the communicator of all ranks.
        device: the device of this rank.
        threads: the number of CPU threads of this rank.

    Returns:
        ``hosts`` (ranks by host name), ``processors`` and ``devices`` (ranks by name), ``threads``
            (of a rank, or a list if they differ), ``ranks``, ``launcher``, ``transport``,
            ``versions`` (by name), ``commit`` (None outside a repository), ``variables``, ``cores``
            and ``memory`` in bytes of the first node, ``system`` and ``date`` (UTC).
    """
    own = (platform.node(), cpu_model(), device_name(device), threads)
    every = world.gather(own)
    if every is None:
        return None
    hosts, processors, devices, numbers = zip(*every)
    return {
        "ranks": world.size,
        "hosts": dict(Counter(hosts)),
        "processors": dict(Counter(processors)),
        "devices": dict(Counter(devices)),
        "threads": numbers[0] if len(set(numbers)) == 1 else list(numbers),
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "launcher": launcher_name(os.environ),
        "transport": world.transport,
        "versions": software_versions(world.transport),
        "commit": git_commit(Path(__file__).resolve().parents[3]),
        "variables": performance_variables(os.environ),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def launcher_name(environment: Mapping[str, str]) -> str:
    """Return the name of the launcher that started this process, or ``none``."""
    launcher, _ = found_launcher(environment)
    return "none" if launcher is None else launcher.name


def software_versions(transport: str) -> dict[str, str]:
    """Return the versions of distseg, Python, packages and libraries, by name.

    Args:
        transport: mpi, torch or alone. With mpi, the version of the MPI library is returned too.
    """
    from distseg import __version__

    found = {"distseg": __version__, "python": platform.python_version()}
    found |= {name: there for name in _PACKAGES if (there := package_version(name))}
    if transport == "mpi":
        from mpi4py import MPI

        found["MPI"] = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda or f"HIP {torch.version.hip}")
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """Return the short hash of the commit in a folder; None if it is not the root of a repository.

    ``+changes`` is added if tracked files differ from the commit.
    """
    if not (folder / ".git").exists():  # else git finds a repository around an installed package
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changed else "")


def performance_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables, by name, that may change the speed of a step.

    An example is OMP_NUM_THREADS.
    """
    return {
        name: environment[name]
        for name in sorted(environment)
        if _VARIABLES.fullmatch(name)
        and not _OF_LAUNCHERS.search(name)
        and not _PRIVATE.search(name)
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
