"""Who am I under each launcher, fair threads, and how a job ends as one."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import distseg
from distseg.comm import launch
from distseg.comm.launch import JointFailure, end_as_one, made_once, raise_jointly, set_up
from distseg.comm.launchers import LAUNCHERS, Process, contradiction, identify

SLURM = dict(
    SLURM_PROCID="5",
    SLURM_STEP_NUM_TASKS="8",
    SLURM_LOCALID="1",
    SLURM_STEP_TASKS_PER_NODE="4(x2)",
    SLURM_NTASKS="8",
)
MPIRUN = dict(
    OMPI_COMM_WORLD_RANK="3",
    OMPI_COMM_WORLD_SIZE="6",
    OMPI_COMM_WORLD_LOCAL_RANK="1",
    OMPI_COMM_WORLD_LOCAL_SIZE="2",
)
JSRUN = dict(
    JSM_NAMESPACE_RANK="11",
    JSM_NAMESPACE_SIZE="12",
    JSM_NAMESPACE_LOCAL_RANK="5",
    JSM_NAMESPACE_LOCAL_SIZE="6",
)
TORCHRUN = dict(RANK="2", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
HYDRA = dict(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
MVAPICH = dict(
    MV2_COMM_WORLD_RANK="2",
    MV2_COMM_WORLD_SIZE="4",
    MV2_COMM_WORLD_LOCAL_RANK="0",
    MV2_COMM_WORLD_LOCAL_SIZE="2",
)
ALLOCATION = dict(
    SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="32", SLURM_JOB_ID="7"
)  # what sbatch's script itself has
PALS = dict(PALS_RANKID="9", PALS_NODEID="2", PALS_LOCAL_RANKID="1", PALS_LOCAL_SIZE="4")
CRAY = dict(PMI_RANK="9", PMI_SIZE="12", PMI_LOCAL_RANK="1", PMI_LOCAL_SIZE="4")
FLUX = dict(
    FLUX_TASK_RANK="6",
    FLUX_JOB_SIZE="8",
    FLUX_TASK_LOCAL_ID="2",
    FLUX_JOB_NNODES="2",
    PMI_RANK="6",
    PMI_SIZE="8",
)
PMIX = dict(PMIX_RANK="1", PMIX_NAMESPACE="prterun-1")
ALONE = Process(0, 1, 0, 1)


@pytest.mark.parametrize(
    "environment, process",
    [
        ({}, ALONE),
        (MPIRUN, Process(3, 6, 1, 2)),
        (JSRUN, Process(11, 12, 5, 6)),
        (SLURM, Process(5, 8, 1, 4)),
        (TORCHRUN, Process(2, 4, 0, 2)),
        (HYDRA, Process(1, 2, 1, 2)),
        (MVAPICH, Process(2, 4, 0, 2)),
        ({k.replace("MV2", "MVP"): v for k, v in MVAPICH.items()}, Process(2, 4, 0, 2)),
        (CRAY, Process(9, 12, 1, 4)),
        ({**PALS, **CRAY}, Process(9, 12, 1, 4)),
        (PALS, Process(9, None, 1, 4)),
        ({**PALS, "PALS_RANKID": "0"}, Process(0, None, 1, 4)),
        (
            {**PALS, **SLURM},
            Process(5, 8, 1, 4),
        ),  # Slurm's plugin for Cray MPICH sets PALS's names too, without a size
        (FLUX, Process(6, 8, 2, None)),
        ({**FLUX, **PALS}, Process(9, 8, 1, 4)),
        ({**FLUX, "FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0", **HYDRA}, Process(1, 2, 1, 2)),
        (PMIX, Process(1, None, None, None)),
        ({"PMIX_RANK": "0"}, Process(0, None, None, None)),
        ({**PMIX, **SLURM}, Process(5, 8, 1, 4)),
        ({**PMIX, **MPIRUN}, Process(3, 6, 1, 2)),
        ({"ALPS_APP_PE": "4"}, Process(4, None, None, None)),
        (ALLOCATION, ALONE),
        ({**ALLOCATION, "SLURM_PROCID": "3"}, Process(3, None, 0, None)),
        ({**ALLOCATION, **MPIRUN}, Process(3, 6, 1, 2)),
        ({**SLURM, **MPIRUN}, Process(3, 6, 1, 2)),
        ({**SLURM, **HYDRA}, Process(1, 2, 1, 2)),
        ({**MPIRUN, **TORCHRUN}, Process(2, 4, 0, 2)),
        ({"RANK": "3", **MPIRUN}, Process(3, 6, 1, 2)),
        ({"RANK": "0"}, ALONE),
        ({"RANK": "captain", "WORLD_SIZE": "4", "PMI_RANK": "", "PMI_SIZE": ""}, ALONE),
        (dict(PMI_RANK="1", PMI_SIZE="2"), Process(1, 2, None, None)),
    ],
)
def test_identify(environment, process):
    assert identify(environment) == process


@pytest.mark.parametrize(
    "environment, ranks, told",
    [
        ({}, 1, None),
        ({}, 6, None),  # no launcher is known: MPI knows
        (ALLOCATION, 1, None),
        (ALLOCATION, 32, None),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", **SLURM},
            1,
            None,
        ),  # mpirun -n 1 in a task of srun: alone on purpose
        (MPIRUN, 6, None),
        (PMIX, 4, None),
        ({"PMIX_RANK": "0"}, 1, None),  # prterun -n 1
        (PALS, 12, None),
        (FLUX, 8, None),
        (
            SLURM,
            1,
            "srun started 8 processes (SLURM_STEP_NUM_TASKS), but MPI sees 1: .* srun --mpi=pmix .*built for another MPI",
        ),
        (
            TORCHRUN,
            1,
            "torchrun started 4 processes (WORLD_SIZE), but MPI sees 1: .* no MPI processes: set run.transport to torch, .* or start with mpirun -n 4 or srun",
        ),
        (
            TORCHRUN,
            2,
            "torchrun started 4 processes (WORLD_SIZE), but MPI sees 2: .* without RANK and WORLD_SIZE",
        ),
        (
            MPIRUN,
            1,
            "Open MPI's mpirun started 6 processes (OMPI_COMM_WORLD_SIZE), but MPI sees 1: mpi4py (MPICH 4) was built for another MPI .*reinstall mpi4py",
        ),
        (HYDRA, 1, "mpiexec started 2 processes (PMI_SIZE), but MPI sees 1: "),
        (JSRUN, 6, "jsrun started 12 processes (JSM_NAMESPACE_SIZE), but MPI sees 6: "),
        (
            MVAPICH,
            1,
            "MVAPICH's mpirun started 4 processes (MV2_COMM_WORLD_SIZE), but MPI sees 1: ",
        ),
        (FLUX, 1, "flux run started 8 processes (FLUX_JOB_SIZE), but MPI sees 1: "),
        ({**PALS, **CRAY}, 1, "PALS's mpiexec started 12 processes (PMI_SIZE), but MPI sees 1: "),
        (
            PALS,
            1,
            "PALS's mpiexec started this process as rank 9 (PALS_RANKID), but MPI sees it alone: ",
        ),
        (
            PMIX,
            1,
            "a launcher with PMIx started this process as rank 1 (PMIX_RANK), but MPI sees it alone: .*; or unset PMIX_RANK, if it is a leftover",
        ),
        (
            {"ALPS_APP_PE": "4"},
            1,
            "aprun started this process as rank 4 (ALPS_APP_PE), but MPI sees it alone: ",
        ),
        (
            {**ALLOCATION, "SLURM_PROCID": "3"},
            1,
            "srun started this process as rank 3 (SLURM_PROCID), but MPI sees it alone: ",
        ),
    ],
)
def test_several_processes_of_which_each_believes_to_be_alone(environment, ranks, told):
    found = contradiction(ranks, "MPICH 4, release", environment)
    if told is None:
        assert found is None
    else:
        assert re.match(re.sub(r"([()])", r"\\\1", told), found), found


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "environment, told", [(SLURM | {"SLURM_PROCID": "0"}, 1), (SLURM, 0), ({"PMIX_RANK": "1"}, 1)]
)
def test_such_a_process_ends_at_once_and_all_of_them_say_why_once(environment, told):
    source = "from distseg.comm.launch import end_as_one, world; end_as_one(lambda: print('alone', world().size))"
    inherited = ("OMPI_", "PMIX_", "PRTE_")
    mine = {k: v for k, v in os.environ.items() if not k.startswith(inherited)} | {
        "PYTHONPATH": str(Path(distseg.__file__).parents[1])
    }
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=mine | environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr.count("distseg: error: ")) == (2, "", told), (
        done
    )


@pytest.mark.parallel(2)
def test_set_up_gives_a_cpu_and_refuses_a_gpu_that_is_not_there(comm):
    import torch

    before = torch.get_num_threads()
    try:
        found = set_up(comm, "cpu", threads=2)
        assert (found.device.type, str(found.threads)) == (
            "cpu",
            "2 CPU threads a rank (run.threads)",
        )
        assert torch.get_num_threads() == 2
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="run.device is cuda, but this node shows no GPU"):
                set_up(comm, "cuda")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parallel([1, 2, 3])
def test_what_rank_0_alone_makes(comm):
    made = []

    def make():
        made.append(comm.rank)
        return {"made by": comm.rank}

    assert made_once(comm, make) == {"made by": 0}
    assert made == [0] * (comm.rank == 0)
    with pytest.raises(JointFailure, match="a mistake of rank 0"):
        made_once(comm, lambda: _fails(f"a mistake of rank {comm.rank}"))


def _fails(text: str):
    raise ValueError(text)


@pytest.mark.parallel(3)
@pytest.mark.parametrize(
    "failing, message",
    [([1], "rank 1: no such file"), ([1, 2], "rank 1: no such file"), ([0, 1, 2], "no such file")],
)
def test_an_error_on_one_rank_is_one_message_on_all(comm, failing, message):
    with pytest.raises(JointFailure) as found, raise_jointly(comm):
        if comm.rank in failing:
            raise OSError("no such file")
    assert str(found.value) == message
    assert (found.value.__cause__ is not None) == (comm.rank in failing)
    with raise_jointly(comm):
        pass


def test_a_mistake_of_ours_comes_with_its_traceback():
    from distseg.comm.collective import Alone

    with (
        pytest.raises(JointFailure, match="(?s)Traceback.*test_launch.py.*ZeroDivisionError"),
        raise_jointly(Alone()),
    ):
        raise ZeroDivisionError


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
    for launcher in LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
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
    """Else an mpirun below this process has ranks that cannot reach each other."""
    source = "import os; from distseg.comm.launch import world; before = dict(os.environ); world(); assert dict(os.environ) == before"
    inherited = ("OMPI_", "PMIX_", "PRTE_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(inherited)} | {
        "PYTHONPATH": str(Path(distseg.__file__).parents[1])
    }
    subprocess.run([sys.executable, "-c", source], env=environment, check=True)


PROGRAM = """
from distseg.comm.launch import end_as_one, raise_jointly, world

def main():
    comm = world()
    comm.Barrier()
    {body}
    comm.Barrier()

end_as_one(main)
"""


@pytest.mark.timeout(40)
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "body, message",
    [
        (
            "if comm.rank == 1: raise ValueError('the disk is full')",
            "distseg: error: rank 1: the disk is full",
        ),
        ("raise ValueError('the disk is full')", "distseg: error: rank 0: the disk is full"),
        (
            "with raise_jointly(comm): assert comm.rank == 0, 'the disk is full'",
            "distseg: error: rank 1: Traceback",
        ),
        (
            "with raise_jointly(comm): open('/nowhere/the disk is full')",
            "distseg: error: [Errno 2] No such file or directory: '/nowhere/the disk is full'",
        ),
    ],
)
def test_a_real_job_ends_within_seconds_and_says_why_once(mpirun, tmp_path, body, message):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM).format(body=body))
    done = mpirun(3, script, timeout=20, env={"PYTHONPATH": str(Path(distseg.__file__).parents[1])})
    assert done.seconds < 10
    assert done.returncode != 0
    assert done.stderr.count(message) == 1 and done.stderr.count("distseg: error") == 1, str(done)


def test_free_memory_goes_back_where_a_process_grows_by_gaps_not_by_its_tiles(monkeypatch):
    """A tile in the middle of an image takes more than the first at its corner: that is no gap."""
    released, resident = [], 0.0
    monkeypatch.setattr(launch, "release_freed_memory", lambda: released.append(resident))
    monkeypatch.setattr(launch, "resident_memory", lambda: resident)
    trimmer = launch.GapTrimmer()
    for resident in (500e6, 530e6, 531e6, 532e6, 540e6):  # noqa: B007  (resident_memory returns it)
        trimmer.after_tile()
    assert released == [0.0, 530e6], (
        "once at the beginning, and once to see what a larger tile takes by itself"
    )
    for resident in (545e6, 552e6):  # noqa: B007
        trimmer.after_tile()
    assert released[2:] == [552e6], "gaps: larger than a tile took that found none"
    resident = 900e6
    trimmer.after_tile(held=360e6)
    resident = 905e6
    trimmer.after_tile(held=360e6)
    assert len(released) == 3, "what is held is no gap"


def test_a_script_under_torchrun_does_not_run_several_serial_programs():
    """Each process makes a mesh of one rank by itself, which MPI would let it."""
    source = "from mpi4py import MPI; import distseg; distseg.Mesh(MPI.COMM_WORLD)"
    inherited = ("OMPI_", "PMIX_", "PRTE_")
    mine = {k: v for k, v in os.environ.items() if not k.startswith(inherited)}
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    home = {"PYTHONPATH": str(Path(distseg.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=mine | torchrun | home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode
        and "torchrun started 2 processes (WORLD_SIZE), but MPI sees 1" in done.stderr
    )
