"""Simulates a pipeline schedule: start and end of each action, idle time, memory.

Every rank goes through the operations that it would run (:mod:`distseg.runtime.stage_program`), but
an operation only takes its number of seconds. Messages are sent in the background when a pass ends.
Messages from one rank to another are transferred one after another. No rank waits until its
messages are received. A real rank also computes postponed weight gradients while it waits; a
simulated rank computes them only at their ``Weight`` action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.operations import EdgeOperation, Operation, Recompute, Recv, Send
from distseg.runtime.partition import Edge
from distseg.runtime.spans import Span
from distseg.runtime.stage_program import operations

Orders = Sequence[Sequence[Action]]
# Seconds: one number for all stages, one per stage, or a function of (stage, micro-batch).
Cost = float | Sequence[float] | Callable[[int, int], float]


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated schedule.

    Attributes:
        spans: the spans of computation, in order for each rank.
        ranks: the number of ranks.
    """

    spans: tuple[Span, ...]
    ranks: int

    @cached_property
    def makespan(self) -> float:
        """Time in seconds at which the last action ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the makespan in which each rank idles: the bubble."""
        busy = Counter()
        for span in self.spans:
            busy[span.rank] += span.seconds
        return tuple(
            1 - busy[rank] / self.makespan if self.makespan else 0.0 for rank in range(self.ranks)
        )


def simulate(
    orders: Orders,
    edges: Sequence[Edge],
    forward: Cost,
    backward: Cost,
    placement: Sequence[int],
    transfer: Callable[[Edge], float] | Mapping[Edge, float] | None = None,
    recompute: Cost = 0.0,
    weight: Cost = 0.0,
) -> Simulation:
    """Simulate a schedule and return the start and end of every action.

    Args:
        orders: the actions of each rank in order, from :func:`distseg.runtime.schedule.orders`.
        edges: the edges between stages.
        forward: seconds of a forward pass: one number for all stages, one number per stage, or a
            function of (stage, micro-batch).
        backward: seconds of a backward pass, in the same forms as ``forward``.
        placement: the rank of each stage.
        transfer: seconds that the tensor of an edge travels for one micro-batch. Its gradient takes
            the same time. By default 0. Nothing travels between stages of one rank.
        recompute: seconds of the repeated forward pass before a backward pass. The repeated pass
            does not wait for the gradient.
        weight: seconds of the weight gradients, if they are separate actions. ``backward`` must
            then exclude them.

    Raises:
        ValueError: if ranks wait for one another for ever. The message names what each rank waits
            for.
    """
    costs = {"forward": forward, "backward": backward, "recompute": recompute, "weight": weight}
    programs = [operations(order, edges, "always") for order in orders]
    run = _Run(placement, transfer, {kind: _cost(cost) for kind, cost in costs.items()})
    at = [0] * len(programs)
    while any(done < len(program) for done, program in zip(at, programs)):
        before = list(at)
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and run.lacks(program[at[rank]]) is None:
                run.do(rank, program[at[rank]])
                at[rank] += 1
        if at == before:
            stuck = [
                (rank, program[done:])
                for rank, (done, program) in enumerate(zip(at, programs))
                if done < len(program)
            ]
            waits = (
                f"rank {rank} waits in {_action(left).name} for {run.lacks(left[0])}"
                for rank, left in stuck
            )
            raise ValueError(
                "change the order of the actions, because these ranks are in a deadlock: "
                + "; ".join(waits)
            )
    return Simulation(tuple(run.spans), len(orders))


def _action(operations: Sequence[Operation]) -> Action:
    """Return the first action (forward, backward or weight) in a list of operations."""
    return next(op for op in operations if isinstance(op, Action))


def peak_micro_batches(orders: Orders, stages: int) -> tuple[int, ...]:
    """Return, for each stage, the largest number of micro-batches that it holds at once.

    A stage holds a micro-batch from the forward pass to the last action of that micro-batch.

    Args:
        orders: the actions of each rank in order.
        stages: the number of stages.
    """
    return tuple(
        int(max(peak_memory(orders, [float(s == stage) for s in range(stages)]), default=0))
        for stage in range(stages)
    )


def peak_memory(orders: Orders, activations: Sequence[float]) -> list[float]:
    """Return, for each rank, the largest amount of memory that activations occupy at once.

    Args:
        orders: the actions of each rank in order.
        activations: the memory of one micro-batch's activations in each stage. The result has the
            same unit.
    """
    return [max(accumulate(_changes(order, activations)), default=0.0) for order in orders]


def _changes(order: Sequence[Action], activations: Sequence[float]) -> Iterator[float]:
    """Yield the changes of a rank's activation memory, in the order of its actions.

    The forward pass of a micro-batch allocates the stage's activations, and the stage's last action
    on the micro-batch frees them.

    Args:
        order: the actions of the rank.
        activations: the memory of one micro-batch's activations in each stage.
    """
    last = {(action.stage, action.micro_batch): action for action in order}
    for action in order:
        if isinstance(action, Forward):
            yield activations[action.stage]
        elif last[action.stage, action.micro_batch] is action:
            yield -activations[action.stage]


def check(
    orders: Orders, edges: Sequence[Edge], placement: Sequence[int], micro_batches: int
) -> None:
    """Refuse a schedule that lacks actions, mixes up messages or deadlocks.

    Messages of one edge and direction are matched first in, first out. The sending rank must
    therefore send the micro-batches of an edge in the order in which the receiving rank receives
    them.

    Args:
        orders: the actions of each rank in order.
        edges: the edges between stages.
        placement: the rank of each stage.
        micro_batches: the number of micro-batches.

    Raises:
        ValueError: if an action is missing, duplicated or on a wrong rank, if a rank would receive
            micro-batches in another order than they are sent, or if the schedule deadlocks.
    """
    given = Counter((rank, action) for rank, order in enumerate(orders) for action in order)
    kinds = (
        (Forward, Backward, Weight)
        if any(isinstance(action, Weight) for _, action in given)
        else (Forward, Backward)
    )
    wanted = Counter(
        (rank, kind(stage, m))
        for stage, rank in enumerate(placement)
        for m in range(micro_batches)
        for kind in kinds
    )
    for what, odd in (("lacks", wanted - given), ("should not have", given - wanted)):
        if odd:
            rank, action = next(iter(odd))
            raise ValueError(
                f"rank {rank} of the schedule {what} {action.name} (placement {tuple(placement)}, "
                f"{micro_batches} micro-batches): give each rank every action of its stages once"
            )
    for edge in edges:
        if placement[edge.source] != placement[edge.target]:
            _check_messages(orders, edge, placement)
    simulate(orders, edges, 1.0, 1.0, placement, weight=1.0)


def _check_messages(orders: Orders, edge: Edge, placement: Sequence[int]) -> None:
    """Refuse an edge whose receiver expects micro-batches in another order than the sender's."""
    for back in (False, True)[: 1 + edge.gradient]:
        way = Recv(0, edge, back)

        def micro_batches(kind, stage):
            return [
                op.micro_batch
                for op in operations(orders[placement[stage]], [edge])
                if isinstance(op, kind) and op.back == back
            ]

        sent, wanted = micro_batches(Send, way.sender), micro_batches(Recv, way.receiver)
        if sent != wanted:
            kind = (Backward if back else Forward).kind
            raise ValueError(
                f"{edge}, {kind}: stage {way.sender} sends micro-batches {sent}, but stage "
                f"{way.receiver} receives {wanted}: both must have the same order"
            )


def _cost(cost: Cost) -> Callable[[int, int], float]:
    if callable(cost):
        return cost
    return (lambda stage, m: cost[stage]) if isinstance(cost, Sequence) else (lambda stage, m: cost)


# The pass of the same stage and micro-batch that each operation needs first.
_FIRST = {Recompute: Forward, Backward: Forward, Weight: Backward}


class _Run:
    """State of a simulation: operations done, arrival times, and when ranks and links are free."""

    def __init__(self, placement, transfer, costs):
        self.placement, self.costs = placement, costs
        self.transfer = (
            transfer
            if callable(transfer)
            else (transfer.__getitem__ if transfer else lambda edge: 0.0)
        )
        self.spans: list[Span] = []
        self.done: set[Operation] = set()
        self.arrivals: dict[tuple[Edge, int, bool], float] = {}
        # Time from which each rank, or link (rank, rank), is free.
        self.free = Counter()
        # Time at which the inputs of each rank's next pass have arrived.
        self.ready = Counter()

    def lacks(self, op: Operation) -> str | None:
        """Return the pass or message for which an operation waits, in words; None if it can run."""
        if isinstance(op, Recv):
            kind = (Backward if op.back else Forward).kind
            return (
                None
                if _key(op) in self.arrivals
                else f"{op.edge} ({kind} of micro-batch {op.micro_batch})"
            )
        first = _FIRST[type(op)](op.stage, op.micro_batch) if type(op) in _FIRST else None
        return None if first is None or first in self.done else first.name

    def do(self, rank: int, op: Operation) -> None:
        if isinstance(op, Recv):
            self.ready[rank] = max(self.ready[rank], self.arrivals[_key(op)])
        elif isinstance(op, Send):
            self._send(op, rank)
        elif isinstance(op, Recompute):
            self._spend(rank, "recompute", Backward(op.stage, op.micro_batch), 0.0)
        else:
            self._spend(rank, op.kind, op, self.ready.pop(rank, 0.0))
            self.done.add(op)

    def _spend(self, rank: int, kind: str, action: Action, ready: float) -> None:
        seconds = self.costs[kind](action.stage, action.micro_batch)
        if seconds or kind == action.kind:
            start = max(ready, self.free[rank])
            self.free[rank] = start + seconds
            self.spans.append(Span(rank, kind, action.name, start, start + seconds))

    def _send(self, op: Send, sender: int) -> None:
        receiver, now = self.placement[op.receiver], self.free[sender]
        if receiver != sender:
            now = max(now, self.free[sender, receiver]) + self.transfer(op.edge)
            self.free[sender, receiver] = now
        self.arrivals[_key(op)] = now


def _key(op: EdgeOperation) -> tuple[Edge, int, bool]:
    return op.edge, op.micro_batch, op.back
