"""Open images to predict, from a store or from files, and compute the identity of their results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distseg.data.formats.alpha import BAND
from distseg.data.formats.georeference import Georeference
from distseg.data.formats.readers import open_image, stem_of
from distseg.data.nodata import fitting, missing
from distseg.data.store.image_writer import first_bad, position
from distseg.data.store.store import Store, normalised, shrunken
from distseg.tiling.tile import Box


def everywhere(box: Box) -> None:
    """Return None for any box, which means that all of its pixels have data.

    It is the default of ``ImageSource.without_data``, for images in which every pixel has data.
    """


@dataclass(frozen=True)
class ImageSource:
    """Image to predict, which is read box by box, from a store or from a file.

    Attributes:
        name: the image's name, which also names the files of its results.
        size: the image's size in pixels.
        read: a function of a box that returns its normalised pixels, (C, *box.size) float32.
        identity: a text that identifies the data. It differs between images with the same name.
        decoding: the bytes of memory that the first read takes in addition, if the file can only be
            decoded whole; else 0.
        notes: remarks for the user on the image's file (:func:`distseg.data.notes.notes_on`).
        without_data: a function of a box that returns a mask (*box.size) bool, True for pixels that
            have no data in any band, or None if all pixels have data.
        place: the georeference of the image; None if it has none or the pixels are shrunken.
    """

    name: str
    size: tuple[int, ...]
    read: Callable[[Box], np.ndarray]
    identity: str = ""
    decoding: int = 0
    notes: tuple[str, ...] = ()
    without_data: Callable[[Box], np.ndarray | None] = everywhere
    place: Georeference | None = None


def store_image(store: Store, name: str) -> ImageSource:
    """Return the image ``name`` of a store as an :class:`ImageSource`, to be predicted."""
    return ImageSource(
        name,
        tuple(store.size(name)),
        lambda box: store.read_normalised(name, box),
        _file_identity(store.path),
        without_data=lambda box: store.without_data(name, box),
        place=store.place(name) if store.shrink == 1 else None,
    )


def file_image(
    path: str,
    manifest: dict,
    nodata: int | float | None = None,
    shrink: int = 1,
    scratch: str | None = None,
    level: int = 0,
) -> ImageSource:
    """Return the image of a file as an :class:`ImageSource`, to be predicted.

    Pixels are normalised with the mean and the standard deviation of each band in the training.

    Pixels without data become 0 after the normalisation, as in a store. An alpha channel is used as
    a band only if the network was trained with one band more than the file's colour bands.

    Args:
        path: the file.
        manifest: the manifest of a checkpoint of the run.
        nodata: the pixel value that means "no data"; None takes the value that the file declares.
        shrink: each pixel of the result is the mean of a block with this number of pixels along
            each dim (``data.shrink``).
        scratch: the folder for images that can only be decoded whole
            (:func:`distseg.data.formats.readers.open_image`).
        level: the resolution of an OME-Zarr image; 0 is the highest.

    Raises:
        ValueError: the number of bands or the dtype is not that of the training, or ``nodata`` or
            ``shrink`` does not fit the file. The function ``read`` of the result raises it if a
            pixel is not finite or at least 1e30 in absolute value, and does not stand for no data.
    """
    data = manifest["data"]
    mean, std = np.asarray(data["mean"]), np.asarray(data["std"])
    dims = len(data["size"]) if data.get("size") else None
    reader = open_image(path, dims, scratch=scratch, level=level)
    if reader.alpha is not None and reader.bands + 1 == len(mean):
        reader = open_image(path, dims, scratch=scratch, alpha=BAND, level=level)
    number = reader.nodata if nodata is None else fitting(nodata, reader.dtype)
    if nodata is not None and number is None:
        raise ValueError(
            f"--nodata is {nodata}, but no pixel of {reader.dtype}, as those of {path}, can have "
            f"this value: leave --nodata out, or give a number of this dtype"
        )
    if reader.bands != len(mean):
        raise ValueError(
            f"{path} has {reader.bands} bands, but the network was trained on {len(mean)}: "
            "predict images with the same bands"
        )
    check_type(path, reader.dtype, data)
    no_mean = (
        f"data.shrink is {shrink}, but {path} has pixels without data, "
        "so the mean of a block of pixels is not defined: leave data.shrink out"
    )
    if shrink > 1 and number is not None:
        raise ValueError(no_mean)

    def read(box: Box) -> np.ndarray:
        box = Box(tuple(shrink * a for a in box.start), tuple(shrink * b for b in box.stop))
        pixels, valid = reader.read_valid(box)
        if shrink > 1 and valid is not None and not valid.all():
            raise ValueError(no_mean)
        if (bad := first_bad(pixels, missing(pixels, number, valid))) is not None:
            raise ValueError(
                f"{path}: band {bad[0]} is {pixels[bad]} at {position(box, bad[1:])}: "
                "replace this value, such as by the band's mean, "
                f"or say that it stands for no data: --nodata={pixels[bad]}"
            )
        return normalised(
            pixels if shrink == 1 else shrunken(pixels, shrink), mean, std, number, valid
        )

    def without_data(box: Box) -> np.ndarray | None:
        if shrink > 1:
            return None
        pixels, valid = reader.read_valid(box)
        found = missing(pixels, number, valid)
        return None if found is None else found.all(0)

    remarks = (
        ("" if number is None else f", no data is {number}")
        + (", transparency is no data" if reader.alpha is not None else "")
        + (f", level {level}" if level else "")
    )
    source = "; ".join(map(_file_identity, (path, *reader.sources))) + remarks
    known = number is not None or reader.masked
    return ImageSource(
        stem_of(path),
        tuple(n // shrink for n in reader.size),
        read,
        source,
        reader.decoding,
        reader.notes,
        without_data if known else everywhere,
        reader.place if shrink == 1 else None,
    )


def check_type(image: str, dtype: np.dtype, data: dict) -> None:
    """Refuse an image whose dtype differs from that of the images a network was trained on.

    Another dtype has another range of values, so the normalisation would be wrong.

    Args:
        image: the image's name, for the message.
        dtype: the dtype of the image's pixels.
        data: the section ``data`` of a checkpoint's manifest. Its ``types`` are the dtypes of the
            training images.

    Raises:
        ValueError: the dtypes differ.
    """
    types = data.get("types")  # None in manifests of older versions
    if types and str(dtype) not in types:
        raise ValueError(
            f"{image} holds {dtype}, but the network was trained on {' and '.join(types)}, "
            f"which has another range of numbers: convert the image to {types[0]}"
        )


def network_identity(checkpoint: Path, manifest: dict, settings: Sequence) -> str:
    """Return a text that identifies the weights and settings of a network.

    The text also differs if a run is trained anew in the same folder.

    Args:
        checkpoint: the folder of the checkpoint.
        manifest: the manifest of this checkpoint.
        settings: the values of the settings outside of the section ``model`` on which the
            network's results depend, such as ``train.precision``.
    """
    return json.dumps(
        [
            _file_identity(checkpoint / "manifest.json"),
            manifest["step"],
            manifest["config"]["model"],
            *settings,
        ]
    )


def _file_identity(path: str | Path) -> str:
    """Return a text with the path, size and modification time of a file.

    For a folder, such as an OME-Zarr image, it is a digest of these facts of all files in it.
    """
    found = os.stat(path)
    if not Path(path).is_dir():
        return f"{Path(path).resolve()}, {found.st_size} bytes, {found.st_mtime_ns}"
    digest = hashlib.sha256()
    for folder, inner, files in os.walk(path):
        inner.sort()
        for name in sorted(files):
            digest.update(_file_identity(os.path.join(folder, name)).encode())
    return f"{Path(path).resolve()}, {digest.hexdigest()}"
