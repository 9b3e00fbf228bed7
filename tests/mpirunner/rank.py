"""pytest on one rank of a job: runs the batch's tests in its order and writes down what happens, a JSON object a line."""

import json
import time
from pathlib import Path

import pytest


class Rank:
    def __init__(self, folder: Path, job: dict, comm):
        self.tests, self.options = job["tests"], job["options"]
        self.agree = comm.Split(
            0, comm.rank
        )  # ours alone: a test's stray message cannot be taken for a verdict
        self._file = (folder / f"rank{comm.rank}.jsonl").open("a", buffering=1)
        self._outcome: list[str] = []
        self.together = True  # all ranks had the same outcomes

    def pytest_configure(self, config):
        self.config = config
        vars(config.option).update(self.options)

    def write(self, event: str, **what) -> None:
        self._file.write(json.dumps({"event": event, **what}, default=str) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        collected = {item.nodeid: item for item in items}
        for test in self.tests:
            if test not in collected:
                self.write("missing", test=test)
        items[:] = [collected[test] for test in self.tests if test in collected]

    def pytest_collectreport(self, report):
        if report.failed:
            self.write("broken", text=str(report.longrepr))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self._outcome = []
        self.write("start", test=item.nodeid)
        result = yield
        here = (
            self.agree.Ibarrier()
        )  # asleep: MPI's own waiting takes the cores from the ranks that still work
        while not here.Test():
            time.sleep(0.0005)
        agreed = (
            len(set(self.agree.allgather(" ".join(self._outcome)))) == 1
        )  # ... so the next test starts together
        self.write("end", test=item.nodeid, agreed=agreed)
        self.together = agreed
        if not agreed:  # messages may be left over: a fresh job runs the rest
            item.session.shouldstop = "ranks disagree"
        return result

    def pytest_runtest_logreport(self, report):
        self._outcome.append(report.outcome)
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.write("report", test=report.nodeid, report=data)
