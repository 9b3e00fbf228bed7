"""Whole-slide images in Aperio's layout are read window by window as tifffile reads them, with the size of their pixels."""

import numpy as np
import pytest
import tifffile

from distseg.data.formats.georeference import matrix_of
from distseg.data.formats.readers import open_image, open_mask
from distseg.tiling.tile import Box, tiles

ABOUT = "Aperio Image Library v12.0.16\r\n{} [0,0 {}] (240x240) JPEG/RGB Q=90|AppMag = 20|{}Date = 02/29/24"


def smooth(height, width):
    """Return a picture whose JPEG compression keeps it recognisable."""
    y, x = np.mgrid[:height, :width] / 20
    bands = [np.sin(x + k) * np.cos(y - k) for k in range(3)]
    return (127 + 120 * np.stack(bands, -1)).astype(np.uint8)


def slide(path, mpp="MPP = 0.4990|", compression="jpeg"):
    """Write a slide as scanners do: the base, a thumbnail, a pyramid level, a label and an overview."""
    picture = smooth(301, 517)
    tiled = dict(photometric="rgb", tile=(240, 240), compression=compression, metadata=None)
    striped = dict(photometric="rgb", compression="lzw", metadata=None, rowsperstrip=16)
    with tifffile.TiffWriter(path) as file:
        file.write(picture, description=ABOUT.format("517x301", "517x301", mpp), **tiled)
        file.write(
            picture[::4, ::4].copy(), description="Aperio Image Library v12\r\nthumbnail", **striped
        )
        file.write(
            picture[::2, ::2].copy(),
            description=ABOUT.format("517x301", "259x151", mpp),
            subfiletype=0,
            **tiled,
        )
        file.write(
            picture[:60, :50].copy(),
            description="Aperio Image Library v12\r\nlabel 50x60",
            subfiletype=1,
            **striped,
        )
        file.write(
            picture[:70, :90].copy(),
            description="Aperio Image Library v12\r\nmacro 90x70",
            subfiletype=9,
            **striped,
        )
    return path


@pytest.mark.parametrize("compression", ["jpeg", "aperio_jp2000_rgb"])
def test_windows_are_those_of_the_base(tmp_path, compression):
    path = slide(tmp_path / "a.svs", compression=compression)
    with tifffile.TiffFile(path) as file:
        assert file.is_svs
        base = file.series[0].levels[0].asarray()
    assert np.abs(base.astype(int) - smooth(301, 517)).max() < 40
    reader = open_image(path)
    assert reader.size == (301, 517) and reader.bands == 3 and reader.dtype == np.uint8
    assert reader.lossy and not reader.decoding
    for tile in tiles((301, 517), (3, 4), (1, 1)):
        assert np.array_equal(
            reader.read(tile), base.transpose(2, 0, 1)[(slice(None), *tile.slices)]
        )


def test_only_the_tiles_of_a_window_are_decoded(tmp_path):
    path = slide(tmp_path / "a.svs")
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        at, count = page.dataoffsets[-1], page.databytecounts[-1]
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes(count))
    reader = open_image(path)
    assert reader.read(Box((0, 0), (240, 480))).shape == (3, 240, 480)
    with pytest.raises(ValueError, match="a.svs"):
        reader.read(Box((239, 479), (242, 482)))


def test_the_size_of_a_pixel_is_kept(tmp_path):
    place = open_image(slide(tmp_path / "a.svs")).place
    assert place.unit == 1e-6 and [row[k] for k, row in enumerate(matrix_of(place))] == [
        0.499,
        0.499,
        1,
        1,
    ]
    for mpp in ("", "MPP = 0|", "MPP = ?|"):
        assert open_image(slide(tmp_path / "b.svs", mpp)).place is None


def test_a_slide_in_jpeg_is_no_mask(tmp_path):
    with pytest.raises(ValueError, match="is a mask in"):
        open_mask(slide(tmp_path / "a.svs"))
