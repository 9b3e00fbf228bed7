"""Header of a store: attributes, the index of its images, and their origin.

All values are checked when the header is read, before other code uses them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from distseg.data.formats.georeference import Georeference
from distseg.data.nodata import from_json, to_json
from distseg.data.store import hdf5, layout
from distseg.data.store.source import Source

_MOST_DIMS = 8
_WRONG = (
    KeyError,
    TypeError,
    ValueError,
    OSError,
    RuntimeError,
    OverflowError,
    AttributeError,
    MemoryError,
    RecursionError,
)


@dataclass(frozen=True)
class Entry:
    """Index entry of an image in a store: name, size, dtype, split and so on, without pixels.

    :mod:`distseg.data.store.layout` describes how the store holds the index.
    """

    name: str
    split: str
    size: tuple[int, ...]
    dtype: np.dtype
    labels: bool  # True if the pixels have labels
    counts: list[int] | None  # number of pixels of each class; None if the pixels have no labels
    nodata: int | float | None = None  # the number for no data; None if there is none
    missing: int = 0  # number of pixels that have no data in any band
    # For pixels, labels and valid: index of the first checksum in the store's dataset ``sums``.
    # Empty in version 1.
    sums: dict[str, int] = field(default_factory=dict)
    # For pixels, labels and valid: digest of their checksums. For counts: digest of the counts.
    digests: dict[str, str] = field(default_factory=dict)
    # The label of the whole image: its class, or a number if the store has a single class. None
    # without such a label.
    label: int | float | None = None
    valid: bool = False  # True if the image has a validity mask
    place: Georeference | None = None  # the georeference of the image
    source: Source | None = None  # the file that holds the pixels; None if the store holds them

    def to_json(self) -> dict:
        """Return the entry in types that JSON can hold."""
        found = {
            **vars(self),
            "dtype": self.dtype.str,
            "nodata": to_json(self.nodata),
            "place": self.place and self.place.to_json(),
        }
        source = found.pop("source")
        return found if source is None else {**found, "source": source.to_json()}

    @classmethod
    def from_json(cls, entry: dict, version: int) -> Entry:
        """Return an entry of the index from its JSON form, as :meth:`to_json` makes it.

        Args:
            entry: the result of :meth:`to_json`.
            version: version of the store; entries of version 1 have fewer values.

        Raises:
            KeyError, TypeError, ValueError: ``entry`` is not valid.
        """
        known = (
            entry["name"],
            entry["split"],
            tuple(entry["size"]),
            np.dtype(entry["dtype"]),
            entry["labels"],
            entry["counts"],
        )
        if version == 1:
            return cls(*known)
        return cls(
            *known,
            from_json(entry["nodata"]),
            entry["missing"],
            dict(entry["sums"]),
            dict(entry["digests"]),
            entry.get("label"),
            entry.get("valid", False),
            Georeference.from_json(entry.get("place")),
            Source.from_json(entry.get("source")),
        )

    @property
    def version(self) -> int:
        """The lowest version of the store format that can hold this image."""
        if self.source is not None:
            return layout.REFERRING
        return layout.MASKED if self.valid else layout.VERSION

    def check(self, classes: int, version: int) -> None:
        """Refuse an index entry with a value that no valid store has.

        Args:
            classes: number of classes of the store.
            version: version of the store.

        Raises:
            ValueError: a value is impossible; the message names it.
        """
        name, pixels = self.name, math.prod(n for n in self.size if type(n) is int)
        _must(isinstance(name, str), f"the name {name!r}")
        layout.check_name(name, "the index")
        _must(
            isinstance(self.split, str) and self.split != "",
            f"the split {self.split!r} of {name!r}",
        )
        fine = 0 < len(self.size) <= _MOST_DIMS and all(_count(n, 2**62) and n for n in self.size)
        _must(fine, f"the size {self.size} of {name!r}")
        _must(self.dtype.kind in "iuf", f"the type {self.dtype} of {name!r}")
        _must(
            type(self.labels) is bool and (self.counts is None) != self.labels,
            f"labels and counts of {name!r}",
        )
        if self.labels:
            fine = (
                len(self.counts) == classes
                and all(_count(n, pixels) for n in self.counts)
                and sum(self.counts) <= pixels
            )
            _must(fine, f"the counts {self.counts} of {name!r}")
        if self.label is not None:
            fine = (
                _count(self.label, classes - 1)
                if classes > 1
                else type(self.label) in (int, float) and math.isfinite(self.label)
            )
            _must(fine and not self.labels, f"the label {self.label} of {name!r}")
        _must(_count(self.missing, pixels), f"the pixels without data of {name!r}")
        _must(type(self.valid) is bool, f"the validity mask of {name!r}")
        _must(self.source is None or self.source.valid, f"the files of {name!r}")
        chunked = {"pixels"} | {what for what in ("labels", "valid") if getattr(self, what)}
        if version > 1:
            _must(
                set(self.sums) == chunked and all(_count(n, 2**62) for n in self.sums.values()),
                f"the sums of {name!r}",
            )
            _must(
                set(self.digests) == chunked | ({"counts"} if self.labels else set()),
                f"the digests of {name!r}",
            )


@dataclass(frozen=True)
class Header:
    """The header of a store: classes, bands with their statistics, and the index of its images."""

    version: int
    classes: list[str]  # names in the order of their labels
    bands: list[str]  # names of the bands
    ignore: int  # label of pixels to ignore
    block: int  # pixels along each side of a block in which classes are counted
    mean: np.ndarray  # (bands,) float64, mean of each band
    std: np.ndarray  # (bands,) float64, standard deviation of each band
    provenance: dict  # where the data come from
    images: dict[str, Entry]  # index entries of the images, by name
    colours: np.ndarray | None  # (classes, 3) uint8, if label maps had a palette
    digest: str  # differs between stores of different content (version 1: of different headers)
    sums_at: int = 0  # byte of the file at which the chunks' checksums begin

    def check(self) -> None:
        """Refuse a header that no valid store has, such as one with 300 classes.

        The values of the header and those of all index entries are checked.

        Raises:
            ValueError: a value is impossible; the message names it.
        """
        _must(type(self.version) is int and self.version > 0, f"the version {self.version!r}")
        for what, names in dict(classes=self.classes, bands=self.bands).items():
            fine = (
                isinstance(names, list) and names and all(isinstance(name, str) for name in names)
            )
            _must(fine, f"the names of its {what}")
        classes, bands = len(self.classes), len(self.bands)
        of_images = any(image.label is not None for image in self.images.values())
        fine = (
            2 - of_images <= classes <= 255 and _count(self.ignore, 255) and classes <= self.ignore
        )
        _must(fine, f"{classes} classes and the label {self.ignore} to ignore")
        _must(_count(self.block, 2**31) and self.block > 0, f"blocks of {self.block} pixels")
        for numbers in (self.mean, self.std):
            _must(
                numbers.shape == (bands,) and np.isfinite(numbers).all(),
                f"{numbers} for {bands} bands",
            )
        _must((self.std > 0).all(), f"the deviations {self.std}")
        _must(isinstance(self.provenance, dict), "the provenance")
        if self.colours is not None:
            fine = self.colours.shape == (classes, 3) and self.colours.dtype == np.uint8
            _must(fine, f"the colours {self.colours.tolist()}")
        for image in self.images.values():
            image.check(classes, self.version)


def begin(file: h5py.File) -> None:
    """Mark a new HDF5 file as a store that is not yet complete."""
    file.attrs.create("format", np.bytes_(layout.FORMAT))
    file.attrs.update(version=layout.VERSION, complete=False)


def write(
    file: h5py.File,
    classes: list[str],
    bands: list[str],
    ignore: int,
    mean: np.ndarray,
    std: np.ndarray,
    provenance: dict,
    images: list[Entry],
    sums: np.ndarray,
    colours: np.ndarray | None = None,
) -> None:
    """Write the header of a store, which completes it. All images must be written before.

    Args:
        file: the open file.
        classes: names in the order of their labels.
        bands: names of the bands.
        ignore: label of pixels to ignore.
        mean: (bands,) mean of each band.
        std: (bands,) standard deviation of each band.
        provenance: the origin of the data, such as folders and settings, in types that JSON holds.
        images: the index entries of all images.
        sums: (chunks,) uint64, the checksums of the chunks of all images.
        colours: (classes, 3) uint8, the colours of the classes; None if there are none.
    """
    file["sums"] = sums
    attributes = file.attrs
    for name, texts in dict(classes=classes, bands=bands).items():
        attributes.create(name, hdf5.strings(texts))
    attributes.create("layout", np.bytes_(layout.LAYOUT))
    attributes["version"] = max(image.version for image in images)
    attributes.update(ignore=ignore, block=layout.BLOCK, mean=mean, std=std, complete=True)
    if colours is not None:
        attributes["colours"] = np.asarray(colours, np.uint8)
    texts = {
        "index": json.dumps([image.to_json() for image in images]),
        "provenance": json.dumps(provenance),
    }
    for name, text in texts.items():
        file.create_dataset(name, data=np.bytes_(text))
    attributes.create("digest", np.bytes_(_digest(file, texts)))


def read(path: str, file: h5py.File) -> Header:
    """Return the header of the store ``file``; ``path`` names the store in messages.

    Raises:
        ValueError: the file is not a store, is unfinished or damaged, or has a newer version.
    """
    try:
        return _read(path, file)
    except _Told as e:
        raise ValueError(str(e)) from None
    except _WRONG as e:
        text = e.args[0] if isinstance(e, KeyError) and e.args else e
        words = (
            text
            if str(path) in str(text)
            else f"{path} is damaged or cut off: its header cannot be read ({text})"
        )
        raise ValueError(f"{words}: copy it again, or prepare it anew") from e


class _Told(ValueError):
    """Error in a header whose message already names the repair, so :func:`read` adds no advice."""


def _read(path: str, file: h5py.File) -> Header:
    """Return the header of an open store.

    Raises:
        _Told: the file is no complete store of a known version.
        ValueError, KeyError, TypeError: the header is damaged.
    """
    known = file.attrs
    if "format" not in known or _plain(known["format"]) != layout.FORMAT:
        raise _Told(
            f"{path} is an HDF5 file but not a distseg store: 'distseg prepare' writes a store "
            f"from "
            "images"
        )
    version = _plain(known["version"])
    if version > layout.REFERRING:
        raise _Told(
            f"{path} is a store of version {version}, but this distseg reads versions up to "
            f"{layout.REFERRING}: update distseg"
        )
    if not ("complete" in known and bool(_plain(known["complete"]))):
        raise _Told(f"{path} is unfinished, because its writer was stopped: prepare it anew")
    texts = {name: _text(file, name) for name in ("index", "provenance")}
    digest = _digest(file, texts)
    if version > 1 and digest != _plain(known["digest"]):
        raise ValueError("it differs from what was written (wrong checksum)")
    index, provenance = json.loads(texts["index"]), json.loads(texts["provenance"])
    images = [Entry.from_json(entry, version) for entry in index]
    _must(len({image.name for image in images}) == len(images), "two images of one name")
    named = {name: _plain(known[name]) for name in ("classes", "bands", "ignore", "block")}
    numbers = {name: np.array(_plain(known[name]), np.float64) for name in ("mean", "std")}
    sums_at = _sums_at(file) if version > 1 else 0
    found = Header(
        version,
        **named,
        **numbers,
        provenance=provenance,
        images={i.name: i for i in images},
        colours=np.asarray(known["colours"]) if "colours" in known else None,
        digest=digest,
        sums_at=sums_at,
    )
    found.check()
    return found


def _must(fine: bool, what: str) -> None:
    """Raise a ValueError unless ``fine`` is True; ``what`` names the wrong value in the message."""
    if not fine:
        raise ValueError(f"impossible: {what}")


def _count(value: Any, most: int) -> bool:
    """Return True if ``value`` is an int from 0 to ``most``, both included."""
    return type(value) is int and 0 <= value <= most


def _sums_at(file: h5py.File) -> int:
    """Return the byte of the file at which the checksums of all chunks begin."""
    found = hdf5.dataset(file, "sums")
    if found.chunk is not None or found.dtype != np.uint64 or found.id.get_offset() is None:
        raise ValueError("its checksums are not stored as distseg stores them")
    return found.id.get_offset()


def _text(file: h5py.File, name: str) -> str:
    found = hdf5.dataset(file, name)
    if found.shape != () or found.id.get_storage_size() > file.id.get_filesize():
        raise ValueError(f"its {name} is not text")
    return _plain(found.open()[()])


def _digest(file: h5py.File, texts: dict[str, str]) -> str:
    """Return the digest of a store's header.

    It covers the HDF5 attributes of the file, except ``digest``, and ``texts``: the index and the
    provenance.
    """
    attributes = {name: _plain(value) for name, value in file.attrs.items() if name != "digest"}
    return layout.digest(json.dumps([attributes, texts], sort_keys=True).encode())


def _plain(value: Any) -> Any:
    """Return the value of an HDF5 attribute in types that JSON can hold."""
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
