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

For ZB-H1 B and W each take a forward pass's time. W is what a rank does that has nothing else to do; a forward pass waits until the W of
a micro-batch that is as far ahead as there may be micro-batches under way has freed its memory. The same V, three columns a unit of time::

    stage 0 (rank 0)  0  1                 0' 0" 1' 2  1"                2' 2"
    stage 1 (rank 1)     0     1     0'    1'    0"    2     1"    2'    2"
    stage 2 (rank 0)           0  0' 1  1'                0" 2  2' 1" 2"
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple, Sequence

from distseg.runtime.actions import Action, Backward, Forward, Weight


def listed_gpipe(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """All forward passes, then the same backwards in time: a mirrored schedule keeps what must precede what."""
    forwards = _list(_steps(placement), micro_batches, micro_batches).orders
    return [
        order + [Backward(a.stage, a.micro_batch) for a in reversed(order)] for order in forwards
    ]


def listed_1f1b(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Backward first, with at most as many micro-batches under way as there are stages."""
    return _fastest(_steps(placement, backward=2), micro_batches)


def listed_zb_h1(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """The same with W in the gaps; micro-batches whose W is to come are under way."""
    return _fastest(_steps(placement, backward=1, weight=1), micro_batches)


LISTED = {"gpipe": listed_gpipe, "1f1b": listed_1f1b, "zb-h1": listed_zb_h1}


@dataclass(frozen=True, eq=False)
class _Step:
    """What every micro-batch passes, once ``after`` is done with it, which takes ``units`` of time."""

    kind: type[Action]
    stage: int
    rank: int
    units: int
    after: "_Step | None"


class _Lists(NamedTuple):
    end: int
    orders: list[list[Action]]


def _steps(placement: Sequence[int], backward: int = 0, weight: int = 0) -> list[_Step]:
    """The chain of a micro-batch, then what hangs on it; ``backward``, ``weight``: in forward passes' times, 0 for none."""
    units, chain = _units(placement), []
    there = [(Forward, stage, 1) for stage in range(len(placement))]
    back = [(Backward, stage, backward) for stage in reversed(range(len(placement))) if backward]
    for kind, stage, factor in there + back:
        chain.append(
            _Step(
                kind, stage, placement[stage], factor * units[stage], chain[-1] if chain else None
            )
        )
    return chain + [
        replace(step, kind=Weight, units=weight * units[step.stage], after=step)
        for step in chain
        if step.kind is Backward and weight
    ]


def _units(placement: Sequence[int]) -> list[int]:
    """Time of each stage's forward pass where all ranks have equal work and share it equally among their stages."""
    stages_of = Counter(placement)
    return [math.lcm(*stages_of.values()) // stages_of[rank] for rank in placement]


def _fastest(steps: Sequence[_Step], micro_batches: int) -> list[list[Action]]:
    """Of all limits up to the number of stages the one whose lists end first, of equals the lowest."""
    limits = range(max(step.rank for step in steps) + 1, max(step.stage for step in steps) + 2)
    return min(
        (_list(steps, micro_batches, limit) for limit in limits), key=lambda lists: lists.end
    ).orders


def _list(steps: Sequence[_Step], micro_batches: int, in_flight: int) -> _Lists:
    """What each rank starts, in order, and when the last of it ends.

    Args:
        in_flight: micro-batches of a stage at most between the start of its first and the end of its last step.
    """
    ends: dict[_Step, list[int]] = {step: [] for step in steps}  # by micro-batch
    last = {step.stage: step for step in steps}
    urgent = sorted(
        reversed(steps), key=lambda step: step.kind is Weight
    )  # what is furthest along the chain, and last what nobody waits for
    free = [0] * (max(step.rank for step in steps) + 1)  # when each rank is
    orders: list[list[Action]] = [[] for _ in free]
    time = 0

    def done(step: _Step, m: int) -> bool:
        return m < len(ends[step]) and ends[step][m] <= time

    def ready(step: _Step) -> bool:
        m = len(ends[step])
        room = step.kind is not Forward or m < in_flight or done(last[step.stage], m - in_flight)
        return m < micro_batches and room and (step.after is None or done(step.after, m))

    while any(len(ended) < micro_batches for ended in ends.values()):
        for step in urgent:
            if free[step.rank] <= time and ready(step):
                orders[step.rank].append(step.kind(step.stage, len(ends[step])))
                free[step.rank] = time + step.units
                ends[step].append(free[step.rank])
        time += 1
    return _Lists(max(free), orders)
