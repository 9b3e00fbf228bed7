"""From a whole model, perhaps only outlined, to the part of it that a rank of the pipeline holds."""

from __future__ import annotations

from torch import nn

from distseg.geometry.tile import Reach
from distseg.models.weights import materialise
from distseg.pipeline.partition import Partition
from distseg.spatial.context import Context
from distseg.spatial.exchange import Exchange
from distseg.spatial.parallelize import TiledModel, parallelize


def own_part(
    model: nn.Module, partition: Partition | None, rank: int, reach: Reach, context: Context, seed: int, frozen_norm: bool = False,
    exchange: Exchange | None = None,
) -> TiledModel:  # fmt: skip
    """The layers of the stages that ``rank`` runs, with memory and initial weights, ready for windows; ``model`` is changed in place.

    Args:
        partition: None for a model in one piece.
        seed: of the weights of layers that are only outlined.
        exchange: for tiles that exchange borders.

    Raises:
        ValueError: layers that windows or stages can't be made of.
    """
    mine = partition.layers_of(rank) if partition else None
    materialise(model, seed, mine)
    tiled = parallelize(model, reach, context, exchange).train()
    if frozen_norm:
        tiled.freeze_norms()
    if partition:
        if not tiled.flat:
            raise ValueError("a norm hides inside a layer of this model, so it can't be cut into pipeline stages: flatten it, or set mesh.stages to 1")
        tiled.begin_at(layers.start for layers in partition.ranges)
        tiled.keep(mine)
    return tiled
