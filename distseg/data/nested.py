"""Find images and masks in folders inside folders (``prepare --recursive``)."""

from __future__ import annotations

from pathlib import Path

from distseg.data.folders import MEANT, SPLITS, holds_files, image_files, paired, subfolders
from distseg.data.formats.readers import SUFFIXES, stem_of
from distseg.data.vector.layer import VECTOR_SUFFIXES

Found = tuple[str, Path, Path | None]  # name of an image, its file, its mask


def paired_below(images: Path, masks: Path | None) -> list[Found]:
    """Return (name, image, mask) for the images in a folder and in all of its subfolders.

    The folder of masks must have the same subfolders. Files are paired within each folder. The name
    of an image consists of the names of its folders and of its file: ``city-north-a`` for the file
    ``city/north/a.png``.

    Args:
        images: the folder of images.
        masks: the folder of masks, or a vector file for all images; None pairs every image with
            None.

    Raises:
        ValueError: files cannot be paired (:func:`distseg.data.folders.paired`), a folder of masks
            has no folder of images, or a subfolder is named like a split.
    """
    folders = set(subfolders(images, masks))
    of_masks = set(subfolders(masks, images)) if masks is not None and masks.is_dir() else set()
    found: list[Found] = []
    for folder in sorted(folders | of_masks):
        here = images / folder
        there = masks / folder if masks is not None and masks.is_dir() else masks
        if not holds_files(here, SUFFIXES):
            if folder in of_masks and holds_files(there, (*SUFFIXES, *VECTOR_SUFFIXES)):
                raise ValueError(
                    f"{there} holds masks, but {here} holds no image: the folders of images and "
                    "masks must have the same subfolders"
                )
            continue
        _check_parts(images, folder)
        found += [
            ("-".join((*folder.parts, stem_of(image))), image, mask)
            for image, mask in paired(here, there)
        ]
    if not found:
        image_files(images)  # raises an error that names the endings of images
    return found


def _check_parts(images: Path, folder: Path) -> None:
    """Refuse a subfolder that is named like a split, because the user may expect it to be one.

    Raises:
        ValueError: one of the names in ``folder`` means a split, such as ``valid``.
    """
    for part in folder.parts:
        if part.lower() in MEANT:
            raise ValueError(
                f"{images / folder} is named like a split ({part}), but --recursive takes only "
                f"the folders {', '.join(SPLITS)} directly in the folder of images as splits: move "
                "the splits to the top, or rename this folder"
            )
