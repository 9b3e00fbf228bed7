"""Read a whole store and report every damage with its image and position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from distseg.data.nodata import missing
from distseg.data.store.band_statistics import ClassCounts
from distseg.data.store.chunks import Chunked
from distseg.data.store.image_writer import first_bad, position
from distseg.data.store.store import Store
from distseg.report.progress import SilentProgress
from distseg.report.progress import progress as _progress
from distseg.tiling.tile import Box

_BACK = "put the file back as it was, or prepare the store anew"
_MOST = 20  # number of findings of an image that are listed one by one


def check_store(path: str | Path, progress: Callable[..., SilentProgress] = _progress) -> list[str]:
    """Read a whole store; return a line of text per damaged part, or an empty list.

    If an image has more than 20 damaged parts, a last line counts those that are not listed.

    Args:
        path: the store.
        progress: function that makes the progress display, as
            :func:`distseg.report.progress.progress` does.

    Raises:
        FileNotFoundError: the store does not exist.
    """
    try:
        store = Store(path)
    except ValueError as e:
        return [str(e)]
    findings: list[str] = []
    names = [name for split in store.splits.values() for name in split]
    with progress(len(names), "image", f"checking {path}") as shown:
        for name in names:
            found = list(_findings(store, name, shown))
            more = (
                [f"{path} is damaged: {len(found) - _MOST} more damaged parts of image {name!r}"]
                if len(found) > _MOST
                else []
            )
            findings += found[:_MOST] + more
            shown.advance()
    return findings


def _findings(store: Store, name: str, shown: SilentProgress) -> Iterator[str]:
    """Yield a line for each damaged part of an image.

    All its pixels, its validity mask, its labels and its counts of classes are read.

    Args:
        store: the store.
        name: the name of the image.
        shown: the progress display to advance.
    """
    if changed := store.changed_files(name):
        yield from (f"{change}, but {store.path} refers to it: {_BACK}" for change in changed)
        return
    yield from _each(
        store,
        name,
        "pixels",
        lambda reader, index, pixels: _wrong_pixels(store, name, reader, index, pixels),
        shown,
    )
    if store.masked(name):
        yield from _each(
            store,
            name,
            "valid",
            lambda reader, index, valid: "are neither 0 nor 1" if valid.max() > 1 else None,
            shown,
        )
    if store.has_labels(name):
        counts, damaged = ClassCounts(len(store.classes), store.size(name)), False
        for finding in _each(
            store,
            name,
            "labels",
            lambda reader, index, labels: _wrong_labels(store, reader, index, labels, counts),
            shown,
        ):
            damaged = True
            yield finding
        if not damaged:
            yield from _wrong_counts(store, name, counts)


def _each(
    store: Store,
    name: str,
    what: str,
    wrong: Callable[[Chunked, tuple, np.ndarray], str | None],
    shown: SilentProgress,
) -> Iterator[str]:
    """Yield a line for each damaged chunk of one dataset of an image.

    Args:
        store: the store.
        name: the name of the image.
        what: the dataset: ``pixels``, ``labels`` or ``valid`` (the validity mask).
        wrong: a function of the reader, the index and the content of a chunk. It returns a phrase
            that says what is wrong with the content, or None.
        shown: the progress display to advance.
    """
    try:
        reader = store.reader(name, what)
    except (ValueError, OSError) as e:
        yield str(e)
        return
    for index in np.ndindex(reader.grid):
        box = reader.place(index)
        try:
            chunk = reader.load(index)[tuple(slice(0, n) for n in box.size)]
            if (found := wrong(reader, index, chunk)) is not None:
                yield str(reader.damage(index, found))
        except (ValueError, OSError) as e:
            yield str(e)
        shown.advance(0, pixels=box.pixels)


def _wrong_pixels(
    store: Store, name: str, reader: Chunked, index: tuple[int, ...], pixels: np.ndarray
) -> str | None:
    """Return a phrase that says what is wrong with a chunk of pixels; None if all are valid.

    Args:
        store: the store.
        name: the name of the image.
        reader: the reader of the pixels.
        index: the chunk's number along each dim.
        pixels: the content of the chunk.
    """
    place = reader.place(index)
    if store.masked(name):
        pixels = pixels.copy()  # reading the validity mask overwrites this memory
    valid = store.valid(name, Box(place.start[1:], place.stop[1:]))
    bad = first_bad(pixels, missing(pixels, store.nodata(name), valid))
    if bad is None:
        return None
    band, *place = position(reader.place(index), bad)
    name = store.band_names[band]
    return f"have an invalid value: band {name} is {pixels[bad]} at {tuple(place)}"


def _wrong_labels(
    store: Store, reader: Chunked, index: tuple[int, ...], labels: np.ndarray, counts: ClassCounts
) -> str | None:
    """Return a phrase that says what is wrong with a chunk of labels; None if all are valid.

    Valid labels are added to ``counts``.

    Args:
        store: the store.
        reader: the reader of the labels.
        index: the chunk's number along each dim.
        labels: the content of the chunk.
        counts: the numbers of pixels of each class in the image, so far.
    """
    box = reader.place(index)
    bad = (labels >= len(store.classes)) & (labels != store.ignore)
    if bad.any():
        place = np.argwhere(bad)[0]
        return f"have the label {labels[tuple(place)]} at {position(box, place)}, which is no class"
    counts.add(Box(box.start, box.stop), labels)
    return None


def _wrong_counts(store: Store, name: str, counts: ClassCounts) -> Iterator[str]:
    """Yield a line if the stored class counts of an image differ from the counts of its labels."""
    words = f"{store.path} is damaged: the counts of image {name!r}"
    try:
        table = store.block_counts(name)
    except (ValueError, OSError) as e:
        yield str(e)
        return
    if not np.array_equal(table, counts.table):
        class_, *block = (int(i) for i in np.argwhere(table != counts.table)[0])
        place = Box(
            tuple(b * store.block for b in block),
            tuple(min((b + 1) * store.block, n) for b, n in zip(block, store.size(name))),
        )
        found, expected = counts.table[(class_, *block)], table[(class_, *block)]
        expected_text = f"{expected} pixels of {store.classes[class_]} at {place}"
        yield f"{words} say {expected_text}, but there are {found}"
    elif store.class_counts(name) != counts.totals:
        yield f"{words} in the index say {store.class_counts(name)}, but there are {counts.totals}"
