"""Report how a model is cut into stages, what each stage takes, and how other splits compare.

This is the content of ``distseg plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from distseg.config.settings import LossConfig, ModelConfig, output_weights
from distseg.config.sizes import Size
from distseg.layers.loss import Loss
from distseg.models.bands import channels_of
from distseg.models.network import flat_layers
from distseg.models.zoo import ZOO, build_model, outline_model
from distseg.planning.balance import (
    StageBytes,
    even_split,
    fastest_split,
    starts_of,
    torchgpipe_split,
)
from distseg.planning.cost import Costs, measured, modelled
from distseg.planning.held import Policy
from distseg.planning.live_tensors import NetworkTensors, TileSizes, tensors_of
from distseg.planning.roofline import DEVICES
from distseg.planning.stage_memory import TileMemory
from distseg.planning.stages import stage_seconds
from distseg.report.tables import table

OURS = "ours"


@dataclass(frozen=True)
class Stage:
    """One stage of a split.

    Attributes:
        layers: the number of layers.
        first, last: the names of the first and of the last layer.
        parameters: the number of parameters.
        seconds: the time of one micro-batch, forward and backward.
        memory: bytes of the tensors that it holds at the peak of a step.
    """

    layers: int
    first: str
    last: str
    parameters: int
    seconds: float
    memory: float


def plan(
    model: str,
    costs: Costs,
    tensors: NetworkTensors,
    stages: int,
    policy: Policy,
    limit: float | None = None,
    judged_by: Costs | None = None,
) -> dict:
    """Return a comparison of distseg's split into stages with other splits, as values for JSON.

    Args:
        model: the name of the model. If Seal et al. 2020 give a split of this model into ``stages``
            stages, their split is compared too.
        costs: the costs by which distseg's split is chosen.
        tensors: the tensors of a micro-batch, from which the memory of stages follows.
        stages: the number of stages.
        policy: the schedule and recomputation.
        limit: bytes that a stage may take; None for no limit. distseg's split stays within this
            limit. The report says of each other split whether it fits the limit.
        judged_by: costs by which all splits are compared; ``costs`` by default. Give the costs of a
            second measurement here, because ``costs`` favour the split that was chosen by them.

    Raises:
        ValueError: there are more stages than layers, or no split fits.
    """
    whole = TileSizes.whole(len(tensors.layers))
    memory = TileMemory(tensors, whole, policy.micro_batches * tensors.images)

    def bytes_of(stage: int, a: int, b: int) -> float:
        return memory.of_stage(range(a, b), stage, stages, policy).total

    seconds = stage_seconds(costs, policy, stages)
    splits = {
        OURS: fastest_split(seconds, stages, bytes_of, limit),
        **others(model, costs, stages, policy),
    }
    judged_by = judged_by or costs
    seconds = stage_seconds(judged_by, policy, stages)
    found = {name: _stages(balance, costs, bytes_of, seconds) for name, balance in splits.items()}
    best = max(stage.seconds for stage in found[OURS])
    return {
        "model": model,
        "costs": judged_by.source,
        "policy": vars(policy),
        "memory_limit": limit,
        "splits": {
            name: {
                "balance": splits[name],
                **verdict(rows, best, limit),
                "stages": [vars(r) for r in rows],
            }
            for name, rows in found.items()
        },
    }


def others(model: str, costs: Costs, stages: int, policy: Policy) -> dict[str, list[int]]:
    """Return splits into stages by other methods: ``even``, ``torchgpipe`` and ``paper``.

    A split is the number of layers of each stage. ``paper`` is the split of Seal et al. 2020. A
    split is left out if one of its stages is empty, ``torchgpipe`` if that is not installed, and
    ``paper`` if Seal et al. 2020 give no split of the model into this number of stages.

    Args:
        model: the name of the model.
        costs: the costs of the layers, from which torchgpipe finds its split.
        stages: the number of stages.
        policy: the schedule and recomputation, on which a layer's seconds depend.
    """
    # These balances know one cost per layer, whatever its stage, so forward passes are averaged.
    passes = sum(policy.forward_passes(stage, stages) for stage in range(stages)) / stages
    seconds = [passes * f + b for f, b in zip(costs.forward, costs.backward)]
    splits = {"even": even_split(len(seconds), stages)}
    with suppress(ImportError):  # torchgpipe is optional
        splits["torchgpipe"] = torchgpipe_split(seconds, stages)
    papers = ZOO[model].balance if model in ZOO else None
    if papers is not None and len(papers) == stages and sum(papers) == len(seconds):
        splits["paper"] = list(papers)
    # torchgpipe's heuristic may leave a stage without layers.
    return {name: balance for name, balance in splits.items() if min(balance) > 0}


def _stages(
    balance: Sequence[int], costs: Costs, bytes_of: StageBytes, seconds: np.ndarray
) -> list[Stage]:
    """Return the layers, parameters, seconds and memory of each stage of a split.

    Args:
        balance: number of layers of each stage.
        costs: costs of the layers.
        bytes_of: the bytes that a stage takes.
        seconds: the seconds of all possible stages (:func:`distseg.planning.stages.stage_seconds`).
    """
    rows = []
    for stage, (start, count) in enumerate(zip(starts_of(balance), balance)):
        stop = start + count
        layers = costs.layers[start:stop]
        rows.append(
            Stage(
                count,
                layers[0].name,
                layers[-1].name,
                sum(layer.parameters for layer in layers),
                float(seconds[stage, start, stop]),
                bytes_of(stage, start, stop),
            )
        )
    return rows


def verdict(stages: Sequence[Stage], best: float, limit: float | None = None) -> dict:
    """Return the figures by which a split of a model into stages is compared with distseg's split.

    Args:
        stages: the stages of the split.
        best: seconds of the slowest stage of distseg's split.
        limit: bytes that a stage may take; None for no limit.

    Returns:
        ``slowest``, seconds of the slowest stage; ``ratio``, ``best`` divided by ``slowest``;
        ``efficiency``, the mean seconds of a stage divided by ``slowest``; ``fullest``, bytes of
        the stage with the most memory; ``fits``, True if ``fullest`` is within ``limit``.
    """
    slowest, fullest = max(stage.seconds for stage in stages), max(stage.memory for stage in stages)
    efficiency = sum(stage.seconds for stage in stages) / (len(stages) * slowest)
    return {
        "slowest": slowest,
        "ratio": best / slowest,
        "efficiency": efficiency,
        "fullest": fullest,
        "fits": limit is None or fullest <= limit,
    }


def summary(report: dict) -> str:
    """Return the result of :func:`plan` as text: a table per split, then a table of all splits."""
    policy, limit = report["policy"], report["memory_limit"]
    settings = (
        f"{policy['micro_batches']} micro-batches, {policy['schedule']}, "
        f"recompute {policy['recompute']}"
    )
    blocks = [
        f"{report['model']}: costs {report['costs']}; {settings}"
        + ("" if limit is None else f"; at most {limit / 2**30:.4g} GiB a stage")
    ]
    for name, split in report["splits"].items():
        rows = [_row(i, stage) for i, stage in enumerate(split["stages"])]
        blocks.append(f"{name}: {' '.join(map(str, split['balance']))}\n{table(rows)}")
    return "\n\n".join(
        [*blocks, table([_line(name, split, limit) for name, split in report["splits"].items()])]
    )


def _row(number: int, stage: dict) -> dict:
    """Return the row of a stage in the table of a split of the network into stages."""
    return {
        "stage": number,
        "layers": stage["layers"],
        "from": stage["first"],
        "to": stage["last"],
        "parameters": stage["parameters"],
        "time [ms]": stage["seconds"] * 1e3,
        "memory [GiB]": stage["memory"] / 2**30,
    }


def _line(name: str, split: dict, limit: float | None) -> dict:
    """Return the row of a split in the table of all splits."""
    row = {
        "split": name,
        "slowest [ms]": split["slowest"] * 1e3,
        "ours / this": split["ratio"],
        "efficiency": split["efficiency"],
    }
    row["fullest [GiB]"] = split["fullest"] / 2**30
    return row if limit is None else {**row, "fits": split["fits"]}


def costs_of(
    model: str, window: Sequence[int], batch: int, kind: str = "modelled", device: str | None = None
) -> Costs:
    """Return a model's costs, modelled for a device or measured on this machine.

    Args:
        model: the name of the model.
        window: the size of a window in pixels.
        batch: images of a micro-batch.
        kind: ``modelled``, or ``measured`` on the GPU if there is one, else on the CPU.
        device: the name of the device to model; V100 by default.

    Raises:
        ValueError: the model or device is unknown, a device is named for measured costs, or the
            model cannot process a window of this size.
    """
    if device is not None and device not in DEVICES:
        raise ValueError(f"unknown --device {device!r}: choose {', '.join(DEVICES)}")
    # outline_model puts models of the zoo on the meta device by itself, but not a user's function.
    with torch.device("meta"):
        network = outline_model(ModelConfig(model))
    _check_window(network, window)
    if kind == "measured":
        if device is not None:
            raise ValueError(
                f"--costs measured runs on the device of this machine, but --device is {device}: "
                "leave it out, or choose --costs modelled"
            )
        network = build_model(ModelConfig(model)).to("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return (
            measured(network, window, batch)
            if kind == "measured"
            else modelled(network, window, batch, DEVICES[device or "v100"]())
        )
    except (RuntimeError, ValueError) as e:
        why = " ".join(str(e).splitlines()[:1])
        raise ValueError(
            f"model {model} cannot be planned on {batch} windows of {Size(window)} pixels "
            f"(--tile, --batch): {why}"
        ) from e


def tensors_of_stages(model: str, window: Sequence[int], batch: int) -> NetworkTensors:
    """Return the tensors of a model that is trained in fp32 with a cross-entropy loss.

    Args:
        model: the name of the model, which :func:`costs_of` accepts.
        window: the size of a window in pixels.
        batch: images of a micro-batch.
    """
    with torch.device("meta"):
        network = outline_model(ModelConfig(model))
    classes = channels_of(network)[1]
    name = "cross_entropy" if classes > 1 else "binary_cross_entropy"
    loss = Loss(LossConfig(name), classes, output_weights(ModelConfig(model)))
    return tensors_of(network, window, batch, "fp32", False, loss)


def check_stages(model: str, stages: int) -> None:
    """Refuse a number of stages above the number of layers, before costs are computed.

    Raises:
        ValueError: there are more stages than layers, or the model is unknown or not a list of
            layer calls.
    """
    layers = len(flat_layers(outline_model(ModelConfig(model))))
    if not 1 <= stages <= layers:
        raise ValueError(
            f"model {model} of {layers} layers cannot be cut into {stages} stages (--stages): "
            f"choose 1 to {layers}"
        )


def _check_window(model: nn.Module, window: Sequence[int]) -> None:
    """Refuse a window with other dims than the model's images, or with too many pixels."""
    dims = next((p.dim() - 2 for p in model.parameters() if p.dim() > 2), len(window))
    if len(window) != dims:
        raise ValueError(
            f"--tile is {Size(window)}, of {len(window)} dims, but the model's images have "
            f"{dims}: give one number for each dim of an image"
        )
    if Size(window).volume > _MOST_PIXELS:
        raise ValueError(
            f"--tile is {Size(window)}, more than {_MOST_PIXELS} pixels: give the size of "
            "the window that a stage computes at once"
        )


_MOST_PIXELS = 2**40


def window_of(tile: Sequence[int]) -> Size:
    """Return the size of a window from the numbers of ``--tile``; one number means a square."""
    return Size((*tile, *tile) if len(tile) == 1 else tile)
