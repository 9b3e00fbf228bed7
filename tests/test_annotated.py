"""Polygons in pixels, as COCO and YOLO hold them, are drawn as rasterio draws them; what has no outline is refused."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from test_masks import run
from test_vector_masks import SIZE, polygons_of

from distseg.data.store.store import Store
from distseg.data.vector.annotated import is_coco, run_lengths
from distseg.tiling.tile import Box

shapely, features = pytest.importorskip("shapely"), pytest.importorskip("rasterio.features")
NAMES = ["a", "b"]
CATEGORIES = [dict(id=3, name="car"), dict(id=8, name="person")]
CLASSES = "ground,car,person"


def images_in(folder):
    folder.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        pixels = np.random.default_rng(number).integers(0, 256, (*SIZE, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")


def outlines(number):
    """Return the outer rings of some polygons, each a list of one or two rings."""
    found = [shapely.get_parts(shape) for shape in polygons_of(number)]
    return [[np.array(part.exterior.coords) for part in parts] for parts in found]


def drawn(number, values):
    """Return rasterio's drawing of the outlines, the last one on top."""
    shapes = [
        (shapely.Polygon(ring), value)
        for rings, value in zip(outlines(number), values)
        for ring in rings
    ]
    return features.rasterize(shapes, SIZE, dtype="uint8")


def coco(**changes):
    """Return a COCO file of the images, with polygons of both categories in turns."""
    height, width = SIZE
    images = [
        dict(id=k, file_name=f"photos/{name}.png", height=height, width=width)
        for k, name in enumerate(NAMES)
    ]
    annotations = [
        dict(
            id=100 * image + k,
            image_id=image,
            category_id=CATEGORIES[k % 2]["id"],
            segmentation=[ring.ravel().tolist() for ring in rings],
        )
        for image in range(2)
        for k, rings in enumerate(outlines(image))
    ]
    return {"images": images, "annotations": annotations, "categories": CATEGORIES, **changes}


def prepared(folder, masks, *flags, classes=CLASSES):
    where = folder / "i", folder / "s.h5", "--masks", masks, "--overwrite"
    return run("prepare", *where, "--classes", classes, *flags)


def labels(folder, name, size=SIZE):
    return Store(folder / "s.h5").labels(name, Box.whole(size))


def run_length(mask):
    """Return COCO's uncompressed run-length encoding of a mask."""
    flat = mask.T.ravel()
    ends = np.concatenate([np.flatnonzero(np.diff(flat)) + 1, [flat.size]])
    counts = np.diff([0, *ends]).tolist()
    return dict(size=list(mask.shape), counts=[0, *counts] if flat[0] else counts)


@pytest.fixture
def folder(tmp_path):
    images_in(tmp_path / "i")
    return tmp_path


def written(folder, content):
    (folder / "m.json").write_text(json.dumps(content))
    return folder / "m.json"


def test_coco_is_drawn_as_rasterio_draws_it(folder):
    assert prepared(folder, written(folder, coco()), "--attribute", "category") == 0
    for number, name in enumerate(NAMES):
        expected = drawn(number, [1 + k % 2 for k in range(12)])
        assert np.array_equal(labels(folder, name), expected) and expected.any()
    flags = ("--attribute", "category", "--values=person=1")
    assert prepared(folder, folder / "m.json", *flags, classes="ground,car") == 0
    assert np.array_equal(labels(folder, "b"), drawn(1, [1] * 12))
    assert prepared(folder, folder / "m.json", classes="ground,any") == 0
    assert np.array_equal(labels(folder, "b"), drawn(1, [1] * 12))
    border = ("--instances", "border")
    assert prepared(folder, folder / "m.json", *border, classes="ground,any,border") == 0
    found = labels(folder, "b")
    assert np.array_equal(found > 0, drawn(1, [1] * 12) > 0) and (found == 2).any()


def test_run_lengths_are_masks_bit_for_bit(folder, capsys):
    blocks = [np.random.default_rng(k).random((16, 21)) < 0.4 for k in range(2)]
    masks = [np.kron(some, np.ones((4, 4), bool))[: SIZE[0], : SIZE[1]] for some in blocks]
    masks[1][0, 0] = True
    ones = [
        dict(id=k, image_id=k, category_id=3, iscrowd=1, segmentation=run_length(mask))
        for k, mask in enumerate(masks)
    ]
    path = written(folder, coco(annotations=ones))
    assert prepared(folder, path, classes="ground,car") == 0
    for mask, name in zip(masks, NAMES):
        assert np.array_equal(labels(folder, name), mask)
    assert "crowd" in capsys.readouterr().out


def compressed(runs):
    """Return COCO's compressed form of run lengths; written as maskApi.c describes it."""
    text = ""
    for at, length in enumerate(runs):
        number, more = length - (runs[at - 2] if at > 2 else 0), True
        while more:
            low, number = number % 32, number // 32
            more = number != (-1 if low & 16 else 0)
            text += chr(48 + low + 32 * more)
    return text


@pytest.mark.parametrize("seed", range(3))
def test_compressed_run_lengths_are_unpacked(seed):
    random = np.random.default_rng(seed)
    runs = random.integers(0, 10 ** random.integers(1, 7, 50)).tolist()
    assert run_lengths("it", compressed(runs)) == runs


def test_compressed_run_lengths_of_pycocotools():
    """The texts are those that pycocotools 2.0.11 gives for these masks."""
    small = np.zeros((9, 11), bool)
    small[2:6, 3:8] = small[7, 9] = True
    large = np.zeros((61, 83), bool)
    large[:, 40:] = large[0, 0] = large[3:50, 5:30] = True
    for mask, text in ((small, "m0450000000>MG"), (large, "01c9^1kF" + 47 * "0" + "ob0``2")):
        assert run_lengths("it", text) == run_length(mask)["counts"]


def test_compressed_run_lengths_are_masks_bit_for_bit(folder):
    mask = np.random.default_rng(0).random(SIZE) < 0.4
    found = run_length(mask)
    shape = dict(size=found["size"], counts=compressed(found["counts"]))
    path = written(folder, coco(annotations=one(segmentation=shape)))
    assert prepared(folder, path, "--split", "1,0,0", classes="ground,car") == 0
    assert np.array_equal(labels(folder, "a"), mask) and not labels(folder, "b").any()


def square(low, high):
    return [low, low, high, low, high, high, low, high]


@pytest.mark.parametrize(
    "rings, expected, words",
    [
        ([square(1, 5), square(3, 9)], 48, "overlap others of the same feature.* they are joined"),
        ([square(1, 9), square(3, 5)], 64, "overlap others of the same feature.* they are joined"),
        ([[1, 1, 9, 1, 1, 9, 9, 9]], 32, "not valid.* inside an even number of rings"),
    ],
    ids=["overlapping", "one in another", "crossing itself"],
)
def test_polygons_of_one_annotation_that_overlap_are_joined(folder, rings, expected, words, capsys):
    path = written(folder, coco(annotations=one(segmentation=rings)))
    assert prepared(folder, path, "--split", "1,0,0", classes="ground,car") == 0
    assert abs(int(labels(folder, "a").sum()) - expected) <= 4
    out = capsys.readouterr().out
    assert re.search(words, out), out
    assert ("joined" in out) != ("even number" in out)


def test_a_geojson_file_is_told_from_coco_without_parsing_it(folder, monkeypatch):
    content = written(folder, dict(type="FeatureCollection", features=[], images="none"))
    monkeypatch.setattr(json, "loads", pytest.fail)
    assert not is_coco(content)


def test_polygons_on_parts_of_images(folder):
    assert prepared(folder, written(folder, coco()), classes="ground,any") == 0
    whole = labels(folder, "b")
    assert prepared(folder, folder / "m.json", "--parts", "1x2", classes="ground,any") == 0
    halves = [labels(folder, f"b_r0c{k}", (61, n)) for k, n in enumerate((41, 42))]
    assert np.array_equal(np.concatenate(halves, 1), whole)


def one(**changes):
    triangle = [[1, 1, 30, 1, 30, 30]]
    return [dict(id=7, image_id=0, category_id=3, segmentation=triangle) | changes]


WRONG_COCO = {
    "classes without a category": (coco(), (), "set --attribute .*category"),
    "a category of no class": (
        coco(categories=[dict(id=3, name="car"), dict(id=8, name="cat")]),
        ("--attribute", "category"),
        "attribute category 'cat', which is no class",
    ),
    "an image is missing": (
        coco(images=coco()["images"][:1], annotations=one()),
        (),
        "lists 0 images .* b.png",
    ),
    "an image is listed twice": (coco(images=coco()["images"] * 2), (), "lists 2 images"),
    "another size": (
        coco(images=[image | dict(width=84) for image in coco()["images"]]),
        (),
        r"says that a.png has 61x84 pixels .* but it has 61x83",
    ),
    "a box": (coco(annotations=one(segmentation=[])), (), "annotation 7 .* no segmentation"),
    "two corners": (coco(annotations=one(segmentation=[[1, 2, 3, 4]])), (), "polygon of 2 corners"),
    "odd": (coco(annotations=one(segmentation=[[1, 2, 3]])), (), "no list of x and y"),
    "a damaged text": (
        coco(annotations=one(segmentation=dict(size=[*SIZE], counts="01 1"))),
        (),
        "annotation 7 .* compressed run-length .* damaged at character 3 of 4: export",
    ),
    "a text that is cut off": (
        coco(annotations=one(segmentation=dict(size=[*SIZE], counts="01o"))),
        (),
        "annotation 7 .* text of 3 characters is cut off within a number: export",
    ),
    "a number without end": (
        coco(annotations=one(segmentation=dict(size=[*SIZE], counts="o" * 99))),
        (),
        "damaged at character 14 of 99",
    ),
    "a text of another image": (
        coco(annotations=one(segmentation=dict(size=[*SIZE], counts="m0450000000>MG"))),
        (),
        "of 99 pixels of the size .61, 83., but the image has 61x83",
    ),
    "parts of numbers": (
        coco(annotations=one(segmentation=dict(size=[*SIZE], counts=[5, 5.5]))),
        (),
        r"counts are neither a list of whole numbers nor a text, but \[5, 5.5\]",
    ),
    "short": (
        coco(annotations=one(segmentation=dict(size=[*SIZE], counts=[5, 5]))),
        (),
        "of 10 pixels",
    ),
    "nothing": (coco(annotations=[]), (), "no polygon in any of its 2 images"),
    "one id for two images": (
        coco(images=[image | dict(id=0) for image in coco()["images"]]),
        (),
        "gives the id 0 to two images, .*a.png and .*b.png",
    ),
    "an unknown image": (
        coco(annotations=one(image_id="0")),
        (),
        r"image_id is not the id of any entry \(1 of 1, such as annotation 7 with '0'\)",
    ),
    "an unknown category of an annotation": (
        coco(annotations=one(category_id=99)),
        (),
        "whose category_id is not the id of any entry .* annotation 7 with 99",
    ),
    "outside": (
        coco(annotations=one(segmentation=[[200, 5, 210, 5, 210, 9]])),
        (),
        "annotation 7 .* lies outside of its image a.png: its columns are 200 to 210",
    ),
    "no number": (
        coco(annotations=one(segmentation=[[1, 2, float("nan"), 4, 5, 6]])),
        (),
        "annotation 7 .* not a finite number",
    ),
    "too far": (
        coco(annotations=one(segmentation=[[-1e12, 2, 1e12, 2, 1e12, 10]])),
        (),
        "feature 7 .* not a finite number up to 1e.09",
    ),
    "no file name": (coco(images=[dict(id=0)]), (), "is no COCO file: .* no 'file_name'"),
}


@pytest.mark.covering(cases=4)
@pytest.mark.parametrize("case", WRONG_COCO)
def test_coco_that_is_refused(folder, case, capsys):
    content, flags, words = WRONG_COCO[case]
    classes = CLASSES if "class" in words else "ground,car"
    classes = CLASSES if "category" in case else classes
    assert prepared(folder, written(folder, content), *flags, classes=classes) == 2
    message = capsys.readouterr().err
    assert re.search(words, message), message


# YOLO


def yolo(folder, change=str, names=None):
    """Write a text file of polygons for each image, of the classes 0 and 1 in turns."""
    (folder / "m").mkdir()
    height, width = SIZE
    for number, name in enumerate(NAMES):
        lines = []
        for k, rings in enumerate(outlines(number)):
            inside = rings[0].clip(0, (width, height)) / (width, height)
            lines.append(" ".join(map(repr, [k % 2, *inside.ravel().tolist()])))
        (folder / f"m/{name}.txt").write_text(change("\n".join(lines) + "\n\n"))
    if names is not None:
        (folder / "data.yaml").write_text(json.dumps(dict(names=names)))
    return folder / "m"


def near(number, values):
    """Return the drawing of the first rings, clipped to the image."""
    height, width = SIZE
    rings = [rings[0].clip(0, (width, height)) for rings in outlines(number)]
    shapes = [(shapely.Polygon(ring), value) for ring, value in zip(rings, values)]
    return features.rasterize(shapes, SIZE, dtype="uint8")


@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "names, values",
    [(None, (1, 2)), (["car", "person"], (1, 2)), ({"0": "person", "1": "car"}, (2, 1))],
)
def test_yolo_is_drawn(folder, names, values, capsys):
    masks = yolo(folder, names=names)
    assert prepared(folder, masks, "--attribute", "category") == 0
    for number, name in enumerate(NAMES):
        expected = near(number, values * 6)
        # shares are rounded, so that a pixel whose centre lies on an edge may differ
        assert (labels(folder, name) != expected).mean() < 0.005 and expected.any()
    assert ("0 is car, 1 is person" in capsys.readouterr().out) == (names is None)


def test_an_image_of_an_empty_file_is_background(folder):
    masks = yolo(folder)
    (masks / "a.txt").write_text("")
    assert prepared(folder, masks, "--split", "1,0,0", classes="ground,any") == 0
    assert not labels(folder, "a").any() and labels(folder, "b").any()


def test_yolo_with_a_byte_order_mark_is_read_and_other_encodings_are_refused(folder, capsys):
    masks = yolo(folder)
    (masks / "a.txt").write_bytes(b"\xef\xbb\xbf" + (masks / "a.txt").read_bytes())
    assert prepared(folder, masks, "--split", "1,0,0", classes="ground,any") == 0
    (masks / "a.txt").write_text("0 0 0 1 0 1 1\n", encoding="utf-16")
    assert prepared(folder, masks, "--split", "1,0,0", classes="ground,any") == 2
    assert "a.txt is no text in UTF-8" in capsys.readouterr().err


def test_images_of_one_name_are_told_apart_by_their_folders(tmp_path, capsys):
    """The folders come from --recursive; the COCO file may name only the last ones."""
    images, annotations = [], []
    for number, city in enumerate("AB"):
        (tmp_path / f"i/{city}").mkdir(parents=True)
        Image.fromarray(np.zeros((9, 11), np.uint8)).save(tmp_path / f"i/{city}/x.png")
        images.append(dict(id=number, file_name=f"{city}/x.png", width=11, height=9))
        square = [number, 0, number + 2, 0, number + 2, 3, number, 3]
        annotations.append(dict(id=number, image_id=number, category_id=1, segmentation=[square]))
    about = dict(images=images, annotations=annotations, categories=[dict(id=1, name="car")])
    (tmp_path / "c.json").write_text(json.dumps(about))
    flags = ("--recursive", "--split", "1,0,0")
    assert prepared(tmp_path, tmp_path / "c.json", *flags, classes="ground,car") == 0
    for number, city in enumerate("AB"):
        found = np.argwhere(labels(tmp_path, f"{city}-x", (9, 11)))
        assert found[:, 1].min() == number and len(found) == 6
    images[0]["file_name"] = "x.png"  # the longest fitting name counts, so only A/x.png has it
    (tmp_path / "c.json").write_text(json.dumps(about))
    assert prepared(tmp_path, tmp_path / "c.json", *flags, classes="ground,car") == 0
    del images[1], annotations[1]
    (tmp_path / "c.json").write_text(json.dumps(about))
    assert prepared(tmp_path, tmp_path / "c.json", *flags, classes="ground,car") == 2
    assert "lists 1 images with the file name x.png, but there are 2" in capsys.readouterr().err


WRONG_YOLO = {
    "a box": (lambda text: "0 0.5 0.5 0.2 0.2\n", None, "line 1 .*a.txt is a box"),
    "pixels": (lambda text: "0 1 1 30 1 30 30\n", None, "shares of width and height"),
    "a word": (lambda text: "0 1 1 x 1 1 1\n", None, "is no polygon .*'x'"),
    "an unknown class": (lambda text: "5 0 0 1 0 1 1\n", None, "class 5, but there are .* 0 car"),
    "no number": (lambda text: "0 .1 .1 nan .1 .5 .5\n", None, "has nan, but corners are shares"),
    "outside": (lambda text: "0 1.1 .1 1.4 .1 1.4 .5\n", None, "line 1 .* lies outside of its im"),
    "a name": (lambda text: "car 0 0 1 0 1 1\n", None, "has the class car"),
    "no names": (str, 3, "data.yaml gives no names"),
    "other names": (str, ["car", "cat"], "attribute category 'cat'"),
}


@pytest.mark.covering(cases=3)
@pytest.mark.parametrize("case", WRONG_YOLO)
def test_yolo_that_is_refused(folder, case, capsys):
    change, names, words = WRONG_YOLO[case]
    assert prepared(folder, yolo(folder, change, names), "--attribute", "category") == 2
    message = capsys.readouterr().err
    assert re.search(words, message), message
