"""The pytest that the user started: runs `parallel` tests in jobs and reports each of them as its own."""

import signal

import pytest

from .job import Job
from .marks import batch, limit, ranks_of
from .merge import RanksRepr, lost, merged


class Parent:
    def __init__(self):
        self.job: Job | None = None
        self.batch = None  # what the running job is for
        self.hopeless: set[tuple] = set()  # batches whose job could not start: not tried again for each test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if ranks_of(item) is not None:
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in self.verdict(item, nextitem):
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            return True
        if nextitem is not None and ranks_of(nextitem) is not None:
            return _run_and_clear(item)
        return None

    def verdict(self, item, nextitem) -> list[pytest.TestReport]:
        if batch(item) in self.hopeless:
            return [lost(item, "its job did not start: see the first test of this file and number of ranks")]
        first = self.job is None or self.batch != batch(item)
        if first:
            self.begin(item)
        if problem := self.job.wait(item.nodeid, limit(item)):
            self.job.kill()
            if self.job.startup is None:
                self.hopeless.add(self.batch)
        reports = merged(item, self.job, problem)
        if first and self.job.startup:
            reports[0].duration += self.job.startup  # so that --durations shows what starting a job costs
        self.finish(reports, nextitem, problem)
        return reports

    def begin(self, item) -> None:
        """A job for this test and all that follow it in its batch."""
        self.stop()
        self.batch = batch(item)
        items = item.session.items
        rest = [other for other in items[items.index(item) :] if batch(other) == self.batch]
        files = list(dict.fromkeys(str(other.path) for other in rest))
        self.job = Job(ranks_of(item), [other.nodeid for other in rest], files, item.config)

    def finish(self, reports: list[pytest.TestReport], nextitem, problem: str | None) -> None:
        """Ends the job when it is of no more use; a bad end is the last test's failure."""
        job = self.job
        if problem:
            job.remove()
        elif nextitem is None or batch(nextitem) != self.batch or not job.told[reports[0].nodeid].agreed:
            if bad_end := job.close():
                reports[-1].outcome, reports[-1].longrepr = "failed", RanksRepr([("", bad_end)])
        else:
            return
        self.job = None

    def stop(self) -> None:
        if self.job is not None:
            self.job.kill()
            self.job.remove()
            self.job = None

    def pytest_sessionstart(self):  # `timeout make test` and batch systems end a run so
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", returncode=143))

    def pytest_sessionfinish(self):  # after -x, Ctrl-C or SIGTERM a job may still run
        self.stop()


def _run_and_clear(item) -> bool:
    """Runs an ordinary test and ends its module's fixtures: pytest itself would keep them for the parallel tests that
    come next, which run elsewhere."""
    from _pytest.runner import runtestprotocol

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
