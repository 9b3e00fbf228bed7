"""Count the micro-batches of which a pipeline stage holds tensors at each moment of a step.

The counts follow from the schedule and from what is recomputed. For each micro-batch in flight a
stage holds all that its backward pass needs, or only its inputs if it recomputes activations. A
schedule may split a backward pass into B (gradients of activations) and W (gradients of weights).
Between B and W a stage holds the inputs of its convolutions and the gradients of their outputs.
The receive buffers of the next passes are allocated ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple, get_args

from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.schedule import SCHEDULES, splits
from distseg.runtime.stage_program import AHEAD, most_leaving, recomputed

Recompute = Literal["never", "except_last", "always"]


@dataclass(frozen=True)
class Policy:
    """Schedule, recomputation and optimizer, on which the memory and time of a pipeline depend."""

    micro_batches: int = 1
    """Micro-batches of an optimizer step."""
    schedule: str = "gpipe"
    """Order of the passes: gpipe, 1f1b or zb-h1 (:data:`distseg.runtime.schedule.SCHEDULES`)."""
    recompute: Recompute = "never"
    """Micro-batches whose activations are recomputed in the backward pass.

    ``never`` means no micro-batch, ``always`` all of them. ``except_last`` leaves out micro-batches
    whose backward pass immediately follows their forward pass.
    """
    optimizer_copies: int = 2
    """Values that the optimizer keeps per weight: Adam 2, SGD with momentum 1."""

    def __post_init__(self):
        if self.micro_batches < 1:
            raise ValueError(f"a step must have at least one micro-batch, got {self.micro_batches}")
        for name, choices in (("schedule", tuple(SCHEDULES)), ("recompute", get_args(Recompute))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    def actions(self, stage: int, stages: int) -> list[Action]:
        """Return the passes of stage ``stage`` of a pipeline of ``stages`` stages, in order.

        The result has all passes of a step. The rank of the stage has no other stage.
        """
        return list(SCHEDULES[self.schedule](stage, stages, self.micro_batches))

    def forward_passes(self, stage: int, stages: int) -> float:
        """Return how often a stage runs the forward pass of a micro-batch, on average in a step.

        The result is 1 without recomputation, and 2 if all micro-batches are recomputed.

        Args:
            stage: the index of the stage.
            stages: the number of stages.
        """
        if self.recompute != "except_last":
            return 2 if self.recompute == "always" else 1
        return 1 + len(recomputed(self.actions(stage, stages), self.recompute)) / self.micro_batches


class Held(NamedTuple):
    """Numbers of micro-batches that have tensors on a stage at one moment, by kind of tensors.

    Attributes:
        full: number of micro-batches of which the stage holds all activations.
        inputs: number of micro-batches of which the stage holds only its inputs, for recomputation.
        arriving: number of receive buffers that are allocated for inputs of later micro-batches.
        returning: number of receive buffers that are allocated for gradients of the stage's
            outputs.
        leaving: number of micro-batches whose outputs the next stage has not received yet, and of
            which this stage holds no activations.
        copied: number of micro-batches whose outputs the next stage has not received yet, and of
            which this stage holds all activations. If only a part of an output is sent, a copy of
            this part is held until it is received.
        put_off: number of micro-batches whose backward pass is done, but whose weight gradients are
            still to be computed.
        backward: True if a backward pass is in progress.
        passing: True if a forward pass is in progress whose activations are not kept.
    """

    full: int
    inputs: int
    arriving: int = 0
    returning: int = 0
    leaving: int = 0
    put_off: int = 0
    backward: bool = False
    passing: bool = False
    copied: int = 0


def holdings(stage: int, stages: int, policy: Policy) -> set[Held]:
    """Return all different :class:`Held` of a stage during the passes of an optimizer step.

    Each forward, recomputed or backward pass has one :class:`Held`: how many micro-batches the
    stage holds in memory at that time. The peak memory of the stage is the largest that follows
    from any of them (:mod:`distseg.planning.stage_memory`).

    The counts assume that later stages have not yet received the outputs of this stage for as many
    micro-batches as a stage may have under way (:func:`most_leaving`). The receive buffers of the
    next ``AHEAD`` passes are allocated already.

    Args:
        stage: the index of the stage.
        stages: the number of stages.
        policy: the schedule and recomputation.
    """
    actions = policy.actions(stage, stages)
    again = recomputed(actions, policy.recompute)
    # True for each forward pass and False for each backward pass, in order.
    passes = [isinstance(a, Forward) for a in actions if not isinstance(a, Weight)]
    late = most_leaving(stage, stages)
    full = inputs = put_off = done = 0
    found = set()
    for action in actions:
        if isinstance(action, Weight):
            put_off -= 1
            continue
        dropped = (action.stage, action.micro_batch) in again
        done += 1
        ahead = passes[done : done + AHEAD]
        arriving, returning = sum(ahead), len(ahead) - sum(ahead)
        if isinstance(action, Forward):
            full, inputs = full + (not dropped), inputs + dropped
        late_inputs, late_full = min(inputs, late), min(full, late)
        now = Held(full, inputs, arriving, returning, late_inputs, put_off, copied=late_full)
        if isinstance(action, Forward):
            found.add(now._replace(passing=dropped))
        if isinstance(action, Backward):
            # Activations are recomputed just before the backward pass, while the stage waits for
            # the gradient of its output.
            if dropped:
                recomputing = now._replace(full=full + 1, inputs=inputs - 1)
                found.add(recomputing._replace(returning=returning + 1))
            found.add(
                now._replace(
                    full=full + dropped,
                    inputs=inputs - dropped,
                    leaving=min(inputs - dropped, late),
                    backward=True,
                    copied=min(full - (not dropped), late),
                )
            )
            full -= not dropped
            inputs -= dropped
            put_off += splits(policy.schedule)
    return found


def largest_holdings(stage: int, stages: int, policy: Policy) -> frozenset[Held]:
    """Return how many micro-batches a stage holds at the moments that may need the most memory.

    The result has a :class:`Held` for each such moment. It leaves out a moment if the stage holds,
    at another moment, at least as many micro-batches of every kind (:func:`holdings`).

    Args:
        stage: the index of the stage.
        stages: the number of stages.
        policy: the schedule and recomputation.
    """
    if policy.schedule != "zb-h1":
        # Only the number of stages after this stage matters.
        stage, stages = 0, stages - stage
    # With more micro-batches than these, the same passes repeat.
    few = min(policy.micro_batches, 2 * stages + AHEAD + 2)
    found = _largest_holdings(stage, stages, Policy(few, policy.schedule, policy.recompute))
    if policy.schedule != "gpipe" or few == policy.micro_batches:
        return found
    # GPipe holds all micro-batches before its first backward pass.
    more = policy.micro_batches - few
    if policy.recompute == "never":
        return frozenset(held._replace(full=held.full + more) for held in found)
    return frozenset(held._replace(inputs=held.inputs + more) for held in found)


@lru_cache(1 << 14)
def _largest_holdings(stage: int, stages: int, policy: Policy) -> frozenset[Held]:
    found: list[Held] = []
    # If a moment holds at least as much of every kind as another one, it comes before that one.
    for one in sorted(holdings(stage, stages, policy), key=sum, reverse=True):
        if not any(all(map(ge, other, one)) for other in found):
            found.append(one)
    return frozenset(found)
