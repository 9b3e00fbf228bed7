"""Predict the time and the memory of a step in each layout, and find the best layouts.

All layouts that are compared compute the same step. They have the number of images in a step and
in a micro-batch that the config sets. They differ in what a rank computes, in what it sends, and in
how long it waits::

    seconds of a step =  micro-batches x (layers of a rank, with the cells computed twice)
                       + halo messages + statistics of norms + bubble of the pipeline
                       + sum of gradients + update of the weights

:mod:`distseg.planning.cost` gives the times of the layers on the machine
(:mod:`distseg.planning.machine`). They are scaled to the number of cells that the slowest tile
computes. A pipeline is simulated with the same operations that it will run. The prediction leaves
out the reading of images, and assumes that communication never overlaps with computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from torch import nn

from distseg.config.sizes import Size
from distseg.layers.graph import graph_of
from distseg.models.network import calls_of
from distseg.planning.balance import fastest_split
from distseg.planning.cost import Costs
from distseg.planning.machine import Machine
from distseg.planning.pass_times import Modelled, StagePasses
from distseg.planning.stage_memory import (
    WEIGHT_BYTES,
    Policy,
    Ranges,
    largest_holdings,
    peaks,
    ranges_of,
    stage_seconds,
)
from distseg.runtime.partition import Partition
from distseg.runtime.schedule import orders
from distseg.tiling.layout import Layout
from distseg.tiling.tile import ReceptiveField, check_grid, factorings, split, tiles, window

EXCHANGES = ("all", "level", "1")
# How many grids with the same number of tiles are tried. The first ones have the smallest windows.
_GRIDS = 2
# Bytes of the moments (count, mean, sum of squares) of one channel in float64.
_MOMENTS = 3 * 8


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
    recompute: str

    @property
    def ranks(self) -> int:
        return self.samples * self.tiles.volume * self.stages

    @property
    def family(self) -> str:
        """The mesh axes that have more than one rank, such as ``samples x tiles``."""
        axes = [
            name
            for name, number in (
                ("samples", self.samples),
                ("tiles", self.tiles.volume),
                ("stages", self.stages),
            )
            if number > 1
        ]
        return " x ".join(axes) or "one rank"

    def values(self) -> dict[str, Any]:
        """Return the values of all settings that decide about the layout, by name.

        Settings that belong to another layout only, such as ``pipeline.balance``, get their
        default.
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
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """The name of the largest part of the step that is not ``computing``.

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
        norms: indices of the layers with statistics over the image.
        copies: values that the optimizer keeps per weight.
        linear: True if the loss gradient follows from the labels alone
            (:attr:`distseg.layers.loss.Loss.linear`), so that backward passes need not wait.
        step_norms: True if batch norm takes its statistics over the images of all sample groups.
        samples: number of sample groups if another number would change the result; else None.
    """

    model: nn.Module
    costs: Costs
    image: tuple[int, ...]
    images: int
    batch: int
    reach: ReceptiveField
    norms: tuple[int, ...]
    copies: int
    linear: bool
    step_norms: bool = False
    samples: int | None = None

    @cached_property
    def graph(self):
        return graph_of(self.model)

    @cached_property
    def ranges(self) -> Ranges:
        return ranges_of(self.costs)

    @cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.costs.layers)


@dataclass(frozen=True)
class TileWork:
    """Work of the slowest tile of a grid for a micro-batch.

    Attributes:
        shares: for each layer, the number of cells that the tile computes, as a fraction of the
            cells of the whole feature map.
        halos: for each layer, (bytes, number) of the halo messages before its forward pass.
    """

    shares: tuple[float, ...]
    halos: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class _Stages:
    """Layout whose layers are cut into stages.

    Attributes:
        layout: the layout.
        costs: the costs of the layers on the slowest tile, messages included.
        policy: schedule, recomputation and optimizer.
        partition: the stages.
        memory: bytes that the rank with the highest peak takes.
    """

    layout: MeshLayout
    costs: Costs
    policy: Policy
    partition: Partition
    memory: float

    @property
    def least_seconds(self) -> float:
        """Lower bound of the seconds of a step with these stages.

        A stage computes all micro-batches. Before its first pass, a micro-batch goes forward
        through all earlier stages. After its last pass, a micro-batch goes back through them,
        except with zb-h1, where the last pass may compute gradients of weights.
        """
        m, stages, least, before = self.layout.micro_batches, self.layout.stages, 0.0, 0.0
        goes_back = self.layout.schedule != "zb-h1"
        for stage, layers in enumerate(self.partition.ranges):
            forward = sum(self.costs.forward[layers.start : layers.stop])
            backward = sum(self.costs.backward[layers.start : layers.stop])
            passes = self.policy.forward_passes(stage, stages)
            least = max(least, before + m * (passes * forward + backward))
            before += forward + goes_back * backward
        return least


@dataclass(order=True)
class _Candidate:
    """Layout in the queue of the search; the least one is tried first.

    Attributes:
        least: lower bound of the seconds of a step.
        again: True if activations are computed again, which is tried last.
        layout: the layout.
        of_tile: True if ``least`` follows from the slowest tile of the layout's grid.
        stages: the stages, if ``least`` follows from them.
    """

    least: float
    again: bool = field(init=False)
    layout: MeshLayout = field(compare=False)
    of_tile: bool = field(default=False, compare=False)
    stages: _Stages | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.again = self.layout.recompute == "always"


def least_of_pipeline(
    layers: float, longest: float, stages: int, micro_batches: int, schedule: str
) -> float:
    """Return a lower bound of the seconds of a step, for every cut into stages.

    Let stage s compute t_s seconds for each of m micro-batches. With gpipe and 1f1b the step takes
    at least the largest m t_s + (t_0 + ... + t_{s-1}), because a micro-batch goes through the
    stages before s at first, and another one goes back through them at last. For a given sum T of
    all t_s, the largest one is least if all are equal: t_{s+1} = (1 - 1/m) t_s. It is then
    T / (1 - (1 - 1/m)^S) for S stages. With zb-h1, where the last pass of a stage may compute
    gradients of weights, the bound is m T / S. The stage with the slowest layer computes this layer
    m times, which is another bound.

    Args:
        layers: seconds of all layers for a micro-batch, forward and backward.
        longest: seconds of the slowest layer.
        stages: number of stages.
        micro_batches: number of micro-batches.
        schedule: gpipe, 1f1b or zb-h1.
    """
    if schedule == "zb-h1":
        spread = layers * micro_batches / stages
    else:
        spread = layers / (1 - (1 - 1 / micro_batches) ** stages)
    return max(spread, micro_batches * longest)


class Planner:
    """Planner that predicts one step on one machine in different layouts.

    Args:
        work: the step.
        machine: the machine.
        limit: bytes that a rank may take; the machine's memory by default.
    """

    def __init__(self, work: Work, machine: Machine, limit: float | None = None):
        self.work, self.machine = work, machine
        self.limit = machine.memory if limit is None else limit
        self.tile_work = lru_cache(None)(self._tile_work)
        self._peaks_of = lru_cache(None)(lambda stages, policy: peaks(work.ranges, stages, policy))

    def on(self, machine: Machine, costs: Costs, limit: float | None = None) -> Planner:
        """Return a planner of the same step on another machine.

        The new planner shares the cached results that do not depend on the machine.

        Args:
            machine: the other machine.
            costs: the costs of a micro-batch of whole images on the other machine.
            limit: bytes that a rank may take; the machine's memory by default.
        """
        other = Planner(replace(self.work, costs=costs), machine, limit)
        other.tile_work, other._peaks_of = self.tile_work, self._peaks_of
        return other

    def best(self, ranks: int) -> list[Prediction]:
        """Return predictions for layouts of ``ranks`` ranks, the fastest first.

        A family is a set of mesh axes that are split (:attr:`MeshLayout.family`). The result has
        the fastest layouts of each family that fit the memory limit. A family that takes more than
        25 % longer than the fastest layout contributes only one. A layout that recomputes
        activations is considered only if the same layout does not fit without that. If no layout
        fits, the result has the layout of each family that takes the least memory.
        """
        # A candidate returns to the queue with a better bound each time it is looked at: first the
        # bound of any tile of its size, then of its tile, then of its stages.
        fitting: dict[str, list[Prediction]] = {}
        too_large: dict[str, _Stages] = {}
        fits: set[MeshLayout] = set()
        fastest = math.inf
        queue = [_Candidate(self._least_of_any(one), one) for one in self.candidates(ranks)]
        heapify(queue)
        while queue:
            candidate = heappop(queue)
            least, layout = candidate.least, candidate.layout
            known = fitting.setdefault(layout.family, [])
            wanted = 1 if least > 1.25 * fastest else _KEPT
            if len(known) >= wanted and least > known[wanted - 1].seconds:
                continue
            if layout.recompute == "always" and replace(layout, recompute="never") in fits:
                continue
            if layout.stages > 1 and self._least_memory(layout) > self.limit:
                continue
            if not candidate.of_tile:
                heappush(queue, _Candidate(self.least_seconds(layout), layout, True))
                continue
            if candidate.stages is None:
                try:
                    found = self._cut(layout)
                except ValueError:
                    continue  # no split into stages fits, or stages would share a weight
                if found.memory <= self.limit:
                    fits.add(layout)
                    least = max(least, found.least_seconds)
                    heappush(queue, _Candidate(least, layout, True, found))
                elif (
                    layout.family not in too_large or found.memory < too_large[layout.family].memory
                ):
                    too_large[layout.family] = found
                continue
            known.append(self._predicted(candidate.stages))
            known.sort(key=lambda p: p.seconds)
            fastest = min(fastest, known[0].seconds)
        every = [p for known in fitting.values() for p in known]
        every = every or [self._predicted(found) for found in too_large.values()]
        return sorted(every, key=lambda p: (p.seconds, p.memory))

    def candidates(self, ranks: int) -> Iterator[MeshLayout]:
        """Yield all layouts of ``ranks`` ranks in which the step could be computed."""
        work, micro = self.work, self.work.batch // self.work.images
        for samples in _divisors(math.gcd(ranks, micro)):
            if work.samples not in (None, samples):
                continue
            for stages in _divisors(ranks // samples):
                if stages > len(work.costs.layers):
                    continue
                for grid in self._grids(ranks // samples // stages):
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
        return ("gpipe", "1f1b", "zb-h1") if self.work.linear else ("gpipe",)

    def _grids(self, count: int) -> list[Size]:
        """Return the few best grids of ``count`` tiles that fit the image, best first.

        The best grid is the one whose largest window has the fewest cells.
        """
        found = []
        for grid in factorings(count, len(self.work.image)):
            try:
                check_grid(self.work.image, grid, self.work.reach.stride)
            except ValueError:
                continue
            found.append(Size(grid))
        found.sort(key=lambda grid: self.tile_work(grid, "all").shares[0])
        return found[:_GRIDS]

    def _tile_work(self, grid: Size, exchange: str) -> TileWork:
        work, layers = self.work, len(self.work.costs.layers)
        none = ((0.0, 0),) * layers
        if grid.volume == 1:
            return TileWork((1.0,) * layers, none)
        if exchange == "all":
            largest = max(
                window(tile, work.image, work.reach).pixels
                for tile in _some_tiles(work.image, grid, work.reach.stride)
            )
            return TileWork((largest / math.prod(work.image),) * layers, none)
        borders = [
            (0, *(b for _, b in split(n, g, s)))
            for n, g, s in zip(work.image, grid, work.reach.stride)
        ]
        layout = Layout(work.graph, work.image, borders, exchange)
        cell = tuple(_largest(b) for b in borders)
        shares, halos = [], list(none)
        for number in range(layers):
            view = layout.part(number, cell)
            shares.append(view.output.pixels / max(1, math.prod(layout.sizes[number + 1])))
            if number in layout.points:
                source = work.graph[number].first
                had = view.input.intersection(layout.computed(source, cell)).pixels
                cells = max(1, math.prod(layout.sizes[source]))
                size = self._bytes(source) / cells * max(0, view.input.pixels - had)
                halos[number] = (size, math.prod(min(3, g) for g in grid) - 1)
        return TileWork(tuple(shares), tuple(halos))

    def _bytes(self, source: int) -> float:
        """Return the bytes of a micro-batch's feature map number ``source``; map 0 is the image."""
        costs = self.work.costs
        return costs.layers[source - 1].output if source else costs.sizes[0]

    def _costs_on(self, layout: MeshLayout) -> Costs:
        """Return the costs of the layers on the slowest tile, including the time of messages.

        Only the seconds belong to the tile. The bytes remain the bytes of whole images.
        """
        tile = self.tile_work(layout.tiles, layout.exchange)
        besides = self._messages(layout, tile)
        layers = [
            replace(
                layer, forward=share * layer.forward + more, backward=share * layer.backward + more
            )
            for layer, share, more in zip(self.work.costs.layers, tile.shares, besides)
        ]
        return replace(self.work.costs, layers=tuple(layers))

    def _messages(self, layout: MeshLayout, tile: TileWork) -> list[float]:
        """Return the seconds that a pass of each layer takes besides its computation.

        They are the time to call the layer, its halo messages and the statistics of its norm.
        """
        neighbours, norm = layout.tiles.volume * layout.stages, self._norm_seconds(layout)
        return [
            self.machine.call
            + norm * (number in self.work.norms)
            + (self.machine.message(neighbours, size, count) if count else 0.0)
            for number, (size, count) in enumerate(tile.halos)
        ]

    def least_seconds(self, layout: MeshLayout) -> float:
        """Return a lower bound of the seconds that a step takes in a layout.

        The bound holds for every cut into stages (:func:`least_of_pipeline`).
        """
        tile = self.tile_work(layout.tiles, layout.exchange)
        return self._least(layout, tile.shares, self._messages(layout, tile))

    def _least_of_any(self, layout: MeshLayout) -> float:
        """Return a lower bound of the seconds of a step that takes no time to compute.

        It assumes that the slowest tile of the grid is as small as the smallest tile can be, and
        that messages take no time.
        """
        layers = len(self.work.costs.layers)
        share = self._least_share(layout.tiles)
        return self._least(layout, (share,) * layers, (self.machine.call,) * layers)

    def _least(
        self, layout: MeshLayout, shares: Sequence[float], besides: Sequence[float]
    ) -> float:
        again = 1 if layout.recompute == "always" and layout.stages == 1 else 0
        seconds = [
            share * ((1 + again) * layer.forward + layer.backward) + (2 + again) * more
            for layer, share, more in zip(self.work.costs.layers, shares, besides)
        ]
        return least_of_pipeline(
            sum(seconds), max(seconds), layout.stages, layout.micro_batches, layout.schedule
        )

    def _least_share(self, grid: Size) -> float:
        """Return a lower bound of the cells of a grid's slowest tile, as a fraction of the image's.

        The bound holds for the feature maps of all layers.
        """
        share = 1.0
        for n, g, s in zip(self.work.image, grid, self.work.reach.stride):
            share *= 1.0 if g == 1 else -(-n // s) // g * s / (n + s)
        return share

    def _least_memory(self, layout: MeshLayout) -> float:
        """Return a lower bound of the bytes of the rank with the highest peak.

        Let stage s hold all activations of h_s micro-batches at once. If no stage takes more than
        M bytes, stage s has at most M / h_s bytes of activations for a micro-batch. All stages
        together have A bytes, so M is at least A / (1/h_0 + ... + 1/h_{S-1}).
        """
        held = [
            max(held.full for held in largest_holdings(stage, layout.stages, self._policy(layout)))
            for stage in range(layout.stages)
        ]
        whole = self._least_share(layout.tiles) * self.work.ranges.full[0, -1]
        return self.machine.base + whole / sum(1 / max(1, h) for h in held)

    def _policy(self, layout: MeshLayout) -> Policy:
        return Policy(layout.micro_batches, layout.schedule, layout.recompute, self.work.copies)

    def _layers(self, shares: Sequence[float]) -> float:
        """Return the seconds of all layers on a tile for a micro-batch, without messages.

        Args:
            shares: for each layer, the cells of the tile as a fraction of the whole feature map.
        """
        return sum(
            share * (layer.forward + layer.backward) + 2 * self.machine.call
            for layer, share in zip(self.work.costs.layers, shares)
        )

    def predict(self, layout: MeshLayout) -> Prediction:
        """Return the predicted time and memory of a step in a layout.

        Raises:
            ValueError: the network cannot be cut into the stages of the layout.
        """
        return self._predicted(self._cut(layout))

    def _cut(self, layout: MeshLayout) -> _Stages:
        """Return the fastest stages for a layout, with the memory that they take.

        Raises:
            ValueError: the network cannot be cut into the stages of the layout.
        """
        work, costs = self.work, self._costs_on(layout)
        tile = self.tile_work(layout.tiles, layout.exchange)
        policy = self._policy(layout)
        held = self._peaks(layout.stages, policy, tile)
        if layout.stages == 1:
            balance = [len(costs.layers)]
        else:
            balance = fastest_split(
                stage_seconds(costs, work.ranges, policy, layout.stages),
                layout.stages,
                held,
                max(0.0, self.limit - self.machine.base),
            )
        partition = Partition.from_balance(calls_of(work.model), balance)
        most = max(held[s, part.start, part.stop] for s, part in enumerate(partition.ranges))
        return _Stages(layout, costs, policy, partition, float(self.machine.base + most))

    def _predicted(self, found: _Stages) -> Prediction:
        """Return the prediction for a layout whose stages are known."""
        work, machine, layout = self.work, self.machine, found.layout
        tile = self.tile_work(layout.tiles, layout.exchange)
        neighbours = layout.tiles.volume * layout.stages
        span, busiest = self._pipeline(found)
        m, ideal = layout.micro_batches, (1 / layout.tiles.volume,) * len(tile.shares)
        once = m * self._layers(ideal) / layout.stages
        computed = m * self._layers(tile.shares) / layout.stages
        halos = (
            2
            * m
            / layout.stages
            * sum(machine.message(neighbours, size, n) for size, n in tile.halos if n)
        )
        norms = 2 * m / layout.stages * self._norm_seconds(layout) * len(work.norms)
        weights = max(
            WEIGHT_BYTES * sum(found.costs.layers[n].parameters for n in part)
            for part in found.partition.ranges
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
        parts["sum of gradients"] = machine.sum(layout.samples * layout.tiles.volume, weights)
        parts["update"] = weights * (3 + 2 * work.copies) / machine.traffic
        plain = {name: float(seconds) for name, seconds in parts.items()}
        return Prediction(layout, plain, found.memory, tuple(map(len, found.partition.ranges)))

    def _norm_seconds(self, layout: MeshLayout) -> float:
        """Return the seconds that the message of one norm takes in a forward or backward pass.

        They are 0 if no message is needed.
        """
        ranks = layout.tiles.volume * (layout.samples if self.work.step_norms else 1)
        if ranks == 1 or not self.work.norms:
            return 0.0
        return self.machine.sum(ranks, _MOMENTS * 64)

    def _pipeline(self, found: _Stages) -> tuple[float, float]:
        """Simulate the pipeline of a layout.

        Returns:
            The seconds from the start of the first pass to the end of the last one, and the seconds
            that the busiest rank computes.
        """
        layout, costs = found.layout, found.costs
        if layout.stages == 1:
            passes = found.policy.forward_passes(0, 1)
            busy = layout.micro_batches * (passes * sum(costs.forward) + sum(costs.backward))
            return busy, busy
        passes_of = StagePasses(
            Modelled(costs, 1),
            found.partition,
            orders(layout.schedule, found.partition.placement, layout.micro_batches),
            layout.recompute,
            1,
        )
        neighbours = layout.tiles.volume * layout.stages
        share = max(self.tile_work(layout.tiles, layout.exchange).shares)
        run = passes_of.simulated(
            1.0, lambda edge: self.machine.message(neighbours, share * self._bytes(edge.map), 1)
        )
        return run.makespan, run.makespan * (1 - min(run.idle))

    def _peaks(self, stages: int, policy: Policy, tile: TileWork) -> np.ndarray:
        whole = self._peaks_of(stages, policy)
        held = (2 + policy.optimizer_copies) * WEIGHT_BYTES * self.work.ranges.parameters
        return held + max(tile.shares) * (whole - held)


_KEPT = 3  # number of layouts of each family that are returned


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _some_tiles(image: Sequence[int], grid: Size, stride: Sequence[int]):
    """Return the tiles of a grid, or of a smaller grid if it has more than 64 tiles.

    The smaller grid has at most three tiles along each dim, all about as large as the largest tile
    of the grid. It still has tiles at corners and borders, and inner ones.

    Args:
        image: the size of the image.
        grid: the number of tiles along each dim.
        stride: the total stride of the network along each dim.
    """
    if grid.volume <= 64:
        return tiles(image, grid, stride)
    fewer = Size(min(g, 3) for g in grid)
    parts = [split(n, g, s) for n, g, s in zip(image, grid, stride)]
    longest = [max(b - a for a, b in those) for those in parts]
    size = [min(n, length * g) for n, length, g in zip(image, longest, fewer)]
    return tiles(size, fewer, stride)


def _largest(borders: Sequence[int]) -> int:
    """Return the index of the longest tile along a dim.

    If the dim has more than two tiles, only the inner tiles are considered, because they have a
    halo on both sides.

    Args:
        borders: the positions of tile borders, from 0 to the size of the image.
    """
    lengths = [b - a for a, b in zip(borders, borders[1:])]
    inner = range(1, len(lengths) - 1) if len(lengths) > 2 else range(len(lengths))
    return max(inner, key=lambda i: lengths[i])
