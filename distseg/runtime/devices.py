"""Runs several stages in one process, each on its own device, with torchgpipe.

torchgpipe provides the schedule, the portals for skips and the checkpointing (Kim et al. 2020,
arXiv 2004.09910). Pipelines over ranks have a process per stage; here one process runs all stages.
The micro-batches of a step enter as one batch, which torchgpipe splits again::

    devices[0]   0 1 2 3                3' 2' 1' 0'        a thread a device in the forward pass,
    devices[1]     0 1 2 3          3' 2' 1' 0'            autograd's thread in the backward pass
    devices[2]       0 1 2 3 | 3' 2' 1' 0'                 | the loss of the step

PyTorch treats all devices of the type ``cpu`` as one device with one thread. On a CPU the result is
right, but the step is no faster than with one stage.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from distseg.config.settings import PipelineConfig
from distseg.models.layers import CutTo, Spread
from distseg.models.lines import OfLines
from distseg.runtime.partition import Edge, Partition
from distseg.runtime.stage import LOSS, Stage
from distseg.tiling.tile_batch import MicroBatch


def devices_of(
    pipeline: PipelineConfig, device: torch.device, gpus: int | None = None
) -> list[torch.device]:
    """Return the devices of this rank: one per stage with ``placement: devices``, otherwise one.

    Args:
        pipeline: the settings of the pipeline.
        device: the device that the launcher gave this rank.
        gpus: the number of GPUs that this process sees; by default PyTorch's count.

    Raises:
        ValueError: if a device does not exist, or its type differs from the type of ``device``.
    """
    if pipeline.placement != "devices":
        return [_numbered(device)]
    gpus = torch.cuda.device_count() if gpus is None else gpus
    found = (
        _named(pipeline.devices)
        if pipeline.devices
        else _share(device, len(pipeline.balance), gpus)
    )
    for d in found:
        if d.type != device.type:
            raise ValueError(
                f"pipeline.devices names {d}, but this rank computes on {device.type}: set "
                f"run.device to {d.type}, or name {device.type} devices"
            )
        if d.type == "cuda" and (d.index or 0) >= gpus:
            raise ValueError(
                f"pipeline.devices names {d}, but this process sees {gpus} GPUs: name cuda:0 to "
                f"cuda:{gpus - 1}, or give the rank more GPUs"
            )
    return found


def _numbered(device: torch.device) -> torch.device:
    """Return ``device`` with an index; without an index, a GPU becomes PyTorch's current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _named(names: Sequence[str]) -> list[torch.device]:
    """Return the devices with these names; refuse names other than cpu, cuda and cuda:N."""
    found = []
    for name in names:
        try:
            found.append(torch.device(name))
        except RuntimeError:
            found.append(None)
        if found[-1] is None or found[-1].type not in ("cpu", "cuda"):
            raise ValueError(
                f"pipeline.devices names {name!r}, which is not a device: write cpu, cuda:0, "
                f"cuda:1 "
                "and so on"
            )
    return found


def _share(device: torch.device, stages: int, gpus: int) -> list[torch.device]:
    """Return one device per stage: the GPUs from ``device.index * stages`` on, or only the CPU.

    Args:
        device: the device that the launcher gave this rank.
        stages: the number of stages of this rank.
        gpus: the number of GPUs that this process sees.
    """
    if device.type == "cpu":
        return [device] * stages
    first = (device.index or 0) * stages
    if first + stages > gpus:
        raise ValueError(
            f"this rank's {stages} stages would be on cuda:{first} to cuda:{first + stages - 1}, "
            f"but this process sees {gpus} GPUs: start fewer "
            "ranks a node, give each rank GPUs of its own (CUDA_VISIBLE_DEVICES) and name them in "
            "pipeline.devices, or give pipeline.balance fewer stages"
        )
    return [torch.device("cuda", first + stage) for stage in range(stages)]


def check_there(pipeline: PipelineConfig) -> None:
    """Refuse the setting ``placement: devices`` if torchgpipe is not installed.

    Raises:
        ValueError: if torchgpipe is missing. The message says how to install it.
    """
    if pipeline.placement == "devices" and importlib.util.find_spec("torchgpipe") is None:
        raise ValueError(
            "pipeline.placement devices needs torchgpipe: pip install --no-deps "
            "torchgpipe==0.0.7, or set pipeline.placement to linear"
        )


def stages_of(pipeline: PipelineConfig) -> int:
    """Return the number of stages that ``placement: devices`` puts on one rank.

    It is the number of entries of the setting ``pipeline.devices``. If that is not set, it is the
    number of entries of ``pipeline.balance``.
    """
    return len(pipeline.devices or pipeline.balance)


class DevicePipeline:
    """Pipeline in one process: all stages of a model, each on one of this rank's devices.

    Args:
        partition: the stages of the model.
        stages: the stages in order. Their layers must be on their devices already, and the last
            stage must have a head, which computes the loss.
        devices: the device of each stage.
        recompute: the micro-batches that torchgpipe checkpoints: never, except_last or always.
    """

    def __init__(
        self,
        partition: Partition,
        stages: Sequence[Stage],
        devices: Sequence[torch.device],
        recompute: str = "never",
    ):
        self.partition, self.stages = partition, list(stages)
        self.devices, self.recompute = list(devices), recompute
        self.head = stages[-1].head
        self._layers = [as_layer(stage, self._current) for stage in stages]
        self._gpipes: dict[int, nn.Module] = {}  # Keyed by the number of micro-batches.
        self._units: Sequence[MicroBatch] = ()
        self._numbers: dict[object, int] = {}

    def run(self, units: Sequence[MicroBatch]) -> None:
        """Run the forward and backward passes of a step, and add to the parameters' gradients.

        Args:
            units: the micro-batches of the step.

        Raises:
            ValueError: if a micro-batch has several tiles, or micro-batches have different sizes.
        """
        _check_alike(units)
        self._units = units
        try:
            table = self._gpipe(len(units))(
                torch.cat([unit.pieces[0].pixels for unit in units])
            )  # (micro-batches * B, K)
            rows = table.chunk(len(units))
            for unit, found in zip(units, rows):
                self.head.note(unit, [found])
            if table.requires_grad:
                table.backward(
                    torch.cat(
                        [self.head.loss_grads(unit, [found])[0] for unit, found in zip(units, rows)]
                    )
                )
        finally:
            self._units = ()
            self._numbers.clear()

    def _gpipe(self, micro_batches: int) -> nn.Module:
        """Return torchgpipe's pipeline for steps with ``micro_batches`` micro-batches."""
        from torchgpipe import GPipe

        if micro_batches not in self._gpipes:
            balance = [1] * len(self._layers)
            self._gpipes[micro_batches] = GPipe(
                nn.Sequential(*self._layers),
                balance,
                devices=self.devices,
                chunks=micro_batches,
                checkpoint=self.recompute,
            )
        return self._gpipes[micro_batches]

    def _current(self) -> MicroBatch:
        """Return the micro-batch that this thread computes.

        torchgpipe calls a layer without the index of the micro-batch. The index cannot be passed
        as a tensor, because checkpointing needs a gradient of every tensor. But torchgpipe keeps
        one tracker of skips for each micro-batch, in all stages and in recomputation. The first
        stage computes micro-batches in order, so the n-th tracker that is seen belongs to
        micro-batch n.
        """
        from torchgpipe.skip.tracker import current_skip_tracker

        return self._units[self._numbers.setdefault(current_skip_tracker(), len(self._numbers))]


def as_layer(stage: Stage, current: Callable[[], MicroBatch]) -> nn.Module:
    """Return a stage as a layer for torchgpipe; the parameters remain those of the model.

    The parameters stay on their device. The layer takes and returns feature maps (B, C, *size).
    The last stage returns the loss's partial sums (B, K). Skips travel through torchgpipe's
    ``stash`` and ``pop``.

    Args:
        stage: the stage.
        current: returns the micro-batch that the calling thread computes.
    """
    from torchgpipe import is_recomputing
    from torchgpipe.skip import pop, skippable, stash

    before, behind = _handed_on(stage.incoming), _handed_on(stage.outgoing)
    # The key of a skip is the text of the whole edge. Several edges may have one name, and
    # torchgpipe refuses a key again after its pop.
    incoming, outgoing = (
        {str(e): e.map for e in edges if e not in (before, behind)}
        for edges in (stage.incoming, stage.outgoing)
    )
    result = LOSS if stage.head else behind.map
    sizes_only = any(
        isinstance(stage.model.layers[number], (CutTo, Spread, OfLines))
        for number in stage.layers or ()
    )

    @skippable(stash=list(outgoing), pop=list(incoming))
    class Layer(nn.Module):
        def forward(self, x):
            inputs = {before.map if before else 0: [x]}
            for edge, source in incoming.items():
                inputs[source] = [(yield pop(edge))]
            with stage.model.context.repeating(is_recomputing()):
                outputs = stage.run(current(), inputs)
            for edge, source in outgoing.items():
                yield stash(edge, outputs[source][0])
            made = outputs[result][0]
            return (
                _Beside.apply(made, *(inputs[source][0] for source in incoming.values()))
                if sizes_only
                else made
            )

    return Layer()


class _Beside(torch.autograd.Function):
    """Autograd function that returns its first tensor and gives the others a gradient of zeros.

    torchgpipe needs a gradient for every tensor that travels between stages. But autograd computes
    none for a tensor if a stage reads only its size.
    """

    @staticmethod
    def forward(ctx, made: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return made[:]

    @staticmethod
    def backward(ctx, g):
        return g, *map(torch.zeros_like, ctx.saved_tensors)


def _handed_on(edges: Sequence[Edge]) -> Edge | None:
    """Return the edge that joins a stage with the next stage or the stage before it.

    torchgpipe passes the feature map of this edge as the stage's input or output. All other edges
    are skips for torchgpipe. Return None if ``edges`` is empty, as at both ends of the network.

    Args:
        edges: the incoming edges of a stage, or its outgoing edges.

    Raises:
        ValueError: if edges exist, but none of them joins neighbouring stages.
    """
    found = next((edge for edge in edges if edge.target == edge.source + 1), None)
    if edges and found is None:
        raise ValueError(
            "with pipeline.placement devices each stage must send a feature map to the next stage, "
            f"but {edges[0]} skips the stages between: change pipeline.balance, or set "
            "pipeline.placement to linear"
        )
    return found


def _check_alike(units: Sequence[MicroBatch]) -> None:
    """Refuse micro-batches of several tiles, or with different sizes or numbers of images."""
    sizes = {(len(p.place.images), p.place.window.size) for unit in units for p in unit.pieces}
    if len(sizes) > 1 or len(units[0].pieces) > 1:
        found = sorted(f"{images} x {'x'.join(map(str, size))}" for images, size in sizes)
        tiles = max(len(unit.pieces) for unit in units)
        raise ValueError(
            "with pipeline.placement devices each micro-batch must be one tile, and all "
            "micro-batches of a step must have the same number of images and the same window, but "
            f"here a micro-batch has {tiles} tile{'s' * (tiles != 1)}, and the sizes "
            f"(images x window) are {', '.join(found)}: "
            "set data.crop, or pipeline.placement to linear"
        )
