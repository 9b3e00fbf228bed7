"""Frame of a command on all ranks of a job: watchdog, shared settings, communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from distseg.comm.consistency import assert_consistent, settings, versions
from distseg.comm.launch import JointFailure, identify, leave, raise_jointly, world
from distseg.comm.watch import guarded, join, limit, phase
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config, RunConfig

_REPAIR = "Start all ranks with the same command, files and installation"


@contextmanager
def job(
    settle: Callable[[], tuple[Config | PatchConfig, dict]],
    stacks: Callable[[Config | PatchConfig], str | None] = lambda config: None,
) -> Iterator[tuple[Config | PatchConfig, dict, object]]:
    """Yield the settings of a command, its own flags and the communicator of all ranks. Collective.

    The watchdog guards the job from the beginning until the context ends.

    Args:
        settle: reads the settings and the command's own flags, on each rank.
        stacks: returns the folder for the stack traces of a job that hangs, given the settings.

    Raises:
        JointFailure: the settings are not possible on some rank, or ranks have different settings.
    """
    process, transport = identify(), "auto"
    with guarded(process.rank, RunConfig.timeout):
        phase("reading its settings")
        failure = None
        try:
            config, flags = settle()
        except JointFailure as e:
            if process.size == 1:
                raise  # a single process reports it by itself
            failure = e
        else:
            limit(config.run.timeout)
            transport = config.run.transport
        phase("connecting the ranks")
        comm = world(transport)
        with raise_jointly(comm):
            if failure is not None:
                raise failure
        assert_consistent(comm, {**settings(asdict(config)), **flags, **versions()}, _REPAIR)
        join(comm, stacks(config))
        yield config, flags, comm
        leave()
