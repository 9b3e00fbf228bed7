"""Operations of a rank in one step, as plain records.

Pure functions build the list (:mod:`distseg.runtime.stage_program`,
:mod:`distseg.runtime.tile_program`), an executor runs it, and :func:`text` prints it. The fields
mean:

    segment    the number of a run of layers in the network
    tensor_id  the number of a feature map: 0 for the pixels, n + 1 for the result of layer n
    block      the number of a tile batch within the micro-batch
    box        the tile, a box of the segment's result

A *row* of a feature map is all cells with one index along its first spatial dim. Rows are *final*
once no later pass of the sender changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from distseg.runtime.partition import Edge
from distseg.tiling.tile import Box


class Operation:
    """One operation of a rank, such as a pass or a message, for one micro-batch."""

    micro_batch: int
    verb: ClassVar[str]

    @property
    def line(self) -> str:
        """Text of this operation, in one line."""
        return f"m{self.micro_batch}  {self.verb:<10}{self._what()}".rstrip()

    def _what(self) -> str:
        return ""


# Operations of stages that keep their graphs (distseg.runtime.stage_program)


@dataclass(frozen=True)
class EdgeOperation(Operation):
    """Transfer along an edge between stages.

    Args:
        micro_batch: the index of the micro-batch.
        edge: the edge that the feature map travels along.
        back: True if the gradient travels back instead.
    """

    micro_batch: int
    edge: Edge
    back: bool = False

    def _what(self) -> str:
        return f"{'gradient of ' * self.back}{self.edge}"

    @property
    def sender(self) -> int:
        """Stage that sends the tensors."""
        return self.edge.target if self.back else self.edge.source

    @property
    def receiver(self) -> int:
        """Stage that receives the tensors."""
        return self.edge.source if self.back else self.edge.target


class Recv(EdgeOperation):
    """Receive of the tensors of an edge, which the next pass of this rank reads."""

    verb = "recv"


class Send(EdgeOperation):
    """Send of the tensors of an edge, which the previous pass of this rank computed."""

    verb = "send"


@dataclass(frozen=True)
class Recompute(Operation):
    """Repeated forward pass of a stage whose activations were not kept.

    Attributes:
        micro_batch: the index of the micro-batch.
        stage: the index of the stage.
    """

    micro_batch: int
    stage: int
    verb = "recompute"

    def _what(self) -> str:
        return f"stage {self.stage}"


# Operations of streamed tiles (distseg.runtime.tile_program)


@dataclass(frozen=True)
class TileOperation(Operation):
    """Forward or backward pass of one tile through a segment (the layers between two cuts).

    Args:
        micro_batch: the index of the micro-batch.
        segment: the index of the segment.
        block: the index of the tile batch within the micro-batch.
        box: the tile, a box of the segment's result.
    """

    micro_batch: int
    segment: int
    block: int
    box: Box

    @property
    def tile(self) -> tuple[int, int, int, Box]:
        """Key of the tile, equal for its forward pass and its backward pass."""
        return self.micro_batch, self.segment, self.block, self.box

    def _what(self) -> str:
        return f"segment {self.segment}  {_block(self.block)}{self.box}"


@dataclass(frozen=True)
class KeptTile(TileOperation):
    """Pass of a tile that may keep its autograd graph.

    Args:
        kept: True if the graph stays in memory from the forward to the backward pass. Otherwise the
            tile is computed twice.
    """

    kept: bool = False

    def _what(self) -> str:
        return super()._what() + ("  kept" if self.kept else "")


class ForwardTile(KeptTile):
    """Forward pass of a tile through a segment; the segment's result is stored.

    The pass reads windows of the segment's input feature maps. If an active norm (a norm that
    computes its statistics from the current images) follows the segment, the pass also computes the
    moments (such as count and mean) of the tile's result for this norm.
    """

    verb = "forward"


@dataclass(frozen=True)
class OutputTile(TileOperation):
    """Forward pass of a tile of the network's result. The executor yields this result.

    Args:
        back: True if the result has a graph and its backward pass follows. The backward pass adds
            to the gradients of the feature maps that the forward pass read.
    """

    back: bool
    verb = "output"

    def _what(self) -> str:
        return super()._what() + ("  and back" if self.back else "")


class BackwardTile(KeptTile):
    """Backward pass of a tile through a segment.

    The backward pass adds to the gradients of the feature maps that the forward pass read. If the
    forward pass kept no graph, the tile is first computed again with a graph.
    """

    verb = "backward"


@dataclass(frozen=True)
class MapOperation(Operation):
    """Operation on the feature map with number ``tensor_id`` of a micro-batch."""

    micro_batch: int
    tensor_id: int

    def _what(self) -> str:
        return f"map {self.tensor_id}"


class RecvRows(MapOperation):
    """Start of the receive of a feature map, whose rows arrive as soon as they are computed."""

    verb = "recv"


@dataclass(frozen=True)
class RecvGradRows(MapOperation):
    """Start of the receive of the gradient that rank ``source`` sends back for a feature map."""

    source: int
    verb = "recv"

    def _what(self) -> str:
        return f"gradient of map {self.tensor_id} from rank {self.source}"


class Measure(MapOperation):
    """Computation of the moments (such as count and mean) of a feature map on this rank's tile.

    This rank's active norms read the feature map and need its moments. The feature map is the
    image, or another rank computed it. For a feature map that this rank computes,
    :class:`ForwardTile` computes the moments instead.
    """

    verb = "measure"


class Statistic(MapOperation):
    """Computation of norms' statistics from the moments of all tiles of a feature map.

    All ranks that share these statistics must run this operation together.
    """

    verb = "statistic"


class FetchHalo(MapOperation):
    """Receive of the halo of a stored feature map from the ranks that own the halo's cells.

    The halo lies around the cells that this rank has computed. All ranks that share an image must
    run this operation together.
    """

    verb = "halo"


class SendHaloGrad(MapOperation):
    """Send of the gradient of a halo to the ranks that own the halo's cells.

    These ranks add it to their own gradient of the feature map. This is the adjoint of
    :class:`FetchHalo`.
    """

    verb = "halo grad"


class FinalizeStatistics(MapOperation):
    """Sum, over all tiles, of the gradients with respect to the statistics of a norm.

    All ranks that share these statistics must run this operation together.
    """

    verb = "finalize"


class ApplyStatisticsGrad(MapOperation):
    """Addition of the gradient through norms' statistics to a feature map's stored gradient.

    The statistics of a norm depend on all cells of the feature map that the norm reads.
    """

    verb = "apply"


@dataclass(frozen=True)
class SendRows(MapOperation):
    """Permission to send the rows of a feature map before row ``final`` to the ranks that read it.

    The operation starts the sends that are possible now; other sends start later.

    Args:
        block: the index of the tile batch.
        final: the first row that may still change.
    """

    block: int
    final: int
    verb = "send"

    def _what(self) -> str:
        return f"map {self.tensor_id}  {_block(self.block)}rows before {self.final}"


class SendGradRows(SendRows):
    """Permission to send the gradient of all rows before row ``final`` to the map's maker.

    The maker is the rank that computed the feature map.

    Args:
        block: the index of the tile batch.
        final: the first row whose gradient may still change.
    """

    verb = "send grad"


@dataclass(frozen=True)
class Loss(Operation):
    """Computation of the loss gradient from the partial sums of all ranks.

    All ranks must run this operation together. ``micro_batch`` is the index of the micro-batch
    whose backward pass comes next.
    """

    micro_batch: int
    verb = "loss"


class Drop(MapOperation):
    """Release of a feature map's memory, once other ranks have received the rows that they read."""

    verb = "drop"


class DropGradient(MapOperation):
    """Release of the memory of a feature map's gradient."""

    verb = "drop grad"


def _block(number: int) -> str:
    return f"image {number} " if number else ""


def text(operations: Iterable[Operation]) -> str:
    """Return a text with one line per operation, for people to read.

    Consecutive passes of one kind over tiles of one segment share a line.
    """
    return "\n".join(_lines(operations))


def _lines(operations: Iterable[Operation]) -> Iterator[str]:
    for run in _runs(operations):
        more = f" ... {run[-1].box}  ({len(run)} tiles)" if len(run) > 1 else ""
        yield f"{run[0].line}{more}"


def _runs(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    """Yield lists of consecutive operations that differ only in the tile."""
    run: list[Operation] = []
    for operation in operations:
        if run and not _alike(run[0], operation):
            yield run
            run = []
        run.append(operation)
    if run:
        yield run


def _alike(one: Operation, other: Operation) -> bool:
    """Return True if two operations are the same pass of a segment, on different tiles."""

    def key(o):
        return (type(o), o.micro_batch, o.segment, o.block, isinstance(o, KeptTile) and o.kept)

    return (
        isinstance(one, TileOperation)
        and isinstance(other, TileOperation)
        and key(one) == key(other)
    )
