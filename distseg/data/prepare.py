"""Make a store from a folder of images and a folder of masks.

Images are copied in strips, so that no image has to fit into memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distseg.config.sizes import Size
from distseg.config.units import si
from distseg.data.folders import SPLITS, some, split_folders, unread
from distseg.data.formats.alpha import MASK
from distseg.data.formats.base import Reader
from distseg.data.formats.palettes import class_colours
from distseg.data.formats.readers import SUFFIXES, stem_of
from distseg.data.masks import PLAIN, MaskForm
from distseg.data.nodata import fitting, to_json
from distseg.data.pairs import DIMS, Pair, find_pairs, notes_on_pairs
from distseg.data.parts import cut, note_on_parts
from distseg.data.referring import check_referable, source_of
from distseg.data.store.layout import chunk_edge
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter, bytes_of
from distseg.data.survey import Survey
from distseg.report.disk import require_disk_space
from distseg.report.progress import SilentProgress, progress
from distseg.report.tables import table
from distseg.tiling.tile import Box, strips

_STRIP_BYTES = 64 << 20
_STRIP_PIXELS = 4 << 20  # pixels of a strip; counting the classes of a pixel takes about 40 bytes
_LONG = 1 << 30  # with more pixels in all masks, checking the masks shows its progress


def prepare_folder(
    images_dir: str | Path,
    masks_dir: str | Path | None,
    output: str | Path,
    classes: Sequence[str],
    splits: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    ignore: int = 255,
    values: Mapping[int, int] | None = None,
    overwrite: bool = False,
    bands: Sequence[str] | None = None,
    pages: str | None = None,
    nodata: int | float | None = None,
    absent: Sequence[str] = (),
    alpha: str | None = None,
    form: MaskForm = PLAIN,
    dry: bool = False,
    nested: bool = False,
    reference: bool = False,
    parts: Size | None = None,
    level: int = 0,
) -> Store | None:
    """Write the images and masks of two folders into a store, and print a summary of the store.

    Args:
        images_dir: the folder of images. If it holds folders ``train``, ``val`` and ``test``, each
            of them is a split.
        masks_dir: the folder of masks, or one vector file with the polygons of all images. If the
            images lie in folders of splits, a folder of masks has the same folders. A mask has the
            name of its image, except for the ending and for a part at the beginning or end that all
            masks, or all images, have. None makes a store for prediction.
        output: the store to write.
        classes: names in the order of their labels.
        splits: fractions of the images for train, val and test, if the images are not in folders of
            splits.
        seed: seed of the random assignment to splits. The assignment uses the names of the files,
            not their content.
        ignore: label of pixels to ignore, after the mapping by ``values``.
        values: dict from mask values to labels, such as {255: 1}. Every other mask value is a label
            itself.
        overwrite: True if an existing store may be replaced.
        bands: names of the bands; by default band0, band1 and so on.
        pages: how to read the pages of a TIFF file, or the first axis of an array: as ``bands`` of
            one image, as slices of a ``volume``, or as separate ``images``. The images of one file
            stay in one split. None takes the meaning from the file. If the file does not say what
            its pages are, up to four pages are bands, and more are an error.
        nodata: the pixel value that means "no data" in all images; None takes the value that each
            file declares.
        absent: classes that may have no pixel.
        alpha: how to treat an alpha band. ``mask``: pixels with alpha 0 (fully transparent) have no
            data. ``band``: the alpha band is a band like the others. By default ``mask``, but an
            alpha band that looks like a measured band is an error.
        form: how masks encode the classes: by labels, colours, object ids, or polygons. The
            names of ``classes`` are added to ``form.names``.
        dry: True to check everything and print what was found, without writing a store.
        nested: True to read the subfolders of both folders too, which must be the same.
        reference: True to refer to the image files instead of copying their pixels. The files must
            then stay as they are, at the same place relative to the store.
        parts: number of parts along each dim into which each image is cut; each part becomes an
            image of the store. If the images are not in folders of splits, the parts are assigned
            to splits by the fractions ``splits``. None to keep images whole.
        level: the resolution of OME-Zarr images and masks; 0 is the highest.

    Returns:
        The new store; None if ``dry`` is True.

    Raises:
        ValueError: a file or an argument is wrong; the message names it. No store is left behind.
        FileNotFoundError: a folder does not exist.
        DiskFull: the disk has too few free bytes for the pixels (before anything is written), or
            for the rest of the store.
    """
    folders = Path(images_dir), None if masks_dir is None else Path(masks_dir)
    others = form.names
    form = replace(form, names=(*((name, k) for k, name in enumerate(classes)), *others))
    pairs = find_pairs(*folders, splits, seed, pages, alpha, form, nested, level)
    if parts is not None:
        if pages == "images":
            raise ValueError(
                f"--parts is {parts}, but --pages images already makes several images of each "
                "file: leave one of them out"
            )
        pairs = cut(pairs, parts, None if split_folders(folders[0]) else splits, seed)
    _check_output(Path(output), pairs)
    _check_bands(bands, pairs[0])
    _check_nodata(nodata, pairs[0])
    provenance = {
        "images": str(images_dir),
        "masks": None if masks_dir is None else str(masks_dir),
        "seed": seed,
        "values": dict(values or {}),
        "nodata": to_json(nodata),
        "alpha": alpha,
        "pages": pages,
        "colours": form.colours and [list(colour) for colour in form.colours],
        "instances": form.instances,
        "attribute": form.attribute,
        "names": dict(others),
        "recursive": nested,
        "level": level,
        "parts": None if parts is None else str(parts),
    }
    expected = stored_bytes(pairs, masks_dir is not None, reference)
    colours, notes = class_colours(
        [(pair.mask, pair.palette) for pair in pairs], len(classes), values or {}
    )
    if reference:
        notes += check_referable(pairs)
    if parts is not None:
        notes.append(note_on_parts(pairs, parts))
    if form.colours is not None:
        colours = np.array(form.colours, np.uint8)
    writer = StoreWriter(
        output,
        classes,
        bands or pairs[0].bands,
        ignore,
        provenance,
        overwrite,
        expected,
        colours=colours,
    )
    require_disk_space(
        Path(output), stored_bytes(pairs, False, reference), "the pixels of the store"
    )
    seen = _check_masks(pairs, classes, ignore, values or {}, absent)
    if dry:
        notes = [
            *notes_on_pairs(pairs),
            *notes,
            *_notes_on_input(pairs, unread(*folders, nested), set(), nodata),
        ]
        print("\n".join([_found(pairs, seen, expected), *notes, f"nothing was written: {output}"]))
        return None
    unused, overlapping = set(values or {}), 0
    with writer:
        with progress(len(pairs), "image", f"preparing {output}") as shown:
            for pair in pairs:
                copied = copy_image(
                    pair,
                    writer,
                    shown,
                    values or {},
                    DIMS[pages],
                    nodata,
                    alpha=alpha,
                    reference=reference,
                )
                unused -= copied.values
                overlapping += copied.overlapping
    if overlapping:
        notes.append(
            f"note: polygons overlap at {overlapping} pixels, where the polygon that comes last in "
            "its file decides the label"
        )
    store = Store(output)
    print(
        "\n".join(
            [
                summary(store),
                *notes_on_pairs(pairs),
                *notes,
                *_notes_on_input(pairs, unread(*folders, nested), unused, nodata),
            ]
        )
    )
    return store


def summary(store: Store) -> str:
    """Return a text with a table of the store's splits, and with notes on classes without pixels.

    The table has one row per split. Its columns are the number of images, their sizes, the number
    of pixels, the share of each class among the labelled pixels, and the shares of pixels without
    label and without data. For labels of whole images, the columns of the classes are replaced: by
    the numbers of classes and of images per class, or by the range of labels that are numbers.
    """
    splits = sorted(store.splits, key=_split_order)
    return "\n".join(
        [store.path, table([_row(store, split) for split in splits]), *_notes(store, splits)]
    )


def chunk_strips(size: Sequence[int], pixel_bytes: int) -> Iterator[Box]:
    """Yield the strips in which an image is copied, one after the other along its first dim.

    A strip spans the full image along the other dims. It consists of whole chunks, and has at most
    64 MB and 4 million pixels, unless a single row of chunks has more.

    Args:
        size: the size of the image.
        pixel_bytes: bytes of a pixel, all bands together.
    """
    return strips(
        Box.whole(size), min(_STRIP_PIXELS, _STRIP_BYTES / pixel_bytes), chunk_edge(len(size))
    )


def _found(pairs: Sequence[Pair], seen: set[int], expected: int) -> str:
    """Return the text that a dry run prints: a table of the splits, and the size of the store.

    Args:
        pairs: the images with their masks.
        seen: mask values that were read for the checks.
        expected: upper bound of the bytes that the store takes.
    """
    rows = []
    for split in sorted({pair.split for pair in pairs}, key=_split_order):
        own = [pair for pair in pairs if pair.split == split]
        sizes = sorted({pair.size for pair in own}, key=np.prod)
        rows.append(
            {
                "split": split,
                "images": len(own),
                "masks": sum(pair.mask is not None for pair in own),
                "size": " to ".join(str(Size(s)) for s in dict.fromkeys((sizes[0], sizes[-1]))),
                "bands": own[0].bands,
                "type": str(own[0].dtype),
                "first": f"{own[0].image.name}" + (f", {m.name}" if (m := own[0].mask) else ""),
            }
        )
    values = f"; values of masks seen so far: {', '.join(map(str, sorted(seen)[:10]))}"
    return table(rows) + f"\nthe store would take up to {si(expected, 'B')}" + values * bool(seen)


def stored_bytes(pairs: Sequence[Pair], labels: bool, reference: bool) -> int:
    """Return an upper bound of the bytes that images take in a store, with their validity masks.

    Args:
        pairs: the images.
        labels: True to include labels, one byte per pixel.
        reference: True to leave out the pixels, because the store refers to the image files.
    """
    return sum(
        bytes_of(pair.size, 0 if reference else pair.bands, pair.dtype, labels + pair.masked)
        for pair in pairs
    )


def _check_output(output: Path, pairs: Sequence[Pair]) -> None:
    """Refuse a store that would replace one of the images or masks from which it is made.

    Raises:
        ValueError: ``output`` is one of the images or masks.
    """
    if not output.exists():
        return
    there = os.stat(output)
    for path in [path for pair in pairs for path in (pair.image, pair.mask) if path is not None]:
        if os.path.samestat(there, os.stat(path)):
            raise ValueError(
                f"the store {output} would replace {path}, from which it is made: choose another "
                "name for the store"
            )


def _check_bands(bands: Sequence[str] | None, pair: Pair) -> None:
    if bands is not None and len(bands) != pair.bands:
        raise ValueError(
            f"{len(bands)} bands are named ({', '.join(bands)}), but {pair.image} has "
            f"{pair.bands} bands: give one name for each band"
        )


def _check_nodata(value: int | float | None, pair: Pair) -> None:
    if value is not None and fitting(value, pair.dtype) is None:
        raise ValueError(
            f"--nodata is {value}, but pixels of the type {pair.dtype}, such as those of "
            f"{pair.image}, cannot have this value: leave --nodata out, or give another number"
        )


def _check_masks(
    pairs: Sequence[Pair],
    classes: Sequence[str],
    ignore: int,
    values: Mapping[int, int],
    absent: Sequence[str],
) -> set[int]:
    """Check that the classes occur in the masks, and return the mask values that were seen.

    Only as much of the masks is read as the check needs.

    The arguments are those of :class:`distseg.data.survey.Survey`.

    Raises:
        ValueError: a class seems to be missing in the masks (:meth:`Survey.check`).
    """
    if all(pair.mask is None for pair in pairs):
        return set()
    pixels = sum(Size(pair.size).volume for pair in pairs)
    with progress(
        len(pairs), "mask", "looking for each class, until it is found", enabled=pixels > _LONG
    ) as shown:
        return Survey(pairs, classes, ignore, values, absent, shown).check()


class Copied(NamedTuple):
    """Result of copying an image into a store: what its mask contained.

    Attributes:
        values: the mask values named in ``--values`` that occur in the mask.
        overlapping: number of pixels that polygons of different classes cover.
    """

    values: set[int]
    overlapping: int


def copy_image(
    pair: Pair,
    writer: StoreWriter,
    shown: SilentProgress,
    values: Mapping[int, int],
    dims: int | None = None,
    nodata: int | float | None = None,
    label: int | float | None = None,
    alpha: str | None = None,
    reference: bool = False,
) -> Copied:
    """Copy an image into a store strip by strip, with its mask or with its ``label``.

    Args:
        pair: the image and its mask.
        writer: the writer of the store.
        shown: the progress display to advance.
        values: dict from mask values to labels. Every other mask value is a label itself.
        dims: number of spatial dims of the image; None to take it from the file.
        nodata: the pixel value that means "no data"; None to take the value that the file declares.
        label: the label of the whole image; None if it has none.
        alpha: how to treat an alpha band (:func:`prepare_folder`).
        reference: True to refer to the image file instead of copying its pixels.

    Returns:
        The mask values of ``values`` that the mask contains, and the number of its pixels that
        overlapping polygons cover.

    Raises:
        ValueError: ``alpha`` is None, and the alpha band of the image looks like a measured band.
    """
    image = pair.open_image(dims, alpha or MASK)
    mask = None if pair.mask is None else pair.open_mask()
    target = writer.add_image(
        pair.name,
        pair.size,
        pair.dtype,
        pair.split,
        labels=mask is not None,
        nodata=pair.nodata if nodata is None else nodata,
        label=label,
        masked=image.masked,
        place=image.place,
        source=source_of(pair, image, writer.path, dims, alpha or MASK) if reference else None,
    )
    held: set[int] = set()
    for box in chunk_strips(pair.size, pair.bands * pair.dtype.itemsize):
        labels, found = (None, set()) if mask is None else _labels(mask, box, values, writer.ignore)
        pixels, valid = image.read_valid(box)
        target.write(box, pixels, labels, valid)
        held |= found
        shown.advance(0, pixels=box.pixels)
    shown.advance()
    if alpha is None and image.opacity.doubtful:
        raise ValueError(
            f"{pair.image}: its band {image.alpha + 1} is marked as transparency, but "
            f"{image.opacity.between:.0%} of its pixels are between transparent and opaque, "
            "as in a measured band (GDAL marks the fourth band of 8-bit images as transparency by "
            "default): set --alpha band to keep it as a band, or --alpha mask if it is "
            "transparency"
        )
    return Copied(held, 0 if mask is None else mask.overlapping)


def _labels(
    mask: Reader, box: Box, values: Mapping[int, int], ignore: int
) -> tuple[np.ndarray, set[int]]:
    """Return the labels of a box, (*box.size), and the keys of ``values`` that occur in the box.

    Args:
        mask: the reader of the mask.
        box: the part of the mask to read.
        values: dict from mask values to labels. Every other mask value is a label itself.
        ignore: the label of pixels that the mask file itself marks as having no data.
    """
    labels, valid = mask.read_valid(box)
    found, held = mapped(labels[0], values)
    return (found if valid is None else np.where(valid, found.astype(np.int64), ignore)), held


def mapped(mask: np.ndarray, values: Mapping[int, int]) -> tuple[np.ndarray, set[int]]:
    """Replace mask values by the labels that they stand for.

    All values are replaced at once, so {0: 1, 1: 0} swaps two labels.

    Args:
        mask: the values of a mask, of any shape.
        values: dict from mask values to labels. Every other mask value is a label itself.

    Returns:
        The labels, and the keys of ``values`` that the mask contains.
    """
    if not values:
        return mask, set()
    labels, found = mask.astype(np.int64), set()
    for value, label in values.items():
        here = mask == value
        labels[here] = label
        found |= {value} if here.any() else set()
    return labels, found


def _split_order(split: str) -> tuple[int, str]:
    return (SPLITS.index(split) if split in SPLITS else len(SPLITS)), split


def _row(store: Store, split: str) -> dict:
    """Return the row of a split in the table that :func:`summary` prints.

    The result is a dict from the names of columns to texts or numbers.
    """
    names = store.split(split)
    sizes = sorted({store.size(name) for name in names}, key=np.prod)
    pixels = sum(Size(store.size(name)).volume for name in names)
    row = {
        "split": split,
        "images": len(names),
        "size": " to ".join(str(Size(s)) for s in dict.fromkeys((sizes[0], sizes[-1]))),
        "pixels": pixels,
    }
    if store.of_images:
        labels = [store.label(name) for name in names]
        numbers = len(store.classes) == 1
        row |= (
            {store.classes[0]: f"{min(labels):.4g} to {max(labels):.4g}"}
            if numbers
            else {
                "classes": len(set(labels)),
                "images of a class": _from_to([labels.count(c) for c in set(labels)]),
            }
        )
    labelled = [store.class_counts(name) for name in names if store.has_labels(name)]
    if labelled:
        counts = np.sum(labelled, axis=0)
        row.update(
            {
                name: f"{count / max(1, counts.sum()):.3%}"
                for name, count in zip(store.classes, counts)
            }
        )
        row["no label"] = f"{1 - counts.sum() / pixels:.3%}"
    if any(store.missing(name) for name in names):
        row["no data"] = f"{sum(store.missing(name) for name in names) / pixels:.3%}"
    return row


def _from_to(counts: Sequence[int]) -> str:
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _notes_on_input(
    pairs: Sequence[Pair], files: Sequence[str], unused: set[int], nodata: int | float | None
) -> list[str]:
    """Return notes on input that the user may have meant in another way than it was read.

    Args:
        pairs: the images with their masks. There is a note if a mask has another name than its
            image.
        files: image files that are not read.
        unused: mask values that have a label in ``--values``, but occur in no mask.
        nodata: the pixel value of ``--nodata``. There is a note if a file declares another value.
    """
    others = [p for p in pairs if nodata is not None and p.nodata not in (None, nodata)]
    notes = [
        f"note: --nodata {nodata} replaces the number {pair.nodata} that {pair.image.name} "
        f"declares for no data ({len(others)} images in all): pixels with the declared number "
        "are data"
        for pair in others[:1]
    ]
    notes += [
        f"note: masks have other names than their images, such as {pair.mask.name} for "
        f"{pair.image.name}"
        for pair in pairs
        if pair.mask is not None
        and pair.polygons is None
        and stem_of(pair.mask) != stem_of(pair.image)
    ][:1]
    notes += [
        f"note: no mask holds the value {value}, for which --values gives a label"
        for value in sorted(unused)
    ]
    if files:
        names = some([repr(name) for name in files], most=5)
        notes.append(
            f"note: not read, although their names are those of images or labels: {names} "
            f"({len(files)} in all); distseg reads files with the endings {' '.join(SUFFIXES)}"
        )
    return notes


def _notes(store: Store, splits: list[str]) -> list[str]:
    """Return a note for each class that has no labelled pixel in at least one split."""
    labelled = {
        split: [name for name in store.split(split) if store.has_labels(name)] for split in splits
    }
    counts = {
        split: [store.class_counts(name) for name in names] for split, names in labelled.items()
    }
    totals = {split: np.sum(found, axis=0) for split, found in counts.items() if found}
    notes = []
    for k, name in enumerate(store.classes):
        without = [split for split, found in totals.items() if not found[k]]
        if totals and len(without) == len(totals):
            notes.append(
                f"note: no pixel of the store is {name}: it can be neither learnt nor measured"
            )
        elif without:
            what = "be learnt" if "train" in without else "be measured there"
            notes.append(f"note: no pixel of {' and '.join(without)} is {name}: it cannot {what}")
    return notes
