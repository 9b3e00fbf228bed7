"""The life of a command on all ranks of a job: guarded from its first moment, with settings that all of them share."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict
from typing import Callable, Iterator

from distseg.comm.consistency import assert_consistent, settings, versions
from distseg.comm.launch import JointFailure, identify, raise_jointly, world
from distseg.comm.watch import guarded, join, limit, phase
from distseg.config.settings import Config, RunConfig

_REPAIR = "Start all ranks with the same command, files and installation"


@contextmanager
def job(
    settle: Callable[[], tuple[Config, dict]],
    stacks: Callable[[Config], str | None] = lambda config: None,
) -> Iterator[tuple[Config, dict, object]]:
    """Inside, the command runs: yields its settings, its own flags, and the communicator of all ranks. Collective.

    Args:
        settle: reads the settings and the flags beside them, on each rank.
        stacks: the folder for the stacks of a job that hangs, by the settings.

    Raises:
        JointFailure: settings that can not be, on some rank or all; ranks that disagree.
    """
    process = identify()
    with guarded(process.rank, RunConfig.timeout):
        phase("reading its settings")
        failure = None
        try:
            config, flags = settle()
        except JointFailure as e:
            if process.size == 1:
                raise  # needs no MPI
            failure = e
        else:
            limit(config.run.timeout)
        phase("starting MPI")
        comm = world()
        with raise_jointly(comm):
            if failure is not None:
                raise failure
        assert_consistent(comm, {**settings(asdict(config)), **flags, **versions()}, _REPAIR)
        join(comm, stacks(config))
        yield config, flags, comm
