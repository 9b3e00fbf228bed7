"""One rank drives several devices: our stages as layers of torchgpipe (Kim et al., 2020, arXiv 2004.09910).

Placement over ranks needs a process a stage. Here one process has all stages, each on its device, and torchgpipe's GPipe
schedule with its portals for skips and its checkpointing computes them. The micro-batches of a step go in as one batch,
which torchgpipe cuts up again::

    devices[0]   0 1 2 3                3' 2' 1' 0'        a thread a device in the forward pass,
    devices[1]     0 1 2 3          3' 2' 1' 0'            autograd's thread of the device in the backward pass
    devices[2]       0 1 2 3 | 3' 2' 1' 0'                 | the loss of the step

All devices of the kind ``cpu`` are one device to PyTorch, and share one thread: right, but no faster than one stage.
"""

from __future__ import annotations

import importlib.util
from typing import Callable, Sequence

import torch
from torch import Tensor, nn

from distseg.config.settings import Config, PipelineConfig
from distseg.models.layers import CutTo, Spread
from distseg.models.lines import OfLines
from distseg.runtime.partition import Edge, Partition
from distseg.runtime.stage import LOSS, Stage
from distseg.tiling.tile_batch import MicroBatch


def devices_of(config: Config, device: torch.device, gpus: int | None = None) -> list[torch.device]:
    """The device of each stage; of a rank that is no pipeline in itself, its one device.

    Args:
        device: what the launcher gave this rank.
        gpus: that this process sees; PyTorch's count by default.

    Raises:
        ValueError: devices that are not there, or not of this rank's kind.
    """
    pipeline = config.pipeline
    if pipeline.placement != "devices":
        return [device]
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


def _named(names: Sequence[str]) -> list[torch.device]:
    found = []
    for name in names:
        try:
            found.append(torch.device(name))
        except RuntimeError:
            found.append(None)
        if found[-1] is None or found[-1].type not in ("cpu", "cuda"):
            raise ValueError(
                f"pipeline.devices names {name!r}, which is no device: write cpu, cuda:0, cuda:1 "
                "and so on"
            )
    return found


def _share(device: torch.device, stages: int, gpus: int) -> list[torch.device]:
    """Of the GPUs of a node those of this rank, which was given the GPU of its number on the node."""
    if device.type == "cpu":
        return [device] * stages
    first = (device.index or 0) * stages
    if first + stages > gpus:
        raise ValueError(
            f"this rank's {stages} stages would be on cuda:{first} to cuda:{first + stages - 1}, "
            f"but this process sees {gpus} GPUs: start fewer "
            "ranks a node, show each rank its own GPUs and name them as pipeline.devices, or give "
            "pipeline.balance fewer stages"
        )
    return [torch.device("cuda", first + stage) for stage in range(stages)]


def check_there(pipeline: PipelineConfig) -> None:
    """Refuse stages on devices where the package that drives them is not there.

    Raises:
        ValueError: saying how to install it.
    """
    if pipeline.placement == "devices" and importlib.util.find_spec("torchgpipe") is None:
        raise ValueError(
            "pipeline.placement devices needs torchgpipe: pip install --no-deps "
            "torchgpipe==0.0.7, or set pipeline.placement to line"
        )


def stages_of(pipeline: PipelineConfig) -> int:
    """The number of stages with ``placement: devices``."""
    return len(pipeline.devices or pipeline.balance)


class DevicePipeline:
    """All stages of a model on this rank's devices.

    Args:
        stages: in order; the layers of each are on its device already, and the head is behind the last.
        recompute: which micro-batches torchgpipe checkpoints: never, except_last or always.
    """

    def __init__(
        self,
        partition: Partition,
        stages: Sequence[Stage],
        devices: Sequence[torch.device],
        recompute: str = "never",
    ):
        self.partition, self.stages, self.devices, self.recompute = (
            partition,
            list(stages),
            list(devices),
            recompute,
        )
        self.head = stages[-1].head
        self._layers = [as_layer(stage, self._current) for stage in stages]
        self._gpipes: dict[int, nn.Module] = {}  # by the number of micro-batches
        self._units: Sequence[MicroBatch] = ()
        self._numbers: dict[object, int] = {}

    def run(self, units: Sequence[MicroBatch]) -> None:
        """Forward and backward passes of all micro-batches of a step; adds to the parameters' gradients.

        Raises:
            ValueError: micro-batches of several pieces or sizes.
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
                        [self.head.slopes(unit, [found])[0] for unit, found in zip(units, rows)]
                    )
                )
        finally:
            self._units = ()
            self._numbers.clear()

    def _gpipe(self, micro_batches: int) -> nn.Module:
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
        """The micro-batch that this thread computes.

        torchgpipe hands a layer a chunk without its number (and wants a gradient of all that travels beside it, where it
        checkpoints). But it keeps one tracker of skips for each micro-batch, in all stages and when it computes them again,
        and the first stage takes micro-batches in order.
        """
        from torchgpipe.skip.tracker import current_skip_tracker

        return self._units[self._numbers.setdefault(current_skip_tracker(), len(self._numbers))]


def as_layer(stage: Stage, current: Callable[[], MicroBatch]) -> nn.Module:
    """A stage as torchgpipe knows layers, without parameters of its own: these are the model's, and on their device.

    Feature maps (B, C, *size) go in and out, rows of the loss (B, K) out of the last stage, skips by torchgpipe's commands.

    Args:
        current: the micro-batch that the calling thread computes.
    """
    from torchgpipe import is_recomputing
    from torchgpipe.skip import pop, skippable, stash

    before, behind = _handed_on(stage.incoming), _handed_on(stage.outgoing)
    # By the whole edge: a name may come again behind its pop, where torchgpipe wants another.
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
    """The first of several tensors. The others have a gradient then, which torchgpipe wants of all that travels, also of a map whose size alone is looked at."""

    @staticmethod
    def forward(ctx, made: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return made[:]

    @staticmethod
    def backward(ctx, g):
        return g, *map(torch.zeros_like, ctx.saved_tensors)


def _handed_on(edges: Sequence[Edge]) -> Edge | None:
    """What goes from a stage to the next one as torchgpipe's own output; None at the network's ends.

    Raises:
        ValueError: nothing does.
    """
    found = next((edge for edge in edges if edge.target == edge.source + 1), None)
    if edges and found is None:
        raise ValueError(
            "with pipeline.placement devices each stage hands a map to the next, but of "
            f"{edges[0]} nothing does: set pipeline.balance, or placement to line"
        )
    return found


def _check_alike(units: Sequence[MicroBatch]) -> None:
    sizes = {(len(p.place.images), p.place.window.size) for unit in units for p in unit.pieces}
    if len(sizes) > 1 or len(units[0].pieces) > 1:
        found = sorted(f"{images} x {'x'.join(map(str, size))}" for images, size in sizes)
        raise ValueError(
            "with pipeline.placement devices all micro-batches of a step have one size, but here "
            f"are (images x window) {', '.join(found)}: "
            "set data.crop, or pipeline.placement to line"
        )
