"""Compiles and loads the device that computes nothing; it must be there before PyTorch is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def _torch() -> Path:
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def build(folder: Path) -> Path:
    """The library in ``folder``.

    Raises:
        OSError, subprocess.SubprocessError: there is no C++ compiler, or it cannot compile PyTorch's headers.
    """
    target, libraries = folder / "device.so", _torch() / "lib"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = f"-std=c++20 -shared -fPIC -I{_torch() / 'include'} {SOURCE} -o {target} -L{libraries} -lc10 -ltorch_cpu -Wl,-rpath,{libraries}"
    subprocess.run([*compiler, *flags.split()], check=True, capture_output=True, text=True)
    return target


def load(path: str | Path) -> None:
    """Register the device in this process."""
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
