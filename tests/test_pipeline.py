"""Stages over ranks: the gradient of the serial program, whatever the cut, the schedule and what is recomputed."""

from dataclasses import replace

import made_weights
import pytest
import torch
from test_exact import NORMS, check, config
from torch import nn

from distseg.comm.alone import Alone
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.network import calls_of
from distseg.models.zoo import build_model
from distseg.runtime.partition import Partition
from distseg.runtime.pipeline import Pipeline
from distseg.runtime.stage_program import most_leaving
from distseg.training.verify import verify

SCHEDULES = ["gpipe", "1f1b", "zb-h1"]
RECOMPUTE = ["never", "except_last", "always"]


@pytest.mark.parallel([2, 3, 4, 6])
@pytest.mark.covering(1, cases=1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("norm", NORMS)
def test_every_number_of_stages(comm, schedule, norm):
    check(comm, "61x75", stages=comm.size, schedule=schedule, norm=norm, accumulate=3)


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(1, cases=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8])
def test_every_number_of_micro_batches(comm, schedule, micro_batches):
    check(
        comm,
        "33x47",
        stages=comm.size,
        schedule=schedule,
        accumulate=micro_batches,
        loss="cross_entropy + 0.5*dice",
        dice_over="batch",
    )


@pytest.mark.parallel(2)
@pytest.mark.covering(1, cases=1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("norm", NORMS)
def test_recomputing(comm, schedule, recompute, norm):
    check(
        comm,
        "33x47",
        stages=2,
        schedule=schedule,
        recompute=recompute,
        norm=norm,
        accumulate=3,
        images=2,
    )


UNION = {  # ranks: (samples, tiles, stages)
    4: [(1, "1x2", 2), (2, "1x1", 2)],
    6: [(1, "1x3", 2), (2, "1x1", 3), (1, "2x1", 3)],
    8: [(2, "1x2", 2), (1, "2x2", 2), (1, "1x2", 4)],
}


@pytest.mark.parallel([4, 6, 8])
@pytest.mark.covering(1)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_the_union_of_samples_tiles_and_stages(comm, number, norm):
    meshes = UNION[comm.size]
    samples, tiles, stages = meshes[number % len(meshes)]
    schedule = SCHEDULES[(number + NORMS.index(norm)) % 3]
    check(
        comm,
        "61x75",
        samples=samples,
        tiles=tiles,
        stages=stages,
        norm=norm,
        schedule=schedule,
        accumulate=2,
        recompute=RECOMPUTE[number],
    )


@pytest.mark.parallel(8)
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("scope", ["group", "step"])
@pytest.mark.parametrize("loss", ["dice", "focal"])
def test_the_union_with_batch_norm_of_the_step(comm, scope, loss):
    check(
        comm,
        "61x75",
        samples=2,
        tiles="2x1",
        stages=2,
        norm="batch",
        norm_scope=scope,
        loss=loss,
        accumulate=2,
        images=2,
    )


@pytest.mark.parallel(4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["instance", "batch", "none"])
@pytest.mark.parametrize("placement", ["linear", "v-shaped"])
@pytest.mark.parametrize("every", ["1", "2", "level"])
def test_zero_bubble_where_borders_are_exchanged(comm, norm, placement, every):
    """Both put off: convolutions after an exchange, and those that have all they look at."""
    settings = dict(
        tiles="2x1",
        stages=2,
        schedule="zb-h1",
        norm=norm,
        placement=placement,
        exchange_every=every,
        accumulate=3,
    )
    check(comm, "61x75", **settings, recompute=RECOMPUTE[["1", "2", "level"].index(every)])


@pytest.mark.parallel(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("up", ["bilinear", "transposed"])
@pytest.mark.parametrize("loss", ["dice", "focal"])
def test_zero_bubble_of_other_networks_and_losses(comm, up, loss):
    check(
        comm,
        "33x47",
        stages=2,
        schedule="zb-h1",
        up=up,
        loss=loss,
        accumulate=4,
        norm="none",
        placement="v-shaped",
        depth=3,
        num_convs=1,
    )


class ChannelsLast(nn.Module):
    """A layer norm as ConvNeXt has it, after which maps have their channels last in memory."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def that_lies_otherwise(in_channels, out_channels, **unused):
    """Maps with channels last, a weight with gaps and one with its dims in another order."""
    first, second, third = (
        nn.Conv2d(i, o, 3, padding=1) for i, o in ((in_channels, 4), (4, 4), (4, out_channels))
    )
    first.weight = nn.Parameter(torch.randn(4, 2 * in_channels, 3, 3).double()[:, ::2])
    third.weight = nn.Parameter(torch.randn(4, out_channels, 3, 3).double().transpose(0, 1))
    return nn.Sequential(first, ChannelsLast(), second, nn.ReLU(), third).double()


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("schedule, every", [("gpipe", "1"), ("zb-h1", "all")])
def test_updates_where_maps_and_weights_lie_otherwise_in_memory(comm, schedule, every):
    """Loss and gradients alone do not tell: a fused optimizer walks through gradients as they lie."""
    found = config(
        stages=comm.size, tiles_per_rank=Size("2x1"), exchange_every=every, schedule=schedule
    )
    model = replace(found.model, name=f"{__name__}:that_lies_otherwise")
    report = verify(replace(found, model=model), comm, Size("17x11"))
    assert comm.bcast(report and report["max_error"]) <= 1e-12, report


@pytest.mark.parallel(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("norm, frozen", [("none", False), ("batch", True), ("instance", False)])
def test_many_tiles_a_rank(comm, schedule, norm, frozen):
    """Without live norms each tile is a micro-batch of its own."""
    check(
        comm,
        "61x75",
        stages=2,
        tiles_per_rank=Size("2x2"),
        schedule=schedule,
        norm=norm,
        frozen_norm=frozen,
        loss="dice",
        accumulate=2,
    )


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(1)
@pytest.mark.parametrize("up", ["nearest", "bilinear", "transposed"])
@pytest.mark.parametrize("first", [1, 2, 9, 10, 13, 21, 28, 29, 30, 48])
def test_cuts_anywhere(comm, up, first):
    """Stages of very uneven numbers of layers: cuts before and after a stash, a pop, a norm."""
    rest = 49 - first  # depth 2, 2 convolutions a level
    balance = [first, rest] if comm.size == 2 else [first, rest // 2, rest - rest // 2]
    if min(balance) > 0:
        check(comm, "33x47", stages=comm.size, balance=balance, up=up, accumulate=2)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("norm", NORMS)
def test_the_v(comm, schedule, norm):
    check(
        comm,
        "61x75",
        stages=comm.size,
        placement="v-shaped",
        depth=3,
        num_convs=1,
        schedule=schedule,
        norm=norm,
        accumulate=3,
        recompute="except_last",
    )


def test_frozen_layers_return_no_gradient():
    """A first stage without trained weights gets nothing back, and the rest is exact."""
    model = build_model(config().model)
    for layer in model[:10]:
        layer.requires_grad_(False)
    edges = Partition.from_balance(calls_of(model), [10, 39]).edges
    assert [(e.name, e.gradient) for e in edges] == [("x", False), ("skip0", False)]


def test_stages_that_would_share_a_weight_are_refused():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    calls = calls_of(nn.Sequential(nn.Conv2d(3, 4, 1), conv, nn.ReLU(), conv, nn.Conv2d(4, 2, 1)))
    assert Partition.from_balance(calls, [1, 4]).stages == 2
    with pytest.raises(
        ValueError,
        match="layers 1 and 3 share a weight, but lie in the stages 0 and 1, which would train separate copies: set pipeline.balance",
    ):
        Partition.from_balance(calls, [2, 3])


def test_stages_that_would_share_running_statistics_are_refused():
    calls = calls_of(as_network(made_weights.Twice(4, 2)))
    with pytest.raises(ValueError, match="share running statistics, but lie in the stages 0 and 1"):
        Partition.from_balance(calls, [len(calls) - 4, 4])


class Late:
    """Request that is complete when it is tested the third time."""

    def __init__(self):
        self.tests = 0

    def Test(self):
        self.tests += 1
        return self.tests >= 3


@pytest.mark.parametrize(
    "stage, waited", [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 1, 2, 3])]
)
def test_a_stage_runs_no_further_ahead_than_the_memory_model_says(stage, waited):
    parts = tuple(range(n, n + 1) for n in range(4))
    pipeline = Pipeline(Partition(parts, (), (0, 1, 2, 3)), [], Alone())
    sends = {m: [Late(), Late()] for m in range(4)}
    pipeline._leaving = dict(sends)
    pipeline._limit_leaving(stage)
    assert [m for m, each in sends.items() if all(r.tests == 3 for r in each)] == waited
    assert not any(r.tests for m in set(sends) - set(waited) for r in sends[m])
    assert len(pipeline._leaving) == most_leaving(stage, 4)


def test_a_rank_with_several_stages_does_not_wait():
    pipeline = Pipeline(Partition((range(1), range(1, 2)), (), (0, 0)), [], Alone())
    pipeline._leaving = {m: [Late()] for m in range(4)}
    pipeline._limit_leaving(0)
    assert len(pipeline._leaving) == 4
