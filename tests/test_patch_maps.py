"""PatchGD for labels of pixels, a U-Net of patches, against its loop in plain PyTorch; and end to end where all patches are drawn."""

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_images import done

from distseg.comm.alone import Alone
from distseg.comm.mesh import Mesh
from distseg.config.patchgd import PatchConfig, PatchgdConfig
from distseg.config.settings import (
    Config,
    DataBase,
    DataConfig,
    LossConfig,
    MeshBase,
    ModelBase,
    ModelConfig,
    OptimConfig,
    TrainBase,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.data.store.store import Store, StoreWriter
from distseg.inference.image_source import store_image
from distseg.models.layers import skip_store
from distseg.models.network import user_names
from distseg.tiling import rng
from distseg.tiling.tile import Box
from distseg.training.loop import train
from distseg.training.patchgd.engine import PatchLoader
from distseg.training.patchgd.filling_maps import MapPredictor
from distseg.training.patchgd.map_engine import MapEngine
from distseg.training.run import Run
from distseg.training.run_config import load, network_of
from distseg.training.serial import serial_loss

TOLERANCE, RATE, SIZE = 1e-12, 0.05, (37, 53)


def write_store(path, count=10, size=SIZE) -> Path:
    """Noise; a pixel is of the class "bright" where the image is, and some pixels count nowhere."""
    generator = np.random.default_rng(0)
    with StoreWriter(path, ["dark", "bright"], 2) as writer:
        for k in range(count):
            pixels = generator.integers(0, 256, (2, *size)).astype(np.uint8)
            labels = (pixels[0] > 127).astype(np.uint8)
            labels[generator.random(size) < 0.05] = 255
            image = writer.add_image(
                f"image{k:02}",
                size,
                np.uint8,
                ("train", "test", "val")[k % 3 if k > 6 else 0],
                True,
            )
            image.write(Box.whole(size), pixels, labels)
    return Path(path)


def config(
    place, samples=1, tiles="1x1", dropout=0.0, loss="cross_entropy", model=None, **patchgd
) -> PatchConfig:
    settings = dict(patch=Size("16x24"), head_channels=6, inner=3, sampled=0.3)
    return PatchConfig(
        model=ModelBase(
            "unet", base_channels=4, depth=2, norm="group", dropout=dropout, **model or {}
        ),
        mesh=MeshBase(samples=samples, tiles=Size(tiles)),
        data=DataBase(store=str(place / "s.h5"), images=2),
        optim=OptimConfig(name="sgd", lr=RATE, schedule="constant", warmup=0.0),
        train=TrainBase(precision="fp64", loggers=[], output=str(place / "run")),
        loss=LossConfig(name=loss, ignore_index=255),
        patchgd=PatchgdConfig(**{**settings, **patchgd}),
    )


@pytest.fixture
def place(comm, shared_path) -> Path:
    if comm.rank == 0:
        write_store(shared_path / "s.h5")
    comm.Barrier()
    return Path(shared_path)


def images_of(plan: PatchConfig, store: Store):
    """(samples, pixels, labels) of the first step, of all groups."""

    whole = replace(
        plan, data=replace(plan.data, images=plan.data.images * plan.mesh.samples), mesh=MeshBase()
    )
    samples = next(
        iter(PatchLoader(store, whole.data, whole.train.seed, Mesh(Alone())).epoch(0))
    ).samples
    x = torch.stack(
        [torch.from_numpy(store.read_normalised(s.image, s.box)).double() for s in samples]
    )
    return (
        samples,
        x,
        torch.stack([torch.from_numpy(store.labels(s.image, s.box)).long() for s in samples]),
    )


def serial(plan: PatchConfig, store: Store):
    """(loss, weights) after a step, by one process in plain PyTorch."""
    settings, (samples, x, labels) = plan.patchgd, images_of(plan, store)
    network = network_of(plan.model, plan.patchgd, store.bands, len(store.classes)).double()
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=plan.optim.momentum)
    size = tuple(x.shape[2:])
    boxes = network.patches(size)
    share = math.ceil(settings.sampled * len(boxes) if settings.sampled <= 1 else settings.sampled)
    rounds = math.ceil(len(boxes) / share)
    inner = settings.inner or rounds
    every = settings.accumulate or inner

    def draw(what, i, j):
        order = rng.permutation(
            rng.key(plan.train.seed, 0, samples[i].number, what, j // rounds), len(boxes)
        )
        start = min(j % rounds * share, len(boxes) - share)
        return [(i, int(p)) for p in sorted(order[start : start + share])]

    def encode(pairs):
        with skip_store({}) as skips:
            return network.encoder(
                torch.stack([x[(i, slice(None), *boxes[p].slices)] for i, p in pairs])
            ), skips

    own = network.own(size)

    def at(pairs):
        return ([i for i, _ in pairs], [p for _, p in pairs])

    def answers(y, pairs, logits):
        """y with the answers to some patches, of each the pixels that belong to it."""
        y = y.clone()
        for (i, p), of_patch in zip(pairs, logits):
            y[(i, slice(None), *own[p].slices)] = of_patch[
                (slice(None), *own[p].relative_to(boxes[p]).slices)
            ]
        return y

    z = torch.zeros(
        len(samples), len(boxes), network.features * math.prod(network.cells), dtype=torch.float64
    )
    with torch.no_grad():
        for j in range(rounds):
            for pairs in [draw("fill", i, j) for i in range(len(samples))]:
                z[at(pairs)] = encode(pairs)[0].flatten(1)
        y, correction = (
            torch.zeros(len(samples), len(store.classes), *size, dtype=torch.float64),
            network.correction(z, size),
        )
        for pairs in [draw("fill", i, j) for j in range(rounds) for i in range(len(samples))]:
            made, skips = encode(pairs)
            with skip_store(skips):
                y = answers(y, pairs, network.decoder(made + correction[at(pairs)]))
    losses = []
    for j in range(inner):
        pairs = [pair for i in range(len(samples)) for pair in draw("patches", i, j)]
        made, skips = encode(pairs)
        z = z.clone()
        z[at(pairs)] = made.flatten(1)
        correction = network.correction(z, size)
        with skip_store(skips):
            logits = network.decoder(made + correction[at(pairs)])
        y = answers(y.detach(), pairs, logits)
        loss = (
            serial_loss(plan.loss, list(y), list(labels))
            if settings.y_filling
            else F.cross_entropy(
                logits,
                torch.stack([labels[(i, *boxes[p].slices)] for i, p in pairs]),
                ignore_index=255,
            )
        )
        (loss / every).backward()
        z = z.detach()
        losses.append(loss.item())
        if (j + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return np.mean(losses), dict(network.named_parameters())


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "more",
    [
        {},
        dict(inner=4, accumulate=2, step=Size("11x16"), sampled=4),
        dict(y_filling=True, step=Size("11x16"), accumulate=1),
        dict(y_filling=True, inner=None, loss="dice"),
    ],
)
def test_a_step_is_that_of_plain_pytorch_on_any_ranks(comm, place, more):
    """Odd sizes, whose last patches overlap; images shared by one to four ranks, and sample groups beside them."""
    samples = 2 if comm.size == 4 else 1
    plan, store = (
        config(place, samples, tiles=f"{comm.size // samples}x1", **more),
        Store(place / "s.h5"),
    )
    network = network_of(plan.model, plan.patchgd, store.bands, len(store.classes))
    mesh = Mesh(comm, samples, plan.mesh.tiles)
    engine = MapEngine(plan, mesh, network, precision="fp64")
    loss, _ = engine.step(
        next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0))), RATE
    )
    wanted_loss, wanted = serial(plan, store)
    assert abs(loss - wanted_loss) <= TOLERANCE
    for name, p in engine.network.named_parameters():
        assert (p - wanted[name]).norm() <= TOLERANCE * max(wanted[name].norm(), 1e-3), name


@pytest.mark.parallel([1, 3])
@pytest.mark.covering(cases=1)
def test_all_patches_at_once_are_trained_end_to_end(comm, place):
    """One inner iteration that draws all of them has the exact gradient of the network of patches; sizes of whole patches, so that each pixel is in one."""
    plan = config(
        place,
        tiles=f"1x{comm.size}",
        inner=1,
        sampled=1.0,
        patch=Size("37x53") if comm.size == 1 else Size("16x16"),
    )
    if comm.size == 3:
        if comm.rank == 0:
            write_store(place / "even.h5", size=(32, 48))
        comm.Barrier()
        plan = replace(plan, data=replace(plan.data, store=str(place / "even.h5")))
    store = Store(plan.data.store)
    network = network_of(plan.model, plan.patchgd, store.bands, len(store.classes)).double()
    _, x, labels = images_of(plan, store)
    F.cross_entropy(network(x), labels, ignore_index=255).backward()
    mesh = Mesh(comm, 1, plan.mesh.tiles)
    engine = MapEngine(plan, mesh, copy.deepcopy(network), precision="fp64")
    images = next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0)))
    engine.gradients.zero()
    engine.backward(images, engine.fill(images), 0)
    engine.gradients.finish()
    for (name, wanted), p in zip(network.named_parameters(), engine.network.parameters()):
        own = torch.zeros_like(p) if name.startswith("head.") and comm.rank else p.grad
        assert (comm.allreduce(own) - wanted.grad).norm() <= TOLERANCE * wanted.grad.norm(), name


@pytest.mark.parallel([1, 3])
@pytest.mark.covering(cases=1)
def test_masks_and_losses_do_not_depend_on_the_ranks(comm, place):
    plan, store = (
        config(place, tiles=f"1x{comm.size}", dropout=0.4, loss="dice"),
        Store(place / "s.h5"),
    )

    def stepped(comm, plan):
        mesh = Mesh(comm, 1, plan.mesh.tiles)
        engine = MapEngine(
            plan,
            mesh,
            network_of(plan.model, plan.patchgd, store.bands, len(store.classes)),
            precision="fp64",
        )
        return engine.step(
            next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0))), RATE
        ), engine.network

    (loss, norm), network = stepped(comm, plan)
    (alone, its_norm), wanted = stepped(Alone(), replace(plan, mesh=MeshBase()))
    assert abs(loss - alone) <= TOLERANCE and abs(norm - its_norm) <= 1e-11 * norm
    for (name, w), p in zip(wanted.named_parameters(), network.parameters()):
        assert (p - w).norm() <= TOLERANCE * max(w.norm(), 1e-3), name


@pytest.mark.parallel([2, 4])
@pytest.mark.covering(cases=1)
def test_masks_do_not_depend_on_other_images_of_a_group(comm, shared_path):
    """Images of several sizes have Z filled in several numbers of rounds; its masks are those of the image's own rounds."""

    place, generator = Path(shared_path), np.random.default_rng(0)
    if comm.rank == 0:
        with StoreWriter(place / "s.h5", ["dark", "bright"], 2) as writer:
            for k, size in enumerate([(37, 53), (16, 24), (64, 30), (20, 90)]):
                pixels = generator.integers(0, 256, (2, *size)).astype(np.uint8)
                writer.add_image(f"image{k}", size, np.uint8, "train", True).write(
                    Box.whole(size), pixels, (pixels[0] > 127).astype(np.uint8)
                )
    comm.Barrier()
    store, found = Store(place / "s.h5"), []
    for where, samples in ((comm, comm.size), (Alone(), 1)):
        plan = config(place, samples, dropout=0.3, sampled=2)
        plan = replace(plan, data=replace(plan.data, images=4 // samples))
        mesh = Mesh(where, samples)
        engine = MapEngine(
            plan,
            mesh,
            network_of(plan.model, plan.patchgd, store.bands, len(store.classes)),
            precision="fp64",
        )
        found.append(
            (
                engine.step(
                    next(iter(PatchLoader(store, plan.data, plan.train.seed, mesh).epoch(0))), RATE
                )[0],
                engine.network,
            )
        )
    (loss, network), (alone, wanted) = found
    assert abs(loss - alone) <= TOLERANCE
    for (name, w), p in zip(wanted.named_parameters(), network.parameters()):
        assert (p - w).norm() <= TOLERANCE * max(w.norm(), 1e-3), name


def test_an_image_is_predicted_patch_by_patch(tmp_path):

    store = Store(write_store(tmp_path / "s.h5"))
    plan = config(tmp_path, step=Size("11x16"))
    network = network_of(plan.model, plan.patchgd, store.bands, len(store.classes)).double().eval()
    engine = MapEngine(plan, Mesh(Alone()), copy.deepcopy(network), precision="fp64")
    predictor, source = engine.predictor(), store_image(store, "image00")
    with torch.no_grad():
        wanted = network(torch.from_numpy(source.read(Box.whole(SIZE)))[None].double())[0].numpy()
    found, times = np.zeros_like(wanted), np.zeros(SIZE, int)
    for box, logits in predictor(source):
        found[(slice(None), *box.slices)] = logits
        times[box.slices] += 1
    assert isinstance(predictor, MapPredictor) and (times == 1).all()
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_the_command_line_trains_resumes_evaluates_and_predicts(comm, place):
    common = ["--data.store", str(place / "s.h5"), "--train.output", str(place / "run"), "--model.name", "unet", "--model.norm", "instance",
              "--model.depth", "2", "--model.base_channels", "4", "--patchgd.patch", "16x16", "--patchgd.inner", "2", "--mesh.tiles", f"1x{comm.size}", "--data.images", "2"]  # fmt: skip
    done(["patchgd", *common, "--train.precision", "fp32", "--train.epochs", "1"])
    done(
        [
            "patchgd",
            *common,
            "--train.precision",
            "fp32",
            "--train.epochs",
            "2",
            "--train.resume",
            "true",
        ]
    )
    done(["evaluate", str(place / "run")])
    if comm.size == 1:
        done(["report", str(place / "run"), "--predictions", str(place / "none")])
        assert (place / "run/report.html").read_text().count("<img") >= 4
    done(
        [
            "predict",
            str(place / "run"),
            "--output",
            str(place / "out"),
            "--predict.probabilities",
            "true",
        ]
    )
    comm.Barrier()
    store, module = Store(place / "s.h5"), load(place / "run", normalise=False)
    for name in store.split("test"):
        with torch.no_grad():
            wanted = (
                module(torch.from_numpy(store.read_normalised(name, Box.whole(SIZE)))[None])
                .softmax(1)[0]
                .numpy()
            )
        with h5py.File(place / "out" / f"{name}.h5") as file:
            assert np.abs(file["probabilities"][...] - wanted).max() < 2e-3


def test_a_run_begins_with_a_u_net_that_was_trained_exactly(tmp_path):

    write_store(tmp_path / "s.h5")
    plan = config(tmp_path)
    exact = Config(
        model=ModelConfig(**vars(plan.model)),
        data=DataConfig(**vars(plan.data)),
        optim=plan.optim,
        train=TrainConfig(**{**vars(plan.train), "output": str(tmp_path / "exact")}),
        loss=plan.loss,
    )
    train(exact, Alone())
    run = Run(replace(plan, train=replace(plan.train, init=str(tmp_path / "exact"))), Alone())
    assert any("begins with" in line for line in run.lines)
    wanted = load(tmp_path / "exact", normalise=False).state_dict()
    found = user_names(run.model.state_dict().items(), run.model)
    assert all((found[name].float() == t).all() for name, t in wanted.items()) and any(
        name.startswith("head.") for name in found
    )


@pytest.mark.parametrize(
    "flags, why",
    [
        (
            ["--model.norm", "batch"],
            "this U-Net has batch norm, but PatchGD for labels of pixels computes each patch separately: set model.norm to instance, group or none",
        ),
        (["--model.name", "distseg.models.classifier:residual"], r"makes a vector .*\(DS404\)"),
        (
            ["--patchgd.features", "32"],
            "patchgd.features is 32, but Z is the coarse features of the U-Net, so that the setting has no effect: leave patchgd.features out",
        ),
        (
            ["--patchgd.head", "transformer"],
            "patchgd.head is transformer, but the head of a U-Net is two convolutions",
        ),
        (
            ["--patchgd.statistics", "pass"],
            "patchgd.statistics is pass, but a U-Net of patches has no batch norm, so that the setting has no effect: leave patchgd.statistics out",
        ),
        (["--patchgd.patch", "64x64"], "has 37x53 pixels, but patchgd.patch is 64x64"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, refused, flags, why):
    write_store(tmp_path / "s.h5")
    given = {
        "--data.store": str(tmp_path / "s.h5"),
        "--train.output": str(tmp_path / "run"),
        "--model.name": "unet",
        "--patchgd.patch": "16x16",
    }
    given |= dict(zip(flags[::2], flags[1::2]))
    err = refused("patchgd", *(word for pair in given.items() for word in pair))
    assert re.search(why, err), err
