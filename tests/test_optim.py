"""Learning rates as tables, optimizers by name."""

import math

import pytest
import torch

from distseg.config.settings import OptimConfig
from distseg.runtime.optimizer import learning_rate, make_optimizer, set_learning_rate


def rates(total: int, **fields) -> list[float]:
    return [learning_rate(OptimConfig(lr=1.0, **fields), step, total) for step in range(total)]


def cosine(t: float) -> float:
    return (1 + math.cos(math.pi * t)) / 2


@pytest.mark.parametrize(
    "schedule, wanted",
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("cosine", [0.5, 1, *(cosine(t / 8) for t in range(8))]),
        (
            "one_cycle",
            [1 - 0.96 * cosine(1 / 2), 1, *(1e-4 + (1 - 1e-4) * cosine(t / 8) for t in range(8))],
        ),
        ("linear", [0.5, 1, *(1 - t / 8 for t in range(8))]),
    ],
)
def test_schedules_over_ten_steps_with_two_of_warmup(schedule, wanted):
    assert rates(10, schedule=schedule, warmup=0.2) == pytest.approx(wanted, abs=1e-12)


def test_the_rate_of_the_patchgd_authors_program():
    """100 epochs of 5 steps, a rise over 2 of them, a fall to 0 over twice the training: it ends at a half."""
    found = rates(500, schedule="linear", warmup=0.02, decay_factor=2.0)
    assert found[10:] == pytest.approx(
        [(1000 - step) / (1000 - 10) for step in range(10, 500)], abs=1e-12
    )
    assert found[9] == 1.0 and found[-1] == pytest.approx(501 / 990)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "one_cycle"])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_rates_are_positive_up_to_the_peak(schedule, warmup, total):
    found = rates(total, schedule=schedule, warmup=warmup)
    assert all(0 < r <= 1 for r in found)
    peak = found.index(max(found))
    assert found[: peak + 1] == sorted(found[: peak + 1]) and found[peak:] == sorted(
        found[peak:], reverse=True
    )


@pytest.mark.parametrize(
    "config, reference",
    [
        (
            OptimConfig("sgd", lr=0.1, momentum=0.8, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.01),
        ),
        (
            OptimConfig("adam", lr=0.1, weight_decay=0.01),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
        ),
        (
            OptimConfig("adamw", lr=0.1, weight_decay=0.01),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01),
        ),
    ],
)
def test_optimizers_are_pytorchs(config, reference):
    ends = []
    for make in (lambda p: make_optimizer(config, {"w": p[0]}), reference):
        w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimizer = make([w])
        for g in ([0.5, 1.0], [-0.25, 2.0], [0.1, -1.0]):
            w.grad = torch.tensor(g, dtype=torch.float64)
            optimizer.step()
        ends.append(w.detach())
    torch.testing.assert_close(*ends, rtol=1e-14, atol=0)


def test_the_rate_is_set_before_a_step():
    w = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer(OptimConfig("sgd", lr=5.0, momentum=0.0), {"w": w})
    set_learning_rate(optimizer, 0.25, epoch=0)
    w.grad = torch.tensor([1.0])
    optimizer.step()
    assert w.item() == 0.75
