"""Parameters that are frozen, that nothing uses, or whose gradient is zero but for rounding: in every layout as in the serial program."""

import json
from dataclasses import replace

import pytest
import torch
from test_train import config as train_config
from test_train import folder, weights  # noqa: F401  folder is a fixture
from torch import nn

from distseg.comm.launch import JointFailure
from distseg.config.settings import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    SpatialConfig,
    StreamingConfig,
)
from distseg.config.sizes import Size
from distseg.models.unet import unet
from distseg.training.checkpoint.files import find
from distseg.training.engine import Engine
from distseg.training.loop import train
from distseg.training.verify import passed, summary, verify

HERE = __name__
SIZE = Size("41x53")


def net(in_channels=3, out_channels=2, norm="batch"):
    return unet(
        depth=1,
        num_convs=1,
        base_channels=4,
        in_channels=in_channels,
        out_channels=out_channels,
        norm=norm,
        dropout=0.0,
    )


def _frozen(model, *parts):
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(parts))
    return model


def encoder_frozen(**more):
    return _frozen(net(**more), "enc")


def decoder_frozen(**more):
    return _frozen(net(**more), "dec", "head")


def middle_frozen(**more):
    return _frozen(net(**more), "mid")


def all_frozen(**more):
    return _frozen(net(**more), "")


def some_unused(**more):
    model = net(**more)
    model.enc0_conv0.spare = nn.Parameter(torch.ones(3))
    model.head.spare = nn.Parameter(torch.ones(2))
    return model


def biased(in_channels=3, out_channels=2, norm=nn.BatchNorm2d):
    layers = []
    for _ in range(2):
        layers += [nn.Conv2d(in_channels, 4, 3, padding=1), norm(4), nn.LeakyReLU(0.01)]
        in_channels = 4
    return nn.Sequential(*layers, nn.Conv2d(4, out_channels, 1))


def biased_before_instance_norm(**more):
    return biased(norm=nn.InstanceNorm2d, **more)


class Faint(nn.Module):
    """Adds a little of a convolution: its gradient is tiny, and no rounding."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return x + 1e-12 * self.conv(x)


def faint(in_channels=3, out_channels=2):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1), Faint(), nn.Conv2d(4, out_channels, 1)
    )


def plan(network: str, optim="adamw", **sections) -> Config:
    return Config(
        model=ModelConfig(name=f"{HERE}:{network}"),
        optim=OptimConfig(optim, weight_decay=0.01, clip=0.5),
        **sections,
    )


LAYOUTS = {
    "one rank": (1, {}),
    "tiles": (2, dict(mesh=MeshConfig(tiles=Size("1x2")))),
    "exchanges": (
        2,
        dict(mesh=MeshConfig(tiles=Size("2x1")), spatial=SpatialConfig(exchange_every="1")),
    ),
    "stages": (2, dict(mesh=MeshConfig(stages=2))),
    "stages, streamed tiles": (
        2,
        dict(mesh=MeshConfig(stages=2), streaming=StreamingConfig(tiles=Size("2x2"))),
    ),
    "streamed tiles": (1, dict(streaming=StreamingConfig(tiles=Size("2x2")))),
    "samples and stages": (4, dict(mesh=MeshConfig(samples=2, stages=2))),
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "network", ["encoder_frozen", "decoder_frozen", "middle_frozen", "some_unused"]
)
def test_exact_in_every_layout(comm, network):
    for ranks, sections in LAYOUTS.values():
        if ranks != comm.size:
            continue
        report = verify(plan(network, **sections), comm, SIZE)
        if report:
            assert passed(report, 1e-12), summary(report, 1e-12)
            frozen, unused = len(report["frozen"]), report["unused"]
            assert (frozen > 0, sorted(unused)) == (
                (False, ["enc0_conv0.spare", "head.spare"])
                if network == "some_unused"
                else (True, [])
            )
            assert len(report["gradients"]) + frozen == len(report["weights"])
            words = summary(report, 1e-12)
            assert (
                f"note: {frozen} parameters frozen (requires_grad is off), such as" in words
                or "note: 2 parameters unused, such as" in words
            )


@pytest.mark.parallel(2)
def test_nothing_to_train_is_refused(comm):
    with pytest.raises(
        JointFailure,
        match=r"all 10 parameters of this model are frozen \(requires_grad is off, or their rate in optim.rates is 0\), so there is nothing to train",
    ):
        verify(plan("all_frozen", mesh=MeshConfig(stages=2)), comm, SIZE)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("network, optim", [("encoder_frozen", "sgd"), ("decoder_frozen", "adamw")])
def test_training_leaves_the_frozen_alone_and_resumes(comm, folder, network, optim):  # noqa: F811
    found = train_config(folder, stages=2, epochs=2, output=str(folder / "whole"))
    found = replace(
        found, model=ModelConfig(name=f"{HERE}:{network}"), optim=OptimConfig(optim, lr=3e-3)
    )
    train(found, comm)
    parts = replace(found, train=replace(found.train, output=str(folder / "parts")))
    train(replace(parts, train=replace(parts.train, max_minutes=0)), comm)  # an epoch
    train(replace(parts, train=replace(parts.train, resume=True)), comm)
    if comm.rank == 0:
        torch.manual_seed(found.model.seed)
        model = globals()[network](in_channels=2, out_channels=2).double()
        whole, resumed = weights(folder / "whole"), weights(folder / "parts")
        assert (
            json.loads((find(folder / "parts", "last") / "manifest.json").read_text())["epoch"] == 2
        )
        for name, p in model.named_parameters():
            assert torch.equal(whole[name], resumed[name]), name
            assert torch.equal(whole[name], p.float().double()) != p.requires_grad, name


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(1)
@pytest.mark.parametrize("network", ["biased", "biased_before_instance_norm"])
@pytest.mark.parametrize("optim", ["adam", "adamw", "sgd"])
def test_a_bias_before_a_norm(comm, network, optim):
    """Its gradient is 0, and what is computed is rounding, of which Adam makes a step that no two programs share."""
    report = verify(plan(network, optim, mesh=MeshConfig(tiles=Size(f"1x{comm.size}"))), comm, SIZE)
    if report:
        assert passed(report, 1e-12), summary(report, 1e-12)
        assert sorted(report["zero_gradients"]) == ["0.bias", "3.bias"]
        assert (
            "note: 2 parameters with a gradient that is zero except for rounding, such as"
            in summary(report, 1e-12)
        )
        assert ("divides rounding errors by rounding errors" in summary(report, 1e-12)) == (
            optim != "sgd"
        )


@pytest.mark.parallel(1)
def test_a_gradient_that_is_merely_tiny_is_compared_as_all_others(comm):
    report = verify(plan("faint"), comm, SIZE)
    assert report["zero_gradients"] == {} and passed(report, 1e-12)


def spoilt(gradient_of=None, weight_of=None, by=0.0):
    """An engine whose gradient, or weight after the update, of a parameter is off by so much."""
    backward, update = Engine.backward, Engine.update

    def wrong_backward(self, own):
        loss = backward(self, own)
        if gradient_of:
            self.model.model.get_parameter(gradient_of).grad[0] += by
        return loss

    def wrong_update(self, rate):
        norm = update(self, rate)
        if weight_of:
            self.model.model.get_parameter(weight_of).data[0] += by
        return norm

    return {"backward": wrong_backward, "update": wrong_update}


@pytest.mark.parallel(1)
@pytest.mark.parametrize("optim", ["adam", "sgd"])
@pytest.mark.parametrize(
    "network, harm, part",
    [
        ("biased", dict(gradient_of="3.bias", by=1e-10), "gradients"),
        ("biased", dict(weight_of="3.bias", by=1e-10), "weights"),
        ("biased", dict(gradient_of="6.bias", by=1e-10), "gradients"),
        ("faint", dict(weight_of="1.conv.bias", by=1e-10), "weights"),
        ("encoder_frozen", dict(weight_of="enc0_conv0.weight", by=1e-10), "weights"),
        ("some_unused", dict(gradient_of="enc0_conv0.spare", by=1e-10), "gradients"),
    ],
)
def test_a_real_error_is_found_where_something_is_set_apart(
    comm, monkeypatch, network, harm, part, optim
):
    for name, wrong in spoilt(**harm).items():
        monkeypatch.setattr(Engine, name, wrong)
    report = verify(plan(network, optim), comm, SIZE)
    assert not passed(report, 1e-12) and max(report[part].values()) > 1e-12, summary(report, 1e-12)


@pytest.mark.parallel(1)
def test_a_wrong_step_of_zero_gradients_is_found(comm, monkeypatch):
    """The step on the gradients found is an optimizer's of the same settings, not whatever came out."""
    update = Engine.update
    monkeypatch.setattr(Engine, "update", lambda self, rate: update(self, 1.1 * rate))
    report = verify(plan("biased"), comm, SIZE)
    assert report["weights"]["3.bias"] > 1e-12


@pytest.mark.parallel(1)
def test_a_run_within_memory_with_frozen_parameters(comm):
    report = verify(plan("encoder_frozen", streaming=StreamingConfig(memory="2GB")), comm, SIZE)
    assert passed(report, 1e-12)
