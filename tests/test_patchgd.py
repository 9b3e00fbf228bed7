"""PatchGD against the paper's loop in plain PyTorch: the same weights after a step, on any ranks; and end to end where all patches are drawn."""

import copy
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_images import done, write_store

from distseg.cli.main import main
from distseg.comm.alone import Alone
from distseg.comm.mesh import Mesh
from distseg.config.patchgd import PatchConfig, PatchgdConfig, TrainConfig
from distseg.config.settings import DataBase, LossConfig, MeshBase, ModelBase, OptimConfig
from distseg.config.sizes import Size
from distseg.data.loader import read_pixels
from distseg.data.store.store import Store, StoreWriter
from distseg.models.classifier import residual
from distseg.models.network import user_names
from distseg.tiling import rng
from distseg.tiling.tile import Box
from distseg.training.patchgd.engine import PatchEngine, PatchLoader, check_images, drawn
from distseg.training.patchgd.network import patches_of
from distseg.training.run import Run
from distseg.training.run_config import load, network_of

TOLERANCE = 1e-12
RATE = 0.05


def config(
    place, samples=1, tiles="1x1", norm="batch", images=2, scope="group", name="sgd", **patchgd
) -> PatchConfig:
    settings = dict(
        patch=Size("16x16"), features=6, head_channels=8, inner=3, sampled=0.3, norm_scope=scope
    )
    return PatchConfig(
        model=ModelBase("distseg.models.classifier:residual", base_channels=4, depth=2, norm=norm),
        mesh=MeshBase(samples=samples, tiles=Size(tiles)),
        data=DataBase(store=str(place / "s.h5"), images=images),
        optim=OptimConfig(name=name, lr=RATE, schedule="constant", warmup=0.0),
        train=TrainConfig(precision="fp64", loggers=[], output=str(place / "run")),
        loss=LossConfig(),
        patchgd=PatchgdConfig(**{**settings, **patchgd}),
    )


def ours(plan: PatchConfig, comm, store: Store):
    """(loss, weights and running statistics) after a step."""
    mesh = Mesh(comm, plan.mesh.samples, plan.mesh.tiles)
    network = network_of(plan.model, plan.patchgd, store.bands, len(store.classes))
    engine = PatchEngine(plan, mesh, network, precision="fp64")
    images = next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0)))
    loss, _ = engine.step(images, RATE)
    return loss, {
        name: t.clone() for name, t in network.state_dict().items() if t.is_floating_point()
    }


def papers(plan: PatchConfig, store: Store):
    """The same by one process, in plain PyTorch."""
    settings = plan.patchgd
    network = network_of(plan.model, plan.patchgd, store.bands, len(store.classes)).double()
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=plan.optim.momentum)
    whole = replace(
        plan, data=replace(plan.data, images=plan.data.images * plan.mesh.samples), mesh=MeshBase()
    )

    samples = next(
        iter(PatchLoader(store, whole.data, whole.train.seed, Mesh(Alone())).epoch(0))
    ).samples
    x = torch.stack(
        [torch.from_numpy(store.read_normalised(s.image, s.box)).double() for s in samples]
    )
    labels, boxes = (
        torch.tensor([store.label(s.image) for s in samples]),
        patches_of(x.shape[2:], settings.patch, settings.step or settings.patch),
    )
    share = math.ceil(settings.sampled * len(boxes) if settings.sampled <= 1 else settings.sampled)
    rounds = math.ceil(len(boxes) / share)
    inner = settings.inner or rounds
    every = settings.accumulate or inner
    scope = len(samples) // (1 if plan.patchgd.norm_scope == "step" else plan.mesh.samples)
    groups = [
        range(a, a + scope) for a in range(0, len(samples), scope)
    ]  # whose statistics are joint

    def draw(what, i, j):
        order = rng.permutation(
            rng.key(plan.train.seed, 0, samples[i].number, what, j // rounds), len(boxes)
        )
        start = min(j % rounds * share, len(boxes) - share)
        return [(i, int(p)) for p in sorted(order[start : start + share])]

    def put(z, pairs, backbone=network.backbone):
        made = backbone(
            torch.stack([x[(i, slice(None), *boxes[p].slices)] for i, p in pairs])
        ).flatten(1)
        z = (
            torch.zeros(len(samples), len(boxes), made.shape[1], dtype=made.dtype)
            if z is None
            else z.clone()
        )
        z[[i for i, _ in pairs], [p for _, p in pairs]] = made
        return z

    network.train()
    z, losses, alike = (
        None,
        [],
        copy.deepcopy(network.backbone),
    )  # what fills leaves the running statistics as they are
    with torch.no_grad():
        for j in range(rounds):
            for group in groups:
                z = put(z, [pair for i in group for pair in draw("fill", i, j)], alike)
    for j in range(inner):
        for group in groups:
            z = put(z, [pair for i in group for pair in draw("patches", i, j)])
        logits = torch.cat(
            [
                network.head(network.block(z[list(group)], x.shape[2:])).flatten(1)
                for group in groups
            ]
        )
        loss = torch.nn.functional.cross_entropy(logits, labels)
        (loss / min(every, inner - j // every * every)).backward()
        z = z.detach()
        losses.append(loss.item())
        if (j + 1) % every == 0 or j + 1 == inner:
            optimizer.step()
            optimizer.zero_grad()
    return np.mean(losses), {
        name: t for name, t in network.state_dict().items() if t.is_floating_point()
    }


def compare(found, wanted, means=False):
    """``means``: the running ones too. A running variance is that of deferred batch norm, biased, and PyTorch's is not."""
    assert abs(found[0] - wanted[0]) <= TOLERANCE
    for name, w in wanted[1].items():
        if "running" not in name or (means and "mean" in name):
            assert (found[1][name] - w).norm() <= TOLERANCE * max(w.norm(), 1e-3), name


@pytest.fixture
def place(comm, shared_path) -> Path:
    if comm.rank == 0:
        write_store(shared_path / "s.h5", count=16, size=(45, 61))
    comm.Barrier()
    return Path(shared_path)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.covering(cases=3)
@pytest.mark.parametrize(
    "more",
    [
        dict(inner=None),
        dict(inner=1),
        dict(step=Size("11x13"), head="transformer"),
        dict(inner=4, accumulate=2, sampled=0.5, head="cnn-max"),
        dict(accumulate=1, norm="instance", sampled=5),
    ],
)
def test_a_step_is_the_papers_on_any_ranks(comm, place, more):
    """Odd sizes, whose last patches overlap; images shared by one to four ranks."""
    plan, store = config(place, tiles=f"1x{comm.size}", **more), Store(place / "s.h5")
    compare(ours(plan, comm, store), papers(plan, store), means=plan.patchgd.inner == 1)


def test_the_last_update_has_the_iterations_that_are_left(tmp_path):
    write_store(tmp_path / "s.h5", count=4, size=(45, 61))
    plan = config(tmp_path, inner=3, accumulate=2, sampled=0.5)
    store = Store(tmp_path / "s.h5")
    compare(ours(plan, Alone(), store), papers(plan, store))


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "backbone",
    [
        "made_classifiers:patched",
        "made_classifiers:fixed",
        "made_classifiers:attending",
        "made_weights:Described",
    ],
)
def test_backbones_of_other_kinds(comm, place, backbone):
    """Convolutions that want 16 pixels at least, as ConvNeXt's; networks of one image size; attention, as DeiT's; weights that are computed or buffers."""
    plan, store = config(place, tiles=f"1x{comm.size}", patch=Size("24x32")), Store(place / "s.h5")
    plan = replace(plan, model=ModelBase(backbone))
    compare(ours(plan, comm, store), papers(plan, store))


@pytest.mark.parallel([2, 4])
@pytest.mark.covering(cases=1)
def test_sample_groups_and_patches_together(comm, place):
    plan, store = (
        config(place, samples=2, tiles=f"{comm.size // 2}x1", norm="group"),
        Store(place / "s.h5"),
    )
    compare(ours(plan, comm, store), papers(plan, store))
    active = config(place, samples=2, tiles=f"{comm.size // 2}x1", scope="step")
    compare(ours(active, comm, store), papers(active, store))


@pytest.mark.parallel([1, 3])
@pytest.mark.covering(cases=1)
def test_all_patches_at_once_are_trained_end_to_end(comm, place):
    """One inner iteration that draws all of them has the exact gradient of the network of patches."""
    plan, store = (
        config(place, tiles=f"1x{comm.size}", inner=1, sampled=1.0, norm="group"),
        Store(place / "s.h5"),
    )
    network = network_of(plan.model, plan.patchgd, store.bands, len(store.classes)).double()
    mesh = Mesh(comm, 1, plan.mesh.tiles)
    images = next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0)))
    x = torch.stack(
        [torch.from_numpy(store.read_normalised(s.image, s.box)).double() for s in images.samples]
    )
    torch.nn.functional.cross_entropy(network(x), images.labels).backward()
    engine = PatchEngine(plan, mesh, copy.deepcopy(network), precision="fp64")
    engine.gradients.zero()
    engine.backward(images, engine.fill(images), 0)
    engine.gradients.finish()
    for (name, wanted), p in zip(network.named_parameters(), engine.network.parameters()):
        own = p.grad if "backbone" in name or comm.rank == 0 else torch.zeros_like(p)
        assert (comm.allreduce(own) - wanted.grad).norm() <= TOLERANCE * wanted.grad.norm(), name


@pytest.mark.parametrize(
    "share, patches, wanted",
    [
        (1 / 8, 256, 32),
        (1 / 8, 20, 3),
        (0.07, 100, 7),
        (0.001, 20, 1),
        (1.0, 20, 20),
        (5, 20, 5),
        (50, 20, 20),
    ],
)
def test_k_is_rounded_up(share, patches, wanted):
    assert drawn(share, patches) == wanted


def test_more_iterations_to_an_update_than_there_are():
    with pytest.raises(ValueError, match=r"patchgd\.accumulate .*patchgd\.inner.*\(DS209\)"):
        PatchgdConfig(inner=4, accumulate=9)


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_the_command_line_trains_resumes_evaluates_and_predicts(comm, place, capsys):
    common = [
        "--train.precision",
        "fp32",
        "--data.store",
        str(place / "s.h5"),
        "--train.output",
        str(place / "run"),
        "--model.name",
        "distseg.models.classifier:residual",
        "--model.depth",
        "2",
        "--model.base_channels",
        "4",
        "--patchgd.patch",
        "16x16",
        "--patchgd.inner",
        "2",
        "--patchgd.features",
        "8",
        "--mesh.tiles",
        f"1x{comm.size}",
        "--data.images",
        "2",
    ]
    done(["patchgd", *common, "--train.epochs", "1"])
    done(["patchgd", *common, "--train.epochs", "2", "--train.resume", "true"])
    done(["evaluate", str(place / "run")])
    done(["predict", str(place / "run"), "--output", str(place / "out")])
    comm.Barrier()
    store, rows = Store(place / "s.h5"), (place / "out" / "images.csv").read_text().splitlines()[1:]
    module = load(place / "run", normalise=False)
    for row in rows:
        name, *_, bright = row.split(",")
        x = torch.from_numpy(store.read_normalised(name, Box.whole((45, 61))))[None]
        assert abs(float(bright) - float(module(x).softmax(1)[0, 1])) < 1e-4
    assert len(rows) == len(store.split("test"))
    if comm.size == 1:
        done(
            [
                "export",
                str(place / "run"),
                "--output",
                str(place / "exported"),
                "--formats",
                "safetensors",
            ]
        )
        with pytest.raises(SystemExit):
            main(
                [
                    "export",
                    str(place / "run"),
                    "--output",
                    str(place / "exported"),
                    "--formats",
                    "onnx",
                ]
            )
        assert "is a network of patches" in capsys.readouterr().err


@pytest.mark.parallel([2, 4])
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("more", [{}, dict(sampled=5, inner=None)])
def test_sample_groups_with_images_of_several_sizes(comm, shared_path, more):
    """Statistics of all groups, which fill Z in as many rounds, and by default iterate as often; the weights are those of one rank with all images."""

    place, sizes = Path(shared_path), [(45, 61), (20, 33), (29, 43), (61, 70)]
    if comm.rank == 0:
        with StoreWriter(place / "s.h5", ["dark", "bright"], 2) as writer:
            for k, size in enumerate(sizes):
                image = writer.add_image(f"image{k}", size, np.uint8, "train", False, label=k % 2)
                image.write(
                    Box.whole(size),
                    np.random.default_rng(k).integers(0, 200, (2, *size)).astype(np.uint8),
                )
    comm.Barrier()
    store = Store(place / "s.h5")
    loss, found = ours(
        config(place, samples=comm.size, images=4 // comm.size, scope="step", **more), comm, store
    )
    alone, wanted = ours(config(place, images=4, **more), Alone(), store)
    assert abs(loss - alone) <= TOLERANCE
    for name, w in wanted.items():
        assert (found[name] - w).norm() <= 10 * TOLERANCE * max(w.norm(), 1e-3), name


def test_filling_keeps_the_first_features_of_images_with_fewer_patches(tmp_path):
    with StoreWriter(tmp_path / "s.h5", ["dark", "bright"], 2) as writer:
        for k, size in enumerate([(33, 33), (16, 20)]):
            image = writer.add_image(f"image{k}", size, np.uint8, "train", False, label=k)
            pixels = np.random.default_rng(k).integers(0, 200, (2, *size))
            image.write(Box.whole(size), pixels.astype(np.uint8))
    plan, store, mesh = config(tmp_path, sampled=0.05), Store(tmp_path / "s.h5"), Mesh(Alone())
    network = network_of(plan.model, plan.patchgd, 2, 2)
    engine = PatchEngine(plan, mesh, network, precision="fp64")
    images = next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0)))
    made, features = [], engine.filler.features
    engine.filler.features = lambda x, keys: made.append(features(x, keys)) or made[-1]
    found = engine.fill(images)
    turns = [len(network.patches(size)) for size in images.sizes]  # one patch in each round
    assert sorted(turns) == [2, 9] and len(made) == 9
    for j, rows in enumerate(made):
        for (i, patch), row in zip(engine._draw(images, "fill", j), rows):
            assert torch.equal(found[i][patch], row) == (j < turns[i])


def test_the_head_s_logits_come_in_the_order_of_the_images(tmp_path):
    plan = config(tmp_path)
    network = network_of(plan.model, plan.patchgd, 2, 2)
    filler = PatchEngine(plan, Mesh(Alone()), network, precision="fp64").filler
    network.eval()
    sizes = [(33, 33), (16, 20), (16, 20), (33, 33)]
    features = [torch.randn(len(network.patches(size)), 6).double() for size in sizes]
    found = filler.logits(features, sizes)
    alone = [filler.logits([z], [size])[0] for z, size in zip(features, sizes)]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-9, atol=1e-12)


def test_each_pass_of_a_step_draws_masks_of_its_own(tmp_path):
    plan, keys = config(tmp_path), set()
    engine = PatchEngine(plan, Mesh(Alone()), network_of(plan.model, plan.patchgd, 2, 2))
    for epoch in (0, 1):
        engine.context.epoch = epoch
        for what, j in product(("fill", "patches", "head"), range(3)):
            with engine._masks(what, j):
                assert engine.context.epoch == engine.head_context.epoch
                keys.add(engine.context.epoch)
            assert engine.context.epoch == epoch
    assert len(keys) == 2 * 3 * 3


def test_a_run_begins_with_the_weights_of_a_backbone(tmp_path):
    """By the names of the backbone's own module; what it has not begins anew."""

    write_store(tmp_path / "s.h5", size=(45, 61))
    torch.manual_seed(3)
    given = residual(2, 10, 4, 2)
    save_file(
        {name: t for name, t in given.state_dict().items() if not name.startswith("last.")},
        tmp_path / "digits.safetensors",
    )
    plan = config(tmp_path)
    run = Run(
        replace(plan, train=replace(plan.train, init=str(tmp_path / "digits.safetensors"))), Alone()
    )
    assert any(
        "no tensor in the file fits (initial values stay): last.weight, last.bias" in line
        for line in run.lines
    ), run.lines
    found = run.model.backbone.state_dict()
    theirs = {user: t for user, t in user_names(found.items(), run.model.backbone).items()}
    assert all(
        (theirs[name] == t).all()
        for name, t in given.state_dict().items()
        if not name.startswith("last.")
    )


def test_verify_is_of_exact_steps(refused):
    assert "PatchGD has a command and a config of its own, distseg patchgd CONFIG" in refused(
        "verify", "--patchgd.patch", "64x64", "--image", "64x64"
    )
    assert "distseg patchgd CONFIG (DS316)" in refused(
        "verify", "jobs/patchgd.yaml", "--image", "64x64"
    )


@pytest.mark.parametrize(
    "flags, why",
    [
        (
            ["--pipeline.schedule", "gpipe"],
            "--pipeline.schedule gpipe: it is a setting of exact training .distseg train., and PatchGD",
        ),
        (
            ["--spatial.tiles_per_rank", "2x2"],
            "--spatial.tiles_per_rank 2x2: it is a setting of exact training .distseg train., and",
        ),
        (["--patchgd.patch", "64x64"], "has 45x61 pixels, but patchgd.patch is 64x64"),
        (
            ["--patchgd.patch", "16"],
            "image 'image00' has 45x61 pixels, of 2 dims, but patchgd.patch is 16: give patchgd.patch a number for each dim",
        ),
        (["--patchgd.step", "17x16"], r"patchgd\.step is 17x16, .*\(DS210\)"),
        (["--patchgd.sampled", "2.5"], r"patchgd\.sampled .*got 2\.5 \(DS124\)"),
        (
            ["--patchgd.head", "transformer", "--patchgd.head_channels", "12"],
            "patchgd.head_channels is 12, but a transformer of 4 heads needs a multiple of 8",
        ),
        (
            ["--patchgd.y_filling", "true"],
            "patchgd.y_filling is true, but the network turns a patch into a vector",
        ),
        (["--model.name", "unet"], r"makes a map .*\(DS404\)"),
        (["--train.method", "exact"], "PatchGD has a command and a config of its own"),
        (["--spatial.norm_scope", "step"], "PatchGD has patchgd.norm_scope instead"),
        (
            ["--patchgd.grid", "4x4"],
            "patchgd.grid is 4x4, but patchgd.head cnn takes any grid: set patchgd.head to conv3 or conv4",
        ),
        (["--patchgd.iner", "2"], "did you mean --patchgd.inner"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, refused, flags, why):
    write_store(tmp_path / "s.h5", size=(45, 61))
    given = {
        "--data.store": str(tmp_path / "s.h5"),
        "--train.output": str(tmp_path / "run"),
        "--model.name": "distseg.models.classifier:residual",
        "--patchgd.patch": "16x16",
    }
    given |= dict(zip(flags[::2], flags[1::2]))
    err = refused("patchgd", *(word for pair in given.items() for word in pair))
    assert re.search(why, err), err


def test_ranks_that_no_patch_is_drawn_for_are_refused_before_work(tmp_path):
    store = Store(write_store(tmp_path / "s.h5", size=(45, 61)))
    with pytest.raises(
        ValueError,
        match=r"patchgd.sampled 0.1 draws 2 patches of 1 images such as 'image00', but 3 ranks share them \(mesh.tiles 1x3\)",
    ):
        plan = config(tmp_path, tiles="1x3", images=1, sampled=0.1)
        check_images(store, plan.data, plan.patchgd, plan.mesh.tiles)


def test_patches_cover_an_image():
    assert [box.start for box in patches_of((10, 7), (4, 4), (4, 4))] == [
        (a, b) for a in (0, 4, 6) for b in (0, 3)
    ]
    for size, patch, step in [
        ((17, 30), (5, 7), (5, 7)),
        ((17, 30), (5, 7), (3, 4)),
        ((8, 8), (8, 8), (8, 8)),
        ((9, 16), (8, 8), (8, 8)),
    ]:
        seen = np.zeros(size, int)
        for box in patches_of(size, patch, step):
            assert box.size == tuple(patch)
            seen[box.slices] += 1
        assert seen.min() > 0


def test_patches_of_held_images_are_those_that_are_read(tmp_path):
    """Overlapping ones of odd sizes, flipped, rotated, coloured and with noise; images are held only where a round computes a good part of them."""

    store, plan = (
        Store(write_store(tmp_path / "s.h5", size=(45, 61))),
        config(tmp_path, step=Size("11x13"), sampled=1),
    )
    changes = dict(augment=["flip", "colour"], augment_rotate=[-20, 20], augment_noise=[0, 0.1])
    plan = replace(plan, data=replace(plan.data, **changes))
    mesh = Mesh(Alone())
    few, many = (
        PatchEngine(p, mesh, network_of(p.model, p.patchgd, store.bands, len(store.classes)))
        for p in (plan, replace(plan, patchgd=replace(plan.patchgd, sampled=0.3)))
    )
    read, held = (
        next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0))) for _ in range(2)
    )
    boxes = patches_of((45, 61), (16, 16), (11, 13))
    few._read(read, [(0, 0), (1, 3)])
    many._read(held, [(i, p) for i in (0, 1) for p in range(6)])
    assert not read._held and len(held._held) == 2
    for i in (0, 1):
        assert torch.equal(read.read(i, list(boxes)), held.read(i, list(boxes)))
        assert torch.equal(
            held.read(i, [boxes[3]])[0],
            torch.from_numpy(read_pixels(store, [read.samples[i]], boxes[3])[0]),
        )
