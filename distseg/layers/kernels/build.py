"""Compiles the C++ of this package on first use, once a machine, and loads it.

Neither PyTorch's headers nor Python's are needed, so it takes seconds. The library lies in the user's cache under a name
made of its source, compiler and CPU: a cluster's login node and its compute nodes each get their own. The name also holds the
library's checksum, and nothing is loaded that is damaged, or that anybody but this user or root could have written: it is
compiled anew, in a private folder where the cache is no safe place. Where there is no compiler, PyTorch's kernels do the same
work more slowly.
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
    """Others could have written what is in a folder."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None without a compiler, or where DISTSEG_KERNELS=0 asks for PyTorch's."""
    if os.environ.get("DISTSEG_KERNELS") == "0":
        return None
    try:
        return _loaded(shlex.split(os.environ.get("CXX", "c++")))
    except (OSError, subprocess.SubprocessError) as e:
        reason = getattr(e, "stderr", None) or str(e)
        warnings.warn(
            "distseg's norm kernels could not be built, so PyTorch's slower ones are used (name a "
            f"C++ compiler as CXX): {reason.strip()[-500:]}"
        )
        return None


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    """From the user's cache, else, if that can't be used, compiled for this process alone."""
    try:
        folder = _cache()
        check_folder(folder)
        try:
            return ctypes.CDLL(str(_built(compiler, folder)))
        except OSError:
            return ctypes.CDLL(str(_built(compiler, folder, anew=True)))
    except Untrusted as e:
        warnings.warn(f"distseg's norm kernels are compiled for this process alone: {e}")
    except (OSError, subprocess.SubprocessError):
        pass  # a home that can't be written, as on some clusters' compute nodes, or is full
    with tempfile.TemporaryDirectory(prefix="distseg-") as private:
        # Which stays loaded without its file.
        return ctypes.CDLL(str(_compiled(compiler, Path(private))))


def _cache() -> Path:
    """The folder, made if it is not there, and closed to others where an older distseg made it as the umask was."""
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
    """Refuse a folder whose content others can put there.

    Raises:
        Untrusted: naming the folder, or the one above it, and what to do.
    """
    for place in (folder, *folder.absolute().parents, *folder.resolve().parents):
        status = place.stat()
        # As /tmp, where nobody can replace another's folder.
        shared = place != folder and status.st_mode & stat.S_ISVTX
        if not _safe(status) and not (shared and _owners(status)):
            raise Untrusted(
                f"others can write to {place}: chmod go-w it, or name a folder of your own as "
                "XDG_CACHE_HOME"
            )


def _owners(status: os.stat_result) -> bool:
    return status.st_uid in {os.geteuid(), *_root()}


@functools.cache
def _root() -> set[int]:
    """Root's number, and in a container that does not know root the one that stands for whom it does not know."""
    with suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
            return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return {0}


def _safe(status: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written it."""
    return _owners(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _built(compiler: list[str], folder: Path, anew: bool = False) -> Path:
    """The library in ``folder``, compiled if there is none that can be trusted, or ``anew``."""
    name = f"norm-{_key(compiler)}"
    if not anew and (found := _found(folder, name)):
        return found
    with _alone(folder):  # the ranks of a node need it all at once
        if not anew and (found := _found(folder, name)):
            return found
        _tidy(folder, name)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as place:
            compiled = _compiled(compiler, Path(place))
            target = folder / f"{name}-{_digest(compiled.read_bytes())}.so"
            os.replace(compiled, target)
    if not _whole(target):
        raise OSError(f"{target} is not what was written there")
    return target


def _found(folder: Path, name: str) -> Path | None:
    return next(filter(_whole, sorted(folder.glob(f"{name}-*.so"))), None)


def _whole(path: Path) -> bool:
    """Whether a library is this user's or root's, a file and no link, and has the checksum that its name tells."""
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
    """Remove libraries that were not trusted, and what killed compilations left."""
    for path in folder.glob(f"{name}-*.so"):
        with suppress(OSError):
            path.unlink()
    for path in folder.glob("building-*"):
        with suppress(OSError):
            if path.lstat().st_mtime < time.time() - 2 * _LONGEST:
                shutil.rmtree(path)


@contextmanager
def _alone(folder: Path):
    """One process of a machine at a time; after a while, or where a file system knows no locks, any, as the last one's file is as good."""
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
    """In two steps, so that the OpenMP runtime is the one that PyTorch has loaded, with the same threads, and not another."""
    compiled, linked = place / "norm.o", place / "norm.so"
    first = [*_FLAGS.split(), "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)]
    for command in (first, ["-shared", str(compiled), "-o", str(linked)]):
        subprocess.run(
            [*compiler, *command], check=True, capture_output=True, text=True, timeout=_LONGEST
        )
    # Which some users' umask would leave on.
    linked.chmod(linked.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
    return linked


def _key(compiler: list[str]) -> str:
    parts = SOURCE.read_text(), _FLAGS, *compiler, platform.machine(), _cpu()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        line for line in lines[:40] if line.startswith(("model name", "flags", "Features"))
    )
