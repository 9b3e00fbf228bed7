"""Choice of what carries the messages of a job: MPI, torch.distributed, or nothing for one process.

``run.transport: auto`` follows the launcher. The ranks of torch.distributed meet at an address
that all of them know: torchrun's, Slurm's first node, or MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import importlib.util
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from distseg.comm.launchers import Launcher, Process, found

# Variables of the interfaces by which the processes of srun find each other for MPI.
_PMI = ("PMIX_RANK", "PMI_RANK", "PMI_FD", "PALS_RANKID", "PMI_CONTROL_PORT")
_PORTS = range(15000, 30000)  # below the ports that systems give to clients


class Choice(NamedTuple):
    """Transport (the library that carries messages), and the reason for its choice.

    Attributes:
        transport: ``mpi``, ``torch`` or ``alone``.
        why: the reason, as the words of a log line.
    """

    transport: str
    why: str


class Address(NamedTuple):
    """Address of the key-value store through which the ranks of torch.distributed find each other.

    Attributes:
        host, port: the host and the TCP port.
        hosted: True if the launcher runs the store. Otherwise rank 0 has to run it.
    """

    host: str
    port: int
    hosted: bool = False


def mpi_installed() -> bool:
    """Return True if mpi4py is installed. It is not imported, which would start MPI."""
    try:
        return importlib.util.find_spec("mpi4py") is not None
    except (ImportError, ValueError):
        return False


def choose(setting: str, environment: Mapping[str, str], mpi: bool) -> Choice:
    """Return the transport of this process, "mpi", "torch" or "alone", and the reason for it.

    Args:
        setting: the value of ``run.transport``.
        environment: the environment variables.
        mpi: True if mpi4py is installed.
    """
    launcher, process = found(environment)
    if setting == "mpi":
        return Choice("mpi", "run.transport")
    if setting == "torch":
        return Choice("alone" if process.size == 1 else "torch", "run.transport")
    if launcher is None:
        return Choice("mpi", "no launcher") if mpi else Choice("alone", "no launcher, no mpi4py")
    started = f"started by {launcher.name}"
    if process.size == 1 and (not mpi or launcher.name == "torchrun"):
        return Choice("alone", started)
    if launcher.name == "torchrun":
        return Choice("torch", started)
    if launcher.name == "srun" and not mpi:
        return Choice("torch", f"{started}, no mpi4py")
    if launcher.name == "srun" and not any(name in environment for name in _PMI):
        return Choice("torch", f"{started} without PMI")
    return Choice("mpi", started)


def address(environment: Mapping[str, str]) -> Address:
    """Return the address at which the ranks of this job meet.

    Raises:
        ValueError: the environment gives no address, or a wrong port. The message names the
            variables to set.
    """
    launcher, process = found(environment)
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        return Address(host, _port(port), environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    job = _job(environment)
    host = host or _host(launcher, process, environment)
    if host is None or job is None:
        raise ValueError(
            f"the processes of {launcher.name if launcher else 'this job'} do not know where to "
            "meet: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or "
            "start them with torchrun"
        )
    return Address(host, _PORTS[zlib.crc32(job.encode()) % len(_PORTS)])


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ValueError(f"MASTER_PORT is {text!r}: set it to a number from 1 to 65535")
    return int(text)


def _job(environment: Mapping[str, str]) -> str | None:
    """Return a text that is the same in all processes of a job and differs between jobs.

    Return None if the environment has no such text.
    """
    if "SLURM_JOB_ID" in environment:
        return f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '0')}"
    return environment.get("PMIX_NAMESPACE")


def _host(
    launcher: Launcher | None, process: Process, environment: Mapping[str, str]
) -> str | None:
    if launcher is not None and launcher.name == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else None
    return "127.0.0.1" if process.size == process.local_size else None


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: ``n[03-05,9]-ib,login1`` -> ``n03-ib``."""
    # Each part of a name in brackets is a list of numbers and ranges.
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)[0])
