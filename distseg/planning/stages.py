"""Find the layers of each pipeline stage so that the slowest rank is fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from distseg.planning.balance import fastest_split
from distseg.planning.cost import Costs
from distseg.planning.fold import v_split
from distseg.planning.stage_memory import Policy, ranges_of, stage_seconds
from distseg.planning.tile_size import GridTiling, computed_again
from distseg.runtime.partition import stage_ranges
from distseg.tiling.layout import Layout
from distseg.tiling.segment import segments_of


@dataclass(frozen=True)
class Splitter:
    """Search for the layers of each stage.

    Attributes:
        placement: the rank of each stage.
        v_shaped: True if a rank holds two stages, one from each end of the network.
        policy: the schedule and recomputation, on which a stage's time depends.
    """

    placement: tuple[int, ...]
    v_shaped: bool
    policy: Policy

    def fastest(self, costs: Costs) -> list[int]:
        """Return the number of layers of each stage, such that the slowest rank is fastest."""
        stages = len(self.placement)
        if self.v_shaped:
            passes = self.policy.forward_passes(0, stages)
            seconds = [passes * f + b for f, b in zip(costs.forward, costs.backward)]
            return v_split(seconds, costs.skips, 1 + max(self.placement))
        return fastest_split(stage_seconds(costs, ranges_of(costs), self.policy, stages), stages)

    def slowest(self, costs: Costs, split: Sequence[int]) -> float:
        """Return the seconds of the slowest rank for one micro-batch."""
        busy: Counter = Counter()
        seconds = stage_seconds(costs, ranges_of(costs), self.policy, len(self.placement))
        stages = stage_ranges(split, len(costs.layers))
        for stage, (layers, rank) in enumerate(zip(stages, self.placement)):
            busy[rank] += seconds[stage, layers.start, layers.stop]
        return max(busy.values())

    def fastest_streaming(
        self, costs: Costs, layout: Layout, active: Collection[int], tiling: GridTiling
    ) -> list[int]:
        """Return the split for streamed tiles, whose overlap depends on where stages are cut.

        Overlapping windows compute cells more than once, and a layer's cost grows in proportion.
        The overlap of one split gives the costs for the next split, for a few rounds. The split
        with the fastest slowest rank by its own costs is taken.

        Args:
            costs: the costs of the layers on a rank's part of the image, without overlap.
            layout: the layers on that part.
            active: the feature maps that active norms read.
            tiling: the grid of streamed tiles.
        """
        split, tried = self.fastest(costs), {}
        while split not in [list(found) for found in tried] and len(tried) < _ROUNDS:
            stages = stage_ranges(split, len(costs.layers))
            times = computed_again(layout, segments_of(layout.graph, active, stages), tiling)
            layers = tuple(
                replace(layer, forward=t * layer.forward, backward=t * layer.backward)
                for layer, t in zip(costs.layers, times)
            )
            scaled = replace(costs, layers=layers)
            tried[tuple(split)] = self.slowest(scaled, split)
            split = self.fastest(scaled)
        return list(min(tried, key=tried.get))


_ROUNDS = 6
