"""Masks as polygons (GeoJSON, GeoPackage, shapefile) equal rasterio's drawing of the whole image."""

import json
import os
import re

import numpy as np
import pytest
from test_georeference import geotiff
from test_masks import run

from distseg.data.formats.readers import open_image
from distseg.data.store.store import Store
from distseg.data.vector import burned, placed
from distseg.data.vector.burned import BurnedReader
from distseg.data.vector.layer import ValueRule, read_layer
from distseg.data.vector.placed import ImageGrid
from distseg.tiling.tile import Box

pyogrio, shapely = pytest.importorskip("pyogrio"), pytest.importorskip("shapely")
features, warp = pytest.importorskip("rasterio.features"), pytest.importorskip("rasterio.warp")
SIZE = (61, 83)
UTM = ("EPSG:32633", (10, 0, 4e5, 0, -10, 5.4e6))


def polygons_of(number, count=12):
    """Return polygons in columns and rows: stars with holes, some of several parts, some cut by the border.

    Every second one has corners at the centres of pixels, so that centres lie on edges.
    """
    random = np.random.default_rng(number)
    found = []
    for k in range(count):
        parts = []
        for _ in range(1 + k % 3 // 2):
            angles = np.sort(random.uniform(0, 2 * np.pi, random.integers(4, 9)))
            ray = np.stack([np.cos(angles), np.sin(angles)], 1)
            middle = random.uniform((-5, -5), SIZE[::-1])
            radii = random.uniform(5, 25, (len(angles), 1))
            ring = middle + radii * ray
            hole = middle + 0.5 * radii * ray
            if k % 2:
                ring, hole = np.floor(ring) + 0.5, np.floor(hole) + 0.5
            parts.append(shapely.Polygon(ring, [hole]))
        found.append(parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts))
    return found


def on_earth(shapes, transform):
    """Return shapes in columns and rows as shapes in the CRS of the image."""
    a, b, c, d, e, f = transform
    return shapely.transform(
        np.array(shapes), lambda p: np.stack([*(p @ [[a, d], [b, e]] + [c, f]).T], 1)
    )


def written(path, shapes, crs, **columns):
    """Write shapes and their attributes into a vector file."""
    pyogrio.raw.write(
        path,
        shapely.to_wkb(np.array(shapes, object)),
        [np.array(values) for values in columns.values()],
        list(columns),
        crs=crs,
        geometry_type="Unknown" if path.suffix != ".shp" else "Polygon",
    )
    return path


def reprojected(shapes, source, target):
    """Return shapes in another CRS, corner by corner."""
    return shapely.transform(
        np.array(shapes),
        lambda p: np.stack([np.array(n) for n in warp.transform(source, target, *p.T)], 1),
    )


def grid_of(path, crs, transform, size=SIZE):
    geotiff(path, np.zeros((1, *size), np.uint8), crs=crs, transform=transform)
    image = open_image(path)
    return ImageGrid(path, image.size, image.place)


def whole(shapes, values, transform, size=SIZE):
    """Return rasterio's drawing of all shapes on the whole image."""
    from rasterio import Affine

    return features.rasterize(list(zip(shapes, values)), size, transform=Affine(*transform))


@pytest.mark.parametrize(
    "crs, transform, labels_crs, ending",
    [
        (*UTM, "EPSG:32633", ".gpkg"),
        (*UTM, "EPSG:4326", ".geojson"),
        (*UTM, "EPSG:3035", ".shp"),
        ("EPSG:3035", (9, 2, 4e6, 1, -9, 3e6), "EPSG:4326", ".gpkg"),  # rotated
        ("EPSG:32633", (10, 0, 4e5, 0, 10, 5.4e6), "EPSG:32632", ".fgb"),  # south at the top
        ("EPSG:4326", (1e-4, 0, 7, 0, -1e-4, 50), "EPSG:3857", ".gpkg"),
        ("EPSG:32601", (500, 0, 3.3e5, 0, -500, 7e6), "EPSG:4326", ".gpkg"),  # the antimeridian
        (None, (2, 0, 7, 0, -2, 50), None, ".gpkg"),
    ],
)
def test_labels_equal_the_drawing_of_the_whole_image(
    tmp_path, crs, transform, labels_crs, ending, monkeypatch
):
    monkeypatch.setattr(burned, "_BLOCK", (16, 7))
    grid = grid_of(tmp_path / "a.tif", crs, transform)
    for seed in range(2):
        shapes = on_earth(polygons_of(seed), transform)
        given = reprojected(shapes, crs, labels_crs) if crs != labels_crs else shapes
        path = written(tmp_path / f"{seed}{ending}", given, labels_crs, kind=np.arange(12) % 3)
        _, _, read, (kinds,) = pyogrio.raw.read(path, columns=["kind"])
        there = shapely.from_wkb(read)  # GeoJSON rounds coordinates, shapefiles turn rings
        there = reprojected(there, labels_crs, crs) if crs != labels_crs else there
        expected = whole(there, kinds, grid.world.transform)
        reader = BurnedReader(path, grid, ValueRule("kind"))
        assert reader.polygons and expected.any()
        assert np.array_equal(reader.read(Box.whole(SIZE))[0], expected)
        for box in (Box((0, 0), (1, 83)), Box((15, 6), (17, 22)), Box((60, 82), (61, 83))):
            assert np.array_equal(reader.read(box)[0], expected[box.slices])


@pytest.mark.parametrize(
    "longitudes, extent, around, expected",
    [
        ((10, 20), (15, 30), True, True),
        ((10, 20), (21, 30), True, False),
        ((-179, -175), (178, -176), True, True),  # the extent crosses the antimeridian
        ((176, 177), (178, -176), True, False),
        ((183, 185), (-178, -170), True, True),  # 183 and -177 are one meridian
        ((-183, -185), (174, 178), True, True),
        ((183, 185), (-178, -170), False, False),  # metres
    ],
)
def test_polygons_near_the_antimeridian_overlap(longitudes, extent, around, expected):
    bounds = np.array([[min(longitudes), 0, max(longitudes), 5]])
    found = placed._overlapping(bounds, (extent[0], 4, extent[1], 9), around)
    assert found.tolist() == [expected]
    beside = placed._overlapping(bounds, (extent[0], 6, extent[1], 9), around)
    assert beside.tolist() == [False]


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    path = tmp_path / "a.geojson"
    for number, place in enumerate((1, 2)):
        ring = [[0, 0], [place, 0], [place, 3], [0, 0]]
        shape = {"type": "Polygon", "coordinates": [ring]}
        feature = {"type": "Feature", "properties": {}, "geometry": shape}
        path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
        os.utime(path, ns=(number, number))
        assert read_layer(path, ValueRule()).bounds == (0, 0, place, 3)


def test_a_long_coast_is_drawn_by_few_corners(tmp_path, monkeypatch):
    """Corners far from a block are left out, and the pixels stay the same."""
    monkeypatch.setattr(burned, "_BLOCK", (32, 32))
    size = (256, 256)
    grid = grid_of(tmp_path / "a.tif", *UTM, size)
    random, drawn = np.random.default_rng(0), []
    angles = np.sort(random.uniform(0, 2 * np.pi, 20000))
    radii = 100 + 30 * np.sin(9 * angles) + random.uniform(-9, 9, angles.shape)
    coast = 128 + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    shape = on_earth([shapely.Polygon(coast)], UTM[1])
    path = written(tmp_path / "coast.gpkg", shape, UTM[0])
    near = burned._rings_near

    def counted(*arguments):
        drawn.append(sum(map(len, rings := near(*arguments))))
        return rings

    monkeypatch.setattr(burned, "_rings_near", counted)
    found = BurnedReader(path, grid, ValueRule()).read(Box.whole(size))[0]
    assert np.array_equal(found, whole(shape, [1], UTM[1], size))
    assert len(drawn) == 64 and sum(drawn) < 5 * 20000


def test_edges_through_the_centres_of_pixels(tmp_path, monkeypatch):
    """Draw rings whose far corners decide their direction, on which the pixels of such edges depend."""
    monkeypatch.setattr(burned, "_BLOCK", (20, 20))
    grid = grid_of(tmp_path / "a.tif", *UTM)
    rows = [22.5] * 6 + [18.5, 21.5, 21.5]
    columns = [14.5, 25.5, 25.5, 36.5, 36.5, 36.5, 39.5, 51.5, 62.5]
    shape = on_earth([shapely.Polygon(list(zip(columns, rows)))], UTM[1])
    path = written(tmp_path / "a.gpkg", shape, UTM[0])
    found = BurnedReader(path, grid, ValueRule()).read(Box.whole(SIZE))[0]
    assert np.array_equal(found, whole(shape, [1], UTM[1]))


def scenes(folder, count=3):
    """Write images side by side into folder/i and return their transforms."""
    (folder / "i").mkdir()
    transforms = [(10, 0, 4e5 + 2000 * k, 0, -10, 5.4e6) for k in range(count)]
    for k, transform in enumerate(transforms):
        pixels = np.random.default_rng(k).integers(0, 255, (2, *SIZE), np.uint8)
        geotiff(folder / f"i/s{k}.tif", pixels, crs=UTM[0], transform=transform)
    return transforms


def prepared(folder, masks, *flags, classes="ground,field,house"):
    arguments = ["prepare", folder / "i", folder / "s.h5", "--masks", masks, "--split", "1,0,0"]
    return run(*arguments, "--classes", classes, "--overwrite", *flags)


def square(x, y, edge=20.0):
    return shapely.box(x, y, x + edge, y + edge)


def test_one_file_of_named_classes_for_all_images(tmp_path, capsys):
    """Later polygons have the pixels; notes tell of overlaps, of what is skipped, of images without polygons."""
    transforms = scenes(tmp_path)
    shapes = [*on_earth(polygons_of(1), transforms[0]), *on_earth(polygons_of(2), transforms[1])]
    bow = shapely.Polygon([(4e5, 5.4e6), (400100, 5399900), (400100, 5.4e6), (4e5, 5399900)])
    kinds = ["house", "field", "1"] * 8
    path = written(
        tmp_path / "labels.gpkg", [*shapes, None, bow], UTM[0], kind=[*kinds, "field", "house"]
    )
    assert prepared(tmp_path, path, "--attribute", "kind") == 0
    out, store = capsys.readouterr().out, Store(tmp_path / "s.h5")
    values = [2, 1, 1] * 8 + [2]
    for k, transform in enumerate(transforms):
        expected = whole([*shapes, bow], values, transform)
        assert np.array_equal(store.labels(f"s{k}", Box.whole(SIZE)), expected)
    assert "has 1 features without geometry" in out and "s2.tif has no polygon" in out
    assert re.search(r"polygons that are not valid, in features? \d+ \(Self-intersection", out)
    assert re.search(r"note: polygons overlap at \d+ pixels", out)
    assert out.count("labels.gpkg") == 2  # one note each, though three images have the file


HERE = [square(400100, 5399700)]


def test_a_folder_of_files_of_which_one_is_empty(tmp_path, capsys):
    transforms = scenes(tmp_path)
    (tmp_path / "m").mkdir()
    for k, transform in enumerate(transforms[:2]):
        shapes = on_earth(polygons_of(k), transform)
        written(tmp_path / f"m/s{k}_labels.gpkg", shapes, UTM[0])
    nothing = {"type": "FeatureCollection", "features": []}
    (tmp_path / "m/s2_labels.geojson").write_text(json.dumps(nothing))
    assert prepared(tmp_path, tmp_path / "m", classes="ground,house") == 0
    store = Store(tmp_path / "s.h5")
    for k, transform in enumerate(transforms):
        shapes = on_earth(polygons_of(k), transform) if k < 2 else []
        expected = whole(shapes, [1] * 12, transform) if k < 2 else np.zeros(SIZE)
        assert np.array_equal(store.labels(f"s{k}", Box.whole(SIZE)), expected)
    assert "s2.tif has no polygon" in capsys.readouterr().out


def test_vector_files_beside_raster_masks_are_only_named(tmp_path, capsys):
    scenes(tmp_path)
    (tmp_path / "m").mkdir()
    for k in range(3):
        geotiff(tmp_path / f"m/s{k}.tif", np.full((1, *SIZE), k % 2, np.uint8))
        written(tmp_path / f"m/s{k}.gpkg", HERE, UTM[0])
    assert prepared(tmp_path, tmp_path / "m", classes="ground,house") == 0
    assert re.search(r"not read, .*/m/s0.gpkg.*\(3 in all\)", capsys.readouterr().out)


def test_polygons_as_objects_with_borders(tmp_path):
    scenes(tmp_path, 1)
    touching = [shapely.box(400000 + x, 5399800, 400100 + x, 5399950) for x in (50, 150, 350)]
    path = written(tmp_path / "labels.geojson", reprojected(touching, UTM[0], "EPSG:4326"), None)
    assert prepared(tmp_path, path, "--instances", "border", classes="ground,tree,edge") == 0
    labels = Store(tmp_path / "s.h5").labels("s0", Box.whole(SIZE))
    expected = np.zeros(SIZE, int)
    expected[5:20, 5:25], expected[5:20, 14:16], expected[5:20, 35:45] = 1, 2, 1
    assert np.array_equal(labels, expected)


def test_other_names_and_numbers_of_classes(tmp_path):
    transform = scenes(tmp_path, 1)[0]
    shapes = on_earth(polygons_of(3), transform)
    for kinds, values in (
        (["wood", "7", "house"] * 4, [1, 0, 2] * 4),
        ([7, 2, 1] * 4, [0, 2, 1] * 4),
        ([7.0, 2.0, 1.0] * 4, [0, 2, 1] * 4),
    ):
        path = written(tmp_path / f"{type(kinds[0]).__name__}.gpkg", shapes, UTM[0], kind=kinds)
        assert prepared(tmp_path, path, "--attribute", "kind", "--values=wood=1,7=0") == 0
        labels = Store(tmp_path / "s.h5").labels("s0", Box.whole(SIZE))
        assert np.array_equal(labels, whole(shapes, values, transform))


REFUSED = {
    "another CRS": (
        dict(shapes=[square(7, 50, 0.001)], crs="EPSG:4326"),
        r"no polygon of .*labels.gpkg overlaps any of the 3 images: its polygons span x 7 to 7.001 "
        r"and y 50 to 50.001 \(EPSG:4326\), but .*s0.tif spans x 400000 to 400830 and y 5399390 to "
        r"5400000 \(EPSG:32633\), which is about x 13.6",
    ),
    "no degrees": (dict(shapes=HERE, crs="EPSG:4326"), "which are no degrees, so that this CRS"),
    "no CRS": (dict(shapes=HERE, crs=None), "labels.gpkg names no CRS, but .*s0.tif does"),
    "nothing": (dict(shapes=HERE[:0], crs=UTM[0]), "labels.gpkg has no polygon at all"),
    "points": (
        dict(shapes=[*HERE, shapely.Point(4e5, 5.4e6)], crs=UTM[0]),
        r"feature 2 of .*labels.gpkg is a Point \(1 of 2 features are no polygons\).*buffer",
    ),
    "unknown class": (
        dict(shapes=HERE * 3, crs=UTM[0], kind=["field", "lake", None]),
        r"feature 2 of .* has the attribute kind 'lake', which is no class of --classes \(ground, "
        r"field, house\); 2 features have such values: 'lake', None. .*--values=NAME=0",
    ),
    "fractions": (dict(shapes=HERE, crs=UTM[0], kind=[0.5]), "kind 0.5, which is no class"),
    "no attribute": (
        dict(shapes=HERE, crs=UTM[0], name=["field"]),
        r"--attribute is kind, but .* has no such attribute \(its features have the attributes name\)",
    ),
    "beyond the CRS": (
        dict(shapes=[shapely.box(13.62, 48.7, 250, 200)], crs="EPSG:4326", kind=["field"]),
        "feature 1 of .* reaches places that EPSG:32633.* cannot hold: clip",
    ),
    "no number": (
        dict(shapes=[shapely.Polygon([(4e5, 5.4e6), (4e5, np.nan), (1, 2)])], crs=UTM[0]),
        "feature 1 of .* has a corner that is not a finite number",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_polygons_that_are_refused(tmp_path, case, capsys):
    scenes(tmp_path)
    given, words = REFUSED[case]
    shapes, crs, columns = given["shapes"], given["crs"], {**given}
    del columns["shapes"], columns["crs"]
    if not columns:
        columns = {"kind": ["house"] * len(shapes)}
    path = written(tmp_path / "labels.gpkg", shapes, crs, **columns)
    assert prepared(tmp_path, path, "--attribute", "kind") == 2
    assert re.search(words, _error(capsys))
    assert not (tmp_path / "s.h5").exists()


def _error(capsys):
    return capsys.readouterr().err.replace("\n", " ")
