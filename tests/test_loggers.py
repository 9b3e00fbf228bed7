"""Loggers: what they are told, that a resumed run goes on with them, and that a failing one stops no run."""

import csv
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from made_store import random_store
from test_validation import config

import distseg
from distseg.config.file import read_settings
from distseg.config.sizes import Size
from distseg.data.store.store import Store
from distseg.inference import validation_pictures
from distseg.inference.validation_pictures import panels
from distseg.report.log import RunLog, SilentLog, read_log
from distseg.report.loggers.background import BackgroundLogger
from distseg.report.loggers.opening import check_loggers
from distseg.report.style import ERROR, UNLABELLED, class_colors
from distseg.tiling.tile import Box
from distseg.training.loop import train

SETTINGS = {"optim": {"lr": 0.01, "rates": None}, "model": {"name": "unet"}}
PICTURE = np.full((2, 3, 3), 7, np.uint8)


def run(folder, loggers, steps, resumed_step=None, settings=SETTINGS) -> None:
    """Log a run: steps with their number as loss, a validation after the last one, a picture."""
    with RunLog(folder, loggers, resumed_step) as log:
        log.write("start", resumed_step or 0, 0, config=settings)
        for step in steps:
            log.write("step", step, 0, loss=float(step), note="text")
        log.write("validation", step, 0, iou={"lake": step / 10, "none": None}, ok=True)
        log.picture(step, "scene a", PICTURE)
        log.write("end", step, 0)


# --- TensorBoard and tables -----------------------------------------------------------------------


def test_tensorboard_gets_all_and_a_resume_hides_the_later_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, ["tensorboard"], [1, 2, 3])
    run(tmp_path, ["tensorboard"], [3, 4], resumed_step=2)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()
    assert tags["scalars"] == ["step/loss", "validation/iou/lake"]
    assert tags["images"] == ["validation/scene a"]
    assert tags["tensors"] == ["settings/text_summary"]
    assert [e.step for e in events.Scalars("step/loss")] == [1, 2, 3, 4]
    [picture] = events.Images("validation/scene a")
    assert (picture.step, picture.width, picture.height) == (4, 3, 2)


def test_without_tensorboard_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    check_loggers(["tensorboard"])
    run(tmp_path, ["tensorboard"], [1])
    assert capsys.readouterr().err.count("\n") == 1 and len(read_log(tmp_path)) == 4


def test_tables_drop_later_rows_and_take_new_columns(tmp_path):
    run(tmp_path, ["csv"], [1, 2, 3])
    with open(tmp_path / "steps.csv", "a") as file:
        file.write("4,")  # a kill cut this row
    with RunLog(tmp_path, ["csv"], resumed_step=2) as log:
        log.write("start", 2, 0)
        log.write("step", 3, 1, loss=30.0, lr=0.5)
    assert (tmp_path / "steps.csv").read_text().splitlines() == [
        "step,epoch,loss,lr",
        "1,0,1.0,",
        "2,0,2.0,",
        "3,1,30.0,0.5",
    ]
    with open(tmp_path / "validation.csv", newline="") as file:
        assert list(csv.reader(file)) == [["step", "epoch", "iou/lake"]]


# --- Weights & Biases and MLflow, by fakes of their packages --------------------------------------


@pytest.fixture
def wandb(monkeypatch):
    """A fake of wandb that records calls in ``calls``."""
    calls = []
    fake = ModuleType("wandb")
    fake.calls, fake.Image = calls, lambda pixels: ("image", pixels.shape)
    fake.Settings = lambda **options: options

    def init(**options):
        calls.append(("init", options["id"], options["resume"], options["project"]))
        return SimpleNamespace(
            config=SimpleNamespace(update=lambda values, **_: calls.append(("config", values))),
            define_metric=lambda *_, **options: calls.append(("axis", options["step_metric"])),
            log=lambda values: calls.append(("log", values)),
            finish=lambda exit_code: calls.append(("finish", exit_code)),
        )

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    return fake


def test_wandb_goes_on_with_its_run(tmp_path, wandb):
    run(tmp_path, ["wandb"], [1, 2])
    id = (tmp_path / "wandb.id").read_text().strip()
    assert wandb.calls == [
        ("init", id, "allow", "mine"),
        ("config", SETTINGS),
        ("axis", "step"),
        ("log", {"step": 1, "epoch": 0, "step/loss": 1.0}),
        ("log", {"step": 2, "epoch": 0, "step/loss": 2.0}),
        ("log", {"step": 2, "epoch": 0, "validation/iou/lake": 0.2}),
        ("log", {"step": 2, "validation/scene a": ("image", (2, 3, 3))}),
        ("finish", 0),
    ]
    run(tmp_path, ["wandb"], [3], resumed_step=2)
    run(tmp_path, ["wandb"], [1])  # anew, in the same folder
    ids = [call[1] for call in wandb.calls if call[0] == "init"]
    assert ids[0] == ids[1] != ids[2]


@pytest.fixture
def mlflow(monkeypatch):
    """A fake of mlflow with one service, whose runs are in ``runs``."""
    fake, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    fake.runs = runs = {}

    class Client:
        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return name

        def create_run(self, experiment, run_name):
            id = f"id{len(runs)}"
            runs[id] = dict(experiment=experiment, name=run_name, params={}, metrics=[], files=[])
            return SimpleNamespace(info=SimpleNamespace(run_id=id))

        def get_run(self, id):
            return SimpleNamespace(data=SimpleNamespace(params=dict(runs[id]["params"])))

        def update_run(self, id, status):
            runs[id]["status"] = status

        def log_batch(self, id, params=(), metrics=()):
            assert not any(key in runs[id]["params"] for key, _ in params), "params cannot change"
            runs[id]["params"].update(params)
            runs[id]["metrics"] += [(key, value, step) for key, value, _, step in metrics]

        def set_tag(self, id, key, value):
            runs[id]["tag"] = (key, value)

        def log_image(self, id, pixels, artifact_file):
            runs[id]["files"].append(artifact_file)

        def set_terminated(self, id, status):
            runs[id]["status"] = status

    fake.MlflowClient, fake.entities = Client, entities
    entities.Param = lambda key, value: (key, value)
    entities.Metric = lambda *values: values
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "lakes")
    return fake


def test_mlflow_goes_on_with_its_run_and_tags_changed_settings(tmp_path, mlflow):
    run(tmp_path / "first", ["mlflow"], [1])
    run(tmp_path / "first", ["mlflow"], [2], 1, {**SETTINGS, "optim": {"lr": 0.5, "rates": None}})
    [(id, found)] = mlflow.runs.items()
    assert (tmp_path / "first/mlflow.id").read_text() == f"{id}\n"
    assert found == {
        "experiment": "lakes",
        "name": "first",
        "params": {"optim.lr": "0.01", "optim.rates": "null", "model.name": "unet"},
        "metrics": [
            *[("step/loss", 1.0, 1), ("step/epoch", 0.0, 1)],
            *[("validation/iou/lake", 0.1, 1), ("validation/epoch", 0.0, 1)],
            *[("step/loss", 2.0, 2), ("step/epoch", 0.0, 2)],
            *[("validation/iou/lake", 0.2, 2), ("validation/epoch", 0.0, 2)],
        ],
        "files": [f"validation/scene a/step-0000000{n}.png" for n in (1, 2)],
        "tag": ("optim.lr from step 1", "0.5"),
        "status": "FINISHED",
    }


def test_a_run_that_stops_is_not_finished(tmp_path, wandb, mlflow):
    with pytest.raises(KeyboardInterrupt), RunLog(tmp_path, ["wandb", "mlflow"]) as log:
        log.write("start", 0, 0, config=SETTINGS)
        raise KeyboardInterrupt
    assert wandb.calls[-1] == ("finish", 1) and mlflow.runs["id0"]["status"] == "KILLED"


# --- failures --------------------------------------------------------------------------------------


def test_a_failing_logger_is_named_once_and_the_others_go_on(tmp_path, wandb, mlflow, capsys):
    def down(**_):
        raise ConnectionError("no route to host")

    wandb.init = down
    run(tmp_path, ["wandb", "mlflow", "csv"], [1, 2])
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "logger wandb failed" in warning
    assert "(ConnectionError: no route to host): training goes on" in warning
    assert len(mlflow.runs["id0"]["metrics"]) == 6
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 3
    assert len(read_log(tmp_path)) == 5


@pytest.mark.parametrize("where", ["start", "end"])
def test_a_hanging_logger_is_left(where, capsys):
    alive, released, calls = [], threading.Event(), []

    class Hanging:
        def __getattr__(self, name):
            return lambda *_: released.wait(20) if name == where else calls.append(name)

    logger = BackgroundLogger("slow", Hanging(), lambda: alive.append(1), patience=0.1, last=0.3)
    began = time.monotonic()
    logger.start({})
    time.sleep(0.15)
    logger.scalars("step", 1, 0, {})
    logger.end(True)
    assert time.monotonic() - began < 2
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "the logger slow failed" in warning
    assert where == "start" and not calls or calls == ["start", "scalars"] and alive
    released.set()


def test_a_missing_package_is_refused_before_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"train.loggers has wandb, .*pip install 'distseg\[wandb"):
        check_loggers(["tensorboard", "wandb"])


def test_the_old_setting_names_the_new_one(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {tensorboard: false}\n")
    with pytest.raises(ValueError, match=r"it is called train.loggers \(\[tensorboard\], or \[\]"):
        read_settings(str(tmp_path / "c.yaml"))


# --- pictures --------------------------------------------------------------------------------------


def test_a_picture_has_image_truth_prediction_and_errors():
    image = np.zeros((1, 3, 3), np.uint8)
    truth, found = np.array([[0, 1, 255]]), np.array([[0, 0, 1]])
    a, b, grey, error = map(
        tuple, class_colors([*"abcd"], ["#ff0000", "#0000ff", UNLABELLED, ERROR])
    )
    white, black, pale = (255,) * 3, (0,) * 3, (175,) * 3
    drawn = panels(image, truth, found, np.array([a, b], np.uint8), 255)
    assert [tuple(map(int, pixel)) for pixel in drawn[0]] == [
        *[black] * 3, *[white] * 4,
        a, b, grey, *[white] * 4,
        a, a, b, *[white] * 4,
        pale, error, pale,
    ]  # fmt: skip


@pytest.mark.parallel(2)
def test_pictures_show_what_two_ranks_predict(comm, shared_path, monkeypatch):
    """The parts that ranks predict of an image's middle come together in the picture on rank 0."""
    monkeypatch.setattr(validation_pictures, "_SIDE", 20)
    if comm.rank == 0:
        random_store(shared_path / "s.h5", train=2 * [(32, 40)], val=[(40, 48), (32, 16), (8, 8)])
    comm.Barrier()
    shown = {}
    monkeypatch.setattr(
        RunLog, "picture", lambda _, step, name, pixels: shown.update({name: pixels})
    )
    monkeypatch.setattr(SilentLog, "picture", lambda *_: pytest.fail("another rank has pictures"))
    train(config(shared_path, mesh=dict(tiles=Size("1x2")), loggers=["tensorboard"]), comm)
    if comm.rank == 0:
        store, model = Store(shared_path / "s.h5"), distseg.load(shared_path / "run").double()
        assert list(shown) == store.split("val")[:2]
        for name, (height, width) in zip(shown, [(20, 20), (20, 16)]):
            pixels = store.read(name, Box.whole(store.size(name))).astype(np.float64)
            with torch.no_grad():
                classes = model(torch.from_numpy(pixels)[None])[0].argmax(0).numpy()
            top, left = (classes.shape[0] - height) // 2, (classes.shape[1] - width) // 2
            wanted = class_colors(store.classes)[classes[top : top + height, left : left + width]]
            start = 2 * (width + 4)
            np.testing.assert_array_equal(shown[name][:, start : start + width], wanted)
