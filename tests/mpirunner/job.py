"""One `mpirun` over the tests of a batch, seen from outside: what its ranks have told so far, and how it ended."""

import json
import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from . import launch
from .effort import POLL, Effort, within

# Seconds of the job's effort, as all limits here: a busy machine stretches them (see `effort`).
STARTUP = 180.0  # until the first test must have started: 8 ranks import torch on 2 cores
GRACE = 3.0  # that the other ranks get to end a test that failed on one
CLOSE = 20.0  # that the ranks get to end after the last test


@dataclass
class Told:
    """What the ranks told about one test."""

    started: float | None = None  # by the job's clock, s
    failed: float | None = None  # when a report of a failure was first seen
    ended: set[int] = field(default_factory=set)  # ranks
    reports: dict[str, dict[int, dict]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # when -> rank -> report
    agreed: bool = True  # all ranks had the same outcome
    missing: bool = False  # the job did not collect this test


class Job:
    """Args: n: the number of ranks; ``alone``: a process without mpirun, which `Helper` runs in."""

    def __init__(
        self, n: int, tests: list[str], files: list[str], config: pytest.Config, alone: bool = False
    ):
        self.n = n
        self.startup: float | None = None  # seconds until the first test started
        self.told: dict[str, Told] = defaultdict(Told)
        self.broken: str | None = None  # why the ranks could not even collect
        self.folder = launch.job_folder()
        self._read = [0] * n  # bytes read of each rank's file
        self._log = (self.folder / "log").open("wb")
        what = {
            "tests": tests,
            "args": [*files, *_arguments(config)],
            "options": _options(config),
            "alone": alone,
        }
        (self.folder / "job.json").write_text(json.dumps(what))
        shown = config.getoption("capture") == "no"
        start = launch.start_alone if alone else partial(launch.start, n)
        self.process = start(
            ["-m", "mpirunner", str(self.folder)], self.folder, env={"PYTHONPATH": _python_path()},
            stdout=None if shown else self._log, stderr=None if shown else self._log, cwd=config.invocation_params.dir,
        )  # fmt: skip
        self.clock = Effort(self.process.pid)

    def wait(self, test: str, limit: float) -> str | None:
        """Until all ranks have ended the test. Returns what went wrong with the job, or None; the tests' own failures
        are in `told`."""
        told = self.told[test]
        while True:
            exited = (
                self.process.poll() is not None
            )  # asked before the files are read, so that nothing is missed
            self._listen()
            if len(told.ended) == self.n:
                return None
            if problem := self._problem(told, limit, exited):
                return problem
            time.sleep(POLL)

    def _problem(self, told: Told, limit: float, exited: bool) -> str | None:
        now = self.clock.now()
        if self.broken:
            return f"the job of {self.n} ranks could not collect its tests:\n{self.broken}"
        if told.missing:
            return f"the job of {self.n} ranks did not find this test; is its id the same in every process?"
        if exited:
            return f"the job of {self.n} ranks died (status {self.process.returncode})"
        if told.started is None:
            if self.startup is None and now > STARTUP:
                return f"the job of {self.n} ranks did not start within {STARTUP:g} s"
        elif now - told.started > limit:
            return f"timed out after {limit:g} s"
        busy = set(range(self.n)) - told.reports["teardown"].keys()
        if busy and told.failed and now - told.failed > GRACE:
            return f"ended: {GRACE:g} s after the failure {ranks_named(busy, self.n)} had not come to the end of the test"
        return None

    def _listen(self) -> None:
        for rank in range(self.n):
            path = self.folder / f"rank{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]  # the last line may still be under way
            self._read[rank] += len(whole)
            for line in whole.splitlines():
                self._hear(rank, json.loads(line))

    def _hear(self, rank: int, event: dict) -> None:
        if event["event"] == "broken":
            self.broken = event["text"]
            return
        told = self.told[event["test"]]
        match event["event"]:
            case "missing":
                told.missing = True
            case "start":
                told.started = told.started or self.clock.look()
                self.startup = self.startup or told.started
            case "report":
                told.reports[event["report"]["when"]][rank] = event["report"]
                if event["report"]["outcome"] == "failed":
                    told.failed = told.failed or self.clock.look()
            case "end":
                told.ended.add(rank)
                told.agreed &= event["agreed"]

    def close(self) -> str | None:
        """After the last test: waits for a clean end. Returns what was wrong with it, or None."""
        within(CLOSE, self.process.pid, lambda: self.process.poll() is not None)
        status = self.process.poll()
        problem = None
        if status != 0:
            how = "did not end" if status is None else f"ended with status {status}"
            self.kill()
            problem = "\n".join(
                [f"the job of {self.n} ranks {how} after its last test", *self.traces()]
            )
        self.remove()
        return problem

    def kill(self) -> None:
        alive = self.process.poll() is None
        printed = self._log_size()
        launch.end(self.process, self.folder)
        if alive:  # what mpirun says about being killed is not news
            os.truncate(self.folder / "log", printed)

    def _log_size(self) -> int:
        return (self.folder / "log").stat().st_size

    def remove(self) -> None:
        self._log.close()
        launch.remove(self.folder)

    def traces(self) -> list[str]:
        """After a kill: where each rank was, same stacks once; then the end of what the job printed."""
        if self.broken:
            return []
        where = defaultdict(list)
        for rank in range(self.n):
            path = self.folder / f"rank{rank}.stack"
            if path.exists() and (stack := _own_frames(path.read_text(errors="replace"))):
                where[stack].append(rank)
        stacks = [
            f"--- stack of {ranks_named(ranks, self.n)}\n{stack}" for stack, ranks in where.items()
        ]
        log = (self.folder / "log").read_text(errors="replace").strip().splitlines()[-40:]
        return stacks + (["--- the job's last output", *log] if log else [])


def ranks_named(ranks, n: int) -> str:
    """[1, 3] -> 'ranks 1, 3 of 4'."""
    ranks = sorted(ranks)
    if len(ranks) == n:
        return f"all {n} ranks" if n > 1 else "rank 0 of 1"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {n}"


def _own_frames(dump: str) -> str:
    """A fault handler's dump without pytest's own frames, and without addresses that differ between ranks."""
    kept, ours = [], True
    for line in dump.splitlines():
        if not line.startswith("  File "):
            ours = True
        elif "/mpirunner/rank.py" in line:
            kept.append("  (at the end of the test, waiting for the others)")
            ours = False
        elif "/_pytest/" in line or "/pluggy/" in line:
            ours = False
        if ours and line.strip() and not line.startswith(NOT_NEWS):
            kept.append(re.sub(r"hread 0x[0-9a-f]+", "hread", line))
    return "\n".join(kept)


NOT_NEWS = ("Extension modules", "Fatal Python error: Aborted")


def _arguments(config: pytest.Config) -> list[str]:
    """The parent's options that change what a test does or how its failure reads."""
    args = [
        f"--rootdir={config.rootpath}",
        f"--capture={'no' if config.getoption('capture') == 'no' else 'fd'}",
    ]
    args += ["-c", str(config.inipath)] if config.inipath else []
    args += ["-m", ""]  # the parent has selected
    args += [arg for warning in config.getoption("pythonwarnings") or [] for arg in ("-W", warning)]
    args += [arg for ini in config.getoption("override_ini") or [] for arg in ("-o", ini)]
    return args


def _options(config: pytest.Config) -> dict:
    """Those of the terminal plugin, which the ranks run without."""
    return {
        name: config.getoption(name)
        for name in ("verbose", "showlocals", "tbstyle")
        if hasattr(config.option, name)
    }


def _python_path() -> str:
    ours = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
