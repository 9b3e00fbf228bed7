"""Let signals and clocks make a run write a checkpoint, or write one and end.

A signal reaches the ranks at different moments, and their clocks differ. So at the beginning of
each step the ranks start an allreduce of the signals and times that each rank has seen, and at the
end of the step they read the result. In this way all ranks act after the same step. The message
travels while the step is computed.

====================  ============================================================================
SIGUSR1               write a checkpoint and go on
SIGTERM, SIGUSR2      write a checkpoint and end, to be continued (exit code 75)
the job's time limit  write a checkpoint and end in time: Slurm's limit, or ``train.job_minutes``
checkpoint_minutes    write a checkpoint and go on
====================  ============================================================================

Use SIGUSR2 under mpirun, which forwards this signal to the ranks. At SIGTERM, mpirun kills all
ranks at once.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import numpy as np

from distseg.comm.communicator import as_communicator
from distseg.comm.launch import BORN
from distseg.comm.signals import listening
from distseg.comm.waits import waits_of
from distseg.config.settings import TrainConfig

_STOPS = ("", "a signal came", "the job's time limit is near")
# The run ends this many seconds before the limit, in addition to the time of steps and checkpoints.
# In short jobs the number of seconds is at most this share of the job's time.
_SLACK, _SHARE = 30.0, 0.1


class Decision(NamedTuple):
    """Decision of all ranks after an optimizer step: go on, save a checkpoint, or end the run.

    Attributes:
        save: True to write a checkpoint.
        stop: the reason to end the run; empty to go on.
    """

    save: bool
    stop: str


class RunControl:
    """Context manager in which signals and clocks can save a checkpoint or end the run.

    Inside its ``with`` block it counts the signals SIGUSR1, SIGUSR2 and SIGTERM, and watches
    ``train.checkpoint_minutes`` and the job's time limit. :meth:`decision` then says what to do.

    Args:
        world: the communicator of all ranks.
        config: the ``train`` settings.
    """

    def __init__(self, world, config: TrainConfig):
        self.world, self._every = world, config.checkpoint_minutes
        self._due, self._near = False, False
        self._heeded = 0  # signals to save that were acted upon
        self._request = None
        self._saved = self._began = time.monotonic()
        self._longest = self._saving = 0.0  # seconds of a step, of a checkpoint
        self._end = _end_of_job(config.job_minutes)

    def __enter__(self) -> RunControl:
        self._listening = listening()
        self._signals = self._listening.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._listening.__exit__(*error)

    def post(self) -> None:
        """Start the allreduce that tells all ranks which signals came and which time limits ended.

        :meth:`decision` waits for its result, so messages travel while the step is computed.
        All ranks must call it together, at the beginning of a step.
        """
        self._began = time.monotonic()
        if self.world.rank == 0:
            self._look_at_clocks()
        saves = self._signals.saves
        mine = np.array(
            [self._due or saves != self._heeded, 1 if self._signals.ends else 2 * self._near],
            np.int8,
        )
        self._heeded = saves
        self._found = mine
        if self.world.size > 1:
            self._request = as_communicator(self.world).Imaximum(self._found)

    def decision(self) -> Decision:
        """Wait for the allreduce that :meth:`post` started, and return the ranks' decision.

        All ranks must call it together, at the end of a step. All get the same decision.
        """
        if self._request is not None:
            waits_of(self.world).wait(self._request, "the other ranks' end of the step")
            self._request = None
        self._longest = max(self._longest, time.monotonic() - self._began)
        save, stop = map(int, self._found)
        return Decision(bool(save or stop), _STOPS[stop])

    def ask(self) -> Decision:
        """Return the ranks' decision outside of a step.

        Call :meth:`post` and :meth:`decision` one after the other. All ranks must call it together.
        """
        self.post()
        return self.decision()

    def saved(self, seconds: float) -> None:
        """Record that the writing of a checkpoint has begun.

        ``train.checkpoint_minutes`` counts from now on.

        Args:
            seconds: the time that it took to write the last finished checkpoint. The longest of
                these times determines how long before the job's time limit the run ends.
        """
        self._saved, self._saving = time.monotonic(), max(self._saving, seconds)

    def _look_at_clocks(self) -> None:
        self._due = bool(self._every) and time.monotonic() - self._saved > 60 * self._every
        if self._end is not None:
            left, gone = self._end - time.monotonic(), time.monotonic() - BORN
            self._near = left < 2 * self._longest + 2 * self._saving + min(
                _SLACK, _SHARE * (gone + left)
            )


def _end_of_job(minutes: float | None) -> float | None:
    """Return the value of time.monotonic() at which the job ends, or None if it has no limit.

    The limit is ``minutes`` (``train.job_minutes``), or Slurm's limit if ``minutes`` is None.
    """
    if minutes is not None:
        return BORN + 60 * minutes
    end = os.environ.get("SLURM_JOB_END_TIME", "")  # Unix time
    return time.monotonic() + float(end) - time.time() if end.isdecimal() else None
