"""Files that are whole or not there: written under another name, brought to the disk, renamed."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Iterator


def to_disk(path: Path) -> None:
    """Do not return before a file, or what a folder lists, survives a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """The name under which to write ``path``, which appears, or is replaced, when the block ends without an error."""
    growing = path.with_name(f".{path.name}.writing")
    try:
        yield growing
        to_disk(growing)
        os.replace(growing, path)
        to_disk(path.parent)
    finally:
        growing.unlink(missing_ok=True)


def locked(path: Path, what: Path) -> IO:
    """A file that keeps other processes out of ``what`` as long as it is open, on file systems that have locks.

    Raises:
        BlockingIOError: another process is at work on it.
    """
    lock = open(path, "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise BlockingIOError(f"another process is writing {what}: wait for it, or choose another output") from None
    except OSError:
        pass
    return lock
