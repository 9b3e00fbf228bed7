"""What connects the ranks of a job: MPI, or torch.distributed in processes that find no mpi4py.

DISTSEG_TEST_TRANSPORT=torch pytest tests/test_exact.py    # the same tests, their ranks started by torchrun
"""

import os
import re
import sys
from pathlib import Path

import pytest

TORCH = os.environ.get("DISTSEG_TEST_TRANSPORT", "mpi") == "torch"
NAME = "torch" if TORCH else "mpi"  # as distseg names it, also the reducer that needs nothing else
needs_mpi = pytest.mark.skipif(TORCH, reason="the ranks are connected by torch.distributed")
WITHOUT_MPI = str(Path(__file__).resolve().parents[1] / "without_mpi")


def block_mpi() -> None:
    """Let neither this process nor the ones that it starts import mpi4py or Horovod."""
    sys.modules["mpi4py"] = sys.modules["horovod"] = None
    os.environ.update(without_mpi(os.environ))


def without_mpi(env) -> dict[str, str]:
    """The environment of a process that finds neither mpi4py nor Horovod."""
    path = [WITHOUT_MPI, *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(path)}


def torchrun(n: int, argv: list[str]) -> list[str]:
    """torchrun for `python argv...` on n ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [*run, str(n), "--no-python", sys.executable, *argv]


_REPORT = re.compile(  # of torchrun, on ranks that failed
    r"^E\d+ .* failed \(exitcode: (-?\d+)\).*?^Root Cause.*?^=+$\n?", re.M | re.S
)


def as_of_ranks(status: int, stderr: str) -> tuple[int, str]:
    """The exit status of the rank that failed first, and stderr without torchrun's report, which ends with status 1 itself."""
    if status != 1 or (report := _REPORT.search(stderr)) is None:
        return status, stderr
    found = int(report[1])
    return (found if found > 0 else 128 - found), _REPORT.sub("", stderr)


def world():
    """The communicator of all ranks of this job."""
    if not TORCH:
        from mpi4py import MPI  # before Horovod, whose shutdown aborts otherwise

        return MPI.COMM_WORLD
    from distseg.comm.launch import world

    return world("torch")
