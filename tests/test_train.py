"""Training end to end on real ranks: layouts agree, runs resume bit by bit, results are the whole image's, failures end the job."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distseg.cli.main import main
from distseg.comm.launch import JointFailure
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    PredictConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.store.writer import StoreWriter
from distseg.runtime import transfer
from distseg.tiling.tile import Box
from distseg.training import engine
from distseg.training.checkpoint.files import find
from distseg.training.loop import train
from distseg.training.run import Run, batches_of


def write_store(path: Path, sizes=((41, 53), (64, 37), (50, 50), (33, 47))) -> Path:
    """Bright discs on noise, in images of different sizes; the last two are val and test."""
    generator = np.random.default_rng(0)
    with StoreWriter(path, ["ground", "disc"], 2) as writer:
        for k, size in enumerate(sizes):
            rows, columns = np.mgrid[: size[0], : size[1]]
            labels = np.zeros(size, np.uint8)
            for r, c in generator.uniform(0, 1, (4, 2)) * size:
                labels[(rows - r) ** 2 + (columns - c) ** 2 < 60] = 1
            pixels = (generator.normal(100, 20, (2, *size)) + 60 * labels).astype(np.float32)
            split = {len(sizes) - 2: "val", len(sizes) - 1: "test"}.get(k, "train")
            writer.add_image(f"image{k}", size, np.float32, split, labels=True).write(
                Box.whole(size), pixels, labels
            )
    return path


def config(folder: Path, samples=1, tiles="1x1", images=1, stages=1, **more) -> Config:
    fields = {k: v for k, v in more.items() if k in TrainConfig.__dataclass_fields__}
    pipeline = {k: v for k, v in more.items() if k in PipelineConfig.__dataclass_fields__}
    return Config(
        model=ModelConfig(
            depth=2, num_convs=1, base_channels=8, norm=more.get("norm", "instance"), dropout=0.1
        ),
        mesh=MeshConfig(samples=samples, tiles=Size(tiles), stages=stages),
        pipeline=PipelineConfig(**pipeline),
        spatial=SpatialConfig(exchange_every=more.get("exchange_every", "all")),
        data=DataConfig(
            store=str(folder / "store.h5"),
            images=images,
            crop=Size("32x32"),
            augment=["flip", "turn"],
            epoch_samples=8,
        ),
        optim=OptimConfig(lr=3e-3, clip=1.0),
        predict=PredictConfig(tile=Size("16x24")),
        train=TrainConfig(
            **{
                "epochs": 2,
                "precision": "fp64",
                "loggers": [],
                "output": str(folder / "run"),
                **fields,
            }
        ),
    )


@pytest.fixture
def folder(comm, shared_path) -> Path:
    if comm.rank == 0:
        write_store(shared_path / "store.h5")
    comm.Barrier()
    return Path(shared_path)


def weights(run) -> dict:
    return {
        name: w
        for part in find(run, "last").glob("weights-*")
        for name, w in load_file(part).items()
    }


@pytest.mark.parallel(4)
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize("norm", ["instance", "group", "none"])
def test_layouts_train_alike(comm, folder, norm):
    train(config(folder, 2, "1x2", norm=norm, output=str(folder / "four")), comm)
    if comm.rank == 0:
        train(config(folder, images=2, norm=norm, output=str(folder / "one")), comm.Split(0))
        four, one = weights(folder / "four"), weights(folder / "one")
        for name, w in one.items():
            assert torch.allclose(four[name], w, rtol=0, atol=1e-10), name
    else:
        comm.Split(1)


@pytest.mark.parallel(2)
def test_sample_groups_of_batch_norms_over_a_step_train_as_one_group_with_all_their_images(
    comm, folder
):
    found = replace(
        config(folder, 2, norm="batch", accumulate=2, output=str(folder / "two")),
        spatial=SpatialConfig(norm_scope="step"),
    )
    train(found, comm)
    if comm.rank == 0:
        train(
            config(folder, images=2, norm="batch", accumulate=2, output=str(folder / "one")),
            comm.Split(0),
        )
        two, one = weights(folder / "two"), weights(folder / "one")
        for name, w in one.items():
            assert torch.allclose(two[name], w, rtol=0, atol=1e-10), name
    else:
        comm.Split(1)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("every", ["1", "level"])
def test_tiles_that_exchange_borders_train_alike_and_read_no_halo(comm, folder, every):
    train(config(folder, 2, "1x2", exchange_every=every, output=str(folder / "four")), comm)
    if comm.rank == 0:
        train(config(folder, images=2, output=str(folder / "one")), comm.Split(0))
        four, one = weights(folder / "four"), weights(folder / "one")
        for name, w in one.items():
            assert torch.allclose(four[name], w, rtol=0, atol=1e-10), name
        read = {run: read_log(folder / run)[-1]["bytes_read"] for run in ("four", "one")}
        assert 4 * read["four"] == read["one"]
        four, one = (read_log(folder / run)[-2] for run in ("four", "one"))
        assert four["kind"] == "validation" and four["iou"] == pytest.approx(one["iou"])
    else:
        comm.Split(1)


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm, crop", [("instance", "32x32"), ("none", "32x32"), ("batch", None)])
def test_tiles_streaming_train_as_tiles_in_memory(comm, folder, norm, crop):
    """With augmentation, crops and validation; read part by part. Whole images of 53 and 37 columns have no halves on the stride of 4."""
    plan = config(folder, tiles=f"1x{comm.size}", norm=norm, output=str(folder / "memory"))
    plan = replace(
        plan, data=replace(plan.data, crop=crop and Size(crop), epoch_samples=crop and 8)
    )
    train(plan, comm)
    streaming = StreamingConfig(tiles=Size("2x2"), scratch=str(folder))
    train(
        replace(plan, streaming=streaming, train=replace(plan.train, output=str(folder / "time"))),
        comm,
    )
    if comm.rank == 0:
        memory, time = weights(folder / "memory"), weights(folder / "time")
        for name, w in memory.items():
            assert torch.allclose(time[name], w, rtol=0, atol=1e-10), name
        assert read_log(folder / "time")[-1]["bytes_read"] > 0


@pytest.mark.parallel(2)
def test_stages_streaming_train_images_of_very_different_sizes(comm, shared_path, monkeypatch):
    """The gradient of a small one is final all at once, that of the next one before rows by rows."""
    folder = Path(shared_path)
    if comm.rank == 0:
        write_store(folder / "store.h5", 3 * ((9, 17), (62, 39)) + ((33, 47), (33, 47)))
    comm.Barrier()
    monkeypatch.setattr(transfer, "_STRIP", 2000.0)
    plan = config(
        folder, stages=2, norm="none", images=2, schedule="gpipe", output=str(folder / "memory")
    )
    plan = replace(plan, data=replace(plan.data, crop=None, epoch_samples=None))
    train(plan, comm)
    streaming = StreamingConfig(tiles=Size("3x1"), scratch=str(folder))
    train(
        replace(plan, streaming=streaming, train=replace(plan.train, output=str(folder / "time"))),
        comm,
    )
    if comm.rank == 0:
        memory, time = weights(folder / "memory"), weights(folder / "time")
        for name, w in memory.items():
            assert torch.allclose(time[name], w, rtol=0, atol=1e-10), name


@pytest.mark.parallel(2)
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_stages_of_tiles_streaming_train_images_of_different_sizes(comm, folder, norm):
    def whole(plan):
        return replace(plan, data=replace(plan.data, crop=None, epoch_samples=None))

    plan = whole(config(folder, images=2, stages=2, norm=norm, output=str(folder / "two")))
    train(replace(plan, streaming=StreamingConfig(tiles=Size("3x2"), scratch="memory")), comm)
    if comm.rank == 0:
        train(whole(config(folder, images=2, norm=norm, output=str(folder / "one"))), comm.Split(0))
        two, one = weights(folder / "two"), weights(folder / "one")
        for name, w in one.items():
            assert torch.allclose(two[name].double(), w.double(), rtol=0, atol=1e-10), name
    else:
        comm.Split(1)


@pytest.mark.parallel(4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize(
    "mesh",
    [
        dict(samples=2, stages=2),
        dict(tiles="1x2", stages=2, recompute="always"),
        dict(stages=4),
        dict(stages=4, placement="v-shaped"),
    ],
)
def test_stages_train_alike_and_write_their_own_layers(comm, folder, norm, mesh):
    accumulate = 2 // mesh.get("samples", 1)
    train(
        config(folder, norm=norm, output=str(folder / "four"), accumulate=accumulate, **mesh), comm
    )
    if comm.rank == 0:
        train(config(folder, norm=norm, output=str(folder / "one"), accumulate=2), comm.Split(0))
        assert len(list(find(folder / "four", "last").glob("weights-*"))) == mesh["stages"]
        four, one = weights(folder / "four"), weights(folder / "one")
        assert four.keys() == one.keys()
        for name, w in one.items():
            assert torch.allclose(four[name].double(), w.double(), rtol=0, atol=1e-10), name
    else:
        comm.Split(1)


@pytest.mark.parallel(4)
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "before, after",
    [
        (dict(stages=4), dict(tiles="2x2")),
        (dict(samples=2, tiles="1x2"), dict(tiles="1x2", stages=2)),
    ],
)
def test_a_run_is_resumed_on_another_mesh(comm, folder, before, after):
    """Steps of two images: as micro-batches, or of two groups."""

    def common(mesh):
        return dict(epochs=3, accumulate=2 // mesh.get("samples", 1), **mesh)

    train(config(folder, output=str(folder / "whole"), **common(before)), comm)
    train(config(folder, output=str(folder / "cut"), max_minutes=0.0, **common(before)), comm)
    train(config(folder, output=str(folder / "cut"), resume=True, **common(after)), comm)
    whole, cut = weights(folder / "whole"), weights(folder / "cut")
    assert all(torch.allclose(whole[name], cut[name], rtol=0, atol=1e-10) for name in whole)


@pytest.mark.parallel([1, 4])
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize(
    "norm,precision",
    [
        ("batch", "bf16"),
        ("instance", "fp32"),
        pytest.param("group", "fp16", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    comm, folder, norm, precision, monkeypatch
):
    monkeypatch.setattr("distseg.runtime.loss_scale._STEPS", 2)
    mesh = {1: {}, 4: dict(samples=2, tiles="2x1")}[comm.size]
    plan = dict(epochs=3, norm=norm, precision=precision, channels_last=precision == "bf16", **mesh)
    train(config(folder, output=str(folder / "whole"), **plan), comm)
    train(config(folder, output=str(folder / "cut"), max_minutes=0.0, **plan), comm)
    train(config(folder, output=str(folder / "cut"), resume=True, **plan), comm)
    whole, cut = weights(folder / "whole"), weights(folder / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    if comm.rank == 0:
        steps = [line["step"] for line in read_log(folder / "cut") if line["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        scales, other = (
            [line.get("loss_scale") for line in read_log(folder / run) if line["kind"] == "step"]
            for run in ("cut", "whole")
        )
        assert scales == other and (None in scales) == (precision != "fp16")


@pytest.mark.parallel([1, 2])
def test_a_run_that_has_all_its_epochs_is_left_as_it_is(comm, folder, capsys):
    plan = config(folder, samples=comm.size, norm="batch", epochs=1)
    result = train(plan, comm)
    before = comm.bcast((folder / "run/log.jsonl").read_bytes())
    capsys.readouterr()
    assert train(replace(plan, train=replace(plan.train, resume=True)), comm) == result
    assert (
        comm.rank
        or "run has its 1 epochs already, and train.epochs is 1: raise it to go on"
        in capsys.readouterr().out
    )
    assert (folder / "run/log.jsonl").read_bytes() == before


@pytest.mark.parallel(1)
def test_the_schedule_goes_on_where_epochs_have_other_numbers_of_steps(comm, folder):
    plan = config(folder, norm="none", epochs=4, max_minutes=0.0)
    train(plan, comm)
    train(
        replace(plan, train=replace(plan.train, resume=True, accumulate=2, max_minutes=None)), comm
    )
    rates = [line["lr"] for line in read_log(folder / "run") if line["kind"] == "step"]
    assert (
        len(rates) == 8 + 3 * 4
        and rates[1:] == sorted(rates[1:], reverse=True)
        and rates[8] > 1e-3 > 2e-4 > rates[-1]
    )


def read_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parallel(2)
def test_it_learns_and_its_log_tells(comm, folder):
    plan = config(folder, tiles="1x2", norm="batch", epochs=12, precision="fp32", validate_every=6)
    train(replace(plan, optim=OptimConfig(lr=1e-2, schedule="one_cycle", warmup=0.3)), comm)
    if comm.rank == 0:
        log = read_log(folder / "run")
        losses = [line["loss"] for line in log if line["kind"] == "step"]
        assert np.mean(losses[-8:]) < 0.5 * np.mean(losses[:8])
        validations = [line for line in log if line["kind"] == "validation"]
        assert len(validations) == 2 and validations[-1]["iou"]["disc"] > 0.7
        index = json.loads((folder / "run/checkpoints/last.json").read_text())
        assert index["last"] == f"step-{len(losses):08d}"


@pytest.mark.parallel(2)
def test_a_loss_that_is_no_number_ends_the_run_with_advice(comm, folder):
    plan = replace(config(folder, tiles="1x2", norm="none"), optim=OptimConfig(name="sgd", lr=1e18))
    with pytest.raises(JointFailure, match="lower optim.lr"):
        train(plan, comm)


@pytest.mark.parallel(2)
def test_a_budget_that_no_tile_fits_into_is_told_by_all_stages_at_once_before_the_first_step(
    comm, folder, monkeypatch
):
    monkeypatch.setattr(engine, "smallest_budget", lambda *_: 2000.0)
    found = replace(config(folder, stages=2, images=2), streaming=StreamingConfig(memory="4GB"))
    with pytest.raises(JointFailure, match="0.0 MB of streaming.memory are left .* by 1 MB"):
        Run(found, comm)


def by_their_number(in_channels=2, out_channels=2):
    """A network that computes something else of one image than of several."""

    class ByTheirNumber(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) * (1 if len(x) > 1 else 2)

    return ByTheirNumber(in_channels, out_channels, 3, padding=1)


@pytest.mark.parallel(1)
def test_images_of_different_sizes_are_tried_alone_and_together(comm, folder):
    """Images of different sizes in a micro-batch go through the network one by one."""
    plan = config(folder, images=2)
    plan = replace(
        plan,
        model=ModelConfig(f"{__name__}:by_their_number"),
        data=replace(plan.data, crop=None, epoch_samples=None, augment=[]),
    )
    with pytest.raises(JointFailure, match="with 1 image of 41x53 pixels .* something else"):
        Run(plan, comm)
    assert batches_of({(5, 4)}, 3) == [((5, 4), 3)]
    assert batches_of({(9, 9), (5, 4)}, 3) == [
        *(((5, 4), count) for count in (1, 2, 3)),
        *(((9, 9), count) for count in (1, 3)),
    ]


@pytest.mark.parallel(1)
def test_a_store_of_volumes_does_not_fit_a_network_of_planes(comm, folder):
    with StoreWriter(folder / "volumes.h5", ["a", "b"], 2) as writer:
        size = (9, 13, 11)
        labels = np.arange(np.prod(size)).reshape(size).astype(np.uint8) % 2
        writer.add_image("v", size, np.float32, "train", labels=True).write(
            Box.whole(size), np.stack([labels, labels]).astype(np.float32), labels
        )
    plan = config(folder)
    plan = replace(
        plan,
        data=DataConfig(store=str(folder / "volumes.h5")),
        predict=PredictConfig(),
        model=replace(plan.model, dims=2),
    )
    with pytest.raises(JointFailure, match="images have 3 dims .9x13x11.*takes images of 2 dims"):
        Run(plan, comm)


@pytest.mark.parallel(2)
def test_a_store_missing_on_one_rank_is_told_on_all(comm, folder):
    plan = config(folder, tiles="1x2")
    if comm.rank == 1:
        plan = replace(plan, data=replace(plan.data, store=str(folder / "nowhere.h5")))
    with pytest.raises(JointFailure, match="rank 1: .*nowhere.h5"):
        train(plan, comm)


DYING = """
import os
from torch import nn
from distseg.comm.launch import identify

calls = 0

def forward(self, x):
    global calls
    calls += self.training and not x.is_meta
    if identify().rank == 1 and calls == {calls}:
        {how}
    return x

nn.Tanh.forward = forward  # a module of one's own is not run: what it calls is

def net(in_channels, out_channels):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.Tanh(), nn.InstanceNorm2d(4), nn.Conv2d(4, out_channels, 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how,message",
    [
        ("os.kill(os.getpid(), 9)", ""),
        ("raise RuntimeError('the disk is on fire')", "rank 1: Traceback"),
        ("raise ValueError('band 3 is empty')", "rank 1: band 3 is empty"),
    ],
)
def test_a_rank_that_dies_in_the_middle_ends_the_job(mpirun, tmp_path, how, message):
    write_store(tmp_path / "store.h5")
    (tmp_path / "dying.py").write_text(DYING.format(calls=5, how=how))
    done = mpirun(
        2, "-m", "distseg", "train", "--data.store", "store.h5", "--data.crop", "32x32", "--mesh.tiles", "1x2", "--model.name", "dying:net",
        "--train.loggers", "[]", "--train.epochs", "50", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, timeout=50,
    )  # fmt: skip
    assert done.returncode != 0 and message in done.stderr, str(done)
    assert done.stderr.count("distseg: error") <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "how,message",
    [
        ("os.kill(os.getpid(), 9)", ""),
        ("raise ValueError('band 3 is empty')", "rank 1: band 3 is empty"),
        (
            "__import__('time').sleep(1000)",
            "waits for the halo at layer 2 from rank 1 of the image's tiles",
        ),
    ],
    ids=["killed", "raises", "late"],
)
def test_a_rank_that_dies_or_is_late_in_an_exchange_ends_the_job(mpirun, tmp_path, how, message):
    write_store(tmp_path / "store.h5")
    source = DYING.format(calls=5, how=how).replace(
        "nn.InstanceNorm2d(4), nn.Conv2d(4, out_channels, 1)",
        "nn.Conv2d(4, out_channels, 3, padding=1)",
    )
    (tmp_path / "dying.py").write_text(source)
    done = mpirun(
        2, "-m", "distseg", "train", "--data.store", "store.h5", "--data.crop", "32x32", "--mesh.tiles", "1x2", "--model.name", "dying:net",
        "--spatial.exchange_every", "1", "--run.timeout", "3", "--train.loggers", "[]", "--train.epochs", "50",
        cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, timeout=50,
    )  # fmt: skip
    assert done.returncode != 0 and message in done.stderr, str(done)
    assert done.stderr.count("distseg: error") <= 1


CHANGING = """
import torch
from torch import nn
from distseg.comm.launch import identify

calls = 0

def forward(self, x):
    '''Its output gets another shape in the middle of a run, in the first stage's last layer.'''
    global calls
    calls += self.training and not x.is_meta
    return torch.cat((x, x), 1) if calls > 40 and identify().rank == 0 else x

nn.Tanh.forward = forward

def net(in_channels, out_channels):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.Tanh(), nn.InstanceNorm2d(4), nn.Conv2d(4, out_channels, 1))
"""

STAGES = ("--mesh.stages", "2", "--pipeline.balance", "[2,2]", "--train.accumulate", "4")


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "source,message",
    [
        (
            DYING.format(calls=30, how="os.kill(os.getpid(), 9)").replace("rank == 1", "rank == 0"),
            "",
        ),
        (
            DYING.format(calls=30, how="raise ValueError('band 3 is empty')").replace(
                "rank == 1", "rank == 0"
            ),
            "rank 0: band 3 is empty",
        ),
        (CHANGING, "x of stage 0 for stage 1 is 1x8x32x32 float32 in micro-batch"),
    ],
    ids=["killed", "raises", "changes its shape"],
)
def test_a_stage_that_fails_in_the_middle_of_a_schedule_ends_the_job(
    mpirun, tmp_path, source, message
):
    write_store(tmp_path / "store.h5")
    (tmp_path / "failing.py").write_text(source)
    done = mpirun(
        2, "-m", "distseg", "train", "--data.store", "store.h5", "--data.crop", "32x32", *STAGES, "--model.name", "failing:net",
        "--train.loggers", "[]", "--train.epochs", "50", "--train.precision", "fp32", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, timeout=50,
    )  # fmt: skip
    assert (
        done.returncode != 0 and message in done.stderr and "1/50" in done.stderr + done.stdout
    ), str(done)
    assert done.stderr.count("distseg: error") <= 1


@pytest.mark.slow  # test_cli trains, evaluates and predicts with the commands of the README
def test_the_command_line_trains_evaluates_predicts_and_plots(mpirun, tmp_path, monkeypatch):
    write_store(tmp_path / "store.h5")
    (tmp_path / "run.yaml").write_text(
        "model: {depth: 2, num_convs: 1, base_channels: 4, norm: batch}\ndata: {store: store.h5, crop: 32x32, images: 2}\ntrain: {epochs: 2, output: run}\n"
    )

    def python(n, *a):
        return mpirun(
            n, "-m", "distseg", *a, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())}, timeout=50
        )  # noqa: E731

    trained = python(2, "train", "run.yaml", "--mesh.samples", "2")
    assert trained.returncode == 0 and "validation IoU" in trained.stdout, str(trained)
    scored = python(2, "evaluate", "run", "--output", "scores.json")
    assert scored.returncode == 0 and "baseline iou" in scored.stdout, str(scored)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert {"split", "network", "colour", "confusion", "images"} <= set(written)
    predicted = python(2, "predict", "run", "--output", "found")
    assert predicted.returncode == 0 and (tmp_path / "found/image3.png").exists(), str(predicted)
    monkeypatch.chdir(tmp_path)
    overlay = ["overlay", "found/image3.h5", "--store", "store.h5", "--output", "overlay.png"]
    for what in (["curves", "run"], overlay):
        with pytest.raises(SystemExit, match="0"):
            main(["plot", *what])
    assert Path("run/curves.png").exists() and Path("overlay.png").exists()
