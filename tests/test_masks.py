"""Masks as people have them: colours, palettes, numbers of objects, other names than images."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from distseg.cli.main import main
from distseg.data.masks import MaskForm, named_colours
from distseg.data.partners import partners
from distseg.data.store.store import Store
from distseg.tiling.tile import Box

COLOURS = np.array([[0, 0, 0], [255, 0, 0], [16, 32, 200]], np.uint8)
COLOURED = "land=#000000,road=#ff0000,lake=#1020c8"


def run(*arguments):
    """Run the command line in this process and return its exit code."""
    try:
        return main([str(argument) for argument in arguments]) or 0
    except SystemExit as e:
        return e.code


def classes_of(number, size=(31, 43)):
    """Return a map of three classes in blocks of odd sizes."""
    random = np.random.default_rng(number)
    blocks = random.integers(0, 3, (-(-size[0] // 5), -(-size[1] // 7)))
    return np.kron(blocks, np.ones((5, 7), int))[: size[0], : size[1]].astype(np.uint8)


def rgb(classes):
    return Image.fromarray(COLOURS[classes])


def rgba(classes):
    pixels = np.dstack([COLOURS[classes], np.full(classes.shape, 255, np.uint8)])
    return Image.fromarray(pixels, "RGBA")


def palette(classes):
    picture = Image.fromarray(classes, "P")
    picture.putpalette(COLOURS.ravel().tolist())
    return picture


def images_in(folder, count=4, name="img_{:02d}"):
    folder.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (31, 43, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name.format(number)}.png")


def masks_in(folder, made, count=4, name="img_{:02d}", ending=".png"):
    folder.mkdir()
    for number in range(count):
        made(classes_of(number)).save(folder / f"{name.format(number)}{ending}")


def prepared(folder, *flags, classes=COLOURED):
    """Run prepare on a folder's images and masks and return its exit code."""
    arguments = ["prepare", folder / "i", folder / "s.h5", "--masks", folder / "m"]
    return run(*arguments, "--classes", classes, "--split", "0.5,0.25,0.25", *flags)


def labels_in(folder, name="img_{:02d}", count=4):
    store = Store(folder / "s.h5")
    names = [name.format(number) for number in range(count)]
    return [store.labels(each, Box.whole(store.size(each))) for each in names]


@pytest.mark.parametrize("made", [rgb, rgba, palette])
def test_colours_stand_for_classes(tmp_path, made):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", made)
    assert prepared(tmp_path) == 0
    for number, labels in enumerate(labels_in(tmp_path)):
        assert np.array_equal(labels, classes_of(number))
    store = Store(tmp_path / "s.h5")
    assert store.classes == ["land", "road", "lake"]
    assert np.array_equal(store.colours, COLOURS)  # class maps get the colours of the masks


def test_colours_in_tiff_and_in_black_and_white(tmp_path):
    images_in(tmp_path / "i"), (tmp_path / "m").mkdir()
    for number in range(4):
        classes = classes_of(number).clip(max=1)
        path = tmp_path / f"m/img_{number:02d}"
        if number % 2:
            tifffile.imwrite(f"{path}.tif", np.repeat(classes[..., None] * 255, 3, -1))
        else:
            Image.fromarray(classes * 255).save(f"{path}.png")
    assert prepared(tmp_path, classes="dark=#000000,light=#ffffff") == 0
    for number, labels in enumerate(labels_in(tmp_path)):
        assert np.array_equal(labels, classes_of(number).clip(max=1))


def test_a_colour_of_no_class_is_named_with_its_place(tmp_path, capsys):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", rgb)
    pixels = COLOURS[classes_of(2)]
    pixels[17, 5] = 1, 2, 3
    Image.fromarray(pixels).save(tmp_path / "m/img_02.png")
    assert prepared(tmp_path) == 2
    error = capsys.readouterr().err
    assert "img_02.png has the colour #010203 at" in error and "17" in error and "5" in error
    assert not (tmp_path / "s.h5").exists()


def test_masks_of_16_bits_and_lossy_ones_are_refused(tmp_path, capsys):
    images_in(tmp_path / "i"), (tmp_path / "m").mkdir()
    for number in range(4):
        tifffile.imwrite(
            tmp_path / f"m/img_{number:02d}.tif",
            np.repeat(classes_of(number)[..., None], 3, -1).astype(np.uint16),
        )
    assert prepared(tmp_path) == 2
    assert "has 3 bands of uint16, but a mask whose colours" in capsys.readouterr().err
    for path in (tmp_path / "m").iterdir():
        path.unlink()
    for number in range(4):
        rgb(classes_of(number)).save(tmp_path / f"m/img_{number:02d}.jpg")
    assert prepared(tmp_path) == 2
    assert "is a mask in JPEG, which changes colours" in capsys.readouterr().err


def objects_of(number):
    """Return numbers of objects up to 1000, many of which touch."""
    random = np.random.default_rng(number)
    numbers = random.integers(0, 3, (16, 15)) * random.integers(100, 500, (16, 15))
    return np.kron(numbers, np.ones((2, 3), int))[:31, :43].astype(np.uint16)


def border_of(numbers):
    """Return classes pixel by pixel: background 0, object 1, touching another object 2."""
    found = (numbers > 0).astype(np.uint8)
    for y, x in np.ndindex(*numbers.shape):
        for other in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
            inside = 0 <= other[0] < 31 and 0 <= other[1] < 43
            if inside and numbers[y, x] and numbers[other] and numbers[other] != numbers[y, x]:
                found[y, x] = 2
    return found


@pytest.mark.parametrize("kind", ["foreground", "border"])
def test_numbers_of_objects(tmp_path, kind, monkeypatch):
    """The border is found across the strips in which masks are read."""
    monkeypatch.setattr("distseg.data.prepare._STRIP_PIXELS", 43)
    images_in(tmp_path / "i"), (tmp_path / "m").mkdir()
    for number in range(4):
        tifffile.imwrite(tmp_path / f"m/img_{number:02d}.tif", objects_of(number))
    classes = "back,cell" + ",edge" * (kind == "border")
    assert prepared(tmp_path, "--instances", kind, classes=classes) == 0
    for number, labels in enumerate(labels_in(tmp_path)):
        expected = border_of(objects_of(number))
        assert np.array_equal(labels, expected if kind == "border" else expected.clip(max=1))


@pytest.mark.parametrize("kind", ["foreground", "border"])
def test_the_number_for_no_data_is_no_object(tmp_path, kind):
    numbers = objects_of(3).astype(np.uint16)
    numbers[20:] = 65535
    tag = (42113, "s", 0, "65535", True)
    tifffile.imwrite(tmp_path / "a.tif", numbers, extratags=[tag])
    reader = MaskForm(instances=kind).open(tmp_path / "a.tif", 2)
    found, valid = reader.read_valid(Box.whole(reader.size))
    expected = border_of(np.where(numbers == 65535, 0, numbers))
    assert np.array_equal(found[0], expected if kind == "border" else expected.clip(max=1))
    assert np.array_equal(valid, numbers != 65535)


def test_borders_do_not_depend_on_boxes(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", objects_of(5))
    reader = MaskForm(instances="border").open(tmp_path / "a.tif", 2)
    whole = reader.read(Box.whole(reader.size))[0]
    assert np.array_equal(whole, border_of(objects_of(5)))
    for box in (Box((0, 0), (1, 43)), Box((7, 3), (8, 4)), Box((30, 42), (31, 43))):
        assert np.array_equal(reader.read(box)[0], whole[box.slices])


@pytest.mark.parametrize(
    "image, mask",
    [
        ("img_{:02d}", "img_{:02d}_mask"),
        ("img_{:02d}", "mask_{:02d}"),
        ("{:d}", "label_{:d}"),
        ("a{:d}_image", "a{:d}_gt"),
        ("sat-{:03d}-rgb", "{:03d}"),
    ],
)
def test_names_with_parts_in_common_pair(tmp_path, image, mask, capsys):
    """Ten and more numbers, so that the common parts of names must not cut a number."""
    images_in(tmp_path / "i", 12, image), masks_in(tmp_path / "m", palette, 12, mask)
    assert prepared(tmp_path, classes="land,road,lake") == 0
    for number, labels in enumerate(labels_in(tmp_path, image, 12)):
        assert np.array_equal(labels, classes_of(number))
    assert "note: masks have other names than their images" in capsys.readouterr().out


@pytest.mark.parametrize(
    "images, masks, expected",
    [
        (["a", "b"], ["b", "a"], {"a": "a", "b": "b"}),
        (["a1", "a2"], ["b1", "b2"], {"a1": "b1", "a2": "b2"}),
        (["x10", "x11"], ["m10", "m11"], {"x10": "m10", "x11": "m11"}),
        (["x1", "x2", "x3"], ["x1_m", "x2_m"], {}),  # a mask is missing
        (["cat", "cow"], ["dog", "dot"], {}),
        (["a_1", "a_2"], ["1_1", "2_2"], {}),
        (["1_2", "2_1"], ["1_2_m", "2_1_m"], {"1_2": "1_2_m", "2_1": "2_1_m"}),
    ],
)
def test_partners(images, masks, expected):
    assert partners(images, masks) == expected


def test_one_missing_mask_is_named(tmp_path, capsys):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", palette, 4, "img_{:02d}_mask")
    (tmp_path / "m/img_02_mask.png").unlink()
    assert prepared(tmp_path, classes="land,road,lake") == 2
    error = capsys.readouterr().err
    assert "have no mask" in error and "img_02" in error


def test_dry_run_says_what_was_found_and_writes_nothing(tmp_path, capsys):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", palette)
    assert prepared(tmp_path, "--dry-run", classes="land,road,lake") == 0
    out = capsys.readouterr().out
    assert "31x43" in out and "uint8" in out and "img_00.png" in out
    assert "values of masks seen so far: 0, 1, 2" in out and "nothing was written" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "m"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--classes", "a=#000000,b"], "gives the class 'b' the colour none"),
        (["--classes", "a=#000000,b=red"], "gives the class 'b' the colour red"),
        (["--classes", "a=#000000,b=#000000"], "gives 'a' and 'b' the same colour"),
        (["--classes", COLOURED, "--instances", "border"], "leave one of them out"),
    ],
)
def test_wrong_flags(tmp_path, flags, words, capsys):
    images_in(tmp_path / "i"), masks_in(tmp_path / "m", rgb)
    arguments = ["prepare", tmp_path / "i", tmp_path / "s.h5", "--masks", tmp_path / "m"]
    assert run(*arguments, *flags) == 2 and words in capsys.readouterr().err


def test_named_colours():
    assert named_colours(["a", "b"]) == (["a", "b"], None)
    assert named_colours(["a=#0102ff", "b=fefefe"]) == (["a", "b"], ((1, 2, 255), (254, 254, 254)))
