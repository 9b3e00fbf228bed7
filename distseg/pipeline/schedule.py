"""Who computes what in which order: pipeline schedules as pure generators of actions for one stage.

Every stage runs its own list; what makes them one schedule is that an action waits for what it needs. ``3`` stands for
the forward pass of micro-batch 3, ``3'`` for its backward pass::

    GPipe (Huang et al., 2019), 3 stages, 4 micro-batches          1F1B (PipeDream-Flush; Narayanan et al., 2021)

    stage 0   0 1 2 3         3' 2' 1' 0'                          stage 0   0 1 2     0' 3 1'   2'   3'
    stage 1     0 1 2 3     3' 2' 1' 0'                            stage 1     0 1   0' 2 1' 3 2'   3'
    stage 2       0 1 2 3 3' 2' 1' 0'                              stage 2       0 0' 1 1' 2 2' 3 3'

GPipe holds the activations of all micro-batches; 1F1B those of as many as there are stages from here to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator


@dataclass(frozen=True)
class Forward:
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return str(self.micro_batch)


@dataclass(frozen=True)
class Backward:
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.micro_batch}'"


Action = Forward | Backward


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


def forward_only(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """A pass without gradients."""
    for m in range(micro_batches):
        yield Forward(stage, m)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
