"""Schedules: every action once, messages in order, nobody waits for ever, memory bounded; the pictures as drawn."""

import random
from itertools import combinations, pairwise, product

import pytest

from distseg.planning.fold import v_split
from distseg.planning.timeline import short_form
from distseg.runtime import list_scheduling, schedule
from distseg.runtime.actions import Backward, Forward, Weight
from distseg.runtime.partition import OUTPUT, Edge, edges_between, stage_ranges
from distseg.runtime.schedule import (
    SCHEDULES,
    gpipe,
    one_f_one_b,
    orders,
    splits,
    v_placement,
    zb_h1,
)
from distseg.runtime.simulator import check, peak_memory, simulate
from distseg.tiling.graph import Skip


def peak_micro_batches(found, stages: int) -> tuple[int, ...]:
    """The largest number of micro-batches whose activations each stage holds at once."""
    return tuple(
        int(max(peak_memory(found, [float(s == stage) for s in range(stages)]), default=0))
        for stage in range(stages)
    )


def chain(stages: int) -> list[Edge]:
    return [Edge(OUTPUT, s, s + 1) for s in range(stages - 1)]


def with_skips(stages: int, seed: int) -> list[Edge]:
    drawn = random.Random(seed)
    pairs = [(s, t) for s in range(stages) for t in range(s + 1, stages)]
    return chain(stages) + [
        Edge(f"skip{i}", *pair) for i, pair in enumerate(drawn.sample(pairs, min(len(pairs), 4)))
    ]


def contiguous(stages: int) -> tuple[int, ...]:
    return tuple(range(stages))


PLACEMENTS = (
    [contiguous(s) for s in range(1, 7)]
    + [v_placement(ranks) for ranks in range(1, 7)]
    + [(0, 0), (0, 1, 0, 1), (0, 0, 0, 1)]
)


def test_placements():
    assert [v_placement(ranks) for ranks in (1, 2, 3)] == [(0,), (0, 1, 0), (0, 1, 2, 1, 0)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: "".join(map(str, p)))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_one(name, placement):
    for m in range(1, 9):
        found = orders(name, placement, m)
        check(found, with_skips(len(placement), seed=m), placement, m)
        assert found == orders(name, list(placement), m)


@pytest.mark.parametrize("stages, m", list(product(range(1, 7), range(1, 9))))
def test_live_micro_batches(stages, m):
    placement = contiguous(stages)
    assert peak_micro_batches(orders("gpipe", placement, m), stages) == (m,) * stages
    assert peak_micro_batches(orders("1f1b", placement, m), stages) == tuple(
        min(m, stages - s) for s in range(stages)
    )
    assert (
        peak_micro_batches(orders("zb-h1", placement, m), stages) == (min(m, stages),) * stages
    ), "as the first stage's of 1F1B"


@pytest.mark.parametrize("ranks", range(1, 7))
def test_the_v_bounds_live_micro_batches_too(ranks):
    placement = v_placement(ranks)
    assert set(peak_micro_batches(orders("gpipe", placement, 20), len(placement))) == {20}
    active = peak_micro_batches(orders("1f1b", placement, 20), len(placement))
    assert max(active) <= len(placement) and active[-1] <= 2
    assert max(peak_micro_batches(orders("zb-h1", placement, 20), len(placement))) <= len(placement)


def costs(name: str, forward) -> dict:
    """A backward pass takes twice a forward pass's time, each half of it as long as that."""

    def times(factor):
        return [factor * f for f in forward] if isinstance(forward, list) else factor * forward

    return {"forward": times(1), "backward": times(1 if splits(name) else 2), "weight": times(1)}


@pytest.mark.parametrize(
    "name, stages, m", list(product(["gpipe", "1f1b"], range(1, 7), range(1, 9)))
)
def test_makespan_of_balanced_stages(name, stages, m):
    result = simulate(
        orders(name, contiguous(stages), m),
        chain(stages),
        **costs(name, 1.0),
        placement=contiguous(stages),
    )
    assert result.makespan == (m + stages - 1) * 3
    assert result.idle == pytest.approx([(stages - 1) / (m + stages - 1)] * stages)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 3.0, 2.0), (4.0, 4.0, 3.0)], ids=str)
@pytest.mark.parametrize("stages", range(1, 7))
def test_zero_bubble_idles_for_as_long_as_its_paper_says(stages, times):
    """(S - 1) (F + B - W), as soon as there are micro-batches enough to fill the pipeline."""
    forward, backward, weight = times
    for m in range(2 * stages, 2 * stages + 4):
        result = simulate(
            orders("zb-h1", contiguous(stages), m),
            chain(stages),
            forward,
            backward,
            contiguous(stages),
            weight=weight,
        )
        assert result.makespan == m * sum(times) + (stages - 1) * (forward + backward - weight)


@pytest.mark.parametrize(
    "placement",
    [p for r in range(2, 7) for p in (contiguous(r), v_placement(r))],
    ids=lambda p: "".join(map(str, p)),
)
def test_zero_bubble_idles_less_than_1f1b(placement):
    ranks = max(placement) + 1
    forward = [2.0 / placement.count(rank) for rank in placement]
    for m in (1, 2, 4, 8, 16):
        one, zero = (
            simulate(
                orders(name, placement, m),
                chain(len(placement)),
                **costs(name, forward),
                placement=placement,
            )
            for name in ("1f1b", "zb-h1")
        )
        assert zero.makespan < one.makespan
        assert m < 2 * ranks or zero.makespan <= m * 6 + (ranks - 1) * 2


@pytest.mark.parametrize("ranks, m", list(product(range(2, 7), (2, 4, 8))))
def test_makespan_of_the_balanced_v(ranks, m):
    """The turn costs no more than a contiguous pipeline's does."""
    placement = v_placement(ranks)
    forward = [2.0 if rank == ranks - 1 else 1.0 for rank in placement]
    for name in SCHEDULES:
        result = simulate(
            orders(name, placement, m),
            chain(len(placement)),
            **costs(name, forward),
            placement=placement,
        )
        assert m * 6 <= result.makespan <= (m + ranks - 1) * 6 * 1.05


def lines(picture: str, text: str) -> bool:
    return all(any(line in other for other in text.splitlines()) for line in picture.splitlines())


def test_pictures_in_the_docstrings():
    for name in SCHEDULES:
        assert lines(
            short_form(
                simulate(
                    orders(name, (0, 1, 2), 4), chain(3), 2.0, 3.0, (0, 1, 2), weight=3.0
                ).spans
            ),
            schedule.__doc__,
        )
    spans = simulate(
        orders("1f1b", (0, 1, 0), 3), chain(3), [2.0, 4.0, 2.0], [4.0, 8.0, 4.0], (0, 1, 0)
    ).spans
    assert lines(short_form(spans), list_scheduling.__doc__)
    half = [3.0, 6.0, 3.0]
    spans = simulate(
        orders("zb-h1", (0, 1, 0), 3), chain(3), half, half, (0, 1, 0), weight=half
    ).spans
    assert lines(short_form(spans), list_scheduling.__doc__)


def test_one_f_one_b_of_few_micro_batches():
    assert " ".join(map(str, one_f_one_b(0, 4, 2))) == "0 1 0' 1'"
    assert " ".join(map(str, gpipe(0, 4, 2))) == "0 1 1' 0'"
    assert " ".join(map(str, zb_h1(0, 4, 2))) == "0 1 0' 0\" 1' 1\""
    assert " ".join(map(str, zb_h1(3, 4, 2))) == "0 0' 1 1' 0\" 1\""


def test_only_zero_bubble_splits():
    assert [splits(name) for name in SCHEDULES] == [False, False, True]


def test_transfers_and_links():
    """Two tensors from rank 0 to rank 1 go one after another; nothing travels within a rank."""
    edges = [Edge(OUTPUT, 0, 1), Edge("skip0", 0, 1)]
    result = simulate(
        orders("gpipe", (0, 1), 1),
        edges,
        1.0,
        2.0,
        (0, 1),
        transfer={edges[0]: 0.25, edges[1]: 0.5},
    )
    assert [(s.name, s.start, s.end) for s in result.spans] == [
        ("F0,0", 0, 1),
        ("F0,1", 1.75, 2.75),
        ("B0,1", 2.75, 4.75),
        ("B0,0", 5.5, 7.5),
    ]
    assert (
        simulate(
            orders("gpipe", (0, 0), 1), edges, 1.0, 2.0, (0, 0), transfer=lambda edge: 9.0
        ).makespan
        == 6.0
    )


def test_recomputing_does_not_wait_for_the_gradient():
    placement = (0, 1)
    result = simulate(
        orders("gpipe", placement, 1),
        chain(2),
        1.0,
        2.0,
        placement,
        recompute=lambda stage, m: 1.0 - stage,
    )
    assert [(s.kind, s.start, s.end) for s in result.spans if s.rank == 0] == [
        ("forward", 0, 1),
        ("recompute", 1, 2),
        ("backward", 4, 6),
    ]


def test_memory_of_a_rank_with_two_stages():
    assert peak_memory(
        [[Forward(0, 0), Forward(0, 1), Forward(2, 0), Backward(2, 0)], [Forward(1, 0)]],
        [5.0, 7.0, 1.0],
    ) == [11.0, 7.0]
    assert peak_memory([[Forward(0, 0), Backward(0, 0), Forward(0, 1), Weight(0, 0)]], [5.0]) == [
        10.0
    ]


def test_what_is_no_schedule():
    with pytest.raises(ValueError, match="rank 1 of the schedule lacks B0,1"):
        check([[Forward(0, 0), Backward(0, 0)], [Forward(1, 0)]], chain(2), (0, 1), 1)
    with pytest.raises(ValueError, match="rank 0 of the schedule should not have F0,0"):
        check([[Forward(0, 0), Forward(0, 0), Backward(0, 0)]], [], (0,), 1)
    with pytest.raises(
        ValueError, match=r"stage 0 sends micro-batches \[0, 1\], but stage 1 receives \[1, 0\]"
    ):
        check(
            [list(gpipe(0, 2, 2)), [Forward(1, 1), Forward(1, 0), Backward(1, 1), Backward(1, 0)]],
            chain(2),
            (0, 1),
            2,
        )
    with pytest.raises(
        ValueError,
        match=r"deadlock: rank 0 waits in B0,0 for x of stage 0 for stage 1 \(backward .* 0\); rank 1 waits in F1,1",
    ):
        wanting = (
            [Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)],
            [Forward(1, 0), Forward(1, 1), Backward(1, 0), Backward(1, 1)],
        )
        check(wanting, chain(2), (0, 1), 2)


def test_gradients_of_weights_are_all_computed_and_after_their_backward_pass():
    order = list(zb_h1(0, 1, 2))
    check([order], [], (0,), 2)
    with pytest.raises(ValueError, match="rank 0 of the schedule lacks W1,0"):
        check([order[:-1]], [], (0,), 2)
    with pytest.raises(ValueError, match="deadlock: rank 0 waits in W0,0 for B0,0"):
        check([[Forward(0, 0), Weight(0, 0), Backward(0, 0)]], [], (0,), 1)


def test_what_can_not_be_ordered():
    with pytest.raises(
        ValueError, match="unknown pipeline schedule 'zb': choose gpipe, 1f1b, zb-h1"
    ):
        orders("zb", (0, 1), 4)
    with pytest.raises(ValueError, match="without gaps, got \\(0, 2\\)"):
        orders("gpipe", (0, 2), 4)
    with pytest.raises(ValueError, match="at least one micro-batch, got 0"):
        orders("gpipe", (0, 1), 0)


def test_an_edge_without_gradient_sends_none_back():
    edges = [Edge(OUTPUT, 0, 1, gradient=False)]
    spans = simulate([list(gpipe(0, 2, 1)), list(gpipe(1, 2, 1))], edges, 1.0, 2.0, (0, 1)).spans
    assert [(s.name, s.start) for s in spans] == [
        ("F0,0", 0),
        ("B0,0", 1),
        ("F0,1", 1),
        ("B0,1", 2),
    ]


SKIPS = [Skip(1, 10), Skip(4, 8)]
INPUTS = [(n, *(s.stash for s in SKIPS if s.pop == n)) for n in range(12)]


def slowest(seconds: list[float], travel: list[float], balance: tuple[int, ...]) -> float:
    """Of the ranks of a V; infinite where a skip travels."""
    ranges, ranks = stage_ranges(balance, len(seconds)), len(balance) // 2 + 1
    placement = v_placement(ranks)
    if any(
        placement[e.source] != placement[e.target]
        for e in edges_between(ranges, INPUTS)
        if e.name != OUTPUT
    ):
        return float("inf")
    cuts = [0.0, *(travel[layers.stop - 1] for layers in ranges[:-1]), 0.0]
    busy = [
        sum(seconds[i] for i in layers) + sum(ends) for layers, ends in zip(ranges, pairwise(cuts))
    ]
    return max(sum(b for b, at in zip(busy, placement) if at == rank) for rank in range(ranks))


@pytest.mark.parametrize("ranks, seed", list(product((1, 2, 3), range(4))))
def test_no_v_is_faster_than_the_split(ranks, seed):
    drawn = random.Random(seed)
    seconds, travel = ([drawn.random() for _ in range(12)] for _ in range(2))
    cuts = [(0, *chosen, 12) for chosen in combinations(range(1, 12), 2 * ranks - 2)]
    every = [slowest(seconds, travel, tuple(b - a for a, b in pairwise(chosen))) for chosen in cuts]
    assert slowest(seconds, travel, tuple(v_split(seconds, SKIPS, ranks, travel))) == pytest.approx(
        min(every)
    )


def test_v_split_of_a_u():
    """Twelve equal layers on 2 ranks: six outside the cuts, six inside."""
    assert v_split([1.0] * 12, SKIPS, 2) in ([2, 6, 4], [3, 6, 3], [4, 6, 2])


def test_no_v_across_a_skip():
    with pytest.raises(ValueError, match="no v-shaped split on 2 ranks: 3 layers with 2 skips"):
        v_split([1.0] * 3, [Skip(0, 1), Skip(1, 2)], 2)
