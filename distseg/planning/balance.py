"""How many layers each stage gets: the split whose slowest stage is fastest, under a memory limit, and splits to compare with.

A pipeline runs at the pace of its slowest stage. Over contiguous splits the best one is found exactly by a dynamic
programme: if B[s, b] is the smallest possible maximum for the layers before b on stages 0..s,

    B[s, b] = min over a < b of max(B[s-1, a], cost of layers a..b-1 on stage s)

Costs come as tables over all runs of layers, ``table[a, b]`` of layers a..b-1, so the same lines serve for seconds,
where they are sums, and for bytes, where they are not, and depend on the stage: under 1F1B early stages hold more.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Callable, Sequence

import numpy as np


def fastest_split(
    seconds: np.ndarray, stages: int, peaks: np.ndarray | None = None, limit: float | None = None
) -> list[int]:
    """The layers of each stage that make the slowest stage fastest; among these, the smallest sum of squares.

    Args:
        seconds: (n + 1, n + 1), of layers a..b-1 in ``seconds[a, b]``, or (S, n + 1, n + 1), where it depends on the stage; only a < b is read.
        stages: S.
        peaks: (S, n + 1, n + 1), the bytes that stage s takes with layers a..b-1.
        limit: bytes that a stage may take; none if None.

    Raises:
        ValueError: more stages than layers, or no split fits into the memory.
    """
    layers = seconds.shape[-1] - 1
    _check_stages(layers, stages)
    allowed = np.broadcast_to(
        np.triu(np.ones((layers + 1, layers + 1), dtype=bool), 1), (stages, layers + 1, layers + 1)
    )
    if limit is not None:
        least, _ = _cheapest(np.where(allowed, peaks, np.inf), np.maximum)
        if least > limit:
            raise ValueError(
                f"no split into {stages} stages fits: the fullest one takes at least {least / 2**30:.4g} GiB, "
                f"but the limit is {limit / 2**30:.4g} GiB: take more stages, recompute activations (always), or smaller micro-batches"
            )
        allowed = allowed & (peaks <= limit)
    slowest, _ = _cheapest(np.where(allowed, seconds, np.inf), np.maximum)
    squares = np.where(allowed & (seconds <= slowest), np.square(seconds), np.inf)
    return _cheapest(squares, np.add)[1]


def _cheapest(cost: np.ndarray, combine: Callable) -> tuple[float, list[int]]:
    """(cost, layers of each stage) of the split with the least combined cost; ``cost`` is (S, n + 1, n + 1)."""
    best, starts = cost[0, 0], []
    for stage in cost[1:]:
        total = combine(best[:, None], stage)  # (a, b)
        starts.append(total.argmin(0))
        best = total.min(0)
    cuts = [len(best) - 1]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    return float(best[-1]), [b - a for a, b in zip(cuts, cuts[1:])]


def sums(costs: Sequence[float]) -> np.ndarray:
    """(n + 1, n + 1): the sum of costs[a:b] in [a, b], 0 where a >= b."""
    table = np.zeros((len(costs) + 1, len(costs) + 1))
    for a in range(len(costs)):
        table[a, a + 1 :] = np.cumsum(costs[a:])
    return table


def even_split(layers: int, stages: int) -> list[int]:
    """Numbers of layers that differ by at most one, the larger ones first."""
    _check_stages(layers, stages)
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def torchgpipe_split(seconds: Sequence[float], stages: int) -> list[int]:
    """What torchgpipe's ``balance_by_time`` makes of the layers' seconds (Bárány and Grinberg's block partitions)."""
    _check_stages(len(seconds), stages)
    try:
        from torchgpipe.balance.blockpartition import solve
    except ImportError as e:
        raise ImportError(
            f"torchgpipe's split needs torchgpipe, which can not be imported ({e}): pip install torchgpipe==0.0.7"
        ) from e
    return [len(block) for block in solve(list(seconds), stages)]


def starts_of(balance: Sequence[int]) -> list[int]:
    """The first layer of each stage."""
    return [0, *accumulate(balance)][:-1]


def _check_stages(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ValueError(
            f"a model of {layers} layers can't be cut into {stages} stages: choose 1 to {layers}"
        )
