"""How a job of N ranks is started on this machine, and how all of it is ended.

A job is known by a folder of its own; its path stands in the environment of every process of the job (`MARK`), so that
nothing that belongs to it is missed at the end, whatever process group it moved to (Open MPI gives every rank its own).
"""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from .effort import within
from .transport import TORCH, torchrun, without_mpi

MARK = "MPIRUNNER_JOB"
LONE = False  # True in the process of a job that has no ranks (`helper`)

# What another launcher around this pytest would tell the ranks: it would be wrong for them.
INHERITED = ("OMPI_COMM_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "JSM_")
INHERITED_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks outnumber the cores
    "MKL_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",  # a killed rank says where it was
    "HOROVOD_CYCLE_TIME": "10",  # ms; its thread asks all ranks that often, and here ranks outnumber cores
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",  # it warns only: its clock would end a job that is starved
}

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # a waiting rank leaves its core to one that computes
    # One machine, so shared memory. Naming it saves the search for networks: 8 ranks start in 0.6 s instead of 1.6 s.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_opal_signal": "",  # leave a crash to Python's fault handler, which knows Python's stack
}


def job_folder() -> Path:
    """A new folder with a short path: Open MPI puts sockets in it, whose paths may have about 100 characters."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ds", dir=parent if len(parent) < 40 else "/tmp"))


def _shared_memory(folder: Path) -> Path:
    """The job's own folder for shared memory, since a rank that dies leaves its piece behind."""
    parent = Path("/dev/shm")
    return parent / folder.name if parent.is_dir() else folder


def remove(folder: Path) -> None:
    shutil.rmtree(_shared_memory(folder), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


@lru_cache
def mpirun() -> str:
    beside = Path(sys.executable).with_name(
        "mpirun"
    )  # the project's own, even when its venv is not activated
    found = os.environ.get("MPIEXEC") or (
        str(beside) if beside.exists() else shutil.which("mpirun")
    )
    if found is None:
        raise FileNotFoundError(
            f"mpirun is neither beside {sys.executable} nor on PATH; run `make setup`, load the site's MPI module, or set MPIEXEC"
        )
    return found


@lru_cache
def is_open_mpi() -> bool:
    return (
        "Open MPI" in subprocess.run([mpirun(), "--version"], capture_output=True, text=True).stdout
    )


def command(n: int, argv: list[str]) -> list[str]:
    """The launcher's command line for `python argv...` on n ranks."""
    if TORCH:
        return torchrun(n, argv)
    flags = ["--oversubscribe", "--bind-to", "none"] if is_open_mpi() else []
    return [mpirun(), *flags, "-n", str(n), sys.executable, *argv]


def environment(folder: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment, made fit for the ranks of a job."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(INHERITED) and k not in INHERITED_NAMES
    }
    bin_and_path = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    env |= ENVIRONMENT
    if not TORCH and is_open_mpi():
        env |= OPEN_MPI | {"OMPI_MCA_btl_sm_backing_directory": str(_shared_memory(folder))}
    env |= {"PATH": bin_and_path, "TMPDIR": str(folder), MARK: str(folder)} | (extra or {})
    return without_mpi(env) if TORCH else env


_LIBC = ctypes.CDLL(None)  # loaded here: little is safe between fork and exec


def _before_exec() -> None:
    """No core files; and if pytest itself is killed, its jobs end too."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(
    n: int, argv: list[str], folder: Path, env: dict | None = None, **popen
) -> subprocess.Popen:
    _shared_memory(folder).mkdir(exist_ok=True)
    return subprocess.Popen(
        command(n, argv), env=environment(folder, env), stdin=subprocess.DEVNULL, preexec_fn=_before_exec,
        start_new_session=True, **popen,
    )  # fmt: skip


def start_alone(argv: list[str], folder: Path, env: dict[str, str], **popen) -> subprocess.Popen:
    """`python argv...` as one process of a job, in this process's own environment."""
    return subprocess.Popen(
        [sys.executable, *argv], env={**os.environ, **env, MARK: str(folder)}, stdin=subprocess.DEVNULL,
        preexec_fn=_before_exec, start_new_session=True, **popen,
    )  # fmt: skip


def members(folder: Path) -> list[int]:
    """The processes of a job that still live: those whose environment carries its mark."""
    mark = f"{MARK}={folder}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
        except OSError:  # gone meanwhile, or another user's
            pass
    return found


def end(process: subprocess.Popen, folder: Path, patience: float = 3.0) -> None:
    """Ends every process of a job. The ranks get SIGABRT, so that Python's fault handler writes their stacks;
    mpirun sees them die, tidies up (shared memory, folders) and ends by itself. What is still there then is killed."""
    _signal([pid for pid in members(folder) if pid != process.pid], signal.SIGABRT)
    within(patience, process.pid, lambda: process.poll() is not None)
    _signal([process.pid] if process.poll() is None else [], signal.SIGKILL)
    process.wait()
    within(patience, os.getpid(), lambda: not _killed(members(folder)))


def _killed(pids: list[int]) -> list[int]:
    _signal(pids, signal.SIGKILL)
    return pids


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
