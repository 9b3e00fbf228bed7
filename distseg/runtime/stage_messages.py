"""Lists the messages of ranks whose stages keep their graphs, from their operations.

The order is that of the executor (:mod:`distseg.runtime.pipeline`), which posts the receives of the
next passes early. Before the first tensor of each shape along an edge, a message announces that
shape to the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from distseg.runtime.actions import Action, Forward, Weight
from distseg.runtime.message_order import Message, Pass, Start, Step, Wait
from distseg.runtime.operations import EdgeOperation, Operation, Recompute, Recv, Send
from distseg.runtime.partition import Edge, Partition
from distseg.runtime.stage_program import most_leaving, receives_ahead


class Unit(NamedTuple):
    """Shapes of the tensors of a micro-batch.

    Attributes:
        signature: a key that is equal for micro-batches whose tensors have equal shapes.
        tensors: the number of tensors that an edge carries, one for each tile batch.
    """

    signature: Hashable
    tensors: int


class StageMessages:
    """Messages of one rank of a pipeline, over all steps of a job.

    Args:
        rank: the number of the rank in its pipeline.
        members: for each rank of the pipeline, its number in the job.
        partition: the stages.
        inside: returns the messages that layers exchange during a pass, given the operation.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        partition: Partition,
        inside: Callable[[Action | Recompute], Iterable[Step]],
    ):
        self.rank, self.members, self.partition = rank, members, partition
        self.inside = inside
        self._numbers = {edge: number for number, edge in enumerate(partition.edges)}
        self._forms: set[tuple[Edge, Hashable]] = set()

    def steps(
        self, program: Sequence[Operation], units: Sequence[Unit], prefix: str = ""
    ) -> list[Step]:
        """Return the sends, receives, waits, collectives and passes of the rank, in order.

        Args:
            program: the operations of the rank.
            units: the shapes of each micro-batch.
            prefix: the beginning of the messages' names, such as ``step 2, ``. It must differ
                from the prefix of any other step of the job.
        """
        run = _Collector(self, units, prefix)
        found = [step for place in range(len(program)) for step in run.step(program, place)]
        return [*found, Wait(tuple(run.sent)), Pass(f"{prefix}end of the passes")]


class _Collector:
    """Messages of one rank in one optimizer step, collected operation by operation."""

    def __init__(self, of: StageMessages, units: Sequence[Unit], prefix: str):
        self.of, self.units, self.prefix = of, units, prefix
        self.sent: list[Message] = []
        self._posted: dict[EdgeOperation, tuple[Message, ...]] = {}
        self._received: set[EdgeOperation] = set()
        # Messages with this rank's outputs that it did not wait for yet, by micro-batch.
        self._leaving: dict[int, list[Message]] = {}

    def step(self, program: Sequence[Operation], place: int) -> Iterator[Step]:
        """Yield the message starts, waits, collectives and passes of ``program[place]``."""
        op = program[place]
        if not isinstance(op, Send):
            yield from self._post_ahead(program, place)
        if isinstance(op, EdgeOperation):
            if self._peer(op) != self.of.rank:
                yield from self._receive(op) if isinstance(op, Recv) else self._send(op)
        elif isinstance(op, (Action, Recompute)):
            if isinstance(op, Forward):
                yield from self._limit_leaving(op.stage)
            name = f"{self.prefix}{op.verb} of stage {op.stage}, micro-batch {op.micro_batch}"
            yield Pass(name, reads=not isinstance(op, (Recompute, Weight)))
            yield from self.of.inside(op)

    def _peer(self, op: EdgeOperation) -> int:
        stage = op.sender if isinstance(op, Recv) else op.receiver
        return self.of.partition.placement[stage]

    def _post_ahead(self, program: Sequence[Operation], place: int) -> Iterator[Step]:
        for op in receives_ahead(program, place):
            if self._peer(op) == self.of.rank or op in self._posted or op in self._received:
                continue
            if not self._known(op):
                return
            yield from self._post(op)

    def _receive(self, op: Recv) -> Iterator[Step]:
        if op not in self._posted:
            yield from self._post(op)
        self._received.add(op)
        yield Wait(self._posted.pop(op))

    def _post(self, op: Recv) -> Iterator[Step]:
        if not self._known(op):
            form = (self._form(op),)
            yield Start(form)
            yield Wait(form)
        self._posted[op] = self._messages(op)
        yield from (Start((message,)) for message in self._posted[op])

    def _send(self, op: EdgeOperation) -> Iterator[Step]:
        messages = self._messages(op)
        if not op.back:
            self._leaving.setdefault(op.micro_batch, []).extend(messages)
        if not self._known(op):
            messages = (self._form(op), *messages)
        self.sent += messages
        yield from (Start((message,)) for message in messages)

    def _limit_leaving(self, stage: int) -> Iterator[Step]:
        partition = self.of.partition
        if partition.one_stage_a_rank:
            while len(self._leaving) > most_leaving(stage, partition.stages):
                yield Wait(tuple(self._leaving.pop(next(iter(self._leaving)))))

    def _known(self, op: EdgeOperation) -> bool:
        return (op.edge, self.units[op.micro_batch].signature) in self.of._forms

    def _form(self, op: EdgeOperation) -> Message:
        """Return the message that announces the shapes of an edge's tensors to the receiver.

        Also record that the receiver knows these shapes, so that the message is sent only once.
        """
        self.of._forms.add((op.edge, self.units[op.micro_batch].signature))
        name = f"shapes of {op.edge}, micro-batch {op.micro_batch}"
        return self._message(op, 3 * self.of._numbers[op.edge] + 2, name)

    def _messages(self, op: EdgeOperation) -> tuple[Message, ...]:
        tag = 3 * self.of._numbers[op.edge] + op.back
        name = f"{'gradient of ' * op.back}{op.edge}, micro-batch {op.micro_batch}"
        count = self.units[op.micro_batch].tensors
        return tuple(
            self._message(op, tag, f"{name}, tile batch {i}" if count > 1 else name)
            for i in range(count)
        )

    def _message(self, op: EdgeOperation, tag: int, name: str) -> Message:
        source, target = (
            self.of.members[self.of.partition.placement[stage]]
            for stage in (op.sender, op.receiver)
        )
        return Message("pipeline", source, target, tag, f"{self.prefix}{name}")
