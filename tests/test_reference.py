"""A store that refers to image files gives the same pixels as one that holds them, bit for bit, and names files that changed."""

import multiprocessing
import os
import pickle
import re
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from PIL import Image
from test_georeference import geotiff
from test_masks import palette, run
from test_train import config

from distseg.comm.alone import Alone
from distseg.comm.launch import JointFailure
from distseg.config.settings import DataConfig, StreamingConfig
from distseg.data import referring
from distseg.data.loader import StepLoader
from distseg.data.store import file_pixels, open_files
from distseg.data.store.check import check_store
from distseg.data.store.file_pixels import merged
from distseg.data.store.header import Entry
from distseg.data.store.layout import REFERRING
from distseg.data.store.source import Source, changes, source_files
from distseg.data.store.store import Store
from distseg.tiling.tile import Box, ReceptiveField, boxes_of
from distseg.training import engine
from distseg.training.run import Run

SIZE = (270, 530)  # more than one chunk a side, and none of them full
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(1, 250, (3, *SIZE)).astype(np.uint8)
VOLUME = RANDOM.integers(-900, 900, (43, 50, 61)).astype(np.int16)


def png(path, pixels=PIXELS):
    Image.fromarray(np.moveaxis(pixels, 0, -1)).save(path)


def rgba(path):
    alpha = np.where(RANDOM.random(SIZE) < 0.3, 0, 255).astype(np.uint8)
    Image.fromarray(np.dstack([*PIXELS, alpha])).save(path)


def tiled(path):
    tifffile.imwrite(path, PIXELS, tile=(64, 96), compression="deflate", photometric="minisblack")


def strips(path):
    tifffile.imwrite(path, PIXELS[0], rowsperstrip=7, compression="deflate", predictor=2)


def floats_without_data(path):
    pixels = PIXELS[:2].astype(np.float32)
    pixels[RANDOM.random(pixels.shape) < 0.1] = -9999
    pixels[:, :9, :9] = -9999
    tags = [(42113, "s", 0, "-9999", True)]
    tifffile.imwrite(
        path, pixels, photometric="minisblack", planarconfig="separate", extratags=tags
    )


def with_mask_page(path):
    rasterio = pytest.importorskip("rasterio")
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        about = dict(driver="GTiff", height=SIZE[0], width=SIZE[1], count=3, dtype="uint8")
        with rasterio.open(path, "w", **about) as file:
            file.write(PIXELS)
            file.write_mask(RANDOM.random(SIZE) < 0.8)


def erdas(path):
    copied = pytest.importorskip("rasterio.shutil")
    tiled(path.with_suffix(".tif"))
    copied.copy(path.with_suffix(".tif"), path, driver="HFA")
    path.with_suffix(".tif").unlink()


def npy(path):
    np.save(path, PIXELS.astype(np.float64))


def nifti(path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(VOLUME.T, np.eye(4)), path)


FORMATS = {
    "png": ("a.png", png),
    "rgba": ("a.png", rgba),
    "tiles": ("a.tif", tiled),
    "strips": ("a.tif", strips),
    "no data": ("a.tif", floats_without_data),
    "mask page": ("a.tif", with_mask_page),
    "erdas": ("a.img", erdas),
    "npy": ("a.npy", npy),
    "nifti": ("a.nii", nifti),
    "packed nifti": ("a.nii.gz", nifti),
}


def folders(tmp_path, name, write, labels=None):
    """Write an image and its mask into folders of their own."""
    for folder in ("i", "m"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "i" / name)
    if labels is None:
        labels = RANDOM.integers(0, 3, VOLUME.shape if "nii" in name else SIZE).astype(np.uint8)
        np.save(tmp_path / "m" / "a.npy", labels)
    else:
        labels(tmp_path / "m" / "a.png")


def both(tmp_path, *flags, masks=("--masks", "m")):
    """Return the copied store and the one that refers to the files, of the folders i and m."""
    stores = []
    for name, more in (("copied.h5", []), ("refers.h5", ["--reference"])):
        masks = [tmp_path / m if m == "m" else m for m in masks]
        classes = [] if "--labels" in masks else ["--classes", "a,b,c"]
        code = run("prepare", tmp_path / "i", tmp_path / name, *masks, *classes, *flags, *more)
        assert code == 0
        stores.append(Store(tmp_path / name))
    return stores


def pixels_in(store):
    """Return True if the file of a store holds pixels."""
    return any(str(name).endswith("pixels") for name in names_in(store))


def names_in(store):
    found = []
    store._handle.visit(found.append)
    return found


def some_boxes(size):
    low = Box(tuple(n // 3 for n in size), tuple(n // 3 + n // 2 for n in size))
    return [Box.whole(size), low, Box(tuple(n - 1 for n in size), size)]


def assert_same(copied, refers):
    assert pixels_in(copied) and not pixels_in(refers)
    assert copied.mean.tolist() == refers.mean.tolist()
    assert copied.std.tolist() == refers.std.tolist()
    assert copied.splits == refers.splits
    for name in copied.splits["train"]:
        assert copied.missing(name) == refers.missing(name)
        for box in some_boxes(copied.size(name)):
            pair = [store.read(name, box) for store in (copied, refers)]
            assert pair[0].dtype == pair[1].dtype and pair[0].tobytes() == pair[1].tobytes()
            pair = [store.read_normalised(name, box).tobytes() for store in (copied, refers)]
            assert pair[0] == pair[1]
            if copied.has_labels(name):
                assert np.array_equal(*(store.labels(name, box) for store in (copied, refers)))


@pytest.mark.covering(cases=4)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_bits_as_a_copy(tmp_path, kind):
    folders(tmp_path, *FORMATS[kind])
    copied, refers = both(tmp_path)
    assert_same(copied, refers)
    assert check_store(refers.path) == []


@pytest.mark.slow
def test_masks_and_slices_and_labels_of_images(tmp_path):
    folders(
        tmp_path,
        "a.png",
        png,
        lambda path: palette(RANDOM.integers(0, 3, SIZE).astype("u1")).save(path),
    )
    assert_same(*both(tmp_path))
    for folder in ("i", "m"):
        shutil.rmtree(tmp_path / folder)
    folders(tmp_path, "a.npy", lambda path: np.save(path, VOLUME), lambda path: None)
    np.save(tmp_path / "m/a.npy", RANDOM.integers(0, 3, VOLUME.shape).astype(np.uint8))
    assert_same(*both(tmp_path, "--pages", "images", "--overwrite"))
    (tmp_path / "i/one").mkdir(), (tmp_path / "i/two").mkdir()
    (tmp_path / "i/a.npy").rename(tmp_path / "i/one/a.npy")
    shutil.copy(tmp_path / "i/one/a.npy", tmp_path / "i/two/b.npy")
    copied, refers = both(
        tmp_path,
        "--pages",
        "volume",
        "--overwrite",
        "--split",
        "1,0,0",
        masks=("--labels", "folders"),
    )
    assert_same(copied, refers)
    assert refers.of_images


@pytest.mark.slow
def test_polygons(tmp_path):
    vectors = pytest.importorskip("test_vector_masks")
    (tmp_path / "i").mkdir()
    crs, transform = vectors.UTM
    geotiff(tmp_path / "i/a.tif", PIXELS, crs=crs, transform=transform)
    shapes = vectors.on_earth(vectors.polygons_of(0), transform)
    vectors.written(tmp_path / "m.gpkg", shapes, crs)
    masks = ("--masks", tmp_path / "m.gpkg", "--instances", "border")
    copied, refers = both(tmp_path, masks=masks)
    assert_same(copied, refers)
    assert refers.class_counts("a")[1] > 0


def test_many_boxes_at_once(tmp_path):
    folders(tmp_path, "a.tif", tiled)
    copied, refers = both(tmp_path)
    boxes = boxes_of(Box.whole((256, 512)), (64, 128))
    assert np.array_equal(copied.read_boxes("a", boxes), refers.read_boxes("a", boxes))


def test_chunks_are_joined_into_few_reads():
    cells = [Box((y, x), (y + 1, x + 1)) for y in range(4) for x in range(5) if (y, x) != (2, 2)]
    found = merged(cells)
    assert len(found) == 4 and sum(box.pixels for box in found) == len(cells)
    assert merged(cells[:10]) == [Box((0, 0), (2, 5))]
    assert merged([]) == []


@pytest.mark.slow
def test_large_parts_are_read_in_steps(tmp_path, monkeypatch):
    folders(tmp_path, "a.npy", npy)
    copied, refers = both(tmp_path)
    monkeypatch.setattr(file_pixels, "_READ_BYTES", 1)
    assert_same(copied, refers)


# files that changed


def changed(path, how):
    """Change a file in one of the ways that happen."""
    if how == "gone":
        path.unlink()
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    else:  # other content of the same size
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(bytes(data))


@pytest.mark.covering(cases=2)
@pytest.mark.parametrize(
    "how, words",
    [
        ("gone", "is gone"),
        ("longer", "bytes instead of"),
        ("other", r"has other content, of the hash \w+ instead of \w+"),
    ],
)
@pytest.mark.parametrize("file", ["i/a.npy", "m/a.npy"])
def test_files_that_changed_are_named_before_work(tmp_path, how, words, file):
    folders(tmp_path, "a.npy", npy)
    _, refers = both(tmp_path)
    refers.check_files()
    changed(tmp_path / file, how)
    with pytest.raises(ValueError, match=words) as error:
        refers.check_files()
    assert str(tmp_path / file) in str(error.value) and "prepare the store anew" in str(error.value)
    (found,) = check_store(refers.path)
    assert re.search(words, found) and str(tmp_path / file) in found
    with pytest.raises(ValueError, match=words):  # and by who reads without looking first
        refers.read("a", Box.whole(SIZE))


def test_every_file_of_an_image_is_checked(tmp_path):
    paths = [tmp_path / name for name in ("image", "beside", "mask")]
    for path in paths:
        path.write_bytes(b"as it was")
    source = Source(source_files(paths, tmp_path / "s.h5"), 2, "band", None)
    assert changes([source], tmp_path) == []
    for number, path in enumerate(paths, start=1):
        path.write_bytes(b"as it is!")
        found = changes([source, source], tmp_path)
        said = [text.partition(",")[0] for text in found]
        assert said == [f"{changed} has other content" for changed in paths[:number]]


@pytest.mark.parallel(2)
def test_all_ranks_refuse_a_file_that_is_gone_before_training(comm, shared_path):
    if comm.rank == 0:
        folders(shared_path, "a.npy", npy)
        refers = both(shared_path)[1]
        os.rename(refers.path, shared_path / "store.h5")
        (shared_path / "i/a.npy").unlink()
    comm.Barrier()
    with pytest.raises(JointFailure, match="a.npy is gone"):
        Run(config(shared_path, 2), comm)


def test_decoded_images_count_in_the_memory_limit(tmp_path, monkeypatch):
    """A rank keeps as many as a micro-batch has, and its tiles get the rest of the limit."""
    monkeypatch.setattr(engine, "memory_in_use", lambda _: 10**8)
    folders(tmp_path, "a.png", png)
    os.rename(both(tmp_path)[1].path, tmp_path / "store.h5")
    plan = config(tmp_path, 1)
    limited = replace(plan, streaming=StreamingConfig(memory=10**10))
    run = Run(limited, Alone())
    free = Run(replace(plan, train=replace(plan.train, output=str(tmp_path / "free"))), Alone())
    kept = plan.data.images * (16 << 20)
    assert (run.store.decoded_bytes, free.store.decoded_bytes) == (kept, 256 << 20)
    assert run.engine.base_memory() - free.engine.base_memory() == kept


def test_only_plain_files_are_opened(tmp_path):
    folders(tmp_path, "a.npy", npy)
    _, refers = both(tmp_path)
    (tmp_path / "i/a.npy").unlink()
    os.mkfifo(tmp_path / "i/a.npy")  # whoever opened it would wait for ever
    with pytest.raises(ValueError, match="a.npy is no plain file"):
        refers.read("a", Box.whole(SIZE))


def test_a_change_that_the_fingerprint_misses_is_found_by_the_checksum(tmp_path):
    folders(tmp_path, "a.npy", npy)
    _, refers = both(tmp_path)
    path = tmp_path / "i/a.npy"
    there = np.load(path, mmap_mode="r+")
    there[1, 269, 100] += 1
    there.flush()
    refers.check_files()
    assert refers.read("a", Box((0, 0), (256, 512))).shape == (3, 256, 512)
    with pytest.raises(ValueError, match=r"pixels of image 'a' at \[256:270, 0:256\] differ"):
        refers.read("a", Box((250, 0), (270, 9)))
    assert len(check_store(refers.path)) == 1


def test_slices_share_their_file_and_one_is_not_there(tmp_path, monkeypatch):
    folders(tmp_path, "a.npy", lambda path: np.save(path, VOLUME), lambda path: None)
    assert (
        run(
            "prepare",
            tmp_path / "i",
            tmp_path / "s.h5",
            "--classes",
            "a,b",
            "--reference",
            "--pages",
            "images",
        )
        == 0
    )
    store, opened, whole = Store(tmp_path / "s.h5"), [], Source.open
    monkeypatch.setattr(Source, "open", lambda s, f: opened.append(s.page) or whole(s, f))
    for number in (7, 8):
        found = store.read(f"a_{number:04}", Box.whole(VOLUME.shape[1:]))
        assert np.array_equal(found[0], VOLUME[number])
    assert opened == [7], "the second slice is read from the open file"
    entry = store._images["a_0042"]
    store._images["a_0042"] = replace(entry, source=replace(entry.source, page=43))
    with pytest.raises(ValueError, match="has 43 slices, but the store refers to slice 43"):
        store.read("a_0042", Box.whole(VOLUME.shape[1:]))


def test_store_and_files_may_move_together(tmp_path):
    (tmp_path / "old").mkdir()
    folders(tmp_path / "old", "a.tif", tiled)
    copied, _ = both(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "link.h5").symlink_to(tmp_path / "new/refers.h5")
    for path in ("new/refers.h5", "link.h5"):
        moved = Store(tmp_path / path)
        moved.check_files()
        assert np.array_equal(moved.read("a", Box.whole(SIZE)), PIXELS)
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "new/refers.h5", tmp_path / "other")
    with pytest.raises(ValueError, match="is gone"):
        Store(tmp_path / "other/refers.h5").check_files()


@pytest.mark.slow
def test_links_keep_their_names(tmp_path):
    folders(tmp_path, "a.png", png)
    (tmp_path / "blob").mkdir()
    (tmp_path / "i/a.png").rename(tmp_path / "blob/0123")
    (tmp_path / "i/a.png").symlink_to(tmp_path / "blob/0123")
    assert_same(*both(tmp_path))


# open files


def test_images_that_are_decoded_whole_are_refused_above_a_size(tmp_path, monkeypatch, capsys):
    folders(tmp_path, "a.png", png)
    both(tmp_path)
    assert "can only be decoded as a whole" in capsys.readouterr().out
    monkeypatch.setattr(referring, "MOST_KEPT", PIXELS.size - 1)
    code = run("prepare", tmp_path / "i", tmp_path / "s.h5", "--classes", "a,b,c", "--reference")
    assert code == 2 and not (tmp_path / "s.h5").exists()
    assert "TILED=YES" in capsys.readouterr().err


def test_open_files_are_bounded(tmp_path, monkeypatch):
    (tmp_path / "i").mkdir()
    for number in range(4):
        png(tmp_path / f"i/{number}.png", np.roll(PIXELS, number, 1))
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", "--classes", "a,b", "--reference") == 0
    store = Store(tmp_path / "s.h5")
    opened = []
    whole = Source.open
    monkeypatch.setattr(Source, "open", lambda s, f: opened.append(s.files[0].path) or whole(s, f))

    def read(numbers, store=store):
        opened.clear()
        for number in numbers:
            expected = np.roll(PIXELS, int(number), 1)[:, :20, :30]
            assert np.array_equal(store.read(number, Box((0, 0), (20, 30))), expected)
        return "".join(path[-5] for path in opened)

    assert read("01230123") == "0123"
    limited = pickle.loads(pickle.dumps(Store(tmp_path / "s.h5", most_decoded=1)))
    assert (store.decoded_bytes, limited.decoded_bytes) == (256 << 20, 16 << 20)
    assert read("0011", limited) == "01", "with a memory limit fewer decoded images are kept"
    monkeypatch.setattr(open_files, "MOST_KEPT", 2 * PIXELS.size)
    assert read("3201323") == "0132"
    assert read("01020") == "012", "the file that was used longest ago is closed first"
    monkeypatch.setattr(open_files, "MOST_KEPT", 1)
    assert read("1100") == "10"
    monkeypatch.setattr(open_files, "MOST_KEPT", 1 << 30)
    monkeypatch.setattr(open_files, "_MOST_OPEN", 1)
    assert read("2233") == "23"


def in_child(store, name, expected, queue):
    """Say whether the pixels are right, and how often the child opened the file."""
    opened, whole = [], Source.open
    Source.open = lambda self, path: opened.append(path) or whole(self, path)
    queue.put((np.array_equal(store.read(name, Box.whole(SIZE)), expected), len(opened)))


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("kind", ["tiles", "erdas", "png"])
def test_a_forked_process_opens_the_files_itself(tmp_path, kind):
    folders(tmp_path, *FORMATS[kind])
    _, refers = both(tmp_path)
    expected = refers.read("a", Box.whole(SIZE))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(refers, "a", expected, queue))
    child.start()
    assert queue.get(timeout=60) == (True, 1)
    assert refers.read("a", Box.whole(SIZE)) is not None
    child.join(60)
    assert child.exitcode == 0


def test_threads_share_a_store(tmp_path):
    folders(tmp_path, "a.tif", tiled)
    copied, refers = both(tmp_path)
    expected, wrong = copied.read("a", Box.whole(SIZE)), []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(8):
            y, x = int(random.integers(0, 180)), int(random.integers(0, 400))
            box = Box((y, x), (y + 90, x + 120))
            if not np.array_equal(refers.read("a", box), expected[(slice(None), *box.slices)]):
                wrong.append(box)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_steps_of_training_are_the_same(tmp_path):
    folders(tmp_path, "a.tif", tiled)
    stores = both(tmp_path)
    data = DataConfig(crop=(64, 64), augment=("flip", "colour"), images=2, prefetch=2)
    common = dict(
        seed=3, groups=1, group=0, accumulate=1, grid=(1, 1), per_rank=(1, 1), coordinates=(0, 0)
    )
    loaders = [
        StepLoader(store, "train", data, **common, reach=ReceptiveField((3, 3), (1, 1)))
        for store in stores
    ]
    steps = [list(loader.epoch(0)) for loader in loaders]
    assert len(steps[0]) == len(steps[1]) > 3
    for a, b in zip(*steps):
        for one, other in zip(a[0], b[0]):
            assert one.pixels.numpy().tobytes() == other.pixels.numpy().tobytes()
            assert np.array_equal(one.labels, other.labels)


# the header


def test_a_store_from_elsewhere_with_bad_sources_is_refused(tmp_path):
    folders(tmp_path, "a.npy", npy)
    _, refers = both(tmp_path)
    good = refers._images["a"].to_json()
    Entry.from_json(good, REFERRING).check(3, REFERRING)
    name, size, text = good["source"]["files"][0]
    bad = [
        dict(files=[]),
        dict(files=[["a\0.png", size, text]]),
        dict(files=[[name, -1, text]]),
        dict(files=[[name, size, None]]),
        dict(dims="2"),
        dict(page=-1),
        dict(alpha=1),
    ]
    for change in bad:
        entry = {**good, "source": {**good["source"], **change}}
        with pytest.raises(ValueError, match="the files of 'a'"):
            Entry.from_json(entry, REFERRING).check(3, REFERRING)
