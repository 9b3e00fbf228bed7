"""What a store says of itself: attributes, the index of its images, where they come from; checked before anything relies on it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from distseg.data import hdf5, layout
from distseg.data.nodata import from_json, to_json

_MOST_DIMS = 8


@dataclass(frozen=True)
class Entry:
    """An image: what it is called and what is known of it without reading it."""

    name: str
    split: str
    size: tuple[int, ...]
    dtype: np.dtype
    labels: bool
    counts: list[int] | None  # pixels of each class
    nodata: int | float | None = None
    missing: int = 0  # pixels without data
    digests: dict[str, str] = field(
        default_factory=dict
    )  # of the sums of pixels and labels, and of the counts; version 1 has none

    def to_json(self) -> dict:
        return {**vars(self), "dtype": self.dtype.str, "nodata": to_json(self.nodata)}

    @classmethod
    def from_json(cls, entry: dict, classes: int, version: int) -> "Entry":
        """Raises ValueError, TypeError or KeyError for an entry that can't be."""
        name, size, dtype = entry["name"], tuple(entry["size"]), np.dtype(entry["dtype"])
        _must(isinstance(name, str), f"the name {name!r}")
        layout.check_name(name, "the index")
        _must(isinstance(entry["split"], str) and entry["split"] != "", f"the split {entry['split']!r} of {name!r}")
        _must(
            0 < len(size) <= _MOST_DIMS and all(type(n) is int and 0 < n < 2**62 for n in size),
            f"the size {size} of {name!r}",
        )
        _must(dtype.kind in "iuf" and isinstance(entry["dtype"], str), f"the type {entry['dtype']!r} of {name!r}")
        labels, counts = entry["labels"], entry["counts"]
        _must(type(labels) is bool and (counts is None) != labels, f"labels and counts of {name!r}")
        if labels:
            _must(
                len(counts) == classes
                and all(type(n) is int and n >= 0 for n in counts)
                and sum(counts) <= math.prod(size),
                f"the counts {counts} of {name!r}",
            )
        if version == 1:
            return cls(name, entry["split"], size, dtype, labels, counts)
        digests = entry["digests"]
        _must(set(digests) == {"pixels", *(("labels", "counts") if labels else ())}, f"the digests of {name!r}")
        _must(
            type(entry["missing"]) is int and 0 <= entry["missing"] <= math.prod(size),
            f"the pixels without data of {name!r}",
        )
        return cls(
            name,
            entry["split"],
            size,
            dtype,
            labels,
            counts,
            from_json(entry["nodata"]),
            entry["missing"],
            dict(digests),
        )


@dataclass(frozen=True)
class Header:
    version: int
    classes: list[str]
    bands: list[str]
    ignore: int
    block: int
    mean: np.ndarray  # (bands,) float64
    std: np.ndarray
    provenance: dict
    images: dict[str, Entry]
    digest: str  # tells stores of different content apart; of version 1, of different headers


def begin(file: h5py.File) -> None:
    """What tells a store that is not complete from other files."""
    file.attrs.create("format", np.bytes_(layout.FORMAT))
    file.attrs.update(version=layout.VERSION, complete=False)


def write(
    file: h5py.File, classes: list[str], bands: list[str], ignore: int, mean, std, provenance: dict, images: list[Entry]
) -> None:
    """The last to be written: with it the store is complete."""
    attributes = file.attrs
    for name, texts in dict(classes=classes, bands=bands).items():
        attributes.create(name, hdf5.strings(texts))
    attributes.create("layout", np.bytes_(layout.LAYOUT))
    attributes.update(ignore=ignore, block=layout.BLOCK, mean=mean, std=std, complete=True)
    texts = {"index": json.dumps([image.to_json() for image in images]), "provenance": json.dumps(provenance)}
    for name, text in texts.items():
        file.create_dataset(name, data=np.bytes_(text))
    attributes.create("digest", np.bytes_(_digest(file, texts)))


def read(path: str, file: h5py.File) -> Header:
    """The header of a store.

    Raises:
        ValueError: not a store, an unfinished or damaged one, or one of a newer version.
    """
    try:
        return _read(path, file)
    except _Told as e:
        raise ValueError(str(e)) from None
    except (
        KeyError,
        TypeError,
        ValueError,
        OSError,
        RuntimeError,
        OverflowError,
        AttributeError,
        MemoryError,
        RecursionError,
    ) as e:
        text = e.args[0] if isinstance(e, KeyError) and e.args else e
        words = text if str(path) in str(text) else f"{path} is damaged or cut off: its header can not be read ({text})"
        raise ValueError(f"{words}: copy it again, or prepare it anew") from e


class _Told(ValueError):
    """An error whose words need no more."""


def _read(path: str, file: h5py.File) -> Header:
    known = file.attrs
    if "format" not in known or _plain(known["format"]) != layout.FORMAT:
        raise _Told(f"{path} is an HDF5 file but no distseg store: 'distseg prepare' writes a store from images")
    version = _plain(known["version"])
    if version > layout.VERSION:
        raise _Told(
            f"{path} is a store of version {version}, this distseg reads up to {layout.VERSION}: update distseg"
        )
    if not ("complete" in known and bool(_plain(known["complete"]))):
        raise _Told(f"{path} is unfinished, its writer was stopped: prepare it anew")
    texts = {name: _text(file, name) for name in ("index", "provenance")}
    digest = _digest(file, texts)
    if version > 1 and digest != _plain(known["digest"]):
        raise ValueError("it is not the one that was written, its checksum differs")
    attributes = {name: _plain(known[name]) for name in ("classes", "bands", "ignore", "block", "mean", "std")}
    return _checked(version, attributes, json.loads(texts["index"]), json.loads(texts["provenance"]), digest)


def _checked(version: int, known: dict[str, Any], index: list, provenance: dict, digest: str) -> Header:
    classes, bands = known["classes"], known["bands"]
    _must(type(version) is int and version > 0, f"the version {version!r}")
    for what, names in dict(classes=classes, bands=bands).items():
        _must(
            isinstance(names, list) and names and all(isinstance(name, str) for name in names),
            f"the names of its {what}",
        )
    _must(
        2 <= len(classes) <= 255 and type(known["ignore"]) is int and len(classes) <= known["ignore"] <= 255,
        f"{len(classes)} classes and the label {known['ignore']} to ignore",
    )
    _must(type(known["block"]) is int and known["block"] > 0, f"blocks of {known['block']} pixels")
    mean, std = (np.array(known[name], np.float64) for name in ("mean", "std"))
    fine = (
        mean.shape == std.shape == (len(bands),)
        and np.isfinite(mean).all()
        and np.isfinite(std).all()
        and (std > 0).all()
    )
    _must(fine, f"the means {mean} and deviations {std} of {len(bands)} bands")
    _must(isinstance(index, list) and isinstance(provenance, dict), "an index or provenance")
    images = [Entry.from_json(entry, len(classes), version) for entry in index]
    _must(len({image.name for image in images}) == len(images), "two images of one name")
    return Header(
        version,
        classes,
        bands,
        known["ignore"],
        known["block"],
        mean,
        std,
        provenance,
        {image.name: image for image in images},
        digest,
    )


def _must(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(f"{what} can not be")


def _text(file: h5py.File, name: str) -> str:
    found = hdf5.dataset(file, name)
    if found.shape != () or found.id.get_storage_size() > file.id.get_filesize():
        raise ValueError(f"its {name} is no text")
    return _plain(found[()])


def _digest(file: h5py.File, texts: dict[str, str]) -> str:
    attributes = {name: _plain(value) for name, value in file.attrs.items() if name != "digest"}
    return layout.digest(json.dumps([attributes, texts], sort_keys=True).encode())


def _plain(value: Any) -> Any:
    """An attribute in JSON's types."""
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
