"""Find the layers of each pipeline stage so that the slowest rank is as fast as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distseg.planning.balance import fastest_split, sums
from distseg.planning.cost import Costs, Seconds
from distseg.planning.fold import v_split
from distseg.planning.held import Policy
from distseg.planning.tile_size import GridTiling, computed_again
from distseg.runtime.partition import stage_ranges
from distseg.tiling.layout import Layout
from distseg.tiling.segment import segments_of


@dataclass(frozen=True)
class Splitter:
    """Search for the number of layers of each pipeline stage.

    Attributes:
        placement: the rank of each stage.
        v_shaped: True if a rank holds two stages, one from each end of the network.
        policy: the schedule and recomputation, on which a stage's time depends.
    """

    placement: tuple[int, ...]
    v_shaped: bool
    policy: Policy

    def fastest(self, costs: Costs) -> list[int]:
        """Return how many layers each stage has if the slowest rank is as fast as possible."""
        stages = len(self.placement)
        if self.v_shaped:
            passes = self.policy.forward_passes(0, stages)
            seconds = [passes * f + b for f, b in zip(costs.forward, costs.backward)]
            return v_split(seconds, costs.skips, 1 + max(self.placement))
        return fastest_split(stage_seconds(costs, self.policy, stages), stages)

    def slowest(self, costs: Costs, split: Sequence[int]) -> float:
        """Return the seconds that the slowest rank computes for one micro-batch.

        Args:
            costs: the costs of the layers.
            split: the number of layers of each stage.
        """
        busy: Counter = Counter()
        seconds = stage_seconds(costs, self.policy, len(self.placement))
        stages = stage_ranges(split, len(costs.layers))
        for stage, (layers, rank) in enumerate(zip(stages, self.placement)):
            busy[rank] += seconds[stage, layers.start, layers.stop]
        return max(busy.values())

    def fastest_streaming(
        self, costs: Costs, layout: Layout, active: Collection[int], tiling: GridTiling
    ) -> list[int]:
        """Return the number of layers of each stage for streamed tiles.

        The windows of streamed tiles overlap, so some cells are computed more than once. A layer's
        cost grows in proportion. The overlap depends on the split itself, so the search runs for a
        few rounds: the overlap of one split gives the costs by which the next split is found. Each
        split is judged by the costs with its own overlap, and the best split is returned.

        Args:
            costs: the costs of the layers on a rank's part of the image, without overlap.
            layout: the layers on that part.
            active: the feature maps that active norms read (norms that compute their statistics
                from the current images).
            tiling: the grid of streamed tiles.
        """
        split = self.fastest(costs)
        tried: dict[tuple[int, ...], float] = {}
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
        best = min(tried, key=tried.__getitem__)
        return list(best)


_ROUNDS = 6


def stage_seconds(costs: Costs | Seconds, policy: Policy, stages: int) -> np.ndarray:
    """Return the seconds of layers a..b-1 as stage s, in entry [s, a, b] of (S, n + 1, n + 1).

    S is the number of stages and n the number of layers. The seconds are those of one micro-batch:
    forward, backward and recomputation.

    Args:
        costs: the costs of the layers, or their seconds.
        policy: the schedule and recomputation.
        stages: the number of stages.
    """
    passes = np.array([policy.forward_passes(stage, stages) for stage in range(stages)])
    if len(set(passes)) == 1:
        seconds = passes[0] * sums(costs.forward) + sums(costs.backward)
        return np.broadcast_to(seconds, (stages, *seconds.shape))
    return passes[:, None, None] * sums(costs.forward) + sums(costs.backward)
