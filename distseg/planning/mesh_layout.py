"""Layouts of a training step on a mesh of ranks, and what the planner knows and predicts of a step.

:mod:`distseg.planning.mesh_search` finds the best layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from torch import nn

from distseg.config.sizes import Size
from distseg.layers.criterion import Criterion
from distseg.layers.graph import graph_of
from distseg.models.network import calls_of
from distseg.planning.cost import Costs
from distseg.planning.held import Recompute
from distseg.runtime.partition import Partitioner
from distseg.tiling.tile import ReceptiveField

EXCHANGES = ("all", "level", "1")
_AXES = ("samples", "tiles", "stages")
# All families of layouts: the mesh axes that have more than one rank.
FAMILIES = ("one rank", *(" x ".join(axes) for n in (1, 2, 3) for axes in combinations(_AXES, n)))


@dataclass(frozen=True)
class MeshLayout:
    """Mesh of a run, and the settings that say how ranks share the work.

    Attributes:
        samples, tiles, stages: the mesh.
        exchange: how often tiles exchange halos, ``spatial.exchange_every``.
        micro_batches: number of micro-batches of a step in a sample group, ``train.accumulate``.
        schedule: the order of a pipeline's passes, ``pipeline.schedule``.
        recompute: the activations that are computed again, ``pipeline.recompute``.
    """

    samples: int
    tiles: Size
    stages: int
    exchange: str
    micro_batches: int
    schedule: str
    recompute: Recompute

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return self.samples * self.tiles.volume * self.stages

    @property
    def family(self) -> str:
        """The mesh axes that have more than one rank, such as ``samples x tiles``."""
        numbers = (self.samples, self.tiles.volume, self.stages)
        axes = [name for name, number in zip(_AXES, numbers) if number > 1]
        return " x ".join(axes) or FAMILIES[0]

    def __str__(self) -> str:
        return f"{self.samples} samples x {self.tiles} tiles x {self.stages} stages"

    def values(self) -> dict[str, Any]:
        """Return the values of all settings that determine the layout, by name.

        Settings that this layout does not use, such as ``pipeline.balance``, have their defaults.
        """
        found = {
            "mesh.samples": self.samples,
            "mesh.tiles": self.tiles,
            "mesh.stages": self.stages,
            "mesh.layout": "given",
            "pipeline.schedule": self.schedule if self.stages > 1 else "auto",
            "pipeline.recompute": self.recompute,
            "pipeline.balance": None,
            "spatial.exchange_every": self.exchange,
            "spatial.tiles_per_rank": Size((1,) * len(self.tiles)),
            "train.accumulate": self.micro_batches,
        }
        if self.exchange == "all":
            found["spatial.fuse_below"] = 0
        return found

    def settings(self) -> dict[str, str]:
        """Return the settings to write into a config for this layout."""
        found = {
            "mesh.samples": str(self.samples),
            "mesh.tiles": str(self.tiles),
            "mesh.stages": str(self.stages),
            "train.accumulate": str(self.micro_batches),
            "pipeline.recompute": self.recompute,
        }
        if self.tiles.volume > 1:
            found["spatial.exchange_every"] = self.exchange
        if self.stages > 1:
            found["pipeline.schedule"] = self.schedule
        return found


@dataclass(frozen=True)
class Prediction:
    """Time and memory of a step in a layout.

    Attributes:
        layout: the layout.
        parts: seconds of the step by purpose. Their sum is the duration of the step.
        memory: bytes that the rank with the highest peak takes.
        balance: number of layers of each stage.
    """

    layout: MeshLayout
    parts: dict[str, float]
    memory: float
    balance: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Predicted duration of the step."""
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """The name of the part of the step that takes longest apart from ``computing``.

        If this part is at most 2 % of the step, the name is ``computing``.
        """
        name, seconds = max(
            ((k, v) for k, v in self.parts.items() if k != "computing"), key=lambda item: item[1]
        )
        return name if seconds > 0.02 * self.seconds else "computing"


@dataclass(frozen=True)
class Work:
    """One step of a training run, independent of the layout.

    Attributes:
        model: the plain network of known layers, which may be on the meta device.
        costs: costs of a micro-batch of whole images.
        image: the size of an image in pixels.
        images: number of images of a micro-batch.
        batch: number of images of a step, over all sample groups.
        reach: halo and stride of the network.
        norms: indices of the norms that take statistics over the whole image.
        copies: number of values that the optimizer keeps for each weight.
        loss: the loss of the training.
        step_norms: True if batch norm takes its statistics over the images of all sample groups.
        samples: number of sample groups if another number would change the result; else None.
        precision: the number type: fp64, fp32 or bf16.
        channels_last: True if feature maps have the memory format channels_last.
    """

    model: nn.Module
    costs: Costs
    image: tuple[int, ...]
    images: int
    batch: int
    reach: ReceptiveField
    norms: tuple[int, ...]
    copies: int
    loss: Criterion
    step_norms: bool = False
    samples: int | None = None
    precision: str = "fp32"
    channels_last: bool = False

    @cached_property
    def graph(self):
        """The graph of the network's layers."""
        return graph_of(self.model)

    @cached_property
    def chained(self) -> bool:
        """True if each layer reads the result of the layer before it."""
        return all(number in reads for number, reads in enumerate(self.costs.inputs))

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the network."""
        return sum(layer.parameters for layer in self.costs.layers)

    @cached_property
    def partitioner(self) -> Partitioner:
        """Object that cuts the network into stages."""
        return Partitioner(calls_of(self.model))

    def bytes_of(self, source: int) -> float:
        """Return the bytes of feature map ``source`` of a micro-batch; map 0 is the image."""
        return self.costs.layers[source - 1].output if source else self.costs.image
