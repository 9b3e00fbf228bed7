"""The memory of a pipeline stage: weights and what comes with them, and the activations of the micro-batches in flight.

Every run of layers is a possible stage, so sizes are tables: ``full[a, b]`` of layers a..b-1. Per micro-batch a stage
holds either all tensors that autograd keeps, with its inputs and outputs, or, where it recomputes them, only what it was
handed: its input and the skips that reach it. A skip waits at the stage that stashes it until the one that pops it takes
it up. A tensor that is several of these counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from distseg.pipeline.balance import sums
from distseg.pipeline.schedule import SCHEDULES, Forward
from distseg.plan.cost import Costs

WEIGHT_BYTES = 4  # float32


@dataclass(frozen=True)
class Policy:
    """How a pipeline runs, as far as memory and time depend on it."""

    micro_batches: int = 1
    """Of an optimizer step."""
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    recompute: Literal["never", "except_last", "always"] = "never"
    """Activations computed again in the backward pass: of no micro-batch, of all but the last, or of all."""
    optimizer_copies: int = 2
    """Numbers that the optimizer keeps a weight: Adam 2, SGD with momentum 1."""

    def __post_init__(self):
        if self.micro_batches < 1:
            raise ValueError(f"a step has at least one micro-batch, got {self.micro_batches}")
        for name, choices in (("schedule", tuple(SCHEDULES)), ("recompute", ("never", "except_last", "always"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def recomputes(self, micro_batch: int) -> bool:
        return self.recompute == "always" or (self.recompute == "except_last" and micro_batch < self.micro_batches - 1)

    @property
    def forward_passes(self) -> float:
        """A micro-batch and stage, on average."""
        return 1 + sum(map(self.recomputes, range(self.micro_batches))) / self.micro_batches


def holdings(stage: int, stages: int, policy: Policy) -> set[tuple[int, int]]:
    """Pairs (micro-batches with all activations, micro-batches with inputs only) that a stage holds, as its schedule goes on."""
    full = inputs = 0
    found = set()
    for action in SCHEDULES[policy.schedule](stage, stages, policy.micro_batches):
        again = policy.recomputes(action.micro_batch)
        if isinstance(action, Forward):
            full, inputs = full + (not again), inputs + again
            found.add((full, inputs))
        else:
            found.add((full + again, inputs - again))  # computed again, just before its backward pass
            full, inputs = full - (not again), inputs - again
    return found


@dataclass(frozen=True)
class Ranges:
    """Of every run of layers a..b-1, in [a, b]; each (n + 1, n + 1), bytes unless said otherwise, of one micro-batch.

    Attributes:
        parameters: count.
        full: tensors that autograd keeps, inputs and output of the run, and skips that wait.
        lasting: inputs, and skips that wait.
        working: gradients of input and output of the layer in the backward pass, for the largest layer.
        received, sent: what crosses the cuts in the forward pass.
    """

    parameters: np.ndarray
    full: np.ndarray
    lasting: np.ndarray
    working: np.ndarray
    received: np.ndarray
    sent: np.ndarray


def ranges_of(costs: Costs) -> Ranges:
    n, size = len(costs.layers), costs.sizes
    results = [0, *(layer.result for layer in costs.layers)]  # results[i] is the input of layer i
    full, lasting, working, received, sent = (np.zeros((n + 1, n + 1)) for _ in range(5))
    for a in range(n):
        inputs, kept, largest = {results[a]}, set(), 0
        for b in range(a + 1, n + 1):
            layer = costs.layers[b - 1]
            inputs |= {results[s.stash + 1] for s in costs.skips if s.stash < a and s.pop == b - 1}
            kept |= layer.kept
            waiting = {results[s.stash + 1] for s in costs.skips if a <= s.stash < b <= s.pop}
            largest = max(largest, size[results[b - 1]] + size[results[b]])
            lasting[a, b] = sum(size[t] for t in inputs | waiting)
            full[a, b] = sum(size[t] for t in kept | inputs | waiting | {results[b]})
            received[a, b] = sum(size[t] for t in inputs) if a > 0 else 0
            sent[a, b] = sum(size[t] for t in waiting) + (size[results[b]] if b < n else 0)
            working[a, b] = largest
    return Ranges(sums([layer.parameters for layer in costs.layers]), full, lasting, working, received, sent)


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of a stage by what they are for; arrays where it is asked for many runs of layers at once."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def stage_memory(ranges: Ranges, where, stage: int, stages: int, policy: Policy) -> StageMemory:
    """Of layers a..b-1, ``where = (a, b)``, as stage ``stage`` of ``stages``; ``where = ...`` gives tables over all (a, b)."""
    weights = WEIGHT_BYTES * ranges.parameters[where]
    loads = [full * ranges.full[where] + inputs * ranges.lasting[where] for full, inputs in holdings(stage, stages, policy)]
    return StageMemory(weights, weights, policy.optimizer_copies * weights, np.maximum.reduce(loads), ranges.working[where])


def peaks(ranges: Ranges, stages: int, policy: Policy) -> np.ndarray:
    """(S, n + 1, n + 1) bytes, for :func:`distseg.pipeline.balance.fastest_split`."""
    return np.stack([stage_memory(ranges, ..., stage, stages, policy).total for stage in range(stages)])


def stage_seconds(costs: Costs, ranges: Ranges, policy: Policy, bytes_per_second: float | None = None) -> np.ndarray:
    """(n + 1, n + 1) seconds of a micro-batch: forward, backward, forward again where it is recomputed, and what crosses the cuts.

    Args:
        bytes_per_second: of a link; activations and their gradients cross it once each, and both its ends wait. None: at no cost.
    """
    seconds = policy.forward_passes * sums(costs.forward) + sums(costs.backward)
    return seconds if bytes_per_second is None else seconds + 2 * (ranges.received + ranges.sent) / bytes_per_second
