"""Choose the files to read in folders of images and masks.

Files that would silently be left out are refused or listed. Otherwise nobody would notice a folder
``valid`` beside ``train``, or GIF files among PNG files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from distseg.data.formats.gdal import RASTER_SUFFIXES
from distseg.data.formats.ome_zarr import SUFFIXES as IMAGE_FOLDERS
from distseg.data.formats.ome_zarr import is_zarr_folder
from distseg.data.formats.readers import SUFFIXES, stem_of, suffix_of
from distseg.data.partners import partners
from distseg.data.store.layout import check_name
from distseg.data.vector.annotated import YOLO_SUFFIX
from distseg.data.vector.layer import VECTOR_SUFFIXES, is_vector

SPLITS = ("train", "val", "test")
# Names of folders, and the splits that they mean.
MEANT = {
    "training": "train",
    "valid": "val",
    "validation": "val",
    "testing": "test",
    **{name: name for name in SPLITS},
}
# Endings of image files that distseg cannot read.
_OTHERS = frozenset(
    ".apng .arw .avif .cr2 .dcm .dng .ecw .exr .geotiff .gif .hdr .heic .heif .jfif .jpe .jpx "
    ".jxl .mat .mrc .nc .nef .npz .pbm .pcx .pgm .pnm .ppm .psd .raw .sgi .sid .svg .tga "
    ".xcf".split()
)


def split_folders(images: Path) -> list[str]:
    """Return which of train, val and test are subfolders of ``images``; empty if none is."""
    return [split for split in SPLITS if (images / split).is_dir()]


def check_folders(images: Path, masks: Path | None, nested: bool = False) -> None:
    """Refuse images that would not be read because of the folder in which they lie.

    These are images beside the folders train, val and test, and images in a subfolder of another
    name. A folder of images that is itself an image (OME-Zarr) is refused too.

    Args:
        images: the folder of images.
        masks: the folder of masks, or a vector file; None if there is none.
        nested: True if subfolders are read too. If there are folders of splits (train, val, test),
            only subfolders in these are read.

    Raises:
        ValueError: an image would not be read, or ``masks`` is a file, but no vector file. The
            message names the first such images or their folder.
    """
    if masks is not None and masks.is_file():
        if not is_vector(masks):
            raise ValueError(
                f"--masks is the file {masks}, but must be the folder of the masks, or one file of "
                f"polygons for all images ({' '.join(VECTOR_SUFFIXES)} .json)"
            )
        masks = None
    for root in _roots(images, masks):
        if is_zarr_folder(root):
            raise ValueError(
                f"{root} is itself an image (OME-Zarr), but must be a folder of images: give the "
                "folder that holds it"
            )
    if split_folders(images):
        for root in _roots(images, masks):
            _refuse_loose_files(root, split_folders(root))
    places = _places(images, masks)
    read = {folder for place in places for folder in (place.resolve(), *place.resolve().parents)}
    if nested:
        places = _roots(images, masks) if split_folders(images) else []
    for place in places:
        _refuse_folders(place, read)


def unread(images: Path, masks: Path | None, nested: bool = False) -> list[str]:
    """Return the paths of image files that distseg does not read, and of vector files among masks.

    Vector files in a folder of masks are only read if the folder holds no image files.

    Args:
        images: the folder of images.
        masks: the folder of masks, or a vector file; None if there is none.
        nested: True if subfolders are read too.
    """
    found = []
    for place in _places(images, masks, nested):
        names = {entry.path: suffix_of(entry.name) for entry in _listed(place)}
        of_masks = masks is not None and masks in (place, *place.parents) and place != images
        mixed = of_masks and not {*SUFFIXES}.isdisjoint(names.values())
        others = _OTHERS | {*VECTOR_SUFFIXES} if mixed else _OTHERS
        headers = {f"{path[: -len(s)]}.hdr" for path, s in names.items() if s in RASTER_SUFFIXES}
        found += [p for p, suffix in names.items() if suffix in others and p not in headers]
    return found


def paired(images: Path, masks: Path | None) -> list[tuple[Path, Path | None]]:
    """Return (image, mask) for each image: the files of two folders whose names match.

    Two names match if they differ only in their endings, and in a part at the beginning or end that
    all masks, or all images, have in common.

    Args:
        images: the folder of images.
        masks: the folder of masks, or a vector file with the polygons of all images, which is
            paired with every image; None pairs every image with None.

    Raises:
        ValueError: a file has no partner, two names in a folder differ in their endings only, or
            there is no image.
    """
    left = image_files(images)
    if masks is None or masks.is_file():
        return [(path, masks) for path in left.values()]
    right = mask_files(masks)
    mask_of = partners(list(left), list(right))
    lonely = _lonely(left.keys() - mask_of.keys(), f"images of {images} have no mask") + _lonely(
        right.keys() - set(mask_of.values()), f"masks of {masks} have no image"
    )
    if lonely:
        raise ValueError(
            f"{' and '.join(lonely)}: an image and its mask must have the same name except for the "
            "ending, or for a part at the beginning or end that all masks, or all images, have, "
            "such as _mask"
        )
    return [(left[stem], right[mask_of[stem]]) for stem in left]


def folder_of(masks: Path | None, split: str) -> Path | None:
    """Return the subfolder ``split`` of the folder of masks.

    If ``masks`` is a vector file for all splits, or None, it is returned unchanged.
    """
    return masks if masks is None or masks.is_file() else masks / split


def some(names: Sequence[str], most: int = 10) -> str:
    """Return a text that lists the first ``most`` names and counts the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _roots(images: Path, masks: Path | None) -> list[Path]:
    return [images] if masks is None else [images, masks]


def subfolders(root: Path, apart: Path | None = None) -> list[Path]:
    """Return a folder and all folders below it, as sorted paths relative to it.

    Hidden folders, and folders that are images (OME-Zarr), are left out. A folder that is found
    several times, through links, is returned once.

    Args:
        root: the folder.
        apart: a folder in ``root`` to leave out; None if there is none.
    """
    found, seen = [], set() if apart is None else {os.path.realpath(apart)}
    for folder, inner, _ in os.walk(root, followlinks=True):
        inner[:] = sorted(
            name
            for name in inner
            if not name.startswith(".") and suffix_of(name) not in IMAGE_FOLDERS
        )
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        found.append(Path(folder).relative_to(root))
    return sorted(found)


def holds_files(folder: Path, suffixes: Sequence[str]) -> bool:
    """Return True if a folder exists and has a file whose name ends in one of ``suffixes``.

    The endings are in small letters, such as ``.tif``. Files in subfolders do not count.
    """
    return folder.is_dir() and any(suffix_of(e.name) in suffixes for e in _listed(folder))


def _places(images: Path, masks: Path | None, nested: bool = False) -> list[Path]:
    """Return the existing folders in which images or masks are searched, those of splits too."""
    if nested:
        roots = [root for root in _roots(images, masks) if root.is_dir()]
        return [root / folder for root in roots for folder in subfolders(root)]
    splits = split_folders(images)
    roots = _roots(images, masks)
    places = [*roots, *(root / split for root in roots for split in splits)]
    return [place for place in dict.fromkeys(places) if place.is_dir()]


def _listed(folder: Path) -> list[os.DirEntry]:
    """Return the files and subfolders of a folder that are not hidden, sorted by name."""
    with os.scandir(folder) as entries:
        return sorted(
            (entry for entry in entries if not entry.name.startswith(".")),
            key=lambda entry: entry.name,
        )


def mask_files(folder: Path) -> dict[str, Path]:
    """Return the masks of a folder as a dict {name without ending: path}, sorted by name.

    Masks are the image files of the folder. Without image files, masks are the vector files.
    Without vector files too, masks are the text files of YOLO.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: two names differ in their endings only, or there is no mask.
    """
    there = {suffix_of(entry.name) for entry in _listed(folder)} if folder.is_dir() else set()
    for suffixes in (SUFFIXES, VECTOR_SUFFIXES, (YOLO_SUFFIX,)):
        if there & {*suffixes}:
            return image_files(folder, suffixes)
    return image_files(folder, (*SUFFIXES, *VECTOR_SUFFIXES, YOLO_SUFFIX))


def image_files(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> dict[str, Path]:
    """Return the image files of a folder as a dict {name without ending: path}, sorted by name.

    Args:
        folder: the folder.
        suffixes: the endings of the files to return.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: two names differ in their endings only, or there is no image.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}: correct the path, or create the folder"
        )
    found: dict[str, Path] = {}
    for path in [
        folder / entry.name for entry in _listed(folder) if suffix_of(entry.name) in suffixes
    ]:
        stem = stem_of(path)
        check_name(stem, str(folder))
        if stem in found:
            raise ValueError(
                f"{found[stem]} and {path} differ in their endings only (or in how Unicode writes "
                "the same letters, NFC and NFD): remove one"
            )
        found[stem] = path
    if not found:
        raise ValueError(
            f"the folder {folder} holds no image that distseg reads: put files there with the "
            f"endings {' '.join(suffixes)}, or name another folder"
        )
    return found


def _lonely(names: Iterable[str], what: str) -> list[str]:
    names = sorted(names)
    return [f"{len(names)} {what} ({some(names)})"] if names else []


def _refuse_loose_files(root: Path, folders: list[str]) -> None:
    loose = (
        [entry.name for entry in _listed(root) if suffix_of(entry.name) in SUFFIXES]
        if folders
        else []
    )
    if loose:
        raise ValueError(
            f"{root} has the folders {', '.join(folders)} and images beside them ({some(loose)}): "
            "move these images into one of the folders"
        )


def _refuse_folders(place: Path, read: set[Path]) -> None:
    """Refuse a subfolder of ``place`` that holds images and would not be read.

    Args:
        place: a folder that is searched.
        read: the folders that are searched, and all their parents.

    Raises:
        ValueError: a subfolder is refused; the message names the repair.
    """
    for entry in _listed(place):
        if suffix_of(entry.name) in IMAGE_FOLDERS:
            continue
        if entry.is_dir() and Path(entry.path).resolve() not in read and _holds_images(entry.path):
            meant = MEANT.get(entry.name.lower())
            repair = (
                f"rename it {meant}"
                if meant not in (None, entry.name)
                else "move its images into a folder that is read, or move the folder elsewhere"
            )
            if meant is None and not split_folders(place):
                repair += ", or set --recursive to read all subfolders"
            raise ValueError(
                f"{entry.path} holds images, but would not be read, because only the folders "
                f"{', '.join(SPLITS)} directly in the folder of images, and in the folder of "
                f"masks, are read: {repair}"
            )


def _holds_images(folder: str) -> bool:
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        images = [name for name in folders if suffix_of(name) in IMAGE_FOLDERS]
        images += [name for name in files if suffix_of(name) in SUFFIXES]
        if any(not name.startswith(".") for name in images):
            return True
    return False
