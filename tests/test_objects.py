"""Objects of label maps: traced strip by strip, they equal what GDAL traces in the whole map."""

import json
import sqlite3
import struct
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from made_store import random_store

from distseg.cli.main import main
from distseg.data import class_files
from distseg.data.class_files import Classes
from distseg.data.class_map import PartialMap
from distseg.data.formats.georeference import Georeference
from distseg.data.formats.readers import open_image
from distseg.data.formats.tiff_segments import Segments
from distseg.data.vector import components, features, files, geojson, geopackage, outlines
from distseg.data.vector.components import Numbers
from distseg.data.vector.outlines import StoredRings
from distseg.data.vector.polygons import trace
from distseg.data.vector.world import World, world_of
from distseg.tiling.tile import Box

rasterio = pytest.importorskip("rasterio")
pytest.importorskip("rasterio.features")
pytest.importorskip("rasterio.warp")
pytestmark = pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
UTM = dict(crs="EPSG:32633", transform=rasterio.Affine(10, 0, 4e5, 0, -10, 5.4e6))


def strips_of(labels, heights):
    """Cut a map into strips of these heights, over and over."""
    top, number = 0, 0
    while top < len(labels):
        height = heights[number % len(heights)]
        yield labels[top : top + height]
        top, number = top + height, number + 1


def traced(labels, heights=(1000,), skipped=(), fewest=1 << 18, left=False):
    """Return (number, label, pixels, rings) of each object."""
    width = labels.shape[1]
    numbers = Numbers(strips_of(labels, heights), width, skipped)
    strips = numbers.numbered(strips_of(labels, heights))
    found = []
    for objects in trace(strips, width, left=left, fewest=fewest):
        sums = objects.sums
        rows = zip(sums.numbers.tolist(), sums.labels.tolist(), sums.pixels.tolist(), strict=True)
        for index, row in enumerate(rows):
            found.append((*row, corners_of(objects.rings, index)))
    return sorted(found)


def corners_of(rings, index):
    """Return the corners of each ring of an object, whose rings are in memory or in a file."""
    if isinstance(rings, StoredRings):
        found = []
        for count, corners in rings:
            x, y = (np.concatenate(parts).tolist() for parts in zip(*corners))
            assert count == len(x) - 1 and (x[0], y[0]) == (x[-1], y[-1])
            found.append(list(zip(x, y))[:-1])
        assert (len(found), sum(map(len, found))) == (rings.rings, rings.corners)
        return found
    corners = list(zip(rings.x.tolist(), rings.y.tolist()))
    borders = zip(rings.begins[:-1], rings.begins[1:], strict=True)
    return [corners[a:b] for id, (a, b) in zip(rings.ids, borders, strict=True) if id == index]


def area(ring):
    """Return the area inside a ring, positive if it runs clockwise on the screen."""
    x, y = np.array(ring, float).T
    return float(x @ np.roll(y, -1) - np.roll(x, -1) @ y) / 2


def normal(ring):
    """Return a ring from its uppermost corner, clockwise, without the repeated corner."""
    ring = [(int(x), int(y)) for x, y in ring][: -1 if tuple(ring[0]) == tuple(ring[-1]) else None]
    first = ring.index(min(ring, key=lambda corner: corner[::-1]))
    ring = ring[first:] + ring[:first]
    return tuple(ring if area(ring) > 0 else [ring[0], *ring[:0:-1]])


def by_gdal(labels, skipped=()):
    """Return label and rings of each object, as GDAL traces them in the whole map."""
    shapes = rasterio.features.shapes(labels, mask=~np.isin(labels, skipped), connectivity=4)
    return sorted(
        (int(value), tuple(sorted(normal(ring) for ring in shape["coordinates"])))
        for shape, value in shapes
    )


def drawn_map(seed):
    """Return a map of drawn size and labels: noise, blocks, or a mixture of them."""
    random = np.random.default_rng(seed)
    height, width = random.integers(1, 24, 2)
    classes, block = random.integers(1, 5), random.choice([1, 1, 2, 3])
    labels = random.integers(0, classes, (-(-height // block), -(-width // block)))
    labels = np.kron(labels, np.ones((block, block), int))[:height, :width]
    labels[random.random(labels.shape) < 0.1] = 255  # holes without data
    return labels.astype(np.uint8)


@pytest.mark.covering(cases=5)
@pytest.mark.parametrize("group", range(10))
def test_strips_trace_what_gdal_traces_in_the_whole_map(group, monkeypatch):
    """On 500 maps, with odd strips, rings and numbers equal those of the whole map.

    The strips also drop complete objects more often than the whole map does.
    """
    for seed in range(50 * group, 50 * group + 50):
        random = np.random.default_rng(1000 + seed)
        labels, skipped = drawn_map(seed), (255,) if seed % 3 else ()
        whole = traced(labels, skipped=skipped)
        heights = random.integers(1, 6, 3).tolist()
        monkeypatch.setattr(components, "_MOST_IDS", int(random.integers(1, 40)))
        assert traced(labels, heights, skipped, int(random.integers(0, 40))) == whole, seed
        assert traced(labels, (1,), skipped) == whole, seed
        ours = sorted((label, tuple(sorted(map(normal, rings)))) for _, label, _, rings in whole)
        assert ours == by_gdal(labels, skipped), seed
        turned = traced(labels, heights, skipped, 1, left=True)
        for (*about, rings), (*same, backwards) in zip(whole, turned, strict=True):
            assert about == same
            assert backwards == [[ring[0], *ring[:0:-1]] for ring in rings], seed
        for _, _, pixels, rings in whole:
            assert area(rings[0]) > 0 and all(area(ring) < 0 for ring in rings[1:])
            assert sum(map(area, rings)) == pixels
            assert all(len(set(ring)) == len(ring) for ring in rings)  # none touches itself


PICTURES = {
    "a hole across four strips": ["#####", "#...#", "#.#.#", "#...#", "#####"],
    "one object through all strips": ["#..##", "##..#", ".##.#", "..###", "....#"],
    "two objects that touch in a corner": ["##..", "##..", "..##", "..##"],
    "an object that touches itself in a corner": ["###.", "#.#.", "##.#", "#..#", "####"],
    "two holes that touch in a corner": ["#####", "#.###", "##.##", "#####"],
    "arms that meet far below": ["#.#.#", "#.#.#", "#.#.#", "#####"],
    "an arch whose left leg meets an object": ["#......", "#.#####", "#.#...#", "###...#"],
    "a spiral": ["#######", "#.....#", "#.###.#", "#.#...#", "#.#####", "#......"],
    "a single pixel": ["#"],
    "a single column": ["#", ".", "#", "#"],
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("heights", [(1,), (2,), (2, 1), (3,)], ids=str)
def test_pictures(name, heights):
    labels = np.array([[c == "#" for c in row] for row in PICTURES[name]], np.uint8)
    assert traced(labels, heights) == traced(labels)
    ours = sorted((v, tuple(sorted(map(normal, rings)))) for _, v, _, rings in traced(labels))
    assert ours == by_gdal(labels)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_numbers_follow_the_first_pixels_and_areas_the_rows(seed, height):
    labels = drawn_map(seed)
    cut = list(strips_of(labels, (height,)))
    numbers = Numbers(cut, labels.shape[1], (255,))
    drawn = np.concatenate(list(numbers.drawn(cut)))
    whole = traced(labels, skipped=(255,))
    assert numbers.count == len(whole) == drawn.max(initial=0)
    assert np.array_equal(drawn, flooded(labels, 255))
    of_rows, areas = np.arange(1.0, len(labels) + 1), {}
    for objects in trace(numbers.numbered(cut), labels.shape[1], of_rows, fewest=1):
        areas |= dict(zip(objects.sums.numbers.tolist(), objects.sums.areas.tolist()))
    for number, label, pixels, _ in whole:
        assert areas[number] == (of_rows @ (drawn == number)).sum()
        assert (drawn == number).sum() == pixels and (labels[drawn == number] == label).all()


def geotiff(path, labels, **about):
    """Write labels as GeoTIFF and return its path."""
    height, width = labels.shape
    form = dict(driver="GTiff", height=height, width=width, count=1, dtype=labels.dtype.name)
    with rasterio.open(path, "w", **form, **about) as file:
        file.write(labels, 1)
    return path


def rows_of(path):
    """Return (rings, object, class, name, pixels, area_m2) of each object of a GeoPackage."""
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute(
            "SELECT geom, object, class, name, pixels, area_m2 FROM objects"
        ).fetchall()
    return [(rings_in(row[0]), *row[1:]) for row in rows]


def rings_in(geometry):
    """Return the rings in a geometry of a GeoPackage."""
    assert geometry[:2] == b"GP" and geometry[3] == 0b11
    at, rings = 8 + 32 + 9, []
    for _ in range(struct.unpack_from("<I", geometry, 8 + 32 + 5)[0]):
        (count,) = struct.unpack_from("<I", geometry, at)
        rings.append(np.frombuffer(geometry, "<f8", 2 * count, at + 4).reshape(-1, 2))
        at += 4 + 16 * count
    assert at == len(geometry)
    return rings


def written(folder, labels, form, place, **about):
    """Write a class map in a form and return its path."""
    path = folder / f"map{class_files.FORMS[form]}"
    colours = np.array([[1, 2, 3], [40, 50, 60], [200, 100, 0], [9, 9, 9]], np.uint8)
    classes = Classes(["land", "lake", "ice", "snow"], colours, 255, place, **about)
    (folder / "scratch").mkdir(exist_ok=True)
    class_files.check_written([path], place, "map")
    class_files.write(
        path, {"classes": labels}, classes, "abc123", lambda pixels: None, folder / "scratch"
    )
    assert class_files.are_there([path], "abc123") and not class_files.are_there([path], "abc")
    return path


def odd_tiles(random, size):
    """Return boxes that cover a map in any order, some of one pixel's width."""
    spans = []
    for n in size:
        inside = random.choice(np.arange(1, n), min(n - 1, 5), False) if n > 1 else []
        borders = [0, *sorted({*map(int, inside), *([1, int(n) - 1] if n > 2 else [])}), int(n)]
        spans.append(list(zip(borders, borders[1:])))
    boxes = [Box((a, c), (b, d)) for a, b in spans[0] for c, d in spans[1]]
    return [boxes[k] for k in random.permutation(len(boxes))]


def flooded(labels, nodata):
    """Return each pixel's object number, by a flood fill from each first pixel; 0 for no data."""
    numbers, count = np.zeros(labels.shape, np.uint32), 0
    for first in np.ndindex(labels.shape):
        if numbers[first] or labels[first] == nodata:
            continue
        count, reached = count + 1, [first]
        numbers[first] = count
        while reached:
            row, column = reached.pop()
            for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                y, x = row + down, column + right
                inside = 0 <= y < labels.shape[0] and 0 <= x < labels.shape[1]
                if inside and not numbers[y, x] and labels[y, x] == labels[first]:
                    numbers[y, x] = count
                    reached.append((y, x))
    return numbers


@pytest.mark.parametrize("maps", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_maps_that_grow_in_odd_tiles_have_the_objects_of_the_whole_map(tmp_path, maps, monkeypatch):
    """Polygons equal those of GDAL, numbers those of a flood fill; tiles may have one pixel."""
    classes = Classes([str(n) for n in range(5)], np.zeros((5, 3), np.uint8), 255)
    paths = [tmp_path / "map.gpkg", tmp_path / "map.objects.tif"]
    for seed in range(maps):
        random, labels = np.random.default_rng(seed), drawn_map(5000 + seed)
        if seed % 5 == 0:  # one object through all tiles, with holes across borders of tiles
            labels[::3], labels[:, ::4] = 0, 0
        monkeypatch.setattr(files, "_STRIP", int(random.integers(1, 100)))
        monkeypatch.setattr(components, "_MOST_IDS", int(random.integers(1, 40)))
        boxes = odd_tiles(random, labels.shape)
        partial = PartialMap(tmp_path / "map.partial", f"map {seed}", labels.shape, boxes)
        for number, box in enumerate(boxes):
            partial.write(number, labels[box.slices])
        partial.pack(paths, classes)
        rows = rows_of(paths[0])
        ours = sorted((row[2], tuple(sorted(map(normal, row[0])))) for row in rows)
        assert ours == by_gdal(labels, (255,)), seed
        numbers = flooded(labels, 255)
        assert np.array_equal(tifffile.imread(paths[1]), numbers), seed
        counted = np.bincount(numbers.ravel())
        assert {row[1]: row[4] for row in rows} == dict(enumerate(counted[1:].tolist(), 1)), seed


@pytest.fixture
def labels():
    random = np.random.default_rng(1)
    found = np.kron(random.integers(0, 3, (40, 37)), np.ones((8, 9), int)).astype(np.uint8)
    found[100:200, 50:170] = 255
    return found


def test_geopackage_has_the_polygons_of_rasterio(tmp_path, labels):
    place = open_image(geotiff(tmp_path / "image.tif", labels, **UTM)).place
    rows = rows_of(written(tmp_path, labels, "gpkg", place))
    shapes = rasterio.features.shapes(labels, labels != 255, transform=UTM["transform"])
    shapes = {frozenset(map(frozenset, shape["coordinates"])): value for shape, value in shapes}
    assert len(shapes) == len(rows)
    for row in rows:
        value = shapes[frozenset(frozenset(map(tuple, ring)) for ring in row[0])]
        assert int(value) == row[2] and row[3] == ["land", "lake", "ice"][row[2]]
        assert row[5] == 100 * row[4]
        assert area(row[0][0]) > 0 and all(area(hole) < 0 for hole in row[0][1:])  # y runs up
    with closing(sqlite3.connect(tmp_path / "map.gpkg")) as file:
        (about,) = file.execute("SELECT * FROM gpkg_contents").fetchall()
        assert about[5:] == (4e5, 5.4e6 - 3200, 4e5 + 3330, 5.4e6, 32633)
        crs = file.execute("SELECT definition FROM gpkg_spatial_ref_sys WHERE srs_id=32633")
        assert rasterio.CRS.from_wkt(crs.fetchone()[0]) == rasterio.CRS.from_epsg(32633)
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert file.execute("PRAGMA foreign_key_check").fetchall() == []
    assert written(tmp_path, labels, "gpkg", place).read_bytes() == (
        written(tmp_path, labels, "gpkg", place).read_bytes()
    )


def test_geojson_is_in_degrees_counter_clockwise(tmp_path, labels):
    place = open_image(geotiff(tmp_path / "image.tif", labels, **UTM)).place
    found = json.loads(written(tmp_path, labels, "geojson", place).read_text())
    rows = {row[1]: row for row in rows_of(written(tmp_path, labels, "gpkg", place))}
    assert len(found["features"]) == len(rows)
    for feature in found["features"]:
        about, row = feature["properties"], rows[feature["id"]]
        assert (about["object"], about["class"], about["name"], about["pixels"]) == row[1:5]
        for ring, known in zip(feature["geometry"]["coordinates"], row[0]):
            there = rasterio.warp.transform(UTM["crs"], "EPSG:4326", known[:, 0], known[:, 1])
            np.testing.assert_allclose(ring, np.transpose(there), rtol=0, atol=1e-8)
        assert area(feature["geometry"]["coordinates"][0]) > 0


def test_without_georeference_coordinates_are_pixels(tmp_path, labels):
    found = json.loads(written(tmp_path, labels, "geojson", None).read_text())
    assert found["coordinates"] == "pixels: column, row"
    first = found["features"][0]["geometry"]["coordinates"][0]
    assert [0, 0] in first and all(type(n) is int for corner in first for n in corner)
    rows = rows_of(written(tmp_path, labels, "gpkg", None))
    assert all(row[5] is None for row in rows)
    assert sum(row[4] for row in rows) == (labels != 255).sum()


def test_objects_raster_has_the_numbers_of_the_polygons(tmp_path, labels):
    place = open_image(geotiff(tmp_path / "image.tif", labels, **UTM)).place
    rows = rows_of(written(tmp_path, labels, "gpkg", place))
    with rasterio.open(written(tmp_path, labels, "objects", place)) as file:
        numbers = file.read(1)
        assert (file.crs, file.transform, file.nodata) == (*UTM.values(), 0)
    assert numbers.dtype == np.uint32 and (numbers == 0).sum() == (labels == 255).sum()
    for _, number, label, _, pixels, _ in rows:
        assert (numbers == number).sum() == pixels
        assert (labels[numbers == number] == label).all()


def test_polygons_do_not_depend_on_strips(tmp_path, labels, monkeypatch):
    whole = sorted(rows_of(written(tmp_path, labels, "gpkg", None)), key=lambda row: row[1])
    monkeypatch.setattr(files, "_STRIP", 3 * labels.shape[1])
    monkeypatch.setattr(features, "trace", partial(trace, fewest=1))
    parts = rows_of(written(tmp_path, labels, "gpkg", None))
    assert [row[1] for row in parts] != list(range(1, len(parts) + 1))  # complete ones come first
    for ours, theirs in zip(sorted(parts, key=lambda row: row[1]), whole, strict=True):
        assert ours[1:] == theirs[1:]
        assert all(np.array_equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def test_long_outlines_are_written_in_parts(tmp_path, labels, monkeypatch):
    """Files with outlines that pass through a scratch file equal those of objects in memory."""
    place = open_image(geotiff(tmp_path / "image.tif", labels, **UTM)).place

    def found():
        layers = [rows_of(written(tmp_path, labels, "gpkg", p)) for p in (place, None)]
        texts = [written(tmp_path, labels, "geojson", p).read_text() for p in (place, None)]
        features = [json.loads(text)["features"] for text in texts]
        return [
            *([(*row[1:], [ring.tolist() for ring in row[0]]) for row in rows] for rows in layers),
            *features,
        ]

    whole = found()
    monkeypatch.setattr(files, "_STRIP", 7 * labels.shape[1])
    monkeypatch.setattr(features, "trace", partial(trace, fewest=1))
    for module, name in ((geopackage, "_BATCH"), (geojson, "_BATCH"), (outlines, "_MANY")):
        monkeypatch.setattr(module, name, 8)
    monkeypatch.setattr(outlines, "_FEW", 2)

    def number_of(row):
        return row["id"] if isinstance(row, dict) else row[0]

    for ours, theirs in zip(found(), whole, strict=True):
        assert ours != theirs and sorted(ours, key=number_of) == sorted(theirs, key=number_of)


def test_outlines_that_a_geopackage_cannot_hold_are_refused(tmp_path, labels, monkeypatch):
    monkeypatch.setattr(geopackage, "_LARGEST", 300)
    with pytest.raises(ValueError, match=r"object \d+ \(\w+, .*most 300 bytes.*write geojson"):
        written(tmp_path, labels, "gpkg", None)
    assert not list(tmp_path.glob("*.gpkg"))


def test_only_chosen_classes_are_traced(tmp_path, labels):
    rows = rows_of(written(tmp_path, labels, "gpkg", None, traced=(1,)))
    assert {row[3] for row in rows} == {"lake"}
    assert [row[1] for row in rows] == list(range(1, len(rows) + 1))
    with rasterio.open(written(tmp_path, labels, "objects", None, traced=(1,))) as file:
        assert ((file.read(1) > 0) == (labels == 1)).all()


def test_cog_is_one_and_keeps_pixels_colours_and_place(tmp_path):
    random = np.random.default_rng(2)
    labels = np.kron(random.integers(0, 4, (130, 150)), np.ones((8, 8), int)).astype(np.uint8)
    place = open_image(geotiff(tmp_path / "image.tif", labels, **UTM)).place
    path = written(tmp_path, labels, "cog", place)
    with rasterio.open(path) as file:
        assert (file.read(1) == labels).all()
        assert (file.crs, file.transform, file.nodata) == (*UTM.values(), 255)
        assert file.colormap(1)[2] == (200, 100, 0, 255)
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG" and file.overviews(1) == [2, 4]
    with rasterio.open(path, overview_level=0) as file:
        # A class map is not averaged: at every 8x8 block the overview has the block's own class.
        assert (file.read(1) == labels[::2, ::2]).all()
    assert not list(tmp_path.glob("scratch/*"))


@pytest.mark.parametrize("south_up", [False, True])
def test_areas_in_degrees_are_those_on_the_ellipsoid(south_up):
    """All cells of the earth add up to its area; one cell equals a numerical integral."""
    step = -1.0 if not south_up else 1.0
    world = World((1.0, 0.0, -180.0, 0.0, step, -90.0 * step), True, rasterio.CRS.from_epsg(4326))
    areas = world.row_areas(180)
    assert areas.sum() * 360 == pytest.approx(5.10065621724e14, rel=1e-10)  # Moritz 2000, GRS 80
    a, f = 6378137.0, 1 / 298.257223563
    e2 = f * (2 - f)
    latitudes = np.radians(np.linspace(-90, -89, 20001) + 0 * step)
    middle = (latitudes[1:] + latitudes[:-1]) / 2
    strip = a**2 * (1 - e2) * np.cos(middle) / (1 - e2 * np.sin(middle) ** 2) ** 2
    expected = (strip * np.diff(latitudes)).sum() * np.radians(1)
    assert areas[0 if south_up else -1] == pytest.approx(expected, rel=1e-6)


def test_areas_are_square_metres_in_feet_and_none_where_unknown():
    feet = rasterio.CRS.from_epsg(2263)  # New York, US survey feet
    world = World((10.0, 0.0, 0.0, 0.0, -10.0, 0.0), True, feet)
    assert world.row_areas(1)[0] == pytest.approx(100 * (1200 / 3937) ** 2)
    assert World((10.0, 0.0, 0.0, 0.0, -10.0, 0.0), True, None).row_areas(3) is None
    turned = World((0.1, 0.1, 0.0, 0.1, -0.1, 0.0), True, rasterio.CRS.from_epsg(4326))
    assert turned.row_areas(3) is None
    local = rasterio.CRS.from_wkt('LOCAL_CS["site",UNIT["metre",1]]')
    assert World((10.0, 0.0, 0.0, 0.0, -10.0, 0.0), True, local).row_areas(3) is None


def test_rings_that_cross_the_antimeridian_are_cut(tmp_path):
    labels = np.zeros((4, 4), np.uint8)
    fiji = dict(crs="EPSG:32760", transform=rasterio.Affine(2e5, 0, 5e5, 0, -2e5, 8.2e6))
    place = open_image(geotiff(tmp_path / "image.tif", labels, **fiji)).place
    found = json.loads(written(tmp_path, labels, "geojson", place).read_text())
    geometry = found["features"][0]["geometry"]
    assert geometry["type"] == "MultiPolygon" and len(geometry["coordinates"]) == 2
    west, east = sorted(
        (np.array(part[0])[:, 0] for part in geometry["coordinates"]), key=lambda x: x.mean()
    )
    assert west.min() == -180 and west.max() < 0 < east.min() and east.max() == 180


def test_rings_that_were_cut_are_counter_clockwise_without_repeated_corners(tmp_path):
    labels = np.random.default_rng(0).integers(0, 3, (20, 30)).astype(np.uint8)
    fiji = dict(crs="EPSG:3460", transform=rasterio.Affine(1e4, 0, 1.9e6, 0, -1e4, 4e6))
    place = open_image(geotiff(tmp_path / "image.tif", labels, **fiji)).place
    found = json.loads(written(tmp_path, labels, "geojson", place).read_text())["features"]
    several = [f["geometry"] for f in found if f["geometry"]["type"] == "MultiPolygon"]
    assert several
    for outer, *holes in (part for geometry in several for part in geometry["coordinates"]):
        assert area(outer) > 0 and all(area(hole) < 0 for hole in holes)
        assert all(a != b for a, b in zip(outer, outer[1:]))


@pytest.mark.parametrize(
    "crs, transform, said",
    [
        ("EPSG:3995", (1e5, 0, -1e6, 0, -1e5, 1e6), "goes around a pole"),
        ("EPSG:3995", (1e5, 0, -1e6, 0, -1e5, 2e6), "crosses the antimeridian near a pole"),
        ("EPSG:4326", (9, 0, 100, 0, -9, 90), "has longitudes from"),
    ],
)
def test_objects_that_geojson_cannot_hold_are_refused(tmp_path, crs, transform, said):
    labels = np.full((20, 20), 255, np.uint8)
    labels[4:9, 6:14] = 1
    if "pole" in said and "around" in said:
        labels[4:16, 4:16], labels[9:11, 9:11] = 1, 0
    place = open_image(
        geotiff(tmp_path / "image.tif", labels, crs=crs, transform=rasterio.Affine(*transform))
    ).place
    with pytest.raises(ValueError, match=f"object 1 {said}.*write gpkg"):
        written(tmp_path, labels, "geojson", place)


def test_longitudes_up_to_360_become_negative(tmp_path):
    labels = np.array([[0, 1, 2, 0]], np.uint8)
    place = open_image(
        geotiff(
            tmp_path / "a.tif",
            labels,
            crs="EPSG:4326",
            transform=rasterio.Affine(90, 0, 0, 0, -90, 90),
        )
    ).place
    found = json.loads(written(tmp_path, labels, "geojson", place).read_text())["features"]
    west = [min(x for x, _ in f["geometry"]["coordinates"][0]) for f in found]
    assert sorted(west) == [-180, -90, 0, 90]


def test_maps_whose_coordinates_are_unknown_are_refused_before_work(tmp_path):
    world_file = Georeference(((34264, (10.0, 0, 0, 5, 0, -10, 0, 7, *(0.0,) * 7, 1.0)),))
    assert world_of(world_file, "map").crs is None
    with pytest.raises(ValueError, match="names no CRS"):
        class_files.check_written([tmp_path / "a.geojson"], world_file, "map")
    class_files.check_written([tmp_path / "a.gpkg"], world_file, "map")
    points = Georeference(((33922, (0.0,) * 24),))
    with pytest.raises(ValueError, match="ground control points"):
        class_files.check_written([tmp_path / "a.gpkg"], points, "map")
    (tmp_path / "b.gpkg").write_bytes(b"another's")
    with pytest.raises(FileExistsError, match="not a class map that distseg wrote"):
        class_files.check_written([tmp_path / "b.gpkg"], None, "map")


def run(*arguments):
    """Run the command line in this process and return its exit code."""
    try:
        return main([str(argument) for argument in arguments]) or 0
    except SystemExit as e:
        return e.code


def test_command_traces_maps_of_others_and_of_predict(tmp_path, labels, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    geotiff("labels.tif", labels, nodata=255, **UTM)
    assert not run("trace", "labels.tif", "--formats", "gpkg", "geojson", "objects")
    lines = capsys.readouterr().out.splitlines()
    rows = rows_of("objects/labels.gpkg")
    assert lines[0] == f"objects/labels.gpkg: {len(rows):,} objects" and len(lines) == 3
    assert {row[2:4] for row in rows} == {(0, "0"), (1, "1"), (2, "2")}
    place = open_image("labels.tif").place
    for form in ("hdf5", "tiff"):
        path = written(tmp_path, labels, form, place)
        assert not run("trace", path, "--output", form, "--classes", "lake", "--least", 100)
        chosen = rows_of(Path(form) / "map.gpkg")
        assert {row[3] for row in chosen} == {"lake"} and min(row[4] for row in chosen) >= 100
        known = {row[1:] for row in rows_of(written(tmp_path, labels, "gpkg", place, traced=(1,)))}
        assert {row[1:] for row in chosen} == {row for row in known if row[3] >= 100}


@pytest.mark.parametrize("form", ["deflate", "floats", "masked", "wide"])
def test_trace_decodes_each_tile_once_a_pass(tmp_path, labels, form, monkeypatch):
    """Count the decodes of two passes. A row of tiles beyond the limit is decoded in several bands."""
    monkeypatch.chdir(tmp_path)
    decoded, decode = Counter(), Segments._decode

    def counted(self, number, index, wanted, out):
        decoded[self.path, index] += wanted[1] != slice(0, 1)  # opening decodes the first pixel
        decode(self, number, index, wanted, out)

    monkeypatch.setattr(Segments, "_decode", counted)
    monkeypatch.setattr(files, "_STRIP", 5 * labels.shape[1])
    monkeypatch.setattr(files, "_READ", 7 * labels.shape[1])
    monkeypatch.setattr(files, "_MOST_READ", 31 * labels.shape[1] if form == "wide" else 1 << 20)
    stored = labels.astype(np.float32) if form == "floats" else labels
    tifffile.imwrite("a.tif", stored, tile=(32, 32), compression="deflate")
    if form == "masked":
        tifffile.imwrite("a.tif.msk", (labels != 255).astype(np.uint8), tile=(32, 32))
    assert not run("trace", "a.tif", "--classes", "0", "1", "2")
    most = 2 * (-(-32 // 7) + 1) if form == "wide" else 2
    assert max(decoded.values()) <= most and min(decoded.values()) >= 2
    known = {row[1:3] for row in rows_of(written(tmp_path, labels, "gpkg", None))}
    assert {row[1:3] for row in rows_of("objects/a.gpkg")} == known


def test_no_data_of_a_picture_is_no_object(tmp_path, labels, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not run("trace", written(tmp_path, labels, "png", None))
    known = {row[1:3] for row in rows_of(written(tmp_path, labels, "gpkg", None))}
    assert {row[1:3] for row in rows_of("objects/map.gpkg")} == known


def test_maps_are_not_replaced_by_results(tmp_path, labels, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    geotiff("a.tif", labels, **UTM)
    assert not run("trace", "a.tif", "--formats", "objects", "--output", ".")
    numbers = Path("a.objects.tif").read_bytes()
    assert run("trace", "a.tif", "a.objects.tif", "--formats", "objects", "--output", ".") == 2
    said = "the result a.objects.tif would replace a.objects.tif, which this command reads: set"
    assert said in capsys.readouterr().err and Path("a.objects.tif").read_bytes() == numbers


def test_labels_of_any_number_are_traced_or_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tifffile.imwrite("a.tif", np.array([[-1, -1, 2], [3, -1, 2], [-5, -5, -5]], np.int16))
    assert not run("trace", "a.tif", "--formats", "gpkg")
    assert {row[2] for row in rows_of("objects/a.gpkg")} == {-5, -1, 2, 3}
    tifffile.imwrite("b.tif", np.array([[2**63 + 5]], np.uint64))
    assert run("trace", "b.tif", "--formats", "gpkg") == 2
    assert "b.tif holds the label 9223372036854775813" in capsys.readouterr().err


def test_a_full_disk_is_named(tmp_path, labels, monkeypatch):
    path = tmp_path / "a.gpkg"

    def insert(*_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("distseg.data.vector.geopackage._insert", insert)
    with pytest.raises(sqlite3.OperationalError):  # another error of SQLite stays what it is
        written(tmp_path, labels, "gpkg", None)

    def full(*_):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr("distseg.data.vector.geopackage._insert", full)
    with pytest.raises(OSError, match="map.gpkg could not be written, no space is left"):
        written(tmp_path, labels, "gpkg", None)
    assert not path.exists()


def test_command_says_what_is_wrong(tmp_path, labels, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    geotiff("labels.tif", labels, nodata=255, **UTM)
    random_store("store.H5", train=[(8, 8)])
    Path("maps").mkdir()
    Path("a.nii.gz").touch()
    for arguments, words in (
        (["store.H5"], "store.H5 is a store of images, not a class map: trace the class maps"),
        (["maps"], "maps is a folder, but objects are traced in files: name the class maps"),
        (["a.nii.gz"], "a.nii.gz is a NIfTI file, a volume, but objects are traced only in maps"),
        (["nothing.tif"], "there is no image file nothing.tif"),
        (["labels.tif", "--classes", "lake"], "the classes of labels.tif are known by number only"),
        (["labels.tif", "labels.tif"], "several maps are named labels"),
        (["labels.tif", "--least", "0"], "--least must be a whole number from 1"),
    ):
        assert run("trace", *arguments) == 2 and words in capsys.readouterr().err
    assert not Path("objects").exists()
