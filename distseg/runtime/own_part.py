"""Builds the part of a model that a rank of the pipeline holds.

The whole model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from distseg.comm.memory_format import channels_last as last_format
from distseg.layers.context import Context
from distseg.models.capture.checks import check_real
from distseg.models.weights import materialise
from distseg.runtime.exchange import Exchange
from distseg.runtime.partition import Partition
from distseg.runtime.swap_layers import TiledModel, parallelize
from distseg.tiling.tile import ReceptiveField

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of precisions in which a network runs under autocast, with parameters in float32."""


def own_part(
    model: nn.Module,
    partition: Partition | None,
    rank: int,
    reach: ReceptiveField,
    context: Context,
    seed: int,
    frozen_norm: bool = False,
    exchange: Exchange | None = None,
    whole: bool = False,
) -> TiledModel:
    """Return the layers of ``model`` that ``rank`` runs, ready to run on tiles.

    Each layer that reads beyond a tile, or needs all of an image, is replaced by its distributed
    counterpart, a layer that computes its part on a tile. The rank's layers on the meta device get
    memory and initial weights. ``model`` is changed in place.

    Args:
        model: the whole model.
        partition: the stages; None for a model that is not cut into stages.
        rank: the rank in the pipeline.
        reach: the receptive field of the model.
        context: the state that the distributed counterparts share, such as communicators and seed.
        seed: the seed for the weights of layers on the meta device.
        frozen_norm: True to freeze batch norms.
        exchange: the halo exchange; None if each tile is read together with its halo.
        whole: True if all windows are whole images. Layers may then read the whole image.

    Raises:
        ValueError: if the layers cannot be computed from windows or cut into stages.
    """
    mine = partition.layers_of(rank) if partition else None
    materialise(model, seed, mine)
    tiled = parallelize(model, reach, context, exchange, whole).train()
    if frozen_norm:
        tiled.freeze_norms()
    if partition:
        if not tiled.flat:
            raise ValueError(
                "a norm of this model lies inside another layer, so the model cannot be cut into "
                "pipeline stages: write the model as a list of layer calls (an nn.Sequential or a "
                "distseg.Network) in which the norm is a layer of its own, or set mesh.stages to 1"
            )
        tiled.begin_at(partition.ranges)
        tiled.keep(mine)
    return tiled


def place_model(model: nn.Module, device, precision: str, channels_last: bool) -> None:
    """Move a model to its device, dtype and memory format.

    Args:
        model: the model, changed in place.
        device: the device.
        precision: fp64, fp32, bf16 or fp16. The weights are fp32 for bf16 and fp16 too, which run
            under autocast.
        channels_last: True for the memory format channels_last.
    """
    check_real(model)
    model.to(device, torch.float64 if precision == "fp64" else torch.float32)
    if channels_last:
        volumes = any(p.dim() == 5 for p in model.parameters())
        model.to(memory_format=last_format(5 if volumes else 4))


def place_stages(
    model: TiledModel,
    partition: Partition | None,
    devices: Sequence[torch.device],
    precision: str,
    channels_last: bool,
) -> None:
    """Move each stage of a rank to its device, dtype and memory format.

    Args:
        model: the layers of the rank, changed in place.
        partition: the stages; None for a model that is not cut into stages.
        devices: the device of each stage, or one device for the whole model.
        precision: fp64, fp32, bf16 or fp16 (:func:`place_model`).
        channels_last: True for the memory format channels_last.
    """
    if len(devices) == 1:
        return place_model(model, devices[0], precision, channels_last)
    place_model(model, devices[0], precision, channels_last)  # Parameters outside layers too.
    for layers, device in zip(partition.ranges, devices):
        for layer in layers:
            place_model(model.layers[layer], device, precision, channels_last)


def autocast(precision: str, device) -> Callable[[], AbstractContextManager]:
    """Return a function that makes the context manager under which the network runs.

    The context manager is autocast if ``precision`` is bf16 or fp16. Otherwise it does nothing.
    """
    if precision not in AUTOCAST:
        return nullcontext
    return lambda: torch.autocast(device.type, AUTOCAST[precision])


def used_reach(exact: ReceptiveField, halo: int | None) -> ReceptiveField:
    """Return the receptive field by whose halo tiles are extended to windows.

    Args:
        exact: the exact halo and stride of the model.
        halo: the value of ``approximate.halo``, which replaces the exact halo; None to keep it.
    """
    if halo is None:
        return exact
    return ReceptiveField(tuple(halo for _ in exact.halo), exact.stride)
