"""Reading an image takes none of a budget of memory for good, nor is what was decoded once decoded again."""

from collections import Counter

import numpy as np
import pytest
import tifffile
from PIL import Image

from distseg.comm.launch import release_freed_memory
from distseg.data.formats import mapped
from distseg.data.formats.readers import open_image
from distseg.data.formats.tiff_segments import Segments
from distseg.tiling.tile import Box

COARSE = np.random.default_rng(0).integers(0, 255, (80, 40, 3), np.uint8)
PIXELS = COARSE.repeat(50, 0).repeat(50, 1)  # 24 MB
WRITE = {
    "a.npy": lambda path: np.save(path, PIXELS),
    "a.tif": lambda path: tifffile.imwrite(path, PIXELS, photometric="rgb"),
    "a.png": lambda path: Image.fromarray(PIXELS).save(path, compress_level=1),
    "palette.png": lambda path: Image.fromarray(PIXELS).quantize(8).save(path),
    "strip.tif": lambda path: tifffile.imwrite(path, PIXELS, photometric="rgb", compression="zlib", rowsperstrip=4000),
    "strips.tif": lambda path: tifffile.imwrite(path, PIXELS, photometric="rgb", compression="zlib", rowsperstrip=64),
    "planes.tif": lambda path: tifffile.imwrite(path, np.moveaxis(PIXELS, -1, 0), photometric="rgb", planarconfig="separate", compression="zlib", rowsperstrip=64),
    "tiles.tif": lambda path: tifffile.imwrite(path, PIXELS, photometric="rgb", compression="zlib", tile=(256, 256)),
    "masked.tif": lambda path: [WRITE["tiles.tif"](path), tifffile.imwrite(f"{path}.msk", np.ones(PIXELS.shape[:2], np.uint8), compression="zlib", rowsperstrip=4000)],
}  # fmt: skip


def taken() -> int:
    """Bytes of this process, those of files included, without freed memory that malloc keeps.

    How much malloc keeps depends on earlier tests and on the turns of threads, up to a third of the pixels.
    """
    release_freed_memory()
    with open("/proc/self/status") as f:
        return sum(
            int(line.split()[1]) * 1024 for line in f if line.startswith(("RssAnon", "RssFile"))
        )


def written(tmp_path, name: str):
    path = tmp_path / name
    WRITE[name](path)
    return path, np.moveaxis(
        np.asarray(Image.open(path).convert("RGB")) if name == "palette.png" else PIXELS, -1, 0
    )


@pytest.mark.parametrize("name", WRITE)
def test_pixels_that_were_read_leave_the_process(tmp_path, monkeypatch, name):
    monkeypatch.setattr(mapped, "MOST_IN_MEMORY", 0)  # else the mask, 8 MB, would be kept in memory
    path, pixels = written(tmp_path, name)
    open_image(path).read(Box((0, 0), (1, 1)))  # loads the decoder
    before = taken()
    reader = open_image(path)
    for row in range(0, 4000, 500):
        assert np.array_equal(
            reader.read(Box((row, 0), (row + 500, 2000))), pixels[:, row : row + 500]
        )
        assert not reader.masked or reader.read_valid(Box((row, 0), (row + 500, 2000)))[1].all()
    assert taken() - before < pixels.nbytes / 12


@pytest.mark.parametrize("name", WRITE)
def test_without_room_in_the_scratch_folder_pixels_are_the_same(tmp_path, monkeypatch, name):
    path, pixels = written(tmp_path, name)
    monkeypatch.setattr(mapped, "free_bytes", lambda folder: 1_000_000)
    reader = open_image(path)
    for box in (Box((0, 0), (4000, 2000)), Box((63, 5), (66, 1999)), Box((3999, 0), (4000, 1))):
        assert np.array_equal(reader.read(box), pixels[(slice(None), *box.slices)])


@pytest.mark.parametrize("name", ["strip.tif", "strips.tif", "planes.tif"])
def test_strips_are_decoded_once(tmp_path, monkeypatch, name):
    decoded, decode = Counter(), Segments._decode

    def counted(self, number, index, *others):
        decoded[number, index] += 1
        decode(self, number, index, *others)

    monkeypatch.setattr(Segments, "_decode", counted)
    path, pixels = written(tmp_path, name)
    reader = open_image(path)
    for row in range(0, 4000, 800):
        for column in range(0, 2000, 400):
            reader.read(Box((row, column), (row + 800, column + 400)))
    assert (
        set(decoded.values()) == {1}
        and len(decoded) == {"strip.tif": 1, "strips.tif": 63, "planes.tif": 189}[name]
    )


def test_the_scratch_folder_is_the_one_that_is_named(tmp_path, monkeypatch):
    path, _ = written(tmp_path, "a.png")
    asked = []
    monkeypatch.setattr(mapped, "free_bytes", lambda folder: asked.append(str(folder)) or 1 << 40)
    open_image(path, scratch=str(tmp_path)).read(Box((0, 0), (1, 1)))
    assert asked == [str(tmp_path)] and [p.name for p in tmp_path.iterdir()] == [
        "a.png"
    ]  # no name leads to the file
