"""Files that are whole or not there: written under another name, brought to the disk, renamed; and words for a full disk.

Names that others could guess are never followed to somewhere else: in a shared folder a link of that name may have been
planted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Iterator

from distseg.config.units import si

_HOST = f"{zlib.crc32(os.uname().nodename.encode()):08x}"
_GROWING = re.compile(r"\..+\.([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{8}\.writing")
_MINUTE, _HOUR = 60.0, 3600.0
_FULL = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "the quota on its disk is used up",
    errno.EFBIG: "files may not grow so large here (ulimit -f, or the file system's limit)",
}

_MAKE_ROOM = "make room, or choose another output"


class NoRoom(OSError):
    """A file for which the disk has no room: the message names it, and what is free."""


def to_disk(path: Path) -> None:
    """Do not return before a file, or what a folder lists, survives a loss of power."""
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
    """What this user may still write on the disk of ``path``, which need not be there yet."""
    path = Path(path).absolute()
    found = os.statvfs(next(p for p in (path, *path.parents) if p.exists()))
    return found.f_bavail * found.f_frsize


def require_disk_space(path: Path, needed: int, what: str) -> None:
    """Refuse to begin what the disk of ``path`` has no room for.

    Args:
        what: is written, such as ``a checkpoint``.

    Raises:
        NoRoom: naming the file, what is needed, and what is free.
    """
    if needed > (free := free_bytes(path)):
        sizes = f"it takes {si(needed, 'B')}, {si(free, 'B')} are free"
        raise _no_room(errno.ENOSPC, f"{path} has no room for {what}: {sizes}; {_MAKE_ROOM}")


@contextmanager
def room_told(path: Path, written: Path | None = None, needed: int = 0) -> Iterator[None]:
    """Whatever a library throws inside because a disk is full becomes :class:`NoRoom` for ``path``.

    Args:
        written: what has grown so far.
        needed: bytes that all of it may take, where that is known.
    """
    try:
        yield
    except NoRoom:
        raise
    except Exception as e:
        if (code := _full(e)) is None:
            raise
        grown = written.stat().st_size if written is not None and written.exists() else 0
        after = f" after {si(grown, 'B')} of it" if grown else ""
        takes = f"it takes up to {si(needed, 'B')}, " if needed else ""
        free = f"{si(free_bytes(path), 'B')} are free"
        raise _no_room(
            code, f"{path} could not be written, {_FULL[code]}{after}: {takes}{free}; {_MAKE_ROOM}"
        ) from e


def check_replaceable(path: Path) -> None:
    """Refuse to put a file in the place of what is none. A link is judged by what it leads to, though the link itself is replaced.

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
    """The name under which to write ``path``, which appears, or is replaced, when the block ends without an error.

    The name is new, nobody's link, and in the same folder. The file has the mode that the umask gives, whatever library
    wrote it.

    Raises:
        NoRoom: the disk is full; nothing is left behind, and an earlier ``path`` is as it was.
        FileExistsError: ``path`` is there, and no file.
    """
    path = Path(path)
    check_replaceable(path)
    _clear_stale(path.parent)
    with room_told(path):
        growing, mode = _begun(path)
    try:
        with room_told(path, growing):
            yield growing
            os.chmod(growing, mode)
            to_disk(growing)
            with _held(
                path.parent
            ) as folder:  # before: once the file is there, another process may rename the folder
                os.replace(growing, path)
                os.fsync(folder)
    finally:
        growing.unlink(missing_ok=True)


def opened_plain(path: Path, flags: int = os.O_RDWR) -> int:
    """A file descriptor of the plain file ``path``, made where ``flags`` say so; a link or a device is refused, never followed.

    Raises:
        FileExistsError: something else than a plain file has the name.
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
    """A file that keeps other processes out of ``what`` as long as it is open, on file systems that have locks.

    Raises:
        BlockingIOError: another process is at work on it.
        FileExistsError: ``path`` is a link or another thing than a plain file.
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
        lock.close()  # whoever held it has renamed or removed it meanwhile


def _is_still(path: Path, handle: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    return False


def _begun(path: Path) -> tuple[Path, int]:
    """A new empty file for ``path`` to grow in, and the mode that the umask gives it."""
    name = (
        path.name
        if len(os.fsencode(path.name)) < 200
        else f"{zlib.crc32(os.fsencode(path.name)):08x}{path.suffix}"
    )
    growing = path.with_name(f".{name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.writing")
    handle = os.open(growing, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    return growing, mode


_cleared: set[Path] = set()


def _clear_stale(folder: Path) -> None:
    """Remove what killed jobs left of files on their way; once a process and folder, which may hold many files."""
    if folder in _cleared:
        return
    _cleared.add(folder)
    with suppress(OSError), os.scandir(folder) as entries:
        for path in [Path(entry.path) for entry in entries if entry.name.endswith(".writing")]:
            with suppress(OSError):
                if _is_stale(path):
                    path.unlink()


def _is_stale(path: Path) -> bool:
    """Nobody has touched it for an hour, or for a minute since the process of this machine that made it ended."""
    found = _GROWING.fullmatch(path.name)
    if not found:
        return False
    age = time.time() - path.lstat().st_mtime
    return age > _HOUR or (age > _MINUTE and found[1] == _HOST and not _is_alive(int(found[2])))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True


def _full(error: Exception) -> int | None:
    """The code of a full disk in an error, which libraries may hide in their words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _FULL else None
    return next((code for code in _FULL if os.strerror(code) in str(error)), None)


def _not_plain(path: Path) -> FileExistsError:
    return FileExistsError(
        f"{path} is a link, a folder or a device, where distseg writes a file of its own: "
        "remove it, or choose another output"
    )


def _no_room(code: int, text: str) -> NoRoom:
    error = NoRoom(text)
    error.errno = code
    return error
