"""Read polygons in pixel coordinates, as tools for annotation write them: COCO and YOLO.

Column 0 and row 0 are the upper left corner of the image, so the centre of its first pixel is at
(0.5, 0.5). The class of a polygon is its attribute ``category``.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from distseg.data.packages import optional
from distseg.data.vector.layer import Layer, ValueRule, check_attribute, layer_of
from distseg.data.vector.placed import ImageGrid

YOLO_SUFFIX = ".txt"
ATTRIBUTE = "category"
_LISTS = {"images", "annotations"}  # keys of a COCO file
_NAMES_FILE, _LEVELS = "data.yaml", 4  # YOLO's names of classes lie in one of the folders above
_FARTHEST = 1.0  # distance of a corner from the middle, as a share; some lie outside by rounding
_MOST_DIGITS = 13  # characters of a number of 64 bits in a compressed run-length encoding
_REPAIR = "export the annotations again"


@dataclass(frozen=True)
class Coco:
    """Content of a COCO file.

    Attributes:
        images: for each file name, without folders, the entries of the images of this name.
        annotations: the annotations of each image, by the image's id.
        categories: the names of the categories, by their ids.
    """

    images: dict[str, list[dict]]
    annotations: dict[Any, list[dict]]
    categories: dict[Any, str]


def is_coco(path: Path) -> bool:
    """Return True if a file is JSON with the lists ``images`` and ``annotations``."""
    return path.suffix.lower() == ".json" and _coco(path) is not None


def is_annotated(path: Path) -> bool:
    """Return True if a file is a COCO or YOLO file, with polygons in pixel coordinates."""
    return path.suffix.lower() == YOLO_SUFFIX or is_coco(path)


def read_annotated(path: Path, rule: ValueRule, grid: ImageGrid) -> Layer:
    """Return the polygons of an image from a COCO or YOLO file, in pixel coordinates.

    Args:
        path: a COCO file, or the YOLO file of the image.
        rule: the rule that gives each polygon its class number.
        grid: the name and the size of the image.

    Raises:
        ValueError: the file is not valid, does not fit the image, or holds other annotations
            than polygons and masks.
    """
    check_attribute(path, rule, [ATTRIBUTE])
    read = _of_yolo if path.suffix.lower() == YOLO_SUFFIX else _of_coco
    found = read(path, rule, grid)
    shapes = np.empty(len(found.shapes), object)
    shapes[:] = found.shapes
    column = None if rule.attribute is None else np.array(found.names, object)
    layer = layer_of(path, rule, shapes, np.array(found.numbers, np.int64), column, None)
    return replace(layer, notes=(*found.notes, *layer.notes))


class _Annotations(NamedTuple):
    """Annotations of an image: lists with one entry per annotation, and notes.

    Attributes:
        shapes: the outline of each annotation as shapely's geometry, in pixel coordinates.
        numbers: the id of each annotation in a COCO file, or its line in a YOLO file.
        names: the name of each annotation's class.
        notes: warnings about the file; each is the rest of a sentence that begins with its name.
    """

    shapes: list[Any]
    numbers: list[int]
    names: list[Any]
    notes: tuple[str, ...]


def _of_coco(path: Path, rule: ValueRule, grid: ImageGrid) -> _Annotations:
    """Return the annotations in the COCO file ``path`` that belong to the image of ``grid``."""
    coco = _coco(path)
    assert coco is not None
    image = _image(path, coco, grid)
    found = coco.annotations.get(image["id"], [])
    shapes = [_shape(path, one, grid) for one in found]
    names = [coco.categories.get(one.get("category_id"), one.get("category_id")) for one in found]
    crowds = sum(bool(one.get("iscrowd")) for one in found)
    notes = ("has crowd regions (iscrowd), which are read as their category",) * bool(crowds)
    return _Annotations(shapes, [one["id"] for one in found], names, notes)


def _coco(path: Path) -> Coco | None:
    """Return the content of a JSON file in the format of COCO; None if it has another format.

    The content of the last file is cached for the next call.
    """
    found = os.stat(path)
    return _read_coco(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_coco(path: Path, size: int, changed: int) -> Coco | None:
    """Return the content of a COCO file, from the cache if the file has not changed.

    The result is None if the file has another format.

    Args:
        path: the file.
        size, changed: its size in bytes and time of change. They are part of the cache's key, so
            that a changed file is read again.
    """
    try:
        content = path.read_bytes()
        if _is_plainly_other(content):
            return None
        found = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} cannot be read as JSON ({e}): {_REPAIR}") from e
    if not isinstance(found, dict) or not _LISTS <= found.keys():
        return None
    try:
        images: dict[str, list[dict]] = {}
        for image in found["images"]:
            images.setdefault(_plain(image["file_name"]), []).append(image)
            hash(image["id"])
        annotations: dict[Any, list[dict]] = {}
        for one in found["annotations"]:
            annotations.setdefault(one["image_id"], []).append(one)
            one["id"] = int(one["id"])
            hash(one.get("category_id"))
        categories = {one["id"]: str(one["name"]) for one in found.get("categories", [])}
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{path} is no COCO file: an image, annotation or category has no {e}: {_REPAIR}"
        ) from e
    _check_ids(path, found["images"], found["annotations"], categories)
    return Coco(images, annotations, categories)


def _is_plainly_other(content: bytes) -> bool:
    """Return True if the text of a JSON file lacks the names of COCO's lists.

    A large GeoJSON file need not be parsed to see that it is no COCO file.
    """
    in_utf_8 = json.detect_encoding(content) in ("utf-8", "utf-8-sig")
    return in_utf_8 and not all(f'"{name}"'.encode() in content for name in _LISTS)


def _check_ids(
    path: Path, images: list[dict], annotations: list[dict], categories: dict[Any, str]
) -> None:
    """Refuse images that share an id, and annotations of unknown images or categories.

    Raises:
        ValueError: two images share an id, or an annotation names an id of an image or a category
            that the file does not list.
    """
    names: dict[Any, str] = {}
    for image in images:
        if (other := names.setdefault(image["id"], image["file_name"])) != image["file_name"]:
            raise ValueError(
                f"{path} gives the id {image['id']!r} to two images, {other} and "
                f"{image['file_name']}, so their annotations cannot be told apart: {_REPAIR}"
            )
    for field, known in (("image_id", names), ("category_id", categories)):
        lost = [one for one in annotations if one.get(field) not in known]
        if lost and known:
            raise ValueError(
                f"{path} has annotations whose {field} is not the id of any entry ({len(lost)} of "
                f"{len(annotations)}, such as annotation {lost[0]['id']} with "
                f"{lost[0].get(field)!r}): {_REPAIR}"
            )


def _image(path: Path, coco: Coco, grid: ImageGrid) -> dict:
    """Return the entry of an image in the list ``images`` of a COCO file.

    Raises:
        ValueError: the file has no entry or several entries for the image, or the entry has
            another size than the image.
    """
    found = coco.images.get(_plain(grid.path.name), [])
    if len(found) > 1:  # images of one name in several folders
        ends = unicodedata.normalize("NFC", f"/{grid.path.as_posix()}")
        names = [_slashed(one["file_name"]) for one in found]
        fit = [name for name in names if ends.endswith("/" + name)]
        best = max(fit, key=len, default=None)
        if fit.count(best) != 1:
            raise ValueError(
                f"{path} lists {len(found)} images with the file name {grid.path.name}, and the "
                f"folders in their names ({', '.join(names[:3])}) do not say which one is "
                f"{grid.path}: list each image once, with the folders in which it lies"
            )
        found = [found[names.index(best)]]
    if len(found) != 1:
        known = ", ".join(list(coco.images)[:3]) or "none"
        raise ValueError(
            f"{path} lists {len(found)} images with the file name {grid.path.name}, but must list "
            f"each image once (it lists {len(coco.images)}, such as {known}): add the image, even "
            "if it has no annotation, or move it out of the folder of images"
        )
    size = (found[0].get("height"), found[0].get("width"))
    if size != tuple(grid.size):
        raise ValueError(
            f"{path} says that {grid.path.name} has {size[0]}x{size[1]} pixels (height x width), "
            f"but it has {grid.size[0]}x{grid.size[1]}: {_REPAIR} for these images"
        )
    return found[0]


def check_listed(path: Path, images: Sequence[Path]) -> None:
    """Refuse a COCO file that has fewer entries for a file name than images have this name.

    Args:
        path: a file of annotations. A file that is no COCO file is accepted without a check.
        images: the image files, which may lie in different folders.

    Raises:
        ValueError: several images would get the annotations of one entry.
    """
    if path.suffix.lower() == YOLO_SUFFIX or (coco := _coco(path)) is None:
        return
    those: dict[str, list[Path]] = {}
    for image in images:
        those.setdefault(_plain(image.name), []).append(image)
    for name, files in those.items():
        if len(files) > len(listed := coco.images.get(name, [])):
            raise ValueError(
                f"{path} lists {len(listed)} images with the file name {name}, but there are "
                f"{len(files)}, such as {files[0]} and {files[-1]}: list each of them, with the "
                "folders in which it lies"
            )


def _shape(path: Path, annotation: dict, grid: ImageGrid) -> Any:
    """Return the segmentation of a COCO annotation as shapely's geometry.

    Raises:
        ValueError: the segmentation is neither a list of polygons nor a run-length encoding, or
            it is damaged.
    """
    what = f"annotation {annotation['id']} of {path}"
    parts = annotation.get("segmentation")
    if isinstance(parts, dict):
        return _outline(_unpacked(what, parts, grid), path)
    if not isinstance(parts, list) or not parts:
        raise ValueError(
            f"{what} has no segmentation, so its pixels are unknown (a box is not enough): "
            "annotate its outline, or remove it"
        )
    found = _polygons(what, parts, path)
    _check_inside(what, found, grid)
    return found


def _check_inside(what: str, found: Any, grid: ImageGrid) -> None:
    """Refuse polygons that lie outside of their image and do not touch its border.

    Args:
        what: the annotation, for the message.
        found: the polygons as shapely's geometry, in pixel coordinates.
        grid: the name and the size of the image.

    Raises:
        ValueError: the polygons cannot cover any pixel of the image.
    """
    left, top, right, bottom = found.bounds
    height, width = grid.size
    if right < 0 or bottom < 0 or left > width or top > height:
        raise ValueError(
            f"{what} lies outside of its image {grid.path.name}: its columns are {left:g} to "
            f"{right:g} and its rows {top:g} to {bottom:g}, but the image has {width} columns and "
            f"{height} rows: {_REPAIR}"
        )


def _polygons(what: str, parts: Sequence[Sequence[float]], path: Path) -> Any:
    """Return polygons, given as lists x1, y1, x2, y2 and so on, as one geometry of shapely.

    Raises:
        ValueError: a list has fewer than three corners, or an odd number of numbers.
    """
    shapely = optional(path, "shapely")
    try:
        rings = [np.array(part, float).reshape(-1, 2) for part in parts]
    except (TypeError, ValueError) as e:
        raise ValueError(f"{what} has a polygon that is no list of x and y ({e}): {_REPAIR}") from e
    if few := [len(ring) for ring in rings if len(ring) < 3]:
        raise ValueError(
            f"{what} has a polygon of {few[0]} corners, which covers no pixel: correct or remove it"
        )
    if not all(np.isfinite(ring).all() for ring in rings):
        raise ValueError(f"{what} has a corner that is not a finite number: {_REPAIR}")
    return shapely.MultiPolygon([shapely.Polygon(ring) for ring in rings])


def _unpacked(what: str, packed: dict, grid: ImageGrid) -> np.ndarray:
    """Return the mask, (height, width) bool, that a COCO run-length encoding stands for.

    The encoding counts False and True pixels in turns, column by column.

    Args:
        what: the annotation, for messages.
        packed: the encoding: its ``counts``, a list or a compressed text, and its ``size``.
        grid: the size of the image.

    Raises:
        ValueError: the counts do not fit the image's size, or the text is damaged.
    """
    counts, size = packed.get("counts"), packed.get("size")
    runs = run_lengths(what, counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or any(type(run) is not int for run in runs):
        raise ValueError(
            f"{what} is a run-length encoding whose counts are neither a list of whole numbers nor "
            f"a text, but {str(counts)[:40]}: {_REPAIR}"
        )
    height, width = grid.size
    if size != [height, width] or sum(runs) != height * width or min(runs) < 0:
        raise ValueError(
            f"{what} is a run-length encoding of {sum(runs)} pixels for an image of {size}, but "
            f"the image has {height}x{width}: {_REPAIR}"
        )
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def run_lengths(what: str, text: str) -> list[int]:
    """Return the run lengths that COCO's compressed run-length encoding holds as a text.

    A number is a sequence of characters with the codes 48 to 111. The code minus 48 has six bits:
    five bits of the number, lowest first, and a bit that is 1 if more characters follow. The
    highest of the five bits in the last character is the sign. From the fourth number on, each
    number is the difference to the run length two places before.

    Source: ``rleFrString`` in maskApi.c of the COCO API (Dollar and Lin, 2014).

    Args:
        what: the annotation, for messages.
        text: the encoding.

    Raises:
        ValueError: a character has another code, or a number is cut off or too long.
    """
    runs: list[int] = []
    number = digits = 0
    for at, code in enumerate(ord(character) - 48 for character in text):
        if not 0 <= code < 64 or digits == _MOST_DIGITS:
            raise ValueError(
                f"{what} is a compressed run-length encoding, but its text is damaged at character "
                f"{at + 1} of {len(text)}: {_REPAIR}"
            )
        number |= (code & 31) << 5 * digits
        digits += 1
        if not code & 32:
            if code & 16:
                number -= 1 << 5 * digits
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = digits = 0
    if digits:
        raise ValueError(
            f"{what} is a compressed run-length encoding, but its text of {len(text)} characters "
            f"is cut off within a number: {_REPAIR}"
        )
    return runs


def _outline(mask: np.ndarray, path: Path) -> Any:
    """Return the outline of the True pixels of a mask as shapely's geometry."""
    rasterio, shapely = (
        optional(path, "rasterio", "features"),
        optional(path, "shapely", "geometry"),
    )
    found = rasterio.features.shapes(mask.astype(np.uint8), mask=mask)
    return shapely.MultiPolygon([shapely.geometry.shape(shape) for shape, _ in found])


def _of_yolo(path: Path, rule: ValueRule, grid: ImageGrid) -> _Annotations:
    """Return the annotations in a YOLO file.

    Each line is the number of a class, counted from 0, and the corners of a polygon. A corner is
    given as fractions of the image's width and height.

    Raises:
        ValueError: a line has another form, or its class has no name.
    """
    known, note = _yolo_names(path, rule)
    found = _Annotations([], [], [], note if rule.attribute is not None else ())
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is no text in UTF-8 ({e}): save it as UTF-8") from e
    for number, line in enumerate(text.splitlines(), 1):
        what, parts = f"line {number} of {path}", line.split()
        if not parts:
            continue
        if len(parts) == 5:
            raise ValueError(
                f"{what} is a box (5 numbers), so its pixels are unknown: export polygons (YOLO "
                "segmentation)"
            )
        name = known.get(int(parts[0])) if parts[0].isdecimal() else None
        if name is None and rule.attribute is not None:
            raise ValueError(
                f"{what} has the class {parts[0]}, but there are the classes "
                f"{', '.join(f'{k} {name}' for k, name in known.items())}: name the class in "
                f"{_NAMES_FILE} or --classes, or correct the line"
            )
        found.shapes.append(_polygons(what, [_scaled(what, parts[1:], grid)], path))
        _check_inside(what, found.shapes[-1], grid)
        found.numbers.append(number), found.names.append(name)
    return found


def _scaled(what: str, parts: Sequence[str], grid: ImageGrid) -> list[float]:
    """Return corners in pixels, x1, y1, x2, y2 and so on.

    Args:
        what: the line of the file, for messages.
        parts: the corners as texts, in fractions of the image's width and height.
        grid: the size of the image.

    Raises:
        ValueError: a text is no number, or lies far outside of 0 to 1.
    """
    try:
        shares = [float(part) for part in parts]
    except ValueError as e:
        raise ValueError(f"{what} is no polygon ({e}): {_REPAIR}") from e
    far = [share for share in shares if not abs(share - 0.5) < _FARTHEST]  # or not a number
    if far:
        raise ValueError(
            f"{what} has {far[0]:g}, but corners are shares of width and height, "
            f"from 0 to 1: {_REPAIR}"
        )
    height, width = grid.size
    return [share * (height if at % 2 else width) for at, share in enumerate(shares)]


def _yolo_names(path: Path, rule: ValueRule) -> tuple[dict[int, str], tuple[str, ...]]:
    """Return the name of each class number of a YOLO file, and warnings about the file.

    The names are in ``data.yaml`` in a folder above the file. Without it, class 0 of YOLO is the
    second class of ``--classes``, because the first one is the background, and a warning says so.
    """
    for folder in list(path.resolve().parents)[:_LEVELS]:
        if (file := folder / _NAMES_FILE).is_file():
            return _names_in(file), ()
    labels: dict[int, str] = {}
    for name, label in rule.labels:
        labels.setdefault(label - 1, name)
    labels.pop(-1, None)
    listed = ", ".join(f"{k} is {name}" for k, name in labels.items())
    return labels, (f"has numbers of classes without a {_NAMES_FILE} above it: {listed}",)


def _names_in(file: Path) -> dict[int, str]:
    """Return the name of each class number in YOLO's ``data.yaml``.

    The file has the names as a list, or as a mapping from numbers to names.

    Raises:
        ValueError: the file has no names of classes.
    """
    try:
        names = yaml.safe_load(file.read_text(encoding="utf-8"))["names"]
        pairs = names.items() if isinstance(names, dict) else enumerate(list(names))
        return {int(k): str(name) for k, name in pairs}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{file} gives no names of classes ({e}): write names: [car, person], in the order of "
            "their numbers"
        ) from e


def _plain(name: str) -> str:
    """Return a file's name without its folders, in Unicode's form NFC."""
    return os.path.basename(_slashed(name))


def _slashed(name: str) -> str:
    """Return a file's path in Unicode's form NFC, with slashes instead of backslashes."""
    return unicodedata.normalize("NFC", name.replace("\\", "/"))
