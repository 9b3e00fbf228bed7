"""Make a store of images with one label each, given by folders named after classes or a table."""

from __future__ import annotations

import csv
import io
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distseg.data.folders import SPLITS, image_files
from distseg.data.formats.readers import stem_of
from distseg.data.pairs import DIMS, assign_splits, check_alike, check_train, notes_on_pairs, opened
from distseg.data.prepare import copy_image, stored_bytes, summary
from distseg.data.referring import check_referable
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.report.disk import require_disk_space
from distseg.report.progress import progress

_COLUMNS = ("image", "label", "split")


def prepare_labelled(
    images: str | Path,
    table: str | Path | None,
    output: str | Path,
    classes: Sequence[str] | None = None,
    splits: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    overwrite: bool = False,
    nodata: int | float | None = None,
    alpha: str | None = None,
    pages: str | None = None,
    reference: bool = False,
    level: int = 0,
) -> Store:
    """Write images with one label each into a store, and print a summary of the store.

    Args:
        images: the folder of images. Without ``table`` it holds one folder per class, named after
            the class, or folders train, val and test that each hold one folder per class.
        table: a CSV file with one line per image: ``image`` (the file's name in the folder, with or
            without its ending), ``label``, and optionally ``split``.
        output: the store to write.
        classes: names in the order of their labels; None takes all labels found, sorted. With one
            name, labels are numbers and the name says what they measure.
        splits: fractions of the images for train, val and test, used if neither folders nor table
            assign splits.
        seed: seed of the random assignment to splits.
        overwrite: True if an existing store may be replaced.
        nodata: the pixel value that means "no data"; None takes the value that each file declares.
        alpha: how to treat an alpha band (:func:`distseg.data.prepare.prepare_folder`).
        pages: ``bands`` or ``volume`` (:func:`distseg.data.prepare.prepare_folder`).
        reference: True to refer to the image files (:func:`distseg.data.prepare.prepare_folder`).
        level: the resolution of OME-Zarr images; 0 is the highest.

    Raises:
        ValueError: a file or line is wrong; the message names it. No store is left behind.
        FileNotFoundError: a folder or the table does not exist.
    """
    root = Path(images)
    if pages == "images":
        raise ValueError(
            "--pages images makes an image of each page, but --labels gives each file one label: "
            "write each page into its own file, or set --pages bands or --pages volume"
        )
    if not root.is_dir():
        raise FileNotFoundError(
            f"there is no folder {root}: correct the path, or create the folder"
        )
    found = _from_folders(root) if table is None else _from_table(root, Path(table))
    if all(split is None for _, _, split in found):
        split_of = assign_splits([str(path) for path, _, _ in found], splits, seed)
        found = [(path, label, split_of[str(path)]) for path, label, _ in found]
    check_train([split for _, _, split in found], root)
    names = (
        list(classes)
        if classes
        else sorted({label for _, label, _ in found}, key=lambda label: (_number(label), label))
    )
    if not classes and len(names) == 1:
        raise ValueError(
            f"all {len(found)} images of {root} have the label {names[0]!r}, but a single class "
            f"gives nothing to learn: add images of other classes, or name all classes (--classes)"
        )
    labels = [_label(label, path, names) for path, label, _ in found]
    pairs = []
    for path, label, split in found:
        # Folders of different classes may hold files of the same name.
        name = f"{label}-{stem_of(path)}" if table is None else stem_of(path)
        pairs.append(replace(opened(split, path, None, DIMS[pages], alpha, level=level), name=name))
    check_alike(pairs)
    needed, notes = stored_bytes(pairs, labels=False, reference=reference), []
    if reference:
        notes = check_referable(pairs)
    writer = StoreWriter(
        output,
        names,
        pairs[0].bands,
        provenance={
            "images": str(images),
            "labels": None if table is None else str(table),
            "seed": seed,
            "alpha": alpha,
            "pages": pages,
        },
        overwrite=overwrite,
        expected=needed,
        numbers=len(names) == 1,
    )
    require_disk_space(Path(output), needed, "the pixels of the store")
    with writer, progress(len(pairs), "image", f"preparing {output}") as shown:
        for pair, label in zip(pairs, labels):
            copy_image(
                pair,
                writer,
                shown,
                {},
                DIMS[pages],
                nodata,
                label=label,
                alpha=alpha,
                reference=reference,
            )
    store = Store(output)
    print("\n".join([summary(store), *notes_on_pairs(pairs), *notes]))
    if table is not None and not classes and all(_number(name) < math.inf for name in names):
        print(
            f"note: the labels of {table} are numbers, and were taken as {len(names)} classes: if "
            "they measure a quantity, name this quantity: --classes NAME"
        )
    return store


def _number(label: str) -> float:
    """Return the number that a label's text stands for; infinity if it is no finite number."""
    try:
        value = float(label)
    except ValueError:
        return math.inf
    return value if math.isfinite(value) else math.inf


def _from_folders(root: Path) -> list[tuple[Path, str, str | None]]:
    """Return (file, class, split) of each image below the folder ``root``.

    The class is the name of the image's folder. The split is None if there are no folders train,
    val or test.
    """
    there = sorted(
        path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if set(there) & set(SPLITS):
        if other := sorted(set(there) - set(SPLITS)):
            raise ValueError(
                f"{root} has the folders {', '.join(sorted(set(there) & set(SPLITS)))}, which are "
                f"splits, and {other[0]} beside them: put folders of classes into the splits"
            )
        return [
            (path, label, split)
            for split in there
            for path, label, _ in _from_folders(root / split)
        ]
    if not there:
        raise ValueError(
            f"{root} has no folders: put the images into folders named after their classes, or "
            "give a table of their labels: --labels FILE.csv"
        )
    return [(path, label, None) for label in there for path in image_files(root / label).values()]


def _from_table(root: Path, table: Path) -> list[tuple[Path, str, str | None]]:
    """Return (image file, label, split) of each line of a table of labels.

    The split is None if the table has no column ``split``.

    Args:
        root: the folder of the images.
        table: the CSV file.
    """
    if not table.is_file():
        raise FileNotFoundError(
            f"there is no table of labels {table}: give the path of a CSV file "
            "with the columns image and label"
        )
    files = {unicodedata.normalize("NFC", p.name): p for p in image_files(root).values()}
    files |= {stem_of(path): path for path in files.values()}
    try:
        text = table.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(
            f"{table} is not in UTF-8 ({e.reason} at byte {e.start}): convert it, for example by "
            f"iconv -f LATIN1 -t UTF-8"
        ) from None
    with io.StringIO(text, newline="") as file:
        lines = csv.DictReader(file, skipinitialspace=True)
        columns = lines.fieldnames or []
        if not {"image", "label"} <= set(columns) <= set(_COLUMNS):
            raise ValueError(
                f"{table} begins with the columns {', '.join(columns) or 'none'}: a table of "
                "labels must have the columns image and label, and may have split"
            )
        found, seen = [], set()
        for number, line in enumerate(lines, 2):
            name, label, split = ((line.get(column) or "").strip() or None for column in _COLUMNS)
            name = name and unicodedata.normalize("NFC", name)
            if name not in files:
                raise ValueError(
                    f"{table}, line {number}: there is no image {name!r} in {root}: "
                    "correct the name, or remove the line"
                )
            if files[name] in seen:
                raise ValueError(
                    f"{table}, line {number}: image {name!r} already has a label: remove one line"
                )
            if not label:
                raise ValueError(
                    f"{table}, line {number}: the label is empty: write the label of this image"
                )
            if "split" in columns and split not in SPLITS:
                raise ValueError(
                    f"{table}, line {number}: the split must be train, val or test, got {split!r}"
                )
            seen.add(files[name])
            found.append((files[name], label, split))
    if left := sorted(set(files.values()) - seen):
        raise ValueError(
            f"{len(left)} images of {root} have no line in {table}, such as {left[0].name}: give "
            "each a label, or move them elsewhere"
        )
    return found


def _label(label: str, path: Path, classes: Sequence[str]) -> int | float:
    """Return the class number of a label; with a single class, the number that the label is.

    Args:
        label: the label as text.
        path: the image, for messages.
        classes: names in the order of the class numbers.
    """
    if len(classes) > 1:
        if label not in classes:
            raise ValueError(
                f"{path} has the label {label!r}, which is not among the classes "
                f"{', '.join(classes)}: add it to --classes, or correct the label"
            )
        return classes.index(label)
    if (value := _number(label)) == math.inf:
        raise ValueError(
            f"{path} has the label {label!r}, but with one class, {classes[0]}, labels must be "
            "numbers, such as 0 or 2.5: correct the label, or, if labels are names of classes, "
            "list all names in --classes"
        )
    return value
