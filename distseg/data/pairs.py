"""Find pairs of images and masks, assign splits, and check all headers before any writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from distseg.config.sizes import Size
from distseg.data.folders import SPLITS, check_folders, paired, split_folders
from distseg.data.formats.alpha import MASK
from distseg.data.formats.base import PageReader, Reader
from distseg.data.formats.georeference import difference
from distseg.data.formats.readers import open_image, stem_of
from distseg.data.masks import PLAIN, MaskForm
from distseg.data.notes import notes_on
from distseg.tiling import rng

# Spatial dims to read, by what the pages of a file, or the first axis of an array, are.
DIMS: dict[str | None, int | None] = {None: None, "bands": 2, "volume": 3, "images": 3}


_MOST_BANDS = 4  # pages that are taken for bands without asking


@dataclass(frozen=True)
class Pair:
    """An image file, its mask if any, and what the header of the image says."""

    name: str
    split: str
    image: Path
    mask: Path | None
    size: tuple[int, ...]
    bands: int
    dtype: np.dtype
    nodata: int | float | None = None  # the number for no data that the file declares
    colours: str | None = None  # meaning of the bands, such as RGB, if the file declares it
    masked: bool = False  # True if a validity mask or transparency marks pixels without data
    notes: tuple[str, ...] = ()  # notes on the image
    mask_notes: tuple[str, ...] = ()  # notes on the mask
    # The mask's palette, (entries, 3) uint8.
    palette: np.ndarray | None = field(default=None, compare=False)
    page: int | None = None  # the slice of a volume that is the image; None for the whole file
    form: MaskForm = PLAIN  # how the mask says the classes

    def open_image(self, dims: int | None, alpha: str) -> Reader:
        """Open the image (:func:`distseg.data.formats.readers.open_image`)."""
        if self.page is None:
            return open_image(self.image, dims, alpha=alpha)
        return PageReader(open_image(self.image, 3, alpha=alpha), self.page)

    def open_mask(self) -> Reader:
        """Open the mask as a reader of labels (:meth:`distseg.data.masks.MaskForm.open`)."""
        if self.page is None:
            return self.form.open(self.mask, len(self.size))
        return PageReader(self.form.open(self.mask, 3), self.page)


def find_pairs(
    images: Path,
    masks: Path | None,
    shares: Sequence[float],
    seed: int,
    pages: str | None = None,
    alpha: str | None = None,
    form: MaskForm = PLAIN,
) -> list[Pair]:
    """Return all pairs of two folders, with their splits.

    The splits are those of the subfolders train, val and test. Without these, images are assigned
    by ``shares``.

    Args:
        images: the folder of images.
        masks: the folder of masks; None if there is none.
        shares: shares of train, val and test.
        seed: seed of the assignment.
        pages: what the pages of a file are (:data:`DIMS`); None to take it from the files.
        alpha: what becomes of transparency (:func:`distseg.data.formats.readers.open_image`).
        form: how masks say the classes.

    Raises:
        ValueError: there are no images, a file has no partner or would not be read, a store cannot
            have a name, or headers differ.
    """
    check_folders(images, masks)
    if folders := split_folders(images):
        files = [
            (split, *pair)
            for split in folders
            for pair in paired(images / split, masks and masks / split)
        ]
    else:
        found = paired(images, masks)
        split_of = assign_splits([stem_of(image) for image, _ in found], shares, seed)
        files = [(split_of[stem_of(image)], image, mask) for image, mask in found]
    check_train([split for split, _, _ in files], images)
    pairs = [opened(split, image, mask, DIMS[pages], alpha, form) for split, image, mask in files]
    if pages == "images":
        pairs = [page for pair in pairs for page in _pages_of(pair)]
    check_alike(pairs)
    return pairs


def _pages_of(pair: Pair) -> list[Pair]:
    """Return the slices of a volume as images, named after their numbers: NAME_0012."""
    count, *size = pair.size
    digits = max(4, len(str(count - 1)))
    return [
        replace(pair, name=f"{pair.name}_{page:0{digits}d}", size=tuple(size), page=page)
        for page in range(count)
    ]


def check_train(splits: Sequence[str], images: Path) -> None:
    """Refuse a store without training images.

    Args:
        splits: the splits of all images.
        images: the folder of the images, for the message.
    """
    if "train" not in splits:
        raise ValueError(
            f"none of the {len(splits)} images of {images} is in the split 'train', from which "
            "the store takes mean and deviation of each band: put one there"
        )


def assign_splits(names: Sequence[str], shares: Sequence[float], seed: int) -> dict[str, str]:
    """Return the split of each name.

    The names are ordered by a random number that depends on the seed and the name only. Then this
    order is cut by the shares. A share above 0 gets at least one image if there are enough images.

    Raises:
        ValueError: a share is negative, or the shares do not add up to 1.
    """
    shares = [*shares, *(0.0 for _ in SPLITS)][: len(SPLITS)]
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"the shares of {', '.join(SPLITS)} are not negative and add up to 1, got {shares}"
        )
    counts = [int(share * len(names) + 1e-9) for share in shares]
    while sum(counts) < len(names):
        lacking = [share * len(names) - count for share, count in zip(shares, counts)]
        counts[int(np.argmax(lacking))] += 1
    for needy in (k for k, share in enumerate(shares) if share and not counts[k]):
        if max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[needy] = 1
    order = sorted(names, key=lambda name: (rng.key(seed, "split", name), name))
    return dict(zip(order, np.repeat(SPLITS, counts).tolist()))


def opened(
    split: str,
    image: Path,
    mask: Path | None,
    dims: int | None,
    alpha: str | None = None,
    form: MaskForm = PLAIN,
) -> Pair:
    """Open an image and its mask, and return what their headers say.

    Raises:
        ValueError: the mask has another size than the image, or a file cannot be read.
    """
    reader, labels = open_image(image, dims, alpha=alpha or MASK), None
    if reader.stack and reader.bands > _MOST_BANDS:
        raise ValueError(
            f"{image} holds {reader.bands} pages (or an array of as many layers) of "
            f"{Size(reader.size)}, and does not say what they are: --pages bands if they are the "
            "bands of one image, --pages volume if they are the slices of a volume, --pages images "
            "if each is an image of its own"
        )
    if dims == 3 and len(reader.size) == 2:
        raise ValueError(
            f"--pages says that {image} is a volume or holds images, but its file says that it is "
            f"one image with {reader.bands} bands: leave --pages out, or write the file without "
            "names of its pages, or as slices (axes ZYX)"
        )
    if mask is not None:
        labels = form.open(mask, len(reader.size))
        if labels.size != reader.size:
            raise ValueError(
                f"{image} has {Size(reader.size)} pixels, but its mask {mask} has "
                f"{Size(labels.size)}: both must have the same size"
            )
        if apart := difference(reader.place, labels.place, reader.size):
            raise ValueError(
                f"{image} and its mask {mask} lie at different places: {apart}; write the mask on "
                "the grid of the image (resample or warp it)"
            )
    return Pair(
        stem_of(image),
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
        form=form,
    )


def check_alike(pairs: list[Pair]) -> None:
    """Refuse images that do not fit into one store.

    All images must have the same number of bands, dims, dtype and, if files tell them, colours.
    Names must be unique.

    Raises:
        ValueError: naming two files and their difference.
    """
    known: dict[str, Pair] = {}
    first: dict[str, tuple[Pair, object]] = {}
    for pair in pairs:
        forms = {
            "bands": pair.bands,
            "dims": len(pair.size),
            "type": str(pair.dtype),
            "colours": pair.colours,
        }
        for what, b in forms.items():
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
    """Return one line per different note on images and masks."""
    return notes_on(
        [
            (path, notes)
            for pair in pairs
            for path, notes in ((pair.image, pair.notes), (pair.mask, pair.mask_notes))
        ]
    )
