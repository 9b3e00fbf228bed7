"""Tensors that a stage holds: by hand, and against those that live in a step."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from distseg.cli.planned_training import PlannedTraining
from distseg.config.settings import Config, DataConfig, LossConfig, ModelConfig, TrainConfig
from distseg.config.sizes import Size
from distseg.layers.loss import Loss
from distseg.models.capture.capture import as_network
from distseg.planning.held import Held
from distseg.planning.live_bytes import LiveBytes
from distseg.planning.live_tensors import TileSizes, TileTensors, stage_tensors, tensors_of
from distseg.planning.machine import load_machine
from distseg.planning.mesh_layout import MeshLayout
from distseg.planning.mesh_search import Planner
from distseg.planning.tile_grids import _between
from distseg.runtime.pipeline import Pipeline
from distseg.training.verify import plain_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.layout_memory import measured  # noqa: E402

PLANE = 4 * 8 * 32 * 32


def network_of(*layers: nn.Module):
    loss = Loss(LossConfig(), 2, (1.0,))
    return tensors_of(nn.Sequential(*layers), (32, 32), 1, "fp32", False, loss)


def conv(a: int, b: int) -> nn.Module:
    return nn.Conv2d(a, b, 1, bias=False)


def test_live_bytes_end_with_their_tensors():
    with LiveBytes("cpu") as alive:
        x = torch.zeros(100)
        y = x[:50] + 1
        del x
        torch.zeros(7, device="meta")
    assert (alive.bytes, alive.peak) == (200, 600)
    del y
    assert alive.bytes == 0


def test_a_norm_computes_the_activation_behind_it():
    """Kept are the norm's input for the norm, and the activation's result for the last layer."""
    network = network_of(conv(3, 8), nn.InstanceNorm2d(8), nn.ReLU(), conv(8, 2))
    whole = TileTensors(network, TileSizes.whole(4))
    found = stage_tensors(whole, range(3), (), (3,), False)
    assert found.full / PLANE == pytest.approx(2, abs=0.1)
    # Gradients of the result, which the stage holds, and of the norm's input.
    assert found.working / PLANE == pytest.approx(2, abs=0.1)
    assert found.sent == PLANE and found.received == found.inputs == 0


def test_tensors_end_with_their_last_reader():
    """An activation overwrites the result of a convolution, which nothing else reads."""
    network = network_of(conv(3, 8), nn.ReLU(), conv(8, 8), nn.ReLU(), conv(8, 2))
    whole = TileTensors(network, TileSizes.whole(5))
    found = stage_tensors(whole, range(2, 4), (2,), (4,), False, True)
    assert (found.full, found.inputs, found.received) == (2 * PLANE, PLANE, PLANE)
    assert found.passing == PLANE and found.building == 0
    # Gradients of the result, which the stage holds, of the ReLU's input, and of the stage's input.
    assert found.working == 3 * PLANE + 4 * 8 * 8
    assert found.load(Held(2, 1, arriving=1, returning=1, backward=True)) == (
        2 * found.full + found.inputs + found.received + found.sent + found.working
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = conv(3, 8), conv(8, 8), conv(8, 2)

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.second(x))


def test_each_received_term_of_a_sum_has_a_gradient_of_its_own():
    loss = Loss(LossConfig(), 2, (1.0,))
    network = tensors_of(as_network(Residual()), (32, 32), 1, "fp32", False, loss)
    whole = TileTensors(network, TileSizes.whole(4))
    assert stage_tensors(whole, range(2, 3), {1, 2}, {3}, False).working == 3 * PLANE


def test_the_part_of_a_result_that_is_sent_is_copied():
    """The second convolution and the sum read parts of what the tile holds of the first result."""
    loss = Loss(LossConfig(), 2, (1.0,))
    network = tensors_of(as_network(Residual()), (32, 32), 1, "fp32", False, loss)
    whole = TileSizes.whole(4)
    part = replace(whole, read=(0.0, 0.75, 0.5, 0.0), maps=(1.0, 1.0, 0.5, 0.5, 0.5))
    sent = [
        stage_tensors(TileTensors(network, tile), range(1), (), {1}, False).copied
        for tile in (whole, part)
    ]
    assert sent == [0.0, 0.75 * PLANE]


def test_a_part_along_two_dims_is_extended_along_one_at_a_time():
    assert _between([42, 24], [60, 60]) == 42 * 60
    assert _between([60, 24], [60, 60]) == 0
    assert _between([4, 6, 3], [4, 8, 9]) == 4 * 6 * 9


def training_of(norm: str) -> PlannedTraining:
    model = ModelConfig("unet", in_channels=3, out_channels=3, depth=2, base_channels=8, norm=norm)
    config = Config(
        model=model, data=DataConfig(images=1), train=TrainConfig(accumulate=2, precision="fp32")
    )
    return PlannedTraining(config, as_network(plain_model(model)), Size("64x48"))


@pytest.mark.parallel([2])
def test_no_weight_gradient_waits_beyond_the_next_pass(comm, monkeypatch):
    """Weight gradients are done before the next pass, so that their tensors leave memory first."""
    left, forward = [], Pipeline._forward

    def watched(self, *args):
        left.append(len(self.mail.waits._pieces))
        return forward(self, *args)

    monkeypatch.setattr(Pipeline, "_forward", watched)
    layout = MeshLayout(1, Size((comm.size, 1)), 1, "1", 2, "1f1b", "never")
    engine, own = training_of("none").step(layout, comm, torch.device("cpu"))
    engine.backward(own)
    assert left == [0, 0]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("norm", ["none", pytest.param("batch", marks=pytest.mark.slow)])
def test_a_step_takes_as_much_as_predicted_and_not_more(comm, norm):
    training = training_of(norm)
    machine = load_machine("a100").changed("memory", 1e3)
    plan = Planner(training.work(machine), machine)
    tiles = Size((comm.size, 1))
    layouts = [MeshLayout(1, tiles, 1, every, 2, "1f1b", "never") for every in ("all", "1")]
    layouts.append(MeshLayout(1, Size("1x1"), comm.size, "all", 2, "gpipe", "never"))
    for layout in layouts:
        found = plan.predict(layout)
        most = max(comm.allgather(measured(training, found, comm, torch.device("cpu"))))
        assert 0.85 <= most / (found.memory - machine.base) <= 1, layout
