"""Start and end of a command that runs on all ranks: guardian, equal settings, communicator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from distseg.comm.consistency import assert_consistent, settings, versions
from distseg.comm.launch import JointFailure, identify, is_program, leave, raise_jointly, world
from distseg.comm.progress import limit, phase
from distseg.comm.watch import guarded, join
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config, RunConfig

_REPAIR = "Start all ranks with the same command, files and installation"


@contextmanager
def _imports() -> Iterator[None]:
    """Return a context in which packages are imported without garbage collections.

    Collections take a tenth of the time of the import, but find nothing: modules stay in memory
    until the process ends. For the same reason, later collections leave out all objects that exist
    at the end of the context. In a process that is not a program of distseg, nothing changes.
    """
    if not is_program():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def job(
    settle: Callable[[], tuple[Config | PatchConfig, dict]],
    stacks: Callable[[Config | PatchConfig], str | None] = lambda config: None,
) -> Iterator[tuple[Config | PatchConfig, dict, object]]:
    """Yield the settings of a command, its own flags and the communicator of all ranks.

    All ranks must enter the context together. A guardian beside each rank ends the job if it hangs,
    from the beginning until the context ends.

    Args:
        settle: a function that reads the settings and the command's own flags, and returns both. It
            is called on each rank.
        stacks: a function that returns, given the settings, the folder for the stack traces of a
            job that hangs; None to print them.

    Raises:
        JointFailure: a rank cannot read the settings, or ranks have different settings.
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
        with _imports():
            comm = world(transport)
        with raise_jointly(comm):
            if failure is not None:
                raise ValueError(str(failure))  # a joint failure would not name this rank
        assert_consistent(comm, {**settings(asdict(config)), **flags, **versions()}, _REPAIR)
        join(comm, stacks(config))
        yield config, flags, comm
        leave()
