"""Split layers into stages so that the slowest stage is as fast as a memory limit allows.

A pipeline runs at the pace of its slowest stage. A dynamic programme finds the best contiguous
split exactly. Let B[s, b] be the smallest possible maximum for the layers before b on stages 0..s:

    B[s, b] = min over a < b of max(B[s-1, a], cost of layers a..b-1 on stage s)

Costs are tables: ``table[a, b]`` belongs to layers a..b-1. So the same code serves for seconds and
for bytes. The seconds of layers a..b-1 are the sum over these layers. Their bytes are not a sum,
and depend on the stage: under 1F1B early stages hold more micro-batches.
This module also has other splits, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np


def fastest_split(
    seconds: np.ndarray, stages: int, peaks: np.ndarray | None = None, limit: float | None = None
) -> list[int]:
    """Return numbers of layers per stage that make the slowest stage as fast as possible.

    If several splits are equally fast, the one with the smallest sum of squared seconds is taken.

    Args:
        seconds: (n + 1, n + 1), seconds of layers a..b-1 in ``seconds[a, b]``; or
            (S, n + 1, n + 1) if they depend on the stage. Only entries with a < b are read.
        stages: S, the number of stages.
        peaks: (S, n + 1, n + 1), bytes that stage s takes with layers a..b-1. It is read only if
            ``limit`` is given.
        limit: bytes that a stage may take; None for no limit.

    Raises:
        ValueError: there are more stages than layers, or no split fits the limit.
    """
    layers = seconds.shape[-1] - 1
    _check_stages(layers, stages)
    if limit is None:
        return split_within(seconds, stages)
    found = split_within(seconds, stages, (table <= limit for table in peaks))
    if found is None:
        possible = _possible(layers)
        least, _ = _cheapest([np.where(possible, table.T, np.inf) for table in peaks], np.maximum)
        raise ValueError(
            f"no split into {stages} stages fits: in each, a stage takes at least "
            f"{least / 2**30:.4g} GiB, but the limit is {limit / 2**30:.4g} GiB: use more "
            "stages, recompute all activations (always), or use smaller micro-batches"
        )
    return found


def split_within(
    seconds: np.ndarray, stages: int, fits: Iterable[np.ndarray] | None = None
) -> list[int] | None:
    """Return the split of :func:`fastest_split`, or None if no split fits.

    If the fastest split of all fits, it is the one returned.

    Args:
        seconds: (n + 1, n + 1) or (S, n + 1, n + 1), as in :func:`fastest_split`.
        stages: S, the number of stages.
        fits: for each stage, a table (n + 1, n + 1) that is True if layers a..b-1 fit the stage;
            None if all layers fit all stages.
    """
    possible = _possible(seconds.shape[-1] - 1)
    allowed = [possible] * stages if fits is None else [possible & table.T for table in fits]
    reached = np.arange(len(possible)) == 0  # reached[b]: layers before b fit the stages so far
    for one in allowed:
        reached = one @ reached
    if not reached[-1]:
        return None
    each = seconds if seconds.ndim == 3 else [seconds] * stages
    # If all stages have the same seconds and no limit, they share one table.
    repeated = stages if fits is None and seconds.ndim == 2 else 1
    pairs = list(zip(allowed, each))[: stages // repeated]
    tables = [np.where(one, table.T, np.inf) for one, table in pairs]
    slowest, _ = _cheapest(tables * repeated, np.maximum)
    squares = [np.where(table <= slowest, np.square(table), np.inf) for table in tables]
    return _cheapest(squares * repeated, np.add)[1]


def _possible(layers: int) -> np.ndarray:
    """Return a table (layers + 1, layers + 1) that is True in entry [b, a] if a < b."""
    return np.tri(layers + 1, k=-1, dtype=bool)


def _cheapest(costs: Sequence[np.ndarray], combine: Callable) -> tuple[float, list[int]]:
    """Return the least combined cost of any split, and the number of layers per stage in it.

    Args:
        costs: for each stage, (n + 1, n + 1), the cost of layers a..b-1 in entry [b, a]; infinite
            if the stage cannot have these layers. NumPy finds the best a fastest in this order.
        combine: the ufunc that combines the costs of stages, np.maximum or np.add.
    """
    best, starts = costs[0][:, 0], []
    ends = np.arange(len(best))
    for stage in costs[1:]:
        total = combine(best, stage)  # indexed [b, a]
        starts.append(total.argmin(1))
        best = total[ends, starts[-1]]
    cuts = [len(best) - 1]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    return float(best[-1]), [b - a for a, b in zip(cuts, cuts[1:])]


def sums(costs: Sequence[float]) -> np.ndarray:
    """Return an (n + 1, n + 1) table with the sum of costs[a:b] in [a, b], and 0 where a >= b."""
    table = np.zeros((len(costs) + 1, len(costs) + 1))
    table[:-1, 1:] = np.triu(np.broadcast_to(costs, (len(costs), len(costs))))
    return np.cumsum(table, axis=1)


def even_split(layers: int, stages: int) -> list[int]:
    """Return numbers of layers per stage that are as equal as possible.

    The numbers differ by at most one, and the larger numbers come first.

    Args:
        layers: the number of layers.
        stages: the number of stages.
    """
    _check_stages(layers, stages)
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def torchgpipe_split(seconds: Sequence[float], stages: int) -> list[int]:
    """Return the number of layers per stage that torchgpipe's ``balance_by_time`` would choose.

    The split is a block partition (Bárány and Grinberg 2015).

    Args:
        seconds: the seconds of each layer.
        stages: the number of stages.

    Raises:
        ImportError: torchgpipe is not installed.
    """
    _check_stages(len(seconds), stages)
    try:
        from torchgpipe.balance.blockpartition import solve
    except ImportError as e:
        raise ImportError(
            f"torchgpipe's split needs torchgpipe, which cannot be imported ({e}): pip install "
            "torchgpipe==0.0.7"
        ) from e
    return [len(block) for block in solve(list(seconds), stages)]


def starts_of(balance: Sequence[int]) -> list[int]:
    """Return the index of the first layer of each stage, given the stages' numbers of layers."""
    return [0, *accumulate(balance)][:-1]


def _check_stages(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ValueError(
            f"a model of {layers} layers cannot be cut into {stages} stages: choose 1 to {layers}"
        )
