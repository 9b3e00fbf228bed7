"""OME-Zarr images are read as zarr reads them, with their scale; damaged or hostile folders are refused by name."""

import gzip
import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from made_ome_zarr import SCALES, made_image, noise

from distseg.cli.main import main
from distseg.data.formats import plausible, zarr_packed
from distseg.data.formats.georeference import Georeference, matrix_in_millimeters, matrix_of
from distseg.data.formats.ngff import multiscale_in
from distseg.data.formats.readers import open_image, open_mask, stem_of
from distseg.data.store.store import Store
from distseg.inference.image_source import file_image
from distseg.tiling.tile import Box

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")
google_crc32c = pytest.importorskip("google_crc32c")  # zarr needs it too


def run(*arguments):
    """Run the command line in this process and return its exit code."""
    try:
        return main([str(argument) for argument in arguments]) or 0
    except SystemExit as e:
        return e.code


FORMS = {
    "v2": dict(version=2),
    "v2, nested, big-endian": dict(
        version=2,
        dtype=">i4",
        chunk_key_encoding={"name": "v2", "separator": "/"},
        filters=[numcodecs.Delta(">i4")],
        compressors=numcodecs.Blosc("lz4", shuffle=1),
    ),
    "v2, by columns, float": dict(version=2, dtype="float32", order="F", compressors=None),
    "v3": dict(),
    "v3, gzip, bool": dict(dtype="bool", compressors=zarr.codecs.GzipCodec()),
    "v3, float16, flat keys": dict(
        dtype="float16", chunk_key_encoding={"name": "v2", "separator": "."}, compressors=None
    ),
    "v3, shards": dict(
        dtype="int64",
        chunks={2: (5, 6), 3: (1, 5, 6), 4: (1, 3, 5, 6), 5: (1, 1, 3, 5, 6)},
        shards={2: (10, 18), 3: (2, 10, 18), 4: (1, 6, 10, 18), 5: (1, 2, 6, 10, 18)},
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "names, shape", [("yx", (13, 29)), ("cyx", (3, 13, 29)), ("czyx", (2, 8, 13, 9)), ("tczyx", (1, 2, 8, 13, 9))]
)  # fmt: skip
def test_boxes_are_those_of_zarr(tmp_path, names, shape, form):
    about = dict(FORMS[form])
    array = noise(shape, about.pop("dtype", "uint16"))
    for key in ("chunks", "shards"):
        if key in about:
            about[key] = about[key][len(shape)]
    path = made_image(tmp_path / "a.ome.zarr", array, names, **about)
    reader = open_image(path)
    assert np.array_equal(zarr.open_array(path / "0", mode="r")[...], array)
    whole = array.reshape(-1, *array.shape[-len(reader.size) :])
    assert (reader.bands, *reader.size) == whole.shape and not reader.notes
    assert reader.dtype == (np.uint8 if array.dtype == bool else array.dtype.newbyteorder("="))
    random = np.random.default_rng(1)
    for _ in range(4):
        start = [int(random.integers(0, n)) for n in reader.size]
        box = Box(
            tuple(start),
            tuple(int(random.integers(a + 1, n + 1)) for a, n in zip(start, reader.size)),
        )
        assert np.array_equal(reader.read(box), whole[(slice(None), *box.slices)])


def test_channels_may_lie_anywhere_and_a_single_slice_is_an_image(tmp_path):
    array = noise((1, 11, 13, 3))
    path = made_image(tmp_path / "a.zarr", array, "zyxc")
    reader = open_image(path)
    assert reader.size == (11, 13) and reader.bands == 3
    assert np.array_equal(reader.read(Box((1, 2), (9, 12))), array[0, 1:9, 2:12].transpose(2, 0, 1))
    assert open_image(path, 3).size == (1, 11, 13)
    volume = made_image(tmp_path / "b.zarr", noise((4, 11, 13)), "zyx")
    with pytest.raises(ValueError, match="4 slices of 11x13"):
        open_image(volume, 2)
    with pytest.raises(ValueError, match="axis z is needed"):
        open_image(made_image(tmp_path / "c.zarr", noise((11, 13)), "yx"), 3)


def test_only_the_chunks_of_a_box_are_read(tmp_path):
    path = made_image(tmp_path / "a.zarr", noise((21, 21)), "yx", chunks=(7, 7))
    for index in ("0/0", "0/1", "1/0", "2/2"):
        (path / "0/c" / index).write_bytes(b"damage")
    reader = open_image(path)
    reader.read(Box((7, 7), (14, 21)))
    with pytest.raises(ValueError, match=r"damaged chunk, .*0/c/2/2 .*copy it again"):
        reader.read(Box((7, 7), (15, 21)))


@pytest.mark.parametrize("unit, metres", [("micrometer", 1e-6), ("nanometer", 1e-9), (None, None)])
def test_scale_and_translation_become_the_place(tmp_path, unit, metres):
    path = made_image(
        tmp_path / "a.zarr", noise((4, 9, 11)), "zyx", unit=unit, shift={"y": 3.5, "z": -1.0}
    )
    place = open_image(path).place
    assert place == Georeference.from_json(json.loads(json.dumps(place.to_json())))
    assert place.unit == metres and place.of_voxels
    x, y, z = (SCALES[name] for name in "xyz")
    assert matrix_of(place) == [[x, 0, 0, 0], [0, y, 0, 3.5], [0, 0, z, -1.0], [0, 0, 0, 1]]
    if metres:
        assert matrix_in_millimeters(place)[1][1] == pytest.approx(y * metres * 1e3, rel=1e-15)


def test_transformations_of_all_levels_follow_and_units_may_differ(tmp_path):
    path = made_image(tmp_path / "a.zarr", noise((9, 11)), "yx", version=2, shift={"x": 1.0})
    about = json.loads((path / ".zattrs").read_text())
    image = about["multiscales"][0]
    image["coordinateTransformations"] = [{"type": "scale", "scale": [2.0, 4.0]}, {"type": "translation", "translation": [0.5, 0.0]}]  # fmt: skip
    image["axes"][0]["unit"] = "nanometer"
    (path / ".zattrs").write_text(json.dumps(about))
    matrix = matrix_of(open_image(path).place)
    assert matrix[0] == [4 * SCALES["x"], 0, 0, 4.0]
    assert matrix[1] == pytest.approx([0, 2e-3 * SCALES["y"], 0, 0.5e-3], rel=1e-12)
    image["axes"][0]["unit"] = image["axes"][1]["unit"] = "furlong"
    (path / ".zattrs").write_text(json.dumps(about))
    reader = open_image(path)
    assert reader.place.unit is None and "unknown unit of length (furlong" in reader.notes[0]


def test_a_scale_after_a_translation_scales_it_too():
    steps = [
        {"type": "translation", "translation": [1.0, 2.0]},
        {"type": "scale", "scale": [3.0, 4.0]},
    ]
    levels = [{"path": "0", "coordinateTransformations": steps}]
    image = {"version": "0.4", "axes": [{"name": "y"}, {"name": "x"}], "datasets": levels}
    found = multiscale_in({"multiscales": [image]}, 2, Path("a"))
    assert (found.scale, found.translation) == ((3.0, 4.0), (3.0, 8.0))


def test_missing_chunks_are_the_fill_value_and_told(tmp_path):
    array = noise((14, 14)) + 1
    array[:7, 7:] = 9
    path = made_image(tmp_path / "a.zarr", array, "yx", fill_value=9)
    assert not (path / "0/c/0/1").exists()  # zarr leaves such chunks out
    reader = open_image(path)
    assert np.array_equal(reader.read(Box((0, 0), (14, 14)))[0], array)
    assert "no file for 1 of 4 chunks, whose pixels are read as 9" in reader.notes[0]


def test_folders_are_prepared_with_their_labels(tmp_path, capsys):
    """The masks are the label images inside of the images, or masks of another format."""
    for number, split in enumerate(("train", "val", "test")):
        array = noise((2, 40, 48), seed=number)
        labels = (array[0] > 100).astype(np.uint8)
        path = made_image(tmp_path / "i" / split / f"v{number}.ome.zarr", array, "cyx")
        zarr.open_group(path / "labels", mode="w").attrs["ome"] = {
            "version": "0.5",
            "labels": ["nuclei"],
        }
        made_image(path / "labels/nuclei", labels, "yx", unit=None)
        (tmp_path / "m" / split).mkdir(parents=True)
        (tmp_path / "m" / split / f"v{number}.zarr").symlink_to(path / "labels/nuclei")
    assert stem_of("a/b.ome.zarr") == "b" and stem_of("b.zarr/0") == "0"
    words = [
        "prepare",
        tmp_path / "i",
        tmp_path / "s.h5",
        "--masks",
        tmp_path / "m",
        "--classes",
        "a,b",
    ]
    assert run(*words) == 0
    store, box = Store(tmp_path / "s.h5"), Box((3, 5), (30, 44))
    for number in range(3):
        array = noise((2, 40, 48), seed=number)
        assert np.array_equal(store.read(f"v{number}", box), array[(slice(None), *box.slices)])
        assert np.array_equal(store.labels(f"v{number}", box), (array[0] > 100)[box.slices])
        assert store.place(f"v{number}").unit == 1e-6
    (tmp_path / "i/other").mkdir()
    (tmp_path / "i/train/v0.ome.zarr").rename(tmp_path / "i/other/v0.ome.zarr")
    assert run(*words, "--overwrite") == 2
    assert "other holds images, but would not be read" in capsys.readouterr().err


def test_a_lower_level_is_read_with_its_mask(tmp_path, capsys):
    image, mask = noise((3, 20, 30)), noise((20, 30), "uint8") % 2
    for folder, array, names in (("i", image, "cyx"), ("m", mask, "yx")):
        (tmp_path / folder).mkdir()
        made_image(tmp_path / folder / "a.zarr", array, names)
    flags = "--masks", tmp_path / "m", "--classes", "a,b", "--overwrite"
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", *flags, "--level", "1") == 0
    store, box = Store(tmp_path / "s.h5"), Box((0, 0), (10, 15))
    assert np.array_equal(store.read("a", box), image[:, ::2, ::2])
    assert np.array_equal(store.labels("a", box), mask[::2, ::2])
    (x, y), (a, b) = ((m[0][0], m[1][1]) for m in map(matrix_of, (
        open_image(tmp_path / "i/a.zarr").place, store.place("a"),
    )))  # fmt: skip
    assert (a, b) == (2 * x, 2 * y)
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", *flags, "--level", "2") == 2
    assert "--level is 2, but" in (err := capsys.readouterr().err) and "has 2 levels" in err
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", *flags, "--reference") == 2
    assert "i/a.zarr is a folder (OME-Zarr): leave --reference out" in capsys.readouterr().err


def test_a_lower_level_is_predicted(tmp_path):
    array = noise((3, 20, 30))
    path = str(made_image(tmp_path / "a.zarr", array, "cyx"))
    manifest = {"data": {"mean": [1.0] * 3, "std": [2.0] * 3, "size": [20, 30]}}
    high, low = (file_image(path, manifest, level=level) for level in (0, 1))
    assert low.size == (10, 15) and low.identity != high.identity
    assert np.array_equal(low.read(Box((0, 0), (10, 15))), (array[:, ::2, ::2] - 1.0) / 2)


def test_other_files_have_no_levels(tmp_path):
    np.save(tmp_path / "a.npy", noise((20, 30)))
    with pytest.raises(ValueError, match="--level is 1, but .*a.npy is no OME-Zarr image"):
        open_image(tmp_path / "a.npy", level=1)


def test_recursive_search_does_not_look_into_images(tmp_path):
    for name in ("north/a", "south/b"):
        made_image(tmp_path / f"i/{name}.zarr", noise((24, 24), "uint8"), "yx")
        made_image(tmp_path / f"m/{name}.zarr", noise((24, 24), "uint8", 1) // 100, "yx")
    words = ["--masks", tmp_path / "m", "--classes", "a,b", "--recursive", "--split", "1,0,0"]
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", *words) == 0
    assert sorted(Store(tmp_path / "s.h5").split("train")) == ["north-a", "south-b"]


def test_an_image_is_no_folder_of_images(tmp_path, capsys):
    path = made_image(tmp_path / "i/a.zarr", noise((24, 24)), "yx")
    assert run("prepare", path, tmp_path / "s.h5", "--classes", "a,b") == 2
    assert "a.zarr is itself an image (OME-Zarr)" in capsys.readouterr().err


def test_a_mask_with_a_pixel_size_of_its_own_is_refused(tmp_path):
    made_image(tmp_path / "i/a.zarr", noise((24, 24)), "yx")
    made_image(tmp_path / "m/a.zarr", noise((24, 24), "uint8") // 100, "yx", shift={"x": 1.0})
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", "--masks", tmp_path / "m", "--classes", "a,b") == 2  # fmt: skip


def edit(*keys, to, file="zarr.json"):
    """Return a change of one entry of a file of metadata."""

    def change(path):
        about = inner = json.loads((path / file).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        (path / file).write_text(json.dumps(about))

    return change


def edit_v2(*keys, to):
    return edit(*keys, to=to, file="0/.zarray")


def edit_level(*keys, to):
    return edit(*keys, to=to, file="0/zarr.json")


def image(*keys, to):
    return edit("attributes", "ome", "multiscales", 0, *keys, to=to)


def cut(name, count):
    def change(path):
        os.truncate(path / name, count)

    return change


def link(path):
    (path / "0/c/0/0").unlink()
    (path / "0/c/0/0").symlink_to("/dev/zero")


STEPS = ("datasets", 0, "coordinateTransformations")
PICKLE = [{"id": "pickle", "protocol": 5}]
DAMAGES = {
    "no metadata": (3, lambda path: (path / "zarr.json").unlink(), "has no zarr.json, .zgroup or .zarray"),
    "no metadata, v2": (2, lambda path: (path / "0/.zarray").unlink(), "in the folder 0"),
    "cut metadata": (3, cut("zarr.json", 30), "zarr.json is damaged or cut off"),
    "nested metadata": (3, lambda path: (path / "zarr.json").write_text("[" * 10**5), "damaged or cut off"),
    "metadata of a list": (3, lambda path: (path / "zarr.json").write_text("[]"), "holds no JSON object"),
    "no image": (3, edit("attributes", to={}), "holds no OME-NGFF image"),
    "plate": (3, edit("attributes", to={"ome": {"plate": {}}}), "a plate or a well"),
    "series": (3, edit("attributes", to={"ome": {"bioformats2raw.layout": 3}}), "name one of these, such as 0"),
    "labels": (3, edit("attributes", to={"ome": {"labels": ["a", "b"]}}), r"several label images \(a, b\)"),
    "old version": (2, edit("multiscales", 0, "version", to="0.3", file=".zattrs"), "version 0.3 in zarr v2"),
    "no axes": (3, image("axes", to=None), "of a wrong form"),
    "axes by name only": (3, image("axes", to=["y", "x"]), "of a wrong form"),
    "strange axis": (3, image("axes", 0, to={"name": "q", "type": "space"}), "axis 'q' of the type space"),
    "turned axes": (3, image("axes", to=[{"name": "x", "type": "space"}, {"name": "y", "type": "space"}]), "axes x, y"),
    "axes of another count": (3, image("axes", to=[{"name": n} for n in "cyx"]), "scale of 3 positive"),
    "no scale": (3, image(*STEPS, 0, "scale", to=[0.0, 1.0]), "2 positive numbers"),
    "not a number": (3, image(*STEPS, 0, "scale", to=[float("nan"), 1.0]), "2 positive numbers"),
    "scale in a file": (3, image(*STEPS, 0, to={"type": "scale", "path": "/etc/passwd"}), "2 positive numbers"),
    "turning": (3, image(*STEPS, 0, "type", to="affine"), "coordinate transformation"),
    "way out": (3, image("datasets", 0, "path", to="../b.zarr/0"), "no folder inside"),
    "absolute way": (3, image("datasets", 0, "path", to="/etc"), "no folder inside"),
    "levels turned": (3, image("datasets", 1, "coordinateTransformations", 0, "scale", to=[0.1, 0.1]), "smaller pixels along y"),
    "level is a group": (3, image("datasets", 0, "path", to="."), "no folder inside|is no array"),
    "level is missing": (3, image("datasets", 0, "path", to="7"), "in the folder 7"),
    "objects": (2, edit_v2("dtype", to="|O"), r"array of \|O"),
    "fields": (2, edit_v2("dtype", to=[["a", "<u2"]]), "but pixels are whole"),
    "complex": (3, edit_level("data_type", to="complex64"), "array of complex64"),
    "texts": (3, edit_level("data_type", to={"name": "fixed_length_utf32"}), "but pixels are whole"),
    "pickled filter": (2, edit_v2("filters", to=PICKLE), "codec 'pickle'.*run code"),
    "pickled compressor": (2, edit_v2("compressor", to=PICKLE[0]), "codec 'pickle'.*run code"),
    "pickled codec": (3, edit_level("codecs", 1, "name", to="numcodecs.pickle"), "codec 'numcodecs.pickle'"),
    "transformer": (3, edit_level("storage_transformers", to=[{"name": "a"}]), "storage transformer"),
    "strange keys": (3, edit_level("chunk_key_encoding", "name", to="fanout"), "chunk key encoding 'fanout'"),
    "strange separator": (2, edit_v2("dimension_separator", to="/../"), "separates the indices"),
    "shape of words": (3, edit_level("shape", to=["a", 3]), "shape ax3"),
    "negative shape": (3, edit_level("shape", to=[-4, 3]), "shape -4x3"),
    "shape of other axes": (3, edit_level("shape", to=[2, 20, 20]), "chunk 7x7 for an array of 3 axes"),
    "empty": (3, edit_level("shape", to=[0, 20]), "has no pixels"),
    "chunk of nothing": (2, edit_v2("chunks", to=[0, 7]), "chunk 0x7"),
    "huge chunk": (2, edit_v2("chunks", to=[10**7, 10**7]), "each chunk of 10000000x10000000 numbers"),
    "link": (3, link, "is a link or a device"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_hostile_folders_are_refused_at_once(tmp_path, case):
    version, change, message = DAMAGES[case]
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx", version)
    change(path)
    with pytest.raises(ValueError, match=message) as caught:
        open_image(path)
    assert str(path) in str(caught.value)


def other_shape(path):
    """Write a larger chunk into the metadata than the files have."""
    edit_level("chunk_grid", "configuration", "chunk_shape", to=[9, 9])(path)


CHUNKS = {
    "cut": ("0/c/0/0", lambda file: os.truncate(file, 20)),
    "empty": ("0/c/0/0", lambda file: os.truncate(file, 0)),
    "other bytes": ("0/c/0/0", lambda file: file.write_bytes(b"x" * 99)),
    "other shape": ("0/c/0/0", lambda file: other_shape(file.parents[3])),
}


@pytest.mark.parametrize("case", CHUNKS)
@pytest.mark.parametrize("form", ["packed", "plain", "shards"])
def test_a_damaged_chunk_is_named(tmp_path, case, form):
    about = {"plain": dict(compressors=None), "shards": dict(shards=(14, 14)), "packed": {}}[form]
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx", chunks=(7, 7), **about)
    name, damage = CHUNKS[case]
    if (form, case) == ("shards", "other shape"):
        return
    damage(path / name)
    with pytest.raises(ValueError, match="damaged chunk, .*0/c/0/0 .*copy it again"):
        open_image(path).read(Box((0, 0), (5, 5)))


def compressor(name):
    """Return a compressor of zarr v2."""
    return numcodecs.get_codec({"id": name})


PACKERS = ["blosc", "lz4", "zstd", "gzip", "zlib", "bz2", "lzma"]


@pytest.mark.parametrize("name", PACKERS)
def test_chunks_of_all_compressors_are_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(zarr_packed, "_HARMLESS", 0)
    about = dict(version=2, chunks=(1, 300, 290), filters=[numcodecs.Delta("u2")])
    array = noise((2, 300, 300))
    array[1] = 7
    path = made_image(tmp_path / "a.zarr", array, "cyx", compressors=compressor(name), **about)
    assert np.array_equal(open_image(path).read(Box((0, 0), (300, 300))), array)


@pytest.mark.parametrize("form", [*PACKERS, "none", "shards", "two streams", "a checksum"])
def test_a_chunk_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, form):
    """Chunks of 98 bytes are replaced by some that unpack to 1 MB."""
    monkeypatch.setattr(zarr_packed, "_HARMLESS", 0)
    more = np.zeros(1 << 20, np.uint8)
    about, bomb = dict(version=2), {"none": bytes(more)}
    if form in PACKERS:
        about |= dict(compressors=compressor(form))
        bomb[form] = bytes(compressor(form).encode(more))
    elif form == "none":
        about |= dict(compressors=None)
    elif form == "two streams":
        about |= dict(compressors=compressor("gzip"))
        bomb[form] = gzip.compress(b"a") + 9 * b"\0" + gzip.compress(bytes(more))
    elif form == "a checksum":
        about |= dict(filters=[], compressors=None)
        bomb[form] = b"abcd" + bytes(compressor("zstd").encode(more))
    else:
        packed = bytes(compressor("zstd").encode(more))
        index = struct.pack("<8Q", 0, len(packed), *3 * (2**64 - 1, 2**64 - 1))
        about = dict(shards=(14, 14))
        bomb[form] = packed + index + struct.pack("<I", google_crc32c.value(index))
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx", chunks=(7, 7), **about)
    if form == "a checksum":
        edit_v2("filters", to=[{"id": "zstd"}, {"id": "crc32"}])(path)
    chunk = path / ("0/c/0/0" if form == "shards" else "0/0.0")
    chunk.write_bytes(bomb[form])
    monkeypatch.setattr(zarr.Array, "__getitem__", pytest.fail)
    with pytest.raises(ValueError, match=r"a chunk, .*0.0, that holds far more than its 7x7 numb"):
        open_image(path).read(Box((0, 0), (5, 5)))


@pytest.mark.parametrize("blocks, more", [(1, False), (2, False), (9, True)])
def test_frames_of_zstd_that_do_not_say_their_size_are_bounded_by_their_blocks(blocks, more):
    """A block of a repeated byte takes 4 bytes, and unpacks to 128 KiB."""
    block = (1 << 17) << 3 | 1 << 1
    headers = [block] * (blocks - 1) + [block | 1]
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(h.to_bytes(3, "little") + b"x" for h in headers)
    found = zarr_packed.unpacks_to_more(memoryview(frame), zarr_packed.Packing("zstd"), 49)
    assert found == more


@pytest.mark.parametrize(
    "codecs",
    [
        [{"id": "zlib"}, {"id": "zstd"}],
        [{"id": "zstd"}, {"id": "shuffle"}],
        [{"id": "lzma", "format": 3}],
    ],
    ids=["two", "changed later", "no header"],
)
def test_packings_that_cannot_be_checked_are_refused(tmp_path, codecs):
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx", 2)
    edit_v2("filters", to=codecs[:-1])(path)
    edit_v2("compressor", to=codecs[-1])(path)
    with pytest.raises(ValueError, match="one compressor as the last codec, such as zstd"):
        open_image(path)


@pytest.mark.parametrize(
    "change",
    [
        edit_level("codecs", 0, "configuration", "index_codecs", 0, "name", to="zstd"),
        edit_level("codecs", to=[{"name": "sharding_indexed", "configuration": {
            "chunk_shape": [7, 7], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]
        }}, {"name": "gzip"}]),
    ],
    ids=["index", "shard"],
)  # fmt: skip
def test_packed_shards_are_refused(tmp_path, change):
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx", chunks=(7, 7), shards=(14, 14))
    change(path)
    with pytest.raises(ValueError, match="their index must not be packed: write the image again"):
        open_image(path)


def test_memory_bounds_the_chunks(tmp_path, monkeypatch):
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx", chunks=(20, 20))
    monkeypatch.setattr(plausible, "free_memory", lambda: 799)
    with pytest.raises(ValueError, match="each chunk of 20x20 numbers is decoded at once"):
        open_image(path)


def test_arrays_without_axes_and_other_folders_are_refused(tmp_path):
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx")
    with pytest.raises(ValueError, match="without OME-NGFF metadata"):
        open_image(path / "0")
    with pytest.raises(FileNotFoundError):
        open_image(tmp_path)
    Path(tmp_path / "b.zarr").write_text("")
    with pytest.raises(ValueError, match="cannot be read as an image .it is a file, but"):
        open_image(tmp_path / "b.zarr")


def test_masks_are_whole_numbers_of_one_band(tmp_path):
    with pytest.raises(ValueError, match="2 bands of uint16, but a mask"):
        open_mask(made_image(tmp_path / "a.zarr", noise((2, 20, 20)), "cyx"))


def test_without_zarr_the_line_that_installs_it_is_told(tmp_path, monkeypatch):
    path = made_image(tmp_path / "a.zarr", noise((20, 20)), "yx")
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ValueError, match=r"pip install 'distseg\[microscopy\]'"):
        open_image(path)
