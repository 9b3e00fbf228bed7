"""Lists the operations of ranks whose stages keep their graphs.

The list has a schedule's actions, with the messages and repeated passes around them. Before a pass,
the rank receives the tensors of the edges into the stage; after it, the rank sends the tensors of
the edges out of the stage::

    1F1B, rank 1 of 3:    recv x      forward    send x
                          recv x      forward    send x
                          recv g      backward   send g     ...

A forward pass whose activations were not kept is repeated before the rank waits for the gradients,
so that the gradients travel in the meantime.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.operations import Operation, Recompute, Recv, Send
from distseg.runtime.partition import Edge

AHEAD = 2  # Receives are posted for the current pass and for this many later passes.


def most_leaving(stage: int, stages: int) -> int:
    """Return for how many micro-batches a stage may have outputs under way as a pass begins.

    A stage that ran further ahead of the stages that read its outputs would only hold more of them
    in memory. The number is so large that stages which take equally long never wait: when stage s
    begins a pass, the last stage, which may read a skip, is S - 1 - s micro-batches behind, and it
    has posted the receives of its next passes.

    Args:
        stage: the index s of the stage; each rank has one stage.
        stages: the number S of stages.
    """
    return max(stages - 2 - stage, int(stage + 1 < stages))


def operations(
    order: Sequence[Action], edges: Sequence[Edge], recompute: str = "never"
) -> list[Operation]:
    """Return a rank's operations: the passes of its actions, and the messages around them.

    Args:
        order: the actions of the rank.
        edges: the edges between all stages.
        recompute: the micro-batches whose activations are computed again: never, except_last or
            always. except_last does not repeat a forward pass if the rank's next action is the
            backward pass of the same micro-batch in the same stage.
    """
    again = recomputed(order, recompute)
    # The edges of a stage's messages, by (stage, True for gradients).
    received, sent = defaultdict(list), defaultdict(list)
    for edge in edges:
        received[edge.target, False].append(edge)
        sent[edge.source, False].append(edge)
        if edge.gradient:
            received[edge.source, True].append(edge)
            sent[edge.target, True].append(edge)
    found: list[Operation] = []
    for action in order:
        if isinstance(action, Weight):
            found.append(action)
            continue
        back, m = isinstance(action, Backward), action.micro_batch
        if back and (action.stage, m) in again:
            found.append(Recompute(m, action.stage))
        found += [Recv(m, edge, back) for edge in received[action.stage, back]]
        found.append(action)
        found += [Send(m, edge, back) for edge in sent[action.stage, back]]
    return found


def recomputed(order: Sequence[Action], recompute: str) -> set[tuple[int, int]]:
    """Return the (stage, micro-batch) pairs whose forward pass is repeated.

    Args:
        order: the actions of the rank.
        recompute: never, except_last or always (:func:`operations`).
    """
    if recompute == "never":
        return set()
    spared = recompute == "except_last"
    forward = [(place, action) for place, action in enumerate(order) if isinstance(action, Forward)]
    return {
        (a.stage, a.micro_batch)
        for place, a in forward
        if not (spared and _next_is_own_backward(order, place))
    }


def _next_is_own_backward(order: Sequence[Action], place: int) -> bool:
    """Return True if the action right after forward pass ``order[place]`` is its backward pass.

    Recomputing such a forward pass would save no memory, because no other pass runs before its
    activations are needed again.
    """
    action, following = order[place], order[place + 1 : place + 2]
    return any((f.stage, f.micro_batch) == (action.stage, action.micro_batch) for f in following)


def receives_ahead(program: Sequence[Operation], place: int) -> Iterator[Recv]:
    """Yield, in order, the receives of the next ``1 + AHEAD`` forward and backward passes.

    These receives are posted early, so that messages arrive while this rank computes.

    Args:
        program: the operations of the rank.
        place: the index of the operation to start from.
    """
    passes = 0
    for op in islice(program, place, None):
        if isinstance(op, Recv):
            yield op
        elif isinstance(op, (Forward, Backward)):
            passes += 1
            if passes > AHEAD:
                return
