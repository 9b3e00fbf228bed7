"""Makes a store of a folder of images and a folder of masks, in strips, so that no image has to fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Mapping, Sequence

import numpy as np

from distseg.data.layout import chunk_edge
from distseg.data.pairs import SPLITS, Pair, find_pairs
from distseg.data.readers import open_image, open_mask
from distseg.data.store import Store
from distseg.data.writer import StoreWriter
from distseg.extents import Extents
from distseg.geometry.tile import Box, strips
from distseg.report.progress import SilentProgress, progress
from distseg.report.tables import table

_STRIP_BYTES, _STRIP_PIXELS = 64 << 20, 4 << 20  # what counting classes takes is about 40 bytes a pixel


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
    dims: int | None = None,
) -> Store:
    """Write the store ``output`` and print what is in it.

    Args:
        images_dir, masks_dir: files pair by name, endings aside. With folders ``train``, ``val``, ``test`` in both, these
            are the splits. No masks make a store to predict from.
        classes: names in the order of their labels.
        splits: shares of train, val and test of images in one folder.
        seed: of that choice, which depends on the names of the files only.
        ignore: label of pixels that count nowhere, after the mapping.
        values: mask values that stand for other labels, such as {255: 1}; the rest are labels as they are.
        bands: names of the bands.
        dims: 3 for volumes in npy files without a band axis or in TIFF files of unnamed pages.

    Raises:
        ValueError, FileNotFoundError: what is wrong with which file. Nothing is left behind.
    """
    pairs = find_pairs(Path(images_dir), None if masks_dir is None else Path(masks_dir), splits, seed, dims)
    _check_bands(bands, pairs[0])
    provenance = {"images": str(images_dir), "masks": None if masks_dir is None else str(masks_dir), "seed": seed, "values": dict(values or {})}
    with StoreWriter(output, classes, bands or pairs[0].bands, ignore, provenance, overwrite) as writer:
        with progress(len(pairs), "image", f"preparing {output}") as shown:
            for pair in pairs:
                _copy(pair, writer, values or {}, dims, shown)
    store = Store(output)
    print(summary(store))
    return store


def summary(store: Store) -> str:
    """A table: of each split the images, their sizes and pixels, and the share of each class among the labelled."""
    return f"{store.path}\n" + table([_row(store, split) for split in sorted(store.splits, key=_split_order)])


def chunk_strips(size: Sequence[int], pixel_bytes: int) -> Iterator[Box]:
    """Boxes across the whole image along its first dim, of whole chunks, of about 64 MB and 4 million pixels at most."""
    return strips(Box.whole(size), min(_STRIP_PIXELS, _STRIP_BYTES / pixel_bytes), chunk_edge(len(size)))


def _check_bands(bands: Sequence[str] | None, pair: Pair) -> None:
    if bands is not None and len(bands) != pair.bands:
        raise ValueError(f"{len(bands)} bands are named ({', '.join(bands)}), but {pair.image} has {pair.bands}")


def _copy(pair: Pair, writer: StoreWriter, values: Mapping[int, int], dims: int | None, shown: SilentProgress) -> None:
    image = open_image(pair.image, dims)
    mask = None if pair.mask is None else open_mask(pair.mask, len(pair.size))
    target = writer.add_image(pair.name, pair.size, pair.dtype, pair.split, labels=mask is not None)
    for box in chunk_strips(pair.size, pair.bands * pair.dtype.itemsize):
        target.write(box, image.read(box), None if mask is None else mapped(mask.read(box)[0], values))
        shown.advance(0, pixels=box.pixels)
    shown.advance()


def mapped(mask: np.ndarray, values: Mapping[int, int]) -> np.ndarray:
    """Mask values replaced by the labels they stand for; all at once, so that labels may be swapped."""
    if not values:
        return mask
    labels = mask.astype(np.int64)
    for value, label in values.items():
        labels[mask == value] = label
    return labels


def _split_order(split: str) -> tuple[int, str]:
    return (SPLITS.index(split) if split in SPLITS else len(SPLITS)), split


def _row(store: Store, split: str) -> dict:
    names = store.split(split)
    sizes = sorted({store.size(name) for name in names}, key=np.prod)
    pixels = sum(Extents(store.size(name)).volume for name in names)
    row = {"split": split, "images": len(names), "size": " to ".join(str(Extents(s)) for s in dict.fromkeys((sizes[0], sizes[-1]))), "pixels": pixels}
    labelled = [store.class_counts(name) for name in names if store.has_labels(name)]
    if labelled:
        counts = np.sum(labelled, axis=0)
        row.update({name: f"{count / max(1, counts.sum()):.3%}" for name, count in zip(store.classes, counts)})
        row["no label"] = f"{1 - counts.sum() / pixels:.3%}"
    return row
