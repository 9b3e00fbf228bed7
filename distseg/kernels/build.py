"""Compiles the C++ of this package on first use, once a machine, and loads it.

Neither PyTorch's headers nor Python's are needed, so it takes seconds. The library lies in the user's cache under a name
made of its source, compiler and CPU: a cluster's login node and its compute nodes each get their own. Where there is no
compiler, PyTorch's kernels do the same work more slowly.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import warnings
from pathlib import Path

SOURCE = Path(__file__).with_name("norm.cpp")
_FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fPIC"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None without a compiler, or where DISTSEG_KERNELS=0 asks for PyTorch's."""
    if os.environ.get("DISTSEG_KERNELS") == "0":
        return None
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as e:
        reason = getattr(e, "stderr", None) or str(e)
        warnings.warn(f"distseg's norm kernels could not be built, so PyTorch's slower ones are used (name a C++ compiler as CXX): {reason.strip()[-500:]}")
        return None


def _built() -> Path:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distseg" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"norm-{_key(compiler)}.so"
    if target.exists():
        return target
    with open(folder / "lock", "w") as lock:  # the ranks of a node need it all at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: list[str], target: Path) -> None:
    """In two steps, so that the OpenMP runtime is the one that PyTorch has loaded, with the same threads, and not another."""
    compiled, linked = (target.with_suffix(f".{os.getpid()}.{end}") for end in ("o", "so"))
    try:
        for command in ([*_FLAGS.split(), "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)], ["-shared", str(compiled), "-o", str(linked)]):
            subprocess.run([*compiler, *command], check=True, capture_output=True, text=True, timeout=300)
        os.replace(linked, target)
    finally:
        compiled.unlink(missing_ok=True)
        linked.unlink(missing_ok=True)


def _key(compiler: list[str]) -> str:
    parts = SOURCE.read_text(), _FLAGS, *compiler, platform.machine(), _cpu()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features")))
