"""The split whose slowest stage is fastest, against all splits there are."""

import time
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from test_exact import config

from distseg.config.sizes import Size
from distseg.layers.graph import receptive_field
from distseg.planning.balance import even_split, fastest_split, starts_of, sums, torchgpipe_split
from distseg.training.stages import StageCut
from distseg.training.verify import prepare


def all_splits(layers: int, stages: int):
    for cuts in combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, layers))]


def of_stages(table: np.ndarray, balance: list[int]) -> list[float]:
    """Entries of a table over runs of layers, or of one such table a stage."""
    runs = [(a, a + n) for a, n in zip(starts_of(balance), balance)]
    return [
        float(table[(stage, *run)] if table.ndim == 3 else table[run])
        for stage, run in enumerate(runs)
    ]


def best_of_all(seconds, stages, peaks=None, limit=None) -> tuple[float, float] | None:
    """(slowest stage, sum of squares) of the best split that fits."""
    fit = [
        s
        for s in all_splits(len(seconds) - 1, stages)
        if limit is None or max(of_stages(peaks, s)) <= limit
    ]
    return min(
        ((max(t), sum(v * v for v in t)) for t in (of_stages(seconds, s) for s in fit)),
        default=None,
    )


def entries(peaks: np.ndarray):
    """Return the function of the bytes in a table (S, n + 1, n + 1)."""
    return lambda stage, a, b: float(peaks[stage, a, b])


def random_case(seed: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Seconds, stages and bytes; whole numbers, so that ties occur. Early stages hold more micro-batches, as under 1F1B."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 11))
    stages = int(rng.integers(1, min(layers, 6) + 1))
    activations, weights = sums(rng.integers(0, 8, layers)), sums(rng.integers(0, 8, layers))
    return (
        sums(rng.integers(0, 10, layers)),
        stages,
        np.stack([4 * weights + (stages - s) * activations for s in range(stages)]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_split_is_better(seed):
    seconds, stages, peaks = random_case(seed)
    found = of_stages(seconds, fastest_split(seconds, stages))
    assert (max(found), sum(v * v for v in found)) == best_of_all(seconds, stages)


@pytest.mark.parametrize("seed", range(60))
def test_no_split_is_better_under_a_memory_limit(seed):
    seconds, stages, peaks = random_case(seed)
    smallest = min(max(of_stages(peaks, s)) for s in all_splits(len(seconds) - 1, stages))
    for limit in (smallest, 1.2 * smallest + 1, 2 * smallest + 1):
        balance = fastest_split(seconds, stages, entries(peaks), limit)
        found = of_stages(seconds, balance)
        assert max(of_stages(peaks, balance)) <= limit
        assert (max(found), sum(v * v for v in found)) == best_of_all(seconds, stages, peaks, limit)
    with pytest.raises(ValueError, match="no split into .* fits"):
        fastest_split(seconds, stages, entries(peaks), smallest - 0.5)


@pytest.mark.parametrize(
    "layers, stages, expected",
    [
        ([1, 1, 1, 1, 1, 1], 3, [2, 2, 2]),
        ([9, 1, 1, 1, 1, 1], 3, [1, 2, 3]),  # ties: 2 3 squared is less than 1 4
        ([1, 2, 3, 4, 5], 2, [3, 2]),
        ([5, 0, 0, 5], 2, [1, 3]),
        ([1, 2, 3], 3, [1, 1, 1]),
        ([7], 1, [1]),
    ],
)
def test_by_hand(layers, stages, expected):
    balance = fastest_split(sums(layers), stages)
    assert sorted(of_stages(sums(layers), balance)) == sorted(of_stages(sums(layers), expected))


def test_a_full_first_stage_gives_layers_away():
    """Two micro-batches in flight on the first stage, one on the second: 4 3 would be fastest, but 4 layers take 8 bytes."""
    seconds = sums([1] * 7)
    peaks = np.stack([2 * sums([1] * 7), sums([1] * 7)])
    assert fastest_split(seconds, 2, entries(peaks), None) in ([4, 3], [3, 4])
    assert fastest_split(seconds, 2, entries(peaks), 6) == [3, 4]
    assert fastest_split(seconds, 2, entries(peaks), 5) == [2, 5]


def test_says_the_least_memory_and_the_repair():
    peaks = np.stack([sums([2**30] * 4)] * 2)
    with pytest.raises(
        ValueError, match=r"at least 2 GiB, but the limit is 1.5 GiB: use more stages, recompute"
    ):
        fastest_split(sums([1] * 4), 2, entries(peaks), 1.5 * 2**30)


@pytest.mark.parametrize(
    "split",
    [
        lambda s: fastest_split(sums([1, 2, 3]), s),
        lambda s: even_split(3, s),
        lambda s: torchgpipe_split([1, 2, 3], s),
    ],
)
@pytest.mark.parametrize("stages", [0, 4])
def test_refuses_more_stages_than_layers(split, stages):
    with pytest.raises(
        ValueError, match=f"3 layers cannot be cut into {stages} stages: choose 1 to 3"
    ):
        split(stages)


def test_150_layers_on_8_stages_take_less_than_a_second_of_processor_time():
    rng = np.random.default_rng(0)
    seconds = sums(rng.random(150))
    peaks = np.stack([(8 - stage) * sums(rng.random(150)) for stage in range(8)])
    start = time.process_time()
    balance = fastest_split(seconds, 8, entries(peaks), 130)
    assert time.process_time() - start < 1
    assert len(balance) == 8 and sum(balance) == 150


def test_sums():
    assert sums([1, 2, 4]).tolist() == [[0, 1, 3, 7], [0, 0, 2, 6], [0, 0, 0, 4], [0, 0, 0, 0]]


def test_even_split():
    assert even_split(109, 6) == [19, 18, 18, 18, 18, 18]
    assert even_split(6, 6) == [1] * 6


def test_torchgpipes_split():
    pytest.importorskip("torchgpipe")
    balance = torchgpipe_split(
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2
    )  # the case of torchgpipe's own tests: 1 2 3 4 | 5 6
    assert balance == [4, 2]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("placement", ["linear", "v-shaped"])
def test_rank_0_alone_searches_the_balance_of_all(comm, monkeypatch, placement):
    """The search imports torch.compile, which takes as long as PyTorch."""
    found = prepare(config(stages=2, placement=placement), Size("32x48"))
    cut = StageCut(found.config, found.model, found.size, receptive_field(found.model))
    wanted = cut.partition()
    if comm.rank:
        monkeypatch.setattr(StageCut, "_balance", None)
    assert cut.joint_partition(comm) == wanted
    assert wanted.stages == {"linear": 2, "v-shaped": 3}[placement]
    assert replace(cut, config=config(stages=1)).joint_partition(comm) is None
