"""What a run is told from outside while it works: to write a checkpoint, or to end with one.

Signals and clocks reach ranks at different moments, so each step begins a small message in which all of them say what they
were told, and ends with the answer: all act at the same step. The message travels while the step is computed.

====================  ==========================================================================================
SIGUSR1               write a checkpoint and go on
SIGTERM, SIGUSR2      write a checkpoint and end, to be continued (exit code 75); mpirun hands on USR2, at TERM it kills at once
the job's time limit  the same, in time before it: Slurm's own, or ``train.job_minutes``
checkpoint_minutes    write a checkpoint and go on
====================  ==========================================================================================
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import numpy as np

from distseg.comm.launch import BORN
from distseg.comm.signals import listening
from distseg.comm.waits import waits_of
from distseg.config.settings import TrainConfig

_STOPS = ("", "a signal came", "the job's time limit is near")
_SLACK, _SHARE = (
    30.0,
    0.1,
)  # seconds before the limit besides the work that is left, at most this share of the job's time


class Decision(NamedTuple):
    """What all ranks do after a step."""

    save: bool
    stop: str  # why, or empty


class RunControl:
    """Listens from ``with`` to its end.

    Args:
        world: all ranks.
    """

    def __init__(self, world, config: TrainConfig):
        self.world, self._every = world, config.checkpoint_minutes
        self._due, self._near = False, False
        self._heeded = 0  # signals
        self._request = None
        self._saved = self._began = time.monotonic()
        self._longest = self._saving = 0.0  # seconds of a step, of a checkpoint
        self._end = _end_of_job(config.job_minutes)

    def __enter__(self) -> "RunControl":
        self._listening = listening()
        self._signals = self._listening.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._listening.__exit__(*error)

    def post(self) -> None:
        """Begin to tell the others, at the beginning of a step."""
        self._began = time.monotonic()
        if self.world.rank == 0:
            self._look_at_clocks()
        saves = self._signals.saves
        mine = np.array(
            [self._due or saves != self._heeded, 1 if self._signals.ends else 2 * self._near],
            np.int8,
        )
        self._heeded = saves
        self._found = mine.copy()
        if self.world.size > 1:
            from mpi4py import MPI

            self._mine = mine  # MPI reads it until it is done
            self._request = self.world.Iallreduce(self._mine, self._found, op=MPI.MAX)

    def met(self) -> Decision:
        """What all were told, at the step's end; the same on every rank."""
        if self._request is not None:
            waits_of(self.world).wait(self._request, "the other ranks' end of the step")
            self._request = None
        self._longest = max(self._longest, time.monotonic() - self._began)
        save, stop = map(int, self._found)
        return Decision(bool(save or stop), _STOPS[stop])

    def ask(self) -> Decision:
        """Both at once, between other work."""
        self.post()
        return self.met()

    def saved(self, seconds: float) -> None:
        """Note that a checkpoint was begun, and how long the one before took."""
        self._saved, self._saving = time.monotonic(), max(self._saving, seconds)

    def _look_at_clocks(self) -> None:
        self._due = bool(self._every) and time.monotonic() - self._saved > 60 * self._every
        if self._end is not None:
            left, gone = self._end - time.monotonic(), time.monotonic() - BORN
            self._near = left < 2 * self._longest + 2 * self._saving + min(
                _SLACK, _SHARE * (gone + left)
            )


def _end_of_job(minutes: float | None) -> float | None:
    """When the job ends, by this process's clock: by the setting, else as Slurm tells."""
    if minutes is not None:
        return BORN + 60 * minutes
    told = os.environ.get("SLURM_JOB_END_TIME", "")  # Unix time
    return time.monotonic() + float(told) - time.time() if told.isdecimal() else None
