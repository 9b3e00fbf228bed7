"""Orders the actions of ranks with several stages, by list scheduling in unit time.

A micro-batch passes a chain of steps, forward through the stages and backward again. A free rank
starts the ready action that is furthest along the chain: backward before forward, and the later
stage of two forward passes. Micro-batches that have begun are therefore finished first, which
bounds memory. The ranks are assumed to have equal work, and a backward pass to take twice the time
of a forward pass. All ranks compute the same lists from the placement and the number of
micro-batches. The picture shows 1F1B with the v-shaped placement, for 2 ranks, 3 stages and 3
micro-batches; a unit of time is two columns wide::

    stage 0 (rank 0)  0 1 2                   0'    1'      2'
    stage 1 (rank 1)    0   1   2   0'      1'      2'
    stage 2 (rank 0)        0 0'  1 1'  2 2'

Micro-batches pass every stage in the same order, so the messages of an edge arrive in the order in
which the receiver reads them.

In ZB-H1, a backward pass is divided into B (gradient of the inputs) and W (gradients of the
weights), which each take the time of a forward pass. A rank runs W (``1"``) when it would otherwise
idle. With a limit of n micro-batches under way, the forward pass of micro-batch m waits until the W
of micro-batch m - n has freed its memory. The picture shows the same example; a unit of time is
three columns wide::

    stage 0 (rank 0)  0  1                 0' 0" 1' 2  1"                2' 2"
    stage 1 (rank 1)     0     1     0'    1'    0"    2     1"    2'    2"
    stage 2 (rank 0)           0  0' 1  1'                0" 2  2' 1" 2"
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distseg.runtime.actions import Action, Backward, Forward, Weight


def listed_gpipe(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Return each rank's actions: all forward passes, then the backward passes in reverse order.

    This is the order of GPipe. The reverse of a valid order of forward passes is a valid order of
    backward passes.

    Args:
        placement: the rank of each stage.
        micro_batches: the number of micro-batches.
    """
    forwards = _list(_steps(placement), micro_batches, micro_batches).orders
    return [
        order + [Backward(a.stage, a.micro_batch) for a in reversed(order)] for order in forwards
    ]


def listed_1f1b(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Return each rank's actions in the order of 1F1B, for any placement of stages.

    A stage holds at most as many micro-batches at once as there are stages. It holds a micro-batch
    from the start of its forward pass to the end of its backward pass.

    Args:
        placement: the rank of each stage.
        micro_batches: the number of micro-batches.
    """
    return _fastest(_steps(placement, backward=2), micro_batches)


def listed_zb_h1(placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Return each rank's actions in the order of ZB-H1, for any placement of stages.

    ZB-H1 fills the idle time of 1F1B with W, the computation of weight gradients.

    Args:
        placement: the rank of each stage.
        micro_batches: the number of micro-batches.
    """
    return _fastest(_steps(placement, backward=1, weight=1), micro_batches)


LISTED = {"gpipe": listed_gpipe, "1f1b": listed_1f1b, "zb-h1": listed_zb_h1}


@dataclass(frozen=True, eq=False)
class _Step:
    """One pass of a micro-batch through a stage: forward, backward or weight gradients.

    Attributes:
        kind: Forward, Backward or Weight.
        stage: the stage.
        rank: the rank of the stage.
        units: the duration of the pass, in the unit of time of :func:`_units`.
        after: the pass of the same micro-batch that must end before this one begins; None for the
            first pass.
    """

    kind: type[Action]
    stage: int
    rank: int
    units: int
    after: _Step | None


class _Lists(NamedTuple):
    end: int
    orders: list[list[Action]]


def _steps(placement: Sequence[int], backward: int = 0, weight: int = 0) -> list[_Step]:
    """Return the passes of a micro-batch through all stages: forward, backward, then weight passes.

    Args:
        placement: the rank of each stage.
        backward: the time of a backward pass as a multiple of a forward pass; 0 for no backward
            passes.
        weight: the time of a weight pass as a multiple of a forward pass; 0 for no weight passes.
    """
    units, chain = _units(placement), []
    forwards = [(Forward, stage, 1) for stage in range(len(placement))]
    back_through = reversed(range(len(placement)))
    backwards = [(Backward, stage, backward) for stage in back_through if backward]
    for kind, stage, factor in forwards + backwards:
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
    """Return the duration of each stage's forward pass, as a whole number of units of time.

    All ranks are assumed to have equal work. The stages of a rank share its work equally. For the
    placement (0, 1, 2, 1, 0), the result is [1, 1, 2, 1, 1], because only rank 2 has one stage.

    Args:
        placement: the rank of each stage.
    """
    stages_of = Counter(placement)
    return [math.lcm(*stages_of.values()) // stages_of[rank] for rank in placement]


def _fastest(steps: Sequence[_Step], micro_batches: int) -> list[list[Action]]:
    """Return each rank's actions, in order, in the fastest of several schedules.

    The schedules differ in the largest number of micro-batches that may be under way in a stage,
    which goes from the number of ranks to the number of stages. If several schedules end at the
    same time, the one with the smallest number is taken.

    Args:
        steps: the passes of one micro-batch (:func:`_steps`).
        micro_batches: the number of micro-batches.
    """
    limits = range(max(step.rank for step in steps) + 1, max(step.stage for step in steps) + 2)
    return min(
        (_list(steps, micro_batches, limit) for limit in limits), key=lambda lists: lists.end
    ).orders


def _list(steps: Sequence[_Step], micro_batches: int, in_flight: int) -> _Lists:
    """Return the actions of each rank in order, and the time when the last one ends.

    Args:
        steps: the passes of one micro-batch through all stages.
        micro_batches: the number of micro-batches.
        in_flight: the largest number of micro-batches under way in a stage. A micro-batch is under
            way from the start of the stage's first pass until the end of its last pass.
    """
    ends: dict[_Step, list[int]] = {step: [] for step in steps}  # Per micro-batch.
    last = {step.stage: step for step in steps}
    # Steps furthest along the chain come first; W comes last, because nothing waits for it.
    urgent = sorted(reversed(steps), key=lambda step: step.kind is Weight)
    free = [0] * (max(step.rank for step in steps) + 1)  # Time from which each rank is free.
    orders: list[list[Action]] = [[] for _ in free]
    time = 0

    def done(step: _Step, m: int) -> bool:
        return m < len(ends[step]) and ends[step][m] <= time

    def ready(step: _Step) -> bool:
        m = len(ends[step])
        fits = step.kind is not Forward or m < in_flight or done(last[step.stage], m - in_flight)
        return m < micro_batches and fits and (step.after is None or done(step.after, m))

    while any(len(ended) < micro_batches for ended in ends.values()):
        for step in urgent:
            if free[step.rank] <= time and ready(step):
                orders[step.rank].append(step.kind(step.stage, len(ends[step])))
                free[step.rank] = time + step.units
                ends[step].append(free[step.rank])
        time += 1
    return _Lists(max(free), orders)
