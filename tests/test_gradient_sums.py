"""Sums of gradients that start while the backward pass still runs: when, with which bits, and that a sum which starts too early is found."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from made_transports import over
from mpirunner.transport import NAME as TRANSPORT
from test_exact import TOLERANCE, config
from torch import nn

import distseg
from distseg.comm import reducer
from distseg.comm.alone import Alone
from distseg.comm.gradient_sums import GradientSums
from distseg.comm.mesh import Mesh
from distseg.comm.reducer import Gradients, Reducer, horovod_works
from distseg.config.settings import ModelConfig, OptimConfig
from distseg.config.sizes import Size
from distseg.layers.conv import weights_apart
from distseg.models.capture.capture import as_network
from distseg.runtime.actions import Backward
from distseg.runtime.last_additions import last_additions
from distseg.runtime.optimizer import freeze
from distseg.training.engine import Engine
from distseg.training.verify import own_pieces, prepare, verify

# One process, with a reducer that only takes notes


class Notes(Reducer):
    """Reducer that notes the buckets at the start of their sums, among other ``events``."""

    name, early = "notes", True

    def __init__(self):
        self.events, self.values = [], []

    def start(self, bucket):
        self.events.append(f"sum {len(self.values)}")
        self.values.append(bucket.clone())

    def finish(self):
        self.events.append("wait")


class Step:
    """A step of some layers with a bucket for each parameter, from the last to the first."""

    def __init__(self, *layers: nn.Module, parameters=None):
        self.layers, self.reducer, self.mesh = layers, Notes(), Mesh(Alone())
        every = nn.Sequential(*layers).parameters() if parameters is None else parameters
        self.gradients = Gradients([p for p in every if p.requires_grad])
        self.sums = GradientSums(self.gradients, self.reducer, self.mesh)

    def backward(self, apart: bool = False) -> None:
        """Run both passes; events have ``back N`` when layer N's backward pass begins."""
        x = torch.ones(1, 2, 8, 8).requires_grad_()
        with weights_apart(self.mesh.waits)({}) if apart else nullcontext():
            for number, layer in enumerate(self.layers):
                x = layer(x)
                x.register_hook(
                    lambda _, number=number: self.reducer.events.append(f"back {number}")
                )
        x.sum().backward()

    def run(self) -> list[str]:
        """Run a step of one backward pass, and return the events."""
        self.sums.begin()
        with self.sums.last_pass(self.gradients.parameters):
            self.backward()
        self.sums.finish()
        assert all(map(torch.equal, self.reducer.values, self.gradients.buckets))
        return self.reducer.events


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(reducer, "_BUCKET", 1)


def conv() -> nn.Conv2d:
    return nn.Conv2d(2, 2, 3, bias=False, padding=1)


def test_a_sum_starts_before_the_backward_pass_of_the_layer_before():
    events = Step(conv(), conv(), conv()).run()
    assert events == ["back 2", "sum 0", "back 1", "sum 1", "back 0", "sum 2", "wait"]


def test_weights_of_several_layers_wait_for_the_first_of_them():
    shared = conv()
    events = Step(shared, conv(), shared).run()
    assert events == ["back 2", "back 1", "sum 0", "back 0", "sum 1", "wait"]


def test_unused_parameters_wait_for_the_end_of_the_pass_and_so_do_buckets_behind_them():
    used, unused, last = conv(), conv(), conv()
    step = Step(used, last, parameters=[used.weight, unused.weight, last.weight])
    assert step.run() == ["back 1", "sum 0", "back 0", "sum 1", "sum 2", "wait"]
    assert not step.reducer.values[1].any()


def test_frozen_parameters_have_no_bucket():
    frozen = conv().requires_grad_(False)
    assert Step(conv(), frozen, conv()).run() == [
        *("back 2", "sum 0", "back 1", "back 0", "sum 1", "wait")
    ]


@pytest.mark.parametrize("layers", [2, 3], ids=["two layers", "two of three share"])
def test_weight_gradients_that_are_put_off_are_waited_for(layers):
    first = conv()
    step = Step(first, conv(), *[first] * (layers - 2))
    with step.mesh.waits.putting_off(), step.mesh.waits.moving(step.sums.advance):
        step.sums.begin()
        with step.sums.last_pass(step.gradients.parameters):
            step.backward(apart=True)
        assert len(step.reducer.values) < 2, "a gradient is still put off"
        while step.mesh.waits.do_next():
            pass
        assert len(step.reducer.values) == 2
    step.sums.finish()
    assert all(map(torch.equal, step.reducer.values, step.gradients.buckets))
    assert all(map(torch.any, step.reducer.values))


def test_a_sum_that_starts_before_the_last_addition_is_found():
    step = Step(conv())
    step.sums.begin()
    with step.sums.last_pass(step.gradients.parameters):
        step.backward()
    step.backward()
    with pytest.raises(RuntimeError, match="bucket 0 of 1 were changed after their sum"):
        step.sums.finish()


def test_a_pass_that_fails_after_a_sum_has_started_ends_the_job():
    step = Step(conv(), conv())

    def fail(gradient):
        raise KeyError("a")

    step.layers[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        step.run()
    with pytest.raises(RuntimeError, match="after 1 of 2 sums of gradients had started, .* start"):
        step.run()


def test_the_last_additions_of_a_program():
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    parts = {"first": [a, b, b], "second": [b, c]}
    program = ["first", None, "second", "second", "first", None]
    found = last_additions(program, parts.__getitem__)
    assert {place: set(those) for place, those in found.items()} == {3: {c}, 4: {a, b}}


# Several ranks


class Net(nn.Module):
    """Convolutions of which one runs twice, one is frozen and one runs never."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.first, self.twice, self.frozen = (
            nn.Conv2d(n, 4, 3, padding=1) for n in (in_channels, 4, 4)
        )
        self.never, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, out_channels, 1)

    def forward(self, x):
        x = self.twice(F.relu(self.twice(F.relu(self.first(x)))))
        return self.last(F.relu(self.frozen(x)))


OWN = ModelConfig(f"{__name__}:Net", in_channels=3, out_channels=3)
STREAMED = dict(streamed=Size("2x1"), scratch="memory")
CASES = {  # by the number of ranks
    2: {
        "samples": dict(samples=2, accumulate=2, norm="batch"),
        "tiles": dict(tiles="1x2"),
        "exchanged tiles": dict(tiles="1x2", exchange_every="1", tiles_per_rank=Size("2x1")),
        "own network": dict(tiles="1x2", model=OWN),
        "streamed": dict(tiles="1x2", accumulate=2, **STREAMED),
    },
    3: {
        "own network, exchanged": dict(tiles="1x3", model=OWN, exchange_every="1"),
        "streamed, no norm": dict(samples=3, norm="none", **STREAMED),
    },
    4: {
        "stages": dict(samples=2, stages=2, accumulate=3, schedule="1f1b"),
        "zb-h1": dict(samples=2, stages=2, accumulate=3, schedule="zb-h1"),
        "v-shaped": dict(
            tiles="1x2", stages=2, accumulate=2, placement="v-shaped", schedule="zb-h1"
        ),
        "streamed stages": dict(samples=2, stages=2, accumulate=2, norm="none", **STREAMED),
    },
}


def config_of(kind: str, settings: dict):
    settings = dict(settings)
    model = settings.pop("model", None)
    found = config(num_convs=1, base_channels=2, reducer=kind, **settings)
    if model is None:
        return found
    return replace(found, model=model, optim=OptimConfig(rates={"frozen": 0}))


def started_early(engine: Engine) -> list[int]:
    """Return a list that grows by a number in each later step: the sums that start during its backward pass."""
    started = []

    def sum_gradients():
        started.append(len(engine.sums._versions))
        engine.sums.finish()

    engine.sum_gradients = sum_gradients
    return started


def gradients_of(engine: Engine, images, early: bool) -> list[torch.Tensor]:
    """Return a step's gradients on this rank."""
    engine.reducer.early = early
    engine.backward(own_pieces(engine, images))
    return [p.grad.clone() for p in engine.parameters]


def engine_of(comm, found) -> tuple[Engine, object]:
    """Return an engine and the images of a step."""
    prepared = prepare(found, Size("32x40"))
    freeze(prepared.model, found.optim)
    mesh = Mesh(comm, found.mesh.samples, found.mesh.tiles, found.mesh.stages)
    engine = Engine(
        prepared.config, mesh, as_network(prepared.model), prepared.size, precision="fp64"
    )
    return engine, prepared.images()


def check(comm, kind: str, case: str) -> None:
    found = config_of(kind, CASES[comm.size][case])
    report = verify(found, comm, Size("32x40"))
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE, case
    engine, images = engine_of(comm, found)
    started = started_early(engine)
    late, early = (gradients_of(engine, images, early) for early in (False, True))
    assert all(map(torch.equal, early, late)), case
    assert started[0] == 0 and started[1] > len(engine.gradients.buckets) / 2, case


@pytest.mark.parallel(2)
@pytest.mark.parametrize("case", ["exchanged tiles", "streamed"])
def test_early_sums_have_the_same_bits(comm, case):
    check(comm, TRANSPORT, case)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("kind", ["mpi", "horovod", "torch"])
def test_early_sums_of_every_layout_have_the_same_bits(comm, kind):
    if kind == "horovod" and not horovod_works():
        pytest.skip("Horovod is not installed")
    comm = over("torch" if kind == "torch" else "mpi", comm)
    for case in CASES[comm.size]:
        check(comm, kind, case)


@pytest.mark.parallel(2)
def test_sums_that_start_a_micro_batch_too_early_are_found(comm):
    engine, images = engine_of(comm, config_of(TRANSPORT, CASES[2]["samples"]))
    last_additions = engine.pipeline._last_additions

    def too_early(program):
        """Return the parameters of the last backward pass at the place of the first one."""
        (parameters,) = last_additions(program).values()
        return {next(n for n, op in enumerate(program) if isinstance(op, Backward)): parameters}

    engine.pipeline._last_additions = too_early
    with pytest.raises(
        RuntimeError, match="bucket 0 of .* were changed after their sum .* started"
    ):
        engine.backward(own_pieces(engine, images))


@pytest.mark.parallel(2)
def test_early_sums_of_a_loop_in_python(comm):
    """Calls inside of no_sync start no sum; the next call sums their gradients too, and a scale changes no bit."""
    mesh = distseg.init_mesh(samples=2, comm=comm)
    model = distseg.distribute(Net(3, 3).double(), mesh, reducer=TRANSPORT)
    criterion = distseg.PixelLoss(partial(F.cross_entropy, reduction="none"))
    started = started_early(model.engine)
    torch.manual_seed(comm.rank)
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    y = torch.randint(3, (1, 8, 8))

    def gradients(early: bool) -> list[torch.Tensor]:
        model.engine.reducer.early = early
        model.zero_grad()
        with model.no_sync():
            model.backward(x, y, criterion)
        model.backward(x, y, criterion, scale=0.3)
        criterion(model(model.shard(x)), model.shard(y)).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    gradients(True)  # The first step finds out which parameters the loss does not reach.
    started.clear()
    late, early = gradients(False), gradients(True)
    assert len(late) == len(early) == 8 and all(map(torch.equal, early, late))
    assert len(started) == 4 and started[:2] == [0, 0] and min(started[2:]) > 0
