"""Lists the messages of ranks that stream tiles, from their operations.

A feature map travels in strips of rows (:mod:`distseg.runtime.transfer`). How many rows a strip has
depends on the time at which it starts. Here a strip has the rows that become final together, which
is the least that a rank can send at that time. All strips of a map are received in the background
from the moment at which the receiver registers the map.

Words of this module:

- *row*: the cells of a feature map with one index along its first spatial dim.
- *strip*: the rows of one message. It is named by its end, the row that follows its last row.
- *way*: the transfer of one feature map, or of its gradient, from one rank to another
  (:class:`_Map`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distseg.comm.mesh import Members
from distseg.runtime.message_order import Message, Pass, Start, Step, Wait
from distseg.runtime.operations import (
    ApplyStatisticsGrad,
    BackwardTile,
    Drop,
    FetchHalo,
    FinalizeStatistics,
    Loss,
    MapOperation,
    Measure,
    Operation,
    RecvGradRows,
    RecvRows,
    SendGradRows,
    SendHaloGrad,
    SendRows,
    Statistic,
    TileOperation,
)  # fmt: skip
from distseg.runtime.pass_messages import collective, neighbours
from distseg.runtime.stored_halos import StoredHalos
from distseg.runtime.tile_program import StagePlan

Program = Sequence[Operation]


class _Map(NamedTuple):
    """Transfer of a feature map, or of its gradient, from one rank of the pipeline to another.

    Attributes:
        micro_batch: the index of the micro-batch.
        block: the index of the tile batch within the micro-batch.
        tensor_id: the number of the feature map.
        back: True for a gradient.
        source, target: the numbers of the sending and the receiving rank in the pipeline.
    """

    micro_batch: int
    block: int
    tensor_id: int
    back: bool
    source: int
    target: int

    @property
    def channel(self) -> tuple[int, int]:
        """Pair (receiving rank, tag). Maps with equal pairs are sent one after another."""
        return self.target, 2 * self.tensor_id + self.back


class StreamedMessages:
    """Messages of one rank of a pipeline that streams tiles.

    Args:
        rank: the number of the rank in its pipeline.
        members: for each of its communicators, the numbers of the ranks in the job.
        plans: the plans of all ranks of the pipeline, ``plans[rank][micro_batch]``.
        halos: the exchange of the halos of stored feature maps.
        norms: for each feature map, this rank's active norms that read it, as (name,
            communicator). An active norm computes its statistics from the current images.
    """

    def __init__(
        self,
        rank: int,
        members: Members,
        plans: Sequence[Sequence[StagePlan]],
        halos: StoredHalos | None,
        norms: Mapping[int, Sequence[tuple[str, str]]],
    ):
        self.rank, self.members, self.plans = rank, members, plans
        self.halos, self.norms = halos, norms

    def steps(
        self, programs: Sequence[Program], prefix: str = "", loss: Sequence[Step] = ()
    ) -> list[Step]:
        """Return the sends, receives, waits, collectives and passes of this rank, in order.

        Args:
            programs: the operations of all ranks of the pipeline.
            prefix: the beginning of the messages' names, such as ``step 2, ``. It must differ
                from the prefix of any other step of the job.
            loss: the messages by which ranks compute the loss gradient.
        """
        run = _Collector(self, self._strips(programs), prefix, loss)
        found = [step for op in programs[self.rank] for step in run.step(op)]
        return [*found, Wait(tuple(run.sent))]

    def _strips(self, programs: Sequence[Program]) -> dict[_Map, list[int]]:
        """Return, for each transfer of a feature map or its gradient, the ends of its messages.

        The end of a message is the row after its last row. Ends are in the order of the messages. A
        message has the rows that become final together.
        """
        found: dict[_Map, list[int]] = {}
        for sender, program in enumerate(programs):
            for op in program:
                if isinstance(op, SendRows):
                    for way in self.ways(op, sender):
                        finals = found.setdefault(way, [])
                        if not finals or op.final > finals[-1]:
                            finals.append(op.final)
        return found

    def ways(self, op: SendRows, sender: int) -> list[_Map]:
        """Return the transfers to which a send operation belongs, one for each receiving rank.

        Args:
            op: the send of rows of a feature map or of its gradient.
            sender: the number of the sending rank in the pipeline.
        """
        plan, back = self.plans[sender][op.micro_batch], isinstance(op, SendGradRows)
        targets = [plan.makers[op.tensor_id]] if back else plan.readers[op.tensor_id]
        return [
            _Map(op.micro_batch, op.block, op.tensor_id, back, sender, target) for target in targets
        ]


class _Collector:
    """Messages of one rank, collected operation by operation.

    Args:
        of: the rank's number, communicators, plans and active norms.
        strips: for each transfer of a feature map or its gradient, the ends of its messages in
            order. The end of a message is the row after its last row.
        prefix, loss: the arguments of :meth:`StreamedMessages.steps`.
    """

    def __init__(
        self,
        of: StreamedMessages,
        strips: Mapping[_Map, Sequence[int]],
        prefix: str,
        loss: Sequence[Step],
    ):
        self.of, self.strips, self.prefix, self.loss = of, strips, prefix, loss
        self._queues: dict[tuple[int, int], deque[_Map]] = {}  # Maps to send, by channel.
        self._final: dict[_Map, int] = {}  # The row before which all rows may be sent.
        self._sent: dict[_Map, list[Message]] = {}

    @property
    def sent(self) -> list[Message]:
        """All messages that this rank has started to send."""
        return [message for messages in self._sent.values() for message in messages]

    def step(self, op: Operation) -> Iterator[Step]:
        """Yield the message starts, waits, collectives and passes of an operation, in order."""
        match op:
            case RecvRows():
                yield from self._receive(op, self._plan(op).makers[op.tensor_id])
            case RecvGradRows():
                yield from self._receive(op, op.source)
            case Measure() | ApplyStatisticsGrad():
                yield from self._wait_for_maps(op)
            case TileOperation():
                yield from self._tile(op)
            case Statistic() | FinalizeStatistics():
                for norm, comm in self.of.norms.get(op.tensor_id, ()):
                    name = f"{self.prefix}{op.verb} of {norm}, micro-batch {op.micro_batch}"
                    yield from collective(comm, getattr(self.of.members, comm), name)
            case FetchHalo():
                yield from self._wait_for_maps(op)
                yield from self._halo(op)
            case SendHaloGrad():
                yield from self._halo(op)
            case SendRows():
                yield from self._send(op)
            case Drop():
                yield from self._wait_for_maps(op)
                yield Wait(
                    tuple(
                        message
                        for way, messages in self._sent.items()
                        for message in messages
                        if way[0] == op.micro_batch and way[2:4] == (op.tensor_id, False)
                    )
                )
            case Loss():
                yield from self.loss

    def _plan(self, op: Operation) -> StagePlan:
        return self.of.plans[self.of.rank][op.micro_batch]

    def _message(self, way: _Map, final: int) -> Message:
        """Return the message of a transfer whose last row comes right before row ``final``."""
        pipeline = self.of.members.pipeline
        image = f", image {way.block}" if way.block else ""
        return Message(
            "pipeline",
            pipeline[way.source],
            pipeline[way.target],
            way.channel[1],
            f"{self.prefix}{'gradient of ' * way.back}map {way.tensor_id} before row {final}, "
            f"micro-batch {way.micro_batch}{image}",
        )

    # Receives

    def _receive(self, op: RecvRows | RecvGradRows, source: int) -> Iterator[Step]:
        """Yield one step for each tile batch, which starts the receives of its rows of a map."""
        for block in range(self._plan(op).blocks):
            way = _Map(
                op.micro_batch,
                block,
                op.tensor_id,
                isinstance(op, RecvGradRows),
                source,
                self.of.rank,
            )
            yield Start(tuple(self._message(way, final) for final in self.strips.get(way, ())))

    def _wait_for_maps(self, op: MapOperation) -> Iterator[Step]:
        """Yield, for each tile batch, the wait for all rows of another rank's feature map."""
        for block in range(self._plan(op).blocks):
            yield from self._wait_for(op, block, op.tensor_id, None)

    def _wait_for(
        self, op: Operation, block: int, tensor_id: int, row: int | None, reader: int | None = None
    ) -> Iterator[Step]:
        """Yield the wait for the messages with the rows of a map that come before row ``row``.

        Yield nothing if no other rank sends the map.

        Args:
            op: the operation that reads the rows.
            block: the index of the tile batch.
            tensor_id: the index of the feature map.
            row: the first row that is not read; None to read all rows.
            reader: the rank whose gradient of the map is read; None for the map itself.
        """
        back = reader is not None
        source = reader if reader is not None else self._plan(op).makers.get(tensor_id)
        if source is None or source == self.of.rank:
            return
        way = _Map(op.micro_batch, block, tensor_id, back, source, self.of.rank)
        finals = self.strips.get(way, ())
        starts = (None, *finals)
        yield Wait(
            tuple(
                self._message(way, final)
                for start, final in zip(starts, finals)
                if row is None or start is None or start < row
            )
        )

    def _tile(self, op: TileOperation) -> Iterator[Step]:
        """Yield the waits for the rows that a tile's pass reads, then the pass."""
        plan = self._plan(op)
        if isinstance(op, BackwardTile):
            stop = plan.stop(op.segment)
            for reader in plan.readers[stop]:
                yield from self._wait_for(op, op.block, stop, op.box.stop[0], reader)
        if not (isinstance(op, BackwardTile) and op.kept):
            for tensor_id, window in plan.grid.tile_plan(op).read.items():
                yield from self._wait_for(op, op.block, tensor_id, window.stop[0])
        yield Pass(f"{self.prefix}{op.line}")

    # Sends

    def _send(self, op: SendRows) -> Iterator[Step]:
        for way in self.of.ways(op, self.of.rank):
            # The gradients of earlier tile batches travel first, even if they are final later.
            first = 0 if way.back else way.block
            for block in range(first, way.block + 1):
                self._begin(way._replace(block=block))
            self._final[way] = op.final
            yield from self._started(self._queues[way.channel])

    def _begin(self, way: _Map) -> None:
        if way not in self._sent:
            self._sent[way], self._final[way] = [], -1
            self._queues.setdefault(way.channel, deque()).append(way)

    def _started(self, queue: deque[_Map]) -> Iterator[Step]:
        """Yield the sends of all rows that are final, one map after another.

        Stop at the first rows that are not final, because rows are sent in order.

        Args:
            queue: the transfers to one rank with one tag, in order.
        """
        while queue:
            way = queue[0]
            finals, sent = self.strips[way], self._sent[way]
            for final in finals[len(sent) :]:
                if final <= self._final[way]:
                    sent.append(self._message(way, final))
                    yield Start((sent[-1],))
            if len(sent) < len(finals):
                return
            queue.popleft()

    def _halo(self, op: FetchHalo | SendHaloGrad) -> Iterator[Step]:
        """Yield the message starts and waits that exchange a map's halo, or a halo's gradient."""
        grid, back = self._plan(op).grid, isinstance(op, SendHaloGrad)
        if self.of.halos is None:
            return
        sent, received = self.of.halos.strips(
            op.tensor_id, grid.layouts, grid.cells, range(self._plan(op).blocks)
        )
        yield from neighbours(
            self.of.members.pipeline[self.of.rank],
            self.of.members.tiles,
            *((received, sent) if back else (sent, received)),
            2 * op.tensor_id + back,
            f"{self.prefix}{'gradient of the ' * back}halo of map {op.tensor_id}, "
            f"micro-batch {op.micro_batch}",
        )
