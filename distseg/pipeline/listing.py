"""The order of actions where a rank holds several stages, found by list scheduling in unit time.

A micro-batch passes a chain of steps, forward through the stages and backward again. Ranks that are free start, of the
actions that are ready, the one furthest along the chain: backward before forward, and of two forwards the later stage's.
So micro-batches that have begun are finished first, which bounds memory. The ranks are taken to be balanced, a backward
pass to take twice a forward pass's time. All ranks compute the same lists, from nothing but the placement and the number
of micro-batches. The V on 2 ranks, 3 stages, 3 micro-batches, 1F1B, two columns a unit of time::

    stage 0 (rank 0)  0 1 2                   0'    1'      2'
    stage 1 (rank 1)    0   1   2   0'      1'      2'
    stage 2 (rank 0)        0 0'  1 1'  2 2'

Within a stage, micro-batches go through in one order, so the messages of an edge arrive in the order they are wanted.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple, Sequence

from distseg.pipeline.schedule import Action, Backward, Forward


def listed_gpipe(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """All forward passes, then the same backwards in time: a mirrored schedule keeps what must precede what."""
    forwards = _by_rank(placement, _chain(placement, _units(placement), micro_batches, micro_batches))
    return [[Forward(stage, m) for stage, m in order] + [Backward(stage, m) for stage, m in reversed(order)] for order in forwards]


def listed_1f1b(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Backward first, with at most as many micro-batches under way as there are stages: the fastest such limit, of equals the lowest."""
    stages, units = len(placement), _units(placement)
    steps, times = [*placement, *reversed(placement)], units + [2 * unit for unit in reversed(units)]
    limits = range(max(placement) + 1, stages + 1)
    starts = min((_chain(steps, times, micro_batches, limit) for limit in limits), key=lambda starts: starts[-1].time)
    return [
        [Forward(step, m) if step < stages else Backward(2 * stages - 1 - step, m) for step, m in order] for order in _by_rank(steps, starts)
    ]


LISTED = {"gpipe": listed_gpipe, "1f1b": listed_1f1b}


def _units(placement: Sequence[int]) -> list[int]:
    """Time of each stage's forward pass where all ranks have equal work and share it equally among their stages."""
    stages_of = Counter(placement)
    return [math.lcm(*stages_of.values()) // stages_of[rank] for rank in placement]


class _Start(NamedTuple):
    time: int
    step: int
    micro_batch: int


def _by_rank(steps: Sequence[int], starts: Sequence[_Start]) -> list[list[tuple[int, int]]]:
    """(step, micro-batch)"""
    return [[(step, m) for _, step, m in starts if steps[step] == rank] for rank in range(max(steps) + 1)]


def _chain(steps: Sequence[int], units: Sequence[int], micro_batches: int, in_flight: int) -> list[_Start]:
    """What starts when, in order.

    Args:
        steps: rank of each step of the chain that every micro-batch passes.
        units: of time that each step takes.
        in_flight: micro-batches at most between the start of their first and the end of their last step.
    """
    ends: list[list[int]] = [[] for _ in steps]  # of each step, by micro-batch
    free = [0] * (max(steps) + 1)  # when each rank is
    starts: list[_Start] = []
    time = 0

    def ready(step: int) -> bool:
        m = len(ends[step])
        if step == 0:
            return m < min(micro_batches, in_flight + sum(end <= time for end in ends[-1]))
        return m < len(ends[step - 1]) and ends[step - 1][m] <= time

    while len(ends[-1]) < micro_batches:
        for step in reversed(range(len(steps))):
            if free[steps[step]] <= time and ready(step):
                starts.append(_Start(time, step, len(ends[step])))
                ends[step].append(time + units[step])
                free[steps[step]] = time + units[step]
        time += 1
    return starts
