"""Predict the memory of the processes of a layout.

:mod:`distseg.planning.stage_memory` predicts the tensors of a rank. A process takes more: what
every process of the machine takes, and gaps between tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache, reduce

import numpy as np

from distseg.planning.balance import sums
from distseg.planning.held import Held, Policy, largest_holdings
from distseg.planning.live_tensors import StageTensors, TileSizes
from distseg.planning.machine import Machine
from distseg.planning.stage_memory import SMALL, TileMemory
from distseg.planning.tile_grids import TileGrids
from distseg.runtime.partition import Partition

_MESHES = 64  # number of tiles whose lower bounds are kept
_LOADS = 256  # number of tables of lower bounds that are kept
# A bound is made smaller by this factor, so that rounding does not make it larger than the peak.
_ROUNDED = 1 - 1e-9


class RankMemory:
    """Memory model of the processes that train a network on a machine.

    Args:
        grids: the grids of tiles of the training step.
        machine: the machine.
    """

    def __init__(self, grids: TileGrids, machine: Machine):
        self._grids, self._work, self._machine = grids, grids.work, machine
        self._on_tile = lru_cache(None)(self._find_on_tile)
        self._least_on = lru_cache(_MESHES)(self._find_least_on)
        self._least_load = lru_cache(_LOADS)(self._find_least_load)
        self._least_of_layer = lru_cache(None)(self._find_least_of_layer)

    def on(self, machine: Machine) -> RankMemory:
        """Return the memory model for another machine; it shares cached results with this one."""
        other = RankMemory(self._grids, machine)
        other._on_tile = self._on_tile
        return other

    def least(self, stages: int, policy: Policy, tile: TileSizes, share: float = 1.0) -> float:
        """Return a lower bound of the bytes of the rank with the highest peak, for any split.

        Let stage s hold L_s bytes of weights, gradients and optimizer state, and all activations of
        h_s micro-batches at once. If no stage takes more than M bytes, stage s has at most
        (M - L_s) / h_s bytes of activations for a micro-batch. Let A and L be the sums over all
        stages of these bytes and of L_s. Then M is at least
        (A + L / max h_s) / (1/h_0 + ... + 1/h_{S-1}). Another bound is the memory of the largest
        single layer in its backward pass.

        Args:
            stages: the number of stages.
            policy: the schedule and recomputation.
            tile: the sizes of feature maps on a tile.
            share: a factor by which the sizes are multiplied.
        """
        held = held_at_once(stages, policy)
        every, one = self._least_of_layer(tile, share)
        whole = (every + self._lasting[0, -1] / max(held)) / sum(1 / count for count in held)
        return self._machine.base + _ROUNDED * max(whole, one)

    def _find_least_of_layer(self, tile: TileSizes, share: float) -> tuple[float, float]:
        """Return lower bounds of the bytes of all activations, and of the largest single layer.

        Args:
            tile: the sizes of feature maps on a tile.
            share: a factor by which the sizes are multiplied.
        """
        bounds, factor = self._least_on(tile), SMALL * self._machine.spread * share
        alone = np.diagonal(bounds.full + bounds.working, 1)
        one = (self._lasting.diagonal(1) + factor * alone).max()
        return float(factor * bounds.full[0, -1]), float(one)

    def least_of_stages(self, stages: int, policy: Policy, tile: TileSizes) -> Iterator[np.ndarray]:
        """Yield for each stage lower bounds of its bytes, for all ranges of layers it may have.

        A bound is an array (n + 1, n + 1) for n layers. Entry [a, b] has the bytes of the stage
        with layers a..b-1.

        Args:
            stages: the number of stages.
            policy: the schedule and recomputation.
            tile: the sizes of feature maps on a tile.
        """
        network, m = self._grids.tensors, policy.micro_batches
        pixels, labels = network.pixels
        fixed = SMALL * (self._buffers + m * self._noted + tile.buffers)
        fixed[0] += m * pixels * tile.maps[0]
        fixed[:, -1] += m * labels * tile.owned + SMALL * network.loss.row * self._work.batch
        fixed = self._machine.base + _ROUNDED * (self._lasting + self._machine.spread * fixed)
        factor = _ROUNDED * SMALL * self._machine.spread
        for stage in range(stages):
            held = largest_holdings(stage, stages, policy)
            # The bounds of these tensors are 0, and more stages then hold the same.
            alike = frozenset(h._replace(put_off=0, passing=False, copied=0) for h in held)
            yield fixed + factor * self._least_load(tile, alike)

    def _find_least_load(self, tile: TileSizes, held: frozenset[Held]) -> np.ndarray:
        """Return lower bounds of the bytes of tensors that all possible stages hold at once.

        Args:
            tile: the sizes of feature maps on a tile.
            held: the numbers of micro-batches that a stage holds at different moments.
        """
        bounds = self._least_on(tile)
        return reduce(np.maximum, (bounds.load(one) for one in held))

    @cached_property
    def _lasting(self) -> np.ndarray:
        """Bytes of weights, gradients and optimizer state: entry [a, b] is for layers a..b-1."""
        network = self._grids.tensors
        weights = sums([layer.parameters for layer in network.layers])
        return (2 + self._work.copies) * network.weight_bytes * weights

    @cached_property
    def _buffers(self) -> np.ndarray:
        """Bytes of the layers' buffers: entry [a, b] is for layers a..b-1."""
        return sums([layer.buffers for layer in self._grids.tensors.layers])

    @cached_property
    def _noted(self) -> np.ndarray:
        """Bytes of batch statistics that norms keep per micro-batch, in [a, b] of layers a..b-1."""
        return sums([layer.noted for layer in self._grids.tensors.layers])

    def _find_least_on(self, tile: TileSizes) -> StageTensors:
        return self._grids.tensors.least_of_stages(tile)

    def peak(self, partition: Partition, policy: Policy, tile: TileSizes) -> float:
        """Return the bytes of the rank with the highest peak, for a given split into stages.

        Args:
            partition: the stages.
            policy: the schedule and recomputation.
            tile: the sizes of feature maps on the tile.
        """
        return max(
            self.of_stage(layers, stage, partition.stages, policy, tile)
            for stage, layers in enumerate(partition.ranges)
        )

    def of_stage(
        self, layers: range, stage: int, stages: int, policy: Policy, tile: TileSizes
    ) -> float:
        """Return the bytes of the process that runs a stage.

        Args:
            layers: the layers of the stage.
            stage: the index of the stage.
            stages: the number of stages.
            policy: the schedule and recomputation.
            tile: the sizes of feature maps on the tile.
        """
        tensors = self._on_tile(tile).of_stage(layers, stage, stages, policy)
        return self._machine.base + tensors.lasting + self._machine.spread * tensors.changing

    def _find_on_tile(self, tile: TileSizes) -> TileMemory:
        return TileMemory(self._grids.tensors, tile, self._work.batch)


def held_at_once(stages: int, policy: Policy) -> list[int]:
    """Return for each stage the most micro-batches whose activations it holds at the same time.

    A micro-batch of which the stage holds only the inputs, for recomputation, does not count.
    """
    m = policy.micro_batches
    if policy.recompute == "always":
        return [1] * stages
    if policy.schedule == "gpipe":
        return [m] * stages
    return [min(m, stages - stage) for stage in range(stages)]
