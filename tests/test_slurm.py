"""A real Slurm takes what `distseg submit` writes: jobs that are cut off queue again, go on, and end as if nothing had happened."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from private_slurm import PrivateSlurm, missing

import distseg

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.timeout(300)]

# A training that keeps to the contract, without the training: told to end it takes its time, the ranks not equally, and is to be continued.
STAND_IN = """#!/bin/bash
echo "start ${SLURM_RESTART_COUNT:-0} rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, until $SLURM_JOB_END_TIME: $*"
[ -n "${CODE:-}" ] && exit "$CODE"
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && { echo "end rank $SLURM_PROCID"; exit 0; }
trap 'sleep $SLURM_PROCID; echo "checkpoint rank $SLURM_PROCID"; exit 75' TERM
echo "ready rank $SLURM_PROCID"
for i in {1..600}; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def slurm():
    with PrivateSlurm(cpus=4) as running:
        running.environment |= {"PYTHONPATH": str(Path(distseg.__file__).parents[1]), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        inherited = ("OMPI_COMM", "PMIX_", "PRTE_")
        running.environment = {k: v for k, v in running.environment.items() if not k.startswith(inherited)}
        yield running


def submit(slurm: PrivateSlurm, folder: Path, *arguments: str, **environment: str) -> str:
    """The number of the job that `distseg submit ... --submit` hands in from the folder."""
    command = [sys.executable, "-m", "distseg", "submit", *arguments, "--system", "slurm", "--gpus", "0", "--cores", "2", "--processes", "2", "--submit"]
    done = subprocess.run(command, env=slurm.environment | environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    return re.match(r"job (\d+): ", done.stdout)[1]


@pytest.fixture
def stand_in(tmp_path):
    """A folder with a config, and with a `python` that is no training."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/python"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (tmp_path / "c.yaml").write_text("mesh: {samples: 2}\ndata: {store: c.yaml}\ntrain: {output: runs/c}\n")
    return tmp_path


def wait_for(done, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_jobs_of_an_array_are_told_to_end_queue_again_and_end(slurm, stand_in):
    path = f"{stand_in / 'bin'}:{slurm.environment['PATH']}"
    start = time.time()
    job = submit(slurm, stand_in, "c.yaml", "--time", "00:05:00", "--sweep", "train.seed=7,8", PATH=path)
    logs = [stand_in / f"c.{job}_{index}.log" for index in (0, 1)]
    wait_for(lambda: all(log.exists() and log.read_text().count("ready") == 2 for log in logs), "both trainings run")
    slurm.run("scancel", "--signal=TERM", f"{job}_1")  # the last one, whose own number is that of the array
    slurm.until(f"{job}_1", "COMPLETED", 60, restarts=1)
    assert slurm.state(f"{job}_0")["JobState"] == "RUNNING" and "checkpoint" not in logs[0].read_text(), "the other one is left alone"
    slurm.run("scancel", "--signal=TERM", f"{job}_0")
    for index, log in enumerate(logs):
        ended = slurm.until(f"{job}_{index}", "COMPLETED", 60, restarts=1)
        lines = log.read_text().splitlines()
        said = lambda start: sorted(line for line in lines if line.startswith(start))
        assert (ended["Restarts"], ended["ExitCode"]) == ("1", "0:0")
        assert said("checkpoint") == ["checkpoint rank 0", "checkpoint rank 1"], "no rank was killed because the other one was faster"
        assert said("end") == ["end rank 0", "end rank 1"]
        begun = said("start")
        assert [line.split(",")[0] for line in begun] == [f"start {turn} rank {rank} of 2" for turn in (0, 1) for rank in (0, 1)]
        flags = f"-m distseg train c.yaml --train.seed {7 + index} --train.output runs/c/seed={7 + index} --train.resume true"
        assert all(line.endswith(flags) for line in begun)
        limits = [int(re.search(r"until (\d+)", line)[1]) - start for line in begun]
        assert all(290 < limit < 400 for limit in limits) and limits[2] > limits[0], "each turn has a limit of its own"


def test_another_exit_code_ends_the_job(slurm, stand_in):
    job = submit(slurm, stand_in, "c.yaml", CODE="3", PATH=f"{stand_in / 'bin'}:{slurm.environment['PATH']}")
    ended = slurm.until(job, "FAILED|COMPLETED", 30)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "0")
