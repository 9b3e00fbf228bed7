"""Networks of several outputs in the Python interface: a loss and a target for each, of any number of channels."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distseg


class Tasks(nn.Module):
    """Three classes, one edge at half the resolution, and two numbers."""

    def __init__(self, norm=nn.InstanceNorm2d):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), norm(6)
        self.second = nn.Conv2d(6, 5, 3, padding=1)
        self.classes, self.edge = nn.Conv2d(5, 3, 1), nn.Conv2d(6, 1, 3, padding=1)
        self.flow = nn.Conv2d(5, 2, 3, padding=1)

    def forward(self, x):
        a = F.relu(self.norm(self.first(x)))
        b = F.relu(self.second(a))
        return {
            "edge": self.edge(F.avg_pool2d(a, 2)),
            "classes": self.classes(b),
            "flow": self.flow(b),
        }


NAMES = ["classes", "edge", "flow"]
CHANNELS = [3, 1, 2]


def tasks(norm=nn.InstanceNorm2d) -> Tasks:
    torch.manual_seed(0)
    return Tasks(norm).double()


def batch(groups=1, count=2, size=(34, 46)):
    """Images, and a target of each output: some pixels of each are invalid."""
    g = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    x, flow = draw(groups * count, 3, *size), draw(groups * count, 2, *size)
    classes = torch.randint(3, (groups * count, *size), generator=g).to(torch.uint8)
    edge = torch.randint(2, (groups * count, 1, *size), generator=g).float()
    classes[:, 2:7, 3:30] = 255
    edge[:, :, 5:9, 20:] = torch.nan
    flow[:, 1, 4:20, 11:17] = torch.nan
    return x, {"classes": classes, "edge": edge, "flow": flow}


CRITERION = {
    "classes": nn.CrossEntropyLoss(ignore_index=255),
    "edge": 0.4
    * distseg.PixelLoss(
        lambda z, t: F.binary_cross_entropy_with_logits(z, t.to(z), reduction="none")
    ),
    "flow": distseg.PixelLoss(lambda z, t: (z - t) ** 2),
}


def plain_loss(made, y):
    """Return the loss of all outputs in plain PyTorch."""
    size = y["classes"].shape[1:]
    edge = F.interpolate(made["edge"], size=size, mode="bilinear", align_corners=False)
    there, known = ~y["edge"].isnan(), ~y["flow"].isnan()
    return (
        F.cross_entropy(made["classes"], y["classes"].long(), ignore_index=255)
        + 0.4 * F.binary_cross_entropy_with_logits(edge[there], y["edge"][there].to(edge))
        + F.mse_loss(made["flow"][known], y["flow"][known])
    )


def errors(model, loss, module, wanted) -> list[float]:
    """Return the relative errors of the loss and of the gradients of this rank's parameters."""
    plain = dict(module.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in plain.values())
    found = [(p.grad - plain[n].grad).abs().max() / largest for n, p in model.named_parameters()]
    return [abs(float(loss / wanted.detach()) - 1), *map(float, found)]


WAYS = {  # name: (ranks, mesh, options)
    "tiles": (1, {}, dict(tiles_per_rank=(2, 2))),
    "exchange": (1, {}, dict(tiles_per_rank=(1, 2), exchange=1)),
    "streaming": (1, {}, dict(streaming="2GB", micro_batches=2)),
    "samples": (2, dict(samples=2), {}),
    "tiles on ranks": (2, dict(tiles=(1, 2)), dict(exchange="level")),
    "stages": (2, dict(stages=2), dict(micro_batches=2)),
    "streamed stages": (2, dict(stages=2), dict(streaming="2GB")),
    "tiles and stages": (4, dict(tiles=(2, 1), stages=2), dict(micro_batches=2)),
}
QUICK = "tiles", "stages"


def ways(ranks: int):
    """Return the ways of a number of ranks as parameters of a test; most are slow."""
    return [
        pytest.param(way, marks=[] if way in QUICK else pytest.mark.slow)
        for way, (needed, *_) in WAYS.items()
        if needed == ranks
    ]


def check_training(comm, way) -> None:
    """Compare loss, gradients and predictions of all outputs with those of plain PyTorch."""
    _, axes, options = WAYS[way]
    mesh, module = distseg.init_mesh(**{"samples": 1, **axes}, comm=comm), tasks()
    x, y = batch(mesh.shape.samples)
    wanted = plain_loss(module(x), y)
    wanted.backward()
    mine = slice(2 * mesh.sample, 2 * mesh.sample + 2)
    model = distseg.distribute(tasks(), mesh, outputs=NAMES, **options)
    loss = model.backward(x[mine], {name: t[mine] for name, t in y.items()}, CRITERION)
    assert max(errors(model, loss, module, wanted)) < 1e-12
    made, found = module.eval()(x[:1]), model.predict(x[:1], ["flow", "edge"])
    assert list(found) == ["flow", "edge"]
    edge = F.interpolate(made["edge"], size=x.shape[2:], mode="bilinear", align_corners=False)
    torch.testing.assert_close(found["flow"], made["flow"].detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found["edge"], edge.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        model.predict(x[:1]), made["classes"].detach(), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parallel(1)
@pytest.mark.parametrize("way", ways(1))
def test_outputs_of_several_numbers_of_channels(comm, way):
    check_training(comm, way)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("way", ways(2))
def test_outputs_on_two_ranks(comm, way):
    check_training(comm, way)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("way", ways(4))
def test_outputs_on_four_ranks(comm, way):
    check_training(comm, way)


class Answers(nn.Module):
    """Vectors of an image in training, and the first of them alone in evaluation."""

    def __init__(self):
        super().__init__()
        self.first, self.kind, self.age = nn.Conv2d(3, 5, 3), nn.Linear(5, 4), nn.Linear(5, 1)

    def forward(self, x):
        a = F.relu(self.first(x)).mean((2, 3))
        return (self.age(a), self.kind(a)) if self.training else self.kind(a)


def test_vectors_of_several_lengths():
    """Each target has its own label of images that do not count; one output is not predicted."""
    torch.manual_seed(0)
    module, x = Answers().double(), batch()[0]
    ages, kinds = torch.tensor([0.5, torch.nan], dtype=torch.float64), torch.tensor([2, 7])
    age, kind = module(x)
    wanted = F.mse_loss(age[0, 0], ages[0]) + F.cross_entropy(kind, kinds, ignore_index=7)
    wanted.backward()
    torch.manual_seed(0)
    mesh = distseg.init_mesh()
    model = distseg.distribute(Answers().double(), mesh, outputs=[1, 0], tiles_per_rank=(2, 1))
    each = {0: lambda z, t: (z[:, 0] - t) ** 2, 1: nn.CrossEntropyLoss(ignore_index=7)}
    each[0] = distseg.PixelLoss(each[0])
    loss = model.backward(x, {0: ages, 1: kinds}, each)
    assert max(errors(model, loss, module, wanted)) < 1e-12
    torch.testing.assert_close(model.predict(x), module.eval()(x), rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="output 0, but in evaluation mode .* returns 1 only"):
        model.predict(x, [0])
    with pytest.raises(ValueError, match="tensor with 4 channels, but its output 0, .* has 1 in"):
        distseg.distribute(Answers(), outputs=[0, 1])  # evaluation returns output 1


class Doubled(nn.Module):
    """Outputs of one, two and two channels."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(3, n, 1) for n in (1, 2, 2))

    def forward(self, x):
        return [head(x) for head in self.heads]


@pytest.mark.parametrize("form", ["backward", "eager"])
def test_outputs_and_models_share_a_criterion(form):
    """A mean over channels counts the channels of its own output, in whatever order of calls."""
    torch.manual_seed(0)
    module, (x, y) = Doubled().double(), batch()
    flow = torch.cat([y["flow"]] * 3, 1).nan_to_num()
    targets = {0: flow[:, :1], 1: flow[:, 1:3].float(), 2: flow[:, 2:4]}
    mean = distseg.PixelLoss(lambda z, t: (z - t) ** 2)
    wanted = sum(F.mse_loss(z, t.double()) for z, t in zip(module(x), targets.values()))
    single = distseg.distribute(module.heads[0], distseg.init_mesh())
    model = distseg.distribute(module, distseg.init_mesh(), outputs=[0, 1, 2])
    for _ in range(2):
        found = (
            model.backward(x, targets, mean)
            if form == "backward"
            else mean(model(model.shard(x)), model.shard(targets))
        )
        assert abs(float((found / wanted).detach()) - 1) < 1e-12
        single.backward(x, targets[0], mean)


def test_targets_that_fit_no_output_are_named():
    model, (x, y) = distseg.distribute(Doubled(), outputs=[0, 1]), batch()
    x, mean = x.float(), distseg.PixelLoss(lambda z, t: z - t)
    with pytest.raises(ValueError, match="target has the keys edge, but .* outputs .* is 0, 1"):
        model.backward(x, {"edge": y["edge"]}, mean)
    with pytest.raises(ValueError, match=r"keys 0, but .* is None: .* a single target"):
        distseg.distribute(nn.Conv2d(3, 1, 1)).backward(x, {0: y["edge"]}, mean)
    mixed = {0: list(y["flow"][:, :1]), 1: [y["flow"][0].float(), y["flow"][1]]}
    with pytest.raises(ValueError, match="float64 with 2 channels in some images, but float32"):
        model.backward(list(x), mixed, mean)
    with pytest.raises(ValueError, match="asked for the output 2, but .* is 0, 1"):
        model.predict(x, [2])


def test_results_have_the_keys_that_were_given():
    """Numbers and names may be mixed; a key of the result is what the user wrote, not its text."""
    module, x = Doubled().double(), batch()[0]
    wanted = module(x)
    model = distseg.distribute(module, distseg.init_mesh(), outputs=[2, 0])
    found = model.predict(x, [0, 2])
    assert list(found) == [0, 2]
    torch.testing.assert_close(found[0], wanted[0].detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found[2], wanted[2].detach(), rtol=1e-11, atol=1e-12)
    assert list(model.predict(x, ("0",))) == ["0"]
    assert list(model(model.shard(x))) == [2, 0]
    numbered = distseg.distribute(Numbered().double(), outputs=[7, 3])
    assert list(numbered.predict(x, [3])) == [3]


class Numbered(Doubled):
    """A dict whose keys are numbers."""

    def forward(self, x):
        return {3: self.heads[0](x), 7: self.heads[1](x)}


@pytest.mark.parametrize(
    "asked, message",
    [
        ([5], "asked for the output 5, but .* is 0, 2"),
        (["edge"], "asked for the output edge, but .* is 0, 2"),
        (0, "outputs is 0: give a list"),
        ((), r"outputs is \(\): give a list"),
        ([], r"outputs is \[\]: give a list"),
        ("0", "outputs is '0': give a list"),
        ([0, "0"], "outputs is .0, '0'., which names 0 twice"),
    ],
)
def test_outputs_that_predict_cannot_return_are_named(asked, message):
    model = distseg.distribute(Doubled(), outputs=[0, 2])
    with pytest.raises(ValueError, match=message):
        model.predict(batch()[0].float(), asked)


def test_an_output_that_is_named_twice_is_refused():
    model, (x, y) = distseg.distribute(Doubled(), outputs=[0, 2]), batch()
    mean = distseg.PixelLoss(lambda z, t: z - t)
    twice = {0: y["edge"], "0": y["edge"], 2: y["flow"]}
    with pytest.raises(ValueError, match="the target has 0 twice, as number and as text"):
        model.backward(x.float(), twice, mean)
    with pytest.raises(ValueError, match="the criterion has 0 twice, as number and as text"):
        model.backward(x.float(), y["edge"], dict.fromkeys([0, "0", 2], mean))
    with pytest.raises(ValueError, match="outputs is 0: give a list"):
        distseg.distribute(Doubled(), outputs=0)


EAGER = {1: [{}], 2: [dict(tiles=(1, 2)), dict(samples=2)], 4: [dict(samples=2, tiles=(2, 1))]}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("form", ["each", "one call"])
def test_outputs_of_the_eager_form(comm, number, form):
    """The form is a dict of outputs: a criterion takes one of them, or all with all targets."""
    if number >= len(EAGER[comm.size]):
        pytest.skip("fewer meshes of this many ranks")
    mesh = distseg.init_mesh(**{"samples": 1, **EAGER[comm.size][number]}, comm=comm)
    module, (x, y) = tasks(), batch(mesh.shape.samples)
    made = module(x)
    wanted = plain_loss(made, y) if form != "one call" else squares(made, y)
    wanted.backward()
    mine = slice(2 * mesh.sample, 2 * mesh.sample + 2)
    targets = {name: t[mine] for name, t in y.items()}
    model = distseg.distribute(tasks(), mesh, outputs=NAMES)
    for _ in range(2):  # what the first step finds out must hold in the second
        out = model(model.shard(x[mine]))
        assert [(name, z.shape[1]) for name, z in out.items()] == list(zip(NAMES, CHANNELS))
        if form == "one call":
            targets["classes"] = targets["classes"].double()
            loss = distseg.PixelLoss(square)(out, model.shard(targets))
        else:
            shards = {n: model.shard(targets[n]) for n in NAMES}
            shards["edge"] = model.shard(targets)  # the criterion takes the target of its output
            criterion = {**CRITERION, "classes": distseg.PixelLoss(CRITERION["classes"])}
            loss = sum(criterion[name](out[name], shards[name]) for name in NAMES)
        for p in model.parameters():
            p.grad = None
        loss.backward()
        assert max(errors(model, loss.detach(), module, wanted)) < 1e-12


def square(z, t):
    return ((z - (t if t.dim() == z.dim() else t[:, None])) ** 2).mean(1)


def squares(made, y):
    """Return the sum of the means of :func:`square` in plain PyTorch; NaN is no target."""
    size, total = y["classes"].shape[1:], 0.0
    for name in NAMES:
        z = F.interpolate(made[name], size=size, mode="bilinear", align_corners=False)
        each = square(z, y[name].double())
        total = total + each[~each.isnan()].mean()
    return total


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("pad", [None, 2])
def test_an_output_without_a_loss_gives_its_weights_no_gradient(comm, pad):
    """Keep None for its weights, as in plain PyTorch, so that weight decay leaves them alone."""
    module, (x, y) = tasks(), batch()
    ends = module(x)
    F.cross_entropy(ends["classes"], y["classes"].long(), ignore_index=255).backward()
    mesh = distseg.init_mesh(samples=1, tiles=(1, comm.size), comm=comm)
    model = distseg.distribute(tasks(), mesh, outputs=NAMES, pad=pad)
    criterion, flow = distseg.PixelLoss(CRITERION["classes"]), CRITERION["flow"]
    for _ in range(2):
        out = model(model.shard(x))
        loss = criterion(out["classes"], model.shard(y["classes"]))
        flow(out["flow"], model.shard(y["flow"]))  # only looked at
        for p in model.parameters():
            p.grad = None
        loss.backward()
        wanted = {n: p.grad for n, p in module.named_parameters()}
        for name, p in model.named_parameters():
            assert (p.grad is None) == (wanted[name] is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, wanted[name], rtol=1e-11, atol=1e-14)
    out = model(model.shard(x))
    with pytest.raises(ValueError, match="has terms of the model's output"):
        (flow(out["flow"], model.shard(y["flow"])) + out["edge"].mean()).backward()


def test_wrong_uses_of_outputs_of_the_eager_form_are_named():
    module, (x, y) = tasks(), batch()
    model = distseg.distribute(module, outputs=NAMES)
    out, flow = model(model.shard(x)), CRITERION["flow"]
    with pytest.raises(ValueError, match="unchanged output of the last"):
        flow({"flow": out["flow"]}, model.shard(y))
    with pytest.raises(ValueError, match="keys edge, .* lack flow"):
        flow(out["flow"], model.shard({"edge": y["edge"]}))
    with pytest.raises(ValueError, match="is a dict of classes, edge, flow"):
        flow(torch.cat([*out.values()], 1), model.shard(y))


class Mixed(Doubled):
    """A map and a vector."""

    def forward(self, x):
        return self.heads[1](x), self.heads[0](x).mean((2, 3))


def test_outputs_that_cannot_be_joined_are_named():
    module = Doubled()
    distseg.distribute(module, outputs=[0, 1])
    for other in ([1], None):
        with pytest.raises(
            ValueError, match="adapted to inputs None and outputs .'0', '1'. before"
        ):
            distseg.distribute(module, outputs=other)
    with pytest.raises(ValueError, match="shape 1, but 0 has .*: name only maps, or only vectors"):
        distseg.distribute(Mixed(), outputs=[0, 1])
