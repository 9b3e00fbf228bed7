"""What ranks read: together the whole images in every layout, each only its windows, ahead of time and in order."""

import threading
import time
from itertools import product

import numpy as np
import pytest
import torch
from made_store import made_store, random_image, random_store

from distseg.config.settings import DataConfig
from distseg.config.sizes import Size
from distseg.data.loader import StepLoader, pieces
from distseg.data.prefetch import prefetch
from distseg.data.sampler import epoch_samples
from distseg.tiling.tile import Box, ReceptiveField

REACH = ReceptiveField((5, 5), (4, 4))
ONE = Size("1x1")
CROPS = DataConfig(
    crop=Size("40x52"), augment=["flip", "turn"], focus_class="lake", images=2, prefetch=0
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(
        tmp_path_factory.mktemp("s") / "s.h5",
        train=[(97, 131), (80, 80), (64, 70), (97, 131)],
        val=[(50, 50)],
    )


def loader(
    store,
    data=CROPS,
    grid=ONE,
    per_rank=ONE,
    coordinates=(0, 0),
    split="train",
    groups=1,
    group=0,
    accumulate=1,
    reach=REACH,
    streaming=False,
):
    return StepLoader(
        store, split, data, seed=3, groups=groups, group=group, accumulate=accumulate,
        grid=grid, per_rank=per_rank, coordinates=coordinates, reach=reach, streaming=streaming,
    )  # fmt: skip


def ranks(grid):
    return product(*(range(g) for g in grid))


def whole_samples(store, samples):
    """The turned samples by definition: the whole is read, normalised and turned."""
    found = []
    for s in samples:
        mean, std = (v.astype("f4")[:, None, None] for v in (store.mean, store.std))
        pixels = (store.read(s.image, s.box).astype("f4") - mean) / std
        if s.colour is not None:
            gains, offsets = (
                np.array(v, "f4")[:, None, None] for v in (s.colour.gains, s.colour.offsets)
            )
            pixels = pixels * gains + offsets
        found.append(
            (s.turn.apply(pixels), s.turn.apply(store.labels(s.image, s.box)).astype(np.int64))
        )
    return found


# layouts


@pytest.mark.parametrize(
    "grid, per_rank",
    [("1x1", "1x1"), ("2x3", "1x1"), ("1x2", "3x2"), ("4x1", "1x2"), ("1x1", "4x3")],
)
@pytest.mark.parametrize(
    "data", [CROPS, DataConfig(augment=["flip", "turn", "colour"])], ids=["crops", "whole images"]
)
def test_the_pieces_of_all_ranks_are_the_whole_images(store, grid, per_rank, data):
    grid, per_rank = Size(grid), Size(per_rank)
    samples = epoch_samples(store, "train", data, 3, 0, 6)[0]
    expected = whole_samples(store, samples)
    seen = [np.zeros(labels.shape, int) for _, labels in expected]
    for coordinates in ranks(grid):
        for piece in pieces(store, samples, grid, per_rank, coordinates, REACH):
            assert piece.pixels.dtype == torch.float32 and piece.labels.dtype == torch.uint8
            for k, (image, number) in enumerate(zip(piece.place.images, piece.place.samples)):
                pixels, labels = expected[image]
                assert samples[image].number == number and piece.place.image == samples[image].size
                assert np.array_equal(
                    piece.pixels[k], pixels[(slice(None), *piece.place.window.slices)]
                )
                assert np.array_equal(piece.labels[k], labels[piece.place.tile.slices])
                seen[image][piece.place.tile.slices] += 1
    assert all((count == 1).all() for count in seen), "every pixel has exactly one owner"


def test_samples_of_one_size_are_stacked_a_piece_a_tile(store):
    samples = epoch_samples(store, "train", DataConfig(), 3, 0, 4)[0]
    found = pieces(store, samples, Size("1x2"), Size("2x1"), (0, 1), REACH)
    sizes = [s.size for s in samples]
    assert [p.place.image for p in found] == [
        size for size in dict.fromkeys(sizes) for _ in range(2)
    ]
    for piece in found:
        assert piece.place.images == tuple(
            k for k, size in enumerate(sizes) if size == piece.place.image
        )
        assert piece.pixels.shape == (len(piece.place.images), 2, *piece.place.window.size)
        assert piece.labels.shape == (len(piece.place.images), *piece.place.tile.size)


@pytest.mark.parametrize("groups, accumulate", [(1, 4), (2, 2), (4, 1)])
def test_groups_and_micro_batches_deal_out_one_sequence(store, groups, accumulate):
    dealt = [loader(store, groups=groups, group=g, accumulate=accumulate) for g in range(groups)]
    for step, parts in enumerate(zip(*(one.epoch(1) for one in dealt))):
        numbers = [
            p.place.samples
            for micro_batches in zip(*parts)
            for micro_batch in micro_batches
            for p in micro_batch
        ]
        assert [n for some in numbers for n in some] == list(range(8 * step, 8 * step + 8))
        assert all(len(part) == accumulate for part in parts)
    assert step + 1 == dealt[0].steps_per_epoch


def test_volumes(tmp_path):
    pixels, labels = random_image((20, 33, 18), bands=1)
    store = made_store(tmp_path / "s.h5", {"v": ("train", pixels, labels)}, bands=1)
    data, grid, got = (
        DataConfig(augment=["flip", "turn"], prefetch=0),
        Size("2x2x1"),
        np.zeros((20, 33, 18), int),
    )
    sample = epoch_samples(store, "train", data, 3, 0, 1)[0][0]
    for coordinates in ranks(grid):
        reader = loader(
            store,
            data,
            grid,
            Size("1x1x2"),
            coordinates,
            reach=ReceptiveField((3, 3, 3), (2, 2, 2)),
        )
        for piece in next(reader.epoch(0))[0]:
            got[piece.place.tile.slices] = piece.labels[0]
    assert np.array_equal(got, sample.turn.apply(labels))


def test_blocks_read_part_by_part_what_pieces_are(store):
    data = DataConfig(augment=["flip", "turn", "colour"], images=2, crop=Size("40x36"), prefetch=0)
    for coordinates in ranks(Size("2x1")):
        arguments = store, data, Size("2x1"), Size("1x1"), coordinates
        whole, parts = (
            loader(*arguments, reach=ReceptiveField((0, 0), (4, 4))),
            loader(*arguments, reach=ReceptiveField((0, 0), (4, 4)), streaming=True),
        )
        for (read_whole,), (blocks,) in zip(whole.epoch(0), parts.epoch(0)):
            for piece, block in zip(read_whole, blocks, strict=True):
                tile, read = piece.place.tile, parts.bytes_read
                assert block.place == piece.place
                box = Box(tuple(a + 3 for a in tile.start), tuple(b - 2 for b in tile.stop))
                inside = (..., *box.relative_to(tile).slices)
                assert torch.equal(block.pixels(box), piece.pixels[inside]) and torch.equal(
                    block.labels(box), piece.labels[inside]
                )
                images = len(piece.place.images)
                assert parts.bytes_read - read == box.pixels * images * (
                    store.bands * store.dtype("train0").itemsize + 1
                )


# the loader


def flat(steps):
    return [piece for step in steps for micro_batch in step for piece in micro_batch]


def test_reading_ahead_changes_nothing(store):
    ahead = DataConfig(**{**vars(CROPS), "prefetch": 3})
    for a, b in zip(flat(loader(store).epoch(2)), flat(loader(store, ahead).epoch(2)), strict=True):
        assert (
            a.place == b.place
            and torch.equal(a.pixels, b.pixels)
            and torch.equal(a.labels, b.labels)
        )


def test_an_epoch_resumed_goes_on_where_it_was(store):
    reader = loader(store)
    rest, all_of_it = flat(reader.epoch(1, first_step=2)), flat(reader.epoch(1))
    assert [p.place for p in rest] == [p.place for p in all_of_it[-len(rest) :]] and rest[
        0
    ].place.samples == (4, 5)
    assert not list(reader.epoch(1, first_step=reader.steps_per_epoch))


def test_only_windows_and_tiles_are_read(store, monkeypatch):
    asked = []
    for name in ("read", "labels"):
        method = getattr(store, name)
        monkeypatch.setattr(
            store,
            name,
            lambda image, box, name=name, method=method: (
                asked.append((name, box.pixels)) or method(image, box)
            ),
        )
    reader = loader(store, DataConfig(prefetch=0), grid=Size("2x2"), coordinates=(1, 0))
    found = flat(reader.epoch(0))
    assert asked == [
        (n, b.pixels)
        for p in found
        for n, b in (("read", p.place.window), ("labels", p.place.tile))
        for _ in p.place.images
    ]
    assert reader.bytes_read == sum(2 * p.place.window.pixels + p.place.tile.pixels for p in found)


# reading ahead


def settled():
    """Whether all threads that read ahead have ended."""
    return not [t for t in threading.enumerate() if t.name == "distseg-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_never_more_than_depth_items_ahead(depth):
    made = []
    for item in prefetch((made.append(k) or k for k in range(20)), depth):
        time.sleep(0.002)
        assert len(made) <= item + 1 + depth
    assert item == 19 and settled()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_is_raised_where_its_item_was_due(depth):
    def items():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    got = []
    with pytest.raises(OSError, match="the disk is gone"):
        for item in prefetch(items(), depth):
            got.append(item)
    assert got == [1, 2] and settled()


def test_the_thread_ends_when_the_consumer_stops(store):
    steps = loader(store, DataConfig(**{**vars(CROPS), "prefetch": 2})).epoch(0)
    next(steps)
    assert not settled()
    steps.close()
    assert settled()


def test_an_error_in_the_consumer_ends_the_thread(store):
    with pytest.raises(RuntimeError):
        for _ in loader(store, DataConfig(**{**vars(CROPS), "prefetch": 2})).epoch(0):
            raise RuntimeError
    assert settled()


# settings that cannot be


def test_a_grid_too_fine_for_an_image(store):
    with pytest.raises(
        ValueError,
        match="image 'train2' of .*: a grid of 17x1 tiles is too fine for an image of 64x70",
    ):
        loader(store, DataConfig(), grid=Size("17x1"))
    with pytest.raises(
        ValueError,
        match="image 'train0' of .*: a grid of 12x1 tiles is too fine for an image of 40x52",
    ):
        loader(store, grid=Size("4x1"), per_rank=Size("3x1"))


def test_images_without_labels(tmp_path):
    store = made_store(tmp_path / "s.h5", {"a": ("train", random_image((50, 50))[0], None)})
    with pytest.raises(
        ValueError, match="image 'a' of the split 'train' .* has no labels: prepare"
    ):
        loader(store, DataConfig())
