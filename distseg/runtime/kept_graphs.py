"""Chooses the tiles that keep their autograd graph from the forward to the backward pass.

The forward pass of every other tile is repeated before its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distseg.runtime.operations import BackwardTile, ForwardTile, KeptTile, Operation, TileOperation


class Weighed(NamedTuple):
    """Memory that a tile needs, as a memory model computes it.

    Attributes:
        kept: bytes that the tile's graph holds between its forward and its backward pass.
        most: peak bytes of the tile's forward or backward pass, the graph included.
    """

    kept: float
    most: float


def keeping(
    program: Sequence[Operation], weigh: Callable[[TileOperation], Weighed], budget: float
) -> list[Operation]:
    """Return ``program``, changed so that tiles keep their autograd graphs if ``budget`` allows.

    A tile whose graph is kept is computed once, any other tile twice. Tiles are considered in
    order. At every operation the kept graphs and the current tile together fit into ``budget``.

    Args:
        program: the operations of a rank.
        weigh: function that returns the memory of the tile of an operation.
        budget: the number of bytes for kept graphs and the current tile.
    """
    free = np.array(
        [budget - weigh(op).most if isinstance(op, TileOperation) else math.inf for op in program]
    )
    found = list(program)
    for forward, backward in _pairs(program):
        between, kept = free[forward + 1 : backward], weigh(program[forward]).kept
        if (between >= kept).all():
            between -= kept
            found[forward], found[backward] = (
                replace(program[forward], kept=True),
                replace(program[backward], kept=True),
            )
    return found


def keeping_all(program: Sequence[Operation]) -> list[Operation]:
    """Return ``program``, changed so that all tiles keep their graphs until the backward pass."""
    return [replace(op, kept=True) if isinstance(op, KeptTile) else op for op in program]


def _pairs(program: Sequence[Operation]) -> Iterator[tuple[int, int]]:
    """Yield (index of the forward pass, index of the backward pass) for each tile of a program."""
    forward: dict[tuple, int] = {}
    for place, op in enumerate(program):
        if isinstance(op, ForwardTile):
            forward[op.tile] = place
        if isinstance(op, BackwardTile):
            yield forward.pop(op.tile), place
