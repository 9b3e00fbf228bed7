"""Warps and changes of values: what they do by their definitions, and that a box has the bits that it has in the whole sample."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from made_store import CLASSES, made_store, random_image, random_store

from distseg.config.settings import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from distseg.config.sizes import Size
from distseg.data import sample_reader
from distseg.data.augment import Turn
from distseg.data.intensity import Intensity
from distseg.data.loader import pieces
from distseg.data.sample_reader import (
    label_bytes,
    pixel_bytes,
    read_labels,
    read_patches,
    read_pixels,
)
from distseg.data.sampler import Sample, epoch_samples
from distseg.data.store.store import Store, StoreWriter
from distseg.data.warp import Elastic, Reading, Warp
from distseg.tiling.tile import Box, ReceptiveField
from distseg.training.verify import verify

EVERYTHING = dict(
    augment=["flip", "turn", "colour"],
    augment_scale=[0.6, 1.6],
    augment_rotate=[-180, 180],
    augment_elastic=[0, 5],
    augment_smoothness=13.0,
    augment_blur=[0, 1.5],
    augment_gamma=[0.6, 1.6],
    augment_contrast=[0.75, 1.25],
    augment_brightness=[-0.3, 0.3],
    augment_noise=[0, 0.2],
    augment_share=0.8,
)
SIZES = {"2 dims": (61, 47), "3 dims": (13, 23, 19)}


def store_with_holes(path, size):
    """An image whose bands lack data at some pixels each, some at the same ones."""
    pixels, labels = random_image(size, seed=1)
    random = np.random.default_rng(2)
    pixels[random.random(pixels.shape) < 0.02] = 0
    pixels[:, random.random(size) < 0.02] = 0
    with StoreWriter(path, CLASSES, 2) as writer:
        image = writer.add_image("a", size, pixels.dtype, "train", True, nodata=0)
        image.write(Box.whole(size), pixels, labels)
    return Store(path)


@pytest.fixture(scope="module", params=SIZES)
def store(request, tmp_path_factory):
    return store_with_holes(tmp_path_factory.mktemp("s") / "s.h5", SIZES[request.param])


def random_boxes(size, count, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(count):
        start = [int(random.integers(0, n)) for n in size]
        yield Box(tuple(start), tuple(int(random.integers(a, n)) + 1 for a, n in zip(start, size)))


def bits(array):
    return np.ascontiguousarray(array).tobytes()


# a box has the bits of the whole


@pytest.mark.parametrize("cropped", [True, False], ids=["crops", "whole images"])
def test_a_box_has_the_bits_that_it_has_in_the_whole_sample(store, cropped):
    (name,) = store.split("train")
    crop = Size(tuple(n * 2 // 3 for n in store.size(name))) if cropped else None
    tilt = [-30, 30] if len(store.size(name)) == 3 else None
    data = DataConfig(crop=crop, augment_tilt=tilt, **EVERYTHING)
    samples = [
        sample
        for epoch in range(10)
        for step in epoch_samples(store, "train", data, 0, epoch, 1)
        for sample in step
    ][:6]
    assert {s.warp is None for s in samples} | {s.intensity.margin > 0 for s in samples} == {
        False,
        True,
    }
    for number, sample in enumerate(samples):
        pixels = read_pixels(store, [sample], Box.whole(sample.size))[0]
        labels = read_labels(store, [sample], Box.whole(sample.size))[0].numpy()
        assert pixels.dtype == np.float32 and labels.dtype == np.uint8
        assert pixels.shape[1:] == labels.shape == sample.size
        for box in random_boxes(sample.size, 6, number):
            assert bits(read_pixels(store, [sample], box)[0]) == bits(
                pixels[(slice(None), *box.slices)]
            )
            assert bits(read_labels(store, [sample], box)[0]) == bits(labels[box.slices])
            assert bits(read_patches(store, sample, [box])[0]) == bits(
                pixels[(slice(None), *box.slices)]
            )


def test_the_tiles_of_ranks_are_the_whole_sample(tmp_path):
    store = random_store(tmp_path / "s.h5", train=[(97, 131), (80, 80)])
    data = DataConfig(crop=Size("45x52"), **EVERYTHING)
    samples = epoch_samples(store, "train", data, 3, 0, 3)[0]
    seen = 0
    for coordinates in product(range(2), range(3)):
        reach = ReceptiveField((5, 5), (4, 4))
        for piece in pieces(store, samples, Size("2x3"), Size("1x1"), coordinates, reach):
            place = piece.place
            for k, image in enumerate(place.images):
                whole = Box.whole(samples[image].size)
                pixels = read_pixels(store, [samples[image]], whole)[0]
                labels = read_labels(store, [samples[image]], whole)[0]
                assert bits(piece.pixels[k]) == bits(pixels[(slice(None), *place.window.slices)])
                assert bits(piece.labels[k]) == bits(labels[place.tile.slices])
                seen += place.tile.pixels
    assert seen == sum(math.prod(sample.size) for sample in samples)


@pytest.mark.parallel(2)
def test_the_gradient_is_exact_with_every_augmentation(comm, shared_path):
    if comm.rank == 0:
        random_store(shared_path / "store.h5", train=[(29, 43), (40, 36)])
    comm.Barrier()
    found = Config(
        mesh=MeshConfig(tiles=Size("1x2")),
        model=ModelConfig(in_channels=2, out_channels=3, depth=1, num_convs=1, base_channels=2),
        data=DataConfig(store=str(shared_path / "store.h5"), crop=Size("24x28"), **EVERYTHING),
        train=TrainConfig(seed=1),
    )
    report = verify(found, comm)
    assert comm.bcast(report and report["max_error"]) <= 1e-12


def test_a_large_warped_box_is_read_in_parts(store, monkeypatch):
    (name,) = store.split("train")
    size = store.size(name)
    warp = Warp(
        size, 0.5, 30.0, Elastic(1, 2.0, 8.0, (-3,) * len(size), tuple(n + 3 for n in size))
    )
    sample = plain(store, name, warp=warp, intensity=Intensity(blur=0.7))
    whole, asked = Box.whole(size), []
    pixels, labels = read_pixels(store, [sample], whole), read_labels(store, [sample], whole)
    monkeypatch.setattr(sample_reader, "_AT_ONCE", 200)
    for kind in ("read", "labels"):
        read = getattr(store, kind)
        monkeypatch.setattr(
            store, kind, lambda name, box, read=read: asked.append(box) or read(name, box)
        )
    assert bits(read_pixels(store, [sample], whole)) == bits(pixels)
    assert sum(box.pixels for box in asked) * 2 == pixel_bytes(store, sample, whole)
    assert bits(read_labels(store, [sample], whole)) == bits(labels)
    assert len(asked) > 4


# warps


def test_a_quarter_turn_is_rot90():
    image = np.random.default_rng(0).standard_normal((2, 9, 9)).astype(np.float32)
    found, gone = warped(Warp((9, 9), degrees=90), image, (0, 0))
    assert np.allclose(found, np.rot90(image, axes=(1, 2)), atol=1e-5) and gone is None


@pytest.mark.parametrize("tilts, dims", [((90, 0), (0, 1)), ((0, 90), (0, 2))])
def test_a_tilt_by_a_quarter_turn_is_rot90_in_its_plane(tilts, dims):
    volume = np.random.default_rng(0).standard_normal((2, 5, 5, 5)).astype(np.float32)
    found, _ = warped(Warp((5, 5, 5), tilts=tilts), volume, (0, 0, 0))
    assert np.allclose(found, np.rot90(volume, axes=(dims[0] + 1, dims[1] + 1)), atol=1e-5)


def test_a_volume_is_rotated_and_then_tilted():
    volume = np.random.default_rng(0).standard_normal((1, 5, 5, 5)).astype(np.float32)
    found, _ = warped(Warp((5, 5, 5), degrees=90, tilts=(90, 90)), volume, (0, 0, 0))
    expected = np.rot90(np.rot90(np.rot90(volume, axes=(2, 3)), axes=(1, 3)), axes=(1, 2))
    assert np.allclose(found, expected, atol=1e-5)


def test_zoom_by_two_shows_the_middle_at_half_steps():
    image = np.arange(49, dtype=np.float32).reshape(1, 7, 7)
    found, _ = warped(Warp((5, 5), scale=2), image, (1, 1))
    assert found[0, 2].tolist() == [23, 23.5, 24, 24.5, 25]
    assert found[0, :, 2].tolist() == [17, 20.5, 24, 27.5, 31]


def warped(warp, image, origin, absent=None):
    reading = Reading(warp, Box.whole(warp.size), origin, image.shape[1:])
    pad = [(0, 0), *((3, 3) for _ in origin)]
    source = reading.source.shifted((3,) * len(origin))
    holes = np.zeros((1, *image.shape[1:]), bool) if absent is None else absent
    holes = np.pad(holes, pad, constant_values=True)[(slice(None), *source.slices)]
    pixels = np.pad(np.where(absent, 0, image) if absent is not None else image, pad)
    return reading.pixels(np.ascontiguousarray(pixels[(slice(None), *source.slices)]), holes)


def spline(t):
    """Return the cubic B-spline of width 4 around 0, by its definition."""
    t = abs(t)
    return (4 - 6 * t**2 + 3 * t**3) / 6 if t < 1 else max(0.0, 2 - t) ** 3 / 6


@pytest.mark.parametrize("dims", [2, 3])
def test_displacements_by_the_definition_of_the_spline(dims):
    elastic = Elastic(5, 3.0, 4.5, (-2,) * dims, (11,) * dims)
    box = Box((-2, 3, 0)[:dims], (5, 6, 2)[:dims])
    found = elastic.displacements(box)
    counts = [range(-2, 5)] * dims
    vectors = elastic._vectors([(-2, 5)] * dims)
    assert abs(vectors).max() <= 3 and abs(found).max() <= 3
    related = np.corrcoef(vectors.reshape(dims, -1)) - np.eye(dims)
    assert abs(related).max() < 0.4, "the coordinates of a vector are drawn independently"
    for index in np.ndindex(*box.size):
        position = [a + i for a, i in zip(box.start, index)]
        weights = [[spline(p / 4.5 - k) for k in ks] for p, ks in zip(position, counts)]
        weight = weights[0]
        for more in weights[1:]:
            weight = np.multiply.outer(weight, more)
        expected = [(weight * vectors[d]).sum() for d in range(dims)]
        assert np.allclose(found[(slice(None), *index)], expected, atol=1e-5)


@pytest.mark.parametrize("dims", [2, 3])
def test_the_largest_displacement_folds_no_image(dims):
    least = []
    for key in range(20):
        elastic = Elastic(key, 0.4 * 8, 8.0, (0,) * dims, (24,) * dims)
        moved = elastic.displacements(Box.whole((24,) * dims)).astype(np.float64)
        slopes = np.stack([np.stack(np.gradient(one)) for one in moved])
        jacobians = np.moveaxis(slopes, (0, 1), (-2, -1)) + np.eye(dims)
        least.append(np.linalg.det(jacobians).min())
    assert min(least) > 0 and len(set(least)) == 20


@pytest.mark.parametrize("dims", [2, 3])
def test_a_warp_by_its_definition(dims):
    """Pixel by pixel: the neighbours that have data, by their weights, unless the nearest has none."""
    image, size = (11, 9, 8)[-dims:], (7, 6, 5)[-dims:]
    random = np.random.default_rng(dims)
    pixels = random.standard_normal((2, *image)).astype(np.float32)
    absent = random.random((2, *image)) < 0.1
    labels = random.integers(0, 9, image).astype(np.uint8)
    elastic = Elastic(1, 1.5, 4.0, (0,) * dims, size)
    warp, origin = Warp(size, 0.7, 25.0, elastic), (1, 2, 3)[:dims]
    reading = Reading(warp, Box.whole(size), origin, image)
    found, gone = warped(warp, pixels, origin, absent)
    moved = elastic.displacements(Box.whole(size))
    cosine, sine = math.cos(math.radians(25)), math.sin(math.radians(25))
    outside = 0
    for index in np.ndindex(*size):
        centre = [(n - 1) / 2 for n in size]
        v = [i + m - c for i, m, c in zip(index, moved[(slice(None), *index)], centre)]
        v[-2:] = cosine * v[-2] + sine * v[-1], cosine * v[-1] - sine * v[-2]
        at = [o + c + x / 0.7 for o, c, x in zip(origin, centre, v)]
        near = tuple(math.floor(x + 0.5) for x in at)
        there = all(0 <= k < n for k, n in zip(near, image))
        outside += not there
        for band in range(2):
            total = weights = 0.0
            for corner in product((0, 1), repeat=dims):
                cell = tuple(math.floor(x) + c for x, c in zip(at, corner))
                if all(0 <= k < n for k, n in zip(cell, image)) and not absent[(band, *cell)]:
                    weight = math.prod(1 - abs(x - k) for x, k in zip(at, cell))
                    total, weights = total + weight * pixels[(band, *cell)], weights + weight
            data = there and not absent[(band, *near)]
            assert gone[(band, *index)] == (not data)
            expected = total / weights if data else 0
            assert abs(found[(band, *index)] - expected) < 1e-4
    assert outside
    source = reading.source
    padded = np.pad(labels, 3, constant_values=255)[source.shifted((3,) * dims).slices]
    got = reading.labels(np.ascontiguousarray(padded))
    assert (got == 255).sum() == outside and (got < 9).sum() == got.size - outside


def test_warped_pixels_are_those_of_grid_sample():
    image = np.random.default_rng(0).standard_normal((1, 41, 37)).astype(np.float32)
    warp = Warp((21, 17), 1.2, 33.0, Elastic(3, 2.0, 9.0, (0, 0), (21, 17)))
    found, gone = warped(warp, image, (10, 9))
    y, x = warp.positions(Box.whole((21, 17)))
    grid = np.stack([(x + 9) / 36 * 2 - 1, (y + 10) / 40 * 2 - 1], -1).astype(np.float32)
    expected = torch.nn.functional.grid_sample(
        torch.from_numpy(image)[None], torch.from_numpy(grid)[None], align_corners=True
    )[0]
    assert gone is None and np.allclose(found, expected, atol=1e-4)


# pixels from outside the image


def plain(store, name, **more):
    size = store.size(name)
    return Sample(name, Box.whole(size), Turn.none(len(size)), 0, **more)


def test_pixels_from_outside_the_image_are_0_and_ignored(tmp_path):
    store = made_store(tmp_path / "s.h5", {"a": ("train", *random_image((24, 20)))})
    sample = plain(store, "a", warp=Warp((24, 20), scale=0.5), intensity=Intensity(blur=1.0))
    pixels = read_pixels(store, [sample], Box.whole((24, 20)))[0]
    labels = read_labels(store, [sample], Box.whole((24, 20)))[0].numpy()
    inside = np.zeros((24, 20), bool)
    inside[6:18, 5:15] = True
    assert not pixels[:, ~inside].any() and (labels[~inside] == 255).all()
    assert pixels[:, inside].all()
    stored = store.labels("a", Box.whole((24, 20)))[1::2, 1::2]
    assert np.array_equal(labels[6:18, 5:15], stored)
    corner = Box((0, 0), (4, 3))  # comes from outside altogether
    assert not read_pixels(store, [sample], corner).any()
    assert pixel_bytes(store, sample, corner) <= 8 and label_bytes(store, sample, corner) <= 1


def test_no_change_of_values_gives_data_to_pixels_without_data(tmp_path):
    store = store_with_holes(tmp_path / "s.h5", (30, 30))
    holes = store.read("a", Box.whole((30, 30))) == 0
    values = [f"augment_{name}" for name in ("blur", "gamma", "contrast", "brightness", "noise")]
    data = DataConfig(augment=["colour"], **{name: EVERYTHING[name] for name in values})
    (sample,) = epoch_samples(store, "train", data, 0, 0, 1)[0]
    pixels = read_pixels(store, [sample], Box.whole((30, 30)))[0]
    assert sample.warp is None and sample.intensity.margin and holes.any()
    assert np.array_equal(pixels == 0, holes)


def test_bytes_that_are_read(tmp_path):
    store = random_store(tmp_path / "s.h5", train=[(60, 70)])
    sample = Sample("train0", Box((20, 20), (40, 44)), Turn.none(2), 0)
    box = Box((0, 0), (6, 8))
    assert (pixel_bytes(store, sample, box), label_bytes(store, sample, box)) == (96, 48)
    blurred = replace(sample, intensity=Intensity(blur=0.6))
    assert (pixel_bytes(store, blurred, box), label_bytes(store, blurred, box)) == (2 * 10 * 12, 48)
    zoomed = replace(sample, warp=Warp((20, 24), scale=2.0))
    assert label_bytes(store, zoomed, box) == 5 * 6  # rows 4.75 to 7.25, columns 5.75 to 9.25


# changes of values


@pytest.mark.parametrize("dims", [2, 3])
def test_blur_is_a_normalised_convolution(dims):
    size = (12, 9, 10)[:dims]
    random = np.random.default_rng(0)
    absent = random.random((1, *size)) < 0.2
    pixels = np.where(absent, 0, random.standard_normal((1, *size))).astype(np.float32)
    found, gone = Intensity(blur=0.9).blurred(pixels, absent)
    axis = np.exp(-0.5 * (np.arange(-3, 4) / 0.9) ** 2)
    kernel = axis
    for _ in range(dims - 1):
        kernel = np.multiply.outer(kernel, axis)
    filtered = getattr(torch.nn.functional, f"conv{dims}d")
    sums, weights = (
        filtered(torch.from_numpy(np.float64(x))[None], torch.from_numpy(kernel)[None, None])[0]
        for x in (pixels, ~absent)
    )
    inside = absent[(slice(None), *(slice(3, -3) for _ in size))]
    assert np.array_equal(gone, inside) and not found[inside].any()
    assert np.allclose(found[~inside], (sums / weights).numpy()[~inside], atol=1e-5)


def test_gamma_contrast_and_brightness_by_their_formulas():
    values = np.array([[[-4, -3, -1.5, 0, 1.5, 3, 4]]], np.float32)
    box = Box.whole((1, 7))
    got = Intensity(gamma=2.0).changed(values, box, (1, 7))[0, 0]
    assert np.allclose(got, [-4, -3, -2.625, -1.5, 0.375, 3, 4], atol=1e-6)
    got = Intensity(contrast=2.0, brightness=0.5).changed(values, box, (1, 7))
    assert np.array_equal(got, 2 * values + np.float32(0.5))


def test_noise_has_its_deviation_and_bands_differ():
    zeros, box = np.zeros((6, 200, 200), np.float32), Box.whole((200, 200))
    noise = Intensity(noise=0.1, key=3).changed(zeros, box, (200, 200))
    assert np.allclose(noise.std((1, 2)), 0.1, rtol=0.02) and abs(noise.mean()) < 1e-3
    together = np.corrcoef(np.concatenate([noise[:, :, 1:], noise[:, :, :-1]]).reshape(12, -1))
    assert abs(together - np.eye(12)).max() < 0.03
    other = Intensity(noise=0.1, key=4).changed(zeros, box, (200, 200))
    assert abs(np.corrcoef(noise[0].ravel(), other[0].ravel())[0, 1]) < 0.03


# draws


def test_no_two_pixels_of_a_turned_sample_share_their_noise(tmp_path):
    image = np.full((2, 24, 40), 100, np.uint8), np.zeros((24, 40), np.uint8)
    store = made_store(tmp_path / "s.h5", {"a": ("train", *image)})
    noise = Intensity(noise=0.5, key=3)
    sample = replace(plain(store, "a", intensity=noise), turn=Turn((False, False), 1))
    (noisy,) = read_pixels(store, [sample], Box.whole(sample.size))
    assert noisy.shape == (2, 40, 24) and len(np.unique(noisy.reshape(2, -1), axis=1).T) == 960


def test_the_margin_for_blur_has_elastic_vectors_of_its_own(tmp_path):
    store = random_store(tmp_path / "s.h5", train=[(60, 70)])
    data = DataConfig(augment_elastic=[1, 2], augment_smoothness=5.0, augment_blur=[4, 4])
    (sample,) = epoch_samples(store, "train", data, 0, 0, 1)[0]
    assert sample.intensity.margin == 12
    ranges = [((-12) // 5 - 1, (n + 11) // 5 + 3) for n in (60, 70)]
    every = sample.warp.elastic._vectors(ranges)
    assert len(np.unique(every)) > 0.99 * every.size


def test_draws_fill_their_ranges_and_the_share(tmp_path):
    store = random_store(tmp_path / "s.h5", train=[(40, 40)])
    data = DataConfig(
        crop=Size("8x8"), epoch_samples=400, augment_scale=[0.5, 2], augment_noise=[0.1, 0.3],
        augment_share=0.5,
    )  # fmt: skip
    samples = [s for step in epoch_samples(store, "train", data, 0, 0, 1) for s in step]
    scales = np.array([s.warp.scale for s in samples if s.warp])
    noises = np.array([s.intensity.noise for s in samples if s.intensity.noise])
    assert 0.5 <= scales.min() < 0.55 and 1.9 < scales.max() <= 2
    assert abs(np.log(scales).mean()) < 0.08
    assert 0.1 <= noises.min() < 0.11 and 0.29 < noises.max() <= 0.3
    assert 160 < len(scales) < 240 and 160 < len(noises) < 240
    both = sum(s.warp is not None and s.intensity.noise > 0 for s in samples)
    assert 70 < both < 130


def test_labels_of_whole_images_are_not_changed(tmp_path):
    with StoreWriter(tmp_path / "s.h5", CLASSES, 2) as writer:
        image = writer.add_image("a", (30, 30), np.uint8, "train", False, label=2)
        image.write(Box.whole((30, 30)), random_image((30, 30))[0], None)
    store = Store(tmp_path / "s.h5")
    (sample,) = epoch_samples(store, "train", DataConfig(**EVERYTHING), 0, 0, 1)[0]
    assert read_labels(store, [sample], Box.whole(sample.size)).flatten().tolist() == [2]
    assert np.isfinite(read_pixels(store, [sample], Box.whole(sample.size))).all()
