"""The HDF5 store: what goes in comes out, statistics by definition, and clear words for every bad file."""

import errno
import os
import pickle
import resource
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from made_store import CLASSES, made_store, random_image, random_store, write_image

from distseg.data.store import store as store_module
from distseg.data.store.band_statistics import Moments
from distseg.data.store.store import Store, StoreWriter
from distseg.report.disk import DiskFull
from distseg.tiling.tile import Box

ODD = Box((13, 60), (77, 131))


@pytest.fixture
def filled(tmp_path):
    """A training image, a validation image without labels, and the arrays of the first."""
    pixels, labels = random_image((97, 131))
    other, _ = random_image((64, 70), seed=1)
    store = made_store(
        tmp_path / "s.h5",
        {"a": ("train", pixels, labels), "b": ("val", other + 100, None)},
        provenance={"from": "chance"},
    )
    return store, pixels, labels


# what goes in comes out


def test_a_window_comes_back_as_it_was_written(filled):
    store, pixels, labels = filled
    assert np.array_equal(store.read("a", ODD), pixels[:, 13:77, 60:131])
    assert store.read("a", ODD).dtype == np.uint8
    assert np.array_equal(store.labels("a", ODD), labels[13:77, 60:131])


def test_the_index_tells_what_there_is(filled):
    store, _, _ = filled
    assert (store.bands, store.band_names, store.classes, store.ignore) == (
        2,
        ["band0", "band1"],
        CLASSES,
        255,
    )
    assert store.splits == {"train": ["a"], "val": ["b"]} and store.split("val") == ["b"]
    assert store.size("a") == (97, 131) and store.dtype("a") == np.uint8
    assert store.has_labels("a") and not store.has_labels("b")
    assert store.provenance == {"from": "chance"}


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i4", "f2", "f4", "f8"])
def test_any_number_type_is_kept(tmp_path, dtype):
    pixels = np.arange(2 * 30 * 20).reshape(2, 30, 20).astype(dtype)
    store = made_store(tmp_path / "s.h5", {"a": ("train", pixels, None)})
    assert store.dtype("a") == np.dtype(dtype) and np.array_equal(
        store.read("a", Box.whole((30, 20))), pixels
    )


def test_volumes_and_other_dims(tmp_path):
    pixels, labels = random_image((70, 45, 50), bands=1)
    store = made_store(tmp_path / "s.h5", {"v": ("train", pixels, labels)}, bands=["density"])
    box = Box((3, 0, 9), (69, 45, 11))
    assert np.array_equal(store.read("v", box), pixels[(slice(None), *box.slices)])
    assert np.array_equal(store.labels("v", box), labels[box.slices])
    assert store.block_counts("v").shape == (3, 2, 1, 1)


# statistics


def test_mean_and_deviation_are_those_of_all_training_pixels(filled):
    store, pixels, _ = filled
    assert np.allclose(store.mean, pixels.mean((1, 2)), rtol=1e-13) and np.allclose(
        store.std, pixels.std((1, 2)), rtol=1e-13
    )
    assert store.mean.dtype == store.std.dtype == np.float64


def test_normalised_pixels_have_mean_0_and_deviation_1(filled):
    store, pixels, _ = filled
    whole = store.read_normalised("a", Box.whole((97, 131)))
    assert whole.dtype == np.float32
    assert np.allclose(whole.mean((1, 2)), 0, atol=1e-5) and np.allclose(
        whole.std((1, 2)), 1, atol=1e-5
    )
    assert np.array_equal(store.read_normalised("a", ODD), whole[:, 13:77, 60:131])


def test_a_small_deviation_of_large_values_survives():
    """E(x^2) - E(x)^2 would give 0 or worse: 1e9^2 has no digits left for a deviation of 1."""
    values = 1e9 + np.random.default_rng(0).normal(size=(1, 1000, 100))
    moments = Moments(1)
    for strip in np.split(values, [1, 400, 990], axis=1):
        moments.add(strip)
    assert (
        abs(moments.std[0] - values.std()) < 1e-6
        and abs((values**2).mean() - values.mean() ** 2 - 1) > 1
    )


def test_a_constant_band_is_only_shifted(tmp_path):
    store = made_store(tmp_path / "s.h5", {"a": ("train", np.full((2, 5, 5), 7, np.uint8), None)})
    assert store.std.tolist() == [1, 1] and not store.read_normalised("a", Box.whole((5, 5))).any()


def test_block_counts_are_those_of_each_block(filled):
    store, _, labels = filled
    counts = store.block_counts("a")
    assert counts.shape == (3, 2, 3)
    for k, y, x in np.ndindex(counts.shape):
        assert counts[k, y, x] == (labels[64 * y : 64 * y + 64, 64 * x : 64 * x + 64] == k).sum()
    assert store.class_counts("a") == counts.sum((1, 2)).tolist()


def test_block_counts_do_not_depend_on_how_it_was_written(tmp_path):
    pixels, labels = random_image((150, 140))
    with StoreWriter(tmp_path / "s.h5", CLASSES, 2) as writer:
        image = writer.add_image("a", (150, 140), "u1", "train", True)
        for box in (Box((0, 0), (150, 33)), Box((0, 33), (70, 140)), Box((70, 33), (150, 140))):
            image.write(
                box, pixels[(slice(None), *box.slices)], labels[box.slices].astype(np.int64)
            )
    once = made_store(tmp_path / "t.h5", {"a": ("train", pixels, labels)})
    assert np.array_equal(Store(tmp_path / "s.h5").block_counts("a"), once.block_counts("a"))


# several readers


def test_threads_read_at_once(filled):
    store, pixels, labels = filled
    wrong = []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(60):
            y, x = random.integers(0, 60, 2)
            box = Box((y, x), (y + 37, x + 41))
            good = np.array_equal(
                store.read("a", box), pixels[(slice(None), *box.slices)]
            ) and np.array_equal(store.labels("a", box), labels[box.slices])
            wrong.extend([] if good else [box])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not wrong


def test_a_forked_process_and_a_pickled_store_open_it_anew(filled):
    store, pixels, _ = filled
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(store.read("a", ODD), pixels[:, 13:77, 60:131]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(pickle.loads(pickle.dumps(store)).read("a", ODD), store.read("a", ODD))


# no data


def test_values_without_data_are_left_out_and_read_as_the_mean(tmp_path):
    pixels = np.random.default_rng(0).normal(50, 7, (2, 40, 30)).astype("f4")
    labels = np.zeros((40, 30), np.uint8)
    pixels[:, :10] = pixels[1, 20, 5] = -9999
    with StoreWriter(tmp_path / "s.h5", CLASSES, 2) as writer:
        image = writer.add_image("a", (40, 30), "f4", "train", labels=True, nodata=-9999)
        for rows in (slice(0, 17), slice(17, 40)):
            image.write(Box((rows.start, 0), (rows.stop, 30)), pixels[:, rows], labels[rows])
    store, whole = Store(tmp_path / "s.h5"), Box.whole((40, 30))
    there = pixels != -9999
    assert np.allclose(
        store.mean, [p[t].mean(dtype="f8") for p, t in zip(pixels, there)], rtol=1e-9
    )
    assert np.allclose(store.std, [p[t].std(dtype="f8") for p, t in zip(pixels, there)], rtol=1e-9)
    assert np.array_equal(store.read("a", whole), pixels) and (
        store.nodata("a"),
        store.missing("a"),
    ) == (-9999, 300)
    normalised = store.read_normalised("a", whole)
    assert (normalised[~there] == 0).all() and abs(normalised[there]).max() < 6
    assert (store.labels("a", whole)[:10] == 255).all() and not store.labels("a", whole)[10:].any()
    assert store.class_counts("a") == [900, 0, 0] and store.block_counts("a").sum() == 900
    assert np.array_equal(store.without_data("a", whole), ~there.any(0))  # no data in any band


@pytest.mark.parametrize(
    "dtype, value",
    [
        ("f4", np.nan),
        ("f4", -3.4028234663852886e38),
        ("f8", -1.797e308),
        ("f4", np.inf),
        ("u1", 0),
        (">i2", -32768),
        ("i8", 2**62),
    ],
)
def test_any_number_may_stand_for_no_data(tmp_path, dtype, value):
    pixels = np.arange(1, 201).reshape(1, 10, 20).astype(dtype)
    pixels[0, 3] = value
    with StoreWriter(tmp_path / "s.h5", CLASSES, 1) as writer:
        writer.add_image("a", (10, 20), dtype, "train", labels=False, nodata=value).write(
            Box.whole((10, 20)), pixels
        )
    store = Store(tmp_path / "s.h5")
    there = np.arange(10) != 3
    assert (
        np.allclose(store.mean, pixels[:, there].astype("f8").mean()) and store.missing("a") == 20
    )
    found = store.read_normalised("a", Box.whole((10, 20)))
    assert (
        (found[:, 3] == 0).all()
        and np.isfinite(found).all()
        and np.allclose(found[:, there].std(), 1)
    )
    assert np.array_equal(
        pickle.loads(pickle.dumps(store)).nodata("a"), store.nodata("a"), equal_nan=dtype == "f4"
    )


def test_a_number_that_no_pixel_can_have_is_nothing(tmp_path):
    with StoreWriter(tmp_path / "s.h5", CLASSES, 1) as writer:
        image = writer.add_image("a", (10, 20), "u1", "train", labels=False, nodata=-9999)
        image.write(Box.whole((10, 20)), np.zeros((1, 10, 20), np.uint8))
    assert Store(tmp_path / "s.h5").nodata("a") is None


def test_a_band_without_any_data(tmp_path):
    with (
        pytest.raises(ValueError, match="band red has no data in any pixel of the split 'train'"),
        StoreWriter(tmp_path / "s.h5", CLASSES, ["red"]) as writer,
    ):
        writer.add_image("a", (10, 20), "f4", "train", labels=False, nodata=np.nan).write(
            Box.whole((10, 20)), np.full((1, 10, 20), np.nan, "f4")
        )


# blocks in any order


def test_chunks_are_whole_however_they_were_written(tmp_path):
    """Blocks that cut through chunks, in any order, make the same file as one block."""
    pixels, labels = random_image((300, 530))
    cuts = [
        Box((a, b), (c, d))
        for a, c in ((0, 100), (100, 257), (257, 300))
        for b, d in ((0, 13), (13, 400), (400, 530))
    ]
    with StoreWriter(tmp_path / "s.h5", CLASSES, 2) as writer:
        image = writer.add_image("a", (300, 530), "u1", "train", True)
        for k in np.random.default_rng(0).permutation(len(cuts)):
            image.write(cuts[k], pixels[(slice(None), *cuts[k].slices)], labels[cuts[k].slices])
    once = made_store(tmp_path / "t.h5", {"a": ("train", pixels, labels)})
    store, whole = Store(tmp_path / "s.h5"), Box.whole((300, 530))
    assert np.array_equal(store.read("a", whole), pixels) and np.array_equal(
        store.labels("a", whole), labels
    )
    assert store._images["a"].digests == once._images["a"].digests


def test_the_digest_tells_stores_apart(tmp_path):
    pixels, labels = random_image((60, 50))
    stores = {
        "same": (pixels, labels),
        "again": (pixels, labels),
        "pixel": (pixels.copy(), labels),
        "label": (pixels, labels.copy()),
    }
    stores["pixel"][0][0, 30, 30] ^= 1
    stores["label"][1][30, 30] = 2
    digests = {
        name: made_store(
            tmp_path / f"{name}.h5", {"a": ("val", *both), "b": ("train", pixels, labels)}
        ).digest
        for name, both in stores.items()
    }
    assert digests["same"] == digests["again"] and len(set(digests.values())) == 3


def test_few_readers_are_kept_and_all_are_right(tmp_path, monkeypatch):
    """Of many images, and of images with many chunks, those opened first make room."""
    images = {f"i{k}": ("train", *random_image((300, 300), seed=k)) for k in range(6)}
    store = made_store(tmp_path / "s.h5", images)
    for most in (dict(_READERS_KEPT=3), dict(_CHUNKS_KEPT=10), dict(_CHUNKS_KEPT=1)):
        with monkeypatch.context() as patch:
            for name, value in most.items():
                patch.setattr(store_module, name, value)
            store = Store(store.path)
            for name in [*images, *images]:
                assert np.array_equal(
                    store.read(name, ODD), images[name][1][(slice(None), *ODD.slices)]
                )
                assert np.array_equal(store.labels(name, ODD), images[name][2][ODD.slices])
            assert len(store._readers) <= 3 and store._chunks_kept == sum(
                reader.chunks for reader in store._readers.values()
            )


# bad files


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no store .*nowhere.h5.*distseg prepare"):
        Store(tmp_path / "nowhere.h5")


def test_not_hdf5(tmp_path):
    (tmp_path / "s.h5").write_text("hello")
    with pytest.raises(ValueError, match="s.h5 is not an HDF5 file"):
        Store(tmp_path / "s.h5")


def test_one_that_this_process_holds_open_is_not_called_damaged(tmp_path):
    random_store(tmp_path / "s.h5", train=[(9, 13)])
    with (
        h5py.File(tmp_path / "s.h5"),
        pytest.raises(
            ValueError, match="s.h5 is held open with locks by this same process: close it first"
        ),
    ):
        Store(tmp_path / "s.h5")
    Store(tmp_path / "s.h5")


@pytest.mark.parametrize("share", [0.2, 0.9, 0.999])
def test_cut_off(tmp_path, share):
    random_store(tmp_path / "s.h5", train=[(97, 131)])
    with open(tmp_path / "s.h5", "r+b") as f:
        f.truncate(int(share * os.path.getsize(tmp_path / "s.h5")))
    with pytest.raises(ValueError, match="s.h5 is damaged or cut off"):
        Store(tmp_path / "s.h5")


def test_another_hdf5_file(tmp_path):
    with h5py.File(tmp_path / "s.h5", "w") as f:
        f["x"] = [1, 2]
    with pytest.raises(ValueError, match="s.h5 is an HDF5 file but not a distseg store"):
        Store(tmp_path / "s.h5")


def test_unfinished(tmp_path):
    with StoreWriter(tmp_path / "s.h5", CLASSES, 2) as writer:
        write_image(writer, "a", "train", *random_image((30, 30)))
        writer.file.flush()
        (tmp_path / "copy.h5").write_bytes(writer.partial.read_bytes())
    with pytest.raises(ValueError, match="copy.h5 is unfinished"):
        Store(tmp_path / "copy.h5")


def test_a_newer_version(tmp_path):
    random_store(tmp_path / "s.h5", train=[(30, 30)])
    with h5py.File(tmp_path / "s.h5", "r+") as f:
        f.attrs["version"] = 99
    with pytest.raises(
        ValueError, match="version 99, but this distseg reads versions up to 4: update"
    ):
        Store(tmp_path / "s.h5")


def test_questions_without_an_answer(filled):
    store, _, _ = filled
    with pytest.raises(ValueError, match="no split 'test': choose train, val"):
        store.split("test")
    with pytest.raises(ValueError, match="no image 'c': it holds 2 images, such as a, b"):
        store.size("c")
    with pytest.raises(ValueError, match="'b' .*has no labels"):
        store.labels("b", ODD)
    with pytest.raises(ValueError, match="'b' .*has no labels"):
        store.block_counts("b")
    with pytest.raises(
        ValueError, match=r"'a' .*has 97x131 pixels, but the box \[90:98, 0:5\] reaches beyond"
    ):
        store.read("a", Box((90, 0), (98, 5)))
    with pytest.raises(ValueError, match=r"'a' .*has 2 dims \(97x131\), but the box .* has 1"):
        store.read("a", Box((90,), (98,)))


# bad data


def refused(
    tmp_path, message, pixels=None, labels=None, size=(60, 50), box=None, dtype="f4", **options
):
    good_pixels, good_labels = random_image(size)
    with pytest.raises(ValueError, match=message):
        with StoreWriter(tmp_path / "s.h5", CLASSES, ["red", "near infrared"], **options) as writer:
            image = writer.add_image("a", size, dtype, "train", True)
            image.write(
                box or Box.whole(size),
                good_pixels.astype("f4") if pixels is None else pixels,
                good_labels if labels is None else labels,
            )
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_no_number(tmp_path, value):
    pixels, _ = random_image((60, 50))
    pixels = pixels.astype("f4")
    pixels[1, 7, 11] = value
    refused(tmp_path, rf"'a': band near infrared is {value} at \(7, 11\)", pixels=pixels)


@pytest.mark.parametrize("value", [3, 254, -1, 1000])
def test_labels_that_are_no_class(tmp_path, value):
    _, labels = random_image((60, 50))
    labels = labels.astype(np.int32)
    labels[8, 12] = value
    refused(
        tmp_path,
        rf"'a': label {value} at \(8, 12\) is no class: there are 0 ocean, 1 land, 2 lake, and 255 is ignored",
        labels=labels,
    )


def test_wrong_shapes(tmp_path):
    refused(tmp_path, r"shape \(2, 60, 50\), got \(3, 60, 50\)", pixels=np.zeros((3, 60, 50), "f4"))
    refused(tmp_path, r"shape \(60, 50\), got \(50, 60\)", labels=np.zeros((50, 60), int))
    refused(
        tmp_path,
        r"block \[0:61, 0:50\] is empty or outside an image of 60x50",
        box=Box((0, 0), (61, 50)),
    )
    refused(tmp_path, r"labels must be integers, got float64", labels=np.zeros((60, 50)))
    refused(tmp_path, r"float32 pixels do not fit into uint8", dtype="u1")


def test_an_image_that_is_not_whole(tmp_path):
    pixels, labels = random_image((30, 50))
    refused(
        tmp_path,
        "'a': 1500 of its 60x50 pixels were never written",
        pixels=pixels.astype("f4"),
        labels=labels,
        box=Box((0, 0), (30, 50)),
    )


def test_no_training_image(tmp_path):
    with pytest.raises(ValueError, match="no image is in the split 'train'"):
        random_store(tmp_path / "s.h5", val=[(30, 30)])


@pytest.mark.parametrize(
    "classes, ignore, message",
    [
        (["lake"], 255, "2 to 255 classes"),
        (["a", "a"], 255, "different names"),
        (["a", "b"], 1, "--ignore is 1, but .* must be no class .*: give a number from 2 to 255"),
        (["a", "b"], -1, "--ignore is -1, but .*--ignore 255 --values=-1=255"),
    ],
)
def test_classes_that_can_not_be(tmp_path, classes, ignore, message):
    with pytest.raises(ValueError, match=message):
        StoreWriter(tmp_path / "s.h5", classes, 3, ignore)


def test_two_images_of_one_name(tmp_path):
    with (
        pytest.raises(ValueError, match="two images have the name 'a'"),
        StoreWriter(tmp_path / "s.h5", CLASSES, 2) as writer,
    ):
        for _ in range(2):
            write_image(writer, "a", "train", *random_image((30, 30)))


# whole or not at all


def test_a_store_that_is_there_is_kept(tmp_path):
    first = random_store(tmp_path / "s.h5", train=[(30, 30)])
    with pytest.raises(FileExistsError, match="s.h5 already exists.*--overwrite"):
        random_store(tmp_path / "s.h5", train=[(40, 40)])
    assert first.size("train0") == (30, 30)


def test_overwriting_replaces_it_at_the_end_only(tmp_path):
    random_store(tmp_path / "s.h5", train=[(30, 30)])
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "s.h5", CLASSES, 2, overwrite=True):
        raise RuntimeError("power cut")
    assert Store(tmp_path / "s.h5").size("train0") == (30, 30)
    made_store(tmp_path / "s.h5", {"b": ("train", *random_image((40, 40)))}, overwrite=True)
    assert Store(tmp_path / "s.h5").split("train") == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["s.h5"]


@pytest.mark.parametrize("dtype, value", [("f4", -3.4028235e38), ("f8", -1.797e308)])
def test_numbers_that_stand_for_no_data(tmp_path, dtype, value):
    pixels = np.zeros((2, 60, 50), dtype)
    pixels[0, 3, 4] = value
    refused(
        tmp_path, r"band red is -.* at \(3, 4\): replace it by a number", pixels=pixels, dtype=dtype
    )


def test_large_numbers_keep_their_digits(tmp_path):
    pixels = (10**9 + np.arange(100).reshape(1, 10, 10)).astype(np.int32)
    store = made_store(tmp_path / "s.h5", {"a": ("train", pixels, None)}, bands=1)
    found = store.read_normalised("a", Box.whole((10, 10)))
    assert found.dtype == np.float32 and np.allclose(
        np.diff(found.ravel()), 1 / pixels.std(), rtol=1e-3
    )


def test_constants_of_another_store(filled):
    path = filled[0].path
    other = Store(path, ([1.0, 2.0], [3.0, 4.0]))
    box = Box((0, 0), (5, 5))
    assert np.allclose(
        other.read_normalised("a", box), (other.read("a", box) - [[[1]], [[2]]]) / [[[3]], [[4]]]
    )
    assert np.array_equal(pickle.loads(pickle.dumps(other)).mean, [1, 2])
    with pytest.raises(ValueError, match="has 2 bands, but the network was trained on 3"):
        Store(path, ([1.0] * 3, [1.0] * 3))


def test_a_store_has_one_writer(tmp_path):
    pixels = np.ones((1, 60, 50), np.uint8)
    with StoreWriter(tmp_path / "s.h5", ["x", "y"], 1) as writer:
        image = writer.add_image("a", (60, 50), np.uint8, "train", labels=False)
        image.write(Box((0, 0), (30, 50)), pixels[:, :30])
        with pytest.raises(BlockingIOError, match="another process is writing .*s.h5: wait for it"):
            with StoreWriter(tmp_path / "s.h5", ["x", "y"], 1):
                pass
        image.write(Box((30, 0), (60, 50)), pixels[:, 30:])
    assert (Store(tmp_path / "s.h5").read("a", Box.whole((60, 50))) == 1).all()


@pytest.mark.parametrize("share", [0, 0.003, 0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 0.9999])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, share):
    """HDF5 crashes where it meets one itself, at the latest when Python ends: so it is not told."""
    random_store(tmp_path / "s.h5", train=[(97, 131)])
    room, written = share * (tmp_path / "s.h5").stat().st_size, os.pwrite
    (tmp_path / "s.h5").unlink()

    def full(handle, data, offset):
        if offset + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    words = "s.h5 could not be written, no space is left on its disk.*: it takes up to .*B, .*B are free; free some space, or choose another output"
    with pytest.raises(DiskFull, match=words):
        random_store(tmp_path / "s.h5", train=[(97, 131)])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_in_a_process_of_its_own(tmp_path):
    """With the system's own errors; the process must end by itself."""
    code = "import sys; sys.path.insert(0, sys.argv[2]); from made_store import random_store; random_store(sys.argv[1], train=[(97, 131)] * 3)"

    def limit():
        return resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "s.h5", Path(__file__).parent],
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert (
        found.returncode == 1
        and "DiskFull: " in found.stderr
        and "s.h5 could not be written, files may not grow so large here" in found.stderr
    )
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_taken_over(tmp_path):
    (tmp_path / "s.h5.partial").write_bytes(b"half a store" * 10_000)
    assert random_store(tmp_path / "s.h5", train=[(30, 30)]).size("train0") == (30, 30)
    assert [p.name for p in tmp_path.iterdir()] == ["s.h5"]


@pytest.mark.parametrize(
    "plant",
    [
        lambda path, other: path.symlink_to(other),
        lambda path, _: os.mkfifo(path),
        lambda path, _: path.mkdir(),
    ],
)
def test_a_planted_name_leads_nowhere(tmp_path, plant):
    (tmp_path / "precious").write_text("mine")
    plant(tmp_path / "s.h5.partial", tmp_path / "precious")
    with pytest.raises(FileExistsError, match="s.h5.partial is a link, a folder or a device"):
        random_store(tmp_path / "s.h5", train=[(30, 30)])
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_folder_of_the_stores_name(tmp_path):
    with pytest.raises(FileExistsError, match="is a folder: choose another name"):
        StoreWriter(tmp_path, ["x", "y"], 1, overwrite=True)
