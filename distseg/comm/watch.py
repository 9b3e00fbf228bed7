"""Report of this process's progress to its guardian, which ends a job that hangs.

The program reports its progress by :func:`phase` and :func:`heartbeat`, which cost about a
microsecond. A small process beside it, the *guardian* (:mod:`distseg.comm.guardian`), reads this
and compares it with other ranks. It ends a job in which nothing has moved for ``run.timeout``. A
thread could not do this: a rank that is stopped, waits for a disk, or is inside a call of MPI or
HDF5 that holds Python's lock runs none of its threads.

::

    rank 0            guardian 0  <---- table: who stands where ----  guardian 1            rank 1
      |  memory page ---> |                                              | <--- memory page   |
      +-- phase, beat     +---- all ranks still, or one is gone: say so, write stacks, end ---+
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distseg.comm.guardian import DOING, ENDING, FOR_GOOD, LIMIT, MOVES, PAGE, PHASE, TEXT, WAITING
from distseg.comm.launch import is_program

_page: mmap.mmap | None = None  # shared with the guardian; None without a guardian
_guardian: subprocess.Popen | None = None
_moves = 0


def phase(text: str) -> None:
    """Report to the guardian that a part of the work starts, such as ``epoch 2, step 14``."""
    if _page is not None:
        _write(PHASE, text)
        _write(DOING, "")
        _move()


def heartbeat(text: str) -> None:
    """Report to the guardian the next operation of the current phase (:func:`phase`).

    Args:
        text: the operation, such as ``forward of stage 1, micro-batch 0``.
    """
    if _page is not None:
        _write(DOING, text)
        _move()


def waits(text: str) -> None:
    """Report to the guardian what this rank waits for; an empty text says that the wait is over."""
    if _page is not None:
        _write(WAITING, text)
        if not text:
            _move()


class Imports:
    """Import hook that reports a heartbeat for each imported module.

    So a process whose packages import slowly is not taken for one that hangs. The hook is the first
    entry of ``sys.meta_path``.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> None:
        heartbeat(f"import of {name}")


def limit(seconds: float) -> None:
    """Set the longest time in seconds that a rank may make no progress; 0 stands for no limit."""
    if _page is not None:
        _page[LIMIT : LIMIT + 8] = struct.pack("d", seconds)


def watched() -> bool:
    """Return True if a guardian watches this process."""
    return _page is not None


def ending() -> None:
    """Tell the guardian that this process ends by itself, so that it is not taken for lost.

    If the process is no program of distseg (:func:`distseg.comm.launch.is_program`), only the
    guardian's watch ends, and the process goes on.
    """
    if _page is not None:
        _page[ENDING] = FOR_GOOD if is_program() else 1


def _move() -> None:
    global _moves
    _moves += 1
    _page[MOVES : MOVES + 8] = _moves.to_bytes(8, "little")


def _write(at: int, text: str) -> None:
    found = text.encode(errors="replace")[: TEXT - 1] + b"\0"
    _page[at : at + len(found)] = found


@contextmanager
def guarded(rank: int = 0, seconds: float = 1800.0) -> Iterator[None]:
    """Start a guardian that ends this process if it makes no progress inside the context.

    Nothing is started if the process has a guardian already, or if the system is not Linux.

    Args:
        rank: this process's rank, as the launcher gives it.
        seconds: the longest time without progress (:func:`limit`).
    """
    if _page is not None or not sys.platform.startswith("linux"):
        yield
        return
    _start(rank)
    limit(seconds)
    try:
        yield
    finally:
        _stop()


def join(comm, folder: str | Path | None = None) -> None:
    """Connect the guardians of all ranks of ``comm``, which then decide together if the job hangs.

    All ranks of ``comm`` must call this function together.

    Args:
        folder: the folder for the stacks of all ranks, if the job is ended. None to print only the
            stacks of rank 0.
    """
    here = (
        None
        if _page is None
        else {"host": socket.gethostname()}
        if comm.size == 1
        else _ask_address()
    )
    every = comm.allgather(here)
    if here is not None:
        hosts = [one["host"] if one else "?" for one in every]
        _send(
            join=hosts,
            monitors=every[:2],
            rank=comm.rank,
            folder=None if folder is None else str(Path(folder).absolute()),
        )


def _start(rank: int) -> None:
    global _page, _guardian
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
    _page = mmap.mmap(memory, PAGE)
    sys.meta_path.insert(0, Imports)
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
    global _page, _guardian
    if _page is None:
        return
    ending()
    faulthandler.unregister(signal.SIGQUIT)
    sys.meta_path.remove(Imports)
    _page = None
    _guardian.stdin.close()
    _guardian.stdout.close()
    # The guardian of a program runs on until the program has ended.
    if not is_program():
        _guardian.wait()
    _guardian = None
