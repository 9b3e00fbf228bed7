"""Predict the time and the memory of a step in each layout, and find the best layouts.

All layouts that are compared compute the same step. They have the number of images in a step and
in a micro-batch that the config sets. They differ in what a rank computes, in what it sends, and in
how long it waits::

    seconds of a step =  micro-batches x (layers of a rank, with the cells computed twice)
                       + halo exchange + statistics of norms + bubble of the pipeline
                       + sum of gradients + update of the weights

:mod:`distseg.planning.cost` gives the times of the layers on the machine
(:mod:`distseg.planning.machine`). They are scaled to the number of cells that the slowest tile
computes. A pipeline is simulated with the same operations that it will run. The prediction leaves
out the reading of images, and assumes that communication never overlaps with computation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from distseg.planning.balance import fastest_split, split_within, starts_of
from distseg.planning.cost import Costs, Seconds
from distseg.planning.held import Policy, Recompute
from distseg.planning.live_tensors import TileSizes
from distseg.planning.machine import Machine
from distseg.planning.mesh_layout import EXCHANGES, MeshLayout, Prediction, Work
from distseg.planning.pass_times import Modelled, StagePasses
from distseg.planning.pipeline_bounds import PipelineTimes
from distseg.planning.rank_memory import RankMemory
from distseg.planning.shared_images import MOMENTS, exchange_seconds, norm_seconds
from distseg.planning.stages import stage_seconds
from distseg.planning.tile_grids import TileGrids, TileWork
from distseg.runtime.partition import Partition
from distseg.runtime.schedule import orders, splits
from distseg.runtime.simulator import Simulation
from distseg.runtime.spans import Span


@dataclass(frozen=True)
class _LayersOnTile:
    """Key for the seconds of the layers of a layout on its slowest tile.

    The key is equal for layouts that differ only in their schedule. It is also equal for grids such
    as 2x4 and 4x2 of a square image.

    Attributes:
        tile: the work of the slowest tile.
        neighbours: number of ranks that send messages to one another at the same time.
        norm: seconds of the message of one norm in a forward or backward pass; 0 if none is sent.
    """

    tile: TileWork
    neighbours: int
    norm: float


@dataclass(frozen=True, eq=False)
class _Stages:
    """Split of a network into the pipeline stages of a layout, with times and memory.

    Layouts share one object if their grids are such as 2x4 and 4x2 of a square image.

    Attributes:
        costs: the costs of the layers on whole images.
        seconds: the seconds of each layer on the slowest tile, messages included.
        policy: schedule, recomputation and optimizer.
        partition: the stages.
        travels: for each edge of the partition, the seconds that a feature map of a micro-batch
            travels from one stage to the other.
        memory: bytes that the rank with the highest peak takes.
    """

    costs: Costs
    seconds: Seconds
    policy: Policy
    partition: Partition
    travels: tuple[float, ...]
    memory: float

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights of the stage that has the most weights."""
        return max(
            self.costs.weight_bytes * sum(self.costs.layers[n].parameters for n in part)
            for part in self.partition.ranges
        )

    @cached_property
    def least_seconds(self) -> float:
        """Lower bound of the seconds from the start of the first pass to the end of the last."""
        forward, backward, weight = zip(*map(self._passes, range(self.partition.stages)))
        repeated = float(self.policy.recompute == "always")
        links: dict[tuple[int, int], float] = {}
        returns: dict[tuple[int, int], float] = {}
        for edge, seconds in zip(self.partition.edges, self.travels):
            there, back = (edge.source, edge.target), (edge.target, edge.source)
            links[there] = links.get(there, 0.0) + seconds
            if edge.gradient:
                returns[back] = returns.get(back, 0.0) + seconds
        return PipelineTimes(
            self.policy.schedule,
            self.policy.micro_batches,
            forward,
            backward,
            weight,
            [repeated * seconds for seconds in forward],
            links,
            returns,
        ).least

    def _passes(self, stage: int) -> tuple[float, float, float]:
        """Return the seconds of a stage's forward, backward and weight pass for a micro-batch.

        The weight pass computes weight gradients after the backward pass. It takes 0 seconds unless
        the schedule has such passes (ZB-H1).
        """
        layers = self.partition.ranges[stage]
        backward, weight = sum(self.seconds.backward[layers.start : layers.stop]), 0.0
        if self.partition.stages > 1 and splits(self.policy.schedule):
            weight = sum(self.seconds.backward[n] * self.costs.layers[n].put_off for n in layers)
        return sum(self.seconds.forward[layers.start : layers.stop]), backward - weight, weight

    @cached_property
    def simulated(self) -> tuple[float, float]:
        """Duration of all passes of a step, and the seconds that the busiest rank computes."""
        policy, seconds = self.policy, self.seconds
        if self.partition.stages == 1:
            passes = policy.forward_passes(0, 1)
            busy = policy.micro_batches * (passes * sum(seconds.forward) + sum(seconds.backward))
            return busy, busy
        run = self.simulation()
        return run.makespan, run.makespan * (1 - min(run.idle))

    def simulation(self) -> Simulation:
        """Return the simulated passes of a step on the ranks of one pipeline."""
        passes_of = StagePasses(
            Modelled(self.tile_costs(), 1),
            self.partition,
            orders(self.policy.schedule, self.partition.placement, self.policy.micro_batches),
            self.policy.recompute,
            1,
        )
        return passes_of.simulated(1.0, dict(zip(self.partition.edges, self.travels)).__getitem__)

    def tile_costs(self) -> Costs:
        """Return the layers' costs: seconds on the slowest tile, but bytes of whole images."""
        layers = [
            replace(layer, forward=forward, backward=backward)
            for layer, forward, backward in zip(self.costs.layers, *self.seconds)
        ]
        return replace(self.costs, layers=tuple(layers))


class _Candidate(NamedTuple):
    """Layout in the queue of a search, which looks first at the one with the smallest ``least``.

    Attributes:
        least: lower bound of the seconds of a step.
        place: the index of the layout in the order of :meth:`Planner.candidates`. No two layouts in
            the queue have the same, so that the queue never compares layouts.
        layout: the layout.
        tile: sizes of tensors on the slowest tile; None until ``least`` is computed with these
            sizes.
        split: True if ``least`` is computed from the fastest split into stages.
        stages: the stages of the layout; None until ``least`` is computed for these stages.
    """

    least: float
    place: int
    layout: MeshLayout
    tile: TileSizes | None = None
    split: bool = False
    stages: _Stages | None = None


class _Found:
    """Layouts that a search has found so far, by family (the set of mesh axes that are split).

    Attributes:
        by_family: for each family, its layouts that fit the memory limit, the fastest first, as
            (prediction, index of the layout among :meth:`Planner.candidates`).
        smallest: for each family, of the layouts that do not fit, the one that takes the least
            memory, as (bytes, lower bound of seconds, index, layout, stages).
    """

    def __init__(self) -> None:
        self.by_family: dict[str, list[tuple[Prediction, int]]] = {}
        self.smallest: dict[str, tuple[float, float, int, MeshLayout, _Stages]] = {}
        self._fastest = math.inf

    def wants(self, family: str, least: float) -> bool:
        """Return True if a layout may be fast enough to be in the result of the search.

        Args:
            family: the family of the layout.
            least: a lower bound of the seconds that a step takes in the layout.
        """
        known = self.by_family.get(family, [])
        wanted = 1 if least > _SLOW * self._fastest else _KEPT
        return len(known) < wanted or least <= known[wanted - 1][0].seconds

    def add(self, prediction: Prediction, place: int) -> None:
        """Add the prediction of a layout that fits the memory limit.

        Args:
            prediction: the prediction.
            place: the index of the layout in the order of :meth:`Planner.candidates`.
        """
        known = self.by_family.setdefault(prediction.layout.family, [])
        known.append((prediction, place))
        known.sort(key=lambda each: (each[0].seconds, each[0].memory, each[1]))
        self._fastest = min(self._fastest, prediction.seconds)

    def add_too_large(self, layout: MeshLayout, stages: _Stages, least: float, place: int) -> None:
        """Add a layout that does not fit the memory limit and takes at least ``least`` seconds."""
        family, one = layout.family, (stages.memory, least, place, layout, stages)
        self.smallest[family] = min(one, self.smallest.get(family, one), key=lambda f: f[:3])

    def fastest(self) -> list[Prediction]:
        """Return predictions of the fastest layouts of each family, the fastest of all first."""
        found = [
            each
            for known in self.by_family.values()
            for number, each in enumerate(known[:_KEPT])
            if number == 0 or each[0].seconds <= _SLOW * self._fastest
        ]
        found.sort(key=lambda each: (each[0].seconds, each[0].memory, each[1]))
        return [prediction for prediction, _ in found]


def least_of_pipeline(
    layers: float, repeated: float, longest: float, stages: int, micro_batches: int, waits: bool
) -> float:
    """Return a lower bound of the seconds of a step's passes, for every split into stages.

    Let stage s compute t_s seconds for each of m micro-batches, forward and backward. With gpipe
    and 1f1b, a step takes at least m t_s + (t_0 + ... + t_{s-1}) for each s: stage s waits for the
    first micro-batch to pass the stages before it, and these compute the last backward passes after
    stage s. For a given sum T of all t_s, the largest of these bounds is smallest if all are equal,
    which means t_{s+1} = (1 - 1/m) t_s. It is then T / (1 - (1 - 1/m)^S) for S stages.

    The slowest stage computes for at least m (T + R) / S seconds if forward passes of R seconds are
    repeated, and for m times the seconds of its longest layer. These bounds hold even if stages
    need not wait (``waits`` is False). The largest bound is returned.

    Args:
        layers: seconds of all layers for a micro-batch, forward and backward.
        repeated: seconds of all repeated forward passes for a micro-batch.
        longest: seconds of the slowest layer or stage, with its repeated forward pass.
        stages: number of stages.
        micro_batches: number of micro-batches.
        waits: True if a micro-batch goes through the stages one after another, forward and then
            backward, and nothing is computed for it after that. It is False for zb-h1, where a
            stage computes gradients of weights last, and for networks that are no chain of layers.
    """
    spread = layers / (1 - (1 - 1 / micro_batches) ** stages) if waits else 0.0
    return max(spread, micro_batches * (layers + repeated) / stages, micro_batches * longest)


class Planner:
    """Planner that predicts how long a training step takes in each layout, and finds the best ones.

    Args:
        work: the training step.
        machine: the machine on which the ranks run.
        limit: bytes that a rank may take; the machine's memory by default.
    """

    def __init__(self, work: Work, machine: Machine, limit: float | None = None):
        self.work, self.machine, self.grids = work, machine, TileGrids(work)
        self._memory = RankMemory(self.grids, machine)
        self.limit = machine.memory if limit is None else limit
        self._alone = lru_cache(None)(self._find_alone)
        self._seconds_on = lru_cache(None)(self._find_seconds_on)
        self._fastest_split = lru_cache(None)(self._find_fastest_split)
        self._cut_on = lru_cache(None)(self._find_cut)
        self._partition = lru_cache(None)(lambda balance: work.partitioner.cut(balance))
        self._stage_seconds = lru_cache(_MESHES)(self._find_stage_seconds)

    def on(self, machine: Machine, costs: Costs, limit: float | None = None) -> Planner:
        """Return a planner of the same step on another machine.

        The new planner shares the cached results that do not depend on the machine.

        Args:
            machine: the other machine.
            costs: the costs of a micro-batch of whole images on the other machine.
            limit: bytes that a rank may take; the machine's memory by default.
        """
        other = Planner(replace(self.work, costs=costs), machine, limit)
        other.grids, other._partition = self.grids, self._partition
        other._memory = self._memory.on(machine)
        return other

    def best(self, ranks: int, sizes: Collection[tuple[int, ...]] = ()) -> list[Prediction]:
        """Return predictions for layouts of ``ranks`` ranks, the fastest first.

        A family is a set of mesh axes that are split (:attr:`MeshLayout.family`). The result has
        the three fastest layouts of each family that fit the memory limit. Of layouts that take
        more than 25 % longer than the fastest layout of all, it has only the fastest of a family.
        A layout that recomputes activations is considered only if the same layout without
        recomputation does not fit. If no layout fits, the result has, for each family, the layout
        that takes the least memory.

        Args:
            ranks: the number of ranks.
            sizes: further sizes of images, which the grid of tiles must be able to cut too.
        """
        # A candidate returns to the queue with a better bound each time it is looked at: first the
        # bound of any tile of its size, then of its tile, of the fastest split, and of its stages.
        found = _Found()
        queue = [
            _Candidate(self._least_of_any(layout), place, layout)
            for place, layout in enumerate(self.candidates(ranks, sizes))
            if layout.recompute == "never"
        ]
        heapify(queue)

        def add_again(one: _Candidate) -> None:
            if one.layout.recompute == "never":
                again = replace(one.layout, recompute="always")
                heappush(queue, _Candidate(self._least_of_any(again), one.place + 1, again))

        while queue:
            one = heappop(queue)
            layout = one.layout
            if not found.wants(layout.family, one.least):
                continue
            if one.stages is not None:
                found.add(self._predicted(layout, one.stages), one.place)
            elif layout.stages > 1 and self.least_memory(layout, one.tile) > self.limit:
                add_again(one)
            elif one.tile is None:
                tile = self.grids.tile_work(layout.tiles, layout.exchange).sizes
                heappush(queue, one._replace(least=self.least_seconds(layout), tile=tile))
            elif layout.stages > 1 and not one.split:
                heappush(queue, one._replace(least=self._least_of_split(layout), split=True))
            else:
                try:
                    stages = self._cut(layout)
                except ValueError:
                    add_again(one)  # no split into stages fits, or stages would share a weight
                    continue
                least = self._least_of(layout, stages)
                if stages.memory <= self.limit:
                    heappush(queue, one._replace(least=least, stages=stages))
                else:
                    found.add_too_large(layout, stages, least, one.place)
                    add_again(one)
        return found.fastest() or sorted(
            (self._predicted(layout, stages) for *_, layout, stages in found.smallest.values()),
            key=lambda p: (p.seconds, p.memory),
        )

    def front(
        self, ranks: int, sizes: Collection[tuple[int, ...]] = ()
    ) -> Iterator[list[Prediction]]:
        """Yield the result of :meth:`best` for smaller and smaller memory limits.

        The first limit is that of this planner. Each further limit is 20 % below the memory of the
        fastest layout in the result before. The search ends when no layout fits the limit.

        Args:
            ranks: the number of ranks.
            sizes: further sizes of images, which the grid of tiles must be able to cut too.
        """
        planner = self
        while (found := planner.best(ranks, sizes)) and found[0].memory <= planner.limit:
            yield found
            planner = self.on(self.machine, self.work.costs, _LESS * found[0].memory)

    def candidates(
        self, ranks: int, sizes: Collection[tuple[int, ...]] = ()
    ) -> Iterator[MeshLayout]:
        """Yield all layouts of ``ranks`` ranks in which the step can be computed.

        A layout that recomputes activations follows the same layout without recomputation.

        Args:
            ranks: the number of ranks.
            sizes: further sizes of images, which the grid of tiles must be able to cut too.
        """
        work, micro = self.work, self.work.batch // self.work.images
        for samples in _divisors(math.gcd(ranks, micro)):
            if work.samples not in (None, samples):
                continue
            for stages in _divisors(ranks // samples):
                if stages > len(work.costs.layers):
                    continue
                for grid in self.grids.fitting(ranks // samples // stages, sizes):
                    for exchange in EXCHANGES if grid.volume > 1 else EXCHANGES[:1]:
                        for schedule in self._schedules(stages):
                            for recompute in ("never", "always"):
                                yield MeshLayout(
                                    samples,
                                    grid,
                                    stages,
                                    exchange,
                                    micro // samples,
                                    schedule,
                                    recompute,
                                )

    def _schedules(self, stages: int) -> tuple[str, ...]:
        if stages == 1:
            return ("1f1b",)
        return ("gpipe", "1f1b", "zb-h1") if self.work.loss.linear else ("gpipe",)

    def _layers_on_tile(self, layout: MeshLayout) -> _LayersOnTile:
        return _LayersOnTile(
            self.grids.tile_work(layout.tiles, layout.exchange),
            layout.tiles.volume * layout.stages,
            self._norm_seconds(layout),
        )

    def _find_seconds_on(self, layers: _LayersOnTile) -> Seconds:
        """Return the seconds of the layers on the slowest tile, including the time of messages."""
        each = self._alone(layers.tile) + self._halos(layers) + self._norms(layers)
        return Seconds(*each.T.tolist())

    def _find_alone(self, tile: TileWork) -> np.ndarray:
        """Return the seconds of each layer without exchanges: (n, 2), forward and backward."""
        costs = self.work.costs
        passes = np.array([costs.forward, costs.backward]).T
        shares, copies = np.array(tile.shares)[:, None], np.array(tile.copies)
        calls = self.machine.call * (passes > 0)
        return shares * passes + calls + copies / self.machine.traffic

    def _halos(self, layers: _LayersOnTile) -> np.ndarray:
        """Return the seconds of halo exchanges before each layer: (n, 2), forward and backward."""
        machine, tile = self.machine, layers.tile
        found = np.zeros((len(tile.halos), 2))
        for number, ((size, count), owned) in enumerate(zip(tile.halos, tile.owned)):
            if count:
                message = machine.message(layers.neighbours, size, count)
                there, back = exchange_seconds(machine, owned, size)
                found[number] = there + message, back + message
        return found

    def _norms(self, layers: _LayersOnTile) -> np.ndarray:
        """Return the seconds of the layers' shared statistics: (n, 2), forward and backward."""
        found = np.zeros((len(layers.tile.shares), 2))
        for number in self.work.norms if layers.norm else ():
            size = layers.tile.shares[number] * self.work.bytes_of(number + 1)
            there, back = norm_seconds(self.machine, size)
            found[number] = there + layers.norm, back + layers.norm
        return found

    def least_seconds(self, layout: MeshLayout) -> float:
        """Return a lower bound of the seconds that a step takes in a layout.

        The bound holds for every split into stages (:func:`least_of_pipeline`).
        """
        forward, backward = self._seconds_on(self._layers_on_tile(layout))
        passes = _forward_passes(layout)
        longest = max(passes * f + b for f, b in zip(forward, backward))
        return self._least(layout, sum(forward), sum(backward), longest)

    def _least_of_any(self, layout: MeshLayout) -> float:
        """Return a rough lower bound of the seconds of a step, without exact sizes of tiles.

        The bound assumes the smallest possible size for the slowest tile of the layout's grid, and
        that halo messages take no time.
        """
        share, norm = self.grids.least_share(layout.tiles), self._norm_seconds(layout)
        forward, backward, longest = self._totals
        there, back = (self.machine.call * count for count in self.work.costs.calls)
        norms = len(self.work.norms) * (norm + self.machine.exchange) if norm else 0.0
        return self._least(
            layout,
            share * forward + there + norms,
            share * backward + back + norms,
            share * longest[_forward_passes(layout)],
        )

    def _least_of_split(self, layout: MeshLayout) -> float:
        """Return a lower bound of the seconds of a step from its fastest split into stages.

        The memory limit is ignored: the slowest stage of this split bounds that of all splits.
        """
        on_tile = self._layers_on_tile(layout)
        forward, backward = self._seconds_on(on_tile)
        _, slowest = self._fastest_split(on_tile, layout.stages, layout.recompute)
        return self._least(layout, sum(forward), sum(backward), slowest)

    @cached_property
    def _totals(self) -> tuple[float, float, dict[int, float]]:
        """Seconds for a micro-batch of whole images: forward, backward, and of the slowest layer.

        The first two are sums over all layers. The third is a dict, whose key is the number of
        forward passes that the layer runs: 2 with recomputation, else 1.
        """
        costs = self.work.costs
        longest = {n: max(n * f + b for f, b in zip(costs.forward, costs.backward)) for n in (1, 2)}
        return sum(costs.forward), sum(costs.backward), longest

    def _least(self, layout: MeshLayout, forward: float, backward: float, longest: float) -> float:
        """Return a lower bound of the seconds of a step, given the seconds of its passes.

        Args:
            layout: the layout.
            forward, backward: seconds of the passes of all layers for a micro-batch.
            longest: seconds of the slowest layer or stage, with its repeated forward pass.
        """
        most = max(self.work.parameters / layout.stages, self._most_parameters)
        pipeline = least_of_pipeline(
            forward + backward,
            (_forward_passes(layout) - 1) * forward,
            longest,
            layout.stages,
            layout.micro_batches,
            self.work.chained and not splits(layout.schedule),
        )
        return _ROUNDED * (pipeline + sum(self._after(layout, self.work.costs.weight_bytes * most)))

    def _least_of(self, layout: MeshLayout, stages: _Stages) -> float:
        """Return a lower bound of the seconds of a step in a layout with these stages."""
        after = sum(self._after(layout, stages.weights))
        return _ROUNDED * (stages.least_seconds + after)

    @cached_property
    def _most_parameters(self) -> int:
        """Number of parameters of the layer that has the most parameters."""
        return max(layer.parameters for layer in self.work.costs.layers)

    def _after(self, layout: MeshLayout, weights: float) -> tuple[float, float]:
        """Return the seconds of the two tasks that follow the last backward pass of a step.

        Args:
            layout: the layout.
            weights: bytes of the weights of a stage.

        Returns:
            Seconds in which gradients are summed over all ranks that hold the same weights, and
            seconds in which the optimizer updates the weights.
        """
        return (
            self.machine.sum(layout.samples * layout.tiles.volume, weights),
            weights * (3 + 2 * self.work.copies) / self.machine.traffic,
        )

    def seconds_besides_passes(self, layout: MeshLayout) -> float:
        """Return the seconds that a step with a single stage takes besides computing its passes.

        In this time the statistics of norms and the gradients are summed over ranks, and weights
        are updated.
        """
        weights = self.work.costs.weight_bytes * self.work.parameters
        norms = 2 * layout.micro_batches * len(self.work.norms) * self._norm_seconds(layout)
        return norms + sum(self._after(layout, weights))

    def least_memory(self, layout: MeshLayout, tile: TileSizes | None = None) -> float:
        """Return a lower bound of the peak memory, in bytes, of the rank that takes the most.

        Args:
            layout: the layout.
            tile: the sizes of tensors on a tile, the slowest one of the layout's grid. By default,
                lower bounds of these sizes are used.
        """
        share = 1.0
        if tile is None:
            tile, share = self.grids.whole_image, self.grids.least_share(layout.tiles)
        return self._memory.least(layout.stages, self._policy(layout), tile, share)

    def _policy(self, layout: MeshLayout) -> Policy:
        return Policy(layout.micro_batches, layout.schedule, layout.recompute, self.work.copies)

    def predict(self, layout: MeshLayout) -> Prediction:
        """Return the predicted time and memory of a step in a layout.

        Raises:
            ValueError: no split of the network into the layout's stages exists or fits the limit.
        """
        return self._predicted(layout, self._cut(layout))

    def spans(self, layout: MeshLayout) -> list[Span]:
        """Return the predicted timeline of a step on the ranks of one pipeline, as spans of time.

        Raises:
            ValueError: no split of the network into the layout's stages exists or fits the limit.
        """
        stages = self._cut(layout)
        found = list(stages.simulation().spans)
        start = max(span.end for span in found)
        for kind, seconds in zip(("reduce", "update"), self._after(layout, stages.weights)):
            if seconds:
                ends = (start, start + seconds)
                found += [Span(rank, kind, kind, *ends) for rank in range(layout.stages)]
            start += seconds
        return found

    def _cut(self, layout: MeshLayout) -> _Stages:
        """Return the fastest split into the layout's stages that fits the memory limit.

        A layout with one stage has only one split, which is returned even if it does not fit.

        Raises:
            ValueError: no split of the network into the layout's stages exists or fits the limit.
        """
        found = self._cut_on(self._layers_on_tile(layout), layout.stages, self._policy(layout))
        if found is None:
            raise ValueError(
                f"no split into {layout.stages} stages fits {self.limit:.3g} B of memory a rank: "
                "use more stages or tiles, or a larger limit"
            )
        return found

    def _find_cut(self, on_tile: _LayersOnTile, stages: int, policy: Policy) -> _Stages | None:
        """Return the fastest split that fits the memory limit, or None if no split fits.

        A single stage is returned even if it does not fit.
        """
        tile, balance = on_tile.tile.sizes, [len(self.work.costs.layers)]
        if stages > 1:

            def bytes_of(stage: int, a: int, b: int) -> float:
                return self._memory.of_stage(range(a, b), stage, stages, policy, tile)

            table = self._stage_seconds(on_tile, policy.recompute)
            fastest, _ = self._fastest_split(on_tile, stages, policy.recompute)
            least = self._memory.least_of_stages(stages, policy, tile)
            found = split_within(table, stages, bytes_of, self.limit, least, fastest)
            if found is None:
                return None
            balance = found
        partition = self._partition(tuple(balance))
        share = max(on_tile.tile.shares)
        travels = tuple(
            self.machine.message(on_tile.neighbours, share * self.work.bytes_of(edge.map))
            for edge in partition.edges
        )
        memory = self._memory.peak(partition, policy, tile)
        seconds = self._seconds_on(on_tile)
        return _Stages(self.work.costs, seconds, policy, partition, travels, memory)

    def _find_fastest_split(
        self, on_tile: _LayersOnTile, stages: int, recompute: Recompute
    ) -> tuple[list[int], float]:
        """Return the fastest split into stages, without a memory limit.

        Returns:
            The number of layers of each stage, and the seconds of the slowest stage.
        """
        table = self._stage_seconds(on_tile, recompute)
        balance = fastest_split(table, stages)
        starts = starts_of(balance)
        return balance, max(float(table[a, a + n]) for a, n in zip(starts, balance))

    def _find_stage_seconds(self, on_tile: _LayersOnTile, recompute: Recompute) -> np.ndarray:
        """Return the seconds of all possible stages: entry [a, b] is a stage of layers a..b-1.

        The table (n + 1, n + 1) holds for every stage and schedule, because the search only has
        layouts that recompute all micro-batches or none.
        """
        seconds, policy = self._seconds_on(on_tile), Policy(recompute=recompute)
        return stage_seconds(seconds, policy, 1)[0]

    def _predicted(self, layout: MeshLayout, found: _Stages) -> Prediction:
        """Return the prediction for a layout whose stages are known."""
        on_tile = self._layers_on_tile(layout)
        tile = on_tile.tile
        span, busiest = found.simulated
        m, costs = layout.micro_batches, self.work.costs
        passes = (sum(costs.forward) + sum(costs.backward)) / layout.tiles.volume
        once = m * (passes + self.machine.call * sum(costs.calls)) / layout.stages
        computed = m * sum(map(sum, self._alone(tile))) / layout.stages
        halos, norms = (
            m / layout.stages * sum(map(sum, each))
            for each in (self._halos(on_tile), self._norms(on_tile))
        )
        parts = {
            "computing": min(once, computed),
            "cells computed twice": max(0.0, computed - once),
            "halo messages": halos,
            "statistics of norms": norms,
            "computed again": max(0.0, busiest - computed - halos - norms)
            if layout.recompute != "never"
            else 0.0,
        }
        parts["stages wait"] = max(0.0, span - sum(parts.values()))
        parts["sum of gradients"], parts["update"] = self._after(layout, found.weights)
        plain = {name: float(seconds) for name, seconds in parts.items()}
        return Prediction(layout, plain, found.memory, tuple(map(len, found.partition.ranges)))

    def _norm_seconds(self, layout: MeshLayout) -> float:
        """Return the seconds that the message of one norm takes in a forward or backward pass.

        The result is 0 if norms need no message.
        """
        ranks = layout.tiles.volume * (layout.samples if self.work.step_norms else 1)
        if ranks == 1 or not self.work.norms:
            return 0.0
        return self.machine.sum(ranks, MOMENTS * 64)


_LESS = 0.8  # share of a layout's memory that is the next limit of Planner.front
_MESHES = 64  # number of meshes whose tables of stages are kept
_KEPT = 3  # number of layouts of each family that are returned
# Layouts that take longer than the fastest one by this factor are slow: one of a family is enough.
_SLOW = 1.25
# A bound is made smaller by this factor, so that rounding does not make it larger than the seconds.
_ROUNDED = 1 - 1e-9


def _forward_passes(layout: MeshLayout) -> int:
    """Return how often a layout computes each forward pass: 2 with recomputation, else 1."""
    return 2 if layout.recompute == "always" else 1


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
