"""Prints the name under which a built Horovod is kept: a wheel fits only the Python, torch and MPI that it was built with."""

import hashlib
import os
import platform
import re
import sys
import sysconfig

import mpi4py

mpi4py.rc.initialize = False  # a cluster's login node may not allow MPI_Init
import torch  # noqa: E402
from mpi4py import MPI  # noqa: E402

mpi = re.match(r"[^,\n]*", MPI.Get_library_version())[0]  # "Open MPI v5.0.11, package: ..."
parts = [f"py{sys.version_info.major}.{sys.version_info.minor}", f"torch{torch.__version__}", mpi, f"horovod{sys.argv[1]}",
         sysconfig.get_platform(), "-".join(platform.libc_ver())]  # fmt: skip
choices = sorted(
    f"{k}={v}"
    for k, v in os.environ.items()
    if k.startswith("HOROVOD_") or k in ("CC", "CXX", "CXXFLAGS")
)
if choices:  # say, HOROVOD_GPU_OPERATIONS=NCCL
    parts.append(hashlib.sha256("\n".join(choices).encode()).hexdigest()[:8])
print("-".join(re.sub(r"[^A-Za-z0-9.+_]+", "", part) for part in parts))
