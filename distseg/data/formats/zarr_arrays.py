"""Read boxes of untrusted zarr arrays, after a check of their metadata.

zarr decodes the chunks. The metadata must say that the array holds numbers, and may name only the
codecs of a fixed list, because some codecs of zarr run code from the file (pickle). Chunks are read
one after another, so memory holds one chunk besides the box.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from distseg.data.formats.plausible import check_memory
from distseg.data.formats.zarr_packed import Packing, Shard, packing_of, unpacks_to_more
from distseg.data.packages import optional

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_MOST_JSON = 1 << 26  # bytes of metadata that are read
_NUMBERS = re.compile(r"[<>|][biuf](1|2|4|8)")
_TYPES = {
    "bool": "?",
    **{f"int{8 * size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": f"u{size}" for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"f{size}" for size in (2, 4, 8)},
}
# Codecs that only compute on bytes and numbers.
_CODECS = frozenset(
    "blosc zstd gzip zlib bz2 lzma lz4 delta shuffle packbits bitround quantize fixedscaleoffset "
    "crc32 crc32c adler32 fletcher32".split()
)
_CODECS_V3 = frozenset("bytes transpose blosc zstd gzip crc32c sharding_indexed".split())
_SHARDS = "sharding_indexed"


@dataclass(frozen=True)
class Stored:
    """Layout of a zarr array on the disk, from its metadata.

    Attributes:
        folder: the array's folder.
        version: the version of zarr, 2 or 3.
        shape: the shape of the array.
        dtype: the dtype of its numbers.
        chunk: the shape of the part of the array that one file holds: a chunk, or a shard, which
            consists of several chunks.
        decoded: the shape of the part that can only be decoded as a whole: a chunk.
        fill: the value of chunks that have no file.
        prefix: the beginning of the name of a chunk's file.
        separator: the text between the chunk's indices in the name of its file.
        packing: how the bytes of a file are compressed.
    """

    folder: Path
    version: int
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    decoded: tuple[int, ...]
    fill: Any
    prefix: str
    separator: str
    packing: Packing | Shard

    @property
    def chunks(self) -> int:
        """The number of files that hold the complete array: its chunks or shards."""
        return math.prod(-(-n // chunk) for n, chunk in zip(self.shape, self.chunk))

    def file(self, index: Sequence[int]) -> Path:
        """Return the path of the file that holds a chunk or shard.

        ``index`` is its number along each axis of the array.
        """
        return self.folder / f"{self.prefix}{self.separator.join(map(str, index))}"


def metadata_in(folder: Path, path: Path) -> tuple[int, dict | None, dict]:
    """Return the version of zarr, the metadata of an array, and the attributes of a zarr folder.

    Args:
        folder: the folder of a group or an array.
        path: the image's folder, for messages.

    Returns:
        The version, 2 or 3; the metadata, or None for a group; the attributes.

    Raises:
        ValueError: the folder has no metadata of zarr, or they are damaged.
    """
    if (folder / "zarr.json").is_file():
        about = _json(folder / "zarr.json")
        if about.get("zarr_format") != 3 or about.get("node_type") not in ("array", "group"):
            raise ValueError(
                f"{folder / 'zarr.json'} is not the metadata of a zarr v3 array or group: write "
                "the image again"
            )
        attributes = about.get("attributes", {})
        array = about if about["node_type"] == "array" else None
        return 3, array, attributes if isinstance(attributes, dict) else {}
    kinds = [name for name in (".zarray", ".zgroup") if (folder / name).is_file()]
    if not kinds:
        inside = "" if folder == path else f" in the folder {folder.relative_to(path)}"
        raise ValueError(
            f"{path} has no zarr.json, .zgroup or .zarray{inside}, so it is no zarr image or was "
            "not copied completely: copy it again, with its hidden files"
        )
    attributes = _json(folder / ".zattrs") if (folder / ".zattrs").is_file() else {}
    return 2, _json(folder / ".zarray") if kinds[0] == ".zarray" else None, attributes


def _json(file: Path) -> dict:
    """Return the JSON object in a file of metadata, as a dict.

    Raises:
        ValueError: the file is too large, or holds no JSON object.
    """
    if (size := file.stat().st_size) > _MOST_JSON:
        raise ValueError(
            f"{file} has {size} bytes, but metadata of zarr have at most {_MOST_JSON}: write the "
            "image again"
        )
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is damaged or cut off ({e}): copy the image again") from e
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object: copy the image again")
    return found


def stored_in(folder: Path, version: int, about: Mapping[str, Any], path: Path) -> Stored:
    """Return the layout of an array, after a check of its metadata.

    Args:
        folder: the array's folder.
        version: the version of zarr, 2 or 3.
        about: the array's metadata.
        path: the image's folder, for messages.

    Raises:
        ValueError: the metadata are damaged, the array holds no numbers, a codec is not one of
            those that are safe to use, or memory cannot hold a chunk.
    """
    try:
        found = (_stored_v3 if version == 3 else _stored_v2)(folder, about, path)
    except (AttributeError, KeyError, TypeError, IndexError, ZeroDivisionError) as e:
        raise ValueError(
            f"{folder} has metadata of zarr that are not complete or of a wrong form "
            f"({type(e).__name__}: {e}): copy the image again"
        ) from e
    for what, numbers in (("shape", found.shape), ("chunk", found.chunk), ("chunk", found.decoded)):
        if (
            len(numbers) != len(found.shape)
            or not all(type(n) is int for n in numbers)
            or min(numbers, default=1) < (what == "chunk")
        ):
            raise ValueError(
                f"{folder} has the {what} {_times(numbers)} for an array of {len(found.shape)} "
                "axes: write the image again"
            )
    check_memory(
        path,
        f"each chunk of {_times(found.decoded)} numbers is",
        math.prod(found.decoded) * found.dtype.itemsize,
    )
    return found


def _times(numbers: Sequence[Any]) -> str:
    return "x".join(map(str, numbers))


def _stored_v2(folder: Path, about: Mapping[str, Any], path: Path) -> Stored:
    """Return the layout of an array of zarr v2; arguments and errors as in :func:`stored_in`."""
    text = about["dtype"]
    if not isinstance(text, str) or not _NUMBERS.fullmatch(text):
        raise _no_numbers(text, path)
    codecs = [*(about.get("filters") or ()), about.get("compressor")]
    codecs = [codec for codec in codecs if codec is not None]
    for codec in codecs:
        _check_codec(codec["id"], codec["id"] in _CODECS, path)
    chunk, separator = tuple(about["chunks"]), about.get("dimension_separator", ".")
    _check_separator(separator, folder)
    return Stored(
        folder,
        2,
        tuple(about["shape"]),
        np.dtype(text),
        chunk,
        chunk,
        about.get("fill_value"),
        "",
        separator,
        packing_of([(codec["id"], codec) for codec in codecs], path),
    )


def _stored_v3(folder: Path, about: Mapping[str, Any], path: Path) -> Stored:
    """Return the layout of an array of zarr v3; arguments and errors as in :func:`stored_in`."""
    text = about["data_type"]
    if not isinstance(text, str) or text not in _TYPES:
        raise _no_numbers(text, path)
    grid, keys = about["chunk_grid"], about["chunk_key_encoding"]
    if grid["name"] != "regular" or about.get("storage_transformers"):
        raise ValueError(
            f"{folder} has a chunk grid or a storage transformer that distseg does not read: write "
            "the image with a regular grid and without transformers"
        )
    if keys["name"] not in ("default", "v2"):
        raise ValueError(
            f"{folder} has the chunk key encoding {str(keys['name'])[:50]!r}, but distseg reads "
            "'default' and 'v2': write the image again"
        )
    plain = keys["name"] == "v2"
    separator = (keys.get("configuration") or {}).get("separator", "." if plain else "/")
    _check_separator(separator, folder)
    chunk = decoded = tuple(grid["configuration"]["chunk_shape"])
    codecs = about["codecs"]
    _check_codecs(codecs, path)
    packing = _packing_v3(codecs, chunk, path)
    while len(codecs) == 1 and codecs[0]["name"] == _SHARDS:  # its chunks are read one by one
        decoded = tuple(codecs[0]["configuration"]["chunk_shape"])
        codecs = codecs[0]["configuration"]["codecs"]
    return Stored(
        folder,
        3,
        tuple(about["shape"]),
        np.dtype(_TYPES[text]),
        chunk,
        decoded,
        about.get("fill_value"),
        "" if plain else f"c{separator}",
        separator,
        packing,
    )


def _packing_v3(
    codecs: Sequence[Mapping[str, Any]], chunk: tuple[int, ...], path: Path
) -> Packing | Shard:
    """Return how the bytes of a chunk or shard are compressed, from its codecs.

    Args:
        codecs: the codecs in the metadata of zarr v3.
        chunk: the shape of the chunk or shard.
        path: the image's folder, for messages.

    Raises:
        ValueError: the size of a chunk cannot be checked before it is decoded.
    """
    names = [codec["name"] for codec in codecs]
    if _SHARDS not in names:
        return packing_of(
            [
                (str(name).removeprefix("numcodecs."), codec.get("configuration") or {})
                for name, codec in zip(names, codecs)
            ],
            path,
        )
    about = codecs[-1].get("configuration") or {}
    index = [codec["name"] for codec in about.get("index_codecs", ())]
    if names.index(_SHARDS) < len(names) - 1 or index not in (["bytes"], ["bytes", "crc32c"]):
        raise ValueError(
            f"{path} has shards whose codecs are {', '.join(names)}, and {', '.join(index)} for "
            "the index, but shards must be the last codec, and their index must not be packed: "
            "write the image again"
        )
    inner = tuple(about["chunk_shape"])
    big = (about["index_codecs"][0].get("configuration") or {}).get("endian") == "big"
    return Shard(
        math.prod(n // m for n, m in zip(chunk, inner)),
        about.get("index_location", "end") == "start",
        ">" if big else "<",
        4 * (len(index) - 1),
        _packing_v3(about["codecs"], inner, path),
    )


def _check_separator(separator: Any, folder: Path) -> None:
    if separator not in (".", "/"):
        raise ValueError(
            f"{folder} separates the indices of chunks by {str(separator)[:50]!r}, but zarr only "
            "by '.' or '/': write the image again"
        )


def _check_codecs(codecs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Refuse an array of zarr v3 with a codec that is not in the list of safe codecs.

    The codecs inside shards are checked too.
    """
    for codec in codecs:
        name = codec["name"]
        known = name in _CODECS_V3 or str(name).removeprefix("numcodecs.") in _CODECS
        _check_codec(name, known, path)
        if name == _SHARDS:
            inner = codec["configuration"]
            _check_codecs([*inner["codecs"], *inner["index_codecs"]], path)


def _check_codec(name: Any, known: bool, path: Path) -> None:
    if not known:
        raise ValueError(
            f"{path} has chunks in the codec {str(name)[:50]!r}, which distseg does not decode, "
            "because it is unknown or could run code from the file: write the image with blosc, "
            "zstd or gzip"
        )


def _no_numbers(text: Any, path: Path) -> ValueError:
    return ValueError(
        f"{path} holds an array of {str(text):.50}, but pixels are whole or real numbers: convert "
        "it"
    )


def count_chunks(stored: Stored) -> int:
    """Return how many files with chunks the folder of an array holds.

    Raises:
        ValueError: the folder holds a link, a pipe or a device, which could lead anywhere.
    """
    count, folders = 0, [os.fspath(stored.folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise ValueError(
                        f"{entry.path} is a link or a device, but chunks must be plain files: copy "
                        "the image with the files to which its links lead"
                    )
                else:
                    count += entry.name not in _METADATA
    return count


class ChunkedArray:
    """Zarr array that is read chunk by chunk.

    Args:
        stored: the layout of the array.
        path: the image's folder, for messages.

    Raises:
        ValueError: zarr is not installed, or cannot open the array.
    """

    def __init__(self, stored: Stored, path: Path):
        self._stored, self._path = stored, path
        self._checked: set[tuple[int, ...]] = set()  # indices of chunks that may be decoded
        zarr = imported_zarr(path)
        with warnings.catch_warnings():  # on codecs that other programs may not know
            warnings.simplefilter("ignore")
            store = zarr.storage.LocalStore(stored.folder, read_only=True)
            self._array = zarr.open_array(store, mode="r", zarr_format=stored.version)

    def read(self, part: Sequence[slice]) -> np.ndarray:
        """Return a part of the array, given by a slice with start and stop for each axis.

        Raises:
            ValueError: a chunk is damaged; the message names its file.
        """
        found = np.empty([at.stop - at.start for at in part], self._stored.dtype)
        for index, inside in self._pieces(part):
            self._check(index)
            here = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inside, part))
            try:
                found[here] = self._array[inside]
            except MemoryError:
                raise
            except Exception as e:
                raise ValueError(
                    f"{self._path} has a damaged chunk, {self._stored.file(index)} "
                    f"({str(e) or type(e).__name__}): copy it again"
                ) from e
        return found

    def _check(self, index: tuple[int, ...]) -> None:
        """Refuse a chunk that would unpack to far more bytes than it should, so that memory fills.

        Args:
            index: the number of the chunk or shard along each axis of the array.

        Raises:
            ValueError: the chunk unpacks to far more bytes than its shape and dtype need.
        """
        file = self._stored.file(index)
        if index in self._checked or not file.is_file():
            return
        numbers, large = math.prod(self._stored.decoded), False
        if file.stat().st_size:
            with (
                open(file, "rb") as opened,
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                large = unpacks_to_more(view, self._stored.packing, numbers)
        if large:
            raise ValueError(
                f"{self._path} has a chunk, {file}, that holds far more than its "
                f"{_times(self._stored.decoded)} numbers of {self._stored.dtype}, so it is damaged "
                "or was made to fill the memory: copy the image again, or write it again"
            )
        self._checked.add(index)

    def _pieces(self, part: Sequence[slice]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield the index of each chunk that a part of the array touches, and their overlap.

        The index is the chunk's number along each axis. The overlap is one slice per axis, in
        coordinates of the whole array.
        """
        ranges = [range(at.start // n, -(-at.stop // n)) for at, n in zip(part, self._stored.chunk)]
        for index in product(*ranges):
            yield (
                index,
                tuple(
                    slice(max(at.start, i * n), min(at.stop, (i + 1) * n))
                    for i, n, at in zip(index, self._stored.chunk, part)
                ),
            )


def imported_zarr(what: Path | str) -> Any:
    """Return the module zarr, which is an optional package.

    Args:
        what: the file, or the task, that needs zarr, for the message.

    Raises:
        ValueError: zarr is not installed, or older than 3.
    """
    return optional(what, "zarr", "abc", "storage")  # zarr 2 has no zarr.abc
