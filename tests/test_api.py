"""The Python interface against plain PyTorch: the user's module, loss, optimizer and loop, in one process on whole images."""

import copy
import math
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distseg
from distseg.config.settings import (
    MeshConfig,
    PipelineConfig,
    RunConfig,
    SpatialConfig,
    TrainConfig,
)
from distseg.layers.criterion import Outputs
from distseg.tiling.tile import Box
from distseg.tiling.tile_batch import labels_of_images

CE = partial(F.cross_entropy, reduction="none")


class Net(nn.Module):
    """A small U-Net with batch or instance norm, as a user writes one."""

    def __init__(self, norm=nn.BatchNorm2d, bands=3, classes=4):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(bands, 6, 3, padding=1), norm(6), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), norm(8), nn.ReLU())
        self.up = nn.Conv2d(14, 6, 3, padding=1)
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        up = F.interpolate(b, size=a.shape[2:])
        return self.head(F.relu(self.up(torch.cat([a, up], 1))))


def network(norm=nn.BatchNorm2d, **sizes) -> nn.Module:
    torch.manual_seed(0)
    return Net(norm, **sizes).double()


def images(step: int, groups: int, count: int = 2, size=(34, 46), bands=3, classes=4):
    """Images and targets of all groups, [groups x count]; a few pixels are ignored."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(groups * count, bands, *size, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (groups * count, *size), generator=g)
    y[torch.rand(y.shape, generator=g) < 0.1] = -100
    return x, y


def serial(module, steps, loss, groups, optimizer, count=2, **kind):
    """Train in plain PyTorch: batch norm sees the images of a group; the loss is over all groups."""
    module = copy.deepcopy(module).train()
    opt, losses = optimizer(module.parameters()), []
    for step in range(steps):
        x, y = images(step, groups, count, **kind)
        out = torch.cat([module(part) for part in x.chunk(groups)])
        value = loss(out, y)
        opt.zero_grad()
        value.backward()
        opt.step()
        losses.append(value.item())
    return module, losses


def distributed(comm, module, steps, criterion, mesh, optimizer, count=2, backward=None, **options):
    model = distseg.distribute(copy.deepcopy(module), mesh, **options)
    opt, losses, groups = optimizer(model.parameters()), [], mesh.shape.samples
    for step in range(steps):
        x, y = images(step, groups, count)
        mine = slice(mesh.sample * count, (mesh.sample + 1) * count)
        opt.zero_grad()
        losses.append((backward or _backward)(model, x[mine], y[mine], criterion))
        opt.step()
    return model, losses


def _backward(model, x, y, criterion) -> float:
    return model.backward(x, y, criterion).item()


def _eager(model, x, y, criterion) -> float:
    loss = criterion(model(model.shard(x)), model.shard(y))
    loss.backward()
    return loss.item()


def error(model, losses, plain, plain_losses, buffers=True) -> float:
    wanted = plain.state_dict()
    found = {name: t.cpu() for name, t in model.whole_state_dict().items()}
    assert set(found) == set(wanted)
    names = [
        n for n, t in wanted.items() if t.is_floating_point() and (buffers or "running" not in n)
    ]
    errors = [(found[n] - wanted[n]).abs().max() / wanted[n].abs().max() for n in names]
    return max([*map(float, errors), *(abs(a - b) / abs(b) for a, b in zip(losses, plain_losses))])


MESHES = {
    1: [dict()],
    2: [dict(tiles=(1, 2)), dict(samples=2), dict(stages=2)],
    4: [dict(tiles=(2, 2)), dict(samples=2, tiles=(2, 1)), dict(tiles=(1, 2), stages=2)],
}
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(1, cases=2)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("exchange", ["all", "1"])
def test_a_plain_loop(comm, number, exchange):
    if number >= len(MESHES[comm.size]):
        pytest.skip("fewer meshes of this many ranks")
    mesh = distseg.init_mesh(**MESHES[comm.size][number], comm=comm)
    options = dict(exchange=exchange) if mesh.shape.tiles.volume > 1 else {}
    plain = serial(network(), 3, F.cross_entropy, mesh.shape.samples, SGD)
    mine = distributed(comm, network(), 3, distseg.PixelLoss(CE), mesh, SGD, **options)
    assert error(*mine, *plain, buffers=mesh.shape.samples == 1) < 1e-11


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("number", range(2))
def test_the_eager_form(comm, number):
    if number >= len(MESHES[comm.size]):
        pytest.skip("fewer meshes of this many ranks")
    mesh = distseg.init_mesh(**MESHES[comm.size][number], comm=comm)
    plain = serial(network(nn.InstanceNorm2d), 3, F.cross_entropy, mesh.shape.samples, ADAMW)
    mine = distributed(
        comm, network(nn.InstanceNorm2d), 3, distseg.PixelLoss(CE), mesh, ADAMW, backward=_eager
    )
    assert error(*mine, *plain) < 1e-11


def dice_sums(logits, target):
    valid = (target != -100).unsqueeze(1)
    p = logits.softmax(1) * valid
    t = F.one_hot(target.clamp(min=0), logits.shape[1]).movedim(-1, 1).to(p) * valid
    return torch.cat([(p * t).flatten(2).sum(2), (p + t).flatten(2).sum(2)], 1)


def dice_value(sums):
    overlap, whole = sums.chunk(2, 1)
    return (1 - 2 * overlap / (whole + 1)).mean()


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("stages", [1, 2])
def test_sums_and_weighted_losses(comm, stages):
    if stages > comm.size:
        pytest.skip("more stages than ranks")
    mesh = distseg.init_mesh(stages=stages, tiles=(1, comm.size // stages), comm=comm)
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)

    def loss(z, y):
        return F.cross_entropy(z, y, weights) + 0.3 * dice_value(dice_sums(z, y))

    criterion = distseg.PixelLoss(
        partial(F.cross_entropy, weight=weights, reduction="none"), weight=lambda y: weights[y]
    ) + 0.3 * distseg.SumLoss(dice_sums, dice_value)
    plain = serial(network(), 2, loss, 1, SGD)
    mine = distributed(comm, network(), 2, criterion, mesh, SGD)
    assert error(*mine, *plain) < 1e-11


@pytest.mark.parametrize("channels", [None, 1, 4], ids=lambda n: f"target of {n}")
@pytest.mark.parametrize("per_value", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_each_value_counts_by_its_weight(channels, per_value, several):
    """Compare with the plain quotient, on two parts of images with invalid pixels."""
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    target = draw(2, *([] if channels is None else [channels]), 9, 14)
    target.view(-1)[5::17] = math.nan
    logits = draw(2, 4, 9, 14)

    def weigh(y):
        found = 1 + y.square()
        if y.dim() == 4 and not (per_value and several):
            found = found.sum(1)
        found = found.unsqueeze(1) if per_value and y.dim() == 3 else found
        return found.expand(-1, 4, -1, -1) if found.dim() == 4 else found

    def function(z, y):
        each = (z - (y if y.dim() == 4 else y.unsqueeze(1))).square()
        w = weigh(y)
        each = each * (w if w.dim() == 4 else w.unsqueeze(1))
        return each if several else each.sum(1)

    valid = ~target.isnan() if channels else ~target.isnan().unsqueeze(1)
    if not several:
        valid = valid.all(1)
    clean = target.nan_to_num()
    values, weights = function(logits, clean), weigh(clean)
    if per_value and not several and channels is None:
        weights = weights[:, 0]
    criterion = distseg.PixelLoss(
        function,
        weight=lambda y: (
            weigh(y)[:, 0] if per_value and not several and channels is None else weigh(y)
        ),
    )
    if weights.dim() < values.dim():
        weights = weights.unsqueeze(1)
    valid, weights = valid.expand_as(values), weights.expand_as(values)
    wanted = values[valid].sum() / weights[valid].sum()
    criterion.check(Outputs(4, 2), target)
    parts = [slice(0, 5), slice(5, None)]
    table = sum(criterion.rows(logits[..., part], target[..., part]) for part in parts)
    torch.testing.assert_close(criterion.value(table), wanted, rtol=1e-12, atol=0)


@pytest.mark.parallel(2)
def test_accumulation_with_and_without_sync(comm):
    mesh, module = distseg.init_mesh(samples=2, comm=comm), network(nn.InstanceNorm2d)
    model = distseg.distribute(copy.deepcopy(module), mesh)
    criterion = distseg.PixelLoss(CE)
    batches = [images(step, 2, 1) for step in range(3)]
    mine = slice(mesh.sample, mesh.sample + 1)
    for silent in (False, True):
        model.zero_grad()
        for number, (x, y) in enumerate(batches):
            if silent and number < 2:
                with model.no_sync():
                    model.backward(x[mine], y[mine], criterion, scale=1 / 3)
            else:
                model.backward(x[mine], y[mine], criterion, scale=1 / 3)
        module.zero_grad()
        for x, y in batches:
            (F.cross_entropy(module(x), y) / 3).backward()
        found = {n: p.grad for n, p in model.named_parameters()}
        for name, p in module.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parallel([1, 2])
def test_parameters_without_gradient_are_left_alone(comm):
    """PyTorch does so too, and an optimizer with weight decay skips them."""
    module = network()
    module.spare = nn.Linear(2, 3, dtype=torch.float64)
    for p in module.b.parameters():
        p.requires_grad_(False)
    mesh = distseg.init_mesh(samples=comm.size, comm=comm)
    plain = serial(module, 3, F.cross_entropy, comm.size, ADAMW)
    mine = distributed(comm, module, 3, distseg.PixelLoss(CE), mesh, ADAMW)
    assert error(*mine, *plain, buffers=comm.size == 1) < 1e-11


@pytest.mark.parallel([1, 2])
def test_streamed_tiles_and_micro_batches(comm):
    module = network(nn.InstanceNorm2d)
    mesh = distseg.init_mesh(stages=comm.size, samples=1, comm=comm)
    options = dict(micro_batches=2) if comm.size > 1 else dict(streaming="2GB")
    plain = serial(module, 2, F.cross_entropy, 1, SGD, 4)
    mine = distributed(comm, module, 2, distseg.PixelLoss(CE), mesh, SGD, 4, **options)
    assert error(*mine, *plain) < 1e-11
    (model, _), (module, _) = mine, plain
    x, y = images(2, 1, 4)
    model.zero_grad()
    model.backward(x, y, distseg.PixelLoss(CE))
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    wanted = {name: p.grad for name, p in module.named_parameters()}
    for largest in (1e9, 1e-3):  # the stages' gradients have one norm
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), largest).item()
        assert model.clip_grad_norm_(largest) == pytest.approx(norm, rel=1e-11)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-15)


@pytest.mark.parallel(2)
def test_functions_that_need_the_gradients_of_all_stages_are_refused(comm):
    """Neither PyTorch's clipping nor LBFGS; both are right for a module beside it, and for one stage."""
    clip = torch.nn.utils.clip_grad_norm_  # a name that users import before they distribute
    x, y = images(0, 1)

    def gradients(stages):
        mesh = distseg.init_mesh(stages=stages, tiles=(1, comm.size // stages), comm=comm)
        model = distseg.distribute(network(), mesh)
        for one in (model, copy.deepcopy(model)):
            one.backward(x, y, distseg.PixelLoss(CE))
            yield one, list(one.parameters())

    for _, parameters in gradients(1):
        norm = clip(parameters, 1e9)
        torch.optim.LBFGS(parameters).step(lambda: 0.0)
    for model, parameters in gradients(2):
        with pytest.raises(ValueError, match="call clip_grad_norm_ of the distributed model"):
            clip(iter(parameters), 1e9)
        with pytest.raises(ValueError, match="LBFGS updates each parameter"):
            torch.optim.LBFGS(parameters).step(lambda: 0.0)
        assert model.clip_grad_norm_(1e9) == pytest.approx(norm.item(), rel=1e-11)
        torch.optim.AdamW(parameters).step()
    beside = nn.Linear(2, 3)
    beside(torch.ones(1, 2)).sum().backward()
    assert clip(beside.parameters(), 1e9) == pytest.approx(3)


@pytest.mark.parallel([1, 2, 4])
def test_prediction(comm):
    mesh = distseg.init_mesh(tiles=(1, comm.size), comm=comm)
    module = network()
    model = distseg.distribute(copy.deepcopy(module), mesh)
    x, y = images(0, 1)
    before = model.predict(x)
    (alone,) = model.predict([x[0]])  # a list of one image is a list
    assert torch.equal(alone, before[0]) and torch.equal(model.predict(x[0]), alone)
    module.eval()
    torch.testing.assert_close(before, module(x).detach(), rtol=1e-11, atol=1e-12)
    found = comm.allgather([(box, y) for box, y in model.predict_tiles(x[0])])
    pixels = np.zeros(x.shape[2:])
    for box, _ in (item for those in found for item in those):
        pixels[box.slices] += 1
    assert (pixels == 1).all()


@pytest.mark.parallel([1, 2])
def test_arrays_of_all_kinds_and_sizes(comm, tmp_path):
    """Memory maps, lists of images of different sizes, single images."""
    mesh = distseg.init_mesh(tiles=(1, comm.size), comm=comm)
    module = network(nn.InstanceNorm2d)
    sizes = [(34, 46), (21, 52), (34, 46)]
    pairs = [images(n, 1, 1, size) for n, size in enumerate(sizes)]
    module.zero_grad()
    total = sum(F.cross_entropy(module(x), y, reduction="sum") for x, y in pairs)
    (total / sum((y != -100).sum() for _, y in pairs)).backward()
    wanted = {n: p.grad.clone() for n, p in module.named_parameters()}
    model = distseg.distribute(copy.deepcopy(module), mesh)
    model.zero_grad()
    model.backward(
        [x[0].numpy() for x, _ in pairs], [y[0] for _, y in pairs], distseg.PixelLoss(CE)
    )
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-11, atol=1e-13)
    np.save(tmp_path / "x.npy", pairs[0][0][0].numpy())
    one = np.load(tmp_path / "x.npy", mmap_mode="r")
    model.zero_grad()
    a = model.backward(one, pairs[0][1][0], distseg.PixelLoss(CE))
    model.zero_grad()
    b = model.backward(*pairs[0], "cross_entropy")
    assert float(a) == pytest.approx(float(b), rel=1e-12)


def classes_there(z, y):
    return CE(z, y) * len(y.unique())


REFUSED = {
    "mean": (lambda z, y: F.cross_entropy(z, y), "one value for each pixel"),
    "neighbours": (lambda z, y: F.avg_pool2d(CE(z, y), 3, 1, 1), "depends on other pixels"),
    "number of pixels": (lambda z, y: CE(z, y) / y[0].numel(), "depends on other pixels"),
    "large maps": (lambda z, y: CE(z, y) * (10 if y.numel() > 100 else 1), "depends on other"),
    "sums up to here": (lambda z, y: CE(z, y).cumsum(-1), "depends on other pixels"),
    "position": (lambda z, y: CE(z, y) * (1 + torch.arange(z.shape[-1])), "number or position"),
    "first column": (
        lambda z, y: CE(z, y) * (1 + 4.0 * (torch.arange(z.shape[-1]) == 3)),
        "number or position",
    ),
    "boundaries": (
        lambda z, y: CE(z, y) * (1 + (y != y.roll(1, -1)).to(z)),
        "depends on other pixels",
    ),
    "classes": (classes_there, "depends on other pixels"),
    "largest": (lambda z, y: CE(z, y) / (1 + y.max()), "depends on other pixels"),
    "batch": (lambda z, y: CE(z - z.mean(0), y), "depends on the other images"),
    "random": (lambda z, y: CE(z + torch.randn_like(z), y), "other values in a second call"),
    "learned": (lambda z, y: CE(z, y) * LEARNED, "uses tensors with requires_grad"),
    "fails": (lambda z, y: CE(z, y[:1]), "function of PixelLoss fails with ValueError"),
    "float": (lambda z, y: 1.0, "returns a float"),
}
LEARNED = torch.ones((), requires_grad=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_losses_that_tiles_cannot_compute_are_refused(kind):
    function, message = REFUSED[kind]
    criterion = distseg.PixelLoss(function)
    with pytest.raises(ValueError, match=message):
        criterion.check(Outputs(4, 2), images(0, 1)[1])


WEIGHTS = {
    "neighbours": lambda y: F.avg_pool2d(y.double(), 3, 1, 1),
    "frequency": lambda y: 1 / (1.0 + torch.bincount(y.flatten(), minlength=4))[y],
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_tiles_cannot_compute_are_refused(kind):
    with pytest.raises(ValueError, match="the weight of PixelLoss must be a function of one pixel"):
        distseg.PixelLoss(CE, weight=WEIGHTS[kind]).check(Outputs(4, 2), images(0, 1)[1])


SUMS = {
    "means": (lambda z, y: z.flatten(1).mean(1, keepdim=True), torch.sum, "sums over the pixels"),
    "no graph": (dice_sums, lambda sums: dice_value(sums).item(), "tensor of one number with"),
}


@pytest.mark.parametrize("kind", SUMS)
def test_sums_that_tiles_cannot_compute_are_refused(kind):
    function, value, message = SUMS[kind]
    with pytest.raises(ValueError, match=message):
        distseg.SumLoss(function, value).check(Outputs(4, 2), images(0, 1)[1])


def test_a_refused_loss_raises_before_the_step():
    model = distseg.distribute(network(), distseg.init_mesh())
    with pytest.raises(ValueError, match="one value for each pixel"):
        model.backward(*images(0, 1), distseg.PixelLoss(F.cross_entropy))
    six = distseg.PixelLoss(lambda z, y: torch.cat([z, z, z], 1))
    with pytest.raises(ValueError, match="returns 6 values for each pixel, but the target has 3"):
        six.check(Outputs(2, 2), torch.zeros(1, 3, 4, 5))
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are off"):
        model.backward(*images(0, 1), "cross_entropy")


def test_the_label_that_a_loss_of_pytorch_ignores_is_taken_over():
    loss = nn.CrossEntropyLoss(reduction="none", ignore_index=3)
    assert distseg.PixelLoss(loss).ignore_index == 3
    assert distseg.PixelLoss(partial(CE, ignore_index=2)).ignore_index == 2
    assert distseg.PixelLoss(loss, ignore_index=1).ignore_index == 1


def test_losses_of_a_sum_ignore_one_label_if_an_image_has_one_vector():
    first, other = (distseg.PixelLoss(partial(CE, ignore_index=n)) for n in (3, -100))
    assert (first + first).ignore_index == 3 and (first + other).ignore_index is None
    vectors, target = Outputs(4, 2, whole=True), torch.tensor([0, 2])[:, None, None]
    (first + 2 * first).check(vectors, target)
    (first + other).check(Outputs(4, 2), images(0, 1)[1].clamp(min=0))
    with pytest.raises(ValueError, match="have the ignore_index 3 and -100, but .* one vector"):
        (first + other).check(vectors, target)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("axis", ["samples", "tiles"])
def test_gradients_add_up_in_any_order_of_calls(comm, axis):
    """Both forms, inside and outside of no_sync, with and without gradients of before."""
    sizes = dict(samples=2) if axis == "samples" else dict(samples=1, tiles=(1, 2))
    mesh, module = distseg.init_mesh(comm=comm, **sizes), network(nn.InstanceNorm2d)
    model = distseg.distribute(copy.deepcopy(module), mesh)
    criterion = distseg.PixelLoss(CE)
    groups = mesh.shape.samples
    batches = [images(step, groups, 1) for step in range(4)]
    mine = slice(mesh.sample, mesh.sample + 1)
    for calls in (
        "be",
        "eb",
        "b(b)b",
        "(e)b",
        "(b)(e)e",
        "e(be)b",
        "1(b)b",
        "0(b)b",
        "1bb",
        "(b)0b",
    ):
        model.zero_grad()
        module.zero_grad()
        number, inside = 0, False
        for call in calls:
            if call in "()":
                inside = call == "("
            elif call in "01":
                for p in (*model.parameters(), *module.parameters()):
                    p.grad = torch.full_like(p, float(call))
            else:
                x, y = batches[number]
                number += 1
                with model.no_sync() if inside else nullcontext():
                    (_backward if call == "b" else _eager)(model, x[mine], y[mine], criterion)
                F.cross_entropy(module(x), y).backward()
        found = {n: p.grad for n, p in model.named_parameters()}
        for name, p in module.named_parameters():
            torch.testing.assert_close(
                found[name], p.grad, rtol=1e-11, atol=1e-12, msg=lambda m: f"{calls} {name}: {m}"
            )
    with model.no_sync():
        model.backward(x[mine], y[mine], criterion)
    with pytest.raises(ValueError, match="not summed over the ranks yet"):
        model.clip_grad_norm_(1.0)
    next(model.parameters()).grad.mul_(2)
    with pytest.raises(ValueError, match="changed before they were summed"):
        model.backward(x[mine], y[mine], criterion)


@pytest.mark.parallel([2, 3])
def test_replicas_have_the_same_bits_after_calls_inside_no_sync(comm):
    """Also in float32, where a gradient that is taken apart again would be rounded."""
    mesh = distseg.init_mesh(tiles=(1, comm.size), comm=comm)
    model = distseg.distribute(network(nn.InstanceNorm2d).float(), mesh)
    for step in range(3):
        model.zero_grad()
        for call in range(4):  # summed, not, not, summed
            x, y = images(4 * step + call, 1)
            with model.no_sync() if call in (1, 2) else nullcontext():
                model.backward(x.float(), y, distseg.PixelLoss(CE))
        bits = [p.grad.numpy().tobytes() for p in model.parameters()]
        assert comm.allgather(bits) == [bits] * comm.size


@pytest.mark.parallel(2)
def test_further_terms_of_the_loss(comm):
    """Terms of parameters count once; terms of one tile's output are refused."""
    mesh, module = distseg.init_mesh(tiles=(1, 2), comm=comm), network(nn.InstanceNorm2d)
    model, criterion = distseg.distribute(copy.deepcopy(module), mesh), distseg.PixelLoss(CE)
    x, y = images(0, 1)

    def decay(m):
        return 0.1 * sum((p**2).sum() for p in m.parameters())

    (2 * F.cross_entropy(module(x), y) + decay(module)).backward()
    model.zero_grad()
    (2 * criterion(model(model.shard(x)), model.shard(y)) + decay(model)).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-11, atol=1e-12)
    output = model(model.shard(x))
    with pytest.raises(ValueError, match="must get the unchanged output of the last"):
        criterion(output - output.mean(), model.shard(y))
    with pytest.raises(ValueError, match="give model.shard"):
        criterion(output, y)
    with pytest.raises(ValueError, match="besides the criterion, the loss has terms"):
        (criterion(output, model.shard(y)) + output.mean()).backward()
    with pytest.raises(ValueError, match="image has requires_grad"):
        model.backward(x.clone().requires_grad_(), y, criterion)


@pytest.mark.covering(cases=1)
@pytest.mark.parallel([2, 3])
def test_losses_of_all_kinds_in_stages(comm):
    mesh, module = distseg.init_mesh(stages=-1, comm=comm), network(nn.InstanceNorm2d)
    model = distseg.distribute(copy.deepcopy(module), mesh, micro_batches=2)
    x, y = images(0, 1)
    pixels, sums = distseg.PixelLoss(CE), distseg.SumLoss(dice_sums, dice_value)
    for criterion, plain in (
        (pixels, F.cross_entropy),
        (sums, lambda z, t: dice_value(dice_sums(z, t))),
        (pixels - sums / 2, lambda z, t: F.cross_entropy(z, t) - dice_value(dice_sums(z, t)) / 2),
        (pixels, F.cross_entropy),
    ):
        module.zero_grad()
        plain(module(x), y).backward()
        model.zero_grad()
        model.backward(x, y, criterion)
        wanted = {n: p.grad for n, p in module.named_parameters()}
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-11, atol=1e-12)


WRONG = {
    "bands": (lambda x, y: (x[:, :2], y), "2 bands, but the network takes 3"),
    "dims": (lambda x, y: (x[0, 0], y), "has the shape"),
    "targets": (lambda x, y: (x, y[:1]), "2 images, but 1 targets"),
    "size": (lambda x, y: (x, y[..., :-1]), "34x46 pixels, but its target has 34x45"),
    "kind": (lambda x, y: ("image.png", y), "is a str, but an array"),
    "none": (lambda x, y: (x[:0], y[:0]), "the batch has no image: give at least one"),
}


def test_a_network_of_any_number_of_bands_takes_the_number_that_is_given():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3, padding=1, dtype=torch.float64)

        def forward(self, x):
            return self.conv(x.mean(1, keepdim=True))

    module, x = Mean(), torch.rand(1, 5, 8, 8, dtype=torch.float64)
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh(), in_channels=5)
    torch.testing.assert_close(model.predict(x), module(x).detach())


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_images_are_refused(kind):
    change, message = WRONG[kind]
    model = distseg.distribute(network(), distseg.init_mesh())
    with pytest.raises(ValueError, match=message):
        model.backward(*change(*images(0, 1)), distseg.PixelLoss(CE))


def test_state_dicts_are_those_of_the_module():
    module, other = network(), network()
    nn.init.normal_(other.head.weight)
    model = distseg.distribute(module, distseg.init_mesh())
    assert list(model.state_dict()) == list(other.state_dict())
    model.load_state_dict(other.state_dict())
    assert torch.equal(module.head.weight, other.head.weight)
    state = other.state_dict()
    with pytest.raises(ValueError, match="lacks head.bias"):
        model.load_state_dict({n: t for n, t in state.items() if n != "head.bias"})
    with pytest.raises(ValueError, match="but the network has none of this name"):
        model.load_state_dict(state | {"more": torch.ones(1)})
    with pytest.raises(ValueError, match="cannot be moved to another device"):
        model.float()


@pytest.mark.parallel([1, 2])
def test_keys_that_differ_are_those_of_the_module(comm):
    """On every rank: with stages, too, and if only one replica's state dict has the values."""
    given = {
        n: t + 1 for n, t in network().state_dict().items() if n not in ("a.0.bias", "up.bias")
    }
    given = {"more": torch.ones(1)} | given | {"a.more": torch.ones(1)}
    wanted = network().load_state_dict(given, strict=False)
    for axes in [dict(stages=comm.size), dict(tiles=(1, comm.size))]:
        model = distseg.distribute(network(), distseg.init_mesh(comm=comm, **axes))
        mine = given
        if "tiles" in axes and comm.rank:
            mine = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
        assert model.load_state_dict(mine, strict=False) == wanted
        found = model.whole_state_dict()
        assert all(torch.equal(found[n], t) for n, t in given.items() if n in found)
        with pytest.raises(ValueError, match="lacks a.0.bias"):
            model.load_state_dict(given)


class Held(nn.Module):
    """A net with buffers that are not saved, that no layer uses, and of a norm that is frozen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.ones(4, 1, 1), persistent=False)
        self.register_buffer("unused", torch.arange(3))
        self.a, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(self.a(x)) * self.gain


@pytest.mark.parametrize("tiles", [(1, 1), (2, 2)])
def test_state_dicts_have_the_buffers_that_the_module_saves(tiles):
    module = Held().train()
    model = distseg.distribute(module, distseg.init_mesh(), tiles_per_rank=tiles)
    assert list(model.state_dict()) == list(Held().state_dict())
    Held().load_state_dict(model.whole_state_dict())
    model.load_state_dict(Held().state_dict())
    assert "gain" in dict(model.named_buffers())


class LessItsBatch(nn.Module):
    """A net whose result for an image depends on the other images of the batch."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        return y - y.mean(0, keepdim=True)


def test_images_that_influence_each_other_are_predicted_one_by_one_or_refused():
    module = LessItsBatch().double()
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh())
    x, _ = images(0, 1)
    torch.testing.assert_close(model.predict(x[:1]), module(x[:1]).detach())
    with pytest.raises(ValueError, match="influence each other .* give one image at a time"):
        model.predict(x)


@pytest.mark.parametrize("kind", ["forward", "before", "backward", "gradient", "accumulated"])
def test_hooks_of_a_distributed_model_are_refused(kind):
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)).double()
    model = distseg.distribute(module, distseg.init_mesh(), tiles_per_rank=(1, 2))
    x, y = images(0, 1)
    model.backward(x, y, distseg.PixelLoss(CE))
    handle = {
        "forward": lambda: module[0].register_forward_hook(lambda *_: None),
        "before": lambda: module[2].register_forward_pre_hook(lambda *_: None),
        "backward": lambda: module[0].register_full_backward_hook(lambda *_: None),
        "gradient": lambda: module[0].weight.register_hook(lambda g: g),
        "accumulated": lambda: module[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    }[kind]()
    with pytest.raises(ValueError, match="has got a hook since the module was distributed"):
        model.backward(x, y, distseg.PixelLoss(CE))
    handle.remove()
    model.backward(x, y, distseg.PixelLoss(CE))


CHANGES = {  # what changes a user's module after it was distributed
    "bn.momentum": lambda module: setattr(module.bn, "momentum", 0.5),
    "drop.p": lambda module: setattr(module.drop, "p", 0.3),
    "bn.training": lambda module: module.bn.eval(),
    "head.weight": lambda module: setattr(module, "head", nn.Conv2d(4, 2, 1)),
    "bn.running_var": lambda module: setattr(module.bn, "running_var", torch.ones(4)),
    "head.number of hooks": lambda module: module.head.register_forward_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_module_that_have_no_effect_are_refused(name):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.drop, self.head = nn.Dropout(0.0), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.head(self.drop(self.bn(self.conv(x))))

    module = Normed()
    model = distseg.distribute(module, distseg.init_mesh())
    x, y = images(0, 1, classes=2)
    module.eval()(x.float())
    model.backward(x, y, "cross_entropy")
    module.train()
    copied = copy.deepcopy(model)
    CHANGES[name](module)
    for call in (
        lambda: model.backward(x, y, "cross_entropy"),
        lambda: model(model.shard(x)),
        lambda: model.predict(x),
    ):
        with pytest.raises(ValueError, match=f"{name} of your module is .* no effect"):
            call()
    copied.backward(x, y, "cross_entropy")


def test_a_frozen_norm_that_training_would_thaw_is_refused():
    module = network()
    module.a[1].eval()
    with pytest.raises(ValueError, match=r"a.1 \(BatchNorm2d\) was set to evaluation mode"):
        distseg.distribute(module, distseg.init_mesh())
    assert distseg.distribute(network().eval(), distseg.init_mesh())  # all of it: not meant so


def test_norms_without_running_statistics_are_predicted_one_by_one_or_refused():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False)
    ).double()
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh(), tiles_per_rank=(1, 2))
    x, _ = images(0, 1)
    torch.testing.assert_close(model.predict(x[:1]), module.eval()(x[:1]).detach())
    with pytest.raises(ValueError, match="give one image at a time"):
        model.predict(x)


@pytest.mark.parallel([2, 3])
def test_running_statistics_of_all_groups_are_unbiased_once(comm):
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).double()
    for p in module.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    mesh = distseg.init_mesh(samples=comm.size, comm=comm)
    model = distseg.distribute(copy.deepcopy(module), mesh, norm_scope="step")
    x, y = images(0, comm.size, 1, size=(9, 11))
    one = slice(mesh.sample, mesh.sample + 1)
    model.backward(x[one], y[one], distseg.PixelLoss(CE))
    module.train()(x)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(
            model.state_dict()[name], module.state_dict()[name], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parallel(2)
def test_other_images_on_ranks_of_a_group_are_refused(comm):
    mesh = distseg.init_mesh(tiles=(1, 2), comm=comm)
    model = distseg.distribute(network(), mesh)
    x, y = images(0, 1, size=(34, 46 - 12 * comm.rank))
    words = "give different images, 2 of 34x46 pixels and 2 of 34x34 pixels"
    with pytest.raises(ValueError, match=words):
        model.backward(x, y, distseg.PixelLoss(CE))
    with pytest.raises(ValueError, match="ranks call predict with different images"):
        model.predict(x)
    x, y = images(0, 1)
    with pytest.raises(ValueError, match="of the same sizes, but with different pixels"):
        model.predict(x + comm.rank)
    model.backward(x, y, distseg.PixelLoss(CE))


@pytest.mark.parametrize("names", [[], "a", ["a", "a"], [0, "0"]])
def test_wrong_lists_of_outputs_are_refused(names):
    with pytest.raises(ValueError, match="give a list that has the name or number of each output"):
        distseg.distribute(network(), outputs=names)


def test_complex_numbers_are_refused():
    model = distseg.distribute(network())
    x, y = images(0, 1)
    for image, target in ((x + 1j, y), (x.numpy() + 1j, y), (x, y + 1j)):
        with pytest.raises(ValueError, match="complex.*, but real numbers are needed"):
            model.backward(image, target, distseg.PixelLoss(CE))


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1)

    def forward(self, x):
        return F.avg_pool2d(self.used(x), 3, 1, 1)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("axis", ["tiles", "stages"])
def test_unused_parameters_keep_no_gradient(comm, axis):
    """Unused parameters have the grad None, also if a stage has no others: no optimizer moves them."""
    mesh = distseg.init_mesh(comm=comm, **{axis: (1, -1) if axis == "tiles" else comm.size})
    module = HalfUsed().double()
    model = distseg.distribute(module, mesh)
    for _ in range(2):
        model.backward(torch.ones(1, 1, 16, 18), torch.zeros(1, 2, 16, 18).double(), nn.MSELoss())
        found = {name: p.grad is None for name, p in model.named_parameters()}
        assert all(found[name] == name.startswith("unused") for name in found)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("kind", ["frozen", "size"])
def test_other_parameters_on_another_rank_are_named(comm, kind):
    module = network(classes=4 + comm.rank) if kind == "size" else network()
    module.head.weight.requires_grad_(kind == "size" or comm.rank == 0)
    mesh = distseg.init_mesh(tiles=(1, 2), comm=comm)
    words = {
        "frozen": "head.weight is 4x6x1x1, trained on rank 0 and 4x6x1x1, frozen on rank 1",
        "size": "head.weight is 4x6x1x1, trained on rank 0 and 5x6x1x1, trained on rank 1",
    }[kind]
    with pytest.raises(ValueError, match=f"{words}.* Make the same network on all ranks"):
        distseg.distribute(module, mesh)


@pytest.mark.parametrize("make", ["module", "partial"])
def test_class_weights_of_a_loss_of_pytorch_are_taken_over(make):
    weight = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
    function = {
        "module": nn.CrossEntropyLoss(weight, reduction="none", label_smoothing=0.1),
        "partial": partial(F.cross_entropy, weight=weight, reduction="none", label_smoothing=0.1),
    }[make]
    module = network(nn.InstanceNorm2d)
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh(), tiles_per_rank=(1, 2))
    x, y = images(0, 1)
    loss = model.backward(x, y, distseg.PixelLoss(function))
    wanted = F.cross_entropy(module(x), y, weight, label_smoothing=0.1)
    wanted.backward()
    assert abs(float(loss) / float(wanted) - 1) < 1e-12
    for (name, p), q in zip(model.named_parameters(), module.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)


MEANS = {
    "weights": nn.CrossEntropyLoss(
        torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64), ignore_index=3, label_smoothing=0.1
    ),
    "probabilities": nn.CrossEntropyLoss(),
    "each class": nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0, dtype=torch.float64)),
    "numbers": nn.HuberLoss(delta=0.5),
}


@pytest.mark.parametrize("kind", MEANS)
def test_means_of_losses_of_pytorch(kind):
    module = network(nn.InstanceNorm2d)
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh(), tiles_per_rank=(1, 2))
    x, y = images(0, 1)
    y = y.clamp(min=0)
    if kind != "weights":
        y = F.one_hot(y, 4).movedim(-1, 1).double()
    loss = model.backward(x, y, MEANS[kind])
    wanted = MEANS[kind](module(x), y)
    wanted.backward()
    assert abs(float(loss) / float(wanted) - 1) < 1e-12
    for (name, p), q in zip(model.named_parameters(), module.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)


class Changed(nn.CrossEntropyLoss):
    """Loss of the mean, which is no mean of a loss of pixels."""

    def forward(self, output, target):
        return super().forward(output, target).exp()


def test_other_reductions_and_changed_losses_of_pytorch_are_refused():
    model = distseg.distribute(network(), distseg.init_mesh())
    with pytest.raises(ValueError, match="MSELoss with reduction='sum'.*give MSELoss with"):
        model.backward(*images(0, 1), nn.MSELoss(reduction="sum"))
    with pytest.raises(ValueError, match="the criterion is a Changed"):
        model.backward(*images(0, 1), Changed())


def test_losses_of_pytorch_in_float32():
    """Class weights are float32, as the logits are; BCELoss takes probabilities."""
    x, y = (one.float() if one.is_floating_point() else one for one in images(0, 1))
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Sigmoid())
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh(), tiles_per_rank=(1, 2))
    for loss, target in (
        (nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.5, 2.0])), y),
        (nn.BCELoss(), F.one_hot(y.clamp(min=0), 4).movedim(-1, 1).float()),
    ):
        wanted = float(loss(module(x), target).detach())
        assert abs(float(model.backward(x, target, loss)) / wanted - 1) < 1e-5


SUMMED = [
    nn.CrossEntropyLoss() + 0.5 * distseg.SumLoss(dice_sums, dice_value),
    0.5 * distseg.SumLoss(dice_sums, dice_value) + nn.CrossEntropyLoss(),
    distseg.SumLoss(dice_sums, dice_value) / 2 + "cross_entropy",
    "cross_entropy" + distseg.SumLoss(dice_sums, dice_value) * 0.5,
    sum([distseg.PixelLoss(nn.CrossEntropyLoss()), distseg.SumLoss(dice_sums, dice_value) / 2]),
]


def test_losses_of_pytorch_and_names_are_terms_of_sums():
    module, (x, y) = network(nn.InstanceNorm2d), images(0, 1)
    made = module(x)
    wanted = F.cross_entropy(made, y) + 0.5 * dice_value(dice_sums(made, y))
    model = distseg.distribute(module, distseg.init_mesh(), tiles_per_rank=(1, 2))
    for criterion in SUMMED:
        assert float(model.backward(x, y, criterion)) == pytest.approx(wanted.item(), rel=1e-12)
    eager = distseg.distribute(network(nn.InstanceNorm2d), distseg.init_mesh())
    found = SUMMED[0](eager(eager.shard(x)), eager.shard(y))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    with pytest.raises(TypeError):
        distseg.PixelLoss(CE) + 1
    with pytest.raises(ValueError, match="MSELoss with reduction='sum'"):
        model.backward(x, y, 0.5 * distseg.PixelLoss(CE) + nn.MSELoss(reduction="sum"))


def test_settings_of_a_loss_of_pytorch_may_change_between_steps():
    module, (x, y), criterion = network(nn.InstanceNorm2d), images(0, 1), nn.CrossEntropyLoss()
    made, model = module(x).detach(), distseg.distribute(module, distseg.init_mesh())
    for criterion.label_smoothing in (0.3, 0.0):
        wanted = criterion(made, y).item()
        assert float(model.backward(x, y, criterion)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("loss", [nn.HuberLoss(), nn.BCELoss(), nn.CrossEntropyLoss()])
def test_targets_of_another_dtype_than_logits(loss):
    """PyTorch refuses some in the backward pass, and takes class probabilities of any dtype."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Sigmoid())
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh())
    x, y = images(0, 1)
    x, y = x.float(), F.one_hot(y.clamp(min=0), 4).movedim(-1, 1).double()
    try:
        loss(module(x), y).backward()
    except RuntimeError:
        name, words = type(loss).__name__, "give a target of float32, such as target.to"
        with pytest.raises(ValueError, match=f"^{name} fails .* of float32 .* of float64.*{words}"):
            model.backward(x, y, loss)
    else:
        model.backward(x, y, loss)
        for p, q in zip(model.parameters(), module.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def squared_sums(z, t):
    return torch.stack([((z - t) ** 2 * t).sum((1, 2, 3)), t.sum((1, 2, 3))], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "loss, criterion",
    [
        (nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss()),
        (nn.HuberLoss(), nn.HuberLoss()),
        (
            F.binary_cross_entropy_with_logits,
            distseg.PixelLoss(partial(F.binary_cross_entropy_with_logits, reduction="none")),
        ),
        (
            lambda z, t: torch.divide(*squared_sums(z, t).sum(0)),
            distseg.SumLoss(squared_sums, lambda table: torch.divide(*table.sum(0))),
        ),
    ],
)
def test_targets_of_fewer_digits_cost_the_loss_none(dtype, loss, criterion):
    """PyTorch computes some of these losses in the dtype of the target, or refuses it."""
    module, (x, _) = network(nn.InstanceNorm2d), images(0, 1)
    y = torch.rand(2, 4, 34, 46, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = distseg.distribute(copy.deepcopy(module), tiles_per_rank=(1, 2))
    wanted = loss(module(x), y.double())
    wanted.backward()
    found = model.backward(x, y, criterion)
    assert float(found) == pytest.approx(wanted.item(), rel=1e-12)
    largest = max(p.grad.abs().max() for p in module.parameters())
    for p, q in zip(model.parameters(), module.parameters()):
        assert float((p.grad - q.grad).abs().max() / largest) < 1e-12


@pytest.mark.parallel(2)
def test_other_criteria_on_another_rank_are_refused(comm):
    model = distseg.distribute(network(), distseg.init_mesh(tiles=(1, 2), comm=comm))
    x, y = images(0, 1)
    weight = torch.tensor([1.0, 3.0, 0.5, 2.0 + comm.rank], dtype=torch.float64)
    with pytest.raises(ValueError, match="ranks give different criteria"):
        model.backward(x, y, nn.CrossEntropyLoss(weight))
    each = distseg.PixelLoss(partial(F.cross_entropy, weight=weight, reduction="none"))
    with pytest.raises(ValueError, match="ranks give different criteria"):
        each(model(model.shard(x)), model.shard(y))


def test_a_criterion_is_tried_again_with_targets_of_another_dtype():
    model, criterion = distseg.distribute(network(), distseg.init_mesh()), nn.CrossEntropyLoss()
    x, y = images(0, 1)
    model.backward(x, y, criterion)
    with pytest.raises(ValueError, match="a target .* of float32 from -100 to 3"):
        model.backward(x, y.float(), criterion)


def test_a_loss_of_pytorch_gets_no_part_of_a_target():
    model = distseg.distribute(network(), distseg.init_mesh())
    x, y = images(0, 1)
    with pytest.raises(ValueError, match="cross_entropy got this rank's part .* give the outputs"):
        nn.CrossEntropyLoss()(model(model.shard(x)), model.shard(y))


def test_backward_in_evaluation_mode():
    """Batch norms use their running statistics, as fine-tuning with frozen norms wants."""
    module = network()
    module.a[1].running_mean += torch.randn(6, dtype=torch.float64)
    model = distseg.distribute(
        copy.deepcopy(module), distseg.init_mesh(), tiles_per_rank=(1, 2), exchange="1"
    )
    module.eval(), model.eval()
    x, y = images(0, 1)
    model.backward(x, y, distseg.PixelLoss(CE))
    F.cross_entropy(module(x), y).backward()
    for (name, p), q in zip(model.named_parameters(), module.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-13, msg=name)
    assert torch.equal(model.whole_state_dict()["a.1.running_mean"], module.a[1].running_mean)


def test_a_gradient_that_is_asked_for_alone_is_refused():
    model = distseg.distribute(network(nn.InstanceNorm2d), distseg.init_mesh())
    criterion = distseg.PixelLoss(CE)
    x, y = images(0, 1)
    loss = criterion(model(model.shard(x)), model.shard(y))
    with pytest.raises(ValueError, match="has reached no parameter of the model"):
        torch.autograd.grad(loss, list(model.parameters()))
    model.backward(x, y, criterion)
    assert all(p.grad is not None for p in model.parameters())


WRONG_OPTIONS = {
    "schedule": ("gpip", "give one of auto, gpipe, 1f1b, zb-h1"),
    "recompute": ("maybe", "give one of never, except_last, always"),
    "norm_scope": ("all", "give one of group, step"),
    "reducer": ("gloo", "give one of auto, horovod, mpi, torch, nccl"),
    "precision": (torch.bfloat16, "give one of fp32, bf16"),
    "channels_last": ("no", "give True or False"),
    "micro_batches": (2.5, "give a whole number of at least 1"),
    "pad": (0, "give a whole number of at least 1"),
    "image_size": ((64,), "give one number of pixels for each dim"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_options_that_mean_nothing_are_refused(name):
    value, repair = WRONG_OPTIONS[name]
    with pytest.raises(ValueError, match=f"{name} is .*: {repair}"):
        distseg.distribute(network(), distseg.init_mesh(), **{name: value})


def test_a_function_is_no_module():
    with pytest.raises(ValueError, match="got function: give an instance of your module's class"):
        distseg.distribute(lambda x: x, distseg.init_mesh())


def test_a_module_without_values_is_filled_or_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gain = nn.Conv2d(3, 4, 1), nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x):
            return self.conv(x) * self.gain

    mesh = distseg.init_mesh()
    with torch.device("meta"):
        net, scaled = Net(), Scaled()
    filled = distseg.distribute(net, mesh).state_dict()
    assert all(t.isfinite().all() for t in filled.values()) and filled["a.0.weight"].any()
    with pytest.raises(ValueError, match="gain is on the meta device"):
        distseg.distribute(scaled, mesh)


@pytest.mark.parametrize("axes", [dict(samples=0), dict(tiles=(1, 0)), dict(tiles=2)])
def test_wrong_meshes_are_named(axes):
    with pytest.raises(
        ValueError, match="whole numbers of at least 1|a grid with a number for each dim"
    ):
        distseg.init_mesh(**axes)


class SeveralTypes(nn.Module):
    """A net with a convolution in double precision and a scalar that its constructor makes first."""

    def __init__(self, first: bool):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        (self.a if first else self.b).double()
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self.first = first

    def forward(self, x):
        if self.first:
            return self.b(self.a(x.double()).float()) * self.scale
        return self.b((self.a(x) * self.scale).double())


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("exchange", ["all", 1])
def test_layers_of_several_types(comm, first, exchange):
    """One parameter in double precision makes the whole network compute so."""
    torch.manual_seed(0)
    net, image = SeveralTypes(first), torch.randn(1, 3, 21, 33)
    target = torch.randint(0, 2, (1, 21, 33))
    serial = copy.deepcopy(net)
    mesh = distseg.init_mesh(tiles=(1, -1), comm=comm)
    model = distseg.distribute(net, mesh, exchange=exchange)
    model.backward(image, target, distseg.PixelLoss(nn.CrossEntropyLoss(reduction="none")))
    nn.functional.cross_entropy(serial(image), target).backward()
    names = [name for name, _ in serial.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for ours, theirs in zip(model.parameters(), serial.parameters(), strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours.grad, theirs.grad.double(), rtol=1e-5, atol=1e-7)


class Two(nn.Module):
    """Two inputs, two outputs, the second at half the resolution."""

    def __init__(self):
        super().__init__()
        self.rgb, self.depth = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(1, 3, 3, padding=1)
        self.head, self.aux = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, rgb, depth):
        x = torch.relu(torch.cat([self.rgb(rgb), self.depth(depth)], 1))
        return {"out": self.head(x), "aux": self.aux(F.avg_pool2d(x, 2))}


@pytest.mark.parallel([1, 2])
def test_several_inputs_and_outputs(comm):
    torch.manual_seed(0)
    module, mesh = Two().double(), distseg.init_mesh(tiles=(comm.size, 1), comm=comm)
    x, y = images(0, 1, bands=4)
    made = module(x[:, :3], x[:, 3:])
    aux = F.interpolate(made["aux"], size=x.shape[2:], mode="bilinear", align_corners=False)
    (F.cross_entropy(made["out"], y) + 0.4 * F.nll_loss(aux.log_softmax(1), y)).backward()
    wanted = {n: p.grad.clone() for n, p in module.named_parameters()}
    model = distseg.distribute(copy.deepcopy(module), mesh, inputs=[3, 1], outputs=["out", "aux"])
    nll = distseg.PixelLoss(lambda z, t: F.nll_loss(z.log_softmax(1), t, reduction="none"))
    model.zero_grad()
    model.backward((x[:, :3], x[:, 3:]), y, {"out": "cross_entropy", "aux": 0.4 * nll})
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-11, atol=1e-13)
    with pytest.raises(ValueError, match="has the keys out, but"):
        model.backward((x[:, :3], x[:, 3:]), y, {"out": nll})


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.a(x), self.b(x)


@pytest.mark.parallel(1)
def test_outputs_by_number(comm):
    torch.manual_seed(0)
    module, mesh = Pair().double(), distseg.init_mesh(comm=comm)
    with pytest.raises(ValueError, match="returns a tuple of 2 .* the argument outputs"):
        distseg.distribute(copy.deepcopy(module), mesh)
    model = distseg.distribute(copy.deepcopy(module), mesh, outputs=[0, 1])
    x, y = images(0, 1)
    loss = model.backward(x, y, {0: "cross_entropy", 1: 0.4 * distseg.PixelLoss(CE)})
    a, b = module(x)
    wanted = F.cross_entropy(a, y) + 0.4 * F.cross_entropy(b, y)
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parallel([1, 2])
def test_regression_of_maps_and_of_whole_images(comm):
    """Floating-point targets of several channels with gaps, and one number or class an image."""
    mesh = distseg.init_mesh(tiles=(1, comm.size), comm=comm)
    module = network(nn.InstanceNorm2d)
    x, _ = images(0, 1)
    target = torch.randn(2, 4, 34, 46, dtype=torch.float64)
    target[:, 1, 3:9, 5:30] = torch.nan
    target = torch.from_numpy(comm.bcast(target.numpy()))
    mask = ~target.isnan()
    (((module(x) - target.nan_to_num()) ** 2)[mask].mean()).backward()
    wanted = {n: p.grad.clone() for n, p in module.named_parameters()}
    model = distseg.distribute(copy.deepcopy(module), mesh)
    model.zero_grad()
    model.backward(x, target, distseg.PixelLoss(lambda z, t: (z - t) ** 2))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-11, atol=1e-13)
    module = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 4),
    ).double()
    module.load_state_dict(comm.bcast(module.state_dict()))
    classes = torch.tensor([1, 3])
    F.cross_entropy(module(x), classes).backward()
    wanted = {n: p.grad.clone() for n, p in module.named_parameters()}
    model = distseg.distribute(copy.deepcopy(module), mesh)
    model.zero_grad()
    model.backward(x, classes, distseg.PixelLoss(CE))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-11, atol=1e-13)
    assert model.predict(x).shape == (2, 4)


def test_volumes():
    module = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 1)
    ).double()
    x = torch.randn(2, 1, 9, 13, 11, dtype=torch.float64)
    y = torch.randint(2, (2, 9, 13, 11))
    F.cross_entropy(module(x), y).backward()
    wanted = {n: p.grad.clone() for n, p in module.named_parameters()}
    model = distseg.distribute(copy.deepcopy(module), distseg.init_mesh(), tiles_per_rank=(1, 2, 2))
    model.zero_grad()
    model.backward(x, y, distseg.PixelLoss(CE))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("step", [_backward, _eager])
def test_frozen_or_thawed_later_is_refused(comm, step):
    """Before the first step and between steps, by a rank that has the layer and one that has not."""
    if step is _eager and comm.size > 1:
        pytest.skip("the eager form has one stage")
    x, y = images(0, 1)
    for name in ("a.0.weight", "head.weight"):
        module = network()
        module.get_parameter(name).requires_grad_(False)
        model = distseg.distribute(module, distseg.init_mesh(stages=comm.size, comm=comm))
        for changed, context in [(name, nullcontext), (name, model.no_sync), ("a.1.bias", None)]:
            parameter = module.get_parameter(changed)
            parameter.requires_grad_(not (before := parameter.requires_grad))
            with pytest.raises(ValueError, match=f"{changed} has requires_grad .*whole_state_dict"):
                step(model, x, y, distseg.PixelLoss(CE))
            parameter.requires_grad_(before)
            if context:
                with context():
                    step(model, x, y, distseg.PixelLoss(CE))


@pytest.mark.parallel(2)
def test_errors_of_one_rank_are_raised_on_all(comm):
    model = distseg.distribute(network(), distseg.init_mesh(samples=2, comm=comm))
    x, y = images(0, 1)
    with pytest.raises(ValueError, match="rank 1: image 0 has 2 bands"):
        model.backward(x[:, : 3 - comm.rank], y, "cross_entropy")
    with pytest.raises(ValueError, match="give 1 to 2 images in one step"):
        model.backward(x[comm.rank :], y[comm.rank :], "cross_entropy")


class Unreadable:
    """Images of which one rank cannot read its tile, as a damaged file."""

    def __init__(self, images, from_column: int):
        self.images, self.from_column = images, from_column
        self.shape, self.dtype = images.shape, images.numpy().dtype

    def __getitem__(self, where):
        if where[-1].stop > self.from_column:
            raise OSError("cannot read the chunk 7")
        return self.images[where].numpy()


@pytest.mark.parallel(2)
@pytest.mark.parametrize("axis", ["tiles", pytest.param("stages", marks=pytest.mark.slow)])
def test_bad_data_of_one_rank_is_named_on_all(comm, axis):
    """All ranks raise the error before the step, so the next step is that of good data."""
    axes = dict(stages=2, samples=1) if axis == "stages" else dict(tiles=(1, 2))
    module, mesh = network(nn.InstanceNorm2d), distseg.init_mesh(**axes, comm=comm)
    model = distseg.distribute(copy.deepcopy(module), mesh)
    x, y = images(0, 1, 1)
    (bad := y.clone())[..., 40:] = 7
    wanted = F.cross_entropy(module(x), y).item()
    for criterion, words in (
        (
            nn.CrossEntropyLoss(),
            "rank 1: CrossEntropyLoss fails .* values from 0 to 7.* 4 channels",
        ),
        (distseg.SumLoss(dice_sums, dice_value), "rank 1: the function of SumLoss fails"),
        ("cross_entropy", "rank 1: the labels of this rank's tile are from 0 to 7, .* from 0 to 3"),
    ):
        model.backward(x, y, criterion)
        seen = model.images_seen
        with pytest.raises(ValueError, match=words):
            model.backward(x, bad, criterion)
        assert model.images_seen == seen
    if axis == "tiles":
        with pytest.raises(ValueError, match="rank 1: cannot read the chunk 7"):
            model.backward(Unreadable(x, 40), y, "cross_entropy")
        with pytest.raises(ValueError, match="rank 1: CrossEntropyLoss fails"):
            mean = distseg.PixelLoss(nn.CrossEntropyLoss())
            model.backward(x, y, mean)
            mean(model(model.shard(x)), model.shard(bad))
    found = float(model.backward(x, y, nn.CrossEntropyLoss()))
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("axis", ["tiles", pytest.param("stages", marks=pytest.mark.slow)])
def test_bad_labels_of_streamed_tiles_are_named_on_all_ranks(comm, axis):
    """All labels are checked before the step, also those of the last box that is read."""
    axes = dict(stages=2, samples=1) if axis == "stages" else dict(tiles=(1, 2))
    module, mesh = network(nn.InstanceNorm2d), distseg.init_mesh(**axes, comm=comm)
    model = distseg.distribute(copy.deepcopy(module), mesh, streaming="2GB")
    x, y = images(0, 1, 1)
    wanted = F.cross_entropy(module(x), y).item()
    (bad := y.clone())[0, -1, -1] = 7
    for criterion, target, words in (
        (nn.CrossEntropyLoss(), bad, "rank 1: CrossEntropyLoss fails .* values from 0 to 7"),
        ("cross_entropy", bad, "rank 1: the labels of this rank's tile are from 0 to 7"),
        ("cross_entropy", Unreadable(y, 40), "cannot read the chunk 7"),
    ):
        model.backward(x, y, criterion)
        seen = model.images_seen
        with pytest.raises(ValueError, match=words):
            model.backward(x, target, criterion)
        assert model.images_seen == seen
    found = float(model.backward(x, y, nn.CrossEntropyLoss()))
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("ignore", [-100, 255, 1, None])
def test_labels_of_all_valid_pixels_are_checked(ignore):
    criterion = distseg.PixelLoss(CE, ignore_index=ignore)
    target = torch.tensor([[[0, 2, 3, 0 if ignore is None else ignore]]])
    criterion.check(Outputs(4, 2), target)
    criterion.check_values(target)
    criterion.check_values(torch.full((1, 2, 2), 3 if ignore is None else ignore))
    for label in (-1, 4):
        with pytest.raises(ValueError, match="the function of PixelLoss fails with IndexError"):
            criterion.check_values(torch.cat((target, torch.full((1, 1, 4), label)), 1))
    criterion = distseg.PixelLoss(nn.BCELoss())
    target = torch.tensor([[[[0.0, math.nan, 1.0]]]])
    criterion.check(Outputs(1, 2, dtype=torch.float32), target)
    criterion.check_values(target)
    criterion.check_values(target * math.nan)
    with pytest.raises(ValueError, match="BCELoss fails .* values from 0 to 2, .* by NaN"):
        criterion.check_values(2 * target)


@pytest.mark.parallel([1, 2, 4])
def test_the_loop_of_the_readme_is_plain_pytorch(comm, monkeypatch):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    snippet = re.search(r"## Your own loop\s+```python\n(.*?)```", text, re.DOTALL)[1]
    monkeypatch.setattr("distseg.comm.launch.world", lambda: comm)
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 2, 5, padding=2)
    torch.manual_seed(0)
    names = {}
    exec(snippet, names)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
    loss = F.cross_entropy(plain(names["image"]), names["target"])
    loss.backward()
    optimizer.step()
    assert names["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(
        names["logits"], plain(names["image"]).detach(), rtol=1e-4, atol=1e-5
    )


def test_the_loop_of_the_page_runs():
    text = (Path(__file__).parents[1] / "docs/python.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert names["logits"].shape == (1, 2, 301, 437)


CHOICES = {
    "schedule": PipelineConfig,
    "recompute": PipelineConfig,
    "norm_scope": SpatialConfig,
    "reducer": MeshConfig,
    "precision": TrainConfig,
    "device": RunConfig,
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_types_of_options_list_the_values_of_the_settings(name):
    function = distseg.init_mesh if name == "device" else distseg.distribute
    listed = _values(get_type_hints(function)[name])
    wanted = set(get_args(get_type_hints(CHOICES[name])[name]))
    assert listed == (wanted - {"auto"} if name == "precision" else wanted)


def _values(kind) -> set:
    """The values of a Literal, or of the Literals of a union; None counts as none."""
    found = get_args(kind)
    return {v for one in found for v in (get_args(one) if get_args(one) else (one,))} - {type(None)}


def test_integer_labels_of_whole_images_need_a_label_that_does_not_count():
    labels = torch.tensor([1, 2])
    assert labels_of_images(labels, Box((0, 0), (4, 4)), None).flatten().tolist() == [1, 2]
    with pytest.raises(ValueError, match="ignore_index=None"):
        labels_of_images(labels, Box((0, 4), (4, 8)), None)
