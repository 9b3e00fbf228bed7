"""A Python command on several ranks, from inside a benchmark, so that one harness can compare 1 rank with 2.

The job prints one JSON object as the last line of rank 0; that is its result. Each rank gets the same number of threads
whatever the number of ranks, so that a comparison measures ranks and nothing else::

    cases = {f"{n} ranks": lambda n=n: Reading(run_ranks(n, ["-m", "benchmarks.step", "--worker"])["seconds"]) for n in (1, 2)}
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# What another launcher around the benchmark would tell the ranks: it would be wrong for them.
_INHERITED = ("OMPI_COMM_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "JSM_")
_INHERITED_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def find_mpirun() -> str | None:
    """MPIEXEC, else the one beside this Python, else the first on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return os.environ.get("MPIEXEC") or (str(beside) if beside.exists() else shutil.which("mpirun"))


@lru_cache
def mpi_version() -> str | None:
    """``mpirun (Open MPI) 5.0.11``; None where there is no MPI."""
    mpirun = find_mpirun()
    if mpirun is None:
        return None
    lines = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, env=job_environment(1)
    ).stdout.splitlines()
    return lines[0].strip() if lines else None


def job_environment(threads: int) -> dict[str, str]:
    """This process's environment, made fit for the ranks of a job with ``threads`` threads each."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(_INHERITED) and k not in _INHERITED_NAMES
    }
    path = os.pathsep.join([str(_ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    allow = (
        dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        if os.getuid() == 0
        else {}
    )
    return (
        kept
        | dict.fromkeys(_THREADS, str(threads))
        | allow
        | {"PYTHONPATH": path, "HOROVOD_CYCLE_TIME": "0.1"}
    )


def command(ranks: int, arguments: Sequence[str], transport: str = "mpi") -> list[str]:
    """Return the launcher's command that runs ``python arguments...`` on ``ranks`` ranks.

    One rank goes through the launcher as well, so that all cases pay for it.

    Args:
        transport: ``mpi`` for mpirun, ``torch`` for torchrun.

    Raises:
        ValueError: there is no mpirun.
    """
    if transport == "torch":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        return [*run, str(ranks), "--no-python", sys.executable, *arguments]
    mpirun = find_mpirun()
    if mpirun is None:
        raise ValueError(
            f"there is no mpirun on PATH nor beside this Python, and {ranks} ranks need one: load the site's MPI module, or set MPIEXEC"
        )
    flags = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in (mpi_version() or "") else []
    return [mpirun, *flags, "-n", str(ranks), sys.executable, *arguments]


def run_ranks(
    ranks: int,
    arguments: Sequence[str],
    threads: int = 1,
    timeout: float = 600.0,
    environment: dict[str, str] | None = None,
    transport: str = "mpi",
) -> dict:
    """Run ``python arguments...`` on ``ranks`` ranks in the repository's root and return the JSON object of its last line.

    Args:
        threads: CPU threads a rank.
        timeout: seconds; then the whole job is ended.
        environment: more variables for the ranks.
        transport: ``mpi`` for mpirun, ``torch`` for torchrun.

    Raises:
        RuntimeError: the job failed, hung, or printed no JSON at the end; with the end of what it said.
    """
    job = subprocess.Popen(
        command(ranks, arguments, transport), cwd=_ROOT, env=job_environment(threads) | (environment or {}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    name = f"`python {shlex.join(arguments)}` on {ranks} ranks"
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"{name} took more than {timeout:g} s and was ended: is a rank missing from a collective? Else raise timeout"
        ) from None
    finally:
        _end(job)
    if job.returncode != 0:
        raise RuntimeError(f"{name} ended with status {job.returncode}:\n{_tail(err or out)}")
    return last_json(out, name)


def last_json(text: str, name: str = "the command") -> dict:
    """The JSON object in the last line that is not empty."""
    last = (text.strip().splitlines() or [""])[-1]
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RuntimeError(
            f"the last line of {name} is {last[:200]!r}, not a JSON object: print(json.dumps(...)) at the end of rank 0"
        )
    return found


def _tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _end(job: subprocess.Popen) -> None:
    """End mpirun, which ends its ranks; by force after 5 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is not None:
            return
        os.killpg(job.pid, number)
        try:
            job.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            continue
