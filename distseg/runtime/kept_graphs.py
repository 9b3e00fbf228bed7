"""Which tiles keep their graph from the forward to the backward pass, of those that there is room for; all others are computed twice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from distseg.runtime.operations import BackwardTile, ForwardTile, KeptTile, OfTile, Operation


class Weighed(NamedTuple):
    """Bytes of a tile: that its graph holds between its passes, and that it takes while it is computed, there or back."""

    kept: float
    most: float


def keeping(
    program: Sequence[Operation], weigh: Callable[[OfTile], Weighed], room: float
) -> list[Operation]:
    """The program with as many tiles kept, from the first on, as ``room`` bytes have room for at any time beside the tile at hand."""
    free = np.array(
        [room - weigh(op).most if isinstance(op, OfTile) else math.inf for op in program]
    )
    found = list(program)
    for there, back in _pairs(program):
        between, kept = free[there + 1 : back], weigh(program[there]).kept
        if (between >= kept).all():
            between -= kept
            found[there], found[back] = (
                replace(program[there], kept=True),
                replace(program[back], kept=True),
            )
    return found


def keeping_all(program: Sequence[Operation]) -> list[Operation]:
    return [replace(op, kept=True) if isinstance(op, KeptTile) else op for op in program]


def _pairs(program: Sequence[Operation]) -> Iterator[tuple[int, int]]:
    """The places of each tile's passes."""
    there: dict[tuple, int] = {}
    for place, op in enumerate(program):
        if isinstance(op, ForwardTile):
            there[op.tile] = place
        if isinstance(op, BackwardTile):
            yield there.pop(op.tile), place
