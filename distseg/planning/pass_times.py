"""Predict the seconds of a step's passes, to compare them with measured ones.

:mod:`distseg.cli.profile` shows the comparison. The same costs balance the stages. They are
modelled for a CPU core or a V100, and one factor scales all of them to the machine in use. If a
pass still differs from its prediction, the balance assumed a wrong share of the step for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from distseg.models.network import calls_of
from distseg.planning.cost import Costs, modelled
from distseg.planning.roofline import modelled_device
from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.operations import BackwardTile, ForwardTile, Operation, OutputTile, Recompute
from distseg.runtime.partition import Edge, Partition
from distseg.runtime.simulator import Simulation, simulate
from distseg.runtime.stage_program import operations, recomputed
from distseg.runtime.streaming import StreamingExecutor
from distseg.runtime.tile_program import StagePlan

Passes = Mapping[tuple[str, str], float]
"""Seconds by kind (forward, backward, recompute, weight) and by the name of a stage or segment."""


class Modelled(NamedTuple):
    """Costs of all layers for a micro-batch of whole images.

    Attributes:
        costs: the modelled costs.
        pixels: the number of pixels of one image.
    """

    costs: Costs
    pixels: int


def costs_of(model: nn.Module, image: Sequence[int], images: int, device: str) -> Modelled | None:
    """Return the modelled costs of a plain model, or None if it is not a list of known layers.

    Args:
        model: the plain model, which may be on the meta device.
        image: the size of an image in pixels.
        images: the number of images of a micro-batch.
        device: the kind of device, cpu or cuda.
    """
    try:
        calls_of(model)
    except ValueError:
        return None
    return Modelled(modelled(model, image, images, modelled_device(device)), math.prod(image))


class StagePasses:
    """Predicted seconds of the passes of a pipeline's stages.

    Args:
        found: the modelled costs.
        partition: the stages.
        orders: for each rank, its actions (passes of micro-batches) in a step, in order.
        recompute: the value of ``pipeline.recompute``.
        pixels: the number of pixels of all windows of a micro-batch together.
    """

    def __init__(
        self,
        found: Modelled,
        partition: Partition,
        orders: Sequence[Sequence[Action]],
        recompute: str,
        pixels: float,
    ):
        self.partition, self.orders, self.recompute = partition, orders, recompute
        self.splits = any(isinstance(action, Weight) for order in orders for action in order)
        self._costs, self._share = found.costs, pixels / found.pixels
        self._known: dict[tuple[str, int], float] = {}  # results of `seconds`

    def of_rank(self, rank: int) -> Passes:
        """Return the predicted seconds of a rank's passes in a step, by (kind of pass, stage)."""
        total: dict[tuple[str, str], float] = defaultdict(float)
        for op in operations(self.orders[rank], self.partition.edges, self.recompute):
            if isinstance(op, (Forward, Backward, Weight, Recompute)):
                kind = "recompute" if isinstance(op, Recompute) else op.kind
                total[kind, f"stage {op.stage}"] += self.seconds(kind, op.stage)
        return total

    def seconds(self, kind: str, stage: int) -> float:
        """Return the predicted seconds of one pass of a stage.

        Args:
            kind: forward, recompute, backward or weight. A weight pass computes the weight
                gradients that the schedule separates from the backward pass.
            stage: the index of the stage.
        """
        if (kind, stage) not in self._known:
            self._known[kind, stage] = self._computed(kind, stage)
        return self._known[kind, stage]

    def _computed(self, kind: str, stage: int) -> float:
        """Return the predicted seconds of one pass; arguments as for :meth:`seconds`."""
        layers = (
            self._costs.layers
            if self.partition.ranges[stage] == range(0)
            else [self._costs.layers[n] for n in self.partition.ranges[stage]]
        )
        put_off = sum(layer.backward * layer.put_off for layer in layers) if self.splits else 0.0
        backward = sum(layer.backward for layer in layers)
        return self._share * {"weight": put_off, "backward": backward - put_off}.get(
            kind, sum(layer.forward for layer in layers)
        )

    def simulated(
        self, factor: float, transfer: Callable[[Edge], float] | None = None
    ) -> Simulation:
        """Return the simulation of a step on the ranks of one pipeline.

        Args:
            factor: every pass takes this many times its predicted seconds.
            transfer: function that returns the seconds for which the tensor of an edge travels;
                None if messages take no time.
        """
        stages = range(self.partition.stages)
        forward, backward, weight, repeated = (
            [factor * self.seconds(kind, stage) for stage in stages]
            for kind in ("forward", "backward", "weight", "recompute")
        )
        again = set().union(*(recomputed(order, self.recompute) for order in self.orders))

        def recompute(stage: int, m: int) -> float:
            return repeated[stage] if (stage, m) in again else 0.0

        return simulate(
            self.orders,
            self.partition.edges,
            forward,
            backward,
            self.partition.placement,
            transfer,
            recompute if again else 0.0,
            weight,
        )


def of_tiles(
    found: Modelled,
    executor: StreamingExecutor,
    image: Sequence[int],
    program: Sequence[Operation],
    plans: Sequence[StagePlan],
) -> Passes:
    """Return the predicted seconds of a rank's passes on streamed tiles, by kind and segment.

    A layer's cost on a tile is in proportion to the cells that the layer computes on the tile. The
    keys of the result are (kind, segment), such as ("forward", the name of the segment).

    Args:
        found: the predicted costs of the layers on whole images.
        executor: the executor that runs the tiles.
        image: the size of an image in pixels.
        program: the operations of the rank in a step.
        plans: the stage plan of each micro-batch.
    """
    sizes = executor.layout(image).sizes
    total: dict[tuple[str, str], float] = defaultdict(float)

    def seconds(op: OutputTile | ForwardTile | BackwardTile) -> Iterator[tuple[float, float]]:
        plan = plans[op.micro_batch]
        for number, part in zip(plan.segments[op.segment].nodes, plan.grid.tile_plan(op).views):
            share = part.output.pixels / max(1, math.prod(sizes[number + 1]))
            layer = found.costs.layers[number]
            yield share * layer.forward, share * layer.backward

    for op in program:
        if isinstance(op, (ForwardTile, BackwardTile, OutputTile)):
            name = executor.name_of(plans[op.micro_batch].segments[op.segment])
            there, back = map(sum, zip(*seconds(op)))
            if not (isinstance(op, BackwardTile) and op.kept):
                total["recompute" if isinstance(op, BackwardTile) else "forward", name] += there
            if isinstance(op, BackwardTile) or isinstance(op, OutputTile) and op.back:
                total["backward", name] += back
    return total
