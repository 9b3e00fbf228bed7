"""A class map on its way: taken up after an interruption, begun anew for another network, never whole before it is."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import h5py
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from distseg.comm.launch import peak_memory, reset_peak_memory, resident_memory
from distseg.config.settings import PredictBase
from distseg.data import class_files, class_map, file_progress
from distseg.data.class_files import FORMS, Classes, are_there, paths_of
from distseg.data.class_map import PartialMap, identity_of
from distseg.report import disk
from distseg.tiling.tile import tiles

SIZE = (300, 517)
TILES = tiles(SIZE, (3, 4), (1, 1))
CLASSES = Classes(
    ["sea", "land", "ice"], np.array([[0, 0, 255], [0, 255, 0], [255, 255, 255]], np.uint8)
)


@pytest.fixture
def found() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3, SIZE).astype(np.uint8)


def started(folder, network="a", likely=0, cut=TILES) -> PartialMap:
    return PartialMap(
        folder / "scene.1.partial",
        identity_of({"network": network}, SIZE, cut, likely),
        SIZE,
        cut,
        likely,
    )


def packed(partial: PartialMap, *formats: str) -> list[Path]:
    paths = paths_of(partial.folder.parent, "scene.1", formats, SIZE, bool(partial.likely))
    partial.pack(paths, CLASSES)
    return paths


def write(partial: PartialMap, numbers, found: np.ndarray) -> None:
    for n in numbers:
        partial.write(n, found[TILES[n].slices])


def test_packed_when_all_is_there(tmp_path, found, monkeypatch):
    partial, beats = started(tmp_path), []
    monkeypatch.setattr(file_progress, "heartbeat", beats.append)
    write(partial, range(12), found)
    assert [p.name for p in tmp_path.iterdir()] == ["scene.1.partial"]
    assert packed(partial, "hdf5") == [tmp_path / "scene.1.h5"]
    assert beats == ["scene.1.h5, classes, 85%", "scene.1.h5, classes, 100%"]
    with h5py.File(tmp_path / "scene.1.h5") as f:
        assert (
            np.array_equal(f["classes"][:], found) and list(f.attrs["class_names"]) == CLASSES.names
        )
    assert [p.name for p in tmp_path.iterdir()] == ["scene.1.h5"]


def test_memory_does_not_grow_with_the_map(tmp_path):
    size, cpu = (4096, 8192), torch.device("cpu")  # 34 MB
    cut = tiles(size, (8, 8), (1, 1))
    identity = identity_of({}, size, cut, 0)
    reset_peak_memory(cpu)
    before = resident_memory()
    for number in range(len(cut)):
        if number in (0, len(cut) - 1):  # the last tile is written after the others are taken up
            partial = PartialMap(tmp_path / "partial", identity, size, cut)
        partial.write(number, np.full(cut[number].size, 1, np.uint8))
        if number >= len(cut) - 2:
            partial.close()
    assert partial.taken_up and peak_memory(cpu) - before < 12e6


def test_the_identity_is_the_digest_of_a_text():
    """Results of older versions have identities of this form, too."""
    cut = [(tile.start, tile.stop) for tile in TILES]
    wanted = json.dumps([{"b": np.int64(1), "a": "x"}, SIZE, cut, 3], sort_keys=True, default=int)
    found = identity_of({"a": "x", "b": np.int64(1)}, SIZE, TILES, 3)
    assert found == hashlib.sha256(wanted.encode()).hexdigest()


def test_taken_up_where_it_was_flushed(tmp_path, found):
    """What was written after the last flush counts as missing: its pixels may not be on the disk."""
    partial = started(tmp_path)
    write(partial, [0, 5, 7], found)
    partial.flush()
    write(partial, [8], found)
    del partial  # as a killed process leaves it
    again = started(tmp_path)
    assert again.taken_up and again.missing == [1, 2, 3, 4, 6, 8, 9, 10, 11]
    write(again, again.missing, found)
    (path,) = packed(again, "hdf5")
    with h5py.File(path) as f:
        assert np.array_equal(f["classes"][:], found)


@pytest.mark.parametrize(
    "change", [dict(network="b"), dict(likely=2), dict(cut=tiles(SIZE, (4, 3), (1, 1)))]
)
def test_of_another_network_or_as_many_other_tiles_it_is_begun_anew(tmp_path, found, change):
    partial = started(tmp_path)
    write(partial, range(11), found)
    partial.close()
    other = started(tmp_path, **change)
    assert not other.taken_up and len(other.missing) == 12


def test_a_folder_without_its_identity_counts_for_nothing(tmp_path):
    (tmp_path / "scene.1.partial").mkdir()
    (tmp_path / "scene.1.partial/classes").write_bytes(b"half")
    assert len(started(tmp_path).missing) == 12


def test_probabilities(tmp_path, found):
    partial = started(tmp_path, likely=2)
    likely = np.random.default_rng(1).random((2, *SIZE)).astype(np.float16)
    for n, tile in enumerate(TILES):
        partial.write(n, found[tile.slices], likely[(slice(None), *tile.slices)])
    (path,) = packed(partial, "hdf5")
    with h5py.File(path) as f:
        assert np.array_equal(f["probabilities"][:], likely)


def test_tiled_tiff(tmp_path, found):
    partial = started(tmp_path)
    write(partial, range(12), found)
    assert [p.name for p in packed(partial, "hdf5", "tiff")] == ["scene.1.h5", "scene.1.tif"]
    with tifffile.TiffFile(tmp_path / "scene.1.tif") as file:
        page = file.pages[0]
        assert (
            page.is_tiled
            and page.tilewidth == 256
            and json.loads(page.description)["class_names"] == CLASSES.names
        )
        assert np.array_equal(page.asarray(), found)


def test_png(tmp_path, found):
    partial = started(tmp_path)
    write(partial, range(12), found)
    (path,) = packed(partial, "png")
    with Image.open(path) as picture:
        assert np.array_equal(np.asarray(picture), found) and np.array_equal(
            np.asarray(picture.convert("RGB")), CLASSES.colours[found]
        )


@pytest.mark.parametrize("form", ["hdf5", "tiff", "png"])
def test_a_result_is_told_from_others_and_from_files_of_other_origin(tmp_path, found, form):
    partial = started(tmp_path)
    write(partial, range(12), found)
    identity, (path,) = partial.identity, packed(partial, form)
    both = [path, tmp_path / "more.h5"]
    assert (
        are_there([path], identity)
        and not are_there([path], "b")
        and not are_there(both, identity)
        and not are_there(both[1:], identity)
    )
    shutil.copy(path, both[1])
    if form == "hdf5":
        assert are_there(both, identity)
        path.write_bytes(b"no such thing")
    elif form == "png":
        Image.fromarray(found).save(path)
    else:
        class_files._tifffile().imwrite(path, found)
    with pytest.raises(
        FileExistsError,
        match=f"{path} exists and is not a class map that distseg wrote: move it, or set another --output",
    ):
        are_there([path], identity)


def test_the_setting_takes_each_format_that_can_be_written():
    (named,) = get_args(get_type_hints(PredictBase)["formats"])
    aliases = {"h5", "tif"}
    assert {*get_args(named)} - aliases == {*FORMS}
    for form in FORMS:
        assert PredictBase(formats=[form]).formats == [form]


@pytest.mark.parametrize(
    "formats, size, probabilities, words",
    [
        (["tiff"], (4, 5, 6), False, "class maps of 3 dims are not written as tiff"),
        (
            ["png"],
            (4, 5, 6),
            False,
            "4x5x6 pixels is too large, or of too many dims, for a PNG: add hdf5",
        ),
        (["png"], (16384, 16385), False, "16384x16385 pixels is too large"),
        (
            ["png", "tiff"],
            (4, 5),
            True,
            "probabilities are written to HDF5 and OME-Zarr only, but predict.formats is png, tiff: add hdf5",
        ),
    ],
)
def test_formats_that_can_not_hold_a_result(tmp_path, formats, size, probabilities, words):
    with pytest.raises(ValueError, match=words):
        paths_of(tmp_path, "v", formats, size, probabilities)


def test_a_png_of_what_is_too_large_is_left_out(tmp_path):
    assert paths_of(tmp_path, "v", ["hdf5", "png"], (16384, 16384), False) == [
        tmp_path / "v.h5",
        tmp_path / "v.png",
    ]
    assert paths_of(tmp_path, "v", ["hdf5", "png"], (16384, 16385), False) == [tmp_path / "v.h5"]


def test_an_error_while_packing_leaves_the_tiles(tmp_path, found, monkeypatch):
    partial = started(tmp_path)
    write(partial, range(12), found)

    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(class_files._WRITE, "hdf5", full)
    with pytest.raises(
        OSError,
        match="scene.1.h5 could not be written, no space is left on its disk after 4 B of it: .*B are free; free some space",
    ):
        packed(partial, "hdf5")
    partial.close()
    assert [p.name for p in tmp_path.iterdir()] == ["scene.1.partial"] and not started(
        tmp_path
    ).missing


def test_a_stop_while_files_are_written_changes_no_byte_and_keeps_finished_files(
    tmp_path, monkeypatch
):
    """The first stop comes at the first part of a file, each later one after one part more."""
    pytest.importorskip("rasterio")
    forms, leave = ("hdf5", "cog", "gpkg", "objects"), PartialMap._leave_memory
    found = np.kron(np.arange(1200).reshape(30, 40) % 7 % 3, np.ones((10, 13)))[:, : SIZE[1]]
    (tmp_path / "whole").mkdir()
    partial = started(tmp_path / "whole")
    write(partial, range(12), found)
    whole = [path.read_bytes() for path in packed(partial, *forms)]
    partial, paths, stops, files = started(tmp_path), None, 0, {}
    write(partial, range(12), found)

    def stop(self):
        leave(self)
        parts.append(1)
        if len(parts) > stops:
            raise KeyboardInterrupt

    monkeypatch.setattr(PartialMap, "_leave_memory", stop)
    while paths is None:
        parts = []
        try:
            paths = packed(partial, *forms)
        except KeyboardInterrupt:
            partial.close()
            partial, stops = started(tmp_path), stops + 1
            assert partial.taken_up and not partial.missing
        for path in tmp_path.glob("scene.1.*[!l]"):
            assert files.setdefault(path, path.stat().st_ino) == path.stat().st_ino
    assert [path.read_bytes() for path in paths] == whole and stops > 3
    assert sorted(tmp_path.iterdir()) == sorted([*paths, tmp_path / "whole"])


KILLED = """
import os, signal, sys
import numpy as np
from distseg.data.class_map import PartialMap
from tests.test_class_map import CLASSES, TILES, packed, started
from pathlib import Path
folder, parts, leave = Path(sys.argv[1]), int(sys.argv[2]), PartialMap._leave_memory
partial = started(folder)
if parts == 0:
    found = np.kron(np.arange(1200).reshape(30, 40) % 7 % 3, np.ones((10, 13), np.uint8))
    for n, tile in enumerate(TILES):
        partial.write(n, found[tile.slices])
    partial.flush()
assert not partial.missing
def stop(self):
    global parts
    leave(self)
    parts -= 1
    if parts < 0:
        os.kill(os.getpid(), signal.SIGKILL)
PartialMap._leave_memory = stop
packed(partial, "tiff", "cog", "gpkg")
"""


@pytest.mark.slow
def test_a_kill_while_files_are_written_changes_no_byte(tmp_path):
    pytest.importorskip("rasterio")

    def run(folder: Path, parts: int) -> int:
        return subprocess.run([sys.executable, "-c", KILLED, str(folder), str(parts)]).returncode

    whole, often = tmp_path / "whole", tmp_path / "often"
    for folder in (whole, often):
        folder.mkdir()
        assert run(folder, 0) == -signal.SIGKILL
    assert run(whole, 99) == 0
    assert all(run(often, parts) == -signal.SIGKILL for parts in range(1, 4))
    assert run(often, 99) == 0
    names = ["scene.1.cog.tif", "scene.1.gpkg", "scene.1.tif"]
    # A temporary file with this ending is removed by a job that begins a minute later.
    rest = [p.name for p in often.iterdir() if not p.name.endswith(".writing")]
    assert sorted(rest) == names
    for name in names:
        assert (often / name).read_bytes() == (whole / name).read_bytes()


def test_one_that_is_killed_while_it_removes_the_folder_leaves_nothing_to_take_up(
    tmp_path, found, monkeypatch
):
    partial = started(tmp_path)
    write(partial, range(12), found)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialMap, "_unmap", killed)
    with pytest.raises(KeyboardInterrupt):
        packed(partial, "hdf5")
    monkeypatch.undo()
    partial.close()
    again = started(tmp_path)
    assert not again.taken_up and len(again.missing) == 12


def test_a_folder_belongs_to_one_process(tmp_path):
    partial = started(tmp_path)
    with pytest.raises(
        BlockingIOError,
        match="another process is writing .*scene.1.partial: wait for it, or choose another output",
    ):
        started(tmp_path)
    assert len(partial.missing) == 12


def test_the_folder_of_a_finished_map_is_removed_while_it_is_locked(tmp_path, found, monkeypatch):
    """Else another process might begin a new map in the folder, and lose its files."""
    partial, removed = started(tmp_path), []
    write(partial, range(12), found)

    def remove(folder, **options):
        with pytest.raises(BlockingIOError):
            started(tmp_path)
        removed.append(folder)
        rmtree(folder, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    packed(partial, "hdf5")
    assert removed == [partial.folder] and not partial.folder.exists()


def test_a_map_that_another_process_begins_in_the_folder_stays(tmp_path, found, monkeypatch):
    partial, others = started(tmp_path), []
    write(partial, range(12), found)

    def remove(folder, **options):
        rmtree(folder, **options)
        others.append(started(tmp_path, "another"))

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    packed(partial, "hdf5")
    write(others[0], range(12), found)
    monkeypatch.undo()
    (path,) = packed(others[0], "hdf5")
    assert path.exists()


def test_a_folder_that_disappears_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    def gone(path, what):
        monkeypatch.undo()
        what.rmdir()
        return disk.locked(path, what)

    monkeypatch.setattr(class_map, "locked", gone)
    assert len(started(tmp_path).missing) == 12


def test_a_full_disk_is_told_first(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(class_map.os, "posix_fallocate", full)
    with pytest.raises(
        OSError,
        match=r"scene.1.partial could not be written, no space is left on its disk: it takes up to 155 kB, .*B are free; free some space, or choose another output",
    ):
        started(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(
        OSError,
        match=r"scene.1.partial has too little space for the unfinished class map of 155100 pixels: it takes 155 kB, 1 kB are free",
    ):
        started(tmp_path)
    assert not list(tmp_path.iterdir())


# what happens to a folder between two jobs


def flip(path: Path, byte: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def left_behind(tmp_path, found) -> Path:
    """The folder of a job that was killed after eleven of twelve tiles."""
    partial = started(tmp_path, likely=1)
    for n in range(11):
        partial.write(n, found[TILES[n].slices], found[TILES[n].slices][None].astype(np.float16))
    partial.close()
    return partial.folder


def test_a_damaged_tile_is_computed_anew(tmp_path, found):
    folder = left_behind(tmp_path, found)
    y, x = TILES[6].start
    flip(folder / "classes", y * SIZE[1] + x)
    y, x = TILES[3].start
    flip(folder / "probabilities", 2 * (y * SIZE[1] + x))
    again = started(tmp_path, likely=1)
    assert again.taken_up and again.missing == [3, 6, 11]


@pytest.mark.parametrize("byte", [*range(0, 40, 3), 11 * 8, 11 * 8 + 4])
def test_a_flipped_bit_of_the_record_is_harmless(tmp_path, found, byte):
    flip(left_behind(tmp_path, found) / "done", byte)
    assert started(tmp_path, likely=1).missing == sorted({byte // 8, 11})


@pytest.mark.parametrize("name", ["done", "classes", "probabilities", "identity"])
@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_what_is_cut_is_begun_anew(tmp_path, found, name, share):
    path = left_behind(tmp_path, found) / name
    os.truncate(path, int(share * path.stat().st_size))
    assert len(started(tmp_path, likely=1).missing) == 12


@pytest.mark.parametrize("name", ["lock", "identity", "done", "classes", ""])
def test_planted_links_lead_nowhere(tmp_path, name):
    precious, out = tmp_path / "precious", tmp_path / "out"
    if name:
        precious.write_text("mine")
        (out / "scene.1.partial").mkdir(parents=True)
    else:
        precious.mkdir(), out.mkdir()
    link = out / "scene.1.partial" / name if name else out / "scene.1.partial"
    link.symlink_to(precious)
    try:
        started(out).close()
    except FileExistsError as e:
        assert str(link) in str(e) and "link" in str(e)
    else:
        assert not link.is_symlink()
    assert precious.read_text() == "mine" if name else not list(precious.iterdir())


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "", "..", "a\0b", "a\nb"])
def test_names_that_lead_out_of_the_folder(tmp_path, name):
    with pytest.raises(
        ValueError, match="the name of an image must be UTF-8, not empty, .* rename it"
    ):
        paths_of(tmp_path, name, ["hdf5"], SIZE, False)


@pytest.mark.parametrize("form", [".h5", ".png", ".tif"])
def test_a_pipe_of_a_results_name_does_not_hang(tmp_path, form):
    os.mkfifo(tmp_path / f"scene.1{form}")
    with pytest.raises(FileExistsError, match="exists and is not a class map that distseg wrote"):
        are_there([tmp_path / f"scene.1{form}"], "a")


def test_a_full_disk_while_hdf5_packs(tmp_path, found, monkeypatch):
    """HDF5 crashes where it meets one itself."""
    partial, written = started(tmp_path), os.pwrite

    def full(handle, data, offset):
        if offset + len(data) > 40_000:
            raise OSError(28, "No space left on device")
        return written(handle, data, offset)

    write(partial, range(12), found)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        OSError,
        match="scene.1.h5 could not be written, no space is left on its disk after .*B of it: .*B are free",
    ):
        packed(partial, "hdf5")
    monkeypatch.undo()
    partial.close()
    assert [p.name for p in tmp_path.iterdir()] == ["scene.1.partial"]
    (path,) = packed(started(tmp_path), "hdf5")
    with h5py.File(path) as f:
        assert np.array_equal(f["classes"][:], found)
