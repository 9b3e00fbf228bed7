"""Tasks over shared links: hand-computed times, links that never carry too much, and copies with delays."""

import random

import numpy as np
import pytest

from distseg.planning.shared_links import Task, critical_path, replay, simulate

GB = 1e9


def capacity(link) -> float:
    return {"card": 10 * GB, "rank": 2 * GB}[link[0]]


def message(number: int, size: float = GB, after=(), seconds=0.0) -> Task:
    """A message over a link of its own and over the card that all messages share."""
    return Task("message", after, seconds, size, (("rank", number), ("card", 0)))


def seconds(tasks) -> float:
    return simulate(tasks, capacity).seconds


def test_two_messages_on_one_link_take_twice_as_long():
    one, two = (Task("message", (), 0.0, GB, (("card", 0),)) for _ in range(2))
    assert seconds([one]) == pytest.approx(0.1)
    assert simulate([one, two], capacity).ends == pytest.approx([0.2, 0.2])


def test_messages_are_as_fast_as_their_smallest_share():
    assert seconds([message(0)]) == pytest.approx(0.5)  # its own link
    assert seconds([message(r) for r in range(5)]) == pytest.approx(0.5)  # the card is just full
    assert seconds([message(r) for r in range(10)]) == pytest.approx(1.0)  # the card


def test_a_message_is_faster_once_another_one_ends():
    """Both have 5 GB/s until the small one ends at 0.2 s; then the large one has 10 GB/s."""
    small, large = (Task("m", (), 0.0, size * GB, (("card", 0),)) for size in (1, 2))
    assert simulate([small, large], capacity).ends == pytest.approx([0.2, 0.3])


def test_a_late_message_takes_its_share_only_from_then_on():
    """The first message sends 1 GB alone in 0.1 s and the rest at half the speed."""
    first = Task("m", (), 0.0, 2 * GB, (("card", 0),))
    late = Task("m", (), 0.1, GB, (("card", 0),))
    assert simulate([first, late], capacity).ends == pytest.approx([0.3, 0.3])


def test_seconds_come_before_bytes_and_tasks_after_the_tasks_they_follow():
    run = simulate([Task("c", (), 1.0), message(0, after=(0,), seconds=0.25)], capacity)
    assert run.starts == pytest.approx([0.0, 1.0]) and run.ends == pytest.approx([1.0, 1.75])


def test_a_task_before_the_ones_that_it_follows_is_refused():
    with pytest.raises(ValueError, match="task 0 .* follows task 1: list a task after"):
        simulate([Task("c", (1,)), Task("c")], capacity)


def drawn(seed: int, count: int = 120) -> list[Task]:
    """Random computations and messages over some of eight links."""
    of = random.Random(seed)
    links = [("card", 0), ("card", 1), *(("rank", r) for r in range(6))]
    tasks = []
    for number in range(count):
        after = tuple({of.randrange(number) for _ in range(of.randrange(3))} if number else ())
        if of.random() < 0.3:
            tasks.append(Task("computing", after, of.random(), rank=number % 4))
        else:
            way = tuple(of.sample(links, of.randint(1, 3)))
            tasks.append(Task("message", after, 0.01 * of.random(), GB * of.random(), way))
    return tasks


@pytest.mark.parametrize("seed", range(5))
def test_no_link_carries_more_than_it_can(seed):
    tasks = drawn(seed)
    run = simulate(tasks, capacity)
    assert max(run.peaks[link] / capacity(link) for link in run.peaks) == pytest.approx(1.0)
    for number, task in enumerate(tasks):
        assert run.starts[number] == max((run.ends[n] for n in task.after), default=0.0)
        least = max((task.size / capacity(link) for link in task.links), default=0.0)
        assert run.ends[number] - run.starts[number] >= (task.seconds + least) * (1 - 1e-9)
    for link, size in run.carried.items():
        mine = [n for n, task in enumerate(tasks) if link in task.links]
        span = max(run.ends[n] for n in mine) - min(run.starts[n] for n in mine)
        assert size == pytest.approx(sum(tasks[n].size for n in mine))
        assert size <= capacity(link) * span * (1 + 1e-9)


def test_the_critical_path_explains_the_whole_time():
    tasks = drawn(0)
    run = simulate(tasks, capacity)
    path = list(critical_path(tasks, run))
    assert sum(run.ends[n] - run.starts[n] for n in path) == pytest.approx(run.seconds)


def test_copies_without_delays_take_as_long_as_the_simulation():
    tasks = drawn(1)
    run = simulate(tasks, capacity)
    assert replay(tasks, run, 3, lambda *_: 1.0, None) == pytest.approx(run.seconds, rel=1e-12)


@pytest.mark.parametrize("joint, expected", [(False, 3.0), (True, 4.0)])
def test_only_a_joint_task_waits_for_the_slowest_copy(joint, expected):
    """Copy 0 has a slow first task, copy 1 a slow last task."""
    tasks = [Task("a", (), 1.0), Task("b", (0,), 1.0, joint=joint)]
    delays = {"a": np.array([2.0, 1.0]), "b": np.array([1.0, 2.0])}
    run = simulate(tasks, capacity)
    assert replay(tasks, run, 2, lambda task, *_: delays[task.kind], None) == expected
