"""Simulates a pipeline schedule: start and end of each action, idle time, memory.

Every rank goes through the passes and messages of its actions, as it would run them
(:mod:`distseg.runtime.stage_program`), but a pass or message only takes its number of seconds.
Messages are sent in the background when a pass ends.
Messages from one rank to another are transferred one after another. No rank waits until its
messages are received. A real rank also computes postponed weight gradients while it waits; a
simulated rank computes them only at their ``Weight`` action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.operations import Recv, Send
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
        orders: the actions of each rank in order.
        starts, ends: for each rank, the seconds at which its actions start and end.
        repeated: for each rank and each of its actions, the seconds of the forward pass that the
            rank repeats before the action; 0 if it repeats none. The repeated pass starts when the
            preceding action ends.
    """

    orders: Orders
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    repeated: Sequence[Sequence[float]]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of time in which ranks compute, of all ranks, in the order of their starts."""
        found = (
            Span(rank, kind, action.name, start, end)
            for rank in range(self.ranks)
            for kind, action, start, end in self._passes(rank)
        )
        return tuple(sorted(found, key=lambda span: span.start))

    @property
    def makespan(self) -> float:
        """Time in seconds at which the last action ends."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Fraction of the makespan in which each rank idles (the pipeline bubble)."""
        busy, makespan = [0.0] * self.ranks, self.makespan
        for rank in range(self.ranks):
            for *_, start, end in self._passes(rank):
                busy[rank] += end - start
        return tuple(1 - seconds / makespan if makespan else 0.0 for seconds in busy)

    def _passes(self, rank: int) -> Iterator[tuple[str, Action, float, float]]:
        """Yield (kind, action, start, end) of all passes of a rank, in order.

        A repeated forward pass has the kind ``recompute`` and the action that follows it.
        """
        free = 0.0
        times = zip(self.orders[rank], self.repeated[rank], self.starts[rank], self.ends[rank])
        for action, seconds, start, end in times:
            if seconds:
                yield "recompute", action, free, free + seconds
            yield action.kind, action, start, end
            free = end


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
        transfer: seconds that the tensor of an edge travels for one micro-batch; by default 0. Its
            gradient takes the same time. Between stages of one rank the time is 0.
        recompute: seconds of the repeated forward pass before a backward pass. The repeated pass
            does not wait for the gradient.
        weight: seconds of the weight gradients, if they are separate actions. ``backward`` must
            then exclude them.

    Raises:
        ValueError: if ranks wait for one another for ever. The message names what each rank waits
            for.
    """
    costs = {"forward": forward, "backward": backward, "weight": weight}
    if recompute:
        costs["recompute"] = recompute
    if not callable(transfer):
        transfer = transfer.__getitem__ if transfer else lambda edge: 0.0
    run = _SimulationState(
        orders, edges, {kind: _cost(c) for kind, c in costs.items()}, placement, transfer
    )
    while left := [rank for rank, order in enumerate(orders) if len(run.ends[rank]) < len(order)]:
        if not any([run.advance(rank) for rank in left]):
            waits = (
                f"rank {rank} waits in {run.following(rank).name} for {run.lacks(rank)}"
                for rank in left
            )
            raise ValueError(
                "change the order of the actions, because these ranks are in a deadlock: "
                + "; ".join(waits)
            )
    return Simulation(orders, run.starts, run.ends, run.repeated)


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
    """Refuse an edge whose receiver expects micro-batches in another order than they are sent."""
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


# The pass of the same stage and micro-batch that each pass needs first.
_FIRST = {Backward: Forward, Weight: Backward}


class _Way(NamedTuple):
    """Transfers of one edge in one direction: its tensors, or the gradients that travel back.

    Attributes:
        edge: the edge.
        seconds: seconds for which a tensor travels.
        link: a list of one number, the time from which the link between the two ranks is free. All
            transfers from one rank to the other share this list.
        arrivals: for each micro-batch, the time at which its tensor arrives.
    """

    edge: Edge
    seconds: float
    link: list[float]
    arrivals: dict[int, float]


class _Passes(NamedTuple):
    """Passes of one kind (such as all forward passes) in one stage, during a simulation.

    Attributes:
        seconds: function that returns the seconds of a pass from (stage, micro-batch).
        repeated: function that returns the seconds of the forward pass that is repeated before
            this pass; None if none is repeated.
        into: the transfers whose tensors a pass needs.
        out: the transfers that a pass starts.
        done: the micro-batches that had their pass.
        first: the micro-batches that had the pass which must come before this one, such as the
            forward pass before the backward pass; None if no pass must come before.
    """

    seconds: Callable[[int, int], float]
    repeated: Callable[[int, int], float] | None
    into: list[_Way]
    out: list[_Way]
    done: set[int]
    first: set[int] | None


class _SimulationState:
    """State of a simulation: the actions that each rank has done, and the tensors that arrived.

    Attributes:
        starts, ends, repeated: the attributes of :class:`Simulation`, for the actions done so far.
    """

    def __init__(
        self,
        orders: Orders,
        edges: Sequence[Edge],
        costs: Mapping[str, Callable[[int, int], float]],
        placement: Sequence[int],
        transfer: Callable[[Edge], float],
    ):
        self._orders = orders
        self.starts, self.ends, self.repeated = ([[] for _ in orders] for _ in range(3))
        self._of: dict[type[Action], list[_Passes]] = {}
        for kind in (Forward, Backward, Weight):
            first = [passes.done for passes in self._of[_FIRST[kind]]] if kind in _FIRST else None
            repeated = costs.get("recompute") if kind is Backward else None
            self._of[kind] = [
                _Passes(costs[kind.kind], repeated, [], [], set(), first[stage] if first else None)
                for stage in range(len(placement))
            ]
        links: dict[tuple[int, int], list[float]] = {}
        for edge in edges:
            for kind in (Forward, Backward)[: 1 + edge.gradient]:
                ends = (edge.source, edge.target)[:: 1 if kind is Forward else -1]
                sender, receiver = (placement[stage] for stage in ends)
                seconds = transfer(edge) if sender != receiver else 0.0
                way = _Way(edge, seconds, links.setdefault((sender, receiver), [0.0]), {})
                self._of[kind][ends[0]].out.append(way)
                self._of[kind][ends[1]].into.append(way)

    def advance(self, rank: int) -> bool:
        """Do the next actions of a rank until an action must wait for another rank.

        Return True if at least one action was done.
        """
        starts, ends, repeats = self.starts[rank], self.ends[rank], self.repeated[rank]
        before, free = len(ends), ends[-1] if ends else 0.0
        for action in islice(self._orders[rank], before, None):
            stage, m = action.stage, action.micro_batch
            seconds, repeated, into, out, done, first = self._of[type(action)][stage]
            if first is not None and m not in first:
                break
            # A forward pass is repeated while the rank waits for the gradient.
            again = repeated(stage, m) if repeated else 0.0
            start = free + again
            try:
                for _, _, _, arrivals in into:
                    if (ready := arrivals[m]) > start:
                        start = ready
            except KeyError:
                break
            free = start + seconds(stage, m)
            starts.append(start)
            ends.append(free)
            repeats.append(again)
            done.add(m)
            for _, travels, link, arrivals in out:
                sent = free if free > link[0] else link[0]
                link[0] = arrivals[m] = sent + travels
        return len(ends) > before

    def following(self, rank: int) -> Action:
        """Return the next action of a rank: the first that is not done."""
        return self._orders[rank][len(self.ends[rank])]

    def lacks(self, rank: int) -> str:
        """Return a text that names the pass or message for which a rank waits."""
        action = self.following(rank)
        m, kind = action.micro_batch, type(action)
        passes = self._of[kind][action.stage]
        if passes.first is not None and m not in passes.first:
            return _FIRST[kind](action.stage, m).name
        edge = next(way.edge for way in passes.into if m not in way.arrivals)
        return f"{edge} ({kind.kind} of micro-batch {m})"
