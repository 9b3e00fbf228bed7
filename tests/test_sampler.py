"""Turns as index maps, and the samples of an epoch: what is drawn, how often, and that nothing but the keys decides it."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from made_store import made_store, random_image, random_store

from distseg.config.settings import DataConfig
from distseg.config.sizes import Size
from distseg.data.augment import Turn
from distseg.data.sampler import epoch_samples
from distseg.tiling.tile import Box

TURNS = [
    Turn(flips, quarters) for flips in product((False, True), repeat=2) for quarters in range(4)
]


def every(steps):
    return [sample for step in steps for sample in step]


# turns


def test_turns_as_pictures():
    crop = np.array(["a.", "b.", "cd"], dtype=object).astype("U2").view("U1").reshape(3, 2)

    def picture(turn):
        return ["".join(row) for row in turn.apply(crop)]

    assert picture(Turn((False, False))) == ["a.", "b.", "cd"]
    assert picture(Turn((False, False), 1)) == ["..d", "abc"]
    assert picture(Turn((False, False), 2)) == ["dc", ".b", ".a"]
    assert picture(Turn((False, False), 3)) == ["cba", "d.."]
    assert picture(Turn((False, True))) == [".a", ".b", "dc"]
    assert picture(Turn((True, False), 1)) == ["abc", "..d"]


def test_the_turns_are_the_eight_of_a_square():
    square = np.arange(9).reshape(3, 3)
    assert len({turn.apply(square).tobytes() for turn in TURNS}) == 8


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("size", [(7, 12), (5, 5), (1, 4)])
def test_a_window_of_the_turned_is_the_turned_window(turn, size):
    crop = np.arange(3 * size[0] * size[1]).reshape(3, *size)
    whole = turn.apply(crop)
    assert whole.shape[1:] == turn.size(size) and whole.flags.c_contiguous
    for y0, x0 in np.ndindex(turn.size(size)):
        for y1, x1 in ((y0 + 1, x0 + 1), turn.size(size)):
            box = Box((y0, x0), (y1, x1))
            source = turn.source(box, size)
            assert np.array_equal(
                turn.apply(crop[(slice(None), *source.slices)]), whole[(slice(None), *box.slices)]
            )


def test_volumes_turn_in_their_last_two_dims():
    volume, turn, box = (
        np.arange(4 * 5 * 6).reshape(4, 5, 6),
        Turn((True, False, True), 3),
        Box((1, 2, 0), (3, 6, 4)),
    )
    source = turn.source(box, (4, 5, 6))
    assert np.array_equal(turn.apply(volume[source.slices]), turn.apply(volume)[box.slices])


# whole images


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Five training images of several sizes, about 33,000 pixels, of which the lakes are 9 each."""
    return random_store(
        tmp_path_factory.mktemp("s") / "s.h5",
        train=[(97, 131), (80, 80), (64, 70), (100, 40), (70, 70)],
        val=[(50, 50)],
    )


def test_whole_images_are_a_permutation_that_starts_anew_to_fill_the_last_step(store):
    steps = epoch_samples(store, "train", DataConfig(), seed=0, epoch=0, batch=3)
    assert [len(step) for step in steps] == [3, 3]
    names = [s.image for s in every(steps)]
    assert sorted(names[:5]) == store.split("train") and names[5] == names[0]
    assert all(s.box == Box.whole(store.size(s.image)) for s in every(steps))
    assert [s.number for s in every(steps)] == list(range(6))


def test_a_batch_larger_than_the_split(store):
    (step,) = epoch_samples(store, "train", DataConfig(), 0, 0, 12)
    assert sorted(Counter(s.image for s in step).values()) == [2, 2, 2, 3, 3]


def test_an_order_of_its_own_for_every_epoch_and_seed(store):
    orders = {
        tuple(s.image for s in every(epoch_samples(store, "train", DataConfig(), seed, epoch, 1)))
        for seed, epoch in product(range(3), range(3))
    }
    assert len(orders) > 6


def test_a_step_does_not_depend_on_those_before_it(store):
    data = DataConfig(crop=Size("32x48"), augment=["flip", "turn"], focus_class="lake")
    steps = epoch_samples(store, "train", data, 7, 2, 4)
    assert steps[5] == list(epoch_samples(store, "train", data, 7, 2, 4))[5]


def test_the_batch_only_cuts_the_sequence_of_samples(store):
    data = DataConfig(
        crop=Size("32x48"), augment=["flip", "turn"], focus_class="lake", epoch_samples=24
    )
    assert every(epoch_samples(store, "train", data, 7, 2, 4)) == every(
        epoch_samples(store, "train", data, 7, 2, 6)
    )


# crops


def test_as_many_crops_as_cover_the_pixels_once(store):
    steps = epoch_samples(store, "train", DataConfig(crop=Size("32x48")), 0, 0, 4)
    pixels = sum(np.prod(store.size(name)) for name in store.split("train"))
    assert len(steps) == math.ceil(math.ceil(int(pixels) / (32 * 48)) / 4)
    assert (
        len(
            epoch_samples(store, "train", DataConfig(crop=Size("32x48"), epoch_samples=10), 0, 0, 4)
        )
        == 3
    )


def test_images_smaller_than_the_crop_are_not_skipped(tmp_path):
    """Nine images of 20x20 and one of 100x100, crop 50x50: 9 crops and 4 cover them; by the nominal crop it was 6, of which the small ones got 2."""
    images = {f"s{k}": ("train", *random_image((20, 20), seed=k)) for k in range(9)}
    store = made_store(tmp_path / "s.h5", images | {"big": ("train", *random_image((100, 100)))})
    data = DataConfig(crop=Size("50x50"))
    assert len(epoch_samples(store, "train", data, 0, 0, 1)) == 9 + 4
    drawn = Counter(
        s.image
        for epoch in range(300)
        for s in every(epoch_samples(store, "train", data, 0, epoch, 1))
    )
    assert (
        abs(drawn.pop("big") / 300 - 4) < 0.3
        and len(drawn) == 9
        and all(abs(count / 300 - 1) < 0.25 for count in drawn.values())
    )


@pytest.mark.parametrize(
    "size, crop, count",
    [
        ((40, 40), "50x50", 1),
        ((40, 100), "50x50", 2),
        ((40, 101), "50x50", 3),
        ((100, 40), "50x200", 2),
        ((7, 9), "7x9", 1),
    ],
)
def test_a_crop_counts_as_far_as_the_image_goes(tmp_path, size, crop, count):
    store = made_store(tmp_path / "s.h5", {"a": ("train", *random_image(size))})
    assert len(epoch_samples(store, "train", DataConfig(crop=Size(crop)), 0, 0, 1)) == count


def test_images_are_drawn_by_their_pixels_and_crops_evenly(store):
    samples = every(
        epoch_samples(store, "train", DataConfig(crop=Size("32x40"), epoch_samples=4000), 0, 0, 1)
    )
    drawn = Counter(s.image for s in samples)
    pixels = {name: np.prod(store.size(name)) for name in store.split("train")}
    for name, count in drawn.items():
        assert abs(count / 4000 - pixels[name] / sum(pixels.values())) < 0.03
    starts = np.array([s.box.start for s in samples if s.image == "train0"])
    assert starts.min(0).tolist() == [0, 0] and starts.max(0).tolist() == [97 - 32, 131 - 40]
    assert np.allclose(starts.mean(0), [32.5, 45.5], atol=3)


def test_a_crop_is_clipped_to_a_small_image(store):
    for s in every(
        epoch_samples(store, "train", DataConfig(crop=Size("75x90"), augment=["turn"]), 0, 0, 1)
    ):
        assert s.size == tuple(min(a, b) for a, b in zip(store.size(s.image), (75, 90)))
        assert Box.whole(store.size(s.image)).contains(s.box)


def test_quarter_turns_only_where_the_turned_crop_fits(store):
    samples = every(
        epoch_samples(
            store,
            "train",
            DataConfig(crop=Size("32x75"), augment=["turn"], epoch_samples=600),
            0,
            0,
            1,
        )
    )
    quarters = {
        name: sorted({s.turn.quarters for s in samples if s.image == name})
        for name in store.split("train")
    }
    #                     97x131                  80x80                   64x70             100x40: crop 32x40       70x70
    assert quarters == {
        "train0": [0, 1, 2, 3],
        "train1": [0, 1, 2, 3],
        "train2": [0, 2],
        "train3": [0, 1, 2, 3],
        "train4": [0, 1, 2, 3],
    }
    assert all(s.box.size == s.turn.size(s.size) for s in samples)


def test_augmentation_is_even(store):
    samples = every(
        epoch_samples(
            store,
            "train",
            DataConfig(crop=Size("32x32"), augment=["flip", "turn"], epoch_samples=3200),
            0,
            0,
            1,
        )
    )
    counts = Counter(s.turn for s in samples)
    assert len(counts) == 16 and min(counts.values()) > 140 and max(counts.values()) < 270
    plain = every(epoch_samples(store, "train", DataConfig(crop=Size("32x32")), 0, 0, 1))
    assert {s.turn for s in plain} == {Turn.none(2)}


# crops near a rare class


def lake_inside(store, sample):
    return (store.labels(sample.image, sample.box) == 2).any()


@pytest.mark.parametrize("crop", ["40x40", "9x24", "90x90"])
def test_focused_crops_hold_the_class(store, crop):
    data = DataConfig(
        crop=Size(crop), focus_class="lake", focus_share=1.0, augment=["turn"], epoch_samples=200
    )
    assert all(lake_inside(store, s) for s in every(epoch_samples(store, "train", data, 0, 0, 1)))


def test_only_the_share_is_focused(store):
    data = DataConfig(crop=Size("16x16"), focus_class="lake", focus_share=0.25, epoch_samples=1000)
    inside = [lake_inside(store, s) for s in every(epoch_samples(store, "train", data, 0, 0, 1))]
    plain = DataConfig(crop=Size("16x16"), epoch_samples=1000)
    chance = np.mean(
        [lake_inside(store, s) for s in every(epoch_samples(store, "train", plain, 0, 0, 1))]
    )
    assert abs(np.mean(inside) - (0.25 + 0.75 * chance)) < 0.05


def test_classes_are_drawn_by_their_weights(store):
    def shares(weights):
        data = DataConfig(
            crop=Size("1x1"), focus_weights=weights, focus_share=1.0, epoch_samples=600
        )
        samples = every(epoch_samples(store, "train", data, 0, 0, 1))
        found = [(int(store.labels(s.image, s.box).item()), s.image) for s in samples]
        assert len({image for label, image in found if label == 2}) == 5  # all have a lake
        return [sum(label == k for label, _ in found) / 600 for k in range(3)]

    assert np.allclose(shares("equal"), [1 / 3] * 3, atol=0.07)
    assert np.allclose(shares({"lake": 3, "ocean": 1}), [0.25, 0, 0.75], atol=0.07)


def test_equal_weights_leave_out_a_class_without_pixels(tmp_path):
    store = made_store(tmp_path / "s.h5", {"a": ("train", *random_image((50, 50), lakes=False))})
    data = DataConfig(crop=Size("1x1"), focus_weights="equal", focus_share=1.0, epoch_samples=300)
    found = Counter(
        int(store.labels(s.image, s.box).item())
        for s in every(epoch_samples(store, "train", data, 0, 0, 1))
    )
    assert set(found) == {0, 1} and 100 < found[0] < 200


def test_a_single_weight_is_the_focus_class(store):
    one, weighted = (
        DataConfig(crop=Size("8x8"), focus_share=0.5, epoch_samples=50, **focus)
        for focus in (dict(focus_class="lake"), dict(focus_weights={"lake": 0.2}))
    )
    assert every(epoch_samples(store, "train", one, 0, 0, 1)) == every(
        epoch_samples(store, "train", weighted, 0, 0, 1)
    )


def test_a_focused_sample_reads_the_labels_of_one_block(store, monkeypatch):
    data = DataConfig(crop=Size("8x8"), focus_weights="equal", focus_share=1.0, epoch_samples=20)
    steps = epoch_samples(store, "train", data, 0, 0, 1)
    asked, labels = [], store.labels
    monkeypatch.setattr(store, "labels", lambda name, box: asked.append(box) or labels(name, box))
    assert len(every(steps)) == len(asked) == 20
    assert all(max(box.size) <= store.block for box in asked)


def test_blocks_are_found_with_the_square_root_of_their_pixels(tmp_path):
    """A lake of 7 pixels in a corner block and a pixel in another; in another image a pixel in each of two blocks."""
    images = {}
    for name, spots in dict(
        a=[*((129, x) for x in range(100, 107)), (3, 5)], b=[(0, 0), (70, 3)]
    ).items():
        pixels, labels = random_image((130, 110), lakes=False)
        for spot in spots:
            labels[spot] = 2
        images[name] = ("train", pixels, labels)
    store = made_store(tmp_path / "s.h5", images)
    data = DataConfig(crop=Size("1x1"), focus_class="lake", focus_share=1.0, epoch_samples=2000)
    found = Counter(
        (s.image, s.box.start) for s in every(epoch_samples(store, "train", data, 0, 0, 1))
    )
    row = [count for (name, (y, _)), count in found.items() if (name, y) == ("a", 129)]
    single = [count for (name, (y, _)), count in found.items() if (name, y) != ("a", 129)]
    share = 7**0.5 / (7**0.5 + 3)
    assert len(row) == 7 and len(single) == 3
    assert abs(sum(row) - 2000 * share) < 90 and min(row) > 90 and min(single) > 290


def test_focused_crops_are_centred_with_jitter(tmp_path):
    pixels, labels = random_image((300, 300), lakes=False)
    labels[150, 140] = 2
    store = made_store(tmp_path / "s.h5", {"a": ("train", pixels, labels)})
    data = DataConfig(crop=Size("40x60"), focus_class="lake", focus_share=1.0, epoch_samples=500)
    inside = np.array(
        [
            (150 - s.box.start[0], 140 - s.box.start[1])
            for s in every(epoch_samples(store, "train", data, 0, 0, 1))
        ]
    )
    assert inside.min(0).tolist() == [10, 15] and inside.max(0).tolist() == [29, 44]


# settings that cannot be


@pytest.mark.parametrize(
    "split, data, message",
    [
        ("test", DataConfig(), "no split 'test': choose train, val"),
        (
            "train",
            DataConfig(crop=Size("8x8"), focus_class="sea"),
            "'sea', which is no class of .*: choose ocean, land, lake",
        ),
        ("train", DataConfig(focus_class="lake"), "the samples are whole images: set data.crop"),
        (
            "train",
            DataConfig(crop=Size("8x8"), focus_weights={"lake": 1, "{sea": 1}),
            "data.focus_weights has '{sea', which is no class of .*: choose ocean, land, lake",
        ),
        ("train", DataConfig(focus_weights="equal"), "leave data.focus_weights out"),
        (
            "train",
            DataConfig(augment_tilt=[-9, 9]),
            r"data.augment_tilt is \[-9, 9\], but image 'train0' has 2 dims .* only volumes",
        ),
        (
            "train",
            DataConfig(crop=Size("8x8x8")),
            "data.crop is 8x8x8, but image 'train0' has 2 dims",
        ),
    ],
)
def test_refused(store, split, data, message):
    with pytest.raises(ValueError, match=message):
        epoch_samples(store, split, data, 0, 0, 1)


def test_a_focus_class_without_pixels(tmp_path):
    store = made_store(
        tmp_path / "s.h5",
        {
            "a": ("train", *random_image((50, 50), lakes=False)),
            "b": ("val", *random_image((50, 50))),
        },
    )
    for focus in (dict(focus_class="lake"), dict(focus_weights={"land": 1, "lake": 1})):
        with pytest.raises(ValueError, match="'lake', but the split 'train' .* has no pixel"):
            epoch_samples(store, "train", DataConfig(crop=Size("8x8"), **focus), 0, 0, 1)


def test_colours_differ_by_sample_and_lie_in_their_range(store):
    data = DataConfig(crop=Size("32x32"), augment=["colour"], epoch_samples=200)
    colours = [s.colour for s in every(epoch_samples(store, "train", data, 0, 0, 1))]
    assert len(set(colours)) == 200
    gains, offsets = (
        np.array([getattr(c, field) for c in colours]) for field in ("gains", "offsets")
    )
    assert np.exp(-0.25) <= gains.min() < 0.8 and 1.2 < gains.max() <= np.exp(0.25)
    assert -0.25 <= offsets.min() < -0.24 and 0.24 < offsets.max() <= 0.25
    assert abs(np.log(gains).mean()) < 0.02 and abs(offsets.mean()) < 0.02
