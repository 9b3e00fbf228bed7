"""Cut a network into the pipeline stages that a config asks for.

The config gives the number of layers of each stage (``pipeline.balance``). Otherwise the planner
finds the split whose slowest stage takes the least time for the windows that ranks compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from distseg.comm.launch import made_once, raise_jointly
from distseg.config.settings import Config, PipelineConfig
from distseg.config.sizes import Size
from distseg.config.units import many
from distseg.layers.graph import graph_of
from distseg.layers.norm import active_norms
from distseg.models.network import calls_of
from distseg.planning.cost import modelled
from distseg.planning.held import Policy
from distseg.planning.roofline import modelled_device
from distseg.planning.stages import Splitter
from distseg.planning.tile_size import GridTiling
from distseg.runtime.devices import stages_of
from distseg.runtime.partition import Partition
from distseg.runtime.schedule import v_placement
from distseg.tiling.layout import Layout
from distseg.tiling.tile import ReceptiveField, tiles, window


@dataclass(frozen=True)
class StageCut:
    """Division of a model's layers into the pipeline stages that the settings ask for.

    Attributes:
        config: the settings.
        model: the whole model, on any device, the meta device included.
        image: the size of a step's images in pixels.
        reach: the receptive field of the whole model, which sets the size of windows.
        device: the kind of device whose costs are modelled, cpu or cuda.
    """

    config: Config
    model: nn.Module
    image: Sequence[int]
    reach: ReceptiveField
    device: str = "cpu"

    def partition(self) -> Partition | None:
        """Return the partition of the layers into stages, or None if the model stays whole.

        Stages belong to ``mesh.stages`` ranks, or to the devices of one rank
        (``pipeline.placement: devices``). All ranks find the same partition.

        Raises:
            ValueError: the model cannot be cut, or the balance does not fit it.
        """
        pipeline, stages = self.config.pipeline, self.config.mesh.stages
        if stages == 1 and pipeline.balance is None and pipeline.placement != "devices":
            return None
        calls, placement = calls_of(self.model), _placement(pipeline, stages)
        balance = pipeline.balance
        if balance is not None and len(balance) != len(placement):
            raise ValueError(
                f"pipeline.balance has {len(balance)} numbers, but mesh.stages {stages} with "
                f"pipeline.placement {pipeline.placement} makes "
                f"{many(len(placement), 'stage')}: give the "
                "number of layers of each stage"
            )
        if not balance:
            v_shaped = pipeline.placement == "v-shaped"
            balance = self._balance(Splitter(placement, v_shaped, self._policy()))
        return Partition.from_balance(calls, balance, placement)

    def joint_partition(self, world) -> Partition | None:
        """Return the partition of the model into stages on all ranks; only rank 0 computes it.

        The search for a balance runs the network on the meta device, for which PyTorch imports
        torch.compile. This import takes as long as that of PyTorch itself, so the other ranks
        avoid it. All ranks must call this method together.

        Args:
            world: the communicator of all ranks.

        Raises:
            JointFailure: the model cannot be cut, or the balance does not fit it.
        """

        def balance() -> list[int]:
            found = self.partition()
            return [len(layers) for layers in found.ranges]

        config, pipeline = self.config, self.config.pipeline
        if world.size > 1 and config.mesh.stages > 1 and not pipeline.balance:
            pipeline = replace(pipeline, balance=made_once(world, balance))
            config = replace(config, pipeline=pipeline)
        with raise_jointly(world):
            return replace(self, config=config).partition()

    def _balance(self, splitter: Splitter) -> list[int]:
        """Return the numbers of layers of the stages with which the slowest rank is fastest.

        Args:
            splitter: the object that searches for these numbers.
        """
        config, model, image, reach = self.config, self.model, self.image, self.reach
        images, modelled_on = config.data.images, modelled_device(self.device)
        if config.streaming.tiles is None:
            fine = Size(g * p for g, p in zip(config.mesh.tiles, config.spatial.tiles_per_rank))
            largest = max(
                (window(tile, image, reach) for tile in tiles(image, fine, reach.stride)),
                key=lambda box: box.pixels,
            )
            return splitter.fastest(modelled(model, largest.size, images, modelled_on))
        part = max(tiles(image, config.mesh.tiles, reach.stride), key=lambda box: box.pixels)
        layout = Layout(graph_of(model), part.size, [(0, n) for n in part.size], "all")
        calls = calls_of(model)
        active = [
            calls[number].inputs[0]
            for number in active_norms((call.layer for call in calls), config.spatial.frozen_norm)
        ]
        # Costs are modelled on the size of the image, because the network may refuse the size of a
        # tile.
        costs = modelled(model, image, images, modelled_on)
        return splitter.fastest_streaming(costs, layout, active, GridTiling(config.streaming.tiles))

    def _policy(self) -> Policy:
        """Return the pipeline settings with which the planner estimates the time of stages.

        These settings are the number of micro-batches, the schedule and which activations are
        recomputed.
        """
        config, pipeline = self.config, self.config.pipeline
        if not config.streaming.active:
            schedule = schedule_of(pipeline, config.mesh.stages)
            return Policy(config.train.accumulate, schedule, pipeline.recompute)
        if active_norms(self.model.modules(), config.spatial.frozen_norm):
            return Policy(_MANY, "1f1b", "always")
        in_turn = (
            pipeline.placement == "linear"
            and pipeline.schedule in ("auto", "1f1b")
            and not config.spatial.exchanges
        )
        # Without active norms (norms that compute their statistics from the current images), the
        # last stage computes its tiles forward only once, except for Dice.
        return Policy(_MANY, "1f1b", "never" if in_turn else "except_last")


_MANY = 100  # assumed number of micro-batches: each streamed tile counts as a micro-batch


def _placement(pipeline: PipelineConfig, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage in its pipeline, by ``pipeline.placement``.

    For ``stages`` 2 this is (0, 1) with linear and (0, 1, 0) with v-shaped. With devices it is
    (0, 0, ...), with one 0 for each device.

    Args:
        pipeline: the settings of the pipeline.
        stages: the number of ranks of a pipeline, ``mesh.stages``.
    """
    if pipeline.placement == "devices":
        return (0,) * stages_of(pipeline)
    return v_placement(stages) if pipeline.placement == "v-shaped" else tuple(range(stages))


def schedule_of(pipeline: PipelineConfig, stages: int, linear: bool = True) -> str:
    """Return the pipeline schedule of a training that does not stream tiles: gpipe, 1f1b or zb-h1.

    ``pipeline.schedule: auto`` means 1f1b. It means gpipe if there are several stages and the loss
    is not linear, because 1f1b would then need an extra forward pass. With
    ``pipeline.placement: devices`` the schedule is always gpipe, the only one of torchgpipe.

    Args:
        pipeline: the settings of the pipeline.
        stages: the number of ranks of a pipeline, ``mesh.stages``.
        linear: True if the labels alone determine the loss gradient of the partial sums, as with
            cross-entropy; False with Dice.
    """
    if pipeline.placement == "devices":
        return "gpipe"
    if pipeline.schedule != "auto":
        return pipeline.schedule
    return "gpipe" if stages > 1 and not linear else "1f1b"
