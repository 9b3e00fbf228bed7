"""fp16 steps: the loss scale is GradScaler's, leaves exact gradients exact, and all ranks leave out the same steps."""

import math
import random

import pytest
import torch
from test_exact import check, config

from distseg.comm.alone import Alone
from distseg.comm.launch import JointFailure
from distseg.comm.mesh import Mesh
from distseg.config.sizes import Size
from distseg.runtime.loss_scale import LossScale
from distseg.runtime.parameter_update import ParameterUpdate
from distseg.training.engine import Engine
from distseg.training.loop import _check_finite
from distseg.training.verify import own_pieces, prepare


def test_the_scale_is_grad_scalers(monkeypatch):
    monkeypatch.setattr("distseg.runtime.loss_scale._STEPS", 3)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    theirs, ours = torch.amp.GradScaler("cpu", growth_interval=3), LossScale()
    theirs.scale(torch.zeros(1))  # which makes its scale
    draw, taken = random.Random(1), 0
    for _ in range(60):
        finite, before = draw.random() < 0.8, p.item()
        p.grad = torch.full((1,), 1.0 if finite else math.inf)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        assert ours.follow(1.0 if finite else draw.choice([math.inf, math.nan])) == (
            p.item() != before
        )
        taken += finite
        assert ours.value == theirs.get_scale()
    assert 0 < taken < 60


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "settings",
    [
        dict(tiles="1x{ranks}", exchange_every="1", norm="batch"),
        dict(stages="{ranks}", accumulate=4, loss="dice"),
        dict(samples="{ranks}", streamed="2x2", norm="group"),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_scale_does_not_change_exact_gradients(comm, settings, monkeypatch):
    monkeypatch.setattr(ParameterUpdate, "loss_scale", LossScale(2.0**40))
    numbers = {"stages": int, "samples": int}
    own = {
        name: numbers.get(name, str)(value.format(ranks=comm.size))
        if name in ("tiles", "stages", "samples")
        else value
        for name, value in settings.items()
    }
    check(comm, "33x29", **own)


def engine_of(comm, **settings) -> tuple[Engine, list]:
    """An engine in fp16, and this rank's pixels of a step."""
    found = prepare(config(dropout=0.0, norm="group", **settings), Size("24x28"))
    shape = found.config.mesh
    mesh = Mesh(comm, shape.samples, shape.tiles, shape.stages)
    engine = Engine(found.config, mesh, found.model, found.size, precision="fp16")
    return engine, own_pieces(engine, found.images())


def weights(engine: Engine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.parameters])


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "axis", [dict(tiles="1x2", exchange_every="1"), dict(stages=2), dict(samples=2)], ids=str
)
def test_all_ranks_leave_out_steps_whose_gradients_overflow(comm, axis):
    engine, own = engine_of(comm, **(axis if comm.size > 1 else {}))
    engine.loss_scale.value = 2.0**60
    before, left_out = weights(engine), 0
    for _ in range(60):
        loss, norm = engine.step(own, 1e-2)
        assert math.isfinite(loss)
        assert len(set(comm.allgather((engine.loss_scale.value, repr(norm))))) == 1
        if math.isfinite(norm):
            break
        left_out += 1
        assert torch.equal(weights(engine), before)
        assert engine.loss_scale.value == 2.0 ** (60 - left_out)
    assert 0 < left_out < 60 and not torch.equal(weights(engine), before)
    assert weights(engine).dtype == torch.float32 and weights(engine).isfinite().all()


def test_small_gradients_are_not_lost(monkeypatch):
    """Each pixel's gradient is divided by the number of pixels, as if there were many more."""
    engine, own = engine_of(Alone())
    gradients = {}
    for scale in (1.0, 2.0**16):
        engine.loss_scale.value = scale
        head = engine.gradient_step.head
        find = head.loss.loss_grad
        monkeypatch.setattr(
            type(head.loss),
            "loss_grad",
            lambda _, table: (find(table)[0], find(table)[1] * 2.0**-18),
        )
        engine.backward(own)
        monkeypatch.undo()
        gradients[scale] = torch.cat([p.grad.flatten() for p in engine.parameters]) * 2.0**18
    engine.loss_scale = None
    engine.backward(own)
    wanted = torch.cat([p.grad.flatten() for p in engine.parameters])
    lost, kept = ((gradients[scale] - wanted).norm() / wanted.norm() for scale in (1.0, 2.0**16))
    assert kept < 0.02 < 0.2 < lost, (kept, lost)


def test_a_scale_below_1_ends_the_run():
    _check_finite(0.5, math.inf, 3, "runs/x", 1.0)
    for loss, norm, scale in [(0.5, math.inf, 0.5), (0.5, math.inf, None), (math.nan, 1.0, 64.0)]:
        with pytest.raises(JointFailure, match="both must be finite"):
            _check_finite(loss, norm, 3, "runs/x", scale)
