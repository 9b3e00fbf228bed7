"""Writes a store, block by block, so that no image has to fit into memory, and whole or not at all.

The file grows under another name and takes its own when everything is in it, checked and on the disk.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Sequence

import h5py
import numpy as np

from distseg.data import layout
from distseg.data.image_writer import ImageWriter
from distseg.data.statistics import Moments
from distseg.disk import locked, to_disk


class StoreWriter:
    """``with StoreWriter(path, classes, bands) as writer: writer.add_image(...).write(box, pixels, labels)``.

    Args:
        classes: names in the order of their labels, 2 to 255.
        bands: names of the bands, or how many there are.
        ignore: label of pixels that count nowhere; no class has it.
        provenance: where the data come from; anything JSON can hold.
        overwrite: replace a store that is there.

    Raises:
        FileExistsError: ``path`` is there and ``overwrite`` is not set.
        ValueError: classes, bands or data that make no store, naming the image and the position.
    """

    def __init__(
        self,
        path: str | Path,
        classes: Sequence[str],
        bands: Sequence[str] | int,
        ignore: int = 255,
        provenance: dict | None = None,
        overwrite: bool = False,
    ):
        self.path, self.partial = Path(path), Path(f"{path}.partial")
        self.classes, self.ignore, self.provenance = list(classes), ignore, provenance or {}
        self.bands = [f"band{b}" for b in range(bands)] if isinstance(bands, int) else list(bands)
        self._images: dict[str, tuple[str, ImageWriter]] = {}  # name: (split, image)
        self.moments = Moments(len(self.bands))
        self._check()
        if self.path.is_dir():
            raise FileExistsError(f"{self.path} is a folder: choose another name for the store")
        if self.path.exists() and not overwrite:
            raise FileExistsError(f"{self.path} is already there: choose another name, or overwrite it (--overwrite)")

    def _check(self) -> None:
        if not 2 <= len(self.classes) <= 255 or len(set(self.classes)) < len(self.classes) or not all(self.classes):
            raise ValueError(f"a store has 2 to 255 classes with different names, got {self.classes}: name the background too")
        if not len(self.classes) <= self.ignore <= 255:
            raise ValueError(
                f"the label {self.ignore} of ignored pixels must be no class and fit into a byte: "
                f"choose one from {len(self.classes)} to 255 for {len(self.classes)} classes"
            )
        if not self.bands:
            raise ValueError("an image has at least one band, got none")

    def __enter__(self) -> "StoreWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._finished = False
        self._lock = locked(self.partial, self.path)  # before HDF5 empties the file
        self.file = h5py.File(self.partial, "w", locking=False)
        self.file.attrs.update(format=layout.FORMAT, version=layout.VERSION, complete=False)
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            try:
                if kind is None:
                    self._finish()
            finally:
                self.file.close()
        except RuntimeError as e:  # HDF5's word for a file that it could not complete
            raise OSError(f"{self.path} could not be written ({'; '.join(str(cause) for cause in (error, e) if cause)}): is there room on its disk?") from e
        finally:
            if not self._finished:
                self.partial.unlink(missing_ok=True)
            self._lock.close()

    def add_image(self, name: str, size: Sequence[int], dtype, split: str, labels: bool) -> ImageWriter:
        """A new image of ``size`` pixels, to be written in blocks that cover it."""
        if name in self._images:
            raise ValueError(f"two images have the name {name!r}: rename one")
        if name in ("", ".") or "/" in name:
            raise ValueError(f"the name of an image is not empty and has no '/', got {name!r}: rename it")
        if np.dtype(dtype).kind not in "iuf":
            raise ValueError(f"image {name!r}: pixels are whole or real numbers, got {np.dtype(dtype)}: convert them")
        if min(size, default=0) < 1:
            raise ValueError(f"image {name!r} has no pixels: its size is {tuple(size)}")
        group, size = self.file.create_group(f"images/{name}"), tuple(int(n) for n in size)
        moments = self.moments if split == "train" else None
        image = ImageWriter(group, name, size, np.dtype(dtype), labels, self.bands, self.classes, self.ignore, moments)
        self._images[name] = split, image
        return image

    def _finish(self) -> None:
        index = [{**image.entry(), "split": split} for split, image in self._images.values()]
        if not self.moments.pixels:
            raise ValueError("no image is in the split 'train', from which the store takes mean and deviation of each band: put one there")
        self._describe(index)
        self.file.close()
        to_disk(self.partial)
        os.replace(self.partial, self.path)
        self._finished = True
        to_disk(self.path.parent)

    def _describe(self, index: list[dict]) -> None:
        attributes = self.file.attrs
        attributes.update(layout=layout.LAYOUT, block=layout.BLOCK, ignore=self.ignore, bands=self.bands, classes=self.classes)
        attributes.update(mean=self.moments.mean, std=self.moments.std)
        self.file["index"] = json.dumps(index)
        self.file["provenance"] = json.dumps(self.provenance)
        attributes["complete"] = True
