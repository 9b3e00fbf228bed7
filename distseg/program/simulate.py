"""What a pipeline schedule does in time, without running it: when each action starts and ends, who idles, what is held.

Every rank works through its own list in order. Forward(s, m) needs what the edges into stage s bring; Backward(s, m) needs
Forward(s, m) and the gradients of what the edges out of s took away, where the edges return any; Weight(s, m) needs
Backward(s, m). Messages are sent in the background when an action ends; those from one rank to another go one after another.
No rank waits for its messages to be received. A real rank also does what is put off while it waits; here at its action only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Callable, Iterator, Mapping, Sequence

from distseg.program.partition import Edge
from distseg.program.schedule import Action, Backward, Forward, Weight
from distseg.program.trace import Span

Orders = Sequence[Sequence[Action]]
Cost = float | Sequence[float] | Callable[[int, int], float]  # seconds: of any stage, by stage, or of (stage, micro-batch)
Message = tuple[Edge, type, int]  # what travels, with a Forward or a Backward, of which micro-batch


@dataclass(frozen=True)
class Simulation:
    """What came of it.

    Attributes:
        spans: of computation; each rank's in their order.
        ranks: their number.
        live: for each stage, the largest number of micro-batches whose activations it holds, or what their W needs of them.
    """

    spans: tuple[Span, ...]
    ranks: int
    live: tuple[int, ...]

    @property
    def makespan(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank has nothing to do: the bubble."""
        busy = Counter()
        for span in self.spans:
            busy[span.rank] += span.seconds
        return tuple(1 - busy[rank] / self.makespan if self.makespan else 0.0 for rank in range(self.ranks))


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
    """Timed spans of every action.

    Args:
        orders: for each rank its actions in order, as :func:`distseg.program.schedule.orders` gives them.
        forward, backward: seconds: one number, one a stage, or a function of (stage, micro-batch).
        placement: rank of each stage.
        transfer: seconds that one micro-batch's tensor of an edge is under way, and its gradient again; none by default.
            Between stages of one rank nothing travels.
        recompute: seconds of the forward pass that comes before a backward pass. It does not wait for the gradient.
        weight: seconds of the gradients of the weights, where they are actions of their own; ``backward`` is without them then.

    Raises:
        ValueError: no rank can go on; names what they wait for.
    """
    costs = {"forward": forward, "backward": backward, "recompute": recompute, "weight": weight}
    run = _Run(edges, placement, transfer, {kind: _cost(cost) for kind, cost in costs.items()})
    position = [0] * len(orders)
    while any(done < len(order) for done, order in zip(position, orders)):
        before = list(position)
        for rank, order in enumerate(orders):
            while position[rank] < len(order) and run.lacks(order[position[rank]]) is None:
                run.do(order[position[rank]])
                position[rank] += 1
        if position == before:
            stuck = [(rank, order[done]) for rank, (done, order) in enumerate(zip(position, orders)) if done < len(order)]
            waits = (f"rank {rank} waits in {action.name} for {run.lacks(action)}" for rank, action in stuck)
            raise ValueError("the schedule is a deadlock: " + "; ".join(waits))
    return Simulation(tuple(run.spans), len(orders), peak_live(orders, len(placement)))


def messages_in(action: Action, edges: Sequence[Edge]) -> list[Message]:
    """What an action waits for from other stages."""
    return _messages(action, edges, "target" if isinstance(action, Forward) else "source")


def messages_out(action: Action, edges: Sequence[Edge]) -> list[Message]:
    """What an action has for other stages."""
    return _messages(action, edges, "source" if isinstance(action, Forward) else "target")


def _messages(action: Action, edges: Sequence[Edge], side: str) -> list[Message]:
    if isinstance(action, Weight):
        return []
    there = [edge for edge in edges if getattr(edge, side) == action.stage and (edge.gradient or isinstance(action, Forward))]
    return [(edge, type(action), action.micro_batch) for edge in there]


def peak_live(orders: Orders, stages: int) -> tuple[int, ...]:
    """For each stage, the largest number of micro-batches between their forward pass and their last action."""
    return tuple(int(max(peak_memory(orders, [float(s == stage) for s in range(stages)]), default=0)) for stage in range(stages))


def peak_memory(orders: Orders, activations: Sequence[float]) -> list[float]:
    """For each rank, the most that the activations of its live micro-batches take together, given a micro-batch's for each stage."""
    return [max(accumulate(_changes(order, activations)), default=0.0) for order in orders]


def _changes(order: Sequence[Action], activations: Sequence[float]) -> Iterator[float]:
    """What each action of a rank adds to the activations, which the last action of a micro-batch frees."""
    last = {(action.stage, action.micro_batch): action for action in order}
    for action in order:
        if isinstance(action, Forward):
            yield activations[action.stage]
        elif last[action.stage, action.micro_batch] is action:
            yield -activations[action.stage]


def check(orders: Orders, edges: Sequence[Edge], placement: Sequence[int], micro_batches: int) -> None:
    """That a schedule is one: complete, with messages in order, and no rank waits for ever.

    Messages of one edge and direction are matched first in, first out. So the source's rank must produce the micro-batches
    of an edge in the order in which the target's rank wants them; then every send has its receive.

    Raises:
        ValueError: an action that is missing, double or on a wrong rank; messages that would be mistaken; a deadlock.
    """
    given = Counter((rank, action) for rank, order in enumerate(orders) for action in order)
    kinds = (Forward, Backward, Weight) if any(isinstance(action, Weight) for _, action in given) else (Forward, Backward)
    wanted = Counter((rank, kind(stage, m)) for stage, rank in enumerate(placement) for m in range(micro_batches) for kind in kinds)
    for what, odd in (("lacks", wanted - given), ("should not have", given - wanted)):
        if odd:
            rank, action = next(iter(odd))
            raise ValueError(f"rank {rank} of the schedule {what} {action.name} (placement {tuple(placement)}, {micro_batches} micro-batches)")
    for edge in edges:
        if placement[edge.source] != placement[edge.target]:
            _check_messages(orders, edge, placement)
    simulate(orders, edges, 1.0, 1.0, placement, weight=1.0)


def _check_messages(orders: Orders, edge: Edge, placement: Sequence[int]) -> None:
    ways = [(Forward, edge.source, edge.target), (Backward, edge.target, edge.source)]
    for kind, sender, receiver in ways if edge.gradient else ways[:1]:
        sent, wanted = (
            [a.micro_batch for a in orders[placement[stage]] if isinstance(a, kind) and a.stage == stage] for stage in (sender, receiver)
        )
        if sent != wanted:
            raise ValueError(f"{edge}, {kind.kind}: stage {sender} sends micro-batches {sent}, but stage {receiver} wants {wanted}")


def _cost(cost: Cost) -> Callable[[int, int], float]:
    if callable(cost):
        return cost
    return (lambda stage, m: cost[stage]) if isinstance(cost, Sequence) else (lambda stage, m: cost)


_FIRST = {Backward: Forward, Weight: Backward}  # what of the same stage and micro-batch goes before


class _Run:
    """The state of a simulation: what has been done, what has arrived when, until when ranks and links are busy."""

    def __init__(self, edges, placement, transfer, costs):
        self.edges, self.placement, self.costs = edges, placement, costs
        self.transfer = transfer if callable(transfer) else (transfer or {e: 0.0 for e in edges}).__getitem__
        self.spans: list[Span] = []
        self.done: set[Action] = set()
        self.arrivals: dict[Message, float] = {}
        self.free = Counter()  # by rank, and by (rank, rank) for links

    def lacks(self, action: Action) -> str | None:
        """What the action still waits for."""
        first = _FIRST.get(type(action))
        if first and first(action.stage, action.micro_batch) not in self.done:
            return first(action.stage, action.micro_batch).name
        missing = (message for message in messages_in(action, self.edges) if message not in self.arrivals)
        return next((f"{edge} ({kind.kind} of micro-batch {m})" for edge, kind, m in missing), None)

    def do(self, action: Action) -> None:
        rank = self.placement[action.stage]
        if isinstance(action, Backward):
            self._spend(rank, "recompute", action, 0.0)
        ready = max((self.arrivals[message] for message in messages_in(action, self.edges)), default=0.0)
        self._spend(rank, action.kind, action, ready)
        self.done.add(action)
        for message in messages_out(action, self.edges):
            self._send(message, rank)

    def _spend(self, rank: int, kind: str, action: Action, ready: float) -> None:
        seconds = self.costs[kind](action.stage, action.micro_batch)
        if seconds or kind == action.kind:
            start = max(ready, self.free[rank])
            self.free[rank] = start + seconds
            self.spans.append(Span(rank, kind, action.name, start, start + seconds))

    def _send(self, message: Message, sender: int) -> None:
        edge, kind, _ = message
        receiver = self.placement[edge.target if kind is Forward else edge.source]
        now = self.free[sender]
        if receiver != sender:
            now = max(now, self.free[sender, receiver]) + self.transfer(edge)
            self.free[sender, receiver] = now
        self.arrivals[message] = now
