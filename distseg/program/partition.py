"""Where a flat model is cut, and what then travels between its stages.

A stage is a run of consecutive layers. Each stage hands its output to the next one, and a skip travels straight from
the stage that stashes it to the one that pops it, past those in between (a portal; torchgpipe, arXiv 2004.09910)::

    layers   enc0_conv0 ... enc0_stash | enc0_pool ... dec0_up | dec0_pop ... head
    stages   0                         | 1                     | 2
    edges    x 0 -> 1,   x 1 -> 2,   skip0 0 -> 2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

from torch import nn

from distseg.models.layers import Skip, skips_of

OUTPUT = "x"  # the edge of a stage's output; skips go by their own names


@dataclass(frozen=True)
class Edge:
    """A tensor that stage ``source`` hands to stage ``target``; ``gradient``: whether one returns."""

    name: str
    source: int
    target: int
    gradient: bool = True

    def __str__(self) -> str:
        return f"{self.name} of stage {self.source} for stage {self.target}"


def stage_ranges(balance: Sequence[int], layers: int) -> list[range]:
    """The layers of each stage from their numbers, such as the slides' 14 24 30 22 12 7.

    Raises:
        ValueError: the numbers do not add up to the model's layers, or a stage has none.
    """
    if min(balance) < 1 or sum(balance) != layers:
        raise ValueError(f"pipeline.balance {' '.join(map(str, balance))} adds up to {sum(balance)} layers, but the model has {layers}, and each stage needs at least one")
    stops = list(accumulate(balance))
    return [range(stop - count, stop) for stop, count in zip(stops, balance)]


def edges_between(ranges: Sequence[range], skips: Sequence[Skip], trained_from: int = 0) -> list[Edge]:
    """What travels: outputs stage by stage, then the skips that cross a cut.

    Args:
        trained_from: the first layer with a parameter that is trained; what is computed before it wants no gradient.
    """
    stage_of = {layer: stage for stage, layers in enumerate(ranges) for layer in layers}
    outputs = [Edge(OUTPUT, stage, stage + 1, layers.stop > trained_from) for stage, layers in enumerate(ranges[:-1])]
    crossing = [s for s in skips if stage_of[s.stash] != stage_of[s.pop]]
    return outputs + [Edge(s.name, stage_of[s.stash], stage_of[s.pop], s.stash > trained_from) for s in crossing]


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
    def of(cls, layers: Sequence[nn.Module], balance: Sequence[int], placement: Sequence[int] | None = None) -> "Partition":
        """A flat model cut into stages of these numbers of layers; by default stage s is run by rank s.

        Raises:
            ValueError: the balance does not fit the model, or stages would share a weight.
        """
        ranges = stage_ranges(balance, len(layers))
        owner: dict[nn.Parameter, tuple[int, int]] = {}  # stage and layer
        for stage, position in ((stage, position) for stage, positions in enumerate(ranges) for position in positions):
            for parameter in layers[position].parameters():
                first, layer = owner.setdefault(parameter, (stage, position))
                if first != stage:
                    raise ValueError(
                        f"layers {layer} and {position} share a weight, but lie in the stages {first} and {stage}, each of which would train its own: "
                        "set pipeline.balance so that one stage has both, or give each a weight of its own"
                    )
        trained = [position for position, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
        edges = edges_between(ranges, skips_of(layers), trained[0] if trained else len(layers))
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
