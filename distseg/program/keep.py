"""Which tiles keep their graph from the forward to the backward pass, of those that there is room for; all others are computed twice.

What a tile saves and what it takes are different things: a deep layer computes as long as a shallow one on a quarter of its values. So tiles are taken in the order of
what they save for their bytes, as long as the room that a program has at each of its operations lasts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from distseg.program.operations import BackwardTile, ForwardTile, KeptTile, OfTile, Operation


class Weighed(NamedTuple):
    """A tile.

    Attributes:
        kept: bytes that its graph holds between its passes.
        most: bytes that it takes while it is computed, there or back.
        saved: about the time that it takes to be computed again, in any unit.
    """

    kept: float
    most: float
    saved: float


def keeping(program: Sequence[Operation], weigh: Callable[[OfTile], Weighed], room: float, worth: float = 0.0) -> list[Operation]:
    """The program with the tiles kept that ``room`` bytes have room for beside the tile at hand, and that save ``worth`` a byte at least."""
    free = np.array([room - weigh(op).most if isinstance(op, OfTile) else math.inf for op in program])
    found = list(program)
    weighed = [(weigh(program[there]), there, back) for there, back in _pairs(program)]
    for tile, there, back in sorted(weighed, key=lambda each: -each[0].saved / max(1.0, each[0].kept)):
        between = free[there + 1 : back]
        if tile.saved >= worth * tile.kept and (between >= tile.kept).all() and free[there] >= 0 and free[back] >= 0:
            between -= tile.kept
            found[there], found[back] = replace(program[there], kept=True), replace(program[back], kept=True)
    return found


def keeping_all(program: Sequence[Operation]) -> list[Operation]:
    return [replace(op, kept=True) if isinstance(op, KeptTile) else op for op in program]


def _pairs(program: Sequence[Operation]) -> Iterator[tuple[int, int]]:
    """The places of a tile's passes; of the last forward pass, where the loss takes all of them first."""
    there: dict[tuple, int] = {}
    for place, op in enumerate(program):
        if isinstance(op, ForwardTile):
            there[_tile(op)] = place
        if isinstance(op, BackwardTile):
            yield there.pop(_tile(op)), place


def _tile(op: OfTile) -> tuple:
    return op.micro_batch, op.segment, op.block, op.box
