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


def mapped_rows(path) -> np.memmap:
    """An array of 16 MB in a file. A row is as large as a page."""
    pixels = np.arange(4096 * 1024, dtype="i4").reshape(4096, 1024)
    path.write_bytes(bytes(100) + pixels.tobytes())
    return np.memmap(path, "i4", "r+", 100, pixels.shape)


@pytest.mark.parametrize("form", ["rows", "turned", "planes", "one plane"])
def test_a_part_is_copied_piece_by_piece(form, tmp_path, monkeypatch):
    """A part of each row lies in a page of its own, together with pixels that are not asked for."""
    array = mapped_rows(tmp_path / "a")
    if "plane" in form:
        array = array.reshape(16, 256, 1024)[: 1 if form == "one plane" else None]
    part = array[..., 70:75]
    part = part[::-1].T if form == "turned" else part
    wanted, most = np.array(part), []
    mapped.let_go(array)
    let_go = mapped.let_go
    monkeypatch.setattr(
        mapped, "let_go", lambda piece: (most.append(resident(array)), let_go(piece))
    )
    found = mapped.copied(part)
    assert np.array_equal(found, wanted) and found.strides == wanted.strides
    assert len(most) >= (1 if form == "one plane" else 4) and max(most) < 10e6
    assert resident(array) == 0


def test_a_piece_is_written_and_its_pages_are_released(tmp_path):
    array = mapped_rows(tmp_path / "a")
    part = array[:, 70:75]
    written = []
    for piece in mapped.pieces(part):
        part[piece] = 7
        written.append(resident(array))
    assert max(written) < 10e6 and resident(array) == 0
    assert (array[:, 70:75] == 7).all() and (array[:, 75] == np.arange(4096) * 1024 + 75).all()


def resident(array: np.memmap) -> int:
    """Bytes of a mapped array's file that are in this process's memory."""
    begin = np.frombuffer(array._mmap, np.uint8).ctypes.data
    with open("/proc/self/smaps") as f:
        lines = iter(f)
        next(line for line in lines if line.startswith(f"{begin:x}-"))
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10
