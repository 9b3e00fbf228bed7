"""Validation: its loss is the serial program's on every mesh, and a run without progress ends early, the same after a resume."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_store import random_store

from distseg.comm.alone import Alone
from distseg.config.settings import (
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PredictConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.inference import evaluate as evaluation
from distseg.inference.image_source import store_image
from distseg.tiling.tile import Box
from distseg.training import loop
from distseg.training.checkpoint.files import find, load_weights, names_of, read_manifest
from distseg.training.checkpoint.runs import describe
from distseg.training.loop import train
from distseg.training.resume import Position, position_of
from distseg.training.run_config import network_of
from distseg.training.serial import serial_loss

MESHES = {1: {}, 2: dict(stages=2), 4: dict(samples=2, tiles=Size("1x2"))}
LOSSES = (
    dict(name="cross_entropy + 0.5*dice", class_weights=[1.0, 2.0, 5.0], smooth=0.5),
    dict(name="dice", dice_over="batch"),
    dict(name="focal + 0.1*binary_cross_entropy"),
)


def config(folder: Path, loss: dict = LOSSES[0], mesh: dict = MESHES[1], **fields) -> Config:
    return Config(
        model=ModelConfig(depth=1, num_convs=1, base_channels=4, norm=fields.pop("norm", "batch")),
        loss=LossConfig(**loss),
        mesh=MeshConfig(**mesh),
        data=DataConfig(store=str(folder / "s.h5"), images=fields.pop("images", 1)),
        optim=OptimConfig(lr=fields.pop("lr", 0.01)),
        predict=PredictConfig(tile=Size("16x16")),
        train=TrainConfig(
            **{
                "epochs": 1,
                "output": str(folder / "run"),
                "loggers": [],
                "precision": "fp64",
                **fields,
            }
        ),
    )


def validations(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "validation"]


def serial_loss_of(plan: Config) -> float:
    """The loss of plain PyTorch, with a run's weights, on the whole images of the validation split."""
    store = Store(plan.data.store)
    network = (
        network_of(plan.model, None, store.bands, len(store.classes))
        .to_empty(device="cpu")
        .double()
    )
    load_weights(find(plan.train.output), network)
    logits, labels = [], []
    for name in store.split("val"):
        whole = Box.whole(store.size(name))
        pixels = torch.from_numpy(store_image(store, name).read(whole)).double()
        with torch.no_grad():
            logits.append(network.eval()(pixels[None])[0])
        of_pixels = None if store.of_images else store.labels(name, whole).astype(np.int64)
        y = np.array([store.label(name)]) if of_pixels is None else of_pixels
        labels.append(torch.from_numpy(y))
    return serial_loss(plan.loss, logits, labels).item()


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["name"])
def test_the_validation_loss_is_that_of_the_serial_program(comm, shared_path, loss, monkeypatch):
    """Over images of several tiles and slabs, with ignored pixels, for norms that are frozen in evaluation and that are not."""
    folder, norm = Path(shared_path), "instance" if loss["name"].startswith("focal") else "batch"
    monkeypatch.setattr(evaluation, "_SLAB", 100)
    if comm.rank == 0:
        random_store(folder / "s.h5", train=2 * [(32, 40)], val=[(40, 48), (32, 36), (50, 34)])
    comm.Barrier()
    plan = config(folder, loss, MESHES[comm.size], norm=norm)
    found = train(plan, comm)
    if comm.rank == 0:
        wanted = serial_loss_of(plan)
        assert found["loss"] == pytest.approx(wanted, rel=1e-12, abs=0)
        assert validations(folder / "run")[-1]["loss"] == found["loss"]
        assert read_manifest(find(folder / "run"))["validation"]["loss"] == found["loss"]


def test_a_table_does_not_depend_on_the_order_of_its_rows():
    rows = [
        (0, np.array([1e16])),
        (0, np.array([1.0])),
        (1, np.array([3.0])),
        (0, np.array([-1e16])),
    ]
    for order in (rows, rows[::-1]):
        assert evaluation._table(order, 3, 1).tolist() == [[1], [3], [0]]


def classifier(in_channels: int, out_channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, out_channels),
    )


@pytest.mark.parallel(2)
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_labels_of_whole_images_have_a_validation_loss(comm, shared_path, loss):
    folder, random = Path(shared_path), np.random.default_rng(0)
    classes = ["age"] if loss == "mse" else ["cat", "dog"]
    if comm.rank == 0:
        with StoreWriter(folder / "s.h5", classes, 2, numbers=loss == "mse") as writer:
            for k in range(7):
                size, label = (16, 12 + 4 * (k % 2)), k % 2 if loss != "mse" else 0.7 * k
                image = writer.add_image(
                    f"i{k}", size, np.uint8, "train" if k < 4 else "val", False, label=label
                )
                image.write(
                    Box.whole(size), random.integers(0, 256, (2, *size)).astype(np.uint8), None
                )
    comm.Barrier()
    model = ModelConfig("test_validation:classifier")
    plan = replace(config(folder, dict(name=loss), dict(tiles=Size("1x2"))), model=model)
    found = train(plan, comm)
    if comm.rank == 0:
        wanted = serial_loss_of(plan)
        assert found["loss"] == pytest.approx(wanted, rel=1e-12, abs=0)


def test_of_several_outputs_the_loss_of_the_first_counts(tmp_path):
    random_store(tmp_path / "s.h5", train=[(32, 48)], val=[(32, 32)])
    model = ModelConfig("made_outputs:Training", outputs={"1": 0.5, "0": 1.0})
    plan = replace(config(tmp_path, dict(name="cross_entropy")), model=model)
    found = train(plan, Alone())
    assert found["loss"] == pytest.approx(0.5 * serial_loss_of(plan), rel=1e-12)


def test_an_equal_or_unknown_score_is_no_improvement():
    scores = [0.5, None, 0.5, 0.6, None, 0.4]
    waited, at = [], Position()
    for epoch, score in enumerate(scores, 1):
        at = at.with_validation(epoch, {}, score)
        waited.append(at.waited)
    assert waited == [0, 1, 2, 0, 1, 2] and (at.best_epoch, at.best_score) == (4, 0.6)
    assert Position().with_validation(2, {}, None).waited == 2


def test_an_older_checkpoint_counts_from_its_own_epoch_on():
    at = position_of({"step": 12, "epoch": 3, "samples": 4, "validation": {"mean_iou": 0.5}})
    assert (at.epoch, at.waited, at.best_score) == (3, 0, None)
    assert position_of(asdict(replace(at, validated=5))).waited == 2


@pytest.mark.parallel(2)
def test_a_run_without_progress_ends_early_and_so_does_a_resumed_one(
    comm, shared_path, monkeypatch, capfd
):
    """The learning rate changes nothing, so that the first score is the best one."""
    folder = Path(shared_path)
    if comm.rank == 0:
        random_store(folder / "s.h5", train=[(16, 16)], val=[(16, 20)])
    comm.Barrier()
    plan = config(
        folder, mesh=dict(samples=2), lr=1e-30, epochs=9, patience=2, norm="none", images=1
    )
    with monkeypatch.context() as patch:
        seen, evaluate = [], loop.evaluate
        patch.setattr(
            loop,
            "evaluate",
            lambda *a: seen.append(1) or (1 / 0 if len(seen) == 3 else evaluate(*a)),
        )
        with pytest.raises(ZeroDivisionError):
            train(plan, comm)
    train(replace(plan, train=replace(plan.train, resume=True)), comm)
    told = capfd.readouterr().out
    train(replace(plan, train=replace(plan.train, resume=True)), comm)  # has nothing left to do
    if comm.rank == 0:
        stopped = (
            "stopped early after epoch 3: the mean IoU has not improved for 2 epochs, since epoch 1"
        )
        assert f"\n{stopped}\ntrained 3 epochs" in told
        assert [line["epoch"] for line in validations(folder / "run")] == [0, 1, 2]
        repair = f"{stopped}; train.patience is 2: raise it to go on"
        assert repair in capfd.readouterr().out
        assert describe(folder / "run")["state"] == "stopped early"


def test_the_best_score_has_its_weights_although_no_checkpoint_is_due(tmp_path, monkeypatch):
    """An equal score is no improvement, so the fourth validation writes no checkpoint."""
    random_store(tmp_path / "s.h5", train=[(16, 16)], val=[(16, 20)])
    told, seen, evaluate, scores = iter([0.5, 0.6, 0.4, 0.6, 0.3]), [], loop.evaluate, loop.scores

    def noted(predictor, *others):
        seen.append(float(sum(p.detach().double().sum() for p in predictor.model.parameters())))
        return evaluate(predictor, *others)

    monkeypatch.setattr(loop, "evaluate", noted)
    monkeypatch.setattr(loop, "scores", lambda *a: scores(*a) | {"mean_iou": next(told)})
    plan = config(tmp_path, epochs=5, checkpoint_every=5, keep=9, norm="none")
    train(plan, Alone())
    written = [
        read_manifest(tmp_path / "run/checkpoints" / name) for name in names_of(tmp_path / "run")
    ]
    assert [(m["epoch"], m["score"]) for m in written] == [(1, 0.5), (2, 0.6), (5, 0.3)]
    best = find(tmp_path / "run")
    model = network_of(plan.model, None, *read_manifest(best)["channels"])
    load_weights(best, model.to_empty(device="cpu").double())
    assert read_manifest(best)["epoch"] == 2 and len(set(seen)) == 5
    assert float(sum(p.detach().double().sum() for p in model.parameters())) == pytest.approx(
        seen[1], 1e-12
    )


def test_the_last_epoch_is_validated_although_no_validation_is_due(tmp_path):
    random_store(tmp_path / "s.h5", train=[(16, 16)], val=[(16, 20)])
    train(config(tmp_path, epochs=3, validate_every=2, norm="none"), Alone())
    assert [line["epoch"] for line in validations(tmp_path / "run")] == [1, 2]


def test_the_last_state_is_saved_although_no_checkpoint_is_due(tmp_path):
    random_store(tmp_path / "s.h5", train=[(16, 16)], val=[(16, 20)])
    plan = config(tmp_path, lr=1e-30, epochs=9, patience=1, checkpoint_every=5, norm="none")
    train(plan, Alone())
    manifest = read_manifest(find(tmp_path / "run", "last"))
    assert (manifest["epoch"], manifest["validated"], manifest["best_epoch"]) == (2, 2, 1)
    assert manifest["score"] == manifest["validation"]["mean_iou"] == manifest["best_score"]
