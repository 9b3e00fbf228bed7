"""Model the memory of a pipeline stage: weights, optimizer state and activations in flight.

Any consecutive layers are a possible stage, so sizes are tables: ``full[a, b]`` belongs to layers
a..b-1. For each micro-batch in flight a stage holds its inputs and outputs and all tensors that
autograd keeps. If the stage recomputes activations, it holds only the tensors that it received: its
input and the skips that end in it. A schedule may split a backward pass into B (gradients of
activations) and W (gradients of weights). Between B and W a stage holds the inputs of its
convolutions and the gradients of their outputs. The receive buffers of the next actions are
allocated ahead. A tensor that is held for several of these reasons is counted once.
benchmarks/stage_memory.py compares this model with measured memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Literal, NamedTuple

import numpy as np

from distseg.planning.balance import sums
from distseg.planning.cost import Costs, Seconds
from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.schedule import SCHEDULES, splits
from distseg.runtime.stage_program import AHEAD, recomputed


@dataclass(frozen=True)
class Policy:
    """Schedule, recomputation and optimizer of a pipeline, on which its memory and time depend."""

    micro_batches: int = 1
    """Micro-batches of an optimizer step."""
    schedule: Literal["gpipe", "1f1b", "zb-h1"] = "gpipe"
    """Order of the passes (:mod:`distseg.runtime.schedule`)."""
    recompute: Literal["never", "except_last", "always"] = "never"
    """Micro-batches whose activations are recomputed in the backward pass.

    ``never`` means no micro-batch, ``always`` all of them. ``except_last`` leaves out micro-batches
    whose backward pass immediately follows their forward pass.
    """
    optimizer_copies: int = 2
    """Values that the optimizer keeps per weight: Adam 2, SGD with momentum 1."""

    def __post_init__(self):
        if self.micro_batches < 1:
            raise ValueError(f"a step must have at least one micro-batch, got {self.micro_batches}")
        for name, choices in (
            ("schedule", tuple(SCHEDULES)),
            ("recompute", ("never", "except_last", "always")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    def actions(self, stage: int, stages: int) -> list[Action]:
        """Return the actions of stage number ``stage`` of ``stages`` in a step, in order.

        The rank of the stage is assumed to have no other stage.
        """
        return list(SCHEDULES[self.schedule](stage, stages, self.micro_batches))

    def forward_passes(self, stage: int, stages: int) -> float:
        """Return how often a stage runs the forward pass of a micro-batch, on average in a step.

        The result is 1 without recomputation, and 2 if all micro-batches are recomputed.

        Args:
            stage: the number of the stage.
            stages: the number of stages.
        """
        if self.recompute != "except_last":
            return 2 if self.recompute == "always" else 1
        return 1 + len(recomputed(self.actions(stage, stages), self.recompute)) / self.micro_batches


class Held(NamedTuple):
    """Numbers of micro-batches whose tensors a stage holds at one moment, by the kind of tensors.

    Attributes:
        full: micro-batches of which the stage holds all activations.
        inputs: micro-batches of which the stage holds only the inputs, for recomputation.
        arriving: later micro-batches whose inputs have a receive buffer already.
        returning: micro-batches whose output gradients have a receive buffer already.
        leaving: micro-batches without activations whose outputs the next stage has not received.
        put_off: micro-batches whose weight gradients are still to be computed.
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


def holdings(stage: int, stages: int, policy: Policy) -> set[Held]:
    """Return the numbers of micro-batches that a stage holds in memory during the passes of a step.

    Each forward, recomputed or backward pass gives one :class:`Held`; equal ones are returned once.
    The peak memory of the stage is the largest that follows from any of them
    (:func:`stage_memory`). All stages are assumed to have about the same speed. Then the next stage
    lags behind by as many micro-batches as there are stages after it, but by at least one. Receives
    are posted ``AHEAD`` passes early.

    Args:
        stage: the number of the stage.
        stages: the number of stages.
        policy: the schedule and recomputation.
    """
    actions = policy.actions(stage, stages)
    again = recomputed(actions, policy.recompute)
    # True for each forward pass and False for each backward pass, in order.
    passes = [isinstance(a, Forward) for a in actions if not isinstance(a, Weight)]
    late = max(stages - 2 - stage, int(stage + 1 < stages))
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
            leaving = min(inputs, late)
            found.add(Held(full, inputs, arriving, returning, leaving, put_off, passing=dropped))
        if isinstance(action, Backward):
            # Activations are recomputed just before the backward pass, while the stage waits for
            # the gradient of its output.
            if dropped:
                found.add(
                    Held(full + 1, inputs - 1, arriving, returning + 1, min(inputs, late), put_off)
                )
            found.add(
                Held(
                    full + dropped,
                    inputs - dropped,
                    arriving,
                    returning,
                    min(inputs - dropped, late),
                    put_off,
                    backward=True,
                )
            )
            full -= not dropped
            inputs -= dropped
            put_off += splits(policy.schedule)
    return found


def largest_holdings(stage: int, stages: int, policy: Policy) -> frozenset[Held]:
    """Return the results of :func:`holdings` that can have the peak memory.

    A :class:`Held` is left out if another one holds at least as many tensors of every kind.

    Args:
        stage: the number of the stage.
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
    found = list(holdings(stage, stages, policy))
    numbers = np.array(found, dtype=np.int64)
    at_least = (numbers[:, None] >= numbers).all(2)  # [i, j]: i holds at least as much as j
    return frozenset(one for one, others in zip(found, at_least.sum(0)) if others == 1)


@dataclass(frozen=True)
class Ranges:
    """Tables of memory for all possible stages; entry [a, b] belongs to layers a..b-1.

    Every table has shape (n + 1, n + 1) for n layers. Values are bytes of one micro-batch unless
    stated otherwise.

    Attributes:
        parameters: number of parameters.
        full: tensors that autograd keeps, the stage's inputs and output, and skips that begin in
            the stage and end in a later one.
        inputs: all inputs of the stage, skips from earlier stages included.
        working: bytes that a backward pass takes at its peak beyond the activations with which it
            begins. These are gradients of the current layer's input, output and weights and of the
            skips, less the activations that have been freed by then.
        put_off: inputs of convolutions and gradients of their outputs. ZB-H1 holds them from the
            backward pass until the pass W, which computes the weight gradients.
        working_apart: like ``working``, for a schedule that computes weight gradients later
            (ZB-H1).
        received: tensors that the stage receives from earlier stages in the forward pass.
        sent: tensors that the stage sends to later stages in the forward pass.
        weight_bytes: bytes of a weight, a gradient, or a value of the optimizer.
        cast_bytes: bytes of a weight's copy in the number type of the layers; 0 without copies.
    """

    parameters: np.ndarray
    full: np.ndarray
    inputs: np.ndarray
    working: np.ndarray
    put_off: np.ndarray
    working_apart: np.ndarray
    received: np.ndarray
    sent: np.ndarray
    weight_bytes: int = 4
    cast_bytes: int = 0

    def lasting(self, copies: int) -> np.ndarray:
        """Return the bytes that a stage holds all the time: weights, gradients, optimizer state.

        The copies of weights in another number type (``cast_bytes``) are included.

        Args:
            copies: values that the optimizer keeps per weight.
        """
        return ((2 + copies) * self.weight_bytes + self.cast_bytes) * self.parameters

    def load_at(self, held: frozenset[Held], apart: bool, where: tuple[int, int]) -> float:
        """Return one entry of the table that :attr:`load` returns, without computing the others.

        Args:
            held: what the stage may hold at once.
            apart: True for a schedule that computes weight gradients later.
            where: the entry (a, b).
        """
        return max(float(load) for load in self._loads(held, apart, where))

    @cached_property
    def load(self) -> Callable[[frozenset[Held], bool], np.ndarray]:
        """Function that returns the bytes of activations and of the backward pass at the peak.

        Its arguments are what a stage may hold at once, and True for a schedule that computes
        weight gradients later. The last results are kept.
        """
        return lru_cache(_LOADS)(self._load)

    def _load(self, held: frozenset[Held], apart: bool) -> np.ndarray:
        return reduce(np.maximum, self._loads(held, apart, ...))

    def _loads(self, held: frozenset[Held], apart: bool, where) -> Iterator[np.ndarray]:
        """Yield, for each of ``held``, the bytes of activations and of the backward pass.

        ``where`` is the entry (a, b) of the tables, or ``...`` for whole tables.
        """
        working = self.working_apart if apart else self.working
        tables = (self.full, self.inputs, self.received, self.sent, self.put_off, working)
        entries = [table[where] for table in tables]
        for one in held:
            numbers = (
                one.full,
                one.inputs,
                one.arriving,
                one.returning + one.leaving,
                one.put_off,
                one.backward,
            )
            yield sum(number * entry for number, entry in zip(numbers, entries) if number)


_LOADS = 512  # tables that Ranges.load keeps


def ranges_of(costs: Costs) -> Ranges:
    """Return the memory tables of all possible stages of a network with these costs."""
    n, size = len(costs.layers), costs.sizes
    results = [0, *(layer.result for layer in costs.layers)]  # results[i] is the input of layer i
    full, handed, working, put_off, working_apart, received, sent = (
        np.zeros((n + 1, n + 1)) for _ in range(7)
    )
    for a in range(n):
        inputs, kept, read = {results[a]}, set(), set()
        rise = rise_apart = activations = gradients = 0
        for b in range(a + 1, n + 1):
            layer = costs.layers[b - 1]
            inputs |= {results[s.stash] for s in costs.skips if s.stash < a and s.pop == b - 1}
            kept |= layer.kept
            waiting = {results[s.stash] for s in costs.skips if a <= s.stash < b <= s.pop}
            skips = sum(size[t] for t in waiting)
            activations += layer.activation
            # During the backward pass of layer b - 1, all layers before b still hold activations.
            in_work = (
                activations
                + size[results[b - 1]]
                + size[results[b]]
                + costs.weight_bytes * layer.parameters
            )
            rise = max(rise, in_work)
            if layer.puts_off:
                read |= layer.kept
                gradients += layer.output
                rise_apart += layer.output + sum(size[t] for t in layer.kept)
            rise_apart = max(rise_apart, in_work)
            handed[a, b] = sum(size[t] for t in inputs)
            full[a, b] = sum(size[t] for t in kept | inputs | waiting | {results[b]})
            received[a, b] = handed[a, b] if a > 0 else 0
            sent[a, b] = skips + (size[results[b]] if b < n else 0)
            working[a, b] = skips + rise - activations
            put_off[a, b] = gradients + sum(size[t] for t in read)
            working_apart[a, b] = skips + rise_apart - activations
    return Ranges(
        sums([layer.parameters for layer in costs.layers]),
        full,
        handed,
        working,
        put_off,
        working_apart,
        received,
        sent,
        costs.weight_bytes,
        costs.cast_bytes,
    )


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of a stage by purpose.

    If the memory is computed for all stages of layers a..b-1 at once, each field is an array with
    the bytes in entry [a, b].

    Attributes:
        weights: bytes of the parameters, and of their copies in another number type.
        gradients: bytes of the parameters' gradients.
        optimizer: bytes of the optimizer's state.
        activations: bytes of activations and of buffers for messages: the rest of the peak.
        working: bytes that a backward pass takes beyond the activations (:class:`Ranges`).
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """Peak bytes of the stage for all purposes together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def stage_memory(ranges: Ranges, where, stage: int, stages: int, policy: Policy) -> StageMemory:
    """Return the peak memory of layers a..b-1 as stage ``stage`` of ``stages``.

    Args:
        ranges: the memory tables of the network.
        where: ``(a, b)``, or ``...`` for all a and b at once, which gives arrays.
        stage: the number of the stage.
        stages: the number of stages.
        policy: the schedule, recomputation and optimizer.
    """
    weights = ranges.weight_bytes * ranges.parameters[where]
    apart = splits(policy.schedule)
    working = (ranges.working_apart if apart else ranges.working)[where]
    load = ranges.load(largest_holdings(stage, stages, policy), apart)[where]
    return StageMemory(weights, weights, policy.optimizer_copies * weights, load - working, working)


def peaks(ranges: Ranges, stages: int, policy: Policy) -> np.ndarray:
    """Return the peak bytes of layers a..b-1 as stage s, in entry [s, a, b] of (S, n + 1, n + 1).

    S is the number of stages and n the number of layers. The result is the argument ``peaks`` of
    :func:`distseg.planning.balance.fastest_split`.

    Args:
        ranges: the memory tables of the network.
        stages: the number of stages.
        policy: the schedule, recomputation and optimizer.
    """
    apart = splits(policy.schedule)
    activations = [
        ranges.load(largest_holdings(stage, stages, policy), apart) for stage in range(stages)
    ]
    return ranges.lasting(policy.optimizer_copies) + np.stack(activations)


def stage_seconds(
    costs: Costs | Seconds,
    ranges: Ranges,
    policy: Policy,
    stages: int,
    bytes_per_second: float | None = None,
) -> np.ndarray:
    """Return the seconds of layers a..b-1 as stage s, in entry [s, a, b] of (S, n + 1, n + 1).

    S is the number of stages and n the number of layers. The seconds are those of one micro-batch:
    forward, backward, recomputation and messages.

    Args:
        costs: the costs of the layers, or their seconds.
        ranges: the memory tables of the network, which give the bytes of messages.
        policy: the schedule and recomputation.
        stages: the number of stages.
        bytes_per_second: bandwidth of a link between stages. Activations and their gradients cross
            the link once each, and both stages wait. None if messages cost nothing.
    """
    passes = np.array([policy.forward_passes(stage, stages) for stage in range(stages)])
    if len(set(passes)) == 1:
        seconds = passes[0] * sums(costs.forward) + sums(costs.backward)
        seconds = np.broadcast_to(seconds, (stages, *seconds.shape))
    else:
        seconds = passes[:, None, None] * sums(costs.forward) + sums(costs.backward)
    return (
        seconds
        if bytes_per_second is None
        else seconds + 2 * (ranges.received + ranges.sent) / bytes_per_second
    )
