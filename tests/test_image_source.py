"""Files to predict are read as a store reads them: normalised with the same constants, and the same where there is no data."""

import numpy as np
import pytest
import tifffile

from distseg.data.picture import rgb
from distseg.data.prepare import prepare_folder
from distseg.inference.image_source import file_image, store_image
from distseg.tiling.tile import Box

RANDOM = np.random.default_rng(0)


def image(nodata) -> np.ndarray:
    pixels = RANDOM.normal(100, 9, (40, 30)).astype("f4")
    pixels[:8] = nodata
    return pixels


def manifest(store) -> dict:
    return {
        "data": {"mean": store.mean.tolist(), "std": store.std.tolist(), "classes": store.classes}
    }


def both(tmp_path, name, **options):
    """The image ``name`` of a store and the file itself, and a box."""
    store = prepare_folder(
        tmp_path, None, tmp_path / "s.h5", ["low", "high"], splits=(1, 0, 0), **options
    )
    return (
        store_image(store, "a"),
        file_image(str(tmp_path / name), manifest(store), *options.values()),
        Box((3, 2), (20, 28)),
    )


@pytest.mark.parametrize("nodata", [-9999, np.nan])
def test_a_file_is_read_as_its_image_in_a_store(tmp_path, nodata):
    np.save(tmp_path / "a.npy", image(nodata))
    stored, file, box = both(tmp_path, "a.npy", nodata=nodata)
    assert (
        np.array_equal(stored.read(box), file.read(box))
        and not file.read(box)[:, :5].any()
        and file.read(box)[:, 5:].all()
    )


def test_a_tiffs_tag_holds_for_both(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", image(-32768), extratags=[(42113, 2, 0, "-32768", True)])
    stored, file, box = both(tmp_path, "a.tif")
    assert (
        np.array_equal(stored.read(box), file.read(box))
        and not file.read(box)[:, :5].any()
        and file.read(box)[:, 5:].all()
    )


def test_a_pixel_without_data_has_none_in_any_band(tmp_path):
    pixels = np.ones((2, 6, 5), np.float32)
    pixels[0, 1], pixels[:, 2, 3] = -9999, -9999
    tag = (42113, "s", 0, "-9999", True)
    tifffile.imwrite(tmp_path / "a.tif", pixels, planarconfig="separate", extratags=[tag])
    source = file_image(str(tmp_path / "a.tif"), {"data": {"mean": [0, 0], "std": [1, 1]}})
    assert np.argwhere(source.without_data(Box.whole((6, 5)))).tolist() == [[2, 3]]


def test_pixels_that_fill_no_block_are_left_out(tmp_path):
    pixels = RANDOM.normal(size=(7, 9)).astype("f4")
    np.save(tmp_path / "a.npy", pixels)
    about = {"data": {"mean": [0], "std": [1]}}
    source = file_image(str(tmp_path / "a.npy"), about, shrink=2)
    assert source.size == (3, 4)
    means = pixels[:6, :8].reshape(3, 2, 4, 2).mean((1, 3))
    assert np.allclose(source.read(Box.whole(source.size))[0], means, atol=1e-6)


def test_what_is_no_data_tells_results_apart(tmp_path):
    np.save(tmp_path / "a.npy", image(7))
    told = {"data": {"mean": [100.0], "std": [9.0]}}
    sources = {
        file_image(str(tmp_path / "a.npy"), told, nodata).identity for nodata in (None, 7, 8)
    }
    assert len(sources) == 3


def test_numbers_that_are_none_say_what_to_do(tmp_path):
    np.save(tmp_path / "a.npy", image(np.nan))
    source = file_image(str(tmp_path / "a.npy"), {"data": {"mean": [100.0], "std": [9.0]}})
    with pytest.raises(
        ValueError,
        match=r"a.npy: band 0 is nan at \(3, 2\): replace this value, .* or say that it stands for no data: --nodata=nan",
    ):
        source.read(Box((3, 2), (20, 28)))


@pytest.mark.parametrize("form", ["<u2", "<f4"])
def test_another_type_than_that_of_the_training_images(tmp_path, form):
    np.save(tmp_path / "a.npy", np.zeros((9, 9), form))
    told = {"data": {"mean": [100.0], "std": [9.0], "types": ["uint8"]}}
    with pytest.raises(
        ValueError,
        match=f"a.npy holds {np.dtype(form)}, but the network was trained on uint8.*convert the image to uint8",
    ):
        file_image(str(tmp_path / "a.npy"), told)
    np.save(tmp_path / "a.npy", np.zeros((9, 9), "u1"))
    file_image(str(tmp_path / "a.npy"), told)


def test_no_data_that_no_pixel_can_be(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((9, 9), np.uint8))
    with pytest.raises(
        ValueError,
        match="--nodata is -9999, but no pixel of uint8, as those of .*a.npy, can have this value",
    ):
        file_image(str(tmp_path / "a.npy"), {"data": {"mean": [100.0], "std": [9.0]}}, -9999)


def test_an_overlay_shows_what_there_is(tmp_path):
    """Stretched as if what has no data were not there, which is dark."""
    pixels = np.repeat(image(np.nan)[None], 3, 0)
    found, there = rgb(pixels, float("nan")), rgb(pixels[:, 8:])
    assert np.array_equal(found[8:], there) and not found[:8].any() and there.max() == 255
