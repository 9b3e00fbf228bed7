"""PatchGD as published: the paper's configuration against a plain program of its own, and heads by name."""

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_images import done, write_store
from torch import nn

from distseg.cli.parsing import command_parser, config_from, parse
from distseg.comm.alone import Alone
from distseg.comm.mesh import Mesh
from distseg.config.patchgd import PatchConfig
from distseg.config.sizes import Size
from distseg.data.store.store import Store, StoreWriter
from distseg.models.network import user_names
from distseg.runtime.optimizer import learning_rate
from distseg.tiling import rng
from distseg.tiling.tile import Box
from distseg.training.patchgd.engine import PatchEngine, PatchLoader
from distseg.training.patchgd.heads import AttentionHead, GridHead, make_head
from distseg.training.patchgd.zoo import with_grid
from distseg.training.run_config import load, network_of

TOLERANCE, SIZE, EPOCHS = 1e-12, (64, 64), 2


@pytest.fixture
def place(comm, shared_path) -> Path:
    if comm.rank == 0:
        write_store(shared_path / "s.h5", count=12, size=SIZE)
    comm.Barrier()
    return Path(shared_path)


def backbone(in_channels, out_channels):
    """A small plain network whose batch norms have running statistics."""
    layers = [
        nn.Conv2d(in_channels, 4, 3, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, out_channels))


def published(place, ranks, **patchgd) -> PatchConfig:
    """The config that comes along, for small images and this file's backbone."""
    found = config_from(
        parse(command_parser("patchgd", PatchConfig), ["jobs/patchgd.yaml"]), PatchConfig
    )
    return replace(
        found,
        model=replace(
            found.model, name="test_patch_heads:backbone", base_channels=None, depth=None, norm=None
        ),
        mesh=replace(found.mesh, tiles=Size((1, ranks))),
        data=replace(found.data, store=str(place / "s.h5"), images=4),
        train=replace(
            found.train, precision="fp64", loggers=[], epochs=EPOCHS, output=str(place / "run")
        ),
        optim=replace(found.optim, warmup=0.5),
        patchgd=replace(found.patchgd, **{"patch": Size("16x16"), "head_channels": 16, **patchgd}),
    )


def gridded(plan: PatchConfig) -> PatchConfig:
    """Return the config with the grid of this file's images, as a run has it."""
    return replace(plan, patchgd=with_grid(plan.patchgd, SIZE))


class Masked(nn.Module):
    """Dropout of channels by a mask that is a function of what it is for."""

    def __init__(self, p, name):
        super().__init__()
        self.p, self.name, self.keys = p, name, []

    def forward(self, x):
        masks = [
            rng.uniform(rng.key(*key, self.name, "dropout"), x.shape[1]) >= self.p
            for key in self.keys
        ]
        return x * torch.from_numpy(np.stack(masks) / (1 - self.p))[:, :, None, None]


class PlainHead(nn.Module):
    """Four convolutions of the paper on a grid of 4x4, one number a class."""

    def __init__(self, features, channels, outputs):
        super().__init__()
        for number, stride in enumerate((1, 2, 2, 2)):
            self.add_module(
                f"conv{number}",
                nn.Conv2d(features if number == 0 else channels, channels, 3, stride, 1),
            )
            self.add_module(f"norm{number}", nn.BatchNorm2d(channels))
            self.add_module(f"drop{number}", Masked(0.2, f"layers.{4 * number + 3}"))
        self.last = nn.Linear(channels, outputs)

    def forward(self, z):
        for number in range(4):
            conv, norm, drop = (
                getattr(self, f"{kind}{number}") for kind in ("conv", "norm", "drop")
            )
            z = drop(norm(F.relu(conv(z))))
        return self.last(z.flatten(1))


class PlainProgram:
    """The authors' loop for images (B, C, 64, 64) of 4x4 patches, 2 of each image at a time: no patch is drawn twice, all batch norms of PyTorch's in training mode."""

    def __init__(self, plan, bands, outputs):
        self.theta_1, self.theta_2 = (
            backbone(bands, 256).double(),
            PlainHead(256, plan.patchgd.head_channels, outputs).double(),
        )
        self.optimizer = torch.optim.Adam(
            [*self.theta_1.parameters(), *self.theta_2.parameters()], betas=(0.9, 0.999), eps=1e-8
        )
        self.seed = plan.train.seed

    @property
    def tensors(self):
        """Weights and running statistics."""
        return [
            t
            for part in (self.theta_1, self.theta_2)
            for t in (*part.parameters(), *part.buffers())
            if t.is_floating_point()
        ]

    def drawn(self, epoch, images, what, j):
        return [
            (i, p)
            for i, image in enumerate(images)
            for p in sorted(
                rng.permutation(rng.key(self.seed, epoch, image, what, 0), 16)[
                    2 * j : 2 * j + 2
                ].tolist()
            )
        ]

    def features(self, x, pairs):
        return self.theta_1(
            torch.stack(
                [
                    x[i, :, 16 * (p // 4) : 16 * (p // 4) + 16, 16 * (p % 4) : 16 * (p % 4) + 16]
                    for i, p in pairs
                ]
            )
        )

    def step(self, x, labels, images, epoch, rate):
        z, losses = torch.zeros(len(x), 256, 4, 4, dtype=torch.float64), []

        def at(pairs):
            return (
                [i for i, _ in pairs],
                slice(None),
                [p // 4 for _, p in pairs],
                [p % 4 for _, p in pairs],
            )  # noqa: E731

        with torch.no_grad():
            for j in range(8):
                pairs = self.drawn(epoch, images, "fill", j)
                z[at(pairs)] = self.features(x, pairs)
        self.optimizer.zero_grad()
        for j in range(8):
            pairs = self.drawn(epoch, images, "patches", j)
            z = z.detach().clone()
            z[at(pairs)] = self.features(x, pairs)
            for layer in self.theta_2.modules():
                layer.keys = [(self.seed, rng.key(epoch, "head", j), image) for image in images]
            loss = F.cross_entropy(self.theta_2(z), labels)
            (loss / 8).backward()
            losses.append(loss.item())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return np.mean(losses)


@torch.no_grad()
def spread(network, x):
    """Let patches differ, and about half of the numbers before each rectifier be negative: a channel that is positive at all places has no gradient of its bias but rounding, which Adam divides by itself."""
    network.backbone.get_submodule("8").weight.mul_(400)
    z = network.block(
        torch.stack(
            [network.backbone(x[(..., *box.slices)]).flatten(1) for box in network.patches(SIZE)], 1
        ),
        SIZE,
    )
    for layer in network.head.layers:
        if isinstance(layer, nn.Conv2d):
            layer.bias -= layer(z).mean((0, 2, 3))
        z = z if isinstance(layer, nn.Dropout2d) else layer(z)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()


def pixels(store, names):
    return torch.stack(
        [torch.from_numpy(store.read_normalised(name, Box.whole(SIZE))).double() for name in names]
    )


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(cases=1)
def test_the_published_training_is_a_plain_programs(comm, place):
    """The paper's head, 256 features, an eighth of the patches in each of 8 inner iterations, statistics with each pass, Adam, warm-up and decay.

    Losses, weights and running statistics after each of four steps, each of which begins with the same numbers: Adam makes of rounding ten times as much with each step.
    """
    store = Store(place / "s.h5")
    plan, outputs = gridded(published(place, comm.size)), len(store.classes)
    network = network_of(plan.model, plan.patchgd, store.bands, outputs).double()
    spread(network, pixels(store, store.split("train")))
    mesh = Mesh(comm, 1, plan.mesh.tiles)
    engine, loader, plain = (
        PatchEngine(plan, mesh, network, precision="fp64"),
        PatchLoader(store, plan.data, plan.train.seed, mesh),
        PlainProgram(plan, store.bands, outputs),
    )
    own = [
        t
        for part in (network.backbone, network.head)
        for t in (*part.parameters(), *part.buffers())
        if t.is_floating_point()
    ]
    total = EPOCHS * loader.steps_per_epoch
    assert total == 4 and len(own) == len(plain.tensors)
    for epoch, number in product(range(EPOCHS), range(2)):
        engine.context.epoch, done_before = epoch, 2 * epoch + number
        images = list(loader.epoch(epoch))[number].samples
        for mine, theirs in zip(plain.tensors, own):
            mine.data.copy_(theirs.data)
        if done_before:
            plain.optimizer.load_state_dict(
                copy.deepcopy(engine.optimizer.state_dict())
                | {"param_groups": plain.optimizer.state_dict()["param_groups"]}
            )
        loss, _ = engine.step(
            list(loader.epoch(epoch))[number], learning_rate(plan.optim, done_before, total)
        )
        rate = 1e-3 * (
            (done_before + 1) / 2
            if done_before < 2
            else (2 * total - done_before) / (2 * total - 2)
        )  # two steps of rise
        labels = torch.tensor([store.label(s.image) for s in images])
        wanted = plain.step(
            pixels(store, [s.image for s in images]),
            labels,
            [s.number for s in images],
            epoch,
            rate,
        )
        assert abs(loss - wanted) <= TOLERANCE * wanted
        for mine, theirs in zip(plain.tensors, own):
            assert (mine - theirs).norm() <= TOLERANCE * mine.norm(), tuple(mine.shape)


def own_head(features, num_classes):
    """A head for any grid, with norms and both kinds of dropout, whose forward cannot be followed."""
    return Own(features, num_classes)


def fixed_head(in_channels, outputs, grid):
    """A head for one grid."""
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(in_channels * grid[0] * grid[1], outputs)
    )


class Own(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.conv, self.norm, self.first, self.second = (
            nn.Conv2d(features, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Dropout2d(0.2),
            nn.Dropout(0.3),
        )
        self.last = nn.Linear(8, outputs)

    def forward(self, z):
        y = self.second(self.first(torch.relu(self.norm(self.conv(z)))))
        return self.last(torch.linalg.vector_norm(y.flatten(2).softmax(2), dim=2))


class Drawing(Own):
    def forward(self, z):
        return super().forward(z + torch.rand(z.shape))


@pytest.mark.parallel([2, 4])
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize(
    "head", ["attention", "test_patch_heads:own_head", "test_patch_heads:fixed_head"]
)
def test_heads_do_not_depend_on_the_ranks(comm, place, head):
    """Two sample groups, each of one or two ranks, and one rank alone: the same masks, statistics of all images, and weights."""

    found = []
    for ranks, samples in ((comm, 2), (Alone(), 1)):
        plan = gridded(
            published(
                place,
                ranks.size // samples,
                head=head,
                features=12,
                head_channels=None if ":" in head else 8,
            )
        )
        plan = replace(
            plan,
            mesh=replace(plan.mesh, samples=samples),
            data=replace(plan.data, images=4 // samples),
            patchgd=replace(plan.patchgd, norm_scope="step"),
        )
        plan = replace(plan, optim=replace(plan.optim, name="sgd"))
        store, mesh = Store(place / "s.h5"), Mesh(ranks, samples, plan.mesh.tiles)
        engine = PatchEngine(
            plan,
            mesh,
            network_of(plan.model, plan.patchgd, store.bands, len(store.classes)),
            precision="fp64",
        )
        losses = [
            engine.step(images, 0.01)[0]
            for images in PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0)
        ]
        found.append(
            (
                losses,
                {
                    name: t
                    for name, t in engine.network.state_dict().items()
                    if t.is_floating_point()
                },
            )
        )
    (losses, tensors), (alone, wanted) = found
    assert losses == pytest.approx(alone, rel=TOLERANCE)
    for name, w in wanted.items():
        assert (tensors[name] - w).norm() <= 10 * TOLERANCE * max(w.norm(), 1e-3), name


def test_attention_is_pytorchs():
    """One encoder layer, norms first, of a token for the image and one for each patch."""
    torch.manual_seed(0)
    head = AttentionHead(10, 12, 3).double().eval()
    layer = (
        nn.TransformerEncoderLayer(12, 2, 36, activation="gelu", norm_first=True, batch_first=True)
        .double()
        .eval()
    )
    attention = layer.self_attn
    attention.in_proj_weight.data, attention.in_proj_bias.data = (
        head.project.weight.data,
        torch.zeros(36, dtype=torch.float64),
    )
    for theirs, own in (
        (attention.out_proj, head.joined),
        (layer.linear1, head.wider),
        (layer.linear2, head.narrower),
        (layer.norm1, head.before),
        (layer.norm2, head.between),
    ):
        theirs.load_state_dict(own.state_dict())
    z = torch.randn(2, 10, 3, 5, dtype=torch.float64)
    angles = torch.arange(16, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(6, dtype=torch.float64) / 6
    )
    tokens = torch.cat((head.image.expand(2, 1, 12), head.embed(z.flatten(2).mT)), 1) + torch.cat(
        (angles.sin(), angles.cos()), 1
    )
    wanted = head.last(head.behind(layer(tokens)[:, 0]))
    assert (head(z) - wanted).abs().max() < 1e-13


def test_convolutions_of_the_published_sizes():
    """256 wide, of 16x16 patches: 3 or 4 of them, then 2x2 cells; what the grid leaves over is rounded up."""
    for name, convolutions in (("conv3", 3), ("conv4", 4)):
        head = make_head(name, 256, None, 10, (16, 16))
        assert (
            sum(isinstance(m, nn.Conv2d) and m.out_channels == 256 for m in head.modules())
            == convolutions
        )
        assert (
            head.last.in_features == 4 * 256
            and sum(m.p == 0.2 for m in head.modules() if isinstance(m, nn.Dropout2d))
            == convolutions
        )
    assert GridHead(4, 8, 3, (9,)).eval()(torch.randn(2, 4, 9)).shape == (2, 3)
    assert make_head("attention", 192, None, 10, (16, 16)).project.in_features == 192


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "head", ["conv3", "test_patch_heads:own_head", "test_patch_heads:fixed_head"]
)
def test_the_command_line_trains_evaluates_and_predicts(tmp_path, refused, monkeypatch, head):
    """A head that is a function is named again, and given to ``load``; that of one grid refuses others."""
    write_store(tmp_path / "s.h5", size=SIZE)
    run, again = str(tmp_path / "run"), ["--patchgd.head", head] if ":" in head else []
    flags = {
        "data.store": str(tmp_path / "s.h5"),
        "data.images": "2",
        "train.output": run,
        "train.epochs": "1",
        "train.precision": "fp32",
        "patchgd.patch": "16x16",
    }
    flags |= {
        "model.name": "distseg.models.classifier:residual",
        "model.depth": "2",
        "model.base_channels": "4",
        "patchgd.features": "8",
        "patchgd.sampled": "0.5",
        "patchgd.head": head,
    }
    done(["patchgd", *(word for name, value in flags.items() for word in (f"--{name}", value))])
    if again:
        done(["evaluate", run])  # a run of one's own
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        assert f"was trained with the head {head}: its manifest may come from anywhere" in refused(
            "evaluate", run
        )
        with pytest.raises(
            ValueError,
            match=f"was trained with the head {head}, .*: build the head and pass it to distseg.load as head",
        ):
            load(run)
    done(["evaluate", run, *again])
    done(["predict", run, "--output", str(tmp_path / "out"), "--predict.heat", "true", *again])
    name, *_, bright = (tmp_path / "out" / "images.csv").read_text().splitlines()[1].split(",")
    made = {
        "conv3": None,
        "test_patch_heads:own_head": own_head(8, 2),
        "test_patch_heads:fixed_head": fixed_head(8, 2, (4, 4)),
    }[head]
    module, x = (
        load(run, head=made, normalise=False),
        torch.from_numpy(Store(tmp_path / "s.h5").read_normalised(name, Box.whole(SIZE)))[None],
    )
    assert abs(float(bright) - float(module(x).softmax(1)[0, 1].detach())) < 1e-4
    write_store(tmp_path / "other.h5", size=(64, 96))
    if not head.endswith("own_head"):
        assert "has a grid of 4x6 patches, but this patchgd.head is made for 4x4" in refused(
            "evaluate", run, *again, "--data.store", str(tmp_path / "other.h5")
        )


@pytest.mark.parametrize(
    "head, more, why",
    [
        ("conv5", [], "package.module:function. Did you mean conv4? (DS123)"),
        (
            "attention",
            ["--patchgd.head_channels", "10"],
            "patchgd.head_channels is 10, but attention of 2 heads needs a multiple of 4",
        ),
        (
            "conv4",
            ["--patchgd.grid", "3x3"],
            "an image of 64x64 pixels has a grid of 4x4 patches, but this patchgd.head is made for 3x3 (patchgd.grid)",
        ),
        (
            "conv4",
            ["--data.images", "1"],
            "patchgd.head conv4 does not take a grid of 4x4 patches of 8 features: ValueError: Expected more than 1 value per channel",
        ),
        (
            "test_patch_heads:Drawing",
            [],
            "patchgd.head test_patch_heads:Drawing draws random numbers, which differ between ranks: use nn.Dropout",
        ),
        (
            "test_patch_heads:GridHead",
            [],
            "patchgd.head 'test_patch_heads:GridHead' cannot be built: TypeError",
        ),
        (
            "test_patch_heads:published",
            [],
            "patchgd.head 'test_patch_heads:published' takes (place, ranks, patchgd), but is called with the number of features",
        ),
        (
            "test_patch_heads:nothing",
            [],
            "patchgd.head 'test_patch_heads:nothing' cannot be imported: there is no nothing in",
        ),
        (
            "test_patch_heads:AttentionHead",
            [],
            "patchgd.head 'test_patch_heads:AttentionHead' cannot be built: TypeError",
        ),
        (
            "test_patch_heads:mapped",
            [],
            "patchgd.head test_patch_heads:mapped returns (2, 2, 4, 4) for Z of shape",
        ),
    ],
)
def test_heads_that_can_not_be_are_refused(tmp_path, refused, head, more, why):
    write_store(tmp_path / "s.h5", size=SIZE)
    flags = [
        "--data.store",
        str(tmp_path / "s.h5"),
        "--train.output",
        str(tmp_path / "run"),
        "--patchgd.patch",
        "16x16",
        "--patchgd.features",
        "8",
    ]
    flags += [
        "--model.name",
        "distseg.models.classifier:residual",
        "--model.depth",
        "2",
        "--model.base_channels",
        "4",
        "--data.images",
        "2",
        "--patchgd.head",
        head,
        *more,
    ]
    assert why in refused("patchgd", *flags)


def mapped(features, outputs):
    return nn.Conv2d(features, outputs, 1)


def several_grids(path):
    """A store of two images, with grids of 4x4 and 2x4 patches of 16x16."""
    with StoreWriter(path, ["dark", "bright"], 1) as writer:
        for k, size in enumerate([(64, 64), (32, 64)]):
            pixels = np.random.default_rng(k).integers(0, 200, (1, *size)).astype(np.uint8)
            writer.add_image(f"image{k}", size, np.uint8, "train", False, label=k).write(
                Box.whole(size), pixels
            )
    return path


class Normed(nn.Module):
    """A head of the user's whose norm takes the cells of all grids together."""

    def __init__(self, features, outputs):
        super().__init__()
        self.conv, self.norm, self.last = (
            nn.Conv2d(features, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Linear(8, outputs),
        )

    def pooled(self, y):
        return self.last(torch.linalg.vector_norm(torch.relu(y).flatten(2).softmax(2), dim=2))

    def forward(self, z):
        return self.pooled(self.norm(self.conv(z)))


def cut(x):
    """All patches of an image (1, height, width), row by row."""
    return x.unfold(1, 16, 16).unfold(2, 16, 16).flatten(1, 2).movedim(0, 1)


def test_a_norm_of_several_grids_is_of_all_their_cells(tmp_path):
    """All patches at once: gradients, and running statistics, of a plain program that puts the cells of both images into one norm."""

    store = Store(several_grids(tmp_path / "s.h5"))
    plan = published(
        tmp_path, 1, head="test_patch_heads:Normed", sampled=1.0, inner=1, head_channels=None
    )
    plan = replace(plan, data=replace(plan.data, images=2))
    network, mesh = (
        network_of(plan.model, plan.patchgd, store.bands, len(store.classes)).double(),
        Mesh(Alone()),
    )
    plain = nn.ModuleDict({"backbone": backbone(store.bands, 256), "head": Normed(256, 2)}).double()
    plain.load_state_dict(user_names(network.state_dict().items(), network))
    engine = PatchEngine(plan, mesh, network, precision="fp64")
    images = next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0)))
    engine.gradients.zero()
    found = engine.backward(images, engine.fill(images), 0)
    grids = [[n // 16 for n in size] for size in images.sizes]
    patches = [
        cut(torch.from_numpy(store.read_normalised(s.image, s.box)).double())
        for s in images.samples
    ]
    features = plain["backbone"](torch.cat(patches)).split([len(p) for p in patches])
    maps = [
        plain["head"].conv(z.T.unflatten(1, grid)[None]).flatten(2)
        for z, grid in zip(features, grids)
    ]
    cells = (
        plain["head"]
        .norm(torch.cat(maps, 2)[..., None])[..., 0]
        .split([m.shape[2] for m in maps], 2)
    )
    loss = F.cross_entropy(torch.cat([plain["head"].pooled(y) for y in cells]), images.labels)
    loss.backward()
    assert sorted(map(tuple, grids)) == [(2, 4), (4, 4)] and abs(found - loss.item()) <= TOLERANCE
    own = user_names(engine.network.named_parameters(), engine.network)
    for name, wanted in plain.named_parameters():
        assert (own[name].grad - wanted.grad).norm() <= TOLERANCE * max(wanted.grad.norm(), 1e-3), (
            name
        )
    statistics = user_names(engine.network.head.state_dict().items(), engine.network.head)
    for name in ("norm.running_mean", "norm.running_var"):
        assert (statistics[name] - plain["head"].state_dict()[name]).norm() <= TOLERANCE, name


def test_images_of_several_grids(tmp_path, refused):
    """One head takes them together, or refuses them before work."""
    several_grids(tmp_path / "s.h5")
    flags = [
        "--data.store",
        str(tmp_path / "s.h5"),
        "--train.output",
        str(tmp_path / "run"),
        "--patchgd.patch",
        "16x16",
        "--patchgd.features",
        "8",
    ]
    flags += [
        "--model.name",
        "distseg.models.classifier:residual",
        "--model.depth",
        "2",
        "--model.base_channels",
        "4",
        "--data.images",
        "2",
        "--train.epochs",
        "1",
    ]
    assert (
        "an image of 32x64 pixels has a grid of 2x4 patches, but this patchgd.head is made for 4x4"
        in refused("patchgd", *flags, "--patchgd.head", "conv4")
    )
    done(["patchgd", *flags, "--patchgd.head", "attention"])
