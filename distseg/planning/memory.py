"""The memory of a pipeline stage: weights and what comes with them, and the activations of the micro-batches in flight.

Every run of layers is a possible stage, so sizes are tables: ``full[a, b]`` of layers a..b-1. Per micro-batch a stage
holds either all tensors that autograd keeps, with its inputs and outputs, or, where it recomputes them, only what it was
handed: its input and the skips that reach it. Between B and W, where a schedule has these apart, it holds the inputs of its
convolutions and the gradients of their outputs. Room for what the next actions will be handed is made ahead. A tensor that
is several of these counts once. benchmarks/stage_memory.py holds all this against what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from distseg.planning.balance import sums
from distseg.planning.cost import Costs
from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.schedule import SCHEDULES, splits
from distseg.runtime.stage_program import recomputed, soon

WEIGHT_BYTES = 4  # float32


@dataclass(frozen=True)
class Policy:
    """How a pipeline runs, as far as memory and time depend on it."""

    micro_batches: int = 1
    """Of an optimizer step."""
    schedule: Literal["gpipe", "1f1b", "zb-h1"] = "gpipe"
    recompute: Literal["never", "except_last", "always"] = "never"
    """Activations computed again in the backward pass: of no micro-batch, of those whose backward pass does not come next, or of all."""
    optimizer_copies: int = 2
    """Numbers that the optimizer keeps a weight: Adam 2, SGD with momentum 1."""

    def __post_init__(self):
        if self.micro_batches < 1:
            raise ValueError(f"a step has at least one micro-batch, got {self.micro_batches}")
        for name, choices in (
            ("schedule", tuple(SCHEDULES)),
            ("recompute", ("never", "except_last", "always")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    def actions(self, stage: int, stages: int) -> list[Action]:
        """Of a stage that a rank has for itself."""
        return list(SCHEDULES[self.schedule](stage, stages, self.micro_batches))

    def forward_passes(self, stage: int, stages: int) -> float:
        """A micro-batch of a stage, on average."""
        return 1 + len(recomputed(self.actions(stage, stages), self.recompute)) / self.micro_batches


class Held(NamedTuple):
    """What a stage holds at some moment: numbers of micro-batches.

    Attributes:
        full: with all activations.
        inputs: with their inputs only.
        arriving: with room for inputs that later actions will be handed.
        returning: with room for gradients of outputs.
        leaving: without activations, but with outputs that the next stages have not taken yet.
        put_off: with what gradients of weights are yet to be computed from.
        backward: whether a backward pass is under way.
    """

    full: int
    inputs: int
    arriving: int = 0
    returning: int = 0
    leaving: int = 0
    put_off: int = 0
    backward: bool = False


def holdings(stage: int, stages: int, policy: Policy) -> set[Held]:
    """As a stage's schedule goes on: during each forward pass, the first or again, and during each backward pass.

    A stage behind is at most so many micro-batches late as there are stages in between, and one that waits ahead of it is
    taken (``AHEAD``), if all stages are about as fast.
    """
    actions = policy.actions(stage, stages)
    again = recomputed(actions, policy.recompute)
    late = max(stages - 2 - stage, int(stage + 1 < stages))
    full = inputs = put_off = 0
    found = set()
    for place, action in enumerate(actions):
        dropped = (action.stage, action.micro_batch) in again
        ahead = [isinstance(a, Forward) for a in soon(actions, place) if a is not action]
        arriving, returning = sum(ahead), len(ahead) - sum(ahead)
        if isinstance(action, Forward):
            full, inputs = full + (not dropped), inputs + dropped
            found.add(Held(full, inputs, arriving, returning, min(inputs, late), put_off))
        if isinstance(action, Backward):
            if (
                dropped
            ):  # computed again, just before its backward pass, while the gradient is awaited
                found.add(
                    Held(full + 1, inputs - 1, arriving, returning + 1, min(inputs, late), put_off)
                )
            found.add(
                Held(
                    full + dropped,
                    inputs - dropped,
                    arriving,
                    returning,
                    put_off=put_off,
                    backward=True,
                )
            )
            full, inputs, put_off = (
                full - (not dropped),
                inputs - dropped,
                put_off + splits(policy.schedule),
            )
        if isinstance(action, Weight):
            put_off -= 1
    return found


@dataclass(frozen=True)
class Ranges:
    """Of every run of layers a..b-1, in [a, b]; each (n + 1, n + 1), bytes unless said otherwise, of one micro-batch.

    Attributes:
        parameters: count.
        full: tensors that autograd keeps, inputs and output of the run, and skips that are popped behind it.
        inputs: what the run is handed.
        working: how far a backward pass rises above the activations it begins with: gradients of input, output and weights of the layer in
            work and of the skips, less the activations that are freed by then.
        put_off: inputs of convolutions and gradients of their outputs.
        working_apart: as working, where the gradients of weights are put off.
        received, sent: what crosses the cuts in the forward pass.
    """

    parameters: np.ndarray
    full: np.ndarray
    inputs: np.ndarray
    working: np.ndarray
    put_off: np.ndarray
    working_apart: np.ndarray
    received: np.ndarray
    sent: np.ndarray


def ranges_of(costs: Costs) -> Ranges:
    n, size = len(costs.layers), costs.sizes
    results = [0, *(layer.result for layer in costs.layers)]  # results[i] is the input of layer i
    full, handed, working, put_off, working_apart, received, sent = (
        np.zeros((n + 1, n + 1)) for _ in range(7)
    )
    for a in range(n):
        inputs, kept, read, rise, rise_apart, activations, gradients = (
            {results[a]},
            set(),
            set(),
            0,
            0,
            0,
            0,
        )
        for b in range(a + 1, n + 1):
            layer = costs.layers[b - 1]
            inputs |= {results[s.stash] for s in costs.skips if s.stash < a and s.pop == b - 1}
            kept |= layer.kept
            waiting = {results[s.stash] for s in costs.skips if a <= s.stash < b <= s.pop}
            skips = sum(size[t] for t in waiting)
            activations += layer.activation
            # With layer b - 1 in work, the activations of the layers before b are still there.
            in_work = (
                activations
                + size[results[b - 1]]
                + size[results[b]]
                + WEIGHT_BYTES * layer.parameters
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
    )


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of a stage by what they are for; arrays where it is asked for many runs of layers at once.

    ``working`` is what a backward pass adds; ``activations`` the rest, messages too.
    """

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
    full, inputs, received, sent, put_off = (
        getattr(ranges, name)[where] for name in ("full", "inputs", "received", "sent", "put_off")
    )
    working = (ranges.working_apart if splits(policy.schedule) else ranges.working)[where]
    loads = [
        held.full * full + held.inputs * inputs + held.arriving * received + (held.returning + held.leaving) * sent
        + held.put_off * put_off + held.backward * working
        for held in holdings(stage, stages, policy)
    ]  # fmt: skip
    return StageMemory(
        weights,
        weights,
        policy.optimizer_copies * weights,
        np.maximum.reduce(loads) - working,
        working,
    )


def peaks(ranges: Ranges, stages: int, policy: Policy) -> np.ndarray:
    """(S, n + 1, n + 1) bytes, for :func:`distseg.planning.balance.fastest_split`."""
    return np.stack(
        [stage_memory(ranges, ..., stage, stages, policy).total for stage in range(stages)]
    )


def stage_seconds(
    costs: Costs, ranges: Ranges, policy: Policy, stages: int, bytes_per_second: float | None = None
) -> np.ndarray:
    """(S, n + 1, n + 1) seconds of a micro-batch: forward, backward, forward again where it is recomputed, and what crosses the cuts.

    Args:
        bytes_per_second: of a link; activations and their gradients cross it once each, and both its ends wait. None: at no cost.
    """
    passes = np.array([policy.forward_passes(stage, stages) for stage in range(stages)])
    seconds = passes[:, None, None] * sums(costs.forward) + sums(costs.backward)
    return (
        seconds
        if bytes_per_second is None
        else seconds + 2 * (ranges.received + ranges.sent) / bytes_per_second
    )
