"""Describe batch systems: how to submit a script, read the job's number, write a time limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from distseg.config.spelling import did_you_mean


def _clock(seconds: int) -> str:
    """Return a number of seconds as text such as ``02:30:00``."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def _minutes(seconds: int) -> str:
    """Return a number of seconds as hours and minutes for LSF, such as ``2:30``, rounded up."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02d}"


@dataclass(frozen=True)
class System:
    """Description of a batch system, such as Slurm: its commands and the form of its options."""

    name: str
    """slurm, lsf, pbs or flux."""
    suffix: str
    """The suffix of a script and of its template."""
    launcher: str
    """The line that starts the processes, unless the site has its own."""
    limit: Callable[[int], str]
    """Function that returns a time limit, given in seconds, as the batch system writes it."""
    submit: tuple[str, ...]
    """The command that submits a script; the script's name is added as the last argument."""
    job_id: str
    """Regular expression with one group: the job's number in the command's output."""
    look: str
    """The command that shows a job."""
    first: int = 0
    """The first index of an array."""
    array: tuple[str, ...] = ()
    """Arguments of ``submit`` for an array, if the script itself cannot ask for the array.

    {last} is replaced by the last index, and {index} by the index of each entry.
    """
    by_stdin: bool = False
    """True if ``submit`` reads the script from standard input."""
    one_by_one: bool = False
    """True if each entry of an array is submitted as a job of its own."""

    def commands(self, script: str, entries: int) -> list[list[str]]:
        """Return the commands that submit a script, each as a list of words.

        Args:
            script: the path of the script.
            entries: the number of jobs in the script's job array; 0 if it has no job array.
        """
        if not entries:
            arrays = [[]]
        elif self.one_by_one:
            arrays = [[word.format(index=index) for word in self.array] for index in range(entries)]
        else:
            arrays = [[word.format(last=entries - 1) for word in self.array]]
        return [[*self.submit, *array, *([] if self.by_stdin else [script])] for array in arrays]

    def number(self, answer: str) -> str | None:
        """Return the job's number from the output of the command that submits it, or None.

        Args:
            answer: the output, such as ``Submitted batch job 123``.
        """
        found = re.search(self.job_id, answer)
        return found and found[1]


_SRUN = "srun --mpi={pmi} {binding} --kill-on-bad-exit=0 --wait=60"
_JSRUN = (
    "jsrun --nrs {nodes} --rs_per_host 1 --tasks_per_rs {processes} --gpu_per_rs {gpus} "
    "--cpu_per_rs {node_cores} "
    "--launch_distribution packed --bind packed:{cores}"
)
_MPIRUN = "mpirun -n {tasks} --map-by ppr:{processes}:node:PE={cores} --bind-to core"
_FLUX = (
    "flux run --nodes={nodes} --ntasks={tasks} --exclusive "
    "-o cpu-affinity=per-task -o gpu-affinity=off"
)

SYSTEMS = {
    system.name: system
    for system in (
        System(
            "slurm", "sbatch", _SRUN, _clock, ("sbatch", "--parsable"), r"^(\d+)", "squeue -j {job}"
        ),
        System(
            "lsf",
            "jsrun",
            _JSRUN,
            _minutes,
            ("bsub",),
            r"Job <(\d+)>",
            "bjobs {job}",
            first=1,
            by_stdin=True,
        ),
        System(
            "pbs",
            "pbs",
            _MPIRUN,
            _clock,
            ("qsub",),
            r"^(\S+)",
            "qstat {job}",
            array=("-J", "0-{last}"),
        ),
        System(
            "flux",
            "flux",
            _FLUX,
            "{}s".format,
            ("flux", "batch"),
            r"^(\S+)",
            "flux jobs {job}",
            array=("--env=ENTRY={index}",),
            one_by_one=True,
        ),
    )
}


def system_of(name: str) -> System:
    """Return the batch system with this name.

    Raises:
        ValueError: there is no such system.
    """
    if name not in SYSTEMS:
        near = did_you_mean(name, SYSTEMS)
        raise ValueError(
            f"there is no batch system {name!r} here: choose {', '.join(SYSTEMS)}{near}"
        )
    return SYSTEMS[name]


def seconds_of(text: str) -> int:
    """Return the seconds of a time such as ``02:30:00``, or ``1-12:00:00`` with days first.

    Raises:
        ValueError: the text has another form, or the time is 0.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d{1,3}):([0-5]?\d):([0-5]?\d)", text.strip())
    seconds = (
        sum(int(part or 0) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1)))
        if found
        else 0
    )
    if not seconds:
        raise ValueError(
            "--time must be the job's limit as HH:MM:SS, such as 02:00:00, or with days as "
            f"1-12:00:00, got {text!r}"
        )
    return seconds
