"""The pytest plugin: marks, options and fixtures. It is loaded by the user's pytest and by the pytest of each rank."""

import os

import pytest

from . import command, launch, marks, transport
from .limit import Limit
from .parent import Parent


def on_a_rank() -> bool:
    return launch.LONE or launch.MARK in os.environ


def pytest_addoption(parser):
    parser.addini(
        "test_timeout", "seconds that a test may take, unless marked timeout(seconds)", default="60"
    )
    parser.addini(
        "parallel_batch",
        "tests that share a job: those of a 'module', or all of the 'session'",
        default="module",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        f"parallel(n or [n, ...]): run on so many ranks, each in turn; bare: {marks.RANKS}",
    )
    config.addinivalue_line(
        "markers", "timeout(seconds): what the test may take; a hang is a failure"
    )
    config.addinivalue_line(
        "markers", "last: run after the others; tests that use the fixture mpirun do so anyway"
    )
    config.addinivalue_line(
        "markers", "alone: with parallel_batch = session, this module's tests get jobs of their own"
    )
    if transport.TORCH:
        transport.block_mpi()
    if not on_a_rank():
        config.pluginmanager.register(Parent(), "mpirunner-parent")
        config.pluginmanager.register(Limit(config), "mpirunner-limit")


def pytest_generate_tests(metafunc):
    if (mark := metafunc.definition.get_closest_marker("parallel")) is not None:
        if "ranks" not in metafunc.fixturenames:
            metafunc.fixturenames.append("ranks")
        metafunc.parametrize("ranks", marks.sizes(mark), ids=lambda n: f"ranks={n}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if not on_a_rank():
        items[:] = marks.ordered(items)
        if only := os.environ.get("DISTSEG_TEST_RANKS"):  # "2,4"
            items[:] = [item for item in items if str(marks.ranks_of(item)) in only.split(",")]


@pytest.fixture
def comm(request):
    """MPI.COMM_WORLD, of as many ranks as the test is marked for; the like of torch.distributed under
    DISTSEG_TEST_TRANSPORT=torch."""
    if not on_a_rank():
        pytest.fail(
            "the fixture `comm` needs ranks: mark the test with @pytest.mark.parallel(n)",
            pytrace=False,
        )
    return transport.world()


@pytest.fixture
def shared_path(comm, tmp_path):
    """One empty folder that all ranks see (tmp_path is each rank's own)."""
    return comm.bcast(tmp_path)


@pytest.fixture
def mpirun(request):
    """mpirun(n, *argv, timeout=, env=, cwd=): `python argv...` on n ranks of mpirun, or of torchrun -> returncode, stdout, stderr.
    A hang is ended, all ranks with it, and fails the test."""
    default = max(
        1.0, marks.limit(request.node) - 5
    )  # before the test's own limit, whose message says less

    def run(
        n: int, *argv, timeout: float = default, env: dict | None = None, cwd=None
    ) -> command.Done:
        return command.run(n, [str(arg) for arg in argv], timeout, env or {}, cwd)

    return run
