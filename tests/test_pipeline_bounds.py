"""Lower bounds of the seconds of a pipeline's step: never above the simulated step, and close."""

import random

import pytest

from distseg.planning.pipeline_bounds import PipelineTimes
from distseg.runtime.partition import OUTPUT, Edge
from distseg.runtime.schedule import SCHEDULES, orders, splits
from distseg.runtime.simulator import simulate


def drawn(seed: int, schedule: str, stages: int, micro_batches: int, chain: bool):
    """Return the bound and the makespan of a pipeline with drawn seconds and skips."""
    draw = random.Random(seed)
    slow, far = draw.choice([0.1, 1, 10]), draw.choice([0.0, 0.1, 3])
    edges = [Edge(OUTPUT, stage, stage + 1) for stage in range(stages - 1)]
    if not chain:
        skips = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
        drawn = draw.sample(skips, min(3, len(skips)))
        edges += [Edge(f"skip{n}", *ends, draw.random() < 0.8) for n, ends in enumerate(drawn)]
    forward, backward, weight = ([draw.random() for _ in range(stages)] for _ in range(3))
    forward = [slow * seconds for seconds in forward]
    weight = weight if splits(schedule) else [0.0] * stages
    again = [draw.choice([0, 0, 1]) * seconds for seconds in forward]
    travels = {edge: far * draw.random() for edge in edges}
    links, returns = {}, {}
    for edge, seconds in travels.items():
        there, back = (edge.source, edge.target), (edge.target, edge.source)
        links[there] = links.get(there, 0.0) + seconds
        if edge.gradient:
            returns[back] = returns.get(back, 0.0) + seconds
    given = (forward, backward, weight, again, links, returns)
    placement = tuple(range(stages))
    run = simulate(
        orders(schedule, placement, micro_batches),
        edges,
        forward,
        backward,
        placement,
        travels,
        again,
        weight,
    )
    return PipelineTimes(schedule, micro_batches, *given).least, run.makespan


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_are_never_above_the_simulated_seconds(schedule, chain):
    for seed in range(120):
        stages, micro_batches = 1 + seed % 7, 1 + seed % 11
        least, seconds = drawn(seed, schedule, stages, micro_batches, chain)
        assert least <= seconds * (1 + 1e-12), seed


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_bounds_of_many_micro_batches_are_close(schedule):
    for seed in range(20):
        least, seconds = drawn(seed, schedule, 2 + seed % 5, 200, chain=True)
        assert least > 0.96 * seconds, seed
