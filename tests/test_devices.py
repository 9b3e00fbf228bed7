"""One rank, several devices: what torchgpipe computes of our stages is the gradient of the serial program, and of placement over ranks."""

import copy
import importlib.util
import threading

import pytest
import torch
from mpirunner.transport import NAME as TRANSPORT
from test_exact import NORMS, check, config
from test_pipeline import RECOMPUTE
from test_train import config as train_config
from test_train import weights, write_store

from distseg.cli.load import load_predictor
from distseg.comm.mesh import Mesh
from distseg.config.settings import PipelineConfig
from distseg.config.sizes import Size
from distseg.data.store.store import Store
from distseg.inference.image_source import store_image
from distseg.layers.context import Context
from distseg.models.zoo import outline_model
from distseg.runtime.devices import devices_of
from distseg.training.engine import Engine
from distseg.training.loop import train
from distseg.training.verify import RandomImages, relative_errors

CPU = torch.device("cpu")


def on(devices: int, **settings) -> dict:
    return {"placement": "devices", "devices": ["cpu"] * devices, **settings}


@pytest.mark.parallel(1)
@pytest.mark.parametrize(
    "norm, devices", [("instance", 1), *((norm, devices) for norm in NORMS for devices in (2, 3))]
)
def test_every_norm_and_number_of_devices(comm, norm, devices):
    check(comm, "33x47", norm=norm, accumulate=2, images=2, **on(devices))


@pytest.mark.parallel(1)
@pytest.mark.parametrize("recompute", ["except_last", "always"])
@pytest.mark.parametrize("norm", NORMS)
def test_recomputing(comm, recompute, norm):
    check(
        comm, "33x47", norm=norm, recompute=recompute, accumulate=3, images=2, loss="dice", **on(2)
    )


@pytest.mark.parallel(1)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_number_of_micro_batches(comm, micro_batches, recompute):
    check(
        comm,
        "33x47",
        accumulate=micro_batches,
        loss="cross_entropy + 0.5*dice",
        dice_over="batch",
        recompute=recompute,
        **on(3),
    )


@pytest.mark.parallel(1)
@pytest.mark.parametrize("balance", [[1, 48], [9, 1, 39], [10, 18, 1, 20], [21, 8, 20]])
def test_cuts_anywhere(comm, balance):
    """Before and after a stash and a pop, stages without weights."""
    check(
        comm, "33x47", placement="devices", balance=balance, accumulate=2, recompute="except_last"
    )


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    "norm, more",
    [
        ("instance", {}),
        ("batch", dict(reducer=TRANSPORT)),
        ("batch", dict(recompute="always", images=2)),
    ],
)
def test_data_parallel(comm, norm, more):
    check(comm, "33x47", samples=2, norm=norm, accumulate=2, loss="dice", **on(2, **more))


@pytest.mark.parallel(2)
@pytest.mark.parametrize("norm, frozen", [("none", False), ("batch", True)])
def test_tiles_where_norms_share_nothing(comm, norm, frozen):
    check(comm, "61x75", tiles="1x2", norm=norm, frozen_norm=frozen, accumulate=2, **on(2))


@pytest.mark.parallel(2)
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_placements_agree(comm, norm):
    """The same weights and images: each rank compares its stage's gradients with those of both stages on its own devices."""
    settings = dict(norm=norm, accumulate=3, loss="dice")
    over_ranks = gradients(config(stages=2, **settings), Mesh(comm, stages=2))
    on_devices = gradients(config(**settings, **on(2)), Mesh(comm.Split(comm.rank)))
    assert max(relative_errors(on_devices, over_ranks).values()) < 1e-12
    assert set(over_ranks) < set(on_devices) and all(comm.allgather(bool(over_ranks)))


def engine_of(found, mesh, precision="fp64"):
    """An engine, and its part of a step's random images."""
    engine = Engine(found, mesh, outline_model(found.model), (33, 47), precision=precision)
    images = RandomImages(Size("33x47"), 3, 3, found.loss, found.train.seed)
    return engine, [
        images.mine([m], Size("1x1"), Size("1x1"), (0, 0), engine.reach)
        for m in range(found.train.accumulate)
    ]


def gradients(found, mesh) -> dict:
    engine, micro_batches = engine_of(found, mesh)
    engine.backward(micro_batches)
    return {name: p.grad for name, p in engine.model.model.named_parameters()}


@pytest.mark.parallel(1)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_autocast_reaches_the_threads(comm, recompute):
    """bfloat16 arithmetic in the same layers: the same losses, bit by bit, as without a pipeline, and other ones than float32's."""
    losses = []
    for pipeline, precision in ((on(2, recompute=recompute), "bf16"), ({}, "bf16"), ({}, "fp32")):
        engine, micro_batches = engine_of(config(accumulate=2, **pipeline), Mesh(comm), precision)
        losses.append(
            [engine.backward(micro_batches), engine.update(1e-3), engine.backward(micro_batches)]
        )
    assert losses[0][0] == losses[1][0] != losses[2][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parallel(1)
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_training_validation_and_prediction(comm, shared_path, norm):
    """A run on three devices is the run without a pipeline, and goes on with two."""
    write_store(shared_path / "store.h5")

    def run(name, pipeline, **more):
        return train_config(
            shared_path, norm=norm, accumulate=2, output=str(shared_path / name), **pipeline, **more
        )

    plain, three, two = (
        run("plain", {}, epochs=1),
        run("three", on(3, recompute="except_last"), epochs=1),
        run("three", on(2), epochs=2, resume=True),
    )
    one, other = train(plain, comm), train(three, comm)
    assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-12)  # sums of rounded parts
    assert one == other
    cut, whole = (
        {name: w.double() for name, w in weights(shared_path / name).items()}
        for name in ("three", "plain")
    )
    assert max(relative_errors(cut, whole).values()) < 1e-10
    assert train(two, comm)
    source = store_image(Store(shared_path / "store.h5"), "image3")
    whole, cut = (
        [
            y
            for _, y in load_predictor(
                str(shared_path / "three"), found, comm, torch.device("cpu")
            )[0](source)
        ]
        for found in (plain, two)
    )
    assert (
        len(whole) > 1 and max(abs(a - b).max() for a, b in zip(whole, cut)) < 1e-12
    )  # a processor's kernels may round by the size of a window


def test_a_thread_has_its_own_forward_pass():
    context, seen = Context(), []
    context.places, context.current = ["a"], 3
    with context.repeating():
        thread = threading.Thread(
            target=lambda: seen.append((context.places, context.current, context.tracking))
        )
        thread.start()
        thread.join()
        assert not context.tracking
    assert seen == [([], 0, True)] and context.tracking
    copied = copy.deepcopy(context)
    assert (copied.places, context.places) == ([], ["a"])


def test_a_rank_has_its_share_of_the_gpus():
    found = config(placement="devices", balance=[20, 29])
    assert devices_of(found.pipeline, CPU) == [CPU, CPU]
    assert devices_of(found.pipeline, torch.device("cuda", 2), gpus=6) == [
        torch.device("cuda", 4),
        torch.device("cuda", 5),
    ]
    with pytest.raises(
        ValueError,
        match="2 stages would be on cuda:4 to cuda:5, but this process sees 4 GPUs: start fewer ranks a node",
    ):
        devices_of(found.pipeline, torch.device("cuda", 2), gpus=4)
    assert devices_of(config().pipeline, CPU) == [CPU]


def wrong(**settings):
    return dict(placement="devices", **settings)


PIPELINES = {
    "no devices": (wrong(), r"pipeline\.placement .*\(DS206\)"),
    "an empty list": (wrong(devices=[]), r"pipeline\.placement .*\(DS206\)"),
    "devices of another placement": (dict(devices=["cpu"]), r"pipeline\.devices .*\(DS205\)"),
    "another number than balance": (
        wrong(devices=["cpu"], balance=[9, 40]),
        r"pipeline\.devices .*pipeline\.balance .*\(DS207\)",
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_that_contradict_themselves(name):
    settings, text = PIPELINES[name]
    with pytest.raises(ValueError, match=text):
        PipelineConfig(**settings)


CONFIGS = {
    "stages on ranks too": (on(2, stages=2), r"pipeline\.placement .*mesh\.stages .*\(DS229\)"),
    "1f1b": (on(2, schedule="1f1b"), r"pipeline\.schedule is 1f1b, .*\(DS230\)"),
    "tiles": (on(2, tiles_per_rank=Size("1x2")), r"spatial\.tiles_per_rank .*\(DS231\)"),
    "no such device": (
        wrong(devices=["cpu", "gpu"]),
        "names 'gpu', which is not a device: write cpu, cuda:0",
    ),
    "a device that is none": (wrong(devices=["meta"]), "names 'meta', which is not a device"),
    "another kind than the rank's": (
        wrong(devices=["cpu", "cuda:0"]),
        "cuda:0, but this rank computes on cpu: set run.device to cuda",
    ),
    "a balance of other layers": (
        on(2, balance=[9, 9]),
        "pipeline.balance 9 9 adds up to 18 layers, but the model has 49",
    ),
}


@pytest.mark.parallel(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_can_not_be_is_refused_before_any_work(comm, name):
    settings, text = CONFIGS[name]
    with pytest.raises(ValueError, match=text):
        engine_of(config(**settings), Mesh(comm))


@pytest.mark.parallel(1)
def test_without_torchgpipe(comm, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match="needs torchgpipe: pip install --no-deps torchgpipe==0.0.7, or set pipeline.placement to linear",
    ):
        engine_of(config(**on(2)), Mesh(comm))


@pytest.mark.parallel(2)
@pytest.mark.parametrize("settings, text", [
    (dict(tiles="1x2"), r"enc0_norm0 \(instance norm\) .* 2 ranks, .*\(DS232\)"),
    (dict(samples=2, norm="batch", norm_scope="step"), r"enc0_norm0 \(batch norm\) .* 2 ranks, .*\(DS232\)"),
])  # fmt: skip
def test_statistics_that_ranks_share(comm, settings, text):
    found = config(**settings, **on(2))
    with pytest.raises(ValueError, match=text):
        Engine(
            found,
            Mesh(comm, found.mesh.samples, found.mesh.tiles),
            outline_model(found.model),
            (33, 47),
        )


@pytest.mark.parallel(1)
def test_micro_batches_of_different_sizes(comm):
    engine, micro_batches = engine_of(config(accumulate=2, **on(2)), Mesh(comm))
    other = RandomImages(Size("41x47"), 3, 3, engine.config.loss).mine(
        [1], Size("1x1"), Size("1x1"), (0, 0), engine.reach
    )
    with pytest.raises(
        ValueError, match=r"sizes \(images x window\) are 1 x 33x47, 1 x 41x47: set data.crop"
    ):
        engine.backward([micro_batches[0], other])
    assert engine.backward(micro_batches) > 0, "nothing is left behind of a step that failed"
