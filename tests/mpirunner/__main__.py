"""`python -m mpirunner FOLDER`: one rank of a job. Its verdicts go to files; its exit status only says whether it ran through."""

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI  # before Horovod, whose shutdown aborts otherwise

from .rank import Rank

folder, comm = Path(sys.argv[1]), MPI.COMM_WORLD
job = json.loads((folder / "job.json").read_text())
stack = (folder / f"rank{comm.rank}.stack").open("w")
faulthandler.enable(stack)  # for a crash, and for the parent's SIGABRT after a timeout

rank = Rank(folder, job, comm)
ended = pytest.main(
    [*job["args"], "-p", "mpirunner.plugin", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler",
     f"--basetemp={folder / f't{comm.rank}'}"],
    plugins=[rank],
)  # fmt: skip
ran_through = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
if ended not in ran_through:
    os._exit(int(ended))
