"""Masks as users have them: each kind gives the right labels, at once or with the flag that the message names, or is refused with the repair."""

import re
import unicodedata

import numpy as np
import pytest
import tifffile
from PIL import Image
from test_masks import run

from distseg.data.store.store import Store
from distseg.tiling.tile import Box

SIZE = (40, 50)
NAMES = ["a_01", "a_02", "b_03"]


def labels_of(number):
    """Return a map of two classes in blocks."""
    blocks = np.random.default_rng(number).integers(0, 2, (8, 10))
    return np.kron(blocks, np.ones((5, 5), int)).astype(np.uint8)


def picture(path, array, mode=None):
    Image.fromarray(array, mode).save(path)


def png(change, name="{}.png"):
    """Return a writer of a mask as PNG, in the numbers that ``change`` makes of the labels."""
    return lambda folder, stem, labels: picture(folder / name.format(stem), change(labels))


def npy(change):
    return lambda folder, stem, labels: np.save(folder / f"{stem}.npy", change(labels))


def tif(change):
    return lambda folder, stem, labels: tifffile.imwrite(folder / f"{stem}.tif", change(labels))


def palette(folder, stem, labels):
    image = Image.fromarray(labels, "P")
    image.putpalette([0, 0, 0, 250, 120, 10])
    image.save(folder / f"{stem}.png")


def jpeg(folder, stem, labels):
    picture(folder / f"{stem}.jpg", labels * 255)


def colours(labels):
    return np.array([[0, 0, 0], [255, 0, 0]], np.uint8)[labels]


def with_alpha(labels):
    return np.dstack([colours(labels), np.full(SIZE, 255, np.uint8)])


def one_hot(labels):
    return np.stack([1 - labels, labels])


def objects(labels):
    """Return a number for each run of columns: 0 outside, many numbers inside."""
    return np.where(labels, 7 + np.arange(SIZE[1]) // 5, 0).astype(np.uint16)


def same(labels):
    return labels


# kind -> (writer of a mask, what the message says at first or None, flags that mend it or None)
KINDS = {
    "0 and 1": (png(same), None, ()),
    "0 and 255": (png(lambda y: y * 255), "--values=255=1", ("--values=255=1",)),
    "bits": (png(lambda y: y.astype(bool)), None, ()),
    "palette": (palette, None, ()),
    "colours": (png(colours), "--classes background=#", ("--classes", "x=#000000,y=#ff0000")),
    "colours, alpha": (png(with_alpha), "--classes b", ("--classes", "x=#000000,y=#ff0000")),
    "objects": (png(objects), "--instances foreground", ("--instances", "foreground")),
    "16 bits": (tif(lambda y: y * np.uint16(1000)), "--values=1000=1", ("--values=1000=1",)),
    "signed": (tif(lambda y: y.astype("i2") - 1), "=-1=0,0=1", ("--values=-1=0,0=1",)),
    "float TIFF": (tif(lambda y: y.astype("f4")), None, ()),
    "float npy": (npy(lambda y: y.astype("f8")), None, ()),
    "bool npy": (npy(lambda y: y.astype(bool)), None, ()),
    "shares": (npy(lambda y: y * 0.5), "holds 0.5, which is not a whole number", None),
    "endless": (npy(lambda y: np.where(y, np.inf, 0)), "holds inf, which is not a whole", None),
    "one-hot": (npy(one_hot), r"one-hot.*argmax\(0\)", None),
    "JPEG": (jpeg, "is a mask in JPEG, which changes labels: write the masks as PNG", None),
    "other size": (png(lambda y: y[:39]), "has 40x50 pixels, but its mask .* has 39x50", None),
    "suffix": (png(same, "{}_mask.png"), None, ()),
    "prefix": (png(same, "gt_{}.png"), None, ()),
    "ending in capitals": (png(same, "{}.PNG"), None, ()),
}


def images_in(folder, names=NAMES):
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 256, (*SIZE, 3), np.uint8)
        picture(folder / f"{name}.png", pixels)


def masks_in(folder, write, names=NAMES):
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        write(folder, name, labels_of(number))


def prepared(folder, *flags):
    classes = () if "--classes" in flags else ("--classes", "x,y")
    where = folder / "i", folder / "s.h5", "--masks", folder / "m"
    return run("prepare", *where, *classes, *flags)


def assert_labels(store, names=NAMES):
    for number, name in enumerate(names):
        assert np.array_equal(store.labels(name, Box.whole(SIZE)), labels_of(number))


@pytest.mark.filterwarnings("ignore:'mode' parameter")
@pytest.mark.covering(cases=7)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(tmp_path, capsys, kind):
    write, words, flags = KINDS[kind]
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", write)
    if words is not None:
        assert prepared(tmp_path) == 2
        message = capsys.readouterr().err
        assert re.search(words, message), message
    if flags is not None:
        assert prepared(tmp_path, *flags) == 0
        assert_labels(Store(tmp_path / "s.h5"))
    assert (tmp_path / "s.h5").exists() == (flags is not None)


def test_objects_that_touch_have_a_border(tmp_path):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", png(objects))
    assert prepared(tmp_path, "--instances", "border", "--classes", "x,y,border") == 0
    found = Store(tmp_path / "s.h5").labels("a_01", Box.whole(SIZE))
    assert np.array_equal(found > 0, labels_of(0) > 0) and (found == 2).any()


def test_more_classes_than_a_byte_holds(tmp_path, capsys):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", tif(lambda y: y * np.uint16(300)))
    assert prepared(tmp_path, "--classes", ",".join(f"c{k}" for k in range(301))) == 2
    message = capsys.readouterr().err
    assert "301 classes" in message and "at most 255" in message and "c17" not in message


def test_an_empty_folder_and_a_missing_mask(tmp_path, capsys):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", png(same))
    (tmp_path / "m/b_03.png").unlink()
    assert prepared(tmp_path) == 2
    assert "1 images of" in (message := capsys.readouterr().err) and "(b_03)" in message
    for name in NAMES[:2]:
        (tmp_path / f"m/{name}.png").unlink()
    assert prepared(tmp_path) == 2
    assert f"the folder {tmp_path / 'm'} holds no" in capsys.readouterr().err


def test_transparency_of_images_is_no_data(tmp_path):
    masks_in(tmp_path / "m", png(same))
    (tmp_path / "i").mkdir()
    for name in NAMES:
        pixels = np.random.default_rng(1).integers(0, 256, (*SIZE, 4), np.uint8)
        pixels[..., 3] = 255
        pixels[:4, :, 3] = 0
        picture(tmp_path / f"i/{name}.png", pixels)
    assert prepared(tmp_path) == 0
    store = Store(tmp_path / "s.h5")
    labels = store.labels("a_01", Box.whole(SIZE))
    assert store.bands == 3 and (labels[:4] == 255).all()
    assert np.array_equal(labels[4:], labels_of(0)[4:])


# names in both forms of Unicode: é as one character (NFC), or as e and an accent (NFD)


def nfd(name):
    return unicodedata.normalize("NFD", name)


@pytest.mark.covering(cases=2)
@pytest.mark.parametrize("suffix", ["", "_mask"])
@pytest.mark.parametrize("of_images, of_masks", [(str, nfd), (nfd, str), (nfd, nfd)])
def test_both_forms_of_a_letter_are_one_name(tmp_path, capsys, of_images, of_masks, suffix):
    names = ["é", "ö2", "plain"]
    images_in(tmp_path / "i", map(of_images, names))
    masks_in(tmp_path / "m", png(same), [of_masks(name) + suffix for name in names])
    assert prepared(tmp_path) == 0
    assert_labels(Store(tmp_path / "s.h5"), names)
    assert ("other names" in capsys.readouterr().out) == bool(suffix)


def test_both_forms_of_a_name_in_one_folder_are_refused(tmp_path, capsys):
    images_in(tmp_path / "i", ["é", nfd("é")]), masks_in(tmp_path / "m", png(same), ["é"])
    assert prepared(tmp_path) == 2
    assert "how Unicode writes" in capsys.readouterr().err


def test_a_table_of_labels_may_use_the_other_form(tmp_path):
    images_in(tmp_path / "i", ["é", "b"])
    for name in (nfd("é"), nfd("é.png")):
        (tmp_path / "t.csv").write_text(f"image,label\n{name},x\nb,y\n", encoding="utf-8")
        where = tmp_path / "i", tmp_path / "s.h5", "--overwrite", "--split", "1,0,0"
        assert run("prepare", *where, "--labels", tmp_path / "t.csv") == 0
        assert Store(tmp_path / "s.h5").label("é") == 0
