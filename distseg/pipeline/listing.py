"""The order of actions where a rank holds several stages, found by list scheduling in unit time.

A micro-batch passes a chain of steps, forward through the stages and backward again. Ranks that are free start, of the
actions that are ready, the one furthest along the chain: backward before forward, and of two forwards the later stage's.
So micro-batches that have begun are finished first, which bounds memory. All ranks compute the same lists, from nothing
but the placement and the number of micro-batches. The V on 2 ranks, 3 stages, 4 micro-batches, 1F1B::

    stage 0 (rank 0)  0 1           0' 2   1'   3   2'      3'
    stage 1 (rank 1)    0 1   0'      1'   2   2'  3    3'
    stage 2 (rank 0)      0  0' 1  1'          2  2'   3  3'

Within a stage, micro-batches go through in one order, so the messages of an edge arrive in the order they are wanted.
"""

from __future__ import annotations

from typing import Sequence

from distseg.pipeline.schedule import Action, Backward, Forward

_FORWARD, _BACKWARD = 1, 2  # units of time: the gradients of input and of weights are a convolution each


def listed_gpipe(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """All forward passes, then the same backwards in time: a mirrored schedule keeps what must precede what."""
    forwards = _by_rank(placement, _chain(placement, [_FORWARD] * len(placement), micro_batches, micro_batches))
    return [
        [Forward(stage, m) for stage, m in order] + [Backward(stage, m) for stage, m in reversed(order)] for order in forwards
    ]


def listed_1f1b(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Backward first, with at most one micro-batch more under way than there are ranks: fewer would leave ranks without work."""
    stages, in_flight = len(placement), max(placement) + 2
    steps = [*placement, *reversed(placement)]
    started = _chain(steps, [_FORWARD] * stages + [_BACKWARD] * stages, micro_batches, in_flight)
    return [
        [Forward(step, m) if step < stages else Backward(2 * stages - 1 - step, m) for step, m in order] for order in _by_rank(steps, started)
    ]


LISTED = {"gpipe": listed_gpipe, "1f1b": listed_1f1b}


def _by_rank(steps: Sequence[int], started: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    return [[(step, m) for step, m in started if steps[step] == rank] for rank in range(max(steps) + 1)]


def _chain(steps: Sequence[int], units: Sequence[int], micro_batches: int, in_flight: int) -> list[tuple[int, int]]:
    """(step, micro-batch) in order of their start.

    Args:
        steps: rank of each step of the chain that every micro-batch passes.
        units: of time that each step takes.
        in_flight: micro-batches at most between the start of their first and the end of their last step.
    """
    ends: list[list[int]] = [[] for _ in steps]  # of each step, by micro-batch
    free = [0] * (max(steps) + 1)  # when each rank is
    started: list[tuple[int, int]] = []
    time = 0

    def ready(step: int) -> bool:
        m = len(ends[step])
        if step == 0:
            return m < min(micro_batches, in_flight + sum(end <= time for end in ends[-1]))
        return m < len(ends[step - 1]) and ends[step - 1][m] <= time

    while len(ends[-1]) < micro_batches:
        for step in reversed(range(len(steps))):
            if free[steps[step]] <= time and ready(step):
                started.append((step, len(ends[step])))
                ends[step].append(time + units[step])
                free[steps[step]] = time + units[step]
        time += 1
    return started
