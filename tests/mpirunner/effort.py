"""A clock for limits that slows down as other work on the machine starves a job: what hangs is ended, what works is not.

On a quiet machine it is the wall's clock, whatever the job does: it computes, sleeps, polls, spins, or its processes wait
for each other's cores. The scheduler tells how long each thread could have run but waited for a core, and how much
processor time others got meanwhile::

    X runs  - waits for a core  . sleeps                       of 12 seconds the clock counts
    1 thread; 3 others want its core           X---X---X---    3
    1 thread that sleeps too; 3 others         X---..X---..    6   less what others took while it wanted to run
    1 thread, asleep or hanging; 3 others      ............   12
    6 ranks on 2 cores, nobody else            XXXX--------   12   waiting for each other is no loss
    6 ranks on 2 cores, 6 others               XX----------    6   of the time of two cores they get one's

It needs Linux (CONFIG_SCHED_INFO); elsewhere it is the wall's clock.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY = 0.5  # seconds between looks
SLOWEST = 20  # times its seconds: when a limit strikes at the latest, so that nothing runs for ever
POLL = 0.01  # seconds


@dataclass(frozen=True)
class Look:
    """What the kernel has counted so far."""

    wall: float  # seconds
    cores: int = 0  # that the job may use
    idle: float = 0.0  # seconds without work, of all these cores together
    threads: dict[int, tuple[float, float]] | None = (
        None  # of the job: id -> seconds on a core, seconds in wait for one
    )
    disk: bool = False  # one of them waits for a disk


def lost(before: Look, after: Look) -> float:
    """The seconds between two looks that a job would have been spared on a quiet machine."""
    seconds = after.wall - before.wall
    if after.disk:  # shared with others as well, and not where a test hangs
        return seconds
    ran, waited = _spent(before.threads or {}, after.threads or {})
    others = after.cores * seconds - (after.idle - before.idle) - ran
    taken = min(waited, max(0.0, others))  # processor time that others got while this job wanted it
    return min(seconds, ran + waited) * taken / (ran + taken) if taken else 0.0


def _spent(before: dict, after: dict) -> tuple[float, float]:
    """What all threads together ran and waited; of those that ended in between, nothing is known."""
    since = [
        (ran - r, waited - w)
        for t, (ran, waited) in after.items()
        for r, w in [before.get(t, (0.0, 0.0))]
    ]
    return sum(ran for ran, _ in since), sum(waited for _, waited in since)


class Effort:
    """The clock of a process and all that it started; or of several, which a function finds anew at each look."""

    def __init__(self, of: int | Callable[[], list[int]]):
        self._found = of if callable(of) else lambda: [of]
        self.seconds, self._last = 0.0, look(self._found())

    def now(self) -> float:
        """Seconds at the last look, which is at most ``EVERY`` old."""
        return self.seconds if time.monotonic() - self._last.wall < EVERY else self.look()

    def look(self) -> float:
        before, self._last = self._last, look(self._found())
        passed = self._last.wall - before.wall
        self.seconds += max(passed / SLOWEST, passed - lost(before, self._last))
        return self.seconds


def within(
    seconds: float, of: int | Callable[[], list[int]], happened: Callable[[], object]
) -> bool:
    """Wait until ``happened()``, at most for so many seconds of effort. Returns whether it has."""
    clock = Effort(of)
    while not happened():
        if clock.now() > seconds:
            return False
        time.sleep(POLL)
    return True


# what the kernel tells


def look(pids: list[int]) -> Look:
    try:
        threads, states = _threads(pids)
        idle = _idle()
    except (OSError, AttributeError):  # not Linux
        return Look(time.monotonic())
    return Look(time.monotonic(), len(idle), sum(idle), threads, "D" in states)


def _threads(pids: list[int]) -> tuple[dict[int, tuple[float, float]], str]:
    """The counts and states of all threads of these processes and of those below them."""
    found, states, todo = {}, "", [*pids]
    for process in todo:  # which grows
        for thread in _listed(f"/proc/{process}/task"):
            try:
                ran, waited, _ = _read(f"/proc/{process}/task/{thread}/schedstat").split()
                states += _read(f"/proc/{process}/task/{thread}/stat").rpartition(")")[2][1]
                todo += _read(f"/proc/{process}/task/{thread}/children").split()
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            found[int(thread)] = (int(ran) * 1e-9, int(waited) * 1e-9)
    return found, states


def _idle() -> list[float]:
    """Seconds that each core which this process may use has had no work, since the machine started."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    counts = [line.split() for line in _read("/proc/stat").splitlines() if line.startswith("cpu")]
    return [
        (int(idle) + int(disk)) / os.sysconf("SC_CLK_TCK")
        for name, _, _, _, idle, disk, *_ in counts
        if name in mine
    ]


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _read(path: str) -> str:
    """Some hundred of these are read a second, by bare system calls."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).decode(errors="replace")
    finally:
        os.close(file)
