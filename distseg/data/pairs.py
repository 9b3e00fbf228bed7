"""Find pairs of images and masks, assign splits, and check all headers before any writing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from distseg.config.sizes import Size
from distseg.data.folders import SPLITS, check_folders, folder_of, paired, split_folders
from distseg.data.formats.alpha import MASK
from distseg.data.formats.base import PageReader, PartReader, Reader
from distseg.data.formats.georeference import Georeference, difference
from distseg.data.formats.readers import open_image, stem_of
from distseg.data.masks import PLAIN, MaskForm
from distseg.data.nested import Found, paired_below
from distseg.data.notes import notes_on
from distseg.data.vector.annotated import check_listed, is_annotated
from distseg.data.vector.layer import read_layer
from distseg.data.vector.placed import ImageGrid, extents
from distseg.tiling import rng
from distseg.tiling.tile import Box

# Number of spatial dims to read, by the meaning of a file's pages or of an array's first axis.
# None: the file decides.
DIMS: dict[str | None, int | None] = {None: None, "bands": 2, "volume": 3, "images": 3}


_MANY = 12  # images from which on validation and test get two, which leaves 8 for training
_MOST_BANDS = 4  # at most this number of pages of unknown meaning are taken for bands


@dataclass(frozen=True)
class Pair:
    """An image file, its mask file if it has one, and facts from their headers, such as size.

    One file may give several pairs: slices of a volume (``page``) or parts of an image (``part``).
    """

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
    part: Box | None = None  # the part of the file's image that is the image; None for all of it
    whole: tuple[int, ...] | None = None  # the size of the file's image, if this is a part of it
    page: int | None = None  # index of the slice that is the image; None for the whole file
    level: int = 0  # the resolution of an OME-Zarr image
    form: MaskForm = PLAIN  # how the mask encodes the classes
    place: Georeference | None = field(default=None, compare=False)  # the image's georeference
    polygons: int | None = None  # polygons of a vector file that overlap the image
    kept: int = 0  # bytes of decoded pixels that a reader of the image keeps

    @property
    def grid(self) -> ImageGrid:
        """The image's file, size and georeference, by which polygons are placed on its pixels."""
        return ImageGrid(self.image, self.whole or self.size, self.place)

    def open_image(self, dims: int | None, alpha: str) -> Reader:
        """Return a reader of the image: the whole file, the box ``part`` or the slice ``page``.

        The arguments are those of :func:`distseg.data.formats.readers.open_image`.
        """
        if self.page is None:
            whole = open_image(self.image, dims, alpha=alpha, level=self.level)
            return _part_of(whole, self.part)
        return PageReader(open_image(self.image, 3, alpha=alpha, level=self.level), self.page)

    def open_mask(self) -> Reader:
        """Open the mask of the image, and return a reader of the labels in it."""
        if self.page is None:
            whole = self.form.open(self.mask, len(self.size), self.grid, self.level)
            return _part_of(whole, self.part)
        return PageReader(self.form.open(self.mask, 3, level=self.level), self.page)


def _part_of(reader: Reader, part: Box | None) -> Reader:
    """Return a reader of the box ``part`` of an image; ``reader`` itself if ``part`` is None."""
    return reader if part is None else PartReader(reader, part)


def find_pairs(
    images: Path,
    masks: Path | None,
    shares: Sequence[float],
    seed: int,
    pages: str | None = None,
    alpha: str | None = None,
    form: MaskForm = PLAIN,
    nested: bool = False,
    level: int = 0,
) -> list[Pair]:
    """Return the pairs of images and masks in two folders, each with its split.

    The split is the subfolder train, val or test that holds the files. Without these subfolders,
    images are assigned to splits at random by ``shares``.

    Args:
        images: the folder of images.
        masks: the folder of masks, or a vector file for all images; None if there is none.
        shares: fractions of the images for train, val and test.
        seed: seed of the random assignment to splits.
        pages: the meaning of the pages of a file: ``bands``, ``volume`` or ``images``. None takes
            it from the file.
        alpha: how to treat an alpha band (:func:`distseg.data.formats.readers.open_image`).
        form: how masks encode the classes: as labels, colours, object ids or polygons.
        nested: True to read subfolders too (:func:`distseg.data.nested.paired_below`).
        level: the resolution of OME-Zarr images and masks.

    Raises:
        ValueError: there is no image, no image is in the split train, a file has no partner or
            would not be read, an image has a name that a store cannot hold, or headers contradict
            each other.
    """
    check_folders(images, masks, nested)
    search = paired_below if nested else _paired
    if folders := split_folders(images):
        files = [
            (split, *found)
            for split in folders
            for found in search(images / split, folder_of(masks, split))
        ]
    else:
        there = search(images, masks)
        split_of = assign_splits([name for name, _, _ in there], shares, seed)
        files = [(split_of[name], name, image, mask) for name, image, mask in there]
    check_train([split for split, *_ in files], images)
    pairs = [
        replace(opened(split, image, mask, DIMS[pages], alpha, form, level), name=name)
        for split, name, image, mask in files
    ]
    if pages == "images":
        pairs = [page for pair in pairs for page in _pages_of(pair)]
    check_alike(pairs)
    check_polygons(pairs)
    return pairs


def _paired(images: Path, masks: Path | None) -> list[Found]:
    """Return the name, the image file and the mask file of each image in two folders.

    The mask file is None if ``masks`` is None. Files are matched by :func:`paired`.
    """
    return [(stem_of(image), image, mask) for image, mask in paired(images, masks)]


def _pages_of(pair: Pair) -> list[Pair]:
    """Return a pair of image and mask for each slice of a volume.

    Slice 12 of a volume with the name NAME becomes the image NAME_0012.
    """
    count, *size = pair.size
    digits = max(4, len(str(count - 1)))
    return [
        replace(pair, name=f"{pair.name}_{page:0{digits}d}", size=tuple(size), page=page)
        for page in range(count)
    ]


def check_train(splits: Sequence[str], images: Path) -> None:
    """Refuse a store without training images.

    Args:
        splits: the split of each image.
        images: the folder of the images, for the message.

    Raises:
        ValueError: no image is in the split train.
    """
    if "train" not in splits:
        raise ValueError(
            f"none of the {len(splits)} images of {images} is in the split 'train', from which "
            "the store takes the mean and standard deviation of each band: put at least one image "
            "into this split"
        )


def assign_splits(names: Sequence[str], shares: Sequence[float], seed: int) -> dict[str, str]:
    """Return the split of each name.

    Names are sorted by a random number that depends only on the seed and the name. The sorted list
    is then cut in proportion to the shares of train, val and test. A split with a share above 0
    gets at least one name if there are enough names. If there are at least 12 names, a split whose
    share is more than one name gets at least two. One image would not show how much scores differ
    between images.

    Args:
        names: the names, all different.
        shares: fractions of the names for train, val and test; missing ones are 0.
        seed: seed of the random numbers.

    Raises:
        ValueError: a share is negative, or the shares do not add up to 1.
    """
    shares = [*shares, *(0.0 for _ in SPLITS)][: len(SPLITS)]
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"the shares of {', '.join(SPLITS)} must not be negative and must add up to 1, got "
            f"{shares}"
        )
    counts = [int(share * len(names) + 1e-9) for share in shares]
    while sum(counts) < len(names):
        lacking = [share * len(names) - count for share, count in zip(shares, counts)]
        counts[int(np.argmax(lacking))] += 1
    for needy, share in enumerate(shares):
        least = min(2 if len(names) >= _MANY else 1, math.ceil(share * len(names) - 1e-9))
        while counts[needy] < least and max(counts) > least:
            counts[counts.index(max(counts))] -= 1
            counts[needy] += 1
    order = sorted(names, key=lambda name: (rng.key(seed, "split", name), name))
    return dict(zip(order, np.repeat(SPLITS, counts).tolist()))


def opened(
    split: str,
    image: Path,
    mask: Path | None,
    dims: int | None,
    alpha: str | None = None,
    form: MaskForm = PLAIN,
    level: int = 0,
) -> Pair:
    """Open an image and its mask, and return the pair with the facts from their headers.

    Args:
        split: the split of the image.
        image: the file of the image.
        mask: the file of the mask; None without a mask.
        dims: number of spatial dims of the image; None takes it from the file.
        alpha: how to treat an alpha band; None treats it as a validity mask.
        form: how the mask encodes the classes: as labels, colours, object ids or polygons.
        level: the resolution of an OME-Zarr image or mask.

    Raises:
        ValueError: a file cannot be read, the meaning of its pages is unclear or contradicts
            ``dims``, or image and mask differ in their size or their georeference.
    """
    reader, labels = open_image(image, dims, alpha=alpha or MASK, level=level), None
    if reader.stack and reader.bands > _MOST_BANDS:
        raise ValueError(
            f"{image} holds {reader.bands} pages (or an array with {reader.bands} layers) of "
            f"{Size(reader.size)}, and does not say what they are: set --pages bands if they are "
            "the bands of one image, --pages volume if they are the slices of a volume, --pages "
            "images if each is a separate image"
        )
    if dims == 3 and len(reader.size) == 2:
        raise ValueError(
            f"--pages says that {image} is a volume or holds images, but its file says that it is "
            f"one image with {reader.bands} bands: leave --pages out, or write the file again "
            "without names of its pages, or with the pages as slices (axes ZYX)"
        )
    if mask is not None:
        grid = ImageGrid(image, reader.size, reader.place)
        labels = form.open(mask, len(reader.size), grid, level)
        if labels.size != reader.size:
            raise ValueError(
                f"{image} has {Size(reader.size)} pixels, but its mask {mask} has "
                f"{Size(labels.size)}: both must have the same size"
            )
        if apart := difference(reader.place, labels.place, reader.size):
            raise ValueError(
                f"{image} and its mask {mask} lie at different places: {apart}; resample or warp "
                "the mask to the grid of the image"
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
        level=level,
        form=form,
        place=reader.place,
        polygons=labels and labels.polygons,
        kept=reader.kept,
    )


def check_alike(pairs: list[Pair]) -> None:
    """Refuse images that differ so much that one store cannot hold them.

    All images must have the same number of bands, the same number of dims and the same dtype. If
    the files declare the meaning of their bands, such as RGB, it must be the same too. Names must
    be unique.

    Raises:
        ValueError: two images do not fit; the message names both files and their difference.
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


def check_polygons(pairs: Sequence[Pair]) -> None:
    """Refuse a vector file if none of its polygons overlaps an image that uses the file.

    A file without polygons is accepted for a single image if other images have polygons. A COCO
    file is also refused if several images would get the annotations of one entry.

    Raises:
        ValueError: a file is refused; the message names its extent and the extent of an image.
    """
    of_file: dict[Path, list[Pair]] = {}
    for pair in pairs:
        if pair.mask is not None and pair.polygons is not None:
            of_file.setdefault(pair.mask, []).append(pair)
    for path, those in of_file.items():
        if is_annotated(path):
            check_listed(path, [pair.image for pair in those])
        if any(pair.polygons for pair in those):
            continue
        if is_annotated(path):
            _check_annotated(path, len(those), len(of_file))
            continue
        layer = read_layer(path, those[0].form.rule)
        if not len(layer.polygons) and len(of_file) > 1:
            continue
        raise ValueError(
            f"no polygon of {path} overlaps "
            f"{'its image' if len(those) == 1 else f'any of the {len(those)} images'}: "
            f"{extents(layer, those[0].grid)}. If the CRS of the polygons is wrong, name the "
            "right one (ogr2ogr -a_srs EPSG:... new.gpkg FILE); else give the polygons of "
            "these images"
        )


def _check_annotated(path: Path, images: int, files: int) -> None:
    """Refuse a COCO or YOLO file that has no annotation for its images, if it is the only file.

    Args:
        path: the file.
        images: number of images that use the file.
        files: number of files with polygons, this one included.

    Raises:
        ValueError: the file is refused.
    """
    if files == 1:
        raise ValueError(
            f"{path} has no polygon in any of its {images} images: give the annotations of these "
            "images"
        )


def notes_on_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Return lines with all notes on the images, masks and splits of the pairs, each once.

    If there are too few images for all splits, a line says what that means.
    """
    notes = notes_on(
        [
            (path, notes)
            for pair in pairs
            for path, notes in ((pair.image, _notes(pair)), (pair.mask, pair.mask_notes))
        ]
    )
    missing = [split for split in SPLITS if split not in {pair.split for pair in pairs}]
    if missing and len(pairs) < len(SPLITS):
        notes.append(
            f"note: no image for {' and '.join(missing)}, so the network cannot be measured there: "
            f"give at least {len(SPLITS)} images, or cut a large one into parts (--parts 4x4)"
        )
    return notes


def _notes(pair: Pair) -> tuple[str, ...]:
    """Return notes for the user on the image of a pair.

    Each note is the rest of a sentence that begins with the file's name.
    """
    if pair.polygons != 0:
        return pair.notes
    return (*pair.notes, "has no polygon: all its pixels have the value 0 in the mask")
