"""`prepare --recursive` reads the images in folders inside folders, and leaves none out."""

import re

import numpy as np
import pytest
from PIL import Image
from test_masks import run

from distseg.data.store.store import Store
from distseg.tiling.tile import Box


def labels_of(seed):
    return np.random.default_rng(seed).integers(0, 2, (9, 12)).astype(np.uint8)


def files(folder, names, masks=True):
    """Write an image, and perhaps a mask, for each name such as ``city/a``; the seed is its number."""
    for number, name in enumerate(names):
        for kind, pixels in (("i", labels_of(number) + 7), ("m", labels_of(number))):
            if kind == "i" or masks:
                path = folder / kind / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)


def prepared(folder, *flags, masks="m"):
    arguments = ["prepare", folder / "i", folder / "s.h5", "--masks", folder / masks]
    return run(*arguments, "--classes", "land,road", "--recursive", "--split", "1,0,0", *flags)


def test_images_of_all_folders_have_the_labels_of_their_masks(tmp_path, capsys):
    names = ["a", "city/a", "city/north/a", "city/north/b", "sea/a"]
    files(tmp_path, names)
    (tmp_path / "i/sea/deep").mkdir()
    Image.fromarray(labels_of(0)).save(tmp_path / "i/sea/deep/x.gif")
    assert prepared(tmp_path) == 0
    store = Store(tmp_path / "s.h5")
    assert store.split("train") == ["a", "city-a", "city-north-a", "city-north-b", "sea-a"]
    for number, name in enumerate(store.split("train")):
        assert np.array_equal(store.labels(name, Box.whole((9, 12))), labels_of(number))
    assert "i/sea/deep/x.gif" in capsys.readouterr().out  # named, as it is not read


def test_splits_stay_at_the_top(tmp_path):
    files(tmp_path, ["train/x/a", "train/b", "test/x/a2"])
    assert prepared(tmp_path) == 0
    store = Store(tmp_path / "s.h5")
    assert (store.split("train"), store.split("test")) == (["b", "x-a"], ["x-a2"])


def test_a_folder_of_masks_inside_the_folder_of_images(tmp_path):
    files(tmp_path, ["x/a", "x/b"])
    (tmp_path / "m").rename(tmp_path / "i/masks")
    assert prepared(tmp_path, masks="i/masks") == 0
    assert Store(tmp_path / "s.h5").split("train") == ["x-a", "x-b"]


@pytest.mark.parametrize(
    "names, lost, words",
    [
        (["x/a", "x/c", "y/b"], "m/x/a.png", "1 images of .*i/x have no mask"),
        (["x/a", "y/b"], "i/x/a.png", "m/x holds masks, but .*i/x holds no image"),
        (["x/train/a", "y/b"], None, r"x/train is named like a split \(train\)"),
        (["x/a", "valid/b"], None, r"valid is named like a split \(valid\)"),
        (["train/a", "valid/b"], None, "i/valid holds images, but would not be read"),
        (["x/a-b", "x-a/b"], None, "x-a/b.png have the same name: rename one"),
    ],
)
def test_what_would_be_left_out_is_refused(tmp_path, names, lost, words, capsys):
    files(tmp_path, names)
    if lost:
        (tmp_path / lost).unlink()
        if not any((folder := (tmp_path / lost).parent).iterdir()):
            folder.rmdir()
    assert prepared(tmp_path) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "s.h5").exists()


def test_without_the_flag_the_message_names_it(tmp_path, capsys):
    files(tmp_path, ["x/a", "b"])
    arguments = ["prepare", tmp_path / "i", tmp_path / "s.h5", "--masks", tmp_path / "m"]
    assert run(*arguments, "--classes", "land,road") == 2
    assert "or set --recursive to read all subfolders" in capsys.readouterr().err
