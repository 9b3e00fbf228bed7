"""Pixels without data, however a file says so: transparency, masks inside and beside it, a transparent colour, a number. They are ignored in
training, count in no mean, and are told. A file is read as its image in a store is."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from distseg.data.formats.readers import open_image
from distseg.data.nodata import missing
from distseg.data.prepare import prepare_folder
from distseg.data.store.check import check_store
from distseg.data.store.store import Store
from distseg.inference.image_source import file_image, store_image
from distseg.tiling.tile import Box

pytestmark = pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
SIZE = (64, 96)
WHOLE = Box.whole(SIZE)
VALID = np.ones(SIZE, bool)
VALID[:, :30] = False  # 31.25 %
RGB = np.where(
    VALID[..., None], np.random.default_rng(0).integers(20, 200, (*SIZE, 3), np.uint8), 0
).astype(np.uint8)
RGBA = np.dstack([RGB, VALID * np.uint8(255)])
LABELS = np.random.default_rng(1).integers(0, 2, SIZE).astype(np.uint8)


def internal(path, mask=VALID, **options):
    with tifffile.TiffWriter(path) as file:
        file.write(RGB, photometric="rgb", metadata=None, **options)
        file.write(RGB[::2, ::2], photometric="rgb", metadata=None, subfiletype=1, **options)
        file.write(mask, photometric="minisblack", subfiletype=4, metadata=None, rowsperstrip=10)
        file.write(
            mask[::2, ::2], photometric="minisblack", subfiletype=5, metadata=None, rowsperstrip=10
        )


def beside(path, mask=VALID):
    tifffile.imwrite(path, RGB, photometric="rgb")
    tifffile.imwrite(f"{path}.msk", mask * np.uint8(255), compression="deflate")


def by_gdal(
    path, pixels=np.moveaxis(RGB, -1, 0), mask=None, internal=True, colours=None, **options
):
    rasterio = pytest.importorskip("rasterio")
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal),
        rasterio.open(
            path,
            "w",
            driver="GTiff",
            height=SIZE[0],
            width=SIZE[1],
            count=len(pixels),
            dtype=pixels.dtype.name,
            **options,
        ) as file,
    ):
        file.write(pixels)
        if colours:
            file.colorinterp = [rasterio.enums.ColorInterp[name] for name in colours]
        if mask is not None:
            file.write_mask(mask)


ALPHA_FIRST = np.moveaxis(RGBA, -1, 0)[[3, 0, 1, 2]]
FORMS = {
    "internal.tif": internal,
    "tiled.tif": lambda path: internal(path, compression="deflate", tile=(16, 32)),
    "beside.tif": beside,
    "alpha.tif": lambda path: tifffile.imwrite(path, RGBA, photometric="rgb", extrasamples=["unassalpha"]),
    "premultiplied.tif": lambda path: tifffile.imwrite(path, RGBA, photometric="rgb", extrasamples=["assocalpha"], compression="lzw", tile=(16, 16)),
    "planes.tif": lambda path: tifffile.imwrite(path, np.moveaxis(RGBA, -1, 0), photometric="rgb", planarconfig="separate", extrasamples=["unassalpha"], compression="deflate"),
    "number.tif": lambda path: tifffile.imwrite(path, RGB, photometric="rgb", extratags=[(42113, 2, 0, "0", True)]),
    "gdal internal.tif": lambda path: by_gdal(path, mask=VALID, photometric="RGB", tiled=True, blockxsize=32, blockysize=16, compress="deflate"),
    "gdal beside.tif": lambda path: by_gdal(path, mask=VALID, internal=False),
    "gdal alpha.tif": lambda path: by_gdal(path, np.moveaxis(RGBA, -1, 0), compress="zstd"),
    "gdal alpha first.tif": lambda path: by_gdal(path, ALPHA_FIRST, colours=["alpha", "red", "green", "blue"]),
    "gdal alpha by name.tif": lambda path: by_gdal(path, np.moveaxis(RGBA, -1, 0), photometric="MINISBLACK", colours=["red", "green", "blue", "alpha"]),
    "gdal lerc.tif": lambda path: by_gdal(path, np.moveaxis(RGBA, -1, 0), photometric="RGB", alpha="YES", compress="LERC_DEFLATE"),
    "alpha.png": lambda path: Image.fromarray(RGBA).save(path),
    "alpha.webp": lambda path: Image.fromarray(RGBA).save(path, lossless=True),
    "colour.png": lambda path: Image.fromarray(RGB).save(path, transparency=(0, 0, 0)),
    "beside.png": lambda path: [Image.fromarray(RGB).save(path), tifffile.imwrite(f"{path}.msk", VALID * np.uint8(255))],
    "aux.png": lambda path: [Image.fromarray(RGB).save(path), (path.parent / f"{path.name}.aux.xml").write_text(3 * "<NoDataValue>0</NoDataValue>")],
}  # fmt: skip


def prepared(tmp_path, name="a.tif", **options) -> Store:
    (tmp_path / "m").mkdir(exist_ok=True)
    Image.fromarray(LABELS).save(tmp_path / f"m/{name.rpartition('.')[0]}.png")
    return prepare_folder(
        tmp_path / "i",
        tmp_path / "m",
        tmp_path / "s.h5",
        ["x", "y"],
        splits=(1, 0, 0),
        overwrite=True,
        **options,
    )


@pytest.mark.parametrize("name", FORMS)
def test_pixels_without_data_are_ignored_and_count_in_no_mean(tmp_path, capsys, name):
    (tmp_path / "i").mkdir()
    FORMS[name](tmp_path / "i" / name)
    store, image = prepared(tmp_path, name), name.rpartition(".")[0]
    assert store.bands == 3 and np.array_equal(store.read(image, WHOLE), np.moveaxis(RGB, -1, 0))
    assert np.allclose(store.mean, RGB[VALID].mean(0, dtype="f8")) and np.allclose(
        store.std, RGB[VALID].std(0, dtype="f8")
    )
    assert (
        np.array_equal(store.labels(image, WHOLE), np.where(VALID, LABELS, 255))
        and store.missing(image) == (~VALID).sum()
    )
    out = capsys.readouterr().out
    assert "31.250%  31.250%" in out and (
        store.version == 2 or f"note: {tmp_path}/i/{name} has " in out
    )
    box = Box((7, 5), (60, 70))
    found = store.read_normalised(image, box)
    assert not found[:, :, :25].any() and np.array_equal(
        store.without_data(image, box), ~VALID[box.slices]
    )
    stored, file = (
        store_image(store, image),
        file_image(
            str(tmp_path / "i" / name),
            {"data": {"mean": store.mean.tolist(), "std": store.std.tolist()}},
        ),
    )
    assert np.array_equal(file.read(box), found) and np.array_equal(stored.read(box), found)
    assert np.array_equal(file.without_data(box), ~VALID[box.slices]) and np.array_equal(
        stored.without_data(box), ~VALID[box.slices]
    )
    assert check_store(store.path) == []


@pytest.mark.parametrize("name", ["alpha.tif", "alpha.png"])
def test_transparency_may_be_a_band(tmp_path, name):
    """A network that was trained so reads files so."""
    (tmp_path / "i").mkdir()
    FORMS[name](tmp_path / "i" / name)
    store = prepared(tmp_path, name, alpha="band")
    assert (
        store.bands == 4
        and store.version == 2
        and not store.missing("alpha")
        and store.provenance["alpha"] == "band"
    )
    source = file_image(str(tmp_path / "i" / name), {"data": {"mean": [0] * 4, "std": [1] * 4}})
    assert (
        np.array_equal(source.read(WHOLE)[3], RGBA[..., 3]) and source.without_data(WHOLE) is None
    )


def test_other_pictures_with_transparency(tmp_path):
    """Grey and alpha; a palette with an entry that is transparent."""
    Image.fromarray(RGBA[..., [0, 3]], "LA").save(tmp_path / "grey.png")
    picture = Image.fromarray((RGB[..., 0] // 64).astype(np.uint8) + VALID, "P")
    picture.putpalette([9, 8, 7, 20, 30, 40, 50, 60, 70, 80, 90, 99, 12, 13, 14])
    picture.save(tmp_path / "palette.png", transparency=b"\0\xff\xff\xff\xff")
    for name, bands, colours in (("grey", 1, "grey"), ("palette", 3, "RGB")):
        reader = open_image(tmp_path / f"{name}.png")
        pixels, valid = reader.read_valid(WHOLE)
        assert (
            len(pixels) == reader.bands == bands
            and np.array_equal(valid, VALID)
            and reader.colours == colours
        )


def test_a_measured_band_that_is_marked_as_transparency_is_asked_about(tmp_path):
    """GDAL marks the fourth band of bytes so by default."""
    (tmp_path / "i").mkdir()
    infrared = np.dstack([RGB, np.random.default_rng(2).integers(0, 255, SIZE).astype(np.uint8)])
    tifffile.imwrite(tmp_path / "i/a.tif", infrared, photometric="rgb", extrasamples=["unassalpha"])
    with pytest.raises(
        ValueError,
        match="a.tif: its band 4 is marked as transparency, but 99% of its pixels are between .* set --alpha band to keep it as a band, or --alpha mask",
    ):
        prepared(tmp_path)
    assert not (tmp_path / "s.h5").exists()
    assert (
        prepared(tmp_path, alpha="mask").bands == 3 and prepared(tmp_path, alpha="band").bands == 4
    )


def test_what_no_mask_can_be(tmp_path):
    beside(tmp_path / "a.tif", VALID[:10])
    with pytest.raises(
        ValueError,
        match="a.tif.msk has a validity mask of 10x96 pixels of 1 band, but the image has 64x96 pixels, and a mask must have one band",
    ):
        open_image(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "a.tif.msk", RGB, photometric="rgb")
    with pytest.raises(
        ValueError, match="a.tif.msk has a validity mask of 64x96 pixels of 3 bands"
    ):
        open_image(tmp_path / "a.tif")
    internal(tmp_path / "b.tif", VALID[:20])
    with pytest.raises(ValueError, match="b.tif has a validity mask of 20x96 pixels"):
        open_image(tmp_path / "b.tif")


def test_a_mask_of_an_images_own_form_is_no_band(tmp_path):
    """A page of bytes, as the image's, which only its kind tells apart."""
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for pixels in (RGB[..., 0], VALID * np.uint8(255)):
            file.write(pixels, photometric="minisblack", metadata=None, subfiletype=2)
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as file:
        for page, kind in zip(file.pages, (0, 4)):
            page.tags[254].overwrite(kind)
    pixels, valid = open_image(tmp_path / "a.tif").read_valid(WHOLE)
    assert np.array_equal(pixels, RGB[None, ..., 0]) and np.array_equal(valid, VALID)


def test_a_label_map_has_no_labels_where_its_own_mask_is_0(tmp_path):
    (tmp_path / "i").mkdir(), (tmp_path / "m").mkdir()
    Image.fromarray(RGB).save(tmp_path / "i/a.png")
    tifffile.imwrite(tmp_path / "m/a.tif", LABELS)
    tifffile.imwrite(tmp_path / "m/a.tif.msk", VALID)
    store = prepare_folder(
        tmp_path / "i", tmp_path / "m", tmp_path / "s.h5", ["x", "y"], splits=(1, 0, 0)
    )
    assert np.array_equal(
        store.labels("a", WHOLE), np.where(VALID, LABELS, 255)
    ) and not store.missing("a")


def test_numbers_that_are_none_may_lie_under_a_mask(tmp_path):
    (tmp_path / "i").mkdir()
    tifffile.imwrite(tmp_path / "i/a.tif", np.where(VALID, RGB[..., 0], np.nan).astype("f4"))
    tifffile.imwrite(tmp_path / "i/a.tif.msk", VALID)
    store = prepared(tmp_path)
    assert np.isfinite(store.read_normalised("a", WHOLE)).all() and check_store(store.path) == []


def test_a_number_and_a_mask_hide_pixels_together():
    pixels, valid = (
        np.array([[[0, 7, 0, 7]], [[7, 7, 0, 7]]]),
        np.array([[True, True, True, False]]),
    )
    found = missing(pixels, 0, valid)
    assert found.tolist() == [[[True, False, True, True]], [[False, False, True, True]]]
    assert missing(pixels, 0)[:, 0, 3].tolist() == [False, False]
    assert missing(pixels, None, valid)[:, 0].tolist() == [[False, False, False, True]] * 2
    assert missing(pixels, 9, valid | True) is None


def test_damage_of_a_mask_is_told(tmp_path):
    (tmp_path / "i").mkdir()
    internal(tmp_path / "i/a.tif")
    store = prepared(tmp_path)
    reader = store.reader("a", "valid")
    data, at = bytearray((tmp_path / "s.h5").read_bytes()), int(reader._at[0, 0])
    data[at + 5] ^= 4
    (tmp_path / "s.h5").write_bytes(data)
    assert any("the valid of image 'a'" in line for line in check_store(tmp_path / "s.h5"))
    with pytest.raises(
        ValueError, match="is damaged: the valid of image 'a' at .* .wrong checksum"
    ):
        Store(tmp_path / "s.h5").read_normalised("a", WHOLE)


@pytest.mark.parametrize("valid", [True, False])
def test_means_of_pixels_have_data_everywhere(tmp_path, valid):
    """``data.shrink`` is refused where transparency says that there is none."""
    Image.fromarray(np.dstack([RGB, np.full(SIZE, 255, np.uint8) if valid else RGBA[..., 3]])).save(
        tmp_path / "a.png"
    )
    source = file_image(
        str(tmp_path / "a.png"), {"data": {"mean": [0] * 3, "std": [1] * 3}}, shrink=2
    )
    if valid:
        assert (
            source.read(Box((0, 0), (32, 48))).shape == (3, 32, 48)
            and source.without_data(Box((0, 0), (32, 48))) is None
        )
        return
    with pytest.raises(
        ValueError,
        match="data.shrink is 2, but .*a.png has pixels without data, so the mean of a block of pixels is not defined",
    ):
        source.read(Box((0, 0), (32, 48)))


def test_other_numbers_that_stand_for_no_data_are_told(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.png")
    (tmp_path / "a.png.aux.xml").write_text(
        "<NoDataValue>0</NoDataValue><NoDataValue le_hex_equiv='1'>7</NoDataValue>"
    )
    assert open_image(tmp_path / "a.png").notes == (
        "has different numbers for no data in its bands, as the file beside it says (.aux.xml), which are not read: 0, 7",
    )
    tifffile.imwrite(
        tmp_path / "a.tif",
        RGB,
        photometric="rgb",
        extratags=[
            (
                42112,
                2,
                0,
                '<GDALMetadata><Item name="NODATA_VALUES">0 0 0</Item></GDALMetadata>',
                True,
            )
        ],
    )
    assert open_image(tmp_path / "a.tif").notes == (
        "names a colour for no data (NODATA_VALUES 0 0 0), which is not read",
    )


def test_another_mask_makes_another_result(tmp_path):
    beside(tmp_path / "a.tif")
    about = {"data": {"mean": [0] * 3, "std": [1] * 3}}
    before = file_image(str(tmp_path / "a.tif"), about).identity
    tifffile.imwrite(tmp_path / "a.tif.msk", ~VALID)
    after = file_image(str(tmp_path / "a.tif"), about).identity
    (tmp_path / "a.tif.msk").unlink()
    assert len({before, after, file_image(str(tmp_path / "a.tif"), about).identity}) == 3
