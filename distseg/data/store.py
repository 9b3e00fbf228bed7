"""The store: one HDF5 file with all images, their labels, and what training must know of them beforehand.

A rank opens the file itself and reads the windows it needs. The file is finished (``writer.py`` sees to that), so it is
read without locks, as parallel file systems like it. What is in it: ``layout.py``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Sequence

import h5py
import numpy as np

from distseg.data import layout
from distseg.data.writer import StoreWriter  # noqa: F401  (the other half of the store's interface)
from distseg.extents import Extents
from distseg.geometry.tile import Box

_CACHE_BYTES = 32 << 20


class Store:
    """Windows of images and labels, channels first. Safe for several threads; a forked process opens its own handle.

    Args:
        constants: mean and standard deviation of each band by which pixels are normalised, such as those that a network was trained with;
            by default the store's own.

    Raises:
        FileNotFoundError: nothing at ``path``.
        ValueError: no store, a damaged or unfinished one, one of a newer version, or one of other bands than ``constants``.
    """

    def __init__(self, path: str | Path, constants: tuple[Sequence[float], Sequence[float]] | None = None):
        self.path, self._constants = str(path), constants
        self._handle, self._process = _open(self.path), os.getpid()
        a = self._handle.attrs
        self.classes: list[str] = [str(c) for c in a["classes"]]
        self.band_names: list[str] = [str(b) for b in a["bands"]]
        self.ignore, self.block = int(a["ignore"]), int(a["block"])
        self.mean: np.ndarray = a["mean"][:]  # (bands,) float64, over all pixels of the split 'train'
        self.std: np.ndarray = a["std"][:]
        if constants is not None:
            if len(constants[0]) != self.bands:
                raise ValueError(f"{self.path} has {self.bands} bands, but the network was trained on {len(constants[0])}: choose a store like the one it was trained on")
            self.mean, self.std = (np.asarray(values, np.float64) for values in constants)
        self.provenance: dict = json.loads(self._handle["provenance"][()])
        self._images = {entry["name"]: entry for entry in json.loads(self._handle["index"][()])}
        self.splits: dict[str, list[str]] = {}  # the names of the images of each, in the order they were written
        for name, entry in self._images.items():
            self.splits.setdefault(entry["split"], []).append(name)

    def __reduce__(self):
        return Store, (self.path, self._constants)

    @property
    def bands(self) -> int:
        return len(self.band_names)

    def split(self, name: str) -> list[str]:
        if name not in self.splits:
            raise ValueError(f"{self.path} has no split {name!r}: choose {', '.join(self.splits)}")
        return self.splits[name]

    def size(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name)["size"])

    def dtype(self, name: str) -> np.dtype:
        """Of the stored pixels."""
        return np.dtype(self._entry(name)["dtype"])

    def has_labels(self, name: str) -> bool:
        return self._entry(name)["labels"]

    def read(self, name: str, box: Box) -> np.ndarray:
        """Pixels (bands, *box.size) as they are stored."""
        self._check(name, box)
        return self._file[f"images/{name}/pixels"][(slice(None), *box.slices)]

    def read_normalised(self, name: str, box: Box) -> np.ndarray:
        """(pixels - mean) / std in float32, (bands, *box.size)."""
        return normalised(self.read(name, box), self.mean, self.std)

    def labels(self, name: str, box: Box) -> np.ndarray:
        """Class numbers or ``ignore``, (*box.size) uint8."""
        self._check_labelled(name)
        self._check(name, box)
        return self._file[f"images/{name}/labels"][box.slices]

    def block_counts(self, name: str) -> np.ndarray:
        """Pixels of each class in each block, (classes, *blocks): where a class is, without reading the labels."""
        self._check_labelled(name)
        return self._file[f"images/{name}/counts"][()].astype(np.int64)

    def class_counts(self, name: str) -> list[int]:
        """Pixels of each class in the image."""
        self._check_labelled(name)
        return self._entry(name)["counts"]

    @property
    def _file(self) -> h5py.File:
        if self._process != os.getpid():
            self._handle, self._process = _open(self.path), os.getpid()
        return self._handle

    def _entry(self, name: str) -> dict:
        if name not in self._images:
            some = ", ".join(list(self._images)[:5])
            raise ValueError(f"{self.path} has no image {name!r}: it holds {len(self._images)}, such as {some}")
        return self._images[name]

    def _check(self, name: str, box: Box) -> None:
        size = self.size(name)
        if len(box.start) != len(size) or not Box.whole(size).contains(box):
            raise ValueError(f"image {name!r} of {self.path} has {Extents(size)} pixels, the box {box} reaches beyond them")

    def _check_labelled(self, name: str) -> None:
        if not self.has_labels(name):
            raise ValueError(f"image {name!r} of {self.path} has no labels: prepare the store with masks to train or evaluate on it")


def normalised(pixels: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """(pixels - mean) / std in float32, computed in float64 where pixels have more digits than float32; pixels (bands, *size)."""
    pixels = pixels.astype(np.result_type(pixels.dtype, np.float32))
    shape = (-1, *(1 for _ in pixels.shape[1:]))
    pixels -= mean.astype(pixels.dtype).reshape(shape)
    pixels /= std.astype(pixels.dtype).reshape(shape)
    return pixels.astype(np.float32, copy=False)


def _open(path: str) -> h5py.File:
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no store {path}: 'distseg prepare' writes one")
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path} is no HDF5 file: 'distseg prepare' writes a store from images")
    try:
        file = h5py.File(path, "r", locking=False, rdcc_nbytes=_CACHE_BYTES)
        _check_header(path, file.attrs)
    except OSError as e:
        raise ValueError(f"{path} is damaged or cut off ({e}): copy it again, or prepare it anew") from e
    return file


def _check_header(path: str, attributes) -> None:
    if attributes.get("format", "") != layout.FORMAT:
        raise ValueError(f"{path} is an HDF5 file but no distseg store: 'distseg prepare' writes a store from images")
    if attributes["version"] > layout.VERSION:
        raise ValueError(f"{path} is a store of version {attributes['version']}, this distseg reads up to {layout.VERSION}: update distseg")
    if not attributes.get("complete", False):
        raise ValueError(f"{path} is unfinished, its writer was stopped: prepare it anew")
