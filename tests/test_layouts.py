"""The planner of layouts: what it compares, what it predicts, and what it says."""

import json
import math
import os
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

import distseg.cli.plan_layouts as plan_pictures
import distseg.cli.planned_training as planned_training
from distseg.cli.main import main
from distseg.cli.parsing import command_parser, config_from, parse
from distseg.cli.plan_layouts import choose_layout, notes_on, plan_layouts, text, with_best_layout
from distseg.cli.planned_training import PlannedTraining, memory_of_a_rank
from distseg.cli.streamed_layout import streamed_seconds
from distseg.comm.alone import Alone
from distseg.config.settings import (
    ApproximateConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.zoo import plain_model
from distseg.planning.cluster import Cluster
from distseg.planning.held import Policy, largest_holdings
from distseg.planning.layout_pictures import plot_layouts
from distseg.planning.live_tensors import TileTensors, stage_tensors
from distseg.planning.machine import NUMBERS, as_profile, load_machine, profile_names
from distseg.planning.mesh_layout import FAMILIES, MeshLayout, Prediction
from distseg.planning.mesh_search import Planner, _Found
from distseg.planning.rank_memory import held_at_once
from distseg.planning.rates import Rate, Rates
from distseg.planning.step_simulation import simulate_step
from distseg.planning.step_tasks import Tiles
from distseg.report.style import PALETTE
from distseg.tiling.tile import tiles, window
from distseg.training.programs import StepPrograms
from distseg.training.verify import verify

UNET = dict(name="unet", depth=2, num_convs=2, base_channels=4, in_channels=3, out_channels=3)
FREE = dict(call=1e-12, latency=1e-12, link=1e18, network=1e18)  # messages that take no time


def machine(**numbers):
    return replace(load_machine("summit-v100"), **{"memory": 1e12, "base": 0.0, **numbers})


def planner(
    size="96x128", batch=4, limit=None, at=None, loss="cross_entropy", norm_scope="group", **model
):
    config = Config(
        model=ModelConfig(**{**UNET, **model}),
        data=DataConfig(images=1),
        train=TrainConfig(accumulate=batch),
        spatial=SpatialConfig(norm_scope=norm_scope),
    )
    config = replace(config, loss=replace(config.loss, name=loss))
    found = at or machine()
    network = as_network(plain_model(config.model))
    return Planner(PlannedTraining(config, network, Size(size)).work(found), found, limit)


def layout(
    samples=1, tiles="1x1", stages=1, exchange="all", m=4, schedule="1f1b", recompute="never"
):
    return MeshLayout(samples, Size(tiles), stages, exchange, m, schedule, recompute)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_candidates_compute_the_step_on_all_ranks(ranks):
    plan = planner(batch=6)
    found = list(plan.candidates(ranks))
    assert found and len(set(found)) == len(found)
    for one in found:
        assert one.ranks == ranks
        assert one.samples * one.micro_batches == 6
        assert one.stages <= len(plan.work.costs.layers)


def best_of_all(plan: Planner, ranks: int) -> list[Prediction]:
    """Return what the search finds, by predicting all layouts."""
    fitting, too_large, fits = {}, {}, set()
    for place, one in enumerate(plan.candidates(ranks)):
        try:
            found = plan.predict(one)
        except ValueError:
            continue  # no split into stages fits
        if found.memory > plan.limit:
            rank = (found.memory, found.seconds, place)
            known = too_large.get(one.family, (rank, found))
            too_large[one.family] = min(known, (rank, found), key=lambda pair: pair[0])
        elif one.recompute == "never" or replace(one, recompute="never") not in fits:
            fits.add(one)
            rank = (found.seconds, found.memory, place)
            fitting.setdefault(one.family, []).append((rank, found))
    if not fitting:
        return sorted((p for _, p in too_large.values()), key=lambda p: (p.seconds, p.memory))
    fastest = min(p.seconds for known in fitting.values() for _, p in known)
    kept = []
    for known in fitting.values():
        known.sort(key=lambda pair: pair[0])
        kept += [each for each in known[:3] if each[1].seconds <= 1.25 * fastest] or known[:1]
    return [p for _, p in sorted(kept, key=lambda pair: pair[0])]


def drawn_planner(seed: int) -> tuple[Planner, int]:
    """Return a planner of a drawn step, machine and memory limit, and a number of ranks."""
    draw = random.Random(seed)
    at = load_machine(draw.choice(["summit-v100", "a100", "h100"]))
    network = at.network * draw.choice([0.01, 1, 100])
    at = replace(at, base=0.0, call=draw.choice([1e-9, 1e-6, 2e-5]), network=network)
    at = replace(at, exchange=[0.0, 1e-6, 2e-5][seed % 3], sharing=[0.0, at.traffic / 3][seed % 2])
    model = dict(
        depth=draw.choice([1, 2]),
        num_convs=draw.choice([1, 2]),
        norm=draw.choice(["batch", "instance", "none"]),
        size=draw.choice(["96x128", "64x64", "49x67", "200x136"]),
        loss=draw.choice(["cross_entropy", "cross_entropy", "dice"]),
        norm_scope=draw.choice(["group", "step"]),
    )
    alone = planner(batch=1, at=at, **model)
    whole = alone.predict(next(iter(alone.candidates(1)))).memory
    limit = whole * draw.choice([10, 1, 0.6, 0.3, 0.1, 1e-6])
    batch, ranks = draw.choice([1, 2, 3, 4, 6, 8]), draw.choice([1, 2, 4, 6, 8, 12])
    return planner(batch=batch, at=at, limit=limit, **model), ranks


SEEDS = *range(14), 18  # in 18, a cut fits only where activations are computed again


@pytest.mark.parametrize(
    "seed",
    [*SEEDS, *(pytest.param(n, marks=pytest.mark.slow) for n in range(200) if n not in SEEDS)],
)
def test_the_search_finds_the_best_of_all_layouts(seed):
    plan, ranks = drawn_planner(seed)
    assert plan.best(ranks) == best_of_all(plan, ranks)


def test_the_search_keeps_three_layouts_of_a_family_that_are_not_slow():
    found = _Found()
    for place, seconds in enumerate((1.0, 1.1, 1.2, 1.5)):
        assert found.wants("samples", seconds) == (place < 3), seconds
        prediction = Prediction(layout(samples=2, m=2), {"computing": seconds}, 1.0, (1,))
        found.add(prediction, place)
    assert found.wants("samples", 1.15) and not found.wants("samples", 1.21)
    assert found.wants("tiles", 1.5), "a slow layout, the first of its family"
    assert [one.seconds for one in found.fastest()] == [1.0, 1.1, 1.2]


@pytest.mark.parametrize("batch, limit", [(2, None), (6, 2e5)])
def test_the_search_finds_the_best_layouts_of_branches(batch, limit):
    """Some layers of a residual network do not wait for the layer before them."""
    model = ModelConfig("made_classifiers:residual", in_channels=2, out_channels=2)
    config = Config(model=model, data=DataConfig(images=1), train=TrainConfig(accumulate=batch))
    training = PlannedTraining(config, as_network(plain_model(model)), Size("40x52"))
    at = machine(call=1e-6)
    plan = Planner(training.work(at), at, limit)
    assert not plan.work.chained
    assert plan.best(6) == best_of_all(plan, 6)


@pytest.mark.slow
def test_the_front_has_the_fastest_layouts_within_their_memory():
    smallest = min(one.memory for one in planner(batch=2, limit=1).best(2))
    plan = planner(batch=2, limit=2 * smallest)
    searches = list(plan.front(2))
    assert len(searches) > 1 and searches[0] == plan.best(2)
    for before, after in pairwise(searches):
        limit = 0.8 * before[0].memory
        assert after == planner(batch=2, limit=limit).best(2)
        assert after[0].memory <= limit and after[0].seconds >= before[0].seconds
    last = planner(batch=2, limit=0.8 * searches[-1][0].memory)
    assert last.best(2)[0].memory > last.limit


@pytest.mark.parametrize("one", [layout(m=3), layout(samples=2, stages=2, m=2)])
def test_the_spans_of_a_layout_take_as_long_as_its_step(one):
    plan = planner()
    spans, predicted = plan.spans(one), plan.predict(one)
    assert max(span.end for span in spans) == pytest.approx(predicted.seconds)
    assert {span.rank for span in spans} == set(range(one.stages))
    reduced = sum(span.seconds for span in spans if span.kind == "reduce")
    assert reduced == pytest.approx(one.stages * predicted.parts["sum of gradients"])


def test_families_have_names():
    plan = planner(batch=8)
    found = {one.family for ranks in (1, 8) for one in plan.candidates(ranks)}
    assert found == set(FAMILIES) and len(FAMILIES) <= len(PALETTE)


def test_the_search_predicts_few_layouts(monkeypatch):
    plan = planner(size="512x512", batch=12, limit=5e6)
    predicted, cut = [], []
    find, split = plan._predicted, plan._cut
    monkeypatch.setattr(plan, "_predicted", lambda *of: predicted.append(1) or find(*of))
    monkeypatch.setattr(plan, "_cut", lambda layout: cut.append(1) or split(layout))
    every = len(list(plan.candidates(48)))
    plan.best(48)
    assert len(predicted) < 0.1 * every and len(cut) < 0.5 * every


def test_windows_of_many_small_tiles_reach_far():
    """Let tiles be so small that a window has several of them on each side."""
    plan = planner(size="512x512")
    tile, halo = 4, plan.work.reach.halo[0]
    assert plan.grids._longest_window(0, 128) >= tile + 2 * halo > 3 * tile
    most = Tiles(plan.work, Size("32x16"), "all").shares.max(1)
    shares = plan.grids.tile_work(Size("32x16"), "all").shares
    assert all(0.9 * largest < share <= largest for share, largest in zip(shares, most))
    assert most[-1] < 0.6 * most[0]  # layers compute only what later layers read


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 12])
def test_bounds_are_never_above_the_prediction(ranks):
    plan = planner(batch=6, at=machine(network=1e9))
    for one in plan.candidates(ranks):
        least = [plan._least_of_any(one), plan.least_seconds(one)]
        try:
            found = plan._cut(one)
        except ValueError:
            continue
        seconds = plan._predicted(one, found).seconds
        assert least[0] <= least[1] * (1 + 1e-12) and least[1] <= seconds, one
        assert one.stages == 1 or plan._least_of_split(one) <= seconds, one
        assert plan._least_of(one, found) <= seconds, one
        tile = plan.grids.tile_work(one.tiles, one.exchange).sizes
        least = plan.least_memory(one), plan.least_memory(one, tile)
        assert max(least) <= found.memory, one


@pytest.mark.parametrize("ranks", [2, 6])
def test_memory_of_stages_is_never_below_its_bound(ranks):
    plan, draw = planner(batch=6), random.Random(ranks)
    layers, seen, near = len(plan.work.costs.layers), 0, 0
    for one in plan.candidates(ranks):
        tile, policy = plan.grids.tile_work(one.tiles, one.exchange).sizes, plan._policy(one)
        for stage, least in enumerate(plan._memory.least_of_stages(one.stages, policy, tile)):
            a, b = sorted(draw.sample(range(layers + 1), 2))
            a, b = a if stage else 0, b if stage + 1 < one.stages else layers
            took = plan._memory.of_stage(range(a, b), stage, one.stages, policy, tile)
            assert least[a, b] <= took, (one, stage, a, b)
            seen, near = seen + 1, near + (least[a, b] > 0.7 * took)
    assert near > seen / 2 > 10  # The bound is of use.


def test_parts_add_up_and_splits_without_messages_divide_the_work():
    plan = planner(at=machine(**FREE), norm="none")
    one = plan.predict(layout())
    assert one.seconds == pytest.approx(sum(one.parts.values()))
    layers = plan.work.costs.layers
    passes = sum(layer.forward + layer.backward for layer in layers)
    assert one.parts["computing"] == pytest.approx(4 * passes, rel=1e-4)
    two = plan.predict(layout(samples=2, m=2))
    assert two.parts["computing"] == pytest.approx(one.parts["computing"] / 2, rel=1e-4)
    halves = plan.predict(layout(tiles="1x2", exchange="1"))
    assert halves.parts["computing"] == pytest.approx(one.parts["computing"] / 2, rel=1e-4)
    assert 0 <= halves.parts["cells computed twice"] < 0.02 * one.seconds
    again = plan.predict(layout(recompute="always"))
    forward = sum(layer.forward for layer in layers)
    assert again.parts["computed again"] == pytest.approx(4 * forward, rel=1e-4)
    assert again.memory <= one.memory


def test_halo_messages_go_forward_and_back_in_each_micro_batch():
    plan = planner(at=machine(**{**FREE, "latency": 1e-3}), norm="none")
    one = layout(tiles="1x2", exchange="1")
    messages = sum(count for _, count in plan.grids.tile_work(one.tiles, "1").halos)
    parts = plan.predict(one).parts
    expected = pytest.approx(2 * 4 * messages * 1e-3, rel=1e-3)
    assert messages > 3 and parts["halo messages"] == expected
    assert parts["stages wait"] < 1e-3 * parts["halo messages"]


def test_a_machine_may_take_longer_for_forward_passes():
    plain, slow = (planner(at=machine(**FREE, forward=f)).predict(layout()) for f in (1.0, 1.5))
    layers = planner(at=machine(**FREE)).work.costs.layers
    more = 4 * 0.5 * sum(layer.forward for layer in layers)
    assert slow.seconds - plain.seconds == pytest.approx(more)


def test_halo_exchanges_and_shared_norms_move_bytes_besides_their_messages():
    """Images of 16x24 with 8 channels; each of 2 tiles has 16x12 cells and a halo of 16x1."""
    network = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8))
    config = Config(
        model=ModelConfig(in_channels=8, out_channels=8),
        data=DataConfig(images=1),
        train=TrainConfig(accumulate=2),
    )
    at = machine(**FREE, traffic=1e6, exchange=0.5)
    training = PlannedTraining(config, as_network(network), Size("16x24"))
    plan = Planner(training.work(at), at)
    column = 4 * 8 * 16  # bytes of 16 cells
    for recompute in ("never", "always"):
        parts = plan.predict(layout(tiles="1x2", exchange="1", m=2, recompute=recompute)).parts
        forward, backward = 2 * 12 + 4, 5  # own cells copied; halos packed, unpacked and added
        assert parts["halo messages"] == pytest.approx(
            2 * (2 * 0.5 + (forward + backward) * column * 1e-6), rel=1e-6
        )
        forward_again, backward_again = 12, 2 * 12  # the feature map; it and its gradient
        assert parts["statistics of norms"] == pytest.approx(
            2 * (2 * 0.5 + (forward_again + backward_again) * column * 1e-6), rel=1e-6
        )
    computed = sum(layer.forward for layer in plan.work.costs.layers) / 2
    repeated = computed + 2 * 0.5 + (forward + forward_again) * column * 1e-6
    assert parts["computed again"] == pytest.approx(2 * repeated, rel=1e-6)
    alone = plan.predict(layout(samples=2, m=1)).parts
    assert alone["halo messages"] == alone["statistics of norms"] == 0
    slower = plan.on(replace(at, sharing=1e6 / 4), plan.work.costs)
    four = slower.predict(layout(tiles="1x2", exchange="1", m=2)).parts
    assert four["halo messages"] == pytest.approx(
        2 * (2 * 0.5 + 4 * (forward + backward) * column * 1e-6), rel=1e-6
    )
    assert four["statistics of norms"] == pytest.approx(
        2 * (2 * 0.5 + 4 * (forward_again + backward_again) * column * 1e-6), rel=1e-6
    )


@pytest.mark.parametrize(
    "more, expected",
    [
        # An exchange and a norm move 2.5 bytes for each byte of a tile, and 4.5 of its halo, one way.
        (lambda size, halo: 2e-3 + (2.5 * size + 4.5 * halo) / 1e9, (1e-3, 1e9)),
        (lambda size, halo: 2e-3, (1e-3, 2e10)),  # as fast as a copy can be
        (lambda size, halo: 0.0, (1e-7, 2e10)),
    ],
)
def test_two_sizes_of_tiles_give_the_time_of_an_exchange_and_of_its_bytes(
    monkeypatch, more, expected
):
    at = machine(**FREE, traffic=2e10)

    def found(world, device, side):
        line = 4 * planned_training._CHANNELS * side
        messages = at.message(2, line) + at.sum(2, 24 * planned_training._CHANNELS)
        return more(line * side, line) + messages

    monkeypatch.setattr(planned_training, "_seconds_of_sharing", found)
    measured = planned_training.with_sharing(at, SimpleNamespace(size=2), torch.device("cpu"))
    exchange, sharing = expected
    assert measured.exchange == pytest.approx(exchange, rel=0.05)
    assert measured.sharing == pytest.approx(sharing, rel=1e-6)


def test_tiles_at_the_border_of_an_image_copy_parts_of_tensors():
    """Each of 2 tiles pads one side only, so a kernel pads both, and a row of its result is unused.

    The image has 16x8 cells of 32 bytes. A tile reads 8 + 2 rows of it, which 9 and 8 rows follow.
    """
    conv = partial(nn.Conv2d, 8, 8, 3, padding=1)
    network = nn.Sequential(conv(), nn.LeakyReLU(0.1, True), conv(), nn.LeakyReLU(0.1, True))
    config = Config(
        model=ModelConfig(in_channels=8, out_channels=8),
        data=DataConfig(images=1),
        train=TrainConfig(accumulate=2),
    )
    training = PlannedTraining(config, as_network(network), Size("16x8"))
    work = Planner(training.work(machine()), machine()).grids.tile_work(Size("2x1"), "all")
    assert work.shares == (9 / 16, 9 / 16, 8 / 16, 8 / 16)
    row = 8 * 8 * 4
    first = 0, (10 + 2 * 9) * row  # the gradient of 9 rows is extended to 10
    second = 2 * 9 * row, 2 * 9 * row + (9 + 2 * 8) * row  # it also copies its input of 9 rows
    assert work.copies == (first, (0, 0), second, (0, 0))


@pytest.mark.parametrize("tiles, stages", [("1x1", 1), ("1x2", 1), ("1x1", 2)])
def test_activations_take_more_memory_than_their_tensors(tiles, stages):
    one = layout(tiles=tiles, stages=stages)
    plain, spread = (planner(at=machine(base=7.0, spread=s)) for s in (1.0, 1.5))
    weights = 4 * 4 * sum(layer.parameters for layer in plain.work.costs.layers)
    least, most = plain.predict(one), spread.predict(one)
    assert most.seconds == least.seconds
    if stages == 1:
        assert most.memory - 7 - weights == pytest.approx(1.5 * (least.memory - 7 - weights))
    assert least.memory < most.memory < 1.5 * least.memory


def test_layers_that_compute_nothing_take_no_time():
    plan = planner(batch=1, at=machine(call=1e3), dropout=0.0)
    costs, one = plan.work.costs, layout(m=1)
    quiet = {layer.name for layer in costs.layers if not layer.forward}
    assert {"enc0_stash", "enc0_drop0"} <= quiet and "enc0_pool" not in quiet
    assert costs.calls[0] == len(costs.layers) - len(quiet)
    seconds = plan.predict(one).seconds
    assert seconds == pytest.approx(1e3 * sum(costs.calls), rel=1e-4)
    cluster, balance = Cluster(plan.machine, 1), (len(costs.layers),)
    step = simulate_step(plan.work, plan.grids, one, balance, cluster)
    assert step.seconds == pytest.approx(seconds, rel=1e-4)


def test_the_spread_is_that_of_a_timed_step():
    config = Config(model=ModelConfig(**UNET), data=DataConfig(images=1))
    training = PlannedTraining(config, as_network(plain_model(config.model)), Size("1024x1024"))
    plan = planner(size="1024x1024", batch=1)
    weights = 4 * 2 * plan.work.parameters
    activations = plan.predict(layout(m=1)).memory - 2 * weights
    measured = training._spread(plan.grids.tensors, activations * 1.25 + weights)
    assert measured == pytest.approx(1.03 * 1.25, rel=1e-4)
    assert training._spread(plan.grids.tensors, 0.5 * activations) == 1
    assert training._spread(planner(size="64x64").grids.tensors, 1e9) == 2


def test_the_number_type_counts_in_memory_and_messages():
    size = Size("96x128")
    config = Config(model=ModelConfig(**UNET), data=DataConfig(images=1))
    found = {}
    for precision in ("fp64", "fp32", "bf16"):
        train = TrainConfig(accumulate=4, precision=precision)
        training = PlannedTraining(
            replace(config, train=train), as_network(plain_model(config.model)), size
        )
        found[precision] = Planner(training.work(machine()), machine())
    double, single, half = found.values()
    weights = double.work.parameters
    assert [p.work.costs.weight_bytes for p in found.values()] == [8, 4, 4]
    exchanged, alone = layout(tiles="1x2", exchange="1"), layout()

    def messages(plan: Planner) -> float:
        return sum(size for size, _ in plan.grids.tile_work(exchanged.tiles, "1").halos)

    assert messages(double) == 2 * messages(single) == 4 * messages(half) > 0
    memory = [p.predict(alone).memory for p in (double, single, half)]
    labels = 4 * single.grids.tensors.pixels[1]
    # Indices of poolings and labels stay int64.
    assert memory[0] + labels == pytest.approx(2 * memory[1], rel=3e-2)
    # Weights, gradients, the optimizer, images and the loss remain fp32.
    fixed = [16 * weights + 4 * sum(plan.grids.tensors.pixels) for plan in (single, half)]
    assert 0.5 < (memory[2] - fixed[1]) / (memory[1] - fixed[0]) < 0.7
    assert notes_on(single.work, machine()) == []
    assert "no FLOP/s of bf16: those of fp32" in notes_on(half.work, machine())[0]
    auto = PlannedTraining(config, as_network(plain_model(config.model)), size)
    assert auto.work(machine()).precision == "fp32"
    assert auto.work(machine(precision="bf16")).precision == "bf16"


@pytest.mark.parametrize("profile", ["summit-v100", "dgx1-v100"])
def test_bf16_is_never_planned_for_gpus_that_emulate_it(profile):
    training = PlannedTraining.of(auto(train=TrainConfig(precision="auto")), Size("96x128"))
    assert training.precisions(load_machine(profile)) == ["fp32"]


@pytest.mark.parametrize(
    "given, fast, chosen", [("auto", 4e14, "bf16"), ("auto", 1e11, "fp32"), ("fp32", 4e14, "fp32")]
)
def test_an_open_number_type_is_the_fastest_that_was_measured(tmp_path, given, fast, chosen):
    rates = [Rate("convolution", "fp32", 8, 4096, 1e12), Rate("convolution", "bf16", 8, 4096, fast)]
    measured, path = machine(base=1e9, rates=Rates(tuple(rates))), tmp_path / "m.yaml"
    path.write_text(as_profile(measured))
    config = auto(train=TrainConfig(accumulate=4, precision=given))
    training = PlannedTraining.of(config, Size("96x128"))
    found = plan_layouts(training, Alone(), 2, str(path))
    assert found.facts["precision"] == chosen
    left_open = given == "auto"
    assert (
        config.with_values(found.settings).train.precision
        == chosen
        == found.facts["chosen"].get("train.precision", given)
    )
    assert (
        any("as train.precision is auto; a step takes" in said for said in found.facts["notes"])
        == left_open
    )
    training = PlannedTraining.of(config, Size("96x128"))
    assert training.precisions(machine()) == [given if given != "auto" else "fp32"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_micro_batches_held_at_once(schedule, recompute):
    for stages in (1, 2, 5):
        for m in (1, 3, 12):
            policy = Policy(m, schedule, recompute)
            assert held_at_once(stages, policy) == [
                max(held.full for held in largest_holdings(stage, stages, policy))
                for stage in range(stages)
            ]


def test_a_map_with_its_halo_takes_memory_of_its_own():
    plan = planner(batch=2)
    layers = range(len(plan.grids.tensors.layers))
    read, exchanged = (plan.grids.tile_work(Size("1x2"), exchange) for exchange in ("level", "1"))
    points = [n for n, (_, count) in enumerate(exchanged.halos) if count]
    assert points == [n for n, frame in enumerate(exchanged.sizes.frames) if frame]
    without = replace(exchanged.sizes, frames=(0.0,) * len(layers))
    more, less = (
        stage_tensors(TileTensors(plan.grids.tensors, sizes), layers, (), (), False)
        for sizes in (exchanged.sizes, without)
    )
    assert more.full > less.full and more.working > less.working
    assert len(points) > sum(count > 0 for _, count in read.halos) > 0


def test_windows_cost_the_cells_that_layers_compute_and_exchange_spares_them():
    plan = planner()
    largest = max(
        window(tile, plan.work.image, plan.work.reach).pixels
        for tile in tiles(plan.work.image, (3, 4), plan.work.reach.stride)
    )
    read = plan.grids.tile_work(Size("3x4"), "all")
    assert largest / math.prod(plan.work.image) > read.shares[0] > read.shares[-1] == 1 / 12
    exchanged = plan.grids.tile_work(Size("3x4"), "1")
    assert max(exchanged.shares) < read.shares[0]
    assert sum(size for size, _ in exchanged.halos) > 0 == sum(size for size, _ in read.halos)
    # An inner tile of a 3x4 grid has eight neighbours.
    assert {count for _, count in exchanged.halos} == {0, 8}


@pytest.mark.parametrize("tiles, cells", [("1x2", 96), ("3x4", 34 * 34 - 32 * 32)])
def test_a_halo_message_has_the_cells_around_the_tile(tiles, cells):
    plan = planner(norm="none")
    halos = dict(
        zip(
            (layer.name for layer in plan.work.costs.layers),
            plan.grids.tile_work(Size(tiles), "1").halos,
        )
    )
    assert halos["enc0_conv0"][0] == cells * 3 * 4  # 3 bands of 4 bytes
    assert halos["enc0_conv1"][0] == cells * 4 * 4


def test_a_pipeline_waits_less_with_more_micro_batches():
    waits = {}
    for batch in (2, 8):
        found = planner(batch=batch, at=machine(**FREE)).predict(layout(stages=2, m=batch))
        waits[batch] = found.parts["stages wait"] / found.seconds
        assert sum(found.balance) == len(planner().work.costs.layers)
    assert waits[8] < waits[2]
    assert waits[2] == pytest.approx(1 / 3, abs=0.1), "(S - 1) / (m + S - 1), with equal stages"


def test_only_the_schedules_that_a_loss_allows():
    linear = {one.schedule for one in planner().candidates(2) if one.stages == 2}
    dice = {one.schedule for one in planner(loss="dice").candidates(2) if one.stages == 2}
    assert linear == {"gpipe", "1f1b", "zb-h1"} and dice == {"gpipe"}


def test_the_settings_of_a_layout_make_it(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": UNET, "train": {"accumulate": 4}}))
    for found in planner().best(4):
        flags = [w for k, v in found.layout.settings().items() for w in (f"--{k}", v)]
        config = config_from(parse(command_parser("train"), [str(tmp_path / "c.yaml"), *flags]))
        assert (config.mesh.samples, config.mesh.tiles, config.mesh.stages) == (
            found.layout.samples,
            found.layout.tiles,
            found.layout.stages,
        )
        assert config.train.accumulate == found.layout.micro_batches


@pytest.mark.parametrize("name", profile_names())
def test_profiles_say_where_their_numbers_are_from(name, tmp_path):
    found = load_machine(name)
    assert set(found.kinds) == set(found.sources) == set(NUMBERS)
    assert all(len(source) > 3 for source in found.sources.values())
    (tmp_path / "again.yaml").write_text(as_profile(found))
    assert load_machine(str(tmp_path / "again.yaml")) == found


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.pop("link"), "lacks link"),
        (lambda p: p.update(extra=1), "has extra"),
        (lambda p: p.update(link=3), "link must have the fields value, unit, kind and source"),
        (lambda p: p["link"].update(value=-1), "link has the value -1: give a number above 0"),
        (lambda p: p["link"].update(value="nan"), "link has the value 'nan'"),
        (lambda p: p["link"].update(unit="GB/s"), "link must be in B/s"),
        (lambda p: p.update(precision="fp8"), "has the precision 'fp8': give fp64, fp32, bf16"),
        (lambda p: p["link"].update(kind="rumour"), "its kind one of measured, data sheet, guess"),
    ],
)
def test_wrong_profiles_are_refused(tmp_path, change, message):
    entries = yaml.safe_load(as_profile(load_machine("a100")))
    change(entries)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(entries))
    with pytest.raises(ValueError, match=message):
        load_machine(str(tmp_path / "p.yaml"))


def test_a_profile_may_leave_the_last_numbers_out(tmp_path):
    entries = yaml.safe_load(as_profile(load_machine("a100")))
    del entries["spread"], entries["forward"]
    assert "exchange" not in entries
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(entries))
    found = load_machine(str(tmp_path / "p.yaml"))
    assert found.spread == 1 and found.kinds["spread"] == "guess"
    assert found.exchange == 0 and found.kinds["exchange"] == "guess"
    assert found.sharing == 0 and found.sharing_rate == found.traffic
    assert found.forward == 1


def test_no_such_profile_names_those_there_are(tmp_path):
    with pytest.raises(ValueError, match="no profile v200: .* a100, dgx1-v100, h100, summit-v100"):
        load_machine("v200")
    (tmp_path / "p.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        load_machine(str(tmp_path / "p.yaml"))


def run(words) -> int:
    """Run the command line in this process and return its exit code."""
    try:
        return main(words) or 0
    except SystemExit as e:
        return e.code


def config_file(tmp_path, **more):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"model": UNET, "train": {"accumulate": 4}, **more}))
    return str(path)


def test_the_command_plans_for_another_machine(tmp_path, capsys):
    words = [config_file(tmp_path), "--ranks", "4", "--image", "96x128", "--machine", "h100"]
    assert not run(["plan", *words])
    said = capsys.readouterr().out
    assert said.startswith("4 ranks, a step of 4 images of 96x128")
    assert "next: mpirun -n 4 distseg train " in said and "--mesh.samples" in said
    assert not run(["plan", *words, "--json", "--simulate"])
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]["ranks"] == 4
    assert found["simulated"]["seconds"] == pytest.approx(found["layouts"][0]["seconds"], rel=0.1)
    assert (
        "simulated, with shared links" in text(found, "x")
        and found["fits"]
        and found["layouts"][0]["seconds"] == min(row["seconds"] for row in found["layouts"])
    )


COMMENTED = """\
# A job.
model: {name: unet, depth: 2, num_convs: 2, base_channels: 4, in_channels: 3, out_channels: 3}
mesh:
  layout: auto  # for train
train:
  accumulate: 4  # images of a step
pipeline:
  balance:
    - 3
    - 17
  # the end
data: {images: 1}
"""


@pytest.mark.parametrize("limit, streams", [("4GB", True), ("60GB", False)])
def test_the_chosen_layout_is_written_among_the_comments(tmp_path, capsys, limit, streams):
    path, output = tmp_path / "c.yaml", tmp_path / "out.yaml"
    path.write_text(COMMENTED)
    words = [str(path), "--ranks", "2", "--image", "4096x4096", "--machine", "a100"]
    more = ["--limit", limit, "--train.seed", "5", "--write", str(output)]
    assert not run(["plan", *words, *more])
    assert f"next: mpirun -n 2 distseg train {output}" == capsys.readouterr().out.split("\n")[-2]
    written = output.read_text()
    assert all(word in written for word in ("# A job.", "# for train", "# images", "# the end"))
    config, before = (
        config_from(parse(command_parser("train"), [str(file)])) for file in (output, path)
    )
    assert config.mesh.samples * config.mesh.tiles.volume * config.mesh.stages == 2
    assert config.mesh.samples * config.train.accumulate == 4 and config.train.seed == 5
    assert (config.mesh.layout, config.pipeline.balance) == ("given", None)
    assert config.streaming.memory == (3_600_000_000 if streams else None)
    assert (config.model, config.loss) == (before.model, before.loss)
    assert path.read_text() == COMMENTED


def test_the_pictures_of_a_plan(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(plan_pictures, "plot_layouts", lambda *a, **k: drawn.append(a))
    words = [config_file(tmp_path), "--ranks", "2", "--image", "96x128", "--machine", "a100"]
    assert not run(["plan", *words, "--picture", str(tmp_path / "plan.svg")])
    assert str(tmp_path / "plan-timeline.svg") in capsys.readouterr().err
    assert (tmp_path / "plan-timeline.svg").stat().st_size > 1000
    ((layouts, front, limit, output, steps, _),) = drawn
    assert set(map(id, front)) <= set(map(id, layouts)) and output == tmp_path / "plan.svg"
    plot_layouts(layouts, front, limit, output, 10)
    said = output.read_text()
    assert all(f"<!-- {one.layout.family} -->" in said for one in layouts)
    assert f"<!-- {min(front, key=lambda one: one.seconds).layout} -->" in said


def test_text_that_cannot_be_changed_is_refused(tmp_path, refused):
    path = tmp_path / "c.yaml"
    path.write_text("data: &it {images: 1}\nmodel: {in_channels: 3, out_channels: 3}\n...\n")
    words = ["--ranks", "2", "--image", "96x128", "--machine", "a100", "--batch", "2"]
    said = refused("plan", str(path), *words, "--write", str(tmp_path / "out.yaml"))
    assert "cannot be" in said and not (tmp_path / "out.yaml").exists(), said


@pytest.mark.parallel([2])
@pytest.mark.covering(cases=1)
def test_train_chooses_the_layout_that_plan_prints(comm, monkeypatch):
    monkeypatch.setattr(PlannedTraining, "measure", lambda *_: machine(memory=16e9))
    for given in (auto(), auto(train=TrainConfig(accumulate=1, precision="fp64"))):
        training = PlannedTraining.of(given, Size("49x67"))
        planned = plan_layouts(training, comm, comm.size)
        chosen = with_best_layout(given, comm, Size("49x67"))
        assert comm.rank or given.with_values(planned.settings) == chosen


def test_the_command_times_this_machine_and_saves_it(tmp_path, capsys):
    words = [config_file(tmp_path), "--ranks", "2", "--image", "64x64"]
    assert not run(["plan", *words, "--save", str(tmp_path / "here.yaml"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == "this machine"
    saved = load_machine(str(tmp_path / "here.yaml"))
    assert saved.kinds["arithmetic"] == "measured" and saved.kinds["link"] == "guess"
    assert not run(["plan", *words, "--machine", str(tmp_path / "here.yaml")])


def test_too_little_memory_says_what_to_do(tmp_path, capsys):
    words = [config_file(tmp_path), "--ranks", "2", "--image", "96x128", "--machine", "a100"]
    assert not run(["plan", *words, "--limit", "1GB"])
    said = capsys.readouterr().out
    assert "no layout fits 1 GB a rank; the layouts above take the least memory" in said
    assert "give a larger --limit" in said and "next:" not in said


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ranks", "0"], "--ranks must be a whole number from 1"),
        (["--ranks", "2", "--batch", "0"], "--batch must be a whole number from 1"),
        (["--ranks", "2", "--machine", "abacus"], "no profile abacus"),
        (["--ranks", "2", "--data.images", "3", "--batch", "4"], "does not divide into micro"),
        (["--ranks", "10007"], "no layout on 10007 ranks"),
    ],
)
def test_wrong_flags(tmp_path, words, message, refused):
    rest = ["--image", "96x128"] + (["--machine", "h100"] if "--machine" not in words else [])
    assert message in refused("plan", config_file(tmp_path), *rest, *words)


class Opaque(nn.Module):
    """A network that distseg cannot follow."""

    def __init__(self, in_channels=3, out_channels=3):
        super().__init__()
        self.a = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x):
        return self.a(torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]))


def test_a_network_that_cannot_be_cut_is_told(tmp_path, refused):
    model = {"name": "test_layouts:Opaque", "in_channels": 3, "out_channels": 3}
    path = config_file(tmp_path, model=model)
    said = refused("plan", path, "--image", "64x64", "--ranks", "2", "--machine", "h100")
    assert "cannot follow the layers of test_layouts:Opaque" in said and "samples only" in said


# mesh.layout: auto


def auto(**more) -> Config:
    return replace(
        Config(
            model=ModelConfig(**UNET),
            data=DataConfig(images=1),
            train=TrainConfig(accumulate=4, precision="fp64"),
            mesh=MeshConfig(layout="auto"),
        ),
        **more,
    )


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_chosen_layout_takes_all_ranks_and_keeps_the_step(comm, accumulate):
    config = auto(train=TrainConfig(accumulate=accumulate, precision="fp64"))
    found = with_best_layout(config, comm, Size("49x67"))
    mesh = found.mesh
    assert mesh.samples * mesh.tiles.volume * mesh.stages == comm.size
    assert mesh.samples * found.train.accumulate == accumulate and mesh.layout == "given"
    assert set(comm.allgather(repr(found))) == {repr(found)}
    report = verify(found, comm, Size("49x67"))
    assert comm.bcast(report and report["max_error"]) <= 1e-12
    assert with_best_layout(found, comm) is found


@pytest.mark.parallel([2])
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_batch_norm_over_a_step_keeps_the_sample_groups(comm, norm):
    """Keep them, because batch norm would see other images together with other groups."""
    config = auto(model=ModelConfig(**UNET, norm=norm), spatial=SpatialConfig(norm_scope="step"))
    found = with_best_layout(config, comm, Size("49x67"))
    assert found.mesh.samples == 1 or norm == "instance"
    report = verify(found, comm, Size("49x67"))
    assert comm.bcast(report and report["max_error"]) <= 1e-12
    plans = [planner(norm=norm, norm_scope=scope) for scope in ("group", "step")]
    assert [p.work.samples for p in plans] == [None, 1 if norm == "batch" else None]


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_a_network_of_vectors_gets_a_layout(comm):
    model = ModelConfig("made_classifiers:residual", in_channels=2, out_channels=2)
    config = auto(model=model, spatial=SpatialConfig(exchange_every=1, fuse_below=8))
    found = with_best_layout(config, comm, Size("40x52"))
    report = verify(found, comm, Size("40x52"))
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(cases=1)
def test_a_network_that_cannot_be_followed_splits_samples(comm):
    config = auto(model=ModelConfig("test_layouts:Opaque", in_channels=3, out_channels=3))
    config = replace(config, train=TrainConfig(accumulate=6))
    found = with_best_layout(config, comm, Size("49x67"))
    assert (found.mesh.samples, found.train.accumulate) == (comm.size, 6 // comm.size)
    config = replace(config, train=TrainConfig(accumulate=1))
    with pytest.raises(ValueError, match="1 micro-batches a step do not divide among"):
        with_best_layout(config, comm, Size("49x67"))


def chosen_of(plan: Planner, ranks: int, best, sizes=((96, 128),)):
    """Return the layout that is chosen for a training of the images of :func:`planner`."""
    config = auto(train=TrainConfig(accumulate=plan.work.batch), mesh=MeshConfig())
    network = as_network(plain_model(config.model))
    training = PlannedTraining(config, network, Size("96x128"), sizes=frozenset(sizes))
    return choose_layout(training, plan, ranks, best)[0]


def test_all_images_must_fit_the_chosen_tiles():
    """An image as small as the network's stride leaves only layouts without tiles."""
    plan = planner(batch=1, at=machine(**FREE))
    sizes = [(96, 128), (4, 4)]
    small = chosen_of(plan, 4, plan.best(4, sizes), sizes)
    assert small.layout.tiles.volume == 1 and small.memory is None
    grids = {one.tiles for one in plan.candidates(4, [(8, 4)])}
    assert grids == {Size("1x1"), Size("2x1")}


def test_the_stages_of_the_chosen_layout_are_those_that_were_predicted():
    plan = planner()
    found = plan.predict(layout(stages=2))
    chosen = chosen_of(plan, 2, [found])
    assert len(found.balance) == 2 and chosen.values()["pipeline.balance"] == list(found.balance)
    assert chosen.settings()["pipeline.balance"] == "[{},{}]".format(*found.balance)
    alone = chosen_of(plan, 1, [plan.predict(layout())])
    assert alone.values()["pipeline.balance"] is None and "pipeline.balance" not in alone.settings()


@pytest.mark.parametrize("batch, mesh", [(1, (1, 4)), (2, (2, 2)), (4, (4, 1)), (6, (2, 2))])
def test_tiles_are_streamed_if_no_layout_fits(batch, mesh):
    plan = planner(batch=batch, limit=1e6)
    found = chosen_of(plan, 4, plan.best(4))
    assert (found.layout.samples, found.layout.tiles.volume) == mesh
    assert found.layout.stages == 1 and found.memory == 900_000
    # An image as small as the network's stride has one tile, so only stages share it.
    assert chosen_of(planner(batch=1, limit=1e6), 4, [], [(4, 4)]).layout.stages == 4


@pytest.mark.parametrize("limit, stages, balanced", [(2e8, 1, 0), (1e8, 2, 1), (7e7, 4, 1)])
def test_weights_that_are_too_large_for_a_rank_are_split_into_stages(limit, stages, balanced):
    """Tiles of 2048x2048 pixels are streamed; weights, gradients and Adam take 126 MB."""
    config = auto(
        model=ModelConfig(**UNET | dict(depth=5, num_convs=1, base_channels=34)),
        train=TrainConfig(accumulate=1, precision="fp32"),
        mesh=MeshConfig(),
    )
    network = as_network(plain_model(config.model))
    weights = sum(p.numel() for p in network.parameters()) * 16
    assert 1.2e8 < weights < 1.3e8
    training = PlannedTraining(config, network, Size("2048x2048"))
    at = machine(**FREE)
    plan = Planner(training.work(at), replace(at, base=0.0), limit)
    found, streamed = choose_layout(training, plan, 4, plan.best(4))
    assert (found.layout.stages, bool(found.balance)) == (stages, bool(balanced))
    assert found.memory == int(0.9 * limit) and streamed["seconds"] > 0


@pytest.mark.parametrize("grid, norm", [("1x1", "none"), ("2x2", "none"), ("2x2", "instance")])
def test_the_seconds_of_streamed_tiles_are_those_of_their_operations(grid, norm):
    plan = planner(batch=3, at=machine(**FREE), norm=norm)
    config = auto(model=ModelConfig(**UNET, norm=norm), streaming=StreamingConfig(tiles=grid))
    one = layout(samples=1, m=3)
    config = config.with_values({**one.values(), "train.accumulate": 1})
    network = as_network(plain_model(config.model))
    programs = StepPrograms(config, network, plan.work.image, int(plan.machine.base))
    costs = plan.work.costs
    forward, backward = 3 * sum(costs.forward), 3 * sum(costs.backward)
    seconds = streamed_seconds(programs, plan, one) - plan.seconds_besides_passes(one)
    if grid == "1x1":
        calls = 3 * 2 * len(costs.layers) * plan.machine.call
        assert seconds == pytest.approx(forward + backward + calls)
    elif norm == "none":
        wide = max(
            window(each, plan.work.image, plan.work.reach).pixels
            for each in tiles(plan.work.image, (2, 2), plan.work.reach.stride)
        )
        share = 4 * wide / math.prod(plan.work.image)
        assert forward + backward < seconds <= share * (forward + backward)
    else:  # segments between norms are computed again before their backward pass
        assert seconds > 1.5 * forward + backward
        late = planner(batch=3, at=machine(**FREE | {"call": 1.0}), norm=norm)
        calls = streamed_seconds(programs, late, one) - late.seconds_besides_passes(one) - seconds
        assert 3 < calls / (3 * 4 * len(costs.layers)) < 4  # and few layers in two segments


def test_a_single_process_has_the_memory_of_one_of_as_many_as_the_cores_suffice_for(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    memory, ranks = memory_of_a_rank(Alone(), torch.device("cpu"))
    assert ranks == 4
    assert memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4


@pytest.mark.parametrize("limit", ["4GB", "1GB"])
def test_plan_says_how_long_streaming_takes(tmp_path, capsys, limit):
    words = [config_file(tmp_path), "--ranks", "2", "--image", "4096x4096", "--machine", "a100"]
    assert not run(["plan", *words, "--limit", limit, "--json"])
    found = json.loads(capsys.readouterr().out)
    said = text(found, "c.yaml")
    if limit == "4GB":
        assert found["streamed"]["seconds"] > found["layouts"][0]["seconds"]
        assert "streaming: fits 3.6 GB a rank; a step takes" in said
        assert said.endswith("--streaming.memory 3.6GB")
    else:
        assert (
            "streaming.memory: streaming.memory is 900 MB, but a process" in said and "90%" in said
        )
        assert "streaming.memory" not in found["chosen"]


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_a_job_streams_what_does_not_fit(comm, monkeypatch):
    """Let a rank have 1.5 GB, and a layout seem to need 2 GB."""
    monkeypatch.setattr(PlannedTraining, "measure", lambda *_: machine(memory=1.5e9))
    cut = Planner._cut
    monkeypatch.setattr(Planner, "_cut", lambda *a: replace(cut(*a), memory=2e9))
    found = with_best_layout(auto(), comm, Size("49x67"))
    assert found.streaming.memory == 1_350_000_000 and found.mesh.samples == comm.size
    report = verify(found, comm, Size("49x67"))
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "--memory", "1GB"], "mesh.layout is auto, but streaming is on"),
        (["verify", "--approximate.halo", "2"], "mesh.layout is auto, but approximate.halo is 2"),
        (["verify", "--pipeline.balance", "[3,4]"], r"but pipeline.balance is [3, 4]"),
        (["submit", "--system", "slurm"], "mesh.layout is auto, but distseg submit needs mesh"),
    ],
)
def test_what_auto_does_not_know_is_refused(tmp_path, words, message, refused):
    command, *rest = words
    said = refused(command, config_file(tmp_path), "--mesh", "auto", *rest)
    assert message in said, said


def test_plan_says_which_settings_its_layouts_leave_out():
    given = auto(
        approximate=ApproximateConfig(halo=2),
        pipeline=PipelineConfig(balance=[3, 4]),
        streaming=StreamingConfig(tiles="2x2"),
    )
    halo, balance, tiles = plan_layouts(
        PlannedTraining.of(given, Size("96x128")), Alone(), 2, "a100"
    ).facts["notes"][:3]
    assert "approximate.halo is 2" in halo and "without this setting" in halo
    assert "pipeline.balance is [3, 4]" in balance
    assert "streaming.tiles is 2x2" in tiles


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan", "FILE"], "needs --ranks N, to choose a layout"),
        (["train", "--mesh.tiles", "1x2", "FILE"], "the config file must be the first argument"),
        (["train", "--optim.l", "5"], "did you mean --optim.lr"),
    ],
)
def test_a_wrong_form_of_a_command_names_the_right_one(tmp_path, words, message, refused):
    words = [config_file(tmp_path) if word == "FILE" else word for word in words]
    assert message in refused(*words)


def test_the_table_names_what_is_lost():
    plan = planner()
    best = plan.best(4)
    rows = [
        {
            "settings": p.layout.settings(), "family": p.layout.family, "seconds": p.seconds,
            "memory": p.memory, "parts": p.parts, "largest_loss": p.binds, "balance": [],
        }
        for p in best
    ]  # fmt: skip
    facts = dict(
        precision="fp32",
        notes=[],
        ranks=4,
        batch=4,
        image="96x128",
        machine="m",
        limit=1e12,
        fits=True,
        streamed=None,
        simulated=None,
        steps=10,
    )
    said = text({**facts, "layouts": rows, "chosen": {}, "hangs_on": []}, "c.yaml")
    for family in {p.layout.family for p in best} - {best[0].layout.family}:
        assert f"{family}: its best layout takes" in said
    assert "an epoch of 10 steps" in said
