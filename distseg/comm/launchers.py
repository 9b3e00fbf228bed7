"""Launchers of jobs: the variables by which each describes a process, and the check against MPI.

mpirun, srun, jsrun and others start the same program several times. Processes that do not find each
other would each train alone, all into the same folder. So every hint of other processes is checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """One process of a job, as its launcher describes it.

    An attribute is None if the launcher does not give it.

    Attributes:
        rank: number of the process in the job, from 0.
        size: number of processes of the job.
        local_rank: number of the process among the job's processes on its node, from 0.
        local_size: number of the job's processes on its node.
    """

    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


LONE = Process(0, 1, 0, 1)

_OTHER_MPI = (
    "mpi4py ({library}) was built for another MPI than the launcher's; use the mpirun of the same "
    "MPI, or reinstall"
    " mpi4py against it (docs/install.md)"
)


@dataclass(frozen=True)
class Launcher:
    """Names of the environment variables by which a launcher describes a process.

    A name is "" if the launcher has no variable for this value.

    Attributes:
        name: the launcher's name, for messages.
        rank, size, local_rank, local_size: the variables for the fields of :class:`Process`.
    """

    name: str
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    beside: str = ""  # must be set too; distinguishes launchers with the same rank and size
    repair: str = _OTHER_MPI  # end of an error message: the cause and how to fix it


_TORCHRUN = (
    "processes of torchrun, or with RANK and WORLD_SIZE set by hand, are no MPI processes: set "
    "run.transport to torch, or in a script use the communicator of distseg.comm.launch.world(), "
    "or start with mpirun -n {size} or srun --mpi=pmix, without RANK and WORLD_SIZE"
)
_SRUN = (
    "its processes cannot find each other: start them with srun --mpi=pmix (srun --mpi=list "
    "shows what this Slurm has), or with mpirun in the allocation, or set run.transport to torch; "
    "if you already did, mpi4py ({library}) was built for another MPI (docs/install.md)"
)

# The launcher that starts the innermost processes comes before the one around it. An mpirun in an
# allocation, or in a job of Flux, inherits the outer variables, which give another number of
# processes. torchrun comes first because users set its variables by hand. The first "mpiexec" is
# that of MPICH's Hydra and of Intel MPI. PALS gives no size: its first entry takes Cray MPICH's.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", repair=_TORCHRUN),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH's mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH's mpirun",
        "MVP_COMM_WORLD_RANK",
        "MVP_COMM_WORLD_SIZE",
        "MVP_COMM_WORLD_LOCAL_RANK",
        "MVP_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        beside="MPI_LOCALRANKID",
    ),
    Launcher("PALS's mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        repair=_SRUN,
    ),
    Launcher("a launcher with PMIx", "PMIX_RANK"),  # prterun, PALS for Open MPI
    Launcher(
        "PALS's mpiexec",
        "PALS_RANKID",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
    ),
    Launcher("aprun", "ALPS_APP_PE"),
)


def identify(environment: Mapping[str, str] = os.environ) -> Process:
    """Return the launcher's description of this process; without a launcher, rank 0 of 1 rank.

    The launcher is the first entry of ``LAUNCHERS`` whose variables for rank and size are both set.
    If no entry has both, it is the first entry whose variable for the rank is set. There is one
    exception: if the rank is 0 and the launcher has a variable for the size, which is not set, the
    process is a batch script that the launcher did not start.
    """
    return found(environment)[1]


def contradiction(
    ranks: int, library: str, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return an error message if the launcher contradicts MPI, else None.

    Without a launcher there is nothing to compare, and the result is None. A contradiction means
    that the processes of a job do not find each other in MPI. Two cases are recognised:

    - The launcher gives a size above 1 that differs from MPI's.
    - The launcher gives no size and a rank above 0, but MPI takes this process for the only one.
      (Rank 0 of such a job cannot recognise this case.)

    Args:
        ranks: the size of MPI's communicator of all ranks.
        library: MPI's version string, for the message.
        environment: the environment variables of the process.
    """
    launcher, process = found(environment)
    if launcher is None:
        return None
    repair = launcher.repair.format(library=library.split(",")[0].strip(), size=process.size or "N")
    if process.size is not None and process.size > 1 and process.size != ranks:
        return (
            f"{launcher.name} started {process.size} processes ({launcher.size}), "
            f"but MPI sees {ranks}: {repair}"
        )
    if process.size is None and process.rank > 0 and ranks == 1:
        return (
            f"{launcher.name} started this process as rank {process.rank} ({launcher.rank}), but "
            "MPI sees it alone:"
            f" {repair}; or unset {launcher.rank}, if it is a leftover"
        )
    return None


def found(environment: Mapping[str, str]) -> tuple[Launcher | None, Process]:
    """Return the launcher of this process, and the launcher's description of the process.

    Without a launcher, return None and ``LONE``, which is rank 0 of 1.
    """

    def number(name: str) -> int | None:
        return _leading_int(environment.get(name))

    for launcher in LAUNCHERS:
        rank, size = number(launcher.rank), number(launcher.size)
        if (
            rank is not None
            and size is not None
            and (not launcher.beside or launcher.beside in environment)
        ):
            return launcher, Process(
                rank, size, number(launcher.local_rank), number(launcher.local_size)
            )
    for launcher in LAUNCHERS:
        rank = number(launcher.rank)
        # Rank 0 with the size missing is a batch script, not a process of the launcher.
        if rank or rank == 0 and not launcher.size:
            return launcher, Process(
                rank, None, number(launcher.local_rank), number(launcher.local_size)
            )
    return None, LONE


def _leading_int(text: str | None) -> int | None:
    """Return the number that a text begins with, as 4 in Slurm's "4(x2),3", or None."""
    found = re.match(r"\s*(\d+)", text or "")
    return int(found[1]) if found else None
