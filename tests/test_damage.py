"""Stores that are not what was written, and files made to do harm: each is told with what is wrong and where, none is followed, waited for or believed."""

import copy
import errno
import json
import os
import signal
from collections import Counter
from contextlib import contextmanager

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_store import made_store, old_store, random_image

from distseg.cli.main import main
from distseg.cli.plot import run_plot
from distseg.data.store import chunks
from distseg.data.store import store as store_module
from distseg.data.store.check import check_store
from distseg.data.store.chunks import Damage
from distseg.data.store.store import Store
from distseg.report.progress import SilentProgress
from distseg.tiling.tile import Box

IMAGES = {
    "a": ("train", *random_image((300, 270))),
    "b": ("val", *random_image((64, 70), seed=1)),
    "c": ("test", random_image((40, 40), seed=2)[0], None),
}
FUZZ = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@pytest.fixture
def path(tmp_path):
    made_store(tmp_path / "s.h5", IMAGES)
    return tmp_path / "s.h5"


@contextmanager
def at_once(seconds: int = 10):
    """Whatever waits, such as for the other end of a pipe, fails."""

    def ring(*_):
        raise TimeoutError("this hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def everything(path) -> list:
    """All that can be read of a store."""
    store = Store(path)
    found = [
        store.classes,
        store.band_names,
        store.ignore,
        store.block,
        store.mean.tolist(),
        store.std.tolist(),
        store.provenance,
        store.splits,
        store.digest,
    ]
    for name in (name for names in store.splits.values() for name in names):
        whole = Box.whole(store.size(name))
        found += [
            store.size(name),
            store.dtype(name),
            store.nodata(name),
            store.missing(name),
            store.read(name, whole).tobytes(),
        ]
        found += (
            [
                store.labels(name, whole).tobytes(),
                store.block_counts(name).tolist(),
                store.class_counts(name),
            ]
            if store.has_labels(name)
            else []
        )
    return found


def findings(path) -> list[str]:
    return check_store(path, lambda *_: SilentProgress())


def anew(path, data: bytes) -> None:
    """Into another file of the name: HDF5 would take the same one for the one that is open."""
    path.unlink()
    path.write_bytes(data)


def place_of(path, name: str, what: str, index: tuple) -> tuple[int, int]:
    """Where a chunk lies in the file, and its bytes there."""
    reader = Store(path).reader(name, what)
    return int(reader._at[index]), int(reader._sizes[index])


def flipped(path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    anew(path, data)


# damage


def test_bits_flipped_and_cuts_at_random_are_told_or_harmless(path):
    """A hundred places: everything that can be read is what was written, or an error says that the store is damaged."""
    written, data, random = everything(path), path.read_bytes(), np.random.default_rng(0)
    ends = Counter()
    for trial in range(100):
        place, bit = int(random.integers(len(data))), int(random.integers(8))
        changed = bytearray(data[:place] if trial % 5 == 4 else data)
        if trial % 5 < 4:
            changed[place] ^= 1 << bit
        anew(path, changed)
        try:
            assert everything(path) == written, f"silent: bit {bit} of byte {place}"
            ends["harmless"] += 1
        except ValueError as e:
            assert str(path) in str(e) and (
                "damaged" in str(e) or "unfinished" in str(e) or "no HDF5 file" in str(e)
            ), e
            ends["told"] += 1
    assert ends["told"] > 80, ends


@pytest.mark.parametrize(
    "name, what, index, words",
    [
        (
            "a",
            "pixels",
            (0, 1, 1),
            r"the pixels of image 'a' at \[256:300, 256:270\] differ from what was written .wrong checksum.",
        ),
        (
            "a",
            "labels",
            (1, 0),
            r"the labels of image 'a' at \[256:300, 0:256\] differ from what was written",
        ),
        ("b", "pixels", (0, 0, 0), r"the pixels of image 'b' at \[0:64, 0:70\] differ"),
        (
            "b",
            "counts",
            (0, 0, 0),
            r"the counts of image 'b' (differ from what was written|at .* cannot be unpacked)",
        ),
    ],
)
def test_damage_is_told_by_image_and_place_and_the_rest_is_read(path, name, what, index, words):
    at, size = place_of(path, name, what, index)
    flipped(path, at + size // 2)
    store, whole = Store(path), Box.whole(IMAGES[name][1].shape[1:])
    with pytest.raises(Damage, match=words):
        {
            "pixels": store.read,
            "labels": store.labels,
            "counts": lambda name, _: store.block_counts(name),
        }[what](name, whole)
    assert np.array_equal(store.read("a", Box((0, 0), (200, 200))), IMAGES["a"][1][:, :200, :200])
    (finding,) = findings(path)
    assert (
        finding.startswith(f"{path} is damaged: the {what} of image {name!r}")
        and finding.count("\n") == 0
    )


def test_chunks_in_each_others_place_are_told(path):
    (one, size), (two, _) = (place_of(path, "a", "pixels", (0, k, 0)) for k in (0, 1))
    data = bytearray(path.read_bytes())
    data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]
    anew(path, data)
    assert len(findings(path)) == 2


def test_a_store_made_of_two_is_told(path, tmp_path):
    """The sums of other labels, each of them whole."""
    pixels, labels = random_image((64, 70), seed=9)
    made_store(tmp_path / "other.h5", IMAGES | {"b": ("val", pixels, labels)})
    with h5py.File(tmp_path / "other.h5") as other, h5py.File(path, "r+") as file:
        del file["images/b/labels"]
        other.copy("images/b/labels", file["images/b"])
        file["sums"][:] = other["sums"][:]
    with pytest.raises(
        Damage, match="the checksums of the labels of image 'b' differ from what was written"
    ):
        Store(path).labels("b", Box.whole((64, 70)))
    assert len(findings(path)) == 2, "the pixels of b and its labels"


@pytest.mark.parametrize("name", ["mean", "classes", "ignore", "layout"])
def test_the_header_is_under_a_checksum_too(path, name):
    """HDF5's own would not tell who changed a value through it."""
    with h5py.File(path, "r+") as file:
        file.attrs[name] = {
            "mean": [1.0, 2.0],
            "classes": ["a", "b", "c"],
            "ignore": 254,
            "layout": "other",
        }[name]
    with pytest.raises(
        ValueError,
        match="s.h5 is damaged or cut off: its header cannot be read .*wrong checksum.*: copy it again, or prepare it anew",
    ):
        Store(path)
    assert len(findings(path)) == 1


@pytest.mark.parametrize(
    "what", ["images/b/pixels", "images/b/labels", "images/b/counts", "images/b", "sums", "index"]
)
def test_what_is_missing_is_told(path, what):
    with h5py.File(path, "r+") as file:
        del file[what]
    assert any(f"has no {what}" in line for line in findings(path))


def test_a_disk_that_can_not_be_read_is_told_with_the_place(path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    store = Store(path)
    store.reader("a", "pixels")
    monkeypatch.setattr(chunks.os, "preadv", broken)
    with pytest.raises(
        OSError,
        match=r"s.h5: the pixels of image 'a' at .* cannot be read from the disk \(Input/output error\)",
    ):
        store.read("a", Box((0, 0), (5, 5)))


def test_check_finds_labels_that_are_no_class_counts_that_are_wrong_and_pixels_that_are_no_number(
    tmp_path,
):
    """In a store of version 1, in which each of them is silent."""
    pixels, labels = random_image((300, 70))
    pixels, labels = pixels.astype("f4"), labels.copy()
    path = old_store(
        tmp_path / "s.h5",
        {
            "a": ("train", pixels, labels),
            "b": ("val", pixels, labels),
            "c": ("val", pixels, labels),
        },
    )
    with h5py.File(path, "r+") as file:
        file["images/a/pixels"][1, 280, 7] = np.nan
        file["images/b/labels"][3, 5] = 77
        file["images/c/labels"][70, 66] = 2 if labels[70, 66] != 2 else 1
    found = findings(path)
    assert len(found) == 3
    assert (
        "pixels of image 'a' at [256:300, 0:70] have an invalid value: band band1 is nan at (280, 7)"
        in found[0]
    )
    assert (
        "labels of image 'b' at [0:256, 0:70] have the label 77 at (3, 5), which is no class"
        in found[1]
    )
    assert "counts of image 'c' say " in found[2] and "at [64:128, 64:70]" in found[2]


def test_check_is_a_command(path, capsys):
    for code, words in ((0, "s.h5: whole\n"), (2, "s.h5: 2 damaged\n")):
        with pytest.raises(SystemExit) as end:
            main(["check", str(path)])
        out = capsys.readouterr().out
        assert end.value.code == code and out.endswith(words) and out.count("is damaged: ") == code
        for name in "ab":
            flipped(path, place_of(path, name, "pixels", (0, 0, 0))[0] + 5)


def test_an_old_store_is_read_and_says_once_what_it_lacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(store_module, "_warned", set())
    path = old_store(tmp_path / "s.h5", IMAGES)
    new = made_store(tmp_path / "t.h5", IMAGES)
    for store in (Store(path), Store(path)):
        for name, (_, pixels, labels) in IMAGES.items():
            whole = Box.whole(pixels.shape[1:])
            assert np.array_equal(store.read(name, whole), pixels)
            assert np.allclose(
                store.read_normalised(name, whole), new.read_normalised(name, whole), atol=1e-6
            )
            if labels is not None:
                assert np.array_equal(store.labels(name, whole), labels) and np.array_equal(
                    store.block_counts(name), new.block_counts(name)
                )
    err = capsys.readouterr().err
    assert (
        err.count("s.h5 is a store of version 1, which has no checksums") == 1 and "t.h5" not in err
    )
    assert not findings(path) and store.digest != new.digest


# files made to do harm


def hostile(tmp_path, change) -> str:
    """An old store, in which no checksum stands in the way, after ``change``."""
    path = old_store(tmp_path / "s.h5", IMAGES)
    with h5py.File(path, "r+") as file:
        change(file, tmp_path)
    return str(path)


def external_link(file, folder):
    with h5py.File(folder / "other.h5", "w") as other:
        other["pixels"] = IMAGES["a"][1]
    del file["images/a/pixels"]
    file["images/a/pixels"] = h5py.ExternalLink(str(folder / "other.h5"), "pixels")


def link_to_a_pipe(file, folder):
    os.mkfifo(folder / "pipe")
    del file["images/a"]
    file["images/a"] = h5py.ExternalLink(str(folder / "pipe"), "/")


def soft_link(file, _):
    del file["images/a/pixels"]
    file["images/a/pixels"] = h5py.SoftLink("/images/b/pixels")


def raw_data_elsewhere(file, folder):
    os.mkfifo(folder / "pipe")
    pixels = file["images/a/pixels"]
    shape, dtype = pixels.shape, pixels.dtype
    del file["images/a/pixels"]
    file["images/a"].create_dataset(
        "pixels", shape, dtype, external=[(str(folder / "pipe"), 0, h5py.h5f.UNLIMITED)]
    )


def virtual(file, folder):
    shape = file["images/a/pixels"].shape
    layout = h5py.VirtualLayout(shape, "u1")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "pixels", shape)
    del file["images/a/pixels"]
    file["images/a"].create_virtual_dataset("pixels", layout)


def packed_by(filters):
    def change(file, _):
        pixels = file["images/a/pixels"][:]
        del file["images/a/pixels"]
        file["images/a"].create_dataset("pixels", data=pixels, **filters)

    return change


def another(**options):
    def change(file, _):
        del file["images/a/pixels"]
        file["images/a"].create_dataset("pixels", **options)

    return change


def named(name):
    def change(file, _):
        index = json.loads(file["index"][()])
        index[0]["name"] = name
        del file["index"]
        file["index"] = json.dumps(index)

    return change


def index_elsewhere(file, folder):
    os.mkfifo(folder / "pipe")
    del file["index"]
    file.create_dataset("index", (1,), "S2000", external=[(str(folder / "pipe"), 0, 2000)])


def enormous(file, folder):
    named("a")(file, folder)
    index = json.loads(file["index"][()])
    index[0]["size"] = [1 << 30, 1 << 30]
    del file["index"]
    file["index"] = json.dumps(index)
    another(shape=(2, 1 << 30, 1 << 30), dtype="u1", chunks=(2, 256, 256))(file, folder)


HOSTILE = {
    "a link into another file": (
        external_link,
        "images/a/pixels is a link into another file, which is not followed",
    ),
    "a link to a pipe": (
        link_to_a_pipe,
        "images/a is a link into another file, which is not followed",
    ),
    "a soft link": (soft_link, "images/a/pixels is a soft link, which is not followed"),
    "raw data in a pipe": (
        raw_data_elsewhere,
        "the data of images/a/pixels are kept in other files, which are not opened",
    ),
    "virtual data": (virtual, "the data of images/a/pixels are kept in other files"),
    "an index in a pipe": (index_elsewhere, "the data of index are kept in other files"),
    "a filter": (
        packed_by(dict(compression="lzf")),
        "images/a/pixels is stored with HDF5's filter 32000, which distseg does not use: store it with gzip",
    ),
    "another filter": (packed_by(dict(chunks=True, scaleoffset=0)), "stored with HDF5's filter 6"),
    "no chunks": (packed_by({}), "pixels of image 'a' are not stored as distseg stores them"),
    "another type": (
        another(shape=(2, 300, 270), dtype="f8", chunks=(2, 256, 256)),
        "are .* of float64, but the index says .* of uint8",
    ),
    "another size": (
        another(shape=(2, 300, 271), dtype="u1", chunks=(2, 256, 256)),
        "the index says",
    ),
    "no data": (
        another(shape=(2, 300, 270), dtype="u1", chunks=(2, 256, 256)),
        "are missing or cut off",
    ),
    "a group": (
        lambda file, _: (file.__delitem__("images/a/pixels"), file.create_group("images/a/pixels")),
        "images/a/pixels holds no data",
    ),
    "an enormous image": (enormous, r"its images take 23058\d+ bytes, but the file has"),
    "a name that leads out": (
        named("../../up"),
        r"the name of an image must be UTF-8, not empty, .* got '../../up': rename it",
    ),
    "an absolute name": (named("/tmp/up"), "got '/tmp/up': rename it"),
    "no name": (named(""), "got '': rename it"),
    "a number for a name": (named(7), "impossible: the name 7"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_store_made_to_do_harm(tmp_path, kind):
    change, words = HOSTILE[kind]
    with at_once(), pytest.raises(ValueError, match=words):
        Store(hostile(tmp_path, change)).read("a", Box((0, 0), (3, 3)))
    with at_once():
        assert findings(tmp_path / "s.h5")


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device"])
def test_what_is_no_file(tmp_path, kind):
    path = {"a pipe": tmp_path / "pipe", "a folder": tmp_path, "a device": "/dev/zero"}[kind]
    if kind == "a pipe":
        os.mkfifo(path)
    with (
        at_once(),
        pytest.raises(ValueError, match=f"is no file but {kind}: 'distseg prepare' writes a store"),
    ):
        Store(path)


@pytest.mark.parametrize("kind", ["a link into another file", "a pipe", "another size"])
def test_a_prediction_made_to_do_harm(path, tmp_path, kind):
    """Such as somebody sends to be drawn."""
    found = tmp_path / "a.h5"
    if kind == "a pipe":
        os.mkfifo(found)
    else:
        with h5py.File(found, "w") as file:
            if kind == "another size":
                file.create_dataset("classes", (1 << 40, 1 << 20), "u1", chunks=(256, 256))
            else:
                file["classes"] = h5py.ExternalLink(str(path), "images/a/labels")
    words = {
        "a pipe": "a.h5 is no file but a pipe",
        "another size": "a.h5 has 1099511627776x1048576 pixels of uint8, but the image a of the store has 300x270 pixels",
        "a link into another file": "classes is a link into another file, which is not followed",
    }
    with at_once(), pytest.raises(ValueError, match=words[kind]):
        run_plot("overlay", [str(found)], str(path), None, None)


NASTY = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        3,
        1.5,
        2**31,
        2**63,
        10**30,
        float("nan"),
        "",
        "x",
        "../x",
        "|O",
        "S5",
        "<f4",
        [],
        [0],
        [-1, 5],
        [2**40, 2**40],
        {},
        {"a": 1},
        [[1]],
    ]
)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """An old store, and its index."""
    path = old_store(tmp_path_factory.mktemp("old") / "s.h5", IMAGES)
    with h5py.File(path) as file:
        return path, json.loads(file["index"][()])


@FUZZ
@given(st.data())
def test_an_index_of_any_values_is_refused_or_read(old, tmp_path_factory, data):
    path, index = old
    index, entry = copy.deepcopy(index), data.draw(st.integers(0, 2))
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from([*index[entry], "more"]))
        index[entry][key] = data.draw(NASTY)
    text = data.draw(
        st.sampled_from(
            [json.dumps(index), json.dumps(index)[:-9], json.dumps(index[entry]), "[" * 5000]
        )
    )
    refused_or_read(
        tmp_path_factory,
        path,
        lambda file: (file.__delitem__("index"), file.__setitem__("index", text)),
    )


@FUZZ
@given(
    name=st.sampled_from(
        [
            "format",
            "version",
            "complete",
            "bands",
            "classes",
            "ignore",
            "block",
            "mean",
            "std",
            "layout",
        ]
    ),
    value=NASTY.filter(lambda v: v not in (None, 10**30, {}, {"a": 1})),
)
def test_attributes_of_any_values_are_refused_or_read(old, tmp_path_factory, name, value):
    refused_or_read(tmp_path_factory, old[0], lambda file: file.attrs.__setitem__(name, value))


def refused_or_read(tmp_path_factory, path, change) -> None:
    other = tmp_path_factory.mktemp("fuzz") / "s.h5"
    other.write_bytes(path.read_bytes())
    with h5py.File(other, "r+") as file:
        change(file)
    with at_once():
        try:
            everything(other)
        except (ValueError, OSError) as e:
            assert str(other) in str(e), e
        findings(other)
