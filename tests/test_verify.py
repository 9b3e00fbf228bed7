"""The check must see what is wrong, or it is none."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_store import made_store, random_image, random_store
from test_exact import config

from distseg.cli.main import main
from distseg.comm.alone import Alone
from distseg.config.settings import (
    Config,
    DataConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.training import verify as module
from distseg.training.engine import Engine
from distseg.training.verify import RandomImages, passed, relative_errors, summary, verify

CONFIG = Config(
    model=ModelConfig(
        depth=1, num_convs=1, base_channels=2, norm="batch", dropout=0.1, out_channels=2
    ),
    optim=OptimConfig("sgd", momentum=0.0),
)
SIZE = Size("13x18")


@pytest.mark.parallel(2)
def test_a_report(comm):
    report = verify(replace(CONFIG, mesh=MeshConfig(tiles=Size("1x2"))), comm, SIZE)
    assert (report is None) == (comm.rank > 0)
    if report:
        assert report["max_error"] < 1e-12 and passed(report, 1e-12) and not passed(report, 0.0)
        assert (report["images"], report["halo"], report["stride"], report["approximations"]) == (
            ["13x18"],
            [5, 5],
            [2, 2],
            [],
        )
        assert (
            report["gradients"].keys() == report["weights"].keys()
            and "enc0_norm0.running_var" in report["buffers"]
        )
        text = summary(report, 1e-12)
        assert text.startswith(
            "mesh 1 samples x (1x2) tiles x 1 stages, images 13x18, halo 5x5, stride 2x2"
        )
        assert "\nexact: largest relative error" in text and "NOT EXACT: " in summary(report, 0.0)


def wrong_gradient(engine):
    engine.gradients.parts[0].view(-1)[3] *= 1 + 1e-9


def wrong_weight(engine):
    engine.optimizer.param_groups[0]["lr"] = 1.0
    engine.parameters[0].data.view(-1)[0] += 1e-9


def wrong_buffer(engine):
    engine.model.norms[0].running_var.mul_(1 + 1e-9)


@pytest.mark.parametrize(
    "when, harm, part",
    [
        ("backward", wrong_gradient, "gradients"),
        ("update", wrong_weight, "weights"),
        ("update", wrong_buffer, "buffers"),
    ],
)
@pytest.mark.parallel(1)
def test_a_relative_error_of_1e9_is_found_where_it_is(comm, monkeypatch, when, harm, part):
    right = getattr(Engine, when)

    def wrong(self, argument):
        result = right(self, argument)
        harm(self)
        return result

    monkeypatch.setattr(Engine, when, wrong)
    report = verify(CONFIG, comm, SIZE)
    assert not passed(report, 1e-12)
    assert max(report[part].values()) > 1e-12
    assert report["loss"]["error"] < 1e-14


@pytest.mark.parallel(1)
def test_a_wrong_loss_is_found(comm, monkeypatch):
    right = Engine.backward
    monkeypatch.setattr(Engine, "backward", lambda self, own: right(self, own) * (1 + 1e-9))
    assert verify(CONFIG, comm, SIZE)["max_error"] == pytest.approx(1e-9, rel=1e-3)


@pytest.mark.parametrize(
    "found, wanted, errors",
    [
        ({"a": [3.0, 4.0]}, {"a": [3.0, 4.0]}, {"a": 0.0}),
        ({"a": [3.0, 5.0]}, {"a": [3.0, 4.0]}, {"a": 0.2}),
        (
            {"a": [3.0, 4.0], "b": [1e-15]},
            {"a": [3.0, 4.0], "b": [0.0]},
            {"a": 0.0, "b": 2e-13},
        ),  # zero but for rounding
        ({"a": [0.0]}, {"a": [0.0]}, {"a": 0.0}),
        (
            {"a": [3.0, 4.0], "b": [2e-2]},
            {"a": [3.0, 4.0], "b": [1e-2]},
            {"a": 0.0, "b": 1.0},
        ),  # small is not zero
    ],
)
def test_relative_errors(found, wanted, errors):
    def tensors(d):
        return {k: torch.tensor(v, dtype=torch.float64) for k, v in d.items()}

    assert relative_errors(tensors(found), tensors(wanted)) == pytest.approx(errors)


def test_nan_never_passes():
    assert max([0.0, math.nan, 1e-3], key=module._badness) != 1e-3
    assert not passed({"max_error": math.nan}, 1e-12)


@pytest.mark.parallel(1)
def test_a_nan_in_one_gradient_fails_the_whole(comm, monkeypatch):
    right = Engine.backward

    def wrong(self, own):
        loss = right(self, own)
        self.gradients.parts[0][0] = math.nan
        return loss

    monkeypatch.setattr(Engine, "backward", wrong)
    report = verify(CONFIG, comm, SIZE)
    assert math.isnan(report["max_error"]) and "NOT EXACT" in summary(report, 1e-12)


def test_random_images_are_noise_with_some_pixels_ignored():
    images = RandomImages(Size("50x60"), 3, 4, LossConfig(), seed=1)
    pixels, labels = images.whole(0)
    assert (
        pixels.shape == (3, 50, 60)
        and pixels.dtype == torch.float64
        and labels.dtype == torch.int64
    )
    assert abs(pixels.mean()) < 0.05 and abs(pixels.var() - 1) < 0.05
    assert set(labels.unique().tolist()) == {0, 1, 2, 3, 255}
    assert 0.03 < (labels == 255).double().mean() < 0.07
    assert torch.equal(pixels, images.whole(0)[0]) and not torch.equal(pixels, images.whole(1)[0])


def test_numbers_are_dealt_micro_batch_by_micro_batch():
    config = Config(
        mesh=MeshConfig(samples=2), train=TrainConfig(accumulate=2), data=DataConfig(images=3)
    )
    sections = config.mesh, config.train, config.data
    rows = [module._rows(*sections, d) for d in range(2)]
    assert [[row.of_micro_batch(m) for m in range(2)] for row in rows] == [
        [[0, 1, 2], [6, 7, 8]],
        [[3, 4, 5], [9, 10, 11]],
    ]


@pytest.mark.parallel(1)
def test_no_images_is_said(comm):
    with pytest.raises(
        ValueError,
        match="there are no images: give --image 97x131 for random ones, or --data.store PATH",
    ):
        verify(CONFIG, comm)


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy", "focal", "dice"])
def test_a_step_without_a_valid_pixel_has_the_loss_0(tmp_path, loss):
    """PyTorch's mean over no pixel is NaN; the mesh and the serial program both give 0."""
    pixels, labels = random_image((24, 20))
    store = tmp_path / "s.h5"
    made_store(store, {"a": ("train", pixels, np.full_like(labels, 255))})
    found = replace(
        CONFIG,
        loss=LossConfig(loss),
        data=replace(CONFIG.data, store=str(store)),
        model=replace(CONFIG.model, in_channels=2, out_channels=3),
    )
    report = verify(found, Alone())
    assert passed(report, 1e-12) and report["loss"]["serial"] == 0


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    "loss, out_channels", [("cross_entropy + dice", 3), ("focal", 3), ("binary_cross_entropy", 3)]
)
def test_images_of_a_store(comm, shared_path, loss, out_channels):
    """Their labels are bytes; the dump has them as whole numbers."""
    if comm.rank == 0:
        random_store(shared_path / "store.h5", train=[(29, 43), (29, 43)])
    comm.Barrier()
    data = replace(CONFIG.data, store=str(shared_path / "store.h5"))
    found = replace(
        CONFIG,
        mesh=MeshConfig(tiles=Size("1x2")),
        loss=LossConfig(loss),
        data=data,
        model=replace(CONFIG.model, in_channels=2, out_channels=out_channels),
    )
    report = verify(found, comm, dump=str(shared_path / "dump.safetensors"))
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parallel(1)
def test_the_step_runs_on_the_device_that_is_named(comm, monkeypatch, capsys):
    devices = []

    class Noted(Engine):
        def __init__(self, config, mesh, model, image, device, **more):
            devices.append(device)
            super().__init__(config, mesh, model, image, device, **more)

    monkeypatch.setattr(module, "Engine", Noted)
    report = verify(CONFIG, comm, SIZE, device=torch.device("cpu", 0))
    assert (
        devices == [torch.device("cpu", 0)]
        and report["device"] == "cpu"
        and "computed on" not in summary(report, 1e-12)
    )
    assert "\ncomputed on cuda, compared with the serial program on the CPU\n" in summary(
        {**report, "device": "cuda"}, 1e-12
    )
    if not torch.cuda.device_count():
        with pytest.raises(SystemExit) as ended:
            main(["verify", "--image", "13x18", "--run.device", "cuda"])
        assert (
            ended.value.code == 2
            and "run.device is cuda, but this node shows no GPU to PyTorch"
            in capsys.readouterr().err
        )


@pytest.mark.parallel(1)
def test_errors_as_large_as_the_serial_programs_own_rounding_pass(comm):
    """A network whose norms cancel all but a few digits; and not one that is wrong by as much."""
    plan = replace(
        config(tiles_per_rank=(1, 2), exchange_every="1"),
        model=ModelConfig("made_networks:cancelling"),
    )
    report = verify(plan, comm, Size("41x53"))
    assert report["max_error"] > 1e-12 and passed(report, 1e-12) and not passed(report, 1e-14)
    assert "change the results of the serial program itself by" in summary(
        report, 1e-12
    ) and "\nexact: " in summary(report, 1e-12)
    assert not passed({**report, "max_error": 10 * report["rounding"]}, 1e-12) and not passed(
        {**report, "max_error": math.nan}, 1e-12
    )
