"""Who am I under each launcher, fair threads, and how a job ends as one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import distseg
from distseg.launch import JointFailure, Process, end_as_one, fair_threads, identify, set_up, together

SLURM = dict(SLURM_PROCID="5", SLURM_STEP_NUM_TASKS="8", SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="4(x2)", SLURM_NTASKS="8")
MPIRUN = dict(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="6", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2")
JSRUN = dict(JSM_NAMESPACE_RANK="11", JSM_NAMESPACE_SIZE="12", JSM_NAMESPACE_LOCAL_RANK="5", JSM_NAMESPACE_LOCAL_SIZE="6")
TORCHRUN = dict(RANK="2", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
HYDRA = dict(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
ALLOCATION = dict(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="32", SLURM_JOB_ID="7")  # what sbatch's script itself has


@pytest.mark.parametrize(
    "environment, process",
    [
        ({}, Process(0, 1, 0, 1)),
        (MPIRUN, Process(3, 6, 1, 2)),
        (JSRUN, Process(11, 12, 5, 6)),
        (SLURM, Process(5, 8, 1, 4)),
        (TORCHRUN, Process(2, 4, 0, 2)),
        (HYDRA, Process(1, 2, 1, 2)),
        (ALLOCATION, Process(0, 1, 0, 1)),
        ({**ALLOCATION, **MPIRUN}, Process(3, 6, 1, 2)),
        ({**SLURM, **MPIRUN}, Process(3, 6, 1, 2)),
        ({**SLURM, **HYDRA}, Process(1, 2, 1, 2)),
        ({**MPIRUN, **TORCHRUN}, Process(2, 4, 0, 2)),
        ({"RANK": "3", **MPIRUN}, Process(3, 6, 1, 2)),
        (dict(PMI_RANK="1", PMI_SIZE="2"), Process(1, 2, None, None)),
    ],
)
def test_identify(environment, process):
    assert identify(environment) == process


@pytest.mark.parametrize(
    "cores, threads",
    [
        (["0123", "0123"], [2, 2]),
        (["0123", "0123", "0123"], [1, 1, 1]),
        (["01", "23"], [2, 2]),
        (["0123"], [4]),
        (["0", "0", "0"], [1, 1, 1]),
        (["0123", "01"], [3, 1]),
    ],
)
def test_each_core_is_shared_evenly(cores, threads):
    allowed = [frozenset(c) for c in cores]
    assert [fair_threads(allowed, me) for me in range(len(cores))] == threads


@pytest.mark.parallel(2)
def test_set_up_gives_a_cpu_and_refuses_a_gpu_that_is_not_there(comm):
    import torch

    before = torch.get_num_threads()
    try:
        assert set_up(comm, "cpu", threads=2).type == "cpu"
        assert torch.get_num_threads() == 2
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="run.device is cuda, but this node shows no GPU"):
                set_up(comm, "cuda")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parallel(3)
@pytest.mark.parametrize(
    "failing, message",
    [([1], "rank 1: no such file"), ([1, 2], "rank 1: no such file"), ([0, 1, 2], "no such file")],
)
def test_an_error_on_one_rank_is_one_message_on_all(comm, failing, message):
    with pytest.raises(JointFailure) as found, together(comm):
        if comm.rank in failing:
            raise OSError("no such file")
    assert str(found.value) == message
    assert (found.value.__cause__ is not None) == (comm.rank in failing)
    with together(comm):
        pass


def test_a_mistake_of_ours_comes_with_its_traceback():
    from distseg.comm.collective import Alone

    with pytest.raises(JointFailure, match="(?s)Traceback.*test_launch.py.*ZeroDivisionError"), together(Alone()):
        1 / 0


@pytest.mark.parametrize(
    "main, code, told",
    [
        (lambda: None, 0, ""),
        (lambda: 0, 0, ""),
        (lambda: 1, 1, ""),
        (lambda: fail(JointFailure("both of us")), 2, "distseg: error: both of us\n"),
        (lambda: fail(ValueError("too fine")), 2, "distseg: error: too fine\n"),
    ],
)
def test_exit_codes_of_a_lone_process(main, code, told, capsys, monkeypatch):
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        end_as_one(main)
    assert end.value.code == code
    assert capsys.readouterr().err == told


def test_a_joint_failure_is_told_by_rank_0_alone(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        end_as_one(lambda: fail(JointFailure("both of us")))
    assert (end.value.code, capsys.readouterr().err) == (2, "")


def fail(error: Exception):
    raise error


def test_what_a_lone_process_tells_open_mpi_does_not_reach_a_job_that_it_starts():
    """Else an mpirun below this process has ranks that can't reach each other."""
    source = "import os; from distseg.launch import world; before = dict(os.environ); world(); assert dict(os.environ) == before"
    inherited = ("OMPI_", "PMIX_", "PRTE_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(inherited)} | {"PYTHONPATH": str(Path(distseg.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True)


PROGRAM = """
from distseg.launch import end_as_one, together, world

def main():
    comm = world()
    comm.Barrier()
    {body}
    comm.Barrier()

end_as_one(main)
"""


@pytest.mark.timeout(40)
@pytest.mark.parametrize(
    "body, message",
    [
        ("if comm.rank == 1: raise ValueError('the disk is full')", "distseg: error: rank 1: the disk is full"),
        ("raise ValueError('the disk is full')", "distseg: error: rank 0: the disk is full"),
        ("with together(comm): assert comm.rank == 0, 'the disk is full'", "distseg: error: rank 1: Traceback"),
        ("with together(comm): open('/nowhere/the disk is full')", "distseg: error: [Errno 2] No such file or directory: '/nowhere/the disk is full'"),
    ],
)
def test_a_real_job_ends_within_seconds_and_says_why_once(mpirun, tmp_path, body, message):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM).format(body=body))
    done = mpirun(3, script, timeout=20, env={"PYTHONPATH": str(Path(distseg.__file__).parents[1])})
    assert done.seconds < 10
    assert done.returncode != 0
    assert done.stderr.count(message) == 1 and done.stderr.count("distseg: error") == 1, str(done)
