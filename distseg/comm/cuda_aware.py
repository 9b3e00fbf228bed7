"""Test for a CUDA-aware MPI, which is an MPI that accepts pointers to GPU memory.

An MPI that was built for CUDA may still not support it at run time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import lru_cache

_OURS = "DISTSEG_CUDA_AWARE"
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h


@lru_cache
def cuda_aware() -> bool:
    """Return True if messages may go directly from and to GPU memory.

    Raises:
        ValueError: ``DISTSEG_CUDA_AWARE`` is set, but neither to 0 nor to 1.
    """
    from mpi4py import MPI

    # This is the MPI library that mpi4py has loaded. Another MPI may be first on PATH.
    return says(ctypes.CDLL(MPI.__file__), MPI.Get_library_version(), os.environ)


def says(library, version: str, environment: Mapping[str, str]) -> bool:
    """Return True if ``DISTSEG_CUDA_AWARE`` or the MPI library says that MPI is CUDA-aware.

    The variable counts if it is set. Otherwise the library's own query function counts. A library
    without a query function is not CUDA-aware, except Cray MPICH if its environment variable
    enables CUDA. MVAPICH is not CUDA-aware unless its environment variable enables CUDA.

    Args:
        library: the MPI library, loaded by ctypes.
        version: the library's version string.
        environment: the environment variables.
    """
    if _OURS in environment:
        return _of_ours(environment[_OURS])
    if "MVAPICH" in version.upper() and environment.get("MV2_USE_CUDA") != "1":
        return False  # MVAPICH disables CUDA unless this variable is set, whatever its build.
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI and derivatives, MVAPICH2
        return library.MPIX_Query_cuda_support() == 1
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH and derivatives
        found = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(found)) == 0 and found.value == 1
    # Older Cray MPICH lacks both functions. With this variable set to 1 it starts only if it
    # supports CUDA.
    return "CRAY MPICH" in version.upper() and environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def _of_ours(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(
            f"{_OURS} is {value!r}: set it to 1 if MPI accepts pointers to GPU memory, to 0 if "
            "not, or unset it to let distseg ask the MPI library"
        )
    return value == "1"
