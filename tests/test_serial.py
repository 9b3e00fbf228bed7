"""The serial program is what its name says: plain PyTorch layers and losses on whole images."""

import copy

import pytest
import torch
import torch.nn.functional as F

from distseg.config.settings import LossConfig, OptimConfig, StepSettings
from distseg.models.unet import unet
from distseg.training.serial import Image, serial_step

SIZE = (29, 37)


def model_of(norm: str, dropout: float = 0.0):
    torch.manual_seed(0)
    model = unet(
        depth=2,
        num_convs=1,
        base_channels=4,
        in_channels=2,
        out_channels=3,
        norm=norm,
        dropout=dropout,
        groups=2,
        up="bilinear",
    ).double()
    for layer in model:
        if hasattr(layer, "running_var") and layer.running_var is not None:
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    return model


def step_of(count: int, groups: int = 1) -> list[Image]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for n in range(count):
        labels = torch.randint(0, 3, SIZE, generator=draw)
        labels[torch.rand(SIZE, generator=draw) < 0.2] = 255
        found.append(
            Image(
                torch.randn(2, *SIZE, generator=draw, dtype=torch.float64),
                labels,
                number=n,
                group=n * groups // count,
                micro_batch=0,
            )
        )
    return found


def plain_loss(name, z, y):
    if name == "cross_entropy":
        return F.cross_entropy(z, y, ignore_index=255)
    valid = y != 255
    if name == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(
            z.movedim(1, -1)[valid], F.one_hot(y[valid], 3).double()
        )
    p, t = (
        z.softmax(1) * valid[:, None],
        F.one_hot(y.where(valid, 0), 3).movedim(-1, 1) * valid[:, None],
    )
    over = (2, 3)
    return (1 - (2 * (p * t).sum(over) + 1) / (p.sum(over) + t.sum(over) + 1)).mean()


def close(found: dict, wanted: dict) -> None:
    for name, w in wanted.items():
        assert (found[name] - w).norm() <= 1e-9 * w.norm(), name


@pytest.mark.parametrize("norm", ["instance", "batch", "group", "none"])
@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy", "dice"])
def test_one_step_of_plain_pytorch(norm, loss):
    model, images = model_of(norm), step_of(3)
    outcome = serial_step(
        model,
        images,
        StepSettings(LossConfig(loss), OptimConfig("sgd", lr=0.1, momentum=0, clip=0.01)),
    )

    plain = copy.deepcopy(model).train()
    z = plain(torch.stack([i.pixels for i in images]))
    value = plain_loss(loss, z, torch.stack([i.labels for i in images]))
    value.backward()
    gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
    assert outcome.loss == pytest.approx(value.item(), rel=1e-9)
    close(outcome.gradients, gradients)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    close(outcome.weights, {name: p.detach() for name, p in plain.named_parameters()})


def test_frozen_batch_norm_is_evaluation_mode():
    model, images = model_of("batch"), step_of(2)
    outcome = serial_step(model, images, StepSettings(frozen_norm=True))
    plain = copy.deepcopy(model).eval()
    F.cross_entropy(
        plain(torch.stack([i.pixels for i in images])),
        torch.stack([i.labels for i in images]),
        ignore_index=255,
    ).backward()
    close(outcome.gradients, {name: p.grad for name, p in plain.named_parameters()})
    close(outcome.buffers, {name: b for name, b in model.named_buffers() if b.is_floating_point()})


@pytest.mark.parametrize("scope, batches", [("group", [[0, 1], [2, 3]]), ("step", [[0, 1, 2, 3]])])
def test_what_batch_norm_sees(scope, batches):
    """Two sample groups of two images each."""
    model, images = model_of("batch"), step_of(4, groups=2)
    outcome = serial_step(model, images, StepSettings(norm_scope=scope))
    plain = copy.deepcopy(model).train()
    z = torch.cat([plain(torch.stack([images[n].pixels for n in batch])) for batch in batches])
    F.cross_entropy(z, torch.stack([i.labels for i in images]), ignore_index=255).backward()
    close(outcome.gradients, {name: p.grad for name, p in plain.named_parameters()})


def test_running_statistics_are_deferred_batch_norms():
    """All images of the step enter once, with their biased variance (plain PyTorch takes the unbiased one)."""
    model, images = model_of("batch"), step_of(3)
    first = torch.stack([model.enc0_conv0(i.pixels) for i in images]).transpose(0, 1).flatten(1)
    norm = model.enc0_norm0
    outcome = serial_step(model, images, StepSettings())
    close(
        outcome.buffers,
        {
            "enc0_norm0.running_mean": 0.9 * norm.running_mean + 0.1 * first.mean(1),
            "enc0_norm0.running_var": 0.9 * norm.running_var + 0.1 * first.var(1, correction=0),
        },
    )


def test_dropout_is_keyed_and_drops_at_its_rate():
    model, images = model_of("none", dropout=0.5), step_of(1)
    runs = [serial_step(model, images, StepSettings(), epoch=e).loss for e in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] != serial_step(model_of("none"), images, StepSettings()).loss


def test_the_model_is_left_alone():
    model = model_of("batch", dropout=0.1)
    before = copy.deepcopy(model.state_dict())
    serial_step(model, step_of(2), StepSettings())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_batch_norm_of_different_sizes_has_no_meaning():
    images = step_of(2)
    small = Image(images[1].pixels[:, :20], images[1].labels[:20], 1, 0, 0)
    with pytest.raises(
        ValueError,
        match="images of different sizes, but those of a batch have .*: set data.images to 1, or give",
    ):
        serial_step(model_of("batch"), [images[0], small], StepSettings())
    serial_step(model_of("instance"), [images[0], small], StepSettings())
