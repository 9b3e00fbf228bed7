"""Class maps lie where their images lie, in the colours of the label maps, and say where there is no data."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from PIL import Image
from test_train import config

from distseg.cli.predict import run_predict
from distseg.data import class_files
from distseg.data.class_files import Classes
from distseg.data.class_map import PartialMap
from distseg.data.formats.georeference import Georeference
from distseg.data.formats.palettes import class_colours
from distseg.data.formats.readers import open_image
from distseg.data.prepare import prepare_folder
from distseg.data.store.store import Store
from distseg.report.closing import notes_on_places
from distseg.tiling.tile import Box
from distseg.training.loop import train

pytestmark = pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
SIZE = (33, 47)
EMPTY = Box((0, 0), (20, 9)).slices
COLOURS = np.array([[200, 30, 10], [20, 130, 220]], np.uint8)
UTM = dict(crs="EPSG:32633", transform=(10, 0, 4e5, 0, -10, 5.4e6))


def geotiff(path, pixels, crs=None, transform=None, tags=None, **options):
    if tags is None:
        tags = {}
    rasterio = pytest.importorskip("rasterio")
    about = {
        "driver": "GTiff",
        "height": pixels.shape[1],
        "width": pixels.shape[2],
        "count": len(pixels),
        "dtype": pixels.dtype.name,
        "crs": crs,
    }
    with rasterio.open(
        path,
        "w",
        **about,
        **options,
        **({"transform": rasterio.Affine(*transform)} if transform else {}),
    ) as file:
        file.update_tags(**tags)
        file.write(pixels)


def sources(folder: Path):
    """Three images with no data in a corner, and their label maps."""
    (folder / "i").mkdir(), (folder / "m").mkdir()
    generator = np.random.default_rng(0)
    for k in range(3):
        labels = (generator.random(SIZE) < 0.4).astype(np.uint8)
        pixels = (generator.normal(100, 20, (2, *SIZE)) + 60 * labels).astype("f4")
        pixels[(slice(None), *EMPTY)] = -9999
        geotiff(folder / f"i/scene{k}.tif", pixels, nodata=-9999, **UTM)
        picture = Image.fromarray(labels, "P")
        picture.putpalette(COLOURS.ravel().tolist())
        picture.save(folder / f"m/scene{k}.png")
    np.save(folder / "plain.npy", pixels)
    prepare_folder(
        folder / "i",
        folder / "m",
        folder / "store.h5",
        ["ground", "disc"],
        splits=(0.34, 0.33, 0.33),
    )


@pytest.mark.parallel([1, 2])
def test_a_class_map_lies_where_its_image_lies(comm, shared_path, capsys, monkeypatch):
    """From a file as from a store, also where it was stopped and taken up."""
    rasterio, folder = pytest.importorskip("rasterio"), Path(shared_path)
    if comm.rank == 0:
        sources(folder)
    comm.Barrier()
    plan = config(folder, norm="batch", epochs=1, samples=comm.size, validate_every=0)
    formats = ["hdf5", "tiff", "png", "cog", "gpkg", "objects"]
    plan = replace(
        plan, predict=replace(plan.predict, formats=formats, probabilities=True, trace=["disc"])
    )
    train(plan, comm)
    store = Store(folder / "store.h5")
    name = store.split("test")[0]
    image, out = str(folder / f"i/{name}.tif"), folder / "found"
    if comm.size == 1:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(PartialMap, "pack", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            run_predict(str(folder / "run"), plan, comm, [image], "test", str(out))
    run_predict(
        str(folder / "run"), plan, comm, [image, str(folder / "plain.npy")], "test", str(out)
    )
    run_predict(str(folder / "run"), plan, comm, None, "test", str(folder / "stored"))
    comm.Barrier()
    if comm.rank:
        return
    printed = capsys.readouterr().out
    assert (
        "note: plain does not say where on earth it lies (CRS, transform), but 1 of the 2 images do: its class map does not say so either"
        in printed
    )
    empty = np.zeros(SIZE, bool)
    empty[EMPTY] = True
    for path in (out / f"{name}.tif", folder / f"stored/{name}.tif"):
        with rasterio.open(image) as source, rasterio.open(path) as found:
            assert (found.crs, found.transform, found.nodata) == (source.crs, source.transform, 255)
            assert [list(found.colormap(1)[k][:3]) for k in (0, 1)] == COLOURS.tolist()
            classes = found.read(1)
            assert (
                np.array_equal(classes == 255, empty)
                and set(np.unique(classes)) == {0, 1, 255}
                and np.array_equal(found.read_masks(1) == 0, empty)
            )
        with h5py.File(path.with_suffix(".h5")) as f:
            assert np.array_equal(f["classes"], classes) and np.array_equal(
                np.isnan(f["probabilities"]).all(0), empty
            )
            assert (
                f.attrs["nodata"] == 255
                and f.attrs["transform"].tolist() == list(UTM["transform"])
                and np.isfinite(f["probabilities"][:][:, ~empty]).all()
            )
            assert (
                Georeference.from_json(json.loads(f.attrs["geotiff_tags"]))
                == open_image(image).place
            )
        with (
            rasterio.open(path.with_suffix(".cog.tif")) as cog,
            rasterio.open(path.with_suffix(".objects.tif")) as objects,
        ):
            assert cog.crs == objects.crs and cog.transform == objects.transform == found.transform
            assert np.array_equal(cog.read(1), classes)
            numbers = objects.read(1)
            assert np.array_equal(numbers > 0, classes == 1)
        with closing(sqlite3.connect(path.with_suffix(".gpkg"))) as layer:
            rows = layer.execute("SELECT object, name, pixels, area_m2 FROM objects").fetchall()
            counts = np.bincount(numbers.ravel())[1:].tolist()
            known = enumerate(counts, 1)
            assert sorted(rows) == [(k, "disc", n, 100.0 * n) for k, n in known]
        with Image.open(path.with_suffix(".png")) as picture:
            assert (
                np.array_equal(np.asarray(picture), classes)
                and picture.info["transparency"] == 255
                and picture.info["nodata"] == "255"
            )
    assert not (tifffile.imread(out / "plain.tif") == 255).any(), (
        "plain.npy says of no number that it stands for no data"
    )


@pytest.mark.parametrize(
    "about",
    [
        UTM,
        dict(crs="EPSG:3035", transform=(9, 2, 4e5, 1, -9, 5e6)),
        dict(crs="EPSG:4326", transform=(0.1, 0, 7, 0, -0.1, 50), tags={"AREA_OR_POINT": "Point"}),
        dict(transform=(2, 0, 7, 0, -2, 50)),
    ],
    ids=["UTM", "turned", "points", "no CRS"],
)
def test_tags_of_a_place_are_kept(tmp_path, about):
    rasterio = pytest.importorskip("rasterio")
    geotiff(tmp_path / "a.tif", np.zeros((1, *SIZE), np.uint8), **about)
    place = open_image(tmp_path / "a.tif").place
    assert np.allclose(place.transform, about["transform"], rtol=1e-12)
    assert Georeference.from_json(json.loads(json.dumps(place.to_json()))) == place
    class_files.write(
        tmp_path / "map.tif",
        {"classes": np.zeros(SIZE, np.uint8)},
        Classes(["x", "y"], COLOURS, 7, place),
        "id",
        lambda pixels: None,
        tmp_path,
    )
    with rasterio.open(tmp_path / "a.tif") as a, rasterio.open(tmp_path / "map.tif") as b:
        assert (a.crs, a.transform, a.bounds, a.tags().get("AREA_OR_POINT")) == (
            b.crs,
            b.transform,
            b.bounds,
            b.tags().get("AREA_OR_POINT"),
        ) and b.nodata == 7


@pytest.mark.parametrize(
    "name, world",
    [
        ("a.tif", "a.tfw"),
        ("a.tif", "a.TFW"),
        ("a.tif", "a.wld"),
        ("a.png", "a.pgw"),
        ("a.jpg", "a.jgw"),
        ("a.jpg", "a.jpgw"),
    ],
)
def test_world_files(tmp_path, name, world):
    """Lines a, d, b, e, and the middle of the first pixel, as GDAL reads them."""
    rasterio = pytest.importorskip("rasterio")
    Image.fromarray(np.zeros(SIZE, np.uint8)).save(tmp_path / name)
    (tmp_path / world).write_text("10\n0.5\n-0.25\n-10\n400005\n5399995\n")
    place = open_image(tmp_path / name).place
    class_files.write(
        tmp_path / "map.tif",
        {"classes": np.zeros(SIZE, np.uint8)},
        Classes(["x", "y"], COLOURS, 255, place),
        "id",
        lambda pixels: None,
        tmp_path,
    )
    with rasterio.open(tmp_path / name) as a, rasterio.open(tmp_path / "map.tif") as b:
        assert (
            a.transform == b.transform
            and a.transform[0] == 10
            and np.allclose(place.transform, tuple(a.transform)[:6])
        )


def test_world_files_that_say_nothing(tmp_path):
    Image.fromarray(np.zeros(SIZE, np.uint8)).save(tmp_path / "a.png")
    for text in ("1\n0\n0\n", "1\n0\n0\n-1\nnan\n0", "hello", "\xff" * 9):
        (tmp_path / "a.pgw").write_text(text)
        assert open_image(tmp_path / "a.png").place is None
    (tmp_path / "a.png.aux.xml").write_text(
        "<PAMDataset><GeoTransform> 1, 2, 3, 4, 5, 6</GeoTransform></PAMDataset>"
    )
    assert "which is not copied into class maps" in open_image(tmp_path / "a.png").notes[0]


@pytest.mark.parametrize(
    "tags",
    [
        [[1, [2.0]]],
        [[33550, "text"]],
        [[34735, [1e9]]],
        [[33550, ["a"]]],
        [[34737, [1]]],
        [33550],
        7,
    ],
)
def test_places_that_can_not_be(tags):
    with pytest.raises((TypeError, ValueError)):
        Georeference.from_json(tags)


def test_colours_are_those_of_the_palettes():
    palette = np.zeros((8, 3), np.uint8)
    palette[:2], palette[7] = COLOURS, (9, 8, 7)
    grey = np.arange(8, dtype=np.uint8)[:, None].repeat(3, 1)
    for masks, values, expected in [
        ([palette], {}, COLOURS),
        ([None, palette], {7: 1}, palette[[0, 7]]),
        ([palette], {0: 1, 1: 0}, COLOURS[::-1]),
        ([grey, palette], {}, COLOURS),
        ([palette[:1]], {}, None),
        ([np.zeros((8, 3), np.uint8)], {}, None),
        ([None], {}, None),
    ]:
        found, notes = class_colours([(Path("a.png"), mask) for mask in masks], 2, values)
        assert np.array_equal(found, expected) if expected is not None else found is None
        assert not notes
    _, notes = class_colours([(Path("a.png"), palette), (Path("b.png"), palette[::-1])], 2, {})
    assert notes == [
        "note: b.png has other colours in its palette than a.png, whose colours class maps use"
    ]


@pytest.mark.parametrize("name", ["m.tif", "m.png"])
def test_a_store_keeps_the_colours_of_label_maps(tmp_path, name):
    (tmp_path / "i").mkdir(), (tmp_path / "m").mkdir()
    labels = np.random.default_rng(0).integers(0, 2, SIZE).astype(np.uint8)
    Image.fromarray(labels).save(tmp_path / f"i/m.{'png' if name == 'm.tif' else 'bmp'}")
    table = np.zeros((3, 256), np.uint16)
    table[:, :2] = COLOURS.T * np.uint16(257)
    if name == "m.tif":
        tifffile.imwrite(
            tmp_path / "m" / name, labels, photometric="palette", colormap=table, compression="lzw"
        )
    else:
        picture = Image.fromarray(labels, "P")
        picture.putpalette(COLOURS.ravel().tolist())
        picture.save(tmp_path / "m" / name)
    assert np.array_equal(
        prepare_folder(tmp_path / "i", tmp_path / "m", tmp_path / "s.h5", ["x", "y"]).colours,
        COLOURS,
    )


def test_what_class_maps_do_not_say_is_told():
    assert (
        notes_on_places({"a": False}, ["tiff"])
        == notes_on_places({"a": True, "b": True}, ["tiff", "png"])
        == []
    )
    assert notes_on_places({"a": False, "b": True}, ["hdf5"])[0].startswith(
        "note: b says where on earth it lies (CRS, transform), which these class maps do not keep"
    )
