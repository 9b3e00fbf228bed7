"""Simulate tasks that compute or send bytes over shared links, event by event.

A *task* begins when the tasks that it follows have ended. It first takes its seconds, such as a
computation or the latency of a message. Then its bytes travel over all of its links at once. At
every moment a link gives the tasks on it equal shares of its bytes/s, and a task is as fast as its
smallest share. So a link never carries more than it can::

    two messages of 1 GB from one node of 10 GB/s: both take 0.2 s

:func:`simulate` finds the start and the end of each task. :func:`replay` repeats the tasks for many
copies of the simulated ranks, each with random delays of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

Link = Hashable


class Task(NamedTuple):
    """Computation or message that is simulated.

    Attributes:
        kind: the purpose of the task, such as ``computing``.
        after: the numbers of the tasks that must end before this one begins. A task's number is its
            index in the list of tasks. A task can only wait for tasks with smaller numbers.
        seconds: seconds of the computation, or the latency of the message.
        size: the number of bytes of the message, which travel after ``seconds``.
        links: the links over which the bytes travel; empty for a computation.
        rank: the rank that computes; None for a message.
        joint: True if the task waits for the tasks of ``after`` in all copies of the simulated
            ranks (:func:`replay`). An example is the sum of the gradients of a whole job.
    """

    kind: str
    after: tuple[int, ...] = ()
    seconds: float = 0.0
    size: float = 0.0
    links: tuple[Link, ...] = ()
    rank: int | None = None
    joint: bool = False


@dataclass(frozen=True)
class Run:
    """Times of simulated tasks, and the bytes that links carried.

    Attributes:
        starts, ends: the start and the end of each task, in seconds since the first start.
        peaks: for each link, the most bytes/s that it carried at any moment.
        carried: for each link, the bytes that it carried.
    """

    starts: list[float]
    ends: list[float]
    peaks: dict[Link, float]
    carried: Mapping[Link, float]

    @property
    def seconds(self) -> float:
        """Seconds until the last task ends."""
        return max(self.ends, default=0.0)


def simulate(tasks: Sequence[Task], capacity: Callable[[Link], float]) -> Run:
    """Simulate tasks, and return when each of them starts and ends.

    Args:
        tasks: the tasks. A task follows only tasks before it in the list.
        capacity: returns the bytes/s of a link.

    Raises:
        ValueError: a task follows itself or a later task.
    """
    for number, task in enumerate(tasks):
        if max(task.after, default=-1) >= number:
            raise ValueError(
                f"task {number} ({task.kind}) follows task {max(task.after)}: list a task after "
                "the tasks that it follows"
            )
    return _Events(tasks, capacity).run()


class _Events:
    """Simulation of tasks that goes on from one event to the next.

    An event is the end of a task's seconds, or the arrival of its bytes.

    Args:
        tasks: the tasks.
        capacity: returns the bytes/s of a link.
    """

    def __init__(self, tasks: Sequence[Task], capacity: Callable[[Link], float]):
        self.tasks = tasks
        self.capacity = {link: capacity(link) for task in tasks for link in task.links}
        self.starts, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.peaks: dict[Link, float] = dict.fromkeys(self.capacity, 0.0)
        self._lacks = [len(task.after) for task in tasks]
        self._followers: dict[int, list[int]] = defaultdict(list)
        for number, task in enumerate(tasks):
            for earlier in task.after:
                self._followers[earlier].append(number)
        self._on: dict[Link, dict[int, None]] = defaultdict(dict)  # tasks whose bytes travel
        # For each task whose bytes travel: bytes that are left, bytes/s, and since when.
        self._left: dict[int, float] = {}
        self._rate: dict[int, float] = {}
        self._since: dict[int, float] = {}
        # (time, number, version): the task's seconds are over (version 0), or its bytes have
        # arrived. An event whose version is not the task's newest one is out of date.
        self._queue: list[tuple[float, int, int]] = []
        self._version: Counter[int] = Counter()

    def run(self) -> Run:
        for number, lacks in enumerate(self._lacks):
            if not lacks:
                self._begin(number, 0.0)
        while self._queue:
            now = self._queue[0][0]
            changed: dict[Link, None] = {}
            # All events of one moment, rounding aside, change the shares of links together.
            while self._queue and self._queue[0][0] <= now * (1 + 1e-12):
                time, number, version = heappop(self._queue)
                if version == self._version[number]:
                    changed |= dict.fromkeys(self._event(number, version, time))
            self._share(changed, now)
        carried: Counter = Counter()
        for task in self.tasks:
            carried.update(dict.fromkeys(task.links, task.size))
        return Run(self.starts, self.ends, self.peaks, carried)

    def _begin(self, number: int, now: float) -> None:
        self.starts[number] = now
        heappush(self._queue, (now + self.tasks[number].seconds, number, 0))

    def _event(self, number: int, version: int, now: float) -> tuple[Link, ...]:
        """Let a task's bytes start to travel, or end the task.

        Args:
            number: the index of the task.
            version: 0 if the task's seconds are over, more if its bytes have arrived.
            now: the time in seconds.

        Returns:
            The links on which the number of travelling tasks changes.
        """
        task = self.tasks[number]
        starts = version == 0 and task.size > 0 and task.links
        if starts:
            self._left[number], self._rate[number], self._since[number] = task.size, 0.0, now
            self._version[number] += 1
            for link in task.links:
                self._on[link][number] = None
            return task.links
        if version:
            for link in task.links:
                del self._on[link][number]
            del self._left[number], self._rate[number], self._since[number]
        self.ends[number] = now
        for follower in self._followers[number]:
            self._lacks[follower] -= 1
            if not self._lacks[follower]:
                self._begin(follower, now)
        return task.links if version else ()

    def _share(self, changed: dict[Link, None], now: float) -> None:
        """Share the bytes/s of links anew among the tasks whose bytes travel on them.

        Args:
            changed: the links on which tasks have started or ended.
            now: the time in seconds.
        """
        for number in {number: None for link in changed for number in self._on[link]}:
            links = self.tasks[number].links
            rate = min(self.capacity[link] / len(self._on[link]) for link in links)
            if rate == self._rate[number]:
                continue
            self._left[number] -= self._rate[number] * (now - self._since[number])
            self._rate[number], self._since[number] = rate, now
            self._version[number] += 1
            end = now + max(0.0, self._left[number]) / rate
            heappush(self._queue, (end, number, self._version[number]))
        for link in changed:
            carries = sum(self._rate[number] for number in self._on[link])
            self.peaks[link] = max(self.peaks[link], carries)


Delays = Callable[[Task, np.random.Generator, int], np.ndarray | float]
"""Function that returns the factors by which the duration of a task grows in each copy."""


def replay(
    tasks: Sequence[Task], run: Run, copies: int, delays: Delays, random: np.random.Generator
) -> float:
    """Return the seconds until all tasks end in all copies of the simulated ranks, with delays.

    A task begins when all tasks that it follows have ended. It takes as long as in the simulation,
    times a random factor. So messages keep the shares of links that they had without delays. The
    copies do not wait for one another, except in joint tasks. Without delays the result is
    ``run.seconds``.

    Args:
        tasks: the tasks.
        run: the simulation of the tasks.
        copies: the number of copies.
        delays: returns the factors of a task, one for each copy or one for all.
        random: the source of random numbers.
    """
    last = {earlier: number for number, task in enumerate(tasks) for earlier in task.after}
    ends: dict[int, np.ndarray] = {}
    latest = 0.0
    for number, task in enumerate(tasks):
        start = np.zeros(copies)
        for earlier in task.after:
            np.maximum(start, ends[earlier], out=start)
        if task.joint:
            start[:] = start.max()
        ends[number] = start + (run.ends[number] - run.starts[number]) * delays(
            task, random, copies
        )
        latest = max(latest, ends[number].max())
        for earlier in task.after:
            if last[earlier] == number:
                ends.pop(earlier, None)
    return float(latest)


def critical_path(tasks: Sequence[Task], run: Run) -> Iterator[int]:
    """Yield the indices of the tasks that determine the total time, from the last task backwards.

    The first result is the task that ends last. The previous result began when the next result
    ended, which is the latest task that the previous result follows.

    Args:
        tasks: the tasks.
        run: the simulation of the tasks.
    """
    number = max(range(len(tasks)), key=run.ends.__getitem__, default=None)
    while number is not None:
        yield number
        number = max(tasks[number].after, key=run.ends.__getitem__, default=None)
