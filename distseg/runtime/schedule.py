"""Who computes what in which order: pipeline schedules as pure generators of actions for one stage, and as a list a rank.

Every stage runs its own list; what makes them one schedule is that an action waits for what it needs. ``3`` stands for
the forward pass of micro-batch 3, ``3'`` for its backward pass::

    GPipe (Huang et al., 2019), 3 stages, 4 micro-batches          1F1B (PipeDream-Flush; Narayanan et al., 2021)

    stage 0  0 1 2 3           3' 2' 1' 0'                         stage 0  0 1 2       0' 3 1'   2'   3'
    stage 1    0 1 2 3      3' 2' 1' 0'                            stage 1    0 1    0' 2 1' 3 2'   3'
    stage 2      0 1 2 3 3' 2' 1' 0'                               stage 2      0 0' 1 1' 2 2' 3 3'

GPipe holds the activations of all micro-batches; 1F1B those of as many as there are stages from here to the last.

A backward pass is two computations: B, the gradient of the inputs, which the stages before wait for, and W, the gradients of the
weights, which nobody waits for. ZB-H1 does W where 1F1B waits; ``3'`` stands for B, ``3"`` for W of micro-batch 3::

    ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241)

    stage 0  0 1 2       0' 0" 3 1' 1" 2' 2" 3' 3"
    stage 1    0 1    0' 2 1' 0" 3 2' 1" 3' 2" 3"
    stage 2      0 0' 1 1' 2 2' 0" 3 3' 1" 2" 3"

Each of S stages waits for (S - 1) (F + B - W) instead of (S - 1) (F + B + W), in the times of the three.

A *placement* says which rank of the pipeline holds each stage. ``(0, 1, 2)`` gives each rank one; the V ``(0, 1, 2, 1, 0)``
gives a rank an encoder's level and the decoder's level that pops its skip, so that no skip ever travels.
"""

from __future__ import annotations

from typing import Iterator, Sequence

from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.listing import LISTED


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """All forward passes, then all backward passes, last micro-batch first."""
    for m in range(micro_batches):
        yield Forward(stage, m)
    for m in reversed(range(micro_batches)):
        yield Backward(stage, m)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """As many forward passes ahead as there are stages behind this one, then one forward, one backward in turn."""
    ahead = min(stages - 1 - stage, micro_batches)
    for m in range(ahead):
        yield Forward(stage, m)
    for m in range(ahead, micro_batches):
        yield Forward(stage, m)
        yield Backward(stage, m - ahead)
    for m in range(micro_batches - ahead, micro_batches):
        yield Backward(stage, m)


def zb_h1(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """1F1B whose W follow the B of so many micro-batches later as there are stages before this one.

    Stage s holds at most S - s micro-batches that wait for their B and s that wait for their W: as many on each as 1F1B on the first.
    """
    done = 0
    for action in one_f_one_b(stage, stages, micro_batches):
        yield action
        if isinstance(action, Backward) and action.micro_batch >= stage:
            yield Weight(stage, done)
            done += 1
    for m in range(done, micro_batches):
        yield Weight(stage, m)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}


def splits(name: str) -> bool:
    """Whether the backward passes of a schedule leave gradients of weights to actions of their own."""
    return any(isinstance(action, Weight) for action in SCHEDULES[name](0, 1, 1))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again, 2 * ranks - 1 stages: ``v_placement(3)`` is ``(0, 1, 2, 1, 0)``."""
    return (*range(ranks), *reversed(range(ranks - 1)))


def orders(name: str, placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """The actions of each rank of the pipeline, in order, for the schedule ``name``.

    Args:
        placement: rank of each stage; ranks are numbered from 0 without gaps.

    Raises:
        ValueError: an unknown schedule, ranks with gaps, or no micro-batch.
    """
    stages = len(placement)
    if name not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {name!r}: choose {', '.join(SCHEDULES)}")
    if not placement or set(placement) != set(range(max(placement) + 1)):
        raise ValueError(
            f"the ranks of a placement are numbered from 0 without gaps, got {tuple(placement)}"
        )
    if micro_batches < 1:
        raise ValueError(f"a pipeline needs at least one micro-batch, got {micro_batches}")
    if len(set(placement)) < stages:
        return LISTED[name](placement, micro_batches)
    of_stage = [list(SCHEDULES[name](stage, stages, micro_batches)) for stage in range(stages)]
    return [of_stage[list(placement).index(rank)] for rank in range(stages)]
