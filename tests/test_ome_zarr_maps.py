"""Class maps as OME-Zarr: as zarr reads them, with a pyramid of most frequent classes; whole or not there; the same bytes whoever writes them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from made_ome_zarr import SCALES, made_image, noise

from distseg.cli.main import main
from distseg.data import class_files
from distseg.data.class_files import Classes, are_there, paths_of
from distseg.data.class_map import PartialMap
from distseg.data.formats import ome_zarr_writer
from distseg.data.formats.georeference import Georeference, of_matrix
from distseg.data.formats.readers import open_image, open_mask
from distseg.report import disk
from distseg.report.closing import notes_on_places
from distseg.report.shrink import most_frequent
from distseg.tiling.tile import Box, strips

zarr = pytest.importorskip("zarr")
COLOURS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(ome_zarr_writer, "_CHUNK", {2: 6, 3: 5})
    monkeypatch.setattr(ome_zarr_writer, "_SHARD", {2: 3, 3: 2})


def made_map(size):
    found = np.random.default_rng(0).integers(0, 3, size).astype(np.uint8)
    found[..., 4:17] = 2
    found[(*(slice(None),) * (len(size) - 1), slice(9, 12))] = 255
    return found


def written(folder, found, likely=None, place=None, identity="a"):
    path = folder / "v.ome.zarr"
    arrays = {"classes": found, **({} if likely is None else {"probabilities": likely})}
    classes = Classes(["a", "b", "c"], COLOURS, 255, place)
    class_files.write(path, arrays, classes, identity, lambda pixels: None, folder)
    return path


def run(*arguments):
    """Run the command line in this process and return its exit code."""
    try:
        return main(list(arguments)) or 0
    except SystemExit as e:
        return e.code or 0


def bytes_in(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def mode(values, nodata):
    """Return the most frequent label of some pixels, in plain Python."""
    values = [int(v) for v in values.ravel()]
    counted = [v for v in values if v != nodata] or [nodata]
    return min(set(counted), key=lambda v: (-counted.count(v), v))


@pytest.mark.parametrize(
    "size, block", [((7, 9), (2, 2)), ((5, 6), (1, 2)), ((3, 5, 4), (2, 1, 3))]
)
def test_most_frequent(size, block):
    labels = np.random.default_rng(1).choice([0, 1, 7, 255], size).astype(np.uint8)
    found = most_frequent(labels, block, 255)
    assert found.dtype == np.uint8
    for index in np.ndindex(found.shape):
        part = labels[tuple(slice(i * side, (i + 1) * side) for i, side in zip(index, block))]
        assert found[index] == mode(part, 255)
    assert (most_frequent(np.full(size, 255, np.uint8), block, 255) == 255).all()


@pytest.mark.parametrize("size", [(41, 29), (1, 3), (13, 4, 27)])
def test_every_level_holds_the_most_frequent_classes(tmp_path, size):
    found = made_map(size) if size[-1] > 9 else np.ones(size, np.uint8)
    likely = noise((2, *size), "float16")
    path = written(tmp_path, found, likely)
    group = zarr.open_group(path, mode="r")
    about = group.attrs["ome"]
    image, level, scale, shift = (
        about["multiscales"][0],
        found,
        np.ones(len(size)),
        np.zeros(len(size)),
    )
    side = ome_zarr_writer._CHUNK[len(size)]
    for dataset in image["datasets"]:
        array = group[dataset["path"]]
        assert np.array_equal(array[...], level) and array.dtype == np.uint8
        steps = dataset["coordinateTransformations"]
        assert steps[0]["scale"] == scale.tolist()
        assert (steps[1]["translation"] if len(steps) > 1 else [0] * len(size)) == shift.tolist()
        block = [2 if n > side else 1 for n in level.shape]
        shift, scale = shift + scale * (np.array(block) - 1) / 2, scale * block
        level = most_frequent(level, block, 255)
    assert max(group[dataset["path"]].shape) <= side
    assert {colour["label-value"]: colour["rgba"][:3] for colour in about["image-label"]["colors"]} == {
        **{k: COLOURS[k].tolist() for k in range(3)}, 255: [154] * 3}  # fmt: skip
    names = {each["label-value"]: each["class"] for each in about["image-label"]["properties"]}
    assert names == {0: "a", 1: "b", 2: "c", 255: "no data"}
    assert np.array_equal(group["probabilities/0"][...], likely)
    reader = open_mask(path, len(size))
    assert np.array_equal(reader.read(Box.whole(size))[0], found) and not reader.notes
    assert open_image(path / "probabilities", len(size)).bands == 2


def test_classes_of_zeros_are_stored_too(tmp_path):
    """A missing file then shows that a copy of the folder is not complete."""
    path = written(tmp_path, np.zeros((20, 20), np.uint8))
    (path / "0/c/1/1").unlink()
    assert "no file for 1 of 4 chunks" in open_mask(path).notes[0]


TURNED = [[0, -0.8, 0, 10], [0.7, 0, 0, -20], [0, 0, 2.5, 5], [0, 0, 0, 1.0]]
STRAIGHT = [[0.65, 0, 0, 10], [0, 0.7, 0, -20], [0, 0, 2.5, 5], [0, 0, 0, 1.0]]


@pytest.mark.parametrize("unit", [1e-3, 1e-6, None])
@pytest.mark.parametrize("matrix", [TURNED, STRAIGHT])
def test_spacing_and_place_are_kept(tmp_path, matrix, unit):
    place = of_matrix(matrix, unit)
    path = written(tmp_path, made_map((8, 9, 13)), place=place)
    image = zarr.open_group(path, mode="r").attrs["ome"]["multiscales"][0]
    steps = image["datasets"][0]["coordinateTransformations"]
    straight = matrix is STRAIGHT
    assert ome_zarr_writer.keeps_place(place) == straight
    assert steps[0]["scale"] == pytest.approx(
        [2.5, 0.7, 0.65] if straight else [2.5, 0.8, 0.7], rel=1e-15
    )
    assert [step["translation"] for step in steps[1:]] == ([[5, -20, 10]] if straight else [])
    assert {axis.get("unit") for axis in image["axes"]} == {
        {1e-3: "millimeter", 1e-6: "micrometer", None: None}[unit]
    }
    assert open_image(path).place == place


def test_a_slice_of_a_turned_volume_has_the_spacing_of_its_own_dims(tmp_path):
    path = written(tmp_path, made_map((9, 20)), place=of_matrix(TURNED, 1e-3))
    image = zarr.open_group(path, mode="r").attrs["ome"]["multiscales"][0]
    (step,) = image["datasets"][0]["coordinateTransformations"]
    assert step["scale"] == pytest.approx([0.8, 0.7], rel=1e-15)


def test_a_place_on_earth_is_kept_as_an_attribute(tmp_path):
    place = Georeference(((33550, (10.0, 10.0, 0.0)), (33922, (0.0, 0.0, 0.0, 5e5, 4e6, 0.0))))
    path = written(tmp_path, made_map((20, 21)), place=place)
    assert open_image(path).place == place
    steps = zarr.open_group(path, mode="r").attrs["ome"]["multiscales"][0]["datasets"][0]
    assert steps["coordinateTransformations"] == [{"type": "scale", "scale": [1.0, 1.0]}]


def test_polygons_and_rasters_of_a_microscope_s_image_are_in_its_unit(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    place = of_matrix([[0.65, 0, 0, 10], [0, 0.65, 0, 20], [0, 0, 1, 0], [0, 0, 0, 1]], 1e-6)
    found = np.zeros((20, 30), np.uint8)
    found[3:9, 4:15] = 1
    meaning = Classes(["a", "b"], COLOURS, 255, place, (1,))
    for name in ("v.gpkg", "v.tif", "v.geojson"):
        class_files.check_written([tmp_path / name], place, "v")
        class_files.write(
            tmp_path / name, {"classes": found}, meaning, "a", lambda pixels: None, tmp_path
        )
    with rasterio.open(tmp_path / "v.tif") as file:
        assert file.transform[:6] == pytest.approx((0.65, 0, 9.675, 0, 0.65, 19.675))
        assert 'UNIT["unknown",1E-06]' in file.crs.to_wkt()
    bounds = pytest.importorskip("pyogrio").read_info(tmp_path / "v.gpkg")["total_bounds"]
    assert bounds == pytest.approx((12.275, 21.625, 19.425, 25.525))
    (feature,) = json.loads((tmp_path / "v.geojson").read_text())["features"]
    ring = np.array(feature["geometry"]["coordinates"][0])
    assert (*ring.min(0), *ring.max(0)) == (4, 3, 15, 9)  # in pixels


def test_notes_on_pixel_sizes():
    placed = {"a": True, "b": False}
    assert notes_on_places(placed, ["zarr"], voxels=True) == []
    assert "how large its pixels are" in notes_on_places(placed, ["hdf5"], voxels=True)[0]
    assert "add nifti or nrrd" in notes_on_places(placed, ["hdf5"], volumes=True, voxels=True)[0]
    assert "where on earth" in notes_on_places(placed, ["zarr"])[0]


def test_equal_maps_are_equal_bytes_and_replace_each_other_whole(tmp_path, monkeypatch):
    found = made_map((41, 29))
    (tmp_path / "b").mkdir()
    path, other = written(tmp_path, found), written(tmp_path / "b", found)
    before = bytes_in(path)
    assert before == bytes_in(other)
    assert are_there([path], "a") and not are_there([path], "b")
    written(tmp_path, found[:20], identity="b")
    assert are_there([path], "b") and zarr.open_array(path / "0", mode="r").shape == (20, 29)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ome_zarr_writer, "_lower_level", full)
    with pytest.raises(disk.DiskFull, match=r"v.ome.zarr could not be written"):
        written(tmp_path, found, identity="c")
    assert are_there([path], "b") and sorted(p.name for p in tmp_path.iterdir()) == [
        "b",
        "v.ome.zarr",
    ]


def test_what_a_killed_job_left_is_removed(tmp_path):
    left = tmp_path / f".v.ome.zarr.{disk._HOST}-999999999-00000000.writing"
    (left / "0").mkdir(parents=True)
    (left / "0/zarr.json").write_text("")
    for path in (left / "0/zarr.json", left / "0", left):
        os.utime(path, (0, 0))
    written(tmp_path, made_map((20, 21)))
    assert [path.name for path in tmp_path.iterdir()] == ["v.ome.zarr"]


def test_a_folder_of_others_is_never_replaced(tmp_path):
    path = made_image(tmp_path / "v.ome.zarr", noise((9, 9)), "yx")
    with pytest.raises(FileExistsError, match="is not a class map that distseg wrote"):
        are_there([path], "a")
    (tmp_path / "w.ome.zarr").symlink_to(written(tmp_path / "..", made_map((20, 21))))
    with pytest.raises(FileExistsError, match="is not a class map that distseg wrote"):
        are_there([tmp_path / "w.ome.zarr"], "a")
    with pytest.raises(FileExistsError, match="where distseg writes a folder"):
        with disk.atomic_folder(tmp_path / "w.ome.zarr"):
            pass


def test_an_interrupted_map_becomes_the_same_bytes(tmp_path):
    found, paths = made_map((41, 29)), []
    tiles = list(strips(Box.whole(found.shape), 0, 9))
    for name in ("whole", "twice"):
        folder = tmp_path / name
        partial = PartialMap(folder / "v.partial", "a", found.shape, tiles)
        for number in range(len(tiles)):
            if name == "twice" and number == 2:
                partial.close()
                partial = PartialMap(folder / "v.partial", "a", found.shape, tiles)
                assert partial.taken_up
            partial.write(number, found[tiles[number].slices])
        paths += paths_of(folder, "v", ["zarr"], found.shape, False)
        partial.pack(paths[-1:], Classes(["a", "b", "c"], COLOURS))
    assert bytes_in(paths[0]) == bytes_in(paths[1])


def test_sizes_of_other_dims_and_probabilities(tmp_path):
    assert paths_of(tmp_path, "v", ["zarr"], (4, 5, 6), True) == [tmp_path / "v.ome.zarr"]
    with pytest.raises(ValueError, match="class maps of 4 dims are not written as zarr"):
        paths_of(tmp_path, "v", ["zarr"], (4, 5, 6, 7), False)


@pytest.mark.slow
@pytest.mark.parallel([1, 2])
def test_from_images_to_maps(comm, shared_path, monkeypatch):
    """Training on OME-Zarr volumes and prediction of one: the map equals HDF5's, with the scale of the input."""
    import h5py

    folder = Path(shared_path)
    monkeypatch.chdir(folder)
    if comm.rank == 0:
        for number in range(2):
            array = noise((9, 14, 17), "uint8", number)
            for name, those in (("i", array), ("m", array // 100)):
                made_image(folder / f"{name}/v{number}.ome.zarr", those, "zyx", shift={"z": 4.0})
        words = ["prepare", "i", "s.h5", "--masks", "m", "--classes", "a,b", "--split", "1,0,0"]
        assert run(*words) == 0
    comm.Barrier()
    words = ["--model.depth", "1", "--model.base_channels", "4", "--train.loggers", "[]"]
    words += [
        "--train.epochs",
        "1",
        "--mesh.samples",
        str(comm.size),
        "--data.store",
        "s.h5",
        "--train.output",
        "run",
    ]
    assert run("train", *words) == 0
    comm.Barrier()
    words = ["predict", "run", "--images", "i/v1.ome.zarr", "--output", "found"]
    words += ["--predict.formats", "[zarr, hdf5]", "--predict.tile", "5x8x9"]
    assert run(*words, "--predict.probabilities", "true") == 0
    if comm.rank == 0:
        path = folder / "found/v1.ome.zarr"
        group = zarr.open_group(path, mode="r")
        with h5py.File(folder / "found/v1.h5") as f:
            assert np.array_equal(group["0"][...], f["classes"][...])
            assert np.array_equal(group["probabilities/0"][...], f["probabilities"][...])
        image = group.attrs["ome"]["multiscales"][0]
        steps = image["datasets"][0]["coordinateTransformations"]
        assert steps[0]["scale"] == [SCALES[name] for name in "zyx"]
        assert steps[1]["translation"] == [4.0, 0.0, 0.0]
        assert {axis["unit"] for axis in image["axes"]} == {"micrometer"}
        assert open_image(path).place == open_image(folder / "i/v1.ome.zarr").place
