"""TIFF in every form that programs write: the numbers that were written, by windows as whole, or refused with a reason."""

from itertools import count, cycle, product

import numpy as np
import pytest
import tifffile
from PIL import Image

from distseg.data.formats.readers import open_image, open_mask
from distseg.data.prepare import prepare_folder
from distseg.tiling.tile import Box

pytestmark = pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
SIZE = (37, 53)
WINDOWS = [Box((0, 0), SIZE), Box((9, 14), (20, 39)), Box((36, 15), (37, 17))]
TYPES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
PREDICTORS = {"i": (1, 2), "u": (1, 2), "f": (1, 3)}
LAYOUTS = [  # bands, planar, tile
    (1, "contig", None), (3, "separate", (16, 32)), (6, "contig", None), (4, "contig", (32, 16)), (1, "contig", (16, 48)), (3, "contig", None), (4, "separate", None),
]  # fmt: skip


def numbers(dtype: str, bands: int, seed: int = 0) -> np.ndarray:
    """Random (bands, *SIZE) over all of a type's range."""
    random = np.random.default_rng(seed)
    if dtype[0] == "f":
        return (random.normal(size=(bands, *SIZE)) * 1000).astype(dtype)
    ends = np.iinfo(dtype)
    return random.integers(ends.min, ends.max, (bands, *SIZE), dtype, endpoint=True)


def wrong(path, expected: np.ndarray, within: float = 0) -> str | None:
    """What differs when a file is read."""
    try:
        reader = open_image(path)
        if (reader.bands, reader.size, reader.dtype) != (
            len(expected),
            expected.shape[1:],
            expected.dtype,
        ):
            return f"{reader.bands} bands, {reader.size}, {reader.dtype}"
        for box in WINDOWS:
            found, there = reader.read(box), expected[(slice(None), *box.slices)]
            if not (
                np.array_equal(found, there, equal_nan=found.dtype.kind == "f")
                if not within
                else np.abs(found.astype(float) - there).max() <= within
            ):
                return f"other numbers in {box}"
    except ValueError as e:
        return str(e)
    return None


def written_by_tifffile(path, pixels: np.ndarray, planar: str, **options) -> None:
    bands = len(pixels)
    array = (
        pixels[0] if bands == 1 else pixels if planar == "separate" else np.moveaxis(pixels, 0, -1)
    )
    more = {} if bands == 1 else {"planarconfig": planar}
    tifffile.imwrite(path, array, photometric="minisblack", metadata=None, **more, **options)


def test_all_forms_that_tifffile_writes(tmp_path):
    """Byte order, compression, predictor, type, classic and BigTIFF, each with one of the layouts, in turn."""
    layouts, failed, number = cycle(LAYOUTS), [], count()
    for order, compression, dtype in product(
        "<>", (None, "lzw", "deflate", "zstd", "packbits"), TYPES
    ):
        predictors = PREDICTORS[dtype[0]] if compression in ("lzw", "deflate", "zstd") else (1,)
        for predictor, big in product(predictors, (False, True)):
            bands, planar, tile = next(layouts)
            form = (
                order,
                compression,
                predictor,
                dtype,
                bands,
                planar,
                tile,
                "BigTIFF" if big else "classic",
            )
            more = {"tile": tile} if tile else {"rowsperstrip": 8}
            if compression:
                more |= {"compression": compression} | (
                    {"predictor": predictor} if predictor > 1 else {}
                )
            pixels = numbers(dtype, bands, next(number))
            written_by_tifffile(
                tmp_path / "a.tif", pixels, planar, byteorder=order, bigtiff=big, **more
            )
            if found := wrong(tmp_path / "a.tif", pixels):
                failed.append((form, found))
    assert not failed


def test_all_forms_that_gdal_writes(tmp_path):
    """The same by GDAL, whose own reading is the oracle for compressions that change numbers."""
    rasterio = pytest.importorskip("rasterio")
    layouts, failed, number = cycle(LAYOUTS), [], count()
    plain = [name for name in TYPES if name != "f2"]
    forms = [
        (order, compression, dtype, predictor)
        for order in ("LITTLE", "BIG")
        for compression in ("LZW", "DEFLATE", "ZSTD")
        for dtype in plain
        for predictor in PREDICTORS[dtype[0]]
    ]
    forms += [
        (order, compression, dtype, 1)
        for order in ("LITTLE", "BIG")
        for compression, types in GDAL.items()
        for dtype in types
    ]
    for (order, compression, dtype, predictor), (bands, planar, tile) in zip(forms, layouts):
        if compression == "WEBP":
            bands, planar = 3 + (order == "BIG"), "contig"
        if order == "BIG" and compression.startswith("LERC") and dtype[0] == "f":
            continue
        pixels = numbers(dtype, bands, next(number))
        options = {
            "compress": compression,
            "predictor": predictor,
            "endianness": order,
            "bigtiff": "YES" if bands == 6 else "NO",
            "webp_lossless": "YES",
        }
        if tile:
            options |= {"tiled": True, "blockysize": tile[0], "blockxsize": tile[1]}
        about = {
            "driver": "GTiff",
            "height": SIZE[0],
            "width": SIZE[1],
            "count": bands,
            "dtype": pixels.dtype.name,
            "photometric": "MINISBLACK",
            "interleave": "band" if planar == "separate" else "pixel",
        }
        with rasterio.open(
            tmp_path / "a.tif",
            "w",
            **about,
            **{name: value for name, value in options.items() if value != 1},
        ) as file:
            file.write(pixels)
        with rasterio.open(tmp_path / "a.tif") as file:
            expected = file.read()
        assert compression == "JPEG" or np.array_equal(expected, pixels), (compression, dtype)
        if found := wrong(tmp_path / "a.tif", expected):
            failed.append(((order, compression, dtype, predictor, bands, planar, tile), found))
    assert not failed


GDAL = {
    "NONE": TYPES[:8],
    "PACKBITS": ("u1", "i2", "f4"),
    "LZMA": ("u2", "f8"),
    "JPEG": ("u1",),
    "WEBP": ("u1",),
    **dict.fromkeys(("LERC", "LERC_ZSTD", "LERC_DEFLATE"), ("u1", "i2", "f4", "f8")),
}


@pytest.mark.parametrize(
    "compression",
    [
        "jpeg",
        "tiff_jpeg YCbCr",
        "group3",
        "group4",
        "tiff_adobe_deflate",
        "tiff_lzw",
        "zstd",
        "lzma",
    ],
)
def test_forms_that_pillow_writes(tmp_path, compression):
    """Pillow reads them as libtiff does; JPEG is decoded by two libraries, which may differ by a step or two."""
    kind, _, mode = compression.partition(" ")
    pixels = np.moveaxis(numbers("u1", 3), 0, -1).repeat(4, 1)[:, : SIZE[1]]
    picture = Image.fromarray(pixels).convert(mode or ("1" if kind.startswith("group") else "RGB"))
    picture.save(tmp_path / "a.tif", compression=kind.replace("tiff_jpeg", "jpeg"))
    with Image.open(tmp_path / "a.tif") as image:
        expected = np.asarray(image.convert("RGB") if mode else image)
    expected = expected[None].astype("u1") if expected.ndim == 2 else np.moveaxis(expected, -1, 0)
    assert wrong(tmp_path / "a.tif", expected, within=2 if "jpeg" in kind else 0) is None


def by_gdal(path, pixels: np.ndarray, **options) -> None:
    rasterio = pytest.importorskip("rasterio")
    about = {
        "driver": "GTiff",
        "height": pixels.shape[1],
        "width": pixels.shape[2],
        "count": len(pixels),
        "dtype": pixels.dtype.name,
    }
    with rasterio.open(path, "w", **about, **options) as file:
        file.write(pixels)


@pytest.mark.parametrize("bits", [1, 2, 4, 12])
def test_packed_bits_are_their_numbers(tmp_path, bits):
    wide = numbers("u2", 1) >> (16 - bits)
    for compression, pixels in product(("NONE", "LZW"), [wide if bits > 8 else wide.astype("u1")]):
        by_gdal(tmp_path / "a.tif", pixels, NBITS=bits, compress=compression)
        assert wrong(tmp_path / "a.tif", pixels) is None


# LERC, which keeps in a mask what no number stands for


@pytest.mark.parametrize("bands, interleave", [(1, "pixel"), (3, "pixel"), (3, "band")])
def test_what_is_no_number_in_lerc_stays_so(tmp_path, bands, interleave):
    pixels = numbers("f4", bands)
    pixels[0, :10, :10] = pixels[-1, 20:30] = np.nan
    by_gdal(tmp_path / "a.tif", pixels, compress="LERC_ZSTD", interleave=interleave)
    assert wrong(tmp_path / "a.tif", pixels) is None


def test_a_label_map_in_lerc_is_refused_if_numbers_may_have_changed(tmp_path):
    for error in (0, 2):
        by_gdal(tmp_path / f"{error}.tif", numbers("u1", 1), compress="LERC", MAX_Z_ERROR=error)
    open_mask(tmp_path / "0.tif")
    with pytest.raises(
        ValueError, match="2.tif is a mask in LERC with an error, which changes labels"
    ):
        open_mask(tmp_path / "2.tif")


# what is refused


def test_complex_numbers(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", numbers("f4", 1)[0].astype("c8"), compression="deflate")
    with pytest.raises(
        ValueError, match="a.tif holds complex64, but pixels are whole or real numbers: convert it"
    ):
        open_image(tmp_path / "a.tif")


def test_real_numbers_in_big_endian_lerc(tmp_path):
    """libtiff writes other numbers than it was given."""
    by_gdal(tmp_path / "a.tif", numbers("f4", 1), compress="LERC", endianness="BIG")
    with pytest.raises(
        ValueError,
        match="a.tif has real numbers in LERC and is big-endian, which libtiff writes wrongly: write it little-endian",
    ):
        open_image(tmp_path / "a.tif")


def test_a_predictor_without_a_compression_that_knows_it(tmp_path):
    Image.fromarray(numbers("u1", 1)[0]).save(tmp_path / "a.tif", tiffinfo={317: 2})
    with pytest.raises(
        ValueError,
        match="a.tif has a predictor, but no compression that uses one, .*COMPRESS=DEFLATE",
    ):
        open_image(tmp_path / "a.tif")


def test_a_compression_that_does_not_say_its_size(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", numbers("u1", 1)[0], compression="jpegxr", tile=(16, 16))
    with pytest.raises(
        ValueError,
        match="a.tif is compressed by JPEGXR.*, which is not read: convert it, such as with 'gdal_translate -co COMPRESS=DEFLATE'",
    ):
        open_image(tmp_path / "a.tif")


@pytest.mark.parametrize("compression", ["jpeg", "webp", "png", "jpeg2000", "jpegxl", "lerc"])
def test_an_image_in_a_tile_that_is_larger_than_the_tile(tmp_path, compression):
    """A few bytes may promise gigabytes: what the image in a tile says of its size is read first."""
    tifffile.imwrite(
        tmp_path / "a.tif",
        np.zeros((512, 512, 3), "u1"),
        compression=compression,
        tile=(512, 512),
        photometric="rgb",
    )
    assert (
        not open_image(tmp_path / "a.tif").read(Box((0, 0), (8, 8))).any() or compression == "jpeg"
    )
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as file:
        for tag in (256, 257, 322, 323):
            file.pages[0].tags[tag].overwrite(256)
    with pytest.raises(
        ValueError,
        match="a.tif cannot be read as an image .a strip or tile of 256x256 pixels holds an image of 512x512 pixels",
    ):
        open_image(tmp_path / "a.tif")


def test_without_its_packages_tiff_says_what_to_install(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", numbers("u1", 1)[0])
    monkeypatch.setitem(__import__("sys").modules, "imagecodecs", None)
    with pytest.raises(
        ValueError,
        match="TIFF files are read by tifffile and imagecodecs .*: pip install tifffile imagecodecs",
    ):
        open_image(tmp_path / "a.tif")


# which pages are the image

PAGE = np.moveaxis(numbers("u1", 3), 0, -1)


def pages(path, *written: tuple[np.ndarray, int]) -> None:
    """(pixels, kind: 1 reduced, 4 mask) of each page."""
    with tifffile.TiffWriter(path) as file:
        for pixels, _ in written:
            file.write(
                pixels,
                photometric="rgb" if pixels.ndim > 2 else "minisblack",
                metadata=None,
                subfiletype=2,
            )
    with tifffile.TiffFile(path, mode="r+") as file:
        for page, (_, kind) in zip(file.pages, written):
            page.tags[254].overwrite(kind)


@pytest.mark.parametrize(
    "written",
    [
        [(PAGE[::4, ::4], 1), (PAGE, 0)],
        [(PAGE, 0), (PAGE[::2, ::2], 1), (PAGE[::4, ::4], 1)],
        [(PAGE, 0), (PAGE, 1)],
        [(PAGE, 1)],
    ],
    ids=["thumbnail first", "pyramid", "a reduced page of one form", "nothing else"],
)
def test_the_page_at_full_size_is_the_image(tmp_path, written):
    pages(tmp_path / "a.tif", *written)
    assert (
        wrong(tmp_path / "a.tif", np.moveaxis(PAGE, -1, 0)) is None
        and not open_image(tmp_path / "a.tif").notes
    )


def test_pages_in_a_chain_of_big_endian_bigtiff(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif", bigtiff=True, byteorder=">") as file:
        for pixels, kind in ((PAGE[::4, ::4], 1), (PAGE, 0)):
            file.write(pixels, photometric="rgb", metadata=None, subfiletype=kind)
    assert wrong(tmp_path / "a.tif", np.moveaxis(PAGE, -1, 0)) is None


@pytest.mark.parametrize(
    "written, words",
    [
        (
            [(PAGE[::4, ::4], 0), (PAGE, 0)],
            "a.tif holds 10x14 pixels of 3 x uint8 first, and a larger image, 37x53 pixels of 3 x uint8: write the intended image into a separate file",
        ),
        (
            [(PAGE, 0), (PAGE, 0)],
            "a.tif has the axes IYXS of .2, 37, 53, 3., but an image has only spatial axes and one axis of bands",
        ),
        (
            [(PAGE, 0), (PAGE[..., 0], 4), (PAGE[..., 1], 4)],
            "a.tif has 2 masks of full size, but only one can be read",
        ),
    ],
)
def test_a_file_of_several_images_is_refused(tmp_path, written, words):
    pages(tmp_path / "a.tif", *written)
    with pytest.raises(ValueError, match=words):
        open_image(tmp_path / "a.tif")


@pytest.mark.parametrize("form", [{}, {"compression": "zlib"}], ids=["plain", "deflate"])
@pytest.mark.parametrize("bands", [1, 3])
def test_pages_that_tifffile_wrote_one_by_one(tmp_path, form, bands):
    """Read pages that tifffile's default metadata make images of their own."""
    stack = numbers("u1", 5)[:, None] + np.arange(bands, dtype="u1")[:, None, None]
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for page in stack:
            file.write(
                page[0] if bands == 1 else np.moveaxis(page, 0, -1),
                photometric="minisblack" if bands == 1 else "rgb",
                **form,
            )
    volume = open_image(tmp_path / "a.tif", dims=3)
    assert np.array_equal(volume.read(Box.whole(volume.size)), stack.swapaxes(0, 1))
    if bands == 1:
        assert open_image(tmp_path / "a.tif").stack
        assert wrong(tmp_path / "a.tif", stack[:, 0]) is None
    else:
        with pytest.raises(ValueError, match="set --pages images or --pages volume"):
            open_image(tmp_path / "a.tif")


def test_a_page_of_another_form_ends_the_pages_that_were_written_one_by_one(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for page in (PAGE[..., 0], PAGE[..., 1], PAGE[:9, :9, 2]):
            file.write(page)
    assert wrong(tmp_path / "a.tif", np.moveaxis(PAGE[..., :2], -1, 0)) is None
    assert "one more image, which is not read: 9x9" in open_image(tmp_path / "a.tif").notes[0]


def test_images_that_are_not_read_are_told(tmp_path, capsys):
    """As pages that do not say what they are, and are taken as bands."""
    (tmp_path / "i").mkdir()
    for name in "abc":
        pages(tmp_path / f"i/{name}.tif", (PAGE, 0), (PAGE[..., 0], 0), (PAGE[::2, ::2], 1))
    prepare_folder(tmp_path / "i", None, tmp_path / "s.h5", ["x", "y"])
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"note: {tmp_path}/i/a.tif and 2 more files: each has one more image, which is not read: 37x53 pixels of 1 x uint8"
    )
    tifffile.imwrite(
        tmp_path / "a.tif",
        np.moveaxis(PAGE, -1, 0),
        photometric="minisblack",
        compression="deflate",
    )
    assert open_image(tmp_path / "a.tif").notes == (
        "has 3 pages that do not say what they are, so they are read as bands",
    )
    assert open_image(tmp_path / "a.tif", dims=3).notes == ()
