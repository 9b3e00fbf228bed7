"""Predict the memory of the rank with the highest peak in a layout.

:mod:`distseg.planning.live_tensors` counts the tensors of a stage for one micro-batch, and
:mod:`distseg.planning.stage_memory` says how many micro-batches a stage holds at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache

import numpy as np

from distseg.planning.live_tensors import StageTensors, TileSizes, stage_tensors
from distseg.planning.machine import Machine
from distseg.planning.stage_memory import Policy, Ranges, largest_holdings, ranges_of
from distseg.planning.tile_grids import TileGrids, TileWork
from distseg.runtime.partition import Partition
from distseg.runtime.schedule import splits

# Tables of float64 with a number for each image of a step and each partial sum of the loss: the
# sums, the loss gradient, and their copies.
_TABLES = 4
_MESHES = 64  # number of tiles whose lower bounds are kept
# A bound is made smaller by this factor, so that rounding does not make it larger than the peak.
_ROUNDED = 1 - 1e-9


class RankMemory:
    """Memory of ranks that train a network on a machine.

    Args:
        grids: the grids of tiles of the step.
        machine: the machine.
    """

    def __init__(self, grids: TileGrids, machine: Machine):
        self._grids, self._work, self._machine = grids, grids.work, machine
        self._stage_tensors = lru_cache(None)(self._find_stage_tensors)
        self._kept_on = lru_cache(_MESHES)(self._find_kept_on)

    def on(self, machine: Machine) -> RankMemory:
        """Return the memory of the same ranks on another machine, with the same cached results."""
        other = RankMemory(self._grids, machine)
        other._stage_tensors, other.ranges = self._stage_tensors, self.ranges
        return other

    @cached_property
    def ranges(self) -> Ranges:
        """Tables of the memory of all possible stages, for whole images."""
        return ranges_of(self._work.costs)

    def least(self, stages: int, policy: Policy, tile: TileSizes, share: float = 1.0) -> float:
        """Return a lower bound of the bytes of the rank with the highest peak.

        Let stage s hold L_s bytes of weights and what belongs to them, and all activations of h_s
        micro-batches at once. If no stage takes more than M bytes, stage s has at most
        (M - L_s) / h_s bytes of activations for a micro-batch. All stages together have A and L
        bytes, so M is at least (A + L / max h_s) / (1/h_0 + ... + 1/h_{S-1}). Another bound is what
        a stage takes that has only one layer, in its backward pass.

        Args:
            stages: the number of stages.
            policy: the schedule and recomputation.
            tile: the sizes of feature maps on a tile.
            share: a factor on these sizes.
        """
        held = held_at_once(stages, policy)
        one, every = self._kept_on(tile, share)
        lasting = (2 + self._work.copies) * self._grids.tensors.weight_bytes * self._work.parameters
        whole = (every + lasting / max(held)) / sum(1 / count for count in held)
        return self._machine.base + _ROUNDED * max(whole, one)

    def _find_kept_on(self, tile: TileSizes, share: float) -> tuple[float, float]:
        """Return bytes of the largest stage of one layer, and of all activations together.

        Args:
            tile: the sizes of feature maps.
            share: a factor on them.
        """
        network, spread = self._grids.tensors, self._machine.spread * share
        least = network.least_of_layers(tile)
        per_weight = (2 + self._work.copies) * network.weight_bytes
        one = max(
            per_weight * layer.parameters + spread * (sum(kept.values()) + gradients)
            for layer, (kept, gradients) in zip(network.layers, least)
        )
        every: dict[int, float] = {}
        for kept, _ in least:
            every |= kept
        return one, spread * sum(every.values())

    def peak(self, partition: Partition, policy: Policy, tile: TileWork) -> float:
        """Return the bytes of the rank with the highest peak, if the stages have these layers."""
        return float(
            self._machine.base
            + max(
                self._stage_memory(partition, stage, policy, tile)
                for stage in range(partition.stages)
            )
        )

    def exceeds(self, partition: Partition, policy: Policy, tile: TileWork, limit: float) -> bool:
        """Return True if some stage exceeds the limit; those that hold most come first."""
        held, full = held_at_once(partition.stages, policy), self.ranges.full
        about = [n * full[part.start, part.stop] for n, part in zip(held, partition.ranges)]
        return any(
            self._machine.base + self._stage_memory(partition, stage, policy, tile) > limit
            for stage in sorted(range(partition.stages), key=about.__getitem__, reverse=True)
        )

    def _stage_memory(
        self, partition: Partition, stage: int, policy: Policy, tile: TileWork
    ) -> float:
        """Return the bytes of the rank of a stage, besides those that every process takes."""
        network, layers = self._grids.tensors, partition.ranges[stage]
        incoming = frozenset(edge.map for edge in partition.incoming(stage))
        outgoing = frozenset(edge.map for edge in partition.outgoing(stage))
        apart = partition.stages > 1 and splits(policy.schedule)
        repeats = policy.recompute != "never"
        found = self._stage_tensors(tile.sizes, layers, incoming, outgoing, apart, repeats)
        held = largest_holdings(stage, partition.stages, policy)
        load = max(map(found.load, held)) + tile.sizes.buffers
        pixels, labels = network.pixels
        if stage == 0:
            load += policy.micro_batches * pixels * tile.sizes.maps[0]
        if stage + 1 == partition.stages:
            load += policy.micro_batches * labels * tile.sizes.owned
            load += _TABLES * 8 * self._work.loss.sums * self._work.batch
        own = network.layers[layers.start : layers.stop]
        load += sum(layer.buffers + policy.micro_batches * layer.noted for layer in own)
        weights = sum(layer.parameters for layer in own)
        lasting = (2 + policy.optimizer_copies) * network.weight_bytes * weights
        return lasting + self._machine.spread * load

    def _find_stage_tensors(
        self,
        tile: TileSizes,
        layers: range,
        incoming: frozenset[int],
        outgoing: frozenset[int],
        apart: bool,
        repeats: bool,
    ) -> StageTensors:
        return stage_tensors(self._grids.tensors, tile, layers, incoming, outgoing, apart, repeats)

    def tables(self, stages: int, policy: Policy, tile: TileWork) -> Iterator[np.ndarray]:
        """Yield, for each stage, a quick estimate of the peak of layers a..b-1 in entry [a, b]."""
        ranges, share = self.ranges, max(tile.shares)
        lasting = ranges.lasting(policy.optimizer_copies)
        for stage in range(stages):
            held = largest_holdings(stage, stages, policy)
            activations = ranges.load(held, splits(policy.schedule))
            yield lasting + self._machine.spread * share * activations


def held_at_once(stages: int, policy: Policy) -> list[int]:
    """Return the micro-batches of which each stage holds all activations at once, at most."""
    m = policy.micro_batches
    if policy.recompute == "always":
        return [1] * stages
    if policy.schedule == "gpipe":
        return [m] * stages
    return [min(m, stages - stage) for stage in range(stages)]
