"""Report of this process's progress to its guardian, which ends a job that hangs.

The program reports its progress by :func:`phase` and :func:`heartbeat`, which cost about a
microsecond. A small process beside it, the *guardian* (:mod:`distseg.comm.guardian`), reads these
reports and compares them with the reports of other ranks. The guardian ends a job in which nothing
has moved for ``run.timeout``. A thread could not do this: a rank that is stopped, waits for a disk,
or is inside a call of MPI or HDF5 that holds Python's lock runs none of its threads.

::

    rank 0            guardian 0  <---- table: who stands where ----  guardian 1            rank 1
      |  memory page ---> |                                              | <--- memory page   |
      +-- phase, beat     +---- all ranks still, or one is gone: say so, write stacks, end ---+
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distseg.comm import progress
from distseg.comm.alone import Alone
from distseg.comm.communicator import Communicator
from distseg.comm.guardian import FOR_GOOD, LEFT, PAGE, UNWATCHED
from distseg.comm.launch import is_program
from distseg.comm.progress import heartbeat, limit, phase, waits

_guardian: subprocess.Popen | None = None
_LEAVES_WITHIN = 0.01  # seconds between two looks whether all ranks leave
_attended = False  # True after a call of attend()
_begun = False  # True once connecting() has tried to start a guardian
_joined = False  # True once the guardians of all ranks are connected


class Imports:
    """Import hook that reports each imported module to the guardian as progress.

    Without this hook, a process whose packages import slowly would count as hanging. The hook is
    the first entry of ``sys.meta_path``.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> None:
        """Report the import of ``name`` to the guardian, and return None.

        Python then asks the other entries of ``sys.meta_path`` for the module.
        """
        heartbeat(f"import of {name}")


@contextmanager
def guarded(rank: int = 0, seconds: float = 1800.0) -> Iterator[None]:
    """Watch this process inside the context: a guardian ends it if it makes no progress.

    If the process has a guardian already, no other one is started, and the end of the context
    restores the previous limit. On other systems than Linux nothing is watched.

    Args:
        rank: this process's rank, as the launcher gives it.
        seconds: the longest time without progress, in seconds; 0 for no limit. Inside the context,
            :func:`limit` can change it.
    """
    if progress.shared() or not sys.platform.startswith("linux"):
        before = progress.limit_now()
        try:
            yield
        finally:
            limit(before)
        return
    _start(rank)
    if progress.shared():
        sys.meta_path.insert(0, Imports)
    limit(seconds)
    try:
        yield
    finally:
        _stop()


@contextmanager
def connecting(rank: int, seconds: float) -> Iterator[None]:
    """Start a guardian for a program's own loop, and end this rank if it connects to no other rank.

    Inside the context the ranks of the job connect to each other. If another rank never takes part,
    for instance because its program has ended, the guardian ends this rank after ``seconds``. The
    guardian stays after the context, for :func:`attend`. A process that has a guardian keeps it. On
    other systems than Linux nothing is watched.

    Args:
        rank: this process's rank, as the launcher gives it.
        seconds: the longest time for the body of the context; 0 for no limit.
    """
    global _begun
    if not (_begun or _attended or progress.shared()) and sys.platform.startswith("linux"):
        _begun = True
        _start(rank)
        phase("connecting the ranks")
    waits("all ranks to call init_mesh", seconds)
    try:
        yield
    finally:
        waits("")


def attend(comm: Communicator) -> None:
    """Start guardians that end the job if a rank leaves while all other ranks wait for it.

    A rank leaves when its process ends, as after ``sys.exit()``. Ranks may leave at different
    times, and a rank may make no progress for any time, because the program around distseg may do
    other work. All ranks of the job must call this function together. The second call, or a call
    in a job that has guardians already, does nothing.

    Args:
        comm: the communicator of all ranks of the job.
    """
    global _attended
    # Do not ask here whether this rank has a guardian: a rank that could not start one must make
    # the same calls as all other ranks.
    if comm.size == 1 or _attended or _joined or not sys.platform.startswith("linux"):
        return
    _attended = True
    if not _begun:
        _start(comm.rank)
    phase("in the program's own code")
    join(comm)
    # Over torch.distributed, a process that ends closes connections that others may still use.
    # MPI itself lets no process end before all others.
    last = comm.Split(0, comm.rank) if comm.transport == "torch" else Alone()
    atexit.register(_depart, os.getpid(), last)


def _depart(pid: int, comm: Communicator) -> None:
    """Tell the guardian that this rank leaves the job, and wait until all ranks of ``comm`` leave.

    This is the last function that the process runs (``atexit``).

    Args:
        pid: the id of the process that registered this function. In its copies, made by fork, the
            function does nothing.
        comm: a communicator that no other messages use.
    """
    if os.getpid() != pid:
        return
    phase("has left, because its program has ended")
    waits("")
    progress.ending(LEFT)
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(ConnectionError):
        everyone = comm.Ibarrier()
        while not everyone.Test():
            time.sleep(_LEAVES_WITHIN)


def join(comm, folder: str | Path | None = None) -> None:
    """Connect the guardians of all ranks of ``comm``, which then decide together if the job hangs.

    All ranks of ``comm`` must call this function together. The second call does nothing.

    Args:
        folder: the folder for the stacks of all ranks, if the job is ended. None to print only the
            stacks of rank 0.
    """
    global _joined
    if _joined:
        return
    here = (
        None
        if not progress.shared()
        else {"host": socket.gethostname()}
        if comm.size == 1
        else _ask_address()
    )
    every = comm.allgather(here)
    _joined = here is not None
    if here is not None:
        hosts = [one["host"] if one else "?" for one in every]
        _send(
            join=hosts,
            monitors=every[:2],
            rank=comm.rank,
            folder=None if folder is None else str(Path(folder).absolute()),
        )


def _start(rank: int) -> None:
    """Start the guardian of this process and share a page of memory with it.

    If the system allows no more processes, print a warning and go on without a guardian.
    """
    global _guardian
    memory, stacks = os.memfd_create("distseg-watch"), os.memfd_create("distseg-stacks")
    os.ftruncate(memory, PAGE)
    program = Path(__file__).with_name("guardian.py")
    arguments = map(str, (memory, stacks, rank, os.getpid()))
    try:
        _guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(memory, stacks),
            text=True,
        )
    # The system allows no more processes. The run goes on without a guardian.
    except OSError as e:
        print(
            f"distseg: rank {rank} has no guardian ({e}), so it will not be ended if it hangs",
            file=sys.stderr,
        )
        return
    progress.share(mmap.mmap(memory, PAGE))
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
    os.close(memory)  # The mapping stays. `stacks` stays open for the fault handler.


def _ask_address() -> dict:
    """Return the host, addresses, port and secret with which others reach this rank's guardian."""
    _send(listen=True)
    return json.loads(_guardian.stdout.readline())


def _send(**what) -> None:
    _guardian.stdin.write(json.dumps(what) + "\n")
    _guardian.stdin.flush()


def _stop() -> None:
    """Tell the guardian that this process is no longer watched.

    The guardian of a program runs on until the program ends.
    """
    global _guardian, _joined
    if not progress.shared():
        return
    # If the process is no program of distseg, only the watch ends, and the process goes on.
    progress.ending(FOR_GOOD if is_program() else UNWATCHED)
    faulthandler.unregister(signal.SIGQUIT)
    sys.meta_path.remove(Imports)
    progress.share(None)
    _joined = False
    _guardian.stdin.close()
    _guardian.stdout.close()
    # The guardian of a program runs on until the program has ended.
    if not is_program():
        _guardian.wait()
    _guardian = None
