"""What a rank does in a step, one plain operation after another.

Pure functions make the list (:mod:`distseg.runtime.stage_program`, :mod:`distseg.runtime.tile_program`), an executor goes through it, and it prints
as text. ``segment`` is a run of layers by its number in the network, ``position`` a feature map by the layer it lies before, ``block`` what the rank owns of an
image of the micro-batch, ``box`` the tile of a segment's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterable, Iterator

from distseg.runtime.partition import Edge
from distseg.tiling.tile import Box


class Operation:
    """Anything that a rank does for one micro-batch."""

    micro_batch: int
    verb: ClassVar[str]

    @property
    def line(self) -> str:
        """As a person reads it."""
        return f"m{self.micro_batch}  {self.verb:<10}{self._what()}".rstrip()

    def _what(self) -> str:
        return ""


# of stages that keep their graphs (distseg.runtime.stage_program)


@dataclass(frozen=True)
class OfEdge(Operation):
    """What an edge between stages hands on, or, ``back``, the gradient that returns."""

    micro_batch: int
    edge: Edge
    back: bool = False

    def _what(self) -> str:
        return f"{'gradient of ' * self.back}{self.edge}"

    @property
    def sender(self) -> int:
        """The stage that has it."""
        return self.edge.target if self.back else self.edge.source

    @property
    def receiver(self) -> int:
        """The stage that wants it."""
        return self.edge.source if self.back else self.edge.target


class Receive(OfEdge):
    """Have the tensors that the next pass takes."""

    verb = "receive"


class Hand(OfEdge):
    """Let the other end have what the last pass made."""

    verb = "hand"


@dataclass(frozen=True)
class Recompute(Operation):
    """The forward pass of a stage once more, whose activations were not kept."""

    micro_batch: int
    stage: int
    verb = "recompute"

    def _what(self) -> str:
        return f"stage {self.stage}"


# of streamed tiles (distseg.runtime.tile_program)


@dataclass(frozen=True)
class OfTile(Operation):
    """A pass of a tile through a segment."""

    micro_batch: int
    segment: int
    block: int
    box: Box

    @property
    def tile(self) -> tuple[int, int, int, Box]:
        """What its passes have in common, and no other tile's."""
        return self.micro_batch, self.segment, self.block, self.box

    def _what(self) -> str:
        return f"segment {self.segment}  {_block(self.block)}{self.box}"


@dataclass(frozen=True)
class KeptTile(OfTile):
    """``kept``: what autograd needs of the tile waits in memory from the forward to the backward pass; else the tile is computed twice."""

    kept: bool = False

    def _what(self) -> str:
        return super()._what() + ("  kept" if self.kept else "")


class ForwardTile(KeptTile):
    """Compute a tile from windows of the maps that the segment reads, and store it; take its moments for a live norm."""

    verb = "forward"


@dataclass(frozen=True)
class OutputTile(OfTile):
    """Compute a tile of the network's result and hand it over; ``back``: with a graph, and what comes back is added to the gradients of what was read."""

    back: bool
    verb = "output"

    def _what(self) -> str:
        return super()._what() + ("  and back" if self.back else "")


class BackwardTile(KeptTile):
    """Read the tile's gradient, compute the tile again with a graph if none was kept, go back through it, and add to the gradients of what was read."""

    verb = "backward"


@dataclass(frozen=True)
class OfMap(Operation):
    micro_batch: int
    position: int

    def _what(self) -> str:
        return f"map {self.position}"


class Expect(OfMap):
    """A map comes from another rank, rows as they become final."""

    verb = "expect"


@dataclass(frozen=True)
class ExpectGradient(OfMap):
    """What another rank's readers of a map return comes."""

    source: int
    verb = "expect"

    def _what(self) -> str:
        return f"gradient of map {self.position} from rank {self.source}"


class Measure(OfMap):
    """Take the moments of a map that no segment of this rank made."""

    verb = "measure"


class Statistic(OfMap):
    """The statistics of the norm before which the map lies, from the moments of all tiles. Collective."""

    verb = "statistic"


class Fetch(OfMap):
    """The margin of a map, from the ranks that own it; they get theirs. Collective over the ranks that share an image."""

    verb = "fetch"


class GiveBack(OfMap):
    """Its adjoint: the gradient of the margin goes to its owners and is added there."""

    verb = "give back"


class Settle(OfMap):
    """What the statistics collect of gradients, from all tiles. Collective."""

    verb = "settle"


class Correct(OfMap):
    """Add to the stored gradient what the statistics collected."""

    verb = "correct"


@dataclass(frozen=True)
class Send(OfMap):
    """Rows of a block's map before ``final`` will not change any more, and may go to the ranks that read them."""

    block: int
    final: int
    verb = "send"

    def _what(self) -> str:
        return f"map {self.position}  {_block(self.block)}rows before {self.final}"


class SendGradient(Send):
    """The same of a map's gradient, for the rank that made the map."""

    verb = "return"


@dataclass(frozen=True)
class Loss(Operation):
    """The loss's slope, from what all ranks know of the step's table by now. Collective."""

    micro_batch: int
    verb = "loss"


class Drop(OfMap):
    """Let go of a map, once others have what they read of it."""

    verb = "drop"


class DropGradient(OfMap):
    """Let go of a map's gradient."""

    verb = "drop grad"


def _block(number: int) -> str:
    return f"image {number} " if number else ""


def text(operations: Iterable[Operation]) -> str:
    """A line each; runs of tiles of one segment, which differ in their boxes only, in one line."""
    return "\n".join(_lines(operations))


def _lines(operations: Iterable[Operation]) -> Iterator[str]:
    for run in _runs(operations):
        more = f" ... {run[-1].box}  ({len(run)} tiles)" if len(run) > 1 else ""
        yield f"{run[0].line}{more}"


def _runs(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    run: list[Operation] = []
    for operation in operations:
        if run and not _alike(run[0], operation):
            yield run
            run = []
        run.append(operation)
    if run:
        yield run


def _alike(one: Operation, other: Operation) -> bool:
    key = lambda o: (type(o), o.micro_batch, o.segment, o.block, isinstance(o, KeptTile) and o.kept)
    return isinstance(one, OfTile) and isinstance(other, OfTile) and key(one) == key(other)
