"""Files that are whole or not there: written under another name, brought to the disk, renamed."""

from __future__ import annotations

import errno
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


@contextmanager
def naming(path: Path, needed: int) -> Iterator[None]:
    """An error of the disk inside names the file, what it takes, and what is free."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(e.errno, f"{path} could not be written: {os.strerror(e.errno)}, it takes {needed / 1e6:.1f} MB, and {free(path) / 1e6:.1f} MB are free: make room") from e


def free(path: Path) -> int:
    """Bytes that may still be written to the file system of ``path``."""
    found = os.statvfs(path if path.exists() else path.parent)
    return found.f_bavail * found.f_frsize
