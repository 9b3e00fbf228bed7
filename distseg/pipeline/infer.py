"""Windows one after another through the stages of a pipeline, without gradients.

Each rank streams the windows through its stage (:mod:`distseg.spatial.stream`), taking feature maps and skips from the
stages before and handing its own on. While a window is in one stage, the next one is in the stage before.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Callable, Iterator

import torch
from torch import Tensor

from distseg.geometry.tile import Place
from distseg.pipeline.execute import Pipeline
from distseg.pipeline.partition import OUTPUT, Edge
from distseg.spatial.parallelize import TiledModel
from distseg.spatial.piece import Piece, Unit, on_tile
from distseg.spatial.stream import Skips, Waiting, stream_layers


_UNDER_WAY = 16  # messages that a stage may be ahead of those that take them


@torch.no_grad()
def stream_stages(
    pipeline: Pipeline, model: TiledModel, places: list[Place], load: Callable[[int], Tensor], scratch: str | None = None
) -> Iterator[tuple[int, Tensor]]:
    """As :func:`distseg.spatial.stream.stream` on the rank with the last stage; nothing is yielded on the others.

    Args:
        places: the windows of this pipeline, the same on all its ranks.
        load: asked on the rank with the first stage only.
    """
    own = pipeline.partition.stages_of(pipeline.comm.rank)
    # A rank with two stages (the V) takes each window through both; norms that want all windows first force it to take all through one.
    runs = [list(range(len(places)))] if model.always_live or len(own) == 1 else [[i] for i in range(len(places))]
    with tempfile.TemporaryDirectory(prefix="distseg-", dir=scratch) as folder:
        stores = _Stores(Path(folder) if len(runs) == 1 else None)
        streams = {stage: _StageStream(pipeline, model, stage, places, load, stores) for stage in own}
        for run in runs:
            for stage in own:
                for i, x in streams[stage].windows(run, scratch):
                    yield i, on_tile(x, places[i])
    pipeline.transport.flush()


class _Stores:
    """For the tensors of edges that wait on this rank: a scratch folder each, or memory, of one window, without a ``folder``."""

    def __init__(self, folder: Path | None):
        self.folder, self.found = folder, {}

    def of(self, edge: Edge) -> Waiting | _Held:
        if edge not in self.found and self.folder is None:
            self.found[edge] = _Held()
        elif edge not in self.found:
            folder = self.folder / str(len(self.found))
            folder.mkdir()
            self.found[edge] = Waiting(folder)
        return self.found[edge]


class _Held:
    """As :class:`distseg.spatial.stream.Waiting`, in memory."""

    def __init__(self):
        self.tensors: dict[int, tuple[Tensor, Skips]] = {}

    def put(self, i: int, x: Tensor, skips: Skips) -> None:
        self.tensors[i] = x, skips

    def take(self, i: int) -> tuple[Tensor, Skips]:
        return self.tensors.pop(i)


class _StageStream:
    """One stage of this rank: what it takes, from other ranks or from an earlier stage of its own, and what it hands on."""

    def __init__(self, pipeline: Pipeline, model: TiledModel, stage: int, places: list[Place], load: Callable[[int], Tensor], stores: "_Stores"):
        self.pipeline, self.model, self.stage, self.places, self.load, self.stores = pipeline, model, stage, places, load, stores
        partition, rank = pipeline.partition, pipeline.comm.rank
        self.layers, self.last = partition.ranges[stage], stage + 1 == partition.stages
        self.incoming, self.outgoing = partition.incoming(stage), sorted(partition.outgoing(stage), key=lambda edge: edge.name != OUTPUT)
        self.stored = {e for e in self.incoming if partition.placement[e.source] == rank}
        self.kept = {e for e in self.outgoing if partition.placement[e.target] == rank}
        self.device = model.device_of(self.layers)  # a rank's stages may lie on several
        self.ahead = _UNDER_WAY if len(partition.stages_of(rank)) == 1 else None

    def windows(self, run: list[int], scratch: str | None) -> Iterator[tuple[int, Tensor]]:
        """The windows of ``run`` through this stage; yields those that come out of the last one."""
        if self.model.always_live:
            self._store_skips(run)
        places = [self.places[i] for i in run]
        for k, x, skips in stream_layers(self.model, places, lambda k: self._take(run[k]), scratch, self.layers):
            for edge in self.outgoing:
                self._hand(edge, run[k], x if edge.name == OUTPUT else skips[edge.name])
            if self.last:
                yield run[k], x

    def _store_skips(self, run: list[int]) -> None:
        """Take the skips of all windows from stages before the last one, before any feature map: that comes only when all of
        them are through the stage between, and a sender is not to hold them so long."""
        for source in range(self.stage - 1):
            edges = [e for e in self.incoming if e.source == source and e not in self.stored]
            for i in run:
                for edge in edges:
                    self.stores.of(edge).put(i, self.pipeline.take(edge, self._unit(i))[0], {})
            self.stored.update(edges)

    def _take(self, i: int) -> tuple[Tensor, Skips]:
        found = {e.name: self.stores.of(e).take(i)[0] if e in self.stored else self.pipeline.take(e, self._unit(i))[0] for e in self.incoming}
        if self.stage == 0:
            found = {OUTPUT: self.load(i)}
        found = {name: x.to(self.device or found[OUTPUT].device) for name, x in found.items()}
        return found.pop(OUTPUT), found

    def _hand(self, edge: Edge, i: int, tensor: Tensor) -> None:
        if edge in self.kept:
            self.stores.of(edge).put(i, tensor, {})
            return
        self.pipeline.hand(edge, self._unit(i), [tensor])
        if self.ahead is not None:
            self.pipeline.transport.flush(self.ahead)

    def _unit(self, i: int) -> Unit:
        return Unit(i, [Piece(None, None, self.places[i])])
