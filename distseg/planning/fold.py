"""Split a network into v-shaped stages, so that skips need not be sent between ranks.

A rank holds some layers of the encoder and the matching layers of the decoder. Rank 0 takes layers
from the front and from the back of the network, rank 1 takes the next ones from both ends, and the
last rank takes the layers that remain. A pair of cuts (a, b) separates two ranks. No skip crosses
these cuts, so no skip is sent::

    layers   0 ........ a1 ...... a2 ............ b2 ....... b1 ........ n
    rank     |--- 0 ---||-- 1 --||------ 2 ------||--- 1 ---||--- 0 ---|
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from distseg.tiling.graph import Skip


def v_split(
    seconds: Sequence[float],
    skips: Sequence[Skip],
    ranks: int,
    travel: Sequence[float] | None = None,
) -> list[int]:
    """Return the number of layers of each of the 2 * ranks - 1 v-shaped stages.

    A dynamic programme over pairs of cuts makes the slowest rank as fast as possible.

    Args:
        seconds: seconds of each layer, forward and backward.
        skips: the skips of the network.
        ranks: ranks of the pipeline. :func:`distseg.runtime.schedule.v_placement` returns the rank
            of each stage.
        travel: for each layer, the seconds that sending its output and the output's gradient to
            another rank takes. Sender and receiver both wait. None if messages cost nothing.

    Raises:
        ValueError: no split exists, because there are too few layers or skips are not nested.
    """
    layers = len(seconds)
    cuts = np.array(_pairs(layers, skips))  # (P, 2): a, b
    until = np.concatenate(([0.0], np.cumsum(seconds)))
    inner = until[cuts[:, 1]] - until[cuts[:, 0]]  # what lies between a pair's cuts
    # after[n] is the cost of a cut after n layers. The model's input and output are not sent.
    after = np.array([0.0, *(travel or [0.0] * layers)])
    after[layers] = 0.0
    crossing = after[cuts].sum(1)
    # peeled[p, q] is the cost of the layers between the cuts of pair p and of pair q further in.
    peeled = inner[:, None] - inner[None, :] + crossing[:, None] + crossing[None, :]
    further_in = (cuts[:, None, 0] < cuts[None, :, 0]) & (cuts[:, None, 1] > cuts[None, :, 1])
    cost = np.where(further_in, peeled, np.inf)
    slowest, origins = np.where((cuts == (0, layers)).all(1), 0.0, np.inf), []
    for _ in range(ranks - 1):
        reached = np.maximum(slowest[:, None], cost)
        origins.append(reached.argmin(0))
        slowest = reached.min(0)
    at = int(np.maximum(slowest, inner + crossing).argmin())
    if not np.isfinite(slowest[at]):
        raise ValueError(
            f"no v-shaped split on {ranks} ranks: {layers} layers with {len(skips)} skips cannot "
            f"be cut into {2 * ranks - 1} stages so that each skip stays on one rank: use fewer "
            "ranks, or linear stages"
        )
    chosen = [cuts[at]]
    for origin in reversed(origins):
        at = origin[at]
        chosen.append(cuts[at])
    bounds = sorted({int(cut) for pair in chosen for cut in pair})
    return [b - a for a, b in pairwise(bounds)]


def _pairs(layers: int, skips: Sequence[Skip]) -> list[tuple[int, int]]:
    """Return all pairs of cuts (a, b) such that no skip enters or leaves the layers a..b-1."""
    return [
        (a, b)
        for a in range(layers)
        for b in range(a + 1, layers + 1)
        if all((a <= s.stash < b) == (a <= s.pop < b) for s in skips)
    ]
