"""Where this process stands, for whoever must tell a job that works from one that hangs.

The work says what it is at by :func:`phase` and :func:`heartbeat`; both cost a microsecond. A small process of its own, the
*guardian* (:mod:`distseg.comm.guardian`), reads that, compares it with the other ranks', and ends a job in which nothing has
moved for ``run.timeout``. It is a process and no thread because a rank that is stopped, that waits for a disk, or that
MPI or HDF5 hold inside a call which keeps Python's lock has no thread that could still notice anything.

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
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from distseg.comm.guardian import DOING, ENDING, FOR_GOOD, LIMIT, MOVES, PAGE, PHASE, TEXT, WAITING
from distseg.comm.launch import is_program

_page: mmap.mmap | None = None  # shared with the guardian; None where nobody watches
_guardian: subprocess.Popen | None = None
_moves = 0


def phase(text: str) -> None:
    """Begin a part of the work, such as ``epoch 2, step 14``."""
    if _page is not None:
        _write(PHASE, text)
        _write(DOING, "")
        _move()


def heartbeat(text: str) -> None:
    """Begin the next operation of a phase, such as ``forward of stage 1, micro-batch 0``."""
    if _page is not None:
        _write(DOING, text)
        _move()


def waits(text: str) -> None:
    """Say that this rank waits for another, and for what; an empty text: no longer."""
    if _page is not None:
        _write(WAITING, text)
        if not text:
            _move()


class Imports:
    """Beats at each module that is imported, as some packages take their time; first in ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> None:
        heartbeat(f"import of {name}")


def limit(seconds: float) -> None:
    """Set how long a rank may stand still; 0: for ever."""
    if _page is not None:
        _page[LIMIT : LIMIT + 8] = struct.pack("d", seconds)


def watched() -> bool:
    """Whether a guardian watches this process."""
    return _page is not None


def ending() -> None:
    """Tell the guardians that this process ends by itself, so that its end is no news."""
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
    """Inside, a guardian watches this process, and ends it if it stands still for so long (:func:`limit`).

    Args:
        rank: of this process, as the launcher tells.
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
    """Have the guardians of all ranks of ``comm`` watch together from now on. Collective.

    Args:
        folder: where the stacks of a job that was ended are written; its parent is there.
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
        _tell(
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
    try:
        _guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), *map(str, (memory, stacks, rank, os.getpid()))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(memory, stacks), text=True,
        )  # fmt: skip
    except OSError as e:  # no more processes: the work itself may still do
        print(
            f"distseg: rank {rank} has no guardian ({e}): should it hang, nobody ends it",
            file=sys.stderr,
        )
        return
    _page = mmap.mmap(memory, PAGE)
    sys.meta_path.insert(0, Imports)
    faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
    os.close(memory)  # the mapping stays; of stacks, the fault handler keeps the descriptor


def _ask_address() -> dict:
    """Where this rank's guardian can be reached by the others'."""
    _tell(listen=True)
    return json.loads(_guardian.stdout.readline())


def _tell(**what) -> None:
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
    if not is_program():  # whose guardian sees it off
        _guardian.wait()
    _guardian = None
