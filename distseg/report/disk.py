"""Atomic writes of files and folders, lock files, and clear messages for a full disk.

A file is written under a temporary name in the same folder, flushed to the disk, and renamed. So a
reader finds either the complete file or no file.

Links are never followed where another user could predict the name of a file, because this user may
have planted a link of that name in a shared folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from distseg.config.units import si

_HOST = f"{zlib.crc32(os.uname().nodename.encode()):08x}"
_GROWING = re.compile(r"\..+\.([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{8}\.writing")
_MINUTE, _HOUR = 60.0, 3600.0
_FULL = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "the quota on its disk is used up",
    errno.EFBIG: "files may not grow so large here (ulimit -f, or the file system's limit)",
}

_MAKE_ROOM = "free some space, or choose another output"


class DiskFull(OSError):
    """Error for a full disk. The message names the file and the free bytes."""


def to_disk(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk, so that they survive a loss of power."""
    with _held(path) as handle:
        os.fsync(handle)


@contextmanager
def _held(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int:
    """Return the number of bytes that this user may still write on the disk of ``path``.

    If ``path`` does not exist, the disk of its nearest existing parent folder is asked.
    """
    path = Path(path).absolute()
    found = os.statvfs(next(p for p in (path, *path.parents) if p.exists()))
    return found.f_bavail * found.f_frsize


def require_disk_space(path: Path, needed: int, what: str) -> None:
    """Raise an error if the disk of ``path`` has less than ``needed`` free bytes.

    Args:
        path: the file to be written; it need not exist.
        needed: the size of the file in bytes.
        what: the content of the file for the message, such as ``a checkpoint``.

    Raises:
        DiskFull: the space is too small. The message names the file, the needed and the free bytes.
    """
    if needed > (free := free_bytes(path)):
        sizes = f"it takes {si(needed, 'B')}, {si(free, 'B')} are free"
        raise _disk_full(
            errno.ENOSPC, f"{path} has too little space for {what}: {sizes}; {_MAKE_ROOM}"
        )


@contextmanager
def disk_full_errors(path: Path, written: Path | None = None, needed: int = 0) -> Iterator[None]:
    """Raise :class:`DiskFull` instead of any error in the block that means a full disk.

    Args:
        path: the file that the message names.
        written: the file that grows in the block. The message says how large it is.
        needed: the largest number of bytes that the file may take; 0 if unknown.

    Raises:
        DiskFull: the disk is full, the quota is used up, or the file exceeds the largest allowed
            size.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as e:
        if (code := _full(e)) is None:
            raise
        grown = written.stat().st_size if written is not None and written.exists() else 0
        after = f" after {si(grown, 'B')} of it" if grown else ""
        takes = f"it takes up to {si(needed, 'B')}, " if needed else ""
        free = f"{si(free_bytes(path), 'B')} are free"
        raise _disk_full(
            code, f"{path} could not be written, {_FULL[code]}{after}: {takes}{free}; {_MAKE_ROOM}"
        ) from e


def check_replaceable(path: Path) -> None:
    """Raise an error if ``path`` exists and is not a file.

    A link to a file is accepted; writing then replaces the link itself.

    Raises:
        FileExistsError: ``path`` is a folder, a pipe or a device.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{path} is a {'folder' if path.is_dir() else 'pipe or device'}, which no file may "
            "replace: choose another output"
        )


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path for a temporary file, and rename the file to ``path`` at the end of the block.

    If the block ends with an error, remove the temporary file instead.

    The block must write to the temporary file, which lies in the folder of ``path``. Its name is
    random and new, so it cannot be a planted link. The final file has the permissions that the
    umask gives, whichever library wrote it.

    Raises:
        DiskFull: the disk is full; the temporary file is removed, and an existing ``path`` is
            unchanged.
        FileExistsError: ``path`` exists and is not a file.
    """
    path = Path(path)
    check_replaceable(path)
    _clear_stale(path.parent)
    with disk_full_errors(path):
        growing, mode = _begun(path)
    try:
        with disk_full_errors(path, growing):
            yield growing
            os.chmod(growing, mode)
            to_disk(growing)
            # Open the folder before the file gets its final name, because another process may
            # rename the folder as soon as it sees the file.
            with _held(path.parent) as folder:
                os.replace(growing, path)
                os.fsync(folder)
    finally:
        growing.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``path`` if the block ends without an error.

    An existing folder ``path`` is replaced: it is renamed first, and removed at the end. So
    ``path`` is always a complete folder, or for a moment it does not exist.

    Raises:
        DiskFull: the disk is full; the temporary folder is removed, and an existing ``path`` is
            unchanged.
        FileExistsError: ``path`` exists and is not a folder.
    """
    path = Path(path)
    if path.is_symlink() or path.exists() and not path.is_dir():
        raise FileExistsError(
            f"{path} is a link or a file, where distseg writes a folder: choose another output"
        )
    _clear_stale(path.parent)
    growing, old = _temporary(path), _temporary(path)
    try:
        with disk_full_errors(path):
            growing.mkdir()
            yield growing
            for folder, _, files in os.walk(growing):
                for name in files:
                    to_disk(Path(folder, name))
                to_disk(Path(folder))
            with _held(path.parent) as parent:
                if path.exists():
                    os.replace(path, old)
                os.replace(growing, path)
                os.fsync(parent)
    finally:
        for folder in (growing, old):
            shutil.rmtree(folder, ignore_errors=True)


def opened_plain(path: Path, flags: int = os.O_RDWR) -> int:
    """Open the plain file ``path`` without following links, and return its file descriptor.

    Args:
        path: the file.
        flags: flags of ``os.open``; ``os.O_CREAT`` creates the file.

    Raises:
        FileExistsError: ``path`` is a link, a folder, a pipe or a device.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_plain(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_plain(path)
    return handle


def locked(path: Path, what: Path) -> IO:
    """Lock the file ``path`` against other processes, and return it open; closing it unlocks it.

    On file systems without locks the file is returned unlocked.

    Args:
        path: the lock file, created if missing.
        what: the file or folder that the lock protects, for the message.

    Raises:
        BlockingIOError: another process holds the lock.
        FileExistsError: ``path`` is a link or not a plain file.
    """
    while True:
        lock = os.fdopen(opened_plain(path, os.O_RDWR | os.O_CREAT), "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise BlockingIOError(
                f"another process is writing {what}: wait for it, or choose another output"
            ) from None
        except OSError:
            return lock
        if _is_still(path, lock.fileno()):
            return lock
        # The previous owner renamed or removed the file between our open and our lock: try again.
        lock.close()


def _is_still(path: Path, handle: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    return False


def _begun(path: Path) -> tuple[Path, int]:
    """Create an empty temporary file for ``path``, and return its path and its permissions.

    The permissions are those that the umask gives to a new file.
    """
    growing = _temporary(path)
    handle = os.open(growing, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    return growing, mode


def _temporary(path: Path) -> Path:
    """Return a new path with a random name, in the folder of ``path``.

    :func:`_is_stale` recognises such names.
    """
    name = path.name
    if len(os.fsencode(name)) >= 200:  # the temporary name must stay below 255 bytes
        name = f"{zlib.crc32(os.fsencode(name)):08x}{path.suffix}"
    return path.with_name(f".{name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.writing")


_cleared: set[Path] = set()


def _clear_stale(folder: Path) -> None:
    """Remove temporary files and folders that killed jobs left in ``folder``.

    Each process does this only once per folder, because it takes long if a folder has many files.
    """
    if folder in _cleared:
        return
    _cleared.add(folder)
    with suppress(OSError), os.scandir(folder) as entries:
        for path in [Path(entry.path) for entry in entries if entry.name.endswith(".writing")]:
            with suppress(OSError):
                if not _is_stale(path):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _is_stale(path: Path) -> bool:
    """Return True if a temporary file or folder is abandoned.

    It is abandoned if it has not changed for an hour. If the process that wrote it ran on this
    machine and has ended, one minute without a change is enough.
    """
    found = _GROWING.fullmatch(path.name)
    if not found:
        return False
    changed = [path.lstat().st_mtime]
    for folder, _, files in os.walk(path):
        changed += [os.lstat(os.path.join(folder, name)).st_mtime for name in files]
    age = time.time() - max(changed)
    return age > _HOUR or (age > _MINUTE and found[1] == _HOST and not _is_alive(int(found[2])))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists and belongs to another user
        pass
    return True


def _full(error: Exception) -> int | None:
    """Return the errno of ``error`` if it means a full disk, else None.

    The errno is also searched for in the text, because libraries may raise another exception.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _FULL else None
    return next((code for code in _FULL if os.strerror(code) in str(error)), None)


def _not_plain(path: Path) -> FileExistsError:
    return FileExistsError(
        f"{path} is a link, a folder or a device, where distseg writes a file of its own: "
        "remove it, or choose another output"
    )


def _disk_full(code: int, text: str) -> DiskFull:
    error = DiskFull(text)
    error.errno = code
    return error
