"""Parts of images share no pixel, cover the image, and keep its place and its labels."""

import re
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from PIL import Image
from test_masks import run

from distseg.config.sizes import Size
from distseg.data.formats.georeference import Georeference, of_matrix
from distseg.data.pairs import opened
from distseg.data.parts import cut
from distseg.data.store.store import Store
from distseg.tiling.tile import Box

SIZE = (37, 53)
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(1, 250, (*SIZE, 3)).astype(np.uint8)
LABELS = RANDOM.integers(0, 3, SIZE).astype(np.uint8)


@pytest.fixture
def scene(tmp_path):
    """One georeferenced image and its mask, in folders of their own."""
    for folder in ("i", "m"):
        (tmp_path / folder).mkdir()
    Image.fromarray(LABELS).save(tmp_path / "m/scene.png")
    tags = [(33550, "d", 3, (2.0, 2.0, 0.0)), (33922, "d", 6, (0, 0, 0, 1000.0, 5000.0, 0))]
    tifffile.imwrite(tmp_path / "i/scene.tif", PIXELS, photometric="rgb", extratags=tags)
    return tmp_path


def prepared(folder, *flags):
    where = folder / "i", folder / "s.h5", "--masks", folder / "m", "--overwrite"
    return run("prepare", *where, "--classes", "a,b,c", *flags)


@pytest.mark.parametrize("flags", [[], ["--reference"]], ids=["copied", "referred to"])
def test_parts_cover_the_image_once(scene, flags, capsys):
    assert prepared(scene, "--parts", "3x4", *flags) == 0
    store = Store(scene / "s.h5")
    assert [len(store.split(split)) for split in ("train", "val", "test")] == [8, 2, 2]
    assert "cut into 3x4 parts (8 for train, 2 for val, 2 for test)" in capsys.readouterr().out
    rows, columns = np.linspace(0, 37, 4).astype(int), np.linspace(0, 53, 5).astype(int)
    for row in range(3):
        for column in range(4):
            name, start = f"scene_r{row}c{column}", (rows[row], columns[column])
            box = Box.whole(store.size(name))
            inside = box.shifted(start).slices
            assert np.array_equal(store.read(name, box), np.moveaxis(PIXELS[inside], -1, 0))
            assert np.array_equal(store.labels(name, box), LABELS[inside])
            a, _, x, _, e, y = store.place(name).transform
            assert (a, e, x, y) == (2, -2, 1000 + 2 * start[1], 5000 - 2 * start[0])


def test_a_part_that_leaves_its_file_is_refused(scene):
    assert prepared(scene, "--parts", "2x2", "--reference") == 0
    source = Store(scene / "s.h5")._entry("scene_r1c1").source
    far = replace(source, part=Box((18, 26), (38, 53)))
    assert type(source).from_json(far.to_json()) == far and far.valid
    with pytest.raises(ValueError, match=r"has 37x53 pixels, but .* part from .* prepare"):
        far.image(far.open(str(scene / "s.h5")))
    assert not replace(source, part=Box((18,), (38, 53))).valid


def test_parts_of_images_in_folders_of_splits_stay_there(scene):
    for folder, name in (("i", "scene.tif"), ("m", "scene.png")):
        (scene / folder / "val").mkdir()
        (scene / folder / "train").mkdir()
        (scene / folder / name).rename(scene / folder / "train" / name)
    Image.fromarray(PIXELS).save(scene / "i/val/other.png")
    Image.fromarray(LABELS).save(scene / "m/val/other.png")
    assert prepared(scene, "--parts", "2x1") == 0
    store = Store(scene / "s.h5")
    assert store.split("train") == ["scene_r0c0", "scene_r1c0"]
    assert store.split("val") == ["other_r0c0", "other_r1c0"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--parts", "2x2x2"], "--parts is 2x2x2, but .*scene.tif has 2 dims .37x53.: give one"),
        (["--parts", "2x60"], "--parts is 2x60, but .*scene.tif has 2 dims .37x53.: give one"),
        (["--parts", "2x2", "--pages", "images"], "--pages"),
    ],
)
def test_parts_that_are_refused(scene, flags, words, capsys):
    assert prepared(scene, *flags) == 2
    message = capsys.readouterr().err
    assert re.search(words, message), message


def test_a_part_with_the_name_of_another_image_is_refused(scene, capsys):
    Image.fromarray(PIXELS).save(scene / "i/scene_r0.png")
    pairs = [
        opened("train", scene / f"i/{name}", None, 2) for name in ("scene.tif", "scene_r0.png")
    ]
    with pytest.raises(ValueError, match="scene.tif and .*scene_r0.png have the same name"):
        cut([pairs[0], replace(pairs[1], name="scene")], Size("2x2"), None, 0)


def test_instances_at_the_border_of_a_part_see_their_neighbours(scene):
    """The labels of parts are those of the whole image, cut."""
    numbers = np.repeat(np.arange(1, 54, dtype=np.uint8)[None], 37, 0)
    Image.fromarray(numbers).save(scene / "m/scene.png")
    assert prepared(scene, "--parts", "1x2", "--instances", "border", "--absent", "a,b") == 0
    store = Store(scene / "s.h5")
    for name in ("scene_r0c0", "scene_r0c1"):
        assert (store.labels(name, Box.whole(store.size(name))) == 2).all()


@pytest.mark.parametrize(
    "place",
    [
        Georeference(((33550, (2.0, 3.0, 0.0)), (33922, (1.0, 2.0, 0.0, 70.0, 80.0, 0.0)))),
        of_matrix([[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3], [0, 0, 0, 1]]),
    ],
    ids=["tie point", "matrix"],
)
def test_a_part_lies_where_its_pixels_lie(place):
    a, b, c, d, e, f = place.transform
    moved = place.of_part((3, 5)).transform  # row 3, column 5
    np.testing.assert_allclose(moved, (a, b, c + 5 * a + 3 * b, d, e, f + 5 * d + 3 * e))


def test_polynomials_of_a_part_begin_at_its_first_pixel():
    numbers = tuple(float(n) for n in range(92))
    found = dict(Georeference(((50844, numbers),)).of_part((3, 5)).tags)[50844]
    assert found[:5] == (0, 1, 2 - 3, 3 - 5, 4) and found[4:] == numbers[4:]
