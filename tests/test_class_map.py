"""A class map on its way: taken up after an interruption, begun anew for another network, never whole before it is."""

import json

import h5py
import numpy as np
import pytest

from distseg.data import class_map
from distseg.data.class_map import PartialMap
from distseg.geometry.tile import Box, tiles

SIZE = (300, 517)
TILES = tiles(SIZE, (3, 4), (1, 1))
CLASSES = ["sea", "land", "ice"]


@pytest.fixture
def found() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3, SIZE).astype(np.uint8)


def started(folder, identity=None, likely=0) -> PartialMap:
    return PartialMap(folder / "scene.1.partial", identity or {"network": "a"}, SIZE, TILES, likely)


def write(partial: PartialMap, numbers, found: np.ndarray) -> None:
    for n in numbers:
        partial.write(n, found[TILES[n].slices])


def test_packed_when_all_is_there(tmp_path, found):
    partial = started(tmp_path)
    write(partial, range(12), found)
    assert [p.name for p in tmp_path.iterdir()] == ["scene.1.partial"]
    assert partial.pack(("hdf5",), CLASSES) == [tmp_path / "scene.1.h5"]
    with h5py.File(tmp_path / "scene.1.h5") as f:
        assert np.array_equal(f["classes"][:], found) and list(f.attrs["class_names"]) == CLASSES
    assert [p.name for p in tmp_path.iterdir()] == ["scene.1.h5"]


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
    (path,) = again.pack(("hdf5",), CLASSES)
    with h5py.File(path) as f:
        assert np.array_equal(f["classes"][:], found)


@pytest.mark.parametrize("change", [dict(identity={"network": "b"}), dict(likely=2)])
def test_of_another_network_it_is_begun_anew(tmp_path, found, change):
    partial = started(tmp_path)
    write(partial, range(11), found)
    partial.flush()
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
    (path,) = partial.pack(("hdf5",), CLASSES)
    with h5py.File(path) as f:
        assert np.array_equal(f["probabilities"][:], likely)


def test_tiled_tiff(tmp_path, found):
    tifffile = pytest.importorskip("tifffile")
    partial = started(tmp_path)
    write(partial, range(12), found)
    assert [p.name for p in partial.pack(("hdf5", "tiff"), CLASSES)] == ["scene.1.h5", "scene.1.tif"]
    with tifffile.TiffFile(tmp_path / "scene.1.tif") as file:
        page = file.pages[0]
        assert page.is_tiled and page.tilewidth == 256 and json.loads(page.description)["class_names"] == CLASSES
        assert np.array_equal(page.asarray(), found)


def test_volumes_are_no_tiff(tmp_path):
    partial = PartialMap(tmp_path / "v.partial", {}, (4, 5, 6), [Box.whole((4, 5, 6))])
    partial.write(0, np.zeros((4, 5, 6), np.uint8))
    with pytest.raises(ValueError, match="hdf5 only"):
        partial.pack(("tiff",), CLASSES)
    assert [p.name for p in tmp_path.iterdir()] == ["v.partial"]  # nothing is lost


def test_an_error_while_packing_leaves_the_tiles(tmp_path, found, monkeypatch):
    partial = started(tmp_path)
    write(partial, range(12), found)

    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(class_map._PACK, "hdf5", full)
    with pytest.raises(OSError, match="No space left"):
        partial.pack(("hdf5",), CLASSES)
    assert [p.name for p in tmp_path.iterdir()] == ["scene.1.partial"] and not started(tmp_path).missing


def test_a_full_disk_is_told_first(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(class_map.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"class map of 155100 pixels does not fit .*No space left.* 0.00 GB while it grows.*name another --output"):
        started(tmp_path)
    assert not list(tmp_path.iterdir())
