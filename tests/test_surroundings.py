"""Crops with their context: the pixels that the network sees, and the gradient of the crop's pixels alone."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made_store import random_store
from safetensors.torch import load_file

from distseg.cli.main import main
from distseg.comm.alone import Alone
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    SpatialConfig,
    StreamingConfig,
)
from distseg.config.sizes import Size
from distseg.data.augment import Turn
from distseg.data.sample_reader import label_bytes, read_labels, read_pixels
from distseg.data.sampler import epoch_samples, sample_sizes
from distseg.data.store.store import Store
from distseg.data.surroundings import box_around, sizes_around
from distseg.models.zoo import build_model
from distseg.tiling.tile import Box, ReceptiveField
from distseg.training.surroundings import context_of
from distseg.training.verify import passed, verify

MODEL = ModelConfig(depth=1, num_convs=1, base_channels=2, in_channels=2, dropout=0.0, norm="none")
CROP = Size("9x11")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two images of sizes that no stride divides, and one that is smaller than a crop's context."""
    path = tmp_path_factory.mktemp("s") / "s.h5"
    return random_store(path, train=[(43, 59), (59, 43), (20, 14)])


def test_a_box_as_a_picture():
    """The one in the docstring of distseg/data/surroundings.py."""
    assert box_around(Box((13,), (19,)), (44,), ReceptiveField((5,), (4,))) == Box((4,), (32,))


@pytest.mark.parametrize("stride, halo, crop", list(product((1, 3, 4), (0, 2, 9), (1, 5, 8))))
def test_every_box_has_the_context_and_an_expected_size(stride, halo, crop):
    reach = ReceptiveField((halo,), (stride,))
    for n in range(crop, 50):
        found = set()
        for start in range(n - crop + 1):
            box = box_around(Box((start,), (start + crop,)), (n,), reach)
            aligned = Box((start,), (start + crop,)).coarsened((stride,))
            tile = Box((aligned.start[0] * stride,), (min(n, aligned.stop[0] * stride),))
            assert Box.whole((n,)).contains(box) and box.contains(reach.window(tile, (n,)))
            assert box.start[0] % stride == 0 and box.stop[0] in (n, box.stop[0] // stride * stride)
            found.add(box.size)
        assert found == set(sizes_around((crop,), (n,), reach))


@pytest.mark.parametrize(
    "turn", [Turn(flips, q) for flips in product((False, True), repeat=2) for q in range(4)]
)
def test_a_turn_moves_a_box_and_back(turn):
    box = Box((1, 2), (4, 9))
    assert turn.source(turn.target(box, (7, 12)), (7, 12)) == box


def samples_of(store, data, context, batch=24):
    return epoch_samples(store, "train", data, 5, 0, batch, context)[0]


CHANGES = dict(
    augment=["flip", "turn", "colour"], augment_scale=[0.7, 1.3], augment_rotate=[-40, 40],
    augment_blur=[0, 1], augment_gamma=[0.8, 1.2], augment_share=0.6,
)  # fmt: skip


@pytest.mark.parametrize("changes", [{}, CHANGES], ids=["plain", "augmented"])
def test_the_crop_is_the_same_with_and_without_context(store, changes):
    """Compare pixels and labels of crops with and without context; labels around are ignored."""
    data, context = DataConfig(crop=CROP, **changes), ReceptiveField((6, 5), (2, 2))
    pairs = list(zip(samples_of(store, data, None), samples_of(store, data, context)))
    assert {s.size for _, s in pairs} <= set(sample_sizes(store, data, context).values())
    for bare, sample in pairs:
        (alone,) = read_pixels(store, [bare], Box.whole(bare.size))
        (whole,) = read_pixels(store, [sample], Box.whole(sample.size))
        place = sample.counted.slices
        assert np.array_equal(whole[(slice(None), *place)], alone)
        labels = read_labels(store, [sample], Box.whole(sample.size))[0].clone()
        assert torch.equal(labels[place], read_labels(store, [bare], Box.whole(bare.size))[0])
        labels[place] = store.ignore
        assert (labels == store.ignore).all()
    corner = Box((0, 0), (1, 1))
    far = next(s for _, s in pairs if min(s.counted.start) > 0)
    assert label_bytes(store, far, corner) == 0 < label_bytes(store, far, far.counted)


def test_context_is_made_of_the_pixels_of_the_image(store):
    data, context = DataConfig(crop=CROP, augment=["turn"]), ReceptiveField((6, 5), (2, 2))
    for sample in samples_of(store, data, context):
        assert sample.around.contains(sample.box) and sample.around != sample.box
        (found,) = read_pixels(store, [sample], Box.whole(sample.size))
        expected = sample.turn.apply(store.read_normalised(sample.image, sample.around))
        assert np.array_equal(found, expected)


def test_a_crop_sees_what_prediction_sees(store):
    """Without norms, the result on the crop is that of the whole turned image."""
    model = build_model(MODEL, 2, 3).double()
    data = DataConfig(crop=CROP, context="auto", augment=["flip", "turn"])
    context = context_of(model, data)
    assert context == ReceptiveField((5, 5), (2, 2))
    for sample in samples_of(store, data, context):
        size = store.size(sample.image)
        image = sample.turn.apply(store.read_normalised(sample.image, Box.whole(size)))
        (seen,) = read_pixels(store, [sample], Box.whole(sample.size))
        with torch.no_grad():
            whole, part = (model(torch.from_numpy(x).double()[None])[0] for x in (image, seen))
        there = sample.turn.target(sample.box, size).slices
        expected = whole[(slice(None), *there)]
        error = part[(slice(None), *sample.counted.slices)] - expected
        assert error.abs().max() < 1e-12 * expected.abs().max()


def config_of(store, **sections):
    model = ModelConfig(depth=1, num_convs=1, base_channels=2, dropout=0.0, norm="instance")
    data = DataConfig(store=str(store.path), crop=CROP, context="auto", augment=["turn"], images=3)
    return Config(model=model, data=data, optim=OptimConfig("sgd", momentum=0.0), **sections)


def serial_gradients(store, model, data):
    """Cross-entropy over the crops' pixels, in plain PyTorch from the store's own pixels."""
    model, samples = model.double(), samples_of_step(store, data, model)
    total = count = 0
    for sample in samples:
        pixels = sample.turn.apply(store.read_normalised(sample.image, sample.around))
        labels = sample.turn.apply(store.labels(sample.image, sample.box)).astype(np.int64)
        logits = model(torch.from_numpy(pixels).double()[None])[(..., *sample.counted.slices)]
        labels = torch.from_numpy(labels)[None]
        total = total + F.cross_entropy(logits, labels, ignore_index=255, reduction="sum")
        count += (labels != 255).sum()
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def samples_of_step(store, data, model):
    return epoch_samples(store, "train", data, 0, 0, 3, context_of(model, data))[0]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"spatial": SpatialConfig(exchange_every="1")},
        {"streaming": StreamingConfig(tiles=Size("2x2"))},
    ],
    ids=["windows", "exchange", "streamed"],
)
@pytest.mark.parallel(2)
def test_the_gradient_is_that_of_the_crops(comm, store, parts, tmp_path):
    """Against verify's serial program and against plain PyTorch."""
    path = comm.bcast(str(store.path), root=0)
    store = Store(path)
    config = config_of(store, mesh=MeshConfig(tiles=Size("1x2")), **parts)
    dump = tmp_path / "step.safetensors"
    report = verify(config, comm, dump=str(dump))
    if report is None:
        return
    assert passed(report, 1e-12)
    assert "crops of 9x11 are computed with a context of 5 pixels or more" in report["notes"][-1]
    found = load_file(dump)
    model = build_model(config.model, 2, 3).double()
    model.load_state_dict({n[8:]: t for n, t in found.items() if n.startswith("weights/")})
    for name, wanted in serial_gradients(store, model, config.data).items():
        error = (found[f"gradients/{name}"] - wanted).norm()
        assert error <= 1e-12 * max(wanted.norm(), 1e-3), name


def test_verify_names_a_repair_for_batch_norm_over_boxes_of_different_sizes(store):
    """The repairs that the message names, and frozen norms, which take no statistics, pass."""
    model = ModelConfig(depth=1, num_convs=1, base_channels=2, dropout=0.0, norm="batch")
    config = replace(config_of(store), model=model)
    with pytest.raises(
        ValueError, match="of a batch have 22x24, 22x25 pixels: set data.images to 1, "
    ):
        verify(config, Alone())
    alone = replace(config, data=replace(config.data, images=1))
    no_context = replace(config, data=replace(config.data, context=0))
    frozen = replace(config, spatial=SpatialConfig(frozen_norm=True))
    for mended in (alone, no_context, frozen):
        assert passed(verify(mended, Alone()), 1e-12)


def test_training_says_what_crops_see(store, tmp_path, capsys):
    flags = ["--data.store", str(store.path), "--data.crop", "9x11", "--data.images", "2"]
    net = ["--model.depth", "1", "--model.num_convs", "1", "--model.base_channels", "2"]
    run = ["--train.output", str(tmp_path / "run"), "--data.epoch_samples", "4"]
    small = ["--data.context", "2", "--train.epochs", "1", "--train.loggers", "[]"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *flags, *net, *run, *small])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "crops of 9x11 are computed with a context of 2 pixels or more" in said
    assert "data.context is 2, but the halo of the network is 5" in said
