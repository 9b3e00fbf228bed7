"""Whether the MPI that is running takes pointers to a GPU's memory, which not every MPI does that was built for it."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Mapping

_OURS = "DISTSEG_CUDA_AWARE"
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h


@lru_cache
def cuda_aware() -> bool:
    """Whether messages may go straight from and to a GPU's memory.

    Raises:
        ValueError: ``DISTSEG_CUDA_AWARE`` is set, but neither to 0 nor to 1.
    """
    from mpi4py import MPI

    # The library that mpi4py has loaded, and what that is linked with: no other MPI that may lie on
    # PATH.
    return says(ctypes.CDLL(MPI.__file__), MPI.Get_library_version(), os.environ)


def says(library, version: str, environment: Mapping[str, str]) -> bool:
    """The answer of our own variable, else of a running MPI; no for one that gives none.

    Args:
        library: with MPI's functions, as ctypes has them.
        version: what it calls itself.
    """
    if _OURS in environment:
        return _of_ours(environment[_OURS])
    if "MVAPICH" in version.upper() and environment.get("MV2_USE_CUDA") != "1":
        return False  # switched off by default, however it was built
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI and its kin, MVAPICH2
        return library.MPIX_Query_cuda_support() == 1
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH and its kin
        found = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(found)) == 0 and found.value == 1
    # Cray's, of releases without that function, starts with this variable only where it can do it.
    return "CRAY MPICH" in version.upper() and environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def _of_ours(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(
            f"{_OURS} is {value!r}: set it to 1 if MPI takes pointers to a GPU's memory, to 0 if "
            "not, or leave it out, and MPI is asked"
        )
    return value == "1"
