"""The pytest that the user started: runs `parallel` tests in jobs and reports each of them as its own.

Where there are two cores, jobs run ahead, one at a time, while this process runs the ordinary tests, which take one core::

    this pytest     ordinary tests ....................  what ranks=1 told | ranks=2 | ranks=4 ... | command lines
    jobs            ranks=1 ........ | ranks=2 ............ | ranks=4 .......... | ............ command lines

A job that hangs meanwhile is found when its tests have their turn. The command lines are shared with a `helper`.
"""

import os
import signal

import pytest

from .helper import FEWEST, Helper
from .job import Job
from .marks import batch, limit, ranks_of, starts_programs
from .merge import RanksRepr, lost, merged


class Parent:
    def __init__(self):
        self.job: Job | None = None
        self.batch = None  # what the running job is for
        self.hopeless: set[tuple] = (
            set()
        )  # batches whose job could not start: not tried again for each test
        self.ahead: dict[tuple, Job] = {}  # jobs of batches whose tests have not had their turn
        self.to_come: list = []  # the first test of each batch that may run ahead
        self.helper: Helper | None = None

    def pytest_collection_finish(self, session):
        if (
            _cores() > 1
            and session.config.getoption("capture") != "no"
            and not session.config.getoption("collectonly")
        ):
            firsts = {
                batch(item): item
                for item in reversed(session.items)
                if item.get_closest_marker("alone") is None
            }
            self.to_come = [
                item
                for item in session.items
                if ranks_of(item) is not None and firsts.get(batch(item)) is item
            ]
            programs = [item for item in session.items if starts_programs(item)]
            self.helper = Helper(programs) if len(programs) >= FEWEST else None

    def run_ahead(self) -> None:
        """Start the next job unless one is running."""
        if any(job.process.poll() is None for job in self.ahead.values()):
            return
        if self.to_come:
            item = self.to_come.pop(0)
            self.ahead[batch(item)] = _job_from(item)
        elif self.helper:
            self.helper.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if ranks_of(item) is not None:
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in self.verdict(item, nextitem):
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            return True
        if self.helper and starts_programs(item):
            return self.shared(item)
        self.run_ahead()
        if nextitem is not None and self.elsewhere(nextitem):
            return _run_and_clear(item)
        return None

    def elsewhere(self, item) -> bool:
        """Return True if a test runs in another process, or may."""
        return ranks_of(item) is not None or self.helper is not None and starts_programs(item)

    def shared(self, item) -> bool:
        """Run a test of command lines here, or tell what the helper told of it."""
        self.helper.start()
        if not self.helper.takes(item.nodeid):
            return _run_and_clear(item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        job = self.helper.job
        if problem := job.wait(item.nodeid, limit(item)):
            job.kill()
        for report in merged(item, job, problem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def verdict(self, item, nextitem) -> list[pytest.TestReport]:
        if batch(item) in self.hopeless:
            return [
                lost(
                    item,
                    "its job did not start: see the first test of this file and number of ranks",
                )
            ]
        startup = (self.job is None or self.batch != batch(item)) and not self.begin(item)
        if problem := self.job.wait(item.nodeid, limit(item)):
            self.job.kill()
            if self.job.startup is None:
                self.hopeless.add(self.batch)
        reports = merged(item, self.job, problem)
        if startup and self.job.startup:
            reports[
                0
            ].duration += self.job.startup  # so that --durations shows what starting a job costs
        self.finish(reports, nextitem, problem)
        return reports

    def begin(self, item) -> bool:
        """Take the job for this test and all that follow it in its batch; return whether it ran ahead, or has yet to start."""
        _end(self.job)
        self.batch = batch(item)
        self.to_come = [other for other in self.to_come if batch(other) != self.batch]
        ahead = self.ahead.pop(self.batch, None)
        self.job = ahead or _job_from(item)
        return ahead is not None

    def finish(self, reports: list[pytest.TestReport], nextitem, problem: str | None) -> None:
        """Ends the job when it is of no more use; a bad end is the last test's failure."""
        job = self.job
        if problem:
            job.remove()
        elif (
            nextitem is None
            or batch(nextitem) != self.batch
            or not job.told[reports[0].nodeid].agreed
        ):
            if bad_end := job.close():
                reports[-1].outcome, reports[-1].longrepr = "failed", RanksRepr([("", bad_end)])
        else:
            return
        self.job = None

    def stop(self) -> None:
        for job in (self.job, *self.ahead.values(), self.helper and self.helper.job):
            _end(job)
        self.job, self.ahead, self.to_come, self.helper = None, {}, [], None

    def pytest_sessionstart(self):  # `timeout make test` and batch systems end a run so
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", returncode=143))

    def pytest_sessionfinish(self):  # after -x, Ctrl-C or SIGTERM a job may still run
        self.stop()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _end(job: Job | None) -> None:
    if job is not None:
        job.kill()
        job.remove()


def _job_from(item) -> Job:
    """A job for this test and all that follow it in its batch."""
    items, key = item.session.items, batch(item)
    rest = [other for other in items[items.index(item) :] if batch(other) == key]
    files = list(dict.fromkeys(str(other.path) for other in rest))
    return Job(ranks_of(item), [other.nodeid for other in rest], files, item.config)


def _run_and_clear(item) -> bool:
    """Runs an ordinary test and ends its module's fixtures: pytest itself would keep them for the tests that come next,
    which run elsewhere."""
    from _pytest.runner import runtestprotocol

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
