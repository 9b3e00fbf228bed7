"""A second pytest for the tests that start whole command lines: these mostly import, wait, or use one core of several.

Both processes take tests of one list, the parent from its beginning and the helper from its end, until they meet::

    this pytest     test 1 | test 2 | test 3 | what the helper told of 4, 5, 6
    helper          test 6 | test 5 | test 4

Whoever takes a test makes a file with its number; who finds the file there leaves the test to the other.
"""

import os
from pathlib import Path

import pytest

from .job import Job

FEWEST = 8  # tests for which another process, which imports torch, is worth its time


class Claims:
    """The tests that one of the two processes has taken."""

    def __init__(self, folder: Path, tests: list[str]):
        self._paths = {test: folder / f"taken{number}" for number, test in enumerate(tests)}

    def take(self, test: str) -> bool:
        """Return True if this process is the first to take the test."""
        try:
            os.close(os.open(self._paths[test], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Helper:
    """The parent's side: the job of the second process, from its start to its end."""

    def __init__(self, items: list[pytest.Item]):
        self.items = items
        self.tests = [item.nodeid for item in reversed(items)]
        self.job: Job | None = None
        self.claims: Claims | None = None

    def start(self) -> None:
        if self.claims is None:
            files = list(dict.fromkeys(str(item.path) for item in self.items))
            self.job = Job(1, self.tests, files, self.items[0].config, alone=True)
            self.claims = Claims(self.job.folder, self.tests)

    def takes(self, test: str) -> bool:
        """Return True if the helper has taken a test; if not, the test is this process's from now on."""
        return self.job is not None and not self.claims.take(test)


class OneProcess:
    """In place of a communicator of one rank, without MPI: the helper itself starts programs under mpirun."""

    rank, size = 0, 1

    def Split(self, color: int, key: int):
        return self

    def Ibarrier(self):
        return self

    def Test(self) -> bool:
        return True

    def allgather(self, value) -> list:
        return [value]


class Taking:
    """The helper's side, as a plugin of its pytest: leaves out the tests that the parent has taken."""

    def __init__(self, claims: Claims):
        self.claims = claims

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        return None if self.claims.take(item.nodeid) else True
