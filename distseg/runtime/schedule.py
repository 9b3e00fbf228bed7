"""Generates pipeline schedules: the actions of one stage, or one list of actions per rank.

Every stage runs its own list of actions, and an action waits for its inputs. ``3`` is the forward
pass of micro-batch 3, ``3'`` its backward pass::

    GPipe (Huang et al. 2019), 3 stages, 4 micro-batches

    stage 0  0 1 2 3           3' 2' 1' 0'
    stage 1    0 1 2 3      3' 2' 1' 0'
    stage 2      0 1 2 3 3' 2' 1' 0'

    1F1B (PipeDream-Flush; Narayanan et al. 2021)

    stage 0  0 1 2       0' 3 1'   2'   3'
    stage 1    0 1    0' 2 1' 3 2'   3'
    stage 2      0 0' 1 1' 2 2' 3 3'

GPipe holds the activations of all micro-batches. In 1F1B, stage s of S holds those of S - s
micro-batches.

A backward pass is two computations: B, the gradient of the inputs, for which earlier stages wait,
and W, the gradients of the weights, for which no stage waits. ZB-H1 runs W when 1F1B idles. ``3'``
is B and ``3"`` is W of micro-batch 3::

    ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241)

    stage 0  0 1 2       0' 0" 3 1' 1" 2' 2" 3' 3"
    stage 1    0 1    0' 2 1' 0" 3 2' 1" 3' 2" 3"
    stage 2      0 0' 1 1' 2 2' 0" 3 3' 1" 2" 3"

Each of S stages idles for (S - 1) (F + B - W) instead of (S - 1) (F + B + W), where F, B and W are
the durations of a forward pass, of B and of W.

A *placement* is the pipeline rank of each stage. ``(0, 1, 2)`` gives each rank one stage. The V
``(0, 1, 2, 1, 0)`` gives a rank a level of the encoder and the level of the decoder that pops its
skip, so that no skip ever travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.list_scheduling import LISTED


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Yield a stage's forward passes, then its backward passes, last micro-batch first (GPipe).

    Args:
        stage: the index of the stage.
        stages: the number of stages.
        micro_batches: the number of micro-batches.
    """
    for m in range(micro_batches):
        yield Forward(stage, m)
    for m in reversed(range(micro_batches)):
        yield Backward(stage, m)


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Yield a stage's actions in 1F1B: some forward passes, then forward and backward in turn.

    The number of forward passes at the beginning is the number of stages after this stage, but at
    most ``micro_batches``.

    Args:
        stage: the index of the stage.
        stages: the number of stages.
        micro_batches: the number of micro-batches.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    for m in range(ahead):
        yield Forward(stage, m)
    for m in range(ahead, micro_batches):
        yield Forward(stage, m)
        yield Backward(stage, m - ahead)
    for m in range(micro_batches - ahead, micro_batches):
        yield Backward(stage, m)


def zb_h1(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Yield a stage's actions in ZB-H1: the actions of 1F1B, and separate weight gradients.

    B is the gradient of the inputs and W the gradients of the weights. After the B of micro-batch m
    comes the W of micro-batch m - ``stage``. Stage s of S holds at most S - s micro-batches that
    wait for their B, and s micro-batches that wait for their W. Each stage thus holds at most S
    micro-batches, as many as the first stage in 1F1B.

    Args:
        stage: the index of the stage.
        stages: the number of stages.
        micro_batches: the number of micro-batches.
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


@cache
def splits(name: str) -> bool:
    """Return True if the schedule ``name`` has separate actions for weight gradients."""
    return any(isinstance(action, Weight) for action in SCHEDULES[name](0, 1, 1))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage in a v-shaped placement: from rank 0 to the last, and back.

    There are 2 * ranks - 1 stages. ``v_placement(3)`` is ``(0, 1, 2, 1, 0)``.
    """
    return (*range(ranks), *reversed(range(ranks - 1)))


def orders(name: str, placement: Sequence[int], micro_batches: int) -> list[list[Action]]:
    """Return the actions of each rank of the pipeline, in order, for the schedule ``name``.

    Args:
        name: the name of the schedule.
        placement: the rank of each stage; ranks are numbered from 0 without gaps.
        micro_batches: the number of micro-batches.

    Raises:
        ValueError: if the schedule is unknown, ranks have gaps, or there is no micro-batch.
    """
    stages = len(placement)
    if name not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {name!r}: choose {', '.join(SCHEDULES)}")
    if not placement or set(placement) != set(range(max(placement) + 1)):
        raise ValueError(
            f"the ranks of a placement must be numbered from 0 without gaps, got {tuple(placement)}"
        )
    if micro_batches < 1:
        raise ValueError(f"a pipeline needs at least one micro-batch, got {micro_batches}")
    if len(set(placement)) < stages:
        return LISTED[name](placement, micro_batches)
    of_stage = [list(SCHEDULES[name](stage, stages, micro_batches)) for stage in range(stages)]
    return [of_stage[list(placement).index(rank)] for rank in range(stages)]
