"""Training end to end on real ranks: layouts agree, runs resume bit by bit, results are the whole image's, failures end the job."""

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distseg.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, PredictConfig, TrainConfig
from distseg.data.store import Store
from distseg.data.writer import StoreWriter
from distseg.extents import Extents
from distseg.geometry.tile import Box
from distseg.launch import JointFailure
from distseg.models.zoo import build_model
from distseg.train.checkpoint import find, load_weights
from distseg.train.loop import train


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
            writer.add_image(f"image{k}", size, np.float32, split, labels=True).write(Box.whole(size), pixels, labels)
    return path


def config(folder: Path, samples=1, tiles="1x1", images=1, **more) -> Config:
    fields = {k: v for k, v in more.items() if k in TrainConfig.__dataclass_fields__}
    return Config(
        model=ModelConfig(depth=2, num_convs=1, base_channels=8, norm=more.get("norm", "instance"), dropout=0.1),
        mesh=MeshConfig(samples=samples, tiles=Extents(tiles)),
        data=DataConfig(store=str(folder / "store.h5"), images=images, crop=Extents("32x32"), augment=["flip", "turn"], epoch_samples=8),
        optim=OptimConfig(lr=3e-3, clip=1.0),
        predict=PredictConfig(tile=Extents("16x24")),
        train=TrainConfig(**{"epochs": 2, "precision": "fp64", "tensorboard": False, "output": str(folder / "run"), **fields}),
    )


@pytest.fixture
def folder(comm, shared_path) -> Path:
    if comm.rank == 0:
        write_store(shared_path / "store.h5")
    comm.Barrier()
    return Path(shared_path)


def weights(run) -> dict:
    return load_file(find(run, "last") / "weights-1-of-1.safetensors")


@pytest.mark.parallel(4)
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


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize("norm,precision", [("batch", "bf16"), ("instance", "fp32")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(comm, folder, norm, precision):
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


@pytest.mark.parallel([1, 3])
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_prediction_has_no_seams(comm, folder, norm):
    plan = config(folder, tiles=f"{comm.size}x1", norm=norm, epochs=1)
    train(plan, comm)
    from distseg.commands import run_predict

    run_predict(str(folder / "run"), replace(plan, predict=replace(plan.predict, probabilities=True)), comm, None, "test", str(folder / "found"))
    if comm.rank == 0:
        store = Store(folder / "store.h5")
        model = build_model(plan.model, 2, 2).double()
        load_weights(find(folder / "run"), model)
        whole = torch.from_numpy(store.read_normalised("image3", Box.whole(store.size("image3")))).double()
        with torch.no_grad():
            logits = model.eval()(whole[None])[0]
        with h5py.File(folder / "found/image3.h5") as f:
            assert np.array_equal(f["classes"][:], logits.argmax(0).numpy())
            assert np.abs(f["probabilities"][:] - logits.softmax(0).numpy()).max() < 1e-3


@pytest.mark.parallel(2)
def test_a_loss_that_is_no_number_ends_the_run_with_advice(comm, folder):
    plan = replace(config(folder, tiles="1x2", norm="none"), optim=OptimConfig(name="sgd", lr=1e30))
    with pytest.raises(JointFailure, match="lower optim.lr"):
        train(plan, comm)


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
from distseg.launch import identify

class Dying(nn.Module):
    calls = 0
    def forward(self, x):
        Dying.calls += 1
        if identify().rank == 1 and Dying.calls == {calls}:
            {how}
        return x

def net(in_channels, out_channels):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), Dying(), nn.InstanceNorm2d(4), nn.Conv2d(4, out_channels, 1))
"""


@pytest.mark.parametrize(
    "how,message",
    [("os.kill(os.getpid(), 9)", ""), ("raise RuntimeError('the disk is on fire')", "rank 1: Traceback"), ("raise ValueError('band 3 is empty')", "rank 1: band 3 is empty")],
)
def test_a_rank_that_dies_in_the_middle_ends_the_job(mpirun, tmp_path, how, message):
    write_store(tmp_path / "store.h5")
    (tmp_path / "dying.py").write_text(DYING.format(calls=5, how=how))
    done = mpirun(
        2, "-m", "distseg", "train", "--data.store", "store.h5", "--data.crop", "32x32", "--mesh.tiles", "1x2", "--model.name", "dying:net",
        "--train.tensorboard", "false", "--train.epochs", "50", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, timeout=50,
    )  # fmt: skip
    assert done.returncode != 0 and message in done.stderr, str(done)
    assert done.stderr.count("distseg: error") <= 1


def test_the_command_line_trains_evaluates_predicts_and_plots(mpirun, tmp_path):
    write_store(tmp_path / "store.h5")
    (tmp_path / "run.yaml").write_text(
        "model: {depth: 2, num_convs: 1, base_channels: 4, norm: batch}\ndata: {store: store.h5, crop: 32x32, images: 2}\ntrain: {epochs: 2, output: run}\n"
    )
    python = lambda n, *a: mpirun(n, "-m", "distseg", *a, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())}, timeout=50)  # noqa: E731
    trained = python(2, "train", "run.yaml", "--mesh.samples", "2")
    assert trained.returncode == 0 and "validation IoU" in trained.stdout, str(trained)
    scored = python(2, "evaluate", "run", "--output", "scores.json")
    assert scored.returncode == 0 and "colour iou" in scored.stdout, str(scored)
    assert set(json.loads((tmp_path / "scores.json").read_text())) == {"split", "network", "colour"}
    predicted = python(2, "predict", "run", "--output", "found")
    assert predicted.returncode == 0 and (tmp_path / "found/image3.png").exists(), str(predicted)
    assert python(1, "plot", "curves", "run").returncode == 0 and (tmp_path / "run/curves.png").exists()
    drawn = python(1, "plot", "overlay", "found/image3.h5", "--store", "store.h5", "--output", "overlay.png")
    assert drawn.returncode == 0 and (tmp_path / "overlay.png").exists(), str(drawn)
