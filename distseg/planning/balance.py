"""Split layers into stages so that the slowest stage is as fast as a memory limit allows.

A pipeline runs at the pace of its slowest stage. A dynamic programme finds the best contiguous
split exactly. Let B[s, b] be the smallest possible maximum for the layers before b on stages 0..s:

    B[s, b] = min over a < b of max(B[s-1, a], cost of layers a..b-1 on stage s)

Seconds are tables: ``table[a, b]`` is the sum over layers a..b-1. The bytes of a stage are not a
sum over its layers, and depend on its number: under 1F1B early stages hold more micro-batches. A
function returns them, which the search calls for few stages.
This module also has other splits, for comparison.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

# Function (stage, a, b) that returns the bytes of a stage with layers a..b-1.
StageBytes = Callable[[int, int, int], float]


def fastest_split(
    seconds: np.ndarray, stages: int, bytes_of: StageBytes | None = None, limit: float | None = None
) -> list[int]:
    """Return how many layers each stage has if the slowest stage is as fast as possible.

    If several splits are equally fast, the one with the smallest sum of squared seconds is taken.

    Args:
        seconds: (n + 1, n + 1) for n layers, the seconds of layers a..b-1 in ``seconds[a, b]``; or
            (S, n + 1, n + 1) if they depend on the stage. Only entries with a < b are read.
        stages: S, the number of stages.
        bytes_of: the bytes that a stage takes. It is called only if ``limit`` is given.
        limit: bytes that a stage may take; None for no limit.

    Raises:
        ValueError: there are more stages than layers, or no split fits the limit.
    """
    _check_stages(seconds.shape[-1] - 1, stages)
    if limit is None or bytes_of is None:
        fastest = split_within(seconds, stages)
        assert fastest is not None  # without a limit, every split is allowed
        return fastest
    found = split_within(seconds, stages, bytes_of, limit)
    if found is None:
        least = _least_limit(seconds, stages, bytes_of, limit)
        raise ValueError(
            f"no split into {stages} stages fits: in each split, some stage takes at least "
            f"{least / 2**30:.4g} GiB, but the limit is {limit / 2**30:.4g} GiB: use more "
            "stages, recompute all activations (always), or use smaller micro-batches"
        )
    return found


def _least_limit(seconds: np.ndarray, stages: int, bytes_of: StageBytes, limit: float) -> float:
    """Return the smallest memory limit that some split fits, with a relative error of ``_NEAR``.

    Args:
        seconds: the seconds of possible stages, as in :func:`fastest_split`.
        stages: the number of stages.
        bytes_of: the bytes that a stage takes.
        limit: a limit that no split fits.
    """
    low, high = limit, _most_bytes(fastest_split(seconds, stages), bytes_of)
    while high > (1 + _NEAR) * low:
        middle = (low + high) / 2
        found = split_within(seconds, stages, bytes_of, middle)
        if found is None:
            low = middle
        else:
            high = _most_bytes(found, bytes_of)
    return high


def _most_bytes(balance: Sequence[int], bytes_of: StageBytes) -> float:
    """Return the bytes of the stage of a split that takes the most memory."""
    return max(bytes_of(*part) for part in _parts(balance))


def _parts(balance: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (stage, a, b) for each stage of a split, which has layers a..b-1."""
    return [(s, a, a + n) for s, (a, n) in enumerate(zip(starts_of(balance), balance))]


_NEAR = 1e-3


def split_within(
    seconds: np.ndarray,
    stages: int,
    bytes_of: StageBytes | None = None,
    limit: float = np.inf,
    least: Iterable[np.ndarray] | None = None,
    fastest: list[int] | None = None,
) -> list[int] | None:
    """Return how many layers each stage has in the fastest split that fits a memory limit.

    The result is None if no split fits. A split is the fastest one if its slowest stage is as fast
    as possible (:func:`fastest_split`).

    The search finds the fastest split, computes the bytes of its stages, and excludes stages that
    do not fit. It repeats this until all stages of the split fit. Together with a stage that does
    not fit, it excludes all stages that contain the same layers and more. So bytes are computed
    only for few of the possible stages.

    Args:
        seconds: (n + 1, n + 1) or (S, n + 1, n + 1), as in :func:`fastest_split`.
        stages: S, the number of stages.
        bytes_of: the bytes that a stage takes; None without a limit.
        limit: bytes that a stage may take.
        least: for each stage, (n + 1, n + 1), lower bounds of the bytes that it takes with layers
            a..b-1; None if they are not known. It is read only if the fastest split does not fit.
        fastest: the fastest split without a limit; None if not known.
    """
    found = fastest or _fastest_allowed(seconds, stages, None)
    if bytes_of is None or found is None:
        return found
    if all(bytes_of(*part) <= limit for part in _parts(found)):
        return found
    unknown = [np.full(seconds.shape[-2:], -np.inf)] * stages
    fits = [table <= limit for table in (unknown if least is None else least)]
    while found is not None:
        parts = _parts(found)
        if all(fits[stage][a, b] for stage, a, b in parts):
            full = [part for part in parts if bytes_of(*part) > limit]
            if not full:
                break
            for stage, first, last in full:
                a, b = _smallest_above(partial(bytes_of, stage), first, last, limit)
                fits[stage][: a + 1, b:] = False
        found = _fastest_allowed(seconds, stages, fits)
    return found


def _smallest_above(
    bytes_of: Callable[[int, int], float], a: int, b: int, limit: float
) -> tuple[int, int]:
    """Return a part of layers a..b-1 that takes more than ``limit`` bytes, as (a, b).

    The part is as small as possible: without its first or its last layer it fits the limit.

    Args:
        bytes_of: the bytes of a stage with layers a..b-1, which is more than ``limit``.
        a, b: the first layer of the stage, and the layer after its last one.
        limit: the limit in bytes.
    """
    b = a + 1 + bisect_left(range(a + 1, b), True, key=lambda n: bytes_of(a, n) > limit)
    a += bisect_left(range(a + 1, b), True, key=lambda n: bytes_of(n, b) <= limit)
    return a, b


def _fastest_allowed(
    seconds: np.ndarray, stages: int, fits: Sequence[np.ndarray] | None
) -> list[int] | None:
    """Return the fastest split whose stages are allowed, or None if there is none.

    Args:
        seconds: (n + 1, n + 1) or (S, n + 1, n + 1), as in :func:`fastest_split`.
        stages: S, the number of stages.
        fits: for each stage, (n + 1, n + 1), True in entry [a, b] if the stage may have layers
            a..b-1; None if each stage may have any layers.
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
    """Return the lowest combined cost of a split, and the number of layers of each of its stages.

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
    table[:-1, 1:] = np.tri(len(costs)).T * costs
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
    # torchgpipe annotates whole numbers, but its algorithm only adds and compares them.
    blocks = solve(list(seconds), stages)  # type: ignore[arg-type]
    return [len(block) for block in blocks]


def starts_of(balance: Sequence[int]) -> list[int]:
    """Return the index of the first layer of each stage, given the stages' numbers of layers."""
    return [0, *accumulate(balance)][:-1]


def _check_stages(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ValueError(
            f"a model of {layers} layers cannot be cut into {stages} stages: choose 1 to {layers}"
        )
