"""`python -m mpirunner FOLDER`: one rank of a job. Its verdicts go to files; its exit status only says whether it ran through."""

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest

from . import launch, transport
from .helper import Claims, OneProcess, Taking
from .rank import Rank

folder = Path(sys.argv[1])
job = json.loads((folder / "job.json").read_text())
if job["alone"]:
    launch.LONE = True
    del os.environ[launch.MARK]  # the programs that its tests start are no part of a job
    comm, plugins = OneProcess(), [Taking(Claims(folder, job["tests"]))]
else:
    comm, plugins = transport.world(), []
stack = (folder / f"rank{comm.rank}.stack").open("w")
faulthandler.enable(stack)  # for a crash, and for the parent's SIGABRT after a timeout

rank = Rank(folder, job, comm)
# Hypothesis's plugin reads all modules as they are collected, for a second of each rank.
without = [
    f"no:{name}" for name in ("terminal", "cacheprovider", "faulthandler", "hypothesispytest")
]
options = [word for name in ("mpirunner.plugin", *without) for word in ("-p", name)]
ended = pytest.main(
    [*job["args"], *options, f"--basetemp={folder / f't{comm.rank}'}"], plugins=[*plugins, rank]
)
ran_through = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
if ended not in ran_through:
    os._exit(int(ended))
if transport.TORCH and rank.together:
    from distseg.comm.launch import leave

    leave()
