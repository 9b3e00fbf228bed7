"""Compile this package's C++ code, on first use and once per machine.

The code includes neither PyTorch's nor Python's headers, so it compiles in seconds. The library is
kept in the user's cache. Its name contains a hash of source, compiler and CPU, so login and compute
nodes of a cluster get separate libraries. The name also contains the library's checksum.

A library is not loaded if it is damaged, or if anyone but this user or root could have written it.
Then the code is compiled again, in a private folder if the cache is not safe. Without a compiler,
PyTorch's kernels do the same work more slowly.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCE = Path(__file__).with_name("norm.cpp")
_FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fPIC"
_LONGEST = 300  # seconds that a compilation may take


class Untrusted(OSError):
    """Error for a cache folder whose content other users could replace."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library of compiled C++ kernels, and build it if needed.

    Return None if the environment has DISTSEG_KERNELS=0. Return None with a warning if the library
    cannot be built, for instance because there is no C++ compiler.
    """
    if os.environ.get("DISTSEG_KERNELS") == "0":
        return None
    try:
        return _loaded(shlex.split(os.environ.get("CXX", "c++")))
    except (OSError, subprocess.SubprocessError) as e:
        reason = getattr(e, "stderr", None) or str(e)
        warnings.warn(
            "distseg's norm kernels could not be built, so PyTorch's slower ones are used (set CXX "
            f"to a C++ compiler): {reason.strip()[-500:]}",
            stacklevel=2,
        )
        return None


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    """Load the library from the user's cache, and compile it if it is not there.

    If the cache cannot be used, compile a library that only this process uses.

    Args:
        compiler: the command that runs the C++ compiler, as a list of words.
    """
    try:
        folder = _cache()
        check_folder(folder)
        try:
            return ctypes.CDLL(str(_built(compiler, folder)))
        except OSError:
            return ctypes.CDLL(str(_built(compiler, folder, anew=True)))
    except Untrusted as e:
        warnings.warn(
            f"distseg's norm kernels are compiled for this process only: {e}", stacklevel=2
        )
    except (OSError, subprocess.SubprocessError):
        pass  # The home folder is full or, as on some compute nodes, cannot be written.
    with tempfile.TemporaryDirectory(prefix="distseg-") as private:
        # The library stays loaded after its file is removed.
        return ctypes.CDLL(str(_compiled(compiler, Path(private))))


def _cache() -> Path:
    """Return the folder in the user's cache that holds the compiled libraries.

    Create the folder if needed. If it belongs to this user but other users can write to it, remove
    all permissions of other users.
    """
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distseg" / "kernels"
    )
    for place in (*reversed(folder.parents), folder):
        with suppress(FileExistsError):
            place.mkdir(0o700)
    for place in (folder.parent, folder):
        if place.stat().st_uid == os.geteuid() and not _safe(place.stat()):
            place.chmod(0o700)
    return folder


def check_folder(folder: Path) -> None:
    """Refuse a folder whose content other users can replace.

    Raises:
        Untrusted: other users can write to the folder or to a folder that contains it. The message
            names the folder with these permissions and how to fix them.
    """
    for place in (folder, *folder.absolute().parents, *folder.resolve().parents):
        status = place.stat()
        # In a folder with the sticky bit nobody can replace another user's folder.
        shared = place != folder and status.st_mode & stat.S_ISVTX
        if not _safe(status) and not (shared and _owners(status)):
            raise Untrusted(
                f"other users can write to {place}: remove this permission (chmod go-w), or set "
                "the environment variable XDG_CACHE_HOME to a folder of your own"
            )


def _owners(status: os.stat_result) -> bool:
    return status.st_uid in {os.geteuid(), *_root()}


@functools.cache
def _root() -> set[int]:
    """Return the user ids that files of root may have: 0, and in a container the overflow id.

    In a container (a user namespace), files of users that do not exist inside it, such as root,
    appear to belong to the overflow id.
    """
    with suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
            return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return {0}


def _safe(status: os.stat_result) -> bool:
    """Return True if only this user and root can write a file or folder with this ``os.stat``."""
    return _owners(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _built(compiler: list[str], folder: Path, anew: bool = False) -> Path:
    """Return the path of the library in ``folder``, and compile it if needed.

    Args:
        compiler: the command that runs the C++ compiler, as a list of words.
        folder: the cache folder.
        anew: True to compile even if the folder has a library that can be trusted (:func:`_whole`).

    Raises:
        OSError: the library was compiled, but its file cannot be trusted.
    """
    name = f"norm-{_key(compiler)}"
    if not anew and (found := _found(folder, name)):
        return found
    # All ranks of a node need the library at the same time.
    with _alone(folder):
        if not anew and (found := _found(folder, name)):
            return found
        _tidy(folder, name)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as place:
            compiled = _compiled(compiler, Path(place))
            target = folder / f"{name}-{_digest(compiled.read_bytes())}.so"
            os.replace(compiled, target)
    if not _whole(target):
        raise OSError(
            f"the compiled library {target} was changed after it was written, or its permissions "
            "let other users change it: set the environment variable XDG_CACHE_HOME to another "
            "folder of your own"
        )
    return target


def _found(folder: Path, name: str) -> Path | None:
    return next(filter(_whole, sorted(folder.glob(f"{name}-*.so"))), None)


def _whole(path: Path) -> bool:
    """Return True if the library at ``path`` can be trusted.

    The file must belong to this user or root, must not be writable for others, must be a regular
    file and no link, and must have the checksum that its name contains.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        return (
            stat.S_ISREG(status.st_mode)
            and _safe(status)
            and path.stem.endswith(f"-{_digest(file.read())}")
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _tidy(folder: Path, name: str) -> None:
    """Remove old files from a cache folder, before the library is compiled.

    Args:
        folder: the cache folder. Folders of compilations that were killed are removed from it once
            they are older than any compilation may last.
        name: the beginning of the library's file name. All libraries with this name are removed, as
            they cannot be trusted or loaded.
    """
    for path in folder.glob(f"{name}-*.so"):
        with suppress(OSError):
            path.unlink()
    for path in folder.glob("building-*"):
        with suppress(OSError):
            if path.lstat().st_mtime < time.time() - 2 * _LONGEST:
                shutil.rmtree(path)


@contextmanager
def _alone(folder: Path):
    """Return a context manager that holds a lock on ``folder``, for one compilation at a time.

    After a timeout, or on a file system without locks, several processes may compile. This is
    harmless, because each puts a complete library in place.
    """
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            _lock(handle, time.monotonic() + 2 * _LONGEST)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, until: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _compiled(compiler: list[str], place: Path) -> Path:
    """Compile and link the library in the folder ``place``, and return its path.

    Compiling and linking are two steps. Linking without -fopenmp makes the library use the OpenMP
    runtime and threads that PyTorch has loaded.
    """
    compiled, linked = place / "norm.o", place / "norm.so"
    first = [*_FLAGS.split(), "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)]
    for command in (first, ["-shared", str(compiled), "-o", str(linked)]):
        subprocess.run(
            [*compiler, *command], check=True, capture_output=True, text=True, timeout=_LONGEST
        )
    # A user's umask may let others write new files.
    linked.chmod(linked.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
    return linked


def _key(compiler: list[str]) -> str:
    parts = SOURCE.read_text(), _FLAGS, *compiler, platform.machine(), _cpu()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Return the CPU's model and features as text; code compiled for this CPU depends on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        line for line in lines[:40] if line.startswith(("model name", "flags", "Features"))
    )
