"""Simulated steps: equal to the planner's where its assumptions hold, slower where links are shared or ranks are slow."""

import math
from dataclasses import replace
from functools import cache

import pytest
from test_layouts import FREE, layout, machine, planner

from distseg.planning.cluster import Cluster
from distseg.planning.mesh_search import Planner
from distseg.planning.step_simulation import Noise, simulate_step
from distseg.planning.step_tasks import HALOS, READING, SUM, Tiles, step_tasks

ONE_NODE = dict(ranks=1000, call=1e-6, exchange=2e-6, traffic=1e9, sharing=5e8)
modelled = cache(planner)  # takes a second for each network


def plan_of(batch=4, **numbers) -> Planner:
    """A planner of one network, on a machine with these numbers."""
    return Planner(replace(modelled("64x64").work, batch=batch), machine(**numbers))


def simulated(plan, one, noise=None, bucket=None, **cluster):
    balance = plan.predict(one).balance
    found = Cluster(plan.machine, one.ranks, **cluster)
    return simulate_step(plan.work, plan.grids, one, balance, found, noise, bucket)


@pytest.mark.parametrize(
    "one",
    [
        layout(),
        layout(tiles="2x1"),
        layout(tiles="2x2"),
        layout(tiles="2x2", exchange="1"),
        layout(tiles="2x1", exchange="level"),
        layout(samples=4, m=1),
        layout(stages=2),
        layout(stages=2, recompute="always"),
        layout(samples=2, tiles="2x2", stages=2, exchange="1", m=2),
    ],
    ids=str,
)
def test_alone_on_a_node_a_step_takes_the_planners_time(one):
    plan = plan_of(**ONE_NODE)
    assert simulated(plan, one).seconds == pytest.approx(plan.predict(one).seconds, rel=1e-12)


def test_statistics_over_all_sample_groups_take_the_planners_time():
    work = replace(modelled("64x64").work, step_norms=True)
    plan, one = Planner(work, machine(**ONE_NODE)), layout(samples=4, tiles="1x2", m=1)
    assert simulated(plan, one).seconds == pytest.approx(plan.predict(one).seconds, rel=1e-12)
    steady, apart = (
        simulated(each, one, Noise(spread=0.3, steps=3)).median
        for each in (plan, plan_of(**ONE_NODE))
    )
    assert steady > apart  # each norm waits for the slowest rank of all groups


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_pipeline_with_free_messages_takes_the_planners_time(schedule):
    plan = plan_of(**FREE, ranks=1000)
    one = layout(stages=3, schedule=schedule)
    found, expected = simulated(plan, one), plan.predict(one)
    # The planner gives all stages the update of the largest one.
    assert found.seconds - found.parts["update"] == pytest.approx(
        expected.seconds - expected.parts["update"], rel=1e-6
    )


def test_nodes_of_one_rank_each_send_at_the_networks_speed():
    plan = plan_of(ranks=1, latency=1e-12, call=1e-12)
    one = layout(tiles="2x1", exchange="1")
    assert simulated(plan, one).seconds == pytest.approx(plan.predict(one).seconds, rel=1e-9)


def test_ranks_of_a_node_share_its_card():
    """Nodes of two ranks: of 2x2 tiles each sends halos to the other node, of 4x1 tiles every other one."""
    column = layout(tiles="4x1", exchange="1", m=1)
    row = layout(tiles="2x2", exchange="1", m=1)
    plan = plan_of(latency=1e-12, link=1e18, network=1e6, ranks=2)
    halos = [simulated(plan, one).parts[HALOS] for one in (column, row)]
    tiles = Tiles(plan.work, row.tiles, "1")
    # In the row the two tiles of a node send both of their halos over one card.
    crossing = sum(
        size
        for found in tiles.halos.values()
        for s, t, size in found
        if s // 2 == 0 and t // 2 == 1
    )
    assert halos[1] == pytest.approx(2 * crossing / 1e6, rel=1e-6)
    middle = sum(
        size
        for found in Tiles(plan.work, column.tiles, "1").halos.values()
        for s, t, size in found
        if (s, t) == (1, 2)
    )
    assert halos[0] == pytest.approx(2 * middle / 1e6, rel=1e-6)


def test_copies_of_sample_groups_stand_for_all_ranks():
    """Three images of 4 tiles fill two nodes of 6 ranks; 12 groups are 4 copies of them."""
    plan = plan_of(batch=12)
    one = layout(samples=12, tiles="2x2", m=1)
    balance = plan.predict(one).balance
    few = step_tasks(plan.work, plan.grids, one, balance, Cluster(plan.machine, 48))
    assert (few.simulated, few.copies) == (12, 4)
    whole = step_tasks(
        plan.work, plan.grids, one, balance, Cluster(replace(plan.machine, ranks=48), 48)
    )
    assert (whole.simulated, whole.copies) == (48, 1)


def test_noise_makes_large_jobs_slower_and_is_the_same_for_a_seed():
    noise, medians = Noise(spread=0.1, steps=5), []
    for groups in (1, 16, 128):
        plan = plan_of(batch=groups)
        one = layout(samples=groups, tiles="2x2", m=1)
        found = simulated(plan, one, noise)
        assert found.seconds < found.drawn[0] and found.drawn == simulated(plan, one, noise).drawn
        medians.append(found.median - found.seconds)
    assert medians == sorted(medians)


def test_one_straggler_slows_the_whole_job():
    plan = plan_of(batch=64, **FREE)
    one = layout(samples=64, m=1)
    found = simulated(plan, one, Noise(stragglers=0.05, slower=2.0, steps=9))
    assert found.median == pytest.approx(2 * found.seconds, rel=1e-3)


def test_gradients_are_summed_during_the_backward_pass_if_asked():
    plan = plan_of(batch=8, network=1e8, link=1e9)
    one = layout(samples=8, m=1)
    whole, parts = (simulated(plan, one, bucket=bucket) for bucket in (None, 1e3))
    assert parts.seconds < whole.seconds
    assert parts.seconds >= whole.seconds - whole.parts[SUM]


@pytest.mark.parametrize("sums", ["ring", "tree", "halving"])
def test_sums_by_hand(sums):
    """8 ranks, 100 bytes: rounds and bytes that a rank sends."""
    cluster = Cluster(machine(latency=1.0), 8, sums=sums)
    assert (
        cluster.sum_cost(8, 100)
        == {"ring": (14.0, 175.0), "tree": (6.0, 200.0), "halving": (6.0, 175.0)}[sums]
    )


def test_a_slow_file_system_holds_up_the_step():
    plan = plan_of(batch=2)
    one = layout(samples=2, m=1)
    values = 2 * 3 * math.prod(plan.work.image)
    found = simulated(plan, one, storage=values / 5.0)
    assert found.seconds == pytest.approx(5.0, rel=1e-3) and READING in found.parts
    assert found.busy["file system"] == pytest.approx(1.0, rel=1e-3)


def test_cables_between_switches_are_shared():
    near = Cluster(machine(ranks=1), 4, switch=2)
    assert near.message(0, 1)[-1] == ("card in", 1)
    assert near.message(0, 2)[-2:] == (("switch out", 0), ("switch in", 1))
    network = near.machine.network
    assert near.capacity(4)(("switch out", 0)) == 2 * network
    assert replace(near, contention=4).capacity(4)(("switch out", 0)) == network / 2


def test_what_cannot_be_simulated_is_refused():
    plan = plan_of(batch=2)
    one = layout(samples=2, m=1)
    with pytest.raises(ValueError, match="the layout has 2 ranks, but the cluster has 3"):
        step_tasks(plan.work, plan.grids, one, plan.predict(one).balance, Cluster(plan.machine, 3))
    with pytest.raises(ValueError, match="sums is 'star': give one of halving, ring, tree"):
        Cluster(machine(), 2, sums="star")
    with pytest.raises(ValueError, match="stragglers 2.0"):
        Noise(stragglers=2.0)
