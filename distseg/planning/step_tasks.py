"""List the tasks of an optimizer step of all ranks, for :mod:`distseg.planning.shared_links`.

The tasks follow the operations that the ranks run (:mod:`distseg.runtime.stage_program`). A pass is
cut where its layers exchange halos or statistics. Seconds and bytes are those of the planner
(:mod:`distseg.planning.mesh_search`), but each tile has its own number of cells, its own
neighbours, and its own place in a node.

All sample groups do the same work. So only the first few groups are simulated, until the next group
has the same places in its nodes as the first one. The others are copies. If batch norm takes its
statistics over all groups, only one group is simulated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distseg.comm.halo import copies_to
from distseg.config.sizes import Size
from distseg.planning.cluster import Cluster
from distseg.planning.cost import DTYPES
from distseg.planning.mesh_layout import MeshLayout, Work
from distseg.planning.shared_images import MOMENTS, exchange_seconds, norm_seconds
from distseg.planning.shared_links import Task
from distseg.planning.tile_grids import TileGrids
from distseg.runtime.actions import Action, Backward, Forward, Weight
from distseg.runtime.operations import Operation, Recompute, Recv, Send
from distseg.runtime.schedule import orders, splits
from distseg.runtime.stage_program import operations
from distseg.tiling.layout import Layout
from distseg.tiling.tile import split

COMPUTING, HALOS, NORMS, STAGES, SUM, UPDATE, READING = (
    "computing",
    "halo messages",
    "statistics of norms",
    "messages between stages",
    "sum of gradients",
    "update",
    "reading",
)
# Bytes of the statistics of a norm: the moments of 64 channels in float64.
_STATISTICS = MOMENTS * 64
# At most about this many ranks are simulated; all others are copies of them.
_SIMULATED = 1024


class Tiles:
    """Cells and halo messages of each tile of an image. Tiles are in row-major order of the grid.

    Args:
        work: the training step.
        grid: the grid of tiles.
        exchange: how often tiles exchange halos, ``spatial.exchange_every``.
    """

    def __init__(self, work: Work, grid: Size, exchange: str):
        self.work, self.grid, self.exchange = work, grid, exchange
        self._places = [tuple(cell) for cell in np.ndindex(*grid)]
        self._numbers = {place: number for number, place in enumerate(self._places)}

    @cached_property
    def _layout(self) -> Layout:
        work = self.work
        borders = [
            (0, *(b for _, b in split(n, g, s)))
            for n, g, s in zip(work.image, self.grid, work.reach.stride)
        ]
        return Layout(work.graph, work.image, borders, self.exchange)

    @cached_property
    def shares(self) -> np.ndarray:
        """Cells that each tile computes, as fractions of whole feature maps, (layers, tiles)."""
        layers = len(self.work.costs.layers)
        cells = [max(1, math.prod(size)) for size in self._layout.sizes[1:]]
        return np.array(
            [
                [self._layout.part(n, place).output.pixels / cells[n] for place in self._places]
                for n in range(layers)
            ]
        )

    @cached_property
    def halos(self) -> dict[int, list[tuple[int, int, float]]]:
        """Halo messages before a layer, by layer index: (sending tile, receiving tile, bytes)."""
        if self.exchange == "all" or self.grid.volume == 1:
            return {}
        return {number: list(self._messages(number)) for number in self._layout.points}

    @cached_property
    def exchanged(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Bytes of the input of each layer that exchanges halos, (tiles,) and (tiles,).

        The first array has the bytes that a tile has before the exchange, the second one the bytes
        of its halo.
        """
        found = {}
        for number in self.halos:
            parts = [self._layout.part(number, place) for place in self._places]
            had = [part.input.intersection(part.available).pixels for part in parts]
            size, a_cell = [part.input.pixels for part in parts], self._bytes_of_cell(number)
            found[number] = a_cell * np.array(had), a_cell * (np.array(size) - had)
        return found

    def _bytes_of_cell(self, number: int) -> float:
        """Return the bytes of a cell of a layer's input, over all channels and images."""
        source = self.work.graph[number].first
        return self.work.bytes_of(source) / max(1, math.prod(self._layout.sizes[source]))

    def _messages(self, number: int) -> Iterator[tuple[int, int, float]]:
        """Yield the halo messages before a layer: (sending tile, receiving tile, bytes)."""
        a_cell = self._bytes_of_cell(number)
        spans = self._layout.spans(number)
        for place in self._places:
            for copy in copies_to(place, *spans):
                sender = self._numbers[copy.source]
                yield sender, self._numbers[place], a_cell * copy.box.pixels


@dataclass(frozen=True)
class StepTasks:
    """Tasks of a step (computations and messages) of the first ranks of a job.

    Attributes:
        tasks: the tasks.
        simulated: the number of ranks that have tasks. These are the first ranks of the job.
        copies: how many groups of ``simulated`` ranks the job has. All groups have the same tasks.
    """

    tasks: list[Task]
    simulated: int
    copies: int


def step_tasks(
    work: Work,
    grids: TileGrids,
    layout: MeshLayout,
    balance: Sequence[int],
    cluster: Cluster,
    bucket: float | None = None,
) -> StepTasks:
    """Return the computations and messages of a training step, as tasks of the first ranks.

    Args:
        work: the training step.
        grids: the grids of tiles of the step.
        layout: the layout.
        balance: the number of layers of each stage.
        cluster: the nodes of the job, which together have the same number of ranks as the layout.
        bucket: smallest number of bytes of gradients that are summed together, during the last
            backward pass. By default all gradients are summed after this pass, as distseg does.

    Raises:
        ValueError: the cluster has another number of ranks than the layout.
    """
    if layout.ranks != cluster.ranks:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, but the cluster has {cluster.ranks}: give both "
            "the same number"
        )
    return _Step(work, grids, layout, balance, cluster, bucket).listed()


class _Step:
    """Builder of the list of tasks of a step; arguments as for :func:`step_tasks`."""

    def __init__(
        self,
        work: Work,
        grids: TileGrids,
        layout: MeshLayout,
        balance: Sequence[int],
        cluster: Cluster,
        bucket: float | None,
    ):
        self.work, self.layout, self.cluster, self.bucket = work, layout, cluster, bucket
        self.tiles = Tiles(work, layout.tiles, layout.exchange)
        self.copies = grids.tile_work(layout.tiles, layout.exchange).copies
        self.partition = work.partitioner.cut(list(balance))
        self.tasks: list[Task] = []
        whole = layout.tiles.volume * layout.stages
        period = math.lcm(whole, cluster.machine.ranks) // whole
        # Groups that take statistics together do every norm at the same time.
        together = work.step_norms and bool(work.norms)
        most = 1 if together else max(1, _SIMULATED // whole)
        self.groups = min(layout.samples, period, most)
        self.norm_groups = layout.samples if together else 1
        # For each stage and part of its gradients, the tasks after which the part is complete.
        self.gradients: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[int, tuple[int, ...]] = {}  # the last tasks of each rank
        weights = [layer.parameters * work.costs.weight_bytes for layer in work.costs.layers]
        self.weights = [sum(weights[n] for n in part) for part in self.partition.ranges]
        self.parts = [_parts(part, weights, bucket) for part in self.partition.ranges]

    def listed(self) -> StepTasks:
        """Add the tasks of all sample groups, and return the finished list."""
        for group in range(self.groups):
            _Group(self, group).run()
        whole = self.layout.tiles.volume * self.layout.stages
        for stage in range(self.layout.stages):
            self._finish(stage)
        simulated = self.groups * whole
        return StepTasks(self.tasks, simulated, math.ceil(self.layout.ranks / simulated))

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def rank(self, group: int, tile: int, stage: int) -> int:
        return (group * self.layout.tiles.volume + tile) * self.layout.stages + stage

    def _finish(self, stage: int) -> None:
        """Add the tasks that sum the gradients of a stage and update its weights."""
        layout, machine = self.layout, self.cluster.machine
        replicas = layout.samples * layout.tiles.volume
        ranks = [r for r in self.ends if r % layout.stages == stage]
        links = self.cluster.sum_links(ranks, replicas)
        earlier: tuple[int, ...] = ()
        for part, size in enumerate(self.parts[stage]):
            after = tuple(self.gradients[stage, part]) + earlier
            if replicas > 1:
                seconds, sent = self.cluster.sum_cost(replicas, size)
                earlier = (self.add(Task(SUM, after, seconds, sent, links, joint=True)),)
        update = self.weights[stage] * (3 + 2 * self.work.copies) / machine.traffic
        for rank in ranks:
            self.add(Task(UPDATE, self.ends[rank] + earlier, update, rank=rank))


def _parts(layers: Iterable[int], weights: Sequence[float], bucket: float | None) -> list[float]:
    """Return the bytes of the parts in which a stage's gradients are summed, last layers first.

    Args:
        layers: the layers of the stage.
        weights: the bytes of each layer's weights.
        bucket: the smallest number of bytes of a part, except for the last part; None for a single
            part.
    """
    found = [0.0]
    for number in reversed(list(layers)):
        if bucket is not None and found[-1] >= bucket:
            found.append(0.0)
        found[-1] += weights[number]
    return found


class _Group:
    """Builder of the tasks of one sample group.

    All tiles of a stage run the same operations, so an operation is added for all tiles at once.

    Args:
        step: the builder of all tasks of the step.
        group: the index of the sample group.
    """

    def __init__(self, step: _Step, group: int):
        self.step, self.group = step, group
        self.work, self.layout, self.tiles = step.work, step.layout, step.tiles
        self.machine, self.cluster = step.cluster.machine, step.cluster
        stages, count = range(step.layout.stages), step.layout.tiles.volume
        # For each stage and tile: seconds to compute before the next message, and the tasks that
        # the next task follows.
        self._seconds = [np.zeros(count) for _ in stages]
        self._last: list[list[tuple[int, ...]]] = [[()] * count for _ in stages]
        # The messages of each edge, micro-batch and direction, one for each tile.
        self._sent: dict[tuple, list[int]] = {}
        self._way: dict[tuple[int, int], int] = {}  # the last message of each pair of ranks

    def run(self) -> None:
        """Add the tasks of all operations of the group; a receive is added after its send."""
        partition, layout = self.step.partition, self.layout
        found = orders(layout.schedule, partition.placement, layout.micro_batches)
        programs = [operations(order, partition.edges, layout.recompute) for order in found]
        at, moved = [0] * len(programs), True
        while moved:
            moved = False
            for stage, program in enumerate(programs):
                while at[stage] < len(program) and self._ready(program[at[stage]]):
                    self._add(stage, program[at[stage]])
                    at[stage], moved = at[stage] + 1, True
        for stage in range(layout.stages):
            self._flush(stage)
            for tile, last in enumerate(self._last[stage]):
                rank = self._rank(stage, tile)
                self.step.ends[rank] = last + self._reading(rank, tile, stage)
                self.step.gradients[stage, len(self.step.parts[stage]) - 1] += last

    def _rank(self, stage: int, tile: int) -> int:
        return self.step.rank(self.group, tile, stage)

    def _ready(self, op: Operation) -> bool:
        return not isinstance(op, Recv) or (op.edge, op.micro_batch, op.back) in self._sent

    def _add(self, stage: int, op: Operation) -> None:
        """Add the tasks of one operation of a stage, for all tiles."""
        if isinstance(op, Recv):
            self._flush(stage)
            for tile, message in enumerate(self._sent[op.edge, op.micro_batch, op.back]):
                self._last[stage][tile] += (message,)
        elif isinstance(op, Send):
            self._send(stage, op)
        elif isinstance(op, (Forward, Recompute)):
            for number in self.step.partition.ranges[stage]:
                self._messages(stage, number, back=False)
                self._compute(stage, number, self.work.costs.layers[number].forward, back=False)
        elif isinstance(op, Backward):
            self._backward(stage, op)
        elif isinstance(op, Weight):
            for number in self.step.partition.ranges[stage]:
                self._seconds[stage] += self.tiles.shares[number] * self._put_off(number)
        if isinstance(op, Action) and self.layout.stages > 1:
            self._flush(stage)

    def _backward(self, stage: int, op: Backward) -> None:
        """Add the tasks of a stage's backward pass; record which tasks complete gradients."""
        last = op.micro_batch == self.layout.micro_batches - 1
        parts, part, done = self.step.parts[stage], 0, 0.0
        for number in reversed(self.step.partition.ranges[stage]):
            layer = self.work.costs.layers[number]
            if self.step.bucket is not None and last and done >= parts[part] > 0:
                self._flush(stage)
                for each in self._last[stage]:
                    self.step.gradients[stage, part] += each
                part, done = part + 1, 0.0
            self._messages(stage, number, back=True)
            self._compute(stage, number, layer.backward - self._put_off(number), back=True)
            done += layer.parameters * self.work.costs.weight_bytes

    def _put_off(self, number: int) -> float:
        """Return the seconds of a layer in weight passes; 0 if the schedule has no such passes."""
        layer = self.work.costs.layers[number]
        own_pass = splits(self.layout.schedule) and self.layout.stages > 1
        return layer.backward * layer.put_off if own_pass else 0.0

    def _compute(self, stage: int, number: int, seconds: float, back: bool) -> None:
        """Add the seconds of one pass of a layer to those of all tiles.

        All tiles copy as many bytes as the slowest one.

        Args:
            stage: the stage of the layer.
            number: the index of the layer in the network.
            seconds: the seconds of the pass on a whole image.
            back: True for a backward pass.
        """
        copies = self.step.copies[number][back] / self.machine.traffic
        call = self.machine.call * bool(seconds)
        self._seconds[stage] += self.tiles.shares[number] * seconds + call + copies

    def _flush(self, stage: int) -> None:
        """Add one computing task for each tile of a stage, with the seconds summed up so far.

        These are the seconds of all layers that the tile has computed since its previous task. A
        tile without such layers gets no task.
        """
        for tile, seconds in enumerate(self._seconds[stage]):
            if seconds:
                after, rank = self._last[stage][tile], self._rank(stage, tile)
                task = Task(COMPUTING, after, float(seconds), rank=rank)
                self._last[stage][tile] = (self.step.add(task),)
        self._seconds[stage][:] = 0.0

    def _messages(self, stage: int, number: int, back: bool) -> None:
        """Add the tasks of a layer's halo exchange and of its norm's statistics, on all tiles.

        Args:
            stage: the stage of the layer.
            number: the index of the layer in the network.
            back: True for the messages of the backward pass.
        """
        if messages := self.tiles.halos.get(number):
            self._flush(stage)
            seconds = exchange_seconds(self.machine, *self.tiles.exchanged[number])
            self._seconds[stage] += seconds[back]
            incoming: dict[int, list[int]] = defaultdict(list)
            if back:  # The gradients of halos go back to the senders.
                messages = [(target, source, size) for source, target, size in messages]
            count = np.bincount([target for _, target, _ in messages])
            for source, target, size in messages:
                task = Task(
                    HALOS,
                    self._last[stage][source],
                    float(count[target]) * self.machine.latency,
                    size,
                    self.cluster.message(self._rank(stage, source), self._rank(stage, target)),
                )
                incoming[target].append(self.step.add(task))
            for target, found in incoming.items():
                self._last[stage][target] += tuple(found)
        sharing = self.step.norm_groups * self.layout.tiles.volume
        if number in self.work.norms and sharing > 1:
            self._flush(stage)
            ranks = [self._rank(stage, tile) for tile in range(self.layout.tiles.volume)]
            after = tuple(dict.fromkeys(task for last in self._last[stage] for task in last))
            took, sent = self.cluster.sum_cost(sharing, _STATISTICS)
            links = self.cluster.sum_links(ranks, sharing)
            joint = self.step.norm_groups > 1
            added = self.step.add(Task(NORMS, after, took, sent, links, joint=joint))
            self._last[stage] = [(added,)] * len(ranks)
            sizes = self.tiles.shares[number] * self.work.bytes_of(number + 1)
            self._seconds[stage] += norm_seconds(self.machine, sizes)[back]

    def _send(self, stage: int, op: Send) -> None:
        """Add the messages that a send operation makes, one for each tile.

        The messages travel while the sender goes on computing.
        """
        found, size = [], self.work.bytes_of(op.edge.map)
        other = self.step.partition.placement[op.receiver]
        for tile, last in enumerate(self._last[stage]):
            way = self._rank(stage, tile), self._rank(other, tile)
            share = float(self.tiles.shares[max(0, op.edge.map - 1), tile])
            earlier = (self._way[way],) if way in self._way else ()
            links = self.cluster.message(*way)
            task = Task(STAGES, last + earlier, self.machine.latency, size * share, links)
            self._way[way] = self.step.add(task)
            found.append(self._way[way])
        self._sent[op.edge, op.micro_batch, op.back] = found

    def _reading(self, rank: int, tile: int, stage: int) -> tuple[int, ...]:
        """Add a task that reads the images of the next step during this step.

        Returns:
            The index of the task. The tuple is empty if the rank reads no images, or if reading is
            not simulated.
        """
        if stage or math.isinf(self.cluster.storage):
            return ()
        values = self.work.costs.image / DTYPES[self.work.precision].itemsize
        share = float(self.tiles.shares[0, tile])
        size = self.layout.micro_batches * share * values * self.cluster.stored
        return (self.step.add(Task(READING, (), 0.0, size, self.cluster.reading(rank))),)
