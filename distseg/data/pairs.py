"""Which image goes with which mask, and into which split: found and checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Sequence

import numpy as np

from distseg.config.sizes import Size
from distseg.data.folders import SPLITS, check_folders, paired, split_folders
from distseg.data.formats.alpha import MASK
from distseg.data.formats.readers import open_image, open_mask
from distseg.data.notes import notes_on
from distseg.tiling import rng


@dataclass(frozen=True)
class Pair:
    """An image file, its mask if there are masks, and what the header of the image says."""

    name: str
    split: str
    image: Path
    mask: Path | None
    size: tuple[int, ...]
    bands: int
    dtype: np.dtype
    nodata: int | float | None = None  # the number that stands for no data, where the file says so
    colours: str | None = None  # what the bands are, where it says so
    masked: bool = False  # a validity mask, or transparency, says where there is data
    notes: tuple[str, ...] = ()  # on the image
    mask_notes: tuple[str, ...] = ()
    palette: np.ndarray | None = field(
        default=None, compare=False
    )  # of the mask, (entries, 3) uint8


def find_pairs(
    images: Path,
    masks: Path | None,
    shares: Sequence[float],
    seed: int,
    dims: int | None = None,
    alpha: str | None = None,
) -> list[Pair]:
    """All pairs of two folders, with their splits: by the folders train, val and test inside, or by ``shares``.

    Args:
        alpha: what becomes of transparency (:func:`distseg.data.formats.readers.open_image`).

    Raises:
        ValueError: no images, files without a partner or that would be left out, names that a store can't have, headers that disagree.
    """
    check_folders(images, masks)
    if folders := split_folders(images):
        files = [
            (split, *pair)
            for split in folders
            for pair in paired(images / split, masks and masks / split)
        ]
    else:
        together = paired(images, masks)
        split_of = assign_splits([image.stem for image, _ in together], shares, seed)
        files = [(split_of[image.stem], image, mask) for image, mask in together]
    check_train([split for split, _, _ in files], images)
    pairs = [opened(split, image, mask, dims, alpha) for split, image, mask in files]
    check_alike(pairs)
    return pairs


def check_train(splits: Sequence[str], images: Path) -> None:
    """Refuse a store without training images.

    Args:
        splits: of all images, which lie in the folder ``images``.
    """
    if "train" not in splits:
        raise ValueError(
            f"none of the {len(splits)} images of {images} is in the split 'train', from which "
            "the store takes mean and deviation of each band: put one there"
        )


def assign_splits(names: Sequence[str], shares: Sequence[float], seed: int) -> dict[str, str]:
    """The split of each name: its keyed random number orders the names, the shares cut the order.

    A share above 0 gets at least one image where there are enough.
    """
    shares = [*shares, *(0.0 for _ in SPLITS)][: len(SPLITS)]
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"the shares of {', '.join(SPLITS)} are not negative and add up to 1, got {shares}"
        )
    counts = [int(share * len(names) + 1e-9) for share in shares]
    while sum(counts) < len(names):
        counts[
            int(np.argmax([share * len(names) - count for share, count in zip(shares, counts)]))
        ] += 1
    for needy in (k for k, share in enumerate(shares) if share and not counts[k]):
        if max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[needy] = 1
    order = sorted(names, key=lambda name: (rng.key(seed, "split", name), name))
    return dict(zip(order, np.repeat(SPLITS, counts).tolist()))


def opened(
    split: str, image: Path, mask: Path | None, dims: int | None, alpha: str | None = None
) -> Pair:
    """What the headers of the files say."""
    reader, labels = open_image(image, dims, alpha=alpha or MASK), None
    if mask is not None:
        labels = open_mask(mask, len(reader.size))
        if labels.size != reader.size:
            raise ValueError(
                f"{image} has {Size(reader.size)} pixels, but its mask {mask} has "
                f"{Size(labels.size)}: they must lie on each other"
            )
    return Pair(
        image.stem,
        split,
        image,
        mask,
        reader.size,
        reader.bands,
        reader.dtype,
        reader.nodata,
        reader.colours,
        reader.masked,
        reader.notes,
        labels.notes if labels else (),
        labels and labels.palette,
    )


def check_alike(pairs: list[Pair]) -> None:
    """One number of bands, dims, one type of numbers and, where files tell them, the same colours; no name twice."""
    known: dict[str, Pair] = {}
    first: dict[str, tuple[Pair, object]] = {}
    for pair in pairs:
        said = {
            "bands": pair.bands,
            "dims": len(pair.size),
            "type": str(pair.dtype),
            "colours": pair.colours,
        }
        for what, b in said.items():
            other, a = first.setdefault(what, (pair, b)) if b is not None else (pair, b)
            if a != b:
                raise ValueError(
                    f"the images differ in their {what}: {other.image} has {a}, {pair.image} has "
                    f"{b}; convert them to one form"
                )
        if known.setdefault(pair.name, pair) is not pair:
            raise ValueError(
                f"{known[pair.name].image} and {pair.image} have the same name: rename one"
            )


def notes_on_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Return a line for each different note on images and masks."""
    return notes_on(
        [
            (path, notes)
            for pair in pairs
            for path, notes in ((pair.image, pair.notes), (pair.mask, pair.mask_notes))
        ]
    )
