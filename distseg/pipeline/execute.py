"""Runs this rank's part of a schedule: receives, computes, hands on.

Messages of one edge and one direction are matched in the order in which they are sent, which every schedule keeps.
Receives are posted for the next actions too, so that they travel while this one computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Sequence

import torch
from torch import Tensor

from distseg.comm.later import finish, until
from distseg.comm.transport import Form, Receipt, Transport
from distseg.program.partition import OUTPUT, Edge, Partition
from distseg.program.schedule import Action, Backward, Forward, Weight
from distseg.pipeline.stage import Stage, Tensors
from distseg.program.trace import NoTrace
from distseg.spatial.piece import Unit
from distseg.watch import beat

AHEAD = 2  # actions after this one whose receives are posted, of those that may receive


@dataclass(frozen=True)
class _Message:
    """What an edge hands on for a micro-batch, or, ``back``, the gradient that returns."""

    edge: Edge
    micro_batch: int
    back: bool


class Pipeline:
    """This rank's stages and its links to the others.

    Args:
        partition: all stages, the edges between them and the rank of each.
        stages: those of this rank.
        comm: the ranks of the pipeline, in the order of the partition's placement.
    """

    def __init__(self, partition: Partition, stages: Sequence[Stage], comm, device=torch.device("cpu"), recompute: str = "never", trace=None):
        self.partition, self.comm, self.recompute = partition, comm, recompute
        self.stages = {stage.number: stage for stage in stages}
        self.transport = Transport(comm, device)
        self.trace = trace or NoTrace()
        self._numbers = {edge: number for number, edge in enumerate(partition.edges)}
        self._forms: dict[tuple[Edge, tuple], list[Form]] = {}  # of the tensors of an edge, for units of a signature
        self._posted: dict[_Message, list[Receipt]] = {}
        self._here: dict[_Message, list[Tensor]] = {}  # between two stages of this rank
        for stage in stages:
            stage.after_layer = self.transport.progress if comm.size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this rank runs the first stage, which wants the pixels."""
        return self.partition.placement[0] == self.comm.rank

    @property
    def last(self) -> bool:
        """Whether this rank runs the last stage, which has the results."""
        return self.partition.placement[-1] == self.comm.rank

    def run(self, actions: Sequence[Action], units: Sequence[Unit]) -> None:
        """Forward and backward passes of the units in the order of the actions; forward passes alone where gradients are off."""
        splits = any(isinstance(action, Weight) for action in actions)
        try:
            for position, action in enumerate(actions):
                beat(f"{action.kind} of stage {action.stage}, micro-batch {action.micro_batch}")
                self._post_ahead(soon(actions, position), units)
                if isinstance(action, Forward):
                    self._forward(action, units[action.micro_batch], next_is_own_backward(actions, position))
                elif isinstance(action, Backward):
                    self._backward(action, units[action.micro_batch], splits)
                else:
                    self._weight(action)
            with self.trace.span("send", "flush"):
                self.transport.flush()
        finally:
            for stage in self.stages.values():
                stage.clear()

    def hand(self, edge: Edge, unit: Unit, tensors: list[Tensor]) -> None:
        """Hand a unit's tensors on, outside a schedule; units of an edge are taken in the order in which they are handed on."""
        self._hand(_Message(edge, unit.micro_batch, False), unit, tensors)

    def take(self, edge: Edge, unit: Unit) -> list[Tensor]:
        """What the other end of an edge hands on, once it is there."""
        return self._take(_Message(edge, unit.micro_batch, False), unit)

    def _forward(self, action: Action, unit: Unit, last: bool) -> None:
        stage, m = self.stages[action.stage], action.micro_batch
        inputs = {edge.name: self._take(_Message(edge, m, False), unit) for edge in stage.incoming}
        for edge in stage.incoming:
            for x in inputs[edge.name]:
                x.requires_grad_(edge.gradient and torch.is_grad_enabled())
        if stage.number == 0:
            inputs = {OUTPUT: [p.pixels for p in unit.pieces]}
        keep = self.recompute == "never" or (self.recompute == "except_last" and last)
        with self.trace.span(action.kind, action.name):
            outputs = stage.forward(m, unit, inputs, keep)
        for edge in stage.outgoing:
            self._hand(_Message(edge, m, False), unit, outputs[edge.name])

    def _backward(self, action: Action, unit: Unit, splits: bool) -> None:
        """``splits``: gradients of weights may wait for an action of their own."""
        stage, m = self.stages[action.stage], action.micro_batch
        if stage.dropped(m):
            with self.trace.span("recompute", action.name):
                stage.recompute(m)  # while the gradients are still on their way
        gradients: Tensors = {edge.name: self._take(_Message(edge, m, True), unit) for edge in stage.outgoing if edge.gradient}
        with self.trace.span(action.kind, action.name), until(Weight(action.stage, m).name if splits else None):
            returned = stage.backward(m, gradients)
        for edge in stage.incoming:
            if edge.gradient:
                self._hand(_Message(edge, m, True), unit, returned[edge.name])

    def _weight(self, action: Action) -> None:
        with self.trace.span(action.kind, action.name):
            finish(action.name)

    # messages

    def _peer(self, message: _Message, sender: bool) -> int:
        """The rank at the other end."""
        at_source = sender != message.back
        return self.partition.placement[message.edge.target if at_source else message.edge.source]

    def _tag(self, message: _Message) -> int:
        return 3 * self._numbers[message.edge] + message.back

    def _forms_tag(self, edge: Edge) -> int:
        return 3 * self._numbers[edge] + 2

    def _hand(self, message: _Message, unit: Unit, tensors: list[Tensor]) -> None:
        peer = self._peer(message, sender=True)
        if peer == self.comm.rank:
            self._here[message] = tensors
            return
        key = message.edge, unit.signature
        if key not in self._forms:
            self._forms[key] = [Form.of(x) for x in tensors]
            self.transport.tell(self._forms[key], peer, self._forms_tag(message.edge))
        for form, x in zip(self._forms[key], tensors):
            _check(form, x, message)
            self.transport.send(form.fit(x), peer, self._tag(message))

    def _take(self, message: _Message, unit: Unit) -> list[Tensor]:
        if message in self._here:
            return self._here.pop(message)
        if message not in self._posted:
            self._post(message, unit)
        with self.trace.span("wait", str(message.edge)):
            return [receipt.tensor() for receipt in self._posted.pop(message)]

    def _post(self, message: _Message, unit: Unit) -> None:
        peer, key = self._peer(message, sender=False), (message.edge, unit.signature)
        if key not in self._forms:
            with self.trace.span("wait", "forms"):
                self._forms[key] = self.transport.ask(peer, self._forms_tag(message.edge))
        self._posted[message] = [self.transport.receive(form, peer, self._tag(message)) for form in self._forms[key]]

    def _post_ahead(self, actions: Sequence[Action], units: Sequence[Unit]) -> None:
        """Post the receives of these actions up to the first whose tensors' form is not known yet: order is what matches messages."""
        for action in actions:
            stage, unit = self.stages[action.stage], units[action.micro_batch]
            back = not isinstance(action, Forward)
            for edge in stage.outgoing if back else stage.incoming:
                message = _Message(edge, action.micro_batch, back)
                if (back and not edge.gradient) or message in self._posted or self._peer(message, sender=False) == self.comm.rank:
                    continue
                if (edge, unit.signature) not in self._forms:
                    return
                self._post(message, unit)


def soon(actions: Sequence[Action], position: int) -> list[Action]:
    """This action and the next few; gradients of weights, which nothing is received for, aside."""
    receiving = (a for a in islice(actions, position, None) if not isinstance(a, Weight))
    return list(islice(receiving, 1 + AHEAD))


def next_is_own_backward(actions: Sequence[Action], position: int) -> bool:
    """Whether this forward pass is followed at once by its backward pass, so that recomputing it would save nothing."""
    action, following = actions[position], actions[position + 1 : position + 2]
    return any((f.stage, f.micro_batch) == (action.stage, action.micro_batch) for f in following)


def _check(form: Form, x: Tensor, message: _Message) -> None:
    if (form.shape, form.dtype) != (tuple(x.shape), x.dtype):
        raise ValueError(
            f"{'the gradient of ' if message.back else ''}{message.edge} is {Form.of(x)} in micro-batch {message.micro_batch}, but {form} was agreed for windows "
            "of this size: a layer's output must have a shape and type that depend on nothing but its input's"
        )
