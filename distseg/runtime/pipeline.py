"""Runs this rank's operations (receive, compute, send) when stages keep their graphs.

The operations come from :mod:`distseg.runtime.stage_program`. Messages of one edge and direction
are received in the order in which they were sent; every schedule keeps this order. Receives of the
next passes are posted early, so that messages travel while this pass computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor, nn

from distseg.comm.communicator import Request
from distseg.comm.mail import Form, Mail, Receipt
from distseg.comm.progress import heartbeat
from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.last_additions import LastPass, last_additions
from distseg.runtime.operations import EdgeOperation, Operation, Recompute, Recv, Send
from distseg.runtime.partition import Edge, Partition
from distseg.runtime.spans import NoTrace
from distseg.runtime.stage import Stage
from distseg.runtime.stage_program import most_leaving, operations, receives_ahead
from distseg.tiling.tile_batch import MicroBatch

_Key = tuple[Edge, int, bool]  # Edge, micro-batch, and True for the gradient.


class Pipeline:
    """Stages of this rank, and the messages between them and the other ranks of the pipeline.

    Args:
        partition: all stages, the edges between them and the rank of each stage.
        stages: the stages of this rank.
        comm: the communicator of the pipeline, in whose ranks the partition's placement is given.
        device: the device of received tensors.
        recompute: the micro-batches whose activations are computed again: never, except_last or
            always (:func:`distseg.runtime.stage_program.operations`).
        trace: records the spans of passes and messages; by default nothing is recorded.

    Attributes:
        last_pass: makes the context manager in which a backward pass runs. It is given the
            parameters to whose gradients the pass is the last one of the step to add.
    """

    def __init__(
        self,
        partition: Partition,
        stages: Sequence[Stage],
        comm,
        device=torch.device("cpu"),
        recompute: str = "never",
        trace=None,
    ):
        self.partition, self.comm, self.recompute = partition, comm, recompute
        self.stages = {stage.number: stage for stage in stages}
        self.mail = Mail(comm, device)
        self.trace = trace or NoTrace()
        self.last_pass: LastPass = lambda parameters: nullcontext()
        self._numbers = {edge: number for number, edge in enumerate(partition.edges)}
        # Shapes and dtypes of an edge's tensors, for micro-batches of one signature.
        self._forms: dict[tuple[Edge, tuple], list[Form]] = {}
        self._posted: dict[_Key, list[Receipt]] = {}
        self._here: dict[_Key, list[Tensor]] = {}  # Computed here or received.
        # Sends of this rank's outputs that may be under way, by micro-batch, the oldest first.
        self._leaving: dict[int, list[Request]] = {}
        self._program = lru_cache(lambda actions: operations(actions, partition.edges, recompute))
        for stage in stages:
            stage.after_layer = self.mail.progress if comm.size > 1 else None

    @property
    def first(self) -> bool:
        """True if this rank runs the first stage, which reads the pixels."""
        return self.partition.placement[0] == self.comm.rank

    @property
    def last(self) -> bool:
        """True if this rank runs the last stage, which computes the network's results."""
        return self.partition.placement[-1] == self.comm.rank

    def run(self, actions: Sequence[Action], units: Sequence[MicroBatch]) -> None:
        """Run the passes of all micro-batches on this rank, and the messages between them.

        If gradients are off (``torch.no_grad``), the actions must be forward passes only.

        Args:
            actions: the actions of this rank, in order.
            units: the micro-batches, by number.
        """
        program = self._program(tuple(actions))
        last = self._last_additions(program)
        dropped = {(op.stage, op.micro_batch) for op in program if isinstance(op, Recompute)}
        splits = any(isinstance(op, Weight) for op in program)
        try:
            for place, op in enumerate(program):
                unit = units[op.micro_batch]
                if not isinstance(op, Send):  # The operation after a send looks ahead itself.
                    self._post_ahead(program, place, units)
                if isinstance(op, (Forward, Recompute, Backward)):
                    # Else its tensors would stay in memory together with those of the next pass.
                    self.mail.waits.finish(None)
                match op:
                    case Recv():
                        self._receive(op, unit)
                    case Forward():
                        self._limit_leaving(op.stage)
                        self._forward(op, unit, (op.stage, op.micro_batch) not in dropped)
                    case Recompute():
                        self._recompute(op)
                    case Backward():
                        with self.last_pass(last.get(place, ())):
                            self._backward(op, splits)
                    case Weight():
                        self._weight(op)
                    case Send():
                        self._hand(op, unit)
            with self.trace.span("send", "flush"):
                self.mail.flush()
        finally:
            self._here.clear()
            self._leaving.clear()
            for stage in self.stages.values():
                stage.clear()

    def _last_additions(self, program: Sequence[Operation]) -> dict[int, list[nn.Parameter]]:
        """Return, for each operation, the parameters to whose gradients it is the last to add.

        The keys of the result are indices of ``program``.
        """
        return last_additions(
            [op.stage if isinstance(op, Backward) else None for op in program],
            lambda number: self.stages[number].parameters(),
        )

    # Passes

    def _forward(self, op: Forward, unit: MicroBatch, keep: bool) -> None:
        """Run the forward pass of a stage on a micro-batch, and keep its results for other stages.

        Args:
            op: the operation.
            unit: the micro-batch.
            keep: True to keep the activations for the backward pass.
        """
        stage, m = self.stages[op.stage], op.micro_batch
        heartbeat(f"forward of stage {op.stage}, micro-batch {m}")
        inputs = {edge.map: self._here.pop((edge, m, False)) for edge in stage.incoming}
        for edge in stage.incoming:
            for x in inputs[edge.map]:
                x.requires_grad_(edge.gradient and torch.is_grad_enabled())
        if stage.number == 0:
            inputs = {0: [p.pixels for p in unit.pieces]}
        with self.trace.span(op.kind, op.name):
            outputs = stage.forward(m, unit, inputs, keep)
        for edge in stage.outgoing:
            # Each reader needs leaves of its own for its gradients.
            self._here[edge, m, False] = [x.detach() for x in outputs[edge.map]]

    def _recompute(self, op: Recompute) -> None:
        heartbeat(f"forward of stage {op.stage}, micro-batch {op.micro_batch}, once more")
        with self.trace.span("recompute", Backward(op.stage, op.micro_batch).name):
            self.stages[op.stage].recompute(op.micro_batch)

    def _backward(self, op: Backward, splits: bool) -> None:
        """Run the backward pass of a stage for one micro-batch.

        Args:
            op: the pass.
            splits: True if weight gradients may be postponed to a ``Weight`` action.
        """
        stage, m = self.stages[op.stage], op.micro_batch
        heartbeat(f"backward of stage {op.stage}, micro-batch {m}")
        gradients = [
            (edge.map, self._here.pop((edge, m, True))) for edge in stage.outgoing if edge.gradient
        ]
        with (
            self.trace.span(op.kind, op.name),
            self.mail.waits.until(Weight(op.stage, m).name if splits else None),
        ):
            returned = stage.backward(m, gradients)
        for edge in stage.incoming:
            if edge.gradient:
                self._here[edge, m, True] = returned[edge.map]

    def _weight(self, op: Weight) -> None:
        heartbeat(f"weights of stage {op.stage}, micro-batch {op.micro_batch}")
        with self.trace.span(op.kind, op.name):
            self.mail.waits.finish(op.name)

    # Messages

    def _tag(self, op: EdgeOperation) -> int:
        return 3 * self._numbers[op.edge] + op.back

    def _forms_tag(self, edge: Edge) -> int:
        return 3 * self._numbers[edge] + 2

    def _hand(self, op: Send, unit: MicroBatch) -> None:
        """Send the tensors of a send operation, if another rank has the receiving stage.

        Before the first tensors of a shape, a list of their shapes and dtypes is sent
        (:class:`Form`).

        Args:
            op: the send operation.
            unit: the micro-batch.
        """
        peer = self.partition.placement[op.receiver]
        if peer == self.comm.rank:
            return  # The tensors stay on this rank.
        tensors, key = self._here.pop((op.edge, op.micro_batch, op.back)), (op.edge, unit.signature)
        if key not in self._forms:
            self._forms[key] = [Form.from_tensor(x) for x in tensors]
            self.mail.send_object(self._forms[key], peer, self._forms_tag(op.edge))
        for form, x in zip(self._forms[key], tensors):
            _check(form, x, op)
            request = self.mail.send(form.fit(x), peer, self._tag(op))
            if not op.back:
                self._leaving.setdefault(op.micro_batch, []).append(request)

    def _limit_leaving(self, stage: int) -> None:
        """Wait until the outputs of no more than :func:`most_leaving` micro-batches are under way.

        A rank with several stages does not wait, because its stages wait for each other.

        Args:
            stage: the stage whose forward pass begins.
        """
        if not self.partition.one_stage_a_rank:
            return
        most = most_leaving(stage, self.partition.stages)
        while len(self._leaving) > most:
            oldest = next(iter(self._leaving))
            with self.trace.span("send", f"outputs of micro-batch {oldest}"):
                for request in self._leaving.pop(oldest):
                    self.mail.waits.wait(request, f"the next stages of micro-batch {oldest}")

    def _receive(self, op: Recv, unit: MicroBatch) -> None:
        """Wait for the tensors of a receive operation, and keep them until a pass reads them."""
        key = op.edge, op.micro_batch, op.back
        if key in self._here:
            return
        if key not in self._posted:
            self._post(op, unit)
        heartbeat(f"wait for {op.edge}")
        with self.trace.span("wait", str(op.edge)):
            self._here[key] = [receipt.tensor() for receipt in self._posted.pop(key)]

    def _post(self, op: Recv, unit: MicroBatch) -> None:
        peer, key = self.partition.placement[op.sender], (op.edge, unit.signature)
        if key not in self._forms:
            with self.trace.span("wait", "forms"):
                self._forms[key] = self.mail.recv_object(peer, self._forms_tag(op.edge))
        self._posted[op.edge, op.micro_batch, op.back] = [
            self.mail.receive(form, peer, self._tag(op)) for form in self._forms[key]
        ]

    def _post_ahead(
        self, program: Sequence[Operation], place: int, units: Sequence[MicroBatch]
    ) -> None:
        """Post the receives of the next passes, up to the first tensor whose shape is unknown.

        Posting a receive early lets its message travel while this rank computes. Messages are
        matched by their order, so no receive may be posted before that of an earlier tensor.

        Args:
            program: the operations of this rank.
            place: the index of the operation that runs now.
            units: the micro-batches, by number.
        """
        for op in receives_ahead(program, place):
            unit, key = units[op.micro_batch], (op.edge, op.micro_batch, op.back)
            if (
                key in self._posted
                or key in self._here
                or self.partition.placement[op.sender] == self.comm.rank
            ):
                continue
            if (op.edge, unit.signature) not in self._forms:
                return
            self._post(op, unit)


def _check(form: Form, x: Tensor, message: EdgeOperation) -> None:
    if (form.shape, form.dtype) != (tuple(x.shape), x.dtype):
        raise ValueError(
            f"{'the gradient of ' if message.back else ''}{message.edge} is "
            f"{Form.from_tensor(x)} in "
            f"micro-batch {message.micro_batch}, but {form} was announced for windows of this "
            f"size: the shape and dtype of a layer's output must depend only on those of its input"
        )
