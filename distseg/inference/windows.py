"""Prediction window by window, for networks that cannot be computed in parts.

Whole windows go through all layers if distseg cannot compute the layers of the module one by one,
or if the config asks for an approximation (``approximate.halo`` or ``approximate.norms``). In a
pipeline, windows go through the stages as micro-batches do, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distseg.comm.progress import heartbeat
from distseg.runtime.actions import Forward
from distseg.runtime.partition import Partition
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.schedule import orders
from distseg.runtime.stage import Stage
from distseg.runtime.swap_layers import TiledModel
from distseg.tiling.tile import TilePlacement
from distseg.tiling.tile_batch import MicroBatch, TileBatch, on_tile

_AT_ONCE = 4  # windows that are in a pipeline at once


class Windows:
    """Computation of whole windows (tiles with halos) by a model, on one rank or in a pipeline.

    Args:
        model: the parallelized model.
        partition: the model's stages; None for a model that is not cut into stages.
        comm: the communicator of the pipeline's ranks.
        device: this rank's device.
        autocast: function without arguments that returns the context manager in which the network
            runs, such as one of ``torch.autocast``.
    """

    def __init__(
        self,
        model: TiledModel,
        partition: Partition | None,
        comm,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager],
    ):
        self.model, self.partition, self.comm, self.autocast = (
            model,
            partition or Partition.whole(),
            comm,
            autocast,
        )
        self.results = _Results()
        if comm.size == 1:
            return
        last = self.partition.stages - 1
        stages = [
            Stage(
                s,
                model,
                self.partition.ranges[s],
                self.partition.incoming(s),
                self.partition.outgoing(s),
                self.results if s == last else None,
                autocast,
            )
            for s in self.partition.stages_of(comm.rank)
        ]
        self.pipeline = Pipeline(self.partition, stages, comm, device)

    @torch.no_grad()
    def __call__(
        self, places: list[TilePlacement], load: Callable[[int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Apply the model to windows; yield each window's index and the output for its tile.

        An output is (1, C', *tile.size). Ranks without the last stage yield nothing.

        Args:
            places: the placements of the windows, the same on all ranks of a pipeline.
            load: function that takes the index of a window and returns its pixels
                (1, C, *window.size). It is only called on the rank with the first stage.
        """
        for i, output in (
            self._alone(places, load) if self.comm.size == 1 else self._through_stages(places, load)
        ):
            yield i, on_tile(output, places[i])

    def _alone(
        self, places: list[TilePlacement], load: Callable[[int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        for i, place in enumerate(places):
            heartbeat(f"window {i + 1} of {len(places)}")
            with self.autocast():
                yield i, self._output(load(i), place)

    def _output(self, x: Tensor, place: TilePlacement) -> Tensor:
        """Return the model's output for the pixels ``x`` of a window, (1, C, *window.size).

        All stages of the model must be on this rank.
        """
        if self.partition.stages == 1:
            return self.model([x], [place])[0]
        maps = {0: x}
        for number, layers in enumerate(self.partition.ranges):
            # The stages of one rank may lie on several devices.
            device = self.model.device_of(layers) or x.device
            maps = {source: y.to(device) for source, y in maps.items()}
            later = {edge.map for edge in self.partition.edges if edge.target > number}
            self.model.run([maps], [place], layers, later)
        return maps[layers.stop]

    def _through_stages(
        self, places: list[TilePlacement], load: Callable[[int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Send windows through the stages of a pipeline; yield each window's index and output.

        Ranks without the last stage yield nothing.

        Args:
            places: the placements of the windows.
            load: a function from the index of a window to its pixels, (1, C, *window.size).
        """
        for first in range(0, len(places), _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, len(places)))
            units = [
                MicroBatch(
                    m, [TileBatch(load(i) if self.pipeline.first else None, None, places[i])]
                )
                for m, i in enumerate(numbers)
            ]
            actions = orders("gpipe", self.partition.placement, len(units))[self.comm.rank]
            self.pipeline.run([a for a in actions if isinstance(a, Forward)], units)
            for m, output in self.results.taken():
                yield first + m, output


@dataclass
class _Results:
    """Collector of the network's outputs, put after the last stage of a pipeline.

    In training the loss is computed in this place.

    Attributes:
        found: the output of each micro-batch, by the index of the micro-batch.
    """

    found: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, unit: MicroBatch, outputs: list[Tensor]) -> list[Tensor]:
        return outputs

    def note(self, unit: MicroBatch, rows: list[Tensor]) -> None:
        (self.found[unit.micro_batch],) = rows

    def taken(self) -> list[tuple[int, Tensor]]:
        found, self.found = sorted(self.found.items()), {}
        return found
