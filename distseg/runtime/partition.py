"""Where a flat model is cut, and what then travels between its stages.

A stage is a run of consecutive layers. Each map that another stage reads travels straight from the stage that makes it to
that one, past those in between (a portal; torchgpipe, arXiv 2004.09910)::

    layers   enc0_conv0 ... enc0_stash | enc0_pool ... dec0_up | dec0_pop ... head
    stages   0                         | 1                     | 2
    edges    x 0 -> 1,   x 1 -> 2,   skip0 0 -> 2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Container, Sequence

from torch import Tensor, nn

from distseg.models.layers import Pop
from distseg.models.network import IMAGE, Call
from distseg.tiling.graph import crossing

OUTPUT = "x"  # the edge of a stage's last map to the next stage; skips go by their own names, other maps by that of the layer which makes them


@dataclass(frozen=True)
class Edge:
    """A feature map that stage ``source`` hands to stage ``target``; ``gradient``: whether one returns."""

    name: str
    source: int
    target: int
    gradient: bool = True
    map: int = 0

    def __str__(self) -> str:
        return f"{self.name} of stage {self.source} for stage {self.target}"


def stage_ranges(balance: Sequence[int], layers: int) -> list[range]:
    """The layers of each stage from their numbers, such as the slides' 14 24 30 22 12 7.

    Raises:
        ValueError: the numbers do not add up to the model's layers, or a stage has none.
    """
    if min(balance) < 1 or sum(balance) != layers:
        raise ValueError(
            f"pipeline.balance {' '.join(map(str, balance))} adds up to {sum(balance)} layers, "
            f"but the model has {layers}, and each stage needs at least one"
        )
    stops = list(accumulate(balance))
    return [range(stop - count, stop) for stop, count in zip(stops, balance)]


def edges_between(
    ranges: Sequence[range],
    inputs: Sequence[Sequence[int]],
    names: Sequence[str] | None = None,
    trained: Container[int] | None = None,
) -> list[Edge]:
    """What travels: outputs stage by stage, then whatever else crosses a cut.

    Args:
        inputs: the maps that each layer is called with.
        names: of the maps; by default their numbers.
        trained: the maps that want a gradient; by default all.
    """
    found = []
    ways = crossing(inputs, ranges)
    onwards = {
        source: reader
        for source, stage, reader in ways
        if source == ranges[stage].stop and reader == stage + 1
    }
    for source, stage, reader in ways:
        # The next stage reads it in any case, and hands it on: its rank may be that of a later stage too.
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
    """All stages of a model: their layers, what travels between them, and the pipeline's rank that runs each."""

    ranges: tuple[range, ...]
    edges: tuple[Edge, ...]
    placement: tuple[int, ...]

    @classmethod
    def whole(cls) -> "Partition":
        """One stage, of any kind of model."""
        return cls((range(0),), (), (0,))

    @classmethod
    def of(
        cls, calls: Sequence[Call], balance: Sequence[int], placement: Sequence[int] | None = None
    ) -> "Partition":
        """A flat model cut into stages of these numbers of layers; by default stage s is run by rank s.

        Raises:
            ValueError: the balance does not fit the model, or stages would share a weight or running statistics.
        """
        ranges = stage_ranges(balance, len(calls))
        owner: dict[Tensor, tuple[int, int]] = {}  # stage and layer
        for stage, position in (
            (stage, position) for stage, positions in enumerate(ranges) for position in positions
        ):
            for tensor in _kept(calls[position].layer):
                first, layer = owner.setdefault(tensor, (stage, position))
                if first != stage:
                    raise ValueError(
                        f"layers {layer} and {position} share "
                        f"{'a weight' if isinstance(tensor, nn.Parameter) else 'running statistics'}, but lie in the stages {first} and {stage}, "
                        "each of which would keep its own: set pipeline.balance so that one stage "
                        "has both, or give each its own"
                    )
        edges = edges_between(
            ranges, [call.reads for call in calls], _names(calls), _trained(calls)
        )
        return cls(tuple(ranges), tuple(edges), tuple(placement or range(len(ranges))))

    @property
    def stages(self) -> int:
        return len(self.ranges)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank of the pipeline runs."""
        return [stage for stage, at in enumerate(self.placement) if at == rank]

    def layers_of(self, rank: int) -> set[int]:
        """The layers, by position, whose weights a rank holds."""
        return {layer for stage in self.stages_of(rank) for layer in self.ranges[stage]}

    def incoming(self, stage: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.target == stage]

    def outgoing(self, stage: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.source == stage]


def _kept(layer: nn.Module) -> list[Tensor]:
    """Return what a layer has that a step changes: parameters, and running statistics, perhaps those of its first place."""
    keeper = getattr(layer, "running", layer)
    running = (keeper if isinstance(keeper, nn.Module) else layer)._buffers.get("running_mean")
    return [*layer.parameters(), *([] if running is None else [running])]


def _names(calls: Sequence[Call]) -> list[str]:
    """Of all maps: that of the skip, or of the layer which makes it."""
    found = [IMAGE, *(call.name for call in calls)]
    for call in calls:
        if isinstance(call.layer, Pop):
            found[call.inputs[-1]] = call.layer.name
    return found


def _trained(calls: Sequence[Call]) -> set[int]:
    """The maps that are made with a weight that is trained."""
    found: set[int] = set()
    for number, call in enumerate(calls):
        if found.intersection(call.reads) or any(p.requires_grad for p in call.layer.parameters()):
            found.add(number + 1)
    return found
