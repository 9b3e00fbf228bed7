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
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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
        twice as long as the fastest layout contributes only one. A layout that recomputes
        activations is considered only if the same layout does not fit without that. If no layout
        fits, the result has the layout of each family that takes the least memory.
        """
        fitting: dict[str, list[Prediction]] = {}
        others: dict[str, Prediction] = {}
        fits: set[MeshLayout] = set()
        fastest = math.inf
        candidates = [(self.least_seconds(layout), layout) for layout in self.candidates(ranks)]
        candidates.sort(key=lambda item: (item[0], item[1].recompute == "always"))
        for least, layout in candidates:
            known = fitting.setdefault(layout.family, [])
            wanted = 1 if least > 2 * fastest else _KEPT
            if len(known) >= wanted and least > known[wanted - 1].seconds:
                continue
            if replace(layout, recompute="never") in fits:
                continue
            try:
                found = self.predict(layout)
            except ValueError:
                continue  # no split into stages fits, or stages would share a weight
            if found.memory <= self.limit:
                fits.add(layout)
                fastest = min(fastest, found.seconds)
                known.append(found)
                known.sort(key=lambda p: p.seconds)
            elif layout.family not in others or found.memory < others[layout.family].memory:
                others[layout.family] = found
        every = [p for known in fitting.values() for p in known] or list(others.values())
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

    def _costs_on(self, tile: TileWork, neighbours: int, norm: float) -> Costs:
        """Return the costs of the layers on a tile, including the time of their messages.

        Only the seconds belong to the tile. The bytes remain the bytes of whole images.

        Args:
            tile: the work of the slowest tile.
            neighbours: number of ranks that work on the same images: tiles times stages.
            norm: seconds that the message of a norm takes.
        """
        layers = []
        for number, (layer, share, (size, count)) in enumerate(
            zip(self.work.costs.layers, tile.shares, tile.halos)
        ):
            besides = self.machine.call + norm * (number in self.work.norms)
            if count:
                besides += self.machine.message(neighbours, size, count)
            forward, backward = share * layer.forward, share * layer.backward
            layers.append(replace(layer, forward=forward + besides, backward=backward + besides))
        return replace(self.work.costs, layers=tuple(layers))

    def least_seconds(self, layout: MeshLayout) -> float:
        """Return a lower bound of the seconds that a step takes in a layout.

        The first micro-batch must go through all stages, which takes the seconds of all layers. The
        slowest stage also computes the other micro-batches. For each of them, it takes at least the
        seconds of all layers, divided by the number of stages. With the schedule zb-h1, weight
        gradients may be computed later, so the first micro-batch counts with only half of its
        seconds.
        """
        tile = self.tile_work(layout.tiles, layout.exchange)
        again = 1 if layout.recompute == "always" and layout.stages == 1 else 0
        one = self._layers(tile, again)
        through = one * (0.5 if layout.schedule == "zb-h1" else 1.0)
        return through + (layout.micro_batches - 1) * one / layout.stages

    def _layers(self, tile: TileWork, again: int = 0) -> float:
        return sum(
            share * ((1 + again) * layer.forward + layer.backward) + (2 + again) * self.machine.call
            for layer, share in zip(self.work.costs.layers, tile.shares)
        )

    def predict(self, layout: MeshLayout) -> Prediction:
        """Return the predicted time and memory of a step in a layout.

        Raises:
            ValueError: the network cannot be cut into the stages of the layout.
        """
        work, machine = self.work, self.machine
        neighbours = layout.tiles.volume * layout.stages
        tile = self.tile_work(layout.tiles, layout.exchange)
        norm = self._norm_seconds(layout)
        costs = self._costs_on(tile, neighbours, norm)
        policy = Policy(layout.micro_batches, layout.schedule, layout.recompute, work.copies)
        balance, span, busiest = self._pipeline(layout, costs, policy, tile, neighbours)
        m, ideal = layout.micro_batches, TileWork((1 / layout.tiles.volume,) * len(tile.shares), ())
        once = m * self._layers(ideal) / layout.stages
        computed = m * self._layers(tile) / layout.stages
        halos = (
            2
            * m
            / layout.stages
            * sum(machine.message(neighbours, size, n) for size, n in tile.halos if n)
        )
        norms = 2 * m / layout.stages * norm * len(work.norms)
        starts = np.cumsum([0, *balance])
        stages = [(int(a), int(b)) for a, b in zip(starts, starts[1:])]
        weights = max(
            WEIGHT_BYTES * sum(layer.parameters for layer in costs.layers[a:b]) for a, b in stages
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
        held = self._peaks(layout.stages, policy, tile)
        memory = machine.base + max(held[stage, a, b] for stage, (a, b) in enumerate(stages))
        plain = {name: float(seconds) for name, seconds in parts.items()}
        return Prediction(layout, plain, float(memory), tuple(map(int, balance)))

    def _norm_seconds(self, layout: MeshLayout) -> float:
        """Return the seconds that the message of one norm takes in a forward or backward pass.

        They are 0 if no message is needed.
        """
        ranks = layout.tiles.volume * (layout.samples if self.work.step_norms else 1)
        if ranks == 1 or not self.work.norms:
            return 0.0
        return self.machine.sum(ranks, _MOMENTS * 64)

    def _pipeline(
        self, layout: MeshLayout, costs: Costs, policy: Policy, tile: TileWork, neighbours: int
    ) -> tuple[list[int], float, float]:
        """Find the fastest stages for a layout, and simulate a step of the pipeline.

        Args:
            layout: the layout.
            costs: the costs of the layers on a tile, messages included.
            policy: the schedule and recomputation.
            tile: the work of the slowest tile.
            neighbours: number of ranks that work on the same images: tiles times stages.

        Returns:
            The number of layers of each stage, the seconds from the start of the first pass to the
            end of the last one, and the seconds that the busiest rank computes.
        """
        m, layers = layout.micro_batches, costs.layers
        if layout.stages == 1:
            passes = policy.forward_passes(0, 1)
            busy = m * (passes * sum(costs.forward) + sum(costs.backward))
            return [len(layers)], busy, busy
        stages = layout.stages
        balance = fastest_split(
            stage_seconds(costs, self.work.ranges, policy, stages),
            stages,
            self._peaks(stages, policy, tile),
            self._room(),
        )
        partition = Partition.from_balance(calls_of(self.work.model), balance)
        passes_of = StagePasses(
            Modelled(costs, 1),
            partition,
            orders(layout.schedule, partition.placement, m),
            layout.recompute,
            1,
        )
        share = max(tile.shares)
        run = passes_of.simulated(
            1.0, lambda edge: self.machine.message(neighbours, share * self._bytes(edge.map), 1)
        )
        busiest = run.makespan * (1 - min(run.idle))
        return balance, run.makespan, busiest

    def _room(self) -> float:
        return max(0.0, self.limit - self.machine.base)

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
