"""Reading an image that lies uncompressed on the disk takes none of a budget of memory for good."""

import numpy as np
import pytest
import tifffile

from distseg.data.readers import open_image
from distseg.geometry.tile import Box


def of_files() -> int:
    """Bytes of this process that are pages of files."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssFile"))


@pytest.mark.parametrize("ending", ["npy", "tif"])
def test_pages_that_were_read_leave_the_process(tmp_path, ending):
    pixels = np.random.default_rng(0).integers(0, 255, (4000, 2000, 3), np.uint8)
    path = tmp_path / f"a.{ending}"
    np.save(path, pixels) if ending == "npy" else tifffile.imwrite(path, pixels, photometric="rgb")
    reader = open_image(path)
    before = of_files()
    for row in range(0, 4000, 500):
        box = Box((row, 0), (row + 500, 2000))
        assert np.array_equal(reader.read(box), np.moveaxis(pixels[row : row + 500], -1, 0))
    assert of_files() - before < pixels.nbytes / 4
