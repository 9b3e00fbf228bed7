"""Predict the memory of a rank that runs one pipeline stage, by purpose.

The tensors of a micro-batch follow from a walk over the stage's layers
(:mod:`distseg.planning.live_tensors`), and the micro-batches in flight from the schedule
(:mod:`distseg.planning.held`). This is the one memory model of steps that do not stream tiles:
``distseg plan``, ``distseg plan --stages`` and ``distseg report`` use it.
benchmarks/layout_memory.py compares it with measured memory.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from distseg.planning.held import Policy, largest_holdings
from distseg.planning.live_tensors import (
    NetworkTensors,
    StageTensors,
    TileSizes,
    TileTensors,
    stage_tensors,
)
from distseg.runtime.partition import edges_between
from distseg.runtime.schedule import splits

# Factor for tensors of a few cells that the walk does not count, such as indices and sums.
SMALL = 1.01


class StageMemory(NamedTuple):
    """Bytes of a rank's tensors at the peak of a step.

    Attributes:
        weights: bytes of the parameters.
        gradients: bytes of the parameters' gradients.
        optimizer: bytes of the optimizer's state.
        images: bytes of the pixels and labels of all micro-batches of a step.
        activations: bytes of all other tensors: activations, their gradients, buffers of messages,
            and tables of norms and of the loss.
    """

    weights: float
    gradients: float
    optimizer: float
    images: float
    activations: float

    @property
    def lasting(self) -> float:
        """Bytes that the rank holds all the time: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def changing(self) -> float:
        """Bytes of the tensors that live only for a part of a step."""
        return self.images + self.activations

    @property
    def total(self) -> float:
        """Bytes for all purposes together."""
        return sum(self)


class TileMemory:
    """Memory model of the ranks of one tile: they hold the stages of a pipeline.

    Args:
        network: the tensors of the network.
        tile: the sizes of feature maps on the tile.
        step_images: the number of images of a step, over all sample groups.
    """

    def __init__(self, network: NetworkTensors, tile: TileSizes, step_images: int):
        self.network, self.tile, self.step_images = network, tile, step_images
        self._on_tile = TileTensors(network, tile)
        self._tensors = cache(self._find_tensors)

    def of_stage(self, layers: range, stage: int, stages: int, policy: Policy) -> StageMemory:
        """Return the memory of the rank that runs a stage.

        Args:
            layers: the layers of the stage.
            stage: the index of the stage.
            stages: the number of stages.
            policy: the schedule, recomputation and optimizer.
        """
        network, tile = self.network, self.tile
        apart = stages > 1 and splits(policy.schedule)
        found = self._tensors(layers, apart, policy.recompute != "never")
        held = largest_holdings(stage, stages, policy)
        load = max(float(found.load(one)) for one in held) + tile.buffers
        pixels, labels = network.pixels
        images = 0.0
        if layers.start == 0:
            images += policy.micro_batches * pixels * tile.maps[0]
        if layers.stop == len(network.layers):
            images += policy.micro_batches * labels * tile.owned
            load += network.loss.row * self.step_images
        own = network.layers[layers.start : layers.stop]
        load += sum(layer.buffers + policy.micro_batches * layer.noted for layer in own)
        weights = float(network.weight_bytes * sum(layer.parameters for layer in own))
        load *= SMALL
        return StageMemory(weights, weights, policy.optimizer_copies * weights, images, load)

    def _find_tensors(self, layers: range, apart: bool, repeats: bool) -> StageTensors:
        incoming, outgoing = maps_of_stage(self.network.reads, layers)
        return stage_tensors(self._on_tile, layers, incoming, outgoing, apart, repeats)


def memory_of_image(network: NetworkTensors) -> StageMemory:
    """Return the memory of a single rank whose step is one micro-batch of whole images."""
    layers = range(len(network.layers))
    memory = TileMemory(network, TileSizes.whole(len(layers)), network.images)
    return memory.of_stage(layers, 0, 1, Policy())


@lru_cache(1 << 12)
def maps_of_stage(
    reads: tuple[tuple[int, ...], ...], layers: range
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the numbers of the feature maps that a stage receives, and of those that it sends.

    These maps do not depend on how the other layers are cut into stages.

    Args:
        reads: for each layer, the numbers of the feature maps that it reads.
        layers: the layers of the stage.
    """
    parts = [range(layers.start), layers, range(layers.stop, len(reads))]
    parts = [part for part in parts if part]
    own, edges = parts.index(layers), edges_between(parts, reads)
    return (
        frozenset(edge.map for edge in edges if edge.target == own),
        frozenset(edge.map for edge in edges if edge.source == own),
    )
