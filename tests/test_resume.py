"""A run that ends before its time goes on at the very sample: the loss curve is that of a run that was never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from made_store import random_store

from distseg.comm.collective import Alone
from distseg.comm.launch import ToBeContinued
from distseg.comm.signals import Signals, listening
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    SpatialConfig,
    TrainConfig,
)
from distseg.training import loop
from distseg.training.checkpoint import saving
from distseg.training.checkpoint.files import find, read_manifest
from distseg.training.control import Decision, RunControl
from distseg.training.loop import train
from distseg.training.resume import changes, chosen, first_step, mesh_change, schedule_change

STEPS = 6  # an epoch


def config(folder, output="run", epochs=2, **mesh) -> Config:
    return Config(
        model=ModelConfig(depth=2, num_convs=1, base_channels=4, norm="batch", dropout=0.1),
        mesh=MeshConfig(**mesh),
        spatial=SpatialConfig(norm_scope="step"),
        data=DataConfig(
            store=str(folder / "s.h5"),
            crop="32x32",
            epoch_samples=2 * STEPS,
            images=2 // mesh.get("samples", 1),
            augment=["flip"],
        ),
        optim=OptimConfig(lr=0.01),
        train=TrainConfig(
            epochs=epochs,
            output=str(folder / output),
            loggers=[],
            precision="fp64",
            validate_every=2,
        ),
    )


def curve(folder, output="run") -> list:
    lines = [
        json.loads(line) for line in (Path(folder) / output / "log.jsonl").read_text().splitlines()
    ]
    return [
        (e["kind"], e["step"], e.get("loss"), e.get("lr"), e.get("iou"))
        for e in lines
        if e["kind"] in ("step", "validation")
    ]


def store(folder) -> None:
    random_store(folder / "s.h5", train=[(40, 48), (50, 40)], val=[(40, 40), (33, 37)])


class At:
    """Sends this process a signal when the log is written for the n-th time."""

    def __init__(self, monkeypatch, count: int, number=signal.SIGUSR2, kind="step"):
        write, seen = loop.SilentLog.write, []

        def noting(log, what, *args, **fields):
            write(log, what, *args, **fields)
            seen.append(what)
            if seen.count(kind) == count and what == kind:
                os.kill(os.getpid(), number)

        for log in (loop.SilentLog, *loop.SilentLog.__subclasses__()):
            original = log.write
            monkeypatch.setattr(
                log,
                "write",
                lambda self, *a, original=original, **k: (
                    original(self, *a, **k),
                    noting(self, *a, **k),
                )[0],
            )


@pytest.mark.parallel(1)
@pytest.mark.parametrize("stop", [1, 4, STEPS, STEPS + 2])
def test_a_stopped_run_goes_on_at_the_very_sample(comm, tmp_path, monkeypatch, stop):
    store(tmp_path)
    train(config(tmp_path, "whole"), comm)
    with monkeypatch.context() as patch:
        At(patch, stop)
        with pytest.raises(ToBeContinued, match="a signal came: the run ends after step"):
            train(config(tmp_path), comm)
    manifest = read_manifest(find(tmp_path / "run", "last"))
    assert stop <= manifest["step"] <= stop + 1
    resumed = config(tmp_path)
    train(replace(resumed, train=replace(resumed.train, resume=True)), comm)
    assert curve(tmp_path) == curve(tmp_path, "whole") and len(curve(tmp_path)) == 2 * STEPS + 1


@pytest.mark.parallel(1)
def test_a_run_killed_in_its_validation_validates_again(comm, tmp_path, monkeypatch):
    """An error in validation loses no step, even while the checkpoint before it is being written."""
    store(tmp_path)
    train(config(tmp_path, "whole"), comm)
    write = saving.write_tensors
    monkeypatch.setattr(saving, "write_tensors", lambda *a, **k: time.sleep(0.1) or write(*a, **k))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config(tmp_path), comm)
    assert read_manifest(find(tmp_path / "run", "last"))["step"] == 2 * STEPS
    resumed = config(tmp_path)
    train(replace(resumed, train=replace(resumed.train, resume=True)), comm)
    assert curve(tmp_path) == curve(tmp_path, "whole")


@pytest.mark.parallel(1)
def test_a_signal_in_validation_ends_it(comm, tmp_path, monkeypatch):
    store(tmp_path)
    train(config(tmp_path, "whole"), comm)
    evaluate = loop.evaluate

    def told(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", told)
        with pytest.raises(ToBeContinued):
            train(config(tmp_path), comm)
    resumed = config(tmp_path)
    train(replace(resumed, train=replace(resumed.train, resume=True)), comm)
    assert curve(tmp_path) == curve(tmp_path, "whole")


@pytest.mark.parallel(1)
def test_sigusr1_writes_a_checkpoint_and_the_run_goes_on(comm, tmp_path, monkeypatch):
    store(tmp_path)
    with monkeypatch.context() as patch:
        At(patch, 3, signal.SIGUSR1)
        train(replace(c := config(tmp_path), train=replace(c.train, keep=9)), comm)
    found = [p.name for p in sorted((tmp_path / "run/checkpoints").glob("step-*"))]
    assert (
        len(found) == 3
        and found[0] in ("step-00000003", "step-00000004")
        and found[1:] == [f"step-{n * STEPS:08d}" for n in (1, 2)]
    )
    resumed = replace(c, train=replace(c.train, resume=found[0], keep=9))
    before = curve(tmp_path)
    train(resumed, comm)
    assert curve(tmp_path) == before
    assert sorted(p.name for p in (tmp_path / "run/checkpoints.1").iterdir()) == found[1:], (
        "those after the chosen one are kept elsewhere"
    )


@pytest.mark.parallel([2, 4])
@pytest.mark.timeout(120)
@pytest.mark.covering(cases=1)
def test_one_ranks_signal_ends_all_and_another_mesh_goes_on(comm, shared_path, monkeypatch):
    if comm.rank == 0:
        store(shared_path)
    comm.Barrier()
    mesh = {"samples": 2} if comm.size == 2 else {"samples": 2, "tiles": (1, 2)}
    whole, run = config(shared_path, "whole", **mesh), config(shared_path, **mesh)
    train(whole, comm)
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            At(patch, 3)
        with pytest.raises(ToBeContinued):
            train(run, comm)
    comm.Barrier()
    other = config(shared_path, tiles=(comm.size, 1))
    train(replace(other, train=replace(other.train, resume=True)), comm)
    if comm.rank == 0:
        a, b = curve(shared_path), curve(shared_path, "whole")
        assert [x[:2] for x in a] == [x[:2] for x in b] and all(
            x[2] is None or abs(x[2] - y[2]) < 1e-12 for x, y in zip(a, b)
        )


@pytest.mark.parallel(1)
def test_two_jobs_do_not_train_into_one_folder(comm, tmp_path):
    from distseg.training.run import lock_run

    store(tmp_path)
    (tmp_path / "run").mkdir()
    lock = lock_run(tmp_path / "run")
    with pytest.raises(
        ValueError,
        match=r"another job trains into .*run \(process on .* since .*\): wait for it, or choose another train.output",
    ):
        train(config(tmp_path), comm)
    lock.close()
    train(config(tmp_path), comm)


@pytest.mark.parallel(1)
def test_an_earlier_run_is_moved_aside_with_a_word(comm, tmp_path, capsys):
    store(tmp_path)
    train(config(tmp_path), comm)
    train(config(tmp_path), comm)
    assert (
        "run: an earlier run was there: its checkpoints are moved to checkpoints.1"
        in capsys.readouterr().out
    )


@pytest.mark.parallel(1)
def test_what_has_changed_is_told(comm, tmp_path, capsys):
    store(tmp_path)
    train(config(tmp_path), comm)
    c = config(tmp_path, epochs=3)
    train(replace(c, optim=replace(c.optim, lr=0.02), train=replace(c.train, resume=True)), comm)
    out = capsys.readouterr().out
    assert "goes on from step-00000012: 12 steps, 2 epochs" in out
    assert "optim.lr was 0.01, is 0.02" in out and "train.epochs was 2, is 3" in out
    assert (
        "the schedule (cosine) goes on at step 12 of 18 with a learning rate of 0.0" in out
        and "with the checkpoint's settings the schedule had come to its end" in out
    )


# the arithmetic


@pytest.mark.parametrize(
    "samples, batch, steps, wanted, twice",
    [
        (0, 4, 6, 0, 0),
        (8, 4, 6, 2, 0),
        (24, 4, 6, 6, 0),
        (24, 4, 5, 5, 0),  # the epoch has fewer samples now: it is over
        (10, 4, 6, 2, 2),
    ],
)
def test_the_step_at_which_an_epoch_goes_on(samples, batch, steps, wanted, twice):
    step, word = first_step(samples, batch, steps)
    assert step == wanted
    assert word is None if not twice else f"{twice} of the epoch's samples are seen twice" in word


def test_changes_of_settings_and_mesh():
    before = {
        "optim": {"lr": 0.1, "name": "sgd"},
        "mesh": {"samples": 1, "tiles": "1x1", "stages": 1},
        "run": {"device": "cpu"},
    }
    now = {
        "optim": {"lr": 0.2, "name": "sgd"},
        "mesh": {"samples": 2, "tiles": "1x1", "stages": 1},
        "run": {"device": "cuda"},
    }
    assert changes(before, now) == ["optim.lr was 0.1, is 0.2"] and changes(now, now) == []
    constant = OptimConfig(schedule="constant", warmup=0.0)
    assert schedule_change(constant, constant, (3, 10), (3, 20)) == []


def _layout(samples, accumulate, images, scope="step", norms=None, tiles="1x1") -> dict:
    return {
        "mesh": {"samples": samples, "tiles": tiles, "stages": 1},
        "train": {"accumulate": accumulate},
        "data": {"images": images},
        "spatial": {"norm_scope": scope},
        "approximate": {"halo": None, "norms": norms},
    }


@pytest.mark.parametrize(
    "before, now, batch_norm, told",
    [
        (
            _layout(1, 1, 1),
            _layout(2, 1, 1),
            False,
            "a step had 1 images and now has 2, so the loss curve changes; set train.accumulate and data.images to get the same number of images",
        ),
        (_layout(2, 1, 1), _layout(1, 2, 1), False, "the gradient is the same"),
        (
            _layout(2, 1, 1),
            _layout(1, 2, 1),
            True,
            "batch norm took its statistics over 2 images and now takes them over 1, so the loss curve changes",
        ),
        (_layout(2, 1, 1), _layout(1, 1, 2), True, "the gradient is the same"),
        (_layout(2, 2, 1), _layout(1, 2, 2), True, "the gradient is the same"),
        (_layout(2, 1, 1, "group"), _layout(1, 2, 1, "group"), True, "the gradient is the same"),
        (
            _layout(2, 1, 1, "group"),
            _layout(1, 1, 2, "group"),
            True,
            "batch norm took its statistics over 1 images and now takes them over 2, so the loss curve changes",
        ),
        (_layout(2, 1, 1), _layout(2, 1, 1, tiles="1x2"), True, "the gradient is the same"),
        (
            _layout(2, 1, 1, norms="window"),
            _layout(2, 1, 1, norms="window", tiles="1x2"),
            True,
            "the approximation (approximate.halo, approximate.norms) depends on the mesh",
        ),
    ],
)
def test_what_another_mesh_does_to_the_gradient(before, now, batch_norm, told):
    (found,) = mesh_change(before, now, batch_norm)
    assert found.startswith(
        f"the mesh was {before['mesh']['samples']} samples x (1x1) tiles x 1 stages, is "
    ) and found.endswith(f": {told}")
    assert mesh_change(now, now, batch_norm) == []


def test_which_checkpoint_is_chosen(tmp_path):
    assert chosen(str(tmp_path), False) is None and chosen(str(tmp_path), True) is None
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        chosen(str(tmp_path), "best")


def test_orders_by_the_clock(monkeypatch):
    with RunControl(Alone(), TrainConfig(checkpoint_minutes=1e-4, job_minutes=None)) as orders:
        time.sleep(0.02)
        assert orders.ask() == Decision(True, "")
        orders.saved(0.0)
        assert orders.ask() == Decision(False, "")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    with RunControl(Alone(), TrainConfig(checkpoint_minutes=None)) as orders:
        assert orders.ask() == Decision(False, "")
        orders.saved(3600.0)  # a checkpoint that takes as long as is left
        assert orders.ask() == Decision(True, "the job's time limit is near")
    with RunControl(Alone(), TrainConfig(job_minutes=0.0)) as orders:
        assert orders.ask().stop


def test_signals_are_counted_while_somebody_listens():
    before = signal.getsignal(signal.SIGUSR1)
    with listening(), listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (Signals.saves, Signals.ends) == (1, 1)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_that_comes_when_all_is_done_changes_nothing(tmp_path):
    """Python and MPI take their time to end; a job must not queue again for that."""
    program = f"""
import atexit, os, signal, sys
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    atexit.register(os.kill, os.getpid(), number)
sys.argv[1:] = ["train", "--data.store", {str(tmp_path / "none.h5")!r}]
from distseg.cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("none.h5")) == (2, 1), done
