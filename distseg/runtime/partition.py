"""Cuts a list of layer calls into stages, and finds the feature maps that travel between stages.

A stage is a run of consecutive layers. A feature map that another stage reads travels directly from
the stage that computes it to the stage that reads it, and skips the stages in between (a portal, as
in torchgpipe, arXiv 2004.09910)::

    layers   enc0_conv0 ... enc0_stash | enc0_pool ... dec0_up | dec0_pop ... head
    stages   0                         | 1                     | 2
    edges    x 0 -> 1,   x 1 -> 2,   skip0 0 -> 2
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn

from distseg.models.layers import Pop
from distseg.models.network import IMAGE, Call
from distseg.tiling.graph import crossing

# Name of the edge from a stage's last feature map to the next stage. A skip's edge has the skip's
# name, any other edge the name of the layer that makes the map.
OUTPUT = "x"


@dataclass(frozen=True)
class Edge:
    """Feature map that stage ``source`` sends to stage ``target``.

    Args:
        name: the name of the feature map.
        source: the stage that sends it.
        target: the stage that receives it.
        gradient: True if the target sends a gradient of the feature map back.
        map: the index of the feature map: 0 for the image, n + 1 for the result of layer n.
    """

    name: str
    source: int
    target: int
    gradient: bool = True
    map: int = 0

    def __str__(self) -> str:
        return f"{self.name} of stage {self.source} for stage {self.target}"


def stage_ranges(balance: Sequence[int], layers: int) -> list[range]:
    """Return, for each stage, the range of the indices of its layers.

    Args:
        balance: the number of layers of each stage.
        layers: the number of layers of the model.

    Raises:
        ValueError: if the sum of ``balance`` is not ``layers``, or a stage has no layer.
    """
    if min(balance) < 1 or sum(balance) != layers:
        raise ValueError(
            f"pipeline.balance {' '.join(map(str, balance))} adds up to {sum(balance)} layers, "
            f"but the model has {layers}, and each stage needs at least one: give each stage 1 or "
            f"more layers, {layers} in total"
        )
    stops = list(accumulate(balance))
    return [range(stop - count, stop) for stop, count in zip(stops, balance)]


def edges_between(
    ranges: Sequence[range],
    inputs: Sequence[Sequence[int]],
    names: Sequence[str] | None = None,
    trained: Container[int] | None = None,
) -> list[Edge]:
    """Return the edges along which feature maps travel between stages.

    The edges from the output of a stage to the next stage come first. If the next stage reads a
    stage's output, the next stage also sends this output on to all later stages that read it. Any
    other feature map goes directly from the stage that computes it to each stage that reads it.

    Args:
        ranges: the layers of each stage.
        inputs: for each layer, the numbers of the feature maps that it reads.
        names: the names of the feature maps; by default their numbers.
        trained: the numbers of the feature maps that need a gradient; by default all.
    """
    found = []
    ways = crossing(inputs, ranges)
    onwards = {
        source: reader
        for source, stage, reader in ways
        if source == ranges[stage].stop and reader == stage + 1
    }
    for source, stage, reader in ways:
        # If the next stage reads the map anyway, it also passes the map on to later readers: one
        # rank may run both stages.
        sender = stage if onwards.get(source, reader) == reader else onwards[source]
        name = (
            OUTPUT
            if source in onwards and sender == stage
            else names[source]
            if names
            else f"map {source}"
        )
        found.append(Edge(name, sender, reader, trained is None or source in trained, source))
    return sorted(found, key=lambda edge: edge.name != OUTPUT)


@dataclass(frozen=True)
class Partition:
    """All stages of a model.

    Attributes:
        ranges: for each stage, the numbers of its layers.
        edges: the feature maps that travel between stages.
        placement: the rank of each stage.
    """

    ranges: tuple[range, ...]
    edges: tuple[Edge, ...]
    placement: tuple[int, ...]

    @classmethod
    def whole(cls) -> Partition:
        """Return the partition of a model that is not cut into stages.

        It has one stage, whose layers are not listed, so any kind of model can have it.
        """
        return cls((range(0),), (), (0,))

    @classmethod
    def from_balance(
        cls, calls: Sequence[Call], balance: Sequence[int], placement: Sequence[int] | None = None
    ) -> Partition:
        """Return the partition of a list of layer calls.

        Args:
            calls: the layer calls of the model.
            balance: the number of layers of each stage.
            placement: the rank of each stage; by default rank s runs stage s.

        Raises:
            ValueError: if the balance does not fit the model, or if stages would share a weight or
                running statistics.
        """
        return Partitioner(calls).cut(balance, placement)

    @property
    def one_stage_a_rank(self) -> bool:
        """True if each rank of the pipeline has one stage."""
        return len(set(self.placement)) == len(self.placement)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.ranges)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank of the pipeline runs."""
        return [stage for stage, at in enumerate(self.placement) if at == rank]

    def layers_of(self, rank: int) -> set[int]:
        """Return the numbers of the layers whose weights a rank holds."""
        return {layer for stage in self.stages_of(rank) for layer in self.ranges[stage]}

    def incoming(self, stage: int) -> list[Edge]:
        """Return the edges whose feature maps a stage receives."""
        return [edge for edge in self.edges if edge.target == stage]

    def outgoing(self, stage: int) -> list[Edge]:
        """Return the edges whose feature maps a stage sends."""
        return [edge for edge in self.edges if edge.source == stage]


class Partitioner:
    """Maker of many partitions of one list of layer calls, such as for different balances.

    Args:
        calls: the layer calls of the model.
    """

    def __init__(self, calls: Sequence[Call]):
        self._kept = [_kept(call.layer) for call in calls]
        self._reads = [call.reads for call in calls]
        self._names, self._trained = _names(calls), _trained(calls)

    def cut(self, balance: Sequence[int], placement: Sequence[int] | None = None) -> Partition:
        """Return the partition of the model into stages (:meth:`Partition.from_balance`).

        Args:
            balance: the number of layers of each stage.
            placement: the rank of each stage; by default rank s runs stage s.
        """
        ranges = stage_ranges(balance, len(self._reads))
        owner: dict[Tensor, tuple[int, int]] = {}  # Stage and layer.
        for stage, position in (
            (stage, position) for stage, positions in enumerate(ranges) for position in positions
        ):
            for tensor, shared in self._kept[position]:
                first, layer = owner.setdefault(tensor, (stage, position))
                if first != stage:
                    raise ValueError(
                        f"layers {layer} and {position} share "
                        f"{shared}, but lie in the stages {first} and {stage}, which would train "
                        f"separate copies: set pipeline.balance so that one stage has both "
                        f"layers, or give each layer its own"
                    )
        edges = edges_between(ranges, self._reads, self._names, self._trained)
        return Partition(tuple(ranges), tuple(edges), tuple(placement or range(len(ranges))))


def _kept(layer: nn.Module) -> list[tuple[Tensor, str]]:
    """Return a layer's parameters and running mean, each as (tensor, its name in messages).

    Two layers share weights or running statistics if both have the same one of these tensors. If
    a model calls one norm several times, each call is a separate layer here, and the layer of the
    first call may hold the running statistics for all calls. Its running mean is then returned for
    each of these layers.
    """
    keeper = getattr(layer, "running", layer)
    running = (keeper if isinstance(keeper, nn.Module) else layer)._buffers.get("running_mean")
    weights = [(parameter, "a weight") for parameter in layer.parameters()]
    return [*weights, *([] if running is None else [(running, "running statistics")])]


def _names(calls: Sequence[Call]) -> list[str]:
    """Return the name of each feature map, in the order of their numbers.

    A feature map that is stored as a skip has the name of the skip. Any other has the name of the
    layer that computes it.
    """
    found = [IMAGE, *(call.name for call in calls)]
    for call in calls:
        if isinstance(call.layer, Pop):
            found[call.inputs[-1]] = call.layer.name
    return found


def _trained(calls: Sequence[Call]) -> set[int]:
    """Return the numbers of the feature maps that depend on a weight with ``requires_grad``."""
    found: set[int] = set()
    for number, call in enumerate(calls):
        if found.intersection(call.reads) or any(p.requires_grad for p in call.layer.parameters()):
            found.add(number + 1)
    return found
